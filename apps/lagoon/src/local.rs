//! A pool on this machine: a gManager and instances as child processes on loopback, with temporary certificates.

use crate::jitter::jittered;
use crate::port::is_gateway;
use crate::scratch::Scratch;
use anyhow::{Context, bail};
use futures::future::try_join_all;
use lagoon_http::tls::PoolFiles;
use lagoon_transport::{ClusterCa, Identity, NodeRole, Roles, SERVER_NAME};
use rustls_pki_types::CertificateDer;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinHandle;

/// Deadline for a child to load its model and report ready.
const READY_DEADLINE: Duration = Duration::from_secs(600);
/// Interval of checks on a pool's processes.
const WATCH_EVERY: Duration = Duration::from_millis(500);
/// Mean pause before a dead process is restarted; it doubles while starts fail or the process dies early.
const RESTART_MIN: Duration = Duration::from_secs(1);
/// The longest restart pause.
const RESTART_MAX: Duration = Duration::from_secs(60);
/// Lifetime from which a death is not early.
const RAN_WELL: Duration = Duration::from_secs(60);
/// Consecutive early deaths after which an instance is not restarted. The gManager always is: nothing replaces it.
const RESTARTS_MAX: u32 = 6;

/// Flags and keys to start a child process, also again.
#[derive(Clone, Debug)]
struct Launch {
    name: String,
    flags: Vec<String>,
    keys: ChildKeys,
}

/// Keys that clients of a child must show.
#[derive(Clone, Default)]
pub(crate) struct ChildKeys {
    pub(crate) api: Option<String>,
    pub(crate) admin: Option<String>,
}

impl std::fmt::Debug for ChildKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let given = (self.api.is_some(), self.admin.is_some());
        f.debug_tuple("ChildKeys").field(&given).finish()
    }
}

/// Time for dropped children to end: they remove their files.
const END_DEADLINE: Duration = Duration::from_secs(5);
/// The same of a child that has not reported yet. It may be loading a model, and then has no folder and does not listen.
const START_END_DEADLINE: Duration = Duration::from_secs(1);
/// Interval of checks meanwhile.
const END_LOOK: Duration = Duration::from_millis(10);

/// A child process. It stops when its standard input ends: on drop, or when this process ends. Killed if it
/// does not stop.
#[derive(Debug)]
struct Process {
    child: Child,
    /// Time that it has to end.
    wait: Duration,
}

impl Drop for Process {
    fn drop(&mut self) {
        end([self]);
    }
}

/// A child process that has reported its addresses.
#[derive(Debug)]
pub(crate) struct ChildNode {
    launch: Launch,
    process: Process,
    started: Instant,
    /// Kept open: a write to a closed stdout would fail in the child.
    _stdout: BufReader<ChildStdout>,
    ready: Value,
}

impl Launch {
    /// Starts it and waits until it is ready. Keys go through the environment: command lines are public.
    async fn start(self) -> anyhow::Result<ChildNode> {
        let Self { name, flags, keys } = &self;
        let program = std::env::current_exe().context("find the lagoon binary")?;
        let mut command = Command::new(program);
        for (variable, key) in [("LAGOON_API_KEY", &keys.api), ("LAGOON_ADMIN_KEY", &keys.admin)] {
            match key {
                Some(key) => command.env(variable, key),
                None => command.env_remove(variable),
            };
        }
        let child = command
            .args(flags)
            .args(["--json", "--exit-with-stdin"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        // From here on it removes its temporary folders before it ends, ready or not.
        let mut process = Process { child, wait: START_END_DEADLINE };
        let stdout = process.child.stdout.take().context("the child has no standard output")?;
        let mut stdout = BufReader::new(stdout);
        let mut line = String::new();
        let read = tokio::time::timeout(READY_DEADLINE, stdout.read_line(&mut line)).await;
        match read {
            Ok(Ok(n)) if n > 0 => {}
            Ok(_) => bail!("{name} ended before it was ready (its error is above)"),
            Err(_) => bail!("{name} was not ready within {} s", READY_DEADLINE.as_secs()),
        }
        let ready = serde_json::from_str(&line).with_context(|| format!("{name} printed {line:?}"))?;
        process.wait = END_DEADLINE;
        Ok(ChildNode { launch: self, process, started: Instant::now(), _stdout: stdout, ready })
    }
}

/// Ends several children together.
fn end<'a>(children: impl IntoIterator<Item = &'a mut Process>) {
    let mut children: Vec<_> = children.into_iter().collect();
    children.iter_mut().for_each(|process| drop(process.child.stdin.take()));
    let began = Instant::now();
    for Process { child, wait } in children {
        let deadline = began + *wait;
        while child.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
            std::thread::sleep(END_LOOK);
        }
    }
}

