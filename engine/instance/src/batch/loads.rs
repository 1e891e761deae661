//! Loads of prompts' prefixes from the tiers of the prefix cache beside the KV memory (docs/adr/0037).
//!
//! A prompt that has been admitted with its hits in KV memory looks for its next blocks in the tiers. Their KV is written to
//! its own new blocks, in order; meanwhile it holds its memory, runs no step and delays nobody. When all has come, or a block
//! is missing or damaged, or time is over, the blocks that were stored count as computed, and the rest is computed.
//!
//! Invariants:
//! * KV is written only to a block that lies at its place in the table of the sequence that waits for it;
//! * a load ends when the device has stored all that was passed on, so that no step overtakes a write;
//! * blocks get their hashes after they were stored.

use super::others::PrefillQueries;
use super::{Batch, Others, policy};
use crate::cx::Cx;
use crate::cx::tags::TagOwner;
use crate::cx::tiers::{Load, LoadId, TierName};
use crate::event::{BlockKv, DiskEffect, DiskEvent, DiskLoss, Effect};
use lagoon_backend::DeviceError;
use lagoon_kv::{BlockHash, Placement};
use lagoon_runner::{Command, RemoteTag, RemoteWrite};
use lagoon_types::limits::{TIER_DISK_READS_MAX, TIER_LOAD_DEADLINE_MS};
use lagoon_types::{CachedTokens, PhysBlock, SeqId};
use std::collections::BTreeMap;

impl Batch {
    /// Begins to load the blocks behind a sequence's hits that tiers keep, if that is faster than to compute them. The sequence
    /// has all its memory here.
    pub(super) fn begin_load(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, id: SeqId) {
        let (Some(config), Some(seq)) = (cx.memory.tiers.config, self.seqs.get(&id)) else { return };
        let tokens = cx.config.block_tokens;
        let (first, whole) = (seq.blocks.next_position() / tokens, (seq.len() - 1) / tokens);
        let hashes = seq.block_hashes.get(first as usize..whole as usize).unwrap_or_default();
        // Parts of a pushed prompt are read as they are computed.
        let refuses = seq.needs_positions() || seq.loading.is_some() || prefills.is_pushed(id);
        // Behind a gap that a search of the pool left, hits are sealed and maybe shared: nothing is written there.
        let refuses = refuses || seq.blocks.lost_blocks() > 0;
        if refuses || seq.blocks.remote_blocks() > 0 || hashes.is_empty() {
            return;
        }
        let mut from = [0_u64; 2];
        let mut blocks: Vec<(BlockHash, PhysBlock)> = Vec::new();
        for (hash, place) in hashes.iter().zip(&seq.blocks.placements()[first as usize..]) {
            let (Some(tier), Placement::Local(block)) = (cx.memory.tiers.tier_of(hash), place) else { break };
            from[tier as usize] += 1;
            blocks.push((*hash, *block));
        }
        if blocks.is_empty() {
            return;
        }
        // With hits in KV memory the windowed layers' KV is recomputed anyway.
        let warm_up = cx.config.windowed.filter(|_| first == 0).map_or(0, |of| of.warm_up);
        let saved = u32::try_from(blocks.len()).map_or(u32::MAX, |blocks| blocks * tokens).saturating_sub(warm_up);
        let (load_us, row_us) = (cx.memory.tiers.load_us(from), self.row_us(cx));
        let pays = config
            .load_tokens_min
            .map_or_else(|| policy::load_is_cheaper(load_us, saved, row_us), |tokens_min| saved >= tokens_min);
        if !pays {
            return cx.memory.tiers.note_declined();
        }
        let is_prompt = seq.began_ms.is_none();
        self.start_load(cx, id, Load::new(id, first, blocks, is_prompt, cx.now_ms));
    }

