//! The symbolic device: a store of keys, passes in two micro-batches, peers' work first. Work is ordered as in the
//! shipped executor; its time is a linear model.

use super::drafter::Drafter;
use super::model::{KEY_BYTES, Key, LAYERS, Windows};
use super::pass::{Pass, Progress};
use super::remote_request::{self, RemoteRequest};
use crate::runner::SimRunner;
use lagoon_runner::{Command, PassError, PeerMemory, Report, StageWork};
use lagoon_transfer::{HeapRegion, Region, region};
use lagoon_types::{MicroBatch, StepId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Times of work, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    /// A layer of a pass, or a peer's frame, of any size.
    pub layer_ns: u64,
    /// Each row.
    pub row_ns: u64,
    /// Each key that is attended to, written or read.
    pub key_ns: u64,
}

/// One token's keys, by layer.
pub(super) type Slot = [Key; LAYERS as usize];

/// A copy between the store and the staging buffer, a piece of a layer at a time; the remaining pieces.
#[derive(Debug)]
struct Staging {
    work: StageWork,
    left: VecDeque<(u32, (u32, u32, u32))>,
}

/// The symbolic device; see the module's documentation.
#[derive(Debug)]
pub struct Symbolic {
    pub(super) store: Vec<Slot>,
    /// Staging buffer of transports, if they cannot use the store.
    beside: Vec<Slot>,
    stages: VecDeque<Staging>,
    /// The last turn copied staged keys: copies and passes alternate.
    staged_last: bool,
    pub(super) windows: Windows,
    /// Keys of layers with rings, by ring; made when first used.
    pub(super) rings: Vec<Vec<Slot>>,
    /// Slots of a ring.
    pub(super) ring_slots: u32,
    speed: Speed,
    pub(super) remote_requests: VecDeque<RemoteRequest>,
    passes: [Option<Pass>; 2],
    drafter: Drafter,
    /// The micro-batch that advanced last; micro-batches alternate.
    last: MicroBatch,
    /// Violations: wrong keys in a completed step.
    pub violations: Vec<String>,
}

impl Symbolic {
    /// A device with `slots` tokens of KV and `beside` tokens of staging buffer; 0 if transports use the store. A step has at
    /// most `step_rows` rows.
    #[must_use]
    pub fn new((slots, beside): (u32, u32), windows: Windows, step_rows: u32, speed: Speed) -> Self {
        Self {
            store: vec![Slot::default(); slots as usize],
            beside: vec![Slot::default(); beside as usize],
            stages: VecDeque::new(),
            staged_last: false,
            windows,
            rings: Vec::new(),
            ring_slots: windows.rings.map_or(0, |window| window - 1 + step_rows),
            speed,
            remote_requests: VecDeque::new(),
            passes: [None, None],
            drafter: Drafter::default(),
            last: MicroBatch::Remote,
            violations: Vec::new(),
        }
    }

    fn time_us(&self, rows: u64, keys: u64) -> u64 {
        let Speed { layer_ns, row_ns, key_ns } = self.speed;
        (layer_ns + rows * row_ns + keys * key_ns).div_ceil(1000).max(1)
    }

    /// Copies a piece, or reports that all are copied.
    fn stage(&mut self, reports: &mut Vec<Report>) -> Option<u64> {
        let staging = self.stages.front_mut()?;
        let Some((layer, (slot, beside, tokens))) = staging.left.pop_front() else {
            let stage = staging.work.stage;
            self.stages.pop_front();
            reports.push(Report::Staged { stage, error: None });
            return Some(1);
        };
        for n in 0..tokens as usize {
            let stored = &mut self.store[slot as usize + n][layer as usize];
            let staged = &mut self.beside[beside as usize + n][layer as usize];
            if staging.work.inward { *stored = *staged } else { *staged = *stored }
        }
        Some(self.time_us(0, u64::from(tokens)))
    }

    /// Memory that transports see: the store, or the staging buffer.
    fn shared(&self) -> &[Slot] {
        if self.beside.is_empty() { &self.store } else { &self.beside }
    }

    fn pass_of(&mut self, step: StepId) -> Option<&mut Pass> {
        self.passes.iter_mut().flatten().find(|p| p.step() == step)
    }

    fn advance(&mut self, micro_batch: MicroBatch, reports: &mut Vec<Report>) -> Option<u64> {
        let mut pass = self.passes[micro_batch.index()].take()?;
        let (rows, mut keys) = (pass.rows(), 0);
        match pass.advance(self, &mut keys, reports) {
            Ok(Progress::Waiting) => {
                self.passes[micro_batch.index()] = Some(pass);
                return None;
            }
            Ok(Progress::Advanced) => self.passes[micro_batch.index()] = Some(pass),
            Ok(Progress::Done(samples)) => {
                if pass.wrong_keys > 0 {
                    let violation = format!("{} was completed with {} wrong keys", pass.step(), pass.wrong_keys);
                    self.violations.push(violation);
                }
                reports.push(Report::Done { step: pass.step(), micro_batch, samples });
            }
            Err(error) => self.failed(pass.step(), micro_batch, error, reports),
        }
        self.last = micro_batch;
        Some(self.time_us(rows, keys))
    }

