//! The iteration-level scheduler: bounded admission, first come first served among equal priorities, and continuous batching with chunked
//! prefill.
//!
//! It decides *which tokens* the next step computes; the instance and the rManager decide where their KV lives.
//! Sans-IO: time is a parameter, nothing is hashed, so the same calls give the same plans.
//!
//! Invariants: a sequence is either waiting or running; `computed < tokens` for every running sequence that is not in a
//! step; a step's rows never exceed its budget, and prompts in the steps of both micro-batches together the rows of one step that decoding
//! leaves (or one row each); sequences are planned in the order of their admission, decoding before prefill, so that a long prompt delays
//! the next token of others by at most one chunk. Lost ranges are recomputed before new tokens of their sequence, in ascending order, in
//! chunks like a prompt's.

use super::policy;
use super::rings::{Ring, Rings};
use crate::config::SchedulerConfig;
use lagoon_types::limits::DRAFT_ROWS_MAX;
use lagoon_types::{Chunk, MicroBatch, SeqId, StepPlan};
use std::collections::VecDeque;
use std::ops::Range;

/// The error of a full queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full ({limit} requests wait)")]
pub(crate) struct QueueFull {
    pub(crate) limit: usize,
}

/// A sequence that waits for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) seq: SeqId,
    /// Tokens to compute on admission: the prompt, and those generated before a preemption.
    pub(crate) tokens: u32,
    /// When it was queued, in the caller's milliseconds.
    pub(crate) since_ms: u64,
    /// Its place in the queue, ascending: a fixed number, so that no request is overtaken for ever.
    turn_ms: i64,
}

#[derive(Clone, Debug)]
struct Running {
    seq: SeqId,
    micro_batch: MicroBatch,
    tokens: u32,
    computed: u32,
    /// Lost ranges to recompute, below `computed`: ascending, disjoint, never empty.
    lost: VecDeque<Range<u32>>,
    /// Ring of the windowed layers' KV, if it is kept out of rBlocks.
    ring: Option<Ring>,
    in_step: bool,
    /// Rows of its prompt or lost ranges in the step that it is in.
    prompt_rows: u32,
}

impl Running {
    fn new(seq: SeqId, micro_batch: MicroBatch, (tokens, computed): (u32, u32), ring: Option<Ring>) -> Self {
        Self { seq, micro_batch, tokens, computed, lost: VecDeque::new(), ring, in_step: false, prompt_rows: 0 }
    }

    /// Whether its next row is a new token's, not a prompt's.
    fn decodes(&self) -> bool {
        self.lost.is_empty() && self.tokens - self.computed == 1
    }

    /// The positions to compute next, and whether they are new (not lost) ones.
    fn due(&self) -> (Range<u32>, bool) {
        self.lost.front().map_or((self.computed..self.tokens, true), |lost| (lost.clone(), false))
    }

    /// The next chunk of up to `rows` rows: due positions, or earlier ones that warm up the windowed layers' ring.
    fn next(&self, rows: u32, warm_up: u32) -> (Chunk, Option<Ring>) {
        let (due, new) = self.due();
        let ring = self.ring.map(|ring| ring.towards(due.start, warm_up));
        let before = ring.map(Ring::head).filter(|head| *head < due.start).map(|head| head..due.start);
        let (warms_up, rows_due) = (before.is_some(), before.unwrap_or(due));
        let left = rows_due.end - rows_due.start;
        assert!(left > 0, "{} has nothing to compute", self.seq);
        let len = left.min(rows);
        let last = new && !warms_up && len == left;
        let rows = ring.map(|ring| ring.rows(warms_up));
        (Chunk { seq: self.seq, start: rows_due.start, len, last, drafts: 0, ring: rows }, ring)
    }
}

/// The queue and the batch. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Scheduler {
    config: SchedulerConfig,
    /// Maximum of rows in a step of the remote micro-batch; at most `config.step_rows`.
    remote_rows: u32,
    /// Maximum of rows of prompts in the next step, by their time.
    chunk_rows: u32,
    waiting: VecDeque<Waiting>,
    /// In order of admission.
    running: Vec<Running>,
    rings: Option<Rings>,
}

impl Scheduler {
    /// `warm_up` is that of the model, if its windowed KV is kept apart.
    #[must_use]
    pub(crate) fn new(config: SchedulerConfig, remote_rows: u32, warm_up: Option<u32>) -> Self {
        let rings = warm_up.map(|warm_up| Rings::new(config.running, warm_up));
        Self { config, remote_rows, chunk_rows: u32::MAX, waiting: VecDeque::new(), running: Vec::new(), rings }
    }

