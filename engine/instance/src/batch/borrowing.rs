//! Answers of the rManager to sequences that borrow: to be admitted, to grow, or for a lost range.

use super::policy;
use super::sequence::{HeldLease, Need};
use crate::creditor::CreditorEvent;
use crate::instance::Instance;
use lagoon_cluster::{BorrowFailure, BorrowedLease};
use lagoon_kv::{LeaseHasher, RemoteEntries, RemoteGrant};
use lagoon_types::limits::ADMISSION_RETRY_MS;
use lagoon_types::{MicroBatch, PhysBlock, RequestError, SeqId};

impl Instance {
    pub(crate) fn on_borrowed(&mut self, id: SeqId, leases: &[BorrowedLease]) {
        let (block_tokens, kv) = (self.cx.config.block_tokens, self.cx.config.kv);
        self.batch.counts.borrowed_blocks += leases.iter().map(|lease| u64::from(lease.blocks)).sum::<u64>();
        let Some(seq) = self.batch.seqs.get_mut(&id) else {
            for &BorrowedLease { creditor, lease, epoch, blocks, .. } in leases {
                let all = RemoteEntries { creditor, lease, epoch, first: 0, entries: blocks };
                self.cx.memory.rm.release(&all, self.cx.now_ms);
            }
            return;
        };
        let restores = seq.blocks.lost_blocks() > 0;
        for lease in leases {
            let &BorrowedLease { creditor, lease, epoch, blocks, .. } = lease;
            let grant = RemoteGrant { creditor, lease, epoch, blocks };
            if restores {
                seq.blocks.fill_remote(&grant)
            } else {
                seq.blocks.push_remote(&grant)
            }
            let hasher = LeaseHasher::new(kv.layers as usize, block_tokens, kv.layer_token_bytes());
            seq.leases.insert((creditor, lease), HeldLease::new(blocks, hasher));
        }
        let aside: Vec<PhysBlock> = std::mem::take(&mut seq.aside);
        if restores {
            seq.blocks.fill_local(&aside)
        } else {
            seq.blocks.push_local(&aside)
        }
        seq.set_need(Need::Met);
        seq.restore_by_ms = None;
        (seq.misses, seq.frugal) = (0, false);
        if self.batch.is_running(id) {
            self.batch.sched.set_micro_batch(id, MicroBatch::Remote);
            self.batch.changed();
        } else {
            self.admit_placed();
        }
        // A connection that broke during the negotiation has taken nothing, but nothing would dial it again either.
        if let Some(gone) = leases.iter().find(|l| self.cx.peers.key(l.creditor).is_none()) {
            self.lose(id, gone.creditor, None, "a creditor's connection was lost during a negotiation");
        }
    }

    pub(crate) fn on_borrow_failed(&mut self, id: SeqId, reason: &BorrowFailure) {
        let Some(seq) = self.batch.seqs.get(&id) else { return };
        if seq.blocks.lost_blocks() > 0 {
            self.on_restore_failed(id, reason);
            return;
        }
        if self.batch.is_running(id) {
            match self.batch.seqs.get_mut(&id) {
                // More than it needs was asked for: less may do.
                Some(seq) if !seq.frugal => {
                    seq.frugal = true;
                    seq.set_need(Need::Met);
                }
                // Growth goes before lending: if nobody else lends, what was lent comes back, or is taken.
                Some(seq) if self.cx.memory.rm.recallable() > 0 => {
                    seq.set_need(Need::RetryAt(self.cx.now_ms + ADMISSION_RETRY_MS));
                    let shortfall = seq.blocks.shortfall(seq.len());
                    self.creditor(CreditorEvent::WantBack { blocks: shortfall, take: true });
                }
                _ => self.preempt_for(id),
            }
            return;
        }
        self.release_memory(id);
        let Some(seq) = self.batch.seqs.get(&id) else { return };
        if let BorrowFailure::PoolTooSmall { pool_blocks_total } = reason
            && policy::has_waited_enough(seq.misses)
        {
            // It fitted when it was accepted: instances have left since, for longer than one needs to come back.
            self.fail_outgrown(id, *pool_blocks_total);
        } else {
            // What is lent stays lent: the planner takes it back where there is another place for it.
            self.retry_later(id);
        }
    }

    /// Ends a request that a pool of `capacity` blocks cannot hold: the pool has shrunk since it was accepted, or the
    /// sequence outgrew it under a window and was preempted.
    pub(crate) fn fail_outgrown(&mut self, id: SeqId, capacity: u64) {
        let Some(seq) = self.batch.seqs.get(&id) else { return };
        let (needed, limit) = (seq.len() + 1, capacity * u64::from(self.cx.config.block_tokens));
        let message = format!("the request needs room for {needed} tokens and the pool now has room for {limit}");
        self.fail(id, RequestError::Unavailable(message));
    }
}
