//! Rows of a step whose results are wanted besides samples, in parts: as many at a time as one step samples.

use std::ops::Range;

/// Rows, and how far they are.
#[derive(Debug)]
pub(crate) struct RowParts {
    rows: Vec<u32>,
    /// Rows whose results were read, and those behind them whose results are being computed.
    done: usize,
    queued: usize,
}

impl RowParts {
    pub(crate) fn new(rows: Vec<u32>) -> Self {
        Self { rows, done: 0, queued: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Forgets the rows.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(Vec::new());
    }

    /// The next part, of at most `most` rows, which is now queued; empty if none are left.
    pub(crate) fn queue(&mut self, most: usize) -> &[u32] {
        let left = &self.rows[self.done..];
        let part = &left[..most.min(left.len())];
        self.queued = part.len();
        part
    }

    /// The part that was queued, by index; it is done now.
    pub(crate) fn finish(&mut self) -> Range<usize> {
        let part = self.done..self.done + std::mem::take(&mut self.queued);
        self.done = part.end;
        part
    }
}
