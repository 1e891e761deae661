// Sampling by the rules of engine/runner/src/sampling.rs: temperature, min-p, top-k, top-p, one draw in the order of ids; ties
// go to the lower id. One block a row.
//
// Thresholds are found by radix selection on the logits' bits, a byte at a time: no sort. Weights are f64 exponentials rounded
// to multiples of 2^-40 and added as integers, so that the result does not depend on the order of threads. A row is read up
// to eleven times, from the second-level cache (512 KB at 128 K tokens); with top-p, f64 exponentials of five passes dominate.
#include "shared/common.cuh"

constexpr uint32_t SAMPLE_THREADS = 512;
constexpr uint32_t UNMASKED = 0xffffffffu;  // A row without a mask.
constexpr double WEIGHT_ONE = 1099511627776.0;  // 2^40

// The inverse of `ordered`.
DEVICE float logit_of(uint32_t key) {
    union {
        uint32_t bits;
        float value;
    } u = {key & 0x80000000u ? key & 0x7fffffffu : ~key};
    return u.value;
}

struct SampleShared {
    uint64_t bins[256];
    uint64_t scan[SAMPLE_THREADS / 32];
    uint64_t best;
    uint64_t wanted;
    uint32_t bad, prefix;
};

// The tokens that are kept: keys above `key`, and the first `ties` of those equal to it.
struct Threshold {
    uint32_t key;
    uint64_t ties;
};

struct Sampler {
    const float* logits;
    uint32_t vocab;
    SampleRow row;
    float max;
    SampleShared& shared;

    DEVICE uint64_t weight(float logit) const {
        const double w = exp((static_cast<double>(logit) - static_cast<double>(max)) / static_cast<double>(row.temperature));
        if (row.min_p > 0 && w < static_cast<double>(row.min_p)) return 0;
        return static_cast<uint64_t>(w * WEIGHT_ONE + 0.5);
    }
    // Whether min-p leaves a token.
    DEVICE bool is_candidate(float logit) const {
        if (!(logit > NEGATIVE_INFINITY)) return false;
        if (!(row.min_p > 0)) return true;
        return exp((static_cast<double>(logit) - static_cast<double>(max)) / static_cast<double>(row.temperature)) >=
               static_cast<double>(row.min_p);
    }

    // Finds the largest key at which the amounts of it and of all above reach `wanted`; leaves in `wanted` what those equal to
    // it must still give. `amount(logit, key)` is 0 for tokens that do not count; `extra` counts once at `extra_key`.
    template <typename Amount>
    DEVICE Threshold select(uint64_t wanted, uint32_t extra_key, uint64_t extra, Amount amount) {
        if (threadIdx.x == 0) {
            shared.prefix = 0;
            shared.wanted = wanted;
        }
        for (int shift = 24; shift >= 0; shift -= 8) {
            for (uint32_t i = threadIdx.x; i < 256; i += SAMPLE_THREADS) shared.bins[i] = 0;
            sync_block();
            const uint32_t prefix = shared.prefix;
            const uint32_t above = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
            for (uint32_t i = threadIdx.x; i < vocab; i += SAMPLE_THREADS) {
                const uint32_t key = ordered(logits[i]);
                if ((key & above) != prefix) continue;
                const uint64_t x = amount(logits[i], key);
                if (x) add_shared(&shared.bins[key >> shift & 255], x);
            }
            if (threadIdx.x == 0 && extra && (extra_key & above) == prefix) {
                add_shared(&shared.bins[extra_key >> shift & 255], extra);
            }
            sync_block();
            if (threadIdx.x == 0) {
                uint32_t digit = 255;
                while (digit > 0 && shared.bins[digit] < shared.wanted) shared.wanted -= shared.bins[digit--];
                shared.prefix |= digit << shift;
            }
            sync_block();
        }
        const Threshold found = {shared.prefix, shared.wanted};
        sync_block();
        return found;
    }

    DEVICE uint64_t block_total(uint64_t x) {
        for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
        if (threadIdx.x % 32 == 0) shared.scan[threadIdx.x / 32] = x;
        sync_block();
        uint64_t total = 0;
        for (uint32_t i = 0; i < SAMPLE_THREADS / 32; i++) total += shared.scan[i];
        sync_block();
        return total;
    }

    // The sum of `x` over the threads before this one.
    DEVICE uint64_t before(uint64_t x) {
        uint64_t inclusive = x;
        for (int delta = 1; delta < 32; delta *= 2) {
            const uint64_t other = shuffle_up(inclusive, delta);
            if (threadIdx.x % 32 >= static_cast<uint32_t>(delta)) inclusive += other;
        }
        if (threadIdx.x % 32 == 31) shared.scan[threadIdx.x / 32] = inclusive;
        sync_block();
        uint64_t sum = inclusive - x;
        for (uint32_t i = 0; i < threadIdx.x / 32; i++) sum += shared.scan[i];
        sync_block();
        return sum;
    }

