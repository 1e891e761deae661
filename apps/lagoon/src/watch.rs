//! Output of commands that order and follow something: text while it goes on, or one JSON object at the end.

use crate::log::outln;
use std::time::{Duration, Instant};

/// Interval of checks.
const EVERY: Duration = Duration::from_millis(250);

/// Output and timeout of such a command.
#[derive(Debug)]
pub(crate) struct Watch {
    json: bool,
    started: Instant,
    timeout: Duration,
    left: String,
}

impl Watch {
    /// Prints a JSON object only if `json`, and waits at most `timeout_s` seconds from now.
    pub(crate) fn new(json: bool, timeout_s: u64) -> Self {
        Self { json, started: Instant::now(), timeout: Duration::from_secs(timeout_s), left: String::new() }
    }

    /// Prints a line unless `--json`.
    pub(crate) fn say(&self, text: &str) {
        if !self.json {
            outln!("{text}");
        }
    }

    /// Prints the object with `--json`.
    pub(crate) fn answer(&self, value: &serde_json::Value) {
        if self.json {
            outln!("{value}");
        }
    }

    /// Prints what is `left` to be done if that has changed, and waits until the next check.
    ///
    /// # Errors
    /// After the timeout: what is left, formatted by `late`.
    pub(crate) async fn pause(&mut self, left: String, late: impl FnOnce(&str) -> String) -> anyhow::Result<()> {
        if self.started.elapsed() >= self.timeout {
            anyhow::bail!(late(&format!("after {} s: {left}", self.timeout.as_secs())));
        }
        if left != self.left {
            self.say(&left);
            self.left = left;
        }
        tokio::time::sleep(EVERY).await;
        Ok(())
    }
}
