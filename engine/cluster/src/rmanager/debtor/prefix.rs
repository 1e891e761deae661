//! Searches of a prompt's cached blocks in the pool, and leases of them where they lie.
//!
//! A search asks the gManager who may cache runs of the prompt, then leases run after run, in order: each lease is as long as
//! its creditor has blocks with the prompt's block hashes. Runs that this instance caches itself lie in between, and blocks
//! that nobody has (their creditor died) are left out. A search ends when nobody is left to ask, or after
//! [`limits::PREFIX_SEARCH_MS`], with whatever it has.
//!
//! Invariants:
//! * every search ends in exactly one [`Output::PrefixFound`] (or its cancellation) before its deadline;
//! * its parts follow each other from the prompt's first block on, and the last one is no missing one;
//! * every request is answered with blocks, or shortens the runs that the gManager named: a search asks a bounded number.

use super::super::held::Held;
use super::super::output::{BorrowId, BorrowedLease, CachedPart, Output};
use super::Debtor;
use lagoon_kv::{BlockHash, RangeSet};
use lagoon_protocol::{
    BorrowAdvice, BorrowQuery, CachedRun, Candidate, ControlBody, LeaseGrant, LeasePurpose, LeaseRequest, TierRequest,
};
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId, limits};
use std::ops::Range;

#[derive(Debug)]
enum State {
    /// Waits for the gManager's advice. The query is not repeated: one that is lost costs its search.
    Advice { query: u64 },
    /// Waits for a creditor's reply about the first `blocks` blocks that are not found yet.
    Asking { request: u64, candidate: Candidate, sent_ms: u64, blocks: u32 },
}

/// The search of a prompt's cached blocks.
#[derive(Debug)]
pub(super) struct Search {
    seq: SeqId,
    since_ms: u64,
    deadline_ms: u64,
    hashes: Vec<BlockHash>,
    /// Blocks that this instance caches: ascending, disjoint.
    here: Vec<Range<u32>>,
    /// The next block to ask for.
    next: u32,
    /// Number of blocks in `parts`.
    covered: u32,
    parts: Vec<CachedPart>,
    runs: Vec<CachedRun>,
    state: State,
}

impl Search {
    fn blocks(&self) -> u32 {
        u32::try_from(self.hashes.len()).expect("at most a sequence's blocks")
    }

    pub(super) fn next_wake_ms(&self) -> u64 {
        self.deadline_ms
    }

    fn asks(&self, creditor: InstanceId) -> bool {
        matches!(&self.state, State::Asking { candidate, .. } if candidate.instance == creditor.0)
    }

    /// Whether its time is up, or one of its leases was lost.
    fn is_over(&self, now_ms: u64) -> bool {
        now_ms >= self.deadline_ms
    }

    /// Appends a part of `blocks` blocks, from the next one on.
    fn push(&mut self, part: CachedPart, blocks: u32) {
        if self.next > self.covered {
            self.parts.push(CachedPart::Missing { blocks: self.next - self.covered });
        }
        self.parts.push(part);
        self.next += blocks;
        self.covered = self.next;
    }

    /// The creditor to ask for the next blocks, and their number: the one whose run reaches farthest. Takes the runs of this
    /// instance on the way, and goes on behind blocks that nobody has.
    fn advance(&mut self) -> Option<(Candidate, u32)> {
        let leases = self.parts.iter().filter(|part| matches!(part, CachedPart::Leased(_))).count();
        while self.next < self.blocks() {
            let next = self.next;
            if let Some(run) = self.here.iter().find(|run| run.contains(&next)) {
                let blocks = run.end - next;
                self.push(CachedPart::Here { blocks }, blocks);
                continue;
            }
            let runs = self.runs.iter().filter(|_| leases < limits::CACHED_LEASES_MAX);
            let here_next = self.here.iter().map(|run| run.start).find(|start| *start > next);
            if let Some(run) = runs.clone().filter(|run| may_have(run, next)).max_by_key(|run| end(run)) {
                let blocks = here_next.unwrap_or(self.blocks()) - next;
                let most = u32::try_from(limits::LEASE_HASHES_MAX).expect("a small constant");
                let (instance, quic_addr) = (run.instance, run.quic_addr.clone());
                return Some((
                    Candidate { instance, quic_addr, blocks_lendable: run.blocks, host: 0 },
                    blocks.min(most),
                ));
            }
            let starts = runs.map(|run| run.first.saturating_sub(run.before)).filter(|start| *start > next);
            self.next = starts.chain(here_next).min()?;
        }
        None
    }

