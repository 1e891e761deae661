//! Preemption by recomputation, the end of a sequence, and what both give back.

use super::sequence::{Hold, Sequence};
use crate::instance::Instance;
use lagoon_kv::Freed;
use lagoon_types::limits::{ADMISSION_DEADLINE_MS, ADMISSION_RETRY_MAX_MS, ADMISSION_RETRY_MS};
use lagoon_types::{FinishReason, RequestError, SeqId, TokenEvent};

/// A sequence that is computed again in less time yields at once to one that cannot grow.
const RATHER_WAIT_US: f64 = 500_000.0;

impl Instance {
    /// A running sequence cannot grow and nobody lends: another one gives its memory up, and what it gave goes first to
    /// the one that grows.
    pub(crate) fn preempt_for(&mut self, id: SeqId) {
        let victim = self.victim(id);
        if self.waits_rather(id, victim) {
            self.retry_later(id);
            return;
        }
        if self.batch.sched.in_step(victim) {
            self.batch.preempt_after_step = Some((victim, id));
            if let Some(seq) = self.batch.seqs.get_mut(&id) {
                seq.hold = Hold::RetryAt(self.cx.now_ms + ADMISSION_RETRY_MS);
            }
            return;
        }
        self.preempt_now_for(victim, id);
    }

    /// Whether `id` waits until another sequence has ended, rather than that `victim` is computed again: that would take
    /// long, and somebody else advances meanwhile. When nobody does, somebody yields.
    fn waits_rather(&self, id: SeqId, victim: SeqId) -> bool {
        let row_us = self.cx.config.calibration.as_ref().map_or(self.batch.prefill_us, |c| c.prefill_us_per_token);
        let again_us = self.batch.seqs.get(&victim).map_or(0.0, |s| f64::from(s.blocks.written())) * row_us;
        let advances = |seq: &SeqId| {
            let has_room = |s: &Sequence| s.is_ready() && s.blocks.shortfall(s.len()) == 0;
            *seq != id && (self.batch.sched.in_step(*seq) || self.batch.seqs.get(seq).is_some_and(has_room))
        };
        again_us > RATHER_WAIT_US && self.batch.sched.running().any(|seq| advances(&seq))
    }

    /// The sequence that yields, so that `id` can grow: the one that is soonest computed again, the youngest of equals;
    /// never the oldest, unless it is alone. So the oldest always advances, and a long one does not start anew for the
    /// sake of a short one.
    fn victim(&self, id: SeqId) -> SeqId {
        let holds = |seq: &SeqId| {
            !self.is_frozen(*seq)
                && self.batch.seqs.get(seq).is_some_and(|s| s.blocks.local_blocks() > 0 && !s.cancelled)
        };
        let cost = |seq: &SeqId| self.batch.seqs.get(seq).map_or(0, |s| s.blocks.written());
        let younger = self.batch.sched.running().skip(1).filter(holds);
        // The last of several minima, in order of admission.
        younger.collect::<Vec<_>>().into_iter().rev().min_by_key(cost).unwrap_or(id)
    }

    fn preempt_now_for(&mut self, victim: SeqId, id: SeqId) {
        self.preempt(victim);
        self.batch.counts.preemptions += 1;
        self.retry_later(victim);
        if victim == id {
            return;
        }
        if let Some(seq) = self.batch.seqs.get_mut(&id) {
            seq.hold = Hold::None;
        }
        self.grow_here(id);
    }

    /// A sequence that was to yield when its step ends does, if that is still wanted.
    pub(crate) fn end_preempt_after_step(&mut self) {
        let Some((victim, id)) =
            self.batch.preempt_after_step.take_if(|(victim, _)| !self.batch.sched.in_step(*victim))
        else {
            return;
        };
        let short = |s: &Sequence| matches!(s.hold, Hold::RetryAt(_));
        let wanted = self.batch.sched.is_running(id) && self.batch.seqs.get(&id).is_some_and(short);
        if wanted && self.batch.sched.is_running(victim) && !self.is_frozen(victim) && !self.grow_here(id) {
            self.preempt_now_for(victim, id);
        }
    }

