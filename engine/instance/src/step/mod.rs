//! Steps of this instance as debtor: from a plan to work for the runner, and frames to and from creditors while it
//! runs.

mod build;
mod flight;
mod joint;
pub(crate) mod mapped;
pub(crate) mod relays;
#[cfg(test)]
mod tests;

use crate::batch::changes::Written;
use crate::batch::others::PrefillQueries;
use crate::batch::{Batch, Others};
use crate::config::RemotePolicy;
use crate::cost::CostModel;
use crate::cx::Cx;
use crate::cx::tags::{ReadId, ReadOwner};
use crate::event::Effect;
use crate::outcome::{FirstToken, Lost, LostPart, Outcome, Outcomes};
use build::{Builder, Built};
use bytes::Bytes;
pub(crate) use flight::InFlight;
use lagoon_backend::{DeviceError, LaunchCounters};
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_protocol::{BulkFrame, LentMemory, PartialsFrame, RefuseCode, StepTicket};
use lagoon_runner::sampling::SampleError;
use lagoon_runner::{
    Command, Fetch, HiddenSum, MapId, PassError, RemotePart, SampleOut, SampleSpec, SeqRows, WriteSegment,
};
use lagoon_types::run::visible;
use lagoon_types::{
    Chunk, FinishReason, InstanceId, LeaseId, LeaseRun, MicroBatch, PromptLogprob, RequestError, SeqId, StepId,
    StepPlan, TokenEvent,
};
use mapped::Mapped;
use relays::{Group, Relays};
use std::collections::{BTreeMap, BTreeSet};

/// Steps in flight of this instance as debtor, by micro-batch.
#[derive(Debug)]
pub(crate) struct Steps {
    flights: [Option<InFlight>; 2],
    /// Reads in flight: step, layer and index of the fetch.
    reads: BTreeMap<ReadId, (StepId, u32, usize)>,
    next_step: u64,
    /// The device's last launch counters.
    launches: Option<LaunchCounters>,
    mapped: Mapped,
    relays: Relays,
}

/// Events of own steps.
#[derive(Debug)]
pub(crate) enum StepEvent {
    /// An idle micro-batch may start a step. `remote_requests_us`: estimated time of remote requests so far.
    Start {
        micro_batch: MicroBatch,
        remote_requests_us: f64,
    },
    /// From the runner: see [`lagoon_runner::Report`].
    Queries {
        step: StepId,
        layer: u32,
        frames: Vec<(InstanceId, u32, Bytes)>,
    },
    Written {
        step: StepId,
        layer: u32,
        kv: Vec<Bytes>,
    },
    Layer {
        step: StepId,
        layer: u32,
    },
    Appended {
        step: StepId,
        layer: u32,
    },
    Done {
        step: StepId,
        micro_batch: MicroBatch,
        samples: Vec<SampleOut>,
    },
    /// Log-probabilities of prompts' tokens, by sequence, from a position on, and sums of hidden states.
    Prompts {
        step: StepId,
        scores: Vec<(SeqId, u32, Vec<PromptLogprob>)>,
        sums: Vec<HiddenSum>,
    },
    Failed {
        step: StepId,
        micro_batch: MicroBatch,
        error: PassError,
    },
    Launches(LaunchCounters),
    Mapped {
        map: MapId,
        mapped: bool,
    },
    /// A creditor's partial of a layer, or its refusal of the step.
    Partial {
        step: StepId,
        layer: u32,
        part: RemotePart,
    },
    Refused {
        creditor: InstanceId,
        step: StepId,
        code: RefuseCode,
        detail: String,
    },
    /// KV that a step fetches from a creditor, or the creditor's refusal.
    Fetched {
        read: ReadId,
        layer: u32,
        kv: Bytes,
    },
    FetchRefused {
        read: ReadId,
        code: RefuseCode,
        detail: String,
    },
    /// A creditor's Hello: the memory that it lets others map, if any.
    PeerUp {
        creditor: InstanceId,
        lent: Option<LentMemory>,
    },
    /// The connection to a creditor was lost; steps that attend to its mapped memory have ended.
    PeerGone(InstanceId),
    /// Aborts the step that a sequence is in; its other sequences leave it, too.
    Leave(SeqId),
    /// Aborts the step of a micro-batch.
    Abort(MicroBatch),
    Tick,
}

