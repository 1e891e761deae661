// Products of two to 16 rows of activations with a packed weight (codes.cuh), on tensor cores.
//
// A warp multiplies 16 weight rows, a chunk of 128 columns at a time. `groups` of a block's warps have different weight rows
// and the same chunks: they share the copies of activations, in a *ring*. The block's rings take turns along k and are added at
// the end, in order. Of a chunk:
//
// * Weights come by asynchronous copies of 16 bytes (*pieces*: units, upper bits, and what scales are made of) into the ring's
//   next stage, those of a row by consecutive lanes: the first-level cache takes a clock for each line that an instruction
//   touches. A launch that begins early fills its ring before it waits for the grids before it. Rows of a stage are an odd
//   number of pieces apart, so that eight of them touch all banks.
// * Activations are copied likewise, as terms (packed_terms.cuh).
// * ldmatrix gives each of four lanes a word of a unit: four codes of each of its runs. A run is the depth of one `mma`, so
//   that sums of runs come out of the tensor cores apart, and are multiplied with their scales in f32.
// * Codes become f16 exactly, most as numbers below the least normal one (`pair_bytes`), two an instruction.
//
// Bytes: the weight once, and the activations' terms, 2 bytes each, for each 16 `groups` weight rows, from the second-level
// cache: 18 MB with 16 rows, 4,096 columns and 14,336 weight rows in seven groups. In flight on a multiprocessor: 14 warps with
// one stage or two of 1 to 2 KB each, where latency asks for 29 KB (gemv.cuh).
//
// Counted in the machine code for 9.0a, by 2,048 weights, which are a chunk of 16 weight rows: instructions of the loops, and
// the share of the copy rate (4.2 TB/s over 132 multiprocessors at 1.7 GHz: 19 bytes a clock) at which they take all of a
// multiprocessor's four a clock. None has been timed:
//
//   format     bytes  1 row (packed_row.cuh)  share  to 8 rows  share  to 16 rows  share
//   Q8_0       2,176                     215   1.00        248   1.00         284   1.00
//   FP8        2,112                     235   1.00        228   1.00         275   1.00
//   Q6_K       1,680                     296   1.00        327   1.00         382   0.93
//   Q5_K       1,408                     301   0.98        429   0.69         489   0.61
//   Q4_K       1,152                     192   1.00        348   0.70         407   0.60
//   Q4_0       1,152                     174   1.00        265   0.92         318   0.76
//   MXFP4      1,088                     210   1.00        319   0.72         373   0.61
//   INT4_G128  1,056                     197   1.00        225   0.99         241   0.92
//
// With 16 rows the first-level cache and shared memory are busy for about 90 clocks of Q4_K's 100: terms 42, copies 40,
// ldmatrix 8. Exact products have two terms: up to four rows in the kernel of eight columns, else up to eight in that of 16,
// and more in two passes over the weight.
#pragma once
#include "gemv.cuh"
#include "packed_terms.cuh"

constexpr uint32_t FEW_WARPS = 16;

// The pieces that a chunk has of a weight row: codes, upper bits, heads.
template <typename W>
struct Pieces {
    static constexpr uint32_t CODES = CHUNK_RUNS / W::RUNS, HEAD = CODES + (W::UPPER ? 2 : 0), COUNT = HEAD + W::HEADS;
    static constexpr uint32_t STRIDE = 16 * (COUNT | 1);
    // More stages fit every device's shared memory where pieces are few.
    static constexpr uint32_t STAGES = COUNT > 7 ? 2 : 3;
};

// A warp's product of 16 weight rows with 8 TILES columns of terms.
template <typename W, uint32_t TILES>
struct FewWarp {
    using P = Pieces<W>;
    static constexpr uint32_t COLUMNS = 8 * TILES, WEIGHTS = 16 * P::STRIDE, RECORD = TILES * TILE_RECORD;
    static constexpr uint32_t COPIED = TILES * (TILE_TERMS + TILE_FACTORS + (W::LEAST ? TILE_SUMS : 0));
    // Rows whose codes a warp copies at once.
    static constexpr uint32_t TOGETHER = 32 / P::CODES, COPIES = 16 / TOGETHER;
    static_assert(!W::LEAST || (W::SHARE == 2 && W::RUNS == 2), "sums of activations are those of two units");

    const GemvParams& p;
    unsigned char* shared;
    uint32_t groups, units, chunks, stage_bytes;
    // In shared memory: the ring, and the warp's weights in its first stage, by what a lane does there.
    uint32_t ring, terms_at, heads_at;
    SharedAddress matrices, codes_to, heads_to, terms_to;
    // In global memory: the rows of which the lane copies a code's piece, another piece, and the records.
    Address codes[COPIES], row, records;
    float sums[TILES][4];

