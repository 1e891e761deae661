//! The seam between HTTP and whatever generates tokens. This crate knows no instance, pool or device.

use lagoon_types::{GenerateRequest, RequestError, TokenEvent};
use std::fmt;
use tokio::sync::mpsc;

/// Something that generates tokens.
///
/// Contract: `submit` does not block; events arrive in order and end with exactly one `Finished` or `Failed`, or the
/// channel closes, which the server reports as a failure. The channel is bounded: when a slow client leaves it full,
/// the engine's side waits up to its own deadline and then cancels the sequence, so that no sequence holds KV for a
/// reader that does not read.
pub trait Engine: Send + Sync + 'static {
    /// Accepts or refuses a request.
    ///
    /// # Errors
    /// What can be told at once: a full queue, a request that can never fit, no engine.
    fn submit(&self, request: GenerateRequest) -> Result<Generation, RequestError>;

    /// What is served, as of now.
    fn info(&self) -> EngineInfo;
}

/// What an engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineInfo {
    /// The name that clients put in `model`.
    pub model_id: String,
    /// Longest sequence (prompt and output) that the model supports, in tokens.
    pub max_model_tokens: u32,
    /// Longest sequence that memory can hold now, the whole pool counted; `None` when unknown. It bounds the default
    /// of `max_tokens` only: the engine itself refuses what does not fit.
    pub capacity_tokens: Option<u32>,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Whether requests are accepted now.
    pub ready: bool,
}

/// An accepted request: its events, and the guard that cancels it.
#[derive(Debug)]
pub struct Generation {
    pub events: mpsc::Receiver<TokenEvent>,
    pub guard: CancelGuard,
}

/// Cancels a request when dropped, unless the request was seen to end.
pub struct CancelGuard(Option<Box<dyn FnOnce() + Send>>);

impl CancelGuard {
    /// `cancel` must not block; it runs at most once.
    pub fn new(cancel: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(cancel)))
    }

    /// The request has ended by itself: dropping the guard does nothing any more.
    pub fn disarm(&mut self) {
        self.0 = None;
    }
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel();
        }
    }
}

impl fmt::Debug for CancelGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelGuard").field("armed", &self.0.is_some()).finish()
    }
}
