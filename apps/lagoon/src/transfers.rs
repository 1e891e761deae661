//! KV transfer of a node: its exports, which threads of their own serve over an endpoint of their own, and the paths on
//! which it reads others' KV. The instance's loop only passes commands in and completions out; reads go on while it
//! stands still. KV is in host memory or in a shared device region.

use crate::args::{EngineArgs, KvTransferArg, TransferPathArg};
use crate::path_probe::{self, PEER_DEVICE, PathRow, SAME_DEVICE};
use crate::scratch::Scratch;
use crate::transfer_addr::Endpoint;
use crate::writers_here::{self, KnownHere};
use anyhow::Context;
use lagoon_instance::{InstanceConfig, TransferConfig, TransferEffect, TransferEvent};
use lagoon_protocol::TransferArena;
use lagoon_runner::{KvArena, KvMemory, KvRegion};
use lagoon_transfer::{
    Check, ConnId, DeviceRegion, EpochSecret, Layout, PeerRegions, Region, Span, Writer, WriterConfig, WriterOutput,
    check_blocks,
};
use lagoon_transport::direct::{
    ArenaServer, ExportServer, HostError, Landing, MemoryPath, OnEvent, Path, PathEvent, Probe, ReadJob, StreamsConfig,
    fetch_arena, fetch_region, host_identity,
};
use lagoon_transport::{Identity, Node, Subject, TransportConfig};
use lagoon_types::limits::WORKERS_MAX;
use lagoon_types::{InstanceId, SeqId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Parallel QUIC connections to one writer.
const STREAMS: usize = 2;
/// Threads that copy from one writer's memory on this host.
const COPIERS: usize = 2;

/// Completions from a node's threads to its loop.
#[derive(Debug)]
pub(crate) enum Completion {
    Event(TransferEvent),
    /// Checks of blocks to be exported.
    Checks {
        of: Part,
        checks: Result<Vec<Check>, String>,
    },
    /// A path was opened, or failed to.
    Opened {
        conn: ConnId,
        path: Result<Box<dyn Path>, String>,
    },
    /// Measured rate of a path.
    Probed(Result<PathRow, String>),
    /// A worker's shared device region could not be mapped: its KV passes through the host.
    NoRegion {
        writer: InstanceId,
        why: String,
    },
}

/// A part to export: see [`TransferEffect::Export`].
#[derive(Debug)]
pub(crate) struct Part {
    job: SeqId,
    reader: InstanceId,
    request: u64,
    part: Span,
    blocks: Vec<u32>,
}

/// A connection's path, open or being opened.
#[derive(Debug)]
enum Slot {
    /// Reads to start once it is open; `None` if closed meanwhile.
    Opening(Option<Vec<ReadJob>>),
    Open(Box<dyn Path>),
}

/// KV transfer of one node. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Transfers {
    server: Arc<ExportServer>,
    regions: Arc<[Arc<dyn Region>]>,
    /// The memory that they are in, if that is the device's.
    region: Option<KvRegion>,
    /// Endpoint for readers of exports only; frames of sessions are discarded.
    node: Node,
    runtime: Option<Runtime>,
    _arenas: ArenaServer,
    _sockets: Scratch,
    _here: KnownHere,
    paths: BTreeMap<ConnId, Slot>,
    meter: Meter,
    carried: Carried,
    /// Measured paths, and workers whose path's measurement was started.
    measured: Vec<PathRow>,
    probed: BTreeSet<InstanceId>,
    announce: bool,
    /// Bounded by the instance's reads in flight and exports in progress.
    sender: mpsc::UnboundedSender<Completion>,
    receiver: mpsc::UnboundedReceiver<Completion>,
}

/// Traffic of paths, and shared device regions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Carried {
    /// Bytes of KV that arrived, by the path's name.
    pub(crate) bytes: BTreeMap<&'static str, u64>,
    /// Mapped regions of other workers, and mappings that failed.
    pub(crate) regions_mapped: usize,
    pub(crate) regions_refused: u64,
}

