// Packed weights in device memory, and codes as numbers.
//
// A row of a weight has its blocks' pieces apart, in planes: first the codes of all blocks, last what is shortest, so that every
// 16 bytes of codes are one aligned load, consecutive lanes' loads are consecutive, and a row takes as many bytes as in its file,
// rounded up to 16 (cuda/src/kernels/packed.rs arranges it). A *unit* is 16 bytes of codes: one run of 16 consecutive elements of
// 8 bits, or two of 4 bits, whose columns may lie apart. A run has one scale.
//
// Products take a row in *chunks* of 128 elements: eight runs, whose codes are CHUNK_RUNS / RUNS units.
//
// A format is a structure in weight_*.cuh:
//
//   BLOCK           elements of a block
//   UNITS, RUNS     units of a block, runs of a unit
//   SHARE           consecutive units of a chunk whose runs have the same scales
//   LEAST           whether elements have a least value
//   UPPER           whether a plane has upper bits of the codes: 32 bytes of a chunk at `upper_at`, 16 for each other unit
//   UPPER_PLANE     bytes of a block in the planes before that one
//   HEADS           planes of what scales are made of: `head_plane` bytes of a block lie before one, which has `head_bytes` of a chunk
//   Head            what the scales of a unit are made of, as stored, so that nothing waits for its load; `head` reads it
//   column          the first column of a run
//   scale           the scale of a run: an element is step * code - least
//   halves          four consecutive codes of a run, of a word of codes and of upper bits, as f16 times ONE, a power of two: the first
//                   and the third in one register, the second and the fourth in the other
#pragma once
#include "common.cuh"

constexpr uint32_t RUN = 16, CHUNK = 128, CHUNK_RUNS = CHUNK / RUN;

struct Scale {
    float step, least;
};

// 2^23: a float with these upper bits has an integer below 2^23 in its lower ones.
constexpr uint32_t INTEGER_BITS = 0x4b000000;
constexpr float INTEGER = 8388608.0f;

// Four bytes as numbers times TINY: an integer below 1,024 in an f16's bits is a number below the least normal one.
constexpr float TINY = 0x1p-24f;
DEVICE void pair_bytes(uint32_t bytes, uint32_t (&pairs)[2]) {
    pairs[0] = permute(bytes, 0, 0x4240);
    pairs[1] = permute(bytes, 0, 0x4341);
}
// Subtracts an integer below 1,024 from numbers times TINY: exact.
DEVICE void lessen(uint32_t (&pairs)[2], uint32_t integer) {
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) pairs[i] = add_halves(pairs[i], 0x80008000 | integer << 16 | integer);
}
// The codes of 4 bits of a run in a word of a unit; those of the second run are 1 / HIGH times as large.
constexpr float HIGH = 1.0f / 16;
DEVICE void pair_nibbles(uint32_t codes, uint32_t run, uint32_t (&pairs)[2]) {
    pairs[0] = codes & 0x000f000f << 4 * run;
    pairs[1] = codes >> 8 & 0x000f000f << 4 * run;
}

// A word of 16 bytes; the number is known when the kernel is compiled.
DEVICE uint32_t word_of(const uint4& words, uint32_t word) {
    return word == 0 ? words.x : word == 1 ? words.y : word == 2 ? words.z : words.w;
}

// The codes of 4 bits in a word of a unit, a byte each: byte j of a unit has element j of either run.
DEVICE uint32_t nibbles(uint32_t word, uint32_t run) { return word >> 4 * run & 0x0f0f0f0f; }

DEVICE f16 load_half(const unsigned char* from) { return *reinterpret_cast<const f16*>(from); }
DEVICE uint32_t load_word(const unsigned char* from) { return *reinterpret_cast<const uint32_t*>(from); }

// What a lane loads of a unit.
template <typename W>
struct Unit {
    uint4 codes, upper;
    typename W::Head head;
};

// The unit `unit` of a weight row of `blocks` blocks.
template <typename W>
DEVICE Unit<W> load_unit(const unsigned char* row, uint32_t blocks, uint32_t unit) {
    Unit<W> loaded = {};
    loaded.codes = load_once(row + 16 * unit);
    if constexpr (W::UPPER) {
        const uint32_t chunk = unit / (CHUNK_RUNS / W::RUNS);
        loaded.upper = load_words(row + W::UPPER_PLANE * blocks + W::upper_at(chunk) + unit % 2 * 16);
    }
    loaded.head = W::head([&](uint32_t h, uint32_t offset) { return row + W::head_plane(h) * blocks + offset; }, unit);
    return loaded;
}

// Four codes of a run, times ONE.
template <typename W>
DEVICE void widen_codes(const Unit<W>& loaded, uint32_t unit, uint32_t run, uint32_t word, float (&x)[4]) {
    uint32_t pairs[2];
    W::halves(word_of(loaded.codes, word), word_of(loaded.upper, word), loaded.head, unit, run, pairs);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        x[i] = widen(f16{static_cast<uint16_t>(pairs[i])});
        x[i + 2] = widen(f16{static_cast<uint16_t>(pairs[i] >> 16)});
    }
}
