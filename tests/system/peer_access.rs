//! Peer access in a pool on the fake driver: debtors map kv nodes' lent memory and attend to it directly; every logit
//! equals that of a single host instance, whatever happens to that memory.

use crate::cuda::{driver, fake};
use lagoon_instance::{PeerAccessStatus, RemotePolicy};
use lagoon_protocol::{BatchPoint, Calibration, MemoryTier, Role};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};
use lagoon_types::RequestError;
use lagoon_types::limits::LEASE_TTL_MS;

const BLOCK: u32 = 16;

fn debtor(blocks: u32, remote: RemotePolicy) -> Spec {
    // Nothing is fetched: KV that is not mapped is attended to by its creditor, so every difference is due to peer
    // access.
    Spec {
        backend: Backend::Cuda,
        remote,
        step_rows: 2 * BLOCK,
        peer_access: true,
        fetch_tokens: 0,
        ..Spec::cpu(blocks)
    }
}

fn lender(blocks: u32) -> Spec {
    Spec { backend: Backend::Cuda, role: Role::Kv, lends: true, ..Spec::cpu(blocks) }
}

fn peer_access(world: &World, node: usize) -> PeerAccessStatus {
    world.live(node).status().peer_access
}

/// A debtor and a lender; a request that outgrows the debtor has its first tokens, and all its lent blocks are
/// sealed.
fn outgrown(blocks: u32, remote: RemotePolicy, others: &[Spec]) -> World {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    let mut world = World::pool(pool, None, &[&[debtor(blocks, remote), lender(8)], others].concat());
    world.submit(0, greedy(prompt(81, 70, 128), 24));
    world.run_until(|w| w.requests[0].tokens.len() >= 4);
    assert!(world.live(0).status().blocks_borrowed > 0);
    world
}

#[test]
fn a_creditors_memory_is_attended_to_where_it_lies() {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    let mut logits = Vec::new();
    for (seed, remote) in [(41, RemotePolicy::Auto), (42, RemotePolicy::Ship)] {
        let Some(fake) = driver("a_creditors_memory_is_attended_to_where_it_lies", seed) else { return };
        let mut world = outgrown(4, remote, &[]);
        let (before, queries) = (peer_access(&world, 0), world.sent("query").0);
        world.run_until(|w| w.requests[0].tokens.len() >= 9);
        let (after, sealed) = (peer_access(&world, 0), peer_access(&world, 1).sealed);
        match remote {
            RemotePolicy::Auto => {
                assert_eq!(after.mapped, 1);
                assert!(after.attended_mapped > before.attended_mapped && sealed > 0, "{after:?}");
                // No queries are sent for sealed blocks, and nothing else was borrowed.
                assert_eq!((after.attended_shipped, world.sent("query").0), (before.attended_shipped, queries));
            }
            _ => assert_eq!((after.mapped, after.attended_mapped), (0, 0)),
        }
        world.run();
        assert_eq!((peer_access(&world, 0).refused, peer_access(&world, 0).reused), (0, 0));
        let diff = assert_equals_single(&format!("{remote:?}"), &world, &pool);
        println!("{remote:?}: largest difference {diff:e}; {after:?}");
        logits.push(std::mem::take(&mut world.requests[0].logits));
        world.check_empty();
        drop(world);
        fake.finish();
    }
    // One rBlock of a chunk is lent by then. Growth is attended to by queries while its block is open.
    assert!(logits[0][..9] == logits[1][..9], "what is attended to there is bit by bit what is sent there and back");
}

/// The borrow guard: steps that take next to nothing cover no round trip, but mapped creditor KV is the own device's work.
#[test]
fn a_request_that_a_gateway_takes_back_borrows_only_what_is_mapped() {
    let calibration = Calibration {
        batches: vec![BatchPoint { batch: 1, step_us: 1.0 }],
        attention_us_per_ktoken: 1.0,
        prefill_us_per_token: 0.0,
        copy_bytes_per_s: 0.0,
        prompt_attention_us_per_ktoken: 0.0,
    };
    for (seed, remote, mapped) in [(47, RemotePolicy::Auto, 1), (48, RemotePolicy::Ship, 0)] {
        let name = "a_request_that_a_gateway_takes_back_borrows_only_what_is_mapped";
        let Some(fake) = driver(name, seed) else { return };
        let debtor = Spec { calibration: Some(calibration.clone()), step_ms: 100, ..debtor(4, remote) };
        let mut world = World::pool(PoolSpec::golden("head_dim_64", BLOCK), None, &[debtor, lender(12)]);
        world.submit(0, greedy(prompt(81, 70, 128), 24));
        world.run_until(|w| w.requests[0].tokens.len() >= 4);
        assert_eq!(peer_access(&world, 0).mapped, mapped);
        let mut returnable = greedy(prompt(83, 40, 128), 4);
        returnable.options.may_hand_back = true;
        let returnable = world.submit(0, returnable);
        world.run();
        let is_back = world.requests[returnable].end == Some(Err(RequestError::HandedBack));
        assert_eq!(is_back, mapped == 0, "{remote:?}: {}", world.describe());
        world.check_empty();
        drop(world);
        fake.finish();
    }
}

