//! Kernels for the formats of quantised safetensors: 4-bit codes with a zero point, which are multiplied in integers as other
//! packed codes are ([`super::packed`]), and FP8 codes, which are not integers of 16 bits: they are widened to f32 in registers, and
//! activations are not rounded.

use super::pack::Stored;
use super::packed::{Packed, Scales};
use super::simd::{Kernel, Simd};
use crate::formats::WeightFormat;

/// 4-bit codes of a block of `G32`, `G64` or `G128`.
macro_rules! int4 {
    ($($name:ident),*) => {$(
        pub(super) struct $name;

        impl Packed for $name {
            const FORMAT: WeightFormat = WeightFormat::$name;

            #[inline(always)]
            unsafe fn scales<S: Simd>(block: *const u8) -> Scales {
                // SAFETY: within the block, and read unaligned.
                let header = u32::from_le(unsafe { block.cast::<u32>().read_unaligned() });
                Scales::one(f32::from_bits(header & !0xff))
            }

            #[inline(always)]
            unsafe fn codes<S: Simd>(block: *const u8, part: usize) -> [S::W; 2] {
                // SAFETY: within the block.
                unsafe {
                    let zero = i16::from(*block);
                    S::load_nibbles(block.add(4 + part * 16)).map(|codes| S::minus(codes, zero))
                }
            }
        }
    )*};
}

int4!(Int4G32, Int4G64, Int4G128);

/// Elements and bytes of an FP8 block, the scale included.
const ELEMENTS: usize = WeightFormat::Fp8.block().elements;
const BYTES: usize = WeightFormat::Fp8.block().bytes;
const SCALE_BYTES: usize = 4;
/// What [`Simd::load_e4m3`] leaves out of its elements.
const FACTOR: f32 = 256.0;
/// Rows of `x` that share what is widened.
pub(super) const ROWS_MAX: usize = 4;
/// How far ahead weights are prefetched, across the ends of rows.
const AHEAD_BYTES: usize = 2048;

/// Rows of FP8 blocks, for [`super::pack`].
pub(super) struct Fp8;

impl Fp8 {
    /// The scale of a block, for elements as [`Simd::load_e4m3`] gives them.
    #[inline(always)]
    unsafe fn scale(block: *const u8) -> f32 {
        // SAFETY: the block begins with its scale, which is read unaligned.
        FACTOR * unsafe { block.cast::<f32>().read_unaligned() }
    }
}

impl Stored for Fp8 {
    #[inline(always)]
    unsafe fn widen<S: Simd>(row: *const u8, at: usize, n: usize, to: *mut f32) {
        debug_assert!(at.is_multiple_of(S::LANES) && n.is_multiple_of(S::LANES), "whole vectors");
        let mut i = 0;
        while i < n {
            let (block, first) = ((at + i) / ELEMENTS, (at + i) % ELEMENTS);
            let count = (ELEMENTS - first).min(n - i);
            // SAFETY: the elements are within the row, and `to` has room for them.
            unsafe {
                let block = row.add(block * BYTES);
                let scale = S::splat(Self::scale(block));
                for lane in (0..count).step_by(S::LANES) {
                    let element = S::load_e4m3(block.add(SCALE_BYTES + first + lane));
                    S::store(to.add(i + lane), S::mul(element, scale));
                }
            }
            i += count;
        }
    }
}

/// `out[r][j] (=|+=) x[r] · weight[j]` for at most [`ROWS_MAX`] rows of `k` elements of `x`, `x_stride` apart, and `n` weight rows of
/// FP8 blocks, one behind the other.
pub(super) struct Fp8Dots {
    pub(super) rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) x: *const f32,
    pub(super) x_stride: usize,
    pub(super) weight: *const u8,
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
    pub(super) add: bool,
}

impl Fp8Dots {
    /// The dots of `R` rows with the weight row at `weight`.
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize>(&self, weight: *const u8) -> [f32; R] {
        // One sum would wait for itself.
        const SUMS: usize = 2;
        // SAFETY: the rows are within the product; any address may be prefetched.
        unsafe {
            let mut sums = [S::splat(0.0); R];
            for block in 0..self.k / ELEMENTS {
                let bytes = weight.add(block * BYTES);
                for line in (0..BYTES).step_by(64) {
                    S::prefetch(bytes.wrapping_add(AHEAD_BYTES + line));
                }
                let mut parts = [[S::splat(0.0); SUMS]; R];
                for v in 0..ELEMENTS / S::LANES {
                    let codes = S::load_e4m3(bytes.add(SCALE_BYTES + v * S::LANES));
                    for (r, parts) in parts.iter_mut().enumerate() {
                        let x = S::load(self.x.add(r * self.x_stride + block * ELEMENTS + v * S::LANES));
                        parts[v % SUMS] = S::fma(x, codes, parts[v % SUMS]);
                    }
                }
                let scale = S::splat(Fp8::scale(bytes));
                for (sum, [a, b]) in sums.iter_mut().zip(parts) {
                    *sum = S::fma(S::add(a, b), scale, *sum);
                }
            }
            sums.map(|sum| S::sum(sum))
        }
    }

    #[inline(always)]
    unsafe fn columns<S: Simd, const R: usize>(&self) {
        let row_bytes = self.k / ELEMENTS * BYTES;
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

impl Kernel for Fp8Dots {
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
