//! Packed weight formats, unpacked in registers: 32 consecutive elements at a time, whatever the block's length.
//!
//! Elements are the numbers that [`WeightFormat::decode`](crate::formats::WeightFormat::decode) gives, up to one rounding; sums are
//! f32, and activations stay f32.

#![allow(clippy::needless_range_loop, reason = "vectors of several arrays have one index")]
#![allow(clippy::cast_possible_truncation, reason = "parts of a block are fewer than nine")]

use super::pack::Stored;
use super::simd::{Kernel, Simd};
use std::marker::PhantomData;

/// Elements that are unpacked together. Blocks have a whole number of them.
pub(super) const PART: usize = 32;
/// Vectors of a part for the narrowest vectors, of eight lanes; wider ones use fewer.
const VECTORS: usize = PART / 8;
/// Sums of a dot, each of which waits for itself only.
const SUMS: usize = 4;
/// Rows of `x` that share what is unpacked.
pub(super) const ROWS_MAX: usize = 4;

/// A packed format.
pub(super) trait Packed: Send + Sync + 'static {
    const BLOCK_ELEMENTS: usize;
    const BLOCK_BYTES: usize;

    /// Elements `part * PART ..` of a block, in the first `PART / LANES` vectors.
    ///
    /// # Safety
    /// The processor has the features of `S`, `block` is valid for a block's bytes, and the part is within the block.
    unsafe fn unpack<S: Simd>(block: *const u8, part: usize) -> [S::V; VECTORS];
}

/// `scale * code - least` for each vector of codes.
#[inline(always)]
unsafe fn affine<S: Simd>(codes: [S::I; VECTORS], scale: S::V, least: S::V) -> [S::V; VECTORS] {
    // SAFETY: the features are there.
    unsafe {
        let mut out = [S::splat(0.0); VECTORS];
        for v in 0..PART / S::LANES {
            out[v] = S::fma(S::to_f32(codes[v]), scale, least);
        }
        out
    }
}

/// Bytes `p ..` as codes: `bits` bits of each from bit `shift`.
#[inline(always)]
unsafe fn codes<S: Simd>(p: *const u8, shift: u32, bits: u32) -> [S::I; VECTORS] {
    // SAFETY: the features are there, and PART bytes are valid.
    unsafe {
        let mut out = [S::load_u8(p); VECTORS];
        for v in 0..PART / S::LANES {
            out[v] = S::and(S::shift_right(S::load_u8(p.add(v * S::LANES)), shift), (1 << bits) - 1);
        }
        out
    }
}

/// Sixteen bytes with two codes each: the low halves are the first 16 elements.
#[inline(always)]
unsafe fn halves<S: Simd>(p: *const u8) -> [S::I; VECTORS] {
    // SAFETY: the features are there, and 16 bytes are valid.
    unsafe {
        let mut out = [S::load_u8(p); VECTORS];
        for v in 0..PART / S::LANES {
            let (at, shift) = (v * S::LANES % 16, if v * S::LANES < 16 { 0 } else { 4 });
            out[v] = S::and(S::shift_right(S::load_u8(p.add(at)), shift), 15);
        }
        out
    }
}

/// Adds the bits of `high`, shifted left by `shift`.
#[inline(always)]
unsafe fn with_high<S: Simd>(low: [S::I; VECTORS], high: [S::I; VECTORS], shift: u32) -> [S::I; VECTORS] {
    // SAFETY: the features are there.
    unsafe {
        let mut out = low;
        for v in 0..PART / S::LANES {
            out[v] = S::or(low[v], S::shift_left(high[v], shift));
        }
        out
    }
}

/// The f16 at `at` of a block, in every lane.
#[inline(always)]
unsafe fn half<S: Simd>(block: *const u8, at: usize) -> S::V {
    // SAFETY: the features are there, and two bytes are valid; they are read unaligned.
    unsafe { S::splat_f16(block.add(at).cast()) }
}

pub(super) struct Q8_0;

