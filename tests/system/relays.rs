//! Creditors on one other host are asked through one of them, and the answer is that of one instance.

use lagoon_instance::RelayStatus;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};

const BLOCK: u32 = 4;
const TOKENS: usize = 128;
/// Tokens of an answer.
const ANSWER: u32 = 16;

/// A debtor on host "a" with little memory, whose steps take a time that a pause of relaying is short against. So slow that the oldest
/// rBlocks are borrowed, it asks in every step.
fn debtor() -> Spec {
    Spec { step_ms: 60, rows: false, host: "a", attention_flops: 1.0, ..Spec::cpu(5) }
}

/// A creditor that lends `blocks` rBlocks.
fn on(host: &'static str, blocks: u32) -> Spec {
    Spec { lend_blocks_max: blocks, rows: false, host, ..Spec::cpu(blocks + 2) }
}

/// A debtor, two creditors on host "b" and one beside the debtor.
fn three() -> Vec<Spec> {
    vec![debtor(), on("a", 10), on("b", 11), on("b", 11)]
}

/// A debtor, four creditors on host "b" and one beside the debtor.
fn five() -> Vec<Spec> {
    vec![debtor(), on("a", 6), on("b", 6), on("b", 7), on("b", 6), on("b", 7)]
}

fn pool() -> PoolSpec {
    PoolSpec::golden("yi", BLOCK)
}

fn relays(world: &World, node: usize) -> RelayStatus {
    world.live(node).status().relays
}

/// Layers that relays have merged.
fn merged(world: &World) -> u64 {
    world.nodes().filter(|node| world.is_alive(*node)).map(|node| relays(world, node).merged_layers).sum()
}

/// The node whose instance is the relay, once one is.
fn relay(world: &World) -> usize {
    world.nodes().find(|node| world.is_alive(*node) && relays(world, *node).merged_layers > 0).unwrap()
}

/// A world in which node 0 has a request with KV on all others, and relays have merged `layers` layers.
fn relayed(pool: &PoolSpec, specs: &[Spec], seed: Option<u64>, layers: u64) -> World {
    let mut world = World::pool(pool.clone(), seed, specs);
    world.submit(0, greedy(prompt(2, TOKENS, 128), ANSWER));
    world.run_until(|w| merged(w) >= layers || w.requests[0].is_over());
    assert!(!world.requests[0].is_over(), "{:?}", world.requests[0].end);
    assert_eq!(world.live(0).status().sequences[0].remote_blocks.len(), specs.len() - 1);
    world
}

#[test]
fn three_and_five_creditors_on_two_hosts_equal_one_instance() {
    for (specs, creditors, percent) in [(three(), 3, 80), (five(), 5, 70)] {
        for model in ["yi", "llama2_mha", "deepseek_v2"] {
            let pool = PoolSpec::golden(model, BLOCK);
            let mut sent = Vec::new();
            for named in [true, false] {
                // Without names every creditor is asked directly, as by earlier versions.
                let nameless = |spec: &Spec| Spec { host: "", ..spec.clone() };
                let specs: Vec<Spec> =
                    specs.iter().map(|spec| if named { spec.clone() } else { nameless(spec) }).collect();
                let mut world = World::pool(pool.clone(), None, &specs);
                world.submit(0, greedy(prompt(2, TOKENS, 128), ANSWER));
                world.run();
                let what = format!("{model}, {creditors} creditors, named: {named}");
                let diff = assert_equals_single(&what, &world, &pool);
                let (own, passed_on) = (relays(&world, 0), world.sent("relayed query").0);
                println!("{what}: largest difference {diff:e}, {own:?}, {} layers merged", merged(&world));
                assert_eq!(merged(&world) > 0, named, "{what}");
                // A member at least, and all but the relay at most, those of steps that were not relayed included.
                let most = (merged(&world) + 8) * (creditors - 2);
                assert!(passed_on >= merged(&world) && passed_on <= most, "{what}: {passed_on} queries were passed on");
                assert_eq!(own.failed_steps, 0, "{what}: relays connect before they are asked");
                assert_eq!(world.live(0).status().recoveries, 0);
                sent.push(world.sent("query").0);
                world.check_empty();
            }
            let (named, nameless) = (sent[0], sent[1]);
            println!("{model}, {creditors} creditors: {named} frames of the debtor instead of {nameless}");
            // One for the host "b" once its creditors know each other, instead of one for each; and one for the creditor beside.
            assert!(100 * named < percent * nameless, "{named} of {nameless} frames");
        }
    }
}

