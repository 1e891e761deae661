//! KV that stays with its prefill worker, because the decode worker cannot hold all of it, moves like any other: by
//! order, home, and away from a drained worker.

use crate::moves::{moved, placed, run_to_token};
use lagoon_cluster::{DgfmConfig, GManager, GManagerConfig};
use lagoon_protocol::{AdminBody, AdminDrain, Role};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};

fn spec() -> PoolSpec {
    PoolSpec::golden("llama3_old", 4)
}

/// A prefill worker, a decode worker and a lender, and a request with part of its KV left at the first.
fn left(decode: Spec, tokens: u32) -> (World, usize) {
    let mut world = World::pool(spec(), None, &[Spec::prefill(60), decode, Spec::cpu(60)]);
    world.run_until(|w| w.live(1).status().prefill.workers == 1);
    let request = world.submit(1, greedy(prompt(1, 110, 128), tokens));
    run_to_token(&mut world, request, 2);
    let left = world.live(1).status().prefill.blocks_left;
    assert!(left >= 12 && u64::from(placed(&world, request)[&0]) >= left);
    (world, request)
}

#[test]
fn what_stays_with_a_prefill_worker_moves_to_another_creditor() {
    for push in [false, true] {
        let (mut world, request) = left(Spec { push, ..Spec::decode(16) }, 30);
        let before = placed(&world, request)[&0];
        moved(&mut world, request, 5, 0, 2);
        assert_eq!((placed(&world, request)[&0], placed(&world, request)[&2]), (before - 5, 5));
        moved(&mut world, request, before - 5, 0, 2);
        assert_eq!(placed(&world, request).get(&0), None);
        // Blocks copied with the prefill worker's hashes get hashes of their own.
        moved(&mut world, request, 2, 2, 0);
        assert_eq!(placed(&world, request)[&0], 2);
        let status = world.live(1).status().moves;
        assert_eq!((status.blocks_between, status.damaged), (u64::from(before) + 2, 0), "{status:?}");
        world.run();
        assert_equals_single("moved", &world, &spec());
        world.check_empty();
    }
}

#[test]
fn what_stays_with_a_prefill_worker_comes_home() {
    for push in [false, true] {
        // It has more room than can arrive at once.
        let decode = Spec { push, role: Role::Decode, stage_blocks: Some(12), ..Spec::cpu(60) };
        let (mut world, request) = left(decode, 30);
        let there = placed(&world, request)[&0];
        moved(&mut world, request, there, 0, 1);
        assert_eq!(placed(&world, request).len(), 1, "all of it is home");
        world.run_until(|w| w.live(0).status().blocks_lent == 0);
        world.run();
        assert_equals_single("home", &world, &spec());
        world.check_empty();
    }
}

/// A move whose KV differs from its hash fails, without a wrong answer.
#[test]
fn damage_on_the_way_is_found() {
    for push in [false, true] {
        let (mut world, request) = left(Spec { push, ..Spec::decode(16) }, 20);
        world.corrupt_next_data();
        moved(&mut world, request, 5, 0, 2);
        assert_eq!(world.live(1).status().moves.damaged, 1);
        world.run();
        assert!(world.live(1).status().recoveries > 0);
        assert_equals_single("damaged", &world, &spec());
        world.check_empty();
    }
}

/// A drained prefill worker does not wait for requests with KV left there: that KV moves, and they end well.
#[test]
fn a_drained_prefill_worker_is_emptied_while_requests_go_on() {
    for push in [false, true] {
        let (mut world, request) = left(Spec { push, step_ms: 200, ..Spec::decode(16) }, 60);
        let drain = AdminDrain { instance: world.id(0).unwrap().0, cancel: false, stop: true };
        world.admin(AdminBody::Drain(drain));
        world.run_until(|w| w.is_drained(0) || w.requests[request].is_over());
        assert!(world.is_drained(0) && !world.requests[request].is_over(), "{}", world.describe());
        assert_eq!(placed(&world, request).get(&0), None);
        world.run();
        assert_equals_single("drained", &world, &spec());
        world.check_empty();
    }
}

/// Two instances owe each other, one of them KV left behind: both debts are swapped back.
#[test]
fn what_stays_is_swapped_around_a_circle_of_debts() {
    for push in [false, true] {
        let mut world = World::new(spec(), None);
        let dgfm = Some(DgfmConfig { blocks_min: 2, period_ms: 500, ..DgfmConfig::default() });
        let config = GManagerConfig { dgfm, ..GManagerConfig::default() };
        *world.gmanager_mut() = GManager::with_config(config);
        let slow = |spec: Spec| Spec { step_ms: 400, ..spec };
        world.add(slow(Spec { share: true, ..Spec::cpu(37) }));
        world.add(slow(Spec { push, ..Spec::decode(22) }));
        world.add(slow(Spec::cpu(16)));
        world.run_until(|w| w.live(1).status().prefill.workers == 1);
        world.run_for(600);
        let left = world.submit(1, greedy(prompt(1, 110, 128), 60));
        run_to_token(&mut world, left, 2);
        assert!(placed(&world, left)[&0] >= 4, "{}", world.describe());
        // Some of it moves elsewhere, so that the decode worker has memory to lend.
        moved(&mut world, left, 14, 1, 2);
        let owes = world.submit(0, greedy(prompt(2, 140, 128), 24));
        run_to_token(&mut world, owes, 1);
        assert!(placed(&world, owes)[&1] >= 2, "{}", world.describe());
        world.run_until(|w| {
            let stats = w.gmanager().dgfm_stats().unwrap();
            stats.completed > 0 || w.requests[left].is_over()
        });
        assert!(!world.requests[owes].is_over() && !world.requests[left].is_over(), "{}", world.describe());
        for node in 0..2 {
            let moves = world.live(node).status().moves;
            let home = moves.by_reason.rows().find(|row| (row.0, row.1) == ("swap", "home")).unwrap().2;
            assert!(home >= 2 && moves.damaged == 0, "{moves:?}");
        }
        world.run();
        assert_equals_single("swapped", &world, &spec());
        world.check_empty();
    }
}