impl Steps {
    pub(crate) fn handle(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, event: StepEvent) -> Outcomes {
        let prefills = others.prefills;
        match event {
            StepEvent::Start { micro_batch, remote_requests_us } => {
                self.start_micro_batch(cx, batch, prefills, micro_batch, remote_requests_us);
            }
            StepEvent::Queries { step, layer, frames } => self.on_queries(cx, step, layer, frames),
            StepEvent::Written { step, layer, kv } => self.on_written(cx, batch, step, layer, kv),
            StepEvent::Layer { step, layer } => self.on_layer(cx, step, layer),
            StepEvent::Appended { step, layer } => self.on_appended(cx, batch, step, layer),
            StepEvent::Prompts { step, scores, sums } => {
                if self.flight(step).is_some() {
                    sums.into_iter().for_each(|sum| batch.add_hidden(sum));
                    scores.into_iter().for_each(|(seq, first, scores)| batch.add_scores(seq, first, scores));
                }
            }
            StepEvent::Done { step, micro_batch, samples } => {
                self.on_done(cx, batch, others, step, micro_batch, samples);
            }
            StepEvent::Failed { step, micro_batch, error } => {
                self.on_step_failed(cx, batch, prefills, step, micro_batch, &error);
            }
            StepEvent::Launches(counters) => self.launches = Some(counters),
            StepEvent::Mapped { map, mapped } => self.mapped.on_mapped(cx, map, mapped),
            StepEvent::Partial { step, layer, part } => self.on_partial(cx, step, layer, part),
            StepEvent::Refused { creditor, step, code, detail } => {
                self.on_refused(cx, batch, prefills, (creditor, step), (code, &detail));
            }
            StepEvent::Fetched { read, layer, kv } => self.on_fetched(cx, batch, read, layer, kv),
            StepEvent::FetchRefused { read, code, detail } => {
                // Otherwise nobody waits for it any more.
                if let Some((step, _, index)) = self.reads.remove(&read) {
                    let why = format!("a creditor refused KV: {code:?}, {detail}");
                    self.lose_fetch(cx, batch, (step, index), why);
                }
            }
            StepEvent::PeerUp { creditor, lent } => self.mapped.on_lent_memory(cx, creditor, lent.as_ref()),
            StepEvent::PeerGone(creditor) => self.mapped.unmap(cx, creditor),
            StepEvent::Leave(seq) => self.abort_micro_batch_of(cx, batch, prefills, seq),
            StepEvent::Abort(micro_batch) => self.abort_micro_batch(cx, batch, prefills, micro_batch),
            StepEvent::Tick => self.expire_steps(cx, batch, prefills),
        }
        cx.take_outcomes()
    }

    /// The device's last launch counters.
    pub(crate) fn launches(&self) -> Option<LaunchCounters> {
        self.launches
    }

    /// Creditor KV that is mapped here.
    pub(crate) fn mapped(&self) -> &Mapped {
        &self.mapped
    }

    /// Groups of creditors on other nodes.
    pub(crate) fn relays(&self) -> &Relays {
        &self.relays
    }

    pub(crate) fn new() -> Self {
        Self {
            flights: [None, None],
            reads: BTreeMap::new(),
            next_step: 0,
            launches: None,
            mapped: Mapped::default(),
            relays: Relays::default(),
        }
    }

    /// Whether a step is on the runner.
    pub(crate) fn is_busy(&self) -> bool {
        self.flights.iter().any(Option::is_some)
    }

    /// The step in flight of a micro-batch.
    pub(crate) fn flight_in(&self, micro_batch: MicroBatch) -> Option<&InFlight> {
        self.flights[micro_batch.index()].as_ref()
    }

    /// Since when creditors of a micro-batch's step have a layer's queries and have not all answered.
    pub(crate) fn waits_since(&self, micro_batch: MicroBatch) -> Option<u64> {
        self.flight_in(micro_batch).and_then(InFlight::waits_since)
    }

