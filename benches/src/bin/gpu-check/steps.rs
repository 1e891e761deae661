//! Decoding of a model of Llama-3.1-8B's shape with random weights: whole steps against the time to read weights and
//! KV once at the measured copy bandwidth, replayed as graphs and launched kernel by kernel, with and without
//! programmatic dependent launch.
//!
//! A prompt's whole prefill, in an instance's chunks, is timed too, for comparison with the time of mapping memory
//! (vAttention, Figure 13).
//!
//! A step ends with the logits on the device, of which one number is read. Sampling is not part of it. Weights and KV
//! are noise; all logits of a row's last step must be finite.

use crate::attention::{G, SCALE};
use crate::linear::copy_bandwidth;
use crate::timing::spread;
use crate::tune::tuning;
use crate::{Args, Out, inputs};
use anyhow::{Context as _, ensure};
use bytes::Bytes;
use lagoon_backend::{Activation, AttnBatch, AttnRows, Device, Mode, Partials, Queued, WeightFormat, WeightSource};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaKv, CudaOptions, CudaTensor, CudaWeight, kernels};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvRun, KvShape};
use serde_json::{Value, json};
use std::time::Instant;

#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    vocab: usize,
    geometry: AttentionGeometry,
}

const LLAMA_8B: Shape = Shape { layers: 32, hidden: 4096, intermediate: 14336, vocab: 128_256, geometry: G };
const TINY: Shape = Shape {
    layers: 2,
    hidden: 256,
    intermediate: 256,
    vocab: 40,
    geometry: AttentionGeometry { heads: 4, kv_heads: 1, head_dim: 64, latent: false },
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
    /// Bytes of all weights that a step reads whole.
    bytes: usize,
}

impl Model {
    /// Small weights, each from another offset of one buffer of noise that is longer than any of them; norms near 1.
    fn new(d: &mut CudaDevice, shape: Shape, format: WeightFormat) -> anyhow::Result<Self> {
        let g = shape.geometry;
        let widest = [2 * shape.intermediate, shape.vocab, g.qkv_dim(), g.q_dim()].into_iter().max().unwrap_or(1);
        // Distance of offsets, prime to every number of columns here.
        let (step, count) = (7919, 5 * shape.layers + 3);
        let noise = Bytes::from(inputs::stored_noise(DType::BF16, widest * shape.hidden + step * count, 0.02, 1));
        let (mut bytes, mut place) = (0, 0);
        let mut weight = |d: &mut CudaDevice, rows: usize, cols: usize| -> anyhow::Result<CudaWeight> {
            place += step;
            if rows > 1 && format != WeightFormat::BF16 {
                bytes += format.bytes(rows * cols).context("whole blocks")?;
                return inputs::packed_weight(d, format, rows, cols, place as u64);
            }
            bytes += rows * cols * 2;
            let data = if rows == 1 {
                let near_one: Vec<f32> = inputs::noise(cols, 0.3, 2).iter().map(|v| 1.0 + v).collect();
                let mut data = Vec::new();
                DType::BF16.encode(&near_one, &mut data);
                data.into()
            } else {
                noise.slice(place * 2..(place + rows * cols) * 2)
            };
            Ok(d.weight(WeightSource::plain(DType::BF16, cols, vec![(rows, data)]))?)
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
        let embed = weight(d, shape.vocab, shape.hidden)?;
        // A step reads a few rows of the embedding table.
        let before = bytes - format.bytes(shape.vocab * shape.hidden).context("whole blocks")?;
        Ok(Self { shape, embed, head, norm, layers, bytes: before })
    }
}

/// Buffers of steps of some sequences.
struct Steps {
    batch: u32,
    sampled: usize,
    room: u32,
    kv: CudaKv,
    /// Rotary angles: noise, since only their number matters.
    angles: Vec<f32>,
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
    /// Buffers for steps of `rows` rows, of which `sampled` are sampled, with `room` slots a sequence of `slots`.
    fn new(
        d: &mut CudaDevice,
        shape: Shape,
        (batch, sampled): (u32, usize),
        (room, slots): (u32, u32),
    ) -> anyhow::Result<Self> {
        let (g, rows) = (shape.geometry, batch as usize);
        let layers = u32::try_from(shape.layers)?;
        let kv_shape = KvShape { layers, kv_heads: g.kv_heads, head_dim: g.head_dim, dtype: KvDType::BF16 };
        let mut kv = d.kv(kv_shape, slots as usize)?;
        inputs::fill(d, &mut kv, kv_shape, slots as usize)?;
        Ok(Self {
            batch,
            sampled,
            room,
            kv,
            angles: inputs::noise(rows * g.head_dim as usize, 0.7, 3),
            rope: d.tensor(rows, g.head_dim as usize)?,
            x: d.tensor(rows, shape.hidden)?,
            normed: d.tensor(rows, shape.hidden)?,
            qkv: d.tensor(rows, g.qkv_dim())?,
            up: d.tensor(rows, 2 * shape.intermediate)?,
            act: d.tensor(rows, shape.intermediate)?,
            attn: Partials::new(d, rows, g)?,
            last: d.tensor(sampled, shape.hidden)?,
            last_normed: d.tensor(sampled, shape.hidden)?,
            logits: d.tensor(sampled, shape.vocab)?,
        })
    }

