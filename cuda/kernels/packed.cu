// Kernels of packed weights, one stem a format: see shared/packed.cuh and shared/codes.cuh.
#include "shared/packed.cuh"
#include "shared/weight_fp8.cuh"
#include "shared/weight_int4.cuh"
#include "shared/weight_mxfp4.cuh"
#include "shared/weight_q4_0.cuh"
#include "shared/weight_q4_k.cuh"
#include "shared/weight_q5_k.cuh"
#include "shared/weight_q6_k.cuh"
#include "shared/weight_q8_0.cuh"

// Products of few rows wait behind the loads of their first weights.
#define GEMV_PACKED(NAME, WEIGHT, ROWS, BLOCKS)                         \
    KERNEL_THAT_WAITS(gemv_##NAME##_##ROWS, 256, BLOCKS, GemvParams) {  \
        launch_dependents();                                            \
        gemv_packed<WEIGHT, ROWS>(p);                                   \
    }

#define PACKED(NAME, WEIGHT)                                                                      \
    GEMV_PACKED(NAME, WEIGHT, 1, 3)                                                               \
    GEMV_PACKED(NAME, WEIGHT, 2, 2)                                                               \
    GEMV_PACKED(NAME, WEIGHT, 4, 2)                                                               \
    KERNEL(grouped_gemv_##NAME, 128, 4, GroupedParams) { grouped_packed<WEIGHT>(p); }             \
    KERNEL(unpack_##NAME, 256, 2, UnpackParams) { unpack<WEIGHT>(p); }

PACKED(q8_0, WeightQ8_0)
PACKED(q4_0, WeightQ4_0)
PACKED(q4_k, WeightQ4K)
PACKED(q5_k, WeightQ5K)
PACKED(q6_k, WeightQ6K)
PACKED(mxfp4, WeightMxfp4)
PACKED(fp8, WeightFp8)
PACKED(int4_g32, WeightInt4G32)
PACKED(int4_g64, WeightInt4G64)
PACKED(int4_g128, WeightInt4G128)
