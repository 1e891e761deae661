//! The debtor's half of an rManager: one negotiation per borrow (the contract protocol, Infinite-LLM v1 §4.4).
//!
//! A borrow asks the gManager for candidates, then the candidates one after the other; each may grant a part. After the
//! last one it asks the gManager again, excluding those it has asked. It is all or nothing: a failed borrow releases
//! its grants. Candidates on other hosts are each asked for a stripe ([`stripes`]).
//!
//! Invariants:
//! * every borrow ends in exactly one output (or its cancellation) before its deadline;
//! * a grant belongs to a waiting borrow, or it is released at once; nothing leaks;
//! * a candidate is asked at most once per borrow, and again in later rounds only if it granted a whole stripe.

mod members;
mod prefix;
mod stripes;

use super::held::{Held, HeldLeases, Reserved};
use super::output::{BorrowFailure, BorrowId, BorrowedLease, CachedPart, Output};
use lagoon_kv::RangeSet;
use lagoon_protocol::{
    BorrowAdvice, BorrowQuery, Candidate, ControlBody, LeaseGrant, LeasePurpose, LeaseRefuse, LeaseRenewed,
    LeaseRequest, LeaseRevoked, Refusal, TierRequest,
};
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId, limits};
use members::Findings;
use prefix::Search;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use stripes::Hosts;

#[derive(Debug)]
enum State {
    /// Waits for the gManager's advice. `asked_ms` is `None` until this instance has an id.
    Advice { query: u64, asked_ms: Option<u64> },
    /// Waits for a candidate's reply.
    Asking { request: u64, candidate: Candidate, sent_ms: u64, blocks: u32 },
}

#[derive(Debug)]
struct Borrow {
    seq: SeqId,
    wanted: u32,
    /// When the sequence's request arrived, in milliseconds; `None` once it runs.
    since_ms: Option<u64>,
    deadline_ms: u64,
    round: u32,
    state: State,
    candidates: VecDeque<Candidate>,
    asked: BTreeSet<InstanceId>,
    granted: Vec<(InstanceId, LeaseId)>,
    got: u32,
    /// [`LeasePurpose::Growth`] is all or nothing; a move takes as many blocks as the first candidate grants.
    purpose: LeasePurpose,
    tier: TierRequest,
    /// Blocks that the last candidate could lend, as it replied.
    lendable: Option<u32>,
}

impl Borrow {
    /// Blocks still to be borrowed.
    fn left(&self) -> u32 {
        self.wanted - self.got
    }
}

/// A lease request that its borrow no longer waits for; a late grant is released.
#[derive(Debug)]
struct Late {
    instance: InstanceId,
    quic_addr: String,
    forget_ms: u64,
}

/// The debtor's half of an rManager: borrows being negotiated, and the leases held.
#[derive(Debug)]
pub struct Debtor {
    instance: Option<InstanceId>,
    /// Last number issued, for borrows, queries and requests.
    issued: u64,
    borrows: BTreeMap<BorrowId, Borrow>,
    searches: BTreeMap<BorrowId, Search>,
    findings: Findings,
    late: BTreeMap<u64, Late>,
    /// Creditors that recalled blocks, and until when nothing is borrowed from them.
    paused: BTreeMap<InstanceId, u64>,
    /// Creditors whose memory is mapped here.
    near: BTreeSet<InstanceId>,
    /// Instances of known hosts.
    hosts: Hosts,
    /// Leases held from creditors.
    pub held: HeldLeases,
}

impl Debtor {
    pub(super) fn new(blocks_total: u32, host: u64) -> Self {
        let held = HeldLeases::default();
        Self {
            instance: None,
            issued: 0,
            borrows: BTreeMap::new(),
            searches: BTreeMap::new(),
            findings: Findings::default(),
            late: BTreeMap::new(),
            paused: BTreeMap::new(),
            near: BTreeSet::new(),
            hosts: Hosts::new(blocks_total, host),
            held,
        }
    }

    /// Sets whether a creditor's memory is mapped here: among the gManager's candidates, mapped creditors are asked
    /// first.
    pub fn set_near(&mut self, creditor: InstanceId, near: bool) {
        if near {
            self.near.insert(creditor)
        } else {
            self.near.remove(&creditor)
        };
    }

