//! Nodes on loopback, and frames to send.

use bytes::Bytes;
use lagoon_protocol::{BulkFrame, ControlBody, PartialsFrame, StatusQuery};
use lagoon_transport::{Bound, ClusterCa, Event, Frame, Identity, Inbox, Node, PeerId, Roles, TransportConfig};
use lagoon_types::{Epoch, LeaseId, StepId};
use std::{net::SocketAddr, sync::LazyLock, time::Duration};

/// Longest wait of any test: far above what is needed, so that a loaded machine does not fail it.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) static CA: LazyLock<ClusterCa> = LazyLock::new(|| ClusterCa::generate("test").unwrap());

pub(crate) fn identity() -> Identity {
    // One key, as one node has.
    static NODE: LazyLock<Identity> = LazyLock::new(|| identity_of("node"));
    NODE.clone()
}

/// A node of this name, in every role.
pub(crate) fn identity_of(node: &str) -> Identity {
    CA.identity(node, Roles::all()).unwrap()
}

pub(crate) fn node() -> Bound {
    node_at(loopback(), TransportConfig::default())
}

pub(crate) fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub(crate) fn node_at(addr: SocketAddr, config: TransportConfig) -> Bound {
    Node::bind(addr, &identity(), config).unwrap()
}

pub(crate) fn control(number: u64) -> Frame {
    ControlBody::StatusQuery(StatusQuery { query: number, prefixes: None }).into()
}

pub(crate) fn query(number: u64, bytes: usize) -> Frame {
    let queries = Bytes::from(vec![u8::try_from(number % 251).unwrap(); bytes]);
    PartialsFrame::Query { step: StepId(number), layer: 1, rows: 1, queries }.into()
}

pub(crate) fn write(number: u64, bytes: usize) -> Frame {
    let kv = Bytes::from(vec![u8::try_from(number % 251).unwrap(); bytes]);
    BulkFrame::Write { lease: LeaseId(number), epoch: Epoch(1), layer: 1, offset: 0, tokens: 1, kv }.into()
}

/// The next item, which must come in time.
pub(crate) async fn next<T>(inbox: &mut Inbox<T>) -> T {
    tokio::time::timeout(TIMEOUT, inbox.recv()).await.expect("an event in time").expect("the node is open")
}

pub(crate) async fn next_up(events: &mut Inbox<Event>) -> (PeerId, SocketAddr, u64) {
    loop {
        if let Event::Up { peer, addr, incarnation, .. } = next(events).await {
            return (peer, addr, incarnation);
        }
    }
}

pub(crate) async fn next_down(events: &mut Inbox<Event>) -> (PeerId, String) {
    loop {
        if let Event::Down { peer, reason, .. } = next(events).await {
            return (peer, reason);
        }
    }
}

/// The number in the next control message; skips news.
pub(crate) async fn next_number(events: &mut Inbox<Event>) -> u64 {
    loop {
        if let Event::Control { message, .. } = next(events).await {
            let Some(ControlBody::StatusQuery(StatusQuery { query, .. })) = message.body else { panic!("{message:?}") };
            return query;
        }
    }
}
