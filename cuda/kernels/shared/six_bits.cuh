// Scales of 6 bits: a block of 256 elements has two f16, and 12 bytes with a scale and a least value for each of eight sub-blocks.
#pragma once
#include "codes.cuh"

// The scale of sub-block `2 pair + run`. The lower four of each are in a byte of their own; the upper four have their upper two bits
// beside the lower ones.
DEVICE Scale six_bits(const uint4& head, uint32_t pair, uint32_t run) {
    const uint32_t shift = pair % 2 * 16;
    const uint32_t a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
    const uint32_t steps = pair < 2 ? a & 0x3f3f : (c & 0x0f0f) | (a >> 2 & 0x3030);
    const uint32_t leasts = pair < 2 ? b & 0x3f3f : (c >> 4 & 0x0f0f) | (b >> 2 & 0x3030);
    const float step = as_float(permute(steps, INTEGER_BITS, 0x7650 + run)) - INTEGER;
    const float least = as_float(permute(leasts, INTEGER_BITS, 0x7650 + run)) - INTEGER;
    return {widen(f16{static_cast<uint16_t>(head.x)}) * step, widen(f16{static_cast<uint16_t>(head.x >> 16)}) * least};
}
