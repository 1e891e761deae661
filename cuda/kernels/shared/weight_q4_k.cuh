// Q4_K: blocks of 256 codes in eight sub-blocks with a scale and a least value each. Planes: codes, 128 bytes a block (32 bytes have
// two sub-blocks, the first in their low halves); heads, 16 bytes.
#pragma once
#include "six_bits.cuh"

struct WeightQ4K {
    static constexpr uint32_t BLOCK = 256, UNITS = 8, RUNS = 2;
    static constexpr bool LEAST = true;
    static constexpr float ONE = 1;
    struct Unit {
        uint4 codes, head;
    };

    DEVICE static Unit load(const unsigned char* row, uint32_t blocks, uint32_t unit) {
        return {load_once(row + 16 * unit), load_words(row + 128 * blocks + unit / UNITS * 16)};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return unit / 2 * 64 + unit % 2 * RUN + 32 * run; }
    DEVICE static Scale scale(const Unit& loaded, uint32_t unit, uint32_t run) {
        return six_bits(loaded.head, unit % UNITS / 2, run);
    }
    DEVICE static void codes(const Unit& loaded, uint32_t, uint32_t run, uint32_t word, float (&x)[4]) {
        widen_bytes(nibbles(loaded.codes, run, word), 0, x);
    }
};
