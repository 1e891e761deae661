//! One batch or two: divides running sequences over the local and the remote micro-batch (docs/adr/0009).
//!
//! Two micro-batches keep a slow creditor from delaying local rows, but read the weights twice. Where local attention
//! covers the creditors' time (v2 Fig. 6a), or nearly, all rows are one batch, in the remote micro-batch. The choice is
//! the larger predicted useful share of device time, from this instance's calibration (v2 Eq. 5) and the measured time
//! from a step's queries to its last partial:
//! * one batch: the work `W(n) + A` in `W(n) + max(A, R)`;
//! * two: the remote micro-batch's share of that work in `P = 2 W(n_r) + max(2 A_r, R)`, as the micro-batches take
//!   turns on the device, and the local micro-batch's in `W(n_l) + A_l` of the time that this leaves.
//!
//! Invariants:
//! * without a calibration, with a latency target, or while a remote sequence computes a prompt, there are two;
//! * one batch that waits for a creditor much longer than usual is split for a while: a hanging creditor stops the
//!   local rows for [`TIMEOUT_MS`] or a few usual waits, not for a step's deadline.

use super::sequence::Sequence;
use crate::cx::Cx;
use lagoon_cluster::perf::{LinkView, Rates, RemotePart};
use lagoon_types::{InstanceId, MicroBatch, SeqId};
use std::collections::BTreeMap;

/// Weight of the newest step in the mean.
const NEWEST: f64 = 1.0 / 8.0;
/// A change must gain this share, so that the micro-batches do not flap.
const GAIN_MIN: f64 = 0.03;
/// Minimum wait before one batch is split.
const TIMEOUT_MS: u64 = 500;
/// Usual waits after which one batch is split.
const TIMEOUT_WAITS: f64 = 8.0;
/// How long the micro-batches stay apart after a split.
const APART_MS: u64 = 10_000;

/// The division into micro-batches. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct MicroBatches {
    /// All rows are one batch.
    merged: bool,
    /// Mean time of a decode step's remote part, in microseconds; `None` before the first.
    remote_us: Option<f64>,
    /// Two micro-batches until then, in milliseconds.
    apart_until_ms: u64,
    /// The division may have changed: it is computed again before the next step.
    stale: bool,
}

/// Running rows and their KV, as the prediction needs them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Batch {
    rows: u32,
    /// Tokens of local and of mapped KV: this device attends to both.
    tokens: f64,
}

/// A sequence's leases: creditor and rBlocks of each.
fn leases(seq: &Sequence) -> impl Iterator<Item = (InstanceId, u32)> {
    seq.leases.iter().map(|((creditor, _), held)| (*creditor, held.blocks))
}

/// rBlocks of leases by creditor, of creditors that compute the attention: mapped KV costs its creditor no compute and no round trip.
fn attended_elsewhere(
    leases: impl Iterator<Item = (InstanceId, u32)>,
    maps: impl Fn(InstanceId) -> bool,
) -> BTreeMap<InstanceId, u32> {
    let mut there = BTreeMap::new();
    for (creditor, blocks) in leases.filter(|(creditor, _)| !maps(*creditor)) {
        *there.entry(creditor).or_default() += blocks;
    }
    there
}

/// The useful share of the device's time, in one batch and in two. A token is worth its attention and its share of one
/// batch's weights. (Counted in tokens alone, rows of short contexts would always win a micro-batch of their own: they
/// would advance faster at the cost of long ones, and the weights would be read twice.)
fn predict(rates: &Rates<'_>, local: Batch, remote: Batch, remote_us: f64) -> (f64, f64) {
    let attention_us = |b: Batch| b.tokens * rates.attention_us;
    let (all, a_l, a_r) = (local.rows + remote.rows, attention_us(local), attention_us(remote));
    let w = rates.other_us(all);
    let work = |rows: u32, a: f64| w * f64::from(rows) / f64::from(all) + a;
    let one = (w + a_l + a_r) / (w + (a_l + a_r).max(remote_us));
    let (w_l, w_r) = (rates.other_us(local.rows), rates.other_us(remote.rows));
    let period_us = 2.0 * w_r + (2.0 * a_r).max(remote_us);
    let left = 1.0 - (w_r + a_r) / period_us;
    let two = work(remote.rows, a_r) / period_us + work(local.rows, a_l) * left / (w_l + a_l);
    (one, two)
}

