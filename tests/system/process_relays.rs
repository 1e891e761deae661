//! One query a host on processes: instances that name two hosts, a pool over QUIC, metrics.

use crate::process_cluster::{Cluster, wait_for_pool};
use crate::process_up::{golden_prompt, single};
use lagoon_tests::golden::max_diff;
use lagoon_tests::process::{Client, Server, logits, token_ids};
use serde_json::json;
use std::time::Duration;

/// A counter of relays in an instance's status, once its metrics page has it, too.
fn counter(client: &Client, field: &str, metric: &str) -> u64 {
    let count = client.get("/lagoon/status").json()["relays"][field].as_u64().unwrap();
    client.wait_for_text("/metrics", &format!("\n{metric} {count}\n"));
    count
}

/// A debtor with three rBlocks on host "left", and three creditors on these hosts. Returns how many frames of queries crossed for
/// a request that needs them all, and how many layers relays merged.
fn answered(hosts: [&str; 3]) -> (u64, u64) {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let serve = |name: &str, host: &str, tokens: &str| -> Server {
        let host = format!("--host-name={host}");
        let tokens = format!("--kv-tokens={tokens}");
        cluster.serve_paced(
            Duration::from_millis(20),
            name,
            &model,
            &["--backend=cpu", "--remote-attention=ship", &host, &tokens],
        )
    };
    let debtor = serve("debtor", "left", "24");
    let creditors: Vec<Server> =
        (0..).zip(hosts).map(|(n, host)| serve(&format!("creditor-{n}"), host, "56")).collect();
    let client = debtor.client();
    // Of each creditor's seven rBlocks one is a reserve.
    wait_for_pool(&client, 3 + 3 * 6);
    let extra = json!({"return_logits": true});
    let expected = single(&model, "256").client().complete(&prompt, 40, &extra).json();
    let answer = client.complete(&prompt, 40, &extra).json();
    assert_eq!(token_ids(&answer), token_ids(&expected));
    for (ours, theirs) in logits(&answer).iter().zip(&logits(&expected)) {
        assert!(max_diff(ours, theirs) < 1e-3, "{}", max_diff(ours, theirs));
    }
    let crossed = counter(&client, "queries", "lagoon_queries_to_other_hosts_total");
    let layers = |of: &Server| counter(&of.client(), "merged_layers", "lagoon_relayed_layers_total");
    (crossed, creditors.iter().map(layers).sum())
}

#[test]
fn creditors_on_one_host_are_asked_through_one_of_them() {
    let (once, merged) = answered(["right", "right", "right"]);
    let (each, none) = answered(["right", "middle", "far"]);
    println!("{once} frames of queries crossed instead of {each}, {merged} layers were merged");
    assert!(merged > 0 && none == 0, "{merged} and {none} layers were merged");
    assert!(5 * once < 4 * each, "{once} frames of {each} crossed");
}
