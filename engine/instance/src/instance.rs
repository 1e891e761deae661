//! The instance itself: its state, the dispatch of events, and the pump that starts whatever can start.

use crate::batch::Batch;
use crate::config::InstanceConfig;
use crate::creditor::{Creditor, CreditorEvent};
use crate::cx::{Cx, TagOwner};
use crate::event::{Effect, Event, PeerKey};
use crate::membership::Membership;
use crate::moves::Moves;
use crate::outcome::{Outcome, Outcomes, ROUNDS_MAX};
use crate::prefill::Prefills;
use crate::step::Steps;
use lagoon_cluster::{ConfigError, Output};
use lagoon_protocol::{BulkFrame, ControlBody, PartialsFrame, RefuseCode, StepTicket};
use lagoon_runner::Report;
use lagoon_types::{GenerateRequest, KvSpace, MicroBatch, SeqId, TokenEvent};

/// See the crate's documentation.
#[derive(Debug)]
pub struct Instance {
    pub(crate) cx: Cx,
    pub(crate) batch: Batch,
    pub(crate) step: Steps,
    pub(crate) creditor: Creditor,
    pub(crate) prefill: Prefills,
    pub(crate) moves: Moves,
    pub(crate) membership: Membership,
}

impl Instance {
    /// An idle instance with an empty pool.
    ///
    /// # Errors
    /// [`ConfigError`] for sizes that cannot work.
    pub fn new(config: InstanceConfig) -> Result<Self, ConfigError> {
        Ok(Self {
            batch: Batch::new(config.sched),
            step: Steps::new(),
            creditor: Creditor::new(&config),
            prefill: Prefills::new(&config),
            moves: Moves::new(config.kv.layers, config.block_tokens),
            membership: Membership::new(&config),
            cx: Cx::new(config)?,
        })
    }

    /// For simulations with a stand-in of the model, in which one exchange stands for those of many layers and a byte for
    /// many: a step may go without progress for `step_deadline_ms` instead of [`lagoon_types::limits::STEP_DEADLINE_MS`], and
    /// `move_bytes_in_flight` bytes of moves may be in progress.
    pub fn scale_limits(&mut self, step_deadline_ms: u64, move_bytes_in_flight: u64) {
        self.cx.step_deadline_ms = step_deadline_ms;
        self.moves.set_bytes_in_flight_max(move_bytes_in_flight);
    }

    /// Takes one event at `now_ms` (which never goes back) and says what to do, in order.
    pub fn handle(&mut self, event: Event, now_ms: u64) -> Vec<Effect> {
        self.cx.now_ms = self.cx.now_ms.max(now_ms);
        if may_concern_batch(&event) {
            self.batch.due.touch();
        }
        match event {
            Event::Submit { seq, request } => self.on_submit(seq, request),
            Event::Cancel { seq } => self.on_cancel(seq),
            Event::GManagerUp => self.on_gmanager_up(),
            Event::GManagerDown => self.membership.gmanager_down(),
            Event::GManager(body) => self.on_gmanager(body),
            Event::PeerUp { peer } => self.on_peer_up(peer),
            Event::PeerDown { peer } => self.on_peer_down(peer),
            Event::SendFailed { peer } => self.on_send_failed(peer),
            Event::Control { peer, body } => self.on_control(peer, body),
            Event::Partials { peer, frame } => self.on_partials(peer, frame),
            Event::Bulk { peer, frame } => self.on_bulk(peer, frame),
            Event::Rtt { peer, rtt_us } => self.on_rtt(peer, rtt_us),
            Event::Runner(report) => self.on_report(report),
            Event::Transfer(event) => self.on_transfer(event),
            Event::Tick => self.on_tick(),
        }
        self.pump();
        self.cx.release_freed();
        std::mem::take(&mut self.cx.effects)
    }

    /// Has the device map memory behind the addresses of this space, instead of one slot being one piece of memory. To be
    /// called before the first event.
    ///
    /// # Errors
    /// [`ConfigError`] if the space is not one for the configured blocks.
    pub fn address_kv(&mut self, space: KvSpace) -> Result<(), ConfigError> {
        self.cx.memory.rm.address(space)
    }

