//! KV lost with a creditor is recomputed, and nothing else: tokens and logits equal a single instance's.

use lagoon_instance::{InstanceStatus, RemotePolicy, SequencePlacement};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};
use lagoon_types::InstanceId;

const BLOCK: u32 = 4;

const MODEL: &str = "llama3_old";

fn status(world: &World) -> InstanceStatus {
    world.live(0).status()
}

/// The first request on the first node.
fn seq(world: &World) -> SequencePlacement {
    status(world).sequences[0].clone()
}

fn run_to_token(world: &mut World, request: usize, tokens: usize) {
    world.run_until(|w| w.requests[request].tokens.len() >= tokens || w.requests[request].is_over());
    assert!(!world.requests[request].is_over(), "{:?}", world.requests[request].end);
}

/// A debtor of 8 blocks whose request has the rest of its prompt at two creditors, at most 9 blocks each; spare
/// creditors come afterwards.
fn world(prompt: Vec<u32>, tokens: u32, remote: RemotePolicy, seed: Option<u64>, spare: &[u32]) -> World {
    world_of(MODEL, prompt, tokens, remote, seed, spare)
}

fn world_of(
    model: &str,
    prompt: Vec<u32>,
    tokens: u32,
    remote: RemotePolicy,
    seed: Option<u64>,
    spare: &[u32],
) -> World {
    let creditor = Spec { lend_blocks_max: 9, ..Spec::cpu(12) };
    let mut world = World::pool(
        PoolSpec::golden(model, BLOCK),
        seed,
        &[Spec { remote, ..Spec::cpu(8) }, creditor.clone(), creditor],
    );
    world.submit(0, greedy(prompt, tokens));
    world.run_until(|w| seq(w).remote_blocks.len() == 2);
    spare.iter().for_each(|blocks| _ = world.add(Spec::cpu(*blocks)));
    world
}

fn node_of(world: &World, id: InstanceId) -> usize {
    world.nodes().find(|n| world.id(*n) == Some(id)).unwrap()
}

/// Kills a creditor of the first request and runs until its debtor knows. Returns the number of lost tokens.
fn kill(world: &mut World, node: usize) -> u32 {
    let (before, lost) = (status(world).recoveries, seq(world).lost_tokens);
    world.kill(node);
    world.run_until(|w| status(w).recoveries > before || w.requests[0].is_over());
    assert!(!world.requests[0].is_over(), "killed too late");
    seq(world).lost_tokens - lost
}

fn finish(world: &mut World, what: &str, lost: u32) {
    finish_of(MODEL, world, what, lost);
}

fn finish_of(model: &str, world: &mut World, what: &str, lost: u32) {
    world.run();
    assert_eq!(status(world).recomputed_tokens, u64::from(lost), "{what}: {}", world.describe());
    assert_eq!(status(world).preemptions, 0, "{what}");
    assert_equals_single(what, world, &PoolSpec::golden(model, BLOCK));
    world.run_for(16_000);
    world.check_empty();
}

#[test]
fn only_the_blocks_of_a_dead_creditor_are_computed_again() {
    // Also with windows on some layers, and with one row a token.
    let cases = [(MODEL, RemotePolicy::Ship), (MODEL, RemotePolicy::Fetch)];
    let others = ["gpt_oss", "gemma3", "deepseek_v3", "glm4_moe_lite"].map(|model| (model, RemotePolicy::Ship));
    for (model, remote) in cases.into_iter().chain(others) {
        let mut world = world_of(model, prompt(200, 80, 128), 10, remote, None, &[16]);
        run_to_token(&mut world, 0, 3);
        let before = seq(&world);
        let (&creditor, &blocks) = before.remote_blocks.iter().next().unwrap();
        assert!(before.remote_blocks.len() == 2 && blocks < 13, "{before:?}");
        let dead = node_of(&world, creditor);
        let lost = kill(&mut world, dead);
        assert_eq!(lost, blocks * BLOCK, "{model}, {remote:?}: the oldest blocks are full");
        let after = seq(&world);
        assert_eq!(after.local_blocks, before.local_blocks, "what is here stays");
        assert_eq!(after.remote_blocks.len(), 1, "what another creditor has stays");
        finish_of(model, &mut world, &format!("decoding, {model}, {remote:?}"), lost);
    }
}

/// A creditor dies at every stage of a decode step, also between a layer's queries and partials.
#[test]
fn a_creditor_may_die_inside_a_layer() {
    let (mut inside, mut lossy) = (0, 0);
    for when in 0..20 {
        for seed in [None, Some(when as u64)] {
            let mut world = world(prompt(201, 85, 128), 12, RemotePolicy::Ship, seed, &[16]);
            run_to_token(&mut world, 0, 4);
            (0..when).for_each(|_| world.step());
            let creditors = seq(&world).remote_blocks;
            let dead = node_of(&world, *creditors.keys().nth(when % creditors.len()).unwrap());
            inside += u32::from(world.live(0).expects_frames());
            let lost = kill(&mut world, dead);
            lossy += u32::from(lost > 0);
            finish(&mut world, &format!("killed after {when} steps, {seed:?}"), lost);
        }
    }
    assert!(inside > 10 && lossy > 30, "{inside} were killed inside a layer, {lossy} lost KV");
}

