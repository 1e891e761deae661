"""Writes engine/backend/tests/formats: packed blocks of each format, and the elements that the gguf package gives for them.

Codes are random bytes of a fixed seed, scales random finite numbers. A file is the number of packed bytes (u32), the packed
bytes, and the elements (f32), all little-endian. The elements are bit for bit those of gguf.quants.dequantize.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize

OUT = Path(__file__).parent.parent.parent / "engine/backend/tests/formats"
# Blocks of each format, and where a block has scales in f16.
FORMATS = {
    T.Q8_0: (12, [0]),
    T.Q4_0: (12, [0]),
    T.Q4_1: (12, [0, 2]),
    T.Q5_0: (12, [0]),
    T.Q5_1: (12, [0, 2]),
    T.Q2_K: (3, [80, 82]),
    T.Q3_K: (3, [108]),
    T.Q4_K: (3, [0, 2]),
    T.Q5_K: (3, [0, 2]),
    T.Q6_K: (3, [208]),
    T.IQ4_NL: (12, [0]),
    T.IQ4_XS: (3, [0]),
    T.MXFP4: (12, []),
}


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(17)
    for kind, (count, scales) in FORMATS.items():
        _, size = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        for at in scales:
            values = (rng.standard_normal(count) * 10.0 ** rng.integers(-4, 2, count)).astype(np.float16)
            values[0] = np.float16(6e-8)  # The least number of f16.
            blocks[:, at : at + 2] = values.view(np.uint8).reshape(count, 2)
        if kind == T.MXFP4:
            blocks[:, 0] = [0, 1, 2, 3, 100, 118, 120, 122, 127, 130, 200, 251]
        elements = dequantize(blocks.reshape(1, -1), kind).astype(np.float32)
        assert np.isfinite(elements).all(), kind
        packed = blocks.tobytes()
        data = np.uint32(len(packed)).tobytes() + packed + elements.tobytes()
        (OUT / f"{kind.name}.bin").write_bytes(data)


if __name__ == "__main__":
    main()
