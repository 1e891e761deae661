//! `lagoon-sim`: runs the shipped instances and gManager under simulated time, with faults from a seed and every checker on.
#![forbid(unsafe_code)]

mod suites;

use crate::suites::Suite;
use anyhow::Context as _;
use clap::Parser as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lagoon_sim::chaos::{Aim, Failure, Limits, Scenario, Shrunk, Summary, replay, shrink, sweep};
use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Runs pools of instances under simulated time, with faults from a seed and every checker on.
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "lagoon-sim", version, args_conflicts_with_subcommands = true)]
struct SimArgs {
    #[command(subcommand)]
    command: Option<Suite>,
    /// Replay one run.
    #[arg(long, value_name = "N", conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Run many seeds: A..B, B excluded [default: 0..1000].
    #[arg(long, value_name = "A..B", value_parser = parse_seeds)]
    seeds: Option<Range<u64>>,
    /// Instances [default: drawn, 2 to 5].
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    nodes: usize,
    /// Requests [default: drawn, 2 to 20].
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    requests: usize,
    /// Simulated seconds in which requests and faults begin [default: drawn, 2 to 20].
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    seconds: u64,
    /// End each run after so many steps of the simulation [default: when all requests are over].
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    steps: u64,
    /// Draw no faults.
    #[arg(long)]
    no_faults: bool,
    /// All pools have prefill and decode workers, or none has [default: drawn, one in four].
    #[arg(long, value_name = "BOOL")]
    roles: Option<bool>,
    /// Beside everything else, in every pool: taken-back takes back role orders that may have arrived; fenced fences instances
    /// that have a role order or have asked for prompts; with unacknowledged, workers find full queues when they answer; with
    /// late-writes, prompts are read from memory that peers still write; with unreleased, releases of leases find full queues.
    /// Overrides --nodes and --roles.
    #[arg(long, value_name = "WHAT", value_parser = parse_aim)]
    aim: Option<Aim>,
    /// Threads for many seeds [default: all cores].
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Seconds to look for a shorter history of a failure; 0 does not look.
    #[arg(long, value_name = "S", default_value_t = 30)]
    shrink: u64,
    /// Print the last N lines of what happened in the failing (or the only) run.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    trace: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Give prefix caches tiers in host memory and on disk.
    #[arg(long)]
    cache_tiers: bool,
    /// Have long prompts computed by several instances.
    #[arg(long)]
    joint: bool,
    /// Put the instances on two hosts, whose creditors are asked through one of them.
    #[arg(long)]
    hosts: bool,
}

fn parse_aim(text: &str) -> Result<Aim, String> {
    Aim::named(text).ok_or_else(|| "expected taken-back, fenced, unacknowledged, late-writes or unreleased".to_owned())
}

fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let parsed = text.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    parsed.filter(|r| r.start < r.end).ok_or_else(|| "expected A..B, as 0..1000".to_owned())
}

/// Runs, prints, and exits with 1 if a checker failed.
fn main() -> anyhow::Result<ExitCode> {
    let args = &SimArgs::parse();
    if let Some(command) = &args.command {
        return suites::run(command).map(|()| ExitCode::SUCCESS);
    }
    let SimArgs { nodes, requests, seconds, steps, roles, aim, cache_tiers, joint, hosts, .. } = *args;
    let faults = !args.no_faults;
    let limits = Limits { nodes, requests, seconds, steps, roles, aim, cache_tiers, joint, hosts, faults };
    match args.seed {
        Some(seed) => one(args, seed, limits),
        None => many(args, args.seeds.clone().unwrap_or(0..1000), limits),
    }
}

#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
fn one(args: &SimArgs, seed: u64, limits: Limits) -> anyhow::Result<ExitCode> {
    let scenario = Scenario::draw(seed, limits);
    let (result, trace) = replay(&scenario, &scenario.ops, args.trace);
    let failure = match &result {
        Ok(summary) if args.json => {
            println!("{}", serde_json::json!({ "seed": seed, "ok": true, "summary": summary }));
            None
        }
        Ok(summary) => {
            describe(&scenario);
            scenario.ops.iter().for_each(|op| println!("  {op}"));
            print_summary(summary);
            None
        }
        Err(failure) => Some(failure),
    };
    let Some(failure) = failure else {
        trace.iter().for_each(|line| println!("{line}"));
        return Ok(ExitCode::SUCCESS);
    };
    report(args, &scenario, failure)?;
    Ok(ExitCode::FAILURE)
}

