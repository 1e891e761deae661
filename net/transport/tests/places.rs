//! Addresses that are announced: whose they are, and for how long.
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "shared with tests that send frames")]
mod support;

use lagoon_transport::{Bound, Class, Event, Identity, Node, NodeRole, TransportConfig};
use std::{net::SocketAddr, time::Duration};
use support::*;

fn bind(identity: &Identity, advertise: Option<SocketAddr>) -> Bound {
    Node::bind(loopback(), identity, TransportConfig { advertise, ..TransportConfig::default() }).unwrap()
}

/// A node at an address that another one had until now: its socket may need a moment to close.
async fn bind_at(addr: SocketAddr, identity: &Identity) -> Bound {
    let bound = async {
        loop {
            match Node::bind(addr, identity, TransportConfig::default()) {
                Ok(bound) => return bound,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(TIMEOUT, bound).await.expect("the address is free")
}

fn instance(name: &str) -> Identity {
    CA.identity(name, NodeRole::Instance).unwrap()
}

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

/// An instance answers at the gManager's address, or connects and announces it, while the gManager is away. Neither holds the
/// place, and the gManager gets it when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_place_of_a_role_is_for_certificates_of_that_role() {
    let mut bound = node();
    let impostor = bind(&instance("impostor"), None);
    let place = impostor.node.local_addr();
    bound.node.connect_role(place, &[Class::Control], NodeRole::GManager).unwrap();
    let reason = next_unreachable(&mut bound).await;
    assert!(reason.contains("\"impostor\"") && reason.contains("a gmanager is expected"), "{reason}");
    impostor.node.close(Duration::from_secs(5)).await;
    drop(impostor);

    let announcer = bind(&instance("announcer"), Some(place));
    announcer.node.connect(bound.node.local_addr(), &[Class::Control]).unwrap();
    while !next_refused(&mut bound).await.contains("a gmanager is expected") {}
    // It goes on announcing that address.
    let mut true_one = bind_at(place, &CA.identity("gm", NodeRole::GManager).unwrap()).await;
    let (_, addr, _) = next_up(&mut bound.events).await;
    assert_eq!(addr, place);
    next_up(&mut true_one.events).await;
}

/// The gManager advertises another address than the one at which it is dialed, and somebody else has announced that one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_announced_address_keeps_no_gmanager_away() {
    let mut bound = node();
    let advertised = SocketAddr::from(([127, 0, 0, 1], 9));
    let announcer = bind(&instance("announcer-2"), Some(advertised));
    announcer.node.connect(bound.node.local_addr(), &[Class::Control]).unwrap();
    assert_eq!(next_up(&mut bound.events).await.1, advertised);
    let gmanager = bind(&CA.identity("gm-2", NodeRole::GManager).unwrap(), Some(advertised));
    let addr = gmanager.node.local_addr();
    bound.node.connect_role(addr, &[Class::Control], NodeRole::GManager).unwrap();
    assert_eq!(next_up(&mut bound.events).await.1, addr);
}

/// A peer that is dialed announces another node's address. That one is kept away while the session lasts, and no longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_was_announced_is_free_when_the_session_is_over() {
    let mut bound = node();
    let identity = instance("victim");
    let victim = bind(&identity, None);
    let place = victim.node.local_addr();
    let squatter = bind(&instance("squatter"), Some(place));
    let reached = bound.node.connect(squatter.node.local_addr(), &[Class::Control]).unwrap();
    next_up(&mut bound.events).await;
    // The session is reported before its first connection is adopted.
    let adopted = async {
        while !bound.node.is_reached(reached, squatter.node.local_addr()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, adopted).await.expect("it was dialed there");
    assert_eq!(bound.node.connect(place, &[]).unwrap(), reached, "it announces the address");
    assert!(!bound.node.is_reached(reached, place), "and was not reached there");
    let peer = victim.node.connect(bound.node.local_addr(), &[]).unwrap();
    victim.node.try_send(peer, &control(1)).unwrap();
    let refused = next_refused(&mut bound).await;
    assert!(refused.contains("\"squatter\", which is connected"), "{refused}");
    squatter.node.close(Duration::from_secs(5)).await;
    drop(squatter);
    next_down(&mut bound.events).await;
    victim.node.try_send(peer, &control(2)).unwrap();
    let number = next_number(&mut bound.events).await;
    assert!([1, 2].contains(&number), "{number}");
    // Frames to that address arrive at the node that accepts there, in later sessions, too.
    victim.node.close(Duration::from_secs(5)).await;
    drop(victim);
    next_down(&mut bound.events).await;
    let mut victim = bind_at(place, &identity).await;
    let back = bound.node.connect(place, &[]).unwrap();
    bound.node.try_send(back, &control(3)).unwrap();
    assert_eq!(next_number(&mut victim.events).await, 3);
}

/// An instance answers at the gManager's address and announces a third node's: that one keeps its address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_not_let_in_takes_no_address() {
    let mut bound = node();
    let mut third = bind(&instance("third"), None);
    let address = third.node.local_addr();
    let impostor = bind(&instance("impostor-2"), Some(address));
    bound.node.connect_role(impostor.node.local_addr(), &[Class::Control], NodeRole::GManager).unwrap();
    let reason = next_unreachable(&mut bound).await;
    assert!(reason.contains("\"impostor-2\""), "{reason}");
    let peer = bound.node.connect(address, &[]).unwrap();
    bound.node.try_send(peer, &control(5)).unwrap();
    assert_eq!(next_number(&mut third.events).await, 5);
}

/// An instance that is connected has announced an address that turns out to be a gManager's: it is another peer, and the
/// gManager is dialed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gmanager_is_dialed_at_the_address_that_an_instance_reported() {
    let mut bound = node();
    let gmanager = bind(&CA.identity("gm-3", NodeRole::GManager).unwrap(), None);
    let addr = gmanager.node.local_addr();
    let announcer = bind(&instance("announcer-3"), Some(addr));
    announcer.node.connect(bound.node.local_addr(), &[Class::Control]).unwrap();
    let first = next_up(&mut bound.events).await;
    let leader = bound.node.connect_role(addr, &[Class::Control], NodeRole::GManager).unwrap();
    let (peer, at, _) = next_up(&mut bound.events).await;
    assert!(peer == leader && peer != first.0 && at == addr, "{peer} at {at}");
}
