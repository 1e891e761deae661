// Products of one row of activations with a packed weight (codes.cuh), on tensor cores, from registers.
//
// A warp multiplies 16 weight rows, 256 columns at a time (128 where a unit has one run); the warps of a block take turns along
// k and are added at the end, in order.
//
// * A lane loads whole units: those of two weight rows, of which four lanes have four consecutive ones. What it loads is its
//   part of the left side of an `mma`: word w of the four lanes' units is that of `mma` w. The next step's are loaded where they were,
//   and the first ones of a launch that begins early before it waits for the grids before it.
// * The four lanes' units have scales of their own, so their products must not be added: the right side has two columns for
//   each of them, the activations' two terms (packed_terms.cuh), and zeros where unit and column do not belong together. The
//   sums of lane t, two columns of two weight rows, are then those of its own unit and run, which it scales: each scale is
//   computed once.
//
// Bytes: the weight once; terms come from the first-level cache. In flight on a multiprocessor: 24 warps with 1 to 2 KB each.
// Instructions are counted in packed_few.cuh.
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

template <typename W>
struct RowWarp {
    using Step = StepUnits<W>;
    const GemvParams& p;
    // Weight rows lane / 4, and the one eight behind.
    Address weights[2];
    uint32_t blocks, units;
    float sums[2];

    DEVICE explicit RowWarp(const GemvParams& params) : p(params), sums{} {
        blocks = p.k / W::BLOCK;
        units = blocks * W::UNITS;
    }

    // Has the weight rows of a tile of 16.
    DEVICE void find(uint32_t tile) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint64_t row = row_of_block(p, tile, STREAM_ROWS, threadIdx.x % 32 / 4 + 8 * half);
            weights[half] = pinned(p.w + row * p.ldw);
        }
    }

    // Steps of eight units.
    DEVICE uint32_t steps() const { return (units + 7) / 8; }
    DEVICE uint32_t unit(uint32_t step, uint32_t quad) const { return min(8 * step + 4 * quad + threadIdx.x % 4, units - 1); }

    // Loads a quad's units, and heads behind the last quad that has them.
    DEVICE void load(uint32_t step, uint32_t quad, Step& to) const {
        const uint32_t of_lane = unit(step, quad);
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const unsigned char* row = at<const unsigned char>(weights[half]);
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
        const unsigned char* records = at<const unsigned char>(p.x) + chunk * ROW_RECORD;
        const bool belongs = lane / 8 == mine;
        const unsigned char* terms = records + within + mine * 32 + lane / 4 % 2 * 16;
        // One run at a time where registers are few.
#pragma unroll(W::UPPER ? 1 : W::RUNS)
        for (uint32_t run = 0; run < W::RUNS; run++) {
            float acc[4] = {};
#pragma unroll
            for (uint32_t two = 0; two < 2; two++) {
                uint4 x = {};
                if (belongs) x = load_words(terms + run * 256 + two * 128);
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    uint32_t a[4];
#pragma unroll
                    for (uint32_t half = 0; half < 2; half++) {
                        uint32_t pairs[2];
                        const uint32_t codes = word_of(loaded.codes[quad][half], 2 * two + i);
                        const uint32_t upper = word_of(loaded.upper[quad % Step::HEADS][half], 2 * two + i);
                        W::halves(codes, upper, heads[half], of_lane, run, pairs);
                        a[half] = pairs[0], a[2 + half] = pairs[1];
                    }
                    mma<f16>(acc, a, i == 0 ? x.x : x.z, i == 0 ? x.y : x.w);
                }
            }
            const float factor = load_float_in_order(records + ROW_FACTOR);
            float total = 0;
            if (W::LEAST) total = load_float_in_order(records + ROW_SUMS + 8 * mine + 4 * run);
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const Scale scale = W::scale(heads[half], of_lane, run);
                float sum = (acc[2 * half] + acc[2 * half + 1]) * scale.step;
                if (W::LEAST) sum = fmaf(total, -scale.least, sum);
                sums[half] = fmaf(sum * (1 / W::ONE), factor, sums[half]);
            }
        }
    }
};

// Grid: as many blocks as a device has at once, or fewer; they take turns in tiles of 16 weight rows, and have the next one's
// first weights in flight where one ends. `x` has records, `ldw` is in bytes.
template <typename W>
DEVICE void stream_row(const StreamParams& params) {
    const GemvParams& p = params.gemv;
    // Of two tiles, so that warps meet once a tile.
    SHARED float parts[2][STREAM_WARPS][STREAM_ROWS];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    RowWarp<W> state(p);
    const uint32_t steps = state.steps();
    StepUnits<W> loaded = {};
    state.find(blockIdx.x);
#pragma unroll
    for (uint32_t quad = 0; quad < 2; quad++) state.load(warp, quad, loaded);
    wait_for_grids();
    for (uint32_t tile = blockIdx.x, turn = 0; tile < params.tiles; tile += gridDim.x, turn ^= 1) {
        for (uint32_t step = warp; step < steps; step += STREAM_WARPS) {
            uint32_t next = step + STREAM_WARPS;
            if (next >= steps && tile + gridDim.x < params.tiles) {
                state.find(tile + gridDim.x);
                next = warp;
            }
#pragma unroll
            for (uint32_t quad = 0; quad < 2; quad++) {
                state.multiply(step, quad, loaded);
                if (next < steps) state.load(next, quad, loaded);
            }
        }
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            float& sum = state.sums[half];
            for (int mask : {1, 2}) sum += shuffle_xor(sum, mask);
            if (lane % 4 == 0) parts[turn][warp][lane / 4 + 8 * half] = sum;
            sum = 0;
        }
        sync_block();
        store_block<float>(p, tile, STREAM_ROWS, 1, 0, [&](uint32_t, uint32_t j) {
            float sum = 0;
            for (uint32_t i = 0; i < STREAM_WARPS; i++) sum += parts[turn][i][j];
            return sum;
        });
    }
}
