// Micro attention over KV in 8 bits (rows as in fp8.cuh): decode on tensor cores, and the copy of keys and values for prefill.
//
// Shifts make a code the f16 that is 2^-8 of its value, subnormal codes too. Decode copies rows as they are stored and widens
// codes as it loads the fragments of a product. The elements of a row may stand in any order if both factors have the same, so that a
// lane takes four codes at once: of one key for scores, of four keys for outputs. Scales are powers of two. A key's multiplies its
// score. A value's is added to the score as a logarithm, in an online maximum of its own: as a factor it would take weights out of
// f16's range.
//
// Bytes: D + 4 for a key or value of a KV head, for which copies of 16 bytes ask for D + 16. A multiprocessor of an H200
// receives 16 keys of D = 128 in 200 clocks, in which it could issue 800 warp instructions. The loop issues about 670 (counted in
// the machine code), 240 of them to widen codes: 3.5 for two of keys, 4 for two of values. Not yet timed on a GPU.
//
// Prefill widens rows to bf16, exactly, on their way to shared memory, without copying ahead: nothing hides the latency of its loads.
// A value row whose scale is NaN spoils all rows of a tile, as NaN in 16-bit types does; decode hides what a row does not see.
#pragma once
#include "attention_decode.cuh"
#include "attention_prefill.cuh"
#include "fp8.cuh"

// Four codes as f16, two to a register, times 2^-8.
DEVICE void widen_codes(uint32_t codes, uint32_t& first, uint32_t& second) {
    const uint32_t high = (codes >> 1 & 0x3f3f3f3fu) | (codes & 0x80808080u), low = codes << 7 & 0x80808080u;
    first = permute(low, high, 0x5140);
    second = permute(low, high, 0x7362);
}
constexpr float CODE_UNIT = 256.0f;
constexpr float CODE_UNIT_LOG2 = 8.0f;

template <int D>
struct DecodeShared<e4m3, D> {
    static constexpr uint32_t STAGES_MAX = 8, STAGES_STEP = 2;
    // Rows begin anywhere in the first 16 bytes, at multiples of four.
    static constexpr uint32_t ROW = D + 16;
    static constexpr uint32_t PLANE = DECODE_KEYS * ROW;
    // Positions, then from the stage to each key's and value's row (the lower and upper 16 bits).
    static constexpr uint32_t STAGE = 2 * PLANE + DECODE_KEYS * 8;
};

// Copies rows of 16 keys as they are stored, by a warp: the 16-byte chunks that hold them, the last one up to the row's end. Four
// lanes share a key, so that a lane computes few addresses: those of a row's chunks are constants apart.
template <int D>
struct KeyCopy<e4m3, D, 32> {
    static constexpr uint32_t BYTES = D + 4, CHUNKS = D / 16 + 1, LANES = 4, KEYS = 32 / LANES;
    using S = DecodeShared<e4m3, D>;
    KeyWalk walk;
    Address k;
    uint64_t token_stride;
    // From a key to its value.
    int64_t to_value;
    uint32_t keys;

    DEVICE KeyCopy(const AttentionParams& p, const AttnItem& item, uint32_t kv_head)
        : walk(item, p.runs),
          k(p.kv.k + kv_head * p.kv.head_stride),
          token_stride(p.kv.token_stride),
          to_value(static_cast<int64_t>(p.kv.v - p.kv.k)),
          keys(item.keys) {}

    DEVICE void copy(uint32_t thread, uint32_t first, unsigned char* stage, uint32_t plane, uint32_t* positions) {
        if (first < keys) walk.seek(first);
        const uint32_t key = thread / LANES;
        if (first < keys && first - walk.before + KEY_GROUP <= walk.run.len) {
            // The distance of keys within a group fits 32 bits.
            const uint32_t stride = static_cast<uint32_t>(token_stride), position = walk.position(first);
            const Address from = k + walk.slot(first) * token_stride;
            for (uint32_t i = key; i < KEY_GROUP; i += KEYS) {
                copy_key(thread % LANES, i, from + i * stride, position + i, true, stage, plane, positions);
            }
        } else {
            KeyWalk here = walk;
#pragma unroll 1
            for (uint32_t i = key; i < KEY_GROUP; i += KEYS) {
                const bool valid = first + i < keys;
                if (valid) here.seek(first + i);
                // A masked copy names a key of the item, too: the store's first slot need not have memory.
                const Address row = k + (valid ? here.slot(first + i) : here.run.base) * token_stride;
                const uint32_t position = valid ? here.position(first + i) : NOWHERE;
                copy_key(thread % LANES, i, row, position, valid, stage, plane, positions);
            }
        }
    }

