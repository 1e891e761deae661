// Products of experts with packed weights (codes.cuh), and elements of packed weights. Products of other weights are in
// packed_few.cuh.
//
// A few rows of activations are multiplied in f32 with the codes, and each run's sum with its scale. A lane has a unit of two weight
// rows at a time, which share the loads of activations. Bytes: the weight once for each ROWS rows, as in its file.
//
// Many rows are multiplied on tensor cores: `unpack` writes elements as one or two f16 terms, and the kernels of f16 weights follow.
// Unpacking reads the weight and writes 2 bytes (4 with two terms) an element: on an H200 as long as the products of about 180 rows
// at 600 TFLOP/s, a quarter of a product of 512 rows and a twelfth of one of 2,048. Elements are scaled by a power of two, the same for
// a whole weight, that brings the largest to 2^13: none overflows, and second terms reach 2^-38 of it. The scale of the activations'
// terms (split_rows) undoes it.
#pragma once
#include "codes.cuh"
#include "grouped.cuh"

// Weight rows of a warp.
constexpr uint32_t PACKED_WEIGHTS = 2;

// Loads the units of a warp's weight rows; beyond the last, that one again.
template <typename W>
DEVICE void load_units(const unsigned char* const (&weights)[PACKED_WEIGHTS], uint32_t blocks, uint32_t unit,
                       Unit<W> (&units)[PACKED_WEIGHTS]) {
    const uint32_t last = blocks * W::UNITS - 1;
#pragma unroll
    for (uint32_t i = 0; i < PACKED_WEIGHTS; i++) units[i] = load_unit<W>(weights[i], blocks, min(unit, last));
}

// Adds a run's products with ROWS rows of activations to `sums`, those of a weight row together.
template <typename W, uint32_t ROWS>
DEVICE void multiply_run(const Unit<W> (&units)[PACKED_WEIGHTS], uint32_t unit, uint32_t run,
                         const float* const (&rows)[ROWS], float (&sums)[PACKED_WEIGHTS * ROWS]) {
    const uint32_t column = W::column(unit, run);
    float dots[PACKED_WEIGHTS][ROWS] = {}, totals[ROWS] = {};
#pragma unroll
    for (uint32_t word = 0; word < RUN / 4; word++) {
        float codes[PACKED_WEIGHTS][4];
#pragma unroll
        for (uint32_t i = 0; i < PACKED_WEIGHTS; i++) widen_codes(units[i], unit, run, word, codes[i]);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            const Part<4> x = load_part<4>(rows[r] + column + 4 * word);
            if (W::LEAST) totals[r] += (x.x[0] + x.x[1]) + (x.x[2] + x.x[3]);
#pragma unroll
            for (uint32_t i = 0; i < PACKED_WEIGHTS; i++) {
#pragma unroll
                for (uint32_t e = 0; e < 4; e++) dots[i][r] = fmaf(x.x[e], codes[i][e], dots[i][r]);
            }
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < PACKED_WEIGHTS; i++) {
        const Scale scale = W::scale(units[i].head, unit, run);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            float& sum = sums[i * ROWS + r];
            sum = fmaf(dots[i][r] * (1 / W::ONE), scale.step, sum);
            if (W::LEAST) sum = fmaf(totals[r], -scale.least, sum);
        }
    }
}

// A lane's products of a warp's weight rows with ROWS rows of `k` activations, which begin at multiples of 16 bytes.
template <typename W, uint32_t ROWS>
DEVICE void multiply_rows(const unsigned char* const (&weights)[PACKED_WEIGHTS], const float* const (&rows)[ROWS], uint32_t k,
                          float (&sums)[PACKED_WEIGHTS * ROWS]) {
    // More rows take the registers of units ahead and of a second run; their products hide other warps' loads.
    constexpr bool AHEAD = ROWS <= 2;
    [[maybe_unused]] constexpr uint32_t TOGETHER = AHEAD ? W::RUNS : 1;
    const uint32_t lane = threadIdx.x % 32, blocks = k / W::BLOCK;
    Unit<W> now[PACKED_WEIGHTS], next[PACKED_WEIGHTS];
    load_units<W>(weights, blocks, lane, now);
    for (uint32_t unit = lane; unit < blocks * W::UNITS; unit += 32) {
        if (AHEAD) load_units<W>(weights, blocks, unit + 32, next);
#pragma unroll TOGETHER
        for (uint32_t run = 0; run < W::RUNS; run++) multiply_run<W, ROWS>(now, unit, run, rows, sums);
        if (!AHEAD) load_units<W>(weights, blocks, unit + 32, next);
#pragma unroll
        for (uint32_t i = 0; i < PACKED_WEIGHTS; i++) now[i] = next[i];
    }
}

