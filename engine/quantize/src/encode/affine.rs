//! Blocks whose elements are a scale times a code without a sign, minus an offset: Q4_K and Q5_K.
//!
//! A sub-block's scale and offset are fitted by weighted least squares to the codes of several steps. Both are then rounded to six
//! bits, and of the roundings around them the pair stays whose codes have the least error.

use super::{LEAST, best, magnitude, nearest, put_half, stored_or_next};

/// Elements of a sub-block.
const LEN: usize = 32;
/// Sub-blocks.
const SUBS: usize = 8;
/// The largest code of a scale or an offset.
const SIX_BITS: f32 = 63.0;
/// Candidates of a sub-block's step: the range of its elements divided by the number of codes, give or take as many tenths.
const TENTHS: i8 = 10;
/// Times that codes and scale are fitted to each other at most.
const ROUNDS: usize = 3;

/// Elements of a sub-block are `step * code - offset`.
#[derive(Clone, Copy, Default)]
struct Line {
    step: f32,
    /// Never negative.
    offset: f32,
}

impl Line {
    #[inline]
    fn code(self, x: f32, inverse: f32, top: f32) -> f32 {
        nearest(((x + self.offset) * inverse).clamp(0.0, top))
    }

    fn inverse(self) -> f32 {
        if self.step > 0.0 { 1.0 / self.step } else { 0.0 }
    }

    /// Weighted square error of elements with codes from 0 to `top`.
    fn error(self, x: &[f32; LEN], w: &[f32; LEN], top: f32) -> f32 {
        let inverse = self.inverse();
        let mut sum = 0.0;
        for (x, w) in x.iter().zip(w) {
            let rest = x - (self.step * self.code(*x, inverse, top) - self.offset);
            sum += w * rest * rest;
        }
        sum
    }

    /// The line of least weighted square error through the codes that this one gives.
    fn fitted(self, x: &[f32; LEN], w: &[f32; LEN], top: f32) -> Self {
        let inverse = self.inverse();
        let (mut sw, mut sx, mut sc, mut scc, mut sxc) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (x, w) in x.iter().zip(w) {
            let code = self.code(*x, inverse, top);
            let (wx, wc) = (w * x, w * code);
            sw += w;
            sx += wx;
            sc += wc;
            scc += wc * code;
            sxc += wx * code;
        }
        let determinant: f32 = sw * scc - sc * sc;
        if determinant > 0.0 {
            let (step, offset) = ((sw * sxc - sx * sc) / determinant, (sc * sxc - scc * sx) / determinant);
            if offset >= 0.0 {
                return Self { step: step.max(0.0), offset };
            }
        }
        // No offset, or codes that are all the same.
        Self { step: if scc > 0.0 { (sxc / scc).max(0.0) } else { 0.0 }, offset: 0.0 }
    }

    /// Codes from the least to the largest element.
    fn plain(x: &[f32; LEN], top: f32) -> Self {
        let least = x.iter().copied().fold(0.0, f32::min);
        let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        Self { step: (largest - least).max(0.0) / top, offset: -least }
    }

    /// The line with the least error that was found.
    fn search(x: &[f32; LEN], w: &[f32; LEN], top: f32) -> Self {
        let plain = Self::plain(x, top);
        if plain.step == 0.0 {
            return plain;
        }
        let candidates = (-TENTHS..=TENTHS).map(|tenths| {
            let step = plain.step * top / (top + 0.1 * f32::from(tenths));
            Self { step, ..plain }.fitted(x, w, top)
        });
        let (mut line, mut error) =
            best(candidates.chain([plain]), |line| line.error(x, w, top)).unwrap_or((plain, f32::INFINITY));
        for _ in 0..ROUNDS {
            let again = line.fitted(x, w, top);
            let less = again.error(x, w, top);
            if less >= error {
                break;
            }
            (line, error) = (again, less);
        }
        line
    }
}

/// A block's scales as they are stored.
#[derive(Clone, Copy)]
struct Scales {
    step: f32,
    offset: f32,
    /// Multiples of the two.
    subs: [(u8, u8); SUBS],
}

impl Scales {
    /// Scales of lines as multiples of a block's, of which some are tried.
    fn candidates(
        x: &[[f32; LEN]],
        w: &[[f32; LEN]],
        lines: &[Line; SUBS],
        top: f32,
        search: bool,
    ) -> impl Iterator<Item = (Self, f32)> {
        let most = |of: fn(&Line) -> f32| stored_or_next(lines.iter().map(of).fold(0.0, f32::max) / SIX_BITS);
        let (steps, offsets) = (most(|line| line.step), most(|line| line.offset));
        let units = steps.flat_map(move |step| offsets.clone().map(move |offset| (step, offset)));
        units.map(move |units| Self::of(x, w, (units, lines), top, search))
    }

