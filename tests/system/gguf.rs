//! A GGUF file in place of a model directory: pools of three, prefill apart, wgpu, CUDA, `lagoon serve`, a kv node, `lagoon doctor`.

use crate::cuda::driver;
use crate::process_cluster::{Cluster, wait_for_pool};
use crate::process_up::single;
use lagoon_backend::Device as _;
use lagoon_cuda::kernels::attention::Precision;
use lagoon_model::Checkpoint;
use lagoon_protocol::Role;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};
use lagoon_tests::golden::max_diff;
use lagoon_tests::process::{Server, logits, run, token_ids};
use lagoon_tests::single::Session;
use lagoon_types::{DType, KvDType};
use serde_json::{Value, json};

fn file(name: &str) -> String {
    lagoon_tests::root().join("tests/goldens/gguf").join(name).to_string_lossy().into_owned()
}

/// 4-bit files: rows of rotated heads in turns (Llama) and as they are (Qwen2), norms in f32 beside packed matrices of several
/// formats.
const PACKED: [&str; 2] = ["llama-q4_k.gguf", "qwen2-q4_k.gguf"];

fn pool_of(name: &str) -> PoolSpec {
    PoolSpec { dir: file(name).into(), kv_dtype: KvDType::F32, block_tokens: 4, split: false }
}

fn pooled_over_three(name: &str, backend: Backend) {
    let pool = pool_of(name);
    let of = |blocks| Spec { backend, ..Spec::cpu(blocks) };
    let mut world = World::pool(pool.clone(), None, &[of(8), of(16), of(16)]);
    world.submit(0, greedy(prompt(7, 100, 64), 12));
    world.run();
    assert!(world.sent("partial").0 > 0 && world.sent("seal").0 > 0);
    let diff = assert_equals_single(name, &world, &pool);
    println!("{name}, {backend:?}: largest difference {diff:e}");
    world.check_empty();
}

/// The same with CUDA instances, over the fake driver: prompts through elements of weights in f16, decoding through packed weights.
#[test]
fn a_packed_file_pooled_over_cuda_equals_one() {
    for (seed, name) in (80..).zip(["llama-q4_k.gguf", "llama-q8_0.gguf"]) {
        let Some(fake) = driver("a_packed_file_pooled_over_cuda_equals_one", seed) else { return };
        // An rBlock is a page of a layer's K, or two.
        let pool = PoolSpec { dir: file(name).into(), kv_dtype: KvDType::F32, block_tokens: 64, split: false };
        let exact = |blocks| Spec { step_rows: 24, precision: Precision::Exact, ..Spec::cpu(blocks) };
        let cuda = |blocks| Spec { backend: Backend::Cuda, ..exact(blocks) };
        let mut world = World::pool(pool.clone(), None, &[cuda(2), exact(3), cuda(3)]);
        world.submit(0, greedy(prompt(8, 150, 64), 5));
        world.run();
        assert!(world.sent("partial").0 > 0, "{name}");
        let diff = assert_equals_single(name, &world, &pool);
        println!("{name}: largest difference {diff:e}");
        world.check_empty();
        drop(world);
        fake.finish();
    }
}

fn prefilled_apart(name: &str, backend: Backend, push: bool) {
    let pool = pool_of(name);
    let prefill = Spec { role: Role::Prefill, backend, ..Spec::cpu(40) };
    let decode = Spec { role: Role::Decode, backend, push, ..Spec::cpu(40) };
    let mut world = World::pool(pool.clone(), None, &[prefill, decode]);
    world.run_until(|w| w.live(1).status().prefill.workers == 1);
    world.submit(1, greedy(prompt(9, 60, 64), 8));
    world.run();
    let status = world.live(1).status().prefill;
    assert_eq!((status.pulled, status.own, status.retried), (1, 0, 0), "{name}, push {push}: {status:?}");
    assert_equals_single(name, &world, &pool);
    world.check_empty();
}

#[test]
fn a_packed_file_pooled_over_three_equals_one() {
    PACKED.iter().for_each(|name| pooled_over_three(name, Backend::Cpu));
}

#[test]
fn a_packed_file_prefilled_apart_equals_one() {
    for (name, push) in PACKED.iter().zip([false, true]) {
        prefilled_apart(name, Backend::Cpu, push);
    }
}