    DEVICE FewWarp(const StreamParams& params, unsigned char* block)
        : p(params.gemv), shared(block), groups(params.groups), sums{} {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp % groups;
        units = p.k / W::BLOCK * W::UNITS;
        chunks = (units + P::CODES - 1) / P::CODES;
        stage_bytes = RECORD + groups * WEIGHTS;
        ring = warp / groups * P::STAGES * stage_bytes;
        const uint32_t weights = ring + RECORD + group * WEIGHTS;
#pragma unroll
        for (uint32_t i = 0; i < COPIES; i++) codes[i] = weight(16 * group + i * TOGETHER + lane / P::CODES);
        row = weight(16 * group + lane / 2);
        records = p.x + static_cast<uint64_t>(blockIdx.y) * chunks * RECORD;
        codes_to = pinned(shared_address(shared + weights) + lane / P::CODES * P::STRIDE + lane % P::CODES * 16);
        heads_to = pinned(shared_address(shared + weights) + lane / 2 * P::STRIDE + lane % 2 * 16);
        terms_to = pinned(shared_address(shared + ring) + 16 * (32 * group + lane));
        matrices = pinned(shared_address(shared + weights) + lane % 16 * P::STRIDE + lane / 16 * 16);
        heads_at = pinned(weights + lane / 4 * P::STRIDE + 16 * P::HEAD);
        terms_at = pinned(ring + 16 * lane);
    }

    DEVICE Address weight(uint32_t j) const {
        return pinned(p.w + row_of_block(p, blockIdx.x, 16 * groups, j) * p.ldw);
    }

    // Begins the copies of a chunk's weights; zeros for codes beyond the last.
    DEVICE void copy_weights(uint32_t chunk, uint32_t stage) const {
        if (chunk >= chunks) return;
        const uint32_t lane = threadIdx.x % 32, odd = lane % 2, blocks = p.k / W::BLOCK, at_stage = stage * stage_bytes;
        const uint32_t unit = chunk * P::CODES + lane % P::CODES;
        const bool valid = unit < units;
#pragma unroll
        for (uint32_t i = 0; i < COPIES; i++) {
            copy_async(codes_to + at_stage + i * TOGETHER * P::STRIDE, at<void>(codes[i] + (valid ? 16 * unit : 0)), valid ? 16 : 0);
        }
        if constexpr (W::UPPER) {
            const uint32_t upper = W::UPPER_PLANE * blocks + W::upper_at(chunk);
            copy_async(heads_to + at_stage + 16 * P::CODES, at<void>(row + upper + 16 * odd), 16);
        }
        if (odd < W::HEADS) {
            const uint32_t head = W::head_plane(odd) * blocks + W::head_bytes(odd) * chunk / 16 * 16;
            copy_async(heads_to + at_stage + 16 * P::HEAD, at<void>(row + head), 16);
        }
    }

    // Begins the copies of this warp's part of a chunk's terms, and ends the group of copies.
    DEVICE void copy_terms(uint32_t chunk, uint32_t stage) const {
        if (chunk < chunks) {
            const uint32_t first = terms_to - shared_address(shared + ring);
            const Address from = records + static_cast<uint64_t>(chunk) * RECORD;
            for (uint32_t i = first; i < COPIED; i += 512 * groups) {
                copy_async(terms_to + stage * stage_bytes + (i - first), at<void>(from + i), 16);
            }
        }
        copy_commit();
    }

    // Adds the products of a chunk.
    DEVICE void multiply(uint32_t chunk, uint32_t stage) {
        constexpr uint32_t SHARED_HEADS = P::CODES / W::SHARE;
        const uint32_t lane = threadIdx.x % 32, first = chunk * P::CODES, at_stage = stage * stage_bytes;
        uint32_t words[P::CODES / 2][4], upper[4] = {};
#pragma unroll
        for (uint32_t i = 0; i < P::CODES / 2; i++) ldmatrix_x4(words[i], matrices + at_stage + 32 * i);
        if constexpr (W::UPPER) ldmatrix_x4(upper, matrices + at_stage + 16 * P::CODES);
        typename W::Head heads[2][SHARED_HEADS];
#pragma unroll
        for (uint32_t i = 0; i < 2 * SHARED_HEADS; i++) {
            const uint32_t half = i / SHARED_HEADS, which = i % SHARED_HEADS;
            const unsigned char* pieces = shared + heads_at + at_stage + 8 * half * P::STRIDE;
            heads[half][which] =
                W::head([&](uint32_t h, uint32_t offset) { return pieces + 16 * h + offset % 16; }, first + which * W::SHARE);
        }
        const float* factors = reinterpret_cast<const float*>(shared + ring + at_stage + TILES * TILE_TERMS) + lane % 4 * 2;
        float acc[TILES][4] = {}, dots[W::RUNS][TILES][4] = {};
        uint4 x[TILES] = {};
#pragma unroll
        for (uint32_t step = 0; step < CHUNK_RUNS; step++) {
            const uint32_t unit = step / W::RUNS, run = step % W::RUNS;
            if (step % 2 == 0) {
#pragma unroll
                for (uint32_t j = 0; j < TILES; j++) {
                    x[j] = load_words(shared + terms_at + at_stage + j * TILE_TERMS + step / 2 * 512);
                }
            }
            uint32_t a[4];
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t pairs[2];
                const uint32_t word = unit % 2 * 2 + half;
                W::halves(words[unit / 2][word], upper[word], heads[half][unit / W::SHARE], first + unit, run, pairs);
                a[half] = pairs[0], a[2 + half] = pairs[1];
            }
#pragma unroll
            for (uint32_t j = 0; j < TILES; j++) {
                mma<f16>(dots[run][j], a, step % 2 == 0 ? x[j].x : x[j].z, step % 2 == 0 ? x[j].y : x[j].w);
            }
            if ((unit + 1) % W::SHARE == 0) {
                const Scale scales[2] = {W::scale(heads[0][unit / W::SHARE], first + unit, run),
                                         W::scale(heads[1][unit / W::SHARE], first + unit, run)};
                scale_dots(scales, factors + COLUMNS * (1 + unit / 2 * 2 + run), dots[run], acc);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < TILES * 4; i++) {
            const uint32_t tile = i / 4, e = i % 4;
            sums[tile][e] = fmaf(acc[tile][e] * (1 / W::ONE), factors[8 * tile + e % 2], sums[tile][e]);
        }
    }

