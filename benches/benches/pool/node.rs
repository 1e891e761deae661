//! One process of the benchmark: an instance with its device thread and transport, in the loop of `lagoon serve`. The
//! gManager takes no part in a step; its replies are fixed here.
//!
//! Differences from `apps/lagoon/src/node.rs`: it measures between an event and its effects (`Clock::mark` around
//! [`Side::step`]), pauses at the end of a step, answers in the gManager's place, and has no clients, leader or
//! drain. The two share the order in which they take events, ten lines of [`Side::turn`].

use crate::timed::{Clock, Timed};
use crate::{PolicyArg, Scenario, as_u32};
use anyhow::{Context, Result, bail};
use lagoon_benches::quic::Pem;
use lagoon_instance::{
    Effect, Event, Instance, InstanceConfig, JointConfig, LayerWindows, PeerKey, RemotePolicy, SchedulerConfig, TICK_MS,
};
use lagoon_protocol::{
    BorrowAdvice, Candidate, ControlBody, HeartbeatAck, MemoryTier, PartialsFrame, Registered, Role, VERSION_MAX,
};
use lagoon_runner::{Executor, ExecutorConfig, ExecutorThread, Model, Models, Report};
use lagoon_transport::{
    Bound, Class, Event as NetEvent, Frame, Identity, Inbound, Inbox, Node, PeerId, TransportConfig,
};
use lagoon_types::limits::{BLOCK_TOKENS_DEFAULT, HEARTBEAT_MS};
use lagoon_types::{
    DType, GenerateRequest, InstanceId, KvSpace, ModelHash, RequestOptions, SamplingParams, SeqId, TokenEvent,
};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::Interval;

/// A report and when the device thread made it.
pub(crate) type Stamped = (Instant, Report);

/// The creditor's number; the debtor is [`DEBTOR`].
pub(crate) const CREDITOR: u32 = 2;
pub(crate) const DEBTOR: u32 = 1;
const STEP_ROWS: u32 = 2048;
/// As in `lagoon serve`.
const FETCH_TOKENS: u32 = 512;

/// One process of the benchmark; see the module's documentation.
pub(crate) struct Side {
    instance: Instance,
    executor: ExecutorThread,
    pub(crate) clock: Clock,
    pub(crate) reports: mpsc::UnboundedReceiver<Stamped>,
    pub(crate) net: Option<Bound>,
    /// Address of the creditor.
    creditor: Option<SocketAddr>,
    number: u32,
    started: Instant,
    tick: Interval,
    /// How long the loop polls for a due frame before it sleeps.
    poll: Duration,
    /// Time of the last event.
    last: Instant,
    /// The first sequence that failed, and why.
    failed: Option<String>,
}

fn instance_config(scenario: &Scenario, blocks: u32, quic: Option<SocketAddr>) -> InstanceConfig {
    let model = scenario.model();
    InstanceConfig {
        name: "bench".to_owned(),
        quic_addr: quic.map(|a| a.to_string()).unwrap_or_default(),
        http_addr: String::new(),
        host: String::new(),
        backend: "cpu".to_owned(),
        role: Role::Instance,
        tier: MemoryTier::Device,
        calibration: None,
        incarnation: rand::random(),
        model_hash: ModelHash([7; 32]),
        geometry: model.geometry,
        kv: model.kv_shape(DType::F16),
        window: None,
        windowed: None,
        layer_windows: LayerWindows::default(),
        attention_scale: 1.0,
        alibi: None,
        attention_softcap: None,
        max_positions: model.max_positions,
        vocab: as_u32(model.vocab),
        block_tokens: BLOCK_TOKENS_DEFAULT,
        blocks_total: blocks,
        lend_blocks_max: blocks,
        lend_reserve_blocks: 0,
        sched: SchedulerConfig { queue: 64, running: 64, step_rows: STEP_ROWS, drafts: 0, draft_model: false },
        remote: match scenario.policy {
            PolicyArg::Ship => RemotePolicy::Ship,
            PolicyArg::Fetch => RemotePolicy::Fetch,
        },
        wire: DType::F32,
        fetch_tokens: FETCH_TOKENS,
        link_bytes_per_s: 1e9,
        attention_flops: 5e10,
        prefix_cache: false,
        joint: JointConfig::OFF,
        target_step_ms: None,
        transfer: None,
        lent: None,
        peer_access: None,
    }
}

