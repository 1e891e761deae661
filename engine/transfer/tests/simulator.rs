//! Readers and writers of random layouts over thousands of seeded runs: no leak, no double free, equal bytes, COMPLETE
//! after its TRANSFERs. `LAGOON_TRANSFER_SEEDS` sets the number of runs; a failing seed replays.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

mod sim;

use std::collections::BTreeMap;

fn runs(seeds: std::ops::Range<u64>, faults: bool) -> BTreeMap<&'static str, u64> {
    let mut total = BTreeMap::new();
    for seed in seeds {
        let result = std::panic::catch_unwind(|| sim::World::new(seed, faults).run());
        let seen = result.unwrap_or_else(|panic| {
            eprintln!("seed {seed} with faults {faults}");
            std::panic::resume_unwind(panic)
        });
        for (what, n) in seen {
            *total.entry(what).or_default() += n;
        }
    }
    total
}

fn seeds() -> u64 {
    std::env::var("LAGOON_TRANSFER_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(600)
}

#[test]
fn without_faults_everything_arrives() {
    let seen = runs(0..seeds(), false);
    for what in ["done", "completed", "cancelled", "declined", "revoked", "refused"] {
        assert!(seen.get(what).is_some_and(|n| *n > 0), "no run saw {what:?}: {seen:?}");
    }
}

/// Exports of some of the layers, as a prompt's are while it is computed.
#[test]
fn parts_arrive_as_wholes_do() {
    // Where a layout is refused or a peer stays away nothing arrives, and nothing leaks either: `run` checks.
    let arrives = |seed: &u64| {
        let mut world = sim::World::new(*seed, true);
        world.parts = true;
        world.run().contains_key("done")
    };
    let worlds = seeds() / 4;
    let arrived = (200_000..200_000 + worlds).filter(arrives).count() as u64;
    assert!(arrived > worlds / 2, "parts arrived in {arrived} of {worlds} worlds");
}

#[test]
fn nothing_leaks_whatever_breaks() {
    let seen = runs(100_000..100_000 + seeds(), true);
    for what in [
        "done",
        "completed",
        "expired",
        "deadline",
        "writer lost",
        "export lost",
        "damaged",
        "reader crashed",
        "path closed",
        "path broke",
        "read refused",
        "control lost",
    ] {
        assert!(seen.get(what).is_some_and(|n| *n > 0), "no run saw {what:?}: {seen:?}");
    }
}
