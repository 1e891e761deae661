//! Dispatch policy: the instance that a request should go to.
//!
//! [`LeastWork`] predicts, from an instance's calibration and its last heartbeat, the time until it has done everything that it has,
//! the request included: prompts at the measured prefill rate, answers at the batch's step time (Infinite-LLM v2 Eq. 5), both
//! stretched by the remote attention that it computes for debtors (Eq. 6), and the wait for memory that the request lacks there. A
//! prompt's cached prefix costs nothing. [`free_memory`] is the policy of v2 §6.1 instead, which sees no queues.
//!
//! Pure functions. The gateway's [`super::Dispatcher`] and the simulator call them.

use crate::perf::{Rates, as_f64};
use crate::planner::PlannerConfig;
use lagoon_protocol::{Calibration, Load};
use lagoon_types::limits::GROWTH_BLOCKS;

/// Tokens expected of an answer before any has ended.
pub const ANSWER_TOKENS_ASSUMED: f64 = 256.0;
/// Largest share of a device's time that remote attention for debtors is taken to need.
const LENT_SHARE_MAX: f64 = 0.9;
/// Microseconds of predicted work that a saved microsecond of prefill is worth: measured (docs/paper-results.md). The work of an instance
/// tells how even the pool is; prefill that nobody computes is time of all requests, also of later ones.
const SAVED_WEIGHT: f64 = 20.0;
/// Growth reserve at most: one of so many of an instance's blocks, as in an instance's admission.
const GROWTH_RESERVE_SHARE: u32 = 16;

/// Sizes of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// Tokens of all its prompts.
    pub prompt_tokens: u64,
    /// Tokens that all its answers may have together.
    pub answer_tokens: u64,
    /// Sequences: prompts times answers of each.
    pub sequences: u32,
}

impl Ask {
    /// rBlocks that its prompts need, with a slot for the next token of each sequence.
    #[must_use]
    pub fn blocks(&self, block_tokens: u32) -> u64 {
        (self.prompt_tokens + u64::from(self.sequences.max(1))).div_ceil(u64::from(block_tokens.max(1)))
    }
}

/// Work that went to an instance and that its last heartbeat does not include.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Unreported {
    pub requests: u32,
    /// Tokens of prompts to compute; cached ones left out.
    pub prompt_tokens: u64,
    /// Expected tokens of answers.
    pub answer_tokens: f64,
    pub blocks: u64,
}

/// What a dispatcher knows of an instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InstanceLoad {
    pub calibration: Option<Calibration>,
    /// Batch and queue of its last heartbeat; `None` if nothing reports them.
    pub load: Option<Load>,
    /// Whether it computes prompts itself; a decode worker has that done elsewhere.
    pub prefills: bool,
    pub block_tokens: u32,
    pub blocks_total: u32,
    /// Free blocks, lendable or not.
    pub blocks_free: u32,
    /// Cached blocks in the tiers beside its KV memory.
    pub tier_blocks: u64,
    /// Blocks that it may lend in all, and those that it has lent.
    pub blocks_lend_max: u32,
    pub blocks_lent: u32,
    /// Another one may have nothing cached: it began anew, or was declared dead meanwhile. None if it is not known.
    pub incarnation: Option<u64>,
    /// Requests in its batch, and in its queue.
    pub running: u32,
    pub waiting: u32,
    pub unreported: Unreported,
}

impl InstanceLoad {
    /// Free blocks beyond the needs of the queue, of unreported requests and of running sequences' growth.
    #[must_use]
    pub fn room_blocks(&self) -> i64 {
        let queued: u64 = self.load.iter().flat_map(|load| &load.queue_blocks).map(|blocks| u64::from(*blocks)).sum();
        let growth = self.running.saturating_mul(GROWTH_BLOCKS).min(self.blocks_total / GROWTH_RESERVE_SHARE);
        let taken = queued.saturating_add(self.unreported.blocks).saturating_add(u64::from(growth));
        i64::from(self.blocks_free).saturating_sub_unsigned(taken)
    }

    /// Requests that it has, reported or not.
    #[must_use]
    pub fn requests(&self) -> u32 {
        self.running.saturating_add(self.waiting).saturating_add(self.unreported.requests)
    }

    /// Tokens of prompts that it has to compute, by its report: an estimate by blocks from instances that do not report them.
    #[must_use]
    pub fn prefill_tokens(&self) -> u64 {
        let Some(load) = &self.load else { return 0 };
        let queued = || load.queue_blocks.iter().map(|blocks| u64::from(*blocks)).sum::<u64>();
        load.prefill_tokens.unwrap_or_else(|| queued() * u64::from(self.block_tokens))
    }

