//! Blocks that the loader makes of quantised safetensors checkpoints: FP8 codes, and 4-bit codes with a zero point.
//!
//! | format | elements | bytes of a block | element |
//! |---|---|---|---|
//! | FP8 | 128 | scale f32, 128 codes E4M3FN | `code * scale` |
//! | INT4_G32, INT4_G64, INT4_G128 | 32, 64, 128 | header u32, half a byte a code | `(code - zero) * scale` |
//!
//! E4M3FN (OCP 8-bit floating point, 1.0) has no infinities; 0x7f and 0xff are NaN, which the loader refuses, so that kernels
//! may take them for any number. A header is an f32, the scale, whose low 8 bits are the zero point (0..=16): scales of at most 16
//! significant bits, f16 and bf16 among them, are exact, and so is every element in f32. Codes of 4 bits lie in runs of 32
//! elements: byte `j` of 16 has element `j` of the run in its low half and element `j + 16` in its high half.

use super::nibbles;
use lagoon_types::e4m3;

pub(super) const FP8_ELEMENTS: usize = 128;
pub(super) const FP8_BYTES: usize = 4 + FP8_ELEMENTS;
pub(super) const INT4_G32_BYTES: usize = 4 + 16;
pub(super) const INT4_G64_BYTES: usize = 4 + 32;
pub(super) const INT4_G128_BYTES: usize = 4 + 64;

/// Elements of a run of 4-bit codes.
pub const INT4_RUN: usize = 32;
/// The largest zero point of an INT4 header.
pub const INT4_ZERO_MAX: u8 = 16;
/// Bits of a header that are not the scale.
const ZERO_BITS: u32 = 0xff;

/// The header of a block of 4-bit codes; `None` if the scale has more than 16 significant bits or is not finite, or the zero point
/// is above [`INT4_ZERO_MAX`].
#[must_use]
pub fn int4_header(scale: f32, zero: u8) -> Option<u32> {
    let bits = scale.to_bits();
    let fits = scale.is_finite() && bits & ZERO_BITS == 0 && zero <= INT4_ZERO_MAX;
    fits.then_some(bits | u32::from(zero))
}

pub(super) fn fp8(block: &[u8; FP8_BYTES], out: &mut [f32; FP8_ELEMENTS]) {
    let (scale, codes) = block.split_at(4);
    let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
    for (code, out) in codes.iter().zip(out) {
        *out = e4m3::decode(*code) * scale;
    }
}

/// A block of `LEN` codes in `BYTES` bytes.
pub(super) fn int4<const BYTES: usize, const LEN: usize>(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let (header, codes) = block.split_at(4);
    let header = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let (scale, zero) = (f32::from_bits(header & !ZERO_BITS), f32::from(header.to_le_bytes()[0]));
    for (codes, out) in codes.chunks_exact(INT4_RUN / 2).zip(out.chunks_exact_mut(INT4_RUN)) {
        nibbles(codes, out, |code| (f32::from(code) - zero) * scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::WeightFormat;
    use half::{bf16, f16};

    #[test]
    fn an_fp8_block_is_its_codes_times_its_scale() {
        let scale = 0.003_1f32;
        let codes: Vec<u8> = (0..128).map(|i: u8| i.wrapping_mul(37) & 0xfe).collect();
        let block = [&scale.to_le_bytes()[..], &codes].concat();
        let mut found = Vec::new();
        WeightFormat::Fp8.decode(&block, &mut found);
        let expected: Vec<f32> = codes.iter().map(|code| e4m3::decode(*code) * scale).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn int4_elements_are_exact_for_every_zero_and_16_bit_scale() {
        let formats = [WeightFormat::Int4G32, WeightFormat::Int4G64, WeightFormat::Int4G128];
        let scales = [f16::from_f32(0.012_3).to_f32(), f16::from_bits(1).to_f32(), -bf16::from_f32(3.3e-3).to_f32()];
        for (format, scale) in formats.into_iter().flat_map(|format| scales.map(|scale| (format, scale))) {
            for zero in 0..=INT4_ZERO_MAX {
                let elements = format.block().elements;
                let code = |i: usize| u8::try_from((i * 7 + i / 16) % 16).unwrap();
                let mut block = int4_header(scale, zero).unwrap().to_le_bytes().to_vec();
                for run in 0..elements / INT4_RUN {
                    block.extend((0..16).map(|j| code(run * 32 + j) | code(run * 32 + 16 + j) << 4));
                }
                let mut found = Vec::new();
                format.decode(&block, &mut found);
                assert_eq!(found.len(), elements, "{format}");
                for (i, found) in found.into_iter().enumerate() {
                    let expected = (f64::from(code(i)) - f64::from(zero)) * f64::from(scale);
                    assert_eq!(f64::from(found), expected, "{format}, zero {zero}, element {i}");
                }
            }
        }
    }

    #[test]
    fn headers_hold_16_bit_scales_and_zero_points_up_to_16() {
        assert_eq!(int4_header(1.0, 16), Some(0x3f80_0010));
        assert_eq!(int4_header(1.0, 17), None);
        assert_eq!(int4_header(f32::INFINITY, 0), None);
        assert_eq!(int4_header(0.1, 8), None, "0.1 has 24 significant bits");
    }
}
