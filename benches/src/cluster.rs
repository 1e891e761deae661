//! Real clusters on this machine for benchmarks: processes of `lagoon`, or of `lagoon-paced` on a modelled device,
//! their HTTP pages, and streams of answers.

use anyhow::{Context, Result, ensure};
use lagoon_pace::PaceProfile;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Timeout of every wait in a benchmark.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// The `lagoon` binary, the bundled model, and a folder for certificates that is removed when dropped.
#[derive(Debug)]
pub struct Lagoon {
    pub binary: PathBuf,
    /// The file with the profile of the modelled device, if any.
    pace: Option<PathBuf>,
    pub dir: PathBuf,
    pub model: PathBuf,
}

/// Name of the certificate for operators' commands.
const OPERATOR: &str = "operator";

/// The binary of package `name` beside this benchmark's.
fn built(name: &str) -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let binary = exe.parent().and_then(Path::parent).context("no build folder")?.join(name);
    ensure!(binary.exists(), "{} is missing: cargo build --release -p {name}", binary.display());
    Ok(binary)
}

impl Drop for Lagoon {
    fn drop(&mut self) {
        // Leftovers are in the folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Lagoon {
    /// The binary beside this benchmark's executable, with a new CA. `what` names its folder.
    pub fn new(what: &str) -> Result<Self> {
        let binary = built("lagoon")?;
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/passkey");
        let dir = std::env::temp_dir().join(format!("lagoon-{what}-{}", std::process::id()));
        // `certs init` takes a folder for its owner only.
        std::os::unix::fs::DirBuilderExt::mode(std::fs::DirBuilder::new().recursive(true), 0o700).create(&dir)?;
        let this = Self { binary, pace: None, dir, model };
        let dir_name = this.dir.display().to_string();
        this.run_to_end(&["certs", "init", &dir_name])?;
        this.run_to_end(&["certs", "issue", &dir_name, OPERATOR, "--role=operator"])?;
        Ok(this)
    }

    /// Runs instances on a modelled device: see `lagoon_pace::Paced`.
    pub fn paced(mut self, profile: &PaceProfile) -> Result<Self> {
        let path = self.dir.join("pace.json");
        std::fs::write(&path, serde_json::to_vec(profile)?)?;
        self.binary = built("lagoon-paced")?;
        self.pace = Some(path);
        Ok(self)
    }

    /// A command of the binary.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.binary);
        command.envs(self.pace.as_ref().map(|path| ("LAGOON_PACE", path)));
        command
    }

    /// Runs a command of the binary, and waits for its end.
    pub fn run_to_end(&self, arguments: &[&str]) -> Result<()> {
        let output = self.command().args(arguments).output()?;
        ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Runs a command of an operator on the pool of a gManager to its end.
    ///
    /// # Errors
    /// If the command fails; with what it printed.
    pub fn operate(&self, arguments: &[&str], gmanager: &str) -> Result<()> {
        let (tls, gmanager) = (self.tls(OPERATOR), format!("--gmanager={gmanager}"));
        let [ca, cert, key] = tls.each_ref().map(String::as_str);
        self.run_to_end(&[arguments, &[&gmanager, ca, cert, key]].concat())
    }

    /// Flags with a node's certificates.
    pub fn tls(&self, name: &str) -> [String; 3] {
        let at = |file: &str| self.dir.join(file).display().to_string();
        let (cert, key) = (at(&format!("{name}.pem")), at(&format!("{name}.key")));
        [format!("--tls-ca={}", at("ca.pem")), format!("--tls-cert={cert}"), format!("--tls-key={key}")]
    }

    /// Starts a command that announces itself.
    pub fn start(&self, name: &str, arguments: &[String]) -> Result<Process> {
        let role = match arguments.first().map(String::as_str) {
            Some("gmanager") => "gmanager",
            Some("gateway") => "gateway,operator",
            _ => "instance",
        };
        let (dir, role) = (self.dir.display().to_string(), format!("--role={role}"));
        self.run_to_end(&["certs", "issue", "--force", &dir, name, &role])?;
        let mut command = self.command();
        command.args(arguments).args(self.tls(name)).arg("--json");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = Process { child: command.spawn().context("start lagoon")?, ready: Value::Null };
        let mut line = String::new();
        BufReader::new(process.child.stdout.take().context("no stdout")?).read_line(&mut line)?;
        process.ready = serde_json::from_str(&line).with_context(|| format!("{name} did not start: {line:?}"))?;
        Ok(process)
    }
}

impl Lagoon {
    /// Starts a whole pool with these flags of `lagoon up` behind `port`.
    ///
    /// # Errors
    /// If it does not start; with what it printed.
    pub fn up(&self, flags: &[String], port: u16) -> Result<Up> {
        let log = self.dir.join("up.log");
        let mut up = self.command();
        up.args(["up", "--json", "--exit-with-stdin", "--backend=cpu", "--threads=1", "--kv-dtype=f16"]);
        up.arg(&self.model).arg(format!("--port={port}")).args(flags);
        up.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(std::fs::File::create(&log)?);
        let mut up = Up(Process { child: up.spawn().context("start lagoon up")?, ready: Value::Null });
        let mut line = String::new();
        BufReader::new(up.0.child.stdout.take().context("no stdout")?).read_line(&mut line)?;
        let reply = || std::fs::read_to_string(&log).unwrap_or_default();
        ensure!(!line.is_empty(), "the cluster did not start: {}", reply());
        up.0.ready = serde_json::from_str(&line).with_context(|| format!("lagoon up printed {line:?}"))?;
        Ok(up)
    }

