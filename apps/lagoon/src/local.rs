//! A pool on this machine: a gManager and instances as child processes on loopback, with certificates made for them.

use crate::scratch::Scratch;
use anyhow::{Context, bail};
use futures::future::try_join_all;
use lagoon_transport::{ClusterCa, Identity};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinHandle;

/// Time that a child gets to load its model and say that it is ready.
const READY_DEADLINE: Duration = Duration::from_secs(600);
/// How often a pool's processes are looked at.
const WATCH_EVERY: Duration = Duration::from_millis(500);
/// Pause before a process that died is started again; it doubles while starting it fails or it dies early.
const RESTART_MIN: Duration = Duration::from_secs(1);
/// The longest such pause.
const RESTART_MAX: Duration = Duration::from_secs(60);
/// One that ran so long did not die early.
const RAN_WELL: Duration = Duration::from_secs(60);
/// One that dies early so often in a row stays down.
const RESTARTS_MAX: u32 = 6;

/// How a child process is started, also again.
#[derive(Clone, Debug)]
struct Launch {
    name: String,
    flags: Vec<String>,
    api_key: Option<String>,
}

/// A child process that has said what it listens on. It is killed when dropped, and stops by itself when this process
/// is gone, because its standard input ends then.
#[derive(Debug)]
pub(crate) struct ChildNode {
    launch: Launch,
    child: Child,
    started: Instant,
    /// Kept open: a child that cannot write to it would die.
    _stdout: BufReader<ChildStdout>,
    ready: Value,
}

impl Launch {
    /// Starts it and waits until it is ready. The API key travels in the environment: command lines are everybody's to read.
    async fn start(self) -> anyhow::Result<ChildNode> {
        let Self { name, flags, api_key } = &self;
        let program = std::env::current_exe().context("find the lagoon binary")?;
        let mut command = Command::new(program);
        match api_key {
            Some(key) => command.env("LAGOON_API_KEY", key),
            None => command.env_remove("LAGOON_API_KEY"),
        };
        let mut child = command
            .args(flags)
            .args(["--json", "--exit-with-stdin"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        let stdout = child.stdout.take().context("the child has no standard output")?;
        let mut stdout = BufReader::new(stdout);
        let mut line = String::new();
        let read = tokio::time::timeout(READY_DEADLINE, stdout.read_line(&mut line)).await;
        match read {
            Ok(Ok(n)) if n > 0 => {}
            Ok(_) => bail!("{name} ended before it was ready (its error is above)"),
            Err(_) => bail!("{name} was not ready within {} s", READY_DEADLINE.as_secs()),
        }
        let ready = serde_json::from_str(&line).with_context(|| format!("{name} said {line:?}"))?;
        Ok(ChildNode { launch: self, child, started: Instant::now(), _stdout: stdout, ready })
    }
}

impl ChildNode {
    fn address(&self, field: &str) -> anyhow::Result<SocketAddr> {
        let text = self.ready[field].as_str().with_context(|| format!("the child did not say its {field} address"))?;
        text.parse().with_context(|| format!("parse {text}"))
    }

    /// Its OpenAI endpoint.
    pub(crate) fn http(&self) -> anyhow::Result<SocketAddr> {
        self.address("http")
    }

    /// What it runs on, for people.
    pub(crate) fn device(&self) -> &str {
        self.ready["device"].as_str().unwrap_or("unknown")
    }

    /// The child's process id, while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }
}

/// Certificates of a pool that lives as long as this process.
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

    /// This process's own identity in the cluster.
    pub(crate) fn identity(&self) -> anyhow::Result<Identity> {
        Ok(self.ca.identity("parent")?)
    }

    /// Writes a certificate for `name`; returns the flags that name it.
    fn flags(&self, name: &str) -> anyhow::Result<Vec<String>> {
        let issued = self.ca.issue(name)?;
        let (cert, key) = (self.dir().join(format!("{name}.pem")), self.dir().join(format!("{name}.key")));
        fs::write(&cert, &issued.cert_pem).context("write a certificate")?;
        write_private(&key, &issued.key_pem).context("write a key")?;
        let ca = self.dir().join("ca.pem");
        let flag = |name: &str, path: &PathBuf| format!("--tls-{name}={}", path.display());
        Ok(vec![flag("ca", &ca), flag("cert", &cert), flag("key", &key)])
    }
}

/// The temporary directory is this user's alone; the key is too, wherever the directory is.
fn write_private(path: &Path, text: &str) -> std::io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    std::io::Write::write_all(&mut options.open(path)?, text.as_bytes())
}

