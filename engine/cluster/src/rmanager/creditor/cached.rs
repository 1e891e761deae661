//! The creditor's part of the pool's prefix cache: lent rBlocks get block hashes, so that they stay cached when their lease
//! ends, and cached rBlocks are leased where they lie.
//!
//! Invariants:
//! * only sealed entries get block hashes: a hash that arrives before the seal waits for it;
//! * a lease of cached blocks has nothing else, and is never written;
//! * cached blocks are leased as free ones are, within the limit on lending.

use super::{Creditor, Lease, LentBlocks};
use crate::mutants::{self, Mutant};
use lagoon_kv::{BlockHash, BlockPool, BlockState, LeaseHasher, Owner};
use lagoon_protocol::{LeaseGrant, LeaseHashes, LeaseRequest};
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId, limits};
use std::collections::{BTreeMap, BTreeSet};

impl Creditor {
    /// Handles block hashes of a lease's entries. Entries that are not the debtor's (any more) are left out.
    pub(in super::super) fn on_hashes(&mut self, from: InstanceId, m: &LeaseHashes, pool: &mut BlockPool) {
        let lease = self.leases.get_mut(&LeaseId(m.lease)).filter(|l| (l.debtor, l.epoch.0) == (from, m.epoch));
        let hashes = BlockHash::read(&m.hashes).filter(|hashes| hashes.len() <= limits::LEASE_HASHES_MAX);
        let trusts = pool.caches_runs() && !self.distrusted;
        let (Some(lease), Some(hashes)) = (lease.filter(|_| trusts), hashes) else { return };
        for (at, hash) in (0..).zip(hashes) {
            let (entry, depth) = (m.first.saturating_add(at), m.depth.saturating_add(at));
            let Some(block) = lease.blocks.get(entry) else { continue };
            if pool.state(block) == BlockState::Sealed {
                pool.set_hash(block, hash, depth);
            } else {
                lease.hashes.insert(entry, (hash, depth));
            }
        }
    }

    /// Leases the cached blocks of a request's hashes, as many as there are from the first on and may be lent. The reason of
    /// the refusal if there are none.
    pub(super) fn grant_cached(
        &mut self,
        from: InstanceId,
        request: &LeaseRequest,
        now_ms: u64,
        pool: &mut BlockPool,
    ) -> Result<LeaseGrant, String> {
        let hashes = BlockHash::read(&request.hashes).filter(|hashes| hashes.len() <= limits::LEASE_HASHES_MAX);
        let Some(hashes) = hashes.filter(|hashes| hashes.len() == request.blocks as usize) else {
            return Err(format!(
                "{} bytes of hashes for {} blocks make no sense",
                request.hashes.len(),
                request.blocks
            ));
        };
        // A block has each owner once.
        if hashes.iter().collect::<BTreeSet<_>>().len() < hashes.len() {
            return Err("a block hash is named twice".to_owned());
        }
        self.issued += 1;
        let (lease, epoch) = (LeaseId(self.lease_base + self.issued), Epoch(self.epoch_base.wrapping_add(self.issued)));
        let owner = Owner::Lent(lease);
        let mut blocks = pool.adopt_run(owner, &hashes, self.lendable(pool), self.lendable_shared(pool));
        if mutants::is(Mutant::CachedUnowned) {
            pool.free(owner, &blocks);
        }
        if mutants::is(Mutant::CachedUnverified) && blocks.is_empty() {
            blocks = pool.allocate(owner, self.lendable(pool).min(request.blocks), None).unwrap_or_default();
        }
        let cached = u32::try_from(blocks.len()).expect("at most the pool's blocks");
        if cached == 0 {
            return Err("none of the blocks is cached here and may be lent".to_owned());
        }
        // Nothing is left to write.
        let mut hasher = LeaseHasher::new(self.layers as usize, self.block_tokens, self.layer_token_bytes);
        hasher.skip(cached * self.block_tokens);
        let entry = Lease {
            debtor: from,
            seq: SeqId(request.seq),
            epoch,
            request: request.request,
            blocks: LentBlocks::new(blocks),
            lent: cached,
            renewed_ms: now_ms,
            hasher,
            whole: BTreeMap::new(),
            purpose: request.purpose(),
            reserved_ms: None,
            cached,
            hashes: BTreeMap::new(),
        };
        self.cached_lent += u64::from(cached);
        self.leases.insert(lease, entry);
        self.by_request.insert((from, request.request), lease);
        Ok(self.grant_of(lease))
    }

    /// The device did not store what a debtor wrote: the hash of what was received proves nothing about its memory, and no block here is
    /// found any more.
    pub(in super::super) fn distrust(&mut self, pool: &mut BlockPool) {
        self.distrusted = true;
        self.leases.values_mut().for_each(|lease| lease.hashes.clear());
        pool.forget_all();
    }

    /// Cached rBlocks that debtors lease now.
    #[must_use]
    pub fn cached_leased(&self) -> u32 {
        self.leases.values().filter(|lease| lease.cached > 0).map(|lease| lease.lent).sum()
    }

    /// Cached rBlocks leased to others since the start.
    #[must_use]
    pub fn cached_lent(&self) -> u64 {
        self.cached_lent
    }

    /// Blocks that the limit on lending leaves, free or not: those in use are shared with a lease at no cost of memory.
    fn lendable_shared(&self, pool: &BlockPool) -> u32 {
        if self.recalling() { 0 } else { self.under_cap(pool) }
    }
}
