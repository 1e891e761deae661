//! The papers' workloads: traces 0 to 8 of Infinite-LLM v2 Table 1 and the 18 datasets of v1 Table 2, as requests with
//! Poisson arrivals.
//!
//! The tables give context lengths, not the split into prompt and output: [`Output`] is our assumption.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "lengths and times are small, not negative"
)]

use super::lengths::{self, Moments};
use crate::rng::Rng;
use std::fmt::Write as _;

/// Generated share of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Two thirds, the share in the ShareGPT conversations that vLLM's paper measured (161 tokens asked, 338 answered).
    TwoThirds,
    /// Two thirds, but at most this many tokens: long contexts are long for their documents.
    AtMost(u32),
}

impl Output {
    /// Generated tokens of a context of `length` tokens.
    #[must_use]
    pub fn tokens(self, length: u32) -> u32 {
        let share = (length * 2).div_ceil(3).max(1);
        match self {
            Self::TwoThirds => share,
            Self::AtMost(most) => share.min(most),
        }
    }
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub arrival_us: u64,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
}

impl Request {
    /// Prompt plus output, in tokens.
    #[must_use]
    pub fn context_tokens(&self) -> u32 {
        self.prompt_tokens + self.output_tokens
    }
}

/// A source of lengths: a row of a table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Workload {
    /// v2 Table 1.
    Trace { id: u32, moments: Moments },
    /// v1 Table 2.
    Dataset { id: u32, normal_max: u32, long_max: u32, long_percent: u32 },
}

const fn row(id: u32, max: u32, mean: f64, sd: f64) -> Workload {
    Workload::Trace { id, moments: Moments { min: 1, max, mean, sd } }
}

/// v2 Table 1: range, mean and standard deviation of context lengths. Traces 0 to 2 are "S", 3 to 8 "L".
pub const TABLE_1: [Workload; 9] = [
    row(0, 60_000, 1_233.0, 7_785.68),
    row(1, 60_000, 712.0, 5_531.4),
    row(2, 60_000, 469.0, 3_506.36),
    row(3, 200_000, 56_362.0, 28_787.78),
    row(4, 280_000, 75_650.0, 39_479.42),
    row(5, 600_000, 160_239.0, 87_906.67),
    row(6, 480_000, 128_804.0, 70_647.93),
    row(7, 1_200_000, 293_945.0, 172_169.14),
    row(8, 2_000_000, 498_609.0, 261_817.24),
];

/// v1 Table 2: dataset `1 + row + 6 * ratio`; the long range is twice the normal one.
#[must_use]
pub fn table_2() -> Vec<Workload> {
    let rows = [100_000, 140_000, 300_000, 240_000, 600_000, 950_000];
    let ids = [1, 10, 30].into_iter().enumerate().flat_map(|(ratio, long_percent)| {
        rows.into_iter().enumerate().map(move |(row, normal_max)| Workload::Dataset {
            id: 1 + row as u32 + 6 * ratio as u32,
            normal_max,
            long_max: 2 * normal_max,
            long_percent,
        })
    });
    ids.collect()
}

impl Workload {
    /// Name, as `trace-0` or `dataset-1`.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Trace { id, .. } => format!("trace-{id}"),
            Self::Dataset { id, .. } => format!("dataset-{id}"),
        }
    }

    /// The longest context of the range, in tokens.
    #[must_use]
    pub fn longest(&self) -> u32 {
        match self {
            Self::Trace { moments, .. } => moments.max,
            Self::Dataset { long_max, .. } => *long_max,
        }
    }

    /// Draws `n` context lengths.
    #[must_use]
    pub fn lengths(&self, n: usize, rng: &mut Rng) -> Vec<u32> {
        match self {
            Self::Trace { moments, .. } => lengths::sample(moments, n, rng),
            Self::Dataset { normal_max, long_max, long_percent, .. } => {
                lengths::two_ranges(*normal_max, *long_max, f64::from(*long_percent) / 100.0, n, rng)
            }
        }
    }

    /// Draws `n` requests with Poisson arrivals at `rate` per second. The lengths depend on the seed and `n` alone,
    /// so runs at different rates serve the same requests.
    #[must_use]
    pub fn requests(&self, n: usize, output: Output, rate: f64, seed: u64) -> Vec<Request> {
        let mut rng = Rng::new(seed);
        let (mut of_lengths, mut of_arrivals) = (rng.split(), rng.split());
        let mut at_s = 0.0;
        let lengths = self.lengths(n, &mut of_lengths).into_iter();
        let requests = lengths.map(|length| {
            at_s -= (1.0 - lengths::unit(&mut of_arrivals)).ln() / rate;
            let output_tokens = output.tokens(length);
            let prompt_tokens = length.saturating_sub(output_tokens).max(1);
            Request { arrival_us: (at_s * 1e6) as u64, prompt_tokens, output_tokens }
        });
        requests.collect()
    }
}

