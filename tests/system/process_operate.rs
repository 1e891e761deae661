//! Operators' views and orders: status, calibration, capacity, drains, moves by hand.

use crate::process_cluster::{Cluster, TWO, certificates, equals_single, wait_for_pool};
use crate::process_up::golden_prompt;
use lagoon_tests::process::{Client, Server, completion, run};
use serde_json::{Value, json};
use std::collections::BTreeSet;

#[test]
fn a_single_instance_says_what_it_is_and_what_it_measured_once() {
    let (model, _) = golden_prompt();
    let cache = tempfile::tempdir().unwrap();
    let measured = |calibrate: &str| {
        let own = ["serve", &model, "--backend=cpu", "--threads=1", "--http=127.0.0.1:0", "--kv-tokens=256"];
        let cache = [("XDG_CACHE_HOME", cache.path().as_os_str())];
        let server = Server::start_with(&[&own[..], &["--name=solo", calibrate]].concat(), &cache);
        let url = format!("http://{}", server.announced("http"));
        let table = run(&["status", "--url", &url]);
        let row = table.stdout.lines().nth(1).unwrap_or_default().to_owned();
        for word in ["solo", "instance", "cpu", "device"] {
            assert!(row.contains(word), "{word}: {table:?}");
        }
        server.client().get("/lagoon/status").json()["calibration"].clone()
    };
    assert_eq!(measured("--calibrate=off"), Value::Null);
    let first = measured("--calibrate=auto");
    let steps = first["step_us"].as_object().unwrap();
    // How many more batch sizes fit its time depends on the machine.
    assert!(steps["1"].as_f64() > Some(0.0), "{first}");
    assert_eq!(measured("--calibrate=auto"), first, "it was measured again");
    assert_ne!(measured("--calibrate=always"), first, "it was not measured again");
}

#[test]
fn what_is_never_lent_is_no_capacity_of_others() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let flags = ["--backend=cpu", "--kv-tokens=64", "--lend-percent=25"];
    let instances = ["one", "two"].map(|name| cluster.serve(name, &model, &flags));
    let client = instances[0].client();
    // Its own 8 rBlocks and the 2 that the other may lend: 80 tokens, not 128.
    wait_for_pool(&client, 10);
    let refused = client.post("/v1/completions", &completion(&prompt[..90], 4, &json!({})));
    assert_eq!(refused.status, 400, "{}", refused.text);
    assert!(refused.text.contains("80"), "{}", refused.text);
    equals_single(&client, &model, &prompt[..66]);
}

#[test]
fn a_gateway_follows_the_pool_and_the_gmanager_counts() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let flags = ["--backend=cpu", "--kv-tokens=64", "--calibrate=off"];
    let instances = ["one", "two"].map(|name| cluster.serve(name, &model, &flags));
    wait_for_pool(&instances[0].client(), TWO);
    wait_for_pool(&instances[1].client(), TWO);
    let [a, b, c] = certificates(&cluster.ca, "gateway");
    let gmanager = cluster.gmanager.announced("quic");
    let flags = ["--listen=127.0.0.1:0", "--block-tokens=8", "--gmanager", &gmanager, &a, &b, &c];
    let gateway = Server::start(&[&["gateway"], &flags[..]].concat());
    let client = gateway.client();
    let mut served = BTreeSet::new();
    for _ in 0..6 {
        let answer = client.complete(&prompt[..40], 4, &json!({}));
        served.insert(answer.instance().unwrap().to_owned());
    }
    assert_eq!(served, BTreeSet::from(["one".to_owned(), "two".to_owned()]));
    // Orders pass through the gateway, too; a drained instance gets no more requests.
    let url = format!("--url=http://{}", gateway.announced("http"));
    let drained = run(&["drain", "two", "--wait", &url]);
    assert_eq!(drained.code, Some(0), "{drained:?}");
    client.wait_until("/lagoon/status", "seen", |s| {
        s["instances"].as_array().unwrap().iter().any(|row| row["name"] == "two" && row["draining"] == true)
    });
    for _ in 0..4 {
        assert_eq!(client.complete(&prompt[..40], 4, &json!({})).instance(), Some("one"));
    }
    let metrics = Client::new(cluster.gmanager.announced("metrics").parse().unwrap());
    for line in [
        "lagoon_gmanager_leads 1",
        "lagoon_gmanager_instances{state=\"alive\"} 1",
        "lagoon_gmanager_instances{state=\"draining\"} 1",
        "lagoon_gmanager_instances{state=\"silent\"} 0",
        "lagoon_gmanager_fenced_total 0",
    ] {
        metrics.wait_for_text("/metrics", line);
    }
}

#[test]
fn orders_that_make_no_sense_are_refused_with_a_hint() {
    let (model, _) = golden_prompt();
    let flags = ["--backend=cpu", "--threads=1", "--port=0", "--block-tokens=8", "--kv-tokens=64", "--instances=2"];
    let pool = Server::start(&[&["up", &model], &flags[..]].concat());
    let url = format!("--url=http://{}", pool.announced("http"));
    let refused = |command: &[&str], words: &[&str]| {
        let ended = run(&[command, &[&url]].concat());
        assert_eq!(ended.code, Some(1), "{ended:?}");
        for word in words {
            assert!(ended.stderr.contains(word), "{word:?} in {ended:?}");
        }
    };
    refused(&["drain", "nobody"], &["nobody", "hint: `lagoon status`"]);
    refused(&["kv", "move", "7", "--from=1", "--to=2"], &["names no request", "DEBTOR/SEQ", "hint:"]);
    refused(&["kv", "recall", "1/x"], &["sequence number", "hint:"]);
    refused(&["kv", "move", "1/7", "--from=1", "--to=three"], &["three", "hint:"]);
    // One that does is carried out.
    for order in [&["drain", "1", "--wait"][..], &["drain", "1", "--cancel"]] {
        let ended = run(&[order, &[&url]].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
    let single = Server::start(&["serve", &model, "--backend=cpu", "--http=127.0.0.1:0", "--calibrate=off"]);
    let url = format!("--url=http://{}", single.announced("http"));
    let ended = run(&["kv", "ls", &url]);
    assert!(ended.code == Some(1) && ended.stderr.contains("hint:"), "{ended:?}");
}
