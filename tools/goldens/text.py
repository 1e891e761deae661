"""A small tokenizer in the manner of SentencePiece (byte fallback, U+2581 for spaces), and recorded text cases."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<unk>", "<s>", "</s>"]
MARK = "\u2581"

# Written for this purpose; it only has to contain enough repeated words to learn merges from.
PROSE = """
The lagoon is quiet before the tide comes in. The boats lie on the sand and wait for the water.
When the water rises, the boats rise with it, and the men who own the boats come down to the shore.
They carry nets and ropes, lamps and bread. One of them counts the boats and writes the number in a book.
The number in the book is the same as the number on the shore, or else somebody has to go and look.
In the evening the lamps are lit, the nets are dried, and the bread is eaten. Then the lagoon is quiet again.
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ bos_token + 'System: ' + message['content'] | trim + '\n' }}"
    "{% elif message['role'] == 'user' %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ 'User: ' + message['content'] | trim + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] | trim + eos_token + '\n' }}"
    "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

# Plain words, runs of spaces, letters outside the vocabulary (bytes), joined emoji, combining marks, mixed scripts.
TEXTS = [
    "the boats lie on the sand",
    " leading space",
    "two  spaces   three",
    "line\nbreak\ttab",
    "naïve café",
    "日本語のテキスト",
    "emoji 👩‍🚀 and 🇫🇮!",
    "e\u0301 combining",
    "price 1,234.50 €",
    "<s> special tokens in the text </s>",
    "",
    " ",
    "mixed абв lagoon",
]

CHATS = [
    [{"role": "user", "content": "How many boats?"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "How many boats?"},
        {"role": "assistant", "content": "Seven."},
        {"role": "user", "content": "And nets?\n"},
    ],
]


def sentencepiece_like(vocab_size):
    """A byte-fallback BPE tokenizer: 3 specials, 256 byte tokens, then letters and learned merges."""
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always")
    room = vocab_size - len(SPECIAL) - 256
    learner.train_from_iterator(
        PROSE.strip().splitlines(),
        trainers.BpeTrainer(vocab_size=room, special_tokens=[], show_progress=False),
    )
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    vocab = {}
    for piece in SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + pieces:
        vocab[piece] = len(vocab)
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learned["merges"]]
    out = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    out.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    out.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    out.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    out.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", vocab["<s>"])]
    )
    assert out.get_vocab_size() <= vocab_size
    return out


def write_tokenizer(directory, vocab_size):
    """Write tokenizer.json and tokenizer_config.json."""
    sentencepiece_like(vocab_size).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_cases(model_directory, out_file, chats):
    """Record the reference's ids and texts for TEXTS and `chats` with the tokenizer of model_directory.

    The ids and the decoded text are those of the `tokenizers` library, the rendered chats those of transformers.
    """
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    texts = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        texts.append(
            {
                "text": text,
                "ids": ids,
                "ids_with_special": tokenizer.encode(text, add_special_tokens=True).ids,
                "decoded": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    full = AutoTokenizer.from_pretrained(model_directory)
    rendered = []
    for messages in chats:
        for prompt in (True, False):
            text = full.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            rendered.append({"messages": messages, "add_generation_prompt": prompt, "rendered": text})
    lines = [",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases) for cases in (texts, rendered)]
    out_file.write_text('{\n "texts": [\n' + lines[0] + '\n ],\n "chats": [\n' + lines[1] + "\n ]\n}\n")
