//! Sixteen lanes with AVX-512 F, BW, DQ and VL.
//!
//! Every block is unsafe for the two reasons that the contract of [`Simd`] names: the features, which the callers have
//! by way of [`run`], and the pointers, which are valid for a vector or the part named.
#![allow(clippy::undocumented_unsafe_blocks, reason = "one contract for all, stated above and in `Simd`")]

use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// Needs AVX-512 F, BW, DQ, VL, and AVX2, FMA, F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512;

/// Runs the kernel compiled with these features.
///
/// # Safety
/// The processor has the features, and the kernel's own requirements hold.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on.
    unsafe { kernel.run::<Avx512>() }
}

#[inline(always)]
fn mask(n: usize) -> __mmask16 {
    debug_assert!(n < 16, "a part is shorter than a vector");
    // Masks of up to 15 lanes.
    0x7fff >> (15 - n)
}

#[inline(always)]
unsafe fn widen_bf16(v: __m256i) -> __m512 {
    // SAFETY: the features are there, by the trait's contract.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v))) }
}

// The helpers below are functions and not closures, which would be compiled without the features.

/// Quarters 0 and 2 of `a`, then of `b`.
#[inline(always)]
unsafe fn even_quarters(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the features are there.
    unsafe { _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b) }
}

/// Quarters 1 and 3 of `a`, then of `b`.
#[inline(always)]
unsafe fn odd_quarters(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the features are there.
    unsafe { _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b) }
}

/// Adds neighbouring quarters of `a`, then of `b`.
#[inline(always)]
unsafe fn halves(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the features are there.
    unsafe { _mm512_add_ps(even_quarters(a, b), odd_quarters(a, b)) }
}

/// Four rows, each quarter of which is a transposed square.
#[inline(always)]
unsafe fn transposed_quarters(from: *const f32, stride: usize) -> [__m512; 4] {
    // SAFETY: the features are there, and four rows are valid.
    unsafe {
        let (a, b) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(stride)));
        let (c, d) = (_mm512_loadu_ps(from.add(2 * stride)), _mm512_loadu_ps(from.add(3 * stride)));
        let ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        let ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        let cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
        let cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
        [
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low)),
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high)),
        ]
    }
}

/// Of four consecutive vectors, the sums within each quarter: element `i` of a quarter belongs to vector `i`.
#[inline(always)]
unsafe fn quarters(p: *const f32) -> __m512 {
    // SAFETY: the features are there, and four vectors are valid.
    unsafe {
        let [a, b, c, d] = transposed_quarters(p, 16);
        _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d))
    }
}

impl Simd for Avx512 {
    type V = __m512;
    type I = __m512i;
    type W = __m512i;
    const LANES: usize = 16;
    const TILE_VECTORS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps(mask(n), p) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: __m512, n: usize) {
        unsafe { _mm512_mask_storeu_ps(p, mask(n), v) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_f16_part(p: *const u16, n: usize) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        unsafe { widen_bf16(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(p: *const u16, n: usize) -> __m512 {
        unsafe { widen_bf16(_mm256_maskz_loadu_epi16(mask(n), p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        unsafe {
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)));
            let magnitude = _mm256_slli_epi16::<7>(_mm256_and_si256(codes, _mm256_set1_epi16(0x7f)));
            _mm512_cvtph_ps(_mm256_or_si256(sign, magnitude))
        }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    unsafe fn pow2(n: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(_mm512_set1_ps(1.0), n) }
    }

    #[inline(always)]
    unsafe fn keep_greater(a: __m512, b: __m512, x: __m512) -> __m512 {
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), x) }
    }

    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(v) }
    }

    #[inline(always)]
    unsafe fn largest(v: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(v) }
    }

    #[inline(always)]
    unsafe fn sums(p: *const f32) -> __m512 {
        // Pairs of vectors are interleaved and added four times; the last two steps bring quarters together so that
        // the sums come out in order.
        unsafe {
            let low = halves(quarters(p), quarters(p.add(64)));
            halves(low, halves(quarters(p.add(128)), quarters(p.add(192))))
        }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        unsafe {
            // Quarters of four rows are transposed in place, then quarters change places.
            let a = transposed_quarters(from, from_stride);
            let b = transposed_quarters(from.add(4 * from_stride), from_stride);
            let c = transposed_quarters(from.add(8 * from_stride), from_stride);
            let d = transposed_quarters(from.add(12 * from_stride), from_stride);
            for i in 0..4 {
                let (ab_even, ab_odd) = (even_quarters(a[i], b[i]), odd_quarters(a[i], b[i]));
                let (cd_even, cd_odd) = (even_quarters(c[i], d[i]), odd_quarters(c[i], d[i]));
                // Column 4 q + i gathers quarter q of each row group.
                let to = to.add(i * to_stride);
                _mm512_storeu_ps(to, even_quarters(ab_even, cd_even));
                _mm512_storeu_ps(to.add(4 * to_stride), even_quarters(ab_odd, cd_odd));
                _mm512_storeu_ps(to.add(8 * to_stride), odd_quarters(ab_even, cd_even));
                _mm512_storeu_ps(to.add(12 * to_stride), odd_quarters(ab_odd, cd_odd));
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
    unsafe fn splat_halves(a: f32, b: f32) -> __m512 {
        unsafe { _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(a), _mm512_set1_ps(b)) }
    }

    #[inline(always)]
    unsafe fn to_f32(a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn wide(a: __m512i) -> [__m512; 2] {
        unsafe {
            let (low, high) = (_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64::<1>(a));
            [_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(low)), _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(high))]
        }
    }

    #[inline(always)]
    unsafe fn load_i16(p: *const i16) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512i {
        unsafe { _mm512_cvtepi8_epi16(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [__m512i; 2] {
        unsafe {
            let bytes = _mm_loadu_si128(p.cast());
            let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
            let codes = _mm512_cvtepu8_epi16(_mm256_and_si256(both, _mm256_set1_epi8(15)));
            [codes, codes]
        }
    }

    #[inline(always)]
    unsafe fn and(a: __m512i, mask: i16) -> __m512i {
        unsafe { _mm512_and_si512(a, _mm512_set1_epi16(mask)) }
    }

    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    unsafe fn shift_right(a: __m512i, n: u32) -> __m512i {
        unsafe { _mm512_srl_epi16(a, _mm_cvtsi32_si128(n.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn shift_left(a: __m512i, n: u32) -> __m512i {
        unsafe { _mm512_sll_epi16(a, _mm_cvtsi32_si128(n.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn minus(a: __m512i, n: i16) -> __m512i {
        unsafe { _mm512_sub_epi16(a, _mm512_set1_epi16(n)) }
    }

    #[inline(always)]
    unsafe fn look_up(table: &[i8; 16], a: __m512i) -> __m512i {
        unsafe {
            let table = _mm512_castsi256_si512(_mm256_cvtepi8_epi16(_mm_loadu_si128(table.as_ptr().cast())));
            _mm512_permutexvar_epi16(a, table)
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        // As f16, whose exponent has one bit and a bias of 8 more; that bit is a copy of the sign here, and is cleared.
        unsafe {
            let codes = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
            _mm512_cvtph_ps(_mm256_and_si256(codes, _mm256_set1_epi16(!0x4000)))
        }
    }

    #[inline(always)]
    unsafe fn dot_pairs(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_madd_epi16(a, b) }
    }
}
