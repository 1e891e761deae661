// Q5_K: as Q4_K, with a fifth bit. Planes: codes, 128 bytes a block; fifth bits, 32 bytes (a byte has those of eight sub-blocks);
// heads, 16 bytes.
#pragma once
#include "six_bits.cuh"

struct WeightQ5K {
    static constexpr uint32_t BLOCK = 256, UNITS = 8, RUNS = 2;
    static constexpr bool LEAST = true;
    static constexpr float ONE = 1;
    struct Unit {
        uint4 codes, fifth, head;
    };

    DEVICE static Unit load(const unsigned char* row, uint32_t blocks, uint32_t unit) {
        const uint32_t block = unit / UNITS;
        return {load_once(row + 16 * unit), load_words(row + 128 * blocks + 32 * block + unit % 2 * 16),
                load_words(row + 160 * blocks + 16 * block)};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return unit / 2 * 64 + unit % 2 * RUN + 32 * run; }
    DEVICE static Scale scale(const Unit& loaded, uint32_t unit, uint32_t run) {
        return six_bits(loaded.head, unit % UNITS / 2, run);
    }
    DEVICE static void codes(const Unit& loaded, uint32_t unit, uint32_t run, uint32_t word, float (&x)[4]) {
        const uint32_t fifth = word_of(loaded.fifth, word) >> (unit % UNITS / 2 * 2 + run) & 0x01010101;
        widen_bytes(nibbles(loaded.codes, run, word) | fifth << 4, 0, x);
    }
};
