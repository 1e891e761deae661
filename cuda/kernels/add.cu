// Rows added to rows. 12 bytes an element: bound by memory. A thread has four elements: two loads and a store of 128 bits, or,
// where an array is not aligned or at its end, of 32 bits each.
#include "shared/common.cuh"

KERNEL(add, 256, 1, AddParams) {
    float* x = at<float>(p.x);
    const float* y = at<const float>(p.y);
    const uint64_t first = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * WIDE;
    if (first + WIDE <= p.count && is_wide(WIDE, p.x, p.y)) {
        Part<WIDE> sum = load_part<WIDE>(x + first);
        const Part<WIDE> more = load_part<WIDE>(y + first);
#pragma unroll
        for (uint32_t e = 0; e < WIDE; e++) sum.x[e] += more.x[e];
        store_part(x + first, sum);
    } else {
        for (uint64_t i = first; i < p.count && i < first + WIDE; i++) x[i] += y[i];
    }
}
