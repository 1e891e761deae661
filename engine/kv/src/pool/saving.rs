//! Copies of cached blocks in tiers beside the KV memory (docs/adr/0037): which block to copy next, and whether it still held
//! its KV when its copy was complete.
//!
//! A copy is read while the block is cached, so it costs no memory and delays nobody: an allocation may evict the block
//! meanwhile, and then the copy is dropped.

use super::BlockPool;
use crate::BlockHash;
use crate::cache::Saved;
use lagoon_types::PhysBlock;

/// A cached block without a copy in a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsaved {
    pub block: PhysBlock,
    pub hash: BlockHash,
}

impl BlockPool {
    /// Notes from now on which cached blocks have copies in tiers.
    pub fn track_unsaved(&mut self) {
        self.cache.track_unsaved();
    }

    /// The cached block without a copy that is evicted first.
    #[must_use]
    pub fn next_unsaved(&self) -> Option<Unsaved> {
        self.cache.next_unsaved().map(|(block, hash)| Unsaved { block, hash })
    }

    /// Cached blocks without a copy; 0 if that is not tracked.
    #[must_use]
    pub fn unsaved(&self) -> u32 {
        self.cache.unsaved()
    }

    /// Evictions of cached blocks without a copy since the start.
    #[must_use]
    pub fn unsaved_evictions(&self) -> u64 {
        self.cache.unsaved_evictions()
    }

    /// Begins copy `save` (a new number) of a block.
    pub fn begin_save(&mut self, block: PhysBlock, save: u64) {
        self.cache.set_saved(block, Saved::Reading(save));
    }

    /// Ends copy `save` of a block. Returns whether the block has held the same KV since the copy began; if not, the copy is
    /// worthless.
    pub fn end_save(&mut self, block: PhysBlock, save: u64) -> bool {
        let unchanged = self.cache.saved(block) == Some(Saved::Reading(save));
        if unchanged {
            self.cache.set_saved(block, Saved::Yes);
        }
        unchanged
    }

    /// Notes that a tier keeps this block.
    pub fn note_saved(&mut self, block: PhysBlock) {
        self.cache.set_saved(block, Saved::Yes);
    }

    /// Notes which blocks no tier keeps any more.
    pub fn unsave_of(&mut self, is_gone: impl Fn(&BlockHash) -> bool) {
        for block in self.cache.blocks_of(is_gone) {
            if self.cache.saved(block) == Some(Saved::Yes) {
                self.cache.set_saved(block, Saved::No);
            }
        }
    }

    /// Notes that no tier keeps the blocks with this hash any more.
    pub fn unsave(&mut self, hash: &BlockHash) {
        for block in self.cache.all(hash) {
            if self.cache.saved(block) == Some(Saved::Yes) {
                self.cache.set_saved(block, Saved::No);
            }
        }
    }
}
