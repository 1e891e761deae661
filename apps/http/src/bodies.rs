//! Memory budget for request bodies, charged as bytes arrive: a client that announces a body and sends none takes no
//! memory.

use crate::{client_addr::ClientAddr, error::ApiError, tls::PoolPeer};
use axum::body::{Body, Bytes, HttpBody as _};
use axum::http::{Extensions, HeaderMap, StatusCode, header};
use futures::StreamExt as _;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::timeout;

/// Budget for all bodies, in bytes.
const BODIES_BYTES_MAX: usize = 1 << 30;
/// Of one client's address, for IPv6 its /64.
const ADDRESS_BODIES_BYTES_MAX: usize = BODIES_BYTES_MAX / 4;

/// The budget of a process. Clones share it.
#[derive(Clone, Debug)]
pub struct Bodies {
    taken: Arc<Mutex<Taken>>,
    bytes_max: usize,
    address_bytes_max: usize,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: usize,
    /// Networks ([`ClientAddr::network`]) that hold something.
    of: HashMap<IpAddr, usize>,
}

/// Whom a body is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A client, which has a share.
    Client(ClientAddr),
    /// A gateway of the pool, whose clients have had their shares there.
    Pool,
}

impl Holder {
    /// The holder of a request's body, from the extensions that [`serve`](crate::serve()) sets by connection. Requests without
    /// extensions share one holder.
    #[must_use]
    pub fn of(extensions: &Extensions) -> Self {
        let unknown = ClientAddr(Ipv6Addr::UNSPECIFIED.into());
        match extensions.get::<PoolPeer>() {
            Some(PoolPeer) => Self::Pool,
            None => Self::Client(extensions.get::<ClientAddr>().copied().unwrap_or(unknown)),
        }
    }

    fn client(self) -> Option<ClientAddr> {
        match self {
            Self::Client(client) => Some(client),
            Self::Pool => None,
        }
    }
}

/// Bytes that a body takes of its holder's budget and of the server's, until it is dropped.
#[derive(Debug)]
pub struct Share {
    bodies: Bodies,
    holder: Holder,
    bytes: usize,
}

impl Bodies {
    pub(crate) fn with_limits(bytes_max: usize, address_bytes_max: usize) -> Self {
        Self { taken: Arc::default(), bytes_max, address_bytes_max }
    }

    /// Reads a body of at most `limit` bytes within `deadline`, and within the budgets of its holder and of the server.
    ///
    /// # Errors
    /// 413, 408, or 400 if the body breaks off; 503 when there is no room.
    pub async fn read(
        &self,
        holder: Holder,
        body: Body,
        limit: usize,
        deadline: Duration,
    ) -> Result<(Bytes, Share), ApiError> {
        let mut share = Share { bodies: self.clone(), holder, bytes: 0 };
        let bytes = read_body(body, limit, deadline, |bytes| share.grow(bytes)).await?;
        Ok((bytes, share))
    }

    /// Takes `bytes` of the budgets of the holder and of the server, for a text that is made here.
    ///
    /// # Errors
    /// 503 when there is no room.
    pub(crate) fn hold(&self, holder: Holder, bytes: usize) -> Result<Share, ApiError> {
        let mut share = Share { bodies: self.clone(), holder, bytes: 0 };
        share.grow(bytes)?;
        Ok(share)
    }
}

impl Default for Bodies {
    /// With [`BODIES_BYTES_MAX`] and [`ADDRESS_BODIES_BYTES_MAX`].
    fn default() -> Self {
        Self::with_limits(BODIES_BYTES_MAX, ADDRESS_BODIES_BYTES_MAX)
    }
}

impl Share {
    /// `text`, which takes the share until its last part is dropped.
    pub(crate) fn keep(self, text: Vec<u8>) -> Bytes {
        struct Kept(Vec<u8>, Share);
        impl AsRef<[u8]> for Kept {
            fn as_ref(&self) -> &[u8] {
                let Self(text, _share) = self;
                text
            }
        }
        Bytes::from_owner(Kept(text, self))
    }

    fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let Bodies { taken, bytes_max, address_bytes_max } = &self.bodies;
        let mut taken = taken.lock().unwrap_or_else(PoisonError::into_inner);
        let held = |client: &ClientAddr| taken.of.get(&client.network()).copied().unwrap_or(0);
        let client = self.holder.client().filter(|client| held(client).saturating_add(bytes) > *address_bytes_max);
        let full = if let Some(ClientAddr(addr)) = client {
            Some(format!("requests of {addr} hold {} MiB, its share", address_bytes_max >> 20))
        } else if taken.bytes.saturating_add(bytes) > *bytes_max {
            Some(format!("requests of {} MiB are held, and there is no room for another", bytes_max >> 20))
        } else {
            None
        };
        if let Some(message) = full {
            let message = format!("{message}\nhint: send it again in a moment");
            return Err(ApiError { retry_after_s: Some(1), ..ApiError::unavailable(message) });
        }
        taken.bytes += bytes;
        if let Some(client) = self.holder.client() {
            *taken.of.entry(client.network()).or_default() += bytes;
        }
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.bodies.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.bytes -= self.bytes;
        let Some(network) = self.holder.client().map(ClientAddr::network) else { return };
        if let Some(of) = taken.of.get_mut(&network) {
            *of -= self.bytes;
            if *of == 0 {
                taken.of.remove(&network);
            }
        }
    }
}

