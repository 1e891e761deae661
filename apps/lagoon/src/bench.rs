//! `lagoon bench`: a load generator for OpenAI-compatible servers.
//!
//! Every request has its own prompt of an exact length, drawn with the seed from the server's own tokens, and asks for
//! an exact number of output tokens (`ignore_eos`). Closed loop (`--concurrency`): a new request starts when one ends.
//! Open loop (`--rate`): requests start at random times with that mean rate, whether or not others have ended. A trace
//! (`--trace`) gives each request's start and lengths, a file of conversations (`--dataset`) texts and lengths.

use crate::api_client::{ApiClient, ClientError};
use crate::bench_dataset::{self, Lengths};
use crate::bench_page;
use crate::bench_report::{Report, Row, Summary};
use crate::bench_trace::{self, Planned, Prompt};
use crate::log::{out, outln};
use crate::progress::{self, Unit};
use anyhow::{Context, bail, ensure};
use futures::{StreamExt, stream};
use hdrhistogram::Histogram;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

/// Maximum of open requests with `--rate`.
const OPEN_MAX: usize = 4096;
/// Largest recorded latency, in microseconds: an hour.
const LATENCY_US_MAX: u64 = 3_600_000_000;
/// Source text of prompts: its tokens look like language to the tokenizer and the model.
const TEXT: &str = "In the morning the water of the lagoon lay still and the boats had not yet gone out. A heron stood in \
    the shallows and waited, as it did every day, for the tide to turn. Behind the dunes one could hear the sea, and \
    from the village came the smell of bread. Nobody knew how old the harbour was: some said three hundred years, \
    others that fishermen had always lived there. The children counted 12 masts, then 27, then lost count and began \
    again. What does a place remember of those who leave it? Perhaps nothing; perhaps only the wind keeps a list.";

/// Measure an OpenAI-compatible server under load.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// The server's root.
    #[arg(long, env = "LAGOON_URL", default_value = "http://127.0.0.1:8000")]
    url: String,
    /// The server's key.
    #[arg(long, env = "LAGOON_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// The authority of an https:// server's certificate.
    #[arg(long, value_name = "PEM", env = "LAGOON_CA")]
    ca: Option<PathBuf>,
    /// Which model; by default the first one that the server lists.
    #[arg(long)]
    model: Option<String>,
    /// Requests in all.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Requests that are open at once (closed loop).
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096), conflicts_with = "rate")]
    concurrency: u32,
    /// Requests per second on average, with exponential gaps (a Poisson process; open loop).
    #[arg(long, value_name = "R", visible_alias = "request-rate", value_parser = positive)]
    rate: Option<f64>,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=2_000_000))]
    prompt_tokens: u32,
    /// Tokens that each request generates [default: 64; with --dataset as many as the answer there has].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// How the lengths of prompts and answers are drawn.
    #[arg(long, value_enum, default_value_t, conflicts_with_all = ["trace", "dataset"])]
    lengths: Lengths,
    /// Prompts and lengths from a file of conversations, as of ShareGPT (JSON with `conversations`) or OpenAI (`messages`): the first
    /// question of each. Replaces --prompt-tokens; --max-tokens then limits answers.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["trace", "prompt_tokens"])]
    dataset: Option<PathBuf>,
    /// A CSV file with columns arrival_s, prompt_tokens and output_tokens (`lagoon-sim trace` writes such): replaces
    /// --requests, --prompt-tokens, --max-tokens and --rate.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rate", "requests", "prompt_tokens", "max_tokens", "concurrency"])]
    trace: Option<PathBuf>,
    /// Factor by which requests arrive faster than in the trace.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = positive, requires = "trace")]
    speed: f64,
    /// Objective of the time to the first token, in milliseconds: goodput counts requests that meet all objectives.
    #[arg(long, value_name = "MS", value_parser = positive)]
    slo_ttft: Option<f64>,
    /// Objective of a request's mean time between tokens, in milliseconds.
    #[arg(long, value_name = "MS", value_parser = positive)]
    slo_tpot: Option<f64>,
    /// Write the report with figures to this HTML file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Sampling temperature.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Prompts and gaps follow from the seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Longest time of one request, in seconds.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
    /// Print one JSON object on stdout.
    #[arg(long)]
    json: bool,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err("must be a number greater than 0".to_owned()),
    }
}