    DEVICE void copy_key(uint32_t lane, uint32_t key, Address row, uint32_t position, bool valid, unsigned char* stage,
                         uint32_t plane, uint32_t* positions) const {
        const uint32_t to = key * S::ROW;
        copy_row(lane, row, valid, shared_address(stage) + to);
        copy_row(lane, row + to_value, valid, shared_address(stage) + plane + to);
        if (lane == 0) {
            const uint32_t value = plane + to + static_cast<uint32_t>((row + to_value) % 16);
            positions[key] = position;
            positions[DECODE_KEYS + key] = (to + static_cast<uint32_t>(row % 16)) | value << 16;
        }
    }

    DEVICE static void copy_row(uint32_t lane, Address row, bool valid, SharedAddress to) {
        const unsigned char* from = at<const unsigned char>(row / 16 * 16) + lane * 16;
        to += lane * 16;
#pragma unroll
        for (uint32_t i = 0; i < (CHUNKS + LANES - 1) / LANES; i++) {
            const uint32_t chunk = lane + i * LANES;
            if ((i + 1) * LANES > CHUNKS && chunk >= CHUNKS) break;
            // Nothing need be behind the store's last row.
            const uint32_t bytes = chunk + 1 == CHUNKS ? static_cast<uint32_t>(row % 16) + BYTES - (CHUNKS - 1) * 16 : 16;
            copy_async(to + i * LANES * 16, from + i * LANES * 16, valid ? bytes : 0);
        }
    }
};

template <int D>
struct DecodeWarp<e4m3, D> : DecodeRows<f16, D> {
    using Rows = DecodeRows<f16, D>;
    using Rows::q, Rows::o, Rows::max, Rows::sum, Rows::STEPS;
    using S = DecodeShared<e4m3, D>;
    // The highest sum of a score and the logarithm of its value's scale. Outputs are times 2^-value_max.
    float value_max;

    DEVICE void load_queries(const AttentionParams& p, const AttnItem& item, uint32_t kv_head, uint32_t tile) {
        const uint32_t first = threadIdx.x % 4 * 4;
        Rows::load(p, item, kv_head, tile, [first](int e) { return first + e; });
        value_max = NEGATIVE_INFINITY;
    }

    DEVICE static const uint32_t* positions(const unsigned char* stage) {
        return reinterpret_cast<const uint32_t*>(stage + 2 * S::PLANE);
    }
    DEVICE static const unsigned char* key_row(const unsigned char* stage, uint32_t key) {
        return stage + (positions(stage)[DECODE_KEYS + key] & 0xffff);
    }
    DEVICE static const unsigned char* value_row(const unsigned char* stage, uint32_t key) {
        return stage + (positions(stage)[DECODE_KEYS + key] >> 16);
    }
    DEVICE static uint32_t word(const unsigned char* row, uint32_t byte) {
        return *reinterpret_cast<const uint32_t*>(row + byte);
    }

    // Scores of 16 keys as `mask` has them.
    DEVICE void score(const unsigned char* stage, uint32_t window, float softcap, float (&scores)[2][2]) {
        const uint32_t lane = threadIdx.x % 32, t = lane % 4;
        const unsigned char* rows[2] = {key_row(stage, lane / 4) + 4 * t, key_row(stage, 8 + lane / 4) + 4 * t};
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            for (int n = 0; n < 2; n++) {
                uint32_t b[2];
                widen_codes(word(rows[n], 16 * i), b[0], b[1]);
                mma<f16>(s[n], q[i], b[0], b[1]);
            }
        }
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                const float row_scale = as_float(word(key_row(stage, 8 * n + 2 * t + e), D));
                scores[n][e] = (s[n][e] + s[n][e + 2] * TERM_UNSCALE) * (row_scale * CODE_UNIT);
            }
        }
        Rows::mask(positions(stage), window, softcap, scores);
    }

    // log2 of a row's scale: a power of two, or zero, or NaN.
    DEVICE static float log2_of(uint32_t scale) {
        const float exponent = static_cast<float>(static_cast<int32_t>(scale >> 23) - 127);
        return scale == 0 ? NEGATIVE_INFINITY : scale > 0x7f800000u ? as_float(scale) : exponent;
    }

    // Adds a stage's keys to the state.
    DEVICE void attend(const unsigned char* stage, uint32_t window, float softcap) {
        const uint32_t lane = threadIdx.x % 32, t = lane % 4;
        const unsigned char* rows[2][2];
        float scores[2][2], w[2][2], part = 0;
        score(stage, window, softcap, scores);
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                rows[n][e] = value_row(stage, 8 * n + 2 * t + e);
                const float weighed = scores[n][e] + (log2_of(word(rows[n][e], D)) + CODE_UNIT_LOG2);
                // What is hidden may have any scale.
                w[n][e] = scores[n][e] == NEGATIVE_INFINITY ? NEGATIVE_INFINITY : weighed;
            }
        }
        const float new_max = fmaxf(max, Rows::highest(scores)), base = finite_max(new_max);
        const float new_value_max = fmaxf(value_max, Rows::highest(w)), value_base = finite_max(new_value_max);
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                part += exp2_fast(scores[n][e] - base);
                w[n][e] = exp2_fast(w[n][e] - value_base);
            }
        }
        sum = sum * exp2_fast(max - base) + part;
        max = new_max;
        Rows::scale(exp2_fast(value_max - value_base));
        value_max = new_value_max;
        uint32_t a[4];
        split<f16>(w[0][0], w[0][1], TERM_SCALE, a[0], a[1]);
        split<f16>(w[1][0], w[1][1], TERM_SCALE, a[2], a[3]);
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            // Four columns of four keys; product 4 i + c has columns 32 i + 4 n + c.
            uint32_t codes[2][2];
            for (int n = 0; n < 2; n++) {
                const uint32_t x = word(rows[n][0], 32 * i + lane / 4 * 4), y = word(rows[n][1], 32 * i + lane / 4 * 4);
                codes[n][0] = permute(x, y, 0x5140);
                codes[n][1] = permute(x, y, 0x7362);
            }
            for (int half = 0; half < 2; half++) {
                uint32_t b[2][2];
                for (int n = 0; n < 2; n++) widen_codes(codes[n][half], b[n][0], b[n][1]);
                for (int c = 0; c < 2; c++) mma<f16>(o[4 * i + 2 * half + c], a, b[0][c], b[1][c]);
            }
        }
    }

    DEVICE void leave(float* to) {
        const float factor = exp2_fast(value_max - finite_max(max));
        float* out = Rows::leave_sums(to) + threadIdx.x % 4 * 8;
        for (int i = 0; i < D / 32; i++) {
            for (int c = 0; c < 4; c++) {
                for (int e = 0; e < 2; e++) {
                    const float(&x)[4] = o[4 * i + c];
                    out[32 * i + 4 * e + c] = (x[e] + x[e + 2] * TERM_UNSCALE) * factor;
                }
            }
        }
    }
};

