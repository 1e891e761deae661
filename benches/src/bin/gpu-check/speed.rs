//! Kernels against ceilings measured in the same run: copies within the device for what is bound by memory.
//!
//! Times are those of the host around many launches and one wait, so they include launch overhead where kernels are
//! short, as a step does.

use lagoon_backend::{AttnBatch, AttnRows, Device, Mode, WeightSource};
use lagoon_cuda::driver::{Buffer, Context, Event, Priority, Stream, copy_within_device};
use lagoon_cuda::{CudaDevice, CudaOptions, kernels};
use lagoon_types::{AttentionGeometry, DType, KvRun, KvShape};
use serde_json::{Value, json};
use std::time::Instant;

/// Llama-3-8B's attention.
const G: AttentionGeometry = AttentionGeometry { heads: 32, kv_heads: 8, head_dim: 128 };

/// Seconds of one call, in the middle of a few rounds of many calls.
fn seconds(
    device: &mut CudaDevice,
    calls: usize,
    mut f: impl FnMut(&mut CudaDevice) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    f(device)?;
    device.sync()?;
    let mut rounds = Vec::new();
    for _ in 0..5 {
        let started = Instant::now();
        (0..calls).try_for_each(|_| f(device))?;
        device.sync()?;
        rounds.push(started.elapsed().as_secs_f64() / calls as f64);
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[rounds.len() / 2])
}

/// Bytes per second that a copy within the device reads and writes.
fn copy_bandwidth(small: bool) -> anyhow::Result<f64> {
    let context = Context::open(0)?;
    let bytes = if small { 1 << 20 } else { 2 << 30 };
    let (from, to) = (Buffer::new(&context, "a copy", bytes)?, Buffer::new(&context, "a copy", bytes)?);
    let stream = Stream::new(&context, Priority::Normal)?;
    let (begin, end) = (Event::new(&context, true)?, Event::new(&context, true)?);
    copy_within_device(&stream, to.address(), from.address(), bytes)?;
    let rounds = 10;
    begin.record(&stream)?;
    (0..rounds).try_for_each(|_| copy_within_device(&stream, to.address(), from.address(), bytes))?;
    end.record(&stream)?;
    stream.synchronize()?;
    Ok(2.0 * (bytes * rounds) as f64 / (f64::from(end.since_ms(&begin)?) / 1e3))
}

/// A store of `tokens` tokens with something in it.
fn store(device: &mut CudaDevice, layers: u32, tokens: usize, dtype: DType) -> anyhow::Result<lagoon_cuda::CudaKv> {
    let shape = KvShape { layers, kv_heads: G.kv_heads, head_dim: G.head_dim, dtype };
    let mut kv = device.kv(shape, tokens)?;
    let mut bytes = Vec::new();
    let values: Vec<f32> = (0u16..4096).map(|i| f32::from(i * 37 % 101) / 50.0 - 1.0).collect();
    dtype.encode(&values, &mut bytes);
    let piece: Vec<u8> = bytes.iter().copied().cycle().take(256.min(tokens) * shape.layer_token_bytes()).collect();
    for layer in 0..layers as usize {
        let mut slot = 0;
        while slot < tokens {
            let count = (tokens - slot).min(256);
            let at = u32::try_from(slot)?;
            device.kv_write(&mut kv, layer, at, &piece[..count * shape.layer_token_bytes()])?;
            slot += count;
        }
    }
    Ok(kv)
}

/// Decoding: `batch` sequences of one row each, `context` tokens in one run each, over all layers of a store.
fn decode(batch: u32, context: u32, dtype: DType, group: u32, copy: f64) -> anyhow::Result<Value> {
    let layers = group.max(2);
    let options = CudaOptions { layers_per_group: Some(group), ..CudaOptions::default() };
    let mut device = CudaDevice::open(kernels::FATBIN, options)?;
    let kv = store(&mut device, layers, (batch * context) as usize, dtype)?;
    let q = device.tensor(batch as usize, G.q_dim())?;
    let mut out = device.partials(batch as usize, G)?;
    let rows = |row: u32| AttnRows { row0: row, rows: 1, pos0: context - 1, run0: row, runs: 1 };
    let seqs: Vec<AttnRows> = (0..batch).map(rows).collect();
    let runs: Vec<KvRun> = (0..batch).map(|row| KvRun { base: row * context, len: context, first_pos: 0 }).collect();
    let batch_of = AttnBatch { geometry: G, scale: 0.088, window: None, alibi: None, seqs: &seqs, runs: &runs };
    let mut layer = 0;
    let s = seconds(&mut device, 4 * layers as usize, |device| {
        layer = (layer + 1) % layers as usize;
        Ok(device.attention(&q, &batch_of, &kv, layer, &mut out)?)
    })?;
    let bytes = f64::from(batch) * f64::from(context) * (2 * G.kv_dim() * dtype.size()) as f64;
    Ok(json!({
        "batch": batch,
        "context": context,
        "dtype": dtype.to_string(),
        "layers_per_group": group,
        "us": s * 1e6,
        "gb_per_s": bytes / s / 1e9,
        "of_copy_bandwidth": bytes / s / copy,
    }))
}

