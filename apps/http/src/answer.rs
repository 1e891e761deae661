//! Turns the pieces of a request's sequences into its response: one JSON object, or server-sent events.
//!
//! Every chunk of a stream carries something: the role is in a sequence's first chunk, and the finish reason in its
//! last one, which has no calls, and no text unless some was held back.

use crate::{
    error::ApiError,
    frames::{self, Streamed, frame},
    journal::{Began, Entry, SentTokens},
    keys::Caller,
    params::UsageWanted,
    piece::{Finish, KV_CAPACITY, Piece, Pieces, PromptPart},
    reply::{self, Choice, Content, Delta, Endpoint, Reply, Usage},
};
use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use lagoon_text::Tokenizer;
use lagoon_types::{CachedTokens, FinishReason, PromptLogprob};
use std::sync::Arc;

const ASSISTANT: &str = "assistant";
/// The response to one request: its properties, and the progress of its sequences.
pub(crate) struct Answer {
    pub(crate) endpoint: Endpoint,
    pub(crate) id: String,
    pub(crate) model: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// One per prompt; sequence `i` belongs to prompt `i / n`.
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) n: usize,
    pub(crate) usage: UsageWanted,
    /// Tokens of each prompt whose KV was cached.
    pub(crate) cached: Vec<CachedTokens>,
    /// Log-probabilities of each prompt's tokens but the first, as far as they are known.
    pub(crate) scores: Vec<Vec<PromptLogprob>>,
    /// Alternatives to report per token of the prompts.
    pub(crate) prompt_logprobs: Option<u32>,
    /// Alternatives in `logprobs`.
    pub(crate) logprobs_top: usize,
    pub(crate) echo: Option<Echo>,
    pub(crate) return_token_ids: bool,
    /// Whether ids of tool calls have nine letters.
    pub(crate) short_call_ids: bool,
    pub(crate) logprobs: bool,
    pub(crate) logits: bool,
    /// Per sequence.
    pub(crate) progress: Vec<Progress>,
    /// Set if the stream's events carry journal lines; the journal begins with it.
    pub(crate) journal: Option<Began>,
    /// The rate limit to which generated tokens are charged.
    pub(crate) caller: Caller,
}

/// The prompts' texts, which their answers begin with.
#[derive(Debug)]
pub(crate) struct Echo {
    pub(crate) texts: Vec<String>,
    /// Whether only the prompt is returned (`max_tokens` 0): what was generated is dropped.
    pub(crate) prompt_only: bool,
}

/// Sent part of one sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    started: bool,
    completion_tokens: usize,
    /// Characters, for `text_offset`.
    offset: usize,
}

impl Progress {
    /// Progress of a sequence of which another server has sent `output`, with text up to character `offset`.
    pub(crate) fn after(output: &SentTokens, offset: usize) -> Self {
        Self { started: output.finished || !output.tokens.is_empty(), completion_tokens: output.tokens.len(), offset }
    }
}

impl Answer {
    /// Collects all pieces into one object. All sequences are drained together, so that none fills its channel.
    pub(crate) async fn whole(mut self, mut pieces: Pieces) -> Result<Response, ApiError> {
        let sequences = self.prompts.len() * self.n;
        let mut all: Vec<Piece> = (0..sequences).map(|index| Piece { index, ..Piece::default() }).collect();
        while let Some(piece) = pieces.next().await {
            let mut piece = piece?;
            self.note(&piece);
            self.keep_prompt(piece.index, std::mem::take(&mut piece.prompt));
            let into = &mut all[piece.index];
            into.text.push_str(&piece.text);
            into.reasoning.push_str(&piece.reasoning);
            into.calls.extend(piece.calls);
            into.tokens.extend(piece.tokens);
            (into.finish, into.stop, into.kv_full) = (piece.finish, piece.stop, piece.kv_full);
        }
        let choices = all.into_iter().map(|piece| self.choice(piece, false)).collect();
        let reply = Reply { usage: Some(Some(self.usage())), ..self.reply(choices, false) };
        let mut response = ([(header::CONTENT_TYPE, "application/json")], to_json(&reply)).into_response();
        frames::report(&self, &mut response);
        Ok(response)
    }

