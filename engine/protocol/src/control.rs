//! Control messages: membership, the contract protocol (Infinite-LLM v1 §4.4) and leases; those of planning and
//! movement are in [`crate::placement`], those of disaggregated serving in [`crate::prefill`], those of KV transfer in
//! [`crate::transfer`]. Evolvable: fields are tagged,
//! unknown ones are skipped, a body that this build does not know decodes as `None`.

use crate::placement::{
    AdminQuery, AdminReply, Calibration, DrainOrder, Fenced, Freeze, Frozen, LeaseRevoked, LeaseSealed, Load,
    MoveKvCache, MoveOutcome, NotLeader, PlacementEntry, Recall, Thaw,
};
use crate::prefill::{
    PrefillCancel, PrefillReady, PrefillRefused, PrefillRenew, PrefillRenewed, PrefillRequest, RoleOrder, Workers,
};
use crate::transfer::{
    TransferArena, TransferComplete, TransferCompleted, TransferConnect, TransferConnected, TransferExport,
    TransferRefused, TransferRenew, TransferRenewed,
};

use prost::{Enumeration, Message, Oneof};

/// The envelope of every control message.
#[derive(Clone, PartialEq, Message)]
pub struct Control {
    #[prost(
        oneof = "ControlBody",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, \
                28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48"
    )]
    pub body: Option<ControlBody>,
}

impl From<ControlBody> for Control {
    fn from(body: ControlBody) -> Self {
        Self { body: Some(body) }
    }
}

#[derive(Clone, PartialEq, Oneof)]
pub enum ControlBody {
    // Instance and gManager.
    #[prost(message, tag = "1")]
    Register(Register),
    #[prost(message, tag = "2")]
    Registered(Registered),
    #[prost(message, tag = "3")]
    Rejected(Rejected),
    #[prost(message, tag = "4")]
    Heartbeat(Heartbeat),
    #[prost(message, tag = "5")]
    BorrowQuery(BorrowQuery),
    #[prost(message, tag = "6")]
    BorrowAdvice(BorrowAdvice),
    #[prost(message, tag = "7")]
    Refusal(Refusal),
    #[prost(message, tag = "8")]
    Deregister(Deregister),
    #[prost(message, tag = "9")]
    StatusQuery(StatusQuery),
    #[prost(message, tag = "10")]
    StatusReply(StatusReply),
    #[prost(message, tag = "11")]
    HeartbeatAck(HeartbeatAck),
    // Between instances.
    #[prost(message, tag = "12")]
    Hello(Hello),
    #[prost(message, tag = "13")]
    LeaseRequest(LeaseRequest),
    #[prost(message, tag = "14")]
    LeaseGrant(LeaseGrant),
    #[prost(message, tag = "15")]
    LeaseRefuse(LeaseRefuse),
    #[prost(message, tag = "16")]
    LeaseRelease(LeaseRelease),
    #[prost(message, tag = "17")]
    LeaseReleased(LeaseReleased),
    #[prost(message, tag = "18")]
    LeaseRenew(LeaseRenew),
    #[prost(message, tag = "19")]
    LeaseRenewed(LeaseRenewed),
    #[prost(message, tag = "20")]
    LeaseSealed(LeaseSealed),
    #[prost(message, tag = "21")]
    Recall(Recall),
    #[prost(message, tag = "22")]
    LeaseRevoked(LeaseRevoked),
    // Placement (Infinite-LLM v2 §6) and DGFM (v1 §4.5): gManager and instance.
    #[prost(message, tag = "23")]
    MoveKvCache(MoveKvCache),
    #[prost(message, tag = "24")]
    MoveOutcome(MoveOutcome),
    #[prost(message, tag = "25")]
    Freeze(Freeze),
    #[prost(message, tag = "26")]
    Frozen(Frozen),
    #[prost(message, tag = "27")]
    Thaw(Thaw),
    #[prost(message, tag = "28")]
    Fenced(Fenced),
    #[prost(message, tag = "29")]
    DrainOrder(DrainOrder),
    #[prost(message, tag = "30")]
    NotLeader(NotLeader),
    // Operators and gManager.
    #[prost(message, tag = "31")]
    AdminQuery(AdminQuery),
    #[prost(message, tag = "32")]
    AdminReply(AdminReply),
    // KV transfer (KVDirect §4): decode and prefill worker.
    #[prost(message, tag = "33")]
    TransferConnect(TransferConnect),
    #[prost(message, tag = "34")]
    TransferConnected(TransferConnected),
    #[prost(message, tag = "35")]
    TransferRefused(TransferRefused),
    #[prost(message, tag = "36")]
    TransferExport(TransferExport),
    #[prost(message, tag = "37")]
    TransferRenew(TransferRenew),
    #[prost(message, tag = "38")]
    TransferRenewed(TransferRenewed),
    #[prost(message, tag = "39")]
    TransferComplete(TransferComplete),
    #[prost(message, tag = "40")]
    TransferCompleted(TransferCompleted),
    // Disaggregated serving: gManager and decode worker, decode and prefill worker.
    #[prost(message, tag = "41")]
    Workers(Workers),
    #[prost(message, tag = "42")]
    PrefillRequest(PrefillRequest),
    #[prost(message, tag = "43")]
    PrefillReady(PrefillReady),
    #[prost(message, tag = "44")]
    PrefillRefused(PrefillRefused),
    #[prost(message, tag = "45")]
    PrefillRenew(PrefillRenew),
    #[prost(message, tag = "46")]
    PrefillRenewed(PrefillRenewed),
    #[prost(message, tag = "47")]
    PrefillCancel(PrefillCancel),
    #[prost(message, tag = "48")]
    RoleOrder(RoleOrder),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Role {
    /// Runs requests, prompts and answers, and lends (`--role both`).
    Instance = 0,
    /// Lends memory and micro attention only (`--role kv`).
    Kv = 1,
    /// Computes prompts for decode workers; takes no requests of clients. Lends, too.
    Prefill = 2,
    /// Takes requests and has their prompts computed by prefill workers. Lends, too.
    Decode = 3,
}

impl Role {
    /// Whether it has weights and runs sequences.
    #[must_use]
    pub fn runs(self) -> bool {
        self != Self::Kv
    }

