//! Kernels for the formats of quantised safetensors: 4-bit codes with a zero point, which are multiplied in integers as other
//! packed codes are ([`super::packed`]), and FP8 codes, which are not integers of 16 bits: they are widened to f32 in registers, and
//! activations are not rounded.

use super::pack::Stored;
use super::packed::{PART, PARTS, Packed, Scales, eight};
use super::simd::{E4M3_DIVISOR, Kernel, Simd};
use super::streams::AHEAD_BYTES;
use crate::formats::WeightFormat;

/// Bytes of a block before its codes, and of the codes of a part.
const HEADER_BYTES: usize = 4;
const PART_BYTES: usize = 16;

/// 4-bit codes of blocks of `G32`, `G64` or `G128`; the zero point is a least value of as many steps.
macro_rules! int4 {
    ($($name:ident),*) => {$(
        pub(super) struct $name;

        impl $name {
            const PARTS: usize = Self::BLOCK.elements / PART;
        }

        impl Packed for $name {
            const FORMAT: WeightFormat = WeightFormat::$name;
            const LEAST: bool = true;

            #[inline(always)]
            unsafe fn scales<S: Simd>(blocks: *const u8) -> Scales<S> {
                let (mut steps, mut leasts) = ([0.0; PARTS], [0.0; PARTS]);
                for part in 0..PARTS {
                    let header = blocks.wrapping_add(part / Self::PARTS * Self::BLOCK.bytes).cast::<u32>();
                    // SAFETY: within the stretch, and read unaligned.
                    let header = u32::from_le(unsafe { header.read_unaligned() });
                    steps[part] = f32::from_bits(header & !0xff);
                    // The zero point is at most 16, as the reader of a block's formats has it.
                    leasts[part] = (header & 0xff) as f32 * steps[part];
                }
                // SAFETY: the features are there.
                unsafe { Scales::with_leasts(eight::<S>(steps.as_ptr()), eight::<S>(leasts.as_ptr())) }
            }

            #[inline(always)]
            #[allow(clippy::modulo_one, reason = "blocks of the shortest format have one part")]
            unsafe fn codes<S: Simd>(blocks: *const u8, part: usize) -> S::B {
                let (block, within) = (part / Self::PARTS, part % Self::PARTS);
                let stride = if Self::PARTS == 1 { Self::BLOCK.bytes } else { PART_BYTES };
                // SAFETY: within the stretch; the two parts of a vector are of one block, or their blocks have one part.
                unsafe {
                    let codes = blocks.add(block * Self::BLOCK.bytes + HEADER_BYTES + within * PART_BYTES);
                    S::load_nibbles(codes, stride)
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
/// Rows of `x` that share what is widened.
const GROUP: usize = 4;

/// Rows of FP8 blocks, for [`super::pack`].
pub(super) struct Fp8;

impl Fp8 {
    /// The scale of a block, for elements as [`Simd::load_e4m3`] gives them.
    #[inline(always)]
    unsafe fn scale(block: *const u8) -> f32 {
        // SAFETY: the block begins with its scale, which is read unaligned.
        E4M3_DIVISOR * unsafe { block.cast::<f32>().read_unaligned() }
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

/// `out[r][j] (=|+=) x[r] · weight[j]` for `rows` rows of `k` elements of `x`, `x_stride` apart, and `n` weight rows of FP8 blocks,
/// one behind the other. The first rows read a weight row from memory, as a stream; the others find it in the cache.
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
    /// Whether weights are prefetched.
    pub(super) prefetch: bool,
}

impl Fp8Dots {
    /// The dots of `R` rows from `row` with weight row `col`.
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize>(&self, row: usize, col: usize) {
        // One sum would wait for itself.
        const SUMS: usize = 2;
        // SAFETY: the rows are within the product; any address may be prefetched.
        unsafe {
            let weight = self.weight.add(col * (self.k / ELEMENTS * BYTES));
            let mut sums = [S::splat(0.0); R];
            for block in 0..self.k / ELEMENTS {
                let bytes = weight.add(block * BYTES);
                if self.prefetch && row == 0 {
                    for line in (0..BYTES).step_by(64) {
                        S::prefetch(bytes.wrapping_add(AHEAD_BYTES + line));
                    }
                }
                let mut parts = [[S::splat(0.0); SUMS]; R];
                for v in 0..ELEMENTS / S::LANES {
                    let codes = S::load_e4m3(bytes.add(SCALE_BYTES + v * S::LANES));
                    for (r, parts) in parts.iter_mut().enumerate() {
                        let x = S::load(self.x.add((row + r) * self.x_stride + block * ELEMENTS + v * S::LANES));
                        parts[v % SUMS] = S::fma(x, codes, parts[v % SUMS]);
                    }
                }
                let scale = S::splat(Fp8::scale(bytes));
                for (sum, [a, b]) in sums.iter_mut().zip(parts) {
                    *sum = S::fma(S::add(a, b), scale, *sum);
                }
            }
            for (r, sum) in sums.into_iter().enumerate() {
                let (out, dot) = (self.out.add((row + r) * self.out_stride + col), S::sum(sum));
                *out = if self.add { *out + dot } else { dot };
            }
        }
    }
}

impl Kernel for Fp8Dots {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for col in 0..self.n {
            for row in (0..self.rows).step_by(GROUP) {
                // SAFETY: within the product.
                unsafe {
                    match self.rows - row {
                        1 => self.dots::<S, 1>(row, col),
                        2 => self.dots::<S, 2>(row, col),
                        3 => self.dots::<S, 3>(row, col),
                        _ => self.dots::<S, GROUP>(row, col),
                    }
                }
            }
        }
    }
}