/// Frames arrive in any order between instances: queries before their tickets, and the members' partials in any order.
#[test]
fn the_order_of_arrival_changes_nothing() {
    let mut relaying = 0;
    for seed in 0..12 {
        let mut world = World::pool(pool(), Some(seed), &five());
        world.submit(0, greedy(prompt(2, TOKENS, 128), ANSWER));
        world.run();
        assert_equals_single(&format!("seed {seed}"), &world, &pool());
        assert_eq!(world.live(0).status().recoveries, 0);
        relaying += u32::from(merged(&world) > 0);
        world.check_empty();
    }
    // In some the creditors are connected too late for an answer that short.
    assert!(relaying >= 8, "{relaying} of 12");
}

#[test]
fn several_hosts_have_a_relay_each() {
    let specs = [debtor(), on("b", 8), on("c", 8), on("b", 8), on("c", 8)];
    let mut world = relayed(&pool(), &specs, None, 1);
    world.run();
    assert_equals_single("two relays", &world, &pool());
    let relays = (1..5).filter(|node| relays(&world, *node).merged_layers > 0).count();
    assert!(relays >= 2, "{relays}");
    world.check_empty();
}

/// What crosses to other hosts is divided evenly: by the hosts of the gManager's candidates, once they are connected by their `Hello`.
#[test]
fn creditors_on_another_host_hold_equal_parts() {
    let mut world = World::pool(pool(), None, &[debtor(), on("b", 30), on("b", 30)]);
    let parts = |seed, world: &mut World| -> Vec<u32> {
        let n = world.submit(0, greedy(prompt(seed, TOKENS, 128), ANSWER));
        world.run_until(|w| !w.requests[n].tokens.is_empty() || w.requests[n].is_over());
        let parts = world.live(0).status().sequences[0].remote_blocks.values().copied().collect();
        world.run();
        // The gManager's advice is as old as heartbeats.
        world.run_for(1_000);
        parts
    };
    assert_eq!(parts(2, &mut world), [14, 14]);
    assert_eq!(parts(3, &mut world), [14, 14]);
}

/// A creditor that names no host is of an earlier version: it is asked directly, and so is one alone on its host.
#[test]
fn who_is_alone_is_asked_directly() {
    let mut world = World::pool(pool(), None, &[debtor(), on("", 11), on("b", 11), on("c", 11)]);
    world.submit(0, greedy(prompt(2, TOKENS, 128), ANSWER));
    world.run();
    assert_equals_single("directly", &world, &pool());
    assert_eq!((merged(&world), relays(&world, 0).failed_steps), (0, 0));
    assert!(relays(&world, 0).queries > 0, "two creditors are on other hosts");
    world.check_empty();
}

/// Layers with windows of their own ask different creditors: they are asked directly.
#[test]
fn models_with_windows_by_layer_are_asked_directly() {
    for model in ["gemma2", "gpt_oss"] {
        let pool = PoolSpec::golden(model, BLOCK);
        let mut world = World::pool(pool.clone(), None, &three());
        world.submit(0, greedy(prompt(2, 100, 100), 10));
        world.run();
        assert_equals_single(model, &world, &pool);
        assert!(merged(&world) == 0 && relays(&world, 0).queries > 0, "{model}");
        world.check_empty();
    }
}

