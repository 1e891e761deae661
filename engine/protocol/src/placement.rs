//! Control messages of planning and movement: the request placement map and `move_kvcache` (Infinite-LLM v2 §6),
//! recall by the creditor, DGFM (v1 §4.5), fencing, drain, and what operators ask of the gManager.
//!
//! A request's identity in the pool is its debtor's number and its sequence number there.

use crate::control::Role;
use prost::{Enumeration, Message, Oneof};

/// `RequestPlacementEntry` (v2 Listing 1): rBlocks of one request on the sender of the heartbeat. It is local if
/// `debtor` is the sender.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PlacementEntry {
    #[prost(uint32, tag = "1")]
    pub debtor: u32,
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    /// 0: the row is gone.
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// Of these, blocks that could move now: full in every layer.
    #[prost(uint32, tag = "4")]
    pub blocks_sealed: u32,
}

/// What an instance measured of itself: f and g of the performance model (v2 Eq. 5), in time.
#[derive(Clone, PartialEq, Message)]
pub struct Calibration {
    /// Time of everything but attention, by batch size, ascending.
    #[prost(message, repeated, tag = "1")]
    pub batches: Vec<BatchPoint>,
    /// Decode attention over 1,024 tokens of one sequence, all layers, in microseconds.
    #[prost(double, tag = "2")]
    pub attention_us_per_ktoken: f64,
    /// Prefill, per token, in microseconds, at a chunk of the usual size.
    #[prost(double, tag = "3")]
    pub prefill_us_per_token: f64,
    /// Bytes per second at which KV is copied out of and into its store.
    #[prost(double, tag = "4")]
    pub copy_bytes_per_s: f64,
}

/// One point of [`Calibration::batches`].
#[derive(Clone, Copy, PartialEq, Message)]
pub struct BatchPoint {
    /// Sequences that decode together.
    #[prost(uint32, tag = "1")]
    pub batch: u32,
    /// Time of a step without its attention, all layers, in microseconds.
    #[prost(double, tag = "2")]
    pub step_us: f64,
}

/// An instance's batch and queue, for the planner.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Load {
    /// Sequences that decode.
    #[prost(uint32, tag = "1")]
    pub batch: u32,
    /// Tokens that their queries attend to, wherever the KV is.
    #[prost(uint64, tag = "2")]
    pub context_tokens: u64,
    /// Of these, tokens on creditors.
    #[prost(uint64, tag = "3")]
    pub remote_tokens: u64,
    /// Tokens of others that it holds.
    #[prost(uint64, tag = "4")]
    pub remote_request_tokens: u64,
    /// rBlocks that each of the first waiting requests needs, oldest first; at most
    /// `lagoon_types::limits::LOAD_QUEUE_MAX`.
    #[prost(uint32, repeated, tag = "5")]
    pub queue_blocks: Vec<u32>,
    /// Sequences that it runs at most.
    #[prost(uint32, tag = "6")]
    pub batch_max: u32,
    /// Mean time of its last decode steps, in microseconds; 0 if there was none.
    #[prost(uint32, tag = "7")]
    pub step_us: u32,
    /// How long ago the first waiting request came, in milliseconds, if it needs more than this instance has; else 0.
    #[prost(uint32, tag = "8")]
    pub head_waits_ms: u32,
}

/// Why blocks move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum MoveReason {
    /// The planner expects throughput of it.
    Plan = 0,
    /// The source is being drained.
    Drain = 1,
    /// An operator asked.
    Operator = 2,
    /// A swap around a frozen cycle (DGFM).
    Swap = 3,
}

/// `move_kvcache(req, blocks, dst)` (v2 Listing 1), gManager to the debtor: `blocks` of `seq` that lie on `source`
/// shall lie on `target`. Either may be the debtor itself. The debtor reserves at the target before any byte moves, and
/// answers once with [`MoveOutcome`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct MoveKvCache {
    /// The gManager's number for this order; echoed.
    #[prost(uint64, tag = "1")]
    pub order: u64,
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    #[prost(uint32, tag = "4")]
    pub source: u32,
    #[prost(uint32, tag = "5")]
    pub target: u32,
    /// `ip:port` of the target; empty if it is the debtor.
    #[prost(string, tag = "6")]
    pub target_addr: String,
    #[prost(enumeration = "MoveReason", tag = "7")]
    pub reason: i32,
    /// Milliseconds from receipt until the order ends, done or not.
    #[prost(uint32, tag = "8")]
    pub deadline_ms: u32,
    /// The cycle that a swap belongs to; 0 otherwise.
    #[prost(uint64, tag = "9")]
    pub cycle: u64,
    /// The sequence's first block that may move; the first of those from it on do. Without it the debtor chooses.
    #[prost(uint32, optional, tag = "10")]
    pub first: Option<u32>,
}

