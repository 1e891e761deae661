//! The HTTP server's metrics, and the tables in which every process declares its metrics.
//!
//! A [`Metric`] is declared once: the recorder's histogram bounds and descriptions, and docs/reference/metrics.md, are
//! generated from it. A process calls [`install`] with its tables and passes the handle to the server, so that
//! `/metrics` also shows the process's other metrics.

use crate::{exposition::Exposition, vllm_names};
use axum::{
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// The declaration of one metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Name in the Prometheus exposition.
    pub name: &'static str,
    /// Counter, gauge or histogram.
    pub kind: Kind,
    /// Unit of the value.
    pub unit: &'static str,
    /// Labels, each with its values; no values if not known in advance (names of instances).
    pub labels: Labels,
    /// One sentence for operators; also the `# HELP` line.
    pub help: &'static str,
}

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Only grows while the process lives.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts observations by upper bound.
    Histogram {
        /// Upper bounds of the buckets, in the metric's unit.
        bounds: &'static [f64],
    },
}

/// The labels of a metric: names, each with its values.
pub type Labels = &'static [(&'static str, &'static [&'static str])];

impl Metric {
    /// Declares a counter.
    #[must_use]
    pub const fn counter(name: &'static str, unit: &'static str, labels: Labels, help: &'static str) -> Self {
        Self { name, kind: Kind::Counter, unit, labels, help }
    }

    /// Declares a gauge.
    #[must_use]
    pub const fn gauge(name: &'static str, unit: &'static str, labels: Labels, help: &'static str) -> Self {
        Self { name, kind: Kind::Gauge, unit, labels, help }
    }

    /// Declares a histogram of seconds with these upper bounds.
    #[must_use]
    pub const fn seconds(name: &'static str, bounds: &'static [f64], labels: Labels, help: &'static str) -> Self {
        Self { name, kind: Kind::Histogram { bounds }, unit: "seconds", labels, help }
    }
}

impl Kind {
    /// The kind's name in a `# TYPE` line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram { .. } => "histogram",
        }
    }
}

/// Names the model: 1.
const MODEL_INFO: &str = "lagoon_model_info";
const SEQUENCE_SECONDS: &str = "lagoon_sequence_seconds";
const REQUESTS: &str = "lagoon_http_requests_total";
pub(crate) const HTTPS_EXPIRES: &str = "lagoon_https_certificate_expires_timestamp_seconds";
const REQUEST_SECONDS: &str = "lagoon_http_request_seconds";
const RUNNING: &str = "lagoon_sequences_running";
const ENDED: &str = "lagoon_sequences_total";
const FIRST_TOKEN_SECONDS: &str = "lagoon_time_to_first_token_seconds";
const NEXT_TOKEN_SECONDS: &str = "lagoon_time_between_tokens_seconds";
const PROMPT_TOKENS: &str = "lagoon_prompt_tokens_total";
const GENERATION_TOKENS: &str = "lagoon_generation_tokens_total";

/// Bounds of buckets for requests and their phases, in seconds.
pub const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
/// Bounds of buckets for waits within one step, in seconds.
pub const STEP_SECONDS: &[f64] =
    &[0.000_025, 0.000_05, 0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0];
/// Interval of the recorder's upkeep, which bounds histograms that are never scraped.
const UPKEEP: Duration = Duration::from_secs(5);

/// The certificate of an HTTPS port.
pub const HTTPS: &[Metric] = &[Metric::gauge(
    HTTPS_EXPIRES,
    "seconds",
    &[],
    "When the certificate of HTTPS ends, in seconds since 1970; absent without --https-cert.",
)];

/// The HTTP server's metrics.
pub const METRICS: &[Metric] = &[
    Metric::gauge(MODEL_INFO, "", &[("model", &[])], "1, with the name of the served model."),
    Metric::counter(
        REQUESTS,
        "requests",
        &[("route", &[]), ("status", &[])],
        "HTTP requests by route and HTTP status.",
    ),
    Metric::seconds(
        REQUEST_SECONDS,
        SECONDS,
        &[("route", &[])],
        "Time from the arrival of a request to the headers of its response.",
    ),
    Metric::gauge(RUNNING, "sequences", &[], "Sequences that were submitted and have not ended."),
    Metric::counter(
        ENDED,
        "sequences",
        &[("outcome", &["stop", "length", "kv_capacity", "failed", "cancelled"])],
        "Sequences that have ended, by outcome.",
    ),
    Metric::seconds(FIRST_TOKEN_SECONDS, SECONDS, &[], "Time from submission to the first token of a sequence (TTFT)."),
    Metric::seconds(NEXT_TOKEN_SECONDS, SECONDS, &[], "Time between two consecutive tokens of a sequence (TBT)."),
    Metric::seconds(
        SEQUENCE_SECONDS,
        SECONDS,
        &[],
        "Time from submission to the end of a sequence that was neither cancelled nor failed.",
    ),
    Metric::counter(PROMPT_TOKENS, "tokens", &[], "Prompt tokens of accepted requests."),
    Metric::counter(GENERATION_TOKENS, "tokens", &[], "Generated tokens."),
];

