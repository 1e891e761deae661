// Rows of KV in 8 bits, as engine/types/src/kv_dtype.rs defines them: an E4M3 code for each of a head's elements, zeros up to a
// multiple of four, then the row's scale as f32. Bits alone decide, so that all devices store the same bytes.
#pragma once
#include "common.cuh"

constexpr uint32_t TYPE_FP8 = 4;

struct e4m3 {
    uint8_t bits;
};

// Without the row's scale. Subnormal codes are multiples of 2^-9.
DEVICE float widen(e4m3 x) {
    const uint32_t magnitude = x.bits & 0x7f;
    const float value = magnitude < 8 ? static_cast<float>(magnitude) / 512.0f : as_float((magnitude << 20) + (120u << 23));
    return x.bits & 0x80 ? -value : value;
}

// The code of `x`, of magnitude at most 464, rounded to nearest even.
DEVICE uint32_t code_of(float x) {
    const uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    // The last bit of a number between 2^14 and 2^15 is worth 2^-9, as that of a subnormal code is.
    const uint32_t subnormal = as_bits(as_float(magnitude) + 16384.0f) - as_bits(16384.0f);
    return (magnitude < 121u << 23 ? subnormal : normal) | (bits >> 24 & 0x80);
}

// Elements from a row to its scale, and to the next row.
DEVICE uint32_t scale_at(uint32_t dim) { return (dim + 3) / 4 * 4; }

// What a row's elements are multiplied with.
template <typename T>
DEVICE float row_scale(const T*, uint32_t) {
    return 1.0f;
}
template <>
DEVICE float row_scale<e4m3>(const e4m3* row, uint32_t dim) {
    return *reinterpret_cast<const float*>(row + scale_at(dim));
}

// Stores `dim` elements as a row, by one warp.
DEVICE void store_row(Address row, const float* from, uint32_t dim) {
    const uint32_t lane = threadIdx.x % 32;
    uint64_t largest = 0;
    const auto include = [&largest](uint64_t bits) { largest = bits > largest ? bits : largest; };
    for (uint32_t d = lane; d < dim; d += 32) include(as_bits(from[d]) & 0x7fffffffu);
    for (int mask = 16; mask > 0; mask /= 2) include(shuffle_xor(largest, mask));
    const uint32_t bits = static_cast<uint32_t>(largest);
    const bool finite = bits < 0x7f800000u, scaled = bits > 0 && finite;
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) > 0x680000u ? 1 : 0);
    const uint32_t scale = scaled ? (exponent > 35 ? exponent - 8 : 27) << 23 : (finite ? 0 : 0x7fc00000u);
    const float factor = scaled ? as_float((254u << 23) - scale) : 0.0f;
    for (uint32_t d = 4 * lane; d < dim; d += 128) {
        uint32_t codes = 0;
        for (uint32_t i = 0; i < 4 && d + i < dim && scaled; i++) codes |= code_of(from[d + i] * factor) << 8 * i;
        *at<uint32_t>(row + d) = codes;
    }
    if (lane == 0) *at<uint32_t>(row + scale_at(dim)) = scale;
}

// Stores a token's K and V, `kv_heads` rows each, which lie behind each other at `from`: by all warps of a block.
DEVICE void store_rows(const KvView& kv, uint32_t slot, const float* from, uint32_t kv_heads, uint32_t dim) {
    for (uint32_t row = threadIdx.x / 32; row < 2 * kv_heads; row += blockDim.x / 32) {
        const uint64_t to = slot * kv.token_stride + row % kv_heads * kv.head_stride;
        store_row((row < kv_heads ? kv.k : kv.v) + to, from + static_cast<uint64_t>(row) * dim, dim);
    }
}
