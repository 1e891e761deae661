//! The public port of a pool: models of several pools, request ids, and the access log.

use crate::process_cluster::Cluster;
use crate::process_up::golden_prompt;
use lagoon_tests::faults::certificates;
use lagoon_tests::process::{Server, completion};
use serde_json::{Value, json};

/// The lines of an access log in JSON.
fn lines(stderr: &str) -> Vec<Value> {
    stderr.lines().filter(|line| line.starts_with('{')).map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn one_gateway_serves_two_pools_by_model_and_logs_each_request_once() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let flags = ["--backend=cpu", "--kv-tokens=64", "--calibrate=off", "--access-log=off"];
    let one = cluster.serve("one", &model, &[&flags[..], &["--served-model-name=first,org/alias"]].concat());
    let [a, b, c] = certificates(&cluster.ca, "gm2");
    let second = Server::start(&["gmanager", "--listen=127.0.0.1:0", &a, &b, &c]);
    let gmanager = format!("--gmanager={}", second.announced("quic"));
    let [a, b, c] = certificates(&cluster.ca, "two");
    let own = ["serve", &model, &gmanager, "--name=two", "--served-model-name=second", &a, &b, &c];
    let common = ["--http=127.0.0.1:0", "--threads=1", "--block-tokens=8"];
    let two = Server::start(&[&own[..], &common[..], &flags[..]].concat());

    let [a, b, c] = certificates(&cluster.ca, "gateway");
    let pools =
        [format!("--gmanager={}", cluster.gmanager.announced("quic")), format!("--pool={}", second.announced("quic"))];
    let own =
        ["gateway", "--listen=127.0.0.1:0", "--block-tokens=8", "--access-log=json", &pools[0], &pools[1], &a, &b, &c];
    let gateway = Server::start(&own);
    let client = gateway.client();
    let models =
        client.wait_until("/v1/models", "both pools' models", |list| list["data"].as_array().unwrap().len() == 3);
    let ids: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["first", "org/alias", "second"]);
    assert!(models["data"].as_array().unwrap().iter().all(|model| model["max_model_len"] == 64), "{models}");
    for (asked, instance) in [("second", "two"), ("first", "one"), ("org/alias", "one"), ("second", "two")] {
        let answer = client.complete(&prompt[..20], 4, &json!({"model": asked}));
        assert_eq!((answer.status, answer.instance()), (200, Some(instance)), "{}", answer.text);
        assert_eq!(answer.json()["model"], asked);
    }
    // 44 tokens of memory are left behind the prompt.
    let full = client.complete(&prompt[..20], 60, &json!({"model": "second"})).json();
    assert_eq!(full["usage"]["completion_tokens"], 44, "{full}");
    let choice = &full["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("length"), &json!("kv_capacity")));
    let unknown = client.post("/v1/completions", &completion(&prompt[..20], 4, &json!({"model": "third"})));
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("model_not_found")));
    for name in ["one", "two"] {
        client.wait_for_text("/metrics", &format!("\nlagoon_kv_blocks{{instance=\"{name}\"}} 8\n"));
    }
    assert_eq!(client.get("/lagoon/status").status, 404);

    let log = gateway.stop().stderr;
    let completions: Vec<Value> = lines(&log).into_iter().filter(|line| line["path"] == "/v1/completions").collect();
    let outcomes: Vec<&Value> = completions.iter().map(|line| &line["outcome"]).collect();
    assert_eq!(outcomes, ["length", "length", "length", "length", "kv_capacity", "model_not_found"], "{log}");
    assert_eq!((&completions[0]["instance"], &completions[0]["model"]), (&json!("two"), &json!("second")));
    assert_eq!((&completions[0]["prompt_tokens"], &completions[0]["output_tokens"]), (&json!(20), &json!(4)));
    assert!([one, two].into_iter().all(|instance| lines(&instance.stop().stderr).is_empty()));
}
