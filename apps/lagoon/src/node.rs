//! The loop around `Instance::handle`: turns inputs from the transport, the device thread, HTTP and the clock into
//! events, and carries out the effects. All decisions are in the instance.

use crate::cache_dir::{self, CacheDir};
use crate::cache_tiers::Opened;
use crate::leader::Leader;
use crate::lent_memory::{Fetched, Fetches};
use crate::moment::Moment;
use crate::next_input::{next_completion, recv};
use crate::node_metrics::{NodeMetrics, record_certificate, record_prefill_times};
use crate::node_status::{About, NodeStatus};
use crate::numbers::{Claim, Numbers};
use crate::partial_waits::PartialWaits;
use crate::pool_client::role_name;
use crate::tier_kind::TierKind;
use crate::transfers::{Completion, Transfers};
use crate::turn::Turn;
use crate::{permissions, shutdown};
use anyhow::Context as _;
use lagoon_backend::DeviceError;
use lagoon_instance::{DiskEvent, Effect, Event, Instance, InstanceStatus, PeerKey, TICK_MS, TransferEffect};
use lagoon_protocol::{
    AdminBody, AdminDrain, AdminQuery, BulkFrame, ControlBody, Deregister, DrainOrder, PartialsFrame,
};
use lagoon_runner::{Command, ExecutorThread, Report};
use lagoon_transport::{
    Bound, Class, Event as NetEvent, Frame, Identity, Inbound, Node, NodeRole, PeerId, Roles, Subject, TransportConfig,
};
use lagoon_types::limits::DEVICE_STUCK_MS;
use lagoon_types::{GenerateRequest, InstanceId, RequestError, SeqId, TokenEvent};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Interval;
use tokio_util::sync::CancellationToken;

/// Inputs from HTTP handlers to the loop.
#[derive(Debug)]
pub(crate) enum Input {
    Submit { seq: SeqId, request: Box<GenerateRequest>, events: mpsc::Sender<TokenEvent> },
    Cancel { seq: SeqId },
    Status { reply: oneshot::Sender<NodeStatus> },
}

/// State that HTTP handlers read without asking the loop.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Tokens that the whole pool could hold.
    pub(crate) pool_tokens: Mutex<u64>,
    /// Whether it drains, or changes to a role without requests: dispatchers shall choose another instance.
    pub(crate) leaving: AtomicBool,
}

impl Shared {
    pub(crate) fn new(instance: &Instance) -> Self {
        Self { pool_tokens: Mutex::new(instance.pool_tokens()), leaving: AtomicBool::new(false) }
    }
}

/// The pool side of a node: its transport and the gManagers' addresses.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) bound: Bound,
    pub(crate) gmanagers: Vec<SocketAddr>,
    /// Address for peers, if not the one listened on.
    pub(crate) advertise: Option<SocketAddr>,
}

impl Pool {
    /// Opens an endpoint on `listen`. Call it within the runtime of its loop.
    pub(crate) fn join(
        listen: SocketAddr,
        advertise: Option<SocketAddr>,
        identity: &Identity,
        gmanagers: &[SocketAddr],
    ) -> anyhow::Result<Self> {
        let config = TransportConfig { advertise, ..TransportConfig::default() };
        let bound = Node::bind(listen, identity, config).with_context(|| format!("accept peers on {listen}"))?;
        Ok(Self { bound, gmanagers: gmanagers.to_vec(), advertise })
    }

    /// Address at which peers reach it.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.advertise.unwrap_or_else(|| self.bound.node.local_addr())
    }
}

/// A peer's session.
#[derive(Debug)]
struct Session {
    number: u64,
    /// Its certificate's subject.
    subject: Subject,
    /// Whether a refusal was logged.
    refusal_logged: bool,
}

