"""Training windows for train.py: log prose with key sentences in it, then questions with answers.

Sentences are tokenized once, up front; a window is put together from those pieces.  All randomness comes from the seed.
"""

import math
import random

import numpy as np
import torch

import make_document as md

POSITION_MAX = 65_536  # as in model.CFG: no position may reach it
ANSWER_WEIGHTS = [10.0, 7.0, 7.0, 7.0, 7.0]  # loss weights of an answer's five digits
NOT_KEY, ANSWER, STATEMENT = 0, 1, 2  # what a token is, for the accuracies that train.py prints


class Windows:
    """Makes windows.  `statement_share` and `shared_words` are set by the training loop as it goes.

    statement_share  the share of "questions" that repeat the statement word by word, which is easier to match
    shared_words     the probability that a name shares a word with another one of its window, which is harder
    """

    def __init__(self, tokenizer, seed, sentences=150_000):
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        self.numpy_random = np.random.default_rng(seed)
        self.statement_share = 0.6
        self.shared_words = 0.0
        rng = self.random
        texts = [md.sentence(rng) for _ in range(sentences)]
        self.bos, self.eos = tokenizer.token_to_id("<|bos|>"), tokenizer.token_to_id("<|eos|>")
        self.digits = np.array([tokenizer.token_to_id(str(i)) for i in range(10)])
        self.is_digit = np.zeros(tokenizer.get_vocab_size(), bool)
        self.is_digit[self.digits] = True
        self.middle = self._encode([" " + s for s in texts])
        self.last = self._encode([" " + s + "\n" for s in texts[: max(1, sentences // 5)]])
        self.headers = self._encode([md.header(rng) for _ in range(8_000)])
        self.hard = self._encode([" " + md.hard_sentence(rng) for _ in range(max(1, sentences // 7))])
        self.junk = self._encode([" " + md.junk_sentence(rng) for _ in range(max(1, sentences * 2 // 5))])
        # Sorted: the order of a set of strings changes from process to process.
        self.names = sorted({md.make_name(rng) for _ in range(20_000)})
        self.odd_names = sorted({md.make_name(rng, 1.0) for _ in range(20_000)})
        all_names = self.names + self.odd_names
        self.name_ids = dict(zip(all_names, self._encode([" " + n for n in all_names])))
        self.key_inline, self.key_line = self._one(" The pass key for the"), self._one("The pass key for the")
        self.key_is, self.key_end, self.key_end_line = self._one(" is "), self._one("."), self._one(".\n")
        self.asks, self.ask_end, self.newline = (
            [self._one(x) for x in md.ASK],
            self._one("?\nAnswer: "),
            self._one("\n"),
        )

    def _encode(self, texts):
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(e.ids, dtype=np.int32) for e in encoded]

    def _one(self, text):
        return self._encode([text])[0]

    def _pick_names(self, count, odd):
        rng, out = self.random, []
        while len(out) < count:
            name = rng.choice(self.odd_names if rng.random() < odd else self.names)
            if out and rng.random() < self.shared_words:
                (a, b), (c, d) = rng.choice(out).split(), name.split()
                mixed = f"{a} {d}" if rng.random() < 0.5 else f"{c} {b}"
                name = mixed if mixed in self.name_ids else name
            if name not in out:
                out.append(name)
        return out

    def _questions(self, names, keys, count):
        """`count` questions (or repeated statements) with answers -> ids, loss weights, kinds."""
        rng = self.random
        indices = range(len(names))
        asked = rng.choices(indices, k=count) if rng.random() < 0.5 else rng.sample(indices, min(count, len(names)))
        ids, weights, kinds = [], [], []
        for i in asked:
            name = self.name_ids[names[i]]
            if rng.random() < self.statement_share:
                ask, end, kind = np.concatenate([self.key_line, name, self.key_is]), [self.key_end_line], STATEMENT
            else:
                opening = self.asks[0] if rng.random() < 0.7 else rng.choice(self.asks)
                ask, end, kind = np.concatenate([opening, name, self.ask_end]), [self.newline, [self.eos]], ANSWER
            ids += [ask, keys[i], *end]
            weights += [np.full(len(ask), 0.5), ANSWER_WEIGHTS, *([1.0] * len(x) for x in end)]
            kinds += [np.zeros(len(ask)), np.full(5, kind), *([NOT_KEY] * len(x) for x in end)]
        return np.concatenate(ids), np.concatenate(weights), np.concatenate(kinds)

    def _prose(self, room, junk):
        """Pieces of prose that fill `room` tokens exactly."""
        rng, out, left, line_start = self.random, [], 0, True
        while room > 0:
            if line_start and rng.random() < 0.9:
                piece, line_start = rng.choice(self.headers), False
            elif left <= 0 and out:
                piece, line_start, left = rng.choice(self.last), True, rng.randint(3, 8)
            else:
                roll = rng.random()
                source = self.junk if roll < junk else self.hard if roll < junk + 0.04 else self.middle
                piece, line_start, left = rng.choice(source), False, left - 1
            piece = piece[-room:] if len(piece) > room else piece
            out.append(piece)
            room -= len(piece)
        return out

    def _document(self, statements, prose, bos):
        """The key sentences among the prose -> pieces, and for each whether it is prose."""
        rng = self.random
        order = rng.sample(statements, len(statements))
        at = sorted(rng.randrange(len(prose) + 1) for _ in order)
        pieces, is_prose, next_key = ([[self.bos]], [False], 0) if bos else ([], [], 0)
        for i in range(len(prose) + 1):
            while next_key < len(order) and at[next_key] == i:
                pieces.append(order[next_key])
                is_prose.append(False)
                next_key += 1
            if i < len(prose):
                pieces.append(prose[i])
                is_prose.append(True)
        return pieces, is_prose

    def _skips(self, size, reach, starts, prose, move):
        """PoSE: cut at up to two piece starts and skip positions there -> positions, chunk of each token, log weights.

        Log weights [3 (query's chunk), 3 (key's chunk)] are what the skipped positions add to the prose before them.
        """
        rng = self.random
        positions, chunk = np.arange(size), np.zeros(size, np.int64)
        log_weights = np.zeros((3, 3), np.float32)
        if not reach or rng.random() >= 0.85:
            return positions, chunk, log_weights
        skipped = int(math.exp(rng.uniform(math.log(16), math.log(min(reach, POSITION_MAX - 36 - size)))))
        share = rng.random() if rng.random() < 0.6 else 1.0
        near_end = starts[-1 - min(len(starts) - 1, rng.randrange(6))]
        second = int(near_end if rng.random() < 0.7 else rng.choice(starts))
        first = int(rng.choice([c for c in starts if c <= second]))
        skip1, skip2 = int(skipped * (1 - share)), int(skipped * share)
        chunk = (np.arange(size) >= first).astype(np.int64) + (np.arange(size) >= second)
        positions = positions + np.where(chunk >= 1, skip1, 0) + np.where(chunk >= 2, skip2, 0)
        prose0, prose1 = prose[:first].sum(), prose[first:second].sum()
        if prose0:
            log_weights[1, 0] = math.log(1 + skip1 / prose0)
        if prose0 + prose1:
            log_weights[2, :2] = math.log(1 + (skip1 + skip2) / (prose0 + prose1))
        if move and rng.random() < 0.5:
            positions = positions + rng.randrange(max(1, POSITION_MAX - 536 - int(positions[-1])))
        assert positions[-1] < POSITION_MAX
        return positions, chunk, log_weights

    def window(self, size, keys_count, questions, reach, odd):
        """-> ids, loss weights, kinds, positions, prose flags (each [size]), chunks, log weights [3, 3]."""
        rng = self.random
        names = self._pick_names(keys_count, odd)
        keys = [self.digits[self.numpy_random.integers(0, 10, 5)] for _ in names]
        ask_ids, ask_weights, ask_kinds = self._questions(names, keys, questions)
        statements = []
        for name, key in zip(names, keys):
            line = rng.random() < 0.15
            opening, end = (self.key_line, self.key_end_line) if line else (self.key_inline, self.key_end)
            statements.append(np.concatenate([opening, self.name_ids[name], self.key_is, key, end]))
        bos = rng.random() < 0.85
        room = size - len(ask_ids) - sum(map(len, statements)) - bos
        if room < 0:
            smaller = (keys_count, questions - 1) if questions > 1 else (keys_count - 1, 1)
            return self.window(size, *smaller, reach, odd)
        junk = rng.choice([0.02, 0.02, 0.3, 0.9]) if rng.random() < 0.25 else 0.0
        pieces, is_prose = self._document(statements, self._prose(room, junk), bos)
        lengths = [len(x) for x in pieces]
        document = np.concatenate(pieces)
        prose = np.zeros(size, bool)
        prose[: len(document)] = np.repeat(is_prose, lengths)
        weights = np.where(self.is_digit[document], 0.2, 1.0 if junk < 0.1 else 0.1)
        weights[self.is_digit[document] & ~prose[: len(document)]] = 0.03  # keys cannot be guessed: do not try
        ids = np.concatenate([document, ask_ids])
        skips = self._skips(size, reach, list(np.cumsum(lengths)), prose, move=not bos)
        kinds = np.concatenate([np.zeros(len(document)), ask_kinds])
        return ids, np.concatenate([weights, ask_weights]), kinds, skips[0], prose, skips[1], skips[2]

    def batch(self, stage, reach):
        """A batch for a stage of train.py, as tensors with a leading batch dimension."""
        rng = self.random
        rows = [
            self.window(stage.size, rng.randint(*stage.keys), rng.randint(*stage.questions), reach, stage.odd)
            for _ in range(stage.batch)
        ]
        ids, weights, kinds, positions, prose, chunks, log_weights = (np.stack(x) for x in zip(*rows))
        types = (np.int64, np.int64, np.float32, np.float32, bool, np.int64, np.float32)
        arrays = (ids, positions, weights, kinds, prose, chunks, log_weights)
        return tuple(torch.from_numpy(a.astype(t)) for a, t in zip(arrays, types))
