//! Generation requests in tokens, and the events that answer them.

use crate::constraint::Constraint;
use serde::{Deserialize, Serialize};
use std::ops::{AddAssign, Range};
use std::sync::Arc;

/// Sampling parameters of the next token.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all tokens.
    pub top_k: u32,
    /// 1 keeps all tokens.
    pub top_p: f32,
    /// 0 keeps all tokens; else tokens under `min_p` times the likeliest token's probability are dropped.
    pub min_p: f32,
    /// Sampling is a function of the seed and the number of tokens generated so far.
    pub seed: u64,
    /// Alternatives to report per token; `None` reports no log-probabilities.
    pub logprobs: Option<u32>,
    /// Pairs of token id and bias, added to the logits before all other sampling; each id once. Log-probabilities do not
    /// include the bias.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Subtracted from the logit of every token that was generated before; 0 changes nothing.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time that it was generated before; 0 changes nothing.
    pub frequency_penalty: f32,
    /// Divides the positive logits of tokens of prompt and answer, and multiplies the negative ones; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Only these tokens are drawn, ascending; empty allows all.
    pub allowed_token_ids: Arc<[u32]>,
    /// Token sequences, none empty, that the answer does not contain: the last token is not drawn after the others.
    pub bad_words: Arc<[Box<[u32]>]>,
    /// The answer is a sentence of a grammar.
    pub constraint: Option<Arc<Constraint>>,
}

impl SamplingParams {
    /// Whether a device that draws tokens itself (temperature, `top_k`, `top_p`, `min_p`) can draw with these parameters.
    /// A field that is added here must be listed here: such devices know no other.
    #[must_use]
    pub fn fits_device_sampling(&self) -> bool {
        let Self {
            temperature: _,
            top_k: _,
            top_p: _,
            min_p: _,
            seed: _,
            logprobs,
            logit_bias,
            presence_penalty: _,
            frequency_penalty: _,
            repetition_penalty: _,
            allowed_token_ids,
            // Those that are banned now are among the step's banned tokens.
            bad_words: _,
            // A mask.
            constraint: _,
        } = self;
        logprobs.is_none() && logit_bias.is_empty() && allowed_token_ids.is_empty() && !self.has_penalties()
    }

    /// Whether a draw depends on which tokens prompt and answer have.
    #[must_use]
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            logprobs: None,
            logit_bias: Arc::default(),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            allowed_token_ids: Arc::default(),
            bad_words: Arc::default(),
            constraint: None,
        }
    }
}

/// Request to generate one sequence. Stop *strings* live above the engine: the text layer cancels the request.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// At least one token; every id is under the vocabulary size.
    pub prompt: Vec<u32>,
    /// Number of `prompt`'s last tokens that a lost instance already generated and reported. They are not reported again, and
    /// count as generated for `max_tokens` and for the token index that sampling depends on.
    pub answered: u32,
    /// At least 1, and more than `answered`; 0 with [`RequestOptions::embedding`].
    pub max_tokens: u32,
    pub sampling: SamplingParams,
    /// Tokens before which none of `stop_ids` is generated; at most `max_tokens`.
    pub min_tokens: u32,
    /// Token ids that end generation (end-of-sequence ids and `stop_token_ids`). Empty with `ignore_eos`.
    pub stop_ids: Vec<u32>,
    /// Report the logits of every generated token (costly; for comparisons).
    pub return_logits: bool,
    pub options: RequestOptions,
}

/// How a request is served, beside its sampling.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestOptions {
    /// Of waiting requests, one with a lower number is admitted first: each unit counts as `PRIORITY_STEP_MS` of waiting.
    pub priority: i32,
    /// The tenant in the prefix cache: only requests with the same salt share cached KV.
    pub cache_salt: Arc<str>,
    /// Alternatives to report per token of the prompt; `None` reports no log-probabilities of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// The prompt's embedding is wanted, and no answer.
    pub embedding: Option<Pooling>,
    /// While it waits, the instance may give it back ([`RequestError::HandedBack`]): a gateway takes it.
    pub may_hand_back: bool,
}

/// Which positions of a prompt have the hidden states whose mean is its embedding, as sentence-transformers names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// The first one (`cls`).
    First,
    /// The last one (`lasttoken`).
    #[default]
    Last,
    /// All of them (`mean`).
    Mean,
}

impl Pooling {
    /// The positions, of a prompt of `len` tokens, at least 1.
    #[must_use]
    pub const fn positions(self, len: u32) -> Range<u32> {
        match self {
            Self::First => 0..1,
            Self::Last => len - 1..len,
            Self::Mean => 0..len,
        }
    }
}

