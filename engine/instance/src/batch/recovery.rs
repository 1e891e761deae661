//! Recovery of KV that was lost with a creditor: dead, fenced, revoked, refused or damaged.
//!
//! A sequence keeps whatever else it has. What it lost gets new places, here or borrowed, all or nothing; then exactly
//! the lost positions are computed again from their tokens, by chunks like those of a prompt, and it goes on where it
//! was. Nothing is sampled meanwhile, so no token is repeated and none is left out. It waits for memory until a
//! deadline, and only then yields like a sequence that cannot grow; it is computed again as a whole only if it is
//! itself the one to yield, or if a window has freed what the lost positions attend to.

use super::sequence::{Life, Need, Sequence};
use crate::instance::Instance;
use crate::membership::Lending;
use lagoon_cluster::BorrowFailure;
use lagoon_kv::RemoteBlock;
use lagoon_types::limits::{RECOVERIES_MAX, RECOVERIES_WINDOW_MS, RESTORE_DEADLINE_MS};
use lagoon_types::{InstanceId, LeaseId, RequestError, SeqId};
use std::ops::Range;

/// Whether a sequence has blocks in this lease of a creditor, or in any of its leases.
fn holds(seq: &Sequence, creditor: InstanceId, lease: Option<LeaseId>) -> bool {
    seq.leases.keys().any(|(c, l)| *c == creditor && lease.is_none_or(|lease| lease == *l))
}

impl Instance {
    /// A creditor is gone: every sequence with blocks there has lost them.
    pub(crate) fn lose_creditor(&mut self, creditor: InstanceId, why: &str) {
        self.end_moves_with(creditor, None);
        let lost: Vec<SeqId> = self.batch.seqs.values().filter(|s| holds(s, creditor, None)).map(|s| s.id).collect();
        for seq in lost {
            self.lose(seq, creditor, None, why);
        }
    }

    /// A sequence has lost its KV in one lease of a creditor, or in all of them. Its step, if it is in one, is aborted
    /// first: all sequences of that step are planned again as they were.
    pub(crate) fn lose(&mut self, id: SeqId, creditor: InstanceId, lease: Option<LeaseId>, why: &str) {
        if !self.batch.seqs.get(&id).is_some_and(|s| holds(s, creditor, lease)) {
            return;
        }
        self.end_moves_with(creditor, Some(id));
        if self.batch.sched.in_step(id) {
            self.abort_micro_batch_of(id);
        }
        if let Some(over) = self.batch.lose_frozen(id, creditor) {
            return self.remove(over);
        }
        let now = self.cx.now_ms;
        // Its step may have been all that kept it.
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        self.batch.counts.recoveries += 1;
        if seq.note_recovery(now) {
            let message = format!(
                "{why} ({creditor}); given up: the sequence lost KV more than {RECOVERIES_MAX} times in {} s",
                RECOVERIES_WINDOW_MS / 1000
            );
            self.fail(id, RequestError::Unavailable(message));
        } else if self.batch.is_running(id) {
            self.mark_lost(id, |b| b.creditor == creditor && lease.is_none_or(|lease| lease == b.lease));
        } else {
            // Nothing is computed yet: it begins to look for memory anew.
            self.release_memory(id);
        }
    }

    /// A creditor took some entries of a lease back, as it had said that it would. That is nobody's failure, and is not
    /// counted as one.
    pub(crate) fn lose_entries(&mut self, id: SeqId, creditor: InstanceId, lease: LeaseId, entries: &Range<u32>) {
        if !self.batch.seqs.get(&id).is_some_and(|s| holds(s, creditor, Some(lease))) {
            return;
        }
        self.end_moves_with(creditor, Some(id));
        if self.batch.sched.in_step(id) {
            self.abort_micro_batch_of(id);
        }
        // One that is over waits for a thaw only.
        if let Some(over) = self.batch.lose_frozen(id, creditor) {
            return self.remove(over);
        }
        if self.batch.is_running(id) {
            self.mark_lost(id, |b| (b.creditor, b.lease) == (creditor, lease) && entries.contains(&b.entry));
        } else {
            self.release_memory(id);
        }
    }

