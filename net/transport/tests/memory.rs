//! Bounds of the memory that one node can make another one hold.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "support/mod.rs"]
#[allow(dead_code, reason = "shared with tests of other things")]
mod support;

#[path = "support/raw.rs"]
#[allow(dead_code, reason = "shared with tests of other things")]
mod raw;

use lagoon_transport::{Class, Event, FIRST_WINDOW_BYTES, Node, TransportConfig};
use lagoon_wire::{Frame, Preface, encode};
use quinn::{Connection, RecvStream};
use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use support::{TIMEOUT, identity_of, next, next_up, node_at, query, write};

/// Connections of the greedy node, by class half of them.
const CONNECTIONS: usize = 24;
/// Of one connection, and of all those of a node.
const WINDOW: u32 = 256 << 10;
const WINDOWS: u32 = 1 << 20;
/// Bytes of a frame, and what a node may have waiting of a class.
const FRAME: usize = 1 << 20;
const SHARE: usize = FRAME + (1 << 10);

/// One connection that sends frames for as long as it can.
struct Greedy {
    connection: Connection,
    _recv: RecvStream,
    sent: Arc<AtomicUsize>,
}

async fn greedy(addr: SocketAddr, number: u16) -> Greedy {
    let class = if number.is_multiple_of(2) { Class::Bulk } else { Class::Partials };
    let listen_addr = format!("127.0.0.1:{}", 1000 + number);
    let preface =
        Preface { incarnation: 100 + u64::from(number), listen_addr, ..raw::preface(u32::from(class.code())) };
    let (connection, mut send, _recv) = raw::greeted_with(addr, &preface).await;
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    tokio::spawn(async move {
        let frame: Frame = match class {
            Class::Bulk => write(1, FRAME),
            _ => query(1, FRAME),
        };
        let frame = encode(&frame).unwrap().to_vec();
        loop {
            for part in frame.chunks(4 << 10) {
                // Until the node, or the test, closes the connection.
                let Ok(()) = send.write_all(part).await else { return };
                count.fetch_add(part.len(), Relaxed);
            }
        }
    });
    Greedy { connection, _recv, sent }
}

/// The inboxes are not read: the unread bytes of one node's connections, windows and partly received frames together, stay within
/// its share, with any number of connections. Another node's frames arrive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nodes_connections_share_what_is_unread() {
    let config = TransportConfig {
        window_bytes: WINDOW,
        node_window_bytes: WINDOWS,
        inbox_bytes_max: 4 * SHARE,
        ..TransportConfig::default()
    };
    let mut bound = node_at(support::loopback(), config);
    let addr = bound.node.local_addr();
    let mut connections = Vec::new();
    for number in 0..u16::try_from(CONNECTIONS).unwrap() {
        connections.push(greedy(addr, number).await);
    }
    let sent = || connections.iter().map(|one| one.sent.load(Relaxed)).collect::<Vec<_>>();
    let first = usize::try_from(FIRST_WINDOW_BYTES).unwrap();
    // What each may send at least, and a frame of each class.
    let settled = async {
        let mut before = Vec::new();
        while sent().iter().any(|sent| *sent < first / 2)
            || sent().iter().sum::<usize>() < 2 * FRAME
            || sent() != before
        {
            before = sent();
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::time::timeout(4 * TIMEOUT, settled).await.expect("they come to rest");
    let total: usize = sent().iter().sum();
    // Bytes that the client counts before they are acknowledged, and bytes that the node took from QUIC and holds.
    let slack = CONNECTIONS * (32 << 10);
    let most = usize::try_from(WINDOWS).unwrap() + CONNECTIONS * first + 2 * SHARE + slack;
    assert!(total <= most, "{total} bytes of one node are held, above {most}: {:?}", sent());
    assert!(most < CONNECTIONS * FRAME / 4, "less than a frame of each connection");

    let modest = TransportConfig::default();
    let modest = Node::bind(support::loopback(), &identity_of("modest"), modest).unwrap();
    let peer = modest.node.connect(addr, &[]).unwrap();
    modest.node.try_send(peer, &query(7, 100)).unwrap();
    let arrived = async {
        while bound.partials.len() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await
        }
    };
    tokio::time::timeout(TIMEOUT, arrived).await.expect("another node's frame arrives");

    // The node's share is whole again when the connections have ended.
    for one in &connections {
        one.connection.close(0u32.into(), b"");
    }
    while let Ok(inbound) = tokio::time::timeout(Duration::from_secs(1), next(&mut bound.bulk)).await {
        drop(inbound);
    }
    let again = greedy(addr, 500).await;
    let wide = async {
        while again.sent.load(Relaxed) < 3 * FRAME {
            drop(next(&mut bound.bulk).await)
        }
    };
    tokio::time::timeout(TIMEOUT, wide).await.expect("a new connection has room");
}

/// Frames queued for a node that reads nothing stay within its share of the sender's memory, over any number of sessions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nodes_sessions_share_what_waits_to_be_sent() {
    const SESSIONS: u16 = 4;
    const BUDGET: usize = 20 * FRAME;
    let config = TransportConfig {
        window_bytes: WINDOW,
        queue_bytes_max: 16 * FRAME,
        node_queue_bytes_max: BUDGET,
        ..TransportConfig::default()
    };
    let mut bound = node_at(support::loopback(), config);
    let addr = bound.node.local_addr();
    let (mut connections, mut peers) = (Vec::new(), Vec::new());
    for number in 0..SESSIONS {
        let listen_addr = format!("127.0.0.1:{}", 1000 + number);
        let class = u32::from(Class::Bulk.code());
        let preface = Preface { incarnation: 100 + u64::from(number), listen_addr, ..raw::preface(class) };
        connections.push(raw::greeted_with(addr, &preface).await);
        while peers.len() < connections.len() {
            if let Event::Up { peer, .. } = next(&mut bound.events).await {
                peers.push(peer);
            }
        }
    }
    // QUIC takes some of what is queued.
    let mut accepted = 0;
    let mut idle = 0;
    while idle < 10 {
        let before = accepted;
        for peer in &peers {
            while bound.node.try_send(*peer, &write(1, FRAME)).is_ok() {
                accepted += FRAME;
            }
        }
        idle = if accepted == before { idle + 1 } else { 0 };
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let quic = usize::from(SESSIONS) * 2 * FRAME;
    assert!(accepted <= BUDGET + quic, "{accepted} bytes wait for one node");
    assert!(accepted > BUDGET / 2, "{accepted}");

    // Another node is not affected, and the end of one session makes room for the others.
    let mut modest = Node::bind(support::loopback(), &identity_of("modest"), TransportConfig::default()).unwrap();
    let other = bound.node.connect(modest.node.local_addr(), &[Class::Bulk]).unwrap();
    next_up(&mut modest.events).await;
    bound.node.try_send(other, &write(1, FRAME)).unwrap();
    next(&mut modest.bulk).await;
    let frame = write(1, FRAME);
    let last = *peers.last().unwrap();
    let waiting = bound.node.send(last, &frame, TIMEOUT);
    let closing = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        connections[0].0.close(0u32.into(), b"");
    };
    let (sent, ()) = tokio::join!(waiting, closing);
    sent.expect("there is room");
}