    fn start_load(&mut self, cx: &mut Cx, id: SeqId, load: Load) {
        let tiers = &mut cx.memory.tiers;
        tiers.next_load += 1;
        let number = LoadId(tiers.next_load);
        tiers.loads.insert(number, load);
        self.seqs.entry(id).and_modify(|seq| seq.loading = Some(number));
        self.feed_loads(cx);
    }

    /// Goes on with all loads, the oldest first: looks for blocks in the tiers, and passes on to the device those that have come.
    fn feed_loads(&self, cx: &mut Cx) {
        let ids: Vec<LoadId> = cx.memory.tiers.loads.keys().copied().collect();
        for id in ids {
            let Some(mut load) = cx.memory.tiers.loads.remove(&id) else { continue };
            if !self.waits_for(&load, id) {
                load.end_at(load.passed.len());
            }
            ask(cx, id, &mut load);
            while self.pass_block(cx, id, &mut load) {
                ask(cx, id, &mut load);
            }
            cx.memory.tiers.loads.insert(id, load);
        }
    }

    /// Whether the sequence of a load still waits for it.
    fn waits_for(&self, load: &Load, id: LoadId) -> bool {
        self.seqs.get(&load.seq).is_some_and(|seq| seq.loading == Some(id))
    }

    /// Passes a load's next block on to the device. False if it has not come, or too much waits there.
    fn pass_block(&self, cx: &mut Cx, id: LoadId, load: &mut Load) -> bool {
        let at = load.passed.len();
        if at >= load.end || !cx.memory.tiers.may_store() {
            return false;
        }
        let Some((tier, kv)) = load.arrived.remove(&at) else { return false };
        let block = load.blocks[at].1;
        let lies = |table: &[Placement]| table.get(load.first as usize + at) == Some(&Placement::Local(block));
        if !self.seqs.get(&load.seq).is_some_and(|seq| lies(seq.blocks.placements())) {
            load.end_at(at);
            return false;
        }
        cx.release_freed();
        let pieces = vec![(block.0 * cx.config.block_tokens, cx.config.block_tokens)];
        for (layer, kv) in (0..).zip(kv.iter()) {
            let tag = cx.tags.take(TagOwner::Tier);
            cx.writes.queue(kv.len());
            cx.memory.tiers.bytes_in_flight += kv.len() as u64;
            cx.memory.tiers.step_bytes += kv.len() as u64;
            cx.memory.tiers.storing.insert(tag, (id, kv.len() as u64));
            let write = RemoteWrite { tag: Some(tag), layer, pieces: pieces.clone(), kv: kv.clone() };
            cx.effects.push(Effect::Runner(Command::RemoteWrite(write)));
        }
        load.layers_waiting += u64::from(cx.config.kv.layers);
        load.passed.push(tier);
        true
    }

    /// An event of the disk tier.
    pub(super) fn on_disk(cx: &mut Cx, event: DiskEvent) {
        match event {
            DiskEvent::Found { hashes, bytes } => cx.memory.tiers.found_on_disk(hashes, bytes),
            DiskEvent::Written { hash, result, evicted, bytes } => {
                let gone = cx.memory.tiers.written(hash, result, evicted, bytes);
                cx.unsave(&gone);
            }
            DiskEvent::Read { read, result } => on_read(cx, read, result),
            DiskEvent::Dropped { left, bytes } => {
                let tiers = &mut cx.memory.tiers;
                tiers.dropped_on_disk(left, bytes);
                cx.memory.rm.pool.unsave_of(|hash| !tiers.keeps(hash));
            }
        }
    }

    /// The device has stored a layer.
    pub(super) fn on_stored(cx: &mut Cx, tag: RemoteTag) {
        if let Some(load) = stored(cx, tag) {
            load.layers_stored += 1;
        }
    }

