//! Families beyond Llama's: what their configurations refuse by name, and what they make of a model.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_backend::{GroupScore, Routing, Scoring};
use lagoon_model::spec::Mlp;
use lagoon_model::{FAMILIES, ModelError, ModelSpec};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(name)
}

/// A golden's configuration with changes; null removes a field.
fn with(name: &str, changes: &Value) -> Result<ModelSpec, ModelError> {
    let mut config: Value = serde_json::from_slice(&std::fs::read(golden(name).join("config.json")).unwrap()).unwrap();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    ModelSpec::parse(Path::new("dir/config.json"), &config.to_string())
}

#[test]
fn what_would_change_a_family_is_refused_by_name() {
    let cases = [
        ("qwen3", json!({"attention_bias": true}), "`attention_bias` is true"),
        (
            "phi3",
            json!({"rope_parameters": null, "rope_scaling": {"type": "linear", "factor": 2}}),
            "`rope_scaling` is",
        ),
        ("qwen3_moe", json!({"use_sliding_window": true}), "`use_sliding_window` is true"),
        ("qwen3", json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` is 0.5"),
        ("qwen3_moe", json!({"hidden_act": "gelu"}), "`hidden_act` is \"gelu\""),
        ("gpt_oss", json!({"swiglu_limit": 8.0}), "`swiglu_limit` is 8.0"),
        ("gpt_oss", json!({"swiglu_alpha": 1.5}), "`swiglu_alpha` is 1.5"),
        ("gpt_oss", json!({"attention_bias": false}), "`attention_bias` is false"),
        ("gpt_oss", json!({"quantization_config": {"quant_method": "mxfp8"}}), "`quantization_config.quant_method` is"),
        ("gpt_oss", json!({"layer_types": ["chunked_attention", "full_attention"]}), "`layer_types` is"),
        ("gemma3", json!({"final_logit_softcapping": 30.0}), "`final_logit_softcapping` is 30.0"),
        ("gemma2", json!({"hidden_activation": "gelu"}), "`hidden_activation` is \"gelu\""),
        ("gemma3", json!({"model_type": "gemma3"}), "`model_type` is \"gemma3\""),
        ("gemma3", json!({"use_bidirectional_attention": true}), "`use_bidirectional_attention` is true"),
        ("minimax_m2", json!({"scoring_func": "softmax"}), "`scoring_func` is \"softmax\""),
        ("minimax_m2", json!({"attn_type_list": [1, 0]}), "`attn_type_list` is [1,0]"),
        ("minimax_m2", json!({"use_qk_norm": false}), "`use_qk_norm` is false"),
        ("phi3", json!({"full_attn_mod": 2}), "`full_attn_mod` is 2"),
        ("phi3_longrope", json!({"rope_scaling": {"type": "yarn", "factor": 2}}), "`rope_scaling` is"),
        ("deepseek_v2", json!({"topk_method": "noaux_tc"}), "`topk_method` is \"noaux_tc\""),
        ("deepseek_v2", json!({"n_group": 4}), "`n_group` is 4"),
        ("deepseek_v2", json!({"topk_group": 2}), "`topk_group` is 2"),
        ("deepseek_v2", json!({"mlp_bias": true}), "`mlp_bias` is true"),
        ("deepseek_v2", json!({"norm_topk_prob": true}), "`norm_topk_prob` is true"),
        ("deepseek_v2_groups", json!({"norm_topk_prob": true}), "`norm_topk_prob` is true"),
        ("deepseek_v2_groups", json!({"scoring_func": "sigmoid"}), "`scoring_func` is \"sigmoid\""),
        // Its groups with the choice among all experts.
        ("deepseek_v2_groups", json!({"topk_method": "greedy"}), "`n_group` is 4"),
        ("deepseek_v2_groups", json!({"topk_method": null}), "`n_group` is 4"),
        ("deepseek_v3", json!({"topk_method": "greedy"}), "`topk_method` is \"greedy\""),
        ("deepseek_v3", json!({"topk_method": "group_limited_greedy"}), "`topk_method` is \"group_limited_greedy\""),
        ("deepseek_v3", json!({"scoring_func": "softmax"}), "`scoring_func` is \"softmax\""),
        ("deepseek_v3", json!({"moe_layer_freq": 2}), "`moe_layer_freq` is 2"),
        ("deepseek_v2", json!({"scoring_func": "sigmoid"}), "`scoring_func` is \"sigmoid\""),
        // Families whose router has no name in their files.
        ("glm4_moe", json!({"scoring_func": "softmax"}), "`scoring_func` is \"softmax\""),
        ("qwen3_moe", json!({"scoring_func": "sigmoid"}), "`scoring_func` is \"sigmoid\""),
        ("mixtral", json!({"topk_method": "noaux_tc"}), "`topk_method` is \"noaux_tc\""),
        ("gpt_oss", json!({"router_type": "hash"}), "`router_type` is \"hash\""),
        ("glm4_moe_lite", json!({"num_key_value_heads": 1}), "`num_key_value_heads` is 1"),
        ("glm4_moe_lite", json!({"mlp_layer_types": ["sparse", "dense"]}), "`mlp_layer_types` is"),
        ("gpt2", json!({"is_encoder_decoder": true}), "`is_encoder_decoder` is true"),
        ("gpt2", json!({"activation_function": "relu"}), "`activation_function` is \"relu\""),
        ("gpt2", json!({"scale_attn_by_inverse_layer_idx": true}), "`scale_attn_by_inverse_layer_idx` is true"),
        ("gpt_neox", json!({"hidden_act": "relu"}), "`hidden_act` is \"relu\""),
        ("bloom", json!({"apply_residual_connection_post_layernorm": true}), "`apply_residual_connection_post"),
        ("phi3", json!({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}), "rope_type` is \"dynamic\""),
    ];
    for (name, change, expected) in cases {
        let error = with(name, &change).unwrap_err();
        assert!(matches!(error, ModelError::Unsupported { .. }), "{name}: {error}");
        let text = error.to_string();
        assert!(text.starts_with("dir/config.json: the field ") && text.contains("\nhint: "), "{text}");
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn numbers_that_contradict_each_other_are_refused() {
    let cases = [
        ("qwen3_moe", json!({"num_experts_per_tok": 7}), "`num_experts_per_tok` is 7"),
        ("qwen3_moe", json!({"num_experts": 1u64 << 40}), "`num_experts` is 1099511627776"),
        ("qwen3_moe", json!({"decoder_sparse_step": 0}), "`decoder_sparse_step` is 0"),
        ("qwen3_moe", json!({"mlp_only_layers": [-1]}), "`mlp_only_layers` is [-1]"),
        ("mixtral", json!({"num_experts_per_tok": 0}), "`num_experts_per_tok` is 0"),
        ("gpt_oss", json!({"layer_types": ["full_attention"]}), "`layer_types` is"),
        (
            "glm4_moe",
            json!({"n_group": 3}),
            "`n_group` is 3, which is not valid: 8 experts, 2 of them for a token, in 2 of 3 groups: groups must be of one size",
        ),
        (
            "deepseek_v3",
            json!({"n_group": 5}),
            "`n_group` is 5, which is not valid: 8 experts, 3 of them for a token, in 2 of 5 groups",
        ),
        ("deepseek_v3", json!({"num_experts_per_tok": 5}), "8 experts, 5 of them for a token, in 2 of 4 groups"),
        ("glm4_moe", json!({"topk_group": 5}), "`n_group` is 4"),
        ("glm4_moe", json!({"first_k_dense_replace": -1}), "`first_k_dense_replace` is -1"),
        ("glm4_moe", json!({"partial_rotary_factor": 1.5, "rope_parameters": null}), "`partial_rotary_factor` is 1.5"),
        ("glm4_moe_lite", json!({"mlp_layer_types": ["dense"]}), "`mlp_layer_types` is"),
        ("deepseek_v2_groups", json!({"n_group": 5}), "`n_group` is 5"),
        ("deepseek_v2_groups", json!({"topk_group": 5}), "`n_group` is 4"),
        ("deepseek_v2_groups", json!({"num_experts_per_tok": 7}), "`n_group` is 4"),
        ("deepseek_v2_groups", json!({"topk_method": 1}), "`topk_method` is 1"),
        ("deepseek_v3", json!({"qk_rope_head_dim": 7}), "`qk_rope_head_dim` is 7"),
        ("deepseek_v3", json!({"kv_lora_rank": 25}), "`kv_lora_rank` is 25"),
        ("deepseek_v3", json!({"q_lora_rank": 0}), "`q_lora_rank` is 0"),
        ("minimax_m2", json!({"rotary_dim": 5}), "`rotary_dim` is 5"),
        ("minimax_m2", json!({"rotary_dim": 18}), "`rotary_dim` is 18"),
        ("gpt_neox", json!({"num_attention_heads": 5}), "`hidden_size` is 64"),
        ("gpt2", json!({"n_head": 16}), "`n_embd` is 48"),
        ("glm4_moe", json!({"n_shared_experts": 1024, "moe_intermediate_size": 262_144}), "`n_shared_experts` is 1024"),
        ("qwen3", json!({"rope_parameters": {"rope_type": "linear", "factor": 1e-60}}), "`rope_parameters` is"),
        (
            "qwen3",
            json!({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}),
            "`rope_parameters` is",
        ),
        ("smollm3", json!({"no_rope_layers": [1, 2, 0]}), "`no_rope_layers` is"),
        ("bloom", json!({"n_head": 7}), "`hidden_size` is 60"),
    ];
    for (name, change, expected) in cases {
        let error = with(name, &change).unwrap_err();
        assert!(matches!(error, ModelError::InvalidField { .. }), "{name}: {error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    for (name, field) in
        [("qwen3_moe", "num_experts"), ("deepseek_v2_groups", "n_group"), ("deepseek_v2_groups", "topk_group")]
    {
        let missing = with(name, &json!({field: null})).unwrap_err().to_string();
        assert!(missing.contains(&format!("the field `{field}` is missing")), "{missing}");
    }
}

#[test]
fn an_adapter_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 8});
    std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
    let error = ModelSpec::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("an adapter of org/base") && error.contains("\nhint: adapters such as LoRA"), "{error}");
    // Beside a model, which some tools leave it in after a merge, it says nothing.
    std::fs::copy(golden("qwen3").join("config.json"), dir.path().join("config.json")).unwrap();
    assert_eq!(ModelSpec::open(dir.path()).unwrap().family, "qwen3");
}

#[test]
fn an_unknown_architecture_lists_what_is_served() {
    let error = with("qwen3", &json!({"model_type": "mamba"})).unwrap_err().to_string();
    assert!(error.contains("`model_type` is \"mamba\""), "{error}");
    for family in FAMILIES {
        assert!(error.contains(&format!("{:?}", family.model_type)), "{error}");
    }
    let sorted = FAMILIES.windows(2).all(|pair| pair[0].model_type < pair[1].model_type);
    assert!(sorted, "families are listed by model_type");
}

#[test]
fn routers_choose_as_configurations_say() {
    let routing = |name, changes: &Value| {
        let spec = with(name, changes).unwrap();
        let Some(Mlp::Experts(mixture)) = spec.layers.into_iter().map(|layer| layer.mlp).next_back() else {
            panic!("{name}: the last layer has no experts");
        };
        assert_eq!(mixture.choice_bias.is_some(), mixture.routing.scoring == Scoring::Sigmoid, "{name}");
        mixture.routing
    };
    let (scoring, group_score) = (Scoring::Softmax, GroupScore::Best);
    let greedy = Routing { top_k: 2, scoring, normalised: false, scale: 1.5, groups: 1, top_groups: 1, group_score };
    assert_eq!(routing("deepseek_v2", &json!({})), greedy);
    assert_eq!(routing("deepseek_v2", &json!({"topk_method": null, "n_group": null, "topk_group": null})), greedy);
    assert_eq!(routing("deepseek_v2", &json!({"topk_method": "group_limited_greedy"})), greedy, "one group");
    let limited = Routing { top_k: 3, scale: 4.0, groups: 4, top_groups: 2, ..greedy };
    assert_eq!(routing("deepseek_v2_groups", &json!({})), limited);
    assert_eq!(routing("deepseek_v2_groups", &json!({"norm_topk_prob": null})), limited);
    let (scoring, group_score) = (Scoring::Sigmoid, GroupScore::TwoBest);
    let noaux = Routing { scoring, normalised: true, scale: 2.5, group_score, ..limited };
    assert_eq!(routing("deepseek_v3", &json!({})), noaux);
    assert_eq!(routing("deepseek_v3", &json!({"norm_topk_prob": false})), Routing { normalised: false, ..noaux });
}

#[test]
fn layers_differ_where_configurations_say_so() {
    let oss = with("gpt_oss", &json!({})).unwrap();
    let windows: Vec<_> = oss.layers.iter().map(|layer| layer.attention.window).collect();
    assert_eq!((windows, oss.window()), (vec![Some(16), None], None));
    let without_list = with("gpt_oss", &json!({"layer_types": null})).unwrap();
    assert_eq!(without_list.layers, oss.layers);
    let gemma = with("gemma3", &json!({})).unwrap();
    assert_eq!(gemma.layers.iter().map(|layer| layer.attention.rope).collect::<Vec<_>>(), [1, 0, 1]);
    // Every other layer of Gemma 2 has a window, with or without a list; its caps have defaults, and null is none.
    let gemma = with("gemma2", &json!({})).unwrap();
    let windows: Vec<_> = gemma.layers.iter().map(|layer| layer.attention.window).collect();
    assert_eq!((windows, gemma.window(), gemma.ropes.len()), (vec![Some(12), None, Some(12)], None, 1));
    let caps =
        |changes: &Value| with("gemma2", changes).map(|spec| (spec.attention_softcap, spec.logits_softcap)).unwrap();
    assert_eq!(caps(&json!({})), (Some(3.0), Some(8.0)));
    assert_eq!(caps(&json!({"attn_logit_softcapping": null, "final_logit_softcapping": 30})), (None, Some(30.0)));
    let moe = with("qwen3_moe", &json!({})).unwrap();
    let dense: Vec<_> = moe.layers.iter().map(|layer| matches!(layer.mlp, Mlp::Dense(_))).collect();
    assert_eq!(dense, [false, true, false]);
    let dense = |changes: &Value| {
        let spec = with("glm4_moe_lite", changes).unwrap();
        spec.layers.iter().map(|layer| matches!(layer.mlp, Mlp::Dense(_))).collect::<Vec<_>>()
    };
    assert_eq!(dense(&json!({})), [true, false], "transformers' default");
    assert_eq!(dense(&json!({"mlp_layer_types": ["dense", "sparse"]})), [true, false]);
    assert_eq!(dense(&json!({"mlp_layer_types": ["sparse", "sparse"]})), [false, false]);
    let renamed = json!({"num_experts": null, "num_local_experts": 6});
    assert_eq!(with("qwen3_moe", &renamed).unwrap(), moe);
    // Ministral is a Mistral whose files name the layers.
    let types = json!({"layer_types": ["full_attention", "sliding_attention"]});
    let windows = with("mistral_window", &types).unwrap().layers.into_iter().map(|layer| layer.attention.window);
    assert_eq!(windows.collect::<Vec<_>>(), [None, Some(16)]);
    // YaRN lengthens the context of files that name the original one.
    let yarn = json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 256}});
    assert_eq!(with("qwen3", &yarn).unwrap().max_positions, 1024);
    // One window in all layers is the model's.
    assert_eq!(with("mistral_window", &json!({})).unwrap().window(), Some(16));
}
