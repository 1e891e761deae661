//! How real processes end, and what happens around them: signals while they load or hang, a device thread that panics, a kill,
//! certificates that are renewed and revoked, and a gManager that is away.

use crate::process_cluster::{Cluster, TWO, certificates, new_ca, wait_for_pool};
use crate::process_keys::wait;
use crate::process_up::golden_prompt;
use lagoon_pace::PaceProfile;
use lagoon_tests::process::{Client, Server, TIMEOUT, completion, lagoon, run, signal, wait_for_end};
use serde_json::json;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

const FLAGS: [&str; 4] = ["--backend=cpu", "--kv-tokens=64", "--calibrate=off", "--drain-timeout-s=1"];

/// SIGTERM was not served before a process served: it went on loading, for minutes with a large model.
#[cfg(unix)]
#[test]
fn a_process_that_loads_a_model_ends_at_sigterm() {
    let model = tempfile::tempdir().unwrap();
    // Whoever reads it waits for the writer.
    let config = model.path().join("config.json");
    assert!(Command::new("mkfifo").arg(&config).status().unwrap().success());
    let path = model.path().to_string_lossy().into_owned();
    let mut command = lagoon(&["serve", &path, "--backend=cpu", "--http=127.0.0.1:0"]);
    let mut loading = command.stdout(Stdio::null()).spawn().unwrap();
    let (opened, reads) = mpsc::channel();
    std::thread::spawn(move || opened.send(fs::OpenOptions::new().write(true).open(config)));
    let writer = reads.recv_timeout(TIMEOUT).unwrap().unwrap();
    signal(loading.id().into(), "TERM");
    assert_eq!(wait_for_end(&mut loading).code(), Some(0));
    drop(writer);
}

/// A member of the pool whose next step never ends, and a request that waits for it.
fn hung(cluster: &Cluster, name: &str, drain: &str) -> Server {
    let (model, prompt) = golden_prompt();
    let flags = [&FLAGS[..3], &[drain]].concat();
    let server = cluster.serve_paced(Duration::from_secs(3600), name, &model, &flags);
    let client = server.client();
    // An error, or the end of its connection.
    let body = completion(&prompt[..8], 4, &json!({}));
    std::thread::spawn(move || client.post("/v1/completions", &body).status);
    server.client().wait_until("/lagoon/status", "running", |s| s["running"] == 1);
    server
}

#[test]
fn signals_end_a_process_whose_device_hangs() {
    let cluster = Cluster::new();
    // The drain ends; or a second signal ends it.
    let mut drained = hung(&cluster, "drained", "--drain-timeout-s=1");
    let mut stopped = hung(&cluster, "stopped", "--drain-timeout-s=600");
    for server in [&drained, &stopped] {
        signal(server.pid(), "TERM");
    }
    stopped.client().wait_until("/lagoon/status", "draining", |s| s["draining"] == true);
    signal(stopped.pid(), "TERM");
    for server in [&mut stopped, &mut drained] {
        let ended = server.ended();
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
}

#[test]
fn a_device_thread_that_panics_ends_its_process_and_no_other() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let well = cluster.serve("well", &model, &FLAGS);
    // A step takes longer than a duration can say, which the modelled device's thread cannot compute.
    let profile = PaceProfile {
        bytes_per_s: 1e-290,
        flops: 1e15,
        copy_bytes_per_s: 1e12,
        launch_us: 0.0,
        weight_scale: 1.0,
        kv_scale: 1e-6,
        prompt_scale: 1.0,
        prompt_row_us: 0.0,
    };
    let pace = cluster.ca.path().join("panics.json");
    fs::write(&pace, serde_json::to_vec(&profile).unwrap()).unwrap();
    let mut panics = cluster.serve_at(Some(&pace), &cluster.ca, "panics", &model, &FLAGS).unwrap();
    wait_for_pool(&well.client(), TWO);
    let client = panics.client();
    let body = completion(&prompt[..8], 4, &json!({}));
    let asked = std::thread::spawn(move || client.post("/v1/completions", &body).status);
    let ended = panics.ended();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for words in ["thread 'lagoon-device' panicked", "error: the device thread has ended"] {
        assert!(ended.stderr.contains(words), "{words}: {ended:?}");
    }
    assert!(!matches!(asked.join(), Ok(200)));
    // It took its leave, and the other one serves.
    wait_for_pool(&well.client(), 8);
    assert_eq!(well.client().complete(&prompt[..8], 4, &json!({})).status, 200);
}

/// Names of what lies in a folder of temporary files.
fn left(dir: &Path) -> Vec<std::ffi::OsString> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

