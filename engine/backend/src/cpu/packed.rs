//! Packed weight formats, unpacked in registers: a vector of byte codes at a time, whatever the block's length.
//!
//! A few rows are multiplied in integers ([`PackedDots`]): activations are rounded to 16 bits of the largest of 32, kept as two
//! planes of bytes ([`Rounded`]), and products of them with codes are exact. Many rows are multiplied in f32, with the elements
//! that [`WeightFormat::decode`] gives, up to one rounding.
//!
//! Rows are walked in stretches of [`SUPER`] elements: one block of a long format, eight of a short one. The rest of a row of
//! short blocks is copied to a stretch of its own, with zeros.
#![allow(clippy::needless_range_loop, reason = "vectors of several arrays have one index")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "parts of a stretch are eight; rounded activations are 16 bits"
)]

use super::pack::Stored;
use super::scaled::{Int4G32, Int4G64, Int4G128};
use super::simd::{Element, Kernel, Simd};
use super::streams::AHEAD_BYTES;
use crate::formats::{Block, WeightFormat};
use half::{bf16, f16};
use std::marker::PhantomData;

/// Elements that are rounded with one scale. Blocks have a whole number of them.
pub(super) const PART: usize = 32;
/// Elements whose scales are unpacked together.
const SUPER: usize = 256;
pub(super) const PARTS: usize = SUPER / PART;
/// Bytes of eight of the longest short blocks.
const SHORT_SUPER_BYTES_MAX: usize = 8 * 34;
/// Rows of `x` whose sums are held in registers together.
const GROUP: usize = 4;
/// Elements of the longest vector.
const LANES_MAX: usize = 16;
/// The largest rounded activation: both of its planes are signed bytes.
const ROUNDED_MAX: f32 = 32_639.0;

/// A packed format. An element is `scale * (code - OFFSET) - least`, with a scale for 16 or 32 elements.
///
/// # Safety
/// Of all functions: the processor has the features of `S`, and `blocks` is valid for a stretch of [`SUPER`] elements.
pub(super) trait Packed: Send + Sync + 'static {
    const FORMAT: WeightFormat;
    const BLOCK: Block = Self::FORMAT.block();
    /// Bytes of a stretch.
    const SUPER_BYTES: usize = SUPER / Self::BLOCK.elements * Self::BLOCK.bytes;
    /// Whether elements have a least value.
    const LEAST: bool = false;
    /// Whether each half of a part has a scale of its own.
    const HALVES: bool = false;
    /// The code of zero.
    const OFFSET: u8 = 0;

    /// Scales of a stretch: an f16 at the start of every short block.
    #[inline(always)]
    unsafe fn scales<S: Simd>(blocks: *const u8) -> Scales<S> {
        // SAFETY: within the stretch.
        unsafe { Scales::of_parts(S::f16_strided(blocks, Self::BLOCK.bytes)) }
    }

    /// Codes of parts `part ..`, as many as a vector has.
    unsafe fn codes<S: Simd>(blocks: *const u8, part: usize) -> S::B;
}

/// Scales of a stretch.
pub(super) struct Scales<S: Simd> {
    /// By parts in the first eight lanes, or by [`Packed::HALVES`] in sixteen.
    steps: [S::V; 2],
    /// Least values by parts.
    leasts: S::V,
}

impl<S: Simd> Scales<S> {
    #[inline(always)]
    unsafe fn of_parts(steps: S::V) -> Self {
        // SAFETY: the features are there.
        unsafe { Self { steps: [steps, S::splat(0.0)], leasts: S::splat(0.0) } }
    }

    #[inline(always)]
    pub(super) unsafe fn with_leasts(steps: S::V, leasts: S::V) -> Self {
        // SAFETY: the features are there.
        unsafe { Self { steps: [steps, S::splat(0.0)], leasts } }
    }

