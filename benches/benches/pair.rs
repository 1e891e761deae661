//! Throughput of a debtor and a creditor over the rBlocks that a long request has at the creditor: measured, beside
//! the prediction of the planner's model from the instances' own calibration (Infinite-LLM v2, Figure 7).
//!
//! Two real processes with the bundled model, real arithmetic and real QUIC. Each device is *paced*
//! (`lagoon_pace::Paced`): weights are read in 10 ms a step and a full KV cache in 30 ms, the proportions of
//! LLaMA2-7B on an A100. The creditor runs short requests. The debtor has one long request and as many short ones as
//! fit beside it; rBlocks of the long one at the creditor make room for more short ones at the debtor, and take room
//! at the creditor. The benchmark computes how many fit, and measures their rate of tokens over some seconds. (The
//! instances get twice that memory, so that growing sequences neither wait nor move.)
//!
//! `cargo build --release -p lagoon -p lagoon-paced && cargo bench -p lagoon-benches --bench pair -- [--json] [--plot FILE.svg]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a benchmark's numbers are small"
)]

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use lagoon_benches::cluster::{Lagoon, Process, TIMEOUT, Times, late_share, listen, number, status, wait_for_others};
use lagoon_benches::measure::median;
use lagoon_cluster::perf::{LinkView, ModelConfig, ModelShape};
use lagoon_pace::PaceProfile;
use lagoon_plot::{Panel, Series};
use lagoon_protocol::{BatchPoint, Calibration};
use lagoon_sim::paper::model::{CurvePoint, PairSpec, curve};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Tokens that an instance is taken to have room for.
    #[arg(long, default_value_t = 10_240)]
    capacity: u32,
    /// Tokens of the long request.
    #[arg(long, default_value_t = 6_400)]
    long: u32,
    /// Mean tokens of a short request while it is measured.
    #[arg(long, default_value_t = 160)]
    short: u32,
    /// Short requests of the creditor when nothing has moved.
    #[arg(long, default_value_t = 40)]
    creditor_batch: u32,
    /// Tokens moved, in steps of so many.
    #[arg(long, default_value_t = 960)]
    step: u32,
    /// Seconds that are measured.
    #[arg(long, default_value_t = 2.5)]
    seconds: f64,
    /// Runs of each; medians are printed.
    #[arg(long, default_value_t = 3)]
    repeats: u32,
    /// Draws both curves into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One run; rates in tokens per second.
#[derive(Clone, Debug, Serialize)]
struct Run {
    blocks: u32,
    debtor_batch: u32,
    creditor_batch: u32,
    debtor: f64,
    creditor: f64,
    /// Mean tokens of a short request in the middle of the measurement.
    short_tokens: f64,
    late_share: f64,
}

const BLOCK_TOKENS: u32 = 16;
const WEIGHTS_S: f64 = 10e-3;
const CACHE_S: f64 = 30e-3;
/// The bundled model: 4 layers, 4 heads and 2 KV heads of 64, K and V, f16.
const LAYERS: u32 = 4;
const TOKEN_BYTES: u64 = 4 * 2 * 2 * 64 * 2;
/// Queries and outputs in f32, log-sum-exps and counts of four heads.
const ROW_BYTES: u64 = 4 * (64 * 4 * 2 + 8);
/// A short request generates until the benchmark ends.
const OUTPUT: u32 = 1_500;

fn profile(model: &Path, capacity: u32) -> Result<PaceProfile> {
    let bytes = std::fs::metadata(model.join("model.safetensors"))?.len() as f64;
    let weight_scale = WEIGHTS_S * 1e12 / bytes;
    Ok(PaceProfile {
        bytes_per_s: 1e12,
        // Products of 150 rows take as long as reading the weights.
        flops: 150.0 * bytes * weight_scale / WEIGHTS_S,
        copy_bytes_per_s: 1e11,
        launch_us: 3.0,
        weight_scale,
        kv_scale: CACHE_S * 1e12 / (TOKEN_BYTES as f64 * f64::from(capacity)),
        prompt_scale: 1.0,
        prompt_row_us: 0.0,
    })
}

