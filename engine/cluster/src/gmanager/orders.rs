//! Orders to move KV (`move_kvcache`, Infinite-LLM v2 §6.2): orders in progress, their outcomes, and the rest of requests
//! after one. A refusal is ordinary: it corrects the view of the target, and a later round plans again.

use super::GManager;
use super::member::Life;
use lagoon_protocol::{ControlBody, MoveKvCache, MoveOutcome, MoveReason, OrderOutcome};
use lagoon_types::{InstanceId, SeqId, limits};
use std::collections::{BTreeMap, BTreeSet};

/// A move of `blocks` of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) debtor: InstanceId,
    pub(super) seq: SeqId,
    pub(super) blocks: u32,
    /// As `MoveKvCache::first`.
    pub(super) first: Option<u32>,
    pub(super) source: InstanceId,
    pub(super) target: InstanceId,
    pub(super) reason: MoveReason,
}

/// Outcome of an operator's order.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ended {
    blocks: u32,
    moved: u32,
    /// Reason why not all blocks moved.
    reason: String,
}

#[derive(Debug)]
struct Open {
    order: Move,
    deadline_ms: u64,
}

/// Phase of a request during and after an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The order is in progress.
    Moving,
    /// It gets no order until this time.
    Resting(u64),
    /// It may move again, but its failures are remembered until this time.
    Remembered(u64),
}

#[derive(Clone, Copy, Debug)]
struct Rest {
    phase: Phase,
    /// Orders in a row that moved nothing.
    failures: u32,
}

#[derive(Debug)]
pub(super) struct Orders {
    next: u64,
    open: BTreeMap<u64, Open>,
    deadlines: BTreeSet<(u64, u64)>,
    rests: BTreeMap<(InstanceId, SeqId), Rest>,
    wake: BTreeSet<(u64, InstanceId, SeqId)>,
    /// Blocks of orders in progress to and from each instance.
    in_progress: BTreeMap<InstanceId, (u64, u64)>,
    /// Outcomes of the last operators' orders, by number.
    ended: BTreeMap<u64, Ended>,
}

