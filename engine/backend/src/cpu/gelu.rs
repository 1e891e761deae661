//! The exact GELU activation (Hendrycks and Gimpel 2016).
//!
//! `gelu(x) = max(x, 0) - |x| Φ(-|x|)`, where the tail `Φ(-a)` of the normal distribution is `exp(-a²/2) t P(t)` with
//! `t = 1 / (1 + 0.35 a)`. The exponential carries the tail's decay, so `P` is smooth and tiny results keep their
//! relative precision. `P` is a minimax polynomial of degree 8, fitted on `a` from 0 to 13.3 with a relative error of
//! at most 3.2e-8; beyond, the exponential is zero.

use super::CpuTensor;
use super::simd::math::exp;
use super::simd::{Isa, Kernel, Simd};
use super::threads::{Disjoint, Threads};

/// Rows that one task works on.
const ROWS: usize = 8;
/// How fast `t` falls.
const T_SCALE: f32 = 0.35;
/// Coefficients of `P`, the highest first.
const TAIL: [f32; 9] = [
    -0.029_115_017,
    0.143_818_42,
    -0.255_391_03,
    0.158_796_58,
    -0.022_843_437,
    0.105_392_15,
    0.119_863_09,
    0.139_857_56,
    0.139_621_66,
];

/// See [`crate::Activation::Gelu`].
pub(super) fn gelu((threads, isa): (&Threads, Isa), x: &CpuTensor, rows: usize, out: &mut CpuTensor) {
    let n = out.cols;
    assert_eq!(x.cols, n, "columns of an activation");
    let input = x.head(rows);
    let output = Disjoint::new(out.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        let range = range.start * n..range.end * n;
        // SAFETY: the ranges of rows are disjoint.
        let out = unsafe { output.slice(range.clone()) };
        // SAFETY: the device's instruction set is supported; x and out are equally long.
        unsafe { isa.run(Gelu { x: &input[range], out }) }
    });
}

/// As many elements of `x` as of `out`.
struct Gelu<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Gelu<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n = self.x.len();
        let (whole, part) = (n / S::LANES * S::LANES, n % S::LANES);
        let (x, out) = (self.x.as_ptr(), self.out.as_mut_ptr());
        // SAFETY: both have n elements.
        unsafe {
            for i in (0..whole).step_by(S::LANES) {
                S::store(out.add(i), activate::<S>(S::load(x.add(i))));
            }
            S::store_part(out.add(whole), activate::<S>(S::load_part(x.add(whole), part)), part);
        }
    }
}

#[inline(always)]
unsafe fn activate<S: Simd>(x: S::V) -> S::V {
    // SAFETY: passed on.
    unsafe {
        let (zero, one) = (S::splat(0.0), S::splat(1.0));
        let a = S::max(x, S::sub(zero, x));
        let t = S::div(one, S::fma(a, S::splat(T_SCALE), one));
        let mut p = S::splat(TAIL[0]);
        for c in &TAIL[1..] {
            p = S::fma(p, t, S::splat(*c));
        }
        let e = exp::<S>(S::mul(S::mul(a, S::splat(-0.5)), a));
        S::sub(S::max(x, zero), S::mul(S::mul(a, e), S::mul(t, p)))
    }
}
