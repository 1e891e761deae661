//! What a debtor holds of others: leases in use, releases that are not acknowledged yet, and renewals.
//!
//! Invariants:
//! * a lease is held from its grant until it is released or lost; while it is held, its creditor lends it, because it
//!   counts as lost [`MARGIN`] of its time to live before the creditor may free it, counted from when the last
//!   acknowledged request or renewal was *sent*;
//! * a release is repeated until it is acknowledged, or the creditor is another process, or the creditor's own time to
//!   live has done its work.

use super::output::{BorrowId, Output};
use crate::mutants::{self, Mutant};
use lagoon_kv::RangeSet;
use lagoon_protocol::{ControlBody, LeaseRelease, LeaseReleased, LeaseRenew, LeaseRenewed, LeaseSealed};
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId, limits};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// One part in this many of a lease's time to live is the debtor's safety margin.
const MARGIN: u64 = 8;
/// Leases in one renewal message (10 bytes each at most, well under a control frame).
const RENEW_LEASES_MAX: usize = 32_768;
const _: () = assert!(RENEW_LEASES_MAX * 12 < limits::CONTROL_FRAME_BYTES_MAX);

/// A lease that this instance holds.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) quic_addr: String,
    pub(super) epoch: Epoch,
    pub(super) seq: SeqId,
    /// Entries that it ever had.
    pub(super) blocks: u32,
    pub(super) released: RangeSet,
    pub(super) ttl_ms: u64,
    /// When the last message was sent that the creditor is known to have taken as a sign of life.
    pub(super) confirmed_ms: u64,
    /// The borrow that it belongs to, until that is complete.
    pub(super) borrow: Option<BorrowId>,
    /// Of a lease for a move, until its entries are all sealed.
    pub(super) reserved: Option<Reserved>,
    /// By entry, in which rBlock of the creditor's lent memory it is sealed, as far as the creditor said; else [`NO_PLACE`].
    pub(super) places: Vec<u32>,
}

/// Of an entry that is not sealed, or not in memory that can be mapped.
pub(super) const NO_PLACE: u32 = u32::MAX;

/// A reservation for a move, on the debtor.
#[derive(Clone, Debug)]
pub(super) struct Reserved {
    pub(super) sealed: RangeSet,
    /// When the last write was sent, or the request.
    pub(super) written_ms: u64,
}

impl Reserved {
    /// Before the creditor may free it: that counts from when it received what was sent here.
    fn lost_at_ms(&self) -> u64 {
        self.written_ms + limits::MOVE_RESERVE_MS - limits::MOVE_RESERVE_MS / MARGIN
    }
}

impl Held {
    /// A reservation whose entries are all sealed or released is a lease like any other.
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

/// Entries up to `entries`, which is their end.
#[derive(Debug)]
struct Releasing {
    quic_addr: String,
    epoch: Epoch,
    entries: u32,
    sent_ms: u64,
    give_up_ms: u64,
}

/// Renewals to one creditor that are not answered, the oldest first: their numbers, when they were sent, and what they renew.
#[derive(Debug)]
struct Renewals {
    sent_ms: u64,
    outstanding: VecDeque<(u64, u64, Vec<LeaseId>)>,
}

#[derive(Debug, Default)]
pub(super) struct HeldLeases {
    leases: BTreeMap<(InstanceId, LeaseId), Held>,
    /// By creditor, lease and first entry.
    releasing: BTreeMap<(InstanceId, LeaseId, u32), Releasing>,
    renewals: BTreeMap<InstanceId, Renewals>,
    /// The number of the last one.
    renewed: u64,
    pub(super) outputs: VecDeque<Output>,
}

impl HeldLeases {
    pub(super) fn blocks(&self) -> u32 {
        self.leases.values().map(|h| h.blocks - h.released.len()).sum()
    }

    pub(super) fn has_from(&self, creditor: InstanceId) -> bool {
        self.of(creditor).next().is_some()
    }

    pub(super) fn get(&self, creditor: InstanceId, lease: LeaseId) -> Option<&Held> {
        self.leases.get(&(creditor, lease))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (InstanceId, LeaseId, Epoch, u32, u32)> + '_ {
        self.leases.iter().flat_map(|((creditor, lease), h)| {
            h.released.gaps(0..h.blocks).map(|r| (*creditor, *lease, h.epoch, r.start, r.end))
        })
    }

    pub(super) fn unsealed(&self) -> impl Iterator<Item = (InstanceId, LeaseId, u32)> + '_ {
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

    /// The borrow that `leases` belong to is complete.
    pub(super) fn hand_out(&mut self, leases: &[(InstanceId, LeaseId)]) {
        for key in leases {
            self.leases.get_mut(key).expect("a borrow's leases are held").borrow = None;
        }
    }

