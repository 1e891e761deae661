//! A whole pool in one thread and in virtual time ([`World`]): the shipped instances, executors, gManager and codec,
//! without sockets.
//!
//! Time passes only when nothing else can happen (in shuffled runs also at random), so a wait that never ends shows
//! as runaway virtual time, and equal seeds give equal runs. The checkers of [`check`] run after every event.

pub mod check;
pub mod compare;
mod mapped;
mod net;
pub mod node;
mod stranger;
mod transfer;

pub use lagoon_sim::{DeviceFault as Fault, Rng};
pub use net::GMANAGER;
pub use node::{Backend, Coordinator, Node, PoolSpec, Spec};
pub use stranger::{STRANGER, STRANGER_ID};

use lagoon_cluster::GManager;
use lagoon_instance::{Effect, Event, PeerKey, TICK_MS};
use lagoon_protocol::{AdminBody, AdminQuery, AdminReply, Control, ControlBody, MoveKvCache};
use lagoon_runner::{Command, RemoteWrite, Report};
use lagoon_sim::shared;
use lagoon_types::{
    FinishReason, GenerateRequest, LeaseId, PhysBlock, RequestError, SamplingParams, SeqId, TokenEvent,
};
use lagoon_wire::Frame;
use net::{Key, Network, Payload, SESSION};
use std::collections::{BTreeMap, BTreeSet};

/// Virtual time after which a run counts as hanging, in milliseconds.
const RUN_MS_MAX: u64 = 120_000;
/// Events after which a run counts as a livelock.
const RUN_STEPS_MAX: u64 = 5_000_000;

/// State and result of a request.
#[derive(Debug)]
pub struct Log {
    pub node: usize,
    pub request: GenerateRequest,
    pub tokens: Vec<u32>,
    pub logits: Vec<Vec<f32>>,
    pub end: Option<Result<FinishReason, RequestError>>,
    pub cancelled: bool,
    /// Its instance was killed.
    pub lost: bool,
}

impl Log {
    /// Whether no further events will come.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.end.is_some() || self.cancelled || self.lost
    }
}

/// A pool under test; see the module's documentation.
#[derive(Debug)]
pub struct World {
    pub now_ms: u64,
    pool: PoolSpec,
    pub nodes: Vec<Node>,
    pub coordinator: Option<Coordinator>,
    pub requests: Vec<Log>,
    net: Network,
    /// Generator that shuffles deliveries between streams and delays them, in shuffled runs.
    shuffle: Option<Rng>,
    /// Largest delay of a frame in shuffled runs.
    pub delay_ms: u64,
    steps: u64,
    /// Number of gManagers after the first.
    gmanagers: u32,
    /// Pairs of nodes with a silent stall: frames wait until that time, without notice.
    stalled: Vec<(usize, usize, u64)>,
    /// The node and kind of the next frame that finds a full queue.
    full: Option<(usize, &'static str)>,
    /// The node and kind of the next device failure.
    faulty: Option<(usize, Fault)>,
    /// Leases of killed creditors.
    dead_leases: BTreeSet<LeaseId>,
    /// Nodes that were declared dead, and their number of fences before.
    fenced: BTreeMap<usize, u64>,
    /// Nodes whose loops are paused, and until when.
    paused: BTreeMap<usize, u64>,
    /// Number of served memory reads.
    pub reads: u64,
    stranger: stranger::Stranger,
}

/// A request for `max_tokens` greedy tokens with their logits.
#[must_use]
pub fn greedy(prompt: Vec<u32>, max_tokens: u32) -> GenerateRequest {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    GenerateRequest {
        prompt,
        answered: 0,
        max_tokens,
        sampling,
        min_tokens: 0,
        stop_ids: Vec::new(),
        return_logits: true,
    }
}

impl World {
    /// A gManager without instances. With a seed, deliveries are shuffled and delayed.
    #[must_use]
    pub fn new(pool: PoolSpec, seed: Option<u64>) -> Self {
        Self {
            now_ms: 1,
            pool,
            nodes: Vec::new(),
            coordinator: Some(Coordinator::default()),
            requests: Vec::new(),
            net: Network::default(),
            shuffle: seed.map(Rng::new),
            delay_ms: 3,
            steps: 0,
            gmanagers: 0,
            stalled: Vec::new(),
            full: None,
            faulty: None,
            dead_leases: BTreeSet::new(),
            fenced: BTreeMap::new(),
            paused: BTreeMap::new(),
            reads: 0,
            stranger: stranger::Stranger::default(),
        }
    }

