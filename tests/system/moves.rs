//! Blocks move while their sequences decode: to creditors, home, between creditors, and back when a creditor recalls
//! them. A pool's answers equal a single instance's before, during and after a move; no end of a move leaks memory.

use lagoon_instance::{MoveStatus, RemotePolicy};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Rng, Spec, World, greedy};
use std::collections::BTreeMap;

fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", 4)
}

fn moves(world: &World, node: usize) -> MoveStatus {
    world.live(node).status().moves
}

/// Number of blocks of a request at each node, its own included.
pub(crate) fn placed(world: &World, request: usize) -> BTreeMap<usize, u32> {
    let node = world.requests[request].node;
    let status = world.live(node).status();
    let seq = status.sequences.iter().find(|s| s.seq.0 == request as u64 + 1).unwrap();
    let at = |id| world.nodes().find(|n| world.id(*n) == Some(id)).unwrap();
    let mut all: BTreeMap<usize, u32> = seq.remote_blocks.iter().map(|(id, n)| (at(*id), *n)).collect();
    all.insert(node, seq.local_blocks);
    all
}

pub(crate) fn run_to_token(world: &mut World, request: usize, tokens: usize) {
    world.run_until(|w| w.requests[request].tokens.len() >= tokens || w.requests[request].is_over());
    assert!(!world.requests[request].is_over(), "{:?}", world.requests[request].end);
}

/// Orders a move and runs until it is over.
pub(crate) fn moved(world: &mut World, request: usize, blocks: u32, source: usize, target: usize) {
    moved_from(world, request, None, blocks, source, target);
}

/// As [`moved`], for blocks from `first` on.
fn moved_from(world: &mut World, request: usize, first: Option<u32>, blocks: u32, source: usize, target: usize) {
    let node = world.requests[request].node;
    world.order_from(request, first, blocks, source, target);
    world.run_until(|w| moves(w, node).in_progress == 0);
    assert!(!world.requests[request].is_over(), "it ended before its blocks had moved");
}

#[test]
fn blocks_move_in_every_direction_while_their_sequence_decodes() {
    for remote in [RemotePolicy::Ship, RemotePolicy::Fetch] {
        let spec = |blocks| Spec { remote, ..Spec::cpu(blocks) };
        let mut world = World::pool(pool(), None, &[spec(40), spec(30), spec(30)]);
        let request = world.submit(0, greedy(prompt(200, 50, 128), 60));
        let beside = world.submit(0, greedy(prompt(201, 9, 128), 60));
        run_to_token(&mut world, request, 2);
        moved(&mut world, request, 6, 0, 1);
        assert_eq!(placed(&world, request)[&1], 6);
        moved(&mut world, request, 4, 1, 2);
        assert_eq!((placed(&world, request)[&1], placed(&world, request)[&2]), (2, 4));
        // The newest of the four come home; the middle of the sequence stays away.
        moved(&mut world, request, 2, 2, 0);
        moved(&mut world, request, 1, 0, 2);
        assert_eq!((placed(&world, request)[&1], placed(&world, request)[&2]), (2, 3));
        moved(&mut world, request, 9, 1, 0);
        moved(&mut world, request, 9, 2, 0);
        assert_eq!(placed(&world, request).len(), 1, "all of it is home");
        let status = moves(&world, 0);
        assert_eq!((status.blocks_out, status.blocks_home, status.blocks_between), (7, 7, 4));
        assert_eq!((status.refused, status.damaged), (0, 0));
        world.run();
        let diff = assert_equals_single(&format!("{remote:?}"), &world, &pool());
        println!("largest difference {diff:e}");
        assert!(!world.requests[beside].is_over() || world.requests[beside].tokens.len() == 60);
        world.check_empty();
    }
}

