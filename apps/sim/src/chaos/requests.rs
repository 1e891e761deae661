//! Checkers of requests: a client receives the oracle's tokens, and one end.

use super::ops::request;
use super::run::Failure;
use crate::place::Place;
use crate::pool::PoolSpec;
use crate::symbolic::Oracle;
use lagoon_types::{FinishReason, GenerateRequest, RequestError, TokenEvent};

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    Finished,
    /// Never accepted.
    Refused,
    Failed,
    Cancelled,
    /// Its instance died, or was dead.
    Lost,
}

/// One request and the events that its client has received.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) id: usize,
    pub(super) place: Place,
    pub(super) request: GenerateRequest,
    /// Tokens that the pool could hold when the request was accepted.
    pool_tokens: u64,
    oracle: Oracle,
    pub(super) tokens: u32,
    pub(super) end: Option<End>,
}

impl Asked {
    pub(super) fn new(
        pool: &PoolSpec,
        (id, place): (usize, Place),
        (prompt, max_tokens, seed): (u32, u32, u64),
        pool_tokens: u64,
    ) -> Self {
        let request = request(prompt, max_tokens, seed);
        let oracle = Oracle::new(&request.prompt, pool.windows);
        Self { id, place, request, pool_tokens, oracle, tokens: 0, end: None }
    }

    fn failure(&self, what: &str) -> Failure {
        Failure::new(
            "answer",
            format!("request {} on node {}, after {} tokens: {what}", self.id, self.place, self.tokens),
        )
    }

    /// Whether the first `cached` tokens of its prompt may be cached because `of` was computed: an equal beginning of prompt or answer,
    /// under the same salt.
    pub(super) fn may_find(&self, cached: u32, of: &Self, pool: &PoolSpec) -> bool {
        let wanted = &self.request.prompt[..self.request.prompt.len().min(cached as usize)];
        let theirs = &of.request.prompt;
        if of.request.options.cache_salt != self.request.options.cache_salt
            || !wanted.starts_with(&theirs[..theirs.len().min(wanted.len())])
        {
            return false;
        }
        let mut oracle = Oracle::new(theirs, pool.windows);
        wanted.iter().skip(theirs.len()).all(|token| oracle.next_token() == *token)
    }

    /// Checks an event that the client receives.
    pub(super) fn receive(&mut self, event: TokenEvent, pool: &PoolSpec, disturbed: bool) -> Result<(), Failure> {
        if let Some(end) = &self.end {
            return Err(self.failure(&format!("{event:?} after its end, {end:?}")));
        }
        match event {
            TokenEvent::Prompt { .. } | TokenEvent::Embedding { .. } => {}
            TokenEvent::Token { id, .. } => {
                let expected = self.oracle.next_token();
                if id != expected {
                    return Err(self.failure(&format!("token {id} instead of {expected}")));
                }
                self.tokens += 1;
                if self.tokens > self.request.max_tokens {
                    return Err(self.failure("more tokens than it may generate"));
                }
            }
            TokenEvent::Finished { reason, prompt_tokens, completion_tokens } => {
                if (prompt_tokens as usize, completion_tokens) != (self.request.prompt.len(), self.tokens) {
                    return Err(self.failure(&format!("{prompt_tokens} and {completion_tokens} tokens were counted")));
                }
                let (expected, why) = self.expected(pool);
                if (reason, u64::from(self.tokens)) != (why, expected) {
                    return Err(self.failure(&format!("it finished ({reason:?}) and not after {expected}")));
                }
                self.end = Some(End::Finished);
            }
            TokenEvent::Failed(error) => {
                if !self.may_fail(&error, pool, disturbed) {
                    return Err(self.failure(&format!("it failed for no reason: {error}")));
                }
                self.end = Some(if let RequestError::Unavailable(_) = error { End::Failed } else { End::Refused });
            }
        }
        Ok(())
    }

    /// Number of tokens that an undisturbed run generates, and why it ends.
    fn expected(&self, pool: &PoolSpec) -> (u64, FinishReason) {
        let prompt = self.request.prompt.len() as u64;
        let positions = u64::from(pool.max_positions).saturating_sub(prompt);
        let wanted = u64::from(self.request.max_tokens).min(positions);
        let held = pool.windows.pooled.map(|w| u64::from(w) + 2 * u64::from(pool.block_tokens));
        let room = self.pool_tokens.saturating_sub(prompt);
        if held.is_none_or(|held| held > self.pool_tokens) && room < wanted {
            (room, FinishReason::KvCapacity)
        } else {
            (wanted, FinishReason::Length)
        }
    }

    /// Whether a sequence with a window has outgrown the pool: once preempted, it can never be placed whole again.
    fn outgrew(&self, pool: &PoolSpec) -> bool {
        pool.windows.pooled.is_some()
            && self.request.prompt.len() as u64 + u64::from(self.tokens) + 1 > self.pool_tokens
    }

    fn may_fail(&self, error: &RequestError, pool: &PoolSpec, disturbed: bool) -> bool {
        match error {
            // None offers to take a request back.
            RequestError::Invalid(_) | RequestError::Internal(_) | RequestError::HandedBack => false,
            RequestError::TooLong { .. } | RequestError::QueueFull { .. } => self.tokens == 0,
            RequestError::NotServing(_) => disturbed && self.tokens == 0,
            RequestError::Unavailable(_) => disturbed || self.outgrew(pool),
        }
    }
}
