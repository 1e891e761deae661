//! Tuning of decode attention, once for all sections, which take its result from the report.

use crate::attention::G;
use crate::{Args, Out, open, read_json};
use lagoon_cuda::TuneFor;
use lagoon_cuda::driver::Context;
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::kernels::tune::Tuned;
use lagoon_types::{AttentionGeometry, DType};
use serde_json::json;
use std::time::Duration;

/// Geometry, contexts and bounds of tuning.
pub(crate) fn what(args: &Args, dtype: DType) -> TuneFor {
    let contexts = args.smoke.then_some([30, 60, 90]);
    let time_max = if args.smoke { Duration::from_millis(300) } else { Duration::from_secs(12) };
    let bytes_max = if args.smoke { 1 << 19 } else { 2 << 30 };
    let geometry = if args.smoke { AttentionGeometry { heads: 2, kv_heads: 1, ..G } } else { G };
    TuneFor { geometry, dtype, contexts, time_max, bytes_max }
}

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        out.row("rows", json!({ "dtype": dtype.to_string() }), || {
            let tuned = open(Precision::Fast)?.tune(&what(args, dtype))?;
            Ok(json!({ "tuned": tuned.map(|tuned| tuned.to_string()) }))
        })?;
    }
    Ok(())
}

/// The report's tuning for this type, or untuned values; never with warpgroup kernels.
pub(crate) fn tuning(args: &Args, dtype: DType, precision: Precision) -> anyhow::Result<Tuning> {
    let sms = Context::open(0)?.attributes().multiprocessors;
    let base = Tuning { precision, wgmma: false, ..Tuning::untuned(sms) };
    let report = args.from.as_deref().and_then(read_json).unwrap_or_default();
    let rows = report["sections"]["tune"]["found"]["rows"].as_array();
    let row = rows.into_iter().flatten().find(|row| row["dtype"] == json!(dtype.to_string()));
    let tuned = row.and_then(|row| row["tuned"].as_str()).and_then(|text| text.parse::<Tuned>().ok());
    Ok(tuned.map_or(base, |tuned| tuned.apply(base)))
}
