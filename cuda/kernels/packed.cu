// Kernels of packed weights, one stem a format: see shared/packed_row.cuh, shared/packed_few.cuh, shared/packed.cuh and
// shared/codes.cuh.
#include "shared/packed.cuh"
#include "shared/packed_few.cuh"
#include "shared/packed_row.cuh"
#include "shared/packed_terms.cuh"
#include "shared/weight_fp8.cuh"
#include "shared/weight_int4.cuh"
#include "shared/weight_mxfp4.cuh"
#include "shared/weight_q4_0.cuh"
#include "shared/weight_q4_k.cuh"
#include "shared/weight_q5_k.cuh"
#include "shared/weight_q6_k.cuh"
#include "shared/weight_q8_0.cuh"

KERNEL(split_packed, 128, 8, SplitPackedParams) { split_terms(p); }

// Products of few rows wait behind the loads, or copies, of their first weights.
#define STREAM_PACKED(NAME, THREADS, BLOCKS, ...)            \
    KERNEL_THAT_WAITS(NAME, THREADS, BLOCKS, StreamParams) { \
        launch_dependents();                                 \
        __VA_ARGS__(p);                                      \
    }

// ROW_BLOCKS and GROUPED_BLOCKS: blocks of the kernels of one row and of experts, as many as registers allow without spilling.
#define PACKED(NAME, WEIGHT, ROW_BLOCKS, GROUPED_BLOCKS)                                           \
    STREAM_PACKED(gemv_##NAME##_1, 32 * STREAM_WARPS, ROW_BLOCKS, stream_row<WEIGHT>)              \
    STREAM_PACKED(gemv_##NAME##_8, 32 * FEW_WARPS, 1, stream_few<WEIGHT, 1>)                       \
    STREAM_PACKED(gemv_##NAME##_16, 32 * FEW_WARPS, 1, stream_few<WEIGHT, 2>)                      \
    KERNEL(grouped_gemv_##NAME, 128, GROUPED_BLOCKS, GroupedParams) { grouped_packed<WEIGHT>(p); } \
    KERNEL(unpack_##NAME, 256, 4, UnpackParams) { unpack<WEIGHT>(p); }

#if __CUDA_ARCH__ >= 900
#define Q4_K_ROW_BLOCKS 3
#else
#define Q4_K_ROW_BLOCKS 2
#endif

PACKED(q8_0, WeightQ8_0, 3, 4)
PACKED(q4_0, WeightQ4_0, 3, 4)
PACKED(q4_k, WeightQ4K, Q4_K_ROW_BLOCKS, 4)
PACKED(q5_k, WeightQ5K, 3, 3)
PACKED(q6_k, WeightQ6K, 2, 4)
PACKED(mxfp4, WeightMxfp4, 3, 4)
PACKED(fp8, WeightFp8, 3, 4)
PACKED(int4_g32, WeightInt4G32, 3, 4)
PACKED(int4_g64, WeightInt4G64, 3, 4)
PACKED(int4_g128, WeightInt4G128, 3, 4)
