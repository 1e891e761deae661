//! Random workloads and faults on a pool of three, against a single instance. A seed replays a run.

use lagoon_instance::RemotePolicy;
use lagoon_tests::cluster::check::{assert_prefix, assert_same};
use lagoon_tests::cluster::compare::{self, f32_tolerance, single};
use lagoon_tests::cluster::{Fault, PoolSpec, Rng, Spec, World, greedy};
use lagoon_types::RequestError;
use std::time::{Duration, Instant};

/// Time limit of each test beyond its first runs; `LAGOON_SOAK_S` overrides it.
const BUDGET: Duration = Duration::from_secs(8);
const RUNS_MIN: u64 = 6;

/// A prompt; some have common prefixes.
fn prompt(rng: &mut Rng, n: usize) -> Vec<u32> {
    let shared = if rng.below(2) == 0 { rng.below(n as u64 + 1) as usize } else { 0 };
    let (beginning, rest) = (rng.below(2), rng.draw());
    let mut tokens = [compare::prompt(beginning, shared, 128), compare::prompt(rest, n - shared, 128)].concat();
    // Some end with what was there before, and have drafts at once.
    if n > 8 && rng.below(3) == 0 {
        tokens.copy_within(..4, n - 4);
    }
    tokens
}

fn run(seed: u64) -> Totals {
    let mut rng = Rng::new(seed.wrapping_mul(0x1234_5677));
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
    let delay_ms = [0, 2, 10][rng.below(3) as usize];
    let drafts = [0, 0, 2, 9][rng.below(4) as usize];
    let draft_model = [None, Some((model, 200)), Some(("llama3_old", 60))][rng.below(3) as usize];
    let specs: Vec<Spec> = specs.into_iter().map(|spec| Spec { drafts, draft_model, ..spec }).collect();
    let mut world = World::delayed(pool.clone(), (Some(seed), delay_ms), &specs);
    let faults = rng.below(2) == 0;
    for _ in 0..2 + rng.below(5) {
        let n = match rng.below(3) {
            0 => 90 + rng.below(60),
            _ => 3 + rng.below(60),
        };
        let request = greedy(prompt(&mut rng, n as usize), 1 + rng.below(12) as u32);
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
    // A cut may have lost a release: the lease ends with its time to live.
    world.run_for(20_000);
    world.check_empty();
    Totals { runs: 1, partials: world.sent("partial").0, data: world.sent("data").0, recoveries: 0 }
}

/// Numbers of runs and of frames in them.
#[derive(Debug, Default)]
struct Totals {
    runs: u64,
    partials: u64,
    data: u64,
    recoveries: u64,
}

/// Runs seeds until the time is up, or the environment's seed.
fn seeds(what: &str, run: impl Fn(u64) -> Totals + std::panic::RefUnwindSafe) -> Option<Totals> {
    let named = std::env::var("LAGOON_SEED").ok().map(|seed| seed.parse::<u64>().unwrap());
    let budget = std::env::var("LAGOON_SOAK_S").map_or(BUDGET, |s| Duration::from_secs(s.parse().unwrap()));
    let start = Instant::now();
    let mut totals = Totals::default();
    for seed in named.map_or(1..=100_000, |seed| seed..=seed) {
        if named.is_none() && seed > RUNS_MIN && start.elapsed() > budget {
            break;
        }
        let outcome = std::panic::catch_unwind(|| run(seed));
        let t = outcome.unwrap_or_else(|_| panic!("{what}: seed {seed} failed; LAGOON_SEED={seed} replays it"));
        totals = Totals {
            runs: totals.runs + 1,
            partials: totals.partials + t.partials,
            data: totals.data + t.data,
            recoveries: totals.recoveries + t.recoveries,
        };
    }
    println!("{what}: {totals:?}");
    named.is_none().then_some(totals)
}

#[test]
fn random_pools_equal_single_instances() {
    if let Some(totals) = seeds("random", run) {
        assert!(totals.partials > 0 && totals.data > 0, "nothing was remote");
    }
}

/// Processes die and restart, connections fall silent, the gManager forgets: all tokens are right, and requests that
/// cannot continue end in an error.
#[test]
fn chaos_gives_no_wrong_token() {
    if let Some(totals) = seeds("chaos", chaos) {
        assert!(totals.partials > 0 && totals.recoveries > 0, "nothing was recovered");
    }
}

fn fault(world: &mut World, rng: &mut Rng) {
    let (a, b) = (rng.below(2) as usize, 2);
    let kinds = ["control", "ticket", "query", "partial", "write", "seal", "read", "data"];
    match rng.below(7) {
        0 => world.kill(rng.below(3) as usize),
        1 => world.stall(a, b, rng.below(16_000)),
        2 => world.cut(a, b, rng.below(3_000)),
        3 if world.has_gmanager() => world.kill_gmanager(),
        3 => world.start_gmanager(),
        4 => world.break_device(a, Fault::RemoteRequest),
        5 => world.fill_queue(rng.below(3) as usize, kinds[rng.below(8) as usize]),
        _ => {}
    }
}

fn chaos(seed: u64) -> Totals {
    let mut rng = Rng::new(seed.wrapping_mul(0x9876_5433));
    let model = ["llama3_old", "mistral_window"][rng.below(2) as usize];
    let pool = PoolSpec::golden(model, 4);
    let specs: Vec<Spec> = (0..3)
        .map(|_| Spec {
            step_rows: 8 + rng.below(12) as u32,
            remote: [RemotePolicy::Ship, RemotePolicy::Fetch][rng.below(2) as usize],
            drafts: [0, 4][rng.below(2) as usize],
            ..Spec::cpu(28)
        })
        .collect();
    let mut world = World::pool(pool.clone(), Some(seed), &specs);
    for _ in 0..3 + rng.below(8) {
        let node = rng.below(3) as usize;
        let n = if rng.below(2) == 0 { 60 + rng.below(60) } else { 3 + rng.below(50) };
        let request = greedy(prompt(&mut rng, n as usize), 1 + rng.below(12) as u32);
        if world.is_alive(node) {
            world.submit(node, request);
        }
        // Most faults come while blocks are lent.
        for _ in 0..rng.below(2_000) {
            world.step();
            let lends = |n| world.instance(n).is_some_and(|i| i.status().blocks_lent > 0);
            if world.nodes().any(lends) && rng.below(60) == 0 {
                break;
            }
        }
        fault(&mut world, &mut rng);
        (0..rng.below(500)).for_each(|_| world.step());
        if rng.below(3) == 0 {
            world.run_for(rng.below(4_000));
        }
        if let Some(dead) = (0..3).find(|n| !world.is_alive(*n)).filter(|_| rng.below(2) == 0) {
            world.restart(dead);
        }
    }
    let dead: Vec<usize> = (0..3).filter(|n| !world.is_alive(*n)).collect();
    dead.into_iter().for_each(|node| world.restart(node));
    if !world.has_gmanager() {
        world.start_gmanager();
    }
    world.run();
    let requests: Vec<_> = world.requests.iter().map(|l| l.request.clone()).collect();
    let expected = single(&pool, &requests);
    let tolerance = f32_tolerance(&expected);
    for (i, (log, single)) in world.requests.iter().zip(&expected).enumerate() {
        let what = format!("seed {seed}, request {i}");
        // Accepted while fewer instances were alive: it ended at that pool's capacity.
        let filled = (log.request.prompt.len() + log.tokens.len()).is_multiple_of(28 * 4);
        match &log.end {
            Some(Ok(_)) if filled => assert_prefix(&what, log, single, tolerance, false),
            Some(Ok(_)) => assert_same(&what, log, single, tolerance),
            Some(Err(RequestError::Unavailable(_))) | None => assert_prefix(&what, log, single, tolerance, false),
            // Refused while too few instances were alive.
            Some(Err(RequestError::TooLong { .. })) if log.tokens.is_empty() => 0.0,
            Some(Err(error)) => panic!("{what}: {error}"),
        };
    }
    world.run_for(40_000);
    world.check_empty();
    let recoveries = world.nodes().map(|n| world.live(n).status().recoveries).sum();
    Totals { runs: 1, partials: world.sent("partial").0, data: world.sent("data").0, recoveries }
}
