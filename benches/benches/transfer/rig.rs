//! A reader and a writer in this process, over the paths that separate processes use.

use anyhow::{Context, Result, bail};
use lagoon_backend::SharedArena;
use lagoon_transfer::{
    Axis, Check, Checker, ConnId, Dim, Layout, LayoutParts, Part, Plane, PullId, Reader, ReaderConfig, ReaderOutput,
    Region, Writer, WriterConfig, WriterOutput, check_block,
};
use lagoon_transport::{
    Bound, ClusterCa, Node, NodeRole, TransportConfig,
    direct::{
        ArenaServer, ExportServer, Landing, MemoryPath, PRIVATE_FOLDER_PREFIX, Path, PathEvent, ReadJob, StreamsConfig,
        fetch_arena,
    },
};
use lagoon_types::{InstanceId, KvDType, ModelHash};
use serde_json::{Value, json};
use std::{
    hint::black_box,
    net::SocketAddr,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

const READER: InstanceId = InstanceId(1);
const WRITER: InstanceId = InstanceId(2);
const TOKENS: u32 = 16;
const HEAD_DIM: u32 = 64;
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Shared memory, copied by this many threads.
    Host(usize),
    /// QUIC with this many connections.
    Quic(usize),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Scheme {
    pub(crate) verify: bool,
    pub(crate) coalesce: bool,
    /// Read one block at a time.
    pub(crate) one_by_one: bool,
}

pub(crate) struct Rig {
    layout: Layout,
    block_bytes: u32,
    blocks: u32,
    remote: SharedArena,
    local: SharedArena,
    checks: Vec<Check>,
    arenas: ArenaServer,
    _folder: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
    far: tokio::runtime::Runtime,
    writer_node: Bound,
    reader_node: Bound,
}

/// One layer of `[slot][k | v][heads][dim]`: a block is `block_bytes` contiguous bytes, as in the paper.
fn layout(block_bytes: u32, blocks: u32) -> Result<Layout> {
    let heads = block_bytes / (TOKENS * 2 * HEAD_DIM * 2);
    let row = u64::from(heads) * u64::from(HEAD_DIM);
    let axes = vec![
        Axis { dim: Dim::Block, size: blocks, stride: u64::from(block_bytes) / 2 },
        Axis { dim: Dim::Token, size: TOKENS, stride: 2 * row },
        Axis { dim: Dim::Kv, size: 2, stride: row },
        Axis { dim: Dim::Head, size: heads, stride: HEAD_DIM.into() },
        Axis { dim: Dim::Elem, size: HEAD_DIM, stride: 1 },
    ];
    let plane = Plane { region: 0, base: 0, axes, dtype: KvDType::BF16, first_layer: 0, part: Part::Both };
    Ok(Layout::new(LayoutParts {
        model: ModelHash([1; 32]),
        block_tokens: TOKENS,
        blocks,
        layers: 0..1,
        heads: 0..heads,
        head_dim: HEAD_DIM,
        region_bytes: vec![u64::from(block_bytes) * u64::from(blocks)],
        planes: vec![plane],
    })?)
}

fn node(ca: &ClusterCa, runtime: &tokio::runtime::Runtime) -> Result<Bound> {
    let _guard = runtime.enter();
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    Ok(Node::bind(loopback, &ca.identity("bench", NodeRole::Instance)?, TransportConfig::default())?)
}

impl Rig {
    pub(crate) fn new(block_bytes: u32, blocks: u32) -> Result<Self> {
        let layout = layout(block_bytes, blocks)?;
        let bytes = usize::try_from(u64::from(block_bytes) * u64::from(blocks))?;
        let (remote, local) = (SharedArena::new(bytes, 4096)?, SharedArena::new(bytes, 4096)?);
        let mut state = 1u64;
        remote.fill(0, bytes, &mut |target| {
            for chunk in target.chunks_mut(8) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                chunk.copy_from_slice(state.to_le_bytes().get(..chunk.len()).unwrap_or_default());
            }
        })?;
        let view = lagoon_transfer::View { layers: layout.layers(), heads: layout.heads() };
        let regions: [Arc<dyn Region>; 1] = [Arc::new(remote.clone())];
        let checks = (0..blocks).map(|block| check_block(&layout, &view, block, TOKENS, &regions));
        let checks = checks.collect::<Result<_, _>>()?;
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix(PRIVATE_FOLDER_PREFIX).permissions(private).tempdir()?;
        let arenas = ArenaServer::start(&folder.path().join("arena"), &[(0, remote.clone())])?;
        let build = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (runtime, far) = (build()?, build()?);
        let ca = ClusterCa::generate("bench")?;
        let (writer_node, reader_node) = (node(&ca, &far)?, node(&ca, &runtime)?);
        Ok(Self {
            layout,
            block_bytes,
            blocks,
            remote,
            local,
            checks,
            arenas,
            _folder: folder,
            runtime,
            far,
            writer_node,
            reader_node,
        })
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.block_bytes) * u64::from(self.blocks)
    }

    /// Seconds in which `threads` threads apply `each` to parts of `part` bytes: the writer's and the reader's.
    fn by_parts(&self, threads: usize, part: usize, each: impl Fn(&[u8], &mut [u8]) + Sync) -> f64 {
        let source = self.remote.snapshot(0, self.remote.bytes()).expect("nobody writes");
        let parts: Vec<(usize, &[u8])> = source.chunks(part).enumerate().map(|(n, bytes)| (n * part, bytes)).collect();
        let (each, start) = (&each, Instant::now());
        std::thread::scope(|scope| {
            for share in parts.chunks(parts.len().div_ceil(threads)) {
                scope.spawn(move || {
                    for (at, from) in share {
                        let filled = self.local.fill(*at as u64, from.len(), &mut |target| each(from, target));
                        filled.expect("nobody reads");
                    }
                });
            }
        });
        start.elapsed().as_secs_f64()
    }

    /// Copies in parts of 1 MiB: the upper limit.
    pub(crate) fn memcpy(&self, threads: usize) -> f64 {
        self.by_parts(threads, 1 << 20, |from, to| to.copy_from_slice(from))
    }

    /// Copies and hashes by blocks, without the protocol.
    pub(crate) fn copy_and_check(&self, threads: usize) -> f64 {
        let block = usize::try_from(self.block_bytes).unwrap_or(usize::MAX);
        self.by_parts(threads, block.max(1 << 20), |from, to| {
            let mut checker = Checker::default();
            for (from, to) in from.chunks(block).zip(to.chunks_mut(block)) {
                checker.0.begin(from.len() as u64);
                checker.0.copy(from, to);
                black_box(checker.finish());
            }
        })
    }

    /// Hashes as many blocks as there are, of bytes in the cache.
    pub(crate) fn check_in_cache(&self) -> f64 {
        let bytes = usize::try_from(self.block_bytes).unwrap_or(usize::MAX).min(256 << 10);
        let content = vec![3; bytes];
        let start = Instant::now();
        for _ in 0..self.bytes() / bytes as u64 {
            black_box(Check::of(black_box(&content)));
        }
        start.elapsed().as_secs_f64()
    }

    /// Seconds from the start of a pull to its end, verified and landed.
    pub(crate) fn transfer(&mut self, way: Way, scheme: Scheme) -> Result<(f64, Value)> {
        let zero = self.local.bytes() / 2;
        self.local.fill(zero as u64, 64, &mut |target| target.fill(0))?;
        let mut run = Run::connect(self, scheme)?;
        run.path = Some(match way {
            Way::Host(threads) => {
                let offer = self.arenas.arenas().first().context("an arena")?;
                let view = fetch_arena(offer, self.bytes())?;
                // A reader maps the memory and populates its pages once, not for each request.
                (0..self.bytes()).step_by(1 << 20).try_for_each(|at| view.copy(at, &mut [0], None))?;
                Box::new(MemoryPath::shared(vec![view], threads, &run.landing())?)
            }
            Way::Quic(streams) => {
                self.writer_node.node.serve_direct(Some(Arc::clone(&run.server)));
                let config = StreamsConfig { reader: READER, epoch: run.epoch, streams };
                let addr = self.writer_node.node.local_addr();
                // Connected before the clock starts: a reader connects once, not for each request.
                let path = self.reader_node.node.open_direct(addr, config, &run.landing());
                let expected = self.runtime.block_on(self.reader_node.node.probe_direct(addr, config, 4 << 20, 0.0));
                expected.map_err(anyhow::Error::msg)?;
                Box::new(path)
            }
        });
        let seconds = run.pull()?;
        let stats = run.reader.stats();
        run.path.take().context("a path")?.close();
        while !matches!(run.events.1.recv_timeout(TIMEOUT)?, PathEvent::Down { .. }) {}
        let equal = *self.local.snapshot(0, self.local.bytes())? == *self.remote.snapshot(0, self.remote.bytes())?;
        if !equal {
            bail!("{way:?}, {scheme:?}: the bytes differ");
        }
        Ok((seconds, json!({ "reads": stats.reads, "transactions": stats.transactions })))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let (near, far) = (self.reader_node.node.clone(), self.writer_node.node.clone());
        self.runtime.block_on(near.close(Duration::from_millis(200)));
        self.far.block_on(far.close(Duration::from_millis(200)));
    }
}

