//! Embeddings: a prompt's pooled hidden states are transformers', wherever its KV is and however often it was computed.
//!
//! The reference: the model's head of a hidden state is the logits, and goldens have transformers'. A head has more rows than
//! columns, so logits within a tolerance are hidden states within one; that of a mean is the mean of the logits.

use crate::cuda::driver;
use lagoon_backend::{CpuDevice, Device, Mode};
use lagoon_cuda::kernels::attention::Precision;
use lagoon_model::{Checkpoint, ModelSpec, Weights};
use lagoon_tests::cluster::check::error_of;
use lagoon_tests::cluster::compare::prompt;
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};
use lagoon_tests::golden::{Golden, max_diff, models};
use lagoon_types::{DType, GenerateRequest, Pooling, RequestError};

const POOLINGS: [Pooling; 3] = [Pooling::First, Pooling::Last, Pooling::Mean];
/// Goldens of pools: heads of 64, a window, latent attention with experts, soft caps, ALiBi.
const POOLED: [&str; 5] = ["llama3_old", "mistral_window", "kimi_k2", "gemma2", "mpt"];
const BLOCK: u32 = 4;

fn embed(prompt: Vec<u32>, pooling: Pooling) -> GenerateRequest {
    let mut request = greedy(prompt, 0);
    request.return_logits = false;
    request.options.embedding = Some(pooling);
    request
}

fn spec(backend: Backend, blocks: u32) -> Spec {
    let rows = backend != Backend::Cuda;
    Spec { backend, precision: Precision::Exact, step_rows: 10, rows, ..Spec::cpu(blocks) }
}

/// Logits of hidden states, by the model's head.
struct Head {
    golden: Golden,
    device: CpuDevice,
    weights: Weights<CpuDevice>,
    spec: ModelSpec,
}

impl Head {
    fn of(name: &str) -> Self {
        let golden = Golden::load(name);
        let (spec, checkpoint) = (ModelSpec::open(&golden.dir).unwrap(), Checkpoint::open(&golden.dir).unwrap());
        assert!(spec.vocab > spec.hidden, "{name}: hidden states do not follow from logits");
        let mut device = CpuDevice::with_threads(1);
        let weights = Weights::load(&mut device, &checkpoint, &spec, Some(DType::F32), &mut |_, _| {}).unwrap();
        Self { golden, device, weights, spec }
    }

    fn logits(&mut self, hidden: &[f32]) -> Vec<f32> {
        let (columns, vocab) = (self.spec.hidden, self.spec.vocab);
        let (mut x, mut out) = (self.device.tensor(1, columns).unwrap(), self.device.tensor(1, vocab).unwrap());
        self.device.write(&mut x, 0, hidden).unwrap();
        self.device.matmul(&x, self.weights.output(), 1, Mode::Set, &mut out).unwrap();
        if let Some(cap) = self.spec.logits_softcap {
            self.device.softcap(&mut out, cap, 1).unwrap();
        }
        let mut logits = Vec::new();
        self.device.read(&out, 0..1, 0..vocab, &mut logits).unwrap();
        logits
    }

    /// Transformers' logits for a pooling; `None` where the golden has not all positions, or a cap is no sum's.
    fn expected(&self, pooling: Pooling) -> Option<Vec<f32>> {
        let len = u32::try_from(self.golden.description.tokens.len()).unwrap();
        let positions = pooling.positions(len);
        if self.spec.logits_softcap.is_some() && positions.len() > 1 {
            return None;
        }
        let rows: Option<Vec<&[f32]>> = positions.map(|pos| self.golden.at(pos as usize)).collect();
        let rows = rows?;
        let mean = |at: usize| rows.iter().map(|row| f64::from(row[at])).sum::<f64>() / rows.len() as f64;
        Some((0..self.golden.vocab).map(|at| mean(at) as f32).collect())
    }

    /// Asserts that a request with the golden's prompt got transformers' hidden state. Returns whether that was known.
    fn assert_embeds(&mut self, what: &str, world: &World, id: usize) -> bool {
        let log = &world.requests[id];
        assert_eq!(log.request.prompt, self.golden.description.tokens);
        let pooling = log.request.options.embedding.unwrap();
        assert!(log.tokens.is_empty() && matches!(log.end, Some(Ok(_))), "{what}: {:?}", log.end);
        let found = self.logits(log.embedding.as_ref().unwrap());
        let Some(expected) = self.expected(pooling) else { return false };
        let (diff, tolerance) = (max_diff(&found, &expected), self.golden.description.tolerance_f32);
        assert!(diff <= tolerance, "{what}, {pooling:?}: {diff} of {tolerance}");
        true
    }
}

/// A golden alone on a backend, in steps of few rows, with each pooling. Returns how many were compared.
fn assert_alone(name: &str, backend: Backend) -> usize {
    let mut head = Head::of(name);
    let tokens = head.golden.description.tokens.clone();
    let blocks = 4 * (tokens.len() as u32).div_ceil(BLOCK) + 4;
    let mut world = World::single(PoolSpec::golden(name, BLOCK), spec(backend, blocks));
    let ids = POOLINGS.map(|pooling| world.submit(0, embed(tokens.clone(), pooling)));
    world.run();
    let what = format!("{name} on {backend:?}");
    let compared = ids.into_iter().filter(|id| head.assert_embeds(&what, &world, *id)).count();
    world.check_empty();
    compared
}

