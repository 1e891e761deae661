//! `POST /tokenize` and `POST /detokenize`, in the shapes of vLLM and, with `content`, of llama.cpp.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, required, text},
    messages,
    state::ServerState,
    text_jobs::Asker,
    token_ids::{check_vocabulary, token_ids},
    tools::ToolFields,
};
use axum::{
    Json,
    body::Bytes,
    extract::{Request, State},
    http::StatusCode,
};
use lagoon_types::CONTEXT;
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// The tokens of a text in one of two shapes.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub(crate) enum Tokens {
    Tokenized(Tokenized),
    Content { tokens: Vec<u32> },
    Pieces { tokens: Vec<TokenPiece> },
}

/// A token with its text, or its bytes where they are no text.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TokenPiece {
    id: u32,
    piece: TokenText,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
enum TokenText {
    Text(String),
    Bytes(Vec<u8>),
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Detokenized {
    /// As vLLM names it, and as llama.cpp does.
    prompt: String,
    content: String,
}

/// `POST /tokenize`: tokenises a `prompt`, or `messages` through the chat template.
pub(crate) async fn tokenize(
    State(state): State<Arc<ServerState>>,
    request: Request,
) -> Result<Json<Tokens>, ApiError> {
    state.with_body(request, any_tokens_of).await.map(Json)
}

pub(crate) fn any_tokens_of(state: &ServerState, body: Bytes, asker: &Asker<'_>) -> Result<Tokens, ApiError> {
    let mut fields = Fields::parse(&body)?;
    match fields.take("content") {
        Some(content) => content_tokens(state, text("content", content)?, fields, asker),
        None => tokens_of(state, body, asker).map(Tokens::Tokenized),
    }
}

/// The tokens of `content`.
fn content_tokens(
    state: &ServerState,
    content: String,
    mut fields: Fields<'_>,
    asker: &Asker<'_>,
) -> Result<Tokens, ApiError> {
    let info = state.check_model(fields.string("model")?.as_deref())?;
    let special = fields.bool("add_special", false)?;
    let pieces = fields.bool("with_pieces", false)?;
    fields.neutral(&[("parse_special", Neutral::Bool(true))])?;
    fields.finish()?;
    let tokens = state.encode(&content, special, asker)?;
    if !pieces {
        return Ok(Tokens::Content { tokens });
    }
    check_context("the field `content`", tokens.len(), info.max_model_tokens)?;
    let piece = |id: u32| {
        let bytes = state.tokenizer.token_bytes(id);
        let piece = String::from_utf8(bytes).map_or_else(|bytes| TokenText::Bytes(bytes.into_bytes()), TokenText::Text);
        TokenPiece { id, piece }
    };
    Ok(Tokens::Pieces { tokens: tokens.into_iter().map(piece).collect() })
}

fn tokens_of(state: &ServerState, body: Bytes, asker: &Asker<'_>) -> Result<Tokenized, ApiError> {
    let mut fields = Fields::parse(&body)?;
    let info = state.check_model(fields.string("model")?.as_deref())?;
    let strings = fields.bool("return_token_strs", false)?;
    let prompt = fields.take("prompt");
    let chat = prompt.is_none();
    let special = fields.bool("add_special_tokens", !chat)?;
    let text = match prompt {
        Some(prompt) => text("prompt", prompt)?,
        None => {
            asker.check()?;
            chat_text(state, &mut fields)?
        }
    };
    fields.finish()?;
    drop(body);
    let tokens = state.encode(&text, special, asker)?;
    if strings {
        check_context("the prompt", tokens.len(), info.max_model_tokens)?;
    }
    // Tokens as the vocabulary spells them, as in vLLM.
    let spell = |id: &u32| state.tokenizer.token(*id).unwrap_or_default();
    let token_strs = strings.then(|| tokens.iter().map(spell).collect());
    Ok(Tokenized { count: tokens.len(), max_model_len: info.context_tokens(), tokens, token_strs })
}

/// The prompt of a chat, from the fields of a request.
pub(crate) fn chat_text(state: &ServerState, fields: &mut Fields<'_>) -> Result<String, ApiError> {
    let messages = messages::list("messages", required(fields, "messages")?)?;
    let open_answer = fields.bool("add_generation_prompt", true)?;
    fields.neutral(&[("continue_final_message", Neutral::Bool(false)), ("chat_template", Neutral::Null)])?;
    let tools = ToolFields::take(fields, state.template.as_deref())?;
    state.render_chat(&messages, &tools.rendering(open_answer))
}

/// Refuses more tokens than the model's context: their texts take many times the bytes of the request.
fn check_context(what: &str, count: usize, limit: u32) -> Result<(), ApiError> {
    if count <= limit as usize {
        return Ok(());
    }
    let message = format!("{what} has {count} tokens, but {CONTEXT} is {limit} tokens\nhint: send it in parts");
    Err(ApiError::new(StatusCode::BAD_REQUEST, Some("context_length_exceeded"), message))
}

/// `POST /detokenize`: keeps special tokens, so that tokenising again gives the same ids.
pub(crate) async fn detokenize(
    State(state): State<Arc<ServerState>>,
    request: Request,
) -> Result<Json<Detokenized>, ApiError> {
    state.with_body(request, |state, body, asker| text_of(state, &body, asker)).await.map(Json)
}

pub(crate) fn text_of(state: &ServerState, body: &[u8], asker: &Asker<'_>) -> Result<Detokenized, ApiError> {
    let mut fields = Fields::parse(body)?;
    let info = state.check_model(fields.string("model")?.as_deref())?;
    let limit = info.max_model_tokens;
    let (ids, count) = token_ids("tokens", required(&mut fields, "tokens")?, limit as usize)?;
    fields.finish()?;
    check_context("the field `tokens`", count, limit)?;
    check_vocabulary("tokens", &ids, info.vocab_size)?;
    asker.check()?;
    let prompt = state.tokenizer.decode(&ids, false);
    Ok(Detokenized { content: prompt.clone(), prompt })
}
