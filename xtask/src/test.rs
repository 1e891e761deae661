//! `cargo xtask test`: rustfmt, tidy, clippy, the binaries that tests start, and every test; at the end all failures,
//! and one line of numbers. CI runs its other checks beside the tests.
//!
//! Every step runs even after a failed one; only tests that do not build are not run, and neither are the checks. A skipped
//! test that tests/skips.toml does not list fails the command.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Formatter};
use std::io::{self, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::environment::{self, RuntimeDir};
use crate::jobs::{self, Binary, Job, Ran};
use crate::libtest::Tally;
use crate::skips::{self, Listed, Skipped};
use crate::tidy;
use crate::times::Times;
use crate::workspace;

/// What selects the tests that the simulators find deliberate bugs (mutants). Features change what is compiled: a build of their own, of
/// the whole workspace, so that dependencies are not built again.
const MUTANTS: [&str; 3] = ["--features=lagoon-sim/mutants,lagoon-transfer/mutants", "--test", "mutants"];

/// Begin of the names of tests that start real processes, and the binary that they are in.
const PROCESSES: &str = "process_";
const PROCESSES_IN: &str = "tests: test system";

/// The environment variable that names the file to which a test that cannot run appends `name<TAB>reason`.
const SKIP_LOG: &str = "LAGOON_SKIP_LOG";

/// Has Mesa compile shaders without LLVM's optimisations: on a machine that has not run the tests before they take most of the tests' time
/// (products of packed weights: 117 s of processor time, 45 s without; 3 s and 4 s where shaders are cached).
const QUICK_SHADERS: [(&str, &str); 1] = [("GALLIVM_PERF", "nopt")];

/// Process tests start real binaries, which `cargo test` builds only for tests of their own packages.
const BINARIES: [&str; 10] =
    ["build", "--locked", "--release", "--workspace", "--bin", "lagoon", "--bin", "lagoon-paced", "--bin", "gpu-check"];

/// Runs everything and prints the report.
pub(crate) fn run(root: &Path, lint: bool) -> Result<bool> {
    let report = report(root, lint, Vec::new)?;
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
        if !outcome.slowest.is_empty() {
            let jobs = outcome.slowest.iter().map(|(name, time)| format!("{name} {:.0}", time.as_secs_f64()));
            writeln!(f, "slowest jobs of the tests, s: {}", jobs.collect::<Vec<_>>().join(", "))?;
        }
        write!(f, "{} passed, {} failed, {} skipped", outcome.passed, outcome.failed, outcome.skipped.len())
    }
}

/// Runs everything, and `checks` beside the tests: commands that need programs that are built by then.
pub(crate) fn report(root: &Path, lint: bool, checks: impl FnOnce() -> Vec<Job>) -> Result<Report> {
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
    heading("build tests");
    let outcome = match times.of("build tests", || build(root)) {
        Ok(binaries) => times.of("tests", || tests(root, &binaries, checks()))?,
        Err(error) => {
            println!("error: {error:#}\nerror: no test was run, and no check beside the tests");
            Outcome { failed: 1, ..Outcome::default() }
        }
    };
    if !outcome.good {
        broken.push("tests");
    }
    println!();
    Ok(Report { broken, outcome, times })
}

/// Builds every test, and those of mutants.
fn build(root: &Path) -> Result<Vec<Binary>> {
    let mut binaries = jobs::build(root, "", &[])?;
    binaries.extend(jobs::build(root, "mutants, ", &MUTANTS)?);
    Ok(binaries)
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
    flaky: BTreeSet<String>,
    /// The jobs that took longest.
    slowest: Vec<(String, Duration)>,
    skipped: BTreeSet<Skipped>,
    /// Skipped tests that tests/skips.toml does not list.
    unlisted: Vec<Skipped>,
}

