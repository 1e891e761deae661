//! KV transfer between simulated processes (KVDirect §4): the shipped writer and readers, and paths in simulated time.
//!
//! As in the shell, a process's writer is separate from its instance's loop: reads are served while the loop is busy,
//! and the loop receives events in order, a little later. A path is a connection of its own: its reads are ordered
//! neither with the session's frames nor among each other. A path is lost alone or with a process at its end; data
//! sent before may still arrive until the reader learns of the loss. Bytes are read from the devices' stores when
//! they leave, and written when they arrive.

use super::World;
use crate::fabric::SILENCE_US;
use crate::happening::{Happening, Kv};
use crate::network::Network;
use crate::place::{Place, place_of};
use crate::rng::Rng;
use crate::runner::SimRunner;
use lagoon_instance::{Event, InstanceConfig, StageUser, TransferEffect, TransferEvent};
use lagoon_kv::Owner;
use lagoon_protocol::RefuseCode;
use lagoon_transfer::{
    ConnId, FreeReason, GrantId, Lander, Pulls, ReadFailure, Region, Span, Transaction, Writer, WriterConfig,
    WriterOutput, check_block,
};
use lagoon_types::limits::CONNECT_DEADLINE_MS;
use lagoon_types::{InstanceId, PhysBlock, SeqId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// A random time in microseconds: one in so many is of the rare ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spread {
    pub usual_us: Range<u64>,
    pub rare_us: Range<u64>,
    pub rare_one_in: u64,
}

impl Spread {
    fn draw(&self, rng: &mut Rng) -> u64 {
        let us = if rng.once_in(self.rare_one_in) { &self.rare_us } else { &self.usual_us };
        us.start + rng.below(us.end - us.start)
    }
}

/// Delays of transfers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delays {
    /// Between two threads of a process.
    pub thread: Spread,
    /// In queues and threads of connections.
    pub connection: Spread,
    /// From a read's admission until its bytes leave.
    pub read: Spread,
    /// Until an end learns that the process at the other end has died.
    pub death: Spread,
    /// Until an end learns that a path has broken, at most.
    pub broken_us: u64,
}

impl Delays {
    /// The simulator's.
    pub const CHAOS: Self = Self {
        thread: Spread { usual_us: 0..100, rare_us: 0..5_000, rare_one_in: 10 },
        connection: Spread { usual_us: 0..300, rare_us: 0..50_000, rare_one_in: 20 },
        // One in so many readers is slow.
        read: Spread { usual_us: 0..1_000, rare_us: 0..3_000_000, rare_one_in: 100 },
        death: Spread { usual_us: 0..20_000, rare_us: SILENCE_US..SILENCE_US + 20_000, rare_one_in: 4 },
        broken_us: 20_000,
    };

    /// All of them up to `us`.
    #[must_use]
    pub fn up_to(us: u64) -> Self {
        let spread = Spread { usual_us: 0..us + 1, rare_us: 0..us + 1, rare_one_in: 1 };
        let (thread, connection, read, death) = (spread.clone(), spread.clone(), spread.clone(), spread);
        Self { thread, connection, read, death, broken_us: us + 1 }
    }
}

/// Reads of a process that take a time each, one after the other.
#[derive(Clone, Copy, Debug)]
struct SlowReads {
    each_us: u64,
    /// When the last one leaves.
    until_us: u64,
}

/// A part to be exported: see [`TransferEffect::Export`].
#[derive(Debug)]
struct Part {
    job: SeqId,
    reader: InstanceId,
    request: u64,
    span: Span,
    blocks: Vec<u32>,
}

/// A process's side of transfers.
#[derive(Debug)]
struct Endpoint {
    life: u64,
    writer: Writer,
    paths: BTreeMap<ConnId, u64>,
    events: VecDeque<TransferEvent>,
    /// A [`Kv::Released`] is planned.
    armed: bool,
    parts: BTreeMap<u64, Part>,
    /// Exports whose end the loop has not learnt of: the sequence that was prefilled, and its blocks.
    exports: BTreeMap<u64, (SeqId, Vec<u32>)>,
    slow: Option<SlowReads>,
}

