//! The pool that the clients are run against: `lagoon up` with instances that hold less than the clients' prompts.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{Place, model};
use crate::workspace;

/// The model's name at the pool.
const MODEL: &str = "passkey";
const INSTANCES: &str = "3";
/// Tokens of KV of an instance. The clients' prompts have some 1,400.
const KV_TOKENS: &str = "1024";
/// The key that clients send.
const KEY: &str = "key-of-the-clients";

/// Deadlines for the ready line and for the end of all processes.
const READY: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(20);

/// A ready pool; ended when dropped.
pub(super) struct Pool {
    child: Child,
    /// The pool ends when this pipe closes.
    stdin: Option<ChildStdin>,
    url: String,
    model: PathBuf,
}

impl Pool {
    /// Builds the program, writes the model and starts the pool.
    pub(super) fn start(place: &Place<'_>) -> Result<Self> {
        build(place.root)?;
        if place.folder.exists() {
            std::fs::remove_dir_all(&place.folder).with_context(|| format!("remove {}", place.folder.display()))?;
        }
        let model = place.folder.join(MODEL);
        model::write(&place.root.join("models/passkey"), &model)?;
        let log = File::create(place.folder.join("pool.txt")).context("create the pool's log")?;
        let mut child = command(place, &model)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .context("start lagoon up")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("the pool's output")?;
        let mut pool = Self { child, stdin, url: String::new(), model };
        let ready = first_line(stdout)?;
        let ready: Value = serde_json::from_str(&ready).with_context(|| {
            format!("the pool did not start: {ready:?}\nhint: {}", place.folder.join("pool.txt").display())
        })?;
        let address = ready["http"].as_str().with_context(|| format!("no address in {ready}"))?;
        pool.url = format!("http://{address}");
        Ok(pool)
    }

    /// What scripts learn about the pool.
    pub(super) fn variables(&self) -> [(&'static str, String); 4] {
        [
            ("LAGOON_URL", self.url.clone()),
            ("LAGOON_API_KEY", KEY.to_owned()),
            ("LAGOON_MODEL", MODEL.to_owned()),
            ("LAGOON_MODEL_DIR", self.model.to_string_lossy().into_owned()),
        ]
    }

    /// Ends the pool, which must have lived until now.
    pub(super) fn stop(mut self) -> Result<()> {
        ensure!(self.child.try_wait()?.is_none(), "the pool ended while the clients ran");
        self.stdin = None;
        let deadline = Instant::now() + END;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "the pool ended with {status}");
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("the pool did not end within {} s", END.as_secs())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stdin = None;
        let deadline = Instant::now() + END;
        while self.child.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn build(root: &Path) -> Result<()> {
    let build = ["build", "--locked", "--quiet", "--release", "--package", "lagoon"];
    let built = workspace::cargo().args(build).current_dir(root).stdin(Stdio::null()).status();
    ensure!(built.context("build lagoon")?.success(), "lagoon does not build");
    Ok(())
}

fn command(place: &Place<'_>, model: &Path) -> Command {
    let program = place.target.join("release").join(format!("lagoon{}", std::env::consts::EXE_SUFFIX));
    let mut command = Command::new(program);
    command.arg("up").arg(model);
    command.args(["--instances", INSTANCES, "--kv-tokens", KV_TOKENS, "--api-key", KEY]);
    command.args(["--backend=cpu", "--threads=1", "--port=0", "--json", "--exit-with-stdin"]);
    for (name, _) in std::env::vars_os() {
        // This machine's own settings are not the pool's.
        if name.to_string_lossy().starts_with("LAGOON_") {
            command.env_remove(name);
        }
    }
    command
}

/// The first line of a process's output, which is read to its end in the background.
fn first_line(stdout: impl std::io::Read + Send + 'static) -> Result<String> {
    let (sender, line) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut stdout, mut line) = (BufReader::new(stdout), String::new());
        let _ = stdout.read_line(&mut line);
        let _ = sender.send(line);
        let _ = std::io::copy(&mut stdout, &mut std::io::sink());
    });
    line.recv_timeout(READY).with_context(|| format!("the pool was not ready within {} s", READY.as_secs()))
}
