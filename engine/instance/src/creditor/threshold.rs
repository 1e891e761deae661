//! The threshold on lending compute (Infinite-LLM v1 §4.6): peers' micro attention must not break this instance's own
//! latency target.
//!
//! Every lent token may be attended to once in each own decode step. So lent memory is bounded by the time that the own
//! part of a step leaves under the target; if that is none, nothing is lent. Remote requests already here are refused
//! only when steps have been far over the target for a while and remote requests take a good part of them: then one
//! step of the debtor with most work is refused, and no other until the effect is measured. Lending resumes only well
//! under the target. So a refused debtor cannot come back at once, and cannot be refused again and again.
//!
//! The time of remote requests is estimated, not measured: query rows times keys, at the rate of the calibration (or of
//! the cost model's, without one). Only decode-only steps of the local micro-batch count as own steps: remote requests
//! do not cause the time that creditors and prompts add.

use super::Creditor;
use crate::config::InstanceConfig;
use crate::cost::OwnCost;
use crate::cx::Cx;
use lagoon_types::InstanceId;
use lagoon_types::limits::{THRESHOLD_IDLE_MS, THRESHOLD_OVER_MS, THRESHOLD_SHED_PAUSE_MS};
use std::collections::BTreeMap;

/// Weight of the newest step in the mean.
const NEWEST: f64 = 1.0 / 16.0;
/// Steps before the mean counts.
const STEPS_MIN: u32 = 8;
/// Far over the target, as a ratio: remote requests are refused.
const FAR: f64 = 1.5;
/// Well under the target, as a ratio: lending resumes.
const WELL_UNDER: f64 = 0.8;
/// Share of a step that remote requests must take before they are refused.
const SHARE_MIN: f64 = 0.2;

/// The mean step time against the latency target. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Threshold {
    target_us: f64,
    /// Estimated time of one query row over one key in one layer, in microseconds.
    row_key_us: f64,
    /// Estimated time of one query row over one rBlock in all layers, in microseconds.
    block_us: f64,
    /// Mean step time, and mean without remote requests, in microseconds.
    step_us: f64,
    own_us: f64,
    steps: u32,
    last_step_ms: u64,
    /// Estimated time of remote requests, since the start, and by debtor since the last refusal, in microseconds.
    remote_requests_us: f64,
    by_debtor: BTreeMap<InstanceId, f64>,
    /// Lending is closed: over the target, and not well under it since.
    closed: bool,
    far_since_ms: Option<u64>,
    /// No debtor is refused before this time, in milliseconds.
    shed_after_ms: u64,
    shed: u64,
}

impl Threshold {
    /// The threshold of a configured instance; `None` without a target.
    pub(crate) fn of(config: &InstanceConfig) -> Option<Self> {
        let InstanceConfig { geometry, kv, .. } = config;
        let own = OwnCost::measured(config.calibration.as_ref(), geometry, kv, config.attention_flops);
        let key_us = f64::from(kv.layers) * own.row_key_s(geometry) * 1e6;
        config.target_step_ms.map(|target_ms| Self::new(target_ms, key_us, kv.layers, config.block_tokens))
    }

    /// `key_us`: decode attention over one token in all `layers` layers.
    pub(crate) fn new(target_ms: u32, key_us: f64, layers: u32, block_tokens: u32) -> Self {
        Self {
            target_us: f64::from(target_ms) * 1000.0,
            row_key_us: key_us / f64::from(layers.max(1)),
            block_us: key_us * f64::from(block_tokens),
            step_us: 0.0,
            own_us: 0.0,
            steps: 0,
            last_step_ms: 0,
            remote_requests_us: 0.0,
            by_debtor: BTreeMap::new(),
            closed: false,
            far_since_ms: None,
            shed_after_ms: 0,
            shed: 0,
        }
    }

    /// Steps refused so far.
    pub(crate) fn shed(&self) -> u64 {
        self.shed
    }

    /// Estimated time of remote requests since the start, in microseconds.
    pub(crate) fn remote_requests_us(&self) -> f64 {
        self.remote_requests_us
    }

    /// Counts one layer of a peer's step on the device: `row_keys` pairs of a query row and a key.
    pub(crate) fn on_remote_request(&mut self, debtor: InstanceId, row_keys: u64) {
        // Exact up to 2^53, and an estimate anyway.
        #[allow(clippy::cast_precision_loss, reason = "an estimate")]
        let us = row_keys as f64 * self.row_key_us;
        self.remote_requests_us += us;
        *self.by_debtor.entry(debtor).or_default() += us;
    }

