//! Calibration: an executor's measurements of itself before it serves, for the planner's model (v2 Eq. 5).
//!
//! It measures decode steps of growing batches whose sequences see one token each (f), micro attention over two context
//! lengths (g), chunks of a prompt, without and behind a context, and KV copied out and in. All of it uses the executor's
//! own commands, so that the measured code is the serving code. Each point is the fastest of a few repetitions: other
//! programs only add time.
//!
//! Bounded: a point starts only if it is expected to fit the rest of the budget, or a few times that on devices whose
//! steps of one row take long; the first point always does. It leaves no trace: written slots are zeroed afterwards, and
//! nothing else is kept.

use anyhow::{Context, bail};
use lagoon_backend::{AttnRows, Device};
use lagoon_protocol::{BatchPoint, Calibration};
use lagoon_runner::{
    Command, Executor, RemoteQuery, RemoteRead, RemoteTag, RemoteWork, RemoteWrite, Report, SampleSpec, SeqRows,
    StepWork,
};
use lagoon_types::{AttentionGeometry, DType, KvRun, KvShape, MicroBatch, RingRows, SamplingParams, SeqId, StepId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest batch measured.
const BATCH_MAX: u32 = 64;
/// Longest context measured, in tokens.
const CONTEXT_MAX: u32 = 4096;
/// Maximum tokens of the prefill chunk.
const PREFILL_MAX: u32 = 512;
/// Maximum tokens copied at once.
const COPY_MAX: u32 = 256;
/// Repetitions of a point: at least so many (after a warm-up), then until the time is used.
const REPEATS_MIN: u32 = 3;
const POINT_TIME: Duration = Duration::from_millis(15);
/// Ratio of a batch's time to half that batch's above which it was disturbed, and is measured again.
const DISTURBED: f64 = 2.5;
/// Part of a point's time, as a divisor, below which a difference between two points is noise.
const NOISE: u32 = 100;

/// Sizes of the measured executor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject {
    pub(crate) geometry: AttentionGeometry,
    pub(crate) kv: KvShape,
    /// Slots of its KV store.
    pub(crate) slots: u32,
    /// Longest sequence of the model, in tokens.
    pub(crate) positions: u32,
    pub(crate) step_rows: u32,
    pub(crate) step_seqs: u32,
    /// Whether it has weights: not on a kv node.
    pub(crate) runs_requests: bool,
    /// Whether windowed KV is kept apart.
    pub(crate) rings: bool,
    /// Window of all layers, in tokens.
    pub(crate) window: Option<u32>,
    pub(crate) vocab: usize,
}

/// Measures an executor that does not serve yet, in about 1.2 times `budget`, or a few times that where a step of one row takes a tenth of it.
pub(crate) fn calibrate<D: Device>(
    executor: &mut Executor<D>,
    subject: Subject,
    budget: Duration,
) -> anyhow::Result<Calibration> {
    let slots = subject.slots.min(CONTEXT_MAX);
    executor.hold(0..slots).context("memory for a measurement")?;
    let mut bench = Bench { executor, subject, step: 0 };
    let (attention_us_per_ktoken, copy_bytes_per_s) =
        (bench.attention(budget.mul_f64(0.2))?, bench.copy(budget.mul_f64(0.1))?);
    let (mut batches, mut prefill_us_per_token, mut prompt_attention_us_per_ktoken) = (Vec::new(), 0.0, 0.0);
    if subject.runs_requests {
        batches = bench.batches(budget.mul_f64(0.4))?;
        let one_row_us = batches.first().map_or(0.0, |p| p.step_us);
        let (rows, chunk) = bench.prefill(budget.mul_f64(0.3), one_row_us)?;
        prefill_us_per_token = us(chunk) / f64::from(rows);
        prompt_attention_us_per_ktoken =
            bench.prompt_attention(budget.mul_f64(0.2), (rows, chunk, one_row_us), attention_us_per_ktoken)?;
        bench.clear(subject.slots.min(PREFILL_MAX.max(BATCH_MAX)))?;
    }
    executor.push(Command::Release { slots: std::iter::once(0..slots).collect() });
    while executor.turn(&mut |_| {}) {}
    Ok(Calibration {
        batches,
        attention_us_per_ktoken,
        prefill_us_per_token,
        copy_bytes_per_s,
        prompt_attention_us_per_ktoken,
    })
}