    fn run(&mut self, seq: SeqId, micro_batch: MicroBatch, tokens: u32, computed: u32) {
        assert!(computed < tokens, "{seq} has nothing to compute");
        let ring = self.rings.as_mut().map(Rings::take);
        self.running.push(Running::new(seq, micro_batch, (tokens, computed), ring));
    }

    /// Adds a sequence that computes `due` ranges of `tokens` tokens for another instance, and is removed when it has.
    ///
    /// # Panics
    /// If it waits or runs, or nothing is due.
    pub(crate) fn join(&mut self, seq: SeqId, micro_batch: MicroBatch, tokens: u32, due: &[Range<u32>]) {
        assert!(!self.is_running(seq) && !due.is_empty(), "{seq} has nothing to compute");
        let ring = self.rings.as_mut().map(Rings::take);
        self.running.push(Running::new(seq, micro_batch, (tokens, tokens), ring));
        self.set_lost(seq, due);
    }

    /// The ring of a sequence that has run no step goes on behind a window that the next one copies into it.
    ///
    /// # Panics
    /// If the sequence does not run.
    pub(crate) fn load_ring(&mut self, seq: SeqId, window: &Range<u32>) {
        self.entry_mut(seq).ring.iter_mut().for_each(|ring| ring.load(window));
    }

    fn stop(&mut self, seq: SeqId) {
        let Some(at) = self.running.iter().position(|r| r.seq == seq) else { return };
        let ring = self.running.remove(at).ring;
        if let (Some(rings), Some(ring)) = (&mut self.rings, ring) {
            rings.put(ring);
        }
    }

    /// Puts a new sequence into the queue, behind those whose turn is not later.
    ///
    /// # Errors
    /// [`QueueFull`] when the queue has reached its bound.
    pub(crate) fn enqueue(&mut self, seq: SeqId, tokens: u32, now_ms: u64, turn_ms: i64) -> Result<(), QueueFull> {
        if self.waiting.len() >= self.config.queue {
            return Err(QueueFull { limit: self.config.queue });
        }
        self.enqueue_accepted(seq, tokens, now_ms, turn_ms);
        Ok(())
    }

    /// As [`Scheduler::enqueue`], without the bound, for a sequence that was accepted before and waited for a prefill worker.
    pub(crate) fn enqueue_accepted(&mut self, seq: SeqId, tokens: u32, now_ms: u64, turn_ms: i64) {
        let before = self.waiting.iter().rposition(|waiting| waiting.turn_ms <= turn_ms);
        self.waiting.insert(before.map_or(0, |at| at + 1), Waiting { seq, tokens, since_ms: now_ms, turn_ms });
    }

    /// Takes a running sequence out of the batch and puts it at the front of the queue, to be recomputed. The queue's
    /// bound does not apply: the sequence was admitted before.
    ///
    /// # Panics
    /// If the sequence does not run or is in a step.
    pub(crate) fn preempt(&mut self, seq: SeqId, now_ms: u64) {
        let entry = self.entry(seq);
        assert!(!entry.in_step, "{seq} is in a step");
        let tokens = entry.tokens;
        self.stop(seq);
        self.waiting.push_front(Waiting { seq, tokens, since_ms: now_ms, turn_ms: i64::MIN });
    }

    /// The next sequence to admit, if the batch has room for one.
    #[must_use]
    pub(crate) fn next_waiting(&self) -> Option<Waiting> {
        (self.running.len() < self.config.running).then(|| self.waiting.front().copied()).flatten()
    }

    /// Waiting sequences, in their turn.
    pub(crate) fn waiting(&self) -> impl ExactSizeIterator<Item = &Waiting> {
        self.waiting.iter()
    }

    /// Running sequences, in order of admission.
    pub(crate) fn running(&self) -> impl DoubleEndedIterator<Item = SeqId> {
        self.running.iter().map(|r| r.seq)
    }

    /// Number of running sequences.
    #[must_use]
    pub(crate) fn running_len(&self) -> usize {
        self.running.len()
    }

    /// Moves a waiting sequence into the batch: the head of the queue, or one that has its memory already. Its first
    /// `computed` tokens have KV.
    ///
    /// # Panics
    /// If `seq` does not wait, or has nothing to compute.
    pub(crate) fn admit(&mut self, seq: SeqId, micro_batch: MicroBatch, computed: u32) {
        let at = self.waiting.iter().position(|w| w.seq == seq);
        let Some(entry) = at.and_then(|at| self.waiting.remove(at)) else { panic!("{seq} does not wait") };
        self.run(seq, micro_batch, entry.tokens, computed);
    }

