//! The prefill worker: prompts for others run beside own sequences, all of them in this instance's memory, and stop after
//! their first token. Their blocks then become a lease of whoever asked, readable by transports.

use super::Key;
use super::publish::{Publication, local};
use crate::batch::sequence::Sequence;
use crate::event::{Effect, TransferEffect};
use crate::instance::Instance;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_protocol::{
    ControlBody, PrefillCancel, PrefillReady, PrefillRefused, PrefillRenew, PrefillRenewed, PrefillRequest,
    PrefillSampling, PrefillTop, TransferRefused,
};
use lagoon_runner::SampleOut;
use lagoon_types::limits::{LEASE_TTL_MS, PREFILL_JOBS_MAX};
use lagoon_types::{Epoch, GenerateRequest, InstanceId, LeaseId, PhysBlock, SamplingParams, SeqId};

/// How far a prefill for another instance is.
#[derive(Debug)]
enum Stage {
    /// Its tokens arrive.
    Gathering { total: u32, tokens: Vec<u32>, sampling: PrefillSampling },
    /// It waits or runs, as this sequence.
    Running(SeqId),
    /// Its blocks, those of this sequence before, are the asker's; transports are being told of them.
    Exporting { of: SeqId, lease: LeaseId, epoch: Epoch, ready: Box<PrefillReady> },
    /// The asker was told this, and is again when it asks after it.
    Ready { of: SeqId, lease: LeaseId, epoch: Epoch, ready: Box<PrefillReady> },
}

/// A prefill for another instance.
#[derive(Debug)]
pub(crate) struct Job {
    /// The asker's sequence.
    seq: SeqId,
    index: u64,
    /// Its KV is exported while it is computed.
    push: bool,
    stage: Stage,
    since_ms: u64,
    /// When it got its memory and began.
    began_ms: Option<u64>,
    /// When the asker was last heard to want it.
    renewed_ms: u64,
}

impl Instance {
    /// Tokens of prompts for others that are not computed yet.
    pub(crate) fn queued_tokens(&self) -> u64 {
        let left = |job: &Job| match &job.stage {
            Stage::Gathering { total, .. } => *total,
            Stage::Running(seq) => self.batch.seq(*seq).map_or(0, |s| s.len() - s.blocks.written().min(s.len())),
            Stage::Exporting { .. } | Stage::Ready { .. } => 0,
        };
        self.prefill.jobs.values().map(|job| u64::from(left(job))).sum()
    }

    /// Prefills for others that are not handed over yet.
    pub(crate) fn jobs(&self) -> usize {
        self.prefill.jobs.values().filter(|job| !matches!(job.stage, Stage::Ready { .. })).count()
    }

    /// Whether a lease is of a prompt whose asker is told when all of it is exported: that may wait for memory beside the store.
    #[must_use]
    pub fn is_unreported(&self, lease: LeaseId) -> bool {
        let exporting = |job: &Job| matches!(job.stage, Stage::Exporting { lease: of, .. } if of == lease);
        self.prefill.jobs.values().any(exporting)
    }

    /// A message of a decode worker; others are given back.
    pub(crate) fn on_prefill_control(&mut self, from: InstanceId, body: ControlBody) -> Option<ControlBody> {
        match body {
            ControlBody::PrefillRequest(m) => self.on_prefill_request(from, m),
            ControlBody::PrefillRenew(m) => self.on_prefill_renew(from, &m),
            ControlBody::PrefillCancel(PrefillCancel { requests }) => {
                requests.into_iter().for_each(|request| self.drop_job((from, request), true));
            }
            ControlBody::PrefillReady(m) => self.on_prefill_ready(from, &m),
            ControlBody::PrefillRefused(m) => self.on_prefill_refused(from, &m),
            ControlBody::PrefillRenewed(m) => self.on_prefill_renewed(from, &m),
            ControlBody::TransferConnect(m) if self.cx.config.transfer.is_none() => {
                let reason = "the KV of this instance is not in memory that others may read".to_owned();
                let refused = TransferRefused { conn: m.conn, attempt: m.attempt, reason };
                self.cx.send_if_connected(from, ControlBody::TransferRefused(refused));
            }
            body @ (ControlBody::TransferConnect(_)
            | ControlBody::TransferRenew(_)
            | ControlBody::TransferComplete(_)) => {
                self.cx.effects.push(Effect::Transfer(TransferEffect::ToWriter { from, body }));
            }
            body @ (ControlBody::TransferConnected(_)
            | ControlBody::TransferRefused(_)
            | ControlBody::TransferExport(_)
            | ControlBody::TransferRenewed(_)
            | ControlBody::TransferCompleted(_)) => {
                let now_ms = self.cx.now_ms;
                self.prefill.reader.iter_mut().for_each(|reader| reader.on_control(from, &body, now_ms));
            }
            body => return Some(body),
        }
        None
    }

