//! Control messages of planning and movement: the request placement map and `move_kvcache` (Infinite-LLM v2 §6),
//! recall by the creditor, DGFM (v1 §4.5), fencing, drain, and operators' requests to the gManager.
//!
//! A request's identity in the pool is its debtor's number and its sequence number there.

use crate::prefix::{AdminCacheDrop, CacheDropped};
use crate::role::Role;
use prost::{Enumeration, Message, Oneof};

/// Row of the request placement map: rBlocks of one request on the sender of the heartbeat. Local if `debtor` is the
/// sender. `RequestPlacementEntry` of v2 Listing 1.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PlacementEntry {
    #[prost(uint32, tag = "1")]
    pub debtor: u32,
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    /// rBlocks; 0 deletes the row.
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// Of these, sealed blocks (full in every layer), which can move.
    #[prost(uint32, tag = "4")]
    pub blocks_sealed: u32,
}

/// Calibration: an instance's measured times, f and g of the performance model (v2 Eq. 5).
#[derive(Clone, PartialEq, Message)]
pub struct Calibration {
    /// Step times without attention, ascending by batch size.
    #[prost(message, repeated, tag = "1")]
    pub batches: Vec<BatchPoint>,
    /// Time of decode attention over 1,024 tokens of one sequence, all layers, in microseconds.
    #[prost(double, tag = "2")]
    pub attention_us_per_ktoken: f64,
    /// Prefill time per token, in microseconds, at a chunk of the usual size.
    #[prost(double, tag = "3")]
    pub prefill_us_per_token: f64,
    /// Rate of KV copies out of and into the store, in bytes per second.
    #[prost(double, tag = "4")]
    pub copy_bytes_per_s: f64,
    /// Time of a prompt row's attention over 1,024 tokens in a chunk of the usual size, all layers, in microseconds; 0 if not measured.
    #[prost(double, tag = "5")]
    pub prompt_attention_us_per_ktoken: f64,
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

/// Load of an instance for the planner: its batch and queue.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Load {
    /// Sequences that decode.
    #[prost(uint32, tag = "1")]
    pub batch: u32,
    /// Tokens that those sequences attend to, local and remote.
    #[prost(uint64, tag = "2")]
    pub context_tokens: u64,
    /// Of `context_tokens`, tokens on creditors.
    #[prost(uint64, tag = "3")]
    pub remote_tokens: u64,
    /// Tokens that the instance holds for its debtors.
    #[prost(uint64, tag = "4")]
    pub remote_request_tokens: u64,
    /// rBlocks that each of the first waiting requests needs, oldest first; at most
    /// `lagoon_types::limits::LOAD_QUEUE_MAX`.
    #[prost(uint32, repeated, tag = "5")]
    pub queue_blocks: Vec<u32>,
    /// Largest batch of the instance.
    #[prost(uint32, tag = "6")]
    pub batch_max: u32,
    /// Mean time of the last steps, prompts' chunks included, in microseconds; 0 if there was none.
    #[prost(uint32, tag = "7")]
    pub step_us: u32,
    /// Age of the first waiting request, in milliseconds, if it needs more blocks than the instance has; else 0.
    #[prost(uint32, tag = "8")]
    pub head_waits_ms: u32,
    /// Tokens of prompts that it computes itself and whose KV is missing, of running and waiting requests; absent in heartbeats of
    /// older versions.
    #[prost(uint64, optional, tag = "9")]
    pub prefill_tokens: Option<u64>,
    /// Tokens that running and waiting requests may still generate, by their own limits; absent as above.
    #[prost(uint64, optional, tag = "10")]
    pub answer_tokens_max: Option<u64>,
}

/// Reason of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum MoveReason {
    /// The planner expects more throughput.
    Plan = 0,
    /// The source is being drained.
    Drain = 1,
    /// An operator asked.
    Operator = 2,
    /// A swap around a frozen cycle (DGFM).
    Swap = 3,
}

