// Decode micro attention: a few query rows over a long stream of keys (split over the context as in Flash-Decoding, Dao et
// al. 2023).
//
// Bytes: K and V of an item once, 4 D bytes a key and KV head in 16-bit types; nothing else grows with the context. Operations:
// the query heads of a group are packed into the 16 rows of m16n8k16, 8 at a time, and each product takes D / 16 + D / 8
// instructions for 8 keys, so 16 keys of D = 128 cost 32 products for 8 KB. A multiprocessor of an H200 receives about 21
// bytes a clock (4.8 TB/s over 132 at 1.7 GHz): 8 KB take 380 clocks, in which it could issue 1,500 warp instructions; a
// warp issues under 400 here (counted in the machine code). The kernel is bound by memory with a margin of four.
//
// Exactness for nothing: rows 0 to 7 of the products are the first terms of 8 packed queries and rows 8 to 15 their second
// terms, so that a score is the sum of two accumulators of the same thread. The same holds for weights and values. Without
// this half the rows would idle.
//
// Each warp has keys, stages and softmax state of its own, and copies what it multiplies itself: the loop has no block
// barrier. Warps take turns at 16 keys each and are reduced once at the end.
#pragma once
#include "keys.cuh"

constexpr uint32_t DECODE_TILE = 8, DECODE_KEYS = KEY_GROUP;
// Second terms are multiples of 2^-11: f16's narrow exponents lose nothing of them.
constexpr float TERM_SCALE = 2048.0f, TERM_UNSCALE = 1.0f / 2048.0f;

template <typename T, int D>
struct DecodeShared {
    // Most stages, and the step in which `wait_for_stage` tells their number.
    static constexpr uint32_t STAGES_MAX = 4, STAGES_STEP = 1;
    static constexpr uint32_t ROW = 2 * D + 16;
    static constexpr uint32_t PLANE = DECODE_KEYS * ROW;
    static constexpr uint32_t STAGE = 2 * PLANE + DECODE_KEYS * 4;
};

// Waits for the oldest of `stages` - 1 groups of copies in flight, and between steps for one more.
template <uint32_t MOST, uint32_t STEP>
DEVICE void wait_for_stage(uint32_t stages) {
    if constexpr (MOST <= 2) {
        copy_wait<0>();
    } else if (stages >= MOST) {
        copy_wait<MOST - 2>();
    } else {
        wait_for_stage<MOST - STEP, STEP>(stages);
    }
}

// A warp's state and the steps that stores of 16 and of 8 bits share. T: the type of products.
template <typename T, int D>
struct DecodeRows {
    static constexpr int STEPS = D / 16, COLS = D / 8;
    // Fragments of the queries, two terms, times scale and log2(e).
    uint32_t q[STEPS][4];
    // Outputs: row lane / 4 of the packed tile, first terms' in [0] and [1], second terms' in [2] and [3].
    float o[COLS][4];
    float max, sum, slope;
    uint32_t position;

    // `column(e)`: of a step's 16 elements, the lane's e-th of four.
    template <typename Column>
    DEVICE void load(const AttentionParams& p, const AttnItem& item, uint32_t kv_head, uint32_t tile, const Column& column) {
        const uint32_t lane = threadIdx.x % 32, group = p.heads / p.kv_heads;
        const uint32_t packed = tile * DECODE_TILE + lane / 4;
        const PackedRow row(packed, group, kv_head);
        const bool valid = packed < item.rows * group;
        const float* query = at<const float>(p.q) + static_cast<uint64_t>(item.row0 + row.row) * p.q_stride + row.head * D;
        const float scale = p.scale * LOG2_E;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            float x[4];
            for (int e = 0; e < 4; e++) x[e] = valid ? saturate<T>(query[16 * i + column(e)] * scale) : 0.0f;
            split<T>(x[0], x[1], TERM_SCALE, q[i][0], q[i][1]);
            split<T>(x[2], x[3], TERM_SCALE, q[i][2], q[i][3]);
        }
        position = item.pos0 + row.row;
        slope = valid && p.slopes ? at<const float>(p.slopes)[row.head] * LOG2_E : 0.0f;
        max = NEGATIVE_INFINITY;
        sum = 0;
        for (int i = 0; i < COLS; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
    }

