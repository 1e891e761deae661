//! Commands to the runner and its reports: plain data.

use crate::memory::PeerMemory;
use crate::token_counts::TokenCounts;
use bytes::Bytes;
use lagoon_backend::{AttnRows, DeviceError, KvCounters, LaunchCounters};
use lagoon_grammar::AnswerMatcher;
use lagoon_types::run::visible;
use lagoon_types::{
    DType, Epoch, InstanceId, KvRun, LeaseId, LeaseRun, MicroBatch, PromptLogprob, RingRows, SamplingParams, SeqId,
    StepId, TokenLogprobs,
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
    /// Slot of each row's KV in the main store; `u32::MAX` where its rBlock is remote, and of rows that warm up.
    pub slots: Vec<u32>,
    pub seqs: Vec<SeqRows>,
    /// Runs in the main store, those of a sequence consecutive and ascending, covering its rows that are stored here.
    pub runs: Vec<KvRun>,
    pub remote: RemoteWork,
    /// First slot of the address row of the next sequence to begin, if the store has address rows.
    pub next_row: Option<u32>,
    /// Report each layer but the last when its KV is in the store ([`Report::Layer`]).
    pub watched: bool,
    /// Each pooled layer is reported when its KV is in the store ([`Report::Appended`]), before its attention.
    pub announced: bool,
    /// Rows whose logits are reduced to log-probabilities of a prompt ([`Report::Prompts`]).
    pub scores: Vec<ScoreRows>,
    /// Rows whose hidden states are added up ([`Report::Prompts`]).
    pub hidden: Vec<HiddenRows>,
}

/// Consecutive rows of one sequence whose logits give log-probabilities of the prompt's next tokens.
#[derive(Clone, Debug)]
pub struct ScoreRows {
    pub seq: SeqId,
    pub row0: u32,
    /// Position of the first of `targets`: one behind the first row's.
    pub first: u32,
    /// The token behind each row.
    pub targets: Vec<u32>,
    /// Likeliest tokens to report with each.
    pub top: u32,
}

/// Consecutive rows of one sequence whose hidden states, after the final norm, are added up.
#[derive(Clone, Debug)]
pub struct HiddenRows {
    pub seq: SeqId,
    pub row0: u32,
    /// A row each; not empty.
    pub positions: Range<u32>,
}

impl HiddenRows {
    /// The rows in the step.
    #[must_use]
    pub const fn rows(&self) -> Range<u32> {
        self.row0..self.row0 + (self.positions.end - self.positions.start)
    }
}

/// The sum of a sequence's hidden states at some positions.
#[derive(Clone, Debug, PartialEq)]
pub struct HiddenSum {
    pub seq: SeqId,
    pub positions: Range<u32>,
    pub sum: Vec<f64>,
}

/// Rows of one sequence in a step.
#[derive(Clone, Debug)]
pub struct SeqRows {
    pub seq: SeqId,
    pub row0: u32,
    pub rows: u32,
    /// How many of the rows, the last ones, are drafts: with `sample`, they are sampled, too, as the tokens that follow.
    pub drafts: u32,
    pub pos0: u32,
    pub run0: u32,
    pub runs: u32,
    /// Set where windowed KV is kept apart.
    pub ring: Option<RingRows>,
    /// The last window in rBlocks, before the rows if the ring loads it, or with them, to be saved.
    pub window: Option<SavedWindow>,
    /// Set if the logits of the last row before the drafts choose the next token.
    pub sample: Option<SampleSpec>,
}

/// Where a sequence's last window lies, or goes, in the main store: see [`lagoon_types::WindowShape`].
#[derive(Clone, Debug)]
pub struct SavedWindow {
    pub positions: Range<u32>,
    /// Consecutive slots each: first slot and number, those of a [`lagoon_types::WindowShape`] in their order.
    pub pieces: Vec<(u32, u32)>,
}

