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


def all_answered(found):
    """Every request was answered with as many tokens as it asked for."""
    requests = found["requests"]
    pool.equal((len(requests["successful"]), len(requests["errored"])), (REQUESTS, 0), "answered, errored")
    for request in requests["successful"]:
        usage = request["output_metrics"]
        pool.equal(usage["text_tokens"], OUTPUT_TOKENS)
        assert request["input_metrics"]["text_tokens"] >= PROMPT_TOKENS, request["input_metrics"]
        assert request["output"], request


def completions():
    all_answered(benchmark("/v1/completions"))


def chats():
    all_answered(benchmark("/v1/chat/completions"))


pool.run([completions, chats])
