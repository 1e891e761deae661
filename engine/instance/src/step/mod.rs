//! Steps of this instance as debtor: from a plan to work for the runner, and what travels while it runs.

mod build;
pub(crate) mod cost;
pub(crate) mod mapped;

use crate::creditor::CreditorEvent;
use crate::event::Effect;
use crate::instance::Instance;
use build::{Builder, Built};
use bytes::Bytes;
use cost::{CostModel, LinkCost, OwnCost, RemotePolicy};
use lagoon_backend::{DeviceError, LaunchCounters};
use lagoon_protocol::{BulkFrame, PartialsFrame, RefuseCode, StepTicket};
use lagoon_runner::{Command, Fetch, PassError, RemotePart, SampleOut, SampleSpec, WriteSegment};
use lagoon_types::run::visible;
use lagoon_types::{
    Chunk, InstanceId, LeaseId, LeaseRun, MicroBatch, RequestError, SeqId, StepId, StepPlan, TokenEvent,
};
use mapped::Mapped;
use std::collections::{BTreeMap, BTreeSet};

/// A step that the runner works on.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) step: StepId,
    chunks: Vec<Chunk>,
    /// Creditors that have a ticket.
    creditors: Vec<InstanceId>,
    fetches: Vec<Fetch>,
    /// Creditors that have a layer's queries and have not answered yet.
    pub(crate) unanswered: BTreeSet<InstanceId>,
    /// With the sequence that each belongs to.
    writes: Vec<(SeqId, WriteSegment)>,
    /// Without progress until then, the step fails. Only steps with creditors have one.
    deadline_ms: Option<u64>,
    /// When the last queries left, and how long the answers to earlier ones took in sum.
    asked_ms: u64,
    remote_ms: u64,
    started_ms: u64,
    /// Estimated time of remote requests until it started.
    remote_requests_us: f64,
}

/// Steps of this instance as debtor.
#[derive(Debug)]
pub(crate) struct Steps {
    flights: [Option<InFlight>; 2],
    /// Reads in flight: step, layer and index of the fetch.
    reads: BTreeMap<u64, (StepId, u32, usize)>,
    next_step: u64,
    next_read: u64,
    /// The device's last report of how steps were launched.
    pub(crate) launches: Option<LaunchCounters>,
    pub(crate) mapped: Mapped,
}

impl Steps {
    pub(crate) fn new() -> Self {
        Self {
            flights: [None, None],
            reads: BTreeMap::new(),
            next_step: 0,
            next_read: 0,
            launches: None,
            mapped: Mapped::default(),
        }
    }

    /// A number for a read at a creditor; steps and moves share them.
    pub(crate) fn next_read(&mut self) -> u64 {
        self.next_read += 1;
        self.next_read
    }

    /// Whether the runner works on a step.
    pub(crate) fn is_busy(&self) -> bool {
        self.flights.iter().any(Option::is_some)
    }

    /// The step of a micro-batch.
    pub(crate) fn flight_in(&self, micro_batch: MicroBatch) -> Option<&InFlight> {
        self.flights[micro_batch.index()].as_ref()
    }

    /// Since when creditors of a micro-batch's step have a layer's queries and have not all answered.
    pub(crate) fn waits_since(&self, micro_batch: MicroBatch) -> Option<u64> {
        self.flight_in(micro_batch).and_then(InFlight::waits_since)
    }

    /// Whether a layer's queries are out.
    pub(crate) fn expects_partials(&self) -> bool {
        self.flights.iter().flatten().any(|f| !f.unanswered.is_empty())
    }
}

impl InFlight {
    /// Every sequence of it generates a token.
    pub(crate) fn decodes(&self) -> bool {
        self.chunks.iter().all(|c| c.len == 1 && c.last)
    }

    /// Since when creditors have a layer's queries and have not all answered.
    pub(crate) fn waits_since(&self) -> Option<u64> {
        (!self.unanswered.is_empty()).then_some(self.asked_ms)
    }
}

