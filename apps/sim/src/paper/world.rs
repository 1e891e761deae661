//! A cluster in simulated time: the shipped instances and gManager, the modelled devices and network, a dispatcher
//! and the clients of a trace.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times, counts and indices are small and not negative"
)]

use super::cluster::{Cluster, ETHERNET_LATENCY_US};
use super::device::{BilledReport, Device, Prefill};
use super::fabric::{Class, Fabric};
use super::hardware::Timing;
use super::traces::Request;
use crate::agenda::Agenda;
use lagoon_cluster::perf::LinkView;
use lagoon_cluster::{DgfmConfig, GManager, GManagerConfig, GManagerOutput, PlannerConfig};
use lagoon_instance::{
    Effect, Event, Instance, InstanceConfig, LayerWindows, PeerKey, RemotePolicy, SchedulerConfig, TICK_MS,
};
use lagoon_protocol::{BulkFrame, Calibration, ControlBody, PartialsFrame, Role};
use lagoon_runner::Report;
use lagoon_types::limits::{
    INSTANCES_MAX, MOVE_BYTES_IN_FLIGHT_MAX, SEQUENCE_TOKENS_MAX, STEP_DEADLINE_MS, STEP_ROWS_MAX,
};
use lagoon_types::{
    AttentionGeometry, DType, GenerateRequest, InstanceId, KvShape, ModelHash, SamplingParams, SeqId, TokenEvent,
};
use std::collections::BTreeMap;

/// Time between samples.
const SAMPLE_US: u64 = 100_000;
/// One-way latency between an instance and the gManager, and of other control messages.
const CONTROL_US: u64 = 100;
/// Modelled bytes of a frame without payload.
const SMALL_FRAME_BYTES: f64 = 200.0;
/// Head size of the one-layer stand-in.
const HEAD_DIM: u32 = 8;
/// Most running sequences of one instance (vLLM's `max_num_seqs`).
const RUNNING_MAX: usize = 256;

/// Departures from the modelled system, to measure the cost of one part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Study {
    /// Frames take no time.
    pub free_network: bool,
    /// Both micro-batches read the weights once: the cost of one batch of all rows.
    pub one_batch: bool,
    /// Peers' queries wait for the end of the current layer, as on a device without priorities.
    pub layer_borders: bool,
}

/// Parameters of a simulated system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    pub cluster: Cluster,
    pub timing: Timing,
    /// The instances form a pool. Otherwise each is on its own, like vLLM's replicas.
    pub pooled: bool,
    pub block_tokens: u32,
    pub step_rows: u32,
    /// Most running sequences of one instance.
    pub running: usize,
    pub prefill: Prefill,
    /// Simulated time after which the run is cut.
    pub limit_s: u64,
    /// DGFM clears circular debts (v1 §4.5).
    pub dgfm: bool,
    /// The planner moves blocks (v2 §5).
    pub planner: bool,
    /// KV capacity of one instance in tokens.
    pub kv_tokens: u64,
    pub study: Study,
}

impl Setting {
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
            block_tokens,
            step_rows: STEP_ROWS_MAX as u32,
            running: RUNNING_MAX,
            prefill: Prefill::Resident,
            limit_s: 20_000,
            study: Study::default(),
        }
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
}

#[derive(Debug)]
enum What {
    Tick(usize),
    GManagerTick,
    Arrive(usize),
    Instance(usize, Event),
    GManager(usize, ControlBody),
    Device(usize, u64),
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

struct Node {
    instance: Instance,
    device: Device,
    /// Tokens of requests sent here that have no first token yet.
    unstarted_tokens: u64,
    /// Requests with a first token and not all.
    running: i64,
}

/// A simulated cluster; see the module's documentation.
pub struct World {
    setting: Setting,
    agenda: Agenda<What>,
    fabric: Fabric,
    nodes: Vec<Node>,
    gmanager: GManager,
    requests: Vec<Request>,
    /// Instance to which each request was sent.
    sent_to: Vec<Option<usize>>,
    open: usize,
    pub seen: Seen,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("setting", &self.setting).field("open", &self.open).finish_non_exhaustive()
    }
}

