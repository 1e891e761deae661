#!/usr/bin/env python3
"""Train the byte-level BPE tokenizer (vocabulary 1024, one token per digit) on generated text.

python tools/passkey/tokenizer.py OUT_DIR
"""

import argparse
import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import make_document as md

# the published single-digit pattern (as in Qwen2); llama3 differs only in \p{N}{1,3}
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + '\n' + eos_token }}"
    "{% else %}{{ message['content'] | trim }}{% if message['role'] == 'user' %}{{ '\nAnswer:' }}{% else %}{{ '\n' }}{% endif %}{% endif %}{% endfor %}"
)


def train(out, vocab=1024, seed=7):
    """Train the tokenizer and write tokenizer.json and tokenizer_config.json to the directory `out`."""
    out = pathlib.Path(out)
    r = random.Random(seed)
    text = []
    for _ in range(300):
        text.append(md.document(r, 4000, 6)[0])
        for n in md.names_for(r, 40):
            text.append(
                md.KEY.format(name=n, key=md.make_key(r))
                + "\n"
                + md.QUESTION.format(name=n)
                + " "
                + md.make_key(r)
                + "\n"
            )
    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tk.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>"]
    tk.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=vocab - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    tk.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    assert tk.get_vocab_size() <= vocab, tk.get_vocab_size()
    tk.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|bos|> $A",
                pair="<|bos|> $A <|bos|>:1 $B:1",
                special_tokens=[("<|bos|>", tk.token_to_id("<|bos|>"))],
            ),
        ]
    )
    out.mkdir(parents=True, exist_ok=True)
    tk.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 65536,
        "chat_template": CHAT,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tk


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    tk = train(args.out, seed=args.seed)
    text, _ = md.document(random.Random(1), 1500, 6)
    words = md.PLACES + md.THINGS
    single = sum(len(tk.encode(" " + word, add_special_tokens=False).ids) == 1 for word in words)
    print(f"{tk.get_vocab_size()} tokens, {len(text) / len(tk.encode(text).ids):.2f} characters a token")
    print(f"{single} of {len(words)} words of names are one token")


if __name__ == "__main__":
    main()
