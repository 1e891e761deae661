//! Moves in a block table: movable blocks, and the switch of a block to another place.
//!
//! A switch replaces one entry of the table at once, so the table lists each position exactly once before and after it.

use super::{Advance, Placement, SeqBlocks, index};
use lagoon_types::PhysBlock;
use std::ops::Range;

impl SeqBlocks {
    /// Movable logical blocks: written in every token and layer, not behind the window, and before every lost range.
    #[must_use]
    pub fn movable(&self) -> Range<u32> {
        let full = self.next_position() / self.block_tokens();
        self.gone.min(full)..full
    }

    /// Whether a block has a place and is written in every token and layer.
    #[must_use]
    pub fn is_whole(&self, block: u32) -> bool {
        let (start, end) = (block * self.block_tokens(), (block + 1) * self.block_tokens());
        let lost = self.lost.iter().any(|l| l.start < end && start < l.end);
        block >= self.gone && end <= self.written() && !lost
    }

    /// Replaces the local block that is written next (or partly written) by `to`, which already holds its KV: the sequence
    /// joins a shared block. The caller frees the old block.
    ///
    /// # Panics
    /// If another block is written next, a range is lost, or the block is not local.
    pub fn join(&mut self, block: u32, to: PhysBlock) -> Advance {
        let next = self.next_position();
        assert_eq!(next / self.block_tokens(), block, "block {block} is not the next one");
        assert!(matches!(self.blocks[index(block)], Placement::Local(_)), "block {block} does not lie here");
        self.blocks[index(block)] = Placement::Local(to);
        self.drop_extents();
        self.advance((block + 1) * self.block_tokens() - next)
    }

    /// Moves a whole block to another place and returns the old one, which the caller frees.
    ///
    /// # Panics
    /// If the block is not [`SeqBlocks::is_whole`], `to` is neither local nor remote, or `to` is the block's place already.
    pub fn relocate(&mut self, block: u32, to: Placement) -> Placement {
        assert!(self.is_whole(block), "block {block} is not whole and cannot move");
        assert!(matches!(to, Placement::Local(_) | Placement::Remote(_)), "a move has a target");
        let at = &mut self.blocks[index(block)];
        assert_ne!(*at, to, "block {block} is there already");
        let old = std::mem::replace(at, to);
        self.remote += u32::from(matches!(to, Placement::Remote(_)));
        self.remote -= u32::from(matches!(old, Placement::Remote(_)));
        self.drop_extents();
        old
    }
}
