//! A quantised matrix: rows of its codes, scales and zero points, as blocks of a format or as numbers.
//!
//! Invariants: every tensor's bytes are those of the matrix's shape, so that rows within it are within them. Memory is that of the
//! asked rows' result and of [`TILE`] rows a thread; pages of the file are given back when a part's rows were read.

use super::int4::Int4Codes;
use crate::ModelError;
use crate::checkpoint::{F16_OVERFLOW, Origin};
use crate::spec::Part;
use bytes::Bytes;
use half::{bf16, f16};
use lagoon_backend::WeightFormat;
use lagoon_types::{DType, e4m3};
use std::path::PathBuf;

/// Rows that are unpacked together.
const TILE: usize = 32;
/// Elements from which on several threads are used.
const THREADED_ELEMENTS: usize = 1 << 18;

/// Numbers of a tensor in f32, f16 or bf16.
#[derive(Clone, Debug)]
pub(super) struct Floats {
    pub(super) dtype: DType,
    pub(super) bytes: Bytes,
}

impl Floats {
    pub(super) fn at(&self, i: usize) -> f32 {
        let bytes = &self.bytes[i * self.dtype.size()..];
        match self.dtype {
            DType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            DType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            DType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        }
    }
}

/// Rows `first`, `first + step` and so on of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) first: usize,
    pub(crate) step: usize,
    pub(crate) count: usize,
}

impl Rows {
    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |i| self.first + i * self.step)
    }

    fn skip(self, rows: usize, count: usize) -> Self {
        Self { first: self.first + rows * self.step, count: count.min(self.count - rows), ..self }
    }

    /// A part's rows, if they are whole rows of a matrix of `cols`.
    pub(crate) fn of(part: &Part, cols: usize) -> Option<Self> {
        let whole = part.col_stride == 1 && part.cols == cols && part.offset.is_multiple_of(cols);
        let step = part.row_stride / cols;
        (whole && part.row_stride.is_multiple_of(cols)).then(|| Self {
            first: part.offset / cols,
            step,
            count: part.rows,
        })
    }

    /// The rows of a matrix of `cols` in which a part's elements are.
    pub(crate) fn around(part: &Part, cols: usize) -> Self {
        let last = part.rows.saturating_sub(1) * part.row_stride + part.cols.saturating_sub(1) * part.col_stride;
        let (first, last) = (part.offset / cols, (part.offset + last) / cols);
        Self { first, step: 1, count: last - first + 1 }
    }
}

/// Where codes and scales are.
#[derive(Clone, Debug)]
pub(super) enum Codes {
    /// A code a byte; a scale for `per` rows and columns, `across` of them for a row.
    Fp8 {
        codes: Bytes,
        scales: Floats,
        per: [usize; 2],
        across: usize,
    },
    Int4(Int4Codes),
    /// Half a byte a code, neighbours in a byte, and an exponent for 32.
    Mxfp4 {
        codes: Bytes,
        exponents: Bytes,
    },
}

/// Fills the place of some rows, or says what is wrong with one.
type Work<'a> = dyn Fn(Rows, &mut [u8]) -> Result<(), String> + Sync + 'a;

/// A tensor of the file.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) origin: Origin,
    pub(super) bytes: usize,
}

/// A quantised matrix.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The format whose blocks hold the matrix exactly.
    pub(crate) format: WeightFormat,
    /// Why no block does, if so: then rows are only decoded.
    pub(crate) unpackable: Option<String>,
    pub(super) codes: Codes,
    /// Codes first.
    pub(super) sources: Vec<Source>,
    pub(super) name: String,
    pub(super) path: PathBuf,
}

impl Matrix {
    pub(crate) fn elements(&self) -> usize {
        self.rows * self.cols
    }

    /// Bytes of its blocks, or of its codes if it has none.
    pub(crate) fn block_bytes(&self) -> usize {
        match self.unpackable {
            None => self.format.bytes(self.cols).map_or(0, |row| row * self.rows),
            Some(_) => self.sources[0].bytes,
        }
    }

    /// Blocks of rows; `None` if the matrix has none.
    ///
    /// # Errors
    /// A code or a scale that is no number.
    pub(crate) fn packed(&self, rows: Rows) -> Result<Option<Vec<u8>>, ModelError> {
        if self.unpackable.is_some() {
            return Ok(None);
        }
        let row_bytes = self.format.bytes(self.cols).expect("rows of a packable matrix are whole blocks");
        self.fill(rows, row_bytes, &|rows, out| self.pack(rows, out)).map(Some)
    }

    /// Rows in `dtype`, rounded to nearest even.
    ///
    /// # Errors
    /// As [`Matrix::packed`], or a finite element that is infinite in `dtype`.
    pub(crate) fn converted(&self, rows: Rows, dtype: DType) -> Result<Vec<u8>, ModelError> {
        let work = |rows: Rows, out: &mut [u8]| {
            let mut wide = vec![0.0; rows.count * self.cols];
            self.decode(rows, &mut wide)?;
            if dtype == DType::F16
                && let Some(value) = wide.iter().find(|x| x.abs() >= F16_OVERFLOW)
            {
                let hint = "hint: --dtype f32 or --dtype bf16";
                return Err(format!("has the element {value}, which {dtype} cannot hold\n{hint}"));
            }
            let mut narrow = Vec::with_capacity(out.len());
            dtype.encode(&wide, &mut narrow);
            out.copy_from_slice(&narrow);
            Ok(())
        };
        self.fill(rows, self.cols * dtype.size(), &work)
    }

