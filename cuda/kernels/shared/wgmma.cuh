// The instructions of compute capability 9.0 that are not in 8.0: products of a warpgroup (four warps) on shared memory.
//
// Invariants: all 128 threads of a warpgroup call them together. Registers that a product reads or writes belong to it until
// warpgroup_wait. What threads wrote to shared memory is fenced first (fence_shared_for_async in bulk.cuh). Written against NVIDIA's PTX manual; the host model (cuda/shim) has the same understanding of descriptors
// and layouts, so only a GPU can prove it.
#pragma once
#include "ptx.cuh"

#ifndef LAGOON_SHIM

// Orders registers and shared memory before the products that follow.
DEVICE void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products; warpgroup_wait<N> waits until at most N groups are in flight.
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The warpgroup keeps only so many registers a thread, or waits until it has so many, which others have given back: a multiple
// of 8 from 24 to 256. Contents of what is given back are lost.
template <int N>
DEVICE void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
// Keeps the compiler from moving accesses to registers across products in flight.
template <int N>
DEVICE void hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Has what `x` is computed from done before the next warpgroup_wait: ptxas moves that wait up over arithmetic (of 66 exponentials, 56
// came after it), but not over an instruction with a side effect. `x` is not negative, so that this one never runs.
DEVICE void compute_before_wait(float x) {
    asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p nanosleep.u32 0;}" ::"f"(x) : "memory");
}

// A matrix in shared memory in 128-byte swizzled atoms of 8 rows. `leading` and `stride` are in bytes: for rows along k, the
// distance of 8 rows is `stride` (and `leading` unused); for rows along the other side (values), that of 8 rows along k is
// `stride`, that of 64 columns `leading`.
DEVICE uint64_t describe(SharedAddress start, uint32_t leading, uint32_t stride) {
    return static_cast<uint64_t>(start >> 4 & 0x3fff) | static_cast<uint64_t>(leading >> 4 & 0x3fff) << 16 |
           static_cast<uint64_t>(stride >> 4 & 0x3fff) << 32 | 1ull << 62;
}

// d = a · b (+ d): a is 64 by 16 in shared memory, rows along k; b is 16 by N in shared memory, rows along k. Thread t of the
// warpgroup holds rows 16 (t / 32) + lane / 4 and 8 more, as m16n8k16 holds N / 8 times 8 columns.
template <typename T, int N>
DEVICE void wgmma_shared(float (&d)[N / 2], uint64_t a, uint64_t b, bool add);
// The same with a in registers, laid out as m16n8k16's for each warp's 16 rows, and b's rows along N.
template <typename T, int N>
DEVICE void wgmma_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add);

// The accumulators' names in the text, and as operands.
#define WGMMA_NAMES_32                       \
    "%0,%1,%2,%3,%4,%5,%6,%7,"               \
    "%8,%9,%10,%11,%12,%13,%14,%15,"         \
    "%16,%17,%18,%19,%20,%21,%22,%23,"       \
    "%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_NAMES_64                       \
    WGMMA_NAMES_32                           \
    ",%32,%33,%34,%35,%36,%37,%38,%39,"      \
    "%40,%41,%42,%43,%44,%45,%46,%47,"       \
    "%48,%49,%50,%51,%52,%53,%54,%55,"       \
    "%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_8(I)                                                                            \
    "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), \
        "+f"(d[I + 6]), "+f"(d[I + 7])
#define WGMMA_32(I) WGMMA_8(I), WGMMA_8(I + 8), WGMMA_8(I + 16), WGMMA_8(I + 24)
#define WGMMA_64(I) WGMMA_32(I), WGMMA_32(I + 32)

// One specialization; `A`, `B` and `ADD` are the names of the operands that follow the accumulators.
#define WGMMA_SHARED(TYPE, N, NAMES, ACCUMULATORS, A, B, ADD)                                  \
    template <>                                                                                \
    DEVICE void wgmma_shared<TYPE, N>(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {   \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0;"                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE         \
                     " {" NAMES "}, " A ", " B ", p, 1, 1, 0, 0;}"                             \
                     : ACCUMULATORS                                                            \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                            \
    }
#define WGMMA_REGISTERS(TYPE, N, NAMES, ACCUMULATORS, A, B, ADD)                                         \
    template <>                                                                                          \
    DEVICE void wgmma_registers<TYPE, N>(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0;"                                         \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE                   \
                     " {" NAMES "}, {" A "}, " B ", p, 1, 1, 1;}"                                        \
                     : ACCUMULATORS                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));  \
    }
#define WGMMA_OF(TYPE)                                                                                        \
    WGMMA_SHARED(TYPE, 128, WGMMA_NAMES_64, WGMMA_64(0), "%64", "%65", "%66")                                 \
    WGMMA_REGISTERS(TYPE, 64, WGMMA_NAMES_32, WGMMA_32(0), "%32,%33,%34,%35", "%36", "%37")                   \
    WGMMA_REGISTERS(TYPE, 128, WGMMA_NAMES_64, WGMMA_64(0), "%64,%65,%66,%67", "%68", "%69")

WGMMA_OF(f16)
WGMMA_OF(bf16)

#endif