    /// Starts an instance of no pool with these flags of `lagoon serve`, on the modelled device of the profile `pace`.
    ///
    /// # Errors
    /// If it does not start; with what it printed.
    pub fn alone(&self, pace: &Path, flags: &[String]) -> Result<Process> {
        let log = self.dir.join("serve.log");
        let mut serve = Command::new(&self.binary);
        serve.env("LAGOON_PACE", pace).arg("serve").arg(&self.model);
        serve.args(["--json", "--http=127.0.0.1:0", "--backend=cpu", "--threads=1", "--kv-dtype=f16"]).args(flags);
        serve.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(std::fs::File::create(&log)?);
        let mut process = Process { child: serve.spawn().context("start lagoon serve")?, ready: Value::Null };
        let mut line = String::new();
        BufReader::new(process.child.stdout.take().context("no stdout")?).read_line(&mut line)?;
        let reply = || std::fs::read_to_string(&log).unwrap_or_default();
        process.ready = serde_json::from_str(&line).with_context(|| format!("it did not start: {}", reply()))?;
        Ok(process)
    }

    /// Starts a pool (see [`Lagoon::up`]), replays a trace on it, and stops it.
    /// Returns the load generator's report, with `devices_late_share` and `devices_modelled_s` of paced devices, and
    /// `stages`: mean times of the requests whose prompt another instance prefilled, and their number (`pulled`).
    pub fn replay(&self, flags: &[String], port: u16, trace: &Path) -> Result<Value> {
        let up = self.up(flags, port)?;
        let bench = self
            .command()
            .args(["bench", "--json", &format!("--url=http://127.0.0.1:{port}")])
            .arg(format!("--trace={}", trace.display()))
            .stderr(Stdio::inherit())
            .output()?;
        let (late_us, modelled_us) = paced_us(&format!("127.0.0.1:{port}"))?;
        let stages = stages(&format!("127.0.0.1:{port}"))?;
        drop(up);
        let mut report: Value = serde_json::from_slice(&bench.stdout)
            .with_context(|| format!("lagoon bench printed {:?}", String::from_utf8_lossy(&bench.stdout)))?;
        report["devices_late_share"] = json!(late_us / f64::max(modelled_us, 1.0));
        report["devices_modelled_s"] = json!(modelled_us * 1e-6);
        report["stages"] = stages;
        Ok(report)
    }
}

/// A pool started by `lagoon up`; it ends with all its processes when dropped.
#[derive(Debug)]
pub struct Up(Process);

impl Drop for Up {
    fn drop(&mut self) {
        // Its children watch this pipe.
        drop(self.0.child.stdin.take());
        // A failed wait: the process is killed by the next drop.
        let _ = self.0.child.wait();
    }
}

/// Sums late and modelled microseconds of the paced devices of a pool.
fn paced_us(gateway: &str) -> Result<(f64, f64)> {
    let mut sums = (0.0, 0.0);
    for instance in status(gateway)?["instances"].as_array().context("no instances")? {
        let (late, modelled) = paced_us_of(instance["http_addr"].as_str().context("an instance without http")?)?;
        sums = (sums.0 + late, sums.1 + modelled);
    }
    Ok(sums)
}

/// See [`Lagoon::replay`].
fn stages(gateway: &str) -> Result<Value> {
    const TIMES: [&str; 4] = ["queue_ms", "prefill_ms", "decode_queue_ms", "transfer_ms"];
    let (mut pulled, mut sums) = (0, [0; TIMES.len()]);
    for instance in status(gateway)?["instances"].as_array().context("no instances")? {
        let own = status(instance["http_addr"].as_str().context("an instance without http")?)?;
        pulled += number(&own, "/prefill/pulled")?;
        for (sum, time) in sums.iter_mut().zip(TIMES) {
            *sum += number(&own, &format!("/prefill/times/{time}"))?;
        }
    }
    let mut stages = json!({ "pulled": pulled });
    for (sum, time) in sums.into_iter().zip(TIMES).filter(|_| pulled > 0) {
        stages[time] = json!(sum as f64 / pulled as f64);
    }
    Ok(stages)
}

fn paced_us_of(http: &str) -> Result<(f64, f64)> {
    let [late, modelled] = counters(http, ["lagoon_paced_late_us_total", "lagoon_paced_modelled_us_total"])?;
    Ok((late, modelled))
}

/// Values of an instance's counters by name and labels; 0 for one that it does not have.
pub fn counters<const N: usize>(http: &str, names: [&str; N]) -> Result<[f64; N]> {
    let text = get(http, "/metrics")?;
    let value = |line: &str, name: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    Ok(names.map(|name| text.lines().find_map(|line| value(line, name)).unwrap_or(0.0)))
}

/// A process that is killed when dropped, with its ready line.
#[derive(Debug)]
pub struct Process {
    child: Child,
    pub ready: Value,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Kills the process at once, as a crash would.
    pub fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill()?)
    }

    /// A field of the process's announcement.
    pub fn announced(&self, field: &str) -> Result<&str> {
        self.ready[field].as_str().with_context(|| format!("{field} is missing in {}", self.ready))
    }
}

