//! Borrow advice: recommends creditors by locality, then availability (Infinite-LLM v1 §4.4), from a view that many threads
//! read concurrently.
//!
//! * **Locality**: cost of placing an rBlock between debtor and creditor, by round trip and bandwidth as either end measured
//!   them; an unmeasured link has the class `CLASS_UNMEASURED`.
//! * **Availability**: the creditor's reported lendable blocks, less those booked for other debtors since. This spreads
//!   competing debtors evenly before any of them has borrowed.
//! * **Exclusivity**: a creditor that borrows itself comes last. One that is draining, frozen, fenced, silent or has
//!   refused is not recommended.

use super::GManager;
use lagoon_protocol::{BorrowAdvice, BorrowQuery, Candidate, Refusal, TierRequest};
use lagoon_types::{InstanceId, limits};
use lagoon_view::{Answer, Ask, Flags, Location, Slot, SortedView, Tier, ViewWriter};

const _: () = assert!(lagoon_view::CANDIDATES == limits::CANDIDATES);

/// Pools up to this size are sorted at every query after a change.
const SMALL: usize = 256;

/// The view of creditors, and the time of its last sort.
#[derive(Debug)]
pub(super) struct Sorted {
    pub(super) writer: ViewWriter,
    /// Whether it changed since then.
    dirty: bool,
    published_ms: u64,
    /// Lend limits of all live members, and the blocks that they would lend now.
    caps: u64,
    lendable: u64,
}

impl Sorted {
    pub(super) fn new(instances_max: usize) -> Self {
        Self { writer: ViewWriter::new(instances_max), dirty: false, published_ms: 0, caps: 0, lendable: 0 }
    }

    pub(super) fn view(&self) -> SortedView {
        self.writer.view()
    }

    pub(super) fn caps(&self) -> u64 {
        self.caps
    }

    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        self.dirty.then_some(self.published_ms + limits::VIEW_MS)
    }

    pub(super) fn add(&mut self, instance: u32, kept: u32, location: Location) -> Option<Slot> {
        self.dirty = true;
        self.writer.add(instance, Flags::BARRED, kept, location)
    }

    pub(super) fn remove(&mut self, slot: Slot, instance: u32, counted: (u32, u32)) {
        self.writer.remove(slot, instance);
        self.count(counted, (0, 0));
        self.dirty = true;
    }

    pub(super) fn set_lendable(&mut self, slot: Slot, blocks: u32) {
        self.writer.set_lendable(slot, blocks);
        self.dirty = true;
    }

    pub(super) fn settle(&mut self, slot: Slot, flags: Flags, old: (u32, u32), new: (u32, u32)) {
        if self.writer.flags(slot) != flags {
            self.writer.set_flags(slot, flags);
            self.dirty = true;
        }
        self.count(old, new);
    }

    fn count(&mut self, old: (u32, u32), new: (u32, u32)) {
        if old != new {
            self.caps = self.caps - u64::from(old.0) + u64::from(new.0);
            self.lendable = self.lendable - u64::from(old.1) + u64::from(new.1);
            self.writer.set_totals(self.caps, self.lendable);
        }
    }

    fn publish(&mut self, now_ms: u64) {
        self.writer.publish();
        (self.dirty, self.published_ms) = (false, now_ms);
    }
}

fn ask(query: &BorrowQuery) -> Ask<'_> {
    let tier = match TierRequest::try_from(query.tier).unwrap_or(TierRequest::Any) {
        TierRequest::Any => Tier::Any,
        TierRequest::DeviceOnly => Tier::Device,
        TierRequest::HostOnly => Tier::Host,
    };
    let exclude = &query.exclude[..query.exclude.len().min(limits::EXCLUDE_MAX)];
    Ask { debtor: query.debtor, blocks: query.blocks, exclude, tier }
}

fn advice(query: &BorrowQuery, answer: Answer) -> BorrowAdvice {
    let candidate = |f: &lagoon_view::Found| Candidate {
        instance: f.instance,
        quic_addr: f.location.addr.to_string(),
        blocks_lendable: f.lendable,
        host: f.location.host,
    };
    BorrowAdvice {
        query: query.query,
        candidates: answer.found.iter().map(candidate).collect(),
        pool_blocks_total: answer.blocks_total,
        pool_blocks_lendable: answer.blocks_lendable,
        cached: Vec::new(),
    }
}

/// Answers a debtor's borrow query from any thread, without a lock and without the gManager. `conn` is the query's
/// connection, as set with [`GManager::set_conn`]. `None` if the view does not list the debtor with it: pass the message to
/// [`GManager::on_control`], as one about a prompt's cached blocks.
#[must_use]
pub fn serve_query(view: &SortedView, conn: u64, query: &BorrowQuery) -> Option<BorrowAdvice> {
    if !query.prefix.is_empty() {
        return None;
    }
    view.ask_from(conn, &ask(query)).map(|answer| advice(query, answer))
}

impl GManager {
    /// Answers a debtor's borrow query: at most `CANDIDATES` creditors, best first.
    pub fn on_borrow_query(&mut self, query: &BorrowQuery, now_ms: u64) -> BorrowAdvice {
        self.on_time(now_ms);
        self.notice_silence();
        self.refresh_view();
        let advice = advice(query, self.sorted.view().ask(&ask(query)));
        if query.prefix.is_empty() { advice } else { self.cached_runs(query, advice) }
    }

    /// Handles a creditor's refusal: its lendable blocks are corrected, and it is not recommended until its next heartbeat.
    pub fn on_refusal(&mut self, m: &Refusal) {
        self.correct(InstanceId(m.creditor), m.blocks_lendable);
    }

    /// Limits an instance's lendable blocks and pauses it until its next heartbeat.
    pub(super) fn correct(&mut self, id: InstanceId, blocks_lendable: u32) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.lendable = member.lendable.min(blocks_lendable);
        member.paused = true;
        self.sorted.writer.cap_lendable(member.slot, blocks_lendable);
        if let Some(view) = self.pool.instances.get_mut(&id) {
            view.blocks_lendable = view.blocks_lendable.min(blocks_lendable);
            view.paused = true;
        }
        self.settle(id);
    }

    /// Sorts the view now, due or not; for benchmarks.
    pub fn publish_now(&mut self, now_ms: u64) {
        self.on_time(now_ms);
        self.sorted.publish(self.now_ms);
    }

    /// Memory of the view of creditors, in bytes.
    #[must_use]
    pub fn view_bytes(&self) -> usize {
        self.sorted.writer.bytes()
    }

    /// Sorts the view if it changed and a sort is due.
    pub(super) fn refresh_view(&mut self) {
        let due = self.members.len() <= SMALL || self.now_ms >= self.sorted.published_ms + limits::VIEW_MS;
        if self.sorted.dirty && due {
            self.sorted.publish(self.now_ms);
        }
    }
}
