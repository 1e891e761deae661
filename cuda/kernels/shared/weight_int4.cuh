// INT4_G32, INT4_G64, INT4_G128: blocks of 32, 64 or 128 codes with a header, an f32 whose low 8 bits are the zero point and count
// as zeros of the scale. Planes: codes, 16 bytes for 32 elements (as Q4_0's); headers.
#pragma once
#include "codes.cuh"

template <uint32_t GROUP>
struct WeightInt4 {
    static constexpr uint32_t BLOCK = GROUP, UNITS = GROUP / 32, RUNS = 2;
    static constexpr bool LEAST = false;
    static constexpr float ONE = 1;
    struct Unit {
        uint4 codes;
        uint32_t header;
    };

    DEVICE static Unit load(const unsigned char* row, uint32_t blocks, uint32_t unit) {
        return {load_once(row + 16 * unit), load_word(row + 16 * UNITS * blocks + unit / UNITS * 4)};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return 32 * unit + RUN * run; }
    DEVICE static Scale scale(const Unit& loaded, uint32_t, uint32_t) { return {as_float(loaded.header & ~255u), 0}; }
    DEVICE static void codes(const Unit& loaded, uint32_t, uint32_t run, uint32_t word, float (&x)[4]) {
        widen_bytes(nibbles(loaded.codes, run, word), as_float(INTEGER_BITS | (loaded.header & 255)) - INTEGER, x);
    }
};
typedef WeightInt4<32> WeightInt4G32;
typedef WeightInt4<64> WeightInt4G64;
typedef WeightInt4<128> WeightInt4G128;
