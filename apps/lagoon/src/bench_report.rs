//! What `lagoon bench` reports: the results as JSON and as text.

use hdrhistogram::Histogram;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A request that succeeded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// From the beginning of the run.
    pub(crate) start_s: f64,
    pub(crate) ttft_ms: f64,
    /// Mean time between tokens; `None` with one token.
    pub(crate) tpot_ms: Option<f64>,
    pub(crate) e2e_ms: f64,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
}

/// Results of a run. Times are in milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) url: String,
    pub(crate) model: String,
    pub(crate) requests: u64,
    pub(crate) ok: u64,
    /// Errors by kind: `http_429`, `connect`, `midway`, `broken`, `timeout`, `length` (fewer or more tokens than
    /// requested).
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) last_error: Option<String>,
    pub(crate) concurrency: Option<u32>,
    pub(crate) rate: Option<f64>,
    pub(crate) dataset: Option<PathBuf>,
    pub(crate) slo_ttft_ms: Option<f64>,
    pub(crate) slo_tpot_ms: Option<f64>,
    /// Requests that met the objectives, by second; `None` without objectives.
    pub(crate) goodput_requests_per_s: Option<f64>,
    /// Their share of all requests.
    pub(crate) goodput_share: Option<f64>,
    pub(crate) seed: u64,
    pub(crate) duration_s: f64,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    pub(crate) requests_per_s: f64,
    pub(crate) output_tokens_per_s: f64,
    pub(crate) total_tokens_per_s: f64,
    /// Time to the first token.
    pub(crate) ttft_ms: Summary,
    /// Time between tokens.
    pub(crate) tbt_ms: Summary,
    /// Mean time between tokens of each request.
    pub(crate) tpot_ms: Summary,
    /// From sending a request to the end of its response.
    pub(crate) e2e_ms: Summary,
}

/// Quantiles of latencies, in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Summary {
    pub(crate) count: u64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

#[allow(clippy::cast_precision_loss, reason = "microseconds under 2^52 are exact in f64")]
fn milliseconds(us: u64) -> f64 {
    us as f64 / 1e3
}

impl Summary {
    /// Of latencies that were recorded in microseconds.
    pub(crate) fn of(histogram: &Histogram<u64>) -> Self {
        Self {
            count: histogram.len(),
            mean: histogram.mean() / 1e3,
            p50: milliseconds(histogram.value_at_quantile(0.5)),
            p90: milliseconds(histogram.value_at_quantile(0.9)),
            p99: milliseconds(histogram.value_at_quantile(0.99)),
            max: milliseconds(histogram.max()),
        }
    }
}

impl Report {
    /// The latencies by name.
    pub(crate) fn latencies(&self) -> [(&'static str, Summary); 4] {
        [
            ("time to first token", self.ttft_ms),
            ("time between tokens", self.tbt_ms),
            ("mean of a request", self.tpot_ms),
            ("end to end", self.e2e_ms),
        ]
    }

    /// The report as text.
    pub(crate) fn table(&self) -> String {
        let load = match (self.rate, self.concurrency) {
            (Some(rate), _) => format!("{rate} requests/s"),
            (None, Some(concurrency)) => format!("concurrency {concurrency}"),
            (None, None) => "the trace's times".to_owned(),
        };
        let mut text = format!(
            "{} at {}\n{} of {} requests succeeded in {:.2} s at {load}\n\
             {} prompt tokens, {} generated\n\
             throughput: {:.2} requests/s, {:.1} generated tokens/s, {:.1} tokens/s in all\n\n\
             {:<24}{:>10}{:>10}{:>10}{:>10}{:>10}\n",
            self.model,
            self.url,
            self.ok,
            self.requests,
            self.duration_s,
            self.prompt_tokens,
            self.completion_tokens,
            self.requests_per_s,
            self.output_tokens_per_s,
            self.total_tokens_per_s,
            "ms",
            "mean",
            "p50",
            "p90",
            "p99",
            "max",
        );
        for (name, s) in self.latencies() {
            text +=
                &format!("{name:<24}{:>10.2}{:>10.2}{:>10.2}{:>10.2}{:>10.2}\n", s.mean, s.p50, s.p90, s.p99, s.max);
        }
        if let (Some(rate), Some(share)) = (self.goodput_requests_per_s, self.goodput_share) {
            let objective = |name: &str, ms: Option<f64>| ms.map(|ms| format!("{name} within {ms} ms"));
            let objectives = [objective("first token", self.slo_ttft_ms), objective("tokens", self.slo_tpot_ms)];
            let objectives = objectives.into_iter().flatten().collect::<Vec<_>>().join(", ");
            text += &format!("goodput: {rate:.2} requests/s, {:.1}% of all ({objectives})\n", 100.0 * share);
        }
        for (kind, count) in &self.errors {
            text += &format!("error {kind}: {count}\n");
        }
        if let Some(error) = &self.last_error {
            text += &format!("the last one: {error}\n");
        }
        text
    }
}
