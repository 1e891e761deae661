//! Runs of KV and the range of positions that a query sees.
//!
//! Invariant of the whole system: for every query row, the runs that are attended to (local, scratch, remote) tile
//! the row's visible range exactly once. It is checked by comparing key counts with [`visible_len`].

use crate::ids::{Epoch, LeaseId};
use bytemuck::{Pod, Zeroable};
use std::ops::Range;

/// Consecutive tokens whose KV is in consecutive slots of one store.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct KvRun {
    /// First slot in the store (a slot holds one token's K and V in every layer of the store).
    pub base: u32,
    /// Number of tokens; never 0.
    pub len: u32,
    /// Position in the sequence of the first token. Positions travel with the run, so windows stay right when
    /// blocks move.
    pub first_pos: u32,
}

/// Run on a creditor as its debtor addresses it: consecutive tokens of one lease that a step attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseRun {
    pub lease: LeaseId,
    pub epoch: Epoch,
    /// First token's offset in the lease.
    pub offset: u32,
    /// Tokens; never 0. The creditor answers when `offset + len` tokens are written in the queried layer.
    pub len: u32,
    /// Position in the sequence of the first token.
    pub first_pos: u32,
}

/// Positions that a query at `pos` sees: its own and the preceding ones, at most `window` tokens in all.
#[must_use]
pub fn visible(pos: u32, window: Option<u32>) -> Range<u32> {
    let end = pos + 1;
    window.map_or(0, |w| end.saturating_sub(w))..end
}

/// Length of [`visible`].
#[must_use]
pub fn visible_len(pos: u32, window: Option<u32>) -> u32 {
    let range = visible(pos, window);
    range.end - range.start
}

impl KvRun {
    /// Positions that this run holds.
    #[must_use]
    pub fn positions(&self) -> Range<u32> {
        self.first_pos..self.first_pos + self.len
    }

    /// Keys of this run that a query at `pos` sees.
    #[must_use]
    pub fn visible_count(&self, pos: u32, window: Option<u32>) -> u32 {
        let (seen, own) = (visible(pos, window), self.positions());
        seen.end.min(own.end).saturating_sub(seen.start.max(own.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_follow_the_causal_window() {
        let run = KvRun { base: 0, len: 10, first_pos: 5 };
        assert_eq!(run.visible_count(4, None), 0);
        assert_eq!(run.visible_count(5, None), 1);
        assert_eq!(run.visible_count(100, None), 10);
        assert_eq!(run.visible_count(16, Some(4)), 2);
        assert_eq!(run.visible_count(18, Some(4)), 0);
        assert_eq!(visible(2, Some(8)), 0..3);
        assert_eq!(visible_len(20, Some(8)), 8);
    }
}