/// The creditor's device overwrites mapped KV: that step is discarded, and the range is recomputed.
#[test]
fn reused_memory_is_a_lost_range_and_is_recomputed() {
    let Some(fake) = driver("reused_memory_is_a_lost_range_and_is_recomputed", 43) else { return };
    let mut world = outgrown(3, RemotePolicy::Auto, &[]);
    let (_, lease, ..) = world.live(1).rmanager().creditor.iter().next().map(|l| (l.0, l.1)).unwrap();
    let block = world.live(1).rmanager().creditor.entry(lease, 1).unwrap().block;
    world.overwrite(1, block);
    world.run();
    let status = world.live(0).status();
    assert_eq!((status.peer_access.reused, status.recoveries), (1, 1), "{status:?}");
    assert!(status.recomputed_tokens > 0);
    assert_equals_single("overwritten", &world, &PoolSpec::golden("head_dim_64", BLOCK));
    world.check_empty();
    drop(world);
    fake.finish();
}

/// The creditor's process ends while its memory is mapped: the mapping keeps its contents, and the lost range is
/// recomputed elsewhere.
#[test]
fn a_lender_that_dies_takes_what_it_lent() {
    let Some(fake) = driver("a_lender_that_dies_takes_what_it_lent", 44) else { return };
    let host = Spec { role: Role::Kv, tier: MemoryTier::Host, ..Spec::cpu(12) };
    let mut world = outgrown(3, RemotePolicy::Auto, &[host]);
    assert_eq!(world.live(2).status().blocks_lent, 0, "host memory is lent last");
    world.kill(1);
    world.run();
    let status = world.live(0).status();
    assert_eq!((status.peer_access.mapped, status.peer_access.reused), (0, 0), "{status:?}");
    assert!(status.recoveries > 0 && status.recomputed_tokens > 0, "{status:?}");
    assert_equals_single("killed", &world, &PoolSpec::golden("head_dim_64", BLOCK));
    // Releases to the dead creditor are repeated until its leases expire.
    world.run_for(LEASE_TTL_MS);
    world.check_empty();
    // Another lender starts in its place, and is mapped like it.
    world.restart(1);
    world.run_for(600);
    world.submit(0, greedy(prompt(82, 70, 128), 9));
    world.run();
    assert_eq!(peer_access(&world, 0).mapped, 1);
    world.check_empty();
    drop(world);
    fake.finish();
}

/// A dead debtor leaves nothing lent, and the next debtor of that memory reads its own KV.
#[test]
fn memory_of_a_debtor_that_dies_is_lent_again() {
    let Some(fake) = driver("memory_of_a_debtor_that_dies_is_lent_again", 45) else { return };
    let mut world = outgrown(3, RemotePolicy::Auto, &[debtor(3, RemotePolicy::Auto)]);
    let sealed = peer_access(&world, 1).sealed;
    world.kill(0);
    world.run_until(|w| w.live(1).status().blocks_lent == 0);
    for seed in [83, 84] {
        world.submit(2, greedy(prompt(seed, 70, 128), 9));
        world.run();
    }
    assert!(peer_access(&world, 1).sealed > sealed && peer_access(&world, 2).attended_mapped > 0);
    assert_eq!(peer_access(&world, 2).reused, 0);
    world.requests.remove(0);
    assert_equals_single("lent again", &world, &PoolSpec::golden("head_dim_64", BLOCK));
    world.check_empty();
    drop(world);
    fake.finish();
}

/// Memory that cannot be mapped is attended to by its creditor.
#[test]
fn what_is_not_mapped_is_sent_for() {
    for (seed, call) in [(46, "cuMemImportFromShareableHandle"), (47, "cuMemAddressReserve")] {
        let Some(fake) = driver("what_is_not_mapped_is_sent_for", seed) else { return };
        let pool = PoolSpec::golden("head_dim_64", BLOCK);
        let mut world = World::pool(pool.clone(), None, &[debtor(3, RemotePolicy::Auto), lender(8)]);
        // The instances have all their initial memory back.
        fake.fail(call, 1, fake::UNKNOWN);
        world.submit(0, greedy(prompt(81, 70, 128), 12));
        world.run();
        let status = peer_access(&world, 0);
        assert_eq!((status.mapped, status.refused, status.attended_mapped), (0, 1, 0), "{call}: {status:?}");
        assert!(world.sent("partial").0 > 0);
        assert_equals_single(call, &world, &pool);
        world.check_empty();
        drop(world);
        fake.finish();
    }
}
