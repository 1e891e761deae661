// A few rows of activations times a weight: out[r][n] = x[r] · w[n].
//
// Bytes: the weight once, 2 n k (4 n k in f32); activations are small and come from the caches. A multiprocessor of an H200
// receives 2 KB in about 96 clocks (4.8 TB/s over 132 at 1.7 GHz), in which it could issue 384 warp instructions. Two kernels
// stay well below that, so that memory is the bound:
//
// * one or two rows, in plain arithmetic: a lane reads 16 bytes of four weight rows and multiplies them by the same
//   activations. 2 KB cost about 140 instructions with one row and 180 with two (counted in the machine code).
// * up to 16 rows, on tensor cores: 32 weight rows are the left side, 8 or 16 rows of activations the right. Splitting the
//   activations into three terms costs most of the 280 instructions for 4 KB and 8 rows, or of the 450 for 16.
//
// In flight: each warp has loaded the next 2 or 4 KB before it multiplies the present ones; 8 warps a block and one to three
// blocks a multiprocessor make 32 to 64 KB, and latency asks for 29 KB (4.8 TB/s times 0.8 µs over 132).
//
// Exact products take activations as the sum of three terms of the weights' type, which is all of an f32. On an H200 they read
// weights at 0.77 of the copy rate with 8 rows and 0.45 with 16 (docs/gpu.md), so fast ones have one term (bf16), or two (f16, whose
// small numbers have fewer bits).
//
// An up projection applies its activation to the sums. It writes n f32 a row, where a product and an activation of their own write
// 2 n, read 2 n and write n. Half of a gated block's weight rows are gates, the others the ups of the same outputs.
//
// A launch that begins early (see ptx.cuh) loads its first weights before it waits for the grids before it.
#pragma once
#include "activation.cuh"

constexpr uint32_t GEMV_WARPS = 8;

// Eight (f32: four) weights of a 16-byte load, widened.
template <typename T>
struct Packed;
template <>
struct Packed<float> {
    static constexpr uint32_t COUNT = 4;
    DEVICE static void widen_all(const uint4& w, float (&x)[COUNT]) {
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = as_float(words[i]);
    }
};
template <typename T>
struct Packed {
    static constexpr uint32_t COUNT = 8;
    DEVICE static void widen_all(const uint4& w, float (&x)[COUNT]) {
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = widen(T{static_cast<uint16_t>(words[i])});
            x[2 * i + 1] = widen(T{static_cast<uint16_t>(words[i] >> 16)});
        }
    }
};

// COUNT activations from `column` of a row; zeros where there are none.
template <uint32_t COUNT>
DEVICE void load_activations(const GemvParams& p, uint32_t row, uint32_t column, float (&x)[COUNT]) {
    const float* from = at<const float>(p.x) + static_cast<uint64_t>(row) * p.x_stride + column;
    if (row < p.rows && column + COUNT <= p.k && reinterpret_cast<Address>(from) % 16 == 0) {
#pragma unroll
        for (uint32_t i = 0; i < COUNT / 4; i++) {
            const float4 four = reinterpret_cast<const float4*>(from)[i];
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++) x[i] = row < p.rows && column + i < p.k ? from[i] : 0.0f;
    }
}

// The weight row that is row `j` of the `block` ones of block `index`. Rows beyond the last are read as the last and not written.
DEVICE uint64_t row_of_block(const GemvParams& p, uint32_t index, uint32_t block, uint32_t j) {
    if (p.activation != ACTIVATION_SILU_MUL) return min(index * block + j, p.n - 1);
    const uint32_t columns = p.n / 2;
    return min(index * (block / 2) + j % (block / 2), columns - 1) + (j < block / 2 ? 0 : columns);
}

// Where that row begins.
template <typename T, uint32_t BLOCK>
DEVICE const T* weight_row(const GemvParams& p, uint32_t j) {
    return at<const T>(p.w) + row_of_block(p, blockIdx.x, BLOCK, j) * p.ldw;
}

// 16 bytes of a weight row of `ldw`; zeros beyond its end.
template <typename T>
DEVICE uint4 load_weights(uint32_t ldw, const T* row, uint32_t column) {
    return column < ldw ? load_once(row + column) : uint4{0, 0, 0, 0};
}

