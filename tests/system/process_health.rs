//! The health port (`--health-listen`) and the limit on open files of real processes.

use crate::process_cluster::{Cluster, TWO, wait_for_pool};
use crate::process_keys::wait;
use crate::process_up::golden_prompt;
use lagoon_tests::faults::{certificates_for, new_ca};
use lagoon_tests::process::{Client, Server, lagoon, run};
use serde_json::json;
use std::io::{ErrorKind, Read as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

const FLAGS: [&str; 6] = [
    "--backend=cpu",
    "--threads=1",
    "--http=127.0.0.1:0",
    "--block-tokens=8",
    "--kv-tokens=64",
    "--health-listen=127.0.0.1:0",
];

fn probes(server: &Server) -> Client {
    Client::new(server.announced("health").parse().unwrap())
}

#[test]
fn probes_are_answered_when_the_api_has_no_connection_left() {
    let model = golden_prompt().0;
    let server = Server::start(&[&["serve", &model, "--api-key=secret"], &FLAGS[..]].concat());
    let addr: SocketAddr = server.announced("http").parse().unwrap();
    let held: Vec<TcpStream> = (0..512).map(|_| TcpStream::connect(addr).unwrap()).collect();
    let probes = probes(&server);
    // One more than this address may have is closed, and not only after the 30 s for the headers of a request.
    let mut refused = TcpStream::connect(addr).unwrap();
    refused.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let closed = refused.read(&mut [0]);
    assert!(matches!(&closed, Ok(0)) || closed.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    for path in ["/health", "/ready"] {
        let answer = probes.get(path);
        assert_eq!((answer.status, answer.json()), (200, json!({"status": "ok"})), "{path}");
    }
    // No key is asked for. The first tick records it.
    wait(|| probes.get("/metrics").text.contains("lagoon_kv_blocks"));
    assert_eq!(probes.get("/v1/models").status, 404);
    drop(held);
}

#[test]
fn every_process_of_a_pool_answers_probes() {
    let model = golden_prompt().0;
    let ca = new_ca();
    let [a, b, c] = certificates_for(&ca, "health", "gmanager,gateway,instance");
    let gmanager = Server::start(&["gmanager", "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", &a, &b, &c]);
    probes(&gmanager).wait_for_text("/metrics", "lagoon_gmanager_leads 1");
    let to = gmanager.announced("quic");
    let flags =
        ["--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--block-tokens=8", "--gmanager", &to, &a, &b, &c];
    let gateway = Server::start(&[&["gateway"], &flags[..]].concat());
    let answer = probes(&gateway).get("/ready");
    assert!(answer.status == 503 && answer.text.contains("no instance is alive"), "{}", answer.text);
    let kv = Server::start(&[&["serve", &model, "--role=kv", "--gmanager", &to, &a, &b, &c], &FLAGS[..]].concat());
    assert_eq!(probes(&kv).get("/ready").status, 200);
    for server in [&gmanager, &gateway, &kv] {
        assert_eq!(probes(server).get("/health").status, 200);
    }
}

/// `lagoon` as a shell with fewer open files would start it.
#[cfg(target_os = "linux")]
fn with_few_files(arguments: &[&str]) -> Command {
    let plain = lagoon(arguments);
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -S -n 256 && exec \"$0\" \"$@\""]).arg(plain.get_program()).args(plain.get_args());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

#[cfg(target_os = "linux")]
#[test]
fn the_limit_on_open_files_is_raised_and_printed() {
    let model = golden_prompt().0;
    let server = Server::try_start_command(with_few_files(&[&["serve", &model], &FLAGS[..]].concat())).unwrap();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let [soft, hard] = [0, 1].map(|at| line.split_whitespace().nth(at).unwrap().to_owned());
    assert!(soft == hard && soft != "256", "{limits}");
    let doctor = run(&["doctor"]).stdout;
    assert!(doctor.contains(&format!("a process may open {hard} files")), "{doctor}");
}

/// Its health stayed green, its clients waited for minutes, and SIGTERM waited for the hung thread.
#[test]
fn a_process_whose_device_hangs_leaves_the_pool_and_ends() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let flags = ["--backend=cpu", "--kv-tokens=64", "--calibrate=off"];
    let well = cluster.serve("well", &model, &flags);
    // A step takes an hour.
    let flags = [&flags[..], &["--device-timeout-s=1"]].concat();
    let mut hung = cluster.serve_paced(Duration::from_secs(3600), "hung", &model, &flags);
    wait_for_pool(&well.client(), TWO);
    let client = hung.client();
    // It waits for a step that never ends: an error, or the end of its connection.
    let asked = std::thread::spawn(move || client.complete(&prompt, 4, &json!({})).status);
    let ended = hung.ended();
    assert!(ended.code != Some(0) && ended.stderr.contains("has not finished a layer for"), "{ended:?}");
    assert!(!matches!(asked.join(), Ok(200)));
    // It deregistered: no peer had to detect its silence.
    wait_for_pool(&well.client(), 8);
    let metrics = Client::new(cluster.gmanager.announced("metrics").parse().unwrap());
    metrics.wait_for_text("/metrics", "lagoon_gmanager_instances{state=\"alive\"} 1");
    assert!(
        metrics.get("/metrics").text.contains("lagoon_gmanager_fenced_total 0"),
        "{}",
        metrics.get("/metrics").text
    );
}
