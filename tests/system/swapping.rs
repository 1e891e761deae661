//! Preemption by swapping: a preempted sequence's KV moves to a host tier, and back.

use lagoon_protocol::{MemoryTier, Role};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};
use lagoon_types::SeqId;
use std::collections::BTreeMap;

fn pool() -> PoolSpec {
    pool_of("llama3_old")
}

fn pool_of(model: &str) -> PoolSpec {
    PoolSpec::golden(model, 4)
}

/// Two requests that together outgrow an instance of 16 blocks, whose steps take `step_ms`, beside a host tier.
fn world(step_ms: u64, host_blocks: u32) -> World {
    world_of(pool(), step_ms, host_blocks)
}

fn world_of(pool: PoolSpec, step_ms: u64, host_blocks: u32) -> World {
    let host = Spec { role: Role::Kv, tier: MemoryTier::Host, ..Spec::cpu(host_blocks) };
    let mut world = World::pool(pool, None, &[Spec { step_ms, ..Spec::cpu(16) }, host]);
    for seed in [400, 401] {
        world.submit(0, greedy(prompt(seed, 24, 128), 24));
    }
    world
}

fn offloads(world: &World) -> u64 {
    world.live(0).status().offloads
}

/// Tokens of each sequence on the first instance whose KV is lost.
fn lost(world: &World) -> BTreeMap<SeqId, u32> {
    world.live(0).status().sequences.iter().map(|s| (s.seq, s.lost_tokens)).collect()
}

/// Also with windows on some layers, and with one row a token: nothing is computed again but the rest of a partly filled
/// block, which a swap out drops.
#[test]
fn a_long_sequence_that_is_preempted_moves_to_host_memory_and_goes_on() {
    let models = ["llama3_old", "gpt_oss", "deepseek_v3", "kimi_k2"].map(|model| (model, false));
    for (model, split) in models.into_iter().chain([("gpt_oss", true), ("gemma3", true)]) {
        let mut world = world_of(PoolSpec { split, ..pool_of(model) }, 40, 24);
        let mut dropped = 0;
        while world.requests.iter().any(|request| !request.is_over()) {
            let (before, offloaded) = (lost(&world), offloads(&world));
            world.step();
            if offloads(&world) > offloaded {
                let grown = lost(&world)
                    .into_iter()
                    .map(|(seq, now)| now.saturating_sub(before.get(&seq).copied().unwrap_or(0)));
                dropped += u64::from(grown.sum::<u32>());
            }
        }
        world.run();
        let status = world.live(0).status();
        assert!(status.offloads > 0 && status.moves.blocks_out >= 4, "{model}: {status:?}");
        assert_eq!((status.preemptions, status.swapped_out), (0, 0), "{model}: {status:?}");
        assert_eq!(status.recomputed_tokens, dropped, "{model}: {status:?}");
        // Blocks have four tokens. A swap out begins before the token that does not fit any more.
        assert!(dropped < 8 * status.offloads, "{model}: {status:?}");
        assert_equals_single(model, &world, &pool_of(model));
        world.check_empty();
    }
}

/// If recomputing is fast, swapping does not pay.
#[test]
fn a_short_sequence_is_not_moved() {
    let mut world = world(1, 24);
    world.run();
    assert_eq!(offloads(&world), 0);
    assert_equals_single("short", &world, &pool());
    world.check_empty();
}

/// The host tier is too small: running requests go on as without one.
#[test]
fn without_room_there_nothing_is_swapped_out() {
    let mut world = world(40, 3);
    world.run();
    let status = world.live(0).status();
    assert!(status.offloads == 0 && status.preemptions > 0, "{status:?}");
    assert_equals_single("no room", &world, &pool());
    world.check_empty();
}

#[test]
fn a_host_tier_that_dies_costs_what_it_had() {
    let mut world = world(40, 24);
    world.run_until(|w| offloads(w) > 0);
    world.kill(1);
    world.run();
    assert!(world.live(0).status().recoveries > 0);
    assert_equals_single("died", &world, &pool());
    world.run_for(16_000);
    world.check_empty();
}

#[test]
fn cancelling_while_blocks_move_or_are_swapped_out_frees_them() {
    for swapped_out in [false, true] {
        let mut world = world(40, 24);
        world.run_until(|w| if swapped_out { offloads(w) > 0 } else { w.live(0).status().moves.in_progress > 0 });
        (0..2).for_each(|request| world.cancel(request));
        world.check_empty();
    }
}