/// Order of the gManager to a debtor to move `blocks` rBlocks of `seq` from `source` to `target`, either of which may be
/// the debtor. The debtor reserves memory at the target before any byte moves, and replies once with [`MoveOutcome`].
/// `move_kvcache(req, blocks, dst)` of v2 Listing 1.
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
    /// Deadline of the order, in milliseconds from receipt.
    #[prost(uint32, tag = "8")]
    pub deadline_ms: u32,
    /// DGFM cycle of a swap; 0 otherwise.
    #[prost(uint64, tag = "9")]
    pub cycle: u64,
    /// First logical block to move: the first movable ones from it on move. Without it the debtor chooses.
    #[prost(uint32, optional, tag = "10")]
    pub first: Option<u32>,
}

/// Outcome of a [`MoveKvCache`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct MoveOutcome {
    #[prost(uint64, tag = "1")]
    pub order: u64,
    /// Blocks that were moved to the target.
    #[prost(uint32, tag = "2")]
    pub moved: u32,
    /// Reason why not all blocks moved; empty if all did.
    #[prost(string, tag = "3")]
    pub reason: String,
    /// Lendable blocks of the target as it reported them, if it refused.
    #[prost(uint32, optional, tag = "4")]
    pub target_lendable: Option<u32>,
}

/// Notice of a creditor that entries of a lease are sealed: their content matched its hash. The debtor may switch to entries
/// of a [`crate::LeasePurpose::Move`], and attend directly to any in mapped creditor KV ([`crate::LentMemory`]).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseSealed {
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Ascending.
    #[prost(uint32, repeated, tag = "3")]
    pub entries: Vec<u32>,
    /// rBlock of each entry in the creditor's [`crate::LentMemory`]; empty without such memory.
    #[prost(uint32, repeated, tag = "4")]
    pub blocks: Vec<u32>,
}

/// Recall of lent memory, creditor to debtor: the debtor moves the blocks home or to another creditor and releases them.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Recall {
    #[prost(uint64, tag = "1")]
    pub recall: u64,
    /// rBlocks to return, from any of the debtor's leases.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
    /// Milliseconds from receipt after which the creditor revokes them: see [`LeaseRevoked`].
    #[prost(uint32, tag = "3")]
    pub deadline_ms: u32,
    /// Pause before the debtor may borrow from this creditor again, in milliseconds.
    #[prost(uint32, tag = "4")]
    pub pause_ms: u32,
}

/// Notice of a creditor that it has freed entries of a lease after an unmet recall: their KV is lost.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRevoked {
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    #[prost(string, tag = "2")]
    pub reason: String,
    /// First freed entry.
    #[prost(uint32, tag = "3")]
    pub first: u32,
    /// End (exclusive) of the freed entries; 0 for the whole lease.
    #[prost(uint32, tag = "4")]
    pub entries: u32,
}

/// DGFM freeze of a debt of `blocks` to `creditor` in a cycle of debts. Until the thaw or `ttl_ms`, the receiver keeps at
/// least that many blocks there (no release, no other move; cancellations wait), and replies with [`Frozen`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Freeze {
    #[prost(uint64, tag = "1")]
    pub cycle: u64,
    #[prost(uint32, tag = "2")]
    pub creditor: u32,
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// Milliseconds from receipt after which the freeze ends by itself.
    #[prost(uint32, tag = "4")]
    pub ttl_ms: u32,
}

/// Reply to [`Freeze`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Frozen {
    #[prost(uint64, tag = "1")]
    pub cycle: u64,
    /// Frozen blocks; 0 is a refusal.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
    /// Free blocks of the sender, reserve included, with which a swap may start.
    #[prost(uint32, tag = "3")]
    pub free: u32,
    /// The sequence whose blocks are frozen.
    #[prost(uint64, tag = "4")]
    pub seq: u64,
}

/// End of a [`Freeze`], whether the swap succeeded or not.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Thaw {
    #[prost(uint64, tag = "1")]
    pub cycle: u64,
}

/// Fence of an instance that was declared dead, gManager to all others: KV lent by it is lost, its debts are freed.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Fenced {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(fixed64, tag = "2")]
    pub incarnation: u64,
}

/// Order of the gManager to an instance to start or end a drain.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DrainOrder {
    #[prost(bool, tag = "1")]
    pub on: bool,
    /// Stop the process when no block is left there.
    #[prost(bool, tag = "2")]
    pub stop: bool,
}