    /// A pool of `specs` whose instances have all connected.
    #[must_use]
    pub fn pool(pool: PoolSpec, seed: Option<u64>, specs: &[Spec]) -> Self {
        let mut world = Self::new(pool, seed);
        for spec in specs {
            world.add(spec.clone());
        }
        world.run_for(600);
        for node in &world.nodes {
            assert!(node.live().status().registered, "{node:?} did not register");
        }
        world
    }

    /// One instance alone, without a gManager.
    #[must_use]
    pub fn single(pool: PoolSpec, spec: Spec) -> Self {
        let mut world = Self::new(pool, None);
        world.coordinator = None;
        world.add(spec);
        world
    }

    /// Starts an instance.
    pub fn add(&mut self, spec: Spec) -> usize {
        let index = self.nodes.len();
        self.nodes.push(Node::new(&self.pool, spec, index, 0));
        self.nodes[index].next_tick_ms = self.now_ms;
        if self.coordinator.is_some() {
            self.handle(index, Event::GManagerUp);
        }
        index
    }

    /// Submits a request to an instance; returns its number.
    pub fn submit(&mut self, node: usize, request: GenerateRequest) -> usize {
        let id = self.requests.len();
        let (tokens, logits) = (Vec::new(), Vec::new());
        let log = Log { node, request: request.clone(), tokens, logits, end: None, cancelled: false, lost: false };
        self.requests.push(log);
        self.handle(node, Event::Submit { seq: SeqId(id as u64 + 1), request });
        id
    }

    /// Cancels a request, as a client that disconnects.
    pub fn cancel(&mut self, id: usize) {
        let node = self.requests[id].node;
        if self.nodes[node].instance.is_some() {
            self.handle(node, Event::Cancel { seq: SeqId(id as u64 + 1) });
        }
        self.requests[id].cancelled = true;
    }

    /// Kills an instance's process: its peers' connections break, its requests are lost.
    pub fn kill(&mut self, node: usize) {
        let Some(instance) = self.nodes[node].instance.take() else { return };
        self.dead_leases.extend(instance.rmanager().creditor.iter().map(|l| l.1));
        self.nodes[node].engine = None;
        self.nodes[node].transport = None;
        self.nodes[node].lent = None;
        self.nodes[node].reports.clear();
        self.nodes[node].busy = false;
        for peer in (0..self.nodes.len()).filter(|p| *p != node) {
            let delays = [self.delay(), self.delay()];
            self.net.cut(node, peer, self.now_ms, 0, delays);
        }
        self.net.forget(node);
        self.net.queues.remove(&(node, GMANAGER, 0));
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.registered.lose(node);
        }
        for log in self.requests.iter_mut().filter(|l| l.node == node && l.end.is_none()) {
            log.lost = true;
        }
    }

    /// Starts a new process in place of a killed one.
    pub fn restart(&mut self, node: usize) {
        assert!(self.nodes[node].instance.is_none(), "it lives");
        let (spec, life) = (self.nodes[node].spec.clone(), self.nodes[node].life + 1);
        self.nodes[node] = Node::new(&self.pool, spec, node, life);
        self.nodes[node].next_tick_ms = self.now_ms;
        if self.coordinator.is_some() {
            self.handle(node, Event::GManagerUp);
        }
    }

