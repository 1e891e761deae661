// The state of a warp's rows in prefill: shared by the kernels that multiply with mma.sync and with wgmma, whose accumulators
// are laid out alike.
#pragma once
#include "keys.cuh"

// What of an item a block works on.
struct PrefillTile {
    const AttentionParams& p;
    const AttnItem& item;
    uint32_t kv_head, group;

    // Two elements of a packed row's query times scale and log2(e); zeros for rows beyond the item.
    template <typename T, int D>
    DEVICE void query(uint32_t packed, uint32_t d, float (&x)[2]) const {
        x[0] = x[1] = 0;
        if (packed >= item.rows * group) return;
        const PackedRow row(packed, group, kv_head);
        const float* from = at<const float>(p.q) + static_cast<uint64_t>(item.row0 + row.row) * p.q_stride + row.head * D + d;
        const float scale = p.scale * LOG2_E;
        x[0] = saturate<T>(from[0] * scale);
        x[1] = saturate<T>(from[1] * scale);
    }
};

// 16 MT rows from `row0`, scored for 8 NT keys at a time; a thread's are rows lane / 4 and lane / 4 + 8 of each 16.
template <int D, int MT, int NT>
struct PrefillState {
    static constexpr int COLS = D / 8;
    float o[MT][COLS][4];
    float max[MT][2], sum[MT][2], slope[MT][2];
    uint32_t position[MT][2];
    // Positions of the first and last rows that exist.
    uint32_t position_min, position_max;
    uint32_t row0;

    DEVICE PrefillState(const PrefillTile& tile, uint32_t first_row) : row0(first_row) {
        const uint32_t rows = tile.item.rows * tile.group, lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // Rows that do not exist take the last one's place; they are not written.
                const uint32_t packed = min(row0 + 16 * m + lane / 4 + 8 * h, rows - 1);
                const PackedRow row(packed, tile.group, tile.kv_head);
                position[m][h] = tile.item.pos0 + row.row;
                slope[m][h] = tile.p.slopes ? at<const float>(tile.p.slopes)[row.head] * LOG2_E : 0.0f;
                max[m][h] = NEGATIVE_INFINITY;
                sum[m][h] = 0;
            }
#pragma unroll
            for (int i = 0; i < COLS; i++) o[m][i][0] = o[m][i][1] = o[m][i][2] = o[m][i][3] = 0;
        }
        position_min = tile.item.pos0 + min(row0, rows - 1) / tile.group;
        position_max = tile.item.pos0 + min(row0 + 16 * MT - 1, rows - 1) / tile.group;
    }

    // Soft caps of scores, which are in units of log2.
    DEVICE void cap(float softcap, float (&s)[MT][NT][4]) const {
        const SoftCap cap(softcap * LOG2_E);
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) s[m][n][e] = cap.of(s[m][n][e]);
            }
        }
    }

    // Adds biases and hides what a row does not see. Positions ascend, and keys beyond the item are last, at NOWHERE.
    DEVICE void mask(const AttentionParams& p, const uint32_t* positions, float (&s)[MT][NT][4]) const {
        const uint32_t first = positions[0], last = positions[8 * NT - 1];
        const bool whole = last <= position_min && is_visible(position_max, first, p.window);
        if (whole && !p.slopes) return;
        const uint32_t t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const uint32_t key = positions[8 * n + 2 * t + e];
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint32_t query = position[m][h];
                        const float distance = static_cast<float>(static_cast<int32_t>(key - query));
                        float& x = s[m][n][2 * h + e];
                        x = is_visible(query, key, p.window) ? x + slope[m][h] * distance : NEGATIVE_INFINITY;
                    }
                }
            }
        }
    }

    // Scores become weights. What was summed before is worth `kept` of what it was; whether that is not all for all rows.
    DEVICE bool soften(float (&s)[MT][NT][4], float (&kept)[MT][2]) {
        bool changed = false;
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float tile = NEGATIVE_INFINITY;
#pragma unroll
                for (int n = 0; n < NT; n++) tile = fmaxf(tile, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                tile = fmaxf(tile, shuffle_xor(tile, 1));
                tile = fmaxf(tile, shuffle_xor(tile, 2));
                const float new_max = fmaxf(max[m][h], tile), base = finite_max(new_max);
                kept[m][h] = exp2_fast(max[m][h] - base);
                changed |= kept[m][h] != 1.0f;
                max[m][h] = new_max;
                float part = 0;
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++) {
                        s[m][n][e] = exp2_fast(s[m][n][e] - base);
                        part += s[m][n][e];
                    }
                }
                sum[m][h] = sum[m][h] * kept[m][h] + part;
            }
        }
        // A new maximum becomes rare as keys pass: a branch of the whole warp saves most of the scaling.
        return any_lane(changed);
    }

    DEVICE void scale(const float (&kept)[MT][2]) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int i = 0; i < COLS; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) o[m][i][e] *= kept[m][e / 2];
            }
        }
    }

    DEVICE void store(const PrefillTile& tile) {
        const uint32_t lane = threadIdx.x % 32, rows = tile.item.rows * tile.group;
        const Target target(tile.p, tile.item);
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float total = sum[m][h];
                total += shuffle_xor(total, 1);
                total += shuffle_xor(total, 2);
                const uint32_t packed = row0 + 16 * m + lane / 4 + 8 * h;
                if (packed >= rows) continue;
                const PackedRow row(packed, tile.group, tile.kv_head);
                const float factor = total != 0 ? 1.0f / total : 0.0f;
                float* out = target.row(tile.p, row) + lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < COLS; i++) {
                    *reinterpret_cast<float2*>(out + 8 * i) = {o[m][i][2 * h] * factor, o[m][i][2 * h + 1] * factor};
                }
                if (lane % 4 == 0) target.store_lse(tile.p, row, total != 0, max[m][h] / LOG2_E + logf(total));
            }
        }
    }
};
