//! The batch: sequences that wait, run, or are preempted or swapped out, and the memory of each.
//!
//! It owns the sequences and the scheduler. Other machines read both through [`Batch::seq`] and the queries of the
//! queue; only the batch decides which sequences wait, run and end. Policy (admission order, growth, victims) is in
//! `policy.rs`.

mod admission;
mod borrowing;
pub(crate) mod changes;
mod chunks;
mod draft_model;
mod drafts;
mod due;
mod embedding;
pub(crate) mod freeze;
mod growth;
mod hand_back;
mod joint;
mod loads;
pub(crate) mod micro_batches;
pub(crate) mod others;
mod policy;
mod pool_prefix;
mod preempt;
pub(crate) mod prefix;
mod recovery;
mod rings;
pub(crate) mod scheduler;
pub(crate) mod sequence;
pub(crate) mod stripes;
mod swap;

use crate::config::InstanceConfig;
use crate::cx::Cx;
use crate::event::{DiskEvent, Effect};
use crate::outcome::{Lost, Outcome, Outcomes};
use draft_model::DraftRequests;
use due::Due;
use freeze::FrozenDebt;
use lagoon_backend::DeviceError;
use lagoon_cluster::{BorrowFailure, BorrowedLease, CachedPart};
use lagoon_protocol::Freeze;
use lagoon_runner::{DraftId, Drafted, RemoteTag, ShareId};
use lagoon_types::limits::ADMISSION_DEADLINE_MS;
use lagoon_types::{Chunk, GenerateRequest, InstanceId, MicroBatch, SeqId, StepPlan, TokenEvent};
use micro_batches::MicroBatches;
pub(crate) use others::Others;
use others::PrefillQueries;
use scheduler::{QueueFull, Scheduler, Waiting};
use sequence::{Life, Need, Sequence};
use std::collections::BTreeMap;

/// The batch machine. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Batch {
    sched: Scheduler,
    seqs: BTreeMap<SeqId, Sequence>,
    micro: MicroBatches,
    /// The victim to preempt when its step ends, and the sequence that gets its memory.
    preempt_after_step: Option<(SeqId, SeqId)>,
    frozen: Option<FrozenDebt>,
    counts: BatchCounts,
    due: Due,
    draft_requests: DraftRequests,
    /// Measured time of one row of a prompt, in microseconds; 0 before the first measurement.
    prefill_us: f64,
}

/// Counters of the batch since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BatchCounts {
    pub(crate) preemptions: u64,
    pub(crate) recoveries: u64,
    pub(crate) recomputed_tokens: u64,
    pub(crate) warm_up_tokens: u64,
    pub(crate) preempted_tokens: u64,
    /// Blocks lent to its sequences, moves left out.
    pub(crate) borrowed_blocks: u64,
    /// Waiting requests that were given back to a gateway.
    pub(crate) handed_back: u64,
    /// Sequences that were swapped out.
    pub(crate) offloads: u64,
    /// Tokens that were drafted, and those of them that were sampled.
    pub(crate) drafted_tokens: u64,
    pub(crate) accepted_tokens: u64,
}