    /// One step at this position of every sequence, as a graph if `graph`.
    fn step(&mut self, d: &mut CudaDevice, model: &Model, pos: u32, graph: bool) -> anyhow::Result<()> {
        let slots: Vec<u32> = (0..self.batch).map(|row| row * self.room + pos).collect();
        let seqs: Vec<AttnRows> =
            (0..self.batch).map(|row| AttnRows { row0: row, rows: 1, pos0: pos, run0: row, runs: 1 }).collect();
        let runs: Vec<KvRun> =
            (0..self.batch).map(|row| KvRun { base: row * self.room, len: pos + 1, first_pos: 0 }).collect();
        if graph {
            d.begin_repeatable()?;
        }
        self.forward(d, model, &slots, &seqs, &runs)
    }

    /// A chunk of one sequence's prompt, with all rows, from position `first` on.
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
        d.write(&mut self.rope, 0, &self.angles[..rows * g.head_dim as usize])?;
        let vocab = u32::try_from(model.shape.vocab)?;
        let ids: Vec<u32> = slots.iter().map(|slot| slot.wrapping_mul(2_654_435_761) % vocab).collect();
        d.embed(&model.embed, &ids, &mut self.x)?;
        let batch = AttnBatch { geometry: g, scale: SCALE, window: None, alibi: None, softcap: None, seqs, runs };
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
        // Logits of sampled rows: every row of a step, the last of a chunk.
        let last = u32::try_from(rows - 1)?;
        let wanted: Vec<u32> = if seqs.len() == rows { (0..=last).collect() } else { vec![last] };
        d.gather_rows(&self.x, &wanted, &mut self.last)?;
        let rows = wanted.len();
        d.rms_norm(&self.last, &model.norm, 1e-5, rows, &mut self.last_normed)?;
        d.matmul(&self.last_normed, &model.head, rows, Mode::Set, &mut self.logits)?;
        // Waits for the step; sampling reads as little.
        let mut first = Vec::new();
        d.read(&self.logits, rows - 1..rows, 0..1, &mut first)?;
        Ok(())
    }

    /// Checks that the last step's logits are finite and differ.
    fn check(&self, d: &mut CudaDevice, model: &Model) -> anyhow::Result<()> {
        let mut all = Vec::new();
        d.read(&self.logits, 0..self.sampled, 0..model.shape.vocab, &mut all)?;
        ensure!(all.iter().all(|v| v.is_finite()), "logits that are no numbers");
        ensure!(all.iter().any(|v| *v != all[0]), "logits that are all {}", all[0]);
        Ok(())
    }
}

/// The device with the model, for as many rows as this process measures.
type Loaded = (CudaDevice, Model);

/// How a model is loaded: with or without programmatic dependent launch, and in which format its matrices are.
#[derive(Clone, Copy, PartialEq, Eq)]
struct How {
    no_dependent_launch: bool,
    format: WeightFormat,
}

/// The model on a device.
fn load(args: &Args, how: How) -> anyhow::Result<Loaded> {
    let How { no_dependent_launch, format } = how;
    let tuning = Some(tuning(args, DType::BF16, Precision::Fast)?);
    let options = CudaOptions { layers_per_group: Some(1), tuning, no_dependent_launch, ..CudaOptions::default() };
    let mut d = CudaDevice::open(kernels::FATBIN, options)?;
    let model = Model::new(&mut d, if args.smoke { TINY } else { LLAMA_8B }, format)?;
    Ok((d, model))
}

/// A prompt of 16 Ki tokens in chunks of 2048, without sampling but with the last row's logits.
fn prompt((d, model): &mut Loaded, chunk: u32, tokens: u32, times: usize) -> anyhow::Result<Value> {
    let mut steps = Steps::new(d, model.shape, (chunk, 1), (tokens, tokens))?;
    let mut ms = Vec::new();
    for _ in 0..=times {
        let started = Instant::now();
        for first in (0..tokens).step_by(chunk as usize) {
            steps.chunk(d, model, first)?;
        }
        ms.push(started.elapsed().as_secs_f64() * 1e3);
    }
    steps.check(d, model)?;
    // The first run chooses algorithms and allocates scratch.
    let [least, middle, most] = spread(ms.split_off(1));
    Ok(json!({ "ms": middle, "ms_least": least, "ms_most": most, "linear_layers": d.linear_layers() }))
}

/// Steps of `batch` sequences from `context` keys on.
struct Decoding {
    batch: u32,
    context: u32,
    graphs: bool,
    count: u32,
}

