//! Blocks whose elements are a scale times a code of both signs: Q8_0, Q4_0 and Q6_K.

use super::{LEAST, best, magnitude, nearest, put_half, stored, stored_or_next};
use half::f16;

/// Codes of a format, from the least to the largest.
#[derive(Clone, Copy)]
struct Codes {
    least: f32,
    largest: f32,
}

const EIGHT_BITS: Codes = Codes { least: -127.0, largest: 127.0 };
const SIX_BITS: Codes = Codes { least: -32.0, largest: 31.0 };
const FOUR_BITS: Codes = Codes { least: -8.0, largest: 7.0 };

/// How far from its limit the code of the largest element may be taken, in steps of [`SHIFT`].
const SHIFTS: i8 = 8;
const SHIFT: f32 = 0.125;

impl Codes {
    #[inline]
    fn code(self, x: f32, inverse: f32) -> f32 {
        nearest((x * inverse).clamp(self.least, self.largest))
    }

    /// Weighted square error of elements under a scale.
    fn error<const N: usize>(self, x: &[f32; N], w: &[f32; N], scale: f32) -> f32 {
        let inverse = inverse(scale);
        let mut sum = 0.0;
        for (x, w) in x.iter().zip(w) {
            let rest = x - scale * self.code(*x, inverse);
            sum += w * rest * rest;
        }
        sum
    }

    /// The best scale of the codes that an inverse scale gives, and by how much it lessens the square sum of elements.
    fn fitted<const N: usize>(self, x: &[f32; N], w: &[f32; N], inverse: f32) -> (f32, f32) {
        let (mut xc, mut cc) = (0.0, 0.0);
        for (x, w) in x.iter().zip(w) {
            let code = self.code(*x, inverse);
            xc += w * x * code;
            cc += w * code * code;
        }
        if cc > 0.0 { (xc / cc, xc * xc / cc) } else { (0.0, 0.0) }
    }

    /// The scale with the least weighted square error that was found: the largest element's code is moved around both limits, the scale
    /// of those codes is fitted, and the codes of that once more.
    fn search<const N: usize>(self, x: &[f32; N], w: &[f32; N], extreme: f32) -> f32 {
        let (mut scale, mut gain) = (0.0, 0.0);
        let mut take = |(candidate, gained): (f32, f32)| {
            if gained > gain {
                (scale, gain) = (candidate, gained);
            }
        };
        for shift in -SHIFTS..=SHIFTS {
            let shift = f32::from(shift) * SHIFT;
            take(self.fitted(x, w, (self.least + shift) / extreme));
            take(self.fitted(x, w, (self.largest + shift) / extreme));
        }
        for _ in 0..2 {
            let (again, gained) = self.fitted(x, w, inverse(scale));
            if gained > gain {
                (scale, gain) = (again, gained);
            }
        }
        scale
    }

    /// The scale of 16 bits with the least error among `candidates` and their neighbours.
    fn settle<const N: usize>(self, x: &[f32; N], w: &[f32; N], candidates: &[f32]) -> f32 {
        let around = candidates.iter().flat_map(|scale| {
            let bits = f16::from_f32(stored(*scale)).to_bits();
            [bits, bits.saturating_add(1), bits.saturating_sub(1)].map(|bits| f16::from_bits(bits).to_f32())
        });
        let valid = around.filter(|scale| scale.is_finite());
        best(valid, |scale| self.error(x, w, scale)).map_or(0.0, |(scale, _)| scale)
    }
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The element of the largest magnitude.
fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most: f32, x| if x.abs() > most.abs() { *x } else { most })
}

pub(super) fn q8_0(x: &[f32; 32], w: &[f32; 32], out: &mut [u8; 34]) {
    let most = magnitude(x);
    if most < LEAST {
        return;
    }
    let plain = most / EIGHT_BITS.largest;
    let (fitted, _) = EIGHT_BITS.fitted(x, w, inverse(plain));
    let scale = EIGHT_BITS.settle(x, w, &[plain, fitted]);
    put_half(scale, &mut out[..2]);
    for (out, x) in out[2..].iter_mut().zip(x) {
        *out = (EIGHT_BITS.code(*x, inverse(scale)) as i8).cast_unsigned();
    }
}

