//! Every supported variant against transformers' logits, decoding and prefilling, on both backends.

use lagoon_backend::{Device, cpu::CpuDevice};
use lagoon_tests::golden::{Golden, max_diff};
use lagoon_tests::single;
use lagoon_types::DType;

const MODELS: [&str; 10] = [
    "bf16",
    "f16",
    "head_dim_64",
    "llama2_mha",
    "llama3_new",
    "llama3_old",
    "mistral_window",
    "sharded",
    "tied_sentencepiece",
    "yi",
];

/// Logits with KV in f32 against the reference, for decoding (one token a step) and for two chunkings of prefill.
fn check<D: Device>(name: &str, device: impl Fn() -> D) {
    let golden = Golden::load(name);
    let tokens = &golden.description.tokens;
    let n = tokens.len();
    let chunkings = [vec![1; n], vec![n], vec![n / 3, 1, n - n / 3 - 1]];
    let mut compared = 0;
    for chunks in chunkings {
        let (_, mut executor) = single::executor(device(), &golden.dir, n, DType::F32);
        for (pos, logits) in single::logits(&mut executor, tokens, &chunks) {
            let Some(expected) = golden.at(pos) else { continue };
            let diff = max_diff(&logits, expected);
            assert!(diff <= 1e-3, "{name}: position {pos} of {chunks:?} differs by {diff}");
            compared += 1;
        }
    }
    assert!(compared > n, "{name}: only {compared} positions were compared");
}

#[test]
fn cpu_matches_transformers() {
    for name in MODELS {
        check(name, CpuDevice::new);
    }
}
