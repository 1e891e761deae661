//! Drains by an operator and by SIGTERM, and moves of KV by hand: no request is lost.

use crate::process_cluster::{Cluster, TWO, certificates, wait_for_pool};
use crate::process_up::{golden_prompt, single};
use lagoon_tests::process::{Client, Ended, Events, Server, TIMEOUT, completion, run, signal, token_ids};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Runs an operator's command against the cluster's gManager.
fn ask(cluster: &Cluster, tls: &[String; 3], command: &[&str]) -> Ended {
    let [a, b, c] = tls;
    run(&[command, &["--gmanager", &cluster.gmanager.announced("quic"), a, b, c]].concat())
}

fn ask_json(cluster: &Cluster, tls: &[String; 3], command: &[&str]) -> Value {
    let ended = ask(cluster, tls, &[command, &["--json"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    serde_json::from_str(&ended.stdout).unwrap()
}

/// The request placement map, once a request's blocks are on several instances; heartbeats carry it.
fn placements(cluster: &Cluster, tls: &[String; 3]) -> Vec<Value> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let rows = ask_json(cluster, tls, &["kv", "ls"])["placements"].as_array().unwrap().clone();
        if rows.len() > 1 {
            return rows;
        }
        assert!(Instant::now() < deadline, "{rows:?}");
    }
}

/// A stream of a prompt that no single instance holds: its first token, and the rest.
struct Stream<'a> {
    events: Events<'a>,
    tokens: Vec<u32>,
}

impl<'a> Stream<'a> {
    fn start(client: &'a Client, prompt: &[u32], max_tokens: u32) -> Self {
        let mut events = client.stream("/v1/completions", &completion(prompt, max_tokens, &json!({"stream": true})));
        let tokens = token_ids(&serde_json::from_str(&events.next_data().unwrap()).unwrap());
        Self { events, tokens }
    }

    /// Reads the stream to its end; asserts that it equals that of one large instance.
    fn finish(mut self, model: &str, prompt: &[u32], max_tokens: u32) {
        let (rest, done) = self.events.rest();
        assert!(done, "{rest:?}");
        self.tokens.extend(rest.iter().flat_map(token_ids));
        let reference = single(model, "4096");
        let expected = reference.client().complete(prompt, max_tokens, &json!({})).json();
        assert_eq!(self.tokens, token_ids(&expected));
    }
}

/// The value of a metric, named with its labels; `None` before its first record.
fn metric(client: &Client, name: &str) -> Option<f64> {
    let text = client.get("/metrics").text;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    Some(value.parse().unwrap_or_else(|e| panic!("{name} {value}: {e}")))
}

