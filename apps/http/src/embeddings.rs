//! `POST /v1/embeddings`.
//!
//! Every input is a request of its own to the engine, at most [`EMBEDDINGS_IN_FLIGHT_MAX`] of them at a time; the first one that
//! fails ends the others.

use crate::{
    engine::Generation,
    error::ApiError,
    fields::{Fields, Neutral, required},
    frames::add_headers,
    generations::{Longest, Prompt, prompt_list, wants_journal},
    keys::Caller,
    limits::{EMBEDDING_INPUTS_MAX, EMBEDDING_NUMBERS_MAX, EMBEDDINGS_IN_FLIGHT_MAX},
    metrics,
    options::{Truncation, salt, take_cache_salt, take_priority},
    reply::Usage,
    state::{ServerState, unix_seconds},
    text_jobs::Asker,
    token_ids::check_vocabulary,
};
use axum::{
    body::Bytes,
    extract::{Request, State},
    http::header,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use futures::{StreamExt, TryStreamExt, stream};
use lagoon_types::{CachedTokens, GenerateRequest, Pooling, RequestOptions, SamplingParams, TokenEvent};
use rand::Rng;
use schemars::JsonSchema;
use serde::Serialize;
use std::{sync::Arc, time::Instant};
use tokio::time::timeout;

/// Fields of `/v1/embeddings` that Lagoon does not implement, with the values that change nothing.
pub(crate) const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("user", Neutral::Any),
    ("metadata", Neutral::Any),
    ("request_id", Neutral::Any),
    ("keep_alive", Neutral::Any),
    ("embed_dtype", Neutral::Text(&["float32"])),
    ("endianness", Neutral::Text(&["native", "little"])),
    ("truncation_side", Neutral::Text(&["left"])),
    ("mm_processor_kwargs", Neutral::Null),
    ("input_type", Neutral::Null),
    ("messages", Neutral::Null),
    ("chat_template", Neutral::Null),
    ("chat_template_kwargs", Neutral::Empty),
    ("add_generation_prompt", Neutral::Bool(false)),
    ("continue_final_message", Neutral::Bool(false)),
    ("softmax", Neutral::Null),
    ("bytes_only", Neutral::Bool(false)),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Float,
    Base64,
}

impl Encoding {
    fn of(self, numbers: Vec<f32>) -> Numbers {
        match self {
            Self::Float => Numbers::Float(numbers),
            Self::Base64 => {
                Numbers::Base64(STANDARD.encode(numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()))
            }
        }
    }
}