/// Blocks leave the middle of a run, at the debtor, at a creditor on their way home and on their way to another
/// creditor: one run becomes several, and ALiBi biases depend on their positions.
#[test]
fn blocks_leave_the_middle_of_a_run() {
    let whole = ["llama3_old", "mpt", "gpt_oss", "deepseek_v3"].map(|name| PoolSpec::golden(name, 4));
    let split = ["gpt_oss", "gemma3"].map(|name| PoolSpec { split: true, ..PoolSpec::golden(name, 4) });
    for pool in whole.into_iter().chain(split) {
        for remote in [RemotePolicy::Ship, RemotePolicy::Fetch] {
            let spec = |blocks| Spec { remote, ..Spec::cpu(blocks) };
            let mut world = World::pool(pool.clone(), None, &[spec(40), spec(30), spec(30)]);
            let request = world.submit(0, greedy(prompt(215, 60, 128), 60));
            run_to_token(&mut world, request, 2);
            // Of 15 blocks, 3 to 11 are at one creditor.
            moved_from(&mut world, request, Some(3), 8, 0, 1);
            // 5 and 6 come home; 8 moves on to the other creditor.
            moved_from(&mut world, request, Some(5), 2, 1, 0);
            assert_eq!(placed(&world, request)[&1], 6);
            moved_from(&mut world, request, Some(8), 1, 1, 2);
            assert_eq!((placed(&world, request)[&1], placed(&world, request)[&2]), (5, 1));
            // Block 6, which came home into the gap, and block 1, from before it, move to the other creditor.
            moved_from(&mut world, request, Some(6), 1, 0, 2);
            moved_from(&mut world, request, Some(1), 1, 0, 2);
            assert_eq!((placed(&world, request)[&1], placed(&world, request)[&2]), (5, 3));
            let tokens = world.requests[request].tokens.len();
            run_to_token(&mut world, request, tokens + 8);
            // From 9 on, two blocks are left there.
            moved_from(&mut world, request, Some(9), 9, 1, 0);
            moved(&mut world, request, 9, 2, 0);
            assert_eq!((placed(&world, request)[&1], placed(&world, request).get(&2)), (3, None));
            let status = moves(&world, 0);
            assert_eq!((status.blocks_out, status.blocks_home, status.blocks_between), (10, 7, 1), "{status:?}");
            assert_eq!(
                (status.refused, status.damaged, status.cut_short),
                (0, 0, 2),
                "twice there were fewer than nine"
            );
            world.run();
            let of = world.live(0).status();
            let again = (of.recomputed_tokens, of.warm_up_tokens, of.preempted_tokens);
            assert_eq!(again, (0, 0, 0), "a move computes nothing again: {of:?}");
            assert_equals_single(&format!("{}, {remote:?}", pool.dir.display()), &world, &pool);
            world.check_empty();
        }
    }
}

/// As above under a sliding window, which passes over the gaps meanwhile.
#[test]
fn blocks_leave_the_middle_of_a_run_under_a_window() {
    let pool = PoolSpec::golden("mistral_window", 2);
    for remote in [RemotePolicy::Ship, RemotePolicy::Fetch] {
        let spec = || Spec { remote, ..Spec::cpu(60) };
        let mut world = World::pool(pool.clone(), None, &[spec(), spec()]);
        let request = world.submit(0, greedy(prompt(216, 40, 144), 100));
        let mut split = 0;
        while !world.requests[request].is_over() && world.requests[request].tokens.len() < 80 {
            let tokens = world.requests[request].tokens.len();
            run_to_token(&mut world, request, tokens + 3);
            // The oldest block that is completely visible, now and two tokens later.
            let first = |w: &World| (40 + w.requests[request].tokens.len() as u32 + 2 - 16) / 2 + 1;
            let run = first(&world);
            moved_from(&mut world, request, Some(run), 4, 0, 1);
            let (there, home) = (placed(&world, request).get(&1).copied(), moves(&world, 0).blocks_home);
            let middle = first(&world) + 1;
            moved_from(&mut world, request, Some(middle), 1, 1, 0);
            // One came home from between blocks that stayed visible.
            let came = moves(&world, 0).blocks_home > home;
            let seen = run..run + 4;
            split += u32::from(there == Some(4) && came && seen.contains(&(middle + 1)) && first(&world) < middle);
            moved(&mut world, request, 9, 1, 0);
        }
        assert!(split >= 3, "{split} runs were split within the window: {:?}", moves(&world, 0));
        world.run();
        assert_equals_single(&format!("window, {remote:?}"), &world, &pool);
        world.check_empty();
    }
}