    /// Cuts the connection of two nodes; no new one for `blocked_ms`.
    pub fn cut(&mut self, a: usize, b: usize, blocked_ms: u64) {
        let delays = [self.delay(), self.delay()];
        self.net.cut(a, b, self.now_ms, blocked_ms, delays);
    }

    /// Stalls all frames between two nodes for a while, without notice. They arrive afterwards.
    pub fn stall(&mut self, a: usize, b: usize, ms: u64) {
        self.stalled.push((a, b, self.now_ms + ms));
    }

    /// Pauses a node's loop: its instance receives nothing. Its transports go on.
    pub fn pause(&mut self, node: usize, ms: u64) {
        self.paused.insert(node, self.now_ms + ms);
    }

    fn is_paused(&self, node: usize) -> bool {
        self.paused.get(&node).is_some_and(|until_ms| self.now_ms < *until_ms)
    }

    /// Corrupts the last byte of the next KV write.
    pub fn corrupt_next_write(&mut self) {
        self.net.corrupt_next = Some("write");
    }

    /// Corrupts the last byte of the next KV read from a creditor.
    pub fn corrupt_next_data(&mut self) {
        self.net.corrupt_next = Some("data");
    }

    /// Drops the next frame of a kind that a node sends, as by a full queue, and reports that to the node.
    pub fn fill_queue(&mut self, node: usize, kind: &'static str) {
        self.full = Some((node, kind));
    }

    /// Overwrites a block on a node's device, as a later owner would while the former one does not know yet that it
    /// lost the block.
    ///
    /// # Panics
    /// If the node is dead.
    pub fn overwrite(&mut self, node: usize, block: PhysBlock) {
        let (shape, tokens) = (self.nodes[node].live().rmanager().config().shape, self.pool.block_tokens);
        let engine = self.nodes[node].engine.as_mut().unwrap();
        for layer in 0..shape.layers {
            let kv = vec![0x3e; tokens as usize * shape.layer_token_bytes()].into();
            engine.push(Command::RemoteWrite(RemoteWrite {
                tag: None,
                layer,
                pieces: vec![(block.0 * tokens, tokens)],
                kv,
            }));
        }
        while engine.turn(&mut |_nobody_asked| {}) {}
    }

    /// Makes a node's device fail once.
    pub fn break_device(&mut self, node: usize, fault: Fault) {
        self.faulty = Some((node, fault));
    }

    /// Sends an operator's request to the gManager.
    ///
    /// # Panics
    /// If there is none.
    pub fn admin(&mut self, body: AdminBody) -> AdminReply {
        let (now_ms, query) = (self.now_ms, AdminQuery { query: 1, body: Some(body) });
        let reply = self.coordinator.as_mut().unwrap().gmanager.on_admin(&query, now_ms);
        self.drain_gmanager();
        reply
    }

    /// Orders a move of a request's blocks between nodes, as the gManager.
    pub fn order(&mut self, request: usize, blocks: u32, source: usize, target: usize) {
        self.order_from(request, None, blocks, source, target);
    }

    /// As [`Self::order`], for blocks from `first` on.
    pub fn order_from(&mut self, request: usize, first: Option<u32>, blocks: u32, source: usize, target: usize) {
        let id = |node: usize| self.nodes[node].id().map_or(0, |id| id.0);
        let order = MoveKvCache {
            order: self.steps,
            seq: request as u64 + 1,
            blocks,
            source: id(source),
            target: id(target),
            target_addr: node::address(target),
            deadline_ms: 10_000,
            first,
            ..MoveKvCache::default()
        };
        let debtor = self.requests[request].node;
        self.handle(debtor, Event::GManager(ControlBody::MoveKvCache(order)));
    }

    /// Injects a frame that no peer sent; returns the instance's effects.
    pub fn inject(&mut self, node: usize, event: Event) -> Vec<Effect> {
        let now_ms = self.now_ms;
        self.nodes[node].instance.as_mut().unwrap().handle(event, now_ms)
    }

