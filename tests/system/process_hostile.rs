//! Peers with valid certificates against a pool of real processes: some pose as its gManager, one floods an instance.

use crate::process_cluster::{TWO, certificates, equals_single, new_ca, wait_for_pool};
use crate::process_keys::wait;
use crate::process_up::golden_prompt;
use bytes::Bytes;
use lagoon_protocol as p;
use lagoon_protocol::{ControlBody as C, PartialsFrame, Route, StepTicket, TicketSeq, VERSION_MAX};
use lagoon_tests::process::{Server, TIMEOUT, run, token_ids};
use lagoon_transport::{Bound, Class, Event, Frame, Identity, Node, PeerId, SendError, TransportConfig};
use lagoon_types::{DType, Epoch, LeaseId, LeaseRun, SeqId, StepId, limits::STEP_ROWS_MAX};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// The identity that the flags name.
fn identity([ca, cert, key]: &[String; 3]) -> Identity {
    let file = |flag: &String| flag.split_once('=').unwrap().1.to_owned();
    Identity::load(Path::new(&file(ca)), Path::new(&file(cert)), Path::new(&file(key)), None).unwrap()
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// What a false gManager answers to registrations.
#[derive(Clone)]
enum Says {
    /// That this one leads.
    Leader(String),
    /// An order to drain and stop, a welcome in this term, and the order again.
    Leads(u64),
}

#[derive(Default)]
struct Seen {
    sessions: BTreeSet<PeerId>,
    /// Sessions that began, and attempts of its own that failed with these reasons.
    begun: usize,
    failed: Vec<String>,
    /// Names of those that asked to be registered, each time.
    registered: Vec<String>,
}

/// A peer that answers as a gManager would.
struct Impostor {
    node: Node,
    says: Arc<Mutex<Says>>,
    seen: Arc<Mutex<Seen>>,
    runtime: Runtime,
}

fn drain() -> C {
    C::DrainOrder(p::DrainOrder { on: true, stop: true })
}

fn welcome(term: u64) -> C {
    C::Registered(p::Registered { version: VERSION_MAX, instance: 7, heartbeat_ms: 500, term })
}

impl Impostor {
    fn new(addr: &str, identity: &Identity, says: Says) -> Self {
        let runtime = runtime();
        let (says, seen) = (Arc::new(Mutex::new(says)), Arc::new(Mutex::new(Seen::default())));
        let entered = runtime.enter();
        let bound = Node::bind(addr.parse().unwrap(), identity, TransportConfig::default()).unwrap();
        drop(entered);
        let (node, mut events) = (bound.node, bound.events);
        let (own, reported, received) = (node.clone(), Arc::clone(&says), Arc::clone(&seen));
        runtime.spawn(async move {
            while let Some(event) = events.recv().await {
                let mut seen = received.lock().unwrap();
                match event {
                    Event::Up { peer, .. } => {
                        seen.begun += 1;
                        seen.sessions.insert(peer);
                    }
                    Event::Down { peer, .. } => drop(seen.sessions.remove(&peer)),
                    Event::Unreachable { reason, .. } => seen.failed.push(reason),
                    Event::Control { peer, message, .. } => {
                        let Some(C::Register(register)) = message.body else { continue };
                        seen.registered.push(register.name);
                        drop(seen);
                        let answers = match reported.lock().unwrap().clone() {
                            Says::Leader(leader_addr) => vec![C::NotLeader(p::NotLeader { leader_addr })],
                            Says::Leads(term) => vec![drain(), welcome(term), drain()],
                        };
                        for answer in answers {
                            let _ = own.try_send(peer, &Frame::Control(answer.into()));
                        }
                    }
                    _ => {}
                }
            }
        });
        Self { node, says, seen, runtime }
    }

    fn says(&self, says: Says) {
        *self.says.lock().unwrap() = says;
        self.seen.lock().unwrap().registered.clear();
    }

    /// Sends this to everyone who is connected; to how many.
    fn emits(&self, body: &C) -> usize {
        let sessions = self.seen.lock().unwrap().sessions.clone();
        let sent = |peer: &&PeerId| self.node.try_send(**peer, &Frame::Control(body.clone().into())).is_ok();
        sessions.iter().filter(sent).count()
    }

    /// Waits until each of `names` has asked for a place so many times.
    fn wait_for_registrations(&self, names: &[&str], times: usize) {
        wait(|| {
            let seen = self.seen.lock().unwrap();
            names.iter().all(|name| seen.registered.iter().filter(|of| of == name).count() >= times)
        });
    }

    /// Ends it, and frees its address.
    fn end(self) {
        self.runtime.block_on(self.node.close(Duration::from_secs(5)));
        drop(self.node);
        self.runtime.shutdown_timeout(TIMEOUT);
    }
}

fn start_gmanager(ca: &TempDir, listen: &str) -> Server {
    let [a, b, c] = certificates(ca, "gm");
    Server::start(&["gmanager", &format!("--listen={listen}"), &a, &b, &c])
}

fn serve(ca: &TempDir, gmanagers: &str, name: &str, model: &str, kv_tokens: &str) -> Server {
    let [a, b, c] = certificates(ca, name);
    let own = ["serve", model, "--gmanager", gmanagers, &a, &b, &c, "--name", name, "--backend=cpu", "--threads=1"];
    let own = [&own[..], &["--kv-tokens", kv_tokens]].concat();
    let sizes = ["--http=127.0.0.1:0", "--block-tokens=8", "--expose-logits", "--calibrate=off"];
    Server::start(&[&own[..], &sizes[..]].concat())
}

fn term(ca: &TempDir, gmanager: &str) -> u64 {
    let [a, b, c] = certificates(ca, "looker");
    let ended = run(&["status", "--json", "--gmanager", gmanager, &a, &b, &c]);
    let status: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    status["gmanager"]["term"].as_u64().unwrap()
}

fn is_untouched(instances: &[Server; 2], registered: bool) {
    for instance in instances {
        let status = instance.client().get("/lagoon/status").json();
        let fields = [&status["registered"], &status["draining"], &status["fences"]];
        assert_eq!(fields, [&json!(registered), &json!(false), &json!(0)], "{status}");
    }
}

/// One impostor has a gManager's certificate and an earlier term, or the same one beside the gManager that leads; another has an
/// instance's certificate, and the gManager's address while that is away. No instance follows them, and requests continue.
#[test]
fn nobody_else_is_followed_as_the_gmanager() {
    let ca = new_ca();
    let (model, prompt) = golden_prompt();
    let gmanager = start_gmanager(&ca, "127.0.0.1:0");
    let place = gmanager.announced("quic");
    let rival = Impostor::new("127.0.0.1:0", &identity(&certificates(&ca, "gm-rival")), Says::Leader(place.clone()));
    let both = format!("{place},{}", rival.node.local_addr());
    let instances = ["one", "two"].map(|name| serve(&ca, &both, name, &model, "64"));
    let clients = instances.each_ref().map(Server::client);
    clients.iter().for_each(|client| wait_for_pool(client, TWO));
    let term = term(&ca, &place);

    // Beside the one that leads. That nothing of it was followed shows later: the session is the same.
    let ack = |term| C::HeartbeatAck(p::HeartbeatAck { known: true, fenced: true, term, ..p::HeartbeatAck::default() });
    for body in [ack(term), ack(term + 1), drain(), C::Rejected(p::Rejected { reason: "leave".to_owned() })] {
        wait(|| rival.emits(&body) == 2);
    }
    equals_single(&clients[0], &model, &prompt);

    // Alone, in an earlier term: they ask it, and look further.
    rival.says(Says::Leads(term - 1));
    gmanager.kill();
    rival.wait_for_registrations(&["one", "two"], 2);
    is_untouched(&instances, false);

    // At the gManager's own address, and from it.
    let impostor = Impostor::new(&place, &identity(&certificates(&ca, "three")), Says::Leads(term + 1_000_000_000));
    for instance in &instances {
        impostor.node.connect(instance.announced("quic").parse().unwrap(), &[Class::Control]).unwrap();
    }
    wait(|| {
        let seen = impostor.seen.lock().unwrap();
        seen.begun >= 2 && seen.failed.iter().filter(|reason| reason.contains("a gmanager is expected")).count() >= 2
    });
    assert_eq!(token_ids(&clients[1].complete(&prompt[..40], 8, &json!({})).json()).len(), 8);
    is_untouched(&instances, false);
    assert!(impostor.seen.lock().unwrap().registered.is_empty(), "somebody asked it for a place");
    impostor.end();

    rival.says(Says::Leader(place.clone()));
    let _gmanager = start_gmanager(&ca, &place);
    clients.iter().for_each(|client| wait_for_pool(client, TWO));
    equals_single(&clients[1], &model, &prompt);
    is_untouched(&instances, true);
}

/// A node that talks to one instance as an instance would.
struct Stranger {
    bound: Bound,
    peer: PeerId,
    runtime: Runtime,
}

impl Stranger {
    /// Connects, and waits for the instance's Hello.
    fn new(identity: &Identity, to: SocketAddr) -> (Self, p::Hello) {
        let runtime = runtime();
        let entered = runtime.enter();
        let bound = Node::bind(SocketAddr::from(([127, 0, 0, 1], 0)), identity, TransportConfig::default()).unwrap();
        drop(entered);
        let peer = bound.node.connect(to, &[Class::Control, Class::Partials]).unwrap();
        let mut stranger = Self { bound, peer, runtime };
        let hello = stranger.until(|event| match event {
            Event::Control { message, .. } => match message.body {
                Some(C::Hello(hello)) => Some(*hello),
                _ => None,
            },
            _ => None,
        });
        (stranger, hello)
    }

    fn until<T>(&mut self, wanted: impl Fn(Event) -> Option<T>) -> T {
        let events = &mut self.bound.events;
        let found = async {
            loop {
                if let Some(found) = wanted(events.recv().await.unwrap()) {
                    return found;
                }
            }
        };
        self.runtime.block_on(async { tokio::time::timeout(TIMEOUT, found).await.unwrap() })
    }

    fn say(&self, body: C) {
        self.bound.node.try_send(self.peer, &Frame::Control(body.into())).unwrap();
    }

    fn asks_for_a_block(&self, request: u64) {
        let request = p::LeaseRequest { request, seq: 3, blocks: 1, blocks_min: 1, ..p::LeaseRequest::default() };
        self.say(C::LeaseRequest(request));
    }

    /// The first answer to any such request.
    fn granted(&mut self) -> p::LeaseGrant {
        self.until(|event| match event {
            Event::Down { reason, .. } => panic!("{reason}"),
            Event::Control { message, .. } => match message.body {
                Some(C::LeaseGrant(grant)) => Some(grant),
                Some(C::LeaseRefuse(refusal)) => panic!("{refusal:?}"),
                _ => None,
            },
            _ => None,
        })
    }
}

/// An instance's number is its node's while that node is connected: a Hello of another node with the number is dropped, so that no
/// lease is granted in its name. A number without a connected node is accepted.
#[test]
fn nobody_else_takes_an_instances_number() {
    let ca = new_ca();
    let (model, prompt) = golden_prompt();
    let gmanager = start_gmanager(&ca, "127.0.0.1:0");
    let instances = ["one", "two"].map(|name| serve(&ca, &gmanager.announced("quic"), name, &model, "96"));
    let clients = instances.each_ref().map(Server::client);
    clients.iter().for_each(|client| wait_for_pool(client, TWO_LARGER));
    equals_single(&clients[0], &model, &prompt);
    let two: SocketAddr = instances[1].announced("quic").parse().unwrap();
    let status = clients[0].get("/lagoon/status").json();
    let number = u32::try_from(status["instance"].as_u64().unwrap()).unwrap();

    let (mut thief, hello) = Stranger::new(&identity(&certificates(&ca, "three")), two);
    for (request, instance) in [(1, number), (2, number + 70)] {
        thief.say(C::Hello(Box::new(p::Hello { instance, ..hello.clone() })));
        thief.asks_for_a_block(request);
    }
    assert_eq!(thief.granted().request, 2, "the first one is not even answered");
    drop(thief);

    clients.iter().for_each(|client| wait_for_pool(client, TWO_LARGER));
    equals_single(&clients[0], &model, &prompt);
    is_untouched(&instances, true);
}

/// As `TWO`, of instances of 12 rBlocks.
const TWO_LARGER: u64 = 12 + 11;

/// What a flooder has done.
#[derive(Default)]
struct Flood {
    over: AtomicBool,
    /// Frames that its transport took, bytes of them, and times that it had to wait.
    frames: AtomicU64,
    bytes: AtomicU64,
    waits: AtomicU64,
    /// Steps that the instance refused, and sessions that ended.
    refused: AtomicU64,
    ended: AtomicU64,
    connections: AtomicU64,
}

/// Rows of one step, all of which wait for the same token, and queries that are sent of it.
const ROWS: usize = STEP_ROWS_MAX;
const QUERIES: u64 = 16;
const FLOOD_BYTES: u64 = 1 << 30;
const FLOOD_FRAMES: u64 = 20_000;
const FLOOD_CONNECTIONS: u64 = 100;

impl Flood {
    /// Sends frames for as long as the flood lasts.
    fn send(&self, node: &Node, peer: PeerId, frames: impl Fn(u64) -> Frame, bytes: usize) {
        let mut number = 0;
        while !self.over.load(Relaxed) {
            match node.try_send(peer, &frames(number)) {
                Ok(()) => {
                    number += 1;
                    self.frames.fetch_add(1, Relaxed);
                    self.bytes.fetch_add(bytes as u64, Relaxed);
                }
                Err(SendError::Full) => {
                    self.waits.fetch_add(1, Relaxed);
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Receives the replies.
    fn receive(&self, stranger: &mut Stranger) {
        let Stranger { bound: Bound { events, partials, .. }, runtime, .. } = stranger;
        while !self.over.load(Relaxed) {
            let received = async {
                tokio::select! {
                    Some(event) = events.recv() => if matches!(event, Event::Down { .. }) {
                        self.ended.fetch_add(1, Relaxed);
                    },
                    Some(inbound) = partials.recv() => if matches!(inbound.frame, PartialsFrame::Refused { .. }) {
                        self.refused.fetch_add(1, Relaxed);
                    },
                }
            };
            let _ = runtime.block_on(async { tokio::time::timeout(Duration::from_millis(100), received).await });
        }
    }

    /// Connects again and again, each time as another process.
    fn connect(&self, identity: &Identity, addr: SocketAddr) {
        let runtime = runtime();
        while !self.over.load(Relaxed) {
            runtime.block_on(async {
                let local = SocketAddr::from(([127, 0, 0, 2], 0));
                let mut bound = Node::bind(local, identity, TransportConfig::default()).unwrap();
                bound.node.connect(addr, &[Class::Control]).unwrap();
                let up = async { while !matches!(bound.events.recv().await, Some(Event::Up { .. }) | None) {} };
                // One that is turned away is dropped, as others are.
                if tokio::time::timeout(Duration::from_secs(2), up).await.is_ok() {
                    self.connections.fetch_add(1, Relaxed);
                }
            });
        }
    }

    fn is_enough(&self) -> bool {
        let done = |count: &AtomicU64, wanted| count.load(Relaxed) >= wanted;
        done(&self.bytes, FLOOD_BYTES) && done(&self.frames, FLOOD_FRAMES) && done(&self.connections, FLOOD_CONNECTIONS)
    }
}

/// Ends a flood, also when the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Largest resident memory of a process so far, in MiB.
fn peak_mib(pid: u64) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// Memory that one node's frames may take: a quarter of each of three inboxes (64 MiB), its steps (256 MiB) and unread bytes in QUIC
/// (at most 32 MiB for each connection); and the process itself. The test sends more.
const PEAK_MIB_MAX: u64 = 3 * 64 + 256 + 3 * 32 + 100;
const _: () = assert!(PEAK_MIB_MAX << 20 < FLOOD_BYTES);

/// A node with an instance's certificate borrows an rBlock and sends all that it can: queries of steps that wait for a token that
/// never comes, and renewals; and it connects as often as it can. Requests that use the flooded instance's memory go on, and its own as
/// well.
#[test]
fn a_flood_of_one_peer_stops_nobody_else() {
    let ca = new_ca();
    let (model, prompt) = golden_prompt();
    let gmanager = start_gmanager(&ca, "127.0.0.1:0");
    let instances = ["one", "two"].map(|name| serve(&ca, &gmanager.announced("quic"), name, &model, "96"));
    let clients = instances.each_ref().map(Server::client);
    clients.iter().for_each(|client| wait_for_pool(client, TWO_LARGER));
    let three = identity(&certificates(&ca, "three"));
    let victim: SocketAddr = instances[1].announced("quic").parse().unwrap();
    let (mut stranger, hello) = Stranger::new(&three, victim);
    let shape = hello.shape.clone().unwrap();
    stranger.say(C::Hello(Box::new(p::Hello { instance: 77, ..hello })));
    stranger.asks_for_a_block(1);
    let grant = stranger.granted();
    let run = LeaseRun { lease: LeaseId(grant.lease), epoch: Epoch(grant.epoch), offset: 0, len: 1, first_pos: 0 };
    let renewal: Frame = C::LeaseRenew(p::LeaseRenew { leases: vec![grant.lease; 200], seq: 3 }).into();
    let bytes = ROWS * (shape.heads * shape.head_dim) as usize * DType::F32.size();
    let queries = Bytes::from(vec![1; bytes]);
    let rows = u32::try_from(ROWS).unwrap();
    // Each ticket is followed by queries of it.
    let steps = |number: u64| -> Frame {
        let step = StepId(number / (QUERIES + 1));
        if !number.is_multiple_of(QUERIES + 1) {
            return PartialsFrame::Query { step, layer: 0, rows, queries: queries.clone() }.into();
        }
        let seqs = vec![TicketSeq { seq: SeqId(3), rows, pos0: 1, runs: vec![run] }];
        PartialsFrame::Ticket(StepTicket { step, deadline_ms: u32::MAX, dtype: DType::F32, route: Route::Direct, seqs })
            .into()
    };
    let flood = Flood::default();
    let (node, peer) = (stranger.bound.node.clone(), stranger.peer);
    std::thread::scope(|scope| {
        scope.spawn(|| flood.send(&node, peer, |_| renewal.clone(), 0));
        scope.spawn(|| flood.send(&node, peer, steps, bytes));
        scope.spawn(|| flood.receive(&mut stranger));
        scope.spawn(|| flood.connect(&three, victim));
        let _end = End(&flood.over);
        wait(|| flood.connections.load(Relaxed) > 0 && flood.refused.load(Relaxed) > 0);
        // One borrows at the flooded instance, which borrows as well.
        for client in clients.iter().chain(&clients) {
            equals_single(client, &model, &prompt);
        }
        wait(|| flood.is_enough());
        equals_single(&clients[0], &model, &prompt);
    });
    let (frames, refused) = (flood.frames.load(Relaxed), flood.refused.load(Relaxed));
    let (peak, connections) = (peak_mib(instances[1].pid()), flood.connections.load(Relaxed));
    println!("{frames} frames, {refused} steps refused, {connections} connections, {peak} MiB at most");
    assert_eq!(flood.ended.load(Relaxed), 0, "the flood ended a session");
    assert!(peak < PEAK_MIB_MAX, "{peak} MiB");
    is_untouched(&instances, true);
}
