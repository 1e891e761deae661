//! Times steps of a Llama-shaped model with made-up weights on an adapter, operation by operation as the engine calls
//! them: `cargo run --release -p lagoon-shaders --example step_times -- [gpu|software] [passkey|125m|8b] [TOKENS]
//! [FORMAT] [ops]`. FORMAT is that of matrices: F16, if not given, or a packed one as Q4_K.
//!
//! Prints the time of a prompt of TOKENS tokens in chunks of 512, and of decoding 16 tokens behind it; with `ops`,
//! also the time of each operation (waiting for each, which slows the whole).
#![allow(clippy::print_stdout, reason = "an example prints")]
#![allow(clippy::unwrap_used, reason = "an example stops at the first error")]

use bytes::Bytes;
use lagoon_backend::conformance::Data;
use lagoon_backend::{Activation, AttnBatch, AttnRows, Device, Mode, Partials, WeightFormat, WeightPart, WeightSource};
use lagoon_shaders::{AdapterChoice, WgpuDevice, WgpuKv, WgpuTensor, WgpuWeight};
use lagoon_types::{AttentionGeometry, KvDType, KvRun, KvShape};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

struct Shape {
    hidden: usize,
    inner: usize,
    layers: usize,
    vocab: usize,
    geometry: AttentionGeometry,
}

fn shape(name: &str) -> Shape {
    let geometry = |heads, kv_heads, head_dim| AttentionGeometry { heads, kv_heads, head_dim, latent: false };
    match name {
        "8b" => Shape { hidden: 4096, inner: 14336, layers: 32, vocab: 128_256, geometry: geometry(32, 8, 128) },
        "125m" => Shape { hidden: 768, inner: 2048, layers: 12, vocab: 32_000, geometry: geometry(12, 4, 64) },
        _ => Shape { hidden: 256, inner: 512, layers: 4, vocab: 1024, geometry: geometry(4, 2, 64) },
    }
}

struct Layer {
    qkv: WgpuWeight,
    o: WgpuWeight,
    up: WgpuWeight,
    down: WgpuWeight,
}

struct Model {
    shape: Shape,
    norm: WgpuWeight,
    embedding: WgpuWeight,
    layers: Vec<Layer>,
    kv: WgpuKv,
    x: WgpuTensor,
    normed: WgpuTensor,
    qkv: WgpuTensor,
    rope: WgpuTensor,
    gate_up: WgpuTensor,
    act: WgpuTensor,
    last: WgpuTensor,
    logits: WgpuTensor,
    partials: Partials<WgpuTensor>,
    /// Time of each operation, if wanted.
    times: Option<BTreeMap<&'static str, Duration>>,
}

impl Model {
    fn lap(&mut self, device: &mut WgpuDevice, name: &'static str, start: &mut Instant) {
        if let Some(times) = &mut self.times {
            device.sync().unwrap();
            *times.entry(name).or_default() += start.elapsed();
            *start = Instant::now();
        }
    }
}

/// A matrix of equal rows.
fn weight(device: &mut WgpuDevice, format: WeightFormat, rows: usize, cols: usize) -> WgpuWeight {
    let mut data = Data::new(1);
    let (row, _) = match format.plain() {
        Some(dtype) => data.stored(dtype, cols),
        None => data.packed(format, cols),
    };
    let parts = vec![WeightPart { rows, format, bytes: Bytes::from(row.repeat(rows)) }];
    device.weight(WeightSource { cols, parts }).unwrap()
}

const CHUNK: usize = 512;

fn model(device: &mut WgpuDevice, shape: Shape, format: WeightFormat, tokens: usize) -> Model {
    let g = shape.geometry;
    let layers = (0..shape.layers)
        .map(|_| Layer {
            qkv: weight(device, format, g.qkv_dim(), shape.hidden),
            o: weight(device, format, shape.hidden, g.q_dim()),
            up: weight(device, format, 2 * shape.inner, shape.hidden),
            down: weight(device, format, shape.hidden, shape.inner),
        })
        .collect();
    let layer_count = u32::try_from(shape.layers).unwrap();
    let kv_shape = KvShape { layers: layer_count, kv_heads: g.kv_heads, head_dim: g.head_dim, dtype: KvDType::F16 };
    Model {
        norm: weight(device, WeightFormat::F16, 1, shape.hidden),
        embedding: weight(device, format, shape.vocab, shape.hidden),
        layers,
        kv: device.kv(kv_shape, tokens).unwrap(),
        x: device.tensor(CHUNK, shape.hidden).unwrap(),
        normed: device.tensor(CHUNK, shape.hidden).unwrap(),
        qkv: device.tensor(CHUNK, g.qkv_dim()).unwrap(),
        rope: device.tensor(CHUNK, g.head_dim as usize).unwrap(),
        gate_up: device.tensor(CHUNK, 2 * shape.inner).unwrap(),
        act: device.tensor(CHUNK, shape.inner).unwrap(),
        last: device.tensor(1, shape.hidden).unwrap(),
        logits: device.tensor(1, shape.vocab).unwrap(),
        partials: Partials::new(device, CHUNK, g).unwrap(),
        shape,
        times: None,
    }
}