impl Instance {
    /// What shipping and fetching cost towards a creditor, by what was measured.
    fn cost_model(&self, creditor: InstanceId) -> CostModel {
        let config = &self.cx.config;
        let known = self.cx.peers.key(creditor).and_then(|peer| self.cx.peers.known(peer));
        let (rtt_us, bytes_per_s) = known.map_or((0, 0), |k| (k.rtt_us, k.bytes_per_s));
        CostModel {
            geometry: config.geometry,
            kv: config.kv,
            wire: config.wire,
            link: LinkCost::measured(rtt_us, bytes_per_s, config.link_bytes_per_s),
            own: OwnCost::measured(config.calibration.as_ref(), &config.geometry, &config.kv, config.attention_flops),
        }
    }

    fn fetches(&self, creditor: InstanceId, rows: u32, keys: u32) -> bool {
        match self.cx.config.remote {
            _ if self.cx.config.fetch_tokens == 0 => false,
            RemotePolicy::Ship => false,
            RemotePolicy::Fetch => true,
            RemotePolicy::Auto => self.cost_model(creditor).prefers_fetch(rows, keys),
        }
    }

    /// Plans and starts the next step of a micro-batch that is idle.
    pub(crate) fn start_micro_batch(&mut self, micro_batch: MicroBatch) {
        if self.step.flights[micro_batch.index()].is_some() {
            return;
        }
        let plan = self.batch.plan(micro_batch);
        if plan.chunks.is_empty() {
            return;
        }
        self.step.next_step += 1;
        let step = StepId(self.step.next_step);
        let (mut work, tickets, writes) = self.build(step, micro_batch, &plan);
        work.watched = self.watch(&plan.chunks);
        self.step.mapped.count(&work.remote);
        let mut creditors = Vec::with_capacity(tickets.len());
        for (creditor, seqs) in tickets {
            if let Some(peer) = self.cx.peers.key(creditor) {
                let deadline_ms = u32::try_from(self.cx.step_deadline_ms).unwrap_or(u32::MAX);
                let ticket = StepTicket { step, deadline_ms, dtype: self.cx.config.wire, seqs };
                self.cx.effects.push(Effect::Partials { peer, frame: PartialsFrame::Ticket(ticket) });
            }
            creditors.push(creditor);
        }
        let remote = micro_batch == MicroBatch::Remote;
        self.step.flights[micro_batch.index()] = Some(InFlight {
            step,
            chunks: plan.chunks,
            creditors,
            fetches: work.remote.fetches.clone(),
            unanswered: BTreeSet::new(),
            writes,
            deadline_ms: remote.then_some(self.cx.now_ms + self.cx.step_deadline_ms),
            asked_ms: self.cx.now_ms,
            remote_ms: 0,
            started_ms: self.cx.now_ms,
            remote_requests_us: self.creditor.remote_requests_us(),
        });
        self.cx.release_freed();
        self.cx.effects.push(Effect::Runner(Command::Step(Box::new(work))));
        self.request_fetches(step, 0);
    }

    /// Turns a plan into work, the tickets of its creditors and the owners of its writes.
    fn build(&self, step: StepId, micro_batch: MicroBatch, plan: &StepPlan) -> Built {
        let mut builder = Builder::new(step, micro_batch, self.cx.config.wire);
        builder.work.next_row = self.cx.memory.rm.pool().next_row().map(|block| block.0 * self.cx.config.block_tokens);
        for chunk in &plan.chunks {
            let seq = self.batch.known(chunk.seq);
            let end = chunk.start + chunk.len;
            let span = chunk.start as usize..end as usize;
            let sample = chunk.last.then(|| SampleSpec {
                params: seq.sampling.clone(),
                index: self.sampled_before(chunk.seq).unwrap_or_else(|| u64::from(seq.generated())),
                return_logits: seq.return_logits,
            });
            let window_start = visible(chunk.start, self.cx.config.window).start;
            let mut segments = Vec::new();
            seq.blocks.segments(chunk.start..end, &mut segments);
            builder.rows(chunk, &seq.tokens[span], &segments);
            let run0 = builder.work.runs.len();
            seq.blocks.local_runs(end, window_start, &mut builder.work.runs);
            builder.seq(chunk, run0, sample);
            for (creditor, runs) in seq.blocks.remote_runs(chunk.start, window_start) {
                let runs = match self.step.mapped.mapped_runs(&self.cx, creditor, &runs) {
                    Some((map, found)) => builder.reach(creditor, map, chunk, found),
                    None => runs,
                };
                if runs.is_empty() {
                    continue;
                }
                let keys = runs.iter().map(|r| r.len).sum();
                if self.fetches(creditor, chunk.len, keys) {
                    builder.fetch(creditor, &runs, self.cx.config.fetch_tokens);
                } else {
                    builder.ship(creditor, chunk, runs);
                }
            }
        }
        builder.finish()
    }

