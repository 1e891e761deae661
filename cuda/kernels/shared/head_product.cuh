// A product a head (absorbed latent attention, DeepSeek-V2 section 2.1.2): out[r][h][i] = x[r][h] · w[h * n + i], where heads lie
// `x_step` and `out_step` elements apart and what lies between stays. f32 arithmetic throughout.
//
// * Few rows: eight lanes share a weight row, of as few as 128 elements, and a warp has four rows: each load of it is 512
//   consecutive bytes where rows have 64 16-bit elements, and whole sectors always. Bytes: the weight once for each ROWS rows of
//   activations, from the second-level cache after the first time. Four loads of a lane are in flight, the next four before
//   these are multiplied.
// * Many rows: tiles in shared memory, as of gemm_plain. Bound by arithmetic: heads are few of a model's products.
#pragma once
#include "gemv.cuh"

// COUNT inputs of a head from `column` on; zeros where there are none.
template <uint32_t COUNT>
DEVICE void load_inputs(const HeadProductParams& p, uint32_t row, uint32_t head, uint32_t column, float (&x)[COUNT]) {
    const float* from = at<const float>(p.x) + static_cast<uint64_t>(row) * p.x_stride + head * p.x_step + column;
    if (row < p.rows && column + COUNT <= p.k && reinterpret_cast<Address>(from) % 16 == 0) {
#pragma unroll
        for (uint32_t i = 0; i < COUNT / 4; i++) {
            const float4 four = load_16(from + 4 * i);
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++) x[i] = row < p.rows && column + i < p.k ? from[i] : 0.0f;
    }
}

DEVICE void store_output(const HeadProductParams& p, uint32_t row, uint32_t head, uint32_t i, float x) {
    at<float>(p.out)[static_cast<uint64_t>(row) * p.out_stride + head * p.out_step + i] = x;
}

constexpr uint32_t HEAD_LANES = 8, HEAD_STEPS = 4;

// Grid: blocks of 32 weight rows, blocks of ROWS rows. 256 threads.
template <typename T, uint32_t ROWS>
DEVICE void head_gemv(const HeadProductParams& p) {
    constexpr uint32_t EACH = Packed<T>::COUNT, STEP = HEAD_LANES * EACH;
    const uint32_t lane = threadIdx.x % HEAD_LANES, row0 = blockIdx.y * ROWS;
    const uint32_t own = blockIdx.x * (256 / HEAD_LANES) + threadIdx.x / HEAD_LANES, all = p.heads * p.n;
    // Rows beyond the last are read as the last and not written.
    const uint32_t index = min(own, all - 1), head = index / p.n;
    const T* weights = at<const T>(p.w) + static_cast<uint64_t>(index) * p.ldw;
    // Weights that a grid before has just unpacked are no constants.
    if (p.unpacked) wait_for_grids();
    uint4 now[HEAD_STEPS], next[HEAD_STEPS];
    uint32_t k = lane * EACH;
#pragma unroll
    for (uint32_t i = 0; i < HEAD_STEPS; i++) now[i] = load_weights(p.ldw, weights, k + i * STEP);
    wait_for_grids();
    float sums[ROWS] = {};
    for (; k < p.k; k += HEAD_STEPS * STEP) {
#pragma unroll
        for (uint32_t i = 0; i < HEAD_STEPS; i++) next[i] = load_weights(p.ldw, weights, k + (HEAD_STEPS + i) * STEP);
#pragma unroll
        for (uint32_t i = 0; i < HEAD_STEPS; i++) {
            if (k + i * STEP >= p.k) break;
            float w[EACH];
            Packed<T>::widen_all(now[i], w);
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                float x[EACH];
                load_inputs<EACH>(p, row0 + r, head, k + i * STEP, x);
#pragma unroll
                for (uint32_t e = 0; e < EACH; e++) sums[r] = fmaf(x[e], w[e], sums[r]);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < HEAD_STEPS; i++) now[i] = next[i];
    }
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        for (int mask = HEAD_LANES / 2; mask > 0; mask /= 2) sums[r] += shuffle_xor(sums[r], mask);
        if (lane == r && own < all && row0 + r < p.rows) store_output(p, row0 + r, head, own - head * p.n, sums[r]);
    }
}

// Tiles of 64 by 64, 16 columns at a time, 4 by 4 products a thread. Grid: tiles of rows, tiles of a head's outputs, heads.
// 256 threads.
template <typename T>
DEVICE void head_gemm(const HeadProductParams& p) {
    constexpr uint32_t TILE = 64, K = 16;
    SHARED float a[K][TILE + 1];
    SHARED float b[K][TILE + 1];
    const uint32_t m0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE, head = blockIdx.z;
    const uint32_t tm = threadIdx.x / 16 * 4, tn = threadIdx.x % 16 * 4;
    const float* x = at<const float>(p.x) + head * p.x_step;
    const T* weights = at<const T>(p.w) + static_cast<uint64_t>(head) * p.n * p.ldw;
    float acc[4][4] = {};
    for (uint32_t k0 = 0; k0 < p.k; k0 += K) {
        for (uint32_t i = threadIdx.x; i < TILE * K; i += 256) {
            const uint32_t row = i / K, k = i % K;
            const bool inside = k0 + k < p.k;
            a[k][row] = inside && m0 + row < p.rows ? x[static_cast<uint64_t>(m0 + row) * p.x_stride + k0 + k] : 0;
            b[k][row] = inside && n0 + row < p.n ? widen(weights[static_cast<uint64_t>(n0 + row) * p.ldw + k0 + k]) : 0;
        }
        sync_block();
#pragma unroll
        for (uint32_t k = 0; k < K; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) acc[i][j] = fmaf(a[k][tm + i], b[k][tn + j], acc[i][j]);
            }
        }
        sync_block();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t row = m0 + tm + i, column = n0 + tn + j;
            if (row < p.rows && column < p.n) store_output(p, row, head, column, acc[i][j]);
        }
    }
}