// ROWS rows of an expert's tile at most; those beyond its end are its last row, and not written. A gated warp has a gate and its up.
template <typename W, uint32_t ROWS>
DEVICE void grouped_packed_few(const GroupedParams& p, const ExpertTile& tile) {
    const bool gated = is_gated(p.activation);
    const uint32_t width = gated ? PACKED_WEIGHTS / 2 : PACKED_WEIGHTS, columns = gated ? p.n / 2 : p.n;
    const uint32_t n0 = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * width;
    const unsigned char* weights[PACKED_WEIGHTS];
#pragma unroll
    for (uint32_t i = 0; i < PACKED_WEIGHTS; i++) {
        const uint32_t n = min(n0 + i % width, columns - 1) + i / width * columns;
        weights[i] = expert_weight<unsigned char>(p, tile) + static_cast<uint64_t>(n) * p.ldw;
    }
    const float* rows[ROWS];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        rows[r] = at<const float>(p.x) + static_cast<uint64_t>(source_row(p, min(tile.first + r, tile.end - 1))) * p.ldx;
    }
    float sums[PACKED_WEIGHTS * ROWS] = {};
    multiply_rows<W, ROWS>(weights, rows, p.k, sums);
    store_few<PACKED_WEIGHTS, ROWS>(p, tile, sums, n0);
}

// Grid: blocks of 8 weight rows, tiles of 4 rows. `ldw` is in bytes.
template <typename W>
DEVICE void grouped_packed(const GroupedParams& p) {
    const ExpertTile tile = at<const ExpertTile>(p.tiles)[blockIdx.y];
    if (!is_mine(p, tile)) return;
    const uint32_t rows = tile.end - tile.first;
    if (rows == 1) {
        grouped_packed_few<W, 1>(p, tile);
    } else if (rows == 2) {
        grouped_packed_few<W, 2>(p, tile);
    } else {
        grouped_packed_few<W, 4>(p, tile);
    }
}

// Writes four elements, or adds them, in f32.
DEVICE void store_elements(const UnpackParams& p, uint64_t index, const float* x) {
    float* out = at<float>(p.out) + index;
    Part<4> part = p.mode == UNPACK_ADD ? load_part<4>(out) : Part<4>{};
#pragma unroll
    for (uint32_t e = 0; e < 4; e++) part.x[e] += x[e];
    store_part(out, part);
}

// Writes eight elements, times the weight's factor, as one or two f16 terms.
DEVICE void store_terms(const UnpackParams& p, uint64_t index, const float (&x)[8]) {
    uint32_t high[4], low[4];
#pragma unroll
    for (uint32_t e = 0; e < 4; e++) split<f16>(x[2 * e] * p.factor, x[2 * e + 1] * p.factor, 1.0f, high[e], low[e]);
    const auto store = [&](Address out, const uint32_t(&to)[4]) {
        store_16(at<f16>(out) + index, {as_float(to[0]), as_float(to[1]), as_float(to[2]), as_float(to[3])});
    };
    store(p.out, high);
    if (p.lo) store(p.lo, low);
}

// Elements of rows of a weight: rows of an embedding table, terms for tensor cores, or each row's largest magnitude. A warp a row.
// Reads the rows once, and writes 4 bytes an element, or 2 a term: bound by memory.
template <typename W>
DEVICE void unpack(const UnpackParams& p) {
    const uint32_t lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;
    const uint32_t stored = p.ids ? at<const uint32_t>(p.ids)[row] : row;
    const unsigned char* from = at<const unsigned char>(p.w) + stored / p.group_rows * p.group_bytes +
                                static_cast<uint64_t>(stored % p.group_rows) * p.row_bytes;
    const uint32_t blocks = p.cols / W::BLOCK;
    const uint64_t first = static_cast<uint64_t>(row) * p.cols;
    float largest = 0;
    const uint32_t units = blocks * W::UNITS;
    Unit<W> next = load_unit<W>(from, blocks, min(lane, units - 1));
    for (uint32_t unit = lane; unit < units; unit += 32) {
        const Unit<W> loaded = next;
        next = load_unit<W>(from, blocks, min(unit + 32, units - 1));
#pragma unroll
        for (uint32_t i = 0; i < 2 * W::RUNS; i++) {
            const uint32_t run = i / 2, half = i % 2;
            const Scale scale = W::scale(loaded.head, unit, run);
            float x[8];
#pragma unroll
            for (uint32_t word = 0; word < 2; word++) {
                float codes[4];
                widen_codes(loaded, unit, run, 2 * half + word, codes);
#pragma unroll
                for (uint32_t e = 0; e < 4; e++) {
                    const float code = codes[e] * (1 / W::ONE);
                    const float element = W::LEAST ? fmaf(code, scale.step, -scale.least) : code * scale.step;
                    largest = fmaxf(largest, fabsf(element));
                    x[4 * word + e] = element;
                }
            }
            const uint64_t index = first + W::column(unit, run) + 8 * half;
            if (p.mode == UNPACK_TERMS) {
                store_terms(p, index, x);
            } else if (p.mode != UNPACK_LARGEST) {
                store_elements(p, index, x);
                store_elements(p, index + 4, x + 4);
            }
        }
    }
    if (p.mode != UNPACK_LARGEST) return;
    largest = warp_max(largest);
    if (lane == 0) at<float>(p.out)[row] = largest;
}