/// One connection and its one pull.
struct Run {
    server: Arc<ExportServer>,
    reader: Reader,
    conn: ConnId,
    epoch: u64,
    start: Instant,
    local: SharedArena,
    verify: bool,
    blocks: u32,
    checks: Vec<Check>,
    events: (Sender<PathEvent>, Receiver<PathEvent>),
    path: Option<Box<dyn Path>>,
    failure: Option<String>,
}

impl Run {
    fn connect(rig: &Rig, scheme: Scheme) -> Result<Self> {
        let start = Instant::now();
        let clock = move || u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let writer =
            Writer::new(rig.layout.clone(), WriterConfig { credit_bytes: 64 << 20, ..WriterConfig::default() });
        let server = ExportServer::new(writer, vec![Arc::new(rig.remote.clone())], clock);
        let in_flight = if scheme.one_by_one { 1 } else { 32 << 20 };
        let config = ReaderConfig {
            verify: scheme.verify,
            coalesce: scheme.coalesce,
            conn_bytes: in_flight,
            ..ReaderConfig::default()
        };
        let mut reader = Reader::new(rig.layout.clone(), config);
        let conn = reader.connect(WRITER, 0).context("a connection")?;
        let mut run = Self {
            server,
            reader,
            conn,
            epoch: 0,
            start,
            local: rig.local.clone(),
            verify: scheme.verify,
            blocks: rig.blocks,
            checks: rig.checks.clone(),
            events: channel(),
            path: None,
            failure: None,
        };
        run.exchange()?;
        Ok(run)
    }

