//! What a writer may send its reader.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use lagoon_protocol::{ControlBody, TransferConnected, TransferExport};
use lagoon_transfer::{ConnId, Layout, Reader, ReaderConfig, ReaderOutput};
use lagoon_types::InstanceId;
use lagoon_types::limits::TRANSFER_CONN_REQUESTS_MAX;

const WRITER: InstanceId = InstanceId(2);
const BLOCKS: u32 = 8;

fn layout() -> Layout {
    support::layout(BLOCKS, 4)
}

/// A reader, and what its writer's answer makes it do.
fn connected(change: impl FnOnce(&mut TransferConnected)) -> (Reader, ConnId, Vec<ReaderOutput>) {
    let mut reader = Reader::new(layout(), ReaderConfig::default());
    let conn = reader.connect(WRITER, 0).unwrap();
    let Some(ReaderOutput::Send { body: ControlBody::TransferConnect(connect), .. }) = reader.poll() else {
        panic!("it connects")
    };
    let mut m = TransferConnected {
        conn: conn.0,
        attempt: connect.attempt,
        incarnation: 5,
        epoch: 1,
        completed: 0,
        layout: connect.layout,
        credit_bytes: 1 << 20,
        ttl_ms: 15_000,
        arenas: Vec::new(),
        addr: String::new(),
    };
    change(&mut m);
    reader.on_control(WRITER, &ControlBody::TransferConnected(Box::new(m)), 0);
    let outputs = std::iter::from_fn(|| reader.poll()).collect();
    (reader, conn, outputs)
}

/// The next COMPLETE's number is one more.
#[test]
fn completes_that_nobody_can_have_sent_are_refused() {
    let refused = |outputs: &[ReaderOutput]| outputs.iter().any(|o| matches!(o, ReaderOutput::Refused { .. }));
    let (_, _, outputs) = connected(|m| m.completed = u64::MAX);
    assert!(refused(&outputs), "{outputs:?}");
    let (_, _, outputs) = connected(|m| m.ttl_ms = u64::MAX);
    assert!(!refused(&outputs), "{outputs:?}");
}

/// Each is answered with a COMPLETE, which is kept until the writer acknowledges it.
#[test]
fn exports_that_make_no_sense_do_not_pile_up() {
    let (mut reader, conn, _) = connected(|_| {});
    for export in 0..10_000 {
        let m = TransferExport { conn: conn.0, export, tokens: 1, ..TransferExport::default() };
        reader.on_control(WRITER, &ControlBody::TransferExport(m), 0);
        while reader.poll().is_some() {}
    }
    let kept = reader.completing();
    assert!(kept > 0 && kept <= 2 * TRANSFER_CONN_REQUESTS_MAX, "{kept} COMPLETEs wait");
}
