//! Every way that a negotiation can go, and what becomes of borrowed leases.

use super::super::*;
use super::{A, B, C, ME, TTL, config, lend, manager, release, request};
use lagoon_kv::RemoteEntries;
use lagoon_protocol::{
    BorrowAdvice, Candidate, LeaseRelease, LeaseReleased, LeaseRenew, LeaseRenewed, Refusal, TierRequest,
};
use lagoon_types::{Epoch, SeqId};

fn candidate(instance: InstanceId) -> Candidate {
    Candidate { instance: instance.0, quic_addr: format!("addr-{instance}"), blocks_lendable: 9, host: 0 }
}

pub(super) fn outputs(rm: &mut RManager) -> Vec<Output> {
    std::iter::from_fn(|| rm.poll()).collect()
}

/// The one query among the outputs.
pub(super) fn query(rm: &mut RManager) -> lagoon_protocol::BorrowQuery {
    let queries: Vec<_> = outputs(rm)
        .into_iter()
        .filter_map(|o| match o {
            Output::ToGManager(ControlBody::BorrowQuery(q)) => Some(q),
            _ => None,
        })
        .collect();
    let [query] = &queries[..] else { panic!("{queries:?}") };
    query.clone()
}

pub(super) fn advise(rm: &mut RManager, query: u64, candidates: &[InstanceId], now_ms: u64) {
    let candidates = candidates.iter().map(|c| candidate(*c)).collect();
    let advice =
        BorrowAdvice { query, candidates, pool_blocks_total: 100, pool_blocks_lendable: 50, ..Default::default() };
    rm.debtor.on_advice(&advice, now_ms);
}

/// The one lease request among the outputs, and to whom.
pub(super) fn asked(rm: &mut RManager) -> (InstanceId, LeaseRequest) {
    let all = outputs(rm);
    let asks: Vec<_> = all
        .iter()
        .filter_map(|o| match o {
            Output::ToPeer { instance, body: ControlBody::LeaseRequest(r), .. } => Some((*instance, r.clone())),
            _ => None,
        })
        .collect();
    let [ask] = &asks[..] else { panic!("{all:?}") };
    ask.clone()
}

pub(super) fn grant(rm: &mut RManager, from: InstanceId, request: u64, lease: u64, blocks: u32, now_ms: u64) {
    let m = LeaseGrant { request, lease, epoch: lease + 1000, blocks, ttl_ms: TTL, ..Default::default() };
    assert_eq!(rm.on_peer_control(from, ControlBody::LeaseGrant(m), now_ms), None);
}

pub(super) fn refuse(rm: &mut RManager, from: InstanceId, request: u64, now_ms: u64) {
    let m = LeaseRefuse { request, blocks_lendable: 1, reason: String::new() };
    assert_eq!(rm.on_peer_control(from, ControlBody::LeaseRefuse(m), now_ms), None);
}

fn release_to(instance: InstanceId, lease: u64, entries: u32) -> Output {
    let quic_addr = format!("addr-{instance}");
    Output::ToPeer {
        instance,
        quic_addr,
        body: ControlBody::LeaseRelease(LeaseRelease { lease, epoch: lease + 1000, entries, ..Default::default() }),
    }
}

/// Borrows all of `blocks` from `A` at time 0.
pub(super) fn borrowed(rm: &mut RManager, lease: u64, blocks: u32) {
    rm.debtor.borrow(SeqId(5), blocks, TierRequest::Any, None, 0);
    let q = query(rm);
    advise(rm, q.query, &[A], 0);
    let (_, r) = asked(rm);
    grant(rm, A, r.request, lease, blocks, 3);
    assert!(matches!(&outputs(rm)[..], [Output::Borrowed { .. }]));
}

