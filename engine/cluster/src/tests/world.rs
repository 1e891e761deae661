//! The network and the course of events.
//!
//! Two nodes have one connection at a time. Control and data are separate ordered streams of it, each direction for
//! itself; nothing is ordered between streams or connections. A broken connection loses everything in flight, both
//! ends learn of it at different times, and whatever an end sends before it knows is lost. A restarted node is another
//! process: another incarnation, nothing remembered, and (by chance) its old number or a new one. Messages to and from
//! the gManager are delayed without order and, with faults, lost.

use super::node::{BLOCK_TOKENS, BLOCKS, Data, Node, SHAPE, TTL_MS};
use crate::{GManager, GManagerConfig, GManagerOutput, Output};
use lagoon_protocol::{ControlBody, PoolShape, Register, Role, VERSION_MAX, VERSION_MIN};
use lagoon_types::{InstanceId, LeaseId, limits};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug)]
enum Event {
    Peer {
        from: usize,
        to: usize,
        generation: u64,
        body: Body,
    },
    /// `node` learns that its connection to `peer` is gone.
    Down {
        node: usize,
        life: u64,
        peer: usize,
    },
    /// `node` could not connect to an instance.
    Unreachable {
        node: usize,
        life: u64,
        instance: InstanceId,
    },
    ToGManager {
        node: usize,
        life: u64,
        body: ControlBody,
    },
    FromGManager {
        node: usize,
        life: u64,
        body: ControlBody,
    },
}

#[derive(Clone, Debug)]
enum Body {
    Control(ControlBody),
    Data(Data),
}

/// The connection of two nodes; index 0 is the lower node's end.
#[derive(Debug, Default)]
struct Link {
    generation: u64,
    /// The generation that each end believes in.
    view: [u64; 2],
    /// The generation in which each end was introduced to the other, plus one.
    greeted: [u64; 2],
    /// The number under which each end knows the other.
    known: [Option<InstanceId>; 2],
    /// When the last message of each direction and stream arrives.
    arrives_ms: [[u64; 2]; 2],
    cut_until_ms: u64,
}

pub(super) struct World {
    pub(super) now_ms: u64,
    pub(super) rng: ChaCha8Rng,
    pub(super) nodes: Vec<Node>,
    pub(super) gmanager: GManager,
    gmanagers: u32,
    gmanager_back_ms: u64,
    /// Until when each node and the gManager do not reach each other.
    gmanager_cut_ms: Vec<u64>,
    /// What some gManager declared dead: instance and incarnation.
    pub(super) fenced: BTreeSet<(InstanceId, u64)>,
    faults: bool,
    events: BTreeMap<(u64, u64), Event>,
    scheduled: u64,
    links: BTreeMap<(usize, usize), Link>,
    /// Leases whose creditor process is gone.
    pub(super) dead_leases: BTreeSet<LeaseId>,
    /// What happened, for the runs to see that they tested something.
    pub(super) seen: BTreeMap<&'static str, u32>,
}

fn address(node: usize) -> String {
    format!("10.0.0.{}:7000", node + 1)
}