    fn refuse_job(&mut self, key: Key, reason: String) {
        self.prefill.status.jobs_refused += 1;
        let queued_tokens = self.queued_tokens();
        self.cx.send_if_connected(
            key.0,
            ControlBody::PrefillRefused(PrefillRefused { request: key.1, reason, queued_tokens }),
        );
    }

    fn on_prefill_request(&mut self, from: InstanceId, m: PrefillRequest) {
        let key = (from, m.request);
        if m.first == 0 {
            if self.prefill.jobs.contains_key(&key) {
                return;
            }
            if let Err(reason) = self.may_gather(&m) {
                return self.refuse_job(key, reason);
            }
            let sampling = m.sampling.unwrap_or_default();
            let (total, tokens) = (m.total, Vec::with_capacity(m.total as usize));
            let job = Job {
                seq: SeqId(m.seq),
                index: sampling.index,
                push: m.push,
                stage: Stage::Gathering { total, tokens, sampling },
                since_ms: self.cx.now_ms,
                began_ms: None,
                renewed_ms: self.cx.now_ms,
            };
            self.prefill.jobs.insert(key, job);
        }
        let Some(job) = self.prefill.jobs.get_mut(&key) else { return };
        let Stage::Gathering { total, tokens, .. } = &mut job.stage else { return };
        if tokens.len() != m.first as usize || tokens.len() + m.tokens.len() > *total as usize || m.tokens.is_empty() {
            self.prefill.jobs.remove(&key);
            return self.refuse_job(key, "its messages do not fit together".to_owned());
        }
        tokens.extend(m.tokens);
        if tokens.len() == *total as usize {
            self.start_job(key);
        }
    }

    /// Whether a prompt can be computed here at all.
    fn may_gather(&self, m: &PrefillRequest) -> Result<(), String> {
        let (positions, room) = (self.cx.config.max_positions, self.cx.config.blocks_total);
        if !self.membership.roles.prefills() {
            return Err("this instance computes no prompts for others".to_owned());
        }
        if self.membership.is_draining() || self.membership.drained {
            return Err("this instance is being drained".to_owned());
        }
        if m.total == 0 || m.total > positions {
            return Err(format!("a prompt of {} tokens, of a model that takes 1 to {positions}", m.total));
        }
        let needed = m.total.div_ceil(self.cx.config.block_tokens);
        if needed > room {
            return Err(format!("the prompt needs {needed} rBlocks, this instance has {room}"));
        }
        let beside = self.stage_blocks();
        if beside > 0 && needed > beside {
            return Err(format!(
                "the prompt needs {needed} rBlocks of host memory to be read from, there are {beside}"
            ));
        }
        if self.prefill.jobs.len() >= PREFILL_JOBS_MAX {
            return Err(format!("{PREFILL_JOBS_MAX} prompts are computed or kept for others"));
        }
        Ok(())
    }

    fn start_job(&mut self, key: Key) {
        let Some(job) = self.prefill.jobs.get_mut(&key) else { return };
        self.prefill.next_job += 1;
        let id = SeqId(self.prefill.next_job);
        let Stage::Gathering { tokens, sampling, .. } = std::mem::replace(&mut job.stage, Stage::Running(id)) else {
            return;
        };
        let (seq, push, total) = (job.seq, job.push, as_u32(tokens.len()));
        let vocab = self.cx.config.vocab;
        let refused = match tokens.iter().find(|token| **token >= vocab) {
            Some(token) => Some(format!("token {token} is not in a vocabulary of {vocab}")),
            None => {
                let queued = self.batch.enqueue(id, total, self.cx.now_ms);
                queued.err().map(|full| format!("{} requests wait here", full.limit))
            }
        };
        if let Some(reason) = refused {
            self.prefill.jobs.remove(&key);
            return self.refuse_job(key, reason);
        }
        let PrefillSampling { temperature, top_k, top_p, min_p, seed, logprobs, return_logits, .. } = sampling;
        let request = GenerateRequest {
            prompt: tokens,
            answered: 0,
            max_tokens: 1,
            sampling: SamplingParams { temperature, top_k, top_p, min_p, seed, logprobs },
            stop_ids: Vec::new(),
            return_logits,
        };
        self.batch.add(id, Sequence::new(id, request, self.cx.config.block_tokens, self.cx.now_ms));
        self.prefill.by_seq.insert(id, key);
        self.prefill.published.insert(id, Publication::new(key, seq, push, total));
    }

