//! The rManager: one instance's rBlocks, whoever uses them (Infinite-LLM v1 §4.3 and §4.4).
//!
//! Three roles share one pool: the owner ([`RManager::allocate`]), the creditor (leases to other instances) and the
//! debtor (leases from other instances). Invariants:
//! * free + own + lent = total + shared (asserted by the pool at every change);
//! * growth goes before lending: at most `lend_blocks_max` blocks are lent, and never one of the last
//!   `lend_reserve_blocks` free ones. Lending never borrows;
//! * the blocks that a creditor has lent always contain those that its debtors hold, because a debtor gives a lease up
//!   before the creditor's time to live can end, and frees it at the creditor only after it stopped using it.
//!
//! **Freed blocks and queued device work.** Freeing gives a block to the next allocation at once. That is safe as long
//! as one thread queues device work in the order of these calls, and the device executes in that order: whatever was
//! queued for the old owner happens before anything of the new one. So resolve a lease's runs when work is queued (per
//! layer, not once per step), and commit a write right when it is queued.

mod creditor;
mod debtor;
mod fence;
mod held;
mod output;
mod recall;
mod report;
#[cfg(test)]
mod tests;
mod watched;

pub use creditor::{LeaseEnded, LentEntry, WritePiece};
pub use output::{BorrowFailure, BorrowId, BorrowedLease, Output};
pub use recall::{Revoked, Unmet};
pub use report::PlacementReport;

use creditor::Creditor;
use debtor::Debtor;
use lagoon_kv::hash::ContentHash;
use lagoon_kv::{Adopted, Advance, BlockIdentity, BlockPool, Joined, LeaseHasher, Owner, PoolCounts, RemoteEntries};
use lagoon_protocol::{
    BorrowAdvice, ControlBody, Heartbeat, LeaseGrant, LeasePurpose, LeaseRefuse, LeaseRequest, Link, PlacementEntry,
    Recall, RefuseCode, TierRequest,
};
use lagoon_types::{Epoch, InstanceId, KvRun, KvShape, KvSpace, LeaseId, LeaseRun, PhysBlock, SeqId, limits};
use std::collections::BTreeMap;
use watched::Watched;

/// What an rManager manages, and how generous it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RManagerConfig {
    pub blocks_total: u32,
    pub block_tokens: u32,
    pub shape: KvShape,
    /// Blocks lent at most, to all debtors together (v1 §4.3: a hyper-parameter).
    pub lend_blocks_max: u32,
    /// Free blocks that are never lent.
    pub lend_reserve_blocks: u32,
    /// A lease that is not renewed for this long is freed.
    pub lease_ttl_ms: u64,
    /// Random per process: epochs and lease ids start from it, so that those of an earlier process are unknown here.
    pub incarnation: u64,
}

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("block_tokens is {0}: expected 1 to {max}", max = limits::BLOCK_TOKENS_MAX)]
    BlockTokens(u32),
    #[error("{blocks} blocks of {block_tokens} tokens exceed 32-bit slots")]
    TooManySlots { blocks: u32, block_tokens: u32 },
    #[error("{0:?} is no space for the blocks of this instance")]
    Space(KvSpace),
    #[error("the KV shape {0:?} holds nothing")]
    EmptyShape(KvShape),
    #[error("lease_ttl_ms is {0}: expected at least {min}", min = limits::LEASE_RENEW_MS * 3)]
    LeaseTtl(u64),
}

/// The manager of one instance's rBlocks. See the module for invariants.
#[derive(Debug)]
pub struct RManager {
    config: RManagerConfig,
    pool: BlockPool,
    creditor: Watched<Creditor>,
    debtor: Watched<Debtor>,
    /// Nothing is due before, as long as neither half is touched.
    wake_ms: u64,
    /// The incarnation that each peer showed last.
    peers: BTreeMap<InstanceId, u64>,
    /// Peers that were declared dead: the incarnation that was, and until when it gets nothing.
    fenced_peers: BTreeMap<InstanceId, (u64, u64)>,
    /// This instance was, and is not registered again yet.
    is_fenced: bool,
    is_draining: bool,
    heartbeats: u64,
}

