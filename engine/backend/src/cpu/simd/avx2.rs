//! Eight lanes with AVX2, FMA and F16C.
//!
//! Every block is unsafe for the two reasons that the contract of [`Simd`] names: the features, which the callers have
//! by way of [`run`], and the pointers, which are valid for a vector or the part named.
#![allow(clippy::undocumented_unsafe_blocks, reason = "one contract for all, stated above and in `Simd`")]

use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// Needs AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2;

/// Runs the kernel compiled with these features.
///
/// # Safety
/// The processor has the features, and the kernel's own requirements hold.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on.
    unsafe { kernel.run::<Avx2>() }
}

/// Lanes below `n`.
#[inline(always)]
unsafe fn mask(n: usize) -> __m256i {
    const ONES: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    debug_assert!(n < 8, "a part is shorter than a vector");
    // SAFETY: eight elements from 8 - n, which is at most 8.
    unsafe { _mm256_loadu_si256(ONES.as_ptr().add(8 - n).cast()) }
}

/// The first `n < 8` elements in a full buffer.
#[inline(always)]
unsafe fn part(p: *const u16, n: usize) -> [u16; 8] {
    let mut out = [0; 8];
    // SAFETY: n elements are valid, by the trait's contract.
    unsafe { std::ptr::copy_nonoverlapping(p, out.as_mut_ptr(), n) };
    out
}

// The helpers below are functions and not closures, which would be compiled without the features.

/// Four rows, each half of which is a transposed square.
#[inline(always)]
unsafe fn transposed_halves(from: *const f32, stride: usize) -> [__m256; 4] {
    // SAFETY: the features are there, and four rows are valid.
    unsafe {
        let (a, b) = (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(stride)));
        let (c, d) = (_mm256_loadu_ps(from.add(2 * stride)), _mm256_loadu_ps(from.add(3 * stride)));
        let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        [
            _mm256_shuffle_ps::<0b01_00_01_00>(ab_low, cd_low),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab_low, cd_low),
            _mm256_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high),
        ]
    }
}

/// Of four consecutive vectors, the sums within each half: element `i` of a half belongs to vector `i`.
#[inline(always)]
unsafe fn halves(p: *const f32) -> __m256 {
    // SAFETY: the features are there, and four vectors are valid.
    unsafe {
        let ab = _mm256_hadd_ps(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)));
        _mm256_hadd_ps(ab, _mm256_hadd_ps(_mm256_loadu_ps(p.add(16)), _mm256_loadu_ps(p.add(24))))
    }
}

impl Simd for Avx2 {
    type V = __m256;
    type I = __m256i;
    type W = __m256i;
    const LANES: usize = 8;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> __m256 {
        unsafe { _mm256_maskload_ps(p, mask(n)) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        unsafe { _mm256_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: __m256, n: usize) {
        unsafe { _mm256_maskstore_ps(p, mask(n), v) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_f16_part(p: *const u16, n: usize) -> __m256 {
        unsafe { Self::load_f16(part(p, n).as_ptr()) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(p: *const u16, n: usize) -> __m256 {
        unsafe { Self::load_bf16(part(p, n).as_ptr()) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        unsafe {
            let codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()));
            let sign = _mm_slli_epi16::<8>(_mm_and_si128(codes, _mm_set1_epi16(0x80)));
            let magnitude = _mm_slli_epi16::<7>(_mm_and_si128(codes, _mm_set1_epi16(0x7f)));
            _mm256_cvtph_ps(_mm_or_si128(sign, magnitude))
        }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256 {
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    unsafe fn pow2(n: __m256) -> __m256 {
        unsafe {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
        }
    }

    #[inline(always)]
    unsafe fn keep_greater(a: __m256, b: __m256, x: __m256) -> __m256 {
        unsafe { _mm256_and_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b), x) }
    }

    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)))
        }
    }

    #[inline(always)]
    unsafe fn largest(v: __m256) -> f32 {
        unsafe {
            let half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)))
        }
    }

    #[inline(always)]
    unsafe fn sums(p: *const f32) -> __m256 {
        unsafe {
            let (a, b) = (halves(p), halves(p.add(32)));
            _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
        }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        unsafe {
            let a = transposed_halves(from, from_stride);
            let b = transposed_halves(from.add(4 * from_stride), from_stride);
            for i in 0..4 {
                let to = to.add(i * to_stride);
                _mm256_storeu_ps(to, _mm256_permute2f128_ps::<0x20>(a[i], b[i]));
                _mm256_storeu_ps(to.add(4 * to_stride), _mm256_permute2f128_ps::<0x31>(a[i], b[i]));
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn f16(p: *const u16) -> f32 {
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(p.read_unaligned())))) }
    }

    #[inline(always)]
    unsafe fn splat_halves(a: f32, b: f32) -> __m256 {
        unsafe { _mm256_blend_ps::<0xf0>(_mm256_set1_ps(a), _mm256_set1_ps(b)) }
    }

    #[inline(always)]
    unsafe fn to_f32(a: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn wide(a: __m256i) -> [__m256; 2] {
        unsafe {
            let (low, high) = (_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            [_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(high))]
        }
    }

    #[inline(always)]
    unsafe fn load_i16(p: *const i16) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m256i {
        unsafe { _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m256i {
        unsafe { _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [__m256i; 2] {
        unsafe {
            let bytes = Self::load_u8(p);
            [Self::and(bytes, 15), Self::shift_right(bytes, 4)]
        }
    }

    #[inline(always)]
    unsafe fn and(a: __m256i, mask: i16) -> __m256i {
        unsafe { _mm256_and_si256(a, _mm256_set1_epi16(mask)) }
    }

    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_or_si256(a, b) }
    }

    #[inline(always)]
    unsafe fn shift_right(a: __m256i, n: u32) -> __m256i {
        unsafe { _mm256_srl_epi16(a, _mm_cvtsi32_si128(n.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn shift_left(a: __m256i, n: u32) -> __m256i {
        unsafe { _mm256_sll_epi16(a, _mm_cvtsi32_si128(n.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn minus(a: __m256i, n: i16) -> __m256i {
        unsafe { _mm256_sub_epi16(a, _mm256_set1_epi16(n)) }
    }

    #[inline(always)]
    unsafe fn look_up(table: &[i8; 16], a: __m256i) -> __m256i {
        // The low byte of a lane names an element, and becomes the high one to be extended by its sign.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(_mm256_shuffle_epi8(table, a)))
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        // As f16, whose exponent has one bit and a bias of 8 more; that bit is a copy of the sign here, and is cleared.
        unsafe {
            let codes = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast())));
            _mm256_cvtph_ps(_mm_and_si128(codes, _mm_set1_epi16(!0x4000)))
        }
    }

    #[inline(always)]
    unsafe fn dot_pairs(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_madd_epi16(a, b) }
    }
}
