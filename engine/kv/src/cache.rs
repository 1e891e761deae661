//! Prefix cache: the block hashes of blocks, and the cached blocks (free blocks that keep their KV) in idle memory.
//!
//! A block gets its block hash ([`BlockIdentity`]) when it is sealed and loses it when its memory gets a new owner. In
//! between it may be owned, cached, and owned again. Every count takes cached blocks as free memory; they are evicted when
//! other free memory is short: the longest cached first, and of blocks cached together the deepest, because a block is
//! useful only with all preceding ones.
//!
//! Invariants: each block with a block hash is in `found` once, under that hash, and if it is cached, in `order` once;
//! neither holds anything else. The index is bounded by the pool: an entry is a block of memory.

use crate::BlockIdentity;
use crate::mutants::{self, Mutant};
use lagoon_types::PhysBlock;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Index of block hashes and cached blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache {
    names: BTreeMap<PhysBlock, Name>,
    /// Cached blocks in eviction order.
    order: BTreeSet<(u64, Reverse<u32>, PhysBlock)>,
    /// Blocks by block hash, owned or cached.
    found: BTreeMap<BlockIdentity, BTreeSet<PhysBlock>>,
    /// Number of times that blocks became cached.
    clock: u64,
    dropped: u64,
}

#[derive(Clone, Copy, Debug)]
struct Name {
    identity: BlockIdentity,
    /// Number of preceding blocks in the chain.
    depth: u32,
    /// Clock when it became cached; `None` while it has an owner.
    kept: Option<u64>,
}

impl Cache {
    /// Number of cached blocks.
    pub(crate) fn kept(&self) -> u32 {
        u32::try_from(self.order.len()).expect("at most the pool's blocks")
    }

    /// Evictions since the start.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Sets the block hash of an owned block. A block that has one keeps it: it was found under it.
    pub(crate) fn name(&mut self, block: PhysBlock, identity: BlockIdentity, depth: u32) {
        let name = self.names.entry(block).or_insert(Name { identity, depth, kept: None });
        self.found.entry(name.identity).or_default().insert(block);
    }

    /// Advances the clock: blocks cached from now on are younger than those before.
    pub(crate) fn tick(&mut self) {
        self.clock += 1;
    }

    /// Caches a released block if it has a block hash; returns whether it has.
    pub(crate) fn keep(&mut self, block: PhysBlock) -> bool {
        let Some(name) = self.names.get_mut(&block) else { return false };
        assert_eq!(name.kept, None, "{block} is kept once");
        name.kept = Some(self.clock);
        self.order.insert((self.clock, Reverse(name.depth), block));
        true
    }

    /// Removes a block's hash, whether it is owned or cached.
    pub(crate) fn forget(&mut self, block: PhysBlock) {
        self.take(block);
        if mutants::is(Mutant::StaleName) {
            return;
        }
        let Some(name) = self.names.remove(&block) else { return };
        let copies = self.found.get_mut(&name.identity).expect("a block with a name is found");
        copies.remove(&block);
        if copies.is_empty() {
            self.found.remove(&name.identity);
        }
    }

    /// Gives a cached block with its KV to an owner (a prefix-cache hit).
    pub(crate) fn take(&mut self, block: PhysBlock) {
        let Some(name) = self.names.get_mut(&block) else { return };
        let Some(kept) = name.kept.take() else { return };
        assert!(self.order.remove(&(kept, Reverse(name.depth), block)), "{block} is kept in order");
    }

    /// Evicts a cached block.
    pub(crate) fn drop_kept(&mut self, block: PhysBlock) {
        self.forget(block);
        self.dropped += 1;
    }

    /// The cached block to evict next.
    pub(crate) fn oldest(&self) -> Option<PhysBlock> {
        self.order.first().map(|(_, _, block)| *block)
    }

    pub(crate) fn is_kept(&self, block: PhysBlock) -> bool {
        self.names.get(&block).is_some_and(|name| name.kept.is_some())
    }

    /// Cached blocks in the range `blocks`, ascending.
    pub(crate) fn kept_in(&self, blocks: std::ops::Range<u32>) -> impl Iterator<Item = PhysBlock> {
        let named = self.names.range(PhysBlock(blocks.start)..PhysBlock(blocks.end));
        named.filter(|(_, name)| name.kept.is_some()).map(|(block, _)| *block)
    }

    /// Cached blocks with this block hash.
    pub(crate) fn copies(&self, identity: &BlockIdentity) -> impl Iterator<Item = PhysBlock> {
        self.found.get(identity).into_iter().flatten().copied().filter(|block| self.is_kept(*block))
    }

    /// An owned block with this block hash.
    pub(crate) fn held(&self, identity: &BlockIdentity) -> Option<PhysBlock> {
        self.found.get(identity)?.iter().copied().find(|block| !self.is_kept(*block))
    }

    /// A block with this block hash, owned or cached.
    pub(crate) fn any(&self, identity: &BlockIdentity) -> Option<PhysBlock> {
        self.found.get(identity)?.first().copied()
    }

    /// Whether a block has this block hash.
    pub(crate) fn names_it(&self, block: PhysBlock, identity: &BlockIdentity) -> bool {
        self.names.get(&block).is_some_and(|name| name.identity == *identity)
    }

    /// Whether a block is cached and has this block hash.
    pub(crate) fn keeps(&self, block: PhysBlock, identity: &BlockIdentity) -> bool {
        self.names.get(&block).is_some_and(|name| name.kept.is_some() && name.identity == *identity)
    }

    /// Memory of the index, in bytes; a B-tree's node is at least half full.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let order = size_of::<(u64, Reverse<u32>, PhysBlock)>();
        let found = size_of::<(BlockIdentity, BTreeSet<PhysBlock>)>() + size_of::<PhysBlock>();
        2 * (self.names.len() * size_of::<(PhysBlock, Name)>() + self.order.len() * (order + found))
    }

    /// Checks the invariants. Linear.
    ///
    /// # Panics
    /// If they differ.
    pub(crate) fn check(&self, is_free: impl Fn(PhysBlock) -> bool) {
        let order = |(block, name): (&PhysBlock, &Name)| Some((name.kept?, Reverse(name.depth), *block));
        let order: BTreeSet<_> = self.names.iter().filter_map(order).collect();
        assert_eq!(order, self.order, "what is kept is in order");
        let found =
            |(block, name): (&PhysBlock, &Name)| self.found.get(&name.identity).is_some_and(|c| c.contains(block));
        assert!(self.names.iter().all(found), "what has a name is found under it");
        let entries: usize = self.found.values().map(BTreeSet::len).sum();
        let empty = self.found.values().any(BTreeSet::is_empty);
        assert!(entries == self.names.len() && !empty, "nothing else is found");
        assert!(
            self.names.iter().all(|(block, name)| is_free(*block) == name.kept.is_some()),
            "a name is that of a block that somebody has, or that is kept"
        );
    }
}
