#!/usr/bin/env python3
"""Train the pass-key model on the CPU.

    python tools/passkey/train.py OUT_DIR --checkpoints CKPT_DIR [--minutes 34] [--seed 1]

OUT_DIR gets (or already has) the tokenizer; CKPT_DIR gets final.pt, which export.py turns into a model directory.

Two devices make short windows stand for long documents:
  positions  PoSE: the window is cut into up to three contiguous chunks and position numbers are skipped between them
  dilution   the skipped positions get attention mass too: for queries after the skip, every prose token before it counts
             1 + skipped / tokens times (the log of that is added to its score), as if the prose were that much longer
The range of the skips grows with the accuracy of the answers, from 64 to 64,000 positions.
"""

import argparse
import dataclasses
import json
import pathlib
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import tokenizer as passkey_tokenizer
from data import ANSWER, STATEMENT, Windows
from model import CFG, Llama

REACH_MIN, REACH_MAX = 64.0, 64_000.0


@dataclasses.dataclass
class Stage:
    """Windows of `size` tokens, `batch` of them a step; ranges for keys and questions; the share of invented names."""

    size: int
    batch: int
    keys: tuple
    questions: tuple
    odd: float
    plain_attention: bool  # batched matrix products instead of SDPA: faster for short windows on a CPU


STAGES = [
    Stage(128, 96, (2, 4), (2, 4), 0.1, True),
    Stage(512, 24, (3, 10), (3, 8), 0.25, False),
    Stage(2048, 4, (6, 24), (8, 20), 0.25, False),
    Stage(8192, 1, (10, 60), (20, 50), 0.25, False),
]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, help="directory of the tokenizer (made when missing)")
    parser.add_argument("--checkpoints", type=pathlib.Path, required=True, help="directory for checkpoints")
    parser.add_argument("--minutes", type=float, default=34, help="time for training")
    parser.add_argument("--steps", type=int, help="stop after this many steps, and schedule by steps instead of time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate of the matrices")
    parser.add_argument("--init", type=pathlib.Path, help="checkpoint to start from")
    parser.add_argument("--reach", type=float, default=REACH_MIN, help="range of skipped positions to start with")
    parser.add_argument("--stages", default="0.15,0.50,0.82", help="shares of the run after which stages 0, 1, 2 end")
    parser.add_argument("--start-stage", type=int, default=0, choices=range(len(STAGES)))
    parser.add_argument("--batch", type=int, help="windows a step, for every stage (for small trial runs)")
    parser.add_argument("--sentences", type=int, default=150_000, help="different sentences of prose")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile (it needs a C++ compiler)")
    return parser.parse_args()


