//! Accepting connections: bounded in number, each with a deadline for its headers, drained on shutdown.
//!
//! When a client goes away, hyper drops the handler or the response body, which drops the request's cancel guards.

use crate::limits::{CONNECTIONS_MAX, DRAIN_DEADLINE, HEADERS_DEADLINE};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{future::Future, io, pin::pin, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};

/// Time to wait after a failed accept: out of file descriptors, mostly.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Serves `router` until `shutdown` resolves; then open responses get [`DRAIN_DEADLINE`] to finish, and what still
/// runs is dropped.
///
/// # Errors
/// When the listener cannot be used at all. A failed accept or a broken connection only concerns its client.
pub async fn serve(listener: TcpListener, router: Router, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    listener.local_addr()?;
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let (stop, stopped) = watch::channel(false);
    let mut shutdown = pin!(shutdown);
    loop {
        let (stream, permit) = tokio::select! {
            () = &mut shutdown => break,
            accepted = accept(&listener, &slots) => accepted,
        };
        tokio::spawn(connection(stream, router.clone(), stopped.clone(), permit));
    }
    drop(listener);
    drop(stopped);
    // Connections hold receivers: the channel is closed when the last one has ended.
    let _ = stop.send(true);
    if tokio::time::timeout(DRAIN_DEADLINE, stop.closed()).await.is_err() {
        tracing::warn!("connections were still open {} s after shutdown", DRAIN_DEADLINE.as_secs());
    }
    Ok(())
}

async fn accept(listener: &TcpListener, slots: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    let permit = Arc::clone(slots).acquire_owned().await.expect("the semaphore is never closed");
    loop {
        match listener.accept().await {
            Ok((stream, _peer)) => return (stream, permit),
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    router: Router,
    mut stopped: watch::Receiver<bool>,
    _permit: OwnedSemaphorePermit,
) {
    // Tokens are small and must not wait for an acknowledgement.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "set_nodelay failed");
    }
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADERS_DEADLINE);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)));
    let result = tokio::select! {
        result = &mut connection => result,
        // The guard that `wait_for` gives must not live across an await.
        () = async { drop(stopped.wait_for(|stop| *stop).await) } => {
            connection.as_mut().graceful_shutdown();
            // After the deadline `serve` has returned; whatever is left is cut here.
            tokio::time::timeout(DRAIN_DEADLINE, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "connection ended");
    }
}