    /// Adds a sequence to the batch whose first `computed` of `tokens` tokens another instance has computed. The caller keeps
    /// the batch within its bound.
    ///
    /// # Panics
    /// If it waits or runs, or has nothing to compute.
    pub(crate) fn resume(&mut self, seq: SeqId, micro_batch: MicroBatch, tokens: u32, computed: u32) {
        assert!(!self.is_running(seq) && self.waiting.iter().all(|w| w.seq != seq), "{seq} waits or runs");
        self.run(seq, micro_batch, tokens, computed);
    }

    /// Sets the lost ranges of a running sequence, replacing earlier ones: ascending, disjoint, below `computed`.
    ///
    /// # Panics
    /// If they are not, or if the sequence does not run or is in a step.
    pub(crate) fn set_lost(&mut self, seq: SeqId, lost: &[Range<u32>]) {
        let entry = self.entry_mut(seq);
        assert!(!entry.in_step, "{seq} is in a step");
        let ascend = lost.windows(2).all(|pair| pair[0].end <= pair[1].start) && lost.iter().all(|l| l.start < l.end);
        assert!(ascend && lost.last().is_none_or(|l| l.end <= entry.computed), "{seq} cannot have lost {lost:?}");
        entry.lost = lost.iter().cloned().collect();
    }

    /// Removes a sequence, waiting or running.
    pub(crate) fn remove(&mut self, seq: SeqId) {
        self.waiting.retain(|w| w.seq != seq);
        self.stop(seq);
    }

    /// Moves a running sequence to another micro-batch, from its next step on.
    pub(crate) fn set_micro_batch(&mut self, seq: SeqId, micro_batch: MicroBatch) {
        self.entry_mut(seq).micro_batch = micro_batch;
    }

    /// Running sequences of `micro_batch` that are in no step, in order of admission, each with its number of tokens:
    /// KV slots that its next token needs.
    pub(crate) fn idle(&self, micro_batch: MicroBatch) -> impl Iterator<Item = (SeqId, u32)> {
        self.running.iter().filter(move |r| r.micro_batch == micro_batch && !r.in_step).map(|r| (r.seq, r.tokens))
    }

    /// Positions of prompts and lost ranges that steps of `micro_batch` compute next, in the order in which they take them. Sequences that
    /// are in no step and not `ready` sit out.
    pub(crate) fn due_prompts(
        &self,
        micro_batch: MicroBatch,
        ready: impl Fn(SeqId) -> bool,
    ) -> impl Iterator<Item = Range<u32>> {
        let prompts = self.running.iter().filter(move |r| r.micro_batch == micro_batch && !r.decodes());
        prompts.filter(move |r| r.in_step || ready(r.seq)).map(|r| r.due().0)
    }

    /// Positions of prompts and lost ranges in the step of `micro_batch`.
    pub(crate) fn prompts_in_step(&self, micro_batch: MicroBatch) -> impl Iterator<Item = Range<u32>> {
        let prompts = self.running.iter().filter(move |r| r.micro_batch == micro_batch && r.prompt_rows > 0);
        prompts.map(|r| r.due().0.start..r.due().0.start + r.prompt_rows)
    }

    /// Bounds the rows of prompts in the next step; at least 1.
    pub(crate) fn limit_chunks(&mut self, rows: u32) {
        self.chunk_rows = rows.max(1);
    }

    /// The next step of `micro_batch`: one row per decoding sequence, then chunks of prompts and lost ranges, within
    /// the row budget ([`policy::prompt_rows`]). A chunk whose windowed KV is missing is preceded by those that compute it.
    /// `ready` says whether a sequence has memory for its tokens; others sit out.
    pub(crate) fn plan(&mut self, micro_batch: MicroBatch, ready: impl Fn(SeqId) -> bool) -> StepPlan {
        let mut budget = self.rows_max(micro_batch);
        let prompt_rows = self.prompt_rows(micro_batch, &ready);
        let warm_up = self.rings.as_ref().map_or(0, Rings::warm_up);
        let mut plan = StepPlan::default();
        for prefill in [false, true] {
            budget = if prefill { budget.min(prompt_rows) } else { budget };
            for entry in self.running.iter_mut().filter(|r| r.micro_batch == micro_batch && !r.in_step) {
                if budget == 0 || !ready(entry.seq) {
                    continue;
                }
                let (chunk, ring) = entry.next(budget, warm_up);
                if chunk.decodes() == prefill {
                    continue;
                }
                budget -= chunk.len;
                (entry.in_step, entry.ring) = (true, ring);
                entry.prompt_rows = if prefill { chunk.len } else { 0 };
                plan.chunks.push(chunk);
            }
        }
        plan
    }

