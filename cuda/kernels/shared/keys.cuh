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

constexpr uint32_t KEY_GROUP = 16;

// Where the 16-byte chunk `chunk` of a key lies in shared memory: rows padded by 16 bytes, which keeps ldmatrix free of bank
// conflicts.
template <int D>
struct PaddedRows {
    static constexpr uint32_t ROW = 2 * D + 16;
    DEVICE static uint32_t offset(uint32_t key, uint32_t chunk) { return key * ROW + chunk * 16; }
};

// Copies K and V of 16 keys at a time to shared memory, by THREADS threads together, V's plane `plane` bytes after K's. A group
// within one run, the common case, costs one address and its strides; only others look at each key. Keys beyond the item
// become zeros at NOWHERE.
template <typename T, int D, uint32_t THREADS>
struct KeyCopy {
    using Layout = PaddedRows<D>;
    static constexpr uint32_t CHUNKS = D / 8, COPIES = KEY_GROUP * CHUNKS;
    KeyWalk walk;
    const T* k;
    uint64_t token_stride;
    // From a key to its value, in elements.
    int64_t to_value;
    uint32_t keys;

    DEVICE KeyCopy(const AttentionParams& p, const AttnItem& item, uint32_t kv_head)
        : walk(item, p.runs),
          k(at<const T>(p.kv.k) + kv_head * p.kv.head_stride),
          token_stride(p.kv.token_stride),
          to_value(static_cast<int64_t>(p.kv.v - p.kv.k) / static_cast<int64_t>(sizeof(T))),
          keys(item.keys) {}

    DEVICE void copy(uint32_t thread, uint32_t first, unsigned char* stage, uint32_t plane, uint32_t* positions) {
        if (first < keys) walk.seek(first);
        if (first < keys && first - walk.before + KEY_GROUP <= walk.run.len) {
            copy_run(thread, walk.slot(first), shared_address(stage), plane);
            if (thread < KEY_GROUP) positions[thread] = walk.position(first) + thread;
        } else {
            copy_each(thread, first, shared_address(stage), plane, positions);
        }
    }

    DEVICE void copy_run(uint32_t thread, uint32_t slot, SharedAddress to, uint32_t plane) const {
        const T* from = k + slot * token_stride;
        // The distance of keys within a group fits 32 bits.
        const uint32_t stride = static_cast<uint32_t>(token_stride);
#pragma unroll
        for (uint32_t j = 0; j < (COPIES + THREADS - 1) / THREADS; j++) {
            const uint32_t i = thread + j * THREADS;
            if (COPIES % THREADS != 0 && i >= COPIES) break;
            // Where threads divide evenly among keys, a thread keeps its column.
            const bool even = THREADS % CHUNKS == 0;
            const uint32_t key = even ? thread / CHUNKS + j * (THREADS / CHUNKS) : i / CHUNKS;
            const uint32_t chunk = even ? thread % CHUNKS : i % CHUNKS;
            const T* address = from + (key * stride + chunk * 8);
            copy_async(to + Layout::offset(key, chunk), address, 16);
            copy_async(to + plane + Layout::offset(key, chunk), address + to_value, 16);
        }
    }

    DEVICE void copy_each(uint32_t thread, uint32_t first, SharedAddress to, uint32_t plane, uint32_t* positions) const {
        KeyWalk here = walk;
#pragma unroll 1
        for (uint32_t i = thread; i < COPIES; i += THREADS) {
            const uint32_t key = i / CHUNKS, chunk = i % CHUNKS, index = first + key;
            const bool valid = index < keys;
            if (valid) here.seek(index);
            // A masked copy names a key of the item, too: the store's first slot need not have memory.
            const T* address = k + (valid ? here.slot(index) : here.run.base) * token_stride + chunk * 8;
            copy_async(to + Layout::offset(key, chunk), address, valid ? 16 : 0);
            copy_async(to + plane + Layout::offset(key, chunk), address + to_value, valid ? 16 : 0);
            if (chunk == 0) positions[key] = valid ? here.position(index) : NOWHERE;
        }
    }
};

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
    // `log_sum` is natural and read only where keys were seen. A sum of weights is zero where none was, and NaN where one is no number:
    // then the output is NaN, too, and not zeros that go unnoticed.
    DEVICE void store_lse(const AttentionParams& p, PackedRow at, bool seen, float log_sum) const {
        lse[static_cast<uint64_t>(at.row) * p.heads + at.head] = seen ? log_sum : piece ? NEGATIVE_INFINITY : 0.0f;
    }
};

// What a maximum is subtracted as: scores of rows that saw nothing yet give exponentials of negative infinity, not NaN.
DEVICE float finite_max(float max) { return max == NEGATIVE_INFINITY ? 0.0f : max; }
