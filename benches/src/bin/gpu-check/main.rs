//! Checks a machine with an NVIDIA GPU and writes one JSON report: whether the backend conforms, whether the golden
//! models' logits are right, how fast memory is mapped and kernels run against ceilings of the same run, torch and
//! llama.cpp (if installed), and whether the demo's pool answers.
//!
//! `cargo xtask gpu-check` packs this with its inputs; the machine needs no Rust. The sections are data
//! ([`sections`]), each in processes of its own with a time limit ([`parent`]), which write their findings row by row
//! ([`child`]): a fault costs its row, and no other section's results. A run continues an earlier report (`--from`,
//! which may be absent) and skips what it has (unless `--fresh`). Where commands are limited, `--part N` runs one
//! command's share.

mod attention;
mod child;
mod conformance;
mod external;
mod goldens;
mod head;
mod inputs;
mod linear;
mod mixed;
mod packed;
mod parent;
mod sanitizer;
mod sections;
mod steps;
mod timing;
mod tune;
mod vmm;
mod warpgroups;
mod windows;

use anyhow::{Context, bail, ensure};
use child::Out;
use clap::Parser;
use lagoon_benches::gpu::targets;
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, kernels};
use sections::{AROUND_S, PARTS_S, RISKY, SECTIONS, Section};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Checks the CUDA backend on this machine and writes one JSON report.
#[derive(Clone, Debug, Parser)]
struct Args {
    /// The folder with the golden models (tests/goldens).
    #[arg(long)]
    goldens: PathBuf,
    /// The `lagoon` program, for the demos; without it there are none.
    #[arg(long)]
    lagoon: Option<PathBuf>,
    /// Tiny sizes: that the check itself runs, on a machine where numbers mean nothing.
    #[arg(long, visible_alias = "small")]
    smoke: bool,
    /// Only the sections of this part, and then what earlier parts did not come to, within the part's time; see --list.
    #[arg(long, conflicts_with_all = ["only", "limit_s"])]
    part: Option<u64>,
    /// Only these sections; see --list.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Not these sections.
    #[arg(long, value_delimiter = ',')]
    skip: Vec<String>,
    /// Of the conformance suite, only cases whose names contain one of these.
    #[arg(long, value_delimiter = ',')]
    case: Vec<String>,
    /// Print the sections, their parts and time limits.
    #[arg(long)]
    list: bool,
    /// Seconds for all sections; one that has not begun by then is left for the next run.
    #[arg(long, default_value_t = 560)]
    limit_s: u64,
    /// Let pip install torch into a temporary folder where python3 has none.
    #[arg(long)]
    pip: bool,
    /// Where the report goes.
    #[arg(long, default_value = "report.json")]
    out: PathBuf,
    /// The report to go on from; --out unless given. It may be absent.
    #[arg(long)]
    from: Option<PathBuf>,
    /// Measure the selected sections again, even if the earlier report has them.
    #[arg(long)]
    fresh: bool,
    /// Label of the report, such as a commit; copied into it and into each section.
    #[arg(long, default_value = "")]
    label: String,
    /// Run this section here and write what it finds to --out, with the report so far in --from: how the check runs each.
    #[arg(long, hide = true)]
    child: Option<String>,
}

/// The device, opened anew, in this precision and with no warpgroup products.
fn open(precision: Precision) -> anyhow::Result<CudaDevice> {
    let mut device = CudaDevice::open(kernels::FATBIN, CudaOptions::default()).context("open the CUDA device")?;
    device.set_tuning(Tuning { precision, wgmma: false, ..*device.tuning() });
    Ok(device)
}

/// Whether this is a smoke run.
static SMOKE: OnceLock<bool> = OnceLock::new();

fn is_smoke() -> bool {
    SMOKE.get().copied().unwrap_or(false)
}

/// A JSON file, if it exists and parses.
fn read_json(path: &Path) -> Option<Value> {
    std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok())
}

/// Writes a file atomically.
fn write_whole(path: &Path, value: &Value) -> anyhow::Result<()> {
    let draft = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&draft, serde_json::to_string_pretty(value)? + "\n")
        .and_then(|()| std::fs::rename(&draft, path))
        .with_context(|| format!("write {}", path.display()))
}