/// Runs `lagoon bench`.
///
/// # Errors
/// When the server cannot be reached, or no request succeeded.
pub(crate) async fn run(args: BenchArgs) -> anyhow::Result<()> {
    let (report, rows) = measure(&args).await?;
    if let Some(path) = &args.html {
        bench_page::write(path, &report, &rows)?;
    }
    if args.json {
        outln!("{}", serde_json::to_string(&report)?);
    } else {
        out!("{}", report.table());
    }
    ensure!(report.ok > 0, "no request succeeded: {}", report.last_error.as_deref().unwrap_or("none was made"));
    Ok(())
}

/// Tokens of an answer without --max-tokens.
const MAX_TOKENS: u32 = 64;

/// Measurements while requests run.
struct Tally {
    ok: u64,
    errors: BTreeMap<String, u64>,
    last_error: Option<String>,
    prompt_tokens: u64,
    completion_tokens: u64,
    ttft: Histogram<u64>,
    tbt: Histogram<u64>,
    tpot: Histogram<u64>,
    e2e: Histogram<u64>,
    rows: Vec<Row>,
}

impl Tally {
    fn new() -> Self {
        let histogram = || Histogram::new_with_bounds(1, LATENCY_US_MAX, 3).expect("the bounds are valid");
        Self {
            ok: 0,
            errors: BTreeMap::new(),
            last_error: None,
            prompt_tokens: 0,
            completion_tokens: 0,
            ttft: histogram(),
            tbt: histogram(),
            tpot: histogram(),
            e2e: histogram(),
            rows: Vec::new(),
        }
    }

    fn add(&mut self, outcome: Result<Sample, Failure>) {
        match outcome {
            Ok(sample) => {
                self.ok += 1;
                self.prompt_tokens += sample.prompt_tokens;
                self.completion_tokens += sample.completion_tokens;
                self.ttft.saturating_record(microseconds(sample.ttft));
                self.e2e.saturating_record(microseconds(sample.e2e));
                let tpot = sample.tpot();
                tpot.iter().for_each(|tpot| self.tpot.saturating_record(microseconds(*tpot)));
                let ms = |time: Duration| time.as_secs_f64() * 1e3;
                self.rows.push(Row {
                    start_s: sample.start.as_secs_f64(),
                    ttft_ms: ms(sample.ttft),
                    tpot_ms: tpot.map(ms),
                    e2e_ms: ms(sample.e2e),
                    prompt_tokens: sample.prompt_tokens,
                    completion_tokens: sample.completion_tokens,
                });
                for (gap, tokens) in sample.gaps {
                    self.tbt.saturating_record_n(microseconds(gap), tokens);
                }
            }
            Err(failure) => {
                *self.errors.entry(failure.kind).or_default() += 1;
                self.last_error = Some(failure.message);
            }
        }
    }
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).max(1)
}

/// Measurements of one successful request.
struct Sample {
    /// From the beginning of the run.
    start: Duration,
    ttft: Duration,
    /// From the first token to the last.
    decoding: Duration,
    /// Time per token of each later chunk, and the chunk's tokens.
    gaps: Vec<(Duration, u64)>,
    e2e: Duration,
    prompt_tokens: u64,
    completion_tokens: u64,
}

impl Sample {
    /// Mean time between tokens.
    fn tpot(&self) -> Option<Duration> {
        let gaps = u32::try_from(self.completion_tokens.saturating_sub(1)).unwrap_or(u32::MAX);
        (gaps > 0).then(|| self.decoding / gaps)
    }
}

struct Failure {
    kind: String,
    message: String,
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self { kind: error.kind(), message: error.to_string() }
    }
}

