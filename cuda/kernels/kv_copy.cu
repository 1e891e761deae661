// Between a store's planes and the canonical layout [token][k | v][kv_heads][head_dim], one block a token. Each byte is read
// once and written once; heads are copied in the widest words that every address allows.
#include "shared/common.cuh"

template <typename Word, bool PACK>
DEVICE void copy_token(const KvCopyParams& p) {
    const uint32_t words = p.head_bytes / sizeof(Word), plane = p.kv_heads * words;
    const uint64_t token = static_cast<uint64_t>(p.slot0 + blockIdx.x) * p.kv.token_stride;
    Word* packed = at<Word>(p.packed) + static_cast<uint64_t>(blockIdx.x) * 2 * plane;
    for (uint32_t i = threadIdx.x; i < 2 * plane; i += blockDim.x) {
        const uint32_t head = i % plane / words;
        const uint64_t bytes = (token + head * p.kv.head_stride) * p.element_bytes;
        Word* stored = at<Word>((i < plane ? p.kv.k : p.kv.v) + bytes) + i % words;
        if (PACK) {
            packed[i] = *stored;
        } else {
            *stored = packed[i];
        }
    }
}

template <bool PACK>
DEVICE void copy_widest(const KvCopyParams& p) {
    const uint64_t all = p.kv.k | p.kv.v | p.packed | p.head_bytes | p.kv.token_stride * p.element_bytes |
                         p.kv.head_stride * p.element_bytes;
    if (all % 16 == 0) {
        copy_token<uint4, PACK>(p);
    } else if (all % 4 == 0) {
        copy_token<uint32_t, PACK>(p);
    } else {
        copy_token<uint16_t, PACK>(p);
    }
}

KERNEL(kv_pack, 256, 1, KvCopyParams) { copy_widest<true>(p); }
KERNEL(kv_unpack, 256, 1, KvCopyParams) { copy_widest<false>(p); }
