//! Planning rounds (Infinite-LLM v2 §6.1): a round waits for a heartbeat of every live instance, up to a deadline, and then
//! sends the planner's orders.

use super::GManager;
use super::orders::Move;
use crate::planner::{Order, Plan, Planner};
use lagoon_protocol::MoveReason;
use lagoon_types::limits;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The next round opens at this time.
    Until(u64),
    /// Waits for heartbeats until this time.
    Waiting(u64),
}

#[derive(Debug)]
pub(super) struct Rounds {
    planner: Option<Planner>,
    period_ms: u64,
    state: State,
    /// Number of the open or last round.
    number: u64,
    /// Live members without a heartbeat in it.
    missing: usize,
}

impl Rounds {
    pub(super) fn new(planner: Option<Planner>, period_ms: u64) -> Self {
        Self { planner, period_ms, state: State::Until(period_ms), number: 1, missing: 0 }
    }

    /// The round of a member that joins: the open one, which does not wait for it.
    pub(super) fn joined(&self) -> u64 {
        self.number
    }

    /// Counts a heartbeat of a member whose last one was in `round`; returns the current round.
    pub(super) fn note_heartbeat(&mut self, round: u64) -> u64 {
        if round < self.number {
            self.missing = self.missing.saturating_sub(1);
        }
        self.number
    }

    /// Stops waiting for a member that is no longer live; its last heartbeat was in `round`.
    pub(super) fn left(&mut self, round: u64) {
        self.note_heartbeat(round);
    }

    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        let at = match self.state {
            State::Until(at) | State::Waiting(at) => at,
        };
        self.planner.is_some().then_some(at)
    }
}

impl GManager {
    /// Opens a round when it is due, and plans it when all heartbeats have arrived or the wait is over.
    pub(super) fn plan_round(&mut self) {
        if self.rounds.planner.is_none() {
            return;
        }
        if let State::Until(at) = self.rounds.state
            && self.now_ms >= at
        {
            self.rounds.number += 1;
            self.rounds.missing = self.live;
            self.rounds.state = State::Waiting(self.now_ms + limits::PLAN_WAIT_MS.min(self.rounds.period_ms));
        }
        if let State::Waiting(at) = self.rounds.state
            && (self.rounds.missing == 0 || self.now_ms >= at)
        {
            self.rounds.state = State::Until(self.now_ms + self.rounds.period_ms);
            self.order_plan();
        }
    }

    /// Returns the planner's next orders, as of the last heartbeats, without sending them.
    #[must_use]
    pub fn plan(&mut self) -> Option<Plan> {
        self.pool.now_ms = self.now_ms;
        self.rounds.planner.as_ref().map(|p| p.plan(&self.pool))
    }

    /// Plans now, without waiting for a round, and sends the orders; for benchmarks and tests.
    pub fn plan_now(&mut self) {
        self.order_plan();
    }

    fn order_plan(&mut self) {
        let Some(plan) = self.plan() else { return };
        self.stats.rounds += 1;
        self.stats.assumed = plan.assumed;
        let given: Vec<Order> = plan.orders.into_iter().filter(|o| self.give(move_of(o)).is_some()).collect();
        let now_ms = self.now_ms;
        if let Some(planner) = &mut self.rounds.planner {
            planner.commit(&given, now_ms);
        }
    }
}

pub(super) fn move_of(order: &Order) -> Move {
    let &Order { debtor, seq, blocks, source, target, .. } = order;
    Move { debtor, seq, blocks, first: None, source, target, reason: MoveReason::Plan }
}
