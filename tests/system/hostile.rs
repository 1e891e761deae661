//! Misbehaving peers, networks and devices: deadlines, hashes and validation.

use bytes::Bytes;
use lagoon_instance::{Effect, Event, PeerKey, RemotePolicy};
use lagoon_protocol::{BulkFrame, LeaseRun, PartialsFrame, RefuseCode, Route, StepTicket, TicketSeq};
use lagoon_tests::cluster::check::error_of;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Fault, PoolSpec, Spec, World, greedy};
use lagoon_types::{DType, Epoch, FinishReason, LeaseId, RequestError, SamplingParams, SeqId, StepId};

fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", 4)
}

fn run_to_token(world: &mut World, request: usize, tokens: usize) {
    world.run_until(|w| w.requests[request].tokens.len() >= tokens || w.requests[request].is_over());
    assert!(!world.requests[request].is_over(), "{:?}", world.requests[request].end);
}

/// A creditor falls silent for longer than a step's deadline, and than a lease's life: rows without remote KV go on
/// meanwhile, and the lost range is recomputed.
#[test]
fn a_silent_creditor_times_out_and_its_kv_is_recomputed() {
    for (silence_ms, remote) in
        [(12_000, RemotePolicy::Ship), (12_000, RemotePolicy::Fetch), (40_000, RemotePolicy::Ship)]
    {
        let spec = |blocks| Spec { remote, ..Spec::cpu(blocks) };
        let mut world = World::pool(pool(), None, &[spec(20), spec(20), spec(20)]);
        // It has its 16 blocks from the start; the other request gets the last 4.
        let local = world.submit(0, greedy(prompt(100, 61, 128), 4));
        world.submit(0, greedy(prompt(101, 80, 128), 12));
        world.run_until(|w| w.sent("query").0 + w.sent("read").0 > 0);
        assert!(!world.requests[local].is_over());
        let creditor = (1..3).max_by_key(|n| world.live(*n).status().blocks_lent).unwrap();
        world.stall(0, creditor, silence_ms);
        let start_ms = world.now_ms();
        world.run_until(|w| w.requests[local].is_over());
        assert!(world.now_ms() < start_ms + 1_000, "local rows waited for a creditor");
        world.run();
        assert!(world.now_ms() >= start_ms + 9_000 && world.live(0).status().recoveries > 0);
        assert_equals_single(&format!("{silence_ms} ms, {remote:?}"), &world, &pool());
        world.run_for(silence_ms + 16_000);
        world.check_empty();
    }
}

#[test]
fn damaged_kv_is_noticed_and_computed_again() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(20)]);
    let request = world.submit(0, greedy(prompt(103, 80, 128), 6));
    world.run_until(|w| w.sent("write").0 > 2);
    world.corrupt_next_write();
    run_to_token(&mut world, request, 1);
    assert_eq!((world.live(0).status().recoveries, world.sent("bulk refused").0 > 0), (1, true));
    world.run();
    assert_equals_single("damaged", &world, &pool());
    world.check_empty();
}

#[test]
fn a_failing_device_fails_what_ran_on_it() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(24)]);
    // The creditor's device fails a query: the debtor recomputes.
    let request = world.submit(0, greedy(prompt(104, 80, 128), 8));
    let beside = world.submit(1, greedy(prompt(105, 8, 128), 8));
    run_to_token(&mut world, request, 2);
    world.break_device(1, Fault::RemoteRequest);
    world.run();
    assert_eq!(world.live(0).status().recoveries, 1);
    assert!(world.requests[beside].end.as_ref().is_some_and(Result::is_ok));
    assert_equals_single("a remote request's failure", &world, &pool());
    // The debtor's own device fails: the request ends in an error.
    let failed = world.submit(0, greedy(prompt(106, 80, 128), 8));
    run_to_token(&mut world, failed, 2);
    world.break_device(0, Fault::Step);
    world.run_until(|w| w.requests[failed].is_over());
    assert!(
        matches!(error_of(&world.requests[failed]), RequestError::Unavailable(text) if text.contains("pulled out"))
    );
    world.check_empty();
}

