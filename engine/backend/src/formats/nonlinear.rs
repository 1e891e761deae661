//! Blocks whose 4-bit codes stand for the numbers of a table: IQ4_NL, IQ4_XS and MXFP4.
//!
//! | format | elements | bytes of a block | element |
//! |---|---|---|---|
//! | IQ4_NL | 32 | scale f16, 16 of codes | `scale * LEVELS[code]` |
//! | IQ4_XS | 256 | scale f16, 2 and 4 of scales, 128 of codes | `scale * (s - 32) * LEVELS[code]`, a scale `s` for 32 elements |
//! | MXFP4 | 32 | exponent u8, 16 of codes | a float of 4 bits (E2M1), times `2^(exponent - 127)` (OCP MX 1.0) |
//!
//! Byte `j` of 16 has element `j` in its low half and element `j + 16` in its high half.

use super::{ELEMENTS, SUPER_ELEMENTS, half_at, nibbles};

pub(super) const IQ4_NL_BYTES: usize = 2 + ELEMENTS / 2;
pub(super) const IQ4_XS_BYTES: usize = 2 + 2 + 4 + SUPER_ELEMENTS / 2;
pub(super) const MXFP4_BYTES: usize = 1 + ELEMENTS / 2;

/// Numbers of the codes of IQ4_NL and IQ4_XS.
const LEVELS: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];
/// Twice the numbers of E2M1; both of its zeros are the same here.
const TWICE_E2M1: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

pub(super) fn iq4_nl(block: &[u8; IQ4_NL_BYTES], out: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 0);
    nibbles(&block[2..], out, |code| scale * LEVELS[usize::from(code)]);
}

pub(super) fn iq4_xs(block: &[u8; IQ4_XS_BYTES], out: &mut [f32; SUPER_ELEMENTS]) {
    let scale = half_at(block, 0);
    let (high, low) = (u16::from_le_bytes([block[2], block[3]]), &block[4..8]);
    let sub_blocks = out.chunks_exact_mut(32).zip(block[8..].chunks_exact(16));
    for (sub, (out, codes)) in sub_blocks.enumerate() {
        let four = u16::from(low[sub / 2] >> (4 * (sub % 2)) & 15);
        let two = high >> (2 * sub) & 3;
        let step = scale * (f32::from(four | two << 4) - 32.0);
        nibbles(codes, out, |code| step * LEVELS[usize::from(code)]);
    }
}

pub(super) fn mxfp4(block: &[u8; MXFP4_BYTES], out: &mut [f32; ELEMENTS]) {
    // Half of the scale, whose least two are below the least normal number.
    let exponent = u32::from(block[0]);
    let scale = f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 });
    nibbles(&block[1..], out, |code| scale * TWICE_E2M1[usize::from(code)]);
}
