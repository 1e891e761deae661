//! Waiting requests go back to a gateway that takes them, and the borrow guard waits for that.

use lagoon_tests::cluster::compare::prompt;
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};
use lagoon_types::limits::HAND_BACK_MS;
use lagoon_types::{GenerateRequest, RequestError};

/// A request whose gateway takes it back.
fn returnable(prompt: Vec<u32>, max_tokens: u32) -> GenerateRequest {
    let mut request = greedy(prompt, max_tokens);
    request.options.may_hand_back = true;
    request
}

/// Instances of 16 rBlocks of 4 tokens, whose steps take 100 ms.
fn world(instances: usize) -> World {
    let spec = Spec { step_ms: 100, ..Spec::cpu(16) };
    World::pool(PoolSpec::golden("llama3_old", 4), None, &vec![spec; instances])
}

fn is_handed_back(world: &World, request: usize) -> bool {
    world.requests[request].end == Some(Err(RequestError::HandedBack))
}

#[test]
fn a_request_that_waits_too_long_goes_back_and_others_stay() {
    let mut world = world(1);
    // What runs never goes back.
    let first = world.submit(0, returnable(prompt(1, 40, 128), 20));
    world.run_for(200);
    let began_ms = world.now_ms();
    let [stays, goes] = [greedy(prompt(2, 40, 128), 4), returnable(prompt(3, 40, 128), 4)];
    let [stays, goes] = [world.submit(0, stays), world.submit(0, goes)];
    world.run_until(|world| world.requests[goes].is_over() || world.requests[first].is_over());
    assert!(is_handed_back(&world, goes), "{}", world.describe());
    assert!(world.now_ms() >= began_ms + HAND_BACK_MS);
    assert!(world.requests[goes].tokens.is_empty());
    world.run();
    for request in [first, stays] {
        assert!(matches!(world.requests[request].end, Some(Ok(_))), "{}", world.describe());
    }
    let status = world.live(0).status();
    assert_eq!(status.handed_back, 1, "{status:?}");
    world.check_empty();
}

/// Before, a request that lacked memory at its instance borrowed, whatever the next one had free.
#[test]
fn a_request_that_a_gateway_takes_back_does_not_borrow() {
    for may_hand_back in [false, true] {
        let mut world = world(2);
        let runs = world.submit(0, greedy(prompt(1, 40, 128), 20));
        world.run_for(200);
        let mut request = greedy(prompt(2, 40, 128), 4);
        request.options.may_hand_back = may_hand_back;
        let short = world.submit(0, request);
        world.run_until(|world| world.requests[short].is_over() || world.requests[runs].is_over());
        let borrowed = world.live(0).status().blocks_borrowed_total;
        assert_eq!(
            (is_handed_back(&world, short), borrowed == 0),
            (may_hand_back, may_hand_back),
            "{}",
            world.describe()
        );
        world.run();
        world.check_empty();
    }
}

/// The pool keeps memory for it where it waits.
#[test]
fn a_pool_sized_request_borrows_and_stays() {
    let mut world = world(2);
    let large = world.submit(0, returnable(prompt(1, 80, 128), 4));
    world.run();
    assert!(matches!(world.requests[large].end, Some(Ok(_))), "{}", world.describe());
    assert!(world.live(0).status().blocks_borrowed_total > 0);
    world.check_empty();
}
