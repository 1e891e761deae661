//! The gManager: who is in the pool, who owes whom, whom to ask for blocks (the contract protocol, Infinite-LLM v1
//! §4.4), and where each request's rBlocks lie and shall lie (the placement protocol, v2 §6).
//!
//! It knows what heartbeats tell it, no more: loose coherence. Its advice and its orders may be stale; the creditor or
//! the target decides. It persists nothing: one that starts anew asks every instance for its full rows.
//! Invariants:
//! * every instance of the pool has the same [`PoolShape`], the one of the first;
//! * a number is given to one process; a process that comes back (same incarnation) keeps its number, also towards a
//!   gManager that has forgotten it;
//! * an instance that is silent for [`limits::HEARTBEAT_STALE_MS`] is not recommended and not planned with, is fenced
//!   after [`limits::FENCE_MS`], and is forgotten after [`limits::INSTANCE_FORGET_MS`];
//! * at most one order for a request is in progress, and a request rests after it.
//!
//! [`GManager::poll`] hands out what is to be sent to others than the asker; the methods' answers go to the asker.

mod admin;
mod advise;
mod drain;
mod fence;
mod heartbeat;
mod member;
mod oldest_heads;
mod orders;
mod placements;
mod register;
mod roles;
mod rounds;
mod shape;
mod swaps;
#[cfg(test)]
mod tests;
mod workers;

pub use advise::serve_query;
pub use roles::SwitchedBy;

use crate::dgfm::{Dgfm, DgfmConfig, DgfmStats};
use crate::planner::{Planner, PlannerConfig, PoolView};
use crate::roles::BalancerConfig;
use advise::Sorted;
use fence::Fences;
use lagoon_protocol::{ControlBody, InstanceStatus, PoolShape, Rejected, StatusReply};
use lagoon_types::{InstanceId, limits};
use lagoon_view::SortedView;
use member::Member;
use oldest_heads::OldestHeads;
use orders::Orders;
use roles::RoleOrders;
use rounds::Rounds;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use workers::WorkerList;

/// One edge of the global debt ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LedgerRow {
    pub creditor: InstanceId,
    pub debtor: InstanceId,
    pub blocks: u32,
}

/// How a gManager coordinates.
#[derive(Clone, Debug)]
pub struct GManagerConfig {
    /// Numbers are given from here on; not 0.
    pub first_instance: u32,
    /// Which gManager of the pool this is: a later one has a larger term.
    pub term: u64,
    /// Instances at most; memory for the view of creditors is reserved for as many.
    pub instances_max: usize,
    /// Without one nothing is moved but by drains and operators.
    pub planner: Option<PlannerConfig>,
    /// Time between planning rounds.
    pub plan_ms: u64,
    /// Without one, debts that became circular stay until their requests end.
    pub dgfm: Option<DgfmConfig>,
    /// Without one roles change by operators' orders only.
    pub balancer: Option<BalancerConfig>,
}

impl Default for GManagerConfig {
    fn default() -> Self {
        let instances_max = limits::INSTANCES_MAX;
        Self {
            first_instance: 1,
            term: 0,
            instances_max,
            planner: None,
            plan_ms: limits::PLAN_MS,
            dgfm: None,
            balancer: None,
        }
    }
}

/// What a gManager wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum GManagerOutput {
    /// Send on the connection on which `to` registered; may be dropped if it is gone (what matters is repeated).
    Send { to: InstanceId, body: ControlBody },
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GManagerStats {
    pub rounds: u64,
    /// Orders to move KV that were given, that moved all they should, and that moved less or nothing.
    pub moves_given: u64,
    pub moves_done: u64,
    pub moves_failed: u64,
    pub blocks_moved: u64,
    pub fenced: u64,
    /// Instances without a calibration in the last round.
    pub assumed: u32,
}

