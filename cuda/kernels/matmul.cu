// Linear layers, and products by head: see shared/gemv.cuh, shared/gemm.cuh and shared/head_product.cuh.
#include "shared/gemm.cuh"
#include "shared/gemv.cuh"
#include "shared/head_product.cuh"

// Products of few rows wait behind the loads of their first weights.
#define GEMV(NAME, BLOCKS, CALL)                           \
    KERNEL_THAT_WAITS(gemv_##NAME, 256, BLOCKS, GemvParams) { \
        launch_dependents();                               \
        CALL(p);                                           \
    }

GEMV(f32_1, 3, (gemv_few<float, 1>))
GEMV(f32_2, 3, (gemv_few<float, 2>))
GEMV(f16_1, 3, (gemv_few<f16, 1>))
GEMV(f16_2, 3, (gemv_few<f16, 2>))
GEMV(bf16_1, 3, (gemv_few<bf16, 1>))
GEMV(bf16_2, 3, (gemv_few<bf16, 2>))
GEMV(f16_8_exact, 2, (gemv<f16, 1, 3>))
GEMV(f16_8_fast, 2, (gemv<f16, 1, 2>))
GEMV(f16_16_exact, 1, (gemv<f16, 2, 3>))
GEMV(f16_16_fast, 1, (gemv<f16, 2, 2>))
GEMV(bf16_8_exact, 2, (gemv<bf16, 1, 3>))
GEMV(bf16_8_fast, 2, (gemv<bf16, 1, 1>))
GEMV(bf16_16_exact, 1, (gemv<bf16, 2, 3>))
GEMV(bf16_16_fast, 2, (gemv<bf16, 2, 1>))

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

// As gemv: few rows wait behind the loads of their first weights.
#define HEAD_PRODUCTS(NAME, TYPE)                                          \
    KERNEL_THAT_WAITS(head_gemv_##NAME##_1, 256, 3, HeadProductParams) {    \
        launch_dependents();                                               \
        head_gemv<TYPE, 1>(p);                                             \
    }                                                                      \
    KERNEL_THAT_WAITS(head_gemv_##NAME##_4, 256, 2, HeadProductParams) {    \
        launch_dependents();                                               \
        head_gemv<TYPE, 4>(p);                                             \
    }                                                                      \
    KERNEL(head_gemm_##NAME, 256, 2, HeadProductParams) { head_gemm<TYPE>(p); }

HEAD_PRODUCTS(f32, float)
HEAD_PRODUCTS(f16, f16)
HEAD_PRODUCTS(bf16, bf16)
