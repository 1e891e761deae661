# torch's scaled_dot_product_attention with every backend that it offers, on the sizes that gpu-check measures for its own
# kernels. Prints one JSON object a line, as soon as it is known; the last has "done".
#
# Arguments: JSON {"decode": [[batch, context], ...], "prefill": [tokens, ...], "heads": n, "kv_heads": n, "head_dim": n}
import json
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sizes = json.loads(sys.argv[1])
H, KV, D = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
device = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = {
    name: getattr(SDPBackend, member)
    for name, member in [
        ("flash", "FLASH_ATTENTION"),
        ("efficient", "EFFICIENT_ATTENTION"),
        ("cudnn", "CUDNN_ATTENTION"),
        ("math", "MATH"),
    ]
    if hasattr(SDPBackend, member)
}


# What a size that does not fit raises; older versions have no name of their own for it.
OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", RuntimeError)


def say(**found):
    print(json.dumps(found), flush=True)


def seconds(f):
    """The middle of five rounds of several calls each, timed by the device where there is one."""
    for _ in range(2):
        f()
    rounds = []
    for _ in range(5):
        calls = 5
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                f()
            end.record()
            torch.cuda.synchronize()
            rounds.append(begin.elapsed_time(end) / 1e3 / calls)
        else:
            started = time.perf_counter()
            for _ in range(calls):
                f()
            rounds.append((time.perf_counter() - started) / calls)
    return sorted(rounds)[len(rounds) // 2]


def attend(batch, rows, keys, causal, grouped):
    q = torch.randn(batch, H, rows, D, device=device, dtype=torch.bfloat16)
    kv_heads = KV if grouped else H
    k = torch.randn(batch, kv_heads, keys, D, device=device, dtype=torch.bfloat16)
    v = torch.randn(batch, kv_heads, keys, D, device=device, dtype=torch.bfloat16)
    more = {"enable_gqa": True} if grouped else {}
    return seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, **more))


def measure(kind, batch, rows, keys, causal):
    for name, backend in BACKENDS.items():
        # The scores of the plain form do not fit for long prompts.
        if name == "math" and batch * H * rows * keys > 1 << 31:
            continue
        for grouped in (True, False) if H != KV else (True,):
            found = {"kind": kind, "backend": name, "grouped": grouped, "batch": batch, "rows": rows, "keys": keys}
            try:
                with sdpa_kernel([backend]), torch.no_grad():
                    found["us"] = attend(batch, rows, keys, causal, grouped) * 1e6
            except (RuntimeError, TypeError, OUT_OF_MEMORY) as error:
                found["error"] = str(error).splitlines()[0][:200]
            if device == "cuda":
                torch.cuda.empty_cache()
            say(**found)


say(torch=torch.__version__, device=torch.cuda.get_device_name() if device == "cuda" else "cpu", cuda=torch.version.cuda)
for batch, context in sizes["decode"]:
    measure("decode", batch, 1, context, False)
for tokens in sizes["prefill"]:
    measure("prefill", 1, tokens, tokens, True)
say(done=True)
