//! Sixteen lanes with AVX-512 F, BW, DQ and VL.

use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// Needs AVX-512 F, BW, DQ, VL, and AVX2, FMA, F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512;

/// Runs the kernel compiled with these features.
///
/// # Safety
/// The processor has the features, and what the kernel needs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on.
    unsafe { kernel.run::<Avx512>() }
}

#[inline(always)]
fn mask(n: usize) -> __mmask16 {
    debug_assert!(n < 16, "a part is shorter than a vector");
    ((1u32 << n) - 1) as __mmask16
}

#[inline(always)]
unsafe fn widen_bf16(v: __m256i) -> __m512 {
    // SAFETY: the features are there, by the trait's contract.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v))) }
}

// SAFETY (of all blocks below): the features are there and pointers are valid, by the trait's contract.
impl Simd for Avx512 {
    type V = __m512;
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
        // Pairs of vectors are interleaved and added, four times: 1, 2, 4, then 8 lanes apart. Vectors are taken so
        // that the sums come out in order: the last two steps interleave quarters.
        unsafe {
            let at = |i: usize| _mm512_loadu_ps(p.add(i * 16));
            let pair = |a, b| _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let quad = |a: __m512, b: __m512| {
                let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
                _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
            };
            let four = |i: usize| quad(pair(at(i), at(i + 1)), pair(at(i + 2), at(i + 3)));
            // Each quarter of `four(i)` holds partial sums of vectors i to i + 3.
            let halves = |a, b| {
                _mm512_add_ps(_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
            };
            halves(halves(four(0), four(4)), halves(four(8), four(12)))
        }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        unsafe {
            // Quarters of four rows are transposed in place, then quarters change places.
            let mut rows = [_mm512_setzero_ps(); 16];
            for four in 0..4 {
                let at = |i: usize| _mm512_loadu_ps(from.add((four * 4 + i) * from_stride));
                let (a, b, c, d) = (at(0), at(1), at(2), at(3));
                let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                let low = |x, y| _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
                let high = |x, y| _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
                rows[four * 4] = low(ab_low, cd_low);
                rows[four * 4 + 1] = high(ab_low, cd_low);
                rows[four * 4 + 2] = low(ab_high, cd_high);
                rows[four * 4 + 3] = high(ab_high, cd_high);
            }
            for i in 0..4 {
                let (a, b, c, d) = (rows[i], rows[4 + i], rows[8 + i], rows[12 + i]);
                let (ab_even, ab_odd) =
                    (_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
                let (cd_even, cd_odd) =
                    (_mm512_shuffle_f32x4::<0b10_00_10_00>(c, d), _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d));
                // Column 4 q + i gathers quarter q of each row group.
                let column = |q: usize| to.add((4 * q + i) * to_stride);
                _mm512_storeu_ps(column(0), _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_even, cd_even));
                _mm512_storeu_ps(column(1), _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_odd, cd_odd));
                _mm512_storeu_ps(column(2), _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_even, cd_even));
                _mm512_storeu_ps(column(3), _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_odd, cd_odd));
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}
