//! The host backend against this machine's own limits, on a 125M-parameter Llama (hidden 768, intermediate 2048, 12
//! layers, 12 query and 4 KV heads of 64, vocabulary 32000) with random weights, as the operations that a model issues:
//!
//! * decode at batch 1: bytes of weights and KV per second, over what a plain parallel sum of a large buffer reads per
//!   second in the same run;
//! * products of 1 to 32 rows with the vocabulary's weight: its bytes per second over the same read, and floating-point operations
//!   per second;
//! * prefill in chunks of 512: floating-point operations per second (projections and attention), over those of the
//!   `gemm` crate on f32 matrices of the same projections in the same run.
//!
//! The two sides alternate, so that load on the machine falls on both, and `ratio` is a median over the pairs. On a
//! heavily loaded machine `ratio` is noise, because schedulers favour short bursts over long sums; read `cpu_ratio`
//! there. It divides by processor time instead of elapsed time, so that waiting for a processor does not count (Linux
//! only). Run with `cargo bench -p lagoon-benches --bench cpu -- [--json] [--quick] [--threads N] [--format
//! F16|Q4_K|…] [--only decode|rows|prefill] [--context N]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes and positions of this benchmark are small"
)]

use bytes::Bytes;
use lagoon_backend::conformance::Data;
use lagoon_backend::cpu::{CpuKv, CpuTensor, CpuWeight};
use lagoon_backend::{
    Activation, AttnBatch, AttnRows, CpuDevice, Device, DeviceError, Mode, Partials, WeightFormat, WeightPart,
    WeightSource,
};
use lagoon_types::{AttentionGeometry, DType, KvRun, KvShape};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::time::Instant;

const HIDDEN: usize = 768;
const INTERMEDIATE: usize = 2048;
const LAYERS: usize = 12;
const VOCAB: usize = 32_000;
const GEOMETRY: AttentionGeometry = AttentionGeometry { heads: 12, kv_heads: 4, head_dim: 64, latent: false };
const CHUNK: usize = 512;
/// Bytes of the buffer that the streaming read sums: far beyond any cache.
const STREAM_BYTES: usize = 384 << 20;
/// Parameters that a decode step reads: all but the embedding table, of which it reads one row.
const READ_PARAMETERS: usize =
    LAYERS * HIDDEN * (GEOMETRY.qkv_dim() + GEOMETRY.q_dim() + 3 * INTERMEDIATE) + VOCAB * HIDDEN;
/// Packed formats have KV in f16.
const FORMATS: [WeightFormat; 6] = [
    WeightFormat::F16,
    WeightFormat::BF16,
    WeightFormat::Q8_0,
    WeightFormat::Q4_0,
    WeightFormat::Q4K,
    WeightFormat::Q6K,
];
/// Inner and outer dimension of a layer's projections.
const PROJECTIONS: [(usize, usize); 4] =
    [(HIDDEN, GEOMETRY.qkv_dim()), (GEOMETRY.q_dim(), HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)];

/// Rows of products: below and above what streams the weights.
const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32];

struct Layer {
    norms: [CpuWeight; 2],
    /// qkv, output, gate and up, down.
    projections: [CpuWeight; 4],
}

struct Model {
    device: CpuDevice,
    embedding: CpuWeight,
    layers: Vec<Layer>,
    norm: CpuWeight,
    head: CpuWeight,
}

/// Activations for up to `CHUNK` rows.
struct Buffers {
    x: CpuTensor,
    normed: CpuTensor,
    qkv: CpuTensor,
    rope: CpuTensor,
    attention: Partials<CpuTensor>,
    gate_up: CpuTensor,
    gated: CpuTensor,
    last: CpuTensor,
    logits: CpuTensor,
}

/// A cheap pseudo-random generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// `n` values of either sign and a magnitude of about `2^exponent`.
    fn bytes(&mut self, dtype: DType, n: usize, exponent: i32) -> Vec<u8> {
        let (mut block, mut out) = (Vec::new(), Vec::new());
        let values: Vec<f32> =
            (0..8191).map(|_| ((self.next() % 2001) as f32 / 1000.0 - 1.0) * 2f32.powi(exponent)).collect();
        dtype.encode(&values, &mut block);
        while out.len() < n * dtype.size() {
            out.extend_from_slice(&block);
        }
        out.truncate(n * dtype.size());
        out
    }
}