    /// Takes the lost blocks out of the table of a running sequence that is in no step.
    fn mark_lost(&mut self, id: SeqId, is_lost: impl Fn(&RemoteBlock) -> bool) {
        let swapped_out = self.batch.seqs.get(&id).is_some_and(Sequence::is_swapped_out);
        self.batch.stop_waiting(&mut self.cx, id);
        let (now, window) = (self.cx.now_ms, self.cx.config.window);
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        let gone = seq.blocks.lose_where(is_lost);
        gone.iter().for_each(|entries| seq.forget_entries(entries));
        if seq.blocks.lost_blocks() > 0 {
            seq.restore_by_ms.get_or_insert(now + RESTORE_DEADLINE_MS);
        }
        if swapped_out {
            seq.life = Life::SwappedOut;
        }
        // A creditor that lives and refused has them still.
        gone.iter().for_each(|entries| self.cx.memory.rm.release(entries, now));
        if seq.blocks.can_restore(window) {
            self.batch.sched.set_lost(id, seq.blocks.lost());
            let micro_batch = self.batch.micro_batch_of(id);
            self.batch.sched.set_micro_batch(id, micro_batch);
            self.batch.changed();
        } else {
            self.preempt(id);
        }
    }

    /// Finds places for what a running sequence lost: the newest here, as at admission, the rest at creditors.
    pub(crate) fn restore(&mut self, id: SeqId) {
        if self.restore_here(id) {
            return;
        }
        let Some(seq) = self.batch.seqs.get(&id) else { return };
        match seq.need() {
            Some(Need::Borrowing(_)) | None => return,
            Some(Need::RetryAt(at)) if at > self.cx.now_ms => return self.batch.due.wake_at(at),
            Some(Need::Met | Need::RetryAt(_)) => {}
        }
        let late = seq.restore_by_ms.is_some_and(|at| at <= self.cx.now_ms);
        let (lost_blocks, local) = (seq.blocks.lost_blocks(), self.cx.memory.rm.available());
        let mut lost_block_numbers = seq.blocks.lost_block_numbers();
        self.membership.need_gmanager(self.cx.now_ms);
        match self.membership.lending(self.cx.now_ms) {
            Lending::Open => {
                let newest = lost_block_numbers.split_off((lost_blocks - local) as usize);
                let Some(aside) = self.cx.memory.rm.allocate(id, newest.into_iter(), None) else { return };
                let borrow = self.cx.memory.rm.borrow(id, lost_blocks - local, self.cx.now_ms);
                if let Some(seq) = self.batch.seqs.get_mut(&id) {
                    seq.set_need(Need::Borrowing(borrow));
                    seq.aside = aside;
                }
            }
            Lending::Away if !late => self.retry_later(id),
            Lending::Away | Lending::Closed => self.preempt_for(id),
        }
    }

    /// Gives a sequence own blocks for all that it lost, if there are as many.
    pub(crate) fn restore_here(&mut self, id: SeqId) -> bool {
        let Some(seq) = self.batch.seqs.get(&id) else { return false };
        let lost_blocks = seq.blocks.lost_blocks();
        if !seq.may_change_memory() || lost_blocks > self.cx.memory.rm.available() {
            return false;
        }
        let Some(blocks) = self.cx.memory.rm.allocate(id, seq.blocks.lost_block_numbers().into_iter(), None) else {
            return false;
        };
        if let Some(seq) = self.batch.seqs.get_mut(&id) {
            seq.blocks.fill_local(&blocks);
            seq.set_need(Need::Met);
            (seq.misses, seq.restore_by_ms) = (0, None);
        }
        true
    }

    /// Nobody lends what a sequence lost. It tries again with what it has, until its deadline or until the pool is too
    /// small for it.
    pub(crate) fn on_restore_failed(&mut self, id: SeqId, reason: &BorrowFailure) {
        self.batch.stop_waiting(&mut self.cx, id);
        let late = self.batch.seqs.get(&id).and_then(|s| s.restore_by_ms).is_none_or(|at| at <= self.cx.now_ms);
        if late || matches!(reason, BorrowFailure::PoolTooSmall { .. }) {
            self.preempt_for(id);
        } else {
            self.retry_later(id);
        }
    }
}