/// The coordinator of one pool. See the module for invariants.
#[derive(Debug)]
pub struct GManager {
    config: GManagerConfig,
    shape: Option<PoolShape>,
    next: u32,
    members: BTreeMap<InstanceId, Member>,
    by_incarnation: BTreeMap<u64, InstanceId>,
    by_addr: BTreeMap<String, InstanceId>,
    /// When each member is looked at next, unless it is heard before.
    checks: BTreeSet<(u64, InstanceId)>,
    /// Members that are live, and those that are silent but not fenced.
    live: usize,
    silent: usize,
    sorted: Sorted,
    /// For the planner: live members, with the rows of the request placement map by debtor.
    pool: PoolView,
    /// By debtor: how many rows each creditor has of it.
    remote_requests: BTreeMap<InstanceId, BTreeMap<InstanceId, usize>>,
    rounds: Rounds,
    oldest_heads: OldestHeads,
    orders: Orders,
    fences: Fences,
    workers: WorkerList,
    role_orders: RoleOrders,
    dgfm: Option<Dgfm>,
    drain_at_ms: u64,
    outputs: VecDeque<GManagerOutput>,
    stats: GManagerStats,
    /// The last time that it was told, and since when it is told without a gap.
    now_ms: u64,
    awake_ms: u64,
}

impl Default for GManager {
    fn default() -> Self {
        Self::new(1)
    }
}

fn reject<T>(reason: String) -> Result<T, Rejected> {
    Err(Rejected { reason })
}

impl GManager {
    /// An empty pool without a planner and without DGFM. Numbers are given from `first_instance` (not 0) on.
    #[must_use]
    pub fn new(first_instance: u32) -> Self {
        Self::with_config(GManagerConfig { first_instance, ..GManagerConfig::default() })
    }

    /// An empty pool.
    ///
    /// # Panics
    /// If `first_instance` is 0.
    #[must_use]
    pub fn with_config(config: GManagerConfig) -> Self {
        assert_ne!(config.first_instance, 0, "0 is never assigned");
        let planner = config.planner.clone().map(Planner::new);
        Self {
            shape: None,
            next: config.first_instance,
            members: BTreeMap::new(),
            by_incarnation: BTreeMap::new(),
            by_addr: BTreeMap::new(),
            checks: BTreeSet::new(),
            live: 0,
            silent: 0,
            sorted: Sorted::new(config.instances_max),
            pool: PoolView::default(),
            remote_requests: BTreeMap::new(),
            rounds: Rounds::new(planner, config.plan_ms),
            oldest_heads: OldestHeads::default(),
            orders: Orders::new(config.term),
            fences: Fences::default(),
            workers: WorkerList::new(config.term),
            role_orders: RoleOrders::new(config.term, config.balancer.clone()),
            dgfm: config.dgfm.clone().map(|dgfm| Dgfm::new(dgfm, config.term)),
            drain_at_ms: 0,
            outputs: VecDeque::new(),
            stats: GManagerStats::default(),
            now_ms: 0,
            awake_ms: 0,
            config,
        }
    }

    /// Handles any control message; the answer, if any, goes back on its connection. `from` is the instance that
    /// registered on that connection; what needs one is ignored without it, or in another's name.
    pub fn on_control(&mut self, from: Option<InstanceId>, body: &ControlBody, now_ms: u64) -> Option<ControlBody> {
        let is_from = |instance: u32| from == Some(InstanceId(instance));
        match body {
            ControlBody::Register(m) => Some(match self.on_register(m, now_ms) {
                Ok(registered) => ControlBody::Registered(registered),
                Err(rejected) => ControlBody::Rejected(rejected),
            }),
            ControlBody::Heartbeat(m) if is_from(m.instance) => {
                Some(ControlBody::HeartbeatAck(self.on_heartbeat(m, now_ms)))
            }
            ControlBody::BorrowQuery(m) if is_from(m.debtor) => {
                Some(ControlBody::BorrowAdvice(self.on_borrow_query(m, now_ms)))
            }
            ControlBody::Refusal(m) if from.is_some() => {
                self.on_refusal(m);
                None
            }
            ControlBody::MoveOutcome(m) => {
                from.into_iter().for_each(|from| self.on_move_outcome(from, m, now_ms));
                None
            }
            ControlBody::Frozen(m) => {
                from.into_iter().for_each(|from| self.on_frozen(from, m, now_ms));
                None
            }
            ControlBody::Deregister(m) if is_from(m.instance) => {
                self.on_deregister(InstanceId(m.instance));
                None
            }
            ControlBody::StatusQuery(m) => Some(ControlBody::StatusReply(StatusReply {
                query: m.query,
                instances: self.status(now_ms),
                term: self.config.term,
            })),
            ControlBody::AdminQuery(m) => Some(ControlBody::AdminReply(self.on_admin(m, now_ms))),
            _ => None,
        }
    }

