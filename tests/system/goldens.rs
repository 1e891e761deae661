//! Every supported variant against transformers' logits, decoding and prefilling, on one instance of the CPU and of wgpu.
//! On CUDA: families.rs.

use lagoon_backend::{Device, cpu::CpuDevice};
use lagoon_model::ModelSpec;
use lagoon_tests::golden::{Golden, max_diff, models};
use lagoon_tests::single::{STEP_ROWS, Session};
use lagoon_types::KvDType;

/// Chunks of at most `STEP_ROWS`, the last `tail` tokens one by one.
fn chunks(n: usize, tail: usize) -> Vec<usize> {
    let mut chunks: Vec<usize> = vec![STEP_ROWS; (n - tail) / STEP_ROWS];
    chunks.push((n - tail) % STEP_ROWS);
    chunks.retain(|len| *len > 0);
    chunks.extend(vec![1; tail]);
    chunks
}

/// Compares logits with the reference, for decoding (one token a step) and two chunkings of prefill, with KV in f32
/// and in the model's own type; then the greedy tokens.
fn check<D: Device>(name: &str, device: impl Fn() -> D) {
    let golden = Golden::load(name);
    let tokens = &golden.description.tokens;
    let n = tokens.len();
    let output = golden.description.greedy_continuation.len();
    for (kv_dtype, tolerance) in
        [(Some(KvDType::F32), golden.description.tolerance_f32), (None, golden.description.tolerance)]
    {
        let mut spec = ModelSpec::open(&golden.dir).unwrap();
        golden.description.max_model_len.into_iter().for_each(|tokens| spec.limit_context(tokens).unwrap());
        let mut session = Session::of(device(), &golden.dir, &spec, n + output, kv_dtype);
        let third = chunks(n / 3, 0);
        let chunkings = [chunks(n, golden.rows), chunks(n, 0), [third, chunks(n - n / 3, 1)].concat()];
        let (mut compared, mut largest) = (0, 0f32);
        for chunks in chunkings {
            for (pos, logits) in session.logits(tokens, &chunks) {
                let Some(expected) = golden.at(pos) else { continue };
                let diff = max_diff(&logits, expected);
                assert!(diff <= tolerance, "{name}, {kv_dtype:?}: position {pos} of {chunks:?} differs by {diff}");
                (compared, largest) = (compared + 1, largest.max(diff));
            }
        }
        assert!(compared > golden.rows, "{name}: only {compared} positions were compared");
        println!("{name}, KV {kv_dtype:?}: {compared} positions within {largest:e} of {tolerance:e}");
        let greedy = &golden.description.greedy_continuation;
        assert_eq!(&session.continuation(tokens, output), greedy, "{name}, {kv_dtype:?}");
    }
}

#[test]
fn cpu_matches_transformers() {
    for name in models() {
        check(name, CpuDevice::new);
    }
}

#[test]
fn cpu_matches_transformers_on_the_bundled_model() {
    check("passkey", CpuDevice::new);
}

#[test]
fn cpu_matches_transformers_within_a_limited_context() {
    check("phi3_longrope_short", CpuDevice::new);
}

#[test]
fn wgpu_matches_transformers() {
    for name in models() {
        if let Err(reason) = lagoon_tests::wgpu() {
            return lagoon_tests::skip("wgpu_matches_transformers", &reason);
        }
        check(name, || lagoon_tests::wgpu().unwrap());
    }
}

#[test]
fn wgpu_with_wide_kernels_matches_transformers() {
    let open = || lagoon_tests::wgpu_with(lagoon_shaders::Options::default());
    if let Err(reason) = open() {
        return lagoon_tests::skip("wgpu_with_wide_kernels_matches_transformers", &reason);
    }
    check("yi", || open().unwrap());
}
