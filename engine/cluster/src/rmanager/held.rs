//! Leases that a debtor holds from others: in use, being released (not acknowledged yet), and their renewals.
//!
//! Invariants:
//! * a lease is held from its grant until it is released or lost; while it is held, its creditor lends it: it counts as
//!   lost one [`MARGIN`]th of its time to live before the creditor may free it, counted from when the last acknowledged
//!   request or renewal was *sent*;
//! * a release is repeated until it is acknowledged, the creditor's process is replaced, or the creditor's time to live
//!   has passed.

use super::output::{BorrowId, Output};
use crate::mutants::{self, Mutant};
use lagoon_kv::{RangeSet, RemoteEntries};
use lagoon_protocol::{ControlBody, LeaseRelease, LeaseReleased, LeaseRenew, LeaseRenewed, LeaseSealed};
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId, limits};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// The debtor's safety margin, as a fraction of a lease's time to live: one part in this many.
const MARGIN: u64 = 8;

/// A lease that this instance holds.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) quic_addr: String,
    pub(super) epoch: Epoch,
    pub(super) seq: SeqId,
    /// Number of entries granted.
    pub(super) blocks: u32,
    pub(super) released: RangeSet,
    pub(super) ttl_ms: u64,
    /// When the last message was sent that the creditor has answered.
    pub(super) confirmed_ms: u64,
    /// Its borrow, until that is complete.
    pub(super) borrow: Option<BorrowId>,
    /// Reservation of a lease for a move, until its entries are all sealed.
    pub(super) reserved: Option<Reserved>,
    /// By entry: the rBlock of the creditor's lent memory in which it is sealed, as reported; else [`NO_PLACE`].
    pub(super) places: Vec<u32>,
}

/// Place of an entry that is not sealed, or not in memory that can be mapped.
pub(super) const NO_PLACE: u32 = u32::MAX;

/// A reservation for a move, on the debtor.
#[derive(Clone, Debug)]
pub(super) struct Reserved {
    pub(super) sealed: RangeSet,
    /// When the last write, or the request, was sent.
    pub(super) written_ms: u64,
}

impl Reserved {
    /// When the reservation counts as lost here: before the creditor may free it, which counts from the write's
    /// arrival.
    fn lost_at_ms(&self) -> u64 {
        self.written_ms + limits::MOVE_RESERVE_MS - limits::MOVE_RESERVE_MS / MARGIN
    }
}

impl Held {
    /// Turns a reservation into an ordinary lease once its entries are all sealed or released.
    fn settle(&mut self) {
        let open = |r: &Reserved| r.sealed.gaps(0..self.blocks).any(|gap| self.released.gaps(gap).next().is_some());
        if self.reserved.as_ref().is_some_and(|r| !open(r)) {
            self.reserved = None;
        }
    }

    pub(super) fn lost_at_ms(&self) -> u64 {
        self.confirmed_ms + self.ttl_ms - self.ttl_ms / MARGIN
    }
}

/// A release in progress, of the entries up to `entries` (exclusive).
#[derive(Debug)]
struct Releasing {
    quic_addr: String,
    epoch: Epoch,
    entries: u32,
    sent_ms: u64,
    deadline_ms: u64,
}

/// Unanswered renewals to one creditor, the oldest first: number, time sent, and leases.
#[derive(Debug)]
struct Renewals {
    sent_ms: u64,
    outstanding: VecDeque<(u64, u64, Vec<LeaseId>)>,
}

/// Leases that this instance holds at creditors, releases that are not acknowledged yet, and renewals.
#[derive(Debug, Default)]
pub struct HeldLeases {
    leases: BTreeMap<(InstanceId, LeaseId), Held>,
    /// By creditor, lease and first entry.
    releasing: BTreeMap<(InstanceId, LeaseId, u32), Releasing>,
    renewals: BTreeMap<InstanceId, Renewals>,
    /// Number of the last renewal.
    renewed: u64,
    pub(super) outputs: VecDeque<Output>,
}

impl HeldLeases {
    /// Blocks held from others, including those of unfinished borrows.
    pub fn blocks(&self) -> u32 {
        self.leases.values().map(|h| h.blocks - h.released.len()).sum()
    }

    /// Address of a creditor, as it was named when a lease there was asked for.
    pub fn addr(&self, creditor: InstanceId) -> Option<&str> {
        let all = (creditor, LeaseId(0))..=(creditor, LeaseId(u64::MAX));
        self.leases.range(all).map(|(_, held)| held.quic_addr.as_str()).find(|addr| !addr.is_empty())
    }

    pub(super) fn has_from(&self, creditor: InstanceId) -> bool {
        self.of(creditor).next().is_some()
    }

    pub(super) fn get(&self, creditor: InstanceId, lease: LeaseId) -> Option<&Held> {
        self.leases.get(&(creditor, lease))
    }

