//! Messages of KV transfer between a decode worker (the reader) and a prefill worker (the writer): CONNECT, export,
//! COMPLETE and their replies (KVDirect §4). The KV itself travels in [`crate::DirectFrame`]s or over shared memory.
//!
//! A **connection** is the reader's number for one writer process. A writer **exports** finished rBlocks to one reader
//! under a lease that the reader renews; COMPLETE ends it. Sequence numbers of COMPLETE count per connection from 1.

use prost::{Enumeration, Message};

/// Dimension of a KV tensor. Absent dimensions have size 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum TransferDim {
    Unknown = 0,
    /// rBlocks.
    Block = 1,
    Layer = 2,
    /// K, then V.
    Kv = 3,
    /// Tokens of an rBlock.
    Token = 4,
    /// KV heads.
    Head = 5,
    /// Elements of a head.
    Elem = 6,
}

/// One dimension of a plane.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct TransferAxis {
    #[prost(enumeration = "TransferDim", tag = "1")]
    pub dim: i32,
    #[prost(uint32, tag = "2")]
    pub size: u32,
    /// Distance of neighbouring indices, in elements.
    #[prost(uint64, tag = "3")]
    pub stride: u64,
}

/// Part of the KV that a plane holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum TransferPart {
    Both = 0,
    Keys = 1,
    Values = 2,
}

/// One tensor of KV in a registered region (KVDirect §4.1: address, dims, shape, stride).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferPlane {
    /// Index in `TransferLayout::region_bytes`.
    #[prost(uint32, tag = "1")]
    pub region: u32,
    /// Byte offset of element 0 in the region.
    #[prost(uint64, tag = "2")]
    pub base: u64,
    /// In any order.
    #[prost(message, repeated, tag = "3")]
    pub axes: Vec<TransferAxis>,
    /// `KvDType::code`.
    #[prost(uint32, tag = "4")]
    pub dtype: u32,
    /// Model layer of index 0 of the layer dimension.
    #[prost(uint32, tag = "5")]
    pub first_layer: u32,
    #[prost(enumeration = "TransferPart", tag = "6")]
    pub part: i32,
}

/// Memory layout of a worker's KV.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferLayout {
    /// 32 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub model_hash: Vec<u8>,
    /// Tokens of an rBlock.
    #[prost(uint32, tag = "2")]
    pub block_tokens: u32,
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    #[prost(uint32, tag = "4")]
    pub first_layer: u32,
    #[prost(uint32, tag = "5")]
    pub layers: u32,
    #[prost(uint32, tag = "6")]
    pub first_head: u32,
    /// KV heads.
    #[prost(uint32, tag = "7")]
    pub heads: u32,
    #[prost(uint32, tag = "8")]
    pub head_dim: u32,
    /// Size of each registered region.
    #[prost(uint64, repeated, tag = "9")]
    pub region_bytes: Vec<u64>,
    #[prost(message, repeated, tag = "10")]
    pub planes: Vec<TransferPlane>,
    /// As `PoolShape::latent`.
    #[prost(bool, tag = "11")]
    pub latent: bool,
    /// Layers whose KV is kept out of rBlocks (`--kv-groups`); an export may carry their last window.
    #[prost(uint32, tag = "12")]
    pub windowed_layers: u32,
    /// Positions of that last window: the longest sliding window of `windowed_layers` less one. 0 without such layers.
    #[prost(uint32, tag = "13")]
    pub window: u32,
}

/// CONNECT: first message of a reader to a writer, also after every loss of the path. Repeated until answered.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferConnect {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    /// Incarnation of the reader.
    #[prost(fixed64, tag = "2")]
    pub incarnation: u64,
    /// Attempt number, growing with every CONNECT of a connection: an older one is ignored.
    #[prost(uint64, tag = "3")]
    pub attempt: u64,
    #[prost(message, optional, tag = "4")]
    pub layout: Option<TransferLayout>,
    /// Values may be rounded to the reader's element type.
    #[prost(bool, tag = "5")]
    pub loss_allowed: bool,
    /// Host identity, including its namespace of unix sockets; equal ones may share memory. Empty: never.
    #[prost(string, tag = "6")]
    pub host: String,
}

