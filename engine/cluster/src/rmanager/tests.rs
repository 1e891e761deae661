//! The creditor call by call: lending, writes, seals, refusals, releases.

mod cached;
mod moves;
mod negotiation;
mod stripes;

use super::*;
use lagoon_kv::{BlockState, LeaseHasher, Owner};
use lagoon_protocol::{LeasePurpose, LeaseRelease, LeaseReleased, LeaseRenew, LeaseRenewed, RefuseCode};
use lagoon_types::{Epoch, KvDType, KvRun, LeaseRun, PhysBlock, SeqId};

const ME: InstanceId = InstanceId(1);
const A: InstanceId = InstanceId(2);
const B: InstanceId = InstanceId(3);
const C: InstanceId = InstanceId(4);
const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 1, head_dim: 1, dtype: KvDType::F16 };
const TTL: u64 = limits::LEASE_TTL_MS;

fn config() -> RManagerConfig {
    RManagerConfig {
        blocks_total: 20,
        block_tokens: 4,
        shape: SHAPE,
        lend_blocks_max: 12,
        lend_reserve_blocks: 5,
        lease_ttl_ms: TTL,
        incarnation: 77,
        host: 0,
    }
}

fn manager() -> RManager {
    let mut rm = RManager::new(config()).unwrap();
    rm.set_instance(ME);
    rm
}

fn request(request: u64, blocks: u32, blocks_min: u32) -> LeaseRequest {
    LeaseRequest { request, seq: 1, blocks, blocks_min, ..Default::default() }
}

/// Lends `blocks` to `A`.
fn lend(rm: &mut RManager, id: u64, blocks: u32) -> (LeaseId, Epoch) {
    let grant = rm.on_lease_request(A, &request(id, blocks, blocks), 0).unwrap();
    assert_eq!(grant.blocks, blocks);
    (LeaseId(grant.lease), Epoch(grant.epoch))
}

fn release(rm: &mut RManager, from: InstanceId, lease: LeaseId, epoch: Epoch, entries: u32) {
    let m = LeaseRelease { lease: lease.0, epoch: epoch.0, entries, ..Default::default() };
    let answer = rm.on_peer_control(from, ControlBody::LeaseRelease(m), 0);
    let released = LeaseReleased { lease: lease.0, entries, ..Default::default() };
    assert_eq!(answer, Some(ControlBody::LeaseReleased(released)), "releases are always acknowledged");
}

/// Writes tokens at the end of a layer, as the instance does; bytes are all `fill`.
fn write(rm: &mut RManager, (lease, epoch): (LeaseId, Epoch), layer: u32, tokens: u32, fill: u8) -> Vec<WritePiece> {
    let offset = rm.creditor.written(A, (lease, epoch), layer).unwrap();
    let pieces = rm.creditor.begin_write(A, (lease, epoch), layer, offset, tokens).unwrap();
    rm.commit_write(lease, layer, &vec![fill; tokens as usize * SHAPE.layer_token_bytes()], 0);
    pieces
}

/// Age decides about memory for what does not run yet, and about nothing else.
#[test]
fn nothing_is_lent_to_admit_a_younger_request_than_one_that_waits() {
    let mut rm = manager();
    let asks = |rm: &mut RManager, from: InstanceId, id: u64, waited_ms: Option<u32>| {
        let request = LeaseRequest { waited_ms, ..request(id, 1, 1) };
        rm.on_lease_request(from, &request, 60_000).map_err(|refuse| refuse.blocks_lendable)
    };
    rm.set_waiting(Some(50_000), None);
    assert_eq!(asks(&mut rm, A, 1, Some(9_999)), Err(12), "it has the blocks, and keeps them");
    assert!(asks(&mut rm, A, 2, Some(10_001)).is_ok(), "an older one");
    assert!(asks(&mut rm, A, 3, None).is_ok(), "one that runs");
    // The pool's oldest waiting request waits at A: B's younger requests and moves wait too, A's do not.
    rm.set_waiting(None, Some((A, 40_000)));
    assert!(asks(&mut rm, A, 4, Some(5_000)).is_ok());
    assert!(asks(&mut rm, B, 5, Some(5_000)).is_err());
    assert!(asks(&mut rm, B, 6, Some(20_001)).is_ok());
    let moved = LeaseRequest { purpose: LeasePurpose::Move.into(), ..request(7, 1, 1) };
    assert!(rm.on_lease_request(B, &moved, 60_000).is_err());
    assert!(rm.on_lease_request(A, &LeaseRequest { request: 8, ..moved }, 60_000).is_ok());
}