fn instance(lagoon: &Lagoon, name: &str, gmanager: &str, args: &Args) -> Result<Process> {
    let own = [
        "serve".to_owned(),
        lagoon.model.display().to_string(),
        format!("--gmanager={gmanager}"),
        format!("--name={name}"),
        format!("--kv-tokens={}", 2 * args.capacity),
        format!("--block-tokens={BLOCK_TOKENS}"),
        "--http=127.0.0.1:0".to_owned(),
        "--backend=cpu".to_owned(),
        "--threads=1".to_owned(),
        "--kv-dtype=f16".to_owned(),
        "--remote-attention=ship".to_owned(),
        "--max-running=256".to_owned(),
    ];
    lagoon.start(name, &own)
}

/// An instance's calibration, measured at its start.
fn calibration(status: &Value) -> Result<Calibration> {
    let own = &status["calibration"];
    let field = |name: &str| own[name].as_f64().with_context(|| format!("{name} is missing in {own}"));
    let steps = own["step_us"].as_object().context("no calibration")?;
    let mut batches = steps
        .iter()
        .map(|(batch, us)| Ok(BatchPoint { batch: batch.parse()?, step_us: us.as_f64().context("not a number")? }))
        .collect::<Result<Vec<_>>>()?;
    batches.sort_by_key(|b| b.batch);
    Ok(Calibration {
        batches,
        attention_us_per_ktoken: field("attention_us_per_ktoken")?,
        prefill_us_per_token: field("prefill_us_per_token")?,
        copy_bytes_per_s: field("copy_bytes_per_s")?,
        prompt_attention_us_per_ktoken: 0.0,
    })
}

fn predicted(calibration: &Calibration, args: &Args) -> Result<Vec<CurvePoint>> {
    let spec = PairSpec {
        calibration: calibration.clone(),
        shape: ModelShape {
            layers: LAYERS,
            block_tokens: BLOCK_TOKENS,
            token_bytes: TOKEN_BYTES,
            row_bytes: ROW_BYTES,
        },
        link: LinkView { rtt_us: 200.0, bytes_per_s: 1e9 },
        capacity_tokens: args.capacity.into(),
        long_tokens: args.long.into(),
        short_tokens: args.short.into(),
        creditor_batch: args.creditor_batch,
        // The instances merge both micro-batches where that is faster (docs/adr/0009).
        config: ModelConfig::paper(),
    };
    curve(&spec, args.step / BLOCK_TOKENS).context("the calibration cannot be")
}

fn received(times: &Times) -> Result<usize> {
    let recorded = times.lock().expect("nobody panics with it");
    if let Some(error) = &recorded.1 {
        bail!("a stream failed: {error}");
    }
    Ok(recorded.0.len())
}

