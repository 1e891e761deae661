//! Tiers of the prefix cache beside the KV memory (docs/adr/0037): the host tier, and what is known of the disk tier.
//!
//! Owns the host tier's KV, the hashes on disk, the copy out in progress (`saves.rs`), the loads in progress
//! (`batch/loads.rs`) and the drop in progress (`drops.rs`). Files and threads are the shell's.
//!
//! Invariants: KV is kept under the block hash of the block that it was read from; copies of one hash are equal, so that a copy
//! never grows stale. What is known of the disk is soft state: a read tells.

use super::saves::Save;
use crate::event::{BlockKv, DiskLoss};
use lagoon_kv::{BlockHash, BlockPool, TenantCounts, Tenants, Tier, TierDrop};
use lagoon_runner::RemoteTag;
use lagoon_types::limits::{
    TIER_DISK_WRITE_BYTES_MAX, TIER_DISK_WRITES_MAX, TIER_DROPS_MAX, TIER_LOAD_BYTES_IN_FLIGHT,
    TIER_LOAD_BYTES_PER_STEP, TIER_READS_PER_STEP,
};
use lagoon_types::{PhysBlock, SeqId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Tiers of the prefix cache beside the KV memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheTierConfig {
    /// Bytes of the host tier; 0 for none.
    pub host_bytes: u64,
    /// Bytes of the disk tier; above 0 the shell carries out [`crate::DiskEffect`]s.
    pub disk_bytes: u64,
    /// Tokens from which on a prefix is loaded from a tier; `None` where that is faster than computing it.
    pub load_tokens_min: Option<u32>,
}

/// Counters of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CacheTierStatus {
    pub blocks: u64,
    pub bytes: u64,
    /// rBlocks copied to it.
    pub saved_blocks: u64,
    /// rBlocks evicted from it.
    pub evicted_blocks: u64,
    /// rBlocks that it did not take: a write failed.
    pub lost_blocks: u64,
    /// rBlocks that were damaged when they were read, and were dropped.
    pub damaged_blocks: u64,
    /// rBlocks that were not there or could not be read.
    pub missing_blocks: u64,
}

/// Counters of the tiers beside the KV memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CacheTiersStatus {
    pub host: CacheTierStatus,
    pub disk: CacheTierStatus,
    /// Cached rBlocks that were evicted from KV memory before a copy was made.
    pub unsaved_blocks: u64,
    /// Loads that ended with all KV.
    pub whole_loads: u64,
    /// Loads that ended before all KV had come.
    pub broken_loads: u64,
    /// Prefixes that were computed because loading them would have taken longer.
    pub declined_loads: u64,
}

/// A tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TierName {
    Host,
    Disk,
}

/// Number of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LoadId(pub(crate) u64);

/// KV of a prompt's next blocks on its way from tiers to the blocks of its sequence.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) seq: SeqId,
    /// Place of the first block in the sequence's table.
    pub(crate) first: u32,
    pub(crate) blocks: Vec<(BlockHash, PhysBlock)>,
    /// The first prompt of its sequence: its tokens count as cached.
    pub(crate) is_prompt: bool,
    /// Blocks that were looked for in the tiers.
    pub(crate) asked: usize,
    /// Blocks that have come and were not passed on, with their tier.
    pub(crate) arrived: BTreeMap<usize, (TierName, BlockKv)>,
    /// Blocks passed on to the device, and their tiers.
    pub(crate) passed: Vec<TierName>,
    /// Layers that the device has stored, of all blocks in their order.
    pub(crate) layers_stored: u64,
    /// Layers that the device is to store.
    pub(crate) layers_waiting: u64,
    /// Blocks that it loads; fewer once one is missing.
    pub(crate) end: usize,
    pub(crate) began_ms: u64,
}

