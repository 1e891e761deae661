//! A cluster set up by hand: certificates, a gManager, instances that join, and instances that are refused.

use crate::process_moves::golden_with_tokenizer;
use crate::process_up::{golden_prompt, single};
pub(crate) use lagoon_tests::faults::{certificates, new_ca};
use lagoon_tests::faults::{certificates_for, pace_profile};
use lagoon_tests::golden::{Golden, max_diff};
use lagoon_tests::process::{Client, Server, lagoon_at, logits, run, token_ids};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

pub(crate) struct Cluster {
    pub(crate) ca: TempDir,
    pub(crate) gmanager: Server,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        let ca = new_ca();
        let tls = certificates(&ca, "gm");
        let [a, b, c] = &tls;
        let gmanager = Server::start(&["gmanager", "--listen=127.0.0.1:0", "--metrics-port=0", a, b, c]);
        Self { ca, gmanager }
    }

    /// Starts `serve` as a member of the cluster, with a certificate of `ca`.
    fn serve_with(&self, ca: &TempDir, name: &str, model: &str, flags: &[&str]) -> Result<Server, String> {
        self.serve_at(None, ca, name, model, flags)
    }

    /// As [`Cluster::serve_with`], on a device of this profile.
    pub(crate) fn serve_at(
        &self,
        pace: Option<&Path>,
        ca: &TempDir,
        name: &str,
        model: &str,
        flags: &[&str],
    ) -> Result<Server, String> {
        let gmanager = format!("--gmanager={}", self.gmanager.announced("quic"));
        let [a, b, c] = certificates(ca, name);
        let own = ["serve", model, &gmanager, &a, &b, &c, "--name", name];
        let common = ["--http=127.0.0.1:0", "--threads=1", "--block-tokens=8", "--expose-logits"];
        let command = lagoon_at(None, pace, &[&own[..], &common[..], flags].concat());
        Server::try_start_command(command).map_err(|ended| ended.stderr)
    }

    /// A member whose decode steps take `step`.
    pub(crate) fn serve_paced(&self, step: Duration, name: &str, model: &str, flags: &[&str]) -> Server {
        let profile = pace_profile(self.ca.path(), Path::new(model), step);
        self.serve_at(Some(&profile), &self.ca, name, model, flags).unwrap()
    }

    /// What one says that the pool refuses.
    fn refused(&self, name: &str, model: &str, flags: &[&str]) -> String {
        let flags = [&["--backend=cpu", "--kv-tokens=64"], flags].concat();
        // It may be ready before the gManager's refusal; then it ends by itself.
        let text = match self.serve_with(&self.ca, name, model, &flags) {
            Ok(mut server) => {
                let ended = server.ended();
                assert_eq!(ended.code, Some(1), "{ended:?}");
                ended.stderr
            }
            Err(stderr) => stderr,
        };
        assert!(text.contains("refused this instance"), "{text}");
        text
    }

    pub(crate) fn serve(&self, name: &str, model: &str, flags: &[&str]) -> Server {
        self.serve_with(&self.ca, name, model, flags).unwrap()
    }
}

/// rBlocks available to one of two instances of 8: its own, and those that the other lends. One is a reserve.
pub(crate) const TWO: u64 = 8 + 7;

/// Waits until an instance counts `blocks` rBlocks of its own or lent by others.
pub(crate) fn wait_for_pool(client: &Client, blocks: u64) {
    client.wait_until("/lagoon/status", "a whole pool", |s| s["pool_blocks_total"].as_u64() == Some(blocks));
}

/// Asserts that a request on `client` equals that of a single large instance.
pub(crate) fn equals_single(client: &Client, model: &str, prompt: &[u32]) {
    let extra = json!({"return_logits": true});
    let reference = single(model, "256");
    let expected = reference.client().complete(prompt, 12, &extra).json();
    let answer = client.complete(prompt, 12, &extra).json();
    assert_eq!(token_ids(&answer), token_ids(&expected));
    for (ours, theirs) in logits(&answer).iter().zip(&logits(&expected)) {
        assert!(max_diff(ours, theirs) < 1e-3, "{}", max_diff(ours, theirs));
    }
}

/// Where a test counts partials: on a busy machine, KV may be predicted to travel faster than its attention.
const SHIP: &str = "--remote-attention=ship";

fn partials_sent(client: &Client) -> u64 {
    client.get("/lagoon/status").json()["partials_bytes_sent"].as_u64().unwrap()
}

