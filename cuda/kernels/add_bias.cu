// A vector added to every row. 8 bytes an element. Accesses are of 128 bits where rows are aligned, a thread's of PARTS parts
// in flight together.
#include "shared/common.cuh"

template <int W>
DEVICE void add_bias_row(const BiasParams& p) {
    float* x = at<float>(p.x) + static_cast<uint64_t>(blockIdx.x) * p.cols;
    for (uint32_t first = 0; first < p.cols; first += PARTS * blockDim.x * W) {
        Part<W> part[PARTS], bias[PARTS];
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++) {
            const uint32_t column = first + part_column<W>(i);
            if (column >= p.cols) continue;
            part[i] = load_part<W>(x + column);
            bias[i] = load_stored<W>(p.bias, p.bias_type, column);
        }
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++) {
            const uint32_t column = first + part_column<W>(i);
            if (column >= p.cols) continue;
            const Part<W> more = widened(bias[i], p.bias_type);
#pragma unroll
            for (int e = 0; e < W; e++) part[i].x[e] += more.x[e];
            store_part(x + column, part[i]);
        }
    }
}

KERNEL(add_bias, 256, 1, BiasParams) {
    if (is_wide(p.cols, p.x, p.bias)) {
        add_bias_row<WIDE>(p);
    } else {
        add_bias_row<1>(p);
    }
}
