//! The prefill worker: prompts for other instances run beside own sequences, wholly in this instance's memory, and stop
//! after their first token. Their blocks then become a lease of the decode worker, readable by transports.

use super::publish::{Publication, local};
use super::{Key, Prefills, constraint};
use crate::batch::Batch;
use crate::batch::scheduler::QueueFull;
use crate::batch::sequence::Sequence;
use crate::cx::Cx;
use crate::event::{Effect, TransferEffect};
use crate::outcome::FirstToken;
use lagoon_cluster::cache_summary;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_protocol::{
    ControlBody, PrefillCancel, PrefillReady, PrefillRefused, PrefillRenew, PrefillRenewed, PrefillRequest,
    PrefillSampling, PrefillTop, TransferRefused,
};
use lagoon_runner::sampling::check_params;
use lagoon_types::limits::{
    ALLOWED_TOKENS_MAX, BANNED_MAX, CACHE_SALT_BYTES_MAX, EXPORT_BLOCKS_MAX, LEASE_TTL_MS, LOGIT_BIAS_MAX,
    PREFILL_JOBS_MAX,
};
use lagoon_types::{
    CachedTokens, Epoch, GenerateRequest, InstanceId, LeaseId, PhysBlock, RequestOptions, SamplingParams, SeqId,
};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Prompts of one asker of which not all messages are here. It sends one after the other.
const GATHERING_MAX: usize = 8;

/// Stage of a prefill for another instance.
#[derive(Debug)]
enum Stage {
    /// Messages with the prompt's tokens arrive.
    Gathering {
        total: u32,
        tokens: Vec<u32>,
        sampling: SamplingParams,
        return_logits: bool,
        banned: Vec<u32>,
        cache_salt: Arc<str>,
    },
    /// Waits or runs, as this sequence.
    Running(SeqId),
    /// Its blocks (formerly sequence `of`'s) are the decode worker's lease; exports are in progress.
    Exporting { of: SeqId, lease: LeaseId, epoch: Epoch, ready: Box<PrefillReady> },
    /// `ready` was sent to the decode worker, and is repeated when it renews the request.
    Ready { of: SeqId, lease: LeaseId, epoch: Epoch, ready: Box<PrefillReady> },
}

/// A prefill for another instance.
#[derive(Debug)]
pub(crate) struct Job {
    /// The decode worker's sequence.
    seq: SeqId,
    index: u64,
    /// Push: its KV is exported while it is computed.
    push: bool,
    /// The export carries the prompt's last window.
    window: bool,
    stage: Stage,
    since_ms: u64,
    /// When the decode worker last renewed the request, in milliseconds.
    renewed_ms: u64,
}

impl Prefills {
    /// Tokens of prompts for other instances that are not computed yet.
    pub(crate) fn queued_tokens(&self, batch: &Batch) -> u64 {
        let left = |job: &Job| match &job.stage {
            Stage::Gathering { total, .. } => *total,
            Stage::Running(seq) => batch.seq(*seq).map_or(0, |s| s.len() - s.blocks.written().min(s.len())),
            Stage::Exporting { .. } | Stage::Ready { .. } => 0,
        };
        self.jobs.values().map(|job| u64::from(left(job))).sum()
    }

    /// Prefills for other instances that are not handed over yet.
    pub(crate) fn unfinished_jobs(&self) -> usize {
        self.jobs.values().filter(|job| !matches!(job.stage, Stage::Ready { .. })).count()
    }

    /// Whether a lease is of a prefill whose decode worker is not informed yet: exporting may wait for the staging
    /// buffer.
    pub(crate) fn is_unreported(&self, lease: LeaseId) -> bool {
        let exporting = |job: &Job| matches!(job.stage, Stage::Exporting { lease: of, .. } if of == lease);
        self.jobs.values().any(exporting)
    }

    /// Whether a decode worker's request is a prefill here.
    pub(crate) fn serves(&self, from: InstanceId, request: u64) -> bool {
        self.jobs.contains_key(&(from, request))
    }

