//! A pool of real processes for fault injection, and streams that are recorded meanwhile.
//!
//! Instances have paced devices: a decode step takes [`STEP`] on any machine, so that a kill at any time hits work in
//! progress, and a stream lasts as long as a test needs. Answers are compared with one undisturbed instance that is
//! not paced: tokens must be equal and logits within [`TOLERANCE`].

use crate::golden::max_diff;
use crate::partition::Place;
use crate::process::{
    ADMIN_KEY, Client, Ended, Server, TIMEOUT, completion, lagoon_at, logits, run, signal, token_ids,
};
use lagoon_pace::PaceProfile;
use lagoon_types::limits::{RESTORE_DEADLINE_MS, STEP_DEADLINE_MS};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Duration of a decode step of a paced instance.
pub const STEP: Duration = Duration::from_millis(10);
/// Largest difference between logits of f32 models and KV, after any fault.
pub const TOLERANCE: f32 = 1e-3;
/// Longest gap between two tokens: a step's deadline, the deadline for restoring memory, and slack for a busy
/// machine.
pub const SILENCE_MAX: Duration = Duration::from_millis(STEP_DEADLINE_MS + RESTORE_DEADLINE_MS + 10_000);

/// A new cluster CA in its own directory.
///
/// # Panics
/// If it cannot be made.
#[must_use]
pub fn new_ca() -> TempDir {
    // For its owner only, as a folder with the CA's key has to be.
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let dir = tempfile::Builder::new().permissions(private).tempdir().unwrap();
    let made = run(&["certs", "init", &dir.path().to_string_lossy()]);
    assert_eq!(made.code, Some(0), "{made:?}");
    dir
}

/// Flags with a node's certificate, newly issued even if there is one, for the role that its name says.
///
/// # Panics
/// If it cannot be issued.
#[must_use]
pub fn certificates(dir: &TempDir, name: &str) -> [String; 3] {
    let role = match name {
        "looker" => "operator",
        // One that also runs a gateway.
        "gateway" | "operator" => "gateway,operator",
        name if name.starts_with("gm") => "gmanager",
        _ => "instance",
    };
    certificates_for(dir, name, role)
}

/// As [`certificates`], for these roles.
///
/// # Panics
/// If it cannot be issued.
#[must_use]
pub fn certificates_for(dir: &TempDir, name: &str, role: &str) -> [String; 3] {
    let at = |file: &str| dir.path().join(file).to_string_lossy().into_owned();
    if !dir.path().join(format!("{name}.pem")).exists() {
        let issued = run(&["certs", "issue", &dir.path().to_string_lossy(), name, "--role", role]);
        assert_eq!(issued.code, Some(0), "{issued:?}");
    }
    [
        format!("--tls-ca={}", at("ca.pem")),
        format!("--tls-cert={}", at(&format!("{name}.pem"))),
        format!("--tls-key={}", at(&format!("{name}.key"))),
    ]
}

/// Token ids without short repeats, of a vocabulary of `vocab`.
#[must_use]
pub fn prompt(seed: u64, tokens: usize, vocab: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        3 + (state >> 33) as u32 % (vocab - 6)
    };
    (0..tokens).map(|_| next()).collect()
}

/// The bundled model.
#[must_use]
pub fn passkey() -> PathBuf {
    crate::root().join("models/passkey")
}

/// Writes to `dir` the profile of a device on which a decode step of the model takes `step`; returns the file.
///
/// # Panics
/// If the model cannot be read or the file not be written.
#[must_use]
pub fn pace_profile(dir: &Path, model: &Path, step: Duration) -> PathBuf {
    let bytes = std::fs::metadata(model.join("model.safetensors")).unwrap().len() as f64;
    let profile = PaceProfile {
        bytes_per_s: bytes / step.as_secs_f64(),
        flops: 1e15,
        copy_bytes_per_s: 1e12,
        launch_us: 0.0,
        weight_scale: 1.0,
        kv_scale: 1e-6,
        prompt_scale: 1.0,
        prompt_row_us: 0.0,
    };
    let path = dir.join("pace.json");
    std::fs::write(&path, serde_json::to_vec(&profile).unwrap()).unwrap();
    path
}

/// A gManager, and instances by name.
#[derive(Debug)]
pub struct FaultPool {
    model: PathBuf,
    block_tokens: u32,
    step: Option<Duration>,
    ca: TempDir,
    tls: [String; 3],
    gmanager: Option<Server>,
    gmanager_addr: String,
    gmanager_flags: Vec<String>,
    members: BTreeMap<String, Server>,
}

