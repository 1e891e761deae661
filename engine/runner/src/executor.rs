//! The executor: one device, its memory, and the work queued for it.

use crate::config::ExecutorConfig;
use crate::decoder::{Activations, Model};
use crate::forward::{Draws, Forward, Shared};
use crate::memory::{KvArena, KvMemory, KvRegion, PeerMemory, hold, no_peer_access, without};
use crate::micro_batch::RemoteBuffers;
use crate::pass::{Pass, Progress};
use crate::queue;
use crate::remote_query::{self, AttentionShape, RemoteQueryBuffers};
use crate::ring::Rings;
use crate::sampling::Sampler;
use crate::stage::{Beside, Stages};
use crate::work::{Command, MapId, RemoteMerge, RemoteQuery, RemoteRead, RemoteTag, RemoteWrite, Report, ShareId};
use lagoon_backend::{
    Device, DeviceError, KvCounters, LaunchCounters, PeerAccess, Queued, SharedArenas, SharedRegions, VirtualMemory,
};
use lagoon_grammar::Grammars;
use lagoon_model::ModelSpec;
use lagoon_types::{Epoch, KvShape, KvSpace, MicroBatch};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::slice;
use std::time::Duration;

/// A KV store, its memory for transports, and staging buffers if there are any.
type Store<K> = (K, KvMemory, Option<Stages>);

/// A private KV store, in address rows if the configuration has any.
fn private<D: Device>(device: &mut D, shape: KvShape, space: &KvSpace) -> Result<D::Kv, DeviceError> {
    match device.virtual_memory() {
        Some(memory) => memory.kv_in(shape, space),
        None if space.rows == 0 => device.kv(shape, space.slots()),
        None => Err(without("virtual memory, which address rows need")),
    }
}

/// The KV store: in shared arenas if the configuration asks for them and the device has them, else private, with
/// staging buffers in a shared device region or in host arenas.
#[cfg(target_os = "linux")]
fn store<D: Device>(device: &mut D, shape: KvShape, config: &ExecutorConfig) -> Result<Store<D::Kv>, DeviceError> {
    if let Some(block_tokens) = config.share_blocks.filter(|_| config.kv.rows == 0)
        && let Some(shared) = device.shared_arenas()
    {
        let (kv, arenas) = shared.kv_shared(shape, config.kv.slots(), block_tokens as usize)?;
        return Ok((kv, KvMemory::Host(arenas), None));
    }
    let kv = private(device, shape, &config.kv)?;
    let Some(block_tokens) = config.share_blocks.filter(|_| config.stage_blocks > 0) else {
        return Ok((kv, KvMemory::Host(Vec::new()), None));
    };
    let token_bytes = shape.layer_token_bytes();
    let granule_bytes = block_tokens as usize * token_bytes;
    let layer_bytes = (config.stage_blocks as usize).saturating_mul(granule_bytes);
    // Pieces in a region start at multiples of 16 bytes.
    if config.stage_on_device
        && token_bytes.is_multiple_of(16)
        && let Some(regions) = device.shared_regions()
    {
        let (id, region) = regions.region(layer_bytes.saturating_mul(shape.layers as usize))?;
        let stages = Stages::new(Beside::Region { id, layer_bytes }, token_bytes);
        return Ok((kv, KvMemory::Device { region, layers: shape.layers, layer_bytes }, Some(stages)));
    }
    let arena = |_| {
        let out = |error| DeviceError::OutOfMemory { what: format!("staging KV ({error})"), bytes: layer_bytes as u64 };
        KvArena::new(layer_bytes, granule_bytes).map_err(out)
    };
    let arenas = (0..shape.layers).map(arena).collect::<Result<Vec<_>, _>>()?;
    let stages = Stages::new(Beside::Arenas(arenas.clone()), token_bytes);
    Ok((kv, KvMemory::Host(arenas), Some(stages)))
}

#[cfg(not(target_os = "linux"))]
fn store<D: Device>(device: &mut D, shape: KvShape, config: &ExecutorConfig) -> Result<Store<D::Kv>, DeviceError> {
    Ok((private(device, shape, &config.kv)?, KvMemory::Host(Vec::new()), None))
}

/// A KV store with peer access, and its region.
#[cfg(target_os = "linux")]
fn lent<D: Device>(device: &mut D, shape: KvShape, config: &ExecutorConfig) -> Result<(D::Kv, KvRegion), DeviceError> {
    let peers = device.peer_access().ok_or_else(no_peer_access)?;
    peers.kv_lent(shape, config.kv.blocks, config.kv.block_tokens)
}

