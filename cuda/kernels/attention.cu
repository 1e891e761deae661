// Micro attention: a few rows, many rows, whatever is left, and the reduction of pieces. See shared/attention_*.cuh.
#include "shared/attention_any.cuh"
#include "shared/attention_decode.cuh"
#include "shared/attention_fp8.cuh"
#include "shared/attention_prefill.cuh"
#include "shared/attention_wgmma.cuh"

#define PLAIN_ATTENTION(NAME, TYPE)                                                                         \
    KERNEL(attention_any_##NAME, 128, 1, AttentionParams) { attention_any<TYPE, false>(p); }                \
    KERNEL(attention_latent_##NAME, 128, 1, AttentionParams) { attention_any<TYPE, true>(p); }

PLAIN_ATTENTION(f32, float)
PLAIN_ATTENTION(f16, f16)
PLAIN_ATTENTION(bf16, bf16)
PLAIN_ATTENTION(fp8, e4m3)

KERNEL(attention_merge, 128, 1, AttentionMergeParams) { attention_merge_rows(p); }

// One block of up to eight warps on a multiprocessor must fit its registers: 255 each.
#define ATTENTION(TYPE, D)                                                                                              \
    KERNEL(attention_decode_##TYPE##_##D, 256, 1, AttentionParams) { attention_decode<TYPE, D>(p); }                    \
    KERNEL(attention_prefill_##TYPE##_##D##_exact, 128, 1, AttentionParams) { attention_prefill<TYPE, D, 2>(p); }       \
    KERNEL(attention_prefill_##TYPE##_##D##_fast, 128, 1, AttentionParams) { attention_prefill<TYPE, D, 1>(p); }

ATTENTION(f16, 64)
ATTENTION(f16, 96)
ATTENTION(f16, 128)
ATTENTION(f16, 256)
ATTENTION(bf16, 64)
ATTENTION(bf16, 96)
ATTENTION(bf16, 128)
ATTENTION(bf16, 256)

// Prompts over KV in 8 bits always have two terms.
#define ATTENTION_FP8(D)                                                                    \
    KERNEL(attention_decode_fp8_##D, 256, 1, AttentionParams) { attention_decode<e4m3, D>(p); } \
    KERNEL(attention_prefill_fp8_##D##_exact, 128, 1, AttentionParams) {                    \
        attention_prefill<bf16, D, 2, false, WideningCopy<D, PREFILL_THREADS>>(p);          \
    }

ATTENTION_FP8(64)
ATTENTION_FP8(96)
ATTENTION_FP8(128)
ATTENTION_FP8(256)

// For devices that give a block 99 KB of shared memory, where the shapes above need more.
#define SMALL_PREFILL(TYPE, D, KIND, TERMS)                                          \
    KERNEL(attention_prefill_##TYPE##_##D##_##KIND##_small, 128, 1, AttentionParams) { \
        attention_prefill<TYPE, D, TERMS, true>(p);                                  \
    }

SMALL_PREFILL(f16, 96, exact, 2)
SMALL_PREFILL(f16, 128, exact, 2)
SMALL_PREFILL(f16, 128, fast, 1)
SMALL_PREFILL(f16, 256, fast, 1)
SMALL_PREFILL(bf16, 96, exact, 2)
SMALL_PREFILL(bf16, 128, exact, 2)
SMALL_PREFILL(bf16, 128, fast, 1)
SMALL_PREFILL(bf16, 256, fast, 1)

#define SMALL_PREFILL_FP8(D)                                                                \
    KERNEL(attention_prefill_fp8_##D##_exact_small, 128, 1, AttentionParams) {              \
        attention_prefill<bf16, D, 2, true, WideningCopy<D, PREFILL_THREADS>>(p);           \
    }

SMALL_PREFILL_FP8(96)
SMALL_PREFILL_FP8(128)

// Warpgroup products and the copy engine exist on compute capability 9.0 only: on others these kernels are not in the fatbin.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(LAGOON_SHIM)
#define WGMMA(TYPE, D) \
    KERNEL(attention_wgmma_##TYPE##_##D, 384, 1, AttentionBoxesParams) { attention_wgmma<TYPE, D>(p); }

WGMMA(f16, 64)
WGMMA(f16, 128)
WGMMA(bf16, 64)
WGMMA(bf16, 128)
#endif
