//! Mistakes made on purpose are found, each within a bounded number of seeds; the same seeds without it are not
//! (`chaos.rs` runs them). `cargo test -p lagoon-sim --features mutants --test mutants`.
#![allow(clippy::print_stdout, reason = "tests tell what they found")]

use lagoon_cluster::mutants::{Mutant, choose};
use lagoon_sim::chaos::{Failure, Limits, Scenario, run, shrink};
use std::time::Duration;

/// Seeds in which a mistake must be found.
const SEEDS: u64 = 3_000;

/// The first seed that finds a mistake, and how.
fn hunt(mutant: Mutant) -> (u64, Failure) {
    for seed in 0..SEEDS {
        let scenario = Scenario::draw(seed, Limits::default());
        choose(Some(mutant));
        let result = run(&scenario);
        if let Err(failure) = result {
            let shrunk = shrink(&scenario, &failure, Duration::from_secs(5));
            choose(None);
            println!("{mutant:?}: seed {seed}: {failure}");
            println!("{} of {} lines:", shrunk.ops.len(), scenario.ops.len());
            shrunk.ops.iter().for_each(|op| println!("  {op}"));
            assert_eq!(run(&scenario).err(), None, "seed {seed} fails without the mistake, too");
            return (seed, failure);
        }
    }
    choose(None);
    panic!("{mutant:?} was not found in {SEEDS} seeds");
}

#[test]
fn a_double_grant_is_found() {
    hunt(Mutant::DoubleGrant);
}

#[test]
fn a_dropped_ack_of_a_release_is_found() {
    let (_, failure) = hunt(Mutant::ReleaseUnconfirmed);
    assert_eq!(failure.checker, "leak");
}

#[test]
fn a_skipped_epoch_check_is_found() {
    hunt(Mutant::EpochUnchecked);
}
