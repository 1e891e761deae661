//! Prefill elsewhere: prompts computed by one instance and decoded by another (KVDirect §4). A decode worker asks a
//! prefill worker (`ask.rs`), which computes the prompt like any other and hands the KV over as a lease (`serve.rs`).
//! The decode worker reads the KV, all or nothing, into own blocks and decodes (`pull.rs`, `landing.rs`). The prefill worker
//! exports the KV (`publish.rs`): all of it when computed (pull), or, if the decode worker has allocated blocks before
//! it asks, parts of it during the computation (push). Where only the device can access the KV store, KV passes through
//! a staging buffer on both sides (`staging.rs`). See docs/adr/0012.
//!
//! Invariants:
//! * a sequence whose prompt is elsewhere is in no queue and no batch of the scheduler, and holds no own blocks but
//!   those of its landing;
//! * a sequence's table is switched to KV that was read only when all of it has arrived and is verified;
//! * blocks of a landing are freed only when no read into them is in progress;
//! * blocks that a worker handed over are free only when their lease has ended and no transport reads them.

mod affinity;
mod ask;
mod constraint;
mod landing;
mod publish;
mod pull;
mod serve;
mod staging;
mod status;
#[cfg(test)]
mod tests;

pub use staging::StageUser;
pub use status::{LastTimes, PrefillStatus, PrefillTimes};

use crate::batch::Batch;
use crate::batch::others::PrefillQueries;
use crate::config::InstanceConfig;
use crate::cx::Cx;
use crate::event::TransferEvent;
use crate::outcome::{FirstToken, Outcomes};
use affinity::Affinity;
use ask::{Away, WorkerState};
use lagoon_backend::DeviceError;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_protocol::{ControlBody, Workers};
use lagoon_runner::StageId;
use lagoon_transfer::{ConnId, Reader, ReaderConfig};
use lagoon_types::{Chunk, InstanceId, PhysBlock, SeqId};
use landing::Settling;
use publish::Publication;
use serve::Job;
use staging::Staging;
use std::collections::BTreeMap;

/// Key of a prefill: the decode worker and its request number.
pub(crate) type Key = (InstanceId, u64);

/// State of disaggregated serving, decode side and prefill side.
#[derive(Debug)]
pub(crate) struct Prefills {
    /// Version of the known list of workers; 0 before the first.
    version: u64,
    workers: BTreeMap<InstanceId, WorkerState>,
    /// Prefixes that workers may have cached.
    affinity: Affinity,
    /// Own sequences whose prompts prefill workers compute, the oldest first.
    away: BTreeMap<SeqId, Away>,
    /// Dropped requests that workers may still work on, and until when without being informed.
    dropped: Vec<(Key, u64)>,
    reader: Option<Reader>,
    conns: BTreeMap<InstanceId, ConnId>,
    /// Own blocks of dropped landings whose reads have not ended.
    settling: Vec<Settling>,
    renewals: u64,
    /// Prefills for other instances.
    jobs: BTreeMap<Key, Job>,
    by_seq: BTreeMap<SeqId, Key>,
    next_job: u64,
    /// Exports of prefills, planned and live, by sequence.
    published: BTreeMap<SeqId, Publication>,
    exports: BTreeMap<u64, SeqId>,
    staging: Staging,
    status: PrefillStatus,
}

/// First sequence number of prefills for other instances; own requests are numbered far below.
const JOB_SEQ_BASE: u64 = 1 << 62;

