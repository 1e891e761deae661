// Rows of a tensor, copied. Moves 8 bytes an element, by 128-bit accesses where rows are aligned; a thread's PARTS loads are under
// way together.
#include "shared/common.cuh"

template <int W>
DEVICE void gather_row(const GatherParams& p) {
    const float* x = at<const float>(p.x) + static_cast<uint64_t>(at<const uint32_t>(p.rows)[blockIdx.x]) * p.cols;
    float* out = at<float>(p.out) + static_cast<uint64_t>(blockIdx.x) * p.cols;
    for (uint32_t first = 0; first < p.cols; first += PARTS * blockDim.x * W) {
        Part<W> part[PARTS];
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++) {
            const uint32_t column = first + part_column<W>(i);
            if (column < p.cols) part[i] = load_part<W>(x + column);
        }
#pragma unroll
        for (uint32_t i = 0; i < PARTS; i++) {
            const uint32_t column = first + part_column<W>(i);
            if (column < p.cols) store_part(out + column, part[i]);
        }
    }
}

KERNEL(gather_rows, 256, 1, GatherParams) {
    if (is_wide(p.cols, p.x, p.out)) {
        gather_row<WIDE>(p);
    } else {
        gather_row<1>(p);
    }
}