    /// Calls `work` with tiles of rows and their places in the result, from several threads where there is much to do.
    fn fill(&self, rows: Rows, row_bytes: usize, work: &Work<'_>) -> Result<Vec<u8>, ModelError> {
        let mut out = vec![0; rows.count * row_bytes];
        let tiles = |first: usize, out: &mut [u8]| {
            for (i, out) in out.chunks_mut((TILE * row_bytes).max(1)).enumerate() {
                work(rows.skip(first + i * TILE, out.len() / row_bytes), out)?;
            }
            Ok::<_, String>(())
        };
        let threads = match rows.count * self.cols {
            0..THREADED_ELEMENTS => 1,
            _ => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let each = rows.count.div_ceil(threads).next_multiple_of(TILE);
        let done = std::thread::scope(|scope| {
            let mut chunks = out.chunks_mut((each * row_bytes).max(1)).enumerate();
            if threads == 1 {
                return chunks.try_for_each(|(i, out)| tiles(i * each, out));
            }
            let tiles = &tiles;
            let running: Vec<_> = chunks.map(|(i, out)| scope.spawn(move || tiles(i * each, out))).collect();
            running.into_iter().try_for_each(|thread| thread.join().expect("unpacking does not panic"))
        });
        done.map_err(|problem| self.error(problem))?;
        self.release(rows);
        Ok(out)
    }

    fn error(&self, problem: String) -> ModelError {
        ModelError::Tensor { path: self.path.clone(), tensor: self.name.clone(), problem }
    }

    /// Gives back the pages of rows that were read.
    fn release(&self, rows: Rows) {
        let by_row = !matches!(&self.codes, Codes::Int4(codes) if !codes.by_row());
        for (i, source) in self.sources.iter().enumerate() {
            let span = match by_row && i == 0 && rows.count > 0 {
                true => {
                    let row = source.bytes / self.rows;
                    rows.first * row..(rows.first + (rows.count - 1) * rows.step + 1) * row
                }
                false => 0..source.bytes,
            };
            source.origin.release(span);
        }
    }

    fn pack(&self, rows: Rows, out: &mut [u8]) -> Result<(), String> {
        let block = self.format.block();
        let row_bytes = self.cols / block.elements * block.bytes;
        match &self.codes {
            Codes::Int4(codes) => codes.pack(self.format, rows, out)?,
            Codes::Fp8 { codes, scales, per, across } => {
                for (row, out) in rows.iter().zip(out.chunks_exact_mut(row_bytes)) {
                    let codes = checked_fp8(&codes[row * self.cols..][..self.cols], row)?;
                    let blocks = out.chunks_exact_mut(block.bytes).zip(codes.chunks_exact(block.elements));
                    for (i, (out, codes)) in blocks.enumerate() {
                        let scale = fp8_scale(scales, row, row / per[0] * across + i * block.elements / per[1])?;
                        let (head, body) = out.split_at_mut(4);
                        head.copy_from_slice(&scale.to_le_bytes());
                        body.copy_from_slice(codes);
                    }
                }
            }
            Codes::Mxfp4 { codes, exponents } => {
                for (row, out) in rows.iter().zip(out.chunks_exact_mut(row_bytes)) {
                    let first = row * (self.cols / block.elements);
                    for (i, out) in out.chunks_exact_mut(block.bytes).enumerate() {
                        out[0] = exponents[first + i];
                        if out[0] == u8::MAX {
                            return Err(format!("has a scale that is no number in row {row}"));
                        }
                        mxfp4_in_halves(&codes[(first + i) * 16..][..16], &mut out[1..]);
                    }
                }
            }
        }
        Ok(())
    }

    fn decode(&self, rows: Rows, out: &mut [f32]) -> Result<(), String> {
        match &self.codes {
            Codes::Int4(codes) => codes.decode(rows, out)?,
            Codes::Fp8 { codes, scales, per, across } => {
                for (row, out) in rows.iter().zip(out.chunks_exact_mut(self.cols)) {
                    let codes = checked_fp8(&codes[row * self.cols..][..self.cols], row)?;
                    for (i, (codes, out)) in codes.chunks(per[1]).zip(out.chunks_mut(per[1])).enumerate() {
                        let scale = fp8_scale(scales, row, row / per[0] * across + i)?;
                        codes.iter().zip(out).for_each(|(code, out)| *out = e4m3::decode(*code) * scale);
                    }
                }
            }
            Codes::Mxfp4 { .. } => {
                let mut blocks = vec![0; self.format.bytes(out.len()).expect("rows are whole blocks")];
                self.pack(rows, &mut blocks)?;
                self.format.decode_into(&blocks, out);
            }
        }
        Ok(())
    }
}

fn checked_fp8(codes: &[u8], row: usize) -> Result<&[u8], String> {
    match codes.iter().any(|code| code & 0x7f == 0x7f) {
        true => Err(format!("has a NaN in row {row}")),
        false => Ok(codes),
    }
}

fn fp8_scale(scales: &Floats, row: usize, at: usize) -> Result<f32, String> {
    let scale = scales.at(at);
    if scale.is_finite() { Ok(scale) } else { Err(format!("has the scale {scale} for row {row}")) }
}

/// 32 codes whose neighbours share bytes, as codes whose halves do.
fn mxfp4_in_halves(pairs: &[u8], out: &mut [u8]) {
    let code = |i: usize| pairs[i / 2] >> (4 * (i % 2)) & 15;
    out.iter_mut().enumerate().for_each(|(j, out)| *out = code(j) | code(j + 16) << 4);
}
