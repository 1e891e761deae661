//! Operators' orders to empty the prefix cache (`lagoon kv cache drop`): the cached blocks of KV memory at once, the tiers beside
//! it in steps, as freeing memory and removing files take time.
//!
//! What is in use stays: blocks of sequences and leases, with their hashes. A load from a tier in progress computes what it
//! has not read.

use super::Cx;
use crate::event::{DiskEffect, Effect};
use lagoon_protocol::{CacheCounts, CacheDrop};

/// Numbers of the gManager's orders; 0 before the first.
#[derive(Debug, Default)]
pub(crate) struct Drops {
    received: u64,
    done: u64,
}

impl Cx {
    /// Carries an order out, unless it was received before.
    pub(crate) fn drop_cached(&mut self, order: CacheDrop) {
        if self.memory.prefix.root().is_none() || order.number == self.memory.drops.received {
            return;
        }
        self.memory.drops.received = order.number;
        let blocks = self.memory.rm.pool.cached();
        self.memory.rm.pool.drop_all();
        self.memory.rm.pool.unsave_all();
        if self.memory.tiers.begin_drop() {
            self.effects.push(Effect::Disk(DiskEffect::Drop));
        }
        tracing::info!(blocks, "an operator dropped the prefix cache");
    }

    /// Goes on with an order.
    pub(crate) fn go_on_dropping(&mut self) {
        let gone = self.memory.tiers.drop_on_host();
        self.unsave(&gone);
        if !self.memory.tiers.is_dropping() {
            self.memory.drops.done = self.memory.drops.received;
        }
    }

    /// Counters of the prefix cache for operators; `None` where it is off.
    pub(crate) fn cache_counts(&self) -> Option<CacheCounts> {
        self.memory.prefix.root()?;
        let prefix = self.memory.prefix.status(&self.memory.rm);
        let tiers = self.memory.tiers.status(&self.memory.rm.pool).unwrap_or_default();
        Some(CacheCounts {
            block_tokens: self.config.block_tokens,
            device_blocks: prefix.blocks,
            host_blocks: tiers.host.blocks,
            disk_blocks: tiers.disk.blocks,
            leased_blocks: self.memory.rm.creditor.cached_leased(),
            looked_up_tokens: prefix.looked_up_tokens,
            hit_tokens: prefix.hit_tokens,
            device_evicted_blocks: prefix.evicted_blocks,
            host_evicted_blocks: tiers.host.evicted_blocks,
            disk_evicted_blocks: tiers.disk.evicted_blocks,
            drop_done: self.memory.drops.done,
        })
    }
}
