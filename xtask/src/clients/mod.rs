//! `cargo xtask clients`: clients from PyPI, unmodified, against the gateway of a real pool whose requests borrow.
//!
//! Each client is a script of tests/clients, run with a Python of its set of pinned packages. A script asserts its results,
//! and that rBlocks were borrowed for it; its last line is a [`Report`].

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::workspace;
use pool::Pool;
use venv::Set;

mod model;
mod pool;
mod venv;

/// Most seconds of one script.
const SCRIPT_SECONDS_MAX: u64 = 900;
/// Lines of a failed script's output that are shown.
const LINES_SHOWN: usize = 60;

/// A script of tests/clients, by its name without `.py`, and the packages that it needs.
struct Client {
    name: &'static str,
    set: &'static Set,
}

/// 0.6 GB.
const LIGHT: Set = Set { folder: "clients-venv", requirements: "requirements.txt" };
/// torch and CUDA's libraries: 5.7 GB.
const GUIDELLM: Set = Set { folder: "clients-venv-guidellm", requirements: "requirements-guidellm.txt" };
/// 0.9 GB.
const AIPERF: Set = Set { folder: "clients-venv-aiperf", requirements: "requirements-aiperf.txt" };

const CLIENTS: [Client; 11] = [
    Client { name: "openai_sync", set: &LIGHT },
    Client { name: "openai_async", set: &LIGHT },
    Client { name: "openai_structured", set: &LIGHT },
    Client { name: "openai_responses", set: &LIGHT },
    Client { name: "openai_embeddings", set: &LIGHT },
    Client { name: "langchain_chat", set: &LIGHT },
    Client { name: "langchain_structured", set: &LIGHT },
    Client { name: "anthropic_messages", set: &LIGHT },
    Client { name: "lm_eval_completions", set: &LIGHT },
    Client { name: "guidellm_benchmark", set: &GUIDELLM },
    Client { name: "aiperf_profile", set: &AIPERF },
];

/// Which clients run, and what is printed.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Run these scripts only
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Leave out those whose packages take long to install: torch with CUDA's libraries, 5.7 GB
    #[arg(long)]
    sample: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Options {
    pub(crate) fn sample() -> Self {
        Self { sample: true, ..Self::default() }
    }
}

/// What a script prints as its last line.
#[derive(Debug, Deserialize)]
struct Report {
    checks: u32,
    borrowed_rblocks: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Ok,
    Failed,
    /// Not among those of `--only`, or left out by `--sample`.
    Left,
}

/// A line of the table.
#[derive(Debug, Serialize)]
struct Row {
    client: &'static str,
    outcome: Outcome,
    checks: u32,
    borrowed_rblocks: i64,
    seconds: f64,
}

impl Row {
    fn left_out(client: &Client, outcome: Outcome) -> Self {
        Self { client: client.name, outcome, checks: 0, borrowed_rblocks: 0, seconds: 0.0 }
    }
}

/// Runs the clients that `options` name; returns whether all of them are content.
pub(crate) fn run(root: &Path, options: &Options) -> Result<bool> {
    for name in &options.only {
        let names = || CLIENTS.map(|client| client.name).join(", ");
        ensure!(CLIENTS.iter().any(|client| client.name == name), "there is no client {name}\nhint: {}", names());
    }
    let started = Instant::now();
    let target = workspace::target(root);
    let place = Place::new(root, &target);
    let pythons = pythons(&place, options)?;
    let installed = started.elapsed();
    let pool = Pool::start(&place)?;
    let mut rows = Vec::new();
    for client in &CLIENTS {
        rows.push(match outcome_before(client, options) {
            Some(outcome) => Row::left_out(client, outcome),
            None => run_client(&place, client, &pythons[client.set.folder], &pool)?,
        });
    }
    let good = pool.stop().inspect_err(|error| eprintln!("error: {error:#}")).is_ok()
        && rows.iter().all(|row| row.outcome != Outcome::Failed);
    let seconds = (installed.as_secs_f64(), started.elapsed().as_secs_f64());
    if options.json {
        let report = serde_json::json!({ "ok": good, "clients": rows, "install_s": seconds.0, "seconds": seconds.1 });
        println!("{report}");
    } else {
        print!("{}", table(&rows));
        println!("clients: {} in {:.0} s, {:.0} s of them for packages", word(good), seconds.1, seconds.0);
    }
    Ok(good)
}

/// Installs the packages of the clients that `options` name, where they are not there.
pub(crate) fn install(root: &Path, options: &Options) -> Result<()> {
    let target = workspace::target(root);
    pythons(&Place::new(root, &target), options).map(drop)
}

/// Why a client does not run.
fn outcome_before(client: &Client, options: &Options) -> Option<Outcome> {
    let is_named = options.only.is_empty() || options.only.iter().any(|name| name == client.name);
    let is_quick = client.set.folder != GUIDELLM.folder;
    let runs = is_named && (is_quick || !options.sample);
    (!runs).then_some(Outcome::Left)
}

/// Folders of a run.
struct Place<'a> {
    root: &'a Path,
    target: &'a Path,
    /// Written anew by each run.
    folder: PathBuf,
}

impl<'a> Place<'a> {
    fn new(root: &'a Path, target: &'a Path) -> Self {
        Self { root, target, folder: target.join("clients") }
    }

    fn scripts(&self) -> PathBuf {
        self.root.join("tests/clients")
    }
}

