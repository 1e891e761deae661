#!/usr/bin/env python3
"""Exact retrieval accuracy of a pass-key model on fresh documents, f32 compute.

    python tools/passkey/evaluate.py MODEL [--tokenizer DIR] [--lengths 512,2048] [--docs 50] [--f16] [--json FILE]

MODEL is a model directory or a checkpoint (then --tokenizer names the directory of the tokenizer).  Every document is
fresh, has its keys at uniformly random depths, and is asked for each of them (each question by itself after the document,
whose keys and values are reused).  Greedy decoding gives the right answer if and only if the argmax is right at every
answer position given the right answer before it, which is what is computed.
"""

import argparse
import json
import pathlib
import random
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import make_document as md
from model import CFG, Llama

CHARS_PER_TOKEN = 3.37
QUESTION_TOKENS = 35


def load(path):
    """The model of a directory or a checkpoint, in f32."""
    path = pathlib.Path(path)
    if path.is_dir():
        from safetensors.torch import load_file

        tensors = {k: v.float() for k, v in load_file(path / "model.safetensors").items()}
    else:
        tensors = torch.load(path)
    model = Llama(CFG)
    model.load_state_dict(tensors)
    return model.eval()


def _layer(layer, x, cos, sin, past, need_output):
    """One layer on x with cached keys and values -> its output (None unless needed), the new cache."""
    attention = layer.self_attn
    batch, count, _ = x.shape
    heads, kv_heads, dim = attention.H, attention.K, attention.D
    h = layer.input_layernorm(x)
    k = attention.rot(attention.k_proj(h).view(batch, count, kv_heads, dim), cos, sin).transpose(1, 2)
    v = attention.v_proj(h).view(batch, count, kv_heads, dim).transpose(1, 2)
    before = 0
    if past is not None:
        before = past[0].shape[2]
        k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
    if not need_output:
        return None, (k, v)
    q = attention.rot(attention.q_proj(h).view(batch, count, heads, dim), cos, sin).transpose(1, 2)
    mask = None if before == 0 else torch.ones(count, before + count, dtype=torch.bool).tril(before)
    k_all, v_all = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k_all, v_all, attn_mask=mask, is_causal=mask is None)
    x = x + attention.o_proj(out.transpose(1, 2).reshape(batch, count, heads * dim))
    return x + layer.mlp(layer.post_attention_layernorm(x)), (k, v)


@torch.no_grad()
def forward(model, ids, past=None, need_logits=True):
    """Run `ids` after the cache `past` -> logits [len(ids), vocabulary] or None, the new cache."""
    before = past[0][0].shape[2] if past else 0
    x = model.model.embed_tokens(torch.tensor([ids]))
    positions = torch.arange(before, before + len(ids))[None]
    cos, sin = model.cos[positions].unsqueeze(2), model.sin[positions].unsqueeze(2)
    cache, layers = [], model.model.layers
    for i, layer in enumerate(layers):
        need_output = need_logits or i < len(layers) - 1
        x, layer_cache = _layer(layer, x, cos, sin, past[i] if past else None, need_output)
        cache.append(layer_cache)
    logits = F.linear(model.model.norm(x), model.model.embed_tokens.weight)[0] if need_logits else None
    return logits, cache


class Score:
    """Counts over the questions of one length."""

    def __init__(self):
        self.questions = self.exact = self.with_end = self.digits = self.one_per_doc = self.tokens = 0
        self.by_depth = [[0, 0] for _ in range(5)]

    def add(self, predicted, answer, depth, chosen):
        """One question: predicted and right token ids (a space, five digits, newline, eos)."""
        good = predicted[:6] == answer[:6]
        self.questions += 1
        self.exact += good
        self.with_end += predicted == answer
        self.digits += sum(x == y for x, y in zip(predicted[1:6], answer[1:6]))
        self.one_per_doc += good and chosen
        bucket = self.by_depth[min(4, int(5 * depth))]
        bucket[0] += good
        bucket[1] += 1


def evaluate(model, tokenizer, length, docs, keys, seed):
    """Accuracy on `docs` documents of about `length` tokens -> a record."""

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    rng, start, score = random.Random(seed * 1000003 + length), time.time(), Score()
    for _ in range(docs):
        text, pairs = md.document(rng, int((length - QUESTION_TOKENS) * CHARS_PER_TOKEN), keys)
        ids = [tokenizer.token_to_id("<|bos|>")] + encode(text)
        score.tokens += len(ids)
        _, cache = forward(model, ids, need_logits=False)
        chosen = rng.randrange(len(pairs))
        for j, (name, key) in enumerate(pairs):
            question = encode(md.QUESTION.format(name=name))
            answer = encode(f" {key}\n") + [tokenizer.token_to_id("<|eos|>")]
            logits, _ = forward(model, question + answer[:-1], cache)
            predicted = logits[len(question) - 1 :].argmax(-1).tolist()
            score.add(predicted, answer, text.index(md.KEY.format(name=name, key=key)) / len(text), j == chosen)
    return {
        "length": length,
        "mean_tokens": score.tokens // docs,
        "docs": docs,
        "keys": keys,
        "questions": score.questions,
        "exact": score.exact / score.questions,
        "one_per_doc": score.one_per_doc / docs,
        "with_newline_and_eos": score.with_end / score.questions,
        "digits": score.digits / score.questions / 5,
        "by_depth": [round(good / total, 3) if total else None for good, total in score.by_depth],
        "seconds": round(time.time() - start, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--tokenizer", type=pathlib.Path, help="directory of tokenizer.json (default: MODEL)")
    parser.add_argument("--lengths", default="512,2048,8192", help="document lengths in tokens")
    parser.add_argument("--docs", type=int, default=50)
    parser.add_argument("--keys", type=int, default=5, help="keys a document")
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--f16", action="store_true", help="round the weights of a checkpoint to f16 first")
    parser.add_argument("--json", type=pathlib.Path, help="also write the records here")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str((args.tokenizer or args.model) / "tokenizer.json"))
    model = load(args.model)
    if args.f16:
        for parameter in model.parameters():
            parameter.data = parameter.data.half().float()
    records = []
    for length in map(int, args.lengths.split(",")):
        records.append(evaluate(model, tokenizer, length, args.docs, args.keys, args.seed))
        print(json.dumps(records[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