    /// Handles a control message of prefill elsewhere or of its reads.
    pub(super) fn on_prefill_control(&mut self, cx: &mut Cx, batch: &mut Batch, from: InstanceId, body: ControlBody) {
        match body {
            ControlBody::PrefillRequest(m) => self.on_prefill_request(cx, batch, from, *m),
            ControlBody::PrefillRenew(m) => self.on_prefill_renew(cx, batch, from, &m),
            ControlBody::PrefillCancel(PrefillCancel { requests }) => {
                requests.into_iter().for_each(|request| self.drop_job(cx, batch, (from, request), true));
            }
            ControlBody::PrefillReady(m) => self.on_prefill_ready(cx, batch, from, &m),
            ControlBody::PrefillRefused(m) => self.on_prefill_refused(cx, batch, from, &m),
            ControlBody::PrefillRenewed(m) => self.on_prefill_renewed(cx, batch, from, &m),
            ControlBody::TransferConnect(m) if cx.config.transfer.is_none() => {
                let reason = "the KV of this instance is not in memory that others may read".to_owned();
                let refused = TransferRefused { conn: m.conn, attempt: m.attempt, reason };
                cx.send_if_connected(from, ControlBody::TransferRefused(refused));
            }
            body @ (ControlBody::TransferConnect(_)
            | ControlBody::TransferRenew(_)
            | ControlBody::TransferComplete(_)) => {
                cx.effects.push(Effect::Transfer(TransferEffect::ToWriter { from, body }));
            }
            body @ (ControlBody::TransferConnected(_)
            | ControlBody::TransferRefused(_)
            | ControlBody::TransferExport(_)
            | ControlBody::TransferRenewed(_)
            | ControlBody::TransferCompleted(_)) => {
                let now_ms = cx.now_ms;
                self.reader.iter_mut().for_each(|reader| reader.on_control(from, &body, now_ms));
            }
            _ => {}
        }
    }

    fn refuse_job(&mut self, cx: &mut Cx, batch: &mut Batch, key: Key, reason: String) {
        self.status.jobs_refused += 1;
        let queued_tokens = self.queued_tokens(batch);
        cx.send_if_connected(
            key.0,
            ControlBody::PrefillRefused(PrefillRefused { request: key.1, reason, queued_tokens }),
        );
    }

    fn on_prefill_request(&mut self, cx: &mut Cx, batch: &mut Batch, from: InstanceId, mut m: PrefillRequest) {
        let key = (from, m.request);
        if m.first == 0 {
            if self.jobs.contains_key(&key) {
                return;
            }
            if let Err(reason) = self.may_gather(cx, from, &m) {
                return self.refuse_job(cx, batch, key, reason);
            }
            let PrefillSampling { index, return_logits, .. } = m.sampling.unwrap_or_default();
            let (total, tokens, sampling) = (m.total, Vec::new(), sampling_of(&m));
            let job = Job {
                seq: SeqId(m.seq),
                index,
                // Without transports no export would be answered: its memory would be kept for ever.
                push: m.push && cx.config.transfer.is_some(),
                window: m.window && saves_window(cx, m.total),
                stage: Stage::Gathering {
                    total,
                    tokens,
                    sampling,
                    return_logits,
                    banned: std::mem::take(&mut m.banned),
                    cache_salt: m.cache_salt.as_str().into(),
                },
                since_ms: cx.now_ms,
                renewed_ms: cx.now_ms,
            };
            self.jobs.insert(key, job);
        }
        let Some(job) = self.jobs.get_mut(&key) else { return };
        let Stage::Gathering { total, tokens, .. } = &mut job.stage else { return };
        if tokens.len() != m.first as usize || tokens.len() + m.tokens.len() > *total as usize || m.tokens.is_empty() {
            self.jobs.remove(&key);
            return self.refuse_job(cx, batch, key, "its messages do not fit together".to_owned());
        }
        tokens.extend(m.tokens);
        if tokens.len() == *total as usize {
            self.start_job(cx, batch, key);
        }
    }

