// Micro attention without tensor cores, for what the other kernels do not take: f32 stores, any head size, any alignment, and
// latents (DeepSeek-V2 section 2.1), where a row is key and value at once: its first half lies in K, its second one in V.
// One block serves a query head over an item's rows, one after the other: keys are read again for each row and head. It is
// bound by the first-level cache (each thread reads a key of its own), several times slower than memory; it exists to be
// exact and general.
#pragma once
#include "fp8.cuh"
#include "keys.cuh"

constexpr uint32_t ANY_THREADS = 128;

template <typename T>
DEVICE float dot(const float* query, const T* key, uint32_t dim) {
    float sum = 0;
    for (uint32_t d = 0; d < dim; d++) sum = fmaf(query[d], widen(key[d]), sum);
    return sum;
}

// Where an item's keys and values lie.
template <typename T, bool LATENT>
struct PlainRows {
    const T *k, *v;
    uint64_t stride;
    uint32_t dim;

    DEVICE PlainRows(const AttentionParams& p, uint64_t kv_head)
        : k(at<const T>(p.kv.k) + kv_head), v(at<const T>(p.kv.v) + kv_head), stride(p.kv.token_stride), dim(p.head_dim) {}

    DEVICE float score(const float* query, uint32_t slot) const {
        if constexpr (!LATENT) return dot_row(query, k + slot * stride, dim);
        const uint32_t half = dim / 2;
        return dot_row(query, k + slot * stride, half) + dot_row(query + half, v + slot * stride, half);
    }
    DEVICE static float dot_row(const float* query, const T* row, uint32_t dim) {
        return dot(query, row, dim) * row_scale(row, dim);
    }

    // What element `d` of the slot's value is multiplied with.
    DEVICE float value_scale(uint32_t d, uint32_t slot) const {
        const uint32_t half = dim / 2;
        return row_scale((LATENT && d < half ? k : v) + slot * stride, LATENT ? half : dim);
    }

    // Element `d` of slot 0's value; those of the others are `stride` apart.
    DEVICE const T* values(uint32_t d) const { return LATENT && d < dim / 2 ? k + d : v + (LATENT ? d - dim / 2 : d); }
};

// Grid: heads, items. Shared memory: query [head_dim], accumulator [head_dim], weights and slots of a tile of keys, 16 floats.
template <typename T, bool LATENT>
DEVICE void attention_any(const AttentionParams& p) {
    DYNAMIC_SHARED(shared);
    const AttnItem item = at<const AttnItem>(p.items)[blockIdx.y];
    const uint32_t dim = p.head_dim, head = blockIdx.x, thread = threadIdx.x;
    float* query = reinterpret_cast<float*>(shared);
    float* acc = query + dim;
    float* weights = acc + dim;
    uint32_t* slots = reinterpret_cast<uint32_t*>(weights + ANY_THREADS);
    float* scratch = reinterpret_cast<float*>(slots + ANY_THREADS);
    const PlainRows<T, LATENT> rows(p, head / (p.heads / p.kv_heads) * p.kv.head_stride);
    const float slope = p.slopes ? at<const float>(p.slopes)[head] : 0.0f;
    const Target target(p, item);
    for (uint32_t row = 0; row < item.rows; row++) {
        const float* q = at<const float>(p.q) + static_cast<uint64_t>(item.row0 + row) * p.q_stride + head * dim;
        for (uint32_t d = thread; d < dim; d += ANY_THREADS) {
            query[d] = q[d] * p.scale;
            acc[d] = 0;
        }
        sync_block();
        const uint32_t position = item.pos0 + row;
        KeyWalk walk(item, p.runs);
        float max = NEGATIVE_INFINITY, sum = 0;
        for (uint32_t first = 0; first < item.keys; first += ANY_THREADS) {
            const uint32_t index = first + thread;
            float score = NEGATIVE_INFINITY;
            if (index < item.keys) {
                walk.seek(index);
                const uint32_t key = walk.position(index);
                slots[thread] = walk.slot(index);
                if (is_visible(position, key, p.window)) {
                    const float distance = static_cast<float>(static_cast<int32_t>(key - position));
                    score = rows.score(query, slots[thread]);
                    if (p.softcap > 0) score = SoftCap(p.softcap).of(score);
                    score += slope * distance;
                }
            }
            const float new_max = fmaxf(max, block_max(score, scratch)), base = finite_max(new_max);
            const float kept = expf(max - base), weight = expf(score - base);
            max = new_max;
            weights[thread] = weight;
            sum = sum * kept + block_sum(weight, scratch);
            const uint32_t count = min(ANY_THREADS, item.keys - first);
            for (uint32_t d = thread; d < dim; d += ANY_THREADS) {
                float a = acc[d] * kept;
                const T* values = rows.values(d);
                for (uint32_t j = 0; j < count; j++) {
                    // What no query sees may be anything, also NaN.
                    if (weights[j] != 0) {
                        const float value = widen(values[slots[j] * rows.stride]);
                        a = fmaf(weights[j], value * rows.value_scale(d, slots[j]), a);
                    }
                }
                acc[d] = a;
            }
            sync_block();
        }
        const PackedRow at_row(row, 1, head);
        for (uint32_t d = thread; d < dim; d += ANY_THREADS) target.row(p, at_row)[d] = sum != 0 ? acc[d] / sum : 0.0f;
        if (thread == 0) target.store_lse(p, at_row, sum != 0, max + logf(sum));
        sync_block();
    }
}

