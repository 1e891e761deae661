//! The batch: requests that wait, run, or are preempted or swapped out, and the memory that each of them gets.
//!
//! It owns the sequences and the scheduler. Other machines look at both through [`Batch::seq`] and the queries of the
//! queue; who waits, runs and ends is decided here. Policy (admission order, growth, victims) is in `policy.rs`.

mod admission;
mod borrowing;
pub(crate) mod due;
pub(crate) mod freeze;
mod growth;
pub(crate) mod micro_batches;
mod policy;
mod preempt;
pub(crate) mod prefix;
mod recovery;
pub(crate) mod scheduler;
pub(crate) mod sequence;
mod swap;

use due::Due;
use freeze::FrozenDebt;
use lagoon_types::limits::ADMISSION_DEADLINE_MS;
use lagoon_types::{Chunk, MicroBatch, SeqId, StepPlan};
use micro_batches::MicroBatches;
use scheduler::{QueueFull, Scheduler, SchedulerConfig, Waiting};
use sequence::{Life, Need, Sequence};
use std::collections::BTreeMap;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Batch {
    sched: Scheduler,
    seqs: BTreeMap<SeqId, Sequence>,
    micro: MicroBatches,
    /// A sequence that is preempted when its step ends, and the one that it is for.
    preempt_after_step: Option<(SeqId, SeqId)>,
    frozen: Option<FrozenDebt>,
    pub(crate) counts: BatchCounts,
    /// Whether it is looked at after an event.
    pub(crate) due: Due,
    /// Measured time of one row of a prompt, in microseconds; 0 before.
    prefill_us: f64,
}

/// Counters of the batch since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BatchCounts {
    pub(crate) preemptions: u64,
    pub(crate) recoveries: u64,
    pub(crate) recomputed_tokens: u64,
    pub(crate) preempted_tokens: u64,
    /// Blocks that were lent to its sequences, moves left out.
    pub(crate) borrowed_blocks: u64,
    /// Sequences that were swapped out.
    pub(crate) offloads: u64,
}

