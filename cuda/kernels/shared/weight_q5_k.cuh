// Q5_K: as Q4_K, with a fifth bit. Planes: codes, 128 bytes a block; fifth bits, 32 bytes (a byte has those of eight sub-blocks);
// heads, 16 bytes.
#pragma once
#include "six_bits.cuh"

struct WeightQ5K {
    static constexpr uint32_t BLOCK = 256, UNITS = 8, RUNS = 2, SHARE = 2, HEADS = 1, UPPER_PLANE = 128;
    static constexpr bool LEAST = true, UPPER = true;
    static constexpr float ONE = TINY;
    struct Head {
        uint4 words;
    };

    DEVICE static uint32_t upper_at(uint32_t chunk) { return chunk / 2 * 32; }
    DEVICE static constexpr uint32_t head_plane(uint32_t) { return 160; }
    DEVICE static constexpr uint32_t head_bytes(uint32_t) { return 8; }
    template <typename At>
    DEVICE static Head head(At at, uint32_t unit) {
        return {load_words(at(0, unit / UNITS * 16))};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t run) { return unit / 2 * 64 + unit % 2 * RUN + 32 * run; }
    DEVICE static Scale scale(const Head& head, uint32_t unit, uint32_t run) {
        return scale_of(six_bits(head.words, unit % UNITS >= 4), unit % 4 / 2 * 2 + run, 1.0f);
    }
    DEVICE static void halves(uint32_t codes, uint32_t upper, const Head&, uint32_t unit, uint32_t run, uint32_t (&pairs)[2]) {
        const uint32_t fifth = upper >> (unit % UNITS / 2 * 2 + run) & 0x01010101;
        pair_bytes(nibbles(codes, run) | fifth << 4, pairs);
    }
};
