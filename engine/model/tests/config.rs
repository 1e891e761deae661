//! Configurations: both spellings, defaults, and refusals with their messages.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_model::{Checkpoint, FAMILIES, GenerationConfig, ModelError, ModelSpec, Rope, RopeScaling};
use lagoon_types::{Alibi, DType};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn base() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "hidden_act": "silu",
    })
}

/// `base` with `changes`; null removes a field.
fn with(changes: Value) -> Result<ModelSpec, ModelError> {
    let mut config = base();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    ModelSpec::parse(Path::new("dir/config.json"), &config.to_string())
}

fn message(changes: Value) -> String {
    with(changes).unwrap_err().to_string()
}

#[test]
fn both_spellings_are_the_same() {
    let scaling = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"});
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(500000.0);
    let old = with(json!({"rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"})).unwrap();
    let new = with(json!({"rope_parameters": parameters, "dtype": "bfloat16"})).unwrap();
    assert_eq!(old, new);
    assert_eq!((old.ropes[0].theta, old.dtype), (500_000.0, Some(DType::BF16)));
    let llama3 =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 8192 };
    assert_eq!(old.ropes[0].scaling, llama3);

    let old = with(json!({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}})).unwrap();
    let new = with(json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000}})).unwrap();
    assert_eq!(old, new);
    let plain = with(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})).unwrap();
    assert_eq!(plain, with(json!({"rope_theta": 1e6, "rope_scaling": null})).unwrap());
    assert!(message(json!({"rope_theta": 2e4, "rope_parameters": {"rope_theta": 1e4}})).contains("`rope_theta`"));
    let both = |factor: f64| {
        let linear = |factor: f64| json!({"rope_type": "linear", "factor": factor});
        with(json!({"rope_scaling": linear(2.0), "rope_parameters": linear(factor)}))
    };
    assert_eq!(both(2.0).unwrap().ropes[0].scaling, RopeScaling::Linear { factor: 2.0 });
    assert!(both(3.0).unwrap_err().to_string().contains("`rope_scaling`"));
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = with(json!({"num_key_value_heads": null, "rms_norm_eps": 1e-6})).unwrap();
    assert_eq!((config.geometry.kv_heads, config.geometry.head_dim), (8, 8));
    assert_eq!(
        (config.ropes[0].theta, &config.ropes[0].scaling, config.window()),
        (10_000.0, &RopeScaling::None, None)
    );
    assert!(config.head.is_some() && config.dtype.is_none() && config.bos_id.is_none());
    assert_eq!(config.final_norm.eps, 1e-6);
    let mistral = json!({"model_type": "mistral", "architectures": null});
    let config = with(mistral.clone()).unwrap();
    assert_eq!((config.family, config.window()), ("mistral", Some(4096)));
    let window = |value: Value| with(json!({"model_type": "mistral", "architectures": null, "sliding_window": value}));
    assert_eq!(window(Value::Null).unwrap().window(), None);
    assert_eq!(window(json!(16)).unwrap().window(), Some(16));
    assert_eq!(with(json!({"head_dim": 32})).unwrap().geometry.head_dim, 32);
    assert_eq!(with(json!({"max_position_embeddings": 1u64 << 40})).unwrap().max_positions, 1 << 21);
    assert_eq!(with(json!({"eos_token_id": [7, 8], "bos_token_id": 1})).unwrap().eos_ids, [7, 8]);
}

/// Qwen2 files always have a window; few use it, and then on the upper layers only.
#[test]
fn qwen2_has_biases_and_a_window_that_is_seldom_used() {
    let of = |use_window: Value| {
        with(json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16,
            "use_sliding_window": use_window, "max_window_layers": 1}))
    };
    let config = of(false.into()).unwrap();
    assert_eq!((config.family, config.window()), ("qwen2", None));
    assert_eq!(of(Value::Null).unwrap().window(), None);
    let used = of(true.into()).unwrap();
    assert_eq!(used.layers.iter().map(|layer| layer.attention.window).collect::<Vec<_>>(), [None, Some(16)]);
    assert_eq!(used.window(), None);
    // A vector of queries, keys and values for each layer.
    let llama = with(json!({})).unwrap();
    let biases = (llama.layers.len() * llama.geometry.qkv_dim()) as u64;
    assert_eq!(config.parameters(), llama.parameters() + biases);
}

