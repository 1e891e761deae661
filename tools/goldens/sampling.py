#!/usr/bin/env python3
"""Write tests/goldens/sampling.json: answers under rules of sampling, and log-probabilities, as transformers computes them.

    python tools/goldens/sampling.py              write it
    python tools/goldens/sampling.py --check      recompute it

The models are committed goldens in f32. Answers are greedy under a rule of `generate`; a prompt is taken whose best tokens are
clearly the best ones all along. Log-probabilities are the model's own, before any rule.
"""

import argparse
import json
import sys

import torch

from generate import ROOT, load, logits_of

MODELS = ("llama3_old", "gemma2", "deepseek_v2")
NEW_TOKENS, LIKELIEST, GAP_MIN = 16, 3, 0.01


def rules(plain):
    """Rules that change the greedy answer `plain`, as `generate` has them."""
    pair = [plain[2], plain[3]]
    return {
        "plain": {},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "repetition_reward": {"repetition_penalty": 0.8},
        "bad_words_ids": {"bad_words_ids": [[plain[0]], pair]},
        "sequence_bias": {"sequence_bias": [[[plain[1]], -4.0], [[plain[5]], 2.5]]},
    }


@torch.no_grad()
def answer(model, prompt, rule):
    """Greedy tokens under a rule, their log-probabilities and the likeliest tokens', and the smallest gap on the way."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0, output_scores=True, output_logits=True,
        return_dict_in_generate=True, **rule,
    )
    tokens = out.sequences[0, len(prompt):].tolist()
    best = torch.stack([scores[0].float().topk(2).values for scores in out.scores])
    rows = torch.stack([logits[0].float() for logits in out.logits]).log_softmax(-1)
    return tokens, scored(rows, tokens), float((best[:, 0] - best[:, 1]).min())


def scored(rows, tokens):
    """Of each row the log-probability of its token, and the likeliest tokens with theirs."""
    out = []
    for row, token in zip(rows, tokens):
        top = row.topk(LIKELIEST)
        likeliest = [[int(at), round(float(value), 6)] for at, value in zip(top.indices, top.values)]
        out.append({"logprob": round(float(row[token]), 6), "likeliest": likeliest})
    return out


def case(name):
    """The prompt and the answers of one model."""
    model = load(ROOT / "tests/goldens" / name, torch.float32)
    tokens = json.loads((ROOT / "tests/goldens" / name / "golden.json").read_text())["tokens"]
    for length in range(8, len(tokens)):
        prompt = tokens[:length]
        plain, _, gap = answer(model, prompt, {})
        answers = {rule: answer(model, prompt, options) for rule, options in rules(plain).items()}
        changed = all(found[0] != plain for rule, found in answers.items() if rule != "plain")
        if changed and min(gap, *(found[2] for found in answers.values())) > GAP_MIN:
            break
    else:
        sys.exit(f"{name}: no prompt whose answers are clear")
    prompt_rows = logits_of(model, prompt).log_softmax(-1)
    return {
        "model": name, "prompt": prompt, "prompt_scores": scored(prompt_rows, prompt[1:]),
        "answers": [
            {"rule": rule, "options": rules(plain)[rule], "tokens": found[0], "scores": found[1]}
            for rule, found in answers.items()
        ],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="recompute the committed file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = ROOT / "tests/goldens/sampling.json"
    text = "[\n" + ",\n".join(json.dumps(case(name)) for name in MODELS) + "\n]\n"
    if arguments.check:
        sys.exit(None if path.read_text() == text else f"{path} differs")
    path.write_text(text)


main()
