//! `POST /v1/chat/completions` and `POST /v1/completions`.

use crate::{
    answer::{Answer, Progress},
    engine::{CancelGuard, EngineInfo, Generation},
    error::ApiError,
    fields::{Fields, Neutral, wrong_type},
    generate::{Pieces, Sequence, TextRules, pieces},
    journal::{self, Began, Said},
    messages, metrics,
    params::{Params, check_vocabulary, required, token_ids, too_many},
    reply::{Endpoint, token_text},
    state::{ServerState, unix_seconds},
};
use axum::{body::Body, extract::State, http::HeaderMap, response::Response};
use lagoon_text::IncrementalDetokenizer;
use lagoon_types::{FinishReason, GenerateRequest, TokenEvent};
use rand::Rng;
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::mpsc;

/// What vLLM and OpenAI generate for a completion that names no length.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;

const CHAT_UNSUPPORTED: &[(&str, Neutral)] = &[
    ("tools", Neutral::Empty),
    ("tool_choice", Neutral::Text(&["none", "auto"])),
    ("parallel_tool_calls", Neutral::Any),
    ("functions", Neutral::Empty),
    ("function_call", Neutral::Text(&["none", "auto"])),
    ("modalities", Neutral::TextModality),
    ("audio", Neutral::Null),
    ("store", Neutral::Bool(false)),
    ("service_tier", Neutral::Text(&["auto", "default"])),
    ("reasoning_effort", Neutral::Null),
    ("verbosity", Neutral::Null),
    ("prediction", Neutral::Null),
    ("web_search_options", Neutral::Null),
    ("chat_template", Neutral::Null),
    ("chat_template_kwargs", Neutral::Empty),
    ("continue_final_message", Neutral::Bool(false)),
    ("add_special_tokens", Neutral::Bool(false)),
    ("echo", Neutral::Bool(false)),
];

const COMPLETION_UNSUPPORTED: &[(&str, Neutral)] = &[("echo", Neutral::Bool(false)), ("suffix", Neutral::Empty)];

/// `POST /v1/chat/completions`.
pub(crate) async fn chat(
    State(state): State<Arc<ServerState>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let mut fields = Fields::parse(&state.body(body).await?)?;
    let mut params = Params::take(&mut fields, state.rules())?;
    let messages = messages::take(&mut fields)?;
    let open_answer = fields.bool("add_generation_prompt", true)?;
    let logprobs = fields.bool("logprobs", false)?;
    let top = fields.u32("top_logprobs", (0, state.limits.logprobs_max))?;
    if top.is_some_and(|top| top > 0) && !logprobs {
        let message = "the field `top_logprobs` needs `logprobs` to be true";
        return Err(ApiError::field("top_logprobs", "invalid_value", message));
    }
    params.sampling.logprobs = logprobs.then(|| top.unwrap_or(0));
    fields.neutral(CHAT_UNSUPPORTED)?;
    fields.finish()?;
    let info = state.check_model(params.model.as_deref())?;

    let prompt = state.render_chat(&messages, open_answer)?;
    // Chat templates write the begin token themselves.
    let prompt = state.encode(prompt, false).await?;
    let limit = info.max_model_tokens.min(info.capacity_tokens.unwrap_or(u32::MAX));
    let room = limit.saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX)).max(1);
    let max_tokens = params.max_tokens.unwrap_or(room);
    let ask = Ask { endpoint: Endpoint::Chat, prompts: vec![prompt], max_tokens, journal: wants_journal(&headers) };
    generate(&state, ask, params, info).await
}

/// `POST /v1/completions`.
pub(crate) async fn completions(
    State(state): State<Arc<ServerState>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let mut fields = Fields::parse(&state.body(body).await?)?;
    let mut params = Params::take(&mut fields, state.rules())?;
    params.sampling.logprobs = fields.u32("logprobs", (0, state.limits.logprobs_max))?;
    let special = fields.bool("add_special_tokens", true)?;
    let prompts = required(&mut fields, "prompt")?;
    fields.neutral(COMPLETION_UNSUPPORTED)?;
    fields.finish()?;
    let info = state.check_model(params.model.as_deref())?;

    let prompts = prompt_list(prompts)?;
    if prompts.len() > state.limits.sequences_max {
        return Err(too_many("prompt", prompts.len(), state.limits.sequences_max));
    }
    let mut tokens = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        tokens.push(match prompt {
            Prompt::Text(text) => state.encode(text, special).await?,
            Prompt::Tokens(ids) => ids,
        });
    }
    let max_tokens = params.max_tokens.unwrap_or(COMPLETION_TOKENS_DEFAULT);
    let ask = Ask { endpoint: Endpoint::Completions, prompts: tokens, max_tokens, journal: wants_journal(&headers) };
    generate(&state, ask, params, info).await
}

/// One prompt of a completion request.
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// The four shapes of `prompt`: text, token ids, a list of texts, a list of lists of token ids.
fn prompt_list(value: Value) -> Result<Vec<Prompt>, ApiError> {
    const EXPECTED: &str = "a string, a list of strings, a list of token ids or a list of such lists";
    let items = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(items) => items,
        other => return Err(wrong_type("prompt", EXPECTED, &other)),
    };
    match items.first() {
        None => Err(ApiError::field("prompt", "invalid_value", "the field `prompt` must not be empty")),
        Some(Value::Number(_)) => Ok(vec![Prompt::Tokens(token_ids("prompt", &Value::Array(items))?)]),
        Some(_) => items
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(Prompt::Text(text)),
                Value::Array(_) => Ok(Prompt::Tokens(token_ids("prompt", &item)?)),
                other => Err(wrong_type("prompt", EXPECTED, &other)),
            })
            .collect(),
    }
}

