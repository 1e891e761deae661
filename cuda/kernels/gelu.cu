// The Gaussian error linear unit (Hendrycks and Gimpel 2016), exact or by its tanh approximation. 8 bytes an element.
#include "shared/activation.cuh"

KERNEL(gelu, 256, 1, GeluParams) {
    const float* x = at<const float>(p.x);
    float* out = at<float>(p.out);
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * 4 * blockDim.x + threadIdx.x;
    for (uint64_t i = first; i < p.count && i < first + 4 * blockDim.x; i += blockDim.x) {
        const float v = x[i];
        if (p.tanh) {
            const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
            // 1 + tanh(a) = 2 / (1 + exp(-2 a)), which loses nothing where tanh is close to -1.
            out[i] = v / (1.0f + expf(-2.0f * inner));
        } else {
            out[i] = gelu_exact(v);
        }
    }
}