fn wait_until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let since = Instant::now();
    while !done()? {
        ensure!(since.elapsed() < TIMEOUT, "not {what} after {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Two connected instances with their gManager.
struct Cluster {
    _gmanager: Process,
    quic: String,
    debtor: Process,
    creditor: Process,
}

impl Cluster {
    fn start(lagoon: &Lagoon, args: &Args) -> Result<Self> {
        let gmanager = lagoon.start("gm", &["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned()])?;
        let quic = gmanager.announced("quic")?.to_owned();
        let debtor = instance(lagoon, "debtor", &quic, args)?;
        let creditor = instance(lagoon, "creditor", &quic, args)?;
        let this = Self { _gmanager: gmanager, quic, debtor, creditor };
        let http = this.debtor.announced("http")?;
        wait_for_others(http)?;
        Ok(this)
    }

    /// Moves `blocks` of the only request to the creditor.
    fn lend(&self, lagoon: &Lagoon, blocks: u32) -> Result<()> {
        let http = self.debtor.announced("http")?;
        let there = || number(&status(http)?, "/moves/blocks_out");
        let wanted = there()? + u64::from(blocks);
        let mut refused = None;
        let done = wait_until("moved", || {
            let status = status(http)?;
            let moved = number(&status, "/moves/blocks_out")?;
            if moved >= wanted {
                return Ok(true);
            }
            if number(&status, "/moves/in_progress")? == 0 {
                let request = format!("{}/{}", number(&status, "/instance")?, number(&status, "/sequences/0/seq")?);
                let blocks = format!("--blocks={}", wanted - moved);
                let order = ["kv", "move", &request, &blocks, "--from=debtor", "--to=creditor"];
                // Retried: the gManager learns the request's rBlocks from heartbeats.
                refused = lagoon.operate(&order, &self.quic).err();
            }
            Ok(false)
        });
        done.with_context(|| refused.map_or_else(String::new, |error| format!("last order: {error:#}")))
    }
}

fn measure(lagoon: &Lagoon, args: &Args, point: &CurvePoint) -> Result<Run> {
    let cluster = Cluster::start(lagoon, args)?;
    let [debtor, creditor] = [&cluster.debtor, &cluster.creditor].map(|p| p.announced("http"));
    let (debtor, creditor) = (debtor?, creditor?);
    let long = listen(debtor, args.long, OUTPUT)?;
    wait_until("decoding", || Ok(received(&long)? > 2))?;
    if point.blocks > 0 {
        cluster.lend(lagoon, point.blocks)?;
    }
    // A short request's growth counts half: the mean over the measurement.
    let steps = args.seconds / (WEIGHTS_S + CACHE_S);
    let prompt = args.short.saturating_sub((steps / 2.0) as u32).max(16);
    let shorts = |http: &str, n: u32| (0..n).map(|_| listen(http, prompt, OUTPUT)).collect::<Result<Vec<_>>>();
    let mut debtors = shorts(debtor, point.debtor_batch.saturating_sub(1))?;
    let creditors = shorts(creditor, point.creditor_batch)?;
    let begun = |all: &[Times]| all.iter().try_fold(true, |all, t| Ok::<_, anyhow::Error>(all && received(t)? > 2));
    wait_until("all decoding", || Ok(begun(&debtors)? && begun(&creditors)?))?;
    debtors.push(long);
    let count = |all: &[Times]| all.iter().map(received).sum::<Result<usize>>();
    let (since, first) = (Instant::now(), (count(&debtors)?, count(&creditors)?));
    std::thread::sleep(Duration::from_secs_f64(args.seconds));
    let (seconds, last) = (since.elapsed().as_secs_f64(), (count(&debtors)?, count(&creditors)?));
    let shorts: Vec<_> = debtors.iter().rev().skip(1).rev().chain(&creditors).map(received).collect::<Result<_>>()?;
    let grown = shorts.iter().sum::<usize>() as f64 / shorts.len().max(1) as f64;
    Ok(Run {
        blocks: point.blocks,
        debtor_batch: point.debtor_batch,
        creditor_batch: point.creditor_batch,
        debtor: (last.0 - first.0) as f64 / seconds,
        creditor: (last.1 - first.1) as f64 / seconds,
        short_tokens: f64::from(prompt) + grown - args.seconds / (WEIGHTS_S + CACHE_S) / 2.0,
        late_share: late_share(debtor)?.max(late_share(creditor)?),
    })
}

fn panels(rows: &[(CurvePoint, Run)]) -> Vec<Panel> {
    let panel = |title: &str, predicted: fn(&CurvePoint) -> f64, measured: fn(&Run) -> f64| {
        let line = |name: &str, of: &dyn Fn(&(CurvePoint, Run)) -> f64| Series {
            name: name.to_owned(),
            points: rows.iter().map(|row| (f64::from(row.0.blocks), of(row))).collect(),
        };
        Panel {
            title: title.to_owned(),
            x_label: format!("rBlocks of {BLOCK_TOKENS} tokens moved"),
            y_label: "tokens/s".to_owned(),
            log_x: false,
            log_y: false,
            series: vec![line("predicted", &|r| predicted(&r.0)), line("measured", &|r| measured(&r.1))],
        }
    };
    vec![
        panel("both", CurvePoint::total, |r| r.debtor + r.creditor),
        panel("debtor", |p| p.debtor, |r| r.debtor),
        panel("creditor", |p| p.creditor, |r| r.creditor),
    ]
}

/// Medians of the runs with `point`'s number of rBlocks.
fn middle(point: &CurvePoint, runs: &[Run]) -> Run {
    let of = |f: fn(&Run) -> f64| median(runs.iter().filter(|r| r.blocks == point.blocks).map(f).collect());
    Run {
        blocks: point.blocks,
        debtor_batch: point.debtor_batch,
        creditor_batch: point.creditor_batch,
        debtor: of(|r| r.debtor),
        creditor: of(|r| r.creditor),
        short_tokens: of(|r| r.short_tokens),
        late_share: of(|r| r.late_share),
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let _ = args.bench;
    let lagoon = Lagoon::new("pair")?;
    let profile = profile(&lagoon.model, args.capacity)?;
    let lagoon = lagoon.paced(&profile)?;
    let calibration = calibration(&status(Cluster::start(&lagoon, &args)?.debtor.announced("http")?)?)?;
    let points = predicted(&calibration, &args)?;
    let mut runs = Vec::new();
    for _ in 0..args.repeats {
        for point in &points {
            let what = || format!("{} rBlocks moved", point.blocks);
            runs.push(measure(&lagoon, &args, point).with_context(what)?);
        }
    }
    let rows: Vec<(CurvePoint, Run)> = points.iter().map(|p| (*p, middle(p, &runs))).collect();
    if let Some(path) = &args.plot {
        let title = "Throughput against rBlocks moved: predicted and measured (v2 Figure 7)";
        std::fs::write(path, lagoon_plot::figure(title, &panels(&rows), 3)?).context("write the plot")?;
    }
    if args.json {
        let points = rows.iter().map(|(p, r)| {
            let total = r.debtor + r.creditor;
            json!({ "blocks": p.blocks, "debtor_batch": p.debtor_batch, "creditor_batch": p.creditor_batch,
                "predicted": { "debtor": p.debtor, "creditor": p.creditor, "total": p.total() },
                "measured": { "debtor": r.debtor, "creditor": r.creditor, "total": total },
                "measured_over_predicted": total / p.total(), "short_tokens": r.short_tokens, "late_share": r.late_share })
        });
        let batches: Vec<_> = calibration.batches.iter().map(|b| (b.batch, b.step_us)).collect();
        let result = json!({
            "capacity": args.capacity, "long": args.long, "short": args.short, "profile": profile,
            "calibration": { "step_us": batches, "attention_us_per_ktoken": calibration.attention_us_per_ktoken },
            "points": points.collect::<Vec<_>>(), "runs": runs,
        });
        println!("{}", serde_json::to_string_pretty(&result)?);
        return Ok(());
    }
    let columns = ["rBlocks", "batches", "predicted", "measured", "ratio", "debtor", "creditor", "short", "late"];
    println!("{}", columns.map(|c| format!("{c:>11}")).concat());
    for (p, r) in &rows {
        let (batches, total) = (format!("{}+{}", p.debtor_batch, p.creditor_batch), r.debtor + r.creditor);
        println!(
            "{:>11}{batches:>11}{:>11.1}{total:>11.1}{:>11.3}{:>11.1}{:>11.1}{:>11.1}{:>11.3}",
            p.blocks,
            p.total(),
            total / p.total(),
            r.debtor,
            r.creditor,
            r.short_tokens,
            r.late_share
        );
    }
    Ok(())
}
