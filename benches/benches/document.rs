//! Questions about a document that no instance holds: what the pool's prefix cache saves.
//!
//! Real processes on this machine with the bundled model: a gManager and instances that are too small for the document.
//!
//! * **questions**: the same document with another question each, asked at each instance in turn; beside it the same without a prefix
//!   cache. The first question computes the document, the others only themselves.
//! * **a loss**: one instance more, of which one dies (`kill -9`) after the first question; the second question, asked elsewhere, computes
//!   what the dead one cached.
//! * **misses**: documents that nobody has seen, with the cache and without: what looking costs.
//!
//! Times are to the end of a short answer and depend on this machine. Bytes are those of all instances' frames and KV
//! (`lagoon_wire_bytes_sent_total`).
//!
//! `cargo build --release -p lagoon && cargo bench -p lagoon-benches --bench document -- [--json]`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark prints its results and its progress")]

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use lagoon_benches::cluster::{Lagoon, Process, TIMEOUT, get, number, request, status};
use lagoon_benches::measure::{commit, device, hardware_threads, median};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::Read as _;
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Tokens of the document.
    #[arg(long, default_value_t = 27_700)]
    document: u32,
    #[arg(long, default_value_t = 4)]
    instances: usize,
    /// KV capacity of an instance, in tokens.
    #[arg(long, default_value_t = 8_192)]
    kv_tokens: u32,
    #[arg(long, default_value_t = 6)]
    questions: u32,
    /// Pairs of misses, with the cache and without.
    #[arg(long, default_value_t = 5)]
    misses: u32,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Tokens of a question.
const QUESTION: u32 = 20;
/// Tokens of an answer.
const ANSWER: u32 = 8;
const BLOCK_TOKENS: u32 = 32;

struct Pool {
    instances: Vec<Process>,
    _gmanager: Process,
}

/// An answered question.
#[derive(Clone, Debug, Serialize)]
struct Answer {
    instance: usize,
    ms: f64,
    cached_tokens: u64,
    text: String,
    /// Sent by all instances meanwhile, MiB.
    sent_mib: f64,
}

