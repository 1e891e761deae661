//! What a reader may ask of its writer.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use lagoon_protocol::{ControlBody, RefuseCode, TransferConnect};
use lagoon_transfer::{
    Check, GrantId, Layout, Reader, ReaderConfig, ReaderOutput, Remote, Segment, Writer, WriterConfig, WriterOutput,
};
use lagoon_types::InstanceId;

const READER: InstanceId = InstanceId(2);
const BLOCKS: u32 = 8;
const BLOCK_BYTES: u64 = 64;

fn layout() -> Layout {
    support::layout(BLOCKS, 4)
}

/// A writer that serves two blocks at a time to one reader.
struct World {
    writer: Writer,
    epoch: u64,
}

impl World {
    fn connect(&mut self, conn: u64) {
        let mut reader = Reader::new(layout(), ReaderConfig::default());
        reader.connect(InstanceId(1), 0).unwrap();
        let Some(ReaderOutput::Send { body: ControlBody::TransferConnect(connect), .. }) = reader.poll() else {
            panic!("it connects")
        };
        let connect = TransferConnect { conn, ..*connect };
        self.writer.on_control(READER, &ControlBody::TransferConnect(Box::new(connect)), 0);
        while let Some(output) = self.writer.poll() {
            if let WriterOutput::Connected { epoch, .. } = output {
                self.epoch = epoch;
            }
        }
    }

    /// A read of one block of an export made for it.
    fn read(&mut self, block: u32) -> Result<GrantId, RefuseCode> {
        let export =
            self.writer.export(READER, u64::from(block), (0, 4), vec![block], vec![Check([0; 16])], 0).unwrap();
        while self.writer.poll().is_some() {}
        let remote = Remote { region: 0, offset: u64::from(block) * BLOCK_BYTES, bytes: BLOCK_BYTES };
        self.writer.admit(READER, self.epoch, &[Segment { export, remote }], 0)
    }
}

/// Reads that were being served when the reader connected anew were taken off its new credit when they ended.
#[test]
fn a_reader_that_connects_anew_has_no_more_credit() {
    let config = WriterConfig { credit_bytes: 2 * BLOCK_BYTES, ..WriterConfig::default() };
    let mut world = World { writer: Writer::new(layout(), config), epoch: 0 };
    world.connect(1);
    let old = [world.read(0).unwrap(), world.read(1).unwrap()];
    assert_eq!(world.read(2), Err(RefuseCode::Overloaded));
    world.connect(2);
    assert_eq!(world.read(3), Err(RefuseCode::Overloaded), "both are still being served");
    world.writer.end_read(old[0], 0);
    let new = world.read(4).unwrap();
    assert_eq!(world.read(5), Err(RefuseCode::Overloaded));
    world.writer.end_read(old[1], 0);
    world.writer.end_read(new, 0);
    assert!(world.read(6).is_ok() && world.read(7).is_ok());
}
