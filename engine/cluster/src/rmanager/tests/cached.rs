//! Cached blocks: creditors that keep and lease them, and searches for them.

use super::super::*;
use super::negotiation::{asked, outputs, query};
use super::{A, B, C, ME, SHAPE, TTL, lend, manager, release, request, write};
use lagoon_kv::{BlockHash, LeaseHasher, Owner};
use lagoon_protocol::{BorrowAdvice, CachedRun, LeaseHashes, LeaseRelease, LeaseRevoked};
use lagoon_types::{Epoch, PhysBlock, SeqId};

fn hashes(of: std::ops::Range<u8>) -> Vec<BlockHash> {
    of.map(|n| BlockHash([n; 32])).collect()
}

fn name(rm: &mut RManager, from: InstanceId, (lease, epoch): (LeaseId, Epoch), first: u32, of: &[BlockHash]) {
    let m = LeaseHashes { lease: lease.0, epoch: epoch.0, first, depth: first, hashes: BlockHash::write(of) };
    assert_eq!(rm.on_peer_control(from, ControlBody::LeaseHashes(m), 0), None);
}

/// Writes and seals whole entries.
fn fill(rm: &mut RManager, key: (LeaseId, Epoch), entries: u32) {
    let mut hasher = LeaseHasher::new(2, 4, SHAPE.layer_token_bytes());
    let mut whole = Vec::new();
    for layer in 0..2 {
        write(rm, key, layer, 4 * entries, 7);
        hasher.write(layer as usize, &vec![7; 4 * entries as usize * SHAPE.layer_token_bytes()], &mut whole);
    }
    for (entry, hash) in whole {
        rm.creditor.seal(A, key, entry, &hash, &mut rm.pool).unwrap();
    }
}

fn cached_request(id: u64, of: &[BlockHash]) -> LeaseRequest {
    let blocks = u32::try_from(of.len()).unwrap();
    LeaseRequest { hashes: BlockHash::write(of), ..request(id, blocks, 1) }
}

#[test]
fn lent_blocks_stay_cached_and_are_leased_again_sealed() {
    let mut rm = manager();
    let (key, of) = (lend(&mut rm, 1, 4), hashes(0..4));
    // Hashes count from the seal on, whichever comes first; those of another debtor or epoch never.
    name(&mut rm, A, key, 0, &of[..2]);
    name(&mut rm, B, key, 2, &of[2..]);
    name(&mut rm, A, (key.0, Epoch(1)), 2, &of[2..]);
    assert_eq!(rm.pool.hashes().count(), 0);
    fill(&mut rm, key, 3);
    assert_eq!(rm.pool.hashes().count(), 2);
    name(&mut rm, A, key, 2, &of[2..]);
    name(&mut rm, A, key, u32::MAX, &of[..2]);
    assert_eq!(rm.pool.hashes().count(), 3, "the last entry is not written");
    release(&mut rm, A, key.0, key.1, u32::MAX);
    assert_eq!((rm.available(), rm.pool.cached()), (20, 3));
    // Only what follows without a gap; a repeated request gets the same grant.
    assert!(rm.on_lease_request(B, &cached_request(1, &hashes(9..11)), 0).is_err());
    assert!(rm.on_lease_request(B, &LeaseRequest { blocks: 9, ..cached_request(2, &of) }, 0).is_err());
    let grant = rm.on_lease_request(B, &cached_request(3, &of), 0).unwrap();
    assert_eq!((grant.blocks, grant.cached), (3, 3));
    assert_eq!(rm.on_lease_request(B, &cached_request(3, &of), 0), Ok(grant.clone()));
    assert_eq!((rm.available(), rm.pool.cached(), rm.creditor.cached_lent()), (17, 0, 3));
    // Another debtor shares them at no cost of memory, within the limit on lending.
    let shared = rm.on_lease_request(C, &cached_request(4, &of[1..]), 0).unwrap();
    assert_eq!((shared.cached, rm.available(), rm.pool.counts().lent), (2, 17, 5));
    // They are written, and nothing more is.
    let (lease, epoch) = (LeaseId(grant.lease), Epoch(grant.epoch));
    assert_eq!(rm.creditor.written(B, (lease, epoch), 1), Ok(12));
    assert!(rm.creditor.begin_write(B, (lease, epoch), 0, 12, 4).is_err());
    release(&mut rm, B, lease, epoch, u32::MAX);
    release(&mut rm, C, LeaseId(shared.lease), Epoch(shared.epoch), u32::MAX);
    assert_eq!((rm.available(), rm.pool.cached()), (20, 3));
    rm.pool.check();
}

