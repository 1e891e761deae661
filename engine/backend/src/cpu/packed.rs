//! Packed weight formats, unpacked in registers: 32 consecutive elements at a time, whatever the block's length.
//!
//! A few rows are multiplied in integers ([`PackedDots`]): activations are rounded to 16 bits of the largest of 32
//! ([`round`]), and products of them with codes are exact. Many rows are multiplied in f32, with the elements that
//! [`WeightFormat::decode`] gives, up to one rounding.
#![allow(clippy::needless_range_loop, reason = "vectors of several arrays have one index")]
#![allow(
    clippy::cast_possible_truncation,
    reason = "parts of a block are fewer than nine; rounded activations are 16 bits"
)]

use super::pack::Stored;
use super::scaled::{Int4G32, Int4G64, Int4G128};
use super::simd::{Element, Kernel, Simd};
use crate::formats::{Block, WeightFormat};
use half::{bf16, f16};
use std::marker::PhantomData;

/// Elements that are unpacked together. Blocks have a whole number of them.
pub(super) const PART: usize = 32;
/// Rows of `x` that share what is unpacked.
pub(super) const ROWS_MAX: usize = 4;
/// Parts of the longest block.
const PARTS_MAX: usize = 8;
/// The largest rounded activation.
const ROUNDED_MAX: f32 = 32_766.0;

/// A packed format. An element is `scale * code - least`, with a scale for 16 or 32 elements.
pub(super) trait Packed: Send + Sync + 'static {
    const FORMAT: WeightFormat;
    const BLOCK: Block = Self::FORMAT.block();
    /// Whether elements have a least value.
    const LEAST: bool = false;
    /// Whether each half of a part has a scale of its own.
    const HALVES: bool = false;

    /// A block's scales: an f16 at its start, with six-bit codes where there are least values.
    ///
    /// # Safety
    /// The processor has the features of `S`, and `block` is valid for a block's bytes.
    #[inline(always)]
    unsafe fn scales<S: Simd>(block: *const u8) -> Scales {
        // SAFETY: within the block.
        unsafe { if Self::LEAST { six_bits::<S>(block) } else { Scales::one(half::<S>(block, 0)) } }
    }

    /// Codes `part * PART ..` of a block, in the first `PART / (2 * LANES)` vectors.
    ///
    /// # Safety
    /// The processor has the features of `S`, `block` is valid for a block's bytes, and the part is within the block.
    unsafe fn codes<S: Simd>(block: *const u8, part: usize) -> [S::W; 2];
}

/// Scales of a block's elements, by parts or, where a format has [`Packed::HALVES`], by halves of parts; least values by parts.
pub(super) struct Scales {
    steps: [f32; 2 * PARTS_MAX],
    leasts: [f32; PARTS_MAX],
}

impl Scales {
    /// One scale, of the only part.
    #[inline(always)]
    pub(super) fn one(scale: f32) -> Self {
        Self { steps: [scale; 2 * PARTS_MAX], leasts: [0.0; PARTS_MAX] }
    }

    /// Scale of a half of a part.
    #[inline(always)]
    fn of<P: Packed>(&self, part: usize, half: usize) -> f32 {
        self.steps[if P::HALVES { 2 * part + half } else { part }]
    }

    /// Scales of the sums of pairs in vector `v` of a part's codes, times `x`.
    #[inline(always)]
    unsafe fn of_pairs<S: Simd, P: Packed>(&self, part: usize, v: usize, x: f32) -> S::V {
        let whole = 2 * S::LANES == PART;
        // SAFETY: the features are there.
        unsafe {
            if P::HALVES && whole {
                S::splat_halves(self.of::<P>(part, 0) * x, self.of::<P>(part, 1) * x)
            } else {
                S::splat(self.of::<P>(part, if whole { 0 } else { v }) * x)
            }
        }
    }
}

/// Work on weights of one format.
pub(super) trait Work {
    fn plain<E: Element + 'static>(self);
    fn packed<P: Packed>(self);
    /// Of [`WeightFormat::Fp8`].
    fn fp8(self);
}

/// Does `work` for `format`. False if there are no kernels for it: the device does not take it.
pub(super) fn with_format(format: WeightFormat, work: impl Work) -> bool {
    match format {
        WeightFormat::F32 => work.plain::<f32>(),
        WeightFormat::F16 => work.plain::<f16>(),
        WeightFormat::BF16 => work.plain::<bf16>(),
        WeightFormat::Q8_0 => work.packed::<Q8_0>(),
        WeightFormat::Q4_0 => work.packed::<Q4_0>(),
        WeightFormat::Q4K => work.packed::<Q4K>(),
        WeightFormat::Q5K => work.packed::<Q5K>(),
        WeightFormat::Q6K => work.packed::<Q6K>(),
        WeightFormat::Mxfp4 => work.packed::<Mxfp4>(),
        WeightFormat::Int4G32 => work.packed::<Int4G32>(),
        WeightFormat::Int4G64 => work.packed::<Int4G64>(),
        WeightFormat::Int4G128 => work.packed::<Int4G128>(),
        WeightFormat::Fp8 => work.fp8(),
        _ => return false,
    }
    true
}