fn tests(root: &Path, binaries: &[Binary], checks: Vec<Job>) -> Result<Outcome> {
    let runtime = RuntimeDir::new()?;
    let log = runtime.path().join("skipped");
    let listed = skips::listed(root)?;
    let set = |mut job: Job| {
        job.command.env("XDG_RUNTIME_DIR", runtime.path()).envs(QUICK_SHADERS).env(SKIP_LOG, &log);
        job
    };
    let mut jobs = in_order(binaries);
    jobs.extend([documentation(root), loom(root)].map(Job::behind));
    // Checks wait now and then, as tests of processes do: both go first.
    let jobs = checks.into_iter().map(Job::behind).chain(jobs.into_iter().map(set)).collect();
    let mut ran = jobs::run(jobs, AT_ONCE)?;
    let again = alone(&ran);
    let jobs = again.iter().map(|at| set(failed_ones(&ran[*at]))).collect();
    let second = jobs::run(jobs, 1)?;
    let mut flaky = BTreeSet::new();
    for (at, alone) in again.into_iter().zip(second) {
        let names = ran[at].tally.failures.clone();
        if alone.good() && alone.tally.passed == names.len() {
            ran[at].tally.passes_alone(&names);
            ran[at].status = Some(0);
            flaky.extend(names);
        }
    }
    let text = if log.exists() {
        std::fs::read_to_string(&log).context("read the log of skipped tests")?
    } else {
        String::new()
    };
    let mut tally = Tally::default();
    ran.iter().for_each(|ran| tally.add(&ran.tally));
    count_failed_jobs(&mut tally, &ran);
    let outcome = judge(&tally, &skips::parse_log(&text), &listed, ran.iter().all(Ran::good));
    ran.sort_by_key(|ran| std::cmp::Reverse(ran.time));
    let slowest = ran.into_iter().take(SLOWEST_SHOWN).map(|ran| (ran.name, ran.time)).collect();
    Ok(Outcome { flaky, slowest, ..outcome })
}

/// Jobs at once. Tests of processes mostly wait, and most binaries end with a single long test.
const AT_ONCE: usize = 3;
/// Binaries that take longest, by their targets' names: they begin first, so that none of them ends last.
const LONGEST: [&str; 5] = ["system", "shim", "device", "conformance", "mutants"];
/// Slowest jobs that the report names.
const SLOWEST_SHOWN: usize = 6;

/// The jobs of binaries: tests of processes, then the longest. Tests in real time have the processors when they need them.
fn in_order(binaries: &[Binary]) -> Vec<Job> {
    let rank = |binary: &Binary| LONGEST.iter().position(|name| binary.name.ends_with(&format!(" {name}")));
    let mut sorted: Vec<&Binary> = binaries.iter().collect();
    sorted.sort_by_key(|binary| rank(binary).unwrap_or(LONGEST.len()));
    let has_processes = |binary: &&&Binary| binary.name == PROCESSES_IN;
    let processes = sorted.iter().filter(has_processes).map(|binary| binary.job(&[PROCESSES]));
    let others = sorted.iter().map(|binary| match has_processes(&binary) {
        true => binary.job(&["--skip", PROCESSES]),
        false => binary.job(&[]).behind(),
    });
    processes.chain(others).collect()
}

/// Most tests that are run again.
const AGAIN_MAX: usize = 3;

/// The jobs whose failed tests are run again: if they are few, all in the binary of tests in real time, and nothing but tests failed. A test
/// that failed on a busy machine passes alone, and is reported as flaky. So is a rare race: a test that is named here more than once
/// has a bug.
fn alone(ran: &[Ran]) -> Vec<usize> {
    let few = ran.iter().map(|ran| ran.tally.failed).sum::<usize>() <= AGAIN_MAX;
    let in_real_time = |ran: &Ran| ran.binary.as_ref().is_some_and(|binary| binary.name == PROCESSES_IN);
    let may_pass = |ran: &Ran| ran.good() || in_real_time(ran) && ran.failures().is_some();
    let all = few && ran.iter().all(may_pass);
    (0..ran.len()).filter(|at| all && !ran[*at].good()).collect()
}

/// Runs the failed tests of a job again, one after the other.
fn failed_ones(ran: &Ran) -> Job {
    let names = ran.tally.failures.iter().map(String::as_str);
    let arguments: Vec<&str> = ["--exact", "--test-threads=1"].into_iter().chain(names).collect();
    ran.binary.as_ref().expect("only binaries are run again").job(&arguments)
}