#[test]
fn candidates_are_asked_in_order_and_parts_add_up() {
    let mut rm = manager();
    let id = rm.debtor.borrow(SeqId(5), 10, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    assert_eq!((q.debtor, q.blocks, q.exclude.clone()), (ME.0, 10, vec![]));
    advise(&mut rm, q.query, &[A, ME, B], 1);
    let (to, r) = asked(&mut rm);
    assert_eq!((to, r.blocks, r.blocks_min, r.seq), (A, 10, 1, 5));
    refuse(&mut rm, A, r.request, 2);
    let next = outputs(&mut rm);
    let refusal = Refusal { creditor: A.0, blocks_lendable: 1 };
    assert_eq!(next[0], Output::ToGManager(ControlBody::Refusal(refusal)));
    let Output::ToPeer { instance: B, body: ControlBody::LeaseRequest(r), .. } = &next[1] else { panic!("{next:?}") };
    grant(&mut rm, B, r.request, 7, 6, 3);
    // The list is over: the gManager is asked again, for the rest.
    let q = query(&mut rm);
    assert_eq!((q.blocks, q.exclude), (4, vec![A.0, B.0]));
    advise(&mut rm, q.query, &[C], 4);
    let (to, r) = asked(&mut rm);
    assert_eq!((to, r.blocks), (C, 4));
    grant(&mut rm, C, r.request, 8, 4, 5);
    let lease = |creditor: InstanceId, lease: u64, blocks| BorrowedLease {
        creditor,
        quic_addr: format!("addr-{creditor}"),
        lease: LeaseId(lease),
        epoch: Epoch(lease + 1000),
        blocks,
    };
    let leases = vec![lease(B, 7, 6), lease(C, 8, 4)];
    assert_eq!(outputs(&mut rm), [Output::Borrowed { borrow: id, seq: SeqId(5), leases }]);
    assert_eq!((rm.debtor.held.blocks(), rm.debtor.borrowing()), (10, 0));
}

#[test]
fn a_failed_borrow_gives_back_what_it_got() {
    let mut rm = manager();
    let id = rm.debtor.borrow(SeqId(5), 10, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A], 0);
    let (_, r) = asked(&mut rm);
    grant(&mut rm, A, r.request, 7, 6, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[], 0);
    let failed = Output::BorrowFailed { borrow: id, seq: SeqId(5), reason: BorrowFailure::Refused };
    assert_eq!(outputs(&mut rm), [release_to(A, 7, 6), failed]);
    assert_eq!((rm.debtor.held.blocks(), rm.debtor.held.releasing()), (0, 1));
    rm.on_peer_control(A, ControlBody::LeaseReleased(LeaseReleased { lease: 7, entries: 6, ..Default::default() }), 0);
    assert_eq!(rm.debtor.held.releasing(), 0);
}