/// Events of prefill elsewhere.
#[derive(Debug)]
pub(crate) enum PrefillEvent {
    /// The gManager's list of workers.
    Workers(Workers),
    /// A peer's message that [`Prefills::takes`].
    Control {
        from: InstanceId,
        body: ControlBody,
    },
    Transfer(TransferEvent),
    /// The device has copied between its store and the staging buffer, or failed to.
    Staged {
        stage: StageId,
        error: Option<DeviceError>,
    },
    /// A new or waiting sequence's prompt is left to prefill workers.
    SentAway(SeqId),
    /// A sequence was preempted: it may be recomputed by prefill workers.
    Preempted(SeqId),
    /// A prompt goes to another worker, or is computed here.
    Redo {
        seq: SeqId,
        why: &'static str,
    },
    /// A sequence was removed: its requests to prefill workers are cancelled, its KV there is released.
    Ended(SeqId),
    Released(SeqId),
    Withheld {
        seq: SeqId,
        blocks: Vec<PhysBlock>,
    },
    JobFailed {
        seq: SeqId,
        reason: String,
    },
    /// A request whose prompt a prefill worker computed ended without error.
    Decoded {
        ms: u64,
    },
    /// A step begins, with pushed prompts among its chunks.
    Watched(Vec<Chunk>),
    /// A step has filled layers of its chunk of a prompt, has computed the chunk, or ended without.
    Layers {
        seq: SeqId,
        layers: u32,
    },
    Chunk(SeqId),
    ChunkLeft(SeqId),
    /// A prompt for another instance is computed.
    Prefilled {
        seq: SeqId,
        first: FirstToken,
    },
    /// A peer has sent its Hello.
    PeerUp(InstanceId),
    /// The session with a peer ended.
    PeerGone(InstanceId),
    /// This instance was declared dead and begins a new incarnation.
    NewLife,
    /// Registered: the next list of workers may be another one with the same version.
    Registered,
    /// This instance is no decode worker any more.
    LeftWorkers,
    /// There may be memory: prompts without a worker are sent to workers.
    Dispatch,
    /// There may be memory, or a read has ended.
    Pump,
    Tick,
}

impl PrefillQueries for Prefills {
    fn away(&self) -> usize {
        self.away.len()
    }

    fn is_pushed(&self, seq: SeqId) -> bool {
        self.published.get(&seq).is_some_and(Publication::is_pushed)
    }

    fn has_parts(&self, seq: SeqId) -> bool {
        self.published.get(&seq).is_some_and(|p| p.push)
    }

    fn is_exported(&self, seq: SeqId) -> bool {
        self.published.get(&seq).is_some_and(Publication::is_exported)
    }
}

impl Prefills {
    /// Whether a message belongs to prefill elsewhere or its reads.
    pub(crate) fn takes(body: &ControlBody) -> bool {
        matches!(
            body,
            ControlBody::PrefillRequest(_)
                | ControlBody::PrefillRenew(_)
                | ControlBody::PrefillCancel(_)
                | ControlBody::PrefillReady(_)
                | ControlBody::PrefillRefused(_)
                | ControlBody::PrefillRenewed(_)
                | ControlBody::TransferConnect(_)
                | ControlBody::TransferRenew(_)
                | ControlBody::TransferComplete(_)
                | ControlBody::TransferConnected(_)
                | ControlBody::TransferRefused(_)
                | ControlBody::TransferExport(_)
                | ControlBody::TransferRenewed(_)
                | ControlBody::TransferCompleted(_)
        )
    }