impl Batch {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        Self {
            sched: Scheduler::new(config),
            seqs: BTreeMap::new(),
            micro: MicroBatches::default(),
            preempt_after_step: None,
            frozen: None,
            counts: BatchCounts::default(),
            due: Due::new(),
            prefill_us: 0.0,
        }
    }

    pub(crate) fn seq(&self, id: SeqId) -> Option<&Sequence> {
        self.seqs.get(&id)
    }

    pub(crate) fn seq_mut(&mut self, id: SeqId) -> Option<&mut Sequence> {
        self.seqs.get_mut(&id)
    }

    /// A sequence that exists.
    ///
    /// # Panics
    /// If it does not.
    pub(crate) fn known(&self, id: SeqId) -> &Sequence {
        &self.seqs[&id]
    }

    pub(crate) fn has(&self, id: SeqId) -> bool {
        self.seqs.contains_key(&id)
    }

    /// All sequences, the oldest first.
    pub(crate) fn seqs(&self) -> impl DoubleEndedIterator<Item = &Sequence> + Clone {
        self.seqs.values()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.seqs.is_empty()
    }

    /// Adds a sequence that was enqueued, or whose prompt is computed elsewhere.
    pub(crate) fn add(&mut self, id: SeqId, seq: Sequence) {
        self.due.touch();
        self.seqs.insert(id, seq);
    }

    /// Takes a sequence out, as it is: its memory is the caller's.
    pub(crate) fn take(&mut self, id: SeqId) -> Option<Sequence> {
        self.due.touch();
        self.sched.remove(id);
        self.seqs.remove(&id)
    }

    /// Sequences that wait, oldest first.
    pub(crate) fn waiting(&self) -> impl ExactSizeIterator<Item = &Waiting> {
        self.sched.waiting()
    }

    pub(crate) fn running_len(&self) -> usize {
        self.sched.running_len()
    }

    pub(crate) fn is_running(&self, id: SeqId) -> bool {
        self.seqs.get(&id).is_some_and(Sequence::is_running)
    }

    pub(crate) fn in_step(&self, id: SeqId) -> bool {
        self.sched.in_step(id)
    }

    /// Puts a new sequence at the end of the queue, if that has room.
    pub(crate) fn enqueue(&mut self, id: SeqId, tokens: u32, now_ms: u64) -> Result<(), QueueFull> {
        self.sched.enqueue(id, tokens, now_ms)
    }

    /// Puts a sequence whose prompt was a prefill worker's matter at the end of the queue, whatever its bound.
    pub(crate) fn compute_here(&mut self, id: SeqId, now_ms: u64) {
        self.due.touch();
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        seq.come_back();
        seq.admit_by_ms = now_ms + ADMISSION_DEADLINE_MS;
        self.sched.enqueue_accepted(id, seq.len(), now_ms);
    }

    /// The prompt of a waiting sequence becomes a prefill worker's matter.
    pub(crate) fn send_away(&mut self, id: SeqId) {
        self.sched.remove(id);
        self.set_life(id, Life::Away { retry_at_ms: None });
    }

    /// A sequence is over and its memory is frozen: it leaves the batch and stays known.
    pub(crate) fn keep_frozen(&mut self, id: SeqId) {
        self.sched.remove(id);
        self.set_life(id, Life::Frozen);
    }

    /// Whether a sequence has ended, and waits for the thaw of its memory.
    fn is_over(&self, id: SeqId) -> bool {
        self.seqs.get(&id).is_some_and(|seq| seq.life == Life::Frozen)
    }

    /// The cycle of the freeze; 0 without one.
    pub(crate) fn frozen_cycle(&self) -> u64 {
        self.frozen.map_or(0, |f| f.cycle)
    }

    fn set_life(&mut self, id: SeqId, life: Life) {
        self.due.touch();
        self.seqs.entry(id).and_modify(|seq| seq.life = life);
    }

    fn set_need(&mut self, id: SeqId, need: Need) {
        self.due.touch();
        self.seqs.entry(id).and_modify(|seq| seq.set_need(need));
    }

    /// Moves a waiting sequence into the batch. The KV of its first `computed` tokens is there.
    fn admit(&mut self, id: SeqId, micro_batch: MicroBatch, computed: u32) {
        self.sched.admit(id, micro_batch, computed);
        self.set_life(id, Life::Running(Need::Met));
        self.micro.changed();
    }

    /// Puts a running sequence that is in no step at the front of the queue, to be computed again.
    fn preempt(&mut self, id: SeqId, now_ms: u64) {
        self.sched.preempt(id, now_ms);
        self.set_life(id, Life::Waiting(Need::Met));
    }

    /// Puts a sequence into the batch whose first `computed` of `tokens` tokens were computed elsewhere.
    pub(crate) fn resume(&mut self, id: SeqId, micro_batch: MicroBatch, tokens: u32, computed: u32) {
        self.sched.resume(id, micro_batch, tokens, computed);
        self.set_life(id, Life::Running(Need::Met));
    }

    /// Moves a running sequence to another micro-batch, from its next step on.
    pub(crate) fn set_micro_batch(&mut self, id: SeqId, micro_batch: MicroBatch) {
        self.due.touch();
        self.sched.set_micro_batch(id, micro_batch);
    }

    /// Sequences came, went, moved or advanced: the micro-batches are divided anew before the next step.
    pub(crate) fn changed(&mut self) {
        self.due.touch();
        self.micro.changed();
    }

    /// A decode step's creditors took so long to answer, in sum over layers.
    pub(crate) fn remote_took(&mut self, ms: u64) {
        self.micro.remote_took(ms);
    }

    /// Plans the next step of a micro-batch: sequences that are ready take part.
    pub(crate) fn plan(&mut self, micro_batch: MicroBatch) -> StepPlan {
        let seqs = &self.seqs;
        self.sched.plan(micro_batch, |seq| seqs.get(&seq).is_some_and(Sequence::is_ready))
    }

    /// A planned chunk has been computed. With `sampled`, the sequence has one token more.
    pub(crate) fn complete(&mut self, chunk: &Chunk, sampled: bool) {
        self.due.touch();
        self.sched.complete(chunk, sampled);
    }

    /// A planned chunk was not computed: the sequence leaves its step as it was.
    pub(crate) fn abandon(&mut self, id: SeqId) {
        self.due.touch();
        self.sched.abandon(id);
    }
}
