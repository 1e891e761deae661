//! The executor: one device, its memory, and the work queued for it.

use crate::config::ExecutorConfig;
use crate::forward::{Forward, Model, Shared};
use crate::guest::{AttentionShape, GuestBuffers};
use crate::lane::{LaneBuffers, RemoteBuffers};
use crate::memory::{KvArena, KvMemory, KvWindow, PeerMemory};
use crate::pass::{Pass, Progress};
use crate::sampling::Sampler;
use crate::stage::{Beside, Stages};
use crate::work::{Command, GuestQuery, GuestRead, GuestTag, GuestWrite, MapId, Report, ShareId};
use lagoon_backend::{Device, DeviceError, KvCounters, LaunchCounters};
use lagoon_model::ModelConfig;
use lagoon_types::{Epoch, KvShape, Lane};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::slice;
use std::time::Duration;

/// A KV store, and memory beside it if there is any.
type Store<K> = (K, KvMemory, Option<Stages>);

/// The KV store, in shared memory if that is asked for and can be, else with such memory beside it.
#[cfg(target_os = "linux")]
fn store<D: Device>(device: &mut D, shape: KvShape, config: &ExecutorConfig) -> Result<Store<D::Kv>, DeviceError> {
    let shared = match config.share_blocks {
        Some(block_tokens) if config.kv.rows == 0 => {
            device.kv_shared(shape, config.kv.slots(), block_tokens as usize)?
        }
        _ => None,
    };
    if let Some((kv, arenas)) = shared {
        return Ok((kv, KvMemory::Host(arenas), None));
    }
    let kv = device.kv_in(shape, &config.kv)?;
    let Some(block_tokens) = config.share_blocks.filter(|_| config.stage_blocks > 0) else {
        return Ok((kv, KvMemory::Host(Vec::new()), None));
    };
    let token_bytes = shape.layer_token_bytes();
    let granule_bytes = block_tokens as usize * token_bytes;
    let layer_bytes = (config.stage_blocks as usize).saturating_mul(granule_bytes);
    // Windows are packed from multiples of 16 bytes on.
    let window = match config.stage_on_device && token_bytes.is_multiple_of(16) {
        true => device.window(layer_bytes.saturating_mul(shape.layers as usize))?,
        false => None,
    };
    if let Some((id, window)) = window {
        let stages = Stages::new(Beside::Window { id, layer_bytes }, token_bytes);
        return Ok((kv, KvMemory::Device { window, layers: shape.layers, layer_bytes }, Some(stages)));
    }
    let arena = |_| {
        let out = |error| DeviceError::OutOfMemory { what: format!("staging KV ({error})"), bytes: layer_bytes as u64 };
        KvArena::new(layer_bytes, granule_bytes).map_err(out)
    };
    let arenas = (0..shape.layers).map(arena).collect::<Result<Vec<_>, _>>()?;
    let stages = Stages::new(Beside::Arenas(arenas.clone()), token_bytes);
    Ok((kv, KvMemory::Host(arenas), Some(stages)))
}

/// A KV store that is lent, and its memory.
#[cfg(target_os = "linux")]
fn lent<D: Device>(device: &mut D, shape: KvShape, config: &ExecutorConfig) -> Result<(D::Kv, KvWindow), DeviceError> {
    let lent = device.kv_lent(shape, config.kv.blocks, config.kv.block_tokens)?;
    lent.ok_or_else(no_lending)
}

#[cfg(not(target_os = "linux"))]
fn lent<D: Device>(_: &mut D, _: KvShape, _: &ExecutorConfig) -> Result<(D::Kv, KvWindow), DeviceError> {
    Err(no_lending())
}

fn no_lending() -> DeviceError {
    DeviceError::Unsupported("its memory is not mapped by other processes".to_owned())
}

#[cfg(not(target_os = "linux"))]
fn store<D: Device>(device: &mut D, shape: KvShape, config: &ExecutorConfig) -> Result<Store<D::Kv>, DeviceError> {
    Ok((device.kv_in(shape, &config.kv)?, KvMemory::Host(Vec::new()), None))
}

/// What one turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// One bounded piece of work was done.
    Worked,
    /// There is nothing to do before the next command.
    Idle,
    /// Nor before the device has done what is queued; to be asked again after this time, or after the next command.
    Queued(Duration),
}