/// The tiers. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Tiers {
    /// `None` where there are none.
    pub(crate) config: Option<CacheTierConfig>,
    /// KV of an rBlock, in bytes.
    pub(super) block_bytes: u64,
    host: Option<Tier<BlockKv>>,
    on_disk: BTreeSet<BlockHash>,
    /// Those of `on_disk` by tenant.
    disk_tenants: TenantCounts,
    disk_bytes: u64,
    /// KV that waits to be written to disk.
    writing: BTreeMap<BlockHash, BlockKv>,
    pub(super) save: Option<Save>,
    pub(super) saves: u64,
    pub(crate) loads: BTreeMap<LoadId, Load>,
    pub(crate) next_load: u64,
    /// Layers that the device is to store: their load and bytes.
    pub(crate) storing: BTreeMap<RemoteTag, (LoadId, u64)>,
    pub(crate) bytes_in_flight: u64,
    /// Whether a step runs, layers that were read and bytes that were stored since it began.
    in_step: bool,
    pub(super) step_reads: u32,
    pub(crate) step_bytes: u64,
    /// Reads of the disk tier: their load and the index of the block there.
    pub(crate) reading: BTreeMap<u64, (LoadId, usize)>,
    pub(crate) next_read: u64,
    rates: [Rate; 2],
    pub(crate) counts: CacheTiersStatus,
    /// Tenants whose blocks an order drops: not found while it is carried out.
    dropping: Tenants,
    /// The order's progress on the host tier.
    dropping_host: Option<TierDrop>,
    /// Whether the disk tier is to report that it has dropped blocks.
    dropping_disk: bool,
}

/// Weight of the newest load in the mean rate.
const NEWEST: f64 = 1.0 / 4.0;
/// How much faster a tier is assumed to be after each load that was not tried.
const HOPE: f64 = 1.05;

/// Measured bytes per second of loads from a tier; 0 before the first.
#[derive(Clone, Copy, Debug, Default)]
struct Rate(f64);

impl Tiers {
    /// With these tiers, for rBlocks of `block_bytes`.
    pub(super) fn new(config: CacheTierConfig, block_bytes: u64) -> Self {
        let host = (config.host_bytes > 0).then(|| Tier::new(config.host_bytes));
        Self { config: Some(config), block_bytes, host, ..Self::default() }
    }

    fn has_disk(&self) -> bool {
        self.config.is_some_and(|config| config.disk_bytes > 0)
    }

    /// Whether a tier keeps a block, or will.
    pub(crate) fn keeps(&self, hash: &BlockHash) -> bool {
        self.on_host(hash).is_some() || self.on_disk.contains(hash)
    }

    fn on_host(&self, hash: &BlockHash) -> Option<&BlockKv> {
        let host = self.host.as_ref().and_then(|host| host.get(hash));
        host.or_else(|| self.writing.get(hash))
    }

    /// Whether an operator's order that is carried out drops a block.
    fn is_dropped(&self, hash: &BlockHash) -> bool {
        self.is_dropping() && self.dropping.have(hash)
    }

    /// The tier that a block would be loaded from.
    pub(crate) fn tier_of(&self, hash: &BlockHash) -> Option<TierName> {
        if self.is_dropped(hash) {
            return None;
        }
        match (self.on_host(hash), self.on_disk.contains(hash)) {
            (Some(_), _) => Some(TierName::Host),
            (None, true) => Some(TierName::Disk),
            (None, false) => None,
        }
    }

    /// A block's KV in host memory, which is used now.
    pub(crate) fn take_from_host(&mut self, hash: &BlockHash) -> Option<BlockKv> {
        if self.is_dropped(hash) {
            return None;
        }
        self.host.iter_mut().for_each(|host| host.touch(hash));
        self.on_host(hash).cloned()
    }

    /// Whether another copy is to be made, where `saved` cached blocks have one: as many as fill half of the larger tier, those that
    /// are evicted next. The other half keeps what was evicted.
    pub(super) fn may_save(&self, saved: u32) -> bool {
        let waiting = (self.writing.len() as u64).saturating_mul(self.block_bytes);
        let is_slow = self.writing.len() >= TIER_DISK_WRITES_MAX || waiting >= TIER_DISK_WRITE_BYTES_MAX;
        let half = self.config.map_or(0, |config| config.host_bytes.max(config.disk_bytes) / 2);
        !is_slow && (u64::from(saved) + 1).saturating_mul(self.block_bytes) <= half
    }

    /// A step has ended, or begins: whether one runs. What overtakes its pass is bounded.
    pub(crate) fn note_steps(&mut self, runs: bool, ended: bool) {
        if ended || !runs {
            (self.step_reads, self.step_bytes) = (0, 0);
        }
        self.in_step = runs;
    }

    /// Whether another layer may be read now, beside a step.
    pub(super) fn may_read(&self) -> bool {
        !self.in_step || self.step_reads < TIER_READS_PER_STEP
    }

