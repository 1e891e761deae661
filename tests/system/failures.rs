//! Failures in a pool: every request ends, gives no wrong and no repeated token, and no block leaks.

use lagoon_instance::{Effect, Event, PeerKey};
use lagoon_protocol::{ControlBody, Hello, PoolShape, VERSION_MAX, VERSION_MIN};
use lagoon_tests::cluster::check::{assert_prefix, assert_same, error_of};
use lagoon_tests::cluster::compare::{assert_equals_single, f32_tolerance, prompt, single};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};
use lagoon_types::RequestError;

fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", 4)
}

fn run_to_token(world: &mut World, request: usize, tokens: usize) {
    world.run_until(|w| w.requests[request].tokens.len() >= tokens || w.requests[request].is_over());
    assert!(!world.requests[request].is_over(), "{:?}", world.requests[request].end);
}

/// As [`World::check_empty`], after releases to a dead creditor, which are repeated for a lease's time to live.
fn rest_without_dead(world: &mut World) {
    world.run_for(16_000);
    world.check_empty();
}

/// The node that lends most.
fn creditor(world: &World) -> usize {
    let lent = |n: &usize| world.live(*n).status().blocks_lent;
    let node = world.nodes().max_by_key(lent).unwrap();
    assert!(lent(&node) > 0);
    node
}

#[test]
fn cancelling_at_any_time_frees_everything() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(12), Spec::cpu(12)]);
    let mut steps = 0;
    loop {
        let request = world.submit(0, greedy(prompt(60, 80, 128), 6));
        (0..steps).for_each(|_| world.step());
        let ended = world.requests[request].is_over();
        if !ended {
            world.cancel(request);
        }
        world.check_empty();
        if ended {
            break;
        }
        steps += 1 + steps / 24;
    }
    assert!(steps > 60, "the request was over after {steps} steps");
    // A waiting request as well.
    let first = world.submit(0, greedy(prompt(61, 100, 128), 20));
    let second = world.submit(0, greedy(prompt(62, 90, 128), 20));
    run_to_token(&mut world, first, 1);
    assert_eq!(world.live(0).status().waiting, 1);
    world.cancel(second);
    world.cancel(first);
    world.check_empty();
}

#[test]
fn a_killed_creditor_costs_time_and_nothing_else() {
    for when in 0..12 {
        let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(16), Spec::cpu(16), Spec::cpu(16)]);
        let request = world.submit(0, greedy(prompt(63, 80, 128), 12));
        let other = world.submit(3, greedy(prompt(64, 20, 128), 12));
        // From the first borrowed blocks, through prefill, into decoding.
        world.run_until(|w| w.nodes().skip(1).any(|n| w.live(n).status().blocks_lent > 0));
        (0..when * 8).for_each(|_| world.step());
        assert!(!world.requests[request].is_over(), "killed too late");
        let victim = (1..3).max_by_key(|n| world.live(*n).status().blocks_lent).unwrap();
        world.kill(victim);
        world.run();
        let log = &world.requests[other];
        assert!(log.end.as_ref().is_some_and(Result::is_ok), "another request was harmed: {:?}", log.end);
        assert_equals_single(&format!("killed at {when}"), &world, &pool());
        rest_without_dead(&mut world);
    }
}

#[test]
fn a_creditor_that_comes_back_lends_again() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(20)]);
    let request = world.submit(0, greedy(prompt(65, 80, 128), 12));
    run_to_token(&mut world, request, 4);
    world.kill(1);
    world.run_for(500);
    assert!(!world.requests[request].is_over());
    world.restart(1);
    world.run();
    assert_eq!(world.live(0).status().recoveries, 1);
    assert_equals_single("restarted", &world, &pool());
    rest_without_dead(&mut world);
}

