//! `POST /tokenize` and `POST /detokenize`, in vLLM's shapes.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, wrong_type},
    messages,
    params::{check_vocabulary, required, token_ids},
    state::ServerState,
};
use axum::{Json, body::Body, extract::State};
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

#[derive(Debug, Serialize)]
pub(crate) struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Detokenized {
    prompt: String,
}

/// `POST /tokenize`: of a `prompt`, or of `messages` through the chat template.
pub(crate) async fn tokenize(State(state): State<Arc<ServerState>>, body: Body) -> Result<Json<Tokenized>, ApiError> {
    let mut fields = Fields::parse(&state.body(body).await?)?;
    let info = state.check_model(fields.string("model")?.as_deref())?;
    let strings = fields.bool("return_token_strs", false)?;
    let prompt = fields.take("prompt");
    let chat = prompt.is_none();
    let special = fields.bool("add_special_tokens", !chat)?;
    let text = match prompt {
        Some(Value::String(text)) => text,
        Some(other) => return Err(wrong_type("prompt", "a string", &other)),
        None => {
            let messages = messages::take(&mut fields)?;
            let open_answer = fields.bool("add_generation_prompt", true)?;
            fields.neutral(&[
                ("continue_final_message", Neutral::Bool(false)),
                ("chat_template", Neutral::Null),
                ("chat_template_kwargs", Neutral::Empty),
                ("tools", Neutral::Empty),
            ])?;
            state.render_chat(&messages, open_answer)?
        }
    };
    fields.finish()?;
    let tokens = state.encode(text, special).await?;
    // The vocabulary's own spelling, as vLLM has it.
    let spell = |id: &u32| state.tokenizer.token(*id).unwrap_or_default();
    let token_strs = strings.then(|| tokens.iter().map(spell).collect());
    Ok(Json(Tokenized { count: tokens.len(), max_model_len: info.max_model_tokens, tokens, token_strs }))
}

/// `POST /detokenize`: special tokens are kept, so that tokenising again gives the same ids.
pub(crate) async fn detokenize(
    State(state): State<Arc<ServerState>>,
    body: Body,
) -> Result<Json<Detokenized>, ApiError> {
    let mut fields = Fields::parse(&state.body(body).await?)?;
    let info = state.check_model(fields.string("model")?.as_deref())?;
    let ids = token_ids("tokens", &required(&mut fields, "tokens")?)?;
    fields.finish()?;
    check_vocabulary("tokens", &ids, info.vocab_size)?;
    Ok(Json(Detokenized { prompt: state.decode(ids, false).await? }))
}