impl Model {
    fn new(threads: usize, format: WeightFormat) -> Result<Self, DeviceError> {
        let mut device = CpuDevice::with_threads(threads);
        let (mut random, mut data) = (Random(7), Data::new(7));
        let mut weight = |device: &mut CpuDevice, rows: usize, cols: usize, exponent| {
            let plain = format.plain().or((rows == 1).then_some(DType::F32));
            let bytes = match plain {
                Some(dtype) => random.bytes(dtype, rows * cols, exponent),
                None => {
                    let bytes = format.bytes(rows * cols).expect("whole blocks");
                    data.packed(format, 64 * cols).0.into_iter().cycle().take(bytes).collect()
                }
            };
            let format = plain.map_or(format, WeightFormat::from);
            device.weight(WeightSource { cols, parts: vec![WeightPart { rows, format, bytes: Bytes::from(bytes) }] })
        };
        let mut layers = Vec::new();
        for _ in 0..LAYERS {
            let norms = [weight(&mut device, 1, HIDDEN, 0)?, weight(&mut device, 1, HIDDEN, 0)?];
            let [qkv, output, gate_up, down] = PROJECTIONS.map(|(k, n)| weight(&mut device, n, k, -4));
            layers.push(Layer { norms, projections: [qkv?, output?, gate_up?, down?] });
        }
        Ok(Self {
            embedding: weight(&mut device, VOCAB, HIDDEN, 0)?,
            norm: weight(&mut device, 1, HIDDEN, 0)?,
            head: weight(&mut device, VOCAB, HIDDEN, -4)?,
            layers,
            device,
        })
    }

    fn buffers(&mut self, rows: usize) -> Result<Buffers, DeviceError> {
        let d = &mut self.device;
        let mut rope = d.tensor(rows, GEOMETRY.head_dim as usize)?;
        let half = GEOMETRY.head_dim as usize / 2;
        let angles: Vec<f32> = [vec![0.8; half], vec![0.6; half]].concat().repeat(rows);
        d.write(&mut rope, 0, &angles)?;
        Ok(Buffers {
            rope,
            x: d.tensor(rows, HIDDEN)?,
            normed: d.tensor(rows, HIDDEN)?,
            qkv: d.tensor(rows, GEOMETRY.qkv_dim())?,
            attention: Partials::new(d, rows, GEOMETRY)?,
            gate_up: d.tensor(rows, 2 * INTERMEDIATE)?,
            gated: d.tensor(rows, INTERMEDIATE)?,
            last: d.tensor(1, HIDDEN)?,
            logits: d.tensor(1, VOCAB)?,
        })
    }

    /// A store of `slots` tokens with data in every page.
    fn kv(&mut self, dtype: DType, slots: usize) -> Result<CpuKv, DeviceError> {
        let shape = KvShape {
            layers: LAYERS as u32,
            kv_heads: GEOMETRY.kv_heads,
            head_dim: GEOMETRY.head_dim,
            dtype: dtype.into(),
        };
        let mut kv = self.device.kv(shape, slots)?;
        let bytes = Random(9).bytes(dtype, slots * 2 * GEOMETRY.kv_dim(), 0);
        for layer in 0..LAYERS {
            self.device.kv_write(&mut kv, layer, 0, &bytes)?;
        }
        Ok(kv)
    }

    /// `rows` tokens of one sequence from position `pos`, in slots of the same numbers; the last row's logits if wanted.
    fn step(
        &mut self,
        b: &mut Buffers,
        kv: &mut CpuKv,
        pos: usize,
        rows: usize,
        logits: bool,
    ) -> Result<(), DeviceError> {
        let d = &mut self.device;
        let ids: Vec<u32> = (0..rows).map(|i| ((pos + i) * 17 % VOCAB) as u32).collect();
        let slots: Vec<u32> = (pos as u32..(pos + rows) as u32).collect();
        let seqs = [AttnRows { row0: 0, rows: rows as u32, pos0: pos as u32, run0: 0, runs: 1 }];
        let runs = [KvRun { base: 0, len: (pos + rows) as u32, first_pos: 0 }];
        let batch = AttnBatch {
            geometry: GEOMETRY,
            scale: 0.125,
            window: None,
            alibi: None,
            softcap: None,
            seqs: &seqs,
            runs: &runs,
        };
        d.embed(&self.embedding, &ids, &mut b.x)?;
        for (i, layer) in self.layers.iter().enumerate() {
            let [qkv, output, gate_up, down] = &layer.projections;
            d.rms_norm(&b.x, &layer.norms[0], 1e-5, rows, &mut b.normed)?;
            d.matmul(&b.normed, qkv, rows, Mode::Set, &mut b.qkv)?;
            d.rope_append(&mut b.qkv, &b.rope, GEOMETRY, &slots, kv, i)?;
            d.attention(&b.qkv, &batch, kv, i, &mut b.attention)?;
            d.matmul(&b.attention.out, output, rows, Mode::Add, &mut b.x)?;
            d.rms_norm(&b.x, &layer.norms[1], 1e-5, rows, &mut b.normed)?;
            d.matmul_activated(&b.normed, gate_up, rows, Activation::SiluMul, &mut b.gate_up, &mut b.gated)?;
            d.matmul(&b.gated, down, rows, Mode::Add, &mut b.x)?;
        }
        if logits {
            d.gather_rows(&b.x, &[rows as u32 - 1], &mut b.last)?;
            d.rms_norm(&b.last, &self.norm, 1e-5, 1, &mut b.normed)?;
            d.matmul(&b.normed, &self.head, 1, Mode::Set, &mut b.logits)?;
        }
        d.sync()
    }
}

