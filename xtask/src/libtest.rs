//! Parses the output of the standard test harness, line by line.

use std::collections::BTreeSet;

use crate::skips::Skipped;

/// Counts over all test binaries, and the tests marked `#[ignore]`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    /// Names of the failed tests, as the harness prints them.
    pub(crate) failures: BTreeSet<String>,
    pub(crate) ignored: BTreeSet<Skipped>,
    /// Binaries that began and have not printed a result; at the end, the crashed ones.
    pub(crate) running: usize,
}

impl Tally {
    /// Adds the tests of another command.
    pub(crate) fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.failures.extend(other.failures.iter().cloned());
        self.ignored.extend(other.ignored.iter().cloned());
        self.running += other.running;
    }

    /// Counts failed tests as passed.
    pub(crate) fn passes_alone(&mut self, names: &BTreeSet<String>) {
        self.passed += names.len();
        self.failed -= names.len();
        names.iter().for_each(|name| _ = self.failures.remove(name));
    }

    /// Parses a line of the harness's output.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.passed += count(rest, "passed");
            self.failed += count(rest, "failed");
            self.running = self.running.saturating_sub(1);
        } else if is_start(line) {
            self.running += 1;
        } else if let Some((name, verdict)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ")) {
            if let Some(reason) = verdict.strip_prefix("ignored") {
                let reason = reason.strip_prefix(", ").unwrap_or("no reason given");
                self.ignored.insert(Skipped { name: name.to_owned(), reason: reason.to_owned() });
            } else if verdict.starts_with("FAILED") {
                self.failures.insert(name.to_owned());
            }
        }
    }
}

/// `running 12 tests`.
fn is_start(line: &str) -> bool {
    let words: Vec<&str> = line.split(' ').collect();
    matches!(words[..], ["running", number, "test" | "tests"] if number.parse::<usize>().is_ok())
}

/// The number before `word` in `ok. 3 passed; 0 failed; …`.
fn count(line: &str, word: &str) -> usize {
    line.split([';', '.'])
        .filter_map(|part| part.trim().split_once(' '))
        .find(|(_, rest)| *rest == word)
        .and_then(|(number, _)| number.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(text: &str) -> Tally {
        let mut tally = Tally::default();
        text.lines().for_each(|line| tally.line(line));
        tally
    }

    #[test]
    fn sums_over_binaries() {
        let text = "running 4 tests\ntest a::x ... ok\ntest a::y ... ignored, needs a GPU\ntest a::z ... FAILED\n\
            test src/lib.rs - f (line 3) ... ignored\n\
            test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.10s\n\
            running 1 test\ntest b ... ok\n\
            test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        let tally = tally(text);
        assert_eq!((tally.passed, tally.failed, tally.ignored.len(), tally.running), (2, 1, 2, 0));
        assert_eq!(tally.failures, ["a::z".to_owned()].into());
        assert!(tally.ignored.contains(&Skipped { name: "a::y".into(), reason: "needs a GPU".into() }));
    }

    #[test]
    fn a_crashed_binary_is_seen() {
        let tally =
            tally("running 2 tests\ntest a ... ok\nthread 'main' has overflowed its stack\nrunning late to tests\n");
        assert_eq!((tally.passed, tally.failed, tally.running), (0, 0, 1));
    }
}
