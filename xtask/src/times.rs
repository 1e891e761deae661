//! Seconds of a long command's steps.

use std::fmt::{self, Display, Formatter};
use std::time::Instant;

/// Steps in the order in which they ran, and their seconds.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<(&'static str, u64)>);

impl Times {
    /// Runs and measures a step.
    pub(crate) fn of<T>(&mut self, name: &'static str, step: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = step();
        self.0.push((name, start.elapsed().as_secs()));
        result
    }
}

impl<const N: usize> From<[(&'static str, u64); N]> for Times {
    fn from(steps: [(&'static str, u64); N]) -> Self {
        Self(steps.into())
    }
}

impl Display for Times {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let all: u64 = self.0.iter().map(|(_, seconds)| seconds).sum();
        let steps: Vec<String> = self.0.iter().map(|(name, seconds)| format!("{name} {seconds}")).collect();
        write!(f, "{all} s: {}", steps.join(", "))
    }
}
