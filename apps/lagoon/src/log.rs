//! Standard error and standard output of a process that must not depend on either.
//!
//! Log lines go through a bounded queue to a thread of their own. A standard error that is closed, full or not read costs lines
//! (the queue drops what does not fit), never a thread, a request or the process. Nothing here panics.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _, stderr, stdout};
use std::sync::OnceLock;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};

/// Lines that wait for standard error.
const LINES_MAX: usize = 4096;

static WRITER: OnceLock<NonBlocking> = OnceLock::new();

/// Starts logging with `filter` (tracing syntax; `warn` if it does not parse). Lines that wait are written when the guard is
/// dropped, within a second.
pub(crate) fn start(filter: &str) -> WorkerGuard {
    let (writer, guard) = NonBlockingBuilder::default().buffered_lines_limit(LINES_MAX).lossy(true).finish(stderr());
    let writer = WRITER.get_or_init(|| writer).clone();
    let filter = tracing_subscriber::EnvFilter::try_new(filter).unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(stderr().is_terminal())
        .log_internal_errors(false)
        .init();
    guard
}

/// Text for people, on standard error, whatever the filter.
pub(crate) fn notice(text: &str) {
    let Some(writer) = WRITER.get() else { return };
    // It fails only when the process ends.
    let _ = writer.clone().write_all(text.as_bytes());
}

/// A line of a server's answer, on standard output. A reader that is gone is none of the server's concern.
pub(crate) fn announce(line: impl Display) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
