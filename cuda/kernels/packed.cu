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
#define GEMV_PACKED(NAME, WEIGHT, ROWS, BLOCKS)                        \
    KERNEL_THAT_WAITS(gemv_##NAME##_##ROWS, 256, BLOCKS, GemvParams) { \
        launch_dependents();                                           \
        gemv_packed<WEIGHT, ROWS>(p);                                  \
    }

// GROUPED_BLOCKS: blocks of the grouped kernel on a multiprocessor, as many as its registers allow without spilling.
#define PACKED(NAME, WEIGHT, GROUPED_BLOCKS)                                                       \
    GEMV_PACKED(NAME, WEIGHT, 1, 3)                                                                \
    GEMV_PACKED(NAME, WEIGHT, 2, 2)                                                                \
    GEMV_PACKED(NAME, WEIGHT, 4, 2)                                                                \
    KERNEL(grouped_gemv_##NAME, 128, GROUPED_BLOCKS, GroupedParams) { grouped_packed<WEIGHT>(p); } \
    KERNEL(unpack_##NAME, 256, 2, UnpackParams) { unpack<WEIGHT>(p); }

PACKED(q8_0, WeightQ8_0, 4)
PACKED(q4_0, WeightQ4_0, 4)
PACKED(q4_k, WeightQ4K, 4)
PACKED(q5_k, WeightQ5K, 3)
PACKED(q6_k, WeightQ6K, 4)
PACKED(mxfp4, WeightMxfp4, 4)
PACKED(fp8, WeightFp8, 4)
PACKED(int4_g32, WeightInt4G32, 4)
PACKED(int4_g64, WeightInt4G64, 4)
PACKED(int4_g128, WeightInt4G128, 4)
