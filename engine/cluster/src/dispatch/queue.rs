//! The queue's bounds, and requests that wait: how they come, leave, expire and come back.

use super::{
    Arrival, Bound, CachedAt, DISPATCH_NONE_MS, Dispatcher, Effect, GATEWAY_QUEUE_BYTES_MAX, GATEWAY_QUEUE_MAX,
    GATEWAY_QUEUE_MS, GATEWAY_TENANT_QUARTERS, HAND_BACK_REST_MS, Head, Instance, Mode, Refusal, RequestId, Waiting,
    turn,
};
use crate::mutants::{self, Mutant};
use lagoon_types::limits::{DISPATCH_PASSES_MAX, DISPATCH_POOL_MS, DISPATCH_PREFIX_MS, DISPATCH_SOON_MS};
use std::fmt::Debug;

/// Microseconds that a request may wait for each one of prefill that it saves: others use the device meanwhile, and later ones that
/// prefill's time. Measured (docs/paper-results.md).
const HOLD_WEIGHT: f64 = 4.0;

impl<K: Copy + Ord + Debug> Dispatcher<K> {
    pub(super) fn arrive(&mut self, arrival: Arrival) {
        let id = arrival.id;
        let is_known = self.waiting.contains_key(&id) || self.bound.contains_key(&id);
        assert!(!is_known, "{id:?} arrives twice");
        if let Some(why) = self.refusal(&arrival) {
            self.effects.push(Effect::Refuse { id, why });
            return;
        }
        let turn = turn(self.now_ms, arrival.priority, id);
        self.enqueue(Waiting { arrival, since_ms: self.now_ms, turn, held_ms: None, hand_backs: 0, barred: None });
    }

    /// Why a request cannot wait here.
    fn refusal(&self, arrival: &Arrival) -> Option<Refusal> {
        let bytes = self.waiting_bytes.saturating_add(arrival.bytes);
        if self.listed.is_empty() {
            Some(Refusal::NoInstance)
        } else if self.waiting.len() >= GATEWAY_QUEUE_MAX || bytes > GATEWAY_QUEUE_BYTES_MAX {
            Some(Refusal::Full)
        } else {
            let (requests, held) = self.turns.waiting(&arrival.tenant);
            let is_full = requests >= GATEWAY_QUEUE_MAX / 4 * GATEWAY_TENANT_QUARTERS
                || held.saturating_add(arrival.bytes) > GATEWAY_QUEUE_BYTES_MAX / 4 * GATEWAY_TENANT_QUARTERS;
            is_full.then_some(Refusal::TenantFull)
        }
    }

    fn enqueue(&mut self, waiting: Waiting<K>) {
        self.turns.add(&waiting.arrival.tenant, waiting.turn, waiting.arrival.bytes);
        self.waiting_bytes += waiting.arrival.bytes;
        self.expires_ms = self.expires_ms.min(waiting.since_ms + GATEWAY_QUEUE_MS);
        self.waiting.insert(waiting.arrival.id, waiting);
    }

    /// Takes a request out of the queue, unbound.
    pub(super) fn leave_queue(&mut self, id: RequestId) {
        let Some(waiting) = self.waiting.remove(&id) else { return };
        self.waiting_bytes -= waiting.arrival.bytes;
        self.turns.remove(&waiting.arrival.tenant, waiting.turn, waiting.arrival.bytes);
        self.head = self.head.filter(|head| head.id != id);
    }

    /// Queues a bound request again, in its old turn; the queue's bounds do not apply.
    pub(super) fn take_back(&mut self, id: RequestId) {
        let Some(Bound { instance, mut waiting, work, .. }) = self.bound.remove(&id) else { return };
        self.instances.get_mut(&instance).into_iter().for_each(|of| of.withdraw(id, self.now_ms));
        self.handed_back += 1;
        self.turns.correct(&waiting.arrival.tenant, -work);
        waiting.hand_backs += 1;
        waiting.barred = Some((instance, self.now_ms + HAND_BACK_REST_MS));
        if !mutants::is(Mutant::HandBackLost) {
            self.enqueue(waiting);
        }
    }

