//! What handlers share.

use crate::{
    engine::{Engine, EngineInfo},
    error::ApiError,
    limits::Limits,
    params::{GenerationDefaults, Rules},
};
use axum::{
    body::{Body, Bytes, HttpBody as _},
    http::StatusCode,
};
use futures::StreamExt as _;
use lagoon_text::{ChatMessage, ChatTemplate, Tokenizer};
use metrics_exporter_prometheus::PrometheusHandle;
use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::time::timeout;

/// Everything that the router needs.
#[derive(Clone)]
pub struct ServerState {
    pub engine: Arc<dyn Engine>,
    pub tokenizer: Arc<Tokenizer>,
    /// `None` where the model has no template: chat is refused then.
    pub template: Option<Arc<ChatTemplate>>,
    pub defaults: GenerationDefaults,
    /// When set, every route but `/health` asks for `Authorization: Bearer KEY`.
    pub api_key: Option<String>,
    pub limits: Limits,
    /// Whether `return_logits` is allowed.
    pub expose_logits: bool,
    /// What `/metrics` shows: see [`crate::metrics::install`].
    pub metrics: PrometheusHandle,
    /// Seconds since 1970 at which the model was loaded, as `/v1/models` shows it.
    pub created: u64,
}

impl fmt::Debug for ServerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keyed = self.api_key.is_some();
        f.debug_struct("ServerState").field("info", &self.engine.info()).field("keyed", &keyed).finish_non_exhaustive()
    }
}

impl ServerState {
    pub(crate) fn rules(&self) -> Rules<'_> {
        let vocab_size = self.engine.info().vocab_size;
        Rules { limits: &self.limits, defaults: &self.defaults, expose_logits: self.expose_logits, vocab_size }
    }

    /// Reads a request's body within the limits.
    pub(crate) async fn body(&self, body: Body) -> Result<Bytes, ApiError> {
        read_body(body, self.limits.body_bytes_max, self.limits.body_deadline, |_| Ok(())).await
    }

    /// Checks that the model asked for is the one served. No name means that one.
    pub(crate) fn check_model(&self, model: Option<&str>) -> Result<EngineInfo, ApiError> {
        let info = self.engine.info();
        match model {
            Some(model) if model != info.model_id => Err(model_not_found(model, &info.model_id)),
            _ => Ok(info),
        }
    }

    /// The prompt for `messages`.
    pub(crate) fn render_chat(&self, messages: &[ChatMessage], open_answer: bool) -> Result<String, ApiError> {
        let Some(template) = &self.template else {
            return Err(ApiError::field("messages", "no_chat_template", ChatTemplate::MISSING));
        };
        let rendered = template.render(messages, open_answer, SystemTime::now());
        rendered.map_err(|error| ApiError::field("messages", "invalid_value", error.to_string()))
    }

    /// Tokens of `text`, computed off the runtime's threads: long prompts take a while.
    pub(crate) async fn encode(&self, text: String, special: bool) -> Result<Vec<u32>, ApiError> {
        let tokenizer = Arc::clone(&self.tokenizer);
        let encoded = blocking(move || tokenizer.encode(&text, special)).await?;
        encoded.map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_value"), error.to_string()))
    }

    /// Text of `ids`.
    pub(crate) async fn decode(&self, ids: Vec<u32>, skip_special: bool) -> Result<String, ApiError> {
        let tokenizer = Arc::clone(&self.tokenizer);
        blocking(move || tokenizer.decode(&ids, skip_special)).await
    }
}

/// Reads a request's body of at most `limit` bytes within `deadline`; `charge` sees the size of every piece before it is kept, and
/// may refuse it.
///
/// # Errors
/// 413, 408, what `charge` says, or 400 if it breaks off.
pub async fn read_body(
    body: Body,
    limit: usize,
    deadline: Duration,
    charge: impl FnMut(usize) -> Result<(), ApiError>,
) -> Result<Bytes, ApiError> {
    timeout(deadline, collect(body, limit, charge)).await.unwrap_or_else(|_elapsed| {
        let message = format!("the request body took longer than {} s", deadline.as_secs());
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, Some("request_timeout"), message))
    })
}

async fn collect(
    body: Body,
    limit: usize,
    mut charge: impl FnMut(usize) -> Result<(), ApiError>,
) -> Result<Bytes, ApiError> {
    let too_large = || {
        let message = format!("the request body is larger than {limit} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Some("request_too_large"), message)
    };
    // Refused by its Content-Length, before it is sent.
    if usize::try_from(body.size_hint().lower()).map_or(true, |bytes| bytes > limit) {
        return Err(too_large());
    }
    let mut pieces = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| {
            let message = format!("the request body could not be read: {error}");
            ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_body"), message)
        })?;
        if piece.len() > limit - bytes.len() {
            return Err(too_large());
        }
        charge(piece.len())?;
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.into())
}

pub(crate) fn model_not_found(model: &str, served: &str) -> ApiError {
    let message = format!("the model `{model}` does not exist; this server serves `{served}`");
    ApiError {
        param: Some("model".to_owned()),
        ..ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), message)
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::internal(format!("the tokenizer panicked: {error}")))
}

/// Seconds since 1970.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
