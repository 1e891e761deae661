// Prefill micro attention on warpgroup products (compute capability 9.0), with one term; as FlashAttention-3 (Shah et al. 2024)
// within a warpgroup: the next tile's scores and this tile's outputs are under way while this tile is softened.
//
// Two warpgroups of 64 packed rows share stages of 64 keys. For a tile of 64 keys at D = 128, a multiprocessor's tensor cores
// work 512 clocks (4 times 64 * 64 * 128 products, 4,096 a clock); softmax takes 8 warps about 200 instructions each, 400
// clocks of four schedulers, and 128 of exponentials: shorter than the products, and overlapped with them. Copies are
// asynchronous 16-byte ones rather than the copy engine's: a tile of the engine could reach beyond a run into pages that are
// not mapped.
//
// Registers: outputs 64, scores 32, weights 16. Shared memory: 32 KB of queries and four stages of 32 KB.
#pragma once
#include "prefill_state.cuh"
#include "wgmma.cuh"

constexpr uint32_t WGMMA_THREADS = 256, WGMMA_ROWS = 128, WGMMA_KEYS = 64, WGMMA_STAGES = 4;

// Panels of 64 columns: rows of 128 bytes whose 16-byte chunks are exchanged by the row's number, as the hardware expects.
template <uint32_t ROWS>
struct SwizzledPanels {
    static constexpr uint32_t PANEL = ROWS * 128;
    DEVICE static uint32_t offset(uint32_t row, uint32_t chunk) {
        return chunk / 8 * PANEL + row * 128 + (chunk % 8 ^ row % 8) * 16;
    }
};

template <int D>
struct WgmmaShape {
    using Queries = SwizzledPanels<WGMMA_ROWS>;
    using Keys = SwizzledPanels<WGMMA_KEYS>;
    static constexpr uint32_t PLANE = WGMMA_KEYS * 2 * D, STAGE = 2 * PLANE, QUERIES = WGMMA_ROWS * 2 * D;
    static constexpr uint32_t POSITIONS = QUERIES + WGMMA_STAGES * STAGE;
    static constexpr uint32_t SHARED_BYTES = 1024 + POSITIONS + WGMMA_STAGES * WGMMA_KEYS * 4;
};

// A warp of a warpgroup; `shared` is aligned to 1024 bytes.
template <typename T, int D>
struct WgmmaWarp {
    using S = WgmmaShape<D>;
    static constexpr int NT = WGMMA_KEYS / 8;
    unsigned char* shared;
    PrefillState<D, 1, NT> state;
    float s[1][NT][4];

    DEVICE WgmmaWarp(const PrefillTile& tile, unsigned char* memory)
        : shared(memory), state(tile, threadIdx.x / 32 * 16) {}

    DEVICE unsigned char* stage(uint32_t i) const { return shared + S::QUERIES + i * S::STAGE; }
    DEVICE uint32_t* positions(uint32_t i) const {
        return reinterpret_cast<uint32_t*>(shared + S::POSITIONS) + i * WGMMA_KEYS;
    }
    DEVICE float (&scores())[4 * NT] { return reinterpret_cast<float(&)[4 * NT]>(s); }
    DEVICE float (&outputs())[D / 2] { return reinterpret_cast<float(&)[D / 2]>(state.o); }

    // Starts the products of the warpgroup's queries and a stage's keys.
    DEVICE void start_scores(uint32_t i) {
        const SharedAddress q = shared_address(shared) + threadIdx.x / 128 * (64 * 128), k = shared_address(stage(i));
#pragma unroll
        for (uint32_t step = 0; step < D / 16; step++) {
            const uint32_t panel = step / 4, within = step % 4 * 32;
            wgmma_shared<T, WGMMA_KEYS>(scores(), describe(q + panel * S::Queries::PANEL + within, 16, 1024),
                                        describe(k + panel * S::Keys::PANEL + within, 16, 1024), step > 0);
        }
        warpgroup_commit();
    }