    /// Whether partials are due: creditors have a layer's queries.
    pub(crate) fn expects_partials(&self) -> bool {
        self.flights.iter().flatten().any(|f| !f.unanswered.is_empty())
    }
}

impl Steps {
    /// Plans and starts the next step of a micro-batch that is idle.
    fn start_micro_batch(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        prefills: &dyn PrefillQueries,
        micro_batch: MicroBatch,
        remote_requests_us: f64,
    ) {
        if self.flights[micro_batch.index()].is_some() || batch.awaits_drafts(micro_batch, cx.now_ms) {
            return;
        }
        let plan = batch.plan(cx, micro_batch);
        if plan.chunks.is_empty() {
            return;
        }
        batch.save_windows(cx, &plan);
        self.next_step += 1;
        let step = StepId(self.next_step);
        let (mut work, tickets, writes) = self.build(cx, batch, step, micro_batch, &plan);
        let watched = |chunk: &&Chunk| prefills.is_pushed(chunk.seq) && !chunk.warms_up();
        work.watched = plan.chunks.iter().any(|chunk| watched(&chunk));
        if work.watched {
            cx.emit(Outcome::Watched { chunks: plan.chunks.iter().filter(|c| !c.warms_up()).copied().collect() });
        }
        work.announced = joint::announce(cx, batch, &plan);
        let groups = if work.announced { Vec::new() } else { self.relays.group(cx, &mut work.remote.ships, &tickets) };
        self.mapped.count(&work.remote);
        let mut creditors = Vec::with_capacity(tickets.len());
        for (creditor, seqs) in tickets {
            if let Some(peer) = cx.peers.key(creditor) {
                let deadline_ms = u32::try_from(cx.step_deadline_ms).unwrap_or(u32::MAX);
                let ticket = StepTicket {
                    step,
                    deadline_ms,
                    dtype: cx.config.wire,
                    route: Group::route(&groups, creditor),
                    seqs,
                };
                cx.effects.push(Effect::Partials { peer, frame: PartialsFrame::Ticket(ticket) });
            }
            creditors.push(creditor);
        }
        let remote = micro_batch == MicroBatch::Remote;
        self.flights[micro_batch.index()] = Some(InFlight {
            step,
            chunks: plan.chunks,
            samples: work.seqs.iter().map(samples_of).collect(),
            open: creditors.iter().copied().collect(),
            creditors,
            groups,
            fetches: work.remote.fetches.clone(),
            unanswered: BTreeSet::new(),
            asked_layer: 0,
            writes,
            held: Vec::new(),
            deadline_ms: remote.then_some(cx.now_ms + cx.step_deadline_ms),
            asked_ms: cx.now_ms,
            remote_ms: 0,
            started_ms: cx.now_ms,
            remote_requests_us,
        });
        cx.release_freed();
        cx.effects.push(Effect::Runner(Command::Step(Box::new(work))));
        self.request_fetches(cx, step, 0);
    }

