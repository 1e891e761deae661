// Embedding: rows of a table, widened. Reads `cols` elements of the table and writes as many f32 a row: bound by memory.
#include "shared/common.cuh"

KERNEL(embed, 256, 1, EmbedParams) {
    const uint32_t row = blockIdx.x;
    const uint64_t from = static_cast<uint64_t>(at<const uint32_t>(p.ids)[row]) * p.ld;
    float* out = at<float>(p.out) + static_cast<uint64_t>(row) * p.cols;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        const float x = load_any(p.table, p.table_type, from + i);
        out[i] = p.add ? out[i] + x : x;
    }
}
