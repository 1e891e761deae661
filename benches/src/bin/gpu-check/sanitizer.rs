//! Small cases under NVIDIA's compute-sanitizer, each of its checkers in a process of its own: one device, seven cases,
//! warpgroup kernels last. The checkers slow kernels down a hundredfold, so the cases are as small as their kernels
//! allow.

use crate::attention::SCALE;
use crate::external::find;
use crate::parent::{End, settle, watch};
use crate::{Args, Out, inputs, read_json};
use anyhow::{Context as _, ensure};
use lagoon_backend::{Activation, AttnBatch, AttnRows, Device, HeadStrides, LatentRow, Mode, Partials};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, LinearLayers, kernels};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvRun, KvShape};
use serde_json::json;
use std::process::Command;
use std::time::{Duration, Instant};

/// The hidden section that runs the cases in a checked process.
const CASES: &str = "sanitizer-case";

/// In this order: wrong addresses first.
const TOOLS: [&str; 3] = ["memcheck", "racecheck", "synccheck"];

/// Seconds of one checker, and of one case in it.
const TOOL_S: u64 = 28;
const CASE_S: u64 = 20;

/// Exit code of compute-sanitizer with findings.
const FOUND: &str = "77";

/// Lines of a checker's output that the report keeps.
const LINES_MAX: usize = 30;

const GEOMETRY: AttentionGeometry = AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 64, latent: false };
const LATENT: AttentionGeometry = AttentionGeometry { heads: 4, kv_heads: 1, head_dim: 40, latent: true };

type Run = fn(&Args, &mut Out) -> anyhow::Result<()>;

/// The cases as a section, for the process that a checker runs.
pub(crate) fn case_section(name: &str) -> Option<Run> {
    (name == CASES).then_some(cases as Run)
}

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let Some(program) = find("compute-sanitizer") else {
        return out.set("absent", "compute-sanitizer is not in the path (it comes with NVIDIA's toolkit)");
    };
    for tool in TOOLS {
        out.row("rows", json!({ "tool": tool }), || {
            let file = out_file(args, tool, "json");
            let log = out_file(args, tool, "log");
            let mut command = Command::new(&program);
            command.args(["--tool", tool, "--error-exitcode", FOUND, "--log-file"]).arg(&log);
            command.arg(std::env::current_exe()?).args(["--child", CASES, "--goldens"]).arg(&args.goldens);
            command.arg("--out").arg(&file).args(args.smoke.then_some("--smoke"));
            let until = Instant::now() + Duration::from_secs(TOOL_S);
            let end = watch(&mut command, &file, until, Duration::from_secs(CASE_S), |_| Ok(()))?;
            let how = match &end {
                End::Exited(status) => status.to_string(),
                End::RowTooLong => format!("killed: a case took more than {CASE_S} s"),
                End::TooLong if !file.exists() => format!("killed after {TOOL_S} s, before the first case"),
                End::TooLong => format!("killed after {TOOL_S} s"),
            };
            let mut cases = read_json(&file).unwrap_or_default();
            settle(&mut cases, &how);
            let reply = std::fs::read_to_string(&log).unwrap_or_default();
            for file in [file, log] {
                // Leftovers in the temporary folder are harmless.
                let _gone = std::fs::remove_file(file);
            }
            let lines: Vec<&str> = reply.lines().filter(|line| !line.trim_matches(['=', ' ']).is_empty()).collect();
            let clean = matches!(&end, End::Exited(status) if status.success());
            let kept =
                if clean { &lines[lines.len().saturating_sub(1)..] } else { &lines[..lines.len().min(LINES_MAX)] };
            Ok(json!({ "ok": clean, "ended": how, "cases": cases["rows"], "output": kept }))
        })?;
    }
    Ok(())
}

fn out_file(args: &Args, tool: &str, kind: &str) -> std::path::PathBuf {
    args.out.with_extension(format!("{tool}.{kind}"))
}

