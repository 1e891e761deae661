//! Kernels against ceilings measured in the same run: copies within the device for what is bound by memory, products of
//! matrices for what is bound by arithmetic.
//!
//! Times are those of the host around many launches and one wait, so they include launch overhead where kernels are
//! short, as a step does.

use crate::{Args, Out};
use lagoon_backend::{AttnBatch, AttnRows, Device, Mode, WeightSource};
use lagoon_cuda::driver::{
    Buffer, Context, Event, Pinned, Priority, Stream, copy_to_device, copy_to_host, copy_within_device,
};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, LinearLayers, TuneFor, kernels};
use lagoon_types::{AttentionGeometry, DType, KvRun, KvShape};
use serde_json::json;
use std::time::{Duration, Instant};

/// Llama-3-8B's attention.
pub(crate) const G: AttentionGeometry = AttentionGeometry { heads: 32, kv_heads: 8, head_dim: 128 };

/// Seconds of one call, in the middle of a few rounds of many calls.
pub(crate) fn seconds<D: Device>(
    device: &mut D,
    calls: usize,
    mut f: impl FnMut(&mut D) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    f(device)?;
    device.sync()?;
    // Where numbers mean nothing, one call is enough.
    let (count, calls) = if crate::is_smoke() { (1, 1) } else { (5, calls) };
    let mut rounds = Vec::new();
    for _ in 0..count {
        let started = Instant::now();
        (0..calls).try_for_each(|_| f(device))?;
        device.sync()?;
        rounds.push(started.elapsed().as_secs_f64() / calls as f64);
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[rounds.len() / 2])
}

/// How the product would cut attention on this device.
pub(crate) fn tuning(smoke: bool, dtype: DType) -> anyhow::Result<Tuning> {
    let mut device = crate::open()?;
    let base = *device.tuning();
    if smoke {
        return Ok(base);
    }
    let what = TuneFor { geometry: G, dtype, contexts: None, time_max: Duration::from_secs(3), bytes_max: 1 << 30 };
    Ok(device.tune(&what)?.map_or(base, |tuned| tuned.apply(base)))
}

pub(crate) fn device(tuning: Tuning, group: u32) -> anyhow::Result<CudaDevice> {
    let options = CudaOptions { layers_per_group: Some(group), tuning: Some(tuning), ..CudaOptions::default() };
    Ok(CudaDevice::open(kernels::FATBIN, options)?)
}

