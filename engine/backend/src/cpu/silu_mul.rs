//! The gated activation of Llama's feed-forward layer (SwiGLU, Shazeer 2020).

use super::CpuTensor;
use super::simd::math::exp;
use super::simd::{Isa, Kernel, Simd};
use super::threads::{Disjoint, Threads};

/// Rows that one task works on.
const ROWS: usize = 8;

/// See [`crate::Activation::SiluMul`].
pub(super) fn silu_mul((threads, isa): (&Threads, Isa), x: &CpuTensor, rows: usize, out: &mut CpuTensor) {
    let n = out.cols;
    assert_eq!(x.cols, 2 * n, "columns of gate and up");
    let input = x.head(rows);
    let output = Disjoint::new(out.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        // SAFETY: the ranges of rows are disjoint.
        let out = unsafe { output.slice(range.start * n..range.end * n) };
        let x = &input[range.start * 2 * n..range.end * 2 * n];
        // SAFETY: the device's instruction set is supported; x and out have whole rows.
        unsafe { isa.run(Gate { x, n, out }) }
    });
}

/// Whole rows: `2 n` elements of `x` for `n` of `out`.
struct Gate<'a> {
    x: &'a [f32],
    n: usize,
    out: &'a mut [f32],
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n = self.n;
        let (whole, part) = (n / S::LANES * S::LANES, n % S::LANES);
        for (x, out) in self.x.chunks_exact(2 * n).zip(self.out.chunks_exact_mut(n)) {
            let (gate, out) = (x.as_ptr(), out.as_mut_ptr());
            // SAFETY: gate and up have n elements each, and so has out.
            unsafe {
                let up = gate.add(n);
                for i in (0..whole).step_by(S::LANES) {
                    S::store(out.add(i), silu_times::<S>(S::load(gate.add(i)), S::load(up.add(i))));
                }
                let rest = silu_times::<S>(S::load_part(gate.add(whole), part), S::load_part(up.add(whole), part));
                S::store_part(out.add(whole), rest, part);
            }
        }
    }
}

/// `gate / (1 + exp(-gate)) * up`. The exponential stays finite, so that steeply negative gates give numbers close to
/// zero.
#[inline(always)]
unsafe fn silu_times<S: Simd>(gate: S::V, up: S::V) -> S::V {
    // SAFETY: passed on.
    unsafe {
        let e = exp::<S>(S::sub(S::splat(0.0), gate));
        S::mul(S::div(gate, S::add(S::splat(1.0), e)), up)
    }
}
