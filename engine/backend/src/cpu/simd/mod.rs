//! Vectors of f32 behind one trait, chosen at run time.
//!
//! A [`Kernel`] is written once over [`Simd`] and compiled once for each instruction set; [`Isa::run`] enters the
//! copy whose features the processor has. Invariant: every function between `Isa::run` and an intrinsic is
//! `#[inline(always)]`, so that intrinsics are inlined into code compiled with their features.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
pub(crate) mod math;
mod portable;

pub(crate) use element::Element;
use std::fmt;

/// Operations on a vector of f32.
///
/// # Safety
/// Every function requires that the processor has the implementation's features, and that pointers are valid for
/// the elements that are read or written; no alignment beyond the element's is needed.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A vector.
    type V: Copy;
    /// A vector of as many 32-bit integers.
    type I: Copy;
    /// A vector of twice as many 16-bit integers: codes of packed weights, and activations for them.
    type W: Copy;
    /// Elements of a vector.
    const LANES: usize;
    /// Vectors that are as wide as a tile of the matrix kernel, so that its sums stay in registers.
    const TILE_VECTORS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    /// The first `n < LANES` elements, then zeros.
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Only the first `n < LANES` elements.
    unsafe fn store_part(p: *mut f32, v: Self::V, n: usize);
    unsafe fn load_f16(p: *const u16) -> Self::V;
    unsafe fn load_f16_part(p: *const u16, n: usize) -> Self::V;
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    unsafe fn load_bf16_part(p: *const u16, n: usize) -> Self::V;
    /// E4M3 codes, times 2^-8: the f16 with a code's sign, exponent and mantissa.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// To the nearest integer.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `2^n` for integral `n` from -126 to 127.
    unsafe fn pow2(n: Self::V) -> Self::V;
    /// `x` where `a > b`, else zero.
    unsafe fn keep_greater(a: Self::V, b: Self::V, x: Self::V) -> Self::V;
    /// Sum of the elements.
    unsafe fn sum(v: Self::V) -> f32;
    /// Largest element.
    unsafe fn largest(v: Self::V) -> f32;
    /// The sums of `LANES` consecutive vectors, in order.
    unsafe fn sums(p: *const f32) -> Self::V;
    /// Transposes a square of `LANES` rows and columns.
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);
    /// Prefetches a cache line; any address is valid.
    unsafe fn prefetch(p: *const u8);
    /// One f16.
    unsafe fn f16(p: *const u16) -> f32;
    /// `a` in the lower half of the lanes, `b` in the upper half.
    unsafe fn splat_halves(a: f32, b: f32) -> Self::V;
    /// Lanes below 2^24 in magnitude as f32.
    unsafe fn to_f32(a: Self::I) -> Self::V;
    /// The lower and the upper half of the lanes as f32.
    unsafe fn wide(a: Self::W) -> [Self::V; 2];
    /// `2 * LANES` integers.
    unsafe fn load_i16(p: *const i16) -> Self::W;
    /// `2 * LANES` bytes as unsigned integers.
    unsafe fn load_u8(p: *const u8) -> Self::W;
    /// `2 * LANES` bytes as signed integers.
    unsafe fn load_i8(p: *const i8) -> Self::W;
    /// The lower four bits of sixteen bytes, then their upper four bits, in as many vectors as 32 integers are.
    unsafe fn load_nibbles(p: *const u8) -> [Self::W; 2];
    /// The bits of every lane that `mask` has.
    unsafe fn and(a: Self::W, mask: i16) -> Self::W;
    unsafe fn or(a: Self::W, b: Self::W) -> Self::W;
    /// Shifts every lane right by `n < 16` bits, with zeros.
    unsafe fn shift_right(a: Self::W, n: u32) -> Self::W;
    /// Shifts every lane left by `n < 16` bits.
    unsafe fn shift_left(a: Self::W, n: u32) -> Self::W;
    /// Subtracts `n` from every lane.
    unsafe fn minus(a: Self::W, n: i16) -> Self::W;
    /// The elements of `table` that lanes below 16 name.
    unsafe fn look_up(table: &[i8; 16], a: Self::W) -> Self::W;
    /// `LANES` codes E4M3FN, times `2^-8`; NaN is taken for a number.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    /// The products of all lanes, added in pairs of neighbours.
    unsafe fn dot_pairs(a: Self::W, b: Self::W) -> Self::I;
}

/// Work that is compiled for every instruction set.
pub(crate) trait Kernel {
    type Output;
    /// Does the work; must be `#[inline(always)]`.
    ///
    /// # Safety
    /// The processor has the features of `S`; each kernel names its other requirements.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Any processor.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

impl Isa {
    /// The widest instruction set of this processor.
    #[must_use]
    pub fn best() -> Self {
        [Self::Avx512, Self::Avx2].into_iter().find(|isa| isa.is_supported()).unwrap_or(Self::Portable)
    }

    /// Whether this processor has the instruction set.
    #[must_use]
    pub fn is_supported(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Runs the kernel compiled for this instruction set.
    ///
    /// # Safety
    /// `self` is supported, and the kernel's own requirements hold.
    pub(crate) unsafe fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: passed on; a device is only made with an instruction set that is supported.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => avx512::run(kernel),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => avx2::run(kernel),
                _ => kernel.run::<portable::Portable>(),
            }
        }
    }
}

#[cfg(test)]
mod tests;
