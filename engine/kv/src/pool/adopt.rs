//! Prefix-cache hits: blocks that already hold the KV of a sequence's first tokens.
//!
//! An owned block is shared and costs no memory; a cached block becomes the sequence's own. With virtual memory the blocks
//! lie in the sequence's own address row: blocks cached at their address there stay, all others are mapped there, and a cached
//! block is unmapped from its former address.
//!
//! A hit that appears only while the sequence runs (several sequences compute one prefix concurrently) is a
//! [`BlockPool::join`].

use super::{BlockPool, BlockState, Owner};
use crate::BlockHash;
use lagoon_types::{PhysBlock, SeqId};
use std::collections::BTreeMap;

/// Prefix-cache hits of a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Its first logical blocks, sealed.
    pub blocks: Vec<PhysBlock>,
    /// Number of `blocks` that are shared with other owners.
    pub shared: u32,
    /// With virtual memory: pairs (source, block of `blocks`). The caller maps the source's memory at the block before any
    /// other use of either.
    pub mapped: Vec<(PhysBlock, PhysBlock)>,
    /// Sources of `mapped` without an owner: they lose their memory after the mapping.
    pub left: Vec<PhysBlock>,
}

/// Shared block that replaces an owner's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    pub block: PhysBlock,
    /// With virtual memory: the block whose memory the caller maps at `block`, after it released the memory there.
    pub mapped: Option<PhysBlock>,
}

/// A block found by its block hash.
#[derive(Clone, Copy)]
enum Found {
    /// Owned.
    Owned(PhysBlock),
    /// Cached.
    Cached(PhysBlock),
}

impl BlockPool {
    /// Gives a sequence without blocks here the longest found prefix of `hashes` as its first logical blocks, sealed. With
    /// address rows but without `map` (no memory may be mapped), only blocks cached in one row are found.
    pub fn adopt(&mut self, seq: SeqId, hashes: &[BlockHash], map: bool) -> Adopted {
        let owner = Owner::Own(seq);
        let adopted =
            if self.space.rows == 0 { self.adopt_flat(owner, hashes) } else { self.adopt_in_row(owner, hashes, map) };
        // Shared blocks cost no memory.
        let holdings = u32::try_from(adopted.blocks.len()).expect("at most the pool's blocks");
        self.counts.free -= holdings - adopted.shared;
        self.counts.own += holdings;
        self.counts.sealed += holdings;
        self.counts.shared += adopted.shared;
        self.changed();
        adopted
    }

    /// Gives `owner` the longest found run of `hashes`, sealed: blocks in use are shared, cached ones become its own. At most
    /// `blocks` in all, and at most `cached` that were free. Without address rows only: a run may begin anywhere in a
    /// sequence, or belong to a lease, and neither has places in a row.
    pub fn adopt_run(&mut self, owner: Owner, hashes: &[BlockHash], cached: u32, blocks: u32) -> Vec<PhysBlock> {
        if !self.caches_runs() {
            return Vec::new();
        }
        let (mut freed, mut wanted) = (0, 0);
        for hash in hashes.iter().take(blocks as usize) {
            match self.find(hash, None) {
                Some(Found::Owned(block)) if !self.has(owner, block) => {}
                Some(Found::Cached(_)) if freed < cached => freed += 1,
                _ => break,
            }
            wanted += 1;
        }
        let Adopted { blocks, shared, .. } = self.adopt_flat(owner, &hashes[..wanted]);
        let holdings = u32::try_from(blocks.len()).expect("at most the pool's blocks");
        self.counts.free -= holdings - shared;
        *self.count_of(owner) += holdings;
        self.counts.sealed += holdings;
        self.counts.shared += shared;
        self.changed();
        blocks
    }

    /// Whether blocks outside of address rows are cached: the pool has none.
    #[must_use]
    pub fn caches_runs(&self) -> bool {
        self.space.rows == 0
    }

