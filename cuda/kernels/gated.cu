// Gated activations of feed-forward layers: SwiGLU (Shazeer 2020), GELU by tanh (Gemma), and the clamped gate of gpt-oss. 12 bytes
// an output element: bound by memory. A thread has four columns: two loads and a store of 128 bits, or, where rows are not aligned,
// four of 32 bits each.
#include "shared/activation.cuh"

struct SiluMul {
    DEVICE static float of(float gate, float up) { return silu_times(gate, up); }
};
struct GeluTanhMul {
    DEVICE static float of(float gate, float up) { return gelu_tanh(gate) * up; }
};
struct ClampedSwiglu {
    DEVICE static float of(float gate, float up) { return clamped_swiglu(gate, up); }
};

template <typename Function, int W>
DEVICE void gated_row(const GateParams& p) {
    const float* gate = at<const float>(p.x) + static_cast<uint64_t>(blockIdx.x) * 2 * p.n;
    float* out = at<float>(p.out) + static_cast<uint64_t>(blockIdx.x) * p.n;
    // A block has 4 times as many columns as threads.
    constexpr uint32_t COUNT = WIDE / W;
    const uint32_t first = blockIdx.y * WIDE * blockDim.x;
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
        for (int e = 0; e < W; e++) a[i].x[e] = Function::of(a[i].x[e], b[i].x[e]);
        store_part(out + column, a[i]);
    }
}

template <typename Function>
DEVICE void gated(const GateParams& p) {
    if (is_wide(p.n, p.x, p.out)) {
        gated_row<Function, WIDE>(p);
    } else {
        gated_row<Function, 1>(p);
    }
}

KERNEL(silu_mul, 256, 1, GateParams) { gated<SiluMul>(p); }
KERNEL(gelu_tanh_mul, 256, 1, GateParams) { gated<GeluTanhMul>(p); }
KERNEL(clamped_swiglu, 256, 1, GateParams) { gated<ClampedSwiglu>(p); }
