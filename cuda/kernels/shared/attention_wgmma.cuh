// Prefill micro attention on warpgroup products (compute capability 9.0), with one term, fed by the copy engine; as
// FlashAttention-3 (Shah et al. 2024).
//
// One warp feeds stages of 128 keys, another one those of their values, to two warpgroups of 64 packed rows. Within a warpgroup the
// outputs of the tile before are in flight while a tile's scores are softened: in the machine code all 66 exponentials of a thread
// stand between the start of these products and the wait for them. Between the two, products take turns, so that one multiplies
// while the other softens.
//
// For a tile of 128 keys at D = 128 a multiprocessor's tensor cores work 2,048 clocks (4 times 64 * 128 * 128 products, 2,048
// a clock). Of shared memory's 128 bytes a clock, scores take 96 (queries and keys from there: with 64 keys they would take
// all), outputs 64. Exponentials take 1,024 clocks, which only overlapping hides.
//
// Keys come as boxes of 64, 16, 4 or 1 of them, the largest that a run has left: one never reaches beyond its run, where no
// memory may be mapped. A tile within a run is two boxes of each panel. Keys beyond the item are those of its longest run so
// far, at a position that no row sees: a box outside of the tensor is zeros, but touches the tensor's first element, which may have no memory.
//
// Scores have no soft cap: the plan takes attention_prefill for those.
//
// Registers: outputs 64, scores 64, weights 32, which 168 for each of 384 threads do not hold: the feeding warpgroup, of
// which two warps have nothing to do, leaves its own to the others. Shared memory: 32 KB of queries, two stages of 32 KB of
// keys, and two of values.
#pragma once
#include "bulk.cuh"
#include "prefill_state.cuh"
#include "wgmma.cuh"

constexpr uint32_t WGMMA_GROUPS = 2, WGMMA_ROWS = 64 * WGMMA_GROUPS, WGMMA_KEYS = 128, WGMMA_STAGES = 2;
constexpr uint32_t WGMMA_BOX = 64;

// Panels of 64 columns: rows of 128 bytes whose 16-byte chunks are exchanged by the row's number, as the hardware expects.
template <uint32_t ROWS>
struct SwizzledPanels {
    static constexpr uint32_t PANEL = ROWS * 128;
    DEVICE static uint32_t offset(uint32_t row, uint32_t chunk) {
        return chunk / 8 * PANEL + row * 128 + (chunk % 8 ^ row % 8) * 16;
    }
};

// Shared memory, aligned to 1024 bytes: queries, stages of keys, stages of values, positions by stage of keys, barriers.
template <int D>
struct WgmmaShared {
    using Queries = SwizzledPanels<WGMMA_ROWS>;
    using Keys = SwizzledPanels<WGMMA_KEYS>;
    static constexpr uint32_t PLANE = WGMMA_KEYS * 2 * D, QUERIES = WGMMA_ROWS * 2 * D;
    static constexpr uint32_t POSITIONS = QUERIES + 2 * WGMMA_STAGES * PLANE;
    static constexpr uint32_t BARRIERS = POSITIONS + WGMMA_STAGES * WGMMA_KEYS * 4;
    unsigned char* memory;

    DEVICE SharedAddress queries() const { return shared_address(memory); }
    DEVICE SharedAddress keys(uint32_t stage) const { return shared_address(memory) + QUERIES + stage * PLANE; }
    DEVICE SharedAddress values(uint32_t stage) const { return keys(WGMMA_STAGES + stage); }
    DEVICE uint32_t* positions(uint32_t stage) const {
        return reinterpret_cast<uint32_t*>(memory + POSITIONS) + stage * WGMMA_KEYS;
    }

    // Filled by the copy engine, and free again, by stage; queries written, and the turn to multiply, by warpgroup.
    DEVICE SharedAddress barrier(uint32_t i) const { return shared_address(memory) + BARRIERS + i * 8; }
    DEVICE SharedAddress keys_full(uint32_t stage) const { return barrier(stage); }
    DEVICE SharedAddress keys_free(uint32_t stage) const { return barrier(WGMMA_STAGES + stage); }
    DEVICE SharedAddress values_full(uint32_t stage) const { return barrier(2 * WGMMA_STAGES + stage); }
    DEVICE SharedAddress values_free(uint32_t stage) const { return barrier(3 * WGMMA_STAGES + stage); }
    DEVICE SharedAddress queries_full(uint32_t group) const { return barrier(4 * WGMMA_STAGES + group); }
    DEVICE SharedAddress turn(uint32_t group) const { return barrier(4 * WGMMA_STAGES + WGMMA_GROUPS + group); }

    // By one thread; `groups` warpgroups have rows.
    DEVICE void init_barriers(uint32_t groups) const {
        for (uint32_t i = 0; i < WGMMA_STAGES; i++) {
            // Every lane writes positions, and reads them: each of them arrives.
            barrier_init(keys_full(i), 32);
            barrier_init(keys_free(i), 128 * groups);
            barrier_init(values_full(i), 32);
            barrier_init(values_free(i), 4 * groups);
        }
        for (uint32_t i = 0; i < WGMMA_GROUPS; i++) {
            barrier_init(queries_full(i), 128);
            barrier_init(turn(i), 4);
        }
    }
};

