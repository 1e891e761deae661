//! Triggers of a server's stop: Ctrl-C, SIGTERM, or the end of standard input when the parent process has ended.

use crate::log;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A token that is cancelled when the process should stop.
pub(crate) fn token(with_stdin: bool) -> CancellationToken {
    let token = CancellationToken::new();
    let stop = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = interrupted() => {}
            () = terminated() => {}
            () = stdin_ends(), if with_stdin => {}
        }
        stop.cancel();
    });
    token
}

/// Runs a command that has temporary files, and drops it on a stop signal, so that it removes them.
pub(crate) async fn unless_stopped<T>(command: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::select! {
        // Signals are handled before the first file is created.
        biased;
        () = interrupted() => anyhow::bail!("interrupted"),
        () = terminated() => anyhow::bail!("terminated"),
        result = command => result,
    }
}

/// Signals to end an instance.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    /// SIGTERM: it moves others' blocks away and finishes its requests, then stops.
    pub(crate) drain: CancellationToken,
    /// Stop now: a second SIGTERM, Ctrl-C, the end of standard input, or the drain took too long.
    pub(crate) stop: CancellationToken,
}

/// As [`token`], but the first SIGTERM starts a drain of at most `drain_limit`.
pub(crate) fn graceful(with_stdin: bool, drain_limit: Duration) -> Ending {
    let ending = Ending { drain: CancellationToken::new(), stop: CancellationToken::new() };
    let asked = ending.clone();
    tokio::spawn(async move {
        let drained = async {
            terminated().await;
            tracing::warn!("draining; a second SIGTERM stops at once");
            asked.drain.cancel();
            tokio::select! {
                () = terminated() => {}
                () = tokio::time::sleep(drain_limit) => tracing::warn!("the drain took too long; stopping"),
            }
        };
        tokio::select! {
            () = interrupted() => {}
            () = drained => {}
            () = stdin_ends(), if with_stdin => {}
        }
        asked.stop.cancel();
    });
    ending
}

/// Ends the process with an error, and runs nothing on the way: neither destructors nor exit handlers. Those of a driver wait for a
/// thread that hangs in it.
pub(crate) fn at_once(error: &str) -> ! {
    log::notice(&format!("error: {error}\n"));
    log::end();
    std::process::abort()
}

/// Ctrl-C.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Resolves at SIGTERM, where it exists.
async fn terminated() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut term) = signal(SignalKind::terminate())
            && term.recv().await.is_some()
        {
            return;
        }
    }
    std::future::pending::<()>().await;
}

/// Resolves at the end of standard input; read on a thread of its own, which may block for the process's life.
async fn stdin_ends() {
    let (ended, end) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let drained = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        // An unreadable input has ended, too; the receiver is dropped only when the process stops.
        let _ = ended.send(drained.is_ok());
    });
    if end.await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    /// Set in the process that ends.
    const ENDING: &str = "LAGOON_TEST_ENDS_AT_ONCE";

    struct Unreached;

    impl Drop for Unreached {
        fn drop(&mut self) {
            std::process::exit(7);
        }
    }

    #[test]
    fn a_process_says_why_and_ends_without_destructors() {
        if std::env::var_os(ENDING).is_some() {
            let _logging = log::start("warn");
            let _unreached = Unreached;
            at_once("the device hangs\nhint: look");
        }
        let name = "shutdown::tests::a_process_says_why_and_ends_without_destructors";
        let mut command = Command::new(std::env::current_exe().unwrap());
        let ended = command.args(["--exact", name, "--nocapture"]).env(ENDING, "1").output().unwrap();
        let reply = String::from_utf8_lossy(&ended.stderr);
        assert!(reply.contains("error: the device hangs\nhint: look\n"), "{reply}");
        assert_eq!((ended.status.code(), ended.status.signal().is_some()), (None, true), "{reply}");
    }
}