    /// A creditor does not have the next block.
    fn note_missing(&mut self, creditor: InstanceId) {
        let next = self.next;
        self.runs.retain_mut(|run| {
            let meets = run.instance == creditor.0 && may_have(run, next);
            if meets && next < run.first {
                run.before = 0;
            }
            !meets || next < run.first
        });
    }
}

fn end(run: &CachedRun) -> u32 {
    run.first.saturating_add(run.blocks)
}

fn may_have(run: &CachedRun, block: u32) -> bool {
    run.first.saturating_sub(run.before) <= block && block < end(run)
}

impl Debtor {
    /// Starts the search of the cached blocks of a waiting sequence's prompt; `here`: those that this instance caches itself,
    /// ascending. Exactly one [`Output::PrefixFound`] follows within [`limits::PREFIX_SEARCH_MS`], unless cancelled.
    pub fn search_prefix(
        &mut self,
        seq: SeqId,
        hashes: Vec<BlockHash>,
        here: Vec<Range<u32>>,
        since_ms: u64,
        now_ms: u64,
    ) -> BorrowId {
        let (id, query) = (BorrowId(self.issue()), self.issue());
        let search = Search {
            seq,
            since_ms,
            deadline_ms: now_ms + limits::PREFIX_SEARCH_MS,
            hashes,
            here,
            next: 0,
            covered: 0,
            parts: Vec::new(),
            runs: Vec::new(),
            state: State::Advice { query },
        };
        self.query_runs(&search, query);
        self.searches.insert(id, search);
        id
    }

    fn query_runs(&mut self, search: &Search, query: u64) {
        let Some(debtor) = self.instance else { return };
        let asked = search.hashes.iter().take(limits::SEARCH_HASHES_MAX);
        let message = BorrowQuery {
            query,
            debtor: debtor.0,
            blocks: 0,
            exclude: self.paused.keys().map(|paused| paused.0).collect(),
            tier: TierRequest::Any.into(),
            prefix: asked.flat_map(|hash| hash.fingerprint().to_le_bytes()).collect(),
        };
        self.held.outputs.push_back(Output::ToGManager(ControlBody::BorrowQuery(message)));
    }

    /// The gManager's reply to a search.
    pub(super) fn on_cached_runs(&mut self, advice: &BorrowAdvice, now_ms: u64) {
        let waits = |s: &Search| matches!(s.state, State::Advice { query } if query == advice.query);
        let Some((&id, search)) = self.searches.iter_mut().find(|(_, s)| waits(s)) else { return };
        let (me, paused) = (self.instance, &self.paused);
        let usable = |run: &&CachedRun| {
            let of = InstanceId(run.instance);
            run.instance != 0 && Some(of) != me && !paused.contains_key(&of)
        };
        search.runs = advice.cached.iter().take(limits::CACHED_RUNS_MAX).filter(usable).cloned().collect();
        self.search_on(id, now_ms);
    }

    /// Leases the next run of a search, or ends it.
    fn search_on(&mut self, id: BorrowId, now_ms: u64) {
        let request = self.issue();
        let Some(search) = self.searches.get_mut(&id) else { return };
        if search.is_over(now_ms) {
            return self.end_search(id, now_ms);
        }
        let Some((candidate, blocks)) = search.advance() else { return self.end_search(id, now_ms) };
        let (instance, quic_addr) = (InstanceId(candidate.instance), candidate.quic_addr.clone());
        let hashes = &search.hashes[search.next as usize..(search.next + blocks) as usize];
        let body = ControlBody::LeaseRequest(LeaseRequest {
            request,
            seq: search.seq.0,
            blocks,
            blocks_min: 1,
            purpose: LeasePurpose::Growth.into(),
            waited_ms: Some(u32::try_from(now_ms.saturating_sub(search.since_ms)).unwrap_or(u32::MAX)),
            hashes: BlockHash::write(hashes),
        });
        search.state = State::Asking { request, candidate, sent_ms: now_ms, blocks };
        self.held.outputs.push_back(Output::ToPeer { instance, quic_addr, body });
    }

    /// The search that waits for `from`'s answer to `request`.
    pub(super) fn searching(&self, from: InstanceId, request: u64) -> Option<BorrowId> {
        let waits = |s: &Search| match &s.state {
            State::Asking { request: r, candidate, .. } => *r == request && candidate.instance == from.0,
            State::Advice { .. } => false,
        };
        self.searches.iter().find(|(_, s)| waits(s)).map(|(id, _)| *id)
    }

