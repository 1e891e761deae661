//! Time from the death of a creditor (`kill -9`) to the next token of a stream that borrows from it.
//!
//! Real processes on this machine with the bundled model: a gManager, a debtor with little memory and two creditors with
//! room for the whole context; the one that lends is killed. **Detection** is the time until the
//! debtor counts the loss (its status is asked every few milliseconds): nobody closes a dead process's connections, so
//! that is the transport's idle timeout. **Recomputation** is the rest: finding other memory, computing the lost tokens
//! again by chunked prefill there, and one decode step. Times of computing are this machine's.
//!
//! `cargo build --release -p lagoon && cargo bench -p lagoon-benches --bench recovery -- [--json]`.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Args {
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Tokens of context when the creditor dies.
    #[arg(long, value_delimiter = ',', default_value = "512,2048,8192")]
    contexts: Vec<u32>,
    /// KV capacity of the debtor, in tokens: what it can keep of the context.
    #[arg(long, default_value_t = 256)]
    debtor_tokens: u32,
    /// Runs of each context; medians are printed.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Flags of all instances, for example `--flag=--threads=1`.
    #[arg(long)]
    flag: Vec<String>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One run; times in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Run {
    context: u32,
    recomputed_tokens: u64,
    detection_ms: f64,
    recomputation_ms: f64,
    total_ms: f64,
    /// Median time of a token before.
    token_ms: f64,
}

const PATIENCE: Duration = Duration::from_secs(120);
const BLOCK_TOKENS: u32 = 32;
/// Tokens of an answer.
const TOKENS: u32 = 1024;
/// Tokens that are said before the creditor dies.
const SAID: usize = 16;

/// A process that is killed when dropped, with its ready line.
struct Process {
    child: Child,
    ready: Value,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn said(&self, field: &str) -> Result<&str> {
        self.ready[field].as_str().with_context(|| format!("{field} is missing in {}", self.ready))
    }
}

struct Bench {
    lagoon: PathBuf,
    dir: PathBuf,
    model: PathBuf,
}

