// Kernels of packed weights, one stem a format: see shared/packed_few.cuh, shared/packed.cuh and shared/codes.cuh.
#include "shared/packed.cuh"
#include "shared/packed_few.cuh"
#include "shared/weight_fp8.cuh"
#include "shared/weight_int4.cuh"
#include "shared/weight_mxfp4.cuh"
#include "shared/weight_q4_0.cuh"
#include "shared/weight_q4_k.cuh"
#include "shared/weight_q5_k.cuh"
#include "shared/weight_q6_k.cuh"
#include "shared/weight_q8_0.cuh"

// Products of few rows wait behind the copies of their first weights. For M weight rows of 16, and tiles and terms of activations.
#define GEMV_PACKED(NAME, WEIGHT, ROWS, M, TILES, TERMS, WARPS, BLOCKS)       \
    KERNEL_THAT_WAITS(gemv_##NAME##_##ROWS, 32 * WARPS, BLOCKS, GemvParams) { \
        launch_dependents();                                                  \
        gemv_packed<WEIGHT, M, TILES, TERMS, WARPS>(p);                       \
    }

// BLOCKS and GROUPED_BLOCKS: blocks of the kernels of 16 rows and of experts on a multiprocessor, as many as their registers allow
// without spilling.
#define PACKED(NAME, WEIGHT, BLOCKS, GROUPED_BLOCKS)                                               \
    GEMV_PACKED(NAME, WEIGHT, 4, 1, 1, 1, 8, 3)                                                    \
    GEMV_PACKED(NAME, WEIGHT, 8, 1, 1, 2, 8, 2)                                                    \
    GEMV_PACKED(NAME, WEIGHT, 16, 2, 2, 2, 4, BLOCKS)                                              \
    KERNEL(grouped_gemv_##NAME, 128, GROUPED_BLOCKS, GroupedParams) { grouped_packed<WEIGHT>(p); } \
    KERNEL(unpack_##NAME, 256, 4, UnpackParams) { unpack<WEIGHT>(p); }

PACKED(q8_0, WeightQ8_0, 3, 4)
PACKED(q4_0, WeightQ4_0, 3, 4)
PACKED(q4_k, WeightQ4K, 3, 4)
PACKED(q5_k, WeightQ5K, 3, 3)
PACKED(q6_k, WeightQ6K, 3, 4)
PACKED(mxfp4, WeightMxfp4, 3, 4)
PACKED(fp8, WeightFp8, 3, 4)
PACKED(int4_g32, WeightInt4G32, 2, 4)
PACKED(int4_g64, WeightInt4G64, 3, 4)
PACKED(int4_g128, WeightInt4G128, 3, 4)
