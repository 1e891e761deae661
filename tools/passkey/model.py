"""A small Llama (same computation and parameter names as transformers' LlamaForCausalLM), for training on CPU."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

CFG = dict(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rope_theta=1e8,
    rms_norm_eps=1e-5,
    max_position_embeddings=65536,
)


def rope_table(cfg, n):
    """Cosines and sines of positions 0..n, each [n, head_dim / 2], f32."""
    d = cfg["head_dim"]
    inv = 1.0 / cfg["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    f = torch.outer(torch.arange(n, dtype=torch.float32), inv)
    return f.cos(), f.sin()


class RMSNorm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, d = c["hidden_size"], c["head_dim"]
        self.H, self.K, self.D = c["num_attention_heads"], c["num_key_value_heads"], d
        self.q_proj = nn.Linear(h, self.H * d, bias=False)
        self.k_proj = nn.Linear(h, self.K * d, bias=False)
        self.v_proj = nn.Linear(h, self.K * d, bias=False)
        self.o_proj = nn.Linear(self.H * d, h, bias=False)

    def rot(self, x, cos, sin):  # x [B,T,n,D]; half-split rotation as in transformers
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x, cos, sin, mask):
        """x [B,T,hidden]; mask None (causal) or [B,1,T,T], added to the scores."""
        B, T, _ = x.shape
        q = self.rot(self.q_proj(x).view(B, T, self.H, self.D), cos, sin)
        k = self.rot(self.k_proj(x).view(B, T, self.K, self.D), cos, sin)
        v = self.v_proj(x).view(B, T, self.K, self.D)
        q = q.to(v.dtype).transpose(1, 2)
        k = k.to(v.dtype).transpose(1, 2).repeat_interleave(self.H // self.K, 1)
        v = v.transpose(1, 2).repeat_interleave(self.H // self.K, 1)
        if self.training:  # plain batched matmuls: on this CPU faster than SDPA's backward
            s = (q @ k.transpose(-1, -2)).float() * self.D**-0.5
            i = torch.arange(T, device=x.device)
            s = torch.where(i[:, None] >= i[None, :], s, float("-inf"))
            if mask is not None:
                s = s + mask
            o = s.softmax(-1).to(v.dtype) @ v
            return self.o_proj(o.transpose(1, 2).reshape(B, T, self.H * self.D))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, self.H * self.D))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, m = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(h, m, bias=False)
        self.up_proj = nn.Linear(h, m, bias=False)
        self.down_proj = nn.Linear(m, h, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        e = c["rms_norm_eps"]
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], e)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], e)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.model = Inner(c)
        for n, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.05 if "embed" in n else p.shape[1] ** -0.5
                if "o_proj" in n or "down_proj" in n:
                    std *= 0.5
                nn.init.normal_(p, 0, std)
        self.init_match()
        c_, s_ = rope_table(c, c["max_position_embeddings"])
        self.register_buffer("cos", c_, False)
        self.register_buffer("sin", s_, False)

    @torch.no_grad()
    def init_match(self):
        """Start near a solution; without it the circuit that matches names did not form in five minutes of training.

        Half of layer 0's heads look at the last few tokens, by position only.  In layers 1 and 2 the first kv head
        compares like with like: equal query and key projections in the slow, nearly position-free dimensions.
        """
        c, d = self.c, self.c["head_dim"]
        half, group = d // 2, c["num_attention_heads"] // c["num_key_value_heads"]
        frequency = 1.0 / c["rope_theta"] ** (torch.arange(half) / half)
        # Column 0 of the embedding is the same for all tokens, so that a projection of it depends on the position only.
        self.model.embed_tokens.weight[:, 0] = 0.3
        unit = 5.6 / 4
        first = self.model.layers[0].self_attn
        query, key = first.q_proj.weight, first.k_proj.weight
        key[:d] *= 0.2
        query[: group * d] *= 0.2
        key[:d, 0] = 0
        query[: group * d, 0] = 0
        first.v_proj.weight[:, 0] = 0
        for i in range(1, 8):
            key[i, 0] = 1 / unit
            for head, distance in enumerate((2.5, 5.0)):
                query[head * d + i, 0] = math.cos(frequency[i] * distance) / unit
                query[head * d + half + i, 0] = -math.sin(frequency[i] * distance) / unit
        first.o_proj.weight[:, : group * d] *= 2
        slow = [i for i in range(d) if i % half >= 19]
        fast = [i for i in range(d) if i % half < 19]
        for layer in self.model.layers[1:3]:
            query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
            key[fast] *= 0.3
            key[:, 0] = 0
            for head in range(group):
                query[[head * d + i for i in fast]] *= 0.3
                query[[head * d + i for i in slow]] = key[slow] * 2

    def forward(self, ids, pos, mask=None):
        """Logits [B,T,vocabulary] of ids at positions pos (both [B,T])."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[pos].unsqueeze(2), self.sin[pos].unsqueeze(2)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)
