//! The creditor's half of an rManager: leases of this instance's rBlocks to other instances' sequences.
//!
//! Invariants:
//! * the unreleased entries of a lease, and no other blocks, are lent in the pool to that lease;
//! * every access names the lease, its debtor and its epoch, and is refused if one differs;
//! * a debtor has at most one lease per request number, so that a repeated request lends nothing twice.

mod cached;
mod joint;

use super::RManagerConfig;
use super::lent_blocks::{LentBlocks, WritePiece};
use super::recall::{Recalls, Revoked};
use crate::mutants::{self, Mutant};
use lagoon_kv::hash::ContentHash;
use lagoon_kv::{BlockHash, BlockPool, BlockState, LeaseHasher, Owner};
use lagoon_protocol::{
    Debt, LeaseGrant, LeasePurpose, LeaseRefuse, LeaseRelease, LeaseReleased, LeaseRenew, LeaseRenewed, LeaseRequest,
    PlacementEntry, Recall, RefuseCode,
};
use lagoon_types::{Epoch, InstanceId, KvRun, LeaseId, LeaseRun, PhysBlock, SeqId, limits};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A lease that ended without its debtor's release: it was not renewed, or the debtor's process was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseEnded {
    pub debtor: InstanceId,
    pub lease: LeaseId,
}

/// One lent block of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentEntry {
    pub debtor: InstanceId,
    /// The debtor's sequence.
    pub seq: SeqId,
    pub epoch: Epoch,
    pub block: PhysBlock,
    pub purpose: LeasePurpose,
}

#[derive(Debug)]
struct Lease {
    debtor: InstanceId,
    /// The debtor's sequence.
    seq: SeqId,
    epoch: Epoch,
    request: u64,
    blocks: LentBlocks,
    /// Number of unreleased entries.
    lent: u32,
    renewed_ms: u64,
    hasher: LeaseHasher,
    /// Content hashes of entries that are written in every layer, until freed.
    whole: BTreeMap<u32, ContentHash>,
    purpose: LeasePurpose,
    /// When a lease for a move was last written, until all of it is sealed.
    reserved_ms: Option<u64>,
    /// Number of entries that were cached here when the lease was granted: they are sealed.
    cached: u32,
    /// Block hashes of entries that are not sealed yet, each with the number of preceding blocks.
    hashes: BTreeMap<u32, (BlockHash, u32)>,
}

impl Lease {
    /// Whether its debtor did not request it: this instance computed or computes its KV.
    fn is_given(&self) -> bool {
        matches!(self.purpose, LeasePurpose::Handover | LeasePurpose::Joint)
    }

    fn entries(&self) -> u32 {
        self.blocks.len()
    }

    fn is_lent(&self, entry: u32) -> bool {
        self.blocks.get(entry).is_some()
    }

    /// Maximal ranges of unreleased entries, ascending.
    fn ranges(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = (at..self.entries()).find(|e| self.is_lent(*e))?;
            let end = (start..self.entries()).find(|e| !self.is_lent(*e)).unwrap_or(self.entries());
            at = end;
            Some(start..end)
        })
    }

    /// As [`Lease::ranges`], of entries that are not shared.
    fn ranges_alone(&self, pool: &BlockPool) -> Vec<Range<u32>> {
        let alone = |entry: &u32| self.blocks.get(*entry).is_some_and(|block| !pool.is_shared(block));
        let entries: Vec<u32> = (0..self.entries()).filter(alone).collect();
        entries.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[run.len() - 1] + 1).collect()
    }

    /// Number of entries whose memory becomes free on release: those not shared.
    fn alone(&self, pool: &BlockPool) -> u32 {
        self.ranges_alone(pool).into_iter().map(|range| range.end - range.start).sum()
    }

    /// Turns a lease for a move into an ordinary one once its remaining entries are all sealed.
    fn settle(&mut self, pool: &BlockPool) {
        if self.blocks.lent().all(|block| pool.state(block) == BlockState::Sealed) {
            self.reserved_ms = None;
        }
    }

    /// Removes entries and returns their blocks; entries released already are left out.
    fn take(&mut self, entries: Range<u32>) -> Vec<PhysBlock> {
        let taken = self.blocks.take(entries);
        self.lent -= u32::try_from(taken.len()).expect("at most a lease");
        let blocks = &self.blocks;
        let lent = |entry: u32| blocks.get(entry).is_some();
        self.hasher.retain(lent);
        self.whole.retain(|entry, _| lent(*entry));
        self.hashes.retain(|entry, _| lent(*entry));
        taken
    }
}