    /// Releases entries, and stops holding the lease if they are the last.
    pub(super) fn release(&mut self, creditor: InstanceId, lease: LeaseId, entries: Range<u32>, now_ms: u64) {
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

    /// Releases entries of a lease that are not (or no longer) held: a late grant, or one that seems lost.
    pub(super) fn start_release(
        &mut self,
        (creditor, lease): (InstanceId, LeaseId),
        quic_addr: String,
        epoch: Epoch,
        entries: Range<u32>,
        now_ms: u64,
    ) {
        let (first, end) = (entries.start, entries.end);
        // What the new one says need not be said again.
        let all = (creditor, lease, 0)..=(creditor, lease, u32::MAX);
        let covered = self.releasing.range(all).filter(|((_, _, f), r)| (first..end).contains(f) && r.entries <= end);
        let covered: Vec<_> = covered.map(|(key, _)| *key).collect();
        covered.iter().for_each(|key| drop(self.releasing.remove(key)));
        let give_up_ms = now_ms + limits::LEASE_TTL_MS;
        let releasing = Releasing { quic_addr, epoch, entries: end, sent_ms: now_ms, give_up_ms };
        let key = (creditor, lease, first);
        self.outputs.push_back(release_message(key, &releasing));
        // A longer one from the same entry on may be in progress: what it says holds, and it is repeated on its own.
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

    /// Takes an answer to a renewal; returns the leases that are lost. Answers come in order: those to older renewals found a full
    /// queue.
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

    /// Answers that were in progress will not come.
    pub(super) fn on_peer_down(&mut self, peer: InstanceId) {
        if let Some(renewals) = self.renewals.get_mut(&peer) {
            renewals.outstanding.clear();
        }
    }

    /// The creditor is another process: nothing of the old one is left to release. Returns what is lost.
    pub(super) fn on_peer_restarted(&mut self, peer: InstanceId) -> Vec<LeaseId> {
        self.renewals.remove(&peer);
        self.releasing.retain(|(creditor, _, _), _| *creditor != peer);
        self.of(peer).collect()
    }

    /// Nothing is renewed or released any more. Returns what is lost.
    pub(super) fn forget_all(&mut self) -> Vec<(InstanceId, LeaseId)> {
        self.renewals.clear();
        self.releasing.clear();
        self.leases.keys().copied().collect()
    }

    /// KV for a reservation was sent: it lives on.
    pub(super) fn note_written(&mut self, creditor: InstanceId, lease: LeaseId, now_ms: u64) {
        if let Some(reserved) = self.leases.get_mut(&(creditor, lease)).and_then(|h| h.reserved.as_mut()) {
            reserved.written_ms = reserved.written_ms.max(now_ms);
        }
    }

    /// The creditor has verified entries. Those that were released meanwhile are left out.
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

    /// Gives up reservations that were not written for too long, what is not sealed of them.
    fn expire_reservations(&mut self, now_ms: u64) {
        let over = |h: &Held| h.reserved.as_ref().is_some_and(|r| now_ms >= r.lost_at_ms());
        let over: Vec<_> = self.leases.iter().filter(|(_, h)| over(h)).map(|(key, _)| *key).collect();
        for (creditor, lease) in over {
            let Some(held) = self.leases.get_mut(&(creditor, lease)) else { continue };
            let Some(reserved) = held.reserved.take() else { continue };
            let (seq, gaps) = (held.seq, reserved.sealed.gaps(0..held.blocks).collect::<Vec<_>>());
            gaps.into_iter().for_each(|gap| self.release(creditor, lease, gap, now_ms));
            self.outputs.push_back(Output::ReservationLost { seq, creditor, lease });
        }
    }

    /// The creditor took entries back. Returns the lease's sequence and whether nothing of it is left.
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

    /// Stops holding a lease.
    pub(super) fn remove(&mut self, creditor: InstanceId, lease: LeaseId) -> Option<Held> {
        self.leases.remove(&(creditor, lease))
    }

    /// Leases whose time to live may be over.
    pub(super) fn overdue(&self, now_ms: u64) -> Vec<(InstanceId, LeaseId)> {
        self.leases.iter().filter(|(_, h)| now_ms >= h.lost_at_ms()).map(|(key, _)| *key).collect()
    }

    /// Repeats releases and sends renewals that are due.
    pub(super) fn tick(&mut self, now_ms: u64) {
        self.expire_reservations(now_ms);
        self.releasing.retain(|_, r| now_ms < r.give_up_ms);
        for (key, r) in &mut self.releasing {
            if now_ms >= r.sent_ms + limits::CONTROL_REPEAT_MS {
                r.sent_ms = now_ms;
                self.outputs.push_back(release_message(*key, r));
            }
        }
        let (leases, renewed) = (&self.leases, &mut self.renewed);
        self.renewals.retain(|creditor, r| {
            let mut of = leases.range((*creditor, LeaseId(0))..=(*creditor, LeaseId(u64::MAX))).peekable();
            let Some((_, first)) = of.peek() else { return !r.outstanding.is_empty() && !gave_up(r, now_ms) };
            if now_ms < r.sent_ms + limits::LEASE_RENEW_MS {
                return true;
            }
            r.sent_ms = now_ms;
            let quic_addr = first.quic_addr.clone();
            let ids: Vec<LeaseId> = of.map(|((_, lease), _)| *lease).collect();
            for chunk in ids.chunks(RENEW_LEASES_MAX) {
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
        let repeats = self.releasing.values().map(|r| r.give_up_ms.min(r.sent_ms + limits::CONTROL_REPEAT_MS));
        let reserved = self.leases.values().filter_map(|h| h.reserved.as_ref()).map(Reserved::lost_at_ms);
        let lost = self.leases.values().map(Held::lost_at_ms).chain(reserved);
        let renewals = self.renewals.values().map(|r| r.sent_ms + limits::LEASE_RENEW_MS);
        repeats.chain(lost).chain(renewals).min()
    }

    pub(super) fn releasing(&self) -> usize {
        self.releasing.len()
    }
}

fn gave_up(renewals: &Renewals, now_ms: u64) -> bool {
    now_ms > renewals.sent_ms + limits::LEASE_TTL_MS
}

fn release_message((instance, lease, first): (InstanceId, LeaseId, u32), r: &Releasing) -> Output {
    let release = LeaseRelease { lease: lease.0, epoch: r.epoch.0, entries: r.entries, first };
    Output::ToPeer { instance, quic_addr: r.quic_addr.clone(), body: ControlBody::LeaseRelease(release) }
}
