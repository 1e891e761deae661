// Residual addition and root-mean-square normalisation (Zhang and Sennrich 2019), one block a row. Reads x (and delta) once and
// writes x (where there is a delta) and out, 8 to 16 bytes an element: bound by memory with many rows, by latency with one.
// Accesses are of 128 bits, and a thread's of its first PARTS parts (rows to 4,096) are in flight together with the weight's: a row
// of 4,096 is twelve loads and eight stores a thread, where element by element it was 64 and 32. Columns after these are read again
// from the first-level cache.
#include "shared/common.cuh"

template <int W>
DEVICE void rms_norm_row(const NormParams& p, float* scratch) {
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * p.cols;
    float* x = at<float>(p.x) + row;
    const float* delta = at<const float>(p.delta) + row;
    Part<W> kept[PARTS], weight[PARTS], more[PARTS];
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t column = part_column<W>(i);
        if (column >= p.cols) continue;
        kept[i] = load_part<W>(x + column);
        if (p.delta) more[i] = load_part<W>(delta + column);
        weight[i] = load_stored<W>(p.weight, p.weight_type, column);
    }
    float squares = 0;
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t column = part_column<W>(i);
        if (column >= p.cols) continue;
#pragma unroll
        for (int e = 0; e < W; e++) {
            if (p.delta) kept[i].x[e] += more[i].x[e];
            squares += kept[i].x[e] * kept[i].x[e];
        }
        if (p.delta) store_part(x + column, kept[i]);
    }
    const uint32_t rest = part_column<W>(PARTS);
    for (uint32_t column = rest; column < p.cols; column += blockDim.x * W) {
        Part<W> part = load_part<W>(x + column);
        if (p.delta) {
            const Part<W> other = load_part<W>(delta + column);
            for (int e = 0; e < W; e++) part.x[e] += other.x[e];
            store_part(x + column, part);
        }
        for (int e = 0; e < W; e++) squares += part.x[e] * part.x[e];
    }
    const float factor = 1.0f / sqrtf(block_sum(squares, scratch) / p.cols + p.eps);
    float* out = at<float>(p.out) + row;
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t column = part_column<W>(i);
        if (column >= p.cols) continue;
        const Part<W> scale = widened(weight[i], p.weight_type);
#pragma unroll
        for (int e = 0; e < W; e++) kept[i].x[e] = kept[i].x[e] * factor * scale.x[e];
        store_part(out + column, kept[i]);
    }
    // Each thread reads what it wrote itself.
    for (uint32_t column = rest; column < p.cols; column += blockDim.x * W) {
        Part<W> part = load_part<W>(x + column);
        const Part<W> scale = load_part_any<W>(p.weight, p.weight_type, column);
        for (int e = 0; e < W; e++) part.x[e] = part.x[e] * factor * scale.x[e];
        store_part(out + column, part);
    }
}

KERNEL(rms_norm, 256, 1, NormParams) {
    SHARED float scratch[32];
    if (is_wide(p.cols, p.x, p.delta, p.weight, p.out)) {
        rms_norm_row<WIDE>(p, scratch);
    } else {
        rms_norm_row<1>(p, scratch);
    }
}