fn config(setting: &Setting, index: usize) -> InstanceConfig {
    let model = setting.timing.model;
    let shape = stand_in();
    let geometry =
        AttentionGeometry { heads: model.heads / model.kv_heads, kv_heads: 1, head_dim: HEAD_DIM, latent: false };
    InstanceConfig {
        name: format!("sim-{index}"),
        quic_addr: address(index),
        http_addr: String::new(),
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
        vocab: 2,
        block_tokens: setting.block_tokens,
        blocks_total: setting.blocks(),
        lend_blocks_max: setting.blocks(),
        lend_reserve_blocks: 2,
        sched: SchedulerConfig { queue: 1 << 20, running: setting.running, step_rows: setting.step_rows },
        remote: RemotePolicy::Ship,
        wire: DType::F16,
        fetch_tokens: 0,
        link_bytes_per_s: 1e9,
        attention_flops: 1e15,
        // The papers' systems have no prefix cache, and prompts here have lengths but no tokens.
        prefix_cache: false,
        target_step_ms: None,
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
    KvShape { layers: 1, kv_heads: 1, head_dim: HEAD_DIM, dtype: DType::F16 }
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

fn address(index: usize) -> String {
    format!("10.{}.{}.{}:7000", index >> 16, index >> 8 & 255, (index & 255) + 1)
}

impl World {
    /// A connected idle cluster before the first request of a trace.
    ///
    /// # Panics
    /// If the setting is invalid: a bug of ours.
    #[must_use]
    pub fn new(setting: Setting, requests: Vec<Request>) -> Self {
        let count = setting.cluster.instances();
        assert!(count < INSTANCES_MAX, "a paper's cluster is small");
        let node = |index| {
            let config = config(&setting, index);
            let mut instance = Instance::new(config.clone()).expect("the papers' clusters have room for their models");
            // One exchange of the stand-in is one in every layer of the model, each with the deadline.
            let deadline_ms = STEP_DEADLINE_MS * u64::from(setting.timing.model.layers);
            instance.scale_limits(deadline_ms, (MOVE_BYTES_IN_FLIGHT_MAX as f64 * scale(&setting)) as u64);
            let q_bytes = config.geometry.q_dim() * config.wire.size();
            let kv_bytes = config.kv.layer_token_bytes();
            Node { instance, device: Device::new(&setting, q_bytes, kv_bytes), unstarted_tokens: 0, running: 0 }
        };
        let mut world = Self {
            agenda: Agenda::default(),
            fabric: Fabric::new(setting.cluster, setting.study.free_network),
            nodes: (0..count).map(node).collect(),
            gmanager: gmanager(&setting),
            sent_to: vec![None; requests.len()],
            open: requests.len(),
            seen: Seen { outcomes: vec![Outcome::default(); requests.len()], ..Seen::default() },
            requests,
            setting,
        };
        world.connect();
        for (index, request) in world.requests.iter().enumerate() {
            world.agenda.at(WARM_UP_US + request.arrival_us, What::Arrive(index));
        }
        world
    }

    /// Registers all instances and connects them, as in a pool that has run for a while.
    fn connect(&mut self) {
        let count = self.nodes.len();
        for index in 0..count {
            self.agenda.at(index as u64, What::Tick(index));
            if self.setting.pooled {
                self.agenda.at(0, What::Instance(index, Event::GManagerUp));
            }
            for peer in (0..count).filter(|p| *p != index && self.setting.pooled) {
                let key = PeerKey(peer as u64);
                self.agenda.at(10_000, What::Instance(index, Event::PeerUp { peer: key }));
                // One exchange of the stand-in is one in every layer of the model.
                let layers = f64::from(self.setting.timing.model.layers);
                let rtt_us = (2.0 * layers * self.fabric.latency_us(index, peer)) as u32;
                self.agenda.at(20_000, What::Instance(index, Event::Rtt { peer: key, rtt_us }));
            }
        }
        self.agenda.at(0, What::GManagerTick);
    }

    /// Runs until every request has ended or the limit is reached.
    pub fn run(&mut self) {
        let limit_us = self.setting.limit_s * 1_000_000;
        while self.open > 0 && self.agenda.now_us() < limit_us {
            let Some(what) = self.agenda.pop() else { break };
            self.seen.events += 1;
            self.happen(what);
        }
        self.seen.end_us = self.agenda.now_us();
        let wall = self.seen.end_us.max(1) as f64 * self.nodes.len() as f64;
        self.seen.busy = self.nodes.iter().map(|n| n.device.busy_us).sum::<f64>() / wall;
        self.seen.remote_request = self.nodes.iter().map(|n| n.device.remote_request_us).sum::<f64>() / wall;
        self.seen.awaits = self.nodes.iter().map(|n| n.device.await_us).sum::<f64>() / wall;
        for device in self.nodes.iter().map(|n| &n.device) {
            for micro_batch in 0..2 {
                self.seen.steps[micro_batch] += device.steps[micro_batch];
                self.seen.rows[micro_batch] += device.rows[micro_batch];
            }
        }
        self.seen.ethernet_bytes = self.fabric.ethernet_bytes;
        self.seen.nvlink_bytes = self.fabric.nvlink_bytes;
        self.seen.moved_blocks = self.gmanager.stats().blocks_moved;
        for node in &self.nodes {
            let status = node.instance.status();
            self.seen.preemptions += status.preemptions;
            self.seen.recoveries += status.recoveries;
        }
    }

    fn happen(&mut self, what: What) {
        let now = self.agenda.now_us();
        match what {
            What::Tick(at) => {
                self.handle(at, Event::Tick, &BTreeMap::new());
                self.agenda.after(TICK_MS * 1000, What::Tick(at));
            }
            What::GManagerTick => {
                self.gmanager.tick(now / 1000);
                self.send_orders();
                if now / SAMPLE_US > self.seen.samples.last().map_or(0, |s| s.at_us / SAMPLE_US) {
                    self.sample();
                }
                self.agenda.after(TICK_MS * 1000, What::GManagerTick);
            }
            What::Arrive(index) => self.arrive(index),
            What::Instance(at, event) => self.handle(at, event, &BTreeMap::new()),
            What::GManager(from, body) => {
                let id = Some(InstanceId(self.number(from)));
                if let Some(answer) = self.gmanager.on_control(id, &body, now / 1000) {
                    self.agenda.after(CONTROL_US, What::Instance(from, Event::GManager(answer)));
                }
                self.send_orders();
            }
            What::Device(at, version) => {
                if self.nodes[at].device.version == version {
                    self.collect(at);
                }
            }
        }
    }

    /// Sends the gManager's messages to other instances than the requester.
    fn send_orders(&mut self) {
        while let Some(GManagerOutput::Send { to, body }) = self.gmanager.poll() {
            let at = to.0 as usize - 1;
            self.agenda.after(CONTROL_US, What::Instance(at, Event::GManager(body)));
        }
    }

    /// The number from the gManager: registrations arrive in the order of the instances.
    #[allow(clippy::unused_self, reason = "a fact of this world")]
    fn number(&self, index: usize) -> u32 {
        u32::try_from(index + 1).unwrap_or(u32::MAX)
    }

    fn sample(&mut self) {
        let mut sample = Sample { at_us: self.agenda.now_us(), ..Sample::default() };
        let mut free = 0.0;
        for node in &self.nodes {
            let counts = node.instance.rmanager().pool.counts();
            sample.borrowed += node.instance.rmanager().debtor.held.blocks();
            free += f64::from(counts.free);
            sample.running += node.running as f64;
        }
        sample.memory_used = 1.0 - free / (f64::from(self.setting.blocks()) * self.nodes.len() as f64);
        self.seen.borrowed_max = self.seen.borrowed_max.max(sample.borrowed);
        self.seen.samples.push(sample);
    }

    /// Sends a request to the instance with the most free memory (v2 §7.1), minus the tokens that wait there.
    fn arrive(&mut self, index: usize) {
        let request = self.requests[index];
        let tokens = i64::from(self.setting.block_tokens);
        let free = |n: &Node| i64::from(n.instance.rmanager().pool.counts().free) * tokens - n.unstarted_tokens as i64;
        let best = (0..self.nodes.len()).max_by_key(|at| (free(&self.nodes[*at]), std::cmp::Reverse(*at)));
        let Some(at) = best else { return };
        self.sent_to[index] = Some(at);
        self.nodes[at].unstarted_tokens += u64::from(request.prompt_tokens);
        let request = GenerateRequest {
            prompt: vec![0; request.prompt_tokens as usize],
            answered: 0,
            max_tokens: request.output_tokens,
            sampling: SamplingParams::default(),
            min_tokens: 0,
            stop_ids: Vec::new(),
            return_logits: false,
        };
        self.handle(at, Event::Submit { seq: SeqId(index as u64), request }, &BTreeMap::new());
    }

    fn collect(&mut self, at: usize) {
        let now = self.agenda.now_us();
        for BilledReport { report, billed_rows } in self.nodes[at].device.collect(now) {
            self.handle(at, Event::Runner(report), &billed_rows);
        }
        self.plan_device(at);
    }

    fn plan_device(&mut self, at: usize) {
        let device = &self.nodes[at].device;
        if let Some(next) = device.next_us(self.agenda.now_us()) {
            self.agenda.at(next, What::Device(at, device.version));
        }
    }

    /// Hands an event to an instance and carries out its effects.
    fn handle(&mut self, at: usize, event: Event, billed: &BTreeMap<InstanceId, u32>) {
        let now = self.agenda.now_us();
        let written = matches!(event, Event::Runner(Report::Written { .. }));
        let effects = self.nodes[at].instance.handle(event, now / 1000);
        crate::effects::note(at, &effects);
        let version = self.nodes[at].device.version;
        for effect in effects {
            self.carry_out(at, effect, billed, written);
        }
        if self.nodes[at].device.version != version {
            self.plan_device(at);
        }
    }

    fn carry_out(&mut self, at: usize, effect: Effect, billed: &BTreeMap<InstanceId, u32>, written: bool) {
        let now = self.agenda.now_us();
        match effect {
            Effect::ToGManager(body) => self.agenda.after(CONTROL_US, What::GManager(at, body)),
            // All instances are connected from the start.
            Effect::Connect { .. } | Effect::Close { .. } => {}
            Effect::Control { peer, body } => {
                let to = peer.0 as usize;
                let arrives = self.fabric.send(at, to, Class::Control, SMALL_FRAME_BYTES, 1.0, now + CONTROL_US);
                self.deliver(arrives, to, Event::Control { peer: PeerKey(at as u64), body });
            }
            Effect::Partials { peer, frame } => {
                let to = peer.0 as usize;
                let (bytes, hops) = self.partials_cost(&frame, to, billed);
                let arrives = self.fabric.send(at, to, Class::Partials, bytes, hops, now);
                self.seen.exchange_us += if hops > 1.0 { arrives - now } else { 0 };
                self.deliver(arrives, to, Event::Partials { peer: PeerKey(at as u64), frame });
            }
            Effect::Bulk { peer, frame } => {
                let to = peer.0 as usize;
                let bytes = self.bulk_cost(&frame, at, written);
                let class = if written { Class::Growth } else { Class::Bulk };
                let arrives = self.fabric.send(at, to, class, bytes, 1.0, now);
                self.deliver(arrives, to, Event::Bulk { peer: PeerKey(at as u64), frame });
            }
            Effect::Runner(command) => self.nodes[at].device.push(command, now),
            Effect::Emit { seq, event } => self.emit(at, seq.0 as usize, &event),
            Effect::Transfer(_) | Effect::Map { .. } => panic!("simulated instances share no memory"),
            Effect::Drained => {}
            Effect::Rejected { reason } => panic!("the gManager refused a simulated instance: {reason}"),
        }
    }

    fn deliver(&mut self, at_us: u64, to: usize, event: Event) {
        self.agenda.at(at_us, What::Instance(to, event));
    }

    /// Modelled bytes and number of latencies: a frame stands for one frame in every layer, sequentially.
    fn partials_cost(&self, frame: &PartialsFrame, to: usize, billed: &BTreeMap<InstanceId, u32>) -> (f64, f64) {
        let model = self.setting.timing.model;
        let (rows, row_bytes) = match frame {
            PartialsFrame::Query { .. } => {
                (billed.get(&InstanceId(self.number(to))).copied().unwrap_or(0), model.query_row_bytes())
            }
            PartialsFrame::Partial { .. } => {
                (billed.get(&InstanceId(0)).copied().unwrap_or(0), model.partial_row_bytes())
            }
            _ => (0, 0.0),
        };
        let layers = if rows > 0 { f64::from(model.layers) } else { 1.0 };
        (f64::from(rows) * row_bytes + SMALL_FRAME_BYTES, layers)
    }

    fn bulk_cost(&self, frame: &BulkFrame, at: usize, written: bool) -> f64 {
        let token_bytes = self.setting.timing.model.kv_token_bytes();
        let tokens = match frame {
            // Resident prompts' KV is already there.
            BulkFrame::Write { tokens, .. }
                if written && *tokens > 1 && self.nodes[at].device.prefill() == Prefill::Resident =>
            {
                0
            }
            BulkFrame::Write { tokens, .. } | BulkFrame::Data { tokens, .. } => *tokens,
            _ => 0,
        };
        f64::from(tokens) * token_bytes + SMALL_FRAME_BYTES
    }

    fn emit(&mut self, at: usize, index: usize, event: &TokenEvent) {
        let now = self.agenda.now_us();
        let outcome = &mut self.seen.outcomes[index];
        let started = outcome.first_us.is_some();
        match event {
            TokenEvent::Token { .. } => {
                self.nodes[at].running += i64::from(!started);
                outcome.first_us.get_or_insert(now);
                outcome.tokens += 1;
                let bucket = (now / Seen::BUCKET_US) as usize;
                if self.seen.tokens.len() <= bucket {
                    self.seen.tokens.resize(bucket + 1, 0);
                }
                self.seen.tokens[bucket] += 1;
            }
            TokenEvent::Finished { .. } => {
                outcome.end_us = Some(now);
                self.nodes[at].running -= i64::from(started);
                self.open -= 1;
            }
            TokenEvent::Failed(_) => {
                outcome.failed = true;
                self.nodes[at].running -= i64::from(started);
                self.open -= 1;
            }
        }
        if !started {
            let prompt = u64::from(self.requests[index].prompt_tokens);
            self.nodes[at].unstarted_tokens -= prompt.min(self.nodes[at].unstarted_tokens);
        }
    }
}

/// Instances register and meet before the first request comes.
pub const WARM_UP_US: u64 = 1_000_000;