impl RManager {
    /// A manager of free blocks.
    pub fn new(config: RManagerConfig) -> Result<Self, ConfigError> {
        let RManagerConfig { blocks_total, block_tokens, shape, .. } = config;
        if block_tokens == 0 || block_tokens > limits::BLOCK_TOKENS_MAX {
            return Err(ConfigError::BlockTokens(block_tokens));
        }
        // u32::MAX itself stands for "no slot" in the device contract.
        if blocks_total.checked_mul(block_tokens).is_none_or(|slots| slots == u32::MAX) {
            return Err(ConfigError::TooManySlots { blocks: blocks_total, block_tokens });
        }
        if shape.token_bytes() == 0 {
            return Err(ConfigError::EmptyShape(shape));
        }
        if config.lease_ttl_ms < limits::LEASE_RENEW_MS * 3 {
            return Err(ConfigError::LeaseTtl(config.lease_ttl_ms));
        }
        Ok(Self {
            pool: BlockPool::new(blocks_total),
            creditor: Watched::new(Creditor::new(&config)),
            debtor: Watched::new(Debtor::new()),
            wake_ms: 0,
            peers: BTreeMap::new(),
            fenced_peers: BTreeMap::new(),
            is_fenced: false,
            is_draining: false,
            heartbeats: 0,
            config,
        })
    }

    #[must_use]
    pub fn config(&self) -> &RManagerConfig {
        &self.config
    }

    #[must_use]
    pub fn counts(&self) -> PoolCounts {
        self.pool.counts()
    }

    /// Free blocks, for own sequences.
    #[must_use]
    pub fn available(&self) -> u32 {
        self.pool.counts().free
    }

    /// Blocks that would be lent now.
    #[must_use]
    pub fn lendable(&self) -> u32 {
        if self.is_draining || self.is_fenced { 0 } else { self.creditor.lendable(&self.pool) }
    }

    /// Blocks borrowed from others, those of unfinished borrows included.
    #[must_use]
    pub fn borrowed(&self) -> u32 {
        self.debtor.held.blocks()
    }

    /// Borrows that are being negotiated.
    #[must_use]
    pub fn borrowing(&self) -> usize {
        self.debtor.borrowing()
    }

    /// Releases that creditors have not acknowledged yet.
    #[must_use]
    pub fn releasing(&self) -> usize {
        self.debtor.held.releasing()
    }

    /// The pool, to look at.
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The number that the gManager gave. Borrow queries wait for it.
    pub fn set_instance(&mut self, instance: InstanceId) {
        self.is_fenced = false;
        self.debtor.set_instance(instance);
    }

    /// Whether a creditor's memory is mapped here: of the candidates that the gManager names, such are asked first.
    pub fn set_near(&mut self, creditor: InstanceId, near: bool) {
        self.debtor.set_near(creditor, near);
    }

    /// Numbers blocks by addresses behind which memory is mapped. To be called before anything is allocated.
    ///
    /// # Errors
    /// [`ConfigError`] if the space is not that of this instance's blocks, or its slots cannot be numbered.
    pub fn address(&mut self, space: KvSpace) -> Result<(), ConfigError> {
        let RManagerConfig { blocks_total: blocks, block_tokens, .. } = self.config;
        if (space.blocks, space.block_tokens) != (blocks, block_tokens) || space.addresses().is_none() {
            return Err(ConfigError::Space(space));
        }
        assert_eq!(self.available(), blocks, "addresses are chosen before they are given out");
        self.pool = BlockPool::over(space);
        Ok(())
    }

    /// See [`BlockPool::take_freed`].
    pub fn take_freed(&mut self) -> Vec<PhysBlock> {
        self.pool.take_freed()
    }

    // The owner.

    /// Blocks for a sequence of this instance, for its logical blocks `logical`, all or nothing. Where blocks are not
    /// addressed by rows, best right behind `after`, its last local block.
    pub fn allocate(
        &mut self,
        seq: SeqId,
        logical: impl ExactSizeIterator<Item = u32>,
        after: Option<PhysBlock>,
    ) -> Option<Vec<PhysBlock>> {
        self.pool.allocate_for(seq, logical, after)
    }

    /// Blocks that hold the longest prefix of `names` that is found, for a sequence that has nothing here: see
    /// [`BlockPool::adopt`].
    pub fn adopt(&mut self, seq: SeqId, names: &[BlockIdentity], map: bool) -> Adopted {
        self.pool.adopt(seq, names, map)
    }

