//! State shared by all handlers.

use crate::{
    bodies::{Bodies, Holder, Share, check_encoding},
    engine::{Engine, EngineInfo},
    error::ApiError,
    limits::Limits,
    metrics::Compat,
    rules::{EmbeddingRules, GenerationDefaults, Rules},
    text_jobs::{Asker, TextJobs},
};
use axum::{body::Bytes, extract::Request, http::StatusCode};
use lagoon_grammar::Grammars;
use lagoon_text::{ChatMessage, ChatTemplate, Rendering, Tokenizer, parse::Formats};
use lagoon_types::CONTEXT;
use metrics_exporter_prometheus::PrometheusHandle;
use std::{
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// State shared by all handlers.
#[derive(Clone)]
pub struct ServerState {
    pub engine: Arc<dyn Engine>,
    pub tokenizer: Arc<Tokenizer>,
    /// Checks the grammars of requests.
    pub grammars: Grammars,
    /// `None` if the model has no template: chat is refused.
    pub template: Option<Arc<ChatTemplate>>,
    /// How the model writes tool calls and reasoning in chats.
    pub formats: Formats,
    pub defaults: GenerationDefaults,
    pub embeddings: EmbeddingRules,
    pub limits: Limits,
    /// Memory budget for request bodies.
    pub bodies: Bodies,
    pub text_jobs: TextJobs,
    /// Whether `return_logits` is allowed.
    pub expose_logits: bool,
    /// Renders `/metrics`: see [`crate::metrics::install`].
    pub metrics: PrometheusHandle,
    /// Whose names `/metrics` has, too.
    pub compat: Option<Compat>,
    /// Seconds since 1970 at which the model was loaded, as `/v1/models` shows it.
    pub created: u64,
}

impl fmt::Debug for ServerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerState").field("info", &self.engine.info()).finish_non_exhaustive()
    }
}

impl ServerState {
    pub(crate) fn rules(&self) -> Rules<'_> {
        let EngineInfo { vocab_size, max_model_tokens, .. } = self.engine.info();
        let (limits, defaults, expose_logits) = (&self.limits, &self.defaults, self.expose_logits);
        Rules { limits, defaults, expose_logits, vocab_size, max_model_tokens }
    }

    /// Reads a request's body within the limits, and runs `work` on it off the runtime's threads.
    pub(crate) async fn with_body<T: Send + 'static>(
        self: &Arc<Self>,
        request: Request,
        work: impl FnOnce(&Self, Bytes, &Asker<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (head, body) = request.into_parts();
        check_encoding(&head.headers)?;
        let holder = Holder::of(&head.extensions);
        let Limits { body_bytes_max, body_deadline, .. } = self.limits;
        let (body, share): (Bytes, Share) = self.bodies.read(holder, body, body_bytes_max, body_deadline).await?;
        let (state, bytes) = (Arc::clone(self), body.len());
        let work = move |asker: &Asker<'_>| {
            asker.check()?;
            let result = work(&state, body, asker);
            drop(share);
            result
        };
        self.text_jobs.run(bytes, work).await
    }

    /// Checks that the requested model is the served one; none means the served one. The result has the name that was asked for.
    pub(crate) fn check_model(&self, model: Option<&str>) -> Result<EngineInfo, ApiError> {
        let info = self.engine.info();
        match model {
            Some(model) if info.names().any(|name| name == model) => {
                Ok(EngineInfo { model_id: model.to_owned(), ..info })
            }
            Some(model) => Err(model_not_found(model, &info)),
            None => Ok(info),
        }
    }

    /// The prompt for `messages`.
    pub(crate) fn render_chat(&self, messages: &[ChatMessage], rendering: &Rendering) -> Result<String, ApiError> {
        let Some(template) = &self.template else {
            return Err(ApiError::field("messages", "no_chat_template", ChatTemplate::MISSING));
        };
        let rendered = template.render_with(messages, rendering, SystemTime::now());
        rendered.map_err(|error| ApiError::field("messages", "invalid_value", error.to_string()))
    }

    /// Tokenises `text`; refuses it unread if it has more bytes than any prompt of the model.
    pub(crate) fn encode(&self, text: &str, special: bool, asker: &Asker<'_>) -> Result<Vec<u32>, ApiError> {
        asker.check()?;
        let (bytes, limit) = (text.len(), self.engine.info().max_model_tokens);
        let (tokens, bytes_max) = (self.tokenizer.tokens_min(bytes), self.tokenizer.text_bytes_max(limit as usize));
        let refusal = match (tokens > limit as usize, bytes > bytes_max) {
            (true, _) => format!("which are {tokens} tokens or more, but {CONTEXT} is {limit} tokens"),
            (false, true) => format!("but at most {bytes_max} are tokenised where {CONTEXT} is {limit} tokens"),
            (false, false) => {
                let encoded = self.tokenizer.encode(text, special);
                let invalid = |message| ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_value"), message);
                return encoded.map_err(|error| invalid(error.to_string()));
            }
        };
        let message = format!("the prompt has {bytes} bytes, {refusal}\nhint: shorten the prompt");
        Err(ApiError::new(StatusCode::BAD_REQUEST, Some("context_length_exceeded"), message))
    }
}

pub(crate) fn model_not_found(model: &str, info: &EngineInfo) -> ApiError {
    let served: Vec<String> = info.names().map(|name| format!("`{name}`")).collect();
    let message = format!("the model `{model}` does not exist; this server serves {}", served.join(", "));
    ApiError {
        param: Some("model".to_owned()),
        ..ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), message)
    }
}

/// Seconds since 1970.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
