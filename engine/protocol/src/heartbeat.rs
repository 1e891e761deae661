//! Heartbeats: what instances report to the gManager, and what it replies.

use crate::placement::{Load, PlacementEntry};
use crate::prefix::{CacheCounts, CacheSummary};
use crate::role::Role;
use prost::Message;

/// Entry of the sender's debt ledger: one debtor.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Debt {
    /// The debtor's number.
    #[prost(uint32, tag = "1")]
    pub debtor: u32,
    /// rBlocks lent to it.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
}

/// Periodic report of an instance to the gManager: its memory, debts, load, and changes of its placement rows. Answered
/// by [`HeartbeatAck`].
#[derive(Clone, PartialEq, Message)]
pub struct Heartbeat {
    /// The sender's number.
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    /// As in `Register`.
    #[prost(fixed64, tag = "2")]
    pub incarnation: u64,
    /// Sequence number, increasing within an incarnation; stale heartbeats are ignored.
    #[prost(uint64, tag = "3")]
    pub seq: u64,
    /// rBlocks of the sender's KV store.
    #[prost(uint32, tag = "4")]
    pub blocks_total: u32,
    /// Free blocks, lendable or not.
    #[prost(uint32, tag = "5")]
    pub blocks_free: u32,
    /// Blocks that the sender would lend now.
    #[prost(uint32, tag = "6")]
    pub blocks_lendable: u32,
    /// Lent blocks by debtor.
    #[prost(message, repeated, tag = "7")]
    pub lent: Vec<Debt>,
    /// rBlocks that the sender holds at creditors.
    #[prost(uint32, tag = "8")]
    pub blocks_borrowed: u32,
    /// Sequences in its batch.
    #[prost(uint32, tag = "9")]
    pub requests_running: u32,
    /// Sequences in its queue.
    #[prost(uint32, tag = "10")]
    pub requests_waiting: u32,
    /// Round trips measured to peers, in microseconds, for locality.
    #[prost(message, repeated, tag = "11")]
    pub links: Vec<Link>,
    /// Rows of the request placement map that changed since the last acknowledged heartbeat, or every row if
    /// `placements_full` (v2 §6.2).
    #[prost(message, repeated, tag = "12")]
    pub placements: Vec<PlacementEntry>,
    /// Whether `placements` has every row.
    #[prost(bool, tag = "13")]
    pub placements_full: bool,
    /// Batch and queue for the planner's model; absent on nodes that run no requests.
    #[prost(message, optional, tag = "14")]
    pub load: Option<Load>,
    /// Draining (`lagoon drain`): it takes no new requests, lends nothing, and moves its blocks away.
    #[prost(bool, tag = "15")]
    pub draining: bool,
    /// DGFM cycle that the sender is frozen for; 0 if none.
    #[prost(uint64, tag = "16")]
    pub frozen: u64,
    /// Move counters for operators.
    #[prost(message, optional, boxed, tag = "17")]
    pub moves: Option<Box<MoveCounts>>,
    /// `Workers::version` of the sender's worker list; 0 if none.
    #[prost(fixed64, tag = "18")]
    pub workers: u64,
    /// Prefill counters for operators; of prefill and decode workers.
    #[prost(message, optional, boxed, tag = "20")]
    pub prefill: Option<Box<PrefillCounts>>,
    /// Current role; absent if the role of this instance cannot change.
    #[prost(message, optional, boxed, tag = "21")]
    pub role: Option<Box<RoleState>>,
    /// What the sender's prefix cache has, if that changed since the last acknowledged heartbeat.
    #[prost(message, optional, boxed, tag = "22")]
    pub cached: Option<Box<CacheSummary>>,
    /// Counters of the prefix cache for operators; absent where it is off.
    #[prost(message, optional, boxed, tag = "23")]
    pub cache: Option<Box<CacheCounts>>,
}

/// Role of an instance whose role may change.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct RoleState {
    #[prost(enumeration = "Role", tag = "1")]
    pub now: i32,
    /// New role, while the instance finishes the work that only the old role does; absent if no change is in progress.
    #[prost(enumeration = "Role", optional, tag = "2")]
    pub becoming: Option<i32>,
    /// `RoleOrder::number` of the last order received; 0 if none.
    #[prost(uint64, tag = "3")]
    pub order_received: u64,
}