#[test]
fn missing_fields_are_named() {
    let required = [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ];
    for field in required {
        let mut config = base();
        config.as_object_mut().unwrap().remove(field);
        let error = ModelSpec::parse(Path::new("dir/config.json"), &config.to_string()).unwrap_err();
        let expected = format!("dir/config.json: the field `{field}` is missing\nhint: ");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let error = message(json!({"rope_scaling": scaling}));
    assert!(error.contains("`rope_scaling.original_max_position_embeddings` is missing"), "{error}");
    assert!(message(json!({"rope_scaling": {"factor": 8.0}})).contains("`rope_scaling.type` is missing"));
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let cases = [
        (json!({"model_type": "rwkv"}), "`model_type` is \"rwkv\""),
        (json!({"architectures": ["LlamaForSequenceClassification"]}), "`architectures` is [\"LlamaForSeq"),
        (json!({"attention_bias": true}), "`attention_bias` is true"),
        (json!({"mlp_bias": true}), "`mlp_bias` is true"),
        (json!({"hidden_act": "gelu"}), "`hidden_act` is \"gelu\""),
        (json!({"quantization_config": {"bits": 4}}), "`quantization_config` is {\"bits\":4}"),
        (json!({"torch_dtype": "float8_e4m3fn"}), "`torch_dtype` is \"float8_e4m3fn\""),
        (json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "`rope_scaling.type` is \"dynamic\""),
        (json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` is 0.5"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}), "`rope_parameters.full_attention` is {"),
    ];
    for (change, expected) in cases {
        let error = with(change).unwrap_err();
        assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("dir/config.json: the field ") && text.contains("\nhint: "), "{text}");
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn impossible_values_are_refused() {
    let cases = [
        (json!({"hidden_size": 0}), "`hidden_size` is 0"),
        (json!({"hidden_size": -64}), "`hidden_size` is -64"),
        (json!({"hidden_size": "64"}), "`hidden_size` is \"64\""),
        (json!({"hidden_size": 1u64 << 40}), "`hidden_size` is 1099511627776"),
        (json!({"vocab_size": 1u64 << 30}), "`vocab_size`"),
        (json!({"num_hidden_layers": 1_000_000}), "`num_hidden_layers`"),
        (json!({"num_attention_heads": 8.5}), "`num_attention_heads`"),
        (json!({"num_key_value_heads": 3}), "`num_key_value_heads` is 3"),
        (json!({"num_attention_heads": 7, "num_key_value_heads": 7}), "`hidden_size` is 64"),
        (json!({"head_dim": 7}), "`head_dim` is 7"),
        (json!({"rms_norm_eps": 0.0}), "`rms_norm_eps` is 0.0"),
        (json!({"rms_norm_eps": 1e-60}), "`rms_norm_eps`"),
        (json!({"rope_theta": -1.0}), "`rope_theta` is -1.0"),
        (json!({"tie_word_embeddings": 1}), "`tie_word_embeddings` is 1"),
        (json!({"eos_token_id": [1, "x"]}), "`eos_token_id`"),
        (json!({"rope_scaling": 3}), "`rope_scaling` is 3"),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                "original_max_position_embeddings": 8}}),
            "`rope_scaling.high_freq_factor` is 4",
        ),
    ];
    for (change, expected) in cases {
        let error = with(change).unwrap_err();
        assert!(matches!(error, ModelError::InvalidField { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let parse = |text: &str| ModelSpec::parse(Path::new("config.json"), text).unwrap_err();
    assert!(matches!(parse("{\"hidden_size\": 64"), ModelError::Malformed { .. }));
    assert!(matches!(parse("[]"), ModelError::Malformed { .. }));
    assert!(matches!(parse(""), ModelError::Malformed { .. }));
    let missing = ModelSpec::open(Path::new("/nonexistent")).unwrap_err().to_string();
    assert!(missing.starts_with("cannot read /nonexistent/config.json: "), "{missing}");
}

/// The formulas of Llama 3.1's frequencies in f64, from their description: wavelengths over the long bound are
/// stretched, those under the short one kept, and the rest interpolated linearly in `original / wavelength`.
#[test]
fn llama3_frequencies_match_the_formula() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let config = with(json!({"head_dim": 128, "rope_theta": 500000.0, "rope_scaling": scaling})).unwrap();
    let rope = Rope::new(&config.ropes[0], config.geometry.head_dim);
    assert_eq!(rope.inv_freq().len(), 64);
    let (mut kept, mut stretched, mut blended) = (0, 0, 0);
    for (i, &found) in rope.inv_freq().iter().enumerate() {
        let plain = 500_000f64.powf(-2.0 * i as f64 / 128.0);
        let turns = 8192.0 * plain / std::f64::consts::TAU;
        let expected = if turns < 1.0 {
            stretched += 1;
            plain / 8.0
        } else if turns > 4.0 {
            kept += 1;
            plain
        } else {
            blended += 1;
            let share = (turns - 1.0) / 3.0;
            plain * (share + (1.0 - share) / 8.0)
        };
        assert!((f64::from(found) / expected - 1.0).abs() < 1e-6, "{i}: {found} against {expected}");
    }
    assert!(kept > 20 && stretched > 20 && blended > 3, "{kept} {stretched} {blended}");
}

/// Long divisors if the file claims more positions than its original context, else short ones; `su` is the old name.
#[test]
fn longrope_divides_each_frequency_by_its_own_number() {
    let (short, long): (Vec<f64>, Vec<f64>) = (0..32).map(|i| (1.0 + f64::from(i), 2.0 + f64::from(i))).unzip();
    let object = json!({"type": "su", "short_factor": short, "long_factor": long});
    let of = |positions: u32, more: Value| {
        let mut object = object.clone();
        more.as_object().unwrap().iter().for_each(|(name, value)| object[name] = value.clone());
        with(json!({"head_dim": 64, "max_position_embeddings": positions, "original_max_position_embeddings": 4096,
            "rope_scaling": object}))
    };
    for (positions, list, factor) in [(4096, &short, 1.0), (131_072, &long, (1.0 + 5.0 / 12.0f64).sqrt())] {
        let rope = Rope::new(&of(positions, json!({})).unwrap().ropes[0], 64);
        for (i, &found) in rope.inv_freq().iter().enumerate() {
            let expected = 10_000f64.powf(-2.0 * i as f64 / 64.0) / list[i];
            assert!((f64::from(found) / expected - 1.0).abs() < 3e-7, "{i}: {found} against {expected}");
        }
        let mut table = Vec::new();
        rope.fill(&[0], &mut table);
        assert!((f64::from(table[0]) / factor - 1.0).abs() < 1e-6, "{} against {factor}", table[0]);
    }
    let factor = |more: Value| match of(131_072, more).unwrap().ropes.remove(0).scaling {
        RopeScaling::LongRope(long) => long.attention_factor,
        other => panic!("{other:?}"),
    };
    assert_eq!(factor(json!({"attention_factor": 1.25})), 1.25);
    assert_eq!(factor(json!({"factor": 4096.0})), 2f64.sqrt());

    // A limit within the original context chooses the short list, and one beyond it the long one; the factor is the file's.
    let limited = |positions: u32, limit: u32| {
        let mut spec = of(positions, json!({})).unwrap();
        spec.limit_context(limit).unwrap();
        assert_eq!(spec.max_positions, limit);
        spec.ropes.remove(0)
    };
    let (whole, grown) = (of(131_072, json!({})).unwrap().ropes.remove(0), (1.0 + 5.0 / 12.0f64).sqrt());
    assert_eq!(limited(131_072, 4097), whole);
    for limit in [1, 4096] {
        let rope = Rope::new(&limited(131_072, limit), 64);
        for (i, &found) in rope.inv_freq().iter().enumerate() {
            let expected = 10_000f64.powf(-2.0 * i as f64 / 64.0) / short[i];
            assert!((f64::from(found) / expected - 1.0).abs() < 3e-7, "{i}: {found} against {expected}");
        }
        let mut table = Vec::new();
        rope.fill(&[0], &mut table);
        assert!((f64::from(table[0]) / grown - 1.0).abs() < 1e-6, "{} against {grown}", table[0]);
    }

    let message = |more: Value| of(8192, more).unwrap_err().to_string();
    let error = message(json!({"long_factor": [1.0, 2.0]}));
    assert!(error.contains("`rope_scaling.long_factor` is [1.0,2.0]") && error.contains("a list of 32"), "{error}");
    for bad in [json!(0.0), json!(-1.0), json!(1e300), json!("1"), Value::Null] {
        let mut list = json!(short);
        list[7] = bad;
        let error = message(json!({"short_factor": list}));
        assert!(error.contains("`rope_scaling.short_factor` is [") && error.contains("above zero"), "{error}");
    }
    assert!(message(json!({"short_factor": null})).contains("`rope_scaling.short_factor` is missing"));
    let error = with(json!({"head_dim": 64, "rope_scaling": object})).unwrap_err().to_string();
    assert!(error.contains("`rope_scaling.original_max_position_embeddings` is missing"), "{error}");
}

#[test]
fn a_context_is_limited_to_what_the_model_has() {
    let mut spec = with(json!({})).unwrap();
    let whole = spec.clone();
    for asked in [0, 4097, u32::MAX] {
        let error = spec.limit_context(asked).unwrap_err().to_string();
        let expected =
            format!("a context of {asked} tokens was asked for, and the model's has 4096\nhint: lower --max-model-len");
        assert!(error.starts_with(&expected), "{error}");
        assert_eq!(spec, whole);
    }
    spec.limit_context(64).unwrap();
    assert_eq!(spec, ModelSpec { max_positions: 64, ..whole });
}

#[test]
fn linear_frequencies_and_the_table() {
    let of = |changes| Rope::new(&with(changes).unwrap().ropes[0], 64);
    let plain = of(json!({"head_dim": 64}));
    let linear = of(json!({"head_dim": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}));
    for (i, (&a, &b)) in plain.inv_freq().iter().zip(linear.inv_freq()).enumerate() {
        assert!((f64::from(a) / 10_000f64.powf(-2.0 * i as f64 / 64.0) - 1.0).abs() < 2e-7);
        assert_eq!(b, a / 4.0);
    }
    let positions = [0, 1, 77_777, (1 << 21) - 1];
    let mut table = vec![9.0; 3];
    plain.fill(&positions, &mut table);
    assert_eq!(table.len(), 4 * 64);
    assert!(table[..32].iter().all(|c| *c == 1.0) && table[32..64].iter().all(|s| *s == 0.0));
    for (row, position) in table.chunks(64).zip(positions) {
        for j in 0..32 {
            // The angle is the f32 product; its cosine and sine are right to f32's last place.
            let angle = f64::from(position as f32 * plain.inv_freq()[j]);
            assert!((f64::from(row[j]) - angle.cos()).abs() < 1.2e-7, "cosine {j} at {position}");
            assert!((f64::from(row[32 + j]) - angle.sin()).abs() < 1.2e-7, "sine {j} at {position}");
        }
    }
    let capacity = table.capacity();
    plain.fill(&positions[..2], &mut table);
    assert_eq!((table.len(), table.capacity()), (2 * 64, capacity));
}

#[test]
fn generation_defaults_are_merged() {
    let config = with(json!({"eos_token_id": 5, "bos_token_id": 4})).unwrap();
    let parse = |text: &str| GenerationConfig::parse(Path::new("generation_config.json"), text, &config);
    let merged = parse(r#"{"eos_token_id": [9, 7, 9], "temperature": 0.6, "top_p": 0.9, "top_k": 50}"#).unwrap();
    assert_eq!((merged.eos_ids, merged.bos_id), (vec![7, 9], Some(4)));
    assert_eq!((merged.temperature, merged.top_p, merged.top_k, merged.min_p), (Some(0.6), Some(0.9), Some(50), None));
    let empty = parse("{}").unwrap();
    assert_eq!((empty.eos_ids.as_slice(), empty.do_sample), ([5].as_slice(), None));
    assert_eq!(parse(r#"{"top_k": -1}"#).unwrap().top_k, Some(0));
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(GenerationConfig::open(dir.path(), &config).unwrap().eos_ids, [5]);
    for bad in [r#"{"eos_token_id": 100}"#, r#"{"top_p": 2}"#, r#"{"temperature": -1}"#, r#"{"top_k": 0.5}"#, "3"] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

fn mpt() -> Value {
    json!({
        "model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": 48, "n_heads": 6, "n_layers": 2,
        "max_seq_len": 2048, "vocab_size": 100, "no_bias": true, "norm_type": "low_precision_layernorm",
        "expansion_ratio": 4, "logit_scale": null, "learned_pos_emb": true, "torch_dtype": "bfloat16",
        "attn_config": {"alibi": true, "alibi_bias_max": 8, "attn_type": "multihead_attention", "clip_qkv": null,
            "prefix_lm": false, "qk_ln": false, "softmax_scale": null, "attn_uses_sequence_id": false},
    })
}

/// `mpt` with changes of its own fields and of those of `attn_config`.
fn mpt_with(own: Value, attention: Value) -> Result<ModelSpec, ModelError> {
    let mut config = mpt();
    for (field, value) in own.as_object().unwrap() {
        config[field] = value.clone();
    }
    for (field, value) in attention.as_object().unwrap() {
        config["attn_config"][field] = value.clone();
    }
    ModelSpec::parse(Path::new("dir/config.json"), &config.to_string())
}

#[test]
fn mpt_is_read_by_the_names_and_defaults_of_its_authors() {
    let config = mpt_with(json!({}), json!({})).unwrap();
    assert_eq!((config.family, config.hidden, config.widest(), config.layers.len()), ("mpt", 48, 192, 2));
    let geometry = config.geometry;
    assert_eq!((geometry.heads, geometry.kv_heads, geometry.head_dim), (6, 6, 8));
    assert_eq!((config.final_norm.eps, config.max_positions, config.window()), (1e-5, 2048, None));
    assert!(config.head.is_none() && config.dtype == Some(DType::BF16));
    assert_eq!(config.alibi, Some(Alibi { bias_max: 8.0 }));
    assert!(
        Rope::new(&config.ropes[0], config.geometry.head_dim).inv_freq().iter().all(|f| *f == 0.0),
        "nothing is rotated"
    );
    // Embeddings, final norm, and in each layer two norms, the fused projection, its output, and two of the MLP.
    assert_eq!(config.parameters(), 100 * 48 + 48 + 2 * (2 * 48 + 4 * 48 * 48 + 2 * 48 * 192));

    let other = mpt_with(json!({"layer_norm_epsilon": 1e-6}), json!({"alibi_bias_max": 16.5, "clip_qkv": 0})).unwrap();
    assert_eq!((other.final_norm.eps, other.alibi), (1e-6, Some(Alibi { bias_max: 16.5 })));
    let whole = mpt_with(json!({"expansion_ratio": 4.0}), json!({"kv_n_heads": 6, "sliding_window_size": -1})).unwrap();
    assert_eq!(whole, config);
    let mut plain = mpt();
    plain.as_object_mut().unwrap().remove("attn_config");
    assert_eq!(ModelSpec::parse(Path::new("config.json"), &plain.to_string()).unwrap(), config);
    assert_eq!(with(json!({})).unwrap().alibi, None);
}

#[test]
fn what_would_change_an_mpt_is_refused_by_name() {
    let own = [
        (json!({"no_bias": false}), "`no_bias` is false"),
        (json!({"expansion_ratio": 2}), "`expansion_ratio` is 2"),
        (json!({"logit_scale": 0.5}), "`logit_scale` is 0.5"),
        (json!({"norm_type": "rmsnorm"}), "`norm_type` is \"rmsnorm\""),
        (json!({"architectures": ["LlamaForCausalLM"]}), "`architectures` is"),
        (json!({"quantization_config": {"bits": 4}}), "`quantization_config` is"),
    ];
    let attention = [
        (json!({"alibi": false}), "`attn_config.alibi` is false"),
        (json!({"attn_type": "multiquery_attention"}), "`attn_config.attn_type` is \"multiquery"),
        (json!({"clip_qkv": 6.0}), "`attn_config.clip_qkv` is 6.0"),
        (json!({"softmax_scale": 0.1}), "`attn_config.softmax_scale` is 0.1"),
        (json!({"qk_ln": true}), "`attn_config.qk_ln` is true"),
        (json!({"prefix_lm": true}), "`attn_config.prefix_lm` is true"),
        (json!({"kv_n_heads": 2}), "`attn_config.kv_n_heads` is 2"),
        (json!({"rope": true}), "`attn_config.rope` is true"),
        (json!({"sliding_window_size": 128}), "`attn_config.sliding_window_size` is 128"),
    ];
    let own = own.map(|(change, expected)| (mpt_with(change, json!({})), expected));
    let attention = attention.map(|(change, expected)| (mpt_with(json!({}), change), expected));
    for (result, expected) in own.into_iter().chain(attention) {
        let error = result.unwrap_err();
        assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(expected) && error.to_string().contains("\nhint: "), "{error}");
    }
    let invalid = [
        (mpt_with(json!({"n_heads": 5}), json!({})), "`d_model` is 48"),
        (mpt_with(json!({"n_heads": 16}), json!({})), "`d_model` is 48"),
        (mpt_with(json!({"layer_norm_epsilon": 1e-60}), json!({})), "`layer_norm_epsilon`"),
        (mpt_with(json!({"attn_config": 3}), json!({})), "`attn_config` is 3"),
        (mpt_with(json!({}), json!({"alibi_bias_max": 0})), "`attn_config.alibi_bias_max` is 0"),
        (mpt_with(json!({}), json!({"alibi_bias_max": -8})), "`attn_config.alibi_bias_max` is -8"),
    ];
    for (result, expected) in invalid {
        let error = result.unwrap_err();
        assert!(matches!(error, ModelError::InvalidField { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    for field in ["d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size"] {
        let error = mpt_with(json!({field: null}), json!({})).unwrap_err().to_string();
        assert!(error.contains(&format!("the field `{field}` is missing")), "{error}");
    }
}

#[test]
fn every_golden_model_opens() {
    for (name, dir) in goldens() {
        let config = ModelSpec::open(&dir).unwrap();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let stored: u64 = checkpoint.tensors().map(|(_, info)| info.len() as u64).sum();
        let size = checkpoint.dtype().unwrap().size() as u64;
        assert_eq!(stored, config.parameters() * size, "{name}");
    }
}

/// Goldens with a model, by name.
fn goldens() -> BTreeMap<String, PathBuf> {
    let all = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
    let dirs = std::fs::read_dir(all).unwrap().map(|entry| entry.unwrap().path());
    let models = dirs.filter(|dir| dir.join("config.json").exists());
    models.map(|dir| (dir.file_name().unwrap().to_str().unwrap().to_owned(), dir)).collect()
}

/// Each family has a golden of its own `model_type`, and each golden a family that names it.
#[test]
fn every_family_names_its_goldens() {
    let mut named = BTreeMap::new();
    for family in FAMILIES {
        assert!(!family.goldens.is_empty(), "{} has no golden", family.model_type);
        for name in family.goldens {
            let other = named.insert((*name).to_owned(), family.model_type);
            assert_eq!(other, None, "{name} is named twice");
        }
    }
    let found: BTreeMap<String, String> = goldens().into_iter().map(|(name, dir)| (name, model_type(&dir))).collect();
    let named: BTreeMap<String, String> = named.into_iter().map(|(name, of)| (name, of.to_owned())).collect();
    assert_eq!(named, found);
}

fn model_type(dir: &Path) -> String {
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    config["model_type"].as_str().unwrap().to_owned()
}