// Writes `rows` rows of block `index`'s results; `sum(r, j)` is the product of row `row0 + r` and of the block's weight row `j`.
template <typename T, typename Sum>
DEVICE void store_block(const GemvParams& p, uint32_t index, uint32_t block, uint32_t rows, uint32_t row0, Sum sum) {
    const bool gated = p.activation == ACTIVATION_SILU_MUL;
    const uint32_t width = gated ? block / 2 : block, columns = gated ? p.n / 2 : p.n;
    for (uint32_t i = threadIdx.x; i < width * rows; i += blockDim.x) {
        const uint32_t j = i % width, r = i / width, n = index * width + j;
        if (row0 + r >= p.rows || n >= columns) continue;
        float x = sum(r, j);
        if (p.bias) x += widen(at<const T>(p.bias)[n]);
        if (gated) {
            float up = sum(r, j + width);
            if (p.bias) up += widen(at<const T>(p.bias)[n + columns]);
            x = silu_times(x, up);
        } else if (p.activation == ACTIVATION_GELU) {
            x = gelu_exact(x);
        }
        float* out = at<float>(p.out) + static_cast<uint64_t>(row0 + r) * p.out_stride + n;
        *out = p.add ? *out + x : x;
    }
}
template <typename T, uint32_t BLOCK, uint32_t ROWS, typename Sum>
DEVICE void store_products(const GemvParams& p, uint32_t row0, Sum sum) {
    store_block<T>(p, blockIdx.x, BLOCK, ROWS, row0, sum);
}

constexpr uint32_t FEW_WEIGHTS = 4, FEW_BLOCK = FEW_WEIGHTS * GEMV_WARPS / 2;

// ROWS rows of activations in plain arithmetic. Four weight rows belong to two warps, which take turns along k. Grid: blocks of
// 16 weight rows, blocks of ROWS rows.
template <typename T, int ROWS>
DEVICE void gemv_few(const GemvParams& p) {
    constexpr uint32_t EACH = Packed<T>::COUNT, STEP = 2 * 32 * EACH;
    SHARED float parts[GEMV_WARPS][FEW_WEIGHTS][ROWS];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row0 = blockIdx.y * ROWS;
    const T* weights[FEW_WEIGHTS];
#pragma unroll
    for (uint32_t i = 0; i < FEW_WEIGHTS; i++) weights[i] = weight_row<T, FEW_BLOCK>(p, warp / 2 * FEW_WEIGHTS + i);
    float sums[FEW_WEIGHTS][ROWS] = {};
    uint4 now[FEW_WEIGHTS], next[FEW_WEIGHTS];
    uint32_t k = (warp % 2 * 32 + lane) * EACH;
#pragma unroll
    for (uint32_t i = 0; i < FEW_WEIGHTS; i++) now[i] = load_weights(p.ldw, weights[i], k);
    wait_for_grids();
    for (; k < p.k; k += STEP) {
#pragma unroll
        for (uint32_t i = 0; i < FEW_WEIGHTS; i++) next[i] = load_weights(p.ldw, weights[i], k + STEP);
        float x[ROWS][EACH];
#pragma unroll
        for (int r = 0; r < ROWS; r++) load_activations<EACH>(p, row0 + r, k, x[r]);
#pragma unroll
        for (uint32_t i = 0; i < FEW_WEIGHTS; i++) {
            float w[EACH];
            Packed<T>::widen_all(now[i], w);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (uint32_t e = 0; e < EACH; e++) sums[i][r] = fmaf(x[r][e], w[e], sums[i][r]);
            }
            now[i] = next[i];
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < FEW_WEIGHTS; i++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float sum = warp_sum(sums[i][r]);
            if (lane == 0) parts[warp][i][r] = sum;
        }
    }
    sync_block();
    store_products<T, FEW_BLOCK, ROWS>(p, row0, [&](uint32_t r, uint32_t j) {
        const uint32_t pair = j / FEW_WEIGHTS * 2, w = j % FEW_WEIGHTS;
        return parts[pair][w][r] + parts[pair + 1][w][r];
    });
}

// Activations as the sum of COUNT terms, and how their products add up.
template <typename T, int COUNT>
struct Terms;

// Multiples of 2^8, of 2^-3 and of 2^-14, each in f16's range: no activation below 2^23 overflows, and a small one loses 2^-39 at
// most (2^-28 with two terms). The terms' scales differ, so each term has sums of its own.
template <int COUNT>
struct Terms<f16, COUNT> {
    static constexpr int SUMS = COUNT;
    static constexpr float FIRST = 256.0f, STEP = 1.0f / 2048.0f;
    DEVICE static void make(float x0, float x1, uint32_t (&terms)[COUNT]) {
        x0 /= FIRST;
        x1 /= FIRST;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            terms[i] = pack<f16>(x0, x1);
            x0 = (x0 - widen(f16{static_cast<uint16_t>(terms[i])})) / STEP;
            x1 = (x1 - widen(f16{static_cast<uint16_t>(terms[i] >> 16)})) / STEP;
        }
    }
    DEVICE static float total(const float (&sums)[SUMS]) {
        float total = 0;
#pragma unroll
        for (int i = COUNT - 1; i >= 0; i--) total = total * STEP + sums[i];
        return total * FIRST;
    }
};

