//! The decode worker's requests: known prefill workers, which worker gets which prompt, and the replies.
//!
//! It keeps a connection to every worker that the gManager announced, also while the gManager is away. A prompt goes to
//! the connected worker with the fewest tokens to compute until it is done: its queued tokens plus those of the prompt
//! that it may not have cached (`affinity.rs`). A prompt that a worker refuses, loses or does not answer goes to
//! another one, with the tokens generated meanwhile, so that none is emitted twice. When no worker takes it for a
//! while, this instance computes it itself.

use super::landing::Landing;
use super::{Key, Prefills, constraint};
use crate::batch::Batch;
use crate::batch::sequence::Sequence;
use crate::cx::Cx;
use crate::event::Effect;
use lagoon_cluster::{BorrowedLease, Cached};
use lagoon_kv::{Owner, RemoteEntries};
use lagoon_protocol::{
    ControlBody, LogitBias, PrefillCancel, PrefillPenalties, PrefillReady, PrefillRefused, PrefillRenew,
    PrefillRenewed, PrefillRequest, PrefillSampling, Role, Workers,
};
use lagoon_transfer::Offer;
use lagoon_types::limits::{
    ADMISSION_DEADLINE_MS, CONNECT_DEADLINE_MS, LEASE_RENEW_MS, LEASE_TTL_MS, PREFILL_ASKED_MAX, PREFILL_GRACE_MS,
    PREFILL_REST_MS, PREFILL_TOKENS_MAX, PREFILL_TRIES_MAX, PREFILL_WAIT_MS, WORKERS_MAX,
};
use lagoon_types::{
    CachedTokens, Epoch, FinishReason, InstanceId, LeaseId, RequestError, SamplingParams, SeqId, TokenEvent,
    TokenLogprobs,
};
use std::collections::BTreeMap;

/// A prompt's last window is read with it if it takes at most one part in so many of the KV memory.
const WINDOW_SHARE: u32 = 4;

/// A known prefill worker.
#[derive(Debug)]
pub(super) struct WorkerState {
    pub(super) quic_addr: String,
    role: Role,
    blocks_total: u32,
    /// Whether the gManager's last list has it. A worker not listed gets nothing more.
    listed: bool,
    /// Queued tokens in its last report, plus those sent to it since.
    queued_tokens: u64,
    dialled_ms: Option<u64>,
    /// The last unanswered query for its requests: number and time.
    asked: Option<(u64, u64)>,
    asked_ms: u64,
    /// Why its KV cannot be read; `None` if it can.
    pub(super) unreadable: Option<String>,
    /// What its prefix cache had at its last report, and that one's version.
    pub(super) cached: Cached,
    cache_version: u64,
}

/// Stage of a sequence's prompt between submission and the switch to its KV.
#[derive(Debug)]
pub(super) enum Stage {
    /// For a worker that accepts it, or for memory to push it to.
    Waiting,
    /// Being computed, as this request; the confirmations were sent then. With push, parts are read already; with pull,
    /// its export may be known before the reply that names it.
    Asked {
        worker: InstanceId,
        request: u64,
        tokens: u32,
        confirmed_ms: u64,
        landing: Option<Landing>,
        offer: Option<Offer>,
    },
    /// Computed; waits for memory here.
    Ready(Handed),
    /// Computed; its KV is being read since `since_ms`.
    Pulling { handed: Handed, landing: Landing, since_ms: u64 },
}

impl Stage {
    /// The blocks that its KV is read into.
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
    /// Number of tokens with KV.
    pub(super) tokens: u32,
    /// Whether their last window is in the export, behind them.
    pub(super) window: bool,
    pub(super) request: u64,
    /// Its export, or the last one.
    pub(super) export: u64,
    /// The worker's offer, once its KV can be read.
    pub(super) offer: Option<Offer>,
    pub(super) ready_ms: u64,
    pub(super) queued_ms: u64,
    pub(super) prefill_ms: u64,
    /// Set while the worker's connection is lost: the deadline for its return.
    pub(super) lost_at_ms: Option<u64>,
}

impl Handed {
    pub(super) fn entries(&self, first: u32) -> RemoteEntries {
        let BorrowedLease { creditor, lease, epoch, blocks, .. } = self.lease;
        RemoteEntries { creditor, lease, epoch, first, entries: blocks }
    }
}