#[test]
fn a_request_that_no_pool_can_hold_any_more_ends_in_an_error() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(20)]);
    let request = world.submit(0, greedy(prompt(66, 80, 128), 12));
    run_to_token(&mut world, request, 4);
    world.kill(1);
    let small = world.submit(0, greedy(prompt(67, 20, 128), 4));
    world.run();
    let log = &world.requests[request];
    assert!(matches!(error_of(log), RequestError::Unavailable(_)), "{:?}", log.end);
    assert!(error_of(log).to_string().contains("the pool now has room for 32"), "{:?}", log.end);
    let single = single(&pool(), &[log.request.clone(), world.requests[small].request.clone()]);
    assert_prefix("ended early", log, &single[0], f32_tolerance(&single), false);
    assert_same("behind it", &world.requests[small], &single[1], f32_tolerance(&single));
    rest_without_dead(&mut world);
}

#[test]
fn a_killed_debtor_leaves_nothing_at_its_creditors() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(20)]);
    let request = world.submit(0, greedy(prompt(68, 80, 128), 12));
    let other = world.submit(1, greedy(prompt(69, 10, 128), 12));
    run_to_token(&mut world, request, 4);
    world.kill(0);
    world.run();
    assert!(world.requests[other].end.as_ref().is_some_and(Result::is_ok));
    assert!(world.live(1).status().blocks_lent > 0, "leases outlive a connection");
    world.run_for(16_000);
    world.check_empty();
}

#[test]
fn a_broken_connection_is_recovered_from() {
    for when in [1, 5, 9] {
        let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(20)]);
        let request = world.submit(0, greedy(prompt(70, 80, 128), 12));
        run_to_token(&mut world, request, when);
        let node = creditor(&world);
        world.cut(0, node, 700);
        world.run();
        assert_equals_single("cut", &world, &pool());
        world.check_empty();
    }
}

#[test]
fn what_runs_goes_on_without_a_gmanager() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(20), Spec::cpu(8)]);
    // It has its 20 blocks from the start: the last token needs no further block.
    let request = world.submit(0, greedy(prompt(71, 77, 128), 4));
    run_to_token(&mut world, request, 2);
    world.kill_gmanager();
    world.submit(2, greedy(prompt(72, 10, 128), 8));
    world.run();
    world.start_gmanager();
    world.run_for(600);
    assert!(world.nodes().all(|n| world.live(n).status().registered));
    // A request that must borrow meanwhile waits for the next gManager.
    let request = world.submit(0, greedy(prompt(73, 80, 128), 12));
    run_to_token(&mut world, request, 2);
    world.kill_gmanager();
    world.run_for(3_000);
    assert!(!world.requests[request].is_over(), "{:?}", world.requests[request].end);
    world.start_gmanager();
    world.run();
    assert_equals_single("gManager", &world, &pool());
    world.check_empty();
}

/// Borrowing waits for a gManager until the deadline, and disturbs no other request.
#[test]
fn borrowing_waits_for_a_gmanager() {
    let specs = [Spec::cpu(16), Spec::cpu(20)];
    let grows = |world: &mut World| {
        let requests = [77, 78].map(|seed| world.submit(0, greedy(prompt(seed, 24, 128), 24)));
        run_to_token(world, requests[1], 2);
        world.kill_gmanager();
        world.run_for(20_000);
        let status = world.live(0).status();
        assert_eq!(
            (status.preemptions, status.blocks_free, status.running),
            (0, 0, 2),
            "they wait with what they have"
        );
        requests
    };
    let mut world = World::pool(pool(), None, &specs);
    grows(&mut world);
    world.start_gmanager();
    world.run();
    let status = world.live(0).status();
    assert!(status.preemptions == 0 && world.sent("partial").0 > 0, "it borrowed");
    assert_equals_single("in time", &world, &pool());
    world.check_empty();

    // No gManager comes: the younger request is preempted, as on a lone instance.
    let mut world = World::pool(pool(), None, &specs);
    let start = world.now_ms();
    let requests = grows(&mut world);
    let large = world.submit(0, greedy(prompt(79, 80, 128), 2));
    world.run();
    let waited = world.now_ms() - start;
    assert!((30_000..36_000).contains(&waited), "{waited} ms");
    let status = world.live(0).status();
    assert!(status.preemptions > 0 && status.preempted_tokens >= 24 && status.recomputed_tokens == 0, "{status:?}");
    let error = error_of(&world.requests[large]);
    assert!(matches!(error, RequestError::Unavailable(_)) && error.to_string().contains("no gManager"), "{error}");
    let all: Vec<_> = requests.map(|r| world.requests[r].request.clone()).to_vec();
    let single = single(&pool(), &all);
    requests.iter().zip(&single).for_each(|(r, single)| {
        assert_same("alone", &world.requests[*r], single, f32_tolerance(std::slice::from_ref(single)));
    });
    world.check_empty();
}