template <int COUNT>
struct Terms<bf16, COUNT> {
    static constexpr int SUMS = 1;
    DEVICE static void make(float x0, float x1, uint32_t (&terms)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            terms[i] = pack<bf16>(x0, x1);
            x0 -= widen(bf16{static_cast<uint16_t>(terms[i])});
            x1 -= widen(bf16{static_cast<uint16_t>(terms[i] >> 16)});
        }
    }
    DEVICE static float total(const float (&sums)[SUMS]) { return sums[0]; }
};

constexpr uint32_t GEMV_ROWS = 32, GEMV_STEP = 64;

// Columns are assigned to lanes so that a 16-byte load is a fragment: lane t of four has columns 8 t to 8 t + 7 of 32, of weights
// and of activations. The order of a sum's columns is free.
template <typename T, int TILES, int COUNT>
struct GemvWarp {
    using Split = Terms<T, COUNT>;
    static constexpr int SUMS = Split::SUMS;
    const GemvParams& p;
    // Rows lane / 4 and lane / 4 + 8 of each 16 weight rows.
    const T* weights[2][2];
    // Sums of 16 weight rows by 8 rows of activations.
    float sums[2][TILES][SUMS][4];

    DEVICE void find_weights() {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) weights[i / 2][i % 2] = weight_row<T, GEMV_ROWS>(p, 8 * i + threadIdx.x % 32 / 4);
    }

    // Loads those rows' weights, for each half of a step's columns.
    DEVICE void load(uint32_t k, uint4 (&w)[2][2][2]) const {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t half = i / 4, m = i / 2 % 2, high = i % 2;
            w[half][m][high] = load_weights(p.ldw, weights[m][high], k + 32 * half + lane % 4 * 8);
        }
    }

    DEVICE void multiply(uint32_t k, const uint4 (&w)[2][2][2]) {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                float x[8];
                load_activations<8>(p, 8 * tile + lane / 4, k + 32 * half + lane % 4 * 8, x);
                uint32_t terms[4][COUNT];
#pragma unroll
                for (int i = 0; i < 4; i++) Split::make(x[2 * i], x[2 * i + 1], terms[i]);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const uint4 &low = w[half][m][0], &high = w[half][m][1];
                    const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                    for (int i = 0; i < COUNT; i++) {
                        float(&to)[4] = sums[m][tile][i < SUMS ? i : 0];
                        mma<T>(to, first, terms[0][i], terms[1][i]);
                        mma<T>(to, second, terms[2][i], terms[3][i]);
                    }
                }
            }
        }
    }
};

// Grid: blocks of 32 weight rows. The warps of a block share the columns and are added at the end, in order.
template <typename T, int TILES, int COUNT>
DEVICE void gemv(const GemvParams& p) {
    using Warp = GemvWarp<T, TILES, COUNT>;
    SHARED float parts[GEMV_WARPS][8 * TILES][GEMV_ROWS];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Warp state = {p, {}, {}};
    state.find_weights();
    uint4 now[2][2][2], next[2][2][2];
    uint32_t k = warp * GEMV_STEP;
    state.load(k, now);
    wait_for_grids();
    for (; k < p.k; k += GEMV_WARPS * GEMV_STEP) {
        state.load(k + GEMV_WARPS * GEMV_STEP, next);
        state.multiply(k, now);
#pragma unroll
        for (int i = 0; i < 8; i++) now[i / 4][i / 2 % 2][i % 2] = next[i / 4][i / 2 % 2][i % 2];
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float sums[Warp::SUMS];
#pragma unroll
                for (int i = 0; i < Warp::SUMS; i++) sums[i] = state.sums[m][tile][i][e];
                parts[warp][8 * tile + lane % 4 * 2 + e % 2][16 * m + lane / 4 + e / 2 * 8] = Warp::Split::total(sums);
            }
        }
    }
    sync_block();
    store_products<T, GEMV_ROWS, 8 * TILES>(p, 0, [&](uint32_t r, uint32_t j) {
        float sum = 0;
        for (uint32_t w = 0; w < GEMV_WARPS; w++) sum += parts[w][r][j];
        return sum;
    });
}