    /// The device failed to read or to store a layer.
    pub(super) fn on_tier_failed(cx: &mut Cx, tag: RemoteTag, error: &DeviceError) {
        if cx.on_save_failed(tag) {
            tracing::debug!(%error, "a cached block could not be copied to a tier of the prefix cache");
            return;
        }
        tracing::warn!(%error, "KV of a tier of the prefix cache could not be stored");
        let layers = u64::from(cx.config.kv.layers);
        if let Some(load) = stored(cx, tag) {
            // Layers are stored in order: what comes behind the failed one counts for nothing.
            let whole = usize::try_from(load.layers_stored / layers).unwrap_or(0);
            load.end_at(whole);
        }
    }

    /// Ends loads for which prompts have waited too long.
    pub(super) fn expire_loads(cx: &mut Cx) {
        let now_ms = cx.now_ms;
        let late = cx.memory.tiers.loads.values_mut().filter(|load| load.began_ms + TIER_LOAD_DEADLINE_MS <= now_ms);
        late.for_each(|load| load.end_at(load.passed.len()));
    }

    /// Goes on with all loads, and ends those that are over. After every event.
    pub(super) fn go_on_loading(&mut self, cx: &mut Cx, others: Others<'_>) {
        if cx.memory.tiers.loads.is_empty() {
            return;
        }
        self.feed_loads(cx);
        let over = |load: &Load| load.layers_waiting == 0 && load.passed.len() >= load.end;
        let over: Vec<LoadId> = cx.memory.tiers.loads.iter().filter(|(_, l)| over(l)).map(|(id, _)| *id).collect();
        for id in over {
            if let Some(load) = cx.memory.tiers.loads.remove(&id) {
                cx.memory.tiers.reading.retain(|_, (of, _)| *of != id);
                self.end_load(cx, others, id, &load);
            }
        }
    }

    /// Gives a sequence the blocks of its load that were stored.
    fn end_load(&mut self, cx: &mut Cx, others: Others<'_>, id: LoadId, load: &Load) {
        let is_whole = load.end == load.blocks.len();
        let counts = &mut cx.memory.tiers.counts;
        *if is_whole { &mut counts.whole_loads } else { &mut counts.broken_loads } += 1;
        let row_us = self.row_us(cx);
        let Some(seq) = self.seqs.get_mut(&load.seq).filter(|seq| seq.loading == Some(id)) else { return };
        seq.loading = None;
        self.due.touch();
        let stored = load.end.min(load.passed.len());
        let lacks_nothing = seq.blocks.lost().is_empty() && seq.blocks.lost_blocks() == 0;
        let begins = seq.blocks.next_position() == load.first * cx.config.block_tokens;
        if stored == 0 || !lacks_nothing || !begins {
            return;
        }
        let tokens = u32::try_from(stored).expect("at most a sequence's blocks") * cx.config.block_tokens;
        let advance = seq.blocks.advance(tokens);
        advance.mark(&mut cx.memory.rm.pool);
        let found = note_tiers(cx, load, stored);
        let prompt = seq.prompt.as_mut().filter(|_| load.is_prompt);
        prompt.into_iter().for_each(|prompt| prompt.cached += found);
        let hashes_later = seq.sharing.is_some();
        if self.sched.is_running(load.seq) {
            self.sched.skip(load.seq, tokens);
        }
        let load_us = f64::from(u32::try_from(cx.now_ms - load.began_ms).unwrap_or(u32::MAX)) * 1e3;
        cx.memory.prefix.note_found(found, f64::from(tokens) * row_us - load_us);
        // Blocks behind a mapping in progress get their hashes with it.
        if !hashes_later {
            self.register_hashes(cx, others, load.seq);
        }
    }
}