/// Processor seconds of all threads of this process so far (Linux; else `None`). Running threads are accounted at the
/// scheduler's ticks, so only sums over many calls are exact.
fn cpu_seconds() -> Option<f64> {
    let nanoseconds = |task: std::io::Result<std::fs::DirEntry>| -> Option<f64> {
        let stat = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse().ok()
    };
    std::fs::read_dir("/proc/self/task").ok()?.map(nanoseconds).sum::<Option<f64>>().map(|n| n / 1e9)
}

/// Work of each side, and its processor time.
#[derive(Default)]
struct PerCpu {
    ours: (f64, f64),
    theirs: (f64, f64),
}

impl PerCpu {
    fn note(side: &mut (f64, f64), amount: f64, since: Option<f64>) {
        side.0 += amount;
        side.1 += cpu_seconds().zip(since).map_or(f64::NAN, |(now, then)| now - then);
    }

    /// Our rate over theirs, per processor second; NaN (null in JSON) without processor times.
    fn ratio(&self) -> f64 {
        self.ours.0 / self.ours.1 / (self.theirs.0 / self.theirs.1)
    }
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    f64::midpoint(values[(n - 1) / 2], values[n / 2])
}

/// Bytes per second of a parallel sum over `buffer`.
fn streaming_read(pool: &rayon::ThreadPool, buffer: &[u64]) -> f64 {
    let mut total = 0;
    let elapsed = seconds(|| {
        total = pool.install(|| {
            buffer
                .par_chunks(32 << 10)
                .map(|c| c.iter().fold(0u64, |a, v| a.wrapping_add(*v)))
                .reduce(|| 0, u64::wrapping_add)
        });
    });
    assert_ne!(total, 1, "the sum is used");
    size_of_val(buffer) as f64 / elapsed
}

