//! Configuration, weights and decoder together give transformers' logits (tests/goldens) on the host backend, by
//! the plainest forward pass: all tokens at once, one run of KV, no scheduler or pool.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_backend::CpuDevice;
use lagoon_model::{Checkpoint, ModelSpec, Weights};
use lagoon_runner::{Decoder, Model};
use lagoon_types::DType;
use std::path::{Path, PathBuf};

/// Logits of every token, `[tokens][vocab]`.
fn logits(dir: &Path, tokens: &[u32], convert: Option<DType>) -> Vec<f32> {
    let spec = ModelSpec::open(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let mut device = CpuDevice::with_threads(1);
    let weights = Weights::load(&mut device, &checkpoint, &spec, convert, &mut |_, _| {}).unwrap();
    let dtype = weights.dtype;
    Decoder::new(&Model::new(&spec, weights)).plain_logits(&mut device, dtype, tokens).unwrap()
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

/// A context within LongRoPE's original one has the short factors, as in transformers: logits of the prompt, and the tokens after
/// it up to the last position.
#[test]
fn a_limited_context_gives_the_logits_of_the_short_factors() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/phi3_longrope_short");
    let described: serde_json::Value =
        serde_json::from_slice(&std::fs::read(golden.join("golden.json")).unwrap()).unwrap();
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(described["model"].as_str().unwrap());
    let ids = |field: &str| serde_json::from_value::<Vec<u32>>(described[field].clone()).unwrap();
    let (prompt, continuation) = (ids("tokens"), ids("greedy_continuation"));
    let tokens = [&prompt[..], &continuation[..continuation.len() - 1]].concat();
    let bytes = std::fs::read(golden.join("logits.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut expected = Vec::new();
    DType::F32.decode(tensors.tensor("logits").unwrap().data(), &mut expected);

    let checkpoint = Checkpoint::open(&dir).unwrap();
    let logits = |context: Option<u32>| {
        let mut spec = ModelSpec::open(&dir).unwrap();
        context.into_iter().for_each(|tokens| spec.limit_context(tokens).unwrap());
        let mut device = CpuDevice::with_threads(1);
        let weights = Weights::load(&mut device, &checkpoint, &spec, None, &mut |_, _| {}).unwrap();
        Decoder::new(&Model::new(&spec, weights)).plain_logits(&mut device, DType::F32, &tokens).unwrap()
    };
    let worst = |found: &[f32]| found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let short = logits(Some(u32::try_from(described["max_model_len"].as_u64().unwrap()).unwrap()));
    assert!(worst(&short) <= 1e-3, "{}", worst(&short));
    let vocab = expected.len() / prompt.len();
    let best = |row: &[f32]| {
        let (token, _) = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
        u32::try_from(token).unwrap()
    };
    let greedy: Vec<u32> = short.chunks(vocab).skip(prompt.len() - 1).map(best).collect();
    assert_eq!(greedy, continuation);
    // Without a limit, and with one beyond the original context, the long factors give other logits.
    let long = logits(None);
    assert!(worst(&long) > 1.0, "{}", worst(&long));
    assert_eq!(logits(Some(33)), long);
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

/// The golden `name` in a directory of its own, its weights but for routers rounded to bf16. Those for which `wide` holds are
/// stored in f32, the others in bf16.
fn rounded_to_bf16(name: &str, wide: &dyn Fn(&str) -> bool) -> tempfile::TempDir {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(name);
    let bytes = std::fs::read(golden.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let convert = |(name, tensor): (&str, safetensors::tensor::TensorView<'_>)| {
        let (mut values, mut bytes) = (Vec::new(), Vec::new());
        DType::F32.decode(tensor.data(), &mut values);
        DType::BF16.encode(&values, &mut bytes);
        let mut dtype = safetensors::Dtype::BF16;
        if wide(name) {
            dtype = safetensors::Dtype::F32;
            if !is_router(name) {
                values.clear();
                DType::BF16.decode(&bytes, &mut values);
            }
            bytes.clear();
            DType::F32.encode(&values, &mut bytes);
        }
        (name.to_owned(), (dtype, tensor.shape().to_vec(), bytes))
    };
    let names = stored.names();
    let tensors: Vec<_> = names.into_iter().map(|name| convert((name, stored.tensor(name).unwrap()))).collect();
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    std::fs::copy(golden.join("config.json"), dir.path().join("config.json")).unwrap();
    dir
}

fn is_router(name: &str) -> bool {
    name.ends_with("mlp.gate.weight") || name.ends_with("e_score_correction_bias")
}

/// Routers in f32 beside matrices in 16 bits stay in f32: the logits are those of the same numbers, all widened.
#[test]
fn routers_in_f32_are_kept() {
    let tokens: Vec<u32> = (3..40).collect();
    let of = |wide: &dyn Fn(&str) -> bool| {
        let dir = rounded_to_bf16("glm4_moe", wide);
        let (spec, checkpoint) = (ModelSpec::open(dir.path()).unwrap(), Checkpoint::open(dir.path()).unwrap());
        let mut device = CpuDevice::with_threads(1);
        let weights =
            Weights::load(&mut device, &checkpoint, &spec, None, &mut |_, _| {}).map_err(|e| e.to_string())?;
        let logits = Decoder::new(&Model::new(&spec, weights)).plain_logits(&mut device, DType::F32, &tokens);
        Ok::<_, String>(logits.unwrap())
    };
    let kinds: [&dyn Fn(&str) -> bool; 3] = [&|_| true, &is_router, &|_| false];
    let [all, routers, none] = kinds.map(|wide| of(wide).unwrap());
    let worst = |found: &[f32]| found.iter().zip(&all).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let (kept, rounded) = (worst(&routers), worst(&none));
    println!("routers in f32: {kept}, in bf16: {rounded}");
    assert!(kept < 1e-3 && rounded > 10.0 * kept, "{kept} and {rounded}");
    let error = of(&|name| is_router(name) || name.ends_with("0.self_attn.q_proj.weight")).unwrap_err();
    assert!(error.contains("q_proj.weight` has elements of type f32"), "{error}");
}

/// GPT-2's files on the hub leave out a prefix and have masks; a head that repeats the table it is tied to is redundant, and one
/// that differs is refused.
#[test]
fn files_as_published_give_the_same_logits() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/gpt2");
    let tokens: Vec<u32> = (3..40).collect();
    let expected = logits(&golden, &tokens, None);
    let bytes = std::fs::read(golden.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mask = vec![0; 4 * 96 * 96];
    fn view<'a>(shape: &[usize], data: &'a [u8]) -> safetensors::tensor::TensorView<'a> {
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), data).unwrap()
    }
    let write = |dir: &Path, head: &[u8]| {
        let short = |name: &str| name.strip_prefix("transformer.").unwrap().to_owned();
        let mut tensors: Vec<_> = stored.iter().map(|(name, tensor)| (short(name), tensor)).collect();
        tensors.push(("h.0.attn.bias".to_owned(), view(&[1, 1, 96, 96], &mask)));
        tensors.push(("lm_head.weight".to_owned(), view(&[128, 48], head)));
        std::fs::write(dir.join("model.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
        std::fs::copy(golden.join("config.json"), dir.join("config.json")).unwrap();
    };
    let table = stored.tensor("transformer.wte.weight").unwrap();
    let (same, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(same.path(), table.data());
    assert_eq!(logits(same.path(), &tokens, None), expected);
    write(other.path(), &mask[..table.data().len()]);
    let (spec, checkpoint) = (ModelSpec::open(other.path()).unwrap(), Checkpoint::open(other.path()).unwrap());
    let mut device = CpuDevice::with_threads(1);
    let error = Weights::load(&mut device, &checkpoint, &spec, None, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("`lm_head.weight` differs from `wte.weight`") && error.contains("hint:"), "{error}");
}
