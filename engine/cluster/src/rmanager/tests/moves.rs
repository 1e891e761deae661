//! Reservations for moves, recalls and revocations, call by call.

use super::super::*;
use super::negotiation::{advise, asked, borrowed, grant, outputs, query, refuse};
use super::{A, B, C, ME, SHAPE, manager, request, write};
use lagoon_kv::{BlockState, RemoteEntries};
use lagoon_protocol::{LeasePurpose, LeaseRelease, LeaseRenew, LeaseRevoked, LeaseSealed, RefuseCode, TierRequest};
use lagoon_types::{Epoch, LeaseRun, PhysBlock, SeqId};

const RESERVE: u64 = limits::MOVE_RESERVE_MS;

fn reserve_here(rm: &mut RManager, id: u64, blocks: u32, purpose: LeasePurpose) -> Result<(LeaseId, Epoch), u32> {
    let request = LeaseRequest { purpose: purpose.into(), ..request(id, blocks, 1) };
    let grant = rm.on_lease_request(A, &request, 0).map_err(|r| r.blocks_lendable)?;
    Ok((LeaseId(grant.lease), Epoch(grant.epoch)))
}

/// Writes a whole entry in both layers and seals it; says whether that is acknowledged.
fn write_entry(rm: &mut RManager, lease: (LeaseId, Epoch), entry: u32, now_ms: u64) -> bool {
    let mut hasher = lagoon_kv::BlockHasher::new(2, 4 * SHAPE.layer_token_bytes());
    let bytes = vec![7; 4 * SHAPE.layer_token_bytes()];
    let mut hash = None;
    for layer in 0..2 {
        rm.creditor.begin_write(A, (lease.0, lease.1), layer, entry * 4, 4).unwrap();
        rm.commit_write(lease.0, layer, &bytes, now_ms);
        hash = hasher.update(layer as usize, &bytes);
    }
    rm.creditor.seal(A, (lease.0, lease.1), entry, &hash.unwrap(), &mut rm.pool).unwrap()
}

#[test]
fn a_reservation_that_is_not_written_is_freed_but_for_what_is_sealed() {
    let mut rm = manager();
    let lease = reserve_here(&mut rm, 1, 4, LeasePurpose::Move).unwrap();
    assert!(write_entry(&mut rm, lease, 0, 1_000), "a move's debtor waits for the acknowledgement");
    rm.tick(RESERVE + 1);
    assert_eq!(rm.pool.counts().lent, 4, "the clock starts with the last write");
    let renew = LeaseRenew { leases: vec![lease.0.0], seq: 1 };
    rm.on_peer_control(A, ControlBody::LeaseRenew(renew), RESERVE + 900);
    assert_eq!(rm.next_wake_ms(), Some(1_000 + RESERVE + 1));
    rm.tick(1_000 + RESERVE + 1);
    assert_eq!(rm.creditor.iter().map(|l| (l.3, l.4)).collect::<Vec<_>>(), [(0, 1)], "a renewal is not a write");
    // What is left is a lease like any other.
    assert_eq!(rm.tick(1_000 + 2 * RESERVE), []);
    assert_eq!(rm.pool.counts().lent, 1);
    // One that was never written goes whole.
    reserve_here(&mut rm, 2, 3, LeasePurpose::Move).unwrap();
    rm.tick(RESERVE + 1);
    assert_eq!(rm.pool.counts().lent, 1);
}

#[test]
fn a_lease_that_is_sealed_whole_does_not_expire_early_and_growth_never_does() {
    let mut rm = manager();
    let moved = reserve_here(&mut rm, 1, 2, LeasePurpose::Move).unwrap();
    let grown = reserve_here(&mut rm, 2, 2, LeasePurpose::Growth).unwrap();
    assert!(write_entry(&mut rm, moved, 0, 5) && write_entry(&mut rm, moved, 1, 6));
    assert!(!write_entry(&mut rm, grown, 0, 6), "steps do not wait for seals");
    rm.tick(3 * RESERVE);
    assert_eq!(rm.pool.counts().lent, 4);
    // An entry that is released and one that is sealed make a whole one, too.
    let partly = reserve_here(&mut rm, 3, 2, LeasePurpose::Move).unwrap();
    write_entry(&mut rm, partly, 0, 7);
    let release = LeaseRelease { lease: partly.0.0, epoch: partly.1.0, entries: 2, first: 1 };
    rm.on_peer_control(A, ControlBody::LeaseRelease(release), 8);
    rm.tick(3 * RESERVE);
    assert_eq!(rm.pool.counts().lent, 5);
}

#[test]
fn only_a_swap_may_use_the_reserve() {
    let mut rm = manager();
    rm.pool.allocate_for(SeqId(1), 0..15, None).unwrap();
    assert_eq!(reserve_here(&mut rm, 1, 2, LeasePurpose::Move), Err(0));
    assert_eq!(reserve_here(&mut rm, 2, 2, LeasePurpose::Growth), Err(0));
    reserve_here(&mut rm, 3, 5, LeasePurpose::Swap).unwrap();
    assert_eq!(reserve_here(&mut rm, 4, 1, LeasePurpose::Swap), Err(0));
}

