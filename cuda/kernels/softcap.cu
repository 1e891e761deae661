// Soft caps of elements: x = cap tanh(x / cap), with the cap as the factor. 8 bytes an element: bound by memory. A thread has four
// elements, as in scale.cu.
#include "shared/common.cuh"

KERNEL(softcap, 256, 1, ScaleParams) {
    float* x = at<float>(p.x);
    const uint64_t first = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * WIDE;
    const SoftCap cap(p.factor);
    if (first + WIDE <= p.count && is_wide(WIDE, p.x)) {
        Part<WIDE> part = load_part<WIDE>(x + first);
#pragma unroll
        for (uint32_t e = 0; e < WIDE; e++) part.x[e] = cap.of(part.x[e]);
        store_part(x + first, part);
    } else {
        for (uint64_t i = first; i < p.count && i < first + WIDE; i++) x[i] = cap.of(x[i]);
    }
}
