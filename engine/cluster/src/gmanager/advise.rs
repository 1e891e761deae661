//! Which creditors to recommend: locality, then availability (Infinite-LLM v1 §4.4).
//!
//! * **Locality**: the round trip between debtor and creditor, as either measured it. Round trips are compared by their
//!   power of two, so that noise between equally near creditors decides nothing; an unmeasured link counts as one
//!   millisecond, a network's usual.
//! * **Availability**: what the creditor said it would lend, less what others were sent there for since. Competing
//!   debtors are thus spread evenly, before any of them has taken anything.

use super::{GManager, Instance};
use lagoon_protocol::{BorrowQuery, Candidate};
use lagoon_types::{InstanceId, limits};
use std::cmp::Reverse;

/// The round trip of a link that nobody measured yet, in microseconds.
const RTT_UNKNOWN_US: u32 = 1_000;

impl GManager {
    /// At most three creditors for a debtor, best first.
    pub(super) fn candidates(&mut self, query: &BorrowQuery, now_ms: u64) -> Vec<Candidate> {
        let debtor = InstanceId(query.debtor);
        let may_lend = |id: InstanceId, i: &Instance| {
            id != debtor && i.is_live(now_ms) && !i.paused && i.lendable > 0 && !query.exclude.contains(&id.0)
        };
        let mut ranked: Vec<_> = self
            .instances
            .iter()
            .filter(|(id, i)| may_lend(**id, i))
            .map(|(id, i)| (self.distance(debtor, *id), Reverse(i.lendable.saturating_sub(i.recommended)), *id))
            .collect();
        ranked.sort_unstable();
        ranked.truncate(limits::CANDIDATES);
        self.book(query.blocks, &ranked.iter().map(|r| r.2).collect::<Vec<_>>())
    }

    /// Books `blocks` with the creditors in the order in which the debtor will ask them, and names them.
    fn book(&mut self, blocks: u32, creditors: &[InstanceId]) -> Vec<Candidate> {
        let mut left = blocks;
        let candidates = creditors.iter().map(|id| {
            let i = self.instances.get_mut(id).expect("a ranked instance is known");
            let available = i.lendable.saturating_sub(i.recommended);
            let taken = left.min(available);
            i.recommended += taken;
            left -= taken;
            Candidate { instance: id.0, quic_addr: i.registration.quic_addr.clone(), blocks_lendable: i.lendable }
        });
        candidates.collect()
    }

    /// Distance class of two instances: the power of two of their round trip in microseconds.
    fn distance(&self, a: InstanceId, b: InstanceId) -> u32 {
        let measured = self.rtt_us(a, b).into_iter().chain(self.rtt_us(b, a)).min();
        measured.unwrap_or(RTT_UNKNOWN_US).max(1).ilog2()
    }

    fn rtt_us(&self, from: InstanceId, to: InstanceId) -> Option<u32> {
        let heartbeat = self.instances.get(&from)?.heartbeat.as_ref()?;
        heartbeat.links.iter().find(|l| l.peer == to.0).map(|l| l.rtt_us)
    }
}
