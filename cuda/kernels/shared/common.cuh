// What most kernels share: element access by type, sums over warps and blocks, splitting into terms.
#pragma once
#include <math.h>

#include "params.cuh"
#include "ptx.cuh"

#define NEGATIVE_INFINITY (-INFINITY)

constexpr uint32_t TYPE_F32 = 1, TYPE_F16 = 2, TYPE_BF16 = 3;
constexpr float LOG2_E = 1.4426950408889634f;

template <typename T>
DEVICE T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// The element `i` of an array whose type is known at run time only, widened. The branch is the same for all threads.
DEVICE float load_any(Address array, uint32_t type, uint64_t i) {
    if (type == TYPE_F32) return at<const float>(array)[i];
    return type == TYPE_F16 ? widen(at<const f16>(array)[i]) : widen(at<const bf16>(array)[i]);
}

DEVICE void store_any(Address array, uint32_t type, uint64_t i, float x) {
    if (type == TYPE_F32) {
        at<float>(array)[i] = x;
    } else if (type == TYPE_F16) {
        at<f16>(array)[i] = narrow<f16>(x);
    } else {
        at<bf16>(array)[i] = narrow<bf16>(x);
    }
}

// W consecutive elements, which a thread loads and stores at once: four by 128-bit accesses to f32 (64-bit ones to f16 and
// bf16) where rows and addresses are aligned (`is_wide`), else one.
constexpr uint32_t WIDE = 4;
template <int W>
struct Part {
    float x[W];
};

// Whether every row of `cols` f32 of arrays at these addresses can be accessed by four.
DEVICE bool is_wide(uint32_t cols, Address a, Address b = 0, Address c = 0, Address d = 0) {
    return cols % WIDE == 0 && (a | b | c | d) % 16 == 0;
}

template <int W>
DEVICE Part<W> load_part(const float* from) {
    if constexpr (W == 1) return {{*from}};
    else {
        const float4 x = load_16(from);
        return {{x.x, x.y, x.z, x.w}};
    }
}
template <int W>
DEVICE void store_part(float* to, const Part<W>& part) {
    if constexpr (W == 1) *to = part.x[0];
    else store_16(to, {part.x[0], part.x[1], part.x[2], part.x[3]});
}
// The elements from `i` of an array of any type, as they are stored: 16-bit ones in the lower halves. Widening them is apart
// (`widened`), because it waits for the load, and other loads come first.
template <int W>
DEVICE Part<W> load_stored(Address array, uint32_t type, uint64_t i) {
    if (type == TYPE_F32) return load_part<W>(at<const float>(array) + i);
    if constexpr (W == 1) return {{as_float(at<const uint16_t>(array)[i])}};
    else {
        const uint64_t bits = load_8(at<const uint16_t>(array) + i);
        return {{as_float(static_cast<uint32_t>(bits)), as_float(static_cast<uint32_t>(bits >> 32))}};
    }
}
template <int W>
DEVICE Part<W> widened(const Part<W>& stored, uint32_t type) {
    if (type == TYPE_F32) return stored;
    Part<W> part;
#pragma unroll
    for (int e = 0; e < W; e++) {
        const uint16_t bits = static_cast<uint16_t>(as_bits(stored.x[e / 2]) >> 16 * (e % 2));
        part.x[e] = type == TYPE_F16 ? widen(f16{bits}) : widen(bf16{bits});
    }
    return part;
}
template <int W>
DEVICE Part<W> load_part_any(Address array, uint32_t type, uint64_t i) {
    return widened(load_stored<W>(array, type, i), type);
}
template <int W>
DEVICE void store_part_any(Address array, uint32_t type, uint64_t i, const Part<W>& part) {
    if constexpr (W == 1) store_any(array, type, i, part.x[0]);
    else if (type == TYPE_F32) store_part(at<float>(array) + i, part);
    else {
        const bool half = type == TYPE_F16;
        const uint64_t low = half ? pack<f16>(part.x[0], part.x[1]) : pack<bf16>(part.x[0], part.x[1]);
        const uint64_t high = half ? pack<f16>(part.x[2], part.x[3]) : pack<bf16>(part.x[2], part.x[3]);
        store_8(at<uint16_t>(array) + i, low | high << 32);
    }
}

// Parts that a thread of a block has of a row, and loads together: 4,096 elements by four for 256 threads.
constexpr uint32_t PARTS = 4;

// The column of a thread's part `i`, where a block shares a row in turns.
template <int W>
DEVICE uint32_t part_column(uint32_t i) {
    return (threadIdx.x + i * blockDim.x) * W;
}

// Keys that order as numbers do; zeros of both signs are one.
DEVICE uint32_t ordered(float x) {
    union {
        float value;
        uint32_t bits;
    } u = {x == 0 ? 0.0f : x};
    return u.bits & 0x80000000u ? ~u.bits : u.bits | 0x80000000u;
}

DEVICE float warp_sum(float x) {
    for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

DEVICE float warp_max(float x) {
    for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
}

// The sum over a block of whole warps, for all its threads. `scratch` has 32 floats and may be used again after the next
// sync_block of the caller.
DEVICE float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    sync_block();
    float sum = 0;
    for (uint32_t i = 0; i < blockDim.x / 32; i++) sum += scratch[i];
    sync_block();
    return sum;
}

DEVICE float block_max(float x, float* scratch) {
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    sync_block();
    float max = scratch[0];
    for (uint32_t i = 1; i < blockDim.x / 32; i++) max = fmaxf(max, scratch[i]);
    sync_block();
    return max;
}

// Soft caps: cap tanh(x / cap), where x and the cap are in the same unit (natural, or of log2). tanh(a) = 1 - 2 / (1 + exp(2 a)),
// which loses some units in the last place of the cap; infinities give the cap, and NaN stays NaN.
struct SoftCap {
    float cap, twice, steep;
    DEVICE explicit SoftCap(float c) : cap(c), twice(2.0f * c), steep(2.0f * LOG2_E / c) {}
    DEVICE float of(float x) const { return cap - divide_fast(twice, 1.0f + exp2_fast(x * steep)); }
};

// f16 saturates instead of overflowing: a score stays finite. NaN stays NaN.
template <typename T>
DEVICE float saturate(float x);
template <>
DEVICE float saturate<f16>(float x) {
    return fabsf(x) > 65504.0f ? copysignf(65504.0f, x) : x;
}
template <>
DEVICE float saturate<bf16>(float x) {
    return x;
}

// `x0` and `x1` as two packed terms: x = high + low / scale, to about 22 bits in f16 and 16 in bf16.
template <typename T>
DEVICE void split(float x0, float x1, float scale, uint32_t& high, uint32_t& low) {
    high = pack<T>(x0, x1);
    low = pack<T>((x0 - widen(narrow<T>(x0))) * scale, (x1 - widen(narrow<T>(x1))) * scale);
}