#[test]
fn failures_say_why() {
    let fail = |total: u64, candidates: &[InstanceId], blocks: u32| {
        let mut rm = manager();
        rm.debtor.borrow(SeqId(5), blocks, TierRequest::Any, None, 0);
        let q = query(&mut rm);
        let candidates = candidates.iter().map(|c| candidate(*c)).collect();
        rm.debtor.on_advice(
            &BorrowAdvice {
                query: q.query,
                candidates,
                pool_blocks_total: total,
                pool_blocks_lendable: 0,
                ..Default::default()
            },
            0,
        );
        match &outputs(&mut rm)[..] {
            [Output::BorrowFailed { reason, .. }] => *reason,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(fail(100, &[], 10), BorrowFailure::NoCreditors);
    assert_eq!(fail(100, &[ME], 10), BorrowFailure::NoCreditors);
    assert_eq!(fail(9, &[A], 10), BorrowFailure::PoolTooSmall { pool_blocks_total: 9 });
}

#[test]
fn rounds_end() {
    let mut rm = manager();
    rm.debtor.borrow(SeqId(5), 10, TierRequest::Any, None, 0);
    let mut out = outputs(&mut rm);
    let mut rounds = 0;
    let mut peer = 10;
    loop {
        match out.pop() {
            Some(Output::ToGManager(ControlBody::BorrowQuery(q))) => {
                rounds += 1;
                let three = [peer, peer + 1, peer + 2].map(InstanceId);
                peer += 3;
                advise(&mut rm, q.query, &three, 0);
            }
            Some(Output::ToPeer { instance, body: ControlBody::LeaseRequest(r), .. }) => {
                refuse(&mut rm, instance, r.request, 0);
            }
            Some(Output::BorrowFailed { reason, .. }) => {
                assert_eq!(reason, BorrowFailure::Refused);
                break;
            }
            other => panic!("{other:?}"),
        }
        out = outputs(&mut rm);
    }
    assert_eq!(rounds, limits::BORROW_ROUNDS_MAX);
    assert_eq!(peer, 10 + 3 * limits::BORROW_ROUNDS_MAX);
}

#[test]
fn queries_wait_for_a_number_and_are_repeated() {
    let mut rm = RManager::new(config()).unwrap();
    rm.debtor.borrow(SeqId(5), 1, TierRequest::Any, None, 0);
    assert_eq!(outputs(&mut rm), []);
    rm.set_instance(ME);
    rm.tick(10);
    let first = query(&mut rm);
    rm.tick(10 + limits::CONTROL_REPEAT_MS);
    assert_eq!(query(&mut rm), first);
    rm.tick(limits::BORROW_DEADLINE_MS);
    assert!(matches!(&outputs(&mut rm)[..], [Output::BorrowFailed { reason: BorrowFailure::Deadline, .. }]));
    advise(&mut rm, first.query, &[A], limits::BORROW_DEADLINE_MS);
    assert_eq!(outputs(&mut rm), [], "late advice is for nobody");
    assert_eq!(rm.next_wake_ms(), None);
}

#[test]
fn a_silent_candidate_is_passed_over_and_its_late_grant_given_back() {
    let mut rm = manager();
    rm.debtor.borrow(SeqId(5), 4, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A, B], 0);
    let (_, ra) = asked(&mut rm);
    assert_eq!(rm.next_wake_ms(), Some(limits::LEASE_ANSWER_MS));
    rm.tick(limits::LEASE_ANSWER_MS - 1);
    assert_eq!(outputs(&mut rm), []);
    rm.tick(limits::LEASE_ANSWER_MS);
    let (to, rb) = asked(&mut rm);
    assert_eq!(to, B);
    grant(&mut rm, C, ra.request, 6, 4, 1600);
    assert_eq!(outputs(&mut rm), [], "C was not asked");
    grant(&mut rm, A, ra.request, 7, 4, 1600);
    assert_eq!(outputs(&mut rm), [release_to(A, 7, 4)]);
    grant(&mut rm, B, rb.request, 8, 4, 1700);
    assert!(matches!(&outputs(&mut rm)[..], [Output::Borrowed { leases, .. }] if leases.len() == 1));
    grant(&mut rm, A, ra.request, 7, 4, 1800);
    assert_eq!(outputs(&mut rm), [], "it was given back already");
}

#[test]
fn a_lost_connection_is_as_good_as_a_refusal() {
    let mut rm = manager();
    rm.debtor.borrow(SeqId(5), 4, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A, B], 0);
    let (_, ra) = asked(&mut rm);
    rm.debtor.on_peer_down(B, 1);
    assert_eq!(outputs(&mut rm), []);
    rm.debtor.on_peer_down(A, 1);
    assert_eq!(asked(&mut rm).0, B);
    // The grant was on its way on another connection.
    grant(&mut rm, A, ra.request, 7, 4, 1600);
    assert_eq!(outputs(&mut rm), [release_to(A, 7, 4)]);
}

#[test]
fn cancelling_gives_back_at_every_stage() {
    // While a candidate is asked, with a part in hand.
    let mut rm = manager();
    let id = rm.debtor.borrow(SeqId(5), 4, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A, B], 0);
    let (_, r) = asked(&mut rm);
    grant(&mut rm, A, r.request, 7, 3, 0);
    let (_, r) = asked(&mut rm);
    assert!(rm.debtor.cancel(id, 1));
    assert_eq!(outputs(&mut rm), [release_to(A, 7, 3)]);
    grant(&mut rm, B, r.request, 8, 1, 2);
    assert_eq!(outputs(&mut rm), [release_to(B, 8, 1)]);
    // When it is complete, but nobody has received it.
    let id = rm.debtor.borrow(SeqId(6), 4, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A], 0);
    let (_, r) = asked(&mut rm);
    grant(&mut rm, A, r.request, 9, 4, 0);
    assert!(rm.debtor.cancel(id, 1));
    assert_eq!(outputs(&mut rm), [release_to(A, 9, 4)]);
    assert!(!rm.debtor.cancel(id, 1));
    assert_eq!(rm.debtor.held.blocks(), 0);
}