/// Every backend as relay and as member.
#[test]
fn backends_are_mixed() {
    let name = "backends_are_mixed";
    if let Err(reason) = lagoon_tests::wgpu() {
        return lagoon_tests::skip(name, &reason);
    }
    let pool = PoolSpec::golden("head_dim_64", 16);
    let of = |backend| move |spec| Spec { backend, step_rows: 16, ..spec };
    let (cpu, wgpu) = (Backend::Cpu, Backend::Wgpu);
    for backends in [[cpu, wgpu, cpu], [wgpu, cpu, wgpu]] {
        let specs = [of(backends[0])(debtor()), of(backends[1])(on("b", 3)), of(backends[2])(on("b", 3))];
        let mut world = World::pool(pool.clone(), None, &specs);
        world.submit(0, greedy(prompt(3, 130, 128), 16));
        world.run();
        assert_equals_single(&format!("{backends:?}"), &world, &pool);
        assert!(merged(&world) > 0, "{backends:?}");
        world.check_empty();
    }
}

/// A connection between relay and member that is cut costs no KV: the creditors are asked directly, and later through a relay again.
#[test]
fn a_cut_between_relay_and_member_costs_no_kv() {
    let mut world = relayed(&pool(), &three(), None, 8);
    let relay = relay(&world);
    world.cut(relay, if relay == 2 { 3 } else { 2 }, 100);
    let (failed, layers) = (relays(&world, 0).failed_steps, merged(&world));
    world.run();
    assert_equals_single("a cut", &world, &pool());
    let status = world.live(0).status();
    assert_eq!((status.recoveries, status.recomputed_tokens), (0, 0));
    assert!(status.relays.failed_steps > failed, "{status:?}");
    assert!(merged(&world) > layers, "they are not relayed again");
    world.run_for(20_000);
    world.check_empty();
}

/// Whoever dies, only its KV is computed again.
#[test]
fn a_relay_or_a_member_that_dies_costs_its_own_kv() {
    for (layers, is_relay) in [(1, true), (1, false), (5, true), (6, false)] {
        let mut specs = five();
        // Room for what is lost, which the request does not take before.
        specs[1] = on("a", 14);
        let mut world = World::pool(pool(), None, &specs);
        world.submit(0, greedy(prompt(2, TOKENS, 128), ANSWER));
        world.run_until(|w| merged(w) >= layers || w.requests[0].is_over());
        assert!(!world.requests[0].is_over(), "{:?}", world.requests[0].end);
        let (relay, of_request) = (relay(&world), world.live(0).status().sequences[0].remote_blocks.clone());
        // Of members that with most: the last one may have blocks in which nothing is written yet.
        let blocks = |node: &usize| world.id(*node).and_then(|id| of_request.get(&id).copied());
        let member = (2..6).filter(|node| *node != relay).max_by_key(blocks).unwrap();
        let dead = if is_relay { relay } else { member };
        let lost = of_request[&world.id(dead).unwrap()];
        world.kill(dead);
        world.run();
        assert_equals_single(&format!("relay {relay}, {dead} dies"), &world, &pool());
        let again = world.live(0).status().recomputed_tokens;
        assert!(again > 0 && again <= u64::from(lost * BLOCK), "{again} tokens again, {lost} rBlocks were lost");
        world.run_for(20_000);
        world.check_empty();
    }
}

/// A member that is stopped: the relay's answer does not come. Asked directly, the member is found and loses its KV; a stop that is
/// shorter than a session's silence costs nothing.
#[test]
fn a_stopped_relay_or_member_delays_the_answer() {
    for (ms, is_relay) in [(1_000, true), (1_000, false), (15_000, true), (15_000, false)] {
        let mut specs = five();
        specs[1] = on("a", 20);
        let mut world = World::pool(pool(), None, &specs);
        world.submit(0, greedy(prompt(2, TOKENS, 128), ANSWER));
        world.run_until(|w| merged(w) >= 5 || w.requests[0].is_over());
        let relay = relay(&world);
        let stopped = if is_relay { relay } else { (2..6).find(|node| *node != relay).unwrap() };
        world.pause(stopped, ms);
        world.run();
        assert_equals_single(&format!("{stopped} stops for {ms} ms"), &world, &pool());
        world.run_for(30_000);
        world.check_empty();
    }
}
