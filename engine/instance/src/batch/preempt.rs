//! Preemption by recomputation, and the end of a sequence; both free its memory.

use super::Batch;
use super::others::PrefillQueries;
use super::policy::{self, Candidate, Preemption};
use super::sequence::{Life, Need, PoolSearch, Sequence};
use crate::cx::Cx;
use crate::event::Effect;
use crate::outcome::Outcome;
use lagoon_kv::{Freed, Owner};
use lagoon_types::limits::{ADMISSION_DEADLINE_MS, ADMISSION_RETRY_MS};
use lagoon_types::{CachedTokens, Chunk, FinishReason, RequestError, SeqId, TokenEvent};

impl Batch {
    /// Cancels a sequence's borrow and ends its wait for memory.
    pub(crate) fn stop_waiting(&mut self, cx: &mut Cx, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        if let Some(Need::Borrowing(borrow)) = seq.need() {
            cx.memory.rm.debtor.cancel(borrow, cx.now_ms);
        }
        seq.set_need(Need::Met);
        let aside = std::mem::take(&mut seq.aside);
        seq.aside_first = 0;
        cx.memory.rm.pool.free(Owner::Own(id), &aside);
    }

    /// Preempts a sequence because `id` can neither grow nor borrow; `id` gets the freed memory first. Waits instead
    /// if recomputing takes long and other sequences advance.
    pub(crate) fn preempt_for(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, id: SeqId) {
        let victim = self.victim(id);
        let row_us = self.row_us(cx);
        let recompute_us = self.seqs.get(&victim).map_or(0.0, |s| f64::from(s.blocks.written())) * row_us;
        match policy::preemption(recompute_us, self.another_advances(id), self.sched.in_step(victim)) {
            Preemption::Wait => self.retry_later(cx, id),
            Preemption::AfterStep => {
                self.preempt_after_step = Some((victim, id));
                self.set_need(id, Need::RetryAt(cx.now_ms + ADMISSION_RETRY_MS));
            }
            Preemption::Now => self.preempt_now_for(cx, prefills, victim, id),
        }
    }

    /// Whether a running sequence other than `id` advances: it is in a step, or may join one and has room.
    fn another_advances(&self, id: SeqId) -> bool {
        let has_room = |s: &Sequence| s.is_ready() && s.blocks.shortfall(s.len()) == 0;
        self.sched
            .running()
            .any(|seq| seq != id && (self.sched.in_step(seq) || self.seqs.get(&seq).is_some_and(has_room)))
    }

    /// Preempts a sequence of a step that overfilled the device although blocks were free; the step's others are
    /// planned again.
    pub(crate) fn on_device_full(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, step: &[Chunk]) {
        let running = step.iter().map(|chunk| (chunk.seq, self.is_running(chunk.seq)));
        let Some(victim) = policy::device_full_victim(running) else { return };
        self.preempt_and_retry(cx, prefills, victim);
    }

    /// Preempts a sequence, which tries again after a pause.
    fn preempt_and_retry(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, victim: SeqId) {
        self.preempt(cx, prefills, victim);
        self.counts.preemptions += 1;
        self.retry_later(cx, victim);
    }

    /// The sequence to preempt so that `id` can grow: see [`policy::victim`].
    fn victim(&self, id: SeqId) -> SeqId {
        let candidate = |seq: SeqId| {
            let known = self.seqs.get(&seq);
            Candidate {
                seq,
                recompute_tokens: known.map_or(0, |s| s.blocks.written()),
                preemptible: !self.is_frozen(seq)
                    && known.is_some_and(|s| s.blocks.local_blocks() > 0 && !s.is_ending()),
            }
        };
        policy::victim(self.sched.running().map(candidate)).unwrap_or(id)
    }

    fn preempt_now_for(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, victim: SeqId, id: SeqId) {
        self.preempt_and_retry(cx, prefills, victim);
        if victim == id {
            return;
        }
        self.set_need(id, Need::Met);
        self.grow_here(cx, id);
    }

    /// Whether anything waits for steps or loads to end ([`super::BatchEvent::StepsEnded`]).
    pub(crate) fn awaits_steps(&self, cx: &Cx) -> bool {
        self.preempt_after_step.is_some() || !cx.memory.tiers.loads.is_empty()
    }

    /// Preempts the victim that waited for its step to end, if its memory is still needed.
    pub(crate) fn end_preempt_after_step(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries) {
        let Some((victim, id)) = self.preempt_after_step.take_if(|(victim, _)| !self.sched.in_step(*victim)) else {
            return;
        };
        let short = |s: &Sequence| matches!(s.need(), Some(Need::RetryAt(_)));
        let wanted = self.is_running(id) && self.seqs.get(&id).is_some_and(short);
        if wanted && self.is_running(victim) && !self.is_frozen(victim) && !self.grow_here(cx, id) {
            self.preempt_now_for(cx, prefills, victim, id);
        }
    }