/// The Python of each set of packages that the chosen clients need, by the set's folder.
fn pythons(place: &Place<'_>, options: &Options) -> Result<BTreeMap<&'static str, PathBuf>> {
    let mut out = BTreeMap::new();
    for client in CLIENTS.iter().filter(|client| outcome_before(client, options).is_none()) {
        if !out.contains_key(client.set.folder) {
            out.insert(client.set.folder, client.set.install(place)?);
        }
    }
    Ok(out)
}

/// Runs a script to its end, and shows the end of its output if it fails.
fn run_client(place: &Place<'_>, client: &Client, python: &Path, pool: &Pool) -> Result<Row> {
    let scratch = place.folder.join(client.name);
    std::fs::create_dir_all(&scratch).with_context(|| format!("create {}", scratch.display()))?;
    let log = place.folder.join(format!("{}.txt", client.name));
    let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
    let mut command = Command::new(python);
    command
        .arg(place.scripts().join(client.name).with_extension("py"))
        .current_dir(&scratch)
        .envs(pool.variables())
        .env("LAGOON_SCRATCH", &scratch)
        .env("PYTHONUNBUFFERED", "1")
        // No proxy stands between this machine and itself.
        .env("NO_PROXY", "127.0.0.1")
        .env("no_proxy", "127.0.0.1")
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output);
    eprintln!("clients: {}", client.name);
    let started = Instant::now();
    let finished = end_of(command, Duration::from_secs(SCRIPT_SECONDS_MAX)).context(client.name)?;
    let seconds = started.elapsed().as_secs_f64();
    let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
    let report: Option<Report> = text.lines().rev().find_map(|line| serde_json::from_str(line).ok());
    let outcome = if finished && report.is_some() { Outcome::Ok } else { Outcome::Failed };
    if outcome == Outcome::Failed {
        eprintln!("{}\nerror: {} failed; all of its output is in {}", tail(&text), client.name, log.display());
    }
    let (checks, borrowed_rblocks) = report.map_or((0, 0), |report| (report.checks, report.borrowed_rblocks));
    Ok(Row { client: client.name, outcome, checks, borrowed_rblocks, seconds })
}

/// Whether a command succeeds within the time. It and its children are killed after that.
fn end_of(mut command: Command, limit: Duration) -> Result<bool> {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().context("start")?;
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().context("wait")? {
            return Ok(status.success());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    kill(&mut child);
    eprintln!("error: it did not end within {} s", limit.as_secs());
    Ok(false)
}

/// Kills a process with its group, and waits for its end.
fn kill(child: &mut Child) {
    if cfg!(unix) {
        // A group that is gone is what is wanted.
        let _ = Command::new("kill").args(["-s", "KILL", "--", &format!("-{}", child.id())]).status();
    }
    let _ = child.kill();
    let _ = child.wait();
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n")
}

fn word(good: bool) -> &'static str {
    if good { "ok" } else { "failed" }
}

fn table(rows: &[Row]) -> String {
    let mut out = format!("{:<22}{:>8}{:>19}{:>9}  outcome\n", "client", "checks", "borrowed rBlocks", "seconds");
    for row in rows {
        let outcome = match row.outcome {
            Outcome::Ok => "ok",
            Outcome::Failed => "failed",
            Outcome::Left => "left out",
        };
        out += &match row.outcome {
            Outcome::Ok | Outcome::Failed => format!(
                "{:<22}{:>8}{:>19}{:>9.1}  {outcome}\n",
                row.client, row.checks, row.borrowed_rblocks, row.seconds
            ),
            _ => format!("{:<22}{:>8}{:>19}{:>9}  {outcome}\n", row.client, "-", "-", "-"),
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> &'static Client {
        CLIENTS.iter().find(|client| client.name == name).unwrap()
    }

    #[test]
    fn every_script_is_there_and_listed() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients");
        let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut scripts: Vec<String> = files.filter_map(|name| name.strip_suffix(".py").map(str::to_owned)).collect();
        scripts.retain(|name| name != "pool");
        scripts.sort_unstable();
        let mut listed = CLIENTS.map(|client| client.name).to_vec();
        listed.sort_unstable();
        assert_eq!(scripts, listed);
    }

    #[test]
    fn options_choose_the_clients() {
        let (sync, heavy) = (named("openai_sync"), named("guidellm_benchmark"));
        let plain = Options::default();
        assert_eq!(outcome_before(sync, &plain), None);
        assert_eq!(outcome_before(heavy, &plain), None);
        let only = Options { only: vec![heavy.name.to_owned()], ..Options::default() };
        assert_eq!((outcome_before(heavy, &only), outcome_before(sync, &only)), (None, Some(Outcome::Left)));
        let sample = Options::sample();
        assert_eq!((outcome_before(heavy, &sample), outcome_before(sync, &sample)), (Some(Outcome::Left), None));
    }

    #[test]
    fn a_command_is_ended_at_its_limit() {
        let shell = |text: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", text]);
            command
        };
        assert!(end_of(shell("exit 0"), Duration::from_secs(60)).unwrap());
        assert!(!end_of(shell("exit 1"), Duration::from_secs(60)).unwrap());
        assert!(!end_of(shell("sleep 600 & wait"), Duration::from_millis(50)).unwrap());
    }

    #[test]
    fn the_table_has_a_line_a_client() {
        let row = Row { client: "a", outcome: Outcome::Ok, checks: 3, borrowed_rblocks: 17, seconds: 1.25 };
        let text = table(&[row, Row::left_out(named("openai_sync"), Outcome::Left)]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>(), ["a", "3", "17", "1.2", "ok"]);
        assert!(lines[2].ends_with("left out"), "{text}");
        assert_eq!(tail("a\nb"), "a\nb");
        assert_eq!(tail(&"a\n".repeat(100)).lines().count(), LINES_SHOWN);
    }
}
