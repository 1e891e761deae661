// The gated activation of Llama's feed-forward layer (SwiGLU, Shazeer 2020). 12 bytes an output element: bound by memory.
#include "shared/activation.cuh"

KERNEL(silu_mul, 256, 1, GateParams) {
    const float* gate = at<const float>(p.x) + static_cast<uint64_t>(blockIdx.y) * 2 * p.n;
    float* out = at<float>(p.out) + static_cast<uint64_t>(blockIdx.y) * p.n;
    // Four columns a thread, a block's width apart: loads coalesce and several are under way.
    const uint32_t first = blockIdx.x * 4 * blockDim.x + threadIdx.x;
    for (uint32_t i = first; i < p.n && i < first + 4 * blockDim.x; i += blockDim.x) {
        out[i] = silu_times(gate[i], gate[p.n + i]);
    }
}
