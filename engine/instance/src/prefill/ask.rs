//! The decode worker: which prefill workers there are, who is given which prompt, and what becomes of it.
//!
//! It keeps a connection to every worker that the gManager announced, also while there is no gManager. A prompt goes to
//! the connected worker with the fewest tokens to compute until it is done: those that are queued there, and those of the
//! prompt less what the worker may have computed before (`affinity.rs`); what a worker refuses, loses or does not answer goes to another
//! one, with the tokens that were generated meanwhile, so that none is said twice. When none takes it for a while, this
//! instance computes it itself.

use super::Key;
use super::landing::Landing;
use crate::event::Effect;
use crate::instance::Instance;
use lagoon_cluster::BorrowedLease;
use lagoon_kv::RemoteEntries;
use lagoon_protocol::{
    ControlBody, PrefillCancel, PrefillReady, PrefillRefused, PrefillRenew, PrefillRenewed, PrefillRequest,
    PrefillSampling, Role, Workers,
};
use lagoon_transfer::Offer;
use lagoon_types::limits::{
    ADMISSION_DEADLINE_MS, CONNECT_DEADLINE_MS, LEASE_RENEW_MS, LEASE_TTL_MS, PREFILL_ASKED_MAX, PREFILL_GRACE_MS,
    PREFILL_REST_MS, PREFILL_TOKENS_MAX, PREFILL_TRIES_MAX, PREFILL_WAIT_MS, WORKERS_MAX,
};
use lagoon_types::{Epoch, InstanceId, LeaseId, RequestError, SeqId, TokenEvent, TokenLogprobs};
use std::collections::BTreeMap;

/// A worker that computes prompts for others.
#[derive(Debug)]
pub(super) struct WorkerState {
    pub(super) quic_addr: String,
    role: Role,
    blocks_total: u32,
    /// The gManager's last list has it. One that is not there is given nothing more.
    listed: bool,
    /// As it last said, and what it was given since.
    queued_tokens: u64,
    dialled_ms: Option<u64>,
    /// The question after its requests that it was sent last, if it was not answered.
    asked: Option<(u64, u64)>,
    asked_ms: u64,
    /// Why its KV cannot be read.
    pub(super) unreadable: Option<String>,
}

/// Where the prompt of a sequence is.
#[derive(Debug)]
pub(super) enum Stage {
    /// With nobody.
    Waiting,
    /// Being computed, as this request; what is confirmed of it was sent then. Pushed, it is read already; pulled, its
    /// export may be known before the answer that names it.
    Asked {
        worker: InstanceId,
        request: u64,
        tokens: u32,
        confirmed_ms: u64,
        landing: Option<Landing>,
        offer: Option<Offer>,
    },
    /// Computed; it waits for memory here.
    Ready(Handed),
    /// Computed, and being read since then.
    Pulling { handed: Handed, landing: Landing, since_ms: u64 },
}

impl Stage {
    /// What it is read into.
    pub(super) fn landing(&self) -> Option<&Landing> {
        match self {
            Self::Asked { landing, .. } => landing.as_ref(),
            Self::Pulling { landing, .. } => Some(landing),
            Self::Waiting | Self::Ready(_) => None,
        }
    }

    pub(super) fn landing_mut(&mut self) -> Option<&mut Landing> {
        match self {
            Self::Asked { landing, .. } => landing.as_mut(),
            Self::Pulling { landing, .. } => Some(landing),
            Self::Waiting | Self::Ready(_) => None,
        }
    }
}

/// KV that a worker computed.
#[derive(Clone, Debug)]
pub(super) struct Handed {
    pub(super) lease: BorrowedLease,
    /// Tokens that it is of.
    pub(super) tokens: u32,
    pub(super) request: u64,
    /// Its export, or the last one.
    pub(super) export: u64,
    /// It can be read, as this.
    pub(super) offer: Option<Offer>,
    pub(super) ready_ms: u64,
    pub(super) queued_ms: u64,
    pub(super) prefill_ms: u64,
    /// The worker's connection broke: it has until then to come back.
    pub(super) lost_at_ms: Option<u64>,
}