    /// Number of `hashes`, from the first on, of which blocks are found, owned or cached.
    #[must_use]
    pub fn found(&self, hashes: &[BlockHash]) -> u32 {
        let found = hashes.iter().take_while(|hash| self.cache.any(hash).is_some()).count();
        u32::try_from(found).expect("at most the pool's blocks")
    }

    /// The block hashes of owned and cached blocks, ascending.
    pub fn hashes(&self) -> impl Iterator<Item = &BlockHash> {
        self.cache.hashes()
    }

    /// Replaces `block`, whose content is not needed, by an owned block with block hash `hash`, if there is one, and returns
    /// it. With address rows the address stays the same, and `map` is whether memory may be mapped there.
    ///
    /// # Panics
    /// If `owner` is not the only owner of `block`.
    pub fn join(&mut self, owner: Owner, block: PhysBlock, hash: &BlockHash, map: bool) -> Option<Joined> {
        assert!(self.owner(block) == owner && !self.is_shared(block), "{block} is not {owner:?}'s alone");
        let from = self.cache.held(hash).filter(|from| *from != block)?;
        let rows = self.space.rows > 0;
        if rows && (!map || !self.is_in_row(block)) {
            return None;
        }
        let at = block.0 as usize;
        *self.state_count(self.states[at]) -= 1;
        self.cache.forget(block);
        if rows {
            self.states[at] = BlockState::Sealed;
            self.sharing.map(from, block);
            self.freed.push(block);
        } else {
            (self.states[at], self.owners[at]) = (BlockState::Reserved, Owner::Free);
            self.extents.give(block.0);
            self.sharing.join(from, owner);
        }
        self.counts.sealed += 1;
        self.counts.shared += 1;
        self.counts.free += 1;
        self.changed();
        Some(Joined { block: if rows { block } else { from }, mapped: rows.then_some(from) })
    }

    /// Number of blocks that [`BlockPool::adopt`] would share, at no cost of memory.
    #[must_use]
    pub fn shareable(&self, hashes: &[BlockHash], map: bool) -> u32 {
        let rows = self.space.rows > 0;
        if rows && (!map || self.rows.idle.is_empty()) {
            return 0;
        }
        let hashes = if rows { self.row_hashes(hashes) } else { hashes };
        let found = hashes.iter().map_while(|hash| self.cache.any(hash).map(|_| hash));
        let held = found.filter(|hash| self.cache.held(hash).is_some()).count();
        u32::try_from(held).expect("at most the pool's blocks")
    }

    /// Whether `block`'s memory has several owners.
    #[must_use]
    pub fn is_shared(&self, block: PhysBlock) -> bool {
        self.sharing.is_shared(block)
    }

