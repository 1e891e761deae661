//! Planning rounds (Infinite-LLM v2 §6.1): a round waits until every live instance was heard, but not for long, and then
//! gives the planner's orders.

use super::GManager;
use super::orders::Move;
use crate::planner::{Order, Plan, Planner};
use lagoon_protocol::MoveReason;
use lagoon_types::limits;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The next round opens then.
    Until(u64),
    /// Waits for heartbeats until then.
    Waiting(u64),
}

#[derive(Debug)]
pub(super) struct Rounds {
    planner: Option<Planner>,
    period_ms: u64,
    state: State,
    /// The round that is open, or was last.
    number: u64,
    /// Live members that were not heard in it.
    missing: usize,
}

impl Rounds {
    pub(super) fn new(planner: Option<Planner>, period_ms: u64) -> Self {
        Self { planner, period_ms, state: State::Until(period_ms), number: 1, missing: 0 }
    }

    /// A member joins, not heard yet: it is not waited for.
    pub(super) fn joined(&self) -> u64 {
        self.number
    }

    /// A member that was heard last in `round` is heard; returns the round that it is heard in now.
    pub(super) fn heard(&mut self, round: u64) -> u64 {
        if round < self.number {
            self.missing = self.missing.saturating_sub(1);
        }
        self.number
    }

    /// A live member that was heard last in `round` is not live any more.
    pub(super) fn left(&mut self, round: u64) {
        self.heard(round);
    }

    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        let at = match self.state {
            State::Until(at) | State::Waiting(at) => at,
        };
        self.planner.is_some().then_some(at)
    }
}

impl GManager {
    /// Opens a round when its time has come, and plans it when everybody was heard or the wait is over.
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

    /// The planner's next orders, as of the last heartbeats. Nothing is ordered.
    #[must_use]
    pub fn plan(&mut self) -> Option<Plan> {
        self.pool.now_ms = self.now_ms;
        self.rounds.planner.as_ref().map(|p| p.plan(&self.pool))
    }

    /// Plans now, without waiting for a round, and gives the orders; for benchmarks and tests.
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
