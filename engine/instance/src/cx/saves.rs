//! Copies of cached blocks out of the KV memory, one block at a time, a few layers at once so that passes go on between them.
//!
//! The block that is evicted next is copied first. A copy delays no allocation: a block that is evicted while it is read is
//! lost to the tiers, and counted (docs/adr/0037).

use super::Cx;
use super::tags::TagOwner;
use super::tiers::{CacheTierConfig, Tiers};
use crate::event::{BlockKv, DiskEffect, Effect};
use bytes::Bytes;
use lagoon_kv::{BlockHash, Unsaved};
use lagoon_runner::{Command, RemoteRead, RemoteTag};
use lagoon_types::limits::{TIER_LOOKS_MAX, TIER_READS_IN_FLIGHT};
use std::collections::BTreeMap;

/// The copy in progress.
#[derive(Debug)]
pub(super) struct Save {
    number: u64,
    of: Unsaved,
    /// Layers asked for, and those of them that have not come.
    asked: u32,
    reading: BTreeMap<RemoteTag, usize>,
    layers: Vec<Bytes>,
}

impl Cx {
    /// Keeps copies of cached blocks in these tiers, if the prefix cache is on.
    pub(crate) fn keep_copies(&mut self, tiers: CacheTierConfig) {
        if self.memory.prefix.root().is_none() || (tiers.host_bytes == 0 && tiers.disk_bytes == 0) {
            return;
        }
        let block_bytes = self.config.kv.token_bytes() as u64 * u64::from(self.config.block_tokens);
        self.memory.rm.pool.track_unsaved();
        self.memory.tiers = Tiers::new(tiers, block_bytes);
    }

    /// Goes on with copies of cached blocks.
    pub(crate) fn save_cached(&mut self) {
        if self.memory.tiers.config.is_none() || (self.memory.tiers.save.is_none() && !self.begin_save()) {
            return;
        }
        let (tokens, layers) = (self.config.block_tokens, self.config.kv.layers);
        while self.memory.tiers.may_read() {
            let Some(save) = &mut self.memory.tiers.save else { return };
            if save.asked == layers || save.reading.len() == TIER_READS_IN_FLIGHT {
                return;
            }
            let tag = self.tags.take(TagOwner::Tier);
            save.reading.insert(tag, save.asked as usize);
            let pieces = vec![(save.of.block.0 * tokens, tokens)];
            let read = RemoteRead { tag, layer: save.asked, pieces };
            save.asked += 1;
            self.memory.tiers.step_reads += 1;
            self.effects.push(Effect::Runner(Command::RemoteRead(read)));
        }
    }

    /// Chooses the next block to copy. False if there is none, or no tier takes more now.
    fn begin_save(&mut self) -> bool {
        let (pool, tiers) = (&mut self.memory.rm.pool, &mut self.memory.tiers);
        // Blocks that a tier keeps already are many when a loaded sequence ends: the rest follows after the next event.
        for _ in 0..TIER_LOOKS_MAX {
            let may_save = tiers.may_save(pool.cached() - pool.unsaved());
            let Some(of) = may_save.then(|| pool.next_unsaved()).flatten() else { return false };
            if tiers.keeps(&of.hash) {
                pool.note_saved(of.block);
                continue;
            }
            tiers.saves += 1;
            pool.begin_save(of.block, tiers.saves);
            let layers = vec![Bytes::new(); self.config.kv.layers as usize];
            tiers.save = Some(Save { number: tiers.saves, of, asked: 0, reading: BTreeMap::new(), layers });
            return true;
        }
        false
    }

    /// A layer of the block that is copied has come. Tags of a copy that was dropped are ignored.
    pub(crate) fn on_saved_layer(&mut self, tag: RemoteTag, kv: Bytes) {
        let Some(save) = &mut self.memory.tiers.save else { return };
        let Some(layer) = save.reading.remove(&tag) else { return };
        save.layers[layer] = kv;
        if !save.reading.is_empty() || save.asked < self.config.kv.layers {
            return;
        }
        let Some(Save { number, of, layers, .. }) = self.memory.tiers.save.take() else { return };
        if self.memory.rm.pool.end_save(of.block, number) {
            self.keep_copy(of.hash, layers.into());
        }
    }

    fn keep_copy(&mut self, hash: BlockHash, kv: BlockKv) {
        if let Some(kv) = self.memory.tiers.note_saved(hash, BlockKv::clone(&kv)) {
            self.effects.push(Effect::Disk(DiskEffect::Write { hash, kv }));
        }
        let gone = self.memory.tiers.keep(hash, kv);
        self.unsave(&gone);
    }

    /// Cached blocks that no tier keeps any more may be copied again.
    pub(crate) fn unsave(&mut self, gone: &[BlockHash]) {
        gone.iter().for_each(|hash| self.memory.rm.pool.unsave(hash));
    }

    /// The device could not read a layer: no copy of the block is made. False if the tag is of no copy out.
    pub(crate) fn on_save_failed(&mut self, tag: RemoteTag) -> bool {
        let failed = self.memory.tiers.save.take_if(|save| save.reading.contains_key(&tag));
        let Some(Save { number, of, .. }) = failed else { return false };
        self.memory.rm.pool.end_save(of.block, number);
        true
    }
}
