//! Operators' orders to empty the prefix cache, or of some tenants' blocks (`lagoon kv cache drop`): the cached blocks of KV memory at once, the tiers beside
//! it in steps, as freeing memory and removing files take time.
//!
//! An order that comes while another one is carried out is ignored: the gManager repeats it.
//!
//! What is in use stays: blocks of sequences and leases, with their hashes. A load from a tier in progress computes what it
//! has not read.

use super::Cx;
use crate::event::{DiskEffect, Effect};
use lagoon_kv::{Tenant, TenantCounts, Tenants};
use lagoon_protocol::{CacheCounts, CacheDrop, CacheTenant};
use lagoon_types::limits::CACHE_TENANTS_MAX;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Numbers of the gManager's orders; 0 before the first.
#[derive(Debug, Default)]
pub(crate) struct Drops {
    received: u64,
    done: u64,
}

impl Cx {
    /// Carries an order out, unless it was received before.
    pub(crate) fn drop_cached(&mut self, order: CacheDrop) {
        let is_known = order.number == self.memory.drops.received;
        if self.memory.prefix.root().is_none() || is_known || self.memory.tiers.is_dropping() {
            return;
        }
        self.memory.drops.received = order.number;
        let tenants = order.of.map_or(Tenants::default(), |of| Tenants { key: of.key, salt: of.salt });
        let before = self.memory.rm.pool.cached();
        self.memory.rm.pool.drop_of(&tenants);
        if self.memory.tiers.begin_drop(tenants) {
            self.effects.push(Effect::Disk(DiskEffect::Drop { tenants }));
        }
        let blocks = before - self.memory.rm.pool.cached();
        tracing::info!(blocks, ?tenants, "an operator dropped cached blocks");
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
            pool_hit_tokens: prefix.found.pool,
            host_hit_tokens: prefix.found.host,
            disk_hit_tokens: prefix.found.disk,
            saved_ms: prefix.saved_ms,
            device_evicted_blocks: prefix.evicted_blocks,
            host_evicted_blocks: tiers.host.evicted_blocks,
            disk_evicted_blocks: tiers.disk.evicted_blocks,
            drop_done: self.memory.drops.done,
            tenants: self.cache_tenants(),
        })
    }

    /// Of the tenants with most cached blocks in one place, those with most.
    fn cache_tenants(&self) -> Vec<CacheTenant> {
        let device = self.memory.rm.pool.tenants();
        let [host, disk] = self.memory.tiers.tenants();
        let top = |of: &TenantCounts| of.top(CACHE_TENANTS_MAX).collect::<Vec<_>>();
        let found: BTreeSet<Tenant> = [Some(device), host, disk].into_iter().flatten().flat_map(top).collect();
        let counts = |tenant: Tenant| CacheTenant {
            key: tenant.key,
            salt: tenant.salt,
            device_blocks: u32::try_from(device.of(&tenant)).unwrap_or(u32::MAX),
            host_blocks: host.map_or(0, |of| of.of(&tenant)),
            disk_blocks: disk.map_or(0, |of| of.of(&tenant)),
        };
        let mut found: Vec<CacheTenant> = found.into_iter().map(counts).collect();
        found.sort_by_key(|of| Reverse(u64::from(of.device_blocks).saturating_add(of.host_blocks.max(of.disk_blocks))));
        found.truncate(CACHE_TENANTS_MAX);
        found
    }
}