#[test]
fn the_youngest_debts_are_recalled_and_nothing_is_lent_meanwhile() {
    let mut rm = manager();
    let old = rm.on_lease_request(B, &request(1, 4, 4), 0).unwrap();
    let young = reserve_here(&mut rm, 1, 3, LeasePurpose::Growth).unwrap();
    let recalls = rm.creditor.recall(5, false, 10, &rm.pool);
    let asked: Vec<_> = recalls.iter().map(|(to, r)| (*to, r.blocks)).collect();
    assert_eq!(asked, [(A, 3), (B, 2)]);
    assert_eq!(rm.creditor.recall(5, false, 11, &rm.pool), [], "it was asked for already");
    assert_eq!(rm.lendable(), 0);
    let release = |rm: &mut RManager, from, lease: u64, epoch: u64, first, entries| {
        rm.on_peer_control(from, ControlBody::LeaseRelease(LeaseRelease { lease, epoch, entries, first }), 20);
    };
    release(&mut rm, A, young.0.0, young.1.0, 0, 3);
    release(&mut rm, B, old.lease, old.epoch, 0, 1);
    assert_eq!((rm.creditor.recalls_met(), rm.creditor.recalling()), (1, true));
    assert_eq!(rm.unmet_recalls(10 + limits::RECALL_DEADLINE_MS - 1), []);
    let unmet = rm.unmet_recalls(10 + limits::RECALL_DEADLINE_MS);
    assert_eq!(unmet, [Unmet { debtor: B, missing: 1, take: false }]);
    assert!(!rm.creditor.recalling() && rm.lendable() > 0);
}

#[test]
fn what_is_taken_back_is_the_end_of_the_youngest_leases() {
    let mut rm = manager();
    let old = reserve_here(&mut rm, 1, 4, LeasePurpose::Growth).unwrap();
    let young = reserve_here(&mut rm, 2, 2, LeasePurpose::Growth).unwrap();
    write(&mut rm, old, 0, 16, 1);
    let revoked = rm.creditor.revoke(A, 4, 100, &mut rm.pool);
    let taken = |lease: (LeaseId, Epoch), entries| Revoked { debtor: A, lease: lease.0, entries };
    assert_eq!(revoked, [taken(young, 0..2), taken(old, 2..4)]);
    assert_eq!(rm.pool.counts().lent, 2);
    let run = |offset| LeaseRun { lease: old.0, epoch: old.1, offset, len: 1, first_pos: 0 };
    assert_eq!(rm.creditor.resolve(A, &run(7), &mut Vec::new()), Ok(()));
    assert_eq!(rm.creditor.resolve(A, &run(8), &mut Vec::new()), Err(RefuseCode::OutOfRange));
    assert_eq!(rm.creditor.revoked().count(), 2);
    assert_eq!(rm.pool.state(PhysBlock(0)), BlockState::Filling);
}

/// Asks `A` for a reservation at time 0 and returns its number.
fn reserve_there(rm: &mut RManager, blocks: u32) -> (BorrowId, u64) {
    let id =
        rm.debtor.reserve(SeqId(5), Some((A, format!("addr-{A}"))), blocks, LeasePurpose::Move, TierRequest::Any, 0);
    let (to, r) = asked(rm);
    assert_eq!((to, r.blocks, r.blocks_min, r.purpose()), (A, blocks, 1, LeasePurpose::Move));
    (id, r.request)
}

fn sealed(rm: &mut RManager, lease: u64, entries: &[u32]) -> Vec<Output> {
    let m = LeaseSealed { lease, epoch: lease + 1000, entries: entries.to_vec(), blocks: Vec::new() };
    rm.on_peer_control(A, ControlBody::LeaseSealed(m), 10);
    outputs(rm)
}

#[test]
fn a_target_is_asked_once_and_may_grant_fewer() {
    let mut rm = manager();
    let (id, r) = reserve_there(&mut rm, 6);
    grant(&mut rm, A, r, 7, 4, 3);
    let out = outputs(&mut rm);
    assert!(matches!(&out[..], [Output::Reserved { borrow, lease, .. }] if *borrow == id && lease.blocks == 4));
    let (id, r) = reserve_there(&mut rm, 6);
    refuse(&mut rm, A, r, 4);
    let out = outputs(&mut rm);
    let refused = Output::NotReserved { borrow: id, seq: SeqId(5), blocks_lendable: Some(1) };
    assert_eq!(out.last(), Some(&refused), "{out:?}");
    let (id, _) = reserve_there(&mut rm, 6);
    rm.tick(limits::LEASE_ANSWER_MS);
    assert!(outputs(&mut rm).iter().any(|o| matches!(o, Output::NotReserved { borrow, .. } if *borrow == id)));
}