/// Sampling of one sequence's next token.
#[derive(Clone, Debug)]
pub struct SampleSpec {
    pub params: Arc<SamplingParams>,
    /// Tokens that the sequence generated before. Seed and index determine the draw.
    pub index: u64,
    pub return_logits: bool,
    /// Tokens that are not drawn. Log-probabilities are those of all tokens.
    pub banned: Arc<[u32]>,
    /// The sequence's tokens, if its parameters have penalties.
    pub token_counts: Option<Arc<TokenCounts>>,
    /// The answer's matcher, if it is constrained.
    pub matcher: Option<Arc<AnswerMatcher>>,
}

impl SampleSpec {
    /// Sampling by `params` alone: no further rules, and no logits in the report.
    #[must_use]
    pub fn new(params: Arc<SamplingParams>, index: u64) -> Self {
        Self { params, index, return_logits: false, banned: Arc::default(), token_counts: None, matcher: None }
    }
}

/// A step's work with creditors; empty in the local micro-batch.
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

/// Mapped KV of one creditor (peer access): attention reads it directly, no message is sent.
#[derive(Clone, Debug)]
pub struct MappedKv {
    pub creditor: InstanceId,
    pub map: MapId,
    /// Sequences over [`MappedKv::runs`], in the rows of the step.
    pub seqs: Vec<AttnRows>,
    /// Runs in the creditor's store, those of a sequence consecutive and ascending.
    pub runs: Vec<KvRun>,
    /// The rBlocks of these runs.
    pub sealed: Vec<SealedBlock>,
}

/// An rBlock of a creditor's store, valid while it is sealed with its lease's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedBlock {
    pub block: u32,
    pub lease: LeaseId,
    pub epoch: Epoch,
}

/// Queries for one creditor: the rows of these segments, in order, in every layer in which one of them sees a key there.
#[derive(Clone, Debug)]
pub struct Ship {
    pub creditor: InstanceId,
    pub segments: Vec<ShipSegment>,
}

/// Consecutive rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShipSegment {
    pub row0: u32,
    pub rows: u32,
    /// Position of the first row.
    pub pos0: u32,
    /// One past the last position of the keys that the creditor has; not above `pos0`, or, of rows that warm up, not above
    /// their end.
    pub end: u32,
}

impl ShipSegment {
    /// The rows in the step.
    #[must_use]
    pub const fn range(&self) -> Range<u32> {
        self.row0..self.row0 + self.rows
    }
}

impl Ship {
    /// Rows in one frame.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.segments.iter().map(|segment| segment.rows).sum()
    }

    /// Whether a row sees a key there in a layer with this window.
    #[must_use]
    pub fn asks(&self, window: Option<u32>) -> bool {
        self.segments.iter().any(|segment| visible(segment.pos0, window).start < segment.end)
    }
}

/// Remote KV of one sequence that is fetched in every layer, at most `fetch_tokens` tokens.
#[derive(Clone, Copy, Debug)]
pub struct Fetch {
    pub creditor: InstanceId,
    /// Index into [`StepWork::seqs`].
    pub seq_index: u32,
    pub run: LeaseRun,
}

/// Rows whose KV is written to a lease.
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

/// A creditor's partials for one layer.
#[derive(Clone, Debug)]
pub struct RemotePart {
    pub creditor: InstanceId,
    pub out: Bytes,
    pub lse: Bytes,
    pub count: Bytes,
}

/// Tag of a peer's frame; the instance chooses it, reports carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemoteTag(pub u64);

/// Number of a [`Command::Share`]; the instance chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShareId(pub u64);

/// Micro attention of a peer's queries over this instance's KV. The instance has validated it.
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

/// Partials of the same queries over disjoint keys, of this instance and of peers, to be merged in this order. The instance has
/// validated them: all have the shape of [`RemoteMerge::rows`] rows.
#[derive(Clone, Debug)]
pub struct RemoteMerge {
    pub tag: RemoteTag,
    pub dtype: DType,
    pub rows: u32,
    pub parts: Vec<RemotePart>,
}