#[test]
fn a_prompt_that_is_half_computed_goes_on_where_it_was() {
    let mut partly = 0;
    for when in 1.. {
        let mut world = world(prompt(202, 88, 128), 6, RemotePolicy::Ship, None, &[16]);
        world.run_until(|w| w.sent("write").0 >= when);
        if !world.requests[0].tokens.is_empty() {
            break;
        }
        let (&creditor, &blocks) = seq(&world).remote_blocks.iter().next().unwrap();
        let dead = node_of(&world, creditor);
        let lost = kill(&mut world, dead);
        assert!(lost <= blocks * BLOCK);
        partly += u32::from(lost > 0 && lost < blocks * BLOCK);
        finish(&mut world, &format!("killed after {when} writes"), lost);
    }
    assert!(partly > 1, "no creditor had written only a part");
}

#[test]
fn two_creditors_may_die() {
    let mut world = world(prompt(203, 84, 128), 10, RemotePolicy::Ship, None, &[10, 10]);
    run_to_token(&mut world, 0, 2);
    let before = seq(&world);
    let dead: Vec<usize> = before.remote_blocks.keys().map(|id| node_of(&world, *id)).collect();
    assert_eq!(dead.len(), 2);
    dead.iter().for_each(|node| world.kill(*node));
    world.run_until(|w| seq(w).remote_blocks.is_empty());
    let lost = seq(&world).lost_tokens;
    assert_eq!(lost, before.remote_blocks.values().sum::<u32>() * BLOCK);
    finish(&mut world, "both", lost);
}

/// The next creditor dies during recovery from the first loss: the new one, or another.
#[test]
fn a_second_loss_during_recovery() {
    for second in 0..3 {
        let mut world = world(prompt(204, 84, 128), 10, RemotePolicy::Ship, None, &[10, 10, 10]);
        run_to_token(&mut world, 0, 2);
        let first: Vec<InstanceId> = seq(&world).remote_blocks.keys().copied().collect();
        let dead = node_of(&world, first[0]);
        let lost = kill(&mut world, dead);
        if second == 0 {
            // While the debtor looks for memory.
            assert!(seq(&world).lost_blocks > 0);
        } else {
            world.run_until(|w| seq(w).lost_tokens < lost && seq(w).lost_blocks == 0);
        }
        assert!(seq(&world).lost_tokens > 0, "it is over already");
        let now = seq(&world).remote_blocks;
        let victim = match second {
            2 => *now.keys().find(|id| !first.contains(id)).expect("a new creditor"),
            _ => first[1],
        };
        let dead = node_of(&world, victim);
        let again = kill(&mut world, dead);
        assert!(again > 0, "{second}: nothing was lost");
        finish(&mut world, &format!("second loss, {second}"), lost + again);
    }
}

/// A damaged write is found by its hash: the range is recomputed, and the live creditor's blocks are released.
#[test]
fn damaged_blocks_are_computed_again() {
    let mut world = world(prompt(205, 84, 128), 8, RemotePolicy::Ship, None, &[16]);
    world.run_until(|w| w.sent("write").0 >= 2);
    world.corrupt_next_write();
    world.run_until(|w| status(w).recoveries > 0);
    let lost = seq(&world).lost_tokens;
    assert!(lost > 0 && world.requests[0].tokens.is_empty());
    world.run();
    assert_eq!(status(&world).recomputed_tokens, u64::from(lost));
    assert_equals_single("damaged", &world, &PoolSpec::golden(MODEL, BLOCK));
    world.check_empty();
}

#[test]
fn refused_blocks_are_computed_again() {
    let mut world = world(prompt(206, 84, 128), 8, RemotePolicy::Ship, None, &[16]);
    run_to_token(&mut world, 0, 2);
    let (&creditor, &blocks) = seq(&world).remote_blocks.iter().next().unwrap();
    let node = node_of(&world, creditor);
    world.break_device(node, lagoon_tests::cluster::Fault::RemoteRequest);
    world.run();
    assert_eq!(status(&world).recomputed_tokens, u64::from(blocks * BLOCK));
    assert_equals_single("refused", &world, &PoolSpec::golden(MODEL, BLOCK));
    world.check_empty();
}

