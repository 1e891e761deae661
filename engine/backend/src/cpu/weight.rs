//! Weights of the host backend in their own element type, not copied where aligned.
//!
//! Invariants: each part's bytes are aligned for the element type and hold `rows * cols` elements; parts are kept
//! apart, in ascending rows without gaps.

use crate::WeightSource;
use bytes::Bytes;
use lagoon_types::DType;
use std::fmt;
use std::ops::Range;

/// A weight of the host backend: the given bytes, or a copy where they were misaligned.
#[derive(Debug)]
pub struct CpuWeight {
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) parts: Vec<Part>,
}

/// Consecutive rows of a weight that are contiguous in memory.
pub(crate) struct Part {
    pub(crate) row0: usize,
    pub(crate) rows: usize,
    store: Store,
}

enum Store {
    Shared(Bytes),
    Copied(Vec<u32>),
}

impl Part {
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.store {
            Store::Shared(bytes) => bytes,
            Store::Copied(words) => bytemuck::cast_slice(words),
        }
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copied = matches!(self.store, Store::Copied(_));
        f.debug_struct("Part").field("row0", &self.row0).field("rows", &self.rows).field("copied", &copied).finish()
    }
}

impl CpuWeight {
    pub(crate) fn new(source: WeightSource) -> Self {
        let (dtype, cols, rows) = (source.dtype, source.cols, source.rows());
        let mut row0 = 0;
        let parts = source
            .parts
            .into_iter()
            .map(|(rows, bytes)| {
                assert_eq!(bytes.len(), rows * cols * dtype.size(), "bytes of a weight's part");
                let part = Part { row0, rows, store: store(bytes, dtype) };
                row0 += rows;
                part
            })
            .collect();
        Self { dtype, rows, cols, parts }
    }

    /// Bytes of one row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.cols * self.dtype.size()
    }

    /// One row's bytes.
    pub(crate) fn row(&self, row: usize) -> &[u8] {
        let part = &self.parts[self.part_of(row)];
        &part.bytes()[(row - part.row0) * self.row_bytes()..][..self.row_bytes()]
    }

    /// The part that has a row: experts have hundreds of parts.
    fn part_of(&self, row: usize) -> usize {
        self.parts.partition_point(|part| part.row0 + part.rows <= row)
    }

    /// The contiguous stretches of `rows`, each with its first row.
    pub(crate) fn stretches(&self, rows: Range<usize>) -> impl Iterator<Item = (Range<usize>, &[u8])> {
        let row_bytes = self.row_bytes();
        let first = self.parts.len().min(self.part_of(rows.start));
        let parts = self.parts[first..].iter().take_while({
            let end = rows.end;
            move |part| part.row0 < end
        });
        parts.filter_map(move |part| {
            let span = rows.start.max(part.row0)..rows.end.min(part.row0 + part.rows);
            let bytes = part.bytes();
            (!span.is_empty())
                .then(|| (span.clone(), &bytes[(span.start - part.row0) * row_bytes..][..span.len() * row_bytes]))
        })
    }
}

/// Keeps aligned bytes as they are (typically a slice of a memory map) and copies the rest.
fn store(bytes: Bytes, dtype: DType) -> Store {
    if bytes.as_ptr().align_offset(dtype.size()) == 0 {
        return Store::Shared(bytes);
    }
    let mut words = vec![0u32; bytes.len().div_ceil(4)];
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(&bytes);
    Store::Copied(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_parts_are_shared_and_misaligned_parts_are_copied() {
        let words: Vec<u8> = (0..33).collect();
        let bytes = Bytes::from_owner(words);
        let odd = usize::from(bytes.as_ptr().align_offset(2) == 0);
        let source = |skip: usize| WeightSource {
            dtype: DType::F16,
            cols: 4,
            parts: vec![(2, bytes.slice(skip..skip + 16)), (2, bytes.slice(1 - skip..17 - skip))],
        };
        let weight = CpuWeight::new(source(1 - odd));
        let copied: Vec<bool> = weight.parts.iter().map(|p| matches!(p.store, Store::Copied(_))).collect();
        assert_eq!(copied, [false, true]);
        let at = u8::try_from(odd).unwrap();
        assert_eq!(weight.row(2)[..2], [at, at + 1]);
        let stretches: Vec<_> = weight.stretches(1..3).map(|(rows, bytes)| (rows, bytes.len())).collect();
        assert_eq!(stretches, [(1..2, 8), (2..3, 8)]);
    }
}