#[test]
fn configurations_that_cannot_work_are_named() {
    let with = |f: fn(&mut RManagerConfig)| {
        let mut c = config();
        f(&mut c);
        RManager::new(c).unwrap_err()
    };
    assert_eq!(with(|c| c.block_tokens = 0), ConfigError::BlockTokens(0));
    assert_eq!(with(|c| c.lease_ttl_ms = 1), ConfigError::LeaseTtl(1));
    assert!(matches!(with(|c| c.shape.layers = 0), ConfigError::EmptyShape(_)));
    assert!(matches!(with(|c| c.blocks_total = u32::MAX), ConfigError::TooManySlots { .. }));
}

#[test]
fn lending_stops_at_the_cap_and_at_the_reserve() {
    let mut rm = manager();
    assert_eq!(rm.lendable(), 12);
    lend(&mut rm, 1, 10);
    assert_eq!(rm.lendable(), 2, "the cap is 12");
    // Growth may use the reserve, lending may not.
    assert!(rm.pool.allocate_for(SeqId(1), 0..6, None).is_some());
    assert_eq!((rm.available(), rm.lendable()), (4, 0));
    let refuse = rm.on_lease_request(A, &request(2, 1, 1), 0).unwrap_err();
    assert_eq!((refuse.request, refuse.blocks_lendable), (2, 0));
    assert!(rm.pool.allocate_for(SeqId(1), 0..4, None).is_some());
    assert!(rm.pool.allocate_for(SeqId(1), 0..1, None).is_none());
}

#[test]
fn grants_are_between_the_least_and_the_most_wanted() {
    let mut rm = manager();
    assert!(rm.on_lease_request(A, &request(1, 20, 13), 0).is_err());
    assert_eq!(rm.on_lease_request(A, &request(2, 20, 12), 0).unwrap().blocks, 12);
    assert!(rm.on_lease_request(A, &request(3, 0, 0), 0).is_err());
    assert!(rm.on_lease_request(A, &request(4, 1, 2), 0).is_err());
    assert!(rm.on_lease_request(ME, &request(5, 1, 1), 0).is_err(), "nobody borrows from itself");
}

#[test]
fn a_repeated_request_lends_once() {
    let mut rm = manager();
    let grant = rm.on_lease_request(A, &request(1, 4, 4), 0).unwrap();
    assert_eq!(rm.on_lease_request(A, &request(1, 4, 4), 5).unwrap(), grant);
    assert_ne!(rm.on_lease_request(B, &request(1, 4, 4), 5).unwrap().lease, grant.lease);
    assert_eq!(rm.pool.counts().lent, 8);
}

#[test]
fn every_access_is_checked_for_owner_epoch_and_range() {
    let mut rm = manager();
    let (lease, epoch) = lend(&mut rm, 1, 3);
    let run = |offset, len| LeaseRun { lease, epoch, offset, len, first_pos: 100 };
    let mut out = Vec::new();
    rm.creditor.resolve(A, &run(2, 7), &mut out).unwrap();
    assert_eq!(out, [KvRun { base: 2, len: 7, first_pos: 100 }]);
    let refused = |from, run: LeaseRun| {
        let mut out = Vec::new();
        let code = rm.creditor.resolve(from, &run, &mut out).unwrap_err();
        assert_eq!(out, []);
        code
    };
    let stale = Epoch(epoch.0 - 1);
    assert_eq!(refused(B, run(0, 1)), RefuseCode::UnknownLease);
    assert_eq!(refused(A, LeaseRun { lease: LeaseId(1), ..run(0, 1) }), RefuseCode::UnknownLease);
    assert_eq!(refused(A, LeaseRun { epoch: stale, ..run(0, 1) }), RefuseCode::StaleEpoch);
    for (offset, len) in [(0, 13), (12, 1), (0, 0), (u32::MAX, 2), (1, u32::MAX)] {
        assert_eq!(refused(A, run(offset, len)), RefuseCode::OutOfRange);
    }
    assert_eq!(refused(A, LeaseRun { first_pos: u32::MAX, ..run(0, 1) }), RefuseCode::OutOfRange);
    assert_eq!(rm.creditor.begin_write(A, (lease, stale), 0, 0, 1), Err(RefuseCode::StaleEpoch));
    assert_eq!(rm.creditor.begin_write(B, (lease, epoch), 0, 0, 1), Err(RefuseCode::UnknownLease));
    assert_eq!(rm.creditor.begin_write(A, (lease, epoch), 2, 0, 1), Err(RefuseCode::Malformed));
    assert_eq!(rm.creditor.begin_write(A, (lease, epoch), 0, 0, 13), Err(RefuseCode::OutOfRange));
    assert_eq!(rm.creditor.seal(A, (lease, stale), 0, &[0; 32], &mut rm.pool), Err(RefuseCode::StaleEpoch));
    // A release by another instance, or of another epoch, frees nothing.
    release(&mut rm, B, lease, epoch, 3);
    release(&mut rm, A, lease, stale, 3);
    assert_eq!(rm.pool.counts().lent, 3);
}

