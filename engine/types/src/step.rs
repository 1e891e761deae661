//! Plan of one iteration: micro-batches and chunks, made by the scheduler, computed by the runner.

use crate::ids::SeqId;

/// The two micro-batches that advance independently, so that a slow creditor delays only rows with remote KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MicroBatch {
    /// Sequences whose KV is entirely in this instance's store.
    Local,
    /// Sequences with KV on creditors.
    Remote,
}

impl MicroBatch {
    /// Both, in the order of [`MicroBatch::index`].
    pub const ALL: [Self; 2] = [Self::Local, Self::Remote];

    /// Index of the micro-batch: 0 local, 1 remote.
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Local => 0,
            Self::Remote => 1,
        }
    }
}

/// Tokens of one sequence that a step computes: positions `[start, start + len)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub seq: SeqId,
    pub start: u32,
    /// At least 1; 1 for decoding.
    pub len: u32,
    /// The chunk contains the sequence's last known token: its logits give the next token.
    pub last: bool,
}

/// The chunks of one micro-batch's next iteration, decoding first. Empty when the micro-batch has nothing to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub chunks: Vec<Chunk>,
}