    /// Whether a creditor's memory is mapped here.
    #[must_use]
    pub fn is_near(&self, creditor: InstanceId) -> bool {
        self.near.contains(&creditor)
    }

    /// Sets whether an instance is on this one's host: creditors there are asked first, and blocks for which it has no memory are
    /// divided among creditors on other hosts. `None`: its host is unknown, or its queries cannot be relayed.
    pub fn set_beside(&mut self, instance: InstanceId, beside: Option<bool>) {
        self.hosts.set(instance, beside);
    }

    /// An instance's session is over: the gManager's candidates have its host.
    pub fn forget_beside(&mut self, instance: InstanceId) {
        self.hosts.forget(instance);
    }

    pub(super) fn instance(&self) -> Option<InstanceId> {
        self.instance
    }

    pub(super) fn set_instance(&mut self, instance: InstanceId) {
        self.instance = Some(instance);
    }

    pub(super) fn poll(&mut self) -> Option<Output> {
        self.held.outputs.pop_front()
    }

    fn issue(&mut self) -> u64 {
        self.issued += 1;
        self.issued
    }

    /// Starts to borrow `blocks` (not 0) for a sequence, all or nothing. Exactly one [`Output::Borrowed`] or
    /// [`Output::BorrowFailed`] follows within [`limits::BORROW_DEADLINE_MS`], unless cancelled.
    pub fn borrow(
        &mut self,
        seq: SeqId,
        blocks: u32,
        tier: TierRequest,
        since_ms: Option<u64>,
        now_ms: u64,
    ) -> BorrowId {
        let id = self.start(seq, blocks, LeasePurpose::Growth, tier, now_ms);
        self.borrows.get_mut(&id).expect("just started").since_ms = since_ms;
        self.start_round(id, now_ms);
        id
    }

    /// Reserves up to `blocks` (not 0) for a move of a sequence (`try_move_kvcache`, v2 §6.2), at `target` with its
    /// address, or at the gManager's candidates. Exactly one [`Output::Reserved`] or [`Output::NotReserved`] follows
    /// within [`limits::BORROW_DEADLINE_MS`], unless cancelled. The reservation expires if it is not written for
    /// [`limits::MOVE_RESERVE_MS`]: see [`super::RManager::note_written`].
    pub fn reserve(
        &mut self,
        seq: SeqId,
        target: Option<(InstanceId, String)>,
        blocks: u32,
        purpose: LeasePurpose,
        tier: TierRequest,
        now_ms: u64,
    ) -> BorrowId {
        assert_ne!(purpose, LeasePurpose::Growth, "growth borrows");
        let id = self.start(seq, blocks, purpose, tier, now_ms);
        if let Some((instance, quic_addr)) = target {
            let candidate = Candidate { instance: instance.0, quic_addr, ..Candidate::default() };
            let borrow = self.borrows.get_mut(&id).expect("just started");
            borrow.candidates.push_back(candidate);
            borrow.round = 1;
            self.ask_next(id, now_ms);
        } else {
            self.start_round(id, now_ms);
        }
        id
    }

    /// A new number for a prefill request to another instance; never equal to a lease request's.
    pub fn next_request(&mut self) -> u64 {
        self.issue()
    }

    /// Holds a lease that a prefill worker handed over, like a borrowed one. `confirmed_ms`: when the last message was
    /// sent that the worker answered before it lent. False if the lease is held already, or if `confirmed_ms` is so
    /// long ago that the worker may have freed it.
    pub fn take_over(
        &mut self,
        seq: SeqId,
        lease: &BorrowedLease,
        (ttl_ms, confirmed_ms): (u64, u64),
        now_ms: u64,
    ) -> bool {
        if lease.blocks == 0 || self.held.get(lease.creditor, lease.lease).is_some() {
            return false;
        }
        let held = Held {
            quic_addr: lease.quic_addr.clone(),
            epoch: lease.epoch,
            seq,
            blocks: lease.blocks,
            released: RangeSet::default(),
            ttl_ms: ttl_ms.clamp(limits::LEASE_RENEW_MS * 3, limits::LEASE_TTL_MS_MAX),
            confirmed_ms,
            borrow: None,
            reserved: None,
            places: Vec::new(),
        };
        // The reply took so long, or this instance stood still so long, that the creditor may have freed the lease.
        if now_ms >= held.lost_at_ms() {
            return false;
        }
        self.held.insert(lease.creditor, lease.lease, held, now_ms);
        true
    }