#[test]
fn a_node_without_weights_lends_memory_and_attention() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let instance = cluster.serve("node", &model, &["--backend=cpu", "--kv-tokens=64", SHIP]);
    let shape = tempfile::tempdir().unwrap();
    std::fs::copy(format!("{model}/config.json"), shape.path().join("config.json")).unwrap();
    let hash = format!("--model-hash={}", instance.announced("model_hash"));
    let flags = ["--role=kv", "--backend=cpu", "--kv-tokens=128", &hash];
    let kv = cluster.serve("memory", &shape.path().to_string_lossy(), &flags);
    let client = instance.client();
    wait_for_pool(&client, 24);
    equals_single(&client, &model, &prompt);
    assert!(partials_sent(&kv.client()) > 0);
    assert_eq!(kv.client().get("/v1/models").status, 404);

    let [a, b, c] = certificates(&cluster.ca, "looker");
    let status = run(&["status", "--json", "--gmanager", &cluster.gmanager.announced("quic"), &a, &b, &c]);
    let status: Value = serde_json::from_str(&status.stdout).unwrap_or_else(|e| panic!("{e}: {status:?}"));
    let roles: Vec<&Value> = status["instances"].as_array().unwrap().iter().map(|row| &row["role"]).collect();
    assert_eq!(roles, ["instance", "kv"]);
    // A standalone gManager numbers by the clock: it does not reuse numbers of an earlier life.
    assert!(status["instances"][0]["instance"].as_u64() > Some(1_000_000), "{status}");
}

#[test]
fn a_cpu_and_a_wgpu_instance_serve_one_request() {
    if let Err(reason) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("process_cluster::a_cpu_and_a_wgpu_instance_serve_one_request", &reason);
    }
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let cpu = cluster.serve("cpu", &model, &["--backend=cpu", "--kv-tokens=64", SHIP]);
    let wgpu = cluster.serve("wgpu", &model, &["--backend=wgpu", "--kv-tokens=64", "--step-tokens=32", SHIP]);
    assert_eq!(wgpu.announced("backend"), "wgpu");
    for (debtor, creditor) in [(&cpu, &wgpu), (&wgpu, &cpu)] {
        let before = partials_sent(&creditor.client());
        wait_for_pool(&debtor.client(), TWO);
        equals_single(&debtor.client(), &model, &prompt);
        assert!(partials_sent(&creditor.client()) > before);
    }
}

#[test]
fn another_model_or_shape_is_refused_with_both_values() {
    let cluster = Cluster::new();
    let (model, _) = golden_prompt();
    let first = cluster.serve("first", &model, &["--backend=cpu", "--kv-tokens=64"]);
    first.client().wait_until("/lagoon/status", "registered", |s| s["registered"] == true);
    let (own, other) = (first.announced("model_hash"), "ab".repeat(32));
    let text = cluster.refused("hash", &model, &["--role=kv", &format!("--model-hash={other}")]);
    assert!(text.contains(&own[..16]) && text.contains(&other[..16]) && text.contains("hint:"), "{text}");
    let text = cluster.refused("dtype", &model, &["--kv-dtype=f16"]);
    assert!(text.contains("f16") && text.contains("f32"), "{text}");
    let passkey = lagoon_tests::root().join("models/passkey");
    cluster.refused("model", &passkey.to_string_lossy(), &[]);
    assert_eq!(first.client().get("/lagoon/status").json()["registered"], true);
}

/// KV of layers with a window stays with the debtor: a kv node takes the others', and who keeps all in rBlocks is refused.
#[test]
fn a_split_pool_lends_and_refuses_one_that_is_whole() {
    let cluster = Cluster::new();
    let golden = Golden::load("gpt_oss");
    let dir = golden_with_tokenizer(&golden);
    let model = dir.path().to_string_lossy();
    let prompt: Vec<u32> = golden.description.tokens.iter().cycle().take(100).copied().collect();
    let instance = cluster.serve("split", &model, &["--backend=cpu", "--kv-tokens=64", "--kv-groups=on", SHIP]);
    let hash = format!("--model-hash={}", instance.announced("model_hash"));
    let flags = ["--role=kv", "--backend=cpu", "--kv-tokens=128", "--kv-groups=on", &hash];
    let kv = cluster.serve("memory", &model, &flags);
    wait_for_pool(&instance.client(), 24);
    equals_single(&instance.client(), &model, &prompt);
    assert!(partials_sent(&kv.client()) > 0);
    let text = cluster.refused("whole", &model, &[]);
    assert!(text.contains("layers"), "{text}");
}

