//! When a server stops: on Ctrl-C, on SIGTERM, or when the parent that holds its standard input is gone.

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

/// How an instance is asked to end.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    /// SIGTERM: it moves away what it has of others and finishes its requests, then stops.
    pub(crate) drain: CancellationToken,
    /// It stops now: a second SIGTERM, Ctrl-C, the end of standard input, or the drain took too long.
    pub(crate) stop: CancellationToken,
}

/// As [`token`], but the first SIGTERM asks for a drain, which gets `drain_limit`.
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

/// Ctrl-C.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// SIGTERM, where there is one.
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

/// Reads on a thread of its own: it may block for the process's life.
async fn stdin_ends() {
    let (ended, end) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let drained = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        // An unreadable input has ended as well; the receiver is gone only when the process stops anyway.
        let _ = ended.send(drained.is_ok());
    });
    if end.await.is_err() {
        std::future::pending::<()>().await;
    }
}