impl Handed {
    pub(super) fn entries(&self, first: u32) -> RemoteEntries {
        let BorrowedLease { creditor, lease, epoch, blocks, .. } = self.lease;
        RemoteEntries { creditor, lease, epoch, first, entries: blocks }
    }
}

/// A sequence whose prompt is computed elsewhere.
#[derive(Debug)]
pub(super) struct Away {
    pub(super) stage: Stage,
    pub(super) since_ms: u64,
    /// When it was given to the worker that has it.
    pub(super) asked_ms: u64,
    tries: u32,
    /// Until then it waits for a worker.
    wait_by_ms: u64,
    /// Since when workers refuse it whenever they are asked.
    refused_ms: Option<u64>,
    /// Workers that refused it, and until when they are not asked again.
    resting: BTreeMap<InstanceId, u64>,
}

impl Away {
    fn new(now_ms: u64) -> Self {
        let wait_by_ms = now_ms + PREFILL_WAIT_MS;
        Self {
            stage: Stage::Waiting,
            since_ms: now_ms,
            asked_ms: now_ms,
            tries: 0,
            wait_by_ms,
            refused_ms: None,
            resting: BTreeMap::new(),
        }
    }

    pub(super) fn landing(&self) -> usize {
        self.stage.landing().map_or(0, |landing| landing.blocks.len())
    }

    pub(super) fn handed(&self) -> Option<&Handed> {
        match &self.stage {
            Stage::Ready(handed) | Stage::Pulling { handed, .. } => Some(handed),
            Stage::Waiting | Stage::Asked { .. } => None,
        }
    }

    fn handed_mut(&mut self) -> Option<&mut Handed> {
        match &mut self.stage {
            Stage::Ready(handed) | Stage::Pulling { handed, .. } => Some(handed),
            Stage::Waiting | Stage::Asked { .. } => None,
        }
    }
}

impl Instance {
    /// The gManager's list of workers.
    pub(crate) fn on_workers(&mut self, m: &Workers) {
        // It may have been sent before the gManager heard that the role changed.
        if !self.membership.roles.reads() {
            return;
        }
        self.prefill.version = m.version;
        self.prefill.workers.values_mut().for_each(|w| w.listed = false);
        for worker in m.workers.iter().take(WORKERS_MAX).filter(|w| Some(InstanceId(w.instance)) != self.membership.id)
        {
            let entry = self.prefill.workers.entry(InstanceId(worker.instance)).or_insert_with(|| WorkerState {
                quic_addr: String::new(),
                role: worker.role(),
                blocks_total: 0,
                listed: true,
                queued_tokens: 0,
                dialled_ms: None,
                asked: None,
                asked_ms: 0,
                unreadable: None,
            });
            entry.quic_addr.clone_from(&worker.quic_addr);
            (entry.role, entry.blocks_total, entry.listed) = (worker.role(), worker.blocks_total, true);
        }
        self.tick_workers();
    }

    /// This instance is no decode worker any more: it needs none of them.
    pub(crate) fn leave_workers(&mut self) {
        self.prefill.version = 0;
        self.prefill.workers.values_mut().for_each(|w| w.listed = false);
    }