impl MicroBatches {
    /// Adds a decode step's time from queries to last partials, summed over layers, to the mean.
    pub(crate) fn remote_took(&mut self, ms: u64) {
        let us = f64::from(u32::try_from(ms).unwrap_or(u32::MAX)) * 1e3;
        self.remote_us = Some(self.remote_us.map_or(us, |mean| mean + (us - mean) * NEWEST));
    }

    /// Marks the division stale: sequences came, went, moved or advanced.
    pub(crate) fn changed(&mut self) {
        self.stale = true;
    }

    fn timeout_ms(&self) -> u64 {
        let waits = self.remote_us.unwrap_or(0.0) * TIMEOUT_WAITS / 1e3;
        TIMEOUT_MS.max(u64::try_from(lagoon_cluster::perf::whole(waits)).unwrap_or(0))
    }
}

impl super::Batch {
    /// The micro-batch of a sequence's next step.
    pub(crate) fn micro_batch_of(&self, seq: SeqId) -> MicroBatch {
        let remote = self.micro.merged || self.seqs.get(&seq).is_some_and(|s| s.blocks.remote_blocks() > 0);
        if remote { MicroBatch::Remote } else { MicroBatch::Local }
    }

    /// Divides the running sequences again if the division is stale. `has_target`: a latency target bounds peers' work
    /// here. `maps`: whether a creditor's memory is mapped here.
    pub(crate) fn divide(&mut self, cx: &Cx, has_target: bool, maps: impl Fn(InstanceId) -> bool) {
        if !std::mem::take(&mut self.micro.stale) {
            return;
        }
        let remote = |id: SeqId| self.seqs.get(&id).is_some_and(|seq| seq.blocks.remote_blocks() > 0);
        if !self.sched.running().any(remote) {
            // The measurement was of other sequences.
            self.micro.remote_us = None;
        }
        let merged = self.one_batch_is_better(cx, has_target, maps);
        if merged != self.micro.merged {
            self.micro.merged = merged;
            let running: Vec<SeqId> = self.sched.running().collect();
            for seq in running {
                let micro_batch = self.micro_batch_of(seq);
                self.sched.set_micro_batch(seq, micro_batch);
            }
        }
    }

    /// Whether one batch of all running sequences is predicted to be faster than a local and a remote one.
    fn one_batch_is_better(&self, cx: &Cx, has_target: bool, maps: impl Fn(InstanceId) -> bool) -> bool {
        let block_tokens = f64::from(cx.config.block_tokens);
        let (mut local, mut remote) = (Batch::default(), Batch::default());
        for id in self.sched.running() {
            let Some(seq) = self.seqs.get(&id) else { continue };
            let away = seq.blocks.remote_blocks() > 0;
            if away && seq.blocks.written() + 1 < seq.len() {
                return false;
            }
            let batch = if away { &mut remote } else { &mut local };
            batch.rows += 1;
            batch.tokens += f64::from(seq.blocks.local_blocks()) * block_tokens;
            if away {
                let mapped: u32 = leases(seq).filter(|(creditor, _)| maps(*creditor)).map(|(_, blocks)| blocks).sum();
                batch.tokens += f64::from(mapped) * block_tokens;
            }
        }
        if remote.rows == 0 || local.rows == 0 || has_target || cx.now_ms < self.micro.apart_until_ms {
            return false;
        }
        let Some(rates) = cx.config.calibration.as_ref().and_then(|c| Rates::new(c, true)) else { return false };
        let remote_us = self.micro.remote_us.unwrap_or_else(|| {
            let running = self.sched.running().filter_map(|id| self.seqs.get(&id));
            let away = running.filter(|seq| seq.blocks.remote_blocks() > 0);
            let there = attended_elsewhere(away.flat_map(leases), &maps);
            // At this instance's speed, and with no other load.
            let us =
                |(creditor, blocks): (&InstanceId, &u32)| remote_part(cx, &rates, *creditor, *blocks).us(&cx.model);
            there.iter().map(us).fold(0.0, f64::max)
        });
        let (one, two) = predict(&rates, local, remote, remote_us);
        let gain = if self.micro.merged { 1.0 - GAIN_MIN } else { 1.0 + GAIN_MIN };
        one > two * gain
    }

    /// Splits one batch that has waited for a creditor since `waits_since_ms`, much longer than usual. True if its step
    /// must end.
    pub(crate) fn break_up(&mut self, now_ms: u64, waits_since_ms: Option<u64>) -> bool {
        let late = waits_since_ms.is_some_and(|at| now_ms >= at + self.micro.timeout_ms());
        if !self.micro.merged || !late {
            return false;
        }
        self.micro.apart_until_ms = now_ms + APART_MS;
        self.changed();
        true
    }