/// Bytes `p ..` as codes: `bits` bits of each from bit `shift`.
#[inline(always)]
unsafe fn bits<S: Simd>(p: *const u8, shift: u32, bits: u32) -> [S::W; 2] {
    // SAFETY: the features are there, and PART bytes are valid.
    unsafe {
        let mut out = [S::load_u8(p); 2];
        for v in 0..PART / (2 * S::LANES) {
            out[v] = S::and(S::shift_right(S::load_u8(p.add(v * 2 * S::LANES)), shift), (1 << bits) - 1);
        }
        out
    }
}

/// Codes with more bits, from bit `shift` on.
#[inline(always)]
unsafe fn with_high<S: Simd>(low: [S::W; 2], high: [S::W; 2], shift: u32) -> [S::W; 2] {
    // SAFETY: the features are there.
    unsafe { [S::or(low[0], S::shift_left(high[0], shift)), S::or(low[1], S::shift_left(high[1], shift))] }
}

/// The f16 at `at` of a block.
#[inline(always)]
unsafe fn half<S: Simd>(block: *const u8, at: usize) -> f32 {
    // SAFETY: the features are there, and two bytes are valid; they are read unaligned.
    unsafe { S::f16(block.add(at).cast()) }
}

pub(super) struct Q8_0;

impl Packed for Q8_0 {
    const FORMAT: WeightFormat = WeightFormat::Q8_0;

    #[inline(always)]
    unsafe fn codes<S: Simd>(block: *const u8, _: usize) -> [S::W; 2] {
        // SAFETY: within the block.
        unsafe {
            let codes = block.add(2).cast::<i8>();
            [S::load_i8(codes), S::load_i8(codes.add(PART - 2 * S::LANES))]
        }
    }
}

pub(super) struct Q4_0;

impl Packed for Q4_0 {
    const FORMAT: WeightFormat = WeightFormat::Q4_0;

    #[inline(always)]
    unsafe fn codes<S: Simd>(block: *const u8, _: usize) -> [S::W; 2] {
        // SAFETY: within the block.
        unsafe { S::load_nibbles(block.add(2)).map(|codes| S::minus(codes, 8)) }
    }
}

/// Scales and least values of a Q4_K or Q5_K block: 6 bits each, packed in 12 bytes.
#[inline(always)]
unsafe fn six_bits<S: Simd>(block: *const u8) -> Scales {
    // SAFETY: within the block.
    let (scale, least, packed) = unsafe {
        (half::<S>(block, 0), half::<S>(block, 2), block.add(4).cast::<[[u8; 4]; 3]>().read().map(u32::from_le_bytes))
    };
    let [a, b, c] = packed;
    // The lower four of each are in a byte of their own; the upper four have their upper two bits beside the lower ones.
    let four = |low: u32, high: u32| [low & 0x3f3f_3f3f, high & 0x0f0f_0f0f | (low >> 2) & 0x3030_3030];
    let (scales, leasts) = (four(a, c), four(b, c >> 4));
    let mut out = Scales::one(0.0);
    for i in 0..PARTS_MAX {
        let byte = |words: [u32; 2]| f32::from(words[i / 4].to_le_bytes()[i % 4]);
        out.steps[i] = scale * byte(scales);
        out.leasts[i] = least * byte(leasts);
    }
    out
}

pub(super) struct Q4K;

impl Packed for Q4K {
    const FORMAT: WeightFormat = WeightFormat::Q4K;
    const LEAST: bool = true;

    #[inline(always)]
    unsafe fn codes<S: Simd>(block: *const u8, part: usize) -> [S::W; 2] {
        // SAFETY: within the block.
        unsafe { bits::<S>(block.add(16 + part / 2 * 32), part as u32 % 2 * 4, 4) }
    }
}

pub(super) struct Q5K;

impl Packed for Q5K {
    const FORMAT: WeightFormat = WeightFormat::Q5K;
    const LEAST: bool = true;