/// One device with its KV store, weights and queued work. Not thread-safe by itself: see [`crate::spawn`].
#[derive(Debug)]
pub struct Executor<D: Device> {
    device: D,
    config: ExecutorConfig,
    kv: D::Kv,
    /// Creditors' stores that are mapped.
    reached: BTreeMap<MapId, D::Kv>,
    memory: KvMemory,
    lent: Option<KvWindow>,
    stages: Option<Stages>,
    /// The last turn was for what is staged, if there was any: it and passes take turns.
    staged_last: bool,
    kv_shape: KvShape,
    attention: AttentionShape,
    /// `None` on a kv node.
    forward: Option<Forward<D>>,
    guest: GuestBuffers<D>,
    guests: VecDeque<GuestWork>,
    /// A peer's KV could not be stored: what peers ask for from then on fails, because the store has holes.
    guest_fault: Option<DeviceError>,
    passes: [Option<Pass>; 2],
    /// The lane that advanced last: lanes take turns.
    last: Lane,
    /// Commands came since the device's counters were last looked at, and what was told of them then.
    worked: bool,
    told: (KvCounters, LaunchCounters),
}

#[derive(Debug)]
enum GuestWork {
    Query(GuestQuery),
    Write(GuestWrite),
    Read(GuestRead),
    Lent(LentWork),
    Share { share: ShareId, tokens: u32, slots: Vec<(u32, u32)> },
    Release(Vec<Range<u32>>),
}

/// Work for memory that is lent to be mapped: the own, and creditors'.
#[derive(Debug)]
enum LentWork {
    Seal { tag: GuestTag, block: u32, epoch: Epoch },
    Map { map: MapId, blocks: u32, memory: PeerMemory },
    Unmap(MapId),
}

impl<D: Device> Executor<D> {
    /// Allocates the KV store and all buffers. Without a `model` it serves peers only.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] where they do not fit.
    pub fn new(
        mut device: D,
        shape: &ModelConfig,
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
        let attention = AttentionShape {
            geometry: shape.geometry,
            scale: shape.attention_scale(),
            window: shape.window,
            alibi: shape.alibi,
        };
        let forward = match model {
            None => None,
            Some(model) => Some(Forward {
                lanes: [
                    LaneBuffers::new(&mut device, shape, config.step_rows, config.step_seqs)?,
                    LaneBuffers::new(&mut device, shape, config.step_rows, config.step_seqs)?,
                ],
                remote: RemoteBuffers::new(&mut device, shape, config.kv_dtype, config.step_rows, config.fetch_tokens)?,
                config: shape.clone(),
                model,
                sampler: Sampler::new(),
                draws: (Vec::new(), Vec::new()),
                host: Vec::new(),
            }),
        };
        let guest = GuestBuffers::new(&mut device, shape.geometry, 64)?;
        Ok(Self {
            device,
            config,
            kv,
            reached: BTreeMap::new(),
            stages,
            memory,
            lent,
            staged_last: false,
            kv_shape,
            attention,
            forward,
            guest,
            guests: VecDeque::new(),
            guest_fault: None,
            passes: [None, None],
            last: Lane::Remote,
            worked: false,
            told: Default::default(),
        })
    }