/// A read in progress.
#[derive(Debug)]
struct Read {
    transaction: Arc<Transaction>,
    pulls: Pulls,
    /// Owner of the destination memory at the time of the request.
    owner: Option<User>,
}

/// Owner of destination memory: of a block of the store, or of the staging buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum User {
    Store(Owner),
    Beside(Option<StageUser>),
}

/// A transfer path between two processes.
#[derive(Debug)]
struct Path {
    conn: ConnId,
    reader: (Place, u64),
    /// The reader's number.
    id: InstanceId,
    epoch: u64,
    writer: Place,
    /// Life of the writer's process, once the path has reached it.
    life: Option<u64>,
    /// The reader accepts data.
    open: bool,
    /// The writer serves no more reads.
    cut: bool,
    reads: BTreeMap<u64, Read>,
    grants: BTreeMap<u64, GrantId>,
    answers: BTreeMap<u64, Result<Vec<u8>, RefuseCode>>,
}

/// Transfers of all processes.
#[derive(Debug)]
pub struct Transfers {
    rng: Rng,
    endpoints: BTreeMap<Place, Endpoint>,
    paths: BTreeMap<u64, Path>,
    issued: u64,
    delays: Delays,
    /// Readers whose next bytes are damaged.
    damaged: BTreeSet<Place>,
    /// Number of reads whose bytes have arrived.
    pub arrived: u64,
    /// Violations: reads that were unauthorised, or believed to be over.
    pub violations: Vec<String>,
}

impl Transfers {
    /// Transfers of no process; `rng` draws their delays.
    #[must_use]
    pub fn new(rng: Rng, delays: Delays) -> Self {
        Self {
            rng,
            endpoints: BTreeMap::new(),
            paths: BTreeMap::new(),
            issued: 0,
            delays,
            damaged: BTreeSet::new(),
            arrived: 0,
            violations: Vec::new(),
        }
    }

    /// Corrupts the last byte of the next read that reaches a process.
    pub fn damage_next_read(&mut self, place: Place) {
        self.damaged.insert(place);
    }

    /// Makes each later read of a process take a time, one after the other; `None` ends that.
    pub fn slow_reads(&mut self, place: Place, each_us: Option<u64>) {
        let of = self.endpoints.get_mut(&place).expect("the process reads KV of others");
        of.slow = each_us.map(|each_us| SlowReads { each_us, until_us: 0 });
    }

    fn issue(&mut self) -> u64 {
        self.issued += 1;
        self.issued
    }

    /// Starts a process; it takes part if its configuration has KV transfer.
    pub(crate) fn start(&mut self, place: Place, life: u64, config: &InstanceConfig) {
        let Some(transfer) = &config.transfer else { return };
        let (incarnation, addr) = (config.incarnation, config.quic_addr.clone());
        let writer = WriterConfig { incarnation, addr, ..WriterConfig::default() };
        let endpoint = Endpoint {
            life,
            writer: Writer::new(transfer.layout.clone(), writer),
            paths: BTreeMap::new(),
            events: VecDeque::new(),
            armed: false,
            parts: BTreeMap::new(),
            exports: BTreeMap::new(),
            slow: None,
        };
        self.endpoints.insert(place, endpoint);
    }

    /// Exports that a process's loop believes to be read: the sequence that was prefilled, and its blocks.
    pub fn exports(&self, place: Place) -> impl Iterator<Item = (u64, SeqId, &[u32])> {
        let of = self.endpoints.get(&place).into_iter().flat_map(|endpoint| &endpoint.exports);
        of.map(|(export, (job, blocks))| (*export, *job, blocks.as_slice()))
    }

    /// Number of exports that a process's writer keeps or is asked to make.
    #[must_use]
    pub fn kept(&self, place: Place) -> usize {
        self.endpoints.get(&place).map_or(0, |of| of.writer.exports() + of.parts.len())
    }