    fn landing(&self) -> Landing {
        let events = self.events.0.clone();
        let regions: [Arc<dyn Region>; 1] = [Arc::new(self.local.clone())];
        let on_event = Arc::new(move |event| drop(events.send(event)));
        Landing { regions: Arc::new(regions), verify: self.verify, on_event }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Exchanges control messages and outputs until none are left.
    fn exchange(&mut self) -> Result<()> {
        loop {
            let now_ms = self.now_ms();
            self.reader.pump();
            let (theirs, ours) = (self.server.with(|writer, _| writer.poll()), self.reader.poll());
            if theirs.is_none() && ours.is_none() {
                return Ok(());
            }
            match theirs {
                Some(WriterOutput::Send { body, .. }) => self.reader.on_control(WRITER, &body, now_ms),
                Some(WriterOutput::Connected { epoch, .. }) => self.epoch = epoch,
                Some(WriterOutput::Freed { .. } | WriterOutput::Cut { .. }) | None => {}
            }
            match ours {
                Some(ReaderOutput::Send { body, .. }) => {
                    self.server.with(|writer, now_ms| writer.on_control(READER, &body, now_ms));
                }
                Some(ReaderOutput::Offered(offer)) => {
                    let blocks = (0..self.blocks).collect();
                    self.reader.pull(self.conn, offer.export, blocks, 0, now_ms)?;
                }
                Some(ReaderOutput::Read { read, transaction, .. }) => {
                    let mut pulls = lagoon_transfer::Pulls::new();
                    for part in &transaction.parts {
                        if let Some(pull) = self.reader.pull_of(PullId(part.request)) {
                            pulls.entry(part.request).or_insert_with(|| Arc::clone(pull));
                        }
                    }
                    self.path.as_ref().context("a path")?.read(ReadJob { read, transaction, pulls });
                }
                // A block longer than a read is verified where it landed.
                Some(ReaderOutput::Check { pull, piece }) => {
                    let of = self.reader.pull_of(pull).context("a pull")?;
                    let regions: [Arc<dyn Region>; 1] = [Arc::new(self.local.clone())];
                    let check = of.check_landed(piece, &regions).map_err(|error| error.to_string());
                    self.reader.on_checked(pull, piece, check, now_ms);
                }
                Some(ReaderOutput::Failed { why, .. }) => self.failure = Some(why.to_string()),
                Some(ReaderOutput::Done { .. } | ReaderOutput::Open { .. }) | None => {}
                Some(other) => bail!("unexpected: {other:?}"),
            }
        }
    }

    fn pull(&mut self) -> Result<f64> {
        let blocks: Vec<u32> = (0..self.blocks).collect();
        let (tokens, checks) = (self.blocks * TOKENS, self.checks.clone());
        self.server.with(|writer, now_ms| writer.export(READER, 1, (0, tokens), blocks, checks, now_ms))?;
        let start = Instant::now();
        self.exchange()?;
        while self.reader.pulling() > 0 {
            let mut event = Some(self.events.1.recv_timeout(TIMEOUT)?);
            let now_ms = self.now_ms();
            while let Some(next) = event {
                let PathEvent::Read { read, result } = next else { bail!("the path went down: {next:?}") };
                self.reader.on_read(self.conn, read, result, now_ms);
                event = self.events.1.try_recv().ok();
            }
            self.exchange()?;
        }
        match self.failure.take() {
            Some(failure) => bail!("a pull failed: {failure}"),
            None => Ok(start.elapsed().as_secs_f64()),
        }
    }
}
