// Prefill micro attention (FlashAttention-2, Dao 2023): many query rows over shared tiles of keys, with a causal offset, runs and
// a partial output.
//
// Operations: 4 D for each visible pair of query and key; bytes: K and V once for each tile of packed rows. A tile has 128
// packed rows (64 for D = 256): at 4 D operations for 4 D bytes times 1 / 128, 128 operations a byte, it is bound by
// arithmetic. Each warp holds 32 rows (16 for D = 256), so that a fragment of K or V that is read from shared memory serves two
// products: with 16 rows reading would take as long as multiplying on an A100 (256 bytes at 128 a clock against 2 clocks for
// m16n8k16). Scores are made for 32 keys at a time (16 where registers are short), which keeps outputs (128 registers at D = 128), scores and fragments
// within 255 registers.
//
// TERMS = 2 splits queries and weights into two terms each and multiplies twice: exact to about 16 (bf16) or 22 (f16)
// bits. TERMS = 1 rounds them to the store's type.
//
// Two stages of keys are copied asynchronously: one fills while the other is multiplied. KV in 8 bits is widened instead, without
// overlap (attention_fp8.cuh).
#pragma once
#include "prefill_state.cuh"

// SMALL fits 99 KB of shared memory, which is what devices of capability 8.6 and 8.9 give a block: half the keys of a stage,
// and half the rows where two terms of the queries are too large besides.
template <int D, int TERMS, bool SMALL>
struct PrefillShape {
    // 16-row products of a warp, packed rows of a block, keys of a stage, keys that are scored at a time.
    static constexpr int MT = D > 128 || (SMALL && D == 128 && TERMS == 2) ? 1 : 2;
    static constexpr uint32_t ROWS = MT * 64, KEYS = (D > 128 ? 32 : 64) / (SMALL ? 2 : 1),
                              PART = (D >= 128 && TERMS == 2) || KEYS < 32 ? 16 : 32;
    static constexpr uint32_t ROW = 2 * D + 16;
    static constexpr uint32_t PLANE = KEYS * ROW;
    static constexpr uint32_t STAGE = 2 * PLANE + KEYS * 4;
    static constexpr uint32_t QUERIES = ROWS * ROW;
};

constexpr uint32_t PREFILL_THREADS = 128;

// What the threads of a block share.
template <typename T, int D, int TERMS, bool SMALL>
struct PrefillBlock {
    using S = PrefillShape<D, TERMS, SMALL>;
    PrefillTile tile;
    unsigned char* shared;

    DEVICE unsigned char* stage(uint32_t i) const { return shared + TERMS * S::QUERIES + i * S::STAGE; }

    // The queries' terms in shared memory.
    DEVICE void load_queries() const {
        for (uint32_t i = threadIdx.x; i < S::ROWS * (D / 2); i += PREFILL_THREADS) {
            const uint32_t packed = i / (D / 2), d = i % (D / 2) * 2;
            float x[2];
            tile.query<T, D>(packed, d, x);
            uint32_t high, low;
            split<T>(x[0], x[1], 1.0f, high, low);
            const uint32_t to = packed * S::ROW + d * 2;
            *reinterpret_cast<uint32_t*>(shared + to) = high;
            if (TERMS == 2) *reinterpret_cast<uint32_t*>(shared + S::QUERIES + to) = low;
        }
    }

    // Starts copying a stage of keys from index `first`, or copies it.
    template <typename Copy>
    DEVICE static void copy(Copy& keys, uint32_t first, unsigned char* to) {
        uint32_t* positions = reinterpret_cast<uint32_t*>(to + 2 * S::PLANE);
        for (uint32_t i = 0; i < S::KEYS; i += KEY_GROUP) {
            keys.copy(threadIdx.x, first + i, to + i * S::ROW, S::PLANE, positions + i);
        }
    }
};

// A warp's rows: 16 MT of them.
template <typename T, int D, int TERMS, bool SMALL>
struct PrefillWarp {
    using S = PrefillShape<D, TERMS, SMALL>;
    static constexpr int MT = S::MT, NT = S::PART / 8, COLS = D / 8;
    PrefillState<D, MT, NT> state;

    DEVICE PrefillWarp(const PrefillTile& tile) : state(tile, threadIdx.x / 32 * 16 * MT) {}