    /// Whether all rows are one batch now.
    pub(crate) fn is_one_batch(&self) -> bool {
        self.micro.merged
    }
}

/// The remote part of a step at a creditor with so many rBlocks, as far as it can be predicted here: at this instance's speed.
fn remote_part(cx: &Cx, rates: &Rates<'_>, creditor: InstanceId, blocks: u32) -> RemotePart {
    let known = cx.peers.key(creditor).and_then(|peer| cx.peers.known(peer));
    let bytes_per_s =
        known.and_then(|k| u32::try_from(k.bytes_per_s / 1024).ok()).map_or(0.0, |k| f64::from(k) * 1024.0);
    RemotePart {
        tokens: f64::from(blocks) * f64::from(cx.config.block_tokens),
        rows: 1,
        attention_us: rates.attention_us,
        wait_us: 0.0,
        link: LinkView { rtt_us: known.map_or(0.0, |k| f64::from(k.rtt_us)), bytes_per_s },
        mapped: cx.memory.rm.debtor.is_near(creditor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::{BatchPoint, Calibration};

    /// 10 ms for the weights, whatever the batch; 1 us per token of KV.
    fn calibration() -> Calibration {
        let point = |batch| BatchPoint { batch, step_us: 10_000.0 };
        Calibration {
            batches: vec![point(1), point(256)],
            attention_us_per_ktoken: 1_024.0,
            prefill_us_per_token: 1.0,
            copy_bytes_per_s: 1e9,
            prompt_attention_us_per_ktoken: 0.0,
        }
    }

    #[test]
    fn what_is_covered_is_one_batch_and_what_is_waited_for_long_is_two() {
        let calibration = calibration();
        let rates = Rates::new(&calibration, true).unwrap();
        let (local, remote) = (Batch { rows: 20, tokens: 10_000.0 }, Batch { rows: 2, tokens: 5_000.0 });
        // Covered: the device does nothing in vain; apart, the weights are read twice.
        let (one, two) = predict(&rates, local, remote, 5_000.0);
        assert!((one - 1.0).abs() < 1e-12 && one > two * 1.2, "{one} {two}");
        // A creditor that takes a second: the local rows must not wait.
        let (one, two) = predict(&rates, local, remote, 1e6);
        assert!(two > one * 10.0, "{one} {two}");
        // There is one point between where it turns.
        let better: Vec<bool> = (0..100)
            .map(|ms| {
                let (one, two) = predict(&rates, local, remote, f64::from(ms) * 1e3);
                one > two
            })
            .collect();
        assert_eq!(better.windows(2).filter(|w| w[0] != w[1]).count(), 1, "{better:?}");
    }

    #[test]
    fn short_contexts_do_not_overtake_a_long_one_at_the_price_of_the_weights() {
        let calibration = calibration();
        let rates = Rates::new(&calibration, true).unwrap();
        // In a micro-batch of their own the short ones would generate more tokens a second, and the whole take longer.
        let (local, remote) = (Batch { rows: 3, tokens: 4_400.0 }, Batch { rows: 1, tokens: 26_000.0 });
        let (one, two) = predict(&rates, local, remote, 2_000.0);
        assert!(one > two * 1.2, "{one} {two}");
    }

    #[test]
    fn mapped_leases_are_the_own_devices_work() {
        let leases = [(InstanceId(2), 5), (InstanceId(3), 7), (InstanceId(2), 1)];
        let there = attended_elsewhere(leases.into_iter(), |creditor| creditor == InstanceId(2));
        assert_eq!(there, BTreeMap::from([(InstanceId(3), 7)]));
    }

    #[test]
    fn the_mean_follows_what_is_measured() {
        let mut micro_batches = MicroBatches::default();
        micro_batches.remote_took(8);
        assert_eq!(micro_batches.remote_us, Some(8_000.0));
        (0..40).for_each(|_| micro_batches.remote_took(80));
        assert!(micro_batches.remote_us.is_some_and(|us| us > 75_000.0));
        assert_eq!(MicroBatches::default().timeout_ms(), TIMEOUT_MS);
        assert!((590..=640).contains(&micro_batches.timeout_ms()), "{}", micro_batches.timeout_ms());
    }
}
