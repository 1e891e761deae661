//! Peer access between processes on one device (the fake driver): one lends memory that the other maps, and a request
//! that outgrows its instance attends to mapped creditor KV.

use crate::process_cluster::{Cluster, wait_for_pool};
use crate::process_regions::OnFake;
use crate::process_up::golden_prompt;
use lagoon_tests::faults::{certificates, number};
use lagoon_tests::golden::max_diff;
use lagoon_tests::process::{Client, Server, completion, logits, run, token_ids};
use serde_json::{Value, json};

/// Largest difference of logits between one instance and two.
const TOLERANCE: f32 = 5e-5;
/// Number of lent rBlocks, of 8 tokens each.
const LENT: u64 = 16;
/// Tokens of a prompt that does not fit the debtor; the KV of its answer does.
const PROMPT: usize = 80;

const FLAGS: [&str; 6] =
    ["--backend=cuda", "--calibrate=off", "--block-tokens=8", "--step-tokens=32", "--max-running=4", "--expose-logits"];

/// A single instance with room for everything.
fn single(on: &OnFake, model: &str) -> Server {
    on.start_plain(&[&["serve", model, "--http=127.0.0.1:0", "--kv-tokens=512"], &FLAGS[..]].concat(), &[])
}

/// A pool on one device: the lender keeps only the memory that it needs to start.
struct Pair {
    cluster: Cluster,
    lender: Server,
    debtor: Server,
}

fn serve(on: &OnFake, cluster: &Cluster, name: &str, flags: &[&str], variables: &[(&str, &str)]) -> Server {
    let (model, _) = golden_prompt();
    let gmanager = format!("--gmanager={}", cluster.gmanager.announced("quic"));
    let [a, b, c] = certificates(&cluster.ca, name);
    let own = ["serve", &model, &gmanager, &a, &b, &c, "--name", name, "--http=127.0.0.1:0"];
    on.start_plain(&[&own[..], &FLAGS, flags].concat(), variables)
}

impl Pair {
    fn new(on: &OnFake, variables: &[(&str, &str)]) -> Self {
        let cluster = Cluster::new();
        let flags = ["--kv-tokens=16", "--lend-percent=0", "--lend-device-tokens=128"];
        let lender = serve(on, &cluster, "lender", &flags, &[]);
        // To blocks that a lender caches queries are sent.
        let debtor = serve(on, &cluster, "debtor", &["--kv-tokens=64", "--prefix-cache=off"], variables);
        wait_for_pool(&debtor.client(), 8 + LENT);
        Self { cluster, lender, debtor }
    }
}

fn peer_access(client: &Client, field: &str) -> u64 {
    number(&client.get("/lagoon/status").json(), &format!("peer_access/{field}"))
}

#[track_caller]
fn assert_says(answer: &Value, expected: &Value) {
    assert_eq!(token_ids(answer), token_ids(expected));
    for (ours, theirs) in logits(answer).iter().zip(&logits(expected)) {
        let diff = max_diff(ours, theirs);
        assert!(diff <= TOLERANCE, "{diff:e}");
    }
}

/// Lent KV is attended to by peer access; if it cannot be mapped, queries are sent, and a warning is logged.
#[test]
fn a_request_that_outgrows_its_process_is_attended_to_in_anothers_memory() {
    let Some(on) = OnFake::find("a_request_that_outgrows_its_process_is_attended_to_in_anothers_memory") else {
        return;
    };
    let (model, prompt) = golden_prompt();
    let prompt: Vec<u32> = prompt.iter().cycle().take(PROMPT).copied().collect();
    let extra = json!({"return_logits": true});
    let reference = single(&on, &model);
    let expected = reference.client().complete(&prompt, 14, &extra).json();
    for (fail, refused) in [("", 0), ("cuMemImportFromShareableHandle 1 999", 1)] {
        let pair = Pair::new(&on, &[("LAGOON_FAKE_FAIL", fail)]);
        let client = pair.debtor.client();
        // The first request connects the two; memory is mapped meanwhile.
        assert_eq!(client.complete(&prompt, 1, &json!({})).status, 200);
        let settled = |s: &Value| number(s, "peer_access/mapped") + number(s, "peer_access/refused") == 1;
        client.wait_until("/lagoon/status", "its memory asked for", settled);
        let before = peer_access(&client, "attended_mapped") + peer_access(&client, "attended_shipped");
        assert_says(&client.complete(&prompt, 14, &extra).json(), &expected);
        let status = client.get("/lagoon/status").json();
        let of = |field: &str| number(&status, &format!("peer_access/{field}"));
        assert_eq!((of("mapped"), of("refused"), of("reused")), (1 - refused, refused, 0), "{status}");
        assert!(of("attended_mapped") + of("attended_shipped") >= before + 14, "{status}");
        if refused == 0 {
            // Queries are sent for some steps, while a prompt's rBlocks are not sealed yet.
            assert!(of("attended_mapped") > of("attended_shipped"), "{status}");
        } else {
            assert_eq!(of("attended_mapped"), 0, "{status}");
        }
        client.wait_for_text("/metrics", &format!("lagoon_creditors_mapped {}", 1 - refused));
        client.wait_for_text("/metrics", &format!("lagoon_creditor_maps_refused_total {refused}"));
        let mapped = format!("lagoon_remote_attentions_total{{how=\"mapped\"}} {}", of("attended_mapped"));
        client.wait_for_text("/metrics", &mapped);
        let lent = pair.lender.client().wait_until("/lagoon/status", "given back", |s| {
            number(s, "lent/blocks_free") == LENT && number(s, "lent/peer_access/sealed") > 0
        });
        assert_eq!((&lent["lent"]["name"], &lent["lent"]["role"]), (&json!("lender-lent"), &json!("kv")), "{lent}");
        pair.lender.client().wait_for_text("/metrics", &format!("lagoon_lent_kv_blocks_free {LENT}"));
        let output = pair.debtor.stop().stderr;
        assert_eq!(output.contains("device memory cannot be mapped"), refused > 0, "{output}");
    }
}

