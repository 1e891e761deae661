// Elements times a factor. 8 bytes an element: bound by memory. A thread has four elements: a load and a store of 128 bits, or,
// where the array is not aligned or at its end, of 32 bits each.
#include "shared/common.cuh"

KERNEL(scale, 256, 1, ScaleParams) {
    float* x = at<float>(p.x);
    const uint64_t first = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * WIDE;
    if (first + WIDE <= p.count && is_wide(WIDE, p.x)) {
        Part<WIDE> part = load_part<WIDE>(x + first);
#pragma unroll
        for (uint32_t e = 0; e < WIDE; e++) part.x[e] *= p.factor;
        store_part(x + first, part);
    } else {
        for (uint64_t i = first; i < p.count && i < first + WIDE; i++) x[i] *= p.factor;
    }
}