/// Bytes per second that a copy within the device reads and writes.
pub(crate) fn copy_bandwidth(small: bool) -> anyhow::Result<f64> {
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
pub(crate) fn store<D: Device>(device: &mut D, layers: u32, tokens: usize, dtype: DType) -> anyhow::Result<D::Kv> {
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

/// A sequence's runs: one, or blocks of so many tokens that lie in the store in another order than the sequence has.
fn runs_of(base: u32, context: u32, block: Option<u32>, out: &mut Vec<KvRun>) -> u32 {
    let before = out.len();
    match block {
        None => out.push(KvRun { base, len: context, first_pos: 0 }),
        Some(block) => {
            let blocks = context / block;
            // Odd and prime to the number of blocks, which is a power of two: every place once.
            out.extend((0..blocks).map(|i| KvRun {
                base: base + (i * 7919 + 1) % blocks * block,
                len: block,
                first_pos: i * block,
            }));
        }
    }
    u32::try_from(out.len() - before).unwrap_or(u32::MAX)
}

/// Decoding: `batch` sequences of one row each over all layers of a store: microseconds of one layer.
#[derive(Clone, Copy)]
struct Decode {
    batch: u32,
    context: u32,
    dtype: DType,
    group: u32,
    block: Option<u32>,
}

fn decode(what: Decode, tuning: Tuning) -> anyhow::Result<f64> {
    let Decode { batch, context, dtype, group, block } = what;
    let layers = group.max(2);
    let mut device = device(tuning, group)?;
    let kv = store(&mut device, layers, (batch * context) as usize, dtype)?;
    let q = device.tensor(batch as usize, G.q_dim())?;
    let mut out = device.partials(batch as usize, G)?;
    let (mut seqs, mut runs) = (Vec::new(), Vec::new());
    for row in 0..batch {
        let run0 = u32::try_from(runs.len())?;
        let count = runs_of(row * context, context, block, &mut runs);
        seqs.push(AttnRows { row0: row, rows: 1, pos0: context - 1, run0, runs: count });
    }
    let batch_of = AttnBatch { geometry: G, scale: 0.088, window: None, alibi: None, seqs: &seqs, runs: &runs };
    let mut layer = 0;
    let s = seconds(&mut device, 4 * layers as usize, |device| {
        layer = (layer + 1) % layers as usize;
        Ok(device.attention(&q, &batch_of, &kv, layer, &mut out)?)
    })?;
    Ok(s * 1e6)
}

/// A prompt's attention, causal, in one call: milliseconds.
fn prefill(tokens: u32, dtype: DType, block: Option<u32>, tuning: Tuning) -> anyhow::Result<f64> {
    let mut device = device(tuning, 1)?;
    let kv = store(&mut device, 1, tokens as usize, dtype)?;
    let q = device.tensor(tokens as usize, G.q_dim())?;
    let mut out = device.partials(tokens as usize, G)?;
    let mut runs = Vec::new();
    let count = runs_of(0, tokens, block, &mut runs);
    let seqs = [AttnRows { row0: 0, rows: tokens, pos0: 0, run0: 0, runs: count }];
    let batch = AttnBatch { geometry: G, scale: 0.088, window: None, alibi: None, seqs: &seqs, runs: &runs };
    Ok(seconds(&mut device, 2, |device| Ok(device.attention(&q, &batch, &kv, 0, &mut out)?))? * 1e3)
}

/// A linear layer of `n` outputs and `k` inputs: seconds.
pub(crate) fn linear<D: Device>(d: &mut D, rows: usize, n: usize, k: usize, dtype: DType) -> anyhow::Result<f64> {
    let mut bytes = Vec::new();
    dtype.encode(&vec![0.01; n * k], &mut bytes);
    let weight = d.weight(WeightSource { dtype, cols: k, parts: vec![(n, bytes.into())] })?;
    let x = d.tensor(rows, k)?;
    let mut out = d.tensor(rows, n)?;
    seconds(d, 20, |device| Ok(device.matmul(&x, &weight, rows, Mode::Set, &mut out)?))
}

pub(crate) fn ceilings(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    out.set("copy_gb_per_s", copy_bandwidth(args.smoke)? / 1e9)?;
    let context = Context::open(0)?;
    let bytes = if args.smoke { 1 << 16 } else { 256 << 20 };
    let (device, mut host) = (Buffer::new(&context, "a copy", bytes)?, Pinned::new(&context, "a copy", bytes)?);
    let stream = Stream::new(&context, Priority::Normal)?;
    let mut time = |up: bool| -> anyhow::Result<f64> {
        let started = Instant::now();
        for _ in 0..5 {
            match up {
                true => copy_to_device(&stream, device.address(), &host, 0, bytes)?,
                false => copy_to_host(&stream, &mut host, 0, device.address(), bytes)?,
            }
        }
        stream.synchronize()?;
        Ok(5.0 * bytes as f64 / started.elapsed().as_secs_f64() / 1e9)
    };
    out.set("to_device_gb_per_s", time(true)?)?;
    out.set("to_host_gb_per_s", time(false)?)?;
    let n = if args.smoke { 64 } else { 8192 };
    for (linear_layers, name) in [(LinearLayers::Own, "own"), (LinearLayers::Auto, "library or own")] {
        let tuning = Tuning { precision: Precision::Fast, ..*crate::open()?.tuning() };
        let options = CudaOptions { linear: linear_layers, tuning: Some(tuning), ..CudaOptions::default() };
        let mut d = CudaDevice::open(kernels::FATBIN, options)?;
        let s = linear(&mut d, n, n, n, DType::BF16)?;
        let tflop = 2.0 * (n * n * n) as f64 / s / 1e12;
        out.push("products", json!({ "by": name, "linear_layers": d.linear_layers(), "n": n, "tflop_per_s": tflop }))?;
    }
    Ok(())
}

pub(crate) fn tune(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let mut device = crate::open()?;
        let small = args.smoke.then_some([30, 60, 90]);
        let time_max = if args.smoke { Duration::from_millis(300) } else { Duration::from_secs(15) };
        let bytes_max = if args.smoke { 1 << 19 } else { 2 << 30 };
        let what = TuneFor { geometry: G, dtype, contexts: small, time_max, bytes_max };
        let tuned = device.tune(&what)?;
        let mut row = json!({ "dtype": dtype.to_string(), "tuned": tuned.map(|tuned| tuned.to_string()) });
        if device.takes_warpgroups(G, dtype) {
            let tried = device.try_warpgroups(&what)?;
            row["wgmma_used"] = json!(tried.usable());
            row["wgmma_worst_of_bound"] = json!({ "output": tried.worst[0], "log_sum_exp": tried.worst[1] });
            row["prefill_ms"] = json!({ "mma_sync": tried.prefill_ms[0], "wgmma": tried.prefill_ms[1] });
        }
        out.push("rows", row)?;
    }
    Ok(())
}

pub(crate) fn decode_all(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let copy = copy_bandwidth(args.smoke)?;
    out.set("copy_gb_per_s", copy / 1e9)?;
    let sizes: &[(u32, u32)] = if args.smoke {
        &[(2, 40)]
    } else {
        &[(16, 8 << 10), (16, 16 << 10), (32, 8 << 10), (1, 8 << 10), (1, 64 << 10), (1, 128 << 10)]
    };
    let sliced = if args.smoke { [2, 2] } else { [8, 32] };
    for dtype in [DType::BF16, DType::F16] {
        let tuning = tuning(args.smoke, dtype)?;
        for (batch, context) in sizes {
            // What tensor slicing costs a kernel is asked in one type and for two sizes: 32 layers' KV take long to write.
            let sliced_here = args.smoke || [(16, 8 << 10), (1, 64 << 10)].contains(&(*batch, *context));
            let groups: &[u32] = if dtype == DType::BF16 && sliced_here { &[1, sliced[0], sliced[1]] } else { &[1] };
            for group in groups {
                let us =
                    decode(Decode { batch: *batch, context: *context, dtype, group: *group, block: None }, tuning)?;
                let bytes = f64::from(*batch) * f64::from(*context) * (2 * G.kv_dim() * dtype.size()) as f64;
                out.push(
                    "rows",
                    json!({
                        "batch": batch,
                        "context": context,
                        "dtype": dtype.to_string(),
                        "layers_per_group": group,
                        "us": us,
                        "gb_per_s": bytes / us / 1e3,
                        "of_copy_bandwidth": bytes / (us / 1e6) / copy,
                    }),
                )?;
            }
        }
    }
    Ok(())
}

/// Causal attention: half the pairs, 4 operations an element of heads.
fn prefill_tflop(tokens: u32, ms: f64) -> f64 {
    2.0 * f64::from(tokens) * f64::from(tokens) * G.q_dim() as f64 / ms / 1e9
}

pub(crate) fn prefill_all(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let base = tuning(args.smoke, DType::BF16)?;
    let newest = crate::open()?.attributes().compute_capability.0 == 9;
    let kinds =
        [("exact", Precision::Exact, false), ("fast", Precision::Fast, false), ("wgmma", Precision::Fast, true)];
    let tokens: &[u32] = if args.smoke { &[64] } else { &[4 << 10, 16 << 10, 64 << 10] };
    for tokens in tokens {
        for (kernel, precision, wgmma) in kinds.into_iter().filter(|kind| newest || !kind.2) {
            let ms = prefill(*tokens, DType::BF16, None, Tuning { precision, wgmma, ..base })?;
            let tflop = prefill_tflop(*tokens, ms);
            out.push("rows", json!({ "tokens": tokens, "kernel": kernel, "ms": ms, "tflop_per_s": tflop }))?;
        }
    }
    Ok(())
}

pub(crate) fn paged(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let base = tuning(args.smoke, DType::BF16)?;
    let blocks: &[Option<u32>] = if args.smoke { &[None, Some(16)] } else { &[None, Some(16), Some(64), Some(256)] };
    let decodes: &[(u32, u32)] = if args.smoke { &[(1, 128)] } else { &[(16, 16 << 10), (32, 16 << 10)] };
    for (batch, context) in decodes {
        for block in blocks.iter().copied() {
            let what = Decode { batch: *batch, context: *context, dtype: DType::BF16, group: 1, block };
            let us = decode(what, base)?;
            // The paper's Table 7 adds up 32 layers.
            let row =
                json!({ "batch": batch, "context": context, "block": block, "us": us, "layers_32_ms": us * 32e-3 });
            out.push("decode_of_table_7", row)?;
        }
    }
    let prompts: &[u32] = if args.smoke { &[64] } else { &[16 << 10, 64 << 10] };
    let base = Tuning { precision: Precision::Fast, ..base };
    for tokens in prompts {
        for block in blocks.iter().copied() {
            let ms = prefill(*tokens, DType::BF16, block, base)?;
            let row = json!({ "tokens": tokens, "block": block, "ms": ms, "layers_32_s": ms * 32e-3 });
            out.push("prefill_of_table_6", row)?;
        }
    }
    Ok(())
}

pub(crate) fn linear_all(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let copy = copy_bandwidth(args.smoke)?;
    let (n, k) = if args.smoke { (64, 96) } else { (14336, 4096) };
    let rows: &[usize] = if args.smoke { &[1, 20] } else { &[1, 8, 16, 64, 512, 4096] };
    for by in [LinearLayers::Own, LinearLayers::Auto] {
        for precision in [Precision::Exact, Precision::Fast] {
            for rows in rows {
                let tuning = Tuning { precision, ..*crate::open()?.tuning() };
                let options = CudaOptions { linear: by.clone(), tuning: Some(tuning), ..CudaOptions::default() };
                let mut d = CudaDevice::open(kernels::FATBIN, options)?;
                let s = linear(&mut d, *rows, n, k, DType::BF16)?;
                let bytes = (n * k * DType::BF16.size()) as f64;
                out.push(
                    "rows",
                    json!({
                        "by": d.linear_layers(),
                        "exact": precision == Precision::Exact,
                        "rows": rows,
                        "n": n,
                        "k": k,
                        "us": s * 1e6,
                        "tflop_per_s": 2.0 * (rows * n * k) as f64 / s / 1e12,
                        "weight_bytes_of_copy_bandwidth": bytes / s / copy,
                    }),
                )?;
            }
        }
    }
    Ok(())
}
