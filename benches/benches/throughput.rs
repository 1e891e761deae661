//! Throughput of a cluster of instances on this machine with pooling on and off, on one mixed trace in one run.
//!
//! The instances are real processes with the bundled model, real arithmetic and real QUIC; each device is *paced*
//! (`lagoon_backend::Paced`): a step takes as long as a roofline model says, so that instances that share this machine's
//! cores do not slow each other down. The modelled device reads its weights in 10 ms a step and a full KV cache in
//! 30 ms, the proportions of LLaMA2-7B on an A100; one token of the trace stands for many of that model's.
//!
//! `off` is the same cluster with nothing lent (what the papers call vLLM-multi): same instances, same dispatch. The
//! trace is Poisson with short requests and some that take most of an instance, all small enough for one instance.
//! The devices' lateness is printed: a run whose devices were late for more than a few per cent measured this machine.
//!
//! `cargo build --release -p lagoon && cargo bench -p lagoon-benches --bench throughput -- [--json]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "lengths of a trace are small positive numbers"
)]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use lagoon_backend::PaceProfile;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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

/// Time of a step's weights, of a full cache's attention, and rows at which products stop being bound by bytes.
const WEIGHTS_S: f64 = 10e-3;
const CACHE_S: f64 = 30e-3;
const ROWS_BALANCE: f64 = 150.0;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package is in the workspace").to_owned()
}

/// The bundled model: 2.6M parameters, 4 layers, 2 KV heads of 64, f16.
fn profile(kv_tokens: u32) -> Result<PaceProfile> {
    let bytes = std::fs::metadata(root().join("models/passkey/model.safetensors"))?.len();
    let elements = bytes as f64 / 2.0;
    let token_bytes = f64::from(4 * 2 * 2 * 64 * 2);
    Ok(PaceProfile {
        bytes_per_s: 1e12,
        // Balanced at so many rows: 2 * rows * elements operations take as long as the bytes.
        flops: 2.0 * ROWS_BALANCE * elements * (WEIGHTS_S * 1e12 / bytes as f64) / WEIGHTS_S,
        copy_bytes_per_s: 1e11,
        launch_us: 3.0,
        weight_scale: WEIGHTS_S * 1e12 / bytes as f64,
        kv_scale: CACHE_S * 1e12 / (token_bytes * f64::from(kv_tokens)),
    })
}

fn trace(args: &Args) -> String {
    let mut random = ChaCha8Rng::seed_from_u64(args.seed);
    let mut text = "arrival_s,prompt_tokens,output_tokens\n".to_owned();
    let mut at = 0.0;
    for _ in 0..args.requests {
        let long = random.random_range(0..100) < args.long_percent;
        let share = if long { random.random_range(0.55..0.85) } else { random.random_range(0.01..0.08) };
        let prompt = (f64::from(args.kv_tokens) * share) as u32 + 1;
        let output = if long { random.random_range(96..192) } else { random.random_range(24..128) };
        let _ = writeln!(text, "{at:.4},{prompt},{output}");
        at += -(1.0 - random.random::<f64>()).ln() / args.rate;
    }
    text
}

