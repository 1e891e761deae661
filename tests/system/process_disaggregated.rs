//! Prefill and decode workers as processes: their answers, over shared memory and over QUIC, also when one of them is
//! killed.

use lagoon_tests::faults::{FaultPool, Watched, number, passkey, prompt};
use lagoon_tests::golden::max_diff;
use lagoon_tests::partition::Place;
use lagoon_tests::process::{Client, Server, TIMEOUT, logits, token_ids};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

use crate::process_moves::request;
use crate::process_up::{golden_prompt, single};

const VOCAB: u32 = 1024;

fn decoders(status: &Value) -> Vec<Client> {
    let rows = status["instances"].as_array().unwrap().iter().filter(|row| row["role"] == "decode");
    rows.map(|row| Client::new(row["http_addr"].as_str().unwrap().parse().unwrap())).collect()
}

/// Waits until every decode worker can read every prefill worker's KV.
pub(crate) fn connected(status: &Value, workers: u64) -> Vec<Client> {
    let decoders = decoders(status);
    for client in &decoders {
        client.wait_until("/lagoon/status", "connected", |s| number(s, "prefill/workers") == workers);
    }
    decoders
}

fn is_empty(status: &Value) -> bool {
    let rows = status["instances"].as_array().unwrap().iter().filter(|row| row["alive"] == true);
    rows.into_iter()
        .all(|row| row["blocks_free"] == row["blocks_total"] && row["blocks_lent"] == 0 && row["blocks_borrowed"] == 0)
}

