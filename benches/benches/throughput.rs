//! Throughput of a cluster of instances on this machine with pooling on and off, on one mixed trace in one run.
//!
//! The instances are real processes with the bundled model, real arithmetic and real QUIC. Each device is *paced*
//! (`lagoon_pace::Paced`): a step takes the time of a roofline model, so that instances on this machine's cores do
//! not slow each other down. The modelled device reads its weights in 10 ms a step and a full KV cache in 30 ms, the
//! proportions of LLaMA2-7B on an A100. One token of KV stands for 54.5 of that model's, one step for one of its steps:
//! rows of prompts are scaled separately (`--prompt-scale`), or a prompt would cost a fiftieth of what it should.
//!
//! `off` is the same cluster without lending (the papers' vLLM-multi): same instances, same dispatch. The trace is
//! Poisson with short requests and some that take most of an instance, all small enough for one instance.
//! `apps/sim/tests/pooling.rs` simulates the same cluster and trace. The devices' lateness is printed: above a few
//! per cent, the run is invalid.
//!
//! `cargo build --release -p lagoon -p lagoon-paced && cargo bench -p lagoon-benches --bench throughput -- [--json]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use anyhow::Result;
use clap::Parser;
use lagoon_benches::cluster::Lagoon;
use lagoon_benches::measure::median;
use lagoon_benches::pace::Pace;
use lagoon_sim::paper::mixed::{CACHE_S, Mix, ROWS_BALANCE, TOKEN_STANDS_FOR, WEIGHTS_S};
use lagoon_sim::paper::traces::to_csv;
use serde_json::{Value, json};

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    #[arg(long, default_value_t = 4)]
    instances: u32,
    /// KV capacity of an instance, in tokens.
    #[arg(long, default_value_t = 2048)]
    kv_tokens: u32,
    #[arg(long, default_value_t = 160)]
    requests: u32,
    /// Requests per second; both clusters get the same arrivals. High: the clusters are never idle.
    #[arg(long, default_value_t = 40.0)]
    rate: f64,
    /// Rows of the modelled prompt that one row of a prompt stands for: a token of KV stands for as many, a step for one
    /// step. 1: prompts cost next to nothing.
    #[arg(long, default_value_t = TOKEN_STANDS_FOR)]
    prompt_scale: f64,
    /// Share of requests that are long, in percent.
    #[arg(long, default_value_t = 12)]
    long_percent: u32,
    /// Runs of each, alternating; medians are printed.
    #[arg(long, default_value_t = 3)]
    repeats: u32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Flags for the cluster with pooling on only, for example `--flag=--remote-attention=ship`.
    #[arg(long)]
    flag: Vec<String>,
    #[arg(long, default_value_t = 18_100)]
    port: u16,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn pace(args: &Args) -> Pace {
    let (kv_tokens, prompt_scale) = (args.kv_tokens, args.prompt_scale);
    let (weights_s, cache_s, rows_balance) = (WEIGHTS_S, CACHE_S, ROWS_BALANCE);
    Pace { weights_s, cache_s, kv_tokens, rows_balance, prompt_scale, instances: 1.0, efficiency: 1.0 }
}

fn mix(args: &Args) -> Mix {
    let &Args { instances, kv_tokens, requests, rate, long_percent, prompt_scale, seed, .. } = args;
    Mix { instances, kv_tokens, requests, rate, long_percent, prompt_scale, seed, ..Mix::default() }
}

/// The load generator's report of one cluster.
fn run(args: &Args, lagoon: &Lagoon, on: bool) -> Result<Value> {
    let dir = &lagoon.dir;
    let own = [
        format!("--instances={}", args.instances),
        format!("--kv-tokens={}", args.kv_tokens),
        format!("--lend-percent={}", if on { 100 } else { 0 }),
    ];
    let rows = format!("--step-tokens={}", mix(args).step_rows());
    let sizes = [&rows, "--max-running=64", "--max-queue=4096", "--block-tokens=16"].map(str::to_owned);
    let flags = if on { &args.flag[..] } else { &[] };
    lagoon.replay(&[&own[..], &sizes[..], flags].concat(), args.port, &dir.join("trace.csv"))
}

fn middle(reports: &[Value], path: &str) -> f64 {
    median(reports.iter().filter_map(|r| r.pointer(path)?.as_f64()).collect())
}

fn main() -> Result<()> {
    let args = Args::parse();
    let _ = args.bench;
    let lagoon = Lagoon::new("throughput")?;
    let profile = pace(&args).profile(&lagoon.model)?;
    let lagoon = lagoon.paced(&profile)?;
    std::fs::write(lagoon.dir.join("trace.csv"), to_csv(&mix(&args).trace()))?;
    let (mut off, mut on) = (Vec::new(), Vec::new());
    for _ in 0..args.repeats {
        off.push(run(&args, &lagoon, false)?);
        on.push(run(&args, &lagoon, true)?);
    }
    let paths = [
        ("generated tokens/s", "/output_tokens_per_s"),
        ("duration s", "/duration_s"),
        ("ttft p50 ms", "/ttft_ms/p50"),
        ("ttft p90 ms", "/ttft_ms/p90"),
        ("tbt p50 ms", "/tbt_ms/p50"),
        ("tbt p99 ms", "/tbt_ms/p99"),
        ("failed", "/failed"),
        ("devices late", "/devices_late_share"),
    ];
    for report in off.iter_mut().chain(&mut on) {
        let ok = report["ok"].as_u64().unwrap_or(0);
        report["failed"] = json!(u64::from(args.requests) - ok);
    }
    let ratio = middle(&on, "/output_tokens_per_s") / middle(&off, "/output_tokens_per_s");
    if args.json {
        let result = json!({
            "instances": args.instances, "kv_tokens": args.kv_tokens, "requests": args.requests, "rate": args.rate,
            "long_percent": args.long_percent, "prompt_scale": args.prompt_scale, "seed": args.seed, "profile": profile,
            "throughput_on_over_off": ratio, "off": off, "on": on,
        });
        println!("{}", serde_json::to_string_pretty(&result)?);
    } else {
        println!("{:<22}{:>12}{:>12}", "", "off", "on");
        for (name, path) in paths {
            println!("{name:<22}{:>12.3}{:>12.3}", middle(&off, path), middle(&on, path));
        }
        println!("throughput on / off    {ratio:.3}");
    }
    Ok(())
}