/// Meter of the time with reads in progress.
#[derive(Debug, Default)]
struct Meter {
    /// Bytes of reads in flight.
    in_flight: BTreeMap<ConnId, BTreeMap<u64, u64>>,
    /// Start of the present busy time, if reads are in flight.
    since: Option<Instant>,
    busy: Duration,
}

impl Meter {
    fn begin(&mut self, conn: ConnId, read: u64, bytes: u64) {
        self.in_flight.entry(conn).or_default().insert(read, bytes);
        self.since.get_or_insert_with(Instant::now);
    }

    /// Ends a read; returns its bytes.
    fn end(&mut self, conn: ConnId, read: u64) -> u64 {
        let reads = self.in_flight.entry(conn).or_default();
        let bytes = reads.remove(&read).unwrap_or(0);
        if reads.is_empty() {
            self.down(conn);
        }
        bytes
    }

    /// Ends the reads of a path that is down.
    fn down(&mut self, conn: ConnId) {
        self.in_flight.remove(&conn);
        if self.in_flight.is_empty() {
            self.busy += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
    }

    fn busy(&self) -> Duration {
        self.busy + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// Whether this system has shared memory.
pub(crate) fn is_possible() -> bool {
    KvArena::new(1, 1).is_ok()
}

/// The transfer configuration of an instance, with a staging buffer of `stage_blocks` rBlocks if not 0. With QUIC paths
/// only, its host identity is empty, so that others on this host do not share memory with it either.
pub(crate) fn config(of: &InstanceConfig, stage_blocks: u32, engine: &EngineArgs) -> anyhow::Result<TransferConfig> {
    let far = engine.transfer_path == TransferPathArg::Quic;
    let host = if far { String::new() } else { host_identity() };
    let config = match stage_blocks {
        0 => TransferConfig::new(of.model_hash, of.kv, (of.blocks_total, of.block_tokens), host),
        blocks => TransferConfig::staged(of.model_hash, of.kv, (blocks, of.block_tokens), host),
    };
    let config = config.context("describe the KV store to others")?;
    Ok(TransferConfig { push: engine.kv_transfer == KvTransferArg::Push, ..config.of_model(of) })
}

impl Transfers {
    /// Serves `memory`, of the instance with `config`, on `endpoint`, and reads others' KV from there.
    pub(crate) fn start(
        config: &InstanceConfig,
        memory: &KvMemory,
        endpoint: &Endpoint,
        identity: &Identity,
    ) -> anyhow::Result<Self> {
        let layout = config.transfer.as_ref().context("this instance's memory is not described")?.layout.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("lagoon-transfer")
            .enable_all()
            .build()
            .context("start threads for KV transfer")?;
        let listen = endpoint.listen;
        let node = {
            let _network = runtime.enter();
            Node::bind(listen, identity, TransportConfig::default())
                .with_context(|| format!("serve KV on {listen}\nhint: --transfer-quic names another address"))?
                .into_node()
        };
        let port = node.local_addr().port();
        let addr = endpoint.advertise.map_or(node.local_addr(), |addr| SocketAddr::new(addr.ip(), port));
        let interface = endpoint.interface.as_deref().unwrap_or("as listened");
        tracing::info!(listen = %node.local_addr(), advertise = %addr, interface, endpoint.reason, "KV is read and served");
        let sockets = Scratch::new("kv")?;
        let arena_server = offer(&sockets.path().join("arenas"), memory).context("offer KV on this host")?;
        let writer = WriterConfig {
            incarnation: config.incarnation,
            secret: EpochSecret(rand::random()),
            host: host_identity(),
            arenas: arena_server.arenas().to_vec(),
            addr: addr.to_string(),
            ..WriterConfig::default()
        };
        let regions = regions(memory);
        let region = match memory {
            KvMemory::Device { region, .. } => Some(Arc::clone(region)),
            KvMemory::Host(_) => None,
        };
        let started = Instant::now();
        let clock = move || u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let server = ExportServer::new(Writer::new(layout, writer), regions.clone(), clock);
        node.serve_direct(Some(Arc::clone(&server)));
        let here = KnownHere::new(arena_server.arenas(), &server);
        let (sender, receiver) = mpsc::unbounded_channel();
        Ok(Self {
            server,
            regions: regions.into(),
            region,
            node,
            runtime: Some(runtime),
            _arenas: arena_server,
            _sockets: sockets,
            _here: here,
            paths: BTreeMap::new(),
            meter: Meter::default(),
            carried: Carried::default(),
            measured: Vec::new(),
            probed: BTreeSet::new(),
            announce: false,
            sender,
            receiver,
        })
    }

    /// Sets whether measured paths are logged.
    #[must_use]
    pub(crate) fn announcing(mut self, announce: bool) -> Self {
        self.announce = announce;
        self
    }

    /// Address at which readers are accepted, and from which its own reads leave.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.node.local_addr()
    }

    /// Total time with reads in progress, in microseconds.
    pub(crate) fn reading_us(&self) -> u64 {
        u64::try_from(self.meter.busy().as_micros()).unwrap_or(u64::MAX)
    }

    /// Measured paths: the latest of each worker.
    pub(crate) fn measured(&self) -> &[PathRow] {
        &self.measured
    }

    /// Traffic of paths.
    pub(crate) fn carried(&self) -> Carried {
        let regions_mapped = self.region.as_ref().map_or(0, |region| region.mapped());
        Carried { regions_mapped, ..self.carried.clone() }
    }

    /// The next completion.
    pub(crate) async fn next(&mut self) -> Option<Completion> {
        self.receiver.recv().await
    }

    fn event(&self, event: TransferEvent) {
        // The receiver is this struct's own.
        let _ = self.sender.send(Completion::Event(event));
    }

    fn blocking(&self, work: impl FnOnce() -> Completion + Send + 'static) {
        let sender = self.sender.clone();
        if let Some(runtime) = &self.runtime {
            // The loop may have ended by then.
            runtime.spawn_blocking(move || _ = sender.send(work()));
        }
    }

    /// Whom the session is with in which a reader connects: before its message is carried out.
    pub(crate) fn reader_is(&self, reader: InstanceId, subject: &Subject) {
        self.server.reader_is(reader, subject);
    }

    /// Carries out a transfer effect of the instance and reports its completion.
    pub(crate) fn carry_out(&mut self, effect: TransferEffect) {
        match effect {
            TransferEffect::ToWriter { from, body } => self.server.with(|w, now| w.on_control(from, &body, now)),
            TransferEffect::Export { job, reader, request, part, blocks } => {
                self.check_blocks(Part { job, reader, request, part, blocks });
            }
            TransferEffect::Revoke { export } => self.server.with(|w, now| w.revoke(export, now)),
            TransferEffect::Fence { reader, incarnation } => {
                self.server.with(|w, now| w.fence(reader, incarnation, now));
            }
            TransferEffect::Open { conn, reader, writer, addr, epoch, layout, arenas } => {
                self.open(conn, (reader, writer), &addr, epoch, &layout, arenas);
            }
            TransferEffect::Close { conn } => match self.paths.get_mut(&conn) {
                Some(Slot::Open(path)) => path.close(),
                Some(Slot::Opening(jobs)) => *jobs = None,
                None => self.event(TransferEvent::Down { conn }),
            },
            TransferEffect::Read { conn, read, transaction, pulls } => {
                let job = ReadJob { read, transaction, pulls };
                if self.paths.contains_key(&conn) {
                    self.meter.begin(conn, read, job.transaction.bytes);
                }
                match self.paths.get_mut(&conn) {
                    Some(Slot::Open(path)) => path.read(job),
                    Some(Slot::Opening(jobs)) => jobs.iter_mut().for_each(|jobs| jobs.push(job.clone())),
                    // The path is down; its end was reported.
                    None => {}
                }
            }
            TransferEffect::Check { pull, piece, of } => {
                let regions = Arc::clone(&self.regions);
                self.blocking(move || {
                    let check = of.check_landed(piece, &regions).map_err(|error| error.to_string());
                    Completion::Event(TransferEvent::Checked { pull, piece, check })
                });
            }
        }
        self.drain();
    }

    /// Handles a completion; returns an event for the instance, if there is one.
    pub(crate) fn on_completion(&mut self, completion: Completion) -> Option<TransferEvent> {
        match completion {
            Completion::Event(event) => {
                match &event {
                    TransferEvent::Down { conn } => {
                        self.paths.remove(conn);
                        self.meter.down(*conn);
                    }
                    TransferEvent::Read { conn, read, result } => {
                        let bytes = self.meter.end(*conn, *read);
                        if let (Ok(_), Some(Slot::Open(path))) = (result, self.paths.get(conn)) {
                            *self.carried.bytes.entry(path.name()).or_default() += bytes;
                        }
                    }
                    _ => {}
                }
                Some(event)
            }
            Completion::Checks { of: Part { job, reader, request, part, blocks }, checks } => {
                let export = checks.and_then(|checks| {
                    let made = self.server.with(|w, now| w.export(reader, request, part, blocks, checks, now));
                    made.map_err(|error| error.to_string())
                });
                // The writer's messages about the export follow.
                let drained = TransferEvent::Exported { job, export };
                self.drain();
                Some(drained)
            }
            Completion::Opened { conn, path } => {
                self.on_opened(conn, path);
                None
            }
            Completion::Probed(row) => {
                self.on_probed(row);
                None
            }
            Completion::NoRegion { writer, why } => {
                self.carried.regions_refused += 1;
                tracing::warn!(
                    "KV of prefill worker {writer} goes through the host's memory: its device memory cannot be mapped: {why}\n\
                     hint: both need the same GPU or GPUs with peer access, and one user and mount namespace; \
                     --stage-memory=host stages in shared memory, which is faster than what is left"
                );
                None
            }
        }
    }

    /// Runs the timers.
    pub(crate) fn tick(&mut self) {
        self.server.with(Writer::tick);
        self.drain();
    }

    /// Passes the writer's outputs on.
    fn drain(&self) {
        while let Some(output) = self.server.with(|w, _| w.poll()) {
            match output {
                WriterOutput::Send { to, body } => self.event(TransferEvent::FromWriter { to, body }),
                WriterOutput::Freed { export, .. } => self.event(TransferEvent::Freed { export }),
                WriterOutput::Cut { reader, epoch } => self.server.cut(reader, epoch),
                WriterOutput::Connected { reader, .. } => tracing::debug!(%reader, "a decode worker may read KV"),
            }
        }
    }

    fn check_blocks(&self, of: Part) {
        let server = Arc::clone(&self.server);
        self.blocking(move || {
            let (layout, view) = server.with(|w, _| (Arc::clone(w.layout()), w.view(of.reader).cloned()));
            let view = view.and_then(|view| view.within(of.part.layers.as_ref()));
            let checks = view.ok_or_else(|| format!("{} is not connected", of.reader)).and_then(|view| {
                let checks = check_blocks(&layout, &view, &of.blocks, of.part.tokens, server.regions());
                checks.map_err(|error| error.to_string())
            });
            Completion::Checks { of, checks }
        });
    }

    fn landing(&self, conn: ConnId) -> Landing {
        let sender = self.sender.clone();
        let on_event: OnEvent = Arc::new(move |event| {
            let event = match event {
                PathEvent::Read { read, result } => TransferEvent::Read { conn, read, result },
                PathEvent::Down { reason } => {
                    tracing::info!(conn = conn.0, reason, "a path to a prefill worker's KV ended");
                    TransferEvent::Down { conn }
                }
            };
            // The loop may have ended.
            let _ = sender.send(Completion::Event(event));
        });
        Landing { regions: Arc::clone(&self.regions), verify: true, on_event }
    }

    /// Opens the best path: on the device if both stage in memory of one device or of peers, within this process if the
    /// writer is in it, shared memory if it is on this host, else QUIC.
    fn open(
        &mut self,
        conn: ConnId,
        (reader, writer): (InstanceId, InstanceId),
        addr: &str,
        epoch: u64,
        layout: &Arc<Layout>,
        arenas: Vec<TransferArena>,
    ) {
        let first = self.probed.insert(writer);
        let (sender, runtime) = (self.sender.clone(), self.runtime.as_ref().map(|runtime| runtime.handle().clone()));
        let (node, landing, addr, layout) =
            (self.node.clone(), self.landing(conn), addr.to_owned(), Arc::clone(layout));
        let near = Near { layout, arenas, region: self.region.clone(), of: (reader, writer, epoch) };
        self.paths.insert(conn, Slot::Opening(Some(Vec::new())));
        self.blocking(move || {
            let path = match near.open(&landing, &sender, first) {
                Ok(path) => Ok(Box::new(path) as Box<dyn Path>),
                Err(reason) => {
                    tracing::info!(conn = conn.0, reason, "KV is read over QUIC");
                    let config = StreamsConfig { reader, epoch, streams: STREAMS };
                    let addr = addr.parse::<SocketAddr>().map_err(|error| format!("{addr:?}: {error}"));
                    if let (true, Ok(addr), Some(runtime)) = (first, &addr, runtime) {
                        runtime.spawn(probe_quic(
                            node.clone(),
                            *addr,
                            StreamsConfig { streams: 1, ..config },
                            writer,
                            sender,
                        ));
                    }
                    addr.map(|addr| Box::new(node.open_direct(addr, config, &landing)) as Box<dyn Path>)
                }
            };
            Completion::Opened { conn, path }
        });
    }

    fn on_probed(&mut self, row: Result<PathRow, String>) {
        match row {
            Ok(row) => {
                row.report(self.announce);
                self.measured.retain(|other| other.worker != row.worker);
                // More rows than a pool has workers: the oldest are of workers that left.
                self.measured.drain(..(self.measured.len() + 1).saturating_sub(WORKERS_MAX));
                self.measured.push(row);
            }
            Err(why) => tracing::info!(why, "a path to a prefill worker's KV was not measured"),
        }
    }

    fn on_opened(&mut self, conn: ConnId, path: Result<Box<dyn Path>, String>) {
        let waiting = self.paths.remove(&conn);
        match (path, waiting) {
            (Ok(path), Some(Slot::Opening(Some(jobs)))) => {
                tracing::info!(conn = conn.0, path = path.name(), "a prefill worker's KV can be read");
                jobs.into_iter().for_each(|job| path.read(job));
                self.paths.insert(conn, Slot::Open(path));
            }
            // Closed meanwhile: its end is reported on drop.
            (Ok(path), _) => path.close(),
            (Err(reason), _) => {
                tracing::warn!(conn = conn.0, reason, "no path to a prefill worker's KV");
                self.event(TransferEvent::Down { conn });
            }
        }
    }
}

/// Measures a QUIC path while it is in use.
async fn probe_quic(
    node: Node,
    addr: SocketAddr,
    config: StreamsConfig,
    writer: InstanceId,
    sender: mpsc::UnboundedSender<Completion>,
) {
    let (expected, expected_as) = path_probe::expect_quic(addr);
    let probe = node.probe_direct(addr, config, path_probe::QUIC_PROBE_BYTES, expected).await;
    // The loop may have ended.
    let _ = sender.send(Completion::Probed(probe.map(|probe| PathRow::quic(writer.0, probe, expected_as))));
}

/// A worker's offers to readers near it.
#[derive(Debug)]
struct Near {
    layout: Arc<Layout>,
    arenas: Vec<TransferArena>,
    /// The own shared device region.
    region: Option<KvRegion>,
    /// The reader, the writer, and the epoch of the writer's acceptance.
    of: (InstanceId, InstanceId, u64),
}

impl Near {
    /// Opens a path on the own device or a peer of it, within this process or on this host, if the writer is there. The
    /// `first` one is measured.
    fn open(
        &self,
        landing: &Landing,
        sender: &mpsc::UnboundedSender<Completion>,
        first: bool,
    ) -> Result<MemoryPath, String> {
        let (reader, writer, epoch) = self.of;
        // The loop may have ended.
        let report = |completion| _ = sender.send(completion);
        let measured = |probe: Result<Probe, String>, bytes: usize| {
            report(Completion::Probed(probe.map(|probe| PathRow::memory(writer.0, probe, bytes))));
        };
        match self.map_region() {
            Some(Ok((regions, is_peer))) => {
                if first {
                    let probe = Probe::of_region(if is_peer { PEER_DEVICE } else { SAME_DEVICE }, regions.shared());
                    let bytes = usize::try_from(regions.shared().bytes()).unwrap_or(usize::MAX);
                    measured(probe, bytes);
                }
                let path = MemoryPath::on_device(regions, is_peer, COPIERS, landing);
                return path.map_err(|error| error.to_string());
            }
            Some(Err(why)) => report(Completion::NoRegion { writer, why }),
            None => {}
        }
        if let Some(server) = writers_here::find(&self.arenas) {
            let bytes = self.layout.region_bytes().first().copied().unwrap_or(0);
            if first {
                measured(Probe::within(&server), usize::try_from(bytes).unwrap_or(usize::MAX));
            }
            return MemoryPath::within(server, (reader, epoch), COPIERS, landing).map_err(|error| error.to_string());
        }
        let views = self.map_arenas()?.ok_or_else(|| "it is on another host, or stages on its device".to_owned())?;
        if let Some(view) = views.first().filter(|_| first) {
            measured(Probe::of_arena(view), view.bytes());
        }
        MemoryPath::shared(views, COPIERS, landing).map_err(|error| error.to_string())
    }

    /// Maps the writer's shared device region, if both have one on this host; and whether it is another device's.
    fn map_region(&self) -> Option<Result<(PeerRegions, bool), String>> {
        let offer = self.arenas.iter().find(|arena| !arena.device.is_empty())?;
        let own = self.region.as_ref()?;
        let regions = fetch_region(offer, own)
            .map_err(|error| error.to_string())
            .and_then(|region| PeerRegions::new(region, self.layout.region_bytes()).map_err(|error| error.to_string()));
        Some(regions.map(|regions| (regions, offer.device != own.device())))
    }

    /// Maps the writer's memory, if it offers all of it on this host.
    fn map_arenas(&self) -> Result<Option<Vec<lagoon_backend::ArenaView>>, String> {
        let sizes = self.layout.region_bytes();
        if self.arenas.len() != sizes.len() || self.arenas.iter().any(|arena| !arena.device.is_empty()) {
            return Ok(None);
        }
        let view = |(region, bytes): (usize, &u64)| {
            let offer =
                self.arenas.iter().find(|arena| arena.region as usize == region).ok_or("a region is missing")?;
            fetch_arena(offer, *bytes).map_err(|error| error.to_string())
        };
        sizes.iter().enumerate().map(view).collect::<Result<Vec<_>, String>>().map(Some)
    }
}

/// Offers memory to workers on this host.
fn offer(socket: &std::path::Path, memory: &KvMemory) -> Result<ArenaServer, HostError> {
    match memory {
        KvMemory::Host(arenas) => {
            let offered: Vec<(u32, KvArena)> = (0..).zip(arenas.iter().cloned()).collect();
            ArenaServer::start(socket, &offered)
        }
        KvMemory::Device { region, .. } => ArenaServer::of_region(socket, region.as_ref()),
    }
}

/// Memory as regions for transports.
fn regions(memory: &KvMemory) -> Vec<Arc<dyn Region>> {
    match memory {
        KvMemory::Host(arenas) => arenas.iter().map(|arena| Arc::new(arena.clone()) as _).collect(),
        KvMemory::Device { region, layers, layer_bytes } => {
            DeviceRegion::consecutive(region, *layers, *layer_bytes as u64)
        }
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        self.node.serve_direct(None);
        self.paths.clear();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
#[path = "transfers_tests.rs"]
mod tests;
