"""Llama's and Qwen2's forward pass in float64, on weights by their Hugging Face names."""

import numpy as np


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, theta):
    """Heads [tokens, heads, dim], halves paired."""
    tokens, _, dim = x.shape
    frequencies = theta ** (-np.arange(0, dim, 2) / dim)
    angles = np.arange(tokens)[:, None] * frequencies[None]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def logits(config, weights, tokens):
    """[tokens, vocabulary]."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    heads, kv_heads, dim = config["heads"], config["kv_heads"], config["head_dim"]
    x = w["model.embed_tokens.weight"][tokens]
    count = len(tokens)
    mask = np.triu(np.full((count, count), -np.inf), 1)
    for i in range(config["layers"]):
        of = lambda name: w[f"model.layers.{i}.{name}"]
        h = norm(x, of("input_layernorm.weight"), config["eps"])
        q, k, v = (h @ of(f"self_attn.{p}_proj.weight").T for p in "qkv")
        if config["biases"]:
            q, k, v = (y + of(f"self_attn.{p}_proj.bias") for y, p in zip((q, k, v), "qkv"))
        q = rotate(q.reshape(count, heads, dim), config["theta"])
        k = rotate(k.reshape(count, kv_heads, dim), config["theta"])
        k, v = (np.repeat(y.reshape(count, kv_heads, dim), heads // kv_heads, 1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", scores, v).reshape(count, -1) @ of("self_attn.o_proj.weight").T
        h = norm(x, of("post_attention_layernorm.weight"), config["eps"])
        gate, up = h @ of("mlp.gate_proj.weight").T, h @ of("mlp.up_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ of("mlp.down_proj.weight").T
    x = norm(x, w["model.norm.weight"], config["eps"])
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