    /// Checks that a prompt can be computed here at all.
    fn may_gather(&self, cx: &Cx, from: InstanceId, m: &PrefillRequest) -> Result<(), String> {
        let (positions, room) = (cx.config.max_positions, cx.config.blocks_total);
        if !cx.standing.roles.prefills() {
            return Err("this instance computes no prompts for others".to_owned());
        }
        if cx.standing.draining || cx.standing.drained {
            return Err("this instance is being drained".to_owned());
        }
        if cx.memory.rm.creditor.has_request(from, m.request) {
            return Err(format!("{} is the number of a lease", m.request));
        }
        if m.total == 0 || m.total > positions {
            return Err(format!("a prompt of {} tokens, of a model that takes 1 to {positions}", m.total));
        }
        let needed = m.total.div_ceil(cx.config.block_tokens);
        if needed > room {
            return Err(format!("the prompt needs {needed} rBlocks, this instance has {room}"));
        }
        let beside = cx.stage_blocks();
        if beside > 0 && needed > beside {
            return Err(format!(
                "the prompt needs {needed} rBlocks of host memory to be read from, there are {beside}"
            ));
        }
        let (banned, allowed, salt) = (m.banned.len(), m.allowed.len(), m.cache_salt.len());
        if banned > BANNED_MAX {
            return Err(format!("{banned} tokens are banned, at most {BANNED_MAX} may be"));
        }
        if allowed > ALLOWED_TOKENS_MAX || salt > CACHE_SALT_BYTES_MAX {
            return Err(format!("{allowed} allowed tokens and a salt of {salt} bytes are too many"));
        }
        m.constraint.as_ref().map_or(Ok(()), constraint::check)?;
        let gathering = |(_, job): &(&Key, &Job)| matches!(job.stage, Stage::Gathering { .. });
        if self.jobs.range((from, 0)..=(from, u64::MAX)).filter(gathering).count() >= GATHERING_MAX {
            return Err(format!("{GATHERING_MAX} prompts of this asker are incomplete"));
        }
        if m.logit_bias.len() > LOGIT_BIAS_MAX {
            return Err(format!("{} tokens have a bias, at most {LOGIT_BIAS_MAX} may have one", m.logit_bias.len()));
        }
        check_params(&sampling_of(m)).map_err(|error| error.to_string())?;
        if self.jobs.len() >= PREFILL_JOBS_MAX {
            return Err(format!("{PREFILL_JOBS_MAX} prompts are computed or kept for others"));
        }
        Ok(())
    }

    fn start_job(&mut self, cx: &mut Cx, batch: &mut Batch, key: Key) {
        let Some(job) = self.jobs.get_mut(&key) else { return };
        self.next_job += 1;
        let id = SeqId(self.next_job);
        let Stage::Gathering { tokens, sampling, return_logits, banned, cache_salt, .. } =
            std::mem::replace(&mut job.stage, Stage::Running(id))
        else {
            return;
        };
        let (asker, push, total, index) = (job.seq, job.push, as_u32(tokens.len()), job.index);
        let window = job.window;
        let vocab = cx.config.vocab;
        let unknown = tokens.iter().find(|token| **token >= vocab);
        let unknown = unknown.map(|token| format!("token {token} is not in a vocabulary of {vocab}"));
        let request = GenerateRequest {
            prompt: tokens,
            answered: 0,
            max_tokens: 1,
            sampling,
            // Of its one token, none of them.
            min_tokens: 1,
            stop_ids: banned,
            return_logits,
            options: RequestOptions { cache_salt, ..RequestOptions::default() },
        };
        let mut seq = Sequence::new(id, request, cx.config.block_tokens, cx.now_ms);
        seq.count_tokens(u32::try_from(index).unwrap_or(u32::MAX));
        (seq.for_others, seq.saves_window) = (Some(index), window);
        let full = |full: QueueFull| format!("{} requests wait here", full.limit);
        let queued = unknown.map_or_else(|| batch.enqueue(id, seq, cx.now_ms).map_err(full), Err);
        if let Err(reason) = queued {
            self.jobs.remove(&key);
            return self.refuse_job(cx, batch, key, reason);
        }
        self.by_seq.insert(id, key);
        let exported = cx.config.windowed.filter(|_| window).map(|of| of.exported(total, cx.config.block_tokens));
        self.published.insert(id, Publication::new(key, asker, push, (total, exported)));
    }

    /// A prompt for another instance is computed: its blocks become the decode worker's lease.
    pub(crate) fn prefilled(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId, first: &FirstToken) {
        let Some(key) = self.by_seq.remove(&id) else { return };
        let (Some(mut seq), Some(job)) = (batch.take(id), self.jobs.get(&key)) else { return };
        let tokens = seq.blocks.written();
        let mut numbers = local(seq.blocks.placements());
        let window = seq.window.take().map_or_else(Vec::new, |window| window.blocks);
        numbers.extend(window.iter().map(|block| block.0));
        let blocks: Vec<PhysBlock> = numbers.iter().map(|number| PhysBlock(*number)).collect();
        seq.blocks.clear();
        let grant = cx.memory.rm.creditor.hand_over(
            id,
            (key.0, job.seq, key.1),
            blocks,
            tokens,
            cx.now_ms,
            &mut cx.memory.rm.pool,
        );
        let began_ms = seq.began_ms.unwrap_or(job.since_ms);
        let (lease, epoch) = (LeaseId(grant.lease), Epoch(grant.epoch));
        let logprobs = first.logprobs.as_ref();
        let cached = seq.prompt.as_ref().map_or(CachedTokens::default(), |prompt| prompt.cached);
        let cached = cached.at_most(seq.len().into());
        let tokens = |of: u64| u32::try_from(of).expect("at most a prompt's tokens");
        let ready = PrefillReady {
            request: key.1,
            lease: grant.lease,
            epoch: grant.epoch,
            blocks: grant.blocks,
            ttl_ms: grant.ttl_ms,
            token: first.token,
            logprob: logprobs.map(|l| l.chosen),
            top: logprobs.iter().flat_map(|l| &l.top).map(|&(id, logprob)| PrefillTop { id, logprob }).collect(),
            logits: first.logits.iter().flatten().flat_map(|x| x.to_le_bytes()).collect(),
            export: 0,
            why: String::new(),
            queued_ms: began_ms - job.since_ms,
            prefill_ms: cx.now_ms - began_ms,
            queued_tokens: 0,
            window_blocks: as_u32(window.len()),
            cached_tokens: tokens(cached.total()),
            pool_cached_tokens: tokens(cached.pool),
            host_cached_tokens: tokens(cached.host),
            disk_cached_tokens: tokens(cached.disk),
            has_ended: first.has_ended,
        };
        if let Some(job) = self.jobs.get_mut(&key) {
            job.stage = Stage::Exporting { of: id, lease, epoch, ready: Box::new(ready) };
        }
        self.publish_rest(cx, batch, id, lease, numbers);
    }

