// MXFP4: blocks of 32 codes (E2M1) with an exponent (u8). Planes: codes, 16 bytes a block (as Q4_0's); exponents.
#pragma once
#include "codes.cuh"

struct WeightMxfp4 {
    static constexpr uint32_t BLOCK = 32, UNITS = 1, RUNS = 2, SHARE = 1, HEADS = 1;
    static constexpr bool LEAST = false, UPPER = false;
    static constexpr float ONE = 0x1p-15f;
    struct Head {
        uint32_t exponent;
    };

    DEVICE static constexpr uint32_t head_plane(uint32_t) { return 16; }
    DEVICE static constexpr uint32_t head_bytes(uint32_t) { return 4; }
    template <typename At>
    DEVICE static Head head(At at, uint32_t unit) {
        return {*at(0, unit)};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return BLOCK * unit + RUN * run; }
    // Half of the scale, whose least two are below the least normal number.
    DEVICE static Scale scale(const Head& head, uint32_t, uint32_t) {
        const uint32_t e = head.exponent;
        return {as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23), 0};
    }
    // Twice the numbers of E2M1, times ONE: its exponent and fraction are the last bits of an f16's exponent and its first one behind.
    DEVICE static void halves(uint32_t codes, uint32_t, const Head&, uint32_t, uint32_t run, uint32_t (&pairs)[2]) {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t two = codes >> (4 * run + 8 * i);
            pairs[i] = (two << 9 & 0x0e000e00) | (two << 12 & 0x80008000);
        }
    }
};
