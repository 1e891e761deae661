//! Prefix cache: the block hashes of blocks, and the cached blocks (free blocks that keep their KV) in idle memory.
//!
//! A block gets its block hash ([`BlockHash`]) when it is sealed and loses it when its memory gets a new owner. In
//! between it may be owned, cached, and owned again. Every count takes cached blocks as free memory; they are evicted when
//! other free memory is short: the longest cached first, and of blocks cached together the deepest, because a block is
//! useful only with all preceding ones.
//!
//! Invariants: each block with a block hash is in `found` once, under that hash, and if it is cached, in `order` once;
//! neither holds anything else. The index is bounded by the pool: an entry is a block of memory.
//!
//! Where tiers beside the KV memory keep copies (`pool/saving.rs`), `unsaved` has the cached blocks of which no copy was
//! begun, in eviction order.

use crate::mutants::{self, Mutant};
use crate::{BlockHash, TenantCounts};
use lagoon_types::PhysBlock;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A cached block's place in the eviction order.
pub(crate) type Turn = (u64, Reverse<u32>, PhysBlock);

/// Index of block hashes and cached blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache {
    hashes: BTreeMap<PhysBlock, Hashed>,
    /// Cached blocks in eviction order.
    order: BTreeSet<Turn>,
    /// Those of `order` with [`Saved::No`]; `None` where no tier keeps copies.
    unsaved: Option<BTreeSet<Turn>>,
    /// Blocks by block hash, owned or cached.
    found: BTreeMap<BlockHash, BTreeSet<PhysBlock>>,
    /// Cached blocks by tenant.
    tenants: TenantCounts,
    /// Number of times that blocks became cached.
    clock: u64,
    evictions: u64,
    /// Evictions of blocks without [`Saved::Yes`].
    unsaved_evictions: u64,
}

/// Whether a tier keeps a copy of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    No,
    /// Copy of this number is being read.
    Reading(u64),
    /// It has a copy, or none could be made.
    Yes,
}

#[derive(Clone, Copy, Debug)]
struct Hashed {
    hash: BlockHash,
    /// Number of preceding blocks in the chain.
    depth: u32,
    /// Clock when it became cached; `None` while it has an owner.
    cached_at: Option<u64>,
    saved: Saved,
}

impl Hashed {
    fn turn(&self, block: PhysBlock) -> Option<Turn> {
        Some((self.cached_at?, Reverse(self.depth), block))
    }
}

impl Cache {
    /// Number of cached blocks.
    pub(crate) fn cached(&self) -> u32 {
        u32::try_from(self.order.len()).expect("at most the pool's blocks")
    }

    /// Cached blocks by tenant.
    pub(crate) fn tenants(&self) -> &TenantCounts {
        &self.tenants
    }

    /// Cached blocks of which the hash is one of these.
    pub(crate) fn cached_of(&self, is_one: impl Fn(&BlockHash) -> bool) -> Vec<PhysBlock> {
        let cached = self.order.iter().map(|(_, _, block)| *block);
        cached.filter(|block| is_one(&self.hashes[block].hash)).collect()
    }

    /// Evictions since the start.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Sets the block hash of an owned block. A block that has one keeps it.
    pub(crate) fn set_hash(&mut self, block: PhysBlock, hash: BlockHash, depth: u32) {
        let hashed = self.hashes.entry(block).or_insert(Hashed { hash, depth, cached_at: None, saved: Saved::No });
        self.found.entry(hashed.hash).or_default().insert(block);
    }

    /// Advances the clock: blocks cached from now on are younger than those before.
    pub(crate) fn tick(&mut self) {
        self.clock += 1;
    }

    /// Caches a released block if it has a block hash; returns whether it has.
    pub(crate) fn release(&mut self, block: PhysBlock) -> bool {
        let Some(hashed) = self.hashes.get_mut(&block) else { return false };
        assert_eq!(hashed.cached_at, None, "{block} is cached once");
        hashed.cached_at = Some(self.clock);
        let turn = (self.clock, Reverse(hashed.depth), block);
        self.order.insert(turn);
        self.tenants.add(&hashed.hash);
        if let Some(unsaved) = self.unsaved.as_mut().filter(|_| hashed.saved == Saved::No) {
            unsaved.insert(turn);
        }
        true
    }

