//! What a machine with an NVIDIA GPU is asked, in one JSON report: whether the backend conforms, whether the golden models come
//! out right, how fast memory is mapped and kernels run against ceilings of the same run and against torch and llama.cpp where
//! these are there, and whether the demo's pool answers.
//!
//! `cargo xtask gpu-check` packs this with what it needs; the machine needs no Rust. Each section runs in a process of its own
//! with a time limit, writes what it finds as it goes, and costs no other its results. The report is written after each; a
//! run that is cut short is continued by the next, which leaves out what is there (`--fresh` does not).

mod conformance;
mod external;
mod goldens;
mod mixed;
mod sections;
mod speed;
mod steps;
mod vmm;
mod windows;

use anyhow::{Context, bail};
use clap::Parser;
use lagoon_backend::Device;
use lagoon_benches::gpu::targets;
use lagoon_cuda::{CudaDevice, CudaOptions, CudaProbe, kernels};
use sections::{SECTIONS, Section};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
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
    /// Only these sections; see --list.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Not these sections.
    #[arg(long, value_delimiter = ',')]
    skip: Vec<String>,
    /// Print the sections and their time limits.
    #[arg(long)]
    list: bool,
    /// Seconds for all sections; one that has not begun by then is left for the next run.
    #[arg(long, default_value_t = 560)]
    limit_s: u64,
    /// Let pip install torch into a temporary folder where python3 has none.
    #[arg(long)]
    pip: bool,
    /// Where the report goes, and where an unfinished one is; standard output where nothing is said.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Forget what the report at --out has.
    #[arg(long)]
    fresh: bool,
    /// What the report is of, such as a commit; copied into it.
    #[arg(long, default_value = "")]
    label: String,
    /// Run this section here and write what it finds to --out: how the check runs each.
    #[arg(long, hide = true)]
    child: Option<String>,
}

/// The device, opened anew.
fn open() -> anyhow::Result<CudaDevice> {
    CudaDevice::open(kernels::FATBIN, CudaOptions::default()).context("open the CUDA device")
}

/// Whether this process only shows that the check runs.
static SMOKE: OnceLock<bool> = OnceLock::new();

fn is_smoke() -> bool {
    SMOKE.get().copied().unwrap_or(false)
}

/// What a panic said.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_else(|| "it panicked".to_owned())
}

/// What a section has found so far, on disk after every change.
#[derive(Debug)]
struct Out {
    path: PathBuf,
    found: Value,
}

impl Out {
    /// Sets a finding.
    fn set(&mut self, key: &str, value: impl Into<Value>) -> anyhow::Result<()> {
        self.found[key] = value.into();
        self.write()
    }

    /// Adds a finding to a list.
    fn push(&mut self, key: &str, value: Value) -> anyhow::Result<()> {
        match &mut self.found[key] {
            Value::Array(list) => list.push(value),
            other => *other = json!([value]),
        }
        self.write()
    }

    fn write(&self) -> anyhow::Result<()> {
        write_whole(&self.path, &self.found)
    }
}

/// A whole file or the one before.
fn write_whole(path: &Path, value: &Value) -> anyhow::Result<()> {
    let draft = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&draft, serde_json::to_string_pretty(value)? + "\n")
        .and_then(|()| std::fs::rename(&draft, path))
        .with_context(|| format!("write {}", path.display()))
}

