// Q4_0: blocks of 32 codes with a scale (f16). Planes: codes, 16 bytes a block (byte j has element j in its low half and element
// j + 16 in its high half); scales.
#pragma once
#include "codes.cuh"

struct WeightQ4_0 {
    static constexpr uint32_t BLOCK = 32, UNITS = 1, RUNS = 2, SHARE = 1, HEADS = 1;
    static constexpr bool LEAST = false, UPPER = false;
    static constexpr float ONE = TINY;
    struct Head {
        f16 scale;
    };

    DEVICE static constexpr uint32_t head_plane(uint32_t) { return 16; }
    DEVICE static constexpr uint32_t head_bytes(uint32_t) { return 8; }
    template <typename At>
    DEVICE static Head head(At at, uint32_t unit) {
        return {load_half(at(0, 2 * unit))};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return BLOCK * unit + RUN * run; }
    DEVICE static Scale scale(const Head& head, uint32_t, uint32_t run) { return {widen(head.scale) * (run == 0 ? 1.0f : HIGH), 0}; }
    DEVICE static void halves(uint32_t codes, uint32_t, const Head&, uint32_t, uint32_t run, uint32_t (&pairs)[2]) {
        pair_nibbles(codes, run, pairs);
        lessen(pairs, 8 << 4 * run);
    }
};
