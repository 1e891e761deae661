// FP8: blocks of 128 codes (E4M3FN) with a scale (f32). Planes: codes, 128 bytes a block; scales. The loader refuses codes that are
// no numbers; here they are some number.
#pragma once
#include "codes.cuh"

struct WeightFp8 {
    static constexpr uint32_t BLOCK = 128, UNITS = 8, RUNS = 1;
    static constexpr bool LEAST = false;
    static constexpr float ONE = 0x1p-8f;
    struct Unit {
        uint4 codes;
        float scale;
    };

    DEVICE static Unit load(const unsigned char* row, uint32_t blocks, uint32_t unit) {
        return {load_once(row + 16 * unit), as_float(load_word(row + 128 * blocks + unit / UNITS * 4))};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t) { return RUN * unit; }
    DEVICE static Scale scale(const Unit& loaded, uint32_t, uint32_t) { return {loaded.scale, 0}; }
    // The codes' numbers, times ONE: exponent and fraction are an f16's.
    DEVICE static void codes(const Unit& loaded, uint32_t, uint32_t, uint32_t word, float (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Two bytes, each the upper one of a half.
            const uint32_t two = permute(word_of(loaded.codes, word), 0, i == 0 ? 0x1404 : 0x3424);
            const uint32_t halves = (two & 0x80008000) | (two >> 1 & 0x3f803f80);
            x[2 * i] = widen(f16{static_cast<uint16_t>(halves)});
            x[2 * i + 1] = widen(f16{static_cast<uint16_t>(halves >> 16)});
        }
    }
};