impl Packed for Q8_0 {
    const BLOCK_ELEMENTS: usize = 32;
    const BLOCK_BYTES: usize = 34;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8, _: usize) -> [S::V; VECTORS] {
        // SAFETY: within the block.
        unsafe {
            let scale = half::<S>(block, 0);
            let mut out = [scale; VECTORS];
            for v in 0..PART / S::LANES {
                out[v] = S::mul(S::to_f32(S::load_i8(block.add(2 + v * S::LANES).cast())), scale);
            }
            out
        }
    }
}

pub(super) struct Q4_0;

impl Packed for Q4_0 {
    const BLOCK_ELEMENTS: usize = 32;
    const BLOCK_BYTES: usize = 18;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8, _: usize) -> [S::V; VECTORS] {
        // SAFETY: within the block.
        unsafe {
            let scale = half::<S>(block, 0);
            affine::<S>(halves::<S>(block.add(2)), scale, S::mul(scale, S::splat(-8.0)))
        }
    }
}

/// Scale and least value of sub-block `sub` of eight, 6 bits each in 12 bytes.
#[inline(always)]
unsafe fn six_bits(scales: *const u8, sub: usize) -> (f32, f32) {
    // SAFETY: 12 bytes are valid.
    unsafe {
        let (scale, least) = if sub < 4 {
            (*scales.add(sub) & 63, *scales.add(sub + 4) & 63)
        } else {
            let both = *scales.add(sub + 4);
            (both & 15 | *scales.add(sub - 4) >> 6 << 4, both >> 4 | *scales.add(sub) >> 6 << 4)
        };
        (f32::from(scale), f32::from(least))
    }
}

/// Scale and negative least value of sub-block `sub` of a Q4_K or Q5_K block.
#[inline(always)]
unsafe fn step_and_least<S: Simd>(block: *const u8, sub: usize) -> (S::V, S::V) {
    // SAFETY: within the block.
    unsafe {
        let (scale, least) = six_bits(block.add(4), sub);
        (S::mul(half::<S>(block, 0), S::splat(scale)), S::mul(half::<S>(block, 2), S::splat(-least)))
    }
}

pub(super) struct Q4K;

impl Packed for Q4K {
    const BLOCK_ELEMENTS: usize = 256;
    const BLOCK_BYTES: usize = 144;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8, part: usize) -> [S::V; VECTORS] {
        // SAFETY: within the block.
        unsafe {
            let (scale, least) = step_and_least::<S>(block, part);
            affine::<S>(codes::<S>(block.add(16 + part / 2 * 32), part as u32 % 2 * 4, 4), scale, least)
        }
    }
}

pub(super) struct Q5K;

impl Packed for Q5K {
    const BLOCK_ELEMENTS: usize = 256;
    const BLOCK_BYTES: usize = 176;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8, part: usize) -> [S::V; VECTORS] {
        // SAFETY: within the block.
        unsafe {
            let (scale, least) = step_and_least::<S>(block, part);
            let low = codes::<S>(block.add(48 + part / 2 * 32), part as u32 % 2 * 4, 4);
            affine::<S>(with_high::<S>(low, codes::<S>(block.add(16), part as u32, 1), 4), scale, least)
        }
    }
}

pub(super) struct Q6K;

impl Packed for Q6K {
    const BLOCK_ELEMENTS: usize = 256;
    const BLOCK_BYTES: usize = 210;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8, part: usize) -> [S::V; VECTORS] {
        // SAFETY: within the block.
        unsafe {
            let (half_block, quarter) = (part / 4, part % 4);
            let low = codes::<S>(block.add(half_block * 64 + quarter % 2 * 32), quarter as u32 / 2 * 4, 4);
            let high = codes::<S>(block.add(128 + half_block * 32), quarter as u32 * 2, 2);
            let codes = with_high::<S>(low, high, 4);
            let scale = half::<S>(block, 208);
            let mut out = [scale; VECTORS];
            for v in 0..PART / S::LANES {
                // Sixteen elements have a scale.
                let sub = f32::from(*block.add(192 + part * 2 + v * S::LANES / 16).cast::<i8>());
                let step = S::mul(scale, S::splat(sub));
                out[v] = S::mul(S::sub(S::to_f32(codes[v]), S::splat(32.0)), step);
            }
            out
        }
    }
}