    /// Kills the gManager's process.
    pub fn kill_gmanager(&mut self) {
        self.coordinator = None;
        self.net.queues.retain(|(from, to, _), _| *from != GMANAGER && *to != GMANAGER);
        for node in 0..self.nodes.len() {
            if self.nodes[node].instance.is_some() {
                self.handle(node, Event::GManagerDown);
            }
        }
    }

    /// Starts a gManager without state.
    pub fn start_gmanager(&mut self) {
        // As in the shell: a new gManager does not reuse another one's numbers.
        self.gmanagers += 1;
        let gmanager = GManager::new(1 + 1_000 * self.gmanagers);
        self.coordinator = Some(Coordinator { gmanager, ..Coordinator::default() });
        for node in 0..self.nodes.len() {
            if self.nodes[node].instance.is_some() {
                self.handle(node, Event::GManagerUp);
            }
        }
    }

    /// Frames and bytes of a kind sent so far.
    #[must_use]
    pub fn sent(&self, kind: &str) -> (u64, u64) {
        self.net.sent.get(kind).copied().unwrap_or_default()
    }

    /// Runs until every request has ended.
    pub fn run(&mut self) {
        self.run_until(|world| world.requests.iter().all(Log::is_over));
    }

    /// Runs for `ms` milliseconds of virtual time.
    pub fn run_for(&mut self, ms: u64) {
        let end = self.now_ms + ms;
        self.run_until(|world| world.now_ms >= end);
    }

    /// Runs until `done`.
    ///
    /// # Panics
    /// If it exceeds `RUN_MS_MAX` or `RUN_STEPS_MAX`.
    pub fn run_until(&mut self, done: impl Fn(&Self) -> bool) {
        let (end_ms, end_steps) = (self.now_ms + RUN_MS_MAX, self.steps + RUN_STEPS_MAX);
        while !done(self) {
            self.step();
            assert!(self.now_ms <= end_ms, "the run hangs: {}", self.describe());
            assert!(self.steps <= end_steps, "the run does not end: {}", self.describe());
        }
    }

    /// State of all instances, for messages of failed tests.
    #[must_use]
    pub fn describe(&self) -> String {
        let live = self.nodes.iter().filter_map(|n| n.instance.as_ref());
        let status: Vec<String> = live.map(|i| format!("{:?}", i.status())).collect();
        let ends: Vec<String> =
            self.requests.iter().map(|l| format!("{} tokens, {:?}", l.tokens.len(), l.end)).collect();
        format!("at {} ms\n{}\n{}\nsent {:?}", self.now_ms, status.join("\n"), ends.join("\n"), self.net.sent)
    }

    fn delay(&mut self) -> u64 {
        let max = self.delay_ms;
        self.shuffle.as_mut().map_or(0, |rng| rng.below(max + 1))
    }

    /// Handles one event that is due now, or advances the time.
    pub fn step(&mut self) {
        self.steps += 1;
        let ready = self.ready();
        let busy: Vec<usize> = (0..self.nodes.len()).filter(|n| self.nodes[*n].busy).collect();
        let reports = |n: &usize| {
            let due = self.nodes[*n].reports.front().is_some_and(|(at, _)| *at <= self.now_ms);
            due && !self.is_paused(*n)
        };
        let reporting: Vec<usize> = (0..self.nodes.len()).filter(reports).collect();
        let transfers =
            |n: &usize| self.nodes[*n].transport.as_ref().is_some_and(|t| t.is_due(self.now_ms, self.is_paused(*n)));
        let transferring: Vec<usize> = (0..self.nodes.len()).filter(transfers).collect();
        let choices = ready.len() + busy.len() + reporting.len() + transferring.len();
        if choices == 0 {
            self.pass_time();
            return;
        }
        match &mut self.shuffle {
            None => {
                for key in ready {
                    self.deliver(key);
                }
                busy.into_iter().for_each(|node| self.turn(node));
                for node in reporting {
                    while self.report(node) {}
                }
                for node in transferring {
                    self.transfer_step(node);
                }
            }
            Some(rng) => {
                let (at, passes) = (rng.below(choices as u64) as usize, rng.below(64) == 0);
                match (ready.get(at), busy.get(at.wrapping_sub(ready.len()))) {
                    (Some(key), _) => self.deliver(*key),
                    (None, Some(node)) => self.turn(*node),
                    (None, None) => match reporting.get(at - ready.len() - busy.len()) {
                        Some(node) => drop(self.report(*node)),
                        None => {
                            let at = at - ready.len() - busy.len() - reporting.len();
                            self.transfer_step(transferring[at]);
                        }
                    },
                }
                if passes {
                    self.set_time(self.now_ms + 1);
                }
            }
        }
    }

