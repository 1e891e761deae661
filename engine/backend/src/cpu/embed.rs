//! Embedding lookup: rows of a table, widened.

use super::threads::with_scratch;
use super::{CpuTensor, CpuWeight};

/// See [`crate::Device::embed`].
pub(super) fn embed(table: &CpuWeight, ids: &[u32], out: &mut CpuTensor) {
    let cols = table.cols;
    assert_eq!(out.cols, cols, "columns of an embedding");
    for (row, id) in out.head_mut(ids.len()).chunks_exact_mut(cols).zip(ids) {
        table.decode_row(*id as usize, row);
    }
}

/// See [`crate::Device::embed_add`].
pub(super) fn embed_add(table: &CpuWeight, ids: &[u32], out: &mut CpuTensor) {
    let cols = table.cols;
    assert_eq!(out.cols, cols, "columns of an embedding");
    with_scratch(cols, |wide| {
        for (row, id) in out.head_mut(ids.len()).chunks_exact_mut(cols).zip(ids) {
            table.decode_row(*id as usize, &mut wide[..cols]);
            row.iter_mut().zip(wide.iter()).for_each(|(x, y)| *x += y);
        }
    });
}
