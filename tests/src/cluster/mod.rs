//! A whole pool in one thread and in virtual time: the simulator's [`lagoon_sim::World`] over real executors.
//!
//! Devices work at once, and their work takes little virtual time ([`Spec::piece_us`]); frames take none, or in shuffled
//! runs random times. Equal seeds give equal runs, and a wait that never ends shows as runaway virtual time. The
//! checkers of [`check`] run after every event.

pub mod check;
pub mod compare;
mod mapped;
mod net;
pub mod node;
mod stranger;
mod tiers;

pub use lagoon_sim::{DeviceFault as Fault, Rng};
pub use node::{Backend, PoolSpec, Spec};
pub use stranger::{STRANGER, STRANGER_ID};

use lagoon_backend::KvCounters;
use lagoon_cluster::GManager;
use lagoon_instance::{Effect, Event, Instance};
use lagoon_protocol::{AdminBody, AdminReply, ControlBody, MoveKvCache, PoolShape};
use lagoon_runner::{Command, RemoteWrite};
use lagoon_sim::leases::Leases;
use lagoon_sim::place::address;
use lagoon_sim::rng::mix;
use lagoon_sim::{Clock, Delays, Emission, Fabric, LinkProfile, Place, Process, SimRunner, Transfers};
use lagoon_types::{
    CachedTokens, FinishReason, GenerateRequest, InstanceId, PhysBlock, PromptLogprob, RequestError, RequestOptions,
    SamplingParams, SeqId, TokenEvent, TokenLogprobs,
};
use net::Net;
use node::TimedExecutor;
use std::ops::Range;

/// The gManager, where a node is named.
pub const GMANAGER: usize = usize::MAX;
/// Virtual time after which a run counts as hanging, in milliseconds.
const RUN_MS_MAX: u64 = 120_000;
/// Events after which a run counts as a livelock.
const RUN_STEPS_MAX: u64 = 5_000_000;
/// Largest delay of a frame in shuffled runs.
const DELAY_MS: u64 = 3;
/// The gManager's tick.
const GMANAGER_TICK_US: u64 = 20_000;

/// A node's place: nodes follow the gManager, which has the first.
fn place(node: usize) -> Place {
    node.wrapping_add(1)
}

/// State and result of a request.
#[derive(Debug)]
pub struct Log {
    pub node: usize,
    pub request: GenerateRequest,
    pub tokens: Vec<u32>,
    pub logits: Vec<Vec<f32>>,
    /// Log-probabilities of the tokens, if they were requested.
    pub scores: Vec<TokenLogprobs>,
    /// Cached tokens and log-probabilities of the prompt.
    pub prompt: (u32, Vec<PromptLogprob>),
    /// Those cached tokens by where they were found.
    pub found: CachedTokens,
    pub embedding: Option<Vec<f32>>,
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
    pool: PoolSpec,
    sim: lagoon_sim::World<TimedExecutor, Net>,
    /// By node.
    specs: Vec<Spec>,
    /// Processes that each node has had.
    lives: Vec<u64>,
    pub requests: Vec<Log>,
    leases: Leases,
    /// Seed of shuffled runs.
    seed: Option<u64>,
    steps: u64,
    gmanagers: u32,
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
        options: RequestOptions::default(),
    }
}

impl World {
    /// No process yet. With a seed, frames and reads take random times of up to `delay_ms`, and devices' work up to
    /// eight times its own.
    fn empty(pool: PoolSpec, seed: Option<u64>, delay_ms: u64) -> Self {
        let delay_us = seed.map_or(0, |_| delay_ms * 1000);
        let profile = LinkProfile { latency_us: delay_us / 2, jitter_us: delay_us / 2, bytes_per_us: 0 };
        let mut rng = Rng::new(seed.unwrap_or(0));
        let fabric = Net::new(Fabric::new(profile, rng.split()).with_notice(0));
        let transfers = Transfers::new(rng.split(), Delays::up_to(delay_us));
        Self {
            pool,
            sim: lagoon_sim::World::over(fabric, rng, transfers),
            specs: Vec::new(),
            lives: Vec::new(),
            requests: Vec::new(),
            leases: Leases::default(),
            seed,
            steps: 0,
            gmanagers: 0,
        }
    }