    /// Takes a sequence that is in no step out of the batch; it will be computed again.
    pub(crate) fn preempt(&mut self, id: SeqId) {
        if self.ends_pushed(id) {
            return;
        }
        if let Some(seq) = self.batch.seqs.get(&id) {
            let lost = seq.blocks.holes() > 0 || !seq.blocks.lost().is_empty();
            let counter =
                if lost { &mut self.batch.counts.recomputed_tokens } else { &mut self.batch.counts.preempted_tokens };
            *counter += u64::from(seq.blocks.written());
        }
        self.release_memory(id);
        self.batch.sched.preempt(id, self.cx.now_ms);
        if let Some(seq) = self.batch.seqs.get_mut(&id) {
            seq.admit_by_ms = self.cx.now_ms + ADMISSION_DEADLINE_MS;
        }
        self.send_preempted_away(id);
    }

    /// Gives back everything that a sequence holds or negotiates for.
    pub(crate) fn release_memory(&mut self, id: SeqId) {
        // What a freeze protects is given up: nothing is left to swap.
        self.unfreeze(id);
        self.end_moves_of(id, "the sequence ended or was preempted");
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        seq.restore_by_ms = None;
        self.stop_waiting(id);
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        let freed = seq.blocks.clear();
        seq.leases.clear();
        (seq.named, seq.sharing) = (0, None);
        if !self.withhold(id, &freed.local) {
            self.give_back(id, &freed);
        }
    }

    /// Ends what a sequence negotiates or waits for.
    pub(crate) fn stop_waiting(&mut self, id: SeqId) {
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        if let Hold::Borrowing(borrow) = seq.hold {
            self.cx.memory.rm.cancel(borrow, self.cx.now_ms);
        }
        seq.hold = Hold::None;
        let aside = std::mem::take(&mut seq.aside);
        self.cx.memory.rm.free(id, &aside);
    }

    pub(crate) fn give_back(&mut self, id: SeqId, freed: &Freed) {
        self.cx.memory.rm.free(id, &freed.local);
        for entries in &freed.remote {
            self.cx.memory.rm.release(entries, self.cx.now_ms);
        }
    }

    /// The pause grows with every miss and differs between instances and sequences: two that hold what the other one
    /// wants, and give it up at the same time, do not meet again for ever.
    pub(crate) fn retry_later(&mut self, id: SeqId) {
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        let longest = (ADMISSION_RETRY_MS << seq.misses.min(10)).min(ADMISSION_RETRY_MAX_MS);
        seq.misses += 1;
        let salt = self.cx.config.incarnation ^ id.0.rotate_left(32) ^ u64::from(seq.misses).rotate_left(48);
        let spread = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        seq.hold = Hold::RetryAt(self.cx.now_ms + longest / 2 + spread % (longest / 2 + 1));
    }

    pub(crate) fn on_cancel(&mut self, seq: SeqId) {
        let Some(entry) = self.batch.seqs.get_mut(&seq) else { return };
        if self.batch.sched.in_step(seq) {
            entry.cancelled = true;
        } else {
            self.remove(seq);
        }
    }

    /// Ends a sequence well.
    pub(crate) fn finish(&mut self, seq: SeqId, reason: FinishReason) {
        if let Some(entry) = self.batch.seqs.get(&seq) {
            let event =
                TokenEvent::Finished { reason, prompt_tokens: entry.prompt_len, completion_tokens: entry.generated() };
            self.note_decoded(seq);
            self.emit(seq, event);
        }
        self.remove(seq);
    }

    /// Ends a sequence badly.
    pub(crate) fn fail(&mut self, seq: SeqId, error: RequestError) {
        self.emit(seq, TokenEvent::Failed(error));
        self.remove(seq);
    }

    /// Forgets a sequence that is in no step, and gives its memory back; one that is frozen, at the thaw.
    pub(crate) fn remove(&mut self, seq: SeqId) {
        if self.defer_end(seq) {
            return;
        }
        self.give_up_away(seq);
        self.release_memory(seq);
        self.batch.sched.remove(seq);
        self.batch.seqs.remove(&seq);
    }
}