#[test]
fn senseless_grants_are_given_back() {
    let mut rm = manager();
    rm.debtor.borrow(SeqId(5), 4, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A, B], 0);
    let (_, r) = asked(&mut rm);
    grant(&mut rm, A, r.request, 7, 5, 0);
    let out = outputs(&mut rm);
    assert_eq!(out[0], release_to(A, 7, 5));
    assert!(matches!(&out[1], Output::ToPeer { instance: B, body: ControlBody::LeaseRequest(_), .. }));
    assert_eq!(rm.debtor.held.blocks(), 0);
}

#[test]
fn releases_are_repeated_until_acknowledged_or_moot() {
    let mut rm = manager();
    borrowed(&mut rm, 7, 4);
    let entries = |entries| RemoteEntries { creditor: A, lease: LeaseId(7), epoch: Epoch(1007), first: 0, entries };
    rm.debtor.held.release(&entries(2), 10);
    rm.debtor.held.release(&entries(2), 10);
    assert_eq!(outputs(&mut rm), [release_to(A, 7, 2)]);
    assert_eq!(rm.debtor.held.blocks(), 2);
    rm.debtor.held.release(&entries(4), 20);
    assert_eq!(outputs(&mut rm), [release_to(A, 7, 4)]);
    rm.on_peer_control(A, ControlBody::LeaseReleased(LeaseReleased { lease: 7, entries: 2, ..Default::default() }), 20);
    assert_eq!(rm.debtor.held.releasing(), 1, "that was the first one");
    rm.tick(20 + limits::CONTROL_REPEAT_MS);
    assert_eq!(outputs(&mut rm), [release_to(A, 7, 4)]);
    rm.debtor.on_peer_down(A, 2000);
    rm.tick(20 + 2 * limits::CONTROL_REPEAT_MS);
    assert_eq!(outputs(&mut rm), [release_to(A, 7, 4)], "leases outlive connections");
    rm.tick(20 + TTL);
    assert_eq!((outputs(&mut rm), rm.debtor.held.releasing()), (vec![], 0), "the creditor's own clock has freed it");
}

#[test]
fn releases_of_ranges_are_acknowledged_each_and_covered_by_larger_ones() {
    let mut rm = manager();
    borrowed(&mut rm, 7, 8);
    let range = |first, entries| RemoteEntries { creditor: A, lease: LeaseId(7), epoch: Epoch(1007), first, entries };
    let ack = |rm: &mut RManager, first, entries| {
        rm.on_peer_control(A, ControlBody::LeaseReleased(LeaseReleased { lease: 7, entries, first }), 20);
    };
    rm.debtor.held.release(&range(2, 4), 10);
    rm.debtor.held.release(&range(5, 6), 10);
    rm.debtor.held.release(&range(2, 4), 10);
    assert_eq!((outputs(&mut rm).len(), rm.debtor.held.releasing(), rm.debtor.held.blocks()), (2, 2, 5));
    assert_eq!(rm.debtor.held.iter().map(|h| (h.3, h.4)).collect::<Vec<_>>(), [(0, 2), (4, 5), (6, 8)]);
    ack(&mut rm, 2, 4);
    assert_eq!(rm.debtor.held.releasing(), 1);
    // The whole span says what is not acknowledged, too.
    rm.debtor.held.release(&range(0, 8), 11);
    assert_eq!((outputs(&mut rm).len(), rm.debtor.held.releasing(), rm.debtor.held.blocks()), (1, 1, 0));
    ack(&mut rm, 5, 6);
    assert_eq!(rm.debtor.held.releasing(), 1);
    ack(&mut rm, 0, 8);
    assert_eq!(rm.debtor.held.releasing(), 0);
}