    /// Maximum of rows of prompts and lost ranges in the next step of `micro_batch`.
    fn prompt_rows(&self, micro_batch: MicroBatch, ready: impl Fn(SeqId) -> bool) -> u32 {
        let (mut decoding, mut other_wants, mut in_flight) = (0, 0_u32, 0);
        for entry in self.running.iter().filter(|r| r.in_step || ready(r.seq)) {
            let (due, _) = entry.due();
            if entry.decodes() {
                decoding += 1;
            } else if entry.micro_batch != micro_batch {
                other_wants = other_wants.saturating_add(due.end - due.start);
            }
            in_flight += entry.prompt_rows;
        }
        let other = MicroBatch::ALL[1 - micro_batch.index()];
        let left = self.config.step_rows.saturating_sub(decoding);
        policy::prompt_rows(left, other_wants.min(self.rows_max(other)), in_flight).min(self.chunk_rows)
    }

    /// Maximum of rows in a step of `micro_batch`.
    fn rows_max(&self, micro_batch: MicroBatch) -> u32 {
        match micro_batch {
            MicroBatch::Local => self.config.step_rows,
            MicroBatch::Remote => self.remote_rows,
        }
    }

    /// Rows of `plan` that no sequence needs: drafts may take them.
    pub(crate) fn draft_rows(&self, micro_batch: MicroBatch, plan: &StepPlan) -> u32 {
        let taken: u32 = plan.chunks.iter().map(|chunk| chunk.len).sum();
        self.rows_max(micro_batch).saturating_sub(taken).min(DRAFT_ROWS_MAX)
    }

    /// Completes a planned chunk, without its rejected drafts. With `sampled`, the sequence has one token more, and its accepted
    /// drafts.
    pub(crate) fn complete(&mut self, chunk: &Chunk, sampled: bool) {
        let entry = self.entry_mut(chunk.seq);
        let planned = if chunk.warms_up() { entry.ring.map(Ring::head) } else { Some(entry.due().0.start) };
        assert!(entry.in_step && planned == Some(chunk.start), "{} completes what was planned", chunk.seq);
        (entry.in_step, entry.prompt_rows) = (false, 0);
        entry.ring.iter_mut().for_each(|ring| ring.fill(chunk.len));
        if chunk.warms_up() {
            return;
        }
        if let Some(lost) = entry.lost.front_mut() {
            lost.start += chunk.len;
            entry.lost.retain(|lost| lost.start < lost.end);
        } else {
            entry.computed += chunk.len;
        }
        entry.tokens += if sampled { 1 + chunk.drafts } else { 0 };
    }

    /// Skips the next `tokens` tokens of a sequence: prefix-cache hits.
    ///
    /// # Panics
    /// If it is in a step, something of it was lost, or nothing is left to compute.
    pub(crate) fn skip(&mut self, seq: SeqId, tokens: u32) {
        let entry = self.entry_mut(seq);
        entry.computed += tokens;
        assert!(!entry.in_step && entry.lost.is_empty() && entry.computed < entry.tokens, "{seq} skips {tokens}");
    }

    /// Drops a planned chunk that was not computed: the sequence leaves its step unchanged.
    pub(crate) fn abandon(&mut self, seq: SeqId) {
        let entry = self.entry_mut(seq);
        (entry.in_step, entry.prompt_rows) = (false, 0);
    }

    /// Whether a sequence is in a step.
    #[must_use]
    pub(crate) fn in_step(&self, seq: SeqId) -> bool {
        self.running.iter().any(|r| r.seq == seq && r.in_step)
    }

    /// Whether a sequence runs.
    #[must_use]
    pub(crate) fn is_running(&self, seq: SeqId) -> bool {
        self.running.iter().any(|r| r.seq == seq)
    }

    fn entry(&self, seq: SeqId) -> &Running {
        match self.running.iter().find(|r| r.seq == seq) {
            Some(entry) => entry,
            None => panic!("{seq} does not run"),
        }
    }

