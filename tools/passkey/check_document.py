#!/usr/bin/env python3
"""Ask a model directory the questions of its questions.json about its document.txt (f32 compute, greedy).

    python tools/passkey/check_document.py models/passkey

The exit code is 0 only if every answer is right.
"""

import argparse
import json
import pathlib
import sys

from tokenizers import Tokenizer

import evaluate

ANSWER_TOKENS_MAX = 9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    directory = parser.parse_args().model
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = evaluate.load(directory)
    eos = tokenizer.token_to_id("<|eos|>")
    text = (directory / "document.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=True).ids
    print(len(ids), "tokens", len(text), "characters")
    _, document_cache = evaluate.forward(model, ids, need_logits=False)
    wrong = 0
    for question in json.loads((directory / "questions.json").read_text()):
        step = tokenizer.encode(question["prompt_suffix"], add_special_tokens=False).ids
        cache, out = document_cache, []
        while len(out) < ANSWER_TOKENS_MAX and eos not in out:
            logits, cache = evaluate.forward(model, step, cache)
            step = [int(logits[-1].argmax())]
            out += step
        answer = tokenizer.decode(out, skip_special_tokens=True)
        good = answer == f" {question['answer']}\n"
        wrong += not good
        print(question["answer"], repr(answer), "ok" if good else "WRONG")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
