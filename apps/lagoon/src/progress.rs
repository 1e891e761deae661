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
    use indicatif::TermLike;
    use std::io;
    use std::sync::{Arc, Mutex};

    /// A terminal in memory. indicatif's own needs a feature of it, with which the binary would be built twice.
    #[derive(Clone)]
    struct Screen(Arc<Mutex<vt100::Parser>>);

    impl Screen {
        fn new(rows: u16, columns: u16) -> Self {
            Self(Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0))))
        }

        fn print(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().process(text.as_bytes());
            Ok(())
        }

        /// Moves the cursor `n` places in the direction of the control sequence that ends so.
        fn go(&self, n: usize, end: char) -> io::Result<()> {
            if n == 0 { Ok(()) } else { self.print(&format!("\x1b[{n}{end}")) }
        }

        /// Its lines without empty ones at the end.
        fn contents(&self) -> String {
            let parser = self.0.lock().unwrap();
            let rows = parser.screen().rows(0, parser.screen().size().1);
            let rows: Vec<String> = rows.map(|row| row.trim_end().to_owned()).collect();
            rows.join("\n").trim_end_matches('\n').to_owned()
        }
    }

    impl std::fmt::Debug for Screen {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Screen")
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            self.0.lock().unwrap().screen().size().1
        }

        fn move_cursor_up(&self, n: usize) -> io::Result<()> {
            self.go(n, 'A')
        }

        fn move_cursor_down(&self, n: usize) -> io::Result<()> {
            self.go(n, 'B')
        }

        fn move_cursor_right(&self, n: usize) -> io::Result<()> {
            self.go(n, 'C')
        }

        fn move_cursor_left(&self, n: usize) -> io::Result<()> {
            self.go(n, 'D')
        }

        fn write_line(&self, line: &str) -> io::Result<()> {
            self.print(&format!("{line}\r\n"))
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.print(text)
        }

        fn clear_line(&self) -> io::Result<()> {
            self.print("\r\x1b[2K")
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The units, with the largest numbers that there are of them.
    const UNITS: [(Unit, u64); 4] =
        [(Unit::Bytes, 999_999_999_999), (Unit::Tokens, 1 << 22), (Unit::Requests, 1_000_000), (Unit::Instances, 64)];

    /// A bar halfway, on a terminal with so many columns.
    fn halfway(columns: u16, what: &str, total: u64, unit: Unit) -> (Screen, ProgressBar) {
        let terminal = Screen::new(6, columns);
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
