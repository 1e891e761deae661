//! Jitter of pauses, so that processes that lost the same peer do not try again in step.

use rand::Rng as _;
use std::time::Duration;

/// A pause of `mean`, a quarter more or less.
pub(crate) fn jittered(mean: Duration) -> Duration {
    mean.mul_f64(rand::rng().random_range(0.75..1.25))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn pauses_differ_and_are_near_their_mean() {
        let pauses: BTreeSet<Duration> = (0..100).map(|_| jittered(Duration::from_secs(4))).collect();
        assert!(pauses.len() > 50);
        let near = Duration::from_secs(3)..=Duration::from_secs(5);
        assert!(pauses.iter().all(|pause| near.contains(pause)), "{pauses:?}");
    }
}
