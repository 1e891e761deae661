# A model of Llama-3.1-8B's shape with random weights, served by `lagoon serve` and by a pool of two instances on one GPU, under load.
# Needs numpy. Prints one JSON object a line, and server logs to files beside it.
#
# Arguments: the lagoon program, a folder for 16 GB, "8b", "kv" (that model's KV on small layers) or "tiny", a backend ("cuda"), and
# "pool" to leave out the loads of one instance. LAGOON_UP_ARGS has further arguments of `lagoon up`.
import atexit
import concurrent.futures
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import urllib.request

import numpy as np

LAGOON, FOLDER, SHAPE, BACKEND, *MORE = sys.argv[1:]
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD, VOCAB = {
    "tiny": (256, 512, 2, 4, 2, 64, 2000),
    "kv": (1024, 1024, 32, 32, 8, 128, 2000),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256),
}[SHAPE]
# KV tokens of a pool's instance, characters of a long prompt, tokens of its answer; and loads: requests, requests at once, tokens of
# a prompt and of an answer.
KV, LONG, ANSWER = {"tiny": (4096, 5000, 24), "kv": (8192, 12_000, 32), "8b": (49_152, 78_000, 64)}[SHAPE]
LOADS = {
    "tiny": [(2, 1, 32, 8), (4, 4, 32, 8)],
    "kv": [(16, 8, 512, 32)],
    "8b": [(4, 1, 1024, 128), (64, 16, 1024, 128), (192, 64, 1024, 128)],
}[SHAPE]
LOGS = os.environ.get("OUT", ".")


def say(**found):
    print(json.dumps(found), flush=True)


def tokenizer():
    """Bytes are tokens; the rest of the vocabulary are words that no text has."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars, extra = {}, 0
    for byte in range(256):
        if byte in keep:
            chars[byte] = chr(byte)
        else:
            chars[byte], extra = chr(256 + extra), extra + 1
    vocab = {chars[byte]: byte for byte in range(256)}
    vocab.update({f"Ġw{i}": i for i in range(256, VOCAB)})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
    }


def make_model(folder):
    os.makedirs(folder, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": 2, "torch_dtype": "bfloat16", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
    }
    for name, value in [("config.json", config), ("tokenizer.json", tokenizer())]:
        with open(f"{folder}/{name}", "w") as file:
            json.dump(value, file)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes.update({
            at + "input_layernorm.weight": (HIDDEN,), at + "post_attention_layernorm.weight": (HIDDEN,),
            at + "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN), at + "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            at + "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN), at + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            at + "mlp.gate_proj.weight": (FFN, HIDDEN), at + "mlp.up_proj.weight": (FFN, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, FFN),
        })
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    rng = np.random.default_rng(1)
    noise = (rng.standard_normal(1 << 25 if SHAPE == "8b" else 1 << 22, dtype=np.float32) * np.float32(0.02)).view(np.uint32)
    noise = (noise >> 16).astype(np.uint16)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        first = 0
        for name, shape in shapes.items():
            left = int(np.prod(shape))
            if len(shape) == 1:
                file.write(np.full(left, 0x3F80, np.uint16).tobytes())
                continue
            first = (first + 7919) % (len(noise) // 2)
            while left:
                part = noise[first:first + left]
                file.write(memoryview(part).cast("B"))
                left -= len(part)
                first = 7919 * 3


def serve(args, port, name):
    log = open(f"{LOGS}/{name}.log", "wb")
    started = time.time()
    process = subprocess.Popen([LAGOON, *args, "--backend", BACKEND, "--port", str(port)], stdout=log, stderr=log)
    # One that is left has the GPU's memory and the port of the next.
    atexit.register(process.kill)
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).read()
            if process.poll() is None:
                break
            raise SystemExit(f"{name} ended; another server answers at port {port}")
        except OSError:
            if process.poll() is not None or time.time() - started > 120:
                process.kill()
                print(open(f"{LOGS}/{name}.log").read()[-2000:], file=sys.stderr)
                raise SystemExit(f"{name} did not start")
            time.sleep(0.1)
    say(server=name, ready_s=round(time.time() - started, 2))
    return process


def stop(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def complete(port, prompt, tokens, **more):
    """The answer's text, the first token's time, the time of all, and usage, streamed."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **more}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    started, first, text, usage = time.time(), None, "", None
    with urllib.request.urlopen(request, timeout=120) as reply:
        for line in reply:
            line = line.strip()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event.get("error"):
                raise SystemExit(str(event))
            for choice in event.get("choices", []):
                if choice["text"]:
                    first = first or time.time()
                    text += choice["text"]
    if first is None:
        raise SystemExit(f"an answer without text, usage {usage}")
    return text, first - started, time.time() - started, usage


def load(port, name, sizes):
    for requests, at_once, prompt, answer in sizes:
        command = [LAGOON, "bench", "--url", f"http://127.0.0.1:{port}", "--requests", str(requests), "--concurrency",
                   str(at_once), "--prompt-tokens", str(prompt), "--max-tokens", str(answer), "--json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            report = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            report = "not ended after 120 s"
        except ValueError:
            report = done.stdout[-500:] + done.stderr[-500:]
        say(load=name, concurrency=at_once, prompt_tokens=prompt, answer_tokens=answer, report=report)


def waits(port):
    """What a pool's instances have waited for and sent since they started, and what they measured of themselves at start."""
    kept = r"lagoon_(layer_partials_wait_seconds_(sum|count)|remote_attentions_total|wire_bytes_sent_total)[{ ].* (?!0$)"
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    status = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/lagoon/status", timeout=10))
    say(waits=[line for line in text.splitlines() if re.match(kept, line)], calibration=status["instances"][0].get("calibration"))


def same(a, b):
    """Words of both texts that are equal before the first that is not."""
    pairs = list(zip(a.split(" "), b.split(" ")))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


model = f"{FOLDER}/m"
started = time.time()
make_model(model)
say(model=SHAPE, made_s=round(time.time() - started, 2))

rng = np.random.default_rng(2)
document = "".join(chr(97 + int(i)) for i in rng.integers(0, 26, LONG))
alone = serve(["serve", model, "--served-model-name", "m"], 8100, "serve")
if "pool" not in MORE:
    load(8100, "serve", LOADS)
whole, first, total, usage = complete(8100, document, ANSWER)
say(long="alone", prompt_tokens=LONG, first_token_s=round(first, 3), total_s=round(total, 3), usage=usage)
stop(alone)

more = os.environ.get("LAGOON_UP_ARGS", "").split()
pool = serve(["up", model, "--served-model-name", "m", "--instances", "2", "--kv-tokens", str(KV), *more], 8200, "up")
text, first, total, usage = complete(8200, document, ANSWER)
say(long="pooled over two", kv_tokens=KV, prompt_tokens=LONG, first_token_s=round(first, 3), total_s=round(total, 3),
    equal_words=same(whole, text), words=len(whole.split(" ")), usage=usage)
waits(8200)
text, first, total, usage = complete(8200, document, ANSWER)
say(long="pooled, again", first_token_s=round(first, 3), total_s=round(total, 3), equal_words=same(whole, text), usage=usage)
# Short requests beside a long one that is decoded over the pool.
with concurrent.futures.ThreadPoolExecutor(2) as threads:
    beside = threads.submit(complete, 8200, document[::-1], 4 * ANSWER)
    load(8200, "pool, beside a long request", LOADS[:2])
    text, first, total, usage = beside.result()
    say(long="pooled, beside a load", first_token_s=round(first, 3), total_s=round(total, 3), usage=usage)
stop(pool)
say(done=True)
