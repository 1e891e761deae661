//! Root-mean-square normalisation (Zhang and Sennrich 2019).

use super::simd::{Element, Isa, Kernel, Simd};
use super::threads::{Disjoint, Threads};
use super::{CpuTensor, CpuWeight};
use half::{bf16, f16};
use lagoon_types::DType;

/// Rows that one task normalises.
const ROWS: usize = 16;

/// See [`crate::Device::rms_norm`].
pub(super) fn rms_norm(
    (threads, isa): (&Threads, Isa),
    x: &CpuTensor,
    weight: &CpuWeight,
    eps: f32,
    rows: usize,
    out: &mut CpuTensor,
) {
    let cols = x.cols;
    assert_eq!((weight.rows, weight.cols, out.cols), (1, cols, cols), "shapes of a norm");
    let input = x.head(rows);
    let output = Disjoint::new(out.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        // SAFETY: the ranges of rows are disjoint.
        let out = unsafe { output.slice(range.start * cols..range.end * cols) };
        let x = &input[range.start * cols..range.end * cols];
        // SAFETY: x and out have whole rows of the weight's length.
        unsafe { run(isa, (x.as_ptr(), out.as_mut_ptr()), range.len(), weight, eps) };
    });
}

/// Normalises stretches of the weight's length where they are.
pub(super) fn in_place(isa: Isa, x: &mut [f32], weight: &CpuWeight, eps: f32) {
    assert_eq!(x.len() % weight.cols, 0, "whole stretches are normalised");
    let (stretches, x) = (x.len() / weight.cols, x.as_mut_ptr());
    // SAFETY: x is read and written, whole stretches of the weight's length.
    unsafe { run(isa, (x.cast_const(), x), stretches, weight, eps) };
}

/// # Safety
/// `x` and `out` are the same, or disjoint, and have `rows` rows of the weight's length.
unsafe fn run(isa: Isa, (x, out): (*const f32, *mut f32), rows: usize, weight: &CpuWeight, eps: f32) {
    let scale = weight.row(0);
    // SAFETY: the device's instruction set is supported; the pointers by the contract.
    unsafe {
        match weight.dtype() {
            DType::F32 => isa.run(Norm::<f32> { x, scale: bytemuck::cast_slice(scale), eps, rows, out }),
            DType::F16 => isa.run(Norm::<f16> { x, scale: bytemuck::cast_slice(scale), eps, rows, out }),
            DType::BF16 => isa.run(Norm::<bf16> { x, scale: bytemuck::cast_slice(scale), eps, rows, out }),
        }
    }
}

/// Whole rows of `scale.len()` elements; each is read before it is written.
struct Norm<'a, E> {
    x: *const f32,
    scale: &'a [E],
    eps: f32,
    rows: usize,
    out: *mut f32,
}

impl<E: Element> Kernel for Norm<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n = self.scale.len();
        let (whole, part) = (n / S::LANES * S::LANES, n % S::LANES);
        for row in 0..self.rows {
            // SAFETY: each pointer has n elements a row.
            unsafe {
                let (x, out, scale) = (self.x.add(row * n), self.out.add(row * n), self.scale.as_ptr());
                let mut squares = S::splat(0.0);
                for i in (0..whole).step_by(S::LANES) {
                    let v = S::load(x.add(i));
                    squares = S::fma(v, v, squares);
                }
                let rest = S::load_part(x.add(whole), part);
                squares = S::fma(rest, rest, squares);
                let factor = S::splat(1.0 / (S::sum(squares) / n as f32 + self.eps).sqrt());
                for i in (0..whole).step_by(S::LANES) {
                    let scale = E::load::<S>(scale.add(i));
                    S::store(out.add(i), S::mul(S::mul(S::load(x.add(i)), factor), scale));
                }
                let scale = E::load_part::<S>(scale.add(whole), part);
                S::store_part(out.add(whole), S::mul(S::mul(rest, factor), scale), part);
            }
        }
    }
}
