//! Replay: requests that outlive the loss of their instance. Carries out what [`lagoon_cluster::dispatch::Replay`] decides.
//!
//! The gateway keeps a request's body, and for a stream the tokens that the client has got ([`lagoon_http::journal`]).
//! When the instance is lost, the request goes to another one with the response so far: that one computes both as a
//! prompt and streams the rest, sampled at its place in the response. Other responses start anew.
//!
//! Invariants: only whole events reach the client, and none twice; a request runs at one instance at a time as far as
//! the gateway knows (dropping a connection cancels there); when the client disconnects, everything here is dropped.

use crate::asked::Asked;
use crate::dispatch_queue::Ticket;
use crate::retry_budget::retry_after;
use crate::upstreams::{Backend, Upstreams, end_to_end, lost, none_alive};
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{self, HeaderMap, HeaderValue, Method, StatusCode, header};
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use lagoon_cluster::dispatch::{Aborted, Next, Progress, Replay, Resend};
use lagoon_http::access::{REPORT_HEADER, Report};
use lagoon_http::client::{Response, SendError};
use lagoon_http::error::{ERROR_HEADER, HANDED_BACK, NOT_SERVING, QUEUE_FULL, RATE_LIMIT_EXCEEDED};
use lagoon_http::journal::{self, HAND_BACK_HEADER, Journal, Read, Resume};
use lagoon_http::keys::TENANT_HEADER;
use lagoon_http::{ApiError, Bodies, Caller, Holder, Limits, Share};
use lagoon_types::limits::REPLAY_SILENCE_MS;
use rand::Rng as _;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Longest event of a stream, in bytes; logits of many tokens are large.
const EVENT_BYTES_MAX: usize = 64 << 20;
/// Bytes read of an error response.
const REFUSAL_BYTES_MAX: usize = 64 << 10;
/// Time to read one before another instance is asked.
const REFUSAL_DEADLINE: Duration = Duration::from_secs(2);
/// Bytes of a request body that count as one token.
const BYTES_PER_TOKEN: u64 = 4;
/// Paths whose requests only compute a response, and whose streams have a journal.
const GENERATE: [&str; 6] =
    ["/v1/completions", "/v1/chat/completions", CHAT_BATCH, EMBEDDINGS, "/completion", "/completions"];
const CHAT_BATCH: &str = "/v1/chat/completions/batch";
const EMBEDDINGS: &str = "/v1/embeddings";
/// Paths whose requests only compute a response, whole.
const COMPUTE: [&str; 3] = ["/tokenize", "/detokenize", "/apply-template"];
/// The end mark of a stream.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Limits of a request's replays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplayLimits {
    /// When it fails.
    pub(crate) core: lagoon_cluster::dispatch::ReplayLimits,
    /// Pause between two rounds over the instances.
    pub(crate) pause: Duration,
    /// Silence after which an instance that the pool counts as dead is lost. One whose process ended is lost at once.
    pub(crate) silence: Duration,
}

impl Default for ReplayLimits {
    fn default() -> Self {
        Self {
            core: lagoon_cluster::dispatch::ReplayLimits::default(),
            pause: Duration::from_millis(250),
            silence: Duration::from_millis(REPLAY_SILENCE_MS),
        }
    }
}

impl ReplayLimits {
    fn deadline(&self) -> Duration {
        Duration::from_millis(self.core.deadline_ms)
    }
}

/// A request that can be sent again.
#[derive(Debug)]
pub(crate) struct Repeatable {
    method: Method,
    target: String,
    headers: HeaderMap,
    body: Bytes,
    /// Whether it only computes a response: a duplicate does no harm.
    pure: bool,
    /// Its sizes, for dispatch; nothing for a request that generates nothing.
    asked: Asked,
    _share: Share,
}

