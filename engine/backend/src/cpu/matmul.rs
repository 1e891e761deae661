//! Matrix products with weights in their own element type: a few rows stream the weights ([`super::dots`]); many rows
//! multiply panels that are widened and transposed once into cache ([`super::multiply`]).

use super::dots::Dots;
use super::multiply::Multiply;
use super::pack::{Plain, Stored, Transpose};
use super::packed::{Blocks, Packed, PackedDots, Round, Rounded, Work, with_format};
use super::scaled::{Fp8, Fp8Dots};
use super::simd::{Element, Isa};
use super::streams::Streams;
use super::threads::{Disjoint, Threads, with_scratch};
use super::weight::Stretch;
use super::{CpuTensor, CpuWeight};
use crate::formats::WeightFormat;
use crate::{HeadStrides, Mode};
use std::marker::PhantomData;
use std::ops::Range;

/// Whether the kernels read weights in `format` as they are.
pub(super) fn takes(format: WeightFormat) -> bool {
    struct Nothing;
    impl Work for Nothing {
        fn plain<E: Element + 'static>(self) {}
        fn packed<P: Packed>(self) {}
        fn fp8(self) {}
    }
    with_format(format, Nothing)
}

/// Up to so many rows the weights are streamed; packing a panel pays for more.
const STREAMED_ROWS: usize = 24;
/// Rows whose sums are added up in the same order, whether they are one or all: those that [`Dots`] reads a weight row once for.
const INVARIANT_ROWS: usize = super::dots::GROUP;
/// Bytes of weights that one task streams.
const STREAM_BYTES: usize = 128 << 10;
/// Weight rows of a panel: the width of a register tile, and a multiple of it for narrower vectors.
const PANEL: usize = 64;
/// Inner length of a panel: 64 KiB of f32 with [`PANEL`] columns.
const DEPTH: usize = 256;
/// Packed weight rows of a task at least, for a few rows: each task rounds the activations.
const ROUNDED_FOR: usize = 64;
/// Rows that are worth a panel of their own when there are fewer panels than threads.
const ROWS_MIN: usize = 48;

/// What products run on.
#[derive(Clone, Copy)]
pub(super) struct On<'a> {
    pub(super) threads: &'a Threads,
    pub(super) isa: Isa,
    pub(super) streams: &'a Streams,
    /// A row's products do not depend on the number of rows.
    pub(super) invariant: bool,
}

impl On<'_> {
    /// Whether the weights are streamed for `rows` rows.
    fn streams_rows(&self, rows: usize) -> bool {
        rows <= STREAMED_ROWS || self.invariant
    }

    fn strip(&self) -> usize {
        if self.invariant { INVARIANT_ROWS } else { usize::MAX }
    }
}

/// See [`crate::Device::matmul`].
pub(super) fn matmul(on: On<'_>, x: &CpuTensor, weight: &CpuWeight, rows: usize, mode: Mode, out: &mut CpuTensor) {
    assert_eq!((x.cols, out.cols), (weight.cols, weight.rows), "shapes of a product");
    let (out_stride, threads) = (out.cols, on.threads);
    let product = Product {
        isa: on.isa,
        prefetch: on.streams.prefetch(weight.format()),
        rows: 0..rows,
        k: weight.cols,
        x: x.head(rows),
        x_stride: x.cols,
        weight,
        first: 0,
        out: &Disjoint::new(out.head_mut(rows)),
        out_stride,
        out_at: 0,
        add: mode == Mode::Add,
        strip: on.strip(),
    };
    if on.streams_rows(rows) {
        // Codes that are multiplied in integers are worth rounding `x` for a task.
        let least =
            if weight.is_packed() && weight.format() != WeightFormat::Fp8 { ROUNDED_FOR * rows.div_ceil(4) } else { 4 };
        // As many tasks for every thread, of about as many rows.
        let tasks = (weight.rows * weight.row_bytes()).div_ceil(STREAM_BYTES).next_multiple_of(threads.count());
        let chunk = weight.rows.div_ceil(tasks.max(1)).max(least).min(weight.rows.div_ceil(threads.count()).max(4));
        let chunk = chunk.next_multiple_of(4);
        if rows == 1 {
            on.streams.measure(weight.format(), weight.rows * weight.row_bytes(), |prefetch| {
                let product = Product { prefetch, ..product };
                threads.run_chunks(weight.rows, chunk, |cols| product.streamed(cols));
            });
        } else {
            threads.run_chunks(weight.rows, chunk, |cols| product.streamed(cols));
        }
    } else {
        let panels = weight.rows.div_ceil(PANEL);
        let strips = (3 * threads.count()).div_ceil(panels).min(rows / ROWS_MIN).max(1);
        let strip = rows.div_ceil(strips);
        threads.run(panels * strips, |task| {
            let (panel, strip0) = (task / strips * PANEL, task % strips * strip);
            product.by_panel(panel..weight.rows.min(panel + PANEL), strip0..rows.min(strip0 + strip));
        });
    }
}

