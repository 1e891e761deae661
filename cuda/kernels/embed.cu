// Embedding: rows of a table, widened. Reads `cols` elements of the table and writes as many f32 a row: bound by memory. Loads
// are of 64 bits for 16-bit tables and of 128 for f32, stores of 128, where rows are aligned; a thread's PARTS loads are under
// way together.
#include "shared/common.cuh"

template <int W>
DEVICE void embed_row(const EmbedParams& p) {
    const uint32_t row = blockIdx.x;
    const uint64_t from = static_cast<uint64_t>(at<const uint32_t>(p.ids)[row]) * p.ld;
    float* out = at<float>(p.out) + static_cast<uint64_t>(row) * p.cols;
    for (uint32_t first = 0; first < p.cols; first += PARTS * blockDim.x * W) {
        Part<W> part[PARTS], before[PARTS];
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++) {
            const uint32_t column = first + part_column<W>(i);
            if (column >= p.cols) continue;
            part[i] = load_stored<W>(p.table, p.table_type, from + column);
            if (p.add) before[i] = load_part<W>(out + column);
        }
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++) {
            const uint32_t column = first + part_column<W>(i);
            if (column >= p.cols) continue;
            Part<W> x = widened(part[i], p.table_type);
#pragma unroll
            for (int e = 0; e < W; e++) {
                if (p.add) x.x[e] += before[i].x[e];
            }
            store_part(out + column, x);
        }
    }
}

KERNEL(embed, 256, 1, EmbedParams) {
    // Rows of the table begin at multiples of 4 elements, too.
    if (p.ld % WIDE == 0 && is_wide(p.cols, p.table, p.out)) {
        embed_row<WIDE>(p);
    } else {
        embed_row<1>(p);
    }
}
