//! Checkpoints: loading, zero-copy and converted, and each way in which files can be wrong.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{RecordingDevice, open, tensors, write, write_config};
use lagoon_backend::WeightPart;
use lagoon_model::weights::{DenseWeights, HeadWeights, MlpWeights, ProjectionWeights};
use lagoon_model::{Checkpoint, ModelError, ModelSpec, Weights, model_hash};
use lagoon_types::DType;
use std::collections::BTreeMap;
use std::path::Path;

fn load(dir: &Path, dtype: Option<DType>) -> Result<Weights<RecordingDevice>, ModelError> {
    let (config, checkpoint) = open(dir)?;
    Weights::load(&mut RecordingDevice, &checkpoint, &config, dtype, &mut |_, _| {})
}

fn message(dir: &Path) -> String {
    load(dir, None).unwrap_err().to_string()
}

#[test]
fn weights_are_stacked_and_not_copied() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), true);
    let written = tensors(DType::F16, true);
    write(dir.path(), "model.safetensors", &written);
    let (config, checkpoint) = open(dir.path()).unwrap();
    let mut calls = Vec::new();
    let progress = &mut |done, total| calls.push((done, total));
    let weights = Weights::load(&mut RecordingDevice, &checkpoint, &config, None, progress).unwrap();
    assert_eq!((weights.dtype, weights.layers.len(), weights.head.is_none()), (DType::F16, 2, true));
    let total = config.parameters() * 2;
    assert_eq!(weights.bytes, total);
    assert_eq!(calls.last(), Some(&(total, total)));
    assert!(calls.windows(2).all(|pair| pair[0].0 < pair[1].0));

    let ProjectionWeights::Heads(HeadWeights { qkv, .. }) = &weights.layers[1].projection else { panic!("heads") };
    assert_eq!(qkv.cols, 16);
    let names = ["q_proj", "k_proj", "v_proj"].map(|name| format!("model.layers.1.self_attn.{name}.weight"));
    for (WeightPart { rows, bytes, .. }, name) in qkv.parts.iter().zip(&names) {
        assert_eq!(bytes, &written[name].1);
        assert_eq!(*rows, written[name].0[0]);
        // The very bytes of the map: opening the tensor again gives the same address.
        let again = checkpoint.tensor(name, &written[name].0).unwrap().bytes;
        assert_eq!(bytes.as_ptr(), again.as_ptr());
    }
    let MlpWeights::Dense(DenseWeights { up: gate_up, .. }) = &weights.layers[0].mlp else { panic!("a dense layer") };
    assert_eq!(gate_up.parts.iter().map(|part| part.rows).collect::<Vec<_>>(), [24, 24]);
    assert_eq!((weights.final_norm.weight.rows(), weights.final_norm.weight.cols), (1, 16));
    assert_eq!((weights.output().rows(), weights.output().cols), (10, 16));
}

#[test]
fn weights_outlive_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), false);
    let written = tensors(DType::F32, false);
    write(dir.path(), "model.safetensors", &written);
    let weights = load(dir.path(), None).unwrap();
    drop(dir);
    assert_eq!(&weights.head.unwrap().parts[0].bytes, &written["lm_head.weight"].1);
}

#[test]
fn shards_are_read_through_the_index_and_hash_differently() {
    let (one, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let written = tensors(DType::BF16, false);
    write_config(one.path(), false);
    write(one.path(), "model.safetensors", &written);
    write_config(many.path(), false);
    common::write_sharded(many.path(), &written, 3);
    let (a, b) = (load(one.path(), None).unwrap(), load(many.path(), None).unwrap());
    let down = |weights: &Weights<RecordingDevice>| match &weights.layers[1].mlp {
        MlpWeights::Dense(dense) => dense.down.parts.clone(),
        MlpWeights::Experts(_) => panic!("a dense layer"),
    };
    assert_eq!(down(&a), down(&b));
    assert_eq!(a.embed.parts, b.embed.parts);
    let hash = |dir: &Path| {
        let (config, checkpoint) = open(dir).unwrap();
        model_hash(&config, &checkpoint, None)
    };
    assert_ne!(hash(one.path()), hash(many.path()));
}

/// A kv node may take the hash from a peer; the biases are also part of the pool's shape.
#[test]
fn the_hash_tells_the_biases() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/mpt");
    let (config, checkpoint) = open(&golden).unwrap();
    let mut other = config.clone();
    other.alibi.as_mut().unwrap().bias_max = 16.0;
    assert_ne!(model_hash(&config, &checkpoint, None), model_hash(&other, &checkpoint, None));
}