    /// Paths with an end at `a`, or between `a` and `b`.
    fn paths_at(&self, a: Place, b: Option<Place>) -> Vec<u64> {
        let ends = |path: &Path| [path.reader.0, path.writer];
        let hit = |path: &&Path| ends(path).contains(&a) && b.is_none_or(|b| ends(path).contains(&b));
        self.paths.iter().filter(|(_, path)| hit(path)).map(|(id, _)| *id).collect()
    }

    /// Whether a reader still waits for a read of an export.
    fn is_awaited(&self, place: Place, export: u64) -> bool {
        let reads = |read: &Read| read.transaction.segments.iter().any(|segment| segment.export == export);
        self.paths.values().any(|path| path.writer == place && path.open && path.reads.values().any(reads))
    }

    fn forget_if_over(&mut self, path: u64) {
        if self.paths.get(&path).is_some_and(|of| !of.open && of.cut) {
            self.paths.remove(&path);
        }
    }
}

impl<R: SimRunner<Bill = N::Bill>, N: Network> World<R, N> {
    /// Carries out a transfer effect of a process.
    pub(crate) fn transfer(&mut self, place: Place, effect: TransferEffect) {
        let now_ms = self.clock_ms(place);
        let Some(of) = self.kv.endpoints.get_mut(&place) else {
            // A peer may send anything to a process without a writer.
            assert!(matches!(effect, TransferEffect::ToWriter { .. }), "node {place} has no transports: {effect:?}");
            return;
        };
        match effect {
            TransferEffect::ToWriter { from, body } => of.writer.on_control(from, &body, now_ms),
            TransferEffect::Export { job, reader, request, part: span, blocks } => {
                let life = of.life;
                self.kv.issued += 1;
                let part = self.kv.issued;
                of.parts.insert(part, Part { job, reader, request, span, blocks });
                let after = self.local_us();
                self.agenda.after(after, Happening::Kv(Kv::Checked { place, life, part }));
            }
            TransferEffect::Revoke { export } => of.writer.revoke(export, now_ms),
            TransferEffect::Fence { reader, incarnation } => of.writer.fence(reader, incarnation, now_ms),
            TransferEffect::Open { conn, reader, addr, epoch, .. } => self.open_path(place, conn, reader, &addr, epoch),
            TransferEffect::Close { conn } => match of.paths.get(&conn).copied() {
                Some(path) => self.break_path(path),
                None => self.deliver(place, TransferEvent::Down { conn }),
            },
            TransferEffect::Read { conn, read, transaction, pulls } => {
                // The end of a lost path has been reported.
                if let Some(path) = of.paths.get(&conn).copied() {
                    self.ask(path, read, transaction, pulls);
                }
            }
            TransferEffect::Check { pull, piece, of } => {
                let regions = self.regions(place);
                let check = of.check_landed(piece, &regions).map_err(|error| error.to_string());
                self.deliver(place, TransferEvent::Checked { pull, piece, check });
            }
        }
        self.drain_writer(place);
    }

    fn clock_ms(&self, place: Place) -> u64 {
        self.process(place).map_or(0, |process| process.clock.now_ms(self.now_us()))
    }

    fn regions(&self, place: Place) -> Vec<Arc<dyn Region>> {
        self.process(place).map(|process| process.runner.regions()).unwrap_or_default()
    }

    /// Delay between two threads of a process.
    fn local_us(&mut self) -> u64 {
        self.kv.delays.thread.draw(&mut self.kv.rng)
    }

    /// Carries a read or its reply from one process to another.
    fn carry(&mut self, from: Place, to: Place, bytes: usize, what: Kv) {
        self.carry_at(self.now_us(), (from, to), bytes, what);
    }

    /// As [`Self::carry`], from a later time on.
    fn carry_at(&mut self, at_us: u64, (from, to): (Place, Place), bytes: usize, what: Kv) {
        let later = self.kv.delays.connection.draw(&mut self.kv.rng);
        let at_us = self.fabric.arrival_us(from, to, bytes, at_us + later);
        self.agenda.at(at_us, Happening::Kv(what));
    }