impl Repeatable {
    /// Reads a request within the limits.
    pub(crate) async fn read(bodies: &Bodies, request: Request) -> Result<Self, ApiError> {
        let (head, body) = request.into_parts();
        let target = head.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        let generates = GENERATE.contains(&head.uri.path());
        let holder = Holder::of(&head.extensions);
        let Limits { body_bytes_max, body_deadline, .. } = Limits::default();
        let (body, share) = bodies.read(holder, body, body_bytes_max, body_deadline).await?;
        let pure = body.is_empty() || generates || COMPUTE.contains(&head.uri.path());
        let mut headers = end_to_end(&head.headers);
        headers.remove(TENANT_HEADER);
        headers.remove(HAND_BACK_HEADER);
        let tenant = head.extensions.get::<Caller>().and_then(Caller::header);
        tenant.into_iter().for_each(|tenant| _ = headers.insert(TENANT_HEADER, tenant));
        if generates {
            headers.insert(journal::HEADER, HeaderValue::from_static("1"));
        }
        let tenant = head.extensions.get::<Caller>().map_or("", Caller::tenant);
        let asked = match head.uri.path() {
            EMBEDDINGS => Asked::read(&body, tenant).await.of_embeddings(),
            _ if generates => Asked::read(&body, tenant).await,
            _ => Asked::default(),
        };
        Ok(Self { method: head.method, target, headers, body, pure, asked, _share: share })
    }

    /// The request's body.
    pub(crate) fn body(&self) -> Bytes {
        self.body.clone()
    }

    /// Whether it generates: it waits for its turn, and its stream has a journal.
    fn generates(&self) -> bool {
        self.headers.contains_key(journal::HEADER)
    }

    fn tokens(&self) -> u64 {
        u64::try_from(self.body.len()).unwrap_or(u64::MAX) / BYTES_PER_TOKEN
    }
}

/// Why an instance did not answer.
enum Unanswered {
    /// The request was not sent.
    Unreachable(String),
    /// The instance may have begun to process the request.
    Lost(String),
}

/// A request, and its attempts so far.
#[derive(Debug)]
pub(crate) struct Attempts {
    upstreams: Arc<Upstreams>,
    limits: ReplayLimits,
    request: Repeatable,
    /// Its place in the queue, and then at its instance, once it has one.
    ticket: Option<Ticket>,
    /// The rate limit to charge its tokens to.
    caller: Caller,
    /// Tokens that were charged so far, but for those of events.
    charged: u64,
    /// Where it goes next, and when it fails; its time is that since `begun`.
    replay: Replay<SocketAddr>,
    begun: Instant,
    /// The instance that was lost under it last, and what its client had then.
    lost: Option<Backend>,
    progress: Progress,
    /// The client has the beginning of a stream: answers of any other kind are of no use to it.
    streaming: bool,
}

