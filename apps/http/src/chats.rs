//! `POST /v1/chat/completions`, and vLLM's `POST /v1/chat/completions/batch`: several conversations in one request.

use crate::{
    constraints,
    engine::EngineInfo,
    error::ApiError,
    fields::{Fields, Neutral, required, too_many, wrong_type},
    generations::{Ask, Prepared, Ready, generate, read},
    journal,
    json::Kind,
    keys::Caller,
    messages,
    options::check_max_tokens,
    params::Params,
    reply::Endpoint,
    state::ServerState,
    text_jobs::Asker,
    tools::ToolFields,
};
use axum::{
    body::Bytes,
    extract::{Request, State},
    http::StatusCode,
    response::Response,
};
use lagoon_text::ChatMessage;
use std::sync::Arc;

const MESSAGES: &str = "messages";

pub(crate) const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("functions", Neutral::Empty),
    ("function_call", Neutral::Text(&["none", "auto"])),
    ("modalities", Neutral::TextModality),
    ("audio", Neutral::Null),
    ("store", Neutral::Bool(false)),
    ("service_tier", Neutral::Text(&["auto", "default"])),
    ("verbosity", Neutral::Text(&["medium"])),
    ("prediction", Neutral::Null),
    ("web_search_options", Neutral::Null),
    ("chat_template", Neutral::Null),
    ("continue_final_message", Neutral::Bool(false)),
    ("add_special_tokens", Neutral::Bool(false)),
    ("echo", Neutral::Bool(false)),
    // Reasoning is always a field of its own.
    ("include_reasoning", Neutral::Bool(true)),
    ("separate_reasoning", Neutral::Bool(true)),
    ("stream_reasoning", Neutral::Bool(true)),
    ("documents", Neutral::Empty),
    ("mm_processor_kwargs", Neutral::Empty),
    ("media_io_kwargs", Neutral::Empty),
    ("moderation", Neutral::Null),
];

/// Fields of a chat that a batch takes with values that change nothing.
pub(crate) const UNSUPPORTED_IN_BATCH: &[(&str, Neutral)] = &[
    ("stream", Neutral::Bool(false)),
    ("stream_options", Neutral::Null),
    ("n", Neutral::Number(1.0)),
    ("tools", Neutral::Empty),
    ("tool_choice", Neutral::Text(&["none", "auto"])),
    ("parallel_tool_calls", Neutral::Any),
    (journal::FIELD, Neutral::Null),
];

/// `POST /v1/chat/completions`.
pub(crate) async fn chat(
    State(state): State<Arc<ServerState>>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    generate(&state, read(&state, caller, request, chat_prompt).await?).await
}

pub(crate) fn chat_prompt(
    state: &ServerState,
    body: Bytes,
    journal: bool,
    caller: Caller,
    asker: &Asker<'_>,
) -> Result<Ready, ApiError> {
    let mut fields = Fields::parse(&body)?;
    let messages = messages::list(MESSAGES, required(&mut fields, MESSAGES)?)?;
    let chat = Chat::take(state, fields, asker)?;
    drop(body);
    let prompt = chat.prompt(state, messages, asker)?;
    Ok(chat.ready(Endpoint::Chat, vec![prompt], journal, caller))
}

/// `POST /v1/chat/completions/batch`.
pub(crate) async fn batch(
    State(state): State<Arc<ServerState>>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    generate(&state, read(&state, caller, request, batch_prompts).await?).await
}