/// Twice the numbers of E2M1 (OCP MX 1.0).
const TWICE_E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

pub(super) struct Mxfp4;

impl Packed for Mxfp4 {
    const BLOCK_ELEMENTS: usize = 32;
    const BLOCK_BYTES: usize = 17;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8, _: usize) -> [S::V; VECTORS] {
        // SAFETY: within the block.
        unsafe {
            // Half of the scale, whose least two are below the least normal number.
            let exponent = u32::from(*block);
            let scale =
                S::splat(f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 }));
            let codes = halves::<S>(block.add(1));
            let mut out = [scale; VECTORS];
            for v in 0..PART / S::LANES {
                out[v] = S::mul(S::look_up(&TWICE_E2M1, codes[v]), scale);
            }
            out
        }
    }
}

/// Rows of blocks, for [`super::pack`].
pub(super) struct Blocks<P>(PhantomData<P>);

impl<P: Packed> Stored for Blocks<P> {
    #[inline(always)]
    unsafe fn widen<S: Simd>(row: *const u8, at: usize, n: usize, to: *mut f32) {
        debug_assert!(at.is_multiple_of(PART) && n.is_multiple_of(PART), "whole parts");
        for i in (0..n).step_by(PART) {
            let (block, within) = ((at + i) / P::BLOCK_ELEMENTS, (at + i) % P::BLOCK_ELEMENTS);
            // SAFETY: the part is within the row, and `to` has room for it.
            unsafe {
                let part = P::unpack::<S>(row.add(block * P::BLOCK_BYTES), within / PART);
                for (v, vector) in part[..PART / S::LANES].iter().enumerate() {
                    S::store(to.add(i + v * S::LANES), *vector);
                }
            }
        }
    }
}

/// `out[r][j] (=|+=) x[r] · weight[j]` for at most [`ROWS_MAX`] rows of `k` elements of `x`, `x_stride` apart, and `n` weight
/// rows, one behind the other.
pub(super) struct PackedDots<P> {
    pub(super) rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) x: *const f32,
    pub(super) x_stride: usize,
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
        // SAFETY: the rows are within the product.
        unsafe {
            let (parts, mut part) = (self.k / PART, 0);
            let mut sums = [[S::splat(0.0); SUMS]; R];
            while part + 2 <= parts {
                self.add_part::<S, R, 0>(weight, part, &mut sums);
                self.add_part::<S, R, 1>(weight, part + 1, &mut sums);
                part += 2;
            }
            if part < parts {
                self.add_part::<S, R, 0>(weight, part, &mut sums);
            }
            sums.map(|[a, b, c, d]| S::sum(S::add(S::add(a, b), S::add(c, d))))
        }
    }

    /// Adds the products of a part of the row at `weight`; an even part and an odd one use different sums of wide vectors.
    #[inline(always)]
    unsafe fn add_part<S: Simd, const R: usize, const ODD: usize>(
        &self,
        weight: *const u8,
        part: usize,
        sums: &mut [[S::V; SUMS]; R],
    ) {
        let (block, within) = (part * PART / P::BLOCK_ELEMENTS, part % (P::BLOCK_ELEMENTS / PART));
        // SAFETY: the part is within the product.
        unsafe {
            let weights = P::unpack::<S>(weight.add(block * P::BLOCK_BYTES), within);
            let x = self.x.add(part * PART);
            for (r, sums) in sums.iter_mut().enumerate() {
                for v in 0..PART / S::LANES {
                    let (x, sum) =
                        (S::load(x.add(r * self.x_stride + v * S::LANES)), (v + ODD * PART / S::LANES) % SUMS);
                    sums[sum] = S::fma(x, weights[v], sums[sum]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn columns<S: Simd, const R: usize>(&self) {
        let row_bytes = self.k / P::BLOCK_ELEMENTS * P::BLOCK_BYTES;
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