    pub(crate) fn handle(&mut self, cx: &mut Cx, batch: &mut Batch, event: PrefillEvent) -> Outcomes {
        match event {
            PrefillEvent::Workers(workers) => self.on_workers(cx, batch, &workers),
            PrefillEvent::Control { from, body } => self.on_prefill_control(cx, batch, from, body),
            PrefillEvent::Transfer(event) => self.on_transfer(cx, batch, event),
            PrefillEvent::Staged { stage, error } => self.on_staged(cx, batch, stage, error.as_ref()),
            PrefillEvent::SentAway(seq) => self.send_away(cx, batch, seq),
            PrefillEvent::Preempted(seq) => self.send_preempted_away(cx, batch, seq),
            PrefillEvent::Redo { seq, why } => self.redo(cx, batch, seq, why),
            PrefillEvent::Ended(seq) => self.cancel_away(cx, batch, seq),
            PrefillEvent::Released(seq) => self.on_released(cx, batch, seq),
            PrefillEvent::Withheld { seq, blocks } => self.on_withheld(cx, batch, seq, blocks),
            PrefillEvent::JobFailed { seq, reason } => self.job_failed(cx, batch, seq, reason),
            PrefillEvent::Decoded { ms } => self.status.note_decoded(ms),
            PrefillEvent::Watched(chunks) => self.on_watched(cx, &chunks),
            PrefillEvent::Layers { seq, layers } => self.on_layers(cx, batch, seq, layers),
            PrefillEvent::Chunk(seq) => self.on_chunk(cx, batch, seq),
            PrefillEvent::ChunkLeft(seq) => self.on_chunk_left(cx, batch, seq),
            PrefillEvent::Prefilled { seq, first } => self.prefilled(cx, batch, seq, &first),
            PrefillEvent::PeerUp(peer) => self.on_worker_up(cx, batch, peer),
            PrefillEvent::PeerGone(peer) => {
                self.drop_jobs_of(cx, batch, peer);
                self.lose_worker(cx, batch, peer);
            }
            PrefillEvent::NewLife => {
                self.drop_all_jobs(cx, batch);
                if !mutants::is(Mutant::AskedByTheDead) {
                    self.redo_all_asked(cx, batch);
                }
                self.restart_reader(cx);
            }
            PrefillEvent::Registered => self.version = 0,
            PrefillEvent::LeftWorkers => self.leave_workers(),
            PrefillEvent::Dispatch => self.dispatch(cx, batch),
            PrefillEvent::Pump => self.pump_pulls(cx, batch),
            PrefillEvent::Tick => {
                self.expire_jobs(cx, batch);
                self.expire_away(cx, batch);
                self.tick_workers(cx, batch);
                self.tick_reader(cx);
            }
        }
        cx.take_outcomes()
    }

    pub(crate) fn new(config: &InstanceConfig) -> Self {
        // Independent of the current role, which may change.
        let reader = config.transfer.as_ref().filter(|_| config.role.runs()).map(|transfer| {
            let (incarnation, host) = (config.incarnation, transfer.host.clone());
            let reader = ReaderConfig { incarnation, host, ..ReaderConfig::default() };
            Reader::new(transfer.layout.clone(), reader)
        });
        Self {
            version: 0,
            workers: BTreeMap::new(),
            affinity: Affinity::default(),
            away: BTreeMap::new(),
            dropped: Vec::new(),
            reader,
            conns: BTreeMap::new(),
            settling: Vec::new(),
            renewals: 0,
            jobs: BTreeMap::new(),
            by_seq: BTreeMap::new(),
            next_job: JOB_SEQ_BASE,
            published: BTreeMap::new(),
            exports: BTreeMap::new(),
            staging: Staging::new(config.transfer.as_ref().map_or(0, |transfer| transfer.stage_blocks)),
            status: PrefillStatus::default(),
        }
    }

    /// Version of the known list of workers; 0 before the first.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Whether nothing is read or requested from workers, and all completions were sent.
    pub(crate) fn reads_nothing(&self) -> bool {
        let completing = self.reader.as_ref().map_or(0, Reader::completing);
        self.away.is_empty() && self.settling() == 0 && completing == 0
    }

    /// Sets the total time with reads in progress, in microseconds.
    pub(crate) fn set_reading_us(&mut self, reading_us: u64) {
        self.status.reading_us = reading_us;
    }

    /// Takes the times of requests since the last call.
    pub(crate) fn take_times(&mut self) -> LastTimes {
        std::mem::take(&mut self.status.last)
    }

    /// Number of own blocks in a sequence's landing.
    pub(crate) fn landing(&self, seq: SeqId) -> usize {
        self.away.get(&seq).map_or(0, Away::landing)
    }

    /// Staging blocks in use.
    pub(crate) fn staged(&self) -> u32 {
        self.staging.used()
    }

    /// Own blocks of dropped landings whose reads have not ended.
    pub(crate) fn settling(&self) -> usize {
        self.settling.iter().map(Settling::blocks).sum()
    }
}