    /// Informs the decode worker when transports serve all of a prompt, `export` the last of it, or cannot.
    pub(super) fn reply_ready(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId, export: Result<u64, String>) {
        let is = |job: &Job| matches!(&job.stage, Stage::Exporting { of, .. } if *of == id);
        let queued_tokens = self.queued_tokens(batch);
        let Some((key, job)) = self.jobs.iter_mut().find(|(_, job)| is(job)) else { return };
        let Stage::Exporting { lease, epoch, ready, .. } = &mut job.stage else { return };
        let (key, lease, epoch, mut ready) = (*key, *lease, *epoch, std::mem::take(ready));
        match export {
            Ok(export) => ready.export = export,
            Err(why) => ready.why = why,
        }
        ready.queued_tokens = queued_tokens;
        let message = PrefillReady::clone(&ready);
        job.stage = Stage::Ready { of: id, lease, epoch, ready };
        self.status.jobs_done += 1;
        cx.send_if_connected(key.0, ControlBody::PrefillReady(Box::new(message)));
    }

    /// Drops a prefill that is not wanted any more. With `unheld`, the decode worker does not hold its lease either.
    fn drop_job(&mut self, cx: &mut Cx, batch: &mut Batch, key: Key, unheld: bool) {
        let Some(job) = self.jobs.get(&key) else { return };
        match &job.stage {
            Stage::Gathering { .. } => {}
            &Stage::Running(seq) => {
                self.by_seq.remove(&seq);
                self.unpublish(cx, batch, seq);
                batch.cancel(cx, self, seq);
            }
            // The decode worker may hold the lease; if not, the lease expires.
            Stage::Ready { .. } if !unheld => return,
            &Stage::Exporting { of, lease, epoch, .. } | &Stage::Ready { of, lease, epoch, .. } => {
                self.unpublish(cx, batch, of);
                cx.memory.rm.creditor.take_back(key.0, lease, epoch, &mut cx.memory.rm.pool);
            }
        }
        self.jobs.remove(&key);
        self.status.jobs_dropped += 1;
    }

    /// A prefill's sequence failed: informs the decode worker.
    pub(crate) fn job_failed(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId, reason: String) {
        let Some(key) = self.by_seq.remove(&seq) else { return };
        self.jobs.remove(&key);
        self.unpublish(cx, batch, seq);
        self.refuse_job(cx, batch, key, reason);
    }

    /// Ends a prefill here, now or when its step ends, and informs the decode worker.
    pub(super) fn end_job(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId, reason: &str) {
        self.job_failed(cx, batch, seq, reason.to_owned());
        batch.cancel(cx, self, seq);
    }

