//! The rManager's replies to borrows: for admission, for growth, and for lost ranges.

use super::others::PrefillQueries;
use super::policy::GrowthFailed;
use super::sequence::{HeldLease, Need};
use super::{Batch, policy};
use crate::cx::Cx;
use crate::outcome::{Lost, LostPart, Outcome};
use lagoon_cluster::{BorrowFailure, BorrowedLease};
use lagoon_kv::{LeaseHasher, RemoteEntries, RemoteGrant};
use lagoon_types::limits::ADMISSION_RETRY_MS;
use lagoon_types::{MicroBatch, PhysBlock, RequestError, SeqId};

impl Batch {
    pub(crate) fn on_borrowed(&mut self, cx: &mut Cx, id: SeqId, leases: &[BorrowedLease]) {
        let (block_tokens, kv) = (cx.config.block_tokens, cx.config.kv);
        self.counts.borrowed_blocks += leases.iter().map(|lease| u64::from(lease.blocks)).sum::<u64>();
        let Some(seq) = self.seqs.get_mut(&id) else {
            for &BorrowedLease { creditor, lease, epoch, blocks, .. } in leases {
                let all = RemoteEntries { creditor, lease, epoch, first: 0, entries: blocks };
                cx.memory.rm.debtor.held.release(&all, cx.now_ms);
            }
            return;
        };
        let mut aside: Vec<PhysBlock> = std::mem::take(&mut seq.aside);
        let last = aside.split_off(std::mem::take(&mut seq.aside_first));
        seq.blocks.take_local(&aside);
        for lease in leases {
            let &BorrowedLease { creditor, lease, epoch, blocks, .. } = lease;
            let grant = RemoteGrant { creditor, lease, epoch, blocks };
            seq.blocks.take_remote(&grant);
            let hasher = LeaseHasher::new(kv.layers as usize, block_tokens, kv.layer_token_bytes());
            seq.leases.insert((creditor, lease), HeldLease::new(blocks, hasher));
        }
        seq.blocks.take_local(&last);
        seq.set_need(Need::Met);
        seq.restore_by_ms = None;
        (seq.misses, seq.frugal) = (0, false);
        if self.is_running(id) {
            self.sched.set_micro_batch(id, MicroBatch::Remote);
            self.changed();
        } else {
            self.admit_placed(cx);
        }
        // A connection broken during the negotiation lost no KV, but nothing else would redial the creditor.
        if let Some(gone) = leases.iter().find(|l| cx.peers.key(l.creditor).is_none()) {
            let why = "a creditor's connection was lost during a negotiation".to_owned();
            cx.emit(Outcome::Lost(Lost { seq: id, creditor: gone.creditor, part: LostPart::All, why }));
        }
    }

    pub(crate) fn on_borrow_failed(
        &mut self,
        cx: &mut Cx,
        prefills: &dyn PrefillQueries,
        id: SeqId,
        reason: &BorrowFailure,
    ) {
        let Some(seq) = self.seqs.get(&id) else { return };
        if seq.blocks.lost_blocks() > 0 && seq.is_running() {
            self.on_restore_failed(cx, prefills, id, reason);
            return;
        }
        if self.is_running(id) {
            self.on_growth_failed(cx, prefills, id);
            return;
        }
        self.release_memory(cx, prefills, id);
        let Some(seq) = self.seqs.get(&id) else { return };
        if let BorrowFailure::PoolTooSmall { pool_blocks_total } = reason
            && policy::has_waited_enough(seq.misses)
        {
            // It fitted when it was accepted; instances have left since, for longer than one needs to come back.
            self.fail_outgrown(cx, prefills, id, *pool_blocks_total);
        } else {
            // Lent blocks stay lent: the planner recalls them where another place exists.
            self.retry_later(cx, id);
        }
    }

    /// Handles a failed borrow for a running sequence's growth.
    fn on_growth_failed(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        match policy::growth_failed(seq.frugal, cx.memory.rm.creditor.recallable(&cx.memory.rm.pool)) {
            GrowthFailed::AskFrugally => {
                seq.frugal = true;
                seq.set_need(Need::Met);
            }
            GrowthFailed::Recall => {
                seq.set_need(Need::RetryAt(cx.now_ms + ADMISSION_RETRY_MS));
                let shortfall = seq.blocks.shortfall(seq.len());
                cx.emit(Outcome::WantBack { blocks: shortfall, take: true });
            }
            GrowthFailed::Preempt => self.preempt_for(cx, prefills, id),
        }
    }

    /// Fails a request that a pool of `capacity` blocks cannot hold: the pool has shrunk since it was accepted, or the
    /// sequence outgrew the pool under a window and was preempted.
    pub(crate) fn fail_outgrown(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, id: SeqId, capacity: u64) {
        let Some(seq) = self.seqs.get(&id) else { return };
        let (needed, limit) = (seq.len() + 1, capacity.saturating_mul(cx.config.block_tokens.into()));
        let message = format!("the request needs room for {needed} tokens and the pool now has room for {limit}");
        self.fail(cx, prefills, id, RequestError::Unavailable(message));
    }
}
