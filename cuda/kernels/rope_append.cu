// Rotary position embedding (Su et al. 2021) in place, and the append of K and V to the store; one block a row. Moves 8 bytes
// an element of q and k, 4 of v, and writes K and V in the store's type.
#include "shared/common.cuh"

KERNEL(rope_append, 256, 1, RopeParams) {
    const uint32_t row = blockIdx.x, half = p.head_dim / 2;
    const uint32_t rotated = p.heads + p.kv_heads;
    float* x = at<float>(p.qkv) + static_cast<uint64_t>(row) * (rotated + p.kv_heads) * p.head_dim;
    const uint32_t slot = at<const uint32_t>(p.slots)[row];
    const bool stored = slot != 0xffffffffu;
    const uint64_t token = static_cast<uint64_t>(slot) * p.kv.token_stride;
    if (p.rope) {
        const float* cosines = at<const float>(p.rope) + static_cast<uint64_t>(row) * p.head_dim;
        for (uint32_t i = threadIdx.x; i < rotated * half; i += blockDim.x) {
            const uint32_t head = i / half, j = i % half;
            float* pair = x + head * p.head_dim + j;
            const float a = pair[0], b = pair[half], c = cosines[j], s = cosines[j + half];
            const float first = a * c - b * s, second = b * c + a * s;
            pair[0] = first;
            pair[half] = second;
            if (stored && head >= p.heads) {
                const uint64_t to = token + (head - p.heads) * p.kv.head_stride + j;
                store_any(p.kv.k, p.kv_type, to, first);
                store_any(p.kv.k, p.kv_type, to + half, second);
            }
        }
    }
    if (!stored) return;
    const uint32_t kv_dim = p.kv_heads * p.head_dim;
    const float* k = x + p.heads * p.head_dim;
    // What was rotated is stored already; without a rotation keys are stored here, with the values.
    for (uint32_t i = threadIdx.x; i < kv_dim; i += blockDim.x) {
        const uint64_t to = token + (i / p.head_dim) * p.kv.head_stride + i % p.head_dim;
        if (!p.rope) store_any(p.kv.k, p.kv_type, to, k[i]);
        store_any(p.kv.v, p.kv_type, to, k[kv_dim + i]);
    }
}