/// An instance borrows its own lent memory like another one's.
#[test]
fn an_instance_attends_to_what_it_lends_itself() {
    let Some(on) = OnFake::find("an_instance_attends_to_what_it_lends_itself") else { return };
    let (model, prompt) = golden_prompt();
    let prompt: Vec<u32> = prompt.iter().cycle().take(PROMPT).copied().collect();
    let cluster = Cluster::new();
    let server =
        serve(&on, &cluster, "one", &["--kv-tokens=64", "--lend-device-tokens=128", "--prefix-cache=off"], &[]);
    let client = server.client();
    wait_for_pool(&client, 8 + LENT);
    assert_eq!(client.complete(&prompt, 1, &json!({})).status, 200);
    client.wait_until("/lagoon/status", "its own memory mapped", |s| number(s, "peer_access/mapped") == 1);
    let extra = json!({"return_logits": true});
    assert_says(
        &client.complete(&prompt, 14, &extra).json(),
        &single(&on, &model).client().complete(&prompt, 14, &extra).json(),
    );
    let status = client.wait_until("/lagoon/status", "given back", |s| number(s, "lent/blocks_free") == LENT);
    let of = |field: &str| number(&status, &format!("peer_access/{field}"));
    assert!(of("attended_mapped") > of("attended_shipped") && of("reused") == 0, "{status}");
}

/// The lender is killed while its memory is attended to: the lost range is recomputed elsewhere.
#[test]
fn a_killed_lender_costs_what_it_lent_and_nothing_else() {
    let Some(on) = OnFake::find("a_killed_lender_costs_what_it_lent_and_nothing_else") else { return };
    let (model, prompt) = golden_prompt();
    let prompt: Vec<u32> = prompt.iter().cycle().take(PROMPT).copied().collect();
    let Pair { cluster, lender, debtor } = Pair::new(&on, &[]);
    // Host memory is lent when no device memory is left.
    let _other = cluster.serve("other", &model, &["--role=kv", "--tier=host", "--backend=cpu", "--kv-tokens=256"]);
    let client = debtor.client();
    wait_for_pool(&client, 8 + LENT + 32);
    assert_eq!(client.complete(&prompt, 1, &json!({})).status, 200);
    client.wait_until("/lagoon/status", "its memory mapped", |s| number(s, "peer_access/mapped") == 1);
    let mut stream = client.stream("/v1/completions", &completion(&prompt, 120, &json!({"stream": true})));
    client.wait_until("/lagoon/status", "attended to there", |s| number(s, "peer_access/attended_mapped") > 2);
    lender.kill();
    let (events, done) = stream.rest();
    assert!(done, "{events:?}");
    let output: Vec<u32> = events.iter().flat_map(token_ids).collect();
    let status = client.wait_until("/lagoon/status", "unmapped", |s| number(s, "peer_access/mapped") == 0);
    assert!(number(&status, "recoveries") > 0 && number(&status, "recomputed_tokens") > 0, "{status}");
    let reference = single(&on, &model);
    assert_eq!(output, token_ids(&reference.client().complete(&prompt, 120, &json!({})).json()));
}

#[test]
fn what_cannot_be_lent_to_be_mapped_is_refused() {
    let (model, _) = golden_prompt();
    let cluster = Cluster::new();
    let gmanager = format!("--gmanager={}", cluster.gmanager.announced("quic"));
    let [a, b, c] = certificates(&cluster.ca, "node");
    let pool = [gmanager.as_str(), &a, &b, &c];
    let refused = |flags: &[&str], words: &[&str]| {
        let own = ["serve", &model, "--backend=cpu", "--http=127.0.0.1:0", "--kv-tokens=64"];
        let ended = run(&[&own[..], flags].concat());
        assert_eq!(ended.code, Some(1), "{ended:?}");
        for word in words {
            assert!(ended.stderr.contains(word), "{word:?} in {ended:?}");
        }
    };
    refused(&["--lend-device-tokens=64"], &["--lend-device-tokens", "--gmanager", "hint:"]);
    refused(&[&pool[..], &["--lend-device-tokens=64"]].concat(), &["--lend-device-tokens", "cpu", "hint:"]);
    refused(&[&pool[..], &["--lend-device-tokens=3"]].concat(), &["less than one rBlock", "hint:"]);
    let outside = ["--lend-device-tokens=64", "--advertise=192.0.2.1:7000"];
    refused(&[&pool[..], &outside].concat(), &["--advertise", "--lend-quic", "hint:"]);
}