fn wants_journal(headers: &HeaderMap) -> bool {
    headers.contains_key(journal::HEADER)
}

/// What is asked for, in tokens.
struct Ask {
    endpoint: Endpoint,
    prompts: Vec<Vec<u32>>,
    /// Of one sequence.
    max_tokens: u32,
    journal: bool,
}

/// Submits all sequences and answers.
async fn generate(state: &ServerState, ask: Ask, params: Params, info: EngineInfo) -> Result<Response, ApiError> {
    let name = if ask.endpoint == Endpoint::Chat { "messages" } else { "prompt" };
    let sequences = ask.prompts.len() * params.n;
    if sequences > state.limits.sequences_max {
        return Err(too_many_sequences(sequences, state.limits.sequences_max));
    }
    for prompt in &ask.prompts {
        if prompt.is_empty() {
            return Err(ApiError::field(name, "invalid_value", format!("the field `{name}` has no tokens")));
        }
        check_vocabulary(name, prompt, info.vocab_size)?;
    }
    let mut said = params.resume.as_ref().map(|resume| resume.sequences.clone()).unwrap_or_default();
    if said.len() > sequences {
        return Err(too_many(journal::FIELD, said.len(), sequences));
    }
    said.resize(sequences, Said::default());
    let running = submit(state, &params, &ask, &said, info.max_model_tokens)?;
    let stream = params.stream;
    let answer = answer(state, ask, params, &said, info.model_id);
    if stream { answer.stream(running, state.limits.headers_hold).await } else { answer.whole(running).await }
}

fn too_many_sequences(sequences: usize, limit: usize) -> ApiError {
    let message = format!("the field `n` asks for {sequences} sequences over all prompts, but the limit is {limit}");
    ApiError::field("n", "invalid_value", message)
}

/// All or nothing: when one sequence is refused, those before it are cancelled as they drop. `said` was said of each
/// before, by another server.
fn submit(
    state: &ServerState,
    params: &Params,
    ask: &Ask,
    said: &[Said],
    max_model_tokens: u32,
) -> Result<Pieces, ApiError> {
    let mut sequences = Vec::with_capacity(said.len());
    for (index, said) in said.iter().enumerate().filter(|(_, said)| !said.finished) {
        let prompt = &ask.prompts[index / params.n];
        let mut rules = TextRules {
            decoder: IncrementalDetokenizer::new(Arc::clone(&state.tokenizer), params.skip_special),
            stop_strings: params.stop_strings.clone(),
            stop_ids: params.stop_ids.clone(),
            every_token: params.return_token_ids,
        };
        rules.catch_up(&said.tokens);
        let room = (max_model_tokens as usize).saturating_sub(prompt.len()).min(ask.max_tokens as usize);
        let generation = match rules.is_over(&said.tokens, room).filter(|_| !said.tokens.is_empty()) {
            Some(reason) => ended(reason),
            None => {
                let request = GenerateRequest {
                    prompt: [&prompt[..], &said.tokens[..]].concat(),
                    answered: u32::try_from(said.tokens.len()).unwrap_or(u32::MAX),
                    max_tokens: ask.max_tokens,
                    sampling: params.sampling_of(index % params.n),
                    stop_ids: params.stop_ids.clone(),
                    return_logits: params.return_logits,
                };
                let submitted = state.engine.submit(request);
                submitted.map_err(|error| ApiError::from_request_error(&error, state.limits.retry_after_s))?
            }
        };
        sequences.push(Sequence::new(index, generation, rules, &state.limits));
    }
    metrics::prompt_tokens(ask.prompts.iter().map(Vec::len).sum());
    Ok(pieces(sequences))
}

/// A sequence of which all was said but that it ended.
fn ended(reason: FinishReason) -> Generation {
    let (sender, events) = mpsc::channel(1);
    let finished = TokenEvent::Finished { reason, prompt_tokens: 0, completion_tokens: 0 };
    sender.try_send(finished).expect("an empty channel has room");
    Generation { events, guard: CancelGuard::new(|| {}) }
}

fn answer(state: &ServerState, ask: Ask, params: Params, said: &[Said], model: String) -> Answer {
    let prefix = if ask.endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
    let began = params.resume.map_or_else(
        || Began {
            id: format!("{prefix}-{:032x}", rand::rng().random::<u128>()),
            created: unix_seconds(),
            seed: params.sampling.seed,
        },
        |resume| resume.began,
    );
    let logprobs = params.sampling.logprobs.is_some();
    let characters = |id: &u32| token_text(&state.tokenizer, *id).chars().count();
    let offset = |said: &Said| if logprobs { said.tokens.iter().map(characters).sum() } else { 0 };
    Answer {
        endpoint: ask.endpoint,
        journal: ask.journal.then(|| began.clone()),
        id: began.id,
        model,
        created: began.created,
        tokenizer: Arc::clone(&state.tokenizer),
        progress: said.iter().map(|said| Progress::after(said, offset(said))).collect(),
        prompts: ask.prompts,
        n: params.n,
        include_usage: params.include_usage,
        return_token_ids: params.return_token_ids,
        logprobs,
        logits: params.return_logits,
    }
}
