//! The physical rBlocks of one instance and who has each of them (Infinite-LLM v1 §4.3).
//!
//! Invariants, asserted at every change:
//! * `free + own + lent == total`;
//! * a block is freed only by the owner it was given to: anything else is a bug of ours and panics;
//! * a block's state only goes forward, Reserved -> Filling -> Sealed, until it is freed.
//!
//! Allocation prefers contiguous ascending blocks: first right behind a given block, then the shortest free extent
//! that holds the rest, else the longest there is. A planned prefill in a quiet pool therefore is one run.

use crate::extents::Extents;
use lagoon_types::{LeaseId, PhysBlock, SeqId};

/// Who has a physical block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Free,
    /// A sequence that runs on this instance.
    Own(SeqId),
    /// A lease of another instance's sequence.
    Lent(LeaseId),
}

/// What is in a block that somebody has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockState {
    /// Allocated; nothing is written.
    Reserved,
    /// Some tokens are written.
    Filling,
    /// Every token is written; immutable from now on.
    Sealed,
}

/// How many blocks are in each hand and state. `reserved + filling + sealed == own + lent`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    pub total: u32,
    pub free: u32,
    pub own: u32,
    pub lent: u32,
    pub reserved: u32,
    pub filling: u32,
    pub sealed: u32,
}

/// The rBlocks of one instance. See the module for invariants.
#[derive(Clone, Debug)]
pub struct BlockPool {
    owners: Vec<Owner>,
    states: Vec<BlockState>,
    extents: Extents,
    counts: PoolCounts,
}

impl BlockPool {
    /// A pool of `total` free blocks, `PhysBlock(0)..PhysBlock(total)`.
    #[must_use]
    pub fn new(total: u32) -> Self {
        Self {
            owners: vec![Owner::Free; total as usize],
            states: vec![BlockState::Reserved; total as usize],
            extents: Extents::new(total),
            counts: PoolCounts { total, free: total, ..PoolCounts::default() },
        }
    }

    #[must_use]
    pub fn counts(&self) -> PoolCounts {
        self.counts
    }

    #[must_use]
    pub fn owner(&self, block: PhysBlock) -> Owner {
        self.owners[block.0 as usize]
    }

    /// State of an allocated block.
    ///
    /// # Panics
    /// If the block is free.
    #[must_use]
    pub fn state(&self, block: PhysBlock) -> BlockState {
        assert_ne!(self.owner(block), Owner::Free, "{block} is free");
        self.states[block.0 as usize]
    }

    /// Gives `n` blocks to `owner`, all or nothing. `after` is the owner's last block so far: blocks right behind it
    /// come first.
    ///
    /// # Panics
    /// If `owner` is [`Owner::Free`].
    pub fn allocate(&mut self, owner: Owner, n: u32, after: Option<PhysBlock>) -> Option<Vec<PhysBlock>> {
        assert_ne!(owner, Owner::Free, "free blocks are freed, not allocated");
        if n > self.counts.free {
            return None;
        }
        let mut blocks = Vec::with_capacity(n as usize);
        let mut take = |extents: &mut Extents, start: u32, want: u32| -> u32 {
            let got = extents.take_at(start, want);
            blocks.extend((start..start + got).map(PhysBlock));
            got
        };
        let mut left = n;
        if let Some(after) = after {
            left -= take(&mut self.extents, after.0 + 1, left);
        }
        while left > 0 {
            let (start, len) = self.extents.best(left).expect("free blocks are in extents");
            left -= take(&mut self.extents, start, len);
        }
        for block in &blocks {
            let slot = &mut self.owners[block.0 as usize];
            assert_eq!(*slot, Owner::Free, "{block} was given away twice");
            *slot = owner;
            self.states[block.0 as usize] = BlockState::Reserved;
        }
        self.counts.free -= n;
        *self.count_of(owner) += n;
        self.counts.reserved += n;
        self.assert_sum();
        Some(blocks)
    }

    /// Takes blocks back from `owner`.
    ///
    /// # Panics
    /// If one of them is not `owner`'s (a double free, or somebody else's block).
    pub fn free(&mut self, owner: Owner, blocks: &[PhysBlock]) {
        assert_ne!(owner, Owner::Free, "a free block cannot be freed");
        for &block in blocks {
            let at = block.0 as usize;
            assert_eq!(self.owners[at], owner, "{block} is not its owner's to free");
            *self.state_count(self.states[at]) -= 1;
            self.owners[at] = Owner::Free;
            self.states[at] = BlockState::Reserved;
            self.extents.give(block.0);
            *self.count_of(owner) -= 1;
            self.counts.free += 1;
        }
        self.assert_sum();
    }

    /// Moves an allocated block forward to `state`; staying is allowed.
    ///
    /// # Panics
    /// If the block is free, or would go back.
    pub fn mark(&mut self, block: PhysBlock, state: BlockState) {
        let old = self.state(block);
        assert!(state >= old, "{block} cannot go back from {old:?} to {state:?}");
        *self.state_count(old) -= 1;
        *self.state_count(state) += 1;
        self.states[block.0 as usize] = state;
    }

