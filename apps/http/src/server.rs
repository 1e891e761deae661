//! Routes, and the responses outside of them.

use crate::{
    chats, embeddings, error::ApiError, generations, llama_cpp, metrics, models, openapi, state::ServerState,
    tokenizer_info, tokens, translate::translated,
};
use axum::{
    Json, Router,
    extract::{MatchedPath, Request, State},
    http::{StatusCode, Uri},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use std::{sync::Arc, time::Instant};

/// The router of the OpenAI-compatible server. [`crate::keys::guard`] checks keys before it.
pub fn router(state: ServerState) -> Router {
    metrics::export_at_start(&state.engine.info().model_id);
    let (bodies, text_jobs, limits) = (state.bodies.clone(), state.text_jobs.clone(), state.limits.clone());
    let state = Arc::new(state);
    // What translated requests become.
    let chat = Router::new()
        .route("/v1/chat/completions", post(chats::chat))
        .route("/tokenize", post(tokens::tokenize))
        .with_state(Arc::clone(&state));
    routes()
        .into_iter()
        .fold(Router::new(), |router, (path, route)| router.route(path, route))
        .with_state(state)
        .merge(translated(chat, bodies, text_jobs, limits))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(observe))
}

/// Every route.
pub(crate) fn routes() -> Vec<(&'static str, MethodRouter<Arc<ServerState>>)> {
    vec![
        ("/v1/chat/completions", post(chats::chat)),
        ("/v1/chat/completions/batch", post(chats::batch)),
        ("/v1/completions", post(generations::completions)),
        ("/v1/embeddings", post(embeddings::embeddings)),
        ("/v1/models", get(models::models)),
        ("/v1/models/{*id}", get(models::model)),
        ("/models", get(models::models)),
        ("/completion", post(llama_cpp::completion)),
        ("/completions", post(llama_cpp::completion)),
        ("/props", get(llama_cpp::props)),
        ("/slots", get(llama_cpp::slots)),
        ("/apply-template", post(llama_cpp::apply_template)),
        ("/tokenize", post(tokens::tokenize)),
        ("/detokenize", post(tokens::detokenize)),
        ("/tokenizer_info", get(tokenizer_info::tokenizer_info)),
        ("/health", get(health)),
        ("/metrics", get(show_metrics)),
        ("/version", get(version)),
        ("/openapi.json", get(openapi::openapi)),
    ]
}

async fn observe(request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let method = request.method().clone();
    let response = next.run(request).await;
    let route = route.as_deref().unwrap_or("other");
    let elapsed = begun.elapsed();
    metrics::request(route, response.status(), elapsed);
    tracing::debug!(%method, route, status = response.status().as_u16(), ?elapsed, "request");
    response
}

/// The 404 for a path that does not exist.
pub async fn no_route(uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, Some("not_found"), format!("there is no route {}", uri.path()))
}

/// The 405 for a path that exists for another method.
pub async fn wrong_method(request: Request) -> ApiError {
    let message = format!("the route {} does not allow {}", request.uri().path(), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, Some("method_not_allowed"), message)
}

async fn health(State(state): State<Arc<ServerState>>) -> Result<impl IntoResponse, ApiError> {
    if state.engine.info().ready {
        Ok(Json(serde_json::json!({ "status": "ok" })))
    } else {
        Err(ApiError::unavailable("the engine is not ready"))
    }
}

async fn show_metrics(State(state): State<Arc<ServerState>>) -> impl IntoResponse {
    metrics::response(metrics::render(&state.metrics, state.compat))
}

async fn version() -> impl IntoResponse {
    Json(serde_json::json!({ "version": env!("CARGO_PKG_VERSION") }))
}