    /// Tokens that the asker had generated before the one that a prefill samples.
    pub(crate) fn sampled_before(&self, seq: SeqId) -> Option<u64> {
        self.prefill.by_seq.get(&seq).and_then(|key| self.prefill.jobs.get(key)).map(|job| job.index)
    }

    /// A sequence got its memory and joins the batch.
    pub(crate) fn note_admitted(&mut self, seq: SeqId) {
        let now_ms = self.cx.now_ms;
        let job = self.prefill.by_seq.get(&seq).and_then(|key| self.prefill.jobs.get_mut(key));
        job.into_iter().for_each(|job| _ = job.began_ms.get_or_insert(now_ms));
    }

    /// A prompt for another instance is computed: its blocks become the asker's.
    pub(crate) fn prefilled(&mut self, id: SeqId, sample: &SampleOut) {
        let Some(key) = self.prefill.by_seq.remove(&id) else { return };
        let (Some(mut seq), Some(job)) = (self.batch.take(id), self.prefill.jobs.get(&key)) else { return };
        let tokens = seq.blocks.written();
        let numbers = local(seq.blocks.placements());
        let blocks = numbers.iter().map(|number| PhysBlock(*number)).collect();
        seq.blocks.clear();
        let grant = self.cx.memory.rm.hand_over(id, (key.0, job.seq, key.1), blocks, tokens, self.cx.now_ms);
        let began_ms = job.began_ms.unwrap_or(job.since_ms);
        let (lease, epoch) = (LeaseId(grant.lease), Epoch(grant.epoch));
        let logprobs = sample.logprobs.as_ref();
        let ready = PrefillReady {
            request: key.1,
            lease: grant.lease,
            epoch: grant.epoch,
            blocks: grant.blocks,
            ttl_ms: grant.ttl_ms,
            token: sample.token,
            logprob: logprobs.map(|l| l.chosen),
            top: logprobs.iter().flat_map(|l| &l.top).map(|&(id, logprob)| PrefillTop { id, logprob }).collect(),
            logits: sample.logits.iter().flatten().flat_map(|x| x.to_le_bytes()).collect(),
            export: 0,
            why: String::new(),
            queued_ms: began_ms - job.since_ms,
            prefill_ms: self.cx.now_ms - began_ms,
            queued_tokens: 0,
        };
        if let Some(job) = self.prefill.jobs.get_mut(&key) {
            job.stage = Stage::Exporting { of: id, lease, epoch, ready: Box::new(ready) };
        }
        self.publish_rest(id, lease, numbers);
    }

    /// Transports serve all of a prompt, this export the last of it, or they cannot: its asker is told.
    pub(super) fn tell_ready(&mut self, id: SeqId, export: Result<u64, String>) {
        let is = |job: &Job| matches!(&job.stage, Stage::Exporting { of, .. } if *of == id);
        let queued_tokens = self.queued_tokens();
        let Some((key, job)) = self.prefill.jobs.iter_mut().find(|(_, job)| is(job)) else { return };
        let Stage::Exporting { lease, epoch, ready, .. } = &mut job.stage else { return };
        let (key, lease, epoch, mut ready) = (*key, *lease, *epoch, std::mem::take(ready));
        match export {
            Ok(export) => ready.export = export,
            Err(why) => ready.why = why,
        }
        ready.queued_tokens = queued_tokens;
        let message = PrefillReady::clone(&ready);
        job.stage = Stage::Ready { of: id, lease, epoch, ready };
        self.prefill.status.jobs_done += 1;
        self.cx.send_if_connected(key.0, ControlBody::PrefillReady(message));
    }

