//! Decoding of a model of Llama-3.1-8B's shape with random weights: whole steps against what reading weights and KV once
//! takes at the measured copy bandwidth, replayed as graphs and launched kernel by kernel.
//!
//! A prompt's whole prefill, in chunks as an instance makes them, is timed too: what mapping memory for it adds to is known then
//! (vAttention, Figure 13).
//!
//! A step ends with the logits on the device; one number of each row is read. Sampling is not part of it.

use crate::speed::{copy_bandwidth, tuning};
use crate::{Args, Out};
use bytes::Bytes;
use lagoon_backend::{Activation, AttnBatch, AttnRows, Device, Mode, Partials, WeightSource};
use lagoon_cuda::kernels::attention::Tuning;
use lagoon_cuda::{CudaDevice, CudaKv, CudaOptions, CudaTensor, CudaWeight, kernels};
use lagoon_types::{AttentionGeometry, DType, KvRun, KvShape};
use serde_json::json;
use std::time::Instant;

#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    vocab: usize,
    geometry: AttentionGeometry,
}

const LLAMA_8B: Shape =
    Shape { layers: 32, hidden: 4096, intermediate: 14336, vocab: 128_256, geometry: crate::speed::G };
const TINY: Shape = Shape {
    layers: 2,
    hidden: 64,
    intermediate: 96,
    vocab: 40,
    geometry: AttentionGeometry { heads: 2, kv_heads: 1, head_dim: 64 },
};

struct Layer {
    norm: CudaWeight,
    qkv: CudaWeight,
    o: CudaWeight,
    up: CudaWeight,
    down: CudaWeight,
}

struct Model {
    shape: Shape,
    embed: CudaWeight,
    head: CudaWeight,
    norm: CudaWeight,
    layers: Vec<Layer>,
    /// Of all weights that a step reads whole.
    bytes: usize,
}

impl Model {
    /// Weights of a small scale from one buffer of noise, which serves all.
    fn new(d: &mut CudaDevice, shape: Shape) -> anyhow::Result<Self> {
        let g = shape.geometry;
        let widest = [2 * shape.intermediate, shape.vocab, g.qkv_dim(), g.q_dim()].into_iter().max().unwrap_or(1);
        let most = widest * shape.hidden;
        let values: Vec<f32> =
            (0u32..1 << 16).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 1e6 - 0.032).collect();
        let mut piece = Vec::new();
        DType::BF16.encode(&values, &mut piece);
        let noise = Bytes::from(piece.iter().copied().cycle().take(most * 2).collect::<Vec<u8>>());
        let mut bytes = 0;
        let mut weight = |d: &mut CudaDevice, rows: usize, cols: usize| {
            bytes += rows * cols * 2;
            let parts = vec![(rows, noise.slice(..rows * cols * 2))];
            d.weight(WeightSource { dtype: DType::BF16, cols, parts })
        };
        let layers = (0..shape.layers)
            .map(|_| {
                Ok(Layer {
                    norm: weight(d, 1, shape.hidden)?,
                    qkv: weight(d, g.qkv_dim(), shape.hidden)?,
                    o: weight(d, shape.hidden, g.q_dim())?,
                    up: weight(d, 2 * shape.intermediate, shape.hidden)?,
                    down: weight(d, shape.hidden, shape.intermediate)?,
                })
            })
            .collect::<anyhow::Result<_>>()?;
        let (head, norm) = (weight(d, shape.vocab, shape.hidden)?, weight(d, 1, shape.hidden)?);
        // Of the table a step reads a few rows.
        let before = bytes;
        let embed = d.weight(WeightSource {
            dtype: DType::BF16,
            cols: shape.hidden,
            parts: vec![(shape.vocab, noise.slice(..shape.vocab * shape.hidden * 2))],
        })?;
        Ok(Self { shape, embed, head, norm, layers, bytes: before })
    }
}

/// What steps of some sequences need.
struct Steps {
    batch: u32,
    room: u32,
    kv: CudaKv,
    rope: CudaTensor,
    x: CudaTensor,
    normed: CudaTensor,
    qkv: CudaTensor,
    up: CudaTensor,
    act: CudaTensor,
    attn: Partials<CudaTensor>,
    last: CudaTensor,
    last_normed: CudaTensor,
    logits: CudaTensor,
}

