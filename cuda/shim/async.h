// The host model of the instructions in shared/bulk.cuh and shared/wgmma.cuh: barriers in shared memory, the copy engine,
// products of warpgroups. Included by machine.h.
//
// Asynchronous work is done when it is issued (order 0), when a thread has to wait for it (1 and 2), or in
// between (3); copies overtake each other. The asynchronous proxy sees another copy of shared memory: writes of threads
// become visible there when all lanes of their warp have fenced. Refused are: addresses and sizes that are not
// aligned, barriers that are not initialized or were overwritten, bytes that a barrier does not expect, products without a
// fence after the last wait, and whatever is still in flight when a block ends.
#pragma once

inline void barrier_init(SharedAddress barrier, uint32_t arrivals) { shim::init_barrier(barrier, arrivals); }
inline void barrier_expect(SharedAddress barrier, uint32_t bytes) { shim::expect_bytes(barrier, bytes); }
inline void barrier_arrive(SharedAddress barrier) { shim::arrive(barrier); }
inline void barrier_wait(SharedAddress barrier, uint32_t parity) { shim::wait_for_phase(barrier, parity); }
inline void prefetch_map(const void* map) { shim::map_at(map); }
inline void copy_box(SharedAddress to, const void* map, int32_t column, int32_t row, SharedAddress barrier) {
    shim::start_copy(to, map, column, row, barrier);
}

inline void fence_shared_for_async() { shim::fence_async(); }
inline void warpgroup_fence() { shim::self()->fenced = true; }
inline void warpgroup_commit() { shim::self()->commits++; }
template <int N>
void warpgroup_wait() {
    shim::finish_products(N);
}
template <int N>
void keep_registers() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "as setmaxnreg takes");
    shim::keep_registers(N);
}
template <int N>
void take_registers() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "as setmaxnreg takes");
    shim::take_registers(N);
}
template <int N>
void hold(float (&)[N]) {}
inline void compute_before_wait(float) {}

inline uint64_t describe(SharedAddress start, uint32_t leading, uint32_t stride) {
    // An offset in shared memory, which starts at a multiple of 1024.
    const uint64_t offset = start - reinterpret_cast<uintptr_t>(shim::block()->shared);
    return (offset >> 4 & 0x3fff) | static_cast<uint64_t>(leading >> 4 & 0x3fff) << 16 |
           static_cast<uint64_t>(stride >> 4 & 0x3fff) << 32 | 1ull << 62;
}

template <typename T, int N>
void wgmma_shared(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
    shim::start_product({a, b, add, N}, d, nullptr, widen_all<T>);
}
template <typename T, int N>
void wgmma_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
    shim::start_product({0, b, add, N}, d, a, widen_all<T>);
}