#[test]
fn cached_blocks_are_leased_within_the_limits_on_lending() {
    let mut rm = manager();
    let own: Vec<PhysBlock> = rm.pool.allocate(Owner::Own(SeqId(5)), 20, None).unwrap();
    for (block, (hash, depth)) in own.iter().zip(hashes(0..20).into_iter().zip(0..)) {
        rm.pool.mark(*block, lagoon_kv::BlockState::Sealed);
        rm.pool.set_hash(*block, hash, depth);
    }
    // In use: they cost no memory, and at most 12 blocks are lent.
    let grant = rm.on_lease_request(A, &cached_request(1, &hashes(0..20)), 0).unwrap();
    assert_eq!((grant.cached, rm.available()), (12, 0));
    assert!(rm.on_lease_request(B, &cached_request(2, &hashes(0..20)), 0).is_err());
    release(&mut rm, A, LeaseId(grant.lease), Epoch(grant.epoch), u32::MAX);
    // Free: five blocks are never lent.
    rm.pool.free(Owner::Own(SeqId(5)), &own[10..]);
    let grant = rm.on_lease_request(A, &cached_request(3, &hashes(8..20)), 0).unwrap();
    assert_eq!((grant.cached, rm.available()), (2 + 5, 5));
    rm.pool.check();
}

/// A debtor that names a block twice would own it twice.
#[test]
fn a_hash_that_is_named_twice_is_refused() {
    let mut rm = manager();
    let (key, of) = (lend(&mut rm, 1, 4), hashes(0..4));
    name(&mut rm, A, key, 0, &of);
    fill(&mut rm, key, 4);
    for owned in [true, false] {
        let twice = [of[0], of[1], of[0]];
        assert!(rm.on_lease_request(B, &cached_request(u64::from(owned), &twice), 0).is_err(), "owned: {owned}");
        rm.pool.check();
        release(&mut rm, A, key.0, key.1, u32::MAX);
    }
    assert_eq!(rm.on_lease_request(B, &cached_request(9, &of), 0).unwrap().cached, 4);
}

/// The hash of what was received proves nothing once the device has failed to store some of it.
#[test]
fn nothing_is_found_after_a_write_that_failed() {
    let mut rm = manager();
    let (key, of) = (lend(&mut rm, 1, 4), hashes(0..4));
    name(&mut rm, A, key, 0, &of);
    fill(&mut rm, key, 2);
    assert_eq!(rm.pool.hashes().count(), 2);
    rm.distrust_lent();
    assert_eq!(rm.pool.hashes().count(), 0);
    let later = lend(&mut rm, 2, 4);
    name(&mut rm, A, later, 0, &of);
    fill(&mut rm, later, 4);
    assert_eq!(rm.pool.hashes().count(), 0);
    release(&mut rm, A, key.0, key.1, u32::MAX);
    release(&mut rm, A, later.0, later.1, u32::MAX);
    assert_eq!((rm.available(), rm.pool.cached()), (20, 0));
    rm.pool.check();
}

fn run(instance: InstanceId, first: u32, blocks: u32, before: u32) -> CachedRun {
    CachedRun { instance: instance.0, quic_addr: format!("addr-{instance}"), first, blocks, before }
}

