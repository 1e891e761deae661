//! Turns the engine's token events into pieces of text, for all sequences of one request.
//!
//! Invariants: every token is reported exactly once, in order; a sequence ends with exactly one piece that has a finish
//! reason, or with an error; a stop string is never sent, not even in part, unless it was asked for; dropping the stream cancels the
//! running sequences.

use crate::{
    engine::Generation,
    error::ApiError,
    limits::Limits,
    metrics,
    piece::{Failure, Finish, Piece, Pieces, PromptPart, Token},
};
use futures::stream::{self, StreamExt};
use lagoon_text::{
    IncrementalDetokenizer, StopStrings,
    parse::{AnswerParser, Parts},
};
use lagoon_types::{FinishReason, RequestError, TokenEvent};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Detokenizer and stop conditions of one sequence.
pub(crate) struct TextRules {
    pub(crate) decoder: IncrementalDetokenizer,
    pub(crate) stop_strings: StopStrings,
    /// Finds tool calls and reasoning in the text, which is else all content.
    pub(crate) parser: Option<AnswerParser>,
    /// Tokens that end the sequence without text of their own, sorted.
    pub(crate) stop_ids: Vec<u32>,
    /// Tokens, of those still to come, in whose text no stop string is looked for.
    pub(crate) min_tokens: u32,
    /// Report a token at once even when it adds no text yet.
    pub(crate) every_token: bool,
    /// Whether a token that ends the sequence has its text in the answer.
    pub(crate) include_stop: bool,
}

impl TextRules {
    /// Adds a token. Returns the parts that can be sent now, and whether a stop string or the last call ended the sequence.
    fn push(&mut self, id: u32) -> (Parts, bool) {
        let (text, stopped) = self.text(id);
        match &mut self.parser {
            None => (Parts { content: text, ..Parts::default() }, stopped),
            Some(parser) => {
                let parts = parser.push(&text);
                (parts, stopped || parser.is_over())
            }
        }
    }

    /// Adds a token. Returns the text that is certain, and whether a stop string ended the sequence.
    fn text(&mut self, id: u32) -> (String, bool) {
        let (mut new, mut certain) = (String::new(), String::new());
        if self.include_stop || self.stop_ids.binary_search(&id).is_err() {
            self.decoder.push(id, &mut new);
        }
        if let Some(left) = self.min_tokens.checked_sub(1) {
            self.min_tokens = left;
            return (new, false);
        }
        let stopped = self.stop_strings.push(&new, &mut certain);
        (certain, stopped)
    }

    /// Adds tokens whose text another server has sent: later text depends on them.
    pub(crate) fn catch_up(&mut self, output: &[u32]) {
        output.iter().for_each(|id| drop(self.push(*id)));
    }

    /// Why a sequence has ended of which another server sent the tokens `output`, at most `tokens_max`; `None` if it
    /// goes on.
    pub(crate) fn is_over(&self, output: &[u32], tokens_max: usize) -> Option<FinishReason> {
        let stopped = output.last().is_some_and(|id| self.stop_ids.binary_search(id).is_ok());
        let over = self.parser.as_ref().is_some_and(AnswerParser::is_over);
        if stopped || over || self.stop_strings.stopped() {
            Some(FinishReason::Stop)
        } else {
            (output.len() >= tokens_max).then_some(FinishReason::Length)
        }
    }
}

/// Merges the sequences of one request into one stream.
pub(crate) fn pieces(sequences: Vec<Sequence>) -> Pieces {
    stream::select_all(sequences.into_iter().map(|sequence| {
        stream::unfold(sequence, |mut sequence| async move {
            let piece = sequence.next().await?;
            Some((piece, sequence))
        })
        .boxed()
    }))
}

/// One sequence that is being generated.
pub(crate) struct Sequence {
    index: usize,
    /// `None` once the sequence has ended; dropping it cancels.
    generation: Option<Generation>,
    rules: TextRules,
    first_token_deadline: Duration,
    token_deadline: Duration,
    retry_after_s: u32,
    submitted: Instant,
    last_token: Option<Instant>,
    /// Tokens whose text is held back.
    held: Vec<Token>,
    /// Reported with the first piece.
    prompt: PromptPart,
}

impl Sequence {
    pub(crate) fn new(index: usize, generation: Generation, rules: TextRules, limits: &Limits) -> Self {
        metrics::sequence_started();
        Self {
            index,
            generation: Some(generation),
            rules,
            first_token_deadline: limits.first_token_deadline,
            token_deadline: limits.token_deadline,
            retry_after_s: limits.retry_after_s,
            submitted: Instant::now(),
            last_token: None,
            held: Vec::new(),
            prompt: PromptPart::default(),
        }
    }

