// Scale-reduce of one partial into another (Infinite-LLM v1, section 4.2; formulas in engine/types/src/partial.rs), one block
// a row. 12 bytes an element: bound by memory. Counts are as before the merge; the host adds them.
#include "shared/common.cuh"

KERNEL(merge, 256, 1, MergeParams) {
    const uint32_t row = blockIdx.x, cols = p.heads * p.head_dim;
    if (at<const uint32_t>(p.count)[row] == 0) return;
    const bool empty = at<const uint32_t>(p.acc_count)[row] == 0;
    float* acc = at<float>(p.acc_out) + static_cast<uint64_t>(row) * cols;
    float* acc_lse = at<float>(p.acc_lse) + static_cast<uint64_t>(row) * p.heads;
    const float* out = at<const float>(p.out) + static_cast<uint64_t>(row) * cols;
    const float* lse = at<const float>(p.lse) + static_cast<uint64_t>(row) * p.heads;
    // Weights of some heads at a time: the log-sum-exps are replaced by those of the merge only when all have been read.
    SHARED float weights[2][256];
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
        for (uint32_t i = threadIdx.x; i < heads * p.head_dim; i += blockDim.x) {
            const uint32_t h = i / p.head_dim;
            const uint64_t e = static_cast<uint64_t>(head0) * p.head_dim + i;
            // An empty accumulator holds nothing meaningful, perhaps NaN: it is not read.
            const float kept = empty ? 0.0f : weights[0][h] * acc[e];
            acc[e] = empty ? out[e] : kept + weights[1][h] * out[e];
        }
        sync_block();
    }
}
