"""Writes packed blocks of FP8 and INT4 with their elements to engine/backend/tests/formats (see tools/gguf/vectors.py).

Elements are computed here from what the blocks were made of: ml_dtypes' float8_e4m3fn times a scale, and integers less a zero
point times a scale.
"""

from pathlib import Path

import ml_dtypes
import numpy as np

OUT = Path(__file__).parent.parent.parent / "engine/backend/tests/formats"


def write(name, blocks, elements):
    packed = blocks.tobytes()
    data = np.uint32(len(packed)).tobytes() + packed + elements.astype(np.float32).tobytes()
    (OUT / f"{name}.bin").write_bytes(data)


def fp8(rng, count=4):
    codes = rng.integers(0, 256, (count, 128), dtype=np.uint8)
    codes[1] = np.concatenate([np.arange(0, 127), [0]])
    codes[2] = np.concatenate([np.arange(128, 255), [128]])
    codes[codes & 0x7F == 0x7F] = 0
    scales = (rng.standard_normal((count, 1)) * 0.01).astype(np.float32)
    scales[0] = np.float32(1e-38)  # Elements below the least normal number.
    elements = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    write("FP8", np.concatenate([scales.view(np.uint8), codes], axis=1), elements)


def int4(rng, group, count=20):
    codes = rng.integers(0, 16, (count, group), dtype=np.uint8)
    zeros = np.arange(count).reshape(-1, 1) % 17
    scales = (rng.standard_normal((count, 1)) * 0.01).astype(np.float16).astype(np.float32)
    scales[1::2] = scales[1::2].astype(ml_dtypes.bfloat16).astype(np.float32)
    scales[0] = np.float32(np.float16(6e-8))  # The least number of f16.
    header = scales.view(np.uint32) | zeros.astype(np.uint32)
    runs = codes.reshape(count, -1, 2, 16)
    packed = (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(count, -1)
    elements = (codes.astype(np.float32) - zeros.astype(np.float32)) * scales
    write(f"INT4_G{group}", np.concatenate([header.view(np.uint8), packed], axis=1), elements)


def main():
    rng = np.random.default_rng(29)
    fp8(rng)
    for group in (32, 64, 128):
        int4(rng, group)


if __name__ == "__main__":
    main()
