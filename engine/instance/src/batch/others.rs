//! What the batch reads of prefill elsewhere and of moves, as traits: both machines work on the batch, so they import it, and it
//! imports neither.

use super::Batch;
use crate::cx::Cx;
use lagoon_types::SeqId;

/// Queries of prefill elsewhere.
pub(crate) trait PrefillQueries {
    /// Number of own sequences whose prompts prefill workers compute.
    fn away(&self) -> usize;

    /// Whether a sequence's KV is pushed: read while it is computed, into memory that the decode worker has allocated.
    fn is_pushed(&self, seq: SeqId) -> bool;

    /// Whether a sequence is a pushed prefill, whose parts the decode worker has: it cannot be recomputed.
    fn has_parts(&self, seq: SeqId) -> bool;

    /// Whether transports may read blocks of a sequence.
    fn is_exported(&self, seq: SeqId) -> bool;
}

/// Queries of moves.
pub(crate) trait MoveQueries {
    /// Whether no more moves may begin.
    fn is_full(&self) -> bool;

    /// Whether a sequence has a move.
    fn is_moving(&self, seq: SeqId) -> bool;

    /// Whether a move home has blocks reserved here and is not complete.
    fn is_moving_home(&self) -> bool;

    /// Whether a swap out is in progress, even of a sequence that has ended.
    fn is_swapping_out(&self) -> bool;

    /// Whole local blocks of a sequence that could move, and those of them that are not shared.
    fn whole_blocks_here(&self, cx: &Cx, batch: &Batch, seq: SeqId) -> (u32, u32);
}

/// The machines that the batch reads.
#[derive(Clone, Copy)]
pub(crate) struct Others<'a> {
    pub(crate) prefills: &'a dyn PrefillQueries,
    pub(crate) moves: &'a dyn MoveQueries,
}
