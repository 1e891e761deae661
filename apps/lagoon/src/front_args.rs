//! Flags of a port for clients: its access log, browsers' origins, and other names of its metrics.

use crate::log;
use anyhow::Context as _;
use lagoon_http::Front;
use lagoon_http::access::{AccessLog, Line, Report};
use lagoon_http::front::CorsOrigins;
use lagoon_http::metrics::Compat;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::SystemTime;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime as _;

/// Flags of a port for clients.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct FrontArgs {
    /// Print a line on standard error for each request that has ended: id, path, status, model, tokens, times, outcome, instance.
    /// Probes and readers of metrics have none.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) access_log: AccessLogArg,
    /// Let pages of this origin (https://chat.example.org; `*`: of any) use this port from a browser; repeatable.
    #[arg(long = "cors-origin", value_name = "ORIGIN")]
    cors_origins: Vec<String>,
    /// Export the metrics of instances under the names of another server, too.
    #[arg(long, value_enum, value_name = "SERVER")]
    metrics_compat: Option<CompatArg>,
}

/// The form of the access log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum AccessLogArg {
    /// One line of text a request.
    #[default]
    On,
    /// One JSON object a request.
    Json,
    /// None.
    Off,
}

/// A server whose names of metrics are exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CompatArg {
    /// vLLM: `vllm:num_requests_running` and others.
    Vllm,
}

impl FrontArgs {
    /// The front of the port.
    pub(crate) fn front(&self) -> anyhow::Result<Front> {
        let cors = CorsOrigins::parse(&self.cors_origins).map_err(anyhow::Error::msg).context("--cors-origin")?;
        Ok(Front { access_log: self.access_log.log(), cors })
    }

    /// The names of metrics to export, too.
    pub(crate) fn compat(&self) -> Option<Compat> {
        self.metrics_compat.map(|CompatArg::Vllm| Compat::Vllm)
    }
}

impl AccessLogArg {
    fn log(self) -> Option<AccessLog> {
        let form: fn(&Line, &str) -> String = match self {
            Self::On => text,
            Self::Json => json,
            Self::Off => return None,
        };
        Some(Arc::new(move |line| log::notice(&form(line, &now()))))
    }
}

/// The present time in RFC 3339, as log lines have it.
fn now() -> String {
    let mut text = String::new();
    let written = tracing_subscriber::fmt::time::SystemTime.format_time(&mut Writer::new(&mut text));
    if written.is_err() {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        text = since.as_secs().to_string();
    }
    text
}

/// `TIME access METHOD PATH STATUS key=value …`
fn text(line: &Line, time: &str) -> String {
    let Line { id, method, path, key, status, report, total_ms, outcome, instance } = line;
    let Report { model, prompt_tokens, cached_tokens, output_tokens, queue_ms, ttft_ms, finish: _ } = report;
    let status = status.map_or_else(|| "-".to_owned(), |status| status.to_string());
    let mut out = format!("{time} access {method} {path} {status} id={id}");
    let number = |n: Option<usize>| n.map(|n| n.to_string());
    let ms = |n: Option<u64>| n.map(|n| n.to_string());
    let fields = [
        ("key", key.as_deref().map(word)),
        ("model", model.as_deref().map(word)),
        ("prompt", number(*prompt_tokens)),
        ("cached", number(*cached_tokens)),
        ("output", number(*output_tokens)),
        ("queue_ms", ms(*queue_ms)),
        ("ttft_ms", ms(*ttft_ms)),
        ("total_ms", ms(Some(*total_ms))),
        ("outcome", Some(word(outcome))),
        ("instance", instance.as_deref().map(word)),
    ];
    for (name, value) in fields {
        value.into_iter().for_each(|value| _ = write!(out, " {name}={value}"));
    }
    out.push('\n');
    out
}

/// The text, in quotes if it is not one word.
fn word(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_.:/,@+".contains(c);
    if !text.is_empty() && text.chars().all(plain) { text.to_owned() } else { format!("{text:?}") }
}

fn json(line: &Line, time: &str) -> String {
    #[derive(serde::Serialize)]
    struct Timed<'a> {
        time: &'a str,
        #[serde(flatten)]
        line: &'a Line,
    }
    serde_json::to_string(&Timed { time, line }).map_or_else(|error| format!("{error}\n"), |text| text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        Line {
            id: "req_1".to_owned(),
            method: "POST".to_owned(),
            path: "/v1/completions".to_owned(),
            status: Some(200),
            report: Report {
                model: Some("a \"model\"\n".to_owned()),
                prompt_tokens: Some(3),
                output_tokens: Some(5),
                ttft_ms: Some(12),
                finish: Some("stop".to_owned()),
                ..Report::default()
            },
            total_ms: 40,
            outcome: "stop".to_owned(),
            instance: Some("instance-0".to_owned()),
            ..Line::default()
        }
    }

    #[test]
    fn a_line_is_one_line_whatever_names_are() {
        assert_eq!(
            text(&line(), "T"),
            "T access POST /v1/completions 200 id=req_1 model=\"a \\\"model\\\"\\n\" prompt=3 output=5 ttft_ms=12 total_ms=40 \
             outcome=stop instance=instance-0\n"
        );
        let left = Line { status: None, outcome: "client_left".to_owned(), ..Line::default() };
        assert_eq!(text(&left, "T"), "T access   - id= total_ms=0 outcome=client_left\n");
        let parsed: serde_json::Value = serde_json::from_str(&json(&line(), "T")).unwrap();
        assert_eq!(parsed["model"], "a \"model\"\n");
        assert_eq!(
            (&parsed["time"], &parsed["prompt_tokens"], &parsed["finish"]),
            (&"T".into(), &3.into(), &"stop".into())
        );
        assert!(parsed.get("cached_tokens").is_none() && json(&line(), "T").lines().count() == 1);
        assert!(now().len() > "2026-01-01T00:00:00".len());
    }
}
