//! The access log: one [`Line`] a request, handed to the log when the response has ended or the client has left.
//!
//! A [`Record`] travels with the request as an extension, and inside its [`Caller`](crate::Caller); handlers write down what they
//! learn. An instance also sends its [`Report`] to a gateway, whose log has the line: in a header of a whole response, and in
//! comments of a stream.

use crate::error::ERROR_HEADER;
use axum::{
    body::{Body, Bytes, HttpBody},
    http::{HeaderName, HeaderValue, Method, Response},
};
use hyper::body::{Frame, SizeHint};
use lagoon_types::CachedTokens;
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

/// Response header with the [`Report`] of an instance, for a gateway.
pub const REPORT_HEADER: HeaderName = HeaderName::from_static("x-lagoon-report");
/// Longest path in the log, in characters.
const PATH_LEN_MAX: usize = 128;
/// Longest name, reason or code in the log, in characters: servers behind a gateway may send any.
const WORD_LEN_MAX: usize = 256;
/// Outcome of a request whose client left before the end of the response.
const CLIENT_LEFT: &str = "client_left";

/// Takes the lines of an access log. It must not block.
pub type AccessLog = Arc<dyn Fn(&Line) + Send + Sync>;

/// What an instance knows of a generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<usize>,
    /// Time until it joined the batch: the longest of its sequences. In a gateway's log with the wait in the gateway's queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<u64>,
    /// Time to its first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<u64>,
    /// Finish reasons of its sequences, each once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish: Option<String>,
}

impl Report {
    /// The header's value; `None` if the model's name cannot stand in a header.
    #[must_use]
    pub fn header(&self) -> Option<HeaderValue> {
        HeaderValue::from_bytes(&serde_json::to_vec(self).ok()?).ok()
    }

    /// Reads a header's value.
    #[must_use]
    pub fn of_header(value: &HeaderValue) -> Option<Self> {
        serde_json::from_slice(value.as_bytes()).ok()
    }
}

/// One line of the access log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Line {
    /// `x-request-id`.
    pub id: String,
    pub method: String,
    pub path: String,
    /// The name of the request's key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Absent if the client left before the response began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    #[serde(flatten)]
    pub report: Report,
    pub total_ms: u64,
    /// Finish reasons, or an error's code, or `client_left`, or `ok`.
    pub outcome: String,
    /// The instance that answered, behind a gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
}

#[derive(Debug)]
struct Known {
    begun: Instant,
    line: Line,
    error: Option<String>,
    /// Its waits in a gateway's queue.
    waited: Option<Duration>,
}

impl Known {
    fn new(line: Line) -> Self {
        Self { begun: Instant::now(), line, error: None, waited: None }
    }
}

/// What is known of a request so far. Clones share it.
#[derive(Clone, Debug)]
pub struct Record(Arc<Mutex<Known>>);

impl Default for Record {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Known::new(Line::default()))))
    }
}

