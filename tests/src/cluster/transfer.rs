//! KV transfer of a pool under test: the shipped writer behind its server, paths in virtual time.
//!
//! As over a real path, reads are served whatever the owner's instance does; a read is admitted when it is due, not
//! when it is issued; a path goes down with the process at its other end, or when the writer cuts it.

use super::World;
use lagoon_backend::DeviceError;
use lagoon_instance::{Event, InstanceConfig, TransferEffect, TransferEvent};
use lagoon_protocol::TransferArena;
use lagoon_runner::{Command, KvMemory, KvRegion, MapId, PeerMemory, Report};
use lagoon_transfer::{
    ConnId, DeviceRegion, Lander, Pulls, ReadFailure, Region, Transaction, Writer, WriterConfig, WriterOutput,
    check_blocks,
};
use lagoon_transport::direct::ExportServer;
use lagoon_types::InstanceId;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A pending event or read at a node.
#[derive(Debug)]
enum Due {
    Tell(Box<TransferEvent>),
    Read { conn: ConnId, read: u64, transaction: Arc<Transaction>, pulls: Pulls },
}

#[derive(Debug)]
struct Path {
    writer: usize,
    /// Life of the writer's process.
    life: u64,
    reader: InstanceId,
    epoch: u64,
}

/// A node's memory for transports, and its reads.
#[derive(Debug)]
pub(super) struct Transport {
    pub(super) server: Arc<ExportServer>,
    clock: Arc<AtomicU64>,
    paths: BTreeMap<ConnId, Path>,
    due: VecDeque<(u64, Due)>,
    /// Corrupt the next read's bytes.
    pub(super) damage: bool,
    /// Duration of each read, one after the other (`None`: immediate), and the slow reads.
    trickle_ms: Option<u64>,
    slow: VecDeque<(u64, Due)>,
}

impl World {
    /// Maps the memory of a node with peer access on another one's device: by name, where the shell uses a socket.
    pub(super) fn map(&mut self, node: usize, map: MapId, blocks: u32, memory: &TransferArena) {
        let owners = self.nodes.iter().filter(|n| n.instance.is_some()).filter_map(|n| n.lent.as_ref());
        let window = owners.map(|(name, window)| (name, window)).find(|(name, _)| **name == memory.socket);
        let of = |(_, window): (&String, &KvRegion)| PeerMemory {
            device: window.device(),
            bytes: window.bytes(),
            descriptor: window.descriptor().unwrap(),
        };
        match window.map(of) {
            Some(memory) => {
                self.nodes[node].commands.push_back(Command::Map { map, blocks, memory });
                self.nodes[node].busy = true;
            }
            None => {
                let error = Some(DeviceError::Unsupported("nobody lends that".to_owned()));
                self.nodes[node].reports.push_back((self.now_ms, Report::Mapped { map, error }));
            }
        }
    }
}

impl Transport {
    pub(super) fn new(config: &InstanceConfig, memory: &KvMemory) -> Option<Self> {
        let layout = config.transfer.as_ref()?.layout.clone();
        let clock = Arc::new(AtomicU64::new(0));
        let writer = Writer::new(layout, WriterConfig { incarnation: config.incarnation, ..WriterConfig::default() });
        let regions = match memory {
            KvMemory::Host(arenas) => arenas.iter().map(|arena| Arc::new(arena.clone()) as Arc<dyn Region>).collect(),
            KvMemory::Device { region, layers, layer_bytes } => {
                DeviceRegion::consecutive(region, *layers, *layer_bytes as u64)
            }
        };
        let time = Arc::clone(&clock);
        let server = ExportServer::new(writer, regions, move || time.load(Relaxed));
        Some(Self {
            server,
            clock,
            paths: BTreeMap::new(),
            due: VecDeque::new(),
            damage: false,
            trickle_ms: None,
            slow: VecDeque::new(),
        })
    }

    fn deliver(&mut self, at_ms: u64, event: TransferEvent) {
        self.due.push_back((at_ms, Due::Tell(Box::new(event))));
    }

    fn read(&mut self, (now_ms, ready_ms): (u64, u64), due: Due) {
        match self.trickle_ms {
            None => self.due.push_back((ready_ms, due)),
            Some(each_ms) => {
                let after_ms = self.slow.back().map_or(now_ms, |(at, _)| now_ms.max(*at));
                self.slow.push_back((after_ms + each_ms, due));
            }
        }
    }

