//! Seconds of a long command's steps.

use std::fmt::{self, Display, Formatter};
use std::time::{Duration, Instant};

/// Steps in the order in which they ran, and their seconds.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<(&'static str, Duration)>);

impl Times {
    /// Runs and measures a step.
    pub(crate) fn of<T>(&mut self, name: &'static str, step: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = step();
        self.0.push((name, start.elapsed()));
        result
    }
}

impl Display for Times {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let all: Duration = self.0.iter().map(|(_, time)| *time).sum();
        let steps: Vec<String> =
            self.0.iter().map(|(name, time)| format!("{name} {:.0}", time.as_secs_f64())).collect();
        write!(f, "{:.0} s: {}", all.as_secs_f64(), steps.join(", "))
    }
}
