// The keys of an item: where they lie, which a query sees, and where the result goes.
#pragma once
#include "common.cuh"

// Finds keys by their index in an item's runs, ascending. An item with one run never reads the table.
struct KeyWalk {
    const KvRun* next;
    KvRun run;
    // Keys in the runs before.
    uint32_t before;

    DEVICE KeyWalk(const AttnItem& item, Address runs) : next(at<const KvRun>(runs) + item.run0), before(0) {
        if (item.runs == 1) {
            run.base = item.base;
            run.len = item.len;
            run.first_pos = item.first_pos;
        } else {
            run = *next++;
        }
    }

    // Moves to the run that holds key `index`: below the item's keys, and not before the last one sought.
    DEVICE void seek(uint32_t index) {
        while (index - before >= run.len) {
            before += run.len;
            run = *next++;
        }
    }
    DEVICE uint32_t slot(uint32_t index) const { return run.base + (index - before); }
    DEVICE uint32_t position(uint32_t index) const { return run.first_pos + (index - before); }
};

// A position after every query's.
constexpr uint32_t NOWHERE = 1u << 30;

// A key after the query, also NOWHERE, is at a distance of 2^31 or more: positions are below 2^21, and so is a window or it
// is 2^31.
DEVICE bool is_visible(uint32_t query, uint32_t key, uint32_t window) { return query - key < window; }

// Row and head of a packed row: consecutive packed rows are the query heads of one KV head, then the next row's.
struct PackedRow {
    uint32_t row, head;
    DEVICE PackedRow(uint32_t packed, uint32_t group, uint32_t kv_head)
        : row(packed / group), head(kv_head * group + packed % group) {}
};

// Where an item writes.
struct Target {
    float* out;
    float* lse;
    bool piece;

    DEVICE Target(const AttentionParams& p, const AttnItem& item) : piece(item.piece != 0) {
        out = at<float>(piece ? p.piece_out : p.out) + static_cast<uint64_t>(item.out_row) * p.heads * p.head_dim;
        lse = at<float>(piece ? p.piece_lse : p.lse) + static_cast<uint64_t>(item.out_row) * p.heads;
    }
    DEVICE float* row(const AttentionParams& p, PackedRow at) const {
        return out + (static_cast<uint64_t>(at.row) * p.heads + at.head) * p.head_dim;
    }
    // `log_sum` is natural and read only where keys were seen.
    DEVICE void store_lse(const AttentionParams& p, PackedRow at, bool seen, float log_sum) const {
        lse[static_cast<uint64_t>(at.row) * p.heads + at.head] = seen ? log_sum : piece ? NEGATIVE_INFINITY : 0.0f;
    }
};

// What a maximum is subtracted as: scores of rows that saw nothing yet give exponentials of negative infinity, not NaN.
DEVICE float finite_max(float max) { return max == NEGATIVE_INFINITY ? 0.0f : max; }