    /// Has a sequence give up a block of its own for one that somebody has under this name: see [`BlockPool::join`].
    pub fn join(&mut self, seq: SeqId, block: PhysBlock, name: &BlockIdentity, map: bool) -> Option<Joined> {
        self.pool.join(Owner::Own(seq), block, name, map)
    }

    /// Names what an own sealed block holds: see [`BlockPool::name`].
    pub fn name(&mut self, block: PhysBlock, identity: BlockIdentity, depth: u32) {
        self.pool.name(block, identity, depth);
    }

    /// What free blocks keep is not to be relied on any more.
    pub fn drop_kept(&mut self) {
        self.pool.drop_all();
    }

    /// Gives a sequence's blocks back. Those with a name keep what they hold, and others keep what they share.
    ///
    /// # Panics
    /// If one of them is not the sequence's.
    pub fn free(&mut self, seq: SeqId, blocks: &[PhysBlock]) {
        self.pool.free(Owner::Own(seq), blocks);
    }

    /// Marks what a sequence's written tokens filled and sealed.
    pub fn mark_written(&mut self, advance: &Advance) {
        advance.mark(&mut self.pool);
    }

    // Both sides.

    /// A peer introduced itself; call it before its first message on a connection. If it is another process than
    /// before, what it borrowed is freed, and what was borrowed from it is lost.
    pub fn on_peer_hello(&mut self, peer: InstanceId, incarnation: u64, now_ms: u64) -> Vec<LeaseEnded> {
        if self.peers.len() >= 2 * limits::INSTANCES_MAX {
            let (creditor, debtor) = (&self.creditor, &self.debtor);
            self.peers.retain(|p, _| creditor.lends_to(*p) || debtor.held.has_from(*p));
            self.fenced_peers.retain(|p, _| self.peers.contains_key(p));
        }
        if self.fenced_peers.get(&peer).is_some_and(|(fenced, _)| *fenced != incarnation) {
            self.fenced_peers.remove(&peer);
        }
        match self.peers.insert(peer, incarnation) {
            Some(old) if old != incarnation => {
                self.debtor.on_peer_restarted(peer, now_ms);
                self.creditor.free_debtor(peer, &mut self.pool)
            }
            _ => Vec::new(),
        }
    }

    /// The connection to a peer is gone. Leases outlive it; questions to the peer do not.
    pub fn on_peer_down(&mut self, peer: InstanceId, now_ms: u64) {
        self.debtor.on_peer_down(peer, now_ms);
    }

    /// Handles any lease message of a peer; the answer, if any, goes back to it. Other messages are ignored.
    pub fn on_peer_control(&mut self, from: InstanceId, body: ControlBody, now_ms: u64) -> Option<ControlBody> {
        match body {
            ControlBody::LeaseRequest(request) => Some(match self.on_lease_request(from, &request, now_ms) {
                Ok(grant) => ControlBody::LeaseGrant(grant),
                Err(refuse) => ControlBody::LeaseRefuse(refuse),
            }),
            ControlBody::LeaseRelease(m) => {
                Some(ControlBody::LeaseReleased(self.creditor.on_release(from, &m, &mut self.pool)))
            }
            ControlBody::LeaseRenew(m) => Some(ControlBody::LeaseRenewed(self.creditor.on_renew(from, &m, now_ms))),
            ControlBody::LeaseGrant(m) => {
                self.debtor.on_grant(from, &m, now_ms);
                None
            }
            ControlBody::LeaseRefuse(m) => {
                self.debtor.on_refuse(from, &m, now_ms);
                None
            }
            ControlBody::LeaseReleased(m) => {
                self.debtor.held.on_released(from, &m);
                None
            }
            ControlBody::LeaseRenewed(m) => {
                self.debtor.on_renewed(from, &m);
                None
            }
            ControlBody::LeaseSealed(m) => {
                self.debtor.held.on_sealed(from, &m);
                None
            }
            ControlBody::LeaseRevoked(m) => {
                self.debtor.on_revoked(from, &m, now_ms);
                None
            }
            _ => None,
        }
    }