    /// Releases a lease that a prefill worker handed over and that is not wanted any more.
    pub fn decline(&mut self, lease: &BorrowedLease, now_ms: u64) {
        if self.held.get(lease.creditor, lease.lease).is_none() {
            let key = (lease.creditor, lease.lease);
            self.held.start_release(key, lease.quic_addr.clone(), lease.epoch, 0..lease.blocks, now_ms);
        }
    }

    /// Borrows nothing from a creditor that recalled blocks, before `until_ms`.
    pub fn pause(&mut self, creditor: InstanceId, until_ms: u64) {
        self.paused.insert(creditor, until_ms);
    }

    fn start(&mut self, seq: SeqId, blocks: u32, purpose: LeasePurpose, tier: TierRequest, now_ms: u64) -> BorrowId {
        assert!(blocks > 0, "a borrow is of something");
        let id = BorrowId(self.issue());
        let borrow = Borrow {
            seq,
            wanted: blocks,
            since_ms: None,
            deadline_ms: now_ms + limits::BORROW_DEADLINE_MS,
            round: 0,
            state: State::Advice { query: 0, asked_ms: None },
            candidates: VecDeque::new(),
            asked: BTreeSet::new(),
            granted: Vec::new(),
            got: 0,
            purpose,
            tier,
            lendable: None,
        };
        self.borrows.insert(id, borrow);
        id
    }

    /// Cancels a borrow and releases its grants. False if it is complete: then the caller has the leases and releases
    /// them.
    pub fn cancel(&mut self, id: BorrowId, now_ms: u64) -> bool {
        if let Some(borrow) = self.borrows.remove(&id) {
            self.abandon(borrow, now_ms);
            return true;
        }
        if self.searches.contains_key(&id) {
            self.cancel_search(id, now_ms);
            return true;
        }
        let queued = self.held.outputs.iter().position(|o| match o {
            Output::Borrowed { borrow, .. }
            | Output::BorrowFailed { borrow, .. }
            | Output::PrefixFound { borrow, .. }
            | Output::Reserved { borrow, .. }
            | Output::NotReserved { borrow, .. } => *borrow == id,
            _ => false,
        });
        let Some(output) = queued.and_then(|at| self.held.outputs.remove(at)) else { return false };
        let leases = match output {
            Output::Borrowed { leases, .. } => leases,
            Output::Reserved { lease, .. } => vec![lease],
            Output::PrefixFound { parts, .. } => parts.into_iter().filter_map(CachedPart::into_lease).collect(),
            _ => Vec::new(),
        };
        for lease in leases {
            self.held.release_range(lease.creditor, lease.lease, 0..lease.blocks, now_ms);
        }
        true
    }

    /// Releases a borrow's grants, and those still to come.
    fn abandon(&mut self, borrow: Borrow, now_ms: u64) {
        for (creditor, lease) in borrow.granted {
            self.held.release_range(creditor, lease, 0..u32::MAX, now_ms);
        }
        if let State::Asking { request, candidate, .. } = borrow.state {
            self.expect_late(request, &candidate, now_ms);
        }
    }

    fn expect_late(&mut self, request: u64, candidate: &Candidate, now_ms: u64) {
        let (instance, quic_addr) = (InstanceId(candidate.instance), candidate.quic_addr.clone());
        self.late.insert(request, Late { instance, quic_addr, forget_ms: now_ms + limits::LEASE_TTL_MS });
    }

    fn fail(&mut self, id: BorrowId, reason: BorrowFailure, now_ms: u64) {
        let borrow = self.borrows.remove(&id).expect("a borrow fails once");
        let (seq, purpose, blocks_lendable) = (borrow.seq, borrow.purpose, borrow.lendable);
        self.abandon(borrow, now_ms);
        self.held.outputs.push_back(match purpose {
            LeasePurpose::Growth => Output::BorrowFailed { borrow: id, seq, reason },
            LeasePurpose::Move | LeasePurpose::Swap => Output::NotReserved { borrow: id, seq, blocks_lendable },
            LeasePurpose::Handover | LeasePurpose::Joint => panic!("a given lease is not borrowed"),
        });
    }

