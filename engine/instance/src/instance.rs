//! The router: routes events to the machine that owns them and outcomes to other machines, then starts ready work.
//!
//! Invariants:
//! * one machine works at a time, on itself, [`Cx`] and, where passed, the batch; work for other machines is an
//!   [`Outcome`], and each outcome goes to its machines in a fixed order;
//! * outcomes of outcomes end within [`ROUNDS_MAX`] rounds.

use crate::batch::{Batch, BatchEvent, Others};
use crate::config::InstanceConfig;
use crate::creditor::{Creditor, CreditorEvent};
use crate::cx::Cx;
use crate::cx::tags::{ReadId, ReadOwner, TagOwner};
use crate::cx::tiers::CacheTierConfig;
use crate::event::{Effect, Event, PeerKey};
use crate::joint::{JointEvent, Joints};
use crate::look::Look;
use crate::membership::{Membership, MembershipEvent};
use crate::moves::{MoveEvent, Moves};
use crate::outcome::{Lost, LostPart, Outcome, Outcomes, ROUNDS_MAX};
use crate::prefill::{PrefillEvent, Prefills};
use crate::step::{StepEvent, Steps};
use lagoon_cluster::{ConfigError, Output};
use lagoon_protocol::{BulkFrame, ControlBody, LeaseRefuse, LeaseRequest, PartialsFrame, RefuseCode, Role, StepTicket};
use lagoon_runner::{RemotePart, Report};
use lagoon_types::{InstanceId, KvSpace, LeaseId, MicroBatch};

