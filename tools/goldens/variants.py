"""The model variants that have goldens: one entry a directory of tests/goldens.

Every variant names the one feature that it exists for, and `mutants`: changes to its configuration that stand for an
engine that ignores the feature.  generate.py refuses to write a golden whose logits hardly move under a mutant, because
such a golden would prove nothing about the feature.
"""

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Small, so that a prompt of some fifty tokens reaches the scaled wavelengths.
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}


MPT_ATTENTION = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_impl": "torch",
    "attn_pdrop": 0,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
    "softmax_scale": None,
}


def llama(**shape):
    """A Llama configuration in the spelling of transformers 4 (top-level rope_theta, torch_dtype)."""
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    base.update(shape)
    return base


def mpt(vocab, hidden, layers, heads, attn_config):
    """An MPT configuration in the spelling of transformers 5."""
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "vocab_size": vocab,
        "d_model": hidden,
        "n_layers": layers,
        "n_heads": heads,
        "expansion_ratio": 4,
        "max_seq_len": 512,
        "layer_norm_epsilon": 1e-5,
        "attn_config": {**MPT_ATTENTION, **attn_config},
        "learned_pos_emb": True,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        "use_cache": True,
    }


def _mosaic_spelling():
    """As MosaicML's files on the hub are: another class's name, no epsilon and no word of the tied table."""
    config = mpt(136, 40, 2, 4, {"alibi_bias_max": 4})
    config["architectures"] = ["MPTForCausalLM"]
    config["torch_dtype"] = "float16"
    config["init_config"] = {"name": "kaiming_normal_", "verbose": 0}
    config["logit_scale"] = None
    for field in ("dtype", "layer_norm_epsilon", "tie_word_embeddings"):
        del config[field]
    return config


def qwen2(vocab, **other):
    """A Qwen2 configuration as Qwen2.5's files spell it: a window that is written and not used."""
    config = llama(**shape(vocab, 64, 96, 2, 4, 2), rope_theta=1000000.0)
    del config["attention_bias"], config["mlp_bias"]
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
    window = {"sliding_window": 16, "max_window_layers": 1, "use_sliding_window": False}
    return {**config, **qwen, **window, **other}


def shape(vocab, hidden, inter, layers, heads, kv_heads, head_dim=None):
    """The size fields of a configuration; head_dim is written only where it is given."""
    out = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    if head_dim is not None:
        out["head_dim"] = head_dim
    return out


def _new_spelling():
    """llama3_old's configuration as transformers 5 writes it: rope_parameters and dtype."""
    config = llama(**shape(128, 64, 100, 2, 4, 1), bos_token_id=1, eos_token_id=[2, 3])
    del config["rope_theta"], config["torch_dtype"]
    config["dtype"] = "float32"
    config["rope_parameters"] = {**LLAMA3_ROPE, "rope_theta": 500000.0}
    return config


