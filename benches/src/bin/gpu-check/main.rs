//! What a machine with an NVIDIA GPU is asked, in one run and one JSON report: whether the backend conforms, whether the
//! golden models come out right, how fast memory is mapped and kernels run against ceilings of the same run, and
//! whether the demo's pool answers.
//!
//! `cargo xtask gpu-check` packs this with what it needs; the machine needs no Rust. A part that fails is reported as
//! failed, and the others run on: each opens the device anew.

mod conformance;
mod goldens;
mod speed;
mod vmm;

use anyhow::{Context, bail};
use clap::Parser;
use lagoon_backend::Device;
use lagoon_cuda::{CudaDevice, CudaOptions, CudaProbe, kernels};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

/// Checks the CUDA backend on this machine and prints one JSON report.
#[derive(Debug, Parser)]
struct Args {
    /// The folder with the golden models (tests/goldens).
    #[arg(long)]
    goldens: PathBuf,
    /// The `lagoon` program, for the demo; without it there is none.
    #[arg(long)]
    lagoon: Option<PathBuf>,
    /// Tiny sizes: that the check itself runs, on a machine where numbers mean nothing.
    #[arg(long)]
    small: bool,
    /// Only these parts.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Where the report goes; standard output where nothing is said.
    #[arg(long)]
    out: Option<PathBuf>,
    /// What the report is of, such as a commit; copied into it.
    #[arg(long, default_value = "")]
    label: String,
}

/// The device, opened anew.
fn open() -> anyhow::Result<CudaDevice> {
    CudaDevice::open(kernels::FATBIN, CudaOptions::default()).context("open the CUDA device")
}

/// Runs a part of the check: what it found, or why it failed, and how long it took.
fn part(args: &Args, name: &str, run: impl FnOnce() -> anyhow::Result<Value>) -> Value {
    if !args.only.is_empty() && !args.only.iter().any(|only| only == name) {
        return json!({ "skipped": "not among --only" });
    }
    let started = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(run));
    let seconds = started.elapsed().as_secs_f64();
    match result {
        Ok(Ok(found)) => json!({ "ok": found["ok"].as_bool().unwrap_or(true), "seconds": seconds, "found": found }),
        Ok(Err(error)) => json!({ "ok": false, "seconds": seconds, "error": format!("{error:#}") }),
        Err(panic) => json!({ "ok": false, "seconds": seconds, "error": panic_text(panic.as_ref()) }),
    }
}

/// What a panic said.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_else(|| "it panicked".to_owned())
}

/// A pooled answer equal to a single instance's, by the product itself.
fn demo(lagoon: &Path) -> anyhow::Result<Value> {
    let output = Command::new(lagoon).args(["demo", "--backend", "cuda", "--json"]).output().context("run lagoon")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let report: Value = serde_json::from_str(text.trim())
        .with_context(|| format!("no JSON object: {text}; {}", String::from_utf8_lossy(&output.stderr)))?;
    if !output.status.success() {
        bail!("{}: {report}", output.status);
    }
    Ok(report)
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let mut report = json!({ "label": args.label, "kernels": kernels::FATBIN_SOURCE, "small": args.small });
    let probe = lagoon_cuda::probe();
    report["driver"] = json!(probe.to_string());
    if matches!(probe, CudaProbe::Present { .. }) {
        report["device"] = match open() {
            Ok(device) => {
                let info = device.info();
                json!({ "name": info.name, "free_bytes": info.memory_bytes, "linear_layers": device.linear_layers() })
            }
            Err(error) => json!({ "error": format!("{error:#}") }),
        };
        let small = args.small;
        report["parts"] = json!({
            "conformance": part(&args, "conformance", || Ok(conformance::run())),
            "goldens": part(&args, "goldens", || goldens::run(&args.goldens)),
            "vmm": part(&args, "vmm", || vmm::run(small)),
            "speed": part(&args, "speed", || speed::run(small)),
            "demo": part(&args, "demo", || match &args.lagoon {
                Some(lagoon) => demo(lagoon),
                None => Ok(json!({ "ok": true, "skipped": "no --lagoon" })),
            }),
        });
    }
    let parts = report["parts"].as_object();
    let ok = parts.is_some_and(|p| p.values().all(|v| v["ok"].as_bool() != Some(false)));
    report["ok"] = json!(ok);
    report["release_errors"] = json!(lagoon_cuda::driver::release_errors());
    let text = serde_json::to_string_pretty(&report)?;
    match &args.out {
        Some(path) => std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))?,
        None => print_report(&text),
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[allow(clippy::print_stdout, reason = "the report is the program's answer")]
fn print_report(text: &str) {
    println!("{text}");
}
