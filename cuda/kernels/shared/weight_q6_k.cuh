// Q6_K: blocks of 256 codes in sixteen sub-blocks with a scale (i8) each, and a scale (f16). Planes: codes, 128 bytes a block (64
// bytes have four bits of 128 elements, the first 64 in their low halves); upper bits, 64 bytes (32 bytes have two bits of each
// of those 128, the first 32 in the lowest ones); scales of sub-blocks, 16 bytes; scales.
#pragma once
#include "codes.cuh"

struct WeightQ6K {
    static constexpr uint32_t BLOCK = 256, UNITS = 8, RUNS = 2;
    static constexpr bool LEAST = false;
    static constexpr float ONE = 1;
    struct Unit {
        uint4 codes, upper;
        // Of the half of the block that the unit is in.
        uint64_t scales;
        float scale;
    };

    DEVICE static Unit load(const unsigned char* row, uint32_t blocks, uint32_t unit) {
        const uint32_t block = unit / UNITS, half = unit / 4 % 2;
        return {load_once(row + 16 * unit), load_words(row + 128 * blocks + 64 * block + 32 * half + unit % 2 * 16),
                load_8(row + 192 * blocks + 16 * block + 8 * half), load_half(row + 208 * blocks + 2 * block)};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return unit / 4 * 128 + unit % 4 * RUN + 64 * run; }
    DEVICE static Scale scale(const Unit& loaded, uint32_t unit, uint32_t run) {
        const uint32_t four = static_cast<uint32_t>(loaded.scales >> 32 * run);
        const int8_t code = static_cast<int8_t>(four >> unit % 4 * 8);
        return {loaded.scale * static_cast<float>(code), 0};
    }
    DEVICE static void codes(const Unit& loaded, uint32_t unit, uint32_t run, uint32_t word, float (&x)[4]) {
        const uint32_t upper = word_of(loaded.upper, word) >> 2 * (unit % 4 / 2 + 2 * run) & 0x03030303;
        widen_bytes(nibbles(loaded.codes, run, word) | upper << 4, 32, x);
    }
};
