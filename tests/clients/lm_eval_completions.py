"""lm-eval's local-completions over a small local task: pass keys, generated and by log-likelihood (echo, logprobs)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pool

HERE = Path(__file__).resolve().parent
# Nothing is looked up in a hub.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(pool.SCRATCH / "hf")}


def write_data():
    """The task's questions: each behind prose that one instance cannot hold, in lines of JSON."""
    lines = []
    for start in (0, 400, 800):
        for at, name in enumerate(pool.KEYS):
            prompt, answer = pool.long_prompt(name, start)
            choices = [f" {key}" for key in pool.KEYS.values()]
            lines.append({"text": prompt, "answer": answer.strip(), "choices": choices, "label": at})
    path = pool.SCRATCH / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def evaluate(task, **model):
    """Runs the program; returns the task's results."""
    tasks = pool.SCRATCH / "tasks"
    shutil.copytree(HERE / "tasks", tasks, dirs_exist_ok=True)
    for file in tasks.glob("*.yaml"):
        text = file.read_text(encoding="utf-8").replace("QUESTIONS", str(pool.SCRATCH / "questions.jsonl"))
        file.write_text(text, encoding="utf-8")
    out = pool.SCRATCH / f"out-{len(list(pool.SCRATCH.iterdir()))}"
    options = {"model": pool.MODEL, "base_url": f"{pool.URL}/v1/completions", "max_retries": 1, "max_length": 3000, **model}
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in options.items()),
        "--tasks", task, "--include_path", str(tasks), "--output_path", str(out),
    ]
    environment = {**os.environ, **OFFLINE, "OPENAI_API_KEY": pool.KEY}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    [report] = out.rglob("results_*.json")
    return json.loads(report.read_text(encoding="utf-8"))


def generated():
    report = evaluate("passkey_generate", tokenizer_backend="None", tokenized_requests=False, num_concurrent=3)
    pool.equal(report["results"]["passkey_generate"]["exact_match,none"], 1.0)
    pool.equal(report["n-samples"]["passkey_generate"]["effective"], QUESTIONS)


def by_log_likelihood():
    # Tokenised by the pool, without files of the model: the program finds /tokenizer_info.
    report = evaluate("passkey_choose", tokenized_requests=True, auth_token=pool.KEY)
    pool.equal(report["results"]["passkey_choose"]["acc,none"], 1.0)
    pool.equal(report["n-samples"]["passkey_choose"]["effective"], QUESTIONS)


QUESTIONS = write_data()
pool.run([generated, by_log_likelihood])
