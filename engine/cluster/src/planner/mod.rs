//! The planner: which blocks of which request shall lie where (Infinite-LLM v2 §5, Algorithm 1).
//!
//! ```text
//! gManager: PoolView (kept up to date) ── plan() ──> Plan { orders } ── move_kvcache ──> debtors
//!                                          └ commit(): what was really ordered, for the hysteresis
//! ```
//!
//! A round goes through the pool in this order, and each order of it changes what later ones see:
//! 1. **reclaim** (`reclaim.rs`): blocks leave creditors that are short of memory;
//! 2. **retrieve** (`retrieve.rs`): debtors that have room take blocks home where that gains;
//! 3. **offload** (`offload.rs`): Algorithm 1. Debtors in ascending batch, for each the longest requests and a few
//!    creditors; the best number of blocks by the performance model ([`crate::perf::Pair::best`]).
//!
//! What the listing leaves open, decided here:
//! * k is limited by what the creditor can spare, by how much longer its own step may take, by what the link carries in
//!   time, and first of all by what the debtor's local work covers; a remote part that is waited for is ordered only if
//!   nothing covered gains;
//! * the batch that freed space admits is predicted from the queue, in order; what running sequences will grow by within a
//!   horizon is missing already now, so that blocks are placed before an instance is full;
//! * an instance that has lent is no debtor and one that has borrowed no creditor, also within a round; nobody is paired
//!   with itself; frozen instances are left alone; a draining or paused one takes nothing;
//! * what was moved is not moved back within [`PlannerConfig::hold_ms`] except by reclaims, and a move must gain
//!   [`PlannerConfig::gain_min`]. The model values states, not the way to them, so that a move and its reverse cannot both
//!   gain; a test lets pools in which nothing else changes settle.
//!
//! Cost: an instance is looked at once, a request only on debtors, and the searches of a round are bounded; the benchmark
//! `gmanager` measures it for up to 10,000 instances.

mod offload;
mod reclaim;
mod retrieve;
mod round;
#[cfg(test)]
mod tests;
mod view;

pub use view::{InstanceView, PoolView, RemoteBlocks, RequestView};

use crate::perf::{LinkView, ModelConfig, Rates};
use lagoon_protocol::{BatchPoint, Calibration};
use lagoon_types::{InstanceId, SeqId, limits};
use round::Round;
use std::collections::BTreeMap;

/// Why the planner gives an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// The creditor needs its memory back.
    Reclaim,
    /// The debtor has room again.
    Retrieve,
    /// Space or time on the debtor is worth more than on the creditor.
    Offload,
}

/// `move_kvcache(seq, blocks, target)` to `debtor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Order {
    pub debtor: InstanceId,
    pub seq: SeqId,
    /// Not 0.
    pub blocks: u32,
    /// Where they lie: the debtor or a creditor.
    pub source: InstanceId,
    /// Where they shall lie: the debtor or a creditor; not the source.
    pub target: InstanceId,
    pub why: Why,
    /// Expected change of the pool's throughput when the whole move that this order is a part of is done. Orders that
    /// are given for another reason (reclaim) may have a negative one.
    pub gain_tokens_per_s: f64,
}

/// The outcome of a round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// At most [`PlannerConfig::orders_max`]; reclaims first, then retrievals and offloads.
    pub orders: Vec<Order>,
    /// Instances without a calibration, for which [`PlannerConfig::assumed`] stood in: a log line and a metric, not a
    /// silent guess.
    pub assumed: u32,
    /// Predicted throughput of the pool before the orders (v2 Eq. 7), in tokens per second.
    pub tokens_per_s: f64,
}

/// How the planner decides. [`PlannerConfig::default`] is meant for production.
#[derive(Clone, Debug)]
pub struct PlannerConfig {
    pub model: ModelConfig,
    /// Stands in for the calibration that an instance did not report.
    pub assumed: Calibration,
    /// Stands in for a link that neither end measured.
    pub assumed_link: LinkView,
    /// β^thres: an instance with at most so many sequences is a debtor even if nothing waits there.
    pub batch_small: u32,
    /// U^thres: an instance whose memory is used to at most this share is a creditor.
    pub creditor_use_max: f64,
    /// A creditor's step takes at most so many times what it takes without remote requests (v1 §4.6: lending compute has a
    /// threshold).
    pub creditor_stretch_max: f64,
    /// Growth is foreseen this far ahead: blocks are moved before they are missing.
    pub horizon_ms: u64,
    /// What is decided at once takes at most this long at its link's rate.
    pub move_ms_max: u64,
    /// One order takes at most this long; the rest follows in later rounds.
    pub order_ms_max: u64,
    /// Gain below which nothing moves, as a share of what the two instances do now.
    pub gain_min: f64,
    /// Tokens that a request is expected to generate yet: KV comes home if the copy has paid for itself within these.
    pub tokens_expected: f64,
    /// What was moved is not moved back for so long (reclaims may).
    pub hold_ms: u64,
    /// Requests of one debtor that are considered, longest first.
    pub requests_max: usize,
    /// Creditors that are compared for one move.
    pub creditors_max: usize,
    /// Pairs of a debtor and a creditor that are searched for offloads in one round: what bounds its time.
    pub pairs_max: usize,
    /// Orders to one debtor in a round.
    pub debtor_orders_max: usize,
    /// Blocks of one order; the rest of a larger move follows in later rounds.
    pub order_blocks_max: u32,
    /// Orders of a round.
    pub orders_max: usize,
}

