//! Requests that outlive the instance they were given to.
//!
//! The gateway keeps a request's body, and of a streamed answer what the client has been told, in tokens
//! ([`lagoon_http::journal`]). When the instance is lost, the request goes to another one, with the answer so far: that
//! computes both as a prompt and says the rest, sampled at its place in the answer. An answer that is not streamed begins
//! anew. Whoever is lost with [`ReplayLimits::replays_max`] instances, or finds none for [`ReplayLimits::deadline`], is told.
//!
//! Invariants: only whole events reach the client, and none twice; a request runs at one instance at a time as far as
//! the gateway can tell (dropping a connection cancels there); when the client goes away, everything here is dropped.

use crate::bodies::{Bodies, Share};
use crate::upstreams::{Backend, Upstreams, count, end_to_end, lost, none_alive};
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use lagoon_http::journal::{self, Journal, Read, Resume};
use lagoon_http::{ApiError, ClientAddr};
use rand::Rng as _;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest event of a stream; logits of many tokens are large.
const EVENT_BYTES_MAX: usize = 64 << 20;
/// What is read of an answer that refuses to go on.
const REFUSAL_BYTES_MAX: usize = 64 << 10;
/// Bytes of a request body that count as one token.
const BYTES_PER_TOKEN: u64 = 4;
/// What ends a stream of events.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// How long a request may look for another instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplayLimits {
    /// Instances that may be lost under one request.
    pub(crate) replays_max: usize,
    /// Of these, in a row without a token for the client: a request that brings instances down must not go round them all.
    pub(crate) fruitless_max: usize,
    /// Time after a loss in which another instance must begin to answer.
    pub(crate) deadline: Duration,
    /// Between two rounds over the instances.
    pub(crate) pause: Duration,
    /// Silence after which an instance is lost that the pool counts as dead. One whose process ended is lost at once.
    pub(crate) silence: Duration,
}

impl Default for ReplayLimits {
    fn default() -> Self {
        Self {
            replays_max: 4,
            fruitless_max: 2,
            deadline: Duration::from_secs(30),
            pause: Duration::from_millis(250),
            silence: Duration::from_secs(10),
        }
    }
}

/// A request as it can be sent again.
#[derive(Debug)]
pub(crate) struct Repeatable {
    method: Method,
    target: String,
    headers: HeaderMap,
    body: Bytes,
    /// It only computes an answer: whoever gets two uses one.
    pure: bool,
    _share: Share,
}

impl Repeatable {
    /// Reads a request within the limits.
    pub(crate) async fn read(bodies: &Bodies, request: Request) -> Result<Self, ApiError> {
        let (head, body) = request.into_parts();
        let target = head.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        let generates = matches!(head.uri.path(), "/v1/completions" | "/v1/chat/completions");
        let unknown = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        let client = head.extensions.get::<ClientAddr>().map_or(unknown, |client| client.0);
        let (body, share) = bodies.read(client, body).await?;
        let pure = body.is_empty() || generates;
        let mut headers = end_to_end(&head.headers);
        if generates {
            headers.insert(journal::HEADER, HeaderValue::from_static("1"));
        }
        Ok(Self { method: head.method, target, headers, body, pure, _share: share })
    }

    fn tokens(&self) -> u64 {
        u64::try_from(self.body.len()).unwrap_or(u64::MAX) / BYTES_PER_TOKEN
    }
}

/// Why an instance gave no answer.
enum Unanswered {
    /// It was not asked.
    Unreachable(String),
    /// It may have begun.
    Lost(String),
}

/// A request, and what became of it so far.
#[derive(Debug)]
pub(crate) struct Attempts {
    upstreams: Arc<Upstreams>,
    limits: ReplayLimits,
    request: Repeatable,
    /// Instances that were lost under it, and when the last one was.
    lost: Vec<Backend>,
    lost_at: Instant,
    /// The last of `lost` that gave the client nothing.
    fruitless: usize,
    /// The client has the beginning of a stream: answers of any other kind are of no use to it.
    streaming: bool,
}

impl Attempts {
    pub(crate) fn new(upstreams: Arc<Upstreams>, limits: ReplayLimits, request: Repeatable) -> Self {
        Self { upstreams, limits, request, lost: Vec::new(), lost_at: Instant::now(), fruitless: 0, streaming: false }
    }