/// A request's inputs in tokens, and what is wanted of their embeddings.
#[derive(Debug)]
pub(crate) struct Ask {
    inputs: Vec<Vec<u32>>,
    encoding: Encoding,
    dimensions: usize,
    normalised: bool,
    pooling: Pooling,
    priority: i32,
    salt: Arc<str>,
    model: String,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct EmbeddingList {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<Embedding>,
    usage: Usage,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Numbers,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
enum Numbers {
    Float(Vec<f32>),
    /// Little-endian f32.
    Base64(String),
}

/// `POST /v1/embeddings`.
pub(crate) async fn embeddings(
    State(state): State<Arc<ServerState>>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let journal = wants_journal(request.headers());
    let tenant = caller.clone();
    let ask = state.with_body(request, move |state, body, asker| ask_of(state, body, tenant.tenant(), asker)).await?;
    let list = answer(&state, ask, &caller).await?;
    let body = serde_json::to_vec(&list).expect("embeddings serialise: numbers are finite");
    let mut response = ([(header::CONTENT_TYPE, "application/json")], body).into_response();
    if journal {
        add_headers(&mut response, list.usage.total_tokens, &caller);
    }
    Ok(response)
}

pub(crate) fn ask_of(state: &ServerState, body: Bytes, tenant: &str, asker: &Asker<'_>) -> Result<Ask, ApiError> {
    let mut fields = Fields::parse(&body)?;
    let rules = &state.embeddings;
    let pooling = rules.pooling.clone().map_err(unavailable)?;
    let info = state.check_model(fields.string("model")?.as_deref())?;
    let encoding = take_encoding(&mut fields)?;
    let dimensions = fields.u32("dimensions", (1, rules.dimensions))?.unwrap_or(rules.dimensions) as usize;
    let normalize = fields.optional_bool("normalize")?;
    let normalised = fields.optional_bool("use_activation")?.or(normalize).unwrap_or(rules.normalised);
    let special = fields.bool("add_special_tokens", true)?;
    let truncation = Truncation::take(&mut fields)?;
    let priority = take_priority(&mut fields)?;
    let salt = salt(tenant, &take_cache_salt(&mut fields)?).into();
    let input = required(&mut fields, "input")?;
    fields.neutral(UNSUPPORTED)?;
    fields.finish()?;

    let longest = Longest { prompt: info.max_model_tokens, answer: 0, truncates: truncation.truncates() };
    let list = prompt_list("input", input, EMBEDDING_INPUTS_MAX, longest)?;
    drop(body);
    if list.len() * dimensions > EMBEDDING_NUMBERS_MAX {
        let (inputs, most) = (list.len(), EMBEDDING_NUMBERS_MAX / dimensions);
        let message = format!(
            "the field `input` has {inputs} texts, but at most {most} of {dimensions} numbers are answered at once\n\
             hint: send it in parts, or ask for fewer `dimensions`"
        );
        return Err(ApiError::field("input", "invalid_value", message));
    }
    let mut inputs = Vec::with_capacity(list.len());
    for prompt in list {
        let mut tokens = match prompt {
            Prompt::Text(text) => state.encode(&text, special, asker)?,
            Prompt::Tokens(ids) => ids,
        };
        truncation.apply(&mut tokens, info.max_model_tokens)?;
        if tokens.is_empty() {
            return Err(ApiError::field("input", "invalid_value", "the field `input` has a text without tokens"));
        }
        check_vocabulary("input", &tokens, info.vocab_size)?;
        inputs.push(tokens);
    }
    Ok(Ask { inputs, encoding, dimensions, normalised, pooling, priority, salt, model: info.model_id })
}

fn unavailable(why: String) -> ApiError {
    let message = format!("this model has no embeddings here: {why}");
    ApiError::new(axum::http::StatusCode::BAD_REQUEST, Some("unsupported_model"), message)
}

fn take_encoding(fields: &mut Fields<'_>) -> Result<Encoding, ApiError> {
    match fields.string("encoding_format")?.as_deref() {
        None | Some("float") => Ok(Encoding::Float),
        Some("base64") => Ok(Encoding::Base64),
        Some(_) => {
            let message = "the field `encoding_format` must be \"float\" or \"base64\"";
            Err(ApiError::field("encoding_format", "invalid_value", message))
        }
    }
}

async fn answer(state: &ServerState, ask: Ask, caller: &Caller) -> Result<EmbeddingList, ApiError> {
    let prompt_tokens = ask.inputs.iter().map(Vec::len).sum();
    let Ask { inputs, encoding, dimensions, normalised, pooling, priority, salt, model } = ask;
    caller.record().begins(&model, prompt_tokens);
    let options = RequestOptions { priority, cache_salt: salt, embedding: Some(pooling), ..RequestOptions::default() };
    // Shaped one by one: the bound of a response counts the numbers that are asked for, not those of whole hidden states.
    let embed = async |prompt: Vec<u32>| {
        let (cached, hidden) = embed(state, caller, prompt, options.clone()).await?;
        Ok::<_, ApiError>((cached, encoding.of(shape(hidden, dimensions, normalised)?)))
    };
    let embedded: Vec<_> = stream::iter(inputs).map(embed).buffered(EMBEDDINGS_IN_FLIGHT_MAX).try_collect().await?;
    embedded.iter().for_each(|(cached, _)| caller.record().prompt(*cached, 0));
    caller.record().finished("stop");
    let mut cached = CachedTokens::default();
    embedded.iter().for_each(|(of, _)| cached += *of);
    let embedding = |(index, (_, embedding))| Embedding { object: "embedding", index, embedding };
    let data = embedded.into_iter().enumerate().map(embedding).collect();
    let prompt_tokens_details = cached.into();
    Ok(EmbeddingList {
        id: format!("embd-{:032x}", rand::rng().random::<u128>()),
        object: "list",
        created: unix_seconds(),
        model,
        data,
        usage: Usage { prompt_tokens, completion_tokens: 0, total_tokens: prompt_tokens, prompt_tokens_details },
    })
}

/// The first `dimensions` numbers of a hidden state, of length 1 if `normalised`.
fn shape(mut hidden: Vec<f32>, dimensions: usize, normalised: bool) -> Result<Vec<f32>, ApiError> {
    hidden.truncate(dimensions);
    hidden.shrink_to_fit();
    let length = hidden.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if !length.is_finite() {
        return Err(ApiError::internal("the model's hidden state is not finite"));
    }
    if normalised {
        // As torch: a vector of zeros stays one.
        let length = length.max(1e-12);
        #[allow(clippy::cast_possible_truncation, reason = "rounding to f32 is intended")]
        hidden.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    Ok(hidden)
}

/// One prompt's cached tokens and pooled hidden state. Dropping the future cancels the request.
async fn embed(
    state: &ServerState,
    caller: &Caller,
    prompt: Vec<u32>,
    options: RequestOptions,
) -> Result<(CachedTokens, Vec<f32>), ApiError> {
    let tokens = prompt.len();
    let request = GenerateRequest {
        prompt,
        answered: 0,
        max_tokens: 0,
        sampling: SamplingParams::default(),
        min_tokens: 0,
        stop_ids: Vec::new(),
        return_logits: false,
        options,
    };
    let refused = |error| ApiError::from_request_error(&error, state.limits.retry_after_s);
    let generation = state.engine.submit(request).map_err(refused)?;
    metrics::prompt_tokens(tokens);
    caller.charge(tokens as u64);
    let mut running = Running::new(generation);
    let deadline = state.limits.first_token_deadline;
    let result = timeout(deadline, running.embedding()).await.unwrap_or_else(|_elapsed| {
        Err(ApiError::unavailable(format!("an embedding took longer than {} s", deadline.as_secs())))
    });
    running.end(if result.is_ok() { metrics::Outcome::Stop } else { metrics::Outcome::Failed });
    result.map_err(|mut error| {
        error.retry_after_s = error.retry_after_s.map(|_| state.limits.retry_after_s);
        error
    })
}

/// A request to the engine that is counted until it ends.
struct Running(Option<Generation>, Instant);

impl Running {
    fn new(generation: Generation) -> Self {
        metrics::sequence_started();
        Self(Some(generation), Instant::now())
    }

    /// Cached tokens, and the pooled hidden state.
    async fn embedding(&mut self) -> Result<(CachedTokens, Vec<f32>), ApiError> {
        let (mut cached, mut embedding) = (CachedTokens::default(), None);
        let dropped = || ApiError::unavailable("the engine dropped the request");
        let generation = self.0.as_mut().ok_or_else(dropped)?;
        loop {
            match generation.events.recv().await.ok_or_else(dropped)? {
                TokenEvent::Prompt { cached: found, .. } => cached = found,
                TokenEvent::Embedding { hidden } => embedding = Some(hidden),
                TokenEvent::Token { .. } => {}
                TokenEvent::Finished { .. } => {
                    generation.guard.disarm();
                    let missing = || ApiError::internal("the engine ended a request without its embedding");
                    return embedding.map(|hidden| (cached, hidden)).ok_or_else(missing);
                }
                TokenEvent::Failed(error) => {
                    generation.guard.disarm();
                    return Err(ApiError::from_request_error(&error, 0));
                }
            }
        }
    }

    fn end(&mut self, outcome: metrics::Outcome) {
        if self.0.take().is_some() {
            metrics::sequence_ended(outcome, self.1.elapsed());
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end(metrics::Outcome::Cancelled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_embedding_takes_the_memory_of_its_numbers_only() {
        let shaped = shape(vec![1.0; 4096], 8, false).unwrap();
        assert!(shaped.len() == 8 && shaped.capacity() < 4096, "{}", shaped.capacity());
    }
}
