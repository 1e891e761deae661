//! The pools behind a gateway: one, or several of which a request's `model` chooses one.
//!
//! What the pools serve is asked of their instances (`/v1/models`) every few seconds, and when a request names a model that none is
//! known to serve. With one pool nothing is asked: its instances know their model.

use crate::jitter::jittered;
use crate::replay::Repeatable;
use crate::upstreams::Upstreams;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use lagoon_http::ApiError;
use serde::Deserialize;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

/// Interval of the question what a pool serves.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// The shortest time between two such questions because of unknown models.
const ASK_REST: Duration = Duration::from_secs(1);
/// Deadline of the answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2);
/// Longest answer, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Maximum of models of one pool.
const MODELS_MAX: usize = 256;
/// Bodies above this size, in bytes, are parsed on another thread.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// The pools. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Pools {
    upstreams: Vec<Arc<Upstreams>>,
    /// What each pool serves, as its instances describe it; `None` until one has answered.
    models: RwLock<Vec<Option<Vec<Value>>>>,
    /// When all were asked last.
    asked: Mutex<Option<Instant>>,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<Value>,
}

/// The one field of a request that a gateway reads.
#[derive(Deserialize)]
struct Named<'a> {
    #[serde(borrow, default)]
    model: Option<Cow<'a, str>>,
}

impl Pools {
    /// At least one pool.
    pub(crate) fn new(upstreams: Vec<Arc<Upstreams>>) -> Self {
        let models = RwLock::new(vec![None; upstreams.len()]);
        Self { upstreams, models, asked: Mutex::new(None) }
    }

    pub(crate) fn all(&self) -> &[Arc<Upstreams>] {
        &self.upstreams
    }

    pub(crate) fn are_several(&self) -> bool {
        self.upstreams.len() > 1
    }

    /// Asks what the pools serve until `stop`.
    pub(crate) fn watch(self: &Arc<Self>, stop: CancellationToken) {
        let pools = Arc::clone(self);
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                pools.ask_all().await;
                tokio::time::sleep(jittered(ASK_EVERY)).await;
            }
        });
    }

    /// Asks all pools at once, unless that was done a moment ago.
    async fn ask_all(&self) {
        let mut asked = self.asked.lock().await;
        if asked.is_some_and(|at| at.elapsed() < ASK_REST) {
            return;
        }
        let answers = futures::future::join_all(self.upstreams.iter().map(|pool| ask(pool))).await;
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        for (known, answer) in models.iter_mut().zip(answers) {
            match answer {
                Ok(served) => *known = Some(served),
                Err(why) => tracing::debug!(why, "a pool did not name its models"),
            }
        }
        *asked = Some(Instant::now());
    }

    /// The pool for a request: of the model that it names; the first one if it names none, or there is one only.
    ///
    /// # Errors
    /// 404 for a model that no pool serves; 503 while a pool has not named its models.
    pub(crate) async fn of(&self, request: &Repeatable) -> Result<Arc<Upstreams>, ApiError> {
        let first = Arc::clone(&self.upstreams[0]);
        if !self.are_several() {
            return Ok(first);
        }
        let Some(model) = model_of(request).await else { return Ok(first) };
        if let Some(pool) = self.serving(&model) {
            return Ok(pool);
        }
        self.ask_all().await;
        self.serving(&model).ok_or_else(|| self.not_found(&model))
    }

    /// A pool that serves `model`; of several the first that has an instance.
    fn serving(&self, model: &str) -> Option<Arc<Upstreams>> {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        let serves = |known: &Option<Vec<Value>>| known.iter().flatten().any(|served| served["id"] == model);
        let able = self.upstreams.iter().zip(models.iter()).filter(|(_, known)| serves(known));
        let able: Vec<&Arc<Upstreams>> = able.map(|(pool, _)| pool).collect();
        able.iter().find(|pool| !pool.serving().is_empty()).or(able.first()).map(|pool| Arc::clone(pool))
    }

    fn not_found(&self, model: &str) -> ApiError {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        if models.iter().any(Option::is_none) {
            return ApiError::unavailable(
                "a pool has not named its models yet\nhint: send the request again in a moment",
            );
        }
        drop(models);
        let served: Vec<String> =
            self.models().iter().filter_map(|of| Some(format!("`{}`", of["id"].as_str()?))).collect();
        let message = format!("the model `{model}` does not exist; this server serves {}", served.join(", "));
        let error = ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), message);
        ApiError { param: Some("model".to_owned()), ..error }
    }

    /// What all pools serve, each name once.
    fn models(&self) -> Vec<Value> {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<Value> = Vec::new();
        for served in models.iter().flatten().flatten() {
            if all.iter().all(|other| other["id"] != served["id"]) {
                all.push(served.clone());
            }
        }
        all
    }

    /// The answer of `/v1/models`.
    pub(crate) async fn list(&self) -> Value {
        if self.models.read().unwrap_or_else(PoisonError::into_inner).iter().any(Option::is_none) {
            self.ask_all().await;
        }
        json!({ "object": "list", "data": self.models() })
    }

    /// The answer of `/v1/models/ID`.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub(crate) async fn describe(&self, id: &str) -> Result<Value, ApiError> {
        let find = || self.models().into_iter().find(|model| model["id"] == id);
        if let Some(model) = find() {
            return Ok(model);
        }
        self.ask_all().await;
        find().ok_or_else(|| self.not_found(id))
    }
}

/// The model that a request names.
async fn model_of(request: &Repeatable) -> Option<String> {
    let body = request.body();
    let parse = |body: &[u8]| serde_json::from_slice::<Named<'_>>(body).ok()?.model.map(Cow::into_owned);
    if body.len() <= INLINE_BYTES_MAX {
        return parse(&body);
    }
    tokio::task::spawn_blocking(move || parse(&body)).await.ok().flatten()
}

/// Asks the instances of a pool, in turn, what they serve.
async fn ask(pool: &Upstreams) -> Result<Vec<Value>, String> {
    let mut why = "no instance is alive".to_owned();
    for backend in pool.serving().into_iter().take(2) {
        let request = Request::get(pool.url(&backend, "/v1/models")).body(Body::empty());
        let request = request.map_err(|error| error.to_string())?;
        let answer = async {
            let response = pool.http.send(request).await.map_err(|error| error.to_string())?;
            let bytes = response.bytes(ANSWER_BYTES_MAX).await.map_err(|error| error.to_string())?;
            serde_json::from_slice::<ModelList>(&bytes).map_err(|error| error.to_string())
        };
        match timeout(ANSWER_DEADLINE, answer).await {
            Ok(Ok(list)) => return Ok(list.data.into_iter().take(MODELS_MAX).collect()),
            Ok(Err(error)) => why = error,
            Err(_elapsed) => why = "no answer in time".to_owned(),
        }
    }
    Err(why)
}

#[cfg(test)]
#[path = "pools_tests.rs"]
mod tests;