    /// The steps of parts `first ..`, for the sums of four neighbours.
    #[inline(always)]
    unsafe fn spread(steps: [S::V; 2], halves: bool, first: usize) -> S::V {
        // SAFETY: the features are there.
        unsafe { if halves { S::spread_halves(steps, first) } else { S::spread_parts(steps[0], first) } }
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

/// The f16 at `at` of a block.
#[inline(always)]
unsafe fn half<S: Simd>(block: *const u8, at: usize) -> f32 {
    // SAFETY: the features are there, and two bytes are valid; they are read unaligned.
    unsafe { S::f16(block.add(at).cast()) }
}

/// Eight elements in the first lanes.
#[inline(always)]
pub(super) unsafe fn eight<S: Simd>(p: *const f32) -> S::V {
    // SAFETY: the features are there, and the elements are valid.
    unsafe { if S::LANES == 8 { S::load(p) } else { S::load_part(p, 8) } }
}

pub(super) struct Q8_0;

impl Packed for Q8_0 {
    const FORMAT: WeightFormat = WeightFormat::Q8_0;
    const OFFSET: u8 = 128;

    #[inline(always)]
    unsafe fn codes<S: Simd>(blocks: *const u8, part: usize) -> S::B {
        let bytes = Self::BLOCK.bytes;
        // SAFETY: within the stretch. The upper bit turned, signed codes have 128 added.
        unsafe { S::xor(S::load_parts(blocks.add(part * bytes + 2), bytes), 0x80) }
    }
}

pub(super) struct Q4_0;

impl Packed for Q4_0 {
    const FORMAT: WeightFormat = WeightFormat::Q4_0;
    const OFFSET: u8 = 8;

    #[inline(always)]
    unsafe fn codes<S: Simd>(blocks: *const u8, part: usize) -> S::B {
        let bytes = Self::BLOCK.bytes;
        // SAFETY: within the stretch.
        unsafe { S::load_nibbles(blocks.add(part * bytes + 2), bytes) }
    }
}

/// Scales and least values of a Q4_K or Q5_K block: 6 bits each, packed in 12 bytes.
#[inline(always)]
unsafe fn six_bits<S: Simd>(block: *const u8) -> Scales<S> {
    // SAFETY: within the block.
    unsafe {
        let (scale, least) = (half::<S>(block, 0), half::<S>(block, 2));
        // Not `map`, which is a call where it is not inlined.
        let words = block.add(4).cast::<[u8; 4]>();
        let (a, b, c) = (words.read(), words.add(1).read(), words.add(2).read());
        let (a, b, c) = (u32::from_le_bytes(a), u32::from_le_bytes(b), u32::from_le_bytes(c));
        // The lower four of each are in a byte of their own; the upper four have their upper two bits beside the lower ones.
        let eight = |low: u32, high: u32| {
            u64::from(low & 0x3f3f_3f3f) | u64::from(high & 0x0f0f_0f0f | (low >> 2) & 0x3030_3030) << 32
        };
        let (steps, leasts) = (eight(a, c), eight(b, c >> 4));
        Scales {
            steps: [S::mul(S::bytes_to_f32(steps), S::splat(scale)), S::splat(0.0)],
            leasts: S::mul(S::bytes_to_f32(leasts), S::splat(least)),
        }
    }
}

/// Codes of four bits of parts `part ..`: 32 bytes have two parts.
#[inline(always)]
unsafe fn four_bits<S: Simd>(p: *const u8, part: usize) -> S::B {
    // SAFETY: the features are there, and the bytes are valid.
    unsafe { S::and(S::move_bits(S::load_parts(p.add(part / 2 * 32), 0), part as i32 % 2 * -4, -4), 15) }
}

pub(super) struct Q4K;

impl Packed for Q4K {
    const FORMAT: WeightFormat = WeightFormat::Q4K;
    const LEAST: bool = true;

    #[inline(always)]
    unsafe fn scales<S: Simd>(blocks: *const u8) -> Scales<S> {
        // SAFETY: passed on.
        unsafe { six_bits(blocks) }
    }

    #[inline(always)]
    unsafe fn codes<S: Simd>(blocks: *const u8, part: usize) -> S::B {
        // SAFETY: within the block.
        unsafe { four_bits::<S>(blocks.add(16), part) }
    }
}

pub(super) struct Q5K;

impl Packed for Q5K {
    const FORMAT: WeightFormat = WeightFormat::Q5K;
    const LEAST: bool = true;

    #[inline(always)]
    unsafe fn scales<S: Simd>(blocks: *const u8) -> Scales<S> {
        // SAFETY: passed on.
        unsafe { six_bits(blocks) }
    }

    #[inline(always)]
    unsafe fn codes<S: Simd>(blocks: *const u8, part: usize) -> S::B {
        // SAFETY: within the block. Bit `part` of 32 bytes is the fifth.
        unsafe {
            let fifth = S::move_bits(S::load_parts(blocks.add(16), 0), 4 - part as i32, -1);
            S::or(four_bits::<S>(blocks.add(48), part), S::and(fifth, 0x10))
        }
    }
}

pub(super) struct Q6K;

impl Packed for Q6K {
    const FORMAT: WeightFormat = WeightFormat::Q6K;
    const HALVES: bool = true;
    const OFFSET: u8 = 32;

    #[inline(always)]
    unsafe fn scales<S: Simd>(blocks: *const u8) -> Scales<S> {
        // SAFETY: within the block.
        unsafe {
            let (scale, codes) = (S::splat(half::<S>(blocks, 208)), blocks.add(192).cast::<i8>());
            let second = if S::LANES == 8 { S::load_i8(codes.add(8)) } else { S::splat(0.0) };
            Scales { steps: [S::mul(S::load_i8(codes), scale), S::mul(second, scale)], leasts: S::splat(0.0) }
        }
    }

    #[inline(always)]
    unsafe fn codes<S: Simd>(blocks: *const u8, part: usize) -> S::B {
        // SAFETY: within the block.
        unsafe {
            let (half_block, quarter) = (part / 4, part as i32 % 4);
            let low = S::load_parts(blocks.add(half_block * 64 + part % 2 * 32), 32);
            let high = S::load_parts(blocks.add(128 + half_block * 32), 0);
            let high = S::and(S::move_bits(high, 4 - 2 * quarter, -2), 0x30);
            S::or(S::and(S::move_bits(low, quarter / 2 * -4, 0), 15), high)
        }
    }
}

/// Twice the numbers of E2M1 (OCP MX 1.0), with 12 added.
const TWICE_E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

pub(super) struct Mxfp4;

impl Packed for Mxfp4 {
    const FORMAT: WeightFormat = WeightFormat::Mxfp4;
    const OFFSET: u8 = 12;

    #[inline(always)]
    unsafe fn scales<S: Simd>(blocks: *const u8) -> Scales<S> {
        let mut steps = [0.0; PARTS];
        for (part, step) in steps.iter_mut().enumerate() {
            // SAFETY: within the stretch.
            let exponent = u32::from(unsafe { *blocks.add(part * Self::BLOCK.bytes) });
            // Half of the scale, whose least two are below the least normal number.
            *step = f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 });
        }
        // SAFETY: the features are there.
        unsafe { Scales::of_parts(eight::<S>(steps.as_ptr())) }
    }

