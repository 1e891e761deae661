//! The machines that the membership reads for heartbeats, role changes and drains.

use crate::batch::Batch;
use crate::creditor::Creditor;
use crate::cx::Cx;
use crate::moves::{MoveStatus, Moves};
use crate::prefill::Prefills;
use crate::step::Steps;

/// All machines but the membership, for reading.
#[derive(Clone, Copy)]
pub(crate) struct Look<'a> {
    pub(crate) batch: &'a Batch,
    pub(crate) step: &'a Steps,
    pub(crate) creditor: &'a Creditor,
    pub(crate) prefills: &'a Prefills,
    pub(crate) moves: &'a Moves,
}

impl Look<'_> {
    /// See [`MoveStatus`].
    pub(crate) fn moves(&self, cx: &Cx) -> MoveStatus {
        let (recalls_missed, blocks_revoked) = self.creditor.missed();
        let recalls_met = cx.memory.rm.creditor.recalls_met();
        MoveStatus { recalls_met, recalls_missed, blocks_revoked, ..self.moves.status() }
    }
}
