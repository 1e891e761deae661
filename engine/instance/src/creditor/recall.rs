//! Recall, the creditor's side: lent blocks are asked back for growth, and taken at the deadline if still needed.

use crate::event::PeerKey;
use crate::instance::Instance;
use lagoon_cluster::Revoked;
use lagoon_protocol::{ControlBody, LeaseRevoked};
use lagoon_types::InstanceId;

impl Instance {
    /// Asks debtors for blocks. With `take`, what they do not return in time is taken if it is still needed then.
    pub(crate) fn want_back(&mut self, blocks: u32, take: bool) {
        for (debtor, recall) in self.cx.memory.rm.recall(blocks, take, self.cx.now_ms) {
            if let Some(peer) = self.cx.peers.key(debtor) {
                self.cx.send(peer, ControlBody::Recall(recall));
            }
        }
    }

    /// Blocks that running sequences lack to go on.
    fn missing_blocks(&self) -> u32 {
        let running = self.batch.seqs().filter(|s| self.batch.is_running(s.id));
        let short: u32 = running.map(|s| s.blocks.shortfall(s.len())).sum();
        short.saturating_sub(self.cx.memory.rm.available())
    }

    /// Ends recalls that were not met, and takes what is needed still.
    pub(crate) fn expire_recalls(&mut self) {
        for unmet in self.cx.memory.rm.unmet_recalls(self.cx.now_ms) {
            self.moves.status.recalls_missed += 1;
            let blocks = if unmet.take { unmet.missing.min(self.missing_blocks()) } else { 0 };
            for revoked in self.cx.memory.rm.revoke(unmet.debtor, blocks, self.cx.now_ms) {
                let tokens = |entries: u32| entries * self.cx.config.block_tokens;
                let freed = tokens(revoked.entries.start)..tokens(revoked.entries.end);
                // The debtor ends those steps itself when it hears of it, and loses no more than these entries by it.
                self.creditor.requests.forget_lease(revoked.debtor, revoked.lease, &freed);
                self.moves.status.blocks_revoked += u64::from(revoked.entries.end - revoked.entries.start);
                if let Some(peer) = self.cx.peers.key(revoked.debtor) {
                    self.tell_revoked(peer, &revoked);
                }
            }
        }
    }

    /// A debtor is connected again: it may not have heard of what was taken back meanwhile, or just before. It could not
    /// attend to that (accesses to freed entries are refused, and entries are not lent again under the same lease), but a
    /// refusal would cost it all that it has here.
    pub(crate) fn repeat_revoked(&mut self, peer: PeerKey, debtor: InstanceId) {
        let taken: Vec<Revoked> = self.cx.memory.rm.revoked().filter(|r| r.debtor == debtor).cloned().collect();
        taken.iter().for_each(|revoked| self.tell_revoked(peer, revoked));
    }

    fn tell_revoked(&mut self, peer: PeerKey, revoked: &Revoked) {
        let reason = "a recall was not met in time".to_owned();
        let (first, entries) = (revoked.entries.start, revoked.entries.end);
        let body = ControlBody::LeaseRevoked(LeaseRevoked { lease: revoked.lease.0, reason, first, entries });
        self.cx.send(peer, body);
    }
}