    /// Carries a read from its reader to the writer.
    fn carry_read(&mut self, (from, to): (Place, Place), path: u64, read: u64) {
        let now = self.now_us();
        let slow = self.kv.endpoints.get_mut(&from).and_then(|of| of.slow.as_mut());
        let at_us = slow.map_or(now, |slow| {
            slow.until_us = slow.until_us.max(now) + slow.each_us;
            slow.until_us
        });
        self.carry_at(at_us, (from, to), 0, Kv::Asked { path, read });
    }

    fn deliver(&mut self, place: Place, event: TransferEvent) {
        let after = self.local_us();
        let Some(of) = self.kv.endpoints.get_mut(&place) else { return };
        of.events.push_back(event);
        if !std::mem::replace(&mut of.armed, true) {
            self.agenda.after(after, Happening::Kv(Kv::Released { place, life: of.life }));
        }
    }

    /// Advances a writer's clock.
    pub(crate) fn tick_writer(&mut self, place: Place) {
        let now_ms = self.clock_ms(place);
        if let Some(of) = self.kv.endpoints.get_mut(&place) {
            of.writer.tick(now_ms);
            self.drain_writer(place);
        }
    }

    fn drain_writer(&mut self, place: Place) {
        while let Some(output) = self.kv.endpoints.get_mut(&place).and_then(|of| of.writer.poll()) {
            match output {
                WriterOutput::Send { to, body } => self.deliver(place, TransferEvent::FromWriter { to, body }),
                WriterOutput::Freed { export, why, .. } => {
                    if why == FreeReason::Completed && self.kv.is_awaited(place, export) {
                        let violation = format!("node {place}: export {export} was completed before its last read");
                        self.kv.violations.push(violation);
                    }
                    self.deliver(place, TransferEvent::Freed { export });
                }
                WriterOutput::Cut { reader, epoch } => {
                    let of = |path: &Path| path.writer == place && path.id == reader && path.epoch == epoch;
                    let paths = self.kv.paths.iter().filter(|(_, path)| of(path));
                    let paths: Vec<u64> = paths.map(|(id, _)| *id).collect();
                    paths.into_iter().for_each(|path| self.break_path(path));
                }
                WriterOutput::Connected { .. } => {}
            }
        }
    }

    fn open_path(&mut self, place: Place, conn: ConnId, id: InstanceId, addr: &str, epoch: u64) {
        let Some(writer) = place_of(addr) else {
            return self.deliver(place, TransferEvent::Down { conn });
        };
        let path = self.kv.issue();
        let Some(endpoint) = self.kv.endpoints.get_mut(&place) else { return };
        endpoint.paths.insert(conn, path);
        let of = Path {
            conn,
            reader: (place, endpoint.life),
            id,
            epoch,
            writer,
            life: None,
            open: true,
            cut: false,
            reads: BTreeMap::new(),
            grants: BTreeMap::new(),
            answers: BTreeMap::new(),
        };
        self.kv.paths.insert(path, of);
        self.carry(place, writer, 0, Kv::Opened { path });
        self.agenda.after(CONNECT_DEADLINE_MS * 1000, Happening::Kv(Kv::Late { path }));
    }

    /// Breaks a path; both ends learn of it separately.
    fn break_path(&mut self, path: u64) {
        for what in [Kv::Down { path }, Kv::Lost { path }] {
            let after = self.kv.rng.below(self.kv.delays.broken_us);
            self.agenda.after(after, Happening::Kv(what));
        }
    }

    /// Breaks the paths between two processes; their session stays.
    pub fn cut_paths(&mut self, a: Place, b: Place) {
        self.kv.paths_at(a, Some(b)).into_iter().for_each(|path| self.break_path(path));
    }

    /// Begins a partition between two processes, or a pause of one.
    pub(crate) fn silence_paths(&mut self, a: Place, b: Option<Place>) {
        for path in self.kv.paths_at(a, b) {
            let after = SILENCE_US + self.kv.rng.below(500_000);
            self.agenda.after(after, Happening::Kv(Kv::Silent { path }));
        }
    }

