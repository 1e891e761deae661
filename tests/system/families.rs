//! Every family's goldens on every backend, as docs/reference/models.md claims: alone, in a pool of three instances that
//! has most of the KV at creditors, and prefilled apart from decoding. All are held against transformers' logits.
//!
//! wgpu runs on its software adapter, CUDA over the fake driver. Elsewhere: alone on the CPU and on wgpu (goldens.rs), and
//! prefilled apart on the CPU (disaggregated.rs).

use crate::cuda::driver;
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, LinearLayers};
use lagoon_instance::RemotePolicy;
use lagoon_model::ModelSpec;
use lagoon_protocol::Role;
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};
use lagoon_tests::golden::{Golden, max_diff, models};
use lagoon_tests::single::Session;
use lagoon_types::KvDType;

/// Tokens of the answer on wgpu and CUDA: the first is sampled after the prompt, the others in decode steps.
const FEW: usize = 3;
/// Tokens of an rBlock.
const BLOCK: u32 = 4;
/// Tokens of an rBlock that is a page of the fake CUDA driver in the models of [`WITH_ROWS`].
const PAGE_BLOCK: u32 = 32;
/// Goldens whose rBlocks of [`PAGE_BLOCK`] tokens have address rows on CUDA: latent attention, experts, sinks, soft caps.
const WITH_ROWS: [&str; 4] = ["kimi_k2", "glm4_moe", "gpt_oss", "gemma2"];

/// An instance on a backend. On CUDA it has address rows if its rBlocks are whole pages.
fn spec(backend: Backend, blocks: u32, block_tokens: u32) -> Spec {
    let rows = backend != Backend::Cuda || block_tokens == PAGE_BLOCK;
    Spec { backend, precision: Precision::Exact, step_rows: 24, rows, ..Spec::cpu(blocks) }
}

/// Asserts that a request with a golden's prompt got transformers' logits after the prompt, and its tokens.
fn assert_says(what: &str, world: &World, golden: &Golden, tokens: usize) {
    let (log, of) = (&world.requests[0], &golden.description);
    let diff = max_diff(&log.logits[0], golden.at(of.tokens.len() - 1).unwrap());
    assert!(diff <= of.tolerance_f32, "{what}: {diff}");
    assert_eq!(log.tokens, of.greedy_continuation[..tokens], "{what}");
    println!("{what}: {diff:e} of {:e}", of.tolerance_f32);
}

/// A golden in a pool of three instances, the first of which holds a few tokens of its KV only.
fn assert_pooled(name: &str, backends: [Backend; 3], remote: RemotePolicy, block_tokens: u32, tokens: usize) {
    let golden = Golden::load(name);
    let what = format!("{name}, pooled, {backends:?}, {remote:?}");
    let prompt = golden.description.tokens.clone();
    let blocks = (prompt.len() + tokens).div_ceil(block_tokens as usize) as u32;
    let own = (4 * BLOCK).div_ceil(block_tokens);
    let lent = (blocks - own).div_ceil(2) + 1;
    let sizes = [own, lent, lent];
    let specs: Vec<Spec> =
        backends.iter().zip(sizes).map(|(of, blocks)| Spec { remote, ..spec(*of, blocks, block_tokens) }).collect();
    let pool = PoolSpec::golden(name, block_tokens);
    let windowed = ModelSpec::open(&pool.dir).unwrap().window().is_some();
    let mut world = World::pool(pool, None, &specs);
    world.submit(0, greedy(prompt, tokens as u32));
    world.run_until(|w| w.requests[0].tokens.len() == 1 || w.requests[0].is_over());
    let at = world.live(0).status().sequences[0].clone();
    let away: u32 = at.remote_blocks.values().sum();
    // Under a window the oldest blocks are freed by now.
    assert!(windowed || away >= at.local_blocks, "{what}: {at:?}");
    world.run();
    let crossed = if remote == RemotePolicy::Fetch { world.sent("data").0 } else { world.sent("partial").0 };
    assert!(crossed > 0, "{what}: nothing was remote");
    assert_says(&what, &world, &golden, tokens);
    world.check_empty();
    if backends[0] == Backend::Cuda && block_tokens == PAGE_BLOCK {
        let counters = world.kv_counters(0).unwrap();
        assert!(counters.in_step + counters.ahead + counters.eager > 0, "{what}: no address row: {counters:?}");
    }
}