    /// Streams with a deliverable item.
    fn ready(&mut self) -> Vec<Key> {
        let now_ms = self.now_ms;
        self.stalled.retain(|(_, _, until_ms)| *until_ms > now_ms);
        let (nodes, stalled, paused) = (&self.nodes, &self.stalled, &self.paused);
        self.net.queues.retain(|_, queue| !queue.is_empty());
        let ready = self.net.queues.iter().filter(|((from, to, stream), queue)| {
            let item = &queue[0];
            // A frame waits until its receiver knows the session.
            let introduced = *stream == SESSION
                || *from == GMANAGER
                || *to == GMANAGER
                || nodes[*to].view.get(from).is_some_and(|g| *g >= item.generation);
            let stalls = stalled.iter().any(|(a, b, _)| (*a, *b) == (*from, *to) || (*b, *a) == (*from, *to));
            let stands = paused.get(to).is_some_and(|until_ms| now_ms < *until_ms);
            item.ready_ms <= now_ms && introduced && !stalls && !stands
        });
        ready.map(|(key, _)| *key).collect()
    }

    fn deliver(&mut self, key: Key) {
        // An earlier delivery of this round may have ended the session.
        let Some(item) = self.net.queues.get_mut(&key).and_then(std::collections::VecDeque::pop_front) else { return };
        let (from, to, _) = key;
        match item.payload {
            Payload::Frame(class, bytes) => {
                let mut frame = net::decode(class, bytes);
                if from == GMANAGER {
                    self.stranger.recommend(&mut frame);
                }
                if to == GMANAGER {
                    self.deliver_gmanager(from, frame);
                } else if from == GMANAGER || self.nodes[to].view.get(&from) == Some(&item.generation) {
                    let peer = (from != GMANAGER).then_some(PeerKey(from as u64));
                    self.handle(to, shared::event(peer, frame).expect("a known message"));
                }
            }
            Payload::Up => {
                self.nodes[to].view.insert(from, item.generation);
                self.handle(to, Event::PeerUp { peer: PeerKey(from as u64) });
            }
            Payload::Down => {
                if self.nodes[to].view.get(&from) == Some(&item.generation) {
                    self.nodes[to].view.remove(&from);
                    self.handle(to, Event::PeerDown { peer: PeerKey(from as u64) });
                }
            }
            Payload::Close => self.cut(from, to, 0),
        }
    }

    fn deliver_gmanager(&mut self, from: usize, frame: Frame) {
        let Some(coordinator) = &mut self.coordinator else { return };
        let Frame::Control(Control { body: Some(body) }) = frame else { panic!("a known message") };
        let Coordinator { gmanager, registered } = coordinator;
        if let Some(reply) = registered.receive(gmanager, from, &body, self.now_ms) {
            let ready_ms = self.now_ms + self.delay();
            self.net.send(GMANAGER, from, reply.into(), ready_ms, 0);
        }
        self.drain_gmanager();
    }