    fn entry_mut(&mut self, seq: SeqId) -> &mut Running {
        match self.running.iter_mut().find(|r| r.seq == seq) {
            Some(entry) => entry,
            None => panic!("{seq} does not run"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn scheduler(step_rows: u32) -> Scheduler {
        Scheduler::new(
            SchedulerConfig { queue: 8, running: 4, step_rows, drafts: 0, draft_model: false },
            step_rows,
            None,
        )
    }

    fn admit(s: &mut Scheduler, seq: u64, tokens: u32) {
        s.enqueue(SeqId(seq), tokens, 0, 0).unwrap();
        s.admit(SeqId(seq), MicroBatch::Local, 0);
    }

    /// Without the limit, a long prompt filled every step.
    #[test]
    fn chunks_of_prompts_are_limited_and_decoding_rows_are_not() {
        let mut s = scheduler(64);
        for seq in 0..4 {
            s.enqueue(SeqId(seq), 100, 0, 0).unwrap();
            s.admit(SeqId(seq), MicroBatch::Local, if seq < 2 { 99 } else { 0 });
        }
        s.limit_chunks(10);
        let plan = s.plan(MicroBatch::Local, |_| true);
        let rows: Vec<(u64, u32)> = plan.chunks.iter().map(|chunk| (chunk.seq.0, chunk.len)).collect();
        assert_eq!(rows, [(0, 1), (1, 1), (2, 10)]);
        plan.chunks.iter().for_each(|chunk| s.complete(chunk, chunk.last));
        s.limit_chunks(u32::MAX);
        let rows: u32 = s.plan(MicroBatch::Local, |_| true).chunks.iter().map(|chunk| chunk.len).sum();
        assert_eq!(rows, 64);
    }

    /// A sequence has one chunk in a step, however many lost ranges it has.
    #[test]
    fn due_prompts_are_what_steps_take() {
        let mut s = scheduler(64);
        for (seq, computed) in [(0, 299), (1, 0), (2, 250), (3, 100)] {
            s.enqueue(SeqId(seq), 300, 0, 0).unwrap();
            s.admit(SeqId(seq), MicroBatch::Local, computed);
        }
        s.set_lost(SeqId(2), &[5..6, 10..20]);
        let due = |s: &Scheduler, of, sits_out| s.due_prompts(of, |seq| seq != SeqId(sits_out)).collect::<Vec<_>>();
        assert_eq!(due(&s, MicroBatch::Local, 9), [0..300, 5..6, 100..300]);
        assert_eq!(due(&s, MicroBatch::Local, 1), [5..6, 100..300]);
        assert!(due(&s, MicroBatch::Remote, 9).is_empty());
        let plan = s.plan(MicroBatch::Local, |seq| seq != SeqId(1));
        let chunks: Vec<_> = plan.chunks.iter().map(|c| (c.seq.0, c.start, c.len)).collect();
        assert_eq!(chunks, [(0, 299, 1), (2, 5, 1), (3, 100, 62)]);
        assert_eq!(due(&s, MicroBatch::Local, 3), [0..300, 5..6, 100..300], "in a step, ready or not");
        assert_eq!(s.prompts_in_step(MicroBatch::Local).collect::<Vec<_>>(), [5..6, 100..162]);
        assert_eq!(s.prompts_in_step(MicroBatch::Remote).count(), 0);
    }

    /// With a budget each, two micro-batches delayed decoding rows by two chunks.
    #[test]
    fn prompts_of_both_micro_batches_share_one_budget_of_rows() {
        let mut s = scheduler(64);
        let admit = |s: &mut Scheduler, seq, micro_batch, computed| {
            s.enqueue(SeqId(seq), 300, 0, 0).unwrap();
            s.admit(SeqId(seq), micro_batch, computed);
        };
        let rows = |plan: &StepPlan| plan.chunks.iter().map(|chunk| (chunk.seq.0, chunk.len)).collect::<Vec<_>>();
        let done = |s: &mut Scheduler, plan: &StepPlan| plan.chunks.iter().for_each(|c| s.complete(c, c.last));
        admit(&mut s, 0, MicroBatch::Local, 299);
        admit(&mut s, 1, MicroBatch::Local, 0);
        let local = s.plan(MicroBatch::Local, |_| true);
        assert_eq!(rows(&local), [(0, 1), (1, 63)], "alone, it has the whole budget");
        admit(&mut s, 2, MicroBatch::Remote, 299);
        admit(&mut s, 3, MicroBatch::Remote, 0);
        let remote = s.plan(MicroBatch::Remote, |_| true);
        assert_eq!(rows(&remote), [(2, 1)], "decoding goes on; the budget's prompt rows are in flight");
        done(&mut s, &local);
        let local = s.plan(MicroBatch::Local, |_| true);
        assert_eq!(rows(&local), [(0, 1), (1, 31)]);
        done(&mut s, &remote);
        let remote = s.plan(MicroBatch::Remote, |_| true);
        assert_eq!(rows(&remote), [(2, 1), (3, 31)]);
        done(&mut s, &local);
        let local = s.plan(MicroBatch::Local, |seq| seq != SeqId(1));
        assert_eq!(rows(&local), [(0, 1)]);
        done(&mut s, &remote);
        let remote = s.plan(MicroBatch::Remote, |seq| seq != SeqId(1));
        assert_eq!(rows(&remote), [(2, 1), (3, 62)], "the other one's prompt cannot start");
        done(&mut s, &remote);
        done(&mut s, &local);
        // A latency target's time is shared by who says how many rows fit.
        s.limit_chunks(20);
        let local = s.plan(MicroBatch::Local, |_| true);
        let remote = s.plan(MicroBatch::Remote, |_| true);
        assert_eq!((rows(&local), rows(&remote)), (vec![(0, 1), (1, 20)], vec![(2, 1), (3, 20)]));
    }

    #[test]
    fn a_priority_moves_a_request_by_a_fixed_time() {
        let mut s = scheduler(16);
        // The one at 5 ms has a priority of 10 ms, the last one came when that no longer counts.
        for (seq, now_ms, turn_ms) in [(0, 0, 0), (1, 1, 1), (2, 5, -5), (3, 6, 6), (4, 20, 10), (5, 30, 30)] {
            s.enqueue(SeqId(seq), 3, now_ms, turn_ms).unwrap();
        }
        let order = |s: &Scheduler| s.waiting().map(|w| w.seq.0).collect::<Vec<_>>();
        assert_eq!(order(&s), [2, 0, 1, 3, 4, 5]);
        // A preempted one stays in front of all.
        s.admit(SeqId(5), MicroBatch::Local, 0);
        s.preempt(SeqId(5), 40);
        s.enqueue(SeqId(6), 3, 41, i64::MIN + 1).unwrap();
        assert_eq!(order(&s), [5, 6, 2, 0, 1, 3, 4]);
    }

    #[test]
    fn decoding_goes_before_a_long_prompt() {
        let mut s = scheduler(16);
        admit(&mut s, 1, 5);
        let plan = s.plan(MicroBatch::Local, |_| true);
        assert_eq!(plan.chunks, [Chunk { seq: SeqId(1), start: 0, len: 5, last: true, drafts: 0, ring: None }]);
        s.complete(&plan.chunks[0], true);
        admit(&mut s, 2, 100);
        let plan = s.plan(MicroBatch::Local, |_| true);
        assert_eq!(plan.chunks[0], Chunk { seq: SeqId(1), start: 5, len: 1, last: true, drafts: 0, ring: None });
        assert_eq!(plan.chunks[1], Chunk { seq: SeqId(2), start: 0, len: 15, last: false, drafts: 0, ring: None });
    }

    #[test]
    fn steps_with_remote_kv_have_a_limit_of_their_own() {
        let mut s = Scheduler::new(
            SchedulerConfig { queue: 8, running: 4, step_rows: 16, drafts: 0, draft_model: false },
            8,
            None,
        );
        s.enqueue(SeqId(1), 100, 0, 0).unwrap();
        s.admit(SeqId(1), MicroBatch::Remote, 0);
        let plan = s.plan(MicroBatch::Remote, |_| true);
        assert_eq!(plan.chunks, [Chunk { seq: SeqId(1), start: 0, len: 8, last: false, drafts: 0, ring: None }]);
    }

    #[test]
    fn drafts_have_the_rows_that_nobody_needs() {
        let mut s = scheduler(16);
        admit(&mut s, 1, 5);
        let plan = s.plan(MicroBatch::Local, |_| true);
        s.complete(&plan.chunks[0], true);
        let plan = s.plan(MicroBatch::Local, |_| true);
        assert_eq!(s.draft_rows(MicroBatch::Local, &plan), 15);
        // Three drafts, of which two are accepted.
        let accepted = Chunk { len: 3, drafts: 2, ..plan.chunks[0] };
        s.complete(&accepted, true);
        assert_eq!(s.idle(MicroBatch::Local).collect::<Vec<_>>(), [(SeqId(1), 9)]);
        admit(&mut s, 2, 100);
        let plan = s.plan(MicroBatch::Local, |_| true);
        assert_eq!(plan.chunks[0], Chunk { seq: SeqId(1), start: 8, len: 1, last: true, drafts: 0, ring: None });
        assert_eq!((plan.chunks[1].len, s.draft_rows(MicroBatch::Local, &plan)), (15, 0), "the prompt has them all");
    }

    #[test]
    fn the_queue_is_bounded_and_first_come_first_served() {
        let mut s = scheduler(16);
        for seq in 0..8 {
            s.enqueue(SeqId(seq), 3, 0, 0).unwrap();
        }
        assert_eq!(s.enqueue(SeqId(9), 3, 0, 0), Err(QueueFull { limit: 8 }));
        assert_eq!(s.next_waiting().map(|w| w.seq), Some(SeqId(0)));
        s.enqueue_accepted(SeqId(10), 3, 0, 0);
        assert_eq!(s.waiting().last().map(|w| w.seq), Some(SeqId(10)), "it was counted before");
        for seq in 0..4 {
            s.admit(SeqId(seq), MicroBatch::Local, 0);
        }
        assert_eq!(s.next_waiting(), None, "the batch is full");
        s.preempt(SeqId(3), 7);
        assert_eq!(s.next_waiting(), Some(Waiting { seq: SeqId(3), tokens: 3, since_ms: 7, turn_ms: i64::MIN }));
    }

    #[test]
    fn what_was_lost_is_computed_first_in_chunks_beside_others_that_decode() {
        let mut s = scheduler(8);
        admit(&mut s, 1, 30);
        while let Some(&chunk) = s.plan(MicroBatch::Local, |_| true).chunks.first() {
            s.complete(&chunk, chunk.last);
            if chunk.last {
                break;
            }
        }
        admit(&mut s, 2, 2);
        let plan = s.plan(MicroBatch::Local, |seq| seq == SeqId(2));
        s.complete(&plan.chunks[0], true);
        s.set_lost(SeqId(1), &[4..5, 12..24]);
        let decode = |start| Chunk { seq: SeqId(2), start, len: 1, last: true, drafts: 0, ring: None };
        let again = |start, len| Chunk { seq: SeqId(1), start, len, last: false, drafts: 0, ring: None };
        for (turn, expected) in (2..).zip([again(4, 1), again(12, 7), again(19, 5)]) {
            let plan = s.plan(MicroBatch::Local, |_| true);
            assert_eq!(plan.chunks, [decode(turn), expected], "a range of one row does not decode either");
            plan.chunks.iter().for_each(|c| s.complete(c, c.last));
        }
        let plan = s.plan(MicroBatch::Local, |_| true);
        assert_eq!(plan.chunks[0], Chunk { seq: SeqId(1), start: 30, len: 1, last: true, drafts: 0, ring: None });
        plan.chunks.iter().for_each(|c| s.abandon(c.seq));
        // What is computed again as a whole has lost nothing in particular.
        s.set_lost(SeqId(1), &[0..8, 9..30]);
        s.preempt(SeqId(1), 1);
        s.admit(SeqId(1), MicroBatch::Remote, 0);
        assert_eq!(
            s.plan(MicroBatch::Remote, |_| true).chunks,
            [again(0, 7)],
            "the other micro-batch decodes in one row"
        );
    }

    #[test]
    fn what_windows_need_is_computed_before_a_lost_range_and_before_new_tokens() {
        let config = SchedulerConfig { queue: 8, running: 4, step_rows: 8, drafts: 0, draft_model: false };
        let mut s = Scheduler::new(config, 8, Some(5));
        admit(&mut s, 1, 40);
        let next = |s: &mut Scheduler| {
            let plan = s.plan(MicroBatch::Local, |_| true);
            let chunk = plan.chunks[0];
            s.complete(&chunk, chunk.last);
            (chunk.start..chunk.start + chunk.len, chunk.ring.unwrap().from, chunk.warms_up())
        };
        for start in (0..40).step_by(8) {
            assert_eq!(next(&mut s), (start..start + 8, 0, false));
        }
        assert_eq!(next(&mut s), (40..41, 0, false), "it decodes");
        s.set_lost(SeqId(1), &[10..12, 15..16, 30..40]);
        let expected = [
            (5..10, 5, true),
            (10..12, 5, false),
            (12..15, 5, true),
            (15..16, 5, false),
            (25..30, 25, true),
            (30..38, 25, false),
            (38..40, 25, false),
            (40..41, 25, true),
            (41..42, 25, false),
        ];
        expected.into_iter().for_each(|expected| assert_eq!(next(&mut s), expected));
        // One that comes back with its first tokens begins a ring, which another one had.
        s.preempt(SeqId(1), 0);
        s.admit(SeqId(1), MicroBatch::Local, 3);
        assert_eq!((next(&mut s), next(&mut s)), ((0..3, 0, true), (3..11, 0, false)));
    }

    proptest! {
        /// Whatever is lost in between, each step computes the lowest position that is due, and in the end every
        /// position was computed once more than it was lost.
        #[test]
        fn losses_are_computed_again(
            tokens in 1u32..90,
            rows in 1u32..20,
            losses in prop::collection::vec(prop::option::of((0u32..90, 1u32..30)), 1..30),
        ) {
            let mut s = scheduler(rows);
            admit(&mut s, 1, tokens);
            let (mut due, mut end) = ((0..tokens).collect::<std::collections::BTreeSet<_>>(), tokens);
            let mut computed = 0;
            let mut losses = losses.into_iter();
            for _ in 0..300 {
                if let Some(Some((start, len))) = losses.next() {
                    // What is lost again before it was computed is lost once.
                    due.extend(start.min(computed)..(start + len).min(computed));
                    let mut lost: Vec<Range<u32>> = Vec::new();
                    for &pos in due.range(..computed) {
                        match lost.last_mut() {
                            Some(last) if last.end == pos => last.end += 1,
                            _ => lost.push(pos..pos + 1),
                        }
                    }
                    s.set_lost(SeqId(1), &lost);
                }
                let chunk = s.plan(MicroBatch::Local, |_| true).chunks[0];
                prop_assert_eq!(due.first(), Some(&chunk.start));
                (chunk.start..chunk.start + chunk.len).for_each(|pos| assert!(due.remove(&pos)));
                prop_assert_eq!(chunk.last, due.is_empty());
                computed = computed.max(chunk.start + chunk.len);
                s.complete(&chunk, chunk.last);
                if chunk.last {
                    due.insert(end);
                    end += 1;
                }
            }
        }

        /// Whatever arrives, every token of every sequence is computed exactly once and in order.
        #[test]
        fn every_token_is_computed_once(
            prompts in prop::collection::vec((1u32..70, 1u32..5), 1..8),
            rows in 1u32..40,
            micro_batches in prop::collection::vec(any::<bool>(), 8),
            known in 0u32..100,
        ) {
            let mut s = scheduler(rows);
            let mut computed = BTreeMap::<SeqId, u32>::new();
            let mut left = BTreeMap::<SeqId, u32>::new();
            for (seq, (tokens, generate)) in (0u64..).zip(&prompts) {
                s.enqueue(SeqId(seq), *tokens, 0, 0).unwrap();
                left.insert(SeqId(seq), *generate);
            }
            for turn in 0..10_000 {
                while let Some(w) = s.next_waiting() {
                    let micro_batch = if micro_batches[usize::try_from(w.seq.0).unwrap()] { MicroBatch::Local } else { MicroBatch::Remote };
                    // Some of the first tokens are known.
                    let known = (known * w.tokens / 100).min(w.tokens - 1);
                    computed.insert(w.seq, known);
                    s.admit(w.seq, micro_batch, known);
                }
                let plan = s.plan(MicroBatch::ALL[turn % 2], |_| true);
                prop_assert!(plan.chunks.iter().map(|c| c.len).sum::<u32>() <= rows);
                for chunk in &plan.chunks {
                    let done = computed.entry(chunk.seq).or_default();
                    prop_assert_eq!(*done, chunk.start);
                    *done += chunk.len;
                    let generate = left.get_mut(&chunk.seq).unwrap();
                    let ends = chunk.last && *generate == 1;
                    s.complete(chunk, chunk.last && !ends);
                    if chunk.last { *generate -= 1; }
                    if ends { s.remove(chunk.seq); }
                }
                if left.values().all(|n| *n == 0) { break; }
            }
            for (seq, (tokens, generate)) in (0u64..).zip(&prompts) {
                prop_assert_eq!(computed[&SeqId(seq)], tokens + generate - 1);
            }
        }
    }
}
