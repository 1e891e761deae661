//! Attention partials and scale-reduce: the only definition of log base, scaling and emptiness.
//!
//! A partial is the attention of some queries over *some* of their keys: the normalised output and the natural log
//! of the sum of exponentials of the scaled scores (log-sum-exp), with the number of keys seen. Two partials over
//! disjoint keys merge into the partial over their union (Infinite-LLM v1 §4.2, scale-reduce):
//! `m = max(a.lse, b.lse)`, `w_x = exp(x.lse - m)`, `out = (w_a a.out + w_b b.out) / (w_a + w_b)`,
//! `lse = m + ln(w_a + w_b)`. Merging is associative and commutative up to rounding.
//!
//! Emptiness is decided by the count alone: where `count == 0`, `out` and `lse` are meaningless and never read,
//! because infinities do not survive every backend.

/// Partials of `rows` queries with `heads` heads of `head_dim` each, on the host in f32. Tests compare every backend's
/// merge with this one.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    pub heads: usize,
    pub head_dim: usize,
    /// `[rows][heads][head_dim]`, normalised.
    pub out: Vec<f32>,
    /// `[rows][heads]`, natural log.
    pub lse: Vec<f32>,
    /// `[rows]`, keys seen (the same for every head).
    pub count: Vec<u32>,
}

impl Partial {
    /// The empty partial (no keys): neutral in [`Partial::merge`].
    #[must_use]
    pub fn empty(rows: usize, heads: usize, head_dim: usize) -> Self {
        Self {
            heads,
            head_dim,
            out: vec![0.0; rows * heads * head_dim],
            lse: vec![0.0; rows * heads],
            count: vec![0; rows],
        }
    }

    /// Number of queries.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.count.len()
    }

    /// Merges `other`, a partial of the same queries over disjoint keys, into `self`.
    ///
    /// # Panics
    /// If the shapes differ: partials of peers are validated when they are parsed.
    pub fn merge(&mut self, other: &Self) {
        assert_eq!((self.heads, self.head_dim, self.rows()), (other.heads, other.head_dim, other.rows()));
        let row_out = self.heads * self.head_dim;
        for row in 0..self.rows() {
            match (self.count[row], other.count[row]) {
                (_, 0) => {}
                (0, n) => {
                    self.out[row * row_out..][..row_out].copy_from_slice(&other.out[row * row_out..][..row_out]);
                    self.lse[row * self.heads..][..self.heads]
                        .copy_from_slice(&other.lse[row * self.heads..][..self.heads]);
                    self.count[row] = n;
                }
                (a, b) => {
                    for head in 0..self.heads {
                        let at = row * self.heads + head;
                        let weights = merge_weights(self.lse[at], other.lse[at]);
                        let span = at * self.head_dim..(at + 1) * self.head_dim;
                        for (x, y) in self.out[span.clone()].iter_mut().zip(&other.out[span]) {
                            *x = weights.a * *x + weights.b * y;
                        }
                        self.lse[at] = weights.lse;
                    }
                    self.count[row] = a + b;
                }
            }
        }
    }
}

/// Weights of two partials in their merge; `a + b == 1` up to rounding.
#[derive(Clone, Copy, Debug)]
pub struct MergeWeights {
    pub a: f32,
    pub b: f32,
    pub lse: f32,
}

/// Weights for merging partials with log-sum-exps `a` and `b`, both non-empty and finite.
#[must_use]
pub fn merge_weights(a: f32, b: f32) -> MergeWeights {
    let max = a.max(b);
    let (wa, wb) = ((a - max).exp(), (b - max).exp());
    let sum = wa + wb;
    MergeWeights { a: wa / sum, b: wb / sum, lse: max + sum.ln() }
}
