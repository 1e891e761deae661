//! Roles that are given, repeated, refused, and known again after a restart.

use super::*;
use crate::SwitchedBy;
use lagoon_protocol::{AdminBody, AdminDrain, AdminQuery, AdminReply, AdminRole, RoleState, Workers};

/// Of an instance that may change its role.
fn beat(instance: u32, seq: u64, role: Role, becoming: Option<Role>) -> Heartbeat {
    order_received(0, instance, seq, role, becoming)
}

/// The same, of one that has received the order with a number (1, 2, …).
fn order_received(order_received: u64, instance: u32, seq: u64, role: Role, becoming: Option<Role>) -> Heartbeat {
    let state = RoleState { now: role.into(), becoming: becoming.map(Into::into), order_received };
    Heartbeat { role: Some(Box::new(state)), ..heartbeat(instance, seq, 10) }
}

/// Instances 1, 2, … with these roles.
fn roles(roles: &[Role]) -> GManager {
    let mut gm = GManager::default();
    for (i, role) in (1u32..).zip(roles) {
        gm.on_register(&Register { role: (*role).into(), ..register(i.into()) }, 0).unwrap();
        gm.on_heartbeat(&beat(i, 1, *role, None), 0);
    }
    sent(&mut gm);
    gm
}

fn order(gm: &mut GManager, instance: u32, role: Role, now_ms: u64) -> AdminReply {
    let body = AdminBody::Role(AdminRole { instance, role: role.into() });
    gm.on_admin(&AdminQuery { query: 4, body: Some(body) }, now_ms)
}

/// Orders, and whom lists of workers name, each with whom it was sent to.
type Sent = (Vec<(u32, Role)>, Vec<(u32, Vec<u32>)>);

/// What is sent.
fn sent(gm: &mut GManager) -> Sent {
    let (mut orders, mut lists) = (Vec::new(), Vec::new());
    while let Some(GManagerOutput::Send { to, body }) = gm.poll() {
        match body {
            ControlBody::RoleOrder(order) => orders.push((to.0, order.role())),
            ControlBody::Workers(Workers { workers, .. }) => {
                lists.push((to.0, workers.iter().map(|w| w.instance).collect()));
            }
            _ => {}
        }
    }
    (orders, lists)
}

fn shown(gm: &GManager, instance: usize) -> (Role, Option<Role>) {
    let row = &gm.status(0)[instance - 1];
    let becoming = row.heartbeat.as_ref().and_then(|h| h.role.as_deref()?.becoming);
    (row.role(), becoming.map(|to| Role::try_from(to).unwrap()))
}

use Role::{Decode, Instance, Kv, Prefill};

#[test]
fn an_order_is_repeated_until_the_instance_agrees_and_counts_at_once() {
    let mut gm = roles(&[Prefill, Prefill, Decode]);
    assert_eq!(order(&mut gm, 1, Decode, 0).error, "");
    assert_eq!(shown(&gm, 1), (Prefill, Some(Decode)), "before its own heartbeat");
    assert_eq!(sent(&mut gm).0, [(1, Decode)]);
    gm.tick(limits::ROLE_REPEAT_MS - 1);
    assert_eq!(sent(&mut gm).0, []);
    assert_eq!(gm.next_wake_ms().map(|at| at <= limits::ROLE_REPEAT_MS), Some(true));
    gm.tick(limits::ROLE_REPEAT_MS);
    assert_eq!(sent(&mut gm).0, [(1, Decode)], "it was not received");
    // Prompts go elsewhere, and the list is the new one's too.
    gm.on_heartbeat(&order_received(1, 1, 2, Prefill, Some(Decode)), 600);
    gm.on_heartbeat(&beat(3, 2, Decode, None), 600);
    assert_eq!(sent(&mut gm), (vec![], vec![(1, vec![2]), (3, vec![2])]));
    gm.tick(2 * limits::ROLE_REPEAT_MS);
    assert_eq!(sent(&mut gm).0, []);
    gm.on_heartbeat(&order_received(1, 1, 3, Decode, None), 1_200);
    assert_eq!(shown(&gm, 1), (Decode, None));
    // Once more is nothing new.
    assert_eq!(order(&mut gm, 1, Decode, 1_200).error, "");
    gm.on_heartbeat(&order_received(2, 1, 4, Decode, None), 1_300);
    gm.tick(3 * limits::ROLE_REPEAT_MS);
    sent(&mut gm);
    assert_eq!(order(&mut gm, 1, Prefill, 1_500).error, "");
    let switches: Vec<_> = gm.role_switches().collect();
    let by = SwitchedBy::Operator;
    assert_eq!(switches, [(Prefill, Decode, by, 1), (Decode, Prefill, by, 1)]);
    // It is listed as a worker again when its heartbeat has the role, not before.
    gm.on_heartbeat(&order_received(3, 1, 5, Decode, Some(Prefill)), 1_600);
    gm.on_heartbeat(&beat(3, 3, Decode, None), 1_600);
    assert_eq!(sent(&mut gm).1, [(1, vec![2]), (3, vec![2])], "the list is also for one that reads its last");
    gm.on_heartbeat(&order_received(3, 1, 6, Prefill, None), 1_700);
    gm.on_heartbeat(&beat(3, 4, Decode, None), 1_700);
    assert_eq!(sent(&mut gm).1, [(3, vec![1, 2])]);
}

