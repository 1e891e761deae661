"""aiperf: short runs of synthetic prompts that one instance cannot hold, over chats and completions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pool

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 1400, 24
# Nothing is looked up in a hub: the tokenizer is a folder, which the program does not take with HF_HUB_OFFLINE.
ENVIRONMENT = {**os.environ, "HF_HOME": str(pool.SCRATCH / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}


def profile(endpoint):
    out = pool.SCRATCH / endpoint
    command = [
        str(Path(sys.executable).with_name("aiperf")), "profile",
        "--model", pool.MODEL, "--url", pool.URL, "--api-key", pool.KEY,
        "--endpoint-type", endpoint, "--streaming", "--tokenizer", pool.MODEL_DIR,
        "--request-count", str(REQUESTS), "--concurrency", "2", "--num-prompts", str(REQUESTS),
        "--isl", str(PROMPT_TOKENS), "--isl-stddev", "0", "--osl", str(OUTPUT_TOKENS), "--osl-stddev", "0",
        "--extra-inputs", f"min_tokens:{OUTPUT_TOKENS}", "--extra-inputs", "ignore_eos:true",
        "--use-server-token-count", "--artifact-dir", str(out), "--ui", "none", "--random-seed", "1",
    ]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    [report] = out.rglob("profile_export_aiperf.json")
    return json.loads(report.read_text(encoding="utf-8"))


def all_answered(found):
    """Every request was answered with as many tokens as it asked for."""
    pool.equal(found["request_count"]["avg"], REQUESTS, "answered")
    assert not found.get("error_summary") and not found.get("error_request_count", {}).get("avg"), found
    pool.equal((found["output_sequence_length"]["min"], found["output_sequence_length"]["max"]), (OUTPUT_TOKENS, OUTPUT_TOKENS))
    assert found["input_sequence_length"]["min"] >= PROMPT_TOKENS * 0.9, found["input_sequence_length"]
    assert 0 < found["time_to_first_token"]["avg"] < found["request_latency"]["avg"], found


def chats():
    all_answered(profile("chat"))


def completions():
    all_answered(profile("completions"))


pool.run([chats, completions])
