//! Dispatch: which instance a request goes to, and when. The core of a gateway, sans-IO.
//!
//! Requests wait in one queue ([`turns`]) and are *bound* to an instance when one can start them ([`rooms`]): late binding, so that no
//! request waits behind another at one instance while the next one has room. Of those that can start it, the one with the least
//! predicted outstanding work gets it ([`policy`]), corrected by the prompt's cached prefix ([`prefixes`]).
//!
//! ```text
//! Event (arrival, report, end, tick) ── Dispatcher::handle ──> Effect (Bind, Refuse)
//! ```
//!
//! **The head.** A head of the queue that cannot start now, though instances may merely be busy, waits for memory: of one instance, which it
//! *reserves*, or of the pool if no instance is large enough. Requests behind it may start elsewhere, and on memory that it waits for [`DISPATCH_PASSES_MAX`]
//! times, the most useful work per memory and time first. It borrows only if no instance is predicted to hold it whole within
//! [`DISPATCH_SOON_MS`](lagoon_types::limits::DISPATCH_SOON_MS), or none has after [`DISPATCH_WHOLE_MS`]. If the pool lacks the memory then, it
//! waits on in an instance's queue.
//!
//! **The prefix.** A request waits for a busy instance that caches much of its prompt, if that saves more than the wait is worth
//! ([`DISPATCH_PREFIX_MS`](lagoon_types::limits::DISPATCH_PREFIX_MS) at most). Others start elsewhere meanwhile.
//!
//! Invariants:
//! * each request is bound once, or refused, or its caller has ended it; a request that was handed back is bound again;
//! * at most [`DISPATCH_PASSES_MAX`] of its requests start on memory that a head waits for (those of other gateways know nothing of it);
//! * the queue is bounded in requests, bytes and age, and one tenant cannot fill it.
//!
//! Several gateways share the reports of the gManager's view, and each corrects them by its own requests; without reports each has its
//! own requests only ([`rooms`]). They tell each other where prompts went ([`Placed`]).

mod placed;
pub mod policy;
mod prefixes;
mod queue;
mod replay;
mod rooms;
#[cfg(test)]
mod tests;
mod turns;

pub use placed::{Placed, PlacedQueue};
pub use policy::{Ask, InstanceLoad, LeastWork, Prediction, Rank, Unreported, free_memory};
pub use replay::{Aborted, Next, Progress, Replay, ReplayLimits, Resend};
pub use rooms::Report;

use lagoon_types::limits::{
    DISPATCH_LOOK_MAX, DISPATCH_NONE_MS, DISPATCH_PASSES_MAX, DISPATCH_WHOLE_MS, GATEWAY_QUEUE_BYTES_MAX,
    GATEWAY_QUEUE_MAX, GATEWAY_QUEUE_MS, GATEWAY_TENANT_QUARTERS, HAND_BACK_REST_MS, HAND_BACKS_MAX,
};
use prefixes::{CachedAt, Prefixes};
use rooms::{Instance, Room, Sent};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use turns::{Turn, Turns, turn};

/// Weight of one answer in the mean of their lengths.
const LEARN: f64 = 0.05;

/// A request's number at its gateway. Each is used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Hashes of a prompt's prefixes, the shortest first; at most `PREFIX_HASHES_MAX`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PrefixHashes {
    pub hashes: Vec<u64>,
    /// Tokens by which each is longer than the one before.
    pub tokens_per_hash: f64,
}

/// A request that arrives.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub id: RequestId,
    pub ask: Ask,
    /// Who shares the queue's turns with others: the name of the request's key, or its `cache_salt`.
    pub tenant: Arc<str>,
    /// The lower, the further ahead of its tenant's.
    pub priority: i32,
    /// Bytes that it holds while it waits.
    pub bytes: usize,
    pub prefix: PrefixHashes,
}

/// Memory of nodes that take no requests, and lend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    pub blocks_total: u64,
    pub blocks_lendable: u64,
}

