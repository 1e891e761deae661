//! Recovery of KV that was lost with a creditor: dead, fenced, revoked, refused or damaged.
//!
//! A sequence keeps its other blocks. The lost ones get new places, local or borrowed, all or nothing; then exactly the
//! lost positions are recomputed from their tokens, in chunks like a prompt's, and decoding goes on. Nothing is sampled
//! meanwhile, so no token is repeated or skipped. Until a deadline the sequence waits for memory; then it preempts like
//! a sequence that cannot grow. It is recomputed as a whole only if it is the victim itself, or if a window has freed
//! KV that the lost positions attend to.

use super::others::PrefillQueries;
use super::policy::{Attempt, Short};
use super::sequence::{Life, Need, Sequence};
use super::{Batch, Others, policy};
use crate::cx::Cx;
use crate::outcome::{Lost, LostPart, Outcome};
use lagoon_cluster::BorrowFailure;
use lagoon_kv::RemoteBlock;
use lagoon_protocol::TierRequest;
use lagoon_types::limits::{RECOVERIES_MAX, RECOVERIES_WINDOW_MS, RESTORE_DEADLINE_MS};
use lagoon_types::{InstanceId, LeaseId, RequestError, SeqId};

/// Whether a sequence has blocks in this part of a creditor's leases.
fn holds(seq: &Sequence, creditor: InstanceId, part: &LostPart) -> bool {
    seq.leases.keys().any(|(c, l)| *c == creditor && part.meets(*l))
}

impl Batch {
    /// Whether a sequence has blocks among the lost ones.
    pub(crate) fn has_lost(&self, lost: &Lost) -> bool {
        self.seqs.get(&lost.seq).is_some_and(|s| holds(s, lost.creditor, &lost.part))
    }

    /// Reports the loss of every sequence's blocks at a creditor that was lost.
    pub(crate) fn lose_creditor(&self, cx: &mut Cx, creditor: InstanceId, why: &str) {
        for seq in self.seqs.values().filter(|s| holds(s, creditor, &LostPart::All)) {
            cx.emit(Outcome::Lost(Lost { seq: seq.id, creditor, part: LostPart::All, why: why.to_owned() }));
        }
    }

    /// Reports the loss of one lease, if a sequence has it.
    pub(crate) fn lose_lease(&self, cx: &mut Cx, creditor: InstanceId, lease: LeaseId, why: String) {
        if let Some(seq) = self.seqs.values().find(|s| s.leases.contains_key(&(creditor, lease))) {
            cx.emit(Outcome::Lost(Lost { seq: seq.id, creditor, part: LostPart::Lease(lease), why }));
        }
    }

    /// Marks KV of a sequence lost at a creditor. The sequence must be in no step.
    pub(crate) fn lose(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, lost: Lost) {
        let Lost { seq: id, creditor, part, why } = lost;
        if let Some(over) = self.lose_frozen(id, creditor) {
            return self.remove(cx, prefills, over);
        }
        let now = cx.now_ms;
        // Leaving its step may have removed a sequence that was ending.
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        if !matches!(part, LostPart::Entries(..)) {
            self.counts.recoveries += 1;
            if seq.note_recovery(now) {
                let message = format!(
                    "{why} ({creditor}); aborted: the sequence lost KV more than {RECOVERIES_MAX} times in {} s",
                    RECOVERIES_WINDOW_MS / 1000
                );
                return self.fail(cx, prefills, id, RequestError::Unavailable(message));
            }
        }
        if self.is_running(id) {
            let entry = |b: &RemoteBlock| !matches!(&part, LostPart::Entries(_, of) if !of.contains(&b.entry));
            self.mark_lost(cx, prefills, id, |b| b.creditor == creditor && part.meets(b.lease) && entry(b));
        } else {
            // Nothing is computed yet: admission starts again.
            self.release_memory(cx, prefills, id);
        }
    }