/// A golden in a pool whose first instance holds little of its KV.
fn assert_pooled(name: &str, backend: Backend) {
    let mut head = Head::of(name);
    let tokens = head.golden.description.tokens.clone();
    for pooling in POOLINGS {
        let mut world = World::pool(PoolSpec::golden(name, BLOCK), None, &[spec(backend, 4), spec(backend, 40)]);
        let id = world.submit(0, embed(tokens.clone(), pooling));
        world.run();
        assert!(world.sent("partial").0 > 0, "{name}: nothing was remote");
        head.assert_embeds(&format!("{name}, pooled on {backend:?}"), &world, id);
        world.check_empty();
    }
}

#[test]
fn embeddings_equal_transformers() {
    let compared: usize = models().map(|name| assert_alone(name, Backend::Cpu)).sum();
    assert!(compared > 2 * models().count(), "{compared}");
    POOLED.iter().for_each(|name| assert_pooled(name, Backend::Cpu));
}

#[test]
fn embeddings_of_wgpu_equal_transformers() {
    if let Err(reason) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("embeddings_of_wgpu_equal_transformers", &reason);
    }
    for name in POOLED {
        assert!(assert_alone(name, Backend::Wgpu) > 1);
        assert_pooled(name, Backend::Wgpu);
    }
}

#[test]
fn embeddings_of_cuda_equal_transformers() {
    for (seed, name) in (700..).zip(POOLED) {
        let Some(fake) = driver("embeddings_of_cuda_equal_transformers", seed) else { return };
        assert!(assert_alone(name, Backend::Cuda) > 1);
        assert_pooled(name, Backend::Cuda);
        fake.finish();
    }
}

/// Beside requests that generate, preempted between two chunks: every position is counted once.
#[test]
fn a_preempted_prompt_is_embedded_once() {
    let name = "llama3_old";
    let mut head = Head::of(name);
    let tokens = head.golden.description.tokens.clone();
    for pooling in POOLINGS {
        let blocks = (tokens.len() as u32 + 36).div_ceil(BLOCK) - 1;
        let mut world =
            World::single(PoolSpec::golden(name, BLOCK), Spec { step_rows: 6, ..spec(Backend::Cpu, blocks) });
        let older = world.submit(0, greedy(prompt(2, 24, 128), 30));
        let id = world.submit(0, embed(tokens.clone(), pooling));
        world.run_until(|world| world.live(0).status().preemptions > 0 || world.requests[id].is_over());
        assert!(!world.requests[id].is_over(), "{pooling:?}: it was not preempted");
        world.run();
        head.assert_embeds("preempted", &world, id);
        assert_eq!(world.requests[older].tokens.len(), 30);
        world.check_empty();
    }
}

/// The last hidden state needs no position whose KV is cached; the others need those that they are pooled from.
#[test]
fn cached_tokens_are_used_where_their_hidden_states_are_not_needed() {
    let name = "llama3_old";
    let mut head = Head::of(name);
    let tokens = head.golden.description.tokens.clone();
    let blocks = 4 * (tokens.len() as u32).div_ceil(BLOCK) + 4;
    let mut world = World::single(PoolSpec::golden(name, BLOCK), Spec { rows: false, ..spec(Backend::Cpu, blocks) });
    let whole = (tokens.len() as u32 - 1) / BLOCK * BLOCK;
    for (pooling, cached) in
        [(Pooling::Mean, 0), (Pooling::Last, whole), (Pooling::First, 0), (Pooling::Mean, 0), (Pooling::Last, whole)]
    {
        let id = world.submit(0, embed(tokens.clone(), pooling));
        world.run();
        head.assert_embeds("cached", &world, id);
        assert_eq!(world.requests[id].prompt.0, cached, "{pooling:?}");
    }
    world.check_empty();
}

/// A decode worker computes embeddings itself: a prefill worker has no message for them.
#[test]
fn a_decode_worker_embeds_itself() {
    let name = "llama3_old";
    let mut head = Head::of(name);
    let tokens = head.golden.description.tokens.clone();
    let mut world = World::pool(PoolSpec::golden(name, BLOCK), None, &[Spec::prefill(40), Spec::decode(40)]);
    world.run_until(|w| w.live(1).status().prefill.workers == 1);
    let id = world.submit(1, embed(tokens, Pooling::Mean));
    world.run();
    head.assert_embeds("on a decode worker", &world, id);
    assert_eq!(world.live(1).status().prefill.pulled, 0);
    world.check_empty();
}

/// A prompt may fill the context; a request for an embedding generates nothing.
#[test]
fn requests_are_checked() {
    let pool = PoolSpec::golden("llama3_old", BLOCK);
    let positions = ModelSpec::open(&pool.dir).unwrap().max_positions as usize;
    let mut world = World::single(pool, Spec::cpu(positions as u32 / BLOCK + 2));
    let whole = world.submit(0, embed(prompt(1, positions, 128), Pooling::Last));
    let beyond = world.submit(0, embed(prompt(1, positions + 1, 128), Pooling::Last));
    let generates = world.submit(0, GenerateRequest { max_tokens: 1, ..embed(vec![1], Pooling::Last) });
    let nothing = world.submit(0, greedy(vec![1], 0));
    world.run();
    assert!(world.requests[whole].embedding.is_some());
    assert!(matches!(error_of(&world.requests[beyond]), RequestError::TooLong { .. }));
    for id in [generates, nothing] {
        assert!(matches!(error_of(&world.requests[id]), RequestError::Invalid(_)), "{id}");
    }
    world.check_empty();
}
