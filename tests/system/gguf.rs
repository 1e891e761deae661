//! A GGUF file in place of a model directory: a pool of three, `lagoon serve`, `lagoon up` with a kv node, `lagoon doctor`.

use crate::process_cluster::{Cluster, wait_for_pool};
use crate::process_up::single;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};
use lagoon_tests::golden::max_diff;
use lagoon_tests::process::{Server, logits, run, token_ids};
use lagoon_types::DType;
use serde_json::{Value, json};

fn file(name: &str) -> String {
    lagoon_tests::root().join("tests/goldens/gguf").join(name).to_string_lossy().into_owned()
}

/// Packed weights of several formats, pooled: rows of rotated heads in turns, norms in f32 beside matrices in f16.
#[test]
fn a_packed_file_pooled_over_three_equals_one() {
    let pool = PoolSpec { dir: file("llama-q4_k.gguf").into(), kv_dtype: DType::F32, block_tokens: 4, split: false };
    let mut world = World::pool(pool.clone(), None, &[Spec::cpu(8), Spec::cpu(16), Spec::cpu(16)]);
    world.submit(0, greedy(prompt(7, 100, 64), 12));
    world.run();
    assert!(world.sent("partial").0 > 0 && world.sent("seal").0 > 0);
    let diff = assert_equals_single("a packed file", &world, &pool);
    println!("largest difference {diff:e}");
    world.check_empty();
}

/// Tokenizer, chat template and ends of answers come from the file.
#[test]
fn a_file_is_served() {
    for (name, text) in [("llama-f16.gguf", "the boats"), ("qwen2-f16.gguf", "the boats")] {
        let server = single(&file(name), "256");
        let client = server.client();
        let models = client.get("/v1/models").json();
        assert_eq!(models["data"][0]["id"], name.strip_suffix(".gguf").unwrap());
        let tokens = client.post("/tokenize", &json!({"prompt": text})).json();
        let ids: Vec<u32> = serde_json::from_value(tokens["tokens"].clone()).unwrap();
        let restored = client.post("/detokenize", &json!({"tokens": ids})).json();
        assert!(restored["prompt"].as_str().unwrap().contains(text), "{restored}");
        let chat = json!({"model": name.strip_suffix(".gguf").unwrap(), "max_tokens": 4, "temperature": 0,
                          "messages": [{"role": "user", "content": text}]});
        let answer = client.post("/v1/chat/completions", &chat).json();
        assert_eq!(answer["choices"][0]["message"]["role"], "assistant", "{answer}");
        let completed = client.complete(&[5, 9, 20], 6, &json!({})).json();
        assert_eq!(completed["usage"]["prompt_tokens"], 3, "{completed}");
    }
}

/// A kv node knows the model's shape and its identity from the file.
#[test]
fn a_kv_node_lends_to_a_file() {
    let model = file("llama-f16.gguf");
    let cluster = Cluster::new();
    let kv = cluster.serve("kv", &model, &["--backend=cpu", "--role=kv", "--kv-tokens=128", "--dtype=f32"]);
    let instance = cluster.serve("a", &model, &["--backend=cpu", "--kv-tokens=64", "--dtype=f32"]);
    let client = instance.client();
    wait_for_pool(&client, 24);
    let prompt: Vec<u32> = (0..90).map(|i| 3 + i * 37 % 500).collect();
    let flags = ["--backend=cpu", "--threads=1", "--http=127.0.0.1:0", "--block-tokens=8", "--expose-logits"];
    let alone = Server::start(&[&["serve", &model, "--kv-tokens=256", "--dtype=f32"], &flags[..]].concat());
    let extra = json!({"return_logits": true});
    let [pooled, expected] = [&client, &alone.client()].map(|client| client.complete(&prompt, 8, &extra).json());
    assert_eq!(token_ids(&pooled), token_ids(&expected));
    for (ours, theirs) in logits(&pooled).iter().zip(&logits(&expected)) {
        assert!(max_diff(ours, theirs) < 1e-3, "{}", max_diff(ours, theirs));
    }
    assert!(kv.client().get("/lagoon/status").json()["partials_bytes_sent"].as_u64() > Some(0));
}

#[test]
fn doctor_tells_what_a_file_becomes() {
    let found = run(&["doctor", &file("llama-q8_0.gguf"), "--json"]);
    assert_eq!(found.code, Some(0), "{found:?}");
    let found: Value = serde_json::from_str(&found.stdout).unwrap();
    assert_eq!((&found["family"], &found["dtype"]), (&json!("llama"), &json!("f16")));
    assert_eq!(found["stored"]["formats"], json!(["F32", "Q8_0"]));
    assert!(found["stored"]["bytes"].as_u64().unwrap() < found["weight_bytes"].as_u64().unwrap());
    let missing = run(&["doctor", "nowhere.gguf"]);
    assert!(missing.stderr.contains("there is no such file") && missing.stderr.contains("hint:"), "{missing:?}");
}

/// The bundled model becomes a file that is served: its answer is the model's own.
#[test]
fn a_quantised_model_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("passkey.gguf").to_string_lossy().into_owned();
    let model = lagoon_tests::root().join("models/passkey").to_string_lossy().into_owned();
    let done = run(&["quantize", &model, &out, "--format=q8_0", "--json"]);
    assert_eq!(done.code, Some(0), "{done:?}");
    let done: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!((&done["format"], &done["calibration_tokens"]), (&json!("q8_0"), &Value::Null));
    let number = |field: &str| done[field].as_f64().unwrap_or_else(|| panic!("{field}: {done}"));
    assert!((8.0..9.0).contains(&number("bits_per_weight")) && number("relative_rms_error") < 0.01, "{done}");
    assert!(number("bytes") < number("bytes_before"), "{done}");
    let again = run(&["quantize", &model, &out, "--format=q4_k"]);
    assert!(again.code == Some(1) && again.stderr.contains("hint: --force replaces it"), "{again:?}");
    let format = run(&["quantize", &model, &out, "--format=q3"]);
    assert!(format.stderr.contains("q4_k") && format.stderr.contains("mxfp4"), "{format:?}");

    let [packed, own] = [&out, &model].map(|model| {
        let server = single(model, "2048");
        let body =
            json!({"prompt": "The pass key is 71432. Remember it. The pass key is", "max_tokens": 8, "temperature": 0});
        server.client().post("/v1/completions", &body).json()["choices"][0]["text"].clone()
    });
    assert_eq!(packed, own);
}