/// A read of the disk tier ended.
fn on_read(cx: &mut Cx, read: u64, result: Result<BlockKv, DiskLoss>) {
    let Some((id, at)) = cx.memory.tiers.reading.remove(&read) else { return };
    // The hash is the load's, which ends after its last read.
    let Some(hash) = cx.memory.tiers.loads.get(&id).map(|load| load.blocks[at].0) else { return };
    match result {
        Ok(kv) => {
            // What was wanted once is kept nearer.
            let gone = cx.memory.tiers.keep(hash, BlockKv::clone(&kv));
            cx.unsave(&gone);
            let load = cx.memory.tiers.loads.get_mut(&id);
            load.into_iter().for_each(|load| _ = load.arrived.insert(at, (TierName::Disk, BlockKv::clone(&kv))));
        }
        Err(loss) => {
            cx.memory.tiers.note_missing(&hash, loss);
            cx.unsave(&[hash]);
            let load = cx.memory.tiers.loads.get_mut(&id);
            load.into_iter().for_each(|load| load.end_at(at));
        }
    }
}

/// Tokens that came from each tier. Measures how fast, if all came from one.
fn note_tiers(cx: &mut Cx, load: &Load, stored: usize) -> CachedTokens {
    let of = |tier: TierName| load.passed[..stored].iter().filter(|of| **of == tier).count() as u64;
    let blocks = [TierName::Host, TierName::Disk].map(|tier| (tier, of(tier)));
    if let [(tier, blocks), (_, 0)] | [(_, 0), (tier, blocks)] = blocks {
        cx.memory.tiers.note_load(tier, blocks, cx.now_ms - load.began_ms);
    }
    let [host, disk] = blocks.map(|(_, blocks)| blocks * u64::from(cx.config.block_tokens));
    CachedTokens { host, disk, ..CachedTokens::default() }
}

/// Looks for a load's next blocks in the tiers, a few ahead of those that were passed on.
fn ask(cx: &mut Cx, id: LoadId, load: &mut Load) {
    while load.asked < load.end && load.asked < load.passed.len() + TIER_DISK_READS_MAX {
        let (at, (hash, _)) = (load.asked, load.blocks[load.asked]);
        if let Some(kv) = cx.memory.tiers.take_from_host(&hash) {
            load.arrived.insert(at, (TierName::Host, kv));
        } else if cx.memory.tiers.tier_of(&hash).is_none() {
            load.end_at(at);
            return;
        } else if cx.memory.tiers.reading.len() < TIER_DISK_READS_MAX {
            cx.memory.tiers.next_read += 1;
            let read = cx.memory.tiers.next_read;
            cx.memory.tiers.reading.insert(read, (id, at));
            cx.effects.push(Effect::Disk(DiskEffect::Read { read, hash }));
        } else {
            return;
        }
        load.asked += 1;
    }
}

/// The load of a layer that has left the device's queue.
fn stored(cx: &mut Cx, tag: RemoteTag) -> Option<&mut Load> {
    let (id, bytes) = cx.memory.tiers.storing.remove(&tag)?;
    cx.memory.tiers.bytes_in_flight -= bytes;
    let load = cx.memory.tiers.loads.get_mut(&id)?;
    load.layers_waiting -= 1;
    Some(load)
}

impl Load {
    /// Ends it before the block at `at`, or where it ended before: a block whose KV was not stored never counts again.
    fn end_at(&mut self, at: usize) {
        self.end = self.end.min(at);
    }

    fn new(seq: SeqId, first: u32, blocks: Vec<(BlockHash, PhysBlock)>, is_prompt: bool, began_ms: u64) -> Self {
        let end = blocks.len();
        Self {
            seq,
            first,
            blocks,
            is_prompt,
            asked: 0,
            arrived: BTreeMap::new(),
            passed: Vec::new(),
            layers_stored: 0,
            layers_waiting: 0,
            end,
            began_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A deadline behind a failed store once made the failed block count again.
    #[test]
    fn the_end_of_a_load_never_rises() {
        let blocks = (0..4).map(|n| (BlockHash([n; 32]), PhysBlock(n.into()))).collect();
        let mut load = Load::new(SeqId(1), 0, blocks, true, 0);
        load.end_at(9);
        assert_eq!(load.end, 4);
        load.end_at(1);
        load.end_at(3);
        assert_eq!(load.end, 1);
    }
}
