// Rotary position embedding (Su et al. 2021) in place, and the append of K and V to the store; one block a row. Moves 8 bytes
// an element of q and k, 4 of v, and writes K and V in the store's type. Accesses are of 128 bits to f32 and of 64 to 16-bit
// stores where heads and halves of heads are aligned. A thread's PARTS parts are loaded before any is stored: a row of 32 + 2 * 8
// heads of 128 elements has 896 parts, four a thread.
#include "shared/fp8.cuh"

// A row's parts: W pairs of a rotated head each, then W elements of what is only stored: values, and without a rotation keys.
template <int W>
struct RopeRow {
    const RopeParams& p;
    uint32_t half, pairs, copies;
    bool stored;
    float *x, *k;
    const float* angles;
    uint64_t token;

    DEVICE RopeRow(const RopeParams& params) : p(params), half(p.head_dim / 2) {
        const uint32_t row = blockIdx.x, rotated = p.heads + p.kv_heads, kv_dim = p.kv_heads * p.head_dim;
        x = at<float>(p.qkv) + static_cast<uint64_t>(row) * (rotated + p.kv_heads) * p.head_dim;
        k = x + p.heads * p.head_dim;
        angles = at<const float>(p.rope) + static_cast<uint64_t>(row) * p.head_dim;
        const uint32_t slot = at<const uint32_t>(p.slots)[row];
        stored = slot != 0xffffffffu && p.kv_type != TYPE_FP8;
        token = static_cast<uint64_t>(slot) * p.kv.token_stride;
        pairs = p.rope ? rotated * half / W : 0;
        copies = !stored ? 0 : (p.rope ? kv_dim : 2 * kv_dim) / W;
    }

    struct Loaded {
        Part<W> a, b, cosine, sine;
    };

    // The first element of what part `i` copies, counted from the row's first key.
    DEVICE uint32_t copied(uint32_t i) const { return (p.rope ? p.kv_heads * p.head_dim : 0) + (i - pairs) * W; }

    DEVICE void load(uint32_t i, Loaded& part) const {
        if (i < pairs) {
            const uint32_t head = i * W / half, j = i * W % half;
            const float* from = x + head * p.head_dim + j;
            part.a = load_part<W>(from);
            part.b = load_part<W>(from + half);
            part.cosine = load_part<W>(angles + j);
            part.sine = load_part<W>(angles + j + half);
        } else if (i < pairs + copies) {
            part.a = load_part<W>(k + copied(i));
        }
    }

    DEVICE void store(uint32_t i, const Loaded& part) const {
        if (i < pairs) {
            const uint32_t head = i * W / half, j = i * W % half;
            Part<W> first, second;
#pragma unroll
            for (int e = 0; e < W; e++) {
                const float a = part.a.x[e], b = part.b.x[e], c = part.cosine.x[e], s = part.sine.x[e];
                first.x[e] = a * c - b * s;
                second.x[e] = b * c + a * s;
            }
            float* to = x + head * p.head_dim + j;
            store_part(to, first);
            store_part(to + half, second);
            if (stored && head >= p.heads) {
                const uint64_t to_key = token + (head - p.heads) * p.kv.head_stride + j;
                store_part_any(p.kv.k, p.kv_type, to_key, first);
                store_part_any(p.kv.k, p.kv_type, to_key + half, second);
            }
        } else if (i < pairs + copies) {
            const uint32_t kv_dim = p.kv_heads * p.head_dim, element = copied(i), of_plane = element % kv_dim;
            const uint64_t to = token + of_plane / p.head_dim * p.kv.head_stride + of_plane % p.head_dim;
            store_part_any(element < kv_dim ? p.kv.k : p.kv.v, p.kv_type, to, part.a);
        }
    }

    DEVICE void run() const {
        for (uint32_t first = threadIdx.x; first < pairs + copies; first += PARTS * blockDim.x) {
            Loaded parts[PARTS];
#pragma unroll
            for (uint32_t i = 0; i < PARTS; i++) load(first + i * blockDim.x, parts[i]);
#pragma unroll
            for (uint32_t i = 0; i < PARTS; i++) store(first + i * blockDim.x, parts[i]);
        }
    }
};

KERNEL(rope_append, 256, 1, RopeParams) {
    // Halves of heads, and in the store tokens and heads, begin at multiples of four elements.
    const bool wide = is_wide(p.head_dim / 2, p.qkv, p.rope, p.kv.k, p.kv.v) && p.head_dim % 2 == 0;
    if (wide && (p.kv.token_stride | p.kv.head_stride) % WIDE == 0) {
        RopeRow<WIDE>(p).run();
    } else {
        RopeRow<1>(p).run();
    }
    const uint32_t slot = at<const uint32_t>(p.slots)[blockIdx.x];
    if (p.kv_type != TYPE_FP8 || slot == 0xffffffffu) return;
    // A row's scale follows from all of its elements.
    sync_block();
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * (p.heads + 2 * p.kv_heads) + p.heads;
    store_rows(p.kv, slot, at<const float>(p.qkv) + row * p.head_dim, p.kv_heads, p.head_dim);
}