fn decoding(what: &Decoding, (d, model): &mut Loaded, copy: f64) -> anyhow::Result<Value> {
    let Decoding { batch, context, graphs, count } = *what;
    let room = context + count;
    let mut steps = Steps::new(d, model.shape, (batch, batch as usize), (room, batch * room))?;
    let before = d.graphs().0;
    let (mut host, mut device) = (Vec::new(), Vec::new());
    for i in 0..count {
        let begin = d.timestamp()?;
        let started = Instant::now();
        steps.step(d, model, context + i, graphs)?;
        host.push(started.elapsed().as_secs_f64() * 1e6);
        let end = d.timestamp()?;
        d.sync()?;
        device.push(f64::from(end.since_ms(&begin)?) * 1e3);
    }
    steps.check(d, model)?;
    let series: Vec<f64> = host.iter().map(|us| (us * 10.0).round() / 10.0).collect();
    let (g, us) = (model.shape.geometry, spread(host));
    let kv = f64::from(batch) * f64::from(context) * (2 * g.kv_dim() * 2 * model.shape.layers) as f64;
    let floor_us = (model.bytes as f64 + kv) / copy * 1e6;
    let counters = d.graphs().0;
    Ok(json!({
        "step_us": us[1],
        "step_us_least": us[0],
        "step_us_most": us[2],
        "device_us": spread(device)[1],
        "tokens_per_s": f64::from(batch) / us[1] * 1e6,
        "roofline_us": floor_us,
        "of_roofline": floor_us / us[1],
        "replayed": counters.replayed - before.replayed,
        "captured": counters.captured - before.captured,
        "graphs_off": d.graphs().2,
        "each_step_us": series,
    }))
}

/// Batches for which steps without programmatic dependent launch are measured: the shorter the kernels, the larger
/// the share of gaps between them.
const BATCH_MAX_WITHOUT_DEPENDENTS: u32 = 1;

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let copy = copy_bandwidth(args, out)?;
    let sizes: &[(u32, u32)] =
        if args.smoke { &[(1, 20), (3, 20)] } else { &[(1, 512), (1, 8192), (16, 2048), (64, 1024)] };
    let count = if args.smoke { 6 } else { 60 };
    let mut held = Held::default();
    for no_dependent_launch in [false, true] {
        let how = How { no_dependent_launch, format: WeightFormat::BF16 };
        for graphs in [true, false] {
            for &(batch, context) in sizes {
                if no_dependent_launch && batch > BATCH_MAX_WITHOUT_DEPENDENTS {
                    continue;
                }
                let key = json!({
                    "batch": batch,
                    "context": context,
                    "graphs": graphs,
                    "no_dependent_launch": no_dependent_launch,
                });
                out.row("rows", key, || {
                    decoding(&Decoding { batch, context, graphs, count }, held.get(args, how)?, copy)
                })?;
            }
        }
        if !no_dependent_launch {
            let (chunk, tokens, times) = if args.smoke { (20, 40, 1) } else { (2048, 16 << 10, 3) };
            out.row("prompts", json!({ "tokens": tokens, "chunk": chunk }), || {
                prompt(held.get(args, how)?, chunk, tokens, times)
            })?;
        }
    }
    for format in PACKED {
        for &(batch, context) in sizes.iter().filter(|size| size.0 <= PACKED_BATCH_MAX) {
            let key = json!({ "format": format.to_string(), "batch": batch, "context": context });
            out.row("packed", key, || {
                let how = How { no_dependent_launch: false, format };
                decoding(&Decoding { batch, context, graphs: true, count }, held.get(args, how)?, copy)
            })?;
        }
    }
    Ok(())
}

/// Whole prompts with attention on warpgroup products, with plain weights and packed ones.
pub(crate) fn prompts_on_warpgroups(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let (chunk, tokens, times) = if args.smoke { (20, 40, 1) } else { (2048, 16 << 10, 1) };
    for format in std::iter::once(WeightFormat::BF16).chain(PACKED) {
        out.row("prompts", json!({ "format": format.to_string(), "tokens": tokens, "chunk": chunk }), || {
            let (mut d, model) = load(args, How { no_dependent_launch: false, format })?;
            d.set_tuning(Tuning { wgmma: true, ..*d.tuning() });
            prompt(&mut (d, model), chunk, tokens, times)
        })?;
    }
    Ok(())
}

/// Packed formats whose steps are measured, and the largest batch of these.
const PACKED: [WeightFormat; 3] = [WeightFormat::Q8_0, WeightFormat::Q4K, WeightFormat::Fp8];
const PACKED_BATCH_MAX: u32 = 16;

/// The loaded model, and how it was loaded: memory has room for one model.
#[derive(Default)]
struct Held(Option<(How, Loaded)>);

impl Held {
    /// The model on such a device, loaded at the first request.
    fn get(&mut self, args: &Args, how: How) -> anyhow::Result<&mut Loaded> {
        if self.0.as_ref().is_none_or(|(loaded, _)| *loaded != how) {
            // Frees the other one first.
            self.0 = None;
            self.0 = Some((how, load(args, how)?));
        }
        Ok(&mut self.0.as_mut().context("loaded above")?.1)
    }
}
