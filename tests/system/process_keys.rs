//! Keys, HTTPS and the pool's certificates on real processes: accepted and refused requests, and changes while they run.

use crate::process_cluster::{Cluster, certificates, wait_for_pool};
use crate::process_up::golden_prompt;
use lagoon_tests::process::{Client, Server, TIMEOUT, completion, lagoon, run};
use serde_json::json;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

const BODY: &str = r#"{"prompt": [1, 2], "max_tokens": 2, "ignore_eos": true}"#;

fn serve(flags: &[&str]) -> Server {
    let (model, _) = golden_prompt();
    let own =
        ["serve", &model, "--backend=cpu", "--threads=1", "--block-tokens=8", "--kv-tokens=64", "--calibrate=off"];
    Server::start(&[&own[..], flags].concat())
}

/// The status of a request that is written by hand.
fn raw(addr: SocketAddr, method: &str, path: &str, headers: &str) -> u16 {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let body = if method == "POST" { BODY } else { "" };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{headers}\r\n{body}").as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.split(' ').nth(1).unwrap_or_else(|| panic!("{text:?}")).parse().unwrap()
}

/// An address of this machine that is not loopback, if it has one.
fn own_addr() -> Option<std::net::IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Nothing is sent: the route names the address.
    socket.connect("192.0.2.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

/// Once, any client of the port could drain a pool.
#[test]
fn administration_is_for_this_machine_unless_it_has_a_key() {
    let open = serve(&["--http=0.0.0.0:0"]);
    let port = open.announced("http").parse::<SocketAddr>().unwrap().port();
    let here = SocketAddr::from(([127, 0, 0, 1], port));
    for path in ["/lagoon/status", "/metrics"] {
        assert_eq!(raw(here, "GET", path, ""), 200, "{path}");
        // Of a reverse proxy on this machine.
        assert_eq!(raw(here, "GET", path, "x-forwarded-for: 192.0.2.7\r\n"), 403, "{path}");
        if let Some(ip) = own_addr() {
            assert_eq!(raw(SocketAddr::new(ip, port), "GET", path, ""), 403, "{path} at {ip}");
        }
    }
    assert_eq!(raw(here, "POST", "/v1/completions", "x-forwarded-for: 192.0.2.7\r\n"), 200);

    let (model, _) = golden_prompt();
    let own = ["up", &model, "--backend=cpu", "--threads=1", "--port=0", "--block-tokens=8", "--kv-tokens=64"];
    let keys = ["--api-key=sesame", "--admin-key=root", "--calibrate=off"];
    let pool = Server::start(&[&own[..], &keys[..]].concat());
    let addr: SocketAddr = pool.announced("http").parse().unwrap();
    let bears = |key: &str| format!("authorization: Bearer {key}\r\nx-forwarded-for: 192.0.2.7\r\n");
    assert_eq!(
        [raw(addr, "GET", "/lagoon/status", &bears("root")), raw(addr, "GET", "/metrics", &bears("root"))],
        [200; 2]
    );
    assert_eq!(raw(addr, "GET", "/lagoon/status", &bears("sesame")), 403);
    assert_eq!(raw(addr, "POST", "/lagoon/admin", &bears("sesame")), 403);
    assert_eq!(raw(addr, "POST", "/v1/completions", &bears("sesame")), 200);
    assert_eq!(raw(addr, "POST", "/v1/completions", &bears("root")), 403);
    let url = format!("--url=http://{addr}");
    let status = |key: &str| run(&["status", &url, key]);
    assert_eq!(status("--admin-key=root").code, Some(0));
    let refused = status("--api-key=sesame");
    assert!(refused.code == Some(1) && refused.stderr.contains("--admin-key"), "{refused:?}");
}

/// A kv node has no requests, and its status is guarded as an instance's is.
#[test]
fn administration_of_a_kv_node_takes_what_an_instances_does() {
    let cluster = Cluster::new();
    let (model, _) = golden_prompt();
    let instance = cluster.serve("one", &model, &["--backend=cpu", "--kv-tokens=64"]);
    let hash = format!("--model-hash={}", instance.announced("model_hash"));
    let flags = ["--role=kv", "--backend=cpu", "--kv-tokens=64", &hash];
    let (open, keyed) = (cluster.serve("open", &model, &flags), [&flags[..], &["--admin-key=root"]].concat());
    let keyed = cluster.serve("keyed", &model, &keyed);
    let [open, keyed] = [open, keyed].map(|kv| (kv.announced("http").parse::<SocketAddr>().unwrap(), kv));
    let ask = |addr: SocketAddr, headers: &str| raw(addr, "GET", "/lagoon/status", headers);
    let elsewhere = "x-forwarded-for: 192.0.2.7\r\n";
    assert_eq!([ask(open.0, ""), ask(open.0, elsewhere), ask(keyed.0, "")], [200, 403, 401]);
    assert_eq!(ask(keyed.0, &format!("authorization: Bearer root\r\n{elsewhere}")), 200);
    assert_eq!(ask(keyed.0, "authorization: Bearer sesame\r\n"), 401);
}

#[test]
fn a_key_file_has_scopes_and_rates_and_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.toml");
    let entry = |name: &str, more: &str| format!("[[key]]\nname = '{name}'\nkey = 'secret-{name}'\n{more}\n");
    fs::write(
        &path,
        entry("a", "requests_per_minute = 2")
            + &entry("t", "tokens_per_minute = 1")
            + &entry("ops", "scopes = ['admin']"),
    )
    .unwrap();
    let file = format!("--key-file={}", path.display());
    let server = serve(&["--http=127.0.0.1:0", &file, "--log=debug"]);
    let ask = |key: &str| server.client().with_key(key).post_text("/v1/completions", BODY.to_owned());
    assert_eq!([ask("secret-a").status, ask("secret-a").status], [200, 200]);
    let over = ask("secret-a");
    assert_eq!((over.status, &over.json()["error"]["code"]), (429, &json!("rate_limit_exceeded")), "{}", over.text);
    let seconds: u64 = over.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds), "{seconds}");
    // Two tokens of the prompt and two of the answer.
    assert_eq!([ask("secret-t").status, ask("secret-t").status], [200, 429]);
    assert_eq!([ask("secret-b").status, ask("secret-ops").status], [401, 403]);
    assert_eq!(server.client().with_key("secret-ops").get("/lagoon/status").status, 200);
    assert_eq!(server.client().with_key("secret-a").get("/lagoon/status").status, 403);

    // Rolling a key: the new one beside the old one, then alone.
    fs::write(&path, entry("a", "") + &entry("b", "")).unwrap();
    wait(|| ask("secret-b").status == 200);
    fs::write(&path, entry("b", "")).unwrap();
    wait(|| ask("secret-a").status == 401);
    fs::write(&path, "[[key]]\nname = 'secret-c").unwrap();
    let stopped = {
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(ask("secret-b").status, 200, "a file that is not understood changes nothing");
        server.stop()
    };
    assert!(stopped.stderr.contains("line 2 of the key file"), "{}", stopped.stderr);
    assert!(!stopped.stderr.contains("secret-"), "a key is in the log: {}", stopped.stderr);
}

