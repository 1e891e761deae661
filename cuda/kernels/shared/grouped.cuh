// Products of rows that are sorted by expert with their experts' weights, in one launch: a block has a tile of one expert's rows
// (ExpertTile), and ends where there is none. Only the weights of experts that have rows are read.
//
// Few rows stream the weights in plain arithmetic, as gemv.cuh does: a lane reads 16 bytes of four weight rows and multiplies them
// by the same activations, of up to four rows. An up projection applies its activation to the sums: a gated warp's weight rows are two
// gates and the ups of the same columns. Many rows are tiles on tensor cores, those of gemm.cuh; of f32, plain tiles.
#pragma once
#include "gemm.cuh"
#include "gemv.cuh"

// The row of activations of a sorted row.
DEVICE uint32_t source_row(const GroupedParams& p, uint32_t row) {
    return p.sources ? at<const uint32_t>(p.sources)[row] : row;
}

// The bias of a product's column.
DEVICE float bias_of(const GroupedParams& p, const ExpertTile& tile, uint32_t column) {
    return p.bias ? load_any(p.bias, p.bias_type, static_cast<uint64_t>(tile.expert) * p.ld_bias + column) : 0.0f;
}

DEVICE void store_grouped(const GroupedParams& p, const ExpertTile& tile, uint32_t row, uint32_t column, float x) {
    if (column >= p.n) return;
    float* out = at<float>(p.out) + static_cast<uint64_t>(row) * p.ldo + column;
    x += bias_of(p, tile, column);
    *out = p.add ? *out + x : x;
}

// Whether a block has rows, of an expert that the launch is for.
DEVICE bool is_mine(const GroupedParams& p, const ExpertTile& tile) {
    return tile.first != tile.end && tile.expert - p.first_expert < p.experts;
}

// Where the weight of a tile's expert begins.
template <typename T>
DEVICE const T* expert_weight(const GroupedParams& p, const ExpertTile& tile) {
    return reinterpret_cast<const T*>(p.w + (tile.expert - p.first_expert) * p.expert_bytes);
}

// The sums of COUNT numbers over a warp, COUNT a power of two to 32; a lane gets that of number lane * COUNT / 32.
template <int COUNT>
DEVICE float spread_sum(float (&x)[COUNT]) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < 5; step++) {
        const int mask = 16 >> step, half = COUNT >> (step + 1);
        if (half == 0) x[0] += shuffle_xor(x[0], mask);
#pragma unroll
        for (int i = 0; i < half; i++) {
            const bool upper = lane & mask;
            const float sent = upper ? x[i] : x[i + half], kept = upper ? x[i + half] : x[i];
            x[i] = kept + shuffle_xor(sent, mask);
        }
    }
    return x[0];
}

// COUNT activations from `column` of a row of `k`; zeros beyond its end.
template <uint32_t COUNT>
DEVICE void load_columns(const float* row, uint32_t column, uint32_t k, float (&x)[COUNT]) {
    const float* from = row + column;
    if (column + COUNT <= k && reinterpret_cast<Address>(from) % 16 == 0) {
#pragma unroll
        for (uint32_t i = 0; i < COUNT / 4; i++) {
            const float4 four = load_16(from + 4 * i);
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++) x[i] = column + i < k ? from[i] : 0.0f;
    }
}

// Adds up a warp's sums of WEIGHTS weight rows with ROWS rows of a tile, and writes them with bias and activation: from column `n0` on.
template <uint32_t WEIGHTS, uint32_t ROWS>
DEVICE void store_few(const GroupedParams& p, const ExpertTile& tile, float (&sums)[WEIGHTS * ROWS], uint32_t n0) {
    constexpr uint32_t EVERY = 32 / (WEIGHTS * ROWS);
    const bool gated = is_gated(p.activation);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t width = gated ? WEIGHTS / 2 : WEIGHTS, columns = gated ? p.n / 2 : p.n;
    float sum = spread_sum(sums);
    // The ups of a gated warp are in its upper half.
    float up = shuffle_xor(sum, 16);
    const uint32_t which = lane / EVERY, row = tile.first + which % ROWS, column = n0 + which / ROWS;
    if (lane % EVERY != 0 || row >= tile.end || which / ROWS >= width || column >= columns) return;
    sum += bias_of(p, tile, column);
    if (gated) up += bias_of(p, tile, column + columns);
    at<float>(p.out)[static_cast<uint64_t>(row) * p.ldo + column] = activated(p.activation, sum, up);
}

