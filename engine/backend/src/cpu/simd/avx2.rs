//! Eight lanes with AVX2, FMA and F16C.
//!
//! Every block is unsafe for the two reasons that the contract of [`Simd`] names: the features, which the callers have
//! by way of [`run`], and the pointers, which are valid for a vector or the part named.
#![allow(clippy::undocumented_unsafe_blocks, reason = "one contract for all, stated above and in `Simd`")]

use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// Needs AVX2, FMA and F16C; AVX-VNNI where it says so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2<const VNNI: bool>;

/// Runs the kernel compiled with these features.
///
/// # Safety
/// The processor has the features, and the kernel's own requirements hold.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on.
    unsafe { kernel.run::<Avx2<false>>() }
}

/// As [`run`], with AVX-VNNI.
///
/// # Safety
/// The same.
#[target_feature(enable = "avxvnni,avx2,fma,f16c")]
pub(super) unsafe fn run_vnni<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on.
    unsafe { kernel.run::<Avx2<true>>() }
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

/// Eight f16, `stride` bytes apart.
#[inline(always)]
pub(super) unsafe fn eight_f16(p: *const u8, stride: usize) -> __m256 {
    // SAFETY: the features are there, and the elements are valid; they are read unaligned.
    unsafe {
        let at = |i: usize| p.add(i * stride).cast::<i16>().read_unaligned();
        let [a, b, c, d, e, f, g, h] = [at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)];
        _mm256_cvtph_ps(_mm_setr_epi16(a, b, c, d, e, f, g, h))
    }
}

/// `factor` times [`Simd::dot_planes`] of codes of at most seven bits.
#[inline(always)]
unsafe fn planes(codes: __m256i, high: __m256i, low: __m256i, factor: i16) -> __m256i {
    // SAFETY: the features are there.
    unsafe {
        let high = _mm256_madd_epi16(_mm256_maddubs_epi16(codes, high), _mm256_set1_epi16(256 * factor));
        _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, low), _mm256_set1_epi16(factor)))
    }
}

/// Lane numbers are below 8.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "below 8")]
fn index(lane: usize) -> i32 {
    lane as i32
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type V = __m256;
    type I = __m256i;
    type B = __m256i;
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
    unsafe fn f16_strided(p: *const u8, stride: usize) -> __m256 {
        unsafe { eight_f16(p, stride) }
    }

    #[inline(always)]
    unsafe fn bytes_to_f32(word: u64) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(word.cast_signed()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }

    #[inline(always)]
    unsafe fn to_f32(a: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn load_ints(p: *const i32) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }

    #[inline(always)]
    unsafe fn add_ints(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn spread_parts(scales: __m256, first: usize) -> __m256 {
        unsafe { _mm256_permutevar8x32_ps(scales, _mm256_set1_epi32(index(first))) }
    }

    #[inline(always)]
    unsafe fn spread_halves(scales: [__m256; 2], first: usize) -> __m256 {
        let lane = index(2 * (first % 4));
        unsafe {
            let lanes = _mm256_setr_epi32(lane, lane, lane, lane, lane + 1, lane + 1, lane + 1, lane + 1);
            _mm256_permutevar8x32_ps(scales[first / 4], lanes)
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_parts(p: *const u8, _: usize) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8, _: usize) -> __m256i {
        unsafe {
            let bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
            Self::and(_mm256_srlv_epi64(bytes, _mm256_setr_epi64x(0, 0, 4, 4)), 15)
        }
    }

    #[inline(always)]
    unsafe fn move_bits(a: __m256i, left: i32, _: i32) -> __m256i {
        unsafe {
            match left {
                0 => a,
                1.. => _mm256_sll_epi16(a, _mm_cvtsi32_si128(left)),
                _ => _mm256_srl_epi16(a, _mm_cvtsi32_si128(-left)),
            }
        }
    }

    #[inline(always)]
    unsafe fn and(a: __m256i, mask: u8) -> __m256i {
        unsafe { _mm256_and_si256(a, _mm256_set1_epi8(mask.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_or_si256(a, b) }
    }

    #[inline(always)]
    unsafe fn xor(a: __m256i, mask: u8) -> __m256i {
        unsafe { _mm256_xor_si256(a, _mm256_set1_epi8(mask.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], a: __m256i) -> __m256i {
        unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), a) }
    }

    #[inline(always)]
    unsafe fn widen_bytes(a: __m256i) -> [__m256; 4] {
        unsafe {
            let (low, high) = (_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let eights = [low, _mm_unpackhi_epi64(low, low), high, _mm_unpackhi_epi64(high, high)];
            let mut out = [_mm256_setzero_ps(); 4];
            for (out, eight) in out.iter_mut().zip(eights) {
                *out = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn dot_planes(codes: __m256i, high: __m256i, low: __m256i, wide: bool) -> __m256i {
        unsafe {
            if VNNI {
                let high = _mm256_slli_epi32::<8>(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), codes, high));
                return _mm256_dpbusd_avx_epi32(high, codes, low);
            }
            if !wide {
                return planes(codes, high, low, 1);
            }
            // Pairs of products of eight bits do not fit 16 bits: the lowest bit is multiplied apart.
            let upper = Self::and(_mm256_srli_epi16::<1>(codes), 0x7f);
            _mm256_add_epi32(planes(upper, high, low, 2), planes(Self::and(codes, 1), high, low, 1))
        }
    }
}