    #[inline(always)]
    unsafe fn codes<S: Simd>(blocks: *const u8, part: usize) -> S::B {
        let bytes = Self::BLOCK.bytes;
        // SAFETY: within the stretch.
        unsafe { S::look_up(&TWICE_E2M1, S::load_nibbles(blocks.add(part * bytes + 1), bytes)) }
    }
}

/// A stretch of which parts `0 .. parts`, of whole blocks, are at `blocks`; the other elements are zero.
#[inline(always)]
unsafe fn rest<P: Packed>(blocks: *const u8, parts: usize) -> [u8; SHORT_SUPER_BYTES_MAX] {
    const { assert!(P::BLOCK.elements == SUPER || P::SUPER_BYTES <= SHORT_SUPER_BYTES_MAX) };
    debug_assert!(P::BLOCK.elements < SUPER && parts < PARTS, "only rows of short blocks have a rest");
    let mut out = [0; SHORT_SUPER_BYTES_MAX];
    let bytes = (parts * PART).div_ceil(P::BLOCK.elements) * P::BLOCK.bytes;
    // SAFETY: the parts' blocks are valid.
    unsafe { std::ptr::copy_nonoverlapping(blocks, out.as_mut_ptr(), bytes) };
    out
}

/// Rows of blocks, for [`super::pack`].
pub(super) struct Blocks<P>(PhantomData<P>);

