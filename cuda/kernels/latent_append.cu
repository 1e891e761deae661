// Completes rows of latent attention (DeepSeek-V2 section 2.1) and appends them to the store; one block a row. The rotated parts of
// queries come from before the absorption, the latent and the key's rotated part from tensors of their own. Moves 8 bytes an element that is
// rotated or copied, and writes the row in the store's type: its first half to K, its second one to V. Accesses are of 128
// bits to f32 and of 64 to 16-bit stores where parts and halves are aligned. A thread's PARTS parts are loaded before any is
// stored: a row of 128 heads with 64 rotated elements and a latent of 512 has 1160 parts, five a thread.
#include "shared/fp8.cuh"

// A row's parts: W pairs of a head's rotated elements each, where the row to store is the last head, then W elements of the latent.
template <int W>
struct LatentParts {
    const LatentParams& p;
    uint32_t half, pairs, copies;
    bool stored;
    float* x;
    const float *queries, *latent, *key, *angles;
    uint64_t token;

    DEVICE LatentParts(const LatentParams& params) : p(params), half(p.rotated / 2) {
        const uint64_t row = blockIdx.x;
        x = at<float>(p.qkv) + row * (p.heads + 1) * 2 * p.head_dim;
        queries = at<const float>(p.queries) + row * p.heads * p.query;
        latent = at<const float>(p.latents) + row * p.latent;
        key = at<const float>(p.keys) + row * p.rotated;
        angles = at<const float>(p.rope) + row * p.rotated;
        const uint32_t slot = at<const uint32_t>(p.slots)[row];
        stored = slot != 0xffffffffu && p.kv_type != TYPE_FP8;
        token = static_cast<uint64_t>(slot) * p.kv.token_stride;
        pairs = (p.heads + 1) * half / W;
        copies = p.latent / W;
    }

    struct Loaded {
        Part<W> a, b, cosine, sine;
    };

    DEVICE void load(uint32_t i, Loaded& part) const {
        if (i < pairs) {
            const uint32_t head = i * W / half, j = i * W % half;
            const float* from = head < p.heads ? queries + (head + 1) * p.query - p.rotated : key;
            part.a = load_part<W>(from + j);
            part.b = load_part<W>(from + j + half);
            part.cosine = load_part<W>(angles + j);
            part.sine = load_part<W>(angles + j + half);
        } else if (i < pairs + copies) {
            part.a = load_part<W>(latent + (i - pairs) * W);
        }
    }

    // Writes W elements of a head from its element `e` on; those of the last one to the store, too.
    DEVICE void put(uint32_t head, uint32_t e, const Part<W>& part) const {
        store_part(x + head * 2 * p.head_dim + e, part);
        if (!stored || head < p.heads) return;
        const bool first = e < p.head_dim;
        store_part_any(first ? p.kv.k : p.kv.v, p.kv_type, token + (first ? e : e - p.head_dim), part);
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
            put(head, p.latent + j, first);
            put(head, p.latent + j + half, second);
        } else if (i < pairs + copies) {
            put(p.heads, (i - pairs) * W, part.a);
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

KERNEL(latent_append, 256, 1, LatentParams) {
    // Heads and their parts, and in the store tokens and halves, begin at multiples of four elements.
    const bool wide = is_wide(p.rotated / 2, p.qkv, p.queries, p.latents, p.keys) && is_wide(p.latent, p.rope, p.kv.k, p.kv.v);
    if (wide && (p.head_dim | p.query | p.kv.token_stride) % WIDE == 0) {
        LatentParts<WIDE>(p).run();
    } else {
        LatentParts<1>(p).run();
    }
    const uint32_t slot = at<const uint32_t>(p.slots)[blockIdx.x];
    if (p.kv_type != TYPE_FP8 || slot == 0xffffffffu) return;
    // A row's scale follows from all of its elements.
    sync_block();
    const uint64_t row = (static_cast<uint64_t>(blockIdx.x) * (p.heads + 1) + p.heads) * 2;
    store_rows(p.kv, slot, at<const float>(p.qkv) + row * p.head_dim, 1, p.head_dim);
}
