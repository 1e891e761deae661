//! The trait between HTTP and a token generator. This crate knows no instance, pool or device.

use lagoon_types::{GenerateRequest, RequestError, TokenEvent};
use std::{fmt, sync::Arc};
use tokio::sync::mpsc;

/// A token generator.
///
/// Contract: `submit` does not block; events arrive in order and end with exactly one `Finished` or `Failed`, or the
/// channel closes, which the server reports as a failure. The channel is bounded: when a slow client leaves it full,
/// the engine's side waits up to its own deadline and then cancels the sequence, so that no sequence holds KV for a
/// reader that does not read.
pub trait Engine: Send + Sync + 'static {
    /// Submits a request.
    ///
    /// # Errors
    /// Immediate refusals: a full queue, a request that can never fit, no engine.
    fn submit(&self, request: GenerateRequest) -> Result<Generation, RequestError>;

    /// The served model and its present limits.
    fn info(&self) -> EngineInfo;
}

/// The served model and its present limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineInfo {
    /// The name that clients put in `model`.
    pub model_id: String,
    /// Other names that clients may put there.
    pub aliases: Arc<[String]>,
    /// Longest sequence (prompt and output) that the model supports, in tokens.
    pub max_model_tokens: u32,
    /// Longest sequence that memory can hold now, the whole pool counted; `None` if unknown. It only bounds what is shown to clients:
    /// the engine itself refuses prompts that do not fit, and ends answers where memory does.
    pub capacity_tokens: Option<u32>,
    /// Number of token ids: all ids are below it.
    pub vocab_size: u32,
    /// Sequences that run at a time.
    pub slots: u32,
    /// Whether requests are accepted now.
    pub ready: bool,
}

impl EngineInfo {
    /// All names of the model, the first one first.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.model_id.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// Longest sequence that can be served now, in tokens.
    pub(crate) fn context_tokens(&self) -> u32 {
        self.max_model_tokens.min(self.capacity_tokens.unwrap_or(u32::MAX))
    }
}

/// An accepted request: its events, and the guard that cancels it when dropped.
#[derive(Debug)]
pub struct Generation {
    pub events: mpsc::Receiver<TokenEvent>,
    pub guard: CancelGuard,
}

/// Cancels a request when dropped, unless disarmed.
pub struct CancelGuard(Option<Box<dyn FnOnce() + Send>>);

impl CancelGuard {
    /// A guard that calls `cancel`, which must not block, at most once.
    pub fn new(cancel: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(cancel)))
    }

    /// Disarms the guard: the request has ended by itself.
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