    // What top-k and top-p keep.
    DEVICE Threshold threshold() {
        // Key 0 is no logit's: everything is above.
        Threshold kept = {0, 0};
        uint64_t count = 0;
        for (uint32_t i = threadIdx.x; i < vocab; i += SAMPLE_THREADS) count += is_candidate(logits[i]);
        count = block_total(count);
        if (row.top_k > 0 && row.top_k < count) {
            kept = select(row.top_k, 0, 0, [&](float logit, uint32_t) { return static_cast<uint64_t>(is_candidate(logit)); });
        }
        if (row.top_p < 1) {
            const uint64_t ties = kept.ties ? kept.ties * weight(logit_of(kept.key)) : 0;
            uint64_t sum = 0;
            for (uint32_t i = threadIdx.x; i < vocab; i += SAMPLE_THREADS) {
                if (ordered(logits[i]) > kept.key && logits[i] > NEGATIVE_INFINITY) sum += weight(logits[i]);
            }
            sum = block_total(sum) + ties;
            const uint64_t enough = static_cast<uint64_t>(ceil(static_cast<double>(row.top_p) * static_cast<double>(sum)));
            const Threshold first = kept;
            kept = select(enough, first.key, ties, [&](float logit, uint32_t key) {
                return key > first.key && logit > NEGATIVE_INFINITY ? weight(logit) : 0;
            });
            const uint64_t each = weight(logit_of(kept.key));
            kept.ties = each ? (kept.ties + each - 1) / each : 0;
        }
        return kept;
    }

    DEVICE uint32_t draw() {
        const Threshold kept = threshold();
        // Neighbours in id belong to one thread from here on: ties and the draw go by id.
        const uint32_t share = (vocab + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
        const uint32_t from = min(vocab, threadIdx.x * share), to = min(vocab, from + share);
        uint64_t ties = 0;
        for (uint32_t i = from; i < to; i++) ties += ordered(logits[i]) == kept.key;
        const uint64_t ties_before = before(ties);
        uint64_t sum = 0, rank = ties_before;
        for (uint32_t i = from; i < to; i++) sum += kept_weight(i, kept, rank);
        const uint64_t sum_before = before(sum), total = block_total(sum);
        uint64_t target = static_cast<uint64_t>(row.uniform * static_cast<double>(total));
        if (target >= total) target = total - 1;
        if (sum_before <= target && target - sum_before < sum) {
            uint64_t reached = sum_before;
            rank = ties_before;
            for (uint32_t i = from; i < to; i++) {
                reached += kept_weight(i, kept, rank);
                if (reached > target) {
                    shared.prefix = i;
                    break;
                }
            }
        }
        sync_block();
        return shared.prefix;
    }

    // The weight of a token, 0 where it is not kept; `rank` counts those equal to the threshold.
    DEVICE uint64_t kept_weight(uint32_t i, const Threshold& kept, uint64_t& rank) const {
        const float logit = logits[i];
        const uint32_t key = ordered(logit);
        const bool tie = key == kept.key;
        const bool keep = logit > NEGATIVE_INFINITY && (key > kept.key || (tie && rank < kept.ties));
        rank += tie;
        return keep ? weight(logit) : 0;
    }
};

KERNEL(sample, 512, 1, SampleParams) {
    SHARED SampleShared shared;
    float* logits = at<float>(p.logits) + static_cast<uint64_t>(blockIdx.x) * p.stride;
    const uint32_t first_word = at<const SampleRow>(p.rows)[blockIdx.x].mask;
    const bool masked = first_word != UNMASKED;
    const uint32_t* allowed = at<const uint32_t>(p.masks) + (masked ? first_word : 0);
    if (threadIdx.x == 0) {
        shared.best = 0;
        shared.bad = 0xffffffffu;
    }
    sync_block();
    uint64_t best = 0;
    for (uint32_t i = threadIdx.x; i < p.vocab; i += SAMPLE_THREADS) {
        float x = logits[i];
        if (isnan(x) || x == INFINITY) min_shared(&shared.bad, i);
        if (masked && !(allowed[i / 32] >> (i % 32) & 1)) logits[i] = x = NEGATIVE_INFINITY;
        // The largest logit, and of equal ones the lowest id.
        const uint64_t candidate = static_cast<uint64_t>(ordered(x)) << 32 | (0xffffffffu - i);
        best = candidate > best ? candidate : best;
    }
    for (int mask = 16; mask > 0; mask /= 2) {
        const uint64_t other = shuffle_xor(best, mask);
        best = other > best ? other : best;
    }
    if (threadIdx.x % 32 == 0) shared.scan[threadIdx.x / 32] = best;
    sync_block();
    for (uint32_t i = 0; i < SAMPLE_THREADS / 32; i++) best = shared.scan[i] > best ? shared.scan[i] : best;
    const uint32_t bad = shared.bad;
    sync_block();
    const uint32_t likeliest = 0xffffffffu - static_cast<uint32_t>(best);
    const float max = logit_of(static_cast<uint32_t>(best >> 32));
    SampledRow result = {likeliest, 0};
    if (bad != 0xffffffffu) {
        result = {bad, 1};
    } else if (!(max > NEGATIVE_INFINITY)) {
        result = {0, 2};
    } else if (at<const SampleRow>(p.rows)[blockIdx.x].temperature != 0) {
        Sampler sampler = {logits, p.vocab, at<const SampleRow>(p.rows)[blockIdx.x], max, shared};
        result.token = sampler.draw();
    }
    if (threadIdx.x == 0) at<SampledRow>(p.out)[blockIdx.x] = result;
}