    /// Sends the gManager's messages to connected instances.
    fn drain_gmanager(&mut self) {
        while let Some(Coordinator { gmanager, registered }) = &mut self.coordinator {
            let Some((to, body)) = registered.next_order(gmanager) else { return };
            if let ControlBody::Fenced(fenced) = &body {
                let id = Some(lagoon_types::InstanceId(fenced.instance));
                let node = self.nodes.iter().position(|n| n.id() == id);
                self.fenced.extend(node.map(|n| (n, self.nodes[n].live().status().fences)));
            }
            if let Some(node) = to {
                let ready_ms = self.now_ms + self.delay();
                self.net.send(GMANAGER, node, body.into(), ready_ms, 0);
            }
        }
    }

    /// Lets an executor do one piece of work.
    fn turn(&mut self, node: usize) {
        let Node { engine, commands, .. } = &mut self.nodes[node];
        let Some(engine) = engine else {
            self.nodes[node].busy = false;
            return;
        };
        let mut reports = Vec::new();
        commands.drain(..).for_each(|command| engine.push(command));
        let busy = engine.turn(&mut |report| reports.push(report));
        self.nodes[node].busy = busy;
        let Node { spec, reports: queue, device_free_ms, .. } = &mut self.nodes[node];
        for report in reports {
            let takes_ms = match report {
                Report::Done { .. } => spec.step_ms,
                Report::RemotePartial { .. } => spec.remote_request_ms,
                _ => 0,
            };
            *device_free_ms = (*device_free_ms).max(self.now_ms) + takes_ms;
            queue.push_back((*device_free_ms, report));
        }
    }

    /// Delivers an executor's next report to its instance; false if there is none.
    fn report(&mut self, node: usize) -> bool {
        let now_ms = self.now_ms;
        let Some((_, report)) = self.nodes[node].reports.pop_front_if(|(at, _)| *at <= now_ms) else { return false };
        let report = self.maybe_fail(node, report);
        self.handle(node, Event::Runner(report));
        true
    }

    fn maybe_fail(&mut self, node: usize, report: Report) -> Report {
        let struck = self.faulty.filter(|(n, _)| *n == node).and_then(|(_, fault)| fault.strike(&report));
        self.faulty = self.faulty.filter(|_| struck.is_none());
        struck.unwrap_or(report)
    }

    /// Advances the time to the next event.
    fn pass_time(&mut self) {
        let ready = self.net.queues.values().filter_map(|q| q.front()).map(|item| item.ready_ms);
        let ticks = self.nodes.iter().filter(|n| n.instance.is_some()).map(|n| n.next_tick_ms);
        let stalls = self.stalled.iter().map(|s| s.2);
        let devices = self.nodes.iter().filter_map(|n| n.reports.front()).map(|(at, _)| *at);
        let transfers = self.nodes.iter().filter_map(|n| n.transport.as_ref()?.next_due_ms());
        let pauses = self.paused.values().copied();
        let next = ready
            .chain(ticks)
            .chain(stalls)
            .chain(devices)
            .chain(transfers)
            .chain(pauses)
            .filter(|at| *at > self.now_ms)
            .min();
        self.set_time(next.unwrap_or(self.now_ms + TICK_MS));
    }

