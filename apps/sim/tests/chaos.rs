//! Thousands of seeds with every checker on: what CI runs. `LAGOON_SEEDS` (a range, as `0..100000`) gives others,
//! `LAGOON_TRACE` the number of lines to tell of a failure.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use lagoon_sim::chaos::{Limits, Scenario, replay, run, shrink, sweep};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Failures whose shortest history is looked for, and for how long each.
const SHRUNK: usize = 2;
const SHRINK: Duration = Duration::from_secs(20);

#[test]
fn no_seed_fails() {
    let seeds = std::env::var("LAGOON_SEEDS").unwrap_or_else(|_| "0..2500".to_owned());
    let (first, end) = seeds.split_once("..").unwrap();
    let seeds = first.parse::<u64>().unwrap()..end.parse::<u64>().unwrap();
    let trace = std::env::var("LAGOON_TRACE").map_or(0, |n| n.parse().unwrap());
    let begun = Instant::now();
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let sweep = sweep(seeds, Limits::default(), jobs, 20, &|_| ());
    let per_s = sweep.total.events as f64 / begun.elapsed().as_secs_f64();
    println!("{} runs, {per_s:.0} events/s: {:?}", sweep.runs, sweep.total);
    let mut said = String::new();
    for (at, (seed, failure)) in sweep.failures.iter().enumerate() {
        writeln!(said, "seed {seed}: {failure}").unwrap();
        if at < SHRUNK {
            let shrunk = shrink(&Scenario::draw(*seed, Limits::default()), failure, SHRINK);
            writeln!(said, "the shortest history found ({} tried): {}", shrunk.tried, shrunk.failure).unwrap();
            shrunk.ops.iter().for_each(|op| writeln!(said, "  {op}").unwrap());
            let scenario = Scenario::draw(*seed, Limits::default());
            let (_, trace) = replay(&scenario, &shrunk.ops, trace);
            trace.iter().for_each(|line| writeln!(said, "{line}").unwrap());
        }
    }
    assert!(sweep.failures.is_empty(), "replay with `lagoon sim --seed N`\n{said}");
    assert!(sweep.total.recoveries > 0 && sweep.total.preemptions > 0, "nothing went wrong: {:?}", sweep.total);
    assert!(sweep.total.prefix_hits > 0 && sweep.total.prefix_evicted > 0, "no prefix was shared: {:?}", sweep.total);
}

/// Seeds that found something once and are not among those that CI runs.
#[test]
fn seeds_that_failed_once() {
    // A sequence was parked while the gManager had ordered another move of it.
    assert_eq!(run(&Scenario::draw(4778, Limits::default())).err(), None);
}
