//! Progress on standard error, in one style: what is done, a bar, how much of it.
//!
//! A bar is one line that fits the terminal. It is hidden where standard error is no terminal, and gone when it is dropped: also after an
//! error, before the message.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::time::Duration;

/// Interval of a spinner's frames.
const TICK: Duration = Duration::from_millis(100);

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Bytes,
    Tokens,
    Requests,
    Instances,
}

impl Unit {
    /// The numbers behind the bar, at most 38 columns wide. The text before it has 28, so that 80 columns have room for the bar.
    fn numbers(self) -> &'static str {
        match self {
            Self::Bytes => "{bytes}/{total_bytes} {bytes_per_sec}",
            Self::Tokens => "{pos}/{len} tokens {elapsed}",
            Self::Requests => "{pos}/{len} requests {elapsed}",
            Self::Instances => "{pos}/{len} instances",
        }
    }
}

/// A bar of `total` units; the length may change.
pub(crate) fn bar(what: &str, total: u64, unit: Unit) -> ProgressBar {
    on(ProgressDrawTarget::stderr(), what, total, unit)
}

/// Something without a known length.
pub(crate) fn spinner(what: &'static str) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(what).with_finish(ProgressFinish::AndClear);
    spinner.enable_steady_tick(TICK);
    spinner
}

fn on(target: ProgressDrawTarget, what: &str, total: u64, unit: Unit) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), target).with_finish(ProgressFinish::AndClear);
    if let Ok(style) = ProgressStyle::with_template(&format!("{{msg:28!}} [{{wide_bar}}] {}", unit.numbers())) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::InMemoryTerm;

    /// The units, with the largest numbers that there are of them.
    const UNITS: [(Unit, u64); 4] =
        [(Unit::Bytes, 999_999_999_999), (Unit::Tokens, 1 << 22), (Unit::Requests, 1_000_000), (Unit::Instances, 64)];

    /// A bar halfway, on a terminal with so many columns.
    fn halfway(columns: u16, what: &str, total: u64, unit: Unit) -> (InMemoryTerm, ProgressBar) {
        let terminal = InMemoryTerm::new(6, columns);
        let bar = on(ProgressDrawTarget::term_like(Box::new(terminal.clone())), what, total, unit);
        bar.set_position(total / 2);
        bar.tick();
        (terminal, bar)
    }

    #[test]
    fn a_bar_is_one_line_of_the_terminal() {
        for columns in [80, 120] {
            for (unit, total) in UNITS {
                for what in ["downloading", "model-00001-of-00030.safetensors (17/30)"] {
                    let (terminal, _bar) = halfway(columns, what, total, unit);
                    let text = terminal.contents();
                    assert_eq!(text.lines().count(), 1, "{unit:?} at {columns} columns:\n{text}");
                    assert!(text.starts_with(&what[..11]) && text.contains("=>"), "{unit:?}: {text}");
                    assert!(text.chars().count() <= usize::from(columns), "{unit:?}: {text}");
                }
            }
        }
    }

    #[test]
    fn a_bar_is_gone_when_it_is_done() {
        for (unit, _) in UNITS {
            let (terminal, bar) = halfway(80, "quantizing", 100, unit);
            assert!(terminal.contents().contains("quantizing"));
            bar.finish_and_clear();
            assert_eq!(terminal.contents(), "", "{unit:?}");
            let (terminal, bar) = halfway(80, "quantizing", 100, unit);
            drop(bar);
            assert_eq!(terminal.contents(), "", "{unit:?}: dropped");
        }
    }
}
