//! DGFM coordinator: one state machine per cycle. See the parent module.

use super::cycles::{Bounds, Graph, find};
use super::{DgfmConfig, LedgerRow};
use lagoon_protocol::{ControlBody, Freeze, Frozen, MoveKvCache, MoveOutcome, MoveReason, Thaw};
use lagoon_types::InstanceId;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Bit of swaps' order numbers, which keeps them apart from those of the planner and of operators.
const ORDER_BIT: u64 = 1 << 63;

/// Counters of the coordinator since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DgfmStats {
    /// Cycles found and frozen.
    pub cycles: u64,
    /// Completed cycles: the smallest frozen debt was swapped as a whole.
    pub completed: u64,
    /// Cycles that ended early; some of their blocks may have moved home.
    pub aborted: u64,
    /// rBlocks moved home.
    pub blocks: u64,
}

#[derive(Debug)]
struct Member {
    instance: InstanceId,
    /// Frozen sequence and blocks.
    frozen: Option<(u64, u32)>,
    free: u32,
    home: u32,
}

/// An order to send, or in flight.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Index of the member.
    member: usize,
    /// Number of finished turns in this round.
    turns: usize,
    /// Blocks of the round.
    blocks: u32,
    /// Number of the order in flight.
    order: Option<u64>,
    retry_at_ms: u64,
    tries: u32,
}

#[derive(Debug)]
struct Cycle {
    members: Vec<Member>,
    answer_by_ms: u64,
    end_by_ms: u64,
    /// `None` while replies to the freeze are missing.
    turn: Option<Turn>,
}

/// DGFM coordinator, sans-IO. The gManager calls it with messages and sends the outputs of [`Dgfm::poll`].
#[derive(Debug)]
pub struct Dgfm {
    config: DgfmConfig,
    cycles: BTreeMap<u64, Cycle>,
    next_cycle: u64,
    next_order: u64,
    /// End of the pause of each instance after a cycle.
    resting: BTreeMap<InstanceId, u64>,
    search_at_ms: u64,
    search_from: InstanceId,
    out: VecDeque<(InstanceId, ControlBody)>,
    stats: DgfmStats,
}

impl Dgfm {
    /// An idle coordinator. `term` is the gManager's, so that cycle numbers of different gManagers differ.
    #[must_use]
    pub fn new(config: DgfmConfig, term: u64) -> Self {
        Self {
            config,
            cycles: BTreeMap::new(),
            next_cycle: (term << 24).max(1),
            next_order: ORDER_BIT,
            resting: BTreeMap::new(),
            search_at_ms: 0,
            search_from: InstanceId(0),
            out: VecDeque::new(),
            stats: DgfmStats::default(),
        }
    }

    /// Its counts.
    #[must_use]
    pub fn stats(&self) -> DgfmStats {
        self.stats
    }

    /// Whether an instance is a member of a cycle now: the planner does not use it.
    #[must_use]
    pub fn is_member(&self, instance: InstanceId) -> bool {
        self.cycles.values().any(|c| c.members.iter().any(|m| m.instance == instance))
    }

    /// Number of cycles being frozen or swapped.
    #[must_use]
    pub fn active(&self) -> usize {
        self.cycles.len()
    }

    /// Takes the next message to send; call it until `None`.
    pub fn poll(&mut self) -> Option<(InstanceId, ControlBody)> {
        self.out.pop_front()
    }

