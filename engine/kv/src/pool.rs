//! Block pool: the physical rBlocks of one instance and their owners (Infinite-LLM v1 §4.3).
//!
//! Invariants, asserted at every change:
//! * `free + own + lent == total + shared`: a shared block counts once per owner, and is one block of memory;
//! * only an owner frees a block: anything else is a bug and panics;
//! * a block's state only goes forward, Reserved -> Filling -> Sealed, until it is freed.
//!
//! Allocation prefers contiguous ascending blocks: first right behind a given block, then the shortest free extent
//! that holds the rest, else the longest there is. A planned prefill in a quiet pool therefore is one run.
//!
//! **Address rows.** With virtual memory ([`KvSpace`]) a block's number is its address, and there are more addresses than
//! blocks: `free` counts memory. A sequence owns an address row while it has blocks here; its logical block `i` lies at the row's
//! `i`th address, so that it is one run by construction. Rows are reused last in, first out, because the memory of the last
//! freed row is still mapped.
//!
//! **Cached blocks.** A sealed block with a block hash ([`BlockPool::set_hash`]) keeps its KV when it is freed. It counts as
//! free: an allocation evicts it when no other block is free (`cache.rs` has the order), and a sequence with the same
//! prefix gets it with its KV ([`BlockPool::adopt`]). With rows, a block is cached at its address in an idle row; a row with
//! an owner caches nothing.
//!
//! **Shared blocks.** Sequences with a common prefix share its sealed blocks. Only sealed blocks with block hashes are
//! shared, so no owner writes there; each owner frees a shared block separately, and it is free after the last one. With
//! rows, each owner maps the memory at an address of its own row (`pool/sharing.rs`). The exception are blocks that a sequence
//! leases out before it computes them ([`BlockPool::lease_out`], joint prefill): it alone writes them.

mod adopt;
mod saving;
mod sharing;

pub use adopt::{Adopted, Joined};
pub use saving::Unsaved;

use crate::BlockHash;
use crate::cache::Cache;
use crate::extents::Extents;
use crate::mutants::{self, Mutant};
use crate::{TenantCounts, Tenants};
use lagoon_types::{KvSpace, LeaseId, PhysBlock, SeqId};
use sharing::Sharing;
use std::collections::BTreeMap;

/// Owner of a physical block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    Free,
    /// A sequence of this instance.
    Own(SeqId),
    /// A lease of a debtor.
    Lent(LeaseId),
}

/// State of an owned block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockState {
    /// Allocated; nothing is written.
    Reserved,
    /// Some tokens are written.
    Filling,
    /// Every token is written; immutable from now on.
    Sealed,
}

/// Block counts by owner and state. `free + own + lent == total + shared`, and `reserved + filling + sealed == own + lent`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    pub total: u32,
    /// Free blocks, cached ones included.
    pub free: u32,
    /// Blocks of sequences; a shared block counts once per owner.
    pub own: u32,
    /// Blocks of leases, counted likewise.
    pub lent: u32,
    /// Blocks saved by sharing: owners of shared blocks beyond the first of each.
    pub shared: u32,
    pub reserved: u32,
    pub filling: u32,
    pub sealed: u32,
}

/// Block pool of one instance. See the module for invariants.
#[derive(Clone, Debug)]
pub struct BlockPool {
    owners: Vec<Owner>,
    states: Vec<BlockState>,
    /// Free loose addresses, those of cached blocks excluded.
    extents: Extents,
    cache: Cache,
    sharing: Sharing,
    counts: PoolCounts,
    changes: u64,
    space: KvSpace,
    rows: Rows,
    /// Blocks freed since the last [`BlockPool::take_freed`], with virtual memory only.
    freed: Vec<PhysBlock>,
}

/// Address rows of sequences.
#[derive(Clone, Debug)]
struct Rows {
    /// Idle rows, a stack: the last is reused first.
    idle: Vec<u32>,
    /// Row of each owner (a sequence, or a lease that took it over), and the number of its owned addresses, at least one.
    of: BTreeMap<Owner, (u32, u32)>,
}

impl BlockPool {
    /// A pool of `total` free blocks, `PhysBlock(0)..PhysBlock(total)`.
    #[must_use]
    pub fn new(total: u32) -> Self {
        Self::over(KvSpace::flat(total, 1))
    }