    /// Takes a sequence that is in no step out of the batch and requeues it, to be recomputed.
    pub(crate) fn preempt(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, id: SeqId) {
        let is_member = |seq: &Sequence| seq.joint.is_some() && seq.for_others.is_some();
        if prefills.has_parts(id) || self.seqs.get(&id).is_some_and(is_member) {
            cx.emit(Outcome::JobFailed { seq: id, reason: "its memory was needed".to_owned() });
            return self.cancel(cx, prefills, id);
        }
        if let Some(seq) = self.seqs.get(&id) {
            let lost = seq.blocks.lost_blocks() > 0 || !seq.blocks.lost().is_empty();
            let counter = if lost { &mut self.counts.recomputed_tokens } else { &mut self.counts.preempted_tokens };
            *counter += u64::from(seq.blocks.written());
        }
        self.release_memory(cx, prefills, id);
        self.requeue(id, cx.now_ms);
        if let Some(seq) = self.seqs.get_mut(&id) {
            (seq.admit_by_ms, seq.search) = (cx.now_ms + ADMISSION_DEADLINE_MS, PoolSearch::Due);
            seq.preempted = true;
        }
        cx.emit(Outcome::Preempted { seq: id });
    }

    /// Frees all memory of a sequence and cancels its borrow.
    pub(crate) fn release_memory(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, id: SeqId) {
        self.due.touch();
        // The KV that a freeze protects is dropped: no block is left to swap.
        self.unfreeze(id);
        cx.emit(Outcome::Released { seq: id });
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        seq.restore_by_ms = None;
        self.stop_waiting(cx, id);
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let freed = seq.blocks.clear();
        if let Some(window) = seq.window.take() {
            cx.memory.rm.pool.free(Owner::Own(id), &window.blocks);
        }
        // What was found before it began is found again, or not.
        let prompt = seq.prompt.as_mut().filter(|_| seq.began_ms.is_none());
        prompt.into_iter().for_each(|prompt| prompt.cached = CachedTokens::default());
        seq.leases.clear();
        (seq.joint, seq.first_due) = (None, Vec::new());
        (seq.hashed, seq.sharing, seq.loading) = (0, None, None);
        if prefills.is_exported(id) {
            cx.emit(Outcome::Withheld { seq: id, blocks: freed.local });
        } else {
            give_back(cx, id, &freed);
        }
    }

    /// Sets a sequence that found no memory to be tried again after a pause.
    pub(crate) fn retry_later(&mut self, cx: &Cx, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let pause_ms = policy::retry_pause_ms(cx.config.incarnation, id, seq.misses);
        seq.misses += 1;
        seq.search = if seq.search == PoolSearch::Done { PoolSearch::Skipped } else { PoolSearch::Due };
        seq.set_need(Need::RetryAt(cx.now_ms + pause_ms));
        self.due.touch();
        self.due.wake_at(cx.now_ms + pause_ms);
    }

    pub(crate) fn cancel(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, seq: SeqId) {
        let Some(entry) = self.seqs.get_mut(&seq) else { return };
        if self.sched.in_step(seq) {
            entry.life = Life::Leaving;
        } else {
            self.remove(cx, prefills, seq);
        }
    }

    /// Ends a sequence with `reason`.
    pub(crate) fn finish(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, seq: SeqId, reason: FinishReason) {
        if let Some(entry) = self.seqs.get(&seq) {
            let event =
                TokenEvent::Finished { reason, prompt_tokens: entry.prompt_len, completion_tokens: entry.generated() };
            if let Some(since_ms) = entry.pulled_ms {
                cx.emit(Outcome::Decoded { ms: cx.now_ms - since_ms });
            }
            cx.effects.push(Effect::Emit { seq, event });
        }
        self.remove(cx, prefills, seq);
    }

    /// Ends a sequence with an error.
    pub(crate) fn fail(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, seq: SeqId, error: RequestError) {
        // A prompt computed for another instance has no client here: its decode worker gets a message.
        if self.seqs.get(&seq).is_some_and(|s| s.for_others.is_some()) {
            cx.emit(Outcome::JobFailed { seq, reason: error.to_string() });
        } else {
            cx.effects.push(Effect::Emit { seq, event: TokenEvent::Failed(error) });
        }
        self.remove(cx, prefills, seq);
    }

    /// Removes a sequence that is in no step and frees its memory; a frozen one at the thaw.
    pub(crate) fn remove(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, seq: SeqId) {
        if self.defer_end(cx, seq) {
            return;
        }
        cx.emit(Outcome::Ended { seq });
        self.release_memory(cx, prefills, seq);
        self.take(seq);
    }
}

/// Frees blocks that left a sequence's table, local and remote.
pub(super) fn give_back(cx: &mut Cx, id: SeqId, freed: &Freed) {
    cx.memory.rm.pool.free(Owner::Own(id), &freed.local);
    for entries in &freed.remote {
        cx.memory.rm.debtor.held.release(entries, cx.now_ms);
    }
}
