//! `cargo xtask test`: rustfmt, tidy, clippy, the binaries that tests start, and every test; at the end all failures,
//! and one line of numbers.
//!
//! Every step runs even after a failed one. A skipped test that tests/skips.toml does not list fails the command.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Formatter};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::environment::{self, RuntimeDir};
use crate::libtest::Tally;
use crate::skips::{self, Listed, Skipped};
use crate::tidy;
use crate::times::Times;
use crate::workspace;

/// Begin of the names of tests that start real processes.
const PROCESSES: &str = "process_";

/// The environment variable that names the file to which a test that cannot run appends `name<TAB>reason`.
const SKIP_LOG: &str = "LAGOON_SKIP_LOG";

/// Has Mesa compile shaders without LLVM's optimisations: on a machine that has not run the tests before they take most of the tests' time
/// (products of packed weights: 117 s of processor time, 45 s without; 3 s and 4 s where shaders are cached).
const QUICK_SHADERS: [(&str, &str); 1] = [("GALLIVM_PERF", "nopt")];

/// Process tests start real binaries, which `cargo test` builds only for tests of their own packages.
const BINARIES: [&str; 7] = ["build", "--locked", "--release", "--package", "lagoon", "--package", "lagoon-paced"];

/// Builds the tests: their own step has their time alone.
const TESTS: [&str; 5] = ["test", "--locked", "--release", "--workspace", "--no-run"];

/// Tests that the simulators find deliberate bugs (mutants). The whole workspace is named so that its dependencies
/// are not rebuilt.
const MUTANTS: [&str; 7] = [
    "test",
    "--locked",
    "--release",
    "--workspace",
    "--features=lagoon-sim/mutants,lagoon-transfer/mutants",
    "--test",
    "mutants",
];

/// Runs everything and prints the report.
pub(crate) fn run(root: &Path, lint: bool) -> Result<bool> {
    let report = report(root, lint)?;
    println!("{report}");
    Ok(report.good())
}

/// Result of the test command; its Display is the last output.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// The failed steps.
    broken: Vec<&'static str>,
    outcome: Outcome,
    times: Times,
}

impl Report {
    pub(crate) const fn good(&self) -> bool {
        self.broken.is_empty()
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let outcome = &self.outcome;
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for skipped in &outcome.skipped {
            reasons.entry(&skipped.reason).or_default().push(&skipped.name);
        }
        for (reason, names) in reasons {
            writeln!(f, "skipped, {reason}: {}", names.join(" "))?;
        }
        for skipped in &outcome.unlisted {
            writeln!(f, "error: {} was skipped and tests/skips.toml does not list it", skipped.name)?;
        }
        for name in &outcome.flaky {
            writeln!(f, "warning: {name} failed, and passed when run alone")?;
        }
        for name in &outcome.failures {
            writeln!(f, "error: {name} failed")?;
        }
        if !self.broken.is_empty() {
            writeln!(f, "error: failed: {}", self.broken.join(", "))?;
        }
        writeln!(f, "{}", self.times)?;
        write!(f, "{} passed, {} failed, {} skipped", outcome.passed, outcome.failed, outcome.skipped.len())
    }
}

/// Runs everything.
pub(crate) fn report(root: &Path, lint: bool) -> Result<Report> {
    let (mut broken, mut times) = (Vec::new(), Times::default());
    times.of("environment", environment::prepare);
    let mut step = |times: &mut Times, name: &'static str, run: &dyn Fn() -> Result<bool>| {
        let good = times.of(name, run).unwrap_or_else(|error| {
            println!("error: {error:#}");
            false
        });
        if !good {
            broken.push(name);
        }
    };
    if lint {
        step(&mut times, "fmt", &|| cargo(root, &["fmt", "--all", "--check"]));
        heading("tidy");
        step(&mut times, "tidy", &|| tidy::run(root));
        let clippy = ["clippy", "--locked", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"];
        step(&mut times, "clippy", &|| cargo(root, &clippy));
    }
    step(&mut times, "build", &|| cargo(root, &BINARIES));
    step(&mut times, "build tests", &|| cargo(root, &TESTS));
    let outcome = times.of("tests", || tests(root))?;
    // Only this step compiles mutants.
    step(&mut times, "mutants", &|| cargo(root, &MUTANTS));
    if !outcome.good {
        broken.push("tests");
    }
    println!();
    Ok(Report { broken, outcome, times })
}

fn heading(text: &str) {
    println!("\n== {text}");
    // A heading that cannot be printed is no failure.
    let _ = io::stdout().flush();
}

fn cargo(root: &Path, arguments: &[&str]) -> Result<bool> {
    heading(&format!("cargo {}", arguments.join(" ")));
    let start = Instant::now();
    let status = workspace::cargo()
        .args(arguments)
        .current_dir(root)
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("run cargo {}", arguments.join(" ")))?;
    println!("{} ({:.0} s)", if status.success() { "ok" } else { "failed" }, start.elapsed().as_secs_f64());
    Ok(status.success())
}

