//! Time from the death of a creditor (`kill -9`) to the next token of a stream that borrows from it.
//!
//! Real processes on this machine with the bundled model: a gManager, a debtor with little memory and two creditors
//! with room for the whole context; the one that lends is killed. **Detection** is the time until the debtor counts
//! the loss (its status is polled every few milliseconds): a dead process's connections are not closed, so it is the
//! transport's idle timeout. **Recomputation** is the rest: borrowing other memory, recomputing the lost range by
//! chunked prefill, and one decode step. Times depend on this machine.
//!
//! `cargo build --release -p lagoon && cargo bench -p lagoon-benches --bench recovery -- [--json]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use lagoon_benches::cluster::{Lagoon, Process, TIMEOUT, Times, listen, number, status};
use lagoon_benches::measure::median;
use serde::Serialize;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Tokens of context when the creditor dies.
    #[arg(long, value_delimiter = ',', default_value = "512,2048,8192")]
    contexts: Vec<u32>,
    /// KV capacity of the debtor, in tokens: the local part of the context.
    #[arg(long, default_value_t = 256)]
    debtor_tokens: u32,
    /// Runs of each context; medians are printed.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Flags of all instances, for example `--flag=--threads=1`.
    #[arg(long)]
    flag: Vec<String>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One run; times in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Run {
    context: u32,
    recomputed_tokens: u64,
    detection_ms: f64,
    recomputation_ms: f64,
    total_ms: f64,
    /// Median time per token before the kill.
    token_ms: f64,
}

const BLOCK_TOKENS: u32 = 32;
/// Tokens of an answer.
const TOKENS: u32 = 1024;
/// Tokens received before the creditor is killed.
const RECEIVED: usize = 16;

fn instance(lagoon: &Lagoon, name: &str, gmanager: &str, kv_tokens: u32, flags: &[String]) -> Result<Process> {
    let own = [
        "serve".to_owned(),
        lagoon.model.display().to_string(),
        format!("--gmanager={gmanager}"),
        format!("--name={name}"),
        format!("--kv-tokens={kv_tokens}"),
        format!("--block-tokens={BLOCK_TOKENS}"),
        "--http=127.0.0.1:0".to_owned(),
        "--backend=cpu".to_owned(),
        "--calibrate=off".to_owned(),
    ];
    lagoon.start(name, &[&own, flags].concat())
}

/// Waits for `tokens` tokens; returns their times.
fn wait_for(times: &Times, tokens: usize) -> Result<Vec<Instant>> {
    let since = Instant::now();
    loop {
        let recorded = times.lock().expect("nobody panics with it").clone();
        if let Some(error) = recorded.1 {
            bail!("the stream failed: {error}");
        }
        if recorded.0.len() >= tokens {
            return Ok(recorded.0);
        }
        ensure!(since.elapsed() < TIMEOUT, "{} tokens after {TIMEOUT:?}", recorded.0.len());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn wait_until(http: &str, what: &str, satisfied: impl Fn(&Value) -> Result<bool>) -> Result<Instant> {
    let since = Instant::now();
    while !satisfied(&status(http)?)? {
        ensure!(since.elapsed() < TIMEOUT, "not {what} after {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(3));
    }
    Ok(Instant::now())
}

fn measure(lagoon: &Lagoon, args: &Args, context: u32) -> Result<Run> {
    let room = (context + TOKENS).next_multiple_of(BLOCK_TOKENS);
    let gmanager = lagoon.start("gm", &["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned()])?;
    let quic = gmanager.announced("quic")?;
    let debtor = instance(lagoon, "debtor", quic, args.debtor_tokens, &args.flag)?;
    let mut creditors = ["one", "two"]
        .into_iter()
        .map(|name| instance(lagoon, name, quic, room, &args.flag))
        .collect::<Result<Vec<Process>>>()?;
    let http = debtor.announced("http")?;
    // Each lends almost all that it has.
    let some = u64::from((args.debtor_tokens + room + room / 2) / BLOCK_TOKENS);
    wait_until(http, "three instances", |s| Ok(number(s, "/pool_blocks_total")? > some))?;
    let times = listen(http, context, TOKENS)?;
    let before = wait_for(&times, RECEIVED)?;
    let lent = |creditor: &Process| number(&status(creditor.announced("http")?)?, "/blocks_lent");
    let lends = if lent(&creditors[0])? > lent(&creditors[1])? { 0 } else { 1 };
    ensure!(lent(&creditors[lends])? > 0, "nothing is borrowed: --debtor-tokens is too large");

    let killed = Instant::now();
    creditors[lends].kill()?;
    let detected = wait_until(http, "noticed", |s| Ok(number(s, "/recoveries")? > 0))?;
    // A token may have been in flight at the kill.
    let received = times.lock().expect("nobody panics with it").0.iter().filter(|at| **at < detected).count();
    let next = wait_for(&times, received + 1)?[received];
    let recomputed_tokens = number(&status(http)?, "/recomputed_tokens")?;
    ensure!(recomputed_tokens > 0, "nothing was computed again");
    let gaps: Vec<f64> = before.windows(2).map(|w| (w[1] - w[0]).as_secs_f64() * 1e3).collect();
    let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
    Ok(Run {
        context,
        recomputed_tokens,
        detection_ms: ms(killed, detected),
        recomputation_ms: ms(detected, next),
        total_ms: ms(killed, next),
        token_ms: median(gaps),
    })
}

fn main() -> Result<()> {
    let args = Args::parse();
    let _ = args.bench;
    let lagoon = Lagoon::new("recovery")?;
    let mut runs = Vec::new();
    for _ in 0..args.repeats {
        for context in &args.contexts {
            runs.push(measure(&lagoon, &args, *context).with_context(|| format!("{context} tokens"))?);
        }
    }
    if args.json {
        let result = json!({ "debtor_tokens": args.debtor_tokens, "flags": args.flag, "runs": runs });
        println!("{}", serde_json::to_string_pretty(&result)?);
        return Ok(());
    }
    let columns = ["context", "recomputed", "detection ms", "recomputation ms", "total ms", "token ms"];
    println!("{}", columns.map(|c| format!("{c:>17}")).concat());
    for context in &args.contexts {
        let of = |f: fn(&Run) -> f64| {
            let values = runs.iter().filter(|r| r.context == *context).map(f).collect();
            format!("{:>17.1}", median(values))
        };
        let recomputed = runs.iter().find(|r| r.context == *context).map_or(0, |r| r.recomputed_tokens);
        let times = [of(|r| r.detection_ms), of(|r| r.recomputation_ms), of(|r| r.total_ms), of(|r| r.token_ms)];
        println!("{context:>17}{recomputed:>17}{}", times.concat());
    }
    Ok(())
}