    /// Prefill time of a token, in microseconds; 0 if it is done elsewhere or was not measured.
    #[must_use]
    pub fn prefill_us(&self) -> f64 {
        let us = self.calibration.as_ref().map_or(0.0, |calibration| calibration.prefill_us_per_token);
        if self.prefills && us.is_finite() && us > 0.0 { us } else { 0.0 }
    }
}

/// Predicted times of an instance with one more request, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// All prompts, the request's included.
    pub prefill_us: f64,
    /// Prefill that the request's cached prefix saves; in none of the other figures.
    pub saved_us: f64,
    /// All answers.
    pub decode_us: f64,
    /// Until running sequences have freed the memory that the request lacks; 0 if it fits.
    pub memory_us: f64,
}

impl Prediction {
    /// Outstanding work: the time until everything is done.
    #[must_use]
    pub fn work_us(&self) -> f64 {
        self.prefill_us + self.decode_us + self.memory_us
    }
}

/// The policy of least predicted outstanding work. See the module's documentation.
#[derive(Clone, Debug)]
pub struct LeastWork {
    /// Tokens expected of an answer: the mean of those that ended.
    pub answer_tokens: f64,
    /// For instances that reported no calibration.
    assumed: Calibration,
}

impl Default for LeastWork {
    fn default() -> Self {
        Self { answer_tokens: ANSWER_TOKENS_ASSUMED, assumed: PlannerConfig::default().assumed }
    }
}

impl LeastWork {
    /// Tokens expected of the answers of a request.
    #[must_use]
    pub fn expected(&self, ask: &Ask) -> f64 {
        as_f64(ask.answer_tokens).min(self.answer_tokens * f64::from(ask.sequences.max(1)))
    }

    /// Predicts `of` with `ask`, of whose prompts `cached` tokens have their KV there.
    #[must_use]
    pub fn predict(&self, of: &InstanceLoad, ask: &Ask, cached: u64) -> Prediction {
        let calibration = of.calibration.as_ref().unwrap_or(&self.assumed);
        let rates = Rates::new(calibration, true).or_else(|| Rates::new(&self.assumed, true));
        let Some(rates) = rates else { return Prediction::default() };
        let idle = Load::default();
        let load = of.load.as_ref().unwrap_or(&idle);
        let there = f64::from(of.requests());
        let requests = there + f64::from(ask.sequences.max(1));
        // What runs and waits there, less what the requests' own limits leave.
        let reported = self.answer_tokens * f64::from(of.running.saturating_add(of.waiting));
        let reported = load.answer_tokens_max.map_or(reported, |most| as_f64(most).min(reported));
        let answers = reported + of.unreported.answer_tokens + self.expected(ask);
        let batch_max = if load.batch_max == 0 { u32::MAX } else { load.batch_max };
        let batch = requests.min(f64::from(batch_max));
        let to_compute = ask.prompt_tokens.saturating_sub(cached).saturating_add(of.unreported.prompt_tokens);
        let prompts = as_f64(of.prefill_tokens().saturating_add(to_compute));
        let own = as_f64(load.context_tokens.saturating_sub(load.remote_tokens)) + prompts + as_f64(cached);
        let attended = own * batch / requests;
        let lent_us = as_f64(load.remote_request_tokens) * rates.attention_us;
        let own_us = rates.other_us(count(batch)) + attended * rates.attention_us;
        // A debtor's step takes about as long as an own one, and attends here once.
        let stretch = 1.0 / (1.0 - (lent_us / (own_us + lent_us).max(1.0)).min(LENT_SHARE_MAX));
        let measured = if of.calibration.is_some() { of.prefill_us() } else { self.assumed.prefill_us_per_token };
        let token_us = if of.prefills { measured * stretch } else { 0.0 };
        let (prefill_us, saved_us) = (prompts * token_us, as_f64(cached.min(ask.prompt_tokens)) * token_us);
        // An answer takes its own steps at least, however short those beside it are.
        let own_steps = self.expected(ask) / f64::from(ask.sequences.max(1));
        let decode_us = (answers / batch).max(own_steps) * own_us * stretch;
        let lacking = ask.blocks(of.block_tokens).cast_signed().saturating_sub(of.room_blocks()).max(0);
        let used = i64::from(of.blocks_total) - i64::from(of.blocks_free);
        // Memory becomes free evenly while what is there is done, and none after that.
        let memory_us = match of.blocks_total {
            0 => 0.0,
            _ => {
                (as_f64(lacking.unsigned_abs()) / as_f64(used.max(1).unsigned_abs())).min(1.0)
                    * (prefill_us + decode_us)
            }
        };
        Prediction { prefill_us, saved_us, decode_us, memory_us }
    }

