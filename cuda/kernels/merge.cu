// Scale-reduce of one partial into another (Infinite-LLM v1, section 4.2; formulas in engine/types/src/partial.rs), one block
// a row. 12 bytes an element: bound by memory, with accesses of 128 bits where heads are aligned (for four elements two loads and a store, not eight and four). Weights are computed once a head.
// Counts are as before the merge; the host adds them.
#include "shared/common.cuh"

template <int W>
DEVICE void merge_row(const MergeParams& p, float (&weights)[2][256]) {
    const uint32_t row = blockIdx.x, cols = p.heads * p.head_dim;
    if (at<const uint32_t>(p.count)[row] == 0) return;
    const bool empty = at<const uint32_t>(p.acc_count)[row] == 0;
    float* acc = at<float>(p.acc_out) + static_cast<uint64_t>(row) * cols;
    float* acc_lse = at<float>(p.acc_lse) + static_cast<uint64_t>(row) * p.heads;
    const float* out = at<const float>(p.out) + static_cast<uint64_t>(row) * cols;
    const float* lse = at<const float>(p.lse) + static_cast<uint64_t>(row) * p.heads;
    // Weights of some heads at a time: the log-sum-exps are replaced by those of the merge only when all have been read.
    for (uint32_t head0 = 0; head0 < p.heads; head0 += blockDim.x) {
        const uint32_t head = head0 + threadIdx.x;
        if (head < p.heads) {
            const float a = acc_lse[head], b = lse[head];
            const float max = fmaxf(a, b), wa = expf(a - max), wb = expf(b - max), sum = wa + wb;
            weights[0][threadIdx.x] = empty ? 0.0f : wa / sum;
            weights[1][threadIdx.x] = empty ? 1.0f : wb / sum;
            acc_lse[head] = empty ? b : max + logf(sum);
        }
        sync_block();
        const uint32_t heads = min(blockDim.x, p.heads - head0);
        for (uint32_t i = threadIdx.x * W; i < heads * p.head_dim; i += blockDim.x * W) {
            const uint32_t h = i / p.head_dim;
            const uint64_t e = static_cast<uint64_t>(head0) * p.head_dim + i;
            Part<W> sum = load_part<W>(out + e);
            // An empty accumulator holds nothing meaningful, perhaps NaN: it is not read.
            if (!empty) {
                const Part<W> kept = load_part<W>(acc + e);
#pragma unroll
                for (int j = 0; j < W; j++) sum.x[j] = weights[0][h] * kept.x[j] + weights[1][h] * sum.x[j];
            }
            store_part(acc + e, sum);
        }
        sync_block();
    }
}

KERNEL(merge, 256, 1, MergeParams) {
    SHARED float weights[2][256];
    if (is_wide(p.head_dim, p.acc_out, p.out)) {
        merge_row<WIDE>(p, weights);
    } else {
        merge_row<1>(p, weights);
    }
}