impl FaultPool {
    /// A pool with a gManager on loopback and the instances of `members`: names and capacities in rBlocks.
    ///
    /// # Panics
    /// If a process does not start.
    #[must_use]
    pub fn new(model: &Path, block_tokens: u32, members: &[(&str, u32)]) -> Self {
        let mut pool = Self::without_members(model, block_tokens, "127.0.0.1", Some(STEP));
        let places: Vec<_> = members.iter().map(|(name, blocks)| (*name, *blocks, Place::default())).collect();
        pool.start(&places);
        pool
    }

    /// As [`Self::new`], without instances, on address `ip` and with a step's modelled time; `None` is unpaced.
    ///
    /// # Panics
    /// If a process does not start.
    #[must_use]
    pub fn without_members(model: &Path, block_tokens: u32, ip: &str, step: Option<Duration>) -> Self {
        let ca = new_ca();
        let tls = certificates(&ca, "operator");
        let mut pool = Self {
            model: model.to_owned(),
            block_tokens,
            step,
            ca,
            tls,
            gmanager: None,
            gmanager_addr: format!("{ip}:0"),
            gmanager_flags: Vec::new(),
            members: BTreeMap::new(),
        };
        pool.start_gmanager();
        pool
    }

    /// Starts a gManager on the address of the killed one.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_gmanager(&mut self) {
        let [a, b, c] = certificates(&self.ca, "gm");
        let listen = format!("--listen={}", self.gmanager_addr);
        let flags = self.gmanager_flags.iter().map(String::as_str);
        let flags: Vec<&str> = ["gmanager", &listen, &a, &b, &c].into_iter().chain(flags).collect();
        let server = Server::start_with(&flags, &[("LAGOON_ADMIN_KEY", ADMIN_KEY.as_ref())]);
        self.gmanager_addr = server.announced("quic");
        self.gmanager = Some(server);
    }

    /// Restarts the gManager with further flags.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn with_gmanager_flags(mut self, flags: &[&str]) -> Self {
        self.gmanager_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        self.kill_gmanager();
        self.start_gmanager();
        self
    }

    /// The gManager's metrics page.
    ///
    /// # Panics
    /// If there is no gManager, or it has no metrics page.
    #[must_use]
    pub fn gmanager_metrics(&self) -> String {
        let at = self.gmanager.as_ref().unwrap().announced("metrics");
        Client::new(at.parse().unwrap()).with_key(ADMIN_KEY).get("/metrics").text
    }

    /// Kills the gManager.
    ///
    /// # Panics
    /// If there is none.
    pub fn kill_gmanager(&mut self) {
        self.gmanager.take().unwrap().kill();
    }

    /// Pauses the gManager's process (SIGSTOP): all views of the pool stay as they are.
    ///
    /// # Panics
    /// If there is none.
    pub fn pause_gmanager(&self) {
        signal(self.gmanager.as_ref().unwrap().pid(), "STOP");
    }

    /// Resumes it.
    ///
    /// # Panics
    /// If there is none.
    pub fn resume_gmanager(&self) {
        signal(self.gmanager.as_ref().unwrap().pid(), "CONT");
    }

    /// Starts instances in parallel and waits until all are registered: names, capacities in rBlocks, places.
    ///
    /// # Panics
    /// If one does not start.
    pub fn start(&mut self, members: &[(&str, u32, Place)]) {
        let commands: Vec<_> = members.iter().map(|(name, blocks, place)| self.command(name, *blocks, place)).collect();
        std::thread::scope(|scope| {
            let start = |((name, ..), command): (&(&str, u32, Place), Command)| {
                ((*name).to_owned(), scope.spawn(move || Server::try_start_command(command)))
            };
            let threads: Vec<_> = members.iter().zip(commands).map(start).collect();
            let started = threads.into_iter().map(|(name, thread): (String, _)| {
                let server = thread.join().unwrap().unwrap_or_else(|ended| panic!("{name} ended: {ended:?}"));
                (name, server)
            });
            self.members.extend(started);
        });
        self.wait_whole();
    }

    /// Starts an instance.
    ///
    /// # Errors
    /// Its exit, if it ends before it is ready.
    pub fn try_start(&mut self, name: &str, blocks: u32, place: &Place) -> Result<(), Ended> {
        let server = Server::try_start_command(self.command(name, blocks, place))?;
        self.members.insert(name.to_owned(), server);
        Ok(())
    }

    /// The `serve` command of an instance, on a device that reads the model's weights in a step's time; all else
    /// takes no time.
    fn command(&self, name: &str, blocks: u32, place: &Place) -> Command {
        let own = ["serve".to_owned(), self.model.display().to_string()];
        let pool = [format!("--gmanager={}", self.gmanager_addr), format!("--name={name}")];
        let flags = [&own[..], &pool[..], &certificates(&self.ca, name), &self.sizes(blocks), &place.flags].concat();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let profile = self.step.map(|step| pace_profile(self.ca.path(), &self.model, step));
        lagoon_at(place.namespace.as_deref(), profile.as_deref(), &flags)
    }

    /// Flags that the undisturbed instance has as well.
    fn sizes(&self, blocks: u32) -> [String; 8] {
        [
            "--backend=cpu".to_owned(),
            "--threads=1".to_owned(),
            "--dtype=f32".to_owned(),
            "--kv-dtype=f32".to_owned(),
            "--calibrate=off".to_owned(),
            "--expose-logits".to_owned(),
            format!("--block-tokens={}", self.block_tokens),
            format!("--kv-tokens={}", blocks * self.block_tokens),
        ]
    }

    /// A single instance with room for everything, outside of the pool.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn undisturbed(&self, blocks: u32) -> Undisturbed {
        let sizes = self.sizes(blocks);
        let flags = ["serve", self.model.to_str().unwrap(), "--http=127.0.0.1:0"].into_iter();
        let flags: Vec<&str> = flags.chain(sizes.iter().map(String::as_str)).collect();
        Undisturbed { server: Server::start(&flags) }
    }

    fn member(&self, name: &str) -> &Server {
        self.members.get(name).unwrap_or_else(|| panic!("{name} is not there"))
    }

    /// Names of the live instances.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.members.keys().cloned().collect()
    }

    /// A client of an instance.
    #[must_use]
    pub fn client(&self, name: &str) -> Client {
        self.member(name).client().with_key(ADMIN_KEY)
    }

    /// Status page of an instance.
    ///
    /// # Panics
    /// If it does not reply.
    #[must_use]
    pub fn status(&self, name: &str) -> Value {
        self.client(name).get("/lagoon/status").json()
    }

    /// A field of an instance's ready line.
    ///
    /// # Panics
    /// If the field is absent.
    #[must_use]
    pub fn announced(&self, name: &str, field: &str) -> String {
        self.member(name).announced(field)
    }

    /// Stops an instance and waits for its end; returns its standard error.
    ///
    /// # Panics
    /// If there is no such instance, or it does not end.
    pub fn stop(&mut self, name: &str) -> Ended {
        self.members.remove(name).unwrap().stop()
    }

    /// Waits until an instance's status satisfies the condition; returns it.
    ///
    /// # Panics
    /// After [`TIMEOUT`].
    pub fn wait(&self, name: &str, what: &str, satisfied: impl Fn(&Value) -> bool) -> Value {
        self.client(name).wait_until("/lagoon/status", &format!("{name}: {what}"), satisfied)
    }

    /// Waits until all are registered and each counts the memory of all.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn wait_whole(&self) {
        let blocks: BTreeMap<String, u64> =
            self.names().into_iter().map(|name| (name.clone(), number(&self.status(&name), "blocks_total"))).collect();
        for (name, own) in &blocks {
            let others: u64 = blocks.iter().filter(|(other, _)| *other != name).map(|(_, b)| lendable(*b)).sum();
            let whole = |s: &Value| s["registered"] == true && s["pool_blocks_total"].as_u64() == Some(own + others);
            self.wait(name, &format!("a pool of {}", own + others), whole);
        }
    }

    /// Waits until no instance uses, lends or borrows memory: no rBlock leaked.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn wait_empty(&self) {
        for name in self.names() {
            self.wait(&name, "nothing left", |s| {
                let none = |field: &str| s[field].as_u64() == Some(0);
                s["blocks_free"] == s["blocks_total"]
                    && ["blocks_lent", "blocks_borrowed", "remote_request_frames", "running", "waiting"]
                        .into_iter()
                        .all(none)
                    && s["sequences"].as_array().is_some_and(Vec::is_empty)
            });
        }
    }

    /// Names of instances by the gManager's numbers.
    #[must_use]
    pub fn instances(&self) -> BTreeMap<String, String> {
        self.names().into_iter().map(|name| (self.status(&name)["instance"].to_string(), name)).collect()
    }

    /// Names of the instances that lend to `debtor`'s sequences, with rBlocks.
    #[must_use]
    pub fn creditors(&self, debtor: &str) -> BTreeMap<String, u64> {
        let ids = self.instances();
        let mut lent = BTreeMap::new();
        for seq in self.status(debtor)["sequences"].as_array().into_iter().flatten() {
            for (id, blocks) in seq["remote_blocks"].as_object().into_iter().flatten() {
                // A creditor that is gone has no name.
                if let Some(name) = ids.get(id) {
                    *lent.entry(name.clone()).or_default() += blocks.as_u64().unwrap_or(0);
                }
            }
        }
        lent
    }

    /// The instance that lends most to `debtor`; waits until one lends.
    ///
    /// # Panics
    /// After [`TIMEOUT`].
    #[must_use]
    pub fn creditor(&self, debtor: &str) -> String {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let lent = self.creditors(debtor);
            if let Some((name, _)) = lent.into_iter().max_by_key(|(_, blocks)| *blocks) {
                return name;
            }
            assert!(Instant::now() < deadline, "nobody lends to {debtor}: {}", self.status(debtor));
        }
    }

    /// Kills an instance's process.
    ///
    /// # Panics
    /// If there is no such instance.
    pub fn kill(&mut self, name: &str) {
        self.members.remove(name).unwrap().kill();
    }

    /// Pauses an instance's process (SIGSTOP).
    pub fn pause(&self, name: &str) {
        signal(self.member(name).pid(), "STOP");
    }

    /// Resumes a paused process.
    pub fn resume(&self, name: &str) {
        signal(self.member(name).pid(), "CONT");
    }

    /// Runs an operator's command against the gManager; returns its JSON.
    ///
    /// # Panics
    /// If it fails, or prints no JSON.
    #[must_use]
    pub fn ask(&self, command: &[&str]) -> Value {
        self.try_ask(command).unwrap_or_else(|ended| panic!("{command:?}: {ended:?}"))
    }

    /// As [`Self::ask`].
    ///
    /// # Errors
    /// The command's exit, if it fails.
    ///
    /// # Panics
    /// If it prints no JSON.
    pub fn try_ask(&self, command: &[&str]) -> Result<Value, Ended> {
        let [a, b, c] = &self.tls;
        let ended = run(&[command, &["--json", "--gmanager", &self.gmanager_addr, a, b, c]].concat());
        if ended.code == Some(0) { Ok(serde_json::from_str(&ended.stdout).unwrap()) } else { Err(ended) }
    }

    /// Starts a gateway of the pool.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn gateway(&self) -> Server {
        let [a, b, c] = &self.tls;
        Server::start(&["gateway", "--listen=127.0.0.1:0", "--gmanager", &self.gmanager_addr, a, b, c])
    }

    /// Sends a greedy request to an instance and records its stream.
    #[must_use]
    pub fn watch(&self, name: &str, prompt: &[u32], max_tokens: u32) -> Watched {
        Watched::start(self.member(name).announced("http").parse().unwrap(), prompt, max_tokens, &json!({}))
    }
}