    /// Asks for the KV that a layer fetches.
    fn request_fetches(&mut self, step: StepId, layer: u32) {
        if layer >= self.cx.config.kv.layers {
            return;
        }
        let Some(flight) = self.step.flights.iter().flatten().find(|f| f.step == step) else { return };
        for (index, fetch) in flight.fetches.iter().enumerate() {
            let Some(peer) = self.cx.peers.key(fetch.creditor) else { continue };
            self.step.next_read += 1;
            let read = self.step.next_read;
            let LeaseRun { lease, epoch, offset, len, .. } = fetch.run;
            self.step.reads.insert(read, (step, layer, index));
            let frame = BulkFrame::Read {
                id: read,
                lease,
                epoch,
                layer,
                offset,
                tokens: len,
                deadline_ms: u32::try_from(self.cx.step_deadline_ms).unwrap_or(u32::MAX),
            };
            self.cx.effects.push(Effect::Bulk { peer, frame });
        }
    }

    fn flight(&mut self, step: StepId) -> Option<&mut InFlight> {
        self.step.flights.iter_mut().flatten().find(|f| f.step == step)
    }

    /// The runner has a layer's queries: they go out, and the next layer's KV is asked for.
    pub(crate) fn on_queries(&mut self, step: StepId, layer: u32, frames: Vec<(InstanceId, u32, Bytes)>) {
        let (now, deadline) = (self.cx.now_ms, self.cx.now_ms + self.cx.step_deadline_ms);
        let Some(flight) = self.flight(step) else { return };
        (flight.deadline_ms, flight.asked_ms) = (Some(deadline), now);
        flight.unanswered = frames.iter().map(|(creditor, ..)| *creditor).collect();
        for (creditor, rows, queries) in frames {
            if let Some(peer) = self.cx.peers.key(creditor) {
                let frame = PartialsFrame::Query { step, layer, rows, queries };
                self.cx.effects.push(Effect::Partials { peer, frame });
            }
        }
        self.request_fetches(step, layer + 1);
    }

    /// A step has filled another layer of what it computes.
    pub(crate) fn on_layer(&mut self, step: StepId, layer: u32) {
        let flight = self.step.flights.iter().flatten().find(|f| f.step == step);
        let seqs: Vec<SeqId> = flight.iter().flat_map(|f| &f.chunks).map(|chunk| chunk.seq).collect();
        seqs.into_iter().for_each(|seq| self.on_layers(seq, layer + 1));
    }