    /// Writes a piece down in the request's record.
    fn note(&self, piece: &Piece) {
        piece.note_in(self.caller.record(), piece.index.is_multiple_of(self.n));
    }

    fn reply(&self, choices: Vec<Choice>, chunk: bool) -> Reply<'_> {
        let object = match (self.endpoint, chunk) {
            (Endpoint::Completions, _) => "text_completion",
            (Endpoint::Chat | Endpoint::Batch, true) => "chat.completion.chunk",
            (Endpoint::Chat | Endpoint::Batch, false) => "chat.completion",
        };
        let chat = self.endpoint == Endpoint::Chat;
        let whole_chat = chat && !chunk && self.return_token_ids;
        Reply {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            prompt_token_ids: whole_chat.then(|| self.prompts[0].clone()),
            prompt_logprobs: (chat && !chunk).then(|| self.prompt_scores(0)).flatten(),
            usage: (chunk && self.usage != UsageWanted::Never).then_some(None),
        }
    }

    /// The calls of a piece. Their ids follow from the answer's, so that another server goes on with the same ones.
    fn calls(&self, piece: &mut Piece, chunk: bool) -> Vec<reply::ToolCall> {
        let (sequence, id) = (piece.index, &self.id);
        let calls = std::mem::take(&mut piece.calls).into_iter();
        let reported = calls.map(|(index, call)| {
            let hash = blake3::hash(format!("{id} {sequence} {index}").as_bytes()).to_hex();
            reply::ToolCall {
                index: chunk.then_some(index),
                id: if self.short_call_ids { hash[..9].to_owned() } else { format!("call_{}", &hash[..24]) },
                r#type: "function",
                function: reply::Call { name: call.name, arguments: call.arguments },
            }
        });
        reported.collect()
    }

    fn choice(&mut self, mut piece: Piece, chunk: bool) -> Choice {
        let prompt = piece.index / self.n;
        if self.echo.as_ref().is_some_and(|echo| echo.prompt_only) {
            piece.text.clear();
            piece.tokens.clear();
            piece.finish = piece.finish.map(|_| Finish::new(FinishReason::Length, false));
            piece.kv_full = false;
        }
        let tool_calls = self.calls(&mut piece, chunk);
        let reasoning_content = Some(std::mem::take(&mut piece.reasoning)).filter(|text| !text.is_empty());
        let progress = &mut self.progress[piece.index];
        let first = !progress.started;
        progress.started = true;
        progress.completion_tokens += piece.tokens.len();
        self.caller.charge(piece.tokens.len() as u64);
        let echo = self.echo.as_ref().filter(|_| first);
        let mut logprobs = reply::Positions::default();
        if let Some(echo) = echo {
            piece.text.insert_str(0, &echo.texts[prompt]);
            let scores = &self.scores[prompt];
            logprobs.prompt(&self.tokenizer, &self.prompts[prompt], scores, self.logprobs_top);
        }
        let logprobs = (self.logprobs && (echo.is_some() || !piece.tokens.is_empty()))
            .then(|| reply::logprobs(self.endpoint, &self.tokenizer, &piece.tokens, logprobs, &mut progress.offset));
        let prompt_ids = self.return_token_ids && self.endpoint != Endpoint::Chat && first;
        let content = match (self.endpoint, chunk) {
            (Endpoint::Completions, _) => Content::Text(piece.text),
            (Endpoint::Chat | Endpoint::Batch, false) => {
                let content = (tool_calls.is_empty() || !piece.text.is_empty()).then_some(piece.text);
                Content::Message { role: ASSISTANT, content, reasoning_content, tool_calls }
            }
            (Endpoint::Chat | Endpoint::Batch, true) => {
                let alone = reasoning_content.is_none() && tool_calls.is_empty();
                let empty = alone && (first || piece.finish.is_none());
                let content = (empty || !piece.text.is_empty()).then_some(piece.text);
                Content::Delta(Delta { role: first.then_some(ASSISTANT), content, reasoning_content, tool_calls })
            }
        };
        Choice {
            index: piece.index,
            content,
            logprobs,
            finish_reason: piece.finish,
            stop_reason: if piece.kv_full { Some(KV_CAPACITY.to_owned()) } else { piece.stop },
            prompt_token_ids: prompt_ids.then(|| self.prompts[prompt].clone()),
            prompt_logprobs: (self.endpoint != Endpoint::Chat).then(|| self.prompt_scores(prompt)).flatten(),
            token_ids: self.return_token_ids.then(|| piece.tokens.iter().map(|token| token.id).collect()),
            logits_b64: self.logits.then(|| {
                piece.tokens.iter().filter_map(|token| token.logits.as_deref().map(reply::logits_b64)).collect()
            }),
        }
    }

    /// Keeps what the first of a prompt's sequences reports of it.
    fn keep_prompt(&mut self, index: usize, part: PromptPart) {
        let prompt = index / self.n;
        if index.is_multiple_of(self.n) {
            self.cached[prompt] += part.cached;
        }
        if self.scores[prompt].is_empty() {
            self.scores[prompt] = part.logprobs;
        }
    }

    /// A prompt's log-probabilities, if they were requested.
    fn prompt_scores(&self, prompt: usize) -> Option<reply::PromptScores> {
        let top = self.prompt_logprobs? as usize;
        Some(reply::prompt_scores(&self.tokenizer, &self.scores[prompt], top))
    }

    fn usage(&self) -> Usage {
        let prompt_tokens = self.prompts.iter().map(Vec::len).sum();
        let completion_tokens = self.progress.iter().map(|progress| progress.completion_tokens).sum();
        let mut cached = CachedTokens::default();
        self.cached.iter().for_each(|of| cached += *of);
        let prompt_tokens_details = cached.into();
        let total_tokens = prompt_tokens + completion_tokens;
        Usage { prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details }
    }

    fn usage_chunk(&self) -> String {
        to_json(&Reply { usage: Some(Some(self.usage())), ..self.reply(Vec::new(), true) })
    }
}

