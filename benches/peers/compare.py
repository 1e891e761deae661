#!/usr/bin/env python3
"""Lagoon beside llama.cpp and mistral.rs on the very same model files, on one machine, in turn.

    target/peers/venv/bin/python benches/peers/compare.py [--formats F16,Q8_0,Q4_K_M] [--contexts 512,4096,16384]

The models are Llamas with random weights (make_model.py), a dense one of 125M parameters and one with experts, as GGUF in
each format: llama.cpp's own quantiser packs them. llama.cpp is measured in its own process through its Python binding, with and without fused attention. Lagoon is
measured as its clients see it, with `lagoon serve FILE.gguf`: a streamed completion over HTTP. mistral.rs reads the
dense one's Hugging Face directory in F16.

`--sides lagoon-wgpu,llama.cpp-vulkan,llama.cpp-vulkan-fused` compares on the first Vulkan device instead (README.md); all layers
are on it, and llama.cpp is refused where it would compute on the CPU.

Printed are tokens per second, batch 1: of a prompt of that length, and of decoding after it (the median of several tokens),
the median over rounds; and Lagoon's ratio to llama.cpp's better form. The machine should be otherwise idle.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time

import make_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
WARM_UP_TOKENS = 2
PROCESS_SECONDS_MAX = 1800
READY_SECONDS_MAX = 120
SIDES = ("lagoon", "llama.cpp", "llama.cpp-fused", "mistral.rs")
VULKAN_SIDES = ("lagoon-wgpu", "llama.cpp-vulkan", "llama.cpp-vulkan-fused")


def token(i):
    """An ordinary token of the prompt."""
    return make_model.FIRST_WORD + (i * 7919) % (make_model.SHAPE["vocab_size"] - make_model.FIRST_WORD)


def llama_cpp(file, args, fused_attention, vulkan):
    """llama.cpp, token by token through its Python binding."""
    import llama_cpp

    if vulkan and not llama_cpp.llama_supports_gpu_offload():
        raise RuntimeError("llama.cpp has no Vulkan device\nhint: README.md says how its library is built")
    llm = llama_cpp.Llama(
        str(file),
        n_ctx=max(args.contexts) + args.decode_tokens + WARM_UP_TOKENS + 8,
        n_batch=512,
        n_ubatch=512,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        n_gpu_layers=-1 if vulkan else 0,
        flash_attn=fused_attention,
        verbose=False,
    )
    llm.eval([token(i) for i in range(64)])  # the first touch of the weights is not what is measured
    llm.n_tokens = 0
    results, seconds = {}, 0.0
    for context in args.contexts:
        prompt = [token(i) for i in range(llm.n_tokens, context)]
        start = time.perf_counter()
        llm.eval(prompt)
        seconds += time.perf_counter() - start
        times = []
        for i in range(WARM_UP_TOKENS + args.decode_tokens):
            start = time.perf_counter()
            llm.eval([token(i)])
            times.append(time.perf_counter() - start)
        llm.n_tokens = context  # forget the decoded tokens: the next context goes on from this prompt
        results[context] = {
            "prefill_tokens_per_s": context / seconds,
            "decode_tokens_per_s": 1 / statistics.median(times[WARM_UP_TOKENS:]),
        }
    return {"version": f"llama-cpp-python {llama_cpp.__version__}", "contexts": results}


def mistral_rs(model, args):
    """mistral.rs: a completion for each context; its own usage record gives the rates."""
    import importlib.metadata

    import mistralrs

    which = mistralrs.Which.Plain(str(model), arch=mistralrs.Architecture.Llama, dtype=mistralrs.ModelDType.F16)
    runner = mistralrs.Runner(which, max_seqs=1, prefix_cache_n=0)

    def complete(context):
        request = mistralrs.CompletionRequest(
            prompt=" ".join(f"t{token(i)}" for i in range(context)),
            model="default",
            max_tokens=args.decode_tokens + 1,
            temperature=0.0,
            ignore_eos=True,
        )
        return runner.send_completion_request(request).usage

    complete(64)
    results = {}
    for context in args.contexts:
        if context > args.mistralrs_context_max:
            continue
        usage = complete(context)
        results[context] = {
            "prefill_tokens_per_s": usage.avg_prompt_tok_per_sec,
            "decode_tokens_per_s": usage.avg_compl_tok_per_sec,
        }
    return {"version": f"mistralrs {importlib.metadata.version('mistralrs')}", "contexts": results}


def free_port():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def complete(port, prompt, tokens):
    """A streamed completion: seconds to the first token, and between tokens after it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROCESS_SECONDS_MAX)
    body = {"prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0, "stream": True}
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    times = []
    for line in response:
        choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else []
        if choices and choices[0]["finish_reason"] is None:  # the last chunk has no token
            times.append(time.perf_counter())
    connection.close()
    if len(times) != tokens:
        raise RuntimeError(f"{len(times)} of {tokens} tokens came one by one")
    return times[0] - start, [b - a for a, b in zip(times, times[1:])]


def lagoon(file, args, backend):
    """`lagoon serve`, through its endpoint."""
    port = free_port()
    room = 2 * (max(args.contexts) + args.decode_tokens + WARM_UP_TOKENS + 64)
    command = [args.lagoon, "serve", file, "--http", f"127.0.0.1:{port}", "--threads", args.threads]
    command += ["--kv-tokens", room, "--prefix-cache", "off", "--backend", backend]
    server = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(server, port)
        complete(port, [token(i) for i in range(64)], 4)
        results = {}
        for context in args.contexts:
            prompt = [token(i + context) for i in range(context)]
            first, between = complete(port, prompt, 1 + WARM_UP_TOKENS + args.decode_tokens)
            results[context] = {
                "prefill_tokens_per_s": context / first,
                "decode_tokens_per_s": 1 / statistics.median(between[WARM_UP_TOKENS:]),
            }
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    return {"version": f"lagoon {machine()['commit']}", "contexts": results}


def wait_until_ready(server, port):
    end = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < end and server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise RuntimeError("lagoon serve did not become ready")


def machine():
    """Processor, cores and commit of this measurement."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"cpu": model, "cores": os.cpu_count(), "commit": git.stdout.strip() + ("-changed" if changed else "")}


def pack(directory, model, form):
    """A model's file in a format, packed by llama.cpp from its F16 file once."""
    source = directory / f"{model}.gguf"
    if form == "F16":
        return source
    out = directory / f"{model}-{form.lower()}.gguf"
    if not out.exists():
        import llama_cpp

        silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(silence, None)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form}")
        part = out.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), params) != 0:
            raise RuntimeError(f"llama.cpp could not pack {form}")
        part.rename(out)
    return out


