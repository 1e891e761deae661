// The choice of experts: scores of a row's logits, groups of experts, and the experts with the largest keys.
#pragma once
#include "activation.cuh"

constexpr uint32_t EXPERTS_MAX = 1024;

// Logits, then scores; keys to choose by; what each group is compared by.
struct RouteShared {
    float scores[EXPERTS_MAX], keys[EXPERTS_MAX], best[EXPERTS_MAX];
};

// One warp. A lane has the experts and the groups that are its number modulo 32.
struct Router {
    const RouteParams& p;
    RouteShared& shared;
    uint32_t lane;

    // Fills keys with logits and scores with scores.
    DEVICE void score(const float* logits) const {
        float max = NEGATIVE_INFINITY;
        for (uint32_t i = lane; i < p.count; i += 32) {
            const float x = logits[i];
            shared.keys[i] = x;
            shared.scores[i] = p.sigmoid ? times_sigmoid(1.0f, x) : x;
            max = fmaxf(max, x);
        }
        if (p.sigmoid) return;
        max = warp_max(max);
        float sum = 0;
        for (uint32_t i = lane; i < p.count; i += 32) {
            const float x = expf(shared.scores[i] - max);
            shared.scores[i] = x;
            sum += x;
        }
        sum = warp_sum(sum);
        for (uint32_t i = lane; i < p.count; i += 32) shared.scores[i] /= sum;
    }

    // Unequal logits can have equal scores: where nothing is added to scores, logits decide.
    DEVICE void make_keys() const {
        if (p.bias == 0 && !p.two_best) return;
        for (uint32_t i = lane; i < p.count; i += 32) {
            shared.keys[i] = shared.scores[i] + (p.bias ? load_any(p.bias, p.bias_type, i) : 0.0f);
        }
    }

    // What a group is compared by: its best key, or the sum of its two best.
    DEVICE float group_score(const float* keys, uint32_t size) const {
        float first = NEGATIVE_INFINITY, second = NEGATIVE_INFINITY;
        for (uint32_t i = 0; i < size; i++) {
            second = fmaxf(second, fminf(first, keys[i]));
            first = fmaxf(first, keys[i]);
        }
        return p.two_best && size > 1 ? first + second : first;
    }

    // Sets the keys of all but the best groups to minus infinity.
    DEVICE void drop_groups() const {
        const uint32_t size = p.count / p.groups;
        sync_warp();
        for (uint32_t g = lane; g < p.groups; g += 32) shared.best[g] = group_score(shared.keys + g * size, size);
        sync_warp();
        for (uint32_t g = lane; g < p.groups; g += 32) {
            const float own = shared.best[g];
            uint32_t better = 0;
            for (uint32_t i = 0; i < p.groups; i++) {
                better += shared.best[i] > own || (shared.best[i] == own && i < g);
            }
            if (better < p.top_groups) continue;
            for (uint32_t i = g * size; i < (g + 1) * size; i++) shared.keys[i] = NEGATIVE_INFINITY;
        }
        sync_warp();
    }

    // The largest key of this lane's and, of equal ones, the lowest expert; 0 where there is none.
    DEVICE uint64_t candidate() const {
        uint64_t best = 0;
        for (uint32_t i = lane; i < p.count; i += 32) {
            if (!(shared.keys[i] > NEGATIVE_INFINITY)) continue;
            const uint64_t x = static_cast<uint64_t>(ordered(shared.keys[i])) << 32 | (0xffffffffu - i);
            best = x > best ? x : best;
        }
        return best;
    }

    // The expert of the rank that is this lane's number.
    DEVICE uint32_t choose() const {
        uint32_t chosen = 0;
        uint64_t own = candidate();
        for (uint32_t rank = 0; rank < p.top_k; rank++) {
            uint64_t best = own;
            for (int mask = 16; mask > 0; mask /= 2) {
                const uint64_t other = shuffle_xor(best, mask);
                best = other > best ? other : best;
            }
            // Keys that are no numbers choose nothing.
            const uint32_t expert = best ? 0xffffffffu - static_cast<uint32_t>(best) : 0;
            if (rank == lane) chosen = expert;
            if (best && best == own) {
                shared.keys[expert] = NEGATIVE_INFINITY;
                own = candidate();
            }
        }
        return chosen;
    }
};
