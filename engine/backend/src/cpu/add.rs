//! Sums, multiples and soft caps of rows.

use super::CpuTensor;
use super::threads::{Disjoint, Threads};

/// Rows that one task works on.
const ROWS: usize = 16;
/// Elements that one task caps.
const CAPPED: usize = 16 << 10;

/// See [`crate::Device::add`].
pub(super) fn add(threads: &Threads, x: &mut CpuTensor, y: &CpuTensor, rows: usize) {
    let cols = x.cols;
    assert_eq!(y.cols, cols, "columns of a sum");
    let (x, y) = (Disjoint::new(x.head_mut(rows)), y.head(rows));
    threads.run_chunks(rows, ROWS, |range| {
        let range = range.start * cols..range.end * cols;
        // SAFETY: the ranges of rows are disjoint.
        let x = unsafe { x.slice(range.clone()) };
        x.iter_mut().zip(&y[range]).for_each(|(x, y)| *x += y);
    });
}

/// See [`crate::Device::scale`].
pub(super) fn scale(threads: &Threads, x: &mut CpuTensor, factor: f32, rows: usize) {
    let cols = x.cols;
    let x = Disjoint::new(x.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        // SAFETY: the ranges of rows are disjoint.
        let x = unsafe { x.slice(range.start * cols..range.end * cols) };
        x.iter_mut().for_each(|x| *x *= factor);
    });
}

/// See [`crate::Device::softcap`].
pub(super) fn softcap(threads: &Threads, x: &mut CpuTensor, cap: f32, rows: usize) {
    let x = x.head_mut(rows);
    let (count, x) = (x.len(), Disjoint::new(x));
    threads.run_chunks(count, CAPPED, |range| {
        // SAFETY: the ranges are disjoint.
        let x = unsafe { x.slice(range) };
        x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
    });
}
