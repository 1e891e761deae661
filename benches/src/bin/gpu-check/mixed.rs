//! CUDA beside wgpu on the same GPU: their speeds, DistAttention over KV of which each holds half, and the product's
//! demo, on CUDA alone and with wgpu creditors.

use crate::attention::{G, SCALE};
use crate::timing::host_seconds;
use crate::{Args, Out, inputs};
use anyhow::{Context, bail, ensure};
use lagoon_backend::{AttnBatch, AttnRows, CpuDevice, Device, Mode, Partials};
use lagoon_cuda::kernels::attention::Precision;
use lagoon_shaders::{AdapterChoice, WgpuDevice, list_adapters};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvRun, KvShape};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Instant;

/// The GPU through wgpu; in a smoke run, a software adapter too. `None` without either.
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

/// Work that both devices do.
#[derive(Clone, Copy)]
enum Work {
    Decode { batch: u32, context: u32 },
    Prefill { tokens: u32 },
    Linear { rows: usize, n: usize },
}

impl Work {
    fn name(self) -> String {
        match self {
            Self::Decode { batch, context } => format!("decode {batch} x {context}"),
            Self::Prefill { tokens } => format!("prefill {tokens}"),
            Self::Linear { rows, n } => format!("linear {rows} x {n} x {n}"),
        }
    }

    /// Microseconds of one call, by the host's clock: wgpu has no events. Inputs are used in turn, so that a cache of `l2_bytes` holds
    /// none of them.
    fn time<D: Device>(self, d: &mut D, l2_bytes: u32) -> anyhow::Result<f64> {
        let s = match self {
            Self::Decode { batch, context } => attention(d, batch, 1, context, l2_bytes),
            Self::Prefill { tokens } => attention(d, 1, tokens, tokens, l2_bytes),
            Self::Linear { rows, n } => {
                let copies = inputs::copies(l2_bytes, n * n * DType::F16.size());
                let weights = (0..copies as u64).map(|seed| inputs::weight(d, DType::F16, n, n, seed));
                let weights = weights.collect::<anyhow::Result<Vec<_>>>()?;
                let x = inputs::tensor(d, rows, n, 2)?;
                let mut out = d.tensor(rows, n)?;
                let mut turn = (0..copies).cycle();
                host_seconds(d, 20, |d| {
                    let weight = &weights[turn.next().unwrap_or(0)];
                    Ok(d.matmul(&x, weight, rows, Mode::Set, &mut out)?)
                })
            }
        }?;
        Ok(s * 1e6)
    }
}

/// Seconds of attention of `batch` sequences with this many rows over this many keys, in another layer each time.
fn attention<D: Device>(d: &mut D, batch: u32, rows: u32, context: u32, l2_bytes: u32) -> anyhow::Result<f64> {
    let bytes = (batch * context) as usize * 2 * G.kv_dim() * DType::F16.size();
    let layers = inputs::copies(l2_bytes, bytes);
    let kv = inputs::store(d, u32::try_from(layers)?, (batch * context) as usize, DType::F16)?;
    let q = inputs::tensor(d, (batch * rows) as usize, G.q_dim(), 3)?;
    let mut out = Partials::new(d, (batch * rows) as usize, G)?;
    let seqs: Vec<AttnRows> =
        (0..batch).map(|i| AttnRows { row0: i * rows, rows, pos0: context - rows, run0: i, runs: 1 }).collect();
    let runs: Vec<KvRun> = (0..batch).map(|i| KvRun { base: i * context, len: context, first_pos: 0 }).collect();
    let batch =
        AttnBatch { geometry: G, scale: SCALE, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    let mut turn = (0..layers).cycle();
    host_seconds(d, 3, |d| Ok(d.attention(&q, &batch, &kv, turn.next().unwrap_or(0), &mut out)?))
}

pub(crate) fn wgpu(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let Some(mut device) = open_wgpu(args, out)? else { return Ok(()) };
    let (decodes, tokens, n, rows) =
        if args.smoke { ([(2, 30), (1, 40)], 20, 64, [1, 20]) } else { ([(1, 8192), (8, 4096)], 2048, 4096, [1, 512]) };
    let attention = decodes.map(|(batch, context)| Work::Decode { batch, context });
    let linear = rows.map(|rows| Work::Linear { rows, n });
    for work in attention.into_iter().chain([Work::Prefill { tokens }]).chain(linear) {
        out.row("rows", json!({ "work": work.name() }), || {
            let mut cuda = crate::open(Precision::Fast)?;
            let l2_bytes = if args.smoke { 0 } else { cuda.attributes().l2_bytes };
            let (wgpu_us, cuda_us) = (work.time(&mut device, l2_bytes)?, work.time(&mut cuda, l2_bytes)?);
            Ok(json!({ "wgpu_us": wgpu_us, "cuda_us": cuda_us, "times": wgpu_us / cuda_us }))
        })?;
    }
    Ok(())
}

/// Half of a sequence's tokens in one device's store.
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
    let shape = KvShape { layers: 1, kv_heads: g.kv_heads, head_dim: g.head_dim, dtype: KvDType::F16 };
    let tokens = half.bytes.len() / shape.layer_token_bytes();
    let mut kv = d.kv(shape, tokens)?;
    d.kv_write(&mut kv, 0, 0, &half.bytes)?;
    let rows = queries.len() / g.q_dim();
    let mut q = d.tensor(rows, g.q_dim())?;
    d.write(&mut q, 0, queries)?;
    let mut out = Partials::new(d, rows, g)?;
    let seqs = [AttnRows { row0: 0, rows: u32::try_from(rows)?, pos0, run0: 0, runs: 1 }];
    let runs = [KvRun { base: 0, len: u32::try_from(tokens)?, first_pos: half.first_pos }];
    let batch =
        AttnBatch { geometry: g, scale: SCALE, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    d.attention(&q, &batch, &kv, 0, &mut out)?;
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    d.read(&out.out, 0..rows, 0..g.q_dim(), &mut o)?;
    d.read(&out.lse, 0..rows, 0..g.heads as usize, &mut lse)?;
    Ok((out, o, lse))
}

/// DistAttention by hand: the first half of a context on wgpu, the second on CUDA, merged there; and the whole on the host.
pub(crate) fn dist(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let Some(mut creditor) = open_wgpu(args, out)? else { return Ok(()) };
    let mut debtor = crate::open(Precision::Fast)?;
    let g = if args.smoke { AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 64, latent: false } } else { G };
    let (tokens, rows) = if args.smoke { (60u32, 3) } else { (8192, 8) };
    let token = 4 * g.kv_dim();
    let mut bytes = inputs::stored_noise(DType::F16, tokens as usize * token / 2, 1.0, 1);
    let queries = inputs::noise(rows * g.q_dim(), 1.0, 2);
    let pos0 = tokens - u32::try_from(rows)?;
    let cut = tokens / 2;
    let split = bytes.split_off(cut as usize * token);
    let first = Half { first_pos: 0, bytes };
    let second = Half { first_pos: cut, bytes: split };
    let started = Instant::now();
    let (theirs, o, lse) = partial(&mut creditor, g, &first, &queries, pos0)?;
    let (mut ours, ..) = partial(&mut debtor, g, &second, &queries, pos0)?;
    let mut received = Partials::new(&mut debtor, rows, g)?;
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