// Widens rows of 16 keys to bf16 where `Layout` has them, by THREADS threads; otherwise as KeyCopy of 16-bit types.
template <int D, uint32_t THREADS>
struct WideningCopy {
    using Layout = PaddedRows<D>;
    static constexpr uint32_t WORDS = D / 4, COPIES = KEY_GROUP * WORDS, TURNS = COPIES / THREADS;
    static_assert(COPIES % THREADS == 0, "threads have equal shares");
    KeyWalk walk;
    Address planes[2];
    uint64_t token_stride;
    uint32_t keys;

    DEVICE WideningCopy(const AttentionParams& p, const AttnItem& item, uint32_t kv_head)
        : walk(item, p.runs),
          planes{p.kv.k + kv_head * p.kv.head_stride, p.kv.v + kv_head * p.kv.head_stride},
          token_stride(p.kv.token_stride),
          keys(item.keys) {}

    // All loads come before the first use of one.
    DEVICE void copy(uint32_t thread, uint32_t first, unsigned char* stage, uint32_t plane, uint32_t* positions) {
        if (first < keys) walk.seek(first);
        const bool together = first < keys && first - walk.before + KEY_GROUP <= walk.run.len;
        KeyWalk here = walk;
        uint32_t codes[2][TURNS];
        float scales[2][TURNS];
#pragma unroll
        for (uint32_t j = 0; j < TURNS; j++) {
            const uint32_t i = thread + j * THREADS, index = first + i / WORDS;
            const bool valid = index < keys;
            if (valid && !together) here.seek(index);
            const uint64_t offset = (valid ? here.slot(index) : here.run.base) * token_stride;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                codes[n][j] = valid ? *at<const uint32_t>(planes[n] + offset + i % WORDS * 4) : 0;
                scales[n][j] = valid ? *at<const float>(planes[n] + offset + D) : 0.0f;
            }
            if (i % WORDS == 0) positions[i / WORDS] = valid ? here.position(index) : NOWHERE;
        }
#pragma unroll
        for (uint32_t j = 0; j < TURNS; j++) {
            const uint32_t i = thread + j * THREADS, word = i % WORDS;
            // Two words of a chunk of 16 bytes.
            unsigned char* to = stage + Layout::offset(i / WORDS, word / 2) + word % 2 * 8;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                *reinterpret_cast<uint64_t*>(to + n * plane) = widened(codes[n][j], scales[n][j] * CODE_UNIT);
            }
        }
    }

    // Four codes times `scale` as bf16.
    DEVICE static uint64_t widened(uint32_t codes, float scale) {
        uint32_t halves[2], wide[2];
        widen_codes(codes, halves[0], halves[1]);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const f16 low = {static_cast<uint16_t>(halves[n])}, high = {static_cast<uint16_t>(halves[n] >> 16)};
            wide[n] = pack<bf16>(widen(low) * scale, widen(high) * scale);
        }
        return wide[0] | static_cast<uint64_t>(wide[1]) << 32;
    }
};