    /// Time passes: silence is noticed, rounds are planned, what was not answered is told again. Returns the instances
    /// that are forgotten after a long silence.
    pub fn tick(&mut self, now_ms: u64) -> Vec<InstanceId> {
        self.on_time(now_ms);
        let forgotten = self.lapse();
        self.repeat_fences();
        self.expire_orders();
        self.drain_members();
        self.balance_roles();
        self.repeat_roles();
        self.swap();
        self.plan_round();
        self.refresh_view();
        forgotten
    }

    /// When [`GManager::tick`] has something to do next, if nothing else happens.
    #[must_use]
    pub fn next_wake_ms(&self) -> Option<u64> {
        let check = self.checks.first().map(|c| c.0);
        let drains = self.members.values().any(Member::is_draining).then_some(self.drain_at_ms);
        let view = self.sorted.next_wake_ms();
        let swaps = self.dgfm.as_ref().map(Dgfm::next_wake_ms);
        let own = [self.fences.next_wake_ms(), self.orders.next_wake_ms(), self.roles_wake_ms()];
        let wakes = [check, drains, view, swaps].into_iter().chain(own);
        wakes.flatten().chain(self.rounds.next_wake_ms()).min()
    }

    /// What is to be sent; until `None`.
    pub fn poll(&mut self) -> Option<GManagerOutput> {
        self.outputs.pop_front()
    }

    fn send(&mut self, to: InstanceId, body: ControlBody) {
        self.outputs.push_back(GManagerOutput::Send { to, body });
    }

    /// Takes the time. After a gap in it nobody was heard because this process slept.
    fn on_time(&mut self, now_ms: u64) {
        if now_ms > self.now_ms + limits::GMANAGER_PAUSE_MS {
            self.awake_ms = now_ms;
        }
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// For threads that answer [`lagoon_protocol::BorrowQuery`] by themselves, with [`serve_query`].
    #[must_use]
    pub fn view(&self) -> SortedView {
        self.sorted.view()
    }

    /// The connection (not 0) on which an instance registered, for [`serve_query`].
    pub fn set_conn(&mut self, instance: InstanceId, conn: u64) {
        if let Some(member) = self.members.get(&instance) {
            self.sorted.writer.set_conn(member.slot, conn);
        }
    }

    /// The shape that instances of this pool have; `None` before the first.
    #[must_use]
    pub fn shape(&self) -> Option<&PoolShape> {
        self.shape.as_ref()
    }

    /// Which gManager this is.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.config.term
    }

    #[must_use]
    pub fn stats(&self) -> GManagerStats {
        self.stats
    }

    /// What became of circular debts; `None` without DGFM.
    #[must_use]
    pub fn dgfm_stats(&self) -> Option<DgfmStats> {
        self.dgfm.as_ref().map(Dgfm::stats)
    }

    /// What the planner sees.
    #[must_use]
    pub fn pool(&self) -> &PoolView {
        &self.pool
    }

    /// The global debt ledger, by creditor and debtor, as of the last heartbeats of members that are not fenced.
    #[must_use]
    pub fn ledger(&self) -> Vec<LedgerRow> {
        let members = self.members.iter().filter(|(_, m)| !m.is_fenced());
        let rows = members.flat_map(|(id, m)| {
            let lent = m.heartbeat.iter().flat_map(|h| &h.lent);
            lent.map(|d| LedgerRow { creditor: *id, debtor: InstanceId(d.debtor), blocks: d.blocks })
        });
        rows.collect()
    }

    /// Every known instance, by number.
    #[must_use]
    pub fn status(&self, now_ms: u64) -> Vec<InstanceStatus> {
        let row = |(id, m): (&InstanceId, &Member)| InstanceStatus {
            instance: id.0,
            name: m.registration.name.clone(),
            quic_addr: m.registration.quic_addr.clone(),
            http_addr: m.registration.http_addr.clone(),
            role: m.role().into(),
            backend: m.registration.backend.clone(),
            heartbeat: m.heartbeat.clone().map(|h| m.with_role(m.with_drain(h))),
            heartbeat_age_ms: now_ms.saturating_sub(m.seen_ms),
            alive: m.is_live(now_ms),
            tier: m.registration.tier,
            calibration: m.registration.calibration.clone(),
            lend_blocks_max: m.registration.lend_blocks_max,
        };
        self.members.iter().map(row).collect()
    }
}
