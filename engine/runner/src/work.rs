//! What the runner is told and what it answers: plain data.

use crate::memory::PeerMemory;
use bytes::Bytes;
use lagoon_backend::{AttnRows, DeviceError, KvCounters, LaunchCounters};
use lagoon_types::{
    DType, Epoch, InstanceId, KvRun, LeaseId, LeaseRun, MicroBatch, SamplingParams, SeqId, StepId, TokenLogprobs,
};
use std::ops::Range;
use std::sync::Arc;

/// One forward pass over the rows of one micro-batch.
#[derive(Clone, Debug)]
pub struct StepWork {
    pub step: StepId,
    pub micro_batch: MicroBatch,
    /// Token id of each row; rows of a sequence are consecutive, at consecutive positions.
    pub tokens: Vec<u32>,
    /// Slot of each row's KV in the main store; `u32::MAX` where its rBlock is remote.
    pub slots: Vec<u32>,
    pub seqs: Vec<SeqRows>,
    /// Runs in the main store, those of a sequence consecutive and ascending, covering its rows that are stored here.
    pub runs: Vec<KvRun>,
    pub remote: RemoteWork,
    /// First slot of what the next sequence to begin gets, where sequences have rows of addresses.
    pub next_row: Option<u32>,
    /// Every layer but the last is reported when its KV is in the store ([`Report::Layer`]).
    pub watched: bool,
}

/// Rows of one sequence in a step.
#[derive(Clone, Debug)]
pub struct SeqRows {
    pub seq: SeqId,
    pub row0: u32,
    pub rows: u32,
    pub pos0: u32,
    pub run0: u32,
    pub runs: u32,
    /// Set where the last row's logits choose the next token.
    pub sample: Option<SampleSpec>,
}

/// How to choose a token.
#[derive(Clone, Debug)]
pub struct SampleSpec {
    pub params: Arc<SamplingParams>,
    /// Tokens generated before this one: with the seed, all that the draw depends on.
    pub index: u64,
    pub return_logits: bool,
}

/// The part of a step that concerns creditors; empty in the local micro-batch.
#[derive(Clone, Debug)]
pub struct RemoteWork {
    /// Element type of shipped queries and partial outputs.
    pub dtype: DType,
    pub peer_access: Vec<MappedKv>,
    pub ships: Vec<Ship>,
    pub fetches: Vec<Fetch>,
    pub writes: Vec<WriteSegment>,
}

impl Default for RemoteWork {
    fn default() -> Self {
        Self { dtype: DType::F32, peer_access: Vec::new(), ships: Vec::new(), fetches: Vec::new(), writes: Vec::new() }
    }
}

/// KV of one creditor that is attended to where it lies, in memory of its that is mapped here: nothing is sent for it.
#[derive(Clone, Debug)]
pub struct MappedKv {
    pub creditor: InstanceId,
    pub map: MapId,
    /// Sequences over [`MappedKv::runs`], in the rows of the step.
    pub seqs: Vec<AttnRows>,
    /// Runs in the creditor's store, those of a sequence consecutive and ascending.
    pub runs: Vec<KvRun>,
    /// The rBlocks that these lie in.
    pub sealed: Vec<SealedBlock>,
}

/// An rBlock of a creditor's store, as long as it is sealed with its lease's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedBlock {
    pub block: u32,
    pub lease: LeaseId,
    pub epoch: Epoch,
}

/// Queries that go to one creditor in every layer: the rows of these segments, in order.
#[derive(Clone, Debug)]
pub struct Ship {
    pub creditor: InstanceId,
    /// `(first row, rows)`.
    pub segments: Vec<(u32, u32)>,
}

impl Ship {
    /// Rows in one frame.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.segments.iter().map(|(_, rows)| rows).sum()
    }
}

/// Remote KV that is brought here in every layer instead, for one sequence; at most `fetch_tokens` tokens.
#[derive(Clone, Copy, Debug)]
pub struct Fetch {
    pub creditor: InstanceId,
    /// Index into [`StepWork::seqs`].
    pub seq_index: u32,
    pub run: LeaseRun,
}

/// Rows whose KV goes to a lease.
#[derive(Clone, Copy, Debug)]
pub struct WriteSegment {
    pub creditor: InstanceId,
    pub lease: LeaseId,
    pub epoch: Epoch,
    /// Offset of the first row's token in the lease.
    pub offset: u32,
    pub row0: u32,
    pub rows: u32,
}

/// A creditor's answer for one layer.
#[derive(Clone, Debug)]
pub struct RemotePart {
    pub creditor: InstanceId,
    pub out: Bytes,
    pub lse: Bytes,
    pub count: Bytes,
}

/// Chosen by the instance to recognise the answer to a peer's frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemoteTag(pub u64);

/// Chosen by the instance to recognise memory that is mapped for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShareId(pub u64);

/// Micro attention of a peer's queries over this instance's KV. The instance validated everything.
#[derive(Clone, Debug)]
pub struct RemoteQuery {
    pub tag: RemoteTag,
    pub layer: u32,
    pub dtype: DType,
    /// `[rows][heads * head_dim]` in `dtype`.
    pub queries: Bytes,
    /// Rows in the order of the frame, all of them covered.
    pub seqs: Vec<AttnRows>,
    pub runs: Vec<KvRun>,
}

/// KV from a peer, canonical layout, in pieces of consecutive slots `(slot, tokens)`.
#[derive(Clone, Debug)]
pub struct RemoteWrite {
    /// Of KV that comes home: its report says whether it was stored. Without one, a failure fails all peers' work from
    /// then on.
    pub tag: Option<RemoteTag>,
    pub layer: u32,
    pub pieces: Vec<(u32, u32)>,
    pub kv: Bytes,
}