/// Alone against the logits of the files' weights, pooled and prefilled apart against the CPU.
#[test]
fn wgpu_serves_files() {
    if let Err(reason) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("wgpu_serves_files", &reason);
    }
    let dir = lagoon_tests::root().join("tests/goldens/gguf");
    let cases: Value = serde_json::from_slice(&std::fs::read(dir.join("goldens.json")).unwrap()).unwrap();
    for case in cases.as_array().unwrap() {
        let path = dir.join(case["file"].as_str().unwrap());
        let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).unwrap();
        let mut expected = Vec::new();
        DType::F32.decode(&std::fs::read(path.with_extension("logits")).unwrap(), &mut expected);
        let device = lagoon_tests::wgpu().unwrap();
        let formats = Checkpoint::open(&path).unwrap().formats();
        // Formats that wgpu does not unpack are rounded to f16.
        let bound = if formats.iter().all(|(format, _)| device.takes(*format)) { 1e-4 } else { 5e-3 };
        let mut session = Session::open(device, &path, tokens.len(), Some(KvDType::F32));
        let (pos, logits) = session.logits(&tokens, &[30, tokens.len() - 31, 1]).pop().unwrap();
        assert_eq!(pos, tokens.len() - 1);
        let diff = max_diff(&logits, &expected[expected.len() - logits.len()..]);
        println!("{}: {diff:e}", path.display());
        assert!(diff < bound, "{}: {diff}", path.display());
    }
    for (name, push) in PACKED.iter().zip([true, false]) {
        pooled_over_three(name, Backend::Wgpu);
        prefilled_apart(name, Backend::Wgpu, push);
    }
}

/// Tokenizer, chat template and ends of answers come from the file.
#[test]
fn a_file_is_served() {
    for (name, text) in
        [("llama-f16.gguf", "the boats"), ("qwen2-f16.gguf", "the boats"), ("qwen2-q4_k.gguf", "the boats")]
    {
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

/// A kv node knows the model's shape and its identity from the file, packed or not.
#[test]
fn a_kv_node_lends_to_a_file() {
    kv_node_lends("llama-f16.gguf", "--dtype=f32");
    kv_node_lends("qwen2-q4_k.gguf", "--kv-dtype=f32");
}

fn kv_node_lends(name: &str, dtype: &str) {
    let model = file(name);
    let cluster = Cluster::new();
    let kv = cluster.serve("kv", &model, &["--backend=cpu", "--role=kv", "--kv-tokens=128", dtype]);
    let instance = cluster.serve("a", &model, &["--backend=cpu", "--kv-tokens=64", dtype]);
    let client = instance.client();
    wait_for_pool(&client, 24);
    let prompt: Vec<u32> = (0..90).map(|i| 3 + i * 37 % 500).collect();
    let flags = ["--backend=cpu", "--threads=1", "--http=127.0.0.1:0", "--block-tokens=8", "--expose-logits"];
    let alone = Server::start(&[&["serve", &model, "--kv-tokens=256", dtype], &flags[..]].concat());
    let extra = json!({"return_logits": true});
    let [pooled, expected] = [&client, &alone.client()].map(|client| client.complete(&prompt, 8, &extra).json());
    assert_eq!(token_ids(&pooled), token_ids(&expected), "{name}");
    for (ours, theirs) in logits(&pooled).iter().zip(&logits(&expected)) {
        assert!(max_diff(ours, theirs) < 1e-3, "{name}: {}", max_diff(ours, theirs));
    }
    assert!(kv.client().get("/lagoon/status").json()["partials_bytes_sent"].as_u64() > Some(0), "{name}");
}

#[test]
fn doctor_tells_what_a_file_becomes() {
    let found = run(&["doctor", &file("llama-q8_0.gguf"), "--json"]);
    assert_eq!(found.code, Some(0), "{found:?}");
    let found: Value = serde_json::from_str(&found.stdout).unwrap();
    assert_eq!((&found["family"], &found["dtype"]), (&json!("llama"), &json!("f16")));
    assert_eq!(found["stored"]["formats"], json!(["F32", "Q8_0"]));
    let stored = found["stored"]["bytes"].as_u64().unwrap();
    assert!(stored < found["weight_bytes"].as_u64().unwrap());
    let backends = found["stored"]["backends"].as_array().unwrap();
    assert_eq!(backends.iter().map(|of| of["backend"].as_str().unwrap()).collect::<Vec<_>>(), ["CPU", "wgpu", "CUDA"]);
    let cpu = &backends[0];
    assert_eq!((&cpu["matrices"][0]["format"], &cpu["matrices"][0]["loaded_as"]), (&json!("Q8_0"), &json!("Q8_0")));
    assert!(cpu["bytes"].as_u64().unwrap() < stored, "all but the vectors");
    let text = run(&["doctor", &file("llama-q4_k.gguf")]);
    assert!(text.stdout.contains("  on CPU       ") && text.stdout.contains(" in Q4_K"), "{text:?}");
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
