//! Goodput: the highest request rate at which a share of the requests meets an objective of latency.

use super::measure::{Job, Measured, each, run_one};
use super::run::{Outcome, Setting};
use super::traces::Request;

/// Share of the requests that must meet the objective.
pub const SHARE: f64 = 0.9;

/// An objective of latency.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slo {
    /// Time to the first token, in seconds.
    pub first_token_s: f64,
    /// Mean time between a request's tokens, in seconds.
    pub token_s: f64,
}

impl Default for Slo {
    fn default() -> Self {
        Self { first_token_s: 10.0, token_s: 0.1 }
    }
}

impl Slo {
    /// Whether a request's first token came in time and its others followed in time, `first_s` after its arrival and
    /// `rest_s` after the first. `tokens` counts all.
    #[must_use]
    pub fn is_met_by(&self, first_s: f64, rest_s: f64, tokens: u32) -> bool {
        first_s <= self.first_token_s && rest_s <= self.token_s * f64::from(tokens.saturating_sub(1))
    }

    /// Whether a request that arrived at `arrived_us` finished within the objective.
    #[must_use]
    pub fn is_met(&self, outcome: &Outcome, arrived_us: u64) -> bool {
        let (Some(first), Some(end), false) = (outcome.first_us, outcome.end_us, outcome.failed) else { return false };
        let since = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
        self.is_met_by(since(arrived_us, first), since(first, end), outcome.tokens)
    }
}

/// The highest rate that is `good`, within a factor `precision` (above 1): doubles or halves from `start` until it has a
/// good rate below a bad one, then takes geometric means. `None` if no rate from `start / 64` on is good; a rate of
/// `64 * start` that is good is returned as it is.
///
/// # Errors
/// The first of `good`.
pub fn highest<E>(start: f64, precision: f64, mut good: impl FnMut(f64) -> Result<bool, E>) -> Result<Option<f64>, E> {
    let most = 64.0;
    let (mut low, mut high);
    if good(start)? {
        (low, high) = (start, 2.0 * start);
        while good(high)? {
            low = high;
            if high >= most * start {
                return Ok(Some(high));
            }
            high *= 2.0;
        }
    } else {
        (low, high) = (start / 2.0, start);
        while !good(low)? {
            high = low;
            if low <= start / most {
                return Ok(None);
            }
            low /= 2.0;
        }
    }
    while high > precision * low {
        let middle = (low * high).sqrt();
        if good(middle)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(Some(low))
}

/// A system under search: its setting, the requests at any rate, and the rate to begin with.
pub struct Search<'a> {
    pub setting: Setting,
    pub requests: &'a (dyn Fn(f64) -> Vec<Request> + Sync),
    pub start: f64,
}

impl std::fmt::Debug for Search<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Search").field("setting", &self.setting).field("start", &self.start).finish_non_exhaustive()
    }
}

/// A search's result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// Goodput, in offered requests per second; 0 if no rate was good.
    pub rate: f64,
    /// The run at that rate.
    pub at: Measured,
}

/// Relative precision of [`search`].
pub const PRECISION: f64 = 1.04;

/// Goodput of each: [`SHARE`] of the requests meet [`Slo::default`].
#[must_use]
pub fn search(searches: &[Search<'_>], done: &(dyn Fn(usize) + Sync)) -> Vec<Found> {
    each(searches, &|at, search| {
        let mut found = Found::default();
        let good = |rate: f64| {
            let measured = run_one(&Job { setting: search.setting, requests: (search.requests)(rate) });
            let good = measured.met >= SHARE;
            if good && rate > found.rate {
                found = Found { rate, at: measured };
            }
            Ok::<bool, std::convert::Infallible>(good)
        };
        let Ok(_) = highest(search.start, PRECISION, good);
        done(at);
        found
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_good_rate_is_found_from_either_side() {
        for start in [0.1, 1.0, 7.0, 30.0] {
            let mut asked = 0;
            let good = |rate: f64| {
                asked += 1;
                Ok::<_, ()>(rate <= 3.0)
            };
            let found = highest(start, 1.02, good).unwrap().unwrap();
            assert!((3.0 / 1.02..=3.0).contains(&found), "{found} from {start}");
            assert!(asked < 16, "{asked} rates from {start}");
        }
        assert_eq!(highest(1.0, 1.02, |_| Ok::<_, ()>(false)), Ok(None));
        assert_eq!(highest(1.0, 1.02, |_| Ok::<_, ()>(true)), Ok(Some(64.0)));
        assert_eq!(highest(1.0, 1.02, |_| Err("broken")), Err("broken"));
    }

    #[test]
    fn an_objective_has_a_first_token_and_a_pace() {
        let slo = Slo::default();
        assert!(slo.is_met_by(9.9, 9.8, 99) && slo.is_met_by(10.0, 0.0, 1));
        assert!(!slo.is_met_by(10.1, 0.0, 1) && !slo.is_met_by(1.0, 9.9, 99));
        let outcome =
            |first, end, failed| Outcome { first_us: first, end_us: end, tokens: 11, failed, cached: 0, elsewhere: 0 };
        assert!(slo.is_met(&outcome(Some(6_000_000), Some(7_000_000), false), 1_000_000));
        assert!(!slo.is_met(&outcome(Some(6_000_000), Some(7_100_000), false), 1_000_000));
        assert!(!slo.is_met(&outcome(Some(6_000_000), None, false), 1_000_000), "it has not ended");
        assert!(!slo.is_met(&outcome(Some(6_000_000), Some(7_000_000), true), 1_000_000));
    }
}
