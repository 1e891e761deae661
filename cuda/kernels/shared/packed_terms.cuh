// Activations of products with packed weights that have up to 16 rows, split once, in front of the product: *records* of 128
// columns (a chunk) in scratch, in the order in which the product's lanes take them as the right side of `mma`.
//
// A record has f16 terms, of which the power of two that brings the largest magnitude of its row and chunk to between 2^14 and
// 2^15 is divided off, that factor, and sums of activations for formats with least values. Two terms have 22 bits, as in other
// exact products (linear.rs); one has 11.
//
// * packed_row.cuh reads records of one row of activations, with both terms.
// * packed_few.cuh reads records of 8 or 16 columns: one term of as many rows, or both of half as many.
//
// Bytes: 2 a term; read from the second-level cache by every block. A launch of its own costs little: the product's blocks
// become resident while it runs, and have the copies of their first weights in flight (see ptx.cuh).
#pragma once
#include "codes.cuh"

// Of a row: terms, sums by run, the factor; whole lines of 128 bytes.
constexpr uint32_t ROW_SUMS = 512, ROW_FACTOR = 544, ROW_RECORD = 640;
// Of eight columns: terms, factors, sums by run of two units.
constexpr uint32_t TILE_TERMS = 2048, TILE_FACTORS = 32, TILE_SUMS = 128, TILE_RECORD = TILE_TERMS + TILE_FACTORS + TILE_SUMS;

// Grid: four warps a block, each a row and a chunk: `slots` rows, of which those beyond `rows` are zeros, as are columns beyond
// the last. Reads 4 bytes an activation and writes 2 a term.
DEVICE void split_terms(const SplitPackedParams& p) {
    const uint32_t lane = threadIdx.x % 32, at_warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const uint32_t r = at_warp / p.chunks, chunk = at_warp % p.chunks, step = lane / 4, word = lane % 4;
    if (r >= p.slots) return;
    // A step is a run: of which unit, and the column of this lane's four (codes.cuh's `column`).
    const uint32_t in_chunk = step >> (p.runs - 1), unit = (chunk * CHUNK_RUNS >> (p.runs - 1)) + in_chunk;
    const uint32_t run = step & (p.runs - 1), stride = RUN * p.paired;
    const uint32_t column = p.runs == 1 ? RUN * unit : unit / p.paired * 2 * stride + unit % p.paired * RUN + run * stride;
    const float* x = at<const float>(p.x) + static_cast<uint64_t>(r) * p.x_stride + column + 4 * word;
    Part<4> part = r < p.rows && unit < p.units ? load_part<4>(x) : Part<4>{};
    const float largest = fmaxf(fmaxf(fabsf(part.x[0]), fabsf(part.x[1])), fmaxf(fabsf(part.x[2]), fabsf(part.x[3])));
    const uint32_t exponent = min(warp_max_of(as_bits(fmaxf(largest, 0x1p-112f))) >> 23, 254u);
    const float scale = as_float((268 - exponent) << 23), factor = as_float((exponent - 14) << 23);
#pragma unroll
    for (uint32_t e = 0; e < 4; e++) part.x[e] *= scale;
    uint32_t high[2], low[2];
#pragma unroll
    for (uint32_t e = 0; e < 2; e++) split<f16>(part.x[e], part.x[e + 2], 1.0f, high[e], low[e]);
    if (p.terms == 1) {
        // Sums are those of what is multiplied.
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) part.x[e] = widen(f16{static_cast<uint16_t>(high[e % 2] >> 16 * (e / 2))});
    }
    float sum = (part.x[0] + part.x[1]) + (part.x[2] + part.x[3]);
    for (int mask : {1, 2}) sum += shuffle_xor(sum, mask);
    const float both = sum + shuffle_xor(sum, 8);
    const uint64_t first = high[0] | static_cast<uint64_t>(high[1]) << 32, second = low[0] | static_cast<uint64_t>(low[1]) << 32;
    if (p.tiles == 0) {
        unsigned char* record = at<unsigned char>(p.out) + chunk * ROW_RECORD;
        unsigned char* to = record + (p.runs == 2 ? run : in_chunk / 4) * 256 + word / 2 * 128 + in_chunk % 4 * 32 + word % 2 * 8;
        store_8(to, first);
        store_8(to + 16, second);
        if (word == 0) *reinterpret_cast<float*>(record + ROW_SUMS + 4 * step) = sum * p.one;
        if (lane == 0) *reinterpret_cast<float*>(record + ROW_FACTOR) = factor;
        return;
    }
    const uint32_t rows = 8 * p.tiles / p.terms;
    const uint64_t index = static_cast<uint64_t>(r / rows) * p.chunks + chunk;
    unsigned char* record = at<unsigned char>(p.out) + index * p.tiles * TILE_RECORD;
    float* factors = reinterpret_cast<float*>(record + p.tiles * TILE_TERMS);
    float* sums = factors + 8 * p.tiles + (step / 4 * 2 + step % 2) * 8 * p.tiles;
    for (uint32_t i = 0; i < p.terms; i++) {
        const uint32_t at_tile = r % rows + i * rows;
        const uint32_t to = at_tile / 8 * TILE_TERMS + step / 2 * 512 + (4 * (at_tile % 8) + word) * 16 + step % 2 * 8;
        store_8(record + to, i == 0 ? first : second);
        if (word == 0 && step / 2 % 2 == 0) sums[at_tile] = i == 0 ? both * p.one : 0.0f;
        if (lane == 0) factors[at_tile] = factor;
    }
}
