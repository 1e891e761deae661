//! Joint prefill: the time to the first token of a lone prompt against its length and the number of instances that compute it.
//!
//! Real processes on this machine with the bundled model: a gManager and instances that each hold the whole prompt, `--prefill-instances`
//! of which compute it. Prompts are new each time; members are the same processes throughout.
//!
//! * By default instances compute, with one thread each: meaningful up to as many instances as there are cores.
//! * With `--paced` devices are modelled (`lagoon-paced`): LLaMA2-7B on an A100, `--time` times slower, eight tokens for each real one.
//!   The network is this machine's, and carries the bundled model's bytes: the exchange costs round trips, not bandwidth.
//!
//! Times are medians to the end of an answer of one token. Bytes are those of all instances' frames and KV
//! (`lagoon_wire_bytes_sent_total`): the exchange. `alone` is a pool of one instance; its time by the number of members is the limit.
//!
//! `cargo build --release -p lagoon -p lagoon-paced && cargo bench -p lagoon-benches --bench joint -- [--json] [--paced] [--plot FILE]`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark prints its results and its progress")]

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use lagoon_benches::cluster::{Lagoon, number};
use lagoon_benches::measure::{commit, device, hardware_threads, median};
use lagoon_benches::pace::Pace;
use lagoon_benches::pool::{self, Pool};
use lagoon_plot::{Panel, Series};
use serde::Serialize;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Tokens of prompts.
    #[arg(long, value_delimiter = ',', default_values_t = [6_000, 24_000])]
    prompts: Vec<u32>,
    /// Numbers of instances that compute a prompt; 1 comes first.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    members: Vec<usize>,
    /// Prompts of each kind.
    #[arg(long, default_value_t = 3)]
    runs: u32,
    /// Modelled devices.
    #[arg(long)]
    paced: bool,
    /// With --paced: how much slower than an A100.
    #[arg(long, default_value_t = 1.0)]
    time: f64,
    /// Tokens that one step computes at most.
    #[arg(long, default_value_t = 512)]
    step_tokens: u32,
    /// An SVG of times, efficiency and exchange against lengths.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Modelled tokens of a prompt for one real one.
const SCALE: f64 = 8.0;

/// Prompts of one length, computed by one number of members.
#[derive(Clone, Debug, Serialize)]
struct Point {
    members: usize,
    prompt: u32,
    ms: f64,
    /// All times.
    all_ms: Vec<f64>,
    /// Time over that of one member, and the fraction of the limit that it reaches.
    over_alone: f64,
    efficiency: f64,
    /// What a member waited for others' partials while it had nothing to compute: the mean of members and prompts. The rest of the
    /// time it computed, for itself or for others.
    wait_ms: f64,
    /// Sent by all instances for a prompt, MiB.
    sent_mib: f64,
    /// Prompts that all members computed to the end.
    completed: u64,
}

/// Starts the pool of `count` members.
fn start(lagoon: &Lagoon, args: &Args, count: usize) -> Result<Pool> {
    let longest = args.prompts.iter().max().context("a prompt")?;
    let flags = [
        format!("--max-model-len={}", longest + 1_024),
        format!("--step-tokens={}", args.step_tokens),
        format!("--prefill-instances={count}"),
        "--prefix-cache=off".to_owned(),
    ];
    let pool = Pool::start(lagoon, count, longest + 4_096, &flags)?;
    // Every instance's heartbeat is known to the gManager.
    std::thread::sleep(Duration::from_millis(800));
    Ok(pool)
}

fn measure(lagoon: &Lagoon, args: &Args, count: usize, answers: &mut Vec<String>) -> Result<Vec<Point>> {
    const WAITS: &str = "lagoon_step_partials_wait_seconds_sum";
    let pool = start(lagoon, args, count)?;
    let completed = || number(&pool.status(0)?, "/joint/completed");
    let (mut points, mut at) = (Vec::new(), 0);
    for &tokens in &args.prompts {
        let (mut all_ms, before, earlier) = (Vec::new(), pool.sent_mib(0..count)?, completed()?);
        let waited = pool.sum(WAITS, 0..count)?;
        for run in 0..args.runs {
            let reply = pool.ask(0, &pool::tokens(tokens, run), 2)?;
            eprintln!("{count} members, {tokens} tokens: {:.0} ms", reply.ms);
            match answers.get(at) {
                Some(expected) => {
                    ensure!(*expected == reply.text, "{count} members answer {:?}, one {expected:?}", reply.text);
                }
                None => answers.push(reply.text),
            }
            at += 1;
            all_ms.push(reply.ms);
        }
        let completed = completed()? - earlier;
        ensure!(
            count == 1 || completed == u64::from(args.runs),
            "{completed} of {} prompts were computed together",
            args.runs
        );
        let runs = f64::from(args.runs);
        points.push(Point {
            members: count,
            prompt: tokens,
            ms: median(all_ms.clone()),
            all_ms,
            over_alone: 0.0,
            efficiency: 0.0,
            wait_ms: 1e3 * (pool.sum(WAITS, 0..count)? - waited) / (runs * count as f64),
            sent_mib: (pool.sent_mib(0..count)? - before) / runs,
            completed,
        });
    }
    Ok(points)
}

