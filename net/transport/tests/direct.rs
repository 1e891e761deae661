//! Reads of registered memory over every path, with the real reader and writer: the same bytes, checks and COMPLETE.
#![allow(clippy::unwrap_used, reason = "tests")]

#[expect(dead_code, reason = "shared with tests that send frames")]
mod support;

use lagoon_transfer::{
    Axis, ConnId, Dim, Layout, LayoutParts, Part, Plane, PullId, Reader, ReaderConfig, ReaderOutput, Region, Writer,
    WriterConfig, WriterOutput, check_block,
};
use lagoon_transport::direct::{ExportServer, Landing, MemoryPath, Path, PathEvent, Probe, ReadJob, StreamsConfig};
use lagoon_transport::{Bound, Node, TransportConfig};
use lagoon_types::{InstanceId, KvDType, ModelHash};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};
use support::*;

const READER: InstanceId = InstanceId(1);
const WRITER: InstanceId = InstanceId(2);
const BLOCKS: u32 = 64;
const LAYERS: u32 = 2;
const BLOCK_BYTES: usize = 16 << 10;

/// Lagoon's own store: `[slot][k | v][heads][dim]` for each layer, 32 tokens of 512 bytes in a block.
fn layout() -> Layout {
    let axes = vec![
        Axis { dim: Dim::Block, size: BLOCKS, stride: 32 * 256 },
        Axis { dim: Dim::Token, size: 32, stride: 256 },
        Axis { dim: Dim::Kv, size: 2, stride: 128 },
        Axis { dim: Dim::Head, size: 2, stride: 64 },
        Axis { dim: Dim::Elem, size: 64, stride: 1 },
    ];
    let plane = |layer: u32| Plane {
        region: layer,
        base: 0,
        axes: axes.clone(),
        dtype: KvDType::BF16,
        first_layer: layer,
        part: Part::Both,
    };
    Layout::new(LayoutParts {
        model: ModelHash([3; 32]),
        block_tokens: 32,
        blocks: BLOCKS,
        layers: 0..LAYERS,
        heads: 0..2,
        head_dim: 64,
        region_bytes: vec![u64::from(BLOCKS) * BLOCK_BYTES as u64; LAYERS as usize],
        planes: (0..LAYERS).map(plane).collect(),
    })
    .unwrap()
}

/// Shared memory where the system has it.
#[cfg(target_os = "linux")]
fn arenas() -> Vec<lagoon_backend::SharedArena> {
    let bytes = BLOCKS as usize * BLOCK_BYTES;
    (0..LAYERS).map(|_| lagoon_backend::SharedArena::new(bytes, 4096).unwrap()).collect()
}

#[cfg(target_os = "linux")]
fn regions(arenas: &[lagoon_backend::SharedArena]) -> Vec<Arc<dyn Region>> {
    arenas.iter().map(|arena| Arc::new(arena.clone()) as Arc<dyn Region>).collect()
}

fn fill(regions: &[Arc<dyn Region>], seed: usize) {
    for (layer, region) in regions.iter().enumerate() {
        let bytes: Vec<u8> = (0..usize::try_from(region.bytes()).unwrap())
            .map(|at| u8::try_from((at * 31 + at / 251 + layer * 7 + seed) % 253).unwrap())
            .collect();
        lagoon_transfer::region::write(region.as_ref(), 0, &bytes).unwrap();
    }
}

struct Rig {
    server: Arc<ExportServer>,
    remote: Vec<Arc<dyn Region>>,
    reader: Reader,
    local: Vec<Arc<dyn Region>>,
    conn: ConnId,
    epoch: u64,
    start: Instant,
    events: (Sender<PathEvent>, Receiver<PathEvent>),
    path: Option<Box<dyn Path>>,
    freed: Vec<u64>,
}

impl Rig {
    /// A reader that is connected to a writer, by messages handed over in this process.
    fn new(remote: Vec<Arc<dyn Region>>, local: Vec<Arc<dyn Region>>, config: WriterConfig) -> Self {
        let start = Instant::now();
        fill(&remote, 1);
        let clock = move || u64::try_from(start.elapsed().as_millis()).unwrap();
        let server = ExportServer::new(Writer::new(layout(), config), remote.clone(), clock);
        let mut reader = Reader::new(layout(), ReaderConfig { incarnation: 5, ..ReaderConfig::default() });
        let conn = reader.connect(WRITER, 0).unwrap();
        let freed = Vec::new();
        let mut rig =
            Self { server, remote, reader, local, conn, epoch: 0, start, events: channel(), path: None, freed };
        rig.exchange();
        rig
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap()
    }

