//! Elements of a [`Part`] in the type that a device takes.
//!
//! Whole rows in the wanted type are slices of the file. Everything else is copied once: gathered where columns are not
//! neighbours, converted by way of f32 in pieces of bounded size otherwise. Pages of a file that were converted are given back.

use crate::ModelError;
use crate::checkpoint::quantised::matrix::{self, Matrix};
use crate::checkpoint::{F16_OVERFLOW, LoadedTensor, Origin};
use crate::spec::Part;
use bytes::Bytes;
use lagoon_backend::WeightFormat;
use lagoon_backend::formats::BLOCK_ELEMENTS_MAX;
use lagoon_types::DType;
use std::ops::Range;

/// Elements that are converted at once, whole blocks of every format; bounds the f32 copy.
const CONVERT_ELEMENTS: usize = 1 << 16;
const _: () = assert!(CONVERT_ELEMENTS.is_multiple_of(BLOCK_ELEMENTS_MAX));
/// Elements from which on several threads are used.
const THREADED_ELEMENTS: usize = 1 << 20;
/// Bytes of a file that are read before their pages are given back.
const RELEASE_BYTES: usize = 1 << 20;

/// A part's elements in `dtype`, rounded to nearest even.
///
/// # Errors
/// If a finite element is infinite in `dtype`.
///
/// # Panics
/// If the tensor's bytes are not those of the part's shape.
pub(crate) fn part_in(part: &Part, tensor: &LoadedTensor, dtype: DType) -> Result<Bytes, ModelError> {
    if let Some(matrix) = &tensor.quantised {
        return quantised_part_in(part, matrix, &tensor.origin, dtype);
    }
    let stored = tensor.format.bytes(part.shape.iter().product());
    assert_eq!(stored, Some(tensor.bytes.len()), "{} is not what was asked for", part.tensor);
    let overflow = |value: f32| {
        let problem = format!("has the element {value}, which {dtype} cannot hold\nhint: --dtype f32 or --dtype bf16");
        ModelError::Tensor { path: tensor.origin.path.clone(), tensor: part.tensor.clone(), problem }
    };
    match tensor.format.plain() {
        Some(stored) => {
            let (size, bytes) = (stored.size(), &tensor.bytes);
            if part.is_contiguous() && stored == dtype {
                return Ok(bytes.slice(part.offset * size..(part.offset + part.rows * part.cols) * size));
            }
            if stored == dtype {
                let copy = gathered(part, bytes, size);
                tensor.origin.release(spanned(part, size));
                return Ok(copy.into());
            }
        }
        None if Rows::of(part, tensor.format).is_none() => return unpacked(part, tensor, dtype),
        None => {}
    }
    if let Some(rows) = Rows::of(part, tensor.format) {
        return rows.converted(tensor, dtype).map(Bytes::from).map_err(overflow);
    }
    let size = tensor.format.block().bytes;
    let gathered = LoadedTensor { bytes: gathered(part, &tensor.bytes, size).into(), ..tensor.clone() };
    let whole = Rows { rows: 1, cols: part.rows * part.cols, offset: 0, stride: 0, mapped: false };
    whole.converted(&gathered, dtype).map(Bytes::from).map_err(overflow)
}

/// A packed part whose rows are no whole blocks: keys' projections of older files of DeepSeek's, which are turned. Only the blocks
/// that the part lies in are unpacked.
fn unpacked(part: &Part, tensor: &LoadedTensor, dtype: DType) -> Result<Bytes, ModelError> {
    let (block, elements) = (tensor.format.block(), spanned(part, 1));
    let blocks = elements.start / block.elements..elements.end.div_ceil(block.elements);
    let stored = blocks.start * block.bytes..blocks.end * block.bytes;
    let (mut wide, mut bytes) = (Vec::new(), Vec::new());
    tensor.format.decode(&tensor.bytes[stored.clone()], &mut wide);
    tensor.origin.release(stored);
    DType::F32.encode(&wide, &mut bytes);
    let part = Part { shape: vec![wide.len()], offset: part.offset - blocks.start * block.elements, ..part.clone() };
    let origin = Origin { map: None, ..tensor.origin.clone() };
    part_in(&part, &LoadedTensor { origin, ..LoadedTensor::plain(DType::F32, bytes.into()) }, dtype)
}

