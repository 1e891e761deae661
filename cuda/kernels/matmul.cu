// Linear layers: see shared/gemv.cuh and shared/gemm.cuh.
#include "shared/gemm.cuh"
#include "shared/gemv.cuh"

#define GEMV_FEW(TYPE, NAME)                                              \
    KERNEL(gemv_##NAME##_1, 256, 3, GemvParams) { gemv_few<TYPE, 1>(p); } \
    KERNEL(gemv_##NAME##_2, 256, 3, GemvParams) { gemv_few<TYPE, 2>(p); }

GEMV_FEW(float, f32)
GEMV_FEW(f16, f16)
GEMV_FEW(bf16, bf16)

KERNEL(gemv_f16_8, 256, 2, GemvParams) { gemv<f16, 1>(p); }
KERNEL(gemv_f16_16, 256, 1, GemvParams) { gemv<f16, 2>(p); }
KERNEL(gemv_bf16_8, 256, 2, GemvParams) { gemv<bf16, 1>(p); }
KERNEL(gemv_bf16_16, 256, 1, GemvParams) { gemv<bf16, 2>(p); }

KERNEL(split_f16, 256, 1, SplitParams) { split_rows<f16, true>(p); }
KERNEL(split_bf16, 256, 1, SplitParams) { split_rows<bf16, false>(p); }

// Two blocks of large tiles on a multiprocessor: 128 registers a thread.
#define GEMM(TYPE)                                                                                              \
    KERNEL(gemm_##TYPE##_exact_128, 256, 2, GemmParams) { gemm<TYPE, 128, 128, 64, 32, 2>(p); }                 \
    KERNEL(gemm_##TYPE##_fast_128, 256, 2, GemmParams) { gemm<TYPE, 128, 128, 64, 32, 1>(p); }                  \
    KERNEL(gemm_##TYPE##_exact_64, 128, 3, GemmParams) { gemm<TYPE, 64, 64, 32, 32, 2>(p); }                    \
    KERNEL(gemm_##TYPE##_fast_64, 128, 3, GemmParams) { gemm<TYPE, 64, 64, 32, 32, 1>(p); }

GEMM(f16)
GEMM(bf16)

KERNEL(gemm_f32, 256, 2, GemmParams) { gemm_plain(p); }

// Adds the parts of a product, in order: those along k, or those of the activations' terms, which a library has multiplied and
// whose rows still want their scale. Reads 4 bytes an element and part.
KERNEL(gemm_reduce, 256, 1, GemmReduceParams) {
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (column >= p.n) return;
    const uint64_t step = static_cast<uint64_t>(p.m) * p.n;
    const float* part = at<const float>(p.partial) + static_cast<uint64_t>(row) * p.n + column;
    float sum = 0;
    for (uint32_t i = 0; i < p.parts; i++) sum += part[i * step];
    if (p.scale) sum *= at<const float>(p.scale)[row];
    if (p.bias) sum += load_any(p.bias, p.bias_type, column);
    float* out = at<float>(p.out) + static_cast<uint64_t>(row) * p.ldo + column;
    *out = p.add ? *out + sum : sum;
}
