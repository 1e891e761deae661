// Residual addition and layer normalisation (Ba et al. 2016), one block a row, with the variance from a second pass over the
// row in the first-level cache, so that nothing cancels. Traffic as rms_norm.
#include "shared/common.cuh"

KERNEL(layer_norm, 256, 1, NormParams) {
    SHARED float scratch[32];
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * p.cols;
    float* x = at<float>(p.x) + row;
    float sum = 0;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        float value = x[i];
        if (p.delta) {
            value += (at<const float>(p.delta) + row)[i];
            x[i] = value;
        }
        sum += value;
    }
    const float mean = block_sum(sum, scratch) / p.cols;
    float squares = 0;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / sqrtf(block_sum(squares, scratch) / p.cols + p.eps);
    float* out = at<float>(p.out) + row;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) {
        const float scaled = (x[i] - mean) * factor * load_any(p.weight, p.weight_type, i);
        out[i] = p.bias ? scaled + load_any(p.bias, p.weight_type, i) : scaled;
    }
}
