// Many rows of activations times a weight, in tiles on tensor cores.
//
// Operations: 2 m n k (twice that with two terms). A tile of 128 by 128 reads 128 columns of either side for 128 operations an
// element: 64 operations a byte from the second-level cache, where an A100 needs 312 T / 5 T = 62 and a second tile of the
// same row shares its reads; three stages of asynchronous copies hide them. From shared memory a warp reads 64 + 32 rows for
// 64 times 32 products: 16 products for 6 fragments' loads. Products of few rows take tiles of 64 by 64, and are cut along k
// until every multiprocessor has a tile: those are bound by reading the weight.
#pragma once
#include "common.cuh"

constexpr uint32_t GEMM_K = 32, GEMM_STAGES = 3, GEMM_ROW = 2 * GEMM_K + 16;

// BM and BN: the tile; WM and WN: the tile of a warp. P: the product's parameters.
template <typename T, int BM, int BN, int WM, int WN, int TERMS, typename P = GemmParams>
struct Gemm {
    static constexpr uint32_t THREADS = (BM / WM) * (BN / WN) * 32;
    static constexpr int MT = WM / 16, NT = WN / 8;
    static constexpr uint32_t A = BM * GEMM_ROW, B = BN * GEMM_ROW, STAGE = TERMS * A + B;
    const P& p;
    unsigned char* shared;
    uint32_t m0, n0, k_end;
    float acc[MT][NT][4];

    // Starts copying ROWS rows of 32 columns of a matrix; elements outside of it become zeros.
    template <int ROWS>
    DEVICE void copy_rows(Address matrix, uint32_t row0, uint32_t count, uint32_t ld, uint32_t k, unsigned char* to) const {
        static_assert(ROWS * 4 % THREADS == 0, "every thread copies as much");
        // Four threads a row, 16 bytes each.
        const uint32_t first = threadIdx.x / 4, column = k + threadIdx.x % 4 * 8;
        const SharedAddress shared_to = shared_address(to) + first * GEMM_ROW + threadIdx.x % 4 * 16;
#pragma unroll
        for (uint32_t i = 0; i < ROWS * 4 / THREADS; i++) {
            const uint32_t row = row0 + first + i * (THREADS / 4);
            const bool valid = row < count && column < k_end;
            const T* from = at<const T>(matrix) + (valid ? static_cast<uint64_t>(row) * ld + column : 0);
            copy_async(shared_to + i * (THREADS / 4) * GEMM_ROW, from, valid ? 16 : 0);
        }
    }

    DEVICE void copy(uint32_t k, unsigned char* stage) const {
        copy_rows<BM>(p.hi, m0, p.m, p.lda, k, stage);
        if (TERMS == 2) copy_rows<BM>(p.lo, m0, p.m, p.lda, k, stage + A);
        copy_rows<BN>(p.w, n0, p.n, p.ldw, k, stage + TERMS * A);
    }

    DEVICE void multiply(const unsigned char* stage) {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t m = warp / (BN / WN) * WM, n = warp % (BN / WN) * WN;
        const SharedAddress a0 = shared_address(stage) + (m + lane % 16) * GEMM_ROW + lane / 16 * 16;
        const SharedAddress b0 = shared_address(stage + TERMS * A) + (n + lane / 16 * 8 + lane % 8) * GEMM_ROW + lane / 8 % 2 * 16;
#pragma unroll
        for (uint32_t k = 0; k < GEMM_K / 16; k++) {
            uint32_t b[NT / 2][4];
#pragma unroll
            for (int j = 0; j < NT / 2; j++) ldmatrix_x4(b[j], b0 + 16 * j * GEMM_ROW + k * 32);
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    uint32_t a[4];
                    ldmatrix_x4(a, a0 + term * A + 16 * i * GEMM_ROW + k * 32);
#pragma unroll
                    for (int j = 0; j < NT / 2; j++) {
                        mma<T>(acc[i][2 * j], a, b[j][0], b[j][1]);
                        mma<T>(acc[i][2 * j + 1], a, b[j][2], b[j][3]);
                    }
                }
            }
        }
    }

    DEVICE void store_one(uint32_t row, uint32_t column, float x) const {
        if (column >= p.n) return;
        if (p.partial) {
            at<float>(p.partial)[(static_cast<uint64_t>(blockIdx.z) * p.m + row) * p.n + column] = x;
            return;
        }
        if (p.bias) x += widen(at<const T>(p.bias)[column]);
        float* out = at<float>(p.out) + static_cast<uint64_t>(row) * p.ldo + column;
        *out = p.add ? *out + x : x;
    }

    DEVICE void store() const {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t m = m0 + warp / (BN / WN) * WM + lane / 4, n = n0 + warp % (BN / WN) * WN + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < MT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t row = m + 16 * i + 8 * h;
                if (row >= p.m) continue;
                const float scale = at<const float>(p.scale)[row];
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    store_one(row, n + 8 * j, acc[i][j][2 * h] * scale);
                    store_one(row, n + 8 * j + 1, acc[i][j][2 * h + 1] * scale);
                }
            }
        }
    }
};