/// Starts a search of 20 blocks and answers its query.
fn search(rm: &mut RManager, here: &[std::ops::Range<u32>], runs: Vec<CachedRun>) -> BorrowId {
    let id = rm.debtor.search_prefix(SeqId(1), hashes(0..20), here.to_vec(), 0, 10);
    let asked = query(rm);
    assert_eq!((asked.debtor, asked.prefix.len()), (ME.0, 160));
    rm.debtor.on_advice(&BorrowAdvice { query: asked.query, cached: runs, ..Default::default() }, 10);
    id
}

fn grant(rm: &mut RManager, from: InstanceId, request: u64, (lease, blocks, cached): (u64, u32, u32)) {
    let m = LeaseGrant { request, lease, epoch: lease + 1000, blocks, ttl_ms: TTL, cached };
    rm.on_peer_control(from, ControlBody::LeaseGrant(m), 20);
}

fn refuse(rm: &mut RManager, from: InstanceId, request: u64) {
    let m = LeaseRefuse { request, blocks_lendable: 0, reason: String::new() };
    rm.on_peer_control(from, ControlBody::LeaseRefuse(m), 20);
}

/// Asserts that the next request goes to `to`, for `blocks` blocks from `first` on. Returns its number.
fn asks(rm: &mut RManager, to: InstanceId, first: u8, blocks: u8) -> u64 {
    let (instance, request) = asked(rm);
    let wanted = BlockHash::write(&hashes(first..first + blocks));
    assert_eq!((instance, request.blocks, request.hashes), (to, u32::from(blocks), wanted));
    request.request
}

/// What a search ended with: `(lease, blocks)`, 0 for own blocks and 1 for missing ones; and the number of releases.
fn found(rm: &mut RManager) -> (Vec<(u64, u32)>, usize) {
    let all = outputs(rm);
    let releases = all.iter().filter(|o| matches!(o, Output::ToPeer { body: ControlBody::LeaseRelease(_), .. }));
    let parts = all.iter().find_map(|o| if let Output::PrefixFound { parts, .. } = o { Some(parts) } else { None });
    let parts = parts.unwrap_or_else(|| panic!("{all:?}")).iter().map(|part| match part {
        CachedPart::Here { blocks } => (0, *blocks),
        CachedPart::Missing { blocks } => (1, *blocks),
        CachedPart::Leased(lease) => (lease.lease.0, lease.blocks),
    });
    (parts.collect(), releases.count())
}

#[test]
fn a_search_leases_run_after_run_and_leaves_out_what_nobody_has() {
    let mut rm = manager();
    // Own blocks lie in between; 3 and 4 nobody has; C may have blocks before those that are known.
    let runs = vec![run(A, 0, 3, 0), run(B, 1, 2, 0), run(C, 12, 4, 3), run(B, 16, 3, 0)];
    let here = 5..8;
    search(&mut rm, std::slice::from_ref(&here), runs);
    let request = asks(&mut rm, A, 0, 5);
    grant(&mut rm, A, request, (70, 2, 2));
    let request = asks(&mut rm, B, 2, 3);
    grant(&mut rm, B, request, (71, 1, 1));
    let request = asks(&mut rm, C, 9, 11);
    refuse(&mut rm, C, request);
    let request = asks(&mut rm, C, 12, 8);
    grant(&mut rm, C, request, (72, 4, 4));
    let request = asks(&mut rm, B, 16, 4);
    refuse(&mut rm, B, request);
    assert_eq!(found(&mut rm), (vec![(70, 2), (71, 1), (1, 2), (0, 3), (1, 4), (72, 4)], 0));
    assert_eq!((rm.debtor.borrowing(), rm.debtor.held.blocks()), (0, 7));
}

