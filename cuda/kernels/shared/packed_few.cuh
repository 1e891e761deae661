// Products of up to 16 rows of activations with a packed weight (codes.cuh), on tensor cores.
//
// A warp multiplies 16 or 32 weight rows, a chunk of 128 columns at a time; the warps of a block take turns along k and are added at
// the end, in order. Of a chunk:
//
// * Weights come by asynchronous copies of 16 bytes (*pieces*: units, upper bits, and what scales are made of) into the warp's ring
//   of FEW_STAGES stages. A launch that begins early fills it before it waits for the grids before it. Rows of a stage are an odd
//   number of pieces apart, so that eight of them touch all banks.
// * ldmatrix gives each of four lanes a word of a unit: four codes of each of its runs. A run is the depth of one `mma`, so that sums
//   of runs come out of the tensor cores apart, and are multiplied with their scales in f32.
// * Codes become f16 exactly, most as numbers below the least normal one (`pair_bytes`), two an instruction.
// * Activations are the sum of two f16, 22 bits as in other exact products (linear.rs), of which the power of two that brings the
//   row's largest in the chunk to between 2^14 and 2^15 is divided off. The warp writes them to shared memory in the order in which
//   `mma` takes them. Up to four rows have both terms in one tile of eight columns.
//
// Bytes: the weight once. In flight: two stages of each warp before the first is used. Warps on a multiprocessor of an H200, for up to 4 /
// 8 / 16 rows: 24 / 24 / 12 where a chunk has five pieces, else 24 / 16 / 8. That is 57 KB at least, where latency asks for 29 KB (gemv.cuh).
//
// Counted in the machine code for 9.0a, by 2,048 weights, which are a chunk of 16 weight rows; a multiprocessor issues four
// instructions and receives 21 bytes a clock. None has been timed:
//
//   format     bytes  instructions: 1 row  share of the bandwidth  16 rows  share
//   Q8_0       2,176                  258                    1.00      626   0.66
//   FP8        2,112                  244                    1.00      595   0.68
//   Q6_K       1,680                  396                    0.81      758   0.42
//   Q4_0       1,152                  243                    0.90      625   0.35
//   INT4_G128  1,056                  229                    0.88      583   0.34
//   MXFP4      1,088                  311                    0.67      691   0.30
//   Q5_K       1,408                  410                    0.65      892   0.30
//   Q4_K       1,152                  319                    0.69      807   0.27
//
// A row of activations takes 50 to 70 of them, for 16 weight rows or, in the kernel of 16 rows, 32. The first-level cache and shared
// memory are busy for about 53 clocks of Q4_K's 55 with one row: copies 10, ldmatrix 8, terms 16 to read and 8 to write.
#pragma once
#include "codes.cuh"
#include "gemv.cuh"

constexpr uint32_t FEW_STAGES = 3;

// The pieces that a chunk has of a weight row: codes, upper bits, heads.
template <typename W>
struct Pieces {
    static constexpr uint32_t CODES = CHUNK_RUNS / W::RUNS, HEAD = CODES + (W::UPPER ? 2 : 0), COUNT = HEAD + W::HEADS;
    static constexpr uint32_t STRIDE = 16 * (COUNT | 1);
};

// A warp's product of 16 M weight rows with rows of activations: with TERMS 1 up to four, whose two terms are columns of one tile,
// else 8 TILES.
template <typename W, uint32_t M, uint32_t TILES, uint32_t TERMS>
struct FewWarp {
    using P = Pieces<W>;
    static constexpr uint32_t ROWS = TERMS == 1 ? 4 : 8 * TILES, COLUMNS = 8 * TILES;
    static constexpr uint32_t STAGE = 16 * M * P::STRIDE, TERM = CHUNK_RUNS * 32 * 8;
    static constexpr uint32_t ACTIVATIONS = TILES * TERMS * TERM + (CHUNK_RUNS + 1) * COLUMNS * 4;
    static constexpr uint32_t BYTES = FEW_STAGES * STAGE + ACTIVATIONS;
    static_assert(TERMS == 2 || TILES == 1, "both terms of few rows are in one tile");
    static_assert(!W::LEAST || (W::SHARE == 2 && W::RUNS == 2), "sums of activations are those of two units");