    /// Starts whatever can start.
    fn pump(&mut self) {
        self.drain_rmanager();
        self.switch_moves();
        self.end_swap_out();
        self.end_preempt_after_step();
        let due = self.is_due();
        if due {
            self.batch.due.begin(self.cx.memory.rm.pool().changes());
            // What runs grows before anything new comes in: what a preempted sequence gave up must not go back to it.
            self.grow();
            self.swap_in();
            self.admit();
            self.dispatch();
        }
        self.pump_pulls();
        let due = due || self.is_due();
        if due {
            self.batch.divide(&self.cx, self.creditor.has_target(), |creditor| self.step.mapped.maps(creditor));
            self.cx.memory.rm.set_growth_reserve(self.growth_reserve());
            self.tell_waiting();
        }
        if !self.moves.pace.overlaps() {
            self.pump_moves();
        }
        if due && !self.waits_for_copy() {
            for micro_batch in MicroBatch::ALL {
                self.start_micro_batch(micro_batch);
                self.note_step(micro_batch);
            }
        }
        self.drain_rmanager();
        self.pump_moves();
        self.drain_rmanager();
    }

    /// Whether the batch is to be looked at. What moves may wait for a sequence, and a sequence for it.
    fn is_due(&self) -> bool {
        !self.moves.is_empty() || self.batch.due.is_due(self.cx.memory.rm.pool().changes(), self.cx.now_ms)
    }

    fn on_submit(&mut self, seq: SeqId, request: GenerateRequest) {
        if let Err(error) = self.accept(seq, request) {
            self.cx.effects.push(Effect::Emit { seq, event: TokenEvent::Failed(error) });
        }
    }

    /// Hands the rManager's outputs on.
    pub(crate) fn drain_rmanager(&mut self) {
        while let Some(output) = self.cx.memory.rm.poll() {
            if !matches!(output, Output::ToGManager(_) | Output::ToPeer { .. }) {
                self.batch.due.touch();
            }
            match output {
                Output::ToGManager(body) => self.cx.effects.push(Effect::ToGManager(body)),
                Output::ToPeer { instance, quic_addr, body } => self.send_control(instance, &quic_addr, body),
                Output::Borrowed { borrow: _, seq, leases } => self.on_borrowed(seq, &leases),
                Output::BorrowFailed { borrow: _, seq, reason } => self.on_borrow_failed(seq, &reason),
                Output::LeaseLost { seq, creditor, lease } if self.lose_handed(seq, creditor, lease) => {}
                Output::EntriesLost { seq, creditor, lease, .. } if self.lose_handed(seq, creditor, lease) => {}
                Output::LeaseLost { seq, creditor, lease } => {
                    self.end_move_to(creditor, lease, "the target's lease was lost", false);
                    self.lose(seq, creditor, Some(lease), "a creditor no longer has the sequence's blocks");
                }
                Output::EntriesLost { seq, creditor, lease, entries } => {
                    self.end_move_to(creditor, lease, "the target took its blocks back", false);
                    self.lose_entries(seq, creditor, lease, &entries);
                }
                Output::Reserved { borrow, seq: _, lease } => self.on_reserved(borrow, &lease),
                Output::NotReserved { borrow, seq: _, blocks_lendable } => {
                    self.on_not_reserved(borrow, blocks_lendable)
                }
                Output::Sealed { seq: _, creditor, lease, entries } => self.on_sealed(creditor, lease, &entries),
                Output::ReservationLost { seq: _, creditor, lease } => {
                    self.end_move_to(creditor, lease, "the reservation was not written in time", true);
                }
            }
        }
    }

    /// Tells a client of its request. What is computed for others has none: whoever asked is told if it failed.
    pub(crate) fn emit(&mut self, seq: SeqId, event: TokenEvent) {
        if !self.prefill.is_job(seq) {
            self.cx.effects.push(Effect::Emit { seq, event });
        } else if let TokenEvent::Failed(error) = event {
            self.job_failed(seq, error.to_string());
        }
    }

    /// Longest sequence that could be held if the whole pool were free, in tokens.
    #[must_use]
    pub fn pool_tokens(&self) -> u64 {
        self.membership.pool_blocks_total.max(u64::from(self.cx.config.blocks_total))
            * u64::from(self.cx.config.block_tokens)
    }