    // s += one term of the queries times PART keys.
    DEVICE void multiply_keys(const unsigned char* queries, const unsigned char* keys, float (&s)[MT][NT][4]) const {
        const uint32_t lane = threadIdx.x % 32;
        const SharedAddress q = shared_address(queries) + (state.row0 + lane % 16) * S::ROW + lane / 16 * 16;
        const SharedAddress k = shared_address(keys) + (lane / 16 * 8 + lane % 8) * S::ROW + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) ldmatrix_x4(a[m], q + 16 * m * S::ROW + i * 32);
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                uint32_t b[4];
                ldmatrix_x4(b, k + 8 * n * S::ROW + i * 32);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma<T>(s[m][n], a[m], b[0], b[1]);
                    mma<T>(s[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // o += weights times the values of PART keys.
    DEVICE void multiply_values(const unsigned char* values, const float (&s)[MT][NT][4]) {
        const uint32_t lane = threadIdx.x % 32;
        const SharedAddress v = shared_address(values) + lane % 16 * S::ROW + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < NT / 2; k++) {
            uint32_t high[MT][4], low[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const float(&x)[4] = s[m][2 * k];
                const float(&y)[4] = s[m][2 * k + 1];
                split<T>(x[0], x[1], 1.0f, high[m][0], low[m][0]);
                split<T>(x[2], x[3], 1.0f, high[m][1], low[m][1]);
                split<T>(y[0], y[1], 1.0f, high[m][2], low[m][2]);
                split<T>(y[2], y[3], 1.0f, high[m][3], low[m][3]);
            }
#pragma unroll
            for (int i = 0; i < COLS; i += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, v + 16 * k * S::ROW + i * 16);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma<T>(state.o[m][i], high[m], b[0], b[1]);
                    mma<T>(state.o[m][i + 1], high[m], b[2], b[3]);
                    if (TERMS == 2) {
                        mma<T>(state.o[m][i], low[m], b[0], b[1]);
                        mma<T>(state.o[m][i + 1], low[m], b[2], b[3]);
                    }
                }
            }
        }
    }

    // Attends to keys `part` to `part + PART - 1` of a stage.
    DEVICE void attend(const PrefillBlock<T, D, TERMS, SMALL>& block, const unsigned char* stage, uint32_t part) {
        const uint32_t* positions = reinterpret_cast<const uint32_t*>(stage + 2 * S::PLANE) + part;
        if (positions[0] > state.position_max) return;
        float s[MT][NT][4] = {}, kept[MT][2];
        const unsigned char* keys = stage + part * S::ROW;
        multiply_keys(block.shared, keys, s);
        if (TERMS == 2) multiply_keys(block.shared + S::QUERIES, keys, s);
        if (block.tile.p.softcap > 0) state.cap(block.tile.p.softcap, s);
        state.mask(block.tile.p, positions, s);
        if (state.soften(s, kept)) state.scale(kept);
        multiply_values(keys + S::PLANE, s);
    }
};

// Grid: KV heads, items. `PREFILL_THREADS` threads. Copy: how keys and values become rows of T in shared memory.
template <typename T, int D, int TERMS, bool SMALL = false, typename Copy = KeyCopy<T, D, PREFILL_THREADS>>
DEVICE void attention_prefill(const AttentionParams& p) {
    using S = PrefillShape<D, TERMS, SMALL>;
    DYNAMIC_SHARED(shared);
    const AttnItem item = at<const AttnItem>(p.items)[blockIdx.y];
    if (item.rows == 0) return;
    const PrefillBlock<T, D, TERMS, SMALL> block = {{p, item, blockIdx.x, p.heads / p.kv_heads}, shared};
    Copy keys(p, item, blockIdx.x);
    block.copy(keys, 0, block.stage(0));
    copy_commit();
    block.load_queries();
    PrefillWarp<T, D, TERMS, SMALL> warp(block.tile);
    for (uint32_t first = 0, i = 0; first < item.keys; first += S::KEYS, i ^= 1) {
        if (first + S::KEYS < item.keys) block.copy(keys, first + S::KEYS, block.stage(i ^ 1));
        copy_commit();
        copy_wait<1>();
        sync_block();
        for (uint32_t part = 0; part < S::KEYS; part += S::PART) warp.attend(block, block.stage(i), part);
        // The stage is filled again in the next round.
        sync_block();
    }
    warp.state.store(block.tile);
}
