// FP8: blocks of 128 codes (E4M3FN) with a scale (f32). Planes: codes, 128 bytes a block; scales. The loader refuses codes that are
// no numbers; here they are some number.
#pragma once
#include "codes.cuh"

struct WeightFp8 {
    static constexpr uint32_t BLOCK = 128, UNITS = 8, RUNS = 1, SHARE = 8, HEADS = 1;
    static constexpr bool LEAST = false, UPPER = false;
    static constexpr float ONE = 0x1p-8f;
    struct Head {
        float scale;
    };

    DEVICE static constexpr uint32_t head_plane(uint32_t) { return 128; }
    DEVICE static constexpr uint32_t head_bytes(uint32_t) { return 4; }
    template <typename At>
    DEVICE static Head head(At at, uint32_t unit) {
        return {as_float(load_word(at(0, unit / UNITS * 4)))};
    }
    DEVICE static uint32_t column(uint32_t unit, uint32_t) { return RUN * unit; }
    DEVICE static Scale scale(const Head& head, uint32_t, uint32_t) { return {head.scale, 0}; }
    // The codes' numbers, times ONE: exponent and fraction are an f16's.
    DEVICE static void halves(uint32_t codes, uint32_t, const Head&, uint32_t, uint32_t, uint32_t (&pairs)[2]) {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t two = i == 0 ? codes << 8 : codes;
            pairs[i] = (two & 0x80008000) | (two >> 1 & 0x3f803f80);
        }
    }
};
