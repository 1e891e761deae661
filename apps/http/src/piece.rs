//! Pieces of a request's sequences, as they are generated ([`Piece`]).

use crate::{access::Record, error::ApiError};
use futures::stream::{BoxStream, SelectAll};
use lagoon_text::parse::Call;
use lagoon_types::{CachedTokens, FinishReason, PromptLogprob, TokenLogprobs};
use schemars::JsonSchema;
use serde::Serialize;

/// `stop_reason` of an answer that the pool's memory ended, with the finish reason `length`.
pub(crate) const KV_CAPACITY: &str = "kv_capacity";

/// One generated token.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) id: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
    pub(crate) logits: Option<Vec<f32>>,
}

/// What the engine reports of a sequence's prompt.
#[derive(Clone, Debug, Default)]
pub(crate) struct PromptPart {
    /// Tokens whose KV was in the prefix cache.
    pub(crate) cached: CachedTokens,
    /// Time until it joined the batch.
    pub(crate) queue_ms: u64,
    /// Of all tokens but the first, if requested.
    pub(crate) logprobs: Vec<PromptLogprob>,
}

/// A piece of one sequence: usually one token and its text. Text that may still change (an incomplete character, a
/// possible stop string) is held back for a later piece.
#[derive(Clone, Debug, Default)]
pub(crate) struct Piece {
    /// Index of the sequence in its request.
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) reasoning: String,
    /// Tool calls, with their places in the answer.
    pub(crate) calls: Vec<(usize, Call)>,
    pub(crate) tokens: Vec<Token>,
    /// In the sequence's first piece, if anything of the prompt is reported.
    pub(crate) prompt: PromptPart,
    /// Set in the sequence's last piece.
    pub(crate) finish: Option<Finish>,
    /// Beside it, the stop string that ended the sequence.
    pub(crate) stop: Option<String>,
    /// Whether the pool's memory ended it.
    pub(crate) kv_full: bool,
}

impl Piece {
    /// Takes the end of a piece with calls off it, as a piece of its own: OpenAI's client ends a call at the next chunk, not within its
    /// own.
    pub(crate) fn end_behind_calls(&mut self) -> Option<Self> {
        let finish = self.finish.take_if(|_| !self.calls.is_empty())?;
        let (stop, kv_full) = (self.stop.take(), std::mem::take(&mut self.kv_full));
        Some(Self { index: self.index, finish: Some(finish), stop, kv_full, ..Self::default() })
    }

    /// Writes the piece down in its request's record. `first`: it is of the first answer to its prompt.
    pub(crate) fn note_in(&self, record: &Record, first: bool) {
        let PromptPart { cached, queue_ms, .. } = self.prompt;
        if (cached.total(), queue_ms) != (0, 0) {
            record.prompt(if first { cached } else { CachedTokens::default() }, queue_ms);
        }
        record.output(self.tokens.len());
        if let Some(finish) = self.finish {
            record.finished(if self.kv_full { KV_CAPACITY } else { finish.name() });
        }
    }
}

/// Reason of a sequence's end, as clients see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Finish {
    Stop,
    Length,
    ToolCalls,
}

impl Finish {
    /// The end for `reason` of an answer with or without tool calls.
    pub(crate) fn new(reason: FinishReason, called: bool) -> Self {
        match reason {
            FinishReason::Stop if called => Self::ToolCalls,
            FinishReason::Stop => Self::Stop,
            FinishReason::Length | FinishReason::KvCapacity => Self::Length,
        }
    }

    /// Its name in responses.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// Why a sequence failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) error: ApiError,
    /// Whether the engine, not the request, failed: another one may succeed.
    pub(crate) again: bool,
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// Stream of the pieces of all sequences, in order of arrival.
pub(crate) type Pieces = SelectAll<BoxStream<'static, Result<Piece, Failure>>>;
