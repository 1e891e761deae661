"""Goldens of families beyond Llama's nearest: mixtures of experts, sinks, windows on some layers, learned positions.

An entry has the form of those in variants.py. Sizes are small; routers have clear winners, because the weights are random.
"""


def config(model_type, architecture, **fields):
    """A configuration in the spelling of transformers 5, except where an entry says otherwise."""
    base = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "use_cache": True,
    }
    base.update(fields)
    return base


def sizes(vocab, hidden, inter, layers, heads, kv_heads, head_dim, eps=1e-6):
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "max_position_embeddings": 256,
    }


def rope(theta, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    # Small, so that a prompt of some sixty tokens reaches the scaled wavelengths.
    "original_max_position_embeddings": 32,
    "truncate": False,
}

QWEN3 = config("qwen3", "Qwen3ForCausalLM", **sizes(140, 48, 72, 2, 4, 2, 24), attention_bias=False, **rope(1e6))
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
MIXTRAL = config(
    "mixtral",
    "MixtralForCausalLM",
    **sizes(136, 48, 56, 2, 4, 2, 12),
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=None,
    rope_theta=1e6,
    torch_dtype="float32",
)
del MIXTRAL["dtype"], MIXTRAL["head_dim"]
GPT_OSS = config(
    "gpt_oss",
    "GptOssForCausalLM",
    **sizes(132, 48, 40, 2, 4, 2, 16, 1e-5),
    num_local_experts=5,
    num_experts_per_tok=2,
    attention_bias=True,
    swiglu_limit=7.0,
    sliding_window=16,
    layer_types=["sliding_attention", "full_attention"],
    rope_parameters=YARN,
)
GEMMA3 = config(
    "gemma3_text",
    "Gemma3ForCausalLM",
    **sizes(144, 48, 64, 3, 4, 2, 16),
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=24,
    sliding_window=12,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_theta=1e6,
    rope_local_base_freq=1e4,
)
GEMMA3["tie_word_embeddings"] = True
del GEMMA3["hidden_act"]
GEMMA2 = config(
    "gemma2",
    "Gemma2ForCausalLM",
    **sizes(150, 48, 64, 3, 4, 2, 16),
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=24,
    sliding_window=12,
    # Published ones are 50 and 30; scores and logits of so small a model would not reach them.
    attn_logit_softcapping=3.0,
    final_logit_softcapping=8.0,
    rope_theta=1e4,
)
GEMMA2["tie_word_embeddings"] = True
del GEMMA2["hidden_act"]
GPT2 = config(
    "gpt2",
    "GPT2LMHeadModel",
    vocab_size=128,
    n_embd=48,
    n_head=6,
    n_layer=2,
    n_positions=96,
    n_inner=None,
    layer_norm_epsilon=1e-5,
    activation_function="gelu_new",
)
GPT2["tie_word_embeddings"] = True
NEOX = config(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    vocab_size=130,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_act="gelu",
    layer_norm_eps=1e-5,
    max_position_embeddings=256,
    use_parallel_residual=True,
    rotary_pct=0.25,
    rotary_emb_base=10000,
    torch_dtype="float16",
)
del NEOX["dtype"]
BLOOM = config(
    "bloom",
    "BloomForCausalLM",
    vocab_size=134,
    hidden_size=60,
    n_layer=2,
    n_head=6,
    layer_norm_epsilon=1e-5,
    apply_residual_connection_post_layernorm=False,
    seq_length=256,
)
BLOOM["tie_word_embeddings"] = True
PHI3 = config(
    "phi3",
    "Phi3ForCausalLM",
    **sizes(138, 48, 60, 2, 3, 1, 16, 1e-5),
    original_max_position_embeddings=256,
    sliding_window=None,
    **rope(1e4, partial_rotary_factor=0.75),
)
del PHI3["head_dim"]
PHI3["pad_token_id"] = 0
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4],
    "long_factor": [1.1, 1.5, 2.0, 3.5, 6.0, 9.0],
}
PHI3_LONGROPE = {
    **PHI3,
    # Small, so that the prompt is longer: then transformers takes the long factors, as Lagoon does for all lengths without
    # --max-model-len. phi3_longrope_short (generate.py) stays within it.
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
    "rope_scaling": LONGROPE,
    "partial_rotary_factor": 0.75,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
del PHI3_LONGROPE["rope_parameters"], PHI3_LONGROPE["dtype"]
GLM4_MOE = config(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    **sizes(142, 48, 72, 3, 4, 2, 16, 1e-5),
    attention_bias=True,
    use_qk_norm=True,
    first_k_dense_replace=1,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    **rope(1e4, partial_rotary_factor=0.5),
)

SMOLLM3 = config(
    "smollm3",
    "SmolLM3ForCausalLM",
    **sizes(146, 48, 60, 3, 4, 2, 12),
    attention_bias=False,
    mlp_bias=False,
    no_rope_layers=[1, 0, 1],
    use_sliding_window=False,
    **rope(5e6),
)
SMOLLM3.update(tie_word_embeddings=True, pad_token_id=0)
del SMOLLM3["head_dim"]

MINIMAX_M2 = config(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    **sizes(152, 48, 40, 2, 6, 2, 16),
    num_local_experts=6,
    num_experts_per_tok=2,
    rope_theta=5e6,
    rotary_dim=8,
    use_qk_norm=True,
    qk_norm_type="per_layer",
    use_routing_bias=True,
    scoring_func="sigmoid",
    shared_intermediate_size=0,
    attn_type_list=[1, 1],
    torch_dtype="float32",
)
del MINIMAX_M2["dtype"]

DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
# Spelled as DeepSeek does.
DEEPSEEK_V3 = config(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    **sizes(146, 48, 72, 3, 4, 4, 16),
    attention_bias=False,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=20,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    moe_intermediate_size=28,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    ep_size=1,
    num_nextn_predict_layers=0,
    rope_theta=10000,
    rope_scaling=DEEPSEEK_YARN,
    torch_dtype="float32",
)
del DEEPSEEK_V3["head_dim"], DEEPSEEK_V3["dtype"]
DEEPSEEK_V2 = {
    **DEEPSEEK_V3,
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "attention_bias": True,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "num_hidden_layers": 2,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
# As DeepSeek-V2 with 236 billion parameters: queries of low rank, experts of the groups with the best expert each.
DEEPSEEK_V2_GROUPS = {
    **DEEPSEEK_V2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 4.0,
    "topk_method": "group_limited_greedy",
    "rope_scaling": DEEPSEEK_YARN,
}
# DeepSeek-V3's architecture with Kimi-K2's settings: no groups, one dense layer, and a YaRN whose two betas are equal.
KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "vocab_size": 154,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "num_hidden_layers": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 10,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "aux_loss_alpha": 0.001,
    "pretraining_tp": 1,
    "seq_aux": True,
    "rope_theta": 50000.0,
    "rope_scaling": {**DEEPSEEK_YARN, "beta_fast": 1.0},
}
GLM4_MOE_LITE = config(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    **sizes(150, 40, 64, 2, 5, 5, 8, 1e-5),
    attention_bias=False,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
    n_routed_experts=6,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.8,
    rope_interleave=False,
    **rope(1e4),
)
del GLM4_MOE_LITE["head_dim"]

OLMO2 = config(
    "olmo2",
    "Olmo2ForCausalLM",
    **sizes(148, 48, 64, 2, 4, 4, 12),
    attention_bias=False,
    rope_theta=5e5,
    rope_scaling=None,
)
del OLMO2["head_dim"]

# name -> what the golden shows, the configuration, the prompt's length in tokens, and the mutants.
FAMILIES = {
    "qwen3": {
        "shows": "Qwen3: norms of query and key heads, heads wider than hidden size / heads",
        "config": QWEN3,
        "tokens": 50,
        "mutants": {"no_keys": {"zero": "k_norm"}, "theta": rope(1e4), "eps": {"rms_norm_eps": 1e-2}},
    },
    "qwen3_moe": {
        "shows": "Qwen3's experts: two of six for a token, a dense layer among them, shares that sum to one",
        "config": QWEN3_MOE,
        "tokens": 60,
        "mutants": {
            "one_expert": {"num_experts_per_tok": 1},
            "three_experts": {"num_experts_per_tok": 3},
            "shares": {"norm_topk_prob": False},
        },
    },
    "mixtral": {
        "shows": "Mixtral: two of four experts for a token, configuration spelled as transformers 4 does",
        "config": MIXTRAL,
        "tokens": 44,
        "mutants": {"one_expert": {"num_experts_per_tok": 1}, "theta": {"rope_theta": 1e4}},
    },
    "gpt_oss": {
        "shows": "gpt-oss: sinks, a window on every other layer, YaRN, biases everywhere, clamped gates",
        "config": GPT_OSS,
        "tokens": 60,
        "mutants": {
            "no_sinks": {"minus": "sinks"},
            "no_window": {"layer_types": ["full_attention", "full_attention"]},
            "window_17": {"sliding_window": 17},
            "no_yarn": rope(150000.0),
            "truncated": {"rope_parameters": {**YARN, "truncate": True}},
            "no_out_bias": {"zero": "o_proj.bias"},
            "no_router_bias": {"zero": "router.bias"},
            "no_expert_bias": {"zero": "down_proj_bias"},
        },
    },
    "gemma3": {
        "shows": "Gemma 3: norms before and after, two rotary bases, windows on most layers, gated GELU by tanh",
        "config": GEMMA3,
        "tokens": 56,
        "mutants": {
            "local_base": {"rope_local_base_freq": 1e6},
            "global_base": {"rope_theta": 1e4},
            "scale": {"query_pre_attn_scalar": 16},
            "window_13": {"sliding_window": 13},
            "no_out_norm": {"zero": "post_feedforward_layernorm"},
        },
    },
    "gemma2": {
        "shows": "Gemma 2: soft caps of scores and logits, a window on every other layer, norms before and after",
        "config": GEMMA2,
        "tokens": 58,
        "mutants": {
            "no_score_cap": {"attn_logit_softcapping": None},
            "no_logit_cap": {"final_logit_softcapping": None},
            "no_window": {"layer_types": ["full_attention"] * 3},
            "other_windows": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "window_13": {"sliding_window": 13},
            "scale": {"query_pre_attn_scalar": 16},
            "no_out_norm": {"zero": "post_feedforward_layernorm"},
        },
    },
    "gpt2": {
        "shows": "GPT-2: learned positions, layer norms and projections with biases, weights stored transposed",
        "config": GPT2,
        "tokens": 50,
        "mutants": {
            "no_positions": {"zero": "wpe"},
            "no_bias": {"zero": "c_attn.bias"},
            "no_norm_bias": {"zero": "ln_2.bias"},
        },
    },
    "gpt_neox": {
        "shows": "GPT-NeoX: f16 weights, a quarter of each head rotated, blocks in parallel, a projection stored by head",
        "config": NEOX,
        "tokens": 48,
        "mutants": {
            "in_sequence": {"use_parallel_residual": False},
            "half_rotated": {"rotary_pct": 0.5},
            "no_bias": {"zero": "query_key_value.bias"},
        },
    },
    "bloom": {
        "shows": "BLOOM: linear biases for six heads, a norm of the embedding, a projection stored by head",
        "config": BLOOM,
        "tokens": 52,
        "mutants": {
            "no_embedding_bias": {"zero": "word_embeddings_layernorm.bias"},
            "eps": {"layer_norm_epsilon": 1e-1},
            "no_bias": {"zero": "query_key_value.bias"},
        },
    },
    "phi3": {
        "shows": "Phi-3 and 4: fused projections, three quarters of each head rotated",
        "config": PHI3,
        "tokens": 50,
        "mutants": {
            "half_rotated": rope(1e4, partial_rotary_factor=0.5),
            "all_rotated": rope(1e4),
            "window": {"sliding_window": 16},
        },
    },
    "phi3_longrope": {
        "shows": "Phi-4-mini: longrope beyond its original context, configuration spelled as transformers 4 does",
        "config": PHI3_LONGROPE,
        "tokens": 58,
        "mutants": {
            "short": {"rope_scaling": {**LONGROPE, "long_factor": LONGROPE["short_factor"]}},
            "not_scaled": {"rope_scaling": {**LONGROPE, "attention_factor": 1.0}},
            "no_longrope": {"rope_scaling": None},
        },
    },
    "smollm3": {
        "shows": "SmolLM3: a layer that is not rotated, tied embeddings",
        "config": SMOLLM3,
        "tokens": 46,
        "mutants": {"all_rotated": {"no_rope_layers": [1, 1, 1]}, "theta": rope(1e4)},
    },
    "minimax_m2": {
        "shows": "MiniMax-M2: norms of queries and keys over all heads, half of each head rotated, a sigmoid router",
        "config": MINIMAX_M2,
        "tokens": 54,
        "mutants": {
            "eps": {"rms_norm_eps": 1e-2},
            "no_keys": {"zero": "k_norm"},
            "all_rotated": {"rotary_dim": 16},
            "one_expert": {"num_experts_per_tok": 1},
            "no_choice_bias": {"zero": "e_score_correction_bias"},
        },
    },
    "olmo2": {
        "shows": "OLMo 2: norms of what blocks give alone, norms of queries and keys over all heads",
        "config": OLMO2,
        "tokens": 47,
        "mutants": {
            "theta": {"rope_theta": 1e4},
            "eps": {"rms_norm_eps": 1e-2},
            "no_keys": {"zero": "k_norm"},
            "no_attention": {"zero": "post_attention_layernorm"},
        },
    },
    "deepseek_v3": {
        "shows": "DeepSeek-V3: latent attention with queries of low rank, YaRN that grows the scores, experts in groups",
        "config": DEEPSEEK_V3,
        "tokens": 60,
        "mutants": {
            "halves": {"rope_interleave": False},
            "no_score_growth": {"rope_scaling": {k: v for k, v in DEEPSEEK_YARN.items() if "mscale" not in k}},
            "no_yarn": {"rope_scaling": None},
            "no_latents": {"zero": "kv_a_layernorm"},
            "no_queries": {"zero": "q_a_layernorm"},
            "no_groups": {"n_group": 1, "topk_group": 1},
        },
    },
    "deepseek_v2": {
        "shows": "DeepSeek-V2: latent attention with queries of full rank and biases, softmax routing, two shared experts",
        "config": DEEPSEEK_V2,
        "tokens": 56,
        "mutants": {
            "no_latent_bias": {"zero": "kv_a_proj_with_mqa.bias"},
            "no_out_bias": {"zero": "o_proj.bias"},
            "no_yarn": {"rope_scaling": None},
            "scale": {"routed_scaling_factor": 1.0},
            "no_shared": {"zero": "shared_experts.down_proj"},
        },
    },
    "deepseek_v2_groups": {
        "shows": "DeepSeek-V2 with queries of low rank: softmax routing within the groups that have the best expert each",
        "config": DEEPSEEK_V2_GROUPS,
        "tokens": 60,
        "mutants": {
            "no_groups": {"topk_method": "greedy"},
            "one_group": {"topk_group": 1},
            "other_groups": {"n_group": 6},
            "scale": {"routed_scaling_factor": 1.0},
            "no_queries": {"zero": "q_a_layernorm"},
        },
    },
    "kimi_k2": {
        "shows": "Kimi-K2: DeepSeek-V3 without groups, with a YaRN that does not blend",
        "config": KIMI_K2,
        "tokens": 62,
        "mutants": {
            "three_experts": {"num_experts_per_tok": 3},
            "scale": {"routed_scaling_factor": 2.5},
            "no_yarn": {"rope_scaling": None},
            "beta_fast": {"rope_scaling": DEEPSEEK_YARN},
            "no_choice_bias": {"zero": "e_score_correction_bias"},
        },
    },
    "glm4_moe_lite": {
        "shows": "GLM-4.7-Flash: latent attention rotated by halves, a sigmoid router",
        "config": GLM4_MOE_LITE,
        "tokens": 52,
        "mutants": {
            "pairs": {"rope_interleave": True},
            "theta": rope(1e3),
            "no_choice_bias": {"zero": "e_score_correction_bias"},
        },
    },
    "glm4_moe": {
        "shows": "GLM-4.5: sigmoid routing in groups with a bias of the choice, a shared expert, a dense first layer",
        "config": GLM4_MOE,
        "tokens": 60,
        "mutants": {
            "no_groups": {"n_group": 1, "topk_group": 1},
            "scale": {"routed_scaling_factor": 1.0},
            "shares": {"norm_topk_prob": False},
            "no_choice_bias": {"zero": "e_score_correction_bias"},
            "no_shared": {"zero": "shared_experts.down_proj"},
            "half": rope(1e4, partial_rotary_factor=0.25),
        },
    },
}