/// Sections that are asked for, in order, and the time for them.
fn wanted(args: &Args) -> anyhow::Result<(Vec<&'static Section>, Duration)> {
    for name in args.only.iter().chain(&args.skip) {
        if !SECTIONS.iter().any(|section| section.name == name) {
            bail!("no section {name}\nhint: --list shows them");
        }
    }
    let is = |list: &[String], section: &Section| list.iter().any(|name| name == section.name);
    let asked = |s: &&Section| if args.only.is_empty() { s.part > 0 } else { is(&args.only, s) };
    let mut all: Vec<&Section> = SECTIONS.iter().filter(asked).filter(|s| !is(&args.skip, s)).collect();
    let Some(part) = args.part else { return Ok((all, Duration::from_secs(args.limit_s))) };
    ensure!((1..=PARTS_S.len() as u64).contains(&part), "there are parts 1 to {}", PARTS_S.len());
    all.retain(|section| section.part <= part);
    // Stable: what earlier parts left comes behind this part's own, and what may leave the GPU in disorder comes last.
    all.sort_by_key(|section| (RISKY.contains(&section.name), section.part != part));
    Ok((all, parent::times(args, PARTS_S[usize::try_from(part)? - 1] - AROUND_S)))
}

/// Whether a section's entry of an earlier run is kept: failed ones are repeated, unless only those left are
/// selected.
fn is_there(entry: &Value, left_only: bool) -> bool {
    let states: &[&str] = if left_only { &["ok", "absent", "failed"] } else { &["ok", "absent"] };
    states.iter().any(|state| entry["state"] == json!(state))
}

/// Sums up the sections' states.
fn conclude(report: &mut Value) {
    let sections = report["sections"].as_object().cloned().unwrap_or_default();
    let bad = |entry: &Value| ["failed", "timed out"].iter().any(|state| entry["state"] == json!(state));
    let errors = |entry: &Value| entry["found"]["release_errors"].as_u64().unwrap_or(0);
    let present = report["driver"].as_str().is_some_and(|driver| driver.starts_with("CUDA"));
    report["ok"] = json!(present && !sections.is_empty() && !sections.values().any(bad));
    report["release_errors"] = json!(sections.values().map(errors).sum::<u64>());
    report["targets"] = json!(targets(report));
}

fn check(args: &Args) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let (sections, all) = wanted(args)?;
    let mut report = head::begin(args, &sections)?;
    let present = head::may_be_present(&report);
    conclude(&mut report);
    write_whole(&args.out, &report)?;
    let mut left = Vec::new();
    for (at, section) in sections.iter().enumerate().filter(|_| present) {
        let own = |section: &Section| args.part.is_none_or(|part| part == section.part);
        if is_there(&report["sections"][section.name], !own(section)) {
            continue;
        }
        // Sections left by an earlier part take no time from this part's own sections behind them.
        let own_s: u64 = sections[at + 1..].iter().filter(|s| !own(section) && own(s)).map(|s| s.limit_s).sum();
        let kept = parent::times(args, own_s);
        let (limit, rest) = (parent::times(args, section.limit_s), all.saturating_sub(began.elapsed() + kept));
        if rest < limit.min(all / 4) {
            left.push(section.name);
            continue;
        }
        report["not_run"] = json!(left);
        parent::run(args, section, rest.min(limit), &mut report)?;
    }
    report["not_run"] = json!(left);
    conclude(&mut report);
    write_whole(&args.out, &report)?;
    if !left.is_empty() {
        complain(&format!("time is up: {} were not run\nhint: run it again, the report goes on", left.join(", ")));
    }
    Ok(if report["ok"] == json!(true) && left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    if args.list {
        for (part, seconds) in (1..).zip(PARTS_S) {
            print_line(&format!("part {part}: {seconds} s"));
        }
        for s in SECTIONS {
            print_line(&format!("{} {:<16} {:>4} s  {}", s.part, s.name, s.limit_s, s.what));
        }
        return Ok(ExitCode::SUCCESS);
    }
    match &args.child {
        Some(name) => child::run(&args, name),
        None => check(&args),
    }
}

#[allow(clippy::print_stdout, reason = "the list is the program's answer")]
fn print_line(text: &str) {
    println!("{text}");
}

#[allow(clippy::print_stderr, reason = "for who runs it")]
fn complain(text: &str) {
    eprintln!("{text}");
}