    /// A pool of free blocks over an address space.
    ///
    /// # Panics
    /// If [`KvSpace::addresses`] is `None`, or there are fewer loose addresses than blocks.
    #[must_use]
    pub fn over(space: KvSpace) -> Self {
        let addresses = space.addresses().expect("slots are numbered by u32");
        let total = space.blocks;
        assert!(space.loose_blocks >= total, "what finds no row has an address");
        let mut extents = Extents::new(addresses);
        extents.take_at(0, addresses - space.loose_blocks);
        Self {
            owners: vec![Owner::Free; addresses as usize],
            states: vec![BlockState::Reserved; addresses as usize],
            extents,
            cache: Cache::default(),
            sharing: Sharing::default(),
            counts: PoolCounts { total, free: total, ..PoolCounts::default() },
            changes: 0,
            space,
            rows: Rows { idle: (0..space.rows).rev().collect(), of: BTreeMap::new() },
            freed: Vec::new(),
        }
    }

    /// Numbers of rBlocks by state.
    #[must_use]
    pub fn counts(&self) -> PoolCounts {
        self.counts
    }

    /// Version of owners and block hashes: while it is unchanged, a repeated prefix-cache lookup gives the same result.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The owner of a block; of a shared block one of its owners.
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

    /// Allocates the logical blocks `logical` of a sequence, all or nothing: at their addresses in the sequence's row where
    /// these are free, else as [`BlockPool::allocate`].
    pub fn allocate_for(
        &mut self,
        seq: SeqId,
        logical: impl ExactSizeIterator<Item = u32>,
        after: Option<PhysBlock>,
    ) -> Option<Vec<PhysBlock>> {
        let (owner, n) = (Owner::Own(seq), logical.len());
        if self.space.rows == 0 || n == 0 || n > self.counts.free as usize {
            return self.allocate(owner, u32::try_from(n).unwrap_or(u32::MAX), after);
        }
        let own = self.rows.of.get(&owner).map(|(row, _)| *row);
        let row = own.or_else(|| self.idle_row());
        let space = self.space;
        let at = |index: u32| row.filter(|_| index < space.row_blocks).map(|row| row * space.row_blocks + index);
        let mut blocks: Vec<Option<PhysBlock>> = logical.map(|index| at(index).map(PhysBlock)).collect();
        if let Some(row) = row.filter(|_| own.is_none() && blocks.iter().any(Option::is_some)) {
            self.drop_row(row);
        }
        self.make_room(u32::try_from(n).unwrap_or(u32::MAX));
        let mut taken = 0;
        for block in &mut blocks {
            *block = block.filter(|block| self.owner(*block) == Owner::Free);
            if let Some(block) = *block {
                self.give(block, owner);
                taken += 1;
            }
        }
        if let Some(row) = row.filter(|_| taken > 0) {
            self.rows.of.entry(owner).or_insert_with(|| (row, 0)).1 += taken;
            self.rows.idle.retain(|idle| *idle != row);
        }
        self.count(owner, taken);
        let rest = blocks.iter().filter(|block| block.is_none()).count();
        let mut rest = self.allocate(owner, u32::try_from(rest).ok()?, after).expect("counted before").into_iter();
        blocks.into_iter().map(|block| block.or_else(|| rest.next())).collect()
    }

    /// Allocates `n` blocks to `owner`, all or nothing. `after` is the owner's last block: blocks right behind it are
    /// preferred.
    ///
    /// # Panics
    /// If `owner` is [`Owner::Free`].
    pub fn allocate(&mut self, owner: Owner, n: u32, after: Option<PhysBlock>) -> Option<Vec<PhysBlock>> {
        assert_ne!(owner, Owner::Free, "free blocks are freed, not allocated");
        if n > self.counts.free {
            return None;
        }
        self.make_room(n);
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
        blocks.iter().for_each(|block| self.give(*block, owner));
        self.count(owner, n);
        Some(blocks)
    }

    /// Sets the block hash of a sealed block, which has `depth` preceding blocks: it is cached when it is freed.
    ///
    /// # Panics
    /// If the block is free or not sealed.
    pub fn set_hash(&mut self, block: PhysBlock, identity: BlockHash, depth: u32) {
        assert_eq!(self.state(block), BlockState::Sealed, "{block} gets its hash before it is sealed");
        self.cache.set_hash(block, identity, depth);
        self.changes += 1;
    }

    /// Number of cached blocks.
    #[must_use]
    pub fn cached(&self) -> u32 {
        self.cache.cached()
    }

