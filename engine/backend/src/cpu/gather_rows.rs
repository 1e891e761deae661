//! Copies chosen rows together.

use super::CpuTensor;

/// See [`crate::Device::gather_rows`].
pub(super) fn gather_rows(x: &CpuTensor, rows: &[u32], out: &mut CpuTensor) {
    assert_eq!(out.cols, x.cols, "columns of gathered rows");
    let cols = x.cols;
    for (to, row) in out.head_mut(rows.len()).chunks_exact_mut(cols).zip(rows) {
        to.copy_from_slice(&x.data[*row as usize * cols..][..cols]);
    }
}