/// KV from a peer, canonical layout, in pieces of consecutive slots `(slot, tokens)`.
#[derive(Clone, Debug)]
pub struct RemoteWrite {
    /// Set for KV that returns to its debtor: a report tells whether the write succeeded. Without a tag, a failed write
    /// fails all later work for peers.
    pub tag: Option<RemoteTag>,
    pub layer: u32,
    pub pieces: Vec<(u32, u32)>,
    pub kv: Bytes,
}

/// KV to read for a peer or a move, in pieces of consecutive slots `(slot, tokens)`.
#[derive(Clone, Debug)]
pub struct RemoteRead {
    pub tag: RemoteTag,
    pub layer: u32,
    pub pieces: Vec<(u32, u32)>,
}

/// Number of a [`Command::Stage`]; the instance chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageId(pub u64);

/// Number of a creditor's mapped store; the instance chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MapId(pub u64);

/// KV to copy between the store and its staging buffer.
#[derive(Clone, Debug)]
pub struct StageWork {
    pub stage: StageId,
    /// From the staging buffer to the store; else the other way.
    pub inward: bool,
    pub layers: Range<u32>,
    /// Consecutive tokens each: first slot in the store, first slot in the staging buffer, number of tokens.
    pub pieces: Vec<(u32, u32, u32)>,
}

/// Number of a [`Command::Draft`]; the instance chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DraftId(pub u64);

/// Sequences for which the draft model is to propose tokens.
#[derive(Clone, Debug)]
pub struct DraftWork {
    pub draft: DraftId,
    pub seqs: Vec<DraftSeq>,
    /// Sequences of earlier requests that have ended.
    pub ended: Vec<SeqId>,
}

/// New tokens of one sequence for the draft model.
#[derive(Clone, Debug)]
pub struct DraftSeq {
    pub seq: SeqId,
    /// Tokens that the draft model has, by its last [`Drafted`]; 0 at first.
    pub from: u32,
    /// The tokens behind those, at least one.
    pub tokens: Vec<u32>,
    /// Tokens of the sequence, sent or not.
    pub len: u32,
    /// How many tokens to propose behind the last one; 0 only computes KV.
    pub drafts: u32,
}

/// The draft model's result for one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drafted {
    pub seq: SeqId,
    /// Tokens of the sequence that the draft model has now; `None` if it has no room for the sequence, or the sequence is too long
    /// for it.
    pub known: Option<u32>,
    /// Proposed to follow the known tokens.
    pub tokens: Vec<u32>,
}

/// Commands to the executor, executed in order, with three exceptions: peers' work overtakes passes, and staging and drafting
/// run between their layers.
#[derive(Debug)]
pub enum Command {
    Step(Box<StepWork>),
    /// A creditor's partials. Ignored if the step has ended.
    Part {
        step: StepId,
        layer: u32,
        part: RemotePart,
    },
    /// Fetched KV: the `index`-th of the step's fetches. Ignored if the step has ended.
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
    /// Ends in one [`Report::RemotePartial`].
    RemoteMerge(RemoteMerge),
    RemoteWrite(RemoteWrite),
    RemoteRead(RemoteRead),
    /// Seals an rBlock of a store with peer access, behind all earlier writes.
    RemoteSeal {
        tag: RemoteTag,
        block: u32,
        epoch: Epoch,
    },
    /// Maps a creditor's store of `blocks` rBlocks (peer access).
    Map {
        map: MapId,
        blocks: u32,
        memory: PeerMemory,
    },
    /// Unmaps a creditor's store. No step attends to it any more.
    Unmap {
        map: MapId,
    },
    /// Maps the memory of rBlocks of `tokens` tokens at second addresses: `(first slot, first slot of the alias)`
    /// each. The content is that after all earlier commands ([`lagoon_backend::VirtualMemory::kv_share`]).
    Share {
        share: ShareId,
        tokens: u32,
        slots: Vec<(u32, u32)>,
    },
    /// Copies KV to or from the staging buffer. Its slots and places are not used otherwise until [`Report::Staged`].
    Stage(StageWork),
    /// Releases slots that no sequence uses any more. Executed in order with its neighbours.
    Release {
        slots: Vec<Range<u32>>,
    },
    /// Proposes tokens with the draft model. Ends in one [`Report::Drafted`].
    Draft(DraftWork),
}