    /// Whether clients' requests are for it.
    #[must_use]
    pub fn serves(self) -> bool {
        matches!(self, Self::Instance | Self::Decode)
    }

    /// Whether it computes prompts for decode workers.
    #[must_use]
    pub fn prefills(self) -> bool {
        matches!(self, Self::Instance | Self::Prefill)
    }
}

/// What must be equal for two instances to share KV.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PoolShape {
    /// 32 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub model_hash: Vec<u8>,
    #[prost(uint32, tag = "2")]
    pub layers: u32,
    #[prost(uint32, tag = "3")]
    pub heads: u32,
    #[prost(uint32, tag = "4")]
    pub kv_heads: u32,
    #[prost(uint32, tag = "5")]
    pub head_dim: u32,
    /// `DType::code` of the KV.
    #[prost(uint32, tag = "6")]
    pub kv_dtype: u32,
    #[prost(uint32, tag = "7")]
    pub block_tokens: u32,
    /// Sliding window in tokens; 0 is none.
    #[prost(uint32, tag = "8")]
    pub window: u32,
    /// `Alibi::bias_max` as the bits of an f32; 0 where attention has no biases by distance.
    #[prost(fixed32, tag = "9")]
    pub alibi_bias_max: u32,
}

/// First message to the gManager on a control connection.
#[derive(Clone, PartialEq, Message)]
pub struct Register {
    #[prost(uint32, tag = "1")]
    pub version_min: u32,
    #[prost(uint32, tag = "2")]
    pub version_max: u32,
    /// For people.
    #[prost(string, tag = "3")]
    pub name: String,
    /// `ip:port` of the instance's QUIC endpoint, as peers reach it.
    #[prost(string, tag = "4")]
    pub quic_addr: String,
    /// `ip:port` of its HTTP server; empty when it has none.
    #[prost(string, tag = "5")]
    pub http_addr: String,
    #[prost(enumeration = "Role", tag = "6")]
    pub role: i32,
    /// Random per process.
    #[prost(fixed64, tag = "7")]
    pub incarnation: u64,
    #[prost(message, optional, tag = "8")]
    pub shape: Option<PoolShape>,
    #[prost(uint32, tag = "9")]
    pub blocks_total: u32,
    /// `cpu`, `wgpu` or `cuda`, for people.
    #[prost(string, tag = "10")]
    pub backend: String,
    /// The number that an earlier gManager gave, 0 if none: a reconnecting instance keeps it.
    #[prost(uint32, tag = "11")]
    pub instance: u32,
    /// What it measured of itself at start; absent on nodes that run no requests or measured nothing.
    #[prost(message, optional, tag = "12")]
    pub calibration: Option<Calibration>,
    /// Where its rBlocks are.
    #[prost(enumeration = "MemoryTier", tag = "13")]
    pub tier: i32,
    /// rBlocks that it lends at most; all of them if absent.
    #[prost(uint32, optional, tag = "14")]
    pub lend_blocks_max: Option<u32>,
}