    /// The next piece; `None` after the last one or after an error.
    async fn next(&mut self) -> Option<Result<Piece, Failure>> {
        loop {
            let event = self.event().await?;
            let outcome = match event {
                Ok(TokenEvent::Prompt { cached, queue_ms, logprobs }) => {
                    self.prompt = PromptPart { cached, queue_ms, logprobs };
                    Ok(None)
                }
                // Of another kind of request.
                Ok(TokenEvent::Embedding { .. }) => Ok(None),
                Ok(TokenEvent::Token { id, logprobs, logits }) => Ok(self.token(Token { id, logprobs, logits })),
                Ok(TokenEvent::Finished { reason, .. }) => Ok(Some(self.finished(reason))),
                Ok(TokenEvent::Failed(error)) => Err(Failure {
                    again: matches!(
                        error,
                        RequestError::Unavailable(_) | RequestError::NotServing(_) | RequestError::HandedBack
                    ),
                    error: ApiError::from_request_error(&error, self.retry_after_s),
                }),
                Err(error) => Err(Failure { error, again: false }),
            };
            match outcome {
                Ok(None) => {}
                Ok(Some(piece)) => return Some(Ok(piece)),
                Err(error) => {
                    self.end(metrics::Outcome::Failed);
                    return Some(Err(error));
                }
            }
        }
    }

    /// The engine's next event, within the deadline; `None` when the sequence has ended.
    async fn event(&mut self) -> Option<Result<TokenEvent, ApiError>> {
        let (deadline, what) = match self.last_token {
            None => (self.first_token_deadline, "the first token"),
            Some(_) => (self.token_deadline, "the next token"),
        };
        let generation = self.generation.as_mut()?;
        Some(match timeout(deadline, generation.events.recv()).await {
            Ok(Some(event)) => {
                if matches!(event, TokenEvent::Finished { .. } | TokenEvent::Failed(_)) {
                    generation.guard.disarm();
                }
                Ok(event)
            }
            Ok(None) => Err(ApiError::unavailable("the engine dropped the request")),
            Err(_elapsed) => Err(ApiError::unavailable(format!("{what} took longer than {} s", deadline.as_secs()))),
        })
    }

    /// Adds a token; returns a piece if there is something to report.
    fn token(&mut self, token: Token) -> Option<Piece> {
        self.observe_token();
        let (parts, stopped) = self.rules.push(token.id);
        self.held.push(token);
        if stopped {
            // Only text before the match is sent; `end` drops the generation, which cancels it.
            self.end(metrics::Outcome::Stop);
            return Some(self.last_piece(parts, FinishReason::Stop));
        }
        let news = !parts.is_empty() || self.rules.every_token;
        news.then(|| self.piece(parts, None))
    }

    /// Ends the sequence after the engine: sends the text held back, unless it completes a stop string.
    fn finished(&mut self, reason: FinishReason) -> Piece {
        let (mut rest, mut text) = (String::new(), String::new());
        self.rules.decoder.finish(&mut rest);
        let stopped = self.rules.stop_strings.push(&rest, &mut text);
        self.rules.stop_strings.finish(&mut text);
        let reason = if stopped { FinishReason::Stop } else { reason };
        self.end(match reason {
            FinishReason::Stop => metrics::Outcome::Stop,
            FinishReason::Length => metrics::Outcome::Length,
            FinishReason::KvCapacity => metrics::Outcome::KvCapacity,
        });
        let parts = match &mut self.rules.parser {
            None => Parts { content: text, ..Parts::default() },
            Some(parser) => parser.push(&text),
        };
        self.last_piece(parts, reason)
    }

    /// The last piece: with `parts` and what the parser held back.
    fn last_piece(&mut self, mut parts: Parts, reason: FinishReason) -> Piece {
        if let Some(parser) = self.rules.parser.as_mut().filter(|parser| !parser.is_over()) {
            parts.append(parser.finish());
        }
        let called = self.rules.parser.as_ref().is_some_and(|parser| parser.calls() > 0);
        let kv_full = reason == FinishReason::KvCapacity;
        Piece { kv_full, ..self.piece(parts, Some(Finish::new(reason, called))) }
    }

    fn piece(&mut self, parts: Parts, finish: Option<Finish>) -> Piece {
        let Parts { content: text, reasoning, calls } = parts;
        let first = self.rules.parser.as_ref().map_or(0, |parser| parser.calls() - calls.len());
        let calls = calls.into_iter().enumerate().map(|(at, call)| (first + at, call)).collect();
        let (tokens, prompt) = (std::mem::take(&mut self.held), std::mem::take(&mut self.prompt));
        let stop = finish.and_then(|_| self.rules.stop_strings.found().map(str::to_owned));
        Piece { index: self.index, text, reasoning, calls, tokens, prompt, finish, stop, kv_full: false }
    }

    fn observe_token(&mut self) {
        let now = Instant::now();
        match self.last_token {
            None => metrics::first_token(now - self.submitted),
            Some(last) => metrics::next_token(now - last),
        }
        self.last_token = Some(now);
    }

    fn end(&mut self, outcome: metrics::Outcome) {
        if self.generation.take().is_some() {
            metrics::sequence_ended(outcome, self.submitted.elapsed());
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.end(metrics::Outcome::Cancelled);
    }
}