/// Whether a part's rows are whole blocks of a format.
pub(crate) fn has_whole_rows(part: &Part, format: WeightFormat) -> bool {
    part.col_stride == 1 && [part.cols, part.offset, part.row_stride].iter().all(|count| format.bytes(*count).is_some())
}

/// [`part_in`] of a quantised matrix: of its rows, or of elements of the rows that they are in.
fn quantised_part_in(part: &Part, matrix: &Matrix, origin: &Origin, dtype: DType) -> Result<Bytes, ModelError> {
    if let Some(rows) = matrix::Rows::of(part, matrix.cols) {
        return matrix.converted(rows, dtype).map(Bytes::from);
    }
    let rows = matrix::Rows::around(part, matrix.cols);
    let wide = matrix.converted(rows, DType::F32)?;
    let offset = part.offset - rows.first * matrix.cols;
    let part = Part { shape: vec![rows.count, matrix.cols], offset, ..part.clone() };
    let tensor = LoadedTensor { origin: origin.clone(), ..LoadedTensor::plain(DType::F32, wide.into()) };
    part_in(&part, &tensor, dtype)
}

/// A packed part's rows as blocks: a slice of the file, or a copy where rows are not neighbours or are made into blocks. `None` if
/// rows are no whole blocks.
///
/// # Errors
/// A quantised matrix with codes or scales that are no numbers.
pub(crate) fn packed_rows(part: &Part, tensor: &LoadedTensor) -> Result<Option<Bytes>, ModelError> {
    let Some(matrix) = &tensor.quantised else { return Ok(stored_rows(part, tensor)) };
    match matrix::Rows::of(part, matrix.cols) {
        Some(rows) => Ok(matrix.packed(rows)?.map(Bytes::from)),
        None => Ok(None),
    }
}

fn stored_rows(part: &Part, tensor: &LoadedTensor) -> Option<Bytes> {
    let format = tensor.format;
    if !has_whole_rows(part, format) {
        return None;
    }
    let (row, offset, stride) = (format.bytes(part.cols)?, format.bytes(part.offset)?, format.bytes(part.row_stride)?);
    if part.rows <= 1 || stride == row {
        return Some(tensor.bytes.slice(offset..offset + part.rows * row));
    }
    let rows = (0..part.rows).map(|i| &tensor.bytes[offset + i * stride..][..row]);
    let rows = rows.collect::<Vec<_>>().concat();
    tensor.origin.release(offset..offset + (part.rows - 1) * stride + row);
    Some(rows.into())
}

/// Bytes of a tensor between a part's first and last element of `size` bytes.
fn spanned(part: &Part, size: usize) -> Range<usize> {
    let last = part.rows.saturating_sub(1) * part.row_stride + part.cols.saturating_sub(1) * part.col_stride;
    part.offset * size..(part.offset + last + 1) * size
}

/// Rows of whole blocks, in elements.
#[derive(Clone, Copy, Debug)]
struct Rows {
    rows: usize,
    cols: usize,
    offset: usize,
    stride: usize,
    /// Whether the bytes are the file's, whose pages may be given back.
    mapped: bool,
}

/// Elements to convert, and the place of the result.
struct Piece<'a> {
    first: usize,
    out: &'a mut [u8],
}

impl Rows {
    /// A part's rows; `None` if its columns are not neighbours, or cut blocks.
    fn of(part: &Part, format: WeightFormat) -> Option<Self> {
        let (rows, cols, stride) =
            if part.is_contiguous() { (1, part.rows * part.cols, 0) } else { (part.rows, part.cols, part.row_stride) };
        let block = format.block().elements;
        let fits = [cols, stride, part.offset].iter().all(|count| count.is_multiple_of(block));
        (part.col_stride == 1 && fits).then_some(Self { rows, cols, offset: part.offset, stride, mapped: true })
    }

