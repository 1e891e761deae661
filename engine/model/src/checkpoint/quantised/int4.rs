//! Codes, scales and zero points of 4-bit matrices, in the layouts of AWQ, GPTQ and compressed-tensors.
//!
//! An element is `(code - zero) * scale`, with a scale and a zero point for a group of columns of a row. Words are little-endian
//! and have eight codes, the first in their lowest bits.
//!
//! | tensor | AWQ (gemm) | GPTQ | pack-quantized |
//! |---|---|---|---|
//! | codes | `[cols][rows / 8]` words | `[cols / 8][rows]` words | `[rows][cols / 8]` words |
//! | order in a word | rows 0, 2, 4, 6, 1, 3, 5, 7 | columns | columns |
//! | scales | `[groups][rows]` | `[groups][rows]` | `[rows][groups]` |
//! | zero points | `[groups][rows / 8]` words, as codes | `[groups][rows / 8]` words of rows, less one | none: 8; `[rows / 8][groups]` words of rows; or `[rows][groups]` of i8, less 8 |

use super::config::Layout;
use super::matrix::{Floats, Rows};
use bytes::Bytes;
use lagoon_backend::WeightFormat;
use lagoon_backend::formats::{INT4_RUN, INT4_ZERO_MAX, int4_header};

/// The place in an AWQ word of each of eight rows.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
/// The zero point of symmetric codes.
const MIDDLE: u8 = 8;

/// Zero points.
#[derive(Clone, Debug)]
pub(super) enum Zeros {
    Middle,
    Words(Bytes),
    /// pack-quantized, not packed.
    Signed(Bytes),
}

/// A 4-bit matrix.
#[derive(Clone, Debug)]
pub(super) struct Int4Codes {
    pub(super) layout: Layout,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) codes: Bytes,
    pub(super) scales: Floats,
    pub(super) zeros: Zeros,
    /// Groups of a row.
    pub(super) groups: usize,
    /// Columns of a group.
    pub(super) group: usize,
    /// The group of each column, where groups are not one behind the other.
    pub(super) order: Option<Vec<u32>>,
}

/// The format whose blocks divide `group` columns of rows of `cols`.
pub(super) fn format(cols: usize, group: usize) -> Option<WeightFormat> {
    let formats = [WeightFormat::Int4G128, WeightFormat::Int4G64, WeightFormat::Int4G32];
    formats.into_iter().find(|format| [cols, group].iter().all(|n| n.is_multiple_of(format.block().elements)))
}

/// Code `place` of word `word`.
fn code(words: &[u8], word: usize, place: usize) -> u8 {
    words[word * 4 + place / 2] >> (4 * (place % 2)) & 15
}

impl Int4Codes {
    /// Whether the bytes of a row's codes are neighbours.
    pub(super) const fn by_row(&self) -> bool {
        matches!(self.layout, Layout::Packed { .. })
    }

    /// The codes of `rows`, one a byte, row by row.
    fn unpack(&self, rows: Rows, out: &mut [u8]) {
        let (cols, codes) = (self.cols, &self.codes[..]);
        match self.layout {
            Layout::Packed { .. } => {
                for (row, out) in rows.iter().zip(out.chunks_exact_mut(cols)) {
                    let words = &codes[row * cols.div_ceil(8) * 4..];
                    for (col, out) in out.iter_mut().enumerate() {
                        *out = words[col / 2] >> (4 * (col % 2)) & 15;
                    }
                }
            }
            // Columns outside, as words of neighbouring rows share cache lines.
            Layout::Gptq { .. } => {
                for word in 0..cols / 8 {
                    for (i, row) in rows.iter().enumerate() {
                        let at = (word * self.rows + row) * 4;
                        let packed = u32::from_le_bytes([codes[at], codes[at + 1], codes[at + 2], codes[at + 3]]);
                        let out = &mut out[i * cols + word * 8..][..8];
                        for (place, out) in out.iter_mut().enumerate() {
                            *out = (packed >> (4 * place) & 15).to_le_bytes()[0];
                        }
                    }
                }
            }
            Layout::Awq => {
                for col in 0..cols {
                    for (i, row) in rows.iter().enumerate() {
                        out[i * cols + col] = code(codes, col * (self.rows / 8) + row / 8, AWQ_PLACES[row % 8]);
                    }
                }
            }
        }
    }