    fn on_gmanager(&mut self, body: ControlBody) {
        match body {
            ControlBody::Registered(registered) => self.on_registered(&registered),
            ControlBody::Rejected(rejected) => self.cx.effects.push(Effect::Rejected { reason: rejected.reason }),
            ControlBody::HeartbeatAck(ack) => self.on_heartbeat_ack(&ack),
            ControlBody::Fenced(fenced) => self.on_peer_fenced(&fenced),
            ControlBody::DrainOrder(order) => self.on_drain_order(order),
            ControlBody::BorrowAdvice(advice) => {
                self.membership.pool_blocks_total = advice.pool_blocks_total;
                self.cx.memory.rm.on_advice(&advice, self.cx.now_ms);
            }
            ControlBody::Freeze(freeze) => self.batch.on_freeze(&mut self.cx, &freeze),
            ControlBody::Thaw(thaw) => {
                let outcomes = self.batch.on_thaw(thaw.cycle);
                self.hand_on(outcomes);
            }
            ControlBody::MoveKvCache(order) => self.on_move_order(&order),
            ControlBody::Workers(workers) => self.on_workers(&workers),
            ControlBody::RoleOrder(order) => self.on_role_order(order),
            _ => {}
        }
    }

    fn on_control(&mut self, peer: PeerKey, body: ControlBody) {
        if let ControlBody::Hello(hello) = &body {
            self.on_hello(peer, hello);
            return;
        }
        if let ControlBody::Rejected(rejected) = body {
            self.cx.effects.push(Effect::Close { peer, reason: rejected.reason });
            return;
        }
        let Some(known) = self.cx.peers.known(peer) else {
            let reason = "a peer must say Hello first".to_owned();
            self.cx.effects.push(Effect::Close { peer, reason });
            return;
        };
        if let ControlBody::Recall(recall) = &body {
            self.on_recall(known.instance, recall);
            return;
        }
        if let ControlBody::LeaseRelease(release) = &body {
            self.creditor(CreditorEvent::Released { from: known.instance, release: release.clone() });
        }
        let Some(body) = self.on_prefill_control(known.instance, body) else { return };
        if let Some(body) = self.cx.memory.rm.on_peer_control(known.instance, body, self.cx.now_ms) {
            self.cx.send(peer, body);
        }
    }

    fn on_partials(&mut self, peer: PeerKey, frame: PartialsFrame) {
        let Some(known) = self.cx.peers.known(peer) else {
            // It may have overtaken the Hello. A debtor that is told does not wait for the deadline.
            if let PartialsFrame::Ticket(StepTicket { step, .. }) = frame {
                let (code, detail) = (RefuseCode::UnknownLease, "the connection is not introduced yet".to_owned());
                self.cx.effects.push(Effect::Partials { peer, frame: PartialsFrame::Refused { step, code, detail } });
            }
            return;
        };
        match frame {
            PartialsFrame::Partial { step, layer, rows, out, lse, count } => {
                self.on_partial(known.instance, step, layer, rows, out, lse, count);
            }
            PartialsFrame::Refused { step, code, detail } => self.on_step_refused(known.instance, step, code, &detail),
            frame => self.creditor(CreditorEvent::Partials { peer, from: known.instance, frame }),
        }
    }

    fn on_bulk(&mut self, peer: PeerKey, frame: BulkFrame) {
        let Some(known) = self.cx.peers.known(peer) else {
            let id = if let BulkFrame::Read { id, .. } = frame { id } else { 0 };
            if let BulkFrame::Write { lease, .. } | BulkFrame::Read { lease, .. } = frame {
                let (code, detail) = (RefuseCode::UnknownLease, "the connection is not introduced yet".to_owned());
                self.cx.effects.push(Effect::Bulk { peer, frame: BulkFrame::Refused { id, lease, code, detail } });
            }
            return;
        };
        match frame {
            BulkFrame::Data { id, layer, tokens: _, kv } => {
                if self.moves.reads(id) {
                    self.on_move_data(known.instance, id, layer, kv);
                } else {
                    self.on_fetched(id, layer, kv);
                }
            }
            BulkFrame::Refused { id, lease, code, detail } => {
                self.on_bulk_refused(known.instance, id, lease, code, &detail);
            }
            frame => self.creditor(CreditorEvent::Bulk { peer, from: known.instance, frame }),
        }
    }