    /// Removes a process and all its paths and exports.
    pub(crate) fn kill_paths(&mut self, place: Place) {
        self.kv.endpoints.remove(&place);
        self.kv.damaged.remove(&place);
        for path in self.kv.paths_at(place, None) {
            let after = self.kv.delays.death.draw(&mut self.kv.rng);
            let Some(of) = self.kv.paths.get_mut(&path) else { continue };
            if of.reader.0 == place {
                of.open = false;
                of.reads.clear();
                self.agenda.after(after, Happening::Kv(Kv::Lost { path }));
            } else {
                of.cut = true;
                of.grants.clear();
                self.agenda.after(after, Happening::Kv(Kv::Down { path }));
            }
            self.kv.forget_if_over(path);
        }
    }

    fn ask(&mut self, path: u64, read: u64, transaction: Arc<Transaction>, pulls: Pulls) {
        let Some(reader) = self.kv.paths.get(&path).map(|of| of.reader.0) else { return };
        let owner = self.owner_of(reader, &transaction);
        let Some(of) = self.kv.paths.get_mut(&path) else { return };
        of.reads.insert(read, Read { transaction, pulls, owner });
        if of.life.is_some() {
            let writer = of.writer;
            self.carry_read((reader, writer), path, read);
        }
    }

    /// Owner of the first block that a read of one extent is written to.
    fn owner_of(&self, place: Place, transaction: &Transaction) -> Option<User> {
        let process = self.process(place)?;
        let rm = process.instance.rmanager();
        let block_bytes = rm.config().shape.layer_token_bytes() as u64 * u64::from(rm.config().block_tokens);
        let block = u32::try_from(transaction.local?.offset / block_bytes).ok()?;
        if process.runner.is_staged() {
            let user = process.instance.stages().find(|(_, blocks)| blocks.contains(&block));
            return Some(User::Beside(user.map(|(user, _)| user)));
        }
        Some(User::Store(rm.pool.owner(PhysBlock(block))))
    }

    /// Resume time of a stopped end of a path.
    fn stopped(&self, path: u64, what: Kv) -> Option<u64> {
        let of = self.kv.paths.get(&path)?;
        match what {
            Kv::Arrived { .. } | Kv::Down { .. } | Kv::Late { .. } => self.transports_paused(of.reader.0),
            Kv::Opened { .. } | Kv::Asked { .. } | Kv::Served { .. } | Kv::Lost { .. } => {
                self.transports_paused(of.writer)
            }
            Kv::Silent { .. } | Kv::Released { .. } | Kv::Checked { .. } => None,
        }
    }

    pub(crate) fn on_kv(&mut self, what: Kv) {
        let stopped = match what {
            Kv::Released { place, .. } | Kv::Checked { place, .. } => self.paused(place),
            Kv::Opened { path } | Kv::Late { path } | Kv::Silent { path } | Kv::Down { path } | Kv::Lost { path } => {
                self.stopped(path, what)
            }
            Kv::Asked { path, .. } | Kv::Served { path, .. } | Kv::Arrived { path, .. } => self.stopped(path, what),
        };
        if let Some(until) = stopped {
            return self.agenda.at(until + 1, Happening::Kv(what));
        }
        match what {
            Kv::Released { place, life } => self.on_released(place, life),
            Kv::Checked { place, life, part } => self.on_blocks_checked(place, life, part),
            Kv::Opened { path } => self.on_opened(path),
            Kv::Late { path } => {
                if self.kv.paths.get(&path).is_some_and(|of| of.life.is_none()) {
                    self.break_path(path);
                }
            }
            Kv::Asked { path, read } => self.on_asked(path, read),
            Kv::Served { path, read } => self.on_served(path, read),
            Kv::Arrived { path, read } => self.on_arrived(path, read),
            Kv::Silent { path } => {
                let ends = self.kv.paths.get(&path).map(|of| (of.reader.0, of.writer));
                if ends.is_some_and(|(a, b)| self.fabric.is_silent(a, b, self.now_us())) {
                    self.break_path(path);
                }
            }
            Kv::Down { path } => self.on_path_down(path),
            Kv::Lost { path } => self.on_path_lost(path),
        }
    }