/// Events of the batch.
#[derive(Debug)]
pub(crate) enum BatchEvent {
    /// A client's request.
    Submit {
        seq: SeqId,
        request: GenerateRequest,
    },
    Cancel(SeqId),
    /// The gManager's order to freeze a debt.
    Freeze(Freeze),
    Thaw {
        cycle: u64,
    },
    /// The rManager's reply to a borrow.
    Borrowed {
        seq: SeqId,
        leases: Vec<BorrowedLease>,
    },
    BorrowFailed {
        seq: SeqId,
        reason: BorrowFailure,
    },
    /// The rManager's reply to a search of cached blocks.
    PrefixFound {
        seq: SeqId,
        parts: Vec<CachedPart>,
    },
    /// A sequence that is in no step has lost KV.
    Lost(Lost),
    /// All sequences have lost their KV at a creditor.
    CreditorGone {
        creditor: InstanceId,
        why: &'static str,
    },
    /// The draft model's proposals.
    Drafted {
        draft: DraftId,
        seqs: Vec<Drafted>,
        failed: bool,
    },
    /// The device has mapped shared blocks, or failed to.
    Shared {
        share: ShareId,
        error: Option<DeviceError>,
    },
    /// An event of the prefix cache's disk tier.
    Disk(DiskEvent),
    /// The device has stored a layer of a block from a tier of the prefix cache.
    Stored(RemoteTag),
    /// The device failed a copy to or from such a tier.
    TierFailed {
        tag: RemoteTag,
        error: DeviceError,
    },
    /// The move of a sequence's blocks to host memory ended.
    SwappedOut {
        seq: SeqId,
        all: bool,
    },
    /// Steps may have ended: a victim that waited for its step is preempted.
    StepsEnded,
    /// Running sequences get the memory that they lack.
    Grow,
    /// Swapped-out sequences swap in and waiting ones are admitted, where there is memory.
    Admit,
    /// Time passes. `remote_waits_since_ms`: since when creditors of the remote micro-batch have not all answered.
    Tick {
        remote_waits_since_ms: Option<u64>,
    },
}

impl Batch {
    pub(crate) fn handle(&mut self, cx: &mut Cx, others: Others<'_>, event: BatchEvent) -> Outcomes {
        let prefills = others.prefills;
        match event {
            BatchEvent::Submit { seq, request } => {
                if let Err(error) = self.accept(cx, prefills, seq, request) {
                    cx.effects.push(Effect::Emit { seq, event: TokenEvent::Failed(error) });
                }
            }
            BatchEvent::Cancel(seq) => self.cancel(cx, prefills, seq),
            BatchEvent::Freeze(freeze) => self.on_freeze(cx, &freeze),
            BatchEvent::Thaw { cycle } => self.thaw_if(cx, prefills, |frozen| frozen.cycle == cycle),
            BatchEvent::Borrowed { seq, leases } => self.on_borrowed(cx, seq, &leases),
            BatchEvent::BorrowFailed { seq, reason } => self.on_borrow_failed(cx, prefills, seq, &reason),
            BatchEvent::PrefixFound { seq, parts } => self.on_prefix_found(cx, prefills, seq, parts),
            BatchEvent::Lost(lost) => self.lose(cx, prefills, lost),
            BatchEvent::CreditorGone { creditor, why } => self.lose_creditor(cx, creditor, why),
            BatchEvent::Drafted { draft, seqs, failed } => self.on_drafted(cx, draft, seqs, failed),
            BatchEvent::Shared { share, error } => self.on_shared(cx, others, share, error.as_ref()),
            BatchEvent::Disk(event) => Self::on_disk(cx, event),
            BatchEvent::Stored(tag) => Self::on_stored(cx, tag),
            BatchEvent::TierFailed { tag, error } => Self::on_tier_failed(cx, tag, &error),
            BatchEvent::SwappedOut { seq, all } => self.end_swap_out(cx, seq, all),
            BatchEvent::StepsEnded => {
                self.end_preempt_after_step(cx, prefills);
                self.go_on_loading(cx, others);
            }
            BatchEvent::Grow => self.grow(cx, others),
            BatchEvent::Admit => {
                self.swap_in(cx, prefills);
                self.admit(cx, prefills);
            }
            BatchEvent::Tick { remote_waits_since_ms } => {
                let now_ms = cx.now_ms;
                self.thaw_if(cx, prefills, |frozen| frozen.until_ms <= now_ms);
                if self.break_up(now_ms, remote_waits_since_ms) {
                    cx.emit(Outcome::BrokenUp);
                }
                self.expire_waiting(cx, prefills);
                Self::expire_loads(cx);
                self.hand_back(cx, prefills);
            }
        }
        cx.take_outcomes()
    }