    /// Handles a decode worker's renewal. Messages of a session arrive in order, or are dropped by a full queue: a
    /// prompt that is incomplete now never completes, and a decode worker that waits for a ready prompt has missed the
    /// reply, or will get it before this repetition.
    fn on_prefill_renew(&mut self, cx: &mut Cx, batch: &mut Batch, from: InstanceId, m: &PrefillRenew) {
        let (now_ms, mut unknown, mut unacknowledged) = (cx.now_ms, Vec::new(), Vec::new());
        // Each once: an answer is long, and a question that names it often must not be.
        let requests: BTreeSet<u64> = m.requests.iter().take(PREFILL_JOBS_MAX).copied().collect();
        for request in &requests {
            let key = (from, *request);
            let Some(job) = self.jobs.get_mut(&key) else {
                unknown.push(*request);
                continue;
            };
            job.renewed_ms = now_ms;
            match &job.stage {
                Stage::Gathering { .. } => {
                    unknown.push(*request);
                    self.jobs.remove(&key);
                }
                Stage::Running(_) => {}
                Stage::Exporting { lease, .. } => cx.memory.rm.creditor.touch(from, *lease, now_ms),
                Stage::Ready { lease, ready, .. } => {
                    cx.memory.rm.creditor.touch(from, *lease, now_ms);
                    unacknowledged.push(PrefillReady::clone(ready));
                }
            }
        }
        let queued_tokens = self.queued_tokens(batch);
        // 0 is no version.
        let cache_version = cx.memory.rm.pool.changes() + 1;
        let cached = (m.cache_version != cache_version).then(|| Box::new(cache_summary(&cx.memory.rm.pool)));
        let renewed = PrefillRenewed { seq: m.seq, unknown, queued_tokens, cached, cache_version };
        cx.send_if_connected(from, ControlBody::PrefillRenewed(renewed));
        if mutants::is(Mutant::AnswerUnrepeated) {
            return;
        }
        for ready in unacknowledged {
            cx.send_if_connected(from, ControlBody::PrefillReady(Box::new(PrefillReady { queued_tokens, ..ready })));
        }
    }

    /// Drops the prefills of an instance whose session ended, except those handed over.
    pub(crate) fn drop_jobs_of(&mut self, cx: &mut Cx, batch: &mut Batch, asker: InstanceId) {
        let all = (asker, 0)..=(asker, u64::MAX);
        let keys: Vec<Key> = self.jobs.range(all).map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.drop_job(cx, batch, key, false));
    }

    /// Drops all prefills: this instance was declared dead, and no decode worker holds a lease of it.
    pub(crate) fn drop_all_jobs(&mut self, cx: &mut Cx, batch: &mut Batch) {
        let keys: Vec<Key> = self.jobs.keys().copied().collect();
        keys.into_iter().for_each(|key| self.drop_job(cx, batch, key, true));
    }

    /// Drops prefills that are not renewed, and those whose lease has ended.
    pub(crate) fn expire_jobs(&mut self, cx: &mut Cx, batch: &mut Batch) {
        let now_ms = cx.now_ms;
        if self.jobs.is_empty() {
            return;
        }
        let lent = |lease: LeaseId| cx.memory.rm.creditor.is_lent(lease);
        let over = |job: &Job| match job.stage {
            Stage::Ready { lease, .. } => !lent(lease),
            _ => now_ms > job.renewed_ms + LEASE_TTL_MS,
        };
        let keys: Vec<Key> = self.jobs.iter().filter(|(_, job)| over(job)).map(|(key, _)| *key).collect();
        for key in keys {
            match self.jobs.get(&key).map(|job| &job.stage) {
                Some(&Stage::Ready { of, .. }) => {
                    // The lease has ended, so its exports do; after a completed read this changes nothing.
                    self.unpublish(cx, batch, of);
                    self.jobs.remove(&key);
                }
                _ => self.drop_job(cx, batch, key, true),
            }
        }
    }
}

/// Whether the last window of a prompt can be exported behind it.
fn saves_window(cx: &Cx, total: u32) -> bool {
    let Some(shape) = cx.config.windowed else { return false };
    let (window, most) = (shape.blocks(total, cx.config.block_tokens), cx.stage_blocks());
    let all = total.div_ceil(cx.config.block_tokens).saturating_add(window);
    window > 0 && (most == 0 || all <= most) && all as usize <= EXPORT_BLOCKS_MAX
}

fn sampling_of(m: &PrefillRequest) -> SamplingParams {
    let PrefillSampling { temperature, top_k, top_p, min_p, seed, logprobs, index: _, return_logits: _ } =
        m.sampling.unwrap_or_default();
    let logit_bias = m.logit_bias.iter().map(|b| (b.token, b.bias)).collect();
    let penalties = m.penalties.unwrap_or_default();
    SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        logprobs,
        logit_bias,
        presence_penalty: penalties.presence,
        frequency_penalty: penalties.frequency,
        repetition_penalty: penalties.repetition.unwrap_or(1.0),
        allowed_token_ids: m.allowed.as_slice().into(),
        // The decode worker's banned tokens have them.
        bad_words: Arc::default(),
        constraint: m.constraint.as_ref().and_then(constraint::read).map(Arc::new),
    }
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