/// A prompt's attention, causal, in one call.
fn prefill(tokens: u32, dtype: DType) -> anyhow::Result<Value> {
    let mut device = crate::open()?;
    let kv = store(&mut device, 1, tokens as usize, dtype)?;
    let q = device.tensor(tokens as usize, G.q_dim())?;
    let mut out = device.partials(tokens as usize, G)?;
    let seqs = [AttnRows { row0: 0, rows: tokens, pos0: 0, run0: 0, runs: 1 }];
    let runs = [KvRun { base: 0, len: tokens, first_pos: 0 }];
    let batch = AttnBatch { geometry: G, scale: 0.088, window: None, alibi: None, seqs: &seqs, runs: &runs };
    let s = seconds(&mut device, 2, |device| Ok(device.attention(&q, &batch, &kv, 0, &mut out)?))?;
    let flop = 2.0 * f64::from(tokens) * f64::from(tokens) * G.q_dim() as f64;
    Ok(json!({ "tokens": tokens, "dtype": dtype.to_string(), "ms": s * 1e3, "tflop_per_s": flop / s / 1e12 }))
}

/// A linear layer of `n` outputs and `k` inputs.
fn linear(rows: usize, n: usize, k: usize, dtype: DType, copy: f64) -> anyhow::Result<Value> {
    let mut device = crate::open()?;
    let mut bytes = Vec::new();
    dtype.encode(&vec![0.01; n * k], &mut bytes);
    let source = WeightSource { dtype, cols: k, parts: vec![(n, bytes.into())] };
    let weight = device.weight(source)?;
    let x = device.tensor(rows, k)?;
    let mut out = device.tensor(rows, n)?;
    let s = seconds(&mut device, 20, |device| Ok(device.matmul(&x, &weight, rows, Mode::Set, &mut out)?))?;
    let weight_bytes = (n * k * dtype.size()) as f64;
    Ok(json!({
        "rows": rows,
        "n": n,
        "k": k,
        "dtype": dtype.to_string(),
        "us": s * 1e6,
        "tflop_per_s": 2.0 * (rows * n * k) as f64 / s / 1e12,
        "weight_bytes_of_copy_bandwidth": weight_bytes / s / copy,
    }))
}

pub(crate) fn run(small: bool) -> anyhow::Result<Value> {
    let copy = copy_bandwidth(small)?;
    let decodes: &[(u32, u32)] = if small {
        &[(2, 40)]
    } else {
        &[(16, 8 << 10), (16, 16 << 10), (32, 8 << 10), (1, 8 << 10), (1, 64 << 10), (1, 128 << 10)]
    };
    let mut decoded = Vec::new();
    for (batch, context) in decodes {
        for dtype in [DType::F16, DType::BF16] {
            decoded.push(decode(*batch, *context, dtype, 1, copy)?);
        }
        // What tensor slicing costs a kernel.
        decoded.push(decode(*batch, *context, DType::BF16, if small { 2 } else { 8 }, copy)?);
    }
    let tokens: &[u32] = if small { &[64] } else { &[4 << 10, 16 << 10, 64 << 10] };
    let prefilled = tokens.iter().map(|t| prefill(*t, DType::BF16)).collect::<anyhow::Result<Vec<_>>>()?;
    let (n, k) = if small { (64, 96) } else { (14336, 4096) };
    let rows: &[usize] = if small { &[1, 20] } else { &[1, 8, 16, 64, 512, 4096] };
    let linears = rows.iter().map(|r| linear(*r, n, k, DType::BF16, copy)).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(json!({ "copy_gb_per_s": copy / 1e9, "decode": decoded, "prefill": prefilled, "linear": linears }))
}
