//! `cargo xtask ci`, called by .ci/run: cargo-deny and tint if installed, the test command, and beside it the rehearsal of the
//! commands for a GPU and a sample of clients from PyPI; then the demo.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::ScopedJoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::jobs::Job;
use crate::times::Times;
use crate::{clients, deny, test, wgsl, workspace};

/// Time limit of the demo's answer, after the build, as the README promises.
const DEMO_SECONDS_MAX: u64 = 60;

pub(crate) fn run(root: &Path) -> Result<bool> {
    let mut times = Times::default();
    let checks =
        [("deny", times.of("deny", || good(deny::run(root)))), ("wgsl", times.of("wgsl", || good(wgsl::run(root))))];
    // Before the builds, which may write a new one.
    let program = std::env::current_exe().context("this program's path")?;
    // The network is enough for these: they are installed beside the builds.
    let tests = std::thread::scope(|scope| {
        let packages = scope.spawn(|| clients::install(root, &clients::Options::sample()));
        let beside = || {
            // The clients' check installs missing packages again, and reports the error.
            let _reported_by_it = join(packages);
            [["gpu-rehearse"].as_slice(), &["clients", "--sample"]].map(|command| check(&program, command)).into()
        };
        times.of("tests", || test::report(root, true, beside))
    })?;
    let demo = times.of("demo", || demo(root));
    match &demo {
        Ok(line) => println!("demo: ok: {line}"),
        Err(error) => println!("error: the demo failed: {error:#}"),
    }
    // The numbers of tests and the failures come last, where they are seen at the end of a long log.
    for (name, _) in checks.iter().filter(|(_, good)| !good) {
        println!("error: {name} failed");
    }
    println!("{times}");
    println!("{tests}");
    Ok(tests.good() && demo.is_ok() && checks.iter().all(|(_, good)| *good))
}

/// A command of this program as a job beside the tests.
fn check(program: &Path, arguments: &[&str]) -> Job {
    let mut command = Command::new(program);
    command.args(arguments);
    Job { name: arguments.join(" "), command, binary: None }
}

/// A thread's result; its panic is this thread's.
fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Whether a check passed; prints the error of one that could not run, so that the others still do.
fn good(check: Result<bool>) -> bool {
    check.unwrap_or_else(|error| {
        println!("error: {error:#}");
        false
    })
}

/// Runs the README's demo and checks its report.
fn demo(root: &Path) -> Result<String> {
    let build = ["build", "--locked", "--release", "--package", "lagoon"];
    let built =
        workspace::cargo().args(build).current_dir(root).stdin(Stdio::null()).status().context("build the demo")?;
    ensure!(built.success(), "it does not build");
    let start = Instant::now();
    let output = workspace::cargo()
        .args(["run", "--locked", "--quiet", "--release", "--", "demo", "--json"])
        .current_dir(root)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("run the demo")?;
    let seconds = start.elapsed().as_secs();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "exit status {}, output: {text}", output.status);
    ensure!(seconds <= DEMO_SECONDS_MAX, "it took {seconds} s, at most {DEMO_SECONDS_MAX}");
    check_report(&text)?;
    Ok(text.trim().to_owned())
}

/// Checks for one JSON object that reports an exactly served request of a pool.
fn check_report(text: &str) -> Result<()> {
    let report: Value =
        serde_json::from_str(text.trim()).with_context(|| format!("it printed no JSON object: {text}"))?;
    for field in ["ok", "tokens_equal"] {
        ensure!(report[field] == Value::Bool(true), "`{field}` is {}", report[field]);
    }
    for field in ["instances", "prompt_tokens", "kv_tokens_per_instance", "remote_rblocks", "wire_bytes"] {
        ensure!(report[field].as_u64().is_some_and(|n| n > 0), "`{field}` is {}", report[field]);
    }
    if report["kv_tokens_per_instance"].as_u64() >= report["prompt_tokens"].as_u64() {
        bail!(
            "the prompt fits in one instance: {} of {} tokens",
            report["prompt_tokens"],
            report["kv_tokens_per_instance"]
        );
    }
    ensure!(
        report["max_abs_logit_diff"].as_f64().is_some(),
        "`max_abs_logit_diff` is {}",
        report["max_abs_logit_diff"]
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"ok":true,"backend":"cpu","instances":3,"prompt_tokens":19800,"kv_tokens_per_instance":8000,
        "remote_rblocks":9,"wire_bytes":12345,"tokens_per_s":3.5,"max_abs_logit_diff":1e-5,"logit_std":3.0,
        "tokens_equal":true,"answer":" 1","expected":"1"}"#;

    #[test]
    fn a_good_report_passes() {
        check_report(GOOD).unwrap();
    }

    #[test]
    fn each_lie_is_found() {
        for (from, to) in [
            ("\"ok\":true", "\"ok\":false"),
            ("\"tokens_equal\":true", "\"tokens_equal\":false"),
            ("\"remote_rblocks\":9", "\"remote_rblocks\":0"),
            ("\"wire_bytes\":12345", "\"wire_bytes\":null"),
            ("8000", "20000"),
            ("1e-5", "null"),
            ("{", "["),
            ("\"instances\":3,", ""),
        ] {
            assert!(GOOD.contains(from), "{from}");
            assert!(check_report(&GOOD.replacen(from, to, 1)).is_err(), "{from} -> {to}");
        }
    }
}
