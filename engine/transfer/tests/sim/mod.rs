//! Readers and writers with real bytes over a network that delays, reorders, and with faults also loses, repeats,
//! damages and breaks. A seed is a run: `World::new(seed, faults)` does the same thing every time.
//!
//! Control messages of two processes that live are delivered in any order. A path carries reads and data; when it
//! breaks, reads that are on their way may still arrive at the writer, and the reader writes nothing of it any more. A
//! process that is replaced forgets everything; what its predecessor sent is gone (a session of the transport ends).

pub(crate) mod memory;

use lagoon_protocol::ControlBody;
use lagoon_transfer::{
    ConnId, Dim, Failure, FreeReason, GrantId, Landed, Lander, Offer, PullId, Pulls, ReadFailure, Reader, ReaderConfig,
    ReaderOutput, Span, Transaction, View, Writer, WriterConfig, WriterOutput, check_block,
};
use lagoon_types::{InstanceId, KvDType};
use memory::{HEADS, LAYERS, Memory};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

const BLOCKS: u32 = 24;
const TTL_MS: u64 = 1_500;
const ACT_MS: u64 = 4_000;
const SETTLE_MS: u64 = 20_000;

#[derive(Debug)]
enum Event {
    Control {
        from: InstanceId,
        from_life: u64,
        to: InstanceId,
        to_life: u64,
        body: ControlBody,
    },
    /// A read arrives at a writer.
    Request {
        path: u64,
        read: u64,
        transaction: Arc<Transaction>,
    },
    /// Data of a read arrives at its reader, or a refusal.
    Data {
        path: u64,
        read: u64,
        transaction: Arc<Transaction>,
        grant: Option<GrantId>,
        data: Result<Vec<u8>, ReadFailure>,
    },
    Checked {
        reader: usize,
        life: u64,
        pull: PullId,
        piece: usize,
    },
    PathDown {
        path: u64,
    },
    Unlock {
        reader: usize,
        life: u64,
        blocks: Vec<u32>,
    },
    Fence {
        reader: InstanceId,
        incarnation: u64,
    },
    Cancel {
        reader: usize,
        life: u64,
        pull: PullId,
    },
}

/// A path as long as anything of it is in progress.
#[derive(Debug)]
struct Path {
    reader: usize,
    reader_life: u64,
    conn: ConnId,
    writer: usize,
    writer_life: u64,
    epoch: u64,
    /// The reader still takes data.
    open: bool,
    /// Cut at the writer's end.
    cut: bool,
    slow: bool,
    grants: BTreeSet<GrantId>,
}

struct WriterNode {
    id: InstanceId,
    life: u64,
    sm: Writer,
    memory: Memory,
    free: Vec<u32>,
    /// By export: reader, its life, blocks.
    owned: BTreeMap<u64, (InstanceId, u64, Vec<u32>)>,
    /// What COMPLETEs were acknowledged, by reader's life.
    acknowledged: BTreeMap<u64, u64>,
}

struct Pulled {
    offer: Offer,
    blocks: Vec<u32>,
    first: u32,
}

struct ReaderNode {
    id: InstanceId,
    life: u64,
    sm: Reader,
    memory: Memory,
    loss: bool,
    free: Vec<u32>,
    paths: BTreeMap<ConnId, u64>,
    waiting: VecDeque<Offer>,
    pulls: BTreeMap<PullId, Pulled>,
    geometry: Pulls,
    /// Exports that arrived in full.
    done: BTreeSet<u64>,
}

pub(crate) struct World {
    now_ms: u64,
    rng: ChaCha8Rng,
    faults: bool,
    quiet: bool,
    /// Exports may be of some layers only.
    pub(crate) parts: bool,
    readers: Vec<ReaderNode>,
    writers: Vec<WriterNode>,
    paths: BTreeMap<u64, Path>,
    events: BTreeMap<(u64, u64), Event>,
    numbers: u64,
    pub(crate) seen: BTreeMap<&'static str, u64>,
}

fn reader_sm(memory: &Memory, incarnation: u64, loss_allowed: bool, rng: &mut ChaCha8Rng) -> Reader {
    let (conn_bytes, bytes) = (rng.random_range(200..3000), rng.random_range(300..4000));
    let read_bytes = rng.random_range(16..400);
    let config = ReaderConfig {
        incarnation,
        conn_bytes,
        bytes,
        read_bytes,
        piece_bytes: read_bytes * (1 + read_bytes % 2),
        read_ms: 500,
        request_ms: rng.random_range(1_500..8_000),
        repeat_ms: 100,
        renew_ms: 300,
        loss_allowed,
        coalesce: rng.random_bool(0.8),
        ..ReaderConfig::default()
    };
    Reader::new(memory.layout.clone(), config)
}