    /// Scale and zero point of a group of a row.
    fn scale(&self, row: usize, group: usize) -> Result<(f32, u8), String> {
        let at = if self.by_row() { row * self.groups + group } else { group * self.rows + row };
        let scale = self.scales.at(at);
        if !scale.is_finite() {
            return Err(format!("has the scale {scale} in row {row}"));
        }
        let by_group = |words: &[u8], place| code(words, group * (self.rows / 8) + row / 8, place);
        let zero = match (&self.zeros, self.layout) {
            (Zeros::Middle, _) => MIDDLE,
            (Zeros::Words(words), Layout::Awq) => by_group(words, AWQ_PLACES[row % 8]),
            (Zeros::Words(words), Layout::Gptq { offset }) => by_group(words, row % 8) + offset,
            (Zeros::Words(words), Layout::Packed { .. }) => code(words, row / 8 * self.groups + group, row % 8),
            (Zeros::Signed(bytes), _) => {
                let zero = bytes[row * self.groups + group].cast_signed();
                let zero = zero.checked_add_unsigned(MIDDLE).and_then(|zero| u8::try_from(zero).ok());
                zero.filter(|zero| *zero <= INT4_ZERO_MAX)
                    .ok_or_else(|| format!("has another zero point in row {row}"))?
            }
        };
        Ok((scale, zero))
    }

    /// Blocks of `format`, as [`format`] found it.
    pub(super) fn pack(&self, format: WeightFormat, rows: Rows, out: &mut [u8]) -> Result<(), String> {
        let block = format.block();
        let mut codes = vec![0; rows.count * self.cols];
        self.unpack(rows, &mut codes);
        let each = rows
            .iter()
            .zip(codes.chunks_exact(self.cols))
            .zip(out.chunks_exact_mut(self.cols / block.elements * block.bytes));
        for ((row, codes), out) in each {
            let blocks = codes.chunks_exact(block.elements).zip(out.chunks_exact_mut(block.bytes));
            for (i, (codes, out)) in blocks.enumerate() {
                let (scale, zero) = self.scale(row, i * block.elements / self.group)?;
                let (header, packed) = out.split_at_mut(4);
                let word = int4_header(scale, zero).ok_or_else(|| format!("has the scale {scale} in row {row}"))?;
                header.copy_from_slice(&word.to_le_bytes());
                for (codes, packed) in codes.chunks_exact(INT4_RUN).zip(packed.chunks_exact_mut(INT4_RUN / 2)) {
                    let (low, high) = codes.split_at(INT4_RUN / 2);
                    for ((packed, low), high) in packed.iter_mut().zip(low).zip(high) {
                        *packed = low | high << 4;
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn decode(&self, rows: Rows, out: &mut [f32]) -> Result<(), String> {
        let mut codes = vec![0; rows.count * self.cols];
        self.unpack(rows, &mut codes);
        let mut scales = Vec::with_capacity(self.groups);
        for ((row, codes), out) in rows.iter().zip(codes.chunks_exact(self.cols)).zip(out.chunks_exact_mut(self.cols)) {
            scales.clear();
            for group in 0..self.groups {
                scales.push(self.scale(row, group)?);
            }
            for (col, (code, out)) in codes.iter().zip(out).enumerate() {
                let group = self.order.as_ref().map_or(col / self.group, |order| order[col] as usize);
                let (scale, zero) = scales[group];
                *out = (f32::from(*code) - f32::from(zero)) * scale;
            }
        }
        Ok(())
    }
}
