//! A run of a paper's cluster: the pool ([`World`]) over modelled devices and the papers' network, with a dispatcher
//! and the clients of a trace.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times, counts and indices are small and not negative"
)]

use super::caching::Prompt;
use super::cluster::{Cluster, ETHERNET_LATENCY_US};
use super::device::{Device, Prefill};
use super::dispatch::{CHARGE_US, Dispatch, View, choose, work_us};
use super::fabric::Fabric;
use super::gateway::Gateway;
use super::hardware::Timing;
use super::traces::Request;
use crate::clock::Clock;
use crate::place::address;
use crate::process::Process;
use crate::rng::Rng;
use crate::world::{Delays, Emission, Step, Transfers, World};
use lagoon_cluster::dispatch::Effect;
use lagoon_cluster::perf::LinkView;
use lagoon_cluster::{DgfmConfig, GManager, GManagerConfig, PlannerConfig};
use lagoon_instance::{
    Event, InstanceConfig, JointConfig, LayerWindows, PeerKey, RemotePolicy, SchedulerConfig, TICK_MS,
};
use lagoon_kv::{BlockHash, IdentityRoot};
use lagoon_protocol::{Calibration, Role};
use lagoon_types::limits::{
    HEARTBEAT_MS, INSTANCES_MAX, MOVE_BYTES_IN_FLIGHT_MAX, SEQUENCE_TOKENS_MAX, STEP_DEADLINE_MS, STEP_ROWS_MAX,
};
use lagoon_types::{
    AttentionGeometry, DType, GenerateRequest, KvDType, KvShape, ModelHash, RequestError, RequestOptions,
    SamplingParams, SeqId, TokenEvent,
};
use std::collections::{BTreeSet, VecDeque};

/// Time between samples.
const SAMPLE_US: u64 = 100_000;
/// The run's own calls: a tick of the gManager is over, the gManager is up, all peers are, round trips are measured, instances report
/// to the gateway, it looks at its queue. Smaller ones are requests that arrive.
const SAMPLE: u64 = 1 << 32;
const GMANAGER_UP: u64 = 2 << 32;
const PEERS_UP: u64 = 3 << 32;
const MEASURED: u64 = 4 << 32;
const REPORT: u64 = 5 << 32;
const GATEWAY_TICK: u64 = 6 << 32;
/// Head size of the one-layer stand-in.
pub(super) const HEAD_DIM: u32 = 8;
/// Blocks that a creditor reserves for its own growth.
pub(super) const LEND_RESERVE_BLOCKS: u64 = 2;
/// Most running sequences of one instance (vLLM's `max_num_seqs`).
const RUNNING_MAX: usize = 256;

/// Departures from the modelled system, to measure the cost of one part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Study {
    /// Frames take no time.
    pub free_network: bool,
    /// Both micro-batches read the weights once: the cost of one batch of all rows.
    pub one_batch: bool,
    /// Peers' queries overtake the current layer, as on a device with priorities.
    pub overtaking: bool,
    /// Instances name their hosts, so that queries cross once a host: of a step's creditors on another one, one passes them on and
    /// answers for all; and KV of a prompt that crosses lies in stripes.
    pub once_a_node: bool,
}

/// Parameters of a simulated system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    pub cluster: Cluster,
    pub timing: Timing,
    /// The instances form a pool. Otherwise each is on its own, like vLLM's replicas.
    pub pooled: bool,
    pub dispatch: Dispatch,
    pub block_tokens: u32,
    pub step_rows: u32,
    /// Most running sequences of one instance.
    pub running: usize,
    pub prefill: Prefill,
    /// Simulated time after which the run is cut.
    pub limit_s: u64,
    /// Longest time between tokens for which prompts' chunks are sized (`--target-tbt-ms`).
    pub target_step_ms: Option<u32>,
    /// DGFM clears circular debts (v1 §4.5).
    pub dgfm: bool,
    /// The planner moves blocks (v2 §5).
    pub planner: bool,
    /// KV capacity of one instance in tokens.
    pub kv_tokens: u64,
    /// Instances keep prefixes. The papers' systems do not.
    pub prefix_cache: bool,
    /// Instances that compute a long prompt together at most (`--prefill-instances`): 1 is each its own, 0 as many as pay.
    pub prefill_instances: u32,
    pub study: Study,
}

