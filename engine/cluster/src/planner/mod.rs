//! Planner: decides which blocks of which request move where (Infinite-LLM v2 §5, Algorithm 1).
//!
//! ```text
//! gManager: PoolView (kept up to date) ── plan() ──> Plan { orders } ── move_kvcache ──> debtors
//!                                          └ commit(): the orders that were sent, for the hysteresis
//! ```
//!
//! A round has these phases, and each order changes the working state of later ones:
//! 1. **reclaim** (`reclaim.rs`): blocks leave creditors that are short of memory;
//! 2. **retrieve** (`retrieve.rs`): debtors with room take blocks home if throughput gains;
//! 3. **offload** (`offload.rs`): Algorithm 1. Debtors in ascending batch, for each the longest requests and a few
//!    creditors; the best number of blocks by the performance model ([`crate::perf::Pair::best`]).
//!
//! Decisions that the listing leaves open:
//! * k is limited by the creditor's spare blocks, by the stretch of its step, by the link's rate, and first of all by the
//!   debtor's local work, which must cover the remote part (the borrow guard, [`crate::perf::StepTimes`]); an uncovered
//!   remote part is ordered only by a debtor that is short of memory, and if no covered one gains;
//! * the batch that freed space admits is predicted from the queue, in order; growth of running sequences within a horizon
//!   counts as used, so that blocks are placed before an instance is full;
//! * an instance that has lent is no debtor and one that has borrowed no creditor, also within a round; frozen instances
//!   take no part; a draining or paused one receives nothing;
//! * moved blocks are not moved back within [`PlannerConfig::hold_ms`] except by reclaims, and a move must gain
//!   [`PlannerConfig::gain_min`]. The model values states, not transitions, so that a move and its reverse cannot both
//!   gain; a test checks that otherwise unchanged pools settle.
//!
//! Cost: one visit per instance, requests only of debtors, and bounded searches per round; the benchmark `gmanager`
//! measures it for up to 10,000 instances.

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

/// Reason of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// The creditor needs its memory back.
    Reclaim,
    /// The debtor has room again.
    Retrieve,
    /// Memory or time of the debtor is worth more than the creditor's.
    Offload,
}

/// Order to a debtor: `move_kvcache(seq, blocks, target)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Order {
    pub debtor: InstanceId,
    pub seq: SeqId,
    /// Not 0.
    pub blocks: u32,
    /// Source of the blocks: the debtor or a creditor.
    pub source: InstanceId,
    /// Target of the blocks: the debtor or a creditor; not the source.
    pub target: InstanceId,
    pub why: Why,
    /// Expected change of the pool's throughput after the whole move, of which this order may be a part; 0 for reclaims.
    pub gain_tokens_per_s: f64,
}

/// Plan: the result of a round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// At most [`PlannerConfig::orders_max`]; reclaims first, then retrievals and offloads.
    pub orders: Vec<Order>,
    /// Number of instances without a calibration, for which [`PlannerConfig::assumed`] was used; for a log line and a metric.
    pub assumed: u32,
    /// Predicted throughput of the pool before the orders (v2 Eq. 7), in tokens per second.
    pub tokens_per_s: f64,
}

