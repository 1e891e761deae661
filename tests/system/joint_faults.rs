//! Joint prefill while instances die, stop for a while or are drained, in every state of its owner and its members.

use crate::joint::{BLOCK, joint, pool, spec};
use lagoon_instance::{Event, JointState, PeerKey};
use lagoon_protocol::{AdminBody, AdminDrain, ControlBody, Joint, JointBody, JointEnd, JointMember, JointPrompt};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Spec, World, greedy};

/// Tokens of the prompt, and of a stripe.
const TOKENS: usize = 130;
const STRIPE: u64 = 2 * BLOCK as u64;

fn part(world: &World, node: usize) -> Option<JointState> {
    world.instance(node)?.joint_states().first().copied()
}

fn is_in(world: &World, node: usize, stage: &str) -> bool {
    part(world, node).is_some_and(|part| part.stage == stage && part.owns == (node == 0))
}

/// Tokens that a member has computed.
fn computed(world: &World, node: usize) -> u64 {
    u64::from(part(world, node).map_or(0, |part| part.computed_tokens)) + joint(world, node).computed_tokens
}

fn drain(world: &mut World, node: usize) {
    let instance = world.id(node).unwrap().0;
    world.admin(AdminBody::Drain(AdminDrain { instance, cancel: false, stop: true }));
}