/// rBlocks that an instance of `blocks` rBlocks lends at most: all but the reserve for swaps of circular debts.
#[must_use]
pub fn lendable(blocks: u64) -> u64 {
    blocks - (blocks / 64).clamp(1, 16)
}

/// A number in a status, at a JSON pointer.
///
/// # Panics
/// If it is absent.
#[must_use]
pub fn number(status: &Value, field: &str) -> u64 {
    status.pointer(&format!("/{field}")).and_then(Value::as_u64).unwrap_or_else(|| panic!("{field} in {status}"))
}

/// A received token: its time, and the logits from which it was sampled.
#[derive(Clone, Debug)]
pub struct Received {
    pub at: Instant,
    pub token: u32,
    pub logits: Vec<f32>,
    /// Present if requested.
    pub logprob: Option<f32>,
}

/// A stream that is recorded by a thread of its own.
#[derive(Debug)]
pub struct Watched {
    prompt: Vec<u32>,
    max_tokens: u32,
    extra: Value,
    arrivals: Arc<Mutex<Vec<Received>>>,
    thread: JoinHandle<Result<(), String>>,
}

impl Watched {
    /// Sends a request to `http` and records its stream: a greedy one, unless `extra` says otherwise.
    #[must_use]
    pub fn start(http: SocketAddr, prompt: &[u32], max_tokens: u32, extra: &Value) -> Self {
        let body = completion(prompt, max_tokens, &with(extra, &json!({"stream": true, "return_logits": true})));
        let arrivals = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&arrivals);
        let thread = std::thread::spawn(move || {
            let client = Client::new(http);
            let mut events = client.stream("/v1/completions", &body);
            while let Some(data) = events.next_data() {
                if data == "[DONE]" {
                    return Ok(());
                }
                let event: Value = serde_json::from_str(&data).unwrap();
                if event["error"].is_object() {
                    return Err(format!("the stream failed: {event}"));
                }
                let at = Instant::now();
                let logprobs = logprobs(&event).into_iter().map(Some).chain(std::iter::repeat(None));
                let tokens = token_ids(&event).into_iter().zip(logits(&event)).zip(logprobs);
                let arrivals = tokens.map(|((token, logits), logprob)| Received { at, token, logits, logprob });
                sink.lock().unwrap().extend(arrivals);
            }
            Err("the stream broke".to_owned())
        });
        Self { prompt: prompt.to_vec(), max_tokens, extra: extra.clone(), arrivals, thread }
    }

    /// Number of tokens so far.
    ///
    /// # Panics
    /// If the listener panicked.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.arrivals.lock().unwrap().len()
    }

    /// Whether the stream has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the stream has `tokens` tokens, or has ended.
    ///
    /// # Panics
    /// If it is silent for longer than [`SILENCE_MAX`].
    pub fn wait_for(&self, tokens: usize) {
        let (mut seen, mut since) = (self.tokens(), Instant::now());
        while seen < tokens && !self.is_over() {
            std::thread::sleep(Duration::from_millis(1));
            if self.tokens() > seen {
                (seen, since) = (self.tokens(), Instant::now());
            }
            assert!(since.elapsed() < SILENCE_MAX, "silent for {SILENCE_MAX:?} after {seen} tokens");
        }
    }

    /// Waits until the stream has been silent for `silence`.
    ///
    /// # Panics
    /// If it ends first.
    pub fn wait_for_silence(&self, silence: Duration) {
        let (mut seen, mut since) = (self.tokens(), Instant::now());
        while since.elapsed() < silence {
            assert!(!self.is_over(), "it was over before it fell silent");
            std::thread::sleep(Duration::from_millis(1));
            if self.tokens() > seen {
                (seen, since) = (self.tokens(), Instant::now());
            }
        }
    }

    /// Waits for a successful end and compares the stream with the undisturbed run: no token lost or repeated, all
    /// equal, all logits within [`TOLERANCE`]. Prints a summary.
    ///
    /// # Panics
    /// If any of that does not hold.
    pub fn finish(self, what: &str, undisturbed: &Undisturbed) -> Vec<Received> {
        self.wait_for(self.max_tokens as usize);
        self.thread.join().unwrap().unwrap_or_else(|error| panic!("{what}: {error}"));
        let arrivals = std::mem::take(&mut *self.arrivals.lock().unwrap());
        let expected = undisturbed.run(&self.prompt, self.max_tokens, &self.extra);
        let output: Vec<u32> = arrivals.iter().map(|h| h.token).collect();
        assert_eq!(output, token_ids(&expected), "{what}");
        let largest = arrivals.iter().zip(logits(&expected)).map(|(h, e)| max_diff(&h.logits, &e)).fold(0.0, f32::max);
        assert!(largest < TOLERANCE, "{what}: logits differ by {largest:e}");
        let output: Vec<f32> = arrivals.iter().filter_map(|h| h.logprob).collect();
        let logprobs = logprobs(&expected);
        assert_eq!(output.len(), logprobs.len(), "{what}");
        let largest_logprob = max_diff(&output, &logprobs);
        assert!(largest_logprob < TOLERANCE, "{what}: log-probabilities differ by {largest_logprob:e}");
        let silence = arrivals.windows(2).map(|w| w[1].at - w[0].at).max().unwrap_or_default();
        assert!(silence < SILENCE_MAX, "{what}: silent for {silence:?}");
        println!("{what}: {} tokens equal, logits within {largest:.1e}, longest silence {silence:.2?}", arrivals.len());
        arrivals
    }
}

/// A single undisturbed instance, for reference.
#[derive(Debug)]
pub struct Undisturbed {
    server: Server,
}

impl Undisturbed {
    /// Its tokens for a greedy request.
    #[must_use]
    pub fn tokens(&self, prompt: &[u32], max_tokens: u32) -> Vec<u32> {
        token_ids(&self.run(prompt, max_tokens, &json!({})))
    }

    fn run(&self, prompt: &[u32], max_tokens: u32, extra: &Value) -> Value {
        self.server.client().complete(prompt, max_tokens, &with(extra, &json!({"return_logits": true}))).json()
    }
}

/// The union of two objects' fields.
fn with(fields: &Value, more: &Value) -> Value {
    let mut all = fields.clone();
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    all
}

/// Log-probabilities of the tokens of an answer or an event, if requested.
fn logprobs(answer: &Value) -> Vec<f32> {
    let all = answer["choices"][0]["logprobs"]["token_logprobs"].as_array();
    all.into_iter().flatten().map(|logprob| logprob.as_f64().unwrap() as f32).collect()
}