    // Adds sums of the same run of units that share scales, times their scale; `totals` are sums of their activations.
    DEVICE void scale_dots(const Scale (&scales)[2], const float* totals, float (&dots)[TILES][4], float (&acc)[TILES][4]) const {
#pragma unroll
        for (uint32_t i = 0; i < TILES * 4; i++) {
            const uint32_t tile = i / 4, e = i % 4, half = e / 2;
            acc[tile][e] = fmaf(dots[tile][e], scales[half].step, acc[tile][e]);
            if (W::LEAST) acc[tile][e] = fmaf(totals[8 * tile + e % 2], -scales[half].least, acc[tile][e]);
            dots[tile][e] = 0;
        }
    }
};

// Grid: blocks of 16 `groups` weight rows; of as many rows of activations as a record has. Up to FEW_WARPS warps. `x` has
// records, `ldw` is in bytes; dynamic shared memory as packed.rs has it.
template <typename W, uint32_t TILES>
DEVICE void stream_few(const StreamParams& params) {
    using Warp = FewWarp<W, TILES>;
    constexpr uint32_t STAGES = Warp::P::STAGES;
    DYNAMIC_SHARED(shared);
    const uint32_t lane = threadIdx.x % 32, group = threadIdx.x / 32 % params.groups, turn = threadIdx.x / 32 / params.groups;
    const uint32_t turns = blockDim.x / 32 / params.groups, width = 16 * params.groups;
    Warp state(params, shared);
#pragma unroll
    for (uint32_t i = 0; i + 1 < STAGES; i++) state.copy_weights(turn + i * turns, i);
    wait_for_grids();
#pragma unroll
    for (uint32_t i = 0; i + 1 < STAGES; i++) state.copy_terms(turn + i * turns, i);
    uint32_t stage = 0, ahead = STAGES - 1;
    for (uint32_t chunk = turn; chunk < state.chunks; chunk += turns) {
        copy_wait<STAGES - 2>();
        // All copies of the stage have arrived, and all warps of the ring are done with the one that is filled next.
        if (params.groups == 1) {
            sync_warp();
        } else {
            sync_warps(1 + turn, 32 * params.groups);
        }
        state.copy_weights(chunk + (STAGES - 1) * turns, ahead);
        state.copy_terms(chunk + (STAGES - 1) * turns, ahead);
        state.multiply(chunk, stage);
        ahead = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copy_wait<0>();
    sync_block();
    // The sums of all warps, where their rings were.
    float* parts = reinterpret_cast<float*>(shared);
#pragma unroll
    for (uint32_t i = 0; i < TILES * 4; i++) {
        const uint32_t column = i / 4 * 8 + lane % 4 * 2 + i % 2, row = 16 * group + lane / 4 + i % 4 / 2 * 8;
        parts[(turn * Warp::COLUMNS + column) * width + row] = state.sums[i / 4][i % 4];
    }
    sync_block();
    const uint32_t rows = Warp::COLUMNS / params.terms;
    store_block<float>(params.gemv, blockIdx.x, width, rows, blockIdx.y * rows, [&](uint32_t r, uint32_t j) {
        float sum = 0;
        for (uint32_t i = 0; i < turns; i++) {
            const float* of_turn = parts + i * Warp::COLUMNS * width + j;
            sum += of_turn[r * width];
            if (params.terms == 2) sum += of_turn[(r + rows) * width];
        }
        return sum;
    });
}
