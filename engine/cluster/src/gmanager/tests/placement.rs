//! The request placement map, orders, drains and what operators ask.

use super::*;
use crate::gmanager::orders::Move;
use lagoon_protocol::{
    AdminBody, AdminDrain, AdminMove, AdminOrder, AdminPlacements, AdminPlan, AdminQuery, Load, MoveKvCache,
    MoveOutcome, MoveReason,
};

fn row(debtor: u32, seq: u64, blocks: u32, blocks_sealed: u32) -> PlacementEntry {
    PlacementEntry { debtor, seq, blocks, blocks_sealed }
}

fn rows(gm: &mut GManager, instance: u32, seq: u64, full: bool, rows: &[PlacementEntry]) -> bool {
    let m = Heartbeat { placements: rows.to_vec(), placements_full: full, ..heartbeat(instance, seq, 20) };
    gm.on_heartbeat(&m, 0).placements_wanted
}

/// Two debtors, 1 and 2, and creditor 3; debtor 1's request 7 has 4 blocks at home and 6 on 3.
fn placed() -> GManager {
    let mut gm = pool(&[20, 20, 20]);
    assert!(!rows(&mut gm, 1, 2, true, &[row(1, 7, 4, 3)]));
    assert!(!rows(&mut gm, 2, 2, true, &[]));
    assert!(!rows(&mut gm, 3, 2, true, &[row(1, 7, 6, 6)]));
    gm
}

fn received(gm: &mut GManager, heartbeat: &Heartbeat, now_ms: u64) {
    let _ = gm.on_heartbeat(heartbeat, now_ms);
}

/// Local blocks, those of them that are full, blocks by creditor, and whether some are on their way.
type Request = (u32, u32, Vec<(u32, u32)>, bool);

fn request(gm: &GManager, debtor: u32, seq: u64) -> Option<Request> {
    let r = gm.pool().instances[&InstanceId(debtor)].requests.get(&SeqId(seq))?;
    Some((r.local, r.local_sealed, r.remote.iter().map(|b| (b.creditor.0, b.blocks)).collect(), r.moving))
}

fn polled(gm: &mut GManager) -> Vec<(u32, ControlBody)> {
    std::iter::from_fn(|| gm.poll().map(|GManagerOutput::Send { to, body }| (to.0, body))).collect()
}

fn orders(gm: &mut GManager) -> Vec<(u32, MoveKvCache)> {
    let of = |(to, body)| if let ControlBody::MoveKvCache(m) = body { Some((to, m)) } else { None };
    polled(gm).into_iter().filter_map(of).collect()
}

fn admin(gm: &mut GManager, body: AdminBody, now_ms: u64) -> lagoon_protocol::AdminReply {
    gm.on_admin(&AdminQuery { query: 4, body: Some(body) }, now_ms)
}

const MOVE: AdminMove = AdminMove { debtor: 1, seq: 7, blocks: 0, source: 0, target: 2, dry_run: false, first: None };

#[test]
fn rows_are_gathered_by_debtor() {
    let mut gm = placed();
    assert_eq!(request(&gm, 1, 7), Some((4, 3, vec![(3, 6)], false)));
    // Changes, and nothing else.
    rows(&mut gm, 3, 3, false, &[row(1, 8, 2, 0)]);
    rows(&mut gm, 1, 3, false, &[row(1, 7, 5, 4)]);
    assert_eq!(request(&gm, 1, 7), Some((5, 4, vec![(3, 6)], false)));
    assert_eq!(request(&gm, 1, 8), Some((0, 0, vec![(3, 2)], false)));
    // An older one changes nothing.
    rows(&mut gm, 3, 3, false, &[row(1, 8, 0, 0)]);
    assert_eq!(request(&gm, 1, 8).map(|r| r.2), Some(vec![(3, 2)]));
    rows(&mut gm, 3, 4, false, &[row(1, 8, 0, 0)]);
    assert_eq!(request(&gm, 1, 8), None);
    // All of them at once.
    rows(&mut gm, 3, 5, true, &[row(2, 1, 1, 1)]);
    assert_eq!(request(&gm, 1, 7), Some((5, 4, vec![], false)));
    assert_eq!(request(&gm, 2, 1), Some((0, 0, vec![(3, 1)], false)));
    assert_eq!(gm.placements().count(), 2);
    gm.on_deregister(InstanceId(3));
    assert_eq!(request(&gm, 2, 1), None);
}