#[test]
fn layers_are_written_in_order_and_only_once() {
    let mut rm = manager();
    let lease = lend(&mut rm, 1, 3);
    assert_eq!(write(&mut rm, lease, 0, 6, 1), [WritePiece { token0: 0, slot0: 0, tokens: 6 }]);
    let again = rm.creditor.begin_write(A, (lease.0, lease.1), 0, 0, 6);
    assert_eq!(again, Err(RefuseCode::OutOfRange), "a repeated write may hold other bytes");
    assert_eq!(rm.creditor.begin_write(A, (lease.0, lease.1), 0, 7, 1), Err(RefuseCode::OutOfRange));
    assert_eq!(rm.creditor.begin_write(A, (lease.0, lease.1), 1, 6, 1), Err(RefuseCode::OutOfRange));
    write(&mut rm, lease, 1, 2, 1);
    assert_eq!(rm.creditor.written(A, (lease.0, lease.1), 0), Ok(6));
    assert_eq!(rm.creditor.written(A, (lease.0, lease.1), 1), Ok(2));
}

#[test]
fn pieces_follow_the_physical_blocks() {
    let mut rm = manager();
    let own = rm.pool.allocate_for(SeqId(1), 0..20, None).unwrap();
    let odd: Vec<_> = own.iter().copied().filter(|b| b.0 % 2 == 1 || b.0 == 6).collect();
    rm.pool.free(Owner::Own(SeqId(1)), &odd);
    // The longest extent (5, 6, 7) comes first, then the first of the equal ones.
    let (lease, epoch) = lend(&mut rm, 1, 5);
    let piece = |token0, slot0, tokens| WritePiece { token0, slot0, tokens };
    assert_eq!(write(&mut rm, (lease, epoch), 0, 13, 0), [piece(0, 20, 12), piece(12, 4, 1)]);
    assert_eq!(write(&mut rm, (lease, epoch), 0, 7, 0), [piece(0, 5, 3), piece(3, 12, 4)]);
    let mut runs = Vec::new();
    rm.creditor.resolve(A, &LeaseRun { lease, epoch, offset: 10, len: 8, first_pos: 50 }, &mut runs).unwrap();
    let run = |base, len, first_pos| KvRun { base, len, first_pos };
    assert_eq!(runs, [run(30, 2, 50), run(4, 4, 52), run(12, 2, 56)]);
    rm.pool.check();
}

#[test]
fn a_block_is_sealed_by_the_hash_of_its_content() {
    let mut rm = manager();
    let (lease, epoch) = lend(&mut rm, 1, 2);
    let mut debtor = LeaseHasher::new(2, 4, SHAPE.layer_token_bytes());
    let mut whole = Vec::new();
    for layer in 0..2 {
        write(&mut rm, (lease, epoch), layer, 5, 9);
        debtor.write(layer as usize, &[9; 20], &mut whole);
    }
    let (entry, hash) = whole[0];
    let block = PhysBlock(0);
    assert_eq!((whole.len(), entry), (1, 0));
    assert_eq!(rm.creditor.seal(A, (lease, epoch), 0, &[1; 32], &mut rm.pool), Err(RefuseCode::HashMismatch));
    assert_eq!(rm.pool.state(block), BlockState::Filling);
    assert_eq!(
        rm.creditor.seal(A, (lease, epoch), 1, &hash, &mut rm.pool),
        Err(RefuseCode::OutOfRange),
        "it is not whole"
    );
    assert_eq!(rm.creditor.seal(A, (lease, epoch), 0, &hash, &mut rm.pool), Ok(false));
    assert_eq!(rm.creditor.seal(A, (lease, epoch), 0, &hash, &mut rm.pool), Ok(false));
    assert_eq!(rm.creditor.seal(A, (lease, epoch), 0, &[1; 32], &mut rm.pool), Err(RefuseCode::HashMismatch));
    assert_eq!(rm.pool.state(block), BlockState::Sealed);
}

