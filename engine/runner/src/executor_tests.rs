//! Peers do not wait for a device that has a whole step queued.

use super::*;
use crate::work::{PassError, RemotePart, RemoteWork, SampleSpec, SeqRows, Ship, ShipSegment, StepWork};
use bytes::Bytes;
use lagoon_backend::AttnRows;
use lagoon_backend::cpu::CpuDevice;
use lagoon_model::{Checkpoint, Weights};
use lagoon_pace::{PaceProfile, Paced};
use lagoon_types::{DType, InstanceId, KvDType, KvRun, KvSpace, SamplingParams, SeqId, StepId};
use std::path::Path;
use std::sync::Arc;

/// The bundled model on a device that takes weeks for a step, and next to no time for a peer's attention.
fn slow() -> Executor<Paced<CpuDevice>> {
    paced(1e12)
}

fn paced(weight_scale: f64) -> Executor<Paced<CpuDevice>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/passkey");
    let profile = PaceProfile {
        bytes_per_s: 1e9,
        flops: 1e12,
        copy_bytes_per_s: 1e12,
        launch_us: 0.0,
        weight_scale,
        kv_scale: 1.0,
        prompt_scale: 1.0,
        prompt_row_us: 0.0,
    };
    let mut device = Paced::new(CpuDevice::new(), profile);
    let config = ModelSpec::open(&dir).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let weights = Weights::load(&mut device, &checkpoint, &config, None, &mut |_, _| {}).unwrap();
    let model = Model::new(&config, weights);
    let sizes = ExecutorConfig { sampled_rows: 2, ..ExecutorConfig::alone(KvSpace::flat(64, 1), KvDType::F32, 8) };
    Executor::new(device, &config, Some(model), sizes).unwrap()
}

fn step(number: u64, micro_batch: MicroBatch, slot: u32, remote: RemoteWork) -> Command {
    let params = Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
    let sample = Some(SampleSpec::new(params, 0));
    let seq = SeqRows {
        seq: SeqId(number),
        row0: 0,
        rows: 1,
        drafts: 0,
        pos0: 0,
        run0: 0,
        runs: 1,
        ring: None,
        window: None,
        sample,
    };
    Command::Step(Box::new(StepWork {
        step: StepId(number),
        micro_batch,
        tokens: vec![1],
        slots: vec![slot],
        seqs: vec![seq],
        runs: vec![KvRun { base: slot, len: 1, first_pos: 0 }],
        remote,
        next_row: None,
        watched: false,
        announced: false,
        scores: Vec::new(),
        hidden: Vec::new(),
    }))
}

fn remote_request(executor: &Executor<Paced<CpuDevice>>) -> Command {
    let q_dim = executor.attention.geometry.q_dim();
    Command::RemoteQuery(RemoteQuery {
        tag: RemoteTag(9),
        layer: 0,
        dtype: DType::F32,
        queries: Bytes::from(vec![0; q_dim * 4]),
        seqs: vec![AttnRows { row0: 0, rows: 1, pos0: 4, run0: 0, runs: 1 }],
        runs: vec![KvRun { base: 32, len: 4, first_pos: 0 }],
    })
}

/// Without virtual memory, a share is refused with one error.
#[test]
fn a_device_without_addresses_maps_nothing() {
    let mut executor = slow();
    let share = ShareId(3);
    executor.push(Command::Share { share, tokens: 4, slots: vec![(0, 40), (8, 44)] });
    let reports = turns(&mut executor).1;
    let unsupported =
        |r: &Report| matches!(r, Report::Shared { share: ShareId(3), error: Some(DeviceError::Unsupported(_)) });
    assert_eq!(reports.iter().filter(|r| unsupported(r)).count(), 1, "{reports:?}");
}

/// Turns until all that is left is waiting; returns the number of pieces done, the reports and the last turn.
fn turns(executor: &mut Executor<Paced<CpuDevice>>) -> (u32, Vec<Report>, Turn) {
    let (mut done, mut reports) = (0, Vec::new());
    loop {
        match executor.try_turn(&mut |report| reports.push(report)) {
            Turn::Worked => done += 1,
            turn => return (done, reports, turn),
        }
    }
}

#[test]
fn a_peer_is_answered_while_a_whole_step_is_queued() {
    let mut executor = slow();
    executor.push(step(1, MicroBatch::Local, 0, RemoteWork::default()));
    let (done, reports, turn) = turns(&mut executor);
    let layers = executor.kv_shape.layers;
    assert_eq!((done, reports.len()), (layers + 1, 0), "alone, it queues all its layers and its head");
    assert!(matches!(turn, Turn::Queued(left) if left > Duration::from_secs(60_000)), "{turn:?}");
    executor.push(remote_request(&executor));
    let (done, reports, turn) = turns(&mut executor);
    assert!(done == 1 && matches!(reports[..], [Report::RemotePartial { .. }]), "{reports:?}");
    assert!(matches!(turn, Turn::Queued(_)), "the step goes on");
}

