//! Memory for the bodies of requests that the gateway holds, charged as they arrive: a client that promises a body and sends
//! none takes nothing.

use axum::body::{Body, Bytes};
use lagoon_http::{ApiError, Limits};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Largest request body; instances take no larger one.
const BODY_BYTES_MAX: usize = 32 << 20;
/// Bodies that are held at the same time.
const BODIES_BYTES_MAX: usize = 1 << 30;
/// Of one client's address.
const ADDRESS_BYTES_MAX: usize = BODIES_BYTES_MAX / 4;

/// See the module's documentation. Clones share the memory.
#[derive(Clone, Debug)]
pub(crate) struct Bodies {
    taken: Arc<Mutex<Taken>>,
    bytes_max: usize,
    address_bytes_max: usize,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: usize,
    /// Addresses that hold something.
    of: HashMap<IpAddr, usize>,
}

/// What a body takes, until it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    bodies: Bodies,
    client: IpAddr,
    bytes: usize,
}

impl Bodies {
    pub(crate) fn new() -> Self {
        Self::with_limits(BODIES_BYTES_MAX, ADDRESS_BYTES_MAX)
    }

    fn with_limits(bytes_max: usize, address_bytes_max: usize) -> Self {
        Self { taken: Arc::default(), bytes_max, address_bytes_max }
    }

    /// Reads a body within all limits.
    pub(crate) async fn read(&self, client: IpAddr, body: Body) -> Result<(Bytes, Share), ApiError> {
        let mut share = Share { bodies: self.clone(), client, bytes: 0 };
        let deadline = Limits::default().body_deadline;
        let bytes = lagoon_http::read_body(body, BODY_BYTES_MAX, deadline, |bytes| share.grow(bytes)).await?;
        Ok((bytes, share))
    }
}

impl Share {
    fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let Bodies { taken, bytes_max, address_bytes_max } = &self.bodies;
        let mut taken = taken.lock().unwrap_or_else(PoisonError::into_inner);
        let of = taken.of.get(&self.client).copied().unwrap_or(0);
        let full = if of.saturating_add(bytes) > *address_bytes_max {
            Some(format!("requests of {} hold {} MiB, its share", self.client, address_bytes_max >> 20))
        } else if taken.bytes.saturating_add(bytes) > *bytes_max {
            Some(format!("the gateway holds requests of {} MiB, and has no room for another", bytes_max >> 20))
        } else {
            None
        };
        if let Some(message) = full {
            return Err(ApiError { retry_after_s: Some(1), ..ApiError::unavailable(message) });
        }
        taken.bytes += bytes;
        taken.of.insert(self.client, of + bytes);
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.bodies.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.bytes -= self.bytes;
        if let Some(of) = taken.of.get_mut(&self.client) {
            *of -= self.bytes;
            if *of == 0 {
                taken.of.remove(&self.client);
            }
        }
    }
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

    #[tokio::test]
    async fn an_address_has_its_share_and_all_have_the_whole() {
        let bodies = Bodies::with_limits(100, 60);
        let (bytes, first) = bodies.read(A, body(50)).await.unwrap();
        assert_eq!(bytes.len(), 50);
        let refused = bodies.read(A, body(11)).await.unwrap_err();
        assert!(refused.status == 503 && refused.message.contains("10.0.0.1"), "{refused:?}");
        let second = bodies.read(B, body(50)).await.unwrap();
        assert!(bodies.read(C, body(1)).await.unwrap_err().message.contains("no room"));
        drop(first);
        let third = bodies.read(A, body(50)).await.unwrap();
        drop((second, third));
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
                tokio::spawn(async move { bodies.read(A, Body::from_stream(never)).await.map(drop) })
            })
            .collect();
        while bodies.taken.lock().unwrap().bytes < 64 {
            tokio::task::yield_now().await;
        }
        assert!(bodies.read(B, body(36)).await.is_ok());
        for task in silent {
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
        }
        assert_eq!(bodies.taken.lock().unwrap().bytes, 0, "a client that went away holds nothing");
    }
}