#[test]
fn leading_entries_are_freed_once_and_writes_may_come_after() {
    let mut rm = manager();
    let (lease, epoch) = lend(&mut rm, 1, 4);
    write(&mut rm, (lease, epoch), 0, 6, 0);
    release(&mut rm, A, lease, epoch, 2);
    release(&mut rm, A, lease, epoch, 2);
    release(&mut rm, A, lease, epoch, 1);
    assert_eq!(rm.pool.counts().lent, 2);
    let run = |offset| LeaseRun { lease, epoch, offset, len: 1, first_pos: 0 };
    assert_eq!(rm.creditor.resolve(A, &run(7), &mut Vec::new()), Err(RefuseCode::OutOfRange));
    // Layer 1 was on its way when entries 0 and 1 (tokens 0..8) were freed.
    assert_eq!(write(&mut rm, (lease, epoch), 1, 10, 0), [WritePiece { token0: 8, slot0: 8, tokens: 2 }]);
    assert_eq!(write(&mut rm, (lease, epoch), 0, 4, 0), [WritePiece { token0: 2, slot0: 8, tokens: 2 }]);
    assert_eq!(
        rm.creditor.seal(A, (lease, epoch), 1, &[0; 32], &mut rm.pool),
        Ok(false),
        "a freed entry needs no seal"
    );
    assert_eq!(rm.creditor.resolve(A, &run(8), &mut Vec::new()), Ok(()));
    release(&mut rm, A, lease, epoch, 9);
    assert_eq!(rm.pool.counts().free, 20);
    release(&mut rm, A, lease, epoch, 4);
}

#[test]
fn any_entries_are_freed_and_reads_of_them_refused() {
    let mut rm = manager();
    let (lease, epoch) = lend(&mut rm, 1, 6);
    write(&mut rm, (lease, epoch), 0, 24, 0);
    let release = |rm: &mut RManager, first, entries| {
        let m = LeaseRelease { lease: lease.0, epoch: epoch.0, entries, first };
        let answer = rm.on_peer_control(A, ControlBody::LeaseRelease(m), 0);
        let released = LeaseReleased { lease: lease.0, entries, first };
        assert_eq!(answer, Some(ControlBody::LeaseReleased(released)));
    };
    release(&mut rm, 2, 4);
    release(&mut rm, 3, 4);
    release(&mut rm, 5, 9);
    release(&mut rm, 9, 2);
    assert_eq!(rm.creditor.iter().map(|l| (l.3, l.4)).collect::<Vec<_>>(), [(0, 2), (4, 5)]);
    assert_eq!((rm.pool.counts().lent, rm.heartbeat(0, 0, vec![]).lent[0].blocks), (3, 3));
    let resolve =
        |offset, len| rm.creditor.resolve(A, &LeaseRun { lease, epoch, offset, len, first_pos: 0 }, &mut Vec::new());
    assert_eq!((resolve(0, 8), resolve(16, 4)), (Ok(()), Ok(())));
    for (offset, len) in [(0, 9), (7, 2), (8, 8), (12, 8), (0, 24), (20, 1), (15, 2)] {
        assert_eq!(resolve(offset, len), Err(RefuseCode::OutOfRange), "{offset}+{len}");
    }
    // A layer that was on its way goes around the lost blocks; freed blocks may have another owner by now.
    let piece = |token0, slot0, tokens| WritePiece { token0, slot0, tokens };
    assert_eq!(write(&mut rm, (lease, epoch), 1, 24, 0), [piece(0, 0, 8), piece(16, 16, 4)]);
    assert_eq!(
        rm.creditor.seal(A, (lease, epoch), 3, &[0; 32], &mut rm.pool),
        Ok(false),
        "a freed entry needs no seal"
    );
    assert_eq!(rm.creditor.seal(A, (lease, epoch), 0, &[0; 32], &mut rm.pool), Err(RefuseCode::HashMismatch));
    rm.pool.check();
    release(&mut rm, 0, 6);
    assert_eq!((rm.pool.counts().free, rm.creditor.iter().count()), (20, 0));
}