// ROWS rows at most; those beyond the tile's end are its last row, and not written. A warp has four weight rows.
template <typename T, int ROWS>
DEVICE void grouped_few(const GroupedParams& p, const ExpertTile& tile) {
    constexpr uint32_t EACH = Packed<T>::COUNT, STEP = 32 * EACH;
    const uint32_t lane = threadIdx.x % 32;
    const bool gated = is_gated(p.activation);
    // Columns of a warp, and of the result.
    const uint32_t width = gated ? FEW_WEIGHTS / 2 : FEW_WEIGHTS, columns = gated ? p.n / 2 : p.n;
    const uint32_t n0 = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * width;
    const T* weights[FEW_WEIGHTS];
#pragma unroll
    for (uint32_t i = 0; i < FEW_WEIGHTS; i++) {
        const uint32_t n = min(n0 + i % width, columns - 1) + i / width * columns;
        weights[i] = expert_weight<T>(p, tile) + static_cast<uint64_t>(n) * p.ldw;
    }
    uint4 now[FEW_WEIGHTS], next[FEW_WEIGHTS];
    uint32_t k = lane * EACH;
#pragma unroll
    for (uint32_t i = 0; i < FEW_WEIGHTS; i++) now[i] = load_weights(p.ldw, weights[i], k);
    const float* rows[ROWS];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        rows[r] = at<const float>(p.x) + static_cast<uint64_t>(source_row(p, min(tile.first + r, tile.end - 1))) * p.ldx;
    }
    float sums[FEW_WEIGHTS * ROWS] = {};
    for (; k < p.k; k += STEP) {
#pragma unroll
        for (uint32_t i = 0; i < FEW_WEIGHTS; i++) next[i] = load_weights(p.ldw, weights[i], k + STEP);
        float x[ROWS][EACH];
#pragma unroll
        for (int r = 0; r < ROWS; r++) load_columns<EACH>(rows[r], k, p.k, x[r]);
#pragma unroll
        for (uint32_t i = 0; i < FEW_WEIGHTS; i++) {
            float w[EACH];
            Packed<T>::widen_all(now[i], w);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (uint32_t e = 0; e < EACH; e++) sums[i * ROWS + r] = fmaf(x[r][e], w[e], sums[i * ROWS + r]);
            }
            now[i] = next[i];
        }
    }
    store_few<FEW_WEIGHTS, ROWS>(p, tile, sums, n0);
}

// Grid: blocks of 16 weight rows, tiles of 4 rows. Applies the activation.
template <typename T>
DEVICE void grouped_gemv(const GroupedParams& p) {
    const ExpertTile tile = at<const ExpertTile>(p.tiles)[blockIdx.y];
    if (!is_mine(p, tile)) return;
    const uint32_t rows = tile.end - tile.first;
    if (rows == 1) {
        grouped_few<T, 1>(p, tile);
    } else if (rows == 2) {
        grouped_few<T, 2>(p, tile);
    } else {
        grouped_few<T, 4>(p, tile);
    }
}

// A tile on tensor cores, whose left side's rows may lie apart.
template <typename T, int BM, int BN, int WM, int WN, int TERMS>
struct GroupedGemm : Gemm<T, BM, BN, WM, WN, TERMS, GroupedParams> {
    using Base = Gemm<T, BM, BN, WM, WN, TERMS, GroupedParams>;
    static constexpr uint32_t COPIES = BM * 4 / Base::THREADS;
    const ExpertTile& tile;
    // Rows of activations that this thread copies.
    uint32_t rows[COPIES];

    DEVICE void find_rows() {
#pragma unroll
        for (uint32_t i = 0; i < COPIES; i++) {
            const uint32_t row = tile.first + threadIdx.x / 4 + i * (Base::THREADS / 4);
            rows[i] = source_row(this->p, min(row, tile.end - 1));
        }
    }