/// Which memory an instance's rBlocks are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum MemoryTier {
    /// Of the device that computes attention there.
    Device = 0,
    /// Of the host: large and slow; micro attention runs on the host's processor.
    Host = 1,
}

/// The registration is accepted.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Registered {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    #[prost(uint32, tag = "2")]
    pub instance: u32,
    #[prost(uint64, tag = "3")]
    pub heartbeat_ms: u64,
    /// Which gManager this is: a larger term is a later one. A full heartbeat follows a change.
    #[prost(uint64, tag = "4")]
    pub term: u64,
}

/// The registration, or a peer's Hello, is refused; the connection closes after it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Rejected {
    /// For people: names the two values that differ.
    #[prost(string, tag = "1")]
    pub reason: String,
}

/// One debtor of the sender, in the debt ledger.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Debt {
    #[prost(uint32, tag = "1")]
    pub debtor: u32,
    /// rBlocks lent to it.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Heartbeat {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(fixed64, tag = "2")]
    pub incarnation: u64,
    /// Increases with every heartbeat of an incarnation; stale ones are ignored.
    #[prost(uint64, tag = "3")]
    pub seq: u64,
    #[prost(uint32, tag = "4")]
    pub blocks_total: u32,
    /// Free blocks, lendable or not.
    #[prost(uint32, tag = "5")]
    pub blocks_free: u32,
    /// Blocks that it would lend now.
    #[prost(uint32, tag = "6")]
    pub blocks_lendable: u32,
    /// What it has lent, by debtor.
    #[prost(message, repeated, tag = "7")]
    pub lent: Vec<Debt>,
    #[prost(uint32, tag = "8")]
    pub blocks_borrowed: u32,
    #[prost(uint32, tag = "9")]
    pub requests_running: u32,
    #[prost(uint32, tag = "10")]
    pub requests_waiting: u32,
    /// Round trips measured to peers, in microseconds, for locality.
    #[prost(message, repeated, tag = "11")]
    pub links: Vec<Link>,
    /// Rows of the request placement map that changed since the last heartbeat that was acknowledged (v2 §6.2), or
    /// every row if `placements_full`.
    #[prost(message, repeated, tag = "12")]
    pub placements: Vec<PlacementEntry>,
    #[prost(bool, tag = "13")]
    pub placements_full: bool,
    /// What the planner's model needs of its batch and queue; absent on nodes that run no requests.
    #[prost(message, optional, tag = "14")]
    pub load: Option<Load>,
    /// It takes no new requests and lends no more: its blocks are leaving (`lagoon drain`).
    #[prost(bool, tag = "15")]
    pub draining: bool,
    /// The DGFM cycle that it is frozen for; 0 if none.
    #[prost(uint64, tag = "16")]
    pub frozen: u64,
    /// For operators.
    #[prost(message, optional, boxed, tag = "17")]
    pub moves: Option<Box<MoveCounts>>,
    /// `Workers::version` of the list that it knows; 0 if none.
    #[prost(fixed64, tag = "18")]
    pub workers: u64,
    /// For operators; of prefill and decode workers.
    #[prost(message, optional, boxed, tag = "20")]
    pub prefill: Option<Box<PrefillCounts>>,
    /// Its role now; absent where it cannot become another one than it registered with.
    #[prost(message, optional, boxed, tag = "21")]
    pub role: Option<Box<RoleState>>,
}