    /// Refuses requests that have waited too long.
    pub(super) fn expire(&mut self) {
        let none = self.none_since_ms.is_some_and(|since_ms| self.now_ms >= since_ms + DISPATCH_NONE_MS);
        if !none && self.now_ms < self.expires_ms {
            return;
        }
        let late = |waiting: &Waiting<K>| self.now_ms >= waiting.since_ms + GATEWAY_QUEUE_MS;
        let why = |waiting: &Waiting<K>| if late(waiting) { Refusal::Expired } else { Refusal::NoInstance };
        let over = self.waiting.iter().filter(|(_, waiting)| none || late(waiting));
        let over: Vec<(RequestId, Refusal)> = over.map(|(id, waiting)| (*id, why(waiting))).collect();
        for (id, why) in over {
            self.leave_queue(id);
            self.effects.push(Effect::Refuse { id, why });
        }
        let next = self.waiting.values().map(|waiting| waiting.since_ms + GATEWAY_QUEUE_MS).min();
        self.expires_ms = next.unwrap_or(u64::MAX);
    }

    /// Notes that the head does not start, and what it waits for: its prefix at `awaited`, or memory.
    pub(super) fn note_head(&mut self, id: RequestId, awaited: Option<K>) {
        let is_held = awaited.is_some();
        let reserved = awaited.or_else(|| self.reserved(id));
        let before = self.head.filter(|head| head.id == id);
        let Some(head) = before else {
            self.head = Some(Head { id, since_ms: self.now_ms, reserved, is_held, passes: 0 });
            return;
        };
        // It keeps the instance whose memory it waits for, unless that is gone.
        let waits_on = !is_held && !head.is_held;
        let keeps = waits_on && head.reserved.is_none_or(|key| self.listed.contains(&key));
        self.head = Some(if keeps { head } else { Head { reserved, is_held, ..head } });
    }

    /// The instance that is predicted to have the request's memory first; `None` if none is large enough.
    fn reserved(&self, id: RequestId) -> Option<K> {
        self.waiting.get(&id).and_then(|waiting| self.first_whole(waiting, self.in_turn())).map(|(_, key)| key)
    }

    /// Whether an instance is predicted to have a request's memory within [`DISPATCH_SOON_MS`].
    pub(super) fn is_held_whole_soon(&self, id: RequestId) -> bool {
        let soon_us = crate::perf::as_f64(DISPATCH_SOON_MS) * 1_000.0;
        let first = self.waiting.get(&id).and_then(|waiting| self.first_whole(waiting, self.in_turn()));
        first.is_some_and(|(wait_us, _)| wait_us <= soon_us)
    }

    /// Of instances the one that is predicted to have a request's memory first, and the time until then in microseconds.
    pub(super) fn first_whole(&self, waiting: &Waiting<K>, keys: impl Iterator<Item = K>) -> Option<(f64, K)> {
        let Arrival { ask, prefix, .. } = &waiting.arrival;
        let is_large = |of: &Instance<K>| ask.blocks(of.block_tokens()) <= of.blocks_total();
        let cached = self.cached(prefix);
        let wait_us = |key: K| {
            let load = self.instances.get(&key).filter(|of| is_large(of))?.load();
            Some((self.policy.predict(load, ask, cached.at(key)).memory_us, key))
        };
        keys.filter_map(wait_us).min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// The busy instance that a request waits for, rather than start at `best`: it saves prefill there, and can start within
    /// [`HOLD_WEIGHT`] times what it saves.
    pub(super) fn awaited(&self, waiting: &Waiting<K>, best: K, cached: &CachedAt<K>) -> Option<K> {
        let is_over = waiting.held_ms.is_some_and(|since_ms| self.now_ms >= since_ms + DISPATCH_PREFIX_MS);
        if is_over || self.mode == Mode::FreeMemory {
            return None;
        }
        let ask = &waiting.arrival.ask;
        let saved_us = |of: &Instance<K>, key| self.policy.predict(of.load(), ask, cached.at(key)).saved_us;
        let here_us = self.instances.get(&best).map_or(0.0, |of| saved_us(of, best));
        let here = self.rank(best, ask, cached);
        let rank = |key: K| {
            let of = self.instances.get(&key)?;
            let busy_us = of.busy_us(self.now_ms).filter(|us| *us > 0.0)?;
            let is_soon = busy_us < (saved_us(of, key) - here_us) * HOLD_WEIGHT;
            let has_room = of.room(self.now_ms).has(ask.blocks(of.block_tokens()));
            Some((self.rank(key, ask, cached), key)).filter(|(rank, _)| is_soon && has_room && *rank < here)
        };
        let keys = self.allowed(waiting).filter(|key| cached.at(*key) > 0);
        keys.filter_map(rank).min_by(|a, b| a.0.cmp(&b.0)).map(|(_, key)| key)
    }

    /// Whether a pool-sized head has waited here for as long as it may.
    pub(super) fn has_waited_for_pool(&self, head: &Head<K>) -> bool {
        head.passes >= DISPATCH_PASSES_MAX || self.now_ms.saturating_sub(head.since_ms) >= DISPATCH_POOL_MS
    }
}