/// The creditor's half of an rManager: what this instance lends, to whom, and within which limits.
#[derive(Debug)]
pub struct Creditor {
    block_tokens: u32,
    layers: u32,
    layer_token_bytes: usize,
    lend_blocks_max: u32,
    lend_reserve_blocks: u32,
    /// Temporary limit on lent blocks, and its reason.
    pub(super) bound: Option<(u32, String)>,
    /// Blocks that own sequences will need soon: not lent either.
    pub(super) growth_reserve: u32,
    /// Since when an own request waits for blocks that this instance has by itself, in milliseconds.
    pub(super) waiting_since_ms: Option<u64>,
    /// The debtor of the pool's oldest waiting pool-sized request, and since when that waits.
    pub(super) oldest_waiting: Option<(InstanceId, u64)>,
    ttl_ms: u64,
    lease_base: u64,
    epoch_base: u64,
    issued: u64,
    leases: BTreeMap<LeaseId, Lease>,
    by_request: BTreeMap<(InstanceId, u64), LeaseId>,
    recalls: Recalls,
    /// Revocations that a debtor may not know of yet, each with its time.
    revoked: Vec<(u64, Revoked)>,
    /// The device did not store a debtor's write: lent blocks get no block hashes any more.
    distrusted: bool,
    /// Cached blocks leased since the start.
    cached_lent: u64,
    /// Pinned leases, whose memory transports may read, each with its released blocks: free once unpinned.
    pinned: BTreeMap<LeaseId, Vec<PhysBlock>>,
}

/// SplitMix64's finaliser: spreads a seed over all bits.
fn spread(seed: u64) -> u64 {
    let a = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    b ^ (b >> 31)
}

impl Creditor {
    pub(super) fn new(config: &RManagerConfig) -> Self {
        let mut creditor = Self {
            block_tokens: config.block_tokens,
            layers: config.shape.layers,
            layer_token_bytes: config.shape.layer_token_bytes(),
            lend_blocks_max: config.lend_blocks_max,
            lend_reserve_blocks: config.lend_reserve_blocks,
            bound: None,
            growth_reserve: 0,
            waiting_since_ms: None,
            oldest_waiting: None,
            ttl_ms: config.lease_ttl_ms,
            lease_base: 0,
            epoch_base: 0,
            issued: 0,
            leases: BTreeMap::new(),
            by_request: BTreeMap::new(),
            recalls: Recalls::default(),
            revoked: Vec::new(),
            distrusted: false,
            cached_lent: 0,
            pinned: BTreeMap::new(),
        };
        creditor.begin_anew(config.incarnation);
        creditor
    }

    /// Starts lease ids and epochs anew for this incarnation.
    pub(super) fn begin_anew(&mut self, incarnation: u64) {
        // Ids of two incarnations must not collide: 31 random bits above a counter for leases, 63 for epochs.
        self.lease_base = (spread(incarnation ^ 0x6c65_6173_6520_6964) >> 33) << 32;
        self.epoch_base = spread(incarnation ^ 0x6570_6f63_6820_3a29) >> 1;
    }

    /// Blocks that would be lent now; none while blocks are recalled, as growth goes before lending.
    pub(super) fn lendable(&self, pool: &BlockPool) -> u32 {
        if !self.recalls.is_empty() {
            return 0;
        }
        let free = pool.counts().free;
        self.under_cap(pool).min(free.saturating_sub(self.lend_reserve_blocks.max(self.growth_reserve)))
    }

    /// Blocks that the limit on lending leaves.
    fn under_cap(&self, pool: &BlockPool) -> u32 {
        let most = self.bound.as_ref().map_or(u32::MAX, |(blocks, _)| *blocks).min(self.lend_blocks_max);
        most.saturating_sub(pool.counts().lent - self.handed_over())
    }