    /// Asks the gManager for candidates.
    fn start_round(&mut self, id: BorrowId, now_ms: u64) {
        let query = self.issue();
        let borrow = self.borrows.get_mut(&id).expect("the borrow goes on");
        borrow.round += 1;
        let rounds_max = if borrow.purpose == LeasePurpose::Growth { limits::BORROW_ROUNDS_MAX } else { 1 };
        if borrow.round > rounds_max {
            return self.fail(id, BorrowFailure::Refused, now_ms);
        }
        borrow.state = State::Advice { query, asked_ms: None };
        self.query(id, now_ms);
    }

    /// Sends, or repeats, the query of a borrow that waits for advice.
    fn query(&mut self, id: BorrowId, now_ms: u64) {
        let Some(debtor) = self.instance else { return };
        let borrow = self.borrows.get_mut(&id).expect("the borrow goes on");
        let State::Advice { query, asked_ms } = &mut borrow.state else { panic!("{id:?} waits for no advice") };
        *asked_ms = Some(now_ms);
        let known = borrow.candidates.iter().map(|c| c.instance);
        let exclude: BTreeSet<u32> = borrow.asked.iter().chain(self.paused.keys()).map(|i| i.0).chain(known).collect();
        let exclude = exclude.into_iter().collect();
        let message = BorrowQuery {
            query: *query,
            debtor: debtor.0,
            // Those of further candidates for stripes are not booked.
            blocks: if borrow.candidates.is_empty() { borrow.left() } else { 0 },
            exclude,
            tier: borrow.tier.into(),
            prefix: Vec::new(),
        };
        self.held.outputs.push_back(Output::ToGManager(ControlBody::BorrowQuery(message)));
    }

    /// Handles the gManager's recommendation.
    pub fn on_advice(&mut self, advice: &BorrowAdvice, now_ms: u64) {
        self.on_cached_runs(advice, now_ms);
        self.on_members(advice);
        let waits = |b: &Borrow| matches!(b.state, State::Advice { query, .. } if query == advice.query);
        let Some((&id, borrow)) = self.borrows.iter_mut().find(|(_, b)| waits(b)) else { return };
        if u64::from(borrow.wanted) > advice.pool_blocks_total {
            let pool_blocks_total = advice.pool_blocks_total;
            return self.fail(id, BorrowFailure::PoolTooSmall { pool_blocks_total }, now_ms);
        }
        let usable = |c: &&Candidate| {
            let instance = InstanceId(c.instance);
            let asked = borrow.asked.contains(&instance) || self.paused.contains_key(&instance);
            c.instance != 0 && Some(instance) != self.instance && !asked
        };
        let known = borrow.candidates.len();
        let mut named: BTreeSet<u32> = borrow.candidates.iter().map(|c| c.instance).collect();
        let candidates = advice.candidates.iter().filter(usable).filter(|c| named.insert(c.instance));
        borrow.candidates.extend(candidates.take(limits::CANDIDATES).cloned());
        if borrow.candidates.is_empty() {
            let reason = if borrow.asked.is_empty() { BorrowFailure::NoCreditors } else { BorrowFailure::Refused };
            return self.fail(id, reason, now_ms);
        }
        // More than the whole pool lends: partial grants would only keep blocks from others. Growth by a block or two
        // tries nevertheless, as the advice may be older than freed blocks.
        let growth = borrow.purpose == LeasePurpose::Growth && borrow.left() > limits::GROWTH_BLOCKS;
        if growth && u64::from(borrow.left()) > advice.pool_blocks_lendable {
            return self.fail(id, BorrowFailure::Refused, now_ms);
        }
        if borrow.candidates.len() > known && self.hosts.wants_more(borrow) {
            self.issued += 1;
            borrow.state = State::Advice { query: self.issued, asked_ms: None };
            return self.query(id, now_ms);
        }
        self.hosts.order(&self.near, borrow.candidates.make_contiguous());
        self.ask_next(id, now_ms);
    }