def run_here(side, model, form, args):
    """Measure one side in this process."""
    if side == "mistral.rs":
        return mistral_rs(args.directory / "hf", args)
    file = pack(args.directory, model, form)
    if side.startswith("lagoon"):
        return lagoon(file, args, "wgpu" if side in VULKAN_SIDES else "cpu")
    return llama_cpp(file, args, fused_attention=side.endswith("-fused"), vulkan=side in VULKAN_SIDES)


def run_apart(side, model, form, args):
    """Measure one side in a process of its own, so that no side's threads or memory are there during another's run."""
    python = args.vulkan_python if side in VULKAN_SIDES and side.startswith("llama.cpp") else sys.executable
    command = [str(python), __file__, "--only", side, model, form, *args.original]
    # Both read the number of threads from the environment where no argument sets it.
    environment = {**os.environ, "RAYON_NUM_THREADS": str(args.threads), "OMP_NUM_THREADS": str(args.threads)}
    # llama.cpp takes no device that computes on the CPU, as llvmpipe does, unless it is named.
    environment.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, timeout=PROCESS_SECONDS_MAX
        )
        lines = done.stdout.decode().strip().splitlines()
        return json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": f"exit code {done.returncode}"}
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {PROCESS_SECONDS_MAX} s"}


def merged(runs):
    """The medians over a side's rounds; its first error, if a round failed."""
    failed = [run for run in runs if "error" in run]
    if failed:
        return failed[0]
    contexts = {
        context: {kind: statistics.median(run["contexts"][context][kind] for run in runs) for kind in row}
        for context, row in runs[0]["contexts"].items()
    }
    return {"version": runs[0]["version"], "contexts": contexts}


