//! `lagoon cuda-trial`: measures attention kernels on a CUDA device in a process of its own, for `serve`.
//!
//! Warpgroup kernels may trap or hang on a device, and a fault destroys a process's CUDA context. So the serving
//! process launches no such kernel before it has passed its trial: it starts this process before it opens the device
//! itself, reads one line of JSON per finding, and kills it at the deadline.

use crate::args::parse_dtype;
use crate::shutdown;
use anyhow::Context;
use lagoon_backend::{Device, DeviceError};
use lagoon_cuda::kernels::tune::{CONTEXTS, Tuned};
use lagoon_cuda::{CudaDevice, CudaOptions, Tried, TuneFor, kernels};
use lagoon_types::{AttentionGeometry, DType};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit of tuning the decode kernel, and of the trial.
const TIME_MAX: Duration = Duration::from_secs(3);
/// Device memory limit of either, in bytes.
const BYTES_MAX: u64 = 1 << 30;
/// Time limit of the whole process: opening a device of a large machine takes several seconds.
pub(crate) const CUDA_TRIAL_DEADLINE: Duration = Duration::from_secs(60);
/// Time for a killed process to end; one that hangs in the driver longer is left behind.
const KILLED_MAX: Duration = Duration::from_secs(5);

/// `lagoon cuda-trial`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CudaTrialArgs {
    /// The device's number.
    #[arg(long)]
    device: u32,
    #[arg(long)]
    heads: u32,
    #[arg(long)]
    kv_heads: u32,
    #[arg(long)]
    head_dim: u32,
    /// Element type of the KV cache.
    #[arg(long, value_parser = parse_dtype)]
    dtype: DType,
    /// Measure the decode kernel's shapes.
    #[arg(long)]
    decode: bool,
    /// Compare and time warpgroup kernels.
    #[arg(long)]
    warpgroups: bool,
    /// Longest context, in tokens: for slow devices.
    #[arg(long, env = "LAGOON_CUDA_TRIAL_TOKENS", default_value_t = u32::MAX, value_parser = clap::value_parser!(u32).range(64..))]
    tokens_max: u32,
}

/// The device, shape and parts to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) ordinal: u32,
    pub(crate) geometry: AttentionGeometry,
    pub(crate) dtype: DType,
    pub(crate) decode: bool,
    pub(crate) warpgroups: bool,
}

/// Result of the warpgroup kernels' trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// Results agree, and they are faster.
    Used,
    /// Results agree, but they are not faster.
    Slower,
    /// Results differ, or a kernel trapped or hung.
    Failed,
}

/// Result of the warpgroup kernels' trial, with the numbers or the error as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Warpgroups {
    pub(crate) outcome: Outcome,
    pub(crate) finding: String,
}

/// A line of the child's output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// Shapes of the decode kernel, as text; `None` for KV that tensor cores do not serve.
    Decode(Option<String>),
    /// Warpgroup kernels are launched after this line.
    TrialBegins,
    Warpgroups(Warpgroups),
    /// An error; with `no_memory` it does not concern the kernels.
    Error {
        no_memory: bool,
        text: String,
    },
}

/// Findings of a child.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) decode: Option<Tuned>,
    pub(crate) warpgroups: Option<Warpgroups>,
    /// Why a wanted finding is missing, if warpgroup kernels are not the cause.
    pub(crate) missing: Option<String>,
}

/// Runs the child.
pub(crate) fn run(args: &CudaTrialArgs) -> anyhow::Result<()> {
    // Exits with the parent, whose end closes this pipe.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        // Exit handlers of the driver would wait for a kernel that hangs.
        shutdown::leave(1);
    });
    if let Err(error) = measure(args) {
        let no_memory = matches!(error.downcast_ref(), Some(DeviceError::OutOfMemory { .. }));
        print_line(&Line::Error { no_memory, text: format!("{error:#}") })?;
    }
    Ok(())
}

fn measure(args: &CudaTrialArgs) -> anyhow::Result<()> {
    let options = CudaOptions { ordinal: args.device, ..CudaOptions::default() };
    let mut device = CudaDevice::open(kernels::FATBIN, options).context("open the CUDA device")?;
    let geometry =
        AttentionGeometry { heads: args.heads, kv_heads: args.kv_heads, head_dim: args.head_dim, latent: false };
    let what = TuneFor {
        geometry,
        dtype: args.dtype,
        contexts: Some(CONTEXTS.map(|keys| keys.min(args.tokens_max))),
        time_max: TIME_MAX,
        bytes_max: device.info().memory_bytes.map_or(BYTES_MAX, |free| (free / 4).min(BYTES_MAX)),
    };
    if args.decode {
        print_line(&Line::Decode(device.tune(&what)?.map(|tuned| tuned.to_string())))?;
    }
    if args.warpgroups {
        print_line(&Line::TrialBegins)?;
        print_line(&Line::Warpgroups(Warpgroups::of(&device.try_warpgroups(&what)?)))?;
    }
    Ok(())
}

/// Prints one line and flushes.
fn print_line(line: &Line) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(line)?)?;
    Ok(out.flush()?)
}

impl Warpgroups {
    fn of(tried: &Tried) -> Self {
        let [out, lse] = tried.worst;
        let [plain, wgmma] = tried.prefill_ms;
        let finding = format!(
            "outputs differ by {out:.2} and log-sum-exps by {lse:.2} of their bounds ({}); a prompt takes {wgmma:.3} ms \
             against {plain:.3}",
            tried.worst_case
        );
        let outcome = match (tried.agree, tried.faster) {
            (false, _) => Outcome::Failed,
            (true, false) => Outcome::Slower,
            (true, true) => Outcome::Used,
        };
        Self { outcome, finding }
    }
}

