//! Attention with linear biases (ALiBi: Press, Smith and Lewis, ICLR 2022).
//!
//! Invariant of the whole system: the score of the key at position `j` for the query at position `i` is biased by
//! `slope * (j - i)`, never by another form that a softmax could not tell from it. Partials of different runs, computed
//! by different instances, are merged by their log-sum-exps, so the bias's zero must be the same for all of them.

use serde::{Deserialize, Serialize};

/// ALiBi parameters of a model: together with the number of heads they give every head's slope.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alibi {
    /// The flattest slope is `2^-bias_max` where the number of heads is a power of two; 8 in the paper. Above zero.
    pub bias_max: f32,
}

impl Alibi {
    /// The ALiBi slope of `head` among `heads`: the fall of a score per position of distance between query and key.
    ///
    /// With `n` heads, a power of two, head `h` has `2^(-bias_max (h + 1) / n)`. Other numbers of heads use the slopes of
    /// the next power of two, first those of odd `h` in order, then those of even `h`, as the paper's appendix and MPT do.
    ///
    /// # Panics
    /// If `head >= heads`.
    #[must_use]
    pub fn slope(self, head: u32, heads: u32) -> f32 {
        assert!(head < heads, "a head of the model");
        let all = heads.next_power_of_two();
        let step = match (heads == all, head < all / 2) {
            (true, _) => head + 1,
            (false, true) => 2 * head + 2,
            (false, false) => 2 * (head - all / 2) + 1,
        };
        #[allow(clippy::cast_possible_truncation, reason = "rounded to f32 once")]
        let slope = (-f64::from(self.bias_max) * f64::from(step) / f64::from(all)).exp2() as f32;
        slope
    }

    /// The slopes of all heads, in order.
    pub fn slopes(self, heads: u32) -> impl Iterator<Item = f32> {
        (0..heads).map(move |head| self.slope(head, heads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slopes(bias_max: f32, heads: u32) -> Vec<f32> {
        Alibi { bias_max }.slopes(heads).collect()
    }

    #[test]
    fn powers_of_two_are_a_geometric_series() {
        assert_eq!(slopes(8.0, 8), [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015_625, 0.007_812_5, 0.003_906_25]);
        assert_eq!(slopes(8.0, 1), [0.003_906_25]);
        assert_eq!(slopes(4.0, 2), [0.25, 0.0625]);
    }

    #[test]
    fn other_numbers_take_every_other_slope_of_the_next_power() {
        // Of 2^-2, 2^-4, 2^-6, 2^-8: the second and the fourth, then the first.
        assert_eq!(slopes(8.0, 3), [0.0625, 0.003_906_25, 0.25]);
        let twelve = slopes(8.0, 12);
        assert_eq!(twelve[..8], slopes(8.0, 8));
        for (slope, exponent) in twelve[8..].iter().zip([-0.5, -1.5, -2.5, -3.5f64]) {
            assert!((f64::from(*slope) / exponent.exp2() - 1.0).abs() < 1e-7, "{slope}");
        }
    }
}