    /// Counts an own decode-only step of `ms`, of which remote requests took an estimated `remote_requests_us`.
    pub(crate) fn on_step(&mut self, ms: u64, remote_requests_us: f64, now_ms: u64) {
        let step_us = f64::from(u32::try_from(ms).unwrap_or(u32::MAX)) * 1000.0;
        let own_us = (step_us - remote_requests_us).max(0.0);
        self.steps = self.steps.saturating_add(1);
        // The first steps have equal weight.
        let weight = NEWEST.max(1.0 / f64::from(self.steps));
        self.step_us += (step_us - self.step_us) * weight;
        self.own_us += (own_us - self.own_us) * weight;
        self.last_step_ms = now_ms;
        if self.steps < STEPS_MIN {
            return;
        }
        let limit = if self.closed { WELL_UNDER } else { 1.0 } * self.target_us;
        self.closed = self.step_us > limit;
        let blamed = self.step_us - self.own_us > SHARE_MIN * self.step_us;
        if self.step_us > FAR * self.target_us && blamed {
            self.far_since_ms.get_or_insert(now_ms);
        } else {
            self.far_since_ms = None;
        }
    }

    /// Resets the means if this instance has not decoded for [`THRESHOLD_IDLE_MS`].
    pub(crate) fn tick(&mut self, now_ms: u64) {
        if self.steps > 0 && now_ms >= self.last_step_ms + THRESHOLD_IDLE_MS {
            (self.steps, self.closed, self.far_since_ms) = (0, false, None);
        }
    }

    /// Bound on lent rBlocks; `None` without one.
    pub(crate) fn lend_blocks_max(&self) -> Option<u32> {
        if self.steps < STEPS_MIN {
            return None;
        }
        if self.closed {
            return Some(0);
        }
        let blocks = ((self.target_us - self.own_us) / self.block_us).floor();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in range; a cast saturates")]
        let blocks = blocks.max(0.0) as u32;
        Some(blocks)
    }

    /// Refuses a step of the debtor that costs most if own steps have been over the target for
    /// [`THRESHOLD_OVER_MS`], and then pauses. True if it is refused. Called once per ticket.
    pub(crate) fn shed_if_over(&mut self, debtor: InstanceId, now_ms: u64) -> bool {
        let far = self.far_since_ms.is_some_and(|since| now_ms >= since + THRESHOLD_OVER_MS);
        if !far || now_ms < self.shed_after_ms {
            return false;
        }
        let most = self.by_debtor.iter().max_by(|a, b| a.1.total_cmp(b.1)).map(|(debtor, _)| *debtor);
        if most != Some(debtor) {
            return false;
        }
        self.shed += 1;
        self.shed_after_ms = now_ms + THRESHOLD_SHED_PAUSE_MS;
        self.by_debtor.clear();
        self.far_since_ms = None;
        true
    }

    /// The mean step time and the target, in milliseconds, for the refusal's text.
    pub(crate) fn describe(&self) -> String {
        let (step_ms, target_ms) = (self.step_us / 1000.0, self.target_us / 1000.0);
        format!("own steps take {step_ms:.1} ms and their target is {target_ms:.1} ms")
    }
}

impl Creditor {
    /// Counts an own decode-only step of the local micro-batch.
    pub(super) fn own_step_took(&mut self, cx: &mut Cx, ms: u64, remote_requests_us_before: f64) {
        if let Some(threshold) = &mut self.threshold {
            threshold.on_step(ms, threshold.remote_requests_us - remote_requests_us_before, cx.now_ms);
            self.bound_lending(cx);
        }
    }

    pub(super) fn expire_threshold(&mut self, cx: &mut Cx) {
        if let Some(threshold) = &mut self.threshold {
            threshold.tick(cx.now_ms);
            self.bound_lending(cx);
        }
    }

    fn bound_lending(&mut self, cx: &mut Cx) {
        let Some(threshold) = &self.threshold else { return };
        cx.memory.rm.set_lend_bound(threshold.lend_blocks_max().map(|blocks| (blocks, threshold.describe())));
    }