impl Bench {
    fn run_to_end(&self, arguments: &[&str]) -> Result<()> {
        let output = Command::new(&self.lagoon).args(arguments).output()?;
        ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    fn start(&self, name: &str, arguments: &[String]) -> Result<Process> {
        let at = |file: &str| self.dir.join(file).display().to_string();
        self.run_to_end(&["certs", "issue", "--force", &self.dir.display().to_string(), name])?;
        let mut command = Command::new(&self.lagoon);
        command.args(arguments).arg(format!("--tls-ca={}", at("ca.pem")));
        command.arg(format!("--tls-cert={}", at(&format!("{name}.pem"))));
        command.arg(format!("--tls-key={}", at(&format!("{name}.key")))).arg("--json");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let child = command.spawn().context("start lagoon")?;
        let mut process = Process { child, ready: Value::Null };
        let mut line = String::new();
        BufReader::new(process.child.stdout.take().context("no stdout")?).read_line(&mut line)?;
        process.ready = serde_json::from_str(&line).with_context(|| format!("{name} did not start: {line:?}"))?;
        Ok(process)
    }

    fn instance(&self, name: &str, gmanager: &str, kv_tokens: u32, flags: &[String]) -> Result<Process> {
        let own = [
            "serve".to_owned(),
            self.model.display().to_string(),
            format!("--gmanager={gmanager}"),
            format!("--name={name}"),
            format!("--kv-tokens={kv_tokens}"),
            format!("--block-tokens={BLOCK_TOKENS}"),
            "--http=127.0.0.1:0".to_owned(),
            "--backend=cpu".to_owned(),
            "--calibrate=off".to_owned(),
        ];
        self.start(name, &[&own, flags].concat())
    }
}

/// A request's answer as it comes in.
fn request(http: &str, head: &str, body: &str) -> Result<BufReader<TcpStream>> {
    let mut stream = TcpStream::connect(http.parse::<SocketAddr>()?)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    let fields = "Connection: close\r\nContent-Type: application/json";
    write!(stream, "{head} HTTP/1.1\r\nHost: {http}\r\n{fields}\r\nContent-Length: {length}\r\n\r\n{body}")?;
    Ok(BufReader::new(stream))
}

fn status(http: &str) -> Result<Value> {
    let mut text = String::new();
    request(http, "GET /lagoon/status", "")?.read_to_string(&mut text)?;
    let (_, body) = text.split_once("\r\n\r\n").context("no body")?;
    serde_json::from_str(body).with_context(|| format!("a status: {body:?}"))
}

fn number(status: &Value, field: &str) -> Result<u64> {
    status[field].as_u64().with_context(|| format!("{field} is missing in {status}"))
}

/// Times of a stream's tokens, listened to by a thread of its own; an error is its end.
type Times = Arc<Mutex<(Vec<Instant>, Option<String>)>>;

fn listen(http: &str, context: u32) -> Result<Times> {
    // Tokens are of the vocabulary's middle, and no two neighbours alike.
    let prompt: Vec<u32> = (0..context).map(|i| 5 + (i * 37 + i / 7) % 1000).collect();
    let body = json!({
        "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true, "stream": true,
        "return_token_ids": true,
    });
    let answer = request(http, "POST /v1/completions", &body.to_string())?;
    let times = Times::default();
    let sink = Arc::clone(&times);
    std::thread::spawn(move || {
        for line in answer.lines() {
            let mut heard = sink.lock().expect("nobody panics with it");
            match line {
                Ok(line) if line.contains("\"error\"") => heard.1 = Some(line),
                Ok(line) if line.starts_with("data: {") => heard.0.push(Instant::now()),
                Ok(_) => {}
                Err(error) => heard.1 = Some(error.to_string()),
            }
        }
    });
    Ok(times)
}

/// Waits until so many tokens were said and returns the times.
fn wait_for(times: &Times, tokens: usize) -> Result<Vec<Instant>> {
    let since = Instant::now();
    loop {
        let heard = times.lock().expect("nobody panics with it").clone();
        if let Some(error) = heard.1 {
            bail!("the stream failed: {error}");
        }
        if heard.0.len() >= tokens {
            return Ok(heard.0);
        }
        ensure!(since.elapsed() < PATIENCE, "{} tokens after {PATIENCE:?}", heard.0.len());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn wait_until(http: &str, what: &str, satisfied: impl Fn(&Value) -> Result<bool>) -> Result<Instant> {
    let since = Instant::now();
    while !satisfied(&status(http)?)? {
        ensure!(since.elapsed() < PATIENCE, "not {what} after {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(3));
    }
    Ok(Instant::now())
}

fn measure(bench: &Bench, args: &Args, context: u32) -> Result<Run> {
    let room = (context + TOKENS).next_multiple_of(BLOCK_TOKENS);
    let gmanager = bench.start("gm", &["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned()])?;
    let quic = gmanager.said("quic")?;
    let debtor = bench.instance("debtor", quic, args.debtor_tokens, &args.flag)?;
    let mut creditors = ["one", "two"]
        .into_iter()
        .map(|name| bench.instance(name, quic, room, &args.flag))
        .collect::<Result<Vec<Process>>>()?;
    let http = debtor.said("http")?;
    // Each lends almost all that it has.
    let some = u64::from((args.debtor_tokens + room + room / 2) / BLOCK_TOKENS);
    wait_until(http, "three instances", |s| Ok(number(s, "pool_blocks_total")? > some))?;
    let times = listen(http, context)?;
    let before = wait_for(&times, SAID)?;
    let lent = |creditor: &Process| number(&status(creditor.said("http")?)?, "blocks_lent");
    let lends = if lent(&creditors[0])? > lent(&creditors[1])? { 0 } else { 1 };
    ensure!(lent(&creditors[lends])? > 0, "nothing is borrowed: --debtor-tokens is too large");

    let killed = Instant::now();
    creditors[lends].child.kill()?;
    let detected = wait_until(http, "noticed", |s| Ok(number(s, "recoveries")? > 0))?;
    // A token may have been on its way when the creditor died.
    let said = times.lock().expect("nobody panics with it").0.iter().filter(|at| **at < detected).count();
    let next = wait_for(&times, said + 1)?[said];
    let recomputed_tokens = number(&status(http)?, "recomputed_tokens")?;
    ensure!(recomputed_tokens > 0, "nothing was computed again");
    let mut gaps: Vec<f64> = before.windows(2).map(|w| (w[1] - w[0]).as_secs_f64() * 1e3).collect();
    let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
    Ok(Run {
        context,
        recomputed_tokens,
        detection_ms: ms(killed, detected),
        recomputation_ms: ms(detected, next),
        total_ms: ms(killed, next),
        token_ms: median(&mut gaps),
    })
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let _ = args.bench;
    let exe = std::env::current_exe()?;
    let lagoon = exe.parent().and_then(Path::parent).context("no build folder")?.join("lagoon");
    ensure!(lagoon.exists(), "{} is missing: cargo build --release -p lagoon", lagoon.display());
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/passkey");
    let dir = std::env::temp_dir().join(format!("lagoon-recovery-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let bench = Bench { lagoon, dir, model };
    bench.run_to_end(&["certs", "init", &bench.dir.display().to_string()])?;
    let mut runs = Vec::new();
    for _ in 0..args.repeats {
        for context in &args.contexts {
            runs.push(measure(&bench, &args, *context).with_context(|| format!("{context} tokens"))?);
        }
    }
    std::fs::remove_dir_all(&bench.dir)?;
    if args.json {
        let result = json!({ "debtor_tokens": args.debtor_tokens, "flags": args.flag, "runs": runs });
        println!("{}", serde_json::to_string_pretty(&result)?);
        return Ok(());
    }
    let columns = ["context", "recomputed", "detection ms", "recomputation ms", "total ms", "token ms"];
    println!("{}", columns.map(|c| format!("{c:>17}")).concat());
    for context in &args.contexts {
        let of = |f: fn(&Run) -> f64| {
            let mut values: Vec<f64> = runs.iter().filter(|r| r.context == *context).map(f).collect();
            format!("{:>17.1}", median(&mut values))
        };
        let recomputed = runs.iter().find(|r| r.context == *context).map_or(0, |r| r.recomputed_tokens);
        let times = [of(|r| r.detection_ms), of(|r| r.recomputation_ms), of(|r| r.total_ms), of(|r| r.token_ms)];
        println!("{context:>17}{recomputed:>17}{}", times.concat());
    }
    Ok(())
}
