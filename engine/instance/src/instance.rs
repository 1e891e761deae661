//! The instance itself: its state, the dispatch of events, and the pump that starts whatever can start.

use crate::config::InstanceConfig;
use crate::event::{Effect, Event, PeerKey};
use crate::freeze::FrozenDebt;
use crate::guests::Guests;
use crate::lanes::Lanes;
use crate::membership::Membership;
use crate::moves::Moves;
use crate::peers::Peers;
use crate::prefill::Prefills;
use crate::prefix::Prefixes;
use crate::reach::Reaches;
use crate::roles::Roles;
use crate::sequence::Sequence;
use crate::steps::InFlight;
use crate::threshold::Threshold;
use lagoon_backend::{KvCounters, LaunchCounters};
use lagoon_cluster::{ConfigError, LeaseEnded, RManager, RManagerConfig};
use lagoon_protocol::{BulkFrame, ControlBody, PartialsFrame, RefuseCode, Role, StepTicket};
use lagoon_runner::{Command, Report};
use lagoon_sched::Scheduler;
use lagoon_types::limits::{ADMISSION_DEADLINE_MS, LEASE_TTL_MS, QUEUE_DEFAULT, STEP_DEADLINE_MS};
use lagoon_types::{
    FinishReason, GenerateRequest, InstanceId, KvSpace, Lane, LeaseId, PhysBlock, RequestError, SeqId, StepId,
    TokenEvent,
};
use std::collections::BTreeMap;

/// See the crate's documentation.
#[derive(Debug)]
pub struct Instance {
    pub(crate) config: InstanceConfig,
    pub(crate) now_ms: u64,
    /// Given by the gManager; `None` until then, or without one.
    pub(crate) id: Option<InstanceId>,
    /// The gManager is connected and knows this instance.
    pub(crate) registered: bool,
    /// rBlocks of the whole pool, this instance's included, as the gManager last said.
    pub(crate) pool_blocks_total: u64,
    /// What the device last said of mapping memory.
    pub(crate) memory: Option<KvCounters>,
    pub(crate) launches: Option<LaunchCounters>,
    pub(crate) sched: Scheduler,
    pub(crate) rm: RManager,
    pub(crate) seqs: BTreeMap<SeqId, Sequence>,
    pub(crate) peers: Peers,
    pub(crate) guests: Guests,
    pub(crate) reaches: Reaches,
    pub(crate) threshold: Option<Threshold>,
    pub(crate) moves: Moves,
    pub(crate) prefills: Prefills,
    pub(crate) prefixes: Prefixes,
    pub(crate) lanes: [Option<InFlight>; 2],
    pub(crate) division: Lanes,
    /// Time that a step may go without progress.
    pub(crate) step_deadline_ms: u64,
    /// A sequence that gives its memory up when its step ends, and the one that it is for.
    pub(crate) yielding: Option<(SeqId, SeqId)>,
    /// Reads under way: step, layer and index of the fetch.
    pub(crate) reads: BTreeMap<u64, (StepId, u32, usize)>,
    pub(crate) next_step: u64,
    pub(crate) next_read: u64,
    pub(crate) effects: Vec<Effect>,
    pub(crate) preemptions: u64,
    pub(crate) recoveries: u64,
    pub(crate) recomputed_tokens: u64,
    pub(crate) preempted_tokens: u64,
    /// Blocks that were lent to its sequences, moves left out.
    pub(crate) borrowed_blocks: u64,
    pub(crate) offloads: u64,
    /// Measured time of one row of a prompt, in microseconds; 0 before.
    pub(crate) prefill_us: f64,
    /// Since when no gManager was there to ask, if it was before.
    pub(crate) away_since_ms: Option<u64>,
    pub(crate) frozen: Option<FrozenDebt>,
    pub(crate) membership: Membership,
    pub(crate) roles: Roles,
}