    /// The runner has a layer's KV for creditors. A range that was sent before (by a step that was aborted) is not
    /// sent again: the creditor has it.
    pub(crate) fn on_written(&mut self, step: StepId, layer: u32, kv: Vec<Bytes>) {
        let token_bytes = self.cx.config.kv.layer_token_bytes();
        let Some(flight) = self.step.flights.iter().flatten().find(|f| f.step == step) else { return };
        for ((seq, write), kv) in flight.writes.iter().zip(kv) {
            let Some(held) = self.batch.seq_mut(*seq).and_then(|s| s.leases.get_mut(&(write.creditor, write.lease)))
            else {
                continue;
            };
            let Some(hasher) = &mut held.hasher else { continue };
            let skip = hasher.written(layer as usize).saturating_sub(write.offset).min(write.rows);
            let (offset, tokens) = (write.offset + skip, write.rows - skip);
            let Some(peer) = self.cx.peers.key(write.creditor).filter(|_| tokens > 0) else { continue };
            let kv = kv.slice(skip as usize * token_bytes..);
            let mut complete = Vec::new();
            hasher.write(layer as usize, &kv, &mut complete);
            held.hashes.extend(complete.iter().copied());
            let &WriteSegment { lease, epoch, .. } = write;
            self.cx
                .effects
                .push(Effect::Bulk { peer, frame: BulkFrame::Write { lease, epoch, layer, offset, tokens, kv } });
            for (entry, hash) in complete {
                self.cx.effects.push(Effect::Bulk { peer, frame: BulkFrame::Seal { lease, epoch, entry, hash } });
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one frame")]
    pub(crate) fn on_partial(
        &mut self,
        creditor: InstanceId,
        step: StepId,
        layer: u32,
        _rows: u32,
        out: Bytes,
        lse: Bytes,
        count: Bytes,
    ) {
        let now = self.cx.now_ms;
        if let Some(flight) = self.flight(step).filter(|f| f.creditors.contains(&creditor)) {
            if flight.unanswered.remove(&creditor) && flight.unanswered.is_empty() {
                flight.remote_ms += now - flight.asked_ms;
            }
            let part = RemotePart { creditor, out, lse, count };
            self.cx.effects.push(Effect::Runner(Command::Part { step, layer, part }));
        }
    }

    pub(crate) fn on_fetched(&mut self, id: u64, layer: u32, kv: Bytes) {
        let Some((step, wanted, index)) = self.step.reads.remove(&id) else { return };
        if wanted == layer {
            self.cx.effects.push(Effect::Runner(Command::Fetched { step, layer, index, kv }));
        }
    }

    /// A creditor refuses a step: its sequences' KV there counts as lost.
    pub(crate) fn on_step_refused(&mut self, creditor: InstanceId, step: StepId, code: RefuseCode, detail: &str) {
        if self.flight(step).is_some() {
            self.fail_step(
                step,
                &BTreeSet::from([creditor]),
                &format!("{creditor} refused the step: {code:?}, {detail}"),
            );
        }
    }

    /// A creditor refuses KV: the lease is of no use any more.
    pub(crate) fn on_bulk_refused(
        &mut self,
        creditor: InstanceId,
        id: u64,
        lease: LeaseId,
        code: RefuseCode,
        detail: &str,
    ) {
        if id != 0 {
            let moved = self.moves.reads(id);
            if moved {
                self.on_move_refused(id, code);
            }
            // Nobody waits for it any more; or its source is in trouble, but has the KV.
            let passing = matches!(code, RefuseCode::Deadline | RefuseCode::Overloaded);
            if (!moved && self.step.reads.remove(&id).is_none()) || (moved && passing) {
                return;
            }
        } else if self.on_move_write_refused(creditor, lease, code)
            && !matches!(code, RefuseCode::UnknownLease | RefuseCode::StaleEpoch | RefuseCode::Device)
        {
            return;
        }
        self.lose_lease(creditor, lease, &format!("a creditor refused KV: {code:?}, {detail}"));
    }

    /// What a lease held is gone, whoever has it here.
    fn lose_lease(&mut self, creditor: InstanceId, lease: LeaseId, why: &str) {
        let holder = self.batch.seqs().find(|s| s.leases.contains_key(&(creditor, lease))).map(|s| s.id);
        if let Some(seq) = holder {
            self.lose(seq, creditor, Some(lease), why);
        }
    }

    /// A creditor has given memory to somebody else that a step attended to: that lease is lost, and the others of the step are
    /// planned again as they were.
    fn on_reused(&mut self, creditor: InstanceId, lease: LeaseId, why: &str) {
        self.step.mapped.note_reused();
        self.lose_lease(creditor, lease, why);
    }

    /// The runner is done with a step.
    pub(crate) fn on_done(&mut self, step: StepId, micro_batch: MicroBatch, samples: Vec<SampleOut>) {
        let Some(flight) = self.step.flights[micro_batch.index()].take_if(|f| f.step == step) else { return };
        if micro_batch == MicroBatch::Local && flight.chunks.iter().all(|chunk| chunk.len == 1) {
            let ms = self.cx.now_ms - flight.started_ms;
            self.creditor(CreditorEvent::OwnStep { ms, remote_requests_us: flight.remote_requests_us });
        }
        let growing = flight.chunks.iter().filter(|c| c.len == 1).count();
        let prompt_rows = flight.chunks.iter().filter(|c| c.len > 1).map(|c| c.len).sum();
        self.moves.pace.on_step(as_u32(growing), prompt_rows, self.cx.now_ms - flight.started_ms);
        if micro_batch == MicroBatch::Remote
            && !flight.creditors.is_empty()
            && flight.fetches.is_empty()
            && flight.decodes()
        {
            self.batch.remote_took(flight.remote_ms);
        }
        self.batch.changed();
        if growing == 0 {
            self.prompt_step_took(self.cx.now_ms - flight.started_ms, prompt_rows);
        }
        let mut samples = samples.into_iter();
        for chunk in &flight.chunks {
            let Some(seq) = self.batch.seq_mut(chunk.seq) else { continue };
            let again = chunk.start < seq.blocks.written();
            let advance = seq.blocks.write(chunk.start, chunk.len);
            self.batch.counts.recomputed_tokens += if again { u64::from(chunk.len) } else { 0 };
            self.cx.memory.rm.mark_written(&advance);
            self.batch.complete(chunk, chunk.last);
            self.name_blocks(chunk.seq);
            let Some(seq) = self.batch.seq_mut(chunk.seq) else { continue };
            let sample = if chunk.last { samples.next() } else { None };
            if seq.is_ending() {
                self.remove(chunk.seq);
                continue;
            }
            assert!(sample.as_ref().is_none_or(|s| s.seq == chunk.seq), "samples come in the order of the plan");
            if self.prefill.is_job(chunk.seq) {
                self.on_chunk(chunk.seq);
                sample.into_iter().for_each(|sample| self.prefilled(chunk.seq, &sample));
                continue;
            }
            let Some(sample) = sample else { continue };
            let end = seq.push(sample.token, self.cx.config.max_positions);
            let event = TokenEvent::Token { id: sample.token, logprobs: sample.logprobs, logits: sample.logits };
            self.cx.effects.push(Effect::Emit { seq: chunk.seq, event });
            if let Some(reason) = end {
                self.finish(chunk.seq, reason);
            }
        }
    }

    /// The runner could not finish a step: its device or a peer's answer is at fault.
    pub(crate) fn on_step_failed(&mut self, step: StepId, micro_batch: MicroBatch, error: &PassError) {
        let Some(flight) = self.step.flights[micro_batch.index()].take_if(|f| f.step == step) else { return };
        self.cancel_tickets(&flight);
        self.leave(&flight);
        match error {
            PassError::Device(DeviceError::OutOfMemory { .. }) => self.on_device_full(&flight),
            // Nobody knows what such a device did to its memory.
            PassError::Device(_) => self.cx.memory.rm.drop_kept(),
            PassError::Reused { creditor, lease } => self.on_reused(*creditor, *lease, &error.to_string()),
            _ => {}
        }
        for chunk in &flight.chunks {
            match error {
                _ if !self.batch.has(chunk.seq) => {}
                PassError::Part { creditor, .. } => self.lose(chunk.seq, *creditor, None, &error.to_string()),
                PassError::Device(DeviceError::OutOfMemory { .. }) | PassError::Reused { .. } => {}
                PassError::Device(_) => self.fail(chunk.seq, RequestError::Unavailable(error.to_string())),
                PassError::Coverage { .. } | PassError::Sampling(_) => {
                    self.fail(chunk.seq, RequestError::Internal(error.to_string()));
                }
            }
        }
    }

    /// The device found no memory for a step although blocks were free: the youngest of its sequences yields and is
    /// computed again, the others try again.
    fn on_device_full(&mut self, flight: &InFlight) {
        let known = |chunk: &&Chunk| self.batch.has(chunk.seq) && self.batch.is_running(chunk.seq);
        let Some(youngest) = flight.chunks.iter().rev().find(known).map(|chunk| chunk.seq) else { return };
        self.preempt(youngest);
        self.batch.counts.preemptions += 1;
        self.retry_later(youngest);
    }

    fn cancel_tickets(&mut self, flight: &InFlight) {
        for creditor in &flight.creditors {
            if let Some(peer) = self.cx.peers.key(*creditor) {
                let frame = PartialsFrame::StepCancel { step: flight.step };
                self.cx.effects.push(Effect::Partials { peer, frame });
            }
        }
        self.step.reads.retain(|_, (step, _, _)| *step != flight.step);
    }

    /// Ends the step that a sequence is in; all its sequences leave it as they were. The runner forgets the step before
    /// it sees any later command, so their memory may be given away at once.
    pub(crate) fn abort_micro_batch_of(&mut self, seq: SeqId) {
        let holds = |f: &InFlight| f.chunks.iter().any(|c| c.seq == seq);
        for micro_batch in MicroBatch::ALL {
            if self.step.flights[micro_batch.index()].as_ref().is_some_and(holds) {
                self.abort_micro_batch(micro_batch);
            }
        }
    }

    /// Ends the step of a micro-batch, if there is one.
    pub(crate) fn abort_micro_batch(&mut self, micro_batch: MicroBatch) {
        if let Some(flight) = self.step.flights[micro_batch.index()].take() {
            self.cx.effects.push(Effect::Runner(Command::Abort { step: flight.step }));
            self.cancel_tickets(&flight);
            self.leave(&flight);
        }
    }

    /// The sequences of a step that is not finished leave it as they were; the cancelled ones end.
    fn leave(&mut self, flight: &InFlight) {
        for chunk in &flight.chunks {
            self.batch.abandon(chunk.seq);
            if self.batch.seq(chunk.seq).is_some_and(|s| s.is_ending()) {
                self.remove(chunk.seq);
            }
            self.on_chunk_left(chunk.seq);
        }
    }

    /// Aborts a step; what its sequences have at `creditors` counts as lost.
    fn fail_step(&mut self, step: StepId, creditors: &BTreeSet<InstanceId>, why: &str) {
        let Some(flight) = self.step.flights.iter().flatten().find(|f| f.step == step) else { return };
        let chunks = flight.chunks.clone();
        if let Some(first) = chunks.first() {
            self.abort_micro_batch_of(first.seq);
        }
        for chunk in chunks {
            creditors.iter().for_each(|creditor| self.lose(chunk.seq, *creditor, None, why));
        }
    }

    /// Fails steps whose creditors do not answer. One that waits for this instance's own device only is not late.
    pub(crate) fn expire_steps(&mut self) {
        let (now, timeout_ms) = (self.cx.now_ms, self.cx.step_deadline_ms);
        let mut late = Vec::new();
        for flight in self.step.flights.iter_mut().flatten().filter(|f| f.deadline_ms.is_some_and(|at| at <= now)) {
            let reads = self.step.reads.values().filter(|(step, _, _)| *step == flight.step);
            let mut missing: BTreeSet<InstanceId> =
                reads.filter_map(|(_, _, index)| flight.fetches.get(*index).map(|f| f.creditor)).collect();
            missing.extend(&flight.unanswered);
            if missing.is_empty() {
                flight.deadline_ms = Some(now + timeout_ms);
            } else {
                late.push((flight.step, missing));
            }
        }
        for (step, missing) in late {
            self.fail_step(step, &missing, &format!("a step made no progress for {timeout_ms} ms"));
        }
    }
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
