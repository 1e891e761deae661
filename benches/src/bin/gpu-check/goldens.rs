//! The golden models' logits on the device, against those of transformers (tests/goldens).

use crate::{Args, Out};
use anyhow::Context;
use lagoon_backend::{AttnBatch, AttnRows, Device, DeviceError, Mode};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_model::{Activation, Checkpoint, LlamaWeights, ModelConfig, Norm, Rope};
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
    let mut partials = d.partials(n, geometry)?;
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
        d.matmul(&normed, &layer.up, n, Mode::Set, &mut up)?;
        match config.family.activation() {
            Activation::SiluMul => d.silu_mul(&up, n, &mut wide)?,
            Activation::Gelu => d.gelu(&up, n, &mut wide)?,
        }
        d.matmul(&wide, &layer.down, n, Mode::Add, &mut x)?;
    }
    norm(d, &x, &weights.final_norm, &mut normed)?;
    let mut out = d.tensor(n, config.vocab)?;
    d.matmul(&normed, weights.output(), n, Mode::Set, &mut out)?;
    let mut logits = Vec::new();
    d.read(&out, 0..n, 0..config.vocab, &mut logits)?;
    Ok(logits)
}

/// One model in one type: the worst difference, and what is allowed.
fn compare(dir: &Path, golden: &Value, expected: &[f32], convert: Option<DType>) -> anyhow::Result<Value> {
    let tokens: Vec<u32> = serde_json::from_value(golden["tokens"].clone()).context("the golden's tokens")?;
    let name = if convert.is_some() { "tolerance_f32" } else { "tolerance" };
    let tolerance = golden.get(name).and_then(Value::as_f64).unwrap_or(1e-3);
    let worst = |precision| -> anyhow::Result<f64> {
        let mut device = crate::open()?;
        device.set_tuning(Tuning { precision, ..*device.tuning() });
        let found = logits(&mut device, dir, &tokens, convert)?;
        let found = &found[found.len() - expected.len()..];
        // Not numbers are as far off as can be.
        let off =
            |(a, b): (&f32, &f32)| Some(f64::from((a - b).abs())).filter(|d| !d.is_nan()).unwrap_or(f64::INFINITY);
        Ok(found.iter().zip(expected).map(off).fold(0.0, f64::max))
    };
    // The goldens' tolerances are for activations that are not rounded.
    let (exact, fast) = (worst(Precision::Exact)?, worst(Precision::Fast)?);
    Ok(json!({ "ok": exact <= tolerance, "worst": exact, "tolerance": tolerance, "worst_fast": fast }))
}

pub(crate) fn run(args: &Args, out: &mut Out) -> anyhow::Result<()> {
    let goldens = &args.goldens;
    let entries = std::fs::read_dir(goldens).with_context(|| format!("read {}", goldens.display()))?;
    let mut dirs: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    dirs.retain(|dir| dir.join("config.json").exists());
    dirs.sort();
    let (mut models, mut ok) = (serde_json::Map::new(), !dirs.is_empty());
    for dir in dirs {
        let golden: Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json"))?)?;
        let bytes = std::fs::read(dir.join("logits.safetensors"))?;
        let tensors = safetensors::SafeTensors::deserialize(&bytes)?;
        let mut expected = Vec::new();
        DType::F32.decode(tensors.tensor("logits")?.data(), &mut expected);
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for (convert, kind) in [(None, "stored"), (Some(DType::F32), "f32")] {
            let result = compare(&dir, &golden, &expected, convert)
                .unwrap_or_else(|error| json!({ "ok": false, "error": format!("{error:#}") }));
            ok &= result["ok"] == json!(true);
            models.insert(format!("{name} {kind}"), result);
        }
        out.set("models", Value::Object(models.clone()))?;
    }
    out.set("ok", ok)
}