    /// Turns a plan into work for the runner, step tickets by creditor, and writes with their sequences.
    fn build(&self, cx: &Cx, batch: &Batch, step: StepId, micro_batch: MicroBatch, plan: &StepPlan) -> Built {
        let mut builder = Builder::new(step, micro_batch, cx.config.wire, plan);
        builder.work.next_row = cx.memory.rm.pool.next_row().map(|block| block.0 * cx.config.block_tokens);
        let mut segments = Vec::new();
        for chunk in &plan.chunks {
            let seq = batch.expect_seq(chunk.seq);
            let end = chunk.start + chunk.len;
            let span = chunk.start as usize..(end - chunk.drafts) as usize;
            let sample = (chunk.last && seq.embedding.is_none()).then(|| SampleSpec {
                params: seq.sampling.clone(),
                index: seq.for_others.unwrap_or_else(|| u64::from(seq.generated())),
                return_logits: seq.return_logits,
                banned: seq.banned(),
                token_counts: seq.token_counts.clone(),
                matcher: seq.matcher.clone(),
            });
            let window_start = visible(chunk.start, cx.config.window).start;
            segments.clear();
            // Warm-up rows read the pooled KV of their own positions, too, and write none of it.
            let remote_end = if chunk.warms_up() {
                end
            } else {
                seq.blocks.segments(chunk.start..end, &mut segments);
                chunk.start
            };
            builder.rows(chunk, &seq.tokens[span], seq.drafted(chunk), &segments);
            builder.score(chunk, seq);
            builder.embed(chunk, seq);
            let run0 = builder.work.runs.len();
            seq.blocks.local_runs(end, window_start, &mut builder.work.runs);
            let loads = chunk.ring.is_some_and(|ring| ring.load) && !mutants::is(Mutant::WindowUnread);
            let moves = loads || (chunk.last && seq.saves_window);
            let window = seq.window.as_ref().filter(|_| moves).zip(cx.config.windowed);
            let window = window.map(|(window, shape)| window.saved(shape, cx.config.block_tokens));
            builder.seq(chunk, run0, window, sample);
            for (creditor, runs) in seq.blocks.remote_runs(remote_end, window_start) {
                let runs = match self.mapped.mapped_runs(cx, creditor, &runs) {
                    Some((map, found)) => builder.attend_mapped(creditor, map, chunk, found),
                    None => runs,
                };
                if runs.is_empty() {
                    continue;
                }
                let keys = runs.iter().map(|r| r.len).sum();
                if fetches(cx, creditor, chunk.len, keys) {
                    builder.fetch(creditor, &runs, cx.config.fetch_tokens);
                } else {
                    builder.ship(creditor, chunk, runs);
                }
            }
        }
        builder.finish()
    }

    /// Requests the KV that a layer fetches.
    fn request_fetches(&mut self, cx: &mut Cx, step: StepId, layer: u32) {
        if layer >= cx.config.kv.layers {
            return;
        }
        let Some(flight) = self.flights.iter().flatten().find(|f| f.step == step) else { return };
        for (index, fetch) in flight.fetches.iter().enumerate() {
            let Some(peer) = cx.peers.key(fetch.creditor) else { continue };
            let read = cx.tags.read(ReadOwner::Step);
            let LeaseRun { lease, epoch, offset, len, .. } = fetch.run;
            self.reads.insert(read, (step, layer, index));
            let frame = BulkFrame::Read {
                id: read.to_wire(),
                lease,
                epoch,
                layer,
                offset,
                tokens: len,
                deadline_ms: u32::try_from(cx.step_deadline_ms).unwrap_or(u32::MAX),
            };
            cx.effects.push(Effect::Bulk { peer, frame });
        }
    }

    fn flight(&mut self, step: StepId) -> Option<&mut InFlight> {
        self.flights.iter_mut().flatten().find(|f| f.step == step)
    }

    /// Sends a layer's queries and requests the next layer's KV.
    fn on_queries(&mut self, cx: &mut Cx, step: StepId, layer: u32, frames: Vec<(InstanceId, u32, Bytes)>) {
        self.relays.count(cx, &frames);
        let (now, deadline) = (cx.now_ms, cx.now_ms + cx.step_deadline_ms);
        let last = layer + 1 == cx.config.kv.layers;
        let Some(flight) = self.flight(step) else { return };
        (flight.deadline_ms, flight.asked_ms) = (Some(deadline), now);
        if last {
            frames.iter().for_each(|(creditor, ..)| flight.close(*creditor));
        }
        flight.unanswered = frames.iter().map(|(creditor, ..)| *creditor).collect();
        flight.asked_layer = layer;
        for (creditor, rows, queries) in frames {
            if let Some(peer) = cx.peers.key(creditor) {
                let frame = PartialsFrame::Query { step, layer, rows, queries };
                cx.effects.push(Effect::Partials { peer, frame });
            }
        }
        self.request_fetches(cx, step, layer + 1);
    }

    /// Reports that a step has filled another layer of its chunks.
    fn on_layer(&mut self, cx: &mut Cx, step: StepId, layer: u32) {
        let flight = self.flights.iter().flatten().find(|f| f.step == step);
        let seqs: Vec<SeqId> =
            flight.iter().flat_map(|f| &f.chunks).filter(|chunk| !chunk.warms_up()).map(|chunk| chunk.seq).collect();
        seqs.into_iter().for_each(|seq| cx.emit(Outcome::Layers { seq, layers: layer + 1 }));
    }