/// A sequence whose prompt a prefill worker computes, or is to compute.
#[derive(Debug)]
pub(super) struct Away {
    pub(super) stage: Stage,
    pub(super) since_ms: u64,
    /// When the prompt was sent to its current worker.
    pub(super) asked_ms: u64,
    tries: u32,
    /// Until when it waits for a worker.
    wait_by_ms: u64,
    /// Since when workers have refused it without exception.
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
        self.stage.landing().map_or(0, |landing| landing.blocks.len() + landing.window.len())
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

impl Prefills {
    /// Handles the gManager's list of workers.
    pub(crate) fn on_workers(&mut self, cx: &mut Cx, batch: &mut Batch, m: &Workers) {
        // The gManager may have sent it before it knew of the role change.
        if !cx.standing.roles.reads() {
            return;
        }
        self.version = m.version;
        self.workers.values_mut().for_each(|w| w.listed = false);
        for worker in m.workers.iter().take(WORKERS_MAX).filter(|w| Some(InstanceId(w.instance)) != cx.standing.id) {
            let entry = self.workers.entry(InstanceId(worker.instance)).or_insert_with(|| WorkerState {
                quic_addr: String::new(),
                role: worker.role(),
                blocks_total: 0,
                listed: true,
                queued_tokens: 0,
                dialled_ms: None,
                asked: None,
                asked_ms: 0,
                unreadable: None,
                cached: Cached::default(),
                cache_version: 0,
            });
            entry.quic_addr.clone_from(&worker.quic_addr);
            (entry.role, entry.blocks_total, entry.listed) = (worker.role(), worker.blocks_total, true);
        }
        self.tick_workers(cx, batch);
    }

    /// Unlists all workers: this instance is no decode worker any more.
    pub(crate) fn leave_workers(&mut self) {
        self.version = 0;
        self.workers.values_mut().for_each(|w| w.listed = false);
    }

    /// Connects to workers that are not connected, and drops those that left and have nothing of this instance.
    pub(crate) fn tick_workers(&mut self, cx: &mut Cx, batch: &mut Batch) {
        let now_ms = cx.now_ms;
        if self.workers.is_empty() {
            return;
        }
        let used = |id: &InstanceId| self.away.values().filter_map(worker_of).any(|user| user == *id);
        // Without a gManager no worker leaves.
        let leaves = |id: &InstanceId, w: &WorkerState| cx.standing.registered && !w.listed && !used(id);
        let gone = self.workers.iter().filter(|(id, w)| leaves(id, w));
        let gone: Vec<InstanceId> = gone.map(|(id, _)| *id).collect();
        for id in gone {
            self.workers.remove(&id);
            self.disconnect_reader(cx, id);
        }
        let ids: Vec<InstanceId> = self.workers.keys().copied().collect();
        for id in ids {
            let connected = cx.peers.key(id).is_some();
            let Some(worker) = self.workers.get_mut(&id) else { continue };
            if connected {
                worker.dialled_ms = None;
                self.connect_reader(cx, id);
                self.ask_worker(cx, batch, id);
            } else if worker.dialled_ms.is_none_or(|at| now_ms >= at + CONNECT_DEADLINE_MS / 5) {
                worker.dialled_ms = Some(now_ms);
                let quic_addr = worker.quic_addr.clone();
                cx.effects.push(Effect::Connect { instance: id, quic_addr, is_advised: true });
            }
        }
    }

    /// Sends a worker the requests that are still wanted, and queries its queue.
    fn ask_worker(&mut self, cx: &mut Cx, batch: &mut Batch, id: InstanceId) {
        let now_ms = cx.now_ms;
        let silent = |worker: &WorkerState| worker.asked.is_some_and(|(_, at)| now_ms > at + LEASE_TTL_MS / 2);
        if self.workers.get(&id).is_some_and(silent) {
            self.redo_asked(cx, batch, id, "the worker does not answer");
        }
        self.renewals += 1;
        let seq = self.renewals;
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if now_ms < worker.asked_ms + LEASE_RENEW_MS && worker.asked_ms != 0 {
            return;
        }
        let requests = self.away.values().filter_map(|away| match away.stage {
            Stage::Asked { worker, request, .. } if worker == id => Some(request),
            _ => None,
        });
        let requests: Vec<u64> = requests.collect();
        worker.asked_ms = now_ms;
        worker.asked.get_or_insert((seq, now_ms)).0 = seq;
        let cache_version = worker.cache_version;
        cx.send_if_connected(id, ControlBody::PrefillRenew(PrefillRenew { seq, requests, cache_version }));
    }

