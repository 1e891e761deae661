//! Warpgroup kernels and TMA, which only a GPU can confirm: whether they agree with the other kernels and are faster,
//! the conformance suite's attention, and prompts. Sections of their own at the ends of commands: any row may trap or
//! hang, at the cost of that row.

use crate::attention::{G, SCALE, prefill, prefill_row, prompts};
use crate::tune::{tuning, what};
use crate::{Args, Out, conformance, inputs, open, steps};
use lagoon_backend::{AttnBatch, AttnRows, Device, Partials, VirtualMemory};
use lagoon_cuda::TuneFor;
use lagoon_cuda::driver::Context;
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvRun, KvShape, KvSpace};
use serde_json::{Value, json};

/// Records why there is nothing to measure on other devices.
fn absent(out: &mut Out) -> anyhow::Result<bool> {
    let (major, minor) = Context::open(0)?.attributes().compute_capability;
    if major == 9 {
        return Ok(false);
    }
    out.set("absent", format!("compute capability {major}.{minor} has no warpgroup products (wgmma is of 9.0)"))?;
    Ok(true)
}

/// Comparison and timing of each kernel, as in `lagoon serve`.
pub(crate) fn trial(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    if absent(out)? {
        return Ok(());
    }
    for (dtype, head_dim) in [(DType::BF16, 128), (DType::F16, 128), (DType::BF16, 64), (DType::F16, 64)] {
        out.row("rows", json!({ "dtype": dtype.to_string(), "head_dim": head_dim }), || {
            let what = what(args, dtype);
            let geometry = AttentionGeometry { head_dim, ..what.geometry };
            let tried = open(Precision::Fast)?.try_warpgroups(&TuneFor { geometry, ..what })?;
            Ok(json!({
                "agree": tried.agree,
                "faster": tried.faster,
                "error_over_bound": { "output": tried.worst[0], "log_sum_exp": tried.worst[1] },
                "worst_case": tried.worst_case,
                "prefill_ms": { "mma_sync": tried.prefill_ms[0], "wgmma": tried.prefill_ms[1] },
            }))
        })?;
    }
    Ok(())
}

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    if absent(out)? {
        return Ok(());
    }
    for &tokens in prompts(args) {
        out.row("rows", json!({ "tokens": tokens, "kernel": "wgmma" }), || {
            let tuning = Tuning { wgmma: true, ..tuning(args, DType::BF16, Precision::Fast)? };
            prefill_row(tokens, &prefill(tokens, KvDType::BF16, None, tuning)?)
        })?;
    }
    for terabytes in [0, 1, 4] {
        out.row("loose", json!({ "terabytes_before": terabytes }), || loose(args, terabytes))?;
    }
    conformance::warpgroups(args, out)?;
    steps::prompts_on_warpgroups(args, out)
}

/// The largest difference between both kernels' attention to keys behind an address row of so many terabytes that has no memory, as
/// lent rBlocks are: nothing may be read at the store's first slot, where TMA looks if a box has nothing of its tensor.
fn loose(args: &Args, terabytes: u64) -> anyhow::Result<Value> {
    let (tokens, rows) = if args.smoke { (96u32, 70u32) } else { (4096, 512) };
    let shape = KvShape { layers: 32, kv_heads: G.kv_heads, head_dim: G.head_dim, dtype: DType::BF16.into() };
    let slot_bytes = shape.layer_token_bytes() as u64 / 2 * u64::from(shape.layers);
    // One row of addresses, of 32 tokens an rBlock.
    let row_blocks = u32::try_from((terabytes << 40) / slot_bytes / 32)?.max(1);
    let space = KvSpace::flat(tokens.div_ceil(32), 32).with_rows(1, row_blocks);
    let mut d = open(Precision::Fast)?;
    let mut kv = d.kv_in(shape, &space)?;
    let (layer, base) = (5, row_blocks * 32);
    d.kv_hold(&mut kv, std::slice::from_ref(&(base..base + tokens)))?;
    let bytes = inputs::stored_noise(DType::BF16, tokens as usize * shape.layer_token_bytes() / 2, 1.0, 1);
    d.kv_write(&mut kv, layer, base, &bytes)?;
    let q = inputs::tensor(&mut d, rows as usize, G.q_dim(), 2)?;
    let seqs = [AttnRows { row0: 0, rows, pos0: tokens - rows - 5, run0: 0, runs: 1 }];
    let runs = [KvRun { base, len: tokens, first_pos: 0 }];
    let batch =
        AttnBatch { geometry: G, scale: SCALE, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    let mut found = Vec::new();
    for wgmma in [false, true] {
        d.set_tuning(Tuning { wgmma, ..*d.tuning() });
        let (mut out, mut read) = (Partials::new(&mut d, rows as usize, G)?, Vec::new());
        d.attention(&q, &batch, &kv, layer, &mut out)?;
        d.read(&out.out, 0..rows as usize, 0..G.q_dim(), &mut read)?;
        found.push(read);
    }
    let worst = found[0].iter().zip(&found[1]).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
    let number = found.iter().flatten().all(|x| x.is_finite());
    Ok(json!({ "ok": number && worst < 2e-2, "worst_difference": worst }))
}