/// Reply of a standby gManager.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct NotLeader {
    /// `ip:port` of the leader; empty if unknown.
    #[prost(string, tag = "1")]
    pub leader_addr: String,
}

/// Request of an operator to the gManager.
#[derive(Clone, PartialEq, Message)]
pub struct AdminQuery {
    #[prost(uint64, tag = "1")]
    pub query: u64,
    #[prost(oneof = "AdminBody", tags = "2, 3, 4, 5, 6, 7, 8")]
    pub body: Option<AdminBody>,
}

/// Body of an [`AdminQuery`]: what the operator asks for.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum AdminBody {
    /// Starts or ends a drain.
    #[prost(message, tag = "2")]
    Drain(AdminDrain),
    /// Orders a move.
    #[prost(message, tag = "3")]
    Move(AdminMove),
    /// Reads the request placement map.
    #[prost(message, tag = "4")]
    Placements(AdminPlacements),
    /// Returns the planner's next orders without sending them.
    #[prost(message, tag = "5")]
    Plan(AdminPlan),
    /// Returns the outcome of an operator's order.
    #[prost(message, tag = "6")]
    Order(AdminOrder),
    /// Orders a change of role.
    #[prost(message, tag = "7")]
    Role(AdminRole),
    /// Empties prefix caches.
    #[prost(message, tag = "8")]
    CacheDrop(AdminCacheDrop),
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

/// Changes the role of one instance (`lagoon role`).
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
    /// rBlocks to move; 0: all.
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// Source instance; 0: the one, except the target, with most of them.
    #[prost(uint32, tag = "4")]
    pub source: u32,
    /// Target instance; 0: the debtor itself (a recall).
    #[prost(uint32, tag = "5")]
    pub target: u32,
    #[prost(bool, tag = "6")]
    pub dry_run: bool,
    /// First logical block, as [`MoveKvCache::first`].
    #[prost(uint32, optional, tag = "7")]
    pub first: Option<u32>,
}

/// Query for rows of the request placement map, ascending by instance, debtor and sequence, in bounded pages.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminPlacements {
    /// Debtor to list; 0: all.
    #[prost(uint32, tag = "1")]
    pub debtor: u32,
    /// Sequence to list; absent: all.
    #[prost(uint64, optional, tag = "2")]
    pub seq: Option<u64>,
    /// Last row of the previous page (instance, debtor, sequence); 0: from the first row.
    #[prost(uint32, tag = "3")]
    pub after_instance: u32,
    #[prost(uint32, tag = "4")]
    pub after_debtor: u32,
    #[prost(uint64, tag = "5")]
    pub after_seq: u64,
}

/// Query for the outcome of an operator's order. The gManager keeps the last `ADMIN_ORDERS_MAX` of its term.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminOrder {
    #[prost(uint64, tag = "1")]
    pub order: u64,
}

/// Query for the planner's next orders; nothing is ordered.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminPlan {}

/// Reply to [`AdminQuery`]. Poll the outcome of an order with [`AdminOrder`].
#[derive(Clone, PartialEq, Message)]
pub struct AdminReply {
    #[prost(uint64, tag = "1")]
    pub query: u64,
    /// Error text; empty on success.
    #[prost(string, tag = "2")]
    pub error: String,
    /// Hint on how to resolve the error.
    #[prost(string, tag = "3")]
    pub hint: String,
    /// Orders that were sent, or would be.
    #[prost(message, repeated, tag = "4")]
    pub moves: Vec<PlannedMove>,
    #[prost(message, repeated, tag = "5")]
    pub placements: Vec<PlacementRow>,
    /// Whether more rows follow the last one here.
    #[prost(bool, tag = "6")]
    pub more: bool,
    #[prost(message, optional, tag = "7")]
    pub outcome: Option<OrderOutcome>,
    #[prost(message, optional, tag = "8")]
    pub dropped: Option<CacheDropped>,
}

/// State of an operator's order.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct OrderOutcome {
    /// Whether the order has ended; the other fields are valid only then.
    #[prost(bool, tag = "1")]
    pub ended: bool,
    /// Blocks ordered (`blocks`) and moved (`moved`).
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
    #[prost(uint32, tag = "3")]
    pub moved: u32,
    /// Reason why not all blocks moved.
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
