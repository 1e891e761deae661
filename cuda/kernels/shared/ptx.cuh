// Every PTX instruction that a kernel uses, wrapped in one function: here, or in bulk.cuh and wgmma.cuh for those that only compute
// capability 9.0 has. With LAGOON_SHIM the same functions come from cuda/shim/machine.h, which models
// them on the host; kernels include these files and no other header of a toolkit.
//
// Invariants: all 32 lanes of a warp call a warp's function together; all threads of a block call sync_block together; every
// thread calls wait_for_grids before it touches memory that an earlier grid may have written or may still read.
//
// Programmatic dependent launch (capability 9.0): a kernel may begin while the kernel before it in its stream still runs. Why
// that changes no result:
//
// * Accesses. Every kernel calls wait_for_grids in every thread, and nothing but parameters, indices and weights comes before
//   it. Weights are written when a model is loaded, by copies that the host has waited for, and freed after the device was;
//   those that a kernel ahead has unpacked are read behind the wait (HeadProductParams).
// * Order. The wait returns when the grid before has completed and its writes are visible; launch_dependents only lets blocks
//   become resident, so it may stand first. A grid completes when all of its threads have ended, hence after their waits, hence
//   after the grid before it: kernels of a stream complete in order, and a wait for one is a wait for all. Memory that steps
//   use again (scratch, activations, uploads) is therefore written after its last reader has completed.
// * Other work. Only a kernel directly behind another of these kernels is launched so (cuda/src/driver/stream.rs). Copies, fills,
//   events, graphs, library calls and waits for other streams stand between kernels as before: what follows them waits for them
//   as a whole, and they wait for the completion of what they follow.
// * Progress. Blocks that wait hold registers and shared memory, but become resident only when all blocks of the grid before are.
#pragma once
#include <stdint.h>

#ifdef LAGOON_SHIM
#include "../../shim/machine.h"
#else

#define DEVICE __device__ __forceinline__
// A kernel whose own code waits for the grids before it: every thread calls wait_for_grids. It has one parameter. The launch
// bounds give the compiler its register budget.
#define KERNEL_THAT_WAITS(NAME, THREADS, BLOCKS, PARAMS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ PARAMS p)
// Any other kernel, which waits first.
#define KERNEL(NAME, THREADS, BLOCKS, PARAMS)            \
    DEVICE void NAME##_body(const PARAMS& p);            \
    KERNEL_THAT_WAITS(NAME, THREADS, BLOCKS, PARAMS) {   \
        launch_dependents();                             \
        wait_for_grids();                                \
        NAME##_body(p);                                  \
    }                                                    \
    DEVICE void NAME##_body(const PARAMS& p)
// Static shared memory, and the launch's dynamic shared memory.
#define SHARED __shared__
#define DYNAMIC_SHARED(NAME) extern __shared__ __align__(16) unsigned char NAME[]
// Programmatic dependent launch: lets the stream's next grid begin once every block has called it, and waits until the grids
// before this one have completed, with all that they wrote visible. No instruction where capability 9.0 is not compiled for: the
// driver layer launches dependents only of code that has them (cuda/src/driver/module.rs).
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// An address in shared memory as the instructions take it.
typedef uint32_t SharedAddress;

DEVICE SharedAddress shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};

DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t as_bits(float x) { return __float_as_uint(x); }
DEVICE float widen(float x) { return x; }
DEVICE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE float widen(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

template <typename T>
DEVICE T narrow(float x);
template <>
DEVICE float narrow<float>(float x) {
    return x;
}
template <>
DEVICE f16 narrow<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <>
DEVICE bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Four bytes out of eight (those of `low` are 0 to 3, those of `high` 4 to 7): byte i of the result has the number that is in bits
// 4 i to 4 i + 2 of `selector`.
DEVICE uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) { return __byte_perm(low, high, selector); }

