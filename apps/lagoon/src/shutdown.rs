//! When a server stops: on Ctrl-C, on SIGTERM, or when the parent that holds its standard input is gone.

use tokio_util::sync::CancellationToken;

/// A token that is cancelled when the process should stop.
pub(crate) fn token(with_stdin: bool) -> CancellationToken {
    let token = CancellationToken::new();
    let stop = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = signal() => {}
            () = stdin_ends(), if with_stdin => {}
        }
        stop.cancel();
    });
    token
}

async fn signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut term) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = term.recv() => {}
            }
            return;
        }
    }
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
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