impl<P: Packed> Blocks<P> {
    /// Widens parts `parts` of a stretch into `to`.
    #[inline(always)]
    unsafe fn widen_parts<S: Simd>(blocks: *const u8, parts: std::ops::Range<usize>, to: *mut f32) {
        let per_vector = 4 * S::LANES / PART;
        // SAFETY: the features are there; the parts are within the stretch, and `to` has room for them.
        unsafe {
            let scales = P::scales::<S>(blocks);
            let (mut steps, mut leasts) = ([0.0f32; 2 * 16], [0.0f32; 16]);
            S::store(steps.as_mut_ptr(), scales.steps[0]);
            S::store(steps.as_mut_ptr().add(S::LANES), scales.steps[1]);
            S::store(leasts.as_mut_ptr(), scales.leasts);
            for first in parts.clone().step_by(per_vector) {
                for (v, codes) in S::widen_bytes(P::codes::<S>(blocks, first)).into_iter().enumerate() {
                    let at = v * S::LANES;
                    let part = first + at / PART;
                    if part < parts.end {
                        let step = S::splat(steps[if P::HALVES { 2 * part + at / 16 % 2 } else { part }]);
                        let code = S::sub(codes, S::splat(f32::from(P::OFFSET)));
                        let element =
                            if P::LEAST { S::fma(code, step, S::splat(-leasts[part])) } else { S::mul(code, step) };
                        S::store(to.add((first - parts.start) * PART + at), element);
                    }
                }
            }
        }
    }
}

impl<P: Packed> Stored for Blocks<P> {
    #[inline(always)]
    unsafe fn widen<S: Simd>(row: *const u8, at: usize, n: usize, to: *mut f32) {
        debug_assert!(at.is_multiple_of(2 * PART) && n.is_multiple_of(PART), "whole parts, from an even one");
        let mut i = 0;
        while i < n {
            let (index, first) = ((at + i) / SUPER, (at + i) % SUPER / PART);
            let parts = first..PARTS.min(first + (n - i) / PART);
            // SAFETY: the parts are within the row, and `to` has room for them.
            unsafe {
                let (to, blocks) = (to.add(i), row.add(index * P::SUPER_BYTES));
                if P::BLOCK.elements == SUPER || parts.end == PARTS {
                    Self::widen_parts::<S>(blocks, parts.clone(), to);
                } else {
                    let copy = rest::<P>(blocks, parts.end);
                    Self::widen_parts::<S>(copy.as_ptr(), parts.clone(), to);
                }
            }
            i += parts.len() * PART;
        }
    }
}

/// A stretch of a row of activations, rounded for one format: element `i` of part `p` is about
/// `scale[p] * (256 * high[i] + low[i])`. Elements beyond the row are zero.
#[repr(C, align(64))]
pub(super) struct Rounded {
    high: [i8; SUPER],
    low: [i8; SUPER],
    /// The sums of four neighbours, times minus [`Packed::OFFSET`].
    offsets: [i32; SUPER / 4],
    /// By parts, or by halves as [`Packed::HALVES`].
    scales: [f32; 2 * PARTS],
    /// Sums of the parts' elements, then zeros up to a whole vector.
    sums: [f32; 2 * PARTS],
}

impl Rounded {
    /// Stretches of a row of `k` elements.
    const fn of_row(k: usize) -> usize {
        k.div_ceil(SUPER)
    }

    /// f32 of scratch, aligned to cache lines, that `rows` rows of `k` activations take.
    pub(super) const fn scratch(rows: usize, k: usize) -> usize {
        rows * Self::of_row(k) * (size_of::<Self>() / size_of::<f32>())
    }
}

/// Rounds `rows` rows of `k` elements at `x`, `stride` apart, into [`Rounded::scratch`]. An element's error is at most about `2^-16`
/// of the largest magnitude of its part.
pub(super) struct Round<P> {
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) x: *const f32,
    pub(super) stride: usize,
    pub(super) to: *mut Rounded,
    pub(super) format: PhantomData<P>,
}