#[test]
fn a_reservation_is_released_before_its_creditor_may_free_it() {
    let mut rm = manager();
    let (_, r) = reserve_there(&mut rm, 4);
    grant(&mut rm, A, r, 7, 4, 3);
    outputs(&mut rm);
    let reported = sealed(&mut rm, 7, &[1]);
    let expected = Output::Sealed { seq: SeqId(5), creditor: A, lease: LeaseId(7), entries: vec![1] };
    assert_eq!(reported, [expected]);
    assert_eq!(sealed(&mut rm, 7, &[1, 9]), [], "once, and only entries that it has");
    rm.note_written(A, LeaseId(7), 500);
    let deadline_ms = 500 + RESERVE - RESERVE / 8;
    rm.tick(deadline_ms - 1);
    assert!(outputs(&mut rm).iter().all(|o| !matches!(o, Output::ReservationLost { .. })));
    rm.tick(deadline_ms);
    let out = outputs(&mut rm);
    assert!(out.contains(&Output::ReservationLost { seq: SeqId(5), creditor: A, lease: LeaseId(7) }), "{out:?}");
    let released: Vec<_> = out
        .iter()
        .filter_map(|o| match o {
            Output::ToPeer { body: ControlBody::LeaseRelease(m), .. } => Some((m.first, m.entries)),
            _ => None,
        })
        .collect();
    assert_eq!(released, [(0, 1), (2, 4)]);
    assert_eq!(rm.debtor.held.iter().map(|h| (h.3, h.4)).collect::<Vec<_>>(), [(1, 2)]);
}

#[test]
fn entries_that_a_creditor_took_are_lost_and_not_released() {
    let mut rm = manager();
    borrowed(&mut rm, 7, 6);
    let revoke = |rm: &mut RManager, from, first, entries| {
        let m = LeaseRevoked { lease: 7, reason: String::new(), first, entries };
        rm.on_peer_control(from, ControlBody::LeaseRevoked(m), 10);
        outputs(rm)
    };
    let lost = |entries| vec![Output::EntriesLost { seq: SeqId(5), creditor: A, lease: LeaseId(7), entries }];
    assert_eq!(revoke(&mut rm, B, 1, 3), [], "it is not B's");
    assert_eq!(revoke(&mut rm, A, 1, 3), lost(1..3));
    assert_eq!(revoke(&mut rm, A, 1, 3), []);
    let span = RemoteEntries { creditor: A, lease: LeaseId(7), epoch: Epoch(1007), first: 0, entries: 2 };
    rm.debtor.held.release(&span, 11);
    assert_eq!((outputs(&mut rm).len(), rm.debtor.held.blocks()), (1, 3));
    assert_eq!(revoke(&mut rm, A, 3, 6), lost(3..6));
    assert_eq!(rm.debtor.held.blocks(), 0);
}

/// A borrow that waits for its last part keeps a granted lease while its creditor is disconnected. If the next connection reports
/// that entries were revoked, the borrow asks other creditors for as many, and releases the rest of the lease.
#[test]
fn a_part_of_a_borrow_that_was_taken_back_is_looked_for_elsewhere() {
    let mut rm = manager();
    let id = rm.debtor.borrow(SeqId(5), 6, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A, B], 0);
    let (_, first) = asked(&mut rm);
    grant(&mut rm, A, first.request, 7, 4, 1);
    let (to, second) = asked(&mut rm);
    assert_eq!((to, second.blocks), (B, 2));
    rm.debtor.on_peer_down(A, 2);
    assert_eq!(rm.on_peer_hello(A, 1, 3), []);
    assert_eq!((rm.debtor.held.blocks(), outputs(&mut rm)), (4, vec![]));
    let taken = LeaseRevoked { lease: 7, reason: String::new(), first: 2, entries: 4 };
    for _ in 0..2 {
        rm.on_peer_control(A, ControlBody::LeaseRevoked(taken.clone()), 4);
    }
    let [Output::ToPeer { instance: A, body: ControlBody::LeaseRelease(back), .. }] = &outputs(&mut rm)[..] else {
        panic!("the rest is given back, once")
    };
    assert_eq!((back.lease, back.first, back.entries, rm.debtor.held.blocks()), (7, 0, 4, 0));
    grant(&mut rm, B, second.request, 8, 2, 5);
    let q = query(&mut rm);
    assert_eq!(q.blocks, 4);
    advise(&mut rm, q.query, &[C], 6);
    let (_, third) = asked(&mut rm);
    grant(&mut rm, C, third.request, 9, 4, 7);
    let out = outputs(&mut rm);
    let [Output::Borrowed { borrow, leases, .. }] = &out[..] else { panic!("{out:?}") };
    assert_eq!((*borrow, leases.iter().map(|l| l.creditor).collect::<Vec<_>>()), (id, vec![B, C]));
}

#[test]
fn a_creditor_that_recalls_is_not_asked_for_a_while() {
    let mut rm = manager();
    rm.debtor.pause(A, 1_000);
    rm.debtor.borrow(SeqId(5), 4, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    assert_eq!(q.exclude, [A.0]);
    advise(&mut rm, q.query, &[A, C], 0);
    assert_eq!(asked(&mut rm).0, C);
    rm.tick(1_000);
    outputs(&mut rm);
    rm.debtor.borrow(SeqId(6), 4, TierRequest::Any, None, 1_000);
    assert_eq!(query(&mut rm).exclude, Vec::<u32>::new());
    assert_ne!(ME, A);
}