    /// Connects to workers that are not connected, and forgets those that left and have nothing of this instance.
    pub(crate) fn tick_workers(&mut self) {
        let now_ms = self.cx.now_ms;
        if self.prefill.workers.is_empty() {
            return;
        }
        let used = |id: &InstanceId| self.prefill.away.values().filter_map(worker_of).any(|user| user == *id);
        // Without a gManager nobody leaves.
        let leaves = |id: &InstanceId, w: &WorkerState| self.membership.is_registered() && !w.listed && !used(id);
        let gone = self.prefill.workers.iter().filter(|(id, w)| leaves(id, w));
        let gone: Vec<InstanceId> = gone.map(|(id, _)| *id).collect();
        for id in gone {
            self.prefill.workers.remove(&id);
            self.disconnect_reader(id);
        }
        let ids: Vec<InstanceId> = self.prefill.workers.keys().copied().collect();
        for id in ids {
            let connected = self.cx.peers.key(id).is_some();
            let Some(worker) = self.prefill.workers.get_mut(&id) else { continue };
            if connected {
                worker.dialled_ms = None;
                self.connect_reader(id);
                self.ask_worker(id);
            } else if worker.dialled_ms.is_none_or(|at| now_ms >= at + CONNECT_DEADLINE_MS / 5) {
                worker.dialled_ms = Some(now_ms);
                let quic_addr = worker.quic_addr.clone();
                self.cx.effects.push(Effect::Connect { instance: id, quic_addr });
            }
        }
    }

    /// Says which requests are still wanted, and asks how much the worker has to do.
    fn ask_worker(&mut self, id: InstanceId) {
        let now_ms = self.cx.now_ms;
        let silent = |worker: &WorkerState| worker.asked.is_some_and(|(_, at)| now_ms > at + LEASE_TTL_MS / 2);
        if self.prefill.workers.get(&id).is_some_and(silent) {
            self.redo_asked(id, "the worker does not answer");
        }
        self.prefill.renewals += 1;
        let seq = self.prefill.renewals;
        let Some(worker) = self.prefill.workers.get_mut(&id) else { return };
        if now_ms < worker.asked_ms + LEASE_RENEW_MS && worker.asked_ms != 0 {
            return;
        }
        let requests = self.prefill.away.values().filter_map(|away| match away.stage {
            Stage::Asked { worker, request, .. } if worker == id => Some(request),
            _ => None,
        });
        let requests: Vec<u64> = requests.collect();
        worker.asked_ms = now_ms;
        worker.asked.get_or_insert((seq, now_ms)).0 = seq;
        self.cx.send_if_connected(id, ControlBody::PrefillRenew(PrefillRenew { seq, requests }));
    }

    pub(super) fn on_prefill_renewed(&mut self, from: InstanceId, m: &PrefillRenewed) {
        let Some(worker) = self.prefill.workers.get_mut(&from) else { return };
        let sent_ms = worker.asked_ms;
        let Some((_, _)) = worker.asked.take_if(|(seq, _)| *seq == m.seq) else { return };
        worker.queued_tokens = m.queued_tokens;
        let mut lost = Vec::new();
        for (seq, away) in &mut self.prefill.away {
            let Stage::Asked { worker, request, confirmed_ms, .. } = &mut away.stage else { continue };
            // It may have been asked after the question.
            if *worker != from || away.asked_ms >= sent_ms {
                continue;
            }
            if m.unknown.contains(request) {
                lost.push(*seq);
            } else {
                *confirmed_ms = (*confirmed_ms).max(sent_ms);
            }
        }
        lost.into_iter().for_each(|seq| self.redo(seq, "the worker does not know it"));
    }

    /// The prompt of a sequence that waits, or is new, is to be computed elsewhere.
    pub(crate) fn send_away(&mut self, seq: SeqId) {
        self.batch.send_away(seq);
        self.prefill.away.insert(seq, Away::new(self.cx.now_ms));
    }

    /// Whether prompts of this instance's requests are computed by others.
    pub(crate) fn sends_away(&self) -> bool {
        self.membership.roles.sends_away() && self.prefill.reader.is_some()
    }

