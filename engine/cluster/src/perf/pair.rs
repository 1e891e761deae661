//! Eq. 6 and 7 for a debtor, a creditor and one request whose blocks may move between them, and the best number of blocks.
//!
//! **Why the best k needs no scan.** The debtor's batch is constant between the few k at which one more queued request fits
//! (or one fewer sequence is preempted). In between, its step u is the maximum of a time that falls linearly in k (its own
//! attention) and times that are constant or rise linearly in k (its remote parts). Where one of these is the maximum
//! throughout:
//! * Eq. 6: both throughputs are a constant over a positive linear function, so they and their sum are convex;
//! * at the debtor's pace, the creditor's is u over a linear function of u, and the sum β/u + β' u/(c u + E), whose
//!   derivative is negative exactly while c + E/u > √(β' E/β), falls and then rises in u, or only falls.
//!
//! In both cases the maximum over such a piece is at one of its ends: the changes of the batch, and the k at which the remote
//! part stops being covered. [`Pair::best`] evaluates only these; a property test compares it with the scan.

use super::crossover::as_f64;
use super::{LinkView, ModelConfig, ModelShape, Rates, RemotePart, StepTimes};

/// State of a debtor, as the model uses it.
#[derive(Clone, Debug)]
pub struct DebtorState<'a> {
    pub rates: Rates<'a>,
    /// Sequences that decode (`batch`), and their limit (`batch_max`).
    pub batch: u32,
    pub batch_max: u32,
    /// Of `batch`, sequences with remote KV.
    pub remote_rows: u32,
    /// Tokens that its device attends to for its own sequences.
    pub local_tokens: f64,
    /// Tokens that its device attends to for its debtors.
    pub remote_request_tokens: f64,
    /// Free blocks less the growth of running sequences within the planner's horizon; if negative, some will be preempted.
    pub spare: i64,
    /// Blocks that a preemption frees on average, at least 1.
    pub sequence_blocks: i64,
    /// Blocks that waiting requests need, oldest first.
    pub queue: &'a [u32],
    /// Time of the remote part at the slowest other creditor; 0 if there is none.
    pub elsewhere_us: f64,
}

/// State of a creditor, as the model uses it.
#[derive(Clone, Debug)]
pub struct CreditorState<'a> {
    pub rates: Rates<'a>,
    pub batch: u32,
    /// Tokens that its device attends to per step: for own sequences, and for debtors other than the pair's.
    pub tokens: f64,
    /// See [`RemotePart::wait_us`].
    pub wait_us: f64,
}

impl CreditorState<'_> {
    /// Time of a step with `remote_requests` tokens of the pair's debtor, attended to `pace` times per step.
    fn step_us(&self, remote_requests: f64, pace: f64) -> f64 {
        self.rates.other_us(self.batch) + (self.tokens + remote_requests * pace) * self.rates.attention_us
    }
}

/// Pair of a debtor and a creditor, with a request of the debtor.
#[derive(Clone, Debug)]
pub struct Pair<'a> {
    pub shape: ModelShape,
    pub config: ModelConfig,
    pub debtor: DebtorState<'a>,
    pub creditor: CreditorState<'a>,
    /// Link between the two, with both values known.
    pub link: LinkView,
    /// Peer access: the debtor's own device attends to its blocks in mapped creditor KV, counted in
    /// [`DebtorState::local_tokens`]. The creditor computes nothing for them, and no query crosses the link.
    pub mapped: bool,
    /// The debtor's blocks at this creditor, of all its requests, and the number of requests with blocks there.
    pub blocks_there: i64,
    pub rows_there: u32,
    /// The request's blocks at this creditor, and on all creditors.
    pub request_there: i64,
    pub request_remote: i64,
}

/// Prediction of the model for a pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    pub debtor_tokens_per_s: f64,
    pub creditor_tokens_per_s: f64,
    /// The debtor's batch after admissions from the queue, or preemptions.
    pub batch: u32,
    /// The debtor's step.
    pub step: StepTimes,
}

