//! Stripes: creditors on other hosts hold equal parts of the KV for which the debtor's own host has no memory (docs/adr/0039).
//!
//! A step asks each other host once, through a relay, however many of its instances hold KV; the more hold some, the less each one's
//! device attends to. Without relays every stripe would be one more query between hosts: instances of unknown hosts get none. The gManager
//! names candidates' hosts, so that a loan of instances that are not connected yet is in stripes, too.

use super::Borrow;
use lagoon_protocol::{Candidate, LeasePurpose};
use lagoon_types::{InstanceId, limits};
use std::collections::{BTreeMap, BTreeSet};

/// Which instances are on this instance's host.
#[derive(Debug)]
pub(super) struct Hosts {
    /// Fingerprint of this instance's host; 0 if it is unknown, or queries are not relayed.
    own: u64,
    /// Whether a connected instance is on this one's host; `None` if its host is unknown, or it knows no relays.
    beside: BTreeMap<InstanceId, Option<bool>>,
    /// Fewest blocks of a stripe: with less than a part of the debtor's memory the query costs more than it spares.
    stripe: u32,
}

impl Hosts {
    pub(super) fn new(blocks_total: u32, own: u64) -> Self {
        Self { own, beside: BTreeMap::new(), stripe: blocks_total.div_ceil(limits::STRIPES_PER_MEMORY).max(1) }
    }

    pub(super) fn set(&mut self, instance: InstanceId, beside: Option<bool>) {
        self.beside.insert(instance, beside);
    }

    pub(super) fn forget(&mut self, instance: InstanceId) {
        self.beside.remove(&instance);
    }

    /// Whether a candidate is on this host: by its Hello if it is connected, else by the gManager. `None` if that is unknown.
    fn is_beside(&self, candidate: &Candidate) -> Option<bool> {
        let connected = self.beside.get(&InstanceId(candidate.instance)).copied();
        connected.unwrap_or_else(|| (self.own != 0 && candidate.host != 0).then_some(candidate.host == self.own))
    }

    fn is(&self, candidate: &Candidate, beside: bool) -> bool {
        self.is_beside(candidate) == Some(beside)
    }

    /// Whether a borrow becomes stripes, for which the gManager is asked for more candidates than it names at once.
    pub(super) fn wants_more(&self, borrow: &Borrow) -> bool {
        let beside = borrow.candidates.iter().filter(|c| self.is(c, true)).map(|c| c.blocks_lendable);
        let crossing = borrow.left().saturating_sub(beside.fold(0, u32::saturating_add));
        borrow.purpose == LeasePurpose::Growth
            && borrow.candidates.len() < limits::STRIPE_CANDIDATES_MAX
            && crossing >= 2 * self.stripe
            && borrow.candidates.iter().any(|c| self.is(c, false))
    }

    /// Orders candidates: mapped ones (`near`), those of this host, those of unknown hosts, those of others.
    pub(super) fn order(&self, near: &BTreeSet<InstanceId>, candidates: &mut [Candidate]) {
        candidates.sort_by_key(|c| match self.is_beside(c) {
            _ if near.contains(&InstanceId(c.instance)) => 0,
            Some(true) => 1,
            None => 2,
            Some(false) => 3,
        });
    }

    /// Blocks that a candidate is asked for before the borrow's further ones: all, or a stripe.
    pub(super) fn part(&self, candidate: &Candidate, borrow: &Borrow) -> u32 {
        let left = borrow.left();
        let several = left >= 2 * self.stripe && borrow.purpose == LeasePurpose::Growth;
        if !several || !self.is(candidate, false) {
            return left;
        }
        let further = borrow.candidates.iter().filter(|c| self.is(c, false)).map(|c| c.blocks_lendable);
        even(left, further.chain([candidate.blocks_lendable]).collect()).max(self.stripe).min(left)
    }
}

/// The least number of blocks of which creditors that lend these hold `left` together, if none holds more; `left` if they lend less.
fn even(left: u32, mut lendable: Vec<u32>) -> u32 {
    lendable.sort_unstable();
    let (mut rest, mut creditors) = (left, u32::try_from(lendable.len()).unwrap_or(u32::MAX));
    for blocks in lendable {
        let each = rest.div_ceil(creditors);
        if blocks >= each {
            return each;
        }
        (rest, creditors) = (rest - blocks, creditors - 1);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::even;

    #[test]
    fn stripes_are_even_up_to_what_each_creditor_lends() {
        let of = |left, lendable: &[u32]| even(left, lendable.to_vec());
        assert_eq!((of(12, &[9, 9, 9]), of(13, &[9, 9, 9]), of(12, &[])), (4, 5, 12));
        assert_eq!(of(12, &[9, 1, 9]), 6, "1 + 6 + 5");
        assert_eq!(of(20, &[2, 9, 9]), 9);
        assert_eq!(of(21, &[2, 9, 9]), 21, "too few blocks: each is asked for all");
    }
}