    pub(super) fn on_prefill_renewed(&mut self, cx: &mut Cx, batch: &mut Batch, from: InstanceId, m: &PrefillRenewed) {
        let Some(worker) = self.workers.get_mut(&from) else { return };
        let sent_ms = worker.asked_ms;
        let Some((_, _)) = worker.asked.take_if(|(seq, _)| *seq == m.seq) else { return };
        worker.queued_tokens = m.queued_tokens;
        if let Some(summary) = &m.cached {
            (worker.cached, worker.cache_version) = (Cached::new(summary), m.cache_version);
        }
        let mut lost = Vec::new();
        for (seq, away) in &mut self.away {
            let Stage::Asked { worker, request, confirmed_ms, .. } = &mut away.stage else { continue };
            // The request may have been sent after the query.
            if *worker != from || away.asked_ms >= sent_ms {
                continue;
            }
            if m.unknown.contains(request) {
                lost.push(*seq);
            } else {
                *confirmed_ms = (*confirmed_ms).max(sent_ms);
            }
        }
        lost.into_iter().for_each(|seq| self.redo(cx, batch, seq, "the worker does not know it"));
    }

    /// Leaves the prompt of a new or waiting sequence to prefill workers.
    pub(crate) fn send_away(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId) {
        batch.send_away(seq);
        self.away.insert(seq, Away::new(cx.now_ms));
    }

    /// Sends prompts that no worker has to workers.
    pub(crate) fn dispatch(&mut self, cx: &mut Cx, batch: &mut Batch) {
        if self.away.is_empty() {
            return;
        }
        // As at admission: requests younger than the pool's oldest waiting one take no memory before it.
        let may = |seq: &SeqId| batch.seq(*seq).is_some_and(|seq| !Batch::gives_way(cx, seq.since_ms));
        let waiting = |seq: &SeqId, away: &Away| matches!(away.stage, Stage::Waiting) && may(seq);
        let waiting = self.away.iter().filter(|(seq, away)| waiting(seq, away));
        let mut ids: Vec<SeqId> = waiting.map(|(seq, _)| *seq).collect();
        ids.sort_by_key(|seq| batch.seq(*seq).map(|seq| seq.turn_ms()));
        for seq in ids {
            match self.choose_worker(cx, batch, seq) {
                Some((worker, known)) if self.pushes(cx) => {
                    let Some(landing) = self.reserve(cx, batch, seq) else {
                        return self.wait_for_memory(cx, batch, seq);
                    };
                    self.ask_prefill(cx, batch, seq, worker, known, Some(landing));
                }
                Some((worker, known)) => self.ask_prefill(cx, batch, seq, worker, known, None),
                None if self.away.get(&seq).is_some_and(|a| a.wait_by_ms <= cx.now_ms) => {
                    self.compute_here(cx, batch, seq);
                }
                None => self.wake_dispatch(cx, batch, seq),
            }
        }
    }

    /// Wakes the batch for a prompt that no worker takes now: when a resting worker may be asked again, and at its
    /// deadline.
    fn wake_dispatch(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId) {
        let Some(away) = self.away.get(&seq) else { return };
        let rested = away.resting.values().copied().filter(|until_ms| *until_ms > cx.now_ms);
        rested.chain([away.wait_by_ms]).for_each(|at_ms| batch.wake_at(at_ms));
    }

