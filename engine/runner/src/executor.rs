//! The executor: one device, its memory, and the work queued for it.

use crate::guest::{AttentionShape, GuestBuffers};
use crate::lane::{LaneBuffers, RemoteBuffers};
use crate::pass::{Pass, Progress};
use crate::sampling::Sampler;
use crate::work::{Command, GuestQuery, GuestRead, GuestWrite, Report};
use lagoon_backend::{Device, DeviceError};
use lagoon_model::{LlamaWeights, ModelConfig, Rope};
use lagoon_types::{DType, KvShape, Lane};
use std::collections::VecDeque;

/// Sizes that are fixed for an executor's life.
#[derive(Clone, Copy, Debug)]
pub struct ExecutorConfig {
    /// Token slots of the KV store: physical rBlocks times tokens in each.
    pub slots: usize,
    /// Element type of the KV.
    pub kv_dtype: DType,
    /// Rows of the largest step.
    pub step_rows: usize,
    /// Sequences whose logits one step may ask for.
    pub step_seqs: usize,
    /// Largest piece of remote KV that is fetched at once, in tokens; 0 where nothing is ever fetched.
    pub fetch_tokens: usize,
}

/// A model on a device.
#[derive(Debug)]
pub struct Model<D: Device> {
    pub weights: LlamaWeights<D>,
    pub rope: Rope,
}

/// Weights and what a forward pass works in.
#[derive(Debug)]
pub(crate) struct Forward<D: Device> {
    pub(crate) config: ModelConfig,
    pub(crate) model: Model<D>,
    pub(crate) lanes: [LaneBuffers<D>; 2],
    pub(crate) remote: RemoteBuffers<D>,
    pub(crate) sampler: Sampler,
    /// Host staging, kept between calls.
    pub(crate) host: Vec<f32>,
}

/// Everything that passes share, borrowed by [`Pass::advance`].
#[derive(Debug)]
pub(crate) struct Shared<'a, D: Device> {
    pub(crate) device: &'a mut D,
    pub(crate) forward: &'a mut Forward<D>,
    pub(crate) kv: &'a mut D::Kv,
    pub(crate) kv_shape: KvShape,
    pub(crate) attention: AttentionShape,
    pub(crate) config: ExecutorConfig,
}

/// One device with its KV store, weights and queued work. Not thread-safe by itself: see [`crate::spawn`].
#[derive(Debug)]
pub struct Executor<D: Device> {
    device: D,
    config: ExecutorConfig,
    kv: D::Kv,
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
}

#[derive(Debug)]
enum GuestWork {
    Query(GuestQuery),
    Write(GuestWrite),
    Read(GuestRead),
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
        let kv = device.kv(kv_shape, config.slots)?;
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
                host: Vec::new(),
            }),
        };
        let guest = GuestBuffers::new(&mut device, shape.geometry, 64)?;
        Ok(Self {
            device,
            config,
            kv,
            kv_shape,
            attention,
            forward,
            guest,
            guests: VecDeque::new(),
            guest_fault: None,
            passes: [None, None],
            last: Lane::Remote,
        })
    }

    /// The device, for its description.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Queues a command.
    ///
    /// # Panics
    /// If a step comes while its lane is busy, or to a kv node: bugs of the caller.
    pub fn push(&mut self, command: Command) {
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
                    }
                }
            }
            Command::GuestQuery(query) => self.guests.push_back(GuestWork::Query(query)),
            Command::GuestWrite(write) => self.guests.push_back(GuestWork::Write(write)),
            Command::GuestRead(read) => self.guests.push_back(GuestWork::Read(read)),
        }
    }

    fn pass_of(&mut self, step: lagoon_types::StepId) -> Option<&mut Pass> {
        self.passes.iter_mut().flatten().find(|p| p.step() == step)
    }

    /// Does one bounded piece of work: a guest's frame if one waits, else up to a layer of a pass. Returns whether
    /// there was any; if not, the executor waits for commands.
    pub fn turn(&mut self, reports: &mut dyn FnMut(Report)) -> bool {
        if let Some(work) = self.guests.pop_front() {
            self.device.urgent(true);
            self.serve(work, reports);
            self.device.urgent(false);
            return true;
        }
        let other = match self.last {
            Lane::Local => Lane::Remote,
            Lane::Remote => Lane::Local,
        };
        [other, self.last].into_iter().any(|lane| self.advance(lane, reports))
    }

    fn advance(&mut self, lane: Lane, reports: &mut dyn FnMut(Report)) -> bool {
        let Some(forward) = &mut self.forward else { return false };
        let slot = &mut self.passes[lane.index()];
        let Some(pass) = slot else { return false };
        let mut shared = Shared {
            device: &mut self.device,
            forward,
            kv: &mut self.kv,
            kv_shape: self.kv_shape,
            attention: self.attention,
            config: self.config,
        };
        match pass.advance(&mut shared, reports) {
            Ok(Progress::Waiting) => return false,
            Ok(Progress::Advanced) => {}
            Ok(Progress::Done(samples)) => {
                let step = pass.step();
                *slot = None;
                reports(Report::Done { step, lane, samples });
            }
            Err(error) => {
                let step = pass.step();
                *slot = None;
                reports(Report::Failed { step, lane, error });
            }
        }
        self.last = lane;
        true
    }

    fn serve(&mut self, work: GuestWork, reports: &mut dyn FnMut(Report)) {
        match work {
            GuestWork::Query(GuestQuery { tag, .. }) | GuestWork::Read(GuestRead { tag, .. })
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
                    let stored = self.device.kv_write(&mut self.kv, write.layer as usize, slot, &write.kv[at..end]);
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
}
