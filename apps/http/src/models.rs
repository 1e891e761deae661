//! `GET /v1/models`: the served model, under each of its names.

use crate::{
    engine::EngineInfo,
    error::ApiError,
    state::{ServerState, model_not_found},
};
use axum::{
    Json,
    extract::{Path, State},
    response::IntoResponse,
};
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

#[derive(Serialize, JsonSchema)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

#[derive(Serialize, JsonSchema)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: String,
    parent: Option<String>,
    max_model_len: u32,
}

impl Model {
    /// The model under one of its names.
    fn new(name: &str, info: &EngineInfo, created: u64) -> Self {
        Self {
            id: name.to_owned(),
            object: "model",
            created,
            owned_by: "lagoon",
            root: info.model_id.clone(),
            parent: None,
            max_model_len: info.context_tokens(),
        }
    }
}

/// `GET /v1/models`.
pub(crate) async fn models(State(state): State<Arc<ServerState>>) -> impl IntoResponse {
    let info = state.engine.info();
    let data = info.names().map(|name| Model::new(name, &info, state.created)).collect();
    Json(ModelList { object: "list", data })
}

/// `GET /v1/models/{id}`.
pub(crate) async fn model(
    State(state): State<Arc<ServerState>>,
    Path(id): Path<String>,
) -> Result<impl IntoResponse, ApiError> {
    let info = state.engine.info();
    if !info.names().any(|name| name == id) {
        return Err(model_not_found(&id, &info));
    }
    Ok(Json(Model::new(&id, &info, state.created)))
}