/// Requests as a trace file: CSV with a header, one request a line, in order of arrival.
#[must_use]
pub fn to_csv(requests: &[Request]) -> String {
    let mut text = String::from("arrival_s,prompt_tokens,output_tokens\n");
    for r in requests {
        let _ = writeln!(text, "{:.6},{},{}", r.arrival_us as f64 / 1e6, r.prompt_tokens, r.output_tokens);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and standard deviation.
    fn moments_of(lengths: &[u32]) -> (f64, f64) {
        let n = lengths.len() as f64;
        let mean = lengths.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let var = lengths.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
        (mean, var.sqrt())
    }

    #[test]
    fn traces_meet_table_1() {
        for workload in TABLE_1 {
            let Workload::Trace { id, moments } = workload else { unreachable!() };
            for (n, seed) in [(1000, 1), (1000, 2), (400, 3)] {
                let lengths = workload.lengths(n, &mut Rng::new(seed));
                let (mean, sd) = moments_of(&lengths);
                let range = (*lengths.iter().min().unwrap(), *lengths.iter().max().unwrap());
                assert_eq!(lengths.len(), n);
                assert_eq!(range, (moments.min, moments.max), "trace {id}");
                assert!((mean / moments.mean - 1.0).abs() < 0.02, "trace {id}: mean {mean}, not {}", moments.mean);
                assert!((sd / moments.sd - 1.0).abs() < 0.05, "trace {id}: deviation {sd}, not {}", moments.sd);
            }
        }
    }

    #[test]
    fn datasets_meet_table_2() {
        let all = table_2();
        assert_eq!(all.len(), 18);
        for (at, workload) in all.into_iter().enumerate() {
            let Workload::Dataset { id, normal_max, long_max, long_percent } = workload else { unreachable!() };
            assert_eq!(id as usize, at + 1);
            let lengths = workload.lengths(1000, &mut Rng::new(7));
            let long = lengths.iter().filter(|l| **l > normal_max).count();
            assert_eq!(long, 10 * long_percent as usize, "dataset {id}");
            assert!(lengths.iter().all(|l| (1..=long_max).contains(l)));
            // Both ranges are used completely.
            assert!(
                *lengths.iter().min().unwrap() < 10
                    && f64::from(*lengths.iter().max().unwrap()) > 0.9 * f64::from(long_max)
            );
        }
    }

    #[test]
    fn arrivals_are_poisson_and_lengths_do_not_depend_on_the_rate() {
        let at = |rate| TABLE_1[3].requests(1000, Output::AtMost(512), rate, 9);
        let (slow, fast) = (at(0.5), at(50.0));
        let lengths = |requests: &[Request]| requests.iter().map(Request::context_tokens).collect::<Vec<_>>();
        assert_eq!(lengths(&slow), lengths(&fast));
        let gaps: Vec<f64> = slow.windows(2).map(|w| (w[1].arrival_us - w[0].arrival_us) as f64 / 1e6).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let var = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean - 2.0).abs() < 0.2, "mean gap {mean} s");
        assert!((var.sqrt() / mean - 1.0).abs() < 0.1, "an exponential's deviation is its mean");
        assert_eq!(to_csv(&slow).lines().count(), 1001);
        assert_eq!(slow, at(0.5), "a seed repeats a trace");
    }
}