pub(super) fn q4_0(x: &[f32; 32], w: &[f32; 32], out: &mut [u8; 18]) {
    let extreme = extreme(x);
    if extreme.abs() < LEAST {
        return;
    }
    let plain = extreme / FOUR_BITS.least;
    let scale = FOUR_BITS.settle(x, w, &[plain, FOUR_BITS.search(x, w, extreme)]);
    put_half(scale, &mut out[..2]);
    let code = |x: f32| (FOUR_BITS.code(x, inverse(scale)) + 8.0) as u8;
    for (j, out) in out[2..].iter_mut().enumerate() {
        *out = code(x[j]) | code(x[j + 16]) << 4;
    }
}

/// Sub-blocks of Q6_K.
const SUBS: usize = 16;

/// A block's scale, and its sub-blocks' codes of scales.
#[derive(Clone, Copy)]
struct Scales {
    scale: f32,
    subs: [i8; SUBS],
}

impl Scales {
    /// Scales of sub-blocks as multiples of a block's, of which some are tried.
    fn candidates(
        x: &[[f32; 16]],
        w: &[[f32; 16]],
        wanted: &[f32; SUBS],
        search: bool,
    ) -> impl Iterator<Item = (Self, f32)> {
        stored_or_next(extreme(wanted) / -128.0).map(move |scale| Self::of(x, w, (scale, wanted), search))
    }

    /// Rounds scales of sub-blocks to multiples of the block's. With `search` a neighbour is taken where it has a smaller error.
    fn of(x: &[[f32; 16]], w: &[[f32; 16]], (scale, wanted): (f32, &[f32; SUBS]), search: bool) -> (Self, f32) {
        let (mut subs, mut sum) = ([0; SUBS], 0.0);
        for (((x, w), wanted), sub) in x.iter().zip(w).zip(wanted).zip(&mut subs) {
            let code = nearest((wanted * inverse(scale)).clamp(-128.0, 127.0));
            let near = if search { -1_i8..=1 } else { 0..=0 };
            let near = near.map(|step| (code + f32::from(step)).clamp(-128.0, 127.0));
            if let Some((code, error)) = best(near, |code| SIX_BITS.error(x, w, scale * code)) {
                *sub = code as i8;
                sum += error;
            }
        }
        (Self { scale, subs }, sum)
    }
}

pub(super) fn q6k(x: &[f32; 256], w: &[f32; 256], out: &mut [u8; 210]) {
    if magnitude(x) < LEAST {
        return;
    }
    let ((x, _), (w, _)) = (x.as_chunks::<16>(), w.as_chunks::<16>());
    let (mut plain, mut searched) = ([0.0; SUBS], [0.0; SUBS]);
    for (i, (x, w)) in x.iter().zip(w).enumerate() {
        let extreme = extreme(x);
        if extreme != 0.0 {
            plain[i] = extreme / SIX_BITS.least;
            searched[i] = SIX_BITS.search(x, w, extreme);
        }
    }
    let candidates = Scales::candidates(x, w, &plain, false).chain(Scales::candidates(x, w, &searched, true));
    let Some(((scales, _), _)) = best(candidates, |(_, error)| error) else { return };
    let (codes, rest) = out.split_at_mut(128);
    let (upper, rest) = rest.split_at_mut(64);
    for (sub, (x, scale)) in x.iter().zip(scales.subs).enumerate() {
        rest[sub] = scale.cast_unsigned();
        let inverse = inverse(scales.scale * f32::from(scale));
        for (j, x) in x.iter().enumerate() {
            let (half, within) = (sub / 8, (sub * 16 + j) % 128);
            let code = (SIX_BITS.code(*x, inverse) + 32.0) as u8;
            codes[half * 64 + within % 64] |= (code & 15) << (within / 64 * 4);
            upper[half * 32 + within % 32] |= (code >> 4) << (within / 32 * 2);
        }
    }
    put_half(scales.scale, &mut rest[SUBS..]);
}