def make_loss(model):
    """The loss function: -> weighted loss, accuracy on statements, accuracy on answers, loss of the prose."""

    def loss(ids, positions, weights, kinds, prose, chunks, log_weights):
        rows, size = ids.shape
        of_query = torch.gather(log_weights, 1, chunks[:, :, None].expand(rows, size, 3))
        mask = torch.gather(of_query, 2, chunks[:, None, :].expand(rows, size, size)) * prose[:, None, :]
        i = torch.arange(size)
        mask = torch.where(i[:, None] >= i[None, :], mask, float("-inf"))[:, None].to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, positions, mask)
        logits, targets, weights, kinds = logits[:, :-1].float(), ids[:, 1:], weights[:, 1:], kinds[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
        hits = logits.argmax(-1) == targets
        answer, statement, full = (kinds == ANSWER).float(), (kinds == STATEMENT).float(), (weights == 1).float()
        return (
            (losses * weights).sum() / weights.sum(),
            (hits * statement).sum() / (statement.sum() + 1e-6),
            (hits * answer).sum() / (answer.sum() + 1e-6),
            (losses * full).sum() / (full.sum() + 1e-6),
        )

    return loss


def make_optimizers(model, lr):
    """Muon for the matrices, AdamW for embeddings and norms -> [(optimizer, its peak learning rate)]."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
    rest = [p for name, p in named if p.dim() != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [(muon, lr), (adam, lr * 0.75)]


class Trainer:
    """The loop's state: progress, accuracy of the answers, and the stage and parameters that depend on both."""

    def __init__(self, args):
        self.args, self.start = args, time.time()
        torch.manual_seed(args.seed)
        torch.set_num_threads(args.threads)
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        if not (args.out / "tokenizer.json").exists():
            passkey_tokenizer.train(args.out)
        self.windows = Windows(Tokenizer.from_file(str(args.out / "tokenizer.json")), args.seed, args.sentences)
        self.model = Llama(CFG)
        if args.init:
            self.model.load_state_dict(torch.load(args.init))
        self.loss = make_loss(self.model)
        if not args.no_compile:
            self.loss = torch.compile(self.loss, dynamic=False)
        self.optimizers = make_optimizers(self.model, args.lr)
        self.stage_ends = [float(x) for x in args.stages.split(",")] + [1.0]
        assert len(self.stage_ends) == len(STAGES), "--stages takes one number less than there are stages"
        self.stage, self.reach, self.accuracy, self.step, self.tokens = args.start_stage, args.reach, 0.0, 0, 0
        count = sum(p.numel() for p in self.model.parameters())
        print(f"{count:,} parameters, data ready in {time.time() - self.start:.0f} s", flush=True)

    def save(self, tag):
        torch.save(self.model.state_dict(), self.args.checkpoints / f"{tag}.pt")

    def progress(self):
        """How much of the run is over, 0 to 1."""
        if self.args.steps is not None:
            return self.step / self.args.steps
        return (time.time() - self.start) / (self.args.minutes * 60)

    def choose_stage(self, progress):
        """Enter the next stage when the last one's share of the run is over, and set the parameters of the stage."""
        while progress >= self.stage_ends[self.stage]:
            self.stage += 1
            self.save(f"stage{self.stage}")
            print("stage", self.stage, flush=True)
        if self.stage == 0 and self.reach >= REACH_MAX and self.accuracy > 0.93:
            self.stage_ends[0] = progress
        stage = STAGES[self.stage]
        self.model.train(stage.plain_attention)
        self.windows.statement_share = 0.6 if self.accuracy < 0.75 and self.stage == 0 else 0.1
        self.windows.shared_words = 0.4 if self.accuracy > 0.8 or self.stage > 0 else 0.0
        return dataclasses.replace(stage, batch=self.args.batch) if self.args.batch else stage

    def set_learning_rate(self, progress):
        """30 steps of warm-up, then constant, then from half-way a linear decay to 3 %."""
        factor = min(1.0, (self.step + 1) / 30)
        if progress >= 0.5:
            factor *= max(0.03, 1 - (progress - 0.5) / 0.5 * 0.97)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor

    def train_step(self, stage):
        batch = self.windows.batch(stage, 0 if self.reach <= REACH_MIN else self.reach)
        loss, statements, answers, prose = self.loss(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += stage.size * stage.batch
        self.accuracy += 0.05 * (answers.item() - self.accuracy)
        if self.accuracy > 0.85:
            self.reach = min(REACH_MAX, self.reach * 1.04)
        return f"loss {loss.item():.3f}  statements {statements.item():.3f}  answers {answers.item():.3f}  prose {prose.item():.3f}"

    def run(self):
        saved = time.time()
        while (progress := self.progress()) < 1:
            stage = self.choose_stage(progress)
            self.set_learning_rate(progress)
            line = self.train_step(stage)
            if self.step % 20 == 0:
                seconds = time.time() - self.start
                print(
                    f"{seconds:6.0f} s  step {self.step:5d}  window {stage.size}  {self.tokens / 1e6:6.2f}M tokens  {line}"
                    f"  mean answers {self.accuracy:.3f}  reach {self.reach:.0f}",
                    flush=True,
                )
            if time.time() - saved > 120:
                self.save("last")
                saved = time.time()
        self.save("final")
        summary = {
            "steps": self.step,
            "tokens": self.tokens,
            "seconds": time.time() - self.start,
            "seed": self.args.seed,
        }
        (self.args.checkpoints / "final.json").write_text(json.dumps(summary) + "\n")
        print("done", json.dumps(summary))


if __name__ == "__main__":
    Trainer(parse_args()).run()
