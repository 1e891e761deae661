//! The server's metrics, all named `lagoon_*`, through the process-wide recorder of the `metrics` crate.
//!
//! The binary installs one recorder with [`install`] and hands its handle to the server, so that `/metrics` also
//! shows what other parts of the process record.

use axum::http::StatusCode;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use std::time::Duration;

const REQUESTS: &str = "lagoon_http_requests_total";
const REQUEST_SECONDS: &str = "lagoon_http_request_seconds";
const RUNNING: &str = "lagoon_sequences_running";
const ENDED: &str = "lagoon_sequences_total";
const FIRST_TOKEN_SECONDS: &str = "lagoon_time_to_first_token_seconds";
const NEXT_TOKEN_SECONDS: &str = "lagoon_time_between_tokens_seconds";
const PROMPT_TOKENS: &str = "lagoon_prompt_tokens_total";
const GENERATION_TOKENS: &str = "lagoon_generation_tokens_total";

/// Bounds of the histograms' buckets, in seconds.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
/// As [`SECONDS`], for waits within one step.
const STEP_SECONDS: &[f64] =
    &[0.000_025, 0.000_05, 0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0];
/// Time between the recorder's housekeeping rounds, which keep histograms that nobody scrapes bounded.
const UPKEEP: Duration = Duration::from_secs(5);

/// How a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Stop,
    Length,
    Failed,
    /// The client went away, or another sequence of the same request failed.
    Cancelled,
}

/// Installs the process-wide recorder, with the bucket bounds that Lagoon's histograms use, describes the metrics and
/// starts the recorder's housekeeping. Call once, inside a tokio runtime.
///
/// # Errors
/// When a recorder is installed already.
pub fn install() -> Result<PrometheusHandle, BuildError> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), SECONDS)?
        .set_buckets_for_metric(Matcher::Full("lagoon_layer_partials_wait_seconds".to_owned()), STEP_SECONDS)?
        .set_buckets_for_metric(Matcher::Full("lagoon_step_partials_wait_seconds".to_owned()), STEP_SECONDS)?
        .install_recorder()?;
    describe();
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

fn describe() {
    describe_counter!(REQUESTS, "HTTP requests by route and status.");
    describe_histogram!(REQUEST_SECONDS, "Time from a request's arrival to the headers of its response.");
    describe_gauge!(RUNNING, "Sequences that were submitted and have not ended.");
    describe_counter!(ENDED, "Sequences by how they ended: stop, length, failed or cancelled.");
    describe_histogram!(FIRST_TOKEN_SECONDS, "Time from submission to a sequence's first token.");
    describe_histogram!(NEXT_TOKEN_SECONDS, "Time between two tokens of a sequence.");
    describe_counter!(PROMPT_TOKENS, "Prompt tokens of accepted requests.");
    describe_counter!(GENERATION_TOKENS, "Generated tokens.");
    gauge!(RUNNING).set(0.0);
    counter!(PROMPT_TOKENS).absolute(0);
    counter!(GENERATION_TOKENS).absolute(0);
}

/// `route` is the matched pattern, never the raw path: labels stay few.
pub(crate) fn request(route: &str, status: StatusCode, elapsed: Duration) {
    counter!(REQUESTS, "route" => route.to_owned(), "status" => status.as_u16().to_string()).increment(1);
    histogram!(REQUEST_SECONDS, "route" => route.to_owned()).record(elapsed);
}

pub(crate) fn prompt_tokens(tokens: usize) {
    counter!(PROMPT_TOKENS).increment(u64::try_from(tokens).unwrap_or(u64::MAX));
}

pub(crate) fn sequence_started() {
    gauge!(RUNNING).increment(1.0);
}

pub(crate) fn sequence_ended(outcome: Outcome) {
    let outcome = match outcome {
        Outcome::Stop => "stop",
        Outcome::Length => "length",
        Outcome::Failed => "failed",
        Outcome::Cancelled => "cancelled",
    };
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
