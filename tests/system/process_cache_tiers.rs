//! The prefix cache's tiers of a real server: KV on disk that outlives the process, damage, and flags that are refused.

use crate::process_up::golden_prompt;
use lagoon_tests::process::{Client, Server, run, token_ids};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Tokens of the prompts: whole rBlocks of eight but one token.
const TOKENS: usize = 65;

fn serve(model: &str, flags: &[&str]) -> Server {
    // Twelve rBlocks: one prompt and its answer, and a bit of another.
    let own = ["serve", model, "--backend=cpu", "--threads=1", "--http=127.0.0.1:0", "--block-tokens=8"];
    let sizes = ["--kv-tokens=96", "--expose-logits", "--cache-load-tokens=1"];
    Server::start(&[&own[..], &sizes, flags].concat())
}

fn ask(client: &Client, prompt: &[u32]) -> (Vec<u32>, u64) {
    let answer = client.complete(prompt, 6, &json!({})).json();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (token_ids(&answer), cached.unwrap_or_else(|| panic!("{answer}")))
}

fn wait_for(client: &Client, what: &'static str, is: impl Fn(&Value) -> bool) {
    client.wait_until("/lagoon/status", what, |status| is(&status["cache_tiers"]));
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = |dir: &Path| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    entries(dir).iter().filter(|path| path.is_dir()).flat_map(|dir| entries(dir)).collect()
}

#[test]
fn a_restarted_server_finds_its_prefixes_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (model, long) = golden_prompt();
    let asked = &long[..TOKENS];
    let cache = format!("--cache-dir={}", dir.path().join("kv").display());
    let server = serve(&model, &[&cache]);
    let (expected, cached) = ask(&server.client(), asked);
    assert_eq!(cached, 0);
    wait_for(&server.client(), "written", |tiers| tiers["disk"]["saved_blocks"].as_u64() >= Some(8));
    // Another process may not have the directory meanwhile.
    let second =
        run(&["serve", &model, "--backend=cpu", "--http=127.0.0.1:0", "--kv-tokens=96", "--block-tokens=8", &cache]);
    assert_eq!(second.code, Some(1), "{second:?}");
    assert!(second.stderr.contains("in use by another process") && second.stderr.contains("hint: "), "{second:?}");
    // Killed: nothing is written at the end.
    server.kill();

    let server = serve(&model, &[&cache]);
    let client = server.client();
    assert_eq!(ask(&client, asked), (expected.clone(), 64));
    client.wait_for_text("/metrics", "lagoon_prefix_cache_hit_tokens_total{where=\"disk\"} 64");
    client.wait_for_text("/metrics", "lagoon_prefix_cache_tier_loads_total{end=\"whole\"} 1");
    let status = client.get("/lagoon/status").json();
    assert_eq!(
        (&status["prefix"]["hit_tokens"], &status["prefix"]["found"]["disk"]),
        (&json!(64), &json!(64)),
        "{status}"
    );
    assert_eq!(server.stop().code, Some(0));

    // A file that was cut off, and one with a wrong bit: the prefix before them is used, they are removed and counted.
    let found = files(&dir.path().join("kv"));
    assert!(found.len() >= 8, "{found:?}");
    for (at, path) in found.iter().enumerate() {
        let mut bytes = fs::read(path).unwrap();
        match at % 2 {
            0 => bytes.truncate(bytes.len() / 2),
            _ => *bytes.last_mut().unwrap() ^= 1,
        }
        fs::write(path, bytes).unwrap();
    }
    let server = serve(&model, &[&cache]);
    let client = server.client();
    assert_eq!(ask(&client, asked), (expected.clone(), 0));
    client.wait_for_text("/metrics", "lagoon_prefix_cache_tier_lost_blocks_total{reason=\"damaged\"}");
    wait_for(&client, "written again", |tiers| {
        tiers["disk"]["damaged_blocks"].as_u64() >= Some(1) && tiers["disk"]["saved_blocks"].as_u64() >= Some(1)
    });
    // Asked again it is in KV memory.
    assert_eq!(ask(&client, asked), (expected, 64));
    assert_eq!(server.stop().code, Some(0));
}

#[test]
fn evicted_prefixes_come_back_from_host_memory() {
    let (model, long) = golden_prompt();
    let server = serve(&model, &["--host-cache-tokens=512"]);
    let client = server.client();
    let prompts: Vec<Vec<u32>> = (0..3).map(|n| long[n..n + TOKENS].to_vec()).collect();
    let mut answers = Vec::new();
    for (n, prompt) in prompts.iter().enumerate() {
        answers.push(ask(&client, prompt).0);
        let saved = 8 * (n as u64 + 1);
        wait_for(&client, "copied", |tiers| tiers["host"]["saved_blocks"].as_u64() >= Some(saved));
    }
    for (prompt, answer) in prompts.iter().zip(&answers) {
        assert_eq!(ask(&client, prompt), (answer.clone(), 64));
    }
    client.wait_for_text("/metrics", "lagoon_prefix_cache_tier_blocks{tier=\"host\"}");
    let prefix = client.get("/lagoon/status").json()["prefix"].clone();
    assert!(prefix["found"]["host"].as_u64() >= Some(128), "{prefix}");
}

#[test]
fn tiers_that_cannot_be_had_are_refused_at_the_start() {
    let (model, _) = golden_prompt();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let below_a_file = format!("--cache-dir={}", file.join("kv").display());
    let cases: [(&[&str], &[&str]); 4] = [
        (&[&below_a_file], &["make the cache directory", "hint: "]),
        (&["--prefix-cache=off", "--host-cache-tokens=64"], &["--host-cache-tokens", "--prefix-cache=on"]),
        (&["--cache-dir-bytes=1G"], &["--cache-dir"]),
        (&["--cache-dir=x", "--cache-dir-bytes=1X"], &["no unit"]),
    ];
    for (flags, words) in cases {
        let sizes = ["serve", &model, "--backend=cpu", "--http=127.0.0.1:0", "--kv-tokens=96"];
        let ended = run(&[&sizes[..], flags].concat());
        assert!(ended.code.is_some_and(|code| code != 0), "{flags:?}: {ended:?}");
        assert!(words.iter().all(|word| ended.stderr.contains(word)), "{flags:?}: {ended:?}");
    }
}

/// Each instance of `lagoon up` has a directory of its own below the one that is named.
#[test]
fn instances_of_up_have_directories_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let (model, long) = golden_prompt();
    let cache = format!("--cache-dir={}", dir.path().display());
    let flags = ["--backend=cpu", "--threads=1", "--port=0", "--block-tokens=8", "--kv-tokens=96", &cache];
    let server = Server::start(&[&["up", &model, "--instances=2"], &flags[..]].concat());
    for _ in 0..4 {
        ask(&server.client(), &long[..TOKENS]);
    }
    assert_eq!(server.stop().code, Some(0));
    for name in ["instance-0", "instance-1"] {
        assert!(dir.path().join(name).join("lock").exists(), "{name}");
    }
}