/// Result of the tests.
#[derive(Debug, Default)]
struct Outcome {
    good: bool,
    passed: usize,
    failed: usize,
    failures: BTreeSet<String>,
    /// Tests that failed, and passed when they were run again alone.
    flaky: Vec<String>,
    skipped: BTreeSet<Skipped>,
    /// Skipped tests that tests/skips.toml does not list.
    unlisted: Vec<Skipped>,
}

fn tests(root: &Path) -> Result<Outcome> {
    let runtime = RuntimeDir::new()?;
    let log = runtime.path().join("skipped");
    let listed = skips::listed(root)?;
    // Tests of real processes mostly wait: they run beside all others.
    let part = |filter: &[&str]| {
        let mut command = workspace::cargo();
        command
            .args(["test", "--locked", "--release", "--workspace", "--no-fail-fast"])
            .args(filter)
            .env("XDG_RUNTIME_DIR", runtime.path())
            .envs(QUICK_SHADERS)
            .env(SKIP_LOG, &log);
        command
    };
    let processes = part(&["--lib", "--bins", "--tests", "--", PROCESSES]);
    let others = part(&["--", "--skip", PROCESSES]);
    let (mut tally, mut whole_good) = beside(root, others, processes)?;
    let flaky = alone(&tally);
    if !flaky.is_empty() {
        let mut again = workspace::cargo();
        again
            .args(["test", "--locked", "--release", "--workspace", "--test", "system", "--"])
            .args(["--exact", "--test-threads=1"])
            .args(&flaky)
            .env("XDG_RUNTIME_DIR", runtime.path())
            .envs(QUICK_SHADERS)
            .env(SKIP_LOG, &log);
        let mut second = Tally::default();
        if harness(root, again, &mut second, &mut io::stdout())? && second.passed == flaky.len() {
            tally.passes_alone(&flaky);
            whole_good = true;
        }
    }
    let loom_good = harness(root, loom(root), &mut tally, &mut io::stdout())?;
    let text = if log.exists() {
        std::fs::read_to_string(&log).context("read the log of skipped tests")?
    } else {
        String::new()
    };
    let outcome = judge(&tally, &skips::parse_log(&text), &listed, whole_good && loom_good);
    Ok(Outcome { flaky: if whole_good { flaky } else { Vec::new() }, ..outcome })
}

/// Most tests that are run again.
const AGAIN_MAX: usize = 3;

/// The failed tests, if they are few, all of real processes in real time, and no other test failed: a test that failed on a busy
/// machine passes alone, and is reported as flaky. So is a rare race: a test that is named here more than once has a bug.
fn alone(tally: &Tally) -> Vec<String> {
    let whole = tally.running == 0 && tally.failed == tally.failures.len() && tally.failed <= AGAIN_MAX;
    let whole = whole && tally.targets.iter().eq(["-p lagoon-tests --test system"]);
    let of_processes = tally.failures.iter().all(|name| name.starts_with(PROCESSES));
    if whole && of_processes { tally.failures.iter().cloned().collect() } else { Vec::new() }
}

/// Every interleaving of the gManager's lock-free view, under loom. Loom replaces the atomics of the whole build,
/// which therefore has a target folder of its own.
fn loom(root: &Path) -> Command {
    let target = workspace::target(root);
    let mut command = workspace::cargo();
    command
        .args(["test", "--locked", "--release", "--package", "lagoon-view", "--lib"])
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", target.join("loom"));
    command
}

/// Runs two commands at once, and prints the second's output when both have ended; returns their tests, and whether both succeeded.
fn beside(root: &Path, first: Command, second: Command) -> Result<(Tally, bool)> {
    let (mut tally, mut other, mut output) = (Tally::default(), Tally::default(), Vec::new());
    let (first_good, second_good) = std::thread::scope(|scope| {
        let second = scope.spawn(|| harness(root, second, &mut other, &mut output));
        (harness(root, first, &mut tally, &mut io::stdout()), second.join())
    });
    io::stdout().write_all(&output).context("print the tests' output")?;
    let second_good = second_good.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    tally.add(other);
    Ok((tally, first_good? && second_good))
}

/// Runs tests, writes and counts their output; returns whether the command succeeded.
fn harness(root: &Path, mut command: Command, tally: &mut Tally, output: &mut impl Write) -> Result<bool> {
    let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    writeln!(output, "\n== cargo {}", arguments.join(" "))?;
    command.current_dir(root).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("run cargo test")?;
    let stderr = child.stderr.take();
    let reply = std::thread::spawn(move || {
        let lines = stderr.into_iter().flat_map(|stderr| BufReader::new(stderr).split(b'\n'));
        let lines = lines.map_while(Result::ok).map(|line| String::from_utf8_lossy(&line).into_owned());
        lines.inspect(|line| eprintln!("{line}")).collect::<Vec<_>>()
    });
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = String::from_utf8_lossy(&line.context("read the tests' output")?).into_owned();
            writeln!(output, "{line}")?;
            tally.line(line.trim_end());
        }
    }
    let status = child.wait().context("wait for cargo test")?;
    reply.join().unwrap_or_default().iter().for_each(|line| tally.cargo_line(line));
    Ok(status.success())
}