/// A state in which something happens, reached from the request on.
type State = (&'static str, fn(&World) -> bool);

const STATES: [State; 9] = [
    ("the owner looks for candidates", |w| is_in(w, 0, "Finding")),
    ("the owner asks", |w| is_in(w, 0, "Asking")),
    ("the owner waits for leases", |w| is_in(w, 0, "Granting")),
    ("a member connects", |w| is_in(w, 1, "Meeting")),
    ("a member has leased", |w| is_in(w, 1, "Granted")),
    ("all begin", |w| is_in(w, 0, "Running") && is_in(w, 1, "Running") && computed(w, 1) == 0),
    ("a member has computed a half", |w| is_in(w, 1, "Running") && computed(w, 1) >= 2 * STRIPE),
    ("a member has computed all", |w| is_in(w, 0, "Running") && part(w, 1).is_none() && joint(w, 1).joined == 1),
    ("the owner ends it", |w| is_in(w, 0, "Ending")),
];

/// A world in a state. For the last one, node 3 has died.
fn brought_to((name, reached): State) -> World {
    let slow = Spec { step_ms: 3, ..spec() };
    let mut world = World::pool(pool(), None, &vec![slow; 4]);
    world.submit(0, greedy(prompt(7, TOKENS, 128), 5));
    if name == "the owner ends it" {
        world.run_until(|w| (1..4).all(|node| computed(w, node) >= STRIPE));
        world.kill(3);
    }
    world.run_until(|w| reached(w) || w.requests[0].is_over());
    assert!(!world.requests[0].is_over(), "{name}: it was not reached");
    world
}

/// The answer is that of one instance, and nothing stays. Returns the tokens that the owner computed again.
fn ends_well(what: &str, world: &mut World) -> u64 {
    world.run();
    assert_equals_single(what, world, &pool());
    let again = world.live(0).status().recomputed_tokens;
    world.run_for(20_000);
    world.check_empty();
    again
}

/// Whenever a member dies, what it had computed is computed again, and nothing else.
#[test]
fn a_member_that_dies_costs_what_it_has_computed() {
    for state in STATES {
        for dead in [1, 2] {
            let mut world = brought_to(state);
            let what = format!("{}, node {dead} dies", state.0);
            // What node 3 had computed when it died is not known any more: as much as the others, but for a stripe.
            let before = if world.is_alive(3) { 0..=0 } else { STRIPE..=computed(&world, dead) + 2 * STRIPE };
            let known = computed(&world, dead);
            world.kill(dead);
            let again = ends_well(&what, &mut world);
            println!("{what}: it had computed {known} tokens, {again} are computed again");
            // The member may have been in a step of one stripe.
            let (least, most) = (known + before.start(), known + before.end() + STRIPE);
            assert!((least..=most).contains(&again), "{what}: {again} tokens again, not {least} to {most}");
            if joint(&world, 0).begun == 0 || state.0 == "a member has computed all" && dead == 1 {
                assert_eq!(again, known, "{what}");
            }
        }
    }
}

#[test]
fn an_owner_that_dies_leaves_nothing_in_any_state() {
    for state in STATES {
        let mut world = brought_to(state);
        world.kill(0);
        world.run_for(20_000);
        for node in world.nodes().filter(|node| world.is_alive(*node)) {
            assert_eq!(part(&world, node), None, "{}, node {node}", state.0);
        }
        world.check_empty();
    }
}

/// Instances whose loop stops for a while, until others think that they have failed, or not.
#[test]
fn an_instance_that_stops_for_a_while_delays_it_or_ends_it() {
    for state in STATES {
        for (node, ms) in [(0, 700), (0, 6_000), (1, 700), (1, 6_000), (2, 6_000)] {
            let mut world = brought_to(state);
            let what = format!("{}, node {node} stops for {ms} ms", state.0);
            world.pause(node, ms);
            let again = ends_well(&what, &mut world);
            let joint = joint(&world, 0);
            println!("{what}: {again} tokens again, {joint:?}");
            assert!(again <= TOKENS as u64 * 3 / 4 + STRIPE, "{what}: {again} tokens are more than the others had");
            assert!(
                joint.begun == joint.completed + joint.ended && joint.begun + joint.alone <= 1,
                "{what}: {joint:?}"
            );
        }
    }
}

/// An instance that is drained computes its part to the end.
#[test]
fn an_instance_that_is_drained_finishes_its_part() {
    for state in STATES {
        for node in [0, 1, 2] {
            let mut world = brought_to(state);
            let what = format!("{}, node {node} is drained", state.0);
            let before = world.live(0).status().recomputed_tokens;
            let has_begun = is_in(&world, 0, "Running");
            let is_ending = is_in(&world, 0, "Ending");
            drain(&mut world, node);
            let again = ends_well(&what, &mut world);
            let joint = joint(&world, 0);
            println!("{what}: {again} tokens again, {joint:?}");
            if !is_ending {
                assert_eq!((again, joint.ended), (before, 0), "{what}: {joint:?}");
                assert!(!has_begun || joint.completed == 1, "{what}: {joint:?}");
            }
        }
    }
}

/// Of a prompt so long that it comes in several messages, the rest never comes.
#[test]
fn a_part_of_a_prompt_is_forgotten() {
    for end in ["time", "the owner dies", "the owner ends it", "drain"] {
        let mut world = World::pool(pool(), None, &vec![spec(); 2]);
        world.submit(0, greedy(prompt(7, 60, 128), 2));
        world.run();
        let message = |world: &World, body: JointBody| {
            let joint = Joint { owner: world.id(0).unwrap().0, job: 77, body: Some(body) };
            Event::Control { peer: PeerKey(1), body: ControlBody::Joint(Box::new(joint)) }
        };
        let member = |node: usize| JointMember { instance: world.id(node).unwrap().0, quic_addr: String::new() };
        let first = JointPrompt {
            total: 80,
            first: 0,
            tokens: prompt(9, 40, 128),
            members: vec![member(0), member(1)],
            known_blocks: 0,
            stripe_blocks: 2,
            cache_salt: String::new(),
        };
        let first = message(&world, JointBody::Prompt(first));
        world.inject(1, first);
        assert!(is_in(&world, 1, "Gathering"), "{end}");
        match end {
            "the owner dies" => world.kill(0),
            "the owner ends it" => {
                let over = message(&world, JointBody::End(JointEnd { reason: "a test".to_owned() }));
                world.inject(1, over);
            }
            "drain" => drain(&mut world, 1),
            _ => {}
        }
        world.run_for(if matches!(end, "time" | "drain") { 5_000 } else { 200 });
        assert_eq!(part(&world, 1), None, "{end}");
        world.run_for(20_000);
        world.check_empty();
    }
}
