//! The threshold on remote requests: an instance with a latency target keeps it, and its remote requests move
//! elsewhere.

use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};

fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", 4)
}

fn run_to_token(world: &mut World, request: usize, tokens: usize) {
    world.run_until(|w| w.requests[request].tokens.len() >= tokens || w.requests[request].is_over());
    assert!(!world.requests[request].is_over(), "{:?}", world.requests[request].end);
}

#[test]
fn a_busy_instance_lends_nothing_until_it_has_time() {
    let busy = Spec { target_step_ms: Some(20), step_ms: 30, ..Spec::cpu(40) };
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), busy]);
    world.submit(1, greedy(prompt(300, 10, 128), 100));
    run_to_token(&mut world, 0, 20);
    let start = world.now_ms();
    let remote_request = world.submit(0, greedy(prompt(301, 60, 128), 6));
    world.run_until(|w| w.requests[0].is_over());
    let status = world.live(1).status();
    assert!(world.now_ms() > start + 2_000 && status.blocks_lent == 0, "it lent over its target");
    assert!(world.requests[remote_request].tokens.is_empty() && world.sent("ticket").0 == 0);
    // It decodes no more, and lends again.
    world.run();
    assert!(world.sent("ticket").0 > 0);
    assert_eq!(world.live(1).status().steps_shed, 0);
    assert_equals_single("busy", &world, &pool());
    world.check_empty();
}

/// Remote requests that break the target are sent away once; they continue elsewhere, with recomputed KV, and stay
/// there.
#[test]
fn a_remote_request_that_breaks_the_target_is_sent_away_once() {
    // A remote request's layer of 52 keys takes 25 ms, measured and estimated: 256 operations a key.
    let attention_flops = 256.0 * 52.0 / 0.025;
    let creditor =
        Spec { target_step_ms: Some(20), step_ms: 10, remote_request_ms: 25, attention_flops, ..Spec::cpu(60) };
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), creditor]);
    let remote_request = world.submit(0, greedy(prompt(302, 80, 128), 60));
    run_to_token(&mut world, remote_request, 1);
    assert!(world.live(1).status().blocks_lent >= 13);
    world.add(Spec::cpu(60));
    let own = world.submit(1, greedy(prompt(303, 10, 128), 140));
    world.run_until(|w| w.live(1).status().steps_shed > 0);
    assert!(!world.requests[remote_request].is_over());
    let (shed_ms, output) = (world.now_ms(), world.requests[own].tokens.len());
    assert!(output >= 20, "sent away after {output} steps");
    // A remote request that was sent away does not come back while this instance is busy.
    world.run_until(|w| w.requests[own].is_over() || w.requests[own].tokens.len() >= output + 60);
    let per_token = (world.now_ms() - shed_ms) / 60;
    assert!(per_token <= 14, "{per_token} ms a token, and 10 are its own");
    assert_eq!(world.live(1).status().blocks_lent, 0);
    world.run();
    let (debtor, creditor) = (world.live(0).status(), world.live(1).status());
    assert_eq!((debtor.recoveries, debtor.preemptions, creditor.steps_shed), (1, 0, 1));
    let lost = debtor.recomputed_tokens;
    assert!((48..80).contains(&lost), "{lost} tokens were lost");
    assert_equals_single("sent away", &world, &pool());
    world.check_empty();
}