impl World {
    pub(super) fn new(seed: u64, nodes: usize, faults: bool) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let nodes: Vec<Node> = (0..nodes).map(|_| Node::new(rng.random())).collect();
        Self {
            gmanager_cut_ms: vec![0; nodes.len()],
            fenced: BTreeSet::new(),
            now_ms: 1,
            rng,
            nodes,
            gmanager: GManager::default(),
            gmanagers: 1,
            gmanager_back_ms: 0,
            faults,
            events: BTreeMap::new(),
            scheduled: 0,
            links: BTreeMap::new(),
            dead_leases: BTreeSet::new(),
            seen: BTreeMap::new(),
        }
    }

    pub(super) fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    pub(super) fn node_of(&self, instance: InstanceId) -> Option<usize> {
        self.nodes.iter().position(|n| n.instance == Some(instance))
    }

    fn schedule(&mut self, at_ms: u64, event: Event) {
        self.scheduled += 1;
        self.events.insert((at_ms, self.scheduled), event);
    }

    /// Mostly short, at times longer than anybody waits.
    fn delay_ms(&mut self) -> u64 {
        match self.rng.random_range(0..200) {
            0 => self.rng.random_range(500..3_000),
            1..20 => self.rng.random_range(20..200),
            _ => self.rng.random_range(1..8),
        }
    }

    fn link(&mut self, a: usize, b: usize) -> &mut Link {
        self.links.entry((a.min(b), a.max(b))).or_default()
    }

    fn send(&mut self, from: usize, instance: InstanceId, body: Body) {
        let (life, now_ms) = (self.nodes[from].incarnation, self.now_ms);
        let delay_ms = self.delay_ms();
        let to = self.node_of(instance).filter(|to| *to != from);
        let Some(to) = to.filter(|to| self.link(from, *to).cut_until_ms <= now_ms) else {
            return self.schedule(now_ms + delay_ms, Event::Unreachable { node: from, life, instance });
        };
        let end = usize::from(from > to);
        let link = self.link(from, to);
        link.known[end] = Some(instance);
        let generation = link.view[end];
        if generation != link.generation {
            return;
        }
        let arrives_ms = &mut link.arrives_ms[end][usize::from(matches!(body, Body::Data(_)))];
        *arrives_ms = (*arrives_ms).max(now_ms + delay_ms);
        let at_ms = *arrives_ms;
        self.schedule(at_ms, Event::Peer { from, to, generation, body });
    }

    fn send_data(&mut self, from: usize, sends: Vec<(InstanceId, Data)>) {
        for (to, data) in sends {
            self.send(from, to, Body::Data(data));
        }
    }

    fn send_gmanager(&mut self, node: usize, body: ControlBody) {
        if self.gmanager_cut_ms[node] > self.now_ms || self.faults && self.rng.random_ratio(1, 40) {
            return;
        }
        let (life, at_ms) = (self.nodes[node].incarnation, self.now_ms + self.delay_ms());
        self.schedule(at_ms, Event::ToGManager { node, life, body });
    }

    /// Sends what an rManager wants sent.
    pub(super) fn drain(&mut self, node: usize) {
        while let Some(output) = self.nodes[node].rm.poll() {
            let mut ended = Vec::new();
            let rest = self.nodes[node].on_output(output, self.now_ms, &mut ended);
            ended.into_iter().for_each(|what| self.count(what));
            match rest {
                Some(Output::ToGManager(body)) => self.send_gmanager(node, body),
                Some(Output::ToPeer { instance, quic_addr, body }) => {
                    assert!(quic_addr.starts_with("10.0.0."));
                    self.send(node, instance, Body::Control(body));
                }
                _ => {}
            }
        }
    }

    /// Breaks the connection of two nodes and keeps it cut for a while.
    pub(super) fn cut(&mut self, a: usize, b: usize, for_ms: u64) {
        let until_ms = self.now_ms + for_ms;
        let link = self.link(a, b);
        link.generation += 1;
        link.arrives_ms = Default::default();
        link.cut_until_ms = until_ms;
        for (node, peer) in [(a, b), (b, a)] {
            let (life, at_ms) = (self.nodes[node].incarnation, self.now_ms + self.rng.random_range(0..300));
            self.schedule(at_ms, Event::Down { node, life, peer });
        }
    }

    pub(super) fn restart(&mut self, node: usize) {
        self.dead_leases.extend(self.nodes[node].rm.creditor.iter().map(|l| l.1));
        let old = self.nodes[node].instance;
        self.nodes[node] = Node::new(self.rng.random());
        // A process that remembers its number asks for it again.
        if self.rng.random() {
            self.nodes[node].remembers = old;
        }
        for peer in (0..self.nodes.len()).filter(|p| *p != node) {
            self.cut(node, peer, 0);
            let end = usize::from(node > peer);
            let link = self.link(node, peer);
            (link.view[end], link.known[end]) = (link.generation, None);
        }
    }

    /// The gManager is gone for a while and comes back knowing nothing.
    pub(super) fn restart_gmanager(&mut self) {
        self.gmanager_back_ms = self.now_ms + self.rng.random_range(0..2 * limits::BORROW_DEADLINE_MS);
        self.gmanagers += 1;
        let (first_instance, term) = (self.gmanagers * 1000, u64::from(self.gmanagers));
        let config = GManagerConfig { first_instance, term, instances_max: 64, ..GManagerConfig::default() };
        self.gmanager = GManager::with_config(config);
    }

    /// Lets `for_ms` pass: everything due is delivered, everybody ticks and sends heartbeats, everything is checked.
    pub(super) fn pass(&mut self, for_ms: u64) {
        self.now_ms += for_ms;
        while let Some(entry) = self.events.first_entry().filter(|e| e.key().0 <= self.now_ms) {
            let event = entry.remove();
            self.deliver(event);
            self.check();
        }
        for node in 0..self.nodes.len() {
            self.upkeep(node);
        }
        if self.now_ms >= self.gmanager_back_ms {
            self.gmanager.tick(self.now_ms);
            self.drain_gmanager();
        }
        self.check();
        let lends = |a: &Node, b: &Node| a.rm.debtor.held.iter().any(|h| Some(h.0) == b.instance);
        let pairs = || self.nodes.iter().flat_map(|a| self.nodes.iter().map(move |b| (a, b)));
        if pairs().any(|(a, b)| lends(a, b) && lends(b, a)) {
            self.count("mutual");
        }
    }

    fn upkeep(&mut self, node: usize) {
        let now_ms = self.now_ms;
        if now_ms >= self.nodes[node].next_tick_ms {
            self.nodes[node].next_tick_ms = now_ms + self.rng.random_range(1..100);
            let ended = self.nodes[node].rm.tick(now_ms);
            ended.iter().for_each(|_| self.count("lease expired"));
        }
        if self.nodes[node].instance.is_none() && now_ms >= self.nodes[node].next_register_ms {
            self.register(node);
        }
        if now_ms >= self.nodes[node].next_heartbeat_ms {
            self.nodes[node].next_heartbeat_ms = now_ms + limits::HEARTBEAT_MS;
            let heartbeat = self.nodes[node].heartbeat();
            self.send_gmanager(node, ControlBody::Heartbeat(Box::new(heartbeat)));
        }
        self.drain(node);
    }

    fn register(&mut self, node: usize) {
        self.nodes[node].next_register_ms = self.now_ms + 500;
        let register = Register {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            name: format!("n{node}"),
            quic_addr: address(node),
            http_addr: String::new(),
            role: Role::Instance.into(),
            incarnation: self.nodes[node].incarnation,
            shape: Some(Box::new(shape())),
            blocks_total: BLOCKS,
            backend: "cpu".to_owned(),
            instance: self.nodes[node].remembers.map_or(0, |i| i.0),
            ..Register::default()
        };
        self.send_gmanager(node, ControlBody::Register(Box::new(register)));
    }

    fn is_alive(&self, node: usize, life: u64) -> bool {
        self.nodes[node].incarnation == life
    }

    fn deliver(&mut self, event: Event) {
        match event {
            Event::Peer { from, to, generation, body } => self.deliver_peer(from, to, generation, body),
            Event::Down { node, life, peer } if self.is_alive(node, life) => self.notice(node, peer),
            Event::Unreachable { node, life, instance } if self.is_alive(node, life) => self.down(node, instance),
            Event::ToGManager { node, life, body } if self.now_ms >= self.gmanager_back_ms => {
                // A connection belongs to the instance that registered on it.
                let from = self.nodes[node].instance;
                if let Some(body) = self.gmanager.on_control(from, &body, self.now_ms) {
                    self.answer(node, life, body);
                }
                self.drain_gmanager();
            }
            Event::FromGManager { node, life, body } if self.is_alive(node, life) => {
                self.deliver_gmanager(node, &body);
                self.drain(node);
            }
            _ => {}
        }
    }

    /// What the gManager says to a node is delayed, and lost at times.
    fn answer(&mut self, node: usize, life: u64, body: ControlBody) {
        let cut = self.gmanager_cut_ms[node] > self.now_ms;
        let lost = self.faults && self.rng.random_ratio(1, 40);
        if !(cut || lost) {
            let at_ms = self.now_ms + self.delay_ms();
            self.schedule(at_ms, Event::FromGManager { node, life, body });
        }
    }

    fn drain_gmanager(&mut self) {
        while let Some(GManagerOutput::Send { to, body }) = self.gmanager.poll() {
            if let ControlBody::Fenced(m) = &body {
                self.fenced.insert((InstanceId(m.instance), m.incarnation));
            }
            if let Some(node) = self.node_of(to) {
                let life = self.nodes[node].incarnation;
                self.answer(node, life, body);
            }
        }
    }

    /// A node learns that it was taken for dead: it begins another life, and its peers learn of it.
    fn begin_anew(&mut self, node: usize) {
        self.count("fenced");
        self.dead_leases.extend(self.nodes[node].rm.creditor.iter().map(|l| l.1));
        let incarnation = self.rng.random();
        let old = self.nodes[node].instance.take();
        self.nodes[node].remembers = old;
        self.nodes[node].incarnation = incarnation;
        self.nodes[node].rm.forget_all(incarnation, self.now_ms);
        self.drain(node);
        // Connections stand; the peers are greeted again by the next message on them.
        for peer in (0..self.nodes.len()).filter(|p| *p != node) {
            let end = usize::from(peer > node);
            self.link(node, peer).greeted[end] = 0;
        }
        self.register(node);
    }

    fn deliver_gmanager(&mut self, node: usize, body: &ControlBody) {
        match body {
            ControlBody::Fenced(m) => {
                let ended = self.nodes[node].rm.on_peer_fenced(InstanceId(m.instance), m.incarnation, self.now_ms);
                ended.iter().for_each(|_| self.count("debtor fenced"));
            }
            ControlBody::HeartbeatAck(m) if m.fenced && self.nodes[node].instance.is_some() => self.begin_anew(node),
            ControlBody::HeartbeatAck(m) if m.fenced => {}
            ControlBody::Registered(m) => {
                let number = InstanceId(m.instance);
                assert!(self.node_of(number).is_none_or(|n| n == node), "{number} was given twice");
                (self.nodes[node].instance, self.nodes[node].remembers) = (Some(number), Some(number));
                self.nodes[node].rm.set_instance(number);
                self.nodes[node].report.restart();
            }
            ControlBody::Rejected(m) => panic!("{}", m.reason),
            ControlBody::HeartbeatAck(m) if !m.known => self.register(node),
            ControlBody::HeartbeatAck(m) => self.nodes[node].report.on_ack(m),
            ControlBody::BorrowAdvice(m) => self.nodes[node].rm.debtor.on_advice(m, self.now_ms),
            _ => {}
        }
    }

    /// `node` learns that its connection to `peer` was replaced or lost.
    fn notice(&mut self, node: usize, peer: usize) {
        let end = usize::from(node > peer);
        let link = self.link(node, peer);
        if link.view[end] != link.generation {
            link.view[end] = link.generation;
            if let Some(instance) = link.known[end] {
                self.down(node, instance);
            }
        }
    }

    fn down(&mut self, node: usize, instance: InstanceId) {
        self.count("down");
        self.nodes[node].rm.debtor.on_peer_down(instance, self.now_ms);
        // What was written on the way is lost, but some debtors only find out when they use it.
        if node.is_multiple_of(2) {
            self.nodes[node].lose_creditor(instance, None, self.now_ms);
        }
        self.drain(node);
    }

    fn deliver_peer(&mut self, from: usize, to: usize, generation: u64, body: Body) {
        let end = usize::from(to > from);
        // Only registered instances introduce themselves.
        let Some(sender) = self.nodes[from].instance else { return };
        if self.link(from, to).generation != generation {
            return;
        }
        self.notice(to, from);
        let incarnation = self.nodes[from].incarnation;
        let link = self.link(from, to);
        link.known[end] = Some(sender);
        if link.greeted[end] != generation + 1 {
            link.greeted[end] = generation + 1;
            let ended = self.nodes[to].rm.on_peer_hello(sender, incarnation, self.now_ms);
            ended.iter().for_each(|_| self.count("debtor restarted"));
        }
        match body {
            Body::Control(body) => {
                if let Some(answer) = self.nodes[to].rm.on_peer_control(sender, body, self.now_ms) {
                    self.send(to, sender, Body::Control(answer));
                }
            }
            Body::Data(Data::Refused { lease, code, read_offset }) => {
                // Reads are not waited for here, so that a release may overtake them.
                let first = read_offset.map_or(u32::MAX, |offset| offset / BLOCK_TOKENS);
                let in_use = self.nodes[to].rm.debtor.held.iter().any(|h| h.1 == lease && h.3 <= first);
                assert!(self.faults || !in_use, "{code:?} for a lease in use without any fault");
                if !in_use {
                    return;
                }
                self.count("data refused");
                self.nodes[to].lose_creditor(sender, Some(lease), self.now_ms);
            }
            Body::Data(data) => {
                if let Some(answer) = self.nodes[to].on_data(sender, &data, self.now_ms) {
                    self.send(to, sender, Body::Data(answer));
                }
            }
        }
        self.drain(to);
    }

    /// One random act of one random sequence or of fate.
    pub(super) fn act(&mut self) {
        let node = self.rng.random_range(0..self.nodes.len());
        let now_ms = self.now_ms;
        let pick = self.rng.random_range(0..usize::MAX);
        let some = self.nodes[node].seqs.keys().copied().collect::<Vec<_>>();
        let id = (!some.is_empty()).then(|| some[pick % some.len()]);
        let act = self.rng.random_range(0..100);
        match (act, id) {
            (0..10, _) if some.len() < 6 => {
                let huge = self.rng.random_ratio(1, 50);
                let blocks = if huge { BLOCKS * 5 } else { self.rng.random_range(1..50) };
                let local = self.rng.random_range(0..20);
                let window = self.rng.random_ratio(1, 3).then(|| self.rng.random_range(1..40));
                self.nodes[node].start(blocks, local, window, now_ms);
            }
            (10..20, Some(id)) if self.nodes[node].seqs[&id].borrow.is_none() => {
                let (blocks, local) = (self.rng.random_range(1..12), self.rng.random_range(0..4));
                self.nodes[node].grow(id, blocks, local, now_ms);
            }
            (20..27, Some(id)) => self.nodes[node].finish(id, now_ms),
            (27..60, Some(id)) => {
                let table = &self.nodes[node].seqs[&id].table;
                let room = table.capacity_tokens() - table.written();
                let tokens = room.min(self.rng.random_range(1..5 * BLOCK_TOKENS));
                let sends = self.nodes[node].write(id, tokens, now_ms);
                self.send_data(node, sends);
            }
            (60..90, Some(id)) => {
                let sends = self.nodes[node].read(id);
                self.send_data(node, sends);
            }
            (99, _) if self.faults => self.fault(node),
            _ => {}
        }
        self.drain(node);
    }

    fn fault(&mut self, node: usize) {
        match self.rng.random_range(0..20) {
            0 => self.restart(node),
            1 => self.restart_gmanager(),
            2 => {
                let for_ms = self.rng.random_range(0..2 * limits::FENCE_MS);
                self.gmanager_cut_ms[node] = self.now_ms + for_ms;
            }
            _ => {
                let other = self.rng.random_range(0..self.nodes.len());
                // At times for so long that leases end.
                let for_ms = match self.rng.random_range(0..6) {
                    0 => self.rng.random_range(0..2 * TTL_MS),
                    _ => self.rng.random_range(0..500),
                };
                if other != node {
                    self.cut(node, other, for_ms);
                }
            }
        }
    }
}

pub(super) fn shape() -> PoolShape {
    PoolShape {
        model_hash: vec![7; 32],
        layers: SHAPE.layers,
        heads: 2,
        kv_heads: SHAPE.kv_heads,
        head_dim: SHAPE.head_dim,
        kv_dtype: SHAPE.dtype.code().into(),
        block_tokens: BLOCK_TOKENS,
        window: 0,
        alibi_bias_max: 0,
        attention_softcap: 0,
        latent: false,
        attention_scale: 0.125f32.to_bits(),
        windows: vec![],
        unpooled_windows: vec![],
    }
}