    /// The worker that would complete a prompt first, of those available now, and the tokens that it may have cached;
    /// one that also decodes only if no other can.
    fn choose_worker(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId) -> Option<(InstanceId, u32)> {
        let (now_ms, away) = (cx.now_ms, self.away.get(&seq)?);
        let needed = batch.seq(seq)?.len().div_ceil(cx.config.block_tokens);
        let mut asked: BTreeMap<InstanceId, usize> = BTreeMap::new();
        self.away.values().filter_map(worker_of).for_each(|worker| *asked.entry(worker).or_default() += 1);
        let can = |(id, worker): &(&InstanceId, &WorkerState)| {
            worker.listed
                && worker.blocks_total >= needed
                && cx.peers.key(**id).is_some()
                && self.is_readable(**id)
                && asked.get(*id).is_none_or(|n| *n < PREFILL_ASKED_MAX)
                && away.resting.get(*id).is_none_or(|until_ms| *until_ms <= now_ms)
        };
        let load = |worker: &WorkerState| (worker.role != Role::Prefill, worker.queued_tokens);
        let candidates: Vec<_> = self.workers.iter().filter(can).map(|(id, worker)| (*id, load(worker))).collect();
        if candidates.is_empty() {
            return None;
        }
        let known = self.known_elsewhere(cx, batch, seq);
        let known = |id: InstanceId| known.get(&id).copied().unwrap_or(0);
        // The prompt is equally long everywhere: workers differ only in their queue and cached tokens.
        let rank = |(id, (decodes, queued)): &(InstanceId, (bool, u64))| {
            (*decodes, i128::from(*queued) - i128::from(known(*id)))
        };
        candidates.into_iter().min_by_key(rank).map(|(id, _)| (id, known(id)))
    }

    /// The first prompt in its turn that has no worker waits for memory here, and all others behind it: workers' deadlines do not
    /// count.
    fn wait_for_memory(&mut self, cx: &mut Cx, batch: &mut Batch, first: SeqId) {
        let now_ms = cx.now_ms;
        let waiting = |away: &&mut Away| matches!(away.stage, Stage::Waiting);
        self.away.values_mut().filter(waiting).for_each(|away| away.wait_by_ms = now_ms + PREFILL_WAIT_MS);
        // The deadline moves with time.
        batch.wake_at(now_ms + 1);
        if self.away.get(&first).is_some_and(|away| now_ms > away.asked_ms + ADMISSION_DEADLINE_MS) {
            let message = format!("no memory became free within {} s", ADMISSION_DEADLINE_MS / 1000);
            batch.fail(cx, self, first, RequestError::Unavailable(message));
            self.cancel_away(cx, batch, first);
        }
    }

    /// Sends a prompt to a worker, which may have `known` tokens of it cached.
    fn ask_prefill(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        id: SeqId,
        worker: InstanceId,
        known: u32,
        landing: Option<Landing>,
    ) {
        let Some(seq) = batch.seq(id) else { return };
        let request = cx.memory.rm.debtor.next_request();
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
        let penalties = penalties(seq);
        let (total, now_ms) = (seq.len(), cx.now_ms);
        let mut first = 0;
        let mut messages = Vec::new();
        for tokens in seq.tokens.chunks(PREFILL_TOKENS_MAX) {
            let len = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            let (sampling, push) = ((first == 0).then_some(sampling), first == 0 && landing.is_some());
            let banned = if first == 0 { seq.banned().to_vec() } else { Vec::new() };
            let biases = if first == 0 { &seq.sampling.logit_bias[..] } else { &[] };
            let logit_bias = biases.iter().map(|&(token, bias)| LogitBias { token, bias }).collect();
            let (allowed, cache_salt) = if first == 0 { allowed_and_salt(seq) } else { Default::default() };
            let tokens = tokens.to_vec();
            let window = first == 0 && takes_window(cx, total).is_some();
            messages.push(PrefillRequest {
                request,
                seq: id.0,
                total,
                first,
                tokens,
                sampling,
                push,
                banned,
                window,
                logit_bias,
                penalties: penalties.filter(|_| first == 0),
                allowed,
                cache_salt,
                constraint: seq.sampling.constraint.as_ref().filter(|_| first == 0).map(|of| constraint::write(of)),
            });
            first += len;
        }
        messages.into_iter().for_each(|m| cx.send_if_connected(worker, ControlBody::PrefillRequest(Box::new(m))));
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.queued_tokens = worker.queued_tokens.saturating_add(u64::from(total - known));
        }
        self.status.affine += u64::from(known > 0);
        self.status.affine_tokens += u64::from(known);
        if let Some(away) = self.away.get_mut(&id) {
            away.stage = Stage::Asked { worker, request, tokens: total, confirmed_ms: now_ms, landing, offer: None };
            away.asked_ms = now_ms;
            away.tries += 1;
        }
    }

    fn asked_as(&self, key: Key) -> Option<SeqId> {
        let is = |away: &Away| matches!(away.stage, Stage::Asked { worker, request, .. } if (worker, request) == key);
        self.away.iter().find(|(_, away)| is(away)).map(|(seq, _)| *seq)
    }