/// The requests to send.
async fn plan(args: &BenchArgs, client: &ApiClient, model: &str) -> anyhow::Result<Vec<Planned>> {
    if let Some(path) = &args.trace {
        return bench_trace::read(path, args.speed);
    }
    let output_tokens = args.max_tokens.unwrap_or(MAX_TOKENS);
    let mut planned = bench_trace::drawn(args.requests, args.prompt_tokens, output_tokens, args.rate, args.seed);
    match (&args.dataset, args.lengths) {
        (Some(path), _) => {
            let limits = (client.context_of(model).await?, args.max_tokens);
            bench_dataset::fill(&mut planned, path, (client, model), limits, args.seed).await?;
        }
        (None, Lengths::LongTail) => bench_dataset::stretch(&mut planned, client.context_of(model).await?, args.seed),
        (None, Lengths::Fixed) => {}
    }
    Ok(planned)
}

async fn measure(args: &BenchArgs) -> anyhow::Result<(Report, Vec<Row>)> {
    let client = ApiClient::new(&args.url, args.api_key.clone(), args.ca.as_deref())?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => client.first_model().await?,
    };
    let pool = token_pool(&client, &model).await?;
    let planned = plan(args, &client, &model).await?;
    let bar = progress::bar("measuring", planned.len() as u64, Unit::Requests);
    let mut tally = Tally::new();
    let open = if args.rate.is_some() || args.trace.is_some() { OPEN_MAX } else { usize::try_from(args.concurrency)? };
    let begun = Instant::now();
    let runs = (0u32..).zip(&planned).map(|(index, planned)| {
        let (client, request) = (&client, request(args, &model, &pool, index, planned));
        async move {
            tokio::time::sleep_until((begun + planned.start).into()).await;
            let limit = Duration::from_secs(args.timeout_s);
            let timed_out = || Failure { kind: "timeout".to_owned(), message: format!("no end within {limit:?}") };
            let start = begun.elapsed();
            match tokio::time::timeout(limit, one(client, &request, planned.output_tokens)).await {
                Ok(outcome) => outcome.map(|sample| Sample { start, ..sample }),
                Err(_elapsed) => Err(timed_out()),
            }
        }
    });
    let mut outcomes = stream::iter(runs).buffer_unordered(open);
    while let Some(outcome) = outcomes.next().await {
        tally.add(outcome);
        bar.inc(1);
        match tally.errors.values().sum::<u64>() {
            0 => {}
            failed => bar.set_message(format!("measuring, {failed} failed")),
        }
    }
    let elapsed = begun.elapsed();
    bar.finish_and_clear();
    let rows = std::mem::take(&mut tally.rows);
    Ok((report(args, &model, planned.len() as u64, (tally, &rows), elapsed), rows))
}