    // Starts the products of weights and a stage's values.
    DEVICE void start_outputs(uint32_t i, const uint32_t (&weights)[NT / 2][4]) {
        const SharedAddress v = shared_address(stage(i)) + S::PLANE;
#pragma unroll
        for (uint32_t step = 0; step < NT / 2; step++) {
            wgmma_registers<T, D>(outputs(), weights[step], describe(v + step * 16 * 128, S::Keys::PANEL, 1024), true);
        }
        warpgroup_commit();
    }

    // Scores of a stage become weights, while the outputs of the tile before are still under way; then outputs are scaled.
    DEVICE void soften(const AttentionParams& p, uint32_t i, uint32_t (&weights)[NT / 2][4]) {
        float kept[1][2];
        state.mask(p, positions(i), s);
        const bool changed = state.soften(s, kept);
        warpgroup_wait<0>();
        hold(outputs());
        if (changed) state.scale(kept);
#pragma unroll
        for (int k = 0; k < NT / 2; k++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                weights[k][h] = pack<T>(s[0][2 * k][2 * h], s[0][2 * k][2 * h + 1]);
                weights[k][2 + h] = pack<T>(s[0][2 * k + 1][2 * h], s[0][2 * k + 1][2 * h + 1]);
            }
        }
    }
};

// Grid: KV heads, items. Items have at most 128 packed rows.
template <typename T, int D>
DEVICE void attention_wgmma(const AttentionParams& p) {
    using S = WgmmaShape<D>;
    using Copy = KeyCopy<T, D, WGMMA_THREADS, typename S::Keys>;
    DYNAMIC_SHARED(unaligned);
    unsigned char* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const AttnItem item = at<const AttnItem>(p.items)[blockIdx.y];
    if (item.rows == 0) return;
    const PrefillTile tile = {p, item, blockIdx.x, p.heads / p.kv_heads};
    WgmmaWarp<T, D> warp(tile, shared);
    Copy keys(p, item, blockIdx.x);
    // Fills a stage with 64 keys from index `first`, if there are any; a group of copies in any case.
    const auto fill = [&](uint32_t i, uint32_t first) {
        if (first < item.keys) {
            for (uint32_t k = 0; k < WGMMA_KEYS; k += KEY_GROUP) {
                keys.copy(threadIdx.x, first + k, warp.stage(i) + k * 128, S::PLANE, warp.positions(i) + k);
            }
        }
        copy_commit();
    };
    for (uint32_t i = 0; i + 1 < WGMMA_STAGES; i++) fill(i, i * WGMMA_KEYS);
    for (uint32_t i = threadIdx.x; i < WGMMA_ROWS * (D / 2); i += WGMMA_THREADS) {
        const uint32_t packed = i / (D / 2), d = i % (D / 2) * 2;
        float x[2];
        tile.query<T, D>(packed, d, x);
        const uint32_t to = S::Queries::offset(packed, d / 8) + d % 8 * 2;
        *reinterpret_cast<uint32_t*>(shared + to) = pack<T>(x[0], x[1]);
    }
    copy_wait<WGMMA_STAGES - 2>();
    fence_shared_for_products();
    sync_block();
    warpgroup_fence();
    warp.start_scores(0);
    warpgroup_wait<0>();
    hold(warp.scores());
    uint32_t i = 0, weights[WGMMA_KEYS / 16][4];
    for (uint32_t first = WGMMA_KEYS; first < item.keys; first += WGMMA_KEYS) {
        const uint32_t next = (i + 1) % WGMMA_STAGES;
        warp.soften(p, i, weights);
        // The next tile has arrived for all, and all have finished with the one before, whose stage is filled again.
        copy_wait<WGMMA_STAGES - 3>();
        fence_shared_for_products();
        sync_block();
        fill((i + WGMMA_STAGES - 1) % WGMMA_STAGES, first + (WGMMA_STAGES - 2) * WGMMA_KEYS);
        warpgroup_fence();
        warp.start_scores(next);
        warp.start_outputs(i, weights);
        warpgroup_wait<1>();
        hold(warp.scores());
        i = next;
    }
    warp.soften(p, i, weights);
    warpgroup_fence();
    warp.start_outputs(i, weights);
    warpgroup_wait<0>();
    hold(warp.outputs());
    copy_wait<0>();
    warp.state.store(tile);
}