    fn on_released(&mut self, place: Place, life: u64) {
        let Some(of) = self.kv.endpoints.get_mut(&place).filter(|of| of.life == life) else { return };
        of.armed = false;
        for event in std::mem::take(&mut of.events) {
            if let TransferEvent::Freed { export } = &event {
                self.kv.endpoints.get_mut(&place).into_iter().for_each(|of| _ = of.exports.remove(export));
            }
            self.handle(place, Event::Transfer(event));
        }
    }

    fn on_blocks_checked(&mut self, place: Place, life: u64, part: u64) {
        let (now_ms, regions) = (self.clock_ms(place), self.regions(place));
        let Some(of) = self.kv.endpoints.get_mut(&place).filter(|of| of.life == life) else { return };
        let Some(Part { job, reader, request, span, blocks }) = of.parts.remove(&part) else { return };
        let layout = Arc::clone(of.writer.layout());
        let view = of.writer.view(reader).and_then(|view| view.within(span.layers.as_ref()));
        let export = view.ok_or_else(|| format!("{reader} is not connected")).and_then(|view| {
            let size = layout.block_tokens();
            let check = |(n, block): (u32, &u32)| {
                let filled = size.min(span.tokens.saturating_sub(n * size));
                check_block(&layout, &view, *block, filled, &regions).map_err(|error| error.to_string())
            };
            let checks = (0..).zip(&blocks).map(check).collect::<Result<Vec<_>, _>>()?;
            let made = of.writer.export(reader, request, span, blocks.clone(), checks, now_ms);
            made.map_err(|error| error.to_string())
        });
        if let Ok(export) = export {
            of.exports.insert(export, (job, blocks));
        }
        self.deliver(place, TransferEvent::Exported { job, export });
        self.drain_writer(place);
    }

    fn on_opened(&mut self, path: u64) {
        let Some((place, writer)) = self.kv.paths.get(&path).map(|of| (of.reader.0, of.writer)) else { return };
        // The process there now may be another one than requested.
        let life = self.kv.endpoints.get(&writer).map(|of| of.life);
        let Some(of) = self.kv.paths.get_mut(&path).filter(|of| of.open && !of.cut) else { return };
        of.life = life;
        if life.is_none() {
            return self.break_path(path);
        }
        let reads: Vec<u64> = of.reads.keys().copied().collect();
        for read in reads {
            self.carry_read((place, writer), path, read);
        }
    }

    fn on_asked(&mut self, path: u64, read: u64) {
        let Some(of) = self.kv.paths.get_mut(&path).filter(|of| !of.cut) else { return };
        let (place, id, epoch, life) = (of.writer, of.id, of.epoch, of.life);
        // The reader may have given the read up while it was in flight.
        let Some(transaction) = of.reads.get(&read).map(|read| Arc::clone(&read.transaction)) else { return };
        let now_ms = self.clock_ms(place);
        let Some(writer) = self.kv.endpoints.get_mut(&place).filter(|w| Some(w.life) == life) else { return };
        let admitted = writer.writer.admit(id, epoch, &transaction.segments, now_ms);
        let stale = admitted.is_ok() && writer.writer.epoch(id) != Some(epoch);
        if stale {
            self.kv.violations.push(format!("node {place} serves a read of an earlier connection of {id}"));
        }
        let Some(of) = self.kv.paths.get_mut(&path) else { return };
        match admitted {
            Ok(grant) => {
                of.grants.insert(read, grant);
                let after = self.kv.delays.read.draw(&mut self.kv.rng);
                self.agenda.after(after, Happening::Kv(Kv::Served { path, read }));
            }
            Err(code) => {
                of.answers.insert(read, Err(code));
                let to = of.reader.0;
                self.carry(place, to, 0, Kv::Arrived { path, read });
            }
        }
    }

