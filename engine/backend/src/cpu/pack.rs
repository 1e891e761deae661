//! Tiles of stored elements, widened to f32 as they are or transposed.

use super::simd::math::widen_padded;
use super::simd::{Element, Kernel, Simd};

/// Rows that are widened at a time on the way to a transposed tile; a multiple of every vector length.
const STRIP: usize = 16;
/// Columns that are widened at a time.
const STRIP_COLS: usize = 128;

/// Widens `rows` rows of `cols` elements, `from_stride` elements apart, to rows `to_stride` apart, with zeros up to a
/// whole vector.
pub(super) struct Widen<E> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) from: *const E,
    pub(super) from_stride: usize,
    pub(super) to: *mut f32,
    pub(super) to_stride: usize,
}

impl<E: Element> Kernel for Widen<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for row in 0..self.rows {
            // SAFETY: the rows are valid, by the maker's promise.
            unsafe {
                widen_padded::<S, E>(
                    self.from.add(row * self.from_stride),
                    self.cols,
                    self.to.add(row * self.to_stride),
                );
            }
        }
    }
}

/// Widens and transposes: element `j` of row `i` goes to `to[j * to_stride + i]`. Rows of `to` from `cols` up to a
/// whole vector are overwritten with undefined values.
pub(super) struct Transpose<E> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) from: *const E,
    pub(super) from_stride: usize,
    pub(super) to: *mut f32,
    pub(super) to_stride: usize,
}

impl<E: Element> Kernel for Transpose<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut strip = [0.0f32; STRIP * STRIP_COLS];
        for row in (0..self.rows).step_by(STRIP) {
            let rows = STRIP.min(self.rows - row);
            for col in (0..self.cols).step_by(STRIP_COLS) {
                let cols = STRIP_COLS.min(self.cols - col);
                // SAFETY: the strip holds STRIP rows of whole vectors; the operands are valid by the maker's promise.
                unsafe {
                    for r in 0..rows {
                        let from = self.from.add((row + r) * self.from_stride + col);
                        widen_padded::<S, E>(from, cols, strip.as_mut_ptr().add(r * STRIP_COLS));
                    }
                    let to = self.to.add(col * self.to_stride + row);
                    if rows == STRIP {
                        for c in (0..cols).step_by(S::LANES) {
                            for r in (0..STRIP).step_by(S::LANES) {
                                let from = strip.as_ptr().add(r * STRIP_COLS + c);
                                S::transpose(from, STRIP_COLS, to.add(c * self.to_stride + r), self.to_stride);
                            }
                        }
                    } else {
                        // Elements beyond the last row may belong to another part.
                        for c in 0..cols {
                            for r in 0..rows {
                                *to.add(c * self.to_stride + r) = strip[r * STRIP_COLS + c];
                            }
                        }
                    }
                }
            }
        }
    }
}