impl ChildNode {
    fn address(&self, field: &str) -> anyhow::Result<SocketAddr> {
        let text = self.ready[field].as_str().with_context(|| format!("the child did not say its {field} address"))?;
        text.parse().with_context(|| format!("parse {text}"))
    }

    /// Address of its OpenAI endpoint.
    pub(crate) fn http(&self) -> anyhow::Result<SocketAddr> {
        self.address("http")
    }

    /// Description of its device.
    pub(crate) fn device(&self) -> &str {
        self.ready["device"].as_str().unwrap_or("unknown")
    }

    /// Tokens of its KV.
    pub(crate) fn kv_tokens(&self) -> u64 {
        self.ready["kv_tokens"].as_u64().unwrap_or(0)
    }

    /// Why so many, for people.
    pub(crate) fn kv_because(&self) -> &str {
        self.ready["kv_because"].as_str().unwrap_or("unknown")
    }

    /// The child's process id, while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.process.child.id()
    }
}

/// A CA for a pool that lives as long as this process.
#[derive(Debug)]
pub(crate) struct EphemeralCa {
    ca: ClusterCa,
    dir: Scratch,
}

impl EphemeralCa {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let ca = ClusterCa::generate("lagoon ephemeral")?;
        let dir = Scratch::new("pool")?;
        fs::write(dir.path().join("ca.pem"), ca.cert_pem()).context("write the CA")?;
        Ok(Self { ca, dir })
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// An identity in the cluster for this process.
    pub(crate) fn identity(&self, roles: impl Into<Roles>) -> anyhow::Result<Identity> {
        Ok(self.ca.identity("parent", roles)?)
    }

    /// Writes a certificate for `name` with this role, for HTTP with nodes that `is_peer` accepts.
    pub(crate) fn files(
        &self,
        name: &str,
        role: NodeRole,
        is_peer: fn(&CertificateDer<'_>) -> bool,
    ) -> anyhow::Result<PoolFiles> {
        let issued = self.ca.issue(name, role)?;
        let (cert, key) = (self.dir().join(format!("{name}.pem")), self.dir().join(format!("{name}.key")));
        fs::write(&cert, &issued.cert_pem).context("write a certificate")?;
        write_private(&key, &issued.key_pem).context("write a key")?;
        Ok(PoolFiles { ca: self.dir().join("ca.pem"), cert, key, crl: None, name: SERVER_NAME, is_peer })
    }

    /// Writes a certificate for `name`; returns the flags for it.
    fn flags(&self, name: &str, role: NodeRole) -> anyhow::Result<Vec<String>> {
        let PoolFiles { ca, cert, key, .. } = self.files(name, role, is_gateway)?;
        let flag = |name: &str, path: PathBuf| format!("--tls-{name}={}", path.display());
        Ok(vec![flag("ca", ca), flag("cert", cert), flag("key", key)])
    }
}

/// Writes a key readable by this user only, wherever the temporary directory is.
fn write_private(path: &Path, text: &str) -> std::io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    std::io::Write::write_all(&mut options.open(path)?, text.as_bytes())
}

/// A supervised process of a pool.
#[derive(Debug)]
struct Watched {
    launch: Launch,
    state: State,
    /// Consecutive early deaths.
    deaths: u32,
    /// Restarted however it ended and however often.
    always: bool,
}

#[derive(Debug)]
enum State {
    Running(Box<ChildNode>),
    /// Being restarted, after a pause.
    Starting(JoinHandle<anyhow::Result<ChildNode>>),
    /// Ended on request, or (true) after too many deaths.
    Ended(bool),
}

impl Watched {
    fn new(child: ChildNode) -> Self {
        Self { launch: child.launch.clone(), state: State::Running(Box::new(child)), deaths: 0, always: false }
    }

    /// Checks the process; reports and restarts it if it died.
    async fn look(&mut self) {
        match &mut self.state {
            State::Running(node) => {
                let Ok(Some(status)) = node.process.child.try_wait() else { return };
                let ran = node.started.elapsed();
                self.ended(status, ran);
            }
            State::Starting(task) if task.is_finished() => match task.await {
                Ok(Ok(node)) => {
                    tracing::warn!("{} runs again", self.launch.name);
                    self.state = State::Running(Box::new(node));
                }
                Ok(Err(error)) => self.died(&format!("did not start: {error:#}"), Duration::ZERO),
                Err(error) => self.died(&format!("did not start: {error}"), Duration::ZERO),
            },
            State::Starting(_) | State::Ended(_) => {}
        }
    }

