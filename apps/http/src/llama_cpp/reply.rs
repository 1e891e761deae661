//! The JSON of `/completion`.

use crate::{piece::Token, reply::token_text};
use lagoon_text::Tokenizer;
use schemars::JsonSchema;
use serde::Serialize;
use std::time::{Duration, Instant};

/// One sequence's response, or a chunk of it: a chunk has no more than the fields before `model`, and its last one all.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Completion {
    pub(crate) index: usize,
    pub(crate) content: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) id_slot: i32,
    pub(crate) stop: bool,
    pub(crate) tokens_predicted: usize,
    pub(crate) tokens_evaluated: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<Timings>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) completion_probabilities: Vec<Probability>,
    #[serde(flatten)]
    pub(crate) end: Option<End>,
}

/// Fields of a whole response, and of a stream's last chunk.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct End {
    pub(crate) model: String,
    pub(crate) generation_settings: Settings,
    pub(crate) prompt: String,
    pub(crate) has_new_line: bool,
    pub(crate) truncated: bool,
    pub(crate) stop_type: StopType,
    pub(crate) stopping_word: String,
    pub(crate) tokens_cached: usize,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopType {
    /// A token that ends answers.
    Eos,
    /// The length.
    Limit,
    /// A stop string.
    Word,
}

/// Sampling and limits of a request, or the server's defaults.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct Settings {
    pub(crate) n_predict: i64,
    pub(crate) max_tokens: i64,
    pub(crate) seed: u64,
    pub(crate) temperature: f32,
    pub(crate) top_k: u32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    pub(crate) repeat_penalty: f32,
    pub(crate) repeat_last_n: i32,
    pub(crate) presence_penalty: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) stop: Vec<String>,
    pub(crate) n_probs: u32,
    pub(crate) stream: bool,
}

/// Times of one sequence, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub(crate) struct Timings {
    cache_n: usize,
    prompt_n: usize,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    predicted_n: usize,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
}

impl Timings {
    /// Of a prompt of which `cached` tokens were cached and `prompt` computed, from `began` to `first`, the first token's time, to
    /// now.
    pub(crate) fn new(
        (cached, prompt, predicted): (usize, usize, usize),
        began: Instant,
        first: Option<Instant>,
    ) -> Self {
        let now = Instant::now();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let first = first.unwrap_or(now);
        let (prompt_ms, predicted_ms) = (ms(first - began), ms(now - first));
        let per = |ms: f64, n: usize| if n == 0 { 0.0 } else { ms / n as f64 };
        let rate = |ms: f64, n: usize| if ms > 0.0 { 1e3 * n as f64 / ms } else { 0.0 };
        Self {
            cache_n: cached,
            prompt_n: prompt,
            prompt_ms,
            prompt_per_token_ms: per(prompt_ms, prompt),
            prompt_per_second: rate(prompt_ms, prompt),
            predicted_n: predicted,
            predicted_ms,
            predicted_per_token_ms: per(predicted_ms, predicted),
            predicted_per_second: rate(predicted_ms, predicted),
        }
    }
}

/// A token and the likeliest ones at its place.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Probability {
    #[serde(flatten)]
    chosen: TokenLogprob,
    top_logprobs: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct TokenLogprob {
    id: u32,
    token: String,
    bytes: Vec<u8>,
    logprob: f32,
}

impl TokenLogprob {
    fn new(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Self {
        let (token, bytes) = (token_text(tokenizer, id), tokenizer.token_bytes(id));
        Self { id, token, bytes, logprob: logprob.max(-9999.0) }
    }
}

/// Log-probabilities of the tokens that have some.
pub(crate) fn probabilities(tokenizer: &Tokenizer, tokens: &[Token]) -> Vec<Probability> {
    let known = tokens.iter().filter_map(|token| Some((token.id, token.logprobs.as_ref()?)));
    let probability = |(id, of): (u32, &lagoon_types::TokenLogprobs)| Probability {
        chosen: TokenLogprob::new(tokenizer, id, of.chosen),
        top_logprobs: of.top.iter().map(|(id, logprob)| TokenLogprob::new(tokenizer, *id, *logprob)).collect(),
    };
    known.map(probability).collect()
}