// Multiplies the columns from `k0` on of a block's tile.
template <typename G>
DEVICE void multiply_tile(G& g, uint32_t k0) {
    unsigned char* shared = g.shared;
    for (uint32_t i = 0; i + 1 < GEMM_STAGES; i++) {
        if (k0 + i * GEMM_K < g.k_end) g.copy(k0 + i * GEMM_K, shared + i * G::STAGE);
        copy_commit();
    }
    uint32_t read = 0, write = GEMM_STAGES - 1;
    for (uint32_t k = k0; k < g.k_end; k += GEMM_K) {
        copy_wait<GEMM_STAGES - 2>();
        // All copies of the stage have arrived, and all threads have read the one that is filled next.
        sync_block();
        const uint32_t ahead = k + (GEMM_STAGES - 1) * GEMM_K;
        if (ahead < g.k_end) g.copy(ahead, shared + write * G::STAGE);
        copy_commit();
        g.multiply(shared + read * G::STAGE);
        write = write + 1 == GEMM_STAGES ? 0 : write + 1;
        read = read + 1 == GEMM_STAGES ? 0 : read + 1;
    }
    copy_wait<0>();
}

// Grid: tiles of m, tiles of n, parts of k: blocks that run together share a few tiles of the weight and all rows, which
// the second-level cache holds, so that the weight is read from memory once.
template <typename T, int BM, int BN, int WM, int WN, int TERMS>
DEVICE void gemm(const GemmParams& p) {
    using G = Gemm<T, BM, BN, WM, WN, TERMS>;
    DYNAMIC_SHARED(shared);
    const uint32_t k0 = blockIdx.z * p.k_part, k_end = min(k0 + p.k_part, p.ldw);
    G g = {p, shared, blockIdx.x * BM, blockIdx.y * BN, k_end, {}};
    multiply_tile(g, k0);
    g.store();
}

// Activations as one or two terms of the weights' type, one block a row. In f16 the row is scaled by a power of two that
// brings its largest element to 2^14, so that nothing overflows and second terms are exact to 2^-39 of it.
template <typename T, bool SCALED>
DEVICE void split_rows(const SplitParams& p) {
    SHARED float scratch[32];
    const float* x = at<const float>(p.x) + static_cast<uint64_t>(blockIdx.x) * p.x_stride;
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * p.ld;
    float scale = 1;
    if (SCALED) {
        float max = 0;
        for (uint32_t i = threadIdx.x; i < p.k; i += blockDim.x) max = fmaxf(max, fabsf(x[i]));
        max = block_max(max, scratch);
        // Rows of nothing, of subnormals and of infinities keep their scale.
        if (max > 1e-30f && max < 1e38f) scale = exp2f(floorf(log2f(max)) - 14);
    }
    // The factor is the weight's, whose elements were divided by it.
    if (threadIdx.x == 0) at<float>(p.scale)[blockIdx.x] = scale * p.factor;
    for (uint32_t i = threadIdx.x; i < p.ld; i += blockDim.x) {
        const float value = i < p.k ? x[i] / scale : 0.0f;
        const T high = narrow<T>(value);
        at<T>(p.hi)[row + i] = high;
        if (p.lo) at<T>(p.lo)[row + i] = narrow<T>(value - widen(high));
    }
}

// f32 weights in plain arithmetic: tiles of 64 by 64, 16 columns at a time, 4 by 4 products a thread. 256 threads.
DEVICE void gemm_plain(const GemmParams& p) {
    constexpr uint32_t TILE = 64, K = 16;
    SHARED float a[K][TILE + 1];
    SHARED float b[K][TILE + 1];
    const uint32_t m0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE, tm = threadIdx.x / 16 * 4, tn = threadIdx.x % 16 * 4;
    float acc[4][4] = {};
    for (uint32_t k0 = 0; k0 < p.k; k0 += K) {
        for (uint32_t i = threadIdx.x; i < TILE * K; i += 256) {
            const uint32_t row = i / K, k = i % K;
            const bool inside = k0 + k < p.k;
            a[k][row] = inside && m0 + row < p.m ? at<const float>(p.hi)[static_cast<uint64_t>(m0 + row) * p.lda + k0 + k] : 0;
            b[k][row] = inside && n0 + row < p.n ? at<const float>(p.w)[static_cast<uint64_t>(n0 + row) * p.ldw + k0 + k] : 0;
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
            if (row >= p.m || column >= p.n) continue;
            const float x = acc[i][j] + (p.bias ? at<const float>(p.bias)[column] : 0.0f);
            float* out = at<float>(p.out) + static_cast<uint64_t>(row) * p.ldo + column;
            *out = p.add ? *out + x : x;
        }
    }
}