    pub(super) fn on_prefill_refused(&mut self, cx: &mut Cx, batch: &mut Batch, from: InstanceId, m: &PrefillRefused) {
        if let Some(worker) = self.workers.get_mut(&from) {
            worker.queued_tokens = m.queued_tokens;
        }
        let Some(seq) = self.asked_as((from, m.request)) else { return };
        tracing::info!(%seq, worker = %from, reason = m.reason, "a prefill was refused");
        let rest_ms = cx.now_ms + PREFILL_REST_MS;
        let Some(away) = self.away.get_mut(&seq) else { return };
        away.resting.insert(from, rest_ms);
        // The refused attempt does not count.
        away.tries = away.tries.saturating_sub(1);
        let refused_ms = *away.refused_ms.get_or_insert(cx.now_ms);
        if let Stage::Asked { landing, offer, .. } = std::mem::replace(&mut away.stage, Stage::Waiting) {
            landing.into_iter().for_each(|landing| self.drop_landing(cx, batch, seq, landing));
            self.decline(cx, offer.as_ref());
        }
        // With push, waits for memory between two attempts do not count as waits for a worker.
        if cx.now_ms >= refused_ms + PREFILL_WAIT_MS {
            self.compute_here(cx, batch, seq);
        }
    }

    /// Handles a worker's reply: the KV is computed, and the next token is known.
    pub(super) fn on_prefill_ready(&mut self, cx: &mut Cx, batch: &mut Batch, from: InstanceId, m: &PrefillReady) {
        let quic_addr = self.workers.get(&from).map(|w| w.quic_addr.clone()).unwrap_or_default();
        let (id, epoch, blocks) = (LeaseId(m.lease), Epoch(m.epoch), m.blocks);
        let lease = BorrowedLease { creditor: from, quic_addr, lease: id, epoch, blocks };
        if let Some(worker) = self.workers.get_mut(&from) {
            worker.queued_tokens = m.queued_tokens;
        }
        let Some(seq) = self.asked_as((from, m.request)) else {
            return cx.memory.rm.debtor.decline(&lease, cx.now_ms);
        };
        let Some(away) = self.away.get(&seq) else { return };
        let Stage::Asked { tokens, confirmed_ms, .. } = away.stage else { return };
        let took_ms = cx.now_ms.saturating_sub(away.asked_ms);
        let window = m.window_blocks > 0;
        let sensible = blocks.checked_sub(m.window_blocks) == Some(tokens.div_ceil(cx.config.block_tokens))
            && (!window || takes_window(cx, tokens) == Some(m.window_blocks))
            && (window || !away.stage.landing().is_some_and(Landing::exceeds_prompt))
            && batch.seq(seq).is_some_and(|seq| is_first_token(m, seq, cx.config.vocab));
        if !sensible || !cx.memory.rm.debtor.take_over(seq, &lease, (m.ttl_ms, confirmed_ms), cx.now_ms) {
            cx.memory.rm.debtor.decline(&lease, cx.now_ms);
            let why = if sensible { "the worker's reply came too late" } else { "the worker's reply is malformed" };
            return self.redo(cx, batch, seq, why);
        }
        self.remember_worker(cx, batch, seq, from, tokens);
        let handed = Handed {
            lease,
            tokens,
            window,
            request: m.request,
            export: m.export,
            offer: None,
            ready_ms: cx.now_ms,
            queued_ms: m.queued_ms.min(took_ms),
            prefill_ms: m.prefill_ms.min(took_ms),
            lost_at_ms: None,
        };
        let Some(away) = self.away.get_mut(&seq) else { return };
        let mut known = None;
        away.refused_ms = None;
        away.stage = match std::mem::replace(&mut away.stage, Stage::Waiting) {
            Stage::Asked { landing: Some(mut landing), .. } => {
                let unused = if window { Vec::new() } else { landing.without_window() };
                cx.memory.rm.pool.free(Owner::Own(seq), &unused);
                Stage::Pulling { handed, landing, since_ms: cx.now_ms }
            }
            Stage::Asked { offer, .. } => {
                known = offer;
                Stage::Ready(handed)
            }
            _ => Stage::Ready(handed),
        };
        known.into_iter().for_each(|offer| self.on_offered(cx, batch, &offer));
        self.emit_first_token(cx, batch, seq, m);
        if m.export == 0 && self.away.contains_key(&seq) {
            self.redo(cx, batch, seq, &m.why);
        }
        self.land(cx, batch, seq);
    }