#[test]
fn a_micro_batch_with_company_is_one_layer_ahead_of_the_device() {
    let mut executor = slow();
    let ships =
        vec![Ship { creditor: InstanceId(2), segments: vec![ShipSegment { row0: 0, rows: 1, pos0: 1, end: 1 }] }];
    let remote = RemoteWork { dtype: DType::F32, ships, ..RemoteWork::default() };
    executor.push(step(1, MicroBatch::Remote, 1, remote));
    executor.push(step(2, MicroBatch::Local, 0, RemoteWork::default()));
    let (done, reports, turn) = turns(&mut executor);
    // A layer of the local pass and the projection of the remote one, whose queries leave when the device is done.
    assert_eq!((done, reports.len()), (2, 0));
    assert!(matches!(turn, Turn::Queued(_)), "{turn:?}");
    // An early answer changes nothing; the end of the other step does not wait for it.
    let empty = Bytes::new();
    let part = RemotePart { creditor: InstanceId(2), out: empty.clone(), lse: empty.clone(), count: empty };
    executor.push(Command::Part { step: StepId(1), layer: 0, part });
    executor.push(Command::Abort { step: StepId(1) });
    let (done, _, turn) = turns(&mut executor);
    assert_eq!(done, executor.kv_shape.layers, "alone again");
    assert!(matches!(turn, Turn::Queued(_)));
}

/// Waits until `done`, without a limit: the test harness kills a test that hangs.
fn until(done: impl Fn() -> bool) {
    while !done() {
        std::thread::yield_now();
    }
}

#[test]
fn a_step_that_the_device_does_not_finish_is_seen() {
    let thread = crate::spawn(crate::Models::new(slow(), None), |_| {});
    assert_eq!(thread.stuck_for(), None);
    thread.send(step(1, MicroBatch::Local, 0, RemoteWork::default())).unwrap();
    until(|| thread.stuck_for().is_some_and(|stuck| stuck > Duration::from_millis(20)));
    drop(thread);
}

#[test]
fn a_thread_that_hangs_is_not_waited_for() {
    let executor = slow();
    let (never, hangs) = std::sync::mpsc::channel::<()>();
    let work = remote_request(&executor);
    let thread = crate::spawn(crate::Models::new(executor, None), move |_| {
        let _ = hangs.recv();
    });
    thread.send(work).unwrap();
    until(|| thread.stuck_for().is_some_and(|stuck| stuck > Duration::from_millis(20)));
    drop(thread);
    drop(never);
}

#[test]
fn a_thread_that_panics_drops_its_reports() {
    let executor = slow();
    let (reports, received) = std::sync::mpsc::channel::<()>();
    let work = remote_request(&executor);
    let thread = crate::spawn(crate::Models::new(executor, None), move |_| {
        let _ = &reports;
        panic!("on purpose");
    });
    thread.send(work).unwrap();
    assert!(received.recv().is_err(), "the receiver learns of the end");
    until(|| thread.send(Command::Abort { step: StepId(1) }).is_err());
}

/// What a creditor says that it attended to is added to what this instance did.
#[test]
fn a_creditor_counts_no_more_keys_than_a_sequence_has() {
    let mut executor = paced(1.0);
    let ships =
        vec![Ship { creditor: InstanceId(2), segments: vec![ShipSegment { row0: 0, rows: 1, pos0: 1, end: 1 }] }];
    let remote = RemoteWork { dtype: DType::F32, ships, ..RemoteWork::default() };
    executor.push(step(1, MicroBatch::Remote, 1, remote));
    let next = |executor: &mut Executor<Paced<CpuDevice>>| loop {
        let report =
            turns(executor).1.into_iter().find(|r| matches!(r, Report::Queries { .. } | Report::Failed { .. }));
        if let Some(report) = report {
            return report;
        }
        std::thread::yield_now();
    };
    assert!(matches!(next(&mut executor), Report::Queries { layer: 0, .. }));
    let geometry = executor.attention.geometry;
    let zeros = |bytes| Bytes::from(vec![0; bytes]);
    let count = Bytes::copy_from_slice(&u32::MAX.to_le_bytes());
    let (out, lse) = (zeros(geometry.q_dim() * 4), zeros(geometry.heads as usize * 4));
    let part = RemotePart { creditor: InstanceId(2), out, lse, count };
    executor.push(Command::Part { step: StepId(1), layer: 0, part });
    let failed = next(&mut executor);
    let named = matches!(failed, Report::Failed { error: PassError::Part { creditor: InstanceId(2), layer: 0 }, .. });
    assert!(named, "{failed:?}");
}