/// One step of `rows` tokens at `pos`.
fn step(device: &mut WgpuDevice, m: &mut Model, pos: u32, rows: u32) -> Vec<f32> {
    let (n, g) = (rows as usize, m.shape.geometry);
    let ids: Vec<u32> = (pos..pos + rows).map(|p| p % 1000).collect();
    let slots: Vec<u32> = (pos..pos + rows).collect();
    let seqs = [AttnRows { row0: 0, rows, pos0: pos, run0: 0, runs: 1 }];
    let runs = [KvRun { base: 0, len: pos + rows, first_pos: 0 }];
    let batch =
        AttnBatch { geometry: g, scale: 0.1, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    device.write(&mut m.rope, 0, &vec![0.7; n * g.head_dim as usize]).unwrap();
    device.embed(&m.embedding, &ids, &mut m.x).unwrap();
    let t = &mut Instant::now();
    for index in 0..m.layers.len() {
        device.rms_norm(&m.x, &m.norm, 1e-5, n, &mut m.normed).unwrap();
        m.lap(device, "rms_norm", t);
        device.matmul(&m.normed, &m.layers[index].qkv, n, Mode::Set, &mut m.qkv).unwrap();
        m.lap(device, "matmul.qkv", t);
        device.rope_append(&mut m.qkv, &m.rope, g, &slots, &mut m.kv, index).unwrap();
        m.lap(device, "rope_append", t);
        device.attention(&m.qkv, &batch, &m.kv, index, &mut m.partials).unwrap();
        m.lap(device, "attention", t);
        device.matmul(&m.partials.out, &m.layers[index].o, n, Mode::Add, &mut m.x).unwrap();
        m.lap(device, "matmul.o", t);
        device.rms_norm(&m.x, &m.norm, 1e-5, n, &mut m.normed).unwrap();
        m.lap(device, "rms_norm", t);
        let up = &m.layers[index].up;
        device.matmul_activated(&m.normed, up, n, Activation::SiluMul, &mut m.gate_up, &mut m.act).unwrap();
        m.lap(device, "matmul_activated.up", t);
        device.matmul(&m.act, &m.layers[index].down, n, Mode::Add, &mut m.x).unwrap();
        m.lap(device, "matmul.down", t);
    }
    device.gather_rows(&m.x, &[rows - 1], &mut m.last).unwrap();
    device.rms_norm(&m.last, &m.norm, 1e-5, 1, &mut m.normed).unwrap();
    device.matmul(&m.normed, &m.embedding, 1, Mode::Set, &mut m.logits).unwrap();
    let mut logits = Vec::new();
    device.read(&m.logits, 0..1, 0..m.shape.vocab, &mut logits).unwrap();
    logits
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or_else(|| default.to_owned());
    let choice = if arg(1, "gpu") == "software" { AdapterChoice::Software } else { AdapterChoice::Gpu };
    let tokens: u32 = arg(3, "1024").parse().unwrap();
    let mut device = WgpuDevice::open(&choice).unwrap_or_else(|error| panic!("{error}"));
    println!("{}", device.info().name);
    let name = arg(4, "F16");
    let format = WeightFormat::ALL.into_iter().find(|format| format.name() == name).expect("FORMAT is a format's name");
    let mut m = model(&mut device, shape(&arg(2, "passkey")), format, tokens as usize + 32);
    // Compiles the pipelines.
    step(&mut device, &mut m, 0, 32);
    step(&mut device, &mut m, 32, 1);
    m.times = args.get(5).map(|_| BTreeMap::new());
    let start = Instant::now();
    let mut pos = 0;
    while pos < tokens {
        let rows = u32::try_from(CHUNK).unwrap().min(tokens - pos);
        step(&mut device, &mut m, pos, rows);
        pos += rows;
    }
    let prefill = start.elapsed();
    println!("prefill: {tokens} tokens in {prefill:.3?}, {:.0} tokens/s", f64::from(tokens) / prefill.as_secs_f64());
    print_times(&mut m);
    let start = Instant::now();
    (0..16).for_each(|i| drop(step(&mut device, &mut m, tokens + i, 1)));
    let decode = start.elapsed() / 16;
    println!("decode: {decode:.3?} a token, {:.1} tokens/s", 1.0 / decode.as_secs_f64());
    print_times(&mut m);
}

fn print_times(m: &mut Model) {
    if let Some(times) = &mut m.times {
        std::mem::take(times).iter().for_each(|(name, time)| println!("  {name}: {time:.3?}"));
    }
}