pub(crate) fn wait(until: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !until() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Writes a certificate for localhost that is its own authority, and its key.
fn certificate(dir: &Path, name: &str) -> [String; 2] {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let path = |suffix: &str| dir.join(format!("{name}.{suffix}")).to_string_lossy().into_owned();
    fs::write(path("pem"), made.cert.pem()).unwrap();
    fs::write(path("key"), made.signing_key.serialize_pem()).unwrap();
    [path("pem"), path("key")]
}

#[test]
fn https_is_spoken_to_by_all_commands_and_certificates_are_rolled() {
    let dir = tempfile::tempdir().unwrap();
    let [cert, key] = certificate(dir.path(), "server");
    let [other, other_key] = certificate(dir.path(), "other");
    let server = serve(&[
        "--http=127.0.0.1:0",
        "--api-key=sesame",
        &format!("--https-cert={cert}"),
        &format!("--https-key={key}"),
    ]);
    let addr: SocketAddr = server.announced("http").parse().unwrap();
    let first = dir.path().join("first.pem").to_string_lossy().into_owned();
    fs::copy(&cert, &first).unwrap();
    let url = format!("--url=https://localhost:{}", addr.port());
    let asked = |command: &[&str], ca: &str| run(&[command, &[&url, "--api-key=sesame", "--ca", ca]].concat());
    for command in [
        &["status"][..],
        &["bench", "--requests=2", "--prompt-tokens=4", "--max-tokens=2", "--concurrency=1"],
        &["kv", "ls"],
    ] {
        let ended = asked(command, &first);
        // One instance is no pool.
        let expected = if command[0] == "kv" { "no route" } else { "" };
        assert!(ended.stderr.contains(expected) && !ended.stderr.contains("connection"), "{command:?}: {ended:?}");
        assert!(ended.code == Some(0) || command[0] == "kv", "{command:?}: {ended:?}");
    }
    let stranger = asked(&["status"], &other);
    assert!(stranger.code == Some(1) && stranger.stderr.contains("certificate"), "{stranger:?}");
    let blind = run(&["status", &url]);
    assert!(blind.code == Some(1) && blind.stderr.contains("--ca"), "{blind:?}");
    assert_eq!(raw(addr, "GET", "/health", ""), 400, "plain HTTP");

    fs::copy(&other_key, &key).unwrap();
    fs::copy(&other, &cert).unwrap();
    wait(|| asked(&["status"], &other).code == Some(0));
    assert_eq!(asked(&["status"], &first).code, Some(1));
}

/// The gateway has keys of its own: instances accept its requests without a key because of its certificate, and no other node's.
#[test]
fn a_gateway_comes_with_a_certificate_of_the_pool() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let flags = ["--backend=cpu", "--kv-tokens=128", "--calibrate=off", "--api-key=inner", "--admin-key=root"];
    let instance = cluster.serve("one", &model, &flags);
    wait_for_pool(&instance.client().with_key("root"), 16);
    let [a, b, c] = certificates(&cluster.ca, "gateway");
    let gmanager = cluster.gmanager.announced("quic");
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys.toml");
    fs::write(&keys, "[[key]]\nname = 'a'\nkey = 'outer'\n[[key]]\nname = 't'\nkey = 'few'\ntokens_per_minute = 50\n")
        .unwrap();
    let file = format!("--key-file={}", keys.display());
    let flags = ["--listen=127.0.0.1:0", "--block-tokens=8", "--gmanager", &gmanager, &a, &b, &c, &file];
    let gateway = Server::start(&[&["gateway"], &flags[..]].concat());
    let ask = |server: &Server, key: &str, extra: serde_json::Value| {
        let client: Client = server.client().with_key(key);
        client.post("/v1/completions", &completion(&prompt[..40], 4, &extra)).status
    };
    for extra in [json!({}), json!({"stream": true})] {
        assert_eq!([ask(&gateway, "outer", extra.clone()), ask(&gateway, "inner", extra.clone())], [200, 401]);
        assert_eq!([ask(&instance, "outer", extra.clone()), ask(&instance, "inner", extra)], [401, 200]);
    }
    // Tokens are counted at the gateway: 44 leave a few, 88 none.
    let few = || ask(&gateway, "few", json!({"stream": true}));
    assert_eq!([few(), few()], [200, 200]);
    wait(|| few() == 429);
    // What reaches the instance through the gateway is inference, however its path is written.
    let outer = "authorization: Bearer outer\r\n";
    let addr = gateway.announced("http").parse().unwrap();
    for path in ["/v1/../lagoon/status", "/v1/%2e%2e/lagoon/status", "//lagoon/status", "/%6cagoon/status"] {
        assert_ne!(raw(addr, "GET", path, outer), 200, "{path}");
    }
}