    /// Whether another block may be stored now, beside a step.
    pub(crate) fn may_store(&self) -> bool {
        let in_step = !self.in_step || self.step_bytes < TIER_LOAD_BYTES_PER_STEP;
        in_step && self.bytes_in_flight < TIER_LOAD_BYTES_IN_FLIGHT
    }

    /// Keeps a block's KV in the host tier. Returns the blocks that no tier keeps any more.
    pub(crate) fn keep(&mut self, hash: BlockHash, kv: BlockKv) -> Vec<BlockHash> {
        let Some(host) = &mut self.host else { return Vec::new() };
        let evicted: Vec<BlockHash> = host.insert(hash, self.block_bytes, kv).into_iter().map(|(of, _)| of).collect();
        self.counts.host.evicted_blocks += evicted.iter().filter(|of| **of != hash).count() as u64;
        evicted.into_iter().filter(|of| !self.keeps(of)).collect()
    }

    /// Begins to drop these tenants' blocks, by an operator's order. Returns whether the shell drops those on disk.
    pub(super) fn begin_drop(&mut self, tenants: Tenants) -> bool {
        self.dropping = tenants;
        self.dropping_host = self.host.as_ref().map(|host| host.begin_drop(tenants));
        self.dropping_disk = self.has_disk();
        self.dropping_disk
    }

    /// Drops the next blocks of the host tier, if an order to do so is carried out. Returns the blocks that no tier keeps any more.
    pub(super) fn drop_on_host(&mut self) -> Vec<BlockHash> {
        let (Some(of), Some(host)) = (&mut self.dropping_host, &mut self.host) else { return Vec::new() };
        let (dropped, is_more) = host.drop_next(of, TIER_DROPS_MAX);
        self.dropping_host = self.dropping_host.filter(|_| is_more);
        dropped.into_iter().filter(|hash| !self.keeps(hash)).collect()
    }

    /// Blocks on disk were removed, and these are left.
    pub(crate) fn dropped_on_disk(&mut self, left: Vec<BlockHash>, bytes: u64) {
        self.found_on_disk(left, bytes);
        self.dropping_disk = false;
    }

    /// Blocks by tenant: of the host tier, and on disk.
    pub(super) fn tenants(&self) -> [Option<&TenantCounts>; 2] {
        [self.host.as_ref().map(Tier::tenants), Some(&self.disk_tenants)]
    }

    /// Whether an order to drop blocks is not carried out yet.
    pub(super) fn is_dropping(&self) -> bool {
        self.dropping_host.is_some() || self.dropping_disk
    }

    /// Counts a copy that was made. Returns it again if it is to be written to disk.
    pub(super) fn note_saved(&mut self, hash: BlockHash, kv: BlockKv) -> Option<BlockKv> {
        self.counts.host.saved_blocks += u64::from(self.host.is_some());
        self.has_disk().then(|| {
            self.writing.insert(hash, Arc::clone(&kv));
            kv
        })
    }

    /// Learns which blocks are on disk.
    pub(crate) fn found_on_disk(&mut self, hashes: Vec<BlockHash>, bytes: u64) {
        (self.on_disk, self.disk_bytes) = (hashes.into_iter().collect(), bytes);
        self.disk_tenants = self.on_disk.iter().collect();
    }

    fn leave_disk(&mut self, hash: &BlockHash) {
        if self.on_disk.remove(hash) {
            self.disk_tenants.remove(hash);
        }
    }

    /// A write to disk ended. Returns the blocks that no tier keeps any more.
    pub(crate) fn written(
        &mut self,
        hash: BlockHash,
        result: Result<(), DiskLoss>,
        evicted: Vec<BlockHash>,
        bytes: Option<u64>,
    ) -> Vec<BlockHash> {
        self.writing.remove(&hash);
        self.disk_bytes = bytes.unwrap_or(self.disk_bytes);
        self.counts.disk.evicted_blocks += evicted.len() as u64;
        evicted.iter().for_each(|of| self.leave_disk(of));
        match result {
            Ok(()) => {
                if self.on_disk.insert(hash) {
                    self.disk_tenants.add(&hash);
                }
                self.counts.disk.saved_blocks += 1;
            }
            // Its blocks count as saved: a file system that is full is not asked again for the same block.
            Err(_) => self.counts.disk.lost_blocks += 1,
        }
        evicted.into_iter().filter(|of| !self.keeps(of)).collect()
    }