/// Token ids to draw prompts from: the server's tokenisation of [`TEXT`].
async fn token_pool(client: &ApiClient, model: &str) -> anyhow::Result<Vec<u64>> {
    let body = json!({ "model": model, "prompt": TEXT, "add_special_tokens": false });
    let reply = client.post("/tokenize", &body).await.context(
        "ask the server for tokens\nhint: prompts of exact length need POST /tokenize, which Lagoon and vLLM have",
    )?;
    let ids: Vec<u64> = reply["tokens"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    if ids.is_empty() {
        bail!("the server's /tokenize gave no tokens: {reply}");
    }
    Ok(ids)
}

fn request(args: &BenchArgs, model: &str, pool: &[u64], index: u32, planned: &Planned) -> Value {
    let mut random =
        StdRng::seed_from_u64(args.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(u64::from(index)));
    let prompt = match &planned.prompt {
        Prompt::Tokens(tokens) => {
            (0..*tokens).map(|_| pool[random.random_range(0..pool.len())]).collect::<Vec<u64>>().into()
        }
        Prompt::Text(text) => Value::from(text.as_str()),
    };
    json!({
        "model": model, "prompt": prompt, "max_tokens": planned.output_tokens, "temperature": args.temperature,
        "seed": index, "ignore_eos": true, "stream": true, "stream_options": { "include_usage": true },
        // Reports every token, even one that adds no text yet.
        "return_token_ids": true,
    })
}

/// Sends one request and measures it.
async fn one(client: &ApiClient, request: &Value, max_tokens: u32) -> Result<Sample, Failure> {
    let sent = Instant::now();
    let mut events = client.events("/v1/completions", request).await?;
    let (mut first, mut last, mut gaps) = (None, sent, Vec::new());
    let (mut seen, mut usage) = (0, None);
    while let Some(event) = events.next().await? {
        let now = Instant::now();
        let choice = &event["choices"][0];
        let tokens = match choice["token_ids"].as_array() {
            Some(ids) => u64::try_from(ids.len()).unwrap_or(u64::MAX),
            // A server without token ids: a chunk with text counts as one token.
            None => u64::from(choice["text"].as_str().is_some_and(|text| !text.is_empty())),
        };
        if tokens > 0 {
            match first {
                None => first = Some(now - sent),
                Some(_) => gaps.push(((now - last) / u32::try_from(tokens).unwrap_or(u32::MAX), tokens)),
            }
            (last, seen) = (now, seen + tokens);
        }
        if event["usage"].is_object() {
            usage = Some((event["usage"]["prompt_tokens"].as_u64(), event["usage"]["completion_tokens"].as_u64()));
        }
    }
    let e2e = sent.elapsed();
    let (prompt_tokens, completion_tokens) = usage.unwrap_or_default();
    let completion_tokens = completion_tokens.unwrap_or(seen);
    match first {
        Some(ttft) if completion_tokens == u64::from(max_tokens) => {
            let decoding = (last - sent).saturating_sub(ttft);
            let prompt_tokens = prompt_tokens.unwrap_or(0);
            Ok(Sample { start: Duration::ZERO, ttft, decoding, gaps, e2e, prompt_tokens, completion_tokens })
        }
        _ => {
            let message = format!("the answer has {completion_tokens} tokens, not the {max_tokens} asked for");
            Err(Failure { kind: "length".to_owned(), message })
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "counts under 2^52 are exact in f64")]
fn report(args: &BenchArgs, model: &str, requests: u64, (tally, rows): (Tally, &[Row]), elapsed: Duration) -> Report {
    let duration_s = elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
    let per_s = |count: u64| count as f64 / duration_s;
    let has_objective = args.slo_ttft.is_some() || args.slo_tpot.is_some();
    let good =
        has_objective.then(|| rows.iter().filter(|row| is_good(row, args.slo_ttft, args.slo_tpot)).count() as u64);
    Report {
        url: args.url.clone(),
        model: model.to_owned(),
        requests,
        ok: tally.ok,
        errors: tally.errors,
        last_error: tally.last_error,
        concurrency: (args.rate.is_none() && args.trace.is_none()).then_some(args.concurrency),
        rate: args.rate,
        dataset: args.dataset.clone(),
        slo_ttft_ms: args.slo_ttft,
        slo_tpot_ms: args.slo_tpot,
        goodput_requests_per_s: good.map(per_s),
        goodput_share: good.map(|good| good as f64 / requests.max(1) as f64),
        seed: args.seed,
        duration_s,
        prompt_tokens: tally.prompt_tokens,
        completion_tokens: tally.completion_tokens,
        requests_per_s: per_s(tally.ok),
        output_tokens_per_s: per_s(tally.completion_tokens),
        total_tokens_per_s: per_s(tally.prompt_tokens + tally.completion_tokens),
        ttft_ms: Summary::of(&tally.ttft),
        tbt_ms: Summary::of(&tally.tbt),
        tpot_ms: Summary::of(&tally.tpot),
        e2e_ms: Summary::of(&tally.e2e),
    }
}

/// Whether a request met the objectives.
fn is_good(row: &Row, ttft_ms: Option<f64>, tpot_ms: Option<f64>) -> bool {
    let within = |value: f64, objective: Option<f64>| objective.is_none_or(|objective| value <= objective);
    within(row.ttft_ms, ttft_ms) && within(row.tpot_ms.unwrap_or(0.0), tpot_ms)
}

#[cfg(test)]
#[path = "bench_tests.rs"]
mod tests;