    /// Rounds lines to multiples of the block's scales. With `search` neighbours are taken where they have a smaller error.
    fn of(
        x: &[[f32; LEN]],
        w: &[[f32; LEN]],
        ((step, offset), lines): ((f32, f32), &[Line; SUBS]),
        top: f32,
        search: bool,
    ) -> (Self, f32) {
        let multiple = |of: f32, unit: f32| if unit > 0.0 { nearest((of / unit).min(SIX_BITS)) } else { 0.0 };
        let near = if search { -1_i8..=1 } else { 0..=0 };
        let around = |code: f32| near.clone().map(move |by| (code + f32::from(by)).clamp(0.0, SIX_BITS));
        let (mut subs, mut sum) = ([(0, 0); SUBS], 0.0);
        for (((x, w), line), sub) in x.iter().zip(w).zip(lines).zip(&mut subs) {
            let codes = (multiple(line.step, step), multiple(line.offset, offset));
            let pairs = around(codes.0).flat_map(|s| around(codes.1).map(move |m| (s, m)));
            let line = |(s, m): (f32, f32)| Line { step: step * s, offset: offset * m };
            if let Some(((s, m), error)) = best(pairs, |pair| line(pair).error(x, w, top)) {
                *sub = (s as u8, m as u8);
                sum += error;
            }
        }
        (Self { step, offset, subs }, sum)
    }

    fn line(&self, sub: usize) -> Line {
        let (step, offset) = self.subs[sub];
        Line { step: self.step * f32::from(step), offset: self.offset * f32::from(offset) }
    }

    /// Writes the block's scales, and those of its sub-blocks in 6 bits each.
    fn put(&self, out: &mut [u8]) {
        put_half(self.step, &mut out[..2]);
        put_half(self.offset, &mut out[2..4]);
        let out = &mut out[4..];
        for (sub, (step, offset)) in self.subs.into_iter().enumerate() {
            if sub < 4 {
                out[sub] |= step;
                out[sub + 4] |= offset;
            } else {
                out[sub + 4] |= step & 15 | (offset & 15) << 4;
                out[sub - 4] |= step >> 4 << 6;
                out[sub] |= offset >> 4 << 6;
            }
        }
    }
}

/// Scales of a block and the codes of its elements; `None` for zeros.
fn pack(x: &[f32; 256], w: &[f32; 256], top: f32) -> Option<(Scales, [u8; 256])> {
    if magnitude(x) < LEAST {
        return None;
    }
    let ((x, _), (w, _)) = (x.as_chunks::<LEN>(), w.as_chunks::<LEN>());
    let (mut plain, mut searched) = ([Line::default(); SUBS], [Line::default(); SUBS]);
    for (i, (x, w)) in x.iter().zip(w).enumerate() {
        plain[i] = Line::plain(x, top);
        searched[i] = Line::search(x, w, top);
    }
    let candidates = [(&plain, false), (&searched, false), (&searched, true)];
    let candidates = candidates.into_iter().flat_map(|(lines, search)| Scales::candidates(x, w, lines, top, search));
    let ((scales, _), _) = best(candidates, |(_, error)| error)?;
    let mut codes = [0; 256];
    for (sub, (x, codes)) in x.iter().zip(codes.chunks_exact_mut(LEN)).enumerate() {
        let line = scales.line(sub);
        let inverse = line.inverse();
        codes.iter_mut().zip(x).for_each(|(code, x)| *code = line.code(*x, inverse, top) as u8);
    }
    Some((scales, codes))
}

/// Writes the lower four bits of codes: 32 bytes have 64 elements, the first 32 in their low halves.
fn put_nibbles(codes: &[u8; 256], out: &mut [u8]) {
    for (element, code) in codes.iter().enumerate() {
        out[element / 64 * 32 + element % 32] |= (code & 15) << (element / 32 % 2 * 4);
    }
}

pub(super) fn q4k(x: &[f32; 256], w: &[f32; 256], out: &mut [u8; 144]) {
    if let Some((scales, codes)) = pack(x, w, 15.0) {
        scales.put(&mut out[..16]);
        put_nibbles(&codes, &mut out[16..]);
    }
}

pub(super) fn q5k(x: &[f32; 256], w: &[f32; 256], out: &mut [u8; 176]) {
    if let Some((scales, codes)) = pack(x, w, 31.0) {
        scales.put(&mut out[..16]);
        put_nibbles(&codes, &mut out[48..]);
        for (element, code) in codes.iter().enumerate() {
            out[16 + element % 32] |= (code >> 4) << (element / 32);
        }
    }
}