#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
fn many(args: &SimArgs, seeds: Range<u64>, limits: Limits) -> anyhow::Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let bar = ProgressBar::new(seeds.end - seeds.start);
    bar.set_draw_target(if args.json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() });
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} seeds, {msg}, {eta} left")?);
    let begun = Instant::now();
    let done = sweep(seeds.clone(), limits, args.jobs.unwrap_or(cores), 1, &|sweep| {
        bar.set_message(format!("{} M events", sweep.total.events / 1_000_000));
        bar.set_position(sweep.runs);
    });
    bar.finish_and_clear();
    if let Some((seed, failure)) = done.failures.first() {
        report(args, &Scenario::draw(*seed, limits), failure)?;
        return Ok(ExitCode::FAILURE);
    }
    let seconds = begun.elapsed().as_secs_f64();
    if args.json {
        let runs = done.runs;
        println!("{}", serde_json::json!({ "ok": true, "runs": runs, "seconds": seconds, "summary": done.total }));
    } else {
        println!("{} runs in {seconds:.1} s, nothing was found", done.runs);
        print_summary(&done.total);
    }
    Ok(ExitCode::SUCCESS)
}

#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
fn report(args: &SimArgs, scenario: &Scenario, failure: &Failure) -> anyhow::Result<()> {
    let ops = scenario.ops.clone();
    let none = Shrunk { ops, failure: failure.clone(), tried: 0 };
    let shrunk = if args.shrink == 0 { none } else { shrink(scenario, failure, Duration::from_secs(args.shrink)) };
    if args.json {
        let history: Vec<String> = shrunk.ops.iter().map(ToString::to_string).collect();
        let json = serde_json::json!({
            "seed": scenario.seed, "ok": false, "failure": failure, "history": history,
            "failure_of_history": shrunk.failure,
        });
        println!("{}", serde_json::to_string(&json).context("encode the report")?);
        return Ok(());
    }
    println!("seed {} failed: {failure}", scenario.seed);
    describe(scenario);
    println!(
        "the shortest history found ({} of {} lines, {} tried):",
        shrunk.ops.len(),
        scenario.ops.len(),
        shrunk.tried
    );
    shrunk.ops.iter().for_each(|op| println!("  {op}"));
    println!("it fails with {}", shrunk.failure);
    if args.trace > 0 {
        let (_, trace) = replay(scenario, &shrunk.ops, args.trace);
        trace.iter().for_each(|line| println!("{line}"));
    }
    let roles = args.roles.map_or_else(String::new, |roles| format!(" --roles {roles}"));
    let aim = args.aim.map_or_else(String::new, |aim| format!(" --aim {}", aim.name()));
    let tiers = if args.cache_tiers { " --cache-tiers" } else { "" };
    let joint = if args.joint { " --joint" } else { "" };
    let hosts = if args.hosts { " --hosts" } else { "" };
    println!("replay: lagoon-sim --seed {}{roles}{aim}{tiers}{joint}{hosts}", scenario.seed);
    Ok(())
}

#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
fn describe(scenario: &Scenario) {
    let pool = &scenario.pool;
    let window = pool.windows.pooled.map_or_else(|| "no window".to_owned(), |w| format!("a window of {w}"));
    let rings = pool.windows.rings.map_or_else(String::new, |w| format!(", rings of {w}"));
    let (tokens, latency) = (pool.block_tokens, pool.link.latency_us);
    println!("{} instances, {tokens} tokens a block, {window}{rings}, {latency} us one way", pool.nodes.len());
    for (at, node) in pool.nodes.iter().enumerate() {
        let (role, blocks, lends) = (node.role, node.blocks, node.lend_blocks_max);
        println!("  node {}: {role:?}, {blocks} blocks, lends {lends}, clock {:+} ppm", at + 1, node.skew_ppm);
    }
}

#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
fn print_summary(s: &Summary) {
    println!("{} events in {:.1} simulated seconds, {} faults", s.events, s.ms as f64 / 1e3, s.faults);
    println!(
        "{} requests: {} finished, {} refused, {} failed, {} cancelled, {} died with their instance",
        s.requests, s.finished, s.refused, s.failed, s.cancelled, s.lost
    );
    println!("{} tokens, {} preemptions, {} losses of KV", s.tokens, s.preemptions, s.recoveries);
    println!("{} tokens computed again for lost KV", s.recomputed);
    if s.relayed > 0 {
        println!("{} layers were merged by relays, {} steps were not relayed", s.relayed, s.relays_failed);
    }
    if s.joint_begun > 0 {
        println!(
            "{} prompts begun with others, {} completed, {} tokens computed for others",
            s.joint_begun, s.joint_completed, s.joint_tokens
        );
    }
    println!(
        "{} tokens of prefixes found ({} leased from others), {} blocks of them shared, {} kept blocks evicted",
        s.prefix_hits, s.prefix_leased, s.prefix_shared, s.prefix_evicted
    );
    println!(
        "{} prompts read from prefill workers ({} pushed), {} given to another one, {} computed by their decode workers",
        s.prefills, s.prefills_pushed, s.prefills_again, s.prefills_own
    );
    println!("{} blocks stayed with prefill workers, {} roles changed", s.left, s.switches);
    println!("{} frames of partials, {} of KV", s.partials_frames, s.bulk_frames);
}
