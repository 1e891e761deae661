#!/usr/bin/env python3
"""Make the golden models and their reference logits with transformers (tests/goldens).

    python tools/goldens/generate.py              write every golden
    python tools/goldens/generate.py --only yi    write one
    python tools/goldens/generate.py --check      recompute the committed goldens from their committed weights

README.md beside this file describes what is written.  Everything runs on the CPU, eagerly, with one thread.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config
from transformers.utils import logging

import text
from families import FAMILIES
from variants import VARIANTS

logging.disable_progress_bar()
VARIANTS = {**VARIANTS, **FAMILIES}

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOGIT_STD = 3.0
TOLERANCE_F32 = 1e-3
NEW_TOKENS = 16
# A continuation with fewer different tokens than this would also come out of many a wrong engine.
DISTINCT_MIN = 9
# Model types whose norms add 1 to their weights.
GEMMA = ("gemma2", "gemma3_text")
# Fields whose null is not their default.
NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(directory):
    """The configuration of a directory.  transformers has no Kimi-K2, whose authors' code is DeepSeek-V3's."""
    fields = json.loads((directory / "config.json").read_text())
    if fields["model_type"] == "kimi_k2":
        return DeepseekV3Config.from_dict({**fields, "model_type": "deepseek_v3"})
    return AutoConfig.from_pretrained(directory)


def config_dtype(config):
    """The dtype that a configuration names, in either spelling."""
    return DTYPES[config.get("dtype", config.get("torch_dtype"))]


def load(directory, dtype):
    """The model of a directory, in `dtype`, with plain (eager) attention."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, config=read_config(directory), dtype=dtype, attn_implementation="eager"
    )
    return honour_bias_max(model.eval())


def honour_bias_max(model):
    """Makes an MPT compute with its configuration's alibi_bias_max, as MosaicML's code does: transformers takes 8."""
    if model.config.model_type == "mpt":
        inner = model.transformer
        bias_max = model.config.attn_config.alibi_bias_max
        inner.build_mpt_alibi_tensor = functools.partial(inner.build_mpt_alibi_tensor, alibi_bias_max=bias_max)
    return model


@torch.no_grad()
def logits_of(model, tokens):
    """Logits of every position, f32 [tokens, vocabulary]; no cache, so that the mask is the plain one."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.no_grad()
def greedy(model, tokens, count):
    """`count` greedy tokens and the smallest gap between the best and the second logit on the way."""
    tokens, out, gap = list(tokens), [], math.inf
    for _ in range(count):
        best = logits_of(model, tokens)[-1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        out.append(int(best.indices[0]))
        tokens.append(out[-1])
    return out, gap


@torch.no_grad()
def randomise(model, seed):
    """Fixed-seed weights for which attention is peaked and every norm's weight matters."""
    generator = torch.Generator().manual_seed(seed)
    around_zero = model.config.model_type in GEMMA
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "word_embeddings_layernorm" in name:
            weight.copy_(0.1 * (noise + 1))
        elif name.endswith("bias"):
            # Large ones would decide BLOOM's answers alone.
            weight.copy_((0.1 if model.config.model_type == "bloom" else 0.5) * noise)
        elif weight.dim() == 1 and around_zero:
            weight.copy_(0.2 * noise)
        elif weight.dim() == 1:
            weight.copy_(1 + 0.2 * noise)
        elif any(table in name for table in ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings.")):
            # Small beside the blocks' outputs, or a tied model repeats its last token; Gemma has a factor.
            small = {"gemma2": 0.02, "gemma3_text": 0.07, "gpt2": 0.1}
            weight.copy_((0.5 if "wpe" in name else small.get(model.config.model_type, 0.5)) * noise)
        else:
            # Peaked attention, and layers that outweigh the embedding: otherwise the model would repeat its last token.
            gains = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 2.0, "out_proj": 2.0, "down_proj": 2.0}
            gains |= {"query_key_value": 1.5, "dense": 2.0, "dense_4h_to_h": 2.0, "c_proj": 3.0, "gate": 3.0, "router": 3.0}
            gain = gains.get(name.split(".")[-2], 2.0 if name.endswith("experts.down_proj") else 1.0)
            # GPT-2 and gpt-oss store [in][out].
            stored_in_out = "c_" in name or model.config.model_type == "gpt_oss" and weight.dim() == 3
            fan_in = weight.shape[-2] if stored_in_out else weight.shape[-1]
            weight.copy_(noise * gain * fan_in**-0.5)
            if "c_attn" in name:
                # Its first two thirds are q and k.
                weight[:, : 2 * weight.shape[0]] *= gains["q_proj"]
            if "Wqkv" in name:
                # Its first two thirds are q and k.
                weight[: 2 * weight.shape[1]] *= gains["q_proj"]