    // Caps and biases scores of 16 keys, in units of log2, and hides what the row does not see: [key / 8][key % 2] for keys
    // 2 (lane % 4) and the one after of each 8.
    DEVICE void mask(const uint32_t* positions, uint32_t window, float softcap, float (&scores)[2][2]) const {
        if (softcap > 0) {
            const SoftCap cap(softcap * LOG2_E);
            for (int n = 0; n < 2; n++) {
                for (int e = 0; e < 2; e++) scores[n][e] = cap.of(scores[n][e]);
            }
        }
        positions += threadIdx.x % 4 * 2;
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                const uint32_t key = positions[8 * n + e];
                const float distance = static_cast<float>(static_cast<int32_t>(key - position));
                const float biased = scores[n][e] + slope * distance;
                scores[n][e] = is_visible(position, key, window) ? biased : NEGATIVE_INFINITY;
            }
        }
    }

    // The highest of a row's scores of 16 keys, for all its lanes.
    DEVICE static float highest(const float (&w)[2][2]) {
        float x = fmaxf(fmaxf(w[0][0], w[0][1]), fmaxf(w[1][0], w[1][1]));
        x = fmaxf(x, shuffle_xor(x, 1));
        return fmaxf(x, shuffle_xor(x, 2));
    }

    // A new maximum becomes rare as keys pass: a branch of the whole warp saves most of the scaling.
    DEVICE void scale(float kept) {
        if (any_lane(kept != 1.0f)) {
#pragma unroll
            for (int i = 0; i < COLS; i++) {
                for (int e = 0; e < 4; e++) o[i][e] *= kept;
            }
        }
    }

    // Leaves maxima and sums of the 8 packed rows in shared memory: [8], [8]. Outputs follow, [8][D]: where the lane's row begins.
    DEVICE float* leave_sums(float* to) {
        const uint32_t lane = threadIdx.x % 32, row = lane / 4;
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (lane % 4 == 0) {
            to[row] = max;
            to[8 + row] = sum;
        }
        return to + 16 + row * D;
    }
};

// One warp's part of an item.
template <typename T, int D>
struct DecodeWarp : DecodeRows<T, D> {
    using Rows = DecodeRows<T, D>;
    using Rows::q, Rows::o, Rows::max, Rows::sum, Rows::STEPS, Rows::COLS;
    using S = DecodeShared<T, D>;

    DEVICE void load_queries(const AttentionParams& p, const AttnItem& item, uint32_t kv_head, uint32_t tile) {
        const uint32_t first = threadIdx.x % 4 * 2;
        Rows::load(p, item, kv_head, tile, [first](int e) { return first + e % 2 + e / 2 * 8; });
    }

    // Scores of 16 keys as `mask` has them.
    DEVICE void score(const unsigned char* stage, uint32_t window, float softcap, float (&scores)[2][2]) {
        const uint32_t lane = threadIdx.x % 32;
        float s[2][4] = {};
        const SharedAddress k = shared_address(stage) + (lane / 16 * 8 + lane % 8) * S::ROW + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint32_t b[4];
            ldmatrix_x4(b, k + i * 32);
            mma<T>(s[0], q[i], b[0], b[1]);
            mma<T>(s[1], q[i], b[2], b[3]);
        }
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) scores[n][e] = s[n][e] + s[n][e + 2] * TERM_UNSCALE;
        }
        Rows::mask(reinterpret_cast<const uint32_t*>(stage + 2 * S::PLANE), window, softcap, scores);
    }

    // Adds a stage's keys to the state (online softmax, Milakov and Gimelshein 2018).
    DEVICE void attend(const unsigned char* stage, uint32_t window, float softcap) {
        const uint32_t lane = threadIdx.x % 32;
        float w[2][2];
        score(stage, window, softcap, w);
        const float new_max = fmaxf(max, Rows::highest(w)), base = finite_max(new_max);
        const float kept = exp2_fast(max - base);
        max = new_max;
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) w[n][e] = exp2_fast(w[n][e] - base);
        }
        sum = sum * kept + (w[0][0] + w[0][1]) + (w[1][0] + w[1][1]);
        uint32_t a[4];
        split<T>(w[0][0], w[0][1], TERM_SCALE, a[0], a[1]);
        split<T>(w[1][0], w[1][1], TERM_SCALE, a[2], a[3]);
        Rows::scale(kept);
        const SharedAddress v = shared_address(stage) + S::PLANE + lane % 16 * S::ROW + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < COLS; i += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, v + i * 16);
            mma<T>(o[i], a, b[0], b[1]);
            mma<T>(o[i + 1], a, b[2], b[3]);
        }
    }

    // Leaves maxima, sums and outputs of the 8 packed rows in shared memory: [8], [8], [8][D].
    DEVICE void leave(float* to) {
        float* out = Rows::leave_sums(to) + threadIdx.x % 4 * 2;
        for (int i = 0; i < COLS; i++) {
            for (int e = 0; e < 2; e++) out[8 * i + e] = o[i][e] + o[i][e + 2] * TERM_UNSCALE;
        }
    }
};