impl Record {
    pub(crate) fn new(id: &str, method: &Method, path: &str) -> Self {
        let shown = |c: char| if c.is_ascii_graphic() { c } else { '?' };
        let path = path.chars().take(PATH_LEN_MAX).map(shown).collect();
        let line = Line { id: id.to_owned(), method: method.to_string(), path, ..Line::default() };
        Self(Arc::new(Mutex::new(Known::new(line))))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn of_key(&self, name: &str) {
        self.known().line.key = Some(name.to_owned()).filter(|name| !name.is_empty());
    }

    /// A generation begins.
    pub fn begins(&self, model: &str, prompt_tokens: usize) {
        let report = &mut self.known().line.report;
        report.model = Some(model.to_owned());
        report.prompt_tokens = Some(prompt_tokens);
        report.cached_tokens = Some(0);
        report.output_tokens = Some(0);
    }

    /// A sequence's prompt joined the batch after `queue_ms`, with so many tokens cached.
    pub fn prompt(&self, cached: CachedTokens, queue_ms: u64) {
        let cached_tokens = usize::try_from(cached.total()).unwrap_or(usize::MAX);
        let report = &mut self.known().line.report;
        report.cached_tokens = Some(report.cached_tokens.unwrap_or(0) + cached_tokens);
        report.queue_ms = report.queue_ms.max(Some(queue_ms));
    }

    /// It waited in a gateway's queue.
    pub fn waited(&self, time: Duration) {
        let mut known = self.known();
        known.waited = Some(known.waited.unwrap_or_default() + time);
    }

    /// Tokens were generated.
    pub fn output(&self, tokens: usize) {
        let mut known = self.known();
        let elapsed = millis(known.begun.elapsed());
        let report = &mut known.line.report;
        if tokens > 0 {
            report.ttft_ms.get_or_insert(elapsed);
            report.queue_ms.get_or_insert(0);
        }
        report.output_tokens = Some(report.output_tokens.unwrap_or(0) + tokens);
    }

    /// A sequence ended for `reason`.
    pub fn finished(&self, reason: &str) {
        let finish = &mut self.known().line.report.finish;
        match finish {
            Some(reasons) if reasons.split(',').any(|other| other == reason) => {}
            Some(reasons) => *reasons = format!("{reasons},{reason}"),
            None => *finish = Some(reason.to_owned()),
        }
    }

    /// The response failed after it had begun.
    pub fn failed(&self, code: &str) {
        self.known().error.get_or_insert_with(|| short(code));
    }

    /// The instance that answers.
    pub fn answered_by(&self, instance: &str) {
        self.known().line.instance = Some(instance.to_owned());
    }

    /// An instance's report so far. Tokens and times that were measured here stay.
    pub fn learn(&self, of: Report) {
        let report = &mut self.known().line.report;
        let Report { output_tokens, ttft_ms, .. } = *report;
        let (model, finish) = (of.model.as_deref().map(short), of.finish.as_deref().map(short));
        let (output_tokens, ttft_ms) = (output_tokens.or(of.output_tokens), ttft_ms.or(of.ttft_ms));
        *report = Report { model, finish, output_tokens, ttft_ms, ..of };
    }

    /// What is known of the generation.
    #[must_use]
    pub fn report(&self) -> Report {
        self.known().line.report.clone()
    }

    /// The line of a request that ends now, with its whole response sent or not.
    fn line(&self, is_whole: bool) -> Line {
        let known = self.known();
        let failed = known.line.status.is_some_and(|status| status >= 400);
        let outcome = match (&known.error, is_whole, &known.line.report.finish) {
            (Some(code), _, _) => code,
            (None, false, _) => CLIENT_LEFT,
            (None, true, _) if failed => "error",
            (None, true, Some(finish)) => finish,
            (None, true, None) => "ok",
        };
        let outcome = outcome.to_owned();
        let mut line = Line { outcome, total_ms: millis(known.begun.elapsed()), ..known.line.clone() };
        if let Some(waited) = known.waited {
            line.report.queue_ms = Some(line.report.queue_ms.unwrap_or(0).saturating_add(millis(waited)));
        }
        line
    }
}

fn short(text: &str) -> String {
    text.chars().take(WORD_LEN_MAX).collect()
}

fn millis(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// Logs a request's line when dropped.
pub(crate) struct Pending {
    record: Record,
    log: AccessLog,
    /// Whether the whole response was handed on.
    is_whole: bool,
}

impl Pending {
    pub(crate) fn new(record: Record, log: AccessLog) -> Self {
        Self { record, log, is_whole: false }
    }

    /// The response whose end is the request's.
    pub(crate) fn answered(mut self, response: Response<Body>) -> Response<Body> {
        {
            let mut known = self.record.known();
            known.line.status = Some(response.status().as_u16());
            let code = response.headers().get(ERROR_HEADER).and_then(|code| code.to_str().ok());
            known.error = known.error.take().or(code.map(str::to_owned));
        }
        let (head, body) = response.into_parts();
        self.is_whole = body.is_end_stream();
        Response::from_parts(head, Body::new(Logged { body, pending: self }))
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("record", &self.record).finish_non_exhaustive()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        (self.log)(&self.record.line(self.is_whole));
    }
}

/// A body whose end is logged.
#[derive(Debug)]
struct Logged {
    body: Body,
    pending: Pending,
}

impl HttpBody for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        match &polled {
            Poll::Ready(None) => self.pending.is_whole = true,
            Poll::Ready(Some(Ok(_))) => self.pending.is_whole = self.body.is_end_stream(),
            Poll::Ready(Some(Err(_))) => self.pending.record.failed("response_broken"),
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
