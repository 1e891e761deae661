// INT4_G32, INT4_G64, INT4_G128: blocks of 32, 64 or 128 codes with a header, an f32 whose low 8 bits are the zero point and count
// as zeros of the scale. Planes: codes, 16 bytes for 32 elements (as Q4_0's); headers.
#pragma once
#include "codes.cuh"

template <uint32_t GROUP>
struct WeightInt4 {
    static constexpr uint32_t BLOCK = GROUP, UNITS = GROUP / 32, RUNS = 2, SHARE = GROUP / 32, HEADS = 1;
    static constexpr bool LEAST = false, UPPER = false;
    static constexpr float ONE = TINY;
    struct Head {
        uint32_t word;
    };

    DEVICE static constexpr uint32_t head_plane(uint32_t) { return 16 * UNITS; }
    DEVICE static constexpr uint32_t head_bytes(uint32_t) { return 16 / UNITS; }
    template <typename At>
    DEVICE static Head head(At at, uint32_t unit) {
        return {load_word(at(0, unit / UNITS * 4))};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return 32 * unit + RUN * run; }
    DEVICE static Scale scale(const Head& head, uint32_t, uint32_t) { return {as_float(head.word & ~255u), 0}; }
    DEVICE static void halves(uint32_t codes, uint32_t, const Head& head, uint32_t, uint32_t run, uint32_t (&pairs)[2]) {
        pair_bytes(nibbles(codes, run), pairs);
        lessen(pairs, head.word & 255);
    }
};
typedef WeightInt4<32> WeightInt4G32;
typedef WeightInt4<64> WeightInt4G64;
typedef WeightInt4<128> WeightInt4G128;