/// One instance. See the crate's documentation.
#[derive(Debug)]
pub struct Instance {
    pub(crate) cx: Cx,
    pub(crate) batch: Batch,
    pub(crate) step: Steps,
    pub(crate) creditor: Creditor,
    pub(crate) prefill: Prefills,
    pub(crate) joint: Joints,
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
            batch: Batch::new(&config),
            step: Steps::new(),
            creditor: Creditor::new(&config),
            prefill: Prefills::new(&config),
            joint: Joints::default(),
            moves: Moves::new(config.kv.layers, config.block_tokens),
            membership: Membership::default(),
            cx: Cx::new(config)?,
        })
    }

    /// Sets limits for simulations with a model stand-in, where one exchange stands for many layers and one byte for
    /// many: steps may take `step_deadline_ms` without progress instead of [`lagoon_types::limits::STEP_DEADLINE_MS`],
    /// and `move_bytes_in_flight` bytes of moves may be in flight.
    pub fn scale_limits(&mut self, step_deadline_ms: u64, move_bytes_in_flight: u64) {
        self.cx.step_deadline_ms = step_deadline_ms;
        self.moves.set_bytes_in_flight_max(move_bytes_in_flight);
    }

    /// Gives KV slots virtual addresses of this space, behind which the device maps memory. Call before the first
    /// event.
    ///
    /// # Errors
    /// [`ConfigError`] if the space is not one for the configured blocks.
    pub fn address_kv(&mut self, space: KvSpace) -> Result<(), ConfigError> {
        self.cx.memory.rm.address(space)
    }

    /// Keeps copies of cached blocks in tiers beside the KV memory. Call before the first event. Nothing changes where the prefix
    /// cache is off.
    pub fn keep_copies(&mut self, tiers: CacheTierConfig) {
        self.cx.keep_copies(tiers);
    }

    /// Handles one event at `now_ms` (which never goes back). Returns the effects, in order.
    pub fn handle(&mut self, event: Event, now_ms: u64) -> Vec<Effect> {
        self.cx.now_ms = self.cx.now_ms.max(now_ms);
        if may_concern_batch(&event) {
            self.batch.touch();
        }
        if matches!(event, Event::Tick) {
            self.on_tick();
        } else {
            let outcomes = self.on_event(event);
            self.hand_on(outcomes);
        }
        self.pump();
        self.cx.release_freed();
        std::mem::take(&mut self.cx.effects)
    }

    /// Takes the memory of effects that were carried out, for the next event's.
    pub fn reuse(&mut self, mut effects: Vec<Effect>) {
        effects.clear();
        self.cx.effects = effects;
    }

    fn on_event(&mut self, event: Event) -> Outcomes {
        match event {
            Event::Submit { seq, request } => self.batch(BatchEvent::Submit { seq, request: *request }),
            Event::Cancel { seq } => self.batch(BatchEvent::Cancel(seq)),
            Event::GManagerUp => self.membership(MembershipEvent::GManagerUp),
            Event::GManagerDown => self.membership(MembershipEvent::GManagerDown),
            Event::GManager(body) => self.on_gmanager(body),
            Event::PeerUp { peer } => self.membership(MembershipEvent::PeerUp(peer)),
            Event::PeerDown { peer } => self.membership(MembershipEvent::PeerDown(peer)),
            Event::SendFailed { peer } => self.membership(MembershipEvent::SendFailed(peer)),
            Event::Control { peer, body } => self.on_control(peer, body),
            Event::Partials { peer, frame } => self.on_partials(peer, frame),
            Event::Bulk { peer, frame } => self.on_bulk(peer, frame),
            Event::Rtt { peer, rtt_us } => self.membership(MembershipEvent::Rtt { peer, rtt_us }),
            Event::Runner(report) => self.on_report(report),
            Event::Transfer(event) => self.prefill(PrefillEvent::Transfer(event)),
            Event::Disk(event) => self.batch(BatchEvent::Disk(event)),
            Event::Tick => Outcomes::new(),
        }
    }

    /// Starts all work that can start.
    fn pump(&mut self) {
        self.drain_rmanager();
        if !self.moves.is_empty() {
            let outcomes = self.moves(MoveEvent::Switch);
            self.hand_on(outcomes);
        }
        if self.batch.awaits_steps(&self.cx) {
            let outcomes = self.batch(BatchEvent::StepsEnded);
            self.hand_on(outcomes);
        }
        let due = self.is_due();
        if due {
            self.batch.begin_look(self.cx.memory.rm.pool.changes(), self.cx.now_ms);
            // Growth before admission: a preempted sequence must not get its freed memory back.
            self.grow();
            let outcomes = self.batch(BatchEvent::Admit);
            self.hand_on(outcomes);
            let outcomes = self.prefill(PrefillEvent::Dispatch);
            self.hand_on(outcomes);
        }
        if self.prefill.may_read() {
            let outcomes = self.prefill(PrefillEvent::Pump);
            self.hand_on(outcomes);
        }
        let due = due || self.is_due();
        if due {
            self.batch.divide(&self.cx, self.creditor.has_target(), |creditor| self.step.mapped().maps(creditor));
            self.batch.report_waiting(&mut self.cx);
        }
        if !self.moves.overlaps() {
            self.pump_moves();
        }
        if due && !self.moves.waits_for_copy(&self.cx) {
            for micro_batch in MicroBatch::ALL {
                let remote_requests_us = self.creditor.remote_requests_us();
                let outcomes = self.step(StepEvent::Start { micro_batch, remote_requests_us });
                self.hand_on(outcomes);
            }
        }
        self.drain_rmanager();
        self.pump_moves();
        self.drain_rmanager();
        self.cx.memory.tiers.note_steps(self.step.is_busy(), false);
        self.cx.go_on_dropping();
        self.cx.save_cached();
    }

    /// Grows running sequences; again while that makes room for others.
    fn grow(&mut self) {
        for _ in 0..ROUNDS_MAX {
            let outcomes = self.batch(BatchEvent::Grow);
            let again = outcomes.iter().any(|outcome| matches!(outcome, Outcome::RoomNeeded));
            self.hand_on(outcomes);
            if !again {
                return;
            }
        }
    }

    fn pump_moves(&mut self) {
        if self.moves.is_empty() {
            return;
        }
        let outcomes = self.moves(MoveEvent::Pump { busy: self.step.is_busy() });
        self.hand_on(outcomes);
    }

    /// Whether the batch is due. Always while moves exist: moves and sequences may wait for each other.
    fn is_due(&self) -> bool {
        !self.moves.is_empty() || self.batch.is_due(self.cx.memory.rm.pool.changes(), self.cx.now_ms)
    }

    /// Hands the rManager's outputs on.
    fn drain_rmanager(&mut self) {
        while let Some(output) = self.cx.memory.rm.poll() {
            if !matches!(output, Output::ToGManager(_) | Output::ToPeer { .. }) {
                self.batch.touch();
            }
            let outcomes = self.on_output(output);
            self.hand_on(outcomes);
        }
    }

    fn on_output(&mut self, output: Output) -> Outcomes {
        match output {
            Output::ToGManager(body) => {
                self.cx.effects.push(Effect::ToGManager(body));
                Outcomes::new()
            }
            Output::ToPeer { instance: to, quic_addr, body } => {
                self.membership(MembershipEvent::Send { to, quic_addr, body })
            }
            Output::Borrowed { borrow: _, seq, leases } => self.batch(BatchEvent::Borrowed { seq, leases }),
            Output::BorrowFailed { borrow: _, seq, reason } => self.batch(BatchEvent::BorrowFailed { seq, reason }),
            Output::PrefixFound { borrow: _, seq, parts } => self.batch(BatchEvent::PrefixFound { seq, parts }),
            Output::Members { seq, candidates } => self.joint(JointEvent::Found { seq, candidates }),
            Output::LeaseLost { seq, creditor, lease } => {
                let why = "a creditor no longer has the sequence's blocks".to_owned();
                let lost = Lost { seq, creditor, part: LostPart::Lease(lease), why };
                self.on_lease_lost(lost, lease, "the target's lease was lost")
            }
            Output::EntriesLost { seq, creditor, lease, entries } => {
                let lost = Lost { seq, creditor, part: LostPart::Entries(lease, entries), why: String::new() };
                self.on_lease_lost(lost, lease, "the target took its blocks back")
            }
            Output::Reserved { borrow, seq: _, lease } => self.moves(MoveEvent::Reserved { borrow, lease }),
            Output::NotReserved { borrow, seq: _, blocks_lendable: lendable } => {
                self.moves(MoveEvent::NotReserved { borrow, lendable })
            }
            Output::Sealed { seq: _, creditor, lease, entries } => {
                self.moves(MoveEvent::Sealed { creditor, lease, entries })
            }
            Output::ReservationLost { seq: _, creditor, lease } => {
                let reason = "the reservation was not written in time";
                self.moves(MoveEvent::TargetGone { creditor, lease, reason, keep: true })
            }
        }
    }

    fn on_lease_lost(&mut self, lost: Lost, lease: LeaseId, reason: &'static str) -> Outcomes {
        let Lost { seq, creditor, .. } = lost;
        if self.prefill.has_handed(seq, creditor, lease) {
            return self.prefill(PrefillEvent::Redo { seq, why: "the worker does not have its KV any more" });
        }
        let mut outcomes = self.moves(MoveEvent::TargetGone { creditor, lease, reason, keep: false });
        outcomes.push(Outcome::Lost(lost));
        outcomes
    }

    fn on_gmanager(&mut self, body: ControlBody) -> Outcomes {
        match body {
            ControlBody::Registered(registered) => {
                // The gManager may have a different list of workers under the same version.
                let mut outcomes = self.prefill(PrefillEvent::Registered);
                outcomes.extend(self.membership(MembershipEvent::Registered(registered)));
                outcomes
            }
            ControlBody::Rejected(rejected) => {
                self.cx.effects.push(Effect::Rejected { reason: rejected.reason });
                Outcomes::new()
            }
            ControlBody::HeartbeatAck(ack) => self.membership(MembershipEvent::Acknowledged(ack)),
            ControlBody::Fenced(fenced) => self.membership(MembershipEvent::PeerFenced(fenced)),
            ControlBody::DrainOrder(order) => self.membership(MembershipEvent::Drain(order)),
            ControlBody::BorrowAdvice(mut advice) => {
                self.cx.standing.note_pool(advice.pool_blocks_total, self.cx.now_ms);
                advice.pool_blocks_total = self.cx.standing.pool_blocks();
                self.cx.memory.rm.debtor.on_advice(&advice, self.cx.now_ms);
                Outcomes::new()
            }
            ControlBody::Freeze(freeze) => self.batch(BatchEvent::Freeze(freeze)),
            ControlBody::Thaw(thaw) => self.batch(BatchEvent::Thaw { cycle: thaw.cycle }),
            ControlBody::MoveKvCache(order) => self.moves(MoveEvent::Order(order)),
            ControlBody::Workers(workers) => self.prefill(PrefillEvent::Workers(workers)),
            ControlBody::RoleOrder(order) => self.membership(MembershipEvent::Role(order)),
            ControlBody::CacheDrop(order) => {
                self.cx.drop_cached(order);
                Outcomes::new()
            }
            _ => Outcomes::new(),
        }
    }

    fn on_control(&mut self, peer: PeerKey, body: ControlBody) -> Outcomes {
        let close = |reason: String| Effect::Close { peer, reason };
        let body = match body {
            ControlBody::Hello(hello) => return self.membership(MembershipEvent::Hello { peer, hello: *hello }),
            ControlBody::Rejected(rejected) => {
                self.cx.effects.push(close(rejected.reason));
                return Outcomes::new();
            }
            body => body,
        };
        let Some(from) = self.cx.peers.known(peer).map(|known| known.instance) else {
            self.cx.effects.push(close("a peer must say Hello first".to_owned()));
            return Outcomes::new();
        };
        if let ControlBody::Recall(recall) = body {
            return self.moves(MoveEvent::Recall { creditor: from, recall });
        }
        if let ControlBody::RelayMembers(members) = body {
            return self.membership(MembershipEvent::RelayMembers(members));
        }
        if let ControlBody::Joint(message) = body {
            return self.joint(JointEvent::Control { from, message: *message });
        }
        if Prefills::takes(&body) {
            return self.prefill(PrefillEvent::Control { from, body });
        }
        let outcomes = if let ControlBody::LeaseRelease(release) = &body {
            self.creditor(CreditorEvent::Released { from, release: release.clone() })
        } else {
            Outcomes::new()
        };
        if let ControlBody::LeaseRequest(LeaseRequest { request, .. }) = body
            && self.prefill.serves(from, request)
        {
            let reason = format!("{request} is the number of a prefill");
            self.cx.send(peer, ControlBody::LeaseRefuse(LeaseRefuse { request, blocks_lendable: 0, reason }));
            return Outcomes::new();
        }
        if matches!(body, ControlBody::LeaseHashes(_)) && self.cx.memory.prefix.root().is_none() {
            return Outcomes::new();
        }
        if let Some(body) = self.cx.memory.rm.on_peer_control(from, body, self.cx.now_ms) {
            self.cx.send(peer, body);
        }
        outcomes
    }

    fn on_partials(&mut self, peer: PeerKey, frame: PartialsFrame) -> Outcomes {
        let Some(from) = self.cx.peers.known(peer).map(|known| known.instance) else {
            // The ticket may have overtaken the Hello. A refusal saves the debtor the wait for its deadline.
            if let PartialsFrame::Ticket(StepTicket { step, .. }) = frame {
                let (code, detail) = (RefuseCode::UnknownLease, "the connection is not introduced yet".to_owned());
                self.cx.effects.push(Effect::Partials { peer, frame: PartialsFrame::Refused { step, code, detail } });
            }
            return Outcomes::new();
        };
        match frame {
            PartialsFrame::Partial { step, layer, rows: _, out, lse, count } => {
                let part = RemotePart { creditor: from, out, lse, count };
                self.step(StepEvent::Partial { step, layer, part })
            }
            PartialsFrame::Refused { step, code, detail } => {
                self.step(StepEvent::Refused { creditor: from, step, code, detail })
            }
            frame => self.creditor(CreditorEvent::Partials { peer, from, frame }),
        }
    }

    fn on_bulk(&mut self, peer: PeerKey, frame: BulkFrame) -> Outcomes {
        let Some(from) = self.cx.peers.known(peer).map(|known| known.instance) else {
            let id = if let BulkFrame::Read { id, .. } = frame { id } else { 0 };
            if let BulkFrame::Write { lease, .. } | BulkFrame::Read { lease, .. } = frame {
                let (code, detail) = (RefuseCode::UnknownLease, "the connection is not introduced yet".to_owned());
                self.cx.effects.push(Effect::Bulk { peer, frame: BulkFrame::Refused { id, lease, code, detail } });
            }
            return Outcomes::new();
        };
        match frame {
            BulkFrame::Data { id, layer, tokens: _, kv } => match ReadId::from_wire(id) {
                Some(read) if self.reads_at(read) == Some(from) => match read.owner() {
                    ReadOwner::Step => self.step(StepEvent::Fetched { read, layer, kv }),
                    ReadOwner::Move => self.moves(MoveEvent::Data { from, read, layer, kv }),
                },
                _ => Outcomes::new(),
            },
            BulkFrame::Refused { id, lease, code, detail } => {
                self.on_bulk_refused(from, ReadId::from_wire(id), lease, (code, detail))
            }
            frame => self.creditor(CreditorEvent::Bulk { peer, from, frame }),
        }
    }

    /// A creditor refused a read, or a write or seal (`None`) under a lease.
    fn on_bulk_refused(
        &mut self,
        creditor: InstanceId,
        read: Option<ReadId>,
        lease: LeaseId,
        (code, detail): (RefuseCode, String),
    ) -> Outcomes {
        match read {
            Some(read) if self.reads_at(read) != Some(creditor) => Outcomes::new(),
            Some(read) if read.owner() == ReadOwner::Step => self.step(StepEvent::FetchRefused { read, code, detail }),
            read => self.moves(MoveEvent::Refused { creditor, read, lease, code, detail }),
        }
    }

    /// The creditor that a read was sent to. A reply counts only from there.
    fn reads_at(&self, read: ReadId) -> Option<InstanceId> {
        match read.owner() {
            ReadOwner::Step => self.step.reads_at(read),
            ReadOwner::Move => self.moves.reads_at(read),
        }
    }

    fn on_report(&mut self, report: Report) -> Outcomes {
        match report {
            Report::Queries { step, layer, frames } => self.step(StepEvent::Queries { step, layer, frames }),
            Report::Written { step, layer, kv } => self.step(StepEvent::Written { step, layer, kv }),
            Report::Layer { step, layer } => self.step(StepEvent::Layer { step, layer }),
            Report::Appended { step, layer } => self.step(StepEvent::Appended { step, layer }),
            Report::Prompts { step, scores, sums } => self.step(StepEvent::Prompts { step, scores, sums }),
            Report::Done { step, micro_batch, samples } => {
                self.cx.memory.tiers.note_steps(true, true);
                self.step(StepEvent::Done { step, micro_batch, samples })
            }
            Report::Failed { step, micro_batch, error } => self.step(StepEvent::Failed { step, micro_batch, error }),
            Report::Drafted { draft, seqs, error } => {
                self.batch(BatchEvent::Drafted { draft, seqs, failed: error.is_some() })
            }
            Report::Shared { share, error } => self.batch(BatchEvent::Shared { share, error }),
            Report::Staged { stage, error } => self.prefill(PrefillEvent::Staged { stage, error }),
            Report::Memory(counters) => {
                self.cx.memory.counters = Some(counters);
                Outcomes::new()
            }
            Report::Launches(counters) => self.step(StepEvent::Launches(counters)),
            Report::RemotePartial { tag, out, lse, count } => {
                self.creditor(CreditorEvent::Partial { tag, out, lse, count })
            }
            Report::RemoteWritten { bytes, tag, failed } => {
                self.cx.writes.done(bytes);
                if failed {
                    self.cx.memory.rm.distrust_lent();
                }
                match tag.map(|tag| (tag, TagOwner::of(tag))) {
                    Some((tag, TagOwner::Tier)) => self.batch(BatchEvent::Stored(tag)),
                    Some((tag, _)) => self.moves(MoveEvent::Stored(tag)),
                    None => Outcomes::new(),
                }
            }
            Report::RemoteKv { tag, kv } => match TagOwner::of(tag) {
                TagOwner::Move => self.moves(MoveEvent::Read { tag, kv }),
                TagOwner::Tier => {
                    self.cx.on_saved_layer(tag, kv);
                    Outcomes::new()
                }
                TagOwner::Request | TagOwner::Seal => self.creditor(CreditorEvent::Kv { tag, kv }),
            },
            Report::RemoteFailed { tag, error } => match TagOwner::of(tag) {
                TagOwner::Move => self.moves(MoveEvent::Failed { tag, error: error.to_string() }),
                TagOwner::Tier => self.batch(BatchEvent::TierFailed { tag, error }),
                TagOwner::Seal => self.creditor(CreditorEvent::Sealed { tag, sealed: false }),
                TagOwner::Request => self.creditor(CreditorEvent::Failed { tag, error }),
            },
            Report::RemoteSealed { tag } => self.creditor(CreditorEvent::Sealed { tag, sealed: true }),
            Report::Mapped { map, error } => self.step(StepEvent::Mapped { map, mapped: error.is_none() }),
        }
    }

    fn on_tick(&mut self) {
        let ended = self.cx.memory.rm.tick(self.cx.now_ms);
        if !ended.is_empty() {
            self.hand_on(vec![Outcome::LeasesEnded(ended)]);
        }
        let outcomes = self.membership(MembershipEvent::Greet);
        self.hand_on(outcomes);
        let outcomes = self.creditor(CreditorEvent::Tick);
        self.hand_on(outcomes);
        let outcomes = self.moves(MoveEvent::Tick);
        self.hand_on(outcomes);
        let remote_waits_since_ms = self.step.waits_since(MicroBatch::Remote);
        let outcomes = self.batch(BatchEvent::Tick { remote_waits_since_ms });
        self.hand_on(outcomes);
        let outcomes = self.step(StepEvent::Tick);
        self.hand_on(outcomes);
        let outcomes = self.prefill(PrefillEvent::Tick);
        self.hand_on(outcomes);
        let outcomes = self.joint(JointEvent::Tick);
        self.hand_on(outcomes);
        let outcomes = self.membership(MembershipEvent::Tick);
        self.hand_on(outcomes);
    }

    /// Hands outcomes to their machines, and the resulting outcomes, until there are none: mostly there are none at first.
    #[inline]
    fn hand_on(&mut self, outcomes: Outcomes) {
        if !outcomes.is_empty() {
            self.hand_on_all(outcomes);
        }
    }

    fn hand_on_all(&mut self, mut outcomes: Outcomes) {
        let mut rounds = 0;
        while !outcomes.is_empty() {
            rounds += 1;
            assert!(rounds <= ROUNDS_MAX, "outcomes cause each other for ever: {outcomes:?}");
            outcomes = outcomes.into_iter().flat_map(|outcome| self.act_upon(outcome)).collect();
        }
    }

    /// Hands one outcome to its machines, in order.
    fn act_upon(&mut self, outcome: Outcome) -> Outcomes {
        match outcome {
            Outcome::RecallMissed { debtor, missing } => {
                let blocks = missing.min(self.batch.missing_blocks(&self.cx));
                self.creditor(CreditorEvent::Revoke { debtor, blocks })
            }
            Outcome::WantBack { blocks, take } => self.creditor(CreditorEvent::WantBack { blocks, take }),
            Outcome::LeasesEnded(ended) if ended.is_empty() => Outcomes::new(),
            Outcome::LeasesEnded(ended) => self.creditor(CreditorEvent::Ended(ended)),
            Outcome::BrokenUp => self.step(StepEvent::Abort(MicroBatch::Remote)),
            Outcome::Unattended(creditor) => self.step(StepEvent::PeerGone(creditor)),
            Outcome::RoomNeeded => self.moves(MoveEvent::RoomNeeded),
            Outcome::SwapOut { seq, blocks } => self.moves(MoveEvent::SwapOut { seq, blocks }),
            Outcome::SwappedOut { seq, all } => self.batch(BatchEvent::SwappedOut { seq, all }),
            Outcome::BehindWindow { seq } => self.moves(MoveEvent::BehindWindow(seq)),
            Outcome::Ended { seq } => self.prefill(PrefillEvent::Ended(seq)),
            Outcome::Joint(news) => self.joint(JointEvent::News(news)),
            Outcome::KvAppended => self.creditor(CreditorEvent::Appended),
            Outcome::StepLeft { seq } => self.step(StepEvent::Leave(seq)),
            Outcome::Withheld { seq, blocks } => self.prefill(PrefillEvent::Withheld { seq, blocks }),
            Outcome::JobFailed { seq, reason } => self.prefill(PrefillEvent::JobFailed { seq, reason }),
            Outcome::Preempted { seq } => self.prefill(PrefillEvent::Preempted(seq)),
            Outcome::SentAway { seq } => self.prefill(PrefillEvent::SentAway(seq)),
            Outcome::Redo { seq, why } => self.prefill(PrefillEvent::Redo { seq, why }),
            Outcome::Decoded { ms } => self.prefill(PrefillEvent::Decoded { ms }),
            Outcome::Watched { chunks } => self.prefill(PrefillEvent::Watched(chunks)),
            Outcome::Layers { seq, layers } => self.prefill(PrefillEvent::Layers { seq, layers }),
            Outcome::Chunk { seq } => self.prefill(PrefillEvent::Chunk(seq)),
            Outcome::ChunkLeft { seq } => self.prefill(PrefillEvent::ChunkLeft(seq)),
            Outcome::Prefilled { seq, first } => self.prefill(PrefillEvent::Prefilled { seq, first }),
            Outcome::NewLife => self.on_new_life(),
            Outcome::Introduced { peer, hello } => self.membership(MembershipEvent::Introduced { peer, hello }),
            Outcome::Lost(lost) => self.on_lost(lost),
            Outcome::Released { seq } => {
                let mut outcomes = self.moves(MoveEvent::Released(seq));
                outcomes.extend(self.prefill(PrefillEvent::Released(seq)));
                outcomes.extend(self.joint(JointEvent::Released(seq)));
                outcomes
            }
            Outcome::StepDone { ms, growing, other_rows, own } => {
                let mut outcomes = self.moves(MoveEvent::Step { growing, other_rows, ms });
                let own = own.map(|remote_requests_us| CreditorEvent::OwnStep { ms, remote_requests_us });
                outcomes.extend(own.into_iter().flat_map(|own| self.creditor(own)));
                outcomes.extend(self.membership(MembershipEvent::StepDone { ms }));
                outcomes
            }
            Outcome::PeerUp { peer, instance, greeted, lent } => {
                let mut outcomes = Outcomes::new();
                if greeted {
                    outcomes.extend(self.creditor(CreditorEvent::PeerUp { peer, instance }));
                }
                outcomes.extend(self.prefill(PrefillEvent::PeerUp(instance)));
                outcomes.extend(self.joint(JointEvent::PeerUp));
                outcomes.extend(self.step(StepEvent::PeerUp { creditor: instance, lent }));
                outcomes
            }
            Outcome::PeerGone(instance) => self.on_peer_gone(instance),
            Outcome::SendFailed { peer, instance } => {
                let mut outcomes = self.creditor(CreditorEvent::SendFailed { peer, instance });
                outcomes.extend(self.on_creditor_gone(instance, "a frame could not be sent"));
                outcomes
            }
            Outcome::RoleChanged { old } => {
                self.batch.touch();
                if old == Role::Decode { self.prefill(PrefillEvent::LeftWorkers) } else { Outcomes::new() }
            }
        }
    }

    fn on_new_life(&mut self) -> Outcomes {
        let mut outcomes = self.prefill(PrefillEvent::NewLife);
        outcomes.extend(self.joint(JointEvent::NewLife));
        outcomes
    }

    fn on_peer_gone(&mut self, instance: InstanceId) -> Outcomes {
        let mut outcomes = self.creditor(CreditorEvent::PeerDown(instance));
        outcomes.extend(self.prefill(PrefillEvent::PeerGone(instance)));
        outcomes.extend(self.joint(JointEvent::PeerGone(instance)));
        outcomes.extend(self.on_creditor_gone(instance, "the connection to a creditor was lost"));
        outcomes.push(Outcome::Unattended(instance));
        outcomes
    }

    /// Ends the moves and the step of a sequence that lost KV; then the batch finds new places.
    fn on_lost(&mut self, lost: Lost) -> Outcomes {
        if !self.batch.has_lost(&lost) {
            return Outcomes::new();
        }
        let Lost { seq, creditor, .. } = lost;
        let mut outcomes = self.joint(JointEvent::Lost(seq));
        if !self.batch.has_lost(&lost) {
            return outcomes;
        }
        outcomes.extend(self.moves(MoveEvent::CreditorGone { creditor, seq: Some(seq) }));
        if self.batch.in_step(seq) {
            outcomes.extend(self.step(StepEvent::Leave(seq)));
        }
        outcomes.extend(self.batch(BatchEvent::Lost(lost)));
        outcomes
    }

    fn on_creditor_gone(&mut self, creditor: InstanceId, why: &'static str) -> Outcomes {
        let mut outcomes = self.moves(MoveEvent::CreditorGone { creditor, seq: None });
        outcomes.extend(self.batch(BatchEvent::CreditorGone { creditor, why }));
        outcomes
    }

    fn batch(&mut self, event: BatchEvent) -> Outcomes {
        let others = Others { prefills: &self.prefill, moves: &self.moves };
        self.batch.handle(&mut self.cx, others, event)
    }

    fn step(&mut self, event: StepEvent) -> Outcomes {
        let others = Others { prefills: &self.prefill, moves: &self.moves };
        self.step.handle(&mut self.cx, &mut self.batch, others, event)
    }

    fn creditor(&mut self, event: CreditorEvent) -> Outcomes {
        self.creditor.handle(&mut self.cx, event)
    }

    fn prefill(&mut self, event: PrefillEvent) -> Outcomes {
        self.prefill.handle(&mut self.cx, &mut self.batch, event)
    }

    fn joint(&mut self, event: JointEvent) -> Outcomes {
        let others = Others { prefills: &self.prefill, moves: &self.moves };
        self.joint.handle(&mut self.cx, &mut self.batch, others, event)
    }

    fn moves(&mut self, event: MoveEvent) -> Outcomes {
        self.moves.handle(&mut self.cx, &mut self.batch, event)
    }

    fn membership(&mut self, event: MembershipEvent) -> Outcomes {
        let Self { cx, batch, step, creditor, prefill: prefills, moves, membership, .. } = self;
        membership.handle(cx, Look { batch, step, creditor, prefills, moves }, event)
    }
}

/// Whether an event may change inputs of batch decisions without calling [`crate::batch::due::Due::touch`] itself: not
/// ticks, nor frames and reports for steps, moves and peers.
fn may_concern_batch(event: &Event) -> bool {
    match event {
        Event::Tick | Event::Rtt { .. } | Event::Partials { .. } | Event::Bulk { .. } => false,
        Event::Runner(report) => !matches!(
            report,
            Report::Queries { .. }
                | Report::Written { .. }
                | Report::Layer { .. }
                | Report::Appended { .. }
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