/// LongRoPE's tables follow the longest context: an instance with those of the other one is refused, and one with another limit
/// on the same side of the original context is not.
#[test]
fn a_pool_with_a_short_context_refuses_an_instance_with_the_long_one() {
    let cluster = Cluster::new();
    let dir = golden_with_tokenizer(&Golden::load("phi3_longrope"));
    let model = dir.path().to_string_lossy();
    let serve = |name: &str, limit: &str| {
        let server = cluster.serve(name, &model, &["--backend=cpu", "--kv-tokens=64", limit]);
        server.client().wait_until("/lagoon/status", "registered", |s| s["registered"] == true);
        server
    };
    let first = serve("short", "--max-model-len=32");
    let text = cluster.refused("long", &model, &[]);
    assert!(text.contains("model hash") && text.contains("--max-model-len"), "{text}");
    serve("shorter", "--max-model-len=24");
    assert_eq!(first.client().get("/v1/models").json()["data"][0]["max_model_len"], 32);
    let longest: Vec<u32> = (3..33).collect();
    let answer = first.client().complete(&longest, 2, &json!({})).json();
    assert_eq!(token_ids(&answer).len(), 2, "{answer}");
    let longer = first.client().post("/v1/completions", &json!({"prompt": longest, "max_tokens": 3}));
    assert!(longer.status == 400 && longer.text.contains("the served context is 32 tokens"), "{longer:?}");
}

#[test]
fn only_certificates_of_the_cluster_get_in() {
    let cluster = Cluster::new();
    let (model, _) = golden_prompt();
    let foreign = new_ca();
    let [a, b, c] = certificates(&foreign, "looker");
    let status = run(&["status", "--gmanager", &cluster.gmanager.announced("quic"), &a, &b, &c]);
    assert_eq!(status.code, Some(1), "{status:?}");
    assert!(status.stderr.contains("certificate"), "{status:?}");
    let stranger = cluster.serve_with(&foreign, "other", &model, &["--backend=cpu", "--kv-tokens=64"]).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(stranger.client().get("/lagoon/status").json()["registered"], false);
    let log = stranger.stop().stderr;
    assert!(log.contains("cannot be reached") && log.contains("certificate"), "{log}");

    let bare = run(&["serve", &model, "--backend=cpu", "--http=127.0.0.1:0", "--gmanager=127.0.0.1:7600"]);
    assert_eq!(bare.code, Some(1));
    assert!(bare.stderr.contains("--tls-cert") && bare.stderr.contains("hint:"), "{bare:?}");
}

/// A certificate says what its node may be: nothing starts as something else, and a kv node with a certificate for that lends.
#[test]
fn a_certificate_is_for_its_roles_only() {
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let gmanager = format!("--gmanager={}", cluster.gmanager.announced("quic"));
    let of = |role: &str| certificates_for(&cluster.ca, &format!("only-{role}"), role);
    let serve = ["serve", &model, "--backend=cpu", "--http=127.0.0.1:0", "--kv-tokens=64", &gmanager];
    let cases: [(&[&str], &str); 5] = [
        (&serve, "kv"),
        (&serve, "gmanager"),
        (&["gmanager", "--listen=127.0.0.1:0"], "instance"),
        (&["status", &gmanager], "instance"),
        (&["drain", "nobody", &gmanager], "gateway"),
    ];
    for (command, role) in cases {
        let tls = of(role);
        let ended = run(&[command, &tls.each_ref().map(String::as_str)].concat());
        assert_eq!(ended.code, Some(1), "{role}: {ended:?}");
        let words = [&format!("is for {role}"), "hint: lagoon certs issue"];
        assert!(words.iter().all(|word| ended.stderr.contains(*word)), "{role}: {ended:?}");
    }
    let instance = cluster.serve("node", &model, &["--backend=cpu", "--kv-tokens=64", SHIP]);
    let shape = tempfile::tempdir().unwrap();
    std::fs::copy(format!("{model}/config.json"), shape.path().join("config.json")).unwrap();
    let hash = format!("--model-hash={}", instance.announced("model_hash"));
    let [a, b, c] = of("kv");
    let shape = shape.path().to_string_lossy().into_owned();
    let flags = ["serve", &shape, "--http=127.0.0.1:0", "--block-tokens=8", "--role=kv", "--backend=cpu"];
    let kv = Server::start(&[&flags[..], &["--kv-tokens=128", &hash, &gmanager, &a, &b, &c]].concat());
    wait_for_pool(&instance.client(), 24);
    equals_single(&instance.client(), &model, &prompt);
    assert!(partials_sent(&kv.client()) > 0);
}