    const GemvParams& p;
    // The block's shared memory. A warp has its stages there, terms of the activations, their factors, and their sums by run.
    unsigned char* shared;
    uint32_t stages;
    // Where the lane's heads and activations are, and where it writes activations.
    uint32_t heads_at, terms_at, terms_to;
    SharedAddress matrices;
    uint32_t units, chunks;
    // The weight rows of which the lane copies every other piece, and where to.
    Address from[M];
    SharedAddress copies;
    float sums[M][TILES][4];

    DEVICE FewWarp(const GemvParams& params, unsigned char* block) : p(params), shared(block), sums{} {
        const uint32_t lane = threadIdx.x % 32, terms = FEW_STAGES * STAGE;
        stages = pinned(threadIdx.x / 32 * BYTES);
        units = p.k / W::BLOCK * W::UNITS;
        chunks = (units + P::CODES - 1) / P::CODES;
#pragma unroll
        for (uint32_t m = 0; m < M; m++) {
            from[m] = pinned(reinterpret_cast<Address>(weight_row<unsigned char, 16 * M>(p, 16 * m + lane / 2)) + lane % 2 * 16);
        }
        copies = pinned(shared_address(shared + stages) + lane / 2 * P::STRIDE + lane % 2 * 16);
        matrices = pinned(shared_address(shared + stages) + lane % 16 * P::STRIDE + lane / 16 * 16);
        heads_at = pinned(stages + lane / 4 * P::STRIDE + 16 * P::HEAD);
        terms_at = pinned(stages + terms + 16 * lane);
        terms_to = pinned(stages + terms + lane / 8 * 512 + lane % 4 * 16 + lane / 4 % 2 * 8);
        // Columns without a row of activations stay zeros.
        for (uint32_t i = lane; i < ACTIVATIONS / 16; i += 32) {
            reinterpret_cast<uint4*>(shared + stages + terms)[i] = uint4{0, 0, 0, 0};
        }
        sync_warp();
    }

    DEVICE float* factors() const { return reinterpret_cast<float*>(shared + stages + FEW_STAGES * STAGE + TILES * TERMS * TERM); }
    DEVICE float* totals() const { return factors() + COLUMNS; }

    // Begins the copies of a chunk's weights; zeros for codes beyond the last. Two lanes have a weight row.
    DEVICE void copy(uint32_t chunk, uint32_t stage) const {
        const uint32_t odd = threadIdx.x % 2, blocks = p.k / W::BLOCK, first = chunk * P::CODES;
#pragma unroll
        for (uint32_t m = 0; m < M && chunk < chunks; m++) {
            const SharedAddress to = copies + stage * STAGE + 16 * m * P::STRIDE;
            const Address codes = from[m] + 16 * first;
            if (first + P::CODES <= units) {
#pragma unroll
                for (uint32_t i = 0; i < P::CODES / 2; i++) copy_async(to + 32 * i, at<void>(codes + 32 * i), true);
            } else {
#pragma unroll
                for (uint32_t i = 0; i < P::CODES / 2; i++) {
                    const bool valid = first + odd + 2 * i < units;
                    copy_async(to + 32 * i, at<void>(valid ? codes + 32 * i : from[m]), valid);
                }
            }
            if constexpr (W::UPPER) {
                const uint32_t upper = W::UPPER_PLANE * blocks + W::upper_at(chunk);
                copy_async(to + 16 * P::CODES, at<void>(from[m] + upper), true);
            }
            if (odd < W::HEADS) {
                const uint32_t head = W::head_plane(odd) * blocks + W::head_bytes(odd) * chunk / 16 * 16;
                copy_async(to + 16 * P::HEAD, at<void>(from[m] + head - 16 * odd), true);
            }
        }
        copy_commit();
    }