    /// Drops the reads of a path that is gone.
    fn forget(&mut self, conn: ConnId) {
        let other = |(_, due): &(u64, Due)| !matches!(due, Due::Read { conn: of, .. } if *of == conn);
        self.due.retain(other);
        self.slow.retain(other);
    }

    /// Whether an event or read is due. Events wait for a paused loop, reads do not.
    pub(super) fn is_due(&self, now_ms: u64, paused: bool) -> bool {
        let due = |(at, due): &(u64, Due)| *at <= now_ms && !(paused && matches!(due, Due::Tell(_)));
        self.due.front().is_some_and(due) || self.slow.front().is_some_and(due)
    }

    /// Time of the next due event or read.
    pub(super) fn next_due_ms(&self) -> Option<u64> {
        let at = |queue: &VecDeque<(u64, Due)>| queue.front().map(|(at, _)| *at);
        [at(&self.due), at(&self.slow)].into_iter().flatten().min()
    }

    fn next(&mut self, now_ms: u64) -> Option<Due> {
        let due = |(at, _): &mut (u64, Due)| *at <= now_ms;
        let next = self.due.pop_front_if(due).or_else(|| self.slow.pop_front_if(due));
        next.map(|(_, due)| due)
    }
}

impl World {
    /// Carries out a transfer effect of an instance.
    pub(super) fn transfer(&mut self, node: usize, effect: TransferEffect) {
        let (now_ms, ready_ms) = (self.now_ms, self.now_ms + self.delay());
        let reader = self.nodes[node].id();
        let lives: Vec<Option<u64>> = self.nodes.iter().map(|n| n.instance.as_ref().map(|_| n.life)).collect();
        let Some(of) = &mut self.nodes[node].transport else { return };
        of.clock.store(now_ms, Relaxed);
        match effect {
            TransferEffect::ToWriter { from, body } => of.server.with(|w, now| w.on_control(from, &body, now)),
            TransferEffect::Export { job, reader, request, part, blocks } => {
                let view = of.server.with(|w, _| w.view(reader)?.within(part.layers.as_ref()));
                let layout = of.server.with(|w, _| Arc::clone(w.layout()));
                let export = view.ok_or_else(|| format!("{reader} is not connected")).and_then(|view| {
                    let checks = check_blocks(&layout, &view, &blocks, part.tokens, of.server.regions()).unwrap();
                    let made = of.server.with(|w, now| w.export(reader, request, part, blocks.clone(), checks, now));
                    made.map_err(|error| error.to_string())
                });
                of.deliver(ready_ms, TransferEvent::Exported { job, export });
            }
            TransferEffect::Revoke { export } => of.server.with(|w, now| w.revoke(export, now)),
            TransferEffect::Fence { reader, incarnation } => of.server.with(|w, now| w.fence(reader, incarnation, now)),
            TransferEffect::Open { conn, addr, epoch, .. } => {
                let writer = (0..lives.len()).find(|n| super::node::address(*n) == addr);
                match writer.and_then(|writer| Some((writer, lives[writer]?))).zip(reader) {
                    Some(((writer, life), reader)) => {
                        of.paths.insert(conn, Path { writer, life, reader, epoch });
                    }
                    None => of.deliver(ready_ms, TransferEvent::Down { conn }),
                }
            }
            TransferEffect::Close { conn } => {
                of.paths.remove(&conn);
                of.forget(conn);
                of.deliver(ready_ms, TransferEvent::Down { conn });
            }
            TransferEffect::Read { conn, read, transaction, pulls } => {
                of.read((now_ms, ready_ms), Due::Read { conn, read, transaction, pulls });
            }
            TransferEffect::Check { pull, piece, of: what } => {
                let check = what.check_landed(piece, of.server.regions()).map_err(|error| error.to_string());
                of.deliver(ready_ms, TransferEvent::Checked { pull, piece, check });
            }
        }
        self.drain_writer(node);
    }

