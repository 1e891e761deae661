"""Small SentencePiece models and tiktoken ranks, and their own libraries' ids for odd texts.

Writes tests/goldens/tokenizers/<name>/: the file that a model of the family ships in place of tokenizer.json, the files beside it,
and text.json with the ids and the decoded text of each case. The ids are those of `sentencepiece` and `tiktoken`. Special tokens
are cut out of a text first, as transformers does: to SentencePiece itself they are letters.
"""

import argparse
import base64
import io
import json
import pathlib
import random
import re
import tempfile
import unicodedata

import sentencepiece
import tiktoken
from sentencepiece import sentencepiece_model_pb2 as schema

from text import MARK, PROSE, TEXTS

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "goldens" / "tokenizers"

# Written for this purpose.
MORE = """
Das Wasser steigt, und die Boote liegen nicht mehr im Sand. L'eau monte, la lune descend, et l'été finit à la plage.
潮が満ちると、船は砂の上から浮かびます。湖面很安静，船在水上，人在岸上。船 水 砂 岸 人 上 下
Вода поднимается, и лодки уходят. Η θάλασσα είναι ήσυχη. The office is far; 12 boats, 345 nets, 2026 lamps.
It's late, they're tired, I'll wait, we've seen it, he'd go. DON'T WAIT! IT'S LATE! x = (a + b) * 2; if x: return
0x1F < 0xA0 > 0x40
a  b   c    d     e
"""
LINES = [line for line in (PROSE + MORE * 3).strip().splitlines() if line]

# Spaces at both ends and in runs, controls, joined and flagged emoji, combining marks in and out of order, scripts, ligatures,
# case in contractions, digits, names of special tokens, of bytes and of user-defined pieces.
ODD = [
    *TEXTS,
    "  two leading",
    "trailing  ",
    "   ",
    "\n",
    "\n\n\n",
    "a\n\n\n\nb",
    "\t\ttabs\t",
    "a \n b \r\n c",
    " \u00a0 \u3000 \u2009 wide spaces\u3000",
    "zero\u200bwidth\u200d\ufeff",
    "\u2581mark\u2581\u2581in text",
    "<0x41><0x0A> byte names",
    "<unk>",
    "<s>",
    "<s>the boats</s> <s> the nets</s>",
    "</s>the  lamps",
    "IT'S they'RE I'll WE'VE he'd 'tis",
    "1 12 123 1234 12345 3.14",
    "湖面很安静船在水上 abc 船a水b",
    "潮が満ちるとカタカナ",
    "ﬁne oﬃce Ｆｕｌｌ ｗｉｄｔｈ ① ②\u0301",
    "e\u0301te\u0301 \u0301 a\u0323\u0302 a\u0302\u0323",
    "👩‍🚀👍🏽🇫🇮🇫",
    "soft\u00adhyphen ﷺ ㎞ t\u2c03e t\u3c03e",
    "हिन्दी தமிழ் עִבְרִית العربية",
    "\x00\x01\x7f nul",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠀀 𓂀",
    "user<b>defined</b> <b> b<b",
    "<start_of_turn>user\nhello<end_of_turn>",
    "<|start|>hello<|end|>  there<|start|><|end|>",
    "<pad>pads<pad>",
    "x" * 40,
    "aababbabaabbbaababab bababababba aaaaaaaaa bbbbbb",
    " " * 17 + "indent" + " " * 5,
    "if x:\n    return (a + b) * 2\n",
    "The lagoon isQuiet, BUT theTide ÉTÉ Été été.",
    "\ud7ff\ue000\ufffd\U0010ffff",
]

# Rules in SentencePiece's form, small: its own of NFKC alone have 240 kB. A key of several characters, a longer key over a
# shorter one, removals, and spaces; two keys that share the end of the trie.
RULES = {
    "ﬁ": "fi", "ﬃ": "ffi", "①": "1", "②": "2", "e\u0301": "é", "a\u0323\u0302": "ậ", "a\u0323": "ạ", "\u3000": " ",
    "\u00a0": " ", "\u2009": " ", "\t": " ", "\n": " ", "\r": " ", "\u00ad": "", "\u200b": " ", "\ufeff": "",
    "㎞": "km", "\x01": "", "\u2c03": "h", "\u3c03": "h", "<": "＜", "b>": "B＞",
    **{chr(0xFEE0 + ord(c)): c for c in map(chr, range(ord("A"), ord("z") + 1))},
}


