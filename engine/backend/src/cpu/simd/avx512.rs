//! Sixteen lanes with AVX-512 F, BW, DQ and VL.
//!
//! Every block is unsafe for the two reasons that the contract of [`Simd`] names: the features, which the callers have
//! by way of [`run`], and the pointers, which are valid for a vector or the part named.
#![allow(clippy::undocumented_unsafe_blocks, reason = "one contract for all, stated above and in `Simd`")]

use super::avx2::eight_f16;
use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// Needs AVX-512 F, BW, DQ, VL, and AVX2, FMA, F16C; VNNI where it says so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const VNNI: bool>;

/// Runs the kernel compiled with these features.
///
/// # Safety
/// The processor has the features, and the kernel's own requirements hold.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on.
    unsafe { kernel.run::<Avx512<false>>() }
}

/// As [`run`], with VNNI.
///
/// # Safety
/// The same.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn run_vnni<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on.
    unsafe { kernel.run::<Avx512<true>>() }
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

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type V = __m512;
    type I = __m512i;
    type B = __m512i;
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
    unsafe fn f16_strided(p: *const u8, stride: usize) -> __m512 {
        unsafe { _mm512_zextps256_ps512(eight_f16(p, stride)) }
    }

    #[inline(always)]
    unsafe fn bytes_to_f32(word: u64) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_cvtsi64_si128(word.cast_signed()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }

    #[inline(always)]
    unsafe fn to_f32(a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn load_ints(p: *const i32) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn add_ints(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn spread_parts(scales: __m512, first: usize) -> __m512 {
        let lane = index(first);
        unsafe { _mm512_permutexvar_ps(_mm512_mask_set1_epi32(_mm512_set1_epi32(lane), 0xff00, lane + 1), scales) }
    }

    #[inline(always)]
    unsafe fn spread_halves(scales: [__m512; 2], first: usize) -> __m512 {
        unsafe {
            let lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            _mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(index(2 * first))), scales[0])
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_parts(p: *const u8, stride: usize) -> __m512i {
        unsafe {
            let first = _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()));
            _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(p.add(stride).cast()))
        }
    }

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8, stride: usize) -> __m512i {
        unsafe {
            let first = _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()));
            let bytes = _mm512_mask_broadcast_i32x4(first, 0xff00, _mm_loadu_si128(p.add(stride).cast()));
            Self::and(_mm512_srlv_epi64(bytes, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)), 15)
        }
    }

    #[inline(always)]
    unsafe fn move_bits(a: __m512i, left: i32, step: i32) -> __m512i {
        // Rotated within words of 32 bits: to the right by their size less.
        unsafe { _mm512_rolv_epi32(a, _mm512_mask_set1_epi32(_mm512_set1_epi32(left), 0xff00, left + step)) }
    }

    #[inline(always)]
    unsafe fn and(a: __m512i, mask: u8) -> __m512i {
        unsafe { _mm512_and_si512(a, _mm512_set1_epi8(mask.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    unsafe fn xor(a: __m512i, mask: u8) -> __m512i {
        unsafe { _mm512_xor_si512(a, _mm512_set1_epi8(mask.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], a: __m512i) -> __m512i {
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), a) }
    }

    #[inline(always)]
    unsafe fn widen_bytes(a: __m512i) -> [__m512; 4] {
        unsafe {
            let quarters = [
                _mm512_castsi512_si128(a),
                _mm512_extracti32x4_epi32::<1>(a),
                _mm512_extracti32x4_epi32::<2>(a),
                _mm512_extracti32x4_epi32::<3>(a),
            ];
            let mut out = [_mm512_setzero_ps(); 4];
            for (out, quarter) in out.iter_mut().zip(quarters) {
                *out = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(quarter));
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn dot_planes(codes: __m512i, high: __m512i, low: __m512i, wide: bool) -> __m512i {
        unsafe {
            if VNNI {
                let high = _mm512_slli_epi32::<8>(_mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, high));
                return _mm512_dpbusd_epi32(high, codes, low);
            }
            if !wide {
                return planes(codes, high, low, 1);
            }
            // Pairs of products of eight bits do not fit 16 bits: the lowest bit is multiplied apart.
            let upper = Self::and(_mm512_srli_epi16::<1>(codes), 0x7f);
            _mm512_add_epi32(planes(upper, high, low, 2), planes(Self::and(codes, 1), high, low, 1))
        }
    }
}

/// `factor` times [`Simd::dot_planes`] of codes of at most seven bits.
#[inline(always)]
unsafe fn planes(codes: __m512i, high: __m512i, low: __m512i, factor: i16) -> __m512i {
    // SAFETY: the features are there.
    unsafe {
        let high = _mm512_madd_epi16(_mm512_maddubs_epi16(codes, high), _mm512_set1_epi16(256 * factor));
        _mm512_add_epi32(high, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, low), _mm512_set1_epi16(factor)))
    }
}

/// Lane numbers are below 16.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "below 16")]
fn index(lane: usize) -> i32 {
    lane as i32
}
