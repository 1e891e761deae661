//! Preemption by recomputation, the end of a sequence, and what both give back.

use super::Batch;
use super::policy::{self, Candidate};
use super::sequence::{Life, Need, Sequence};
use crate::cx::Cx;
use crate::instance::Instance;
use lagoon_kv::Freed;
use lagoon_types::limits::{ADMISSION_DEADLINE_MS, ADMISSION_RETRY_MS};
use lagoon_types::{FinishReason, RequestError, SeqId, TokenEvent};

impl Batch {
    /// Ends what a sequence negotiates or waits for.
    pub(crate) fn stop_waiting(&mut self, cx: &mut Cx, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        if let Some(Need::Borrowing(borrow)) = seq.need() {
            cx.memory.rm.cancel(borrow, cx.now_ms);
        }
        seq.set_need(Need::Met);
        let aside = std::mem::take(&mut seq.aside);
        cx.memory.rm.free(id, &aside);
    }
}

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
            self.batch.set_need(id, Need::RetryAt(self.cx.now_ms + ADMISSION_RETRY_MS));
            return;
        }
        self.preempt_now_for(victim, id);
    }

    /// Whether `id` waits until another sequence has ended, rather than that `victim` is computed again: that would take
    /// long, and somebody else advances meanwhile. When nobody does, somebody yields.
    fn waits_rather(&self, id: SeqId, victim: SeqId) -> bool {
        let row_us = self.cx.config.calibration.as_ref().map_or(self.batch.prefill_us, |c| c.prefill_us_per_token);
        let recompute_us = self.batch.seqs.get(&victim).map_or(0.0, |s| f64::from(s.blocks.written())) * row_us;
        let advances = |seq: &SeqId| {
            let has_room = |s: &Sequence| s.is_ready() && s.blocks.shortfall(s.len()) == 0;
            *seq != id && (self.batch.sched.in_step(*seq) || self.batch.seqs.get(seq).is_some_and(has_room))
        };
        policy::is_long_recompute(recompute_us) && self.batch.sched.running().any(|seq| advances(&seq))
    }

    /// The sequence that is preempted, so that `id` can grow: see [`policy::victim`].
    fn victim(&self, id: SeqId) -> SeqId {
        let candidate = |seq: SeqId| {
            let known = self.batch.seqs.get(&seq);
            Candidate {
                seq,
                recompute_tokens: known.map_or(0, |s| s.blocks.written()),
                preemptible: !self.batch.is_frozen(seq)
                    && known.is_some_and(|s| s.blocks.local_blocks() > 0 && !s.is_ending()),
            }
        };
        policy::victim(self.batch.sched.running().map(candidate)).unwrap_or(id)
    }

    fn preempt_now_for(&mut self, victim: SeqId, id: SeqId) {
        self.preempt(victim);
        self.batch.counts.preemptions += 1;
        self.retry_later(victim);
        if victim == id {
            return;
        }
        self.batch.set_need(id, Need::Met);
        self.grow_here(id);
    }

    /// A sequence that was to yield when its step ends does, if that is still wanted.
    pub(crate) fn end_preempt_after_step(&mut self) {
        let Some((victim, id)) =
            self.batch.preempt_after_step.take_if(|(victim, _)| !self.batch.sched.in_step(*victim))
        else {
            return;
        };
        let short = |s: &Sequence| matches!(s.need(), Some(Need::RetryAt(_)));
        let wanted = self.batch.is_running(id) && self.batch.seqs.get(&id).is_some_and(short);
        if wanted && self.batch.is_running(victim) && !self.batch.is_frozen(victim) && !self.grow_here(id) {
            self.preempt_now_for(victim, id);
        }
    }

    /// Takes a sequence that is in no step out of the batch; it will be computed again.
    pub(crate) fn preempt(&mut self, id: SeqId) {
        if self.ends_pushed(id) {
            return;
        }
        if let Some(seq) = self.batch.seqs.get(&id) {
            let lost = seq.blocks.lost_blocks() > 0 || !seq.blocks.lost().is_empty();
            let counter =
                if lost { &mut self.batch.counts.recomputed_tokens } else { &mut self.batch.counts.preempted_tokens };
            *counter += u64::from(seq.blocks.written());
        }
        self.release_memory(id);
        self.batch.preempt(id, self.cx.now_ms);
        if let Some(seq) = self.batch.seqs.get_mut(&id) {
            seq.admit_by_ms = self.cx.now_ms + ADMISSION_DEADLINE_MS;
        }
        self.send_preempted_away(id);
    }

    /// Gives back everything that a sequence holds or negotiates for.
    pub(crate) fn release_memory(&mut self, id: SeqId) {
        self.batch.due.touch();
        // What a freeze protects is given up: nothing is left to swap.
        self.batch.unfreeze(id);
        self.end_moves_of(id, "the sequence ended or was preempted");
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        seq.restore_by_ms = None;
        self.batch.stop_waiting(&mut self.cx, id);
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        let freed = seq.blocks.clear();
        seq.leases.clear();
        (seq.named, seq.sharing) = (0, None);
        if !self.withhold(id, &freed.local) {
            self.give_back(id, &freed);
        }
    }

    pub(crate) fn give_back(&mut self, id: SeqId, freed: &Freed) {
        self.cx.memory.rm.free(id, &freed.local);
        for entries in &freed.remote {
            self.cx.memory.rm.release(entries, self.cx.now_ms);
        }
    }

    /// There was no memory for a sequence: it is tried again after a pause.
    pub(crate) fn retry_later(&mut self, id: SeqId) {
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        let pause_ms = policy::retry_pause_ms(self.cx.config.incarnation, id, seq.misses);
        seq.misses += 1;
        seq.set_need(Need::RetryAt(self.cx.now_ms + pause_ms));
        self.batch.due.touch();
        self.batch.due.wake_at(self.cx.now_ms + pause_ms);
    }

    pub(crate) fn on_cancel(&mut self, seq: SeqId) {
        let Some(entry) = self.batch.seqs.get_mut(&seq) else { return };
        if self.batch.sched.in_step(seq) {
            entry.life = Life::Leaving;
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
        if self.batch.defer_end(&mut self.cx, seq) {
            return;
        }
        self.give_up_away(seq);
        self.release_memory(seq);
        self.batch.take(seq);
    }
}