/// Configuration of the planner. [`PlannerConfig::default`] is meant for production.
#[derive(Clone, Debug)]
pub struct PlannerConfig {
    pub model: ModelConfig,
    /// Calibration assumed for instances that reported none.
    pub assumed: Calibration,
    /// Link assumed where neither end measured one.
    pub assumed_link: LinkView,
    /// β^thres: an instance with at most this batch is a debtor even without a queue.
    pub batch_small: u32,
    /// U^thres: an instance with at most this share of its memory in use is a creditor.
    pub creditor_use_max: f64,
    /// Largest stretch of a creditor's step by remote requests, as a factor (v1 §4.6: threshold of lending compute).
    pub creditor_stretch_max: f64,
    /// Horizon of predicted growth: blocks move this long before they are missing.
    pub horizon_ms: u64,
    /// Longest time of a whole move at its link's rate.
    pub move_ms_max: u64,
    /// Longest time of one order; the rest of a move follows in later rounds.
    pub order_ms_max: u64,
    /// Smallest gain of a move, as a share of the two instances' current throughput.
    pub gain_min: f64,
    /// Expected number of tokens still to generate per request: KV comes home if the copy pays off within them.
    pub tokens_expected: f64,
    /// Time in which moved blocks are not moved back (except by reclaims).
    pub hold_ms: u64,
    /// Requests considered per debtor, longest first.
    pub requests_max: usize,
    /// Creditors compared for one move, besides known and near ones.
    pub creditors_max: usize,
    /// Pairs of debtor and creditor searched for offloads in one round; bounds its time.
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
        // A small model on a CPU. It should be slow rather than fast, so that an uncalibrated creditor gets less work.
        let point = |batch, step_us| BatchPoint { batch, step_us };
        Self {
            model: ModelConfig::default(),
            assumed: Calibration {
                batches: vec![point(1, 50_000.0), point(16, 100_000.0)],
                attention_us_per_ktoken: 2_000.0,
                prefill_us_per_token: 5_000.0,
                copy_bytes_per_s: 1e9,
                prompt_attention_us_per_ktoken: 0.0,
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

/// Planner, with its recent orders. See the module.
#[derive(Debug)]
pub struct Planner {
    config: PlannerConfig,
    recent: BTreeMap<(InstanceId, SeqId, Towards), u64>,
}

impl Planner {
    /// A planner without recent orders.
    ///
    /// # Panics
    /// If [`PlannerConfig::assumed`] or [`PlannerConfig::assumed_link`] is not finite and positive.
    #[must_use]
    pub fn new(config: PlannerConfig) -> Self {
        assert!(Rates::new(&config.assumed, true).is_some(), "the assumed calibration makes no sense");
        let link = config.assumed_link;
        let positive = |x: f64| x.is_finite() && x > 0.0;
        assert!(positive(link.rtt_us) && positive(link.bytes_per_s), "the assumed link makes no sense");
        Self { config, recent: BTreeMap::new() }
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &PlannerConfig {
        &self.config
    }

    /// Computes the orders of a round without changing the planner, also for operators (`AdminPlan`). Report the orders that
    /// were sent with [`Planner::commit`].
    #[must_use]
    pub fn plan(&self, view: &PoolView) -> Plan {
        let mut round = Round::new(view, &self.config);
        round.plan.tokens_per_s = round.tokens_per_s();
        let ids: Vec<InstanceId> = round.nodes.iter().map(|n| n.id).collect();
        let held = |towards: Towards| {
            let ids = &ids;
            move |debtor: usize, seq: SeqId| {
                let recent = self.recent.get(&(ids[debtor], seq, towards));
                recent.is_some_and(|at_ms| view.now_ms < at_ms + self.config.hold_ms)
            }
        };
        reclaim::plan(&mut round);
        retrieve::plan(&mut round, &held(Towards::Creditor));
        offload::plan(&mut round, &held(Towards::Debtor));
        round.plan
    }

    /// Records the orders sent at `now_ms`, so that they are not undone within [`PlannerConfig::hold_ms`].
    pub fn commit(&mut self, orders: &[Order], now_ms: u64) {
        let hold = self.config.hold_ms;
        self.recent.retain(|_, at_ms| now_ms < *at_ms + hold);
        // Moves between creditors undo nothing.
        let towards = |o: &Order| match (o.source == o.debtor, o.target == o.debtor) {
            (true, _) => Some(Towards::Creditor),
            (_, true) => Some(Towards::Debtor),
            (false, false) => None,
        };
        self.recent.extend(orders.iter().filter_map(|o| Some(((o.debtor, o.seq, towards(o)?), now_ms))));
    }
}

/// Where blocks of a request were moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Towards {
    /// Home.
    Debtor,
    /// From the debtor to a creditor.
    Creditor,
}

/// Dispatch of a new request: the instance with most free memory beyond its queue's needs, the lowest number of equals;
/// `None` if no instance takes requests (v2 §6.1).
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