impl Streamed for Answer {
    const LAST: Entry = Entry::Ended;

    fn id(&self) -> &str {
        &self.id
    }

    fn caller(&self) -> &Caller {
        &self.caller
    }

    fn journal(&self) -> Option<&Began> {
        self.journal.as_ref()
    }

    fn tokens(&self) -> usize {
        self.usage().total_tokens
    }

    /// One chunk with one piece.
    fn event(&mut self, mut piece: Piece) -> String {
        let index = piece.index;
        self.note(&piece);
        self.keep_prompt(index, std::mem::take(&mut piece.prompt));
        let first = !self.progress[index].started;
        let choice = self.choice(piece, true);
        let usage = self.usage();
        let mut reply = self.reply(vec![choice], true);
        if self.usage == UsageWanted::Every {
            reply.usage = Some(Some(usage));
        }
        if first && self.return_token_ids && self.endpoint == Endpoint::Chat {
            reply.prompt_token_ids = Some(self.prompts[index / self.n].clone());
        }
        to_json(&reply)
    }

    fn end(&self) -> String {
        let wanted = self.usage != UsageWanted::Never;
        let usage = wanted.then(|| frame(&self.usage_chunk()));
        usage.unwrap_or_default() + &frame("[DONE]")
    }
}

fn to_json(reply: &Reply<'_>) -> String {
    serde_json::to_string(reply).expect("replies serialise: keys are strings and numbers are finite")
}
