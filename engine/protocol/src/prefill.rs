//! Messages of disaggregated serving: worker lists and role orders (gManager to instance), and prefill requests (decode
//! worker to prefill worker).
//!
//! A **request** is the decode worker's number for one prefill; unique in its incarnation. An unanswered request ends with
//! its session, on both sides. The KV of an answered one is an ordinary lease (`LeaseRenew`, `LeaseRelease`), and may be
//! read by `TRANSFER` ([`crate::transfer`]).

use crate::prefix::CacheSummary;
use crate::role::Role;
use prost::Message;

/// Worker of the pool.
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

/// List of all prefill workers, sent to every decode worker whose heartbeat names another version.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Workers {
    /// Version of the list, not 0; echoed in heartbeats.
    #[prost(fixed64, tag = "1")]
    pub version: u64,
    #[prost(message, repeated, tag = "2")]
    pub workers: Vec<Worker>,
}

/// Sampling parameters of the first token, as `SamplingParams`.
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
    /// Number of tokens generated before this one.
    #[prost(uint64, tag = "7")]
    pub index: u64,
    #[prost(bool, tag = "8")]
    pub return_logits: bool,
}

/// Request of a decode worker for the KV of some tokens and the next token. Long requests are split into several
/// messages, in order.
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
    /// Sampling of the next token; in the first message only.
    #[prost(message, optional, tag = "6")]
    pub sampling: Option<PrefillSampling>,
    /// The requester has memory for all KV: it is exported in parts while it is computed. In the first message only.
    #[prost(bool, tag = "7")]
    pub push: bool,
    /// Tokens that the next token is none of. In the first message only.
    #[prost(uint32, repeated, tag = "8")]
    pub banned: Vec<u32>,
    /// The requester takes the last window of layers whose KV is not in the pool. In the first message only.
    #[prost(bool, tag = "9")]
    pub window: bool,
    /// Biases added to tokens' logits before sampling. In the first message only.
    #[prost(message, repeated, tag = "10")]
    pub logit_bias: Vec<LogitBias>,
    /// Penalties of tokens that prompt and answer have; none if absent. In the first message only, as the fields below.
    #[prost(message, optional, tag = "12")]
    pub penalties: Option<PrefillPenalties>,
    /// The next token is one of these; any if there are none.
    #[prost(uint32, repeated, tag = "13")]
    pub allowed: Vec<u32>,
    /// The tenant in the prefix cache: only requests with the same salt share cached KV.
    #[prost(string, tag = "14")]
    pub cache_salt: String,
    /// The grammar of the answer, whose tokens are the request's last `PrefillSampling::index`; none if absent.
    #[prost(message, optional, tag = "15")]
    pub constraint: Option<PrefillConstraint>,
}

/// Grammar of an answer.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillConstraint {
    /// 1: a JSON schema; 2: a regular expression; 3: one of several texts; 4: a grammar in llguidance's variant of Lark.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// One text, or those of a choice.
    #[prost(string, repeated, tag = "2")]
    pub texts: Vec<String>,
    /// Reasoning before it; none if absent.
    #[prost(message, optional, tag = "3")]
    pub reasoning: Option<PrefillReasoning>,
}

/// Reasoning before the grammar of an answer begins, by its tokens.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillReasoning {
    /// The answer begins within it.
    #[prost(bool, tag = "1")]
    pub is_open: bool,
    /// The token that opens it at the answer's beginning.
    #[prost(uint32, optional, tag = "2")]
    pub opens: Option<u32>,
    /// The tokens at its end.
    #[prost(uint32, repeated, tag = "3")]
    pub ends: Vec<u32>,
    /// The token behind them with which the grammar begins; behind `ends` if absent.
    #[prost(uint32, optional, tag = "4")]
    pub until: Option<u32>,
    /// The answer may end within it.
    #[prost(bool, tag = "5")]
    pub may_end: bool,
}

/// Penalties of tokens that prompt and answer have, as in `SamplingParams`. The answer's tokens are the request's last
/// `PrefillSampling::index`.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct PrefillPenalties {
    #[prost(float, tag = "1")]
    pub presence: f32,
    #[prost(float, tag = "2")]
    pub frequency: f32,
    /// 1 if absent.
    #[prost(float, optional, tag = "3")]
    pub repetition: Option<f32>,
}

/// Number that is added to one token's logit.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LogitBias {
    #[prost(uint32, tag = "1")]
    pub token: u32,
    #[prost(float, tag = "2")]
    pub bias: f32,
}

