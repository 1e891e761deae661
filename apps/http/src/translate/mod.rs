//! `/v1/messages` (Anthropic) and `/v1/responses` (OpenAI): translated to chat requests, and their answers back.
//!
//! The translation stands where a request arrives, before anything else sees it: at an instance's port in front of its
//! chat handler, at a gateway in front of its proxy. So instances and the gateway's replay know chat requests only, and a
//! translated stream outlives its instance as every chat does. It reads streams only: an answer that is not streamed is
//! collected from one. It knows no model and no template; what those cannot do, the chat refuses, and the refusal gets
//! the interface's own name of the field.

mod anthropic;
mod anthropic_reply;
mod errors;
mod request;
mod responses;
mod responses_reply;
mod stored;
mod stream;
mod table;

use crate::{
    bodies::{Bodies, Holder, check_encoding},
    error::ApiError,
    journal,
    keys::Caller,
    limits::Limits,
    text_jobs::TextJobs,
};
use axum::{
    Json, Router,
    body::{Body, Bytes, to_bytes},
    extract::{Path, Request, State},
    http::{HeaderValue, Method, StatusCode, Uri, header, request::Parts},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use errors::Names;
pub(crate) use errors::shape_errors;
use request::ChatRequest;
use responses_reply::{ResponseShape, Storing};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{sync::Arc, time::Instant};
use stored::{Stored, Turn};
use stream::{Shape, Translation};
#[cfg(test)]
pub(crate) use table::tests::names;
pub(crate) use table::{ENDPOINTS, Field, Support};
use tower_service::Service as _;

/// Bytes read of `/tokenize`'s reply: it lists the tokens, each of at most 11 bytes.
const COUNT_BYTES_MAX: usize = 256 << 20;

/// What the translated endpoints need.
struct Endpoints {
    /// Takes the chat requests.
    chat: Router,
    bodies: Bodies,
    text_jobs: TextJobs,
    limits: Limits,
    stored: Arc<Stored>,
}

/// Routes of the translated endpoints; `chat` answers `/v1/chat/completions` and `/tokenize`.
pub fn translated(chat: Router, bodies: Bodies, text_jobs: TextJobs, limits: Limits) -> Router {
    let endpoints = Endpoints { chat, bodies, text_jobs, limits, stored: Arc::default() };
    Router::new()
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/responses", post(create_response))
        .route("/v1/responses/{id}", get(show_response).delete(delete_response))
        .with_state(Arc::new(endpoints))
}

impl Endpoints {
    /// Reads a request's body within the limits, and translates it off the runtime's threads.
    async fn read<T: Send + 'static>(
        &self,
        request: Request,
        work: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(Parts, T), ApiError> {
        let (head, body) = request.into_parts();
        check_encoding(&head.headers)?;
        let holder = Holder::of(&head.extensions);
        let Limits { body_bytes_max, body_deadline, .. } = self.limits;
        let (body, share) = self.bodies.read(holder, body, body_bytes_max, body_deadline).await?;
        let job = self.text_jobs.run(body.len(), move |asker| {
            asker.check()?;
            let made = work(&body);
            drop(share);
            made
        });
        Ok((head, job.await?))
    }

    /// The body of a request of `bytes` bytes with `own` messages after those of `turns`, joined off the runtime's threads; with both.
    async fn join(
        &self,
        holder: Holder,
        chat: ChatRequest,
        turns: Vec<Arc<Turn>>,
        own: String,
        bytes: usize,
    ) -> Result<(Vec<Arc<Turn>>, String, Bytes), ApiError> {
        let bytes = turns.iter().fold(bytes, |bytes, turn| bytes + turn.messages.len());
        if bytes > self.limits.body_bytes_max {
            return Err(conversation_too_large(bytes, self.limits.body_bytes_max));
        }
        let share = self.bodies.hold(holder, bytes)?;
        let job = self.text_jobs.run(bytes, move |asker| {
            asker.check()?;
            let body = share.keep(chat.body_after(&turns, &own));
            Ok((turns, own, body))
        });
        job.await
    }

    /// The reply of the chat's routes to a translated request.
    async fn ask(&self, mut head: Parts, route: &'static str, body: Bytes) -> Response {
        head.uri = Uri::from_static(route);
        head.method = Method::POST;
        for name in [header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::CONTENT_ENCODING] {
            head.headers.remove(name);
        }
        head.headers.remove(journal::HEADER);
        head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let Ok(response) = self.chat.clone().call(Request::from_parts(head, Body::from(body))).await;
        response
    }

    /// The answer to a translated request in its interface's shape.
    async fn answer<S: Shape>(&self, head: Parts, body: Bytes, stream: bool, shape: S, names: Names) -> Response {
        let response = self.ask(head, "/v1/chat/completions", body).await;
        if response.status() != StatusCode::OK {
            return errors::renamed(response, names).await;
        }
        let (mut head, body) = response.into_parts();
        let translation = Translation::new(body, shape);
        if stream {
            return Response::from_parts(head, translation.events());
        }
        match translation.whole().await {
            Ok(whole) => {
                head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                Response::from_parts(head, Body::from(whole))
            }
            Err(error) => error.response(),
        }
    }
}

/// `POST /v1/messages`.
async fn messages(State(endpoints): State<Arc<Endpoints>>, request: Request) -> Result<Response, ApiError> {
    let work = |body: &[u8]| anthropic::read(body).map(|(chat, stream)| (chat.body(), stream));
    let (head, (body, stream)) = endpoints.read(request, work).await?;
    let shape = anthropic_reply::MessageShape::new();
    Ok(endpoints.answer(head, body.into(), stream, shape, anthropic::NAMES).await)
}

#[derive(Deserialize)]
struct Count {
    count: usize,
}

/// `POST /v1/messages/count_tokens`.
async fn count_tokens(State(endpoints): State<Arc<Endpoints>>, request: Request) -> Result<Response, ApiError> {
    let work = |body: &[u8]| anthropic::read_count(body).map(|chat| chat.body());
    let (head, body) = endpoints.read(request, work).await?;
    let response = endpoints.ask(head, "/tokenize", body.into()).await;
    if response.status() != StatusCode::OK {
        return Ok(errors::renamed(response, anthropic::NAMES).await);
    }
    let bytes = to_bytes(response.into_body(), COUNT_BYTES_MAX).await;
    let count = bytes.ok().and_then(|bytes| serde_json::from_slice::<Count>(&bytes).ok());
    let Count { count } = count.ok_or_else(|| ApiError::unavailable("the reply with the tokens broke off"))?;
    Ok(Json(json!({ "input_tokens": count })).into_response())
}

/// `POST /v1/responses`.
async fn create_response(
    State(endpoints): State<Arc<Endpoints>>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let work = |body: &[u8]| {
        let asked = responses::read(body)?;
        let own = request::join(&asked.chat.messages);
        let whole = asked.previous.is_none().then(|| asked.chat.body_after(&[], &own));
        Ok((asked, own, whole, body.len()))
    };
    let (head, (asked, own, whole, bytes)) = endpoints.read(request, work).await?;
    let responses::Asked { chat, stream, store, previous, repeated } = asked;
    let stored = Arc::clone(&endpoints.stored);
    let (turns, own, body) = match (&previous, whole) {
        (None, whole) => (Vec::new(), own, whole.unwrap_or_default().into()),
        (Some(id), _) => {
            let found = stored.get(id, caller.tenant(), Instant::now()).ok_or_else(|| previous_not_found(id))?;
            endpoints.join(Holder::of(&head.extensions), chat, found.turns, own, bytes).await?
        }
    };
    let storing = store.then(|| Storing { stored, owner: caller.tenant().into(), turns, input: own });
    let shape = ResponseShape { number: rand::random(), previous, repeated, storing, events: 0 };
    Ok(endpoints.answer(head, body, stream, shape, responses::NAMES).await)
}

fn previous_not_found(id: &str) -> ApiError {
    let message = format!(
        "the field `previous_response_id` is `{id}`, which is not stored here (any more)\n\
         hint: send the whole conversation as `input`"
    );
    ApiError::field("previous_response_id", "previous_response_not_found", message)
}

fn conversation_too_large(bytes: usize, limit: usize) -> ApiError {
    let message = format!(
        "the conversation of `previous_response_id` and this request have {bytes} bytes, but at most {limit} are taken\n\
         hint: begin a new conversation with a shorter `input`"
    );
    ApiError::field("previous_response_id", "conversation_too_large", message)
}

fn not_found(id: &str) -> ApiError {
    let message = format!("there is no response `{id}` here (any more)");
    ApiError::new(StatusCode::NOT_FOUND, Some("response_not_found"), message)
}

/// `GET /v1/responses/{id}`.
async fn show_response(
    State(endpoints): State<Arc<Endpoints>>,
    caller: Caller,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    if let Some(query) = uri.query().filter(|query| !query.is_empty()) {
        let name = query.split(['=', '&']).next().unwrap_or_default();
        return Err(crate::fields::unsupported(name));
    }
    let response = endpoints.stored.get(&id, caller.tenant(), Instant::now()).ok_or_else(|| not_found(&id))?;
    Ok(errors::json_response(StatusCode::OK, response.json.to_string()))
}

/// `DELETE /v1/responses/{id}`.
async fn delete_response(
    State(endpoints): State<Arc<Endpoints>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    endpoints.stored.remove(&id, caller.tenant(), Instant::now()).ok_or_else(|| not_found(&id))?;
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}
