//! A client of OpenAI-compatible servers, for `chat` and `bench`: requests, server-sent events, and errors with hints.

use anyhow::Context;
use axum::body::Body;
use axum::http::{Method, Request, Uri, header};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream::BoxStream};
use lagoon_http::client::{Client, ClientConfig, Response, SendError};
use lagoon_http::tls::ClientTls;
use serde_json::Value;
use std::{path::Path, pin::pin, time::Duration};

/// Time to connect.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Longest silence of a server, prefill of a long prompt included.
const SILENCE_DEADLINE: Duration = Duration::from_secs(3700);
/// Longest line of an event stream, in bytes (one with logits is long).
const LINE_BYTES_MAX: usize = 64 << 20;
/// Longest response that is no stream, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 30;
/// Bytes read of an error response.
const ERROR_BYTES_MAX: usize = 64 << 10;
/// Maximum of idle connections.
const IDLE_MAX: usize = 64;
/// Retries after a refusal, and the longest pause before one that a server may request, in seconds.
const RETRIES_MAX: u32 = 2;
const RETRY_AFTER_S_MAX: u64 = 5;
/// Characters kept of an error response that is no OpenAI error body.
const EXCERPT_CHARS: usize = 200;

/// Why a request to a server failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error(
        "no connection to {url}: {reason}\nhint: is the server running there? `lagoon up` starts one; `--url` names another"
    )]
    Connect { url: String, reason: String },
    #[error("the server answered {status}: {message}{}", hint(*status, *retry_after_s))]
    Status { status: u16, message: String, retry_after_s: Option<u64> },
    /// The server reported an error inside a stream that had begun.
    #[error("the answer failed midway: {0}")]
    Midway(String),
    #[error("the connection broke: {0}")]
    Broken(String),
    #[error("the server speaks no OpenAI API: {0}\nhint: check `--url`; it is the server's root, with or without /v1")]
    Protocol(String),
}

impl ClientError {
    /// Short label of the error, for counting.
    pub(crate) fn kind(&self) -> String {
        match self {
            Self::Connect { .. } => "connect".to_owned(),
            Self::Status { status, .. } => format!("http_{status}"),
            Self::Midway(_) => "midway".to_owned(),
            Self::Broken(_) => "broken".to_owned(),
            Self::Protocol(_) => "protocol".to_owned(),
        }
    }
}

fn hint(status: u16, retry_after_s: Option<u64>) -> String {
    let hint = match status {
        401 | 403 => {
            "give the server's key with `--api-key` or LAGOON_API_KEY, that of administration with `--admin-key`"
        }
        404 => "`--model` must be a model that the server lists at /v1/models",
        429 => "the server is full, or the key's rate is used up; try again, or with less concurrency",
        _ => return String::new(),
    };
    let after = retry_after_s.map(|seconds| format!(" (after {seconds} s)"));
    format!("\nhint: {hint}{}", after.unwrap_or_default())
}

/// A server's address and key, with an HTTP client.
#[derive(Clone, Debug)]
pub(crate) struct ApiClient {
    /// Base URL without trailing slash and `/v1`.
    base: String,
    key: Option<String>,
    http: Client,
}

impl ApiClient {
    /// A client of the server at `url`, with or without `/v1`; `ca` authenticates an https:// server.
    pub(crate) fn new(url: &str, key: Option<String>, ca: Option<&Path>) -> anyhow::Result<Self> {
        let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let base = url.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/').to_owned();
        let parsed = base.parse::<Uri>().ok().filter(|uri| uri.host().is_some_and(|host| !host.is_empty()));
        let uri = parsed.with_context(|| format!("`{base}` is not a URL\nhint: try http://127.0.0.1:8000"))?;
        let https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => anyhow::bail!("`{base}` is neither http:// nor https://\nhint: try http://127.0.0.1:8000"),
        };
        anyhow::ensure!(
            !https || ca.is_some(),
            "an https:// server's certificate is checked against its authority, and none is given\n\
             hint: `--ca PEM` or LAGOON_CA names it; of public servers, the system's bundle (/etc/ssl/certs/ca-certificates.crt)"
        );
        let tls = ca.filter(|_| https).map(ClientTls::https).transpose()?;
        let config = ClientConfig { connect: CONNECT_DEADLINE, silence: SILENCE_DEADLINE, idle_max: IDLE_MAX };
        Ok(Self { base, key, http: Client::new(config, tls) })
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Id of the first model that the server lists.
    pub(crate) async fn first_model(&self) -> Result<String, ClientError> {
        let list = self.get("/v1/models").await?;
        let id = list["data"][0]["id"].as_str().map(str::to_owned);
        id.ok_or_else(|| ClientError::Protocol("/v1/models lists no model".to_owned()))
    }

