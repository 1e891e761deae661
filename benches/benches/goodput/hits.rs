//! Hit rates of prefix caches on processes: a trace of conversations with prompts built from its `hash_ids`, on four instances. Cached tokens
//! that answers report, over those of one least-recently-used cache as large as the pool that serves the same prompts in turn.
//!
//! A token stands for [`TOKENS`] of the trace, so that a `hash_id` is one rBlock, and equal ids have equal tokens. In a request's body a token
//! takes the bytes of the text that it stands for (spaces), so that a gateway hashes prompts as finely as it would those texts.
//!
//! What scaled time distorts (`main.rs`): an answer takes `--tokens / --time` times the memory that it should, here and in the one cache.

use crate::load::{Prompts, Ran, TOKENS as IDS, Until, replay};
use crate::systems::{Cache, Kind, Sizes, System};
use crate::{Args, Setup};
use anyhow::{Context, Result, ensure};
use lagoon_benches::cluster::Lagoon;
use lagoon_benches::measure::median;
use lagoon_kv::{BlockHash, IdentityRoot};
use lagoon_sim::paper::caching::one_cache;
use lagoon_sim::paper::conversation::{self, Entry, HASHED_TOKENS, Scale};
use lagoon_sim::paper::traces::Request;
use lagoon_types::{KvDType, ModelHash};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::sync::Arc;

/// Tokens of the trace that a token stands for.
pub(crate) const TOKENS: f64 = 64.0;
/// Bytes of text of a token of the trace.
const TEXT_BYTES: f64 = 4.0;
const INSTANCES: u32 = 4;

