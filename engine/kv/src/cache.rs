//! Names of blocks, and the blocks that nobody has and that keep what they hold: idle memory as a prefix cache.
//!
//! A block gets its name when it is sealed ([`BlockIdentity`]) and loses it when its memory is given to somebody. Between
//! the two it may be held, kept, and held again. What is kept is free memory in every count; it is dropped when free
//! memory without a name is short: what was kept longest first, and of blocks kept together the deepest, as a block is
//! of use only with all that precede it.
//!
//! Invariants: each block with a name is in `found` once, under that name, and if it is kept, in `order` once; there is
//! nothing else in either. The index is bounded by the pool: an entry is a block of memory.

use crate::BlockIdentity;
use crate::mutants::{self, Mutant};
use lagoon_types::PhysBlock;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache {
    names: BTreeMap<PhysBlock, Name>,
    /// Kept blocks, in the order in which they are dropped.
    order: BTreeSet<(u64, Reverse<u32>, PhysBlock)>,
    /// Blocks with names by what they hold, kept or not.
    found: BTreeMap<BlockIdentity, BTreeSet<PhysBlock>>,
    /// Times that blocks were kept.
    clock: u64,
    dropped: u64,
}

#[derive(Clone, Copy, Debug)]
struct Name {
    identity: BlockIdentity,
    /// Blocks that precede it.
    depth: u32,
    /// Since when it is kept; `None` while somebody has it.
    kept: Option<u64>,
}

impl Cache {
    /// Blocks that are kept.
    pub(crate) fn kept(&self) -> u32 {
        u32::try_from(self.order.len()).expect("at most the pool's blocks")
    }

    /// Kept blocks whose memory was given to somebody else, since the start.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Names a block that somebody has. One that has a name keeps it: it was found under it.
    pub(crate) fn name(&mut self, block: PhysBlock, identity: BlockIdentity, depth: u32) {
        let name = self.names.entry(block).or_insert(Name { identity, depth, kept: None });
        self.found.entry(name.identity).or_default().insert(block);
    }

    /// What is kept from now on is younger than what was kept before.
    pub(crate) fn tick(&mut self) {
        self.clock += 1;
    }

    /// Somebody gives a block back: it is kept if it has a name.
    pub(crate) fn keep(&mut self, block: PhysBlock) -> bool {
        let Some(name) = self.names.get_mut(&block) else { return false };
        assert_eq!(name.kept, None, "{block} is kept once");
        name.kept = Some(self.clock);
        self.order.insert((self.clock, Reverse(name.depth), block));
        true
    }

    /// A block loses its name, whoever has it.
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

    /// Somebody gets a kept block with what it holds.
    pub(crate) fn take(&mut self, block: PhysBlock) {
        let Some(name) = self.names.get_mut(&block) else { return };
        let Some(kept) = name.kept.take() else { return };
        assert!(self.order.remove(&(kept, Reverse(name.depth), block)), "{block} is kept in order");
    }

    /// A kept block's memory is wanted.
    pub(crate) fn drop_kept(&mut self, block: PhysBlock) {
        self.forget(block);
        self.dropped += 1;
    }

    /// The kept block that is dropped next.
    pub(crate) fn oldest(&self) -> Option<PhysBlock> {
        self.order.first().map(|(_, _, block)| *block)
    }

    pub(crate) fn is_kept(&self, block: PhysBlock) -> bool {
        self.names.get(&block).is_some_and(|name| name.kept.is_some())
    }

    /// Kept blocks among `blocks`, ascending.
    pub(crate) fn kept_in(&self, blocks: std::ops::Range<u32>) -> impl Iterator<Item = PhysBlock> {
        let named = self.names.range(PhysBlock(blocks.start)..PhysBlock(blocks.end));
        named.filter(|(_, name)| name.kept.is_some()).map(|(block, _)| *block)
    }

    /// Kept blocks that hold this.
    pub(crate) fn copies(&self, identity: &BlockIdentity) -> impl Iterator<Item = PhysBlock> {
        self.found.get(identity).into_iter().flatten().copied().filter(|block| self.is_kept(*block))
    }

    /// A block that holds this and that somebody has.
    pub(crate) fn held(&self, identity: &BlockIdentity) -> Option<PhysBlock> {
        self.found.get(identity)?.iter().copied().find(|block| !self.is_kept(*block))
    }

    /// A block that holds this, whoever has it.
    pub(crate) fn any(&self, identity: &BlockIdentity) -> Option<PhysBlock> {
        self.found.get(identity)?.first().copied()
    }

    /// Whether a block holds this.
    pub(crate) fn names_it(&self, block: PhysBlock, identity: &BlockIdentity) -> bool {
        self.names.get(&block).is_some_and(|name| name.identity == *identity)
    }

    /// Whether a block is kept and holds this.
    pub(crate) fn keeps(&self, block: PhysBlock, identity: &BlockIdentity) -> bool {
        self.names.get(&block).is_some_and(|name| name.kept.is_some() && name.identity == *identity)
    }

    /// Bytes that it takes; a B-tree's node is at least half full.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let order = size_of::<(u64, Reverse<u32>, PhysBlock)>();
        let found = size_of::<(BlockIdentity, BTreeSet<PhysBlock>)>() + size_of::<PhysBlock>();
        2 * (self.names.len() * size_of::<(PhysBlock, Name)>() + self.order.len() * (order + found))
    }

    /// Compares everything with the names. Linear.
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
