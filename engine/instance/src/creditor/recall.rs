//! Recall, creditor side: lent blocks are recalled for growth, and revoked at the deadline if still needed.

use super::Creditor;
use crate::cx::Cx;
use crate::event::PeerKey;
use crate::outcome::{Outcome, Outcomes};
use lagoon_cluster::Revoked;
use lagoon_protocol::{ControlBody, LeaseRevoked};
use lagoon_types::InstanceId;

/// Recalls blocks from debtors. With `take`, blocks not returned in time are revoked if still needed then.
pub(super) fn want_back(cx: &mut Cx, blocks: u32, take: bool) {
    for (debtor, recall) in cx.memory.rm.creditor.recall(blocks, take, cx.now_ms, &cx.memory.rm.pool) {
        cx.send_if_connected(debtor, ControlBody::Recall(recall));
    }
}

impl Creditor {
    /// Ends recalls that passed their deadline. Reports the missing blocks; the batch decides how many of them to revoke.
    pub(super) fn expire_recalls(&mut self, cx: &mut Cx) -> Outcomes {
        let unmet = cx.memory.rm.unmet_recalls(cx.now_ms);
        self.recalls_missed += unmet.len() as u64;
        let taken = unmet.into_iter().filter(|unmet| unmet.take);
        taken.map(|unmet| Outcome::RecallMissed { debtor: unmet.debtor, missing: unmet.missing }).collect()
    }

    /// Revokes blocks of a debtor.
    pub(super) fn revoke(&mut self, cx: &mut Cx, debtor: InstanceId, blocks: u32) {
        for revoked in cx.memory.rm.creditor.revoke(debtor, blocks, cx.now_ms, &mut cx.memory.rm.pool) {
            let tokens = |entries: u32| entries * cx.config.block_tokens;
            let freed = tokens(revoked.entries.start)..tokens(revoked.entries.end);
            // The debtor ends those steps itself when informed, and loses only these entries.
            self.requests.forget_lease(revoked.debtor, revoked.lease, &freed);
            self.blocks_revoked += u64::from(revoked.entries.end - revoked.entries.start);
            if let Some(peer) = cx.peers.key(revoked.debtor) {
                report_revoked(cx, peer, &revoked);
            }
        }
    }
}

/// Repeats revocations to a debtor that has reconnected and may have missed them. It could not attend to revoked
/// entries (accesses to freed entries are refused, and entries are not lent again under the same lease), but after a
/// refusal it would drop everything that it has here.
pub(super) fn repeat_revoked(cx: &mut Cx, peer: PeerKey, debtor: InstanceId) {
    let taken: Vec<Revoked> = cx.memory.rm.creditor.revoked().filter(|r| r.debtor == debtor).cloned().collect();
    taken.iter().for_each(|revoked| report_revoked(cx, peer, revoked));
}

fn report_revoked(cx: &mut Cx, peer: PeerKey, revoked: &Revoked) {
    let reason = "a recall was not met in time".to_owned();
    let (first, entries) = (revoked.entries.start, revoked.entries.end);
    let body = ControlBody::LeaseRevoked(LeaseRevoked { lease: revoked.lease.0, reason, first, entries });
    cx.send(peer, body);
}