/// A process of a pool that is watched.
#[derive(Debug)]
struct Watched {
    launch: Launch,
    state: State,
    /// Times in a row that it died early.
    deaths: u32,
}

#[derive(Debug)]
enum State {
    Running(Box<ChildNode>),
    /// After a pause.
    Starting(JoinHandle<anyhow::Result<ChildNode>>),
    /// It was asked to, or it died too often: whether it died.
    Ended(bool),
}

impl Watched {
    fn new(child: ChildNode) -> Self {
        Self { launch: child.launch.clone(), state: State::Running(Box::new(child)), deaths: 0 }
    }

    /// Looks what has become of it, says so, and starts it again if it died.
    async fn look(&mut self) {
        match &mut self.state {
            State::Running(node) => {
                let Ok(Some(status)) = node.child.try_wait() else { return };
                let ran = node.started.elapsed();
                if status.success() {
                    tracing::warn!("{} has stopped", self.launch.name);
                    self.state = State::Ended(false);
                } else {
                    self.died(&format!("has died ({status})"), ran);
                }
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

    fn died(&mut self, how: &str, ran: Duration) {
        self.deaths = if ran < RAN_WELL { self.deaths + 1 } else { 1 };
        let name = &self.launch.name;
        if self.deaths > RESTARTS_MAX {
            tracing::error!("{name} {how}; it stays down after {RESTARTS_MAX} attempts");
            self.state = State::Ended(true);
            return;
        }
        let pause = pause(self.deaths);
        tracing::warn!("{name} {how}; the others go on, and it is started again in {} s", pause.as_secs());
        let launch = self.launch.clone();
        self.state = State::Starting(tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            launch.start().await
        }));
    }
}

/// Before the start after so many deaths in a row (at least one).
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

    /// Starts again what dies, and says so, until no instance is left to be started.
    ///
    /// # Errors
    /// When instances died too often.
    pub(crate) async fn watch(self) -> anyhow::Result<()> {
        let mut gmanager = Watched::new(self.gmanager_node);
        // It numbers instances by the clock then: it does not know those that the one before has numbered.
        gmanager.launch.flags.retain(|flag| flag != FIRST_INSTANCE && !flag.starts_with("--listen="));
        gmanager.launch.flags.push(format!("--listen={}", self.gmanager));
        let mut instances: Vec<Watched> = self.instances.into_iter().map(Watched::new).collect();
        loop {
            gmanager.look().await;
            for instance in &mut instances {
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

/// A pool's first gManager numbers its instances from 1.
const FIRST_INSTANCE: &str = "--first-instance=1";

/// An instance to be started.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) role: &'static str,
    /// Flags of `lagoon serve` besides those of every instance of the pool.
    pub(crate) flags: Vec<String>,
    /// Those on one device start one after another: two that load at once would take longer, and each would see the memory
    /// that the other is about to take.
    pub(crate) device: usize,
}

/// What instances of a pool have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common<'a> {
    pub(crate) ca: &'a EphemeralCa,
    pub(crate) model: &'a str,
    pub(crate) served_name: &'a str,
    /// Clients must show it.
    pub(crate) api_key: Option<&'a str>,
    /// The gManager changes roles, at the earliest so many seconds after the last change was done.
    pub(crate) auto_roles: Option<u64>,
}

/// Starts a gManager and these instances. `progress` is told how many are ready.
pub(crate) async fn start_pool(
    common: Common<'_>,
    wanted: &[Wanted],
    progress: impl Fn(usize),
) -> anyhow::Result<LocalPool> {
    let mut command = vec!["gmanager".to_owned(), "--listen=127.0.0.1:0".to_owned(), FIRST_INSTANCE.to_owned()];
    command.extend(common.auto_roles.map(|rest_s| format!("--auto-roles={rest_s}")));
    command.extend(common.ca.flags("gmanager")?);
    let launch = Launch { name: "the gManager".to_owned(), flags: command, api_key: None };
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
    command.extend(common.ca.flags(&name)?);
    command.extend_from_slice(&wanted.flags);
    Launch { name, flags: command, api_key: common.api_key.map(str::to_owned) }.start().await
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
    Launch { name: "the single instance".to_owned(), flags: command, api_key: None }.start().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pauses = [1, 2, 3, 6, 7, 40].map(|deaths| pause(deaths).as_secs());
        assert_eq!(pauses, [1, 2, 4, 32, 60, 60]);
    }
}