impl Instance {
    /// An idle instance with an empty pool.
    ///
    /// # Errors
    /// [`ConfigError`] for sizes that cannot work.
    pub fn new(config: InstanceConfig) -> Result<Self, ConfigError> {
        let rm = RManager::new(RManagerConfig {
            blocks_total: config.blocks_total,
            block_tokens: config.block_tokens,
            lend_blocks_max: config.lend_blocks_max,
            lend_reserve_blocks: config.lend_reserve_blocks,
            shape: config.kv,
            lease_ttl_ms: LEASE_TTL_MS,
            incarnation: config.incarnation,
        })?;
        Ok(Self {
            sched: Scheduler::new(config.sched),
            rm,
            now_ms: 0,
            id: None,
            registered: false,
            pool_blocks_total: u64::from(config.blocks_total),
            memory: None,
            launches: None,
            seqs: BTreeMap::new(),
            peers: Peers::default(),
            guests: Guests::default(),
            reaches: Reaches::default(),
            threshold: Threshold::of(&config),
            moves: Moves::new(config.kv.layers, config.block_tokens),
            prefills: Prefills::new(&config),
            prefixes: Prefixes::new(&config),
            lanes: [None, None],
            division: Lanes::default(),
            step_deadline_ms: STEP_DEADLINE_MS,
            yielding: None,
            reads: BTreeMap::new(),
            next_step: 0,
            next_read: 0,
            effects: Vec::new(),
            preemptions: 0,
            recoveries: 0,
            recomputed_tokens: 0,
            preempted_tokens: 0,
            borrowed_blocks: 0,
            offloads: 0,
            prefill_us: 0.0,
            away_since_ms: None,
            frozen: None,
            membership: Membership::new(config.incarnation),
            roles: Roles::new(config.role),
            config,
        })
    }

    /// For simulations with a stand-in of the model, in which one exchange stands for those of many layers and a byte for
    /// many: a step may go without progress for `step_deadline_ms` instead of [`STEP_DEADLINE_MS`], and
    /// `move_bytes_in_flight` bytes of moves may be under way.
    pub fn scale_limits(&mut self, step_deadline_ms: u64, move_bytes_in_flight: u64) {
        self.step_deadline_ms = step_deadline_ms;
        self.moves.set_bytes_in_flight_max(move_bytes_in_flight);
    }