    /// Longest context of a model that the server lists, in tokens, if it says.
    pub(crate) async fn context_of(&self, model: &str) -> Result<Option<u32>, ClientError> {
        let list = self.get("/v1/models").await?;
        let found = list["data"].as_array().into_iter().flatten().find(|entry| entry["id"] == model);
        Ok(found.and_then(|entry| entry["max_model_len"].as_u64()).map(|len| u32::try_from(len).unwrap_or(u32::MAX)))
    }

    /// Gets JSON. Retries [`RETRIES_MAX`] times if the server requests a short pause.
    pub(crate) async fn get(&self, path: &str) -> Result<Value, ClientError> {
        let mut retries = 0;
        loop {
            match self.json(Method::GET, path, None).await {
                Err(ClientError::Status { status: 429 | 503, retry_after_s: Some(seconds), .. })
                    if seconds <= RETRY_AFTER_S_MAX && retries < RETRIES_MAX =>
                {
                    retries += 1;
                    // Jitter: clients that were refused together do not return together.
                    let pause = Duration::from_secs(seconds).mul_f64(rand::random_range(1.0..1.5));
                    tokio::time::sleep(pause).await;
                }
                answer => return answer,
            }
        }
    }

    /// Posts JSON; returns JSON.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.json(Method::POST, path, Some(body)).await
    }

    /// Posts JSON; returns server-sent events.
    pub(crate) async fn events(&self, path: &str, body: &Value) -> Result<Events, ClientError> {
        let response = self.send(Method::POST, path, Some(body)).await?;
        let kind = response.headers().get("content-type").and_then(|value| value.to_str().ok()).unwrap_or("none");
        if !kind.starts_with("text/event-stream") {
            return Err(ClientError::Protocol(format!("{path} answered with content type {kind}, not a stream")));
        }
        Ok(Events::new(response.chunks().map(|chunk| chunk.map_err(|error| error.to_string()))))
    }

    async fn json(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, ClientError> {
        let response = self.send(method, path, body).await?;
        let body = response.bytes(ANSWER_BYTES_MAX).await.map_err(|error| ClientError::Broken(error.to_string()))?;
        serde_json::from_slice(&body).map_err(|error| ClientError::Protocol(error.to_string()))
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Response, ClientError> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request = request.body(body.map_or_else(Body::empty, |body| Body::from(body.to_string())));
        let request = request.map_err(|error| ClientError::Protocol(error.to_string()))?;
        let response = self.http.send(request).await.map_err(|error| match error {
            SendError::Connect(reason) => ClientError::Connect { url: self.base.clone(), reason },
            SendError::Broken(reason) => ClientError::Broken(reason),
        })?;
        let status = response.status().as_u16();
        if (200..300).contains(&status) {
            return Ok(response);
        }
        let retry_after = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
        let retry_after_s = retry_after.and_then(|seconds| seconds.parse().ok());
        let body = response.bytes(ERROR_BYTES_MAX).await.unwrap_or_default();
        let body = String::from_utf8_lossy(&body);
        let parsed: Value = serde_json::from_str(&body).unwrap_or_default();
        let message = match parsed["error"]["message"].as_str() {
            Some(message) => message.to_owned(),
            None => body.chars().take(EXCERPT_CHARS).collect(),
        };
        Err(ClientError::Status { status, message, retry_after_s })
    }
}

