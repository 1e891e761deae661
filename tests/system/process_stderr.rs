//! A standard error that is unread, full or closed costs log lines only.

use lagoon_tests::process::{Server, completion, lagoon, signal};
use serde_json::json;
use std::fs::OpenOptions;
use std::process::Stdio;

fn passkey() -> String {
    lagoon_tests::root().join("models/passkey").to_string_lossy().into_owned()
}

/// Broken standard errors by kind. A pipe that is open and unread is full after 64 KiB.
fn broken() -> Vec<(&'static str, Stdio, Option<std::io::PipeReader>)> {
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (closed, writer) = std::io::pipe().unwrap();
    drop(closed);
    let (unread, filled) = std::io::pipe().unwrap();
    vec![("full", full.into(), None), ("closed", writer.into(), None), ("not read", filled.into(), Some(unread))]
}

#[test]
fn an_instance_serves_and_stops_whatever_its_standard_error_is() {
    for (what, stderr, _kept) in broken() {
        let mut command =
            lagoon(&["serve", &passkey(), "--backend=cpu", "--threads=1", "--http=127.0.0.1:0", "--kv-tokens=1024"]);
        // Verbose, so that the pipe fills.
        command.env("LAGOON_LOG", "trace").stderr(stderr);
        let mut server = Server::try_start_writing(command).unwrap_or_else(|ended| panic!("{what}: {ended:?}"));
        for _ in 0..20 {
            let answer = server.client().post("/v1/completions", &completion(&[7; 60], 20, &json!({})));
            assert_eq!(answer.status, 200, "{what}: {}", answer.text);
        }
        signal(server.pid(), "TERM");
        assert_eq!(server.ended().code, Some(0), "{what}");
    }
}

/// A process of the pool dies, and `up` cannot log that.
#[test]
fn a_pool_outlives_what_it_cannot_say() {
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command =
        lagoon(&["up", &passkey(), "--instances=2", "--backend=cpu", "--threads=1", "--port=0", "--kv-tokens=1024"]);
    command.stderr(full);
    let pool = Server::try_start_writing(command).unwrap_or_else(|ended| panic!("{ended:?}"));
    let client = pool.client();
    let alive =
        |s: &serde_json::Value| s["instances"].as_array().unwrap().iter().filter(|row| row["alive"] == true).count();
    lagoon_tests::process::kill(pool.ready["pids"][1].as_u64().unwrap());
    client.wait_until("/lagoon/status", "noticed", |s| {
        s["instances"].as_array().unwrap().iter().any(|r| r["alive"] == false)
    });
    client.wait_until("/lagoon/status", "replaced", |s| alive(s) == 2);
    assert_eq!(client.post("/v1/completions", &completion(&[7; 60], 5, &json!({}))).status, 200);
    assert_eq!(pool.stop().code, Some(0));
}
