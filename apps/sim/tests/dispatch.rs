//! The gateway's dispatcher before random pools: see [`lagoon_sim::dispatching`].

use lagoon_sim::dispatching::{Outcome, run, run_flooded};

const SEEDS: u64 = 60;

#[test]
fn every_request_is_bound_once_and_answered_or_refused() {
    let mut all = Outcome::default();
    for seed in 0..SEEDS {
        let outcome = run(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        assert_eq!(outcome.answered + outcome.refused, outcome.requests, "seed {seed}");
        assert!(seed % 10 > 0 || run(seed) == Ok(outcome), "seed {seed} replays");
        all.answered += outcome.answered;
        all.handed_back += outcome.handed_back;
        all.passes += outcome.passes;
        all.sent_on += outcome.sent_on;
        all.replayed += outcome.replayed;
        all.aborted += outcome.aborted;
    }
    // What is checked happens.
    assert!(all.answered > 50 * SEEDS && all.handed_back > SEEDS && all.passes > SEEDS / 2, "{all:?}");
    assert!(all.replayed > SEEDS && all.aborted > 0 && all.sent_on > SEEDS, "{all:?}");
}

#[test]
fn a_tenant_that_sends_few_requests_is_served_while_another_fills_the_queue() {
    let mut all = Outcome::default();
    for seed in 0..SEEDS {
        let outcome = run_flooded(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        assert_eq!(outcome.refused, 0, "seed {seed}");
        all.requests += outcome.requests;
        all.answered += outcome.answered;
    }
    assert!(all.requests > 310 * SEEDS && all.answered > 100 * SEEDS, "{all:?}");
}
