//! Products of a few rows: every weight is read once from memory, as a stream, and stays in the first-level cache
//! while groups of rows are multiplied with it.

use super::simd::{Element, Kernel, Simd};
use super::streams::AHEAD_BYTES;

/// Rows of `x` whose sums are held in registers together.
pub(super) const GROUP: usize = 4;

/// `body` for each number below `n`, at most [`GROUP`], as a constant. Sums are in registers without a loop that a compiler would have to
/// unroll first, which it does for some elements only in its second pass over a crate (`lto = "off"` has none).
macro_rules! each {
    ($i:ident in $n:expr, $body:block) => {
        each!(@ $i in $n, $body, 0, 1, 2, 3)
    };
    (@ $i:ident in $n:expr, $body:block, $($value:literal),*) => {
        $(if $value < $n {
            const $i: usize = $value;
            $body
        })*
    };
}

/// `out[r][j] (=|+=) x[r] · weight[j]` for `rows` rows of `k` elements of `x`, `x_stride` apart, and `n` weight rows (`[n][k]`).
pub(super) struct Dots<E> {
    pub(super) rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) x: *const f32,
    pub(super) x_stride: usize,
    pub(super) weight: *const E,
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
    pub(super) add: bool,
    /// Whether weights are prefetched.
    pub(super) prefetch: bool,
}

impl<E: Element> Dots<E> {
    #[inline(always)]
    unsafe fn put(&self, row: usize, col: usize, dot: f32) {
        // SAFETY: within the product.
        unsafe {
            let out = self.out.add(row * self.out_stride + col);
            *out = if self.add { *out + dot } else { dot };
        }
    }

    /// The dots of `R` rows of `x` from `row` with `N` weight rows from `col`.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const N: usize>(&self, row: usize, col: usize) {
        const { assert!(R <= GROUP && N <= GROUP, "`each!` has as many constants") };
        // SAFETY: the rows are within the product.
        unsafe {
            let (x, w) = (self.x.add(row * self.x_stride), self.weight.add(col * self.k));
            let mut sums = [[S::splat(0.0); N]; R];
            let mut i = 0;
            while i + S::LANES <= self.k {
                let mut weights = [S::splat(0.0); N];
                each!(J in N, { weights[J] = E::load::<S>(w.add(J * self.k + i)) });
                each!(ROW in R, {
                    let x = S::load(x.add(ROW * self.x_stride + i));
                    each!(J in N, { sums[ROW][J] = S::fma(x, weights[J], sums[ROW][J]) });
                });
                i += S::LANES;
            }
            if i < self.k {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = S::load_part(x.add(r * self.x_stride + i), self.k - i);
                    for (j, sum) in sums.iter_mut().enumerate() {
                        *sum = S::fma(x, E::load_part::<S>(w.add(j * self.k + i), self.k - i), *sum);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (j, sum) in sums.iter().enumerate() {
                    self.put(row + r, col + j, S::sum(*sum));
                }
            }
        }
    }

    /// A group of at most [`GROUP`] rows of `x` from `row` with `N` weight rows from `col`.
    #[inline(always)]
    unsafe fn group<S: Simd, const N: usize>(&self, row: usize, col: usize) {
        // SAFETY: within the product.
        unsafe {
            match self.rows - row {
                1 => self.tile::<S, 1, N>(row, col),
                2 => self.tile::<S, 2, N>(row, col),
                3 => self.tile::<S, 3, N>(row, col),
                _ => self.tile::<S, GROUP, N>(row, col),
            }
        }
    }

    /// The dots of the first `R` rows of `x` with one weight row, which is read from memory.
    #[inline(always)]
    unsafe fn line<S: Simd, const R: usize>(&self, col: usize) {
        // One sum would wait for itself.
        const SUMS: usize = 4;
        // SAFETY: the rows are within the product.
        unsafe {
            let (x, w) = (self.x, self.weight.add(col * self.k));
            let mut sums = [[S::splat(0.0); SUMS]; R];
            let mut i = 0;
            while i + SUMS * S::LANES <= self.k {
                if self.prefetch {
                    for line in (0..SUMS * S::LANES * size_of::<E>()).step_by(64) {
                        S::prefetch(w.add(i).cast::<u8>().wrapping_add(AHEAD_BYTES + line));
                    }
                }
                for v in 0..SUMS {
                    let at = i + v * S::LANES;
                    let weight = E::load::<S>(w.add(at));
                    for (r, sums) in sums.iter_mut().enumerate() {
                        sums[v] = S::fma(S::load(x.add(r * self.x_stride + at)), weight, sums[v]);
                    }
                }
                i += SUMS * S::LANES;
            }
            while i < self.k {
                let n = S::LANES.min(self.k - i);
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = x.add(r * self.x_stride + i);
                    sums[0] = if n == S::LANES {
                        S::fma(S::load(x), E::load::<S>(w.add(i)), sums[0])
                    } else {
                        S::fma(S::load_part(x, n), E::load_part::<S>(w.add(i), n), sums[0])
                    };
                }
                i += n;
            }
            for (r, [a, b, c, d]) in sums.into_iter().enumerate() {
                self.put(r, col, S::sum(S::add(S::add(a, b), S::add(c, d))));
            }
        }
    }

    /// `N` weight rows with all rows of `x`.
    ///
    /// The first group reads the weights from memory, one weight row after the other: every processor measured follows one
    /// stream, and not every one four interleaved ones. The other groups find them in the cache.
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize>(&self, col: usize) {
        // SAFETY: within the product.
        unsafe {
            for j in 0..N {
                match self.rows {
                    1 => self.line::<S, 1>(col + j),
                    2 => self.line::<S, 2>(col + j),
                    3 => self.line::<S, 3>(col + j),
                    _ => self.line::<S, GROUP>(col + j),
                }
            }
            for row in (GROUP..self.rows).step_by(GROUP) {
                self.group::<S, N>(row, col);
            }
        }
    }
}

impl<E: Element> Kernel for Dots<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        if self.rows == 0 {
            return;
        }
        let mut col = 0;
        // SAFETY: within the product.
        unsafe {
            while col + 4 <= self.n {
                self.columns::<S, 4>(col);
                col += 4;
            }
            while col < self.n {
                self.columns::<S, 1>(col);
                col += 1;
            }
        }
    }
}
