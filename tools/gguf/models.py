"""Writes tests/goldens/gguf: vocabularies alone, and small models in several formats with their logits.

Weights are random with a fixed seed; logits are those of forward.py, in float64 on the weights as the gguf package dequantises
them. Files are written with that package's writer, rows of Llama's queries and keys in turns as llama.cpp's converter does.
"""

import json
from pathlib import Path

import numpy as np
import vocabularies
from forward import logits
from gguf import GGMLQuantizationType as T, GGUFWriter
from gguf.quants import dequantize, quantize

OUT = Path(__file__).resolve().parents[2] / "tests/goldens/gguf"
# Positions whose logits are kept, the last ones.
KEPT = 8
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Scales of the K formats: where a block has them.
SCALES = {T.Q4_K: (144, [0, 2]), T.Q6_K: (210, [208])}


def stored(name):
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    if rest in NAMES:
        return f"blk.{layer}.{NAMES[rest]}"
    stem, end = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[stem]}.{end}"


def in_turns(rows, heads):
    """Rows of heads as llama.cpp's converter orders them for its rotation of neighbours."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def random_blocks(rng, shape, kind):
    """Random packed rows, whose elements have the deviation of an initialised matrix."""
    size, scales = SCALES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // 256, size), dtype=np.uint8)
    set_scales = lambda scale: [
        blocks.__setitem__((slice(None), slice(at, at + 2)), np.frombuffer(np.float16(s).tobytes(), np.uint8))
        for at, s in zip(scales, [scale, 7.5 * scale])
    ]
    set_scales(1e-3)
    deviation = dequantize(blocks, kind).std()
    set_scales(1e-3 / deviation / np.sqrt(shape[1]))
    return blocks.reshape(shape[0], -1)


def packed(rng, name, shape, kind):
    """A tensor as the file has it, and its elements."""
    if kind in SCALES:
        data = random_blocks(rng, shape, kind)
        return data, dequantize(data, kind).reshape(shape)
    values = rng.standard_normal(shape) / np.sqrt(shape[-1])
    values = values.astype(np.float32)
    if len(shape) == 1:
        # A bias or a norm, in F32; norms are near one. As numbers of f16, so that they stay what they are beside f16.
        values = (values if name.endswith("bias") else 1 + values).astype(np.float16).astype(np.float32)
        return values, values
    if kind in (T.F32, T.F16):
        values = values.astype(np.float32 if kind == T.F32 else np.float16)
        return values, values
    data = quantize(values, kind)
    return data, dequantize(data, kind).reshape(shape)


def shapes(config):
    hidden, width, dim = config["hidden"], config["width"], config["head_dim"]
    q, kv = config["heads"] * dim, config["kv_heads"] * dim
    found = {"model.embed_tokens.weight": (config["vocab"], hidden), "model.norm.weight": (hidden,)}
    if not config["tied"]:
        found["lm_head.weight"] = (config["vocab"], hidden)
    for i in range(config["layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (width, hidden),
            "mlp.up_proj.weight": (width, hidden),
            "mlp.down_proj.weight": (hidden, width),
        }
        if config["biases"]:
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found


def model(file, architecture, seed, kind, vocabulary, **changes):
    """Writes a model; `kind` is a format, or a function from name and columns to one."""
    config = dict(hidden=32, width=64, heads=4, kv_heads=2, head_dim=8, layers=2, vocab=64, tied=True, eps=1e-5, theta=1e4)
    config |= {"biases": architecture == "qwen2"} | changes
    writer = GGUFWriter(OUT / file, architecture)
    if vocabulary:
        config["vocab"] = vocabulary(writer)
        writer.add_chat_template(CHAT)
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden"])
    writer.add_block_count(config["layers"])
    writer.add_feed_forward_length(config["width"])
    writer.add_head_count(config["heads"])
    writer.add_head_count_kv(config["kv_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["eps"])
    writer.add_rope_freq_base(config["theta"])
    writer.add_vocab_size(config["vocab"])
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(config).items():
        of = kind(name, shape[-1]) if callable(kind) else kind
        if len(shape) == 1:
            of = T.F32
        data, weights[name] = packed(rng, name, shape, of)
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            data = in_turns(data, config["heads" if "q_proj" in name else "kv_heads"])
        writer.add_tensor(stored(name), data, raw_dtype=None if of in (T.F32, T.F16) else of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = [int(token) for token in rng.integers(3, config["vocab"], 40)]
    expected = logits(config, weights, tokens)[-KEPT:]
    (OUT / file).with_suffix(".logits").write_bytes(expected.astype(np.float32).tobytes())
    return {"file": file, "tokens": tokens, "deviation": round(float(expected.std()), 3)}


def mixture(name, columns):
    """Formats as a published mixture has them: rows that K blocks do not divide are in others."""
    if name == "model.embed_tokens.weight":
        return T.Q6_K
    if columns % 256:
        return T.Q5_0
    return T.Q8_0 if "v_proj" in name else T.Q4_K


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    llama2 = lambda writer: vocabularies.sentencepiece(writer, "llama2")
    wide = dict(hidden=256, width=32, heads=2, kv_heads=1, head_dim=16, theta=5e5)
    goldens = [
        model("llama-f32.gguf", "llama", 1, T.F32, None, tied=False),
        model("llama-f16.gguf", "llama", 2, T.F16, llama2),
        model("qwen2-f16.gguf", "qwen2", 3, T.F16, vocabularies.qwen, eps=1e-6, theta=1e6),
        model("llama-q8_0.gguf", "llama", 4, T.Q8_0, None, head_dim=16, tied=False),
        model("llama-q4_k.gguf", "llama", 5, mixture, None, **wide),
        model("qwen2-q8_0.gguf", "qwen2", 6, T.Q8_0, None, head_dim=16, tied=False, eps=1e-6, theta=1e6),
        model("qwen2-q4_k.gguf", "qwen2", 7, mixture, vocabularies.qwen, **wide | dict(eps=1e-6, theta=1e6)),
    ]
    (OUT / "goldens.json").write_text(json.dumps(goldens, indent=1) + "\n")
    for name, write in {
        "llama2": llama2,
        "gemma": lambda writer: vocabularies.sentencepiece(writer, "gemma"),
        "qwen": vocabularies.qwen,
        "llama3": vocabularies.llama3,
    }.items():
        writer = GGUFWriter(OUT / f"vocabulary-{name}.gguf", "llama")
        write(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


if __name__ == "__main__":
    main()