/// Rows of a tensor, and the weight rows that they are multiplied with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) rows: Range<usize>,
    pub(super) weights: Range<usize>,
}

/// `out[r] = x[r] · wᵀ` where `w` are the weight rows of `r`'s group. All groups have as many weight rows as `out` has
/// columns; rows of no group are untouched.
pub(super) fn grouped(on: On<'_>, x: &CpuTensor, weight: &CpuWeight, groups: &[Group], out: &mut CpuTensor) {
    let n = out.cols;
    assert!(
        x.cols == weight.cols && groups.iter().all(|group| group.weights.len() == n),
        "shapes of a grouped product"
    );
    let rows = groups.iter().map(|group| group.rows.end).max().unwrap_or(0);
    let (x, out) = (x.head(rows), Disjoint::new(out.head_mut(rows)));
    let panels = n.div_ceil(PANEL);
    let prefetch = on.streams.prefetch(weight.format());
    on.threads.run(groups.len() * panels, |task| {
        let Group { rows, weights } = groups[task / panels].clone();
        let (first, k) = (weights.start, weight.cols);
        let panel = first + task % panels * PANEL;
        let cols = panel..weights.end.min(panel + PANEL);
        let (x_stride, out_stride) = (k, n);
        let product = Product {
            isa: on.isa,
            prefetch,
            rows: rows.clone(),
            k,
            x,
            x_stride,
            weight,
            first,
            out: &out,
            out_stride,
            out_at: 0,
            add: false,
            strip: on.strip(),
        };
        if on.streams_rows(rows.len()) { product.streamed(cols) } else { product.by_panel(cols, rows) }
    });
}

/// See [`crate::Device::head_matmul`].
pub(super) fn by_head(
    on: On<'_>,
    x: &CpuTensor,
    weight: &CpuWeight,
    strides: HeadStrides,
    rows: usize,
    out: &mut CpuTensor,
) {
    let HeadStrides { heads, x_stride, out_stride } = strides;
    let (n, k) = (weight.rows / heads, weight.cols);
    assert!(n * heads == weight.rows && n <= out_stride && k <= x_stride, "shapes of a product by head");
    assert!(heads * x_stride <= x.cols && heads * out_stride <= out.cols, "columns of a product by head");
    if rows == 0 {
        return;
    }
    let (x_cols, out_cols) = (x.cols, out.cols);
    let (x, out) = (x.head(rows), Disjoint::new(out.head_mut(rows)));
    let panels = n.div_ceil(PANEL);
    let prefetch = on.streams.prefetch(weight.format());
    on.threads.run(heads * panels, |task| {
        let head = task / panels;
        let panel = head * n + task % panels * PANEL;
        let cols = panel..(head * n + n).min(panel + PANEL);
        let product = Product {
            isa: on.isa,
            prefetch,
            rows: 0..rows,
            k,
            x: &x[head * x_stride..],
            x_stride: x_cols,
            weight,
            first: head * n,
            out: &out,
            out_stride: out_cols,
            out_at: head * out_stride,
            add: false,
            strip: on.strip(),
        };
        if on.streams_rows(rows) { product.streamed(cols) } else { product.by_panel(cols, 0..rows) }
    });
}