    /// Gives prompts that nobody has to workers.
    pub(crate) fn dispatch(&mut self) {
        if self.prefill.away.is_empty() {
            return;
        }
        // As at admission: what is younger than the pool's oldest waiting request takes no memory before it.
        let may = |seq: &SeqId| self.batch.seq(*seq).is_some_and(|seq| !self.gives_way(seq.since_ms));
        let waiting = |seq: &SeqId, away: &Away| matches!(away.stage, Stage::Waiting) && may(seq);
        let waiting = self.prefill.away.iter().filter(|(seq, away)| waiting(seq, away));
        let ids: Vec<SeqId> = waiting.map(|(seq, _)| *seq).collect();
        for seq in ids {
            match self.choose_worker(seq) {
                Some((worker, known)) if self.pushes() => {
                    let Some(landing) = self.reserve(seq) else { return self.wait_for_memory(seq) };
                    self.ask_prefill(seq, worker, known, Some(landing));
                }
                Some((worker, known)) => self.ask_prefill(seq, worker, known, None),
                None if self.prefill.away.get(&seq).is_some_and(|a| a.wait_by_ms <= self.cx.now_ms) => {
                    self.compute_here(seq);
                }
                None => self.wake_dispatch(seq),
            }
        }
    }

    /// No worker takes a prompt now: that may be different when one has rested, and ends when it has waited for long enough.
    fn wake_dispatch(&mut self, seq: SeqId) {
        let Some(away) = self.prefill.away.get(&seq) else { return };
        let rested = away.resting.values().copied().filter(|until_ms| *until_ms > self.cx.now_ms);
        rested.chain([away.wait_by_ms]).for_each(|at_ms| self.batch.due.wake_at(at_ms));
    }

    /// The worker that would be done with a prompt first of those that could do it now, and the tokens that it may not have
    /// to compute; one that also decodes only if no other can.
    fn choose_worker(&mut self, seq: SeqId) -> Option<(InstanceId, u32)> {
        let (now_ms, away) = (self.cx.now_ms, self.prefill.away.get(&seq)?);
        let needed = self.batch.seq(seq)?.len().div_ceil(self.cx.config.block_tokens);
        let mut asked: BTreeMap<InstanceId, usize> = BTreeMap::new();
        self.prefill.away.values().filter_map(worker_of).for_each(|worker| *asked.entry(worker).or_default() += 1);
        let can = |(id, worker): &(&InstanceId, &WorkerState)| {
            worker.listed
                && worker.blocks_total >= needed
                && self.cx.peers.key(**id).is_some()
                && self.is_readable(**id)
                && asked.get(*id).is_none_or(|n| *n < PREFILL_ASKED_MAX)
                && away.resting.get(*id).is_none_or(|until_ms| *until_ms <= now_ms)
        };
        let load = |worker: &WorkerState| (worker.role != Role::Prefill, worker.queued_tokens);
        let candidates: Vec<_> =
            self.prefill.workers.iter().filter(can).map(|(id, worker)| (*id, load(worker))).collect();
        if candidates.is_empty() {
            return None;
        }
        let known = self.prefill.known_elsewhere(&self.cx, &mut self.batch, seq);
        let known = |id: InstanceId| known.get(&id).copied().unwrap_or(0);
        // The prompt is as long everywhere: only what need not be computed of it tells workers apart.
        let rank = |(id, (decodes, queued)): &(InstanceId, (bool, u64))| {
            (*decodes, i128::from(*queued) - i128::from(known(*id)))
        };
        candidates.into_iter().min_by_key(rank).map(|(id, _)| (id, known(id)))
    }

    /// The oldest prompt that nobody has waits for memory here, and all others behind it. They do not wait for workers.
    fn wait_for_memory(&mut self, oldest: SeqId) {
        let now_ms = self.cx.now_ms;
        let waiting = |away: &&mut Away| matches!(away.stage, Stage::Waiting);
        self.prefill.away.values_mut().filter(waiting).for_each(|away| away.wait_by_ms = now_ms + PREFILL_WAIT_MS);
        // That goes on with time.
        self.batch.due.wake_at(now_ms + 1);
        if self.prefill.away.get(&oldest).is_some_and(|away| now_ms > away.asked_ms + ADMISSION_DEADLINE_MS) {
            let message = format!("no memory became free within {} s", ADMISSION_DEADLINE_MS / 1000);
            self.fail(oldest, RequestError::Unavailable(message));
        }
    }