/// Names the jobs that failed without a failed test: checks, and binaries that crashed, of which the tally counts those that had begun.
fn count_failed_jobs(tally: &mut Tally, ran: &[Ran]) {
    for ran in ran.iter().filter(|ran| !ran.good() && ran.tally.failed == 0) {
        tally.failures.insert(ran.name.clone());
        tally.failed += usize::from(ran.tally.running == 0);
    }
}

/// The tests in documentation.
fn documentation(root: &Path) -> Job {
    let mut command = workspace::cargo();
    command.args(["test", "--locked", "--release", "--workspace", "--doc", "--no-fail-fast"]).current_dir(root);
    Job { name: "documentation".to_owned(), command, binary: None }
}

/// Every interleaving of the gManager's lock-free view, under loom. Loom replaces the atomics of the whole build,
/// which therefore has a target folder of its own.
fn loom(root: &Path) -> Job {
    let target = workspace::target(root);
    let mut command = workspace::cargo();
    command
        .args(["test", "--locked", "--release", "--package", "lagoon-view", "--lib"])
        .current_dir(root)
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", target.join("loom"));
    Job { name: "loom".to_owned(), command, binary: None }
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
        flaky: BTreeSet::new(),
        slowest: Vec::new(),
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
    fn few_failed_tests_in_real_time_are_run_again() {
        let ended = |failed: &[&str]| {
            let mut tally = Tally::default();
            tally.line(&format!("running {} tests", failed.len() + 1));
            failed.iter().for_each(|name| tally.line(&format!("test {name} ... FAILED")));
            tally.line(&format!("test result: FAILED. 1 passed; {} failed; 0 ignored", failed.len()));
            let binary = Some(Binary::named(PROCESSES_IN));
            let status = Some(if failed.is_empty() { 0 } else { 101 });
            Ran { name: "a".into(), binary, tally, status, time: Duration::ZERO }
        };
        let ran = [ended(&[]), ended(&["a::b"]), ended(&["c", "d"])];
        assert_eq!(alone(&ran), [1, 2]);
        assert!(failed_ones(&ran[2]).name.ends_with("--exact --test-threads=1 c d"));
        assert_eq!(alone(&[ended(&["a", "b"]), ended(&["c", "d"])]), [0; 0], "too many");
        let other = Ran { binary: Some(Binary::default()), ..ended(&["c"]) };
        assert_eq!(alone(&[ended(&["a"]), other]), [0; 0], "one is not in real time");
        let of_cargo = Ran { binary: None, ..ended(&["c"]) };
        assert_eq!(alone(&[of_cargo]), [0; 0]);
        let mut crashed = ended(&["a::b"]);
        crashed.tally.line("running 2 tests");
        assert_eq!(alone(&[ended(&["c"]), crashed]), [0; 0], "something crashed");
        let at_its_end = Ran { status: None, ..ended(&["a::b"]) };
        assert_eq!(alone(&[at_its_end]), [0; 0], "it crashed after its last line");
        let silent = Ran { tally: Tally::default(), status: Some(127), ..ended(&[]) };
        assert_eq!(alone(&[ended(&["c"]), silent]), [0; 0], "something crashed before its first line");
    }

    #[test]
    fn failed_checks_and_crashes_are_named_and_counted() {
        let ended = |name: &str, lines: &[&str], status| {
            let mut tally = Tally::default();
            lines.iter().for_each(|line| tally.line(line));
            Ran { name: name.into(), binary: None, tally, status, time: Duration::ZERO }
        };
        let result = "test result: FAILED. 1 passed; 1 failed; 0 ignored";
        let ran = [
            ended("good", &[], Some(0)),
            ended("check", &[], Some(1)),
            ended("killed", &[], None),
            ended("crashed", &["running 2 tests"], None),
            ended("tests", &["running 2 tests", "test a::b ... FAILED", result], Some(101)),
        ];
        let mut tally = Tally::default();
        ran.iter().for_each(|ran| tally.add(&ran.tally));
        count_failed_jobs(&mut tally, &ran);
        let outcome = judge(&tally, &BTreeSet::new(), &[], false);
        assert_eq!((outcome.good, outcome.failed), (false, 4));
        let names: Vec<&str> = outcome.failures.iter().map(String::as_str).collect();
        assert_eq!(names, ["a::b", "check", "crashed", "killed"]);
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