/// LLaMA2-7B on an A100, each row of the bundled model for [`SCALE`] rows; `time` times slower.
fn pace(time: f64) -> Pace {
    Pace {
        weights_s: 9e-3 * time,
        cache_s: 34e-3 * time,
        kv_tokens: 16_384,
        rows_balance: 168.0,
        prompt_scale: SCALE,
        instances: 1.0,
        efficiency: 1.0,
    }
}

fn plot(points: &[Point], args: &Args, path: &Path) -> Result<()> {
    let scale = if args.paced { SCALE } else { 1.0 };
    let series = |y: &dyn Fn(&Point) -> f64| {
        let of = |members: &usize| Series {
            name: format!("{members} instance{}", if *members == 1 { "" } else { "s" }),
            points: points
                .iter()
                .filter(|of| of.members == *members)
                .map(|of| (scale * f64::from(of.prompt), y(of)))
                .collect(),
        };
        args.members.iter().map(of).collect()
    };
    let panel = |title: &str, y_label: &str, y: &dyn Fn(&Point) -> f64| Panel {
        title: title.to_owned(),
        x_label: "prompt (tokens)".to_owned(),
        y_label: y_label.to_owned(),
        log_x: false,
        log_y: false,
        series: series(y),
    };
    let panels = [
        panel("Time to first token", "s", &|of| of.ms / 1e3 / args.time),
        panel("Share of the limit", "time alone / members / time", &|of| of.efficiency),
        panel("Waiting for partials", "s of a member", &|of| of.wait_ms / 1e3 / args.time),
        panel("Computing", "s of a member", &|of| (of.ms - of.wait_ms) / 1e3 / args.time),
        panel("Exchange", "MiB sent", &|of| of.sent_mib),
    ];
    let svg = lagoon_plot::figure("A lone prompt, computed by several instances", &panels, 3)?;
    std::fs::write(path, svg).with_context(|| format!("writing {}", path.display()))
}

fn main() -> Result<()> {
    let args = Args::parse();
    let _ = args.bench;
    ensure!(args.members.first() == Some(&1), "the first number of members is 1");
    let lagoon = Lagoon::new("joint")?;
    let profile = pace(args.time).profile(&lagoon.model)?;
    let lagoon = if args.paced { lagoon.paced(&profile)? } else { lagoon };
    let (mut points, mut answers) = (Vec::new(), Vec::new());
    for &count in &args.members {
        points.extend(measure(&lagoon, &args, count, &mut answers)?);
    }
    let alone: Vec<f64> = points[..args.prompts.len()].iter().map(|point| point.ms).collect();
    for (at, point) in points.iter_mut().enumerate() {
        point.over_alone = point.ms / alone[at % alone.len()];
        point.efficiency = 1.0 / (point.over_alone * point.members as f64);
    }
    if let Some(path) = &args.plot {
        plot(&points, &args, path)?;
    }
    if args.json {
        let result = json!({
            "bench": "joint", "device": device(), "commit": commit(), "hardware_threads": hardware_threads(),
            "paced": args.paced, "time": args.time, "step_tokens": args.step_tokens, "points": points,
        });
        println!("{result:#}");
        return Ok(());
    }
    println!(
        "{:>8}{:>9}{:>11}{:>12}{:>12}{:>11}{:>11}",
        "members", "prompt", "ms", "over alone", "efficiency", "waiting", "MiB sent"
    );
    for point in &points {
        let Point { members, prompt, ms, over_alone, efficiency, wait_ms, sent_mib, .. } = point;
        println!(
            "{members:>8}{prompt:>9}{ms:>11.0}{over_alone:>12.3}{efficiency:>12.2}{wait_ms:>11.0}{sent_mib:>11.1}"
        );
    }
    Ok(())
}