/// Memory that a reader on the same host may map: one region, or a shared device region that holds all regions in order.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferArena {
    /// The region; the first one for a shared device region.
    #[prost(uint32, tag = "1")]
    pub region: u32,
    /// Path of the unix socket that hands the file descriptor out.
    #[prost(string, tag = "2")]
    pub socket: String,
    /// Secret of 32 bytes that the socket requires.
    #[prost(bytes = "vec", tag = "3")]
    pub token: Vec<u8>,
    /// UUID of the device, 16 bytes; empty for host memory.
    #[prost(bytes = "vec", tag = "4")]
    pub device: Vec<u8>,
    /// Size of a shared device region: that of the regions, or more.
    #[prost(uint64, tag = "5")]
    pub bytes: u64,
}

/// Reply to a CONNECT whose layout is compatible.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferConnected {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, tag = "2")]
    pub attempt: u64,
    /// Incarnation of the writer: exports of another one have ended.
    #[prost(fixed64, tag = "3")]
    pub incarnation: u64,
    /// Epoch of this acceptance: reads with an earlier epoch are refused.
    #[prost(uint64, tag = "4")]
    pub epoch: u64,
    /// Sequence number of the last executed COMPLETE.
    #[prost(uint64, tag = "5")]
    pub completed: u64,
    #[prost(message, optional, tag = "6")]
    pub layout: Option<TransferLayout>,
    /// Credit: bytes in flight that the reader may have.
    #[prost(uint64, tag = "7")]
    pub credit_bytes: u64,
    /// Lifetime of an export without renewal, in milliseconds.
    #[prost(uint64, tag = "8")]
    pub ttl_ms: u64,
    #[prost(message, repeated, tag = "9")]
    pub arenas: Vec<TransferArena>,
    /// `ip:port` that serves reads over QUIC; empty: the address of the writer's other connections.
    #[prost(string, tag = "10")]
    pub addr: String,
}

/// Refusal of a CONNECT.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferRefused {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, tag = "2")]
    pub attempt: u64,
    /// Human-readable reason with the two values that differ.
    #[prost(string, tag = "3")]
    pub reason: String,
}

/// Consecutive rBlocks of the writer.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct TransferBlocks {
    #[prost(uint32, tag = "1")]
    pub first: u32,
    #[prost(uint32, tag = "2")]
    pub count: u32,
}

/// Export: KV that a writer keeps for a reader. Repeated until a `TransferRenew` names it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferExport {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, tag = "2")]
    pub export: u64,
    /// Request of the KV, by the number that both sides use.
    #[prost(uint64, tag = "3")]
    pub request: u64,
    /// Position of the first token.
    #[prost(uint32, tag = "4")]
    pub first_token: u32,
    #[prost(uint32, tag = "5")]
    pub tokens: u32,
    /// The writer's rBlocks in the order of the tokens; the last may be partly filled.
    #[prost(message, repeated, tag = "6")]
    pub blocks: Vec<TransferBlocks>,
    /// 16 bytes for each rBlock: the content's check over these layers and the heads that both have (WIRE.md, Checks).
    #[prost(bytes = "vec", tag = "7")]
    pub checks: Vec<u8>,
    /// Exported model layers: `layers` of them from `first_layer` on; 0 `layers`: all that both sides have.
    #[prost(uint32, tag = "8")]
    pub first_layer: u32,
    #[prost(uint32, tag = "9")]
    pub layers: u32,
}

/// Renewal of exports; also acknowledges their receipt.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferRenew {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, repeated, tag = "2")]
    pub exports: Vec<u64>,
    /// Echoed.
    #[prost(uint64, tag = "3")]
    pub seq: u64,
}

/// Reply to [`TransferRenew`]: the renewed exports that are unknown to the writer.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferRenewed {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, repeated, tag = "2")]
    pub unknown: Vec<u64>,
    /// `TransferRenew::seq`.
    #[prost(uint64, tag = "3")]
    pub seq: u64,
}

/// Outcome of an export at the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum TransferOutcome {
    /// All of it arrived and was verified.
    Done = 0,
    /// The reader does not need it any more.
    Abandoned = 1,
}

/// COMPLETE: asks the writer to free the export. One at a time on a connection; repeated until acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct TransferComplete {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    #[prost(uint64, tag = "3")]
    pub export: u64,
    #[prost(enumeration = "TransferOutcome", tag = "4")]
    pub outcome: i32,
    /// Incarnation of the addressed writer: sequence numbers restart with a new one.
    #[prost(fixed64, tag = "5")]
    pub incarnation: u64,
}

/// Acknowledgement of all COMPLETEs up to `seq`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct TransferCompleted {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    /// Incarnation of the writer.
    #[prost(fixed64, tag = "3")]
    pub incarnation: u64,
}
