//! Reference answers: the same requests on one large instance.

use super::{Log, PoolSpec, Spec, World, check};
use lagoon_types::GenerateRequest;

/// Runs each request alone on one instance with room for all of it.
#[must_use]
pub fn single(pool: &PoolSpec, requests: &[GenerateRequest]) -> Vec<Log> {
    let tokens = requests.iter().map(|r| r.prompt.len() + r.max_tokens as usize).max().unwrap_or(0);
    let blocks = (tokens as u32).div_ceil(pool.block_tokens) + 1;
    let mut world =
        World::single(pool.clone(), Spec { step_rows: 64, rows: false, prefix_cache: false, ..Spec::cpu(blocks) });
    for request in requests {
        world.submit(0, request.clone());
        world.run();
    }
    world.check_empty();
    world.requests
}

/// Largest difference of logits that f32 arithmetic in another order may cause: 1e-3 at a standard deviation of 3.
#[must_use]
pub fn f32_tolerance(single: &[Log]) -> f32 {
    let logits: Vec<_> = single.iter().flat_map(|l| l.logits.clone()).collect();
    1e-3 * check::std_of(&logits) / 3.0
}

/// Checks every request of `world`, in order, against a single instance. Returns the largest difference.
pub fn assert_equals_single(what: &str, world: &World, pool: &PoolSpec) -> f32 {
    let requests: Vec<_> = world.requests.iter().map(|l| l.request.clone()).collect();
    let single = single(pool, &requests);
    let tolerance = f32_tolerance(&single);
    let pairs = world.requests.iter().zip(&single);
    pairs.map(|(log, single)| check::assert_same(what, log, single, tolerance)).fold(0.0, f32::max)
}

/// `n` random tokens of a vocabulary of `vocab`.
#[must_use]
pub fn prompt(seed: u64, n: usize, vocab: u32) -> Vec<u32> {
    let mut rng = super::Rng::new(seed);
    (0..n).map(|_| rng.below(u64::from(vocab)) as u32).collect()
}