pub(crate) fn batch_prompts(
    state: &ServerState,
    body: Bytes,
    journal: bool,
    caller: Caller,
    asker: &Asker<'_>,
) -> Result<Ready, ApiError> {
    let mut fields = Fields::parse(&body)?;
    let conversations = required(&mut fields, MESSAGES)?;
    if conversations.kind() != Kind::List {
        return Err(wrong_type(MESSAGES, "a list of conversations", conversations));
    }
    let (count, limit) = (conversations.items().count(), state.limits.sequences_max);
    if count == 0 {
        return Err(ApiError::field(MESSAGES, "invalid_value", "the field `messages` must not be empty"));
    }
    if count > limit {
        return Err(too_many(MESSAGES, count, limit));
    }
    fields.neutral(UNSUPPORTED_IN_BATCH)?;
    let chat = Chat::take(state, fields, asker)?;
    let mut prompts: Vec<Prepared> = Vec::with_capacity(count);
    for (index, conversation) in conversations.items().enumerate() {
        let name = format!("{MESSAGES}[{index}]");
        let messages = messages::list(&name, conversation)?;
        let mut prompt = chat.prompt(state, messages, asker).map_err(|error| of_conversation(name, error))?;
        // Equal constraints are in memory once.
        if let Some(last) = prompts.last().filter(|last| last.constraint == prompt.constraint) {
            prompt.constraint.clone_from(&last.constraint);
        }
        prompts.push(prompt);
    }
    drop(body);
    Ok(chat.ready(Endpoint::Batch, prompts, journal, caller))
}

/// The refusal of a request for its conversation `name`.
fn of_conversation(name: String, error: ApiError) -> ApiError {
    if error.status != StatusCode::BAD_REQUEST || error.param.as_deref().is_some_and(|param| param != MESSAGES) {
        return error;
    }
    let message = format!("the conversation `{name}`: {}", error.message);
    ApiError { param: Some(name), message, ..error }
}

/// What a request asks for, beside its messages.
struct Chat {
    params: Params,
    tools: ToolFields,
    open_answer: bool,
    info: EngineInfo,
}

impl Chat {
    /// Takes all fields but the messages.
    fn take(state: &ServerState, mut fields: Fields<'_>, asker: &Asker<'_>) -> Result<Self, ApiError> {
        // As llama.cpp's web page says that nothing limits the answer.
        fields.drop_number("max_tokens", -1);
        fields.neutral(&[("timings_per_token", Neutral::Any)])?;
        let mut params = Params::take(&mut fields, state.rules())?;
        let open_answer = fields.bool("add_generation_prompt", true)?;
        let tools = ToolFields::take(&mut fields, state.template.as_deref())?;
        let logprobs = fields.bool("logprobs", false)?;
        let top = fields.u32("top_logprobs", (0, state.limits.logprobs_max))?;
        if top.is_some_and(|top| top > 0) && !logprobs {
            let message = "the field `top_logprobs` needs `logprobs` to be true";
            return Err(ApiError::field("top_logprobs", "invalid_value", message));
        }
        params.sampling.logprobs = logprobs.then(|| top.unwrap_or(0));
        fields.neutral(UNSUPPORTED)?;
        fields.finish()?;
        check_max_tokens(params.max_tokens, false)?;
        let info = state.check_model(params.model.as_deref())?;
        params.sampling.bad_words = params.options.encode_bad_words(state, asker)?.into();
        Ok(Self { params, tools, open_answer, info })
    }

    /// The prompt of a conversation.
    fn prompt(&self, state: &ServerState, messages: Vec<ChatMessage>, asker: &Asker<'_>) -> Result<Prepared, ApiError> {
        let Self { params, tools, open_answer, info } = self;
        asker.check()?;
        let text = state.render_chat(&messages, &tools.rendering(*open_answer))?;
        drop(messages);
        let parser = tools.parser(state.formats, &text);
        asker.check()?;
        let constraint = constraints::of_chat(state, params.form.clone(), tools, state.formats, &text)?;
        // Chat templates write the beginning-of-sequence token themselves.
        let mut tokens = state.encode(&text, false, asker)?;
        let room = info.max_model_tokens.saturating_sub(params.max_tokens.unwrap_or(1));
        params.options.truncate(&mut tokens, room)?;
        // The engine ends the answer earlier where the pool's memory does.
        let room = info.max_model_tokens.saturating_sub(u32::try_from(tokens.len()).unwrap_or(u32::MAX)).max(1);
        Ok(Prepared { tokens, max_tokens: params.max_tokens.unwrap_or(room), parser, constraint })
    }

    fn ready(self, endpoint: Endpoint, prompts: Vec<Prepared>, journal: bool, caller: Caller) -> Ready {
        let Self { params, info, .. } = self;
        Ready { ask: Ask { endpoint, prompts, echo: None, journal, caller }, params, info }
    }
}