#[test]
fn rows_are_wanted_until_they_have_come() {
    let mut gm = pool(&[20, 20]);
    assert!(rows(&mut gm, 1, 2, false, &[row(1, 7, 4, 4)]), "a change of what is not known says nothing");
    assert_eq!(gm.placements().count(), 0);
    assert!(gm.pool().instances[&InstanceId(1)].paused);
    assert!(!rows(&mut gm, 1, 3, true, &[row(1, 7, 4, 4)]));
    assert!(!gm.pool().instances[&InstanceId(1)].paused);
    // A registration starts anew.
    gm.on_register(&register(1), 0).unwrap();
    assert_eq!(gm.placements().count(), 0);
    assert!(rows(&mut gm, 1, 4, false, &[]));
}

#[test]
fn a_debtor_may_come_after_its_creditors_rows() {
    let mut gm = pool(&[20]);
    rows(&mut gm, 1, 2, true, &[row(2, 5, 3, 3), row(9, 5, 1, 1)]);
    gm.on_register(&register(2), 0).unwrap();
    assert_eq!(request(&gm, 2, 5), Some((0, 0, vec![(1, 3)], false)));
}

#[test]
fn an_instance_has_no_more_rows_than_blocks() {
    let mut gm = pool(&[20]);
    let many: Vec<_> = (0..150).map(|seq| row(1, seq, 1, 0)).collect();
    rows(&mut gm, 1, 2, true, &many);
    assert_eq!(gm.placements().count(), 100);
    rows(&mut gm, 1, 3, false, &[row(1, 0, 0, 0), row(1, 1, 2, 2), row(1, 149, 1, 1)]);
    assert_eq!(gm.placements().count(), 100);
}

#[test]
fn an_order_is_given_and_its_request_rests() {
    let mut gm = placed();
    let reply = admin(&mut gm, AdminBody::Move(MOVE), 0);
    assert_eq!(reply.error, "");
    let (to, order) = orders(&mut gm).remove(0);
    assert_eq!((to, order.seq, order.blocks, order.source, order.target), (1, 7, 6, 3, 2));
    assert_eq!((order.target_addr.as_str(), order.reason), ("10.0.0.2:7000", MoveReason::Operator as i32));
    assert_eq!(reply.moves[0].order, order.order);
    assert_eq!(gm.pool().instances[&InstanceId(2)].blocks_incoming, 6);
    assert!(request(&gm, 1, 7).unwrap().3);
    assert!(admin(&mut gm, AdminBody::Move(MOVE), 0).error.contains("moving"));
    // A report of another instance about the order does not count.
    let outcome = MoveOutcome { order: order.order, moved: 6, ..Default::default() };
    gm.on_move_outcome(InstanceId(2), &outcome, 10);
    assert_eq!(gm.pool().instances[&InstanceId(2)].blocks_incoming, 6);
    gm.on_move_outcome(InstanceId(1), &outcome, 10);
    assert_eq!(gm.pool().instances[&InstanceId(2)].blocks_incoming, 0);
    assert!(request(&gm, 1, 7).unwrap().3, "it rests");
    let stats = gm.stats();
    assert_eq!((stats.moves_given, stats.moves_done, stats.moves_failed, stats.blocks_moved), (1, 1, 0, 6));
    // The planner leaves it alone, and another one by hand is taken at once.
    let planned = Move { debtor: InstanceId(1), seq: SeqId(7), blocks: 2, source: InstanceId(1), ..PLANNED };
    assert_eq!(gm.give(planned), None);
    assert_eq!(admin(&mut gm, AdminBody::Move(AdminMove { blocks: 2, ..MOVE }), 20).error, "");
    let again = orders(&mut gm)[0].1.order;
    gm.on_move_outcome(InstanceId(1), &MoveOutcome { order: again, moved: 2, ..Default::default() }, 30);
    for now in (30..=30 + limits::MOVE_BY_HAND_REST_MS).step_by(500) {
        assert!(request(&gm, 1, 7).unwrap().3, "it rests at {now}");
        (1..=3).for_each(|i| received(&mut gm, &heartbeat(i, 10 + now, 20), now));
        gm.tick(now);
    }
    assert!(!request(&gm, 1, 7).unwrap().3);
    assert!(gm.give(planned).is_some());
}

