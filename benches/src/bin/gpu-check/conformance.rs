//! The conformance suite, each case on the device opened anew, with the kernels cut as they are and into many pieces.

use crate::{Args, Out, panic_text};
use lagoon_backend::conformance::{Tolerance, cases};
use lagoon_cuda::kernels::attention::{DecodeClass, Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, kernels};
use serde_json::{Map, Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};

type Case = (&'static str, fn(&mut CudaDevice, Tolerance));

macro_rules! named {
    ($($case:ident),+ $(,)?) => {
        [$((stringify!($case), cases::$case::<CudaDevice> as fn(&mut CudaDevice, Tolerance))),+]
    };
}

/// Small pieces, so that small shapes meet every path.
const PIECES: Tuning = Tuning {
    classes: [
        DecodeClass { warps: 2, stages: 4, blocks_per_sm: 1, piece_keys_min: 48 },
        DecodeClass { warps: 4, stages: 2, blocks_per_sm: 2, piece_keys_min: 96 },
        DecodeClass { warps: 8, stages: 3, blocks_per_sm: 2, piece_keys_min: 200 },
    ],
    class_keys: [64, 256],
    ..Tuning::untuned(8)
};

pub(crate) fn run(_: &Args, out: &mut Out) -> anyhow::Result<()> {
    let cases: &[Case] = &lagoon_backend::conformance_names!(named());
    let large: Case = ("matmul_large_weight", cases::matmul_large_weight::<CudaDevice>);
    let (exact, fast) = (Precision::Exact, Precision::Fast);
    let kinds = [
        ("untuned", None, None, exact),
        ("pieces", Some(PIECES), None, exact),
        ("sliced", Some(PIECES), Some(2), exact),
        ("fast", None, None, fast),
    ];
    let mut failed = 0;
    for (kind, tuning, layers_per_group, precision) in kinds {
        let mut results = Map::new();
        for (name, case) in cases.iter().chain((kind == "untuned").then_some(&large)) {
            let options = CudaOptions { layers_per_group, tuning, ..CudaOptions::default() };
            let result = catch_unwind(AssertUnwindSafe(|| {
                let mut device = CudaDevice::open(kernels::FATBIN, options).map_err(|e| e.to_string())?;
                device.set_tuning(Tuning { precision, ..*device.tuning() });
                // Under exact precision queries, attention weights and activations are two terms of 8 bits in bf16.
                let tolerance = Tolerance::loosened(8.0);
                case(&mut device, if precision == exact { tolerance } else { tolerance.one_term() });
                Ok::<_, String>(())
            }));
            let text = match result {
                Ok(Ok(())) => "ok".to_owned(),
                Ok(Err(error)) => error,
                Err(panic) => panic_text(panic.as_ref()),
            };
            failed += usize::from(text != "ok");
            results.insert((*name).to_owned(), json!(text));
        }
        out.set(kind, Value::Object(results))?;
    }
    out.set("failed", failed)?;
    out.set("ok", failed == 0)
}
