//! Host memory as a tier of the pool: requests that fit only with it.

use crate::process_cluster::{Cluster, certificates, equals_single, wait_for_pool};
use crate::process_up::golden_prompt;
use lagoon_tests::process::{completion, run, token_ids};
use serde_json::{Value, json};

#[test]
fn an_instance_with_host_memory_serves_what_its_device_cannot_hold() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let flags = ["--backend=cpu", "--kv-tokens=64", "--host-kv-tokens=128"];
    let server = cluster.serve("one", &model, &flags);
    let client = server.client();
    // Both are members: 8 rBlocks of the instance, 16 of its host memory.
    wait_for_pool(&client, 24);
    equals_single(&client, &model, &prompt);

    let own = client.get("/lagoon/status").json();
    assert_eq!(
        (&own["name"], &own["tier"], &own["role"]),
        (&json!("one"), &json!("device"), &json!("instance")),
        "{own}"
    );
    let host = &own["host"];
    assert_eq!(
        (&host["name"], &host["tier"], &host["role"]),
        (&json!("one-host"), &json!("host"), &json!("kv")),
        "{own}"
    );
    assert!(host["partials_bytes_sent"].as_u64() > Some(0), "no attention ran on the host: {own}");

    // While it runs, its rBlocks are there; afterwards, nowhere.
    let mut events = client.stream("/v1/completions", &completion(&prompt, 60, &json!({"stream": true})));
    let first = token_ids(&serde_json::from_str(&events.next_data().unwrap()).unwrap());
    assert_eq!(first.len(), 1);
    client.wait_until("/lagoon/status", "lent by the host", |s| s["host"]["blocks_lent"].as_u64() >= Some(5));
    drop(events);
    client.wait_until("/lagoon/status", "given back", |s| s["host"]["blocks_free"] == 16 && s["blocks_free"] == 8);
    client.wait_for_text("/metrics", "lagoon_host_kv_blocks 16");

    let [a, b, c] = certificates(&cluster.ca, "looker");
    let status = run(&["status", "--json", "--gmanager", &cluster.gmanager.announced("quic"), &a, &b, &c]);
    let status: Value = serde_json::from_str(&status.stdout).unwrap_or_else(|e| panic!("{e}: {status:?}"));
    let tiers: Vec<&Value> = status["instances"].as_array().unwrap().iter().map(|row| &row["tier"]).collect();
    assert_eq!(tiers.iter().filter(|tier| **tier == "host").count(), 1, "{status}");
    // Both have calibrations: the host of its memory, the instance of its steps as well.
    for row in status["instances"].as_array().unwrap() {
        let measured = &row["calibration"];
        assert!(measured["attention_us_per_ktoken"].as_f64() > Some(0.0), "{status}");
        assert!(measured["copy_bytes_per_s"].as_f64() > Some(0.0), "{status}");
        let steps = measured["step_us"].as_object().unwrap().len();
        assert_eq!(steps > 0, row["role"] == "instance", "{status}");
    }
}

#[test]
fn host_memory_serves_other_instances_too() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let lender = cluster.serve("lender", &model, &["--backend=cpu", "--kv-tokens=16", "--host-kv-tokens=128"]);
    let debtor = cluster.serve("debtor", &model, &["--backend=cpu", "--kv-tokens=64", "--remote-attention=fetch"]);
    let client = debtor.client();
    wait_for_pool(&client, 1 + 16 + 8);
    equals_single(&client, &model, &prompt);
    let host = lender.client().get("/lagoon/status").json()["host"].clone();
    assert!(host["bulk_bytes_sent"].as_u64() > Some(0), "its KV was brought in: {host}");
    // A kv node may declare its memory a host tier.
    let hash = format!("--model-hash={}", lender.announced("model_hash"));
    let kv = cluster.serve("kv", &model, &["--role=kv", "--tier=host", "--backend=cpu", "--kv-tokens=64", &hash]);
    assert_eq!(kv.client().get("/lagoon/status").json()["tier"], "host");
    wait_for_pool(&client, 1 + 16 + 8 + 8);
}

#[test]
fn flags_that_do_not_go_together_are_refused() {
    let (model, _) = golden_prompt();
    let refused = |flags: &[&str], words: &[&str]| {
        let ended = run(&[&["serve", &model, "--backend=cpu", "--http=127.0.0.1:0"], flags].concat());
        assert_eq!(ended.code, Some(1), "{ended:?}");
        for word in words {
            assert!(ended.stderr.contains(word), "{word:?} in {ended:?}");
        }
    };
    refused(&["--host-kv-tokens=64"], &["--host-kv-tokens", "--gmanager", "hint:"]);
    refused(&["--tier=host"], &["--tier", "kv nodes", "hint:"]);
    let outside = ["--host-kv-tokens=64", "--gmanager=127.0.0.1:1", "--advertise=192.0.2.1:7000"];
    refused(&outside, &["--advertise", "--host-quic", "hint:"]);
}
