"""guidellm: short runs of synthetic prompts that one instance cannot hold, over completions and chats."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pool

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 1400, 24
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(pool.SCRATCH / "hf")}


def benchmark(request_format):
    out = pool.SCRATCH / f"{request_format.strip('/').replace('/', '-')}.json"
    backend = {"kind": "openai_http", "target": pool.URL, "model": pool.MODEL, "api_key": pool.KEY, "request_format": request_format}
    data = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run",
        "--backend", json.dumps(backend),
        "--data", json.dumps(data),
        "--tokenizer", json.dumps({"kind": "huggingface_auto", "model": pool.MODEL_DIR}),
        "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--output", f"kind=json,path={out}",
        "--disable-console-interactive",
    ]
    ended = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]


def generated_tokens():
    return pool.counter("lagoon_generation_tokens_total")


def all_are_answered(request_format):
    """Every request is answered with as many tokens as it asked for.

    guidellm may end before it has read the last result of its workers, and leaves that request out of its report: the pool's
    count of tokens tells that it was answered."""
    before = pool.settled(generated_tokens)
    found = benchmark(request_format)
    requests = found["requests"]
    pool.equal(pool.settled(generated_tokens) - before, REQUESTS * OUTPUT_TOKENS, "tokens of the pool")
    pool.equal(len(requests["errored"]), 0, "failed requests")
    assert REQUESTS - 1 <= len(requests["successful"]) <= REQUESTS, requests
    for request in requests["successful"]:
        usage = request["output_metrics"]
        pool.equal(usage["text_tokens"], OUTPUT_TOKENS)
        assert request["input_metrics"]["text_tokens"] >= PROMPT_TOKENS, request["input_metrics"]
        assert request["output"], request


def completions():
    all_are_answered("/v1/completions")


def chats():
    all_are_answered("/v1/chat/completions")


pool.run([completions, chats])