/// Waits until a metric, recorded twice a second, is at least `least`.
fn wait_for_metric(client: &Client, name: &str, least: f64) {
    let deadline = Instant::now() + TIMEOUT;
    while metric(client, name).is_none_or(|value| value < least) {
        assert!(Instant::now() < deadline, "{name}: {:?}\n{}", metric(client, name), client.get("/metrics").text);
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A model and a prompt for streams that last for seconds, longer than the orders.
fn long_prompt() -> (String, Vec<u32>) {
    (lagoon_tests::root().join("models/passkey").to_string_lossy().into_owned(), vec![7; 1200])
}

/// Three paced instances of 1,024 tokens each: a stream outlives the orders.
fn three(cluster: &Cluster, model: &str) -> [Server; 3] {
    let flags = ["--backend=cpu", "--kv-tokens=1024", "--calibrate=off"];
    let step = Duration::from_millis(5);
    let servers = ["one", "two", "three"].map(|name| cluster.serve_paced(step, name, model, &flags));
    wait_for_pool(&servers[0].client(), 128 + 2 * 126);
    servers
}

#[test]
fn a_drained_creditor_stops_without_losing_a_request() {
    let cluster = Cluster::new();
    let (model, prompt) = long_prompt();
    let tls = certificates(&cluster.ca, "operator");
    let mut servers = three(&cluster, &model);
    let client = servers[0].client();
    let stream = Stream::start(&client, &prompt, 700);
    let rows = placements(&cluster, &tls);
    let request = rows[0]["request"].as_str().unwrap().to_owned();
    assert!(rows.iter().all(|row| row["request"] == *request), "{rows:?}");
    // Whichever instance lends to it.
    let own = client.get("/lagoon/status").json()["instance"].clone();
    let lender = rows.iter().map(|row| &row["instance"]).find(|instance| **instance != own).unwrap();
    let lenders = servers.iter().position(|s| s.client().get("/lagoon/status").json()["instance"] == *lender).unwrap();
    let name = ["one", "two", "three"][lenders];

    let drained = ask_json(&cluster, &tls, &["drain", name, "--wait", "--stop"]);
    assert_eq!((&drained["name"], &drained["drained"]), (&json!(name), &json!(true)), "{drained}");
    let ended = servers[lenders].ended();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    // The debtor counts the blocks moved away from the drained one: at least those lent at the start of the drain.
    let moved = client.get("/lagoon/status").json()["moves"].clone();
    let blocks = ["blocks_home", "blocks_between"].map(|field| moved[field].as_u64().unwrap());
    assert!(blocks.iter().sum::<u64>() > 0 && moved["by_reason"]["drain"].is_object(), "{moved}");
    for (direction, blocks) in ["home", "between"].into_iter().zip(blocks) {
        let by_reason = ["drain", "plan", "recall"].map(|reason| {
            let labels = format!("{{direction=\"{direction}\",reason=\"{reason}\"}}");
            let count = moved["by_reason"][reason][direction].as_u64().unwrap_or(0);
            wait_for_metric(&client, &format!("lagoon_moved_blocks_total{labels}"), count as f64);
            wait_for_metric(&client, &format!("lagoon_moved_tokens_total{labels}"), (count * 8) as f64);
            count
        });
        assert_eq!(by_reason.iter().sum::<u64>(), blocks, "{moved}");
    }
    wait_for_metric(&client, "lagoon_moved_bytes_total", 1.0);
    for name in ["lagoon_layer_partials_wait_seconds", "lagoon_step_partials_wait_seconds"] {
        wait_for_metric(&client, &format!("{name}_count"), 1.0);
        assert!(metric(&client, &format!("{name}_bucket{{le=\"0.00005\"}}")).is_some(), "{name} has fine buckets");
    }
    for (name, labels) in [("recalls", "state=\"missed\""), ("preemptions", "kind=\"swap\"")] {
        wait_for_metric(&client, &format!("lagoon_{name}_total{{{labels}}}"), 0.0);
    }
    stream.finish(&model, &prompt, 700);
    // The remaining instances serve on.
    wait_for_pool(&client, 128 + 126);
    client.wait_until("/lagoon/status", "empty", |s| s["blocks_free"] == 128);
    Stream::start(&client, &prompt, 8).finish(&model, &prompt, 8);
}

#[test]
fn a_drain_is_seen_and_taken_back() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let tls = certificates(&cluster.ca, "operator");
    let flags = ["--backend=cpu", "--kv-tokens=64", "--calibrate=off"];
    let instances = ["one", "two"].map(|name| cluster.serve(name, &model, &flags));
    let client = instances[1].client();
    wait_for_pool(&client, TWO);
    let waited = ask(&cluster, &tls, &["drain", "two", "--wait"]);
    assert!(waited.code == Some(0) && waited.stdout.contains("is draining"), "{waited:?}");
    assert!(waited.stdout.ends_with("drained\n"), "{waited:?}");
    client.wait_until("/lagoon/status", "draining", |s| s["draining"] == true);
    // A dispatcher that uses /health avoids it; /health is updated twice a second.
    client.wait_for_text("/health", "not ready");
    assert_eq!(client.get("/health").status, 503);
    let status = ask(&cluster, &tls, &["status"]);
    assert!(status.stdout.lines().any(|line| line.contains("two") && line.contains("draining")), "{status:?}");
    let back = ask(&cluster, &tls, &["drain", "two", "--cancel"]);
    assert!(back.code == Some(0) && back.stdout.contains("serves again"), "{back:?}");
    client.wait_until("/lagoon/status", "serving", |s| s["draining"] == false);
    wait_for_pool(&instances[0].client(), TWO);
    Stream::start(&instances[0].client(), &prompt[..90], 8).finish(&model, &prompt[..90], 8);
}

#[test]
fn moves_by_hand_are_done_counted_and_explained() {
    let cluster = Cluster::new();
    let (model, prompt) = long_prompt();
    let tls = certificates(&cluster.ca, "operator");
    let instances = three(&cluster, &model);
    let client = instances[0].client();
    let stream = Stream::start(&client, &prompt, MOVED_TOKENS);
    let rows = placements(&cluster, &tls);
    let request = rows[0]["request"].as_str().unwrap().to_owned();
    let debtor: u64 = request.split('/').next().unwrap().parse().unwrap();
    let lent = rows.iter().find(|row| row["instance"].as_u64() != Some(debtor)).unwrap_or_else(|| panic!("{rows:?}"));
    let lender = lent["instance"].as_u64().unwrap();
    let numbers = instances.each_ref().map(|s| s.client().get("/lagoon/status").json()["instance"].as_u64().unwrap());
    let other = numbers.into_iter().find(|n| ![debtor, lender].contains(n)).unwrap();
    let [lender, other] = [lender, other].map(|n| n.to_string());
    let order = |command: &[&str]| -> (u64, u64) {
        let [verb, blocks, rest @ ..] = command else { panic!("{command:?}") };
        let blocks = format!("--blocks={blocks}");
        let command = [&["kv", verb, &request, "--wait", "--json", &blocks][..], rest].concat();
        let deadline = Instant::now() + TIMEOUT;
        let ended = loop {
            let ended = ask(&cluster, &tls, &command);
            // Heartbeats come four times a second: the gManager may not know a move that has just ended.
            if ended.code == Some(0) || !ended.stderr.contains("that can move") || Instant::now() > deadline {
                break ended;
            }
        };
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let ended: Value = serde_json::from_str(&ended.stdout).unwrap();
        let outcome = &ended["outcome"];
        assert_eq!((&outcome["ended"], &ended["dry_run"]), (&json!(true), &json!(false)), "{ended}");
        let (asked, moved) = (outcome["blocks"].as_u64().unwrap(), outcome["moved"].as_u64().unwrap());
        assert_eq!(asked == moved, outcome["reason"] == "", "{ended}");
        (ended["moves"][0]["order"].as_u64().unwrap(), moved)
    };
    let [from_debtor, from_lender, from_other] = [&debtor.to_string(), &lender, &other].map(|n| format!("--from={n}"));
    let [to_lender, to_other] = [&lender, &other].map(|n| format!("--to={n}"));
    // All accepted at once: there is no pause between moves by hand.
    let (_, out) = order(&["move", "80", &from_debtor, &to_lender]);
    let (_, home) = order(&["recall", "8", &from_lender]);
    let (_, between) = order(&["move", "7", &from_lender, &to_other]);
    let (last, home_again) = order(&["recall", "2", &from_other]);
    let (_, back) = order(&["move", "3", &from_other, &to_lender]);
    assert_eq!((out, between, home, back, home_again), (80, 7, 8, 3, 2));
    // The debtor counted exactly these as an operator's.
    let moves = client.get("/lagoon/status").json()["moves"].clone();
    let counted = json!({ "out": out, "home": home + home_again, "between": between + back });
    assert_eq!(moves["by_reason"]["operator"], counted, "{moves}");
    wait_for_metric(&client, "lagoon_moved_blocks_total{direction=\"home\",reason=\"operator\"}", 10.0);
    // The outcome of an order can be queried later; an unknown number cannot.
    let outcome = ask(&cluster, &tls, &["kv", "order", &last.to_string()]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(0), "2 rBlocks moved\n"), "{outcome:?}");
    // Only this request's rows, of instances that have some.
    let own = ask_json(&cluster, &tls, &["kv", "ls", &request])["placements"].as_array().unwrap().len();
    assert!((2..=3).contains(&own) && own == placements(&cluster, &tls).len(), "{own}");
    refused_orders(&cluster, &tls, &request);
    stream.finish(&model, &prompt, MOVED_TOKENS);
    assert_eq!(client.get("/lagoon/status").json()["recomputed_tokens"], 0);
}

