//! What a pool pays in goodput: the rate of requests that are answered in time.
//!
//! * `e1`: a production trace with a long tail on four instances. Goodput (the highest rate at which 90 % meet the objective),
//!   and, at the goodput of instances on their own, the first token of prompts over 32k, failures, and the time between
//!   tokens. Beside a pool behind its gateway, and one whose instances compute long prompts together: the same instances without lending, dispatched to the most free memory
//!   as the gateway does it without predictions, and by least predicted work.
//! * `e2`: three phases, the second with requests that no instance holds. Goodput over the whole trace. Beside the pool:
//!   static splits of the same hardware.
//! * `hits`: hit rates of prefix caches on a trace's `hash_ids`, beside one cache as large as the pool (`hits.rs`).
//!
//! The instances are real processes with the bundled model, real arithmetic and real QUIC, on modelled devices
//! (`lagoon_pace::Paced`): a step reads its weights in 10 ms and attends to a full KV cache in 30 ms, as LLaMA2-7B on an
//! A100. One token of KV stands for `--tokens` of that model's (54.5: 2,048 for 111,615).
//!
//! Time is scaled, too, or a run would take hours: a request generates a `--time`-th of its tokens, so that it takes a
//! `--time`-th of the time; arrivals and the objective's time to the first token follow; a prompt's row stands for
//! `--tokens / --time` rows. Steps, and so the time between tokens, are not scaled. What this distorts: an answer's tokens
//! take `--tokens / --time` times the memory that they should, and a chunk is coarser against the first token's time; heartbeats (250
//! ms) and the prefill that a gateway allows ahead (500 ms) are `--time` times as long as they should be against the objective, which is
//! to the pool's disadvantage. Rates that a short `--time` gives are nearer to the truth, and take longer.
//! Rates and times are printed in the trace's time.
//!
//! Baselines are processes of no pool, with requests sent straight to them by the simulator's dispatch; the pool has its
//! gateway on the way.
//!
//! `cargo build --release -p lagoon-paced && cargo bench -p lagoon-benches --bench goodput -- --experiment e1 [--json]`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark prints its results and its progress")]

mod e1;
mod e2;
mod hits;
mod load;
mod systems;

use crate::systems::Sizes;
use anyhow::{Context, Result, ensure};
use clap::Parser;
use lagoon_benches::cluster::Lagoon;
use lagoon_benches::measure::{commit, device, hardware_threads};
use lagoon_benches::pace::Pace;
use lagoon_plot::{Panel, Series};
use lagoon_sim::paper::goodput::Slo;
use lagoon_sim::paper::mixed::{CACHE_S, ROWS_BALANCE, TOKEN_STANDS_FOR, WEIGHTS_S};
use std::cell::Cell;
use std::path::PathBuf;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Experiment {
    E1,
    E2,
    Hits,
}

#[derive(Parser)]
struct Args {
    #[arg(long, value_enum)]
    experiment: Experiment,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// A small run: whether it works.
    #[arg(long)]
    quick: bool,
    /// A trace of conversations for e1 and hits, as Mooncake's (JSON lines) [default: a synthetic one].
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// First requests of e1's parts of the trace.
    #[arg(long, value_delimiter = ',', default_value = "0,800,1600")]
    offsets: Vec<usize>,
    /// Systems of e1, by their names in its table, besides `alone, least predicted work`, which they are compared with [default: all].
    #[arg(long, value_name = "NAME", value_delimiter = ';')]
    systems: Vec<String>,
    /// Requests of a run [default: 800; of e2 900; of hits 2000; 96 with --quick].
    #[arg(long)]
    requests: Option<usize>,
    /// Factor between the rates that a search tells apart [default: 1.05; 1.3 with --quick].
    #[arg(long)]
    precision: Option<f64>,
    /// Tokens of LLaMA2-7B's KV that one token stands for [default: 54.5; of hits 64].
    #[arg(long)]
    tokens: Option<f64>,
    /// Factor by which requests are faster [default: 21.8; of hits 16].
    #[arg(long)]
    time: Option<f64>,
    /// Requests per second of hits, in the trace's time.
    #[arg(long, default_value_t = 0.8)]
    rate: f64,
    /// KV capacity of an instance of hits, in tokens of LLaMA2-7B.
    #[arg(long, default_value_t = 500_000.0)]
    kv_tokens: f64,
    /// Rows of a step.
    #[arg(long, default_value_t = 128)]
    step_tokens: u32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the figures to this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[arg(long, default_value_t = 18_500)]
    port: u16,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    fn requests(&self) -> usize {
        let full = match self.experiment {
            Experiment::E1 => 800,
            Experiment::E2 => 900,
            Experiment::Hits => 2_000,
        };
        self.requests.unwrap_or(if self.quick { 96 } else { full })
    }