/// What a request turned out to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Learned {
    pub cached_tokens: Option<u64>,
    pub answer_tokens: Option<u64>,
}

/// Event of a dispatcher.
#[derive(Clone, Debug)]
pub enum Event<K> {
    Arrived(Arrival),
    /// All instances that take requests, with their latest reports.
    Reports {
        reports: Vec<Report<K>>,
        elsewhere: Elsewhere,
    },
    /// What other dispatchers placed, in their order.
    Placed(Vec<Placed<K>>),
    /// A bound request is at `instance` now, which may be another than it was bound to: that one was lost or refused it.
    Sent {
        id: RequestId,
        instance: K,
    },
    /// Its answer has begun.
    Began {
        id: RequestId,
    },
    /// It was answered, or failed, or its client left; whether it waits or is bound.
    Ended {
        id: RequestId,
        learned: Learned,
    },
    /// The instance gave it back, not begun.
    HandedBack {
        id: RequestId,
    },
    Tick,
}

/// Effect of a dispatcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect<K> {
    /// The request goes to `instance`.
    Bind { id: RequestId, instance: K },
    /// The request is refused; the dispatcher has forgotten it.
    Refuse { id: RequestId, why: Refusal },
}

/// Reason of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// The queue is full.
    Full,
    /// Its tenant holds its share of the queue.
    TenantFull,
    /// It waited for `GATEWAY_QUEUE_MS`.
    Expired,
    /// There is no instance.
    NoInstance,
}

/// How a dispatcher chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Least predicted outstanding work, bound late.
    #[default]
    LeastWork,
    /// Most free memory, bound at arrival (Infinite-LLM v2 §6.1).
    FreeMemory,
}

/// Counts of a dispatcher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatchStats {
    /// Requests that wait, and bytes that they hold.
    pub waiting: usize,
    pub waiting_bytes: usize,
    /// Requests that were bound and have not ended.
    pub bound: usize,
    /// Requests that were started on memory for which another waited.
    pub passes: u64,
    pub handed_back: u64,
}

/// A request that waits.
#[derive(Clone, Debug)]
struct Waiting<K> {
    arrival: Arrival,
    since_ms: u64,
    turn: Turn,
    /// Since when it waits for a cached prefix, although it could start elsewhere.
    held_ms: Option<u64>,
    hand_backs: u32,
    /// The instance that gave it back last, and until when it does not go there.
    barred: Option<(K, u64)>,
}

/// A request at an instance.
#[derive(Debug)]
struct Bound<K> {
    instance: K,
    waiting: Waiting<K>,
    /// Work that its tenant was charged.
    work: f64,
    /// Whether the instance held it whole; else it borrows there, and gains nothing by going back.
    is_whole: bool,
}

/// The head of the queue while it cannot start.
#[derive(Clone, Copy, Debug)]
struct Head<K> {
    id: RequestId,
    since_ms: u64,
    /// The instance that it waits for; `None`: the pool's memory.
    reserved: Option<K>,
    /// Whether it waits for its prefix there, rather than for memory.
    is_held: bool,
    /// Requests that were started on that memory since.
    passes: u32,
}

/// Where a request goes.
#[derive(Clone, Copy, Debug)]
enum Choice<K> {
    Start(K),
    /// It waits for the prefix that this busy instance caches.
    Await(K),
    /// No instance can start it now.
    Nowhere,
}