/// The JSON events of a stream, until `[DONE]`. Dropping it closes the connection, which cancels the response.
pub(crate) struct Events {
    chunks: BoxStream<'static, Result<Bytes, String>>,
    /// Bytes of incomplete lines.
    buffer: Vec<u8>,
    /// Bytes of `buffer` already searched for a line break.
    searched: usize,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").field("buffered", &self.buffer.len()).finish_non_exhaustive()
    }
}

impl Events {
    fn new(chunks: impl Stream<Item = Result<Bytes, String>> + Send + 'static) -> Self {
        Self { chunks: chunks.boxed(), buffer: Vec::new(), searched: 0 }
    }

    /// The next event; `None` after `[DONE]`. A stream that ends without it is broken.
    pub(crate) async fn next(&mut self) -> Result<Option<Value>, ClientError> {
        loop {
            while let Some(line) = self.line() {
                let Some(data) = line.strip_prefix("data:") else { continue };
                let data = data.trim();
                if data == "[DONE]" {
                    return Ok(None);
                }
                let event: Value =
                    serde_json::from_str(data).map_err(|error| ClientError::Protocol(error.to_string()))?;
                if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
                    let message = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
                    return Err(ClientError::Midway(message));
                }
                return Ok(Some(event));
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(ClientError::Protocol(format!("an event is longer than {LINE_BYTES_MAX} bytes")));
            }
            match pin!(self.chunks.next()).await {
                Some(Ok(chunk)) => self.buffer.extend_from_slice(&chunk),
                Some(Err(reason)) => return Err(ClientError::Broken(reason)),
                None => return Err(ClientError::Broken("the stream ended without [DONE]".to_owned())),
            }
        }
    }

    /// Takes a complete line from the buffer, without its line break.
    fn line(&mut self) -> Option<String> {
        let Some(at) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.buffer.len();
            return None;
        };
        let line: Vec<u8> = self.buffer.drain(..=self.searched + at).collect();
        self.searched = 0;
        Some(String::from_utf8_lossy(&line).trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn events(pieces: &[&'static str]) -> (Vec<Value>, Result<(), ClientError>) {
        let chunks: Vec<_> = pieces.iter().map(|piece| Ok(Bytes::from_static(piece.as_bytes()))).collect();
        let mut events = Events::new(futures::stream::iter(chunks));
        let mut seen = Vec::new();
        loop {
            match events.next().await {
                Ok(Some(event)) => seen.push(event),
                Ok(None) => return (seen, Ok(())),
                Err(error) => return (seen, Err(error)),
            }
        }
    }

    #[tokio::test]
    async fn events_survive_any_cut_and_either_line_break() {
        let text = "data: {\"a\":1}\n\n: a comment\r\ndata:{\"a\":2}\r\n\r\ndata: [DONE]\n\n";
        for size in 1..text.len() {
            let pieces: Vec<_> = (0..text.len()).step_by(size).map(|at| &text[at..text.len().min(at + size)]).collect();
            let (seen, end) = events(&pieces).await;
            assert_eq!(seen, [serde_json::json!({"a": 1}), serde_json::json!({"a": 2})], "cut every {size}");
            end.unwrap();
        }
    }

    #[tokio::test]
    async fn streams_that_end_badly() {
        let (seen, end) = events(&["data: {}\n\ndata: {\"error\":{\"message\":\"lost\"}}\n\n"]).await;
        assert_eq!(seen.len(), 1);
        assert_eq!(end.unwrap_err().to_string(), "the answer failed midway: lost");
        assert_eq!(events(&["data: {}\n\n"]).await.1.unwrap_err().kind(), "broken");
        assert_eq!(events(&["data: {\n\n"]).await.1.unwrap_err().kind(), "protocol");
    }

    #[test]
    fn urls_with_and_without_v1() {
        for url in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1"] {
            assert_eq!(ApiClient::new(url, None, None).unwrap().base(), "http://h:1", "{url}");
        }
        assert!(ApiClient::new("https://h", None, None).unwrap_err().to_string().contains("hint:"));
        assert!(ApiClient::new("http://", None, None).unwrap_err().to_string().contains("hint:"));
    }
}