/// Only a process that made a folder itself removed those of processes that were killed.
#[test]
fn what_a_killed_process_left_goes_with_the_next_start() {
    let cluster = Cluster::new();
    let (model, _) = golden_prompt();
    let dir = tempfile::tempdir().unwrap();
    let start = |more: &[&str]| {
        let own = ["serve", &model, "--http=127.0.0.1:0", "--threads=1", "--block-tokens=8"];
        let mut command = lagoon(&[&own[..], &FLAGS, more].concat());
        command.env("TMPDIR", dir.path());
        Server::try_start_command(command).unwrap()
    };
    let [a, b, c] = certificates(&cluster.ca, "one");
    let gmanager = format!("--gmanager={}", cluster.gmanager.announced("quic"));
    let member = start(&[&gmanager, &a, &b, &c]);
    assert!(!left(dir.path()).is_empty(), "it shares its KV by a socket");
    member.kill();
    assert!(!left(dir.path()).is_empty());
    let alone = start(&[]);
    assert_eq!(left(dir.path()), Vec::<std::ffi::OsString>::new());
    drop(alone);
}

#[test]
fn certificates_are_renewed_and_revoked_while_processes_run() {
    let ca = new_ca();
    let dir = ca.path().to_string_lossy().into_owned();
    let certs = |what: &str, name: &str| {
        let ended = run(&["certs", what, &dir, name]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
    };
    // The list is there from the start.
    let _unused = certificates(&ca, "nobody");
    certs("revoke", "nobody");
    let list = format!("--tls-crl={dir}/crl.pem");
    let [a, b, c] = certificates(&ca, "gm");
    let gmanager = Server::start(&["gmanager", "--listen=127.0.0.1:0", "--metrics-port=0", &list, &a, &b, &c]);
    let metrics = Client::new(gmanager.announced("metrics").parse().unwrap());
    let cluster = Cluster { ca, gmanager };
    let (model, _) = golden_prompt();
    let flags = [&FLAGS[..], &[list.as_str()]].concat();
    let [one, two] = ["one", "two"].map(|name| cluster.serve(name, &model, &flags));
    wait_for_pool(&two.client(), TWO);

    let expires = || {
        let text = metrics.get("/metrics").text;
        text.lines().find(|line| line.starts_with("lagoon_certificate_expires")).map(str::to_owned)
    };
    wait(|| expires().is_some());
    let before = expires();
    certs("renew", "gm");
    wait(|| expires() != before);
    assert!(two.client().get("/lagoon/status").json()["registered"] == true, "sessions go on");

    certs("revoke", "one");
    one.client().wait_until("/lagoon/status", "out of the pool", |s| s["registered"] == false);
    metrics.wait_for_text("/metrics", "lagoon_gmanager_instances{state=\"alive\"} 1");
    assert!(two.client().get("/lagoon/status").json()["registered"] == true);
}

#[test]
fn a_gateways_health_is_degraded_while_no_gmanager_answers() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let instance = cluster.serve("one", &model, &FLAGS);
    wait_for_pool(&instance.client(), 8);
    let [a, b, c] = certificates(&cluster.ca, "gateway");
    let addr = cluster.gmanager.announced("quic");
    let flags = ["--listen=127.0.0.1:0", "--block-tokens=8", "--gmanager", &addr, &a, &b, &c];
    let gateway = Server::start(&[&["gateway"], &flags[..]].concat());
    let client = gateway.client();
    client.wait_until("/health", "well", |s| s["status"] == "ok" && s["instances"] == 1);
    let Cluster { ca, gmanager } = cluster;
    gmanager.kill();
    let health = client.wait_until("/health", "degraded", |s| s["status"] == "degraded");
    assert!(health["reason"].as_str().unwrap().contains("no gManager has answered for"), "{health}");
    assert_eq!(client.get("/health").status, 200, "it serves");
    assert_eq!(client.complete(&prompt[..8], 4, &json!({})).status, 200);
    let [a, b, c] = certificates(&ca, "gm");
    let again = Server::start(&["gmanager", "--listen", &addr, &a, &b, &c]);
    client.wait_until("/health", "well again", |s| s["status"] == "ok" && s["instances"] == 1);
    drop(again);
}

/// The status of a request with a header of so many bytes; `None` where the connection is closed before it is read.
fn status_with(addr: SocketAddr, path: &str, bytes: usize) -> Option<u16> {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let value = "v".repeat(bytes);
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-large: {value}\r\n\r\n");
    // The server may close the connection before it has all of it.
    let _ = stream.write_all(request.as_bytes());
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    String::from_utf8_lossy(&text).split(' ').nth(1)?.parse().ok()
}

#[test]
fn every_http_port_bounds_headers() {
    let cluster = Cluster::new();
    let (model, _) = golden_prompt();
    let health = "--health-listen=127.0.0.1:0";
    let instance = cluster.serve("one", &model, &[&FLAGS[..], &[health]].concat());
    let backend = format!("--backend={}", instance.announced("http"));
    let gateway = Server::start(&["gateway", "--listen=127.0.0.1:0", &backend, health]);
    let ports = [
        (&instance, "http", "/health"),
        (&instance, "health", "/health"),
        (&gateway, "http", "/health"),
        (&gateway, "health", "/health"),
        (&cluster.gmanager, "metrics", "/metrics"),
    ];
    for (server, port, path) in ports {
        let addr = server.announced(port).parse().unwrap();
        assert_eq!(status_with(addr, path, 16 << 10), Some(200), "{port} {path}");
        let refused = status_with(addr, path, 128 << 10);
        assert!(refused.is_none_or(|status| status == 431), "{port} {path}: {refused:?}");
    }
}