/// The compared systems.
fn systems() -> [System; 3] {
    let pool = |name, lend_percent, dispatch| System {
        name,
        kind: Kind::Pool { instances: INSTANCES, lend_percent, dispatch, joint_from: None },
    };
    [
        pool("pool, bound late by the gateway", 100, "least-work"),
        pool("pool, most free memory", 100, "free-memory"),
        pool("alone, bound late by the gateway", 0, "least-work"),
    ]
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and not negative")]
pub(crate) fn whole(n: f64) -> u32 {
    n.round() as u32
}

/// The tokens of a prompt of so many: those of an id are drawn from it and from their place in its block.
fn tokens(entry: &Entry, length: u32, scale: f64) -> Vec<u32> {
    let token = |at: u32| {
        let place = whole(f64::from(at) * scale);
        let id = entry.hash_ids[(place / HASHED_TOKENS) as usize];
        let drawn = (id << 16 | u64::from(place % HASHED_TOKENS)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        IDS.start + u32::try_from(drawn).unwrap_or(0) % (IDS.end - IDS.start)
    };
    (0..length).map(token).collect()
}

/// Token ids as JSON, each in so many bytes.
fn padded(ids: &[u32], bytes: usize) -> String {
    let width = bytes - 1;
    let mut text = String::with_capacity(ids.len() * bytes + 1);
    for (at, id) in ids.iter().enumerate() {
        let _ = write!(text, "{}{id:>width$}", if at == 0 { "[" } else { "," });
    }
    text + "]"
}

struct Part {
    requests: Vec<Request>,
    prompts: Vec<Vec<u32>>,
}

impl Part {
    fn new(setup: &Setup, args: &Args) -> Result<Self> {
        let count = args.requests();
        let mut entries = match &args.trace {
            Some(path) => conversation::read(path)?,
            None => conversation::synthetic(count, args.seed),
        };
        ensure!(entries.len() >= count, "the trace has {} requests, not {count}", entries.len());
        entries.truncate(count);
        let scale = Scale { prompts: setup.tokens, outputs: setup.time, rate: args.rate * setup.time };
        let requests = conversation::requests(&entries, scale);
        let prompt = |(entry, request): (&Entry, &Request)| {
            let reached = whole(f64::from(request.prompt_tokens - 1) * setup.tokens) / HASHED_TOKENS;
            ensure!((reached as usize) < entry.hash_ids.len(), "a prompt without hash_ids for all of its tokens");
            Ok(tokens(entry, request.prompt_tokens, setup.tokens))
        };
        let prompts = entries.iter().zip(&requests).map(prompt).collect::<Result<Vec<_>>>()?;
        Ok(Self { requests, prompts })
    }

    /// Cached tokens of all requests in one cache of `blocks`.
    fn one_cache(&self, block_tokens: u32, blocks: u64) -> Vec<u32> {
        let root =
            IdentityRoot { model: ModelHash([0; 32]), adapter: b"", dtype: KvDType::F16, rope: b"", block_tokens };
        let of_prompts = self.prompts.iter().map(|prompt| BlockHash::chain(&root, prompt));
        one_cache(self.requests.iter().zip(of_prompts), block_tokens, blocks)
    }

    fn padded(self: &Arc<Self>, scale: f64) -> Prompts {
        let (part, bytes) = (Arc::clone(self), whole(scale * TEXT_BYTES) as usize);
        Arc::new(move |at, _| padded(&part.prompts[at], bytes))
    }
}

fn described(name: &str, ran: &Ran, one: &[u32], prompt_tokens: u64, time: f64, late: f64) -> Value {
    let cached: u64 = ran.answers.iter().map(|answer| answer.cached_tokens).sum();
    let ideal: u64 = one.iter().map(|tokens| u64::from(*tokens)).sum();
    // What one cache has and the pool lacks, and the other way round.
    let less = |(answer, one): (&crate::load::Answer, &u32)| u64::from(*one).saturating_sub(answer.cached_tokens);
    let lost: u64 = ran.answers.iter().zip(one).map(less).sum();
    let first: Vec<f64> = ran.answers.iter().filter_map(|answer| Some(answer.first_s? * time)).collect();
    json!({
        "system": name, "cached_tokens": cached, "hit_rate": cached as f64 / prompt_tokens as f64,
        "of_one_cache": cached as f64 / ideal as f64, "lost_tokens": lost, "failures": ran.failures(),
        "first_token_s_mean": first.iter().sum::<f64>() / first.len().max(1) as f64,
        "first_token_s_median": median(first), "seconds": ran.seconds, "devices_late_share": late,
    })
}

/// Runs the experiment: its result.
pub(crate) fn run(lagoon: &Lagoon, setup: &Setup, args: &Args) -> Result<Value> {
    let block_tokens = whole(f64::from(HASHED_TOKENS) / setup.tokens);
    let kv_tokens = whole(args.kv_tokens / setup.tokens) / block_tokens * block_tokens;
    let part = Arc::new(Part::new(setup, args)?);
    let blocks = u64::from(kv_tokens / block_tokens) * u64::from(INSTANCES);
    let one = part.one_cache(block_tokens, blocks);
    let prompt_tokens: u64 = part.requests.iter().map(|request| u64::from(request.prompt_tokens)).sum();
    let ideal: u64 = one.iter().map(|tokens| u64::from(*tokens)).sum();
    let sizes = Sizes { cache: Some(Cache { block_tokens, kv_tokens }), ..setup.sizes };
    let mut rows = Vec::new();
    for system in systems() {
        eprintln!("  {}", system.name);
        let started = system.start(lagoon, &sizes)?;
        let ran = replay(&part.requests, &part.padded(setup.tokens), &started.route, Until::End);
        let ran = ran.with_context(|| system.name.to_owned())?;
        let errors = ran.answers.iter().filter_map(|answer| answer.error.as_deref());
        errors.take(3).for_each(|error| eprintln!("    {}", error.chars().take(200).collect::<String>()));
        rows.push(described(system.name, &ran, &one, prompt_tokens, setup.time, started.late_share()?));
    }
    let trace = args.trace.as_ref().map_or_else(
        || format!("synthetic, seed {}", args.seed),
        |path| path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
    );
    Ok(json!({
        "experiment": "hits", "trace": trace, "requests": part.requests.len(), "rate": args.rate,
        "instances": INSTANCES, "kv_tokens": kv_tokens, "block_tokens": block_tokens, "prompt_tokens": prompt_tokens,
        "one_cache": { "cached_tokens": ideal, "hit_rate": ideal as f64 / prompt_tokens as f64 }, "runs": rows,
    }))
}

pub(crate) fn print(result: &Value) {
    let one = result.pointer("/one_cache/hit_rate").and_then(Value::as_f64).unwrap_or(f64::NAN);
    println!("one cache as large as the pool: {:.2} % of prompts' tokens", 100.0 * one);
    let columns = ["hits, %", "of one cache", "lost, %", "first mean s", "median s", "failed", "late"];
    println!("{:<36}{}", "system", columns.map(|c| format!("{c:>14}")).concat());
    let prompt_tokens = result["prompt_tokens"].as_f64().unwrap_or(f64::NAN);
    for run in result["runs"].as_array().into_iter().flatten() {
        let number = |name: &str| run[name].as_f64().unwrap_or(f64::NAN);
        println!(
            "{:<36}{:>14.2}{:>14.3}{:>14.2}{:>14.2}{:>14.2}{:>14.0}{:>14.4}",
            run["system"].as_str().unwrap_or_default(),
            100.0 * number("hit_rate"),
            number("of_one_cache"),
            100.0 * number("lost_tokens") / prompt_tokens,
            number("first_token_s_mean"),
            number("first_token_s_median"),
            number("failures"),
            number("devices_late_share")
        );
    }
}