    // Writes four columns of a row `r` of activations as terms: a chunk's from `16 step + 4 (lane % 4)` in the order of steps.
    DEVICE void split_row(uint32_t r, Part<4> part) const {
        const uint32_t lane = threadIdx.x % 32, step = lane / 4;
        const float largest = fmaxf(fmaxf(fabsf(part.x[0]), fabsf(part.x[1])), fmaxf(fabsf(part.x[2]), fabsf(part.x[3])));
        const uint32_t exponent = min(warp_max_of(as_bits(fmaxf(largest, 0x1p-112f))) >> 23, 254u);
        const float scale = as_float((268 - exponent) << 23);
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) part.x[e] *= scale;
        uint32_t high[2], low[2];
#pragma unroll
        for (uint32_t e = 0; e < 2; e++) split<f16>(part.x[e], part.x[e + 2], 1.0f, high[e], low[e]);
        const uint32_t second = TERMS == 1 ? 4 * 4 * 16 : TERM;
        unsigned char* to = shared + terms_to + r / 8 * TERMS * TERM + r % 8 * 64;
        store_8(to, high[0] | static_cast<uint64_t>(high[1]) << 32);
        store_8(to + second, low[0] | static_cast<uint64_t>(low[1]) << 32);
        if (W::LEAST) {
            float total = (part.x[0] + part.x[1]) + (part.x[2] + part.x[3]);
            // Over a run, and over the same one of the other unit.
            for (int mask : {1, 2, 8}) total += shuffle_xor(total, mask);
            if (lane % 4 == 0) totals()[step * COLUMNS + r] = total * W::ONE;
        }
        if (lane < TERMS % 2 + 1) factors()[r + 4 * lane] = as_float((exponent - 14) << 23);
    }

    // Writes a chunk's activations as terms; zeros beyond the last column.
    DEVICE void split_chunk(uint32_t chunk) const {
        const uint32_t step = threadIdx.x % 32 / 4, unit = chunk * P::CODES + step / W::RUNS;
        const float* x = at<const float>(p.x) + W::column(unit, step % W::RUNS) + threadIdx.x % 4 * 4;
        if (TERMS == 1 && p.rows == 1) {
            split_row(0, unit < units ? load_part<4>(x) : Part<4>{});
            return;
        }
#pragma unroll 4
        for (uint32_t r = 0; r < p.rows; r++, x += p.x_stride) split_row(r, unit < units ? load_part<4>(x) : Part<4>{});
    }

    // Adds the products of a chunk.
    DEVICE void multiply(uint32_t chunk, uint32_t stage) {
        constexpr uint32_t SHARED_HEADS = P::CODES / W::SHARE;
        const uint32_t lane = threadIdx.x % 32, first = chunk * P::CODES;
        const SharedAddress weights = matrices + stage * STAGE;
        typename W::Head heads[M][2][SHARED_HEADS];
        uint32_t upper[M][4] = {};
#pragma unroll
        for (uint32_t i = 0; i < 2 * M * SHARED_HEADS; i++) {
            const uint32_t m = i / (2 * SHARED_HEADS), half = i / SHARED_HEADS % 2, which = i % SHARED_HEADS;
            const unsigned char* pieces = shared + heads_at + stage * STAGE + (16 * m + 8 * half) * P::STRIDE;
            heads[m][half][which] =
                W::head([&](uint32_t h, uint32_t offset) { return pieces + 16 * h + offset % 16; }, first + which * W::SHARE);
        }
        if constexpr (W::UPPER) {
#pragma unroll
            for (uint32_t m = 0; m < M; m++) ldmatrix_x4(upper[m], weights + 16 * m * P::STRIDE + 16 * P::CODES);
        }
        float acc[M][TILES][4] = {}, dots[W::RUNS][M][TILES][4] = {};
#pragma unroll
        for (uint32_t pair = 0; pair < P::CODES / 2; pair++) {
            uint32_t words[M][4];
#pragma unroll
            for (uint32_t m = 0; m < M; m++) ldmatrix_x4(words[m], weights + 16 * m * P::STRIDE + 32 * pair);
#pragma unroll
            for (uint32_t i = 0; i < 2 * W::RUNS; i++) {
                const uint32_t unit = 2 * pair + i / W::RUNS, run = i % W::RUNS, step = unit * W::RUNS + run;
                uint32_t a[M][4];
#pragma unroll
                for (uint32_t j = 0; j < 2 * M; j++) {
                    const uint32_t m = j / 2, half = j % 2;
                    uint32_t pairs[2];
                    W::halves(words[m][unit % 2 * 2 + half], upper[m][unit % 2 * 2 + half], heads[m][half][unit / W::SHARE],
                              first + unit, run, pairs);
                    a[m][half] = pairs[0], a[m][2 + half] = pairs[1];
                }
#pragma unroll
                for (uint32_t j = 0; j < TILES * TERMS; j++) {
                    const uint64_t x = load_8(shared + terms_at + j * TERM + step / 2 * 512 + step % 2 * 8);
#pragma unroll
                    for (uint32_t m = 0; m < M; m++) {
                        mma<f16>(dots[run][m][j / TERMS], a[m], static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32));
                    }
                }
                if ((unit + 1) % W::SHARE == 0) scale_dots(heads, first + unit, unit / W::SHARE, step, dots[run], acc);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < M * TILES * 4; i++) {
            const uint32_t m = i / (TILES * 4), tile = i / 4 % TILES, e = i % 4;
            const float factor = factors()[8 * tile + lane % 4 * 2 + e % 2];
            sums[m][tile][e] = fmaf(acc[m][tile][e] * (1 / W::ONE), factor, sums[m][tile][e]);
        }
    }

    // Adds sums of the same run of units that share scales, times their scale.
    DEVICE void scale_dots(const typename W::Head (&heads)[M][2][P::CODES / W::SHARE], uint32_t unit, uint32_t which, uint32_t step,
                           float (&dots)[M][TILES][4], float (&acc)[M][TILES][4]) const {
#pragma unroll
        for (uint32_t i = 0; i < 2 * M; i++) {
            const uint32_t m = i / 2, half = i % 2;
            const Scale scale = W::scale(heads[m][half][which], unit, step % W::RUNS);
#pragma unroll
            for (uint32_t j = 0; j < 2 * TILES; j++) {
                const uint32_t tile = j / 2, e = 2 * half + j % 2;
                acc[m][tile][e] = fmaf(dots[m][tile][e], scale.step, acc[m][tile][e]);
                if (W::LEAST) {
                    const float total = totals()[step * COLUMNS + 8 * tile + threadIdx.x % 4 * 2 + j % 2];
                    acc[m][tile][e] = fmaf(total, -scale.least, acc[m][tile][e]);
                }
                dots[m][tile][e] = 0;
            }
        }
    }
};