/// One case: its name, whether it uses warpgroup kernels, and its function.
type Case = (&'static str, bool, fn(&mut CudaDevice) -> anyhow::Result<Vec<f32>>);

const CASE_LIST: [Case; 9] = [
    ("linear, one row", false, |d| linear(d, 1)),
    ("linear, tiles", false, |d| linear(d, 70)),
    ("norm, rotation, activation", false, pointwise),
    ("latent rows, attention and products by head", false, latents),
    ("decode attention, two sequences", false, |d| attention(d, KvDType::BF16, &[(1, 300), (1, 33)])),
    ("decode attention in 8 bits", false, |d| attention(d, KvDType::Fp8, &[(1, 300), (1, 33)])),
    ("prefill attention", false, |d| attention(d, KvDType::BF16, &[(70, 60)])),
    ("prefill attention in 8 bits", false, |d| attention(d, KvDType::Fp8, &[(70, 60)])),
    ("prefill attention, warpgroups", true, |d| attention(d, KvDType::BF16, &[(70, 60)])),
];

fn cases(_: &Args, out: &mut Out) -> anyhow::Result<()> {
    let tuning = Tuning { precision: Precision::Fast, wgmma: false, ..Tuning::untuned(8) };
    // NVIDIA's library is not under test.
    let options = CudaOptions { linear: LinearLayers::Own, tuning: Some(tuning), ..CudaOptions::default() };
    let mut d = CudaDevice::open(kernels::FATBIN, options).context("open the CUDA device")?;
    let newest = d.attributes().compute_capability.0 == 9;
    for (name, wgmma, case) in CASE_LIST.into_iter().filter(|case| newest || !case.1) {
        d.set_tuning(Tuning { wgmma, ..tuning });
        out.row("rows", json!({ "case": name }), || {
            let results = case(&mut d)?;
            ensure!(results.iter().all(|v| v.is_finite()), "results that are no numbers");
            Ok(json!({}))
        })?;
    }
    Ok(())
}

fn linear(d: &mut CudaDevice, rows: usize) -> anyhow::Result<Vec<f32>> {
    let (n, k) = (192, 128);
    let weight = inputs::weight(d, DType::BF16, n, k, 1)?;
    let x = inputs::tensor(d, rows, k, 2)?;
    let (mut out, mut read) = (d.tensor(rows, n)?, Vec::new());
    d.matmul(&x, &weight, rows, Mode::Set, &mut out)?;
    d.read(&out, 0..rows, 0..n, &mut read)?;
    Ok(read)
}

fn pointwise(d: &mut CudaDevice) -> anyhow::Result<Vec<f32>> {
    const COLUMNS: usize = 96;
    let (g, rows) = (GEOMETRY, 20);
    let shape = KvShape { layers: 1, kv_heads: g.kv_heads, head_dim: g.head_dim, dtype: KvDType::BF16 };
    let mut kv = d.kv(shape, 32)?;
    let norm = inputs::weight(d, DType::BF16, 1, g.qkv_dim(), 3)?;
    let x = inputs::tensor(d, rows, g.qkv_dim(), 4)?;
    let rope = inputs::tensor(d, rows, g.head_dim as usize, 5)?;
    // More rows than the fused product takes, so the activation is a kernel of its own.
    let up = inputs::weight(d, DType::BF16, 2 * COLUMNS, g.qkv_dim(), 6)?;
    let (mut qkv, mut wide, mut act) =
        (d.tensor(rows, g.qkv_dim())?, d.tensor(rows, 2 * COLUMNS)?, d.tensor(rows, COLUMNS)?);
    d.rms_norm(&x, &norm, 1e-5, rows, &mut qkv)?;
    let slots: Vec<u32> = (0..20).map(|row| row * 7 % 32).collect();
    d.rope_append(&mut qkv, &rope, g, &slots, &mut kv, 0)?;
    d.matmul_activated(&qkv, &up, rows, Activation::SiluMul, &mut wide, &mut act)?;
    let mut read = Vec::new();
    d.read(&act, 0..rows, 0..COLUMNS, &mut read)?;
    Ok(read)
}

/// Three rows of one sequence are completed, stored and attended to, and values made of what they saw.
fn latents(d: &mut CudaDevice) -> anyhow::Result<Vec<f32>> {
    let (g, rows, rotated, values) = (LATENT, 3, 16, 24);
    let heads = g.heads as usize;
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: g.head_dim, dtype: KvDType::BF16 };
    let mut kv = d.kv(shape, 40)?;
    inputs::fill(d, &mut kv, shape, 40)?;
    let mut qkv = inputs::tensor(d, rows, g.qkv_dim(), 3)?;
    let queries = inputs::tensor(d, rows, heads * 40, 4)?;
    let (latent, key) = (inputs::tensor(d, rows, g.query_dim() - rotated, 5)?, inputs::tensor(d, rows, rotated, 6)?);
    let rope = inputs::tensor(d, rows, rotated, 7)?;
    let row = LatentRow { queries: &queries, latent: &latent, key: &key, rope: &rope };
    d.latent_append(&mut qkv, row, g, &[37, 38, 39], &mut kv, 0)?;
    let mut out = Partials::new(d, rows, g)?;
    let seqs = [AttnRows { row0: 0, rows: 3, pos0: 37, run0: 0, runs: 1 }];
    let runs = [KvRun { base: 0, len: 40, first_pos: 0 }];
    let batch =
        AttnBatch { geometry: g, scale: SCALE, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    d.attention(&qkv, &batch, &kv, 0, &mut out)?;
    let weight = inputs::weight(d, DType::BF16, heads * values, g.query_dim() - rotated, 8)?;
    let (mut made, mut read) = (d.tensor(rows, heads * values)?, Vec::new());
    let strides = HeadStrides { heads, x_stride: g.query_dim(), out_stride: values };
    d.head_matmul(&out.out, &weight, strides, rows, &mut made)?;
    d.read(&made, 0..rows, 0..heads * values, &mut read)?;
    Ok(read)
}

/// Attention of sequences `(rows, keys before)`, a run each.
fn attention(d: &mut CudaDevice, dtype: KvDType, sequences: &[(u32, u32)]) -> anyhow::Result<Vec<f32>> {
    let g = GEOMETRY;
    let shape = KvShape { layers: 1, kv_heads: g.kv_heads, head_dim: g.head_dim, dtype };
    let (mut seqs, mut runs, mut row0, mut base) = (Vec::new(), Vec::new(), 0, 0);
    for &(rows, before) in sequences {
        let len = rows + before;
        seqs.push(AttnRows { row0, rows, pos0: before, run0: u32::try_from(runs.len())?, runs: 1 });
        runs.push(KvRun { base, len, first_pos: 0 });
        (row0, base) = (row0 + rows, base + len);
    }
    let mut kv = d.kv(shape, base as usize)?;
    inputs::fill(d, &mut kv, shape, base as usize)?;
    let rows = row0 as usize;
    let q = inputs::tensor(d, rows, g.q_dim(), 6)?;
    let mut out = Partials::new(d, rows, g)?;
    let batch =
        AttnBatch { geometry: g, scale: SCALE, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    d.attention(&q, &batch, &kv, 0, &mut out)?;
    let mut read = Vec::new();
    d.read(&out.out, 0..rows, 0..g.q_dim(), &mut read)?;
    Ok(read)
}
