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
use lagoon_benches::cluster::{Lagoon, number};
use lagoon_benches::measure::{commit, device, hardware_threads, median};
use lagoon_benches::pool::{BLOCK_TOKENS, Pool, Reply, tokens};
use serde::Serialize;
use serde_json::json;
use std::time::Duration;

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

fn start(lagoon: &Lagoon, args: &Args, count: usize, cache: bool) -> Result<Pool> {
    let cache = format!("--prefix-cache={}", if cache { "on" } else { "off" });
    Pool::start(lagoon, count, args.kv_tokens, &[cache, "--lend-percent=100".to_owned()])
}

fn ask(pool: &Pool, at: usize, prompt: &[u32], living: &[usize]) -> Result<Answer> {
    let before = pool.sent_mib(living.iter().copied())?;
    let Reply { ms, text, cached_tokens } = pool.ask(at, prompt, ANSWER)?;
    // Summaries of caches come with heartbeats, and leases end with messages.
    std::thread::sleep(Duration::from_millis(1_500));
    let sent_mib = pool.sent_mib(living.iter().copied())? - before;
    Ok(Answer { instance: at, ms, cached_tokens, text, sent_mib })
}

fn prompt(args: &Args, document: u32, question: u32) -> Vec<u32> {
    [tokens(args.document, document), tokens(QUESTION, 1_000 + question)].concat()
}

fn questions(lagoon: &Lagoon, args: &Args, cache: bool) -> Result<Vec<Answer>> {
    let pool = start(lagoon, args, args.instances, cache)?;
    let all: Vec<usize> = (0..args.instances).collect();
    let ask = |question: u32| ask(&pool, question as usize % args.instances, &prompt(args, 1, question), &all);
    (0..args.questions).map(ask).collect()
}

/// The first question, and the second one after an instance has died that cached some of it; with the tokens that it cached.
fn loss(lagoon: &Lagoon, args: &Args) -> Result<(Answer, Answer, u64)> {
    let mut pool = start(lagoon, args, args.instances + 1, true)?;
    let all: Vec<usize> = (0..=args.instances).collect();
    let first = ask(&pool, 0, &prompt(args, 1, 0), &all)?;
    let cached = |at: usize| number(&pool.status(at)?, "/prefix/blocks");
    let dies = (1..args.instances).max_by_key(|at| cached(*at).unwrap_or(0)).context("instances")?;
    let lost = cached(dies)? * u64::from(BLOCK_TOKENS);
    pool.instances[dies].kill()?;
    let living: Vec<usize> = all.into_iter().filter(|at| *at != dies).collect();
    // Until the gManager has taken it for dead.
    std::thread::sleep(Duration::from_secs(8));
    let second = ask(&pool, args.instances, &prompt(args, 1, 1), &living)?;
    Ok((first, second, lost))
}

/// Times of documents that nobody has seen, with the cache and without.
fn misses(lagoon: &Lagoon, args: &Args) -> Result<[Vec<f64>; 2]> {
    let all: Vec<usize> = (0..args.instances).collect();
    let pools = [true, false].map(|cache| start(lagoon, args, args.instances, cache));
    let mut times = [Vec::new(), Vec::new()];
    for miss in 0..=args.misses {
        for (pool, times) in pools.iter().zip(&mut times) {
            let pool = pool.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
            let answer = ask(pool, 0, &prompt(args, 10 + miss, 0), &all)?;
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
