//! Accepting connections: bounded in number, each with a deadline for its headers, drained on shutdown.
//!
//! When a client goes away, hyper drops the handler or the response body, which drops the request's cancel guards.

use crate::limits::{ADDRESS_CONNECTIONS_MAX, CONNECTIONS_MAX, DRAIN_DEADLINE, HEADERS_DEADLINE};
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{
    collections::HashMap,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};

/// Time to wait after a failed accept: out of file descriptors, mostly.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Where a request comes from; an extension of every request that [`serve`] accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientAddr(pub IpAddr);

/// Open connections by address, bounded for each.
#[derive(Clone, Debug, Default)]
struct Addresses(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// A connection's place among its address's; dropped with it.
struct Place {
    addresses: Addresses,
    addr: IpAddr,
}

impl Addresses {
    /// `None` where the address has [`ADDRESS_CONNECTIONS_MAX`].
    fn enter(&self, addr: IpAddr) -> Option<Place> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(addr).or_default();
        if *count >= ADDRESS_CONNECTIONS_MAX {
            return None;
        }
        *count += 1;
        Some(Place { addresses: self.clone(), addr })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.addresses.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.addr) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.addr);
            }
        }
    }
}

/// Serves `router` until `shutdown` resolves; then open responses get [`DRAIN_DEADLINE`] to finish, and what still
/// runs is dropped.
///
/// # Errors
/// When the listener cannot be used at all. A failed accept or a broken connection only concerns its client.
pub async fn serve(listener: TcpListener, router: Router, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    listener.local_addr()?;
    let (slots, addresses) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), Addresses::default());
    let (stop, stopped) = watch::channel(false);
    let mut shutdown = pin!(shutdown);
    loop {
        let (stream, peer, permit) = tokio::select! {
            () = &mut shutdown => break,
            accepted = accept(&listener, &slots) => accepted,
        };
        let addr = peer.ip().to_canonical();
        let Some(place) = addresses.enter(addr) else {
            tracing::warn!(%addr, "a connection beyond an address's share is closed");
            continue;
        };
        let router = router.clone().layer(Extension(ClientAddr(addr)));
        tokio::spawn(connection(stream, router, stopped.clone(), (permit, place)));
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

async fn accept(listener: &TcpListener, slots: &Arc<Semaphore>) -> (TcpStream, SocketAddr, OwnedSemaphorePermit) {
    let permit = Arc::clone(slots).acquire_owned().await.expect("the semaphore is never closed");
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => return (stream, peer, permit),
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
    _place: (OwnedSemaphorePermit, Place),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn an_address_has_its_share_of_connections() {
        let (addresses, addr) = (Addresses::default(), IpAddr::V4(Ipv4Addr::LOCALHOST));
        let mut places: Vec<Place> = (0..ADDRESS_CONNECTIONS_MAX).filter_map(|_| addresses.enter(addr)).collect();
        assert_eq!(places.len(), ADDRESS_CONNECTIONS_MAX);
        assert!(addresses.enter(addr).is_none() && addresses.enter(Ipv4Addr::UNSPECIFIED.into()).is_some());
        places.pop();
        places.push(addresses.enter(addr).unwrap());
        drop(places);
        assert!(addresses.0.lock().unwrap().is_empty());
    }
}
