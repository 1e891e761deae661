//! Prefix cache: the block hashes of blocks, and the cached blocks (free blocks that keep their KV) in idle memory.
//!
//! A block gets its block hash ([`BlockHash`]) when it is sealed and loses it when its memory gets a new owner. In
//! between it may be owned, cached, and owned again. Every count takes cached blocks as free memory; they are evicted when
//! other free memory is short: the longest cached first, and of blocks cached together the deepest, because a block is
//! useful only with all preceding ones.
//!
//! Invariants: each block with a block hash is in `found` once, under that hash, and if it is cached, in `order` once;
//! neither holds anything else. The index is bounded by the pool: an entry is a block of memory.

use crate::BlockHash;
use crate::mutants::{self, Mutant};
use lagoon_types::PhysBlock;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Index of block hashes and cached blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache {
    hashes: BTreeMap<PhysBlock, Hashed>,
    /// Cached blocks in eviction order.
    order: BTreeSet<(u64, Reverse<u32>, PhysBlock)>,
    /// Blocks by block hash, owned or cached.
    found: BTreeMap<BlockHash, BTreeSet<PhysBlock>>,
    /// Number of times that blocks became cached.
    clock: u64,
    evictions: u64,
}

#[derive(Clone, Copy, Debug)]
struct Hashed {
    hash: BlockHash,
    /// Number of preceding blocks in the chain.
    depth: u32,
    /// Clock when it became cached; `None` while it has an owner.
    cached_at: Option<u64>,
}

impl Cache {
    /// Number of cached blocks.
    pub(crate) fn cached(&self) -> u32 {
        u32::try_from(self.order.len()).expect("at most the pool's blocks")
    }

    /// Evictions since the start.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Sets the block hash of an owned block. A block that has one keeps it.
    pub(crate) fn set_hash(&mut self, block: PhysBlock, hash: BlockHash, depth: u32) {
        let hashed = self.hashes.entry(block).or_insert(Hashed { hash, depth, cached_at: None });
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
        self.order.insert((self.clock, Reverse(hashed.depth), block));
        true
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
        let Some(at) = hashed.cached_at.take() else { return };
        assert!(self.order.remove(&(at, Reverse(hashed.depth), block)), "{block} is in the eviction order");
    }

    /// Evicts a cached block.
    pub(crate) fn evict(&mut self, block: PhysBlock) {
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
        let order = size_of::<(u64, Reverse<u32>, PhysBlock)>();
        let found = size_of::<(BlockHash, BTreeSet<PhysBlock>)>() + size_of::<PhysBlock>();
        2 * (self.hashes.len() * size_of::<(PhysBlock, Hashed)>() + self.order.len() * (order + found))
    }

    /// Checks the invariants. Linear.
    ///
    /// # Panics
    /// If they differ.
    pub(crate) fn check(&self, is_free: impl Fn(PhysBlock) -> bool) {
        let order = |(block, hashed): (&PhysBlock, &Hashed)| Some((hashed.cached_at?, Reverse(hashed.depth), *block));
        let order: BTreeSet<_> = self.hashes.iter().filter_map(order).collect();
        assert_eq!(order, self.order, "cached blocks are in eviction order");
        let found =
            |(block, hashed): (&PhysBlock, &Hashed)| self.found.get(&hashed.hash).is_some_and(|c| c.contains(block));
        assert!(self.hashes.iter().all(found), "a block is found under its hash");
        let entries: usize = self.found.values().map(BTreeSet::len).sum();
        let empty = self.found.values().any(BTreeSet::is_empty);
        assert!(entries == self.hashes.len() && !empty, "nothing else is found");
        assert!(
            self.hashes.iter().all(|(block, hashed)| is_free(*block) == hashed.cached_at.is_some()),
            "a block with a hash is owned or cached"
        );
    }
}
