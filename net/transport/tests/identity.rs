//! Whose a session, an address and a name are; certificates that change while nodes run; who is let in to a handshake.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "support/raw.rs"]
mod raw;
#[allow(dead_code, reason = "shared with tests that send frames")]
mod support;

use lagoon_transfer::{Axis, Dim, Layout, LayoutParts, Part, Plane, Writer, WriterConfig};
use lagoon_transport::direct::ExportServer;
use lagoon_transport::{Bound, Class, Event, Identity, Issued, Node, NodeRole, Roles, Subject, TransportConfig};
use lagoon_types::{KvDType, ModelHash};
use std::{fs, net::SocketAddr, path::Path, sync::Arc, time::Duration};
use support::*;

fn bind(identity: &Identity, config: TransportConfig) -> Bound {
    Node::bind(loopback(), identity, config).unwrap()
}

async fn next_refused(bound: &mut Bound) -> String {
    loop {
        if let Event::Refused { reason, .. } = next(&mut bound.events).await {
            return reason;
        }
    }
}

async fn next_subject(bound: &mut Bound) -> Subject {
    loop {
        if let Event::Up { subject, .. } = next(&mut bound.events).await {
            return subject;
        }
    }
}

/// A session of `from` with `to` that carries a message.
async fn meet(from: &Bound, to: &mut Bound, number: u64) {
    let peer = from.node.connect(to.node.local_addr(), &[]).unwrap();
    from.node.try_send(peer, &control(number)).unwrap();
    assert_eq!(next_number(&mut to.events).await, number);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peers_node_and_roles_are_those_of_its_certificate() {
    let mut bound = node();
    let roles: Roles = [NodeRole::Kv, NodeRole::Operator].into_iter().collect();
    let other = bind(&CA.identity("kv-1", roles).unwrap(), TransportConfig::default());
    other.node.connect(bound.node.local_addr(), &[Class::Control]).unwrap();
    let subject = next_subject(&mut bound).await;
    assert_eq!((&*subject.node, subject.roles), ("kv-1", roles));
    assert!(!subject.roles.has(NodeRole::Instance) && subject.roles.has_any(&[NodeRole::Instance, NodeRole::Kv]));
}

/// A stranger with a valid certificate announces the address of a node that is connected, and the process there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_takes_over_a_live_session() {
    let mut bound = node();
    let victim = bind(&identity_of("victim"), TransportConfig::default());
    meet(&victim, &mut bound, 1).await;
    for incarnation in [victim.node.incarnation(), 5] {
        let listen_addr = victim.node.local_addr().to_string();
        let preface = lagoon_wire::Preface { incarnation, generation: 9, listen_addr, ..raw::preface(1) };
        let connection = raw::connect(bound.node.local_addr(), true).await.unwrap();
        let (mut send, _recv) = connection.open_bi().await.unwrap();
        send.write_all(&lagoon_wire::encode_preface(&preface).unwrap().to_vec()).await.unwrap();
        let closed = tokio::time::timeout(TIMEOUT, connection.closed()).await.expect("it is refused").to_string();
        assert!(closed.contains("\"victim\"") && closed.contains("\"raw\""), "{closed}");
        assert!(next_refused(&mut bound).await.contains("\"victim\""));
    }
    // The session goes on.
    meet(&victim, &mut bound, 2).await;
}

/// The name is known by its key while it is connected, and free for another key when it is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nodes_key_is_pinned_while_it_lives() {
    let mut bound = node();
    let first = bind(&identity_of("pinned"), TransportConfig::default());
    meet(&first, &mut bound, 1).await;
    let second = bind(&identity_of("pinned"), TransportConfig::default());
    let peer = second.node.connect(bound.node.local_addr(), &[]).unwrap();
    second.node.try_send(peer, &control(2)).unwrap();
    assert!(next_refused(&mut bound).await.contains("\"pinned\" is connected with another key"));
    first.node.close(Duration::from_secs(5)).await;
    second.node.try_send(peer, &control(3)).unwrap();
    let number = next_number(&mut bound.events).await;
    assert!([2, 3].contains(&number), "the one that waited, or its deadline has passed: {number}");
}

/// An acceptance is dropped while it waits for room to report its session: the name is free again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_never_reported_pins_nothing() {
    let short =
        TransportConfig { inbox_frames_max: 1, connect_deadline: Duration::from_secs(1), ..TransportConfig::default() };
    let mut bound = bind(&identity(), short);
    let addr = bound.node.local_addr();
    let mut first = bind(&identity_of("fills"), TransportConfig::default());
    first.node.connect(addr, &[Class::Control]).unwrap();
    next_up(&mut first.events).await;
    while bound.events.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut early = bind(&identity_of("pinned-2"), TransportConfig::default());
    early.node.connect(addr, &[Class::Control]).unwrap();
    // The acceptor answers the preface before it reports the session, which nobody reads.
    next_down(&mut early.events).await;
    early.node.close(Duration::from_secs(5)).await;
    let late = TransportConfig { queue_deadline: TIMEOUT, ..TransportConfig::default() };
    let late = bind(&identity_of("pinned-2"), late);
    meet(&late, &mut bound, 7).await;
}