    /// Asks the next candidate, or the gManager for more of them.
    fn ask_next(&mut self, id: BorrowId, now_ms: u64) {
        let request = self.issue();
        let borrow = self.borrows.get_mut(&id).expect("the borrow goes on");
        let Some(candidate) = borrow.candidates.pop_front() else { return self.start_round(id, now_ms) };
        let instance = InstanceId(candidate.instance);
        let quic_addr = candidate.quic_addr.clone();
        borrow.asked.insert(instance);
        let blocks = self.hosts.part(&candidate, borrow);
        // With smaller grants the sequence would need more than [`limits::CREDITORS_MAX`] creditors.
        let blocks_min = match borrow.purpose {
            LeasePurpose::Growth => {
                borrow.left().div_ceil(u32::try_from(limits::CREDITORS_MAX).expect("a small constant"))
            }
            LeasePurpose::Move | LeasePurpose::Swap | LeasePurpose::Handover | LeasePurpose::Joint => 1,
        };
        borrow.state = State::Asking { request, candidate, sent_ms: now_ms, blocks };
        let body = ControlBody::LeaseRequest(LeaseRequest {
            request,
            seq: borrow.seq.0,
            blocks,
            blocks_min,
            purpose: borrow.purpose.into(),
            waited_ms: borrow.since_ms.map(|since| u32::try_from(now_ms - since).unwrap_or(u32::MAX)),
            hashes: Vec::new(),
        });
        self.held.outputs.push_back(Output::ToPeer { instance, quic_addr, body });
    }

    /// The borrow that waits for `from`'s answer to `request`.
    fn waiting(&self, from: InstanceId, request: u64) -> Option<BorrowId> {
        let waits = |b: &Borrow| match &b.state {
            State::Asking { request: r, candidate, .. } => *r == request && candidate.instance == from.0,
            State::Advice { .. } => false,
        };
        self.borrows.iter().find(|(_, b)| waits(b)).map(|(id, _)| *id)
    }

    pub(super) fn on_grant(&mut self, from: InstanceId, grant: &LeaseGrant, now_ms: u64) {
        let (lease, epoch) = (LeaseId(grant.lease), Epoch(grant.epoch));
        if let Some(id) = self.searching(from, grant.request) {
            return self.on_cached_grant(id, from, grant, now_ms);
        }
        let Some(id) = self.waiting(from, grant.request) else {
            if self.late.get(&grant.request).is_some_and(|l| l.instance == from) {
                let late = self.late.remove(&grant.request).expect("just found");
                self.held.start_release((from, lease), late.quic_addr, epoch, 0..grant.blocks, now_ms);
            }
            return;
        };
        let borrow = self.borrows.get_mut(&id).expect("just found");
        let State::Asking { candidate, sent_ms, blocks, .. } = &borrow.state else { panic!("{id:?} asks nobody") };
        let (quic_addr, confirmed_ms) = (candidate.quic_addr.clone(), *sent_ms);
        let sensible = (1..=*blocks).contains(&grant.blocks) && grant.ttl_ms >= limits::LEASE_RENEW_MS * 3;
        if !sensible || self.held.get(from, lease).is_some() {
            self.held.start_release((from, lease), quic_addr, epoch, 0..grant.blocks, now_ms);
            return self.ask_next(id, now_ms);
        }
        if grant.blocks == *blocks {
            // It may have more than a stripe, and the others less.
            borrow.asked.remove(&from);
        }
        borrow.got += grant.blocks;
        borrow.granted.push((from, lease));
        let held = Held {
            quic_addr,
            epoch,
            seq: borrow.seq,
            blocks: grant.blocks,
            released: RangeSet::default(),
            ttl_ms: grant.ttl_ms.min(limits::LEASE_TTL_MS_MAX),
            confirmed_ms,
            borrow: Some(id),
            reserved: (borrow.purpose != LeasePurpose::Growth)
                .then(|| Reserved { sealed: RangeSet::default(), written_ms: confirmed_ms }),
            places: Vec::new(),
        };
        let complete = borrow.got == borrow.wanted || borrow.purpose != LeasePurpose::Growth;
        self.held.insert(from, lease, held, now_ms);
        if complete { self.complete(id) } else { self.ask_next(id, now_ms) }
    }

