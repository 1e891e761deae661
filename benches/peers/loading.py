#!/usr/bin/env python3
"""Measure how Lagoon loads a model: time from exec to ready, and peak resident memory.

    python benches/peers/loading.py LAGOON MODEL[,FLAG...]... > loading.json

Each MODEL is served by one instance on the CPU with few KV tokens and short steps, so that memory is that of weights and process. The
first start of each warms the disk's cache and is not counted. Memory is of /proc/PID/status: VmHWM when the instance is ready and
after a prompt of 100 tokens, which reads weights that are mapped; RssAnon's peak is sampled.
"""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import urllib.request

FLAGS = ["--backend=cpu", "--http=127.0.0.1:0", "--kv-tokens=256", "--step-tokens=16", "--max-running=1"]
ROUNDS = 3


def status(pid):
    """Sizes in MiB by their name."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.startswith(("VmHWM", "RssAnon")))
    return {name: int(value.split()[0]) / 1024 for name, value in pairs}


def complete(http):
    models = json.load(urllib.request.urlopen(f"http://{http}/v1/models"))
    body = {"model": models["data"][0]["id"], "prompt": list(range(5, 105)), "max_tokens": 8}
    request = urllib.request.Request(
        f"http://{http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).read()


def measure(lagoon, model, flags):
    started = time.monotonic()
    command = [lagoon, "serve", model, *FLAGS, "--calibrate=off", "--json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    anonymous, over = [0.0], threading.Event()

    def watch():
        while not over.wait(0.002):
            try:
                anonymous[0] = max(anonymous[0], status(process.pid).get("RssAnon", 0.0))
            except OSError:
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        ready = json.loads(process.stdout.readline())
        seconds, at_ready = time.monotonic() - started, status(process.pid)["VmHWM"]
        complete(ready["http"])
        after = status(process.pid)["VmHWM"]
    finally:
        over.set()
        watcher.join()
        process.terminate()
        process.wait()
    return {"ready_s": seconds, "peak_ready_mib": at_ready, "peak_prompt_mib": after, "peak_anonymous_mib": anonymous[0]}


def main():
    lagoon, models = sys.argv[1], sys.argv[2:]
    rows = []
    for spec in models:
        model, *flags = spec.split(",")
        rounds = [measure(lagoon, model, flags) for _ in range(ROUNDS + 1)][1:]
        best = {name: round(min(run[name] for run in rounds), 3 if name == "ready_s" else 1) for name in rounds[0]}
        size = round(os.path.getsize(model) / 2**20, 1)
        rows.append({"model": os.path.basename(model), "flags": flags, "file_mib": size, **best})
    print(json.dumps({"rounds": ROUNDS, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
