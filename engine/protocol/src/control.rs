//! Control messages: membership, the contract protocol (Infinite-LLM v1 §4.4) and leases. Heartbeats are in
//! [`crate::heartbeat`], messages of planning and movement in [`crate::placement`], of the prefix cache in [`crate::prefix`],
//! of disaggregated serving in [`crate::prefill`], of KV transfer in [`crate::transfer`]. Evolvable: fields are tagged, unknown fields are skipped, an unknown body decodes as `None`.

use crate::heartbeat::{Heartbeat, HeartbeatAck};
use crate::joint::Joint;
use crate::placement::{
    AdminQuery, AdminReply, Calibration, DrainOrder, Fenced, Freeze, Frozen, LeaseRevoked, LeaseSealed, MoveKvCache,
    MoveOutcome, NotLeader, Recall, Thaw,
};
use crate::prefill::{
    PrefillCancel, PrefillReady, PrefillRefused, PrefillRenew, PrefillRenewed, PrefillRequest, RoleOrder, Workers,
};
use crate::prefix::{CacheDrop, CachedRun, LeaseHashes, PrefixesKnown, PrefixesPlaced};
use crate::relay::RelayMembers;
use crate::role::Role;
use crate::transfer::{
    TransferArena, TransferComplete, TransferCompleted, TransferConnect, TransferConnected, TransferExport,
    TransferRefused, TransferRenew, TransferRenewed,
};

use prost::{Enumeration, Message, Oneof};

/// Envelope of every control message.
#[derive(Clone, PartialEq, Message)]
pub struct Control {
    #[prost(
        oneof = "ControlBody",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, \
                28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52"
    )]
    pub body: Option<ControlBody>,
}

impl From<ControlBody> for Control {
    fn from(body: ControlBody) -> Self {
        Self { body: Some(body) }
    }
}

/// Body of a control message: one variant a message, whose type says what it is. A tag is never used again for another.
#[derive(Clone, PartialEq, Oneof)]
pub enum ControlBody {
    // Instance and gManager.
    #[prost(message, boxed, tag = "1")]
    Register(Box<Register>),
    #[prost(message, tag = "2")]
    Registered(Registered),
    #[prost(message, tag = "3")]
    Rejected(Rejected),
    #[prost(message, boxed, tag = "4")]
    Heartbeat(Box<Heartbeat>),
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
    #[prost(message, boxed, tag = "12")]
    Hello(Box<Hello>),
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
    #[prost(message, boxed, tag = "32")]
    AdminReply(Box<AdminReply>),
    // KV transfer (KVDirect §4): decode and prefill worker.
    #[prost(message, boxed, tag = "33")]
    TransferConnect(Box<TransferConnect>),
    #[prost(message, boxed, tag = "34")]
    TransferConnected(Box<TransferConnected>),
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
    #[prost(message, boxed, tag = "42")]
    PrefillRequest(Box<PrefillRequest>),
    #[prost(message, boxed, tag = "43")]
    PrefillReady(Box<PrefillReady>),
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
    // Prefix cache of the pool: debtor and creditor.
    #[prost(message, tag = "49")]
    LeaseHashes(LeaseHashes),
    // The same: gManager and instance.
    #[prost(message, tag = "50")]
    CacheDrop(CacheDrop),
    // Joint prefill: its members.
    #[prost(message, boxed, tag = "51")]
    Joint(Box<Joint>),
    // Debtor and the relay of a host.
    #[prost(message, tag = "52")]
    RelayMembers(RelayMembers),
}

/// Model and KV shape that must be equal for two instances to share KV.
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
    /// `KvDType::code` of the KV.
    #[prost(uint32, tag = "6")]
    pub kv_dtype: u32,
    #[prost(uint32, tag = "7")]
    pub block_tokens: u32,
    /// Sliding window in tokens; 0 is none.
    #[prost(uint32, tag = "8")]
    pub window: u32,
    /// `Alibi::bias_max` as the bits of an f32; 0 without ALiBi.
    #[prost(fixed32, tag = "9")]
    pub alibi_bias_max: u32,
    /// Soft cap of attention scores as the bits of an f32; 0 without one.
    #[prost(fixed32, tag = "10")]
    pub attention_softcap: u32,
    /// Whether a token has one row, key and value at once, of which `head_dim` is a half (latent attention).
    #[prost(bool, tag = "11")]
    pub latent: bool,
    /// Factor on attention scores as the bits of an f32.
    #[prost(fixed32, tag = "12")]
    pub attention_scale: u32,
    /// Sliding window of each of `layers` in tokens, 0 for none. Empty if all layers have `window`.
    #[prost(uint32, repeated, tag = "13")]
    pub windows: Vec<u32>,
    /// Sliding window of each layer whose KV is kept out of rBlocks (`--kv-groups`), in tokens; empty without such layers.
    #[prost(uint32, repeated, tag = "14")]
    pub unpooled_windows: Vec<u32>,
}