    /// Takes lost blocks out of the table of a running sequence that is in no step.
    pub(super) fn mark_lost(
        &mut self,
        cx: &mut Cx,
        prefills: &dyn PrefillQueries,
        id: SeqId,
        is_lost: impl Fn(&RemoteBlock) -> bool,
    ) {
        let swapped_out = self.seqs.get(&id).is_some_and(Sequence::is_swapped_out);
        self.stop_waiting(cx, id);
        let (now, window) = (cx.now_ms, cx.config.window);
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let gone = seq.blocks.lose_where(is_lost);
        gone.iter().for_each(|entries| seq.forget_entries(entries));
        if seq.blocks.lost_blocks() > 0 {
            seq.restore_by_ms.get_or_insert(now + RESTORE_DEADLINE_MS);
        }
        if swapped_out {
            seq.life = Life::SwappedOut;
        }
        // A creditor that is alive and refused still holds the entries.
        gone.iter().for_each(|entries| cx.memory.rm.debtor.held.release(entries, now));
        if seq.blocks.can_restore(window) {
            self.sched.set_lost(id, seq.blocks.lost());
            let micro_batch = self.micro_batch_of(id);
            self.sched.set_micro_batch(id, micro_batch);
            self.changed();
        } else {
            self.preempt(cx, prefills, id);
        }
    }

    /// Allocates places for a running sequence's lost blocks: the newest local, as at admission, the rest borrowed.
    pub(crate) fn restore(&mut self, cx: &mut Cx, others: Others<'_>, id: SeqId) {
        if self.restore_here(cx, id) {
            return;
        }
        let Some(seq) = self.seqs.get(&id) else { return };
        match policy::attempt(seq.need(), cx.now_ms) {
            Attempt::No => return,
            Attempt::At(at_ms) => return self.due.wake_at(at_ms),
            Attempt::Now => {}
        }
        let late = seq.restore_by_ms.is_some_and(|at| at <= cx.now_ms);
        let (lost_blocks, local) = (seq.blocks.lost_blocks(), cx.memory.rm.available());
        let mut lost_block_numbers = seq.blocks.lost_block_numbers();
        cx.standing.note_lending_needed(cx.now_ms);
        match policy::restore_short(cx.standing.lending(cx.now_ms), late) {
            Short::Borrow => {
                let newest = lost_block_numbers.split_off((lost_blocks - local) as usize);
                let Some(aside) = cx.memory.rm.pool.allocate_for(id, newest.into_iter(), None) else { return };
                let borrow = cx.memory.rm.debtor.borrow(id, lost_blocks - local, TierRequest::Any, None, cx.now_ms);
                if let Some(seq) = self.seqs.get_mut(&id) {
                    seq.set_need(Need::Borrowing(borrow));
                    seq.aside = aside;
                }
            }
            Short::Retry | Short::Fail => self.retry_later(cx, id),
            Short::Preempt => self.preempt_for(cx, others.prefills, id),
        }
    }

    /// Allocates local blocks for all lost ones. False, and nothing allocated, if there are too few.
    pub(crate) fn restore_here(&mut self, cx: &mut Cx, id: SeqId) -> bool {
        let Some(seq) = self.seqs.get(&id) else { return false };
        let lost_blocks = seq.blocks.lost_blocks();
        if !seq.may_change_memory() || lost_blocks > cx.memory.rm.available() {
            return false;
        }
        let Some(blocks) = cx.memory.rm.pool.allocate_for(id, seq.blocks.lost_block_numbers().into_iter(), None) else {
            return false;
        };
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.blocks.fill_local(&blocks);
            seq.set_need(Need::Met);
            (seq.misses, seq.restore_by_ms) = (0, None);
        }
        true
    }

    /// Retries a failed borrow for lost blocks, until the sequence's deadline or until the pool is too small for it.
    pub(crate) fn on_restore_failed(
        &mut self,
        cx: &mut Cx,
        prefills: &dyn PrefillQueries,
        id: SeqId,
        reason: &BorrowFailure,
    ) {
        self.stop_waiting(cx, id);
        let late = self.seqs.get(&id).and_then(|s| s.restore_by_ms).is_none_or(|at| at <= cx.now_ms);
        match policy::restore_failed(late, matches!(reason, BorrowFailure::PoolTooSmall { .. })) {
            Short::Preempt => self.preempt_for(cx, prefills, id),
            Short::Borrow | Short::Retry | Short::Fail => self.retry_later(cx, id),
        }
    }
}