    /// A prefill is not wanted any more. With `unheld`, the asker does not hold its lease either.
    fn drop_job(&mut self, key: Key, unheld: bool) {
        let Some(job) = self.prefill.jobs.get(&key) else { return };
        match &job.stage {
            Stage::Gathering { .. } => {}
            &Stage::Running(seq) => {
                self.prefill.by_seq.remove(&seq);
                self.unpublish(seq);
                self.on_cancel(seq);
            }
            // It may hold the lease; if it does not, the lease ends by itself.
            Stage::Ready { .. } if !unheld => return,
            &Stage::Exporting { of, lease, epoch, .. } | &Stage::Ready { of, lease, epoch, .. } => {
                self.unpublish(of);
                self.cx.memory.rm.take_back(key.0, lease, epoch);
            }
        }
        self.prefill.jobs.remove(&key);
        self.prefill.status.jobs_dropped += 1;
    }

    /// A sequence that computes for another instance failed: whoever asked is told.
    pub(crate) fn job_failed(&mut self, seq: SeqId, reason: String) {
        let Some(key) = self.prefill.by_seq.remove(&seq) else { return };
        self.prefill.jobs.remove(&key);
        self.unpublish(seq);
        self.refuse_job(key, reason);
    }

    /// A sequence that computes for another instance is given up here, now or when its step ends: whoever asked is told.
    pub(super) fn end_job(&mut self, seq: SeqId, reason: &str) {
        self.job_failed(seq, reason.to_owned());
        self.on_cancel(seq);
    }

    /// Messages of a session come in order, and one that finds a full queue does not come at all: a prompt of which
    /// something is missing now is never whole, and an asker that waits for what is ready has not heard that it is, or
    /// will have before it hears it again.
    fn on_prefill_renew(&mut self, from: InstanceId, m: &PrefillRenew) {
        let (now_ms, mut unknown, mut unacknowledged) = (self.cx.now_ms, Vec::new(), Vec::new());
        for request in m.requests.iter().take(PREFILL_JOBS_MAX) {
            let key = (from, *request);
            let Some(job) = self.prefill.jobs.get_mut(&key) else {
                unknown.push(*request);
                continue;
            };
            job.renewed_ms = now_ms;
            match &job.stage {
                Stage::Gathering { .. } => {
                    unknown.push(*request);
                    self.prefill.jobs.remove(&key);
                }
                Stage::Running(_) => {}
                Stage::Exporting { lease, .. } => self.cx.memory.rm.touch(from, *lease, now_ms),
                Stage::Ready { lease, ready, .. } => {
                    self.cx.memory.rm.touch(from, *lease, now_ms);
                    unacknowledged.push(PrefillReady::clone(ready));
                }
            }
        }
        let queued_tokens = self.queued_tokens();
        self.cx.send_if_connected(
            from,
            ControlBody::PrefillRenewed(PrefillRenewed { seq: m.seq, unknown, queued_tokens }),
        );
        if mutants::is(Mutant::AnswerUnrepeated) {
            return;
        }
        for ready in unacknowledged {
            self.cx.send_if_connected(from, ControlBody::PrefillReady(PrefillReady { queued_tokens, ..ready }));
        }
    }

    /// The session with an instance ended, and with it what it asked for and was not told to be done.
    pub(crate) fn drop_jobs_of(&mut self, asker: InstanceId) {
        let all = (asker, 0)..=(asker, u64::MAX);
        let keys: Vec<Key> = self.prefill.jobs.range(all).map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.drop_job(key, false));
    }

    /// This instance was declared dead: nobody holds anything of it any more.
    pub(crate) fn drop_all_jobs(&mut self) {
        let keys: Vec<Key> = self.prefill.jobs.keys().copied().collect();
        keys.into_iter().for_each(|key| self.drop_job(key, true));
    }

    /// Prefills that nobody wants any more, and those whose lease has ended.
    pub(crate) fn expire_jobs(&mut self) {
        let now_ms = self.cx.now_ms;
        if self.prefill.jobs.is_empty() {
            return;
        }
        let lent = |lease: LeaseId| self.cx.memory.rm.is_lent(lease);
        let over = |job: &Job| match job.stage {
            Stage::Ready { lease, .. } => !lent(lease),
            _ => now_ms > job.renewed_ms + LEASE_TTL_MS,
        };
        let keys: Vec<Key> = self.prefill.jobs.iter().filter(|(_, job)| over(job)).map(|(key, _)| *key).collect();
        for key in keys {
            match self.prefill.jobs.get(&key).map(|job| &job.stage) {
                Some(&Stage::Ready { of, .. }) => {
                    // Its lease is gone, and nobody may read it; if it was read, this says nothing new.
                    self.unpublish(of);
                    self.prefill.jobs.remove(&key);
                }
                _ => self.drop_job(key, true),
            }
        }
    }
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