def write(directory, texts):
    """Write text.json."""
    cases = ",\n".join("  " + json.dumps(case, ensure_ascii=True) for case in texts)
    (directory / "text.json").write_text('{\n "texts": [\n' + cases + "\n ]\n}\n")


def cut(text, special):
    """Split the text at special tokens, the longest first, into (part, its id or None, place)."""
    if not special:
        return [(text, None, 0)]
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    parts, at = [], 0
    for found in pattern.finditer(text):
        parts += [(text[at : found.start()], None, at), (found.group(), special[found.group()], found.start())]
        at = found.end()
    return parts + [(text[at:], None, at)]


def train(**options):
    """A model trained on LINES, as bytes."""
    out = io.BytesIO()
    with tempfile.TemporaryDirectory() as scratch:
        if options.pop("rules", False):
            rules = pathlib.Path(scratch) / "rules.tsv"
            code = lambda text: " ".join(f"{ord(c):X}" for c in text)
            rules.write_text("".join(f"{code(key)}\t{code(value)}\n" for key, value in RULES.items()))
            options["normalization_rule_tsv"] = str(rules)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_writer=out, num_threads=1, minloglevel=2, **options
        )
    model = schema.ModelProto.FromString(out.getvalue())
    model.normalizer_spec.normalization_rule_tsv = ""
    return model


def sentencepiece_golden(name, model, config, added=None):
    """Write a model with its tokenizer_config.json and the cases; `added` go to files of their own, as special tokens."""
    directory = ROOT / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.model").write_bytes(model.SerializeToString())
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    if added:
        (directory / "added_tokens.json").write_text(json.dumps(added, indent=1) + "\n")
        names = {"additional_special_tokens": list(added)}
        (directory / "special_tokens_map.json").write_text(json.dumps(names, indent=1) + "\n")
    whole = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    inner = schema.ModelProto()
    inner.CopyFrom(model)
    # Text after a special token gets no leading space, unless the model is marked as legacy.
    inner.normalizer_spec.add_dummy_prefix &= config.get("legacy", True)
    inner = sentencepiece.SentencePieceProcessor(model_proto=inner.SerializeToString())
    special = {piece.piece: i for i, piece in enumerate(model.pieces) if piece.type in (2, 3)}
    special |= {token["content"]: int(i) for i, token in config.get("added_tokens_decoder", {}).items()} | (added or {})
    bos = [special[config["bos_token"]]] if config.get("add_bos_token", True) else []
    eos = [special[config["eos_token"]]] if config.get("add_eos_token") else []
    texts = []
    for text in ODD:
        ids = []
        for part, token, at in cut(text, special):
            if token is None:
                ids += (inner if at else whole).encode(part)
            else:
                ids.append(token)
        decoded = whole.decode([i for i in ids if i not in special.values()])
        texts.append({"text": text, "ids": ids, "ids_with_special": bos + ids + eos, "decoded": decoded})
    write(directory, texts)