    fn tokens(&self) -> f64 {
        self.tokens.unwrap_or(if self.experiment == Experiment::Hits { hits::TOKENS } else { 54.5 })
    }

    fn time(&self) -> f64 {
        self.time.unwrap_or(if self.experiment == Experiment::Hits { 16.0 } else { 21.8 })
    }

    fn precision(&self) -> f64 {
        self.precision.unwrap_or(if self.quick { 1.3 } else { 1.05 })
    }
}

/// What both experiments have in common.
struct Setup {
    sizes: Sizes,
    tokens: f64,
    time: f64,
    /// In the processes' time.
    slo: Slo,
    /// Number of the next run.
    run: Cell<u64>,
}

impl Setup {
    fn new(args: &Args) -> Self {
        let (tokens, time) = (args.tokens(), args.time());
        let pace = Pace {
            weights_s: WEIGHTS_S,
            cache_s: CACHE_S,
            kv_tokens: hits::whole(2048.0 * TOKEN_STANDS_FOR / tokens),
            rows_balance: ROWS_BALANCE,
            prompt_scale: tokens / time,
            instances: 1.0,
            efficiency: 1.0,
        };
        let whole = Slo::default();
        Self {
            sizes: Sizes { pace, tokens, step_tokens: args.step_tokens, port: args.port, cache: None },
            tokens,
            time,
            slo: Slo { first_token_s: whole.first_token_s / time, ..whole },
            run: Cell::new(0),
        }
    }

    fn next_run(&self) -> u64 {
        self.run.set(self.run.get() + 1);
        self.run.get()
    }
}

/// A percentile by share; NaN without values.
fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place in the values")]
    let at = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
    values.get(at).copied().unwrap_or(f64::NAN)
}

/// The cumulative distribution of finite values over all.
fn share_points(mut values: Vec<f64>) -> Vec<(f64, f64)> {
    let all = values.len() as f64;
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    values.iter().enumerate().map(|(at, value)| (*value, (at + 1) as f64 / all)).collect()
}

/// At most two hundred of the points.
fn points(all: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let every = all.len().div_ceil(200).max(1);
    let last = all.last().copied();
    all.into_iter().step_by(every).chain(last).collect()
}

fn panel(title: &str, x_label: &str, y_label: &str, series: Vec<Series>) -> Panel {
    let (title, x_label, y_label) = (title.to_owned(), x_label.to_owned(), y_label.to_owned());
    Panel { title, x_label, y_label, log_x: false, log_y: false, series }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let _ = args.bench;
    ensure!(
        args.time() >= 1.0 && args.tokens() >= args.time(),
        "--tokens must be at least --time, and that at least 1"
    );
    let setup = Setup::new(&args);
    let lagoon = Lagoon::new("goodput")?;
    let profile = setup.sizes.pace.profile(&lagoon.model)?;
    let lagoon = lagoon.paced(&profile)?;
    let (mut result, panels) = match args.experiment {
        Experiment::E1 => e1::run(&lagoon, &setup, &args)?,
        Experiment::E2 => e2::run(&lagoon, &setup, &args)?,
        Experiment::Hits => (hits::run(&lagoon, &setup, &args)?, Vec::new()),
    };
    if let Some(path) = args.plot.as_ref().filter(|_| !panels.is_empty()) {
        let title = match args.experiment {
            Experiment::E1 => "Long-tail goodput: four instances, pooled and alone",
            Experiment::E2 | Experiment::Hits => "Drifting mix: a pool against static splits of four instances",
        };
        let columns = if args.experiment == Experiment::E1 { 3 } else { 2 };
        std::fs::write(path, lagoon_plot::figure(title, &panels, columns)?).context("write the plot")?;
    }
    if args.json {
        result["bench"] = "goodput".into();
        result["device"] = device().into();
        result["commit"] = commit().into();
        result["hardware_threads"] = hardware_threads().into();
        result["tokens"] = setup.tokens.into();
        result["time"] = setup.time.into();
        result["step_tokens"] = args.step_tokens.into();
        result["profile"] = serde_json::to_value(profile)?;
        println!("{result:#}");
    } else {
        match args.experiment {
            Experiment::E1 => e1::print(&result),
            Experiment::E2 => e2::print(&result),
            Experiment::Hits => hits::print(&result),
        }
    }
    Ok(())
}
