//! Frames of the hot path: step tickets, layer queries, partials and KV. Payloads are raw bytes that the codec never
//! copies; the codec validates lengths against the header.

use bytes::Bytes;
pub use lagoon_types::LeaseRun;
use lagoon_types::{DType, Epoch, InstanceId, LeaseId, SeqId, StepId};

/// Reason of a creditor's refusal of a step or a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefuseCode {
    /// No such lease, or it belongs to another debtor.
    UnknownLease,
    /// The lease has another epoch.
    StaleEpoch,
    /// Offsets outside the lease, or freed entries.
    OutOfRange,
    /// The queried KV was not written before the deadline.
    Deadline,
    /// A limit of the creditor (tickets, rows, bytes) is reached.
    Overloaded,
    /// The frame is inconsistent with its ticket.
    Malformed,
    /// The creditor's device failed.
    Device,
    /// A sealed block's content hash differs from the debtor's.
    HashMismatch,
    /// The step's queries or partials did not come through its relay: the KV is there, and the creditors may be asked directly.
    NotRelayed,
}

impl RefuseCode {
    /// Stable number for the wire.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::UnknownLease => 1,
            Self::StaleEpoch => 2,
            Self::OutOfRange => 3,
            Self::Deadline => 4,
            Self::Overloaded => 5,
            Self::Malformed => 6,
            Self::Device => 7,
            Self::HashMismatch => 8,
            Self::NotRelayed => 9,
        }
    }

    /// Inverse of [`RefuseCode::code`].
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::UnknownLease,
            2 => Self::StaleEpoch,
            3 => Self::OutOfRange,
            4 => Self::Deadline,
            5 => Self::Overloaded,
            6 => Self::Malformed,
            7 => Self::Device,
            8 => Self::HashMismatch,
            9 => Self::NotRelayed,
            _ => return None,
        })
    }
}

/// Query rows of one sequence in a step, and their lease runs on this creditor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TicketSeq {
    pub seq: SeqId,
    /// Query rows of this sequence; in a frame they follow the rows of the sequences before it.
    pub rows: u32,
    /// Position of the first row.
    pub pos0: u32,
    /// Ascending in position.
    pub runs: Vec<LeaseRun>,
}

/// Way of a step's queries to a creditor, and of its partials back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Route {
    /// From the debtor, and to it.
    #[default]
    Direct,
    /// From this relay, and to it.
    Through(InstanceId),
    /// From the debtor; the creditor is the relay of these members: it passes each layer's queries on to them, and answers with the
    /// merge of its partial and theirs, in this order.
    Relay(Vec<InstanceId>),
}

/// Step ticket: sent to a creditor once per step, so that layer frames carry only step, layer and queries. Valid until
/// the last layer is answered, a [`PartialsFrame::StepCancel`], or its deadline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTicket {
    pub step: StepId,
    /// Milliseconds from receipt.
    pub deadline_ms: u32,
    /// Element type of the queries and of the partials' outputs.
    pub dtype: DType,
    pub route: Route,
    pub seqs: Vec<TicketSeq>,
}

/// Frame of the partials class: small, latency-bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartialsFrame {
    Ticket(StepTicket),
    /// Queries of one layer, `[rows][heads * head_dim]` in the ticket's dtype.
    Query {
        step: StepId,
        layer: u32,
        rows: u32,
        queries: Bytes,
    },
    /// Reply to `Query`: `out` `[rows][heads * head_dim]` in the ticket's dtype, normalised; then `lse` `[rows][heads]`
    /// f32 (natural log); then `count` `[rows]` u32.
    Partial {
        step: StepId,
        layer: u32,
        rows: u32,
        out: Bytes,
        lse: Bytes,
        count: Bytes,
    },
    Refused {
        step: StepId,
        code: RefuseCode,
        detail: String,
    },
    StepCancel {
        step: StepId,
    },
    /// A relay passes a debtor's `Query` on to a member.
    RelayedQuery {
        debtor: InstanceId,
        step: StepId,
        layer: u32,
        rows: u32,
        queries: Bytes,
    },
    /// A member's `Partial`, for its relay.
    RelayedPartial {
        debtor: InstanceId,
        step: StepId,
        layer: u32,
        rows: u32,
        out: Bytes,
        lse: Bytes,
        count: Bytes,
    },
}

/// Frame of the bulk class: KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BulkFrame {
    /// Writes KV of `tokens` tokens of one layer, canonical layout, at ascending offsets of a lease.
    Write {
        lease: LeaseId,
        epoch: Epoch,
        layer: u32,
        offset: u32,
        tokens: u32,
        kv: Bytes,
    },
    /// Seals an entry that is written in every layer if its content has this hash (blake3 over the layers' blake3
    /// hashes); else [`BulkFrame::Refused`] with `HashMismatch`.
    Seal {
        lease: LeaseId,
        epoch: Epoch,
        entry: u32,
        hash: [u8; 32],
    },
    /// Reads KV of one layer. The reply is one `Data` or `Refused` with the same id. Waits, like a query, until the
    /// range is written.
    Read {
        id: u64,
        lease: LeaseId,
        epoch: Epoch,
        layer: u32,
        offset: u32,
        tokens: u32,
        deadline_ms: u32,
    },
    Data {
        id: u64,
        layer: u32,
        tokens: u32,
        kv: Bytes,
    },
    /// A `Read` (by its id) or a `Write`/`Seal` (id 0, by its lease) failed.
    Refused {
        id: u64,
        lease: LeaseId,
        code: RefuseCode,
        detail: String,
    },
}
