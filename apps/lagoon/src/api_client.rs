//! A client of OpenAI-compatible servers, for `chat` and `bench`: requests, server-sent events, and errors that say
//! what to do about them.

use anyhow::{Context, bail};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream::BoxStream};
use serde_json::Value;
use std::{pin::pin, time::Duration};

/// Time to connect.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Longest silence of a server, prefill of a long prompt included.
const SILENCE_DEADLINE: Duration = Duration::from_secs(3700);
/// Longest line of an event stream, in bytes (one with logits is long).
const LINE_BYTES_MAX: usize = 64 << 20;
/// What is kept of a reply that is no OpenAI error body, in characters.
const EXCERPT_CHARS: usize = 200;

/// Why a request to a server failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error(
        "no connection to {url}: {reason}\nhint: is the server running there? `lagoon up` starts one; `--url` names another"
    )]
    Connect { url: String, reason: String },
    #[error("the server answered {status}: {message}{}", hint(*status))]
    Status { status: u16, message: String },
    /// The server reported an error inside a stream that had begun.
    #[error("the answer failed midway: {0}")]
    Midway(String),
    #[error("the connection broke: {0}")]
    Broken(String),
    #[error("the server speaks no OpenAI API: {0}\nhint: check `--url`; it is the server's root, with or without /v1")]
    Protocol(String),
}

impl ClientError {
    /// A short label, to count errors by.
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

fn hint(status: u16) -> &'static str {
    match status {
        401 | 403 => "\nhint: give the server's key with `--api-key` or LAGOON_API_KEY",
        404 => "\nhint: `--model` must be a model that the server lists at /v1/models",
        429 => "\nhint: the server is full; try again, or with less concurrency",
        _ => "",
    }
}

/// A server and how to speak to it.
#[derive(Clone, Debug)]
pub(crate) struct ApiClient {
    /// Without a trailing slash or `/v1`.
    base: String,
    key: Option<String>,
    http: reqwest::Client,
}

impl ApiClient {
    /// `url` is the server's root, with or without `/v1`.
    pub(crate) fn new(url: &str, key: Option<String>) -> anyhow::Result<Self> {
        if url.starts_with("https://") {
            bail!("this build speaks plain HTTP only, not {url}\nhint: put a TLS-terminating proxy in between");
        }
        let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let base = url.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/').to_owned();
        reqwest::Url::parse(&base)
            .with_context(|| format!("`{base}` is not a URL\nhint: try http://127.0.0.1:8000"))?;
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_DEADLINE)
            .read_timeout(SILENCE_DEADLINE)
            .tcp_nodelay(true)
            .no_proxy()
            .build()
            .context("set up the HTTP client")?;
        Ok(Self { base, key, http })
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// The first model that the server lists.
    pub(crate) async fn first_model(&self) -> Result<String, ClientError> {
        let list = self.json(self.http.get(self.url("/v1/models"))).await?;
        let id = list["data"][0]["id"].as_str().map(str::to_owned);
        id.ok_or_else(|| ClientError::Protocol("/v1/models lists no model".to_owned()))
    }

    /// Reads JSON.
    pub(crate) async fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.json(self.http.get(self.url(path))).await
    }

    /// Posts JSON and reads JSON.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.json(self.http.post(self.url(path)).json(body)).await
    }

    /// Posts JSON and reads server-sent events.
    pub(crate) async fn events(&self, path: &str, body: &Value) -> Result<Events, ClientError> {
        let response = self.send(self.http.post(self.url(path)).json(body)).await?;
        let kind = response.headers().get("content-type").and_then(|value| value.to_str().ok()).unwrap_or("none");
        if !kind.starts_with("text/event-stream") {
            return Err(ClientError::Protocol(format!("{path} answered with content type {kind}, not a stream")));
        }
        let chunks = response.bytes_stream().map(|chunk| chunk.map_err(|error| reason(&error)));
        Ok(Events::new(chunks))
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    async fn json(&self, request: reqwest::RequestBuilder) -> Result<Value, ClientError> {
        let response = self.send(request).await?;
        let body = response.bytes().await.map_err(|error| ClientError::Broken(reason(&error)))?;
        serde_json::from_slice(&body).map_err(|error| ClientError::Protocol(error.to_string()))
    }

    async fn send(&self, mut request: reqwest::RequestBuilder) -> Result<reqwest::Response, ClientError> {
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.map_err(|error| {
            if error.is_connect() {
                ClientError::Connect { url: self.base.clone(), reason: reason(&error) }
            } else {
                ClientError::Broken(reason(&error))
            }
        })?;
        let status = response.status().as_u16();
        if (200..300).contains(&status) {
            return Ok(response);
        }
        let body = response.text().await.unwrap_or_default();
        let parsed: Value = serde_json::from_str(&body).unwrap_or_default();
        let message = match parsed["error"]["message"].as_str() {
            Some(message) => message.to_owned(),
            None => body.chars().take(EXCERPT_CHARS).collect(),
        };
        Err(ClientError::Status { status, message })
    }
}

/// The innermost cause: reqwest's own message only says that something failed.
fn reason(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// The JSON events of a stream, until `[DONE]`. Dropping it closes the connection, which cancels the answer.
pub(crate) struct Events {
    chunks: BoxStream<'static, Result<Bytes, String>>,
    /// What has arrived of lines that are not complete.
    buffer: Vec<u8>,
    /// Bytes of `buffer` that are known to hold no line break.
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
            assert_eq!(ApiClient::new(url, None).unwrap().base(), "http://h:1", "{url}");
        }
        assert!(ApiClient::new("https://h", None).unwrap_err().to_string().contains("hint:"));
        assert!(ApiClient::new("http://", None).unwrap_err().to_string().contains("hint:"));
    }
}
