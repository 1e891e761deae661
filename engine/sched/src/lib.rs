//! The iteration-level scheduler: bounded first-come-first-served admission, continuous batching with chunked prefill,
//! and the choice of whom to preempt.
//!
//! It decides *which tokens* the next step computes; where their KV lives is the instance's and the rManager's matter.
//! Sans-IO: time is a parameter, nothing is hashed, so the same calls give the same plans.
//!
//! Invariants: a sequence is either waiting or running; `computed < tokens` for every running sequence that is not in
//! a step; a step's rows never exceed its budget; sequences are planned in the order of their admission, decoding
//! before prefill, so that a long prompt delays nobody's next token by more than one chunk.
#![forbid(unsafe_code)]

use lagoon_types::{Chunk, Lane, SeqId, StepPlan};
use std::collections::VecDeque;

/// Bounds of one scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Sequences that wait for admission at most.
    pub queue: usize,
    /// Sequences that run at most.
    pub running: usize,
    /// Rows of one step at most.
    pub step_rows: u32,
}

/// The queue has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full ({limit} requests wait)")]
pub struct QueueFull {
    pub limit: usize,
}

/// A sequence that waits for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    pub seq: SeqId,
    /// Tokens that it starts with: its prompt, and what it had generated before a preemption.
    pub tokens: u32,
    /// When it began to wait, in the caller's milliseconds.
    pub since_ms: u64,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    seq: SeqId,
    lane: Lane,
    tokens: u32,
    computed: u32,
    in_step: bool,
}

/// See the crate's documentation.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    waiting: VecDeque<Waiting>,
    /// In order of admission.
    running: Vec<Running>,
}

impl Scheduler {
    #[must_use]
    pub fn new(config: SchedulerConfig) -> Self {
        Self { config, waiting: VecDeque::new(), running: Vec::new() }
    }

    /// Puts a new sequence at the end of the queue.
    ///
    /// # Errors
    /// [`QueueFull`] when the queue has reached its bound.
    pub fn enqueue(&mut self, seq: SeqId, tokens: u32, now_ms: u64) -> Result<(), QueueFull> {
        if self.waiting.len() >= self.config.queue {
            return Err(QueueFull { limit: self.config.queue });
        }
        self.waiting.push_back(Waiting { seq, tokens, since_ms: now_ms });
        Ok(())
    }

    /// Takes a running sequence out of the batch and puts it at the front of the queue, to be computed again. The
    /// bound of the queue does not apply: it was admitted before.
    ///
    /// # Panics
    /// If the sequence does not run or is in a step.
    pub fn preempt(&mut self, seq: SeqId, now_ms: u64) {
        let entry = *self.entry(seq);
        assert!(!entry.in_step, "{seq} is in a step");
        self.running.retain(|r| r.seq != seq);
        self.waiting.push_front(Waiting { seq, tokens: entry.tokens, since_ms: now_ms });
    }

    /// The next sequence to admit, if the batch has room for one.
    #[must_use]
    pub fn next_waiting(&self) -> Option<Waiting> {
        (self.running.len() < self.config.running).then(|| self.waiting.front().copied()).flatten()
    }

