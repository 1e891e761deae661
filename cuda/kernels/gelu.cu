// The Gaussian error linear unit (Hendrycks and Gimpel 2016), exact or by its tanh approximation. 8 bytes an element. A thread has
// four elements: a load and a store of 128 bits, or, where the array is not aligned or at its end, of 32 bits each.
#include "shared/activation.cuh"

DEVICE float gelu_of(float v, bool tanh) { return tanh ? gelu_tanh(v) : gelu_exact(v); }

KERNEL(gelu, 256, 1, GeluParams) {
    const float* x = at<const float>(p.x);
    float* out = at<float>(p.out);
    const uint64_t first = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * WIDE;
    if (first + WIDE <= p.count && is_wide(WIDE, p.x, p.out)) {
        Part<WIDE> part = load_part<WIDE>(x + first);
#pragma unroll
        for (uint32_t e = 0; e < WIDE; e++) part.x[e] = gelu_of(part.x[e], p.tanh);
        store_part(out + first, part);
    } else {
        for (uint64_t i = first; i < p.count && i < first + WIDE; i++) out[i] = gelu_of(x[i], p.tanh);
    }
}
