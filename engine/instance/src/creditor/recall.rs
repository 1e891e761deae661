//! Recall, the creditor's side: lent blocks are asked back for growth, and taken at the deadline if still needed.

use super::Creditor;
use crate::cx::Cx;
use crate::event::PeerKey;
use crate::outcome::{Outcome, Outcomes};
use lagoon_cluster::Revoked;
use lagoon_protocol::{ControlBody, LeaseRevoked};
use lagoon_types::InstanceId;

/// Asks debtors for blocks. With `take`, what they do not return in time is taken if it is still needed then.
pub(super) fn want_back(cx: &mut Cx, blocks: u32, take: bool) {
    for (debtor, recall) in cx.memory.rm.recall(blocks, take, cx.now_ms) {
        cx.send_if_connected(debtor, ControlBody::Recall(recall));
    }
}

impl Creditor {
    /// Ends recalls that were not met. What is needed still is taken when the batch has said how much that is.
    pub(super) fn expire_recalls(&mut self, cx: &mut Cx) -> Outcomes {
        let unmet = cx.memory.rm.unmet_recalls(cx.now_ms);
        self.recalls_missed += unmet.len() as u64;
        let taken = unmet.into_iter().filter(|unmet| unmet.take);
        taken.map(|unmet| Outcome::RecallMissed { debtor: unmet.debtor, missing: unmet.missing }).collect()
    }

    /// Takes blocks back from a debtor.
    pub(super) fn revoke(&mut self, cx: &mut Cx, debtor: InstanceId, blocks: u32) {
        for revoked in cx.memory.rm.revoke(debtor, blocks, cx.now_ms) {
            let tokens = |entries: u32| entries * cx.config.block_tokens;
            let freed = tokens(revoked.entries.start)..tokens(revoked.entries.end);
            // The debtor ends those steps itself when it hears of it, and loses no more than these entries by it.
            self.requests.forget_lease(revoked.debtor, revoked.lease, &freed);
            self.blocks_revoked += u64::from(revoked.entries.end - revoked.entries.start);
            if let Some(peer) = cx.peers.key(revoked.debtor) {
                tell_revoked(cx, peer, &revoked);
            }
        }
    }
}

/// A debtor is connected again: it may not have heard of what was taken back meanwhile, or just before. It could not
/// attend to that (accesses to freed entries are refused, and entries are not lent again under the same lease), but a
/// refusal would cost it all that it has here.
pub(super) fn repeat_revoked(cx: &mut Cx, peer: PeerKey, debtor: InstanceId) {
    let taken: Vec<Revoked> = cx.memory.rm.revoked().filter(|r| r.debtor == debtor).cloned().collect();
    taken.iter().for_each(|revoked| tell_revoked(cx, peer, revoked));
}

fn tell_revoked(cx: &mut Cx, peer: PeerKey, revoked: &Revoked) {
    let reason = "a recall was not met in time".to_owned();
    let (first, entries) = (revoked.entries.start, revoked.entries.end);
    let body = ControlBody::LeaseRevoked(LeaseRevoked { lease: revoked.lease.0, reason, first, entries });
    cx.send(peer, body);
}
