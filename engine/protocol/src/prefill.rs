//! Messages of disaggregated serving: which workers there are and what each shall be (gManager and instance), and prefills
//! that a decode worker has done by a prefill worker.
//!
//! A **request** is the decode worker's number for one prefill; unique in its incarnation. Requests that are not answered
//! end with the session on which they were sent, on both sides. The KV of one that is answered is a lease, as any other
//! (`LeaseRenew`, `LeaseRelease`), and may be read by `TRANSFER` ([`crate::transfer`]).

use crate::control::Role;
use prost::Message;

/// A worker of the pool.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Worker {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(string, tag = "2")]
    pub quic_addr: String,
    #[prost(enumeration = "Role", tag = "3")]
    pub role: i32,
    #[prost(uint32, tag = "4")]
    pub blocks_total: u32,
}

/// All workers that prefill for others: to every decode worker whose heartbeat says that it knows another list.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Workers {
    /// Names this list; echoed in heartbeats. Not 0.
    #[prost(fixed64, tag = "1")]
    pub version: u64,
    #[prost(message, repeated, tag = "2")]
    pub workers: Vec<Worker>,
}

/// How the first token is chosen; as `SamplingParams`.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct PrefillSampling {
    #[prost(float, tag = "1")]
    pub temperature: f32,
    #[prost(uint32, tag = "2")]
    pub top_k: u32,
    #[prost(float, tag = "3")]
    pub top_p: f32,
    #[prost(float, tag = "4")]
    pub min_p: f32,
    #[prost(fixed64, tag = "5")]
    pub seed: u64,
    #[prost(uint32, optional, tag = "6")]
    pub logprobs: Option<u32>,
    /// Tokens that were generated before this one.
    #[prost(uint64, tag = "7")]
    pub index: u64,
    #[prost(bool, tag = "8")]
    pub return_logits: bool,
}

/// A decode worker asks for the KV of some tokens and the one that follows them. Long requests come in several messages,
/// in order.
#[derive(Clone, PartialEq, Message)]
pub struct PrefillRequest {
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// The decode worker's sequence, for the placement map.
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    /// Tokens of all messages of this request.
    #[prost(uint32, tag = "3")]
    pub total: u32,
    /// Position of the first token of this message.
    #[prost(uint32, tag = "4")]
    pub first: u32,
    #[prost(uint32, repeated, tag = "5")]
    pub tokens: Vec<u32>,
    /// In the first message.
    #[prost(message, optional, tag = "6")]
    pub sampling: Option<PrefillSampling>,
    /// The asker has memory for all of it: KV is exported while it is computed, in parts. In the first message.
    #[prost(bool, tag = "7")]
    pub push: bool,
}

/// A likely token.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct PrefillTop {
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Natural log.
    #[prost(float, tag = "2")]
    pub logprob: f32,
}

/// The KV is there, as a lease of the asker, and the next token is known. Once only.
#[derive(Clone, PartialEq, Message)]
pub struct PrefillReady {
    #[prost(uint64, tag = "1")]
    pub request: u64,
    #[prost(uint64, tag = "2")]
    pub lease: u64,
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// Entries of the lease. They hold the request's tokens; the last may be partly filled.
    #[prost(uint32, tag = "4")]
    pub blocks: u32,
    #[prost(uint64, tag = "5")]
    pub ttl_ms: u64,
    #[prost(uint32, tag = "6")]
    pub token: u32,
    /// If log-probabilities were asked for.
    #[prost(float, optional, tag = "7")]
    pub logprob: Option<f32>,
    #[prost(message, repeated, tag = "8")]
    pub top: Vec<PrefillTop>,
    /// f32, if they were asked for.
    #[prost(bytes = "vec", tag = "9")]
    pub logits: Vec<u8>,
    /// The export of the lease's entries that comes with it (`TransferExport`); 0 if none does, and why.
    #[prost(uint64, tag = "10")]
    pub export: u64,
    #[prost(string, tag = "11")]
    pub why: String,
    /// Time that the request waited for memory and its turn, and that it was computed.
    #[prost(uint64, tag = "12")]
    pub queued_ms: u64,
    #[prost(uint64, tag = "13")]
    pub prefill_ms: u64,
    #[prost(uint64, tag = "14")]
    pub queued_tokens: u64,
}

/// The request is not done here.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillRefused {
    #[prost(uint64, tag = "1")]
    pub request: u64,
    #[prost(string, tag = "2")]
    pub reason: String,
    #[prost(uint64, tag = "3")]
    pub queued_tokens: u64,
}

/// A decode worker still wants these; also asks how much the worker has to do.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillRenew {
    #[prost(uint64, tag = "1")]
    pub seq: u64,
    #[prost(uint64, repeated, tag = "2")]
    pub requests: Vec<u64>,
}

/// The answer: which of them the worker does not know.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillRenewed {
    /// Of the question.
    #[prost(uint64, tag = "1")]
    pub seq: u64,
    #[prost(uint64, repeated, tag = "2")]
    pub unknown: Vec<u64>,
    /// Tokens that wait to be computed or are being computed.
    #[prost(uint64, tag = "3")]
    pub queued_tokens: u64,
}

/// The decode worker does not want these any more. It holds no lease of them.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillCancel {
    #[prost(uint64, repeated, tag = "1")]
    pub requests: Vec<u64>,
}

/// The role that the receiver shall have, gManager to instance: it finishes what only its old role does, and then has the
/// new one. Repeated until its heartbeat names `number`; the last one counts.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct RoleOrder {
    #[prost(enumeration = "Role", tag = "1")]
    pub role: i32,
    /// Which order it is; no gManager gives it twice.
    #[prost(uint64, tag = "2")]
    pub number: u64,
}
