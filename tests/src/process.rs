//! Processes of the real binary: started, awaited until ready, and killed when dropped.
//!
//! The binaries are those of the tests' own build directory; `cargo xtask test` builds them before the tests.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Timeout of operations that take a second or a few; generous, for a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// The key for administration of processes that tests ask from elsewhere.
pub const ADMIN_KEY: &str = "tests administer";

/// The binary of package `name`.
///
/// # Panics
/// If it was not built.
fn binary(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    // target/release/deps/system-…
    let path =
        tests.parent().and_then(|deps| deps.parent()).unwrap().join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(path.exists(), "{} is missing: `cargo build --release -p {name}` builds it", path.display());
    path
}

/// A command of `lagoon`, without this machine's configuration.
#[must_use]
pub fn lagoon(arguments: &[&str]) -> Command {
    lagoon_at(None, None, arguments)
}

/// As [`lagoon`], in a network namespace; with the profile of a modelled device, of `lagoon-paced`.
#[must_use]
pub fn lagoon_at(namespace: Option<&str>, pace: Option<&Path>, arguments: &[&str]) -> Command {
    let binary = binary(if pace.is_some() { "lagoon-paced" } else { "lagoon" });
    let mut command = match namespace {
        None => Command::new(&binary),
        Some(namespace) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", namespace]).arg(&binary);
            command
        }
    };
    command.envs(pace.map(|profile| ("LAGOON_PACE", profile)));
    command.args(arguments).stdin(Stdio::null());
    for name in [
        "LAGOON_API_KEY",
        "LAGOON_CA",
        "LAGOON_LOG",
        "LAGOON_TLS_CA",
        "LAGOON_TLS_CERT",
        "LAGOON_TLS_KEY",
        "LAGOON_URL",
    ] {
        command.env_remove(name);
    }
    // From outside its namespace nobody is on the same machine.
    match namespace {
        Some(_) => command.env("LAGOON_ADMIN_KEY", ADMIN_KEY),
        None => command.env_remove("LAGOON_ADMIN_KEY"),
    };
    // Not this machine's cuBLASLt, which the fake driver does not support.
    command.env("LAGOON_CUBLASLT", "none");
    // Calibrations are cached beside the binary, for the next test.
    command.env("XDG_CACHE_HOME", binary.with_file_name("test-cache"));
    // Shaders are cached where tests in this process cache them: Mesa compiles those of a model for up to a minute.
    if std::env::var_os("MESA_SHADER_CACHE_DIR").is_none() {
        command.envs(user_cache().map(|dir| ("MESA_SHADER_CACHE_DIR", dir)));
    }
    command
}

fn user_cache() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))
}