    #[inline(always)]
    unsafe fn codes<S: Simd>(block: *const u8, part: usize) -> [S::W; 2] {
        // SAFETY: within the block.
        unsafe {
            let low = bits::<S>(block.add(48 + part / 2 * 32), part as u32 % 2 * 4, 4);
            with_high::<S>(low, bits::<S>(block.add(16), part as u32, 1), 4)
        }
    }
}

pub(super) struct Q6K;

impl Packed for Q6K {
    const FORMAT: WeightFormat = WeightFormat::Q6K;
    const HALVES: bool = true;

    #[inline(always)]
    unsafe fn scales<S: Simd>(block: *const u8) -> Scales {
        // SAFETY: within the block.
        let (scale, codes) = unsafe { (half::<S>(block, 208), block.add(192).cast::<[i8; 2 * PARTS_MAX]>().read()) };
        Scales { steps: codes.map(|code| scale * f32::from(code)), leasts: [0.0; PARTS_MAX] }
    }

    #[inline(always)]
    unsafe fn codes<S: Simd>(block: *const u8, part: usize) -> [S::W; 2] {
        // SAFETY: within the block.
        unsafe {
            let (half_block, quarter) = (part / 4, part % 4);
            let low = bits::<S>(block.add(half_block * 64 + quarter % 2 * 32), quarter as u32 / 2 * 4, 4);
            let high = bits::<S>(block.add(128 + half_block * 32), quarter as u32 * 2, 2);
            let [a, b] = with_high::<S>(low, high, 4);
            [S::minus(a, 32), S::minus(b, 32)]
        }
    }
}

/// Twice the numbers of E2M1 (OCP MX 1.0).
const TWICE_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub(super) struct Mxfp4;

impl Packed for Mxfp4 {
    const FORMAT: WeightFormat = WeightFormat::Mxfp4;

    #[inline(always)]
    unsafe fn scales<S: Simd>(block: *const u8) -> Scales {
        // SAFETY: within the block.
        let exponent = u32::from(unsafe { *block });
        // Half of the scale, whose least two are below the least normal number.
        Scales::one(f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 }))
    }

    #[inline(always)]
    unsafe fn codes<S: Simd>(block: *const u8, _: usize) -> [S::W; 2] {
        // SAFETY: within the block.
        unsafe {
            let [a, b] = S::load_nibbles(block.add(1));
            [S::look_up(&TWICE_E2M1, a), S::look_up(&TWICE_E2M1, b)]
        }
    }
}

/// Rows of blocks, for [`super::pack`].
pub(super) struct Blocks<P>(PhantomData<P>);

impl<P: Packed> Stored for Blocks<P> {
    #[inline(always)]
    unsafe fn widen<S: Simd>(row: *const u8, at: usize, n: usize, to: *mut f32) {
        debug_assert!(at.is_multiple_of(PART) && n.is_multiple_of(PART), "whole parts");
        let mut i = 0;
        while i < n {
            let (block, first) = ((at + i) / P::BLOCK.elements, (at + i) % P::BLOCK.elements);
            // SAFETY: the parts are within the row, and `to` has room for them.
            unsafe {
                let block = row.add(block * P::BLOCK.bytes);
                let scales = P::scales::<S>(block);
                for part in first / PART..P::BLOCK.elements.min(first + n - i) / PART {
                    let codes = P::codes::<S>(block, part);
                    let least = S::splat(-scales.leasts[part]);
                    for v in 0..PART / (2 * S::LANES) {
                        for (half, codes) in S::wide(codes[v]).into_iter().enumerate() {
                            let lane = v * 2 * S::LANES + half * S::LANES;
                            let step = S::splat(scales.of::<P>(part, lane / 16));
                            let element = if P::LEAST { S::fma(codes, step, least) } else { S::mul(codes, step) };
                            S::store(to.add(i + lane), element);
                        }
                    }
                    i += PART;
                }
            }
        }
    }
}

/// Activations for [`PackedDots`]: of each row `k` codes, and for each part its scale and the sum of its elements.
#[derive(Clone, Copy)]
pub(super) struct Rounded {
    codes: *const i16,
    scales: *const f32,
    sums: *const f32,
}

/// f32 of scratch that `rows` rows of `k` activations take.
pub(super) const fn rounded_len(rows: usize, k: usize) -> usize {
    rows * (k / 2 + 2 * (k / PART))
}

/// Rounds `rows` rows of `k` elements at `x`, `stride` apart, into `scratch` of [`rounded_len`] elements. An element's error is at
/// most about `2^-16` of the largest magnitude of its part.
pub(super) struct Round {
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) x: *const f32,
    pub(super) stride: usize,
    pub(super) scratch: *mut f32,
}