impl Orders {
    /// Order numbers start from the term, so that those of different gManagers differ.
    pub(super) fn new(term: u64) -> Self {
        Self {
            next: (term << 24) + 1,
            open: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            rests: BTreeMap::new(),
            wake: BTreeSet::new(),
            in_progress: BTreeMap::new(),
            ended: BTreeMap::new(),
        }
    }

    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        let next = self.deadlines.first().map(|g| g.0);
        next.into_iter().chain(self.wake.first().map(|w| w.0)).min()
    }

    /// Whether a request moves or rests.
    pub(super) fn rests(&self, debtor: InstanceId, seq: SeqId) -> bool {
        self.rests.get(&(debtor, seq)).is_some_and(|r| !matches!(r.phase, Phase::Remembered(_)))
    }

    /// Whether a request's phase bars an order with this reason: the planner waits while it rests, a drain while it rests after
    /// a failure, operators only while it moves.
    pub(super) fn bars(&self, debtor: InstanceId, seq: SeqId, reason: MoveReason) -> bool {
        let Some(rest) = self.rests.get(&(debtor, seq)) else { return false };
        match (rest.phase, reason) {
            (Phase::Moving, _) => true,
            (Phase::Remembered(_), _) | (Phase::Resting(_), MoveReason::Operator) => false,
            (Phase::Resting(_), MoveReason::Drain) => rest.failures > 0,
            (Phase::Resting(_), MoveReason::Plan | MoveReason::Swap) => true,
        }
    }

    /// Whether no order is in progress or remembered.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let open = self.open.is_empty() && self.deadlines.is_empty() && self.in_progress.is_empty();
        open && self.rests.is_empty() && self.wake.is_empty()
    }

    fn set_phase(&mut self, key: (InstanceId, SeqId), rest: Rest) {
        if let Some(Rest { phase: Phase::Resting(at) | Phase::Remembered(at), .. }) = self.rests.insert(key, rest) {
            self.wake.remove(&(at, key.0, key.1));
        }
        if let Phase::Resting(at) | Phase::Remembered(at) = rest.phase {
            self.wake.insert((at, key.0, key.1));
        }
    }

    fn start(&mut self, order: Move, deadline_ms: u64) -> u64 {
        let id = self.next;
        self.next += 1;
        self.open.insert(id, Open { order, deadline_ms });
        self.deadlines.insert((deadline_ms, id));
        self.in_progress.entry(order.target).or_default().0 += u64::from(order.blocks);
        self.in_progress.entry(order.source).or_default().1 += u64::from(order.blocks);
        let failures = self.rests.get(&(order.debtor, order.seq)).map_or(0, |r| r.failures);
        self.set_phase((order.debtor, order.seq), Rest { phase: Phase::Moving, failures });
        id
    }

    fn end(&mut self, id: u64) -> Option<Move> {
        let open = self.open.remove(&id)?;
        self.deadlines.remove(&(open.deadline_ms, id));
        let Move { source, target, .. } = open.order;
        let blocks = u64::from(open.order.blocks);
        for (at, comes, goes) in [(target, blocks, 0), (source, 0, blocks)] {
            if let Some(sums) = self.in_progress.get_mut(&at) {
                *sums = (sums.0 - comes, sums.1 - goes);
                if *sums == (0, 0) {
                    self.in_progress.remove(&at);
                }
            }
        }
        Some(open.order)
    }

    /// State of an operator's order; `None` for other orders and for forgotten ones.
    pub(super) fn outcome(&self, number: u64) -> Option<OrderOutcome> {
        if let Some(Ended { blocks, moved, reason }) = self.ended.get(&number) {
            return Some(OrderOutcome { ended: true, blocks: *blocks, moved: *moved, reason: reason.clone() });
        }
        let open = self.open.get(&number).filter(|o| o.order.reason == MoveReason::Operator)?;
        Some(OrderOutcome { blocks: open.order.blocks, ..OrderOutcome::default() })
    }

    fn remember(&mut self, number: u64, ended: Ended) {
        self.ended.insert(number, ended);
        if self.ended.len() > limits::ADMIN_ORDERS_MAX {
            self.ended.pop_first();
        }
    }

    /// Starts the rest of a request after an order; failures make it longer, against thrashing.
    fn rest(&mut self, order: &Move, moved: bool, now_ms: u64) {
        let key = (order.debtor, order.seq);
        let failures = if moved { 0 } else { self.rests.get(&key).map_or(0, |r| r.failures) + 1 };
        let rest_ms = match failures {
            _ if order.reason == MoveReason::Operator => limits::MOVE_BY_HAND_REST_MS,
            0 => limits::MOVE_REST_MS,
            n => (limits::MOVE_RETRY_MS << (n - 1).min(16)).min(limits::MOVE_RETRY_MAX_MS),
        };
        self.set_phase(key, Rest { phase: Phase::Resting(now_ms + rest_ms), failures });
    }
}

impl GManager {
    /// Sends an order, unless [`GManager::check_move`] refuses it; returns its number.
    pub(super) fn give(&mut self, order: Move) -> Option<u64> {
        self.check_move(&order).ok()?;
        let deadline_ms = limits::MOVE_DEADLINE_MS;
        let number = self.orders.start(order, self.now_ms + deadline_ms + limits::MOVE_GRACE_MS);
        let target_addr = match self.members.get(&order.target) {
            Some(target) if order.target != order.debtor => target.registration.quic_addr.clone(),
            _ => String::new(),
        };
        let body = ControlBody::MoveKvCache(MoveKvCache {
            order: number,
            seq: order.seq.0,
            blocks: order.blocks,
            source: order.source.0,
            target: order.target.0,
            target_addr,
            reason: order.reason.into(),
            deadline_ms: u32::try_from(deadline_ms).expect("a small constant"),
            cycle: 0,
            first: order.first,
        });
        self.send(order.debtor, body);
        self.stats.moves_given += 1;
        if order.target != order.debtor
            && let Some(target) = self.members.get(&order.target)
        {
            self.sorted.writer.book(target.slot, order.blocks);
        }
        self.set_in_progress(order.target);
        self.set_in_progress(order.source);
        self.set_moving(order.debtor, order.seq);
        Some(number)
    }