/// Reports of the executor.
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
    /// A watched step's KV is in the store, all rows, in this layer and those before, and does not change.
    Layer {
        step: StepId,
        layer: u32,
    },
    /// An announced step's KV of this pooled layer is in the store, all rows, and does not change.
    Appended {
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
    /// A peer's KV of `bytes` bytes has left the queue; `tag` is the write's if it was stored. `failed`: a write without a tag was not
    /// stored, and what the peer believes to be there is not.
    RemoteWritten {
        bytes: usize,
        tag: Option<RemoteTag>,
        failed: bool,
    },
    RemoteFailed {
        tag: RemoteTag,
        error: DeviceError,
    },
    /// The rBlock is sealed, for every process that maps the store.
    RemoteSealed {
        tag: RemoteTag,
    },
    /// A creditor's store is mapped, or could not be.
    Mapped {
        map: MapId,
        error: Option<DeviceError>,
    },
    /// Log-probabilities of prompts' tokens, by sequence, from the position of the first on, and sums of hidden states. Comes
    /// before [`Report::Done`].
    Prompts {
        step: StepId,
        scores: Vec<(SeqId, u32, Vec<PromptLogprob>)>,
        sums: Vec<HiddenSum>,
    },
    /// All blocks of a share are mapped, or the first error.
    Shared {
        share: ShareId,
        error: Option<DeviceError>,
    },
    /// All pieces are copied, or the first error.
    Staged {
        stage: StageId,
        error: Option<DeviceError>,
    },
    /// The draft model's proposals, and the error that cost it all its KV, if there was one.
    Drafted {
        draft: DraftId,
        seqs: Vec<Drafted>,
        error: Option<PassError>,
    },
    /// Virtual memory counters, when they changed and the executor is idle.
    Memory(KvCounters),
    /// Graph launch counters, when they changed and the executor is idle.
    Launches(LaunchCounters),
}

impl Report {
    /// Why the device is lost, if it is.
    #[must_use]
    pub fn lost_device(&self) -> Option<&str> {
        let error = match self {
            Self::Failed { error: PassError::Device(error), .. }
            | Self::Drafted { error: Some(PassError::Device(error)), .. }
            | Self::RemoteFailed { error, .. }
            | Self::Mapped { error: Some(error), .. }
            | Self::Shared { error: Some(error), .. }
            | Self::Staged { error: Some(error), .. } => error,
            _ => return None,
        };
        if let DeviceError::Lost(why) = error { Some(why) } else { None }
    }
}

/// A sampled token; of a sequence with drafts, one for each row that is sampled, in their order.
#[derive(Clone, Debug, Default)]
pub struct SampleOut {
    pub seq: SeqId,
    /// `None`: the request's own rules leave no token. It fails, unless its grammar has ended.
    pub token: Option<u32>,
    pub logprobs: Option<TokenLogprobs>,
    pub logits: Option<Vec<f32>>,
    /// The answer's grammar has ended, with this token or before: nothing may follow.
    pub has_ended: bool,
    /// Why there is no token, if its grammar is the reason.
    pub failure: Option<String>,
}

/// Reason why a pass ended without a result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PassError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The runs of a row did not tile its visible range; the pass ends rather than give a wrong answer.
    #[error("row {row} at position {pos} saw {seen} keys instead of {expected} in layer {layer}")]
    Coverage { layer: u32, row: usize, pos: u32, seen: u64, expected: u32 },
    /// A creditor's partials do not have the shape of the query.
    #[error("partials from {creditor} have the wrong size in layer {layer}")]
    Part { creditor: InstanceId, layer: u32 },
    /// A creditor's mapped memory was overwritten since its seal: results computed from it are discarded.
    #[error("{creditor} has reused the memory of {lease}")]
    Reused { creditor: InstanceId, lease: LeaseId },
    #[error("sampling failed: {0}")]
    Sampling(String),
}
