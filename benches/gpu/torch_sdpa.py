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


# Exception for a size that does not fit; older versions have no name of their own for it.
OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", RuntimeError)


def say(**found):
    print(json.dumps(found), flush=True)


def rounds(calls):
    """Seconds of a call in each of seven rounds, timed by the device where there is one. Calls are functions that are called in
    turn, each of which has inputs of its own, so that each reads memory and not the cache."""
    for call in calls:
        call()
    count, times = max(5, len(calls)), []
    for _ in range(7):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for i in range(count):
                calls[i % len(calls)]()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / count)
        else:
            started = time.perf_counter()
            for i in range(count):
                calls[i % len(calls)]()
            times.append((time.perf_counter() - started) / count)
    return sorted(times)


def copies(bytes_each):
    """How many inputs are used in turn: twice the cache is read between two uses of one."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 1 << 16
    return 1 if bytes_each >= 2 * cache else min(256, -(-2 * cache // bytes_each) + 1)


def attend(batch, rows, keys, causal, grouped):
    kv_heads = KV if grouped else H
    more = {"enable_gqa": True} if grouped else {}

    def random(*shape):
        return torch.randn(*shape, D, device=device, dtype=torch.bfloat16)

    def call():
        q, k, v = random(batch, H, rows), random(batch, kv_heads, keys), random(batch, kv_heads, keys)
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, **more)

    bytes_each = 2 * D * batch * (H * rows + 2 * kv_heads * keys)
    return rounds([call() for _ in range(copies(bytes_each))])


def measure(kind, batch, rows, keys, causal):
    for name, backend in BACKENDS.items():
        # The scores of the plain form do not fit for long prompts.
        if name == "math" and batch * H * rows * keys > 1 << 31:
            continue
        for grouped in (True, False) if H != KV else (True,):
            found = {"kind": kind, "backend": name, "grouped": grouped, "batch": batch, "rows": rows, "keys": keys}
            try:
                with sdpa_kernel([backend]), torch.no_grad():
                    times = attend(batch, rows, keys, causal, grouped)
                found.update(us=times[3] * 1e6, us_least=times[0] * 1e6, us_most=times[6] * 1e6)
            except (RuntimeError, TypeError, OUT_OF_MEMORY) as error:
                found["unsupported"] = str(error).splitlines()[0][:200]
            if device == "cuda":
                torch.cuda.empty_cache()
            say(**found)


say(torch=torch.__version__, device=torch.cuda.get_device_name() if device == "cuda" else "cpu", cuda=torch.version.cuda)
for batch, context in sizes["decode"]:
    measure("decode", batch, 1, context, False)
for tokens in sizes["prefill"]:
    measure("prefill", 1, tokens, tokens, True)
say(done=True)