fn decode(
    threads: usize,
    format: WeightFormat,
    context: usize,
    pairs: usize,
    stream: &[u64],
) -> Result<Value, DeviceError> {
    let pool = pool(threads);
    let mut model = Model::new(threads, format)?;
    let dtype = kv_dtype(format);
    let mut buffers = model.buffers(1)?;
    let mut kv = model.kv(dtype, context)?;
    let kv_bytes = context * kv_token_bytes(dtype);
    let bytes = format.bytes(READ_PARAMETERS).expect("whole blocks") + kv_bytes;
    let (mut times, mut reads, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut cpu = PerCpu::default();
    let mut before = streaming_read(&pool, stream);
    for pair in 0..pairs + 2 {
        let start = cpu_seconds();
        let time = seconds(|| model.step(&mut buffers, &mut kv, context - 1, 1, true).expect("a step"));
        PerCpu::note(&mut cpu.ours, bytes as f64, start);
        let start = cpu_seconds();
        let after = streaming_read(&pool, stream);
        PerCpu::note(&mut cpu.theirs, size_of_val(stream) as f64, start);
        if pair >= 2 {
            times.push(time);
            reads.push(after);
            ratios.push(bytes as f64 / time / f64::midpoint(before, after));
        }
        before = after;
    }
    let time = median(&mut times);
    Ok(json!({
        "kind": "decode", "format": format.name(), "context": context, "pairs": pairs,
        "tokens_per_s": 1.0 / time, "bytes_per_token": bytes, "kv_bytes_per_token": kv_bytes,
        "gb_per_s": bytes as f64 / time / 1e9, "streaming_gb_per_s": median(&mut reads) / 1e9,
        "ratio": median(&mut ratios), "cpu_ratio": cpu.ratio(), "best_tokens_per_s": 1.0 / times[0],
    }))
}

/// Products of a few rows with the vocabulary's weight.
fn products(
    threads: usize,
    format: WeightFormat,
    pairs: usize,
    stream: &[u64],
    note: &mut impl FnMut(Value),
) -> Result<(), DeviceError> {
    let pool = pool(threads);
    let mut model = Model::new(threads, format)?;
    let bytes = format.bytes(VOCAB * HIDDEN).expect("whole blocks");
    let rows_max = ROWS[ROWS.len() - 1];
    let mut x = model.device.tensor(rows_max, HIDDEN)?;
    let mut logits = model.device.tensor(rows_max, VOCAB)?;
    let mut random = Random(13);
    let values: Vec<f32> = (0..rows_max * HIDDEN).map(|_| (random.next() % 2001) as f32 / 1000.0 - 1.0).collect();
    model.device.write(&mut x, 0, &values)?;
    for rows in ROWS {
        let (mut times, mut reads, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for pair in 0..pairs + 2 {
            let read = streaming_read(&pool, stream);
            let time = seconds(|| {
                model.device.matmul(&x, &model.head, rows, Mode::Set, &mut logits).expect("a product");
            });
            if pair >= 2 {
                times.push(time);
                reads.push(read);
                ratios.push(bytes as f64 / time / read);
            }
        }
        let time = median(&mut times);
        note(json!({
            "kind": "rows", "format": format.name(), "rows": rows, "pairs": pairs, "ms": time * 1e3,
            "gb_per_s": bytes as f64 / time / 1e9, "streaming_gb_per_s": median(&mut reads) / 1e9,
            "gflop_per_s": 2.0 * (rows * VOCAB * HIDDEN) as f64 / time / 1e9, "ratio": median(&mut ratios),
        }));
    }
    Ok(())
}

/// KV of a model whose weights are in `format`.
fn kv_dtype(format: WeightFormat) -> DType {
    format.plain().unwrap_or(DType::F16)
}

fn kv_token_bytes(dtype: DType) -> usize {
    LAYERS * 2 * GEOMETRY.kv_dim() * dtype.size()
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads")
}

/// f32 matrices of a layer's projections for the `gemm` crate.
struct Gemm {
    x: Vec<f32>,
    weights: Vec<Vec<f32>>,
    out: Vec<f32>,
}

impl Gemm {
    fn new() -> Self {
        let mut random = Random(11);
        let mut values = |n: usize| (0..n).map(|_| (random.next() % 2001) as f32 / 1000.0 - 1.0).collect::<Vec<f32>>();
        Self {
            x: values(CHUNK * INTERMEDIATE),
            weights: PROJECTIONS.iter().map(|(k, n)| values(k * n)).collect(),
            out: vec![0.0; CHUNK * 2 * INTERMEDIATE],
        }
    }

    /// The four projections of one layer with `CHUNK` rows: seconds.
    fn layer(&mut self, pool: &rayon::ThreadPool) -> f64 {
        let threads = pool.current_num_threads();
        seconds(|| {
            pool.install(|| {
                for ((k, n), weight) in PROJECTIONS.into_iter().zip(&self.weights) {
                    // SAFETY: out is [CHUNK][n], x [CHUNK][k] and the weight [n][k], as the strides say.
                    unsafe {
                        gemm::gemm(
                            CHUNK,
                            n,
                            k,
                            self.out.as_mut_ptr(),
                            1,
                            n as isize,
                            false,
                            self.x.as_ptr(),
                            1,
                            k as isize,
                            weight.as_ptr(),
                            k as isize,
                            1,
                            0.0,
                            1.0,
                            false,
                            false,
                            false,
                            gemm::Parallelism::Rayon(threads),
                        );
                    }
                }
            });
        })
    }

    fn layer_flops() -> f64 {
        PROJECTIONS.iter().map(|(k, n)| 2.0 * (CHUNK * k * n) as f64).sum()
    }
}

fn prefill(threads: usize, format: WeightFormat, context: usize, repeats: usize) -> Result<Value, DeviceError> {
    let pool = pool(threads);
    let mut model = Model::new(threads, format)?;
    let dtype = kv_dtype(format);
    let mut buffers = model.buffers(CHUNK)?;
    let mut kv = model.kv(dtype, context)?;
    let mut gemm = Gemm::new();
    let attention_flops = |pos: usize| {
        let keys: f64 = (pos..pos + CHUNK).map(|p| (p + 1) as f64).sum();
        4.0 * keys * GEOMETRY.q_dim() as f64 * LAYERS as f64
    };
    let (mut times, mut rates, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut cpu = PerCpu::default();
    gemm.layer(&pool);
    model.step(&mut buffers, &mut kv, 0, CHUNK, false)?;
    for _ in 0..repeats {
        let (mut time, mut flops, mut gemm_time, mut gemm_layers) = (0.0, 0.0, 0.0, 0);
        for pos in (0..context).step_by(CHUNK) {
            let last = pos + CHUNK == context;
            // As many layers of products on each side of the chunk, so that both take about as long.
            let layers = LAYERS / 2;
            let side = |gemm: &mut Gemm, cpu: &mut PerCpu| {
                let start = cpu_seconds();
                let time = (0..layers).map(|_| gemm.layer(&pool)).sum::<f64>();
                PerCpu::note(&mut cpu.theirs, layers as f64 * Gemm::layer_flops(), start);
                time
            };
            gemm_time += side(&mut gemm, &mut cpu);
            let start = cpu_seconds();
            time += seconds(|| model.step(&mut buffers, &mut kv, pos, CHUNK, last).expect("a step"));
            let chunk_flops = LAYERS as f64 * Gemm::layer_flops() + attention_flops(pos);
            PerCpu::note(&mut cpu.ours, chunk_flops, start);
            gemm_time += side(&mut gemm, &mut cpu);
            gemm_layers += 2 * layers;
            flops += chunk_flops;
        }
        let rate = Gemm::layer_flops() * f64::from(gemm_layers as u32) / gemm_time;
        times.push(time);
        rates.push(rate);
        ratios.push(flops / time / rate);
    }
    let flops: f64 =
        (0..context).step_by(CHUNK).map(|p| LAYERS as f64 * Gemm::layer_flops() + attention_flops(p)).sum();
    let time = median(&mut times);
    Ok(json!({
        "kind": "prefill", "format": format.name(), "context": context, "chunk": CHUNK, "repeats": repeats,
        "tokens_per_s": context as f64 / time, "gflop": flops / 1e9,
        "attention_gflop": (0..context).step_by(CHUNK).map(attention_flops).sum::<f64>() / 1e9,
        "gflop_per_s": flops / time / 1e9, "gemm_gflop_per_s": median(&mut rates) / 1e9,
        "ratio": median(&mut ratios), "cpu_ratio": cpu.ratio(), "best_tokens_per_s": context as f64 / times[0],
    }))
}

/// The processor's name, from /proc/cpuinfo.
fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| l.strip_prefix("model name")).map(|n| n.trim_start_matches(['\t', ' ', ':']));
    name.unwrap_or(std::env::consts::ARCH).to_owned()
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let flag = |name: &str| args.iter().any(|a| a == name);
    let option = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1)).cloned();
    let threads = option("--threads").map_or_else(
        || std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        |n| n.parse().expect("--threads takes a number"),
    );
    let (json, quick, only) = (flag("--json"), flag("--quick"), option("--only"));
    let named = |name: &str| WeightFormat::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(name));
    let formats = option("--format").map_or(FORMATS.to_vec(), |name| vec![named(&name).expect("a format's name")]);
    let wanted = |kind: &str| only.as_deref().is_none_or(|o| o == kind);
    let context: Option<usize> = option("--context").map(|n| n.parse().expect("--context takes a number"));
    let seen = |n: usize| context.is_none_or(|context| context == n);
    let stream: Vec<u64> = (0..STREAM_BYTES as u64 / 8).collect();
    let mut results = Vec::new();
    let mut note = |result: Value| {
        if !json && result["kind"] == "rows" {
            println!("{result}");
        } else if !json {
            println!(
                "{} {} {:>6}: {:8.1} tok/s, ratio {:.2}, per processor second {:.2}  {result}",
                result["kind"].as_str().unwrap_or_default(),
                result["format"].as_str().unwrap_or_default(),
                result["context"],
                result["tokens_per_s"].as_f64().unwrap_or_default(),
                result["ratio"].as_f64().unwrap_or_default(),
                result["cpu_ratio"].as_f64().unwrap_or_default(),
            );
        }
        results.push(result);
    };
    for format in formats {
        for context in [512, 4096, 16_384] {
            if wanted("decode") && seen(context) {
                note(decode(threads, format, context, if quick { 15 } else { 60 }, &stream).expect("memory"));
            }
        }
        if wanted("rows") {
            products(threads, format, if quick { 9 } else { 30 }, &stream, &mut note).expect("memory");
        }
        for (context, repeats) in [(512, 12), (4096, 5), (16_384, 3)] {
            if wanted("prefill") && seen(context) {
                note(prefill(threads, format, context, if quick { 1 + repeats / 6 } else { repeats }).expect("memory"));
            }
        }
    }
    if json {
        let device = CpuDevice::with_threads(threads).info().name;
        println!(
            "{}",
            json!({ "benchmark": "cpu", "processor": processor(), "device": device, "threads": threads, "results": results })
        );
    }
}