// One arrival for the warp, when all its lanes are done.
DEVICE void warp_arrive(SharedAddress barrier) {
    sync_warp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
DEVICE void warp_wait(SharedAddress barrier, uint32_t parity) {
    barrier_wait(barrier, parity);
    sync_warp();
}

// A warp that feeds.
template <typename T, int D>
struct WgmmaFeeder {
    using S = WgmmaShared<D>;
    const AttentionBoxesParams& p;
    S shared;
    const AttnItem& item;
    uint32_t kv_head;

    // Fills a stage with a plane of keys from the one that `walk` is before, and says where they are to `positions`, if given.
    DEVICE void fill(KeyWalk& walk, KvRun& longest, uint32_t first, const TensorMap* maps, SharedAddress to, SharedAddress full,
                     uint32_t* positions) const {
        const uint32_t lane = threadIdx.x % 32;
        if (lane == 0) barrier_expect(full, S::PLANE);
        sync_warp();
        for (uint32_t row = 0; row < WGMMA_KEYS;) {
            const uint32_t index = first + row;
            uint32_t left = min(WGMMA_KEYS - row, longest.len), slot = longest.base, position = NOWHERE, step = 0;
            if (index < item.keys) {
                walk.seek(index);
                if (walk.run.len > longest.len) longest = walk.run;
                left = min(WGMMA_KEYS - row, walk.before + walk.run.len - index);
                slot = walk.slot(index);
                position = walk.position(index);
                step = 1;
            }
            uint32_t height = WGMMA_BOX;
            const TensorMap* map = maps;
            for (; height > left; height /= 4) map++;
            if (lane < D / 64) {
                const int32_t column = static_cast<int32_t>(kv_head * D + lane * 64);
                copy_box(to + lane * S::Keys::PANEL + row * 128, map, column, static_cast<int32_t>(slot), full);
            }
            if (positions) {
                for (uint32_t i = lane; i < height; i += 32) positions[row + i] = position + i * step;
            }
            row += height;
        }
        barrier_arrive(full);
    }

    // All keys, or all values, of the item.
    DEVICE void run(bool values) const {
        const TensorMap* maps = values ? p.v : p.k;
        if (threadIdx.x % 32 < BOX_HEIGHTS) prefetch_map(maps + threadIdx.x % 32);
        KeyWalk walk(item, p.attention.runs);
        KvRun longest = walk.run;
        for (uint32_t first = 0, tile = 0; first < item.keys; first += WGMMA_KEYS, tile++) {
            // Stages are free at first: the phase before the first one counts as over.
            const uint32_t stage = tile % WGMMA_STAGES, parity = (tile / WGMMA_STAGES & 1) ^ 1;
            warp_wait(values ? shared.values_free(stage) : shared.keys_free(stage), parity);
            if (values) {
                fill(walk, longest, first, maps, shared.values(stage), shared.values_full(stage), nullptr);
            } else {
                fill(walk, longest, first, maps, shared.keys(stage), shared.keys_full(stage), shared.positions(stage));
            }
        }
    }
};

// A warp of a warpgroup.
template <typename T, int D>
struct WgmmaWarp {
    using S = WgmmaShared<D>;
    static constexpr int NT = WGMMA_KEYS / 8;
    const AttentionParams& p;
    S shared;
    uint32_t group;
    bool alone;
    PrefillState<D, 1, NT> state;
    float s[1][NT][4];
    uint32_t weights[NT / 2][4];

    DEVICE WgmmaWarp(const PrefillTile& tile, S memory, uint32_t groups)
        : p(tile.p),
          shared(memory),
          group(threadIdx.x / 128),
          alone(groups == 1),
          state(tile, threadIdx.x / 32 * 16) {}

    DEVICE float (&scores())[4 * NT] { return reinterpret_cast<float(&)[4 * NT]>(s); }
    DEVICE float (&outputs())[D / 2] { return reinterpret_cast<float(&)[D / 2]>(state.o); }

    // The warpgroup's queries in shared memory.
    DEVICE void load_queries(const PrefillTile& tile) const {
        for (uint32_t i = threadIdx.x % 128; i < 64 * (D / 2); i += 128) {
            const uint32_t packed = group * 64 + i / (D / 2), d = i % (D / 2) * 2;
            float x[2];
            tile.query<T, D>(packed, d, x);
            const uint32_t to = S::Queries::offset(packed, d / 8) + d % 8 * 2;
            *reinterpret_cast<uint32_t*>(shared.memory + to) = pack<T>(x[0], x[1]);
        }
        fence_shared_for_async();
        barrier_arrive(shared.queries_full(group));
        warp_wait(shared.queries_full(group), 0);
    }

    // Products take turns, tile by tile: the first warpgroup's, then the second's.
    DEVICE void begin_turn(uint32_t tile) const {
        if (!alone) warp_wait(shared.turn(group), (tile & 1) ^ (group == 0));
    }
    DEVICE void end_turn() const {
        if (!alone) warp_arrive(shared.turn(group ^ 1));
    }

    // Starts the products of the queries and a tile's keys.
    DEVICE void start_scores(uint32_t tile) {
        const uint32_t stage = tile % WGMMA_STAGES;
        const SharedAddress q = shared.queries() + group * (64 * 128), k = shared.keys(stage);
        warp_wait(shared.keys_full(stage), tile / WGMMA_STAGES & 1);
        warpgroup_fence();
#pragma unroll
        for (uint32_t step = 0; step < D / 16; step++) {
            const uint32_t panel = step / 4, within = step % 4 * 32;
            wgmma_shared<T, WGMMA_KEYS>(scores(), describe(q + panel * S::Queries::PANEL + within, 16, 1024),
                                        describe(k + panel * S::Keys::PANEL + within, 16, 1024), step > 0);
        }
        warpgroup_commit();
    }

    // Starts the products of weights and a tile's values.
    DEVICE void start_outputs(uint32_t tile) {
        const uint32_t stage = tile % WGMMA_STAGES;
        const SharedAddress v = shared.values(stage);
        warp_wait(shared.values_full(stage), tile / WGMMA_STAGES & 1);
        warpgroup_fence();
#pragma unroll
        for (uint32_t step = 0; step < NT / 2; step++) {
            wgmma_registers<T, D>(outputs(), weights[step], describe(v + step * 16 * 128, S::Keys::PANEL, 1024), true);
        }
        warpgroup_commit();
    }

    // Scores of a tile become weights: f32, in their registers. Its keys' stage is free. Whether outputs have to be scaled.
    DEVICE bool soften(uint32_t tile, float (&kept)[1][2]) {
        const uint32_t stage = tile % WGMMA_STAGES;
        state.mask(p, shared.positions(stage), s);
        barrier_arrive(shared.keys_free(stage));
        return state.soften(s, kept);
    }

    // Rounds weights to the products' registers, which belong to the products of the tile before until these are waited for.
    DEVICE void pack_weights() {
#pragma unroll
        for (int k = 0; k < NT / 2; k++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                weights[k][h] = pack<T>(s[0][2 * k][2 * h], s[0][2 * k][2 * h + 1]);
                weights[k][2 + h] = pack<T>(s[0][2 * k + 1][2 * h], s[0][2 * k + 1][2 * h + 1]);
            }
        }
    }

    // No product is in flight over the loop's back edge, where ptxas may give up and wait after each: an iteration waits for all that
    // it starts.
    DEVICE void run(const PrefillTile& tile) {
        const uint32_t tiles = (tile.item.keys + WGMMA_KEYS - 1) / WGMMA_KEYS;
        float kept[1][2];
        load_queries(tile);
        begin_turn(0);
        start_scores(0);
        end_turn();
        warpgroup_wait<0>();
        hold(scores());
        soften(0, kept);
        pack_weights();
        for (uint32_t next = 1; next < tiles; next++) {
            begin_turn(next);
            start_scores(next);
            start_outputs(next - 1);
            end_turn();
            warpgroup_wait<1>();
            hold(scores());
            // The exponentials' time is that of the outputs' products.
            const bool changed = soften(next, kept);
            compute_before_wait(state.sum[0][0] + state.sum[0][1]);
            warpgroup_wait<0>();
            hold(outputs());
            warp_arrive(shared.values_free((next - 1) % WGMMA_STAGES));
            if (changed) state.scale(kept);
            pack_weights();
        }
        start_outputs(tiles - 1);
        warpgroup_wait<0>();
        hold(outputs());
        state.store(tile);
    }
};