    /// As [`Creditor::lendable`], for a purpose. A swap may use the reserve: between full instances it could not start
    /// otherwise.
    fn lendable_for(&self, purpose: LeasePurpose, pool: &BlockPool) -> u32 {
        let counts = pool.counts();
        match purpose {
            LeasePurpose::Swap => {
                let cap = self.lend_blocks_max.saturating_add(self.lend_reserve_blocks);
                cap.saturating_sub(counts.lent).min(counts.free)
            }
            LeasePurpose::Growth | LeasePurpose::Move => self.lendable(pool),
            LeasePurpose::Handover | LeasePurpose::Joint => 0,
        }
    }

    /// Lent blocks that the limit on lending does not count: handed-over KV, and blocks that transports still read.
    pub fn handed_over(&self) -> u32 {
        let handed: u32 = self.leases.values().filter(|l| l.is_given()).map(|l| l.lent).sum();
        handed + self.held_back()
    }

    /// Blocks of ended leases that transports still read.
    pub fn held_back(&self) -> u32 {
        let blocks: usize = self.pinned.values().map(Vec::len).sum();
        u32::try_from(blocks).expect("at most the pool's blocks")
    }

    /// Turns an own sequence's blocks, which hold `tokens` tokens, into a lease of `debtor`'s sequence `seq`, in reply
    /// to its prefill request `request`. The limit on lending does not count them.
    ///
    /// # Panics
    /// If a block is not the sequence's.
    pub fn hand_over(
        &mut self,
        own: SeqId,
        (debtor, seq, request): (InstanceId, SeqId, u64),
        blocks: Vec<PhysBlock>,
        tokens: u32,
        now_ms: u64,
        pool: &mut BlockPool,
    ) -> LeaseGrant {
        // A lease request never has this number: no repetition of it can arrive.
        let (lease, grant) = self.give((debtor, seq, request), LeasePurpose::Handover, &blocks, tokens, now_ms);
        pool.hand_over(Owner::Own(own), Owner::Lent(lease), &blocks);
        grant
    }

    /// Enters a lease that its debtor did not request, whose first `written` tokens are written. The caller gives it the blocks.
    fn give(
        &mut self,
        (debtor, seq, request): (InstanceId, SeqId, u64),
        purpose: LeasePurpose,
        blocks: &[PhysBlock],
        written: u32,
        now_ms: u64,
    ) -> (LeaseId, LeaseGrant) {
        self.issued += 1;
        let lease = LeaseId(self.lease_base + self.issued);
        let epoch = Epoch(self.epoch_base.wrapping_add(self.issued));
        let mut hasher = LeaseHasher::new(self.layers as usize, self.block_tokens, self.layer_token_bytes);
        hasher.skip(written);
        let entry = Lease {
            debtor,
            seq,
            epoch,
            request,
            lent: u32::try_from(blocks.len()).expect("at most the pool's blocks"),
            blocks: LentBlocks::new(blocks.to_vec()),
            renewed_ms: now_ms,
            hasher,
            whole: BTreeMap::new(),
            purpose,
            reserved_ms: None,
            cached: 0,
            hashes: BTreeMap::new(),
        };
        self.leases.insert(lease, entry);
        (lease, self.grant_of(lease))
    }

    /// Pins a lent lease: transports may read its memory until [`Creditor::unpin`]; blocks released meanwhile become
    /// free only then.
    pub fn pin(&mut self, lease: LeaseId) {
        self.pinned.entry(lease).or_default();
    }

    /// Unpins a lease: no transport reads it any more.
    pub fn unpin(&mut self, lease: LeaseId, pool: &mut BlockPool) {
        let held = self.pinned.remove(&lease).unwrap_or_default();
        pool.free(Owner::Lent(lease), &held);
    }

    /// Frees a handed-over lease that its debtor never took.
    pub fn take_back(&mut self, debtor: InstanceId, lease: LeaseId, epoch: Epoch, pool: &mut BlockPool) {
        let release = LeaseRelease { lease: lease.0, epoch: epoch.0, entries: u32::MAX, first: 0 };
        self.on_release(debtor, &release, pool);
    }

    /// Renews a handed-over lease whose debtor still waits for it.
    pub fn touch(&mut self, debtor: InstanceId, lease: LeaseId, now_ms: u64) {
        self.on_renew(debtor, &LeaseRenew { leases: vec![lease.0], seq: 0 }, now_ms);
    }

