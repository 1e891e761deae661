//! Logging and output of a process that must not depend on its standard error and output.
//!
//! Log lines go through a bounded queue to a thread of their own. A standard error that is closed, full or not read costs lines
//! (the queue drops lines that do not fit), never a thread, a request or the process. Messages of panics take the same queue: the
//! standard hook would write to standard error itself and block the panicking thread until a reader reads. This module never panics.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::{Arguments, Display};
use std::io::{self, IsTerminal as _, Write as _, stderr, stdout};
use std::panic::{self, PanicHookInfo};
use std::sync::{Mutex, OnceLock, PoisonError};
use tokio::sync::Notify;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};

/// Maximum of lines that wait for standard error.
const LINES_MAX: usize = 4096;

static WRITER: OnceLock<NonBlocking> = OnceLock::new();
/// Notified when standard output was found closed.
static CLOSED: Notify = Notify::const_new();
static GUARD: Mutex<Option<WorkerGuard>> = Mutex::new(None);

/// Ends logging when it is dropped; see [`end`].
#[derive(Debug)]
pub(crate) struct Logging(());

impl Drop for Logging {
    fn drop(&mut self) {
        end();
    }
}

/// Writes lines that wait, within a second. Nothing is written afterwards.
pub(crate) fn end() {
    let guard = GUARD.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(guard);
}

/// Starts logging with `filter` (tracing syntax; `warn` if it does not parse). Lines that wait are written when the result is
/// dropped, within a second.
pub(crate) fn start(filter: &str) -> Logging {
    let (writer, guard) = NonBlockingBuilder::default().buffered_lines_limit(LINES_MAX).lossy(true).finish(stderr());
    let writer = WRITER.get_or_init(|| writer).clone();
    panic::set_hook(Box::new(|panicked| notice(&in_words(panicked))));
    let filter = tracing_subscriber::EnvFilter::try_new(filter).unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(stderr().is_terminal())
        .log_internal_errors(false)
        .init();
    *GUARD.lock().unwrap_or_else(PoisonError::into_inner) = Some(guard);
    Logging(())
}

/// A panic's message, as the standard hook formats it.
fn in_words(panicked: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("<unnamed>");
    let place = panicked.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    let message = panicked.payload_as_str().unwrap_or("(no text)");
    let backtrace = Backtrace::capture();
    match backtrace.status() {
        BacktraceStatus::Captured => format!("\nthread '{thread}' panicked at {place}:\n{message}\n{backtrace}"),
        _ => format!("\nthread '{thread}' panicked at {place}:\n{message}\n"),
    }
}

/// Prints text on standard error, regardless of the filter.
pub(crate) fn notice(text: &str) {
    if let Some(writer) = WRITER.get() {
        deliver(writer, text);
    }
}

fn deliver(writer: &NonBlocking, text: &str) {
    // It fails only when the process ends.
    let _ = writer.clone().write_all(text.as_bytes());
}

/// Prints a server's ready line on standard output. A closed output is no error.
pub(crate) fn announce(line: impl Display) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Prints a command's result on standard output. A closed output (`lagoon status | head -1`) is no error and ends the command
/// ([`closed`]); other errors (a full disk) are reported on standard error.
pub(crate) fn answer(text: Arguments<'_>) {
    let mut out = stdout().lock();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => CLOSED.notify_one(),
        Err(error) => notice(&format!("error: the answer was not written: {error}\n")),
    }
}

/// Resolves when an answer was not written because standard output is closed.
pub(crate) async fn closed() {
    CLOSED.notified().await;
}

/// As `print!`, through [`answer`].
macro_rules! out {
    ($($text:tt)*) => { $crate::log::answer(format_args!($($text)*)) };
}

/// As `println!`, through [`answer`].
macro_rules! outln {
    ($($text:tt)*) => { $crate::log::answer(format_args!("{}\n", format_args!($($text)*))) };
}

pub(crate) use {out, outln};

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex, mpsc};

    /// A standard error that nobody reads, until its sender is dropped.
    struct Unread(mpsc::Receiver<()>, Arc<Mutex<String>>);

    impl io::Write for Unread {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let _closed = self.0.recv();
            self.1.lock().unwrap().push_str(&String::from_utf8_lossy(line));
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Once, a thread that panicked blocked in the standard hook until a reader emptied standard error.
    #[test]
    fn a_panic_is_printed_and_waits_for_no_thread() {
        const NAME: &str = "panics-on-purpose";
        let (read, unread) = mpsc::channel();
        let text = Arc::new(Mutex::new(String::new()));
        let sink = Unread(unread, Arc::clone(&text));
        let (writer, guard) = NonBlockingBuilder::default().buffered_lines_limit(4).lossy(true).finish(sink);
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |panicked| {
            // Other tests panic as they did.
            if std::thread::current().name() == Some(NAME) {
                deliver(&writer, &in_words(panicked));
            } else {
                previous(panicked);
            }
        }));
        for n in 0..20 {
            let panicking = std::thread::Builder::new().name(NAME.to_owned()).spawn(move || panic!("number {n}"));
            assert!(panicking.unwrap().join().is_err());
        }
        drop(read);
        while !text.lock().unwrap().contains("number 0\n") {
            std::thread::yield_now();
        }
        drop(guard);
        let text = text.lock().unwrap();
        assert!(text.contains("thread 'panics-on-purpose' panicked at apps/lagoon/src/log.rs:"), "{text}");
        assert!(text.contains("number 0\n") && !text.contains("number 19\n"), "{text}");
    }
}