impl Side {
    /// An instance with `blocks` rBlocks, in a pool if it has a certificate.
    pub(crate) fn start(scenario: &Scenario, blocks: u32, number: u32, pem: Option<&Pem>) -> Result<Self> {
        let config = scenario.model();
        let clock = if number == CREDITOR { Clock::creditor() } else { Clock::default() };
        let mut device = Timed::new(1, clock.clone());
        let model = Model::new(&config, device.weights(&config, DType::F16)?);
        let sizes = ExecutorConfig {
            sampled_rows: 64,
            fetch_tokens: FETCH_TOKENS as usize,
            ..ExecutorConfig::alone(KvSpace::flat(blocks, BLOCK_TOKENS_DEFAULT), DType::F16.into(), STEP_ROWS as usize)
        };
        let executor = Executor::new(device, &config, Some(model), sizes)?;
        let (report, reports) = mpsc::unbounded_channel();
        let notes = clock.clone();
        let executor = lagoon_runner::spawn(Models::new(executor, None), move |r| {
            notes.on_report(&r);
            // The loop ends before the device thread does.
            let _ = report.send((Instant::now(), r));
        });
        let net = pem.map(|pem| {
            let identity = Identity::from_pem(&pem.ca, &pem.cert, &pem.key)?;
            anyhow::Ok(Node::bind(SocketAddr::from(([127, 0, 0, 1], 0)), &identity, TransportConfig::default())?)
        });
        let net = net.transpose()?;
        let quic = net.as_ref().map(|n| n.node.local_addr());
        let mut tick = tokio::time::interval(Duration::from_millis(TICK_MS));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut side = Self {
            instance: Instance::new(instance_config(scenario, blocks, quic))?,
            executor,
            clock,
            reports,
            net,
            creditor: None,
            number,
            started: Instant::now(),
            tick,
            poll: Duration::from_micros(scenario.poll_us),
            last: Instant::now(),
            failed: None,
        };
        if side.net.is_some() {
            side.step(Event::GManagerUp);
        }
        Ok(side)
    }

    pub(crate) fn instance(&self) -> &Instance {
        &self.instance
    }

    /// Sets the creditor of all borrows.
    pub(crate) fn borrow_from(&mut self, creditor: SocketAddr) {
        self.creditor = Some(creditor);
    }

    pub(crate) fn submit(&mut self, scenario: &Scenario) {
        for seq in 0..scenario.batch {
            let request = GenerateRequest {
                prompt: vec![1 + seq; scenario.context as usize],
                answered: 0,
                max_tokens: scenario.tokens_max(),
                sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
                min_tokens: 0,
                stop_ids: Vec::new(),
                return_logits: false,
                options: RequestOptions::default(),
            };
            self.step(Event::Submit { seq: SeqId(u64::from(seq)), request: Box::new(request) });
        }
    }

    /// Runs until a step's end, which is left unhandled: the instance pauses. [`Side::step`] handles it.
    pub(crate) async fn until_done(&mut self) -> Result<Stamped> {
        loop {
            if let Some(why) = self.failed.take() {
                bail!("a sequence failed: {why}");
            }
            if let Some(done) = self.turn().await? {
                return Ok(done);
            }
        }
    }

    /// Handles the next event, in the order of `lagoon serve`'s loop; returns a step's end unhandled.
    pub(crate) async fn turn(&mut self) -> Result<Option<Stamped>> {
        let polls = self.instance.expects_frames() && self.last.elapsed() < self.poll;
        let Self { net, reports, instance, tick, .. } = self;
        let (events, partials, bulk) = match net {
            Some(Bound { events, partials, bulk, .. }) => (Some(events), Some(partials), Some(bulk)),
            None => (None, None, None),
        };
        let event = tokio::select! {
            biased;
            Some(event) = recv(events) => match event {
                NetEvent::Up { peer, .. } => Event::PeerUp { peer: PeerKey(peer.0) },
                NetEvent::Control { peer, message, .. } => {
                    Event::Control { peer: PeerKey(peer.0), body: message.body.context("a known message")? }
                }
                other => bail!("the network failed: {other:?}"),
            },
            Some((at, report)) = reports.recv() => match report {
                Report::Done { .. } => return Ok(Some((at, report))),
                Report::Failed { error, .. } => bail!("a step failed: {error}"),
                report => Event::Runner(report),
            },
            Some(Inbound { peer, frame, .. }) = recv(partials) => Event::Partials { peer: PeerKey(peer.0), frame },
            _ = tick.tick() => Event::Tick,
            Some(Inbound { peer, frame, .. }) = recv(bulk), if instance.takes_bulk() => {
                Event::Bulk { peer: PeerKey(peer.0), frame }
            }
            // Yields to the network once.
            () = tokio::task::yield_now(), if polls => return Ok(None),
        };
        if !matches!(event, Event::Tick) {
            self.last = Instant::now();
        }
        let stage = match &event {
            Event::Runner(Report::Queries { frames, .. }) if !frames.is_empty() => Some((1, Some(2))),
            Event::Runner(Report::RemotePartial { .. }) => Some((6, Some(7))),
            Event::Partials { frame: PartialsFrame::Query { .. }, .. } => Some((3, None)),
            Event::Partials { frame: PartialsFrame::Partial { .. }, .. } => Some((8, None)),
            _ => None,
        };
        if let Some((taken, _)) = stage {
            self.clock.mark(taken);
        }
        self.step(event);
        if let Some((_, Some(sent))) = stage {
            self.clock.mark(sent);
        }
        Ok(None)
    }

