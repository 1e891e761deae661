//! A mixture of experts on the host backend: 64 gated experts of width 512 on 1,024 columns, six of them for a token (the shape
//! of DeepSeek-V2-Lite, halved), random weights in bf16, random tokens.
//!
//! * decode, one row: bytes of the active experts' weights a second, over what a plain parallel sum of a large buffer reads a
//!   second in the same run. An engine that read all experts' weights could not exceed 6 / 64 of it.
//! * prefill, 512 rows: multiply-adds a second, over those of a dense layer with as many (width 6 * 512) in the same run.
//!
//! The two sides alternate, and `ratio` is a median over the pairs. Run with `cargo bench -p lagoon-benches --bench experts -- [--json]
//! [--threads N]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use bytes::Bytes;
use lagoon_backend::cpu::{CpuTensor, CpuWeight};
use lagoon_backend::{
    Activation, CpuDevice, Device, DeviceError, ExpertBuffers, Experts, GroupScore, Mode, Routing, Scoring,
    WeightSource,
};
use lagoon_types::DType;
use rayon::prelude::*;
use serde_json::{Value, json};
use std::time::Instant;

const HIDDEN: usize = 1024;
const WIDTH: usize = 512;
const COUNT: usize = 64;
const TOP_K: usize = 6;
const DTYPE: DType = DType::BF16;
const ACTIVATION: Activation = Activation::SiluMul;
const ROUTING: Routing = Routing {
    top_k: TOP_K,
    scoring: Scoring::Softmax,
    normalised: true,
    scale: 1.0,
    groups: 1,
    top_groups: 1,
    group_score: GroupScore::Best,
};
/// Bytes of one expert's weights.
const EXPERT_BYTES: usize = 3 * HIDDEN * WIDTH * 2;
/// Bytes of the buffer that the streaming read sums: far beyond any cache.
const STREAM_BYTES: usize = 384 << 20;
const PAIRS: usize = 41;

/// Numbers in `-1..1` from a fixed seed.
struct Random(u64);

impl Random {
    fn values(&mut self, n: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 33) % 2001) as f32 / 1000.0 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    fn weight(&mut self, device: &mut CpuDevice, rows: usize, cols: usize) -> Result<CpuWeight, DeviceError> {
        let mut bytes = Vec::new();
        let values: Vec<f32> = self.values(rows * cols).iter().map(|v| v / 16.0).collect();
        DTYPE.encode(&values, &mut bytes);
        device.weight(WeightSource::plain(DTYPE, cols, vec![(rows, Bytes::from(bytes))]))
    }

    fn tensor(&mut self, device: &mut CpuDevice, rows: usize, cols: usize) -> Result<CpuTensor, DeviceError> {
        let mut tensor = device.tensor(rows, cols)?;
        device.write(&mut tensor, 0, &self.values(rows * cols))?;
        Ok(tensor)
    }
}

/// A mixture, and its inputs of `rows` rows in several variants, so that steps choose different experts.
struct Mixture {
    up: CpuWeight,
    down: CpuWeight,
    x: CpuTensor,
    logits: Vec<CpuTensor>,
    buffers: ExpertBuffers<CpuTensor>,
    out: CpuTensor,
    rows: usize,
}