/// Reason of a sequence's regular end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop id or stop string.
    Stop,
    /// `max_tokens` or the model's maximum length.
    Length,
    /// The KV capacity of the whole pool, before `max_tokens`.
    KvCapacity,
}

/// Log-probabilities (natural log, of the model's distribution before temperature and truncation) of one token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    pub chosen: f32,
    /// The likeliest tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Log-probability of one token of a prompt, after the tokens before it.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprob {
    pub token: u32,
    pub logprob: f32,
    /// Place among all tokens by likelihood, from 1.
    pub rank: u32,
    /// The likeliest tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Tokens of prompts whose KV was in the prefix cache, by where it was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedTokens {
    /// KV memory of the instance that computes the prompt.
    pub device: u64,
    /// KV memory of other instances of the pool, which lease it.
    pub pool: u64,
    /// Copies in host memory (`--host-cache-tokens`).
    pub host: u64,
    /// Copies on disk (`--cache-dir`).
    pub disk: u64,
}

impl CachedTokens {
    /// Found in the KV memory of the instance that computes the prompt.
    #[must_use]
    pub fn on_device(tokens: impl Into<u64>) -> Self {
        Self { device: tokens.into(), ..Self::default() }
    }

    /// The places and their tokens.
    #[must_use]
    pub fn by_place(self) -> [(&'static str, u64); 4] {
        let Self { device, pool, host, disk } = self;
        [("device", device), ("pool", pool), ("host", host), ("disk", disk)]
    }

    /// Tokens of all places.
    #[must_use]
    pub fn total(self) -> u64 {
        self.by_place().into_iter().fold(0, |sum, (_, tokens)| sum.saturating_add(tokens))
    }

    /// At most `tokens` in all: those of the first places.
    #[must_use]
    pub fn at_most(self, mut tokens: u64) -> Self {
        let mut take = |of: u64| {
            let taken = of.min(tokens);
            tokens -= taken;
            taken
        };
        Self { device: take(self.device), pool: take(self.pool), host: take(self.host), disk: take(self.disk) }
    }
}

impl AddAssign for CachedTokens {
    fn add_assign(&mut self, other: Self) {
        let sum = |a: u64, b: u64| a.saturating_add(b);
        self.device = sum(self.device, other.device);
        self.pool = sum(self.pool, other.pool);
        self.host = sum(self.host, other.host);
        self.disk = sum(self.disk, other.disk);
    }
}

/// Event of one request, in order: at most one `Prompt`, tokens or one `Embedding`, then exactly one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// Tokens of the prompt whose KV was cached, how long it waited to join the batch, and the log-probabilities of all of its tokens
    /// but the first, if they were requested; absent without all of these.
    Prompt {
        cached: CachedTokens,
        queue_ms: u64,
        logprobs: Vec<PromptLogprob>,
    },
    Token {
        id: u32,
        logprobs: Option<TokenLogprobs>,
        logits: Option<Vec<f32>>,
    },
    /// The mean of the model's hidden states, after its final norm, at the positions of the request's [`Pooling`].
    Embedding {
        hidden: Vec<f32>,
    },
    Finished {
        reason: FinishReason,
        prompt_tokens: u32,
        completion_tokens: u32,
    },
    Failed(RequestError),
}

/// The limit of a sequence's length, as [`RequestError::TooLong`] names it: the model's context, or less by --max-model-len.
pub const CONTEXT: &str = "the served context";

/// Reason of a refused or failed request; each kind has one HTTP status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// 400: the request can never be served as it is.
    #[error("{0}")]
    Invalid(String),
    /// 400: prompt and maximum output exceed what the whole pool (or the model) can hold.
    #[error(
        "the prompt has {prompt_tokens} tokens, which needs room for {needed_tokens}, but {limit_name} is {limit_tokens} tokens"
    )]
    TooLong { prompt_tokens: u64, needed_tokens: u64, limit_tokens: u64, limit_name: &'static str },
    /// 429: the admission queue is full.
    #[error("the queue is full ({queued} requests wait, the limit is {limit})")]
    QueueFull { queued: usize, limit: usize },
    /// 503: a creditor, the gManager or the device failed, or a deadline passed.
    #[error("{0}")]
    Unavailable(String),
    /// 503: the instance takes no requests now; it stops, drains or changes its role. The request has not begun.
    #[error("{0}")]
    NotServing(String),
    /// 503, for a gateway only: the instance gave the request back before it began ([`RequestOptions::may_hand_back`]).
    #[error("the instance gave the request back, as it could not start it soon")]
    HandedBack,
    /// 500: a bug of ours.
    #[error("internal error: {0}")]
    Internal(String),
}