    /// Emits the worker's token to the client; it may be the last.
    fn emit_first_token(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId, m: &PrefillReady) {
        let Some(return_logits) = batch.seq(id).map(|seq| seq.return_logits) else { return };
        let prompt = batch.report_prompt_of(id, cached(m));
        cx.effects.extend(prompt.map(|event| Effect::Emit { seq: id, event }));
        let end = batch.push_token(cx, id, m.token).or(m.has_ended.then_some(FinishReason::Stop));
        let logits = return_logits.then(|| m.logits.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect());
        let top = || m.top.iter().map(|top| (top.id, top.logprob)).collect();
        let logprobs = m.logprob.map(|chosen| TokenLogprobs { chosen, top: top() });
        let event = TokenEvent::Token { id: m.token, logprobs, logits };
        cx.effects.push(Effect::Emit { seq: id, event });
        if let Some(reason) = end {
            batch.finish(cx, self, id, reason);
            self.cancel_away(cx, batch, id);
        }
    }

    /// Cancels a sequence's request to a prefill worker, and frees its landing and its lease there.
    pub(crate) fn cancel_away(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        if let Some(away) = self.away.remove(&id) {
            self.cancel_stage(cx, batch, id, away.stage);
        }
    }

    fn cancel_stage(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId, stage: Stage) {
        let now_ms = cx.now_ms;
        match stage {
            Stage::Waiting => {}
            Stage::Asked { worker, request, landing, offer, .. } => {
                landing.into_iter().for_each(|landing| self.drop_landing(cx, batch, id, landing));
                self.decline(cx, offer.as_ref());
                if cx.peers.key(worker).is_some() {
                    let cancel = PrefillCancel { requests: vec![request] };
                    cx.send_if_connected(worker, ControlBody::PrefillCancel(cancel));
                } else {
                    self.dropped.push(((worker, request), now_ms + LEASE_TTL_MS));
                }
            }
            Stage::Ready(handed) => {
                self.decline(cx, handed.offer.as_ref());
                cx.memory.rm.debtor.held.release(&handed.entries(0), now_ms);
            }
            Stage::Pulling { handed, landing, .. } => {
                self.drop_landing(cx, batch, id, landing);
                cx.memory.rm.debtor.held.release(&handed.entries(0), now_ms);
            }
        }
    }

    /// Sends a prompt to another worker, or computes it here after too many attempts.
    pub(crate) fn redo(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId, why: &str) {
        let now_ms = cx.now_ms;
        let Some(away) = self.away.get_mut(&id) else { return };
        batch.touch();
        let worker = worker_of(away);
        tracing::warn!(seq = %id, worker = worker.map(|w| w.0), why, "a prompt is to be computed again");
        worker.into_iter().for_each(|worker| _ = away.resting.insert(worker, now_ms + PREFILL_REST_MS));
        away.wait_by_ms = now_ms + PREFILL_WAIT_MS;
        let (stage, tries) = (std::mem::replace(&mut away.stage, Stage::Waiting), away.tries);
        self.status.retried += 1;
        self.cancel_stage(cx, batch, id, stage);
        if tries >= PREFILL_TRIES_MAX {
            self.compute_here(cx, batch, id);
        }
    }

    /// Computes a prompt here, as no worker does.
    fn compute_here(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        self.cancel_away(cx, batch, id);
        if !batch.has(id) {
            return;
        }
        tracing::warn!(seq = %id, "no prefill worker takes a prompt: this instance computes it");
        self.status.own += 1;
        // It was counted while it waited here, or it ran before.
        batch.compute_here(id, cx.now_ms);
    }

    /// Sends a preempted sequence to prefill workers, if there are any, to be recomputed there.
    pub(crate) fn send_preempted_away(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        // Log-probabilities of a prompt and embeddings are computed where they are reported, as at admission.
        let stays = batch.seq(id).is_some_and(|seq| seq.scores_prompt().is_some() || seq.embedding.is_some());
        if stays || !cx.sends_away() || !self.workers.keys().any(|worker| self.is_readable(*worker)) {
            return;
        }
        self.send_away(cx, batch, id);
    }

