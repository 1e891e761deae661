//! Real clusters on this machine for benchmarks: processes of the `lagoon` binary beside the benchmark, their pages, and
//! streams that are listened to.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest wait of a benchmark for anything.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The `lagoon` binary, the bundled model, and a folder for certificates that is removed when dropped.
#[derive(Debug)]
pub struct Lagoon {
    binary: PathBuf,
    pub dir: PathBuf,
    pub model: PathBuf,
}

impl Drop for Lagoon {
    fn drop(&mut self) {
        // What stays behind is in the folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Lagoon {
    /// The binary beside this benchmark's, with a new CA.
    pub fn new(what: &str) -> Result<Self> {
        let exe = std::env::current_exe()?;
        let binary = exe.parent().and_then(Path::parent).context("no build folder")?.join("lagoon");
        ensure!(binary.exists(), "{} is missing: cargo build --release -p lagoon", binary.display());
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/passkey");
        let dir = std::env::temp_dir().join(format!("lagoon-{what}-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let this = Self { binary, dir, model };
        this.run_to_end(&["certs", "init", &this.dir.display().to_string()])?;
        Ok(this)
    }

    pub fn run_to_end(&self, arguments: &[&str]) -> Result<()> {
        let output = Command::new(&self.binary).args(arguments).output()?;
        ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    pub fn tls(&self, name: &str) -> [String; 3] {
        let at = |file: &str| self.dir.join(file).display().to_string();
        let (cert, key) = (at(&format!("{name}.pem")), at(&format!("{name}.key")));
        [format!("--tls-ca={}", at("ca.pem")), format!("--tls-cert={cert}"), format!("--tls-key={key}")]
    }

    pub fn start(&self, name: &str, arguments: &[String]) -> Result<Process> {
        self.run_to_end(&["certs", "issue", "--force", &self.dir.display().to_string(), name])?;
        let mut command = Command::new(&self.binary);
        command.args(arguments).args(self.tls(name)).arg("--json");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = Process { child: command.spawn().context("start lagoon")?, ready: Value::Null };
        let mut line = String::new();
        BufReader::new(process.child.stdout.take().context("no stdout")?).read_line(&mut line)?;
        process.ready = serde_json::from_str(&line).with_context(|| format!("{name} did not start: {line:?}"))?;
        Ok(process)
    }
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
    pub fn said(&self, field: &str) -> Result<&str> {
        self.ready[field].as_str().with_context(|| format!("{field} is missing in {}", self.ready))
    }
}

/// A request's answer as it comes in.
pub fn request(http: &str, head: &str, body: &str) -> Result<BufReader<TcpStream>> {
    let mut stream = TcpStream::connect(http.parse::<SocketAddr>()?)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    let fields = "Connection: close\r\nContent-Type: application/json";
    write!(stream, "{head} HTTP/1.1\r\nHost: {http}\r\n{fields}\r\nContent-Length: {length}\r\n\r\n{body}")?;
    Ok(BufReader::new(stream))
}

pub fn get(http: &str, path: &str) -> Result<String> {
    let mut text = String::new();
    request(http, &format!("GET {path}"), "")?.read_to_string(&mut text)?;
    Ok(text)
}

pub fn status(http: &str) -> Result<Value> {
    let text = get(http, "/lagoon/status")?;
    let (_, body) = text.split_once("\r\n\r\n").context("no body")?;
    serde_json::from_str(body).with_context(|| format!("a status: {body:?}"))
}

pub fn number(status: &Value, pointer: &str) -> Result<u64> {
    status.pointer(pointer).and_then(Value::as_u64).with_context(|| format!("{pointer} is missing in {status}"))
}

/// Times of a stream's tokens, listened to by a thread of its own; an error is its end.
pub type Times = Arc<Mutex<(Vec<Instant>, Option<String>)>>;

pub fn listen(http: &str, context: u32, tokens: u32) -> Result<Times> {
    // Tokens are of the vocabulary's middle, and no two neighbours alike.
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

/// How late an instance's paced device was, as a share of the time that was modelled.
pub fn late_share(http: &str) -> Result<f64> {
    let text = get(http, "/metrics")?;
    let number = |name: &str| -> f64 {
        text.lines().find_map(|l| l.strip_prefix(name)).and_then(|n| n.trim().parse().ok()).unwrap_or(0.0)
    };
    Ok(number("lagoon_paced_late_us_total ") / number("lagoon_paced_modelled_us_total ").max(1.0))
}

#[must_use]
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