#[test]
fn requests_that_cannot_be_served_are_refused_with_the_numbers() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(20)]);
    let long = world.submit(0, greedy(prompt(74, 120, 128), 4));
    let expected = RequestError::TooLong {
        prompt_tokens: 120,
        needed_tokens: 121,
        limit_tokens: 112,
        limit_name: "the KV capacity of the whole pool",
    };
    assert_eq!(error_of(&world.requests[long]), &expected);
    let longer = world.submit(0, greedy(prompt(74, 100, 128), 200));
    assert!(matches!(error_of(&world.requests[longer]), RequestError::TooLong { limit_tokens: 256, .. }));
    for bad in [vec![1, 128, 2], Vec::new()] {
        let bad = world.submit(0, greedy(bad, 4));
        assert!(matches!(error_of(&world.requests[bad]), RequestError::Invalid(_)));
    }
    let text = error_of(&world.requests[longer + 1]).to_string();
    assert!(text.contains("128"), "{text}");
    let queued: Vec<usize> = (0..40).map(|_| world.submit(0, greedy(prompt(75, 60, 128), 1))).collect();
    let full = queued.iter().filter(|r| world.requests[**r].end.is_some()).count();
    assert!(full > 0, "the queue has no bound");
    let last = &world.requests[*queued.last().unwrap()];
    assert_eq!(error_of(last), &RequestError::QueueFull { queued: 16, limit: 16 });
    world.run();
    world.check_empty();
}

#[test]
fn an_instance_of_another_model_is_refused() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8)]);
    let other = world.add(Spec { other_model: true, ..Spec::cpu(8) });
    world.run_for(500);
    let reason = world.rejected(other).unwrap();
    assert!(reason.contains("model hash"), "{reason}");
    assert!(!world.live(other).status().registered);

    // A peer that connects anyway is refused at its Hello, also one whose config.json is stale.
    let changes: [(fn(&mut _), _); 3] = [
        (|shape: &mut PoolShape| shape.model_hash[0] ^= 1, "models differ"),
        (|shape| shape.attention_scale ^= 1 << 23, "attention_scale differs"),
        (|shape| shape.windows = vec![7; shape.layers as usize], "windows differs"),
    ];
    for (number, (change, why)) in (77..).zip(changes) {
        let mut shape = world.shape(0);
        change(&mut shape);
        let (version_min, version_max) = (VERSION_MIN, VERSION_MAX);
        let shape = Some(shape);
        let hello = Hello { version_min, version_max, instance: 9, incarnation: 9, shape, ..Hello::default() };
        let peer = PeerKey(number);
        world.inject(0, Event::PeerUp { peer });
        let effects = world.inject(0, Event::Control { peer, body: ControlBody::Hello(Box::new(hello)) });
        let refused =
            |e: &Effect| matches!(e, Effect::Control { body: ControlBody::Rejected(r), .. } if r.reason.contains(why));
        assert!(effects.iter().any(refused), "{effects:?}");
        assert!(effects.iter().any(|e| matches!(e, Effect::Close { peer: closed, .. } if *closed == peer)));
    }
    world.submit(0, greedy(prompt(76, 10, 128), 2));
    world.run();
    world.check_empty();
}
