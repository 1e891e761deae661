"""Writes tests/goldens/quantised: small Llamas in the layouts of published quantised checkpoints, with their logits.

Weights are random with a fixed seed, and quantised here by rounding. Logits are those of tools/gguf/forward.py, in float64 on the
dequantised weights. Layouts follow the tools that write them: DeepSeek's and transformers' FP8, compressed-tensors' float-quantized
and pack-quantized, AutoAWQ's gemm, AutoGPTQ's (zero points less one) with and without the order of activations.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/gguf"))
from forward import logits  # noqa: E402

OUT = ROOT / "tests/goldens/quantised"
# Positions whose logits are kept, the last ones.
KEPT = 8
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int8): "I8",
    np.dtype(BF16): "BF16",
    np.dtype(FP8): "F8_E4M3",
}


def save(path, tensors):
    """A safetensors file; the package's writer does not know all of these types."""
    header, data = {}, b""
    for name, array in sorted(tensors.items()):
        raw = np.ascontiguousarray(array).tobytes()
        shape = list(array.shape)
        header[name] = {"dtype": NAMES[array.dtype], "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def words(codes):
    """Eight codes of the last axis a word, the first in its lowest bits."""
    codes = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    return (codes << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


def integers(w, group, symmetric, scale_type):
    """Codes 0..15 of [rows, cols], scales and zero points [rows, groups], and the elements."""
    rows, cols = w.shape
    groups = w.reshape(rows, -1, group or cols)
    if symmetric:
        scales = np.abs(groups).max(-1) / 7.5
        zeros = np.full(scales.shape, 8)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / 15
        zeros = np.clip(np.round(-low / scales), 1, 15).astype(int)
    scales = scales.astype(scale_type)
    wide = scales.astype(np.float64)[..., None]
    codes = np.clip(np.round(groups / wide) + zeros[..., None], 0, 15).astype(np.uint8)
    elements = (codes.astype(np.float64) - zeros[..., None]) * wide
    return codes.reshape(rows, cols), scales, zeros, elements.reshape(rows, cols)


def fp8(w, per, scale_type=np.float32):
    """Codes of [rows, cols], scales of blocks of `per` rows and columns, and the elements."""
    blocks = [(slice(i, i + per[0]), slice(j, j + per[1])) for i in range(0, w.shape[0], per[0]) for j in range(0, w.shape[1], per[1])]
    shape = (-(-w.shape[0] // per[0]), -(-w.shape[1] // per[1]))
    scales = np.array([np.abs(w[b]).max() / 448 for b in blocks]).astype(scale_type).reshape(shape)
    wide = np.repeat(np.repeat(scales.astype(np.float64), per[0], 0), per[1], 1)[: w.shape[0], : w.shape[1]]
    codes = np.clip(w / wide, -448, 448).astype(FP8)
    return codes, scales, codes.astype(np.float64) * wide


def fp8_block(module, w):
    codes, scales, elements = fp8(w, (128, 128))
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}, elements


def fp8_channel(module, w):
    codes, scales, elements = fp8(w, (1, w.shape[1]), BF16)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scales}, elements


def fp8_tensor(module, w):
    codes, scales, elements = fp8(w, w.shape)
    one = np.float32(0.02).reshape(1)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scales.reshape(1), f"{module}.input_scale": one}, elements


def awq(module, w, group=64):
    codes, scales, zeros, elements = integers(w, group, False, np.float16)
    order = lambda x: words(x.reshape(*x.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape))
    tensors = {"qweight": order(codes.T), "qzeros": order(zeros.T), "scales": scales.T}
    return {f"{module}.{name}": array for name, array in tensors.items()}, elements


def gptq(module, w, group=32, order=None):
    columns = np.arange(w.shape[1]) if order is None else order(w.shape[1])
    codes, scales, zeros, elements = integers(w[:, columns], group, False, np.float16)
    groups = np.empty(w.shape[1], np.int32)
    groups[columns] = np.arange(w.shape[1]) // group
    back = np.argsort(columns)
    tensors = {
        "qweight": words(codes[:, back]).T,
        "qzeros": words(zeros.T - 1),
        "scales": scales.T,
        "g_idx": groups,
        # Tools give every module a bias.
        "bias": np.zeros(w.shape[0], np.float16),
    }
    return {f"{module}.{name}": array for name, array in tensors.items()}, elements[:, back]


def packed(module, w, group, symmetric):
    codes, scales, zeros, elements = integers(w, group, symmetric, BF16)
    tensors = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": np.array(w.shape, np.int64)}
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T).T
    return {f"{module}.{name}": array for name, array in tensors.items()}, elements


