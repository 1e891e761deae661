// A mixture of experts (Shazeer et al. 2017): rows choose experts, the choices are sorted by expert, products are made by groups
// (shared/grouped.cuh), and each row adds up its experts' results. Nothing waits for the host: what depends on the choices is in
// device memory.
#include "shared/grouped.cuh"
#include "shared/route.cuh"

// One warp a row, which writes its experts and their weights by rank. Reads 4 bytes an expert: bound by latency.
KERNEL(route, 32, 1, RouteParams) {
    SHARED RouteShared shared;
    const Router router = {p, shared, threadIdx.x};
    router.score(at<const float>(p.logits) + static_cast<uint64_t>(blockIdx.x) * p.count);
    router.make_keys();
    if (p.top_groups < p.groups) router.drop_groups();
    const uint32_t expert = router.choose();
    // Other lanes' scores.
    sync_warp();
    const bool has_rank = threadIdx.x < p.top_k;
    const float weight = has_rank ? shared.scores[expert] : 0.0f;
    const float sum = warp_sum(weight);
    if (!has_rank) return;
    // The least normal number: nothing is divided by zero.
    const float factor = p.scale / (p.normalised ? fmaxf(sum, 1.17549435e-38f) : 1.0f);
    const uint64_t at_choice = static_cast<uint64_t>(blockIdx.x) * p.top_k + threadIdx.x;
    at<uint32_t>(p.experts)[at_choice] = expert;
    at<float>(p.weights)[at_choice] = weight * factor;
}

// Sorts choices by expert, stably, and divides each expert's into tiles: one block an expert, which counts all choices (4 bytes
// each, from the second-level cache) and places its own. A warp's choices are consecutive.
KERNEL(sort_choices, 256, 1, SortParams) {
    SHARED uint32_t bins[EXPERTS_MAX];
    SHARED uint32_t own[8];
    const uint32_t* experts = at<const uint32_t>(p.experts);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, expert = blockIdx.x;
    for (uint32_t i = threadIdx.x; i < p.count; i += blockDim.x) bins[i] = 0;
    if (lane == 0) own[warp] = 0;
    sync_block();
    const uint32_t share = (p.choices + blockDim.x - 1) / blockDim.x * 32;
    const uint32_t from = min(p.choices, warp * share), to = min(p.choices, from + share);
    for (uint32_t i = from + lane; i < to; i += 32) {
        add_shared(&bins[experts[i]], 1u);
        if (experts[i] == expert) add_shared(&own[warp], 1u);
    }
    sync_block();
    // The choices of the experts before, and in the upper half their tiles.
    uint64_t before = 0;
    for (uint32_t i = lane; i < expert; i += 32) {
        before += bins[i] | static_cast<uint64_t>((bins[i] + p.tile_rows - 1) / p.tile_rows) << 32;
    }
    for (int mask = 16; mask > 0; mask /= 2) before += shuffle_xor(before, mask);
    const uint32_t first = static_cast<uint32_t>(before), rows = bins[expert];
    const uint32_t tile0 = static_cast<uint32_t>(before >> 32), tiles = (rows + p.tile_rows - 1) / p.tile_rows;
    ExpertTile* out = at<ExpertTile>(p.tiles);
    for (uint32_t i = threadIdx.x; i < tiles; i += blockDim.x) {
        const uint32_t at_row = first + i * p.tile_rows;
        out[tile0 + i] = {expert, at_row, min(at_row + p.tile_rows, first + rows), 0};
    }
    // The rest of the tiles is empty.
    if (expert + 1 == p.count) {
        for (uint32_t i = tile0 + tiles + threadIdx.x; i < p.tiles_max; i += blockDim.x) out[i] = {0, 0, 0, 0};
    }
    uint32_t place = first;
    for (uint32_t i = 0; i < warp; i++) place += own[i];
    for (uint32_t i = from; i < to; i += 32) {
        const bool match = i + lane < to && experts[i + lane] == expert;
        const uint32_t lanes = lanes_where(match);
        if (match) {
            const uint32_t at_row = place + count_bits(lanes & ((1u << lane) - 1));
            at<uint32_t>(p.places)[i + lane] = at_row;
            at<uint32_t>(p.sources)[at_row] = (i + lane) / p.top_k;
        }
        place += count_bits(lanes);
    }
}

// Two blocks of large tiles on a multiprocessor: 128 registers a thread.
#define GROUPED(TYPE)                                                                                                         \
    KERNEL(grouped_gemv_##TYPE, 128, 4, GroupedParams) { grouped_gemv<TYPE>(p); }                                              \
    KERNEL(grouped_gemm_##TYPE##_exact_128, 256, 2, GroupedParams) { grouped_gemm<TYPE, 128, 128, 64, 32, 2>(p); }             \
    KERNEL(grouped_gemm_##TYPE##_fast_128, 256, 2, GroupedParams) { grouped_gemm<TYPE, 128, 128, 64, 32, 1>(p); }              \
    KERNEL(grouped_gemm_##TYPE##_exact_64, 128, 3, GroupedParams) { grouped_gemm<TYPE, 64, 64, 32, 32, 2>(p); }                \
    KERNEL(grouped_gemm_##TYPE##_fast_64, 128, 3, GroupedParams) { grouped_gemm<TYPE, 64, 64, 32, 32, 1>(p); }

GROUPED(f16)
GROUPED(bf16)

KERNEL(grouped_gemv_f32, 128, 4, GroupedParams) { grouped_gemv<float>(p); }
KERNEL(grouped_gemm_f32, 256, 2, GroupedParams) { grouped_plain(p); }

// Adds a row's results, by rank. A thread has four columns; 4 bytes an element and expert.
template <int W>
DEVICE void combine_row(const CombineParams& p) {
    const uint64_t row = blockIdx.x;
    const uint32_t* places = at<const uint32_t>(p.places) + row * p.top_k;
    const float* weights = at<const float>(p.weights) + row * p.top_k;
    float* out = at<float>(p.out) + row * p.cols;
    const uint32_t first = blockIdx.y * WIDE * blockDim.x;
    for (uint32_t i = 0; i < WIDE / W; i++) {
        const uint32_t column = first + part_column<W>(i);
        if (column >= p.cols) continue;
        Part<W> sum = load_part<W>(out + column);
#pragma unroll 4
        for (uint32_t rank = 0; rank < p.top_k; rank++) {
            const Part<W> part = load_part<W>(at<const float>(p.results) + static_cast<uint64_t>(places[rank]) * p.cols + column);
            const float weight = weights[rank];
#pragma unroll
            for (int e = 0; e < W; e++) sum.x[e] += weight * part.x[e];
        }
        store_part(out + column, sum);
    }
}

KERNEL(combine, 256, 1, CombineParams) {
    if (is_wide(p.cols, p.results, p.out)) {
        combine_row<WIDE>(p);
    } else {
        combine_row<1>(p);
    }
}