impl Attempts {
    /// Charges an estimate of the prompt: a client that leaves before the answer begins has had it computed.
    pub(crate) fn new(upstreams: Arc<Upstreams>, limits: ReplayLimits, request: Repeatable, caller: Caller) -> Self {
        upstreams.retries().deposit();
        let charged = if request.generates() { request.tokens() } else { 0 };
        caller.charge(charged);
        let replay = Replay::new(limits.core, request.pure);
        let begun = Instant::now();
        let (ticket, lost, progress, streaming) = (None, None, Progress::NONE, false);
        Self { upstreams, limits, request, ticket, caller, charged, replay, begun, lost, progress, streaming }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Counts a response, and corrects the charge by its headers; a stream's events correct it further.
    pub(crate) fn count(&mut self, backend: &Backend, response: &Response) {
        self.upstreams.counts.request(&backend.name, response.status().as_str());
        self.caller.record().answered_by(&backend.name);
        let report = response.headers().get(REPORT_HEADER).and_then(Report::of_header);
        report.into_iter().for_each(|report| self.caller.record().learn(report));
        if response.status() != StatusCode::OK {
            self.correct_charge(0);
        } else if self.charged > 0 {
            let reported = response.headers().get(journal::TOKENS_HEADER);
            let reported = reported.and_then(|value| value.to_str().ok()?.parse().ok());
            self.correct_charge(reported.unwrap_or(self.charged));
        }
    }

    fn correct_charge(&mut self, tokens: u64) {
        self.caller.charge(tokens.saturating_sub(self.charged));
        self.caller.give_back(self.charged.saturating_sub(tokens));
        self.charged = tokens;
    }

    /// Whether an attempt may be made now: a free one, or one on the budget. The first of a request is free, and so is the first after
    /// each loss: those are as many as were running. Those after a refusal, which an overloaded pool would get in addition, are on the budget.
    fn may_send(&self, is_free: bool) -> bool {
        is_free || self.upstreams.retries().withdraw(Instant::now())
    }

    /// An instance's response; with `resume`, to a request whose response was sent in part.
    pub(crate) async fn respond(&mut self, resume: Option<&Resume>) -> Result<(Backend, Response), ApiError> {
        let body = resume.map_or_else(|| self.request.body.clone(), |r| r.request(&self.request.body).into());
        // None has refused since the last loss. Of a request that lost none, the client gets the last refusal as it is.
        let (mut refused, mut refusal, mut backends) = (None, None, Vec::new());
        loop {
            let (instance, is_free) = match self.replay.next(self.now_ms()) {
                Next::Look => {
                    backends = self.candidates().await?;
                    continue;
                }
                // Jitter: requests lost together do not return together.
                Next::Pause => {
                    let pause = self.limits.pause.mul_f64(rand::rng().random_range(0.5..1.5));
                    tokio::time::sleep(pause).await;
                    continue;
                }
                Next::Abort(why) => {
                    let refusal = refusal.filter(|_| why == Aborted::NoInstance);
                    return refusal.ok_or_else(|| self.failed(why, refused));
                }
                Next::Send { instance, is_free } => (instance, is_free),
            };
            let listed = backends.iter().find(|backend| backend.http_addr == instance);
            let Some(backend) = listed.filter(|_| self.may_send(is_free)).cloned() else { continue };
            self.ticket.iter().for_each(|ticket| ticket.sent(backend.http_addr));
            let sent = self.send(&backend, body.clone()).await;
            if let Ok(response) = &sent {
                self.note_rest(&backend, response);
            }
            match sent {
                Ok(response) if is_handed_back(&response) && self.may_hand_back() => {
                    self.queue_again();
                    self.count_refusal(refusal.take());
                    refused = None;
                }
                Ok(response) if !self.is_refusal(&response) => {
                    self.count_refusal(refusal);
                    self.replay.answered();
                    return Ok((backend, response));
                }
                Ok(response) if self.replay.waits_for_turn() => {
                    self.count_refusal(refusal.take());
                    match self.read_refusal(&backend, response).await {
                        Ok(response) => refusal = Some((backend, response)),
                        Err(error) => refused = Some(error),
                    }
                }
                Ok(response) => match self.refusal(&backend, response).await {
                    error if passes(error.status) => {
                        self.replay.refuse();
                        refused = Some(error);
                    }
                    error => return Err(error),
                },
                Err(Unanswered::Unreachable(why)) => {
                    tracing::warn!(instance = %backend.name, why, "an instance could not be reached");
                    self.upstreams.counts.retry(&backend.name);
                    if !is_free {
                        self.upstreams.retries().give_back();
                    }
                    let why = format!("no instance could be reached, lastly {}", backend.name);
                    refused = Some(ApiError::unavailable(why));
                }
                Err(Unanswered::Lost(why)) => {
                    self.count_refusal(refusal.take());
                    self.lose(&backend, &why)?;
                }
            }
        }
    }

    /// Reads a refusal, so that it holds no connection while others are asked.
    async fn read_refusal(&mut self, backend: &Backend, response: Response) -> Result<Response, ApiError> {
        self.replay.refuse();
        let unread = |why| ApiError::unavailable(format!("{} refused: {why}", backend.name));
        response.buffered(REFUSAL_BYTES_MAX, REFUSAL_DEADLINE).await.map_err(unread)
    }

    /// Counts a refusal that no client gets.
    fn count_refusal(&self, refusal: Option<(Backend, Response)>) {
        if let Some((backend, response)) = refusal {
            self.upstreams.counts.request(&backend.name, response.status().as_str());
        }
    }

    /// Has the instances to try next. A request that generates waits for its turn first, unless it lost an instance: what its client
    /// has begun to read goes on at once.
    async fn candidates(&mut self) -> Result<Vec<Backend>, ApiError> {
        let Repeatable { asked, body, .. } = &self.request;
        if self.ticket.is_none() && self.request.generates() {
            self.ticket = Some(self.upstreams.queue.enter(asked, &self.caller, body.len()));
        }
        let bound = match &mut self.ticket {
            Some(ticket) if self.replay.waits_for_turn() => ticket.bound().await,
            _ => Ok(None),
        };
        let bound = bound.inspect_err(|_| self.correct_charge(0))?;
        let candidates = self.upstreams.candidates(&self.request.asked, bound.is_some());
        self.replay.round(bound, candidates.iter().map(|backend| backend.http_addr));
        Ok(candidates)
    }

    /// The error of a request that is not sent again.
    fn failed(&mut self, why: Aborted, refused: Option<ApiError>) -> ApiError {
        if why == Aborted::NoInstance {
            self.correct_charge(0);
        }
        let lost_with = |why: &str| lost(self.lost.as_ref().map_or("an instance", |lost| lost.name.as_str()), why);
        match why {
            Aborted::NoInstance => refused.unwrap_or_else(none_alive),
            Aborted::NotRepeatable => lost_with("the request may have been carried out"),
            Aborted::NotWhole => replay_failed(lost_with("its stream has no journal")),
            Aborted::TooManyLost(count) => {
                let why = format!("the request was lost with {count} instances, and is not given to another");
                replay_failed(lost_with(&why))
            }
            Aborted::Deadline => {
                let why = refused.map_or_else(|| "no instance is alive".to_owned(), |error| error.message);
                let seconds = self.limits.deadline().as_secs();
                replay_failed(lost_with(&format!("no other instance went on with the request for {seconds} s: {why}")))
            }
        }
    }

    /// Whether an instance may give the request back: nothing of it was lost, and not too often.
    fn may_hand_back(&self) -> bool {
        self.replay.waits_for_turn() && self.ticket.as_ref().is_some_and(Ticket::may_hand_back)
    }

    /// Whether an instance refused a request that another one may take. Of a stream that has begun, any other answer is a refusal.
    fn is_refusal(&self, response: &Response) -> bool {
        if self.streaming {
            return !is_event_stream(response);
        }
        // A 503 may also end what has begun, such as a wait of minutes for memory or a step that broke the device: the code tells.
        let is_busy = matches!(response.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        let code = response.headers().get(ERROR_HEADER);
        self.request.pure && is_busy && code.is_none_or(|code| code == QUEUE_FULL || code == NOT_SERVING)
    }

    /// Queues a request again that its instance gave back.
    fn queue_again(&mut self) {
        self.replay.hand_back();
        self.ticket.iter_mut().for_each(Ticket::handed_back);
    }

    async fn send(&self, backend: &Backend, body: Bytes) -> Result<Response, Unanswered> {
        let Repeatable { method, target, headers, .. } = &self.request;
        let request = http::Request::builder().method(method).uri(self.upstreams.url(backend, target));
        let request = request.body(Body::from(body));
        let mut request = request.map_err(|error| Unanswered::Unreachable(error.to_string()))?;
        *request.headers_mut() = headers.clone();
        if self.may_hand_back() {
            request.headers_mut().insert(HAND_BACK_HEADER, HeaderValue::from_static("1"));
        }
        match self.unless_dead(backend.http_addr, self.upstreams.http.send(request)).await {
            Some(Ok(response)) => Ok(response),
            Some(Err(SendError::Connect(why))) => Err(Unanswered::Unreachable(why)),
            Some(Err(SendError::Broken(why))) => Err(Unanswered::Lost(why)),
            None => Err(Unanswered::Lost("it is silent, and dead to the pool".to_owned())),
        }
    }

    /// Waits for `answer` of an instance; `None` if it was silent and the pool counts it as dead.
    async fn unless_dead<T>(&self, addr: SocketAddr, answer: impl Future<Output = T>) -> Option<T> {
        self.upstreams.unless_dead(addr, self.limits.silence, answer).await
    }

    /// Honours `Retry-After`: the refusing instance does not get this request again before that time, and other requests only
    /// if no other instance takes them. A refusal for a key's rate concerns that key only.
    fn note_rest(&mut self, backend: &Backend, response: &Response) {
        if !passes(response.status()) {
            return;
        }
        let output = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
        let Some(rest) = output.and_then(|output| retry_after(output, SystemTime::now())) else { return };
        let (addr, now, now_ms) = (backend.http_addr, Instant::now(), self.now_ms());
        let rest_ms = u64::try_from(rest.as_millis()).unwrap_or(u64::MAX);
        self.replay.bar(addr, now_ms.saturating_add(rest_ms), now_ms);
        if response.headers().get(ERROR_HEADER).is_none_or(|code| code != RATE_LIMIT_EXCEEDED) {
            self.upstreams.retries().rest(addr, rest, now);
        }
    }

    /// The error of an instance that does not go on with a stream.
    async fn refusal(&self, backend: &Backend, response: Response) -> ApiError {
        let status = response.status();
        let read = tokio::time::timeout(self.limits.deadline(), response.bytes(REFUSAL_BYTES_MAX)).await;
        let body = read.ok().and_then(Result::ok).unwrap_or_default();
        let output = serde_json::from_slice::<serde_json::Value>(&body).unwrap_or_default();
        let output = output["error"]["message"].as_str().unwrap_or("nothing more");
        let message = format!("{} refused to continue a request of a lost instance: {output}", backend.name);
        replay_failed(ApiError::new(status, Some("instance_lost"), message))
    }

    /// Counts a loss, and says what is sent to the next instance; an error if there is none.
    fn lose(&mut self, backend: &Backend, why: &str) -> Result<Resend, ApiError> {
        let verdict = self.replay.lose(backend.http_addr, self.progress, self.now_ms());
        if verdict == Ok(Resend::Nothing) {
            return Ok(Resend::Nothing);
        }
        tracing::warn!(instance = %backend.name, why, "an instance was lost under a request");
        self.upstreams.counts.request(&backend.name, "lost");
        self.lost = Some(backend.clone());
        let resend = verdict.map_err(|why| self.failed(why, None))?;
        metrics::counter!("lagoon_gateway_replays_total", "state" => "begun").increment(1);
        Ok(resend)
    }

    /// The events of a response that `backend` began, to its end, over losses.
    pub(crate) fn events(
        mut self,
        backend: Backend,
        response: Response,
    ) -> impl Stream<Item = Result<Bytes, Infallible>> + Send + use<> {
        self.streaming = true;
        let stream = Events {
            addr: backend.http_addr,
            backend,
            chunks: response.chunks().boxed(),
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

/// Whether another instance may accept a request that was refused with `status`.
fn passes(status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error()
}

/// Whether an instance gave the request back that it answers so.
fn is_handed_back(response: &Response) -> bool {
    response.headers().get(ERROR_HEADER).is_some_and(|code| code == HANDED_BACK)
}

fn replay_failed(error: ApiError) -> ApiError {
    metrics::counter!("lagoon_gateway_replays_total", "state" => "failed").increment(1);
    error
}

pub(crate) fn is_event_stream(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    response.status() == StatusCode::OK && kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
}

/// An event stream in flight.
struct Events {
    attempts: Attempts,
    backend: Backend,
    addr: SocketAddr,
    chunks: BoxStream<'static, Result<Bytes, SendError>>,
    pending: Pending,
    journal: Journal,
}

impl Events {
    /// The next event for the client, and the rest of the stream unless it was the last one.
    async fn next(mut self) -> Option<(Bytes, Option<Self>)> {
        loop {
            let before = self.journal.tokens();
            let why = match self.pending.next().map(|event| self.journal.read(&event)) {
                Some(Read::Event(event)) => {
                    self.attempts.replay.progressed();
                    self.note(self.journal.tokens() - before);
                    // Without a journal, an event counts as a token.
                    let tokens = if self.journal.is_whole() { self.journal.tokens() - before } else { 1 };
                    self.attempts.ticket.iter_mut().filter(|_| tokens > 0).for_each(Ticket::began);
                    self.attempts.caller.charge(tokens as u64);
                    return Some((event.into(), Some(self)));
                }
                Some(Read::Error { event, again }) if !again || !self.journal.is_whole() => {
                    self.attempts.caller.record().failed(code_of(&event).as_deref().unwrap_or("error"));
                    return Some((event.into(), None));
                }
                Some(Read::Error { event, .. }) => {
                    let is_back = code_of(&event).as_deref() == Some(HANDED_BACK) && self.journal.tokens() == 0;
                    if is_back && self.attempts.may_hand_back() {
                        self.attempts.queue_again();
                        if let Err(error) = self.take_up().await {
                            return Some((self.last_words(&error), None));
                        }
                        continue;
                    }
                    String::from_utf8_lossy(&event).into_owned()
                }
                None => match self.attempts.unless_dead(self.addr, self.chunks.next()).await {
                    Some(Some(Ok(chunk))) => match self.pending.push(&chunk) {
                        Ok(()) => continue,
                        Err(error) => return Some((self.last_words(&error), None)),
                    },
                    _ if self.journal.is_done() => return None,
                    Some(None) if !self.journal.is_whole() => return self.pending.rest().map(|rest| (rest, None)),
                    Some(None) => "its answer has no end".to_owned(),
                    Some(Some(Err(error))) => error.to_string(),
                    None => "it is silent, and dead to the pool".to_owned(),
                },
            };
            match self.go_on(&why).await {
                Ok(true) => {}
                Ok(false) => return Some((Bytes::from_static(DONE), None)),
                Err(error) => return Some((self.last_words(&error), None)),
            }
        }
    }

    /// What the client has.
    fn progress(&self) -> Progress {
        let (is_whole, has_ended) = (self.journal.is_whole(), self.journal.has_ended());
        Progress { tokens: self.journal.tokens() as u64, is_whole, has_ended }
    }

    /// Writes down what an event tells, for the access log.
    fn note(&mut self, tokens: usize) {
        let record = self.attempts.caller.record();
        if tokens > 0 {
            record.output(tokens);
        }
        self.journal.take_report().into_iter().for_each(|report| record.learn(report));
    }

    /// The last event of a stream that fails.
    fn last_words(&self, error: &ApiError) -> Bytes {
        self.attempts.caller.record().failed(error.code.unwrap_or("error"));
        Bytes::from(format!("data: {}\n\n", error.body()))
    }

    /// Has the instance that the queue chooses begin a stream that another gave back.
    async fn take_up(&mut self) -> Result<(), ApiError> {
        self.chunks = stream::empty().boxed();
        self.pending = Pending::default();
        let resume = self.journal.resume();
        let (backend, response) = self.attempts.respond(resume.as_ref()).await?;
        self.follow(backend, response);
        Ok(())
    }

    /// Goes on with the response of `backend`.
    fn follow(&mut self, backend: Backend, response: Response) {
        self.addr = backend.http_addr;
        self.attempts.caller.record().answered_by(&backend.name);
        self.backend = backend;
        self.chunks = response.chunks().boxed();
    }

    /// Has another instance continue the stream; false if nothing is missing but its end mark.
    async fn go_on(&mut self, why: &str) -> Result<bool, ApiError> {
        // Closing the connection cancels what may still run there.
        self.chunks = stream::empty().boxed();
        self.pending = Pending::default();
        let lost = self.backend.clone();
        self.attempts.progress = self.progress();
        if self.attempts.lose(&lost, why)? == Resend::Nothing {
            return Ok(false);
        }
        let resume = self.journal.resume();
        let (backend, response) = self.attempts.respond(resume.as_ref()).await?;
        tracing::info!(lost = %lost.name, instance = %backend.name, "another instance continues a request");
        self.attempts.upstreams.counts.request(&backend.name, "went_on");
        metrics::counter!("lagoon_gateway_replays_total", "state" => "done").increment(1);
        self.follow(backend, response);
        Ok(true)
    }
}

/// The code in an event with an error.
fn code_of(event: &[u8]) -> Option<String> {
    let error: serde_json::Value = serde_json::from_slice(event.trim_ascii().strip_prefix(b"data:")?).ok()?;
    error["error"]["code"].as_str().map(str::to_owned)
}

/// Received bytes that are no whole event yet.
#[derive(Debug, Default)]
struct Pending {
    bytes: Vec<u8>,
    /// Bytes already searched for the end of an event.
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

    /// Takes the next whole event, including its final empty line.
    fn next(&mut self) -> Option<Vec<u8>> {
        let ends = |at: &usize| {
            let after = &self.bytes[at + 1..];
            self.bytes[*at] == b'\n' && (after.starts_with(b"\n") || after.starts_with(b"\r\n"))
        };
        let Some(at) = (self.searched..self.bytes.len()).find(ends) else {
            // The last two bytes may belong to the end.
            self.searched = self.bytes.len().saturating_sub(2);
            return None;
        };
        let end = at + if self.bytes[at + 1] == b'\n' { 2 } else { 3 };
        let rest = self.bytes.split_off(end);
        self.searched = 0;
        Some(std::mem::replace(&mut self.bytes, rest))
    }

    /// The rest of a stream that ends within an event.
    fn rest(&mut self) -> Option<Bytes> {
        (!self.bytes.is_empty()).then(|| std::mem::take(&mut self.bytes).into())
    }
}

#[cfg(test)]
#[path = "replay_tests.rs"]
pub(crate) mod tests;