    // Copies one term's rows, as Gemm::copy_rows does.
    DEVICE void copy_term(Address term, uint32_t k, unsigned char* to) const {
        const uint32_t first = threadIdx.x / 4, column = k + threadIdx.x % 4 * 8;
        const SharedAddress shared_to = shared_address(to) + first * GEMM_ROW + threadIdx.x % 4 * 16;
#pragma unroll
        for (uint32_t i = 0; i < COPIES; i++) {
            const bool valid = tile.first + first + i * (Base::THREADS / 4) < tile.end && column < this->k_end;
            const T* from = at<const T>(term) + (valid ? static_cast<uint64_t>(rows[i]) * this->p.ldx + column : 0);
            copy_async(shared_to + i * (Base::THREADS / 4) * GEMM_ROW, from, valid ? 16 : 0);
        }
    }

    DEVICE void copy(uint32_t k, unsigned char* stage) const {
        const GroupedParams& p = this->p;
        copy_term(p.x, k, stage);
        if (TERMS == 2) copy_term(p.lo, k, stage + Base::A);
        const Address weight = reinterpret_cast<Address>(expert_weight<T>(p, tile));
        this->template copy_rows<BN>(weight, this->n0, p.n, p.ldw, k, stage + TERMS * Base::A);
    }

    DEVICE void store() const {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t m = tile.first + warp / (BN / WN) * WM + lane / 4;
        const uint32_t n = this->n0 + warp % (BN / WN) * WN + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < Base::MT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t row = m + 16 * i + 8 * h;
                if (row >= tile.end) continue;
                const float scale = at<const float>(this->p.scale)[source_row(this->p, row)];
#pragma unroll
                for (int j = 0; j < Base::NT; j++) {
                    store_grouped(this->p, tile, row, n + 8 * j, this->acc[i][j][2 * h] * scale);
                    store_grouped(this->p, tile, row, n + 8 * j + 1, this->acc[i][j][2 * h + 1] * scale);
                }
            }
        }
    }
};

// Grid: tiles of n, tiles of rows: blocks that run together share a few tiles of rows, and an expert's weight, which the
// second-level cache holds for its next tile.
template <typename T, int BM, int BN, int WM, int WN, int TERMS>
DEVICE void grouped_gemm(const GroupedParams& p) {
    DYNAMIC_SHARED(shared);
    const ExpertTile tile = at<const ExpertTile>(p.tiles)[blockIdx.y];
    if (!is_mine(p, tile)) return;
    GroupedGemm<T, BM, BN, WM, WN, TERMS> g = {{p, shared, tile.first, blockIdx.x * BN, p.ldw, {}}, tile, {}};
    g.find_rows();
    multiply_tile(g, 0);
    g.store();
}

// f32 weights in plain arithmetic: tiles of 64 by 64, as gemm_plain. 256 threads.
DEVICE void grouped_plain(const GroupedParams& p) {
    constexpr uint32_t TILE = 64, K = 16, EACH = TILE * K / 256;
    SHARED float a[K][TILE + 1];
    SHARED float b[K][TILE + 1];
    const ExpertTile tile = at<const ExpertTile>(p.tiles)[blockIdx.y];
    if (!is_mine(p, tile)) return;
    const uint32_t n0 = blockIdx.x * TILE, tm = threadIdx.x / 16 * 4, tn = threadIdx.x % 16 * 4;
    const uint32_t column = threadIdx.x % K;
    const float* rows[EACH];
    const float* weights[EACH];
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const uint32_t at_row = threadIdx.x / K + i * (256 / K);
        const uint32_t row = source_row(p, min(tile.first + at_row, tile.end - 1)), n = min(n0 + at_row, p.n - 1);
        rows[i] = at<const float>(p.x) + static_cast<uint64_t>(row) * p.ldx + column;
        weights[i] = expert_weight<float>(p, tile) + static_cast<uint64_t>(n) * p.ldw + column;
    }
    float acc[4][4] = {};
    for (uint32_t k0 = 0; k0 < p.k; k0 += K) {
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            const bool inside = k0 + column < p.k;
            a[column][threadIdx.x / K + i * (256 / K)] = inside ? rows[i][k0] : 0;
            b[column][threadIdx.x / K + i * (256 / K)] = inside ? weights[i][k0] : 0;
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
        const uint32_t row = tile.first + tm + i;
        if (row >= tile.end) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) store_grouped(p, tile, row, n0 + tn + j, acc[i][j]);
    }
}