    /// A gManager without instances. With a seed, deliveries are shuffled and delayed.
    #[must_use]
    pub fn new(pool: PoolSpec, seed: Option<u64>) -> Self {
        let mut world = Self::empty(pool, seed, DELAY_MS);
        world.start_gmanager();
        world
    }

    /// A pool of `specs` whose instances have all connected.
    #[must_use]
    pub fn pool(pool: PoolSpec, seed: Option<u64>, specs: &[Spec]) -> Self {
        Self::delayed(pool, (seed, DELAY_MS), specs)
    }

    /// As [`Self::pool`], with another largest delay of a frame in shuffled runs.
    #[must_use]
    pub fn delayed(pool: PoolSpec, (seed, delay_ms): (Option<u64>, u64), specs: &[Spec]) -> Self {
        let mut world = Self::empty(pool, seed, delay_ms);
        world.start_gmanager();
        for spec in specs {
            world.add(spec.clone());
        }
        world.run_for(600);
        for node in world.nodes() {
            assert!(world.live(node).status().registered, "node {node} did not register");
        }
        world
    }

    /// One instance alone, without a gManager.
    #[must_use]
    pub fn single(pool: PoolSpec, spec: Spec) -> Self {
        let mut world = Self::empty(pool, None, 0);
        world.add(spec);
        world
    }

    /// Starts an instance.
    pub fn add(&mut self, spec: Spec) -> usize {
        self.specs.push(spec);
        self.lives.push(0);
        let node = self.specs.len() - 1;
        self.start(node);
        node
    }

    fn start(&mut self, node: usize) {
        let (spec, life) = (&self.specs[node], self.lives[node]);
        let shuffle = self.seed.map(|seed| Rng::new(mix(seed ^ (node as u64) << 32 ^ life)));
        let config = node::config(&self.pool, spec, node, life);
        let (device, kv) = node::device(&self.pool, spec, (node, life), shuffle);
        self.sim.start(place(node), (config, device), Clock::exact(), life, 0);
        if kv.rows > 0 {
            self.process_mut(node).instance.address_kv(kv).unwrap();
        }
        self.start_tiers(node);
    }

    /// All nodes, also dead ones.
    #[must_use]
    pub fn nodes(&self) -> Range<usize> {
        0..self.specs.len()
    }

    /// What an instance was started with.
    #[must_use]
    pub fn spec(&self, node: usize) -> &Spec {
        &self.specs[node]
    }

    fn process(&self, node: usize) -> &Process<TimedExecutor> {
        self.sim.process(place(node)).unwrap()
    }

    fn process_mut(&mut self, node: usize) -> &mut Process<TimedExecutor> {
        self.sim.processes[place(node)].as_mut().unwrap()
    }

    /// A node's instance, unless it is dead.
    #[must_use]
    pub fn instance(&self, node: usize) -> Option<&Instance> {
        self.sim.process(place(node)).map(|process| &process.instance)
    }

    /// Whether an instance lives.
    #[must_use]
    pub fn is_alive(&self, node: usize) -> bool {
        self.instance(node).is_some()
    }

    /// A node's instance.
    ///
    /// # Panics
    /// If the node is dead.
    #[must_use]
    pub fn live(&self, node: usize) -> &Instance {
        &self.process(node).instance
    }

    /// A node's number, once registered.
    #[must_use]
    pub fn id(&self, node: usize) -> Option<InstanceId> {
        self.instance(node)?.status().instance
    }

    /// The shape that a node registers.
    #[must_use]
    pub fn shape(&self, node: usize) -> PoolShape {
        node::config(&self.pool, &self.specs[node], node, self.lives[node]).pool_shape()
    }

