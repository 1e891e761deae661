//! The server seen by its clients, over real sockets, with a scripted engine.

mod anthropic;
mod batch;
mod cancel;
mod embeddings;
mod errors;
mod fields;
mod front;
mod llama_cpp;
mod options;
mod responses;
mod streams;
mod structured;
mod tools;
mod whole;

use crate::scripted;
use serde_json::Value;
use std::sync::Arc;

/// A client of one spawned server.
struct Client {
    base: String,
    http: reqwest::Client,
}

/// A reply with what tests look at.
struct Reply {
    status: u16,
    headers: reqwest::header::HeaderMap,
    text: String,
}

impl Reply {
    async fn of(response: reqwest::Response) -> Self {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Self { status, headers, text: response.text().await.unwrap() }
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error} in {}", self.text))
    }

    /// Status and body with what differs from run to run removed.
    fn stable(&self) -> String {
        format!("{}\n{}", self.status, stable(&self.text))
    }
}

impl Client {
    async fn new(state: crate::ServerState) -> Self {
        Self { base: scripted::spawn(state).await, http: reqwest::Client::new() }
    }

    async fn of(engine: Arc<scripted::ScriptedEngine>) -> Self {
        Self::new(scripted::state(engine)).await
    }

    async fn saying(text: &'static str) -> Self {
        Self::of(scripted::ScriptedEngine::saying(text)).await
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    async fn get(&self, path: &str) -> Reply {
        Reply::of(self.http.get(self.url(path)).send().await.unwrap()).await
    }

    async fn post(&self, path: &str, body: Value) -> Reply {
        Reply::of(self.http.post(self.url(path)).json(&body).send().await.unwrap()).await
    }

    /// The request's events: names and data.
    async fn events(&self, path: &str, body: Value) -> Vec<(String, Value)> {
        let reply = self.post(path, body).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
        let event = |text: &str| {
            let (name, data) = text.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            let name = name.strip_prefix("event: ").unwrap().to_owned();
            assert_eq!(data["type"], name);
            (name, data)
        };
        reply.text.split_terminator("\n\n").map(event).collect()
    }

    async fn raw(&self, path: &str, body: impl Into<reqwest::Body>) -> Reply {
        Reply::of(self.http.post(self.url(path)).body(body).send().await.unwrap()).await
    }
}

/// Replaces ids and times.
fn stable(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("\"id\":\"c").into_iter().chain(rest.find("\"created\":")).min() {
        let field = &rest[at..];
        let end = field.find(',').unwrap_or(field.len());
        out.push_str(&rest[..at]);
        out.push_str(if field.starts_with("\"id\"") { "\"id\":\"ID\"" } else { "\"created\":0" });
        rest = &field[end..];
    }
    out + rest
}