    /// Sends all requested prompts anew after a fence. Workers drop the old incarnation's requests when they learn of
    /// the new one.
    pub(crate) fn redo_all_asked(&mut self, cx: &mut Cx, batch: &mut Batch) {
        let workers: Vec<InstanceId> = self.workers.keys().copied().collect();
        workers.into_iter().for_each(|worker| self.redo_asked(cx, batch, worker, "this instance was declared dead"));
    }

    fn redo_asked(&mut self, cx: &mut Cx, batch: &mut Batch, worker: InstanceId, why: &str) {
        let at = |away: &Away| matches!(away.stage, Stage::Asked { worker: of, .. } if of == worker);
        let lost: Vec<SeqId> = self.away.iter().filter(|(_, a)| at(a)).map(|(seq, _)| *seq).collect();
        lost.into_iter().for_each(|seq| self.redo(cx, batch, seq, why));
        self.workers.get_mut(&worker).into_iter().for_each(|w| w.asked = None);
    }

    /// Handles the end of the session with a worker: its requests are dropped, and its computed KV may be lost.
    pub(crate) fn lose_worker(&mut self, cx: &mut Cx, batch: &mut Batch, worker: InstanceId) {
        let (now_ms, until_ms) = (cx.now_ms, cx.now_ms + PREFILL_GRACE_MS);
        self.reader.iter_mut().for_each(|reader| reader.on_session_down(worker, now_ms));
        self.affinity.forget(worker);
        let of = self.workers.get_mut(&worker);
        of.into_iter().for_each(|of| (of.cached, of.cache_version) = (Cached::default(), 0));
        self.redo_asked(cx, batch, worker, "the worker's connection broke");
        for handed in self.away.values_mut().filter_map(Away::handed_mut) {
            if handed.lease.creditor == worker {
                handed.lost_at_ms.get_or_insert(until_ms);
            }
        }
    }

    /// Handles a peer's Hello. If it is a worker, it learns which requests are no longer wanted.
    pub(crate) fn on_worker_up(&mut self, cx: &mut Cx, batch: &mut Batch, worker: InstanceId) {
        let mut back = Vec::new();
        for (seq, away) in &mut self.away {
            if let Some(handed) = away.handed_mut().filter(|handed| handed.lease.creditor == worker) {
                handed.lost_at_ms = None;
                back.push(*seq);
            }
        }
        back.into_iter().for_each(|seq| self.land(cx, batch, seq));
        let dropped = self.dropped.extract_if(.., |((of, _), _)| *of == worker);
        let requests: Vec<u64> = dropped.map(|((_, request), _)| request).collect();
        if !requests.is_empty() {
            cx.send_if_connected(worker, ControlBody::PrefillCancel(PrefillCancel { requests }));
        }
        if let Some(worker) = self.workers.get_mut(&worker) {
            (worker.asked, worker.asked_ms, worker.unreadable) = (None, 0, None);
            self.tick_workers(cx, batch);
        }
    }

    /// Whether a lease holds KV that a worker computed for this sequence.
    pub(crate) fn has_handed(&self, id: SeqId, creditor: InstanceId, lease: LeaseId) -> bool {
        let has = |handed: &Handed| (handed.lease.creditor, handed.lease.lease) == (creditor, lease);
        self.away.get(&id).and_then(Away::handed).is_some_and(has)
    }

    fn redo_where(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        which: impl Fn(&Cx, &Batch, SeqId, &Away) -> bool,
        why: &str,
    ) {
        let hit = self.away.iter().filter(|(seq, away)| which(cx, batch, **seq, away));
        let hit: Vec<SeqId> = hit.map(|(seq, _)| *seq).collect();
        hit.into_iter().for_each(|seq| self.redo(cx, batch, seq, why));
    }