    /// Why a peer's step is refused; `None` if it is not.
    pub(super) fn shed(&mut self, cx: &mut Cx, debtor: InstanceId) -> Option<String> {
        let threshold = self.threshold.as_mut()?;
        threshold.shed_if_over(debtor, cx.now_ms).then(|| threshold.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: InstanceId = InstanceId(1);
    const B: InstanceId = InstanceId(2);

    /// A target of 20 ms; a key costs 1 us in 4 layers, a block of 32 tokens 32 us.
    fn threshold() -> Threshold {
        Threshold::new(20, 1.0, 4, 32)
    }

    /// Runs `steps` steps of `own_ms` and of what the remote requests bring: keys of A and B in each step.
    fn run(t: &mut Threshold, now_ms: &mut u64, steps: u32, own_ms: u64, keys: [u64; 2]) {
        for _ in 0..steps {
            let before = t.remote_requests_us();
            for (debtor, keys) in [A, B].into_iter().zip(keys) {
                (0..4).for_each(|_| t.on_remote_request(debtor, keys));
            }
            let remote_requests = t.remote_requests_us() - before;
            let ms = own_ms + (keys[0] + keys[1]) / 1000;
            *now_ms += ms;
            t.on_step(ms, remote_requests, *now_ms);
            t.tick(*now_ms);
        }
    }

    #[test]
    fn lending_is_bounded_by_what_the_own_step_leaves() {
        let (mut t, mut now) = (threshold(), 0);
        assert_eq!(t.lend_blocks_max(), None, "nothing was measured");
        run(&mut t, &mut now, 50, 12, [0, 0]);
        // 8 ms are left, which are 250 blocks of 32 us; remote requests that use them change nothing.
        assert_eq!(t.lend_blocks_max(), Some(250));
        run(&mut t, &mut now, 50, 12, [4_000, 3_000]);
        assert_eq!(t.lend_blocks_max(), Some(250));
        run(&mut t, &mut now, 100, 30, [0, 0]);
        assert_eq!(t.lend_blocks_max(), Some(0));
        // Without an own step for a while there is nothing to protect.
        t.tick(now + THRESHOLD_IDLE_MS);
        assert_eq!(t.lend_blocks_max(), None);
    }

    #[test]
    fn lending_begins_again_well_under_the_target_only() {
        let (mut t, mut now) = (threshold(), 0);
        run(&mut t, &mut now, 100, 14, [7_000, 0]);
        assert_eq!(t.lend_blocks_max(), Some(0), "21 ms");
        run(&mut t, &mut now, 100, 14, [4_000, 0]);
        assert_eq!(t.lend_blocks_max(), Some(0), "18 ms are under the target, but not well");
        run(&mut t, &mut now, 100, 14, [1_000, 0]);
        assert!(t.lend_blocks_max() > Some(0));
        run(&mut t, &mut now, 100, 14, [4_000, 0]);
        assert!(t.lend_blocks_max() > Some(0), "18 ms do not end lending either");
    }

    /// How many tickets of each debtor are refused in so many steps.
    fn refused(t: &mut Threshold, now: &mut u64, steps: u32, own_ms: u64, keys: [u64; 2]) -> [u32; 2] {
        let mut refused = [0, 0];
        for _ in 0..steps {
            run(t, now, 1, own_ms, keys);
            for (count, debtor) in refused.iter_mut().zip([A, B]) {
                *count += u32::from(t.shed_if_over(debtor, *now));
            }
        }
        refused
    }

    #[test]
    fn only_remote_requests_that_are_to_blame_are_sent_away_and_one_at_a_time() {
        let (mut t, mut now) = (threshold(), 0);
        // Over, but not far over: whoever is here stays.
        assert_eq!(refused(&mut t, &mut now, 500, 14, [8_000, 6_000]), [0, 0], "28 ms");
        // Far over, by its own doing: nobody is sent away.
        assert_eq!(refused(&mut t, &mut now, 500, 60, [1_000, 1_000]), [0, 0]);
        t.tick(now + THRESHOLD_IDLE_MS);
        // Far over, for a moment only.
        let (mut t, mut now) = (threshold(), 0);
        run(&mut t, &mut now, 100, 10, [0, 0]);
        assert_eq!(refused(&mut t, &mut now, 10, 10, [50_000, 10_000]), [0, 0]);
        // And for long: the one that brings most, once in a pause, however many tickets come.
        let start = now;
        let counts = refused(&mut t, &mut now, 400, 10, [50_000, 10_000]);
        let pauses = u32::try_from((now - start) / THRESHOLD_SHED_PAUSE_MS).unwrap();
        assert_eq!(counts[1], 0, "{counts:?}");
        assert!(counts[0] >= 2 && counts[0] <= pauses + 1, "{counts:?} in {pauses} pauses");
        assert_eq!(t.shed(), u64::from(counts[0]));
        // It has left: nobody else goes.
        assert_eq!(refused(&mut t, &mut now, 400, 10, [0, 8_000]), [0, 0]);
    }
}