/// Runs of a point, its warm-up included.
fn runs_least() -> f64 {
    f64::from(1 + REPEATS_MIN)
}

struct Bench<'a, D: Device> {
    executor: &'a mut Executor<D>,
    subject: Subject,
    step: u64,
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Time of a row's attention over 1,024 tokens, from chunks of `rows` rows without a context and behind one of which each row sees `seen`
/// tokens. A small difference counts as noise, not as none.
fn us_per_ktoken((alone, behind): (Duration, Duration), rows: u32, seen: u32) -> f64 {
    us(behind.saturating_sub(alone).max(alone / NOISE)) / f64::from(rows) / f64::from(seen) * 1024.0
}

impl<D: Device> Bench<'_, D> {
    /// Runs a command until its last report.
    fn run(&mut self, command: Command) -> anyhow::Result<Report> {
        self.executor.push(command);
        let mut last = None;
        let mut note = |report| match report {
            Report::Memory(_) | Report::Launches(_) => {}
            report => last = Some(report),
        };
        while self.executor.turn(&mut note) {}
        match last.context("the device did not answer")? {
            Report::Failed { error, .. } => bail!("a step failed: {error}"),
            Report::RemoteFailed { error, .. } => bail!("the device failed: {error}"),
            report => Ok(report),
        }
    }

    /// Time of the fastest of some runs.
    fn fastest(&mut self, mut run: impl FnMut(&mut Self) -> anyhow::Result<()>) -> anyhow::Result<Duration> {
        // Warm-up: compiles kernels and touches memory.
        run(self)?;
        let begun = Instant::now();
        let mut fastest = Duration::MAX;
        let mut runs = 0;
        while runs < REPEATS_MIN || begun.elapsed() < POINT_TIME {
            let started = Instant::now();
            run(self)?;
            fastest = fastest.min(started.elapsed());
            runs += 1;
        }
        Ok(fastest)
    }

    /// Times of steps of 1, 2, 4, … sequences, each at position 0.
    fn batches(&mut self, budget: Duration) -> anyhow::Result<Vec<BatchPoint>> {
        let most = BATCH_MAX.min(self.subject.step_seqs).min(self.subject.step_rows).min(self.subject.slots);
        let mut points = Vec::new();
        let begun = Instant::now();
        let mut batch = 1;
        while batch <= most {
            let before = begun.elapsed();
            let mut time = self.fastest(|bench| bench.decode(batch))?;
            if points.last().is_some_and(|half: &BatchPoint| us(time) > DISTURBED * half.step_us) {
                time = time.min(self.fastest(|bench| bench.decode(batch))?);
            }
            points.push(BatchPoint { batch, step_us: us(time) });
            // The next point takes at most twice as long, repetitions included.
            if begun.elapsed() + 2 * (begun.elapsed() - before) > budget {
                break;
            }
            batch *= 2;
        }
        Ok(points)
    }

    /// Rows of a prompt's first chunk, and its time: of twice as many as before while the budget allows. A chunk of few takes the time to
    /// read the weights, which a step of one takes as well (`one_row_us`), so it goes on beyond its budget until one takes twice that.
    fn prefill(&mut self, budget: Duration, one_row_us: f64) -> anyhow::Result<(u32, Duration)> {
        let Subject { step_rows, slots, positions, .. } = self.subject;
        let most = PREFILL_MAX.min(step_rows).min(slots).min(positions);
        let mut rows = most.min(8);
        let begun = Instant::now();
        loop {
            // Warm-up, as for each point.
            self.chunk(rows, 0, true)?;
            let started = Instant::now();
            self.chunk(rows, 0, true)?;
            let once = started.elapsed();
            let hidden = us(once) < 2.0 * one_row_us && begun.elapsed() < 4 * budget;
            // The next one takes at most twice as long, and then is repeated.
            let fits = begun.elapsed() + once.mul_f64(4.0 + 2.0 * runs_least()) <= budget;
            if rows < most && (hidden || fits) {
                rows = (rows * 2).min(most);
                continue;
            }
            let repeats = begun.elapsed() + once.mul_f64(runs_least()) <= 2 * budget;
            return Ok((rows, if repeats { self.fastest(|bench| bench.chunk(rows, 0, true))? } else { once }));
        }
    }

    /// Time of a row's attention over 1,024 tokens in all layers, in microseconds, in a chunk of at most `rows` rows, of which one takes
    /// `chunk`, and one of a single row `one_row_us`; behind as long a context as the budget allows if a row attends to it as slowly as one
    /// that decodes (`decode_us_per_ktoken`). 0, not measured: if too little of the budget is left for a context, and if windowed KV is kept
    /// apart.
    fn prompt_attention(
        &mut self,
        budget: Duration,
        (mut rows, chunk, one_row_us): (u32, Duration, f64),
        decode_us_per_ktoken: f64,
    ) -> anyhow::Result<f64> {
        let Subject { slots, positions, rings, window, .. } = self.subject;
        // A chunk without a context takes a quarter of it, and so do at least four steps of one row where those are slow.
        let budget_us = (4.0 * runs_least() * one_row_us).clamp(us(budget), 5.0 * us(budget));
        let mut about_us = us(chunk);
        let fits = |about_us: f64| about_us * 4.0 * runs_least() <= budget_us;
        while rows > 1 && !fits(about_us) {
            (rows, about_us) = (rows / 2, (about_us / 2.0).max(one_row_us));
        }
        let longest = CONTEXT_MAX.min(slots).min(positions).saturating_sub(rows);
        if rings || longest == 0 || !fits(about_us) {
            return Ok(0.0);
        }
        let left_us = budget_us / runs_least() - 2.0 * about_us;
        let affordable = left_us / (decode_us_per_ktoken / 1024.0) / f64::from(rows);
        let mut context = longest;
        while context > 1 && f64::from(context) > affordable {
            context /= 2;
        }
        let alone = self.fastest(|bench| bench.chunk(rows, 0, false))?;
        let behind = self.fastest(|bench| bench.chunk(rows, context, false))?;
        Ok(us_per_ktoken((alone, behind), rows, context.min(window.unwrap_or(u32::MAX))))
    }

    fn decode(&mut self, batch: u32) -> anyhow::Result<()> {
        let seqs = (0..batch).map(|i| SeqRows { row0: i, rows: 1, run0: i, runs: 1, ..self.seq(i) });
        let runs = (0..batch).map(|i| KvRun { base: i, len: 1, first_pos: 0 });
        let (seqs, runs) = (seqs.collect(), runs.collect());
        self.forward(batch, seqs, runs)
    }

    /// A prompt's chunk behind a context of whatever its slots hold: its last row may be sampled only without one.
    fn chunk(&mut self, rows: u32, context: u32, sampled: bool) -> anyhow::Result<()> {
        let before = KvRun { base: rows, len: context, first_pos: 0 };
        let own = KvRun { base: 0, len: rows, first_pos: context };
        let runs = if context > 0 { vec![before, own] } else { vec![own] };
        let mut seq = SeqRows { rows, pos0: context, runs: 1 + u32::from(context > 0), ..self.seq(0) };
        seq.sample = seq.sample.filter(|_| sampled);
        self.forward(rows, vec![seq], runs)
    }

    /// A sequence at position 0 with greedy sampling.
    fn seq(&self, number: u32) -> SeqRows {
        let params = Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
        let sample = Some(SampleSpec::new(params, 0));
        let ring = self.subject.rings.then_some(RingRows { ring: number, from: 0, warm_up: false, load: false });
        SeqRows {
            seq: SeqId(number.into()),
            row0: 0,
            rows: 0,
            drafts: 0,
            pos0: 0,
            run0: 0,
            runs: 0,
            ring,
            window: None,
            sample,
        }
    }

    fn forward(&mut self, rows: u32, seqs: Vec<SeqRows>, runs: Vec<KvRun>) -> anyhow::Result<()> {
        self.step += 1;
        let work = StepWork {
            step: StepId(self.step),
            micro_batch: MicroBatch::Local,
            // Different ones, which take different experts.
            tokens: (0..rows).map(|row| row % u32::try_from(self.subject.vocab).unwrap_or(u32::MAX)).collect(),
            slots: (0..rows).collect(),
            seqs,
            runs,
            remote: RemoteWork::default(),
            next_row: None,
            watched: false,
            announced: false,
            scores: Vec::new(),
            hidden: Vec::new(),
        };
        match self.run(Command::Step(Box::new(work)))? {
            Report::Done { .. } => Ok(()),
            other => bail!("a step ended with {other:?}"),
        }
    }

    /// Time of attention over 1,024 tokens in all layers, in microseconds: from the difference of two lengths, without
    /// constant costs.
    fn attention(&mut self, budget: Duration) -> anyhow::Result<f64> {
        let Subject { slots, positions, window, .. } = self.subject;
        let longest = CONTEXT_MAX.min(slots).min(positions).min(window.unwrap_or(u32::MAX));
        let (mut long, mut times) = (longest.min(64), None);
        let begun = Instant::now();
        // Longer contexts as far as the budget allows: short ones are below the clock's resolution.
        loop {
            let before = begun.elapsed();
            let short = (long / 4).max(1);
            let pair = (self.micro(short)?, self.micro(long)?);
            times = Some((short, long, pair)).or(times);
            if long == longest || begun.elapsed() + 4 * (begun.elapsed() - before) > budget {
                break;
            }
            long = (long * 4).min(longest);
        }
        let Some((short, long, (fast, slow))) = times.filter(|(short, long, _)| short < long) else { return Ok(0.0) };
        let per_token = us(slow.saturating_sub(fast)) / f64::from(long - short);
        // If noise exceeds the difference, the whole time is a usable upper bound.
        let per_token = if per_token > 0.0 { per_token } else { us(slow) / f64::from(long) };
        Ok(per_token * 1024.0)
    }

    /// Fastest time of attention over `context` tokens in every layer.
    fn micro(&mut self, context: u32) -> anyhow::Result<Duration> {
        let queries: bytes::Bytes = vec![0; self.subject.geometry.q_dim() * DType::F32.size()].into();
        self.fastest(|bench| {
            for layer in 0..bench.subject.kv.layers {
                bench.run(Command::RemoteQuery(RemoteQuery {
                    tag: RemoteTag(0),
                    layer,
                    dtype: DType::F32,
                    queries: queries.clone(),
                    seqs: vec![AttnRows { row0: 0, rows: 1, pos0: context - 1, run0: 0, runs: 1 }],
                    runs: vec![KvRun { base: 0, len: context, first_pos: 0 }],
                }))?;
            }
            Ok(())
        })
    }

    /// Rate of KV copies, in bytes per second: the slower one of out of and into the store.
    fn copy(&mut self, budget: Duration) -> anyhow::Result<f64> {
        let Subject { kv, slots, .. } = self.subject;
        // 100 MB/s is below the rate of any supported device.
        let affordable = budget.as_micros() * 100 / kv.token_bytes() as u128;
        let tokens = COPY_MAX.min(slots).min(u32::try_from(affordable).unwrap_or(u32::MAX).max(1));
        let bytes = tokens as usize * kv.token_bytes();
        let read = self.fastest(|bench| (0..kv.layers).try_for_each(|layer| bench.read(layer, tokens)))?;
        // The read of one token completes after the writes.
        let written = self.fastest(|bench| {
            bench.clear(tokens)?;
            bench.read(0, 1)
        })?;
        #[allow(clippy::cast_precision_loss, reason = "a few megabytes")]
        Ok(bytes as f64 / read.max(written).as_secs_f64().max(1e-9))
    }

    fn read(&mut self, layer: u32, tokens: u32) -> anyhow::Result<()> {
        let read = RemoteRead { tag: RemoteTag(0), layer, pieces: vec![(0, tokens)] };
        self.run(Command::RemoteRead(read)).map(drop)
    }

    /// Zeroes the first `tokens` slots in every layer.
    fn clear(&mut self, tokens: u32) -> anyhow::Result<()> {
        let kv: bytes::Bytes = vec![0; tokens as usize * self.subject.kv.layer_token_bytes()].into();
        for layer in 0..self.subject.kv.layers {
            self.run(Command::RemoteWrite(RemoteWrite {
                tag: None,
                layer,
                pieces: vec![(0, tokens)],
                kv: kv.clone(),
            }))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{bundled, model::OpenModel};
    use lagoon_backend::cpu::CpuDevice;
    use lagoon_model::Weights;
    use lagoon_runner::{ExecutorConfig, Model};
    use lagoon_types::KvSpace;

    const SLOTS: u32 = 1024;

    fn executor(with_weights: bool) -> (Executor<CpuDevice>, Subject) {
        let dir = tempfile::tempdir().unwrap();
        bundled::extract(dir.path()).unwrap();
        let model = OpenModel::open(dir.path(), "m".to_owned(), None, None).unwrap();
        let mut device = CpuDevice::with_threads(1);
        let weights = with_weights.then(|| {
            let checkpoint = model.checkpoint.as_ref().unwrap();
            let weights = Weights::load(&mut device, checkpoint, &model.config, None, &mut |_, _| {}).unwrap();
            Model::new(&model.config, weights)
        });
        let config = ExecutorConfig {
            sampled_rows: 4,
            ..ExecutorConfig::alone(KvSpace::flat(SLOTS, 1), model.dtype.into(), 32)
        };
        let executor = Executor::new(device, &model.config, weights, config).unwrap();
        let subject = Subject {
            geometry: model.config.geometry,
            kv: model.config.kv_shape(model.dtype),
            slots: SLOTS,
            positions: model.config.max_positions,
            step_rows: 32,
            step_seqs: 4,
            runs_requests: with_weights,
            rings: false,
            window: None,
            vocab: model.config.vocab,
        };
        (executor, subject)
    }

    #[test]
    fn everything_is_measured_and_no_trace_left() {
        let (mut executor, subject) = executor(true);
        let measured = calibrate(&mut executor, subject, Duration::from_secs(20)).unwrap();
        let batches: Vec<u32> = measured.batches.iter().map(|p| p.batch).collect();
        assert!(batches == [1, 2, 4], "{measured:?}");
        assert!(measured.batches.iter().all(|p| p.step_us > 0.0), "{measured:?}");
        assert!(measured.prefill_us_per_token > 0.0, "{measured:?}");
        assert!(measured.attention_us_per_ktoken > 0.0 && measured.copy_bytes_per_s > 1e6, "{measured:?}");
        assert!(measured.prompt_attention_us_per_ktoken > 0.0, "{measured:?}");

        let mut bench = Bench { executor: &mut executor, subject, step: 0 };
        for layer in 0..subject.kv.layers {
            let read = RemoteRead { tag: RemoteTag(1), layer, pieces: vec![(0, SLOTS)] };
            let Report::RemoteKv { kv, .. } = bench.run(Command::RemoteRead(read)).unwrap() else { panic!("no KV") };
            assert!(kv.iter().all(|byte| *byte == 0), "layer {layer} was written");
        }
    }

    #[test]
    fn attention_is_what_a_context_adds() {
        let of = |alone_us, behind_us| {
            us_per_ktoken((Duration::from_micros(alone_us), Duration::from_micros(behind_us)), 64, 2048)
        };
        assert!((of(8_000, 8_640) - 5.0).abs() < 1e-9);
        // Noise: a hundredth of the chunk, never all of it.
        assert!((of(8_000, 7_900) - 0.625).abs() < 1e-9 && (of(8_000, 8_010) - 0.625).abs() < 1e-9);
    }

    #[test]
    fn a_kv_node_measures_attention_and_copies_only() {
        let (mut executor, subject) = executor(false);
        // Every point is measured once at least, however small the budget is.
        let measured = calibrate(&mut executor, subject, Duration::from_millis(1)).unwrap();
        assert!(measured.batches.is_empty() && measured.prefill_us_per_token == 0.0, "{measured:?}");
        assert!(measured.attention_us_per_ktoken > 0.0 && measured.copy_bytes_per_s > 0.0, "{measured:?}");
    }
}