/// The core of a gateway. `K` names an instance. See the module's documentation.
#[derive(Debug)]
pub struct Dispatcher<K> {
    mode: Mode,
    policy: LeastWork,
    now_ms: u64,
    /// Instances that take requests, and those that are gone with requests there.
    instances: BTreeMap<K, Instance<K>>,
    /// Of these, the ones of the latest reports; equals take turns from `turn` on.
    listed: Vec<K>,
    turn: usize,
    elsewhere: Elsewhere,
    /// Since when there is no instance.
    none_since_ms: Option<u64>,
    waiting: BTreeMap<RequestId, Waiting<K>>,
    waiting_bytes: usize,
    turns: Turns,
    head: Option<Head<K>>,
    bound: BTreeMap<RequestId, Bound<K>>,
    prefixes: Prefixes<K>,
    /// What was placed since the last [`Dispatcher::take_placed`].
    placed: PlacedQueue<K>,
    effects: Vec<Effect<K>>,
    /// No request expires before.
    expires_ms: u64,
    passes: u64,
    handed_back: u64,
}

impl<K: Copy + Ord + Debug> Dispatcher<K> {
    /// A dispatcher without instances.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            policy: LeastWork::default(),
            now_ms: 0,
            instances: BTreeMap::new(),
            listed: Vec::new(),
            turn: 0,
            elsewhere: Elsewhere::default(),
            none_since_ms: None,
            waiting: BTreeMap::new(),
            waiting_bytes: 0,
            turns: Turns::default(),
            head: None,
            bound: BTreeMap::new(),
            prefixes: Prefixes::default(),
            placed: PlacedQueue::default(),
            effects: Vec::new(),
            expires_ms: u64::MAX,
            passes: 0,
            handed_back: 0,
        }
    }

    /// Whether requests wait: then [`Event::Tick`] is due every `DISPATCH_TICK_MS`.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Its counts.
    #[must_use]
    pub fn stats(&self) -> DispatchStats {
        DispatchStats {
            waiting: self.waiting.len(),
            waiting_bytes: self.waiting_bytes,
            bound: self.bound.len(),
            passes: self.passes,
            handed_back: self.handed_back,
        }
    }

    /// The head of the queue while it cannot start, and the instance whose memory it waits for; `None`: the pool's.
    #[must_use]
    pub fn head(&self) -> Option<(RequestId, Option<K>)> {
        self.head.map(|head| (head.id, head.reserved))
    }

    /// What this dispatcher placed since the last call, for others of the pool.
    pub fn take_placed(&mut self) -> Vec<Placed<K>> {
        self.placed.take()
    }

    /// Whether an instance may give a request back, rather than keep it.
    #[must_use]
    pub fn may_hand_back(&self, id: RequestId) -> bool {
        self.bound.get(&id).is_some_and(|bound| bound.is_whole && bound.waiting.hand_backs < HAND_BACKS_MAX)
    }

    /// Instances for `ask`, the best first, whether they can start it or not.
    #[must_use]
    pub fn ranked(&self, ask: &Ask, prefix: &PrefixHashes) -> Vec<K> {
        let cached = self.cached(prefix);
        let mut ranked: Vec<(Rank, K)> = self.in_turn().map(|key| (self.rank(key, ask, &cached), key)).collect();
        // Stable: equals stay in turn.
        ranked.sort_by_key(|a| a.0);
        ranked.into_iter().map(|(_, key)| key).collect()
    }

    /// Of instances of equal rank another one is the next.
    pub fn next_turn(&mut self) {
        self.turn = self.turn.wrapping_add(1);
    }

    /// Tokens of a prompt that instances are predicted to cache.
    fn cached(&self, prefix: &PrefixHashes) -> CachedAt<K> {
        self.prefixes.cached(prefix, |key| self.instances.get(&key).map(Instance::token_capacity))
    }

    /// The instances of the latest reports, in the order in which equals are chosen.
    fn in_turn(&self) -> impl Iterator<Item = K> + Clone {
        let (before, after) = self.listed.split_at(self.turn % self.listed.len().max(1));
        after.iter().chain(before).copied()
    }

    /// Handles an event that happened at `now_ms`, which never goes back.
    pub fn handle(&mut self, now_ms: u64, event: Event<K>) -> Vec<Effect<K>> {
        self.now_ms = self.now_ms.max(now_ms);
        self.instances.values_mut().for_each(|instance| instance.age(self.now_ms));
        let is_new = matches!(event, Event::Arrived(_));
        match event {
            Event::Arrived(arrival) => self.arrive(arrival),
            Event::Reports { reports, elsewhere } => self.learn(reports, elsewhere),
            Event::Placed(placed) => self.learn_placed(placed),
            Event::Sent { id, instance } => self.move_to(id, instance),
            Event::Began { id } => {
                let at = self.bound.get(&id).map(|bound| bound.instance);
                at.and_then(|at| self.instances.get_mut(&at)).into_iter().for_each(|instance| instance.begin(id));
            }
            Event::Ended { id, learned } => self.end(id, learned),
            Event::HandedBack { id } => self.take_back(id),
            Event::Tick => {}
        }
        self.expire();
        self.start_all();
        if is_new {
            self.next_turn();
        }
        std::mem::take(&mut self.effects)
    }

    fn learn(&mut self, reports: Vec<Report<K>>, elsewhere: Elsewhere) {
        self.elsewhere = elsewhere;
        self.listed = reports.iter().map(|report| report.instance).collect();
        for report in reports {
            self.prefixes.see(report.instance, report.load.incarnation);
            match self.instances.entry(report.instance) {
                std::collections::btree_map::Entry::Occupied(mut of) => of.get_mut().learn(report, self.now_ms),
                std::collections::btree_map::Entry::Vacant(of) => _ = of.insert(Instance::new(report, self.now_ms)),
            }
        }
        if crate::mutants::is(crate::mutants::Mutant::BoundTwice) {
            let lost = self.bound.iter().filter(|(_, bound)| !self.listed.contains(&bound.instance));
            let lost: Vec<RequestId> = lost.map(|(id, _)| *id).collect();
            lost.into_iter().for_each(|id| self.take_back(id));
        }
        let listed = &self.listed;
        self.prefixes.forget_absent(listed);
        self.instances.retain(|key, instance| listed.contains(key) || instance.has_requests());
        let none_since_ms = *self.none_since_ms.get_or_insert(self.now_ms);
        self.none_since_ms = self.listed.is_empty().then_some(none_since_ms);
    }

    fn move_to(&mut self, id: RequestId, instance: K) {
        let Some(bound) = self.bound.get_mut(&id) else { return };
        let before = std::mem::replace(&mut bound.instance, instance);
        if before == instance {
            return;
        }
        let sent = self.instances.get_mut(&before).and_then(|of| of.leave(id));
        if let (Some(sent), Some(of)) = (sent, self.instances.get_mut(&instance)) {
            let tokens = of.send(id, Sent { at_ms: self.now_ms, began: false, cached: 0, ..sent });
            let hashes = bound.waiting.arrival.prefix.hashes.clone();
            self.place(Placed { instance, hashes, tokens });
        }
    }

    /// Notes a prompt that goes to an instance, for others as well.
    fn place(&mut self, placed: Placed<K>) {
        self.prefixes.compute(placed.instance, placed.tokens);
        self.prefixes.note(&placed.hashes, placed.instance);
        if !placed.hashes.is_empty() {
            self.placed.add([placed]);
        }
    }

    /// Others sent prompts with these prefixes. Of an instance that no report has named nothing is known.
    fn learn_placed(&mut self, placed: Vec<Placed<K>>) {
        for Placed { instance, hashes, tokens } in placed {
            self.prefixes.compute(instance, tokens);
            self.prefixes.note(&hashes, instance);
        }
    }

    fn end(&mut self, id: RequestId, learned: Learned) {
        self.leave_queue(id);
        let Some(bound) = self.bound.remove(&id) else { return };
        let was_there = learned.cached_tokens.is_some() || learned.answer_tokens.is_some();
        let sent = self.instances.get_mut(&bound.instance).and_then(|of| of.end(id, was_there, self.now_ms));
        if let Some((sent, cached)) = sent.zip(learned.cached_tokens) {
            self.prefixes.learn(sent.cached, cached);
        }
        if let Some(tokens) = learned.answer_tokens {
            let Arrival { tenant, ask, .. } = &bound.waiting.arrival;
            let cached = learned.cached_tokens.unwrap_or(0);
            let work = crate::perf::as_f64(ask.prompt_tokens.saturating_sub(cached).saturating_add(tokens));
            self.turns.correct(tenant, work - bound.work);
            let each = crate::perf::as_f64(tokens) / f64::from(bound.waiting.arrival.ask.sequences.max(1));
            let mean = &mut self.policy.answer_tokens;
            *mean = (*mean * (1.0 - LEARN) + each * LEARN).max(1.0);
        }
    }

    fn rank(&self, key: K, ask: &Ask, cached: &CachedAt<K>) -> Rank {
        let unknown = InstanceLoad::default();
        let load = self.instances.get(&key).map_or(&unknown, Instance::load);
        match self.mode {
            Mode::LeastWork => self.policy.rank(load, ask, cached.at(key)),
            Mode::FreeMemory => free_memory(load),
        }
    }

    fn room(&self, key: K) -> Option<Room> {
        self.instances.get(&key).map(|of| of.room(self.now_ms))
    }

    fn bind(&mut self, id: RequestId, instance: K, is_whole: bool) {
        let Some(waiting) = self.waiting.remove(&id) else { return };
        let Waiting { arrival, turn, .. } = &waiting;
        let expected = self.policy.expected(&arrival.ask);
        let cached = self.cached(&arrival.prefix).at(instance);
        let work = crate::perf::as_f64(arrival.ask.prompt_tokens.saturating_sub(cached)) + expected;
        self.waiting_bytes -= arrival.bytes;
        self.turns.start(&arrival.tenant, (*turn, arrival.bytes), work);
        if let Some(of) = self.instances.get_mut(&instance) {
            let tokens = of.send(id, Sent { at_ms: self.now_ms, ask: arrival.ask, cached, expected, began: false });
            let hashes = arrival.prefix.hashes.clone();
            self.place(Placed { instance, hashes, tokens });
        }
        self.head = self.head.filter(|head| head.id != id);
        self.bound.insert(id, Bound { instance, waiting, work, is_whole });
        self.effects.push(Effect::Bind { id, instance });
    }

    /// Starts what can start: from the head on, and then what may pass it.
    fn start_all(&mut self) {
        while let Some(id) = self.head.map(|head| head.id).or_else(|| self.turns.next()) {
            match self.whole(id) {
                Choice::Start(instance) => self.bind(id, instance, true),
                Choice::Await(instance) => {
                    self.hold(id);
                    self.note_head(id, Some(instance));
                    break;
                }
                Choice::Nowhere => {
                    let Some(instance) = self.start_of_head(id) else {
                        self.note_head(id, None);
                        break;
                    };
                    self.bind(id, instance, false);
                }
            }
        }
        while let Some(head) = self.head {
            let Some((id, instance)) = self.passing(&head) else { return };
            if head.reserved.is_none_or(|reserved| reserved == instance) {
                self.passes += 1;
                self.head = Some(Head { passes: head.passes + 1, ..head });
            }
            self.bind(id, instance, true);
        }
    }

    /// Instances that a request may go to.
    fn allowed<'a>(&'a self, waiting: &'a Waiting<K>) -> impl Iterator<Item = K> + Clone + 'a {
        let barred = waiting.barred.filter(|(_, until_ms)| *until_ms > self.now_ms).map(|(key, _)| key);
        let others = self.listed.iter().any(|key| Some(*key) != barred);
        self.in_turn().filter(move |key| !others || Some(*key) != barred)
    }

    /// The best instance that can start a request and holds it whole.
    fn whole(&self, id: RequestId) -> Choice<K> {
        let Some(waiting) = self.waiting.get(&id) else { return Choice::Nowhere };
        let can_start = |key: &K| self.mode == Mode::FreeMemory || self.fits(*key, &waiting.arrival.ask);
        self.choose(self.allowed(waiting).filter(can_start), waiting)
    }

    /// The best of instances that can start a request, unless it waits for another one.
    fn choose(&self, keys: impl Iterator<Item = K>, waiting: &Waiting<K>) -> Choice<K> {
        let cached = self.cached(&waiting.arrival.prefix);
        let Some(best) = self.best(keys, waiting, &cached) else { return Choice::Nowhere };
        self.awaited(waiting, best, &cached).map_or(Choice::Start(best), Choice::Await)
    }

    fn hold(&mut self, id: RequestId) {
        self.waiting.get_mut(&id).into_iter().for_each(|waiting| _ = waiting.held_ms.get_or_insert(self.now_ms));
    }

    fn fits(&self, key: K, ask: &Ask) -> bool {
        let blocks = self.instances.get(&key).map_or(0, |of| ask.blocks(of.block_tokens()));
        self.room(key).is_some_and(|room| room.fits(blocks))
    }

    fn best(&self, keys: impl Iterator<Item = K>, waiting: &Waiting<K>, cached: &CachedAt<K>) -> Option<K> {
        let ask = &waiting.arrival.ask;
        keys.map(|key| (self.rank(key, ask, cached), key)).min_by(|a, b| a.0.cmp(&b.0)).map(|(_, key)| key)
    }

    /// Where the head starts although no instance holds it whole now: where it borrows, or where memory is kept for it.
    fn start_of_head(&self, id: RequestId) -> Option<K> {
        let waiting = self.waiting.get(&id)?;
        let blocks_at = |key: &K| self.instances.get(key).map_or(0, |of| waiting.arrival.ask.blocks(of.block_tokens()));
        let total_at = |key: &K| self.instances.get(key).map_or(0, Instance::blocks_total);
        let keys = || self.allowed(waiting);
        let is_large = |key: &K| blocks_at(key) <= total_at(key);
        let is_pool_sized = !self.in_turn().any(|key| is_large(&key));
        if !is_pool_sized && !keys().any(|key| is_large(&key)) {
            // Those that are large enough have just given it back.
            return None;
        }
        let is_idle = self.instances.values().all(Instance::is_idle);
        let lent = self.lendable();
        let is_too_large = self.in_turn().all(|key| blocks_at(&key) > self.obtainable(key, lent).0);
        // Those that can have its memory at all, as far as that is known.
        let can_hold = |key: &K| is_too_large || blocks_at(key) <= self.obtainable(*key, lent).0;
        if is_idle || is_too_large {
            // No memory becomes free by waiting; the instance knows what it can do.
            return self.best(keys().filter(can_hold), waiting, &self.cached(&waiting.arrival.prefix));
        }
        let head = self.head.filter(|head| head.id == id);
        let waited_ms = head.map_or(0, |head| self.now_ms.saturating_sub(head.since_ms));
        if !is_pool_sized && waited_ms < DISPATCH_WHOLE_MS && self.is_held_whole_soon(id) {
            return None;
        }
        // A cached rBlock is free as well, and need not be computed: it counts twice.
        let cached = self.cached(&waiting.arrival.prefix);
        let value = |key: K| {
            let cached = cached.at(key) / u64::from(self.instances.get(&key)?.block_tokens().max(1));
            Some((self.room(key)?.blocks.saturating_add_unsigned(cached), key))
        };
        let most_free = |keys: &mut dyn Iterator<Item = K>| keys.filter_map(value).max_by_key(|(value, _)| *value);
        let is_open = |key: &K| self.room(*key).is_some_and(|room| room.is_open());
        let has_memory = |key: &K| is_open(key) && blocks_at(key) <= self.obtainable(*key, lent).1;
        if let Some((_, key)) = most_free(&mut keys().filter(has_memory)) {
            return Some(key);
        }
        if is_pool_sized {
            let kept = head.is_some_and(|head| self.has_waited_for_pool(&head));
            return if kept { most_free(&mut keys().filter(can_hold)).map(|(_, key)| key) } else { None };
        }
        // Other gateways know nothing of what is kept for it here; its place in an instance's queue holds against all of them. But a batch
        // that is full, or prompts ahead, are only waited for.
        let lacks =
            |key: &K| self.room(*key).is_some_and(|room| i64::try_from(blocks_at(key)).is_ok_and(|n| n > room.blocks));
        let is_kept = waited_ms >= DISPATCH_WHOLE_MS && keys().all(|key| lacks(&key));
        if is_kept { self.first_whole(waiting, keys()).map(|(_, key)| key) } else { None }
    }

    /// rBlocks that all instances together lend at most, and now.
    fn lendable(&self) -> (u64, u64) {
        let Elsewhere { blocks_total, blocks_lendable } = self.elsewhere;
        self.listed.iter().filter_map(|key| self.instances.get(key)).fold((blocks_total, blocks_lendable), |all, of| {
            let (most, now) = of.lendable(self.now_ms);
            (all.0.saturating_add(most), all.1.saturating_add(now))
        })
    }

    /// rBlocks that a request at this instance can have at most, and now: its own, and of those that all lend the others'.
    fn obtainable(&self, key: K, (most, now): (u64, u64)) -> (u64, u64) {
        let Some(of) = self.instances.get(&key) else { return (0, 0) };
        let own = of.lendable(self.now_ms);
        let free = of.room(self.now_ms).blocks.max(0).unsigned_abs();
        ((most - own.0).saturating_add(of.blocks_total()), (now - own.1).saturating_add(free))
    }

    /// A waiting request that may start before the head, and where: the most useful work for memory and time. Notes who was seen to wait
    /// for a prefix.
    fn passing(&mut self, head: &Head<K>) -> Option<(RequestId, K)> {
        let spent = head.passes >= DISPATCH_PASSES_MAX && !crate::mutants::is(crate::mutants::Mutant::HeadStarved);
        let taken = |key: &K| spent && head.reserved.is_none_or(|reserved| reserved == *key);
        let open = |key: K| !taken(&key) && self.room(key).is_some_and(|room| room.is_open());
        if !self.listed.iter().copied().any(open) {
            return None;
        }
        let mut best: Option<(f64, RequestId, K)> = None;
        let (mut held, mut held_count) = ([RequestId(0); DISPATCH_LOOK_MAX], 0);
        for id in self.turns.first(DISPATCH_LOOK_MAX).filter(|id| *id != head.id) {
            let Some(waiting) = self.waiting.get(&id) else { continue };
            let fits = |key: &K| !taken(key) && self.fits(*key, &waiting.arrival.ask);
            match self.choose(self.allowed(waiting).filter(fits), waiting) {
                Choice::Start(key) => {
                    let usefulness = self.usefulness(key, waiting);
                    if best.is_none_or(|best| usefulness > best.0) {
                        best = Some((usefulness, id, key));
                    }
                }
                Choice::Await(_) => {
                    held[held_count] = id;
                    held_count += 1;
                }
                Choice::Nowhere => {}
            }
        }
        held[..held_count].iter().for_each(|id| self.hold(*id));
        best.map(|(_, id, key)| (id, key))
    }

    /// Tokens of a request for each rBlock and microsecond that it holds.
    fn usefulness(&self, key: K, waiting: &Waiting<K>) -> f64 {
        let Some(instance) = self.instances.get(&key) else { return 0.0 };
        let Arrival { ask, prefix, .. } = &waiting.arrival;
        let cached = self.cached(prefix).at(key);
        let tokens = crate::perf::as_f64(ask.prompt_tokens) + self.policy.expected(ask);
        let blocks = crate::perf::as_f64(ask.blocks(instance.block_tokens()));
        tokens / (blocks * self.policy.predict(instance.load(), ask, cached).work_us().max(1.0))
    }
}
