//! Embedding lookup: rows of a table, widened.

use super::widen::widen;
use super::{CpuTensor, CpuWeight};

/// See [`crate::Device::embed`].
pub(super) fn embed(table: &CpuWeight, ids: &[u32], out: &mut CpuTensor) {
    let cols = table.cols;
    assert_eq!(out.cols, cols, "columns of an embedding");
    for (row, id) in out.head_mut(ids.len()).chunks_exact_mut(cols).zip(ids) {
        widen(table.dtype, table.row(*id as usize), row);
    }
}