def compressed(form, weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    if form == "float-quantized":
        group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
    }


def int4_weights(group, symmetric):
    strategy = "group" if group else "channel"
    fixed = {"num_bits": 4, "type": "int", "dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {}}
    return fixed | {"symmetric": symmetric, "strategy": strategy, "group_size": group, "block_structure": None}


def shuffled(columns):
    return np.random.default_rng(columns).permutation(columns)


FP8_CHANNEL = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False, "observer": "minmax"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "true_sequential": True, "damp_percent": 0.01}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
# Name, plain type, quantiser of a module, width, quantization_config.
MODELS = [
    (
        "fp8-block",
        BF16,
        fp8_block,
        256,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    ("fp8-channel", BF16, fp8_channel, 128, compressed("float-quantized", FP8_CHANNEL)),
    ("fp8-tensor", BF16, fp8_tensor, 128, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    ("awq", np.float16, awq, 128, AWQ),
    ("gptq", np.float16, gptq, 128, GPTQ | {"desc_act": False, "checkpoint_format": "gptq"}),
    ("gptq-order", np.float16, lambda m, w: gptq(m, w, order=shuffled), 128, GPTQ | {"desc_act": True}),
    ("packed-symmetric", BF16, lambda m, w: packed(m, w, 32, True), 128, compressed("pack-quantized", int4_weights(32, True))),
    ("packed-asymmetric", BF16, lambda m, w: packed(m, w, 128, False), 128, compressed("pack-quantized", int4_weights(128, False))),
    ("packed-channel", BF16, lambda m, w: packed(m, w, None, True), 128, compressed("pack-quantized", int4_weights(None, True))),
]


def shapes(hidden, width, heads, kv_heads, dim, vocab):
    layer = "model.layers.0."
    return {
        "model.embed_tokens": (vocab, hidden),
        "model.norm": (hidden,),
        "lm_head": (vocab, hidden),
        layer + "input_layernorm": (hidden,),
        layer + "self_attn.q_proj": (heads * dim, hidden),
        layer + "self_attn.k_proj": (kv_heads * dim, hidden),
        layer + "self_attn.v_proj": (kv_heads * dim, hidden),
        layer + "self_attn.o_proj": (hidden, heads * dim),
        layer + "post_attention_layernorm": (hidden,),
        layer + "mlp.gate_proj": (width, hidden),
        layer + "mlp.up_proj": (width, hidden),
        layer + "mlp.down_proj": (hidden, width),
    }


def model(name, plain, quantise, width, quantization, seed):
    config = dict(hidden=128, width=width, heads=4, kv_heads=2, head_dim=32, layers=1, vocab=64, eps=1e-5, theta=1e4, biases=False)
    rng = np.random.default_rng(seed)
    tensors, weights = {}, {}
    sizes = {key: config[key] for key in ("hidden", "width", "heads", "kv_heads", "vocab")}
    for module, shape in shapes(dim=config["head_dim"], **sizes).items():
        values = rng.standard_normal(shape) / np.sqrt(shape[-1]) + (len(shape) == 1)
        if "_proj" in module:
            # Columns of several sizes, as weights have them.
            values *= np.exp(rng.standard_normal(shape[1]) / 2)
            made, weights[module + ".weight"] = quantise(module, values)
            tensors |= made
        else:
            stored = values.astype(plain)
            tensors[module + ".weight"] = stored
            weights[module + ".weight"] = stored.astype(np.float64)
    (OUT / name).mkdir(parents=True, exist_ok=True)
    save(OUT / name / "model.safetensors", tensors)
    text = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config["hidden"],
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": config["heads"],
        "num_key_value_heads": config["kv_heads"],
        "head_dim": config["head_dim"],
        "vocab_size": config["vocab"],
        "rms_norm_eps": config["eps"],
        "rope_theta": config["theta"],
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16" if plain is BF16 else "float16",
        "quantization_config": quantization,
    }
    (OUT / name / "config.json").write_text(json.dumps(text, indent=1) + "\n")
    tokens = [int(token) for token in rng.integers(3, config["vocab"], 40)]
    expected = logits(config, weights, tokens)[-KEPT:]
    (OUT / name / "logits").write_bytes(expected.astype(np.float32).tobytes())
    return {"name": name, "tokens": tokens, "deviation": round(float(expected.std()), 3)}


def main():
    goldens = [model(*of, seed=seed) for seed, of in enumerate(MODELS)]
    (OUT / "goldens.json").write_text(json.dumps(goldens) + "\n")


if __name__ == "__main__":
    main()
