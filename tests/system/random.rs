//! Random workloads and faults on a pool of three, against a single instance. A seed replays a run.

use lagoon_instance::RemotePolicy;
use lagoon_tests::cluster::check::{assert_prefix, assert_same};
use lagoon_tests::cluster::compare::{f32_tolerance, prompt, single};
use lagoon_tests::cluster::{PoolSpec, Rng, Spec, World, greedy};
use std::time::{Duration, Instant};

/// Time that the test takes at most, beyond its first runs.
const BUDGET: Duration = Duration::from_secs(12);
const RUNS_MIN: u64 = 6;

fn run(seed: u64) -> (u64, u64) {
    let mut rng = Rng(seed.wrapping_mul(0x1234_5677));
    let model = ["llama3_old", "mistral_window", "yi"][rng.below(3) as usize];
    let pool = PoolSpec::golden(model, 4 + 4 * rng.below(2) as u32);
    let policies = [RemotePolicy::Ship, RemotePolicy::Fetch, RemotePolicy::Auto];
    let specs: Vec<Spec> = (0..3)
        .map(|_| Spec {
            remote: policies[rng.below(3) as usize],
            step_rows: 8 + rng.below(12) as u32,
            running: 1 + rng.below(5) as usize,
            lend_reserve_blocks: rng.below(2) as u32,
            ..Spec::cpu((80 + rng.below(64) as u32).div_ceil(pool.block_tokens))
        })
        .collect();
    let mut world = World::pool(pool.clone(), Some(seed), &specs);
    world.delay_ms = [0, 2, 10][rng.below(3) as usize];
    let faults = rng.below(2) == 0;
    for _ in 0..2 + rng.below(5) {
        let n = match rng.below(3) {
            0 => 90 + rng.below(60),
            _ => 3 + rng.below(60),
        };
        let request = greedy(prompt(rng.next(), n as usize, 128), 1 + rng.below(12) as u32);
        world.submit(rng.below(3) as usize, request);
        (0..rng.below(400)).for_each(|_| world.step());
        if faults && rng.below(3) == 0 {
            world.cut(rng.below(2) as usize, 2, rng.below(800));
        }
        if rng.below(4) == 0 {
            let id = rng.below(world.requests.len() as u64) as usize;
            if !world.requests[id].is_over() {
                world.cancel(id);
            }
        }
    }
    world.run();
    let requests: Vec<_> = world.requests.iter().map(|l| l.request.clone()).collect();
    let expected = single(&pool, &requests);
    let tolerance = f32_tolerance(&expected);
    for (i, (log, single)) in world.requests.iter().zip(&expected).enumerate() {
        let what = format!("seed {seed}, request {i}");
        if log.cancelled {
            assert_prefix(&what, log, single, tolerance, false);
        } else {
            assert_same(&what, log, single, tolerance);
        }
    }
    // A cut may have lost a release: the lease's time to live ends it.
    world.run_for(20_000);
    world.check_empty();
    (world.sent("partial").0, world.sent("data").0)
}

#[test]
fn random_pools_equal_single_instances() {
    let seeds = match std::env::var("LAGOON_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (1..10_000).collect::<Vec<u64>>(),
    };
    let start = Instant::now();
    let (mut runs, mut partials, mut data) = (0, 0, 0);
    for seed in seeds {
        if seed > RUNS_MIN && start.elapsed() > BUDGET {
            break;
        }
        let outcome = std::panic::catch_unwind(|| run(seed));
        let (p, d) = outcome.unwrap_or_else(|_| panic!("seed {seed} failed: LAGOON_SEED={seed} replays it"));
        (runs, partials, data) = (runs + 1, partials + p, data + d);
    }
    println!("{runs} runs, {partials} partials, {data} fetched pieces");
    if std::env::var("LAGOON_SEED").is_err() {
        assert!(partials > 0 && data > 0, "nothing was remote");
    }
}