/// Two blocks of debtor 1's request 7 go from creditor 3 to 2.
const PLANNED: Move = Move {
    debtor: InstanceId(1),
    seq: SeqId(7),
    blocks: 2,
    first: None,
    source: InstanceId(3),
    target: InstanceId(2),
    reason: MoveReason::Plan,
};

#[test]
fn operators_get_the_outcomes_of_their_orders() {
    let mut gm = placed();
    let ask = |gm: &mut GManager, order: u64, now: u64| {
        let reply = admin(gm, AdminBody::Order(AdminOrder { order }), now);
        reply.outcome.map(|o| (o.ended, o.blocks, o.moved, o.reason)).ok_or(reply.error)
    };
    let order = |gm: &mut GManager, now: u64| {
        let reply = admin(gm, AdminBody::Move(MOVE), now);
        assert_eq!(reply.error, "");
        reply.moves[0].order
    };
    let first = order(&mut gm, 0);
    assert_eq!(ask(&mut gm, first, 0), Ok((false, 6, 0, String::new())));
    let outcome = MoveOutcome { order: first, moved: 5, reason: "one was in a move".to_owned(), target_lendable: None };
    gm.on_move_outcome(InstanceId(1), &outcome, 5);
    assert_eq!(ask(&mut gm, first, 5), Ok((true, 6, 5, "one was in a move".to_owned())));
    let second = order(&mut gm, 6);
    gm.on_move_outcome(InstanceId(1), &MoveOutcome { order: second, moved: 6, ..outcome }, 7);
    assert_eq!(ask(&mut gm, second, 7), Ok((true, 6, 6, String::new())));
    // Nobody answers; the target leaves.
    let third = order(&mut gm, 8);
    gm.on_deregister(InstanceId(2));
    assert_eq!(ask(&mut gm, third, 9), Ok((true, 6, 0, "i2 left the pool".to_owned())));
    // What an operator did not order is not reported, and only the last ones are remembered.
    let planned = gm.give(Move { target: InstanceId(1), debtor: InstanceId(1), seq: SeqId(9), ..PLANNED }).unwrap();
    assert_eq!(ask(&mut gm, planned, 9), Err(format!("no operator's order has the number {planned}")));
    for now in 10..10 + limits::ADMIN_ORDERS_MAX as u64 {
        assert!(ask(&mut gm, first, now).is_ok() == (now < 8 + limits::ADMIN_ORDERS_MAX as u64), "at {now}");
        let home = AdminMove { target: 0, ..MOVE };
        let order = admin(&mut gm, AdminBody::Move(home), now).moves[0].order;
        gm.on_move_outcome(InstanceId(1), &MoveOutcome { order, moved: 6, ..Default::default() }, now);
    }
}

#[test]
fn the_map_is_shown_by_pages_and_by_request() {
    let mut gm = pool(&[20, 20, 20]);
    for holder in 1..=3 {
        let many: Vec<_> = (0..7).map(|seq| row(1 + holder % 2, seq, holder, 0)).collect();
        rows(&mut gm, holder, 2, true, &many);
    }
    let key = |r: &lagoon_protocol::PlacementRow| {
        (r.instance, r.entry.as_ref().unwrap().debtor, r.entry.as_ref().unwrap().seq)
    };
    let all: Vec<_> = gm.placements().map(|r| key(&r)).collect();
    assert_eq!(all.len(), 21);
    for rows_max in [1, 2, 3, 7, 20, 21, 22] {
        let (mut seen, mut which, mut pages) = (Vec::new(), AdminPlacements::default(), 0);
        loop {
            let (page, more) = gm.page(&which, rows_max);
            assert!(page.len() <= rows_max && (more == (seen.len() + page.len() < 21)));
            seen.extend(page.iter().map(key));
            pages += 1;
            if !more {
                break;
            }
            let (after_instance, after_debtor, after_seq) = *seen.last().unwrap();
            which = AdminPlacements { after_instance, after_debtor, after_seq, ..which };
        }
        assert_eq!((&seen, pages), (&all, 21usize.div_ceil(rows_max)));
    }
    let of = |debtor, seq| {
        gm.page(&AdminPlacements { debtor, seq, ..Default::default() }, 100).0.iter().map(key).collect::<Vec<_>>()
    };
    assert_eq!(of(2, Some(5)), [(1, 2, 5), (3, 2, 5)]);
    assert_eq!(of(1, None).len(), 7);
    assert_eq!(of(0, Some(0)).len(), 3);
    assert_eq!(of(9, None), []);
}