fn writer_sm(memory: &Memory, incarnation: u64) -> Writer {
    let config = WriterConfig {
        incarnation,
        credit_bytes: 2000,
        ttl_ms: TTL_MS,
        export_ms_max: 15_000,
        read_ms: 1_000,
        repeat_ms: 100,
        ..WriterConfig::default()
    };
    Writer::new(memory.layout.clone(), config)
}

impl Memory {
    /// Blocks that hold nothing of anybody.
    fn scribble(&self, blocks: &[u32]) {
        for plane in self.layout.planes() {
            for block in blocks {
                for layer in 0..plane.size(Dim::Layer) {
                    for token in 0..self.layout.block_tokens() {
                        let offset = plane.grid().offset(&[*block, layer, 0, token, 0, 0]);
                        let region = self.regions[plane.region as usize].as_ref();
                        lagoon_transfer::region::write(region, offset, &[0x55; 2]).unwrap();
                    }
                }
            }
        }
    }
}

impl World {
    pub(crate) fn new(seed: u64, faults: bool) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let dtypes = [KvDType::BF16, KvDType::BF16, KvDType::F16, KvDType::F32];
        let draw = |rng: &mut ChaCha8Rng, range: bool| {
            let dtype = dtypes[rng.random_range(0..dtypes.len())];
            let cut = range && rng.random_bool(0.3);
            let layers = if cut { rng.random_range(0..2)..LAYERS } else { 0..LAYERS };
            let heads = if cut { rng.random_range(0..2)..HEADS } else { 0..HEADS };
            memory::draw(rng, BLOCKS, dtype, layers, heads)
        };
        let writers = (0..rng.random_range(1..=2)).map(|n| {
            let (memory, life) = (draw(&mut rng, false), rng.random::<u64>());
            let sm = writer_sm(&memory, life);
            let (free, owned) = ((0..BLOCKS).collect(), BTreeMap::new());
            WriterNode { id: InstanceId(101 + n), life, sm, memory, free, owned, acknowledged: BTreeMap::new() }
        });
        let writers: Vec<WriterNode> = writers.collect();
        let readers = (0..rng.random_range(1..=2)).map(|n| {
            let memory = draw(&mut rng, true);
            let (life, loss) = (rng.random(), rng.random_bool(0.8));
            let sm = reader_sm(&memory, life, loss, &mut rng);
            ReaderNode {
                id: InstanceId(1 + n),
                life,
                sm,
                memory,
                loss,
                free: (0..BLOCKS).collect(),
                paths: BTreeMap::new(),
                waiting: VecDeque::new(),
                pulls: BTreeMap::new(),
                geometry: Pulls::new(),
                done: BTreeSet::new(),
            }
        });
        let readers: Vec<ReaderNode> = readers.collect();
        let mut world = Self {
            now_ms: 1,
            rng,
            faults,
            quiet: false,
            parts: false,
            readers,
            writers,
            paths: BTreeMap::new(),
            events: BTreeMap::new(),
            numbers: 0,
            seen: BTreeMap::new(),
        };
        (0..world.readers.len()).for_each(|reader| world.connect_all(reader));
        world
    }

    fn connect_all(&mut self, reader: usize) {
        for writer in 0..self.writers.len() {
            let id = self.writers[writer].id;
            self.readers[reader].sm.connect(id, self.now_ms).unwrap();
        }
        self.drain_reader(reader);
    }

    fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.faults && !self.quiet && self.rng.random_bool(probability)
    }

    fn schedule(&mut self, delay_ms: u64, event: Event) {
        self.numbers += 1;
        self.events.insert((self.now_ms + delay_ms, self.numbers), event);
    }

    fn delay_ms(&mut self) -> u64 {
        match self.rng.random_range(0..100) {
            0 if self.faults && !self.quiet => self.rng.random_range(200..2_500),
            0..10 => self.rng.random_range(10..60),
            _ => self.rng.random_range(0..5),
        }
    }

    fn life_of(&self, id: InstanceId) -> u64 {
        let reader = self.readers.iter().find(|node| node.id == id).map(|node| node.life);
        reader.or_else(|| self.writers.iter().find(|node| node.id == id).map(|node| node.life)).unwrap()
    }

    fn send(&mut self, from: InstanceId, to: InstanceId, body: ControlBody) {
        let (from_life, to_life) = (self.life_of(from), self.life_of(to));
        if self.chance(0.05) {
            return self.count("control lost");
        }
        let copies = if self.chance(0.05) { 2 } else { 1 };
        for _ in 0..copies {
            let delay_ms = self.delay_ms();
            self.schedule(delay_ms, Event::Control { from, from_life, to, to_life, body: body.clone() });
        }
    }

    /// Acts and faults for a while, then rest: everything must end, and nothing be left.
    pub(crate) fn run(mut self) -> BTreeMap<&'static str, u64> {
        while self.now_ms < ACT_MS {
            self.act();
            let step = self.rng.random_range(1..40);
            self.pass(step);
        }
        self.quiet = true;
        let end_ms = self.now_ms + SETTLE_MS;
        while self.now_ms < end_ms && !(self.now_ms > ACT_MS + 2 * TTL_MS && self.is_at_rest()) {
            self.pass(40);
        }
        self.check_rest();
        self.seen
    }

    fn pass(&mut self, ms: u64) {
        let until_ms = self.now_ms + ms;
        while let Some(entry) = self.events.first_entry() {
            if entry.key().0 > until_ms {
                break;
            }
            self.now_ms = self.now_ms.max(entry.key().0);
            let event = entry.remove();
            self.handle(event);
        }
        self.now_ms = until_ms;
        for reader in 0..self.readers.len() {
            self.readers[reader].sm.tick(until_ms);
            self.drain_reader(reader);
        }
        for writer in 0..self.writers.len() {
            self.writers[writer].sm.tick(until_ms);
            self.drain_writer(writer);
        }
    }

    fn act(&mut self) {
        if self.rng.random_bool(0.6) {
            self.produce();
        }
        if self.chance(0.02) {
            let open: Vec<u64> = self.paths.iter().filter(|(_, p)| p.open).map(|(id, _)| *id).collect();
            if !open.is_empty() {
                let path = open[self.rng.random_range(0..open.len())];
                self.count("path broke");
                self.break_path(path);
            }
        }
        if self.chance(0.003) {
            let reader = self.rng.random_range(0..self.readers.len());
            self.crash_reader(reader);
        }
        if self.chance(0.002) {
            let writer = self.rng.random_range(0..self.writers.len());
            self.crash_writer(writer);
        }
        if self.rng.random_bool(0.02) {
            let writer = self.rng.random_range(0..self.writers.len());
            let node = &mut self.writers[writer];
            if let Some(export) = node.owned.keys().next().copied() {
                node.sm.revoke(export, self.now_ms);
                self.count("revoked");
                self.drain_writer(writer);
            }
        }
    }

    /// A writer has prefilled a request.
    fn produce(&mut self) {
        let writer = self.rng.random_range(0..self.writers.len());
        let reader = self.rng.random_range(0..self.readers.len());
        let (to, to_life) = (self.readers[reader].id, self.readers[reader].life);
        let size = self.writers[writer].memory.layout.block_tokens();
        let tokens = self.rng.random_range(1..=size * 5);
        let request = self.rng.random::<u64>() >> 1;
        let node = &mut self.writers[writer];
        let count = tokens.div_ceil(size) as usize;
        let Some(view) = node.sm.view(to).cloned() else { return };
        if node.free.len() < count {
            return;
        }
        let blocks: Vec<u32> = node.free.split_off(node.free.len() - count);
        node.memory.store(request, &blocks, 0..tokens);
        let layers = (self.parts && self.rng.random_bool(0.5)).then(|| {
            let first = self.rng.random_range(view.layers.clone());
            first..self.rng.random_range(first + 1..=view.layers.end)
        });
        let view = view.within(layers.as_ref()).unwrap();
        let span = Span { first_token: 0, tokens, layers };
        let checks = blocks.iter().enumerate().map(|(n, block)| {
            let here = (tokens - u32::try_from(n).unwrap() * size).min(size);
            check_block(&node.memory.layout, &view, *block, here, &node.memory.regions).unwrap()
        });
        let checks = checks.collect();
        let export = node.sm.export(to, request, span, blocks.clone(), checks, self.now_ms).unwrap();
        node.owned.insert(export, (to, to_life, blocks));
        self.count("exported");
        self.drain_writer(writer);
    }

    fn crash_reader(&mut self, reader: usize) {
        self.count("reader crashed");
        let broken: Vec<u64> = self.paths.iter().filter(|(_, p)| p.reader == reader).map(|(id, _)| *id).collect();
        broken.into_iter().for_each(|path| self.break_path(path));
        let (id, incarnation) = (self.readers[reader].id, self.readers[reader].life);
        let delay_ms = self.rng.random_range(0..3_000);
        self.schedule(delay_ms, Event::Fence { reader: id, incarnation });
        let life = self.rng.random();
        let node = &mut self.readers[reader];
        node.sm = reader_sm(&node.memory, life, node.loss, &mut self.rng);
        (node.life, node.free) = (life, (0..BLOCKS).collect());
        node.paths.clear();
        node.waiting.clear();
        node.pulls.clear();
        node.geometry.clear();
        node.done.clear();
        self.connect_all(reader);
    }

    fn crash_writer(&mut self, writer: usize) {
        self.count("writer crashed");
        let broken: Vec<u64> = self.paths.iter().filter(|(_, p)| p.writer == writer).map(|(id, _)| *id).collect();
        let life = self.rng.random();
        let node = &mut self.writers[writer];
        node.sm = writer_sm(&node.memory, life);
        (node.life, node.free) = (life, (0..BLOCKS).collect());
        node.owned.clear();
        node.acknowledged.clear();
        node.memory.scribble(&node.free.clone());
        let id = node.id;
        broken.into_iter().for_each(|path| self.break_path(path));
        for reader in 0..self.readers.len() {
            self.readers[reader].sm.on_session_down(id, self.now_ms);
            self.drain_reader(reader);
        }
    }

    /// Both ends lose a path, at different times.
    fn break_path(&mut self, id: u64) {
        self.cut_at_writer(id);
        let delay_ms = self.rng.random_range(0..100);
        self.schedule(delay_ms, Event::PathDown { path: id });
    }

    fn cut_at_writer(&mut self, id: u64) {
        let Some(path) = self.paths.get_mut(&id) else { return };
        path.cut = true;
        let grants = std::mem::take(&mut path.grants);
        let (writer, life) = (path.writer, path.writer_life);
        let node = &mut self.writers[writer];
        if node.life == life {
            grants.into_iter().for_each(|grant| node.sm.end_read(grant, self.now_ms));
            self.drain_writer(writer);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Control { from, from_life, to, to_life, body } => {
                if self.life_of(from) == from_life && self.life_of(to) == to_life {
                    self.deliver(from, to, &body);
                }
            }
            Event::Request { path, read, transaction } => self.on_request(path, read, transaction),
            Event::Data { path, read, transaction, grant, data } => self.on_data(path, read, &transaction, grant, data),
            Event::Checked { reader, life, pull, piece } => {
                let node = &mut self.readers[reader];
                if node.life == life {
                    let geometry = Arc::clone(node.sm.pull_of(pull).expect("a pull lives while it is checked"));
                    let check = geometry.check_landed(piece, &node.memory.regions);
                    node.sm.on_checked(pull, piece, check.map_err(|e| e.to_string()), self.now_ms);
                    self.drain_reader(reader);
                }
            }
            Event::PathDown { path } => self.on_path_down(path),
            Event::Unlock { reader, life, blocks } => {
                if self.readers[reader].life == life {
                    self.unlock(reader, blocks);
                }
            }
            Event::Fence { reader, incarnation } => {
                for writer in 0..self.writers.len() {
                    self.writers[writer].sm.fence(reader, incarnation, self.now_ms);
                    self.drain_writer(writer);
                }
            }
            Event::Cancel { reader, life, pull } => {
                if self.readers[reader].life == life {
                    self.readers[reader].sm.cancel(pull, self.now_ms);
                    self.drain_reader(reader);
                }
            }
        }
    }

    fn deliver(&mut self, from: InstanceId, to: InstanceId, body: &ControlBody) {
        if let Some(reader) = self.readers.iter().position(|node| node.id == to) {
            self.readers[reader].sm.on_control(from, body, self.now_ms);
            self.drain_reader(reader);
        } else if let Some(writer) = self.writers.iter().position(|node| node.id == to) {
            self.writers[writer].sm.on_control(from, body, self.now_ms);
            self.drain_writer(writer);
        }
    }

    /// The path's own task serves a read: the writer's owner takes no part.
    fn on_request(&mut self, id: u64, read: u64, transaction: Arc<Transaction>) {
        let Some(path) = self.paths.get(&id) else { return };
        let (writer, reader, epoch, slow) = (path.writer, path.reader, path.epoch, path.slow);
        let cut = path.cut;
        if self.writers[writer].life != path.writer_life {
            return;
        }
        let to = self.readers[reader].id;
        let node = &mut self.writers[writer];
        let admitted = node.sm.admit(to, epoch, &transaction.segments, self.now_ms);
        let (grant, data) = match admitted {
            Ok(grant) => {
                assert_eq!(node.sm.epoch(to), Some(epoch), "a read of an earlier connection was served");
                let mut bytes = Vec::new();
                for segment in &transaction.segments {
                    let region = &node.memory.regions[segment.remote.region as usize];
                    let len = usize::try_from(segment.remote.bytes).unwrap();
                    bytes.extend_from_slice(&region.snapshot(segment.remote.offset, len).unwrap());
                }
                if cut {
                    // The path is gone: its task ends the read at once.
                    node.sm.end_read(grant, self.now_ms);
                    return self.drain_writer(writer);
                }
                self.paths.get_mut(&id).unwrap().grants.insert(grant);
                (Some(grant), Ok(bytes))
            }
            Err(code) => {
                self.count("read refused");
                (None, Err(ReadFailure::Refused(code)))
            }
        };
        let delay_ms = if slow { self.rng.random_range(0..3_000) } else { self.delay_ms() };
        self.schedule(delay_ms, Event::Data { path: id, read, transaction, grant, data });
    }

    fn on_data(
        &mut self,
        id: u64,
        read: u64,
        transaction: &Transaction,
        grant: Option<GrantId>,
        data: Result<Vec<u8>, ReadFailure>,
    ) {
        let damage = self.chance(0.01);
        let Some(path) = self.paths.get_mut(&id) else { return };
        let (reader, conn, writer, open, cut) = (path.reader, path.conn, path.writer, path.open, path.cut);
        if let Some(grant) = grant.filter(|grant| path.grants.remove(grant)) {
            self.writers[writer].sm.end_read(grant, self.now_ms);
            self.drain_writer(writer);
        }
        if !open || cut {
            return;
        }
        if damage {
            self.count("damaged");
        }
        let node = &mut self.readers[reader];
        let result = data.map(|mut bytes| {
            if damage {
                bytes[0] ^= 0x10;
            }
            for part in &transaction.parts {
                assert!(node.pulls.contains_key(&PullId(part.request)), "a write to memory that was given back");
            }
            land(transaction, &node.geometry, &node.memory, &bytes, read.is_multiple_of(2))
        });
        node.sm.on_read(conn, read, result, self.now_ms);
        self.drain_reader(reader);
    }

    fn on_path_down(&mut self, id: u64) {
        let Some(path) = self.paths.get_mut(&id).filter(|path| path.open) else { return };
        path.open = false;
        let (reader, life, conn) = (path.reader, path.reader_life, path.conn);
        let node = &mut self.readers[reader];
        if node.life == life && node.paths.get(&conn) == Some(&id) {
            node.paths.remove(&conn);
            node.sm.on_path_down(conn, self.now_ms);
            self.drain_reader(reader);
        }
    }

    fn unlock(&mut self, reader: usize, blocks: Vec<u32>) {
        let node = &mut self.readers[reader];
        node.memory.scribble(&blocks);
        node.free.extend(blocks);
        self.pull_waiting(reader);
    }

    /// Offers that wait for memory, the oldest first: all or nothing.
    fn pull_waiting(&mut self, reader: usize) {
        while let Some(offer) = self.readers[reader].waiting.pop_front() {
            let first = self.rng.random_range(0..3);
            let node = &mut self.readers[reader];
            let count = (offer.tokens + first).div_ceil(node.memory.layout.block_tokens()) as usize;
            if count > BLOCKS as usize {
                node.sm.decline(offer.conn, offer.export, self.now_ms);
                continue;
            }
            if node.free.len() < count {
                node.waiting.push_front(offer);
                return;
            }
            let blocks = node.free.split_off(node.free.len() - count);
            let (conn, export) = (offer.conn, offer.export);
            match node.sm.pull(conn, export, blocks.clone(), first, self.now_ms) {
                Ok(pull) => {
                    node.geometry.insert(pull.0, Arc::clone(node.sm.pull_of(pull).unwrap()));
                    node.pulls.insert(pull, Pulled { offer, blocks, first });
                    if self.rng.random_bool(0.05) {
                        let (delay_ms, life) = (self.rng.random_range(0..50), self.readers[reader].life);
                        self.schedule(delay_ms, Event::Cancel { reader, life, pull });
                    }
                }
                Err(_) => node.free.extend(blocks),
            }
        }
    }

    fn drain_reader(&mut self, reader: usize) {
        loop {
            self.readers[reader].sm.pump();
            let Some(output) = self.readers[reader].sm.poll() else { return };
            self.on_reader_output(reader, output);
        }
    }

    fn on_reader_output(&mut self, reader: usize, output: ReaderOutput) {
        let life = self.readers[reader].life;
        match output {
            ReaderOutput::Send { to, body } => self.send(self.readers[reader].id, to, body),
            ReaderOutput::Open { conn, writer, epoch, .. } => {
                let writer = self.writers.iter().position(|node| node.id == writer).unwrap();
                let slow = self.chance(0.1);
                self.numbers += 1;
                let path = Path {
                    reader,
                    reader_life: life,
                    conn,
                    writer,
                    writer_life: self.writers[writer].life,
                    epoch,
                    open: true,
                    cut: false,
                    slow,
                    grants: BTreeSet::new(),
                };
                self.paths.insert(self.numbers, path);
                self.readers[reader].paths.insert(conn, self.numbers);
            }
            ReaderOutput::Close { conn } => {
                self.count("path closed");
                let path = self.readers[reader].paths[&conn];
                self.cut_at_writer(path);
                self.schedule(1, Event::PathDown { path });
            }
            ReaderOutput::Read { conn, read, transaction, .. } => {
                let path = self.readers[reader].paths[&conn];
                let delay_ms = self.delay_ms();
                self.schedule(delay_ms, Event::Request { path, read, transaction });
            }
            ReaderOutput::Check { pull, piece } => {
                let delay_ms = self.rng.random_range(0..3);
                self.schedule(delay_ms, Event::Checked { reader, life, pull, piece });
            }
            ReaderOutput::Offered(offer) => {
                if self.rng.random_bool(0.05) {
                    self.readers[reader].sm.decline(offer.conn, offer.export, self.now_ms);
                    self.count("declined");
                } else {
                    self.readers[reader].waiting.push_back(offer);
                    self.pull_waiting(reader);
                }
            }
            ReaderOutput::Withdrawn { conn, export } => {
                self.readers[reader].waiting.retain(|offer| (offer.conn, offer.export) != (conn, export));
            }
            ReaderOutput::Done { pull } => self.on_done(reader, pull),
            ReaderOutput::Failed { pull, why } => self.on_failed(reader, pull, &why),
            ReaderOutput::Refused { .. } => self.count("refused"),
        }
    }

    fn on_done(&mut self, reader: usize, pull: PullId) {
        self.count("done");
        let node = &mut self.readers[reader];
        let pulled = node.pulls.remove(&pull).expect("a pull ends once");
        let geometry = node.geometry.remove(&pull.0).unwrap();
        let view: View = geometry.conversion().view.clone();
        let (request, tokens, size) = (pulled.offer.request, pulled.offer.tokens, node.memory.layout.block_tokens());
        let wrong = (0..tokens).find_map(|token| {
            let slot = token + pulled.first;
            let place = (pulled.blocks[(slot / size) as usize], slot % size);
            node.memory.wrong(&view, request, place, token)
        });
        assert_eq!(wrong, None, "bytes differ");
        node.done.insert(pulled.offer.export);
        let (life, delay_ms) = (node.life, self.rng.random_range(0..300));
        self.schedule(delay_ms, Event::Unlock { reader, life, blocks: pulled.blocks });
    }

    fn on_failed(&mut self, reader: usize, pull: PullId, why: &Failure) {
        let name = match why {
            Failure::Cancelled => "cancelled",
            Failure::Deadline(_) => "deadline",
            Failure::WriterLost(_) => "writer lost",
            Failure::ExportLost => "export lost",
            Failure::Refused(_) => "pull refused",
            Failure::Damaged { .. } => "damaged for good",
            Failure::Overflow(_) | Failure::Memory(_) => panic!("{why}"),
        };
        self.count(name);
        let revoked = self.seen.contains_key("revoked");
        let harmless =
            matches!(why, Failure::Cancelled) || revoked && matches!(why, Failure::Refused(_) | Failure::ExportLost);
        assert!(self.faults || harmless, "a pull failed without faults: {why}");
        let node = &mut self.readers[reader];
        let pulled = node.pulls.remove(&pull).expect("a pull ends once");
        node.geometry.remove(&pull.0);
        self.unlock(reader, pulled.blocks);
    }

    fn drain_writer(&mut self, writer: usize) {
        while let Some(output) = self.writers[writer].sm.poll() {
            match output {
                WriterOutput::Send { to, body } => {
                    if let ControlBody::TransferCompleted(m) = &body {
                        let life = self.life_of(to);
                        let before = self.writers[writer].acknowledged.insert(life, m.seq).unwrap_or(0);
                        assert!(before <= m.seq, "acknowledgements go back from {before} to {}", m.seq);
                    }
                    self.send(self.writers[writer].id, to, body);
                }
                WriterOutput::Freed { export, blocks, why, .. } => self.on_freed(writer, export, blocks, why),
                WriterOutput::Cut { reader, epoch } => {
                    let reader = self.readers.iter().position(|node| node.id == reader).unwrap();
                    let cut = |path: &Path| path.writer == writer && path.reader == reader && path.epoch == epoch;
                    let ids: Vec<u64> =
                        self.paths.iter().filter(|(_, p)| !p.cut && cut(p)).map(|(id, _)| *id).collect();
                    ids.into_iter().for_each(|path| self.break_path(path));
                }
                WriterOutput::Connected { .. } => self.count("connected"),
            }
        }
    }

    fn on_freed(&mut self, writer: usize, export: u64, blocks: Vec<u32>, why: FreeReason) {
        let (reader, life, owned) = self.writers[writer].owned.remove(&export).expect("an export is freed once");
        assert_eq!(owned, blocks);
        let serving = self.paths.values().any(|path| {
            path.writer == writer && path.grants.iter().any(|grant| self.writers[writer].sm.is_reading(*grant, export))
        });
        assert!(!serving, "an export was freed while it was being read");
        match why {
            FreeReason::Completed => {
                self.count("completed");
                let node = self.readers.iter().find(|node| node.id == reader).unwrap();
                assert!(node.life != life || node.done.contains(&export), "completed before its last transfer");
            }
            FreeReason::Expired => {
                self.count("expired");
                assert!(self.faults, "a lease ended without faults");
                let node = self.readers.iter().find(|node| node.id == reader).unwrap();
                let pending = node.life != life || !node.done.contains(&export) || node.sm.is_completing(export);
                assert!(pending, "a COMPLETE was taken for acknowledged that was not carried out");
            }
            FreeReason::Abandoned | FreeReason::Revoked | FreeReason::ReaderLost => {}
        }
        let node = &mut self.writers[writer];
        node.memory.scribble(&blocks);
        node.free.extend(blocks);
    }

    fn is_at_rest(&self) -> bool {
        self.readers.iter().all(|node| node.sm.pulling() + node.sm.completing() == 0 && node.waiting.is_empty())
            && self.writers.iter().all(|node| node.owned.is_empty())
    }

    fn check_rest(&self) {
        for node in &self.readers {
            assert_eq!((node.sm.pulling(), node.sm.completing()), (0, 0), "a reader hangs at {} ms", self.now_ms);
            assert_eq!(node.sm.bytes_in_flight(), 0, "credits leaked");
            assert!(node.pulls.is_empty() && node.waiting.is_empty());
        }
        for node in &self.writers {
            assert_eq!((node.owned.len(), node.sm.exports()), (0, 0), "exports leaked");
            assert_eq!(node.free.len(), BLOCKS as usize, "blocks leaked");
        }
    }
}

/// Bytes as a path brings them, in pieces of odd sizes or at once.
fn land(transaction: &Transaction, pulls: &Pulls, memory: &Memory, bytes: &[u8], at_once: bool) -> Landed {
    let mut lander = Lander::new(transaction, pulls, &memory.regions, true);
    let size = if at_once { bytes.len() } else { 37 };
    bytes.chunks(size).for_each(|part| lander.push(part).unwrap());
    lander.finish().unwrap()
}