    fn set_time(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        self.net.redial(now_ms);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.gmanager.tick(now_ms);
        }
        self.drain_gmanager();
        for node in 0..self.nodes.len() {
            let stands = self.is_paused(node);
            if self.nodes[node].instance.is_some() && self.nodes[node].next_tick_ms <= now_ms && !stands {
                self.nodes[node].next_tick_ms = now_ms + TICK_MS;
                self.handle(node, Event::Tick);
                self.tick_writer(node);
            }
        }
    }

    /// Hands an event to an instance and carries out its effects.
    fn handle(&mut self, node: usize, event: Event) {
        let Some(instance) = &mut self.nodes[node].instance else { return };
        // An instance that learns of its own fence forgets its leases.
        if matches!(&event, Event::GManager(ControlBody::HeartbeatAck(ack)) if ack.fenced) {
            self.dead_leases.extend(instance.rmanager().creditor.iter().map(|l| l.1));
        }
        let effects = instance.handle(event, self.now_ms);
        for effect in effects {
            self.apply(node, effect);
        }
        self.check();
        while let Some(peer) = self.nodes[node].refused_sends.pop() {
            self.handle(node, Event::SendFailed { peer });
        }
    }

    fn apply(&mut self, node: usize, effect: Effect) {
        let ready_ms = self.now_ms + self.delay();
        match effect {
            Effect::ToGManager(body) => {
                if self.coordinator.is_some() {
                    self.net.send(node, GMANAGER, body.into(), ready_ms, 0);
                }
            }
            Effect::Connect { quic_addr, .. } => {
                let peer = (0..self.nodes.len()).find(|n| node::address(*n) == quic_addr);
                if let Some(peer) = peer.filter(|p| self.nodes[*p].instance.is_some()) {
                    self.net.connect(node, peer, self.now_ms);
                }
            }
            Effect::Control { peer, body } => self.send(node, peer, body.into(), ready_ms),
            Effect::Partials { peer, frame } => self.send(node, peer, frame.into(), ready_ms),
            Effect::Bulk { peer, frame } => self.send(node, peer, frame.into(), ready_ms),
            Effect::Close { peer, reason } => {
                self.nodes[node].closed.push(reason);
                let peer = peer.0 as usize;
                if let Some(generation) = self.session(node, peer) {
                    self.net.send_close(node, peer, ready_ms, generation);
                }
            }
            Effect::Runner(command) => {
                self.nodes[node].commands.push_back(command);
                self.nodes[node].busy = true;
            }
            Effect::Transfer(effect) => self.transfer(node, effect),
            Effect::Map { map, blocks, memory } => self.map(node, map, blocks, &memory),
            Effect::Emit { seq, event } => self.emitted(node, seq, event),
            Effect::Drained => self.nodes[node].drained = true,
            Effect::Rejected { reason } => self.nodes[node].rejected = Some(reason),
        }
    }

    /// The session in which a node may send to a peer: the one it knows, if that is up.
    fn session(&self, node: usize, peer: usize) -> Option<u64> {
        let standing = self.net.standing(node, peer)?;
        self.nodes[node].view.get(&peer).copied().filter(|known| *known == standing)
    }

    fn send(&mut self, node: usize, peer: PeerKey, frame: Frame, ready_ms: u64) {
        if peer == STRANGER {
            self.stranger.receive(node, frame);
            return;
        }
        let index = peer.0 as usize;
        let Some(generation) = self.session(node, index) else { return };
        if self.full == Some((node, net::kind(&frame))) {
            self.full = None;
            self.nodes[node].refused_sends.push(peer);
        } else {
            self.net.send(node, index, frame, ready_ms, generation);
        }
    }

    /// Checks that a request ends once, with no event after its end or cancellation.
    fn emitted(&mut self, node: usize, seq: SeqId, event: TokenEvent) {
        let log = &mut self.requests[seq.0 as usize - 1];
        assert_eq!(log.node, node, "{seq} is another instance's");
        assert!(log.end.is_none() && !log.cancelled, "{seq} is over: {event:?}");
        match event {
            TokenEvent::Token { id, logits, .. } => {
                log.tokens.push(id);
                log.logits.extend(logits);
                assert!(log.tokens.len() <= log.request.max_tokens as usize, "{seq} says too much");
            }
            TokenEvent::Finished { reason, prompt_tokens, completion_tokens } => {
                assert_eq!(prompt_tokens as usize, log.request.prompt.len());
                assert_eq!(completion_tokens as usize, log.tokens.len());
                log.end = Some(Ok(reason));
            }
            TokenEvent::Failed(error) => log.end = Some(Err(error)),
        }
    }
}