/// A reply is as long as the unknown leases: repeated ones count once, and only as many count as debtors name at once.
#[test]
fn a_renewal_is_answered_up_to_so_many_leases() {
    let mut rm = manager();
    let mut unknown = |leases: Vec<u64>| {
        let renew = ControlBody::LeaseRenew(LeaseRenew { leases, seq: 3 });
        let answer = rm.on_peer_control(A, renew, 1000);
        let Some(ControlBody::LeaseRenewed(renewed)) = answer else { panic!("{answer:?}") };
        renewed.unknown.len()
    };
    assert_eq!(unknown(vec![7; limits::LEASE_RENEW_LEASES_MAX]), 1);
    assert_eq!(unknown((0..1 << 20).collect()), limits::LEASE_RENEW_LEASES_MAX);
}

#[test]
fn leases_end_when_nobody_renews_them() {
    let mut rm = manager();
    let (old, _) = lend(&mut rm, 1, 2);
    let (kept, _) = lend(&mut rm, 2, 2);
    let renew = LeaseRenew { leases: vec![kept.0, 12345], seq: 3 };
    let answer = rm.on_peer_control(A, ControlBody::LeaseRenew(renew.clone()), 1000);
    assert_eq!(answer, Some(ControlBody::LeaseRenewed(LeaseRenewed { unknown: vec![12345], seq: 3 })));
    let other = rm.on_peer_control(B, ControlBody::LeaseRenew(renew), TTL);
    let unknown = vec![kept.0, 12345];
    assert_eq!(other, Some(ControlBody::LeaseRenewed(LeaseRenewed { unknown, seq: 3 })), "it is not B's to renew");
    assert_eq!(rm.next_wake_ms(), Some(TTL + 1));
    assert_eq!(rm.tick(TTL), []);
    assert_eq!(rm.tick(TTL + 1), [LeaseEnded { debtor: A, lease: old }]);
    assert_eq!(rm.tick(TTL + 1001), [LeaseEnded { debtor: A, lease: kept }]);
    assert_eq!(rm.pool.counts().free, 20);
}

#[test]
fn another_process_under_the_same_number_ends_its_leases() {
    let mut rm = manager();
    assert_eq!(rm.on_peer_hello(A, 500, 0), []);
    let (lease, _) = lend(&mut rm, 1, 2);
    assert_eq!(rm.on_peer_hello(A, 500, 0), []);
    assert_eq!(rm.on_peer_hello(A, 501, 0), [LeaseEnded { debtor: A, lease }]);
    assert_eq!(rm.pool.counts().free, 20);
}

#[test]
fn ids_of_two_processes_do_not_meet() {
    let lease = |incarnation| {
        let mut rm = RManager::new(RManagerConfig { incarnation, ..config() }).unwrap();
        let (lease, epoch) = lend(&mut rm, 1, 1);
        (lease, epoch)
    };
    let (a, b) = (lease(1), lease(2));
    assert_eq!(a, lease(1));
    assert_ne!(a.0, b.0);
    assert_ne!(a.1, b.1);
}

/// Its answer was in progress, or this instance stood still, until the creditor's time to live was over.
#[test]
fn what_was_handed_over_long_ago_is_not_taken() {
    let mut rm = manager();
    let lease = BorrowedLease { creditor: A, quic_addr: String::new(), lease: LeaseId(9), epoch: Epoch(4), blocks: 3 };
    let lost_ms = TTL - TTL / 8;
    assert!(!rm.debtor.take_over(SeqId(1), &lease, (TTL, 1_000), 1_000 + lost_ms), "the creditor may have freed it");
    assert_eq!(rm.debtor.held.iter().count(), 0);
    rm.debtor.decline(&lease, 1_000 + lost_ms);
    assert_eq!(rm.debtor.held.releasing(), 1, "in case it has not");
    assert!(rm.debtor.take_over(SeqId(1), &lease, (TTL, 1_001), 1_000 + lost_ms));
    assert_eq!(rm.debtor.held.iter().count(), 1);
}
