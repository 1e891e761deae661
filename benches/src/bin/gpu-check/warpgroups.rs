//! Warpgroup kernels and TMA, which only a GPU can confirm: whether they agree with the other kernels and are faster,
//! the conformance suite's attention, and prompts. Sections of their own at the ends of commands: any row may trap or
//! hang, at the cost of that row.

use crate::attention::{prefill, prefill_row, prompts};
use crate::tune::{tuning, what};
use crate::{Args, Out, conformance, open};
use lagoon_cuda::TuneFor;
use lagoon_cuda::driver::Context;
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_types::{AttentionGeometry, DType};
use serde_json::json;

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
            prefill_row(tokens, &prefill(tokens, DType::BF16, None, tuning)?)
        })?;
    }
    conformance::warpgroups(args, out)
}