#[test]
fn failures_make_the_rest_longer_and_correct_the_target() {
    let mut gm = placed();
    let mut now = 0;
    let mut rests = Vec::new();
    for beat in 0..4 {
        let seq = 10 + beat;
        (1..=3).for_each(|i| received(&mut gm, &heartbeat(i, seq, 20), now));
        let order = gm.give(Move { blocks: 6, ..PLANNED }).unwrap();
        let refused = MoveOutcome { order, moved: 0, reason: "no room".to_owned(), target_lendable: Some(1) };
        gm.on_move_outcome(InstanceId(1), &refused, now);
        assert_eq!(gm.pool().instances[&InstanceId(2)].blocks_lendable, 1);
        assert_eq!(ask(&mut gm, 1, 1, &[3]), [0; 0], "the target is paused");
        let since = now;
        while request(&gm, 1, 7).unwrap().3 {
            now += 100;
            (1..=3).for_each(|i| received(&mut gm, &heartbeat(i, seq, 20), now));
            gm.tick(now);
        }
        rests.push(now - since);
    }
    assert_eq!(rests, [1, 2, 4, 8].map(|n| n * limits::MOVE_RETRY_MS));
}

#[test]
fn an_order_that_nobody_answers_ends() {
    let mut gm = placed();
    admin(&mut gm, AdminBody::Move(MOVE), 0);
    let end = limits::MOVE_DEADLINE_MS + limits::MOVE_GRACE_MS;
    for now in (0..=end).step_by(500) {
        (1..=3).for_each(|i| received(&mut gm, &heartbeat(i, 10, 20), now));
        gm.tick(now);
        let incoming = gm.pool().instances[&InstanceId(2)].blocks_incoming;
        assert_eq!(incoming, if now < end { 6 } else { 0 }, "at {now}");
    }
    assert_eq!(gm.stats().moves_failed, 1);
    // The target dies: so does the order.
    let now = end + limits::MOVE_RETRY_MS;
    (1..=3).for_each(|i| received(&mut gm, &heartbeat(i, 11, 20), now));
    gm.tick(now);
    assert_eq!(admin(&mut gm, AdminBody::Move(MOVE), now).error, "");
    gm.on_deregister(InstanceId(2));
    assert_eq!(gm.stats().moves_failed, 2);
}

#[test]
fn what_operators_ask_wrongly_is_explained() {
    let mut gm = placed();
    let mut error = |m: AdminMove| {
        let reply = admin(&mut gm, AdminBody::Move(m), 0);
        assert!(reply.query == 4 && reply.moves.is_empty() && (reply.error.is_empty() || !reply.hint.is_empty()));
        reply.error
    };
    assert_eq!(error(AdminMove { seq: 8, ..MOVE }), "instance 1 has no request 8");
    assert_eq!(error(AdminMove { target: 9, ..MOVE }), "the target i9 is not alive");
    assert_eq!(error(AdminMove { blocks: 7, ..MOVE }), "instance 3 has 6 blocks of the request that can move, not 7");
    assert_eq!(error(AdminMove { source: 2, ..MOVE }), "i2 is both where the blocks lie and where they shall lie");
    assert_eq!(error(AdminMove { source: 2, target: 3, ..MOVE }), "i2 has no blocks of i1's s7 that can move");
    let none = gm.on_admin(&AdminQuery { query: 4, body: None }, 0);
    assert_eq!((none.error.is_empty(), none.hint.is_empty()), (false, false));
    assert_eq!(admin(&mut gm, AdminBody::Plan(AdminPlan {}), 0).error, "the planner is off");
    assert!(polled(&mut gm).is_empty());
}

