//! Hand-back: a request that waits too long here goes back to its gateway, which gives it to an instance that can start it.

use super::others::PrefillQueries;
use super::sequence::{Life, Need, Sequence};
use super::{Batch, policy};
use crate::cx::Cx;

use lagoon_types::limits::{HAND_BACK_MS, QUEUE_DEFAULT};
use lagoon_types::{RequestError, SeqId};

impl Batch {
    /// Gives waiting requests back that have not begun, hold no memory, and fit an instance; a pool-sized one stays, as the pool keeps
    /// memory for it where it waits. A draining instance gives back at once.
    pub(super) fn hand_back(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries) {
        let late: Vec<SeqId> =
            self.sched.waiting().map(|waiting| waiting.seq).filter(|seq| self.is_late(cx, *seq)).collect();
        for seq in late.into_iter().take(QUEUE_DEFAULT) {
            self.counts.handed_back += 1;
            self.fail(cx, prefills, seq, RequestError::HandedBack);
        }
    }

    /// The borrow guard: whether a waiting sequence that lacks memory here waits, rather than borrow. It does while its gateway takes it
    /// back and may find an instance that holds it whole: two micro-batches read the weights twice, and creditors' steps wait for each
    /// other.
    pub(super) fn waits_for_whole(&self, cx: &Cx, id: SeqId) -> bool {
        let Some(seq) = self.seqs.get(&id).filter(|seq| seq.options.may_hand_back) else { return false };
        let needed = seq.blocks.shortfall(seq.len() + 1);
        // To mapped KV this device attends itself, as to its own.
        let near = |creditor| cx.memory.rm.debtor.is_near(creditor);
        let maps_all = cx.peers.iter().count() > 0 && cx.peers.iter().all(|peer| near(peer.instance));
        !maps_all && Self::has_not_begun(seq) && !policy::is_pool_sized(needed, cx.config.blocks_total)
    }

    fn is_late(&self, cx: &Cx, seq: SeqId) -> bool {
        let Some(seq) = self.seqs.get(&seq).filter(|seq| seq.options.may_hand_back) else { return false };
        let has_waited = cx.standing.draining || cx.now_ms >= seq.since_ms + HAND_BACK_MS;
        let needed = seq.blocks.shortfall(seq.len() + 1);
        has_waited && Self::has_not_begun(seq) && !policy::is_pool_sized(needed, cx.config.blocks_total)
    }

    fn has_not_begun(seq: &Sequence) -> bool {
        let waits = matches!(seq.life, Life::Waiting(Need::Met | Need::RetryAt(_)));
        waits && seq.began_ms.is_none() && seq.generated() == 0 && seq.blocks.blocks() == 0 && seq.beside() == 0
    }
}
