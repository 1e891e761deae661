//! Test binaries, and other commands that print as they do, run several at a time.
//!
//! `cargo test` runs binaries one after the other: where one waits, or has a single long test left, processors idle.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cargo_metadata::Message;

use crate::libtest::Tally;
use crate::workspace;

/// A test binary that cargo has built.
#[derive(Debug, Clone, Default)]
pub(crate) struct Binary {
    /// `FOLDER: KIND TARGET`.
    pub(crate) name: String,
    program: PathBuf,
    /// Its package's folder, in which cargo runs it.
    folder: PathBuf,
}

impl Binary {
    #[cfg(test)]
    pub(crate) fn named(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// A run of its tests that `arguments` select.
    pub(crate) fn job(&self, arguments: &[&str]) -> Job {
        let mut command = Command::new(&self.program);
        command.args(arguments).current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        let name = format!("{} {}", self.name, arguments.join(" "));
        Job { name: name.trim_end().to_owned(), command, binary: Some(self.clone()) }
    }
}

/// Builds the tests of the workspace that `selected` names to cargo, all of them if it is empty. Their names begin with `prefix`.
///
/// # Errors
/// If they do not compile.
pub(crate) fn build(root: &Path, prefix: &str, selected: &[&str]) -> Result<Vec<Binary>> {
    let mut cargo = workspace::cargo();
    cargo
        .args(["test", "--locked", "--release", "--workspace", "--no-run", "--message-format=json-render-diagnostics"])
        .args(selected)
        .current_dir(root)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = cargo.spawn().context("run cargo test --no-run")?;
    let output = child.stdout.take().context("cargo's output")?;
    let mut binaries = Vec::new();
    for message in Message::parse_stream(BufReader::new(output)) {
        let Message::CompilerArtifact(artifact) = message.context("parse cargo's messages")? else { continue };
        let Some(program) = artifact.executable.filter(|_| artifact.profile.test) else { continue };
        let folder = artifact.manifest_path.parent().context("a manifest's folder")?;
        let folder = folder.as_std_path().to_owned();
        let (target, package) = (&artifact.target, workspace::relative(root, &folder));
        let kind = target.kind.first().map_or_else(|| "lib".to_owned(), ToString::to_string);
        let name = format!("{prefix}{package}: {kind} {}", target.name);
        binaries.push(Binary { name, program: program.into(), folder });
    }
    ensure!(child.wait().context("wait for cargo")?.success(), "the tests do not build");
    ensure!(!binaries.is_empty(), "cargo built no test");
    Ok(binaries)
}

/// A command that prints as the test harness does.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) name: String,
    pub(crate) command: Command,
    /// `None` for cargo itself.
    pub(crate) binary: Option<Binary>,
}

impl Job {
    /// The same job behind those of ordinary priority.
    pub(crate) fn behind(self) -> Self {
        if !cfg!(unix) {
            return self;
        }
        let mut command = Command::new("nice");
        command.args(["-n", "10"]).arg(self.command.get_program()).args(self.command.get_args());
        for (name, value) in self.command.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        self.command.get_current_dir().map(|folder| command.current_dir(folder));
        Self { command, ..self }
    }
}

/// A job's end.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) name: String,
    pub(crate) binary: Option<Binary>,
    pub(crate) tally: Tally,
    /// The status of the command: 0, or that of the harness where tests failed. A crash has another one.
    pub(crate) status: Option<i32>,
    pub(crate) time: Duration,
}

/// Status of a harness whose tests failed.
const TESTS_FAILED: i32 = 101;

impl Ran {
    pub(crate) fn good(&self) -> bool {
        self.status == Some(0)
    }

    /// The tests that failed, if nothing else did: no crash, no build that failed.
    pub(crate) fn failures(&self) -> Option<&BTreeSet<String>> {
        let tests_failed = self.status == Some(TESTS_FAILED) && self.tally.failed > 0;
        let named = self.tally.running == 0 && self.tally.failed == self.tally.failures.len();
        (named && (self.good() || tests_failed)).then_some(&self.tally.failures)
    }
}

/// What the harness prints of a test that may hang: shown at once.
const RUNS_LONG: &str = " has been running for over ";

/// Runs jobs in their order, `at_once` of them at a time; prints a job's output when it has ended.
///
/// # Errors
/// If one cannot be started.
pub(crate) fn run(jobs: Vec<Job>, at_once: usize) -> Result<Vec<Ran>> {
    let (jobs, ended) = (Mutex::new(jobs.into_iter()), Mutex::new(Vec::new()));
    let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
    let worker = || -> Result<()> {
        while let Some(job) = next() {
            println!("running {}", job.name);
            let (ran, output) = run_one(job)?;
            let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            println!("\n== {} ({:.0} s)", ran.name, ran.time.as_secs_f64());
            std::io::stdout().write_all(&output).context("print the tests' output")?;
            ended.push(ran);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(worker)).collect();
        let ends =
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ends.collect::<Result<Vec<()>>>()
    })?;
    Ok(ended.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Returns its output, too: what the harness printed, then what the tests wrote to standard error.
fn run_one(Job { name, mut command, binary }: Job) -> Result<(Ran, Vec<u8>)> {
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("run {name}"))?;
    let errors = child.stderr.take();
    let errors = std::thread::spawn(move || {
        let mut text = Vec::new();
        errors.map(|mut errors| std::io::Read::read_to_end(&mut errors, &mut text));
        text
    });
    let (mut tally, mut output) = (Tally::default(), Vec::new());
    for line in BufReader::new(child.stdout.take().context("a command's output")?).split(b'\n') {
        let line = line.context("read the tests' output")?;
        let text = String::from_utf8_lossy(&line);
        tally.line(text.trim_end());
        if text.contains(RUNS_LONG) {
            println!("{name}: {text}");
        }
        output.extend(line);
        output.push(b'\n');
    }
    let status = child.wait().with_context(|| format!("wait for {name}"))?;
    output.extend(errors.join().unwrap_or_default());
    let ran = Ran { name, binary, tally, status: status.code(), time: started.elapsed() };
    if !ran.good() {
        writeln!(output, "{}: {status}", ran.name)?;
    }
    Ok((ran, output))
}
