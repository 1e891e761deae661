//! Recall: a creditor wants lent blocks back, because growth goes before lending.
//!
//! The debtor takes them home if it has room, else moves them to another creditor, else does nothing. At the deadline
//! the creditor takes what its own running sequences still need; the debtor has lost that. A recall for a request that
//! only waits takes nothing.

use super::{Place, Request, Why};
use crate::event::{Effect, PeerKey};
use crate::instance::Instance;
use lagoon_cluster::Revoked;
use lagoon_protocol::{ControlBody, LeasePurpose, LeaseRevoked, Recall};
use lagoon_types::limits::MOVE_MS_MAX;
use lagoon_types::{InstanceId, SeqId};

impl Instance {
    /// A creditor wants blocks back: those of the youngest sequences go first.
    pub(crate) fn on_recall(&mut self, creditor: InstanceId, recall: &Recall) {
        self.moves.status.recalls_received += 1;
        self.rm.pause_creditor(creditor, self.now_ms + u64::from(recall.pause_ms).min(MOVE_MS_MAX));
        let deadline_ms = self.now_ms + u64::from(recall.deadline_ms).min(MOVE_MS_MAX);
        let mut left = recall.blocks;
        let seqs: Vec<SeqId> = self.seqs.keys().rev().copied().filter(|seq| !self.is_frozen(*seq)).collect();
        for seq in seqs {
            let there =
                u32::try_from(self.candidates(seq, Place::At(creditor), false).len()).unwrap_or(u32::MAX).min(left);
            left -= there;
            // What is kept for growth stays free.
            let home = there.min(self.room().saturating_sub(1));
            for (blocks, target) in [(home, Place::Here), (there - home, Place::At(InstanceId(0)))] {
                let (source, why, purpose) = (Place::At(creditor), Why::Recall, LeasePurpose::Move);
                let (target_addr, first) = (None, None);
                let request = Request { seq, why, source, target, target_addr, blocks, first, purpose, deadline_ms };
                // What cannot move is missing at the creditor's deadline, and that is its answer.
                if blocks > 0 && self.start_move(request).is_err() {
                    left += blocks;
                }
            }
        }
    }

    /// Asks debtors for blocks. With `take`, what they do not return in time is taken if it is still needed then.
    pub(crate) fn want_back(&mut self, blocks: u32, take: bool) {
        for (debtor, recall) in self.rm.recall(blocks, take, self.now_ms) {
            if let Some(peer) = self.peers.key(debtor) {
                self.effects.push(Effect::Control { peer, body: ControlBody::Recall(recall) });
            }
        }
    }

    /// Blocks that running sequences lack to go on.
    fn missing_blocks(&self) -> u32 {
        let running = self.seqs.values().filter(|s| self.sched.is_running(s.id));
        let short: u32 = running.map(|s| s.blocks.shortfall(s.len())).sum();
        short.saturating_sub(self.rm.available())
    }

    /// Ends recalls that were not met, and takes what is needed still.
    pub(crate) fn expire_recalls(&mut self) {
        for unmet in self.rm.unmet_recalls(self.now_ms) {
            self.moves.status.recalls_missed += 1;
            let blocks = if unmet.take { unmet.missing.min(self.missing_blocks()) } else { 0 };
            for revoked in self.rm.revoke(unmet.debtor, blocks, self.now_ms) {
                let tokens = |entries: u32| entries * self.config.block_tokens;
                let freed = tokens(revoked.entries.start)..tokens(revoked.entries.end);
                // The debtor ends those steps itself when it hears of it, and loses no more than these entries by it.
                self.guests.forget_lease(revoked.debtor, revoked.lease, &freed);
                self.moves.status.blocks_revoked += u64::from(revoked.entries.end - revoked.entries.start);
                if let Some(peer) = self.peers.key(revoked.debtor) {
                    self.tell_revoked(peer, &revoked);
                }
            }
        }
    }

    /// A debtor is connected again: it may not have heard of what was taken back meanwhile, or just before. It could not
    /// attend to that (accesses to freed entries are refused, and entries are not lent again under the same lease), but a
    /// refusal would cost it all that it has here.
    pub(crate) fn repeat_revoked(&mut self, peer: PeerKey, debtor: InstanceId) {
        let taken: Vec<Revoked> = self.rm.revoked().filter(|r| r.debtor == debtor).cloned().collect();
        taken.iter().for_each(|revoked| self.tell_revoked(peer, revoked));
    }

    fn tell_revoked(&mut self, peer: PeerKey, revoked: &Revoked) {
        let reason = "a recall was not met in time".to_owned();
        let (first, entries) = (revoked.entries.start, revoked.entries.end);
        let body = ControlBody::LeaseRevoked(LeaseRevoked { lease: revoked.lease.0, reason, first, entries });
        self.effects.push(Effect::Control { peer, body });
    }
}