/// One certificate announces one address after the other: it has one share of the inbox.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_has_one_share_of_an_inbox_whatever_it_announces() {
    const SHARE: usize = 4;
    let mut bound = bind(&identity(), TransportConfig { inbox_frames_max: 4 * SHARE, ..TransportConfig::default() });
    let (addr, greedy) = (bound.node.local_addr(), identity_of("greedy"));
    let greedy = [(); 4].map(|()| bind(&greedy, TransportConfig::default()));
    for one in &greedy {
        let peer = one.node.connect(addr, &[Class::Partials]).unwrap();
        (0..16).for_each(|number| one.node.try_send(peer, &query(number, 10)).unwrap());
    }
    // Beside what is in the inbox each session holds one frame that it could not deliver.
    let backs = [0, 1, 2, 3].map(|at: usize| bound.node.connect(greedy[at].node.local_addr(), &[]).unwrap());
    let received = || backs.map(|back| bound.node.stats(back, Class::Partials).unwrap().frames_received);
    while received().iter().sum::<u64>() < 8 || received().contains(&0) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let modest = bind(&identity_of("modest"), TransportConfig::default());
    let peer = modest.node.connect(addr, &[]).unwrap();
    modest.node.try_send(peer, &query(99, 10)).unwrap();
    while bound.partials.len() <= SHARE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut of_others = 0;
    for _ in 0..=SHARE {
        of_others += usize::from(!backs.contains(&next(&mut bound.partials).await.peer));
    }
    assert_eq!(of_others, 1, "the inbox was full of one node's frames");
}

/// And its share of the places for peers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_has_so_many_sessions() {
    let mut bound = bind(&identity(), TransportConfig { peers_max: 8, ..TransportConfig::default() });
    let (addr, greedy) = (bound.node.local_addr(), identity_of("greedy-2"));
    let greedy = [(); 3].map(|()| bind(&greedy, TransportConfig::default()));
    for one in &greedy {
        one.node.connect(addr, &[Class::Control]).unwrap();
    }
    let refused = next_refused(&mut bound).await;
    assert!(refused.contains("\"greedy-2\" has 2 sessions"), "{refused}");
    meet(&bind(&identity_of("modest-2"), TransportConfig::default()), &mut bound, 1).await;
}

/// The inboxes of such a node are not read, and block no peer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_for_direct_connections_only_discards_the_rest() {
    const MESSAGES: u64 = 200;
    let config = TransportConfig { inbox_frames_max: 4, window_bytes: 64 << 10, ..TransportConfig::default() };
    let node = bind(&identity(), config).into_node();
    let other = bind(&identity_of("other-3"), TransportConfig::default());
    let peer = other.node.connect(node.local_addr(), &[Class::Control]).unwrap();
    for number in 0..MESSAGES {
        other.node.send(peer, &query(number, 20_000), TIMEOUT).await.unwrap();
        other.node.send(peer, &control(number), TIMEOUT).await.unwrap();
    }
    let back = node.connect(other.node.local_addr(), &[]).unwrap();
    let received = async {
        for class in [Class::Control, Class::Partials] {
            while node.stats(back, class).unwrap().frames_received < MESSAGES {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    tokio::time::timeout(TIMEOUT, received).await.expect("everything is read");
}

#[test]
fn a_certificate_without_names_is_refused_with_a_hint() {
    // As versions before this one issued them: a DNS name, no URI.
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["lagoon".to_owned()]).unwrap();
    let issuer_key = rcgen::KeyPair::from_pem(&CA.key_pem()).unwrap();
    let issuer = rcgen::Issuer::from_ca_cert_pem(CA.cert_pem(), issuer_key).unwrap();
    let pem = params.signed_by(&key, &issuer).unwrap().pem();
    let error = Identity::from_pem(CA.cert_pem(), &pem, &key.serialize_pem()).unwrap_err().to_string();
    assert!(error.contains("names no node and no role") && error.contains("hint:"), "{error}");
    assert!(CA.issue("a node", NodeRole::Kv).is_err() && CA.issue("", NodeRole::Kv).is_err());
}

fn write(dir: &Path, issued: &Issued) {
    fs::write(dir.join("n.key"), &issued.key_pem).unwrap();
    fs::write(dir.join("n.pem"), &issued.cert_pem).unwrap();
}

fn load(dir: &Path, list: bool) -> Identity {
    let crl = dir.join("crl.pem");
    Identity::load(&dir.join("ca.pem"), &dir.join("n.pem"), &dir.join("n.key"), list.then_some(&*crl)).unwrap()
}

/// The file changes: the session goes on, the next handshake is made with the new certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_is_loaded_anew_without_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("ca.pem"), CA.cert_pem()).unwrap();
    let before = CA.issue("reloads", NodeRole::Instance).unwrap();
    write(dir.path(), &before);
    let reloading = bind(&load(dir.path(), false), TransportConfig::default());
    let mut early = bind(&identity_of("early"), TransportConfig::default());
    meet(&reloading, &mut early, 1).await;
    write(dir.path(), &CA.issue_for_key("reloads", NodeRole::Kv, &before.key_pem).unwrap());
    while reloading.node.subject().roles != Roles::from(NodeRole::Kv) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    meet(&reloading, &mut early, 2).await;
    assert!(early.events.is_empty(), "the session goes on");
    let mut late = bind(&identity_of("late"), TransportConfig::default());
    reloading.node.connect(late.node.local_addr(), &[Class::Control]).unwrap();
    let subject = next_subject(&mut late).await;
    assert_eq!((&*subject.node, subject.roles), ("reloads", NodeRole::Kv.into()));
    // What cannot be used changes nothing.
    fs::write(dir.path().join("n.pem"), "nothing").unwrap();
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert_eq!(reloading.node.subject(), subject);
    meet(&reloading, &mut late, 3).await;
}

