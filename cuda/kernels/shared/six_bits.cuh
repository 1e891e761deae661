// Scales of 6 bits: a block of 256 elements has two f16, and 12 bytes with a scale and a least value for each of eight sub-blocks.
#pragma once
#include "codes.cuh"

// Of a chunk: steps and least values of its four sub-blocks, a byte each, and the block's two f16.
struct SixBits {
    uint32_t steps, leasts, both;
};

// The lower four of a block's eight are in a byte of their own each; the upper four have their upper two bits beside the lower ones.
DEVICE SixBits six_bits(const uint4& head, bool upper) {
    if (!upper) return {head.y & 0x3f3f3f3f, head.z & 0x3f3f3f3f, head.x};
    return {(head.w & 0x0f0f0f0f) | (head.y >> 2 & 0x30303030), (head.w >> 4 & 0x0f0f0f0f) | (head.z >> 2 & 0x30303030), head.x};
}

// The scale of a sub-block of the four, with steps times `factor`, a power of two.
DEVICE Scale scale_of(const SixBits& six, uint32_t which, float factor) {
    const float step = widen(f16{static_cast<uint16_t>(six.both)}) * factor, least = widen(f16{static_cast<uint16_t>(six.both >> 16)});
    const float steps = as_float(permute(six.steps, INTEGER_BITS, 0x7650 + which));
    const float leasts = as_float(permute(six.leasts, INTEGER_BITS, 0x7650 + which));
    return {fmaf(steps, step, -INTEGER * step), fmaf(leasts, least, -INTEGER * least)};
}