    fn on_report(&mut self, report: Report) {
        match report {
            Report::Queries { step, layer, frames } => self.on_queries(step, layer, frames),
            Report::Written { step, layer, kv } => self.on_written(step, layer, kv),
            Report::Layer { step, layer } => self.on_layer(step, layer),
            Report::Done { step, micro_batch, samples } => {
                self.note_step_done(step, micro_batch);
                self.on_done(step, micro_batch, samples);
            }
            Report::Failed { step, micro_batch, error } => self.on_step_failed(step, micro_batch, &error),
            Report::Shared { share, error } => self.on_shared(share, error.as_ref()),
            Report::Staged { stage, error } => self.on_staged(stage, error.as_ref()),
            Report::Memory(counters) => self.cx.memory.counters = Some(counters),
            Report::Launches(counters) => self.step.launches = Some(counters),
            Report::RemotePartial { tag, out, lse, count } => {
                self.creditor(CreditorEvent::Partial { tag, out, lse, count });
            }
            Report::RemoteWritten { bytes, tag } => {
                self.creditor(CreditorEvent::Written { bytes });
                tag.into_iter().for_each(|tag| self.on_move_stored(tag));
            }
            Report::RemoteKv { tag, kv } => match TagOwner::of(tag) {
                TagOwner::Move => self.on_move_kv(tag, kv),
                TagOwner::Request | TagOwner::Seal => self.creditor(CreditorEvent::Kv { tag, kv }),
            },
            Report::RemoteFailed { tag, error } => match TagOwner::of(tag) {
                TagOwner::Move => self.on_move_failed(tag, &error.to_string()),
                TagOwner::Seal => self.creditor(CreditorEvent::Sealed { tag, sealed: false }),
                TagOwner::Request => self.creditor(CreditorEvent::Failed { tag, error }),
            },
            Report::RemoteSealed { tag } => self.creditor(CreditorEvent::Sealed { tag, sealed: true }),
            Report::Mapped { map, error } => self.step.mapped.on_mapped(&mut self.cx, map, error.is_none()),
        }
    }

    fn on_tick(&mut self) {
        let now = self.cx.now_ms;
        let ended = self.cx.memory.rm.tick(now);
        if !ended.is_empty() {
            self.creditor(CreditorEvent::Ended(ended));
        }
        self.greet();
        self.creditor(CreditorEvent::Tick);
        self.expire_moves();
        self.expire_dialling();
        let thawed = self.batch.expire_freeze(now);
        self.hand_on(thawed);
        if self.batch.break_up(self.cx.now_ms, self.step.waits_since(MicroBatch::Remote)) {
            self.abort_micro_batch(MicroBatch::Remote);
        }
        self.expire_steps();
        self.expire_waiting();
        self.expire_jobs();
        self.expire_away();
        self.tick_role();
        self.tick_workers();
        self.tick_reader();
        self.tick_membership();
    }

    /// Hands an event to the creditor's side.
    pub(crate) fn creditor(&mut self, event: CreditorEvent) {
        let outcomes = self.creditor.handle(&mut self.cx, event);
        self.hand_on(outcomes);
    }

    /// Hands outcomes on, and theirs, until there are none.
    fn hand_on(&mut self, mut outcomes: Outcomes) {
        let mut rounds = 0;
        while !outcomes.is_empty() {
            rounds += 1;
            assert!(rounds <= ROUNDS_MAX, "outcomes cause each other for ever: {outcomes:?}");
            let round = std::mem::take(&mut outcomes);
            outcomes = round.into_iter().flat_map(|outcome| self.act_upon(outcome)).collect();
        }
    }

    fn act_upon(&mut self, outcome: Outcome) -> Outcomes {
        match outcome {
            Outcome::RecallMissed { debtor, missing } => {
                let blocks = missing.min(self.missing_blocks());
                self.creditor.handle(&mut self.cx, CreditorEvent::Revoke { debtor, blocks })
            }
            Outcome::Over { seq } => {
                self.remove(seq);
                Outcomes::new()
            }
        }
    }
}

/// Whether an event may change what decisions about sequences depend on, beside what notes that itself: what ticks end, and
/// what frames and the device bring for steps, moves and peers, does.
fn may_concern_batch(event: &Event) -> bool {
    match event {
        Event::Tick | Event::Rtt { .. } | Event::Partials { .. } | Event::Bulk { .. } => false,
        Event::Runner(report) => !matches!(
            report,
            Report::Queries { .. }
                | Report::Written { .. }
                | Report::Layer { .. }
                | Report::Memory(_)
                | Report::Launches(_)
                | Report::RemotePartial { .. }
                | Report::RemoteWritten { .. }
                | Report::RemoteKv { .. }
                | Report::RemoteFailed { .. }
                | Report::RemoteSealed { .. }
        ),
        Event::Control { body, .. } => !matches!(body, ControlBody::LeaseRenew(_) | ControlBody::LeaseRenewed(_)),
        _ => true,
    }
}