    /// Takes one event at `now_ms` (which never goes back) and says what to do, in order.
    pub fn handle(&mut self, event: Event, now_ms: u64) -> Vec<Effect> {
        self.now_ms = self.now_ms.max(now_ms);
        match event {
            Event::Submit { seq, request } => self.on_submit(seq, request),
            Event::Cancel { seq } => self.on_cancel(seq),
            Event::GManagerUp => self.on_gmanager_up(),
            Event::GManagerDown => self.registered = false,
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
        self.release_freed();
        std::mem::take(&mut self.effects)
    }

    /// Has the device map memory behind the addresses of this space, instead of one slot being one piece of memory. To be
    /// called before the first event.
    ///
    /// # Errors
    /// [`ConfigError`] if the space is not one for the configured blocks.
    pub fn address_kv(&mut self, space: KvSpace) -> Result<(), ConfigError> {
        self.rm.address(space)
    }

    /// Tells the device which addresses nobody uses any more. Called before every command that may use them anew.
    pub(crate) fn release_freed(&mut self) {
        let freed = self.rm.take_freed();
        self.release_blocks(freed);
    }

    pub(crate) fn release_blocks(&mut self, mut freed: Vec<PhysBlock>) {
        if freed.is_empty() {
            return;
        }
        freed.sort_unstable();
        let tokens = self.config.block_tokens;
        let runs = freed.chunk_by(|a, b| a.0 + 1 == b.0);
        let slots = runs.map(|run| run[0].0 * tokens..(run[run.len() - 1].0 + 1) * tokens).collect();
        self.effects.push(Effect::Runner(Command::Release { slots }));
    }

    /// Starts whatever can start.
    fn pump(&mut self) {
        self.drain_rmanager();
        self.switch_moves();
        self.end_parking();
        self.end_yielding();
        // What runs grows before anything new comes in: what a preempted sequence gave up must not go back to it.
        self.grow();
        self.resume_parked();
        self.admit();
        self.dispatch();
        self.pump_pulls();
        self.divide();
        self.rm.set_growth_reserve(self.growth_reserve());
        self.rm.set_waiting(self.waiting_since_ms(), self.membership.elder(self.now_ms));
        if !self.waits_for_copy() {
            for lane in Lane::ALL {
                self.start_lane(lane);
                self.note_step(lane);
            }
        }
        self.drain_rmanager();
        self.pump_moves();
        self.drain_rmanager();
    }

    fn on_submit(&mut self, seq: SeqId, request: GenerateRequest) {
        if let Err(error) = self.accept(seq, request) {
            self.effects.push(Effect::Emit { seq, event: TokenEvent::Failed(error) });
        }
    }

    /// Tells a client of its request. What is computed for others has none: whoever asked is told if it failed.
    pub(crate) fn emit(&mut self, seq: SeqId, event: TokenEvent) {
        if !self.prefills.is_job(seq) {
            self.effects.push(Effect::Emit { seq, event });
        } else if let TokenEvent::Failed(error) = event {
            self.job_failed(seq, error.to_string());
        }
    }

    /// Longest sequence that could be held if the whole pool were free, in tokens.
    #[must_use]
    pub fn pool_tokens(&self) -> u64 {
        self.pool_blocks_total.max(u64::from(self.config.blocks_total)) * u64::from(self.config.block_tokens)
    }

    /// Whether it is one of those that take clients' requests.
    fn takes_requests(&self) -> Result<(), RequestError> {
        if self.roles.accepts(self.now_ms) {
            return Ok(());
        }
        // Clients of one whose role changed ask another one.
        let why = match self.roles.now() {
            Role::Kv => "this node lends memory only (--role kv)",
            Role::Prefill if self.config.role == Role::Prefill => {
                "this instance computes prompts for decode workers only (--role prefill)"
            }
            _ => {
                let why = "this instance changes or has changed its role, and takes no requests any more";
                return Err(RequestError::Unavailable(why.to_owned()));
            }
        };
        Err(RequestError::Invalid(why.to_owned()))
    }

    fn accept(&mut self, seq: SeqId, mut request: GenerateRequest) -> Result<(), RequestError> {
        self.takes_requests()?;
        if self.membership.drained {
            return Err(RequestError::Unavailable("this instance was drained and stops".to_owned()));
        }
        if request.prompt.is_empty() || request.max_tokens == 0 {
            return Err(RequestError::Invalid(
                "a request needs a prompt and at least one token to generate".to_owned(),
            ));
        }
        if let Some(id) = request.prompt.iter().find(|id| **id >= self.config.vocab) {
            return Err(RequestError::Invalid(format!(
                "token id {id} is not in the vocabulary of {} tokens",
                self.config.vocab
            )));
        }
        if request.answered as usize >= request.prompt.len() || request.answered >= request.max_tokens {
            let GenerateRequest { answered, max_tokens, .. } = request;
            return Err(RequestError::Invalid(format!(
                "an answer of {max_tokens} tokens cannot go on after {answered}, or has no prompt"
            )));
        }
        let known_tokens = request.prompt.len() as u64;
        let prompt_tokens = known_tokens - u64::from(request.answered);
        let too_long = |needed_tokens, limit_tokens, limit_name| RequestError::TooLong {
            prompt_tokens,
            needed_tokens,
            limit_tokens,
            limit_name,
        };
        let (positions, pool) = (u64::from(self.config.max_positions), self.pool_tokens());
        if prompt_tokens + u64::from(request.max_tokens) > positions {
            let needed = prompt_tokens + u64::from(request.max_tokens);
            return Err(too_long(needed, positions, "the model's context"));
        }
        // Under a window only the window is held, but a prompt is planned whole: the bound is the same.
        if known_tokens + 1 > pool {
            return Err(too_long(known_tokens + 1, pool, "the KV capacity of the whole pool"));
        }
        // What the pool cannot hold is not generated: the answer ends for its length. A window that fits is always held.
        let held = self.config.window.map(|w| u64::from(w) + 2 * u64::from(self.config.block_tokens));
        if held.is_none_or(|held| held > pool) {
            let room = u32::try_from(pool - prompt_tokens).unwrap_or(u32::MAX);
            request.max_tokens = request.max_tokens.min(room);
        }
        let tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        let full = |limit| RequestError::QueueFull { queued: limit, limit };
        if !self.sends_away() {
            self.sched.enqueue(seq, tokens, self.now_ms).map_err(|queue| full(queue.limit))?;
        } else if self.waiting() >= self.config.sched.queue {
            return Err(full(self.config.sched.queue));
        } else {
            self.send_away(seq);
        }
        self.seqs.insert(seq, Sequence::new(seq, request, self.config.block_tokens, self.now_ms));
        Ok(())
    }

    /// Requests that wait to be admitted, or for their prompts.
    pub(crate) fn waiting(&self) -> usize {
        self.sched.waiting().len() + self.prefills.away.len()
    }

    pub(crate) fn on_cancel(&mut self, seq: SeqId) {
        let Some(entry) = self.seqs.get_mut(&seq) else { return };
        if self.sched.in_step(seq) {
            entry.cancelled = true;
        } else {
            self.remove(seq);
        }
    }

    /// Ends a sequence well.
    pub(crate) fn finish(&mut self, seq: SeqId, reason: FinishReason) {
        if let Some(entry) = self.seqs.get(&seq) {
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
        if self.defer_end(seq) {
            return;
        }
        self.give_up_away(seq);
        self.release_memory(seq);
        self.sched.remove(seq);
        self.seqs.remove(&seq);
    }

    fn on_gmanager(&mut self, body: ControlBody) {
        match body {
            ControlBody::Registered(registered) => self.on_registered(&registered),
            ControlBody::Rejected(rejected) => self.effects.push(Effect::Rejected { reason: rejected.reason }),
            ControlBody::HeartbeatAck(ack) => self.on_heartbeat_ack(&ack),
            ControlBody::Fenced(fenced) => self.on_peer_fenced(&fenced),
            ControlBody::DrainOrder(order) => self.on_drain_order(order),
            ControlBody::BorrowAdvice(advice) => {
                self.pool_blocks_total = advice.pool_blocks_total;
                self.rm.on_advice(&advice, self.now_ms);
            }
            ControlBody::Freeze(freeze) => self.on_freeze(&freeze),
            ControlBody::Thaw(thaw) => self.on_thaw(thaw.cycle),
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
            self.effects.push(Effect::Close { peer, reason: rejected.reason });
            return;
        }
        let Some(known) = self.peers.known(peer) else {
            let reason = "a peer must say Hello first".to_owned();
            self.effects.push(Effect::Close { peer, reason });
            return;
        };
        if let ControlBody::Recall(recall) = &body {
            self.on_recall(known.instance, recall);
            return;
        }
        if let ControlBody::LeaseRelease(release) = &body {
            // The debtor ended those steps itself.
            let tokens = |entries: u32| entries.saturating_mul(self.config.block_tokens);
            let freed = tokens(release.first)..tokens(release.entries);
            self.guests.forget_lease(known.instance, LeaseId(release.lease), &freed);
        }
        let Some(body) = self.on_prefill_control(known.instance, body) else { return };
        if let Some(body) = self.rm.on_peer_control(known.instance, body, self.now_ms) {
            self.effects.push(Effect::Control { peer, body });
        }
    }

    fn on_partials(&mut self, peer: PeerKey, frame: PartialsFrame) {
        let Some(known) = self.peers.known(peer) else {
            // It may have overtaken the Hello. A debtor that is told does not wait for the deadline.
            if let PartialsFrame::Ticket(StepTicket { step, .. }) = frame {
                let (code, detail) = (RefuseCode::UnknownLease, "the connection is not introduced yet".to_owned());
                self.effects.push(Effect::Partials { peer, frame: PartialsFrame::Refused { step, code, detail } });
            }
            return;
        };
        match frame {
            PartialsFrame::Partial { step, layer, rows, out, lse, count } => {
                self.on_partial(known.instance, step, layer, rows, out, lse, count);
            }
            PartialsFrame::Refused { step, code, detail } => self.on_step_refused(known.instance, step, code, &detail),
            frame => self.on_guest_partials(peer, known.instance, frame),
        }
    }

    fn on_bulk(&mut self, peer: PeerKey, frame: BulkFrame) {
        let Some(known) = self.peers.known(peer) else {
            let id = if let BulkFrame::Read { id, .. } = frame { id } else { 0 };
            if let BulkFrame::Write { lease, .. } | BulkFrame::Read { lease, .. } = frame {
                let (code, detail) = (RefuseCode::UnknownLease, "the connection is not introduced yet".to_owned());
                self.effects.push(Effect::Bulk { peer, frame: BulkFrame::Refused { id, lease, code, detail } });
            }
            return;
        };
        match frame {
            BulkFrame::Data { id, layer, tokens: _, kv } => {
                if !self.on_move_data(known.instance, id, layer, kv.clone()) {
                    self.on_fetched(id, layer, kv);
                }
            }
            BulkFrame::Refused { id, lease, code, detail } => {
                self.on_bulk_refused(known.instance, id, lease, code, &detail);
            }
            frame => self.on_guest_bulk(peer, known.instance, frame),
        }
    }

    fn on_report(&mut self, report: Report) {
        match report {
            Report::Queries { step, layer, frames } => self.on_queries(step, layer, frames),
            Report::Written { step, layer, kv } => self.on_written(step, layer, kv),
            Report::Layer { step, layer } => self.on_layer(step, layer),
            Report::Done { step, lane, samples } => {
                self.note_step_done(step, lane);
                self.on_done(step, lane, samples);
            }
            Report::Failed { step, lane, error } => self.on_step_failed(step, lane, &error),
            Report::Shared { share, error } => self.on_shared(share, error.as_ref()),
            Report::Staged { stage, error } => self.on_staged(stage, error.as_ref()),
            Report::Memory(counters) => self.memory = Some(counters),
            Report::Launches(counters) => self.launches = Some(counters),
            Report::GuestPartial { tag, out, lse, count } => self.on_guest_partial(tag, out, lse, count),
            Report::GuestWritten { bytes, tag } => {
                self.on_guest_written(bytes);
                tag.into_iter().for_each(|tag| self.on_move_stored(tag));
            }
            Report::GuestKv { tag, kv } => {
                if !self.on_move_kv(tag, &kv) {
                    self.on_guest_kv(tag, kv);
                }
            }
            Report::GuestFailed { tag, error } => {
                if !self.on_move_failed(tag, &error.to_string()) && !self.on_guest_sealed(tag, false) {
                    self.on_guest_failed(tag, &error);
                }
            }
            Report::GuestSealed { tag } => drop(self.on_guest_sealed(tag, true)),
            Report::Mapped { map, error } => self.on_mapped(map, error.is_none()),
        }
    }

    fn on_tick(&mut self) {
        let now = self.now_ms;
        let ended = self.rm.tick(now);
        self.forget_ended(&ended);
        self.greet();
        self.expire_threshold();
        self.expire_recalls();
        self.expire_moves();
        self.expire_guests();
        self.expire_dialling();
        self.expire_freeze();
        self.break_up();
        self.expire_steps();
        self.expire_waiting();
        self.expire_jobs();
        self.expire_away();
        self.tick_role();
        self.tick_workers();
        self.tick_reader();
        self.tick_membership();
    }

    /// Leases that are not lent any more: steps of peers that attend to them end, and the peers are told.
    pub(crate) fn forget_ended(&mut self, ended: &[LeaseEnded]) {
        for lease in ended {
            let steps = self.guests.forget_lease(lease.debtor, lease.lease, &(0..u32::MAX));
            let Some(peer) = self.peers.key(lease.debtor) else { continue };
            for step in steps {
                let (code, detail) = (RefuseCode::UnknownLease, format!("{} ended", lease.lease));
                self.effects.push(Effect::Partials { peer, frame: PartialsFrame::Refused { step, code, detail } });
            }
        }
    }

    /// Fails what waited for admission too long.
    fn expire_waiting(&mut self) {
        let now = self.now_ms;
        let late = |w: &&lagoon_sched::Waiting| self.seqs.get(&w.seq).is_some_and(|s| s.admit_by_ms <= now);
        let late: Vec<SeqId> = self.sched.waiting().filter(late).map(|w| w.seq).take(QUEUE_DEFAULT).collect();
        for seq in late {
            let message = format!("no memory became free within {} s", ADMISSION_DEADLINE_MS / 1000);
            self.fail(seq, RequestError::Unavailable(message));
        }
    }

    /// Whether a sequence may advance.
    pub(crate) fn is_ready(seqs: &BTreeMap<SeqId, Sequence>, seq: SeqId) -> bool {
        seqs.get(&seq).is_some_and(Sequence::is_ready)
    }
}