impl Steps {
    /// For so many rows in a step, of which so many are sampled from, with `room` slots a sequence of `slots`.
    fn new(
        d: &mut CudaDevice,
        shape: Shape,
        (batch, sampled): (u32, usize),
        (room, slots): (u32, u32),
    ) -> anyhow::Result<Self> {
        let (g, rows) = (shape.geometry, batch as usize);
        let layers = u32::try_from(shape.layers)?;
        let kv_shape = KvShape { layers, kv_heads: g.kv_heads, head_dim: g.head_dim, dtype: DType::BF16 };
        let mut kv = d.kv(kv_shape, slots as usize)?;
        // Memory behind all slots.
        d.kv_write(&mut kv, 0, slots - 1, &vec![0; kv_shape.layer_token_bytes()])?;
        Ok(Self {
            batch,
            room,
            kv,
            rope: d.tensor(rows, g.head_dim as usize)?,
            x: d.tensor(rows, shape.hidden)?,
            normed: d.tensor(rows, shape.hidden)?,
            qkv: d.tensor(rows, g.qkv_dim())?,
            up: d.tensor(rows, 2 * shape.intermediate)?,
            act: d.tensor(rows, shape.intermediate)?,
            attn: d.partials(rows, g)?,
            last: d.tensor(sampled, shape.hidden)?,
            last_normed: d.tensor(sampled, shape.hidden)?,
            logits: d.tensor(sampled, shape.vocab)?,
        })
    }

    /// One step at this position of every sequence.
    fn step(&mut self, d: &mut CudaDevice, model: &Model, pos: u32) -> anyhow::Result<()> {
        let slots: Vec<u32> = (0..self.batch).map(|row| row * self.room + pos).collect();
        let seqs: Vec<AttnRows> =
            (0..self.batch).map(|row| AttnRows { row0: row, rows: 1, pos0: pos, run0: row, runs: 1 }).collect();
        let runs: Vec<KvRun> =
            (0..self.batch).map(|row| KvRun { base: row * self.room, len: pos + 1, first_pos: 0 }).collect();
        d.begin_repeatable()?;
        self.forward(d, model, &slots, &seqs, &runs)
    }

    /// A chunk of one sequence's prompt, as many rows as there are, from this position on.
    fn chunk(&mut self, d: &mut CudaDevice, model: &Model, first: u32) -> anyhow::Result<()> {
        let slots: Vec<u32> = (first..first + self.batch).collect();
        let seqs = [AttnRows { row0: 0, rows: self.batch, pos0: first, run0: 0, runs: 1 }];
        let runs = [KvRun { base: 0, len: first + self.batch, first_pos: 0 }];
        self.forward(d, model, &slots, &seqs, &runs)
    }

    fn forward(
        &mut self,
        d: &mut CudaDevice,
        model: &Model,
        slots: &[u32],
        seqs: &[AttnRows],
        runs: &[KvRun],
    ) -> anyhow::Result<()> {
        let (g, rows) = (model.shape.geometry, slots.len());
        d.write(&mut self.rope, 0, &vec![1.0; rows * g.head_dim as usize])?;
        d.embed(&model.embed, &vec![slots[0] % 8; rows], &mut self.x)?;
        let batch = AttnBatch { geometry: g, scale: 0.088, window: None, alibi: None, seqs, runs };
        for (i, layer) in model.layers.iter().enumerate() {
            d.rms_norm(&self.x, &layer.norm, 1e-5, rows, &mut self.normed)?;
            d.matmul(&self.normed, &layer.qkv, rows, Mode::Set, &mut self.qkv)?;
            d.rope_append(&mut self.qkv, &self.rope, g, slots, &mut self.kv, i)?;
            d.attention(&self.qkv, &batch, &self.kv, i, &mut self.attn)?;
            d.matmul(&self.attn.out, &layer.o, rows, Mode::Add, &mut self.x)?;
            d.rms_norm(&self.x, &layer.norm, 1e-5, rows, &mut self.normed)?;
            d.matmul_activated(&self.normed, &layer.up, rows, Activation::SiluMul, &mut self.up, &mut self.act)?;
            d.matmul(&self.act, &layer.down, rows, Mode::Add, &mut self.x)?;
        }
        // Logits of what is sampled from: every row of a step, the last of a chunk.
        let last = u32::try_from(rows - 1)?;
        let wanted: Vec<u32> = if seqs.len() == rows { (0..=last).collect() } else { vec![last] };
        d.gather_rows(&self.x, &wanted, &mut self.last)?;
        let rows = wanted.len();
        d.rms_norm(&self.last, &model.norm, 1e-5, rows, &mut self.last_normed)?;
        d.matmul(&self.last_normed, &model.head, rows, Mode::Set, &mut self.logits)?;
        let mut first = Vec::new();
        d.read(&self.logits, rows - 1..rows, 0..1, &mut first)?;
        anyhow::ensure!(first.iter().all(|v| v.is_finite()), "logits that are no numbers");
        Ok(())
    }
}