impl<P: Packed> Round<P> {
    /// Rounds part `part` of a stretch.
    #[inline(always)]
    unsafe fn part<S: Simd>(x: *const f32, to: &mut Rounded, part: usize) {
        // SAFETY: the features are there, and x has a part.
        let (scale, rounded, total) = unsafe {
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
            (if total.is_finite() { largest / ROUNDED_MAX } else { f32::NAN }, rounded, total)
        };
        // Integers wrap where a part has an infinity or NaN, whose scale makes all of its products NaN.
        // Not `map`, which is compiled without the features where it is not inlined.
        let mut ints = [0i32; PART];
        for i in 0..PART {
            ints[i] = rounded[i] as i32;
        }
        for i in 0..PART {
            let low = ints[i] as i8;
            to.low[part * PART + i] = low;
            to.high[part * PART + i] = (ints[i].wrapping_sub(i32::from(low)) >> 8) as i8;
        }
        for i in 0..PART / 4 {
            let sum = (0..4).fold(0i32, |sum, j| sum.wrapping_add(ints[4 * i + j]));
            to.offsets[part * (PART / 4) + i] = sum.wrapping_mul(-i32::from(P::OFFSET));
        }
        if P::HALVES {
            to.scales[2 * part..2 * part + 2].fill(scale);
        } else {
            to.scales[part] = scale;
        }
        to.sums[part] = scale * total;
    }
}

impl<P: Packed> Kernel for Round<P> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let supers = Rounded::of_row(self.k);
        for row in 0..self.rows {
            for index in 0..supers {
                let parts = PARTS.min((self.k - index * SUPER) / PART);
                // SAFETY: the scratch has the stretches, of which any bytes are values, and x the parts.
                unsafe {
                    let to = &mut *self.to.add(row * supers + index);
                    if parts < PARTS {
                        std::ptr::write_bytes(to, 0, 1);
                    }
                    to.sums = [0.0; 2 * PARTS];
                    for part in 0..parts {
                        Self::part::<S>(self.x.add(row * self.stride + index * SUPER + part * PART), to, part);
                    }
                }
            }
        }
    }
}

/// `out[r][j] (=|+=) x[r] · weight[j]` for `rows` rows of `k` elements of `x`, and `n` weight rows, one behind the other.
///
/// The first rows read a weight row from memory, as a stream; the others find it in the cache.
pub(super) struct PackedDots<P> {
    pub(super) rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) x: *const Rounded,
    pub(super) weight: *const u8,
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
    pub(super) add: bool,
    /// Whether weights are prefetched.
    pub(super) prefetch: bool,
    pub(super) format: PhantomData<P>,
}

/// The sums of `R` rows with a weight row. Two sums of a row take turns: one would wait for itself.
struct Sums<S: Simd, const R: usize> {
    dots: [[S::V; 2]; R],
    leasts: [S::V; R],
}

impl<S: Simd, const R: usize> Sums<S, R> {
    /// Adds the products of the vector of parts from `part` on; `steps` are of each row.
    #[inline(always)]
    unsafe fn add<P: Packed>(
        &mut self,
        blocks: *const u8,
        x: [*const Rounded; R],
        steps: &[[S::V; 2]; R],
        part: usize,
    ) {
        // SAFETY: the features are there, and the stretches are valid.
        unsafe {
            let codes = P::codes::<S>(blocks, part);
            for r in 0..R {
                let x = &*x[r];
                let high = S::load_bytes(x.high.as_ptr().add(part * PART).cast());
                let low = S::load_bytes(x.low.as_ptr().add(part * PART).cast());
                let mut dot = S::dot_planes(codes, high, low, P::OFFSET > 64);
                if P::OFFSET > 0 {
                    dot = S::add_ints(dot, S::load_ints(x.offsets.as_ptr().add(part * (PART / 4))));
                }
                let step = Scales::<S>::spread(steps[r], P::HALVES, part);
                let [next, last] = self.dots[r];
                self.dots[r] = [last, S::fma(S::to_f32(dot), step, next)];
            }
        }
    }

