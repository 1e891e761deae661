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
use lagoon_benches::cluster::{Lagoon, Process, TIMEOUT, get, number, request, status};
use lagoon_benches::measure::{commit, device, hardware_threads, median};
use lagoon_benches::pace::Pace;
use lagoon_plot::{Panel, Series};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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

const BLOCK_TOKENS: u32 = 32;
/// Modelled tokens of a prompt for one real one.
const SCALE: f64 = 8.0;

struct Pool {
    instances: Vec<Process>,
    _gmanager: Process,
}

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
    /// Sent by all instances for a prompt, MiB.
    sent_mib: f64,
    /// Prompts that all members computed to the end.
    completed: u64,
}

impl Pool {
    fn start(lagoon: &Lagoon, args: &Args, count: usize) -> Result<Self> {
        let gmanager = lagoon.start("gm", &["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned()])?;
        let quic = gmanager.announced("quic")?.to_owned();
        let longest = args.prompts.iter().max().context("a prompt")?;
        let instance = |n: usize| {
            let name = format!("i{n}");
            let own = [
                "serve".to_owned(),
                lagoon.model.display().to_string(),
                format!("--gmanager={quic}"),
                format!("--name={name}"),
                format!("--kv-tokens={}", longest + 4_096),
                format!("--max-model-len={}", longest + 1_024),
                format!("--block-tokens={BLOCK_TOKENS}"),
                format!("--step-tokens={}", args.step_tokens),
                format!("--prefill-instances={count}"),
            ];
            let rest = ["--http=127.0.0.1:0", "--backend=cpu", "--threads=1", "--prefix-cache=off", "--calibrate=off"];
            lagoon.start(&name, &[&own[..], &rest.map(str::to_owned)].concat())
        };
        let instances = (0..count).map(instance).collect::<Result<Vec<_>>>()?;
        let pool = Self { instances, _gmanager: gmanager };
        let blocks = u64::from((longest + 4_096) / BLOCK_TOKENS) * (count as u64 - 1);
        for at in 0..count {
            let since = Instant::now();
            while number(&status(pool.http(at)?)?, "/pool_blocks_total")? <= blocks {
                ensure!(since.elapsed() < TIMEOUT, "the pool does not form");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        // Every instance's heartbeat is known to the gManager.
        std::thread::sleep(Duration::from_millis(800));
        Ok(pool)
    }

    fn http(&self, at: usize) -> Result<&str> {
        self.instances[at].announced("http")
    }

    fn sent_mib(&self) -> Result<f64> {
        let mut sum = 0.0;
        for at in 0..self.instances.len() {
            let text = get(self.http(at)?, "/metrics")?;
            let lines = text.lines().filter(|line| line.starts_with("lagoon_wire_bytes_sent_total{"));
            sum += lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>();
        }
        Ok(sum / f64::from(1 << 20))
    }

    fn completed(&self) -> Result<u64> {
        number(&status(self.http(0)?)?, "/joint/completed")
    }

    /// The time of a prompt at the first instance, in milliseconds, and its answer.
    fn ask(&self, prompt: &[u32]) -> Result<(f64, String)> {
        let body = json!({ "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": true });
        let begun = Instant::now();
        let mut text = String::new();
        request(self.http(0)?, "POST /v1/completions", &body.to_string())?.read_to_string(&mut text)?;
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let (_, body) = text.split_once("\r\n\r\n").context("no body")?;
        let reply: Value = serde_json::from_str(body).with_context(|| format!("an answer: {body:?}"))?;
        let text = reply["choices"][0]["text"].as_str().with_context(|| format!("no answer: {reply}"))?;
        Ok((ms, text.to_owned()))
    }
}

/// Token ids that a seed determines, none of them special.
fn prompt(count: u32, seed: u32) -> Vec<u32> {
    let token = |i: u32| 5 + (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503).wrapping_add(i >> 3)) % 1_000;
    (0..count).map(token).collect()
}

fn measure(lagoon: &Lagoon, args: &Args, count: usize, answers: &mut Vec<String>) -> Result<Vec<Point>> {
    let pool = Pool::start(lagoon, args, count)?;
    let (mut points, mut at) = (Vec::new(), 0);
    for &tokens in &args.prompts {
        let (mut all_ms, sent, completed) = (Vec::new(), pool.sent_mib()?, pool.completed()?);
        for run in 0..args.runs {
            let (ms, text) = pool.ask(&prompt(tokens, run))?;
            eprintln!("{count} members, {tokens} tokens: {ms:.0} ms");
            match answers.get(at) {
                Some(expected) => ensure!(*expected == text, "{count} members answer {text:?}, one {expected:?}"),
                None => answers.push(text),
            }
            at += 1;
            all_ms.push(ms);
        }
        let completed = pool.completed()? - completed;
        ensure!(
            count == 1 || completed == u64::from(args.runs),
            "{completed} of {} prompts were computed together",
            args.runs
        );
        let (ms, sent_mib) = (median(all_ms.clone()), (pool.sent_mib()? - sent) / f64::from(args.runs));
        let (over_alone, efficiency) = (0.0, 0.0);
        points.push(Point { members: count, prompt: tokens, ms, all_ms, over_alone, efficiency, sent_mib, completed });
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
            name: format!("{members} instances"),
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
    println!("{:>8}{:>9}{:>11}{:>12}{:>12}{:>11}", "members", "prompt", "ms", "over alone", "efficiency", "MiB sent");
    for point in &points {
        let Point { members, prompt, ms, over_alone, efficiency, sent_mib, .. } = point;
        println!("{members:>8}{prompt:>9}{ms:>11.0}{over_alone:>12.3}{efficiency:>12.2}{sent_mib:>11.1}");
    }
    Ok(())
}
