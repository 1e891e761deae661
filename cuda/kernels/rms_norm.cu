// Residual addition and root-mean-square normalisation (Zhang and Sennrich 2019), one block a row. Reads x (and delta) from
// memory once, writes x (where there is a delta) and out; the second pass over x finds it in the first-level cache (rows to
// 32 K elements). 8 to 16 bytes an element: bound by memory with many rows, by latency with one.
#include "shared/common.cuh"

KERNEL(rms_norm, 256, 1, NormParams) {
    SHARED float scratch[32];
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * p.cols;
    float* x = at<float>(p.x) + row;
    float squares = 0;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        float value = x[i];
        if (p.delta) {
            value += (at<const float>(p.delta) + row)[i];
            x[i] = value;
        }
        squares += value * value;
    }
    const float factor = 1.0f / sqrtf(block_sum(squares, scratch) / p.cols + p.eps);
    float* out = at<float>(p.out) + row;
    // Each thread reads what it wrote itself.
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        out[i] = x[i] * factor * load_any(p.weight, p.weight_type, i);
    }
}