    /// All owners of a block number: several for a shared block without virtual memory.
    pub fn owners(&self, block: PhysBlock) -> impl Iterator<Item = Owner> + '_ {
        std::iter::once(self.owner(block)).filter(|owner| *owner != Owner::Free).chain(self.sharing.others(block))
    }

    /// Whether `owner` owns a block, alone or shared.
    #[must_use]
    pub fn has(&self, owner: Owner, block: PhysBlock) -> bool {
        self.owner(block) == owner || self.sharing.has(block, owner)
    }

    fn adopt_flat(&mut self, owner: Owner, hashes: &[BlockHash]) -> Adopted {
        let mut adopted = Adopted::default();
        for hash in hashes {
            let next = adopted.blocks.last().map(|last: &PhysBlock| PhysBlock(last.0 + 1));
            let Some(found) = self.find(hash, next) else { break };
            match found {
                Found::Owned(block) => {
                    self.sharing.join(block, owner);
                    adopted.shared += 1;
                    adopted.blocks.push(block);
                }
                Found::Cached(block) => {
                    self.cache.take(block);
                    self.take_sealed(block, owner);
                    adopted.blocks.push(block);
                }
            }
        }
        adopted
    }

    /// A block with this block hash: an owned one before a cached one, and of either `next` if it has the hash.
    fn find(&self, hash: &BlockHash, next: Option<PhysBlock>) -> Option<Found> {
        let is = |block: &PhysBlock| self.cache.has_hash(*block, hash);
        let next = next.filter(is);
        let held = next.filter(|next| !self.cache.is_cached(*next)).or_else(|| self.cache.held(hash));
        held.map(Found::Owned).or_else(|| next.or_else(|| self.cache.any(hash)).map(Found::Cached))
    }

    fn take_sealed(&mut self, block: PhysBlock, owner: Owner) {
        self.give(block, owner);
        self.states[block.0 as usize] = BlockState::Sealed;
    }

    fn row_hashes<'a>(&self, hashes: &'a [BlockHash]) -> &'a [BlockHash] {
        &hashes[..hashes.len().min(self.space.row_blocks as usize)]
    }

    fn adopt_in_row(&mut self, owner: Owner, hashes: &[BlockHash], map: bool) -> Adopted {
        let hashes = self.row_hashes(hashes);
        let found = hashes.iter().map_while(|hash| self.find(hash, None).map(|found| (hash, found)));
        let found: Vec<(&BlockHash, Found)> = found.collect();
        let Some((row, known)) = self.row_for(hashes, found.len(), map) else { return Adopted::default() };
        let mut adopted = Adopted::default();
        for ((hash, found), place) in found.into_iter().take(known).zip((row * self.space.row_blocks..).map(PhysBlock))
        {
            match found {
                Found::Owned(from) if map => {
                    self.sharing.map(from, place);
                    adopted.shared += 1;
                    adopted.mapped.push((from, place));
                }
                Found::Owned(_) | Found::Cached(_) if self.cache.caches(place, hash) => self.cache.take(place),
                Found::Owned(from) | Found::Cached(from) => {
                    self.cache.forget(from);
                    adopted.mapped.push((from, place));
                    adopted.left.push(from);
                }
            }
            adopted.blocks.push(place);
        }
        // Evicts the row's other cached blocks, also at addresses that are shared from now on.
        self.drop_row(row);
        for &block in &adopted.blocks {
            self.take_sealed(block, owner);
        }
        self.rows.idle.retain(|idle| *idle != row);
        let held = u32::try_from(known).expect("at most a row");
        let old = self.rows.of.insert(owner, (row, held));
        assert_eq!(old, None, "{owner:?} has a row already");
        adopted
    }

    /// The address row for a sequence with `found` hits, and the number of hits that it gets there: the row that caches most of
    /// them at their addresses, so that the fewest are mapped.
    fn row_for(&self, hashes: &[BlockHash], found: usize, map: bool) -> Option<(u32, usize)> {
        let row_blocks = self.space.row_blocks;
        if !map {
            let starts = self.cache.copies(hashes.first()?).filter(|block| block.0 % row_blocks == 0);
            let kept = |start: PhysBlock| {
                let places = (start.0..).map(PhysBlock).zip(hashes);
                places.take_while(|(block, hash)| self.cache.caches(*block, hash)).count()
            };
            let best = starts.filter(|start| self.is_in_row(*start)).max_by_key(|start| kept(*start))?;
            return Some((best.0 / row_blocks, kept(best)));
        }
        let mut kept: BTreeMap<u32, u32> = BTreeMap::new();
        for (index, hash) in (0..).zip(&hashes[..found]) {
            let places =
                self.cache.copies(hash).filter(|place| self.is_in_row(*place) && place.0 % row_blocks == index);
            places.for_each(|place| *kept.entry(place.0 / row_blocks).or_default() += 1);
        }
        let most = kept.into_iter().max_by_key(|(_, blocks)| *blocks).map(|(row, _)| row);
        let row = most.or_else(|| (found > 0).then(|| self.idle_row()).flatten())?;
        Some((row, found))
    }
}
