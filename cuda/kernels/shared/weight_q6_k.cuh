// Q6_K: blocks of 256 codes in sixteen sub-blocks with a scale (i8) each, and a scale (f16). Planes: codes, 128 bytes a block (64
// bytes have four bits of 128 elements, the first 64 in their low halves); upper bits, 64 bytes (32 bytes have two bits of each
// of those 128, the first 32 in the lowest ones); scales of sub-blocks, 16 bytes; scales.
#pragma once
#include "codes.cuh"

struct WeightQ6K {
    static constexpr uint32_t BLOCK = 256, UNITS = 8, RUNS = 2, SHARE = 1, HEADS = 2, UPPER_PLANE = 128;
    static constexpr bool LEAST = false, UPPER = true;
    static constexpr float ONE = TINY;
    struct Head {
        // Of the half of the block that the unit is in.
        uint64_t scales;
        f16 scale;
    };

    DEVICE static uint32_t upper_at(uint32_t chunk) { return 32 * chunk; }
    DEVICE static constexpr uint32_t head_plane(uint32_t h) { return h == 0 ? 192 : 208; }
    DEVICE static constexpr uint32_t head_bytes(uint32_t h) { return h == 0 ? 8 : 1; }
    template <typename At>
    DEVICE static Head head(At at, uint32_t unit) {
        return {load_8(at(0, unit / 4 * 8)), load_half(at(1, unit / UNITS * 2))};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return unit / 4 * 128 + unit % 4 * RUN + 64 * run; }
    DEVICE static Scale scale(const Head& head, uint32_t unit, uint32_t run) {
        const uint32_t four = static_cast<uint32_t>(head.scales >> 32 * run);
        const int8_t code = static_cast<int8_t>(four >> unit % 4 * 8);
        return {widen(head.scale) * static_cast<float>(code), 0};
    }
    DEVICE static void halves(uint32_t codes, uint32_t upper, const Head&, uint32_t unit, uint32_t run, uint32_t (&pairs)[2]) {
        const uint32_t two = upper >> 2 * (unit % 4 / 2 + 2 * run) & 0x03030303;
        pair_bytes(nibbles(codes, run) | two << 4, pairs);
        lessen(pairs, 32);
    }
};