@torch.no_grad()
def scale_logits(model, tokens):
    """Scale the last norm so that the logits' standard deviation is LOGIT_STD (that works for tied weights too)."""
    names = ("transformer.norm_f", "transformer.ln_f", "gpt_neox.final_layer_norm", "model.norm")
    norm = next(module for name, module in model.named_modules() if name in names)
    # Of logits before their soft cap, if there is one.
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        model.config.final_logit_softcapping = None
    factor = LOGIT_STD / float(logits_of(model, tokens).std())
    if cap is not None:
        model.config.final_logit_softcapping = cap
    offset = 1 if model.config.model_type in GEMMA else 0
    norm.weight.copy_((norm.weight + offset) * factor - offset)
    if getattr(norm, "bias", None) is not None:
        norm.bias.mul_(factor)


def write_weights(directory, model, dtype, shards, tied):
    """model.safetensors in `dtype`, or shards with an index; a tied output matrix is not written."""
    # Saved, because in memory experts are fused.
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        saved = load_file(pathlib.Path(scratch) / "model.safetensors")
    tensors = {k: v.to(dtype).contiguous() for k, v in saved.items() if not (tied and k == "lm_head.weight")}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update({name: file for name in part})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def write_json(path, value):
    """JSON with one line a field, so that long token lists do not take a line a number."""
    fields = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
    path.write_text("{\n" + fields + "\n}\n")


def mutant_differences(directory, spec, tokens, logits, scratch):
    """How far the logits move for each mutant of the configuration: the golden's power to see its feature.

    A mutant's "zero" is no field: weights with this in their name are zero. Those of "minus" are minus ten.
    """
    out = {}
    for name, change in spec["mutants"].items():
        change = dict(change)
        zero, minus = change.pop("zero", None), change.pop("minus", None)
        config = {k: v for k, v in {**spec["config"], **change}.items() if v is not None or k in NULLABLE}
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(directory, scratch)
        (scratch / "config.json").write_text(json.dumps(config))
        mutant = load(scratch, torch.float32)
        for parameter, weight in [*mutant.named_parameters(), *mutant.named_buffers()]:
            if zero is not None and zero in parameter:
                weight.detach().zero_()
            if minus is not None and minus in parameter:
                weight.detach().fill_(-10)
        out[name] = round(float((logits_of(mutant, tokens) - logits).abs().max()), 4)
    shutil.rmtree(scratch, ignore_errors=True)
    return out


def make(name, spec, out_root, seed):
    """Write one golden.  Returns its record, or None where this seed's greedy tokens have a near tie or little variety."""
    directory = out_root / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config = spec["config"]
    dtype = config_dtype(config)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed)
    tokens = [1] + torch.randint(3, config["vocab_size"], (spec["tokens"] - 1,), generator=generator).tolist()

    model = AutoModelForCausalLM.from_config(read_config(directory), attn_implementation="eager")
    model = honour_bias_max(model.float().eval())
    randomise(model, seed)
    scale_logits(model, tokens)
    write_weights(directory, model, dtype, spec.get("shards", 1), config.get("tie_word_embeddings", True))

    # From here on only the files on disk count.
    model = load(directory, torch.float32)
    logits = logits_of(model, tokens)
    continuation, gap = greedy(model, tokens, NEW_TOKENS)
    record = {
        "shows": spec["shows"],
        "seed": seed,
        "tokens": tokens,
        "greedy_continuation": continuation,
        "greedy_gap": round(gap, 5),
        "logit_std": round(float(logits.std()), 4),
        "tolerance": TOLERANCE_F32,
    }
    if dtype != torch.float32:
        noise = float((logits_of(load(directory, dtype), tokens) - logits).abs().max())
        record["dtype_noise"] = round(noise, 5)
        record["tolerance_f32"] = TOLERANCE_F32
        record["tolerance"] = round(noise, 5)
    if gap < 2 * max(record["tolerance"], 0.02) or len(set(continuation)) < DISTINCT_MIN:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        record["mutants"] = mutant_differences(directory, spec, tokens, logits, pathlib.Path(scratch) / "mutant")
    record["transformers"] = transformers.__version__
    record["torch"] = torch.__version__
    save_file({"logits": logits.contiguous()}, directory / "logits.safetensors")
    if spec.get("tokenizer"):
        text.write_tokenizer(directory, config["vocab_size"])
        text.write_cases(directory, directory / "text.json", text.CHATS)
    write_json(directory / "golden.json", record)
    return record


def make_any_seed(name, spec, out_root):
    """The first seed that make() accepts."""
    for seed in range(1, 4000):
        record = make(name, spec, out_root, seed)
        if record:
            # The mutant that moves the logits least must still be far outside the tolerance.
            weakest = min(record["mutants"].values())
            assert weakest > 3 * record["tolerance"], (name, record["mutants"], record["tolerance"])
            return record
    raise SystemExit(f"{name}: no seed gives clear and varied greedy tokens")