    /// A block that was read from disk is not there any more, or could not be read.
    pub(crate) fn note_missing(&mut self, hash: &BlockHash, loss: DiskLoss) {
        self.leave_disk(hash);
        match loss {
            DiskLoss::Damaged => self.counts.disk.damaged_blocks += 1,
            DiskLoss::Missing | DiskLoss::Failed => self.counts.disk.missing_blocks += 1,
        }
    }

    fn rate(&mut self, tier: TierName) -> &mut Rate {
        &mut self.rates[tier as usize]
    }

    /// Predicted time to load these numbers of blocks from host and disk, in microseconds; a tier that was not measured counts as
    /// fast.
    pub(crate) fn load_us(&self, blocks: [u64; 2]) -> f64 {
        let bytes = |blocks: u64| as_f64(blocks.saturating_mul(self.block_bytes));
        let of = |(blocks, Rate(rate)): (u64, Rate)| if rate > 0.0 { bytes(blocks) / rate * 1e6 } else { 0.0 };
        blocks.into_iter().zip(self.rates).map(of).sum()
    }

    /// Adds a load of `blocks` blocks from one tier, which took `ms`, to its mean.
    pub(crate) fn note_load(&mut self, tier: TierName, blocks: u64, ms: u64) {
        let new = as_f64(blocks.saturating_mul(self.block_bytes)) / as_f64(ms.max(1)) * 1e3;
        let rate = self.rate(tier);
        rate.0 = if rate.0 > 0.0 { rate.0 + (new - rate.0) * NEWEST } else { new };
    }

    /// A load was not tried: a slow measurement is forgotten in time.
    pub(crate) fn note_declined(&mut self) {
        self.counts.declined_loads += 1;
        self.rates.iter_mut().for_each(|rate| rate.0 *= HOPE);
    }

    /// The counters, with those of the pool; `None` without tiers.
    pub(crate) fn status(&self, pool: &BlockPool) -> Option<CacheTiersStatus> {
        self.config?;
        let mut status = self.counts;
        status.unsaved_blocks = pool.unsaved_evictions();
        (status.host.blocks, status.host.bytes) = self.host.as_ref().map_or((0, 0), |h| (h.len() as u64, h.bytes()));
        (status.disk.blocks, status.disk.bytes) = (self.on_disk.len() as u64, self.disk_bytes);
        Some(status)
    }
}

#[allow(clippy::cast_precision_loss, reason = "a rate")]
fn as_f64(n: u64) -> f64 {
    n as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_kv::{IdentityRoot, Tenant};
    use lagoon_types::{KvDType, ModelHash};

    /// Files are removed behind the writes that are queued, and a large host tier in steps: what they hold is not found meanwhile.
    #[test]
    fn an_order_hides_a_tenants_blocks_until_they_are_removed() {
        let root =
            IdentityRoot { model: ModelHash([0; 32]), adapter: b"", dtype: KvDType::F16, rope: b"", block_tokens: 4 };
        let root = BlockHash::root(&root);
        let [mine, others] = ["mine", "others"].map(|salt| root.salted(salt).then(&[1, 2, 3, 4]));
        let config = CacheTierConfig { host_bytes: 1 << 20, disk_bytes: 1 << 20, load_tokens_min: None };
        let mut tiers = Tiers::new(config, 64);
        for (hash, name) in [(mine, TierName::Disk), (others, TierName::Disk)] {
            tiers.written(hash, Ok(()), Vec::new(), None);
            assert_eq!(tiers.tier_of(&hash), Some(name));
        }
        tiers.keep(mine, Arc::new([]));
        let of_mine = Tenant::of("mine");
        assert!(tiers.begin_drop(Tenants { key: Some(of_mine.key), salt: Some(of_mine.salt) }));
        assert_eq!((tiers.tier_of(&mine), tiers.tier_of(&others)), (None, Some(TierName::Disk)));
        assert!(tiers.take_from_host(&mine).is_none() && tiers.keeps(&mine), "hidden, and not removed yet");
        assert!(tiers.drop_on_host().is_empty(), "it is on disk still");
        assert_eq!((tiers.tier_of(&mine), tiers.is_dropping()), (None, true));
        tiers.dropped_on_disk(vec![others], 64);
        assert_eq!((tiers.keeps(&mine), tiers.is_dropping()), (false, false));
        // Computed and copied again, it is found again.
        tiers.keep(mine, Arc::new([]));
        assert_eq!(tiers.tier_of(&mine), Some(TierName::Host));
    }
}