impl Prediction {
    /// Throughput of both (Eq. 7).
    #[must_use]
    pub fn tokens_per_s(&self) -> f64 {
        self.debtor_tokens_per_s + self.creditor_tokens_per_s
    }

    /// Whether local work covers the remote part (v2 Fig. 6a).
    #[must_use]
    pub fn covered(&self) -> bool {
        self.step.covered()
    }
}

/// Best move of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BestMove {
    /// Blocks to move: to the creditor if positive, home if negative.
    pub blocks: i64,
    /// Gain in throughput of both over no move, in tokens per second.
    pub gain: f64,
    pub prediction: Prediction,
}

/// Best moves: among all numbers of blocks (`any`), and among those with a covered remote part (`covered`).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Best {
    pub covered: Option<BestMove>,
    pub any: Option<BestMove>,
}

impl Pair<'_> {
    /// Predicts the result of moving `k` blocks to the creditor (home, if negative).
    #[must_use]
    pub fn predict(&self, k: i64) -> Prediction {
        let (batch, admitted) = self.batch(k);
        self.predict_with(k, batch, admitted)
    }

    fn predict_with(&self, k: i64, batch: u32, admitted: u64) -> Prediction {
        let remote_requests = if self.mapped { 0.0 } else { self.tokens(self.blocks_there + k) };
        let step = StepTimes { local_us: self.local_us(k, batch, admitted), remote_us: self.remote_us(k, batch) };
        let step_us = step.local_us.max(step.remote_us);
        let pace = if batch == 0 { 0.0 } else { self.pace(step_us) };
        let rate = |batch: u32, us: f64| if batch == 0 { 0.0 } else { f64::from(batch) * 1e6 / us };
        Prediction {
            debtor_tokens_per_s: rate(batch, step_us),
            creditor_tokens_per_s: rate(self.creditor.batch, self.creditor.step_us(remote_requests, pace)),
            batch,
            step,
        }
    }

    fn tokens(&self, blocks: i64) -> f64 {
        signed(blocks) * f64::from(self.shape.block_tokens)
    }

    /// The debtor's batch, and the blocks admitted from the queue, in order and while they fit.
    fn batch(&self, k: i64) -> (u32, u64) {
        let d = &self.debtor;
        let spare = d.spare.saturating_add(k);
        if spare < 0 {
            let preempted = spare.unsigned_abs().div_ceil(d.sequence_blocks.unsigned_abs().max(1));
            return (d.batch - u32::try_from(preempted).unwrap_or(u32::MAX).min(d.batch), 0);
        }
        let (mut batch, mut taken) = (d.batch, 0);
        for need in d.queue {
            if batch >= d.batch_max || taken + u64::from(*need) > spare.unsigned_abs() {
                break;
            }
            taken += u64::from(*need);
            batch += 1;
        }
        (batch, taken)
    }

    /// Number of sequences with remote KV.
    fn remote_rows(&self, k: i64) -> u32 {
        rows(self.debtor.remote_rows, self.request_remote, k)
    }

    /// Local work of the debtor's step: T_lyr - K/g of Eq. 6, over all layers.
    fn local_us(&self, k: i64, batch: u32, admitted: u64) -> f64 {
        let d = &self.debtor;
        let rows = if self.config.micro_batches { self.remote_rows(k).min(batch) } else { 0 };
        let share = if d.batch == 0 { 1.0 } else { (f64::from(batch) / f64::from(d.batch)).min(1.0) };
        let leaving = if self.mapped { 0.0 } else { self.tokens(k) };
        let own = (d.local_tokens - leaving).max(0.0) * share;
        let joined = as_f64(admitted) * f64::from(self.shape.block_tokens);
        let other = d.rates.other_us(batch - rows) + d.rates.other_us(rows);
        other + (own + joined + d.remote_request_tokens) * d.rates.attention_us
    }

    /// Time of the remote part of the debtor's step: the creditor's micro attention, a round trip and the rows on the wire
    /// per layer; with micro-batches also the remote micro-batch's other work, which waits for it.
    fn remote_us(&self, k: i64, batch: u32) -> f64 {
        let micro_batch = self.remote_rows(k).min(batch);
        if micro_batch == 0 {
            return 0.0;
        }
        let here = RemotePart {
            tokens: self.tokens(self.blocks_there + k),
            rows: rows(self.rows_there, self.request_there, k).min(batch),
            attention_us: self.creditor.rates.attention_us,
            wait_us: self.creditor.wait_us,
            link: self.link,
            mapped: self.mapped,
        };
        let own = if self.config.micro_batches { self.debtor.rates.other_us(micro_batch) } else { 0.0 };
        here.us(&self.shape).max(self.debtor.elsewhere_us) + own
    }

    /// Number of the debtor's steps, of `step_us` each, in one step of the creditor without remote requests.
    fn pace(&self, step_us: f64) -> f64 {
        if self.config.pace && self.creditor.batch > 0 { self.creditor.step_us(0.0, 0.0) / step_us } else { 1.0 }
    }

    /// Blocks that the creditor can take before its step is `stretch` times as long as with `own_tokens` and without remote
    /// requests, at the debtor's present pace.
    #[must_use]
    pub fn stretch_limit(&self, stretch: f64, own_tokens: f64) -> i64 {
        if self.creditor.batch == 0 || self.mapped {
            return i64::MAX;
        }
        let c = &self.creditor;
        let alone = c.rates.other_us(c.batch) + own_tokens * c.rates.attention_us;
        let d = &self.debtor;
        let step_us = self.local_us(0, d.batch, 0).max(self.remote_us(0, d.batch));
        let pace = self.pace(step_us.max(1.0));
        let room_us = stretch * alone - c.step_us(self.tokens(self.blocks_there), pace);
        let block_us = f64::from(self.shape.block_tokens) * c.rates.attention_us * pace;
        whole(room_us / block_us)
    }

    /// The best k of `low..=high`, a range without 0 inside; `None` if it is empty or no k improves on 0.
    #[must_use]
    pub fn best(&self, low: i64, high: i64) -> Best {
        if low > high {
            return Best::default();
        }
        let mut best = Search { pair: self, now: self.predict(0).tokens_per_s(), best: Best::default() };
        // At `low` possibly all blocks are home, without remote rows and round trips.
        best.look(low);
        // With stale counts the debtor may run out of local tokens: a corner that is not convex.
        let corner = whole(self.debtor.local_tokens / f64::from(self.shape.block_tokens));
        for k in [corner, corner.saturating_add(1)] {
            if (low..=high).contains(&k) {
                best.look(k);
            }
        }
        let mut from = low.saturating_add(1).min(high);
        while from <= high {
            let (batch, admitted) = self.batch(from);
            let to = self.segment_end(from, batch).min(high);
            best.look_with(from, batch, admitted);
            let turn = self.turn(from, to, batch, admitted);
            for k in [turn - 1, turn, turn + 1] {
                if (from..=to).contains(&k) {
                    best.look_with(k, batch, admitted);
                }
            }
            best.look_with(to, batch, admitted);
            from = to + 1;
        }
        best.best
    }

    /// The last k from `from` on with the same batch as there.
    fn segment_end(&self, from: i64, batch: u32) -> i64 {
        let d = &self.debtor;
        let spare = d.spare.saturating_add(from);
        let room = if spare < 0 {
            // The deficit that one preemption fewer covers; all of it at last.
            let size = d.sequence_blocks.max(1);
            let preempted = spare.unsigned_abs().div_ceil(size.unsigned_abs());
            // The batch is empty from there on, whatever else there is no room for.
            let preempted = preempted.min(u64::from(d.batch).max(1));
            let fewer = i64::try_from(preempted - 1).unwrap_or(i64::MAX).saturating_mul(size);
            -spare - fewer
        } else {
            let joined = (batch - d.batch) as usize;
            let taken: i64 = d.queue[..joined].iter().map(|b| i64::from(*b)).sum();
            match d.queue.get(joined) {
                Some(next) if batch < d.batch_max => taken + i64::from(*next) - spare,
                _ => return i64::MAX,
            }
        };
        // At least one: needs of no blocks are taken at once.
        from.saturating_add(room.max(1) - 1)
    }

    /// The k in a segment with a constant batch at which local work stops covering the remote part.
    fn turn(&self, from: i64, to: i64, batch: u32, admitted: u64) -> i64 {
        if from == to {
            return from;
        }
        let excess = |k: i64| self.remote_us(k, batch) - self.local_us(k, batch, admitted);
        let (a, b) = (excess(from), excess(to));
        if a >= 0.0 {
            return from;
        }
        if b <= 0.0 {
            return to;
        }
        // It rises throughout, piece by piece linearly: bisection, 62 halvings at most.
        let (mut below, mut above) = (from, to);
        while above - below > 1 {
            let middle = below + (above - below) / 2;
            if excess(middle) <= 0.0 {
                below = middle;
            } else {
                above = middle;
            }
        }
        below
    }
}