/// The role of an instance whose role may change.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct RoleState {
    #[prost(enumeration = "Role", tag = "1")]
    pub now: i32,
    /// The role that it changes to, while it finishes what only the old one does; absent if it does not.
    #[prost(enumeration = "Role", optional, tag = "2")]
    pub becoming: Option<i32>,
    /// `RoleOrder::number` of the last order that it heard; 0 if none.
    #[prost(uint64, tag = "3")]
    pub heard: u64,
}

/// What came of prefills elsewhere and for others since an instance's process started, and what is in progress.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct PrefillCounts {
    /// Prefill workers whose KV this instance can read.
    #[prost(uint32, tag = "1")]
    pub workers: u32,
    /// Own requests whose prompts are computed elsewhere or wait to be read.
    #[prost(uint32, tag = "2")]
    pub away: u32,
    /// Prompts that are computed for others.
    #[prost(uint32, tag = "3")]
    pub jobs: u32,
    /// Tokens of these that are not computed yet.
    #[prost(uint64, tag = "4")]
    pub queued_tokens: u64,
    #[prost(uint64, tag = "5")]
    pub jobs_done: u64,
    /// Own prompts that workers computed and that were read, and those that none took.
    #[prost(uint64, tag = "6")]
    pub pulled: u64,
    #[prost(uint64, tag = "7")]
    pub own: u64,
    /// Bytes of KV that were read, and the time in which any was, in microseconds.
    #[prost(uint64, tag = "8")]
    pub bytes: u64,
    #[prost(uint64, tag = "9")]
    pub reading_us: u64,
    /// Reads before merging, transactions after.
    #[prost(uint64, tag = "10")]
    pub reads: u64,
    #[prost(uint64, tag = "11")]
    pub transactions: u64,
    /// Sums over the requests that were read, in milliseconds (KVDirect Fig. 14).
    #[prost(uint64, tag = "12")]
    pub queue_ms: u64,
    #[prost(uint64, tag = "13")]
    pub prefill_ms: u64,
    #[prost(uint64, tag = "14")]
    pub decode_queue_ms: u64,
    #[prost(uint64, tag = "15")]
    pub transfer_ms: u64,
    /// The same, over those of them that have ended well: `decoded`.
    #[prost(uint64, tag = "16")]
    pub decode_ms: u64,
    #[prost(uint64, tag = "17")]
    pub decoded: u64,
    /// Own requests whose prompts nobody computes (any more), and that wait for memory or a place in the batch here.
    #[prost(uint32, tag = "18")]
    pub waiting: u32,
}

/// What moved for an instance's requests since its process started.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct MoveCounts {
    /// Moves in flight.
    #[prost(uint32, tag = "1")]
    pub in_progress: u32,
    /// Blocks that went to a creditor.
    #[prost(uint64, tag = "2")]
    pub blocks_out: u64,
    /// Blocks that came home.
    #[prost(uint64, tag = "3")]
    pub blocks_home: u64,
    /// Blocks that went from one creditor to another.
    #[prost(uint64, tag = "4")]
    pub blocks_between: u64,
}

/// A measured link to a peer.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Link {
    #[prost(uint32, tag = "1")]
    pub peer: u32,
    #[prost(uint32, tag = "2")]
    pub rtt_us: u32,
    /// Bulk rate, measured on transfers; 0 if none was measured yet.
    #[prost(uint64, tag = "3")]
    pub bytes_per_s: u64,
    /// The sender has mapped the peer's lent memory (peer access): it attends to what it borrows there itself.
    #[prost(bool, tag = "4")]
    pub mapped: bool,
}