    /// Ends the wait for workers that did not return or do not export, and sends their prompts to other workers. Frees the
    /// memory of prompts that no worker has begun for an older request: the worker may be waiting for that memory.
    pub(crate) fn expire_away(&mut self, cx: &mut Cx, batch: &mut Batch) {
        let now_ms = cx.now_ms;
        self.dropped.retain(|(_, until_ms)| now_ms < *until_ms);
        if self.away.is_empty() {
            return;
        }
        let late = |away: &Away| away.handed().and_then(|h| h.lost_at_ms).is_some_and(|at| at <= now_ms);
        self.redo_where(cx, batch, |_, _, _, away| late(away), "the worker did not come back");
        let unknown = |away: &Away| match &away.stage {
            Stage::Ready(handed) => handed.offer.is_none() && handed.ready_ms + LEASE_TTL_MS / 2 <= now_ms,
            Stage::Pulling { landing, since_ms, .. } => landing.is_idle() && since_ms + LEASE_TTL_MS / 2 <= now_ms,
            Stage::Waiting | Stage::Asked { .. } => false,
        };
        self.redo_where(cx, batch, |_, _, _, away| unknown(away), "the worker does not export the KV that it computed");
        let begun = |away: &Away| away.stage.landing().is_none_or(Landing::is_begun);
        let keeps = |cx: &Cx, batch: &Batch, seq: SeqId, away: &Away| {
            let asked = matches!(away.stage, Stage::Asked { .. }) && !begun(away);
            asked && batch.seq(seq).is_some_and(|seq| Batch::gives_way(cx, seq.since_ms))
        };
        self.redo_where(cx, batch, keeps, "an older request waits for memory");
    }

    /// Requests whose prompts no worker computes (any more), and that wait for memory or a place in the batch here.
    pub(crate) fn waiting_here(&self, cx: &Cx, batch: &Batch) -> usize {
        let asks = self.pushes(cx) && self.readable_workers() > 0;
        let waits = |away: &&Away| match away.stage {
            Stage::Ready(_) => true,
            // With push, memory comes before the request to a worker.
            Stage::Waiting => asks,
            Stage::Asked { .. } | Stage::Pulling { .. } => false,
        };
        let queued = batch.waiting().filter(|w| batch.seq(w.seq).is_some_and(|seq| seq.for_others.is_none()));
        queued.count() + self.away.values().filter(waits).count()
    }
}

fn allowed_and_salt(seq: &Sequence) -> (Vec<u32>, String) {
    (seq.sampling.allowed_token_ids.to_vec(), seq.options.cache_salt.to_string())
}

fn penalties(seq: &Sequence) -> Option<PrefillPenalties> {
    let SamplingParams { presence_penalty, frequency_penalty, repetition_penalty, .. } = *seq.sampling;
    seq.sampling.has_penalties().then_some(PrefillPenalties {
        presence: presence_penalty,
        frequency: frequency_penalty,
        repetition: Some(repetition_penalty),
    })
}

/// Whether a worker's reply has a token of the vocabulary that may come next, with the requested log-probabilities and logits
/// and no others.
fn is_first_token(m: &PrefillReady, seq: &Sequence, vocab: u32) -> bool {
    let top_max = seq.sampling.logprobs.unwrap_or(0) as usize;
    let logits = !seq.return_logits || m.logits.len() == vocab as usize * size_of::<f32>();
    m.token < vocab
        && !seq.banned().contains(&m.token)
        && (seq.sampling.allowed_token_ids.is_empty() || seq.sampling.allowed_token_ids.contains(&m.token))
        && m.top.len() <= top_max
        && m.top.iter().all(|top| top.id < vocab)
        && logits
}

/// rBlocks of the last window of a prompt of `total` tokens, if it is read with the prompt: if it takes little of this instance.
pub(super) fn takes_window(cx: &Cx, total: u32) -> Option<u32> {
    let shape = cx.config.windowed?;
    let blocks = shape.blocks(total, cx.config.block_tokens);
    let fits = |most: u32| most == 0 || blocks <= most / WINDOW_SHARE;
    (blocks > 0 && fits(cx.config.blocks_total) && fits(cx.stage_blocks())).then_some(blocks)
}

/// Where a worker found the cached tokens that it reports.
fn cached(m: &PrefillReady) -> CachedTokens {
    let [pool, host, disk] = [m.pool_cached_tokens, m.host_cached_tokens, m.disk_cached_tokens].map(u64::from);
    CachedTokens { device: u64::from(m.cached_tokens).saturating_sub(pool + host + disk), pool, host, disk }
}

/// The worker that has a request or KV of a sequence.
fn worker_of(away: &Away) -> Option<InstanceId> {
    match &away.stage {
        Stage::Waiting => None,
        Stage::Asked { worker, .. } => Some(*worker),
        Stage::Ready(handed) | Stage::Pulling { handed, .. } => Some(handed.lease.creditor),
    }
}