    fn complete(&mut self, id: BorrowId) {
        let borrow = self.borrows.remove(&id).expect("a borrow is completed once");
        self.held.hand_out(&borrow.granted);
        let leases = borrow.granted.iter().map(|&(creditor, lease)| {
            let held = self.held.get(creditor, lease).expect("a borrow's leases are held");
            let (quic_addr, epoch, blocks) = (held.quic_addr.clone(), held.epoch, held.blocks);
            BorrowedLease { creditor, quic_addr, lease, epoch, blocks }
        });
        let mut leases: Vec<BorrowedLease> = leases.collect();
        let seq = borrow.seq;
        self.held.outputs.push_back(match (borrow.purpose, leases.pop()) {
            (LeasePurpose::Move | LeasePurpose::Swap, Some(lease)) => Output::Reserved { borrow: id, seq, lease },
            (_, last) => Output::Borrowed { borrow: id, seq, leases: leases.into_iter().chain(last).collect() },
        });
    }

    pub(super) fn on_refuse(&mut self, from: InstanceId, refuse: &LeaseRefuse, now_ms: u64) {
        if let Some(id) = self.searching(from, refuse.request) {
            return self.not_cached(id, from, now_ms);
        }
        match self.waiting(from, refuse.request) {
            Some(id) => self.refused(id, from, refuse.blocks_lendable, now_ms),
            None => {
                if self.late.get(&refuse.request).is_some_and(|l| l.instance == from) {
                    self.late.remove(&refuse.request);
                }
            }
        }
    }

    /// Reports a refusal to the gManager and asks the next candidate.
    fn refused(&mut self, id: BorrowId, creditor: InstanceId, blocks_lendable: u32, now_ms: u64) {
        let borrow = self.borrows.get_mut(&id).expect("the borrow goes on");
        borrow.lendable = Some(blocks_lendable);
        // A creditor that has enough blocks keeps them for an older request: no refusal to report.
        if matches!(borrow.state, State::Asking { blocks, .. } if blocks_lendable < blocks) {
            let refusal = Refusal { creditor: creditor.0, blocks_lendable };
            self.held.outputs.push_back(Output::ToGManager(ControlBody::Refusal(refusal)));
        }
        self.ask_next(id, now_ms);
    }

    /// Goes on after a candidate that does not answer in time, as after a refusal; its grant may still come.
    fn unanswered(&mut self, id: BorrowId, now_ms: u64) {
        let State::Asking { request, candidate, .. } = &self.borrows[&id].state else { panic!("{id:?} asks nobody") };
        let (request, candidate) = (*request, candidate.clone());
        self.expect_late(request, &candidate, now_ms);
        self.refused(id, InstanceId(candidate.instance), 0, now_ms);
    }

    pub(super) fn on_renewed(&mut self, from: InstanceId, renewed: &LeaseRenewed) {
        for lease in self.held.on_renewed(from, renewed) {
            self.lose(from, lease);
        }
    }

    /// Removes a lost lease: its borrow looks for other blocks, or its sequence loses KV.
    fn lose(&mut self, creditor: InstanceId, lease: LeaseId) -> Option<Held> {
        let held = self.held.remove(creditor, lease)?;
        if held.borrow.is_some_and(|id| self.searches.contains_key(&id)) {
            self.lose_cached(creditor, lease);
            return Some(held);
        }
        match held.borrow.and_then(|id| self.borrows.get_mut(&id)) {
            Some(borrow) => {
                borrow.got -= held.blocks - held.released.len();
                borrow.granted.retain(|key| *key != (creditor, lease));
            }
            None => self.held.outputs.push_back(Output::LeaseLost { seq: held.seq, creditor, lease }),
        }
        Some(held)
    }

    /// Handles a creditor's revocation of entries of a lease (all, if `entries` is 0).
    pub(super) fn on_revoked(&mut self, from: InstanceId, m: &LeaseRevoked, now_ms: u64) {
        let lease = LeaseId(m.lease);
        let unfinished = self.held.get(from, lease).is_some_and(|h| h.borrow.is_some());
        if m.entries == 0 || unfinished {
            // A borrow needs whole leases: the rest of this one is released.
            if let Some(held) = self.lose(from, lease).filter(|_| m.entries > 0) {
                self.held.start_release((from, lease), held.quic_addr, held.epoch, 0..held.blocks, now_ms);
            }
            return;
        }
        let entries = m.first..m.entries;
        if let Some((seq, _)) = self.held.on_revoked(from, lease, entries.clone()) {
            self.held.outputs.push_back(Output::EntriesLost { seq, creditor: from, lease, entries });
        }
    }

