// Products of one row of activations, or of up to four, with a packed weight (codes.cuh), on tensor cores, without shared memory.
//
// A warp multiplies 16 weight rows, 256 columns at a time (128 where a unit has one run); the warps of a block take turns along k and
// are added at the end, in order.
//
// * A lane loads whole units: those of two weight rows, of which four lanes have four consecutive ones. What it loads is its part of
//   the left side of an `mma`: word w of the four lanes' units is that of `mma` w. Where they
//   were, the next step's are loaded, and the first ones of a launch that begins early before it waits for the grids before it.
// * The four lanes' units have scales of their own, so their products must not be added: the right side has two columns for each of
//   them, the terms of a row of activations (packed_terms.cuh), and zeros where unit and column do not belong together. The sums of
//   lane t, two columns of two weight rows, are then those of its own unit and run, which it scales: each scale is computed once.
//
// Bytes: the weight once; a row's terms come from the first-level cache.
#pragma once
#include "gemv.cuh"
#include "packed_terms.cuh"

constexpr uint32_t STREAM_WARPS = 8, STREAM_ROWS = 16;

// What a lane loads of two weight rows in a step: of two quads of units, one unit each.
template <typename W>
struct StepUnits {
    // A step's units may be a block's, with one head, and the same words of upper bits if any.
    static constexpr uint32_t HEADS = W::UNITS == 8 && W::HEADS == 1 ? 1 : 2;
    uint4 codes[2][2], upper[HEADS][2];
    typename W::Head heads[HEADS][2];
};

template <typename W, uint32_t ROWS>
struct RowsWarp {
    using Step = StepUnits<W>;
    const GemvParams& p;
    // Weight rows lane / 4, and the one eight behind.
    const unsigned char* weights[2];
    uint32_t blocks, units;
    float sums[ROWS][2];

    DEVICE explicit RowsWarp(const GemvParams& params) : p(params), sums{} {
        const uint32_t row = threadIdx.x % 32 / 4;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) weights[half] = weight_row<unsigned char, STREAM_ROWS>(p, row + 8 * half);
        blocks = p.k / W::BLOCK;
        units = blocks * W::UNITS;
    }

    // Steps of eight units.
    DEVICE uint32_t steps() const { return (units + 7) / 8; }
    DEVICE uint32_t unit(uint32_t step, uint32_t quad) const { return min(8 * step + 4 * quad + threadIdx.x % 4, units - 1); }

    // Loads a quad's units, and heads behind the last quad that has them.
    DEVICE void load(uint32_t step, uint32_t quad, Step& to) const {
        const uint32_t of_lane = unit(step, quad);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const unsigned char* row = weights[half];
            to.codes[quad][half] = load_once(row + 16 * of_lane);
            if (quad + Step::HEADS >= 2) {
                if constexpr (W::UPPER) {
                    const uint32_t chunk = of_lane / (CHUNK_RUNS / W::RUNS);
                    const uint32_t upper = W::UPPER_PLANE * blocks + W::upper_at(chunk) + of_lane % 2 * 16;
                    to.upper[quad % Step::HEADS][half] = load_words(row + upper);
                }
                const auto plane = [&](uint32_t h, uint32_t offset) { return row + W::head_plane(h) * blocks + offset; };
                to.heads[quad % Step::HEADS][half] = W::head(plane, of_lane);
            }
        }
    }

    // Adds the products of four units by lane.
    DEVICE void multiply(uint32_t step, uint32_t quad, const Step& loaded) {
        const auto& heads = loaded.heads[quad % Step::HEADS];
        const uint32_t lane = threadIdx.x % 32, mine = lane % 4, of_lane = unit(step, quad);
        const uint32_t chunk = W::RUNS == 2 ? 2 * step + quad : step, within = W::RUNS == 2 ? 0 : 256 * quad;
        const unsigned char* records = at<const unsigned char>(p.x) + chunk * ROWS * ROW_RECORD;
        const bool belongs = lane / 8 == mine;
        const unsigned char* terms = records + within + mine * 32 + lane / 4 % 2 * 16;
        // One run's registers at a time where there are more rows.
#pragma unroll(ROWS == 1 ? W::RUNS : 1)
        for (uint32_t run = 0; run < W::RUNS; run++) {
            float acc[ROWS][4] = {};
#pragma unroll
            for (uint32_t two = 0; two < 2; two++) {
                uint4 x[ROWS] = {};
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++) {
                    if (belongs) x[r] = (ROWS == 1 ? load_words : load_in_order)(terms + r * ROW_RECORD + run * 256 + two * 128);
                }
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    uint32_t a[4];
#pragma unroll
                    for (uint32_t half = 0; half < 2; half++) {
                        uint32_t pairs[2];
                        const uint32_t word = 2 * two + i;
                        W::halves(word_of(loaded.codes[quad][half], word), word_of(loaded.upper[quad % Step::HEADS][half], word), heads[half],
                                  of_lane, run, pairs);
                        a[half] = pairs[0], a[2 + half] = pairs[1];
                    }
#pragma unroll
                    for (uint32_t r = 0; r < ROWS; r++) {
                        mma<f16>(acc[r], a, i == 0 ? x[r].x : x[r].z, i == 0 ? x[r].y : x[r].w);
                    }
                }
            }
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const Scale scale = W::scale(heads[half], of_lane, run);
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++) {
                    const unsigned char* record = records + r * ROW_RECORD;
                    float sum = (acc[r][2 * half] + acc[r][2 * half + 1]) * scale.step;
                    if (W::LEAST) sum = fmaf(load_float(record + ROW_SUMS + 8 * mine + 4 * run), -scale.least, sum);
                    sums[r][half] = fmaf(sum * (1 / W::ONE), load_float(record + ROW_FACTOR), sums[r][half]);
                }
            }
        }
    }

    DEVICE static float load_float(const unsigned char* from) { return *reinterpret_cast<const float*>(from); }
};

// Grid: blocks of 16 weight rows; up to STREAM_WARPS warps. `x` has records, `ldw` is in bytes.
template <typename W, uint32_t ROWS>
DEVICE void stream_rows(const StreamParams& params) {
    const GemvParams& p = params.gemv;
    SHARED float parts[STREAM_WARPS][ROWS][STREAM_ROWS];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    RowsWarp<W, ROWS> state(p);
    const uint32_t steps = state.steps();
    StepUnits<W> loaded = {};
#pragma unroll
    for (uint32_t quad = 0; quad < 2; quad++) state.load(warp, quad, loaded);
    wait_for_grids();
    for (uint32_t step = warp; step < steps; step += warps) {
#pragma unroll
        for (uint32_t quad = 0; quad < 2; quad++) {
            state.multiply(step, quad, loaded);
            if (step + warps < steps) state.load(step + warps, quad, loaded);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2 * ROWS; i++) {
        float sum = state.sums[i / 2][i % 2];
        for (int mask : {1, 2}) sum += shuffle_xor(sum, mask);
        if (lane % 4 == 0) parts[warp][i / 2][lane / 4 + 8 * (i % 2)] = sum;
    }
    sync_block();
    store_products<float, STREAM_ROWS, ROWS>(p, 0, [&](uint32_t r, uint32_t j) {
        float sum = 0;
        for (uint32_t i = 0; i < warps; i++) sum += parts[i][r][j];
        return sum;
    });
}