// Grid: blocks of 16 M weight rows. `ldw` is in bytes; dynamic shared memory as packed.rs has it.
template <typename W, uint32_t M, uint32_t TILES, uint32_t TERMS, uint32_t WARPS>
DEVICE void gemv_packed(const GemvParams& p) {
    using Warp = FewWarp<W, M, TILES, TERMS>;
    DYNAMIC_SHARED(shared);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Warp state(p, shared);
#pragma unroll
    for (uint32_t i = 0; i + 1 < FEW_STAGES; i++) state.copy(warp + i * WARPS, i);
    wait_for_grids();
    uint32_t stage = 0, ahead = FEW_STAGES - 1;
    for (uint32_t chunk = warp; chunk < state.chunks; chunk += WARPS) {
        state.split_chunk(chunk);
        copy_wait<FEW_STAGES - 2>();
        sync_warp();
        state.copy(chunk + (FEW_STAGES - 1) * WARPS, ahead);
        state.multiply(chunk, stage);
        sync_warp();
        ahead = stage;
        stage = stage + 1 == FEW_STAGES ? 0 : stage + 1;
    }
    copy_wait<0>();
    sync_block();
    // The sums of all warps, where their stages were.
    float* parts = reinterpret_cast<float*>(shared);
#pragma unroll
    for (uint32_t i = 0; i < M * TILES * 4; i++) {
        const uint32_t m = i / (TILES * 4), tile = i / 4 % TILES, e = i % 4;
        const uint32_t column = 8 * tile + lane % 4 * 2 + e % 2, row = 16 * m + lane / 4 + e / 2 * 8;
        parts[(warp * Warp::COLUMNS + column) * 16 * M + row] = state.sums[m][tile][e];
    }
    sync_block();
    store_products<float, 16 * M, Warp::ROWS>(p, 0, [&](uint32_t r, uint32_t j) {
        float sum = 0;
        for (uint32_t i = 0; i < WARPS; i++) {
            const float* of_warp = parts + i * Warp::COLUMNS * 16 * M + j;
            sum += of_warp[r * 16 * M] + (TERMS == 1 ? of_warp[(r + 4) * 16 * M] : 0.0f);
        }
        return sum;
    });
}