/// The tests' result. The harness reports a test that skips itself as passed; it counts as skipped here.
fn judge(tally: &Tally, logged: &BTreeSet<Skipped>, listed: &[Listed], status_good: bool) -> Outcome {
    let names: BTreeSet<&str> = logged.iter().map(|s| s.name.as_str()).collect();
    let skipped: BTreeSet<Skipped> = logged.union(&tally.ignored).cloned().collect();
    let unlisted: Vec<Skipped> = skipped.iter().filter(|s| !listed.iter().any(|l| l.names(&s.name))).cloned().collect();
    let mut failed = tally.failed + tally.running;
    if !status_good && failed == 0 {
        failed = 1; // it did not build, or a binary crashed before its first line
    }
    Outcome {
        good: status_good && failed == 0 && unlisted.is_empty(),
        passed: tally.passed.saturating_sub(names.len()),
        failed,
        failures: tally.failures.clone(),
        flaky: Vec::new(),
        skipped,
        unlisted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skipped(name: &str) -> BTreeSet<Skipped> {
        [Skipped { name: name.into(), reason: "r".into() }].into()
    }

    #[test]
    fn skipped_tests_must_be_listed() {
        let tally = Tally { passed: 3, ..Tally::default() };
        let listed = skips::parse("[[skip]]\nname = \"a::b\"\nreason = \"r\"\n").unwrap();
        let good = judge(&tally, &skipped("a::b"), &listed, true);
        assert_eq!((good.good, good.passed, good.failed, good.skipped.len()), (true, 2, 0, 1));
        assert!(!judge(&tally, &skipped("a::c"), &listed, true).good);
        let ignored = Tally { passed: 3, ignored: skipped("a::c"), ..Tally::default() };
        let bad = judge(&ignored, &BTreeSet::new(), &listed, true);
        assert_eq!((bad.good, bad.passed, bad.unlisted.len()), (false, 3, 1));
    }

    #[test]
    fn failures_and_crashes_fail() {
        let none = BTreeSet::new();
        assert!(judge(&Tally { passed: 1, ..Tally::default() }, &none, &[], true).good);
        assert!(!judge(&Tally { failed: 1, ..Tally::default() }, &none, &[], false).good);
        let mut crashed = Tally::default();
        crashed.line("running 2 tests");
        assert_eq!(judge(&crashed, &none, &[], false).failed, 1);
        assert_eq!(judge(&Tally::default(), &none, &[], false).failed, 1);
    }

    #[test]
    fn few_tests_of_processes_are_run_again() {
        let failed = |names: &[&str]| {
            let mut tally = Tally::default();
            tally.line(&format!("running {} tests", names.len() + 1));
            names.iter().for_each(|name| tally.line(&format!("test {name} ... FAILED")));
            tally.line(&format!("test result: FAILED. 1 passed; {} failed; 0 ignored", names.len()));
            tally.cargo_line("    `-p lagoon-tests --test system`");
            tally
        };
        let mut tally = failed(&["process_a::b"]);
        assert_eq!(alone(&tally), ["process_a::b"]);
        tally.passes_alone(&alone(&tally));
        let good = judge(&tally, &BTreeSet::new(), &[], true);
        assert_eq!((good.good, good.passed, good.failed), (true, 2, 0));
        assert!(alone(&failed(&["process_a::b", "moves::c"])).is_empty(), "one is not of processes");
        assert!(alone(&failed(&["process_a", "process_b", "process_c", "process_d"])).is_empty(), "too many");
        let mut crashed = failed(&["process_a::b"]);
        crashed.line("running 2 tests");
        assert!(alone(&crashed).is_empty(), "something crashed");
        let mut silent = failed(&["process_a::b"]);
        silent.cargo_line("    `-p lagoon-kv --lib`");
        assert!(alone(&silent).is_empty(), "something crashed before its first line");
    }

    #[test]
    fn what_failed_is_named_last() {
        let mut tally = Tally { ignored: skipped("a::c"), ..Tally::default() };
        for line in ["running 1 test", "test a::d ... FAILED", "test result: FAILED. 2 passed; 1 failed; 1 ignored"] {
            tally.line(line);
        }
        let mut times = Times::default();
        times.of("fmt", || ());
        let report = Report { broken: vec!["tests"], outcome: judge(&tally, &skipped("a::b"), &[], false), times };
        let want = "skipped, r: a::b a::c\nerror: a::b was skipped and tests/skips.toml does not list it\n\
            error: a::c was skipped and tests/skips.toml does not list it\nerror: a::d failed\nerror: failed: tests\n\
            0 s: fmt 0\n1 passed, 1 failed, 2 skipped";
        assert_eq!(report.to_string(), want);
        assert!(!report.good());
    }
}