    /// What an instance answers; with `resume`, to the request whose answer was begun.
    pub(crate) async fn respond(&mut self, resume: Option<&Resume>) -> Result<(Backend, reqwest::Response), ApiError> {
        let body = resume.map_or_else(|| self.request.body.clone(), |r| r.request(&self.request.body).into());
        let mut refused = None;
        loop {
            for backend in self.upstreams.candidates(self.request.tokens(), &self.lost) {
                match self.send(&backend, body.clone()).await {
                    Ok(response) if !self.streaming || is_event_stream(&response) => return Ok((backend, response)),
                    Ok(response) => match self.refusal(&backend, response).await {
                        error if passes(error.status) => refused = Some(error),
                        error => return Err(error),
                    },
                    Err(Unanswered::Unreachable(why)) => {
                        tracing::warn!(instance = %backend.name, why, "an instance could not be reached");
                        metrics::counter!("lagoon_gateway_retries_total", "instance" => backend.name.clone())
                            .increment(1);
                        refused = Some(ApiError::unavailable(format!(
                            "no instance could be reached, lastly {}",
                            backend.name
                        )));
                    }
                    Err(Unanswered::Lost(why)) => {
                        self.lose(&backend, &why)?;
                        break;
                    }
                }
            }
            let Some(last) = self.lost.last() else {
                return Err(refused.unwrap_or_else(none_alive));
            };
            let limits = self.limits;
            if self.lost_at.elapsed() >= limits.deadline {
                let why = refused.map_or_else(|| "no instance is alive".to_owned(), |error| error.message);
                return Err(given_up(lost(
                    &last.name,
                    &format!("no other instance went on with the request for {} s: {why}", limits.deadline.as_secs()),
                )));
            }
            // Requests that were lost together do not come back together.
            let pause = limits.pause.mul_f64(rand::rng().random_range(0.5..1.5));
            tokio::time::sleep(pause).await;
        }
    }

    async fn send(&self, backend: &Backend, body: Bytes) -> Result<reqwest::Response, Unanswered> {
        let Repeatable { method, target, headers, .. } = &self.request;
        let url = format!("http://{}{target}", backend.http_addr);
        let mut request = self.upstreams.http.request(method.clone(), url).headers(headers.clone());
        if !body.is_empty() {
            request = request.body(body);
        }
        match self.unless_dead(backend.http_addr, request.send()).await {
            Some(Ok(response)) => Ok(response),
            Some(Err(error)) if error.is_connect() => Err(Unanswered::Unreachable(reason(error))),
            Some(Err(error)) => Err(Unanswered::Lost(reason(error))),
            None => Err(Unanswered::Lost("it is silent, and dead to the pool".to_owned())),
        }
    }

    /// Waits for `answer` of an instance; `None` when it was silent, and is dead to the pool.
    async fn unless_dead<T>(&self, addr: SocketAddr, answer: impl Future<Output = T>) -> Option<T> {
        self.upstreams.unless_dead(addr, self.limits.silence, answer).await
    }

    /// What an instance says that does not go on with a stream.
    async fn refusal(&self, backend: &Backend, response: reqwest::Response) -> ApiError {
        let status = response.status();
        let body = Body::from_stream(response.bytes_stream());
        let read = tokio::time::timeout(self.limits.deadline, to_bytes(body, REFUSAL_BYTES_MAX)).await;
        let body = read.ok().and_then(Result::ok).unwrap_or_default();
        let said = serde_json::from_slice::<serde_json::Value>(&body).unwrap_or_default();
        let said = said["error"]["message"].as_str().unwrap_or("nothing more");
        let message =
            format!("{} refused to go on with the request of an instance that was lost: {said}", backend.name);
        given_up(ApiError::new(status, Some("instance_lost"), message))
    }

    /// Counts a loss; an error when there were too many.
    fn lose(&mut self, backend: &Backend, why: &str) -> Result<(), ApiError> {
        tracing::warn!(instance = %backend.name, why, "an instance was lost under a request");
        count(backend, "lost");
        self.lost.push(backend.clone());
        self.lost_at = Instant::now();
        if !self.request.pure {
            return Err(lost(&backend.name, "the request may have been carried out"));
        }
        self.fruitless += 1;
        if self.lost.len() > self.limits.replays_max || self.fruitless >= self.limits.fruitless_max {
            let why = format!("the request was lost with {} instances, and is not given to another", self.lost.len());
            return Err(given_up(lost(&backend.name, &why)));
        }
        metrics::counter!("lagoon_gateway_replays_total", "state" => "begun").increment(1);
        Ok(())
    }

    /// The events of an answer that `backend` began, to their end, whoever gives it.
    pub(crate) fn events(
        mut self,
        backend: Backend,
        response: reqwest::Response,
    ) -> impl Stream<Item = Result<Bytes, Infallible>> + Send + use<> {
        self.streaming = true;
        let stream = Events {
            addr: backend.http_addr,
            backend,
            chunks: response.bytes_stream().boxed(),
            attempts: self,
            pending: Pending::default(),
            journal: Journal::default(),
        };
        stream::unfold(Some(stream), |stream| async move {
            let (event, stream) = stream?.next().await?;
            Some((Ok(event), stream))
        })
    }
}

/// Of an instance that refused to go on: others may do it.
fn passes(status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error()
}