/// A step that one creditor refuses is aborted for all of its sequences. Those without losses continue: their writes
/// to other creditors in the aborted step are not repeated, and nothing is recomputed.
#[test]
fn an_aborted_step_costs_its_other_sequences_nothing() {
    for turns in 0..6 {
        let debtor = Spec { step_rows: 20, ..Spec::cpu(4) };
        let mut world = World::pool(pool(), None, &[debtor, Spec::cpu(16), Spec::cpu(20)]);
        // Blocks of the first are on node 2, which has more to lend; those of the second on node 1.
        let first = world.submit(0, greedy(prompt(110, 74, 128), 5));
        world.run_until(|w| w.live(2).status().blocks_lent > 0);
        let second = world.submit(0, greedy(prompt(111, 60, 128), 5));
        run_to_token(&mut world, first, 1);
        assert!(world.live(1).status().blocks_lent > 0, "{}", world.describe());
        (0..turns).for_each(|_| world.step());
        world.break_device(2, Fault::RemoteRequest);
        world.run();
        assert!(world.requests[second].end.is_some());
        assert_eq!(world.live(0).status().recoveries, 1, "after {turns} steps: {}", world.describe());
        assert_equals_single("an aborted step", &world, &pool());
        world.check_empty();
    }
}

/// The code of the refusal in `effects`, if any.
fn refused(effects: Vec<Effect>) -> Option<RefuseCode> {
    effects.into_iter().find_map(|e| match e {
        Effect::Partials { frame: PartialsFrame::Refused { code, .. }, .. }
        | Effect::Bulk { frame: BulkFrame::Refused { code, .. }, .. } => Some(code),
        _ => None,
    })
}

/// A pool in which node 1 lends to node 0, the lease, and its end in tokens. Node 0 is peer 1 of node 1.
fn lending() -> (World, LeaseRun, u32) {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(20)]);
    let request = world.submit(0, greedy(prompt(107, 80, 128), 8));
    run_to_token(&mut world, request, 2);
    let (_, lease, epoch, _, end) = world.live(1).rmanager().creditor.iter().next().unwrap();
    (world, LeaseRun { lease, epoch, offset: 0, len: 4, first_pos: 0 }, end * 4)
}

/// Checks that the running request is served normally afterwards.
fn goes_on(mut world: World) {
    world.run();
    assert_equals_single("beside bad frames", &world, &pool());
    world.run_for(25_000);
    world.check_empty();
}

#[test]
fn bad_tickets_and_queries_are_refused() {
    let (mut world, run, end) = lending();
    let peer = PeerKey(1);
    let step = StepId(1 << 40);
    let seq = |runs: Vec<LeaseRun>| TicketSeq { seq: SeqId(1), rows: 1, pos0: 80, runs };
    let ticket = |seqs| {
        PartialsFrame::Ticket(StepTicket { step, deadline_ms: 1_000, dtype: DType::F32, route: Route::Direct, seqs })
    };
    let later = LeaseRun { offset: 4, first_pos: 4, ..run };
    let bad_tickets = [
        (vec![seq(vec![LeaseRun { lease: LeaseId(1), ..run }])], RefuseCode::UnknownLease),
        (vec![seq(vec![LeaseRun { epoch: Epoch(run.epoch.0 ^ 1), ..run }])], RefuseCode::StaleEpoch),
        (vec![seq(vec![LeaseRun { offset: end - 1, len: 2, ..run }])], RefuseCode::OutOfRange),
        (vec![seq(vec![LeaseRun { offset: u32::MAX - 1, ..run }])], RefuseCode::OutOfRange),
        (vec![seq(vec![LeaseRun { len: 0, ..run }])], RefuseCode::Malformed),
        (vec![seq(vec![later, run])], RefuseCode::Malformed),
        (vec![TicketSeq { rows: 9_000, ..seq(vec![run]) }], RefuseCode::Malformed),
        (Vec::new(), RefuseCode::Malformed),
    ];
    for (seqs, code) in bad_tickets {
        let effects = world.inject(1, Event::Partials { peer, frame: ticket(seqs.clone()) });
        assert_eq!(refused(effects), Some(code), "{seqs:?}");
    }
    // A query of another size than its ticket, one of a layer that does not exist, one without a ticket.
    let query =
        |layer, rows: u32, bytes| PartialsFrame::Query { step, layer, rows, queries: Bytes::from(vec![0; bytes]) };
    for (layer, rows, bytes) in [(0, 1, 8), (0, 2, 512), (9, 1, 256)] {
        assert_eq!(refused(world.inject(1, Event::Partials { peer, frame: ticket(vec![seq(vec![run])]) })), None);
        let effects = world.inject(1, Event::Partials { peer, frame: query(layer, rows, bytes) });
        assert_eq!(refused(effects), Some(RefuseCode::Malformed));
    }
    assert!(world.inject(1, Event::Partials { peer, frame: query(0, 1, 256) }).is_empty());
    // A stranger is asked to introduce itself.
    let effects = world.inject(1, Event::Partials { peer: PeerKey(99), frame: ticket(vec![seq(vec![run])]) });
    assert_eq!(refused(effects), Some(RefuseCode::UnknownLease));
    goes_on(world);
}

