//! gManager: the pool's members, debt ledger and borrow queries (the contract protocol, Infinite-LLM v1 §4.4), and the
//! request placement map with its orders (the placement protocol, v2 §6).
//!
//! Its state comes from heartbeats only: loose coherence. Its advice and orders may be stale; the creditor or the target
//! decides. It must never persist anything: after a restart it requests every instance's full placement rows. Invariants:
//! * every instance of the pool has the same [`PoolShape`], the one of the first;
//! * a number belongs to one process; a returning process (same incarnation) keeps its number, also at a gManager that
//!   has forgotten it;
//! * an instance without a heartbeat for [`limits::HEARTBEAT_STALE_MS`] is neither recommended nor planned with, is fenced
//!   after [`limits::FENCE_MS`], and is forgotten after [`limits::INSTANCE_FORGET_MS`];
//! * at most one order per request is in progress, and a request rests after it.
//!
//! The gManager process calls it. Replies are return values; [`GManager::poll`] returns messages to other instances.

mod admin;
mod advise;
mod cache_drops;
mod cached;
mod drain;
mod fence;
mod heartbeat;
mod member;
mod oldest_heads;
mod orders;
mod placed;
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
pub use shape::model_shape;

use crate::dgfm::{Dgfm, DgfmConfig, DgfmStats, LedgerRow};
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
use placed::PlacedPrefixes;
use roles::RoleOrders;
use rounds::Rounds;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use workers::WorkerList;

/// Configuration of a gManager.
#[derive(Clone, Debug)]
pub struct GManagerConfig {
    /// First instance number to assign; not 0.
    pub first_instance: u32,
    /// Term of this gManager: a later one has a larger term.
    pub term: u64,
    /// Largest number of instances; the view of creditors reserves memory for as many.
    pub instances_max: usize,
    /// Planner; without it only drains and operators move blocks.
    pub planner: Option<PlannerConfig>,
    /// Time between planning rounds.
    pub plan_ms: u64,
    /// DGFM; without it circular debts stay until their requests end.
    pub dgfm: Option<DgfmConfig>,
    /// Role balancer; without it only operators change roles.
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

/// Output of a gManager, for its process to execute.
#[derive(Clone, Debug, PartialEq)]
pub enum GManagerOutput {
    /// Send on the connection on which `to` registered. Dropped if that connection is closed: important messages are repeated.
    Send { to: InstanceId, body: ControlBody },
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GManagerStats {
    pub rounds: u64,
    /// `move_kvcache` orders sent, those that moved all their blocks, and those that moved fewer.
    pub moves_given: u64,
    pub moves_done: u64,
    pub moves_failed: u64,
    pub blocks_moved: u64,
    pub fenced: u64,
    /// Instances without a calibration in the last round.
    pub assumed: u32,
}

/// gManager: coordinator of one pool. See the module for invariants.
#[derive(Debug)]
pub struct GManager {
    config: GManagerConfig,
    shape: Option<PoolShape>,
    next: u32,
    members: BTreeMap<InstanceId, Member>,
    by_incarnation: BTreeMap<u64, InstanceId>,
    by_addr: BTreeMap<String, InstanceId>,
    /// Time of the next silence check of each member.
    checks: BTreeSet<(u64, InstanceId)>,
    /// Numbers of live members, and of silent ones that are not fenced.
    live: usize,
    silent: usize,
    sorted: Sorted,
    /// Planner's view: live members, with the request placement map by debtor.
    pool: PoolView,
    /// By debtor: number of placement rows at each creditor.
    remote_requests: BTreeMap<InstanceId, BTreeMap<InstanceId, usize>>,
    rounds: Rounds,
    oldest_heads: OldestHeads,
    orders: Orders,
    fences: Fences,
    workers: WorkerList,
    role_orders: RoleOrders,
    dgfm: Option<Dgfm>,
    drain_at_ms: u64,
    /// Number of the last order to empty prefix caches.
    cache_drops: u64,
    placed: PlacedPrefixes,
    outputs: VecDeque<GManagerOutput>,
    stats: GManagerStats,
    /// Time of the last call, and start of the calls without a pause of `GMANAGER_PAUSE_MS`.
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
    /// An empty pool without planner and DGFM. Instance numbers start from `first_instance` (not 0).
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
            cache_drops: config.term << 24,
            placed: PlacedPrefixes::default(),
            outputs: VecDeque::new(),
            stats: GManagerStats::default(),
            now_ms: 0,
            awake_ms: 0,
            config,
        }
    }

    /// Handles a control message and returns the reply for its connection, if any. `from` is the instance that registered on
    /// that connection; messages that need one are ignored without it, or if they name another instance.
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
                instances: match &m.prefixes {
                    None => self.status(now_ms),
                    // Gateways need no tenants, and their prefixes take that room in the frame.
                    Some(_) => {
                        let mut rows = self.status(now_ms);
                        let caches = rows.iter_mut().filter_map(|row| row.heartbeat.as_mut()?.cache.as_mut());
                        caches.for_each(|cache| cache.tenants.clear());
                        rows
                    }
                },
                term: self.config.term,
                prefixes: m.prefixes.as_deref().map(|of| Box::new(self.placed.exchange(of, self.config.term))),
            })),
            ControlBody::AdminQuery(m) => Some(ControlBody::AdminReply(Box::new(self.on_admin(m, now_ms)))),
            _ => None,
        }
    }

    /// Handles time: detects silent instances, plans rounds, repeats unacknowledged messages. Returns the instances forgotten
    /// after [`limits::INSTANCE_FORGET_MS`].
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

    /// Time of the next due [`GManager::tick`].
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

    /// Takes the next output; call it until `None`.
    pub fn poll(&mut self) -> Option<GManagerOutput> {
        self.outputs.pop_front()
    }

    fn send(&mut self, to: InstanceId, body: ControlBody) {
        self.outputs.push_back(GManagerOutput::Send { to, body });
    }

    /// Advances the clock. After a gap of `GMANAGER_PAUSE_MS` heartbeats were missed because this process was stopped.
    fn on_time(&mut self, now_ms: u64) {
        if now_ms > self.now_ms + limits::GMANAGER_PAUSE_MS {
            self.awake_ms = now_ms;
        }
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// View of creditors for threads that answer [`lagoon_protocol::BorrowQuery`] with [`serve_query`].
    #[must_use]
    pub fn view(&self) -> SortedView {
        self.sorted.view()
    }

    /// Sets the connection (not 0) on which an instance registered, for [`serve_query`].
    pub fn set_conn(&mut self, instance: InstanceId, conn: u64) {
        if let Some(member) = self.members.get(&instance) {
            self.sorted.writer.set_conn(member.slot, conn);
        }
    }

    /// Shape of this pool's instances; `None` before the first.
    #[must_use]
    pub fn shape(&self) -> Option<&PoolShape> {
        self.shape.as_ref()
    }

    /// Term of this gManager.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.config.term
    }

    /// Its counts.
    #[must_use]
    pub fn stats(&self) -> GManagerStats {
        self.stats
    }

    /// Counters of DGFM; `None` without it.
    #[must_use]
    pub fn dgfm_stats(&self) -> Option<DgfmStats> {
        self.dgfm.as_ref().map(Dgfm::stats)
    }

    /// The planner's view of the pool.
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

    /// Status of every known instance, by number.
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
            calibration: m.registration.calibration.as_deref().cloned(),
            lend_blocks_max: m.registration.lend_blocks_max,
        };
        self.members.iter().map(row).collect()
    }
}