/// Starts a cluster, replays the trace, stops it; the load generator's report with the devices' lateness.
fn run(args: &Args, dir: &Path, lagoon: &Path, on: bool) -> Result<Value> {
    let log = dir.join(if on { "on.log" } else { "off.log" });
    let mut up = Command::new(lagoon);
    up.args(["up", "--json", "--exit-with-stdin", "--backend=cpu", "--threads=1", "--kv-dtype=f16"])
        .arg(root().join("models/passkey"))
        .args([format!("--instances={}", args.instances), format!("--kv-tokens={}", args.kv_tokens)])
        .args([format!("--port={}", args.port), format!("--lend-percent={}", if on { 100 } else { 0 })])
        .arg(format!("--pace={}", dir.join("pace.json").display()))
        .args(["--step-tokens=128", "--max-running=64", "--max-queue=4096", "--block-tokens=16"])
        .args(if on { &args.flag[..] } else { &[] })
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log)?);
    let mut up = up.spawn().context("start lagoon up")?;
    let mut line = String::new();
    BufReader::new(up.stdout.take().context("no stdout")?).read_line(&mut line)?;
    ensure!(!line.is_empty(), "the cluster did not start: see {}", log.display());
    let bench = Command::new(lagoon)
        .args(["bench", "--json", &format!("--url=http://127.0.0.1:{}", args.port)])
        .arg(format!("--trace={}", dir.join("trace.csv").display()))
        .stderr(Stdio::inherit())
        .output()?;
    let (late_us, modelled_us) = counters(&format!("127.0.0.1:{}", args.port))?;
    drop(up.stdin.take());
    up.wait()?;
    let mut report: Value = serde_json::from_slice(&bench.stdout)
        .with_context(|| format!("lagoon bench said {:?}", String::from_utf8_lossy(&bench.stdout)))?;
    report["devices_late_share"] = json!(late_us / f64::max(modelled_us, 1.0));
    report["devices_modelled_s"] = json!(modelled_us * 1e-6);
    Ok(report)
}

/// What a server on this machine answers.
fn get(host: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(host)?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: lagoon\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// Sums late and modelled microseconds of the instances' devices.
fn counters(gateway: &str) -> Result<(f64, f64)> {
    let status = get(gateway, "/lagoon/status")?;
    let status: Value = serde_json::from_str(
        &status[status.find('{').context("no status")?..status.rfind('}').context("no status")? + 1],
    )?;
    let mut sums = (0.0, 0.0);
    for instance in status["instances"].as_array().context("no instances")? {
        let text = get(instance["http_addr"].as_str().context("an instance without http")?, "/metrics")?;
        let number = |name: &str| -> f64 {
            let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default();
            line.trim().parse().unwrap_or(0.0)
        };
        sums.0 += number("lagoon_paced_late_us_total ");
        sums.1 += number("lagoon_paced_modelled_us_total ");
    }
    Ok(sums)
}

fn median(reports: &[Value], path: &str) -> f64 {
    let mut values: Vec<f64> = reports.iter().filter_map(|r| r.pointer(path)?.as_f64()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let _ = args.bench;
    let exe = std::env::current_exe()?;
    let lagoon = exe.parent().and_then(Path::parent).context("no build folder")?.join("lagoon");
    ensure!(lagoon.exists(), "{} is missing: cargo build --release -p lagoon", lagoon.display());
    let dir = std::env::temp_dir().join(format!("lagoon-throughput-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let profile = profile(args.kv_tokens)?;
    std::fs::write(dir.join("pace.json"), serde_json::to_vec(&profile)?)?;
    std::fs::write(dir.join("trace.csv"), trace(&args))?;
    let (mut off, mut on) = (Vec::new(), Vec::new());
    for _ in 0..args.repeats {
        off.push(run(&args, &dir, &lagoon, false)?);
        on.push(run(&args, &dir, &lagoon, true)?);
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
    let ratio = median(&on, "/output_tokens_per_s") / median(&off, "/output_tokens_per_s");
    if args.json {
        let result = json!({
            "instances": args.instances, "kv_tokens": args.kv_tokens, "requests": args.requests, "rate": args.rate,
            "long_percent": args.long_percent, "seed": args.seed, "profile": profile,
            "throughput_on_over_off": ratio, "off": off, "on": on,
        });
        println!("{}", serde_json::to_string_pretty(&result)?);
    } else {
        println!("{:<22}{:>12}{:>12}", "", "off", "on");
        for (name, path) in paths {
            println!("{name:<22}{:>12.3}{:>12.3}", median(&off, path), median(&on, path));
        }
        println!("throughput on / off    {ratio:.3}");
    }
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