/// Another key or name on disk is not taken while the process runs: peers that are connected know it by the ones before. The list
/// that comes with them counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_keeps_its_name_and_key_while_it_runs() {
    for other in ["stays", "another"] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca.pem"), CA.cert_pem()).unwrap();
        write(dir.path(), &CA.issue("stays", Roles::all()).unwrap());
        let [unused, stolen] = ["unused-3", "stolen-3"].map(|node| CA.issue(node, Roles::all()).unwrap());
        let list = CA.revoke(None, &unused.cert_pem).unwrap();
        fs::write(dir.path().join("crl.pem"), &list).unwrap();
        let mut keeper = bind(&load(dir.path(), true), TransportConfig::default());
        let before = keeper.node.subject();
        let thief = Identity::from_pem(CA.cert_pem(), &stolen.cert_pem, &stolen.key_pem).unwrap();
        let thief = bind(&thief, TransportConfig::default());
        meet(&thief, &mut keeper, 1).await;
        write(dir.path(), &CA.issue(other, Roles::all()).unwrap());
        fs::write(dir.path().join("crl.pem"), CA.revoke(Some(&list), &stolen.cert_pem).unwrap()).unwrap();
        // That the session ends shows that the files were read.
        let (_, reason) = next_down(&mut keeper.events).await;
        assert!(reason.contains("revoked"), "{reason}");
        assert_eq!(keeper.node.subject(), before, "as {other}");
        // What it shows is what it says.
        let mut late = bind(&identity_of("late-2"), TransportConfig::default());
        keeper.node.connect(late.node.local_addr(), &[Class::Control]).unwrap();
        assert_eq!(next_subject(&mut late).await, before, "as {other}");
    }
}

/// A certificate comes on the list while its holder is connected: its session ends, and it is not let in again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_peer_is_cut_and_stays_out() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("ca.pem"), CA.cert_pem()).unwrap();
    write(dir.path(), &CA.issue("keeper", Roles::all()).unwrap());
    let [stolen, other, unused] = ["stolen", "other", "unused"].map(|node| CA.issue(node, Roles::all()).unwrap());
    let list = CA.revoke(None, &unused.cert_pem).unwrap();
    fs::write(dir.path().join("crl.pem"), &list).unwrap();
    let mut keeper = bind(&load(dir.path(), true), TransportConfig::default());
    let holder = |issued: &Issued| Identity::from_pem(CA.cert_pem(), &issued.cert_pem, &issued.key_pem).unwrap();
    let thief = bind(&holder(&stolen), TransportConfig::default());
    let honest = bind(&holder(&other), TransportConfig::default());
    meet(&thief, &mut keeper, 1).await;
    fs::write(dir.path().join("crl.pem"), CA.revoke(Some(&list), &stolen.cert_pem).unwrap()).unwrap();
    let (_, reason) = next_down(&mut keeper.events).await;
    assert!(reason.contains("revoked"), "{reason}");
    let peer = thief.node.connect(keeper.node.local_addr(), &[Class::Control]).unwrap();
    drop(thief.node.try_send(peer, &control(2)));
    let reason = next_refused(&mut keeper).await;
    assert!(reason.to_lowercase().contains("revoked"), "{reason}");
    meet(&honest, &mut keeper, 3).await;
}