// The reduction of an output row's pieces, one warp a head: reads 4 bytes an element and piece, by 128-bit loads where heads are
// aligned. The weight of a piece is computed once for each 32 (or, wide, 128) elements, in shared memory: one exponential for 128
// products where there were 128. Grid: blocks of heads,
// rows.
template <int W>
DEVICE void attention_merge_head(const AttentionMergeParams& p, const MergeItem& item, uint32_t head, float* weights) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t step = static_cast<uint64_t>(item.stride) * p.heads;
    const uint64_t first = static_cast<uint64_t>(item.piece_row) * p.heads + head;
    const float* lse = at<const float>(p.piece_lse) + first;
    const float* pieces = at<const float>(p.piece_out) + first * p.head_dim;
    float max = NEGATIVE_INFINITY, sum = 0;
    for (uint32_t i = lane; i < item.pieces; i += 32) max = fmaxf(max, lse[i * step]);
    max = warp_max(max);
    const float base = finite_max(max);
    for (uint32_t i = lane; i < item.pieces; i += 32) sum += expf(lse[i * step] - base);
    sum = warp_sum(sum);
    const uint64_t row = static_cast<uint64_t>(item.row) * p.heads + head;
    const float factor = sum != 0 ? 1.0f / sum : 0.0f;
    for (uint32_t d0 = 0; d0 < p.head_dim; d0 += 32 * W) {
        const uint32_t d = d0 + lane * W;
        Part<W> total = {};
        for (uint32_t i0 = 0; i0 < item.pieces; i0 += 32) {
            sync_warp();
            if (i0 + lane < item.pieces) weights[lane] = expf(lse[(i0 + lane) * step] - base) * factor;
            sync_warp();
            if (d >= p.head_dim) continue;
            const uint32_t count = min(32u, item.pieces - i0);
#pragma unroll 4
            for (uint32_t i = 0; i < count; i++) {
                const Part<W> part = load_part<W>(pieces + (i0 + i) * step * p.head_dim + d);
                const float weight = weights[i];
                // A piece without weight may hold anything.
#pragma unroll
                for (int e = 0; e < W; e++) total.x[e] = weight != 0 ? fmaf(weight, part.x[e], total.x[e]) : total.x[e];
            }
        }
        if (d < p.head_dim) store_part(at<float>(p.out) + row * p.head_dim + d, total);
    }
    if (lane == 0) at<float>(p.lse)[row] = sum != 0 ? max + logf(sum) : 0.0f;
}

constexpr uint32_t MERGE_WARPS = 4;

DEVICE void attention_merge_rows(const AttentionMergeParams& p) {
    SHARED float weights[MERGE_WARPS][32];
    const MergeItem item = at<const MergeItem>(p.merges)[blockIdx.y];
    const uint32_t warp = threadIdx.x / 32, head = blockIdx.x * MERGE_WARPS + warp;
    if (item.pieces == 0 || head >= p.heads) return;
    if (is_wide(p.head_dim, p.piece_out, p.out)) {
        attention_merge_head<WIDE>(p, item, head, weights[warp]);
    } else {
        attention_merge_head<1>(p, item, head, weights[warp]);
    }
}
