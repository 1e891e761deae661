//! The golden models' logits on the device, against those of transformers (tests/goldens).

use crate::{Args, Out, conformance};
use anyhow::{Context as _, ensure};
use lagoon_backend::conformance::ONE_TERM_LOGITS;
use lagoon_backend::{AttnBatch, AttnRows, Device, DeviceError, Mode, Partials};
use lagoon_cuda::kernels::attention::Precision;
use lagoon_model::{Checkpoint, LlamaWeights, ModelConfig, Norm, Rope};
use lagoon_types::{DType, KvRun};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Logits of every token, `[tokens][vocab]`, by the plainest forward pass.
fn logits<D: Device>(d: &mut D, dir: &Path, tokens: &[u32], convert: Option<DType>) -> anyhow::Result<Vec<f32>> {
    let config = ModelConfig::open(dir)?;
    let checkpoint = Checkpoint::open(dir)?;
    let weights = LlamaWeights::load(d, &checkpoint, &config, convert, &mut |_, _| {})?;
    let (n, geometry) = (tokens.len(), config.geometry);
    let positions: Vec<u32> = (0..).take(n).collect();
    let mut table = Vec::new();
    Rope::new(&config).fill(&positions, &mut table);
    let mut rope = d.tensor(n, geometry.head_dim as usize)?;
    d.write(&mut rope, 0, &table)?;
    let mut kv = d.kv(config.kv_shape(weights.dtype), n)?;
    let (mut x, mut normed) = (d.tensor(n, config.hidden)?, d.tensor(n, config.hidden)?);
    let mut qkv = d.tensor(n, geometry.qkv_dim())?;
    let mut up = d.tensor(n, config.family.activation().inputs() * config.intermediate)?;
    let mut wide = d.tensor(n, config.intermediate)?;
    let mut partials = Partials::new(d, n, geometry)?;
    let rows = u32::try_from(n)?;
    let runs = [KvRun { base: 0, len: rows, first_pos: 0 }];
    let seqs = [AttnRows { row0: 0, rows, pos0: 0, run0: 0, runs: 1 }];
    let (scale, window) = (config.attention_scale(), config.window);
    let batch = AttnBatch { geometry, scale, window, alibi: config.alibi, seqs: &seqs, runs: &runs };
    let norm = |d: &mut D, x: &_, weight: &_, out: &mut _| -> Result<(), DeviceError> {
        match config.family.norm() {
            Norm::Rms => d.rms_norm(x, weight, config.norm_eps, n, out),
            Norm::Layer => d.layer_norm(x, weight, config.norm_eps, n, out),
        }
    };
    d.embed(&weights.embed, tokens, &mut x)?;
    for (i, layer) in weights.layers.iter().enumerate() {
        norm(d, &x, &layer.attn_norm, &mut normed)?;
        d.matmul(&normed, &layer.qkv, n, Mode::Set, &mut qkv)?;
        if let Some(bias) = &layer.qkv_bias {
            d.add_bias(&mut qkv, bias, n)?;
        }
        d.rope_append(&mut qkv, &rope, geometry, &positions, &mut kv, i)?;
        d.attention(&qkv, &batch, &kv, i, &mut partials)?;
        d.matmul(&partials.out, &layer.o, n, Mode::Add, &mut x)?;
        norm(d, &x, &layer.mlp_norm, &mut normed)?;
        d.matmul_activated(&normed, &layer.up, n, config.family.activation(), &mut up, &mut wide)?;
        d.matmul(&wide, &layer.down, n, Mode::Add, &mut x)?;
    }
    norm(d, &x, &weights.final_norm, &mut normed)?;
    let mut out = d.tensor(n, config.vocab)?;
    d.matmul(&normed, weights.output(), n, Mode::Set, &mut out)?;
    let mut logits = Vec::new();
    d.read(&out, 0..n, 0..config.vocab, &mut logits)?;
    Ok(logits)
}

/// A golden's description.
fn description(dir: &Path) -> anyhow::Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(dir.join("golden.json"))?)?)
}

/// Whether a golden has 16-bit weights: f32 ones are multiplied alike in both precisions.
fn has_16_bits(golden: &Value) -> bool {
    golden["dtype_noise"].is_number()
}

/// What is allowed of a model with its weights as stored or converted, in one precision: [`ONE_TERM_LOGITS`] of the reference's own
/// error in 16 bits where activations are rounded.
fn tolerance(golden: &Value, converted: bool, precision: Precision) -> f64 {
    let name = if converted { "tolerance_f32" } else { "tolerance" };
    let tolerance = golden[name].as_f64().unwrap_or(1e-3);
    let rounds = !converted && has_16_bits(golden) && precision == Precision::Fast;
    if rounds { f64::from(ONE_TERM_LOGITS) * tolerance } else { tolerance }
}

/// One model in one precision: the worst difference, and what is allowed.
fn compare(dir: &Path, golden: &Value, convert: Option<DType>, precision: Precision) -> anyhow::Result<Value> {
    let bytes = std::fs::read(dir.join("logits.safetensors"))?;
    let mut expected = Vec::new();
    DType::F32.decode(safetensors::SafeTensors::deserialize(&bytes)?.tensor("logits")?.data(), &mut expected);
    let tokens: Vec<u32> = serde_json::from_value(golden["tokens"].clone()).context("the golden's tokens")?;
    let tolerance = tolerance(golden, convert.is_some(), precision);
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
    // Which goldens, weights converted, named, and the precision.
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
    fn rounded_activations_have_their_own_bound() {
        let golden = json!({ "dtype_noise": 0.2, "tolerance": 0.2, "tolerance_f32": 1e-3 });
        let share = f64::from(ONE_TERM_LOGITS);
        assert!((tolerance(&golden, false, Precision::Fast) - 0.2 * share).abs() < 1e-9);
        assert_eq!(tolerance(&golden, false, Precision::Exact).to_bits(), 0.2f64.to_bits());
        assert_eq!(tolerance(&golden, true, Precision::Exact).to_bits(), 1e-3f64.to_bits());
        let f32_golden = json!({ "tolerance": 1e-3 });
        assert!(!has_16_bits(&f32_golden));
        assert_eq!(tolerance(&f32_golden, false, Precision::Fast).to_bits(), 1e-3f64.to_bits());
    }
}