    /// Makes memory lie behind slots outside of any command: for measurements on an executor that has no work.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn hold(&mut self, slots: Range<u32>) -> Result<(), DeviceError> {
        self.device.kv_hold(&mut self.kv, slice::from_ref(&slots))
    }

    /// What mapping memory behind the KV store has come to, on a device that does.
    pub fn kv_counters(&self) -> Option<KvCounters> {
        self.device.kv_counters(&self.kv)
    }

    /// The memory that others read and fill, if that was asked for and can be; else none.
    pub fn memory(&self) -> &KvMemory {
        &self.memory
    }

    /// The memory of the store, if others map it.
    pub fn lent(&self) -> Option<&KvWindow> {
        self.lent.as_ref()
    }

    /// Whether that memory lies beside the store ([`Command::Stage`]).
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
    /// If a step comes while its lane is busy, or to a kv node, or KV is to be staged and there is nowhere to: bugs of the
    /// caller.
    pub fn push(&mut self, command: Command) {
        self.worked = true;
        match command {
            Command::Step(work) => {
                assert!(self.forward.is_some(), "a kv node runs no steps");
                let lane = work.lane.index();
                assert!(self.passes[lane].is_none(), "one step at a time in a lane");
                self.passes[lane] = Some(Pass::new(*work));
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
                        let gave_up = self.device.gave_up();
                        self.guest_fault = self.guest_fault.take().or(gave_up.err());
                    }
                }
            }
            Command::GuestQuery(query) => self.guests.push_back(GuestWork::Query(query)),
            Command::GuestWrite(write) => self.guests.push_back(GuestWork::Write(write)),
            Command::GuestRead(read) => self.guests.push_back(GuestWork::Read(read)),
            Command::GuestSeal { tag, block, epoch } => self.lent_work(LentWork::Seal { tag, block, epoch }),
            Command::Map { map, blocks, memory } => self.lent_work(LentWork::Map { map, blocks, memory }),
            Command::Unmap { map } => self.lent_work(LentWork::Unmap(map)),
            Command::Share { share, tokens, slots } => self.guests.push_back(GuestWork::Share { share, tokens, slots }),
            Command::Stage(work) => self.stages.as_mut().expect("there is memory beside the store").push(work),
            Command::Release { slots } => self.guests.push_back(GuestWork::Release(slots)),
        }
    }

    fn lent_work(&mut self, work: LentWork) {
        self.guests.push_back(GuestWork::Lent(work));
    }

    fn pass_of(&mut self, step: lagoon_types::StepId) -> Option<&mut Pass> {
        self.passes.iter_mut().flatten().find(|p| p.step() == step)
    }

    /// Does one bounded piece of work, waiting for the device where that is all there is to do. Returns whether there was
    /// any.
    pub fn turn(&mut self, reports: &mut dyn FnMut(Report)) -> bool {
        loop {
            match self.try_turn(reports) {
                Turn::Worked => return true,
                Turn::Idle => return false,
                Turn::Queued(left) => std::thread::sleep(left),
            }
        }
    }

    /// Does one bounded piece of work: a guest's frame if one waits, else up to a layer of a pass. Waits for the device
    /// only where it does not queue.
    pub fn try_turn(&mut self, reports: &mut dyn FnMut(Report)) -> Turn {
        if let Some(work) = self.guests.pop_front() {
            self.device.urgent(true);
            self.serve(work, reports);
            self.device.urgent(false);
            return Turn::Worked;
        }
        self.staged_last = !self.staged_last;
        if self.staged_last && self.stage(reports) {
            return Turn::Worked;
        }
        let other = match self.last {
            Lane::Local => Lane::Remote,
            Lane::Remote => Lane::Local,
        };
        let turn = match (self.advance(other, reports), self.last) {
            (Turn::Worked, _) => Turn::Worked,
            (first, last) => match (first, self.advance(last, reports)) {
                (Turn::Queued(a), Turn::Queued(b)) => Turn::Queued(a.min(b)),
                (first @ Turn::Queued(_), Turn::Idle) => first,
                (_, second) => second,
            },
        };
        if !matches!(turn, Turn::Worked) && self.stage(reports) {
            return Turn::Worked;
        }
        if matches!(turn, Turn::Idle) {
            self.tell_counters(reports);
        }
        turn
    }

    /// Copies a piece between the store and the memory beside it, while passes wait for the device and between their layers.
    fn stage(&mut self, reports: &mut dyn FnMut(Report)) -> bool {
        let Some(stages) = self.stages.as_mut().filter(|stages| stages.is_busy()) else { return false };
        self.device.urgent(true);
        let staged = stages.turn(&mut self.device, &mut self.kv, reports);
        self.device.urgent(false);
        staged
    }

    /// Says what mapping memory and keeping launches have come to, where that changed.
    fn tell_counters(&mut self, reports: &mut dyn FnMut(Report)) {
        if !std::mem::take(&mut self.worked) {
            return;
        }
        if let Some(memory) = self.kv_counters().filter(|counters| *counters != self.told.0) {
            self.told.0 = memory;
            reports(Report::Memory(memory));
        }
        if let Some(launches) = self.device.launches().filter(|counters| *counters != self.told.1) {
            self.told.1 = launches;
            reports(Report::Launches(launches));
        }
    }

    fn advance(&mut self, lane: Lane, reports: &mut dyn FnMut(Report)) -> Turn {
        let alone = self.passes[1 - lane.index()].is_none();
        let Some(forward) = &mut self.forward else { return Turn::Idle };
        let slot = &mut self.passes[lane.index()];
        let Some(pass) = slot else { return Turn::Idle };
        let mut shared = Shared {
            device: &mut self.device,
            forward,
            kv: &mut self.kv,
            reached: &self.reached,
            kv_shape: self.kv_shape,
            attention: self.attention,
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
                reports(Report::Done { step, lane, samples });
            }
            Err(error) => {
                let step = pass.step();
                *slot = None;
                let gave_up = self.device.gave_up();
                self.guest_fault = self.guest_fault.take().or(gave_up.err());
                reports(Report::Failed { step, lane, error });
            }
        }
        self.last = lane;
        Turn::Worked
    }

    fn serve(&mut self, work: GuestWork, reports: &mut dyn FnMut(Report)) {
        match work {
            GuestWork::Query(GuestQuery { tag, .. })
            | GuestWork::Read(GuestRead { tag, .. })
            | GuestWork::Lent(LentWork::Seal { tag, .. })
                if let Some(error) = self.guest_fault.clone() =>
            {
                reports(Report::GuestFailed { tag, error });
            }
            GuestWork::Query(query) => {
                let report = self
                    .guest
                    .attend(&mut self.device, &self.kv, &self.attention, &query)
                    .unwrap_or_else(|error| Report::GuestFailed { tag: query.tag, error });
                reports(report);
            }
            GuestWork::Write(write) => {
                let token_bytes = self.kv_shape.layer_token_bytes();
                let (mut at, mut stored_tag) = (0, write.tag);
                for (slot, tokens) in write.pieces {
                    let end = at + tokens as usize * token_bytes;
                    let held = slot..slot + tokens;
                    let stored = self.device.kv_hold(&mut self.kv, slice::from_ref(&held)).and_then(|()| {
                        self.device.kv_write(&mut self.kv, write.layer as usize, slot, &write.kv[at..end])
                    });
                    if let Err(error) = stored {
                        match stored_tag.take() {
                            Some(tag) => reports(Report::GuestFailed { tag, error }),
                            None => drop(self.guest_fault.get_or_insert(error)),
                        }
                        break;
                    }
                    at = end;
                }
                reports(Report::GuestWritten { bytes: write.kv.len(), tag: stored_tag });
            }
            GuestWork::Share { share, tokens, mut slots } => {
                let mut map = |(from, to)| self.device.kv_share(&mut self.kv, from, to, tokens);
                let mapped = slots.pop().map_or(Ok(()), &mut map);
                match mapped {
                    // One bounded piece of work at a time, before anything that came later: that may overwrite the rest.
                    Ok(()) if !slots.is_empty() => self.guests.push_front(GuestWork::Share { share, tokens, slots }),
                    mapped => reports(Report::Shared { share, error: mapped.err() }),
                }
            }
            GuestWork::Lent(work) => self.serve_lent(work, reports),
            GuestWork::Release(slots) => {
                for slots in slots {
                    // What the device could not let go of is lost to it for now; peers must not be told of memory that is not
                    // there.
                    if let Err(error) = self.device.kv_release(&mut self.kv, slots) {
                        self.guest_fault.get_or_insert(error);
                    }
                }
            }
            GuestWork::Read(read) => {
                let mut kv = Vec::new();
                let result = read.pieces.iter().try_for_each(|(slot, tokens)| {
                    self.device.kv_read(&self.kv, read.layer as usize, *slot, *tokens, &mut kv)
                });
                reports(match result {
                    Ok(()) => Report::GuestKv { tag: read.tag, kv: kv.into() },
                    Err(error) => Report::GuestFailed { tag: read.tag, error },
                });
            }
        }
    }

    fn serve_lent(&mut self, work: LentWork, reports: &mut dyn FnMut(Report)) {
        match work {
            LentWork::Seal { tag, block, epoch } => {
                let sealed = self.device.kv_seal(&mut self.kv, block, epoch.0);
                reports(match sealed {
                    Ok(()) => Report::GuestSealed { tag },
                    Err(error) => Report::GuestFailed { tag, error },
                });
            }
            LentWork::Map { map, blocks, memory } => {
                let mapped = reach(&mut self.device, self.kv_shape, (blocks, self.config.kv.block_tokens), memory);
                let error = mapped.map(|kv| drop(self.reached.insert(map, kv))).err();
                reports(Report::Mapped { map, error });
            }
            LentWork::Unmap(map) => {
                if let Some(kv) = self.reached.remove(&map) {
                    // A step that was given up may attend to it still; a device that is lost attends to nothing.
                    let _lost = self.device.sync();
                    drop(kv);
                }
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn reach<D: Device>(
    device: &mut D,
    shape: KvShape,
    (blocks, block_tokens): (u32, u32),
    memory: PeerMemory,
) -> Result<D::Kv, DeviceError> {
    device.kv_reach(shape, blocks, block_tokens, memory)
}

#[cfg(not(target_os = "linux"))]
fn reach<D: Device>(_: &mut D, _: KvShape, _: (u32, u32), memory: PeerMemory) -> Result<D::Kv, DeviceError> {
    match memory {}
}

#[cfg(test)]
#[path = "executor_tests.rs"]
mod tests;