/// Waits until an instance's metrics contain `series`: they are recorded periodically.
fn measured(client: &Client, series: &str) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let metrics = client.get("/metrics").text;
        if metrics.contains(series) {
            return;
        }
        assert!(Instant::now() < deadline, "no {series} in {metrics}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_pool_of_prefill_and_decode_workers_equals_one_instance() {
    let (model, prompt) = golden_prompt();
    let extra = json!({"return_logits": true});
    let reference = single(&model, "256");
    for (path, mode) in [("auto", "pull"), ("quic", "pull"), ("auto", "push"), ("quic", "push")] {
        let modes = ["--transfer-path", path, "--kv-transfer", mode];
        let flags = ["--backend=cpu", "--threads=1", "--port=0", "--block-tokens=8", "--expose-logits"];
        let sizes = ["up", &model, "--prefill=1", "--decode=2", "--kv-tokens=256"];
        let pool = Server::start(&[&sizes[..], &modes[..], &flags[..]].concat());
        let client = pool.client();
        let decoders = connected(&client.get("/lagoon/status").json(), 1);
        for length in [100, 64, 7] {
            let expected = reference.client().complete(&prompt[..length], 12, &extra).json();
            let answer = client.complete(&prompt[..length], 12, &extra);
            assert!(answer.instance().unwrap().starts_with("decode-"), "{path}");
            let answer = answer.json();
            assert_eq!(token_ids(&answer), token_ids(&expected), "{path}, {length} tokens");
            for (ours, theirs) in logits(&answer).iter().zip(&logits(&expected)) {
                assert!(max_diff(ours, theirs) < 1e-3, "{path}, {length} tokens");
            }
        }
        let sum = |field: &str| decoders.iter().map(|c| number(&c.get("/lagoon/status").json(), field)).sum::<u64>();
        assert_eq!((sum("prefill/pulled"), sum("prefill/own"), sum("prefill/damaged_blocks")), (3, 0, 0), "{path}");
        assert!(sum("prefill/bytes") > 0);
        // Times are recorded periodically.
        let deadline = Instant::now() + TIMEOUT;
        while sum("prefill/reading_us") == 0 {
            assert!(Instant::now() < deadline, "{path}");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(sum("prefill/decoded"), 3, "{path}");
        for client in &decoders {
            let status = client.wait_until("/lagoon/status", "a path that was measured", |s| s["paths"].is_array());
            let row = &status["paths"][0];
            assert_eq!(row["path"], if path == "auto" { "same host" } else { "quic" }, "{status}");
            assert!(row["bytes_per_s"].as_f64().unwrap() > 1e6, "{status}");
            measured(client, "lagoon_transfer_path_bytes_per_second{");
        }
        // Heartbeats report the same in the pool's status.
        let reported = client.wait_until("/lagoon/status", "what was read", |s| {
            let rows = s["instances"].as_array().unwrap().iter().filter(|row| row["role"] == "decode");
            rows.map(|row| number(row, "prefill/decoded")).sum::<u64>() == 3
        });
        let rows = reported["instances"].as_array().unwrap().iter().filter(|row| row["role"] == "decode");
        let bytes: u64 = rows.map(|row| number(row, "prefill/bytes")).sum();
        assert_eq!(bytes, sum("prefill/bytes"), "{reported}");
        let url = format!("--url=http://{}", pool.announced("http"));
        let shown = lagoon_tests::process::run(&["status", &url]).stdout;
        assert!(shown.contains("PULLED/OWN") && shown.contains("GB/S"), "{shown}");
        let decoder = decoders.iter().find(|c| number(&c.get("/lagoon/status").json(), "prefill/decoded") > 0).unwrap();
        for phase in ["queue", "prefill", "decode_queue", "transfer", "decode"] {
            measured(decoder, &format!("lagoon_prefill_phase_seconds_count{{phase=\"{phase}\"}}"));
        }
        client.wait_until("/lagoon/status", "empty", is_empty);
    }
}

#[test]
fn roles_that_cannot_work_say_so() {
    let ended = Server::try_start(&["serve", &golden_prompt().0, "--role=decode", "--backend=cpu"]).err().unwrap();
    assert!(ended.stderr.contains("in no pool") && ended.stderr.contains("hint: "), "{}", ended.stderr);
}

/// KV has a network interface of its own: reads leave from its address and arrive at it.
#[test]
fn kv_is_read_by_the_interface_that_was_chosen() {
    let place = |role: &str, ip: &str, transfer: &str| {
        let flags = ["--http=127.0.0.1:0", "--transfer-path=quic", "--log=lagoon_transport=info,lagoon=info", transfer];
        let flags = flags.map(str::to_owned).into_iter();
        let own = [format!("--role={role}"), format!("--quic={ip}:0")];
        Place { namespace: None, flags: flags.chain(own).collect() }
    };
    let mut pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", None);
    pool.start(&[
        ("p0", 64, place("prefill", "127.0.0.2", "--transfer-interface=lo")),
        ("d0", 64, place("decode", "127.0.0.3", "--transfer-interface=lo")),
        ("d1", 64, place("decode", "127.0.0.3", "--transfer-interface=auto")),
    ]);
    let undisturbed = pool.undisturbed(64);
    for decoder in ["d0", "d1"] {
        pool.wait(decoder, "connected", |s| number(s, "prefill/workers") == 1);
        pool.watch(decoder, &prompt(44, 100, VOCAB), 10).finish("over an interface of its own", &undisturbed);
        assert_eq!(number(&pool.status(decoder), "prefill/pulled"), 1);
    }
    let (writer, readers) =
        (pool.announced("p0", "transfer"), ["d0", "d1"].map(|name| pool.announced(name, "transfer")));
    assert!(writer.starts_with("127.0.0.1:") && readers[0].starts_with("127.0.0.1:"), "{writer} {readers:?}");
    assert!(readers[1].starts_with("127.0.0.3:"), "{readers:?}");
    for (name, ip) in [("p0", "127.0.0.2:"), ("d0", "127.0.0.3:"), ("d1", "127.0.0.3:")] {
        assert!(pool.announced(name, "quic").starts_with(ip), "{name}");
    }
    // Addresses seen by the prefill worker, and those known to the decode worker.
    let (seen, chose) = (pool.stop("p0").stderr, pool.stop("d0").stderr);
    for from in readers {
        assert!(seen.contains("KV is read over QUIC reader=") && seen.contains(&format!("from={from}")), "{seen}");
    }
    assert!(!seen.contains("from=127.0.0.2") && seen.contains(&format!("listen={writer}")), "{seen}");
    assert!(chose.contains("interface=\"lo\"") && chose.contains("--transfer-interface lo"), "{chose}");
}

#[test]
fn a_network_interface_that_is_not_there_is_refused() {
    let mut pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", None);
    let error =
        pool.try_start("p0", 64, &Place::default().with("--role=prefill").with("--transfer-interface=none-such"));
    let output = error.unwrap_err().stderr;
    assert!(output.contains("--transfer-interface none-such: there is no such network interface"), "{output}");
    assert!(output.contains("hint: up, with an IPv4 address: ") && output.contains("lo"), "{output}");
}

/// A prefill worker is killed during prefill: the client sees only latency. Then the gManager is killed, and prompts
/// are still prefilled elsewhere.
#[test]
fn a_killed_prefill_worker_costs_time_only() {
    let role = |name: &str| Place::default().with(&format!("--role={name}"));
    let mut pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", Some(lagoon_tests::faults::STEP));
    pool.start(&[("p0", 128, role("prefill")), ("p1", 128, role("prefill")), ("d0", 128, role("decode"))]);
    pool.wait("d0", "connected", |s| number(s, "prefill/workers") == 2);
    let undisturbed = pool.undisturbed(160);
    let stream = pool.watch("d0", &prompt(40, 1500, VOCAB), 60);
    let busy = |pool: &FaultPool| ["p0", "p1"].into_iter().find(|p| number(&pool.status(p), "prefill/jobs") > 0);
    let worker = loop {
        if let Some(worker) = busy(&pool) {
            break worker;
        }
        assert!(!stream.is_over(), "nobody computed it");
    };
    pool.kill(worker);
    stream.finish("a killed prefill worker", &undisturbed);
    let status = pool.status("d0");
    assert!(number(&status, "prefill/retried") > 0, "{status}");
    assert_eq!((number(&status, "prefill/own"), number(&status, "prefill/pulled")), (0, 1), "{status}");

    pool.kill_gmanager();
    pool.watch("d0", &prompt(41, 500, VOCAB), 20).finish("without a gManager", &undisturbed);
    assert_eq!(number(&pool.status("d0"), "prefill/pulled"), 2);
    pool.wait_empty();
}

/// A long prompt's oldest rBlocks stay with the prefill worker: some are moved by hand, and the rest by a drain that
/// ends its process, while the answer goes on.
#[test]
fn what_stays_with_a_prefill_worker_is_moved_by_hand_and_drained() {
    let role = |name: &str| Place::default().with(&format!("--role={name}"));
    let mut pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", Some(2 * lagoon_tests::faults::STEP));
    // An instance of both roles prefills for others only if no one else does.
    pool.start(&[("p0", 128, role("prefill")), ("d0", 24, role("decode")), ("n0", 128, Place::default())]);
    pool.wait("d0", "connected", |s| number(s, "prefill/workers") == 2);
    let undisturbed = pool.undisturbed(128);
    let stream = pool.watch("d0", &prompt(43, 1000, VOCAB), 700);
    stream.wait_for(3);
    assert!(pool.creditors("d0")["p0"] >= 30);
    let worker = pool.status("p0")["instance"].to_string();
    let order = ["kv", "move", &request(&pool, "d0"), "--from=p0", "--to=n0", "--blocks=10"];
    // The planner may be moving it, and the gManager learns of the request by heartbeat.
    while let Err(refused) = pool.try_ask(&order) {
        assert!(!stream.is_over(), "no move is accepted: {refused:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    pool.wait("d0", "moved by hand", |s| number(s, "moves/blocks_between") >= 10);
    let drained = pool.ask(&["drain", "p0", "--wait", "--stop"]);
    assert!(drained["drained"] == true && !stream.is_over(), "{drained}");
    let status = pool.status("d0");
    assert!(status["sequences"][0]["remote_blocks"].get(&worker).is_none(), "{status}");
    assert_eq!((number(&status, "moves/damaged"), number(&status, "recomputed_tokens")), (0, 0), "{status}");
    stream.finish("moved and drained", &undisturbed);
}

/// Workers whose store transports cannot read, as processes.
#[test]
fn workers_on_wgpu_pass_prompts_through_host_memory() {
    if let Err(why) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("workers_on_wgpu_pass_prompts_through_host_memory", &why);
    }
    let (model, prompt) = golden_prompt();
    let reference = single(&model, "256");
    let sizes = ["up", &model, "--prefill=1", "--decode=1", "--kv-tokens=256", "--stage-kv-tokens=128"];
    let flags = ["--backend=wgpu", "--calibrate=off", "--port=0", "--block-tokens=8"];
    let pool = Server::start(&[&sizes[..], &flags[..]].concat());
    let client = pool.client();
    let decoders = connected(&client.get("/lagoon/status").json(), 1);
    for length in [100, 7] {
        let output = token_ids(&client.complete(&prompt[..length], 8, &json!({})).json());
        let expected = reference.client().complete(&prompt[..length], 8, &json!({})).json();
        assert_eq!(output, token_ids(&expected), "{length} tokens");
    }
    let status = decoders[0].get("/lagoon/status").json();
    assert_eq!((number(&status, "prefill/pulled"), number(&status, "prefill/own")), (2, 0), "{status}");
    decoders[0].wait_until("/lagoon/status", "unstaged", |s| number(s, "prefill/stage_blocks_used") == 0);
    client.wait_until("/lagoon/status", "empty", is_empty);
}

/// Roles change by command while a gateway's streams run: the answers equal a single instance's, and nothing is left
/// behind.
#[test]
fn an_operator_changes_roles_under_traffic() {
    let role = |name: &str| Place::default().with(&format!("--role={name}"));
    let mut pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", Some(lagoon_tests::faults::STEP));
    pool.start(&[("p0", 128, role("prefill")), ("p1", 128, role("prefill")), ("d0", 128, role("decode"))]);
    pool.wait("d0", "connected", |s| number(s, "prefill/workers") == 2);
    let (undisturbed, gateway) = (pool.undisturbed(160), pool.gateway());
    let http = gateway.announced("http").parse().unwrap();
    let stream = |seed, tokens, max| Watched::start(http, &prompt(seed, tokens, VOCAB), max, &json!({}));
    let first = stream(50, 600, 900);
    first.wait_for(1);
    let done = pool.ask(&["role", "p1", "decode", "--wait"]);
    assert_eq!(
        (&done["role"], &done["becoming"], &done["done"]),
        (&json!("decode"), &Value::Null, &json!(true)),
        "{done}"
    );
    for decoder in ["p1", "d0"] {
        let status = pool.wait(decoder, "one worker is left", |s| number(s, "prefill/workers") == 1);
        assert_eq!(status["role"], "decode", "{status}");
    }
    // The gateway learns the new role from its next report.
    let took_one = (0..10).any(|round| {
        let more: Vec<Watched> = (0..4).map(|n| stream(100 + 4 * round + n, 300, 30)).collect();
        more.into_iter().for_each(|stream| drop(stream.finish("two decode workers", &undisturbed)));
        number(&pool.status("p1"), "prefill/pulled") > 0
    });
    assert!(took_one, "{}", pool.status("p1"));
    for (command, words) in [
        (["role", "p0", "decode"], "the last one that computes prompts for others"),
        (["role", "nobody", "decode"], "no instance is called"),
    ] {
        let refused = pool.try_ask(&command).unwrap_err();
        assert!(refused.stderr.contains(words) && refused.stderr.contains("hint:"), "{refused:?}");
    }
    // The other way: it finishes the answers that it has begun.
    let asked = pool.ask(&["role", "d0", "prefill"]);
    assert_eq!((&asked["role"], &asked["becoming"]), (&json!("decode"), &json!("prefill")), "{asked}");
    let shown = pool.ask(&["status"]);
    let row = shown["instances"].as_array().unwrap().iter().find(|row| row["name"] == "d0").unwrap();
    assert_eq!((&row["role"], &row["becoming"]), (&json!("decode"), &json!("prefill")), "{shown}");
    let refused = pool.try_ask(&["role", "p1", "prefill"]).unwrap_err();
    assert!(refused.stderr.contains("the last one that takes requests"), "{refused:?}");
    first.finish("its instance changes", &undisturbed);
    let done = pool.ask(&["role", "d0", "prefill", "--wait"]);
    assert_eq!(done["done"], true, "{done}");
    pool.wait("p1", "two workers", |s| number(s, "prefill/workers") == 2);
    stream(70, 400, 20).finish("after both changed", &undisturbed);
    assert_eq!(pool.status("d0")["role"], "prefill");
    pool.wait_empty();
}

/// The endpoint of `lagoon up` once showed a state from before the order, and the command reported that its order was lost.
#[test]
fn a_role_that_is_ordered_over_http_is_followed_to_its_end() {
    let model = passkey().to_string_lossy().into_owned();
    let sizes = ["up", &model, "--prefill=2", "--decode=1", "--kv-tokens=1024"];
    let flags = ["--backend=cpu", "--threads=1", "--calibrate=off", "--port=0"];
    let pool = Server::start(&[&sizes[..], &flags[..]].concat());
    let url = format!("http://{}", pool.announced("http"));
    for role in ["decode", "prefill", "decode"] {
        let done = lagoon_tests::process::run(&["role", "prefill-1", role, "--wait", "--json", "--url", &url]);
        assert_eq!(done.code, Some(0), "{done:?}");
        let done: Value = serde_json::from_str(&done.stdout).unwrap();
        assert_eq!((&done["role"], &done["done"]), (&json!(role), &json!(true)), "{done}");
    }
}

/// Prompts queue at the only prefill worker, and two decode workers are idle: the balancer switches one of them,
/// reports that in its metrics, and every answer equals a single instance's.
#[test]
fn a_balancer_turns_a_worker_where_prompts_queue() {
    let role = |name: &str| Place::default().with(&format!("--role={name}"));
    // A prompt takes several steps of its worker on any machine, and an answer one.
    let pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", Some(4 * lagoon_tests::faults::STEP));
    let mut pool = pool.with_gmanager_flags(&["--auto-roles=1", "--metrics-port=0"]);
    pool.start(&[("p0", 512, role("prefill")), ("d0", 2048, role("decode")), ("d1", 2048, role("decode"))]);
    let series = "lagoon_role_switches_total{from=\"decode\",to=\"prefill\",by=\"auto\"} ";
    let decoders = ["d0", "d1"];
    decoders.iter().for_each(|name| drop(pool.wait(name, "connected", |s| number(s, "prefill/workers") == 1)));
    let (undisturbed, gateway) = (pool.undisturbed(256), pool.gateway());
    let http = gateway.announced("http").parse().unwrap();
    let stream = |seed| Watched::start(http, &prompt(seed, 1200, VOCAB), 2, &json!({}));
    assert!(!pool.gmanager_metrics().contains(series), "{}", pool.gmanager_metrics());
    let (mut streams, mut seed, deadline) = (Vec::new(), 100, Instant::now() + TIMEOUT);
    let is_prefill = |name: &&str| pool.status(name)["role"] == "prefill";
    while !decoders.iter().any(is_prefill) {
        assert!(Instant::now() < deadline, "{} {}", pool.ask(&["status"]), pool.gmanager_metrics());
        while streams.iter().filter(|stream: &&Watched| !stream.is_over()).count() < 8 {
            streams.push(stream(seed));
            seed += 1;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    while !pool.gmanager_metrics().contains(series) {
        assert!(Instant::now() < deadline, "{}", pool.gmanager_metrics());
        std::thread::sleep(Duration::from_millis(50));
    }
    // Compares all answers around the switch, and some before.
    let first = streams.len().saturating_sub(12);
    for (n, stream) in streams.into_iter().enumerate() {
        if n < 4 || n >= first {
            stream.finish("while roles changed", &undisturbed);
        } else {
            stream.wait_for(2);
        }
    }
    pool.wait_empty();
}