#[test]
fn a_move_goes_on_beside_a_long_prompt() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(60), Spec::cpu(30)]);
    let request = world.submit(0, greedy(prompt(202, 40, 128), 40));
    run_to_token(&mut world, request, 2);
    let long = world.submit(0, greedy(prompt(203, 110, 128), 4));
    world.order(request, 8, 0, 1);
    world.run_until(|w| moves(w, 0).in_progress == 0);
    assert!(!world.requests[long].is_over(), "the prompt was over first");
    assert_eq!(placed(&world, request)[&1], 8);
    world.run();
    assert_equals_single("prefill", &world, &pool());
    world.check_empty();
}

#[test]
fn moves_under_a_window_end_where_it_passes() {
    let pool = PoolSpec::golden("mistral_window", 4);
    for remote in [RemotePolicy::Ship, RemotePolicy::Fetch] {
        let spec = Spec { remote, ..Spec::cpu(40) };
        let mut world = World::pool(pool.clone(), None, &[spec.clone(), spec.clone(), spec]);
        let request = world.submit(0, greedy(prompt(204, 40, 144), 80));
        let mut rng = Rng::new(7);
        while !world.requests[request].is_over() {
            let tokens = world.requests[request].tokens.len() + 1;
            world.run_until(|w| w.requests[request].tokens.len() >= tokens || w.requests[request].is_over());
            let (source, target) = (rng.below(3) as usize, rng.below(3) as usize);
            if !world.requests[request].is_over() {
                world.order(request, 1 + rng.below(3) as u32, source, target);
            }
        }
        let status = moves(&world, 0);
        assert!(status.blocks_out > 0 && status.blocks_home > 0 && status.blocks_between > 0, "{status:?}");
        assert_equals_single(&format!("{remote:?}"), &world, &pool);
        world.check_empty();
    }
}

#[test]
fn a_target_without_room_refuses_and_nothing_changes() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(40), Spec { lend_blocks_max: 0, ..Spec::cpu(30) }]);
    let request = world.submit(0, greedy(prompt(205, 40, 128), 20));
    run_to_token(&mut world, request, 2);
    moved(&mut world, request, 4, 0, 1);
    assert_eq!((moves(&world, 0).refused, placed(&world, request).len()), (1, 1));
    world.run();
    assert_equals_single("refused", &world, &pool());
    world.check_empty();
}

#[test]
fn a_damaged_copy_is_not_switched_to() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(40), Spec::cpu(30)]);
    let request = world.submit(0, greedy(prompt(206, 40, 128), 20));
    run_to_token(&mut world, request, 2);
    world.corrupt_next_write();
    moved(&mut world, request, 1, 0, 1);
    assert_eq!((moves(&world, 0).blocks_out, moves(&world, 0).cut_short), (0, 1));
    assert_eq!(placed(&world, request).len(), 1);
    moved(&mut world, request, 3, 0, 1);
    assert_eq!(placed(&world, request)[&1], 3);
    assert_eq!(world.live(0).status().recoveries, 0);
    world.run();
    assert_equals_single("damaged", &world, &pool());
    world.check_empty();
}

/// KV that comes home, or passes through to another creditor, is compared with the hash of its write.
#[test]
fn a_creditor_whose_kv_is_not_what_was_written_there_is_not_believed() {
    for target in [0, 2] {
        let mut world = World::pool(pool(), None, &[Spec::cpu(40), Spec::cpu(30), Spec::cpu(30)]);
        let request = world.submit(0, greedy(prompt(212, 40, 128), 30));
        run_to_token(&mut world, request, 2);
        moved(&mut world, request, 4, 0, 1);
        world.corrupt_next_data();
        moved(&mut world, request, 2, 1, target);
        let status = world.live(0).status();
        assert_eq!((status.moves.damaged, status.recoveries), (1, 1), "to {target}");
        world.run();
        assert_equals_single("damaged source", &world, &pool());
        world.check_empty();
    }
}