    fn on_served(&mut self, path: u64, read: u64) {
        let Some(of) = self.kv.paths.get_mut(&path).filter(|of| !of.cut) else { return };
        let (place, to) = (of.writer, of.reader.0);
        let (grant, asked) = (of.grants.remove(&read), of.reads.get(&read).map(|read| Arc::clone(&read.transaction)));
        let (now_ms, regions) = (self.clock_ms(place), self.regions(place));
        if let Some(transaction) = asked {
            let mut bytes = Vec::new();
            for segment in &transaction.segments {
                let len = usize::try_from(segment.remote.bytes).unwrap_or(usize::MAX);
                let window = regions[segment.remote.region as usize].snapshot(segment.remote.offset, len);
                bytes.extend_from_slice(&window.expect("what is admitted lies in the store"));
            }
            let len = bytes.len();
            if let Some(of) = self.kv.paths.get_mut(&path) {
                of.answers.insert(read, Ok(bytes));
            }
            self.carry(place, to, len, Kv::Arrived { path, read });
        }
        if let Some((grant, writer)) = grant.zip(self.kv.endpoints.get_mut(&place)) {
            writer.writer.end_read(grant, now_ms);
        }
        self.drain_writer(place);
    }

    fn on_arrived(&mut self, path: u64, read: u64) {
        let Some(of) = self.kv.paths.get_mut(&path) else { return };
        let (Some(answer), Some(asked)) = (of.answers.remove(&read), of.reads.remove(&read)) else { return };
        if !of.open {
            return;
        }
        let (conn, place) = (of.conn, of.reader.0);
        let result = match answer {
            Err(code) => Err(ReadFailure::Refused(code)),
            Ok(mut bytes) => {
                if self.owner_of(place, &asked.transaction) != asked.owner {
                    self.kv.violations.push(format!("node {place}: a read arrives in memory that was given back"));
                }
                self.kv.arrived += 1;
                if self.kv.damaged.remove(&place) {
                    bytes.last_mut().into_iter().for_each(|byte| *byte ^= 1);
                }
                let regions = self.regions(place);
                let mut lander = Lander::new(&asked.transaction, &asked.pulls, &regions, true);
                let landed = lander.push(&bytes).and_then(|()| lander.finish());
                let process = self.processes.get_mut(place).and_then(Option::as_mut);
                process.into_iter().for_each(|process| process.runner.take_regions(&regions));
                Ok(landed.expect("what is asked for has a place in the store"))
            }
        };
        self.deliver(place, TransferEvent::Read { conn, read, result });
    }

    fn on_path_down(&mut self, path: u64) {
        let Some(of) = self.kv.paths.get_mut(&path).filter(|of| of.open) else { return };
        of.open = false;
        of.reads.clear();
        let (conn, (place, life)) = (of.conn, of.reader);
        self.kv.forget_if_over(path);
        let Some(endpoint) = self.kv.endpoints.get_mut(&place).filter(|e| e.life == life) else { return };
        if endpoint.paths.get(&conn) == Some(&path) {
            endpoint.paths.remove(&conn);
            endpoint.slow.iter_mut().for_each(|slow| slow.until_us = 0);
            self.deliver(place, TransferEvent::Down { conn });
        }
    }

    fn on_path_lost(&mut self, path: u64) {
        let Some(of) = self.kv.paths.get_mut(&path).filter(|of| !of.cut) else { return };
        of.cut = true;
        let (place, life, grants) = (of.writer, of.life, std::mem::take(&mut of.grants));
        self.kv.forget_if_over(path);
        let now_ms = self.clock_ms(place);
        let Some(writer) = self.kv.endpoints.get_mut(&place).filter(|w| Some(w.life) == life) else { return };
        grants.into_values().for_each(|grant| writer.writer.end_read(grant, now_ms));
        self.drain_writer(place);
    }
}