    /// Carries out the outputs of a node's writer.
    pub(super) fn drain_writer(&mut self, node: usize) {
        let ready_ms = self.now_ms + self.delay();
        let mut cut = Vec::new();
        let Some(of) = &mut self.nodes[node].transport else { return };
        while let Some(output) = of.server.with(|w, _| w.poll()) {
            match output {
                WriterOutput::Send { to, body } => of.deliver(ready_ms, TransferEvent::FromWriter { to, body }),
                WriterOutput::Freed { export, .. } => of.deliver(ready_ms, TransferEvent::Freed { export }),
                WriterOutput::Cut { reader, epoch } => cut.push((reader, epoch)),
                WriterOutput::Connected { .. } => {}
            }
        }
        for (reader, epoch) in cut {
            let is = |p: &Path| p.writer == node && (p.reader, p.epoch) == (reader, epoch);
            self.break_paths(is);
        }
    }

    fn break_paths(&mut self, which: impl Fn(&Path) -> bool) {
        let now_ms = self.now_ms;
        for transport in self.nodes.iter_mut().filter_map(|n| n.transport.as_mut()) {
            let hit: Vec<ConnId> = transport.paths.iter().filter(|(_, p)| which(p)).map(|(conn, _)| *conn).collect();
            for conn in hit {
                transport.paths.remove(&conn);
                transport.forget(conn);
                transport.deliver(now_ms, TransferEvent::Down { conn });
            }
        }
    }

    /// Handles the next due event or read of a node; false if there is none.
    pub(super) fn transfer_step(&mut self, node: usize) -> bool {
        let now_ms = self.now_ms;
        let Some(of) = &mut self.nodes[node].transport else { return false };
        let Some(due) = of.next(now_ms) else { return false };
        match due {
            Due::Tell(event) => self.handle(node, Event::Transfer(*event)),
            Due::Read { conn, read, transaction, pulls } => {
                let Some(path) = of.paths.get(&conn) else { return true };
                let (writer, life, reader, epoch) = (path.writer, path.life, path.reader, path.epoch);
                let alive = self.nodes[writer].instance.is_some() && self.nodes[writer].life == life;
                if !alive {
                    self.break_paths(|p| p.writer == writer && p.life == life);
                    return true;
                }
                let result = self.serve((writer, node), (reader, epoch), &transaction, &pulls);
                self.handle(node, Event::Transfer(TransferEvent::Read { conn, read, result }));
                self.drain_writer(writer);
            }
        }
        true
    }

    /// Copies a read's bytes, as an in-process path does.
    fn serve(
        &mut self,
        (writer, node): (usize, usize),
        (reader, epoch): (InstanceId, u64),
        transaction: &Transaction,
        pulls: &Pulls,
    ) -> Result<lagoon_transfer::Landed, ReadFailure> {
        let now_ms = self.now_ms;
        let source = self.nodes[writer].transport.as_ref().unwrap();
        source.clock.store(now_ms, Relaxed);
        let windows = source.server.read(reader, epoch, &transaction.segments).map_err(ReadFailure::Refused)?;
        let own = self.nodes[node].transport.as_mut().unwrap();
        let damage = std::mem::take(&mut own.damage);
        let mut lander = Lander::new(transaction, pulls, own.server.regions(), true);
        let last = windows.len() - 1;
        for (n, window) in windows.iter().enumerate() {
            let mut bytes = window.to_vec();
            if damage && n == last {
                *bytes.last_mut().unwrap() ^= 1;
            }
            lander.push(&bytes).unwrap();
        }
        self.reads += 1;
        Ok(lander.finish().unwrap())
    }

    /// Advances the clock of a node's writer.
    pub(super) fn tick_writer(&mut self, node: usize) {
        let now_ms = self.now_ms;
        let Some(of) = &self.nodes[node].transport else { return };
        of.clock.store(now_ms, Relaxed);
        of.server.with(Writer::tick);
        self.drain_writer(node);
    }

    /// Corrupts the bytes of a node's next read.
    pub fn damage_next_read(&mut self, node: usize) {
        self.nodes[node].transport.as_mut().unwrap().damage = true;
    }

    /// Makes each later read of a node take `each_ms`, one after the other; `None` ends that.
    pub fn slow_reads(&mut self, node: usize, each_ms: Option<u64>) {
        self.nodes[node].transport.as_mut().unwrap().trickle_ms = each_ms;
    }

    /// Breaks all paths to a node's memory; its process goes on.
    pub fn break_paths_to(&mut self, node: usize) {
        self.break_paths(|p| p.writer == node);
    }

    /// Number of exports that a node's transports serve.
    #[must_use]
    pub fn exports(&self, node: usize) -> usize {
        self.nodes[node].transport.as_ref().map_or(0, |t| t.server.with(|w, _| w.exports()))
    }
}