#[cfg(not(target_os = "linux"))]
fn lent<D: Device>(_: &mut D, _: KvShape, _: &ExecutorConfig) -> Result<(D::Kv, KvRegion), DeviceError> {
    Err(no_peer_access())
}

/// Result of [`Executor::try_turn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// One bounded piece of work was done.
    Worked,
    /// No work before the next command.
    Idle,
    /// No work before the device has done its queue; ask again after this time, or after the next command.
    Queued(Duration),
}

impl Turn {
    /// The turn of two of which neither, or only the other, has worked.
    pub(crate) fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Queued(a), Self::Queued(b)) => Self::Queued(a.min(b)),
            (Self::Queued(_), Self::Idle) => self,
            _ => other,
        }
    }
}

/// Takes turns until one has worked, or there is no work; returns whether one has.
pub(crate) fn blocking(mut try_turn: impl FnMut() -> Turn) -> bool {
    loop {
        match try_turn() {
            Turn::Worked => return true,
            Turn::Idle => return false,
            Turn::Queued(left) => std::thread::sleep(left),
        }
    }
}

/// One device with its KV store, weights and queued work, driven by [`Command`]s. Runs on one thread: see
/// [`crate::spawn`].
#[derive(Debug)]
pub struct Executor<D: Device> {
    device: D,
    config: ExecutorConfig,
    kv: D::Kv,
    rings: Option<Rings<D>>,
    /// Creditors' KV stores mapped here (peer access).
    mapped: BTreeMap<MapId, D::Kv>,
    memory: KvMemory,
    lent: Option<KvRegion>,
    maps_peers: bool,
    stages: Option<Stages>,
    /// The last turn copied staged KV, if any waited: staging and passes alternate.
    staged_last: bool,
    kv_shape: KvShape,
    attention: AttentionShape,
    /// `None` on a kv node.
    forward: Option<Forward<D>>,
    remote_request: RemoteQueryBuffers<D>,
    remote_requests: VecDeque<CreditorWork>,
    /// A peer's KV could not be stored: all later requests of peers fail, because the store has lost blocks.
    remote_request_fault: Option<DeviceError>,
    passes: [Option<Pass>; 2],
    /// The micro-batch that advanced last; micro-batches alternate.
    last: MicroBatch,
    /// Commands came since the last look at the device's counters, and the counters last reported.
    worked: bool,
    reported: (KvCounters, LaunchCounters),
}

#[derive(Debug)]
enum CreditorWork {
    Query(RemoteQuery),
    Merge(RemoteMerge),
    Write(RemoteWrite),
    Read(RemoteRead),
    Lent(LentWork),
    Share { share: ShareId, tokens: u32, slots: Vec<(u32, u32)> },
    Release(Vec<Range<u32>>),
}

/// Work for KV stores with peer access: the own, and creditors'.
#[derive(Debug)]
enum LentWork {
    Seal { tag: RemoteTag, block: u32, epoch: Epoch },
    Map { map: MapId, blocks: u32, memory: PeerMemory },
    Unmap(MapId),
}

/// Keeps the first fault, or that the device is lost.
fn keep_fault(kept: &mut Option<DeviceError>, fault: Option<DeviceError>) {
    if kept.is_none() || matches!(fault, Some(DeviceError::Lost(_))) {
        *kept = fault;
    }
}

impl<D: Device> Executor<D> {
    /// Allocates the KV store and all buffers. Without a `model` the executor serves peers only (kv node).
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if they do not fit.
    pub fn new(
        mut device: D,
        shape: &ModelSpec,
        model: Option<Model<D>>,
        config: ExecutorConfig,
    ) -> Result<Self, DeviceError> {
        let kv_shape = shape.kv_shape(config.kv_dtype);
        let (kv, memory, stages, lent) = if config.lend {
            let (kv, window) = lent(&mut device, kv_shape, &config)?;
            (kv, KvMemory::Host(Vec::new()), None, Some(window))
        } else {
            let (kv, memory, stages) = store(&mut device, kv_shape, &config)?;
            (kv, memory, stages, None)
        };
        let attention = AttentionShape::new(shape);
        let rings = match &model {
            Some(_) => Rings::new(&mut device, shape, config.kv_dtype, (config.rings, config.step_rows))?,
            None => None,
        };
        let forward = match model {
            None => None,
            Some(model) => Some(Forward {
                micro_batches: [
                    Activations::new(&mut device, shape, config.step_rows, config.sampled_rows)?,
                    Activations::new(&mut device, shape, config.step_rows, config.sampled_rows)?,
                ],
                remote: RemoteBuffers::new(&mut device, shape, config.kv_dtype, config.step_rows, config.fetch_tokens)?,
                model,
                sampler: Sampler::new(),
                draws: Draws::default(),
                host: Vec::new(),
                grammars: None,
            }),
        };
        let remote_request = RemoteQueryBuffers::new(&mut device, shape.geometry, 64)?;
        let maps_peers = device.peer_access().is_some();
        Ok(Self {
            device,
            config,
            kv,
            rings,
            mapped: BTreeMap::new(),
            stages,
            memory,
            lent,
            maps_peers,
            staged_last: false,
            kv_shape,
            attention,
            forward,
            remote_request,
            remote_requests: VecDeque::new(),
            remote_request_fault: None,
            passes: [None, None],
            last: MicroBatch::Remote,
            worked: false,
            reported: Default::default(),
        })
    }