/// A product in flight.
struct Product<'a> {
    isa: Isa,
    /// Whether streamed weights are prefetched.
    prefetch: bool,
    rows: Range<usize>,
    k: usize,
    /// From the first element on; so are `out`'s.
    x: &'a [f32],
    x_stride: usize,
    weight: &'a CpuWeight,
    /// The weight row of the result's first column.
    first: usize,
    out: &'a Disjoint<'a, f32>,
    out_stride: usize,
    /// Column of `out` that `first` gives.
    out_at: usize,
    add: bool,
    /// Rows that are streamed together.
    strip: usize,
}

impl Product<'_> {
    /// Columns `cols` of the result, streaming their weights.
    fn streamed(&self, cols: Range<usize>) {
        for part in self.weight.stretches(cols) {
            for row in self.rows.clone().step_by(self.strip) {
                let product = Self { rows: row..self.rows.end.min(row.saturating_add(self.strip)), ..*self };
                let taken = with_format(part.format, Streamed { product: &product, part: &part });
                assert!(taken, "{} is not taken", part.format);
            }
        }
    }

    fn dots<E: Element>(&self, part: &Stretch<'_>) {
        let weights: &[E] = bytemuck::cast_slice(part.bytes);
        assert_eq!(weights.len(), part.rows.len() * self.k, "weights of the columns");
        // SAFETY: the device's instruction set is supported; x holds rows of k, the stretch has the weights of its columns, which
        // are this task's, and only they are written.
        unsafe {
            self.isa.run(Dots {
                rows: self.rows.len(),
                n: part.rows.len(),
                k: self.k,
                x: self.x.as_ptr().add(self.rows.start * self.x_stride),
                x_stride: self.x_stride,
                weight: weights.as_ptr(),
                out: self.out_at(part.rows.start),
                out_stride: self.out_stride,
                add: self.add,
                prefetch: self.prefetch,
            });
        }
    }

    /// Where the dots with weight row `col` go in the first row.
    unsafe fn out_at(&self, col: usize) -> *mut f32 {
        // SAFETY: within the result.
        unsafe { self.out.as_ptr().add(self.rows.start * self.out_stride + self.out_at + col - self.first) }
    }

    /// As [`Self::dots`] of packed weights.
    fn packed_dots<P: Packed>(&self, part: &Stretch<'_>) {
        assert_eq!(part.bytes.len(), part.rows.len() * part.row_bytes, "weights of the columns");
        let (rows, k) = (self.rows.len(), self.k);
        with_scratch(Rounded::scratch(rows, k), |scratch| {
            let to = scratch.as_mut_ptr().cast::<Rounded>();
            // SAFETY: the device's instruction set is supported; x holds rows of k, the scratch has room for them and is aligned
            // to cache lines, the stretch has whole rows of blocks, and only its columns, which are this task's, are written.
            unsafe {
                let x = self.x.as_ptr().add(self.rows.start * self.x_stride);
                self.isa.run(Round::<P> { rows, k, x, stride: self.x_stride, to, format: PhantomData });
                self.isa.run_bytes(PackedDots::<P> {
                    rows,
                    n: part.rows.len(),
                    k,
                    x: to,
                    weight: part.bytes.as_ptr(),
                    out: self.out_at(part.rows.start),
                    out_stride: self.out_stride,
                    add: self.add,
                    prefetch: self.prefetch,
                    format: PhantomData,
                });
            }
        });
    }

    /// As [`Self::dots`] of FP8 blocks.
    fn fp8_dots(&self, part: &Stretch<'_>) {
        assert_eq!(part.bytes.len(), part.rows.len() * part.row_bytes, "weights of the columns");
        // SAFETY: the device's instruction set is supported; x holds rows of k, the stretch has whole rows of blocks, and only the
        // stretch's columns, which are this task's, are written.
        unsafe {
            self.isa.run(Fp8Dots {
                rows: self.rows.len(),
                n: part.rows.len(),
                k: self.k,
                x: self.x.as_ptr().add(self.rows.start * self.x_stride),
                x_stride: self.x_stride,
                weight: part.bytes.as_ptr(),
                out: self.out_at(part.rows.start),
                out_stride: self.out_stride,
                add: self.add,
                prefetch: self.prefetch,
            });
        }
    }

    /// Columns `cols`, at most a panel, of rows `rows`.
    fn by_panel(&self, cols: Range<usize>, rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        // Widening works on whole vectors, so a panel has room for some rows beyond.
        with_scratch((DEPTH + 16) * PANEL, |panel| {
            for depth in (0..self.k).step_by(DEPTH) {
                let deep = DEPTH.min(self.k - depth);
                self.pack(cols.clone(), depth..depth + deep, panel);
                // SAFETY: the panel holds `deep` rows of PANEL columns; x and out hold the rows, and this task alone
                // writes these rows and columns.
                unsafe {
                    Multiply {
                        m: rows.len(),
                        n: cols.len(),
                        k: deep,
                        a: self.x.as_ptr().add(rows.start * self.x_stride + depth),
                        a_stride: self.x_stride,
                        b: panel.as_ptr(),
                        b_stride: PANEL,
                        c: self.out.as_ptr().add(rows.start * self.out_stride + self.out_at + cols.start - self.first),
                        c_stride: self.out_stride,
                        add: self.add || depth > 0,
                    }
                    .run_on(self.isa);
                }
            }
        });
    }

    /// Widens columns `depth` of weight rows `cols` into `panel[depth][PANEL]`.
    fn pack(&self, cols: Range<usize>, depth: Range<usize>, panel: &mut [f32]) {
        for part in self.weight.stretches(cols.clone()) {
            let panel = &mut panel[part.rows.start - cols.start..];
            let work = Transposed { product: self, part: &part, depth: depth.clone(), panel };
            assert!(with_format(part.format, work), "{} is not taken", part.format);
        }
    }

    fn transpose<W: Stored>(&self, part: &Stretch<'_>, depth: Range<usize>, panel: &mut [f32]) {
        let rows = part.rows.len();
        assert!(part.bytes.len() == rows * part.row_bytes && panel.len() >= (depth.len() + 16) * PANEL - PANEL + rows);
        // SAFETY: the stretch holds `rows` rows of k, and the panel their columns, with room for a vector of rows beyond.
        unsafe {
            self.isa.run(Transpose::<W> {
                rows,
                first: depth.start,
                cols: depth.len(),
                from: part.bytes.as_ptr(),
                from_stride: part.row_bytes,
                to: panel.as_mut_ptr(),
                to_stride: PANEL,
                stored: PhantomData,
            });
        }
    }
}

/// [`Product::streamed`] of one stretch.
struct Streamed<'a> {
    product: &'a Product<'a>,
    part: &'a Stretch<'a>,
}

impl Work for Streamed<'_> {
    fn plain<E: Element + 'static>(self) {
        self.product.dots::<E>(self.part);
    }

    fn packed<P: Packed>(self) {
        self.product.packed_dots::<P>(self.part);
    }

    fn fp8(self) {
        self.product.fp8_dots(self.part);
    }
}

/// [`Product::pack`] of one stretch.
struct Transposed<'a> {
    product: &'a Product<'a>,
    part: &'a Stretch<'a>,
    depth: Range<usize>,
    panel: &'a mut [f32],
}

impl Work for Transposed<'_> {
    fn plain<E: Element + 'static>(self) {
        self.product.transpose::<Plain<E>>(self.part, self.depth, self.panel);
    }

    fn packed<P: Packed>(self) {
        self.product.transpose::<Blocks<P>>(self.part, self.depth, self.panel);
    }

    fn fp8(self) {
        self.product.transpose::<Fp8>(self.part, self.depth, self.panel);
    }
}
