// MXFP4: blocks of 32 codes (E2M1) with an exponent (u8). Planes: codes, 16 bytes a block (as Q4_0's); exponents.
#pragma once
#include "codes.cuh"

struct WeightMxfp4 {
    static constexpr uint32_t BLOCK = 32, UNITS = 1, RUNS = 2;
    static constexpr bool LEAST = false;
    static constexpr float ONE = 0x1p-15f;
    struct Unit {
        uint4 codes;
        uint32_t exponent;
    };

    DEVICE static Unit load(const unsigned char* row, uint32_t blocks, uint32_t unit) {
        return {load_once(row + 16 * unit), row[16 * blocks + unit]};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return BLOCK * unit + RUN * run; }
    // Half of the scale, whose least two are below the least normal number.
    DEVICE static Scale scale(const Unit& loaded, uint32_t, uint32_t) {
        const uint32_t e = loaded.exponent;
        return {as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23), 0};
    }
    // Twice the numbers of E2M1, times ONE: its exponent and fraction are the last bits of an f16's exponent and its first one behind.
    DEVICE static void codes(const Unit& loaded, uint32_t, uint32_t run, uint32_t word, float (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Bytes 0 and 2, then 1 and 3.
            const uint32_t two = word_of(loaded.codes, word) >> (4 * run + 8 * i);
            const uint32_t halves = (two << 9 & 0x0e000e00) | (two << 12 & 0x80008000);
            x[i] = widen(f16{static_cast<uint16_t>(halves)});
            x[i + 2] = widen(f16{static_cast<uint16_t>(halves >> 16)});
        }
    }
};