#[test]
fn an_order_that_is_taken_back_is_taken_back_everywhere() {
    let mut gm = roles(&[Prefill, Prefill, Decode]);
    order(&mut gm, 1, Decode, 0);
    order(&mut gm, 1, Prefill, 0);
    assert_eq!(sent(&mut gm).0, [(1, Decode), (1, Prefill)]);
    // It received the first only.
    gm.on_heartbeat(&order_received(1, 1, 2, Prefill, Some(Decode)), 100);
    assert_eq!(shown(&gm, 1), (Prefill, Some(Prefill)), "it is not taken back yet");
    gm.tick(limits::ROLE_REPEAT_MS);
    assert_eq!(sent(&mut gm).0, [(1, Prefill)]);
    gm.on_heartbeat(&order_received(2, 1, 3, Prefill, None), 600);
    assert_eq!(shown(&gm, 1), (Prefill, None));
    gm.tick(2 * limits::ROLE_REPEAT_MS);
    assert_eq!(sent(&mut gm).0, []);
}

/// Its last heartbeat may be older than an order that it has received.
#[test]
fn one_that_has_not_confirmed_its_orders_replaces_nobody() {
    let mut gm = roles(&[Prefill, Prefill, Decode]);
    order(&mut gm, 1, Decode, 0);
    order(&mut gm, 1, Prefill, 0);
    gm.on_heartbeat(&beat(1, 2, Prefill, None), 100);
    refuses(&mut gm, 2, Decode, "the last one that computes prompts for others");
    gm.on_heartbeat(&order_received(1, 1, 3, Prefill, Some(Decode)), 200);
    refuses(&mut gm, 2, Decode, "the last one that computes prompts for others");
    // It is none until it has changed back.
    gm.on_heartbeat(&order_received(1, 1, 4, Decode, None), 300);
    refuses(&mut gm, 2, Decode, "the last one that computes prompts for others");
    gm.on_heartbeat(&order_received(2, 1, 5, Decode, Some(Prefill)), 400);
    refuses(&mut gm, 2, Decode, "the last one that computes prompts for others");
    gm.on_heartbeat(&order_received(2, 1, 6, Prefill, None), 500);
    assert_eq!(order(&mut gm, 2, Decode, 500).error, "");
    // To keep its role is an order like any other, and one that changes nothing.
    order(&mut gm, 3, Decode, 500);
    assert_eq!(shown(&gm, 3), (Decode, None));
    gm.on_heartbeat(&order_received(3, 2, 2, Decode, None), 600);
    assert_eq!(order(&mut gm, 2, Prefill, 600).error, "");
}

/// A fence ends a life, not the orders of the process.
#[test]
fn an_order_outlives_a_fence_and_not_its_process() {
    let mut gm = roles(&[Prefill, Prefill, Decode, Decode]);
    for i in [1, 2] {
        assert_eq!(order(&mut gm, i, Instance, 0).error, "");
    }
    sent(&mut gm);
    for (seq, now_ms) in (2..).zip((0..=limits::FENCE_MS).step_by(250)) {
        for i in [3, 4] {
            gm.on_heartbeat(&beat(i, seq, Decode, None), now_ms);
        }
        gm.tick(now_ms);
    }
    let now_ms = limits::FENCE_MS + 250;
    assert_eq!(gm.stats().fenced, 2);
    sent(&mut gm);
    // The first goes on in its next life, the second was started anew at the same address.
    let again = |incarnation, number| Register {
        role: Prefill.into(),
        incarnation,
        instance: number,
        ..register(number.into())
    };
    gm.on_register(&again(crate::next_incarnation(1), 1), now_ms).unwrap();
    gm.on_register(&again(77, 2), now_ms).unwrap();
    for (instance, incarnation) in [(1, crate::next_incarnation(1)), (2, 77)] {
        gm.on_heartbeat(&Heartbeat { incarnation, ..beat(instance, 1, Prefill, None) }, now_ms);
    }
    assert_eq!((shown(&gm, 1), shown(&gm, 2)), ((Prefill, Some(Instance)), (Prefill, None)));
    gm.tick(now_ms + limits::ROLE_REPEAT_MS);
    assert_eq!(sent(&mut gm).0, [(1, Instance)]);
    let incarnation = crate::next_incarnation(1);
    gm.on_heartbeat(&Heartbeat { incarnation, ..order_received(1, 1, 2, Instance, None) }, now_ms + 1_000);
    assert_eq!(shown(&gm, 1), (Instance, None));
}

