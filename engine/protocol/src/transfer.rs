//! Messages of KV transfer between a decode worker (the reader) and a prefill worker (the writer): CONNECT, export,
//! COMPLETE and their answers (KVDirect §4). The KV itself travels in [`crate::DirectFrame`]s or over shared memory.
//!
//! A **connection** is the reader's number for one writer process. A writer **exports** finished rBlocks to one reader
//! under a lease that the reader renews; COMPLETE ends it. Sequence numbers of COMPLETE count per connection from 1.

use prost::{Enumeration, Message};

/// What a dimension of a KV tensor counts. Absent dimensions have size 1.
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
    /// Distance of neighbours, in elements.
    #[prost(uint64, tag = "3")]
    pub stride: u64,
}

/// Which of K and V a plane holds.
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
    /// `DType::code`.
    #[prost(uint32, tag = "4")]
    pub dtype: u32,
    /// Layer of the model that index 0 of the layer dimension is.
    #[prost(uint32, tag = "5")]
    pub first_layer: u32,
    #[prost(enumeration = "TransferPart", tag = "6")]
    pub part: i32,
}

/// Where a worker's KV lies.
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
}

/// CONNECT: a reader introduces itself to a writer, first and after every loss of the path. Repeated until answered.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferConnect {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    /// Of the reader.
    #[prost(fixed64, tag = "2")]
    pub incarnation: u64,
    /// Grows with every CONNECT of a connection: an older one is ignored.
    #[prost(uint64, tag = "3")]
    pub attempt: u64,
    #[prost(message, optional, tag = "4")]
    pub layout: Option<TransferLayout>,
    /// Values may be rounded to the reader's element type.
    #[prost(bool, tag = "5")]
    pub loss_allowed: bool,
    /// Identity of the host and its namespace of unix sockets; equal ones may share memory. Empty: never.
    #[prost(string, tag = "6")]
    pub host: String,
}

/// Memory that a reader on the same host may map: one region, or a window of a device with all regions one behind the other.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferArena {
    /// The region; of a window the first one.
    #[prost(uint32, tag = "1")]
    pub region: u32,
    /// Path of the unix socket that hands the file descriptor out.
    #[prost(string, tag = "2")]
    pub socket: String,
    /// 32 bytes that the socket asks for.
    #[prost(bytes = "vec", tag = "3")]
    pub token: Vec<u8>,
    /// 16 bytes, the UUID of the device that it is a window of; empty for memory of the host.
    #[prost(bytes = "vec", tag = "4")]
    pub device: Vec<u8>,
    /// Size of a window: what the regions have, or more.
    #[prost(uint64, tag = "5")]
    pub bytes: u64,
}

/// The answer to a CONNECT whose layout can be read.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferConnected {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, tag = "2")]
    pub attempt: u64,
    /// Of the writer: exports of another one are gone.
    #[prost(fixed64, tag = "3")]
    pub incarnation: u64,
    /// Names this acceptance: reads of an earlier one are refused.
    #[prost(uint64, tag = "4")]
    pub epoch: u64,
    /// The last COMPLETE that was carried out.
    #[prost(uint64, tag = "5")]
    pub completed: u64,
    #[prost(message, optional, tag = "6")]
    pub layout: Option<TransferLayout>,
    /// Bytes that the reader may have asked for and not received.
    #[prost(uint64, tag = "7")]
    pub credit_bytes: u64,
    /// Exports that are not renewed for so long end.
    #[prost(uint64, tag = "8")]
    pub ttl_ms: u64,
    #[prost(message, repeated, tag = "9")]
    pub arenas: Vec<TransferArena>,
    /// `ip:port` where reads are served over QUIC; empty where the writer's other connections are.
    #[prost(string, tag = "10")]
    pub addr: String,
}

/// The answer to a CONNECT that cannot work.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferRefused {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, tag = "2")]
    pub attempt: u64,
    /// For people: names the two values that differ.
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

/// KV that a writer keeps for a reader. Repeated until a `TransferRenew` names it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferExport {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, tag = "2")]
    pub export: u64,
    /// The request whose KV this is, as both know it.
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
    /// The layers of the model that it is of, `layers` of them from `first_layer` on; without, all that both have.
    #[prost(uint32, tag = "8")]
    pub first_layer: u32,
    #[prost(uint32, tag = "9")]
    pub layers: u32,
}

/// Keeps exports, and acknowledges that they were heard of.
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

/// Which of the renewed exports are gone.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TransferRenewed {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, repeated, tag = "2")]
    pub unknown: Vec<u64>,
    /// Of the renewal.
    #[prost(uint64, tag = "3")]
    pub seq: u64,
}

/// How a reader is done with an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum TransferOutcome {
    /// All of it arrived and was verified.
    Done = 0,
    /// It is not wanted any more.
    Abandoned = 1,
}

/// COMPLETE: the writer frees the export. One at a time on a connection; repeated until acknowledged.
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
    /// Of the writer that it is for: numbers count anew for its successor.
    #[prost(fixed64, tag = "5")]
    pub incarnation: u64,
}

/// The acknowledgement of all COMPLETEs up to a number.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct TransferCompleted {
    #[prost(uint64, tag = "1")]
    pub conn: u64,
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    /// Of the writer.
    #[prost(fixed64, tag = "3")]
    pub incarnation: u64,
}
