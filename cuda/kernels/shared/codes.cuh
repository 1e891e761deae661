// Packed weights in device memory, and codes as numbers.
//
// A row of a weight has its blocks' pieces apart, in planes: first the codes of all blocks, last what is shortest, so that every
// 16 bytes of codes are one aligned load, consecutive lanes' loads are consecutive, and a row takes as many bytes as in its file,
// rounded up to 16 (cuda/src/kernels/packed.rs arranges it). A *unit* is 16 bytes of codes: one run of 16 consecutive elements of
// 8 bits, or two of 4 bits, whose columns may lie apart. A run has one scale.
//
// A format is a structure in weight_*.cuh:
//
//   BLOCK           elements of a block
//   UNITS, RUNS     units of a block, runs of a unit
//   LEAST           whether elements have a least value
//   Unit            what is loaded of a unit: codes, and what its scales are made of
//   load            the unit `unit` of a row of `blocks` blocks
//   column          the first column of a run
//   scale           the scale of a run: an element is step * code - least
//   codes           four consecutive codes of a run, those of its word `word`, as numbers times ONE, a power of two
#pragma once
#include "common.cuh"

constexpr uint32_t RUN = 16;

struct Scale {
    float step, least;
};

// 2^23: a float with these upper bits has an integer below 2^23 in its lower ones.
constexpr uint32_t INTEGER_BITS = 0x4b000000;
constexpr float INTEGER = 8388608.0f;

// Four bytes, each less `zero`: exact for integers.
DEVICE void widen_bytes(uint32_t bytes, float zero, float (&x)[4]) {
    const float offset = INTEGER + zero;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) x[i] = as_float(permute(bytes, INTEGER_BITS, 0x7650 + i)) - offset;
}

// A word of 16 bytes; the number is known when the kernel is compiled.
DEVICE uint32_t word_of(const uint4& words, uint32_t word) {
    return word == 0 ? words.x : word == 1 ? words.y : word == 2 ? words.z : words.w;
}

// The codes of 4 bits in a word of a unit, a byte each: byte j of a unit has element j of either run.
DEVICE uint32_t nibbles(const uint4& codes, uint32_t run, uint32_t word) { return word_of(codes, word) >> 4 * run & 0x0f0f0f0f; }

DEVICE float load_half(const unsigned char* from) { return widen(*reinterpret_cast<const f16*>(from)); }
DEVICE uint32_t load_word(const unsigned char* from) { return *reinterpret_cast<const uint32_t*>(from); }
