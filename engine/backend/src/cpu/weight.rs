//! Weights of the host backend as they are stored, not copied where aligned.
//!
//! Invariants: each part's bytes hold `rows * cols` elements in its format and are aligned for plain elements; parts are kept
//! apart, in ascending rows without gaps.

use super::widen::widen;
use crate::formats::WeightFormat;
use crate::{WeightPart, WeightSource};
use bytes::Bytes;
use lagoon_types::DType;
use std::fmt;
use std::ops::Range;

/// A weight of the host backend: the given bytes, or a copy where they were misaligned.
#[derive(Debug)]
pub struct CpuWeight {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) parts: Vec<Part>,
}

/// Consecutive rows of a weight that are contiguous in memory.
pub(crate) struct Part {
    pub(crate) row0: usize,
    pub(crate) rows: usize,
    pub(crate) format: WeightFormat,
    row_bytes: usize,
    store: Store,
}

/// Consecutive rows of one part.
pub(crate) struct Stretch<'a> {
    pub(crate) rows: Range<usize>,
    pub(crate) format: WeightFormat,
    pub(crate) row_bytes: usize,
    pub(crate) bytes: &'a [u8],
}

enum Store {
    Shared(Bytes),
    Copied(Vec<u32>),
}

impl Part {
    fn new(row0: usize, cols: usize, part: WeightPart) -> Self {
        let WeightPart { rows, format, bytes } = part;
        let row_bytes = format.bytes(cols).expect("a weight's rows have whole blocks");
        assert_eq!(bytes.len(), rows * row_bytes, "bytes of a weight's part");
        let store = match format.plain() {
            Some(dtype) => store(bytes, dtype),
            None => Store::Shared(bytes),
        };
        Self { row0, rows, format, row_bytes, store }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.store {
            Store::Shared(bytes) => bytes,
            Store::Copied(words) => &bytemuck::cast_slice(words)[..self.rows * self.row_bytes],
        }
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copied = matches!(self.store, Store::Copied(_));
        f.debug_struct("Part")
            .field("row0", &self.row0)
            .field("rows", &self.rows)
            .field("format", &self.format)
            .field("copied", &copied)
            .finish()
    }
}

impl CpuWeight {
    pub(crate) fn new(source: WeightSource) -> Self {
        let (cols, rows) = (source.cols, source.rows());
        let mut row0 = 0;
        let parts = source.parts.into_iter().map(|part| {
            let part = Part::new(row0, cols, part);
            row0 += part.rows;
            part
        });
        Self { rows, cols, parts: parts.collect() }
    }

    /// Element type of a vector.
    ///
    /// # Panics
    /// If it is packed: only matrices are.
    pub(crate) fn dtype(&self) -> DType {
        self.parts[0].format.plain().expect("vectors are stored element by element")
    }

    /// Format of the first rows.
    pub(crate) fn format(&self) -> WeightFormat {
        self.parts[0].format
    }

    /// Whether some rows are packed.
    pub(crate) fn is_packed(&self) -> bool {
        self.parts.iter().any(|part| part.format.plain().is_none())
    }

    /// Bytes of the longest row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.row_bytes).max().unwrap_or(0)
    }

    /// One row's bytes.
    pub(crate) fn row(&self, row: usize) -> &[u8] {
        let part = &self.parts[self.part_of(row)];
        &part.bytes()[(row - part.row0) * part.row_bytes..][..part.row_bytes]
    }

    /// Writes one row's elements to `out`.
    pub(crate) fn decode_row(&self, row: usize, out: &mut [f32]) {
        let format = self.parts[self.part_of(row)].format;
        match format.plain() {
            Some(dtype) => widen(dtype, self.row(row), out),
            None => format.decode_into(self.row(row), out),
        }
    }

    /// The part that has a row: experts have hundreds of parts.
    fn part_of(&self, row: usize) -> usize {
        self.parts.partition_point(|part| part.row0 + part.rows <= row)
    }

    /// The contiguous stretches of `rows`.
    pub(crate) fn stretches(&self, rows: Range<usize>) -> impl Iterator<Item = Stretch<'_>> {
        let first = self.parts.len().min(self.part_of(rows.start));
        let parts = self.parts[first..].iter().take_while({
            let end = rows.end;
            move |part| part.row0 < end
        });
        parts.filter_map(move |part| {
            let span = rows.start.max(part.row0)..rows.end.min(part.row0 + part.rows);
            let row_bytes = part.row_bytes;
            let at = span.start.saturating_sub(part.row0) * row_bytes;
            (!span.is_empty()).then(|| Stretch {
                bytes: &part.bytes()[at..][..span.len() * row_bytes],
                rows: span,
                format: part.format,
                row_bytes,
            })
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
        let source = |skip: usize| {
            let parts = vec![(2, bytes.slice(skip..skip + 16)), (2, bytes.slice(1 - skip..17 - skip))];
            WeightSource::plain(DType::F16, 4, parts)
        };
        let weight = CpuWeight::new(source(1 - odd));
        let copied: Vec<bool> = weight.parts.iter().map(|p| matches!(p.store, Store::Copied(_))).collect();
        assert_eq!(copied, [false, true]);
        let at = u8::try_from(odd).unwrap();
        assert_eq!(weight.row(2)[..2], [at, at + 1]);
        let stretches: Vec<_> = weight.stretches(1..3).map(|part| (part.rows, part.bytes.len())).collect();
        assert_eq!(stretches, [(1..2, 8), (2..3, 8)]);
    }
}