    fn asking(&self, wanted: impl Fn(&Candidate, u64) -> bool) -> Vec<BorrowId> {
        let asks = |b: &Borrow| match &b.state {
            State::Asking { candidate, sent_ms, .. } => wanted(candidate, *sent_ms),
            State::Advice { .. } => false,
        };
        self.borrows.iter().filter(|(_, b)| asks(b)).map(|(id, _)| *id).collect()
    }

    /// Handles a lost connection. Leases outlive it; requests to the peer do not.
    pub fn on_peer_down(&mut self, peer: InstanceId, now_ms: u64) {
        self.held.on_peer_down(peer);
        self.search_without(peer, now_ms);
        for id in self.asking(|candidate, _| candidate.instance == peer.0) {
            self.unanswered(id, now_ms);
        }
    }

    pub(super) fn on_peer_restarted(&mut self, peer: InstanceId, now_ms: u64) {
        for lease in self.held.on_peer_restarted(peer) {
            self.lose(peer, lease);
        }
        self.search_without(peer, now_ms);
        for id in self.asking(|candidate, _| candidate.instance == peer.0) {
            self.unanswered(id, now_ms);
        }
    }

    /// Drops all leases and requests after a fence: creditors have freed the leases or will. Queries wait for a new id.
    pub(super) fn forget_all(&mut self, now_ms: u64) {
        self.instance = None;
        let borrows: Vec<BorrowId> = self.borrows.keys().copied().collect();
        for id in borrows {
            self.fail(id, BorrowFailure::Deadline, now_ms);
        }
        for (creditor, lease) in self.held.forget_all() {
            self.lose(creditor, lease);
        }
        self.end_searches(|_| true, now_ms);
        self.late.clear();
    }

    pub(super) fn tick(&mut self, now_ms: u64) {
        for (creditor, lease) in self.held.overdue(now_ms) {
            if let Some(held) = self.lose(creditor, lease) {
                self.held.start_release((creditor, lease), held.quic_addr, held.epoch, 0..held.blocks, now_ms);
            }
        }
        let over: Vec<_> = self.borrows.iter().filter(|(_, b)| now_ms >= b.deadline_ms).map(|(id, _)| *id).collect();
        for id in over {
            self.fail(id, BorrowFailure::Deadline, now_ms);
        }
        for id in self.asking(|_, sent_ms| now_ms >= sent_ms + limits::LEASE_ANSWER_MS) {
            self.unanswered(id, now_ms);
        }
        let repeat = |b: &Borrow| match b.state {
            State::Advice { asked_ms, .. } => asked_ms.is_none_or(|t| now_ms >= t + limits::CONTROL_REPEAT_MS),
            State::Asking { .. } => false,
        };
        let unacknowledged: Vec<_> = self.borrows.iter().filter(|(_, b)| repeat(b)).map(|(id, _)| *id).collect();
        for id in unacknowledged {
            self.query(id, now_ms);
        }
        self.tick_searches(now_ms);
        self.tick_members(now_ms);
        self.late.retain(|_, late| now_ms < late.forget_ms);
        self.paused.retain(|_, until_ms| now_ms < *until_ms);
        self.held.tick(now_ms);
    }

    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        let of = |b: &Borrow| match b.state {
            State::Asking { sent_ms, .. } => b.deadline_ms.min(sent_ms + limits::LEASE_ANSWER_MS),
            State::Advice { asked_ms, .. } => {
                asked_ms.map_or(b.deadline_ms, |t| b.deadline_ms.min(t + limits::CONTROL_REPEAT_MS))
            }
        };
        let late = self.late.values().map(|late| late.forget_ms);
        let paused = self
            .paused
            .values()
            .copied()
            .chain(self.searches.values().map(Search::next_wake_ms))
            .chain(self.findings.next_wake_ms());
        self.borrows.values().map(of).chain(self.held.next_wake_ms()).chain(late).chain(paused).min()
    }

    /// Number of borrows in negotiation.
    pub fn borrowing(&self) -> usize {
        self.borrows.len() + self.searches.len()
    }
}