    /// Frees blocks of a lease, at once or when it is unpinned.
    fn give_back(&mut self, lease: LeaseId, blocks: Vec<PhysBlock>, pool: &mut BlockPool) {
        match self.pinned.get_mut(&lease).filter(|_| !mutants::is(Mutant::PinIgnored)) {
            Some(held) => held.extend(blocks),
            None => pool.free(Owner::Lent(lease), &blocks),
        }
    }

    /// Whether a lease was granted for this request of a debtor.
    #[must_use]
    pub fn has_request(&self, debtor: InstanceId, request: u64) -> bool {
        self.by_request.contains_key(&(debtor, request))
    }

    pub(super) fn lends_to(&self, debtor: InstanceId) -> bool {
        self.leases.values().any(|l| l.debtor == debtor)
    }

    pub(super) fn on_request(
        &mut self,
        from: InstanceId,
        request: &LeaseRequest,
        now_ms: u64,
        pool: &mut BlockPool,
    ) -> Result<LeaseGrant, LeaseRefuse> {
        if let Some(lease) = self.by_request.get(&(from, request.request)) {
            return Ok(self.grant_of(*lease));
        }
        let purpose = request.purpose();
        let lendable = self.lendable_for(purpose, pool);
        let refuse = |reason: String| LeaseRefuse { request: request.request, blocks_lendable: lendable, reason };
        if request.blocks == 0 || request.blocks_min > request.blocks {
            return Err(refuse(format!("{} to {} blocks make no sense", request.blocks_min, request.blocks)));
        }
        if let Some(older_ms) = self.older_than(from, request, now_ms) {
            return Err(refuse(format!("an older request waits for it, for {older_ms} ms")));
        }
        if !request.hashes.is_empty() {
            return self.grant_cached(from, request, now_ms, pool).map_err(refuse);
        }
        let blocks = request.blocks.min(lendable);
        if blocks < request.blocks_min.max(1) {
            let why = self.bound.as_ref().map_or(String::new(), |(_, why)| format!(": {why}"));
            let wanted = request.blocks_min;
            return Err(refuse(format!("{lendable} blocks are lendable, at least {wanted} wanted{why}")));
        }
        self.issued += 1;
        let lease = LeaseId(self.lease_base + self.issued);
        let epoch = Epoch(self.epoch_base.wrapping_add(self.issued));
        let again = |l: &&Lease| mutants::is(Mutant::DoubleGrant) && l.blocks.len() >= blocks;
        let again = self.leases.values().find(again).map(|l| l.blocks.lent().collect());
        let new = || pool.allocate(Owner::Lent(lease), blocks, None).expect("lendable blocks are free");
        let blocks: Vec<PhysBlock> = again.unwrap_or_else(new);
        let hasher = LeaseHasher::new(self.layers as usize, self.block_tokens, self.layer_token_bytes);
        let (debtor, seq, request) = (from, SeqId(request.seq), request.request);
        let (renewed_ms, whole) = (now_ms, BTreeMap::new());
        let lent = u32::try_from(blocks.len()).expect("at most the pool's blocks");
        let blocks = LentBlocks::new(blocks);
        let reserved_ms = (purpose != LeasePurpose::Growth).then_some(now_ms);
        let (cached, hashes) = (0, BTreeMap::new());
        let entry = Lease {
            debtor,
            seq,
            epoch,
            request,
            blocks,
            lent,
            renewed_ms,
            hasher,
            whole,
            purpose,
            reserved_ms,
            cached,
            hashes,
        };
        self.leases.insert(lease, entry);
        self.by_request.insert((from, request), lease);
        Ok(self.grant_of(lease))
    }

    /// How long an older request has waited, in milliseconds, that this one must not overtake. Growth of running
    /// sequences waits for no request.
    fn older_than(&self, from: InstanceId, request: &LeaseRequest, now_ms: u64) -> Option<u64> {
        let oldest_waiting = self.oldest_waiting.filter(|(debtor, _)| *debtor != from).map(|(_, since)| since);
        let theirs = match (request.waited_ms, request.purpose()) {
            (Some(ms), _) => now_ms.saturating_sub(u64::from(ms)),
            (None, LeasePurpose::Move) => return oldest_waiting.map(|since| now_ms.saturating_sub(since)),
            (None, LeasePurpose::Growth | LeasePurpose::Swap | LeasePurpose::Handover | LeasePurpose::Joint) => {
                return None;
            }
        };
        let older = self.waiting_since_ms.into_iter().chain(oldest_waiting).min().filter(|since| *since < theirs);
        older.map(|since| now_ms.saturating_sub(since))
    }