    /// Sequences that wait, oldest first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Waiting> {
        self.waiting.iter()
    }

    /// Sequences that run.
    #[must_use]
    pub fn running_len(&self) -> usize {
        self.running.len()
    }

    /// Moves a waiting sequence into the batch: the head of the queue, or one that has its memory already.
    ///
    /// # Panics
    /// If `seq` does not wait.
    pub fn admit(&mut self, seq: SeqId, lane: Lane) {
        let at = self.waiting.iter().position(|w| w.seq == seq);
        let Some(entry) = at.and_then(|at| self.waiting.remove(at)) else { panic!("{seq} does not wait") };
        self.running.push(Running { seq, lane, tokens: entry.tokens, computed: 0, in_step: false });
    }

    /// Forgets a sequence, waiting or running.
    pub fn remove(&mut self, seq: SeqId) {
        self.waiting.retain(|w| w.seq != seq);
        self.running.retain(|r| r.seq != seq);
    }

    /// Moves a running sequence to another lane, from its next step on.
    pub fn set_lane(&mut self, seq: SeqId, lane: Lane) {
        self.entry_mut(seq).lane = lane;
    }

    /// Running sequences of `lane` that are not in a step, with the tokens that the store must hold for their next
    /// token to be computed, in order of admission.
    pub fn idle(&self, lane: Lane) -> impl Iterator<Item = (SeqId, u32)> {
        self.running.iter().filter(move |r| r.lane == lane && !r.in_step).map(|r| (r.seq, r.tokens))
    }

    /// The sequence to preempt when memory is short: the one admitted last that is not in a step and that `holds`
    /// memory worth freeing. It may be the very one that is short: the older one wins.
    #[must_use]
    pub fn victim(&self, holds: impl Fn(SeqId) -> bool) -> Option<SeqId> {
        self.running.iter().rev().find(|r| !r.in_step && holds(r.seq)).map(|r| r.seq)
    }

    /// The next step of `lane`: one row for each decoding sequence, then chunks of prompts, within the row budget.
    /// `ready` says whether a sequence has memory for its tokens; others sit out.
    pub fn plan(&mut self, lane: Lane, ready: impl Fn(SeqId) -> bool) -> StepPlan {
        let mut budget = self.config.step_rows;
        let mut plan = StepPlan::default();
        for prefill in [false, true] {
            for entry in self.running.iter_mut().filter(|r| r.lane == lane && !r.in_step) {
                let left = entry.tokens - entry.computed;
                if (left > 1) != prefill || budget == 0 || !ready(entry.seq) {
                    continue;
                }
                assert!(left > 0, "{} has nothing to compute", entry.seq);
                let len = left.min(budget);
                budget -= len;
                entry.in_step = true;
                plan.chunks.push(Chunk { seq: entry.seq, start: entry.computed, len, last: len == left });
            }
        }
        plan
    }

    /// A planned chunk has been computed. With `sampled`, the sequence has one token more.
    pub fn complete(&mut self, chunk: &Chunk, sampled: bool) {
        let entry = self.entry_mut(chunk.seq);
        assert!(entry.in_step && entry.computed == chunk.start, "{} completes what was planned", chunk.seq);
        entry.in_step = false;
        entry.computed += chunk.len;
        entry.tokens += u32::from(sampled);
    }

    /// A planned chunk was not computed: the sequence leaves its step as it was.
    pub fn abandon(&mut self, seq: SeqId) {
        self.entry_mut(seq).in_step = false;
    }

    /// Whether a sequence is in a step.
    #[must_use]
    pub fn in_step(&self, seq: SeqId) -> bool {
        self.running.iter().any(|r| r.seq == seq && r.in_step)
    }

    /// Whether a sequence runs.
    #[must_use]
    pub fn is_running(&self, seq: SeqId) -> bool {
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
        Scheduler::new(SchedulerConfig { queue: 8, running: 4, step_rows })
    }

    fn admit(s: &mut Scheduler, seq: u64, tokens: u32) {
        s.enqueue(SeqId(seq), tokens, 0).unwrap();
        s.admit(SeqId(seq), Lane::Local);
    }

    #[test]
    fn decoding_goes_before_a_long_prompt() {
        let mut s = scheduler(16);
        admit(&mut s, 1, 5);
        let plan = s.plan(Lane::Local, |_| true);
        assert_eq!(plan.chunks, [Chunk { seq: SeqId(1), start: 0, len: 5, last: true }]);
        s.complete(&plan.chunks[0], true);
        admit(&mut s, 2, 100);
        let plan = s.plan(Lane::Local, |_| true);
        assert_eq!(plan.chunks[0], Chunk { seq: SeqId(1), start: 5, len: 1, last: true });
        assert_eq!(plan.chunks[1], Chunk { seq: SeqId(2), start: 0, len: 15, last: false });
    }

    #[test]
    fn the_queue_is_bounded_and_first_come_first_served() {
        let mut s = scheduler(16);
        for seq in 0..8 {
            s.enqueue(SeqId(seq), 3, 0).unwrap();
        }
        assert_eq!(s.enqueue(SeqId(9), 3, 0), Err(QueueFull { limit: 8 }));
        assert_eq!(s.next_waiting().map(|w| w.seq), Some(SeqId(0)));
        for seq in 0..4 {
            s.admit(SeqId(seq), Lane::Local);
        }
        assert_eq!(s.next_waiting(), None, "the batch is full");
        s.preempt(SeqId(3), 7);
        assert_eq!(s.next_waiting(), Some(Waiting { seq: SeqId(3), tokens: 3, since_ms: 7 }));
    }

    #[test]
    fn the_victim_is_the_youngest_that_is_idle() {
        let mut s = scheduler(16);
        (1..=3).for_each(|seq| admit(&mut s, seq, 4));
        assert_eq!(s.victim(|_| true), Some(SeqId(3)));
        assert_eq!(s.victim(|seq| seq != SeqId(3)), Some(SeqId(2)));
        s.plan(Lane::Local, |seq| seq != SeqId(1));
        assert_eq!(s.victim(|_| true), Some(SeqId(1)));
    }

    proptest! {
        /// Whatever arrives, every token of every sequence is computed exactly once and in order.
        #[test]
        fn every_token_is_computed_once(
            prompts in prop::collection::vec((1u32..70, 1u32..5), 1..8),
            rows in 1u32..40,
            lanes in prop::collection::vec(any::<bool>(), 8),
        ) {
            let mut s = scheduler(rows);
            let mut computed = BTreeMap::<SeqId, u32>::new();
            let mut left = BTreeMap::<SeqId, u32>::new();
            for (seq, (tokens, generate)) in (0u64..).zip(&prompts) {
                s.enqueue(SeqId(seq), *tokens, 0).unwrap();
                left.insert(SeqId(seq), *generate);
            }
            for turn in 0..10_000 {
                while let Some(w) = s.next_waiting() {
                    s.admit(w.seq, if lanes[usize::try_from(w.seq.0).unwrap()] { Lane::Local } else { Lane::Remote });
                }
                let plan = s.plan(Lane::ALL[turn % 2], |_| true);
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
