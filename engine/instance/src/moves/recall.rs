//! Recall: a creditor wants lent blocks back, because growth goes before lending.
//!
//! The debtor takes them home if it has room, else moves them to another creditor, else does nothing. At the deadline
//! the creditor takes what its own running sequences still need; the debtor has lost that. A recall for a request that
//! only waits takes nothing.

use super::{Place, Request, Why};
use crate::instance::Instance;
use lagoon_protocol::{LeasePurpose, Recall};
use lagoon_types::limits::MOVE_MS_MAX;
use lagoon_types::{InstanceId, SeqId};

impl Instance {
    /// A creditor wants blocks back: those of the youngest sequences go first.
    pub(crate) fn on_recall(&mut self, creditor: InstanceId, recall: &Recall) {
        self.moves.status.recalls_received += 1;
        self.cx.memory.rm.pause_creditor(creditor, self.cx.now_ms + u64::from(recall.pause_ms).min(MOVE_MS_MAX));
        let deadline_ms = self.cx.now_ms + u64::from(recall.deadline_ms).min(MOVE_MS_MAX);
        let mut left = recall.blocks;
        let seqs: Vec<SeqId> =
            self.batch.seqs().rev().map(|s| s.id).filter(|seq| !self.batch.is_frozen(*seq)).collect();
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
}