#[test]
fn another_gmanager_learns_what_each_becomes() {
    let mut gm = GManager::new(1_000);
    for (i, role) in [(1, Prefill), (2, Prefill), (3, Decode)] {
        gm.on_register(&Register { role: role.into(), instance: i, ..register(i.into()) }, 0).unwrap();
    }
    gm.on_heartbeat(&beat(1, 7, Prefill, Some(Decode)), 0);
    gm.on_heartbeat(&beat(2, 7, Prefill, None), 0);
    gm.on_heartbeat(&beat(3, 7, Decode, None), 0);
    assert_eq!(shown(&gm, 1), (Prefill, Some(Decode)));
    let (orders, lists) = sent(&mut gm);
    assert_eq!((orders, lists.last()), (vec![], Some(&(3, vec![2]))));
    gm.tick(5_000);
    assert_eq!(sent(&mut gm).0, [], "it goes on by itself");
    // A registration of the same process, with its role of now, changes nothing.
    gm.on_register(&Register { role: Prefill.into(), instance: 1, ..register(1) }, 5_000).unwrap();
    gm.on_heartbeat(&beat(1, 8, Prefill, Some(Decode)), 5_000);
    assert_eq!(shown(&gm, 1), (Prefill, Some(Decode)));
}

/// It may be leaving its role since another gManager's time.
#[test]
fn one_that_has_only_registered_replaces_nobody() {
    let mut gm = roles(&[Prefill, Decode]);
    gm.on_register(&Register { role: Decode.into(), ..register(3) }, 0).unwrap();
    refuses(&mut gm, 2, Prefill, "the last one that takes requests");
    gm.on_heartbeat(&beat(3, 1, Decode, Some(Prefill)), 0);
    refuses(&mut gm, 2, Prefill, "the last one that takes requests");
    gm.on_heartbeat(&beat(3, 2, Decode, None), 0);
    assert_eq!(order(&mut gm, 2, Prefill, 0).error, "");
}

/// Its certificate lets it lend, whatever its heartbeats say.
#[test]
fn a_kv_node_takes_no_other_role_by_itself() {
    let mut gm = roles(&[Instance, Kv]);
    for role in [Instance, Decode, Prefill] {
        gm.on_heartbeat(&beat(2, 2, role, None), 0);
        assert_eq!(shown(&gm, 2).0, Kv, "{role:?}");
        gm.on_heartbeat(&beat(2, 3, Kv, Some(role)), 0);
        refuses(&mut gm, 1, Prefill, "the last one that takes requests");
    }
}

fn refuses(gm: &mut GManager, instance: u32, role: Role, words: &str) {
    let reply = order(gm, instance, role, 0);
    assert!(reply.error.contains(words) && !reply.hint.is_empty(), "{reply:?} should say {words:?}");
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let mut gm = roles(&[Prefill, Decode, Kv, Instance]);
    gm.on_heartbeat(&Heartbeat { role: None, ..beat(4, 2, Instance, None) }, 0);
    refuses(&mut gm, 9, Decode, "there is no instance 9");
    refuses(&mut gm, 1, Kv, "no instance becomes a kv node");
    refuses(&mut gm, 3, Decode, "instance 3 is a kv node");
    refuses(&mut gm, 4, Decode, "instance 4 cannot change its role: its KV (cpu) is not in memory that others read");
    // It does both, but nobody could read what it computed.
    refuses(&mut gm, 1, Decode, "the last one that computes prompts for others");
    gm.on_deregister(InstanceId(4));
    refuses(&mut gm, 1, Decode, "the last one that computes prompts for others");
    refuses(&mut gm, 2, Prefill, "the last one that takes requests");
    // One that does both may follow; while it does not do so yet, it is no replacement.
    assert_eq!(order(&mut gm, 1, Instance, 0).error, "");
    refuses(&mut gm, 2, Prefill, "the last one that takes requests");
    gm.on_heartbeat(&order_received(1, 1, 2, Instance, None), 0);
    assert_eq!(order(&mut gm, 2, Prefill, 0).error, "");
    refuses(&mut gm, 1, Prefill, "the last one that takes requests");
    gm.on_register(&register(5), 0).unwrap();
    refuses(&mut gm, 5, Decode, "nothing is known of instance 5 yet");
    gm.on_heartbeat(&beat(5, 1, Instance, None), 0);
    let drain = AdminBody::Drain(AdminDrain { instance: 5, ..AdminDrain::default() });
    gm.on_admin(&AdminQuery { query: 1, body: Some(drain) }, 0);
    refuses(&mut gm, 5, Decode, "instance 5 is being drained");
    let reply = order(&mut gm, 1, Decode, limits::HEARTBEAT_STALE_MS);
    assert!(reply.error.contains("is not alive"), "{reply:?}");
    assert_eq!(sent(&mut gm).0, [(1, Instance), (2, Prefill)]);
}
