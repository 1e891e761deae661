//! Vectors of f32 behind one trait, chosen at run time.
//!
//! A [`Kernel`] is written once over [`Simd`] and compiled once for each instruction set; [`Isa::run`] enters the
//! copy whose features the processor has. Invariant: every function between `Isa::run` and an intrinsic is
//! `#[inline(always)]`, so that intrinsics are inlined into code compiled with their features. [`portable`] needs none: some of its
//! operations are calls.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
pub(crate) mod math;
mod portable;

pub(crate) use element::Element;
use std::fmt;

/// What [`Simd::load_e4m3`] divides elements by: the exponents of an f16 and of an E4M3 with the same bits differ by 8.
pub(super) const E4M3_DIVISOR: f32 = 256.0;

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
    /// A vector of four times as many bytes: codes of packed weights, or a plane of activations for them. A *part* is 32 bytes.
    type B: Copy;
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
    /// E4M3 codes, over [`E4M3_DIVISOR`]: the f16 with a code's sign, exponent and mantissa.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where it is greater, else `b`: also where one of them is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where it is less, else `b`: also where one of them is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the instruction set has such an operation, else twice.
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
    /// Eight f16, `stride` bytes apart, in the first lanes.
    unsafe fn f16_strided(p: *const u8, stride: usize) -> Self::V;
    /// The bytes of `word` as unsigned integers in the first eight lanes.
    unsafe fn bytes_to_f32(word: u64) -> Self::V;
    /// `LANES` signed integers.
    unsafe fn load_i8(p: *const i8) -> Self::V;
    /// Lanes below 2^24 in magnitude as f32.
    unsafe fn to_f32(a: Self::I) -> Self::V;
    unsafe fn load_ints(p: *const i32) -> Self::I;
    unsafe fn add_ints(a: Self::I, b: Self::I) -> Self::I;
    /// Eight lanes of `scales` from `first`, each for eight lanes.
    unsafe fn spread_parts(scales: Self::V, first: usize) -> Self::V;
    /// Of sixteen lanes of `scales`, those from `2 * first` on, each for four lanes.
    unsafe fn spread_halves(scales: [Self::V; 2], first: usize) -> Self::V;
    /// `4 * LANES` bytes.
    unsafe fn load_bytes(p: *const u8) -> Self::B;
    /// 32 bytes of every part, `stride` bytes apart.
    unsafe fn load_parts(p: *const u8, stride: usize) -> Self::B;
    /// Of every part, `stride` bytes apart, the lower four bits of sixteen bytes, then their upper four bits.
    unsafe fn load_nibbles(p: *const u8, stride: usize) -> Self::B;
    /// Moves the bits of bytes in part `i` left by `left + i * step`, to the right where that is negative. Bits that come from
    /// other bytes are undefined.
    unsafe fn move_bits(a: Self::B, left: i32, step: i32) -> Self::B;
    /// The bits of every byte that `mask` has.
    unsafe fn and(a: Self::B, mask: u8) -> Self::B;
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B;
    unsafe fn xor(a: Self::B, mask: u8) -> Self::B;
    /// The elements of `table` that bytes below 16 name.
    unsafe fn look_up(table: &[u8; 16], a: Self::B) -> Self::B;
    /// Unsigned bytes as f32, in order.
    unsafe fn widen_bytes(a: Self::B) -> [Self::V; 4];
    /// Unsigned `codes` times `256 * high + low`, both signed; exact sums of four neighbours. `wide` where codes have more than
    /// seven bits.
    unsafe fn dot_planes(codes: Self::B, high: Self::B, low: Self::B, wide: bool) -> Self::I;
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
    /// AVX2 with products of bytes (AVX-VNNI).
    Avx2Vnni,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with products of bytes (VNNI).
    Avx512Vnni,
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx2Vnni => "avx2-vnni",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512-vnni",
        })
    }
}

impl Isa {
    /// All instruction sets, the best first.
    pub const ALL: [Self; 5] = [Self::Avx512Vnni, Self::Avx512, Self::Avx2Vnni, Self::Avx2, Self::Portable];

    /// The widest instruction set of this processor.
    #[must_use]
    pub fn best() -> Self {
        Self::ALL.into_iter().find(|isa| isa.is_supported()).unwrap_or(Self::Portable)
    }

    /// The instruction set without products of bytes.
    #[must_use]
    pub fn base(self) -> Self {
        match self {
            Self::Avx2Vnni => Self::Avx2,
            Self::Avx512Vnni => Self::Avx512,
            Self::Portable | Self::Avx2 | Self::Avx512 => self,
        }
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
            Self::Avx2Vnni => Self::Avx2.is_supported() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => Self::Avx512.is_supported() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Runs the kernel compiled for this instruction set, without products of bytes.
    ///
    /// # Safety
    /// `self` is supported, and the kernel's own requirements hold.
    pub(crate) unsafe fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: passed on; a device is only made with an instruction set that is supported.
        unsafe {
            match self.base() {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => avx512::run(kernel),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => avx2::run(kernel),
                _ => kernel.run::<portable::Portable>(),
            }
        }
    }

    /// Runs the kernel compiled for this instruction set with its products of bytes, where it has them: for the few kernels that
    /// gain by another copy.
    ///
    /// # Safety
    /// As for [`Self::run`].
    pub(crate) unsafe fn run_bytes<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: passed on.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512Vnni => avx512::run_vnni(kernel),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2Vnni => avx2::run_vnni(kernel),
                _ => self.run(kernel),
            }
        }
    }
}

#[cfg(test)]
mod tests;