#[test]
fn a_search_takes_no_blocks_to_write_and_ends_in_time_with_what_it_has() {
    let mut rm = manager();
    let runs = vec![run(A, 0, 3, 0), run(B, 0, 2, 0), run(C, 2, 9, 0)];
    search(&mut rm, &[], runs);
    // A creditor of an older version lends blocks to write.
    let request = asks(&mut rm, A, 0, 20);
    grant(&mut rm, A, request, (70, 20, 0));
    let all = outputs(&mut rm);
    let released = |o: &Output| matches!(o, Output::ToPeer { body: ControlBody::LeaseRelease(m), .. } if m.lease == 70);
    assert!(all.iter().any(released), "{all:?}");
    let to_b = all.iter().find_map(|o| match o {
        Output::ToPeer { instance: B, body: ControlBody::LeaseRequest(m), .. } => Some(m.request),
        _ => None,
    });
    grant(&mut rm, B, to_b.unwrap(), (71, 2, 2));
    let late = asks(&mut rm, C, 2, 18);
    rm.tick(10 + limits::PREFIX_SEARCH_MS);
    assert_eq!(found(&mut rm), (vec![(71, 2)], 0));
    grant(&mut rm, C, late, (72, 3, 3));
    assert!(
        matches!(&outputs(&mut rm)[..], [Output::ToPeer { body: ControlBody::LeaseRelease(m), .. }] if m.lease == 72)
    );
    assert_eq!(rm.debtor.held.blocks(), 2);
}

#[test]
fn a_lease_lost_during_a_search_ends_it_and_what_lies_behind_is_released() {
    for cancelled in [false, true] {
        let mut rm = manager();
        let id = search(&mut rm, &[], vec![run(A, 0, 3, 0), run(B, 3, 3, 0), run(C, 6, 3, 0)]);
        let request = asks(&mut rm, A, 0, 20);
        grant(&mut rm, A, request, (70, 3, 3));
        let request = asks(&mut rm, B, 3, 17);
        grant(&mut rm, B, request, (71, 3, 3));
        let request = asks(&mut rm, C, 6, 14);
        let revoked = LeaseRevoked { lease: 70, entries: 0, ..Default::default() };
        rm.on_peer_control(A, ControlBody::LeaseRevoked(revoked), 15);
        if cancelled {
            assert!(rm.debtor.cancel(id, 15));
        }
        grant(&mut rm, C, request, (72, 3, 3));
        rm.tick(30);
        let releases = |all: &[Output]| {
            let of = |o: &Output| {
                matches!(o, Output::ToPeer { body: ControlBody::LeaseRelease(LeaseRelease { lease: 71 | 72, .. }), .. })
            };
            all.iter().filter(|o| of(o)).count()
        };
        let all = outputs(&mut rm);
        assert_eq!(releases(&all), 2, "{all:?}");
        let ended = all.iter().filter(|o| matches!(o, Output::PrefixFound { parts, .. } if parts.is_empty())).count();
        assert_eq!((ended, rm.debtor.held.blocks(), rm.debtor.borrowing()), (usize::from(!cancelled), 0, 0));
    }
}

#[test]
fn a_search_without_a_gmanager_ends_and_without_a_creditor_goes_on() {
    let mut rm = manager();
    rm.debtor.search_prefix(SeqId(1), hashes(0..20), Vec::new(), 0, 10);
    query(&mut rm);
    rm.tick(10 + limits::PREFIX_SEARCH_MS);
    assert_eq!(found(&mut rm), (vec![], 0));
    search(&mut rm, &[], vec![run(A, 0, 9, 0), run(A, 12, 3, 0), run(B, 10, 2, 0)]);
    asks(&mut rm, A, 0, 20);
    rm.debtor.on_peer_down(A, 20);
    let request = asks(&mut rm, B, 10, 10);
    grant(&mut rm, B, request, (71, 2, 2));
    assert_eq!(found(&mut rm), (vec![(1, 10), (71, 2)], 0));
}