/// First message to the gManager on a control connection.
#[derive(Clone, PartialEq, Message)]
pub struct Register {
    /// Lowest and highest version of the protocol that the sender speaks.
    #[prost(uint32, tag = "1")]
    pub version_min: u32,
    #[prost(uint32, tag = "2")]
    pub version_max: u32,
    /// Human-readable name.
    #[prost(string, tag = "3")]
    pub name: String,
    /// `ip:port` of the instance's QUIC endpoint, as peers reach it.
    #[prost(string, tag = "4")]
    pub quic_addr: String,
    /// `ip:port` of the instance's HTTP server; empty if it has none.
    #[prost(string, tag = "5")]
    pub http_addr: String,
    #[prost(enumeration = "Role", tag = "6")]
    pub role: i32,
    /// Random per process.
    #[prost(fixed64, tag = "7")]
    pub incarnation: u64,
    /// Must equal the pool's.
    #[prost(message, optional, boxed, tag = "8")]
    pub shape: Option<Box<PoolShape>>,
    /// rBlocks of its KV store.
    #[prost(uint32, tag = "9")]
    pub blocks_total: u32,
    /// Backend for status output: `cpu`, `wgpu` or `cuda`.
    #[prost(string, tag = "10")]
    pub backend: String,
    /// Instance number from an earlier registration, 0 if none: a reconnecting instance keeps its number.
    #[prost(uint32, tag = "11")]
    pub instance: u32,
    /// Performance measured at start; absent on nodes that run no requests or measured nothing.
    #[prost(message, optional, boxed, tag = "12")]
    pub calibration: Option<Box<Calibration>>,
    /// Memory tier of the instance's rBlocks.
    #[prost(enumeration = "MemoryTier", tag = "13")]
    pub tier: i32,
    /// Lend limit in rBlocks; all of them if absent.
    #[prost(uint32, optional, tag = "14")]
    pub lend_blocks_max: Option<u32>,
    /// Fingerprint of its [`Hello::host`]: the first 8 bytes of the name's blake3 hash, little-endian; 0 where that is empty.
    #[prost(fixed64, tag = "15")]
    pub host: u64,
}

/// Memory tier of an instance's rBlocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum MemoryTier {
    /// Memory of the device that computes attention.
    Device = 0,
    /// Host memory: large and slow; micro attention runs on the CPU.
    Host = 1,
}

/// The registration is accepted.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Registered {
    /// Highest version of the protocol that both speak.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The instance's number; never 0.
    #[prost(uint32, tag = "2")]
    pub instance: u32,
    /// Interval of heartbeats, in milliseconds.
    #[prost(uint64, tag = "3")]
    pub heartbeat_ms: u64,
    /// Term of the gManager: a later gManager has a larger one. After a change the instance sends a full heartbeat.
    #[prost(uint64, tag = "4")]
    pub term: u64,
}

/// The registration, or a peer's Hello, is refused; the connection closes after it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Rejected {
    /// Human-readable reason with the two values that differ.
    #[prost(string, tag = "1")]
    pub reason: String,
}

/// Query of a debtor to the gManager for creditors.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct BorrowQuery {
    /// The debtor's number for this query; echoed.
    #[prost(uint64, tag = "1")]
    pub query: u64,
    /// The sender's number.
    #[prost(uint32, tag = "2")]
    pub debtor: u32,
    /// rBlocks that it needs.
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// Creditors that refused in this negotiation.
    #[prost(uint32, repeated, tag = "4")]
    pub exclude: Vec<u32>,
    #[prost(enumeration = "TierRequest", tag = "5")]
    pub tier: i32,
    /// Fingerprints of the block hashes of a prompt, 8 bytes each, in order: the debtor asks which instances cache runs of
    /// them, and for no other creditors. At most `SEARCH_HASHES_MAX`.
    #[prost(bytes = "vec", tag = "6")]
    pub prefix: Vec<u8>,
}