/// Prefill counters since an instance's process started (own prompts computed by prefill workers, and others' computed here),
/// and gauges of those in progress.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct PrefillCounts {
    /// Prefill workers whose KV this instance can read.
    #[prost(uint32, tag = "1")]
    pub workers: u32,
    /// Own requests whose prompts prefill workers compute, or whose KV waits to be read.
    #[prost(uint32, tag = "2")]
    pub away: u32,
    /// Prefill jobs in progress for other instances.
    #[prost(uint32, tag = "3")]
    pub jobs: u32,
    /// Tokens of `jobs` that are not computed yet.
    #[prost(uint64, tag = "4")]
    pub queued_tokens: u64,
    #[prost(uint64, tag = "5")]
    pub jobs_done: u64,
    /// Own prompts whose KV was read from a worker (`pulled`), and own prompts that no worker took (`own`).
    #[prost(uint64, tag = "6")]
    pub pulled: u64,
    #[prost(uint64, tag = "7")]
    pub own: u64,
    /// Bytes of KV read, and the time during which any read was in progress, in microseconds.
    #[prost(uint64, tag = "8")]
    pub bytes: u64,
    #[prost(uint64, tag = "9")]
    pub reading_us: u64,
    /// Reads before coalescing, and transactions after it.
    #[prost(uint64, tag = "10")]
    pub reads: u64,
    #[prost(uint64, tag = "11")]
    pub transactions: u64,
    /// Sums of phase times over the `pulled` requests, in milliseconds (KVDirect Fig. 14).
    #[prost(uint64, tag = "12")]
    pub queue_ms: u64,
    #[prost(uint64, tag = "13")]
    pub prefill_ms: u64,
    #[prost(uint64, tag = "14")]
    pub decode_queue_ms: u64,
    #[prost(uint64, tag = "15")]
    pub transfer_ms: u64,
    /// The same sum of decode times, over the `decoded` requests: pulled ones that have finished.
    #[prost(uint64, tag = "16")]
    pub decode_ms: u64,
    #[prost(uint64, tag = "17")]
    pub decoded: u64,
    /// Own requests that no worker computes and that wait for memory or a place in the local batch.
    #[prost(uint32, tag = "18")]
    pub waiting: u32,
}

/// Move counters of an instance's requests since its process started.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct MoveCounts {
    /// Moves in flight.
    #[prost(uint32, tag = "1")]
    pub in_progress: u32,
    /// Blocks moved to a creditor.
    #[prost(uint64, tag = "2")]
    pub blocks_out: u64,
    /// Blocks moved back to the debtor.
    #[prost(uint64, tag = "3")]
    pub blocks_home: u64,
    /// Blocks moved from one creditor to another.
    #[prost(uint64, tag = "4")]
    pub blocks_between: u64,
}

/// Measured link to a peer.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Link {
    /// The peer's number.
    #[prost(uint32, tag = "1")]
    pub peer: u32,
    /// Round trip, in microseconds; 0 if it was not measured yet.
    #[prost(uint32, tag = "2")]
    pub rtt_us: u32,
    /// Measured rate of bulk transfers, in bytes per second; 0 if none was measured yet.
    #[prost(uint64, tag = "3")]
    pub bytes_per_s: u64,
    /// Peer access: the sender has mapped the peer's KV store and attends to KV borrowed there itself.
    #[prost(bool, tag = "4")]
    pub mapped: bool,
}

/// Reply to [`Heartbeat`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HeartbeatAck {
    /// Whether the gManager knows the instance; if not, it registers again.
    #[prost(bool, tag = "1")]
    pub known: bool,
    /// The instance's blocks plus the lend limits of all other live instances: its largest possible request.
    #[prost(uint64, tag = "2")]
    pub pool_blocks_total: u64,
    /// The gManager lacks placement rows: the next heartbeat carries all of them.
    #[prost(bool, tag = "3")]
    pub placements_wanted: bool,
    /// The instance was declared dead and its loans are written off. It drops all leases, draws a new incarnation and
    /// registers again.
    #[prost(bool, tag = "4")]
    pub fenced: bool,
    /// As in `Registered`.
    #[prost(uint64, tag = "5")]
    pub term: u64,
    /// `seq` of the heartbeat whose placement rows this acknowledges.
    #[prost(uint64, tag = "6")]
    pub seq: u64,
    /// The oldest waiting pool-sized request, if the receiver keeps its memory for it.
    #[prost(message, optional, tag = "7")]
    pub oldest_waiting: Option<OldestWaiting>,
}

/// The oldest waiting pool-sized request: no single instance can hold it. An instance that receives it neither admits
/// younger requests nor lends to them, and grants no move, until a later ack lacks it or for
/// `lagoon_types::limits::OLDEST_WAITING_HOLD_MS`. Growth of running sequences is not affected.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct OldestWaiting {
    /// Instance at which the request waits.
    #[prost(uint32, tag = "1")]
    pub debtor: u32,
    /// Time since the request arrived, in milliseconds.
    #[prost(uint32, tag = "2")]
    pub waits_ms: u32,
}