/// If the debtor has no room and no one else lends, the creditor revokes the blocks that its own sequence needs.
#[test]
fn a_creditor_revokes_blocks_that_no_debtor_returns() {
    for name in ["llama3_old", "mpt", "gpt_oss", "deepseek_v3"] {
        let pool = PoolSpec::golden(name, 4);
        let mut world = World::pool(pool.clone(), None, &[Spec::cpu(12), Spec::cpu(20)]);
        let remote_request = world.submit(0, greedy(prompt(213, 80, 128), 4));
        run_to_token(&mut world, remote_request, 1);
        assert_eq!(placed(&world, remote_request)[&1], 9);
        world.stall(0, 1, 5_000);
        let own = world.submit(1, greedy(prompt(214, 40, 128), 24));
        world.run();
        let (debtor, creditor) = (world.live(0).status(), world.live(1).status());
        assert!(debtor.moves.recalls_received > 0 && creditor.moves.blocks_revoked > 0, "{debtor:?} {creditor:?}");
        assert_eq!(creditor.preemptions, 0, "growth goes before lending");
        // A step in flight to the revoked entries is refused, which may count as a further loss.
        assert!(debtor.recoveries <= 1 && debtor.recomputed_tokens > 0, "{debtor:?}");
        assert_eq!(world.requests[own].tokens.len(), 24);
        assert_equals_single("taken", &world, &pool);
        world.check_empty();
    }
}

/// A revocation lost with a broken connection is repeated on the next one.
#[test]
fn a_revocation_is_repeated_after_a_reconnect() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(12), Spec::cpu(20)]);
    let remote_request = world.submit(0, greedy(prompt(213, 80, 128), 4));
    run_to_token(&mut world, remote_request, 1);
    world.stall(0, 1, 5_000);
    world.submit(1, greedy(prompt(214, 40, 128), 24));
    world.run_until(|w| moves(w, 1).blocks_revoked > 0);
    let (reported, _) = world.sent("lease revoked");
    assert!(reported > 0);
    world.cut(0, 1, 300);
    world.run_until(|w| w.sent("lease revoked").0 > reported);
    world.run();
    assert_eq!(world.sent("lease revoked").0 % reported, 0, "all of it is reported again, each time");
    let (debtor, creditor) = (world.live(0).status(), world.live(1).status());
    assert!(debtor.recoveries <= 1 && debtor.recomputed_tokens > 0, "{debtor:?}");
    assert_eq!(creditor.preemptions, 0);
    assert_equals_single("reported again", &world, &pool());
    world.check_empty();
}

#[test]
fn a_move_that_ends_at_any_moment_leaks_nothing() {
    #[derive(Clone, Copy, Debug)]
    enum End {
        Cancel,
        KillSource,
        KillTarget,
        Cut,
    }
    for end in [End::Cancel, End::KillSource, End::KillTarget, End::Cut] {
        for steps in [0, 1, 2, 3, 5, 8, 12, 18, 26, 40] {
            let spec = Spec::cpu(40);
            let mut world = World::pool(pool(), None, &[spec.clone(), spec.clone(), spec]);
            let request = world.submit(0, greedy(prompt(207, 40, 128), 30));
            let other = world.submit(0, greedy(prompt(208, 12, 128), 30));
            run_to_token(&mut world, request, 2);
            moved(&mut world, request, 4, 0, 1);
            // From one creditor to another, and more from here.
            world.order(request, 3, 1, 2);
            world.order(request, 3, 0, 2);
            (0..steps).for_each(|_| world.step());
            match end {
                End::Cancel => world.cancel(request),
                End::KillSource => world.kill(1),
                End::KillTarget => world.kill(2),
                End::Cut => world.cut(0, 2, 400),
            }
            world.run();
            let what = format!("{end:?} after {steps} steps");
            assert!(world.requests[other].end.as_ref().is_some_and(Result::is_ok), "{what}");
            if !matches!(end, End::Cancel) {
                assert_equals_single(&what, &world, &pool());
            }
            world.run_for(16_000);
            world.check_empty();
        }
    }
}