    /// Evictions of cached blocks since the start.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.cache.evictions()
    }

    /// Cached blocks by tenant.
    #[must_use]
    pub fn tenants(&self) -> &TenantCounts {
        self.cache.tenants()
    }

    /// Drops the KV of all cached blocks; they do not count as evictions.
    pub fn drop_all(&mut self) {
        self.drop_of(&Tenants::default());
    }

    /// Drops the KV of these tenants' cached blocks; they do not count as evictions.
    pub fn drop_of(&mut self, tenants: &Tenants) {
        for block in self.cache.cached_of(|hash| tenants.have(hash)) {
            self.cache.forget(block);
            self.give_back(block);
        }
    }

    /// Drops the KV of all cached blocks, and takes the hashes of all others away: nothing that is here now is found any more.
    pub fn forget_all(&mut self) {
        self.drop_all();
        for block in self.cache.blocks_of(|_| true) {
            self.cache.forget(block);
        }
        self.changes += 1;
    }

    /// Evicts cached blocks until `n` free blocks are not cached; at least `n` blocks are free.
    fn make_room(&mut self, n: u32) {
        while self.counts.free - self.cache.cached() < n {
            let oldest = self.cache.oldest().expect("free blocks that are not kept were counted");
            self.drop_kept(oldest);
        }
    }

    fn drop_kept(&mut self, block: PhysBlock) {
        self.cache.evict(block);
        self.give_back(block);
    }

    /// A block that was cached is free.
    fn give_back(&mut self, block: PhysBlock) {
        self.changes += 1;
        if !self.is_in_row(block) {
            self.extents.give(block.0);
        }
        if self.space.rows > 0 {
            self.freed.push(block);
        }
    }

    /// Evicts all cached blocks of an address row that gets an owner.
    fn drop_row(&mut self, row: u32) {
        let kept: Vec<PhysBlock> = self.cache.cached_in(self.row_places(row)).collect();
        kept.into_iter().for_each(|block| self.drop_kept(block));
    }

    fn row_places(&self, row: u32) -> std::ops::Range<u32> {
        row * self.space.row_blocks..(row + 1) * self.space.row_blocks
    }

    /// The address row for the next sequence without prefix-cache hits: the last freed empty row, else the row of the next
    /// block to evict.
    fn idle_row(&self) -> Option<u32> {
        self.empty_row().or_else(|| Some(self.cache.oldest()?.0 / self.space.row_blocks))
    }

    fn empty_row(&self) -> Option<u32> {
        let keeps = |row: u32| self.cache.cached_in(self.row_places(row)).next().is_some();
        self.rows.idle.iter().rev().copied().find(|row| !keeps(*row))
    }

    fn give(&mut self, block: PhysBlock, owner: Owner) {
        let slot = &mut self.owners[block.0 as usize];
        assert_eq!(*slot, Owner::Free, "{block} was given away twice");
        *slot = owner;
        self.states[block.0 as usize] = BlockState::Reserved;
    }

    fn count(&mut self, owner: Owner, n: u32) {
        self.counts.free -= n;
        *self.count_of(owner) += n;
        self.counts.reserved += n;
        self.changed();
    }

    /// Takes the blocks freed since the last call, with virtual memory only: their memory may be unmapped.
    pub fn take_freed(&mut self) -> Vec<PhysBlock> {
        std::mem::take(&mut self.freed)
    }

    /// The first block of the address row that the next sequence gets, if an idle row caches no block.
    #[must_use]
    pub fn next_row(&self) -> Option<PhysBlock> {
        self.empty_row().map(|row| PhysBlock(row * self.space.row_blocks))
    }

    /// Frees `owner`'s share of blocks. The last owner's release caches a block that has a block hash (with rows, if the row
    /// has no owner any more).
    ///
    /// # Panics
    /// If `owner` does not own one of them (a double free, or another owner's block).
    pub fn free(&mut self, owner: Owner, blocks: &[PhysBlock]) {
        assert_ne!(owner, Owner::Free, "a free block cannot be freed");
        // With rows, a block is cached only if its row has no owner any more.
        let in_row = blocks.iter().filter(|block| self.is_in_row(**block)).count();
        let leaves = self.rows.of.get(&owner).is_some_and(|(_, held)| *held as usize == in_row);
        self.cache.tick();
        for &block in blocks {
            let at = block.0 as usize;
            assert!(self.has(owner, block), "{block} is not its owner's to free");
            *self.state_count(self.states[at]) -= 1;
            *self.count_of(owner) -= 1;
            let alone = mutants::is(Mutant::SharedFreed);
            if let Some(next) = self.sharing.leave(block, owner, self.owners[at]).filter(|_| !alone) {
                self.owners[at] = next;
                self.counts.shared -= 1;
                continue;
            }
            self.owners[at] = Owner::Free;
            self.states[at] = BlockState::Reserved;
            let shared = self.sharing.unmap(block);
            let here = self.space.rows == 0 || leaves && self.is_in_row(block);
            let keeps = here && !shared && self.cache.release(block);
            if self.is_in_row(block) {
                self.leave_row(owner);
            } else if !keeps {
                self.extents.give(block.0);
            }
            if !keeps {
                self.cache.forget(block);
                self.freed.extend((self.space.rows > 0).then_some(block));
            }
            if shared && !alone {
                self.counts.shared -= 1;
            } else {
                self.counts.free += 1;
            }
        }
        self.changed();
    }

    /// Hands all blocks of `from` over to `to`, an owner without blocks, and the row with them. Other owners of shared blocks
    /// are not affected.
    ///
    /// # Panics
    /// If `from` does not own one of them, if blocks of its row are missing, or if either is [`Owner::Free`].
    pub fn hand_over(&mut self, from: Owner, to: Owner, blocks: &[PhysBlock]) {
        assert!(from != Owner::Free && to != Owner::Free, "both owners of a hand-over are real");
        for &block in blocks {
            assert!(self.has(from, block), "{block} is not its owner's to hand over");
            if mutants::is(Mutant::SharedHandedOver) {
                let mut others = self.sharing.forget_others(block);
                others.insert(std::mem::replace(&mut self.owners[block.0 as usize], to));
                others.into_iter().filter(|other| *other != from).for_each(|other| self.forget_holding(other));
            } else if !self.sharing.replace(block, from, to) {
                self.owners[block.0 as usize] = to;
            }
            *self.count_of(from) -= 1;
            *self.count_of(to) += 1;
        }
        if let Some(row) = self.rows.of.remove(&from) {
            let handed = blocks.iter().filter(|block| self.is_in_row(**block)).count();
            assert_eq!(handed, row.1 as usize, "a row is handed over whole");
            self.rows.of.insert(to, row);
        }
        self.changed();
    }

    /// Mutant: removes an owner's share without its knowledge.
    fn forget_holding(&mut self, other: Owner) {
        *self.count_of(other) -= 1;
        self.counts.sealed -= 1;
        self.counts.shared -= 1;
    }

    fn is_in_row(&self, block: PhysBlock) -> bool {
        block.0 < self.space.rows * self.space.row_blocks
    }

    /// Counts one block less in an owner's row, and frees the row with its last block.
    fn leave_row(&mut self, owner: Owner) {
        let (row, held) = self.rows.of.get_mut(&owner).expect("its block is in its row");
        *held -= 1;
        if *held == 0 {
            self.rows.idle.push(*row);
            self.rows.of.remove(&owner);
        }
    }

    /// Makes a lease a further owner of a sequence's blocks, whatever their state: the sequence goes on writing them, and a
    /// reader of the lease waits until it has. Without address rows only.
    ///
    /// # Panics
    /// If `seq` does not own one of them, the lease owns it already, or the pool has address rows.
    pub fn lease_out(&mut self, seq: SeqId, lease: LeaseId, blocks: &[PhysBlock]) {
        assert_eq!(self.space.rows, 0, "blocks in address rows are not leased out");
        for &block in blocks {
            assert!(self.has(Owner::Own(seq), block), "{block} is not {seq}'s to lease out");
            self.sharing.join(block, Owner::Lent(lease));
            *self.state_count(self.states[block.0 as usize]) += 1;
        }
        let n = u32::try_from(blocks.len()).expect("at most the pool's blocks");
        self.counts.lent += n;
        self.counts.shared += n;
        self.changed();
    }

    /// Advances an owned block to `state`; the same state is allowed.
    ///
    /// # Panics
    /// If the block is free, or would go back.
    pub fn mark(&mut self, block: PhysBlock, state: BlockState) {
        let old = self.state(block);
        assert!(state >= old, "{block} cannot go back from {old:?} to {state:?}");
        // Each owner counts.
        let owners = 1 + u32::try_from(self.sharing.others(block).count()).expect("a few owners");
        *self.state_count(old) -= owners;
        *self.state_count(state) += owners;
        self.states[block.0 as usize] = state;
    }

    /// Memory of the pool's metadata, in bytes.
    #[must_use]
    pub fn metadata_bytes(&self) -> usize {
        // A B-tree node is at least half full, so an entry costs at most twice its size.
        let extent_bytes = 2 * (size_of::<(u32, u32)>() + size_of::<(u32, u32)>());
        self.owners.capacity() * size_of::<Owner>()
            + self.states.capacity() * size_of::<BlockState>()
            + self.extents.count() * extent_bytes
            + self.cache.metadata_bytes()
            + self.sharing.metadata_bytes()
    }

    /// Recomputes all counts and compares them with the pool's. Linear; for tests and the simulator.
    ///
    /// # Panics
    /// If they differ.
    pub fn check(&self) {
        let mut counts = PoolCounts { total: self.counts.total, ..PoolCounts::default() };
        for (block, state) in (0..).map(PhysBlock).zip(&self.states) {
            for owner in self.owners(block) {
                match owner {
                    Owner::Free => {}
                    Owner::Own(_) => counts.own += 1,
                    Owner::Lent(_) => counts.lent += 1,
                }
                match state {
                    BlockState::Reserved => counts.reserved += 1,
                    BlockState::Filling => counts.filling += 1,
                    BlockState::Sealed => counts.sealed += 1,
                }
            }
            let sequences = self.owners(block).filter(|owner| matches!(owner, Owner::Own(_))).count();
            assert!(*state == BlockState::Sealed || sequences <= 1, "{block} is shared before it is sealed");
        }
        counts.shared = self.sharing.check(|block| self.owner(block));
        let addresses = u32::try_from(self.owners.len()).expect("addresses fit u32");
        let in_rows = addresses - self.space.loose_blocks;
        counts.free = self.counts.total + counts.shared - counts.own - counts.lent;
        assert_eq!(counts, self.counts, "the counts are not those of the blocks");
        let is_free = |block: u32| self.owners[block as usize] == Owner::Free;
        let free = (in_rows..addresses).filter(|b| is_free(*b) && !self.cache.is_cached(PhysBlock(*b)));
        assert!(self.extents.iter().eq(free), "the extents are not the free blocks");
        self.cache.check(|block| is_free(block.0));
        assert!(self.cache.cached() <= counts.free, "cached blocks are free");
        let mut rows = self.rows.idle.clone();
        for (owner, (row, held)) in &self.rows.of {
            let blocks = self.row_places(*row);
            assert_eq!(self.cache.cached_in(blocks.clone()).next(), None, "the row of {owner:?} keeps nothing");
            let own = blocks.clone().filter(|b| self.owners[*b as usize] == *owner).count();
            let free = blocks.filter(|b| self.owners[*b as usize] == Owner::Free).count();
            assert_eq!(own, *held as usize, "the row of {owner:?} holds what is counted");
            assert_eq!(own + free, self.space.row_blocks as usize, "nobody else is in the row of {owner:?}");
            rows.push(*row);
        }
        rows.sort_unstable();
        assert!(rows.into_iter().eq(0..self.space.rows), "rows were lost or given twice");
        assert!(
            self.rows
                .idle
                .iter()
                .all(|row| self.owners[(row * self.space.row_blocks) as usize..][..self.space.row_blocks as usize]
                    .iter()
                    .all(|owner| *owner == Owner::Free)),
            "an idle row is empty"
        );
        self.assert_sum();
    }

    /// Counts a change of owners and asserts the sums.
    fn changed(&mut self) {
        self.changes += 1;
        self.assert_sum();
    }

    fn assert_sum(&self) {
        let c = &self.counts;
        assert_eq!(c.free + c.own + c.lent, c.total + c.shared, "blocks were lost or made: {c:?}");
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
    fn gaps_that_fit_are_filled_before_long_extents_are_cut() {
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
    fn blocks_leased_out_are_written_by_their_sequence_and_outlive_it() {
        let mut pool = BlockPool::new(4);
        let blocks = pool.allocate(A, 3, None).unwrap();
        pool.lease_out(SeqId(1), LeaseId(2), &blocks[..2]);
        pool.lease_out(SeqId(1), LeaseId(3), &blocks[..2]);
        pool.check();
        assert_eq!((pool.counts().shared, pool.counts().lent, pool.counts().reserved), (4, 4, 7));
        pool.mark(blocks[0], BlockState::Filling);
        pool.mark(blocks[0], BlockState::Sealed);
        assert_eq!((pool.counts().sealed, pool.counts().reserved), (3, 4));
        pool.free(A, &blocks);
        pool.check();
        assert_eq!((pool.counts().free, pool.owner(blocks[1])), (2, Owner::Lent(LeaseId(2))));
        pool.free(Owner::Lent(LeaseId(2)), &blocks[..2]);
        pool.free(Owner::Lent(LeaseId(3)), &blocks[..2]);
        pool.check();
        assert_eq!(pool.counts().free, 4);
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