/// Sends a request; returns its response as it arrives.
pub fn request(http: &str, head: &str, body: &str) -> Result<BufReader<TcpStream>> {
    let mut stream = TcpStream::connect(http.parse::<SocketAddr>()?)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let length = body.len();
    let fields = "Connection: close\r\nContent-Type: application/json";
    write!(stream, "{head} HTTP/1.1\r\nHost: {http}\r\n{fields}\r\nContent-Length: {length}\r\n\r\n{body}")?;
    Ok(BufReader::new(stream))
}

/// The body of a GET request's answer.
pub fn get(http: &str, path: &str) -> Result<String> {
    let mut text = String::new();
    request(http, &format!("GET {path}"), "")?.read_to_string(&mut text)?;
    Ok(text)
}

/// The status of an instance or gateway.
pub fn status(http: &str) -> Result<Value> {
    let text = get(http, "/lagoon/status")?;
    let (_, body) = text.split_once("\r\n\r\n").context("no body")?;
    serde_json::from_str(body).with_context(|| format!("a status: {body:?}"))
}

/// A number of a status.
pub fn number(status: &Value, pointer: &str) -> Result<u64> {
    status.pointer(pointer).and_then(Value::as_u64).with_context(|| format!("{pointer} is missing in {status}"))
}

/// Waits until an instance's pool has memory of other instances.
pub fn wait_for_others(http: &str) -> Result<()> {
    let since = Instant::now();
    loop {
        let status = status(http)?;
        if number(&status, "/pool_blocks_total")? > number(&status, "/blocks_total")? {
            return Ok(());
        }
        ensure!(since.elapsed() < TIMEOUT, "no other instance comes");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Arrival times of a stream's tokens, recorded by a thread of its own; an error ends the stream.
pub type Times = Arc<Mutex<(Vec<Instant>, Option<String>)>>;

/// Times of a streamed answer of `tokens` tokens to a prompt of `context`.
pub fn listen(http: &str, context: u32, tokens: u32) -> Result<Times> {
    // Tokens from the vocabulary's middle, no two neighbours alike.
    let prompt: Vec<u32> = (0..context).map(|i| 5 + (i * 37 + i / 7) % 1000).collect();
    let body = json!({
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "stream": true,
        "return_token_ids": true,
    });
    let answer = request(http, "POST /v1/completions", &body.to_string())?;
    let times = Times::default();
    let sink = Arc::clone(&times);
    std::thread::spawn(move || {
        for line in answer.lines() {
            let mut recorded = sink.lock().expect("nobody panics with it");
            match line {
                Ok(line) if line.contains("\"error\"") => recorded.1 = Some(line),
                Ok(line) if line.starts_with("data: {") => recorded.0.push(Instant::now()),
                Ok(_) => {}
                Err(error) => recorded.1 = Some(error.to_string()),
            }
        }
    });
    Ok(times)
}

/// Lateness of an instance's paced device, as a share of the modelled time.
pub fn late_share(http: &str) -> Result<f64> {
    let (late, modelled) = paced_us_of(http)?;
    Ok(late / modelled.max(1.0))
}