/// A peer's read, or one for a move, in pieces of consecutive slots `(slot, tokens)`.
#[derive(Clone, Debug)]
pub struct RemoteRead {
    pub tag: RemoteTag,
    pub layer: u32,
    pub pieces: Vec<(u32, u32)>,
}

/// Chosen by the instance to recognise KV that was staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageId(pub u64);

/// Chosen by the instance to recognise a creditor's memory that is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MapId(pub u64);

/// KV on its way between the store and the memory beside it that others read and fill, where the store is none such.
#[derive(Clone, Debug)]
pub struct StageWork {
    pub stage: StageId,
    /// To the store, or out of it.
    pub inward: bool,
    pub layers: Range<u32>,
    /// Consecutive tokens each: the first slot in the store, the first one beside it, and how many.
    pub pieces: Vec<(u32, u32, u32)>,
}

/// What the executor is told. Commands are executed in the order given, except that peers' work overtakes passes, and
/// that what is staged is staged between their layers.
#[derive(Debug)]
pub enum Command {
    Step(Box<StepWork>),
    /// A creditor's partials. Ignored if the step is gone.
    Part {
        step: StepId,
        layer: u32,
        part: RemotePart,
    },
    /// KV that was asked for, the `index`-th of the step's fetches. Ignored if the step is gone.
    Fetched {
        step: StepId,
        layer: u32,
        index: usize,
        kv: Bytes,
    },
    Abort {
        step: StepId,
    },
    RemoteQuery(RemoteQuery),
    RemoteWrite(RemoteWrite),
    RemoteRead(RemoteRead),
    /// Seals an rBlock of a store that is lent, behind what was written before.
    RemoteSeal {
        tag: RemoteTag,
        block: u32,
        epoch: Epoch,
    },
    /// Maps a creditor's store of so many rBlocks.
    Map {
        map: MapId,
        blocks: u32,
        memory: PeerMemory,
    },
    /// No step attends to it any more.
    Unmap {
        map: MapId,
    },
    /// Maps the memory of rBlocks at other addresses, too, `(first slot it is in, first slot it is to be at)` each, `tokens`
    /// tokens of one: what they hold at this place in the order of commands ([`lagoon_backend::VirtualMemory::kv_share`]).
    Share {
        share: ShareId,
        tokens: u32,
        slots: Vec<(u32, u32)>,
    },
    /// Nobody else uses these slots and places until it is reported.
    Stage(StageWork),
    /// Nobody uses these slots any more. Executed in the order of the commands before and after it.
    Release {
        slots: Vec<Range<u32>>,
    },
}

/// What the executor answers.
#[derive(Debug)]
pub enum Report {
    /// Queries of one layer for every [`Ship`], in its order. Fetched KV of this layer is needed now.
    Queries {
        step: StepId,
        layer: u32,
        frames: Vec<(InstanceId, u32, Bytes)>,
    },
    /// KV of one layer for every [`WriteSegment`], in its order.
    Written {
        step: StepId,
        layer: u32,
        kv: Vec<Bytes>,
    },
    /// The KV of all rows of a watched step is in the store, in this layer and those before it, and stays as it is.
    Layer {
        step: StepId,
        layer: u32,
    },
    Done {
        step: StepId,
        micro_batch: MicroBatch,
        samples: Vec<SampleOut>,
    },
    Failed {
        step: StepId,
        micro_batch: MicroBatch,
        error: PassError,
    },
    RemotePartial {
        tag: RemoteTag,
        out: Bytes,
        lse: Bytes,
        count: Bytes,
    },
    RemoteKv {
        tag: RemoteTag,
        kv: Bytes,
    },
    /// A peer's KV of so many bytes has left the queue. With the write's tag if that was stored.
    RemoteWritten {
        bytes: usize,
        tag: Option<RemoteTag>,
    },
    RemoteFailed {
        tag: RemoteTag,
        error: DeviceError,
    },
    /// Whoever maps the store sees the rBlock sealed.
    RemoteSealed {
        tag: RemoteTag,
    },
    /// A creditor's store is mapped, or why it is not.
    Mapped {
        map: MapId,
        error: Option<DeviceError>,
    },
    /// The memory is mapped, or not all of it is.
    Shared {
        share: ShareId,
        error: Option<DeviceError>,
    },
    /// All of it is where it was to be, or some of it is not.
    Staged {
        stage: StageId,
        error: Option<DeviceError>,
    },
    /// On a device that maps memory behind addresses: what that has come to, when there is nothing else to do and it
    /// changed.
    Memory(KvCounters),
    /// On a device that keeps how steps were launched: what that has come to, as above.
    Launches(LaunchCounters),
}

/// A chosen token.
#[derive(Clone, Debug)]
pub struct SampleOut {
    pub seq: SeqId,
    pub token: u32,
    pub logprobs: Option<TokenLogprobs>,
    pub logits: Option<Vec<f32>>,
}

/// Why a pass ended without a result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PassError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The runs of a row did not tile its visible range: never a wrong answer, always this error.
    #[error("row {row} at position {pos} saw {seen} keys instead of {expected} in layer {layer}")]
    Coverage { layer: u32, row: usize, pos: u32, seen: u64, expected: u32 },
    /// A creditor's partials do not have the shape of the query.
    #[error("partials from {creditor} have the wrong size in layer {layer}")]
    Part { creditor: InstanceId, layer: u32 },
    /// Memory of a creditor's was written by somebody else since its KV was sealed: whatever was computed from it is thrown away.
    #[error("{creditor} has used the memory of {lease} for something else")]
    Reused { creditor: InstanceId, lease: LeaseId },
    #[error("sampling failed: {0}")]
    Sampling(String),
}