/// How a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Stop,
    Length,
    /// At the pool's capacity.
    KvCapacity,
    Failed,
    /// The client disconnected, or another sequence of the same request failed.
    Cancelled,
}

/// Installs the process-wide recorder, with the bounds and descriptions of `tables`, and starts the recorder's
/// housekeeping. Call once, inside a tokio runtime.
///
/// # Errors
/// When a recorder is installed already.
pub fn install(tables: &[&[Metric]]) -> Result<PrometheusHandle, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for metric in tables.iter().copied().flatten() {
        if let Kind::Histogram { bounds } = metric.kind {
            builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), bounds)?;
        }
    }
    let handle = builder.install_recorder()?;
    tables.iter().copied().flatten().for_each(describe);
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

fn describe(metric: &Metric) {
    match metric.kind {
        Kind::Counter => describe_counter!(metric.name, metric.help),
        Kind::Gauge => describe_gauge!(metric.name, metric.help),
        Kind::Histogram { .. } => describe_histogram!(metric.name, metric.help),
    }
}

/// Another server whose names of metrics are exported, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compat {
    /// vLLM ([`vllm_names`]).
    Vllm,
}

/// The response to a request for metrics.
pub fn response(text: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// The recorder's metrics in the text format: families by name, series by labels.
#[must_use]
pub fn render(handle: &PrometheusHandle, compat: Option<Compat>) -> String {
    let text = handle.render();
    match Exposition::parse(&text) {
        Ok(mut metrics) => {
            compat.into_iter().for_each(|Compat::Vllm| vllm_names::add(&mut metrics));
            metrics.text()
        }
        Err(error) => {
            tracing::error!(%error, "the recorder's text breaks a rule of its format");
            text
        }
    }
}

/// Exports the model's name, and the metrics without labels at 0 before the first request.
pub(crate) fn export_at_start(model: &str) {
    gauge!(MODEL_INFO, "model" => model.to_owned()).set(1.0);
    gauge!(RUNNING).increment(0.0);
    counter!(PROMPT_TOKENS).increment(0);
    counter!(GENERATION_TOKENS).increment(0);
}

/// Counts a request. `route` is the matched pattern, never the raw path: labels stay few.
pub(crate) fn request(route: &str, status: StatusCode, elapsed: Duration) {
    counter!(REQUESTS, "route" => route.to_owned(), "status" => status.as_u16().to_string()).increment(1);
    histogram!(REQUEST_SECONDS, "route" => route.to_owned()).record(elapsed);
}

pub(crate) fn prompt_tokens(tokens: usize) {
    counter!(PROMPT_TOKENS).increment(u64::try_from(tokens).unwrap_or(u64::MAX));
}

/// Sequences of this process that were submitted and have not ended.
static RUNNING_NOW: AtomicU64 = AtomicU64::new(0);

pub(crate) fn running() -> u64 {
    RUNNING_NOW.load(Relaxed)
}

pub(crate) fn sequence_started() {
    RUNNING_NOW.fetch_add(1, Relaxed);
    gauge!(RUNNING).increment(1.0);
}

/// `elapsed`: since submission.
pub(crate) fn sequence_ended(outcome: Outcome, elapsed: Duration) {
    if !matches!(outcome, Outcome::Failed | Outcome::Cancelled) {
        histogram!(SEQUENCE_SECONDS).record(elapsed);
    }
    let outcome = match outcome {
        Outcome::Stop => "stop",
        Outcome::Length => "length",
        Outcome::KvCapacity => "kv_capacity",
        Outcome::Failed => "failed",
        Outcome::Cancelled => "cancelled",
    };
    RUNNING_NOW.fetch_sub(1, Relaxed);
    gauge!(RUNNING).decrement(1.0);
    counter!(ENDED, "outcome" => outcome).increment(1);
}

pub(crate) fn first_token(elapsed: Duration) {
    counter!(GENERATION_TOKENS).increment(1);
    histogram!(FIRST_TOKEN_SECONDS).record(elapsed);
}

pub(crate) fn next_token(elapsed: Duration) {
    counter!(GENERATION_TOKENS).increment(1);
    histogram!(NEXT_TOKEN_SECONDS).record(elapsed);
}
