"""What the scripts of `cargo xtask clients` share: the pool's address, prompts that one instance cannot hold, requests
over plain HTTP to compare with, and the runner of a script's checks.

Python's standard library only. `cargo xtask clients` sets the variables below; with them a script also runs by itself.
"""

import json
import os
import sys
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

URL = os.environ["LAGOON_URL"]
KEY = os.environ["LAGOON_API_KEY"]
MODEL = os.environ["LAGOON_MODEL"]
MODEL_DIR = os.environ["LAGOON_MODEL_DIR"]
# A folder of the script's own, empty at its start.
SCRATCH = Path(os.environ["LAGOON_SCRATCH"])

TIMEOUT_S = 60
# The tool that the model can call: the pool's model spells two of ten digits as the begin and the end of this call, and
# copies a pass key of them out of the prompt (xtask/src/clients/model.rs).
TOOL = "open_gate"
CALL_BEGIN = '<tool_call>{"name":"open_gate","arguments":{"key":"'
CALL_END = '"}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Opens a gate.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]

KEYS = {"harbour gate": "41523", "lamp room": "30716", "stone pantry": "53374"}
# Characters of prose in a long prompt: some 1,400 tokens, of which one instance holds LAGOON_KV_TOKENS.
CHARACTERS = 4600


def document(name, start=0, keys=None, characters=CHARACTERS):
    """Prose with pass keys, of which the question asks `name`'s; `start`: where the prose begins, in characters."""
    root = Path(__file__).resolve().parents[2]
    prose = (root / "models/passkey/document.txt").read_text(encoding="utf-8")
    sentences = [s for s in prose.split(". ") if "pass key" not in s]
    # Two digits are no text of this model.
    prose = ". ".join(sentences)[start:].translate(str.maketrans("89", "34"))
    parts, keys = [], keys or KEYS
    each = characters // (len(keys) + 1)
    for index, (place, key) in enumerate(keys.items()):
        end = prose.index(". ", (index + 1) * each)
        begin = 0 if index == 0 else prose.index(". ", index * each) + 2
        parts.append(prose[begin:end] + f". The pass key for the {place} is {key}. ")
    last = len(keys) * each
    parts.append(prose[prose.index(". ", last) + 2 : prose.index(". ", last + each)] + ".")
    return f"{''.join(parts)}\nQuestion: what is the pass key for the {name}?"


def long_prompt(name="harbour gate", start=0):
    """A prompt of /v1/completions that one instance cannot hold, and the text that it is answered with."""
    return document(name, start) + "\nAnswer:", f" {KEYS[name]}\n"


def long_chat(name="harbour gate", start=0):
    """Messages of a chat that one instance cannot hold, and the text that they are answered with."""
    return [{"role": "user", "content": document(name, start)}], f" {KEYS[name]}\n"


def tool_chat():
    """Messages that are answered with a call of `TOOL`, and the call's key."""
    called = f"{CALL_BEGIN}216{CALL_END}"
    keys = {"harbour gate": called, "lamp room": KEYS["lamp room"]}
    return [{"role": "user", "content": document("harbour gate", keys=keys)}], "216"


def request(path, body=None, base=URL):
    """A request without any client: its status, headers and JSON (or text)."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    asked = urllib.request.Request(base + path, data=data, headers=headers)
    # No proxy stands between this machine and itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=TIMEOUT_S) as answer:
            status, headers, text = answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, headers, text = error.code, error.headers, error.read().decode()
    try:
        return status, headers, json.loads(text)
    except json.JSONDecodeError:
        return status, headers, text


def ask(path, **body):
    """The JSON of a request that is answered."""
    status, _, value = request(path, {"model": MODEL, **body})
    assert status == 200, (status, value)
    return value


def tokens(**body):
    """How many tokens the pool counts in `prompt`, or in `messages`."""
    return ask("/tokenize", **body)["count"]


def no_white_space():
    """A `logit_bias` against tokens of white space only: a grammar that allows it everywhere may not be left in it."""
    tokenizer = json.loads((Path(MODEL_DIR) / "tokenizer.json").read_text(encoding="utf-8"))
    # As byte-level BPE writes a space, a line break, a tab and a carriage return.
    blank = set("\u0120\u010a\u0109\u010d")
    return {str(id): -100 for token, id in tokenizer["model"]["vocab"].items() if set(token) <= blank}


def instances():
    """Rows of the pool's instances."""
    status, _, value = request("/lagoon/status")
    assert status == 200, (status, value)
    return value["instances"]


def counter(name):
    """The sum of a counter without labels over the pool's instances, since they started."""
    total = 0
    for row in instances():
        _, _, text = request("/metrics", base=f"http://{row['http_addr']}")
        total += sum(int(float(line.split()[1])) for line in text.splitlines() if line.startswith(f"{name} "))
    return total


def borrowed_rblocks():
    """rBlocks that instances have borrowed of each other since they started."""
    return counter("lagoon_kv_borrowed_blocks_total")


def wait_until_idle():
    """Waits until no instance has a request, a loan or an rBlock in use."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        rows = instances()
        if all(r["requests_running"] == 0 and r["blocks_free"] == r["blocks_total"] for r in rows):
            return
        assert time.monotonic() < deadline, rows
        time.sleep(0.05)


def equal(found, expected, what=""):
    assert found == expected, f"{what or 'found'}: {found!r}, expected: {expected!r}"


def adds_up(usage, prompt, completion):
    """Holds a usage (an object with attributes) against the tokens that were counted."""
    equal((usage.prompt_tokens, usage.completion_tokens), (prompt, completion), "usage")
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total_tokens")


def raises(kind, call):
    """The exception of `kind` that `call` raises."""
    try:
        value = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {value!r}")


def run(checks, borrows=True):
    """Runs the functions and prints a report as the last line; with `borrows`, rBlocks must have been borrowed."""
    # Counters are set twice a second.
    failed, before = [], settled(borrowed_rblocks)
    for check in checks:
        started = time.monotonic()
        try:
            check()
            outcome = "ok"
        except Exception:
            traceback.print_exc(file=sys.stdout)
            outcome = "failed"
            failed.append(check.__name__)
        print(f"{outcome} {check.__name__} ({time.monotonic() - started:.2f} s)", flush=True)
    borrowed = settled(borrowed_rblocks) - before
    if borrows and borrowed <= 0:
        failed.append("no rBlock was borrowed")
    print(json.dumps({"checks": len(checks), "failed": failed, "borrowed_rblocks": borrowed}))
    sys.exit(1 if failed else 0)


def settled(count):
    """A count that has not changed for a second."""
    value, since = count(), time.monotonic()
    while time.monotonic() - since < 1:
        time.sleep(0.1)
        now = count()
        if now != value:
            value, since = now, time.monotonic()
    return value
