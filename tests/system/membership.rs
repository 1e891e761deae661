//! Instances in their pool: reported rows, fences, changing gManagers, drains.

use lagoon_protocol::{AdminBody, AdminDrain};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{GMANAGER, PoolSpec, Spec, World, greedy};
use lagoon_types::limits::{FENCE_MS, HEARTBEAT_MS};

fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", 4)
}

fn run_to_token(world: &mut World, request: usize, tokens: usize) {
    world.run_until(|w| w.requests[request].tokens.len() >= tokens || w.requests[request].is_over());
    assert!(!world.requests[request].is_over(), "{:?}", world.requests[request].end);
}

/// Asserts that the gManager's rows equal the instances' blocks.
fn assert_rows(world: &World) {
    let gm = world.gmanager();
    for node in world.nodes().filter(|node| world.is_alive(*node)) {
        let me = world.id(node).unwrap();
        for s in world.live(node).status().sequences {
            let known = &gm.pool().instances[&me].requests[&s.seq];
            assert_eq!(known.local, s.local_blocks + s.reserved_blocks);
            let remote: Vec<_> = known.remote.iter().map(|r| (r.creditor, r.blocks)).collect();
            assert_eq!(remote, s.remote_blocks.into_iter().collect::<Vec<_>>());
        }
    }
}

#[test]
fn the_gmanager_knows_where_every_block_lies() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(16), Spec::cpu(16)]);
    let request = world.submit(0, greedy(prompt(80, 80, 128), 30));
    run_to_token(&mut world, request, 4);
    assert!(!world.live(0).status().sequences[0].remote_blocks.is_empty());
    // A stalled creditor holds up the step, so that nothing grows while heartbeats catch up.
    world.stall(0, 1, 1_000);
    world.stall(0, 2, 1_000);
    world.run_for(3 * HEARTBEAT_MS);
    assert_rows(&world);
    assert!(world.gmanager().placements().count() >= 2);
    world.run();
    world.run_for(2 * HEARTBEAT_MS);
    assert_eq!(world.gmanager().placements().count(), 0);
    assert_rows(&world);
    world.check_empty();
}

#[test]
fn a_new_gmanager_learns_everything() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(16), Spec::cpu(16)]);
    let request = world.submit(0, greedy(prompt(81, 80, 128), 12));
    run_to_token(&mut world, request, 4);
    world.stall(0, 1, 4_000);
    world.stall(0, 2, 4_000);
    world.run_for(2 * HEARTBEAT_MS);
    assert_rows(&world);
    world.kill_gmanager();
    world.run_for(500);
    world.start_gmanager();
    world.run_for(3 * HEARTBEAT_MS);
    assert!(world.gmanager().placements().count() >= 2);
    assert_rows(&world);
    world.run();
    assert_equals_single("membership", &world, &pool());
    world.check_empty();
}

#[test]
fn a_creditor_that_is_taken_for_dead_begins_anew() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(24), Spec::cpu(12)]);
    let request = world.submit(0, greedy(prompt(82, 80, 128), 20));
    run_to_token(&mut world, request, 3);
    // Alive, but silent to the gManager only. Its debtor is stalled meanwhile, so that the request outlives the fence.
    world.stall(1, GMANAGER, FENCE_MS + 1_500);
    world.stall(0, 1, FENCE_MS + 1_000);
    world.run_for(FENCE_MS + 3_000);
    let status = world.live(1).status();
    assert_eq!((status.fences, status.registered, status.blocks_lent), (1, true, 0), "{}", world.describe());
    world.run();
    assert_equals_single("membership", &world, &pool());
    // It lends again, under its new incarnation.
    let again = world.submit(0, greedy(prompt(83, 80, 128), 12));
    world.run_until(|w| w.live(1).status().blocks_lent > 0 || w.requests[again].is_over());
    assert!(!world.requests[again].is_over(), "{}", world.describe());
    world.run();
    assert_equals_single("membership", &world, &pool());
    world.check_empty();
}

#[test]
fn a_debtor_that_is_taken_for_dead_goes_on() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(24), Spec::cpu(12)]);
    let request = world.submit(0, greedy(prompt(84, 80, 128), 30));
    run_to_token(&mut world, request, 3);
    world.stall(0, GMANAGER, FENCE_MS + 1_500);
    world.stall(0, 1, FENCE_MS + 1_000);
    world.stall(0, 2, FENCE_MS + 1_000);
    world.run_for(FENCE_MS + 500);
    assert_eq!(world.live(1).status().blocks_lent, 0, "what the dead borrowed is free");
    world.run();
    assert_eq!(world.live(0).status().fences, 1);
    assert_equals_single("membership", &world, &pool());
    world.run_for(16_000);
    world.check_empty();
}

#[test]
fn a_drained_instance_finishes_what_it_has_and_stops() {
    let mut world = World::pool(pool(), None, &[Spec::cpu(8), Spec::cpu(24), Spec::cpu(24)]);
    world.submit(1, greedy(prompt(85, 30, 128), 10));
    let id = world.id(1).unwrap();
    let drain = AdminDrain { instance: id.0, cancel: false, stop: true };
    let reply = world.admin(AdminBody::Drain(drain));
    assert_eq!(reply.error, "");
    world.run_for(HEARTBEAT_MS);
    assert!(world.live(1).status().draining);
    // Another request is served without it.
    world.submit(0, greedy(prompt(86, 80, 128), 10));
    world.run();
    assert_equals_single("membership", &world, &pool());
    assert_eq!(world.live(1).status().blocks_lent, 0);
    world.run_for(4_000);
    assert!(world.is_drained(1), "{}", world.describe());
    let gm = world.gmanager();
    assert!(gm.status(world.now_ms()).iter().all(|s| s.instance != id.0), "it has left the pool");
    world.check_empty();
}
