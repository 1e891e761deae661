//! `GET /props`, `GET /slots`, `POST /apply-template`.
//!
//! Lagoon has no slots: sequences of a batch take memory as they grow. Each place of the batch is shown as a slot, those of running
//! sequences first.

use super::{completion::settings, reply::Settings};
use crate::{
    error::ApiError, fields::Fields, metrics, params::Params, state::ServerState, text_jobs::Asker, tokens::chat_text,
};
use axum::{
    Json,
    body::Bytes,
    extract::{Request, State},
};
use lagoon_text::ChatTemplate;
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// Maximum of slots that are shown.
const SLOTS_MAX: u32 = 256;

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Props {
    default_generation_settings: DefaultSettings,
    total_slots: u32,
    model_alias: String,
    model_path: String,
    modalities: Modalities,
    endpoint_slots: bool,
    endpoint_props: bool,
    endpoint_metrics: bool,
    webui: bool,
    chat_template: String,
    bos_token: String,
    eos_token: String,
    build_info: String,
    is_sleeping: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
struct DefaultSettings {
    n_ctx: u32,
    params: Settings,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Modalities {
    vision: bool,
    audio: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Slot {
    id: u32,
    n_ctx: u32,
    speculative: bool,
    is_processing: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Applied {
    prompt: String,
}

/// `GET /props`.
pub(crate) async fn props(State(state): State<Arc<ServerState>>) -> Result<Json<Props>, ApiError> {
    let info = state.engine.info();
    let defaults = Params::take(&mut Fields::parse(b"{}")?, state.rules())?;
    let token = |id: Option<u32>| id.and_then(|id| state.tokenizer.token(id)).unwrap_or_default();
    Ok(Json(Props {
        default_generation_settings: DefaultSettings { n_ctx: info.context_tokens(), params: settings(&defaults) },
        total_slots: info.slots.min(SLOTS_MAX),
        model_alias: info.model_id.clone(),
        model_path: info.model_id,
        modalities: Modalities { vision: false, audio: false },
        endpoint_slots: true,
        endpoint_props: false,
        endpoint_metrics: true,
        webui: false,
        chat_template: state.template.as_deref().map(ChatTemplate::text).unwrap_or_default().to_owned(),
        bos_token: token(state.tokenizer.bos_id()),
        eos_token: token(state.tokenizer.eos_id()),
        build_info: concat!("lagoon-", env!("CARGO_PKG_VERSION")).to_owned(),
        is_sleeping: false,
    }))
}

/// `GET /slots`.
pub(crate) async fn slots(State(state): State<Arc<ServerState>>) -> Json<Vec<Slot>> {
    let (info, running) = (state.engine.info(), metrics::running());
    let slot =
        |id: u32| Slot { id, n_ctx: info.context_tokens(), speculative: false, is_processing: u64::from(id) < running };
    Json((0..info.slots.min(SLOTS_MAX)).map(slot).collect())
}

/// `POST /apply-template`: the prompt of a chat.
pub(crate) async fn apply_template(
    State(state): State<Arc<ServerState>>,
    request: Request,
) -> Result<Json<Applied>, ApiError> {
    state.with_body(request, applied).await.map(Json)
}

pub(crate) fn applied(state: &ServerState, body: Bytes, asker: &Asker<'_>) -> Result<Applied, ApiError> {
    let mut fields = Fields::parse(&body)?;
    state.check_model(fields.string("model")?.as_deref())?;
    asker.check()?;
    let prompt = chat_text(state, &mut fields)?;
    fields.finish()?;
    Ok(Applied { prompt })
}
