// Rows of a tensor, copied. Moves 8 bytes an element.
#include "shared/common.cuh"

KERNEL(gather_rows, 256, 1, GatherParams) {
    const float* x = at<const float>(p.x) + static_cast<uint64_t>(at<const uint32_t>(p.rows)[blockIdx.x]) * p.cols;
    float* out = at<float>(p.out) + static_cast<uint64_t>(blockIdx.x) * p.cols;
    for (uint32_t i = threadIdx.x; i < p.cols; i += blockDim.x) out[i] = x[i];
}
