//! Recall, debtor side: a creditor recalls lent blocks, as its growth goes before lending.
//!
//! The debtor moves them home if it has room, else to another creditor, else does nothing. At the deadline the creditor
//! revokes the blocks that its own running sequences still need: lost ranges for the debtor. A recall for a waiting request
//! revokes no block.

use super::{Moves, Place, Request, Why};
use crate::batch::Batch;
use crate::cx::Cx;
use lagoon_protocol::{LeasePurpose, Recall};
use lagoon_types::limits::MOVE_MS_MAX;
use lagoon_types::{InstanceId, SeqId};

impl Moves {
    /// Handles a creditor's recall: blocks of the youngest sequences move first.
    pub(super) fn on_recall(&mut self, cx: &mut Cx, batch: &mut Batch, creditor: InstanceId, recall: &Recall) {
        self.status.recalls_received += 1;
        cx.memory.rm.debtor.pause(creditor, cx.now_ms + u64::from(recall.pause_ms).min(MOVE_MS_MAX));
        let deadline_ms = cx.now_ms + u64::from(recall.deadline_ms).min(MOVE_MS_MAX);
        let mut left = recall.blocks;
        let seqs: Vec<SeqId> = batch.seqs().rev().map(|s| s.id).filter(|seq| !batch.is_frozen(*seq)).collect();
        for seq in seqs {
            let there = u32::try_from(self.candidates(cx, batch, seq, Place::At(creditor), false).len())
                .unwrap_or(u32::MAX)
                .min(left);
            left -= there;
            // The growth reserve stays free.
            let home = there.min(batch.room(cx).saturating_sub(1));
            for (blocks, target) in [(home, Place::Here), (there - home, Place::At(InstanceId(0)))] {
                let (source, why, purpose) = (Place::At(creditor), Why::Recall, LeasePurpose::Move);
                let (target_addr, first) = (None, None);
                let request = Request { seq, why, source, target, target_addr, blocks, first, purpose, deadline_ms };
                // Blocks that cannot move are missing at the creditor's deadline; no other answer is sent.
                if blocks > 0 && self.start_move(cx, batch, request).is_err() {
                    left += blocks;
                }
            }
        }
    }
}
