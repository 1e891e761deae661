#!/usr/bin/env python3
"""Turn a checkpoint of train.py into a Hugging Face model directory (f16 safetensors).

    python tools/passkey/export.py CKPT_DIR/final.pt OUT_DIR [--check]

OUT_DIR already holds the tokenizer.  --check loads what was written with transformers and compares: the logits must
agree with this directory's own model, and the tokenizers must agree.  It also prints samples.
"""

import argparse
import json
import os
import pathlib
import random

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

import make_document as md
from model import CFG, Llama


def write(checkpoint, out):
    """Write model.safetensors, config.json and generation_config.json; returns the f16 tensors."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = {"bos_token_id": tokenizer.token_to_id("<|bos|>"), "eos_token_id": tokenizer.token_to_id("<|eos|>")}
    tensors = {k: v.to(torch.float16).contiguous() for k, v in torch.load(checkpoint).items()}
    assert all(torch.isfinite(v).all() for v in tensors.values()), "a weight is not finite in f16"
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pretraining_tp": 1,
        "rope_scaling": None,
        **ids,
        "torch_dtype": "float16",
        **CFG,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / "generation_config.json").write_text(json.dumps({**ids, "do_sample": False}, indent=1))
    return tensors


@torch.no_grad()
def check(out, tensors):
    """Compare transformers' logits for the exported model with our own, and print its answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer, plain = AutoTokenizer.from_pretrained(out), Tokenizer.from_file(str(out / "tokenizer.json"))
    own = Llama(CFG)
    own.load_state_dict({k: v.float() for k, v in tensors.items()})
    own.eval()
    text, keys = md.document(random.Random(5), 6000, 5)
    question = md.QUESTION.format(name=keys[2][0])
    ids = tokenizer(text + question, return_tensors="pt").input_ids
    parts = [plain.encode(part, add_special_tokens=False).ids for part in (text, question)]
    assert ids[0].tolist() == [plain.token_to_id("<|bos|>")] + parts[0] + parts[1], "a token spans the boundary"
    theirs, ours = model(ids).logits, own(ids, torch.arange(ids.shape[1])[None])
    difference = float((theirs - ours).abs().max())
    print(f"{ids.shape[1]} tokens, largest logit difference to transformers {difference:.2e}")
    assert difference < 1e-3 * max(1.0, float(theirs.abs().max())), "the exported model is not the trained one"

    def generate(ids, count, **how):
        return tokenizer.decode(model.generate(ids, max_new_tokens=count, **how)[0, ids.shape[1] :].tolist())

    print("answer", repr(generate(ids, 12, do_sample=False)), "expected", keys[2])
    message = {"role": "user", "content": f"{text}Question: what is the pass key for the {keys[1][0]}?"}
    chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    chat_ids = torch.tensor([tokenizer.encode(chat, add_special_tokens=False)])
    print("chat ends", repr(chat[-60:]), "->", repr(generate(chat_ids, 12, do_sample=False)), "expected", keys[1])
    prompt = tokenizer("Day 12, 4 June. Wind", return_tensors="pt").input_ids
    for how in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 40}):
        torch.manual_seed(0)
        print(how, repr(generate(prompt, 60, **how)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--check", action="store_true", help="compare with transformers")
    args = parser.parse_args()
    tensors = write(args.checkpoint, args.out)
    if args.check:
        check(args.out, tensors)


if __name__ == "__main__":
    main()
