//! What commands say that order something and follow it: text as it goes on, or one JSON object at the end.

use std::time::{Duration, Instant};

/// How often what was ordered is looked at.
const EVERY: Duration = Duration::from_millis(250);

/// The output of such a command, and its timeout.
#[derive(Debug)]
pub(crate) struct Watch {
    json: bool,
    started: Instant,
    timeout: Duration,
    left: String,
}

impl Watch {
    /// One that prints a JSON object only if `json`, and waits `timeout_s` seconds from now at most.
    pub(crate) fn new(json: bool, timeout_s: u64) -> Self {
        Self { json, started: Instant::now(), timeout: Duration::from_secs(timeout_s), left: String::new() }
    }

    /// Prints a line for people.
    #[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
    pub(crate) fn say(&self, text: &str) {
        if !self.json {
            println!("{text}");
        }
    }

    /// Prints the object for scripts, if it was asked for.
    #[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
    pub(crate) fn answer(&self, value: &serde_json::Value) {
        if self.json {
            println!("{value}");
        }
    }

    /// Says what is `left` to be done if that has changed, and waits until it is to be looked at again.
    ///
    /// # Errors
    /// After the time that it waits at most: what is left, after `late`'s words.
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