    /// Handles the end of the process that this one did not stop.
    fn ended(&mut self, status: ExitStatus, ran: Duration) {
        match status.success() {
            true if self.always => self.died("has stopped", ran),
            true => {
                tracing::warn!("{} has stopped", self.launch.name);
                self.state = State::Ended(false);
            }
            false => self.died(&format!("has died ({status})"), ran),
        }
    }

    fn died(&mut self, how: &str, ran: Duration) {
        self.deaths = if ran < RAN_WELL { self.deaths.saturating_add(1) } else { 1 };
        let name = &self.launch.name;
        if self.deaths > RESTARTS_MAX && !self.always {
            tracing::error!("{name} {how}; it stays down after {RESTARTS_MAX} attempts");
            self.state = State::Ended(true);
            return;
        }
        let pause = jittered(pause(self.deaths));
        tracing::warn!("{name} {how}; it is restarted in {:.1} s, the others continue", pause.as_secs_f64());
        let launch = self.launch.clone();
        self.state = State::Starting(tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            launch.start().await
        }));
    }
}

/// Pause before the restart after `deaths` consecutive deaths (at least one).
fn pause(deaths: u32) -> Duration {
    RESTART_MIN.saturating_mul(1 << (deaths - 1).min(16)).min(RESTART_MAX)
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let State::Starting(task) = &self.state {
            task.abort();
        }
    }
}

/// Instances that end together on drop.
struct Together(Vec<Watched>);

impl Drop for Together {
    fn drop(&mut self) {
        end(self.0.iter_mut().filter_map(|watched| match &mut watched.state {
            State::Running(node) => Some(&mut node.process),
            State::Starting(_) | State::Ended(_) => None,
        }));
    }
}

/// A running pool.
#[derive(Debug)]
pub(crate) struct LocalPool {
    pub(crate) gmanager: SocketAddr,
    pub(crate) instances: Vec<ChildNode>,
    gmanager_node: ChildNode,
}

impl LocalPool {
    /// The gManager's process id, while it runs.
    pub(crate) fn gmanager_pid(&self) -> Option<u32> {
        self.gmanager_node.pid()
    }

    /// Supervises the pool: reports and restarts dead processes, until no instance is left to restart.
    ///
    /// # Errors
    /// If instances died too often.
    pub(crate) async fn watch(self) -> anyhow::Result<()> {
        let mut gmanager = Watched::new(self.gmanager_node);
        gmanager.always = true;
        // Without --first-instance it numbers by the clock: it does not know its predecessor's ids.
        gmanager.launch.flags.retain(|flag| flag != FIRST_INSTANCE && !flag.starts_with("--listen="));
        gmanager.launch.flags.push(format!("--listen={}", self.gmanager));
        let mut instances = Together(self.instances.into_iter().map(Watched::new).collect());
        let instances = &mut instances.0;
        loop {
            gmanager.look().await;
            for instance in instances.iter_mut() {
                instance.look().await;
            }
            if instances.iter().all(|instance| matches!(instance.state, State::Ended(_))) {
                let died = instances.iter().any(|instance| matches!(instance.state, State::Ended(true)));
                anyhow::ensure!(!died, "no instance is left\nhint: their errors are above");
                return Ok(());
            }
            tokio::time::sleep(WATCH_EVERY).await;
        }
    }
}

/// Numbers the instances of a pool's first gManager from 1.
const FIRST_INSTANCE: &str = "--first-instance=1";

/// An instance to be started.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) role: &'static str,
    /// Flags of `lagoon serve` in addition to the pool's common ones.
    pub(crate) flags: Vec<String>,
    /// Instances of one device start one after another: loading two at once would take longer, and each would count
    /// memory that the other is about to take.
    pub(crate) device: usize,
}

/// Common properties of a pool's instances.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common<'a> {
    pub(crate) ca: &'a EphemeralCa,
    pub(crate) model: &'a str,
    pub(crate) served_name: &'a str,
    pub(crate) keys: &'a ChildKeys,
    /// Seconds between the gManager's role changes; `None` without role changes.
    pub(crate) auto_roles: Option<u64>,
}

