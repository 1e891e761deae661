//! Products of a few rows: every weight is read once from memory, as a stream, and stays in the first-level cache
//! while groups of rows are multiplied with it.

use super::simd::{Element, Kernel, Simd};

/// Rows of `x` whose sums are held in registers together.
const GROUP: usize = 4;

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
        // SAFETY: the rows are within the product.
        unsafe {
            let (x, w) = (self.x.add(row * self.x_stride), self.weight.add(col * self.k));
            let mut sums = [[S::splat(0.0); N]; R];
            let mut i = 0;
            while i + S::LANES <= self.k {
                // Prefetches the next weight rows at the same column: they follow in memory, but rows are too short
                // for the hardware prefetcher to detect a stream in each.
                if R == 1 && i.is_multiple_of(64 / size_of::<E>()) {
                    for j in 0..N {
                        S::prefetch(w.wrapping_add((j + N) * self.k + i).cast());
                    }
                }
                let mut weights = [S::splat(0.0); N];
                for (j, weight) in weights.iter_mut().enumerate() {
                    *weight = E::load::<S>(w.add(j * self.k + i));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = S::load(x.add(r * self.x_stride + i));
                    for (sum, weight) in sums.iter_mut().zip(weights) {
                        *sum = S::fma(x, weight, *sum);
                    }
                }
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

    /// `N` weight rows with all rows of `x`.
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize>(&self, col: usize) {
        let mut row = 0;
        while row < self.rows {
            let group = GROUP.min(self.rows - row);
            // SAFETY: within the product.
            unsafe {
                match group {
                    4 => self.tile::<S, 4, N>(row, col),
                    3 => self.tile::<S, 3, N>(row, col),
                    2 => self.tile::<S, 2, N>(row, col),
                    _ => self.tile::<S, 1, N>(row, col),
                }
            }
            row += group;
        }
    }
}

impl<E: Element> Kernel for Dots<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
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
