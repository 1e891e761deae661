//! CUDA beside wgpu on the same GPU: how much faster it is, and that attention over KV that lies half on each is attention; and
//! the product's demo, on CUDA alone and with wgpu creditors.

use crate::speed::{G, linear, seconds, store};
use crate::{Args, Out};
use anyhow::{Context, bail, ensure};
use lagoon_backend::{AttnBatch, AttnRows, CpuDevice, Device, Partials};
use lagoon_shaders::{AdapterChoice, WgpuDevice, list_adapters};
use lagoon_types::{AttentionGeometry, DType, KvRun, KvShape};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Instant;

/// The GPU through wgpu; where only the harness is tried, a software adapter will do. `None` where there is neither.
fn open_wgpu(args: &Args, out: &mut Out) -> anyhow::Result<Option<WgpuDevice>> {
    let usable = |software| list_adapters().iter().any(|a| a.software == software && a.unusable.is_none());
    let choice = match (usable(false), args.smoke && usable(true)) {
        (true, _) => AdapterChoice::Gpu,
        (false, true) => AdapterChoice::Software,
        (false, false) => {
            out.set("absent", "wgpu finds no adapter of a GPU (its Vulkan driver is not installed)")?;
            return Ok(None);
        }
    };
    let device = WgpuDevice::open(&choice)?;
    out.set("adapter", device.info().name)?;
    Ok(Some(device))
}

/// Microseconds of one call of some work.
struct Work {
    name: String,
    us: f64,
}

fn decode<D: Device>(d: &mut D, batch: u32, context: u32) -> anyhow::Result<f64> {
    let kv = store(d, 1, (batch * context) as usize, DType::F16)?;
    let q = d.tensor(batch as usize, G.q_dim())?;
    let mut out = d.partials(batch as usize, G)?;
    let seqs: Vec<AttnRows> =
        (0..batch).map(|row| AttnRows { row0: row, rows: 1, pos0: context - 1, run0: row, runs: 1 }).collect();
    let runs: Vec<KvRun> = (0..batch).map(|row| KvRun { base: row * context, len: context, first_pos: 0 }).collect();
    let batch = AttnBatch { geometry: G, scale: 0.088, window: None, alibi: None, seqs: &seqs, runs: &runs };
    Ok(seconds(d, 5, |d| Ok(d.attention(&q, &batch, &kv, 0, &mut out)?))? * 1e6)
}

fn prefill<D: Device>(d: &mut D, tokens: u32) -> anyhow::Result<f64> {
    let kv = store(d, 1, tokens as usize, DType::F16)?;
    let q = d.tensor(tokens as usize, G.q_dim())?;
    let mut out = d.partials(tokens as usize, G)?;
    let seqs = [AttnRows { row0: 0, rows: tokens, pos0: 0, run0: 0, runs: 1 }];
    let runs = [KvRun { base: 0, len: tokens, first_pos: 0 }];
    let batch = AttnBatch { geometry: G, scale: 0.088, window: None, alibi: None, seqs: &seqs, runs: &runs };
    Ok(seconds(d, 2, |d| Ok(d.attention(&q, &batch, &kv, 0, &mut out)?))? * 1e6)
}

fn works<D: Device>(d: &mut D, smoke: bool) -> anyhow::Result<Vec<Work>> {
    let mut all = Vec::new();
    let (decodes, prompt, n): (&[(u32, u32)], u32, usize) =
        if smoke { (&[(2, 30)], 20, 64) } else { (&[(1, 8192), (8, 4096)], 2048, 4096) };
    for (batch, context) in decodes {
        all.push(Work { name: format!("decode {batch} x {context}"), us: decode(d, *batch, *context)? });
    }
    all.push(Work { name: format!("prefill {prompt}"), us: prefill(d, prompt)? });
    for rows in if smoke { [1, 20] } else { [1, 512] } {
        let us = linear(d, rows, n, n, DType::F16)? * 1e6;
        all.push(Work { name: format!("linear {rows} x {n} x {n}"), us });
    }
    Ok(all)
}

pub(crate) fn wgpu(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let Some(mut device) = open_wgpu(args, out)? else { return Ok(()) };
    let by_wgpu = works(&mut device, args.smoke)?;
    let by_cuda = works(&mut crate::open()?, args.smoke)?;
    for (w, c) in by_wgpu.iter().zip(&by_cuda) {
        out.push("rows", json!({ "work": w.name, "wgpu_us": w.us, "cuda_us": c.us, "times": w.us / c.us }))?;
    }
    Ok(())
}

/// Some tokens of a sequence in a device's store: their partial for the last positions' queries.
struct Half {
    first_pos: u32,
    bytes: Vec<u8>,
}

/// A partial on its device, and its output and log-sum-exps on the host.
type Part<T> = (Partials<T>, Vec<f32>, Vec<f32>);