/// The best so far.
struct Search<'a, 'b> {
    pair: &'a Pair<'b>,
    now: f64,
    best: Best,
}

impl Search<'_, '_> {
    fn look(&mut self, k: i64) {
        let (batch, admitted) = self.pair.batch(k);
        self.look_with(k, batch, admitted);
    }

    fn look_with(&mut self, k: i64, batch: u32, admitted: u64) {
        let prediction = self.pair.predict_with(k, batch, admitted);
        let gain = prediction.tokens_per_s() - self.now;
        if k == 0 || gain <= 0.0 {
            return;
        }
        let better = |best: &Option<BestMove>| best.is_none_or(|b| gain > b.gain);
        let found = Some(BestMove { blocks: k, gain, prediction });
        if better(&self.best.any) {
            self.best.any = found;
        }
        if prediction.covered() && better(&self.best.covered) {
            self.best.covered = found;
        }
    }
}

/// Number of requests with blocks at a place, from `count` now, after one request changes from `blocks` to `blocks + k`.
fn rows(count: u32, blocks: i64, k: i64) -> u32 {
    match (blocks > 0, blocks + k > 0) {
        (false, true) => count + 1,
        (true, false) => count.saturating_sub(1),
        _ => count,
    }
}

/// `n` as f64, exact for all counts of blocks.
fn signed(n: i64) -> f64 {
    let size = as_f64(n.unsigned_abs());
    if n < 0 { -size } else { size }
}

