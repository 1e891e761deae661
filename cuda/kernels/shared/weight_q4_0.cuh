// Q4_0: blocks of 32 codes with a scale (f16). Planes: codes, 16 bytes a block (byte j has element j in its low half and element
// j + 16 in its high half); scales.
#pragma once
#include "codes.cuh"

struct WeightQ4_0 {
    static constexpr uint32_t BLOCK = 32, UNITS = 1, RUNS = 2;
    static constexpr bool LEAST = false;
    static constexpr float ONE = 1;
    struct Unit {
        uint4 codes;
        float scale;
    };

    DEVICE static Unit load(const unsigned char* row, uint32_t blocks, uint32_t unit) {
        return {load_once(row + 16 * unit), load_half(row + 16 * blocks + 2 * unit)};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return BLOCK * unit + RUN * run; }
    DEVICE static Scale scale(const Unit& loaded, uint32_t, uint32_t) { return {loaded.scale, 0}; }
    DEVICE static void codes(const Unit& loaded, uint32_t, uint32_t run, uint32_t word, float (&x)[4]) {
        widen_bytes(nibbles(loaded.codes, run, word), 8, x);
    }
};