// Sums of two f16 each in a register.
DEVICE uint32_t add_halves(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Two numbers rounded into one register, `low` in its lower half.
template <typename T>
DEVICE uint32_t pack(float low, float high);
template <>
DEVICE uint32_t pack<f16>(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <>
DEVICE uint32_t pack<bf16>(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// d += a · b: a is 16 by 16 in row order, b is 16 by 8 in column order, d is 16 by 8 in f32. Fragments as in the PTX
// manual's "mma.m16n8k16": with g = lane / 4 and t = lane % 4, a holds (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
// and the element after each; b holds rows 2t and 2t + 8 (and the ones after) of column g; d holds (g, 2t), (g, 2t + 1),
// (g + 8, 2t), (g + 8, 2t + 1).
template <typename T>
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
DEVICE void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
DEVICE void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 by 8 matrices of 16-bit elements from shared memory: lanes 8i to 8i + 7 give the rows of matrix i, 16 bytes each;
// r[i] holds row lane / 4, elements 2 (lane % 4) and the one after, of matrix i (transposed first for `_trans`).
DEVICE void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Copies the first `bytes` (0 to 16) of 16 bytes to shared memory and zeroes the rest there, without waiting; past the first-level
// cache. `from` is an accessible address also where nothing is copied: the manual does not say that it is not translated.
DEVICE void copy_async(SharedAddress to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(bytes)
                 : "memory");
}
// Ends a group of this thread's copies; copy_wait<N> waits until at most N groups are in flight.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// The same number, which stays in a register: ptxas computes cheap expressions anew at each use.
DEVICE uint32_t pinned(uint32_t x) {
    uint32_t y;
    asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE uint64_t pinned(uint64_t x) {
    uint64_t y;
    asm volatile("mov.b64 %0, %1;" : "=l"(y) : "l"(x));
    return y;
}

DEVICE void sync_block() { __syncthreads(); }
// Warps of a block that have `threads` threads meet at its barrier `barrier`, 1 to 15.
DEVICE void sync_warps(uint32_t barrier, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE uint64_t shuffle_xor(uint64_t x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE uint64_t shuffle_up(uint64_t x, int delta) { return __shfl_up_sync(0xffffffffu, x, delta); }
// The largest number of a warp's lanes.
DEVICE uint32_t warp_max_of(uint32_t x) {
    uint32_t y;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
// The lanes for which it is true, the first in the lowest bit.
DEVICE uint32_t lanes_where(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE uint32_t count_bits(uint32_t x) { return __popc(x); }

// 2^x, off by 2 units in the last place at most; 0 for negative infinity.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / y, off by 2 units in the last place at most; 0 where y is beyond 2^126.
DEVICE float divide_fast(float x, float y) {
    float q;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
    return q;
}

// A 16-byte load that does not displace what other threads share: weights are read once.
// Not by the non-coherent path (.nc), whose loads ptxas moves behind wait_for_grids.
DEVICE uint4 load_once(const void* from) {
    uint4 y;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return y;
}

// Accesses of 8 and 16 bytes to global memory, at addresses aligned to as many.
DEVICE uint64_t load_8(const void* from) { return *static_cast<const uint64_t*>(from); }
DEVICE void store_8(void* to, uint64_t x) { *static_cast<uint64_t*>(to) = x; }
DEVICE float4 load_16(const void* from) { return *static_cast<const float4*>(from); }
DEVICE uint4 load_words(const void* from) { return *static_cast<const uint4*>(from); }
// A load that is not moved ahead of other instructions in order, as `mma`, which would take registers.
DEVICE float load_float_in_order(const void* from) {
    float y;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(y) : "l"(__cvta_generic_to_global(from)));
    return y;
}
// nvcc makes four stores of some assignments of float4.
DEVICE void store_16(void* to, float4 x) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
}

DEVICE uint64_t add_shared(uint64_t* to, uint64_t x) {
    return atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}
DEVICE uint32_t add_shared(uint32_t* to, uint32_t x) { return atomicAdd(to, x); }
DEVICE uint32_t min_shared(uint32_t* to, uint32_t x) { return atomicMin(to, x); }
#endif
