//! An open-loop load generator: sends each request at its time to the server that the route names, and records when its
//! tokens come.

use crate::systems::Route;
use anyhow::{Context, Result, bail};
use lagoon_sim::paper::goodput::{SHARE, Slo};
use lagoon_sim::paper::traces::Request;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Longest silence of a server before a request counts as failed.
const SILENCE: Duration = Duration::from_secs(300);
/// Longest line of a response.
const LINE_MAX: usize = 1 << 20;
/// Tokens of the bundled model's vocabulary that prompts are drawn from.
pub(crate) const TOKENS: std::ops::Range<u32> = 5..1005;

/// What became of a request. Times are in seconds; that of its start is from the beginning of the run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) start_s: f64,
    /// From its start to its first token, and to its end.
    pub(crate) first_s: Option<f64>,
    pub(crate) end_s: Option<f64>,
    pub(crate) tokens: u32,
    /// Tokens of its prompt that were cached.
    pub(crate) cached_tokens: u64,
    /// Times between its tokens.
    pub(crate) gaps_s: Vec<f64>,
    pub(crate) error: Option<String>,
}

impl Answer {
    pub(crate) fn is_met(&self, slo: &Slo) -> bool {
        let (Some(first), Some(end)) = (self.first_s, self.end_s) else { return false };
        slo.is_met_by(first, end - first, self.tokens)
    }
}

/// A run's answers, in the order of the requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ran {
    pub(crate) answers: Vec<Answer>,
    /// It was ended when too many requests had missed the objective for the rest to matter.
    pub(crate) is_cut: bool,
    pub(crate) seconds: f64,
}

impl Ran {
    /// Share of the requests that met the objective.
    pub(crate) fn met(&self, slo: &Slo) -> f64 {
        let met = self.answers.iter().filter(|answer| answer.is_met(slo)).count();
        met as f64 / self.answers.len().max(1) as f64
    }

    pub(crate) fn failures(&self) -> usize {
        self.answers.iter().filter(|answer| answer.error.is_some()).count()
    }
}

/// When a run may end early.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Until {
    /// When all requests have ended.
    End,
    /// When the objective cannot be met any more by [`SHARE`] of the requests.
    Missed(Slo),
}

/// Prompts of a run's requests: the field `prompt` of a request's body.
pub(crate) type Prompts = Arc<dyn Fn(usize, &Request) -> String + Send + Sync>;

/// Prompts of tokens that no other request has, in no other run.
pub(crate) fn own_prompts(run: u64) -> Prompts {
    Arc::new(move |at, request| {
        let mut random = ChaCha8Rng::seed_from_u64(run << 32 | at as u64);
        let prompt: Vec<u32> = (0..request.prompt_tokens).map(|_| random.random_range(TOKENS)).collect();
        json!(prompt).to_string()
    })
}

/// Replays requests.
pub(crate) fn replay(requests: &[Request], prompts: &Prompts, route: &Arc<dyn Route>, until: Until) -> Result<Ran> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(all(requests, prompts, route, until))
}

async fn all(requests: &[Request], prompts: &Prompts, route: &Arc<dyn Route>, until: Until) -> Result<Ran> {
    let begin = Instant::now() + Duration::from_millis(50);
    let mut ran = Ran { answers: vec![Answer::default(); requests.len()], ..Ran::default() };
    let mut open = JoinSet::new();
    for (at, request) in requests.iter().enumerate() {
        let (request, prompts, route) = (*request, Arc::clone(prompts), Arc::clone(route));
        open.spawn(async move {
            let start = begin + Duration::from_micros(request.arrival_us);
            tokio::time::sleep_until(start.into()).await;
            (at, one(at, &request, &prompts, route.as_ref(), start).await)
        });
    }
    let mut missed = 0;
    let allowed = (requests.len() as f64 * (1.0 - SHARE)).floor();
    while let Some(joined) = open.join_next().await {
        let (at, mut answer) = joined.context("a request's task")?;
        answer.start_s = requests[at].arrival_us as f64 / 1e6;
        if let Until::Missed(slo) = until {
            missed += u32::from(!answer.is_met(&slo));
        }
        ran.answers[at] = answer;
        if f64::from(missed) > allowed {
            ran.is_cut = true;
            // Their connections close, which cancels them.
            open.shutdown().await;
            break;
        }
    }
    ran.seconds = begin.elapsed().as_secs_f64();
    Ok(ran)
}

async fn one(at: usize, request: &Request, prompts: &Prompts, route: &dyn Route, start: Instant) -> Answer {
    let mut answer = Answer::default();
    let tokens = AtomicUsize::new(0);
    let server = route.choose(at, request);
    if let Err(error) = stream(at, request, prompts, server, start, &mut answer, &tokens, route).await {
        answer.error = Some(format!("{error:#}"));
    }
    route.ended(at);
    answer
}

#[allow(clippy::too_many_arguments, reason = "one request's whole context")]
async fn stream(
    at: usize,
    request: &Request,
    prompts: &Prompts,
    server: SocketAddr,
    start: Instant,
    answer: &mut Answer,
    tokens: &AtomicUsize,
    route: &dyn Route,
) -> Result<()> {
    let body = body(&prompts(at, request), request);
    let mut stream = TcpStream::connect(server).await.context("connect")?;
    stream.set_nodelay(true)?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut lines = BufReader::new(stream).lines();
    let mut last = start;
    let mut status = String::new();
    loop {
        let line = tokio::time::timeout(SILENCE, lines.next_line()).await.context("silence")??;
        let Some(line) = line else { break };
        if status.is_empty() {
            status.clone_from(&line);
        }
        anyhow::ensure!(line.len() <= LINE_MAX, "a line of {} bytes", line.len());
        if line.contains("\"error\"") {
            bail!("{status}: {line}");
        }
        let Some(data) = line.strip_prefix("data: ").filter(|data| data.starts_with('{')) else { continue };
        let value: Value = serde_json::from_str(data).context("a frame")?;
        let cached = value.pointer("/usage/prompt_tokens_details/cached_tokens").and_then(Value::as_u64);
        answer.cached_tokens = cached.unwrap_or(answer.cached_tokens);
        let count = value["choices"][0]["token_ids"].as_array().map_or(0, Vec::len);
        let now = Instant::now();
        for _ in 0..count {
            let before = tokens.fetch_add(1, Ordering::Relaxed);
            if before == 0 {
                answer.first_s = Some((now - start).as_secs_f64());
            } else {
                answer.gaps_s.push((now - last).as_secs_f64());
            }
            last = now;
            answer.tokens += 1;
            route.token(at);
        }
    }
    anyhow::ensure!(answer.tokens == request.output_tokens, "{status}: {} tokens came", answer.tokens);
    answer.end_s = Some((last - start).as_secs_f64());
    Ok(())
}

fn body(prompt: &str, request: &Request) -> String {
    let rest = json!({
        "max_tokens": request.output_tokens, "temperature": 0, "ignore_eos": true, "stream": true,
        "stream_options": { "include_usage": true }, "return_token_ids": true,
    });
    let rest = rest.to_string();
    // The prompt is written as it is: an object would take its spaces out.
    format!("{{\"prompt\":{prompt},{}", &rest[1..])
}