/// Refuses a body that is compressed or encoded otherwise.
pub(crate) fn check_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    let Some(encoding) = encodings.map(|value| String::from_utf8_lossy(value.as_bytes())).find(|of| of != "identity")
    else {
        return Ok(());
    };
    let message = format!("the request's content-encoding is `{encoding}`, but only bodies without one are read");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Some("unsupported_encoding"), message))
}

/// Reads a request's body of at most `limit` bytes within `deadline`. `charge` gets the size of every piece before it
/// is kept, and may refuse it.
///
/// # Errors
/// 413, 408, `charge`'s error, or 400 if the body breaks off.
async fn read_body(
    body: Body,
    limit: usize,
    deadline: Duration,
    charge: impl FnMut(usize) -> Result<(), ApiError>,
) -> Result<Bytes, ApiError> {
    timeout(deadline, collect(body, limit, charge)).await.unwrap_or_else(|_elapsed| {
        let message = format!("the request body took longer than {} s", deadline.as_secs());
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, Some("request_timeout"), message))
    })
}

async fn collect(
    body: Body,
    limit: usize,
    mut charge: impl FnMut(usize) -> Result<(), ApiError>,
) -> Result<Bytes, ApiError> {
    let too_large = || {
        let message = format!("the request body is larger than {limit} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Some("request_too_large"), message)
    };
    // Refused by its Content-Length, before it is sent.
    if usize::try_from(body.size_hint().lower()).map_or(true, |bytes| bytes > limit) {
        return Err(too_large());
    }
    let mut pieces = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| {
            let message = format!("the request body could not be read: {error}");
            ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_body"), message)
        })?;
        if piece.len() > limit - bytes.len() {
            return Err(too_large());
        }
        charge(piece.len())?;
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;
    use std::net::Ipv4Addr;

    const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
    const C: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 3));

    fn body(bytes: usize) -> Body {
        Body::from(vec![b'a'; bytes])
    }

    async fn read(bodies: &Bodies, client: IpAddr, body: Body) -> Result<(Bytes, Share), ApiError> {
        bodies.read(Holder::Client(ClientAddr(client)), body, 1 << 20, Duration::from_secs(30)).await
    }

    #[tokio::test]
    async fn an_address_has_its_share_and_all_have_the_whole() {
        let bodies = Bodies::with_limits(100, 60);
        let (bytes, first) = read(&bodies, A, body(50)).await.unwrap();
        assert_eq!(bytes.len(), 50);
        let refused = read(&bodies, A, body(11)).await.unwrap_err();
        assert!(refused.status == 503 && refused.message.contains("10.0.0.1"), "{refused:?}");
        let second = read(&bodies, B, body(50)).await.unwrap();
        assert!(read(&bodies, C, body(1)).await.unwrap_err().message.contains("no room"));
        drop(first);
        let third = read(&bodies, A, body(50)).await.unwrap();
        drop((second, third));
        let taken = bodies.taken.lock().unwrap();
        assert!(taken.bytes == 0 && taken.of.is_empty(), "{taken:?}");
    }

    /// All clients of a gateway shared one address's part before.
    #[tokio::test]
    async fn a_gateway_of_the_pool_has_the_whole_and_a_network_one_share() {
        let bodies = Bodies::with_limits(100, 60);
        let mut extensions = Extensions::new();
        extensions.insert(ClientAddr(A));
        assert_eq!(Holder::of(&extensions), Holder::Client(ClientAddr(A)));
        extensions.insert(PoolPeer);
        assert_eq!(Holder::of(&extensions), Holder::Pool);
        let deadline = Duration::from_secs(30);
        let held = bodies.read(Holder::Pool, body(100), 1 << 20, deadline).await.unwrap();
        assert!(bodies.read(Holder::Pool, body(1), 1 << 20, deadline).await.unwrap_err().message.contains("no room"));
        drop(held);
        let client = |addr: &str| addr.parse().unwrap();
        let held = read(&bodies, client("2001:db8::1"), body(60)).await.unwrap();
        let refused = read(&bodies, client("2001:db8::2"), body(1)).await.unwrap_err();
        assert!(refused.message.contains("its share"), "{refused:?}");
        assert!(read(&bodies, client("2001:db8:0:1::1"), body(40)).await.is_ok());
        drop(held);
        let taken = bodies.taken.lock().unwrap();
        assert!(taken.bytes == 0 && taken.of.is_empty(), "{taken:?}");
    }

    /// Thirty-two clients that sent headers took the whole budget before.
    #[tokio::test]
    async fn a_body_that_does_not_come_takes_nothing() {
        let bodies = Bodies::with_limits(100, 100);
        let silent: Vec<_> = (0..64)
            .map(|_| {
                let bodies = bodies.clone();
                let begun = stream::iter([Ok::<_, std::convert::Infallible>(Bytes::from_static(b"a"))]);
                let never = futures::StreamExt::chain(begun, stream::pending());
                tokio::spawn(async move { read(&bodies, A, Body::from_stream(never)).await.map(drop) })
            })
            .collect();
        while bodies.taken.lock().unwrap().bytes < 64 {
            tokio::task::yield_now().await;
        }
        assert!(read(&bodies, B, body(36)).await.is_ok());
        for task in silent {
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
        }
        assert_eq!(bodies.taken.lock().unwrap().bytes, 0, "a client that went away holds nothing");
    }
}