/// Tells the sender whether the gManager knows it; if not, it registers again.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HeartbeatAck {
    #[prost(bool, tag = "1")]
    pub known: bool,
    /// The sender's blocks and what all other live instances may ever lend: the largest request that it could ever hold.
    #[prost(uint64, tag = "2")]
    pub pool_blocks_total: u64,
    /// The gManager lacks rows: the next heartbeat carries all of them.
    #[prost(bool, tag = "3")]
    pub placements_wanted: bool,
    /// The sender was declared dead: what it lent is written off. It forgets all leases, draws a new incarnation and
    /// registers again.
    #[prost(bool, tag = "4")]
    pub fenced: bool,
    /// As in `Registered`.
    #[prost(uint64, tag = "5")]
    pub term: u64,
    /// Acknowledges the rows of this heartbeat.
    #[prost(uint64, tag = "6")]
    pub seq: u64,
    /// The receiver keeps its memory for this request.
    #[prost(message, optional, tag = "7")]
    pub oldest_waiting: Option<OldestWaiting>,
}

/// A request that only the pool can hold and that has waited for long. Whoever is told of it admits nothing younger and
/// lends to nothing younger but what runs, until it is told otherwise or for `lagoon_types::limits::OLDEST_WAITING_HOLD_MS`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct OldestWaiting {
    /// The instance at which it waits.
    #[prost(uint32, tag = "1")]
    pub debtor: u32,
    /// How long ago it came, in milliseconds.
    #[prost(uint32, tag = "2")]
    pub waits_ms: u32,
}

/// A debtor is short of blocks.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct BorrowQuery {
    #[prost(uint64, tag = "1")]
    pub query: u64,
    #[prost(uint32, tag = "2")]
    pub debtor: u32,
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// Creditors that refused in this negotiation.
    #[prost(uint32, repeated, tag = "4")]
    pub exclude: Vec<u32>,
    #[prost(enumeration = "TierRequest", tag = "5")]
    pub tier: i32,
}

/// Which creditors a debtor wants named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum TierRequest {
    /// Device memory first, then host memory.
    Any = 0,
    DeviceOnly = 1,
    /// To swap out a sequence that is taken out of the batch.
    HostOnly = 2,
}

/// A creditor that may lend.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Candidate {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(string, tag = "2")]
    pub quic_addr: String,
    #[prost(uint32, tag = "3")]
    pub blocks_lendable: u32,
}

/// At most three candidates, best first; the debtor tries them in order.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct BorrowAdvice {
    #[prost(uint64, tag = "1")]
    pub query: u64,
    #[prost(message, repeated, tag = "2")]
    pub candidates: Vec<Candidate>,
    /// As in `HeartbeatAck`.
    #[prost(uint64, tag = "3")]
    pub pool_blocks_total: u64,
    /// Lendable blocks of all live instances but the debtor.
    #[prost(uint64, tag = "4")]
    pub pool_blocks_lendable: u64,
}

/// A debtor tells the gManager that a creditor refused: the ledger is corrected and the creditor is not recommended
/// until its next heartbeat.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Refusal {
    #[prost(uint32, tag = "1")]
    pub creditor: u32,
    #[prost(uint32, tag = "2")]
    pub blocks_lendable: u32,
}

/// The instance leaves in order.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Deregister {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusQuery {
    #[prost(uint64, tag = "1")]
    pub query: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct StatusReply {
    #[prost(uint64, tag = "1")]
    pub query: u64,
    #[prost(message, repeated, tag = "2")]
    pub instances: Vec<InstanceStatus>,
    /// Of the gManager that answers; as in `Registered`.
    #[prost(uint64, tag = "3")]
    pub term: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct InstanceStatus {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub quic_addr: String,
    #[prost(string, tag = "4")]
    pub http_addr: String,
    #[prost(enumeration = "Role", tag = "5")]
    pub role: i32,
    #[prost(string, tag = "6")]
    pub backend: String,
    #[prost(message, optional, tag = "7")]
    pub heartbeat: Option<Heartbeat>,
    /// Milliseconds since that heartbeat.
    #[prost(uint64, tag = "8")]
    pub heartbeat_age_ms: u64,
    #[prost(bool, tag = "9")]
    pub alive: bool,
    #[prost(enumeration = "MemoryTier", tag = "10")]
    pub tier: i32,
    #[prost(message, optional, tag = "11")]
    pub calibration: Option<Calibration>,
    /// As in `Register`.
    #[prost(uint32, optional, tag = "12")]
    pub lend_blocks_max: Option<u32>,
}

/// First message between instances on each connection, both ways.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Hello {
    #[prost(uint32, tag = "1")]
    pub version_min: u32,
    #[prost(uint32, tag = "2")]
    pub version_max: u32,
    #[prost(uint32, tag = "3")]
    pub instance: u32,
    #[prost(fixed64, tag = "4")]
    pub incarnation: u64,
    #[prost(message, optional, tag = "5")]
    pub shape: Option<PoolShape>,
    /// Where it lends device memory that debtors may map.
    #[prost(message, optional, tag = "6")]
    pub lent: Option<LentMemory>,
}