    /// Adds the products of a stretch.
    #[inline(always)]
    unsafe fn add_super<P: Packed>(&mut self, blocks: *const u8, x: [*const Rounded; R]) {
        // SAFETY: the features are there, and the stretches are valid.
        unsafe {
            let scales = P::scales::<S>(blocks);
            let mut steps = [scales.steps; R];
            for r in 0..R {
                let x = &*x[r];
                steps[r][0] = S::mul(steps[r][0], S::load(x.scales.as_ptr()));
                if P::HALVES && S::LANES == 8 {
                    steps[r][1] = S::mul(steps[r][1], S::load(x.scales.as_ptr().add(8)));
                }
                if P::LEAST {
                    self.leasts[r] = S::fma(scales.leasts, S::load(x.sums.as_ptr()), self.leasts[r]);
                }
            }
            // Not a loop: numbers of parts are constants, as those of shifts.
            let every = S::LANES == 8;
            self.add::<P>(blocks, x, &steps, 0);
            if every {
                self.add::<P>(blocks, x, &steps, 1);
            }
            self.add::<P>(blocks, x, &steps, 2);
            if every {
                self.add::<P>(blocks, x, &steps, 3);
            }
            self.add::<P>(blocks, x, &steps, 4);
            if every {
                self.add::<P>(blocks, x, &steps, 5);
            }
            self.add::<P>(blocks, x, &steps, 6);
            if every {
                self.add::<P>(blocks, x, &steps, 7);
            }
        }
    }
}

impl<P: Packed> PackedDots<P> {
    const WHOLE: bool = P::BLOCK.elements == SUPER;

    /// The dots of `R` rows from `row` with weight row `col`, each in parts that remain to be summed.
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize>(&self, row: usize, col: usize) -> [S::V; R] {
        let (supers, whole) = (Rounded::of_row(self.k), self.k / SUPER);
        // SAFETY: the rows are within the product.
        unsafe {
            let weight = self.weight.add(col * (self.k / P::BLOCK.elements * P::BLOCK.bytes));
            let zero = S::splat(0.0);
            let mut sums = Sums::<S, R> { dots: [[zero; 2]; R], leasts: [zero; R] };
            let mut x = [self.x; R];
            for r in 0..R {
                x[r] = self.x.add((row + r) * supers);
            }
            for index in 0..whole {
                let blocks = weight.add(index * P::SUPER_BYTES);
                if self.prefetch && row == 0 {
                    for line in (0..P::SUPER_BYTES).step_by(64) {
                        S::prefetch(blocks.wrapping_add(AHEAD_BYTES + line));
                    }
                }
                sums.add_super::<P>(blocks, x);
                for r in 0..R {
                    x[r] = x[r].add(1);
                }
            }
            if !Self::WHOLE && whole < supers {
                let rest = rest::<P>(weight.add(whole * P::SUPER_BYTES), (self.k - whole * SUPER) / PART);
                sums.add_super::<P>(rest.as_ptr(), x);
            }
            let mut out = [zero; R];
            for r in 0..R {
                let [a, b] = sums.dots[r];
                out[r] = if P::LEAST { S::sub(S::add(a, b), sums.leasts[r]) } else { S::add(a, b) };
            }
            out
        }
    }

    /// `R` rows from `row` with a vector of weight rows, of which `n` are there, from `col`.
    #[inline(always)]
    unsafe fn columns<S: Simd, const R: usize>(&self, row: usize, col: usize, n: usize) {
        let mut parts = [[0.0f32; LANES_MAX * LANES_MAX]; R];
        // SAFETY: the rows are within the product, and vectors of at most LANES_MAX elements.
        unsafe {
            for j in 0..n {
                let dots = self.dots::<S, R>(row, col + j);
                for r in 0..R {
                    S::store(parts[r].as_mut_ptr().add(j * S::LANES), dots[r]);
                }
            }
            for r in 0..R {
                let dots = S::sums(parts[r].as_ptr());
                let out = self.out.add((row + r) * self.out_stride + col);
                if n == S::LANES {
                    S::store(out, if self.add { S::add(S::load(out), dots) } else { dots });
                } else {
                    S::store_part(out, if self.add { S::add(S::load_part(out, n), dots) } else { dots }, n);
                }
            }
        }
    }
}

impl<P: Packed> Kernel for PackedDots<P> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for col in (0..self.n).step_by(S::LANES) {
            let n = S::LANES.min(self.n - col);
            for row in (0..self.rows).step_by(GROUP) {
                // SAFETY: within the product.
                unsafe {
                    match self.rows - row {
                        1 => self.columns::<S, 1>(row, col, n),
                        2 => self.columns::<S, 2>(row, col, n),
                        3 => self.columns::<S, 3>(row, col, n),
                        _ => self.columns::<S, GROUP>(row, col, n),
                    }
                }
            }
        }
    }
}
