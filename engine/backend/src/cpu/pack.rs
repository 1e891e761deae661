//! Tiles of stored elements, widened to f32 as they are or transposed.

use super::simd::math::widen_padded;
use super::simd::{Element, Kernel, Simd};
use std::marker::PhantomData;

/// How a row of elements is stored.
///
/// # Safety
/// As for [`Simd`]: the features are there and pointers are valid.
pub(super) trait Stored: Send + Sync + 'static {
    /// Widens elements `at .. at + n` of the row at `row` into `to`, followed by zeros up to a whole vector. `at` and `n` are
    /// whole parts of packed formats.
    unsafe fn widen<S: Simd>(row: *const u8, at: usize, n: usize, to: *mut f32);
}

/// Elements one by one.
pub(super) struct Plain<E>(PhantomData<E>);

impl<E: Element + 'static> Stored for Plain<E> {
    #[inline(always)]
    unsafe fn widen<S: Simd>(row: *const u8, at: usize, n: usize, to: *mut f32) {
        // SAFETY: passed on.
        unsafe { widen_padded::<S, E>(row.cast::<E>().add(at), n, to) }
    }
}

/// Rows that are widened at a time on the way to a transposed tile; a multiple of every vector length.
const STRIP: usize = 16;
/// Columns that are widened at a time.
const STRIP_COLS: usize = 128;

/// Widens the first `cols` elements of `rows` rows, `from_stride` bytes apart, to rows `to_stride` elements apart, with zeros up
/// to a whole vector.
pub(super) struct Widen<W> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) from: *const u8,
    pub(super) from_stride: usize,
    pub(super) to: *mut f32,
    pub(super) to_stride: usize,
    pub(super) stored: PhantomData<W>,
}

impl<W: Stored> Kernel for Widen<W> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for row in 0..self.rows {
            // SAFETY: the rows are valid, by the maker's promise.
            unsafe {
                W::widen::<S>(self.from.add(row * self.from_stride), 0, self.cols, self.to.add(row * self.to_stride));
            }
        }
    }
}

/// Widens and transposes: element `first + j` of row `i` goes to `to[j * to_stride + i]`. Rows of `to` from `cols` up to a
/// whole vector are overwritten with undefined values.
pub(super) struct Transpose<W> {
    pub(super) rows: usize,
    pub(super) first: usize,
    pub(super) cols: usize,
    pub(super) from: *const u8,
    /// In bytes.
    pub(super) from_stride: usize,
    pub(super) to: *mut f32,
    pub(super) to_stride: usize,
    pub(super) stored: PhantomData<W>,
}

impl<W: Stored> Kernel for Transpose<W> {
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
                        let from = self.from.add((row + r) * self.from_stride);
                        W::widen::<S>(from, self.first + col, cols, strip.as_mut_ptr().add(r * STRIP_COLS));
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