/// The partial of some queries over a half.
fn partial<D: Device>(
    d: &mut D,
    g: AttentionGeometry,
    half: &Half,
    queries: &[f32],
    pos0: u32,
) -> anyhow::Result<Part<D::Tensor>> {
    let shape = KvShape { layers: 1, kv_heads: g.kv_heads, head_dim: g.head_dim, dtype: DType::F16 };
    let tokens = half.bytes.len() / shape.layer_token_bytes();
    let mut kv = d.kv(shape, tokens)?;
    d.kv_write(&mut kv, 0, 0, &half.bytes)?;
    let rows = queries.len() / g.q_dim();
    let mut q = d.tensor(rows, g.q_dim())?;
    d.write(&mut q, 0, queries)?;
    let mut out = d.partials(rows, g)?;
    let seqs = [AttnRows { row0: 0, rows: u32::try_from(rows)?, pos0, run0: 0, runs: 1 }];
    let runs = [KvRun { base: 0, len: u32::try_from(tokens)?, first_pos: half.first_pos }];
    let batch = AttnBatch { geometry: g, scale: 0.088, window: None, alibi: None, seqs: &seqs, runs: &runs };
    d.attention(&q, &batch, &kv, 0, &mut out)?;
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    d.read(&out.out, 0..rows, 0..g.q_dim(), &mut o)?;
    d.read(&out.lse, 0..rows, 0..g.heads as usize, &mut lse)?;
    Ok((out, o, lse))
}

/// DistAttention by hand: the first half of a context on wgpu, the second on CUDA, merged there; and the whole on the host.
pub(crate) fn dist(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let Some(mut creditor) = open_wgpu(args, out)? else { return Ok(()) };
    let mut debtor = crate::open()?;
    let g = if args.smoke { AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 64 } } else { G };
    let (tokens, rows) = if args.smoke { (60u32, 3) } else { (8192, 8) };
    let token = 4 * g.kv_dim();
    let noise = |n: usize, step: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * step + i / 7 * 13) % 1009) as f32 / 504.0 - 1.0).collect()
    };
    let mut bytes = Vec::new();
    DType::F16.encode(&noise(tokens as usize * token / 2, 37), &mut bytes);
    let queries = noise(rows * g.q_dim(), 101);
    let pos0 = tokens - u32::try_from(rows)?;
    let cut = tokens / 2;
    let split = bytes.split_off(cut as usize * token);
    let first = Half { first_pos: 0, bytes };
    let second = Half { first_pos: cut, bytes: split };
    let started = Instant::now();
    let (theirs, o, lse) = partial(&mut creditor, g, &first, &queries, pos0)?;
    let (mut ours, ..) = partial(&mut debtor, g, &second, &queries, pos0)?;
    let mut received = debtor.partials(rows, g)?;
    debtor.write(&mut received.out, 0, &o)?;
    debtor.write(&mut received.lse, 0, &lse)?;
    received.count.clone_from(&theirs.count);
    debtor.merge(&mut ours, &received, g)?;
    let mut merged = Vec::new();
    debtor.read(&ours.out, 0..rows, 0..g.q_dim(), &mut merged)?;
    let took = started.elapsed();
    let whole = Half { first_pos: 0, bytes: [first.bytes, second.bytes].concat() };
    let (expected, want, _) = partial(&mut CpuDevice::new(), g, &whole, &queries, pos0)?;
    ensure!(ours.count == expected.count, "keys seen: {:?}, not {:?}", ours.count, expected.count);
    let worst = merged.iter().zip(&want).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
    out.set("tokens", tokens)?;
    out.set("with_stores_made_ms", took.as_secs_f64() * 1e3)?;
    out.set("worst_difference_from_the_host", worst)?;
    out.set("ok", worst < 1e-4)
}

/// The product's demo with these arguments; its report.
fn run_demo(args: &Args, out: &mut Out, more: &[&str]) -> anyhow::Result<()> {
    let Some(lagoon) = &args.lagoon else {
        return out.set("absent", "no --lagoon");
    };
    let small: &[&str] = if args.smoke { &["--prompt-tokens", "250", "--kv-tokens", "128"] } else { &[] };
    let output = Command::new(lagoon).args(["demo", "--json"]).args(more).args(small).output().context("run lagoon")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let report: Value = serde_json::from_str(text.trim())
        .with_context(|| format!("no JSON object: {text}; {}", String::from_utf8_lossy(&output.stderr)))?;
    out.set("report", report)?;
    if !output.status.success() {
        bail!("{}", output.status);
    }
    Ok(())
}

pub(crate) fn demo(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    run_demo(args, out, &["--backend", "cuda"])
}

pub(crate) fn demo_mixed(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    if open_wgpu(args, out)?.is_none() {
        return Ok(());
    }
    run_demo(args, out, &["--backend", "cuda", "--creditor-backend", "wgpu"])
}
