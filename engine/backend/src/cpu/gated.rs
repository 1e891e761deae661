//! Activations of one exponential: SwiGLU (Shazeer 2020) and its clamped kind, and GELU by tanh, plain and gated.

use super::CpuTensor;
use super::simd::math::exp;
use super::simd::{Isa, Kernel, Simd};
use super::threads::{Disjoint, Threads};
use crate::{SWIGLU_ALPHA, SWIGLU_LIMIT};
use std::marker::PhantomData;

/// Rows that one task works on.
const ROWS: usize = 8;

/// A function of an element, or of a gate and an up element.
pub(super) trait Function: Sync {
    /// Columns of the product for each of the result.
    const INPUTS: usize;

    /// # Safety
    /// The processor supports `S`.
    unsafe fn of<S: Simd>(x: S::V, up: S::V) -> S::V;
}

/// See [`crate::Activation::SiluMul`].
pub(super) struct SiluMul;
/// See [`crate::Activation::GeluTanh`].
pub(super) struct GeluTanh;
/// See [`crate::Activation::GeluTanhMul`].
pub(super) struct GeluTanhMul;
/// See [`crate::Activation::ClampedSwiglu`].
pub(super) struct ClampedSwiglu;

/// `x / (1 + exp(-z))`. The exponential stays finite, so that steeply negative `z` give numbers close to zero.
#[inline(always)]
unsafe fn times_sigmoid<S: Simd>(x: S::V, z: S::V) -> S::V {
    // SAFETY: passed on.
    unsafe {
        let e = exp::<S>(S::sub(S::splat(0.0), z));
        S::div(x, S::add(S::splat(1.0), e))
    }
}

impl Function for SiluMul {
    const INPUTS: usize = 2;

    #[inline(always)]
    unsafe fn of<S: Simd>(gate: S::V, up: S::V) -> S::V {
        // SAFETY: passed on.
        unsafe { S::mul(times_sigmoid::<S>(gate, gate), up) }
    }
}

impl Function for GeluTanh {
    const INPUTS: usize = 1;

    #[inline(always)]
    unsafe fn of<S: Simd>(x: S::V, _: S::V) -> S::V {
        /// Twice the square root of 2/π, alone and times 0.044715.
        const LINEAR: f32 = 1.595_769;
        const CUBIC: f32 = 0.071_354_814;
        // SAFETY: passed on.
        unsafe {
            let slope = S::fma(S::mul(x, x), S::splat(CUBIC), S::splat(LINEAR));
            times_sigmoid::<S>(x, S::mul(x, slope))
        }
    }
}

impl Function for GeluTanhMul {
    const INPUTS: usize = 2;

    #[inline(always)]
    unsafe fn of<S: Simd>(gate: S::V, up: S::V) -> S::V {
        // SAFETY: passed on.
        unsafe { S::mul(GeluTanh::of::<S>(gate, up), up) }
    }
}

impl Function for ClampedSwiglu {
    const INPUTS: usize = 2;

    #[inline(always)]
    unsafe fn of<S: Simd>(gate: S::V, up: S::V) -> S::V {
        // SAFETY: passed on.
        unsafe {
            // The second operand is what a comparison with NaN gives.
            let (limit, low) = (S::splat(SWIGLU_LIMIT), S::splat(-SWIGLU_LIMIT));
            let gate = S::min(limit, gate);
            let up = S::max(low, S::min(limit, up));
            let gated = times_sigmoid::<S>(gate, S::mul(gate, S::splat(SWIGLU_ALPHA)));
            S::mul(S::add(up, S::splat(1.0)), gated)
        }
    }
}

/// The function of the first `rows` rows.
pub(super) fn apply<F: Function>((threads, isa): (&Threads, Isa), x: &CpuTensor, rows: usize, out: &mut CpuTensor) {
    let (n, inputs) = (out.cols, F::INPUTS);
    assert_eq!(x.cols, inputs * n, "columns of an activation's product");
    let input = x.head(rows);
    let output = Disjoint::new(out.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        // SAFETY: the ranges of rows are disjoint.
        let out = unsafe { output.slice(range.start * n..range.end * n) };
        let x = &input[range.start * inputs * n..range.end * inputs * n];
        // SAFETY: the device's instruction set is supported; x and out have whole rows.
        unsafe { isa.run(Rows { x, n, out, function: PhantomData::<F> }) }
    });
}

/// Whole rows: `INPUTS * n` elements of `x` for `n` of `out`.
struct Rows<'a, F> {
    x: &'a [f32],
    n: usize,
    out: &'a mut [f32],
    function: PhantomData<F>,
}

impl<F: Function> Kernel for Rows<'_, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n = self.n;
        let (whole, part) = (n / S::LANES * S::LANES, n % S::LANES);
        for (x, out) in self.x.chunks_exact(F::INPUTS * n).zip(self.out.chunks_exact_mut(n)) {
            let (x, out) = (x.as_ptr(), out.as_mut_ptr());
            // SAFETY: x has n elements, and as many behind them where the function has a gate; so has out.
            unsafe {
                let up = x.add((F::INPUTS - 1) * n);
                for i in (0..whole).step_by(S::LANES) {
                    S::store(out.add(i), F::of::<S>(S::load(x.add(i)), S::load(up.add(i))));
                }
                let rest = F::of::<S>(S::load_part(x.add(whole), part), S::load_part(up.add(whole), part));
                S::store_part(out.add(whole), rest, part);
            }
        }
    }
}