    /// Bytes that the pool's bookkeeping takes.
    #[must_use]
    pub fn metadata_bytes(&self) -> usize {
        // A B-tree node is at least half full, so an entry costs at most twice its size.
        let extent_bytes = 2 * (size_of::<(u32, u32)>() + size_of::<(u32, u32)>());
        self.owners.capacity() * size_of::<Owner>()
            + self.states.capacity() * size_of::<BlockState>()
            + self.extents.count() * extent_bytes
    }

    /// Recounts everything from scratch and compares it with what is kept. Linear; for tests and the simulator.
    ///
    /// # Panics
    /// If they differ.
    pub fn check(&self) {
        let mut counts = PoolCounts { total: self.counts.total, ..PoolCounts::default() };
        for (owner, state) in self.owners.iter().zip(&self.states) {
            match owner {
                Owner::Free => counts.free += 1,
                Owner::Own(_) => counts.own += 1,
                Owner::Lent(_) => counts.lent += 1,
            }
            match (owner, state) {
                (Owner::Free, _) => {}
                (_, BlockState::Reserved) => counts.reserved += 1,
                (_, BlockState::Filling) => counts.filling += 1,
                (_, BlockState::Sealed) => counts.sealed += 1,
            }
        }
        assert_eq!(counts, self.counts, "the counts are not those of the blocks");
        let free = (0..self.counts.total).filter(|b| self.owners[*b as usize] == Owner::Free);
        assert!(self.extents.iter().eq(free), "the extents are not the free blocks");
        self.assert_sum();
    }

    fn assert_sum(&self) {
        let c = &self.counts;
        assert_eq!(c.free + c.own + c.lent, c.total, "blocks were lost or made: {c:?}");
        assert_eq!(c.reserved + c.filling + c.sealed, c.own + c.lent, "states were lost or made: {c:?}");
    }

    fn count_of(&mut self, owner: Owner) -> &mut u32 {
        match owner {
            Owner::Free => &mut self.counts.free,
            Owner::Own(_) => &mut self.counts.own,
            Owner::Lent(_) => &mut self.counts.lent,
        }
    }

    fn state_count(&mut self, state: BlockState) -> &mut u32 {
        match state {
            BlockState::Reserved => &mut self.counts.reserved,
            BlockState::Filling => &mut self.counts.filling,
            BlockState::Sealed => &mut self.counts.sealed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Owner = Owner::Own(SeqId(1));
    const B: Owner = Owner::Lent(LeaseId(2));

    fn ids(blocks: &[PhysBlock]) -> Vec<u32> {
        blocks.iter().map(|b| b.0).collect()
    }

    #[test]
    fn a_quiet_pool_gives_one_run_and_grows_it() {
        let mut pool = BlockPool::new(16);
        let first = pool.allocate(A, 4, None).unwrap();
        assert_eq!(ids(&first), [0, 1, 2, 3]);
        assert_eq!(ids(&pool.allocate(A, 2, first.last().copied()).unwrap()), [4, 5]);
        assert_eq!(ids(&pool.allocate(B, 3, None).unwrap()), [6, 7, 8]);
        pool.check();
    }

    #[test]
    fn holes_that_fit_are_filled_before_long_extents_are_cut() {
        let mut pool = BlockPool::new(16);
        let all = pool.allocate(A, 16, None).unwrap();
        pool.free(A, &all[2..4]);
        pool.free(A, &all[8..15]);
        assert_eq!(ids(&pool.allocate(B, 2, None).unwrap()), [2, 3]);
        pool.free(B, &[PhysBlock(3), PhysBlock(2)]);
        // Nine free blocks in extents of 2 and 7: the longest comes first.
        assert_eq!(ids(&pool.allocate(B, 9, None).unwrap()), [8, 9, 10, 11, 12, 13, 14, 2, 3]);
        assert!(pool.allocate(B, 1, None).is_none());
        pool.check();
    }

    #[test]
    fn all_or_nothing_leaves_the_pool_as_it_was() {
        let mut pool = BlockPool::new(3);
        pool.allocate(A, 2, None).unwrap();
        assert!(pool.allocate(B, 2, None).is_none());
        assert_eq!(pool.counts().free, 1);
        assert_eq!(pool.allocate(B, 0, None), Some(vec![]));
        pool.check();
    }

    #[test]
    fn states_are_counted_and_only_go_forward() {
        let mut pool = BlockPool::new(2);
        pool.allocate(A, 2, None).unwrap();
        pool.mark(PhysBlock(0), BlockState::Filling);
        pool.mark(PhysBlock(0), BlockState::Sealed);
        pool.mark(PhysBlock(0), BlockState::Sealed);
        assert_eq!((pool.counts().reserved, pool.counts().sealed), (1, 1));
        pool.check();
        let back = std::panic::catch_unwind(move || pool.mark(PhysBlock(0), BlockState::Filling));
        assert!(back.is_err());
    }

    #[test]
    #[should_panic(expected = "not its owner's to free")]
    fn double_free_panics() {
        let mut pool = BlockPool::new(2);
        let blocks = pool.allocate(A, 1, None).unwrap();
        pool.free(A, &blocks);
        pool.free(A, &blocks);
    }

    #[test]
    #[should_panic(expected = "not its owner's to free")]
    fn freeing_anothers_block_panics() {
        let mut pool = BlockPool::new(2);
        let blocks = pool.allocate(A, 1, None).unwrap();
        pool.free(B, &blocks);
    }
}