#[derive(Debug)]
enum Happened {
    Stop,
    Drain,
    Net(NetEvent),
    Report(Report),
    /// The device thread has ended.
    DeviceEnded,
    Partials(Inbound<PartialsFrame>),
    Bulk(Inbound<BulkFrame>),
    Input(Input),
    Completion(Completion),
    Fetched(Fetched),
    Disk(DiskEvent),
    Tick,
    /// Nothing happened: the loop polls.
    Nothing,
}

impl Session {
    /// Logs dropped messages, once per session.
    fn refuse(&mut self, peer: PeerId, reason: &str) {
        if !std::mem::replace(&mut self.refusal_logged, true) {
            tracing::warn!(%peer, node = %self.subject.node, reason, "messages of a peer are dropped");
        }
    }
}

/// The loop of one node. See the module's documentation.
#[derive(Debug)]
pub(crate) struct NodeLoop {
    instance: Instance,
    executor: ExecutorThread,
    reports: mpsc::UnboundedReceiver<Report>,
    inputs: mpsc::Receiver<Input>,
    pool: Option<Pool>,
    leader: Option<Leader>,
    transfers: Option<Transfers>,
    fetches: Fetches,
    cache_dir: Option<CacheDir>,
    sessions: HashMap<PeerId, Session>,
    numbers: Numbers,
    outputs: BTreeMap<SeqId, mpsc::Sender<TokenEvent>>,
    about: About,
    metrics: NodeMetrics,
    waits: PartialWaits,
    shared: Arc<Shared>,
    /// Start, on a clock that counts suspend, as peers' lease times do.
    started: Moment,
    /// How long the loop polls for a due frame before it sleeps. Waking a sleeping core costs more than a frame's whole
    /// way between two that are awake.
    poll: Duration,
    /// A device that finishes no layer for this long hangs.
    device_timeout: Duration,
    /// Time of the last input, ticks excluded.
    last: Instant,
    fatal: Option<String>,
    /// Whether an error of the draft model was logged.
    draft_failed: bool,
    drain: Drain,
    turn: Turn<Happened>,
}

/// Time for a failing instance to send its deregistration.
const DEREGISTER_DEADLINE: Duration = Duration::from_millis(200);

/// A drain requested from this process (SIGTERM).
#[derive(Debug, Default)]
struct Drain {
    asked: CancellationToken,
    begun: bool,
    /// Whether nothing is left here.
    done: bool,
}

impl NodeLoop {
    pub(crate) fn new(
        about: About,
        instance: Instance,
        executor: ExecutorThread,
        reports: mpsc::UnboundedReceiver<Report>,
        inputs: mpsc::Receiver<Input>,
        pool: Option<Pool>,
        shared: Arc<Shared>,
    ) -> Self {
        let leader = pool.as_ref().map(|p| Leader::new(&p.bound.node, &p.gmanagers));
        Self {
            instance,
            executor,
            reports,
            inputs,
            pool,
            leader,
            transfers: None,
            fetches: Fetches::new(),
            cache_dir: None,
            sessions: HashMap::new(),
            numbers: Numbers::default(),
            outputs: BTreeMap::new(),
            metrics: NodeMetrics::default(),
            waits: PartialWaits::default(),
            about,
            shared,
            started: Moment::now(),
            poll: Duration::ZERO,
            device_timeout: Duration::from_millis(DEVICE_STUCK_MS),
            last: Instant::now(),
            fatal: None,
            draft_failed: false,
            drain: Drain::default(),
            turn: Turn::default(),
        }
    }

    /// Adds KV transfer: exports its KV, and reads peers' KV.
    #[must_use]
    pub(crate) fn transferring(self, transfers: Option<Transfers>) -> Self {
        Self { transfers, ..self }
    }

    /// Adds the disk tier of its prefix cache, whose blocks it learns before anything else.
    #[must_use]
    pub(crate) fn caching_in(mut self, opened: Option<Opened>) -> Self {
        let (cache_dir, found) = opened.unzip();
        self.cache_dir = cache_dir;
        found.into_iter().for_each(|found| self.step(Event::Disk(found)));
        self
    }