    /// A creditor leases cached blocks to a search.
    pub(super) fn on_cached_grant(&mut self, id: BorrowId, from: InstanceId, grant: &LeaseGrant, now_ms: u64) {
        let (lease, epoch) = (LeaseId(grant.lease), Epoch(grant.epoch));
        let Some(search) = self.searches.get_mut(&id) else { return };
        let State::Asking { candidate, sent_ms, blocks, .. } = &search.state else { return };
        let (quic_addr, confirmed_ms, asked) = (candidate.quic_addr.clone(), *sent_ms, *blocks);
        let sensible = (1..=asked).contains(&grant.blocks) && grant.ttl_ms >= limits::LEASE_RENEW_MS * 3;
        // One that knows no cached blocks has granted blocks to write.
        let cached = grant.cached == grant.blocks && !search.is_over(now_ms);
        if !sensible || !cached || self.held.get(from, lease).is_some() {
            self.held.start_release((from, lease), quic_addr, epoch, 0..grant.blocks, now_ms);
            return self.not_cached(id, from, now_ms);
        }
        let part = BorrowedLease { creditor: from, quic_addr: quic_addr.clone(), lease, epoch, blocks: grant.blocks };
        search.push(CachedPart::Leased(part), grant.blocks);
        if grant.blocks < asked {
            search.note_missing(from);
        }
        let held = Held {
            quic_addr,
            epoch,
            seq: search.seq,
            blocks: grant.blocks,
            released: RangeSet::default(),
            ttl_ms: grant.ttl_ms.min(limits::LEASE_TTL_MS_MAX),
            confirmed_ms,
            borrow: Some(id),
            reserved: None,
            places: Vec::new(),
        };
        self.held.insert(from, lease, held, now_ms);
        self.search_on(id, now_ms);
    }

    /// A creditor has none of the next blocks of a search.
    pub(super) fn not_cached(&mut self, id: BorrowId, creditor: InstanceId, now_ms: u64) {
        if let Some(search) = self.searches.get_mut(&id) {
            search.note_missing(creditor);
        }
        self.search_on(id, now_ms);
    }

    /// Searches do not wait for an instance that was lost.
    pub(super) fn search_without(&mut self, creditor: InstanceId, now_ms: u64) {
        let asking: Vec<BorrowId> = self.searches.iter().filter(|(_, s)| s.asks(creditor)).map(|(id, _)| *id).collect();
        for id in asking {
            self.expect_late_cached(id, now_ms);
            if let Some(search) = self.searches.get_mut(&id) {
                search.runs.retain(|run| run.instance != creditor.0);
            }
            self.search_on(id, now_ms);
        }
    }

    /// A late grant to a search is released.
    fn expect_late_cached(&mut self, id: BorrowId, now_ms: u64) {
        let Some(State::Asking { request, candidate, .. }) = self.searches.get(&id).map(|s| &s.state) else { return };
        let (request, candidate) = (*request, candidate.clone());
        self.expect_late(request, &candidate, now_ms);
    }

    /// Removes a lost lease from the parts of its search, and what is behind it.
    pub(super) fn lose_cached(&mut self, creditor: InstanceId, lease: LeaseId) {
        let is_lost = |part: &CachedPart| match part {
            CachedPart::Leased(of) => (of.creditor, of.lease) == (creditor, lease),
            CachedPart::Here { .. } | CachedPart::Missing { .. } => false,
        };
        for search in self.searches.values_mut() {
            if let Some(at) = search.parts.iter().position(is_lost) {
                // Leases behind it are released when the search ends, now: they are held and in no part.
                search.parts.truncate(at);
                search.parts.pop_if(|last| matches!(last, CachedPart::Missing { .. }));
                search.deadline_ms = 0;
            }
        }
    }

    /// Ends a search with the parts that it has.
    fn end_search(&mut self, id: BorrowId, now_ms: u64) {
        self.expect_late_cached(id, now_ms);
        let Some(search) = self.searches.remove(&id) else { return };
        let leases = search.parts.iter().filter_map(|part| part.clone().into_lease());
        let kept: Vec<(InstanceId, LeaseId)> = leases.map(|lease| (lease.creditor, lease.lease)).collect();
        self.held.release_borrowed(id, &kept, now_ms);
        self.held.hand_out(&kept);
        self.held.outputs.push_back(Output::PrefixFound { borrow: id, seq: search.seq, parts: search.parts });
    }

    /// Cancels a search and releases its leases.
    pub(super) fn cancel_search(&mut self, id: BorrowId, now_ms: u64) {
        self.expect_late_cached(id, now_ms);
        self.searches.remove(&id);
        self.held.release_borrowed(id, &[], now_ms);
    }

    pub(super) fn end_searches(&mut self, over: impl Fn(&Search) -> bool, now_ms: u64) {
        let over: Vec<BorrowId> = self.searches.iter().filter(|(_, s)| over(s)).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| self.end_search(id, now_ms));
    }

    pub(super) fn tick_searches(&mut self, now_ms: u64) {
        self.end_searches(|search| search.is_over(now_ms), now_ms);
    }
}
