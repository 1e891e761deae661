//! The trial of warpgroup kernels: whether `attention_wgmma_*` agrees with `attention_prefill_*_fast` on this device,
//! and whether it is faster.
//!
//! A warpgroup kernel may trap or hang, and the process then loses its context: [`CudaDevice::try_warpgroups`] is
//! called in expendable processes (`lagoon cuda-trial`, gpu-check's children), never in a server.
//!
//! The inputs expose errors:
//!
//! * KV is a hash of the element's index, without any period: a tile that is read twice differs from the right one.
//! * A quarter of the rows has one dominating key, anywhere in what the row sees; a quarter has nearly equal weights;
//!   the others have a few large ones. A key lost or taken from another place changes some row entirely.
//! * Errors are relative to their own row, because outputs over many keys are small.
//! * Runs have odd lengths, lie in random order and have gaps between them; some cases have a window or biases by distance.

use super::tuner::{TuneFor, hash, random};
use super::{CudaDevice, CudaKv, CudaTensor};
use crate::kernels::attention::{Precision, Tuning};
use lagoon_backend::{AttnBatch, AttnRows, Device, DeviceError, Partials};
use lagoon_types::run::visible;
use lagoon_types::{Alibi, AttentionGeometry, DType, KvRun};
use std::time::Instant;

/// Result of comparing and timing warpgroup kernels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tried {
    /// Every row of every case is within its bound of the reference kernel's.
    pub agree: bool,
    /// Warpgroup kernels take less time for a prompt, by more than noise.
    pub faster: bool,
    /// Largest error over its bound (1 is at the bound): of outputs, and of log-sum-exps.
    pub worst: [f32; 2],
    /// The case and the row with the largest error, for people.
    pub worst_case: String,
    /// Milliseconds of a prompt's attention with `mma.sync` and with warpgroup products.
    pub prefill_ms: [f32; 2],
}

impl Tried {
    /// Whether warpgroup kernels may be used for serving.
    #[must_use]
    pub fn usable(&self) -> bool {
        self.agree && self.faster
    }
}

/// Bound of a row's largest output error over the row's largest output, in units of the store's rounding (`2^-8` relative for
/// bf16, `2^-11` for f16).
///
/// Both kernels round queries alike, and attention weights each on its own, because their running maxima differ. A weight's
/// rounding is 0.42 units (RMS over mantissas), so the two differ by 0.6 units times `sqrt(sum(weight^2))` times the values'
/// RMS. The output of values with mean zero has the same form without the 0.6 units, for flat and for peaked rows alike:
/// their ratio does not depend on the row. The largest of millions of elements is 6 times the RMS, the largest of a row's 64
/// or 128 outputs at least 1.3 times: less than 3 units. 8 leaves room for the sums of tensor cores.
const OUTPUT_UNITS: f32 = 8.0;
/// Bound of a log-sum-exp's error, absolute. Log-sum-exps come from weights before rounding. Scores here are up to 40, their
/// sums of absolute products up to 160; each of at most 8 f32 sums of a product loses `2^-23` of that in either kernel, where
/// tensor cores truncate: `2^-11.6` together.
const LSE_MAX: f32 = 1.0 / 1024.0;
/// Required speed-up, as a share of the time.
const GAIN_MIN: f32 = 0.01;
/// Tokens of the timed prompt, at most.
const PROMPT: u32 = 4096;
/// Times that each kernel is timed; the shortest counts.
const ROUNDS: usize = 3;
/// Seed of the KV of a store's first layer.
const KV_SEED: u64 = 100;
/// Tokens written at a time.
const WRITTEN: u32 = 512;

/// Rows of one sequence over runs of a store.
struct Case {
    name: &'static str,
    rows: u32,
    /// Position of the first row.
    pos0: u32,
    window: Option<u32>,
    alibi: Option<Alibi>,
    runs: Vec<KvRun>,
}

/// Cuts `context` positions into runs of `length(i)` tokens, and places them in random order with gaps of 1 to 5 slots.
fn scattered(seed: u64, context: u32, length: impl Fn(u64) -> u32) -> Vec<KvRun> {
    let (mut runs, mut pos) = (Vec::new(), 0);
    while pos < context {
        let len = length(runs.len() as u64).min(context - pos);
        runs.push(KvRun { base: 0, len, first_pos: pos });
        pos += len;
    }
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by_key(|run| hash(seed, *run as u64));
    let mut slot = 1;
    for run in order {
        runs[run].base = slot;
        slot += runs[run].len + 1 + u32::try_from(hash(seed + 1, run as u64) % 5).unwrap_or(0);
    }
    runs
}

