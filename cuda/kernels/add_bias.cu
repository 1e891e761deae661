// A vector added to every row. 8 bytes an element.
#include "shared/common.cuh"

KERNEL(add_bias, 256, 1, BiasParams) {
    float* x = at<float>(p.x) + static_cast<uint64_t>(blockIdx.x) * p.cols;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) x[i] += load_any(p.bias, p.bias_type, i);
}