impl Pool {
    fn start(lagoon: &Lagoon, args: &Args, count: usize, cache: bool) -> Result<Self> {
        let gmanager = lagoon.start("gm", &["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned()])?;
        let quic = gmanager.announced("quic")?.to_owned();
        let instance = |n: usize| {
            let name = format!("i{n}");
            let own = [
                "serve".to_owned(),
                lagoon.model.display().to_string(),
                format!("--gmanager={quic}"),
                format!("--name={name}"),
                format!("--kv-tokens={}", args.kv_tokens),
                format!("--block-tokens={BLOCK_TOKENS}"),
                format!("--prefix-cache={}", if cache { "on" } else { "off" }),
            ];
            let rest = ["--http=127.0.0.1:0", "--backend=cpu", "--threads=1", "--lend-percent=100", "--calibrate=off"];
            lagoon.start(&name, &[&own[..], &rest.map(str::to_owned)].concat())
        };
        let instances = (0..count).map(instance).collect::<Result<Vec<_>>>()?;
        let pool = Self { instances, _gmanager: gmanager };
        let blocks = u64::from(args.kv_tokens / BLOCK_TOKENS) * (count as u64 - 1);
        for at in 0..count {
            let since = Instant::now();
            while number(&status(pool.http(at)?)?, "/pool_blocks_total")? <= blocks {
                ensure!(since.elapsed() < TIMEOUT, "the pool does not form");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(pool)
    }

    fn http(&self, at: usize) -> Result<&str> {
        self.instances[at].announced("http")
    }

    fn sent_mib(&self, living: &[usize]) -> Result<f64> {
        let mut sum = 0.0;
        for at in living {
            let text = get(self.http(*at)?, "/metrics")?;
            let lines = text.lines().filter(|line| line.starts_with("lagoon_wire_bytes_sent_total{"));
            sum += lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>();
        }
        Ok(sum / f64::from(1 << 20))
    }

    fn ask(&self, at: usize, prompt: &[u32], living: &[usize]) -> Result<Answer> {
        let before = self.sent_mib(living)?;
        let body = json!({ "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": true });
        let begun = Instant::now();
        let mut text = String::new();
        request(self.http(at)?, "POST /v1/completions", &body.to_string())?.read_to_string(&mut text)?;
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let (_, body) = text.split_once("\r\n\r\n").context("no body")?;
        let reply: Value = serde_json::from_str(body).with_context(|| format!("an answer: {body:?}"))?;
        let cached = number(&reply, "/usage/prompt_tokens_details/cached_tokens")?;
        let text = reply["choices"][0]["text"].as_str().with_context(|| format!("no answer: {reply}"))?.to_owned();
        // Summaries of caches come with heartbeats, and leases end with messages.
        std::thread::sleep(Duration::from_millis(1_500));
        Ok(Answer { instance: at, ms, cached_tokens: cached, text, sent_mib: self.sent_mib(living)? - before })
    }
}

/// Token ids that a seed determines, none of them special.
fn tokens(count: u32, seed: u32) -> impl Iterator<Item = u32> {
    (0..count)
        .map(move |i| 5 + (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503).wrapping_add(i >> 3)) % 1_000)
}

fn prompt(args: &Args, document: u32, question: u32) -> Vec<u32> {
    tokens(args.document, document).chain(tokens(QUESTION, 1_000 + question)).collect()
}

fn questions(lagoon: &Lagoon, args: &Args, cache: bool) -> Result<Vec<Answer>> {
    let pool = Pool::start(lagoon, args, args.instances, cache)?;
    let all: Vec<usize> = (0..args.instances).collect();
    let ask = |question: u32| pool.ask(question as usize % args.instances, &prompt(args, 1, question), &all);
    (0..args.questions).map(ask).collect()
}

/// The first question, and the second one after an instance has died that cached some of it; with the tokens that it cached.
fn loss(lagoon: &Lagoon, args: &Args) -> Result<(Answer, Answer, u64)> {
    let mut pool = Pool::start(lagoon, args, args.instances + 1, true)?;
    let all: Vec<usize> = (0..=args.instances).collect();
    let first = pool.ask(0, &prompt(args, 1, 0), &all)?;
    let cached = |at: usize| number(&status(pool.http(at)?)?, "/prefix/blocks");
    let dies = (1..args.instances).max_by_key(|at| cached(*at).unwrap_or(0)).context("instances")?;
    let lost = cached(dies)? * u64::from(BLOCK_TOKENS);
    pool.instances[dies].kill()?;
    let living: Vec<usize> = all.into_iter().filter(|at| *at != dies).collect();
    // Until the gManager has taken it for dead.
    std::thread::sleep(Duration::from_secs(8));
    let second = pool.ask(args.instances, &prompt(args, 1, 1), &living)?;
    Ok((first, second, lost))
}

/// Times of documents that nobody has seen, with the cache and without.
fn misses(lagoon: &Lagoon, args: &Args) -> Result<[Vec<f64>; 2]> {
    let all: Vec<usize> = (0..args.instances).collect();
    let pools = [true, false].map(|cache| Pool::start(lagoon, args, args.instances, cache));
    let mut times = [Vec::new(), Vec::new()];
    for miss in 0..=args.misses {
        for (pool, times) in pools.iter().zip(&mut times) {
            let pool = pool.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
            let answer = pool.ask(0, &prompt(args, 10 + miss, 0), &all)?;
            ensure!(answer.cached_tokens == 0, "a new document was cached: {answer:?}");
            // The first one warms memory up.
            times.extend((miss > 0).then_some(answer.ms));
        }
    }
    Ok(times)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let _ = args.bench;
    ensure!(args.instances >= 2 && args.questions >= 2, "at least two instances and two questions");
    let lagoon = Lagoon::new("document")?;
    eprintln!("questions");
    let with = questions(&lagoon, &args, true)?;
    let without = questions(&lagoon, &args, false)?;
    for (a, b) in with.iter().zip(&without) {
        ensure!(a.text == b.text, "with the cache {a:?}, without {b:?}");
    }
    eprintln!("a loss");
    let (first, second, lost_tokens) = loss(&lagoon, &args)?;
    eprintln!("misses");
    let [miss, plain] = misses(&lagoon, &args)?;
    let worst = with[1..].iter().map(|answer| answer.ms / with[0].ms).fold(0.0, f64::max);
    let result = json!({
        "bench": "document", "device": device(), "commit": commit(), "hardware_threads": hardware_threads(),
        "document": args.document, "instances": args.instances, "kv_tokens": args.kv_tokens,
        "questions": with, "without_cache": without, "later_over_first": worst,
        "loss": { "first": first, "second": second, "lost_tokens": lost_tokens,
            "second_over_first": second.ms / first.ms, "lost_share": lost_tokens as f64 / f64::from(args.document) },
        "misses": { "with_ms": miss, "without_ms": plain, "overhead": median(miss.clone()) / median(plain.clone()) - 1.0 },
    });
    if args.json {
        println!("{result:#}");
        return Ok(());
    }
    println!("{:>9}{:>9}{:>12}{:>10}{:>10}{:>14}", "question", "asked at", "cached", "ms", "MiB sent", "ms, no cache");
    for (n, (a, b)) in with.iter().zip(&without).enumerate() {
        println!(
            "{:>9}{:>9}{:>12}{:>10.1}{:>10.1}{:>14.1}",
            n + 1,
            a.instance,
            a.cached_tokens,
            a.ms,
            a.sent_mib,
            b.ms
        );
    }
    println!("later questions take at most {:.1} % of the first one's time", 100.0 * worst);
    println!(
        "after a loss of {:.1} % of the document: {:.1} % of the first one's time, {} tokens cached",
        100.0 * lost_tokens as f64 / f64::from(args.document),
        100.0 * second.ms / first.ms,
        second.cached_tokens
    );
    println!("a miss costs {:.2} %", 100.0 * (median(miss) / median(plain) - 1.0));
    Ok(())
}
