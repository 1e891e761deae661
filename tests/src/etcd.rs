//! A real etcd server with one member, on free ports of this machine, with its data in a temporary directory.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// An etcd server; killed when dropped.
#[derive(Debug)]
pub struct EtcdServer {
    child: Child,
    dir: TempDir,
    client: u16,
    peer: u16,
}

/// The server's file: in PATH, or where Debian's etcd-server installs it.
fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    dirs.push("/usr/bin".into());
    dirs.iter().map(|dir| dir.join("etcd")).find(|program| program.is_file())
}

/// A free port. If another process takes it before etcd does, the test fails with a message.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl EtcdServer {
    /// Starts the server and waits until it replies.
    ///
    /// # Errors
    /// If it is not installed.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start() -> Result<Self, String> {
        let program = program().ok_or("etcd is not installed (Debian: etcd-server)")?;
        let dir = tempfile::tempdir().unwrap();
        let (client, peer) = (free_port(), free_port());
        let child = Self::spawn(&program, &dir, client, peer);
        let server = Self { child, dir, client, peer };
        server.wait();
        Ok(server)
    }

    fn spawn(program: &PathBuf, dir: &TempDir, client: u16, peer: u16) -> Child {
        let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        Command::new(program)
            .arg("--data-dir")
            .arg(dir.path().join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(dir.path().join("log")).unwrap())
            .spawn()
            .unwrap()
    }

    fn wait(&self) {
        let deadline = Instant::now() + crate::process::TIMEOUT;
        while std::net::TcpStream::connect(("127.0.0.1", self.client)).is_err() {
            let log = || std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "etcd does not answer: {}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The `--etcd` flag for this server.
    #[must_use]
    pub fn flag(&self) -> String {
        format!("--etcd=http://127.0.0.1:{}", self.client)
    }

    /// Kills the server; its data stays on disk.
    ///
    /// # Panics
    /// If the kill fails.
    pub fn stop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts the server on its data.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        self.child = Self::spawn(&program().unwrap(), &self.dir, self.client, self.peer);
        self.wait();
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        // It may have been stopped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
