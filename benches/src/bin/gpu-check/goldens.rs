//! The golden models' logits on the device, against those of transformers (tests/goldens).

use crate::{Args, Out, conformance};
use anyhow::{Context as _, ensure};
use lagoon_backend::Device;
use lagoon_cuda::kernels::attention::Precision;
use lagoon_model::{Checkpoint, ModelSpec, Weights};
use lagoon_runner::{Decoder, Model};
use lagoon_types::DType;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Logits of every token, `[tokens][vocab]`, by the plainest forward pass.
fn logits<D: Device>(d: &mut D, dir: &Path, tokens: &[u32], convert: Option<DType>) -> anyhow::Result<Vec<f32>> {
    let spec = ModelSpec::open(dir)?;
    let weights = Weights::load(d, &Checkpoint::open(dir)?, &spec, convert, &mut |_, _| {})?;
    let dtype = weights.dtype;
    Ok(Decoder::new(&Model::new(&spec, weights)).plain_logits(d, dtype, tokens)?)
}

/// A golden's description.
fn description(dir: &Path) -> anyhow::Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(dir.join("golden.json"))?)?)
}

/// Whether a golden has 16-bit weights: f32 ones are multiplied alike in both precisions.
fn has_16_bits(golden: &Value) -> bool {
    golden["dtype_noise"].is_number()
}

/// Allowed error of a model's logits, in f32 or with 16-bit weights stored. transformers' own run in 16 bits is off by
/// the latter: it rounds norms, residuals and rotated queries; fast precision rounds inputs of products only.
fn tolerance(golden: &Value, converted: bool) -> f64 {
    golden[if converted { "tolerance_f32" } else { "tolerance" }].as_f64().unwrap_or(1e-3)
}

/// One model in one precision: the worst difference, and the allowed one.
fn compare(dir: &Path, golden: &Value, convert: Option<DType>, precision: Precision) -> anyhow::Result<Value> {
    let bytes = std::fs::read(dir.join("logits.safetensors"))?;
    let mut expected = Vec::new();
    DType::F32.decode(safetensors::SafeTensors::deserialize(&bytes)?.tensor("logits")?.data(), &mut expected);
    let tokens: Vec<u32> = serde_json::from_value(golden["tokens"].clone()).context("the golden's tokens")?;
    let tolerance = tolerance(golden, convert.is_some());
    let found = logits(&mut crate::open(precision)?, dir, &tokens, convert)?;
    let found = &found[found.len() - expected.len()..];
    let worst = found.iter().zip(&expected).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
    let number = found.iter().all(|logit| logit.is_finite());
    Ok(json!({ "ok": number && worst <= tolerance, "worst": worst, "tolerance": tolerance }))
}

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let goldens = &args.goldens;
    let entries = std::fs::read_dir(goldens).with_context(|| format!("read {}", goldens.display()))?;
    let mut dirs: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    dirs.retain(|dir| dir.join("config.json").exists());
    dirs.sort();
    ensure!(!dirs.is_empty(), "no models in {}", goldens.display());
    // Variants: 16-bit goldens only, conversion of weights, name, precision.
    let kinds = [
        (false, None, "stored", Precision::Fast),
        (true, None, "stored", Precision::Exact),
        (true, Some(DType::F32), "f32", Precision::Exact),
    ];
    for (only_16_bits, convert, weights, precision) in kinds {
        for dir in &dirs {
            let golden = description(dir)?;
            if only_16_bits && !has_16_bits(&golden) {
                continue;
            }
            let model = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let key = json!({ "model": model, "weights": weights, "precision": conformance::name(precision) });
            out.row("models", key, || compare(dir, &golden, convert, precision))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_16_bit_weights_have_their_own_bound() {
        let golden = json!({ "dtype_noise": 0.2, "tolerance": 0.2, "tolerance_f32": 1e-3 });
        assert_eq!(
            [tolerance(&golden, false), tolerance(&golden, true)].map(f64::to_bits),
            [0.2, 1e-3].map(f64::to_bits)
        );
        let f32_golden = json!({ "tolerance": 1e-3 });
        assert!(has_16_bits(&golden) && !has_16_bits(&f32_golden));
        assert_eq!(tolerance(&f32_golden, false).to_bits(), 1e-3f64.to_bits());
    }
}