/// How a [`MoveKvCache`] ended.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct MoveOutcome {
    #[prost(uint64, tag = "1")]
    pub order: u64,
    /// Blocks that lie on the target now.
    #[prost(uint32, tag = "2")]
    pub moved: u32,
    /// Why not all: empty if all moved.
    #[prost(string, tag = "3")]
    pub reason: String,
    /// What the target said that it could lend, where it refused.
    #[prost(uint32, optional, tag = "4")]
    pub target_lendable: Option<u32>,
}

/// Entries of a lease whose content matched its hash, creditor to debtor. Of a lease for [`crate::LeasePurpose::Move`] the debtor
/// may switch to them; of one in memory that debtors may map ([`crate::LentMemory`]), whatever it is for, attend to them there.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseSealed {
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Ascending.
    #[prost(uint32, repeated, tag = "3")]
    pub entries: Vec<u32>,
    /// In which rBlock of that memory each of them is; none where there is no such memory.
    #[prost(uint32, repeated, tag = "4")]
    pub blocks: Vec<u32>,
}

/// A creditor needs its memory back, creditor to debtor: the debtor takes blocks home or elsewhere and releases them.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Recall {
    #[prost(uint64, tag = "1")]
    pub recall: u64,
    /// rBlocks that it wants back, of any of the debtor's leases.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
    /// Milliseconds from receipt after which it takes them: see [`LeaseRevoked`].
    #[prost(uint32, tag = "3")]
    pub deadline_ms: u32,
    /// The debtor may not borrow from this creditor again for so long.
    #[prost(uint32, tag = "4")]
    pub pause_ms: u32,
}

/// The creditor has freed entries of a lease on its own (a recall that was not met): their KV is lost.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRevoked {
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    #[prost(string, tag = "2")]
    pub reason: String,
    /// First entry that was freed.
    #[prost(uint32, tag = "3")]
    pub first: u32,
    /// End of the entries that were freed; 0 for the whole lease.
    #[prost(uint32, tag = "4")]
    pub entries: u32,
}

/// DGFM: the receiver owes `blocks` to `creditor` in a cycle of debts. Until the thaw or `ttl_ms`, it keeps at least so
/// many of its leases there as they are (no release, no other move; cancellations wait), and answers [`Frozen`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Freeze {
    #[prost(uint64, tag = "1")]
    pub cycle: u64,
    #[prost(uint32, tag = "2")]
    pub creditor: u32,
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    #[prost(uint32, tag = "4")]
    pub ttl_ms: u32,
}

/// The answer to [`Freeze`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Frozen {
    #[prost(uint64, tag = "1")]
    pub cycle: u64,
    /// Blocks that it holds frozen; 0 is a refusal.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
    /// Own blocks that are free now, its reserve included: what a swap may start with.
    #[prost(uint32, tag = "3")]
    pub free: u32,
    /// The sequence whose blocks are frozen.
    #[prost(uint64, tag = "4")]
    pub seq: u64,
}

/// The swap is over, done or not: what waited goes on.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Thaw {
    #[prost(uint64, tag = "1")]
    pub cycle: u64,
}

/// An instance was declared dead, gManager to all others: its leases count as lost, what it borrowed is freed.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Fenced {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(fixed64, tag = "2")]
    pub incarnation: u64,
}

/// Starts or ends a drain, gManager to instance.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DrainOrder {
    #[prost(bool, tag = "1")]
    pub on: bool,
    /// Stop the process when nothing is left here.
    #[prost(bool, tag = "2")]
    pub stop: bool,
}

/// This gManager is a standby.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NotLeader {
    /// `ip:port` of the one that leads; empty if it is not known.
    #[prost(string, tag = "1")]
    pub leader_addr: String,
}

/// What an operator asks of the gManager.
#[derive(Clone, PartialEq, Message)]
pub struct AdminQuery {
    #[prost(uint64, tag = "1")]
    pub query: u64,
    #[prost(oneof = "AdminBody", tags = "2, 3, 4, 5, 6, 7")]
    pub body: Option<AdminBody>,
}