/// Exit code and outputs of a command that has ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a command to its end.
///
/// # Panics
/// If it does not end in time.
#[must_use]
pub fn run(arguments: &[&str]) -> Ended {
    let mut child = lagoon(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (stdout, stderr) = (collect(child.stdout.take().unwrap()), collect(child.stderr.take().unwrap()));
    let status = wait_for_end(&mut child);
    Ended { code: status.code(), stdout: stdout.recv().unwrap(), stderr: stderr.recv().unwrap() }
}

/// Waits for the end, for as long as the demo may take on a busy machine.
///
/// # Panics
/// If it does not come.
pub fn wait_for_end(child: &mut Child) -> std::process::ExitStatus {
    let deadline = Instant::now() + 3 * TIMEOUT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("the command did not end within {:?}", 3 * TIMEOUT);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn collect(mut pipe: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

/// A ready server. It and its children stop when it is dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// The server exits when this pipe closes; its children watch pipes of its own.
    stdin: Option<ChildStdin>,
    stderr: mpsc::Receiver<String>,
    /// Its ready line.
    pub ready: Value,
}

impl Server {
    /// Starts a command with `--json` and `--exit-with-stdin`, and waits until it is ready.
    ///
    /// # Panics
    /// If it ends first, or takes too long.
    #[must_use]
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    /// As [`Self::start`], with environment variables.
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn start_with(arguments: &[&str], variables: &[(&str, &OsStr)]) -> Self {
        let mut command = lagoon(arguments);
        command.envs(variables.iter().copied());
        Self::try_start_command(command).unwrap_or_else(|ended| panic!("{arguments:?} ended: {ended:?}"))
    }

    /// As [`Self::start`].
    ///
    /// # Errors
    /// The command's exit, if it ends before it is ready.
    ///
    /// # Panics
    /// If it takes too long, or prints no JSON.
    pub fn try_start(arguments: &[&str]) -> Result<Self, Ended> {
        Self::try_start_command(lagoon(arguments))
    }

    /// As [`Self::try_start`], for a command of [`lagoon_at`].
    ///
    /// # Errors
    /// As [`Self::try_start`].
    ///
    /// # Panics
    /// As [`Self::try_start`].
    pub fn try_start_command(mut command: Command) -> Result<Self, Ended> {
        command.stderr(Stdio::piped());
        Self::try_start_writing(command)
    }

    /// As [`Self::try_start_command`], with the command's own standard error; only a pipe is collected.
    ///
    /// # Errors
    /// As [`Self::try_start`].
    ///
    /// # Panics
    /// As [`Self::try_start`].
    pub fn try_start_writing(mut command: Command) -> Result<Self, Ended> {
        command.args(["--json", "--exit-with-stdin"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take();
        let stderr = child.stderr.take().map_or_else(|| collect(std::io::empty()), collect);
        let (sender, line) = mpsc::channel();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = stdout.read_line(&mut line);
            let _ = sender.send(line);
            let _ = std::io::copy(&mut stdout, &mut std::io::sink());
        });
        let mut server = Self { child, stdin, stderr, ready: Value::Null };
        let Ok(line) = line.recv_timeout(3 * TIMEOUT) else {
            let _ = server.child.kill();
            panic!("not ready within {:?}: {:?}", 3 * TIMEOUT, server.ended());
        };
        if line.is_empty() {
            return Err(server.ended());
        }
        server.ready = serde_json::from_str(&line).unwrap();
        Ok(server)
    }

    /// Waits until the server has ended by itself.
    ///
    /// # Panics
    /// If it does not.
    #[must_use]
    pub fn ended(&mut self) -> Ended {
        let status = wait_for_end(&mut self.child);
        Ended { code: status.code(), stdout: String::new(), stderr: self.stderr.recv_timeout(TIMEOUT).unwrap() }
    }

    /// Stops the server by closing its standard input, and waits for its end.
    ///
    /// # Panics
    /// If it does not end.
    #[must_use]
    pub fn stop(mut self) -> Ended {
        self.stdin = None;
        self.ended()
    }

    /// Kills the server at once, as a crash would, and waits for its end.
    ///
    /// # Panics
    /// If the kill fails.
    pub fn kill(mut self) {
        kill(self.pid());
        let _ = self.ended();
    }

    /// The server's process id.
    #[must_use]
    pub fn pid(&self) -> u64 {
        self.child.id().into()
    }

    /// A text field of the ready line.
    ///
    /// # Panics
    /// If it is absent.
    #[must_use]
    pub fn announced(&self, field: &str) -> String {
        self.ready[field].as_str().unwrap_or_else(|| panic!("{field} in {}", self.ready)).to_owned()
    }

    /// A client of the server's HTTP endpoint.
    ///
    /// # Panics
    /// If the ready line has no `http`.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(self.announced("http").parse().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Children end when this pipe closes; a server that hangs must not outlive its test.
        self.stdin = None;
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.child.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills a process at once, as a crash would.
///
/// # Panics
/// If the kill fails.
pub fn kill(pid: u64) {
    signal(pid, "KILL");
}

/// Sends a process a signal (`TERM`, `STOP`, `CONT`, …).
///
/// # Panics
/// If the signal fails.
pub fn signal(pid: u64, name: &str) {
    assert!(Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap().success());
}

/// An HTTP response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The `x-lagoon-instance` header: the instance that served the request.
    #[must_use]
    pub fn instance(&self) -> Option<&str> {
        self.headers.get("x-lagoon-instance").and_then(|v| v.to_str().ok())
    }
}

/// A blocking HTTP client.
#[derive(Debug)]
pub struct Client {
    runtime: Runtime,
    http: reqwest::Client,
    base: String,
    key: Option<String>,
}

impl Client {
    /// A client of the server at `addr`.
    ///
    /// # Panics
    /// If it cannot be set up.
    #[must_use]
    pub fn new(addr: SocketAddr) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let http = reqwest::Client::builder().no_proxy().timeout(2 * TIMEOUT).build().unwrap();
        Self { runtime, http, base: format!("http://{addr}"), key: None }
    }

    /// Adds an API key to all requests.
    #[must_use]
    pub fn with_key(self, key: &str) -> Self {
        Self { key: Some(key.to_owned()), ..self }
    }

    fn send(&self, request: reqwest::RequestBuilder) -> reqwest::Response {
        let request = match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        // The timeout is a timer of the runtime, created at sending.
        self.runtime.block_on(async { request.send().await }).unwrap()
    }

    fn whole(&self, response: reqwest::Response) -> Answer {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Answer { status, headers, text: self.runtime.block_on(response.text()).unwrap() }
    }

    /// Sends a GET request.
    ///
    /// # Panics
    /// Without a response.
    #[must_use]
    pub fn get(&self, path: &str) -> Answer {
        self.whole(self.send(self.http.get(format!("{}{path}", self.base))))
    }

    /// Sends a POST request with a JSON body.
    ///
    /// # Panics
    /// Without a response.
    #[must_use]
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, body.to_string())
    }

    /// Sends a POST request with this body.
    ///
    /// # Panics
    /// Without a response.
    #[must_use]
    pub fn post_text(&self, path: &str, body: String) -> Answer {
        let request = self.http.post(format!("{}{path}", self.base)).header("content-type", "application/json");
        self.whole(self.send(request.body(body)))
    }

    /// Requests a greedy completion of token ids, with `extra` fields.
    ///
    /// # Panics
    /// If it is refused.
    #[must_use]
    pub fn complete(&self, prompt: &[u32], max_tokens: u32, extra: &Value) -> Answer {
        let answer = self.post("/v1/completions", &completion(prompt, max_tokens, extra));
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer
    }

    /// Requests a stream of events.
    ///
    /// # Panics
    /// If it is refused.
    #[must_use]
    pub fn stream(&self, path: &str, body: &Value) -> Events<'_> {
        let request = self.http.post(format!("{}{path}", self.base)).header("content-type", "application/json");
        let response = self.send(request.body(body.to_string()));
        assert_eq!(response.status().as_u16(), 200);
        Events { client: self, response, text: String::new() }
    }

    /// Polls until the response contains `text`: gauges are set twice a second.
    ///
    /// # Panics
    /// After [`TIMEOUT`].
    pub fn wait_for_text(&self, path: &str, text: &str) {
        let deadline = Instant::now() + TIMEOUT;
        while !self.get(path).text.contains(text) {
            assert!(Instant::now() < deadline, "no {text} in {path} within {TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Polls until the response's JSON satisfies the condition; returns it.
    ///
    /// # Panics
    /// After [`TIMEOUT`].
    pub fn wait_until(&self, path: &str, what: &str, satisfied: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let value = self.get(path).json();
            if satisfied(&value) {
                return value;
            }
            assert!(Instant::now() < deadline, "not {what} within {TIMEOUT:?}: {value}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The body of a greedy completion request.
#[must_use]
pub fn completion(prompt: &[u32], max_tokens: u32, extra: &Value) -> Value {
    let mut body = json!({
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
    });
    for (name, value) in extra.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    body
}

/// Token ids of an answer's first choice.
///
/// # Panics
/// If they are absent.
#[must_use]
pub fn token_ids(answer: &Value) -> Vec<u32> {
    serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap_or_else(|e| panic!("{e}: {answer}"))
}

/// Logits of an answer's first choice, one vector a token.
///
/// # Panics
/// If they are absent.
#[must_use]
pub fn logits(answer: &Value) -> Vec<Vec<f32>> {
    let rows = answer["choices"][0]["logits_b64"].as_array().unwrap();
    let row = |text: &Value| {
        let bytes = STANDARD.decode(text.as_str().unwrap()).unwrap();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    rows.iter().map(row).collect()
}

/// Events of a stream. Dropping it closes the connection.
#[derive(Debug)]
pub struct Events<'a> {
    client: &'a Client,
    response: reqwest::Response,
    text: String,
}

impl Events<'_> {
    /// The instance that serves the stream.
    #[must_use]
    pub fn instance(&self) -> Option<String> {
        self.response.headers().get("x-lagoon-instance").and_then(|v| v.to_str().ok()).map(str::to_owned)
    }

    /// The next event's data; `None` after the last.
    ///
    /// # Panics
    /// If the connection breaks.
    pub fn next_data(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let event: String = self.text.drain(..end + 2).collect();
                match event.trim().strip_prefix("data: ") {
                    Some(data) => return Some(data.to_owned()),
                    None => continue,
                }
            }
            let chunk = self.client.runtime.block_on(self.response.chunk()).unwrap()?;
            self.text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    }

    /// All remaining events as JSON, and whether the closing `[DONE]` came.
    pub fn rest(&mut self) -> (Vec<Value>, bool) {
        let mut values = Vec::new();
        while let Some(data) = self.next_data() {
            if data == "[DONE]" {
                return (values, true);
            }
            values.push(serde_json::from_str(&data).unwrap());
        }
        (values, false)
    }
}