    /// Held, unreleased entries: creditor, lease, epoch, and a range of entries, first and end. A lease has one row per
    /// range.
    pub fn iter(&self) -> impl Iterator<Item = (InstanceId, LeaseId, Epoch, u32, u32)> + '_ {
        self.leases.iter().flat_map(|((creditor, lease), h)| {
            h.released.gaps(0..h.blocks).map(|r| (*creditor, *lease, h.epoch, r.start, r.end))
        })
    }

    /// Entries reserved for moves that are neither acknowledged as sealed nor released: creditor, lease, entry.
    pub fn unsealed(&self) -> impl Iterator<Item = (InstanceId, LeaseId, u32)> + '_ {
        self.leases.iter().flat_map(|((creditor, lease), h)| {
            let open = h.reserved.iter().flat_map(|r| r.sealed.gaps(0..h.blocks)).flatten();
            open.filter(|entry| !h.released.contains(*entry)).map(|entry| (*creditor, *lease, entry))
        })
    }

    fn of(&self, creditor: InstanceId) -> impl Iterator<Item = LeaseId> + '_ {
        let all = (creditor, LeaseId(0))..=(creditor, LeaseId(u64::MAX));
        self.leases.range(all).map(|((_, lease), _)| *lease)
    }

    pub(super) fn insert(&mut self, creditor: InstanceId, lease: LeaseId, held: Held, now_ms: u64) {
        self.renewals.entry(creditor).or_insert(Renewals { sent_ms: now_ms, outstanding: VecDeque::new() });
        let old = self.leases.insert((creditor, lease), held);
        assert!(old.is_none(), "{creditor}'s {lease} was held already");
    }

    /// Marks a borrow's leases as complete.
    pub(super) fn hand_out(&mut self, leases: &[(InstanceId, LeaseId)]) {
        for key in leases {
            self.leases.get_mut(key).expect("a borrow's leases are held").borrow = None;
        }
    }

    /// Releases the leases of an unfinished borrow that are not in `kept`.
    pub(super) fn release_borrowed(&mut self, borrow: BorrowId, kept: &[(InstanceId, LeaseId)], now_ms: u64) {
        let of = self.leases.iter().filter(|(key, held)| held.borrow == Some(borrow) && !kept.contains(key));
        let of: Vec<(InstanceId, LeaseId)> = of.map(|(key, _)| *key).collect();
        of.into_iter().for_each(|(creditor, lease)| self.release_range(creditor, lease, 0..u32::MAX, now_ms));
    }

    /// Releases entries of a held lease. Other leases are ignored, so that a sequence may hand in all that it frees,
    /// lost leases included.
    pub fn release(&mut self, entries: &RemoteEntries, now_ms: u64) {
        self.release_range(entries.creditor, entries.lease, entries.first..entries.entries, now_ms);
    }

    /// Releases all leases of a sequence; none of them is in its block table.
    pub fn release_leases_of(&mut self, seq: SeqId, now_ms: u64) {
        let of = self.leases.iter().filter(|(_, held)| held.seq == seq);
        let of: Vec<(InstanceId, LeaseId)> = of.map(|(key, _)| *key).collect();
        of.into_iter().for_each(|(creditor, lease)| self.release_range(creditor, lease, 0..u32::MAX, now_ms));
    }

    /// By entry of a held lease: the rBlock of the creditor's lent memory in which it is sealed, as reported;
    /// `u32::MAX` if not sealed.
    #[must_use]
    pub fn places(&self, creditor: InstanceId, lease: LeaseId, epoch: Epoch) -> &[u32] {
        let held = self.get(creditor, lease).filter(|held| held.epoch == epoch);
        held.map_or(&[], |held| &held.places)
    }

    /// As [`HeldLeases::release`], by creditor, lease and range.
    pub(super) fn release_range(&mut self, creditor: InstanceId, lease: LeaseId, entries: Range<u32>, now_ms: u64) {
        let key = (creditor, lease);
        let Some(held) = self.leases.get_mut(&key) else { return };
        let entries = entries.start..entries.end.min(held.blocks);
        if held.released.insert(entries.clone()) == 0 {
            return;
        }
        let (quic_addr, epoch) = (held.quic_addr.clone(), held.epoch);
        held.settle();
        if held.released.len() == held.blocks {
            self.leases.remove(&key);
        }
        self.start_release(key, quic_addr, epoch, entries, now_ms);
    }

    /// Releases entries of a lease that is not held (any more): a late grant, or one that seems lost.
    pub(super) fn start_release(
        &mut self,
        (creditor, lease): (InstanceId, LeaseId),
        quic_addr: String,
        epoch: Epoch,
        entries: Range<u32>,
        now_ms: u64,
    ) {
        let (first, end) = (entries.start, entries.end);
        // The new release covers these.
        let all = (creditor, lease, 0)..=(creditor, lease, u32::MAX);
        let covered = self.releasing.range(all).filter(|((_, _, f), r)| (first..end).contains(f) && r.entries <= end);
        let covered: Vec<_> = covered.map(|(key, _)| *key).collect();
        covered.iter().for_each(|key| drop(self.releasing.remove(key)));
        let deadline_ms = now_ms + limits::LEASE_TTL_MS;
        let releasing = Releasing { quic_addr, epoch, entries: end, sent_ms: now_ms, deadline_ms };
        let key = (creditor, lease, first);
        self.outputs.push_back(release_message(key, &releasing));
        // A longer release from the same entry may be in progress: it covers this one and is repeated on its own.
        match self.releasing.get(&key) {
            Some(longer) if longer.entries > end => {}
            _ if mutants::is(Mutant::ReleaseUnconfirmed) => {}
            _ => drop(self.releasing.insert(key, releasing)),
        }
    }

    pub(super) fn on_released(&mut self, from: InstanceId, m: &LeaseReleased) {
        let key = (from, LeaseId(m.lease), m.first);
        if self.releasing.get(&key).is_some_and(|r| m.entries >= r.entries) {
            self.releasing.remove(&key);
        }
    }

    /// Handles the reply to a renewal; returns the lost leases. Replies come in order: those to older renewals were
    /// dropped by a full queue.
    pub(super) fn on_renewed(&mut self, from: InstanceId, m: &LeaseRenewed) -> Vec<LeaseId> {
        let Some(renewals) = self.renewals.get_mut(&from) else { return Vec::new() };
        let Some(at) = renewals.outstanding.iter().position(|(seq, ..)| *seq == m.seq) else { return Vec::new() };
        let Some((_, sent_ms, leases)) = renewals.outstanding.drain(..=at).next_back() else { return Vec::new() };
        let unknown: BTreeSet<u64> = m.unknown.iter().copied().collect();
        let mut lost = Vec::new();
        for lease in leases {
            match self.leases.get_mut(&(from, lease)) {
                Some(_) if unknown.contains(&lease.0) => lost.push(lease),
                Some(held) => held.confirmed_ms = held.confirmed_ms.max(sent_ms),
                None => {}
            }
        }
        lost
    }

    /// Drops the unanswered renewals to a peer whose connection was lost.
    pub(super) fn on_peer_down(&mut self, peer: InstanceId) {
        if let Some(renewals) = self.renewals.get_mut(&peer) {
            renewals.outstanding.clear();
        }
    }

    /// Drops releases and renewals to a creditor whose process was replaced. Returns the lost leases.
    pub(super) fn on_peer_restarted(&mut self, peer: InstanceId) -> Vec<LeaseId> {
        self.renewals.remove(&peer);
        self.releasing.retain(|(creditor, _, _), _| *creditor != peer);
        self.of(peer).collect()
    }

    /// Drops all releases and renewals. Returns the lost leases.
    pub(super) fn forget_all(&mut self) -> Vec<(InstanceId, LeaseId)> {
        self.renewals.clear();
        self.releasing.clear();
        self.leases.keys().copied().collect()
    }

    /// Extends a reservation: KV for it was sent.
    pub(super) fn note_written(&mut self, creditor: InstanceId, lease: LeaseId, now_ms: u64) {
        if let Some(reserved) = self.leases.get_mut(&(creditor, lease)).and_then(|h| h.reserved.as_mut()) {
            reserved.written_ms = reserved.written_ms.max(now_ms);
        }
    }

    /// Marks entries that the creditor has verified. Entries released meanwhile are left out.
    pub(super) fn on_sealed(&mut self, from: InstanceId, m: &LeaseSealed) {
        let lease = LeaseId(m.lease);
        let Some(held) = self.leases.get_mut(&(from, lease)).filter(|h| h.epoch.0 == m.epoch) else { return };
        for (entry, block) in m.entries.iter().zip(&m.blocks).filter(|(entry, _)| **entry < held.blocks) {
            if held.places.is_empty() {
                held.places.resize(held.blocks as usize, NO_PLACE);
            }
            held.places[*entry as usize] = *block;
        }
        let Some(reserved) = &mut held.reserved else { return };
        let (blocks, released) = (held.blocks, &held.released);
        let mut entries = m.entries.clone();
        entries.retain(|e| *e < blocks && !released.contains(*e) && reserved.sealed.insert(*e..*e + 1) == 1);
        held.settle();
        let seq = held.seq;
        if !entries.is_empty() {
            self.outputs.push_back(Output::Sealed { seq, creditor: from, lease, entries });
        }
    }

    /// Releases the unsealed entries of reservations that were not written for too long.
    fn expire_reservations(&mut self, now_ms: u64) {
        let over = |h: &Held| h.reserved.as_ref().is_some_and(|r| now_ms >= r.lost_at_ms());
        let over: Vec<_> = self.leases.iter().filter(|(_, h)| over(h)).map(|(key, _)| *key).collect();
        for (creditor, lease) in over {
            let Some(held) = self.leases.get_mut(&(creditor, lease)) else { continue };
            let Some(reserved) = held.reserved.take() else { continue };
            let (seq, gaps) = (held.seq, reserved.sealed.gaps(0..held.blocks).collect::<Vec<_>>());
            gaps.into_iter().for_each(|gap| self.release_range(creditor, lease, gap, now_ms));
            self.outputs.push_back(Output::ReservationLost { seq, creditor, lease });
        }
    }

    /// Removes entries that the creditor revoked. Returns the lease's sequence and whether no entry of the lease is
    /// left.
    pub(super) fn on_revoked(
        &mut self,
        from: InstanceId,
        lease: LeaseId,
        entries: Range<u32>,
    ) -> Option<(SeqId, bool)> {
        let held = self.leases.get_mut(&(from, lease))?;
        let new = held.released.insert(entries.start..entries.end.min(held.blocks));
        let (seq, gone) = (held.seq, held.released.len() == held.blocks);
        held.settle();
        if gone {
            self.leases.remove(&(from, lease));
        }
        (new > 0).then_some((seq, gone))
    }

    /// Removes and returns a lease.
    pub(super) fn remove(&mut self, creditor: InstanceId, lease: LeaseId) -> Option<Held> {
        self.leases.remove(&(creditor, lease))
    }

    /// Leases that the creditor may be about to free, having not confirmed them in time.
    pub(super) fn overdue(&self, now_ms: u64) -> Vec<(InstanceId, LeaseId)> {
        self.leases.iter().filter(|(_, h)| now_ms >= h.lost_at_ms()).map(|(key, _)| *key).collect()
    }

    /// Repeats releases and sends renewals that are due.
    pub(super) fn tick(&mut self, now_ms: u64) {
        self.expire_reservations(now_ms);
        self.releasing.retain(|_, r| now_ms < r.deadline_ms);
        for (key, r) in &mut self.releasing {
            if now_ms >= r.sent_ms + limits::CONTROL_REPEAT_MS {
                r.sent_ms = now_ms;
                self.outputs.push_back(release_message(*key, r));
            }
        }
        let (leases, renewed) = (&self.leases, &mut self.renewed);
        self.renewals.retain(|creditor, r| {
            let mut of = leases.range((*creditor, LeaseId(0))..=(*creditor, LeaseId(u64::MAX))).peekable();
            let Some((_, first)) = of.peek() else { return !r.outstanding.is_empty() && !is_overdue(r, now_ms) };
            if now_ms < r.sent_ms + limits::LEASE_RENEW_MS {
                return true;
            }
            r.sent_ms = now_ms;
            let quic_addr = first.quic_addr.clone();
            let ids: Vec<LeaseId> = of.map(|((_, lease), _)| *lease).collect();
            for chunk in ids.chunks(limits::LEASE_RENEW_LEASES_MAX) {
                *renewed += 1;
                r.outstanding.push_back((*renewed, now_ms, chunk.to_vec()));
                let leases = chunk.iter().map(|l| l.0).collect();
                let body = ControlBody::LeaseRenew(LeaseRenew { leases, seq: *renewed });
                self.outputs.push_back(Output::ToPeer { instance: *creditor, quic_addr: quic_addr.clone(), body });
            }
            true
        });
    }

    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        let repeats = self.releasing.values().map(|r| r.deadline_ms.min(r.sent_ms + limits::CONTROL_REPEAT_MS));
        let reserved = self.leases.values().filter_map(|h| h.reserved.as_ref()).map(Reserved::lost_at_ms);
        let lost = self.leases.values().map(Held::lost_at_ms).chain(reserved);
        let renewals = self.renewals.values().map(|r| r.sent_ms + limits::LEASE_RENEW_MS);
        repeats.chain(lost).chain(renewals).min()
    }

    /// Number of releases that creditors have not acknowledged yet.
    pub fn releasing(&self) -> usize {
        self.releasing.len()
    }
}

fn is_overdue(renewals: &Renewals, now_ms: u64) -> bool {
    now_ms > renewals.sent_ms + limits::LEASE_TTL_MS
}

fn release_message((instance, lease, first): (InstanceId, LeaseId, u32), r: &Releasing) -> Output {
    let release = LeaseRelease { lease: lease.0, epoch: r.epoch.0, entries: r.entries, first };
    Output::ToPeer { instance, quic_addr: r.quic_addr.clone(), body: ControlBody::LeaseRelease(release) }
}