// Grid: KV heads, items. Items have at most 128 packed rows. 384 threads: the last warpgroup feeds.
template <typename T, int D>
DEVICE void attention_wgmma(const AttentionBoxesParams& p) {
    using S = WgmmaShared<D>;
    DYNAMIC_SHARED(unaligned);
    const S shared = {unaligned + (1024 - shared_address(unaligned) % 1024) % 1024};
    const AttnItem item = at<const AttnItem>(p.attention.items)[blockIdx.y];
    if (item.rows == 0) return;
    const PrefillTile tile = {p.attention, item, blockIdx.x, p.attention.heads / p.attention.kv_heads};
    const uint32_t groups = item.rows * tile.group > 64 ? 2 : 1, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) shared.init_barriers(groups);
    fence_shared_for_async();
    sync_block();
    if (warp >= 4 * WGMMA_GROUPS) {
        keep_registers<40>();
        const WgmmaFeeder<T, D> feeder = {p, shared, item, blockIdx.x};
        if (warp < 4 * WGMMA_GROUPS + 2) feeder.run(warp > 4 * WGMMA_GROUPS);
    } else {
        take_registers<232>();
        if (warp / 4 < groups) {
            WgmmaWarp<T, D> warp(tile, shared, groups);
            warp.run(tile);
        }
    }
}
