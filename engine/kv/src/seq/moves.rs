//! Movement in a block table: which blocks can move, and the switch from one place to another.
//!
//! The switch replaces one entry of the table at once, so each position is listed exactly once before and after it.

use super::{Placement, SeqBlocks, index};
use std::ops::Range;

impl SeqBlocks {
    /// Logical blocks that may move: written in every token and layer, not behind the window, and before anything that
    /// was lost.
    #[must_use]
    pub fn movable(&self) -> Range<u32> {
        let full = self.next_position() / self.block_tokens();
        self.gone.min(full)..full
    }

    /// Puts a movable block to another place and returns the old one, which is the caller's to free.
    ///
    /// # Panics
    /// If the block is not [`SeqBlocks::movable`], `to` is no place, or `to` is in the table already.
    pub fn relocate(&mut self, block: u32, to: Placement) -> Placement {
        assert!(self.movable().contains(&block), "block {block} is not whole and cannot move");
        assert!(matches!(to, Placement::Local(_) | Placement::Remote(_)), "a move has a target");
        let at = &mut self.blocks[index(block)];
        assert_ne!(*at, to, "block {block} is there already");
        std::mem::replace(at, to)
    }
}
