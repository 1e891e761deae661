//! Ranges of tensors in memory, and reads in progress.

use super::memory::CudaTensor;
use crate::driver::{Buffer, Pinned};
use lagoon_backend::take_columns;
use std::ops::Range;

/// Largest read that is staged ahead, in bytes; a larger one waits for its stream when it is taken.
pub(super) const STAGED_BYTES_MAX: usize = 8 << 20;

/// A read in progress.
#[derive(Debug, Default)]
pub(super) struct Staged {
    pub(super) pinned: Option<Pinned>,
    /// Sampled tokens, on the device.
    pub(super) drawn: Option<Buffer>,
    /// Rows and masks of a draw, as they are uploaded.
    pub(super) rules: Vec<u8>,
    /// Size of the read; 0 if none was begun.
    pub(super) bytes: usize,
}

/// A range of a tensor: from the first wanted element to the last, rows whole but for the two ends.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) first: usize,
    end: usize,
    stride: usize,
    cols: Range<usize>,
}

impl Span {
    pub(super) fn of(tensor: &CudaTensor, rows: &Range<usize>, cols: &Range<usize>) -> Self {
        let stride = tensor.cols;
        let (first, end) = (rows.start * stride + cols.start, rows.end.saturating_sub(1) * stride + cols.end);
        let end = if rows.is_empty() || cols.is_empty() { first } else { end };
        Self { first, end, stride, cols: cols.clone() }
    }

    pub(super) fn bytes(&self) -> usize {
        (self.end - self.first) * 4
    }

    pub(super) fn address(&self, tensor: &CudaTensor) -> u64 {
        tensor.buffer.range(self.first * 4, self.bytes())
    }

    /// Appends the wanted elements of `bytes`, which begin at element `at` of the tensor.
    pub(super) fn take(&self, at: usize, bytes: &[u8], out: &mut Vec<f32>) {
        take_columns(self.stride, &self.cols, at, bytes, out);
    }
}