    /// Notes from now on which cached blocks have copies in tiers.
    pub(crate) fn track_unsaved(&mut self) {
        let is_unsaved = |turn: &&Turn| self.hashes[&turn.2].saved == Saved::No;
        self.unsaved = Some(self.order.iter().filter(is_unsaved).copied().collect());
    }

    /// The cached block without a copy that is evicted first.
    pub(crate) fn next_unsaved(&self) -> Option<(PhysBlock, BlockHash)> {
        let (_, _, block) = self.unsaved.as_ref()?.first()?;
        Some((*block, self.hashes[block].hash))
    }

    /// Cached blocks without a copy.
    pub(crate) fn unsaved(&self) -> u32 {
        let unsaved = self.unsaved.as_ref().map_or(0, BTreeSet::len);
        u32::try_from(unsaved).expect("at most the pool's blocks")
    }

    /// Evictions of blocks without a copy since the start.
    pub(crate) fn unsaved_evictions(&self) -> u64 {
        self.unsaved_evictions
    }

    /// Whether a block has a copy; `None` if it has no block hash.
    pub(crate) fn saved(&self, block: PhysBlock) -> Option<Saved> {
        self.hashes.get(&block).map(|hashed| hashed.saved)
    }

    /// Sets whether a block with a block hash has a copy.
    pub(crate) fn set_saved(&mut self, block: PhysBlock, saved: Saved) {
        let (Some(hashed), Some(unsaved)) = (self.hashes.get_mut(&block), &mut self.unsaved) else { return };
        hashed.saved = saved;
        match (hashed.turn(block), saved) {
            (Some(turn), Saved::No) => _ = unsaved.insert(turn),
            (Some(turn), Saved::Reading(_) | Saved::Yes) => _ = unsaved.remove(&turn),
            (None, _) => {}
        }
    }

    /// All blocks with this block hash.
    pub(crate) fn all(&self, hash: &BlockHash) -> Vec<PhysBlock> {
        self.found.get(hash).into_iter().flatten().copied().collect()
    }

    /// Blocks with a hash that is one of these, owned or cached.
    pub(crate) fn blocks_of(&self, is_one: impl Fn(&BlockHash) -> bool) -> Vec<PhysBlock> {
        let hashed = self.hashes.iter().filter(|(_, hashed)| is_one(&hashed.hash));
        hashed.map(|(block, _)| *block).collect()
    }

    /// Removes a block's hash, whether it is owned or cached.
    pub(crate) fn forget(&mut self, block: PhysBlock) {
        self.take(block);
        if mutants::is(Mutant::StaleHash) {
            return;
        }
        let Some(hashed) = self.hashes.remove(&block) else { return };
        let copies = self.found.get_mut(&hashed.hash).expect("a block with a hash is found");
        copies.remove(&block);
        if copies.is_empty() {
            self.found.remove(&hashed.hash);
        }
    }

    /// Gives a cached block with its KV to an owner (a prefix-cache hit).
    pub(crate) fn take(&mut self, block: PhysBlock) {
        let Some(hashed) = self.hashes.get_mut(&block) else { return };
        let Some(turn) = hashed.turn(block) else { return };
        hashed.cached_at = None;
        assert!(self.order.remove(&turn), "{block} is in the eviction order");
        self.tenants.remove(&hashed.hash);
        self.unsaved.iter_mut().for_each(|unsaved| _ = unsaved.remove(&turn));
    }

    /// Evicts a cached block.
    pub(crate) fn evict(&mut self, block: PhysBlock) {
        let is_saved = self.unsaved.is_none() || self.saved(block) == Some(Saved::Yes);
        self.unsaved_evictions += u64::from(!is_saved);
        self.forget(block);
        self.evictions += 1;
    }