impl Setting {
    /// A setting without departures, prompts resident.
    #[must_use]
    pub fn new(cluster: Cluster, pooled: bool, block_tokens: u32) -> Self {
        let timing = cluster.timing();
        Self {
            cluster,
            timing,
            kv_tokens: timing.kv_tokens(),
            dgfm: true,
            planner: true,
            pooled,
            dispatch: Dispatch::default(),
            block_tokens,
            step_rows: STEP_ROWS_MAX as u32,
            running: RUNNING_MAX,
            prefill: Prefill::Resident,
            limit_s: 20_000,
            target_step_ms: None,
            prefix_cache: false,
            prefill_instances: 1,
            study: Study::default(),
        }
    }

    /// The longest context that one instance can serve, in tokens: of its own memory, and of the pool's.
    #[must_use]
    pub fn holds_tokens(&self) -> u64 {
        let (blocks, instances) = (u64::from(self.blocks()), self.cluster.instances() as u64);
        let lent = if self.pooled { (instances - 1) * blocks.saturating_sub(LEND_RESERVE_BLOCKS) } else { 0 };
        (blocks + lent) * u64::from(self.block_tokens)
    }

    /// Number of rBlocks of one instance.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.kv_tokens / u64::from(self.block_tokens)).unwrap_or(u32::MAX)
    }
}

/// Times of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    pub first_us: Option<u64>,
    pub end_us: Option<u64>,
    pub tokens: u32,
    pub failed: bool,
    /// Tokens of its prompt whose KV was cached.
    pub cached: u32,
    /// Tokens that another instance cached of it, beyond those cached where it was sent.
    pub elsewhere: u32,
}

/// Observations of a run.
#[derive(Debug, Default)]
pub struct Seen {
    pub outcomes: Vec<Outcome>,
    /// Generated tokens by [`Seen::BUCKET_US`] of simulated time.
    pub tokens: Vec<u32>,
    pub events: u64,
    pub end_us: u64,
    pub preemptions: u64,
    pub recoveries: u64,
    /// rBlocks moved by the gManager's orders.
    pub moved_blocks: u64,
    /// Share of all devices' time: computing, and computing for peers.
    pub busy: f64,
    pub remote_request: f64,
    /// Share of all devices' time: idle while a step waited for peers' partials.
    pub awaits: f64,
    /// Steps and their sequences, by micro-batch.
    pub steps: [u64; 2],
    pub rows: [u64; 2],
    pub ethernet_bytes: f64,
    pub nvlink_bytes: f64,
    /// Total time that frames of queries and partials were in flight.
    pub exchange_us: u64,
    /// Tokens of prefix-cache hits that were leased from other instances, and cached rBlocks that were evicted.
    pub leased_tokens: u64,
    pub evicted_blocks: u64,
    /// Joint prefills that were begun, and those of them that all members computed to the end; prompts for which no members were found.
    pub joint: [u64; 3],
    /// Most blocks borrowed at one time, over all instances.
    pub borrowed_max: u32,
    /// Samples, one every 100 ms.
    pub samples: Vec<Sample>,
}

/// The state of all instances at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    pub at_us: u64,
    pub borrowed: u32,
    /// Share of rBlocks in use.
    pub memory_used: f64,
    pub running: f64,
}

impl Seen {
    /// Width of a bucket of [`Seen::tokens`].
    pub const BUCKET_US: u64 = 100_000;
}

/// What the dispatcher knows of an instance.
#[derive(Clone, Debug, Default)]
struct Load {
    /// Time and context of requests sent here lately.
    recent: VecDeque<(u64, i64)>,
    /// Requests with a first token and not all.
    running: i64,
    /// Requests sent here that have not ended.
    open: BTreeSet<usize>,
}

/// A run; see the module's documentation.
#[derive(Debug)]
pub struct Run {
    setting: Setting,
    world: World<Device, Fabric>,
    /// By instance.
    loads: Vec<Load>,
    requests: Vec<Request>,
    /// What prompts have in common with others, by request; nothing if empty.
    prompts: Vec<Prompt>,
    open: usize,
    /// Requests dispatched so far.
    turn: usize,
    /// With [`Dispatch::Late`].
    gateway: Option<Gateway>,
    pub seen: Seen,
}

