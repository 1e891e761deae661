// The instructions of compute capability 9.0 that let the copy engine fill shared memory: barriers there, and copies of boxes.
// Their host model is in cuda/shim/async.h.
//
// Invariants: a barrier is 8 bytes of shared memory, aligned to 8, initialized once by one thread; fence_shared_for_async and
// sync_block come before others use it. Phases are counted from 0 and alternate in parity; one is over when its arrivals and
// the bytes that it expects have come. Waiting for parity 1 passes before the first phase is over.
#pragma once
#include "ptx.cuh"

#ifndef LAGOON_SHIM

DEVICE void barrier_init(SharedAddress barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// So many more bytes will be copied in this phase: said before the copies, and before the phase's last arrival.
DEVICE void barrier_expect(SharedAddress barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// What this thread did before is visible to who waits for the phase.
DEVICE void barrier_arrive(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of this parity is over: the current one or the one before. A wait of seconds is a mistake, and ends
// the kernel with an error instead of never.
DEVICE void barrier_wait(SharedAddress barrier, uint32_t parity) {
#pragma unroll 1
    for (uint32_t tries = 0; tries < 1u << 24; tries++) {
        uint32_t over;
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
            : "=r"(over)
            : "r"(barrier), "r"(parity)
            : "memory");
        if (over) return;
    }
    asm volatile("trap;");
}

// Copies the box of a tensor map whose first element is at `column` and `row` to shared memory, aligned to 128 bytes, where it
// is swizzled by the address's bits; what is not of the tensor becomes zeros, and the tensor's first element is touched then (seen
// on an H200: without memory there, the kernel ends with an illegal address). The barrier gets the box's bytes.
DEVICE void copy_box(SharedAddress to, const void* map, int32_t column, int32_t row, SharedAddress barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
// Brings a tensor map near before it is first used.
DEVICE void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Makes this thread's ordinary writes and finished copies to shared memory visible to the copy engine and to products.
DEVICE void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif
