//! Latency under rising load of pools that divide prefill and decode between instances (disaggregation), in three
//! parts:
//!
//! * `roles`: one prefill and one decode worker beside two instances that do both (KVDirect §5.2.1, Figure 13);
//! * `modes`: KV pulled after a prompt's prefill beside KV pushed during it (Figure 16);
//! * `grid`: one to three prefill by one to three decode workers at one load (Figure 12).
//!
//! The instances are real processes with the bundled model, real arithmetic and real QUIC or shared memory. Each
//! device is *paced* (`lagoon_pace::Paced`): it reads its weights in 10 ms a step and a full KV cache in 30 ms,
//! and 150 rows take as long as the weights. Traces are arXiv-like (long prompts, short answers) and ShareGPT-like
//! (conversations), drawn from a seed, scaled to the model (`lagoon_benches::traces`). The load is that of the whole
//! pool. `late` is the share of the devices' time by which the real arithmetic fell behind: with much of it, this
//! machine is too small for the run.
//!
//! A first token is sent before its KV has moved. With pull, waiting for a decode worker's memory shows in the time
//! between tokens; with push, in the time to first token: compare totals, and the stages (Figure 14).
//!
//! `cargo build --release --workspace --bin lagoon --bin lagoon-paced`, then
//! `cargo bench --workspace --bench disagg -- --part modes [--json]`: at the default sizes a part takes two to four minutes a
//! trace (`--traces arxiv`).
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use anyhow::{Context, Result};
use clap::Parser;
use lagoon_benches::cluster::Lagoon;
use lagoon_benches::measure::{commit, device, hardware_threads};
use lagoon_benches::traces::{Kind, Spec, csv, draw};
use lagoon_pace::PaceProfile;
use serde_json::{Value, json};
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Roles,
    Modes,
    Grid,
}

/// The instances of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pool {
    Both(u32),
    Divided { prefill: u32, decode: u32, push: bool },
}

impl Pool {
    fn name(self) -> String {
        match self {
            Self::Both(instances) => format!("{instances} both"),
            Self::Divided { prefill, decode, push } => {
                format!("{prefill}P{decode}D {}", if push { "push" } else { "pull" })
            }
        }
    }

    fn flags(self) -> Vec<String> {
        match self {
            Self::Both(instances) => vec![format!("--instances={instances}")],
            Self::Divided { prefill, decode, push } => {
                let mode = if push { "push" } else { "pull" };
                let (prefill, decode) = (format!("--prefill={prefill}"), format!("--decode={decode}"));
                vec![prefill, decode, format!("--kv-transfer={mode}")]
            }
        }
    }

    /// The pools of a part; the others are compared with the first.
    fn of(part: Part) -> Vec<Self> {
        let divided = |prefill, decode, push| Self::Divided { prefill, decode, push };
        match part {
            Part::Roles => vec![divided(1, 1, false), Self::Both(2)],
            Part::Modes => vec![divided(1, 1, false), divided(1, 1, true)],
            Part::Grid => (1..=3).flat_map(|p| (1..=3).map(move |d| divided(p, d, false))).collect(),
        }
    }
}

#[derive(Parser)]
struct Args {
    #[arg(long, value_enum, default_value = "modes")]
    part: Part,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// KV capacity of an instance, in tokens.
    #[arg(long, default_value_t = 8192)]
    kv_tokens: u32,
    /// Requests per second of the pool [default: 1, 2 and 4; of the grid 4].
    #[arg(long, value_delimiter = ',')]
    rates: Vec<f64>,
    #[arg(long, value_delimiter = ',', default_values = ["arxiv", "sharegpt"])]
    traces: Vec<Kind>,
    /// Time in which the requests of a run arrive.
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Lengths of the paper's data sets are multiplied by this.
    #[arg(long, default_value_t = 0.05)]
    scale: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// More flags for `lagoon up`.
    #[arg(long, allow_hyphen_values = true)]
    flag: Vec<String>,
    #[arg(long, default_value_t = 18_300)]
    port: u16,
    /// One load for a few seconds: whether it works.
    #[arg(long)]
    quick: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

const WEIGHTS_S: f64 = 10e-3;
const CACHE_S: f64 = 30e-3;
const ROWS_BALANCE: f64 = 150.0;
/// A token of KV of the bundled model: 4 layers, 2 KV heads of 64, K and V, f16.
const TOKEN_BYTES: f64 = 4.0 * 2.0 * 2.0 * 64.0 * 2.0;
/// Requests of a run at least.
const REQUESTS_MIN: usize = 12;

fn profile(model: &Path, kv_tokens: u32) -> Result<PaceProfile> {
    let bytes = std::fs::metadata(model.join("model.safetensors"))?.len() as f64;
    let weight_scale = WEIGHTS_S * 1e12 / bytes;
    Ok(PaceProfile {
        bytes_per_s: 1e12,
        flops: ROWS_BALANCE * bytes * weight_scale / WEIGHTS_S,
        copy_bytes_per_s: 25e9,
        launch_us: 3.0,
        weight_scale,
        kv_scale: CACHE_S * 1e12 / (TOKEN_BYTES * f64::from(kv_tokens)),
        prompt_scale: 1.0,
        prompt_row_us: 0.0,
    })
}

fn run(args: &Args, lagoon: &Lagoon, kind: Kind, rate: f64, pool: Pool) -> Result<Value> {
    let (tokens_max, scale, seed) = (args.kv_tokens / 2, args.scale, args.seed);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
    let requests = ((rate * args.seconds).ceil() as usize).max(REQUESTS_MIN);
    let spec = Spec { kind, requests, rate, scale, tokens_max, think_s: 10.0, seed };
    let trace = lagoon.dir.join("trace.csv");
    std::fs::write(&trace, csv(&draw(&spec)))?;
    let own = [format!("--kv-tokens={}", args.kv_tokens)];
    let sizes = ["--step-tokens=256", "--max-running=64", "--max-queue=4096", "--block-tokens=16"].map(str::to_owned);
    let report =
        lagoon.replay(&[&pool.flags()[..], &own[..], &sizes[..], &args.flag[..]].concat(), args.port, &trace)?;
    Ok(json!({ "trace": format!("{kind:?}"), "rate": rate, "pool": pool.name(), "report": report }))
}

/// Latencies whose ratios are reported.
const TIMES: [(&str, &str); 6] = [
    ("ttft_p50", "/ttft_ms/p50"),
    ("ttft_p90", "/ttft_ms/p90"),
    ("tbt_p50", "/tbt_ms/p50"),
    ("tbt_p90", "/tbt_ms/p90"),
    ("total_p50", "/e2e_ms/p50"),
    ("total_p90", "/e2e_ms/p90"),
];

fn number(run: &Value, path: &str) -> f64 {
    run["report"].pointer(path).and_then(Value::as_f64).unwrap_or(f64::NAN)
}

/// Every run's latencies over those of the first pool on the same trace at the same load.
fn ratios(runs: &[Value]) -> Vec<Value> {
    let mut found = Vec::new();
    let same = |a: &Value, b: &Value| a["trace"] == b["trace"] && a["rate"] == b["rate"];
    for run in runs {
        let Some(base) = runs.iter().find(|base| same(base, run)).filter(|base| base["pool"] != run["pool"]) else {
            continue;
        };
        let mut ratio =
            json!({ "trace": run["trace"], "rate": run["rate"], "pool": run["pool"], "over": base["pool"] });
        for (name, path) in TIMES {
            ratio[name] = json!(number(run, path) / number(base, path));
        }
        found.push(ratio);
    }
    found
}

fn print(runs: &[Value], ratios: &[Value]) {
    let columns = ["trace", "rate", "pool", "ok", "TTFT p50", "p90", "TBT p50", "p90", "total p50", "p90", "late"];
    println!("{}  queue, prefill, memory, transfer", columns.map(|c| format!("{c:>11}")).concat());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    for run in runs {
        let times = TIMES.map(|(_, path)| format!("{:>11.1}", number(run, path))).concat();
        let stages = ["queue_ms", "prefill_ms", "decode_queue_ms", "transfer_ms"];
        let stages = stages.map(|s| format!("{:.0}", number(run, &format!("/stages/{s}")))).join(", ");
        let (trace, pool, rate) = (text(&run["trace"]), text(&run["pool"]), run["rate"].as_f64().unwrap_or(f64::NAN));
        let (ok, late) = (number(run, "/ok"), number(run, "/devices_late_share"));
        println!("{trace:>11}{rate:>11.2}{pool:>11}{ok:>11.0}{times}{late:>11.3}  {stages}");
    }
    for ratio in ratios {
        let (trace, pool, over) = (text(&ratio["trace"]), text(&ratio["pool"]), text(&ratio["over"]));
        let times = TIMES.map(|(name, _)| format!("{name} {:.2}", ratio[name].as_f64().unwrap_or(f64::NAN)));
        println!("{trace} at {}: {pool} over {over}: {}", ratio["rate"], times.join(", "));
    }
}

fn main() -> Result<()> {
    let mut args = Args::parse();
    let _ = args.bench;
    if args.rates.is_empty() {
        args.rates = if args.part == Part::Grid { vec![4.0] } else { vec![1.0, 2.0, 4.0] };
    }
    if args.quick {
        (args.rates, args.seconds) = (vec![2.0], 6.0);
    }
    let lagoon = Lagoon::new("disagg")?;
    let profile = profile(&lagoon.model, args.kv_tokens)?;
    let lagoon = lagoon.paced(&profile)?;
    let mut runs = Vec::new();
    for kind in &args.traces {
        for rate in &args.rates {
            for pool in Pool::of(args.part) {
                let what = || format!("{}, {kind:?} at {rate} requests a second", pool.name());
                runs.push(run(&args, &lagoon, *kind, *rate, pool).with_context(what)?);
            }
        }
    }
    let ratios = ratios(&runs);
    if args.json {
        let object = json!({ "bench": "disagg", "part": format!("{:?}", args.part), "device": device(), "commit": commit(),
            "hardware_threads": hardware_threads(), "kv_tokens": args.kv_tokens, "seconds": args.seconds,
            "scale": args.scale, "seed": args.seed, "flags": args.flag, "profile": profile, "runs": runs,
            "ratios": ratios });
        println!("{object:#}");
    } else {
        print(&runs, &ratios);
    }
    Ok(())
}