    /// Marks it as additional memory of an instance, for the metrics' names.
    #[must_use]
    pub(crate) fn beside(self, kind: TierKind) -> Self {
        Self { metrics: NodeMetrics::beside(kind), ..self }
    }

    /// Begins a drain when `asked` is cancelled; the loop ends when it is done.
    #[must_use]
    pub(crate) fn draining_on(self, asked: CancellationToken) -> Self {
        Self { drain: Drain { asked, ..Drain::default() }, ..self }
    }

    /// Sets how long to poll for due frames before sleeping.
    #[must_use]
    pub(crate) fn polling(self, poll: Duration) -> Self {
        Self { poll, ..self }
    }

    /// Sets how long the device may go without finishing a layer.
    #[must_use]
    pub(crate) fn with_device_timeout(self, device_timeout: Duration) -> Self {
        Self { device_timeout, ..self }
    }

    /// Runs until `stop`, or until the instance fails with the returned error. In both cases its requests are aborted, and
    /// peers and the gManager see its connections close. If the device hangs, the process ends here.
    pub(crate) async fn run(mut self, stop: CancellationToken) -> anyhow::Result<()> {
        let fatal = self.run_until_over(&stop).await;
        // A gateway may have another instance go on with these requests.
        for (_, output) in std::mem::take(&mut self.outputs) {
            drop(output.try_send(TokenEvent::Failed(gone())));
        }
        if fatal.is_some() {
            self.deregister().await;
        }
        if let Some(pool) = &self.pool {
            pool.bound.node.close(Duration::from_millis(500)).await;
        }
        match fatal {
            Some(reason) if self.stuck_for().is_some() => shutdown::at_once(&reason),
            Some(reason) => Err(anyhow::anyhow!(reason)),
            None => Ok(()),
        }
    }

    /// Tells the gManager that nothing is to be sent here any more: it would find out by silence.
    async fn deregister(&self) {
        let (Some(id), Some(node)) = (self.instance.status().instance, self.node()) else { return };
        let Some(gmanager) = self.leader.as_ref().and_then(Leader::current) else { return };
        let left = ControlBody::Deregister(Deregister { instance: id.0 });
        if let Err(error) = node.send(gmanager, &Frame::Control(left.into()), DEREGISTER_DEADLINE).await {
            tracing::debug!(%error, "the gManager was not informed that this instance ends");
        }
    }

    /// For how long the device has not finished a layer, once that is longer than any layer.
    fn stuck_for(&self) -> Option<Duration> {
        self.executor.stuck_for().filter(|stuck| *stuck > self.device_timeout)
    }

    /// Runs; returns why it cannot go on, `None` if stopped.
    async fn run_until_over(&mut self, stop: &CancellationToken) -> Option<String> {
        let mut tick = tokio::time::interval(Duration::from_millis(TICK_MS));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut ticks = 0u64;
        loop {
            let happened = self.next(stop, &mut tick).await;
            if !matches!(happened, Happened::Tick | Happened::Nothing) {
                self.last = Instant::now();
            }
            match happened {
                Happened::Stop => return None,
                Happened::Drain => {
                    self.drain.begun = true;
                    self.shared.leaving.store(true, Relaxed);
                    self.order_drain();
                }
                Happened::Net(event) => self.on_net(event),
                Happened::Report(report) => {
                    self.note_report(&report);
                    self.step(Event::Runner(report));
                }
                Happened::DeviceEnded => self.fatal = Some("the device thread has ended".to_owned()),
                Happened::Partials(Inbound { peer, session, frame }) => {
                    if self.admit(peer, session, |roles| permissions::partials(roles, &frame)) {
                        if let PartialsFrame::Partial { step, layer, .. } = &frame {
                            self.waits.came(*step, *layer, self.last);
                        }
                        self.step(Event::Partials { peer: PeerKey(peer.0), frame });
                    }
                }
                Happened::Bulk(Inbound { peer, session, frame }) => {
                    if self.admit(peer, session, |roles| permissions::bulk(roles, &frame)) {
                        self.step(Event::Bulk { peer: PeerKey(peer.0), frame });
                    }
                }
                Happened::Input(input) => self.on_input(input),
                Happened::Completion(completion) => {
                    let event = self.transfers.as_mut().and_then(|transfers| transfers.on_completion(completion));
                    event.into_iter().for_each(|event| self.step(Event::Transfer(event)));
                }
                Happened::Fetched(fetched) => self.on_fetched(fetched),
                Happened::Disk(event) => self.step(Event::Disk(event)),
                Happened::Nothing => {}
                Happened::Tick => {
                    ticks += 1;
                    self.on_tick(ticks);
                }
            }
            // Last events of requests are in their own channels by now.
            if self.fatal.is_some() || self.drain.done {
                return self.fatal.take();
            }
        }
    }