/// Configuration of the `index`-th instance, which is at place `index + 1`.
fn config(setting: &Setting, index: usize) -> InstanceConfig {
    let model = setting.timing.model;
    let shape = stand_in();
    let geometry =
        AttentionGeometry { heads: model.heads / model.kv_heads, kv_heads: 1, head_dim: HEAD_DIM, latent: false };
    InstanceConfig {
        name: format!("sim-{index}"),
        quic_addr: address(index + 1),
        http_addr: String::new(),
        host: if setting.study.once_a_node { format!("node-{}", setting.cluster.node(index)) } else { String::new() },
        backend: "simulated".to_owned(),
        role: Role::Instance,
        tier: lagoon_protocol::MemoryTier::Device,
        calibration: Some(calibration(setting)),
        incarnation: index as u64 + 1,
        model_hash: ModelHash::default(),
        geometry,
        kv: shape,
        window: None,
        windowed: None,
        layer_windows: LayerWindows::default(),
        attention_scale: 1.0,
        alibi: None,
        attention_softcap: None,
        max_positions: SEQUENCE_TOKENS_MAX,
        vocab: u32::MAX,
        block_tokens: setting.block_tokens,
        blocks_total: setting.blocks(),
        lend_blocks_max: setting.blocks(),
        lend_reserve_blocks: u32::try_from(LEND_RESERVE_BLOCKS).unwrap_or(u32::MAX),
        sched: SchedulerConfig {
            queue: 1 << 20,
            running: setting.running,
            step_rows: setting.step_rows,
            drafts: 0,
            draft_model: false,
        },
        remote: RemotePolicy::Ship,
        wire: DType::F16,
        fetch_tokens: 0,
        link_bytes_per_s: 1e9,
        attention_flops: 1e15,
        joint: JointConfig::of(setting.prefill_instances),
        prefix_cache: setting.prefix_cache,
        target_step_ms: setting.target_step_ms,
        transfer: None,
        lent: None,
        peer_access: None,
    }
}

/// An instance's calibration; copies in bytes of the stand-in.
fn calibration(setting: &Setting) -> Calibration {
    let measured = setting.timing.calibration();
    let scale = stand_in_token_bytes() / setting.timing.model.kv_token_bytes();
    Calibration { copy_bytes_per_s: measured.copy_bytes_per_s * scale, ..measured }
}

fn stand_in() -> KvShape {
    KvShape { layers: 1, kv_heads: 1, head_dim: HEAD_DIM, dtype: KvDType::F16 }
}

fn stand_in_token_bytes() -> f64 {
    stand_in().layer_token_bytes() as f64
}

/// Bytes of the one-layer stand-in per byte of the real model's KV, queries and partials.
fn scale(setting: &Setting) -> f64 {
    stand_in_token_bytes() / setting.timing.model.kv_token_bytes()
}

/// The shipped coordinator. It computes with the registered sizes, those of the stand-in; its default link is scaled
/// likewise.
fn gmanager(setting: &Setting) -> GManager {
    let far = setting.cluster.node(setting.cluster.instances() - 1) > 0;
    let (bytes_per_s, latency_us) = if far {
        (setting.cluster.ethernet_bytes_per_s, ETHERNET_LATENCY_US)
    } else {
        (setting.cluster.near_bytes_per_s, setting.cluster.near_latency_us)
    };
    let rtt_us = 2.0 * latency_us * f64::from(setting.timing.model.layers);
    let assumed_link = LinkView { rtt_us, bytes_per_s: bytes_per_s * scale(setting) };
    GManager::with_config(GManagerConfig {
        planner: setting.planner.then(|| PlannerConfig { assumed_link, ..PlannerConfig::default() }),
        dgfm: setting.dgfm.then(DgfmConfig::default),
        ..GManagerConfig::default()
    })
}

