// A few rows of activations times a weight: out[r][n] = x[r] · w[n].
//
// Bytes: the weight once, 2 n k (4 n k in f32); activations are small and come from the caches. Operations: tensor cores
// take 16 weight rows as their left side and 8 rows of activations as their right side, so a batch of 1 to 8 costs the same.
// For each 2 KB of weights (16 rows, 64 columns) a warp issues about 120 instructions with 8 rows of activations, 220 with
// 16; a multiprocessor of an H200, which receives 2 KB in 96 clocks, could issue 384. Bound by memory. In flight: each warp
// has loaded the next 2 KB before it multiplies the present ones, and with two or more blocks of 8 warps to a
// multiprocessor that is 64 KB and more, twice what latency asks for.
//
// Exactness for nothing: activations enter as the sum of three terms of the weights' type, which is all of an f32.
//
// The columns of a step are dealt so that fragments are what 16-byte loads bring: lane t of four holds columns 8 t to 8 t + 7
// of 32, for weights and activations alike; a sum does not mind the order.
#pragma once
#include "common.cuh"

constexpr uint32_t GEMV_ROWS = 16, GEMV_WARPS = 8, GEMV_STEP = 64;

// Activations as terms, and how their products add up.
template <typename T>
struct Terms;

// Multiples of 2^8, of 2^-3 and of 2^-14, each of f16's range: nothing overflows below 2^23, and 2^-39 is what is lost at most
// of small ones.
template <>
struct Terms<f16> {
    static constexpr int COUNT = 3;
    static constexpr float FIRST = 256.0f, STEP = 1.0f / 2048.0f;
    DEVICE static void make(float x0, float x1, uint32_t (&terms)[COUNT]) {
        x0 /= FIRST;
        x1 /= FIRST;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            terms[i] = pack<f16>(x0, x1);
            x0 = (x0 - widen(narrow<f16>(x0))) / STEP;
            x1 = (x1 - widen(narrow<f16>(x1))) / STEP;
        }
    }
    DEVICE static float total(const float (&sums)[COUNT]) {
        return ((sums[2] * STEP + sums[1]) * STEP + sums[0]) * FIRST;
    }
};

template <>
struct Terms<bf16> {
    static constexpr int COUNT = 3;
    DEVICE static void make(float x0, float x1, uint32_t (&terms)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            terms[i] = pack<bf16>(x0, x1);
            x0 -= widen(narrow<bf16>(x0));
            x1 -= widen(narrow<bf16>(x1));
        }
    }
    DEVICE static float total(const float (&sums)[COUNT]) { return (sums[2] + sums[1]) + sums[0]; }
};

template <typename T, int TILES>
struct GemvWarp {
    static constexpr int COUNT = Terms<T>::COUNT;
    const GemvParams& p;
    uint32_t n0;
    float sums[TILES][COUNT][4];

    // Weights of rows lane / 4 and lane / 4 + 8, 8 columns each from `k` and from `k + 32`.
    DEVICE void load(uint32_t k, uint4 (&w)[4]) const {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t row = n0 + lane / 4 + i % 2 * 8, column = k + i / 2 * 32 + lane % 4 * 8;
            const bool valid = row < p.n && column < p.ldw;
            w[i] = valid ? load_once(at<const T>(p.w) + static_cast<uint64_t>(row) * p.ldw + column) : uint4{0, 0, 0, 0};
        }
    }

    // Eight activations from `column` of a row; zeros where there are none.
    DEVICE void activations(uint32_t row, uint32_t column, float (&x)[8]) const {
        const float* from = at<const float>(p.x) + static_cast<uint64_t>(row) * p.x_stride + column;
        if (row < p.rows && column + 8 <= p.k && reinterpret_cast<Address>(from) % 16 == 0) {
            const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
            x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = row < p.rows && column + i < p.k ? from[i] : 0.0f;
        }
    }

    DEVICE void multiply(uint32_t k, const uint4 (&w)[4]) {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 &low = w[2 * half], &high = w[2 * half + 1];
            const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                float x[8];
                activations(8 * tile + lane / 4, k + 32 * half + lane % 4 * 8, x);
                uint32_t terms[4][COUNT];
#pragma unroll
                for (int i = 0; i < 4; i++) Terms<T>::make(x[2 * i], x[2 * i + 1], terms[i]);
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    mma<T>(sums[tile][i], first, terms[0][i], terms[1][i]);
                    mma<T>(sums[tile][i], second, terms[2][i], terms[3][i]);
                }
            }
        }
    }
};

// Grid: blocks of 16 weight rows. The warps of a block share the columns and are added at the end, in order.
template <typename T, int TILES>
DEVICE void gemv(const GemvParams& p) {
    SHARED float parts[GEMV_WARPS][8 * TILES][GEMV_ROWS];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    GemvWarp<T, TILES> state = {p, blockIdx.x * GEMV_ROWS, {}};
    uint4 now[4], next[4];
    uint32_t k = warp * GEMV_STEP;
    if (k < p.k) state.load(k, now);
    for (; k < p.k; k += GEMV_WARPS * GEMV_STEP) {
        state.load(k + GEMV_WARPS * GEMV_STEP, next);
        state.multiply(k, now);
#pragma unroll
        for (int i = 0; i < 4; i++) now[i] = next[i];
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float sums[Terms<T>::COUNT];
            for (int i = 0; i < Terms<T>::COUNT; i++) sums[i] = state.sums[tile][i][e];
            parts[warp][8 * tile + lane % 4 * 2 + e % 2][lane / 4 + e / 2 * 8] = Terms<T>::total(sums);
        }
    }
    sync_block();
    for (uint32_t i = threadIdx.x; i < 8 * TILES * GEMV_ROWS; i += blockDim.x) {
        const uint32_t row = i / GEMV_ROWS, n = state.n0 + i % GEMV_ROWS;
        if (row >= p.rows || n >= p.n) continue;
        float sum = p.bias ? widen(at<const T>(p.bias)[n]) : 0.0f;
        for (uint32_t w = 0; w < GEMV_WARPS; w++) sum += parts[w][row][i % GEMV_ROWS];
        float* out = at<float>(p.out) + static_cast<uint64_t>(row) * p.out_stride + n;
        *out = p.add ? *out + sum : sum;
    }
}

// The same for f32 weights, in plain arithmetic: a warp takes a weight row and up to 8 rows of activations. 32 operations
// for each 4 bytes at most. Grid: blocks of 8 weight rows, blocks of 8 rows.
DEVICE void gemv_plain(const GemvParams& p) {
    constexpr int ROWS = 8;
    const uint32_t lane = threadIdx.x % 32, n = blockIdx.x * GEMV_WARPS + threadIdx.x / 32, row0 = blockIdx.y * ROWS;
    // Whole warps leave together.
    if (n >= p.n) return;
    const float* w = at<const float>(p.w) + static_cast<uint64_t>(n) * p.ldw;
    float sums[ROWS] = {};
    for (uint32_t k = lane; k < p.k; k += 32) {
        const float weight = w[k];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (row0 + r < p.rows) {
                sums[r] = fmaf(at<const float>(p.x)[static_cast<uint64_t>(row0 + r) * p.x_stride + k], weight, sums[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float sum = warp_sum(sums[r]) + (p.bias ? at<const float>(p.bias)[n] : 0.0f);
        if (lane == 0 && row0 + r < p.rows) {
            float* out = at<float>(p.out) + static_cast<uint64_t>(row0 + r) * p.out_stride + n;
            *out = p.add ? *out + sum : sum;
        }
    }
}