fn exports() -> Arc<ExportServer> {
    let axes = vec![
        Axis { dim: Dim::Block, size: 1, stride: 8 },
        Axis { dim: Dim::Token, size: 1, stride: 8 },
        Axis { dim: Dim::Kv, size: 2, stride: 4 },
        Axis { dim: Dim::Head, size: 1, stride: 4 },
        Axis { dim: Dim::Elem, size: 4, stride: 1 },
    ];
    let plane = Plane { region: 0, base: 0, axes, dtype: KvDType::BF16, first_layer: 0, part: Part::Both };
    let layout = Layout::new(LayoutParts {
        model: ModelHash([3; 32]),
        block_tokens: 1,
        blocks: 1,
        layers: 0..1,
        heads: 0..1,
        head_dim: 4,
        region_bytes: vec![16],
        planes: vec![plane],
    });
    ExportServer::new(Writer::new(layout.unwrap(), WriterConfig::default()), Vec::new(), || 0)
}

/// The list comes while a peer is between its handshake and its preface, and while a direct connection stands, which belongs to
/// no session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_peer_is_cut_half_way_and_on_direct_connections() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("ca.pem"), CA.cert_pem()).unwrap();
    write(dir.path(), &CA.issue("keeper-2", Roles::all()).unwrap());
    let unused = CA.issue("unused-2", Roles::all()).unwrap();
    let list = CA.revoke(None, &unused.cert_pem).unwrap();
    fs::write(dir.path().join("crl.pem"), &list).unwrap();
    let patient = TransportConfig { connect_deadline: 3 * TIMEOUT, ..TransportConfig::default() };
    let keeper = bind(&load(dir.path(), true), patient);
    keeper.node.serve_direct(Some(exports()));
    let addr = keeper.node.local_addr();
    let (direct, _send, _recv) = raw::greeted(addr, u32::from(lagoon_wire::DIRECT_CODE)).await;
    let halves = [raw::connect(addr, true).await.unwrap(), raw::connect(addr, true).await.unwrap()];
    fs::write(dir.path().join("crl.pem"), CA.revoke(Some(&list), &raw::ISSUED.cert_pem).unwrap()).unwrap();
    let closed = tokio::time::timeout(TIMEOUT, direct.closed()).await.expect("it is cut").to_string();
    assert!(closed.contains("revoked"), "{closed}");
    // The list is loaded by now.
    for (half, class) in halves.iter().zip([1, u32::from(lagoon_wire::DIRECT_CODE)]) {
        let (mut send, _recv) = half.open_bi().await.unwrap();
        send.write_all(&lagoon_wire::encode_preface(&raw::preface(class)).unwrap().to_vec()).await.unwrap();
        let closed = tokio::time::timeout(TIMEOUT, half.closed()).await.expect("it is refused").to_string();
        assert!(closed.contains("\"raw\" is revoked"), "class {class}: {closed}");
    }
}

/// Under load an address must show that it receives what is sent to it. Peers do that by themselves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_are_validated_under_load() {
    let config = TransportConfig { handshakes_unproven_max: 0, ..TransportConfig::default() };
    let mut loaded = bind(&identity(), config);
    let other = bind(&identity_of("other-1"), TransportConfig::default());
    meet(&other, &mut loaded, 1).await;
    let incoming = loaded.node.incoming();
    assert!(incoming.retried > 0 && incoming.turned_away == 0, "{incoming:?}");
}

/// One address that opens handshakes and never goes on has so many places, and leaves the others' free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_has_so_many_handshakes_and_connections() {
    const MOST: usize = 4;
    let config = TransportConfig { handshakes_address_max: MOST, ..TransportConfig::default() };
    let mut bound = bind(&identity(), config.clone());
    let addr: SocketAddr = bound.node.local_addr();
    let mut held = Vec::new();
    for _ in 0..MOST {
        held.push(raw::connect(addr, true).await.unwrap());
    }
    let error = raw::connect(addr, true).await.unwrap_err().to_string();
    assert!(error.contains("refused"), "{error}");
    assert_eq!(bound.node.incoming().turned_away, 1);
    // Places are free again when the handshakes end: here by a timeout.
    drop(held);
    let other = bind(&identity_of("other-2"), TransportConfig::default());
    meet(&other, &mut bound, 1).await;

    let config = TransportConfig { connections_address_max: 2, ..config };
    let bound = bind(&identity(), config);
    let addr = bound.node.local_addr();
    let first = raw::greeted(addr, 1).await;
    let second = raw::greeted(addr, 2).await;
    let error = raw::connect(addr, true).await.unwrap_err().to_string();
    assert!(error.contains("refused"), "{error}");
    drop((first, second));
    while raw::connect(addr, true).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