    /// Sends a layer's new KV to creditors. A range that an aborted step has sent already is not repeated: the creditor
    /// has it.
    fn on_written(&mut self, cx: &mut Cx, batch: &mut Batch, step: StepId, layer: u32, kv: Vec<Bytes>) {
        let Some(flight) = self.flight(step) else { return };
        let mut held = Vec::new();
        for (index, ((seq, write), kv)) in flight.writes.iter().zip(kv).enumerate() {
            if flight.has_drafts(*seq) && !mutants::is(Mutant::DraftsUnheld) {
                held.push((layer, index, kv));
            } else {
                send_written(cx, batch, *seq, write, layer, &kv);
            }
        }
        flight.held.append(&mut held);
    }

    fn on_partial(&mut self, cx: &mut Cx, step: StepId, layer: u32, part: RemotePart) {
        let Some(flight) = self.flight(step).filter(|f| f.asked_layer == layer) else { return };
        // One answer each: a second one, or one for another layer, is dropped, and the step's deadline stays.
        if !flight.unanswered.remove(&part.creditor) {
            return;
        }
        if flight.unanswered.is_empty() {
            flight.remote_ms += cx.now_ms - flight.asked_ms;
        }
        cx.effects.push(Effect::Runner(Command::Part { step, layer, part }));
    }

    /// The creditor of a step's read.
    pub(crate) fn reads_at(&self, read: ReadId) -> Option<InstanceId> {
        let (step, _, index) = self.reads.get(&read)?;
        let flight = self.flights.iter().flatten().find(|flight| flight.step == *step)?;
        flight.fetches.get(*index).map(|fetch| fetch.creditor)
    }

    fn on_fetched(&mut self, cx: &mut Cx, batch: &Batch, read: ReadId, layer: u32, kv: Bytes) {
        let Some((step, wanted, index)) = self.reads.remove(&read) else { return };
        if wanted == layer {
            cx.effects.push(Effect::Runner(Command::Fetched { step, layer, index, kv }));
            return;
        }
        self.lose_fetch(cx, batch, (step, index), "a creditor answered another layer".to_owned());
    }

    /// Handles a failed read of remote KV: the lease that it was to read is lost.
    fn lose_fetch(&mut self, cx: &mut Cx, batch: &Batch, (step, index): (StepId, usize), why: String) {
        let fetch = self.flight(step).and_then(|flight| flight.fetches.get(index).copied());
        if let Some(Fetch { creditor, run, .. }) = fetch {
            batch.lose_lease(cx, creditor, run.lease, why);
        }
    }

    /// A creditor has reused mapped memory that a step attended to: its lease is lost, and the step's other sequences
    /// are planned again.
    fn on_reused(&mut self, cx: &mut Cx, batch: &Batch, creditor: InstanceId, lease: LeaseId, why: String) {
        self.mapped.note_reused();
        batch.lose_lease(cx, creditor, lease, why);
    }

