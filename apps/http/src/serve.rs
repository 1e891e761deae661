//! Accepts connections: bounded in number, each with deadlines for a request's headers (also between two requests) and
//! for reading the response, drained on shutdown.
//!
//! When a client disconnects, hyper drops the handler or the response body, which drops the request's cancel guards.

use crate::{
    client_addr::ClientAddr,
    front::{Front, before},
    keys::{Keys, guard},
    limits::{
        ADDRESS_CONNECTIONS_MAX, CONNECTIONS_MAX, DRAIN_DEADLINE, HEADER_BYTES_MAX, HEADERS_DEADLINE, HEADERS_MAX,
        WRITE_DEADLINE,
    },
    stalls::Stalls,
    tls::{Io, PoolConnection, PoolPeer, ServerTls},
};
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

/// Pause after a failed accept: mostly out of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Open connections by network ([`ClientAddr::network`]), bounded for each. Those of the pool's gateways do not count.
#[derive(Clone, Debug, Default)]
struct Addresses(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// A connection's permit in its address's bound; freed on drop.
struct Place {
    addresses: Addresses,
    addr: IpAddr,
}

impl Addresses {
    /// `None` where the address has [`ADDRESS_CONNECTIONS_MAX`].
    fn enter(&self, client: ClientAddr) -> Option<Place> {
        let addr = client.network();
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

/// A listener with its front, its keys and its TLS.
#[derive(Debug)]
pub struct Port {
    pub listener: TcpListener,
    /// `None`: every route is open to every client.
    pub keys: Option<Arc<Keys>>,
    /// `None`: plain HTTP.
    pub tls: Option<Arc<ServerTls>>,
    pub front: Front,
}

impl Port {
    /// Plain HTTP.
    #[must_use]
    pub fn plain(listener: TcpListener, keys: Arc<Keys>) -> Self {
        Self { listener, keys: Some(keys), tls: None, front: Front::default() }
    }
}

/// Serves `router`, behind the port's keys, until `shutdown` resolves; then open responses get [`DRAIN_DEADLINE`] to
/// finish, and the rest is dropped.
///
/// # Errors
/// If the listener cannot be used at all. A failed accept or a broken connection only affects its client.
pub async fn serve(port: Port, router: Router, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    serve_beside(port, router, shutdown, Addresses::default()).await
}

/// As [`serve`], beside connections that count already.
async fn serve_beside(
    port: Port,
    router: Router,
    shutdown: impl Future<Output = ()>,
    addresses: Addresses,
) -> io::Result<()> {
    let Port { listener, keys, tls, front } = port;
    let router = match keys {
        Some(keys) => guard(router, keys),
        None => router,
    };
    let router = before(router, front);
    listener.local_addr()?;
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let (stop, stopped) = watch::channel(false);
    let mut shutdown = pin!(shutdown);
    loop {
        let (stream, peer, permit) = tokio::select! {
            () = &mut shutdown => break,
            accepted = accept(&listener, &slots) => accepted,
        };
        let addr = peer.ip().to_canonical();
        let client = ClientAddr(addr);
        let Some(place) = addresses.enter(client) else {
            tracing::warn!(%addr, "a connection beyond an address's share is closed");
            continue;
        };
        let router = router.clone().layer(Extension(client));
        let (tls, stopped) = (tls.clone(), stopped.clone());
        tokio::spawn(async move {
            let _permit = permit;
            match open(stream, tls.as_deref()).await {
                // All requests of a pool come from its gateways' few addresses.
                Ok((stream, Some(of_pool))) => {
                    drop(place);
                    connection(stream, router.layer(Extension(PoolPeer)), stopped, of_pool.superseded()).await;
                }
                Ok((stream, None)) => {
                    let _place = place;
                    connection(stream, router, stopped, std::future::pending()).await;
                }
                Err(error) => tracing::debug!(%error, %addr, "a connection did not begin"),
            }
        });
    }
    drop(listener);
    drop(stopped);
    // Connections hold receivers: the channel closes when the last one ends.
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

/// A connection's stream, and its [`PoolConnection`] if the client has a certificate of the pool.
async fn open(stream: TcpStream, tls: Option<&ServerTls>) -> io::Result<(Box<dyn Io>, Option<PoolConnection>)> {
    // Tokens are small and must not wait for an acknowledgement.
    stream.set_nodelay(true)?;
    let Some(tls) = tls else { return Ok((Box::new(Stalls::new(stream, WRITE_DEADLINE)), None)) };
    let accepted = tokio::time::timeout(HEADERS_DEADLINE, tls.accept(stream)).await;
    accepted.map_err(|_elapsed| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Answers requests until the client ends, or the server stops. Once `superseded`, the request in flight is the last one.
async fn connection(
    stream: Box<dyn Io>,
    router: Router,
    mut stopped: watch::Receiver<bool>,
    superseded: impl Future<Output = ()>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADERS_DEADLINE);
    http.max_headers(HEADERS_MAX).max_header_size(HEADER_BYTES_MAX).max_buf_size(HEADER_BYTES_MAX);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)));
    let (mut superseded, mut is_last) = (pin!(superseded), false);
    let result = loop {
        tokio::select! {
            result = &mut connection => break result,
            // The guard that `wait_for` gives must not live across an await.
            () = async { drop(stopped.wait_for(|stop| *stop).await) } => {
                connection.as_mut().graceful_shutdown();
                // After the deadline `serve` has returned; remaining requests are cut here.
                break tokio::time::timeout(DRAIN_DEADLINE, connection.as_mut()).await.unwrap_or(Ok(()));
            }
            () = &mut superseded, if !is_last => {
                is_last = true;
                connection.as_mut().graceful_shutdown();
            }
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
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::{Notify, oneshot};

    #[test]
    fn an_address_has_its_share_of_connections() {
        let (addresses, addr) = (Addresses::default(), ClientAddr(Ipv4Addr::LOCALHOST.into()));
        let mut places: Vec<Place> = (0..ADDRESS_CONNECTIONS_MAX).filter_map(|_| addresses.enter(addr)).collect();
        assert_eq!(places.len(), ADDRESS_CONNECTIONS_MAX);
        assert!(addresses.enter(addr).is_none() && addresses.enter(ClientAddr(Ipv4Addr::UNSPECIFIED.into())).is_some());
        places.pop();
        places.push(addresses.enter(addr).unwrap());
        drop(places);
        assert!(addresses.0.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_connection_beyond_its_addresss_share_is_closed() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (server, addresses) = (listener.local_addr().unwrap(), Addresses::default());
        let client = ClientAddr(Ipv4Addr::LOCALHOST.into());
        let mut places: Vec<Place> = (0..ADDRESS_CONNECTIONS_MAX).filter_map(|_| addresses.enter(client)).collect();
        let router = Router::new().route("/", axum::routing::get(|| async { "answered" }));
        let port = Port { listener, keys: None, tls: None, front: Front::default() };
        let serving = tokio::spawn(serve_beside(port, router, std::future::pending(), addresses));
        let ask = || async {
            let mut stream = TcpStream::connect(server).await.unwrap();
            let mut output = String::new();
            // Either may fail, as the server may be done with the connection before.
            let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
            let _ = stream.read_to_string(&mut output).await;
            output
        };
        assert_eq!(ask().await, "");
        places.pop();
        let output = ask().await;
        assert!(output.ends_with("answered"), "{output}");
        serving.abort();
    }

    /// A kept connection of a revoked certificate went on for ever.
    #[tokio::test]
    async fn a_superseded_connection_ends_with_the_request_in_flight() {
        let (mut client, server) = tokio::io::duplex(4096);
        let [begun, finish, ended] = [(); 3].map(|()| Arc::new(Notify::new()));
        let (handler_begun, handler_finish, reported) = (Arc::clone(&begun), Arc::clone(&finish), Arc::clone(&ended));
        let handler = move || async move {
            handler_begun.notify_one();
            handler_finish.notified().await;
            "answered"
        };
        let (supersede, superseded) = oneshot::channel();
        let superseded = async move {
            superseded.await.unwrap();
            reported.notify_one();
        };
        let (_stop, stopped) = watch::channel(false);
        let router = Router::new().route("/", axum::routing::get(handler));
        let serving = tokio::spawn(connection(Box::new(server), router, stopped, superseded));
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        begun.notified().await;
        supersede.send(()).unwrap();
        ended.notified().await;
        finish.notify_one();
        let mut output = String::new();
        client.read_to_string(&mut output).await.unwrap();
        assert!(output.contains("connection: close") && output.ends_with("answered"), "{output}");
        serving.await.unwrap();
    }

    /// One connection could hold 400 KiB of headers.
    #[tokio::test]
    async fn headers_are_bounded_in_number_and_bytes() {
        let router = Router::new().route("/", axum::routing::get(|| async { "answered" }));
        let fields = |count: usize, bytes: usize| {
            let value = "v".repeat(bytes);
            (0..count).map(|n| format!("x-{n}: {value}\r\n")).collect::<String>()
        };
        for (headers, status) in [
            (fields(HEADERS_MAX - 1, 8), "200"),
            (fields(HEADERS_MAX + 1, 8), "431"),
            (fields(1, HEADER_BYTES_MAX / 2), "200"),
            (fields(1, HEADER_BYTES_MAX), "431"),
            (fields(40, HEADER_BYTES_MAX / 32), "431"),
        ] {
            let (mut client, server) = tokio::io::duplex(1 << 20);
            let (_stop, stopped) = watch::channel(false);
            let serving = connection(Box::new(server), router.clone(), stopped, std::future::pending());
            let serving = tokio::spawn(serving);
            let request = format!("GET / HTTP/1.1\r\nconnection: close\r\n{headers}\r\n");
            client.write_all(request.as_bytes()).await.unwrap();
            let mut output = String::new();
            client.read_to_string(&mut output).await.unwrap();
            assert!(output.starts_with(&format!("HTTP/1.1 {status} ")), "{} bytes: {output}", request.len());
            serving.await.unwrap();
        }
    }

    /// Its addresses are as many as it wants.
    #[test]
    fn a_client_of_ipv6_has_one_share_for_its_64_bits() {
        let network = |addr: &str| ClientAddr(addr.parse().unwrap()).network();
        assert_eq!(network("2001:db8:1:2::1"), network("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:1:3::1"));
        assert_ne!(network("10.0.0.1"), network("10.0.0.2"));
        assert_eq!(network("::ffff:10.0.0.1"), network("10.0.0.1"));
        let addresses = Addresses::default();
        let addr = |n: usize| ClientAddr(format!("2001:db8::{n:x}").parse().unwrap());
        let places: Vec<Place> = (0..2 * ADDRESS_CONNECTIONS_MAX).filter_map(|n| addresses.enter(addr(n))).collect();
        assert_eq!(places.len(), ADDRESS_CONNECTIONS_MAX);
    }
}
