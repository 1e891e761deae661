//! Rows with and without remote KV in one batch or two: the answers equal a single instance's.

use lagoon_protocol::{BatchPoint, Calibration};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};

fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", 4)
}

/// An instance that reads its weights in `weights_ms`, whatever the batch, beside a creditor whose micro attention
/// takes `remote_request_ms` a layer. One request, which only the pool holds, decodes; one that fits the instance has
/// just come.
fn world(weights_ms: f64, remote_request_ms: u64) -> (World, usize, usize) {
    let point = |batch| BatchPoint { batch, step_us: weights_ms * 1e3 };
    let calibration = Calibration {
        batches: vec![point(1), point(64)],
        attention_us_per_ktoken: 100.0,
        prefill_us_per_token: 0.0,
        copy_bytes_per_s: 0.0,
        prompt_attention_us_per_ktoken: 0.0,
    };
    let debtor = Spec { calibration: Some(calibration), step_ms: 20, ..Spec::cpu(24) };
    let mut world = World::pool(pool(), None, &[debtor, Spec { remote_request_ms, ..Spec::cpu(30) }]);
    // Memory of the first request's blocks is free again when the last one comes, whose KV is therefore all local.
    let first = world.submit(0, greedy(prompt(499, 50, 128), 4));
    let remote = world.submit(0, greedy(prompt(501, 100, 128), 16));
    world.run_until(|w| !w.requests[remote].tokens.is_empty() && w.requests[first].is_over());
    let local = world.submit(0, greedy(prompt(500, 12, 128), 12));
    (world, local, remote)
}

fn is_one_batch(world: &World) -> bool {
    world.live(0).is_one_batch()
}

#[test]
fn a_step_with_rows_of_both_kinds_is_exact() {
    let (mut world, local, remote) = world(40.0, 1);
    world.run_until(|w| is_one_batch(w) || w.requests[remote].is_over());
    assert!(is_one_batch(&world), "what local work covers is one batch");
    let reported = [local, remote].map(|r| world.requests[r].tokens.len());
    world.run_until(|w| w.requests[remote].is_over());
    assert!(world.requests[local].tokens.len() > reported[0] && world.requests[remote].tokens.len() == 16);
    world.run();
    assert!(!is_one_batch(&world), "nothing is elsewhere any more");
    assert_equals_single("one batch", &world, &pool());
    world.check_empty();
}

#[test]
fn a_creditor_that_is_slow_does_not_hold_up_rows_that_do_not_need_it() {
    let (mut world, local, remote) = world(400.0, 1_000);
    let mut merged = false;
    while !world.requests[local].is_over() {
        world.step();
        merged |= is_one_batch(&world);
    }
    assert!(merged, "it was not known before that the creditor is slow");
    assert!(!world.requests[remote].is_over() && world.requests[remote].tokens.len() <= 8);
    world.run();
    assert_eq!(world.live(0).status().recoveries, 0, "nothing was lost by breaking up");
    assert_equals_single("broken up", &world, &pool());
    world.check_empty();
}
