//! A closed standard output (`lagoon … | head -1`) ends a command quietly.

use super::{lagoon, path};
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Stdio};

/// Runs a command whose output nobody reads, and checks that it says nothing about that.
fn is_quiet(arguments: &[&str]) {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = lagoon(arguments).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    let status = child.wait().unwrap();
    assert!(status.success() && stderr.is_empty(), "{arguments:?}: {status}, {stderr}");
}

/// The commands that the program's help lists, but for `help`, which takes no flags.
fn commands() -> Vec<String> {
    let help = String::from_utf8(lagoon(&["--help"]).output().unwrap().stdout).unwrap();
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // The text of a command may go on in further lines, which are indented more.
    let named = listed.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    named.filter_map(|line| line.split(' ').next().map(str::to_owned)).filter(|name| name != "help").collect()
}

#[test]
fn every_help_ends_quietly() {
    let commands = commands();
    assert!(commands.len() > 10, "{commands:?}");
    for command in commands {
        is_quiet(&[&command, "--help"]);
    }
    for arguments in [&["--help"][..], &["--version"], &["help", "kv", "move"]] {
        is_quiet(arguments);
    }
}

#[test]
fn commands_without_a_server_end_quietly() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let model = path("models/passkey");
    for page in ["flags", "metrics", "models"] {
        is_quiet(&["reference", page]);
    }
    for shell in ["bash", "zsh", "fish"] {
        is_quiet(&["completions", shell]);
    }
    is_quiet(&["man", &at("man")]);
    is_quiet(&["doctor"]);
    is_quiet(&["doctor", "--json"]);
    is_quiet(&["doctor", &model, "--memory-gib=1"]);
    is_quiet(&["certs", "init", &at("ca")]);
    is_quiet(&["certs", "issue", &at("ca"), "node1"]);
    is_quiet(&["certs", "renew", &at("ca"), "node1"]);
    is_quiet(&["certs", "revoke", &at("ca"), "node1"]);
    is_quiet(&["quantize", &model, &at("m.gguf"), "--format=q8_0"]);
    assert!(dir.path().join("m.gguf").exists() && dir.path().join("man/lagoon.1").exists());
}

/// A pool of the bundled model; it ends with its standard input.
struct Pool(Child, String);

impl Pool {
    fn start() -> Self {
        let size = ["up", "--prefill=1", "--decode=2", "--kv-tokens=2048", "--port=0", "--json", "--exit-with-stdin"];
        let flags = ["--backend=cpu", "--threads=1", "--calibrate=off"];
        let mut child = lagoon(&[&size[..], &flags].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (_, http) = line.split_once("\"http\":\"").unwrap_or_else(|| panic!("not ready: {line:?}"));
        let url = format!("http://{}", http.split_once('"').unwrap().0);
        Self(child, url)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn commands_with_a_server_end_quietly() {
    // Its own standard output is closed, too, once it is ready.
    let pool = Pool::start();
    let url = pool.1.as_str();
    is_quiet(&["status", "--url", url]);
    is_quiet(&["status", "--json", "--url", url]);
    is_quiet(&["kv", "ls", "--url", url]);
    is_quiet(&["kv", "plan", "--url", url]);
    is_quiet(&["bench", "--url", url, "--requests=2", "--prompt-tokens=16", "--max-tokens=4"]);
    is_quiet(&["chat", "--url", url, "--max-tokens=4", "hello"]);
    is_quiet(&["role", "decode-2", "both", "--wait", "--url", url]);
    is_quiet(&["drain", "decode-2", "--wait", "--url", url]);
    is_quiet(&["drain", "decode-2", "--cancel", "--url", url]);
}

/// It ends when its first line is not read, and leaves no process behind: this test would wait for their standard error.
#[test]
fn the_demo_ends_quietly() {
    is_quiet(&["demo", "--backend=cpu", "--prompt-tokens=3000", "--kv-tokens=2048"]);
}