    /// The rows in `dtype`, by several threads where there is much to convert.
    ///
    /// # Errors
    /// A finite element that is infinite in `dtype`.
    fn converted(self, tensor: &LoadedTensor, dtype: DType) -> Result<Vec<u8>, f32> {
        let Self { rows, cols, offset, stride, .. } = self;
        let mut out = vec![0; rows * cols * dtype.size()];
        let mut pieces = Vec::new();
        for (row, out) in out.chunks_mut((cols * dtype.size()).max(1)).enumerate() {
            let parts = out.chunks_mut(CONVERT_ELEMENTS * dtype.size()).enumerate();
            pieces.extend(parts.map(|(i, out)| Piece { first: offset + row * stride + i * CONVERT_ELEMENTS, out }));
        }
        let threads = match rows * cols {
            0..THREADED_ELEMENTS => 1,
            _ => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let each = pieces.len().div_ceil(threads).max(1);
        if pieces.len() <= each {
            self.convert(&mut pieces, tensor, dtype)?;
            return Ok(out);
        }
        std::thread::scope(|scope| {
            let chunks = pieces.chunks_mut(each);
            let running: Vec<_> =
                chunks.map(|pieces| scope.spawn(move || self.convert(pieces, tensor, dtype))).collect();
            running.into_iter().try_for_each(|thread| thread.join().expect("conversion does not panic"))
        })?;
        Ok(out)
    }

    fn convert(self, pieces: &mut [Piece<'_>], tensor: &LoadedTensor, dtype: DType) -> Result<(), f32> {
        let block = tensor.format.block();
        let (mut wide, mut narrow) = (Vec::with_capacity(CONVERT_ELEMENTS), Vec::new());
        // Bytes that were read since pages were given back.
        let mut read: Option<Range<usize>> = None;
        for Piece { first, out } in pieces {
            let blocks = *first / block.elements;
            let count = out.len() / dtype.size() / block.elements;
            let range = blocks * block.bytes..(blocks + count) * block.bytes;
            wide.clear();
            narrow.clear();
            tensor.format.decode(&tensor.bytes[range.clone()], &mut wide);
            let too_large = |x: &&f32| x.is_finite() && x.abs() >= F16_OVERFLOW;
            if dtype == DType::F16
                && let Some(value) = wide.iter().find(too_large)
            {
                return Err(*value);
            }
            dtype.encode(&wide, &mut narrow);
            out.copy_from_slice(&narrow);
            let span = read.map_or(range.start, |read| read.start)..range.end;
            read = if self.mapped && span.len() >= RELEASE_BYTES {
                tensor.origin.release(span);
                None
            } else {
                Some(span)
            };
        }
        if let Some(span) = read.filter(|_| self.mapped) {
            tensor.origin.release(span);
        }
        Ok(())
    }
}

/// Rows and columns that are copied together, so that both sides stay in the cache.
const TILE: usize = 32;

/// The elements of a part that is not contiguous.
fn gathered(part: &Part, bytes: &[u8], size: usize) -> Vec<u8> {
    match size {
        2 => strided::<2>(part, bytes),
        4 => strided::<4>(part, bytes),
        _ => unreachable!("elements have 2 or 4 bytes"),
    }
}

/// [`gathered`] for elements of `SIZE` bytes, by several threads where there is much to copy.
fn strided<const SIZE: usize>(part: &Part, bytes: &[u8]) -> Vec<u8> {
    let (stored, _) = bytes.as_chunks::<SIZE>();
    let mut out = vec![0; part.rows * part.cols * SIZE];
    let (elements, _) = out.as_chunks_mut::<SIZE>();
    let threads = if part.rows * part.cols < THREADED_ELEMENTS {
        1
    } else {
        std::thread::available_parallelism().map_or(1, usize::from)
    };
    let rows = part.rows.div_ceil(threads).next_multiple_of(TILE);
    std::thread::scope(|scope| {
        for (chunk, out) in elements.chunks_mut(rows * part.cols).enumerate() {
            scope.spawn(move || copy_tiles(part, stored, chunk * rows, out));
        }
    });
    out
}

/// Rows from `first` on.
fn copy_tiles<const SIZE: usize>(part: &Part, stored: &[[u8; SIZE]], first: usize, out: &mut [[u8; SIZE]]) {
    let cols = part.cols;
    for (tile, out) in out.chunks_mut(TILE * cols).enumerate() {
        let start = part.offset + (first + tile * TILE) * part.row_stride;
        for col0 in (0..cols).step_by(TILE) {
            for (row, out) in out.chunks_mut(cols).enumerate() {
                let at = start + row * part.row_stride;
                for col in col0..cols.min(col0 + TILE) {
                    out[col] = stored[at + col * part.col_stride];
                }
            }
        }
    }
}