def ratios(sides):
    """Lagoon's rates over those of llama.cpp's better form, for each context."""
    ours = next((side.get("contexts", {}) for name, side in sides.items() if name.startswith("lagoon")), {})
    forms = [side for name, side in sides.items() if name.startswith("llama.cpp")]
    theirs = [side["contexts"] for side in forms if "contexts" in side]
    if not theirs or len(theirs) < len(forms):
        return {}  # a form failed: what is left may not be the better one
    return {
        context: {
            kind.removesuffix("_tokens_per_s"): round(rate / max(side[context][kind] for side in theirs), 2)
            for kind, rate in row.items()
        }
        for context, row in ours.items()
    }


def show(report):
    """A table for people."""
    print(f"\n{report['machine']['cpu']}, {report['threads']} threads, commit {report['machine']['commit']}")
    print(f"{'':16}{'':18}{'context':>9}{'prefill tok/s':>15}{'decode tok/s':>14}")
    for case, sides in report["cases"].items():
        for name, side in sides.items():
            if "error" in side:
                print(f"{case:16}{name:18}{side['error']}")
            for context, row in side.get("contexts", {}).items():
                rates = f"{row['prefill_tokens_per_s']:>15.1f}{row['decode_tokens_per_s']:>14.1f}"
                print(f"{case:16}{name:18}{context:>9}{rates}")
        for context, row in report["ratios"][case].items():
            print(f"{case:16}{'over llama.cpp':18}{context:>9}{row['prefill']:>15.2f}{row['decode']:>14.2f}")


def numbers(text):
    return [int(n) for n in text.split(",")]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=pathlib.Path, default=ROOT / "target" / "peers", help="of the models; made when missing"
    )
    parser.add_argument("--models", default="dense,experts")
    parser.add_argument("--formats", default="F16,Q8_0,Q4_K_M", help="llama.cpp's names of formats")
    parser.add_argument("--contexts", type=numbers, default="512,4096,16384", help="prompt lengths in tokens, ascending")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument(
        "--vulkan-python",
        type=pathlib.Path,
        default=ROOT / "target" / "peers" / "venv-vulkan" / "bin" / "python",
        help="of the virtual environment whose llama.cpp is built with Vulkan",
    )
    parser.add_argument("--rounds", type=int, default=3, help="times that each side is measured, in turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--decode-tokens", type=int, default=24, help="tokens decoded at each context")
    parser.add_argument("--mistralrs-context-max", type=int, default=4096, help="longer ones take mistral.rs minutes")
    parser.add_argument(
        "--lagoon",
        type=pathlib.Path,
        default=ROOT / "target" / "release" / "lagoon",
        help="the binary, by `cargo build --release -p lagoon`",
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write the whole report here")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sides = args.sides.split(",")
    if unknown := [side for side in sides if side not in SIDES + VULKAN_SIDES]:
        parser.error(f"no side is called {unknown[0]} (there are {', '.join(SIDES + VULKAN_SIDES)})")
    if len({side in VULKAN_SIDES for side in sides}) > 1:
        parser.error("sides on the CPU and on Vulkan are compared in two runs")
    args.original = sys.argv[1:]
    return args


def main():
    args = parse_args()
    make_model.make(args.directory)
    if args.only:
        print(json.dumps(run_here(*args.only, args)))
        return
    cases = [(model, form) for model in args.models.split(",") for form in args.formats.split(",")]
    for case in cases:
        pack(args.directory, *case)
    runs = {f"{model} {form}": {} for model, form in cases}
    for i in range(args.rounds):
        for model, form in cases:
            sides = args.sides.split(",")
            for side in sides[i % len(sides) :] + sides[: i % len(sides)]:  # each goes first in some round
                if side == "mistral.rs" and (model, form) != ("dense", "F16"):
                    continue
                found = run_apart(side, model, form, args)
                runs[f"{model} {form}"].setdefault(side, []).append(found)
                rates = {c: [round(rate) for rate in row.values()] for c, row in found.get("contexts", {}).items()}
                print(f"round {i + 1} of {args.rounds}: {model} {form} {side}: {rates}", file=sys.stderr, flush=True)
    sides = {case: {name: merged(rounds) for name, rounds in found.items()} for case, found in runs.items()}
    report = {
        "machine": machine(),
        "threads": args.threads,
        "rounds": args.rounds,
        "cases": sides,
        "ratios": {case: ratios(found) for case, found in sides.items()},
    }
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if any("error" in side for found in sides.values() for side in found.values()) else 0)


if __name__ == "__main__":
    main()