/// Tokens of a stream that outlives a dozen commands.
const MOVED_TOKENS: u32 = 1_100;

fn refused_orders(cluster: &Cluster, tls: &[String; 3], request: &str) {
    for (command, words) in [
        (vec!["kv", "recall", "1/999999"], vec!["1"]),
        (vec!["kv", "move", request, "--from=nobody", "--to=one"], vec!["nobody", "hint:"]),
        (vec!["kv", "recall", request, "--blocks=5000"], vec!["not 5000", "hint:"]),
        (vec!["kv", "order", "77"], vec!["no operator's order", "hint:"]),
        (vec!["drain", "nobody"], vec!["nobody", "hint:"]),
    ] {
        let refused = ask(cluster, tls, &command);
        assert_eq!(refused.code, Some(1), "{refused:?}");
        for word in words {
            assert!(refused.stderr.contains(word), "{word} in {refused:?}");
        }
    }
    let dry = ask_json(cluster, tls, &["kv", "recall", request, "--blocks=1", "--dry-run"]);
    assert_eq!((&dry["dry_run"], &dry["moves"][0]["order"]), (&json!(true), &json!(0)), "{dry}");
    // An empty plan is a valid answer.
    assert!(ask_json(cluster, tls, &["kv", "plan"])["moves"].is_array());
}

#[test]
fn sigterm_lets_requests_finish_and_a_second_one_does_not_wait() {
    let (model, prompt) = long_prompt();
    let mut server = single(&model, "4096");
    let client = server.client();
    let stream = Stream::start(&client, &prompt, 400);
    signal(server.pid(), "TERM");
    stream.finish(&model, &prompt, 400);
    let ended = server.ended();
    assert!(ended.code == Some(0) && ended.stderr.contains("drained"), "{ended:?}");

    // A long answer, so that the second SIGTERM stops the server in its middle.
    let mut server = single(&model, "20000");
    let client = server.client();
    let stream = Stream::start(&client, &[7; 40], 15_000);
    signal(server.pid(), "TERM");
    client.wait_until("/lagoon/status", "draining", |s| s["draining"] == true);
    let asked = Instant::now();
    signal(server.pid(), "TERM");
    let ended = server.ended();
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    drop(stream);
}