/// Measures in a child process.
///
/// # Errors
/// If the child does not start.
pub(crate) fn ask(wanted: Wanted) -> anyhow::Result<Found> {
    let AttentionGeometry { heads, kv_heads, head_dim, .. } = wanted.geometry;
    let mut command = Command::new(std::env::current_exe().context("find the lagoon binary")?);
    command.arg("cuda-trial").args([
        format!("--device={}", wanted.ordinal),
        format!("--heads={heads}"),
        format!("--kv-heads={kv_heads}"),
        format!("--head-dim={head_dim}"),
        format!("--dtype={}", wanted.dtype),
    ]);
    command.args(wanted.decode.then_some("--decode")).args(wanted.warpgroups.then_some("--warpgroups"));
    let (lines, ended) = run_child(command, CUDA_TRIAL_DEADLINE)?;
    Ok(read(&lines, &ended))
}

/// Runs a command until it ends or its deadline passes. Returns its standard output, and how it ended, as text.
fn run_child(mut command: Command, deadline: Duration) -> anyhow::Result<(String, String)> {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("start the trial of CUDA kernels")?;
    let (_stdin, mut stdout) = (child.stdin.take(), child.stdout.take());
    let mut until = Instant::now() + deadline;
    let mut killed = false;
    let ended = loop {
        match child.try_wait().context("wait for the trial of CUDA kernels")? {
            Some(_) if killed => break format!("did not end within {deadline:?}"),
            Some(status) => break status.to_string(),
            None if killed && Instant::now() > until => return Ok((String::new(), "cannot be killed".to_owned())),
            None if Instant::now() > until => {
                child.kill().context("kill the trial of CUDA kernels")?;
                (killed, until) = (true, Instant::now() + KILLED_MAX);
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    // A few hundred bytes, which fit the pipe.
    let mut lines = Vec::new();
    stdout.as_mut().map_or(Ok(0), |stdout| stdout.read_to_end(&mut lines)).context("read the trial's findings")?;
    Ok((String::from_utf8_lossy(&lines).into_owned(), ended))
}

/// The findings in a child's lines and end.
fn read(lines: &str, ended: &str) -> Found {
    let (mut found, mut began, mut error) = (Found::default(), false, None);
    // Skips a line cut off by a kill.
    for line in lines.lines().filter_map(|line| serde_json::from_str(line).ok()) {
        match line {
            Line::Decode(text) => found.decode = text.and_then(|text| text.parse().ok()),
            Line::TrialBegins => began = true,
            Line::Warpgroups(warpgroups) => found.warpgroups = Some(warpgroups),
            Line::Error { no_memory, text } => error = Some((no_memory, text)),
        }
    }
    let success = ended == "exit status: 0";
    match error.or_else(|| (!success).then(|| (false, format!("the trial's process: {ended}")))) {
        None => {}
        // An error after the findings does not concern them.
        Some(_) if found.warpgroups.is_some() => {}
        Some((false, text)) if began => {
            found.warpgroups = Some(Warpgroups { outcome: Outcome::Failed, finding: text });
        }
        Some((_, text)) => found.missing = Some(text),
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_child_that_hangs_or_crashes_says_what_it_had_found() {
        let begun = r#"echo '"trial_begins"'; echo '{"warp'"#;
        let started = Instant::now();
        let (lines, ended) = run_child(shell(&format!("{begun}; exec sleep 100")), Duration::from_millis(200)).unwrap();
        assert!(started.elapsed() < Duration::from_secs(20));
        let failed = |found: Found| found.warpgroups.filter(|w| w.outcome == Outcome::Failed).map(|w| w.finding);
        assert_eq!(failed(read(&lines, &ended)).unwrap(), "the trial's process: did not end within 200ms");
        let (lines, ended) = run_child(shell(&format!("{begun}; kill -s SEGV $$")), Duration::from_secs(20)).unwrap();
        assert!(failed(read(&lines, &ended)).unwrap().contains("signal: 11"), "{ended}");
        // Before the trial it says nothing of warpgroup kernels.
        let (lines, ended) = run_child(shell("kill -s SEGV $$"), Duration::from_secs(20)).unwrap();
        let found = read(&lines, &ended);
        assert_eq!((found.warpgroups, found.missing.is_some()), (None, true));
    }

    #[test]
    fn lines_are_findings() {
        let text = |line: &Line| serde_json::to_string(line).unwrap() + "\n";
        let begun = text(&Line::Decode(None)) + &text(&Line::TrialBegins);
        let error = |no_memory| text(&Line::Error { no_memory, text: "lost".to_owned() });
        let ok = "exit status: 0";
        let failed = Warpgroups { outcome: Outcome::Failed, finding: "lost".to_owned() };
        assert_eq!(read(&(begun.clone() + &error(false)), ok).warpgroups, Some(failed));
        // A device that is full says nothing of its kernels.
        let full = read(&(begun.clone() + &error(true)), ok);
        assert_eq!((full.warpgroups, full.missing), (None, Some("lost".to_owned())));
        let used = Warpgroups { outcome: Outcome::Used, finding: "fast".to_owned() };
        let found = read(&(begun + &text(&Line::Warpgroups(used.clone()))), "signal: 11 (SIGSEGV)");
        assert_eq!((found.warpgroups, found.missing), (Some(used), None), "it crashed when it was done");
    }

    #[test]
    fn numbers_decide() {
        let outcome = |agree, faster| Warpgroups::of(&Tried { agree, faster, ..Tried::default() }).outcome;
        assert_eq!(outcome(true, true), Outcome::Used);
        assert_eq!(outcome(true, false), Outcome::Slower);
        assert_eq!((outcome(false, true), outcome(false, false)), (Outcome::Failed, Outcome::Failed));
    }
}