/// Rounds down to a count of blocks, clamped to 32 bits; NaN is 0.
#[allow(clippy::cast_possible_truncation, reason = "clamped to 32 bits before")]
#[must_use]
pub fn whole(x: f64) -> i64 {
    x.clamp(-f64::from(u32::MAX), f64::from(u32::MAX)).floor() as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::{BatchPoint, Calibration};
    use proptest::prelude::*;

    fn calibration() -> impl Strategy<Value = Calibration> {
        let point = (1u32..40, 10.0..5_000.0f64);
        (prop::collection::vec(point, 1..5), 0.1..2_000.0f64).prop_map(|(points, attention_us_per_ktoken)| {
            let mut batch = 0;
            let points = points.into_iter().map(|(step, step_us)| {
                batch += step;
                BatchPoint { batch, step_us }
            });
            let batches = points.collect();
            Calibration {
                batches,
                attention_us_per_ktoken,
                prefill_us_per_token: 1.0,
                copy_bytes_per_s: 1e9,
                prompt_attention_us_per_ktoken: 0.0,
            }
        })
    }

    /// Batch, batch_max beyond it, remote rows, local blocks, remote request tokens, spare, blocks of a sequence.
    type Numbers = (u32, u32, u32, u32, f64, i64, i64);

    fn numbers() -> impl Strategy<Value = Numbers> {
        (0u32..60, 0u32..40, 0u32..5, 0u32..400, 0.0..5_000.0f64, -80i64..200, 1i64..30)
    }

    /// Blocks there of other requests, of this one, of this one elsewhere; creditor's batch, its tokens.
    fn others() -> impl Strategy<Value = (i64, i64, i64, u32, f64)> {
        (0i64..200, 0i64..50, 0i64..5, 0u32..60, 0.0..50_000.0f64)
    }

    fn scan(pair: &Pair<'_>, low: i64, high: i64, covered: bool) -> Option<BestMove> {
        let now = pair.predict(0).tokens_per_s();
        let all = (low..=high).filter(|k| *k != 0).map(|k| {
            let prediction = pair.predict(k);
            BestMove { blocks: k, gain: prediction.tokens_per_s() - now, prediction }
        });
        let allowed = all.filter(|m| m.gain > 0.0 && (!covered || m.prediction.covered()));
        allowed.reduce(|a, b| if b.gain > a.gain { b } else { a })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 8_000, ..ProptestConfig::default() })]

        #[test]
        fn the_search_finds_what_the_scan_finds(
            (dc, cc) in (calibration(), calibration()),
            (batch, more, remote_rows, local, remote_request_tokens, spare, sequence_blocks) in numbers(),
            (others_there, request_there, request_elsewhere, creditor_batch, creditor_tokens) in others(),
            queue in prop::collection::vec(0u32..60, 0..12),
            (rtt_us, bytes_per_s) in (1.0..5_000.0f64, 1e6..1e10f64),
            (elsewhere_us, wait_us) in (prop_oneof![Just(0.0), 0.0..20_000.0f64], prop_oneof![Just(0.0), 0.0..20_000.0f64]),
            (micro_batches, pace, away, mapped) in any::<(bool, bool, bool, bool)>(),
        ) {
            let remote_rows = remote_rows.max(u32::from(request_there + request_elsewhere > 0));
            let pair = Pair {
                shape: ModelShape { layers: 8, block_tokens: 16, token_bytes: 4_096, row_bytes: 2_048 },
                config: ModelConfig { micro_batches, pace },
                debtor: DebtorState {
                    rates: Rates::new(&dc, true).unwrap(),
                    batch,
                    batch_max: batch + more,
                    remote_rows: remote_rows.min(batch),
                    local_tokens: f64::from(local) * 16.0,
                    remote_request_tokens,
                    spare,
                    sequence_blocks,
                    queue: &queue,
                    elsewhere_us,
                },
                creditor: CreditorState { rates: Rates::new(&cc, true).unwrap(), batch: creditor_batch, tokens: creditor_tokens, wait_us },
                link: LinkView { rtt_us, bytes_per_s },
                mapped,
                blocks_there: others_there + request_there,
                rows_there: u32::from(request_there > 0) + u32::from(others_there > 0),
                request_there,
                request_remote: request_there + request_elsewhere,
            };
            // Counts may be stale: up to twice what is there.
            let (low, high) = if away { (1, i64::from(local) * 2) } else { (-request_there, -1) };
            let best = pair.best(low, high);
            for (found, covered) in [(best.any, false), (best.covered, true)] {
                match (found, scan(&pair, low, high, covered)) {
                    (None, None) => {}
                    (Some(f), Some(e)) => {
                        prop_assert!(f.gain >= e.gain * (1.0 - 1e-9) - 1e-9, "{f:?} but the scan has {e:?}");
                        prop_assert!((low..=high).contains(&f.blocks) && (!covered || f.prediction.covered()));
                        prop_assert_eq!(f.prediction, pair.predict(f.blocks));
                    }
                    (f, e) => {
                        prop_assert!(e.is_some_and(|e| e.gain < 1e-9) && f.is_none(), "{f:?} but the scan has {e:?}");
                    }
                }
            }
        }
    }

    fn simple<'a>(debtor: &'a Calibration, creditor: &'a Calibration, queue: &'a [u32]) -> Pair<'a> {
        Pair {
            shape: ModelShape { layers: 10, block_tokens: 10, token_bytes: 1_000, row_bytes: 1_000 },
            config: ModelConfig::paper(),
            debtor: DebtorState {
                rates: Rates::new(debtor, true).unwrap(),
                batch: 2,
                batch_max: 8,
                remote_rows: 0,
                local_tokens: 2_000.0,
                remote_request_tokens: 0.0,
                spare: 0,
                sequence_blocks: 100,
                queue,
                elsewhere_us: 0.0,
            },
            creditor: CreditorState {
                rates: Rates::new(creditor, true).unwrap(),
                batch: 4,
                tokens: 1_000.0,
                wait_us: 0.0,
            },
            link: LinkView { rtt_us: 5.0, bytes_per_s: 1e9 },
            mapped: false,
            blocks_there: 0,
            rows_there: 0,
            request_there: 0,
            request_remote: 0,
        }
    }

    fn flat(step_us: f64) -> Calibration {
        let point = |batch| BatchPoint { batch, step_us };
        Calibration {
            batches: vec![point(1), point(64)],
            attention_us_per_ktoken: 1_024.0,
            prefill_us_per_token: 1.0,
            copy_bytes_per_s: 1e9,
            prompt_attention_us_per_ktoken: 0.0,
        }
    }

    #[test]
    fn equation_six_and_figure_6a_in_numbers() {
        let (d, c) = (flat(1_000.0), flat(3_000.0));
        let pair = simple(&d, &c, &[30]);
        // T = W/f + S/g = 1000 + 2000; the creditor 3000 + 1000.
        let now = pair.predict(0);
        assert_eq!((now.step.local_us, now.step.remote_us), (3_000.0, 0.0));
        assert_eq!(now.tokens_per_s(), 2e6 / 3_000.0 + 4e6 / 4_000.0);
        // Twenty blocks: 200 tokens leave (Eq. 6); the remote part is their attention, ten round trips, ten rows.
        let some = pair.predict(20);
        assert_eq!((some.step.local_us, some.step.remote_us), (2_800.0, 200.0 + 10.0 * (5.0 + 1.0)));
        assert_eq!(some.creditor_tokens_per_s, 4e6 / 4_200.0);
        assert!(some.covered());
        // Thirty: the first of the queue joins, with its own tokens.
        let joined = pair.predict(30);
        assert_eq!((joined.batch, joined.step.local_us), (3, 1_000.0 + 1_700.0 + 300.0));
        // Nearly all: the remote part is longer than the local one and decides.
        let most = pair.predict(190);
        assert!(!most.covered());
        assert_eq!(most.debtor_tokens_per_s, 3e6 / most.step.remote_us);
        // A slower creditor elsewhere is waited for all the same.
        let mut slow = pair.clone();
        (slow.debtor.elsewhere_us, slow.debtor.remote_rows) = (5_000.0, 1);
        assert_eq!(slow.predict(20).debtor_tokens_per_s, 2e6 / 5_000.0);
        // In two micro-batches the remote row's own pass waits too, and the weights are read twice.
        let micro_batches =
            Pair { config: ModelConfig { micro_batches: true, pace: false }, ..pair.clone() }.predict(20);
        assert_eq!((micro_batches.step.local_us, micro_batches.step.remote_us), (3_800.0, 1_260.0));
        // A debtor that steps every 2,800 µs asks 4,000/2,800 times as often.
        let paced = Pair { config: ModelConfig { micro_batches: false, pace: true }, ..pair }.predict(20);
        assert!((paced.creditor_tokens_per_s - 4e6 / (4_000.0 + 200.0 * 4.0 / 2.8)).abs() < 1e-9);
    }

    #[test]
    fn missing_room_costs_sequences_and_a_stretched_creditor_takes_no_more() {
        let (d, c) = (flat(1_000.0), flat(3_000.0));
        let mut pair = simple(&d, &c, &[]);
        pair.debtor.spare = -1;
        assert_eq!(pair.predict(0).batch, 1);
        assert_eq!(pair.predict(1).batch, 2);
        pair.debtor.spare = -101;
        assert_eq!((pair.predict(0).batch, pair.predict(0).debtor_tokens_per_s), (0, 0.0));
        // Its step of 4000 us may take 5000: 1000 tokens, at one answer per step.
        assert_eq!(pair.stretch_limit(1.25, 1_000.0), 100);
        pair.creditor.batch = 0;
        assert_eq!(pair.stretch_limit(1.25, 1_000.0), i64::MAX);
    }
}