    fn grant_of(&self, id: LeaseId) -> LeaseGrant {
        let lease = &self.leases[&id];
        LeaseGrant {
            request: lease.request,
            lease: id.0,
            epoch: lease.epoch.0,
            blocks: lease.entries(),
            ttl_ms: self.ttl_ms,
            cached: lease.cached,
        }
    }

    /// Frees released entries. Entries that are not the debtor's (any more) count as released.
    pub(super) fn on_release(&mut self, from: InstanceId, m: &LeaseRelease, pool: &mut BlockPool) -> LeaseReleased {
        let id = LeaseId(m.lease);
        if let Some(lease) = self.leases.get_mut(&id)
            && (lease.debtor, lease.epoch.0) == (from, m.epoch)
        {
            let freed = lease.take(m.first..m.entries);
            lease.settle(pool);
            let over = lease.lent == 0;
            // The memory of shared blocks does not become free.
            let returned = freed.iter().filter(|block| !pool.is_shared(**block)).count();
            self.give_back(id, freed, pool);
            if over {
                self.remove(id, pool);
            }
            self.recalls.returned(from, returned);
        }
        LeaseReleased { lease: m.lease, entries: m.entries, first: m.first }
    }

    fn remove(&mut self, id: LeaseId, pool: &mut BlockPool) -> LeaseEnded {
        let mut lease = self.leases.remove(&id).expect("the lease exists");
        if !lease.is_given() {
            self.by_request.remove(&(lease.debtor, lease.request));
        }
        self.give_back(id, lease.take(0..u32::MAX), pool);
        LeaseEnded { debtor: lease.debtor, lease: id }
    }

    fn remove_where(&mut self, pool: &mut BlockPool, ended: impl Fn(&Lease) -> bool) -> Vec<LeaseEnded> {
        let ids: Vec<LeaseId> = self.leases.iter().filter(|(_, l)| ended(l)).map(|(id, _)| *id).collect();
        ids.into_iter().map(|id| self.remove(id, pool)).collect()
    }

    pub(super) fn on_renew(&mut self, from: InstanceId, m: &LeaseRenew, now_ms: u64) -> LeaseRenewed {
        let mut unknown = Vec::new();
        // Each once, and as many as a debtor names in one message: the reply is as long as the unknown ones.
        let mut seen = BTreeSet::new();
        let named = m.leases.iter().take(limits::LEASE_RENEW_LEASES_MAX).copied();
        for id in named.filter(|id| seen.insert(*id)) {
            match self.leases.get_mut(&LeaseId(id)) {
                Some(lease) if lease.debtor == from => lease.renewed_ms = now_ms,
                _ => unknown.push(id),
            }
        }
        LeaseRenewed { unknown, seq: m.seq }
    }

    pub(super) fn expire(&mut self, now_ms: u64, pool: &mut BlockPool) -> Vec<LeaseEnded> {
        self.expire_reservations(now_ms, pool);
        self.revoked.retain(|(at, _)| now_ms < at + self.ttl_ms);
        let ttl_ms = self.ttl_ms;
        self.remove_where(pool, |l| now_ms > l.renewed_ms + ttl_ms)
    }