#[test]
fn bad_writes_seals_and_reads_are_refused() {
    let (mut world, LeaseRun { lease, epoch, .. }, end) = lending();
    let peer = PeerKey(1);
    let write = |lease, epoch, offset, tokens: u32, bytes: usize| BulkFrame::Write {
        lease,
        epoch,
        layer: 0,
        offset,
        tokens,
        kv: Bytes::from(vec![0; bytes]),
    };
    let read = |layer, offset| BulkFrame::Read { id: 9, lease, epoch, layer, offset, tokens: 1, deadline_ms: 10 };
    // A wrong offset, a wrong length, a lease of another peer, a wrong epoch.
    let bad = [
        (write(lease, epoch, 0, 1, 128), RefuseCode::OutOfRange),
        (write(lease, epoch, end, 1, 128), RefuseCode::OutOfRange),
        (write(lease, epoch, 0, 2, 128), RefuseCode::Malformed),
        (write(LeaseId(3), epoch, 0, 1, 128), RefuseCode::UnknownLease),
        (write(lease, Epoch(1), 0, 1, 128), RefuseCode::StaleEpoch),
        (BulkFrame::Seal { lease, epoch, entry: 0, hash: [0; 32] }, RefuseCode::HashMismatch),
        (read(5, 0), RefuseCode::Malformed),
        (read(0, end), RefuseCode::OutOfRange),
    ];
    for (frame, code) in bad {
        let text = format!("{frame:?}");
        assert_eq!(refused(world.inject(1, Event::Bulk { peer, frame })), Some(code), "{text}");
    }
    goes_on(world);
}

/// A frame that finds a full queue is dropped, and the connection stays: work that depended on the frame is
/// recomputed over the same connection.
#[test]
fn a_dropped_frame_is_recovered_from() {
    let kinds = [
        (0, "ticket"),
        (0, "query"),
        (1, "partial"),
        (0, "write"),
        (0, "seal"),
        (0, "read"),
        (1, "data"),
        (0, "control"),
        (1, "control"),
    ];
    for (node, kind) in kinds {
        let remote = if kind == "read" || kind == "data" { RemotePolicy::Fetch } else { RemotePolicy::Ship };
        let mut world = World::pool(pool(), None, &[Spec { remote, ..Spec::cpu(8) }, Spec::cpu(30)]);
        let request = world.submit(0, greedy(prompt(112, 80, 128), 16));
        world.run_until(|w| w.sent("write").0 > 4);
        world.fill_queue(node, kind);
        world.run();
        assert!(world.requests[request].end.is_some());
        assert_equals_single(&format!("{kind} of node {node} is dropped"), &world, &pool());
        world.run_for(16_000);
        world.check_empty();
        let failed = world.live(0).status().recoveries;
        assert!(failed <= 1 && (kind == "control" || failed == 1), "{kind} of node {node}: {failed} recoveries");
        // The two peers are still connected.
        world.submit(0, greedy(prompt(113, 80, 128), 2));
        let before = world.now_ms();
        world.run();
        assert!(world.now_ms() < before + 1_000, "{kind}: the peers do not find each other");
    }
}

/// Sampled tokens do not change: a draw depends on the seed and the token's index, not on recomputation or place.
#[test]
fn sampling_survives_recovery_and_ends_at_stop_ids() {
    let sampling = SamplingParams { temperature: 0.9, top_p: 0.95, seed: 11, ..SamplingParams::default() };
    let mut request = lagoon_types::GenerateRequest { sampling, ..greedy(prompt(108, 80, 128), 12) };
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(20), Spec::cpu(20)]);
    let first = world.submit(0, request.clone());
    run_to_token(&mut world, first, 5);
    let creditor = (1..3).max_by_key(|n| world.live(*n).status().blocks_lent).unwrap();
    world.cut(0, creditor, 100);
    world.run();
    assert_equals_single("sampled", &world, &pool());
    let output = world.requests[first].tokens.clone();
    let stop = output[6];
    request.stop_ids = vec![stop];
    let stopped = world.submit(0, request);
    world.run();
    let upto = output.iter().position(|t| *t == stop).unwrap();
    assert_eq!(world.requests[stopped].tokens, output[..=upto]);
    assert_eq!(world.requests[stopped].end, Some(Ok(FinishReason::Stop)));
    world.check_empty();
}