    fn failed(&mut self, step: StepId, micro_batch: MicroBatch, error: PassError, reports: &mut Vec<Report>) {
        if let PassError::Coverage { .. } = error {
            self.violations.push(format!("{step}: {error}"));
        }
        reports.push(Report::Failed { step, micro_batch, error });
    }
}

impl SimRunner for Symbolic {
    type Bill = ();
    const PREEMPTIVE: bool = false;

    fn push(&mut self, command: Command, _now_us: u64) {
        match command {
            Command::Step(work) => {
                let micro_batch = work.micro_batch.index();
                assert!(self.passes[micro_batch].is_none(), "one step at a time in a micro_batch");
                self.passes[micro_batch] = Some(Pass::new(*work));
            }
            Command::Part { step, layer, part } => {
                if let Some(pass) = self.pass_of(step) {
                    pass.on_part(layer, part);
                }
            }
            Command::Fetched { step, layer, index, kv } => {
                if let Some(pass) = self.pass_of(step) {
                    pass.on_fetched(layer, index, kv);
                }
            }
            Command::Abort { step } => {
                for pass in &mut self.passes {
                    if pass.as_ref().is_some_and(|p| p.step() == step) {
                        *pass = None;
                    }
                }
            }
            Command::RemoteQuery(query) => self.remote_requests.push_back(RemoteRequest::Query(query)),
            Command::RemoteMerge(merge) => self.remote_requests.push_back(RemoteRequest::Merge(merge)),
            Command::RemoteWrite(write) => self.remote_requests.push_back(RemoteRequest::Write(write)),
            Command::RemoteRead(read) => self.remote_requests.push_back(RemoteRequest::Read(read)),
            Command::Stage(work) => {
                assert!(!self.beside.is_empty(), "there is memory beside the store");
                let pieces = &work.pieces;
                let left =
                    work.layers.clone().flat_map(|layer| pieces.iter().map(move |piece| (layer, *piece))).collect();
                self.stages.push_back(Staging { work, left });
            }
            // Slots are memory here: shared blocks have one place.
            Command::Share { .. } | Command::RemoteSeal { .. } | Command::Map { .. } | Command::Unmap { .. } => {
                unreachable!("no memory is mapped here")
            }
            Command::Release { .. } => {}
            Command::Draft(work) => self.drafter.push(work),
        }
    }

    fn turn(&mut self, now_us: u64, reports: &mut Vec<Report>) -> Option<u64> {
        if let Some(work) = self.remote_requests.pop_front() {
            let (rows, keys) = remote_request::serve(self, work, reports);
            return Some(self.time_us(rows, keys));
        }
        self.staged_last = !self.staged_last;
        if self.staged_last
            && let Some(us) = self.stage(reports)
        {
            return Some(us);
        }
        if let Some(rows) = self.drafter.turn(self.windows, now_us, reports) {
            return Some(self.time_us(rows, 0));
        }
        let other = match self.last {
            MicroBatch::Local => MicroBatch::Remote,
            MicroBatch::Remote => MicroBatch::Local,
        };
        let advanced = [other, self.last].into_iter().find_map(|micro_batch| self.advance(micro_batch, reports));
        advanced.or_else(|| self.stage(reports))
    }

    fn end(&mut self, _now_us: u64, _reports: &mut Vec<Report>) {}

    fn bill(&mut self) {}

    fn is_staged(&self) -> bool {
        !self.beside.is_empty()
    }

    fn regions(&self) -> Vec<Arc<dyn Region>> {
        let copy = |layer: usize| {
            let mut bytes = Vec::with_capacity(self.shared().len() * KEY_BYTES);
            self.shared().iter().for_each(|slot| slot[layer].to_bytes(&mut bytes));
            let region = HeapRegion::new(bytes.len(), bytes.len().max(1));
            region::write(&region, 0, &bytes).expect("a region holds what it was made for");
            Arc::new(region) as Arc<dyn Region>
        };
        (0..LAYERS as usize).map(copy).collect()
    }

    fn take_regions(&mut self, regions: &[Arc<dyn Region>]) {
        for (layer, region) in regions.iter().enumerate() {
            let shared = if self.beside.is_empty() { &mut self.store } else { &mut self.beside };
            let bytes = region.snapshot(0, shared.len() * KEY_BYTES).expect("it is as large as what transports see");
            for (slot, key) in shared.iter_mut().zip(bytes.chunks_exact(KEY_BYTES)) {
                slot[layer] = Key::from_bytes(key);
            }
        }
    }

    fn peer_memory(&self, _: &str) -> Option<PeerMemory> {
        None
    }
}
