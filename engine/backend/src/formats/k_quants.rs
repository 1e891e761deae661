//! Blocks of 256 codes in sub-blocks whose scales are codes themselves: Q2_K to Q6_K.
//!
//! | format | bytes of a block | sub-block | element |
//! |---|---|---|---|
//! | Q2_K | 16 of scales, 64 of codes, scale f16, least f16 | 16 | `scale * s * code - least * m` |
//! | Q3_K | 32 of third bits, 64 of codes, 12 of scales, scale f16 | 16 | `scale * (s - 32) * (code - 4)` |
//! | Q4_K | scale f16, least f16, 12 of scales, 128 of codes | 32 | `scale * s * code - least * m` |
//! | Q5_K | scale f16, least f16, 12 of scales, 32 of fifth bits, 128 of codes | 32 | `scale * s * code - least * m` |
//! | Q6_K | 128 of codes, 64 of upper bits, 16 of scales i8, scale f16 | 16 | `scale * s * (code - 32)` |
//!
//! Products of scales are exact in f32, so that each element is rounded once.

use super::{SUPER_ELEMENTS, half_at};

const SCALES: usize = 12;
pub(super) const Q2K_BYTES: usize = 16 + 64 + 4;
pub(super) const Q3K_BYTES: usize = 32 + 64 + SCALES + 2;
pub(super) const Q4K_BYTES: usize = 4 + SCALES + 128;
pub(super) const Q5K_BYTES: usize = 4 + SCALES + 32 + 128;
pub(super) const Q6K_BYTES: usize = 128 + 64 + 16 + 2;

/// Two bits of each of 32 bytes are a stretch of 32 elements; the first 128 elements are in the first 32 bytes.
fn two_bits(codes: &[u8], element: usize) -> u8 {
    let (half, within) = (element / 128, element % 128);
    codes[half * 32 + within % 32] >> (2 * (within / 32)) & 3
}

pub(super) fn q2k(block: &[u8; Q2K_BYTES], out: &mut [f32; SUPER_ELEMENTS]) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (scale, least) = (half_at(block, 80), half_at(block, 82));
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        let step = scale * f32::from(scales[sub] & 15);
        let offset = least * f32::from(scales[sub] >> 4);
        for (j, out) in out.iter_mut().enumerate() {
            *out = step * f32::from(two_bits(codes, sub * 16 + j)) - offset;
        }
    }
}

pub(super) fn q3k(block: &[u8; Q3K_BYTES], out: &mut [f32; SUPER_ELEMENTS]) {
    let (third, codes, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let scale = half_at(block, 108);
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        // Four bits of 16 scales in 8 bytes, two more of each in 4 bytes.
        let low = if sub < 8 { scales[sub] & 15 } else { scales[sub - 8] >> 4 };
        let high = scales[8 + sub % 4] >> (2 * (sub / 4)) & 3;
        let step = scale * (f32::from(low | high << 4) - 32.0);
        for (j, out) in out.iter_mut().enumerate() {
            let element = sub * 16 + j;
            let upper = third[element % 32] >> (element / 32) & 1;
            *out = step * (f32::from(two_bits(codes, element) | upper << 2) - 4.0);
        }
    }
}

/// Scale and least value of sub-block `sub` of eight, 6 bits each.
fn six_bits(scales: &[u8], sub: usize) -> (f32, f32) {
    let (scale, least) = if sub < 4 {
        (scales[sub] & 63, scales[sub + 4] & 63)
    } else {
        (scales[sub + 4] & 15 | scales[sub - 4] >> 6 << 4, scales[sub + 4] >> 4 | scales[sub] >> 6 << 4)
    };
    (f32::from(scale), f32::from(least))
}

/// Four bits of element `element`: 32 bytes have 64 elements, the first 32 in their low halves.
fn four_bits(codes: &[u8], element: usize) -> u8 {
    let code = codes[element / 64 * 32 + element % 32];
    if element % 64 < 32 { code & 15 } else { code >> 4 }
}

pub(super) fn q4k(block: &[u8; Q4K_BYTES], out: &mut [f32; SUPER_ELEMENTS]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    let (scales, codes) = (&block[4..4 + SCALES], &block[4 + SCALES..]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (s, m) = six_bits(scales, sub);
        let (step, offset) = (scale * s, least * m);
        for (j, out) in out.iter_mut().enumerate() {
            *out = step * f32::from(four_bits(codes, sub * 32 + j)) - offset;
        }
    }
}

pub(super) fn q5k(block: &[u8; Q5K_BYTES], out: &mut [f32; SUPER_ELEMENTS]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    let (scales, fifth, codes) = (&block[4..16], &block[16..48], &block[48..]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (s, m) = six_bits(scales, sub);
        let (step, offset) = (scale * s, least * m);
        for (j, out) in out.iter_mut().enumerate() {
            let upper = fifth[j] >> sub & 1;
            *out = step * f32::from(four_bits(codes, sub * 32 + j) | upper << 4) - offset;
        }
    }
}

pub(super) fn q6k(block: &[u8; Q6K_BYTES], out: &mut [f32; SUPER_ELEMENTS]) {
    let (codes, upper, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = half_at(block, 208);
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        let step = scale * f32::from(scales[sub].cast_signed());
        for (j, out) in out.iter_mut().enumerate() {
            let (half, within) = (sub * 16 / 128, (sub * 16 + j) % 128);
            // 64 bytes have 128 elements, the first 64 in their low halves.
            let code = codes[half * 64 + within % 64];
            let low = if within < 64 { code & 15 } else { code >> 4 };
            let high = upper[half * 32 + within % 32] >> (2 * (within / 32)) & 3;
            *out = step * (f32::from(low | high << 4) - 32.0);
        }
    }
}
