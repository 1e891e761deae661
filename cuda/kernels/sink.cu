// Attention sinks (Xiao et al. 2023; gpt-oss): a logit of each head joins the softmax's sum, one warp a head of a row. 8 bytes an
// element: bound by memory.
#include "shared/common.cuh"

template <int W>
DEVICE void shrink_head(float* out, uint32_t dim, float share) {
    for (uint32_t e = threadIdx.x % 32 * W; e < dim; e += 32 * W) {
        Part<W> part = load_part<W>(out + e);
#pragma unroll
        for (int j = 0; j < W; j++) part.x[j] *= share;
        store_part(out + e, part);
    }
}

// Grid: blocks of heads, those of a row one after the other.
KERNEL(sink, 256, 1, SinkParams) {
    const uint64_t index = static_cast<uint64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const uint64_t row = index / p.heads;
    const uint32_t head = static_cast<uint32_t>(index % p.heads);
    // Rows that have seen no key hold nothing meaningful.
    if (row >= p.rows || (p.count && at<const uint32_t>(p.count)[row] == 0)) return;
    // An overflowing exponential leaves nothing to the keys.
    const float share = 1.0f / (1.0f + expf(load_any(p.sinks, p.sink_type, head) - at<const float>(p.lse)[index]));
    float* out = at<float>(p.out) + index * p.head_dim;
    if (is_wide(p.head_dim, p.out)) {
        shrink_head<WIDE>(out, p.head_dim, share);
    } else {
        shrink_head<1>(out, p.head_dim, share);
    }
}