    /// Checks a move; the error is for operators.
    pub(super) fn check_move(&self, order: &Move) -> Result<(), String> {
        let live = |id: InstanceId| self.members.get(&id).is_some_and(|m| m.life == Life::Live);
        for (id, what) in [(order.debtor, "debtor"), (order.source, "source"), (order.target, "target")] {
            if !live(id) {
                return Err(format!("the {what} {id} is not alive"));
            }
        }
        if order.source == order.target {
            return Err(format!("{} is both where the blocks lie and where they shall lie", order.source));
        }
        if order.blocks == 0 {
            return Err(format!("{} has no blocks of {}'s {} that can move", order.source, order.debtor, order.seq));
        }
        let target = &self.members[&order.target];
        if order.target != order.debtor && target.is_draining() {
            return Err(format!("the target {} is being drained", order.target));
        }
        let swaps = |id: InstanceId| self.dgfm.as_ref().is_some_and(|d| d.is_member(id));
        if let Some(id) = [order.debtor, order.source, order.target].into_iter().find(|id| swaps(*id)) {
            return Err(format!("{id} is swapping circular debts"));
        }
        if self.orders.bars(order.debtor, order.seq, order.reason) {
            return Err(format!("{}'s {} is moving", order.debtor, order.seq));
        }
        if self.orders.open.len() >= limits::MOVES_MAX {
            return Err(format!("{} moves are in progress, their most", limits::MOVES_MAX));
        }
        Ok(())
    }

    /// Handles the outcome of an order.
    pub fn on_move_outcome(&mut self, from: InstanceId, m: &MoveOutcome, now_ms: u64) {
        self.on_time(now_ms);
        if self.on_swap_outcome(from, m) || self.orders.open.get(&m.order).is_none_or(|o| o.order.debtor != from) {
            return;
        }
        let Some(order) = self.orders.end(m.order) else { return };
        if let Some(lendable) = m.target_lendable
            && order.target != order.debtor
        {
            self.correct(order.target, lendable);
        }
        self.close((m.order, &order), m.moved.min(order.blocks), &m.reason);
    }

    /// Records an order that has ended, or will not be answered.
    fn close(&mut self, (number, order): (u64, &Move), moved: u32, reason: &str) {
        if order.reason == MoveReason::Operator {
            let reason = if moved == order.blocks { String::new() } else { reason.to_owned() };
            self.orders.remember(number, Ended { blocks: order.blocks, moved, reason });
        }
        if moved == order.blocks {
            self.stats.moves_done += 1;
        } else {
            self.stats.moves_failed += 1;
        }
        self.stats.blocks_moved += u64::from(moved);
        self.orders.rest(order, moved > 0, self.now_ms);
        self.set_in_progress(order.target);
        self.set_in_progress(order.source);
        self.set_moving(order.debtor, order.seq);
    }

    /// Ends late orders, and rests that are over.
    pub(super) fn expire_orders(&mut self) {
        while let Some((at, id)) = self.orders.deadlines.first().copied().filter(|(at, _)| *at <= self.now_ms) {
            self.orders.deadlines.remove(&(at, id));
            if let Some(order) = self.orders.end(id) {
                self.close((id, &order), 0, "its debtor did not report its end in time");
            }
        }
        while let Some((at, debtor, seq)) = self.orders.wake.first().copied().filter(|w| w.0 <= self.now_ms) {
            let rest = self.orders.rests.get(&(debtor, seq)).copied();
            match rest {
                Some(Rest { phase: Phase::Resting(_), failures }) if failures > 0 => {
                    let phase = Phase::Remembered(at + limits::MOVE_RETRY_MAX_MS);
                    self.orders.set_phase((debtor, seq), Rest { phase, failures });
                }
                _ => {
                    self.orders.wake.remove(&(at, debtor, seq));
                    self.orders.rests.remove(&(debtor, seq));
                }
            }
            self.set_moving(debtor, seq);
        }
    }

    /// Ends all orders from, to and of an instance that left.
    pub(super) fn drop_orders_of(&mut self, id: InstanceId) {
        self.drop_swaps_of(id);
        let touches = |o: &Open| [o.order.debtor, o.order.source, o.order.target].contains(&id);
        let gone: Vec<u64> = self.orders.open.iter().filter(|(_, o)| touches(o)).map(|(n, _)| *n).collect();
        for number in gone {
            if let Some(order) = self.orders.end(number) {
                self.close((number, &order), 0, &format!("{id} left the pool"));
            }
        }
    }

    fn set_in_progress(&mut self, id: InstanceId) {
        let (incoming, outgoing) = self.orders.in_progress.get(&id).copied().unwrap_or_default();
        let as_u32 = |blocks: u64| u32::try_from(blocks).unwrap_or(u32::MAX);
        if let Some(view) = self.instance_view(id) {
            (view.blocks_incoming, view.blocks_outgoing) = (as_u32(incoming), as_u32(outgoing));
        }
    }

    fn set_moving(&mut self, debtor: InstanceId, seq: SeqId) {
        let moving = self.orders.rests(debtor, seq);
        if let Some(request) = self.instance_view(debtor).and_then(|v| v.requests.get_mut(&seq)) {
            request.moving = moving;
        }
    }
}