fn given_up(error: ApiError) -> ApiError {
    metrics::counter!("lagoon_gateway_replays_total", "state" => "failed").increment(1);
    error
}

pub(crate) fn is_event_stream(response: &reqwest::Response) -> bool {
    let kind = response.headers().get(axum::http::header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    response.status() == StatusCode::OK && kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
}

/// What went wrong and what caused it, in a line.
fn reason(error: reqwest::Error) -> String {
    format!("{:#}", anyhow::Error::from(error.without_url()))
}

/// An event stream in flight.
struct Events {
    attempts: Attempts,
    backend: Backend,
    addr: SocketAddr,
    chunks: BoxStream<'static, reqwest::Result<Bytes>>,
    pending: Pending,
    journal: Journal,
}

impl Events {
    /// The next event for the client, and the rest of the stream unless this was the last one.
    async fn next(mut self) -> Option<(Bytes, Option<Self>)> {
        loop {
            let why = match self.pending.next().map(|event| self.journal.read(&event)) {
                Some(Read::Event(event)) => {
                    self.attempts.fruitless = 0;
                    return Some((event.into(), Some(self)));
                }
                Some(Read::Error { event, again }) if !again || !self.journal.is_whole() => {
                    return Some((event.into(), None));
                }
                Some(Read::Error { event, .. }) => String::from_utf8_lossy(&event).into_owned(),
                None => match self.attempts.unless_dead(self.addr, self.chunks.next()).await {
                    Some(Some(Ok(chunk))) => match self.pending.push(&chunk) {
                        Ok(()) => continue,
                        Err(error) => return Some((last_words(&error), None)),
                    },
                    _ if self.journal.is_done() => return None,
                    Some(None) if !self.journal.is_whole() => return self.pending.rest().map(|rest| (rest, None)),
                    Some(None) => "its answer has no end".to_owned(),
                    Some(Some(Err(error))) => reason(error),
                    None => "it is silent, and dead to the pool".to_owned(),
                },
            };
            if self.journal.has_ended() {
                return Some((Bytes::from_static(DONE), None));
            }
            if let Err(error) = self.go_on(&why).await {
                return Some((last_words(&error), None));
            }
        }
    }

    /// Has another instance say the rest.
    async fn go_on(&mut self, why: &str) -> Result<(), ApiError> {
        // Ending the connection cancels what may still run there.
        self.chunks = stream::empty().boxed();
        self.pending = Pending::default();
        self.attempts.lose(&self.backend, why)?;
        if !self.journal.is_whole() {
            return Err(given_up(lost(&self.backend.name, "it told nobody what it had said, in tokens")));
        }
        let resume = self.journal.resume();
        let (backend, response) = self.attempts.respond(resume.as_ref()).await?;
        tracing::info!(lost = %self.backend.name, instance = %backend.name, "another instance goes on with a request");
        count(&backend, "went_on");
        metrics::counter!("lagoon_gateway_replays_total", "state" => "done").increment(1);
        self.addr = backend.http_addr;
        self.backend = backend;
        self.chunks = response.bytes_stream().boxed();
        Ok(())
    }
}

fn last_words(error: &ApiError) -> Bytes {
    Bytes::from(format!("data: {}\n\n", error.body()))
}

/// What came of a stream and is no whole event yet.
#[derive(Debug, Default)]
struct Pending {
    bytes: Vec<u8>,
    /// No event ends before.
    searched: usize,
}

impl Pending {
    fn push(&mut self, chunk: &[u8]) -> Result<(), ApiError> {
        self.bytes.extend_from_slice(chunk);
        if self.bytes.len() - self.searched > EVENT_BYTES_MAX {
            return Err(ApiError::internal(format!("an event of more than {EVENT_BYTES_MAX} bytes")));
        }
        Ok(())
    }

    /// Takes the next whole event, the empty line that ends it included.
    fn next(&mut self) -> Option<Vec<u8>> {
        let ends = |at: &usize| {
            let after = &self.bytes[at + 1..];
            self.bytes[*at] == b'\n' && (after.starts_with(b"\n") || after.starts_with(b"\r\n"))
        };
        let Some(at) = (self.searched..self.bytes.len()).find(ends) else {
            // The last two bytes may be the beginning of an end.
            self.searched = self.bytes.len().saturating_sub(2);
            return None;
        };
        let end = at + if self.bytes[at + 1] == b'\n' { 2 } else { 3 };
        let rest = self.bytes.split_off(end);
        self.searched = 0;
        Some(std::mem::replace(&mut self.bytes, rest))
    }

    /// What is left when a stream ends without an end.
    fn rest(&mut self) -> Option<Bytes> {
        (!self.bytes.is_empty()).then(|| std::mem::take(&mut self.bytes).into())
    }
}

#[cfg(test)]
#[path = "replay_tests.rs"]
mod tests;
