//! Blocks of 32 codes with one scale: Q8_0, Q4_0 and Q5_0, and with a least value besides: Q4_1 and Q5_1.
//!
//! | format | bytes of a block | element |
//! |---|---|---|
//! | Q8_0 | scale f16, 32 codes i8 | `scale * code` |
//! | Q4_0 | scale f16, 16 bytes of codes | `scale * (code - 8)` |
//! | Q4_1 | scale f16, least f16, 16 bytes of codes | `scale * code + least` |
//! | Q5_0 | scale f16, fifth bits u32, 16 bytes of codes | `scale * (code - 16)` |
//! | Q5_1 | scale f16, least f16, fifth bits u32, 16 bytes of codes | `scale * code + least` |
//!
//! Byte `j` of codes has element `j` in its low half and element `j + 16` in its high half; fifth bits are by element.

use super::{ELEMENTS, half_at, nibbles};

const CODES: usize = ELEMENTS / 2;
pub(super) const Q8_0_BYTES: usize = 2 + ELEMENTS;
pub(super) const Q4_0_BYTES: usize = 2 + CODES;
pub(super) const Q4_1_BYTES: usize = 4 + CODES;
pub(super) const Q5_0_BYTES: usize = 6 + CODES;
pub(super) const Q5_1_BYTES: usize = 8 + CODES;

pub(super) fn q8_0(block: &[u8; Q8_0_BYTES], out: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 0);
    for (code, out) in block[2..].iter().zip(out) {
        *out = scale * f32::from(code.cast_signed());
    }
}

pub(super) fn q4_0(block: &[u8; Q4_0_BYTES], out: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 0);
    nibbles(&block[2..], out, |code| scale * (f32::from(code) - 8.0));
}

pub(super) fn q4_1(block: &[u8; Q4_1_BYTES], out: &mut [f32; ELEMENTS]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    nibbles(&block[4..], out, |code| scale * f32::from(code) + least);
}

pub(super) fn q5_0(block: &[u8; Q5_0_BYTES], out: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 0);
    five_bits(&block[2..], out, |code| scale * (f32::from(code) - 16.0));
}

pub(super) fn q5_1(block: &[u8; Q5_1_BYTES], out: &mut [f32; ELEMENTS]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    five_bits(&block[4..], out, |code| scale * f32::from(code) + least);
}

/// The elements of 4 bytes of fifth bits and 16 bytes of codes.
fn five_bits(bytes: &[u8], out: &mut [f32; ELEMENTS], value: impl Fn(u8) -> f32) {
    let (high, codes) = bytes.split_at(4);
    for (j, out) in out.iter_mut().enumerate() {
        let code = if j < CODES { codes[j] & 15 } else { codes[j - CODES] >> 4 };
        let fifth = high[j / 8] >> (j % 8) & 1;
        *out = value(code | fifth << 4);
    }
}