/// A prompt of 16 Ki tokens in chunks of 2048, without sampling but with the last row's logits.
fn prompt(args: &Args, d: &mut CudaDevice, model: &Model) -> anyhow::Result<serde_json::Value> {
    let (chunk, tokens) = if args.smoke { (20, 40) } else { (2048, 16 << 10) };
    let mut steps = Steps::new(d, model.shape, (chunk, 1), (tokens, tokens))?;
    let mut times = Vec::new();
    for _ in 0..if args.smoke { 1 } else { 4 } {
        let started = Instant::now();
        for first in (0..tokens).step_by(chunk as usize) {
            steps.chunk(d, model, first)?;
        }
        times.push(started.elapsed().as_secs_f64());
    }
    // The first chooses products and makes scratch.
    let s = times.iter().skip(1).copied().reduce(f64::min).unwrap_or(times[0]);
    Ok(json!({ "tokens": tokens, "chunk": chunk, "ms": s * 1e3, "linear_layers": d.linear_layers() }))
}

fn measure(args: &Args, out: &mut Out, shape: Shape, tuning: Tuning, no_graphs: bool, copy: f64) -> anyhow::Result<()> {
    let options = CudaOptions { tuning: Some(tuning), no_graphs, ..CudaOptions::default() };
    let mut d = CudaDevice::open(kernels::FATBIN, options)?;
    let model = Model::new(&mut d, shape)?;
    let sizes: &[(u32, u32)] =
        if args.smoke { &[(1, 20), (3, 20)] } else { &[(1, 512), (1, 8192), (16, 2048), (64, 1024)] };
    let count: u32 = if args.smoke { 6 } else { 60 };
    if !no_graphs {
        out.push("prompts", prompt(args, &mut d, &model)?)?;
    }
    for (batch, context) in sizes {
        let room = context + count;
        let mut steps = Steps::new(&mut d, shape, (*batch, *batch as usize), (room, batch * room))?;
        let before = d.graphs().0;
        let mut times = Vec::new();
        for i in 0..count {
            let started = Instant::now();
            steps.step(&mut d, &model, context + i)?;
            times.push(started.elapsed().as_secs_f64());
        }
        let series: Vec<f64> = times.iter().map(|s| (s * 1e7).round() / 10.0).collect();
        times.sort_by(f64::total_cmp);
        let s = times[times.len() / 2];
        let g = shape.geometry;
        let kv = f64::from(*batch) * f64::from(*context) * (2 * g.kv_dim() * 2 * shape.layers) as f64;
        let floor = (model.bytes as f64 + kv) / copy;
        let counters = d.graphs().0;
        out.push(
            "rows",
            json!({
                "batch": batch,
                "context": context,
                "graphs": !no_graphs,
                "step_us": s * 1e6,
                "tokens_per_s": f64::from(*batch) / s,
                "roofline_us": floor * 1e6,
                "of_roofline": floor / s,
                "replayed": counters.replayed - before.replayed,
                "captured": counters.captured - before.captured,
                "graphs_off": d.graphs().2,
                "each_step_us": series,
            }),
        )?;
    }
    Ok(())
}

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let shape = if args.smoke { TINY } else { LLAMA_8B };
    let copy = copy_bandwidth(args.smoke)?;
    out.set("copy_gb_per_s", copy / 1e9)?;
    let tuning = tuning(args.smoke, DType::BF16)?;
    for no_graphs in [false, true] {
        measure(args, out, shape, tuning, no_graphs, copy)?;
    }
    Ok(())
}
