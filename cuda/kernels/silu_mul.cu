// The gated activation of Llama's feed-forward layer (SwiGLU, Shazeer 2020). 12 bytes an output element: bound by memory. A thread
// has four columns: two loads and a store of 128 bits, or, where rows are not aligned, four of 32 bits each.
#include "shared/activation.cuh"

template <int W>
DEVICE void silu_mul_row(const GateParams& p) {
    const float* gate = at<const float>(p.x) + static_cast<uint64_t>(blockIdx.y) * 2 * p.n;
    float* out = at<float>(p.out) + static_cast<uint64_t>(blockIdx.y) * p.n;
    // A block has 4 times as many columns as threads.
    constexpr uint32_t COUNT = WIDE / W;
    const uint32_t first = blockIdx.x * WIDE * blockDim.x;
    Part<W> a[COUNT], b[COUNT];
#pragma unroll
    for (uint32_t i = 0; i < COUNT; i++) {
        const uint32_t column = first + part_column<W>(i);
        if (column >= p.n) continue;
        a[i] = load_part<W>(gate + column);
        b[i] = load_part<W>(gate + p.n + column);
    }
#pragma unroll
    for (uint32_t i = 0; i < COUNT; i++) {
        const uint32_t column = first + part_column<W>(i);
        if (column >= p.n) continue;
#pragma unroll
        for (int e = 0; e < W; e++) a[i].x[e] = silu_times(a[i].x[e], b[i].x[e]);
        store_part(out + column, a[i]);
    }
}

KERNEL(silu_mul, 256, 1, GateParams) {
    if (is_wide(p.n, p.x, p.out)) {
        silu_mul_row<WIDE>(p);
    } else {
        silu_mul_row<1>(p);
    }
}