impl Run {
    /// A connected idle cluster before the first request of a trace.
    ///
    /// # Panics
    /// If the setting is invalid: a bug of ours.
    #[must_use]
    pub fn new(setting: Setting, requests: Vec<Request>) -> Self {
        let count = setting.cluster.instances();
        assert!(count < INSTANCES_MAX, "a paper's cluster is small");
        let mut world = World::over(Fabric::new(setting), Rng::new(0), Transfers::new(Rng::new(0), Delays::up_to(0)));
        for index in 0..count {
            let config = config(&setting, index);
            let q_bytes = config.geometry.q_dim() * config.wire.size();
            let device = Device::new(&setting, q_bytes, config.kv.layer_token_bytes());
            let place = index + 1;
            world.start(place, (config, device), Clock::exact(), 0, index as u64);
            // One exchange of the stand-in is one in every layer of the model, each with the deadline.
            let deadline_ms = STEP_DEADLINE_MS * u64::from(setting.timing.model.layers);
            let bytes = (MOVE_BYTES_IN_FLIGHT_MAX as f64 * scale(&setting)) as u64;
            world.processes[place].iter_mut().for_each(|process| process.instance.scale_limits(deadline_ms, bytes));
        }
        if setting.pooled {
            world.call_at(0, GMANAGER_UP);
            world.call_at(10_000, PEERS_UP);
            world.call_at(20_000, MEASURED);
        }
        let mut gmanager = gmanager(&setting);
        gmanager.tick(0);
        world.start_gmanager(gmanager, Clock::exact(), 0, TICK_MS * 1000);
        world.call_at(TICK_MS * 1000, SAMPLE);
        for (index, request) in requests.iter().enumerate() {
            world.call_at(WARM_UP_US + request.arrival_us, index as u64);
        }
        let gateway = (setting.dispatch == Dispatch::Late).then(Gateway::new);
        if gateway.is_some() {
            world.call_at(WARM_UP_US / 2, REPORT);
        }
        let seen = Seen { outcomes: vec![Outcome::default(); requests.len()], ..Seen::default() };
        let loads = vec![Load::default(); count];
        Self { setting, world, loads, open: requests.len(), turn: 0, gateway, seen, requests, prompts: Vec::new() }
    }

    /// As [`Run::new`], of requests with these prompts.
    ///
    /// # Panics
    /// As [`Run::new`], and if there is not one prompt a request.
    #[must_use]
    pub fn of_prompts(setting: Setting, requests: Vec<Request>, prompts: Vec<Prompt>) -> Self {
        assert_eq!(requests.len(), prompts.len(), "each request has a prompt");
        Self { prompts, ..Self::new(setting, requests) }
    }

    /// The pool's processes.
    fn nodes(&self) -> impl Iterator<Item = &Process<Device>> {
        self.world.live().map(|(_, process)| process)
    }

    /// Runs until every request has ended or the limit is reached.
    ///
    /// # Panics
    /// If the gManager refuses an instance: a bug of ours.
    pub fn run(&mut self) {
        let limit_us = self.setting.limit_s * 1_000_000;
        let mut emitted = Vec::new();
        while self.open > 0 && self.world.now_us() < limit_us {
            let Some(step) = self.world.step() else { break };
            self.seen.events += u64::from(step != Step::Call(SAMPLE));
            match step {
                Step::Call(SAMPLE) => self.sample(),
                Step::Call(call @ (GMANAGER_UP | PEERS_UP | MEASURED)) => self.introduce(call),
                Step::Call(REPORT) => self.report(),
                Step::Call(GATEWAY_TICK) => self.with_gateway(Gateway::tick),
                Step::Call(index) => self.arrive(index as usize),
                Step::Handled => {}
            }
            // A request that a gateway binds at another one's end may be refused at once.
            while !self.world.emitted.is_empty() {
                std::mem::swap(&mut emitted, &mut self.world.emitted);
                emitted.drain(..).for_each(|emission| self.emit(&emission));
            }
        }
        self.finish();
    }