def make_passkey(out_root):
    """Logits of the bundled model's last 8 positions: 1,000 tokens, the document's beginning and a question."""
    from tokenizers import Tokenizer

    model_directory = ROOT / "models" / "passkey"
    directory = out_root / "passkey"
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    question = json.loads((model_directory / "questions.json").read_text())[0]["prompt_suffix"]
    question_ids = tokenizer.encode(question, add_special_tokens=False).ids
    document = (model_directory / "document.txt").read_text()
    document_ids = tokenizer.encode(document, add_special_tokens=True).ids
    tokens = document_ids[: 1000 - len(question_ids)] + question_ids
    model = load(model_directory, torch.float32)
    logits = logits_of(model, tokens)[-8:]
    continuation, gap = greedy(model, tokens, NEW_TOKENS)
    noise = float((logits_of(load(model_directory, torch.float16), tokens)[-8:] - logits).abs().max())
    record = {
        "shows": "the bundled model on 1,000 tokens: the beginning of its document and the first question",
        "model": "models/passkey",
        "last_positions": 8,
        "tokens": tokens,
        "greedy_continuation": continuation,
        "greedy_gap": round(gap, 5),
        "logit_std": round(float(logits.std()), 4),
        "dtype_noise": round(noise, 5),
        "tolerance_f32": TOLERANCE_F32,
        "tolerance": round(noise, 5),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    save_file({"logits": logits.contiguous()}, directory / "logits.safetensors")
    text.write_cases(model_directory, directory / "text.json", text.CHATS)
    write_json(directory / "golden.json", record)
    return record


def make_short_longrope(out_root):
    """phi3_longrope within its original context, prompt and continuation: transformers takes the short factors."""
    name, source = "phi3_longrope_short", out_root / "phi3_longrope"
    directory = out_root / name
    directory.mkdir(parents=True, exist_ok=True)
    config = VARIANTS["phi3_longrope"]["config"]
    context = config["original_max_position_embeddings"]
    model = load(source, torch.float32)
    for seed in range(1, 4000):
        generator = torch.Generator().manual_seed(seed)
        count = context - NEW_TOKENS
        tokens = [1] + torch.randint(3, config["vocab_size"], (count - 1,), generator=generator).tolist()
        continuation, gap = greedy(model, tokens, NEW_TOKENS)
        if gap >= 0.04 and len(set(continuation)) >= DISTINCT_MIN:
            break
    else:
        raise SystemExit(f"{name}: no seed gives clear and varied greedy tokens")
    logits = logits_of(model, tokens)
    scaling = config["rope_scaling"]
    mutants = {
        "long": {"rope_scaling": {**scaling, "short_factor": scaling["long_factor"]}},
        "not_scaled": {"rope_scaling": {**scaling, "attention_factor": 1.0}},
    }
    with tempfile.TemporaryDirectory() as scratch:
        spec = {"config": config, "mutants": mutants}
        moved = mutant_differences(source, spec, tokens, logits, pathlib.Path(scratch) / "mutant")
    assert min(moved.values()) > 3 * TOLERANCE_F32, moved
    record = {
        "shows": "Phi-4-mini with --max-model-len within its original context: longrope with the short factors",
        "model": "tests/goldens/phi3_longrope",
        "max_model_len": context,
        "seed": seed,
        "tokens": tokens,
        "greedy_continuation": continuation,
        "greedy_gap": round(gap, 5),
        "logit_std": round(float(logits.std()), 4),
        "tolerance": TOLERANCE_F32,
        "mutants": moved,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    save_file({"logits": logits.contiguous()}, directory / "logits.safetensors")
    write_json(directory / "golden.json", record)
    return record


# Goldens without a model of their own.
REFERENCES = {"passkey": make_passkey, "phi3_longrope_short": make_short_longrope}


def check(out_root, names):
    """Recompute each committed golden from its committed files; returns the number of goldens that differ."""
    wrong = 0
    for name in names:
        directory = out_root / name
        golden = json.loads((directory / "golden.json").read_text())
        model = load(ROOT / golden["model"] if "model" in golden else directory, torch.float32)
        logits = logits_of(model, golden["tokens"])[-golden.get("last_positions", 0) :]
        difference = float((logits - load_file(directory / "logits.safetensors")["logits"]).abs().max())
        same = greedy(model, golden["tokens"], NEW_TOKENS)[0] == golden["greedy_continuation"]
        good = difference < TOLERANCE_F32 and same
        wrong += not good
        print(
            f"{'ok   ' if good else 'WRONG'} {name}: largest logit difference {difference:.2e}, greedy tokens equal: {same}"
        )
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests" / "goldens")
    parser.add_argument("--only", action="append", help="a golden's name; may be repeated")
    parser.add_argument("--check", action="store_true", help="recompute instead of writing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.only or [*VARIANTS, *REFERENCES]
    if args.check:
        sys.exit(1 if check(args.out, names) else 0)
    for name in names:
        own = REFERENCES.get(name)
        record = own(args.out) if own else make_any_seed(name, VARIANTS[name], args.out)
        size = sum(f.stat().st_size for f in (args.out / name).iterdir())
        shown = {k: v for k, v in record.items() if k in ("seed", "logit_std", "greedy_gap", "dtype_noise", "mutants")}
        print(f"{name}: {size // 1024} KiB {shown}", flush=True)


if __name__ == "__main__":
    main()
