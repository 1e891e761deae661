//! [`Outcome`]: a change that one machine made and other machines act upon; the router delivers it.

use crate::event::PeerKey;
use lagoon_cluster::LeaseEnded;
use lagoon_protocol::{Hello, LentMemory, Role};
use lagoon_types::{Chunk, InstanceId, LeaseId, PhysBlock, SeqId, TokenLogprobs};
use std::ops::Range;

/// The token behind a prompt that was computed for another instance.
#[derive(Debug)]
pub(crate) struct FirstToken {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
    pub(crate) logits: Option<Vec<f32>>,
    /// The answer's grammar has ended with it.
    pub(crate) has_ended: bool,
}

/// An outcome, for other machines. Each starts with the machine that reports it.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Creditor: a debtor did not return `missing` blocks in time. Those that the batch still lacks are revoked.
    RecallMissed { debtor: InstanceId, missing: u32 },
    /// Batch: its single batch waits too long for a creditor and is split. Its step ends.
    BrokenUp,
    /// Any: KV of a sequence is lost. Its moves with that creditor end, its step is aborted, and it gets other memory.
    Lost(Lost),
    /// Batch: a sequence is removed. Its requests to prefill workers are cancelled.
    Ended { seq: SeqId },
    /// Batch: a sequence freed its memory. Its moves and exports end.
    Released { seq: SeqId },
    /// Batch: a sequence freed these blocks while transports may read them. They become free when none does.
    Withheld { seq: SeqId, blocks: Vec<PhysBlock> },
    /// Batch: a sequence that computes for another instance failed. The decode worker is informed.
    JobFailed { seq: SeqId, reason: String },
    /// Batch: a preempted sequence is to be recomputed, by a prefill worker if there is one.
    Preempted { seq: SeqId },
    /// Batch: a prefill worker is to compute the prompt of a new sequence.
    SentAway { seq: SeqId },
    /// Batch: preparations for a prompt that a prefill worker computes failed.
    Redo { seq: SeqId, why: &'static str },
    /// Batch: a request whose prompt a prefill worker computed ended without error; it decoded for `ms` milliseconds.
    Decoded { ms: u64 },
    /// Batch: own sequences need lent blocks back; with `take`, blocks not returned in time are revoked.
    WantBack { blocks: u32, take: bool },
    /// Batch, step: an event of a sequence in joint prefill.
    Joint(JointNews),
    /// Joint prefill: leases of own blocks are written further. Waiting queries are served.
    KvAppended,
    /// Joint prefill: a sequence leaves its step.
    StepLeft { seq: SeqId },
    /// Batch: growth needs blocks reserved for moves home.
    RoomNeeded,
    /// Batch: a sequence stops, and its whole blocks are to move to host memory.
    SwapOut { seq: SeqId, blocks: u32 },
    /// Moves: a swap out ended. `all`: all blocks have moved.
    SwappedOut { seq: SeqId, all: bool },
    /// Batch: the oldest blocks of a sequence fell behind its window.
    BehindWindow { seq: SeqId },
    /// Step: a step with these chunks begins, pushed prompts among them.
    Watched { chunks: Vec<Chunk> },
    /// Step: `layers` layers of a sequence's chunk are filled.
    Layers { seq: SeqId, layers: u32 },
    /// Step: a sequence's chunk of a prompt for another instance is computed.
    Chunk { seq: SeqId },
    /// Step: a sequence's chunk was not computed.
    ChunkLeft { seq: SeqId },
    /// Step: a prompt for another instance is computed.
    Prefilled { seq: SeqId, first: FirstToken },
    /// Step: a step ended well; `growing` sequences grew, and `other_rows` rows were of prompts or accepted drafts. `own`: for a step of the local micro-batch in which every
    /// sequence grew, the remote requests' time before it.
    StepDone { ms: u64, growing: u32, other_rows: u32, own: Option<f64> },
    /// Membership: leases have ended.
    LeasesEnded(Vec<LeaseEnded>),
    /// Membership: a peer's Hello is valid, and the connection that it replaces is closed.
    Introduced { peer: PeerKey, hello: Hello },
    /// Membership: a peer is known. `greeted`: it has this instance's Hello. `lent`: memory that it lets others map.
    PeerUp { peer: PeerKey, instance: InstanceId, greeted: bool, lent: Option<LentMemory> },
    /// Membership: the connection to a peer was lost.
    PeerGone(InstanceId),
    /// Router: no step attends to mapped memory of a disconnected peer any more.
    Unattended(InstanceId),
    /// Membership: a frame to a peer was dropped. Requests that depended on it end on both sides.
    SendFailed { peer: PeerKey, instance: InstanceId },
    /// Membership: this instance was declared dead and begins a new incarnation.
    NewLife,
    /// Membership: this instance has another role.
    RoleChanged { old: Role },
}

/// What batch and steps did with a sequence that is, or is to be, in joint prefill.
#[derive(Debug)]
pub(crate) enum JointNews {
    /// A waiting sequence's prompt is to be computed by several instances.
    Wanted(SeqId),
    /// The last step of a stripe has started.
    StripeStarted { seq: SeqId, stripe: u32 },
    /// A step has appended the KV of a layer, up to position `end`.
    Appended { seq: SeqId, layer: u32, end: u32 },
    /// A step has computed a chunk.
    Computed(SeqId),
}

/// KV of a sequence that was lost at a creditor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) seq: SeqId,
    pub(crate) creditor: InstanceId,
    pub(crate) part: LostPart,
    pub(crate) why: String,
}

/// The KV that was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LostPart {
    /// All KV of the sequence at that creditor.
    All,
    Lease(LeaseId),
    /// Entries that the creditor revoked after a recall: no failure, and not counted as one.
    Entries(LeaseId, Range<u32>),
}

impl LostPart {
    /// Whether KV of this lease is lost.
    pub(crate) fn meets(&self, lease: LeaseId) -> bool {
        match self {
            Self::All => true,
            Self::Lease(of) | Self::Entries(of, _) => *of == lease,
        }
    }
}

/// Outcomes, in order.
pub(crate) type Outcomes = Vec<Outcome>;

/// Maximum rounds of handing on outcomes of outcomes. Each kind causes only later kinds, so there is a last one.
pub(crate) const ROUNDS_MAX: usize = 8;
