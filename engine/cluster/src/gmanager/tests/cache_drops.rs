//! Orders to empty prefix caches: whom they go to, and that they are repeated until they are confirmed.

use super::*;
use lagoon_protocol::{AdminBody, AdminCacheDrop, AdminQuery, AdminReply, CacheCounts, CacheTenants};

/// A heartbeat of an instance with a prefix cache that has carried order `done` out.
fn beat(instance: u32, seq: u64, done: u64) -> Heartbeat {
    let cache = CacheCounts { device_blocks: 5, drop_done: done, ..Default::default() };
    Heartbeat { cache: Some(Box::new(cache)), ..heartbeat(instance, seq, 10) }
}

fn order(gm: &mut GManager, instance: u32, now_ms: u64) -> AdminReply {
    order_of(gm, instance, None, now_ms)
}

fn order_of(gm: &mut GManager, instance: u32, of: Option<CacheTenants>, now_ms: u64) -> AdminReply {
    let body = AdminBody::CacheDrop(AdminCacheDrop { instance, of });
    gm.on_admin(&AdminQuery { query: 4, body: Some(body) }, now_ms)
}

/// Orders that were sent: instance and number.
fn sent(gm: &mut GManager) -> Vec<(u32, u64)> {
    let of = |GManagerOutput::Send { to, body }| match body {
        ControlBody::CacheDrop(order) => Some((to.0, order.number)),
        _ => None,
    };
    std::iter::from_fn(|| gm.poll()).filter_map(of).collect()
}

/// Instances 1 and 2 with a prefix cache, 3 without.
fn caches() -> GManager {
    let mut gm = pool(&[10, 10, 10]);
    for instance in [1, 2] {
        gm.on_heartbeat(&beat(instance, 2, 0), 0);
    }
    gm
}

#[test]
fn an_order_is_repeated_until_the_instance_has_carried_it_out() {
    let mut gm = caches();
    let dropped = order(&mut gm, 2, 0).dropped.unwrap();
    assert_eq!(dropped.instances, [2]);
    assert_eq!(sent(&mut gm), [(2, dropped.number)]);
    gm.on_heartbeat(&beat(1, 3, 0), 0);
    assert_eq!(sent(&mut gm), [], "nobody asked the other one");
    gm.on_heartbeat(&beat(2, 3, 0), 0);
    assert_eq!(sent(&mut gm), [(2, dropped.number)]);
    // A connection that broke meanwhile changes nothing.
    gm.on_register(&register(2), 0).unwrap();
    gm.on_heartbeat(&beat(2, 4, 0), 0);
    assert_eq!(sent(&mut gm), [(2, dropped.number)]);
    gm.on_heartbeat(&beat(2, 5, dropped.number), 0);
    gm.on_heartbeat(&beat(2, 6, dropped.number), 0);
    assert_eq!(sent(&mut gm), []);
    let again = order(&mut gm, 2, 0).dropped.unwrap();
    assert!(again.number > dropped.number, "each order has its own number");
}

#[test]
fn all_are_those_that_live_and_have_a_prefix_cache() {
    let mut gm = caches();
    let all = order(&mut gm, 0, 0).dropped.unwrap();
    assert_eq!(all.instances, [1, 2]);
    assert_eq!(sent(&mut gm), [(1, all.number), (2, all.number)]);
    let refused = |gm: &mut GManager, instance, now_ms| order(gm, instance, now_ms).error;
    assert_eq!(refused(&mut gm, 3, 0), "instance 3 reports no prefix cache");
    assert_eq!(refused(&mut gm, 9, 0), "there is no instance 9");
    let late = limits::HEARTBEAT_STALE_MS;
    gm.on_heartbeat(&beat(1, 4, 0), late);
    assert_eq!(refused(&mut gm, 2, late), "instance 2 is not alive");
    assert_eq!(order(&mut gm, 0, late).dropped.unwrap().instances, [1]);
}

/// An order of one tenant's blocks does not replace one of all that the instance has not got.
#[test]
fn orders_are_carried_out_one_after_another() {
    let mut gm = caches();
    let all = order(&mut gm, 1, 0).dropped.unwrap().number;
    let of = Some(CacheTenants { key: Some(7), salt: None });
    let tenant = order_of(&mut gm, 1, of, 0).dropped.unwrap().number;
    let outputs = |gm: &mut GManager| -> Vec<(u64, Option<CacheTenants>)> {
        let of = |GManagerOutput::Send { body, .. }| match body {
            ControlBody::CacheDrop(order) => Some((order.number, order.of)),
            _ => None,
        };
        std::iter::from_fn(|| gm.poll()).filter_map(of).collect()
    };
    assert_eq!(outputs(&mut gm), [(all, None)]);
    gm.on_heartbeat(&beat(1, 3, 0), 0);
    assert_eq!(outputs(&mut gm), [(all, None)]);
    gm.on_heartbeat(&beat(1, 4, all), 0);
    assert_eq!(outputs(&mut gm), [(tenant, of)]);
    gm.on_heartbeat(&beat(1, 5, tenant), 0);
    assert_eq!(outputs(&mut gm), []);
    for _ in 0..limits::CACHE_DROPS_MAX {
        assert_eq!(order(&mut gm, 1, 0).error, "");
    }
    assert!(order(&mut gm, 0, 0).error.contains("16 earlier orders"));
}
