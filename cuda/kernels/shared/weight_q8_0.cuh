// Q8_0: blocks of 32 codes (i8) with a scale (f16). Planes: codes, 32 bytes a block; scales.
#pragma once
#include "codes.cuh"

struct WeightQ8_0 {
    static constexpr uint32_t BLOCK = 32, UNITS = 2, RUNS = 1, SHARE = 2, HEADS = 1;
    static constexpr bool LEAST = false, UPPER = false;
    static constexpr float ONE = TINY;
    struct Head {
        f16 scale;
    };

    DEVICE static constexpr uint32_t head_plane(uint32_t) { return 32; }
    DEVICE static constexpr uint32_t head_bytes(uint32_t) { return 8; }
    template <typename At>
    DEVICE static Head head(At at, uint32_t unit) {
        return {load_half(at(0, unit / 2 * 2))};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t) { return RUN * unit; }
    DEVICE static Scale scale(const Head& head, uint32_t, uint32_t) { return {widen(head.scale), 0}; }
    DEVICE static void halves(uint32_t codes, uint32_t, const Head&, uint32_t, uint32_t, uint32_t (&pairs)[2]) {
        pair_bytes(codes ^ 0x80808080, pairs);
        lessen(pairs, 128);
    }
};
