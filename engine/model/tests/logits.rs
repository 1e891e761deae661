//! Configuration, weights and rotary table together give transformers' logits (tests/goldens) on the host backend, by
//! the plainest forward pass: all tokens at once, one run of KV, no scheduler or pool.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_backend::{AttnBatch, AttnRows, CpuDevice, Device, Mode, Partials};
use lagoon_model::{Checkpoint, LlamaWeights, ModelConfig, Norm, Rope};
use lagoon_types::{DType, KvRun};
use std::path::{Path, PathBuf};

/// Logits of every token, `[tokens][vocab]`.
fn logits(dir: &Path, tokens: &[u32], convert: Option<DType>) -> Vec<f32> {
    let config = ModelConfig::open(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let mut device = CpuDevice::with_threads(1);
    let d = &mut device;
    let weights = LlamaWeights::load(d, &checkpoint, &config, convert, &mut |_, _| {}).unwrap();
    let (n, geometry, hidden) = (tokens.len(), config.geometry, config.hidden);
    let positions: Vec<u32> = (0..).take(n).collect();
    let mut table = Vec::new();
    Rope::new(&config).fill(&positions, &mut table);
    let mut rope = d.tensor(n, geometry.head_dim as usize).unwrap();
    d.write(&mut rope, 0, &table).unwrap();
    let mut kv = d.kv(config.kv_shape(weights.dtype), n).unwrap();
    let [mut x, mut normed] = [(); 2].map(|()| d.tensor(n, hidden).unwrap());
    let mut qkv = d.tensor(n, geometry.qkv_dim()).unwrap();
    let mut up = d.tensor(n, config.family.activation().inputs() * config.intermediate).unwrap();
    let mut wide = d.tensor(n, config.intermediate).unwrap();
    let mut partials = Partials::new(d, n, geometry).unwrap();
    let rows = u32::try_from(n).unwrap();
    let runs = [KvRun { base: 0, len: rows, first_pos: 0 }];
    let seqs = [AttnRows { row0: 0, rows, pos0: 0, run0: 0, runs: 1 }];
    let (scale, window) = (config.attention_scale(), config.window);
    let alibi = config.alibi;
    let batch = AttnBatch { geometry, scale, window, alibi, seqs: &seqs, runs: &runs };
    let norm = |d: &mut CpuDevice, x: &_, weight: &_, out: &mut _| match config.family.norm() {
        Norm::Rms => d.rms_norm(x, weight, config.norm_eps, n, out),
        Norm::Layer => d.layer_norm(x, weight, config.norm_eps, n, out),
    };
    d.embed(&weights.embed, tokens, &mut x).unwrap();
    for (i, layer) in weights.layers.iter().enumerate() {
        norm(d, &x, &layer.attn_norm, &mut normed).unwrap();
        d.matmul(&normed, &layer.qkv, n, Mode::Set, &mut qkv).unwrap();
        if let Some(bias) = &layer.qkv_bias {
            d.add_bias(&mut qkv, bias, n).unwrap();
        }
        d.rope_append(&mut qkv, &rope, geometry, &positions, &mut kv, i).unwrap();
        d.attention(&qkv, &batch, &kv, i, &mut partials).unwrap();
        d.matmul(&partials.out, &layer.o, n, Mode::Add, &mut x).unwrap();
        norm(d, &x, &layer.mlp_norm, &mut normed).unwrap();
        d.matmul_activated(&normed, &layer.up, n, config.family.activation(), &mut up, &mut wide).unwrap();
        d.matmul(&wide, &layer.down, n, Mode::Add, &mut x).unwrap();
    }
    norm(d, &x, &weights.final_norm, &mut normed).unwrap();
    let mut out = d.tensor(n, config.vocab).unwrap();
    d.matmul(&normed, weights.output(), n, Mode::Set, &mut out).unwrap();
    let mut logits = Vec::new();
    d.read(&out, 0..n, 0..config.vocab, &mut logits).unwrap();
    logits
}

#[test]
fn golden_models_give_the_logits_of_transformers() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(goldens).unwrap().map(|entry| entry.unwrap().path()).collect();
    dirs.retain(|dir| dir.join("config.json").exists());
    dirs.sort();
    assert!(dirs.len() >= 8);
    for dir in dirs {
        let golden: serde_json::Value =
            serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
        let tokens: Vec<u32> = serde_json::from_value(golden["tokens"].clone()).unwrap();
        let bytes = std::fs::read(dir.join("logits.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut expected = Vec::new();
        DType::F32.decode(tensors.tensor("logits").unwrap().data(), &mut expected);
        // In the model's own type within the noise of that type; widened to f32, exactly.
        for (convert, tolerance) in [(None, "tolerance"), (Some(DType::F32), "tolerance_f32")] {
            let tolerance = golden.get(tolerance).map_or(1e-3, |t| t.as_f64().unwrap());
            let found = logits(&dir, &tokens, convert);
            let found = &found[found.len() - expected.len()..];
            let worst = found.iter().zip(&expected).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
            println!("{} as {convert:?}: {worst:.6} of {tolerance}", golden["shows"]);
            assert!(worst <= tolerance, "{}: {worst} as {convert:?}", dir.display());
        }
    }
}

#[test]
fn converted_weights_give_nearly_the_same_logits() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/passkey");
    let tokens: Vec<u32> = std::iter::once(1022).chain((0..60).map(|i| i * 37 % 1000)).collect();
    let [stored, wide] = [None, Some(DType::F32)].map(|dtype| logits(&dir, &tokens, dtype));
    let worst = stored.iter().zip(&wide).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // f16 widens to f32 exactly, so only the KV's rounding differs: something, but little.
    assert!(worst > 0.0 && worst < 0.05, "{worst}");
}
