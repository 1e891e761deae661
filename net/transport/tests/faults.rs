//! Strangers, broken peers, lost and restarted processes.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "support/raw.rs"]
mod raw;
mod support;

use lagoon_transport::{Bound, Class, ClusterCa, Event, Frame, Node, Roles, TransportConfig};
use lagoon_wire::{encode, encode_preface};
use std::{net::SocketAddr, time::Duration};
use support::*;

/// The reason of the next refused connection.
async fn next_refused(bound: &mut Bound) -> String {
    loop {
        if let Event::Refused { reason, .. } = next(&mut bound.events).await {
            return reason;
        }
    }
}

async fn next_unreachable(bound: &mut Bound) -> String {
    loop {
        if let Event::Unreachable { reason, .. } = next(&mut bound.events).await {
            return reason;
        }
    }
}

/// The node still serves a proper peer.
async fn assert_serves(bound: &mut Bound) {
    let other = node();
    let peer = other.node.connect(bound.node.local_addr(), &[]).unwrap();
    other.node.try_send(peer, &control(4242)).unwrap();
    assert_eq!(next_number(&mut bound.events).await, 4242);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_without_a_certificate_is_refused() {
    let mut bound = node();
    // TLS 1.3 lets the client finish before the server has judged it: the refusal comes at the latest with a read.
    let refusal = match raw::connect(bound.node.local_addr(), false).await {
        Ok(connection) => connection.closed().await,
        Err(error) => error,
    };
    assert!(refusal.to_string().to_lowercase().contains("certificate"), "{refusal}");
    let reason = next_refused(&mut bound).await;
    assert!(reason.contains("no certificates"), "{reason}");
    assert_serves(&mut bound).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_of_another_cluster_is_refused_on_both_sides() {
    let mut ours = node();
    let other_ca = ClusterCa::generate("other").unwrap();
    let mut theirs =
        Node::bind(loopback(), &other_ca.identity("stranger", Roles::all()).unwrap(), TransportConfig::default())
            .unwrap();
    let peer = theirs.node.connect(ours.node.local_addr(), &[Class::Control]).unwrap();
    theirs.node.try_send(peer, &control(1)).unwrap();
    let reason = next_unreachable(&mut theirs).await;
    assert!(reason.contains("different CAs"), "{reason}");
    let reason = next_refused(&mut ours).await;
    assert!(reason.contains("handshake failed"), "{reason}");
    assert_serves(&mut ours).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_closes_the_connection_and_not_the_process() {
    let mut bound = node();
    let addr = bound.node.local_addr();
    for class in [1, 2, 3] {
        let (connection, mut send, _recv) = raw::greeted(addr, class).await;
        next_up(&mut bound.events).await;
        send.write_all(&[0xaa; 100]).await.unwrap();
        let closed = connection.closed().await.to_string();
        assert!(closed.contains("not a Lagoon frame"), "{closed}");
        let (_, reason) = next_down(&mut bound.events).await;
        assert!(reason.contains("not a Lagoon frame"), "{reason}");
    }
    assert_serves(&mut bound).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_oversized_frame_is_refused_by_its_header() {
    let mut bound = node();
    let (connection, mut send, _recv) = raw::greeted(bound.node.local_addr(), 3).await;
    let mut header = encode(&write(1, 64)).unwrap().to_vec();
    header.truncate(16);
    header[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    send.write_all(&header).await.unwrap();
    let closed = connection.closed().await.to_string();
    assert!(closed.contains("over the limit"), "{closed}");
    assert!(next_down(&mut bound.events).await.1.contains("over the limit"));
    assert_serves(&mut bound).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_prefaces_are_refused_with_their_reason() {
    let mut bound = node();
    let encoded = |preface: &lagoon_wire::Preface| encode_preface(preface).unwrap().to_vec();
    let future = lagoon_wire::Preface { version_min: 9, version_max: 10, ..raw::preface(1) };
    let past = lagoon_wire::Preface { version_min: 1, version_max: 1, ..raw::preface(1) };
    let class = lagoon_wire::Preface { class: 8, ..raw::preface(1) };
    let addr = lagoon_wire::Preface { listen_addr: "nowhere".to_owned(), ..raw::preface(1) };
    let cases = [
        (
            encoded(&future),
            "versions 9 to 10, this process version 3: no common version, this process is older; hint: upgrade",
        ),
        (
            encoded(&past),
            "the peer speaks protocol version 1, this process version 3: no common version, the peer is older",
        ),
        (encoded(&class), "class 8"),
        (encoded(&addr), "nowhere"),
        (encode(&control(1)).unwrap().to_vec(), "class"),
        (vec![0; 64], "not a Lagoon frame"),
    ];
    for (bytes, expected) in cases {
        let connection = raw::connect(bound.node.local_addr(), true).await.unwrap();
        let (mut send, _recv) = connection.open_bi().await.unwrap();
        send.write_all(&bytes).await.unwrap();
        let closed = connection.closed().await.to_string();
        assert!(closed.contains(expected), "{closed}");
        let reason = next_refused(&mut bound).await;
        assert!(reason.contains(expected), "{reason}");
    }
    assert_serves(&mut bound).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_peer_is_found_again_with_a_new_incarnation() {
    let (mut a, b) = (node(), node());
    let addr = b.node.local_addr();
    let to_b = a.node.connect(addr, &[Class::Control]).unwrap();
    let (peer, _, first) = next_up(&mut a.events).await;
    assert_eq!((peer, first), (to_b, b.node.incarnation()));
    drop(b);
    assert_eq!(next_down(&mut a.events).await.0, to_b);
    // Queued while the peer is away; within the queue's deadline it is back.
    a.node.try_send(to_b, &control(7)).unwrap();
    a.node.try_send(to_b, &query(8, 10)).unwrap();
    let mut b = rebind(addr).await;
    let (peer, _, second) = next_up(&mut a.events).await;
    assert_eq!((peer, second), (to_b, b.node.incarnation()));
    assert_ne!(first, second);
    assert_eq!(next_number(&mut b.events).await, 7);
    assert_eq!(Frame::from(next(&mut b.partials).await.frame), query(8, 10));
}

/// The port is free once the dropped node's tasks have ended.
async fn rebind(addr: SocketAddr) -> Bound {
    for _ in 0..200 {
        if let Ok(bound) = Node::bind(addr, &identity(), TransportConfig::default()) {
            return bound;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{addr} stays in use")
}

/// As a killed process: nothing is sent, no packet is answered any more.
#[test]
fn a_peer_that_dies_in_a_transfer_is_noticed_in_time() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (alive, doomed) = (runtime(), runtime());
    let mut b = doomed.block_on(async { node() });
    let addr = b.node.local_addr();
    alive.block_on(async {
        let mut a = node();
        let to_b = a.node.connect(addr, &[Class::Control, Class::Bulk]).unwrap();
        next_up(&mut a.events).await;
        for number in 0..200 {
            a.node.send(to_b, &write(number, 1_000_000), TIMEOUT).await.unwrap();
            if number == 20 {
                break;
            }
        }
        next(&mut b.bulk).await;
        doomed.shutdown_background();
        let killed = std::time::Instant::now();
        let (peer, reason) = next_down(&mut a.events).await;
        assert_eq!(peer, to_b);
        assert!(reason.contains("timed out"), "{reason}");
        // 2.5 s of silence; more on a busy machine.
        assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    });
    drop(b);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_for_an_absent_peer_expire_and_are_reported() {
    let config = TransportConfig {
        connect_deadline: Duration::from_millis(200),
        queue_deadline: Duration::from_millis(500),
        ..TransportConfig::default()
    };
    let mut a = node_at(loopback(), config);
    let nobody = std::net::UdpSocket::bind(loopback()).unwrap();
    let peer = a.node.connect(nobody.local_addr().unwrap(), &[]).unwrap();
    a.node.try_send(peer, &query(1, 10)).unwrap();
    a.node.try_send(peer, &query(2, 10)).unwrap();
    let reason = next_unreachable(&mut a).await;
    assert!(reason.contains("no answer within 200 ms"), "{reason}");
    let Event::Expired { class: Class::Partials, frames: 2, .. } = next(&mut a.events).await else { panic!() };
    let stats = a.node.stats(peer, Class::Partials).unwrap();
    assert_eq!((stats.frames_dropped, stats.frames_sent), (2, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_does_not_connect_to_itself() {
    let mut a = node();
    let peer = a.node.connect(a.node.local_addr(), &[Class::Control]).unwrap();
    a.node.try_send(peer, &control(1)).unwrap();
    let reason = next_unreachable(&mut a).await;
    assert!(reason.contains("back to this node"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unspecified_address_stands_for_the_one_that_is_seen() {
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let (mut a, mut b) = (node_at(any, TransportConfig::default()), node_at(any, TransportConfig::default()));
    let address_of = |bound: &Bound| SocketAddr::from(([127, 0, 0, 1], bound.node.local_addr().port()));
    let (addr_a, addr_b) = (address_of(&a), address_of(&b));
    let to_b = a.node.connect(addr_b, &[Class::Control]).unwrap();
    let (to_a, seen, _) = next_up(&mut b.events).await;
    assert_eq!(seen, addr_a);
    assert_eq!(b.node.connect(addr_a, &[]), Some(to_a));
    b.node.try_send(to_a, &query(1, 10)).unwrap();
    assert_eq!(next_up(&mut a.events).await.0, to_b);
    assert_eq!(next(&mut a.partials).await.peer, to_b);
}

/// A connection of one class is cut: the session ends on both sides as a whole, and the next one works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_frame_in_one_class_ends_the_session_of_all() {
    let mut bound = node();
    let addr = bound.node.local_addr();
    let (control_connection, _send, _recv) = raw::greeted(addr, 1).await;
    next_up(&mut bound.events).await;
    let (_bulk_connection, mut send, _bulk_recv) = raw::greeted(addr, 3).await;
    send.write_all(&[0xaa; 100]).await.unwrap();
    next_down(&mut bound.events).await;
    let closed = control_connection.closed().await.to_string();
    assert!(closed.contains("not a Lagoon frame"), "{closed}");
    // The dialer learns of the end by the generation that the node now answers with; a new session begins.
    let (_connection, mut send, _recv) = raw::greeted(addr, 1).await;
    next_up(&mut bound.events).await;
    send.write_all(&encode(&control(5)).unwrap().to_vec()).await.unwrap();
    assert_eq!(next_number(&mut bound.events).await, 5);
}

/// The remote has ended a session that is still up here (its close was lost): the preface shows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefaces_tell_when_a_session_is_over() {
    let mut bound = node();
    let addr = bound.node.local_addr();
    let of = |class, incarnation, generation| lagoon_wire::Preface { incarnation, generation, ..raw::preface(class) };

    let (first, _send, _recv) = raw::greeted_with(addr, &of(1, 50, 3)).await;
    let (peer, _, _) = next_up(&mut bound.events).await;
    // Another class of the same generation joins the session.
    let (second, _send, _recv) = raw::greeted_with(addr, &of(3, 50, 3)).await;
    // A higher generation begins another one; both old connections go.
    let (third, _send, _recv) = raw::greeted_with(addr, &of(2, 50, 4)).await;
    assert_eq!(next_down(&mut bound.events).await, (peer, "the peer ended the session".to_owned()));
    assert_eq!(next_up(&mut bound.events).await.0, peer);
    for old in [first, second] {
        assert!(old.closed().await.to_string().contains("ended the session"));
    }
    // A lower generation is an attempt of the past.
    let past = raw::connect(addr, true).await.unwrap();
    let (mut send, _recv) = past.open_bi().await.unwrap();
    send.write_all(&encode_preface(&of(1, 50, 3)).unwrap().to_vec()).await.unwrap();
    assert!(past.closed().await.to_string().contains("that session is over"));
    // The same class of the same generation again: the remote cannot know the connection that we have.
    let (_fourth, _send, _recv) = raw::greeted_with(addr, &of(2, 50, 4)).await;
    assert_eq!(next_down(&mut bound.events).await, (peer, "the peer connected anew".to_owned()));
    assert_eq!(next_up(&mut bound.events).await.0, peer);
    assert!(third.closed().await.to_string().contains("connected anew"));
    // Another process at the same address.
    let (_fifth, _send, _recv) = raw::greeted_with(addr, &of(3, 51, 0)).await;
    assert_eq!(next_down(&mut bound.events).await, (peer, "the peer's process was replaced".to_owned()));
    let (same, _, incarnation) = next_up(&mut bound.events).await;
    assert_eq!((same, incarnation), (peer, 51));
    assert!(bound.events.is_empty());
}

/// A connection that contradicts a session is closed at its deadline; the session that it was about to end must not end
/// without an event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_session_ends_without_an_event_while_its_owner_does_not_listen() {
    let deadline = Duration::from_millis(300);
    let config = TransportConfig { inbox_frames_max: 1, connect_deadline: deadline, ..TransportConfig::default() };
    let mut bound = node_at(loopback(), config);
    let addr = bound.node.local_addr();
    // Its `Up` fills the inbox.
    let (first, _send, _recv) = raw::greeted_with(addr, &raw::preface(1)).await;
    let other = raw::connect(addr, true).await.unwrap();
    let (mut send, mut recv) = other.open_bi().await.unwrap();
    let preface = lagoon_wire::Preface { incarnation: 78, ..raw::preface(1) };
    send.write_all(&encode_preface(&preface).unwrap().to_vec()).await.unwrap();
    assert!(!recv.read_chunk(1024, true).await.is_ok_and(|answer| answer.is_some()), "it is closed");
    first.closed().await;
    let (peer, _, incarnation) = next_up(&mut bound.events).await;
    assert_eq!((next_down(&mut bound.events).await.0, incarnation), (peer, 77));
}