/// Creditors attend with the cap of their own model: one with another cap has another hash.
#[test]
fn the_hash_tells_the_soft_caps() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/gemma2");
    let (config, checkpoint) = open(&golden).unwrap();
    let hash = |spec: &ModelSpec| model_hash(spec, &checkpoint, None);
    for cap in [None, Some(50.0)] {
        assert_ne!(hash(&config), hash(&ModelSpec { attention_softcap: cap, ..config.clone() }));
        assert_ne!(hash(&config), hash(&ModelSpec { logits_softcap: cap, ..config.clone() }));
    }
}

/// The longest sequence of an instance does not change its KV, unless LongRoPE has other factors for it.
#[test]
fn the_hash_tells_the_rotary_tables_and_not_the_context() {
    let hashes = |name: &str, limits: &[u32]| {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(name);
        let (config, checkpoint) = open(&golden).unwrap();
        let limited = |&limit: &u32| {
            let mut spec = config.clone();
            spec.limit_context(limit).unwrap();
            model_hash(&spec, &checkpoint, None)
        };
        (model_hash(&config, &checkpoint, None), limits.iter().map(limited).collect::<Vec<_>>())
    };
    let (whole, limited) = hashes("phi3_longrope", &[256, 33, 32, 8]);
    assert_eq!(limited[..2], [whole, whole]);
    assert!(limited[2] == limited[3] && limited[2] != whole);
    let (whole, limited) = hashes("qwen3", &[64, 8]);
    assert_eq!(limited, [whole, whole]);
}

/// MPT's fused projection is one tensor with the rows of q, k and v in the order in which Llama's are stacked.
#[test]
fn an_mpt_loads_by_its_own_names() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/mpt");
    let weights = load(&golden, None).unwrap();
    let parts = |weight: &lagoon_backend::WeightSource| weight.parts.iter().map(|part| part.rows).collect::<Vec<_>>();
    let layer = &weights.layers[0];
    let MlpWeights::Dense(mlp) = &layer.mlp else { panic!("a dense layer") };
    let ProjectionWeights::Heads(heads) = &layer.projection else { panic!("heads") };
    assert_eq!((parts(&heads.qkv), parts(&mlp.up), parts(&mlp.down)), (vec![144], vec![192], vec![48]));
    assert!(weights.head.is_none());
}

#[test]
fn conversion_rounds_to_nearest_even() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), false);
    let written = tensors(DType::F32, false);
    write(dir.path(), "model.safetensors", &written);
    let weights = load(dir.path(), Some(DType::BF16)).unwrap();
    assert_eq!(weights.dtype, DType::BF16);
    let (mut wide, mut expected) = (Vec::new(), Vec::new());
    DType::F32.decode(&written["model.norm.weight"].1, &mut wide);
    for value in wide {
        expected.extend_from_slice(&half::bf16::from_f32(value).to_le_bytes());
    }
    assert_eq!(weights.final_norm.weight.parts[0].bytes, expected);
    assert_eq!(weights.embed.dtype().unwrap(), DType::BF16);
}

#[test]
fn mixed_types_are_refused_unless_converted() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), true);
    let mut written: BTreeMap<_, _> = tensors(DType::BF16, true);
    let wide = |name: &str| tensors(DType::F32, true).remove(name).unwrap();
    let norm = "model.layers.0.input_layernorm.weight";
    written.insert(norm.to_owned(), wide(norm));
    write(dir.path(), "model.safetensors", &written);
    // A vector in f32 is converted unasked, as transformers does.
    assert_eq!(
        load(dir.path(), None).unwrap().layers[0].attention_norm.as_ref().unwrap().weight.dtype().unwrap(),
        DType::BF16
    );
    let down = "model.layers.0.mlp.up_proj.weight";
    written.insert(down.to_owned(), wide(down));
    write(dir.path(), "model.safetensors", &written);
    let error = message(dir.path());
    let expected = "`model.layers.0.mlp.up_proj.weight` has elements of type f32, others have bf16\nhint: ";
    assert!(error.contains(expected), "{error}");
    assert_eq!(load(dir.path(), Some(DType::F16)).unwrap().dtype, DType::F16);
}