#[test]
fn leases_are_renewed_and_lost_when_that_fails() {
    let mut rm = manager();
    borrowed(&mut rm, 7, 4);
    let renew = |rm: &mut RManager, now_ms| {
        rm.tick(now_ms);
        outputs(rm)
    };
    // The renewal clock starts with the grant at 3.
    assert_eq!(renew(&mut rm, limits::LEASE_RENEW_MS), []);
    let message = |seq| Output::ToPeer {
        instance: A,
        quic_addr: format!("addr-{A}"),
        body: ControlBody::LeaseRenew(LeaseRenew { leases: vec![7], seq }),
    };
    assert_eq!(renew(&mut rm, limits::LEASE_RENEW_MS + 3), [message(1)]);
    let yes = ControlBody::LeaseRenewed(LeaseRenewed { unknown: vec![], seq: 1 });
    rm.on_peer_control(A, yes.clone(), 4000);
    // Lost an eighth of its time to live before the creditor may free it, counted from the sent renewal.
    let lost_ms = limits::LEASE_RENEW_MS + 3 + TTL - TTL / 8;
    for _ in 0..3 {
        rm.on_peer_control(A, yes.clone(), 4001);
    }
    assert_eq!(renew(&mut rm, lost_ms - 1), [message(2)]);
    let lost = Output::LeaseLost { seq: SeqId(5), creditor: A, lease: LeaseId(7) };
    assert_eq!(renew(&mut rm, lost_ms), [lost, release_to(A, 7, 4)]);
    assert_eq!(rm.debtor.held.blocks(), 0);
}

/// The answer to the first renewal is lost: the second one's confirms the second, and an answer to no renewal nothing.
#[test]
fn an_answer_confirms_the_renewal_that_it_answers() {
    let mut rm = manager();
    borrowed(&mut rm, 7, 4);
    let first_ms = limits::LEASE_RENEW_MS + 3;
    rm.tick(first_ms);
    rm.tick(first_ms + limits::LEASE_RENEW_MS);
    outputs(&mut rm);
    let answer = |seq| ControlBody::LeaseRenewed(LeaseRenewed { unknown: vec![], seq });
    for seq in [2, 1, 3] {
        rm.on_peer_control(A, answer(seq), 7_000);
    }
    let lost_ms = first_ms + limits::LEASE_RENEW_MS + TTL - TTL / 8;
    rm.tick(lost_ms - 1);
    assert!(outputs(&mut rm).iter().all(|o| !matches!(o, Output::LeaseLost { .. })));
    rm.tick(lost_ms);
    assert!(matches!(outputs(&mut rm)[0], Output::LeaseLost { .. }));
}

#[test]
fn a_lease_lives_from_when_it_was_asked_for() {
    let mut rm = manager();
    borrowed(&mut rm, 7, 4);
    rm.tick(TTL - TTL / 8 - 1);
    assert!(outputs(&mut rm).iter().all(|o| !matches!(o, Output::LeaseLost { .. })));
    // Asked for at 0, granted at 3: the creditor's clock may have started right after 0.
    rm.tick(TTL - TTL / 8);
    assert!(matches!(outputs(&mut rm)[0], Output::LeaseLost { .. }));
}

#[test]
fn an_unknown_lease_is_lost_at_once() {
    let mut rm = manager();
    borrowed(&mut rm, 7, 4);
    let no = ControlBody::LeaseRenewed(LeaseRenewed { unknown: vec![7], seq: 1 });
    rm.on_peer_control(A, no.clone(), 1);
    assert_eq!(outputs(&mut rm), [], "nobody asked");
    rm.tick(limits::LEASE_RENEW_MS + 3);
    outputs(&mut rm);
    rm.on_peer_control(B, no.clone(), 4000);
    assert_eq!(outputs(&mut rm), []);
    rm.on_peer_control(A, no, 4000);
    assert_eq!(outputs(&mut rm), [Output::LeaseLost { seq: SeqId(5), creditor: A, lease: LeaseId(7) }]);
}

#[test]
fn a_restarted_creditor_has_nothing() {
    let mut rm = manager();
    rm.on_peer_hello(A, 1, 0);
    borrowed(&mut rm, 7, 4);
    // A second borrow has a part there, and asks there for more when it restarts.
    rm.debtor.borrow(SeqId(6), 4, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A, B], 0);
    let (_, r) = asked(&mut rm);
    grant(&mut rm, A, r.request, 8, 3, 0);
    let (_, r) = asked(&mut rm);
    rm.on_peer_hello(A, 2, 1);
    assert_eq!(outputs(&mut rm), [Output::LeaseLost { seq: SeqId(5), creditor: A, lease: LeaseId(7) }]);
    assert_eq!(rm.debtor.held.blocks(), 0);
    grant(&mut rm, B, r.request, 9, 1, 2);
    assert_eq!(query(&mut rm).blocks, 3, "the lost part is looked for again");
}

