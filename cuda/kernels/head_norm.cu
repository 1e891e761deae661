// Root-mean-square normalisation of query and key heads in place (Qwen3), one warp a head. 8 bytes an element: bound by memory with
// many rows, by latency with one. Accesses are of 128 bits where heads are aligned, and a lane's of its first PARTS parts (heads to
// 512) are in flight together with the weight's. Elements after these are read again from the first-level cache.
#include "shared/common.cuh"

// The element of a lane's part `i`, where a warp shares a head in turns.
template <int W>
DEVICE uint32_t lane_element(uint32_t i) {
    return (threadIdx.x % 32 + i * 32) * W;
}

template <int W>
DEVICE void norm_head(float* x, Address weight, uint32_t type, uint32_t dim, float eps) {
    Part<W> kept[PARTS], scale[PARTS];
    float squares = 0;
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t e = lane_element<W>(i);
        if (e >= dim) continue;
        kept[i] = load_part<W>(x + e);
        scale[i] = load_stored<W>(weight, type, e);
    }
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        if (lane_element<W>(i) >= dim) continue;
#pragma unroll
        for (int j = 0; j < W; j++) squares += kept[i].x[j] * kept[i].x[j];
    }
    const uint32_t rest = lane_element<W>(PARTS);
    for (uint32_t e = rest; e < dim; e += 32 * W) {
        const Part<W> part = load_part<W>(x + e);
        for (int j = 0; j < W; j++) squares += part.x[j] * part.x[j];
    }
    const float factor = 1.0f / sqrtf(warp_sum(squares) / dim + eps);
#pragma unroll
    for (uint32_t i = 0; i < PARTS; i++) {
        const uint32_t e = lane_element<W>(i);
        if (e >= dim) continue;
        const Part<W> wide = widened(scale[i], type);
#pragma unroll
        for (int j = 0; j < W; j++) kept[i].x[j] = kept[i].x[j] * factor * wide.x[j];
        store_part(x + e, kept[i]);
    }
    // Each lane reads what it alone writes.
    for (uint32_t e = rest; e < dim; e += 32 * W) {
        Part<W> part = load_part<W>(x + e);
        const Part<W> wide = load_part_any<W>(weight, type, e);
        for (int j = 0; j < W; j++) part.x[j] = part.x[j] * factor * wide.x[j];
        store_part(x + e, part);
    }
}

// Grid: blocks of heads, those of a row one after the other.
KERNEL(head_norm, 256, 1, HeadNormParams) {
    const uint32_t normed = p.heads + p.kv_heads;
    const uint64_t index = static_cast<uint64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const uint64_t row = index / normed;
    const uint32_t head = static_cast<uint32_t>(index % normed);
    if (row >= p.rows) return;
    float* x = at<float>(p.qkv) + row * (p.heads + 2 * p.kv_heads) * p.head_dim + head * p.head_dim;
    const bool query = head < p.heads;
    const Address weight = query ? p.q_weight : p.k_weight;
    const uint32_t type = query ? p.q_type : p.k_type;
    if (is_wide(p.head_dim, p.qkv, weight)) {
        norm_head<WIDE>(x, weight, type, p.head_dim, p.eps);
    } else {
        norm_head<1>(x, weight, type, p.head_dim, p.eps);
    }
}