/// A checkpoint with one change, and its expected error message.
fn broken(change: impl FnOnce(&mut common::Tensors), expected: &str) {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), false);
    let mut written = tensors(DType::F16, false);
    change(&mut written);
    write(dir.path(), "model.safetensors", &written);
    let error = message(dir.path());
    assert!(error.contains("model.safetensors: the tensor `") && error.contains(expected), "{error}");
}

#[test]
fn wrong_tensors_are_named() {
    let q = "model.layers.1.self_attn.q_proj.weight";
    broken(|t| drop(t.remove(q)), "`model.layers.1.self_attn.q_proj.weight` is missing");
    broken(|t| drop(t.remove("lm_head.weight")), "`lm_head.weight` is missing");
    broken(
        |t| t.get_mut(q).unwrap().0 = vec![8, 32],
        "`model.layers.1.self_attn.q_proj.weight` has the shape [8, 32]; the configuration says [16, 16]",
    );
    broken(
        |t| t.get_mut("model.norm.weight").unwrap().2 = safetensors::Dtype::I16,
        "`model.norm.weight` has elements of type I16; supported are F32, F16 and BF16",
    );
    let bias = "model.layers.0.self_attn.q_proj.bias";
    let copy = |t: &mut common::Tensors, name: &str| {
        let norm = t["model.norm.weight"].clone();
        t.insert(name.to_owned(), norm);
    };
    broken(
        |t| copy(t, bias),
        "`model.layers.0.self_attn.q_proj.bias` has no place in a llama model of 2 layers\nhint: ",
    );
    broken(
        |t| copy(t, "model.layers.2.input_layernorm.weight"),
        "`model.layers.2.input_layernorm.weight` has no place",
    );
    // Redundant tensors of old files are ignored.
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), false);
    let mut written = tensors(DType::F16, false);
    copy(&mut written, "model.layers.0.self_attn.rotary_emb.inv_freq");
    write(dir.path(), "model.safetensors", &written);
    load(dir.path(), None).unwrap();
}

