//! The coordinator alone, and in a world of instances with loss, refusals and crashes.

mod world;

use super::{Dgfm, DgfmConfig};
use crate::dgfm::LedgerRow;
use lagoon_protocol::{ControlBody, Frozen, MoveKvCache, MoveOutcome};
use lagoon_types::InstanceId;
use std::collections::BTreeSet;
use world::World;

fn debt(debtor: u32, creditor: u32, blocks: u32) -> LedgerRow {
    LedgerRow { creditor: InstanceId(creditor), debtor: InstanceId(debtor), blocks }
}

fn drain(dgfm: &mut Dgfm) -> Vec<(InstanceId, ControlBody)> {
    std::iter::from_fn(|| dgfm.poll()).collect()
}

fn moves(dgfm: &mut Dgfm) -> Vec<(InstanceId, MoveKvCache)> {
    let of = |(to, body)| if let ControlBody::MoveKvCache(m) = body { Some((to, m)) } else { None };
    drain(dgfm).into_iter().filter_map(of).collect()
}

fn frozen(cycle: u64, blocks: u32, free: u32) -> Frozen {
    Frozen { cycle, blocks, free, seq: 9 }
}

/// Two instances that owe each other ten blocks, with 0 and 3 free.
fn frozen_pair(now: u64) -> (Dgfm, u64) {
    let mut dgfm = Dgfm::new(DgfmConfig::default(), 1);
    dgfm.tick(now, &[debt(1, 2, 10), debt(2, 1, 12)], &BTreeSet::new());
    let sent = drain(&mut dgfm);
    let ControlBody::Freeze(freeze) = &sent[0].1 else { panic!("{sent:?}") };
    assert_eq!((sent.len(), freeze.creditor, freeze.blocks), (2, 2, 10));
    let cycle = freeze.cycle;
    dgfm.on_frozen(InstanceId(1), &frozen(cycle, 10, 0), now);
    assert!(moves(&mut dgfm).is_empty(), "one answer is missing");
    dgfm.on_frozen(InstanceId(2), &frozen(cycle, 10, 3), now);
    (dgfm, cycle)
}

#[test]
fn each_round_goes_once_around_with_what_is_free_at_its_start() {
    let (mut dgfm, cycle) = frozen_pair(0);
    let mut expected = vec![(2, 3), (1, 3), (2, 3), (1, 3), (2, 3), (1, 3), (2, 1), (1, 1)];
    expected.reverse();
    while let Some((to, order)) = moves(&mut dgfm).pop() {
        assert_eq!(Some((to.0, order.blocks)), expected.pop());
        assert_eq!((order.target, order.source, order.cycle), (to.0, 3 - to.0, cycle));
        let outcome = MoveOutcome { order: order.order, moved: order.blocks, ..Default::default() };
        assert!(dgfm.on_move_outcome(to, &outcome, 1));
        if expected.is_empty() {
            break;
        }
    }
    assert!(expected.is_empty());
    let thawed: Vec<_> = drain(&mut dgfm).into_iter().map(|(to, body)| (to.0, body)).collect();
    assert!(thawed.iter().all(|(_, b)| matches!(b, ControlBody::Thaw(t) if t.cycle == cycle)) && thawed.len() == 2);
    assert_eq!((dgfm.stats().completed, dgfm.stats().blocks, dgfm.active()), (1, 20, 0));
}

#[test]
fn debts_below_the_threshold_and_busy_instances_are_in_no_cycle() {
    let config = DgfmConfig::default();
    let mut dgfm = Dgfm::new(config.clone(), 1);
    dgfm.tick(0, &[debt(1, 2, 10), debt(2, 1, config.blocks_min - 1)], &BTreeSet::new());
    assert_eq!(dgfm.poll(), None);
    let pair = [debt(1, 2, 10), debt(2, 1, config.blocks_min)];
    dgfm.tick(config.period_ms, &pair, &[InstanceId(2)].into());
    assert_eq!(dgfm.poll(), None);
    dgfm.tick(2 * config.period_ms, &pair, &BTreeSet::new());
    assert_eq!(drain(&mut dgfm).len(), 2);
}

#[test]
fn a_refusal_a_missing_answer_and_a_death_thaw_everybody() {
    let config = DgfmConfig::default();
    let pair = [debt(1, 2, 10), debt(2, 1, 12)];
    let mut dgfm = Dgfm::new(config.clone(), 1);
    let thaws = |dgfm: &mut Dgfm| {
        drain(dgfm)
            .into_iter()
            .filter(|(_, b)| matches!(b, ControlBody::Thaw(_)))
            .map(|(to, _)| to.0)
            .collect::<Vec<_>>()
    };
    let freeze = |dgfm: &mut Dgfm, now| {
        dgfm.tick(now, &pair, &BTreeSet::new());
        let ControlBody::Freeze(freeze) = dgfm.poll().unwrap().1 else { panic!("no freeze") };
        freeze.cycle
    };
    // A refusal.
    let cycle = freeze(&mut dgfm, 0);
    dgfm.on_frozen(InstanceId(2), &frozen(cycle, 0, 5), 0);
    assert_eq!(thaws(&mut dgfm), [1, 2]);
    // The late answer of the other one is thawed again; the members rest.
    dgfm.on_frozen(InstanceId(1), &frozen(cycle, 10, 5), 1);
    assert_eq!(thaws(&mut dgfm), [1]);
    dgfm.tick(config.period_ms, &pair, &BTreeSet::new());
    assert_eq!(dgfm.poll(), None);
    // A missing answer.
    let (at, _) = (config.rest_ms + config.period_ms, ());
    let cycle = freeze(&mut dgfm, at);
    dgfm.on_frozen(InstanceId(2), &frozen(cycle, 10, 5), at);
    dgfm.tick(at + config.answer_ms, &[], &BTreeSet::new());
    assert_eq!(thaws(&mut dgfm), [1, 2]);
    // A death in the middle of a move: the dead one is sent nothing.
    let (mut dgfm, _) = frozen_pair(0);
    assert_eq!(moves(&mut dgfm).len(), 1);
    dgfm.on_instance_gone(InstanceId(2), 1);
    assert_eq!(thaws(&mut dgfm), [1]);
}