#[test]
fn operators_see_the_map_and_what_a_move_would_do() {
    let mut gm = placed();
    let reply = admin(&mut gm, AdminBody::Placements(AdminPlacements::default()), 0);
    let rows: Vec<_> = reply.placements.iter().map(|r| (r.instance, r.entry.clone().unwrap())).collect();
    assert_eq!(rows, [(1, row(1, 7, 4, 3)), (3, row(1, 7, 6, 6))]);
    // A recall home, dry.
    let recall = AdminMove { target: 0, blocks: 2, dry_run: true, ..MOVE };
    let planned = admin(&mut gm, AdminBody::Move(recall), 0).moves.remove(0);
    assert_eq!((planned.order, planned.source, planned.target, planned.blocks), (0, 3, 1, 2));
    assert!(polled(&mut gm).is_empty());
    assert!(!request(&gm, 1, 7).unwrap().3);
}

#[test]
fn a_drained_instance_is_emptied() {
    let mut gm = placed();
    let drain = |cancel| AdminBody::Drain(AdminDrain { instance: 3, cancel, stop: true });
    assert_eq!(admin(&mut gm, drain(true), 0).error, "instance 3 is not being drained");
    assert_eq!(admin(&mut gm, drain(false), 0).error, "");
    gm.tick(0);
    let sent = polled(&mut gm);
    assert!(
        sent.iter().any(|(to, b)| *to == 3 && matches!(b, ControlBody::DrainOrder(d) if d.on && d.stop)),
        "{sent:?}"
    );
    let moves: Vec<_> = sent
        .iter()
        .filter_map(|(to, b)| if let ControlBody::MoveKvCache(m) = b { Some((*to, m)) } else { None })
        .collect();
    let (to, order) = moves[0];
    // Its debtor has room: it takes its blocks home.
    assert_eq!((moves.len(), to, order.source, order.target, order.blocks), (1, 1, 3, 1, 6));
    assert_eq!((order.target_addr.as_str(), order.reason), ("", MoveReason::Drain as i32));
    assert_eq!(ask(&mut gm, 1, 1, &[]), [2], "nobody is sent there");
    assert!(gm.status(0)[2].heartbeat.as_ref().unwrap().draining);
    // The drain order is repeated until a heartbeat reports the drain.
    gm.tick(limits::DRAIN_MS);
    assert!(polled(&mut gm).iter().any(|(_, b)| matches!(b, ControlBody::DrainOrder(_))));
    gm.on_heartbeat(&Heartbeat { draining: true, ..heartbeat(3, 9, 0) }, limits::DRAIN_MS);
    gm.tick(2 * limits::DRAIN_MS);
    assert!(polled(&mut gm).is_empty());
    // A connection that broke meanwhile changes nothing.
    gm.on_register(&register(3), limits::DRAIN_MS).unwrap();
    assert!(gm.pool().instances[&InstanceId(3)].draining);
    assert_eq!(admin(&mut gm, drain(true), limits::DRAIN_MS).error, "");
    let ends = |sent: &[(u32, ControlBody)]| {
        sent.iter().filter(|(to, b)| *to == 3 && matches!(b, ControlBody::DrainOrder(d) if !d.on && !d.stop)).count()
    };
    assert_eq!(ends(&polled(&mut gm)), 1);
    assert!(!gm.pool().instances[&InstanceId(3)].draining);
    // That message was lost: it is sent again for as long as its heartbeats say that it drains, and nothing leaves it.
    let mut now = 2 * limits::DRAIN_MS;
    for seq in 10..13 {
        now += limits::DRAIN_MS;
        gm.on_heartbeat(&Heartbeat { draining: true, ..heartbeat(3, seq, 0) }, now);
        rows(&mut gm, 3, seq + 10, true, &[row(1, 7, 6, 6)]);
        gm.on_heartbeat(&Heartbeat { draining: true, ..heartbeat(3, seq + 20, 0) }, now);
        assert!(gm.pool().instances[&InstanceId(3)].draining, "by its own heartbeat");
        gm.tick(now);
        let sent = polled(&mut gm);
        assert_eq!(ends(&sent), 1);
        assert!(!sent.iter().any(|(_, b)| matches!(b, ControlBody::MoveKvCache(_))), "{sent:?}");
    }
    gm.on_heartbeat(&heartbeat(3, 90, 20), now);
    gm.tick(now + limits::DRAIN_MS);
    assert_eq!(ends(&polled(&mut gm)), 0);
    assert!(!gm.pool().instances[&InstanceId(3)].draining);
}