    /// The cached block to evict next.
    pub(crate) fn oldest(&self) -> Option<PhysBlock> {
        self.order.first().map(|(_, _, block)| *block)
    }

    pub(crate) fn is_cached(&self, block: PhysBlock) -> bool {
        self.hashes.get(&block).is_some_and(|hashed| hashed.cached_at.is_some())
    }

    /// Cached blocks in the range `blocks`, ascending.
    pub(crate) fn cached_in(&self, blocks: std::ops::Range<u32>) -> impl Iterator<Item = PhysBlock> {
        let blocks = self.hashes.range(PhysBlock(blocks.start)..PhysBlock(blocks.end));
        blocks.filter(|(_, hashed)| hashed.cached_at.is_some()).map(|(block, _)| *block)
    }

    /// Cached blocks with this block hash.
    pub(crate) fn copies(&self, hash: &BlockHash) -> impl Iterator<Item = PhysBlock> {
        self.found.get(hash).into_iter().flatten().copied().filter(|block| self.is_cached(*block))
    }

    /// An owned block with this block hash.
    pub(crate) fn held(&self, hash: &BlockHash) -> Option<PhysBlock> {
        self.found.get(hash)?.iter().copied().find(|block| !self.is_cached(*block))
    }

    /// A block with this block hash, owned or cached.
    pub(crate) fn any(&self, hash: &BlockHash) -> Option<PhysBlock> {
        self.found.get(hash)?.first().copied()
    }

    /// All block hashes, ascending.
    pub(crate) fn hashes(&self) -> impl Iterator<Item = &BlockHash> {
        self.found.keys()
    }

    /// Whether a block has this block hash.
    pub(crate) fn has_hash(&self, block: PhysBlock, hash: &BlockHash) -> bool {
        self.hashes.get(&block).is_some_and(|hashed| hashed.hash == *hash)
    }

    /// Whether a block is cached and has this block hash.
    pub(crate) fn caches(&self, block: PhysBlock, hash: &BlockHash) -> bool {
        self.hashes.get(&block).is_some_and(|hashed| hashed.cached_at.is_some() && hashed.hash == *hash)
    }

    /// Memory of the index, in bytes; a B-tree's node is at least half full.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let order = size_of::<Turn>();
        let found = size_of::<(BlockHash, BTreeSet<PhysBlock>)>() + size_of::<PhysBlock>();
        let unsaved = self.unsaved() as usize * order;
        2 * (self.hashes.len() * size_of::<(PhysBlock, Hashed)>() + self.order.len() * (order + found) + unsaved)
    }

    /// Checks the invariants. Linear.
    ///
    /// # Panics
    /// If they differ.
    pub(crate) fn check(&self, is_free: impl Fn(PhysBlock) -> bool) {
        let order: BTreeSet<_> = self.hashes.iter().filter_map(|(block, hashed)| hashed.turn(*block)).collect();
        assert_eq!(order, self.order, "cached blocks are in eviction order");
        if let Some(unsaved) = &self.unsaved {
            let without = order.iter().filter(|turn| self.hashes[&turn.2].saved == Saved::No);
            assert!(unsaved.iter().eq(without), "cached blocks without a copy are in eviction order");
        }
        let found =
            |(block, hashed): (&PhysBlock, &Hashed)| self.found.get(&hashed.hash).is_some_and(|c| c.contains(block));
        assert!(self.hashes.iter().all(found), "a block is found under its hash");
        let cached = self.order.iter().map(|turn| &self.hashes[&turn.2].hash);
        assert_eq!(cached.collect::<TenantCounts>(), self.tenants, "cached blocks are counted by tenant");
        let entries: usize = self.found.values().map(BTreeSet::len).sum();
        let empty = self.found.values().any(BTreeSet::is_empty);
        assert!(entries == self.hashes.len() && !empty, "nothing else is found");
        assert!(
            self.hashes.iter().all(|(block, hashed)| is_free(*block) == hashed.cached_at.is_some()),
            "a block with a hash is owned or cached"
        );
    }
}