// Reduces what the warps left and writes the tile's rows.
template <int D>
DEVICE void reduce_warps(const AttentionParams& p, const AttnItem& item, uint32_t kv_head, uint32_t tile,
                         const unsigned char* shared, uint32_t warp_bytes) {
    const uint32_t group = p.heads / p.kv_heads, warps = blockDim.x / 32;
    const uint32_t rows = min(DECODE_TILE, item.rows * group - tile * DECODE_TILE);
    const Target target(p, item);
    for (uint32_t i = threadIdx.x; i < rows * D; i += blockDim.x) {
        const uint32_t row = i / D;
        float max = NEGATIVE_INFINITY;
        for (uint32_t w = 0; w < warps; w++) {
            max = fmaxf(max, reinterpret_cast<const float*>(shared + w * warp_bytes)[row]);
        }
        float sum = 0, out = 0;
        for (uint32_t w = 0; w < warps; w++) {
            const float* part = reinterpret_cast<const float*>(shared + w * warp_bytes);
            const float weight = exp2_fast(part[row] - finite_max(max));
            sum += weight * part[8 + row];
            out += weight * part[16 + i];
        }
        const PackedRow packed(tile * DECODE_TILE + row, group, kv_head);
        target.row(p, packed)[i % D] = sum != 0 ? out / sum : 0.0f;
        if (i % D == 0) target.store_lse(p, packed, sum != 0, max / LOG2_E + logf(sum));
    }
}

// Grid: KV heads times tiles of packed rows, items. Any number of warps; p.stages stages each.
template <typename T, int D>
DEVICE void attention_decode(const AttentionParams& p) {
    using S = DecodeShared<T, D>;
    DYNAMIC_SHARED(shared);
    const AttnItem item = at<const AttnItem>(p.items)[blockIdx.y];
    const uint32_t kv_head = blockIdx.x % p.kv_heads, tile = blockIdx.x / p.kv_heads;
    if (tile * DECODE_TILE >= item.rows * (p.heads / p.kv_heads)) return;
    const uint32_t warp = threadIdx.x / 32, stride = blockDim.x / 32 * DECODE_KEYS;
    const uint32_t warp_bytes = p.stages * S::STAGE;
    unsigned char* ring = shared + warp * warp_bytes;
    KeyCopy<T, D, 32> keys(p, item, kv_head);
    uint32_t copied = warp * DECODE_KEYS;
    // A stage more of the warp's keys, if there are any; a group of copies in any case.
    const auto fill = [&](uint32_t stage) {
        unsigned char* to = ring + stage * S::STAGE;
        if (copied < item.keys) {
            keys.copy(threadIdx.x % 32, copied, to, S::PLANE, reinterpret_cast<uint32_t*>(to + 2 * S::PLANE));
        }
        copy_commit();
        copied += stride;
    };
    for (uint32_t i = 0; i + 1 < p.stages; i++) fill(i);
    // The queries' latency is that of the first keys.
    DecodeWarp<T, D> state;
    state.load_queries(p, item, kv_head, tile);
    uint32_t read = 0, write = p.stages - 1;
    for (uint32_t key = warp * DECODE_KEYS; key < item.keys; key += stride) {
        wait_for_stage<S::STAGES_MAX, S::STAGES_STEP>(p.stages);
        // All lanes' copies have arrived, and all lanes have read the stage that is filled next.
        sync_warp();
        fill(write);
        state.attend(ring + read * S::STAGE, p.window, p.softcap);
        write = write + 1 == p.stages ? 0 : write + 1;
        read = read + 1 == p.stages ? 0 : read + 1;
    }
    copy_wait<0>();
    sync_warp();
    state.leave(reinterpret_cast<float*>(ring));
    sync_block();
    reduce_warps<D>(p, item, kv_head, tile, shared, warp_bytes);
}