    /// Completes a step.
    fn on_done(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        others: Others<'_>,
        step: StepId,
        micro_batch: MicroBatch,
        samples: Vec<SampleOut>,
    ) {
        let Some(flight) = self.flights[micro_batch.index()].take_if(|f| f.step == step) else { return };
        cancel_tickets(cx, step, &flight.open);
        self.relays.worked(cx, &flight.groups);
        let ms = cx.now_ms - flight.started_ms;
        let grows = |c: &&Chunk| c.decodes() && !c.warms_up();
        let growing = flight.chunks.iter().filter(grows).count();
        let prompt_rows = flight.chunks.iter().filter(|c| !grows(c)).map(|c| c.len).sum();
        let accepted = flight.accepted(batch, &samples);
        let own = micro_batch == MicroBatch::Local && growing == flight.chunks.len();
        cx.emit(Outcome::StepDone {
            ms,
            growing: as_u32(growing),
            other_rows: prompt_rows + accepted,
            own: own.then_some(flight.remote_requests_us),
        });
        if micro_batch == MicroBatch::Remote
            && !flight.creditors.is_empty()
            && flight.fetches.is_empty()
            && flight.decodes()
        {
            batch.remote_took(flight.remote_ms);
        }
        batch.changed();
        if growing == 0 {
            batch.prompt_step_took(ms, prompt_rows);
        }
        let (mut samples, mut row0) = (samples.into_iter(), 0);
        for (chunk, n) in flight.chunks.iter().zip(&flight.samples) {
            let own = samples.as_slice().get(..*n);
            let in_order = own.is_some_and(|own| own.iter().all(|sample| sample.seq == chunk.seq));
            assert!(in_order, "samples come in the order of the plan");
            if chunk.warms_up() {
                batch.warmed_up(cx, others.prefills, chunk);
            } else {
                complete(cx, batch, others, &flight, (chunk, row0), (&mut samples, *n));
            }
            row0 += chunk.len;
        }
        batch.ask_draft_model(cx, micro_batch, &flight.chunks);
    }

    /// Ends a step that the runner could not finish: the device or a peer's answer failed.
    fn on_step_failed(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        prefills: &dyn PrefillQueries,
        step: StepId,
        micro_batch: MicroBatch,
        error: &PassError,
    ) {
        let Some(flight) = self.flights[micro_batch.index()].take_if(|f| f.step == step) else { return };
        self.cancel(cx, &flight);
        self.leave(cx, batch, prefills, &flight);
        match error {
            PassError::Device(DeviceError::OutOfMemory { .. }) => batch.on_device_full(cx, prefills, &flight.chunks),
            // A failed device may have damaged its memory: cached blocks are dropped.
            PassError::Device(_) => cx.memory.rm.pool.drop_all(),
            PassError::Reused { creditor, lease } => self.on_reused(cx, batch, *creditor, *lease, error.to_string()),
            _ => {}
        }
        for chunk in &flight.chunks {
            match error {
                _ if !batch.has(chunk.seq) => {}
                PassError::Part { creditor, .. } => cx.emit(lost(chunk.seq, *creditor, error.to_string())),
                PassError::Device(DeviceError::OutOfMemory { .. }) | PassError::Reused { .. } => {}
                PassError::Device(_) => {
                    batch.fail(cx, prefills, chunk.seq, RequestError::Unavailable(error.to_string()))
                }
                PassError::Coverage { .. } | PassError::Sampling(_) => {
                    batch.fail(cx, prefills, chunk.seq, RequestError::Internal(error.to_string()));
                }
            }
        }
    }

    /// Tells the creditors of a step that it is over, and forgets its reads.
    fn cancel(&mut self, cx: &mut Cx, flight: &InFlight) {
        cancel_tickets(cx, flight.step, &flight.creditors);
        self.reads.retain(|_, (step, _, _)| *step != flight.step);
    }

    /// Aborts the step that a sequence is in; all its sequences leave it unchanged. The runner drops the step before it
    /// sees any later command, so their memory may be freed at once.
    fn abort_micro_batch_of(&mut self, cx: &mut Cx, batch: &mut Batch, prefills: &dyn PrefillQueries, seq: SeqId) {
        let holds = |f: &InFlight| f.chunks.iter().any(|c| c.seq == seq);
        for micro_batch in MicroBatch::ALL {
            if self.flights[micro_batch.index()].as_ref().is_some_and(holds) {
                self.abort_micro_batch(cx, batch, prefills, micro_batch);
            }
        }
    }

    /// Aborts the step of a micro-batch, if there is one.
    fn abort_micro_batch(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        prefills: &dyn PrefillQueries,
        micro_batch: MicroBatch,
    ) {
        if let Some(flight) = self.flights[micro_batch.index()].take() {
            cx.effects.push(Effect::Runner(Command::Abort { step: flight.step }));
            self.cancel(cx, &flight);
            self.leave(cx, batch, prefills, &flight);
        }
    }