/// A creditor's KV store in memory of its device that peers on its host may map, to attend to it where it lies: all layers of
/// all its rBlocks, then a word for each rBlock.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LentMemory {
    #[prost(message, optional, tag = "1")]
    pub memory: Option<TransferArena>,
    /// As [`TransferConnect::host`](crate::TransferConnect::host).
    #[prost(string, tag = "2")]
    pub host: String,
    /// rBlocks of the store.
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
}

/// A debtor asks for blocks for one sequence. First come, first served.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRequest {
    /// The debtor's number for this request; echoed.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// Grant fewer rather than refuse, but at least this many.
    #[prost(uint32, tag = "4")]
    pub blocks_min: u32,
    #[prost(enumeration = "LeasePurpose", tag = "5")]
    pub purpose: i32,
    /// The sequence does not run yet, and came so long ago: it gets nothing that an older one waits for at the creditor.
    /// None: it runs.
    #[prost(uint32, optional, tag = "6")]
    pub waited_ms: Option<u32>,
}

/// What a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum LeasePurpose {
    /// A prompt or a growing sequence: written by steps.
    Growth = 0,
    /// `try_move_kvcache` (v2 §6.2): a reservation that expires soon unless it is written; sealed entries are
    /// acknowledged with `LeaseSealed`.
    Move = 1,
    /// As `Move`, for a swap around a frozen cycle: the reserve that is never lent may be used.
    Swap = 2,
    /// KV that a prefill worker computed for the debtor. It is never asked for: it comes with `PrefillReady`.
    Handover = 3,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseGrant {
    #[prost(uint64, tag = "1")]
    pub request: u64,
    #[prost(uint64, tag = "2")]
    pub lease: u64,
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// Number of entries.
    #[prost(uint32, tag = "4")]
    pub blocks: u32,
    #[prost(uint64, tag = "5")]
    pub ttl_ms: u64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRefuse {
    #[prost(uint64, tag = "1")]
    pub request: u64,
    #[prost(uint32, tag = "2")]
    pub blocks_lendable: u32,
    #[prost(string, tag = "3")]
    pub reason: String,
}

/// The debtor gives entries back. Idempotent.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRelease {
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// End of the entries to free: those from `first` on, below it.
    #[prost(uint32, tag = "3")]
    pub entries: u32,
    /// First entry to free. 0 for leading ones (a sliding window moved past them) and for the whole lease.
    #[prost(uint32, tag = "4")]
    pub first: u32,
}

/// The release has happened; the debtor stops repeating it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseReleased {
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    #[prost(uint32, tag = "2")]
    pub entries: u32,
    #[prost(uint32, tag = "3")]
    pub first: u32,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRenew {
    #[prost(uint64, repeated, tag = "1")]
    pub leases: Vec<u64>,
    /// Which renewal it is, from 1 on; its answer says the same.
    #[prost(uint64, tag = "2")]
    pub seq: u64,
}

/// Which of the renewed leases the creditor does not have (any more): their KV is lost.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRenewed {
    #[prost(uint64, repeated, tag = "1")]
    pub unknown: Vec<u64>,
    /// The renewal that it answers.
    #[prost(uint64, tag = "2")]
    pub seq: u64,
}