    /// Handles time: deadlines end late cycles, and every [`DgfmConfig::period_ms`] it searches `ledger`, the debts of live
    /// instances, for new cycles. Instances in `busy` (draining, fenced, silent) are excluded.
    pub fn tick(&mut self, now_ms: u64, ledger: &[LedgerRow], busy: &BTreeSet<InstanceId>) {
        let late = |c: &Cycle| now_ms >= c.end_by_ms || (c.turn.is_none() && now_ms >= c.answer_by_ms);
        let over: Vec<u64> = self.cycles.iter().filter(|(_, c)| late(c)).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| self.end(id, false, now_ms));
        let waits = |t: &Turn| t.order.is_none() && now_ms >= t.retry_at_ms;
        let again: Vec<u64> =
            self.cycles.iter().filter(|(_, c)| c.turn.as_ref().is_some_and(waits)).map(|(id, _)| *id).collect();
        again.into_iter().for_each(|id| self.give_order(id, now_ms));
        self.resting.retain(|_, until| now_ms < *until);
        if now_ms >= self.search_at_ms {
            self.search_at_ms = now_ms + self.config.period_ms;
            self.search(now_ms, ledger, busy);
        }
    }

    /// Time of the next due [`Dgfm::tick`].
    #[must_use]
    pub fn next_wake_ms(&self) -> u64 {
        let of = |c: &Cycle| match &c.turn {
            None => c.answer_by_ms.min(c.end_by_ms),
            Some(turn) if turn.order.is_none() => turn.retry_at_ms.min(c.end_by_ms),
            Some(_) => c.end_by_ms,
        };
        self.cycles.values().map(of).min().unwrap_or(u64::MAX).min(self.search_at_ms)
    }

    fn search(&mut self, now_ms: u64, ledger: &[LedgerRow], busy: &BTreeSet<InstanceId>) {
        let room = self.config.cycles_max.saturating_sub(self.cycles.len());
        let members: BTreeSet<InstanceId> = self.cycles.values().flat_map(|c| &c.members).map(|m| m.instance).collect();
        let apart = |i: &InstanceId| members.contains(i) || busy.contains(i) || self.resting.contains_key(i);
        let mut graph = Graph::new();
        for row in ledger {
            let enough = row.blocks >= self.config.blocks_min && row.debtor != row.creditor;
            if enough && !apart(&row.debtor) && !apart(&row.creditor) {
                let blocks = graph.entry(row.debtor).or_default().entry(row.creditor).or_default();
                *blocks = blocks.saturating_add(row.blocks);
            }
        }
        let (members_max, edges_max) = (self.config.members_max, self.config.edges_max);
        let found = find(&graph, self.search_from, Bounds { cycles_max: room, members_max, edges_max });
        // The next search starts from another node: a bounded search would otherwise never pass the first nodes.
        let after =
            found.last().and_then(|c| c.first()).map_or(self.search_from, |i| InstanceId(i.0.saturating_add(1)));
        let next = graph.range(after..).next().or(graph.first_key_value());
        self.search_from = next.map_or(InstanceId(0), |(i, _)| InstanceId(i.0));
        for cycle in found {
            self.freeze(&cycle, &graph, now_ms);
        }
    }

    fn freeze(&mut self, instances: &[InstanceId], graph: &Graph, now_ms: u64) {
        let id = self.next_cycle;
        self.next_cycle += 1;
        let next = |at: usize| instances[(at + 1) % instances.len()];
        let blocks = (0..instances.len()).map(|at| graph[&instances[at]][&next(at)]).min().unwrap_or(0);
        for (at, instance) in instances.iter().enumerate() {
            let ttl_ms = u32::try_from(self.config.freeze_ms).unwrap_or(u32::MAX);
            let body = Freeze { cycle: id, creditor: next(at).0, blocks, ttl_ms };
            self.out.push_back((*instance, ControlBody::Freeze(body)));
        }
        let member = |i: &InstanceId| Member { instance: *i, frozen: None, free: 0, home: 0 };
        self.cycles.insert(
            id,
            Cycle {
                members: instances.iter().map(member).collect(),
                answer_by_ms: now_ms + self.config.answer_ms,
                end_by_ms: now_ms + self.config.freeze_ms,
                turn: None,
            },
        );
        self.stats.cycles += 1;
    }

    /// Handles a member's reply to the freeze. A member of an ended cycle is thawed again.
    pub fn on_frozen(&mut self, from: InstanceId, m: &Frozen, now_ms: u64) {
        let Some(cycle) = self.cycles.get_mut(&m.cycle) else {
            self.out.push_back((from, ControlBody::Thaw(Thaw { cycle: m.cycle })));
            return;
        };
        let Some(member) = cycle.members.iter_mut().find(|x| x.instance == from && x.frozen.is_none()) else { return };
        (member.frozen, member.free) = (Some((m.seq, m.blocks)), m.free);
        if m.blocks < self.config.blocks_min {
            self.end(m.cycle, false, now_ms);
        } else if cycle.members.iter().all(|x| x.frozen.is_some()) {
            self.begin_round(m.cycle, now_ms);
        }
    }

    /// Starts a round at the member with most free memory, or ends the swap.
    fn begin_round(&mut self, id: u64, now_ms: u64) {
        let Some(cycle) = self.cycles.get_mut(&id) else { return };
        let left = cycle.members.iter().map(Member::left).min().unwrap_or(0);
        let first = cycle.members.iter().enumerate().max_by_key(|(at, m)| (m.free, usize::MAX - at)).map_or(0, |m| m.0);
        let blocks = left.min(cycle.members[first].free).min(self.config.order_blocks_max);
        if blocks == 0 {
            self.end(id, left == 0, now_ms);
            return;
        }
        cycle.turn = Some(Turn { member: first, turns: 0, blocks, order: None, retry_at_ms: now_ms, tries: 0 });
        self.give_order(id, now_ms);
    }

    /// Orders the member of the current turn to move blocks home.
    fn give_order(&mut self, id: u64, now_ms: u64) {
        let Some(cycle) = self.cycles.get_mut(&id) else { return };
        let count = cycle.members.len();
        let Some(turn) = &mut cycle.turn else { return };
        let (source, member) = (cycle.members[(turn.member + 1) % count].instance, &cycle.members[turn.member]);
        let blocks = turn.blocks.min(member.free).min(member.left());
        let (Some((seq, _)), true) = (member.frozen, blocks > 0) else {
            self.end(id, false, now_ms);
            return;
        };
        let order = self.next_order;
        self.next_order += 1;
        turn.order = Some(order);
        let body = MoveKvCache {
            order,
            seq,
            blocks,
            source: source.0,
            target: member.instance.0,
            target_addr: String::new(),
            reason: MoveReason::Swap.into(),
            deadline_ms: u32::try_from(cycle.end_by_ms.saturating_sub(now_ms)).unwrap_or(u32::MAX),
            cycle: id,
            first: None,
        };
        self.out.push_back((member.instance, ControlBody::MoveKvCache(body)));
    }

    /// Handles the outcome of a move. Returns whether it was an order of a swap.
    pub fn on_move_outcome(&mut self, from: InstanceId, m: &MoveOutcome, now_ms: u64) -> bool {
        if m.order & ORDER_BIT == 0 {
            return false;
        }
        let holds =
            |c: &Cycle| c.turn.is_some_and(|t| t.order == Some(m.order) && c.members[t.member].instance == from);
        let Some((id, cycle)) = self.cycles.iter_mut().find(|(_, c)| holds(c)) else { return true };
        let (id, count) = (*id, cycle.members.len());
        let Some(turn) = &mut cycle.turn else { return true };
        let at = turn.member;
        // The reported number is checked: at most the ordered blocks.
        let moved = m.moved.min(turn.blocks).min(cycle.members[at].free).min(cycle.members[at].left());
        if moved == 0 {
            turn.tries += 1;
            (turn.order, turn.retry_at_ms) = (None, now_ms + self.config.retry_ms);
            if turn.tries >= self.config.tries_max {
                self.end(id, false, now_ms);
            }
            return true;
        }
        self.stats.blocks += u64::from(moved);
        cycle.members[at].home += moved;
        cycle.members[at].free -= moved;
        let next = &mut cycle.members[(at + 1) % count];
        next.free = next.free.saturating_add(moved);
        turn.turns += 1;
        if turn.turns == count {
            self.begin_round(id, now_ms);
        } else {
            (turn.member, turn.order, turn.tries) = ((at + 1) % count, None, 0);
            // Later turns move no more than this one did: the first member must get back as many blocks as it spent.
            turn.blocks = moved;
            self.give_order(id, now_ms);
        }
        true
    }

    /// Ends the cycle of an instance that left (dead, fenced, deregistered).
    pub fn on_instance_gone(&mut self, instance: InstanceId, now_ms: u64) {
        let of = |c: &Cycle| c.members.iter().any(|m| m.instance == instance);
        let over: Vec<u64> = self.cycles.iter().filter(|(_, c)| of(c)).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| self.end(id, false, now_ms));
        self.out.retain(|(to, _)| *to != instance);
        self.resting.remove(&instance);
    }

    /// Ends a cycle and thaws every member.
    fn end(&mut self, id: u64, completed: bool, now_ms: u64) {
        let Some(cycle) = self.cycles.remove(&id) else { return };
        if completed {
            self.stats.completed += 1;
        } else {
            self.stats.aborted += 1;
        }
        for member in cycle.members {
            self.resting.insert(member.instance, now_ms + self.config.rest_ms);
            self.out.push_back((member.instance, ControlBody::Thaw(Thaw { cycle: id })));
        }
    }
}

impl Member {
    /// Frozen blocks that are not home yet.
    fn left(&self) -> u32 {
        self.frozen.map_or(0, |(_, blocks)| blocks.saturating_sub(self.home))
    }
}