    pub(crate) fn new(config: &InstanceConfig) -> Self {
        Self {
            sched: Scheduler::new(config.sched, config.remote_rows(), config.windowed.map(|of| of.warm_up)),
            seqs: BTreeMap::new(),
            micro: MicroBatches::default(),
            preempt_after_step: None,
            frozen: None,
            counts: BatchCounts::default(),
            due: Due::new(),
            draft_requests: DraftRequests::default(),
            prefill_us: 0.0,
        }
    }

    pub(crate) fn seq(&self, id: SeqId) -> Option<&Sequence> {
        self.seqs.get(&id)
    }

    /// Counters since the start.
    pub(crate) fn counts(&self) -> BatchCounts {
        self.counts
    }

    /// Makes the batch due: another machine changed an input of its decisions.
    pub(crate) fn touch(&mut self) {
        self.due.touch();
    }

    /// Makes the batch due at `at_ms`.
    pub(crate) fn wake_at(&mut self, at_ms: u64) {
        self.due.wake_at(at_ms);
    }

    /// Whether sequences may have to grow, swap in, be admitted or join a step. `pool_changes`: the pool's counter.
    pub(crate) fn is_due(&self, pool_changes: u64, now_ms: u64) -> bool {
        self.due.is_due(pool_changes, now_ms)
    }

    /// Starts a look at the batch: later changes count for the next one, which is due when a wait for the draft model ends.
    pub(crate) fn begin_look(&mut self, pool_changes: u64, now_ms: u64) {
        self.due.begin(pool_changes);
        self.wake_for_drafts(now_ms);
    }

    /// The sequence `id`.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn expect_seq(&self, id: SeqId) -> &Sequence {
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

    /// Adds a sequence that is queued, or whose prompt is computed by a prefill worker.
    pub(crate) fn add(&mut self, id: SeqId, seq: Sequence) {
        self.due.touch();
        self.seqs.insert(id, seq);
    }

    /// Removes and returns a sequence as it is: its memory is the caller's.
    pub(crate) fn take(&mut self, id: SeqId) -> Option<Sequence> {
        self.due.touch();
        self.sched.remove(id);
        let seq = self.seqs.remove(&id);
        seq.iter().for_each(|seq| self.end_drafts(seq));
        seq
    }

    /// Waiting sequences, in their turn.
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

    /// Queues a new sequence by its priority, if the queue has room, and adds it.
    pub(crate) fn enqueue(&mut self, id: SeqId, seq: Sequence, now_ms: u64) -> Result<(), QueueFull> {
        self.sched.enqueue(id, seq.len(), now_ms, seq.turn_ms())?;
        self.add(id, seq);
        Ok(())
    }

    /// Puts a sequence into the queue, beyond its bound if need be: its prompt is no longer a prefill
    /// worker's.
    pub(crate) fn compute_here(&mut self, id: SeqId, now_ms: u64) {
        self.due.touch();
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        seq.come_back();
        seq.admit_by_ms = now_ms + ADMISSION_DEADLINE_MS;
        self.sched.enqueue_accepted(id, seq.len(), now_ms, seq.turn_ms());
    }

    /// Takes a waiting sequence out of the queue: a prefill worker computes its prompt.
    pub(crate) fn send_away(&mut self, id: SeqId) {
        self.sched.remove(id);
        self.due.touch();
        self.seqs.entry(id).and_modify(Sequence::go_away);
    }

    /// Takes a sequence that has ended and whose memory is frozen out of the batch; it stays until the thaw.
    pub(crate) fn keep_frozen(&mut self, id: SeqId) {
        self.sched.remove(id);
        self.set_life(id, Life::Frozen);
    }

    /// Whether a sequence has ended and waits for the thaw of its memory.
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