/// Runs a section in this process.
fn child(args: &Args, name: &str) -> anyhow::Result<ExitCode> {
    let section = SECTIONS.iter().find(|s| s.name == name).with_context(|| format!("no section {name}"))?;
    let path = args.out.clone().context("--child needs --out")?;
    SMOKE.get_or_init(|| args.smoke);
    let mut out = Out { path, found: json!({}) };
    let result = catch_unwind(AssertUnwindSafe(|| (section.run)(args, &mut out)));
    let error = match result {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(format!("{error:#}")),
        Err(panic) => Some(panic_text(panic.as_ref())),
    };
    let failed = error.is_some() || out.found["ok"] == json!(false);
    if let Some(error) = error {
        out.found["error"] = json!(error);
    }
    out.set("release_errors", lagoon_cuda::driver::release_errors())?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs a section in a process of its own: its entry in the report.
fn run_section(args: &Args, section: &Section, limit: Duration) -> anyhow::Result<Value> {
    let path = std::env::temp_dir().join(format!("gpu-check-{}-{}.json", std::process::id(), section.name));
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--child", section.name, "--out"]).arg(&path).arg("--goldens").arg(&args.goldens);
    if let Some(lagoon) = &args.lagoon {
        command.arg("--lagoon").arg(lagoon);
    }
    command.args(args.smoke.then_some("--smoke")).args(args.pip.then_some("--pip"));
    // What a section starts (the demo's instances) is to end with it, or it would keep the GPU's memory from the next one.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let started = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("run a section")?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if started.elapsed() > limit {
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if status.is_none() {
        let group = format!("-{}", child.id());
        let mut kill = Command::new("kill");
        let killed = kill.args(["-KILL", "--", &group]).stdin(Stdio::null()).stderr(Stdio::null()).status();
        if !killed.is_ok_and(|killed| killed.success()) {
            child.kill()?;
        }
        child.wait()?;
    }
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    // What it has not written does not matter any more.
    let _gone = std::fs::remove_file(&path);
    let found: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
    let state = match status {
        None => "timed out",
        Some(status) if status.success() && !found["absent"].is_null() => "absent",
        Some(status) if status.success() => "ok",
        Some(_) => "failed",
    };
    let how = status.map_or_else(|| format!("killed after {} s", limit.as_secs()), |status| status.to_string());
    Ok(json!({ "state": state, "seconds": started.elapsed().as_secs_f64(), "ended": how, "found": found }))
}

/// The report's head, and whether there is a device.
fn head(args: &Args) -> (Value, bool) {
    let probe = lagoon_cuda::probe();
    let present = matches!(probe, CudaProbe::Present { .. });
    let mut report = json!({
        "label": args.label,
        "kernels": kernels::FATBIN_SOURCE,
        "smoke": args.smoke,
        "driver": probe.to_string(),
        "sections": {},
    });
    let mut real = false;
    if present {
        report["device"] = match open() {
            Ok(device) => {
                let (info, a) = (device.info(), device.attributes());
                real = a.name != "Fake device";
                json!({
                    "name": info.name,
                    "compute_capability": format!("{}.{}", a.compute_capability.0, a.compute_capability.1),
                    "multiprocessors": a.multiprocessors,
                    "memory_bytes": a.memory_bytes,
                    "free_bytes": info.memory_bytes,
                    "shared_bytes_per_block": a.shared_bytes_per_block,
                    "linear_layers": device.linear_layers(),
                })
            }
            Err(error) => json!({ "error": format!("{error:#}") }),
        };
        report["nvidia_smi"] = json!(external::nvidia_smi());
    }
    // Numbers of the fake driver or of tiny sizes measure nothing.
    report["measured_on_gpu"] = json!(real && !args.smoke);
    (report, present)
}

/// Sections that are asked for, in order.
fn wanted(args: &Args) -> anyhow::Result<Vec<&'static Section>> {
    for name in args.only.iter().chain(&args.skip) {
        if !SECTIONS.iter().any(|section| section.name == name) {
            bail!("no section {name}\nhint: --list shows them");
        }
    }
    let is = |list: &[String], section: &Section| list.iter().any(|name| name == section.name);
    let asked = |s: &&Section| (args.only.is_empty() || is(&args.only, s)) && !is(&args.skip, s);
    Ok(SECTIONS.iter().filter(asked).collect())
}

/// Whether an entry of an earlier run need not be made again.
fn is_there(entry: &Value) -> bool {
    entry["state"] == json!("ok") || entry["state"] == json!("absent")
}

/// Sums up what the sections came to.
fn conclude(report: &mut Value) {
    let sections = report["sections"].as_object().cloned().unwrap_or_default();
    let bad = |entry: &Value| ["failed", "timed out"].iter().any(|state| entry["state"] == json!(state));
    let errors = |entry: &Value| entry["found"]["release_errors"].as_u64().unwrap_or(0);
    let present = report["driver"].as_str().is_some_and(|driver| driver.starts_with("CUDA"));
    report["ok"] = json!(present && !sections.is_empty() && !sections.values().any(bad));
    report["release_errors"] = json!(sections.values().map(errors).sum::<u64>());
    report["targets"] = json!(targets(report));
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    if args.list {
        SECTIONS.iter().for_each(|s| print_line(&format!("{:<12} {:>4} s  {}", s.name, s.limit_s, s.what)));
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(name) = &args.child {
        return child(&args, name);
    }
    let sections = wanted(&args)?;
    let (mut report, present) = head(&args);
    if let Some(earlier) = args.out.as_ref().filter(|_| !args.fresh).and_then(|path| std::fs::read(path).ok())
        && let Ok(earlier) = serde_json::from_slice::<Value>(&earlier)
        && ["label", "kernels", "smoke", "driver"].iter().all(|key| earlier[*key] == report[*key])
    {
        report["sections"] = earlier["sections"].clone();
    }
    let (began, all) = (Instant::now(), Duration::from_secs(args.limit_s));
    let mut left = Vec::new();
    for section in sections.iter().filter(|_| present) {
        if is_there(&report["sections"][section.name]) {
            continue;
        }
        let rest = all.saturating_sub(began.elapsed());
        if rest < Duration::from_secs(section.limit_s).min(all / 4) {
            left.push(section.name);
            continue;
        }
        let entry = run_section(&args, section, rest.min(Duration::from_secs(section.limit_s)))?;
        report["sections"][section.name] = entry;
        report["not_run"] = json!(left);
        conclude(&mut report);
        if let Some(path) = &args.out {
            write_whole(path, &report)?;
        }
    }
    report["not_run"] = json!(left);
    conclude(&mut report);
    match &args.out {
        Some(path) => write_whole(path, &report)?,
        None => print_line(&serde_json::to_string_pretty(&report)?),
    }
    if !left.is_empty() {
        complain(&format!("time is up: {} were not run\nhint: run it again, the report goes on", left.join(", ")));
    }
    Ok(if report["ok"] == json!(true) && left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[allow(clippy::print_stdout, reason = "the report is the program's answer")]
fn print_line(text: &str) {
    println!("{text}");
}

#[allow(clippy::print_stderr, reason = "for who runs it")]
fn complain(text: &str) {
    eprintln!("{text}");
}
