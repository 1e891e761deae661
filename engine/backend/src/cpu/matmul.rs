//! Matrix products with weights in their own element type.

use super::threads::{Disjoint, Threads};
use super::widen::widen;
use super::{CpuTensor, CpuWeight};
use crate::Mode;

/// Weight rows that one task widens and multiplies.
const PANEL: usize = 64;

/// See [`crate::Device::matmul`].
pub(super) fn matmul(
    threads: &Threads,
    x: &CpuTensor,
    weight: &CpuWeight,
    rows: usize,
    mode: Mode,
    out: &mut CpuTensor,
) {
    let (k, n) = (weight.cols, weight.rows);
    assert_eq!((x.cols, out.cols), (k, n), "shapes of a product");
    assert!(rows <= x.rows, "rows within the tensor");
    let input = x.head(rows);
    let output = Disjoint::new(out.head_mut(rows));
    threads.run_chunks(n, PANEL, |panel| {
        let mut wide = vec![0.0f32; k];
        for col in panel {
            widen(weight.dtype, weight.row(col), &mut wide);
            for (row, x) in input.chunks_exact(k).enumerate() {
                // SAFETY: columns are disjoint between tasks.
                let out = unsafe { &mut output.slice(row * n + col..row * n + col + 1)[0] };
                let dot: f32 = x.iter().zip(&wide).map(|(x, w)| x * w).sum();
                *out = if mode == Mode::Add { *out + dot } else { dot };
            }
        }
    });
}
