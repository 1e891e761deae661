//! The pool's prefix cache with prefill and decode workers: the second question about a long document computes only its own tokens.

use crate::disaggregated;
use crate::pool_prefix::{DOCUMENT, OWN, QUESTION, ask, pool, share};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Spec, World, greedy};
use lagoon_types::limits::LEASE_RENEW_MS;

fn prefill(blocks: u32) -> Spec {
    Spec { rows: false, ..Spec::prefill(blocks) }
}

fn decode(blocks: u32, push: bool) -> Spec {
    Spec { rows: false, push, ..Spec::decode(blocks) }
}

/// Two prefill workers, 0 and 1, and three decode workers, 2 to 4. None of them holds the document.
fn small(push: bool) -> World {
    let workers = [vec![prefill(12); 2], vec![decode(12, push); 3]].concat();
    disaggregated::pool(&pool(), None, &workers, 2)
}

/// No prefill worker can take the prompt: its decode worker computes it with memory of all.
#[test]
fn a_document_that_no_worker_holds_is_computed_once() {
    for push in [false, true] {
        for order in [[2, 2, 2, 2], [2, 3, 4, 2], [4, 3, 3, 2]] {
            let mut world = small(push);
            let computed: Vec<u32> = (0..4).map(|n| ask(&mut world, order[n as usize], n)).collect();
            println!("{order:?}, push {push}: {computed:?}");
            assert_eq!(computed[0] as usize, DOCUMENT + QUESTION);
            assert!(computed[1..].iter().all(|tokens| *tokens <= OWN), "{order:?}: {computed:?}");
            assert_equals_single("no worker holds it", &world, &pool());
            world.check_empty();
        }
    }
}

/// The prefill worker computes the prompt and keeps what its decode worker cannot hold.
#[test]
fn a_document_that_stays_with_its_worker_is_computed_once() {
    for push in [false, true] {
        let workers = [vec![prefill(40)], vec![decode(12, push); 2]].concat();
        let mut world = disaggregated::pool(&pool(), None, &workers, 1);
        let computed: Vec<u32> = [1, 2, 1, 1].into_iter().zip(0..).map(|(node, n)| ask(&mut world, node, n)).collect();
        println!("push {push}: {computed:?}");
        assert!(world.live(0).status().prefill.jobs_done > 0, "the worker computes prompts");
        assert_eq!(computed[0] as usize, DOCUMENT + QUESTION);
        assert!(computed[1..].iter().all(|tokens| *tokens <= OWN), "{computed:?}");
        assert_equals_single("left with its worker", &world, &pool());
        world.check_empty();
    }
}

/// The second worker computed the document, as the first one was busy; a decode worker that has asked neither yet finds it there.
#[test]
fn another_decode_worker_finds_the_prefill_worker_that_has_the_document() {
    for push in [false, true] {
        let workers = [vec![prefill(40); 2], vec![decode(80, push); 2]].concat();
        let mut world = disaggregated::pool(&pool(), None, &workers, 2);
        // Both workers are connected and idle: the first one gets another prompt, and the second one the document.
        world.run_for(2 * LEASE_RENEW_MS);
        let other = world.submit(2, greedy(prompt(70, 120, 128), 4));
        assert_eq!(ask(&mut world, 2, 0) as usize, DOCUMENT + QUESTION);
        assert!(matches!(world.requests[other].end, Some(Ok(_))));
        assert_eq!([0, 1].map(|node| share(&world, node)), [0, DOCUMENT as u32], "push {push}");
        // Workers report to decode workers every LEASE_RENEW_MS.
        world.run_for(2 * LEASE_RENEW_MS);
        let computed: Vec<u32> = [3, 3, 2].into_iter().zip(1..).map(|(node, n)| ask(&mut world, node, n)).collect();
        assert!(computed.iter().all(|tokens| *tokens <= OWN), "push {push}: {computed:?}");
        assert_eq!(share(&world, 0), 0, "the first worker, which an idle decode worker asks, computed none of it");
        assert_equals_single("two prefill workers", &world, &pool());
        world.check_empty();
    }
}

/// Creditors of both roles, the debtor and the gManager die between questions.
#[test]
fn what_dies_between_questions_costs_its_share() {
    for dead in [0, 1, 2, 3] {
        let mut world = small(false);
        ask(&mut world, 2, 0);
        let lost = share(&world, dead);
        world.kill(dead);
        // Until a dead debtor's leases have expired.
        world.run_for(20_000);
        let computed: Vec<u32> = [4, 4].into_iter().zip(1..).map(|(node, n)| ask(&mut world, node, n)).collect();
        println!("node {dead} had {lost} tokens: {computed:?}");
        assert!(computed[0] <= OWN + lost, "node {dead} had {lost} tokens: {computed:?}");
        assert!(computed[1] <= OWN, "{computed:?}");
        world.requests.retain(|log| !log.lost);
        assert_equals_single("a worker died", &world, &pool());
        world.check_empty();
    }
    let mut world = small(false);
    ask(&mut world, 2, 0);
    world.kill_gmanager();
    world.run_for(500);
    world.start_gmanager();
    world.run_for(3_000);
    assert!(ask(&mut world, 3, 1) <= OWN);
    assert_equals_single("another gManager", &world, &pool());
    world.check_empty();
}