    /// The next input: latency-bound ones first, the bulk class last.
    async fn next(&mut self, stop: &CancellationToken, tick: &mut Interval) -> Happened {
        let polls = self.instance.expects_frames() && self.last.elapsed() < self.poll;
        let others_first = self.turn.advance();
        let Self { pool, reports, inputs, instance, drain, transfers, fetches, cache_dir, turn, .. } = self;
        if others_first {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Happened::Stop,
                () = drain.asked.cancelled(), if !drain.begun => return Happened::Drain,
                _ = tick.tick() => return Happened::Tick,
                report = reports.recv() => return report.map_or(Happened::DeviceEnded, Happened::Report),
                Some(input) = inputs.recv() => return Happened::Input(input),
                Some(completion) = next_completion(transfers.as_mut()) => return Happened::Completion(completion),
                Some(fetched) = fetches.next() => return Happened::Fetched(fetched),
                Some(event) = cache_dir::next(cache_dir.as_mut()) => return Happened::Disk(event),
                // No other input waits: back to the network.
                () = std::future::ready(()) => turn.network(),
            }
        }
        if let Some((held, waiting)) = turn.held() {
            return self.in_order(held, Some(waiting));
        }
        let (events, partials, bulk) = match pool {
            Some(Pool { bound: Bound { events, partials, bulk, .. }, .. }) => {
                (Some(events), Some(partials), Some(bulk))
            }
            None => (None, None, None),
        };
        let happened = tokio::select! {
            biased;
            () = stop.cancelled() => Happened::Stop,
            () = drain.asked.cancelled(), if !drain.begun => Happened::Drain,
            Some(event) = recv(events) => Happened::Net(event),
            report = reports.recv() => report.map_or(Happened::DeviceEnded, Happened::Report),
            Some(inbound) = recv(partials) => Happened::Partials(inbound),
            Some(input) = inputs.recv() => Happened::Input(input),
            Some(completion) = next_completion(transfers.as_mut()) => Happened::Completion(completion),
            Some(fetched) = fetches.next() => Happened::Fetched(fetched),
            Some(event) = cache_dir::next(cache_dir.as_mut()) => Happened::Disk(event),
            _ = tick.tick() => Happened::Tick,
            Some(inbound) = recv(bulk), if instance.takes_bulk() => Happened::Bulk(inbound),
            () = tokio::task::yield_now(), if polls => Happened::Nothing,
        };
        self.in_order(happened, None)
    }

    /// A data frame comes after the events that wait as it arrives, `waiting` of which are left: it may have overtaken its session's
    /// announcement.
    fn in_order(&mut self, happened: Happened, waiting: Option<usize>) -> Happened {
        match (&happened, &mut self.pool) {
            (Happened::Partials(_) | Happened::Bulk(_), Some(pool)) => {
                let events = &mut pool.bound.events;
                self.turn.in_order(happened, waiting.unwrap_or(events.len()), || events.try_recv().map(Happened::Net))
            }
            _ => happened,
        }
    }

    /// Records waits for creditors from a report.
    fn note_report(&mut self, report: &Report) {
        match report {
            Report::Queries { step, layer, frames } => self.waits.sent(*step, *layer, frames.len(), self.last),
            Report::Done { step, .. } => drop(self.waits.done(*step)),
            report if let Some(why) = report.lost_device() => self.lose_device(why),
            Report::Failed { step, .. } => self.waits.failed(*step),
            Report::Drafted { error: Some(why), .. } if !std::mem::replace(&mut self.draft_failed, true) => {
                tracing::warn!(
                    "the draft model fails, and is tried again now and then; text is looked up instead: {why}"
                );
            }
            Report::Mapped { error: Some(why), .. } => tracing::warn!(
                "queries are sent to a creditor on this host: its device memory cannot be mapped: {why}\n\
                 hint: both need the same GPU or GPUs with peer access, and one user and mount namespace"
            ),
            _ => {}
        }
    }

    /// Ends the node: nothing works on a lost device, and nobody should wait for it.
    fn lose_device(&mut self, why: &str) {
        let hint = "start the instance again; the driver's messages (`dmesg`, `nvidia-smi`) may say why";
        self.fatal = Some(format!("the device was lost: {why}\nhint: {hint}"));
    }

    /// Handles a creditor's memory that was fetched for mapping, or the failure.
    fn on_fetched(&mut self, Fetched { map, blocks, memory }: Fetched) {
        match memory {
            Ok(memory) => drop(self.apply(Effect::Runner(Command::Map { map, blocks, memory }))),
            Err(why) => {
                let report = Report::Mapped { map, error: Some(DeviceError::Unsupported(why)) };
                self.note_report(&report);
                self.step(Event::Runner(report));
            }
        }
    }

    fn node(&self) -> Option<&Node> {
        self.pool.as_ref().map(|p| &p.bound.node)
    }

    /// Admits a frame for the instance if its session is current and the peer's certificate allows it. Logs a session's
    /// first refusal.
    fn admit(&mut self, peer: PeerId, session: u64, may: impl Fn(Roles) -> bool) -> bool {
        let Some(session) = self.sessions.get_mut(&peer).filter(|of| of.number == session) else { return false };
        let may = may(session.subject.roles);
        if !may {
            session.refuse(peer, "data frames that its certificate does not allow");
        }
        may
    }

    /// Admits a peer's control message for the instance. A Hello with a number that is another's waits until it is not.
    fn admit_control(&mut self, peer: PeerId, body: &ControlBody) -> bool {
        let advised = match body {
            ControlBody::Hello(hello) => self.numbers.address(hello.instance),
            _ => None,
        };
        let reached = advised.zip(self.node()).is_some_and(|(addr, node)| node.is_reached(peer, addr));
        let Some(session) = self.sessions.get_mut(&peer) else { return false };
        if let Err(reason) = permissions::at_instance(session.subject.roles, body) {
            session.refuse(peer, &reason);
            return false;
        }
        let ControlBody::Hello(hello) = body else { return true };
        let claim = Claim { number: hello.instance, peer, subject: &session.subject, reached };
        let claimed = self.numbers.claim(claim, Instant::now());
        if let Err(reason) = &claimed {
            session.refuse(peer, reason);
            self.numbers.wait(peer, &session.subject, hello);
        }
        claimed.is_ok()
    }

    /// Handles Hellos that were refused, where their numbers are free now.
    fn claim_again(&mut self) {
        for (peer, hello) in self.numbers.waiting() {
            let body = ControlBody::Hello(Box::new(hello));
            if self.admit_control(peer, &body) {
                self.step(Event::Control { peer: PeerKey(peer.0), body });
            }
        }
    }

    fn on_net(&mut self, event: NetEvent) {
        match event {
            NetEvent::Up { peer, session, addr, subject, .. } => {
                tracing::debug!(%peer, %addr, node = %subject.node, "connected");
                self.sessions.insert(peer, Session { number: session, subject, refusal_logged: false });
                match &mut self.leader {
                    Some(leader) if leader.is_gmanager(peer) => {
                        leader.on_up(peer);
                        self.choose_leader();
                    }
                    _ => self.step(Event::PeerUp { peer: PeerKey(peer.0) }),
                }
            }
            NetEvent::Down { peer, reason, .. } => {
                self.sessions.remove(&peer);
                self.numbers.down(peer, Instant::now());
                match &mut self.leader {
                    Some(leader) if leader.is_gmanager(peer) => {
                        if leader.on_down(peer) {
                            tracing::warn!(reason, "the gManager is lost; running requests continue");
                            self.step(Event::GManagerDown);
                            self.choose_leader();
                        }
                    }
                    _ => {
                        tracing::warn!(%peer, reason, "a peer disconnected");
                        self.step(Event::PeerDown { peer: PeerKey(peer.0) });
                    }
                }
            }
            NetEvent::Unreachable { peer, addr, reason } => {
                if self.is_gmanager(peer) {
                    tracing::warn!(%addr, reason, "the gManager cannot be reached; trying again");
                } else {
                    self.step(Event::PeerDown { peer: PeerKey(peer.0) });
                }
            }
            NetEvent::Expired { peer, .. } if self.is_gmanager(peer) => {}
            NetEvent::Expired { peer, .. } => self.step(Event::SendFailed { peer: PeerKey(peer.0) }),
            // The transport has logged it.
            NetEvent::Refused { .. } => {}
            NetEvent::Control { peer, session, message } => {
                let Some(body) = message.body else { return };
                if self.sessions.get(&peer).is_none_or(|of| of.number != session) {
                    return;
                }
                if self.is_gmanager(peer) {
                    self.on_gmanager(peer, body);
                } else if self.admit_control(peer, &body) {
                    self.step(Event::Control { peer: PeerKey(peer.0), body });
                }
            }
        }
    }

    fn is_gmanager(&self, peer: PeerId) -> bool {
        self.leader.as_ref().is_some_and(|leader| leader.is_gmanager(peer))
    }

    /// Handles a gManager's message, if that is the one in use.
    fn on_gmanager(&mut self, peer: PeerId, body: ControlBody) {
        let (Some(leader), Some(pool)) = (&mut self.leader, &self.pool) else { return };
        if leader.current() != Some(peer) {
            return;
        }
        if let ControlBody::NotLeader(standby) = &body {
            let addr = standby.leader_addr.parse::<SocketAddr>().ok();
            let node = &pool.bound.node;
            let named = addr.and_then(|addr| node.connect_role(addr, &[Class::Control], NodeRole::GManager));
            tracing::info!(leader = standby.leader_addr, "a standby answered; looking for the gManager that leads");
            if leader.on_not_leader(peer, named, Instant::now()) {
                self.step(Event::GManagerDown);
            }
            return;
        }
        let term = match &body {
            ControlBody::Registered(registered) => Some(registered.term),
            ControlBody::HeartbeatAck(ack) => Some(ack.term),
            _ => None,
        };
        if let Some(term) = term.filter(|term| !leader.note_term(*term, Instant::now())) {
            tracing::warn!(%peer, term, "a gManager of an earlier term is not followed; looking for the one that leads");
            if leader.on_not_leader(peer, None, Instant::now()) {
                self.step(Event::GManagerDown);
            }
            return;
        }
        if matches!(body, ControlBody::Registered(_)) {
            leader.on_registered();
        }
        if leader.is_followed() || matches!(body, ControlBody::Rejected(_)) {
            self.step(Event::GManager(body));
        } else {
            tracing::debug!(%peer, "an order of a gManager that has not named its term is not followed");
        }
    }

    /// Sends the drain order to the instance, and to the gManager, which moves others' blocks away. Repeated, as
    /// another gManager may lead by then.
    fn order_drain(&mut self) {
        self.step(Event::GManager(ControlBody::DrainOrder(DrainOrder { on: true, stop: true })));
        if let Some(instance) = self.instance.status().instance {
            let drain = AdminBody::Drain(AdminDrain { instance: instance.0, cancel: false, stop: true });
            let query = AdminQuery { query: 0, body: Some(drain) };
            self.apply(Effect::ToGManager(ControlBody::AdminQuery(query)));
        }
    }

    fn choose_leader(&mut self) {
        if self.leader.as_mut().is_some_and(|leader| leader.choose(Instant::now()).is_some()) {
            self.step(Event::GManagerUp);
        }
    }

    fn on_input(&mut self, input: Input) {
        match input {
            Input::Submit { seq, request, events } => {
                self.outputs.insert(seq, events);
                self.step(Event::Submit { seq, request });
            }
            Input::Cancel { seq } => {
                self.outputs.remove(&seq);
                self.step(Event::Cancel { seq });
            }
            Input::Status { reply } => {
                self.share_pool_size();
                // The receiver may be dropped.
                drop(reply.send(self.status()));
            }
        }
    }

    /// Lets handlers know what the pool can hold.
    fn share_pool_size(&self) {
        *self.shared.pool_tokens.lock().unwrap_or_else(PoisonError::into_inner) = self.instance.pool_tokens();
    }

    fn status(&self) -> NodeStatus {
        let sent = |class: Class| {
            let node = self.node();
            self.sessions.keys().filter_map(|p| node?.stats(*p, class)).map(|s| s.bytes_sent).sum()
        };
        let instance = self.instance.status();
        NodeStatus {
            about: self.about.clone(),
            role: role_name(instance.role),
            becoming: instance.becoming.map(role_name),
            instance,
            control_bytes_sent: sent(Class::Control),
            partials_bytes_sent: sent(Class::Partials),
            bulk_bytes_sent: sent(Class::Bulk),
            paths: self.transfers.as_ref().map_or_else(Vec::new, |transfers| transfers.measured().to_vec()),
            carried: self.transfers.as_ref().map(Transfers::carried),
        }
    }

    fn on_tick(&mut self, ticks: u64) {
        if let Some(stuck) = self.stuck_for() {
            self.fatal = Some(format!(
                "the device has not finished a layer for {} s\nhint: look for a hung driver (`dmesg`, `nvidia-smi`)",
                stuck.as_secs()
            ));
        }
        if let Some(transfers) = &mut self.transfers {
            transfers.tick();
            self.instance.set_reading_us(transfers.reading_us());
        }
        self.step(Event::Tick);
        self.share_pool_size();
        self.choose_leader();
        if !ticks.is_multiple_of(25) {
            return;
        }
        if self.drain.begun {
            self.order_drain();
        }
        self.claim_again();
        let rtts: Vec<(PeerId, Duration)> = self
            .node()
            .map(|node| self.sessions.keys().filter_map(|p| Some((*p, node.rtt(*p)?))).collect())
            .unwrap_or_default();
        for (peer, rtt) in rtts {
            let rtt_us = u32::try_from(rtt.as_micros()).unwrap_or(u32::MAX);
            self.step(Event::Rtt { peer: PeerKey(peer.0), rtt_us });
        }
        let status = self.status();
        let InstanceStatus { draining, role, becoming, .. } = status.instance;
        self.shared.leaving.store(draining || becoming.is_some_and(|to| role.serves() && !to.serves()), Relaxed);
        self.metrics.record(&status);
        self.node().into_iter().for_each(record_certificate);
        record_prefill_times(&self.instance.take_prefill_times());
    }

    /// Passes one event to the instance, and further events for effects that failed.
    fn step(&mut self, event: Event) {
        let mut pending = vec![event];
        while let Some(event) = pending.pop() {
            let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            let mut effects = self.instance.handle(event, now);
            for effect in effects.drain(..) {
                pending.extend(self.apply(effect));
            }
            self.instance.reuse(effects);
        }
    }

    /// Carries out an effect; a failure becomes an event.
    fn apply(&mut self, effect: Effect) -> Option<Event> {
        match effect {
            Effect::ToGManager(body) => {
                let peer = self.leader.as_ref()?.current()?;
                if let Err(error) = self.node()?.try_send(peer, &Frame::Control(body.into())) {
                    tracing::debug!(%error, "no gManager was notified");
                }
                None
            }
            Effect::Connect { instance, quic_addr, is_advised } => {
                self.connect(instance, &quic_addr, is_advised);
                None
            }
            Effect::Control { peer, body } => self.send(peer, &Frame::Control(body.into())),
            Effect::Partials { peer, frame } => self.send(peer, &Frame::Partials(frame)),
            Effect::Bulk { peer, frame } => self.send(peer, &Frame::Bulk(frame)),
            Effect::Close { peer, reason } => {
                let peer = PeerId(peer.0);
                self.sessions.get_mut(&peer).into_iter().for_each(|session| session.refuse(peer, &reason));
                self.node()?.release(peer);
                None
            }
            Effect::Runner(command) => {
                if self.executor.send(command).is_err() {
                    self.fatal = Some("the device thread has ended".to_owned());
                }
                None
            }
            Effect::Disk(effect) => self.cache_dir.as_mut()?.carry_out(effect).map(Event::Disk),
            Effect::Map { map, blocks, memory } => {
                self.fetches.begin(map, blocks, memory);
                None
            }
            Effect::Transfer(effect) => {
                let transfers = self.transfers.as_mut()?;
                if let TransferEffect::ToWriter { from, body: ControlBody::TransferConnect(_) } = &effect
                    && let Some(subject) = self.numbers.holder(from.0)
                {
                    transfers.reader_is(*from, subject);
                }
                transfers.carry_out(effect);
                None
            }
            Effect::Emit { seq, event } => self.emit(seq, event),
            Effect::Drained => {
                tracing::warn!("drained: nothing is left here");
                self.drain.done = true;
                None
            }
            Effect::Rejected { reason } => {
                let hint = match reason.contains("\nhint: ") {
                    true => "",
                    false => {
                        "\nhint: all of a pool serve the same model, with the same --dtype, --kv-dtype and --block-tokens; with \
                         LongRoPE, their --max-model-len are on one side of its original context"
                    }
                };
                self.fatal = Some(format!("the gManager refused this instance: {reason}{hint}"));
                None
            }
        }
    }

    fn connect(&mut self, instance: InstanceId, quic_addr: &str, is_advised: bool) {
        let Some(pool) = &self.pool else { return };
        match quic_addr.parse() {
            Ok(addr) => {
                // All classes at once: a query must not wait for a handshake.
                let peer = pool.bound.node.connect(addr, &[Class::Control, Class::Partials, Class::Bulk]);
                if let Some(peer) = peer.filter(|_| is_advised) {
                    self.numbers.advised(instance.0, (peer, addr), Instant::now());
                }
            }
            Err(error) => tracing::warn!(%instance, quic_addr, %error, "a candidate has no usable address"),
        }
    }

    fn send(&self, peer: PeerKey, frame: &Frame) -> Option<Event> {
        let error = self.node()?.try_send(PeerId(peer.0), frame).err()?;
        tracing::warn!(peer = peer.0, %error, "a frame could not be sent");
        Some(Event::SendFailed { peer })
    }

    /// Sends a request's event to its handler. The channel holds a whole response's events unless it is very long; a
    /// client that leaves the channel full does not read, and its request is cancelled.
    fn emit(&mut self, seq: SeqId, event: TokenEvent) -> Option<Event> {
        let ends = matches!(event, TokenEvent::Finished { .. } | TokenEvent::Failed(_));
        let sent = self.outputs.get(&seq)?.try_send(event);
        if ends {
            self.outputs.remove(&seq);
            return None;
        }
        if sent.is_err() {
            self.outputs.remove(&seq);
            return Some(Event::Cancel { seq });
        }
        None
    }
}

/// The error of requests after the loop has ended.
pub(crate) fn gone() -> RequestError {
    RequestError::NotServing("the instance is shutting down".to_owned())
}