impl Mixture {
    fn new(device: &mut CpuDevice, random: &mut Random, rows: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            up: random.weight(device, COUNT * 2 * WIDTH, HIDDEN)?,
            down: random.weight(device, COUNT * HIDDEN, WIDTH)?,
            x: random.tensor(device, rows, HIDDEN)?,
            logits: (0..PAIRS).map(|_| random.tensor(device, rows, COUNT)).collect::<Result<_, _>>()?,
            buffers: ExpertBuffers::new(device, rows, TOP_K, (HIDDEN, WIDTH), ACTIVATION)?,
            out: device.tensor(rows, HIDDEN)?,
            rows,
        })
    }

    /// Seconds of one call.
    fn call(&mut self, device: &mut CpuDevice, variant: usize) -> Result<f64, DeviceError> {
        let experts = Experts {
            count: COUNT,
            up: &self.up,
            up_bias: None,
            down: &self.down,
            down_bias: None,
            choice_bias: None,
            activation: ACTIVATION,
            routing: ROUTING,
        };
        let start = Instant::now();
        device.experts(&self.x, &self.logits[variant], &experts, self.rows, &mut self.buffers, &mut self.out)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Bytes a second of a parallel sum over `buffer`.
fn streaming_read(pool: &rayon::ThreadPool, buffer: &[u64]) -> f64 {
    let start = Instant::now();
    let sum = |chunk: &[u64]| chunk.iter().fold(0u64, |a, v| a.wrapping_add(*v));
    let total = pool.install(|| buffer.par_chunks(32 << 10).map(sum).reduce(|| 0, u64::wrapping_add));
    assert_ne!(total, 1, "the sum is used");
    size_of_val(buffer) as f64 / start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn decode(device: &mut CpuDevice, random: &mut Random, threads: usize) -> Result<Value, DeviceError> {
    let mut mixture = Mixture::new(device, random, 1)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    let stream: Vec<u64> = (0..STREAM_BYTES as u64 / 8).collect();
    let bytes = (TOP_K * EXPERT_BYTES) as f64;
    let (mut times, mut ratios) = (Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        // The sum empties caches of what the last step has left.
        let limit = streaming_read(&pool, &stream);
        let time = mixture.call(device, pair)?;
        times.push(time);
        ratios.push(bytes / time / limit);
    }
    Ok(json!({
        "kind": "decode", "rows": 1, "pairs": PAIRS, "active_bytes": bytes, "all_bytes": COUNT * EXPERT_BYTES,
        "us": median(times) * 1e6, "ratio": median(ratios), "limit": "a streaming read",
    }))
}

fn prefill(device: &mut CpuDevice, random: &mut Random) -> Result<Value, DeviceError> {
    let rows = 512;
    let mut mixture = Mixture::new(device, random, rows)?;
    let width = TOP_K * WIDTH;
    let (up, down) = (random.weight(device, 2 * width, HIDDEN)?, random.weight(device, HIDDEN, width)?);
    let (mut product, mut act) = (device.tensor(rows, 2 * width)?, device.tensor(rows, width)?);
    let mut out = device.tensor(rows, HIDDEN)?;
    let (mut times, mut ratios) = (Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        let start = Instant::now();
        device.matmul_activated(&mixture.x, &up, rows, ACTIVATION, &mut product, &mut act)?;
        device.matmul(&act, &down, rows, Mode::Add, &mut out)?;
        let dense = start.elapsed().as_secs_f64();
        let time = mixture.call(device, pair)?;
        times.push(time);
        ratios.push(dense / time);
    }
    let operations = 2.0 * (rows * 3 * HIDDEN * width) as f64;
    let time = median(times);
    Ok(json!({
        "kind": "prefill", "rows": rows, "pairs": PAIRS, "gflops": operations / time / 1e9,
        "us": time * 1e6, "ratio": median(ratios), "limit": "a dense layer of as many operations",
    }))
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let threads = args.iter().position(|a| a == "--threads").and_then(|i| args.get(i + 1)).map_or_else(
        || std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        |n| n.parse().expect("--threads takes a number"),
    );
    let (mut device, mut random) = (CpuDevice::with_threads(threads), Random(5));
    let results = [
        decode(&mut device, &mut random, threads).expect("memory"),
        prefill(&mut device, &mut random).expect("memory"),
    ];
    if args.iter().any(|a| a == "--json") {
        println!("{}", json!({ "threads": threads, "device": device.info().name, "results": results }));
        return;
    }
    for result in results {
        println!(
            "{}: ratio {:.2} of {}  {result}",
            result["kind"],
            result["ratio"].as_f64().unwrap_or_default(),
            result["limit"]
        );
    }
}
