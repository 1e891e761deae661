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