/// Debtor 1 is drained: what it borrowed comes home as far as there is room, and its requests stay.
#[test]
fn a_drained_debtor_takes_its_blocks_home() {
    let mut gm = placed();
    let beat = |gm: &mut GManager, seq: u64, blocks_free: u32, queue: &[u32]| {
        let load = Load { batch: 1, queue_blocks: queue.to_vec(), ..Load::default() };
        let m = Heartbeat { draining: true, blocks_free, load: Some(load), ..heartbeat(1, seq, 0) };
        gm.on_heartbeat(&m, 0);
    };
    let home = |gm: &mut GManager, now: u64| -> Vec<(u32, u32, u32, u32)> {
        gm.tick(now);
        let sent = orders(gm).into_iter().filter(|(_, m)| m.reason() == MoveReason::Drain);
        sent.map(|(to, m)| (to, m.source, m.target, m.blocks)).collect()
    };
    // By its own heartbeat alone: another gManager ordered the drain. Its growth and its queue go first.
    let growth = 2 * limits::GROWTH_BLOCKS;
    beat(&mut gm, 3, growth + 5, &[5]);
    assert_eq!(home(&mut gm, 0), []);
    beat(&mut gm, 4, growth + 9, &[5]);
    assert_eq!(home(&mut gm, limits::DRAIN_MS), [(1, 3, 1, 4)]);
    assert_eq!(home(&mut gm, 2 * limits::DRAIN_MS), [], "it is in progress");
    assert!(!gm.pool().instances[&InstanceId(1)].requests.is_empty());
}

#[test]
fn the_last_instance_is_not_drained() {
    let mut gm = pool(&[10]);
    let reply = admin(&mut gm, AdminBody::Drain(AdminDrain { instance: 1, cancel: false, stop: false }), 0);
    assert_eq!(reply.error, "instance 1 is the last one that serves");
    let reply = admin(&mut gm, AdminBody::Drain(AdminDrain { instance: 5, cancel: false, stop: false }), 0);
    assert_eq!(reply.error, "there is no instance 5");
}

#[test]
fn a_round_waits_for_everybody_but_not_for_ever() {
    let config = GManagerConfig { planner: Some(PlannerConfig::default()), ..GManagerConfig::default() };
    let mut gm = GManager::with_config(config);
    for i in 1..=3u64 {
        gm.on_register(&register(i), 0).unwrap();
    }
    let beat = |gm: &mut GManager, i: u32, now: u64| received(gm, &heartbeat(i, 10 + now, 5), now);
    let open = limits::PLAN_MS;
    gm.tick(open);
    assert_eq!(gm.stats().rounds, 0, "nobody reported in this round");
    beat(&mut gm, 1, open);
    beat(&mut gm, 1, open + 1);
    beat(&mut gm, 2, open + 1);
    gm.tick(open + 1);
    assert_eq!(gm.stats().rounds, 0, "the third is missing");
    beat(&mut gm, 3, open + 2);
    gm.tick(open + 2);
    assert_eq!(gm.stats().rounds, 1);
    // The next one: two are late.
    let open = open + 2 + limits::PLAN_MS;
    gm.tick(open);
    beat(&mut gm, 1, open);
    gm.tick(open + limits::PLAN_WAIT_MS - 1);
    assert_eq!(gm.stats().rounds, 1);
    gm.tick(open + limits::PLAN_WAIT_MS);
    assert_eq!(gm.stats().rounds, 2);
    // Who leaves is not waited for.
    let open = open + limits::PLAN_WAIT_MS + limits::PLAN_MS;
    (1..=3).for_each(|i| beat(&mut gm, i, open - 1));
    gm.tick(open);
    beat(&mut gm, 1, open);
    beat(&mut gm, 2, open);
    gm.on_deregister(InstanceId(3));
    gm.tick(open);
    assert_eq!(gm.stats().rounds, 3);
    // Who was silent when the round opened and comes back in it does not stand for another one.
    gm.on_register(&register(4), open).unwrap();
    let open = open + limits::PLAN_MS.max(limits::HEARTBEAT_STALE_MS);
    (1..=2).for_each(|i| beat(&mut gm, i, open - 1));
    gm.tick(open);
    beat(&mut gm, 4, open);
    beat(&mut gm, 1, open);
    gm.tick(open);
    assert_eq!(gm.stats().rounds, 3, "the second is missing");
    beat(&mut gm, 2, open);
    gm.tick(open);
    assert_eq!(gm.stats().rounds, 4);
}
