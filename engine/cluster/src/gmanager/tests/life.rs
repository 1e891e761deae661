//! Silence, fences, and coming back.

use super::*;
use lagoon_protocol::Fenced;

/// Lets time pass in small steps; instances in `alive` send heartbeats. Returns what the gManager sent.
fn pass(gm: &mut GManager, from_ms: u64, to_ms: u64, received: &[u32]) -> Vec<(u32, ControlBody)> {
    let mut sent = Vec::new();
    for now in (from_ms..=to_ms).step_by(250) {
        for id in received {
            assert!(gm.on_heartbeat(&heartbeat(*id, 10 + now, 10), now).known);
        }
        gm.tick(now);
        while let Some(GManagerOutput::Send { to, body }) = gm.poll() {
            sent.push((to.0, body));
        }
    }
    sent
}

fn fences(sent: &[(u32, ControlBody)]) -> Vec<(u32, u32, u64)> {
    let of = |(to, body): &(u32, ControlBody)| match body {
        ControlBody::Fenced(Fenced { instance, incarnation }) => Some((*to, *instance, *incarnation)),
        _ => None,
    };
    sent.iter().filter_map(of).collect()
}

#[test]
fn a_silent_instance_is_fenced_and_all_are_notified_until_its_leases_have_ended() {
    let mut gm = pool(&[10, 10, 10]);
    assert_eq!(fences(&pass(&mut gm, 0, limits::FENCE_MS - 250, &[1, 2])), []);
    let first = fences(&pass(&mut gm, limits::FENCE_MS, limits::FENCE_MS, &[1, 2]));
    assert_eq!(first, [(1, 3, 3), (2, 3, 3)]);
    let later = fences(&pass(&mut gm, limits::FENCE_MS + 250, limits::FENCE_MS + 30_000, &[1, 2]));
    let times = later.len() as u64 / 2;
    assert_eq!(times, limits::LEASE_TTL_MS / limits::FENCE_REPEAT_MS - 1);
    assert_eq!(gm.stats().fenced, 1);
}

#[test]
fn a_fenced_instance_is_notified_and_registers_anew() {
    let mut gm = pool(&[10, 10, 10]);
    let now = limits::FENCE_MS;
    pass(&mut gm, 0, now, &[1, 2]);
    let late = Heartbeat { lent: vec![Debt { debtor: 1, blocks: 5 }], ..heartbeat(3, 99, 50) };
    let ack = gm.on_heartbeat(&late, now);
    assert!(ack.known && ack.fenced);
    assert_eq!(gm.ledger(), [], "what it says does not count");
    assert!(!gm.status(now)[2].alive);
    assert_eq!(ask(&mut gm, 1, 1, &[]), [2]);
    // On a new connection it is the same dead process.
    assert_eq!(gm.on_register(&Register { instance: 3, ..register(3) }, now).unwrap().instance, 3);
    assert!(gm.on_heartbeat(&heartbeat(3, 1, 50), now).fenced);
    // Its next life keeps the number and the address.
    let again = Register { instance: 3, incarnation: 33, ..register(3) };
    assert_eq!(gm.on_register(&again, now).unwrap().instance, 3);
    let ack = gm.on_heartbeat(&Heartbeat { incarnation: 33, ..heartbeat(3, 1, 50) }, now);
    assert!(ack.known && !ack.fenced);
    assert_eq!(ack.pool_blocks_total, 300);
    let advice = gm.on_borrow_query(&BorrowQuery { debtor: 1, ..Default::default() }, now);
    assert_eq!(advice.candidates[0].instance, 3);
    assert!(!gm.on_heartbeat(&heartbeat(3, 100, 1), now).known, "the dead one is not known any more");
}

#[test]
fn nobody_is_fenced_by_a_gmanager_that_slept_or_is_cut_off() {
    // It slept: everybody seems silent for as long.
    let mut gm = pool(&[10, 10, 10]);
    pass(&mut gm, 0, 1_000, &[1, 2, 3]);
    let wakes = 20_000;
    assert_eq!(fences(&pass(&mut gm, wakes, wakes + limits::FENCE_MS - 250, &[1])), []);
    // Two of three have sent nothing since: that may be the gManager's own fault.
    let long = wakes + limits::FENCE_MS;
    assert_eq!(fences(&pass(&mut gm, long, long + 10_000, &[1])), []);
    // Another one reports: the third is dead.
    let fenced = fences(&pass(&mut gm, long + 10_250, long + 11_000, &[1, 2]));
    assert!(fenced.contains(&(1, 3, 3)), "{fenced:?}");
}

#[test]
fn a_process_that_was_replaced_or_left_is_fenced_at_once() {
    let mut gm = pool(&[10, 10, 10]);
    gm.on_register(&Register { incarnation: 22, ..register(2) }, 0).unwrap();
    gm.on_deregister(InstanceId(3));
    let reported = fences(&pass(&mut gm, 0, 0, &[1]));
    assert_eq!(reported, [(1, 2, 2), (3, 2, 2), (1, 3, 3), (4, 3, 3)]);
}

#[test]
fn silence_ends_with_a_heartbeat() {
    let mut gm = pool(&[10, 10]);
    let row = PlacementEntry { debtor: 2, seq: 7, blocks: 3, blocks_sealed: 1 };
    let full = Heartbeat { placements: vec![row], placements_full: true, ..heartbeat(2, 2, 10) };
    gm.on_heartbeat(&full, 0);
    let now = limits::HEARTBEAT_STALE_MS + 10;
    pass(&mut gm, 0, now, &[1]);
    assert!(!gm.pool().instances.contains_key(&InstanceId(2)));
    assert_eq!(gm.on_heartbeat(&heartbeat(1, 9_999, 10), now).pool_blocks_total, 100);
    let ack = gm.on_heartbeat(&heartbeat(2, 3, 20), now);
    assert!(ack.known && !ack.fenced && !ack.placements_wanted);
    assert_eq!(ack.pool_blocks_total, 200);
    assert_eq!(gm.pool().instances[&InstanceId(2)].requests[&SeqId(7)].local, 3, "its rows were kept");
    assert_eq!(ask(&mut gm, 1, 1, &[]), [2]);
}

#[test]
fn a_wake_is_never_missed() {
    // Whatever `next_wake_ms` says, ticking only then gives the same fences as ticking all the time.
    let mut gm = pool(&[10, 10, 10]);
    let mut now = 0;
    let mut fenced_at = None;
    while now < limits::FENCE_MS + 1_000 {
        for id in [1, 2] {
            gm.on_heartbeat(&heartbeat(id, 10 + now, 10), now);
        }
        gm.tick(now);
        while let Some(GManagerOutput::Send { body, .. }) = gm.poll() {
            if matches!(body, ControlBody::Fenced(_)) {
                fenced_at.get_or_insert(now);
            }
        }
        let wake = gm.next_wake_ms().unwrap();
        assert!(wake > now, "a tick at {now} leaves something to do at {wake}");
        now = wake.min(now + 900);
    }
    assert_eq!(fenced_at, Some(limits::FENCE_MS));
}