/// A silent creditor costs a step's deadline and its own blocks; the other one's are kept.
#[test]
fn a_silent_creditor_loses_its_own_blocks_only() {
    for remote in [RemotePolicy::Ship, RemotePolicy::Fetch] {
        let mut world = world(prompt(207, 84, 128), 8, remote, None, &[16]);
        run_to_token(&mut world, 0, 2);
        let (&creditor, &blocks) = seq(&world).remote_blocks.iter().next().unwrap();
        let (silent, start) = (node_of(&world, creditor), world.now_ms());
        world.stall(0, silent, 25_000);
        world.run();
        assert!(world.now_ms() < start + 13_000, "a step's deadline, no more");
        let lost = u64::from(blocks * BLOCK);
        assert_eq!((status(&world).recomputed_tokens, status(&world).recoveries), (lost, 1), "{remote:?}");
        assert_equals_single("silent", &world, &PoolSpec::golden(MODEL, BLOCK));
        world.run_for(30_000);
        world.check_empty();
    }
}

/// Other sequences decode while one's lost range is recomputed, a chunk at a time.
#[test]
fn others_decode_meanwhile() {
    let mut world = world(prompt(208, 84, 128), 16, RemotePolicy::Ship, None, &[40]);
    run_to_token(&mut world, 0, 1);
    let beside = world.submit(0, greedy(prompt(209, 5, 128), 60));
    run_to_token(&mut world, beside, 1);
    let creditors = seq(&world).remote_blocks;
    let dead = node_of(&world, *creditors.keys().next().unwrap());
    let lost = kill(&mut world, dead);
    let (output, before) = (world.requests[beside].tokens.len(), world.requests[0].tokens.len());
    world.run_until(|w| seq(w).lost_tokens == 0);
    let meanwhile = world.requests[beside].tokens.len() - output;
    assert_eq!(world.requests[0].tokens.len(), before, "nothing is sampled meanwhile");
    assert!(meanwhile >= 2 && lost == 36, "{meanwhile} tokens beside {lost} lost rows, 15 a step");
    world.run();
    assert_eq!(status(&world).recomputed_tokens, u64::from(lost));
    assert_equals_single("beside", &world, &PoolSpec::golden(MODEL, BLOCK));
    world.run_for(16_000);
    world.check_empty();
}

/// Under a window, lost KV behind it is ignored; lost KV within is recomputed alone only while the window has freed
/// nothing that it depends on.
#[test]
fn under_a_window() {
    let pool = PoolSpec::golden("mistral_window", BLOCK);
    for (tokens, whole) in [(13, false), (60, true)] {
        let spec = |blocks| Spec { step_rows: 10, ..Spec::cpu(blocks) };
        let mut world = World::pool(pool.clone(), None, &[spec(2), spec(16), spec(16)]);
        let request = world.submit(0, greedy(prompt(210, tokens, 144), 20));
        run_to_token(&mut world, request, 1);
        let before = seq(&world);
        let (&creditor, &blocks) = before.remote_blocks.iter().next().unwrap();
        let dead = node_of(&world, creditor);
        world.kill(dead);
        world.run_until(|w| status(w).recoveries > 0);
        let expected = if whole { u64::from(before.tokens - 1) } else { u64::from(blocks * BLOCK) };
        world.run();
        assert_eq!(status(&world).recomputed_tokens, expected, "{tokens} tokens");
        assert_equals_single("window", &world, &pool);
        world.run_for(16_000);
        world.check_empty();
    }
}

/// Without memory for the lost range, the rest is kept until the deadline, and dropped only then.
#[test]
fn what_is_left_waits_for_memory() {
    let specs =
        [Spec::cpu(8), Spec { lend_blocks_max: 7, ..Spec::cpu(7) }, Spec { lend_blocks_max: 7, ..Spec::cpu(7) }];
    // Memory comes in time: the dead creditor is back.
    let mut world = World::pool(PoolSpec::golden(MODEL, BLOCK), None, &specs);
    let request = world.submit(0, greedy(prompt(211, 80, 128), 8));
    run_to_token(&mut world, request, 2);
    let creditor = *seq(&world).remote_blocks.keys().next().unwrap();
    let dead = node_of(&world, creditor);
    let lost = kill(&mut world, dead);
    world.run_for(6_000);
    assert_eq!((seq(&world).lost_tokens, seq(&world).local_blocks), (lost, 8), "it keeps what it has");
    world.restart(dead);
    finish(&mut world, "back in time", lost);

    // Memory does not come in time: the whole sequence is recomputed.
    let mut world = World::pool(PoolSpec::golden(MODEL, BLOCK), None, &specs);
    let request = world.submit(0, greedy(prompt(211, 80, 128), 8));
    run_to_token(&mut world, request, 2);
    let dead = node_of(&world, creditor);
    kill(&mut world, dead);
    world.run_until(|w| status(w).running == 0 || w.requests[request].is_over());
    world.restart(dead);
    world.run();
    let again = status(&world).recomputed_tokens;
    assert!((80..=82).contains(&again), "{again}");
    assert_equals_single("as a whole", &world, &PoolSpec::golden(MODEL, BLOCK));
    world.run_for(16_000);
    world.check_empty();
}