    /// Frees reserved entries of moves that were not written for [`limits::MOVE_RESERVE_MS`]. They are not sealed, so
    /// no step attends to them.
    fn expire_reservations(&mut self, now_ms: u64, pool: &mut BlockPool) {
        let over = |l: &Lease| l.reserved_ms.is_some_and(|at| now_ms > at + limits::MOVE_RESERVE_MS);
        let ids: Vec<LeaseId> = self.leases.iter().filter(|(_, l)| over(l)).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            for entry in 0..lease.entries() {
                if lease.blocks.get(entry).is_some_and(|b| pool.state(b) != BlockState::Sealed) {
                    pool.free(Owner::Lent(id), &lease.take(entry..entry + 1));
                }
            }
            lease.reserved_ms = None;
            if lease.lent == 0 {
                self.remove(id, pool);
            }
        }
    }

    /// Recalls `blocks` lent blocks, less those being recalled; returns the messages to debtors. With `take`, blocks
    /// not returned in time may be revoked. Until the recalls have ended, nothing is lent.
    pub fn recall(&mut self, blocks: u32, take: bool, now_ms: u64, pool: &BlockPool) -> Vec<(InstanceId, Recall)> {
        let youngest = self.leases.values().rev().map(|l| (l.debtor, l.alone(pool)));
        self.recalls.start(blocks, take, now_ms, youngest)
    }

    /// Lent blocks whose memory becomes free on return: those not shared.
    pub fn recallable(&self, pool: &BlockPool) -> u32 {
        self.leases.values().map(|lease| lease.alone(pool)).sum::<u32>() + self.held_back()
    }

    /// Whether recalls are in progress.
    pub fn recalling(&self) -> bool {
        !self.recalls.is_empty()
    }

    /// Number of recalls met.
    pub fn recalls_met(&self) -> u64 {
        self.recalls.met
    }

    pub(super) fn has_overdue_recalls(&self, now_ms: u64) -> bool {
        self.recalls.next_wake_ms().is_some_and(|at| at <= now_ms)
    }

    pub(super) fn recalls(&mut self) -> &mut Recalls {
        &mut self.recalls
    }

    /// Revokes blocks of a debtor. The caller informs it ([`lagoon_protocol::LeaseRevoked`]) and stops serving its
    /// steps that attend to them.
    pub fn revoke(&mut self, debtor: InstanceId, blocks: u32, now_ms: u64, pool: &mut BlockPool) -> Vec<Revoked> {
        let ids: Vec<LeaseId> =
            self.leases.iter().rev().filter(|(_, l)| l.debtor == debtor).map(|(id, _)| *id).collect();
        let (mut left, mut revoked) = (blocks, Vec::new());
        for id in ids {
            let Some(lease) = self.leases.get_mut(&id).filter(|_| left > 0) else { continue };
            let ranges = lease.ranges_alone(pool);
            let mut taken = Vec::new();
            for range in ranges.into_iter().rev() {
                let entries = range.end - (range.end - range.start).min(left)..range.end;
                if !entries.is_empty() {
                    left -= entries.end - entries.start;
                    taken.extend(lease.take(entries.clone()));
                    revoked.push(Revoked { debtor, lease: id, entries });
                }
            }
            lease.settle(pool);
            let over = lease.lent == 0;
            self.give_back(id, taken, pool);
            if over {
                self.remove(id, pool);
            }
        }
        self.revoked.extend(revoked.iter().map(|r| (now_ms, r.clone())));
        revoked
    }

    /// Revocations within the last lease time to live: their debtors may still believe to hold the entries.
    pub fn revoked(&self) -> impl Iterator<Item = &Revoked> {
        self.revoked.iter().map(|(_, r)| r)
    }

    pub(super) fn free_debtor(&mut self, debtor: InstanceId, pool: &mut BlockPool) -> Vec<LeaseEnded> {
        self.remove_where(pool, |l| l.debtor == debtor)
    }

    pub(super) fn free_all(&mut self, pool: &mut BlockPool) -> Vec<LeaseEnded> {
        self.remove_where(pool, |_| true)
    }

    /// Rows of the request placement map, one for each debtor and sequence. Blocks written in every layer could move.
    /// So could handed-over blocks, once their debtor has read the rest of the lease.
    pub fn rows(&self, pool: &BlockPool) -> Vec<PlacementEntry> {
        let mut rows: BTreeMap<(u32, u64), (u32, usize)> = BTreeMap::new();
        for lease in self.leases.values() {
            let left = lease.purpose == LeasePurpose::Handover && lease.lent < lease.entries();
            let sealed = |block: &PhysBlock| pool.state(*block) == BlockState::Sealed;
            let whole = if left { lease.blocks.lent().filter(sealed).count() } else { lease.whole.len() };
            let row = rows.entry((lease.debtor.0, lease.seq.0)).or_default();
            *row = (row.0 + lease.lent, row.1 + whole);
        }
        let entry = |((debtor, seq), (blocks, whole)): (_, (u32, usize))| {
            let blocks_sealed = u32::try_from(whole).unwrap_or(blocks).min(blocks);
            PlacementEntry { debtor, seq, blocks, blocks_sealed }
        };
        rows.into_iter().map(entry).collect()
    }

    /// Blocks of all leases that are not released.
    pub fn blocks_in_leases(&self) -> u32 {
        self.leases.values().map(|lease| lease.lent).sum()
    }

    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        let of = |l: &Lease| {
            let reserved = l.reserved_ms.map_or(u64::MAX, |at| at + limits::MOVE_RESERVE_MS + 1);
            reserved.min(l.renewed_ms + self.ttl_ms + 1)
        };
        let revoked = self.revoked.iter().map(|(at, _)| at + self.ttl_ms);
        self.leases.values().map(of).chain(self.recalls.next_wake_ms()).chain(revoked).min()
    }

    pub(super) fn debts(&self) -> Vec<Debt> {
        let mut debts: BTreeMap<InstanceId, u32> = BTreeMap::new();
        for lease in self.leases.values() {
            *debts.entry(lease.debtor).or_default() += lease.lent;
        }
        debts.into_iter().map(|(debtor, blocks)| Debt { debtor: debtor.0, blocks }).collect()
    }

    /// Lent entries, as in [`super::held::HeldLeases::iter`], with the debtor first.
    pub fn iter(&self) -> impl Iterator<Item = (InstanceId, LeaseId, Epoch, u32, u32)> + '_ {
        self.leases.iter().flat_map(|(id, l)| l.ranges().map(|r| (l.debtor, *id, l.epoch, r.start, r.end)))
    }

    /// Whether a lease has unreleased entries.
    pub fn is_lent(&self, lease: LeaseId) -> bool {
        self.leases.get(&lease).is_some_and(|lease| lease.lent > 0)
    }

    /// A lent, unreleased entry.
    pub fn entry(&self, lease: LeaseId, entry: u32) -> Option<LentEntry> {
        let l = self.leases.get(&lease)?;
        let block = l.blocks.get(entry)?;
        Some(LentEntry { debtor: l.debtor, seq: l.seq, epoch: l.epoch, block, purpose: l.purpose })
    }

    /// Blocks lent for swaps around frozen cycles: only these may exceed the limit on lending, by the reserve at most.
    pub fn lent_for_swaps(&self) -> u32 {
        self.leases.values().filter(|l| l.purpose == LeasePurpose::Swap).map(|l| l.lent).sum()
    }

    /// Hashing state of lent leases, for accounting.
    pub fn hashers(&self) -> impl Iterator<Item = &LeaseHasher> + '_ {
        self.leases.values().map(|l| &l.hasher)
    }

    fn find(&self, from: InstanceId, (id, epoch): (LeaseId, Epoch)) -> Result<&Lease, RefuseCode> {
        if mutants::is(Mutant::EpochUnchecked) {
            return self.leases.get(&id).or(self.leases.values().next()).ok_or(RefuseCode::UnknownLease);
        }
        let lease = self.leases.get(&id).filter(|l| l.debtor == from).ok_or(RefuseCode::UnknownLease)?;
        if lease.epoch == epoch { Ok(lease) } else { Err(RefuseCode::StaleEpoch) }
    }

    /// Tokens `[offset, offset + tokens)` of a lease, less those of freed entries, as physically consecutive pieces.
    fn pieces<'a>(
        &self,
        lease: &'a Lease,
        offset: u32,
        tokens: u32,
    ) -> Result<impl Iterator<Item = WritePiece> + use<'a>, RefuseCode> {
        let bt = self.block_tokens;
        let end = offset.checked_add(tokens).filter(|end| tokens > 0 && end.div_ceil(bt) <= lease.entries());
        Ok(lease.blocks.pieces(offset..end.ok_or(RefuseCode::OutOfRange)?, bt))
    }

    /// Appends the runs in own slots of a debtor's lease run; nothing on an error. Freed entries are
    /// [`RefuseCode::OutOfRange`]: a debtor frees no entry that a step of its own still reads.
    pub fn resolve(&self, from: InstanceId, run: &LeaseRun, out: &mut Vec<KvRun>) -> Result<(), RefuseCode> {
        let lease = self.find(from, (run.lease, run.epoch))?;
        if run.first_pos.checked_add(run.len).is_none_or(|end| end > limits::SEQUENCE_TOKENS_MAX) {
            return Err(RefuseCode::OutOfRange);
        }
        let (before, mut found) = (out.len(), 0);
        for WritePiece { token0, slot0, tokens } in self.pieces(lease, run.offset, run.len)? {
            found += tokens;
            out.push(KvRun { base: slot0, len: tokens, first_pos: run.first_pos + token0 });
        }
        if found != run.len {
            out.truncate(before);
            return Err(RefuseCode::OutOfRange);
        }
        Ok(())
    }

    /// Slots to write `tokens` tokens of `layer` at `offset` of a lease to: physically consecutive pieces, in order.
    ///
    /// A layer is written strictly in ascending order: `offset` must be the written length. Any other offset, a
    /// repetition too, is [`RefuseCode::OutOfRange`]: the bytes may differ from those hashed and attended to. Bulk
    /// streams neither repeat nor reorder, so a repetition means that the debtor redid a step. Such a debtor releases
    /// the lease and writes a new one.
    ///
    /// Tokens of entries that the debtor has freed meanwhile are in no piece (a window's release may overtake the
    /// write); they count as written.
    ///
    /// When the write is queued, [`super::RManager::commit_write`] must follow before any other call for this lease.
    pub fn begin_write(
        &self,
        from: InstanceId,
        key: (LeaseId, Epoch),
        layer: u32,
        offset: u32,
        tokens: u32,
    ) -> Result<Vec<WritePiece>, RefuseCode> {
        if self.written(from, key, layer)? != offset {
            return Err(RefuseCode::OutOfRange);
        }
        Ok(self.pieces(self.find(from, key)?, offset, tokens)?.collect())
    }

    /// Tokens written in `layer` of a lease of `from`, from its first entry on.
    pub fn written(&self, from: InstanceId, key: (LeaseId, Epoch), layer: u32) -> Result<u32, RefuseCode> {
        let lease = self.find(from, key)?;
        if layer >= self.layers {
            return Err(RefuseCode::Malformed);
        }
        Ok(lease.hasher.written(layer as usize))
    }

    pub(super) fn commit_write(&mut self, id: LeaseId, layer: u32, bytes: &[u8], now_ms: u64, pool: &mut BlockPool) {
        let lease = self.leases.get_mut(&id).expect("a commit follows its begin at once");
        lease.reserved_ms = lease.reserved_ms.map(|at| at.max(now_ms));
        let first = lease.hasher.written(layer as usize) / self.block_tokens;
        let mut whole = Vec::new();
        lease.hasher.write(layer as usize, bytes, &mut whole);
        let end = lease.hasher.written(layer as usize).div_ceil(self.block_tokens);
        let blocks = &lease.blocks;
        let lent = |entry: u32| blocks.get(entry).is_some();
        lease.hasher.retain(lent);
        for block in blocks.entries()[first.min(end) as usize..end as usize].iter().flatten() {
            if pool.state(*block) == BlockState::Reserved {
                pool.mark(*block, BlockState::Filling);
            }
        }
        lease.whole.extend(whole.into_iter().filter(|(entry, _)| lent(*entry)));
    }

    /// Seals a written entry if its content has `hash`. Idempotent. [`RefuseCode::OutOfRange`] if it is not written in
    /// every layer. A freed entry needs no seal: `Ok`. Returns whether the debtor waits for a
    /// [`lagoon_protocol::LeaseSealed`], because the lease is for a move.
    pub fn seal(
        &mut self,
        from: InstanceId,
        key: (LeaseId, Epoch),
        entry: u32,
        hash: &ContentHash,
        pool: &mut BlockPool,
    ) -> Result<bool, RefuseCode> {
        let lease = self.find(from, key)?;
        let block = *lease.blocks.entries().get(entry as usize).ok_or(RefuseCode::OutOfRange)?;
        let Some(block) = block else { return Ok(false) };
        let own = lease.whole.get(&entry).ok_or(RefuseCode::OutOfRange)?;
        if own != hash {
            return Err(RefuseCode::HashMismatch);
        }
        pool.mark(block, BlockState::Sealed);
        let lease = self.leases.get_mut(&key.0).expect("it was found");
        lease.settle(pool);
        if let Some((hash, depth)) = lease.hashes.remove(&entry) {
            pool.set_hash(block, hash, depth);
        }
        Ok(lease.purpose != LeasePurpose::Growth && !mutants::is(Mutant::SealUnreported))
    }
}