    fn finish(&mut self) {
        let Self { world, seen, .. } = self;
        seen.end_us = world.now_us();
        let wall = seen.end_us.max(1) as f64 * self.loads.len() as f64;
        for (_, Process { instance, runner, rejected, .. }) in world.live() {
            assert_eq!(*rejected, None, "the gManager refused a simulated instance");
            seen.busy += runner.busy_us;
            seen.remote_request += runner.remote_request_us;
            seen.awaits += runner.await_us;
            for micro_batch in 0..2 {
                seen.steps[micro_batch] += runner.steps[micro_batch];
                seen.rows[micro_batch] += runner.rows[micro_batch];
            }
            seen.preemptions += instance.status().preemptions;
            seen.recoveries += instance.status().recoveries;
            seen.leased_tokens += instance.status().prefix.found.pool;
            seen.evicted_blocks += instance.status().prefix.evicted_blocks;
            let joint = instance.status().joint;
            let counts = [joint.begun, joint.completed, joint.alone];
            seen.joint.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        for share in [&mut seen.busy, &mut seen.remote_request, &mut seen.awaits] {
            *share /= wall;
        }
        seen.ethernet_bytes = world.fabric.ethernet_bytes;
        seen.nvlink_bytes = world.fabric.nvlink_bytes;
        seen.exchange_us = world.fabric.exchange_us;
        seen.moved_blocks = world.coordinator.as_ref().map_or(0, |c| c.gmanager.stats().blocks_moved);
    }

    /// Connects all instances, as in a pool that has run for a while.
    fn introduce(&mut self, call: u64) {
        let count = self.loads.len();
        for place in 1..=count {
            if call == GMANAGER_UP {
                self.world.handle(place, Event::GManagerUp);
                continue;
            }
            for other in (1..=count).filter(|other| *other != place) {
                let peer = PeerKey(other as u64);
                // One exchange of the stand-in is one in every layer of the model.
                let layers = f64::from(self.setting.timing.model.layers);
                let rtt_us = (2.0 * layers * self.world.fabric.latency_us(place, other)) as u32;
                let event = if call == PEERS_UP { Event::PeerUp { peer } } else { Event::Rtt { peer, rtt_us } };
                self.world.handle(place, event);
            }
        }
    }

    /// Takes a sample every [`SAMPLE_US`], after a tick of the gManager.
    fn sample(&mut self) {
        let now = self.world.now_us();
        self.world.call_at(now + TICK_MS * 1000, SAMPLE);
        if now / SAMPLE_US <= self.seen.samples.last().map_or(0, |s| s.at_us / SAMPLE_US) {
            return;
        }
        let mut sample = Sample { at_us: now, ..Sample::default() };
        let mut free = 0.0;
        for node in self.nodes() {
            free += f64::from(node.instance.rmanager().pool.counts().free);
            sample.borrowed += node.instance.rmanager().debtor.held.blocks();
        }
        sample.running = self.loads.iter().map(|load| load.running as f64).sum();
        sample.memory_used = 1.0 - free / (f64::from(self.setting.blocks()) * self.loads.len() as f64);
        self.seen.borrowed_max = self.seen.borrowed_max.max(sample.borrowed);
        self.seen.samples.push(sample);
    }

    /// What the dispatcher knows of the instance at a place, now.
    fn view(&self, place: usize, node: &Process<Device>) -> View {
        let Setting { timing, kv_tokens, prefill, dispatch, .. } = &self.setting;
        let load = &self.loads[place - 1];
        let work = |at: &usize| {
            let generated = self.seen.outcomes[*at].tokens;
            work_us(timing, *kv_tokens, &self.requests[*at], generated, *prefill == Prefill::Computed)
        };
        let work_us = if *dispatch == Dispatch::LeastWork { load.open.iter().map(work).sum() } else { 0.0 };
        View {
            free_tokens: i64::from(node.instance.rmanager().pool.counts().free) * i64::from(self.setting.block_tokens),
            recent_tokens: load.recent.iter().map(|(_, tokens)| tokens).sum(),
            work_us,
            holds_tokens: self.setting.holds_tokens(),
        }
    }

    /// Hands the gateway what the instances' heartbeats say.
    fn report(&mut self) {
        self.world.call_at(self.world.now_us() + HEARTBEAT_MS * 1_000, REPORT);
        let (now, calibration) = (self.world.now_us(), calibration(&self.setting));
        let Some(gateway) = &mut self.gateway else { return };
        let effects = gateway.report(now, &calibration, self.world.live());
        self.carry_out(effects);
    }

    fn with_gateway(&mut self, act: impl FnOnce(&mut Gateway, u64) -> Vec<Effect<usize>>) {
        let now = self.world.now_us();
        let effects = self.gateway.as_mut().map(|gateway| act(gateway, now)).unwrap_or_default();
        self.carry_out(effects);
    }

    fn carry_out(&mut self, effects: Vec<Effect<usize>>) {
        for effect in effects {
            match effect {
                Effect::Bind { id, instance } => self.send(id.0 as usize, instance),
                Effect::Refuse { id, .. } => {
                    self.seen.outcomes[id.0 as usize].failed = true;
                    self.open -= 1;
                }
            }
        }
        let now = self.world.now_us();
        if let Some(at) = self.gateway.as_mut().and_then(|gateway| gateway.schedule_tick(now)) {
            self.world.call_at(at, GATEWAY_TICK);
        }
    }

    /// A client's request comes: to the gateway, or to the instance that the setting's dispatch chooses.
    fn arrive(&mut self, index: usize) {
        let (request, now) = (self.requests[index], self.world.now_us());
        if self.gateway.is_some() {
            let prefix = self.prompts.get(index).map(Prompt::prefix).unwrap_or_default();
            return self.with_gateway(|gateway, now| gateway.arrive(now, index, &request, prefix));
        }
        for load in &mut self.loads {
            load.recent.retain(|(at, _)| now - at < CHARGE_US);
        }
        let (places, views): (Vec<usize>, Vec<View>) =
            self.world.live().map(|(place, node)| (place, self.view(place, node))).unzip();
        let tokens = u64::from(request.context_tokens());
        let Some(place) = choose(self.setting.dispatch, &views, tokens, self.turn).map(|at| places[at]) else { return };
        self.turn += 1;
        self.loads[place - 1].open.insert(index);
        self.loads[place - 1].recent.push_back((now, tokens as i64));
        self.send(index, place);
    }

    fn send(&mut self, index: usize, place: usize) {
        let request = self.requests[index];
        let prompt_tokens = request.prompt_tokens as usize;
        let prompt = self.prompts.get(index).map_or_else(|| vec![0; prompt_tokens], |of| of.tokens(prompt_tokens));
        self.note_elsewhere(index, place, &prompt);
        let may_hand_back = self.gateway.as_ref().is_some_and(|gateway| gateway.may_hand_back(index));
        let request = GenerateRequest {
            prompt,
            answered: 0,
            max_tokens: request.output_tokens,
            sampling: SamplingParams::default(),
            min_tokens: 0,
            stop_ids: Vec::new(),
            return_logits: false,
            options: RequestOptions { may_hand_back, ..RequestOptions::default() },
        };
        self.world.handle(place, Event::Submit { seq: SeqId(index as u64), request: Box::new(request) });
    }

    /// Notes what other instances cache of a prompt beyond what the one at `place` does, which it is sent to.
    fn note_elsewhere(&mut self, index: usize, place: usize, prompt: &[u32]) {
        if !self.setting.prefix_cache || self.prompts.is_empty() {
            return;
        }
        let block_tokens = self.setting.block_tokens;
        let of = (ModelHash::default(), stand_in().dtype);
        let root = IdentityRoot { model: of.0, adapter: b"", dtype: of.1, rope: b"", block_tokens };
        let hashes = BlockHash::chain(&root, &prompt[..prompt.len().saturating_sub(1)]);
        let found = |process: &Process<Device>| process.instance.rmanager().pool.found(&hashes);
        let most = self.world.live().map(|(_, process)| found(process)).max().unwrap_or(0);
        let here = self.world.live().find(|(at, _)| *at == place).map_or(0, |(_, process)| found(process));
        self.seen.outcomes[index].elsewhere = (most - here) * block_tokens;
    }

    fn emit(&mut self, Emission { place, seq, event }: &Emission) {
        let now = self.world.now_us();
        let index = seq.0 as usize;
        let load = &mut self.loads[place - 1];
        let outcome = &mut self.seen.outcomes[index];
        let started = outcome.first_us.is_some();
        match event {
            TokenEvent::Prompt { cached, .. } => {
                let learned = cached.total();
                outcome.cached = u32::try_from(learned).unwrap_or(u32::MAX);
                return self.gateway.iter_mut().for_each(|gateway| gateway.note_cached(index, learned));
            }
            TokenEvent::Embedding { .. } => return,
            TokenEvent::Token { .. } => {
                load.running += i64::from(!started);
                outcome.first_us.get_or_insert(now);
                outcome.tokens += 1;
                let bucket = (now / Seen::BUCKET_US) as usize;
                if self.seen.tokens.len() <= bucket {
                    self.seen.tokens.resize(bucket + 1, 0);
                }
                self.seen.tokens[bucket] += 1;
            }
            TokenEvent::Finished { .. } => outcome.end_us = Some(now),
            TokenEvent::Failed(RequestError::HandedBack) => {
                return self.with_gateway(|gateway, now| gateway.handed_back(now, index));
            }
            TokenEvent::Failed(_) => outcome.failed = true,
        }
        let tokens = outcome.tokens;
        if !matches!(event, TokenEvent::Token { .. }) {
            load.running -= i64::from(started);
            load.open.remove(&index);
            self.open -= 1;
            self.with_gateway(|gateway, now| gateway.ended(now, index, tokens));
        } else if !started {
            self.with_gateway(|gateway, now| gateway.began(now, index));
        }
    }
}

/// Instances register and meet before the first request comes.
pub const WARM_UP_US: u64 = 1_000_000;