/// Numbers of config.json that contradict the tensors of the same folder: the tensor is named, with both shapes.
#[test]
fn numbers_that_contradict_tensors_name_the_tensor() {
    let attention = "model.layers.0.self_attn";
    let cases = [
        ("qwen3", "head_dim", 32, format!("{attention}.q_proj.weight"), "[96, 48]", "[128, 48]"),
        ("qwen3", "vocab_size", 141, "model.embed_tokens.weight".to_owned(), "[140, 48]", "[141, 48]"),
        ("gemma2", "num_key_value_heads", 1, format!("{attention}.k_proj.weight"), "[32, 48]", "[16, 48]"),
        ("phi3", "num_key_value_heads", 3, format!("{attention}.qkv_proj.weight"), "[80, 48]", "[144, 48]"),
        ("deepseek_v3", "kv_lora_rank", 26, format!("{attention}.kv_a_proj_with_mqa.weight"), "[32, 48]", "[34, 48]"),
        ("deepseek_v3", "qk_nope_head_dim", 14, format!("{attention}.q_b_proj.weight"), "[80, 20]", "[88, 20]"),
        ("mixtral", "num_local_experts", 5, "block_sparse_moe.gate.weight".to_owned(), "[4, 48]", "[5, 48]"),
        ("gpt_oss", "num_local_experts", 4, "mlp.router.weight".to_owned(), "[5, 48]", "[4, 48]"),
        ("gpt_neox", "intermediate_size", 64, "mlp.dense_h_to_4h.weight".to_owned(), "[96, 64]", "[64, 64]"),
        ("gpt2", "n_positions", 128, "transformer.wpe.weight".to_owned(), "[96, 48]", "[128, 48]"),
        ("bloom", "hidden_size", 48, "transformer.word_embeddings.weight".to_owned(), "[134, 60]", "[134, 48]"),
    ];
    for (name, field, number, tensor, stored, expected) in cases {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(name);
        let mut config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
        config[field] = number.into();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        std::fs::copy(golden.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let error = message(dir.path());
        let shapes = format!("{tensor}` has the shape {stored}; the configuration says {expected}");
        assert!(
            error.contains("model.safetensors: the tensor `") && error.contains(&shapes),
            "{name}, {field}: {error}"
        );
    }
}

#[test]
fn damaged_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), false);
    let path = dir.path().join("model.safetensors");
    let written = tensors(DType::F16, false);
    write(dir.path(), "model.safetensors", &written);
    let whole = std::fs::read(&path).unwrap();
    let header = usize::try_from(u64::from_le_bytes(whole[..8].try_into().unwrap())).unwrap();
    let open_with = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Checkpoint::open(dir.path()).map(drop)
    };
    // Cut anywhere: no length, in the header, in the data.
    let cuts = [0, 1, 7, 8, 9, 8 + header / 2, 8 + header, whole.len() / 2, whole.len() - 1];
    for cut in cuts {
        let error = open_with(&whole[..cut]).unwrap_err();
        assert!(matches!(error, ModelError::Malformed { .. }), "cut at {cut}: {error}");
        assert!(error.to_string().contains("may be truncated or corrupt"), "{error}");
    }
    open_with(&[whole.as_slice(), b"x"].concat()).unwrap_err();
    for length in [u64::MAX, u64::MAX - 7, 1 << 40, 0, 2] {
        let mut bytes = whole.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        open_with(&bytes).unwrap_err();
    }
    // One byte of the header changed: an error or another valid header, never a panic.
    for at in (8..8 + header).step_by(29) {
        for value in [0, b'9', b'"', 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let _ = open_with(&bytes);
        }
    }
    let text = |json: &str| [&(json.len() as u64).to_le_bytes(), json.as_bytes(), &[0; 8]].concat();
    for json in [
        "{}",
        "[]",
        r#"{"a":{"dtype":"F16","shape":[4],"data_offsets":[0,16]}}"#,
        r#"{"a":{"dtype":"F16","shape":[4],"data_offsets":[8,16]}}"#,
        r#"{"a":{"dtype":"F16","shape":[4],"data_offsets":[8,0]}}"#,
        r#"{"a":{"dtype":"F16","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"X9","shape":[4],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F16","shape":[4],"data_offsets":[0,8]},"b":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}}"#,
    ] {
        open_with(&text(json)).unwrap_err();
    }
    open_with(&text(r#"{"a":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}}"#)).unwrap();
}

#[test]
fn damaged_indices_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), false);
    common::write_sharded(dir.path(), &tensors(DType::F16, false), 2);
    let index = dir.path().join("model.safetensors.index.json");
    let good: serde_json::Value = serde_json::from_slice(&std::fs::read(&index).unwrap()).unwrap();
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = good.clone();
        change(&mut json);
        std::fs::write(&index, json.to_string()).unwrap();
        message(dir.path())
    };
    let norm = "model.norm.weight";
    let file = |name: &'static str| move |json: &mut serde_json::Value| json["weight_map"][norm] = name.into();
    assert!(with(&file("../model.safetensors")).contains("must be a plain file name"));
    assert!(with(&file("/etc/passwd")).contains("must be a plain file name"));
    assert!(with(&file("model-00009-of-00002.safetensors")).starts_with("cannot read "));
    let other = |json: &mut serde_json::Value| {
        let map = json["weight_map"].as_object().unwrap();
        let elsewhere = map.values().find(|file| **file != map[norm]).unwrap().clone();
        json["weight_map"][norm] = elsewhere;
    };
    assert!(with(&other).contains("`model.norm.weight` is missing, though the index lists it"));
    let gone = |json: &mut serde_json::Value| drop(json["weight_map"].as_object_mut().unwrap().shift_remove(norm));
    assert!(with(&gone).contains("`model.norm.weight` is missing"));
    assert!(with(&|json| json["weight_map"] = 3.into()).contains("`weight_map` is 3"));
    assert!(with(&|json| *json = serde_json::json!({})).contains("`weight_map` is missing"));
    let empty = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(empty.path()).unwrap_err().to_string();
    assert!(error.contains("neither model.safetensors nor") && error.contains("\nhint: "), "{error}");
}