/// A golden whose prompt is prefilled on one instance and decoded on another.
fn assert_prefilled_apart(name: &str, [from, to]: [Backend; 2], push: bool, tokens: usize) {
    let golden = Golden::load(name);
    let what = format!("{name}, prefilled apart, {from:?} to {to:?}, push: {push}");
    let prompt = golden.description.tokens.clone();
    let blocks = (prompt.len() + tokens).div_ceil(BLOCK as usize) as u32 + 2;
    let prefill = Spec { role: Role::Prefill, ..spec(from, blocks, BLOCK) };
    let decode = Spec { role: Role::Decode, push, stage_on_device: !push, ..spec(to, blocks, BLOCK) };
    let mut world = World::pool(PoolSpec::golden(name, BLOCK), None, &[prefill, decode]);
    world.run_until(|w| w.live(1).status().prefill.workers == 1);
    world.submit(1, greedy(prompt, tokens as u32));
    world.run();
    let status = world.live(1).status().prefill;
    assert_eq!((status.pulled, status.own, status.retried), (1, 0, 0), "{what}: {status:?}");
    assert_says(&what, &world, &golden, tokens);
    world.check_empty();
}

/// A golden on one CUDA instance: a prompt in two chunks, then token by token.
fn assert_alone_on_cuda(name: &str) {
    let options = CudaOptions { linear: LinearLayers::Own, ..CudaOptions::default() };
    let mut device = CudaDevice::open(lagoon_cuda::kernels::FATBIN, options).unwrap();
    device.set_tuning(Tuning { precision: Precision::Exact, ..*device.tuning() });
    let golden = Golden::load(name);
    let (tokens, tolerance) = (&golden.description.tokens, golden.description.tolerance_f32);
    let mut session = Session::open(device, &golden.dir, tokens.len(), Some(KvDType::F32));
    let mut compared = 0;
    for (pos, logits) in session.logits(tokens, &[24, tokens.len() - 27, 1, 1, 1]) {
        let diff = max_diff(&logits, golden.at(pos).unwrap());
        assert!(diff <= tolerance, "{name} on CUDA: position {pos} differs by {diff}");
        compared += 1;
    }
    assert_eq!(compared, 5, "{name}");
}

/// The kinds of pools on a backend, one golden after the other, so that both policies and both modes of transfer occur.
fn assert_on(backend: Backend, number: usize, name: &str) {
    let odd = number % 2 == 1;
    let remote = if odd { RemotePolicy::Fetch } else { RemotePolicy::Ship };
    assert_pooled(name, [backend; 3], remote, BLOCK, FEW);
    assert_prefilled_apart(name, [backend; 2], odd, FEW);
}

/// Every variant gives transformers' answers in a pool too small for it.
#[test]
fn pools_equal_transformers() {
    for name in models() {
        assert_pooled(name, [Backend::Cpu; 3], RemotePolicy::Ship, BLOCK, 16);
    }
}

#[test]
fn pools_of_wgpu_say_what_transformers_says() {
    if let Err(reason) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("pools_of_wgpu_say_what_transformers_says", &reason);
    }
    for (number, name) in models().enumerate() {
        assert_on(Backend::Wgpu, number, name);
    }
}

#[test]
fn cuda_alone_and_pools_of_it_say_what_transformers_says() {
    for (number, name) in models().enumerate() {
        let test = "cuda_alone_and_pools_of_it_say_what_transformers_says";
        let Some(fake) = driver(test, 200 + number as u64) else { return };
        assert_alone_on_cuda(name);
        assert_on(Backend::Cuda, number, name);
        fake.finish();
    }
}

/// With sequences in address rows, whose memory is mapped on demand.
#[test]
fn address_rows_of_cuda_say_what_transformers_says() {
    for (seed, name) in (120..).zip(WITH_ROWS) {
        let Some(fake) = driver("address_rows_of_cuda_say_what_transformers_says", seed) else { return };
        assert_pooled(name, [Backend::Cuda; 3], RemotePolicy::Ship, PAGE_BLOCK, FEW);
        fake.finish();
    }
}