/// All cases over contexts of at most `prompt` tokens.
fn cases(prompt: u32) -> Vec<Case> {
    let odd = |seed| move |run| [1, 3, 17, 63, 65, 129, 257, 511][usize::try_from(hash(seed, run) % 8).unwrap_or(0)];
    let whole = KvRun { base: 3, len: prompt, first_pos: 0 };
    let tail = |rows: u32| (rows.min(prompt), prompt - rows.min(prompt));
    let case = |name, (rows, pos0), runs| Case { name, rows, pos0, window: None, alibi: None, runs };
    let alibi = Some(Alibi { bias_max: 8.0 });
    vec![
        case("a prompt in one run", (prompt, 0), vec![whole]),
        case("a prompt in scattered runs", (prompt / 2 + 1, 0), scattered(10, prompt / 2 + 1, odd(11))),
        case("the end of a context in scattered runs", tail(133), scattered(12, prompt, odd(13))),
        case("the end of a context in blocks", tail(200), scattered(14, prompt, |_| 16)),
        Case { window: Some(517), ..case("a window", tail(271), scattered(16, prompt, odd(17))) },
        Case { window: Some(700), alibi, ..case("a window and biases", tail(71), scattered(18, prompt, odd(19))) },
    ]
}

impl Case {
    /// Number of slots that the case needs.
    fn slots(&self) -> u32 {
        self.runs.iter().map(|run| run.base + run.len).max().unwrap_or(0)
    }

    /// The slot of the `n`th key (modulo their number) that the row sees.
    fn key(&self, row: u32, n: u64) -> u32 {
        let seen = visible(self.pos0 + row, self.window);
        let pos = seen.start + u32::try_from(n % u64::from(seen.end - seen.start)).unwrap_or(0);
        let at = self.runs.partition_point(|run| run.first_pos <= pos) - 1;
        self.runs[at].base + pos - self.runs[at].first_pos
    }

    /// Queries `[rows][q_dim]`. With scores scaled by `1 / sqrt(head_dim)`, `6 * key` scores 2 `sqrt(head_dim)` at that key and
    /// ±2 at others; random queries between -9 and 9 score ±3, between -0.3 and 0.3 score ±0.1.
    fn queries(&self, seed: u64, g: AttentionGeometry) -> Vec<f32> {
        let (dim, heads) = (g.head_dim as usize, g.heads as usize);
        let mut queries = Vec::with_capacity(self.rows as usize * g.q_dim());
        for row in 0..self.rows {
            for head in 0..heads {
                let draw = hash(seed, u64::from(row) * heads as u64 + head as u64);
                let from = queries.len() as u64;
                let scaled = |scale: f32| (0..dim as u64).map(move |i| scale * random(seed + 1, from + i));
                match draw % 4 {
                    0 => {
                        let key = element(g, self.key(row, draw >> 8), 0, head / g.group() as usize);
                        queries.extend((0..dim as u64).map(|i| 6.0 * random(KV_SEED, key + i)));
                    }
                    1 => queries.extend(scaled(0.3)),
                    _ => queries.extend(scaled(9.0)),
                }
            }
        }
        queries
    }
}

/// Index of the first element of a KV head's key (`half` 0) or value (1) in a layer.
fn element(g: AttentionGeometry, slot: u32, half: u64, kv_head: usize) -> u64 {
    (u64::from(slot) * 2 + half) * g.kv_dim() as u64 + kv_head as u64 * u64::from(g.head_dim)
}

/// Outputs `[rows][q_dim]` and log-sum-exps `[rows][heads]`.
struct Outputs {
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Tried {
    /// Compares every row and head of both kernels' outputs.
    fn compare(&mut self, case: &Case, g: AttentionGeometry, unit: f32, [plain, wgmma]: &[Outputs; 2]) {
        let dim = g.head_dim as usize;
        for (i, (want, got)) in plain.out.chunks(dim).zip(wgmma.out.chunks(dim)).enumerate() {
            let largest = want.iter().fold(0f32, |max, x| max.max(x.abs()));
            // NaN counts as a disagreement.
            let error = want.iter().zip(got).map(|(a, b)| (a - b).abs()).fold(0f32, worse);
            let errors = [error / (OUTPUT_UNITS * unit * largest), (plain.lse[i] - wgmma.lse[i]).abs() / LSE_MAX];
            for (worst, error) in self.worst.iter_mut().zip(errors.map(|error| worse(0.0, error))) {
                if error > *worst {
                    *worst = error;
                    self.worst_case =
                        format!("{}, row {}, head {}", case.name, i / g.heads as usize, i % g.heads as usize);
                }
            }
        }
    }
}

/// The larger of the two; NaN counts as infinite.
fn worse(max: f32, x: f32) -> f32 {
    if x.is_nan() { f32::INFINITY } else { max.max(x) }
}

impl CudaDevice {
    /// Whether this device and store suit warpgroup kernels: their code is loaded (compute capability 9.x), heads of 64 or 128,
    /// f16 or bf16, and [`Precision::Fast`].
    #[must_use]
    pub fn takes_warpgroups(&self, geometry: AttentionGeometry, dtype: DType) -> bool {
        let there = self.has_warpgroups();
        let shape = [64, 128].contains(&geometry.head_dim) && dtype != DType::F32;
        there && shape && self.tuning.precision == Precision::Fast
    }

