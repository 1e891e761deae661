#!/usr/bin/env python3
"""Write the benchmark's models: Llamas with random f16 weights.

    python benches/peers/make_model.py OUT_DIR

OUT_DIR gets a dense one of 125M parameters as a Hugging Face directory (hf/) and as GGUF (dense.gguf), with the shape of
Lagoon's own CPU benchmark; and as GGUF one whose layers have 8 experts, two for a token (experts.gguf, 180M parameters).
The tokenizer splits at spaces; token i is the word `t<i>` from 15 on, so that a prompt's length is known exactly.
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
from safetensors.numpy import save_file

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
HEAD_DIM = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
EXPERTS = 8
EXPERTS_PER_TOKEN = 2
EXPERT_INNER = 512
SPECIAL = ["<unk>", "<s>", "</s>"]
# What the words are made of: a tokenizer of pieces has a piece for each character.
CHARACTERS = ["\u2581", "t", *"0123456789"]
# The first token that is a word.
FIRST_WORD = len(SPECIAL) + len(CHARACTERS)

# Hugging Face's name of a layer's tensor -> GGUF's.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def words():
    """The vocabulary: three special tokens, characters, then `t15`, `t16`, …"""
    return SPECIAL + CHARACTERS + [f"t{i}" for i in range(FIRST_WORD, SHAPE["vocab_size"])]


def weights(seed=0):
    """All tensors under their Hugging Face names, f16, with a standard deviation of 0.02 (norms: 1)."""
    rng = np.random.default_rng(seed)
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    kv = SHAPE["num_key_value_heads"] * HEAD_DIM

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns), dtype=np.float32) * 0.02).astype(np.float16)

    out = {"model.embed_tokens.weight": matrix(SHAPE["vocab_size"], hidden)}
    for layer in range(SHAPE["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            out[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float16)
    out["model.norm.weight"] = np.ones(hidden, np.float16)
    out["lm_head.weight"] = matrix(SHAPE["vocab_size"], hidden)
    return out


def write_hf(directory, tensors):
    """A Hugging Face directory with a tokenizer that mistral.rs reads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPE,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words())}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # mistral.rs only takes decoders that it knows; this is the one of SentencePiece models.
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": template}, indent=1))


def interleave(matrix, heads):
    """llama.cpp rotates neighbouring pairs where Hugging Face rotates halves: reorder the rows of q and k."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def with_experts(tensors, seed=1):
    """The dense model's tensors, with experts in place of its feed-forward layers; these are named as in GGUF."""
    rng = np.random.default_rng(seed)
    hidden = SHAPE["hidden_size"]

    def matrices(*shape):
        return (rng.standard_normal(shape, dtype=np.float32) * 0.02).astype(np.float16)

    out = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    for layer in range(SHAPE["num_hidden_layers"]):
        out[f"blk.{layer}.ffn_gate_inp.weight"] = matrices(EXPERTS, hidden).astype(np.float32)
        out[f"blk.{layer}.ffn_gate_exps.weight"] = matrices(EXPERTS, EXPERT_INNER, hidden)
        out[f"blk.{layer}.ffn_up_exps.weight"] = matrices(EXPERTS, EXPERT_INNER, hidden)
        out[f"blk.{layer}.ffn_down_exps.weight"] = matrices(EXPERTS, hidden, EXPERT_INNER)
    return out


def write_gguf(path, tensors, experts=False):
    """Weights as GGUF: matrices in f16, norms in f32 as llama.cpp wants them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("lagoon benchmark")
    if experts:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(EXPERTS_PER_TOKEN)
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(EXPERT_INNER if experts else SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(SHAPE["rms_norm_eps"])
    writer.add_rope_freq_base(SHAPE["rope_theta"])
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(SHAPE["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    vocabulary = words()
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2
    kinds += [gguf.TokenType.NORMAL] * (len(vocabulary) - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocabulary)
    writer.add_token_scores([0.0] * len(vocabulary))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    for layer in range(SHAPE["num_hidden_layers"]):
        for theirs, ours in LAYER_NAMES.items():
            tensor = tensors.get(f"model.layers.{layer}.{theirs}.weight")
            if tensor is None:
                continue  # a feed-forward layer that experts take the place of
            if theirs == "self_attn.q_proj":
                tensor = interleave(tensor, SHAPE["num_attention_heads"])
            elif theirs == "self_attn.k_proj":
                tensor = interleave(tensor, SHAPE["num_key_value_heads"])
            elif tensor.ndim == 1:
                tensor = tensor.astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", tensor)
    for name, tensor in tensors.items():
        if name.startswith("blk."):
            writer.add_tensor(name, tensor)
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"].astype(np.float32))
    writer.add_tensor("output.weight", tensors["lm_head.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(out):
    """Write all forms, unless they are there."""
    if all((out / name).exists() for name in ("dense.gguf", "experts.gguf", "hf/tokenizer_config.json")):
        return
    for packed in out.glob("*-*.gguf"):
        packed.unlink()
    tensors = weights()
    write_hf(out / "hf", tensors)
    for name, held in (("dense", tensors), ("experts", with_experts(tensors))):
        write_gguf(out / f"{name}.part", held, experts=name == "experts")
        (out / f"{name}.part").rename(out / f"{name}.gguf")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