    /// Takes the sequences out of a step that did not finish, unchanged; cancelled ones end.
    fn leave(&mut self, cx: &mut Cx, batch: &mut Batch, prefills: &dyn PrefillQueries, flight: &InFlight) {
        for chunk in &flight.chunks {
            batch.abandon(chunk.seq);
            if batch.seq(chunk.seq).is_some_and(|s| s.is_ending()) {
                batch.remove(cx, prefills, chunk.seq);
            }
            cx.emit(Outcome::ChunkLeft { seq: chunk.seq });
        }
    }

    /// Aborts a step; its sequences lose their KV at `creditors`.
    fn fail_step(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        prefills: &dyn PrefillQueries,
        step: StepId,
        creditors: &BTreeSet<InstanceId>,
        why: &str,
    ) {
        let Some(flight) = self.flights.iter().flatten().find(|f| f.step == step) else { return };
        let chunks = flight.chunks.clone();
        if let Some(first) = chunks.first() {
            self.abort_micro_batch_of(cx, batch, prefills, first.seq);
        }
        for chunk in chunks {
            creditors.iter().for_each(|creditor| cx.emit(lost(chunk.seq, *creditor, why.to_owned())));
        }
    }

    /// Fails steps whose creditors are late. A step that waits only for this instance's own device gets a new deadline.
    fn expire_steps(&mut self, cx: &mut Cx, batch: &mut Batch, prefills: &dyn PrefillQueries) {
        self.relays.tick(cx);
        let (now, timeout_ms) = (cx.now_ms, cx.step_deadline_ms);
        let mut late = Vec::new();
        for flight in self.flights.iter_mut().flatten().filter(|f| f.deadline_ms.is_some_and(|at| at <= now)) {
            let reads = self.reads.values().filter(|(step, _, _)| *step == flight.step);
            let mut missing: BTreeSet<InstanceId> =
                reads.filter_map(|(_, _, index)| flight.fetches.get(*index).map(|f| f.creditor)).collect();
            missing.extend(&flight.unanswered);
            if missing.is_empty() {
                flight.deadline_ms = Some(now + timeout_ms);
            } else {
                late.push((flight.step, missing));
            }
        }
        for (step, mut missing) in late {
            self.excuse_relays(cx, step, &mut missing);
            self.fail_step(
                cx,
                batch,
                prefills,
                step,
                &missing,
                &format!("a step made no progress for {timeout_ms} ms"),
            );
        }
    }
}

/// Completes a chunk, whose first row is `row0` of the step: its accepted drafts become tokens.
fn complete(
    cx: &mut Cx,
    batch: &mut Batch,
    others: Others<'_>,
    flight: &InFlight,
    (planned, row0): (&Chunk, u32),
    (samples, n): (&mut std::vec::IntoIter<SampleOut>, usize),
) {
    let chunk = &batch.accept_drafts(planned, &samples.as_slice()[..n], cx.config.sched.drafts);
    if planned.drafts > 0 {
        send_held(cx, batch, flight, chunk, row0);
    }
    let mut sampled = samples.by_ref().take(n);
    if batch.note_computed(cx, others, chunk) {
        emit(cx, batch, others, chunk, &mut sampled);
        joint::computed(cx, batch, chunk);
    }
    // Those behind the first rejected draft.
    sampled.for_each(drop);
}

/// Samples of a sequence's rows: of the last row, and of its drafts.
fn samples_of(rows: &SeqRows) -> usize {
    if rows.sample.is_some() { 1 + rows.drafts as usize } else { 0 }
}

