//! The conformance suite on the device, opened anew for each case, with untuned kernels, with small pieces, and with
//! page groups that layers share; in both precisions, each with its own bounds.

use crate::{Args, Out};
use lagoon_backend::conformance::{Tolerance, cases};
use lagoon_cuda::driver::Context;
use lagoon_cuda::kernels::attention::{DecodeClass, Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, kernels};
use serde_json::json;

type Case = (&'static str, fn(&mut CudaDevice, Tolerance));

macro_rules! named {
    ($($case:ident),+ $(,)?) => {
        [$((stringify!($case), cases::$case::<CudaDevice> as fn(&mut CudaDevice, Tolerance))),+]
    };
}

/// Small pieces, so that small shapes take every path.
const PIECES: Tuning = Tuning {
    classes: [
        DecodeClass { warps: 2, stages: 4, blocks_per_sm: 1, piece_keys_min: 48 },
        DecodeClass { warps: 4, stages: 2, blocks_per_sm: 2, piece_keys_min: 96 },
        DecodeClass { warps: 8, stages: 3, blocks_per_sm: 2, piece_keys_min: 200 },
    ],
    class_keys: [64, 256],
    ..Tuning::untuned(8)
};

/// The name of a precision in rows.
pub(crate) fn name(precision: Precision) -> &'static str {
    if precision == Precision::Exact { "exact" } else { "fast" }
}

/// The suite's bounds for a precision.
pub(crate) fn tolerance(precision: Precision) -> Tolerance {
    match precision {
        // In bf16 queries, attention weights and activations are two terms of 8 bits.
        Precision::Exact => Tolerance::loosened(8.0),
        Precision::Fast => Tolerance::loosened(8.0).one_term(),
    }
}

/// A variant of tuning, precision and page groups.
struct Kind {
    name: &'static str,
    precision: Precision,
    pieces: bool,
    layers_per_group: Option<u32>,
}

impl Kind {
    const fn new(name: &'static str, precision: Precision, pieces: bool, layers_per_group: Option<u32>) -> Self {
        Self { name, precision, pieces, layers_per_group }
    }

    fn run(&self, case: fn(&mut CudaDevice, Tolerance)) -> anyhow::Result<()> {
        let base = if self.pieces { PIECES } else { Tuning::untuned(Context::open(0)?.attributes().multiprocessors) };
        let tuning = Some(Tuning { precision: self.precision, wgmma: false, ..base });
        let options = CudaOptions { layers_per_group: self.layers_per_group, tuning, ..CudaOptions::default() };
        case(&mut CudaDevice::open(kernels::FATBIN, options)?, tolerance(self.precision));
        Ok(())
    }
}

/// In this order: the user's default, the exact precision, then paths that only small pieces and shared page groups
/// take.
const KINDS: [Kind; 5] = [
    Kind::new("untuned", Precision::Fast, false, None),
    Kind::new("untuned", Precision::Exact, false, None),
    Kind::new("pieces", Precision::Fast, true, None),
    Kind::new("pieces", Precision::Exact, true, None),
    Kind::new("sliced", Precision::Exact, true, Some(2)),
];

/// The cases of the suite, and those of large inputs last.
fn all() -> Vec<Case> {
    let mut cases: Vec<Case> = lagoon_backend::conformance_names!(named()).into();
    cases.push(("matmul_large_weight", cases::matmul_large_weight::<CudaDevice>));
    cases.push(("attention_latent_wide", cases::attention_latent_wide::<CudaDevice>));
    cases
}

/// Cases of a smoke run that names none: over the fake driver the suite is a test of its own.
const SMOKE: [&str; 3] = ["attention_dtypes", "matmul_f16", "rope_append_then_attention"];

/// Whether the user wants this case.
fn is_wanted(args: &Args, case: &str) -> bool {
    args.case.is_empty() || args.case.iter().any(|part| case.contains(part))
}

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    assert!(SMOKE.iter().all(|name| all().iter().any(|(case, _)| case == name)), "a smoke run's case is unknown");
    for kind in KINDS {
        for (case, f) in all().into_iter().filter(|(case, _)| is_wanted(args, case)) {
            let left_out = args.smoke && args.case.is_empty() && !SMOKE.contains(&case);
            let large = ["matmul_large_weight", "attention_latent_wide"].contains(&case);
            if left_out || large && (kind.pieces || args.smoke) {
                continue;
            }
            let key = json!({ "cut": kind.name, "precision": name(kind.precision), "case": case });
            out.row("cases", key, || {
                kind.run(f)?;
                Ok(json!({}))
            })?;
        }
    }
    Ok(())
}

/// Attention cases with prompts, with warpgroup kernels.
pub(crate) fn warpgroups(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let takes = |case: &&Case| {
        (case.0.starts_with("attention_") || case.0 == "rope_append_then_attention") && is_wanted(args, case.0)
    };
    let some = if args.smoke { 2 } else { usize::MAX };
    for (case, f) in all().iter().filter(takes).take(some) {
        out.row("cases", json!({ "case": case, "precision": "fast", "wgmma": true }), || {
            let tuning = Some(Tuning { precision: Precision::Fast, wgmma: true, ..PIECES });
            let options = CudaOptions { tuning, ..CudaOptions::default() };
            f(&mut CudaDevice::open(kernels::FATBIN, options)?, tolerance(Precision::Fast));
            Ok(json!({}))
        })?;
    }
    Ok(())
}
