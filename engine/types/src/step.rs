//! Plan of one iteration: micro-batches and chunks, made by the scheduler, computed by the runner.

use crate::ids::SeqId;
use std::ops::Range;

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

/// Tokens of one sequence that a step computes: positions `[start, start + len)`. With drafts, the last of them are guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub seq: SeqId,
    pub start: u32,
    /// At least 1; 1 and the drafts for decoding.
    pub len: u32,
    /// The chunk contains the sequence's last known token: its logits give the next token.
    pub last: bool,
    /// Rows behind that token, of tokens that are expected to follow it (speculative decoding). Theirs are logits, too.
    pub drafts: u32,
    /// Set where windowed KV is kept apart.
    pub ring: Option<RingRows>,
}

impl Chunk {
    /// Whether it generates: it computes the last known token, and drafts behind it.
    #[must_use]
    pub fn decodes(&self) -> bool {
        self.last && self.len == 1 + self.drafts
    }

    /// Whether its rows only fill the ring again: their pooled KV is there already.
    #[must_use]
    pub fn warms_up(&self) -> bool {
        self.ring.is_some_and(|ring| ring.warm_up)
    }
}

/// Rows of a sequence whose layers with a window keep their KV in a ring (ADR 24): the slot of position `p` is
/// `p % slots` in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingRows {
    pub ring: u32,
    /// The ring was begun at this position, which is at most the first row's, and filled without a gap since. Rows see nothing
    /// before it.
    pub from: u32,
    /// The rows' pooled KV is there already, and is attended to as it is; theirs goes to the ring only.
    pub warm_up: bool,
    /// The positions before the rows are in rBlocks, and are copied into the ring first.
    pub load: bool,
}

/// Shape of the last window of a sequence's windowed layers, stored in slots of pooled KV (ADR 24): the part of a ring that a
/// transfer carries.
///
/// Fold `f` of position `p` of the window `positions` is slot `f * positions.len() + p - positions.start`; pooled layer `l` of it
/// holds the windowed layer `f * pooled_layers + l`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowShape {
    /// Positions before a row that some layer with a window sees: the longest window less the row itself.
    pub tokens: u32,
    /// Slots of pooled KV that one position's windowed KV takes.
    pub folds: u32,
    /// Positions before a row that must be computed again for its windowed KV to be right if none was kept.
    pub warm_up: u32,
}

impl WindowShape {
    /// The last window of `len` tokens.
    #[must_use]
    pub const fn positions(self, len: u32) -> Range<u32> {
        len.saturating_sub(self.tokens)..len
    }

    /// Slots of the last window of `len` tokens.
    #[must_use]
    pub fn slots(self, len: u32) -> u32 {
        len.min(self.tokens).saturating_mul(self.folds)
    }

    /// rBlocks of the last window of `len` tokens.
    #[must_use]
    pub fn blocks(self, len: u32, block_tokens: u32) -> u32 {
        self.slots(len).div_ceil(block_tokens)
    }

    /// Tokens of an export of `len` tokens and their last window, which begins at a block of its own.
    #[must_use]
    pub fn exported(self, len: u32, block_tokens: u32) -> u32 {
        len.next_multiple_of(block_tokens).saturating_add(self.slots(len))
    }
}

/// The chunks of one micro-batch's next iteration, decoding first. Empty when the micro-batch has nothing to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub chunks: Vec<Chunk>,
}
