//! A vector added to every row.

use super::simd::{Element, Isa, Kernel, Simd};
use super::threads::{Disjoint, Threads};
use super::{CpuTensor, CpuWeight};
use half::{bf16, f16};
use lagoon_types::DType;

/// Rows that one task adds to.
const ROWS: usize = 16;

/// See [`crate::Device::add_bias`].
pub(super) fn add_bias((threads, isa): (&Threads, Isa), x: &mut CpuTensor, bias: &CpuWeight, rows: usize) {
    let cols = x.cols;
    assert_eq!((bias.rows, bias.cols), (1, cols), "shapes of a bias");
    let vector = bias.row(0);
    let x = Disjoint::new(x.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        // SAFETY: the ranges of rows are disjoint.
        let x = unsafe { x.slice(range.start * cols..range.end * cols) };
        // SAFETY: the device's instruction set is supported; x has whole rows of the vector's length.
        unsafe {
            match bias.dtype() {
                DType::F32 => isa.run(Add::<f32> { x, bias: bytemuck::cast_slice(vector) }),
                DType::F16 => isa.run(Add::<f16> { x, bias: bytemuck::cast_slice(vector) }),
                DType::BF16 => isa.run(Add::<bf16> { x, bias: bytemuck::cast_slice(vector) }),
            }
        }
    });
}

/// Whole rows of `bias.len()` elements.
struct Add<'a, E> {
    x: &'a mut [f32],
    bias: &'a [E],
}

impl<E: Element> Kernel for Add<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let n = self.bias.len();
        let (whole, part) = (n / S::LANES * S::LANES, n % S::LANES);
        let bias = self.bias.as_ptr();
        for x in self.x.chunks_exact_mut(n) {
            let x = x.as_mut_ptr();
            // SAFETY: both pointers have n elements.
            unsafe {
                for i in (0..whole).step_by(S::LANES) {
                    S::store(x.add(i), S::add(S::load(x.add(i)), E::load::<S>(bias.add(i))));
                }
                let sum = S::add(S::load_part(x.add(whole), part), E::load_part::<S>(bias.add(whole), part));
                S::store_part(x.add(whole), sum, part);
            }
        }
    }
}
