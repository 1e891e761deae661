//! Joint prefill by processes: three compute a prompt, also when one is killed, and two on CUDA (the fake driver).

use crate::process_cluster::{Cluster, wait_for_pool};
use crate::process_regions::OnFake;
use crate::process_up::golden_prompt;
use lagoon_tests::faults::{certificates, number, pace_profile, passkey, prompt};
use lagoon_tests::golden::max_diff;
use lagoon_tests::process::{Client, Server, logits, run, token_ids};
use serde_json::{Value, json};
use std::time::Duration;

/// Tokens of KV of each instance, and of the prompt.
const KV: u64 = 2_048;
const PROMPT: usize = 1_203;
/// Flags of an instance that computes prompts of this length with others.
const TOGETHER: [&str; 2] = ["--prefill-instances=3", "--prefill-instances-tokens=64"];

/// Three instances of one pool, with steps of 64 rows, of which each takes `row_us` in each of the model's four layers.
fn three(cluster: &Cluster, row_us: f64, flags: &[&str]) -> [Server; 3] {
    let model = passkey().to_string_lossy().into_owned();
    let pace = pace_profile(cluster.ca.path(), &passkey(), Duration::from_micros(10));
    let mut profile: Value = serde_json::from_slice(&std::fs::read(&pace).unwrap()).unwrap();
    profile["prompt_row_us"] = json!(row_us);
    std::fs::write(&pace, profile.to_string()).unwrap();
    let tokens = format!("--kv-tokens={KV}");
    let own = ["--backend=cpu", "--step-tokens=64", &tokens];
    let flags = [&own[..], flags].concat();
    let servers = ["one", "two", "three"].map(|name| {
        let started = cluster.serve_at(Some(&pace), &cluster.ca, name, &model, &flags);
        started.unwrap_or_else(|stderr| panic!("{name}: {stderr}"))
    });
    // Of each other instance's rBlocks four are a reserve.
    servers.iter().for_each(|server| wait_for_pool(&server.client(), 3 * KV / 8 - 2 * 4));
    servers
}

fn joint(client: &Client, field: &str) -> u64 {
    number(&client.get("/lagoon/status").json(), &format!("joint/{field}"))
}

#[test]
fn three_processes_compute_a_prompt_and_a_killed_one_costs_no_answer() {
    let cluster = Cluster::new();
    let model = passkey().to_string_lossy().into_owned();
    let alone = crate::process_up::single(&model, "2048");
    let (first, second) = (prompt(7, PROMPT, 1022), prompt(8, PROMPT, 1022));
    let expected = [&first, &second].map(|prompt| token_ids(&alone.client().complete(prompt, 16, &json!({})).json()));
    drop(alone);
    let mut servers = three(&cluster, 1_000.0, &TOGETHER).map(Some);
    let client = servers[0].as_ref().unwrap().client();

    assert_eq!(token_ids(&client.complete(&first, 16, &json!({})).json()), expected[0]);
    client.wait_for_text("/metrics", "\nlagoon_joint_prefills_total{result=\"completed\"} 1\n");
    let shares: Vec<u64> = servers[1..].iter().flatten().map(|of| joint(&of.client(), "computed_tokens")).collect();
    assert!(shares.iter().all(|share| share.abs_diff(PROMPT as u64 / 3) <= 80), "{shares:?}");

    let asking = servers[0].as_ref().unwrap().client();
    let asked = std::thread::spawn(move || token_ids(&asking.complete(&second, 16, &json!({})).json()));
    client.wait_until("/lagoon/status", "begun", |s| number(s, "joint/begun") == 2);
    // A prompt takes 1.6 s together.
    std::thread::sleep(Duration::from_millis(300));
    servers[1].take().unwrap().kill();
    assert_eq!(asked.join().unwrap(), expected[1]);
    let status = client.get("/lagoon/status").json();
    let of = |field: &str| number(&status, field);
    println!("{} tokens were computed again", of("recomputed_tokens"));
    assert_eq!((of("joint/ended"), of("joint/completed")), (1, 1), "it was killed in the middle: {status}");
    assert!((1..=PROMPT as u64 / 3 + 80).contains(&of("recomputed_tokens")), "{status}");
    client.wait_for_text("/metrics", "\nlagoon_joint_prefills_total{result=\"ended\"} 1\n");
}

/// By default CUDA has address rows, whose rBlocks have one owner: with joint prefill a block table finds them.
#[test]
fn cuda_computes_prompts_together_without_address_rows() {
    let Some(on) = OnFake::find("cuda_computes_prompts_together_without_address_rows") else { return };
    let (model, prompt) = golden_prompt();
    let prompt: Vec<u32> = prompt.iter().cycle().take(100).copied().collect();
    let sizes = ["--calibrate=off", "--block-tokens=8", "--kv-tokens=256", "--step-tokens=16", "--max-running=4"];
    let common = [&["--http=127.0.0.1:0", "--backend=cuda", "--expose-logits"], &sizes[..]].concat();
    let extra = json!({"return_logits": true});
    let alone = on.start_plain(&[&["serve", &model], &common[..]].concat(), &[]);
    let expected = alone.client().complete(&prompt, 8, &extra).json();
    drop(alone);
    let cluster = Cluster::new();
    let gmanager = format!("--gmanager={}", cluster.gmanager.announced("quic"));
    let servers = ["one", "two"].map(|name| {
        let [a, b, c] = certificates(&cluster.ca, name);
        let own = ["serve", &model, &gmanager, &a, &b, &c, "--name", name];
        on.start_plain(&[&own[..], &common, &TOGETHER].concat(), &[("LAGOON_LOG", "info")])
    });
    let client = servers[0].client();
    wait_for_pool(&client, 32 + 31);
    let answer = client.complete(&prompt, 8, &extra).json();
    assert_eq!(token_ids(&answer), token_ids(&expected));
    for (ours, theirs) in logits(&answer).iter().zip(&logits(&expected)) {
        assert!(max_diff(ours, theirs) < 1e-3, "{}", max_diff(ours, theirs));
    }
    assert_eq!(joint(&client, "completed"), 1);
    assert!(joint(&servers[1].client(), "computed_tokens") >= 32);
    for server in servers {
        let log = server.stop().stderr;
        assert!(log.contains("not in address rows"), "{log}");
    }
}

#[test]
fn address_rows_and_joint_prefill_are_not_for_one_instance() {
    let (model, _) = golden_prompt();
    let serve = ["serve", &model, "--http=127.0.0.1:0", "--kv-address-rows=on", "--prefill-instances=auto"];
    let ended = run(&serve);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let words = ["--prefill-instances", "--kv-address-rows", "hint:"];
    assert!(words.iter().all(|word| ended.stderr.contains(word)), "{ended:?}");
}