    /// Gives a prompt to a worker, which may have `known` tokens of it.
    fn ask_prefill(&mut self, id: SeqId, worker: InstanceId, known: u32, landing: Option<Landing>) {
        let Some(seq) = self.batch.seq(id) else { return };
        let request = self.cx.memory.rm.next_request();
        let sampling = &seq.sampling;
        let sampling = PrefillSampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            logprobs: sampling.logprobs,
            index: u64::from(seq.generated()),
            return_logits: seq.return_logits,
        };
        let (total, now_ms) = (seq.len(), self.cx.now_ms);
        let mut first = 0;
        let mut messages = Vec::new();
        for tokens in seq.tokens.chunks(PREFILL_TOKENS_MAX) {
            let (sampling, push) = ((first == 0).then_some(sampling), first == 0 && landing.is_some());
            messages.push(PrefillRequest { request, seq: id.0, total, first, tokens: tokens.to_vec(), sampling, push });
            first += u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        }
        messages.into_iter().for_each(|m| self.cx.send_if_connected(worker, ControlBody::PrefillRequest(m)));
        if let Some(worker) = self.prefill.workers.get_mut(&worker) {
            worker.queued_tokens += u64::from(total - known);
        }
        self.prefill.status.affine += u64::from(known > 0);
        self.prefill.status.affine_tokens += u64::from(known);
        if let Some(away) = self.prefill.away.get_mut(&id) {
            away.stage = Stage::Asked { worker, request, tokens: total, confirmed_ms: now_ms, landing, offer: None };
            away.asked_ms = now_ms;
            away.tries += 1;
        }
    }

    fn asked_as(&self, key: Key) -> Option<SeqId> {
        let is = |away: &Away| matches!(away.stage, Stage::Asked { worker, request, .. } if (worker, request) == key);
        self.prefill.away.iter().find(|(_, away)| is(away)).map(|(seq, _)| *seq)
    }

    pub(super) fn on_prefill_refused(&mut self, from: InstanceId, m: &PrefillRefused) {
        if let Some(worker) = self.prefill.workers.get_mut(&from) {
            worker.queued_tokens = m.queued_tokens;
        }
        let Some(seq) = self.asked_as((from, m.request)) else { return };
        tracing::info!(%seq, worker = %from, reason = m.reason, "a prefill was refused");
        let rest_ms = self.cx.now_ms + PREFILL_REST_MS;
        let Some(away) = self.prefill.away.get_mut(&seq) else { return };
        away.resting.insert(from, rest_ms);
        // Nothing was spent on it.
        away.tries = away.tries.saturating_sub(1);
        let refused_ms = *away.refused_ms.get_or_insert(self.cx.now_ms);
        if let Stage::Asked { landing, offer, .. } = std::mem::replace(&mut away.stage, Stage::Waiting) {
            landing.into_iter().for_each(|landing| self.give_up_landing(seq, landing));
            self.decline(offer.as_ref());
        }
        // Pushed, it waits for memory between two attempts, which is no wait for a worker and has no such end.
        if self.cx.now_ms >= refused_ms + PREFILL_WAIT_MS {
            self.compute_here(seq);
        }
    }

    /// The KV is there, and the next token is known.
    pub(super) fn on_prefill_ready(&mut self, from: InstanceId, m: &PrefillReady) {
        let quic_addr = self.prefill.workers.get(&from).map(|w| w.quic_addr.clone()).unwrap_or_default();
        let (id, epoch, blocks) = (LeaseId(m.lease), Epoch(m.epoch), m.blocks);
        let lease = BorrowedLease { creditor: from, quic_addr, lease: id, epoch, blocks };
        if let Some(worker) = self.prefill.workers.get_mut(&from) {
            worker.queued_tokens = m.queued_tokens;
        }
        let Some(seq) = self.asked_as((from, m.request)) else {
            return self.cx.memory.rm.decline(&lease, self.cx.now_ms);
        };
        let Some(&Stage::Asked { tokens, confirmed_ms, .. }) = self.prefill.away.get(&seq).map(|a| &a.stage) else {
            return;
        };
        let sensible = blocks == tokens.div_ceil(self.cx.config.block_tokens) && m.token < self.cx.config.vocab;
        if !sensible || !self.cx.memory.rm.take_over(seq, &lease, (m.ttl_ms, confirmed_ms), self.cx.now_ms) {
            self.cx.memory.rm.decline(&lease, self.cx.now_ms);
            let why = if sensible { "the worker's answer came too late" } else { "the worker's answer makes no sense" };
            return self.redo(seq, why);
        }
        self.prefill.remember_worker(&self.cx, &mut self.batch, seq, from, tokens);
        let handed = Handed {
            lease,
            tokens,
            request: m.request,
            export: m.export,
            offer: None,
            ready_ms: self.cx.now_ms,
            queued_ms: m.queued_ms,
            prefill_ms: m.prefill_ms,
            lost_at_ms: None,
        };
        let Some(away) = self.prefill.away.get_mut(&seq) else { return };
        let mut known = None;
        away.refused_ms = None;
        away.stage = match std::mem::replace(&mut away.stage, Stage::Waiting) {
            Stage::Asked { landing: Some(landing), .. } => Stage::Pulling { handed, landing, since_ms: self.cx.now_ms },
            Stage::Asked { offer, .. } => {
                known = offer;
                Stage::Ready(handed)
            }
            _ => Stage::Ready(handed),
        };
        known.into_iter().for_each(|offer| self.on_offered(&offer));
        self.say_first(seq, m);
        if m.export == 0 && self.prefill.away.contains_key(&seq) {
            self.redo(seq, &m.why);
        }
        self.land(seq);
    }

    /// The worker's token goes to the client; it may be the last.
    fn say_first(&mut self, id: SeqId, m: &PrefillReady) {
        let Some(seq) = self.batch.seq_mut(id) else { return };
        let end = seq.push(m.token, self.cx.config.max_positions);
        let logits = seq.return_logits.then(|| m.logits.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect());
        let top = || m.top.iter().map(|top| (top.id, top.logprob)).collect();
        let logprobs = m.logprob.map(|chosen| TokenLogprobs { chosen, top: top() });
        self.emit(id, TokenEvent::Token { id: m.token, logprobs, logits });
        if let Some(reason) = end {
            self.finish(id, reason);
        }
    }

    /// What a sequence has or asked for elsewhere is given up.
    pub(crate) fn give_up_away(&mut self, id: SeqId) {
        if let Some(away) = self.prefill.away.remove(&id) {
            self.give_up(id, away.stage);
        }
    }

    fn give_up(&mut self, id: SeqId, stage: Stage) {
        let now_ms = self.cx.now_ms;
        match stage {
            Stage::Waiting => {}
            Stage::Asked { worker, request, landing, offer, .. } => {
                landing.into_iter().for_each(|landing| self.give_up_landing(id, landing));
                self.decline(offer.as_ref());
                if self.cx.peers.key(worker).is_some() {
                    let cancel = PrefillCancel { requests: vec![request] };
                    self.cx.send_if_connected(worker, ControlBody::PrefillCancel(cancel));
                } else {
                    self.prefill.dropped.push(((worker, request), now_ms + LEASE_TTL_MS));
                }
            }
            Stage::Ready(handed) => {
                self.decline(handed.offer.as_ref());
                self.cx.memory.rm.release(&handed.entries(0), now_ms);
            }
            Stage::Pulling { handed, landing, .. } => {
                self.give_up_landing(id, landing);
                self.cx.memory.rm.release(&handed.entries(0), now_ms);
            }
        }
    }

    /// A prompt is to be computed by another worker, or here if that was tried too often.
    pub(crate) fn redo(&mut self, id: SeqId, why: &str) {
        let now_ms = self.cx.now_ms;
        let Some(away) = self.prefill.away.get_mut(&id) else { return };
        self.batch.due.touch();
        let worker = worker_of(away);
        tracing::warn!(seq = %id, worker = worker.map(|w| w.0), why, "a prompt is to be computed again");
        worker.into_iter().for_each(|worker| _ = away.resting.insert(worker, now_ms + PREFILL_REST_MS));
        away.wait_by_ms = now_ms + PREFILL_WAIT_MS;
        let (stage, tries) = (std::mem::replace(&mut away.stage, Stage::Waiting), away.tries);
        self.prefill.status.retried += 1;
        self.give_up(id, stage);
        if tries >= PREFILL_TRIES_MAX {
            self.compute_here(id);
        }
    }

    /// No worker computes a prompt: this instance does.
    fn compute_here(&mut self, id: SeqId) {
        self.give_up_away(id);
        if !self.batch.has(id) {
            return;
        }
        tracing::warn!(seq = %id, "no prefill worker takes a prompt: this instance computes it");
        self.prefill.status.own += 1;
        // It was counted while it waited here, or it ran before.
        self.batch.compute_here(id, self.cx.now_ms);
    }

    /// A sequence that ran gave its memory up: its tokens are computed again where prompts are.
    pub(crate) fn send_preempted_away(&mut self, id: SeqId) {
        if !self.sends_away() || !self.prefill.workers.keys().any(|worker| self.is_readable(*worker)) {
            return;
        }
        self.send_away(id);
    }

    /// This instance begins another life: what workers still compute for the old one, they take back when they hear of it.
    pub(crate) fn redo_all_asked(&mut self) {
        let workers: Vec<InstanceId> = self.prefill.workers.keys().copied().collect();
        workers.into_iter().for_each(|worker| self.redo_asked(worker, "this instance was declared dead"));
    }

    fn redo_asked(&mut self, worker: InstanceId, why: &str) {
        let at = |away: &Away| matches!(away.stage, Stage::Asked { worker: of, .. } if of == worker);
        let lost: Vec<SeqId> = self.prefill.away.iter().filter(|(_, a)| at(a)).map(|(seq, _)| *seq).collect();
        lost.into_iter().for_each(|seq| self.redo(seq, why));
        self.prefill.workers.get_mut(&worker).into_iter().for_each(|w| w.asked = None);
    }

    /// The session with a worker ended: it drops what it was asked for, and what it computed may be lost.
    pub(crate) fn lose_worker(&mut self, worker: InstanceId) {
        let (now_ms, until_ms) = (self.cx.now_ms, self.cx.now_ms + PREFILL_GRACE_MS);
        self.prefill.reader.iter_mut().for_each(|reader| reader.on_session_down(worker, now_ms));
        self.prefill.affinity.forget(worker);
        self.redo_asked(worker, "the worker's connection broke");
        for handed in self.prefill.away.values_mut().filter_map(Away::handed_mut) {
            if handed.lease.creditor == worker {
                handed.lost_at_ms.get_or_insert(until_ms);
            }
        }
    }

    /// A peer said who it is. If it is a worker, it hears what it need not do any more.
    pub(crate) fn on_worker_up(&mut self, worker: InstanceId) {
        let mut back = Vec::new();
        for (seq, away) in &mut self.prefill.away {
            if let Some(handed) = away.handed_mut().filter(|handed| handed.lease.creditor == worker) {
                handed.lost_at_ms = None;
                back.push(*seq);
            }
        }
        back.into_iter().for_each(|seq| self.land(seq));
        let dropped = self.prefill.dropped.extract_if(.., |((of, _), _)| *of == worker);
        let requests: Vec<u64> = dropped.map(|((_, request), _)| request).collect();
        if !requests.is_empty() {
            self.cx.send_if_connected(worker, ControlBody::PrefillCancel(PrefillCancel { requests }));
        }
        if let Some(worker) = self.prefill.workers.get_mut(&worker) {
            (worker.asked, worker.asked_ms, worker.unreadable) = (None, 0, None);
            self.tick_workers();
        }
    }

    /// The lease of KV that was computed elsewhere is gone. True if a prompt that is away had it.
    pub(crate) fn lose_handed(&mut self, id: SeqId, creditor: InstanceId, lease: LeaseId) -> bool {
        let has = |handed: &Handed| (handed.lease.creditor, handed.lease.lease) == (creditor, lease);
        let hit = self.prefill.away.get(&id).and_then(Away::handed).is_some_and(has);
        if hit {
            self.redo(id, "the worker does not have its KV any more");
        }
        hit
    }

    fn redo_where(&mut self, which: impl Fn(&Self, SeqId, &Away) -> bool, why: &str) {
        let hit = self.prefill.away.iter().filter(|(seq, away)| which(self, **seq, away));
        let hit: Vec<SeqId> = hit.map(|(seq, _)| *seq).collect();
        hit.into_iter().for_each(|seq| self.redo(seq, why));
    }

    /// What a worker that did not come back had is computed elsewhere, and what it answered and does not export. Memory
    /// for what nobody has begun is given up for an older request: that may be what keeps it from being begun.
    pub(crate) fn expire_away(&mut self) {
        let now_ms = self.cx.now_ms;
        self.prefill.dropped.retain(|(_, until_ms)| now_ms < *until_ms);
        if self.prefill.away.is_empty() {
            return;
        }
        let late = |away: &Away| away.handed().and_then(|h| h.lost_at_ms).is_some_and(|at| at <= now_ms);
        self.redo_where(|_, _, away| late(away), "the worker did not come back");
        let unknown = |away: &Away| match &away.stage {
            Stage::Ready(handed) => handed.offer.is_none() && handed.ready_ms + LEASE_TTL_MS / 2 <= now_ms,
            Stage::Pulling { landing, since_ms, .. } => landing.is_idle() && since_ms + LEASE_TTL_MS / 2 <= now_ms,
            Stage::Waiting | Stage::Asked { .. } => false,
        };
        self.redo_where(|_, _, away| unknown(away), "the worker does not export what it computed");
        let begun = |away: &Away| away.stage.landing().is_none_or(Landing::is_begun);
        let keeps = |of: &Self, seq: SeqId, away: &Away| {
            let asked = matches!(away.stage, Stage::Asked { .. }) && !begun(away);
            asked && of.batch.seq(seq).is_some_and(|seq| of.gives_way(seq.since_ms))
        };
        self.redo_where(keeps, "an older request waits for memory");
    }

    /// Requests whose prompts nobody computes (any more), and that wait for memory or a place in the batch here.
    pub(crate) fn waiting_here(&self) -> usize {
        let asks = self.pushes() && self.readable_workers() > 0;
        let waits = |away: &&Away| match away.stage {
            Stage::Ready(_) => true,
            // It has memory before anybody is asked.
            Stage::Waiting => asks,
            Stage::Asked { .. } | Stage::Pulling { .. } => false,
        };
        let queued = self.batch.waiting().filter(|w| !self.prefill.is_job(w.seq));
        queued.count() + self.prefill.away.values().filter(waits).count()
    }
}

/// The worker that has something of a sequence.
fn worker_of(away: &Away) -> Option<InstanceId> {
    match &away.stage {
        Stage::Waiting => None,
        Stage::Asked { worker, .. } => Some(*worker),
        Stage::Ready(handed) | Stage::Pulling { handed, .. } => Some(handed.lease.creditor),
    }
}