/// `lagoon status | head -1` panicked before.
#[test]
fn commands_end_quietly_when_nobody_reads_their_answer() {
    let server = serve(&["--http=127.0.0.1:0"]);
    let url = format!("--url=http://{}", server.announced("http"));
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca").to_string_lossy().into_owned();
    let pem = format!("{ca}/ca.pem");
    for command in [
        &["status", &url][..],
        &["status", "--json", &url],
        &["chat", &url, "--max-tokens=4", "hi"],
        &["bench", &url, "--requests=1", "--max-tokens=2", "--prompt-tokens=4"],
        &["certs", "init", &ca],
        &["certs", "show", &pem],
        &["doctor"],
        &["reference", "flags"],
        &["--help"],
        &["--version"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = lagoon(command).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), stderr.contains("panicked")), (Some(0), false), "{command:?}: {stderr}");
        assert!(!stderr.contains("error"), "{command:?}: {stderr}");
    }
}

/// Every `lagoon up` left its instances' folders behind before, and an interrupted demo its keys.
#[test]
fn nothing_is_left_in_the_temporary_folder() {
    let dir = tempfile::tempdir().unwrap();
    let left = || -> Vec<_> { fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect() };
    let command = |arguments: &[&str]| {
        let mut command = lagoon(arguments);
        command.env("TMPDIR", dir.path());
        command
    };
    let (model, _) = golden_prompt();
    let up = ["up", &model, "--backend=cpu", "--threads=1", "--port=0", "--kv-tokens=64", "--calibrate=off"];
    let mut pool = Server::try_start_command(command(&up)).unwrap();
    assert!(!left().is_empty(), "it needs certificates");
    lagoon_tests::process::signal(pool.pid(), "TERM");
    assert_eq!((pool.ended().code, left()), (Some(0), Vec::new()));
    for signal in ["INT", "TERM"] {
        let demo = command(&["demo", "--backend=cpu"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait(|| !left().is_empty());
        lagoon_tests::process::signal(demo.id().into(), signal);
        let ended = demo.wait_with_output().unwrap();
        assert_eq!((ended.status.code(), left()), (Some(1), Vec::new()), "{signal}");
    }
    let doctor = command(&["doctor"]).stdout(Stdio::null()).status().unwrap();
    assert_eq!((doctor.code(), left()), (Some(0), Vec::new()));
}