impl Default for PlannerConfig {
    fn default() -> Self {
        // A small model on a processor: the point where nothing is known. Every other instance is compared with it, so it
        // must be slow rather than fast: an unknown creditor then gets less work, not more.
        let point = |batch, step_us| BatchPoint { batch, step_us };
        Self {
            model: ModelConfig::default(),
            assumed: Calibration {
                batches: vec![point(1, 50_000.0), point(16, 100_000.0)],
                attention_us_per_ktoken: 2_000.0,
                prefill_us_per_token: 5_000.0,
                copy_bytes_per_s: 1e9,
            },
            assumed_link: LinkView { rtt_us: 1_000.0, bytes_per_s: 1e8 },
            batch_small: 4,
            creditor_use_max: 0.8,
            creditor_stretch_max: 2.0,
            horizon_ms: 1_000,
            move_ms_max: 60_000,
            order_ms_max: limits::MOVE_DEADLINE_MS,
            gain_min: 0.02,
            tokens_expected: 256.0,
            hold_ms: 10_000,
            requests_max: 4,
            creditors_max: 4,
            pairs_max: 40_000,
            debtor_orders_max: 4,
            order_blocks_max: 1_024,
            orders_max: 4_096,
        }
    }
}

/// The planner, with its memory of recent orders. See the module.
#[derive(Debug)]
pub struct Planner {
    config: PlannerConfig,
    recent: BTreeMap<(InstanceId, SeqId), Recent>,
}

impl Planner {
    /// A planner that has ordered nothing yet.
    ///
    /// # Panics
    /// If [`PlannerConfig::assumed`] or [`PlannerConfig::assumed_link`] make no sense.
    #[must_use]
    pub fn new(config: PlannerConfig) -> Self {
        assert!(Rates::new(&config.assumed, true).is_some(), "the assumed calibration makes no sense");
        let link = config.assumed_link;
        let positive = |x: f64| x.is_finite() && x > 0.0;
        assert!(positive(link.rtt_us) && positive(link.bytes_per_s), "the assumed link makes no sense");
        Self { config, recent: BTreeMap::new() }
    }

    #[must_use]
    pub fn config(&self) -> &PlannerConfig {
        &self.config
    }

    /// The orders of a round. Changes nothing: what is really ordered is told with [`Planner::commit`], so that an
    /// operator may look at a plan (`AdminPlan`).
    #[must_use]
    pub fn plan(&self, view: &PoolView) -> Plan {
        let mut round = Round::new(view, &self.config);
        round.plan.tokens_per_s = round.tokens_per_s();
        let ids: Vec<InstanceId> = round.nodes.iter().map(|n| n.id).collect();
        let held = |away: bool| {
            let ids = &ids;
            move |debtor: usize, seq: SeqId| {
                let recent = self.recent.get(&(ids[debtor], seq));
                recent.is_some_and(|r| r.away != away && view.now_ms < r.at_ms + self.config.hold_ms)
            }
        };
        reclaim::plan(&mut round);
        retrieve::plan(&mut round, &held(false));
        offload::plan(&mut round, &held(true));
        round.plan
    }

    /// These orders were given at `now_ms`: they are not undone at once. Forgets what is older than
    /// [`PlannerConfig::hold_ms`].
    pub fn commit(&mut self, orders: &[Order], now_ms: u64) {
        let hold = self.config.hold_ms;
        self.recent.retain(|_, r| now_ms < r.at_ms + hold);
        let recent = |o: &Order| Recent { at_ms: now_ms, away: o.target != o.debtor };
        self.recent.extend(orders.iter().map(|o| ((o.debtor, o.seq), recent(o))));
    }
}

/// The last order for a request.
#[derive(Clone, Copy, Debug)]
struct Recent {
    at_ms: u64,
    /// Away from its debtor, or home.
    away: bool,
}

/// Where a new request had best be sent: the instance with most free memory that its queue does not
/// want already (v2 §6.1), the lowest number of several. `None` if no instance takes requests.
#[must_use]
pub fn dispatch(view: &PoolView) -> Option<InstanceId> {
    let takes = |v: &InstanceView| v.role.serves() && !v.draining;
    let room = |v: &InstanceView| {
        let queued: i64 = v.load.queue_blocks.iter().map(|b| i64::from(*b)).sum();
        i64::from(v.blocks_free) - i64::from(v.blocks_incoming) - queued
    };
    let candidates = view.instances.iter().filter(|(_, v)| takes(v));
    candidates.max_by_key(|(id, v)| (room(v), std::cmp::Reverse(**id))).map(|(id, _)| *id)
}