#[test]
fn a_heartbeat_reports_lent_and_borrowed_blocks() {
    let mut rm = manager();
    borrowed(&mut rm, 7, 4);
    lend(&mut rm, 1, 2);
    let (lease, epoch) = lend(&mut rm, 2, 3);
    release(&mut rm, A, lease, epoch, 1);
    rm.on_lease_request(B, &request(1, 1, 1), 0).unwrap();
    let hb = rm.heartbeat(3, 4, Vec::new());
    assert_eq!((hb.instance, hb.incarnation, hb.seq), (ME.0, 77, 1));
    assert_eq!((hb.blocks_total, hb.blocks_free, hb.blocks_lendable, hb.blocks_borrowed), (20, 15, 7, 4));
    let debts: Vec<_> = hb.lent.iter().map(|d| (d.debtor, d.blocks)).collect();
    assert_eq!(debts, [(A.0, 4), (B.0, 1)]);
    assert_eq!((hb.requests_running, hb.requests_waiting), (3, 4));
    assert_eq!(rm.heartbeat(0, 0, Vec::new()).seq, 2);
}

/// Whose memory is mapped is asked first, the others in the gManager's order, and so it is again when it is unmapped.
#[test]
fn creditors_whose_memory_is_mapped_are_asked_first() {
    let mut rm = manager();
    rm.debtor.set_near(C, true);
    for (seq, first) in [(5, C), (6, A)] {
        rm.debtor.borrow(SeqId(seq), 2, TierRequest::Any, None, 0);
        let q = query(&mut rm);
        advise(&mut rm, q.query, &[A, B, C], 0);
        let (creditor, r) = asked(&mut rm);
        assert_eq!(creditor, first);
        refuse(&mut rm, creditor, r.request, 1);
        let next = if first == C { A } else { B };
        assert!(outputs(&mut rm).iter().any(|o| matches!(o, Output::ToPeer { instance, .. } if *instance == next)));
        rm.debtor.set_near(C, false);
    }
}

#[test]
fn no_creditor_grants_a_life_without_end() {
    let mut rm = manager();
    rm.debtor.borrow(SeqId(5), 4, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A], 0);
    let (_, r) = asked(&mut rm);
    let m = LeaseGrant { request: r.request, lease: 7, epoch: 1007, blocks: 4, ttl_ms: u64::MAX, ..Default::default() };
    assert_eq!(rm.on_peer_control(A, ControlBody::LeaseGrant(m), 3), None);
    assert!(matches!(&outputs(&mut rm)[..], [Output::Borrowed { .. }]));
    let lost = |rm: &mut RManager, now_ms| {
        rm.tick(now_ms);
        outputs(rm).iter().any(|o| matches!(o, Output::LeaseLost { lease: LeaseId(7), .. }))
    };
    let lost_ms = limits::LEASE_TTL_MS_MAX - limits::LEASE_TTL_MS_MAX / 8;
    assert!(!lost(&mut rm, lost_ms - 1));
    assert!(lost(&mut rm, lost_ms));
}

#[test]
fn a_candidate_that_is_named_twice_is_asked_once() {
    let mut rm = manager();
    rm.debtor.borrow(SeqId(5), 4, TierRequest::Any, None, 0);
    let q = query(&mut rm);
    advise(&mut rm, q.query, &[A, A, B], 0);
    let (to, r) = asked(&mut rm);
    assert_eq!(to, A);
    refuse(&mut rm, A, r.request, 1);
    let next = outputs(&mut rm);
    let asks = |to: InstanceId| {
        let to_it = |o: &&Output| matches!(o, Output::ToPeer { instance, body: ControlBody::LeaseRequest(_), .. } if *instance == to);
        next.iter().filter(to_it).count()
    };
    assert_eq!((asks(A), asks(B)), (0, 1), "{next:?}");
}
