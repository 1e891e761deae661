//! `lagoon demo`: serves a request larger than any instance from a pool, and proves that nothing was lost.
//!
//! A gManager and instances run as separate processes on loopback, each with less KV memory than the prompt needs. The
//! response is streamed; then one instance with room for everything serves the same request, and the logits of every
//! generated token are compared.

use crate::api_client::ApiClient;
use crate::args::RemoteArg;
use crate::bundled::{self, Question};
use crate::local::{ChildKeys, Common, EphemeralCa, LocalPool, Wanted, start_pool, start_single};
use crate::log::{out, outln};
use crate::placement::{self, BackendArg, Chosen};
use crate::progress::{self, Unit};
use crate::serve::lend_reserve_blocks;
use anyhow::{Context, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use clap::ValueEnum as _;
use clap::builder::PossibleValue;
use lagoon_text::Tokenizer;
use lagoon_types::limits;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Largest logit difference that counts as equal, in standard deviations of the logits. Both runs store KV in f16; the
/// order of f32 additions differs, and sometimes the rounding of a KV element.
const TOLERANCE_STD: f32 = 0.005;
/// Interval of queries for the rBlocks' placement.
const WATCH_EVERY: Duration = Duration::from_millis(100);
/// Maximum tokens of an answer: a space, five digits, a line break and the end.
const ANSWER_TOKENS_MAX: u32 = 12;

/// `lagoon demo`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DemoArgs {
    #[arg(long, value_enum, default_value_t)]
    backend: BackendArg,
    /// Backend of all instances but the one that takes the request [default: the same].
    #[arg(long, value_enum)]
    creditor_backend: Option<BackendArg>,
    /// Instances to start.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    instances: u16,
    /// KV capacity of each instance, in tokens; the prompt has about 20,000.
    #[arg(long, value_name = "N", default_value_t = 8192)]
    kv_tokens: u32,
    /// Ask about a part of the document that has the answer: a prompt of about so many tokens [default: all of it].
    #[arg(long, value_name = "N")]
    prompt_tokens: Option<usize>,
    /// Which of the bundled questions to ask, from 1.
    #[arg(long, value_name = "N", default_value_t = 1)]
    question: usize,
    /// How KV on other instances is attended to.
    #[arg(long, value_enum, default_value_t)]
    remote_attention: RemoteArg,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Results of the demo; printed as JSON with `--json`.
#[derive(Debug, Serialize)]
struct Outcome {
    ok: bool,
    backend: String,
    device: String,
    instances: u16,
    prompt_tokens: usize,
    kv_tokens_per_instance: u32,
    block_tokens: u32,
    local_rblocks: u64,
    remote_rblocks: u64,
    /// Remote rBlocks by creditor.
    placement: BTreeMap<String, u64>,
    /// Bytes of frames between instances, and to the gManager.
    wire_bytes: u64,
    prefill_s: f64,
    prefill_tokens_per_s: f64,
    /// Generated tokens per second, after the first.
    tokens_per_s: f64,
    reference_prefill_s: f64,
    max_abs_logit_diff: f32,
    tolerance: f32,
    logit_std: f32,
    tokens_equal: bool,
    question: String,
    answer: String,
    expected: String,
}

/// A response with its logits.
#[derive(Debug, Default)]
struct Answer {
    text: String,
    tokens: Vec<u64>,
    logits: Vec<Vec<f32>>,
    first_token: Duration,
    total: Duration,
}

/// Placement of the request's rBlocks: the maximum seen.
#[derive(Debug, Default)]
struct Placement {
    local: u64,
    remote: BTreeMap<String, u64>,
}

/// Runs the demo; the exit code is 0 if pooled and single-instance responses agree.
pub(crate) async fn run(args: DemoArgs) -> anyhow::Result<ExitCode> {
    let chosen = placement::choose(args.backend, &[])?;
    let questions = bundled::questions()?;
    let asked = args.question.checked_sub(1).and_then(|i| questions.get(i));
    let question = asked.with_context(|| format!("there are {} questions, numbered from 1", questions.len()))?;
    let ca = EphemeralCa::new()?;
    let dir = ca.dir().join(bundled::NAME);
    bundled::extract(&dir)?;
    let prompt = prompt(&Tokenizer::open(&dir)?, question, args.prompt_tokens)?;
    check_sizes(&args, prompt.len())?;

    let body = json!({
        "model": bundled::NAME, "prompt": prompt, "max_tokens": ANSWER_TOKENS_MAX, "temperature": 0, "stream": true,
        "return_token_ids": true, "return_logits": true,
    });
    let show = Show { quiet: args.json };
    show.line(&format!(
        "{} instances with {} KV tokens each; the prompt has {} tokens.",
        args.instances,
        args.kv_tokens,
        prompt.len()
    ));
    let creditors = args.creditor_backend.map_or(Ok(chosen), |backend| placement::choose(backend, &[]))?;
    let count = usize::from(args.instances);
    let bar = progress::bar("starting", count as u64, Unit::Instances);
    let wanted = |index: usize| {
        let device = if index == 0 { chosen } else { creditors };
        let flags = flags(&args, args.kv_tokens as usize, device);
        // One after another, whatever their devices.
        Wanted { role: "both", flags, device: 0 }
    };
    let wanted: Vec<Wanted> = (0..count).map(wanted).collect();
    let common = Common {
        ca: &ca,
        model: &dir.to_string_lossy(),
        served_name: bundled::NAME,
        keys: &ChildKeys::default(),
        auto_roles: None,
    };
    let pool = start_pool(common, &wanted, |n| bar.set_position(n as u64)).await?;
    bar.finish_and_clear();
    wait_for_pool(&pool, args.kv_tokens).await?;
    let device = pool.instances.first().map_or("", |i| i.device()).to_owned();
    show.line(&format!("Running on {device}.\n\n{}", question.question));
    let (pooled, placement) = ask_pool(&pool, &body, &show).await?;
    let wire_bytes = wire_bytes(&pool).await?;
    drop(pool);

    show.line("\nThe same request on one instance with room for all of it:");
    let reference = ask_single(&dir, &args, chosen, prompt.len(), &body, &show).await?;
    let outcome = Outcome {
        backend: chosen.name().to_owned(),
        device,
        instances: args.instances,
        prompt_tokens: prompt.len(),
        kv_tokens_per_instance: args.kv_tokens,
        block_tokens: limits::BLOCK_TOKENS_DEFAULT,
        local_rblocks: placement.local,
        remote_rblocks: placement.remote.values().sum(),
        placement: placement.remote,
        wire_bytes,
        ..compare(&pooled, &reference, prompt.len(), question)
    };
    let outcome = Outcome { ok: outcome.ok && (outcome.remote_rblocks > 0 || fits(&args, prompt.len())), ..outcome };
    show.outcome(&outcome)?;
    Ok(if outcome.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A prompt: the question behind the document, or behind the lines around the answer that fit `tokens_max`.
fn prompt(tokenizer: &Tokenizer, question: &Question, tokens_max: Option<usize>) -> anyhow::Result<Vec<u32>> {
    let lines: Vec<&str> = bundled::DOCUMENT.split_inclusive('\n').collect();
    let encode = |lines: &[&str]| Ok(tokenizer.encode(&format!("{}{}", lines.concat(), question.prompt_suffix), true)?);
    let Some(tokens_max) = tokens_max else { return encode(&lines) };
    let answer =
        lines.iter().position(|line| line.contains(&question.answer)).context("the document has the answer")?;
    let around = |n: usize| &lines[answer.saturating_sub(n)..(answer + n + 1).min(lines.len())];
    // The same number of lines before and behind the answer, as many as fit.
    let (mut few, mut many) = (0, lines.len());
    while few < many {
        let n = (few + many).div_ceil(2);
        let fits = encode(around(n))?.len() <= tokens_max;
        (few, many) = if fits { (n, many) } else { (few, n - 1) };
    }
    let prompt = encode(around(few))?;
    ensure!(prompt.len() <= tokens_max, "the question and the line with its answer have {} tokens", prompt.len());
    Ok(prompt)
}

/// Whether one instance alone could hold the request: then nothing is borrowed.
fn fits(args: &DemoArgs, prompt_tokens: usize) -> bool {
    args.kv_tokens as usize > prompt_tokens + limits::BLOCK_TOKENS_DEFAULT as usize
}

fn check_sizes(args: &DemoArgs, prompt_tokens: usize) -> anyhow::Result<()> {
    let needed = prompt_tokens + ANSWER_TOKENS_MAX as usize + limits::BLOCK_TOKENS_DEFAULT as usize;
    let reserve = lend_reserve_blocks(args.kv_tokens / limits::BLOCK_TOKENS_DEFAULT) * limits::BLOCK_TOKENS_DEFAULT;
    let lent = args.kv_tokens.saturating_sub(reserve) as usize * usize::from(args.instances).saturating_sub(1);
    let pool = args.kv_tokens as usize + lent;
    ensure!(
        pool >= needed,
        "{} instances with {} KV tokens each hold {pool} tokens for one request, and this one needs {needed}\n\
         hint: raise --kv-tokens to {} or add instances",
        args.instances,
        args.kv_tokens,
        needed.div_ceil(usize::from(args.instances)) + reserve as usize + limits::BLOCK_TOKENS_DEFAULT as usize
    );
    Ok(())
}

/// Flags of an instance with `kv_tokens` tokens of KV.
fn flags(args: &DemoArgs, kv_tokens: usize, device: Chosen) -> Vec<String> {
    let remote = args.remote_attention.to_possible_value();
    let own = [
        format!("--kv-tokens={kv_tokens}"),
        format!("--remote-attention={}", remote.as_ref().map_or("auto", PossibleValue::get_name)),
        "--max-running=8".to_owned(),
        "--max-queue=8".to_owned(),
        "--expose-logits".to_owned(),
        // No planner needs it, and it would delay the start.
        "--calibrate=off".to_owned(),
    ];
    own.into_iter().chain(device.to_flags()).collect()
}

/// Waits until the first instance has learned the pool's size from the gManager: then it accepts the request.
async fn wait_for_pool(pool: &LocalPool, kv_tokens: u32) -> anyhow::Result<()> {
    let debtor = pool.instances.first().context("no instances")?;
    let client = ApiClient::new(&format!("http://{}", debtor.http()?), None, None)?;
    let own = kv_tokens / limits::BLOCK_TOKENS_DEFAULT;
    let lent = own.saturating_sub(lend_reserve_blocks(own));
    let whole = u64::from(own) + u64::from(lent) * (pool.instances.len() as u64).saturating_sub(1);
    for _ in 0..100 {
        let status = client.get("/lagoon/status").await?;
        if status["pool_blocks_total"].as_u64() >= Some(whole) {
            return Ok(());
        }
        tokio::time::sleep(WATCH_EVERY).await;
    }
    anyhow::bail!("the instances did not form a pool within 10 s\nhint: `lagoon doctor` checks loopback UDP")
}

async fn ask_pool(pool: &LocalPool, body: &Value, show: &Show) -> anyhow::Result<(Answer, Placement)> {
    let debtor = pool.instances.first().context("no instances")?;
    let client = ApiClient::new(&format!("http://{}", debtor.http()?), None, None)?;
    let mut placement = Placement::default();
    let asking = ask(&client, body, show);
    tokio::pin!(asking);
    loop {
        tokio::select! {
            answer = &mut asking => return Ok((answer?, placement)),
            () = tokio::time::sleep(WATCH_EVERY) => {
                if let Ok(status) = client.get("/lagoon/status").await {
                    placement.observe(&status);
                }
            }
        }
    }
}

impl Placement {
    fn observe(&mut self, status: &Value) {
        for seq in status["sequences"].as_array().into_iter().flatten() {
            let remote: BTreeMap<String, u64> = seq["remote_blocks"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(creditor, n)| (format!("instance {creditor}"), n.as_u64().unwrap_or(0)))
                .collect();
            if remote.values().sum::<u64>() >= self.remote.values().sum() {
                self.remote = remote;
                self.local = seq["local_blocks"].as_u64().unwrap_or(0);
            }
        }
    }
}

async fn wire_bytes(pool: &LocalPool) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for instance in &pool.instances {
        let client = ApiClient::new(&format!("http://{}", instance.http()?), None, None)?;
        let status = client.get("/lagoon/status").await?;
        for class in ["control", "partials", "bulk"] {
            bytes += status[format!("{class}_bytes_sent")].as_u64().unwrap_or(0);
        }
    }
    Ok(bytes)
}

async fn ask_single(
    dir: &Path,
    args: &DemoArgs,
    device: Chosen,
    prompt_tokens: usize,
    body: &Value,
    show: &Show,
) -> anyhow::Result<Answer> {
    let room = prompt_tokens + ANSWER_TOKENS_MAX as usize + 2 * limits::BLOCK_TOKENS_DEFAULT as usize;
    let single = start_single(&dir.to_string_lossy(), bundled::NAME, &flags(args, room, device)).await?;
    ask(&ApiClient::new(&format!("http://{}", single.http()?), None, None)?, body, show).await
}

/// Streams a response.
async fn ask(client: &ApiClient, body: &Value, show: &Show) -> anyhow::Result<Answer> {
    let started = Instant::now();
    let mut events = client.events("/v1/completions", body).await?;
    let mut answer = Answer::default();
    let spinner = show.spinner("reading the document");
    while let Some(event) = events.next().await? {
        if let Some(message) = event["error"]["message"].as_str() {
            anyhow::bail!("the request failed: {message}");
        }
        let choice = &event["choices"][0];
        if answer.tokens.is_empty() {
            answer.first_token = started.elapsed();
            spinner.finish_and_clear();
        }
        let text = choice["text"].as_str().unwrap_or_default();
        show.piece(text);
        answer.text.push_str(text);
        answer.tokens.extend(choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64));
        answer.logits.extend(logits(choice)?);
    }
    answer.total = started.elapsed();
    show.line("");
    Ok(answer)
}

/// Logits of a chunk: base64 of little-endian f32, one string per token.
fn logits(choice: &Value) -> anyhow::Result<Vec<Vec<f32>>> {
    let rows = choice["logits_b64"].as_array().into_iter().flatten();
    rows.map(|row| {
        let bytes = STANDARD.decode(row.as_str().unwrap_or_default()).context("decode logits")?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    })
    .collect()
}

/// Compares the generated tokens and logits, up to the first token that differs.
fn compare(pooled: &Answer, reference: &Answer, prompt_tokens: usize, question: &Question) -> Outcome {
    let tokens_equal = !pooled.tokens.is_empty() && pooled.tokens == reference.tokens;
    let same = pooled.tokens.iter().zip(&reference.tokens).take_while(|(a, b)| a == b).count();
    let compared = (same + 1).min(pooled.logits.len()).min(reference.logits.len());
    let pairs = || pooled.logits.iter().zip(&reference.logits).take(compared).flat_map(|(a, b)| a.iter().zip(b));
    let max_abs_logit_diff = pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let all: Vec<f32> = reference.logits.iter().flatten().copied().collect();
    #[allow(clippy::cast_precision_loss, reason = "counts of a few thousand")]
    let n = all.len().max(1) as f32;
    let mean = all.iter().sum::<f32>() / n;
    let logit_std = (all.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / n).sqrt();
    let tolerance = TOLERANCE_STD * logit_std;
    let answer = pooled.text.trim().to_owned();
    let decode_s = (pooled.total - pooled.first_token).as_secs_f64();
    #[allow(clippy::cast_precision_loss, reason = "token counts")]
    let (prompt, decoded) = (prompt_tokens as f64, pooled.tokens.len().saturating_sub(1) as f64);
    Outcome {
        ok: tokens_equal && compared > 0 && max_abs_logit_diff <= tolerance && answer == question.answer,
        backend: String::new(),
        device: String::new(),
        instances: 0,
        prompt_tokens,
        kv_tokens_per_instance: 0,
        block_tokens: 0,
        local_rblocks: 0,
        remote_rblocks: 0,
        placement: BTreeMap::new(),
        wire_bytes: 0,
        prefill_s: pooled.first_token.as_secs_f64(),
        prefill_tokens_per_s: prompt / pooled.first_token.as_secs_f64().max(1e-9),
        tokens_per_s: decoded / decode_s.max(1e-9),
        reference_prefill_s: reference.first_token.as_secs_f64(),
        max_abs_logit_diff,
        tolerance,
        logit_std,
        tokens_equal,
        question: question.question.clone(),
        answer,
        expected: question.answer.clone(),
    }
}

/// Output for people; none with `--json`.
struct Show {
    quiet: bool,
}

impl Show {
    fn line(&self, text: &str) {
        if !self.quiet {
            outln!("{text}");
        }
    }

    fn piece(&self, text: &str) {
        if !self.quiet {
            out!("{text}");
        }
    }

    fn spinner(&self, what: &'static str) -> indicatif::ProgressBar {
        if self.quiet { indicatif::ProgressBar::hidden() } else { progress::spinner(what) }
    }

    fn outcome(&self, o: &Outcome) -> anyhow::Result<()> {
        if self.quiet {
            outln!("{}", serde_json::to_string(o)?);
            return Ok(());
        }
        let creditors: Vec<String> = o.placement.iter().map(|(who, n)| format!("{n} on {who}")).collect();
        outln!("\nrBlocks of {} tokens: {} here, {}", o.block_tokens, o.local_rblocks, creditors.join(", "));
        outln!("bytes on the wire: {}", indicatif::HumanBytes(o.wire_bytes));
        outln!(
            "prefill {:.1} s ({:.0} tok/s; alone {:.1} s), decode {:.1} tok/s",
            o.prefill_s,
            o.prefill_tokens_per_s,
            o.reference_prefill_s,
            o.tokens_per_s
        );
        outln!(
            "largest logit difference {:.2e} (tolerance {:.2e}, logit std {:.2}); tokens {}",
            o.max_abs_logit_diff,
            o.tolerance,
            o.logit_std,
            if o.tokens_equal { "equal" } else { "DIFFER" }
        );
        outln!("answer {:?}, expected {:?}: {}", o.answer, o.expected, if o.ok { "ok" } else { "NOT OK" });
        Ok(())
    }
}