/// Memory tier of the creditors that a debtor asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum TierRequest {
    /// Device memory first, then host memory.
    Any = 0,
    /// Device memory only.
    DeviceOnly = 1,
    /// Host memory only: to swap out a preempted sequence.
    HostOnly = 2,
}

/// Candidate creditor.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Candidate {
    /// Its number.
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    /// As in `Register`.
    #[prost(string, tag = "2")]
    pub quic_addr: String,
    /// rBlocks that it would lend, by its last heartbeat and later refusals.
    #[prost(uint32, tag = "3")]
    pub blocks_lendable: u32,
    /// As in `Register`.
    #[prost(fixed64, tag = "4")]
    pub host: u64,
}

/// Reply to [`BorrowQuery`]: at most `CANDIDATES` creditors, best first; the debtor tries them in order.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct BorrowAdvice {
    /// `BorrowQuery::query`.
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
    /// Runs of `BorrowQuery::prefix` that instances may cache, by their last summaries; at most `CACHED_RUNS_MAX`.
    #[prost(message, repeated, tag = "5")]
    pub cached: Vec<CachedRun>,
}

/// Report of a debtor that a creditor refused: the gManager corrects its view and does not recommend the creditor until
/// its next heartbeat.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Refusal {
    /// The creditor's number.
    #[prost(uint32, tag = "1")]
    pub creditor: u32,
    /// rBlocks that it would lend, as its refusal says.
    #[prost(uint32, tag = "2")]
    pub blocks_lendable: u32,
}

/// Orderly departure of an instance.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Deregister {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
}

/// Query for the state of all instances, to the gManager from gateways and operators. Answered by [`StatusReply`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusQuery {
    /// The sender's number for this query; echoed.
    #[prost(uint64, tag = "1")]
    pub query: u64,
    /// From a gateway: prefixes that it placed, and which of others' it knows.
    #[prost(message, optional, boxed, tag = "2")]
    pub prefixes: Option<Box<PrefixesPlaced>>,
}

/// Reply to [`StatusQuery`].
#[derive(Clone, PartialEq, Message)]
pub struct StatusReply {
    /// `StatusQuery::query`.
    #[prost(uint64, tag = "1")]
    pub query: u64,
    /// Every instance that the gManager knows, silent and fenced ones included.
    #[prost(message, repeated, tag = "2")]
    pub instances: Vec<InstanceStatus>,
    /// Term of the replying gManager, as in `Registered`.
    #[prost(uint64, tag = "3")]
    pub term: u64,
    /// Prefixes that other gateways placed, if the query has `prefixes`.
    #[prost(message, optional, boxed, tag = "4")]
    pub prefixes: Option<Box<PrefixesKnown>>,
}

/// State of one instance: parts of its registration, and its last heartbeat.
#[derive(Clone, PartialEq, Message)]
pub struct InstanceStatus {
    /// Its number.
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    /// This and the next fields: as in `Register`.
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
    /// Its last heartbeat; absent before the first.
    #[prost(message, optional, tag = "7")]
    pub heartbeat: Option<Heartbeat>,
    /// Milliseconds since `heartbeat` arrived.
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

/// First message between instances on each connection, in both directions.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Hello {
    /// As in `Register`.
    #[prost(uint32, tag = "1")]
    pub version_min: u32,
    #[prost(uint32, tag = "2")]
    pub version_max: u32,
    /// The sender's number, from the gManager; never 0.
    #[prost(uint32, tag = "3")]
    pub instance: u32,
    /// As in `Register`: a new one means that all leases of the one before are gone.
    #[prost(fixed64, tag = "4")]
    pub incarnation: u64,
    /// Must equal the receiver's.
    #[prost(message, optional, tag = "5")]
    pub shape: Option<PoolShape>,
    /// Device memory of the sender's KV store, if debtors may map it.
    #[prost(message, optional, boxed, tag = "6")]
    pub lent: Option<Box<LentMemory>>,
    /// Host that the sender runs on, equal for all instances there. Empty if it is unknown, or the sender knows no relays.
    #[prost(string, tag = "7")]
    pub host: String,
}

/// Creditor KV store in a shared device region that peers on its host may map and attend to directly (peer access): all
/// layers of all rBlocks, then one seal tag per rBlock.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LentMemory {
    #[prost(message, optional, tag = "1")]
    pub memory: Option<TransferArena>,
    /// Host identity, as [`TransferConnect::host`](crate::TransferConnect::host).
    #[prost(string, tag = "2")]
    pub host: String,
    /// rBlocks of the store.
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
}

