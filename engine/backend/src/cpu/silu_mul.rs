//! The gated activation of Llama's feed-forward layer (SwiGLU, Shazeer 2020).

use super::CpuTensor;
use super::threads::{Disjoint, Threads};

/// Rows that one task works on.
const ROWS: usize = 8;

/// See [`crate::Device::silu_mul`].
pub(super) fn silu_mul(threads: &Threads, x: &CpuTensor, rows: usize, out: &mut CpuTensor) {
    let n = out.cols;
    assert_eq!(x.cols, 2 * n, "columns of gate and up");
    let input = x.head(rows);
    let output = Disjoint::new(out.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        // SAFETY: the ranges of rows are disjoint.
        let output = unsafe { output.slice(range.start * n..range.end * n) };
        let input = &input[range.start * 2 * n..range.end * 2 * n];
        for (x, out) in input.chunks_exact(2 * n).zip(output.chunks_exact_mut(n)) {
            let (gate, up) = x.split_at(n);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (1.0 + (-gate).exp()) * up;
            }
        }
    });
}
