//! The runs. A failing seed replays: `World::new(seed, …)` does the same thing every time.

use super::world::World;
use lagoon_types::limits;
use std::collections::BTreeMap;

const STEPS: u32 = 20_000;

/// Acts and time, with everything checked at every event; then rest, then the end of all sequences.
fn run(seed: u64, nodes: usize, faults: bool) -> BTreeMap<&'static str, u32> {
    use rand::Rng;
    let mut world = World::new(seed, nodes, faults);
    for step in 1..=STEPS {
        let ms = world.rng.random_range(1..12);
        world.pass(ms);
        world.act();
        if faults && step % (STEPS / 4) == 0 {
            blackout(&mut world);
        }
    }
    // Quiet: releases and late grants settle before any lease could expire, unless a fault left some to do so.
    let settle_ms = if faults { 3 * limits::LEASE_TTL_MS } else { limits::LEASE_TTL_MS / 2 };
    (0..settle_ms / 20).for_each(|_| world.pass(20));
    world.check_rest();
    for node in 0..nodes {
        let seqs: Vec<_> = world.nodes[node].seqs.keys().copied().collect();
        let now_ms = world.now_ms;
        seqs.into_iter().for_each(|id| world.nodes[node].finish(id, now_ms));
        world.drain(node);
    }
    (0..settle_ms / 20).for_each(|_| world.pass(20));
    world.check_empty();
    if !faults {
        assert_eq!(world.seen.get("lease expired"), None, "without faults every lease is released by its debtor");
        assert_eq!(world.seen.get("lease lost"), None, "without faults no lease is lost");
    }
    world.seen
}

/// All links are down for longer than leases live, without other events: debtors must drop their leases before creditors free
/// them, which is checked at every event.
fn blackout(world: &mut World) {
    let nodes = world.nodes.len();
    for (a, b) in (0..nodes).flat_map(|a| (0..a).map(move |b| (a, b))) {
        world.cut(a, b, 2 * limits::LEASE_TTL_MS);
    }
    (0..3 * limits::LEASE_TTL_MS / 50).for_each(|_| world.pass(50));
}

fn runs(seeds: std::ops::Range<u64>, nodes: usize, faults: bool) -> BTreeMap<&'static str, u32> {
    let mut total = BTreeMap::new();
    for seed in seeds {
        for (what, n) in run(seed, nodes, faults) {
            *total.entry(what).or_default() += n;
        }
    }
    total
}

#[test]
fn nothing_leaks_between_slow_peers() {
    let seen = runs(0..6, 4, false);
    for what in ["borrowed", "mutual", "refused", "pool too small"] {
        assert!(seen.get(what).is_some_and(|n| *n > 0), "no run saw {what:?}: {seen:?}");
    }
}

#[test]
fn nothing_leaks_through_broken_connections_and_restarts() {
    let seen = runs(100..106, 5, true);
    for what in [
        "borrowed",
        "refused",
        "deadline",
        "lease lost",
        "lease expired",
        "debtor restarted",
        "data refused",
        "fenced",
        "debtor fenced",
    ] {
        assert!(seen.get(what).is_some_and(|n| *n > 0), "no run saw {what:?}: {seen:?}");
    }
}
