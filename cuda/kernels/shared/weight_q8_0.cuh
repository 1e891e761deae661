// Q8_0: blocks of 32 codes (i8) with a scale (f16). Planes: codes, 32 bytes a block; scales.
#pragma once
#include "codes.cuh"

struct WeightQ8_0 {
    static constexpr uint32_t BLOCK = 32, UNITS = 2, RUNS = 1;
    static constexpr bool LEAST = false;
    static constexpr float ONE = 1;
    struct Unit {
        uint4 codes;
        float scale;
    };

    DEVICE static Unit load(const unsigned char* row, uint32_t blocks, uint32_t unit) {
        return {load_once(row + 16 * unit), load_half(row + 32 * blocks + unit / 2 * 2)};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t) { return RUN * unit; }
    DEVICE static Scale scale(const Unit& loaded, uint32_t, uint32_t) { return {loaded.scale, 0}; }
    DEVICE static void codes(const Unit& loaded, uint32_t, uint32_t, uint32_t word, float (&x)[4]) {
        widen_bytes(word_of(loaded.codes, word) ^ 0x80808080, 128, x);
    }
};