/// Request of a debtor for blocks for one sequence. First come, first served.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRequest {
    /// The debtor's number for this request; echoed.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// The debtor's number of the sequence.
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    /// rBlocks that it needs.
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// Fewest blocks to grant rather than refuse.
    #[prost(uint32, tag = "4")]
    pub blocks_min: u32,
    #[prost(enumeration = "LeasePurpose", tag = "5")]
    pub purpose: i32,
    /// Milliseconds since the request arrived, if its sequence does not run yet: the creditor refuses it while an older
    /// request waits there. None: the sequence runs; only its moves are refused then.
    #[prost(uint32, optional, tag = "6")]
    pub waited_ms: Option<u32>,
    /// Block hashes, 32 bytes each, `blocks` of them: the lease is of cached rBlocks with these hashes only, as many as the
    /// creditor has from the first on. At most `LEASE_HASHES_MAX`. Empty: a lease of rBlocks to write.
    #[prost(bytes = "vec", tag = "7")]
    pub hashes: Vec<u8>,
}

/// Purpose of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum LeasePurpose {
    /// Prompt or growing sequence: written by steps.
    Growth = 0,
    /// `try_move_kvcache` (v2 §6.2): a reservation that expires soon unless it is written; sealed entries are
    /// acknowledged with `LeaseSealed`.
    Move = 1,
    /// As `Move`, for a swap around a frozen DGFM cycle: may use the reserve that is never lent otherwise.
    Swap = 2,
    /// KV that a prefill worker computed for the debtor. Never requested: it comes with `PrefillReady`.
    Handover = 3,
    /// KV that a member of a joint prefill computes. Never requested: it comes with `JointGranted`.
    Joint = 4,
}

/// Grant of a [`LeaseRequest`]: a lease of as many blocks as were asked for, or of at least `blocks_min`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseGrant {
    /// `LeaseRequest::request`.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// The creditor's number for the lease.
    #[prost(uint64, tag = "2")]
    pub lease: u64,
    /// Frames under the lease name this epoch; others are refused as stale.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// Number of entries.
    #[prost(uint32, tag = "4")]
    pub blocks: u32,
    /// Lifetime of the lease without [`LeaseRenew`], in milliseconds.
    #[prost(uint64, tag = "5")]
    pub ttl_ms: u64,
    /// Number of entries, from the first on, that hold the KV of `LeaseRequest::hashes`, sealed: all of them, or none.
    #[prost(uint32, tag = "6")]
    pub cached: u32,
}

/// Refusal of a [`LeaseRequest`]: the creditor would lend fewer than `blocks_min`, or nothing to this request.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRefuse {
    /// `LeaseRequest::request`.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// rBlocks that the creditor would lend now.
    #[prost(uint32, tag = "2")]
    pub blocks_lendable: u32,
    /// Human-readable reason.
    #[prost(string, tag = "3")]
    pub reason: String,
}

/// Return of lease entries by the debtor. Idempotent.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRelease {
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// End (exclusive) of the entries to free, `[first, entries)`.
    #[prost(uint32, tag = "3")]
    pub entries: u32,
    /// First entry to free. 0 for leading ones (a sliding window moved past them) and for the whole lease.
    #[prost(uint32, tag = "4")]
    pub first: u32,
}

/// Acknowledgement of [`LeaseRelease`]; the debtor stops repeating it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseReleased {
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    #[prost(uint32, tag = "2")]
    pub entries: u32,
    #[prost(uint32, tag = "3")]
    pub first: u32,
}

/// Renewal of leases by the debtor: each lives its time to live from here on. Answered by [`LeaseRenewed`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRenew {
    /// Leases that the debtor holds at this creditor, at most `LEASE_RENEW_LEASES_MAX` in one message.
    #[prost(uint64, repeated, tag = "1")]
    pub leases: Vec<u64>,
    /// Number of the renewal, from 1 on; echoed.
    #[prost(uint64, tag = "2")]
    pub seq: u64,
}

/// Reply to [`LeaseRenew`]: the renewed leases that the creditor does not have; their KV is lost.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseRenewed {
    #[prost(uint64, repeated, tag = "1")]
    pub unknown: Vec<u64>,
    /// `LeaseRenew::seq`.
    #[prost(uint64, tag = "2")]
    pub seq: u64,
}
