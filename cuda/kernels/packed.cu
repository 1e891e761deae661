// Kernels of packed weights, one stem a format: see shared/packed_rows.cuh, shared/packed_few.cuh, shared/packed.cuh and
// shared/codes.cuh.
#include "shared/packed.cuh"
#include "shared/packed_few.cuh"
#include "shared/packed_rows.cuh"
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

// Products of few rows wait behind the loads, or copies, of their first weights. BLOCKS: blocks of 256 threads on a multiprocessor, as
// many as registers and shared memory allow.
#define STREAM_PACKED(NAME, BLOCKS, ...)                  \
    KERNEL_THAT_WAITS(NAME, 256, BLOCKS, StreamParams) {  \
        launch_dependents();                              \
        __VA_ARGS__(p);                                   \
    }

// GROUPED_BLOCKS: blocks of the kernel of experts, as many as its registers allow without spilling.
#define PACKED(NAME, WEIGHT, GROUPED_BLOCKS)                                                       \
    STREAM_PACKED(gemv_##NAME##_1, 3, stream_rows<WEIGHT, 1>)                                      \
    STREAM_PACKED(gemv_##NAME##_4, 2, stream_rows<WEIGHT, 4>)                                      \
    STREAM_PACKED(gemv_##NAME##_8, 2, stream_few<WEIGHT, 1>)                                       \
    STREAM_PACKED(gemv_##NAME##_16, 2, stream_few<WEIGHT, 2>)                                      \
    KERNEL(grouped_gemv_##NAME, 128, GROUPED_BLOCKS, GroupedParams) { grouped_packed<WEIGHT>(p); } \
    KERNEL(unpack_##NAME, 256, 4, UnpackParams) { unpack<WEIGHT>(p); }

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
