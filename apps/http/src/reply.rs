//! The JSON of responses: OpenAI's shapes, with vLLM's `token_ids` and Lagoon's `logits_b64`.

use crate::piece::{Finish, Token};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use lagoon_text::Tokenizer;
use lagoon_types::{CachedTokens, PromptLogprob, TokenLogprobs};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The endpoint of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    /// Several chats: what is reported of a prompt stands in its choice.
    Batch,
    Completions,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct PromptTokensDetails {
    /// Tokens of prompts whose KV was in the prefix cache.
    pub(crate) cached_tokens: u64,
    /// Where; absent if nothing was cached. No field of OpenAI's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cached_tokens_details: Option<CachedTokensDetails>,
}

/// Cached tokens by where their KV was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct CachedTokensDetails {
    /// KV memory of the instance that computed the prompt.
    device: u64,
    /// KV memory of other instances of the pool, leased.
    pool: u64,
    /// Host memory.
    host: u64,
    /// Disk.
    disk: u64,
}

impl From<CachedTokens> for PromptTokensDetails {
    fn from(cached: CachedTokens) -> Self {
        let CachedTokens { device, pool, host, disk } = cached;
        let details = CachedTokensDetails { device, pool, host, disk };
        let cached_tokens = cached.total();
        Self { cached_tokens, cached_tokens_details: (cached_tokens > 0).then_some(details) }
    }
}

/// A whole response or one chunk of a stream.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Reply<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<Choice>,
    /// Of one chat only: batches and completions have it in the choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    /// As above.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<PromptScores>,
    /// `Some(None)` is an explicit `null`, in chunks when usage was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
}

/// A tool call; `index` only in chunks. A chunk has whole calls: a resumed stream cannot repeat half of one.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ToolCall {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<usize>,
    pub(crate) id: String,
    pub(crate) r#type: &'static str,
    pub(crate) function: Call,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) arguments: String,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Choice {
    pub(crate) index: usize,
    #[serde(flatten)]
    pub(crate) content: Content,
    pub(crate) logprobs: Option<Logprobs>,
    pub(crate) finish_reason: Option<Finish>,
    /// What ended the answer, where `finish_reason` does not tell: the stop string, as in vLLM, or the pool's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stop_reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<PromptScores>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
    /// One entry a token: the logits over the vocabulary, f32 little-endian, base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) logits_b64: Option<Vec<String>>,
}

/// Text of a choice, in the shape of its endpoint.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Content {
    Text(String),
    Message {
        role: &'static str,
        /// `null` where there are only calls.
        content: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<String>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ToolCall>,
    },
    Delta(Delta),
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub(crate) enum Logprobs {
    Chat { content: Vec<ChatLogprob> },
    Completions(Positions),
}

/// Log-probabilities of consecutive tokens in the shape of completions. The first token of a prompt has none.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct Positions {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    text_offset: Vec<usize>,
}

impl Positions {
    /// Adds an echoed prompt, with up to `top` alternatives a token.
    pub(crate) fn prompt(&mut self, tokenizer: &Tokenizer, prompt: &[u32], scores: &[PromptLogprob], top: usize) {
        let scores = std::iter::once(None).chain(scores.iter().map(Some));
        for (id, score) in prompt.iter().zip(scores) {
            let known = score.map(|score| (score.logprob, &score.top[..score.top.len().min(top)]));
            self.push(tokenizer, *id, known);
        }
    }

    fn push(&mut self, tokenizer: &Tokenizer, id: u32, known: Option<(f32, &[(u32, f32)])>) {
        let token = token_text(tokenizer, id);
        let last = self.text_offset.last().zip(self.tokens.last());
        self.text_offset.push(last.map_or(0, |(offset, token)| offset + token.chars().count()));
        self.token_logprobs.push(known.map(|(logprob, _)| finite(logprob)));
        self.top_logprobs.push(known.map(|(logprob, top)| {
            let mut alternatives: BTreeMap<_, _> =
                top.iter().map(|(id, logprob)| (token_text(tokenizer, *id), finite(*logprob))).collect();
            // vLLM and OpenAI always list the chosen token too.
            alternatives.insert(token.clone(), finite(logprob));
            alternatives
        }));
        self.tokens.push(token);
    }

    /// Moves the offsets behind `from`; returns where the text ends.
    fn shift(&mut self, from: usize) -> usize {
        self.text_offset.iter_mut().for_each(|offset| *offset += from);
        let last = self.text_offset.last().zip(self.tokens.last());
        last.map_or(from, |(offset, token)| offset + token.chars().count())
    }
}

/// Log-probabilities of a prompt in vLLM's shape: for each token, it and the likeliest ones by id. The first has none.
pub(crate) type PromptScores = Vec<Option<BTreeMap<u32, PromptScore>>>;

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct PromptScore {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

/// A prompt's log-probabilities with up to `top` alternatives a token.
pub(crate) fn prompt_scores(tokenizer: &Tokenizer, scores: &[PromptLogprob], top: usize) -> PromptScores {
    let score = |id: u32, logprob: f32, rank: u32| {
        (id, PromptScore { logprob: finite(logprob), rank, decoded_token: token_text(tokenizer, id) })
    };
    let position = |of: &PromptLogprob| {
        let likeliest = of.top.iter().take(top).zip(1..).map(|((id, logprob), rank)| score(*id, *logprob, rank));
        Some(likeliest.chain([score(of.token, of.logprob, of.rank)]).collect())
    };
    std::iter::once(None).chain(scores.iter().map(position)).collect()
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ChatLogprob {
    #[serde(flatten)]
    chosen: Alternative,
    top_logprobs: Vec<Alternative>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Alternative {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Alternative {
    fn new(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Self {
        // A token may be part of a character: the bytes are exact, the text may not be.
        Self { token: token_text(tokenizer, id), logprob: finite(logprob), bytes: tokenizer.token_bytes(id) }
    }
}

/// Text of a single token as logprobs show it.
pub(crate) fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned()
}

/// A log-probability without infinity, which JSON lacks: zero probability becomes -9999, as in OpenAI's API.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// Log-probabilities of `tokens` in the endpoint's shape, behind those of an echoed prompt; `offset`: where their text begins,
/// in characters; is advanced.
pub(crate) fn logprobs(
    endpoint: Endpoint,
    tokenizer: &Tokenizer,
    tokens: &[Token],
    mut echoed: Positions,
    offset: &mut usize,
) -> Logprobs {
    let known = tokens.iter().filter_map(|token| token.logprobs.as_ref().map(|logprobs| (token.id, logprobs)));
    match endpoint {
        Endpoint::Chat | Endpoint::Batch => {
            Logprobs::Chat { content: known.map(|(id, logprobs)| chat_logprob(tokenizer, id, logprobs)).collect() }
        }
        Endpoint::Completions => {
            for (id, logprobs) in known {
                echoed.push(tokenizer, id, Some((logprobs.chosen, &logprobs.top)));
            }
            *offset = echoed.shift(*offset);
            Logprobs::Completions(echoed)
        }
    }
}

fn chat_logprob(tokenizer: &Tokenizer, id: u32, logprobs: &TokenLogprobs) -> ChatLogprob {
    ChatLogprob {
        chosen: Alternative::new(tokenizer, id, logprobs.chosen),
        top_logprobs: logprobs.top.iter().map(|(id, logprob)| Alternative::new(tokenizer, *id, *logprob)).collect(),
    }
}

/// Logits of one token in base64 of f32 little-endian.
pub(crate) fn logits_b64(logits: &[f32]) -> String {
    let bytes: Vec<u8> = logits.iter().flat_map(|value| value.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}