    /// Compares and times warpgroup kernels, without changing the tuning. A kernel's fault costs this process its
    /// context: call it in an expendable process.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if [`CudaDevice::takes_warpgroups`] is false; no memory; those of the driver, a
    /// trap included.
    pub fn try_warpgroups(&mut self, what: &TuneFor) -> Result<Tried, DeviceError> {
        if !self.takes_warpgroups(what.geometry, what.dtype) {
            return Err(DeviceError::Unsupported("warpgroup attention with this store and precision".to_owned()));
        }
        let before = self.tuning;
        let tried = self.compare_warpgroups(what);
        self.set_tuning(before);
        tried
    }

    fn compare_warpgroups(&mut self, what: &TuneFor) -> Result<Tried, DeviceError> {
        let until = Instant::now() + what.time_max;
        let g = what.geometry;
        let cases = cases(what.contexts().into_iter().max().unwrap_or(1).min(PROMPT));
        let slots = cases.iter().map(Case::slots).max().unwrap_or(0);
        let kv = self.random_store(what, slots)?;
        let unit = if what.dtype == DType::F16 { 1.0 / 2048.0 } else { 1.0 / 256.0 };
        let (mut tried, scale) = (Tried::default(), 1.0 / (g.head_dim as f32).sqrt());
        for (i, case) in cases.iter().enumerate() {
            let mut q = self.tensor(case.rows as usize, g.q_dim())?;
            self.write(&mut q, 0, &case.queries(200 + 2 * i as u64, g))?;
            let mut out = Partials::new(self, case.rows as usize, g)?;
            let runs = u32::try_from(case.runs.len()).unwrap_or(u32::MAX);
            let seqs = [AttnRows { row0: 0, rows: case.rows, pos0: case.pos0, run0: 0, runs }];
            let Case { window, alibi, runs, .. } = case;
            let batch =
                AttnBatch { geometry: g, scale, window: *window, alibi: *alibi, softcap: None, seqs: &seqs, runs };
            let plain = self.outputs(false, &q, &batch, &kv, &mut out)?;
            let wgmma = self.outputs(true, &q, &batch, &kv, &mut out)?;
            tried.compare(case, g, unit, &[plain, wgmma]);
            if i == 0 {
                tried.prefill_ms = self.race(&q, &batch, &kv, &mut out, until)?;
            }
        }
        tried.agree = tried.worst.iter().all(|worst| *worst <= 1.0);
        tried.faster = tried.prefill_ms[1] < tried.prefill_ms[0] * (1.0 - GAIN_MIN);
        Ok(tried)
    }

    /// A store of random KV, different in each layer.
    fn random_store(&mut self, what: &TuneFor, slots: u32) -> Result<CudaKv, DeviceError> {
        let shape = what.shape(what.layers(slots));
        let mut kv = self.kv(shape, slots as usize)?;
        let elements = shape.layer_token_bytes() / what.dtype.size();
        for layer in 0..shape.layers as usize {
            for slot in (0..slots).step_by(WRITTEN as usize) {
                let tokens = (slots - slot).min(WRITTEN);
                let (from, to) = (u64::from(slot) * elements as u64, u64::from(slot + tokens) * elements as u64);
                let values: Vec<f32> = (from..to).map(|i| random(KV_SEED + layer as u64, i)).collect();
                let mut bytes = Vec::new();
                what.dtype.encode(&values, &mut bytes);
                self.kv_write(&mut kv, layer, slot, &bytes)?;
            }
        }
        Ok(kv)
    }

    fn choose(&mut self, wgmma: bool) {
        self.set_tuning(Tuning { precision: Precision::Fast, wgmma, ..self.tuning });
    }

    /// Attention over the store's first layer with one of the two kernels.
    fn outputs(
        &mut self,
        wgmma: bool,
        q: &CudaTensor,
        batch: &AttnBatch<'_>,
        kv: &CudaKv,
        partials: &mut Partials<CudaTensor>,
    ) -> Result<Outputs, DeviceError> {
        let (g, rows) = (batch.geometry, batch.rows());
        self.choose(wgmma);
        self.attention(q, batch, kv, 0, partials)?;
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        self.read(&partials.out, 0..rows, 0..g.q_dim(), &mut out)?;
        self.read(&partials.lse, 0..rows, 0..g.heads as usize, &mut lse)?;
        Ok(Outputs { out, lse })
    }

    /// The shortest times of both kernels, measured alternately.
    fn race(
        &mut self,
        q: &CudaTensor,
        batch: &AttnBatch<'_>,
        kv: &CudaKv,
        out: &mut Partials<CudaTensor>,
        until: Instant,
    ) -> Result<[f32; 2], DeviceError> {
        let mut best = [f32::INFINITY; 2];
        for round in 0..ROUNDS {
            if round > 0 && Instant::now() > until {
                break;
            }
            for (best, wgmma) in best.iter_mut().zip([false, true]) {
                self.choose(wgmma);
                *best = best.min(self.milliseconds(q, batch, kv, out)?);
            }
        }
        Ok(best)
    }
}
