#!/usr/bin/env python3
"""Lagoon's CPU benchmark and its peers in one run, on the same machine, one after the other.

    target/peers/venv/bin/python benches/peers/compare.py [--contexts 512,4096,16384] [--peers llama.cpp,mistral.rs]

Every side runs a 125M-parameter Llama with random f16 weights (make_model.py; Lagoon's benchmark makes its own of the same
shape). Printed are tokens per second: of prefilling a prompt of that length, and of decoding after it, batch 1, the median
of several tokens. The machine should be otherwise idle; compare sides only within one run.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import make_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
WARM_UP_TOKENS = 2
BENCH_SECONDS_MAX = 1800
PEERS = ("llama.cpp", "mistral.rs")


def token(i):
    """An ordinary token of the prompt."""
    return 3 + (i * 7919) % (make_model.SHAPE["vocab_size"] - 3)


def llama_cpp(model, contexts, threads, decode_tokens, flash_attention):
    """llama.cpp, token by token through its Python binding."""
    import llama_cpp

    llm = llama_cpp.Llama(
        str(model / "model.gguf"),
        n_ctx=max(contexts) + decode_tokens + WARM_UP_TOKENS + 8,
        n_batch=512,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=flash_attention,
        verbose=False,
    )
    llm.eval([token(i) for i in range(64)])  # the first touch of the weights is not what is measured
    llm.n_tokens = 0
    results, seconds = {}, 0.0
    for context in contexts:
        prompt = [token(i) for i in range(llm.n_tokens, context)]
        start = time.perf_counter()
        llm.eval(prompt)
        seconds += time.perf_counter() - start
        times = []
        for i in range(WARM_UP_TOKENS + decode_tokens):
            start = time.perf_counter()
            llm.eval([token(i)])
            times.append(time.perf_counter() - start)
        llm.n_tokens = context  # forget the decoded tokens: the next context goes on from this prompt
        results[context] = {
            "prefill_tokens_per_s": context / seconds,
            "decode_tokens_per_s": 1 / statistics.median(times[WARM_UP_TOKENS:]),
        }
    return {"version": f"llama-cpp-python {llama_cpp.__version__}", "contexts": results}


def mistral_rs(model, contexts, decode_tokens):
    """mistral.rs: a completion for each context; its own usage record gives the rates."""
    import importlib.metadata

    import mistralrs

    which = mistralrs.Which.Plain(str(model / "hf"), arch=mistralrs.Architecture.Llama, dtype=mistralrs.ModelDType.F16)
    runner = mistralrs.Runner(which, max_seqs=1, prefix_cache_n=0)

    def complete(context):
        request = mistralrs.CompletionRequest(
            prompt=" ".join(f"t{token(i)}" for i in range(context)),
            model="default",
            max_tokens=decode_tokens + 1,
            temperature=0.0,
            ignore_eos=True,
        )
        return runner.send_completion_request(request).usage

    complete(64)
    results = {}
    for context in contexts:
        usage = complete(context)
        results[context] = {
            "prompt_tokens": usage.prompt_tokens,
            "prefill_tokens_per_s": usage.avg_prompt_tok_per_sec,
            "decode_tokens_per_s": usage.avg_compl_tok_per_sec,
        }
    return {"version": f"mistralrs {importlib.metadata.version('mistralrs')}", "contexts": results}


def lagoon():
    """Lagoon's own benchmark: whatever its JSON object holds."""
    command = ["cargo", "bench", "--package", "lagoon-benches", "--bench", "cpu", "--", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=BENCH_SECONDS_MAX
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
    text = done.stdout.decode()
    return json.loads(text[text.index("{") :])


def machine():
    """Processor, cores and system of this measurement."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {"cpu": model, "cores": os.cpu_count(), "commit": git.stdout.strip()}


def run_here(name, args):
    """Measure one peer in this process."""
    contexts = [int(c) for c in args.contexts.split(",")]
    if name == "llama.cpp":
        return llama_cpp(args.model, contexts, args.threads, args.decode_tokens, args.flash_attention)
    contexts = [c for c in contexts if c <= args.mistralrs_context_max]
    return mistral_rs(args.model, contexts, args.decode_tokens)


def run_apart(name, args):
    """Measure one peer in a process of its own, so that no side's threads or memory are there during another's run."""
    command = [sys.executable, __file__, "--only", name, *args.original]
    # Both read the number of threads from the environment where no argument sets it.
    environment = {**os.environ, "RAYON_NUM_THREADS": str(args.threads), "OMP_NUM_THREADS": str(args.threads)}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, timeout=BENCH_SECONDS_MAX
        )
        lines = done.stdout.decode().strip().splitlines()
        return json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": f"exit code {done.returncode}"}
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {BENCH_SECONDS_MAX} s"}


def show(report):
    """A table for people."""
    print(f"\n{report['machine']['cpu']}, {report['threads']} threads, commit {report['machine']['commit']}")
    print(f"{'':24}{'context':>9}{'prefill tok/s':>15}{'decode tok/s':>14}")
    for name, result in report["peers"].items():
        if "error" in result:
            print(f"{name:24}{result['error']}")
        for context, row in result.get("contexts", {}).items():
            print(f"{name:24}{context:>9}{row['prefill_tokens_per_s']:>15.1f}{row['decode_tokens_per_s']:>14.2f}")
    print("\nlagoon:")
    print(json.dumps(report["lagoon"], indent=1))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=pathlib.Path, default=ROOT / "target" / "peers" / "model", help="made when missing"
    )
    parser.add_argument("--contexts", default="512,4096,16384", help="prompt lengths in tokens, ascending")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--decode-tokens", type=int, default=16, help="tokens decoded at each context")
    parser.add_argument("--flash-attention", action="store_true", help="llama.cpp's fused attention")
    parser.add_argument("--mistralrs-context-max", type=int, default=4096, help="longer ones take mistral.rs minutes")
    parser.add_argument("--no-lagoon", action="store_true", help="measure the peers only")
    parser.add_argument("--json", type=pathlib.Path, help="also write the whole report here")
    parser.add_argument("--only", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.original = sys.argv[1:]
    return args


def main():
    args = parse_args()
    make_model.make(args.model)
    if args.only:
        print(json.dumps(run_here(args.only, args)))
        return
    report = {"machine": machine(), "threads": args.threads, "peers": {}, "lagoon": None}
    for name in args.peers.split(","):
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        report["peers"][name] = run_apart(name, args)
    if not args.no_lagoon:
        print("measuring lagoon …", file=sys.stderr, flush=True)
        try:
            report["lagoon"] = lagoon()
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            report["lagoon"] = {"error": str(error)}
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    failed = any("error" in side for side in [*report["peers"].values(), report["lagoon"] or {}])
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