    /// Address space of the KV store.
    pub(crate) fn kv_space(&self) -> &KvSpace {
        &self.config.kv
    }

    /// Rows of the largest step.
    pub(crate) fn step_rows(&self) -> usize {
        self.config.step_rows
    }

    /// Maps memory behind slots outside of any command, for measurements on an idle executor.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn hold(&mut self, slots: Range<u32>) -> Result<(), DeviceError> {
        hold(&mut self.device, &mut self.kv, slice::from_ref(&slots))
    }

    /// Page groups of the KV store; `None` on a device without virtual memory, and of a flat store.
    pub fn kv_counters(&mut self) -> Option<KvCounters> {
        self.device.virtual_memory()?.kv_counters(&self.kv)
    }

    /// Whether the device can map creditors' memory ([`Command::Map`]).
    pub fn maps_peers(&self) -> bool {
        self.maps_peers
    }

    /// The KV memory that transports read and fill; none if the configuration or the device has none.
    pub fn memory(&self) -> &KvMemory {
        &self.memory
    }

    /// The region of a store with peer access.
    pub fn lent(&self) -> Option<&KvRegion> {
        self.lent.as_ref()
    }

    /// Whether transports use staging buffers beside the store ([`Command::Stage`]).
    pub fn stages(&self) -> bool {
        self.stages.is_some()
    }

    /// The device, for its description.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Queues a command.
    ///
    /// # Panics
    /// If a step comes while its micro-batch is busy, or to a kv node, or KV is to be staged without staging buffers, or
    /// tokens drafted without a draft model: bugs of the caller.
    pub fn push(&mut self, command: Command) {
        self.worked = true;
        match command {
            Command::Step(work) => {
                assert!(self.forward.is_some(), "a kv node runs no steps");
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
                        let aborted = queue::abort_step(&mut self.device);
                        keep_fault(&mut self.remote_request_fault, aborted.err());
                    }
                }
            }
            Command::RemoteQuery(query) => self.remote_requests.push_back(CreditorWork::Query(query)),
            Command::RemoteMerge(merge) => self.remote_requests.push_back(CreditorWork::Merge(merge)),
            Command::RemoteWrite(write) => self.remote_requests.push_back(CreditorWork::Write(write)),
            Command::RemoteRead(read) => self.remote_requests.push_back(CreditorWork::Read(read)),
            Command::RemoteSeal { tag, block, epoch } => self.lent_work(LentWork::Seal { tag, block, epoch }),
            Command::Map { map, blocks, memory } => self.lent_work(LentWork::Map { map, blocks, memory }),
            Command::Unmap { map } => self.lent_work(LentWork::Unmap(map)),
            Command::Share { share, tokens, slots } => {
                self.remote_requests.push_back(CreditorWork::Share { share, tokens, slots })
            }
            Command::Stage(work) => self.stages.as_mut().expect("there is memory beside the store").push(work),
            Command::Release { slots } => self.remote_requests.push_back(CreditorWork::Release(slots)),
            Command::Draft(_) => panic!("a draft model has an executor of its own"),
        }
    }

    fn lent_work(&mut self, work: LentWork) {
        self.remote_requests.push_back(CreditorWork::Lent(work));
    }

    fn pass_of(&mut self, step: lagoon_types::StepId) -> Option<&mut Pass> {
        self.passes.iter_mut().flatten().find(|p| p.step() == step)
    }

    /// Does one bounded piece of work, waiting for the device if there is no other. Returns false if there was no
    /// work.
    pub fn turn(&mut self, reports: &mut dyn FnMut(Report)) -> bool {
        blocking(|| self.try_turn(reports))
    }

    /// Compiles the grammars of constrained sequences from now on; without, such sequences fail.
    #[must_use]
    pub fn with_grammars(mut self, grammars: Grammars) -> Self {
        self.forward.iter_mut().for_each(|forward| forward.grammars = Some(grammars.clone()));
        self
    }

    /// Does one bounded piece of work: a remote request's frame if one waits, else up to a layer of a pass. Waits for
    /// the device only if the device does not queue.
    pub fn try_turn(&mut self, reports: &mut dyn FnMut(Report)) -> Turn {
        if let Some(work) = self.remote_requests.pop_front() {
            queue::set_urgent(&mut self.device, true);
            self.serve(work, reports);
            queue::set_urgent(&mut self.device, false);
            return Turn::Worked;
        }
        self.staged_last = !self.staged_last;
        if self.staged_last && self.stage(reports) {
            return Turn::Worked;
        }
        let other = match self.last {
            MicroBatch::Local => MicroBatch::Remote,
            MicroBatch::Remote => MicroBatch::Local,
        };
        let turn = match self.advance(other, reports) {
            Turn::Worked => Turn::Worked,
            turn => turn.or(self.advance(self.last, reports)),
        };
        if !matches!(turn, Turn::Worked) && self.stage(reports) {
            return Turn::Worked;
        }
        if matches!(turn, Turn::Idle) {
            self.report_counters(reports);
        }
        turn
    }

    /// Whether peers' requests wait.
    pub(crate) fn has_remote_requests(&self) -> bool {
        !self.remote_requests.is_empty()
    }

    /// Copies a piece between the store and its staging buffer, between layers of passes and while they wait for the
    /// device.
    fn stage(&mut self, reports: &mut dyn FnMut(Report)) -> bool {
        let Some(stages) = self.stages.as_mut().filter(|stages| stages.is_busy()) else { return false };
        queue::set_urgent(&mut self.device, true);
        let staged = stages.turn(&mut self.device, &mut self.kv, reports);
        queue::set_urgent(&mut self.device, false);
        staged
    }

    /// Reports the counters of virtual memory and graph launches that changed.
    fn report_counters(&mut self, reports: &mut dyn FnMut(Report)) {
        if !std::mem::take(&mut self.worked) {
            return;
        }
        if let Some(memory) = self.kv_counters().filter(|counters| *counters != self.reported.0) {
            self.reported.0 = memory;
            reports(Report::Memory(memory));
        }
        if let Some(launches) =
            self.device.queued().and_then(Queued::launches).filter(|counters| *counters != self.reported.1)
        {
            self.reported.1 = launches;
            reports(Report::Launches(launches));
        }
    }

    fn advance(&mut self, micro_batch: MicroBatch, reports: &mut dyn FnMut(Report)) -> Turn {
        let alone = self.passes[1 - micro_batch.index()].is_none();
        let Some(forward) = &mut self.forward else { return Turn::Idle };
        let slot = &mut self.passes[micro_batch.index()];
        let Some(pass) = slot else { return Turn::Idle };
        let mut shared = Shared {
            device: &mut self.device,
            forward,
            kv: &mut self.kv,
            rings: self.rings.as_mut(),
            mapped: &self.mapped,
            kv_shape: self.kv_shape,
            attention: &self.attention,
            config: self.config,
            alone,
        };
        match pass.advance(&mut shared, reports) {
            Ok(Progress::Waiting) => return Turn::Idle,
            Ok(Progress::Queued(left)) => return Turn::Queued(left),
            Ok(Progress::Advanced) => {}
            Ok(Progress::Done(samples)) => {
                let step = pass.step();
                *slot = None;
                reports(Report::Done { step, micro_batch, samples });
            }
            Err(error) => {
                let step = pass.step();
                *slot = None;
                let aborted = queue::abort_step(&mut self.device);
                keep_fault(&mut self.remote_request_fault, aborted.err());
                reports(Report::Failed { step, micro_batch, error });
            }
        }
        self.last = micro_batch;
        Turn::Worked
    }

    fn serve(&mut self, work: CreditorWork, reports: &mut dyn FnMut(Report)) {
        match work {
            CreditorWork::Query(RemoteQuery { tag, .. })
            | CreditorWork::Merge(RemoteMerge { tag, .. })
            | CreditorWork::Read(RemoteRead { tag, .. })
            | CreditorWork::Lent(LentWork::Seal { tag, .. })
                if let Some(error) = self.remote_request_fault.clone() =>
            {
                reports(Report::RemoteFailed { tag, error });
            }
            CreditorWork::Query(query) => {
                let report = self
                    .remote_request
                    .attend(&mut self.device, &self.kv, &self.attention, &query)
                    .unwrap_or_else(|error| Report::RemoteFailed { tag: query.tag, error });
                reports(report);
            }
            CreditorWork::Merge(merge) => reports(remote_query::merge(self.attention.geometry, &merge)),
            CreditorWork::Write(write) => self.store(write, reports),
            CreditorWork::Share { share, tokens, mut slots } => {
                let mut map = |(from, to)| match self.device.virtual_memory() {
                    Some(memory) => memory.kv_share(&mut self.kv, from, to, tokens),
                    None => Err(without("virtual memory, which shared blocks in address rows need")),
                };
                let mapped = slots.pop().map_or(Ok(()), &mut map);
                match mapped {
                    // One piece at a time, before all later commands: they may overwrite the rest.
                    Ok(()) if !slots.is_empty() => {
                        self.remote_requests.push_front(CreditorWork::Share { share, tokens, slots })
                    }
                    mapped => reports(Report::Shared { share, error: mapped.err() }),
                }
            }
            CreditorWork::Lent(work) => self.serve_lent(work, reports),
            CreditorWork::Release(slots) => {
                // Without virtual memory, slots keep their memory.
                let Some(memory) = self.device.virtual_memory() else { return };
                for slots in slots {
                    // Memory that could not be released is lost for now: peers must not be promised it.
                    if let Err(error) = memory.kv_release(&mut self.kv, slots) {
                        keep_fault(&mut self.remote_request_fault, Some(error));
                    }
                }
            }
            CreditorWork::Read(read) => {
                let mut kv = Vec::new();
                let result = read.pieces.iter().try_for_each(|(slot, tokens)| {
                    self.device.kv_read(&self.kv, read.layer as usize, *slot, *tokens, &mut kv)
                });
                reports(match result {
                    Ok(()) => Report::RemoteKv { tag: read.tag, kv: kv.into() },
                    Err(error) => Report::RemoteFailed { tag: read.tag, error },
                });
            }
        }
    }

    /// Stores KV of a peer or a move. A failure is reported with the write's tag, or without one fails later reads
    /// here.
    fn store(&mut self, write: RemoteWrite, reports: &mut dyn FnMut(Report)) {
        let token_bytes = self.kv_shape.layer_token_bytes();
        let (mut at, mut stored_tag, mut failed) = (0, write.tag, false);
        for (slot, tokens) in write.pieces {
            let end = at + tokens as usize * token_bytes;
            let held = slot..slot + tokens;
            let stored = hold(&mut self.device, &mut self.kv, slice::from_ref(&held))
                .and_then(|()| self.device.kv_write(&mut self.kv, write.layer as usize, slot, &write.kv[at..end]));
            if let Err(error) = stored {
                match stored_tag.take() {
                    Some(tag) => reports(Report::RemoteFailed { tag, error }),
                    None => {
                        failed = true;
                        keep_fault(&mut self.remote_request_fault, Some(error));
                    }
                }
                break;
            }
            at = end;
        }
        reports(Report::RemoteWritten { bytes: write.kv.len(), tag: stored_tag, failed });
    }

    fn serve_lent(&mut self, work: LentWork, reports: &mut dyn FnMut(Report)) {
        match work {
            LentWork::Seal { tag, block, epoch } => {
                let peers = self.device.peer_access().ok_or_else(no_peer_access);
                let sealed = peers.and_then(|peers| peers.kv_seal(&mut self.kv, block, epoch.0));
                reports(match sealed {
                    Ok(()) => Report::RemoteSealed { tag },
                    Err(error) => Report::RemoteFailed { tag, error },
                });
            }
            LentWork::Map { map, blocks, memory } => {
                let mapped = map_peer(&mut self.device, self.kv_shape, (blocks, self.config.kv.block_tokens), memory);
                let error = mapped.map(|kv| drop(self.mapped.insert(map, kv))).err();
                reports(Report::Mapped { map, error });
            }
            LentWork::Unmap(map) => {
                if let Some(kv) = self.mapped.remove(&map) {
                    // An aborted step may still attend to the store. A lost device attends to nothing.
                    let _lost = self.device.sync();
                    drop(kv);
                }
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn map_peer<D: Device>(
    device: &mut D,
    shape: KvShape,
    (blocks, block_tokens): (u32, u32),
    memory: PeerMemory,
) -> Result<D::Kv, DeviceError> {
    device.peer_access().ok_or_else(no_peer_access)?.kv_map(shape, blocks, block_tokens, memory)
}

#[cfg(not(target_os = "linux"))]
fn map_peer<D: Device>(_: &mut D, _: KvShape, _: (u32, u32), memory: PeerMemory) -> Result<D::Kv, DeviceError> {
    match memory {}
}

#[cfg(test)]
#[path = "executor_tests.rs"]
mod tests;