    /// The place of an instance among those for `ask`; the least is the best.
    #[must_use]
    pub fn rank(&self, of: &InstanceLoad, ask: &Ask, cached: u64) -> Rank {
        let predicted = self.predict(of, ask, cached);
        let cost = predicted.work_us() - SAVED_WEIGHT * predicted.saved_us;
        Rank { cost, room_blocks: of.room_blocks(), requests: of.requests() }
    }
}

/// The place of an instance by free memory, without a look at queues (v2 §6.1).
#[must_use]
pub fn free_memory(of: &InstanceLoad) -> Rank {
    let free = i64::from(of.blocks_free).saturating_sub_unsigned(of.unreported.blocks);
    Rank { cost: 0.0, room_blocks: free, requests: of.requests() }
}

/// The place of an instance among others, the best first: least cost, then most free memory, then fewest requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rank {
    cost: f64,
    room_blocks: i64,
    requests: u32,
}

impl Eq for Rank {}

impl Ord for Rank {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let cost = self.cost.total_cmp(&other.cost);
        cost.then(other.room_blocks.cmp(&self.room_blocks)).then(self.requests.cmp(&other.requests))
    }
}

impl PartialOrd for Rank {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// A positive number of sequences, rounded down.
fn count(x: f64) -> u32 {
    u32::try_from(crate::perf::whole(x).max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::BatchPoint;
    use proptest::prelude::*;

    fn calibration(step_us: f64, prefill_us_per_token: f64) -> Option<Calibration> {
        let batches = vec![BatchPoint { batch: 1, step_us }, BatchPoint { batch: 16, step_us: 2.0 * step_us }];
        Some(Calibration {
            batches,
            attention_us_per_ktoken: 100.0,
            prefill_us_per_token,
            copy_bytes_per_s: 1e9,
            prompt_attention_us_per_ktoken: 0.0,
        })
    }

    fn instance() -> InstanceLoad {
        InstanceLoad {
            calibration: calibration(10_000.0, 100.0),
            load: Some(Load { batch_max: 16, ..Load::default() }),
            prefills: true,
            block_tokens: 16,
            blocks_total: 1_000,
            blocks_free: 1_000,
            ..InstanceLoad::default()
        }
    }

    fn ask(prompt_tokens: u64) -> Ask {
        Ask { prompt_tokens, answer_tokens: 100, sequences: 1 }
    }

    #[test]
    fn an_idle_instance_needs_the_prompt_and_the_answer() {
        let prediction = LeastWork::default().predict(&instance(), &ask(1_024), 0);
        assert_eq!(prediction.prefill_us, 102_400.0);
        assert!((prediction.decode_us - 100.0 * (10_000.0 + 100.0)).abs() < 1e-6, "{prediction:?}");
        assert_eq!(prediction.memory_us, 0.0);
        let cached = LeastWork::default().predict(&instance(), &ask(1_024), 1_000);
        assert_eq!((cached.prefill_us, cached.decode_us), (2_400.0, prediction.decode_us));
    }

    /// A prefix of 1,000 tokens saves 0.1 s, which counts as two seconds of work.
    #[test]
    fn saved_prefill_counts_more_than_an_even_load() {
        let policy = LeastWork::default();
        let ahead = |tokens| {
            let load = Load { batch_max: 16, prefill_tokens: Some(tokens), ..Load::default() };
            InstanceLoad { load: Some(load), ..instance() }
        };
        let idle = policy.rank(&instance(), &ask(1_024), 0);
        assert!(policy.rank(&ahead(18_000), &ask(1_024), 1_000) < idle);
        assert!(policy.rank(&ahead(22_000), &ask(1_024), 1_000) > idle);
        let predicted = policy.predict(&instance(), &ask(1_024), 5_000);
        assert_eq!(predicted.saved_us, 102_400.0, "of its own prompt alone");
    }

    /// Ten answers there that are nearly over make the mean of all eleven short, and none of its steps.
    #[test]
    fn an_idle_instance_goes_before_one_that_is_nearly_done() {
        let rests = Load { batch_max: 16, context_tokens: 1_000, answer_tokens_max: Some(50), ..Load::default() };
        let busy = InstanceLoad { load: Some(rests), running: 10, ..instance() };
        let policy = LeastWork::default();
        let (idle, busy) = (policy.predict(&instance(), &ask(16), 0), policy.predict(&busy, &ask(16), 0));
        assert!(idle.decode_us < busy.decode_us, "{idle:?}, {busy:?}");
    }

    #[test]
    fn a_decode_worker_computes_no_prompt() {
        let of = InstanceLoad { prefills: false, ..instance() };
        let predicted = LeastWork::default().predict(&of, &ask(1_024), 1_000);
        assert_eq!((predicted.prefill_us, predicted.saved_us), (0.0, 0.0));
    }

    #[test]
    fn memory_that_is_missing_is_waited_for() {
        let policy = LeastWork::default();
        let full = InstanceLoad { blocks_free: 10, running: 8, ..instance() };
        let (fits, lacks) = (policy.predict(&full, &ask(1), 0), policy.predict(&full, &ask(5_000), 0));
        assert!(fits.memory_us > 0.0, "what is left is kept for growth: {fits:?}");
        assert!(lacks.memory_us > fits.memory_us && lacks.memory_us.is_finite(), "{lacks:?}");
        // No more memory comes when all is done there: the rest is borrowed.
        let larger = policy.predict(&instance(), &ask(32_000), 0);
        assert_eq!(larger.memory_us, larger.prefill_us + larger.decode_us);
    }

    /// The old policy sends a request to the instance with the longest queue if that has most free memory.
    #[test]
    fn free_memory_sees_no_queue_and_least_work_does() {
        let queued = Load { batch_max: 16, prefill_tokens: Some(50_000), ..Load::default() };
        let busy = InstanceLoad { load: Some(queued), waiting: 9, ..instance() };
        let fuller = InstanceLoad { blocks_free: 500, running: 2, ..instance() };
        assert!(free_memory(&busy) < free_memory(&fuller));
        let policy = LeastWork::default();
        assert!(policy.rank(&fuller, &ask(100), 0) < policy.rank(&busy, &ask(100), 0));
    }

    #[test]
    fn equals_are_ranked_by_memory_and_then_by_requests() {
        let nothing = InstanceLoad { prefills: true, ..InstanceLoad::default() };
        let free = InstanceLoad { blocks_free: 5, ..nothing.clone() };
        let policy = LeastWork::default();
        assert!(policy.rank(&free, &ask(10), 0) < policy.rank(&nothing, &ask(10), 0));
        assert_eq!(policy.rank(&nothing, &ask(10), 0), policy.rank(&nothing, &ask(10), 0));
        let sent = Unreported { requests: 1, ..Unreported::default() };
        let sent = InstanceLoad { unreported: sent, ..nothing.clone() };
        assert!(free_memory(&nothing) < free_memory(&sent));
    }

    fn instances() -> impl Strategy<Value = InstanceLoad> {
        let load = (0u32..32, 0u64..100_000, 0u64..100_000, 0u64..200_000, 0u64..20_000);
        let own = (1u32..2_000, 0u32..2_000, 0u32..16, 0u32..32, any::<bool>());
        (load, own, (100.0..50_000.0f64, 0.0..500.0f64), prop::option::of(0u64..50_000)).prop_map(
            |((batch, context, remote, lent, prefill), (total, free, running, waiting, prefills), rate, answers)| {
                let load = Load {
                    batch,
                    batch_max: 16,
                    context_tokens: context,
                    remote_tokens: remote.min(context),
                    remote_request_tokens: lent,
                    prefill_tokens: Some(prefill),
                    answer_tokens_max: answers,
                    ..Load::default()
                };
                InstanceLoad {
                    calibration: calibration(rate.0, rate.1),
                    load: Some(load),
                    prefills,
                    block_tokens: 16,
                    blocks_total: total,
                    blocks_free: free.min(total),
                    running,
                    waiting,
                    ..InstanceLoad::default()
                }
            },
        )
    }

    proptest! {
        #[test]
        fn more_work_is_never_predicted_to_take_less(
            of in instances(), prompt in 1u64..50_000, more in 1u64..50_000, cached in 0u64..50_000,
        ) {
            let policy = LeastWork::default();
            let base = policy.predict(&of, &ask(prompt), 0);
            prop_assert!(base.work_us().is_finite() && base.work_us() >= 0.0, "{base:?}");
            let longer = policy.predict(&of, &ask(prompt + more), 0);
            prop_assert!(longer.work_us() >= base.work_us(), "a longer prompt: {base:?} {longer:?}");
            let known = policy.predict(&of, &ask(prompt), cached.min(prompt));
            prop_assert!(known.work_us() <= base.work_us() * (1.0 + 1e-9), "a cached prefix: {base:?} {known:?}");
            let mut lends = of.clone();
            lends.load.as_mut().unwrap().remote_request_tokens += more;
            prop_assert!(policy.predict(&lends, &ask(prompt), 0).work_us() >= base.work_us() * (1.0 - 1e-9), "lent load");
            let mut queued = of.clone();
            let load = queued.load.as_mut().unwrap();
            load.prefill_tokens = load.prefill_tokens.map(|tokens| tokens + more);
            prop_assert!(policy.predict(&queued, &ask(prompt), 0).work_us() >= base.work_us(), "a longer queue");
        }
    }
}