    /// Control messages and outputs, until there are none.
    fn exchange(&mut self) {
        loop {
            let now_ms = self.now_ms();
            self.reader.pump();
            let from_writer = self.server.with(|writer, _| writer.poll());
            let from_reader = self.reader.poll();
            if from_writer.is_none() && from_reader.is_none() {
                return;
            }
            match from_writer {
                Some(WriterOutput::Send { body, .. }) => self.reader.on_control(WRITER, &body, now_ms),
                Some(WriterOutput::Freed { export, .. }) => self.freed.push(export),
                Some(WriterOutput::Cut { reader, epoch }) => self.server.cut(reader, epoch),
                Some(WriterOutput::Connected { epoch, .. }) => self.epoch = epoch,
                None => {}
            }
            match from_reader {
                Some(ReaderOutput::Send { body, .. }) => {
                    self.server.with(|writer, now_ms| writer.on_control(READER, &body, now_ms));
                }
                Some(ReaderOutput::Offered(offer)) => {
                    let blocks = (0..offer.tokens.div_ceil(32)).rev().collect();
                    self.reader.pull(self.conn, offer.export, blocks, 0, now_ms).unwrap();
                }
                Some(ReaderOutput::Read { read, transaction, .. }) => {
                    let pulls = transaction.parts.iter().map(|part| part.request);
                    let pulls = pulls.map(|id| (id, Arc::clone(self.reader.pull_of(PullId(id)).unwrap()))).collect();
                    self.path.as_ref().unwrap().read(ReadJob { read, transaction, pulls });
                }
                Some(ReaderOutput::Done { .. } | ReaderOutput::Open { .. }) | None => {}
                Some(other) => panic!("{other:?}"),
            }
        }
    }

    fn landing(&self) -> Landing {
        let events = self.events.0.clone();
        let on_event = Arc::new(move |event| drop(events.send(event)));
        Landing { regions: self.local.clone().into(), verify: true, on_event }
    }

    fn export(&mut self, blocks: std::ops::Range<u32>) -> u64 {
        let blocks: Vec<u32> = blocks.collect();
        let tokens = u32::try_from(blocks.len()).unwrap() * 32;
        let view = self.server.with(|writer, _| writer.view(READER).cloned()).unwrap();
        let check = |block: &u32| check_block(&layout(), &view, *block, 32, &self.remote).unwrap();
        let checks = blocks.iter().map(check).collect();
        self.server.with(|writer, now_ms| writer.export(READER, 9, (0, tokens), blocks, checks, now_ms)).unwrap()
    }

    /// Until every pull has ended.
    fn transfer(&mut self) {
        self.exchange();
        while self.reader.pulling() > 0 {
            let event = self.events.1.recv_timeout(TIMEOUT).expect("an event in time");
            let PathEvent::Read { read, result } = event else { panic!("{event:?}") };
            let now_ms = self.now_ms();
            self.reader.on_read(self.conn, read, result, now_ms);
            self.exchange();
        }
    }

    /// Blocks land in reverse order: the first one in the last place.
    fn check(&self, blocks: std::ops::Range<u32>) {
        for layer in 0..LAYERS as usize {
            let last = blocks.len() as u64 - 1;
            for (n, block) in blocks.clone().enumerate() {
                let theirs = self.remote[layer].snapshot(u64::from(block) * BLOCK_BYTES as u64, BLOCK_BYTES).unwrap();
                let ours = self.local[layer].snapshot((last - n as u64) * BLOCK_BYTES as u64, BLOCK_BYTES).unwrap();
                assert!(theirs == ours, "layer {layer}, block {block}");
            }
        }
    }