#[test]
fn a_move_that_finds_no_room_yet_is_tried_again_and_not_for_ever() {
    let (mut dgfm, _) = frozen_pair(0);
    let config = DgfmConfig::default();
    let mut now = 0;
    for attempt in 1..=config.tries_max {
        let (to, order) = moves(&mut dgfm).pop().unwrap();
        let nothing = MoveOutcome { order: order.order, moved: 0, reason: "no room".to_owned(), target_lendable: None };
        dgfm.on_move_outcome(to, &nothing, now);
        assert_eq!(dgfm.active(), usize::from(attempt < config.tries_max));
        dgfm.tick(now + config.retry_ms - 1, &[], &BTreeSet::new());
        assert!(attempt == config.tries_max || dgfm.poll().is_none(), "too early");
        now += config.retry_ms;
        dgfm.tick(now, &[], &BTreeSet::new());
    }
    assert_eq!(dgfm.stats().aborted, 1);
}

#[test]
fn no_order_outlives_its_freeze() {
    let (mut dgfm, _) = frozen_pair(5_000);
    let (to, order) = moves(&mut dgfm).pop().unwrap();
    let outcome = MoveOutcome { order: order.order, moved: order.blocks, ..Default::default() };
    dgfm.on_move_outcome(to, &outcome, 9_000);
    let second = moves(&mut dgfm).pop().unwrap().1;
    assert_eq!(u64::from(second.deadline_ms), DgfmConfig::default().freeze_ms - 4_000);
    // An outcome of somebody else, or of an older order, changes nothing.
    dgfm.on_move_outcome(InstanceId(2), &MoveOutcome { order: second.order, moved: 3, ..Default::default() }, 9_001);
    dgfm.on_move_outcome(InstanceId(1), &MoveOutcome { order: order.order, moved: 3, ..Default::default() }, 9_001);
    assert_eq!((moves(&mut dgfm).len(), dgfm.stats().blocks), (0, 3));
    dgfm.tick(15_000, &[], &BTreeSet::new());
    assert_eq!((dgfm.active(), dgfm.stats().aborted), (0, 1));
}

#[test]
fn full_instances_with_a_reserve_of_one_block_bring_everything_home() {
    for members in 2..=6 {
        let mut world = World::circle(u64::from(members), members, 12, 1);
        world.run(120_000);
        assert_eq!(world.borrowed(), 0, "{members} members: {:?}", world.dgfm.stats());
        assert_eq!(world.dgfm.stats().aborted, 0);
    }
}

#[test]
fn whatever_happens_everything_is_covered_once_and_thawed_in_the_end() {
    let mut seen = (0, 0, 0);
    for seed in 0..300 {
        let mut world = World::tangle(seed);
        world.faults = true;
        world.run(40_000);
        (world.faults, world.quiet) = (false, true);
        world.run(20_000);
        world.check_at_rest();
        let stats = world.dgfm.stats();
        seen = (seen.0 + stats.completed, seen.1 + stats.aborted, seen.2 + world.crashes);
    }
    assert!(seen.0 > 100 && seen.1 > 100 && seen.2 > 100, "too little happened: {seen:?}");
}

/// Numbers of free blocks come from instances' `Frozen` messages: sums with them must not wrap.
#[test]
fn free_blocks_do_not_wrap() {
    let mut dgfm = Dgfm::new(DgfmConfig::default(), 1);
    dgfm.tick(0, &[debt(1, 2, 10), debt(2, 1, 12)], &BTreeSet::new());
    let sent = drain(&mut dgfm);
    let ControlBody::Freeze(freeze) = &sent[0].1 else { panic!("{sent:?}") };
    for instance in [1, 2] {
        dgfm.on_frozen(InstanceId(instance), &frozen(freeze.cycle, 10, u32::MAX), 0);
    }
    let mut moved = Vec::new();
    while let Some((to, order)) = moves(&mut dgfm).pop() {
        moved.push(order.blocks);
        let outcome = MoveOutcome { order: order.order, moved: order.blocks, ..Default::default() };
        assert!(dgfm.on_move_outcome(to, &outcome, 1));
    }
    assert_eq!(moved, [10, 10]);
}