    /// Virtual memory counters of a node's store.
    pub fn kv_counters(&mut self, node: usize) -> Option<KvCounters> {
        self.sim.processes[place(node)].as_mut()?.runner.engine.kv_counters()
    }

    /// Whether a node has reported that its drain is done.
    #[must_use]
    pub fn is_drained(&self, node: usize) -> bool {
        self.process(node).drained
    }

    /// The gManager's reason for its refusal of a node.
    #[must_use]
    pub fn rejected(&self, node: usize) -> Option<&str> {
        self.process(node).rejected.as_deref()
    }

    /// The gManager.
    ///
    /// # Panics
    /// If it is dead.
    #[must_use]
    pub fn gmanager(&self) -> &GManager {
        &self.sim.coordinator.as_ref().unwrap().gmanager
    }

    /// As [`Self::gmanager`].
    ///
    /// # Panics
    /// If it is dead.
    pub fn gmanager_mut(&mut self) -> &mut GManager {
        &mut self.sim.coordinator.as_mut().unwrap().gmanager
    }

    /// Whether the gManager lives.
    #[must_use]
    pub fn has_gmanager(&self) -> bool {
        self.sim.coordinator.is_some()
    }

    /// The cluster's time, in milliseconds.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.sim.now_us() / 1000
    }

    /// Number of memory reads whose bytes have arrived.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.sim.kv.arrived
    }

    /// Number of exports that a node's transports serve.
    #[must_use]
    pub fn exports(&self, node: usize) -> usize {
        self.sim.kv.kept(place(node))
    }

    /// Frames and bytes of a kind sent so far.
    #[must_use]
    pub fn sent(&self, kind: &str) -> (u64, u64) {
        self.sim.fabric.sent.get(kind).copied().unwrap_or_default()
    }

    /// Submits a request to an instance; returns its number.
    pub fn submit(&mut self, node: usize, request: GenerateRequest) -> usize {
        let id = self.requests.len();
        let (tokens, logits, scores) = (Vec::new(), Vec::new(), Vec::new());
        let (prompt, found) = ((0, Vec::new()), CachedTokens::default());
        let (embedding, end, cancelled, lost) = (None, None, false, false);
        let log = Log {
            node,
            request: request.clone(),
            tokens,
            logits,
            scores,
            prompt,
            found,
            embedding,
            end,
            cancelled,
            lost,
        };
        self.requests.push(log);
        self.handle(node, Event::Submit { seq: SeqId(id as u64 + 1), request: Box::new(request) });
        id
    }

    /// Cancels a request, as a client that disconnects.
    pub fn cancel(&mut self, id: usize) {
        self.handle(self.requests[id].node, Event::Cancel { seq: SeqId(id as u64 + 1) });
        self.requests[id].cancelled = true;
    }

    /// Kills an instance's process: its peers' connections break, its requests are lost.
    pub fn kill(&mut self, node: usize) {
        let Some(process) = self.sim.kill(place(node)) else { return };
        self.leases.died(&process);
        for log in self.requests.iter_mut().filter(|l| l.node == node && l.end.is_none()) {
            log.lost = true;
        }
    }

    /// Starts a new process in place of a killed one.
    pub fn restart(&mut self, node: usize) {
        self.lives[node] += 1;
        self.start(node);
    }

    /// Cuts the connection of two nodes; no new one for `blocked_ms`.
    pub fn cut(&mut self, a: usize, b: usize, blocked_ms: u64) {
        self.sim.fabric.fabric.cut_for(place(a), place(b), blocked_ms * 1000, &mut self.sim.agenda);
    }

    /// Stalls all frames between two nodes for a while, without notice. They arrive afterwards.
    pub fn stall(&mut self, a: usize, b: usize, ms: u64) {
        let now_us = self.sim.now_us();
        self.sim.fabric.fabric.stall(place(a), place(b), ms * 1000, now_us);
    }

    /// Pauses a node's loop: its instance receives nothing. Its transports go on.
    pub fn pause(&mut self, node: usize, ms: u64) {
        self.sim.pause_loop(place(node), ms * 1000);
    }

    /// Corrupts the last byte of the next KV write.
    pub fn corrupt_next_write(&mut self) {
        self.sim.fabric.corrupt_next = Some("write");
    }

    /// Corrupts the last byte of the next KV read from a creditor.
    pub fn corrupt_next_data(&mut self) {
        self.sim.fabric.corrupt_next = Some("data");
    }

    /// Corrupts the bytes of a node's next read of memory.
    pub fn damage_next_read(&mut self, node: usize) {
        self.sim.kv.damage_next_read(place(node));
    }

    /// Makes each later read of a node take `each_ms`, one after the other; `None` ends that.
    pub fn slow_reads(&mut self, node: usize, each_ms: Option<u64>) {
        self.sim.kv.slow_reads(place(node), each_ms.map(|ms| ms * 1000));
    }

    /// Breaks all transfer paths of a node; its process goes on.
    pub fn break_paths_of(&mut self, node: usize) {
        for other in self.nodes().filter(|other| *other != node) {
            self.sim.cut_paths(place(node), place(other));
        }
    }

    /// Drops the next frame of a kind that a node sends, as by a full queue, and reports that to the node.
    pub fn fill_queue(&mut self, node: usize, kind: &'static str) {
        self.sim.fill_queue(place(node), Box::new(move |frame| net::kind(frame) == kind));
    }

    /// Overwrites a block on a node's device, as a later owner would while the former one does not know yet that it
    /// lost the block.
    ///
    /// # Panics
    /// If the node is dead.
    pub fn overwrite(&mut self, node: usize, block: PhysBlock) {
        let (now_us, tokens) = (self.sim.now_us(), self.pool.block_tokens);
        let Process { instance, runner, .. } = self.process_mut(node);
        let shape = instance.rmanager().config().shape;
        for layer in 0..shape.layers {
            let kv = vec![0x3e; tokens as usize * shape.layer_token_bytes()].into();
            let pieces = vec![(block.0 * tokens, tokens)];
            runner.push(Command::RemoteWrite(RemoteWrite { tag: None, layer, pieces, kv }), now_us);
        }
        while runner.engine.turn(&mut |_nobody_asked| {}) {}
    }

    /// Makes a node's device fail once.
    pub fn break_device(&mut self, node: usize, fault: Fault) {
        self.sim.break_device(place(node), fault);
    }

    /// Sends an operator's request to the gManager.
    ///
    /// # Panics
    /// If there is none.
    pub fn admin(&mut self, body: AdminBody) -> AdminReply {
        self.sim.admin(body).unwrap()
    }

    /// Orders a move of a request's blocks between nodes, as the gManager.
    pub fn order(&mut self, request: usize, blocks: u32, source: usize, target: usize) {
        self.order_from(request, None, blocks, source, target);
    }

    /// As [`Self::order`], for blocks from `first` on.
    pub fn order_from(&mut self, request: usize, first: Option<u32>, blocks: u32, source: usize, target: usize) {
        let id = |node: usize| self.id(node).map_or(0, |id| id.0);
        let order = MoveKvCache {
            order: self.steps,
            seq: request as u64 + 1,
            blocks,
            source: id(source),
            target: id(target),
            target_addr: address(place(target)),
            deadline_ms: 10_000,
            first,
            ..MoveKvCache::default()
        };
        let debtor = self.requests[request].node;
        self.handle(debtor, Event::GManager(ControlBody::MoveKvCache(order)));
    }

    /// Injects a frame that no peer sent; returns the instance's effects.
    pub fn inject(&mut self, node: usize, event: Event) -> Vec<Effect> {
        let now_ms = self.now_ms();
        self.process_mut(node).instance.handle(event, now_ms)
    }

    /// Kills the gManager's process.
    pub fn kill_gmanager(&mut self) {
        self.sim.kill_gmanager();
    }

    /// Starts a gManager without state.
    pub fn start_gmanager(&mut self) {
        // As in the shell: a new gManager does not reuse another one's numbers.
        let gmanager = GManager::new(1 + 1_000 * self.gmanagers);
        self.sim.start_gmanager(gmanager, Clock::exact(), u64::from(self.gmanagers), GMANAGER_TICK_US);
        self.gmanagers += 1;
    }

    /// Runs until every request has ended.
    pub fn run(&mut self) {
        self.run_until(|world| world.requests.iter().all(Log::is_over));
    }

    /// Runs for `ms` milliseconds of virtual time.
    pub fn run_for(&mut self, ms: u64) {
        let end_us = self.sim.now_us() + ms * 1000;
        self.sim.call_at(end_us, 0);
        self.run_until(|world| world.sim.now_us() >= end_us);
    }

    /// Runs until `done`.
    ///
    /// # Panics
    /// If it exceeds `RUN_MS_MAX` or `RUN_STEPS_MAX`.
    pub fn run_until(&mut self, done: impl Fn(&Self) -> bool) {
        let (end_ms, end_steps) = (self.now_ms() + RUN_MS_MAX, self.steps + RUN_STEPS_MAX);
        while !done(self) {
            self.step();
            assert!(self.now_ms() <= end_ms, "the run hangs: {}", self.describe());
            assert!(self.steps <= end_steps, "the run does not end: {}", self.describe());
        }
    }

    /// State of all instances, for messages of failed tests.
    #[must_use]
    pub fn describe(&self) -> String {
        let status: Vec<String> = self.sim.live().map(|(_, p)| format!("{:?}", p.instance.status())).collect();
        let ends: Vec<String> =
            self.requests.iter().map(|l| format!("{} tokens, {:?}", l.tokens.len(), l.end)).collect();
        let sent = &self.sim.fabric.sent;
        format!("at {} ms\n{}\n{}\nsent {sent:?}", self.now_ms(), status.join("\n"), ends.join("\n"))
    }

    /// Handles the next event.
    ///
    /// # Panics
    /// If a checker finds something.
    pub fn step(&mut self) {
        self.steps += 1;
        self.sim.step().expect("processes tick");
        self.after();
    }

    /// Hands an event to an instance, if it lives.
    fn handle(&mut self, node: usize, event: Event) {
        self.sim.handle(place(node), event);
        self.after();
    }

    fn after(&mut self) {
        for emission in std::mem::take(&mut self.sim.emitted) {
            self.emitted(emission);
        }
        self.check();
    }

    /// Checks that a request ends once, with no event after its end or cancellation.
    fn emitted(&mut self, Emission { place: from, seq, event }: Emission) {
        let log = &mut self.requests[seq.0 as usize - 1];
        assert_eq!(place(log.node), from, "{seq} is another instance's");
        assert!(log.end.is_none() && !log.cancelled, "{seq} is over: {event:?}");
        match event {
            TokenEvent::Prompt { cached, logprobs, .. } => {
                assert!(log.tokens.is_empty(), "{seq} reports its prompt first");
                log.prompt = (u32::try_from(cached.total()).unwrap(), logprobs);
                log.found = cached;
            }
            TokenEvent::Token { id, logits, logprobs } => {
                log.scores.extend(logprobs);
                log.tokens.push(id);
                log.logits.extend(logits);
                assert!(log.tokens.len() <= log.request.max_tokens as usize, "{seq} says too much");
            }
            TokenEvent::Embedding { hidden } => {
                assert!(log.embedding.replace(hidden).is_none(), "{seq} has one embedding");
            }
            TokenEvent::Finished { reason, prompt_tokens, completion_tokens } => {
                let answered = log.request.answered;
                assert_eq!((prompt_tokens + answered) as usize, log.request.prompt.len());
                assert_eq!(completion_tokens as usize, log.tokens.len() + answered as usize);
                log.end = Some(Ok(reason));
            }
            TokenEvent::Failed(error) => log.end = Some(Err(error)),
        }
    }
}