    fn whole_transfer(&mut self) {
        let export = self.export(3..40);
        self.transfer();
        self.check(3..40);
        assert_eq!((self.reader.stats().pulls_done, self.reader.stats().pulls_failed), (1, 0));
        // QUIC holds windows until their bytes are acknowledged.
        let until = Instant::now() + TIMEOUT;
        while self.freed != [export] {
            assert!(Instant::now() < until, "the export is freed");
            std::thread::sleep(Duration::from_millis(1));
            self.exchange();
        }
        assert_eq!((self.reader.completing(), self.reader.bytes_in_flight()), (0, 0));
        self.path.as_ref().unwrap().close();
        let down = self.events.1.recv_timeout(TIMEOUT).unwrap();
        assert!(matches!(down, PathEvent::Down { .. }), "{down:?}");
        assert!(self.events.1.recv_timeout(Duration::from_millis(50)).is_err(), "Down is the last event");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn within_a_process() {
    let mut rig = Rig::new(regions(&arenas()), regions(&arenas()), WriterConfig::default());
    let path = MemoryPath::within(Arc::clone(&rig.server), (READER, rig.epoch), 2, &rig.landing()).unwrap();
    rig.path = Some(Box::new(path));
    rig.whole_transfer();
}

#[cfg(target_os = "linux")]
#[test]
fn over_shared_memory() {
    use lagoon_transport::direct::{ArenaServer, PRIVATE_FOLDER_PREFIX, fetch_arena};
    let remote = arenas();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let dir = tempfile::Builder::new().prefix(PRIVATE_FOLDER_PREFIX).permissions(private).tempdir().unwrap();
    let offered: Vec<_> = remote.iter().cloned().zip(0..).map(|(arena, region)| (region, arena)).collect();
    let server = ArenaServer::start(&dir.path().join("arenas.sock"), &offered).unwrap();
    let mut rig = Rig::new(regions(&remote), regions(&arenas()), WriterConfig::default());
    let bytes = u64::from(BLOCKS) * BLOCK_BYTES as u64;
    let views = server.arenas().iter().map(|arena| fetch_arena(arena, bytes).unwrap()).collect();
    rig.path = Some(Box::new(MemoryPath::shared(views, 2, &rig.landing()).unwrap()));
    rig.whole_transfer();
}

struct Nodes {
    runtime: tokio::runtime::Runtime,
    writer: Bound,
    reader: Node,
}

fn nodes(server: &Arc<ExportServer>) -> Nodes {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let guard = runtime.enter();
    let (writer, reader) = (node(), node().node);
    drop(guard);
    writer.node.serve_direct(Some(Arc::clone(server)));
    Nodes { runtime, writer, reader }
}

#[cfg(target_os = "linux")]
#[test]
fn over_quic_while_the_owners_loop_stands_still() {
    for streams in [1, 3] {
        let mut rig = Rig::new(regions(&arenas()), regions(&arenas()), WriterConfig::default());
        let nodes = nodes(&rig.server);
        rig.server.reader_is(READER, identity().subject());
        let config = StreamsConfig { reader: READER, epoch: rig.epoch, streams };
        let path = nodes.reader.open_direct(nodes.writer.node.local_addr(), config, &rig.landing());
        rig.path = Some(Box::new(path));
        rig.whole_transfer();
        nodes.runtime.shutdown_timeout(Duration::from_secs(1));
    }
}

/// The session in which the reader connected was another node's: not even its epoch opens.
#[cfg(target_os = "linux")]
#[test]
fn nobody_reads_in_another_nodes_name() {
    let rig = Rig::new(regions(&arenas()), regions(&arenas()), WriterConfig::default());
    let nodes = nodes(&rig.server);
    rig.server.reader_is(READER, identity_of("another").subject());
    let config = StreamsConfig { reader: READER, epoch: rig.epoch, streams: 1 };
    let _path = nodes.reader.open_direct(nodes.writer.node.local_addr(), config, &rig.landing());
    let down = rig.events.1.recv_timeout(TIMEOUT).unwrap();
    assert!(matches!(&down, PathEvent::Down { reason } if reason.contains("of node \"another\"")), "{down:?}");
    nodes.runtime.shutdown_timeout(Duration::from_secs(1));
}

/// One node could take all the connections that a writer has.
#[cfg(target_os = "linux")]
#[test]
fn a_node_has_its_share_of_direct_connections() {
    let rig = Rig::new(regions(&arenas()), regions(&arenas()), WriterConfig::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let guard = runtime.enter();
    let writer = node_at(loopback(), TransportConfig { direct_node_max: 2, ..TransportConfig::default() });
    writer.node.serve_direct(Some(Arc::clone(&rig.server)));
    let [reader, other] = ["one", "other"]
        .map(|name| Node::bind(loopback(), &identity_of(name), TransportConfig::default()).unwrap().into_node());
    drop(guard);
    let probe = |reader: &Node| {
        let config = StreamsConfig { reader: READER, epoch: rig.epoch, streams: 1 };
        runtime.block_on(reader.probe_direct(writer.node.local_addr(), config, 1 << 10, 1e15))
    };
    let config = StreamsConfig { reader: READER, epoch: rig.epoch, streams: 2 };
    let held = reader.open_direct(writer.node.local_addr(), config, &rig.landing());
    // One read on each: both are accepted when both are answered.
    for read in 0..2 {
        let remote = lagoon_transfer::Remote { region: 0, offset: 0, bytes: 100 };
        let transaction = lagoon_transfer::Transaction {
            segments: vec![lagoon_transfer::Segment { export: 77, remote }],
            bytes: 100,
            local: Some(lagoon_transfer::Local { region: 0, offset: 0 }),
            parts: Vec::new(),
        };
        held.read(ReadJob { read, transaction: Arc::new(transaction), pulls: BTreeMap::new() });
    }
    for _ in 0..2 {
        let event = rig.events.1.recv_timeout(TIMEOUT).unwrap();
        assert!(matches!(event, PathEvent::Read { result: Err(_), .. }), "{event:?}");
    }
    let refused = probe(&reader).unwrap_err();
    assert!(refused.contains("has 2 direct connections, its most"), "{refused}");
    probe(&other).unwrap();
    drop(held);
    let deadline = Instant::now() + TIMEOUT;
    while probe(&reader).is_err() {
        assert!(Instant::now() < deadline);
    }
    runtime.shutdown_timeout(Duration::from_secs(1));
}

/// The writer's owner is a thread that does not run for a second: reads of what it exported proceed all the while.
#[cfg(target_os = "linux")]
#[test]
fn reads_proceed_while_the_owner_sleeps() {
    let mut rig = Rig::new(regions(&arenas()), regions(&arenas()), WriterConfig::default());
    let nodes = nodes(&rig.server);
    let export = rig.export(0..BLOCKS);
    let (woken, awake) = channel();
    let server = Arc::clone(&rig.server);
    // The exchange of control messages needs the owner; it stops when the reader has received the export.
    let config = StreamsConfig { reader: READER, epoch: rig.epoch, streams: 2 };
    let path = nodes.reader.open_direct(nodes.writer.node.local_addr(), config, &rig.landing());
    let segments = |block: u64| {
        let remote =
            lagoon_transfer::Remote { region: 0, offset: block * BLOCK_BYTES as u64, bytes: BLOCK_BYTES as u64 };
        vec![lagoon_transfer::Segment { export, remote }]
    };
    let owner = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        woken.send(Instant::now()).unwrap();
        server.with(|writer, now_ms| writer.tick(now_ms));
    });
    let mut reads = 0u64;
    let mut slowest = Duration::ZERO;
    while awake.try_recv().is_err() {
        let transaction = lagoon_transfer::Transaction {
            segments: segments(reads % u64::from(BLOCKS)),
            bytes: BLOCK_BYTES as u64,
            local: Some(lagoon_transfer::Local { region: 1, offset: 0 }),
            parts: vec![lagoon_transfer::TransactionPart {
                request: 1,
                piece: 0,
                pieces: 1,
                at: 0,
                bytes: BLOCK_BYTES as u64,
                plain: true,
            }],
        };
        let asked = Instant::now();
        path.read(ReadJob { read: reads, transaction: Arc::new(transaction), pulls: BTreeMap::new() });
        let event = rig.events.1.recv_timeout(TIMEOUT).unwrap();
        assert!(matches!(event, PathEvent::Read { result: Ok(_), .. }), "{event:?}");
        slowest = slowest.max(asked.elapsed());
        reads += 1;
    }
    owner.join().unwrap();
    assert!(reads > 20 && slowest < Duration::from_millis(900), "{reads} reads, the slowest took {slowest:?}");
    nodes.runtime.shutdown_timeout(Duration::from_secs(1));
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_not_exported_is_refused_and_a_cut_path_goes_down() {
    let mut rig = Rig::new(regions(&arenas()), regions(&arenas()), WriterConfig::default());
    let nodes = nodes(&rig.server);
    let export = rig.export(0..4);
    let config = StreamsConfig { reader: READER, epoch: rig.epoch, streams: 1 };
    let path = nodes.reader.open_direct(nodes.writer.node.local_addr(), config, &rig.landing());
    let read = |export, offset| {
        let remote = lagoon_transfer::Remote { region: 0, offset, bytes: 100 };
        let transaction = lagoon_transfer::Transaction {
            segments: vec![lagoon_transfer::Segment { export, remote }],
            bytes: 100,
            local: Some(lagoon_transfer::Local { region: 0, offset: 0 }),
            parts: vec![lagoon_transfer::TransactionPart {
                request: 1,
                piece: 0,
                pieces: 1,
                at: 0,
                bytes: 100,
                plain: false,
            }],
        };
        path.read(ReadJob { read: offset, transaction: Arc::new(transaction), pulls: BTreeMap::new() });
        rig.events.1.recv_timeout(TIMEOUT).unwrap()
    };
    let code = |event: PathEvent| match event {
        PathEvent::Read { result: Err(lagoon_transfer::ReadFailure::Refused(code)), .. } => format!("{code:?}"),
        PathEvent::Read { result: Ok(_), .. } => "ok".to_owned(),
        other => panic!("{other:?}"),
    };
    assert_eq!(code(read(export, 0)), "ok");
    assert_eq!(code(read(export + 1, 0)), "UnknownLease");
    assert_eq!(code(read(export, 4 * BLOCK_BYTES as u64 - 99)), "OutOfRange");
    assert_eq!(code(read(export, u64::MAX - 50)), "OutOfRange");
    // Another acceptance, by another CONNECT.
    let (reader, epoch) = (READER, rig.epoch);
    rig.server.cut(reader, epoch);
    let down = rig.events.1.recv_timeout(TIMEOUT).unwrap();
    assert!(matches!(&down, PathEvent::Down { reason } if reason.contains("cut")), "{down:?}");
    let stale = StreamsConfig { epoch: epoch.wrapping_add(77), ..config };
    let path = nodes.reader.open_direct(nodes.writer.node.local_addr(), stale, &rig.landing());
    let remote = lagoon_transfer::Remote { region: 0, offset: 0, bytes: 100 };
    let transaction = lagoon_transfer::Transaction {
        segments: vec![lagoon_transfer::Segment { export, remote }],
        bytes: 100,
        local: Some(lagoon_transfer::Local { region: 0, offset: 0 }),
        parts: vec![lagoon_transfer::TransactionPart {
            request: 1,
            piece: 0,
            pieces: 1,
            at: 0,
            bytes: 100,
            plain: false,
        }],
    };
    path.read(ReadJob { read: 5, transaction: Arc::new(transaction), pulls: BTreeMap::new() });
    assert_eq!(code(rig.events.1.recv_timeout(TIMEOUT).unwrap()), "StaleEpoch");
    nodes.runtime.shutdown_timeout(Duration::from_secs(1));
}

#[cfg(target_os = "linux")]
#[test]
fn a_path_is_probed_and_a_node_that_exports_nothing_says_so() {
    let rig = Rig::new(regions(&arenas()), regions(&arenas()), WriterConfig::default());
    let nodes = nodes(&rig.server);
    let addr = nodes.writer.node.local_addr();
    let config = StreamsConfig { reader: READER, epoch: rig.epoch, streams: 1 };
    let probe = nodes.runtime.block_on(nodes.reader.probe_direct(addr, config, 8 << 20, 1e15)).unwrap();
    assert!(probe.bytes_per_s > 1e6 && probe.is_slow(), "{probe:?}");
    let within = Probe::within(&rig.server).unwrap();
    assert!(within.bytes_per_s > 0.0 && within.expected_bytes_per_s > 0.0, "{within:?}");
    nodes.writer.node.serve_direct(None);
    let _path = nodes.reader.open_direct(addr, config, &rig.landing());
    let down = rig.events.1.recv_timeout(TIMEOUT).unwrap();
    assert!(matches!(&down, PathEvent::Down { reason } if reason.contains("nothing is exported")), "{down:?}");
    nodes.runtime.shutdown_timeout(Duration::from_secs(1));
}