/// Likely token with its log-probability.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct PrefillTop {
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Natural log.
    #[prost(float, tag = "2")]
    pub logprob: f32,
}

/// Reply to [`PrefillRequest`]: the KV, as a lease of the requester, and the next token. Repeated at renewals until that
/// lease is renewed.
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
    /// As in `LeaseGrant`.
    #[prost(uint64, tag = "5")]
    pub ttl_ms: u64,
    #[prost(uint32, tag = "6")]
    pub token: u32,
    /// Log-probability of `token`, if requested.
    #[prost(float, optional, tag = "7")]
    pub logprob: Option<f32>,
    #[prost(message, repeated, tag = "8")]
    pub top: Vec<PrefillTop>,
    /// Logits as f32, if requested.
    #[prost(bytes = "vec", tag = "9")]
    pub logits: Vec<u8>,
    /// Export of the lease's entries that accompanies this reply (`TransferExport`); 0 if none, with the reason in `why`.
    #[prost(uint64, tag = "10")]
    pub export: u64,
    #[prost(string, tag = "11")]
    pub why: String,
    /// Time that the request waited for memory and its turn (`queued_ms`), and compute time (`prefill_ms`).
    #[prost(uint64, tag = "12")]
    pub queued_ms: u64,
    #[prost(uint64, tag = "13")]
    pub prefill_ms: u64,
    /// As in `PrefillRenewed`.
    #[prost(uint64, tag = "14")]
    pub queued_tokens: u64,
    /// The last of `blocks`, behind the tokens: the last window of layers whose KV is not in the pool. 0 if it is not there.
    #[prost(uint32, tag = "15")]
    pub window_blocks: u32,
    /// The request's tokens whose KV was in the worker's prefix cache.
    #[prost(uint32, tag = "16")]
    pub cached_tokens: u32,
    /// The request's grammar has ended with `token`.
    #[prost(bool, tag = "17")]
    pub has_ended: bool,
    /// Those of `cached_tokens` that the worker leased from other instances, loaded from its host tier, and loaded from its disk.
    #[prost(uint32, tag = "18")]
    pub pool_cached_tokens: u32,
    #[prost(uint32, tag = "19")]
    pub host_cached_tokens: u32,
    #[prost(uint32, tag = "20")]
    pub disk_cached_tokens: u32,
}

/// Refusal of a [`PrefillRequest`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillRefused {
    #[prost(uint64, tag = "1")]
    pub request: u64,
    #[prost(string, tag = "2")]
    pub reason: String,
    /// As in `PrefillRenewed`.
    #[prost(uint64, tag = "3")]
    pub queued_tokens: u64,
}

/// Renewal of unanswered requests by a decode worker; also queries the worker's queue.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillRenew {
    #[prost(uint64, tag = "1")]
    pub seq: u64,
    #[prost(uint64, repeated, tag = "2")]
    pub requests: Vec<u64>,
    /// `PrefillRenewed::cache_version` of the last reply with `cached`; 0 before the first.
    #[prost(uint64, tag = "3")]
    pub cache_version: u64,
}

/// Reply to [`PrefillRenew`]: the requests that the worker does not know.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillRenewed {
    /// `PrefillRenew::seq`.
    #[prost(uint64, tag = "1")]
    pub seq: u64,
    #[prost(uint64, repeated, tag = "2")]
    pub unknown: Vec<u64>,
    /// Tokens of the worker that wait to be computed or are being computed.
    #[prost(uint64, tag = "3")]
    pub queued_tokens: u64,
    /// What the worker's prefix cache has, if that changed since `PrefillRenew::cache_version`.
    #[prost(message, optional, boxed, tag = "4")]
    pub cached: Option<Box<CacheSummary>>,
    /// Version of the worker's prefix cache, never 0.
    #[prost(uint64, tag = "5")]
    pub cache_version: u64,
}

/// Cancellation of requests by a decode worker, which holds no lease of them.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefillCancel {
    #[prost(uint64, repeated, tag = "1")]
    pub requests: Vec<u64>,
}

/// Order of the gManager to an instance to change its role: it finishes the work that only the old role does, then
/// switches. Repeated until its heartbeat names `number`; the last order counts.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct RoleOrder {
    #[prost(enumeration = "Role", tag = "1")]
    pub role: i32,
    /// Number of the order; no gManager uses it twice.
    #[prost(uint64, tag = "2")]
    pub number: u64,
}
