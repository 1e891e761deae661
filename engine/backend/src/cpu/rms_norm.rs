//! Root-mean-square normalisation (Zhang and Sennrich 2019).

use super::threads::{Disjoint, Threads};
use super::widen::widen;
use super::{CpuTensor, CpuWeight};

/// Rows that one task normalises.
const ROWS: usize = 16;

/// See [`crate::Device::rms_norm`].
pub(super) fn rms_norm(
    threads: &Threads,
    x: &CpuTensor,
    weight: &CpuWeight,
    eps: f32,
    rows: usize,
    out: &mut CpuTensor,
) {
    let cols = x.cols;
    assert_eq!((weight.rows, weight.cols, out.cols), (1, cols, cols), "shapes of a norm");
    let mut scale = vec![0.0; cols];
    widen(weight.dtype, weight.row(0), &mut scale);
    let input = x.head(rows);
    let output = Disjoint::new(out.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        // SAFETY: the ranges of rows are disjoint.
        let output = unsafe { output.slice(range.start * cols..range.end * cols) };
        let input = &input[range.start * cols..range.end * cols];
        for (x, out) in input.chunks_exact(cols).zip(output.chunks_exact_mut(cols)) {
            let squares: f32 = x.iter().map(|v| v * v).sum();
            let factor = 1.0 / (squares / cols as f32 + eps).sqrt();
            for ((out, x), scale) in out.iter_mut().zip(x).zip(&scale) {
                *out = x * factor * scale;
            }
        }
    });
}
