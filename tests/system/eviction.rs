//! Eviction never delays an admission: with caches full everywhere (own memory, memory that was lent to others, the host tier), a
//! request that needs the memory is admitted in the same iteration as in a pool that has cached nothing.

use crate::cache_tiers::bytes;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};

const BLOCK: u32 = 4;
const NODES: usize = 3;
/// rBlocks of a node, and of its host tier.
const BLOCKS: u32 = 16;
const HOST_BLOCKS: u64 = 8;
const VOCAB: u32 = 128;

fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", BLOCK)
}

fn empty() -> World {
    // With a device that slow the oldest rBlocks are borrowed, whatever rates of links were measured.
    let (host_cache_bytes, attention_flops) = (bytes(&pool(), HOST_BLOCKS), 1.0);
    let spec = Spec { rows: false, host_cache_bytes, attention_flops, step_rows: 8, ..Spec::cpu(BLOCKS) };
    World::pool(pool(), None, &vec![spec; NODES])
}

/// Asks for two tokens: with the first one the prompt fills `blocks` rBlocks.
fn fill(world: &mut World, node: usize, n: u64, blocks: u32) {
    world.submit(node, greedy(prompt(n, (blocks * BLOCK - 1) as usize, VOCAB), 2));
    world.run();
}

/// A pool of which every free rBlock is cached. `copied`: the host tiers are full, too, and no copy is made any more.
fn full(copied: bool) -> World {
    let mut world = empty();
    for round in 0..3 {
        // Longer than a node: the oldest blocks lie at others, which keep them.
        for node in 0..NODES {
            fill(&mut world, node, 10 * round + node as u64, BLOCKS + 6);
        }
        // What a document left is the half of the memory that is used last.
        for node in 0..NODES {
            fill(&mut world, node, 10 * round + 5 + node as u64, BLOCKS / 2);
        }
        if copied {
            world.run_for(500);
        }
    }
    world
}

fn assert_full(world: &World, copied: bool) {
    for node in world.nodes() {
        let status = world.live(node).status();
        assert_eq!((status.prefix.blocks, status.blocks_free), (BLOCKS, BLOCKS), "node {node}: {status:?}");
        assert!(status.blocks_borrowed_total > 0 && status.prefix.evicted_blocks > 0, "node {node}: {status:?}");
        if copied {
            let host = world.tiers(node).host;
            assert_eq!((host.blocks, host.evicted_blocks > 0), (HOST_BLOCKS, true), "node {node}: {host:?}");
        }
    }
}

/// Iterations of a running request of node 0, counted by its tokens, from another one's arrival there: until that one is admitted, and
/// until its first token. And the blocks that were evicted meanwhile.
fn iterations(world: &mut World, blocks: u32) -> ([usize; 2], u64) {
    let running = world.submit(0, greedy(prompt(90, 3, VOCAB), 40));
    world.run_until(|world| world.requests[running].tokens.len() == 2);
    let evicted =
        |world: &World| -> u64 { world.nodes().map(|node| world.live(node).status().prefix.evicted_blocks).sum() };
    let before = evicted(world);
    let asked = world.submit(0, greedy(prompt(91, (blocks * BLOCK - 1) as usize, VOCAB), 2));
    let since = |world: &World| world.requests[running].tokens.len() - 2;
    world.run_until(|world| world.live(0).status().running == 2);
    let admitted = since(world);
    world.run_until(|world| !world.requests[asked].tokens.is_empty());
    let first = since(world);
    assert!(!world.requests[running].is_over(), "it ran all the time");
    assert_eq!(world.requests[asked].prompt.0, 0, "nothing of it was cached");
    let evicted = evicted(world) - before;
    world.run();
    ([admitted, first], evicted)
}

#[test]
fn full_caches_delay_no_admission() {
    // In own memory, and with a loan from both others.
    for (blocks, lends) in [(10, false), (BLOCKS + 14, true)] {
        let mut world = empty();
        let (expected, evicted) = iterations(&mut world, blocks);
        assert_eq!(evicted, 0, "the pool was empty");
        let lent: u64 = world.nodes().map(|node| world.live(node).status().blocks_borrowed_total).sum();
        assert_eq!(lent > 0, lends);
        // Where copies to the host tier are done, and where they are being made.
        for copied in [true, false] {
            let mut world = full(copied);
            assert_full(&world, copied);
            let (got, evicted) = iterations(&mut world, blocks);
            assert_eq!(got, expected, "{blocks} blocks, copied: {copied}");
            assert!(evicted >= u64::from(blocks), "{blocks} blocks, copied: {copied}: {evicted} evicted");
            assert_equals_single("full caches", &world, &pool());
            world.check_empty();
        }
    }
}