    pub(crate) fn step(&mut self, event: Event) {
        let mut pending = vec![event];
        while let Some(event) = pending.pop() {
            let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            for effect in self.instance.handle(event, now) {
                pending.extend(self.apply(effect));
            }
        }
    }

    fn apply(&mut self, effect: Effect) -> Option<Event> {
        match effect {
            Effect::ToGManager(body) => return self.advise(body).map(Event::GManager),
            Effect::Connect { quic_addr, .. } => {
                let node = &self.net.as_ref()?.node;
                node.connect(quic_addr.parse().ok()?, &Class::ALL);
            }
            Effect::Control { peer, body } => self.send(peer, &Frame::Control(body.into())),
            Effect::Partials { peer, frame } => self.send(peer, &Frame::Partials(frame)),
            Effect::Bulk { peer, frame } => self.send(peer, &Frame::Bulk(frame)),
            Effect::Runner(command) => {
                if self.executor.send(command).is_err() {
                    self.failed = Some("the device thread has ended".to_owned());
                }
            }
            Effect::Emit { event: TokenEvent::Failed(error), .. } => self.failed = Some(error.to_string()),
            Effect::Close { reason, .. } | Effect::Rejected { reason } => self.failed = Some(reason),
            Effect::Emit { event: TokenEvent::Finished { .. }, .. } => {
                self.failed = Some("it ended before enough steps were measured".to_owned());
            }
            Effect::Emit { .. } | Effect::Transfer(_) | Effect::Disk(_) | Effect::Map { .. } | Effect::Drained => {}
        }
        None
    }

    fn send(&mut self, peer: PeerKey, frame: &Frame) {
        let sent = self.net.as_ref().map(|net| net.node.try_send(PeerId(peer.0), frame));
        if let Some(Err(error)) = sent {
            self.failed = Some(error.to_string());
        }
    }

    /// The gManager's replies in a pool of two.
    fn advise(&self, body: ControlBody) -> Option<ControlBody> {
        const MANY: u32 = 1 << 24;
        match body {
            ControlBody::Register(_) => Some(ControlBody::Registered(Registered {
                version: VERSION_MAX,
                instance: self.number,
                heartbeat_ms: HEARTBEAT_MS,
                ..Default::default()
            })),
            ControlBody::Heartbeat(_) => Some(ControlBody::HeartbeatAck(HeartbeatAck {
                known: true,
                pool_blocks_total: MANY.into(),
                ..Default::default()
            })),
            ControlBody::BorrowQuery(query) => {
                let candidate = |addr: SocketAddr| Candidate {
                    instance: InstanceId(CREDITOR).0,
                    quic_addr: addr.to_string(),
                    blocks_lendable: MANY,
                    host: 0,
                };
                Some(ControlBody::BorrowAdvice(BorrowAdvice {
                    query: query.query,
                    candidates: self.creditor.map(candidate).into_iter().collect(),
                    pool_blocks_total: MANY.into(),
                    pool_blocks_lendable: MANY.into(),
                    ..Default::default()
                }))
            }
            _ => None,
        }
    }
}

async fn recv<T>(inbox: Option<&mut Inbox<T>>) -> Option<T> {
    match inbox {
        Some(inbox) => inbox.recv().await,
        None => std::future::pending().await,
    }
}