    /// Moves a waiting sequence into the batch. Its first `computed` tokens have KV.
    fn start(&mut self, id: SeqId, micro_batch: MicroBatch, computed: u32, now_ms: u64) {
        self.sched.admit(id, micro_batch, computed);
        if let Some(seq) = self.seqs.get(&id).filter(|seq| !seq.blocks.lost().is_empty()) {
            self.sched.set_lost(id, seq.blocks.lost());
        }
        self.load_ring(id);
        self.seqs.entry(id).and_modify(|seq| _ = seq.began_ms.get_or_insert(now_ms));
        self.set_life(id, Life::Running(Need::Met));
        self.micro.changed();
    }

    /// Puts a running sequence that is in no step at the front of the queue, to be recomputed.
    fn requeue(&mut self, id: SeqId, now_ms: u64) {
        self.sched.preempt(id, now_ms);
        self.set_life(id, Life::Waiting(Need::Met));
    }

    /// Resumes a sequence that has its memory and whose first tokens were computed by another instance: it joins the batch, or
    /// the queue if the batch is full, and keeps its memory there.
    pub(crate) fn resume(&mut self, cx: &Cx, id: SeqId) {
        let micro_batch = self.micro_batch_of(id);
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let (tokens, computed) = (seq.len(), seq.blocks.written());
        if policy::free_places(self.sched.running_len(), cx.config.sched.running) > 0 {
            self.sched.resume(id, micro_batch, tokens, computed);
            self.load_ring(id);
            self.set_life(id, Life::Running(Need::Met));
        } else {
            seq.admit_by_ms = cx.now_ms + ADMISSION_DEADLINE_MS;
            self.sched.enqueue_accepted(id, tokens, cx.now_ms, seq.turn_ms());
            self.set_life(id, Life::Waiting(Need::Met));
        }
        self.changed();
    }

    /// Moves a running sequence to another micro-batch, from its next step on.
    pub(crate) fn set_micro_batch(&mut self, id: SeqId, micro_batch: MicroBatch) {
        self.due.touch();
        self.sched.set_micro_batch(id, micro_batch);
    }

    /// Marks the division into micro-batches stale: sequences came, went, moved or advanced.
    pub(crate) fn changed(&mut self) {
        self.due.touch();
        self.micro.changed();
    }

    /// Adds a decode step's time from queries to last partials, in milliseconds, summed over layers, to the mean.
    pub(crate) fn remote_took(&mut self, ms: u64) {
        self.micro.remote_took(ms);
    }

    /// Plans the next step of a micro-batch from its sequences that are ready.
    pub(crate) fn plan(&mut self, cx: &mut Cx, micro_batch: MicroBatch) -> StepPlan {
        self.sched.limit_chunks(self.chunk_rows(cx, micro_batch, None));
        let seqs = &self.seqs;
        let mut plan = self.sched.plan(micro_batch, |seq| seqs.get(&seq).is_some_and(Sequence::is_ready));
        self.add_drafts(cx, &mut plan, micro_batch);
        plan
    }

    /// Completes a planned chunk. With `sampled`, the sequence has one token more, and its accepted drafts.
    pub(crate) fn complete(&mut self, chunk: &Chunk, sampled: bool) {
        self.due.touch();
        self.sched.complete(chunk, sampled);
    }

    /// Completes a chunk that filled a ring again; the sequence may be ending.
    pub(crate) fn warmed_up(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, chunk: &Chunk) {
        if !self.has(chunk.seq) {
            return;
        }
        self.free_loaded(cx, chunk.seq);
        self.counts.warm_up_tokens += u64::from(chunk.len);
        self.complete(chunk, false);
        if self.seq(chunk.seq).is_some_and(Sequence::is_ending) {
            self.remove(cx, prefills, chunk.seq);
        }
    }

    /// Drops a planned chunk that was not computed: the sequence leaves its step unchanged.
    pub(crate) fn abandon(&mut self, id: SeqId) {
        self.due.touch();
        self.sched.abandon(id);
    }
}