/// A creditor recalls lent blocks when its own sequences grow, and nothing of the debtor's is recomputed.
#[test]
fn a_creditor_gets_its_blocks_back_to_grow() {
    for name in ["llama3_old", "mpt", "gpt_oss", "deepseek_v3"] {
        let pool = PoolSpec::golden(name, 4);
        let mut world = World::pool(pool.clone(), None, &[Spec::cpu(24), Spec::cpu(20)]);
        let first = world.submit(0, greedy(prompt(209, 40, 128), 4));
        let remote_request = world.submit(0, greedy(prompt(210, 80, 128), 30));
        run_to_token(&mut world, remote_request, 1);
        world.run_until(|w| w.requests[first].is_over());
        assert!(placed(&world, remote_request).get(&1).is_some_and(|n| *n > 4), "{:?}", placed(&world, remote_request));
        let own = world.submit(1, greedy(prompt(211, 40, 128), 20));
        world.run();
        let (debtor, creditor) = (moves(&world, 0), moves(&world, 1));
        assert!(debtor.recalls_received > 0 && creditor.recalls_met > 0, "{debtor:?} {creditor:?}");
        assert!(debtor.blocks_home > 0 && creditor.blocks_revoked == 0, "{debtor:?} {creditor:?}");
        assert_eq!(world.live(0).status().recoveries, 0);
        assert!(world.requests[own].tokens.len() == 20);
        assert_equals_single("recall", &world, &pool);
        world.check_empty();
    }
}

/// Random requests, moves, cuts and cancellations, delivered in random order.
#[test]
fn random_moves_equal_one_instance() {
    let mut total = MoveStatus::default();
    for seed in 0..14 {
        let mut rng = Rng::new(0x5eed_0000 + seed);
        let pool = PoolSpec::golden(["llama3_old", "mpt", "mistral_window", "gemma3"][seed as usize % 4], 4);
        let specs: Vec<Spec> = (0..3)
            .map(|_| Spec {
                remote: if rng.below(2) == 0 { RemotePolicy::Ship } else { RemotePolicy::Fetch },
                lend_reserve_blocks: rng.below(2) as u32,
                ..Spec::cpu(24 + rng.below(16) as u32)
            })
            .collect();
        let mut world = World::pool(pool.clone(), Some(seed), &specs);
        for i in 0..4 {
            let prompt = prompt(300 + seed * 10 + i, 10 + rng.below(50) as usize, 128);
            world.submit(rng.below(3) as usize, greedy(prompt, 10 + rng.below(40) as u32));
        }
        while !world.requests.iter().all(lagoon_tests::cluster::Log::is_over) {
            (0..rng.below(60)).for_each(|_| world.step());
            let request = rng.below(4) as usize;
            let (source, target) = (rng.below(3) as usize, rng.below(3) as usize);
            match rng.below(100) {
                0 if source != target => world.cut(source, target, 200),
                1 if seed % 4 == 1 && !world.requests[request].is_over() => world.cancel(request),
                _ if !world.requests[request].is_over() => {
                    let first = (rng.below(3) == 0).then(|| rng.below(14) as u32);
                    world.order_from(request, first, 1 + rng.below(6) as u32, source, target);
                }
                _ => {}
            }
        }
        if world.requests.iter().all(|r| !r.cancelled) {
            assert_equals_single(&format!("seed {seed}"), &world, &pool);
        }
        for node in 0..3 {
            let status = moves(&world, node);
            total.blocks_out += status.blocks_out;
            total.blocks_home += status.blocks_home;
            total.blocks_between += status.blocks_between;
            total.cut_short += status.cut_short;
            assert_eq!(status.damaged, 0);
        }
        world.run_for(16_000);
        world.check_empty();
    }
    println!("{total:?}");
    assert!(total.blocks_out > 40 && total.blocks_home > 20 && total.blocks_between > 10 && total.cut_short > 0);
}