    /// Time passes: deadlines, renewals, repetitions; leases that nobody renewed are freed and returned.
    pub fn tick(&mut self, now_ms: u64) -> Vec<LeaseEnded> {
        if now_ms < self.wake_ms && !self.debtor.touched() && !self.creditor.touched() {
            return Vec::new();
        }
        self.debtor.tick(now_ms);
        let ended = self.creditor.expire(now_ms, &mut self.pool);
        self.wake_ms = self.next_wake_ms().unwrap_or(u64::MAX);
        self.debtor.forget();
        self.creditor.forget();
        ended
    }

    /// When [`RManager::tick`] has something to do next, if nothing else happens.
    #[must_use]
    pub fn next_wake_ms(&self) -> Option<u64> {
        self.debtor.next_wake_ms().into_iter().chain(self.creditor.next_wake_ms()).min()
    }

    /// What is to be sent, or told to the scheduler; until `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.debtor.unnoted().poll()
    }

    /// The next heartbeat, without its rows and the batch's load: see [`PlacementReport::fill`].
    pub fn heartbeat(&mut self, requests_running: u32, requests_waiting: u32, links: Vec<Link>) -> Heartbeat {
        self.heartbeats += 1;
        Heartbeat {
            instance: self.debtor.instance().map_or(0, |i| i.0),
            incarnation: self.config.incarnation,
            seq: self.heartbeats,
            blocks_total: self.config.blocks_total,
            blocks_free: self.available(),
            blocks_lendable: self.lendable(),
            lent: self.creditor.debts(),
            blocks_borrowed: self.borrowed(),
            requests_running,
            requests_waiting,
            links,
            ..Heartbeat::default()
        }
    }

    // The debtor.

    /// Starts to borrow `blocks` (not 0) for a sequence, all or nothing. Exactly one [`Output::Borrowed`] or
    /// [`Output::BorrowFailed`] follows within [`limits::BORROW_DEADLINE_MS`], unless it is cancelled.
    pub fn borrow(&mut self, seq: SeqId, blocks: u32, now_ms: u64) -> BorrowId {
        self.borrow_in(TierRequest::Any, seq, blocks, now_ms)
    }

    /// As [`RManager::borrow`], in memory of this tier.
    pub fn borrow_in(&mut self, tier: TierRequest, seq: SeqId, blocks: u32, now_ms: u64) -> BorrowId {
        self.debtor.borrow(seq, blocks, tier, None, now_ms)
    }

    /// As [`RManager::borrow`], for a sequence that came at `since_ms` and does not run yet.
    pub fn borrow_to_admit(&mut self, seq: SeqId, blocks: u32, since_ms: u64, now_ms: u64) -> BorrowId {
        self.debtor.borrow(seq, blocks, TierRequest::Any, Some(since_ms), now_ms)
    }

    /// As [`RManager::reserve`] for a move to host memory, wherever the gManager names some.
    pub fn reserve_host(&mut self, seq: SeqId, blocks: u32, now_ms: u64) -> BorrowId {
        self.debtor.reserve(seq, None, blocks, LeasePurpose::Move, TierRequest::HostOnly, now_ms)
    }

    /// Reserves up to `blocks` (not 0) for a move of a sequence (`try_move_kvcache`, v2 §6.2), at `target` with its
    /// address, or at whoever the gManager names. Exactly one [`Output::Reserved`] or [`Output::NotReserved`] follows
    /// within [`limits::BORROW_DEADLINE_MS`], unless it is cancelled. The reservation is given up if it is not written
    /// for [`limits::MOVE_RESERVE_MS`]: see [`RManager::note_written`].
    pub fn reserve(
        &mut self,
        seq: SeqId,
        target: Option<(InstanceId, String)>,
        blocks: u32,
        purpose: LeasePurpose,
        now_ms: u64,
    ) -> BorrowId {
        self.debtor.reserve(seq, target, blocks, purpose, TierRequest::Any, now_ms)
    }

    /// KV for a reservation was sent.
    pub fn note_written(&mut self, creditor: InstanceId, lease: LeaseId, now_ms: u64) {
        // Its time is over later than before, never earlier.
        self.debtor.unnoted().held.note_written(creditor, lease, now_ms);
    }

    /// Own sequences will need so many blocks soon: they are not lent.
    pub fn set_growth_reserve(&mut self, blocks: u32) {
        self.creditor.unnoted().growth_reserve = blocks;
    }

    /// An own request waits since then for memory that this instance has, and the pool's oldest waiting request: nothing is lent to admit
    /// a younger one than either.
    pub fn set_waiting(&mut self, own_since_ms: Option<u64>, oldest_waiting: Option<(InstanceId, u64)>) {
        let creditor = self.creditor.unnoted();
        (creditor.waiting_since_ms, creditor.oldest_waiting) = (own_since_ms, oldest_waiting);
    }

    /// A creditor recalled blocks: nothing is borrowed from it before `until_ms`.
    pub fn pause_creditor(&mut self, creditor: InstanceId, until_ms: u64) {
        self.debtor.pause(creditor, until_ms);
    }

    /// Ends a borrow; what it has got is released. Says whether it had not been handed out yet: if it had, the caller
    /// has the leases and releases them.
    pub fn cancel(&mut self, borrow: BorrowId, now_ms: u64) -> bool {
        self.debtor.cancel(borrow, now_ms)
    }

    /// The gManager's recommendation.
    pub fn on_advice(&mut self, advice: &BorrowAdvice, now_ms: u64) {
        self.debtor.on_advice(advice, now_ms);
    }

    /// Gives back entries of a borrowed lease. Leases that are not held (any more) are
    /// ignored, so that what a sequence frees can be handed in as it is, lost leases included.
    pub fn release(&mut self, entries: &RemoteEntries, now_ms: u64) {
        let range = entries.first..entries.entries;
        self.debtor.held.release(entries.creditor, entries.lease, range, now_ms);
    }

    /// What this instance holds and has not released: creditor, lease, epoch, and a range of entries, first and end. A
    /// lease has as many rows as ranges.
    pub fn held(&self) -> impl Iterator<Item = (InstanceId, LeaseId, Epoch, u32, u32)> + '_ {
        self.debtor.held.iter()
    }

    /// Entries of reservations for moves that are neither acknowledged as sealed nor given back: creditor, lease, entry.
    pub fn unsealed(&self) -> impl Iterator<Item = (InstanceId, LeaseId, u32)> + '_ {
        self.debtor.held.unsealed()
    }

    // The creditor.

    /// Bounds what is lent from now on, below the configured bounds, and says why. What is lent already stays.
    pub fn set_lend_bound(&mut self, bound: Option<(u32, String)>) {
        self.creditor.unnoted().bound = bound;
    }

    /// A debtor asks for blocks. First come, first served; a repeated request gets the same grant again.
    pub fn on_lease_request(
        &mut self,
        from: InstanceId,
        request: &LeaseRequest,
        now_ms: u64,
    ) -> Result<LeaseGrant, LeaseRefuse> {
        if self.debtor.instance() == Some(from) {
            let reason = "an instance does not lend to itself".to_owned();
            return Err(LeaseRefuse { request: request.request, blocks_lendable: 0, reason });
        }
        if let Some(refuse) = self.refuses(from, request.request, now_ms) {
            return Err(refuse);
        }
        self.creditor.on_request(from, request, now_ms, &mut self.pool)
    }

    /// An own sequence's blocks, which hold `tokens` tokens, become a lease of `debtor`'s sequence `seq`: the answer to its
    /// request `request`, which it has not asked for in any other way. The bound on what is lent does not count them.
    ///
    /// # Panics
    /// If one of them is not the sequence's.
    pub fn hand_over(
        &mut self,
        own: SeqId,
        (debtor, seq, request): (InstanceId, SeqId, u64),
        blocks: Vec<PhysBlock>,
        tokens: u32,
        now_ms: u64,
    ) -> LeaseGrant {
        self.creditor.hand_over(Owner::Own(own), (debtor, seq, request), blocks, tokens, now_ms, &mut self.pool)
    }

    /// Transports may read a lent lease's memory until [`RManager::unpin`]: blocks of it that are given back are free only
    /// then.
    pub fn pin(&mut self, lease: LeaseId) {
        self.creditor.pin(lease);
    }

    /// No transport reads it any more.
    pub fn unpin(&mut self, lease: LeaseId) {
        self.creditor.unpin(lease, &mut self.pool);
    }

    /// The debtor of a handed-over lease never took it: it is freed.
    pub fn take_back(&mut self, debtor: InstanceId, lease: LeaseId, epoch: Epoch) {
        let release = lagoon_protocol::LeaseRelease { lease: lease.0, epoch: epoch.0, entries: u32::MAX, first: 0 };
        self.creditor.on_release(debtor, &release, &mut self.pool);
    }

    /// The debtor of a handed-over lease showed that it waits for it.
    pub fn touch(&mut self, debtor: InstanceId, lease: LeaseId, now_ms: u64) {
        let renew = lagoon_protocol::LeaseRenew { leases: vec![lease.0], seq: 0 };
        self.creditor.on_renew(debtor, &renew, now_ms);
    }

    /// Lent blocks whose memory would be free if they came back: others share none of them.
    #[must_use]
    pub fn recallable(&self) -> u32 {
        self.creditor.recallable(&self.pool)
    }

    /// Lent blocks that the bound on what is lent does not count: see [`RManager::hand_over`].
    #[must_use]
    pub fn handed_over(&self) -> u32 {
        self.creditor.handed_over()
    }

    /// Blocks of ended leases that transports still read.
    #[must_use]
    pub fn held_back(&self) -> u32 {
        self.creditor.held_back()
    }

    /// A number for a prefill that another instance is asked for; apart from those of borrows.
    pub fn next_request(&mut self) -> u64 {
        self.debtor.next_request()
    }

    /// A worker computed KV for a sequence, and lends it since: it is held like a borrowed lease. `confirmed_ms` is when
    /// the last message was sent that the creditor answered before it lent. False if it is held already, or if that is so long
    /// ago that the creditor may not lend it any more.
    pub fn take_over(
        &mut self,
        seq: SeqId,
        lease: &BorrowedLease,
        (ttl_ms, confirmed_ms): (u64, u64),
        now_ms: u64,
    ) -> bool {
        self.debtor.take_over(seq, lease, (ttl_ms, confirmed_ms), now_ms)
    }

    /// A worker lends KV that nobody wants any more.
    pub fn decline(&mut self, lease: &BorrowedLease, now_ms: u64) {
        self.debtor.decline(lease, now_ms);
    }

    /// Rows of the request placement map for what others' requests have here.
    pub fn lent_rows(&self) -> Vec<PlacementEntry> {
        self.creditor.rows(&self.pool)
    }

    /// What this instance has lent, as in [`RManager::held`]; the first is the debtor.
    pub fn lent(&self) -> impl Iterator<Item = (InstanceId, LeaseId, Epoch, u32, u32)> + '_ {
        self.creditor.iter()
    }

    /// Whether something of a lease is lent.
    #[must_use]
    pub fn is_lent(&self, lease: LeaseId) -> bool {
        self.creditor.is_lent(lease)
    }

    /// A block that is lent and was not given back.
    #[must_use]
    pub fn lent_entry(&self, lease: LeaseId, entry: u32) -> Option<LentEntry> {
        self.creditor.entry(lease, entry)
    }

    /// Blocks that are lent for swaps around frozen cycles: these alone may exceed the bound on what is lent, by the
    /// reserve at most.
    #[must_use]
    pub fn lent_for_swaps(&self) -> u32 {
        self.creditor.lent_for_swaps()
    }

    /// Appends the runs in own slots that a debtor's lease run is. Nothing is appended on an error. Freed entries are
    /// [`RefuseCode::OutOfRange`]: a debtor frees nothing that a step of its own still reads.
    pub fn resolve(&self, from: InstanceId, run: &LeaseRun, out: &mut Vec<KvRun>) -> Result<(), RefuseCode> {
        self.creditor.resolve(from, run, out)
    }

    /// Where to write `tokens` tokens of `layer` at `offset` of a lease: physically consecutive pieces, in order.
    ///
    /// A layer is written strictly in ascending offset: `offset` must be the written length. Anything else, a
    /// repetition too, is [`RefuseCode::OutOfRange`]: the bytes may differ from those that were hashed and attended to,
    /// and bulk streams neither repeat nor reorder, so a repetition is a debtor that redid a step. Such a debtor
    /// releases the lease and writes a new one.
    ///
    /// Tokens of entries that the debtor has freed meanwhile are in no piece (the release of a window may overtake the
    /// write on its way); they count as written all the same.
    ///
    /// When the write is queued, [`RManager::commit_write`] follows before any other call for this lease.
    pub fn begin_write(
        &self,
        from: InstanceId,
        lease: LeaseId,
        epoch: Epoch,
        layer: u32,
        offset: u32,
        tokens: u32,
    ) -> Result<Vec<WritePiece>, RefuseCode> {
        self.creditor.begin_write(from, (lease, epoch), layer, offset, tokens)
    }

    /// The write that [`RManager::begin_write`] allowed is queued: `bytes` is its KV in the canonical layout, all of it.
    ///
    /// # Panics
    /// If the lease is gone or `bytes` does not continue it: the calls belong together.
    pub fn commit_write(&mut self, lease: LeaseId, layer: u32, bytes: &[u8], now_ms: u64) {
        // A reservation's time is over later than before, never earlier.
        self.creditor.unnoted().commit_write(lease, layer, bytes, now_ms, &mut self.pool);
    }

    /// Wants `blocks` lent blocks back: the messages to send to debtors. What was asked for already counts. With `take`
    /// they are taken when nobody returns them in time. Until the recalls have ended, nothing is lent.
    pub fn recall(&mut self, blocks: u32, take: bool, now_ms: u64) -> Vec<(InstanceId, Recall)> {
        self.creditor.recall(blocks, take, now_ms, &self.pool)
    }

    /// Recalls whose deadline is over; they have ended.
    pub fn unmet_recalls(&mut self, now_ms: u64) -> Vec<Unmet> {
        if !self.creditor.has_overdue_recalls(now_ms) {
            return Vec::new();
        }
        self.creditor.recalls().overdue(now_ms)
    }

    /// Whether recalls are in progress.
    #[must_use]
    pub fn recalling(&self) -> bool {
        self.creditor.recalling()
    }

    /// Recalls that were met.
    #[must_use]
    pub fn recalls_met(&self) -> u64 {
        self.creditor.recalls_met()
    }

    /// Takes blocks back from a debtor, which must be told ([`lagoon_protocol::LeaseRevoked`]). Its steps that attend to
    /// them must not be served any more.
    pub fn revoke(&mut self, debtor: InstanceId, blocks: u32, now_ms: u64) -> Vec<Revoked> {
        self.creditor.revoke(debtor, blocks, now_ms, &mut self.pool)
    }

    /// What was taken back within a lease's time to live: their debtors may hold it in their belief still.
    pub fn revoked(&self) -> impl Iterator<Item = &Revoked> {
        self.creditor.revoked()
    }

    /// Tokens written in `layer` of a lease of `from`, from its first entry on.
    pub fn written(&self, from: InstanceId, lease: LeaseId, epoch: Epoch, layer: u32) -> Result<u32, RefuseCode> {
        self.creditor.written(from, (lease, epoch), layer)
    }

    /// Seals a written entry if its content has `hash`. Idempotent. [`RefuseCode::OutOfRange`] if it is not written in
    /// every layer. An entry that was freed meanwhile needs no seal: `Ok`. Says whether the debtor waits for a
    /// [`lagoon_protocol::LeaseSealed`], because it moves.
    pub fn seal(
        &mut self,
        from: InstanceId,
        lease: LeaseId,
        epoch: Epoch,
        entry: u32,
        hash: &ContentHash,
    ) -> Result<bool, RefuseCode> {
        self.creditor.seal(from, (lease, epoch), entry, hash, &mut self.pool)
    }

    /// By entry of a lease that is held here, in which rBlock of its creditor's lent memory it is sealed, as far as the creditor
    /// said so; `u32::MAX` where it did not.
    #[must_use]
    pub fn places(&self, creditor: InstanceId, lease: LeaseId, epoch: Epoch) -> &[u32] {
        let held = self.debtor.held.get(creditor, lease).filter(|held| held.epoch == epoch);
        held.map_or(&[], |held| &held.places)
    }

    /// Hashing state of lent leases, for accounting.
    pub fn lent_hashers(&self) -> impl Iterator<Item = &LeaseHasher> + '_ {
        self.creditor.hashers()
    }
}
