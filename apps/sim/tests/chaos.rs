//! Seeds with every checker on: a sample, which CI runs. `LAGOON_SEEDS` (a range, as `0..100000`) selects others,
//! `LAGOON_TRACE` the number of trace lines of a failure.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use lagoon_sim::chaos::{Aim, Limits, Scenario, Summary, replay, run, shrink, sweep};
use std::fmt::Write as _;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Number of failures to shrink, and time for each.
const SHRUNK: usize = 2;
const SHRINK: Duration = Duration::from_secs(20);

/// Runs seeds; a failure is printed with its ops.
fn run_all(seeds: Range<u64>, limits: Limits, how: &str) -> Summary {
    let trace = std::env::var("LAGOON_TRACE").map_or(0, |n| n.parse().unwrap());
    let begun = Instant::now();
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let sweep = sweep(seeds, limits, jobs, 20, &|_| ());
    let per_s = sweep.total.events as f64 / begun.elapsed().as_secs_f64();
    println!("{} runs, {per_s:.0} events/s: {:?}", sweep.runs, sweep.total);
    let mut output = String::new();
    for (at, (seed, failure)) in sweep.failures.iter().enumerate() {
        writeln!(output, "seed {seed}: {failure}").unwrap();
        if at < SHRUNK {
            let shrunk = shrink(&Scenario::draw(*seed, limits), failure, SHRINK);
            writeln!(output, "the shortest history found ({} tried): {}", shrunk.tried, shrunk.failure).unwrap();
            shrunk.ops.iter().for_each(|op| writeln!(output, "  {op}").unwrap());
            let (_, trace) = replay(&Scenario::draw(*seed, limits), &shrunk.ops, trace);
            trace.iter().for_each(|line| writeln!(output, "{line}").unwrap());
        }
    }
    assert!(sweep.failures.is_empty(), "replay with `lagoon-sim --seed N{how}`\n{output}");
    sweep.total
}

/// `LAGOON_SEEDS`, or `usual`.
fn seeds(usual: Range<u64>) -> Range<u64> {
    let Ok(seeds) = std::env::var("LAGOON_SEEDS") else { return usual };
    let (first, end) = seeds.split_once("..").unwrap();
    first.parse().unwrap()..end.parse().unwrap()
}

#[test]
fn no_seed_fails() {
    let total = run_all(seeds(0..700), Limits::default(), "");
    assert!(total.recoveries > 0 && total.preemptions > 0, "nothing went wrong: {total:?}");
    assert!(
        total.prefix_hits > 0 && total.prefix_leased > 0 && total.prefix_shared > 0 && total.prefix_evicted > 0,
        "no prefix was shared: {total:?}"
    );
}

/// Prefix caches with tiers in host memory and on disk, small and large, and damage there.
#[test]
fn no_seed_fails_with_cache_tiers() {
    for (roles, count) in [(Some(false), 360), (Some(true), 180)] {
        let limits = Limits { cache_tiers: true, roles, ..Limits::default() };
        let total = run_all(seeds(0..count), limits, &format!(" --cache-tiers --roles {}", roles.unwrap_or_default()));
        assert!(total.host_hits > 0 && total.disk_hits > 0, "no tier was hit: {total:?}");
    }
}

/// Prompts that several instances compute, with every fault in every state.
#[test]
fn no_seed_fails_with_joint_prefill() {
    let limits = Limits { joint: true, roles: Some(false), ..Limits::default() };
    let total = run_all(seeds(0..300), limits, " --joint --roles false");
    assert!(total.joint_begun > total.joint_completed && total.joint_completed > 0, "nothing went wrong: {total:?}");
    assert!(total.joint_tokens > 0, "nothing was computed for others: {total:?}");
}

/// Creditors on another host, asked through one of them, with every fault of relays and members.
#[test]
fn no_seed_fails_with_relays() {
    let limits = Limits { hosts: true, roles: Some(false), ..Limits::default() };
    let total = run_all(seeds(0..300), limits, " --hosts --roles false");
    assert!(total.relayed > 0 && total.relays_failed > 0, "nothing was relayed, or went wrong: {total:?}");
}

/// Pools with prefill and decode workers, pulling and pushing.
#[test]
fn no_seed_fails_with_roles() {
    let limits = Limits { roles: Some(true), ..Limits::default() };
    let total = run_all(seeds(0..200), limits, " --roles true");
    assert!(total.prefills > total.prefills_pushed && total.prefills_pushed > 0, "one mode is not used: {total:?}");
    assert!(total.prefills_again > 0 && total.prefills_own > 0, "nothing went wrong: {total:?}");
    assert!(total.switches > 0 && total.left > 0, "nobody changed its role, or left KV with a worker: {total:?}");
    assert!(total.found > 0, "all was read, though it was there already: {total:?}");
}

/// Coincidences that random faults rarely meet.
#[test]
fn no_seed_fails_that_is_aimed() {
    for aim in Aim::ALL {
        let limits = Limits { aim: Some(aim), ..Limits::default() };
        run_all(seeds(0..50), limits, &format!(" --aim {}", aim.name()));
    }
}

/// Regression seeds outside of CI's range.
#[test]
fn seeds_that_failed_once() {
    // A sequence was swapped out while the gManager had ordered another move of it.
    assert_eq!(run(&Scenario::draw(4778, Limits { roles: Some(false), ..Limits::default() })).err(), None);
    // The only worker refused prompts that wait for memory between two attempts: none was ever prefilled locally.
    assert_eq!(run(&Scenario::draw(773, Limits { roles: Some(true), ..Limits::default() })).err(), None);
    assert_eq!(run(&Scenario::draw(5669, Limits { roles: Some(true), ..Limits::default() })).err(), None);
    // An instance declared dead did not greet peers again that had not identified themselves yet: they refused it.
    assert_eq!(run(&Scenario::draw(18_208, Limits { roles: Some(true), ..Limits::default() })).err(), None);
    // A prompt's transfer completed while the connection to the worker with its oldest blocks was down: its first
    // step asked no creditor.
    assert_eq!(run(&Scenario::draw(2596, Limits { roles: Some(true), ..Limits::default() })).err(), None);
    // Peers' writes were still pending at the destination of a prompt's transfer.
    assert_eq!(run(&Scenario::draw(27_584, Limits { roles: Some(true), ..Limits::default() })).err(), None);
    // An instance refused a request that it had accepted, because its queue was full when no worker took the request
    // again.
    assert_eq!(run(&Scenario::draw(4469, Limits { roles: Some(true), ..Limits::default() })).err(), None);
}