/// Emits what was sampled from a chunk's rows, without rejected drafts.
fn emit(
    cx: &mut Cx,
    batch: &mut Batch,
    others: Others<'_>,
    chunk: &Chunk,
    sampled: &mut impl Iterator<Item = SampleOut>,
) {
    let Some(seq) = batch.seq(chunk.seq) else { return };
    if seq.is_ending() {
        return batch.remove(cx, others.prefills, chunk.seq);
    }
    let for_others = seq.for_others.is_some();
    if chunk.last && seq.embedding.is_some() {
        return batch.finish_embedding(cx, others.prefills, chunk.seq);
    }
    let mut sampled = sampled.take(1 + chunk.drafts as usize).peekable();
    if for_others && sampled.peek().is_none() {
        return cx.emit(Outcome::Chunk { seq: chunk.seq });
    }
    let mut end = None;
    for (index, SampleOut { token, logprobs, logits, has_ended, failure, .. }) in (0..).zip(sampled) {
        let Some(token) = token else {
            if has_ended && !for_others {
                end = Some(FinishReason::Stop);
                break;
            }
            let error = RequestError::Invalid(failure.unwrap_or_else(|| SampleError::Excluded.to_string()));
            return batch.fail(cx, others.prefills, chunk.seq, error);
        };
        if for_others {
            cx.emit(Outcome::Chunk { seq: chunk.seq });
            return cx
                .emit(Outcome::Prefilled { seq: chunk.seq, first: FirstToken { token, logprobs, logits, has_ended } });
        }
        let prompt = batch.report_prompt(chunk.seq);
        cx.effects.extend(prompt.map(|event| Effect::Emit { seq: chunk.seq, event }));
        // Accepted drafts are tokens already.
        if index == chunk.drafts {
            end = batch.push_token(cx, chunk.seq, token).or(has_ended.then_some(FinishReason::Stop));
        }
        cx.effects.push(Effect::Emit { seq: chunk.seq, event: TokenEvent::Token { id: token, logprobs, logits } });
    }
    if let Some(reason) = end {
        batch.finish(cx, others.prefills, chunk.seq, reason);
    }
}

/// Sends new KV of one layer to its creditor, without what an aborted step has sent already: the creditor has it.
fn send_written(cx: &mut Cx, batch: &mut Batch, seq: SeqId, write: &WriteSegment, layer: u32, kv: &Bytes) {
    let Some(peer) = cx.peers.key(write.creditor) else { return };
    let token_bytes = cx.config.kv.layer_token_bytes();
    let Some(written) = batch.hash_written(seq, write, (layer, token_bytes), kv) else { return };
    let Written { offset, tokens, kv, complete } = written;
    let &WriteSegment { lease, epoch, .. } = write;
    cx.effects.push(Effect::Bulk { peer, frame: BulkFrame::Write { lease, epoch, layer, offset, tokens, kv } });
    for (entry, hash) in complete {
        cx.effects.push(Effect::Bulk { peer, frame: BulkFrame::Seal { lease, epoch, entry, hash } });
    }
}

/// Sends the KV of a chunk with drafts that was held back, without rejected drafts.
fn send_held(cx: &mut Cx, batch: &mut Batch, flight: &InFlight, chunk: &Chunk, row0: u32) {
    let token_bytes = cx.config.kv.layer_token_bytes();
    for (layer, index, kv) in &flight.held {
        let Some((seq, write)) = flight.writes.get(*index).filter(|(seq, _)| *seq == chunk.seq) else { continue };
        let rows = (row0 + chunk.len).saturating_sub(write.row0).min(write.rows);
        if rows > 0 {
            let kv = kv.slice(..rows as usize * token_bytes);
            send_written(cx, batch, *seq, &WriteSegment { rows, ..*write }, *layer, &kv);
        }
    }
}

fn cancel_tickets<'a>(cx: &mut Cx, step: StepId, creditors: impl IntoIterator<Item = &'a InstanceId>) {
    for creditor in creditors {
        if let Some(peer) = cx.peers.key(*creditor) {
            cx.effects.push(Effect::Partials { peer, frame: PartialsFrame::StepCancel { step } });
        }
    }
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn fetches(cx: &Cx, creditor: InstanceId, rows: u32, keys: u32) -> bool {
    match cx.config.remote {
        _ if cx.config.fetch_tokens == 0 => false,
        RemotePolicy::Ship => false,
        RemotePolicy::Fetch => true,
        RemotePolicy::Auto => CostModel::towards(cx, Some(creditor)).prefers_fetch(rows, keys),
    }
}

/// The loss of all KV of a sequence at a creditor.
fn lost(seq: SeqId, creditor: InstanceId, why: String) -> Outcome {
    Outcome::Lost(Lost { seq, creditor, part: LostPart::All, why })
}
