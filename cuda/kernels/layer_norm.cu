// Residual addition and layer normalisation (Ba et al. 2016), one block a row, with the variance from a second pass over the
// row, so that nothing cancels. Traffic and accesses as rms_norm: the first PARTS parts of a thread stay in registers.
#include "shared/common.cuh"

template <int W>
DEVICE void layer_norm_row(const NormParams& p, float* scratch) {
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * p.cols;
    float* x = at<float>(p.x) + row;
    const float* delta = at<const float>(p.delta) + row;
    Part<W> kept[PARTS], more[PARTS];
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t column = part_column<W>(i);
        if (column >= p.cols) continue;
        kept[i] = load_part<W>(x + column);
        if (p.delta) more[i] = load_part<W>(delta + column);
    }
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t column = part_column<W>(i);
        if (column >= p.cols) continue;
#pragma unroll
        for (int e = 0; e < W; e++) {
            if (p.delta) kept[i].x[e] += more[i].x[e];
            sum += kept[i].x[e];
        }
        if (p.delta) store_part(x + column, kept[i]);
    }
    const uint32_t rest = part_column<W>(PARTS), step = blockDim.x * W;
    for (uint32_t column = rest; column < p.cols; column += step) {
        Part<W> part = load_part<W>(x + column);
        if (p.delta) {
            const Part<W> other = load_part<W>(delta + column);
            for (int e = 0; e < W; e++) part.x[e] += other.x[e];
            store_part(x + column, part);
        }
        for (int e = 0; e < W; e++) sum += part.x[e];
    }
    // Under way while the block sums.
    Part<W> weight[PARTS];
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t column = part_column<W>(i);
        if (column >= p.cols) continue;
        weight[i] = load_stored<W>(p.weight, p.weight_type, column);
        if (p.bias) more[i] = load_stored<W>(p.bias, p.weight_type, column);
    }
    const float mean = block_sum(sum, scratch) / p.cols;
    float squares = 0;
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        if (part_column<W>(i) >= p.cols) continue;
#pragma unroll
        for (int e = 0; e < W; e++) squares += (kept[i].x[e] - mean) * (kept[i].x[e] - mean);
    }
    for (uint32_t column = rest; column < p.cols; column += step) {
        const Part<W> part = load_part<W>(x + column);
        for (int e = 0; e < W; e++) squares += (part.x[e] - mean) * (part.x[e] - mean);
    }
    const float factor = 1.0f / sqrtf(block_sum(squares, scratch) / p.cols + p.eps);
    const auto write = [&](uint32_t column, Part<W> part, const Part<W>& stored_weight, const Part<W>& stored_bias) {
        const Part<W> weight = widened(stored_weight, p.weight_type), bias = widened(stored_bias, p.weight_type);
#pragma unroll
        for (int e = 0; e < W; e++) {
            part.x[e] = (part.x[e] - mean) * factor * weight.x[e];
            if (p.bias) part.x[e] += bias.x[e];
        }
        store_part(at<float>(p.out) + row + column, part);
    };
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        if (part_column<W>(i) < p.cols) write(part_column<W>(i), kept[i], weight[i], more[i]);
    }
    for (uint32_t column = rest; column < p.cols; column += step) {
        const Part<W> scale = load_stored<W>(p.weight, p.weight_type, column);
        const Part<W> bias = p.bias ? load_stored<W>(p.bias, p.weight_type, column) : Part<W>{};
        write(column, load_part<W>(x + column), scale, bias);
    }
}

KERNEL(layer_norm, 256, 1, NormParams) {
    SHARED float scratch[32];
    if (is_wide(p.cols, p.x, p.delta, p.weight | p.bias, p.out)) {
        layer_norm_row<WIDE>(p, scratch);
    } else {
        layer_norm_row<1>(p, scratch);
    }
}