# name -> what the golden shows, the configuration, the prompt's length in tokens, and the mutants.
VARIANTS = {
    "llama2_mha": {
        "shows": "Llama 2: multi-head attention, untied, an odd vocabulary",
        "config": llama(**shape(131, 48, 92, 3, 3, 3)),
        "tokens": 40,
        "mutants": {"rope_theta": {"rope_theta": 20000.0}, "eps": {"rms_norm_eps": 1e-2}},
    },
    "llama3_old": {
        "shows": "Llama 3: grouped queries, llama3 rope scaling, configuration spelled as transformers 4 does",
        "config": llama(**shape(128, 64, 100, 2, 4, 1), rope_theta=500000.0, rope_scaling=LLAMA3_ROPE),
        "tokens": 57,
        "mutants": {"no_rope_scaling": {"rope_scaling": None}, "theta": {"rope_theta": 10000.0}},
    },
    "llama3_new": {
        "shows": "Llama 3: grouped queries, llama3 rope scaling, configuration spelled as transformers 5 does; two eos ids",
        "config": _new_spelling(),
        "tokens": 57,
        "mutants": {
            "no_rope_scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            "theta": {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10000.0}},
        },
    },
    "mistral_window": {
        "shows": "Mistral: a sliding window of 16 tokens, much smaller than the prompt",
        "config": {
            **llama(**shape(144, 64, 92, 2, 4, 2, 16)),
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 16,
        },
        "tokens": 70,
        "mutants": {
            "no_window": {"sliding_window": None},
            "window_15": {"sliding_window": 15},
            "window_17": {"sliding_window": 17},
        },
    },
    "yi": {
        "shows": "Yi: its own rope_theta, three query heads on one kv head, head size 24",
        "config": llama(**shape(150, 72, 84, 2, 3, 1), rope_theta=5000000.0),
        "tokens": 48,
        "mutants": {"theta": {"rope_theta": 10000.0}},
    },
    "tied_sentencepiece": {
        "shows": "tied embeddings, and a byte-fallback tokenizer with a chat template",
        "config": llama(**shape(448, 56, 68, 2, 7, 7, 8), tie_word_embeddings=True),
        "tokens": 45,
        "mutants": {"theta": {"rope_theta": 20000.0}},
        "tokenizer": True,
    },
    "head_dim_64": {
        "shows": "a head size (64) that is not hidden size / heads (16)",
        "config": llama(**shape(128, 48, 64, 2, 3, 1, 64)),
        "tokens": 44,
        "mutants": {"theta": {"rope_theta": 20000.0}},
    },
    "sharded": {
        "shows": "weights in three safetensors files with an index",
        "config": llama(**shape(136, 64, 72, 2, 4, 2)),
        "tokens": 42,
        "mutants": {"theta": {"rope_theta": 20000.0}},
        "shards": 3,
    },
    "bf16": {
        "shows": "bf16 weights, six query heads on two kv heads",
        "config": llama(**shape(200, 96, 132, 2, 6, 2), torch_dtype="bfloat16"),
        "tokens": 50,
        "mutants": {"theta": {"rope_theta": 20000.0}},
    },
    "f16": {
        "shows": "f16 weights, head size 64",
        "config": llama(**shape(128, 64, 100, 2, 4, 2, 64), torch_dtype="float16"),
        "tokens": 50,
        "mutants": {"theta": {"rope_theta": 20000.0}},
    },
    "qwen2": {
        "shows": "Qwen2: biases on queries, keys and values, and a window that is written and not used",
        "config": qwen2(152),
        "tokens": 52,
        "mutants": {
            "no_q_bias": {"zero": "q_proj.bias"},
            "no_k_bias": {"zero": "k_proj.bias"},
            "no_v_bias": {"zero": "v_proj.bias"},
            "window": {"use_sliding_window": True},
            "theta": {"rope_theta": 10000.0},
        },
    },
    "qwen2_window": {
        "shows": "Qwen2: a window of 16 tokens on the upper layer",
        "config": qwen2(148, use_sliding_window=True),
        "tokens": 60,
        "mutants": {
            "no_window": {"use_sliding_window": False},
            "window_15": {"sliding_window": 15},
            "both_layers": {"max_window_layers": 0},
        },
    },
    "qwen2_f16": {
        "shows": "Qwen2: f16 weights and biases",
        "config": qwen2(176, torch_dtype="float16"),
        "tokens": 48,
        "mutants": {"no_q_bias": {"zero": "q_proj.bias"}, "no_v_bias": {"zero": "v_proj.bias"}},
    },
    "mpt": {
        "shows": "MPT: attention with linear biases for six heads (no power of two), layer norms, GELU, tied embeddings",
        "config": mpt(140, 48, 2, 6, {}),
        "tokens": 70,
        "mutants": {
            "no_biases": {"attn_config": {**MPT_ATTENTION, "alibi_bias_max": 400}},
            "bias_max": {"attn_config": {**MPT_ATTENTION, "alibi_bias_max": 9}},
            "eps": {"layer_norm_epsilon": 1e-2},
        },
    },
    "mpt_f16": {
        "shows": "MPT: f16 weights, another alibi_bias_max, configuration spelled as MosaicML does",
        "config": _mosaic_spelling(),
        "tokens": 60,
        "mutants": {
            "no_biases": {"attn_config": {**MPT_ATTENTION, "alibi_bias_max": 400}},
            "bias_max": {"attn_config": MPT_ATTENTION},
        },
    },
}
