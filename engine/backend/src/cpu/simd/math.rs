//! Functions of vectors that every instruction set shares.

use super::{Element, Simd};

/// Below this, [`exp`] is zero: the smallest normal number is `exp(-87.34)`.
const EXP_MIN: f32 = -87.3;
/// Above this, [`exp`] stays at its largest value, about 2.4e38.
const EXP_MAX: f32 = 88.37;

/// `e^x` with a relative error of about 1e-7 for `x` from -87.3 to 88.37; zero below (also for negative infinity),
/// constant above. Range reduction by ln 2 in two parts and a minimax polynomial of degree 5 for
/// `(e^r - 1 - r) / r²` (the single-precision polynomial of Cephes, Moshier 1992).
///
/// # Safety
/// The processor has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: passed on.
    unsafe {
        let (low, one) = (S::splat(EXP_MIN), S::splat(1.0));
        let t = S::min(S::max(x, low), S::splat(EXP_MAX));
        let n = S::round(S::mul(t, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-0.693_359_4), t);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        p = S::fma(p, r, S::splat(1.398_2e-3));
        p = S::fma(p, r, S::splat(8.333_452e-3));
        p = S::fma(p, r, S::splat(4.166_579_6e-2));
        p = S::fma(p, r, S::splat(1.666_666_5e-1));
        p = S::fma(p, r, S::splat(0.5));
        let y = S::add(S::fma(p, S::mul(r, r), r), one);
        S::keep_greater(x, low, S::mul(y, S::pow2(n)))
    }
}

/// Widens `n` elements into `to`, followed by zeros up to a whole vector.
///
/// # Safety
/// `from` is valid for `n` elements and `to` for `n` rounded up to whole vectors.
#[inline(always)]
pub(crate) unsafe fn widen_padded<S: Simd, E: Element>(from: *const E, n: usize, to: *mut f32) {
    let whole = n / S::LANES * S::LANES;
    let mut i = 0;
    // SAFETY: passed on.
    unsafe {
        while i < whole {
            S::store(to.add(i), E::load::<S>(from.add(i)));
            i += S::LANES;
        }
        if whole < n {
            S::store(to.add(i), E::load_part::<S>(from.add(i), n - whole));
        }
    }
}

/// `x[i] *= factor`.
///
/// # Safety
/// `x` is valid for `n` elements, a whole number of vectors.
#[inline(always)]
pub(crate) unsafe fn scale<S: Simd>(x: *mut f32, n: usize, factor: f32) {
    let mut i = 0;
    // SAFETY: passed on.
    unsafe {
        let factor = S::splat(factor);
        while i < n {
            S::store(x.add(i), S::mul(S::load(x.add(i)), factor));
            i += S::LANES;
        }
    }
}

/// 0, 1, 2 … for the longest vector.
const RAMP: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// `x[i] += slope * (start + i)`. Integers below 2^24 in `start + i` are exact.
///
/// # Safety
/// `x` is valid for `n` elements, a whole number of vectors.
#[inline(always)]
pub(crate) unsafe fn add_ramp<S: Simd>(x: *mut f32, n: usize, start: f32, slope: f32) {
    const { assert!(S::LANES <= RAMP.len()) };
    // SAFETY: passed on; the ramp has a vector.
    unsafe {
        let slope = S::splat(slope);
        for i in (0..n).step_by(S::LANES) {
            let at = S::add(S::splat(start + i as f32), S::load(RAMP.as_ptr()));
            S::store(x.add(i), S::fma(at, slope, S::load(x.add(i))));
        }
    }
}

/// `x[i] = cap * tanh(x[i] / cap)`, with an absolute error of some units in the last place of `cap`:
/// `tanh(a) = 1 - 2 / (1 + exp(2 a))`.
///
/// # Safety
/// `x` is valid for `n` elements, a whole number of vectors.
#[inline(always)]
pub(crate) unsafe fn softcap<S: Simd>(x: *mut f32, n: usize, cap: f32) {
    let mut i = 0;
    // SAFETY: passed on.
    unsafe {
        let (steep, one, cap, twice) = (S::splat(2.0 / cap), S::splat(1.0), S::splat(cap), S::splat(2.0 * cap));
        while i < n {
            let e = exp::<S>(S::mul(S::load(x.add(i)), steep));
            S::store(x.add(i), S::sub(cap, S::div(twice, S::add(one, e))));
            i += S::LANES;
        }
    }
}
