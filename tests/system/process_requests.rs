//! What requests cost a real server: memory, threads, and other requests' time.

use crate::process_up::golden_prompt;
use lagoon_tests::process::{Client, Server, TIMEOUT};
use serde_json::{Value, json};
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const MIB: usize = 1 << 20;

fn serve(model: &str) -> Server {
    let flags = ["--backend=cpu", "--threads=1", "--http=127.0.0.1:0", "--block-tokens=8", "--kv-tokens=64"];
    Server::start(&[&["serve", model, "--served-model-name=tiny"], &flags[..]].concat())
}

/// The tiny model with the longest context there is: texts of megabytes are tokenised.
fn long_context() -> (TempDir, String) {
    let (model, dir) = (golden_prompt().0, TempDir::new().unwrap());
    for file in std::fs::read_dir(Path::new(&model)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = lagoon_types::limits::SEQUENCE_TOKENS_MAX.into();
    std::fs::write(&path, config.to_string()).unwrap();
    let text = dir.path().to_string_lossy().into_owned();
    (dir, text)
}

/// `{"prompt": TEXT}` with a text of so many bytes.
fn long_text(bytes: usize) -> String {
    json!({"prompt": "the cat sat on a mat ".repeat(bytes / 21 + 1)[..bytes]}).to_string()
}

/// A line of /proc/PID/status, in MiB.
fn memory_mib(server: &Server, name: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
}

fn threads(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap().count()
}

fn wait_for(what: &str, satisfied: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !satisfied() {
        assert!(Instant::now() < deadline, "no {what} within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_body_takes_memory_for_itself_and_for_what_is_used_of_it() {
    let server = serve(&golden_prompt().0);
    let client = server.client();
    assert_eq!(client.post("/v1/completions", &json!({"prompt": [1], "max_tokens": 1})).status, 200);
    let before = memory_mib(&server, "VmHWM");
    let ones = "1,".repeat(4 * MIB);
    for (what, body, status, words) in [
        ("a prompt in tokens", format!("{{\"prompt\":[{ones}1]}}"), 400, "4194305 tokens"),
        ("a prompt of lists", format!("{{\"prompt\":[{}[]]}}", "[],".repeat(8 * MIB / 3)), 400, "2796203 entries"),
        ("messages", format!("{{\"messages\":[{}{{}}]}}", "{},".repeat(8 * MIB / 3)), 400, "2796203 entries"),
        ("a label", format!("{{\"prompt\":[1],\"max_tokens\":1,\"metadata\":[{ones}1]}}"), 200, ""),
        (
            "stop strings",
            format!("{{\"prompt\":[1],\"stop\":[{}\"a\"]}}", "\"a\",".repeat(2 * MIB)),
            400,
            "2097153 stop",
        ),
        ("a text", long_text(8 * MIB), 400, "8388608 bytes"),
    ] {
        let path = if what == "messages" { "/v1/chat/completions" } else { "/v1/completions" };
        let answer = client.post_text(path, body);
        assert_eq!(answer.status, status, "{what}: {}", answer.text);
        assert!(answer.text.contains(words), "{what}: {}", answer.text);
        let taken = memory_mib(&server, "VmHWM") - before;
        println!("{what} of 8 MiB: {taken} MiB at most since the start");
        // The body as it arrives and a copy of what is text; freed memory of earlier ones may not be given back. A tree of
        // values took 313 MiB for the first of these.
        assert!(taken <= 80, "{what} of 8 MiB: {taken} MiB");
    }
}

/// Three prompts of 8 MiB whose tokenising goes on; gives the server's answers to them as they come.
fn tokenise_three(server: &Server) -> mpsc::Receiver<u16> {
    let before = memory_mib(server, "VmRSS");
    let addr: SocketAddr = server.announced("http").parse().unwrap();
    let (sender, answers) = mpsc::channel();
    for _ in 0..3 {
        let sender = sender.clone();
        std::thread::spawn(move || {
            let mut stream = TcpStream::connect(addr).unwrap();
            send(&mut stream, &long_text(8 * MIB));
            // The server may be stopped before it answers.
            let mut first = [0; 12];
            if std::io::Read::read_exact(&mut stream, &mut first).is_ok() {
                let _ = sender.send(String::from_utf8_lossy(&first[9..]).parse().unwrap());
            }
        });
    }
    wait_for("bodies", || memory_mib(server, "VmRSS") > before + 24);
    answers
}

fn send(stream: &mut TcpStream, body: &str) {
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn a_small_prompt_is_answered_while_long_ones_are_tokenised() {
    let (_dir, model) = long_context();
    let server = serve(&model);
    let (client, threads_before) = (server.client(), threads(&server));
    let answers = tokenise_three(&server);
    let small = client.post("/v1/completions", &json!({"prompt": "the cat", "max_tokens": 2}));
    assert_eq!(small.status, 200, "{}", small.text);
    assert!(answers.try_recv().is_err(), "a prompt of 8 MiB was answered first");
    assert!(threads(&server) <= threads_before + 8);
    server.kill();
}

/// The figure that the changelog and the issue ask for: `cargo test … -- --ignored --nocapture small_prompt_takes`.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "measures times; for a quiet machine"]
fn how_long_a_small_prompt_takes_beside_three_long_ones() {
    let (_dir, model) = long_context();
    let server = serve(&model);
    let client = server.client();
    let small = |client: &Client| {
        let begun = Instant::now();
        assert_eq!(client.post("/tokenize", &json!({"prompt": "the cat"})).status, 200);
        begun.elapsed()
    };
    let mut alone: Vec<_> = (0..100).map(|_| small(&client)).collect();
    alone.sort_unstable();
    let answers = tokenise_three(&server);
    let mut beside: Vec<_> = (0..200).map(|_| small(&client)).collect();
    assert!(answers.try_recv().is_err(), "it was measured beside nothing");
    beside.sort_unstable();
    let (median, ratio) = (beside[100], beside[100].as_secs_f64() / alone[50].as_secs_f64());
    println!("/tokenize alone {:?}; beside three 8 MiB prompts {median:?}, {ratio:.1} times", alone[50]);
    println!("the longest of 200: {:?}", beside[199]);
    server.kill();
}

#[cfg(target_os = "linux")]
#[test]
fn clients_that_hang_up_leave_no_work_behind() {
    let (_dir, model) = long_context();
    let server = serve(&model);
    let (client, before) = (server.client(), threads(&server));
    let addr: SocketAddr = server.announced("http").parse().unwrap();
    let body = long_text(MIB);
    let mut most = 0;
    for _ in 0..60 {
        send(&mut TcpStream::connect(addr).unwrap(), &body);
        most = most.max(threads(&server));
    }
    assert_eq!(client.post("/v1/completions", &json!({"prompt": "the cat", "max_tokens": 2})).status, 200);
    most = most.max(threads(&server));
    println!("{before} threads before, {most} at most");
    assert!(most <= before + 8, "{before} threads before, {most} while clients hung up");
    server.kill();
}
