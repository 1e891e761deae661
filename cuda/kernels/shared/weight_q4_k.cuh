// Q4_K: blocks of 256 codes in eight sub-blocks with a scale and a least value each. Planes: codes, 128 bytes a block (32 bytes have
// two sub-blocks, the first in their low halves); heads, 16 bytes.
#pragma once
#include "six_bits.cuh"

struct WeightQ4K {
    static constexpr uint32_t BLOCK = 256, UNITS = 8, RUNS = 2, SHARE = 2, HEADS = 1;
    static constexpr bool LEAST = true, UPPER = false;
    static constexpr float ONE = TINY;
    struct Head {
        uint4 words;
    };

    DEVICE static constexpr uint32_t head_plane(uint32_t) { return 128; }
    DEVICE static constexpr uint32_t head_bytes(uint32_t) { return 8; }
    template <typename At>
    DEVICE static Head head(At at, uint32_t unit) {
        return {load_words(at(0, unit / UNITS * 16))};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return unit / 2 * 64 + unit % 2 * RUN + 32 * run; }
    DEVICE static Scale scale(const Head& head, uint32_t unit, uint32_t run) {
        return scale_of(six_bits(head.words, unit % UNITS >= 4), unit % 4 / 2 * 2 + run, run == 0 ? 1.0f : HIGH);
    }
    DEVICE static void halves(uint32_t codes, uint32_t, const Head&, uint32_t, uint32_t run, uint32_t (&pairs)[2]) {
        pair_nibbles(codes, run, pairs);
    }
};
