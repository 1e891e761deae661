//! Borrows that cross to other hosts: who is asked for how much, and what stays as it is without hosts.

use super::super::*;
use super::negotiation::{asked, grant, outputs, query, refuse};
use super::{A, B, C, ME, config, manager};
use lagoon_protocol::{BorrowAdvice, BorrowQuery, Candidate, TierRequest};
use lagoon_types::SeqId;

const D: InstanceId = InstanceId(5);

/// A manager of 20 blocks, whose stripes have at least 2; `A` is on its host, the others are not.
fn beside_a() -> RManager {
    let mut rm = manager();
    rm.debtor.set_beside(A, Some(true));
    for other in [B, C, D] {
        rm.debtor.set_beside(other, Some(false));
    }
    rm
}

fn advise(rm: &mut RManager, query: u64, candidates: &[(InstanceId, u32)]) {
    advise_of_hosts(rm, query, candidates, &[]);
}

/// Advises with the hosts of some candidates.
fn advise_of_hosts(rm: &mut RManager, query: u64, candidates: &[(InstanceId, u32)], hosts: &[(InstanceId, u64)]) {
    let candidate = |&(instance, blocks_lendable): &(InstanceId, u32)| Candidate {
        instance: instance.0,
        quic_addr: format!("addr-{instance}"),
        blocks_lendable,
        host: hosts.iter().find(|(of, _)| *of == instance).map_or(0, |(_, host)| *host),
    };
    let candidates = candidates.iter().map(candidate).collect();
    let (pool_blocks_total, pool_blocks_lendable) = (100, 50);
    let advice = BorrowAdvice { query, candidates, pool_blocks_total, pool_blocks_lendable, ..Default::default() };
    rm.debtor.on_advice(&advice, 0);
}

fn borrow(rm: &mut RManager, blocks: u32) -> BorrowQuery {
    rm.debtor.borrow(SeqId(5), blocks, TierRequest::Any, None, 0);
    query(rm)
}

/// Borrows with these advices, until the candidates' last query is answered with none.
fn borrow_of(rm: &mut RManager, blocks: u32, advices: &[&[(InstanceId, u32)]]) {
    let mut next = borrow(rm, blocks);
    for advice in advices {
        advise(rm, next.query, advice);
        next = query(rm);
    }
    advise(rm, next.query, &[]);
}

/// Grants the next request, and returns who was asked for how many blocks.
fn granted(rm: &mut RManager, lease: u64, blocks: u32) -> (InstanceId, u32) {
    let (to, request) = asked(rm);
    grant(rm, to, request.request, lease, blocks.min(request.blocks), 1);
    (to, request.blocks)
}

fn leases(rm: &mut RManager) -> Vec<(InstanceId, u32)> {
    let all = outputs(rm);
    let [Output::Borrowed { leases, .. }] = &all[..] else { panic!("{all:?}") };
    leases.iter().map(|lease| (lease.creditor, lease.blocks)).collect()
}

#[test]
fn the_own_host_lends_first_and_the_others_hold_the_rest_evenly() {
    let mut rm = beside_a();
    let first = borrow(&mut rm, 20);
    assert_eq!((first.blocks, first.exclude), (20, vec![]));
    advise(&mut rm, first.query, &[(B, 9), (C, 9), (A, 5)]);
    // Nobody is asked before all candidates are known, and their blocks are not booked.
    let second = query(&mut rm);
    assert_eq!((second.blocks, second.exclude), (0, vec![A.0, B.0, C.0]));
    advise(&mut rm, second.query, &[(D, 9)]);
    let third = query(&mut rm);
    assert_eq!(third.exclude, [A.0, B.0, C.0, D.0]);
    advise(&mut rm, third.query, &[]);
    assert_eq!(granted(&mut rm, 1, 5), (A, 20), "its own host's is asked for all");
    assert_eq!(granted(&mut rm, 2, 9), (B, 5));
    assert_eq!(granted(&mut rm, 3, 9), (C, 5));
    assert_eq!(granted(&mut rm, 4, 9), (D, 5));
    assert_eq!(leases(&mut rm), [(A, 5), (B, 5), (C, 5), (D, 5)]);
}

#[test]
fn creditors_that_lend_less_leave_more_to_the_next() {
    let mut rm = beside_a();
    borrow_of(&mut rm, 12, &[&[(B, 9), (C, 9), (D, 9)]]);
    let (to, request) = asked(&mut rm);
    assert_eq!((to, request.blocks), (B, 4));
    refuse(&mut rm, B, request.request, 1);
    let all = outputs(&mut rm);
    let Some(Output::ToPeer { instance: C, body: ControlBody::LeaseRequest(request), .. }) = all.last() else {
        panic!("{all:?}")
    };
    assert_eq!(request.blocks, 6);
    grant(&mut rm, C, request.request, 1, 6, 1);
    assert_eq!(granted(&mut rm, 2, 4), (D, 6));
    // C may have more than its stripe, B and D have not.
    let next = query(&mut rm);
    assert_eq!((next.blocks, next.exclude), (2, vec![B.0, D.0]));
    advise(&mut rm, next.query, &[(C, 3)]);
    assert_eq!(granted(&mut rm, 3, 2), (C, 2));
    assert_eq!(leases(&mut rm), [(C, 6), (D, 4), (C, 2)]);
}

