//! Layer normalisation (Ba, Kiros and Hinton 2016), without a bias. A second pass computes the variance from
//! differences to the mean, so that rows far from zero keep their precision.

use super::simd::{Element, Isa, Kernel, Simd};
use super::threads::{Disjoint, Threads};
use super::{CpuTensor, CpuWeight};
use half::{bf16, f16};
use lagoon_types::DType;

/// Rows that one task normalises.
const ROWS: usize = 16;

/// See [`crate::Device::layer_norm`].
pub(super) fn layer_norm(
    (threads, isa): (&Threads, Isa),
    x: &CpuTensor,
    weight: &CpuWeight,
    eps: f32,
    rows: usize,
    out: &mut CpuTensor,
) {
    let cols = x.cols;
    assert_eq!((weight.rows, weight.cols, out.cols), (1, cols, cols), "shapes of a norm");
    let scale = weight.row(0);
    let input = x.head(rows);
    let output = Disjoint::new(out.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        // SAFETY: the ranges of rows are disjoint.
        let out = unsafe { output.slice(range.start * cols..range.end * cols) };
        let x = &input[range.start * cols..range.end * cols];
        // SAFETY: the device's instruction set is supported; x and out have whole rows of the weight's length.
        unsafe {
            match weight.dtype() {
                DType::F32 => isa.run(Norm::<f32> { x, scale: bytemuck::cast_slice(scale), eps, out }),
                DType::F16 => isa.run(Norm::<f16> { x, scale: bytemuck::cast_slice(scale), eps, out }),
                DType::BF16 => isa.run(Norm::<bf16> { x, scale: bytemuck::cast_slice(scale), eps, out }),
            }
        }
    });
}

/// Whole rows of `scale.len()` elements.
struct Norm<'a, E> {
    x: &'a [f32],
    scale: &'a [E],
    eps: f32,
    out: &'a mut [f32],
}

impl<E: Element> Kernel for Norm<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n = self.scale.len();
        let (whole, part) = (n / S::LANES * S::LANES, n % S::LANES);
        for (x, out) in self.x.chunks_exact(n).zip(self.out.chunks_exact_mut(n)) {
            let rest = &x[whole..];
            let (x, out, scale) = (x.as_ptr(), out.as_mut_ptr(), self.scale.as_ptr());
            // SAFETY: each pointer has n elements.
            unsafe {
                let mut sum = S::load_part(x.add(whole), part);
                for i in (0..whole).step_by(S::LANES) {
                    sum = S::add(sum, S::load(x.add(i)));
                }
                let mean = S::sum(sum) / n as f32;
                let mut squares = S::splat(0.0);
                for i in (0..whole).step_by(S::LANES) {
                    let v = S::sub(S::load(x.add(i)), S::splat(mean));
                    squares = S::fma(v, v, squares);
                }
                // Lanes beyond the row hold zero and are no differences.
                let last: f32 = rest.iter().map(|v| (v - mean) * (v - mean)).sum();
                let factor = S::splat(1.0 / ((S::sum(squares) + last) / n as f32 + self.eps).sqrt());
                let mean = S::splat(mean);
                for i in (0..whole).step_by(S::LANES) {
                    let v = S::mul(S::sub(S::load(x.add(i)), mean), factor);
                    S::store(out.add(i), S::mul(v, E::load::<S>(scale.add(i))));
                }
                let v = S::mul(S::sub(S::load_part(x.add(whole), part), mean), factor);
                S::store_part(out.add(whole), S::mul(v, E::load_part::<S>(scale.add(whole), part)), part);
            }
        }
    }
}