#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum AdminBody {
    #[prost(message, tag = "2")]
    Drain(AdminDrain),
    #[prost(message, tag = "3")]
    Move(AdminMove),
    /// The request placement map.
    #[prost(message, tag = "4")]
    Placements(AdminPlacements),
    /// The planner's next orders, without giving them.
    #[prost(message, tag = "5")]
    Plan(AdminPlan),
    /// How an operator's order ended.
    #[prost(message, tag = "6")]
    Order(AdminOrder),
    #[prost(message, tag = "7")]
    Role(AdminRole),
}

/// Starts (or ends) a drain of one instance.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminDrain {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(bool, tag = "2")]
    pub cancel: bool,
    #[prost(bool, tag = "3")]
    pub stop: bool,
}

/// Gives one instance another role (`lagoon role`).
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminRole {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(enumeration = "Role", tag = "2")]
    pub role: i32,
}

/// Moves blocks of one request (`lagoon kv move`, `lagoon kv recall`).
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminMove {
    #[prost(uint32, tag = "1")]
    pub debtor: u32,
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    /// 0: as many as there are.
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// Where they lie; 0: wherever most of them do, the target apart.
    #[prost(uint32, tag = "4")]
    pub source: u32,
    /// Where they shall lie; 0: the debtor itself (a recall).
    #[prost(uint32, tag = "5")]
    pub target: u32,
    #[prost(bool, tag = "6")]
    pub dry_run: bool,
    /// As [`MoveKvCache::first`].
    #[prost(uint32, optional, tag = "7")]
    pub first: Option<u32>,
}

/// Rows of the request placement map, ascending by instance, debtor and sequence, and a bounded number of them at once:
/// those after the last one that is known.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminPlacements {
    /// Of this debtor's requests; 0: of all.
    #[prost(uint32, tag = "1")]
    pub debtor: u32,
    /// Of this request; absent: of all.
    #[prost(uint64, optional, tag = "2")]
    pub seq: Option<u64>,
    /// The row to go on after; 0: from the first.
    #[prost(uint32, tag = "3")]
    pub after_instance: u32,
    #[prost(uint32, tag = "4")]
    pub after_debtor: u32,
    #[prost(uint64, tag = "5")]
    pub after_seq: u64,
}

/// Asks for the outcome of an order that an operator gave. The gManager remembers the last ones of its term.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminOrder {
    #[prost(uint64, tag = "1")]
    pub order: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminPlan {}

/// The answer to [`AdminQuery`]. An order that was given is followed with [`AdminOrder`].
#[derive(Clone, PartialEq, Message)]
pub struct AdminReply {
    #[prost(uint64, tag = "1")]
    pub query: u64,
    /// Empty if it was done.
    #[prost(string, tag = "2")]
    pub error: String,
    /// What the operator could do about the error.
    #[prost(string, tag = "3")]
    pub hint: String,
    /// The orders that were given, or would be.
    #[prost(message, repeated, tag = "4")]
    pub moves: Vec<PlannedMove>,
    #[prost(message, repeated, tag = "5")]
    pub placements: Vec<PlacementRow>,
    /// There are more rows, after the last one here.
    #[prost(bool, tag = "6")]
    pub more: bool,
    #[prost(message, optional, tag = "7")]
    pub outcome: Option<OrderOutcome>,
}

/// An operator's order, as far as it is known.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct OrderOutcome {
    /// It is over; until then the rest means nothing.
    #[prost(bool, tag = "1")]
    pub ended: bool,
    /// Blocks that it was for, and that moved.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
    #[prost(uint32, tag = "3")]
    pub moved: u32,
    /// Why not all of them moved.
    #[prost(string, tag = "4")]
    pub reason: String,
}

/// One order of the planner or an operator.
#[derive(Clone, PartialEq, Message)]
pub struct PlannedMove {
    #[prost(uint64, tag = "1")]
    pub order: u64,
    #[prost(uint32, tag = "2")]
    pub debtor: u32,
    #[prost(uint64, tag = "3")]
    pub seq: u64,
    #[prost(uint32, tag = "4")]
    pub blocks: u32,
    #[prost(uint32, tag = "5")]
    pub source: u32,
    #[prost(uint32, tag = "6")]
    pub target: u32,
    /// Expected change of the pool's throughput, in tokens per second.
    #[prost(double, tag = "7")]
    pub gain_tokens_per_s: f64,
}

/// One row of the request placement map.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PlacementRow {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(message, optional, tag = "2")]
    pub entry: Option<PlacementEntry>,
}