/// A creditor that keeps its blocks for an older request is not reported as one that lacks them, though it has fewer than all
/// stripes together.
#[test]
fn a_refused_stripe_is_no_shortage() {
    let mut rm = beside_a();
    borrow_of(&mut rm, 12, &[&[(B, 9), (C, 9), (D, 9)]]);
    let (_, request) = asked(&mut rm);
    let kept = LeaseRefuse { request: request.request, blocks_lendable: 9, reason: String::new() };
    assert_eq!(rm.on_peer_control(B, ControlBody::LeaseRefuse(kept), 1), None);
    let all = outputs(&mut rm);
    assert!(matches!(&all[..], [Output::ToPeer { instance: C, .. }]), "no refusal is reported: {all:?}");
}

#[test]
fn little_that_crosses_has_one_creditor() {
    let mut rm = beside_a();
    let first = borrow(&mut rm, 8);
    advise(&mut rm, first.query, &[(B, 9), (A, 5), (C, 9)]);
    assert_eq!(granted(&mut rm, 1, 5), (A, 8), "3 of the blocks cross: less than two stripes");
    assert_eq!(granted(&mut rm, 2, 9), (B, 3));
    assert_eq!(leases(&mut rm), [(A, 5), (B, 3)]);
}

#[test]
fn a_prompt_that_its_own_host_holds_has_no_stripes() {
    let mut rm = beside_a();
    let first = borrow(&mut rm, 9);
    advise(&mut rm, first.query, &[(B, 9), (A, 9), (C, 9)]);
    assert_eq!(granted(&mut rm, 1, 9), (A, 9));
    assert_eq!(leases(&mut rm), [(A, 9)]);
}

/// Without a relay a stripe would cost a query between hosts for each creditor.
#[test]
fn instances_of_unknown_hosts_are_asked_for_all() {
    let mut rm = beside_a();
    for unknown in [A, B, C] {
        rm.debtor.set_beside(unknown, None);
    }
    let first = borrow(&mut rm, 18);
    advise(&mut rm, first.query, &[(B, 9), (A, 9), (C, 9)]);
    assert_eq!(granted(&mut rm, 1, 9), (B, 18));
    assert_eq!(granted(&mut rm, 2, 9), (A, 9));
    assert_eq!(leases(&mut rm), [(B, 9), (A, 9)]);
}

/// The gManager's candidates have the hosts of instances that are not connected; a Hello comes before it.
#[test]
fn a_loan_of_instances_that_are_not_connected_is_in_stripes() {
    const OWN: u64 = 7;
    let mut rm = RManager::new(RManagerConfig { host: OWN, ..config() }).unwrap();
    rm.set_instance(ME);
    rm.debtor.set_beside(D, Some(true));
    let first = borrow(&mut rm, 20);
    let hosts = [(A, OWN), (B, 8), (C, 8), (D, 8)];
    advise_of_hosts(&mut rm, first.query, &[(B, 9), (C, 9), (A, 5)], &hosts);
    let second = query(&mut rm);
    advise_of_hosts(&mut rm, second.query, &[(D, 3)], &hosts);
    let third = query(&mut rm);
    advise(&mut rm, third.query, &[]);
    assert_eq!(granted(&mut rm, 1, 5), (A, 20));
    assert_eq!(granted(&mut rm, 2, 3), (D, 15), "D is on this host, by its Hello");
    assert_eq!(granted(&mut rm, 3, 6), (B, 6));
    assert_eq!(granted(&mut rm, 4, 6), (C, 6));
    assert_eq!(leases(&mut rm), [(A, 5), (D, 3), (B, 6), (C, 6)]);
    // A connected instance that names no host knows no relays, whatever the gManager has of it.
    rm.debtor.set_beside(B, None);
    rm.debtor.set_beside(C, None);
    let first = borrow(&mut rm, 18);
    advise_of_hosts(&mut rm, first.query, &[(B, 9), (C, 9)], &hosts);
    assert_eq!(granted(&mut rm, 5, 9), (B, 18));
    assert_eq!(granted(&mut rm, 6, 9), (C, 9));
    leases(&mut rm);
    rm.debtor.forget_beside(B);
    rm.debtor.forget_beside(C);
    let first = borrow(&mut rm, 18);
    advise_of_hosts(&mut rm, first.query, &[(B, 9), (C, 9)], &hosts);
    let second = query(&mut rm);
    advise(&mut rm, second.query, &[]);
    assert_eq!(granted(&mut rm, 7, 9), (B, 9));
}

/// An instance that relays nothing has no host, whatever candidates have.
#[test]
fn without_an_own_host_candidates_hosts_count_for_nothing() {
    let mut rm = manager();
    let first = borrow(&mut rm, 18);
    advise_of_hosts(&mut rm, first.query, &[(B, 9), (A, 9), (C, 9)], &[(A, 8), (B, 8), (C, 9)]);
    assert_eq!(granted(&mut rm, 1, 9), (B, 18));
    assert_eq!(granted(&mut rm, 2, 9), (A, 9));
    assert_eq!(leases(&mut rm), [(B, 9), (A, 9)]);
}