def sentencepieces():
    """The models: Llama's kind, Gemma's, one with rules for characters, and two unigram ones."""
    plain = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    }
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    added = {"content": "<|end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    small = {"character_coverage": 0.98, "vocab_size": 520}
    llama = train(model_type="bpe", **plain, **small)
    sentencepiece_golden(
        "llama2",
        llama,
        {"tokenizer_class": "LlamaTokenizer", **names, "legacy": True, "add_bos_token": True}
        | {"added_tokens_decoder": {str(len(llama.pieces)): added | {"content": "<|start|>"}, "540": added}},
    )
    first = {"tokenizer_class": "LlamaTokenizer", **names, "legacy": False, "add_eos_token": True}
    sentencepiece_golden("llama2_first", llama, first, {"<|start|>": len(llama.pieces), "<|end|>": len(llama.pieces) + 1})
    symbols = ["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "\n\n\n", MARK * 2, MARK * 3, MARK * 4, "<b>", "</b>"]
    gemma = train(
        model_type="bpe",
        add_dummy_prefix=False,
        user_defined_symbols=symbols,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
        **plain,
        **small,
    )
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    turns = {
        str(i): added | {"content": piece.piece}
        for i, piece in enumerate(gemma.pieces)
        if piece.piece in ("<start_of_turn>", "<end_of_turn>")
    }
    # A tab is merged with others, but no piece itself: its byte's piece stands for it.
    gemma.pieces.add(piece="\t\t", score=-1000.0)
    config = {"tokenizer_class": "GemmaTokenizer", **names, "added_tokens_decoder": turns}
    sentencepiece_golden("gemma", gemma, config)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    symbols = {"user_defined_symbols": ["<b>", "</b>", "ﬁne"]}
    rules = train(model_type="bpe", rules=True, byte_fallback=True, vocab_size=560, character_coverage=0.98, **symbols)
    sentencepiece_golden("bpe_rules", rules, names | {"legacy": False})
    rules = train(model_type="unigram", rules=True, vocab_size=200, **symbols)
    sentencepiece_golden("unigram_rules", rules, names | {"add_bos_token": False, "add_eos_token": True})
    # Without pieces of spaces only: several ways to cut a run have the same score, and the sum's rounding decides.
    plain = {option: value for option, value in plain.items() if option != "allow_whitespace_only_pieces"}
    bytewise = train(model_type="unigram", **plain, vocab_size=440)
    sentencepiece_golden("unigram_bytes", bytewise, names, {"<|end|>": len(bytewise.pieces)})


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
LOWER, UPPER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Ll}", r"\p{Lu}\p{Lt}"))
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def learn_ranks(count):
    """Byte-level BPE ranks: bytes in a shuffled order, learned merges, and tokens that test the order of merging.

    The tokens of a and b have shuffled ranks, so that a token may come before its parts; some cannot be reached by merges at
    all, and are found only as whole words.
    """
    import regex

    order = random.Random(7)
    tokens = [bytes([byte]) for byte in range(256)]
    order.shuffle(tokens)
    # The pattern without the intersections, which `regex` writes in another way.
    words = [[bytes([b]) for b in word.encode()] for line in LINES for word in regex.findall(CL100K, line)]
    while len(tokens) < 256 + count:
        pairs = {}
        for word in words:
            for pair in zip(word, word[1:]):
                pairs[pair] = pairs.get(pair, 0) + 1
        best = max(sorted(pairs), key=pairs.get)
        tokens.append(best[0] + best[1])
        for word in words:
            at = 0
            while at + 1 < len(word):
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = [best[0] + best[1]]
                at += 1
    strange = {bytes(order.choice(b"ab") for _ in range(order.randint(2, 5))) for _ in range(40)}
    strange |= {b" unreachable", " 湖面很".encode(), "湖面很安静船在水上".encode(), b" " * 9, b"xxxxx"}
    strange = sorted(strange - set(tokens))
    order.shuffle(strange)
    return {token: rank for rank, token in enumerate(tokens + strange)}


def tiktoken_golden(name, file, ranks, pattern, special, config, bos=None, nfc=False):
    """Write a file of ranks, the tokenizer_config.json beside it, and the cases."""
    directory = ROOT / name
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (directory / file).write_text("".join(lines))
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    texts = []
    for text in [*ODD, "unreachable  unreachable", *special]:
        given = unicodedata.normalize("NFC", text) if nfc else text
        ids = encoding.encode(given, allowed_special="all")
        decoded = encoding.decode([i for i in ids if i not in special.values()])
        texts.append({"text": text, "ids": ids, "ids_with_special": ([] if bos is None else [bos]) + ids, "decoded": decoded})
    write(directory, texts)


def tiktokens():
    """Ranks as Llama 3's, Qwen's and Kimi's models have them."""
    ranks = learn_ranks(300)
    first = len(ranks)
    special = {"<|begin_of_text|>": first, "<|end_of_text|>": first + 1, "<|start|>": first + 6, "<|end|>": first + 9}
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    decoder = {str(i): {"content": text, **flags} for text, i in special.items()}
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config["added_tokens_decoder"] = decoder
    tiktoken_golden("llama3", "tokenizer.model", ranks, CL100K, special, config, bos=first)
    special = {text: first + i for i, text in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])}
    special |= {f"<|extra_{i}|>": first + 3 + i for i in range(205)}
    shown = {text: i for text, i in special.items() if i < first + 6}
    tiktoken_golden("qwen", "qwen.tiktoken", ranks, QWEN, shown, {"tokenizer_class": "QWenTokenizer"}, nfc=True)
    special = {"[BOS]": first, "[EOS]": first + 1, "<|im_end|>": first + 2, "<|end|>": first + 5}
    decoder = {str(i): {"content": text, **flags} for text, i in special.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    config["added_tokens_decoder"] = decoder
    special |= {f"<|reserved_token_{i}|>": i for i in (first + 3, first + 255)}
    tiktoken_golden("kimi", "tiktoken.model", ranks, KIMI, special, config)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    sentencepieces()
    tiktokens()


if __name__ == "__main__":
    main()
