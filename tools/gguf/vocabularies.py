"""Vocabularies of tests/goldens/tokenizers as a GGUF file has them, written with the gguf package."""

import base64
import json
from pathlib import Path

from gguf import TokenType
from sentencepiece import sentencepiece_model_pb2 as schema

GOLDENS = Path(__file__).resolve().parents[2] / "tests/goldens/tokenizers"


def added(name):
    """Added tokens by id."""
    config = json.loads((GOLDENS / name / "tokenizer_config.json").read_text())
    return {int(id): token["content"] for id, token in config.get("added_tokens_decoder", {}).items()}


def padded(tokens, kinds, extra):
    """Puts tokens at their ids; ids between them that no token has are unused."""
    for id, text in sorted(extra.items()):
        while len(tokens) < id:
            tokens.append(f"[PAD{len(tokens)}]".encode())
            kinds.append(TokenType.UNUSED)
        if id == len(tokens):
            tokens.append(text.encode())
            kinds.append(TokenType.CONTROL)
        else:
            tokens[id], kinds[id] = text.encode(), TokenType.CONTROL


def sentencepiece(writer, name):
    model = schema.ModelProto()
    model.ParseFromString((GOLDENS / name / "tokenizer.model").read_bytes())
    tokens = [piece.piece.encode() for piece in model.pieces]
    kinds = [TokenType(piece.type) for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    padded(tokens, kinds, added(name))
    scores += [-1000.0] * (len(tokens) - len(scores))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    ids = {token: id for id, token in enumerate(tokens)}
    for role, texts in {"bos": [b"<s>", b"<bos>"], "eos": [b"</s>", b"<eos>"]}.items():
        (id,) = (ids[text] for text in texts if text in ids)
        getattr(writer, f"add_{role}_token_id")(id)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(model.normalizer_spec.add_dummy_prefix)
    return len(tokens)


def alphabet():
    """GPT-2's letters by byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(0x100 + i) for i, byte in enumerate(rest)}}


def splits(token, ranks):
    """All pairs of tokens that a token consists of, as transformers makes merges of ranks: merging reaches at most one."""
    pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
    return [(a, b) for a, b in pairs if a in ranks and b in ranks]


def ranks(writer, name, file, pre, special):
    lines = (GOLDENS / name / file).read_bytes().splitlines()
    by_token = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = alphabet()
    spell = lambda token: "".join(letters[byte] for byte in token)
    assert sorted(by_token.values()) == list(range(len(by_token)))
    ordered = sorted(by_token, key=by_token.get)
    tokens, kinds = [spell(token).encode() for token in ordered], [TokenType.NORMAL] * len(ordered)
    merges = [pair for token in ordered for pair in splits(token, by_token)]
    padded(tokens, kinds, {**{len(ordered) + i: text for i, text in enumerate(special)}, **added(name)})
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(map(spell, pair)) for pair in merges])
    return len(tokens)


def qwen(writer):
    extras = [f"<|extra_{i}|>" for i in range(205)]
    return ranks(writer, "qwen", "qwen.tiktoken", "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *extras])


def llama3(writer):
    count = ranks(writer, "llama3", "tokenizer.model", "llama-bpe", [])
    writer.add_bos_token_id(585)
    writer.add_eos_token_id(586)
    return count