/// Starts a gManager and these instances. `progress` gets the number of ready ones.
pub(crate) async fn start_pool(
    common: Common<'_>,
    wanted: &[Wanted],
    progress: impl Fn(usize),
) -> anyhow::Result<LocalPool> {
    let mut command = vec!["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned(), FIRST_INSTANCE.to_owned()];
    command.extend(common.auto_roles.map(|rest_s| format!("--auto-roles={rest_s}")));
    command.extend(common.ca.flags("gmanager", NodeRole::GManager)?);
    let launch = Launch { name: "the gManager".to_owned(), flags: command, keys: ChildKeys::default() };
    let gmanager_node = launch.start().await?;
    let gmanager = gmanager_node.address("quic")?;
    let ready = AtomicUsize::new(0);
    let devices: BTreeSet<usize> = wanted.iter().map(|w| w.device).collect();
    let starting = devices.into_iter().map(|device| {
        let (ready, progress) = (&ready, &progress);
        async move {
            let mut started = Vec::new();
            for (index, wanted) in wanted.iter().enumerate().filter(|(_, w)| w.device == device) {
                started.push((index, start_instance(common, gmanager, index, wanted).await?));
                progress(ready.fetch_add(1, Ordering::Relaxed) + 1);
            }
            anyhow::Ok(started)
        }
    });
    let mut started: Vec<(usize, ChildNode)> = try_join_all(starting).await?.into_iter().flatten().collect();
    started.sort_by_key(|(index, _)| *index);
    Ok(LocalPool { gmanager, instances: started.into_iter().map(|(_, node)| node).collect(), gmanager_node })
}

async fn start_instance(
    common: Common<'_>,
    gmanager: SocketAddr,
    index: usize,
    wanted: &Wanted,
) -> anyhow::Result<ChildNode> {
    let role = wanted.role;
    let kind = if role == "both" { "instance" } else { role };
    let name = format!("{kind}-{index}");
    let mut command = vec![
        "serve".to_owned(),
        common.model.to_owned(),
        "--http=127.0.0.1:0".to_owned(),
        format!("--gmanager={gmanager}"),
        format!("--name={name}"),
        format!("--role={role}"),
        format!("--served-model-name={}", common.served_name),
    ];
    let may = if role == "kv" { NodeRole::Kv } else { NodeRole::Instance };
    command.extend(common.ca.flags(&name, may)?);
    command.extend_from_slice(&wanted.flags);
    Launch { name, flags: command, keys: common.keys.clone() }.start().await
}

/// Starts one instance outside any pool.
pub(crate) async fn start_single(model: &str, served_name: &str, flags: &[String]) -> anyhow::Result<ChildNode> {
    let mut command = vec![
        "serve".to_owned(),
        model.to_owned(),
        "--http=127.0.0.1:0".to_owned(),
        format!("--served-model-name={served_name}"),
    ];
    command.extend_from_slice(flags);
    Launch { name: "the single instance".to_owned(), flags: command, keys: ChildKeys::default() }.start().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pauses = [1, 2, 3, 6, 7, 40].map(|deaths| pause(deaths).as_secs());
        assert_eq!(pauses, [1, 2, 4, 32, 60, 60]);
    }

    fn watched(always: bool) -> Watched {
        let launch = Launch { name: "it".to_owned(), flags: Vec::new(), keys: ChildKeys::default() };
        Watched { launch, state: State::Ended(false), deaths: 0, always }
    }

    /// Without a gManager no instance borrows, and no other process restarts it.
    #[cfg(unix)]
    #[tokio::test]
    async fn the_gmanager_is_restarted_however_often_it_ends_and_an_instance_is_not() {
        use std::os::unix::process::ExitStatusExt as _;
        let (stopped, killed) = (ExitStatus::from_raw(0), ExitStatus::from_raw(9));
        let (mut gmanager, mut instance) = (watched(true), watched(false));
        for _ in 0..=2 * RESTARTS_MAX {
            // A new start replaces the one before, which waits for its pause.
            if let State::Starting(task) = &gmanager.state {
                task.abort();
            }
            gmanager.ended(killed, Duration::ZERO);
            assert!(matches!(gmanager.state, State::Starting(_)), "{gmanager:?}");
        }
        assert_eq!(pause(gmanager.deaths), RESTART_MAX);
        gmanager.ended(stopped, Duration::ZERO);
        assert!(matches!(gmanager.state, State::Starting(_)), "{gmanager:?}");
        for _ in 0..=RESTARTS_MAX {
            if let State::Starting(task) = &instance.state {
                task.abort();
            }
            instance.ended(killed, Duration::ZERO);
        }
        assert!(matches!(instance.state, State::Ended(true)), "{instance:?}");
        let mut instance = watched(false);
        instance.ended(stopped, Duration::ZERO);
        assert!(matches!(instance.state, State::Ended(false)), "{instance:?}");
    }
}