impl Kernel for Round {
    type Output = Rounded;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Rounded {
        let (rows, k, parts) = (self.rows, self.k, self.k / PART);
        let codes = self.scratch.cast::<i16>();
        // SAFETY: the scratch has room, by its length.
        unsafe {
            let scales = self.scratch.add(rows * k / 2);
            let sums = scales.add(rows * parts);
            for row in 0..rows {
                for part in 0..parts {
                    let x = self.x.add(row * self.stride + part * PART);
                    let mut most = S::splat(0.0);
                    for v in 0..PART / S::LANES {
                        let x = S::load(x.add(v * S::LANES));
                        most = S::max(most, S::max(x, S::sub(S::splat(0.0), x)));
                    }
                    let largest = S::largest(most);
                    // A part that is all but zero is zero: the factor would be infinite.
                    let inverse = ROUNDED_MAX / largest;
                    let inverse = S::splat(if inverse.is_finite() { inverse } else { 0.0 });
                    let (mut rounded, mut total) = ([0.0f32; PART], S::splat(0.0));
                    for v in 0..PART / S::LANES {
                        let x = S::round(S::mul(S::load(x.add(v * S::LANES)), inverse));
                        S::store(rounded.as_mut_ptr().add(v * S::LANES), x);
                        total = S::add(total, x);
                    }
                    let total = S::sum(total);
                    // A part with an infinity or NaN has NaN as its products.
                    let scale = if total.is_finite() { largest / ROUNDED_MAX } else { f32::NAN };
                    let rounded = rounded.map(|x| x as i16);
                    codes.add(row * k + part * PART).cast::<[i16; PART]>().write_unaligned(rounded);
                    *scales.add(row * parts + part) = scale;
                    *sums.add(row * parts + part) = scale * total;
                }
            }
            Rounded { codes, scales, sums }
        }
    }
}

/// `out[r][j] (=|+=) x[r] · weight[j]` for at most [`ROWS_MAX`] rows of `k` elements of `x`, and `n` weight rows, one behind the
/// other.
pub(super) struct PackedDots<P> {
    pub(super) rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) x: Rounded,
    pub(super) weight: *const u8,
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
    pub(super) add: bool,
    pub(super) format: PhantomData<P>,
}

impl<P: Packed> PackedDots<P> {
    /// The dots of `R` rows with the weight row at `weight`.
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize>(&self, weight: *const u8) -> [f32; R] {
        let parts = P::BLOCK.elements / PART;
        // SAFETY: the rows are within the product.
        unsafe {
            // Two sums take turns: one would wait for itself.
            let (mut sums, mut leasts) = ([[S::splat(0.0); 2]; R], [0.0f32; R]);
            for block in 0..self.k / P::BLOCK.elements {
                let bytes = weight.add(block * P::BLOCK.bytes);
                let scales = P::scales::<S>(bytes);
                for part in 0..parts {
                    let codes = P::codes::<S>(bytes, part);
                    let at = block * parts + part;
                    for r in 0..R {
                        let of_row = r * (self.k / PART) + at;
                        let scale = *self.x.scales.add(of_row);
                        for v in 0..PART / (2 * S::LANES) {
                            let x = S::load_i16(self.x.codes.add(r * self.k + at * PART + v * 2 * S::LANES));
                            let dot = S::to_f32(S::dot_pairs(codes[v], x));
                            let [next, last] = sums[r];
                            sums[r] = [last, S::fma(dot, scales.of_pairs::<S, P>(part, v, scale), next)];
                        }
                        if P::LEAST {
                            leasts[r] += scales.leasts[part] * *self.x.sums.add(of_row);
                        }
                    }
                }
            }
            let mut out = [0.0; R];
            for r in 0..R {
                out[r] = S::sum(S::add(sums[r][0], sums[r][1])) - leasts[r];
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn columns<S: Simd, const R: usize>(&self) {
        let row_bytes = self.k / P::BLOCK.elements * P::BLOCK.bytes;
        for col in 0..self.n {
            // SAFETY: within the product.
            unsafe {
                for (row, dot) in self.dots::<S, R>(self.weight.add(col * row_bytes)).into_iter().enumerate() {
                    let out = self.out.add(row * self.out_stride + col);
                    *out = if self.add { *out + dot } else { dot };
                }
            }
        }
    }
}

impl<P: Packed> Kernel for PackedDots<P> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: within the product.
        unsafe {
            match self.rows {
                0 => {}
                1 => self.columns::<S, 1>(),
                2 => self.columns::<S, 2>(),
                3 => self.columns::<S, 3>(),
                ROWS_MAX => self.columns::<S, ROWS_MAX>(),
                rows => unreachable!("{rows} rows of at most {ROWS_MAX}"),
            }
        }
    }
}
