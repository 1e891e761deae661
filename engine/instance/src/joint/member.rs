//! A member of another instance's joint prefill.

use super::owner::borrowed;
use super::{JointStatus, Joints, Key, MEMBER_SEQ_BASE, joint, send};
use crate::batch::sequence::Sequence;
use crate::batch::stripes::Layout;
use crate::batch::{Batch, Others};
use crate::cx::Cx;
use crate::outcome::Outcome;
use lagoon_cluster::Revoked;
use lagoon_protocol::{
    ControlBody, JointAsk, JointBody, JointGranted, JointLease, JointLeft, JointMeet, JointMember, JointPrompt,
    JointStart, JointWilling, LeaseRevoked,
};
use lagoon_types::limits::{CACHE_SALT_BYTES_MAX, JOINT_ASK_MS, JOINT_GRANT_MS, JOINT_JOBS_MAX, JOINT_MEMBERS_MAX};
use lagoon_types::{GenerateRequest, InstanceId, LeaseId, RequestOptions, SamplingParams, SeqId};
use std::collections::BTreeMap;

/// State of a part of another instance's prompt.
#[derive(Debug)]
enum Stage {
    /// Messages with the prompt arrive.
    Gathering {
        total: u32,
        tokens: Vec<u32>,
        cache_salt: String,
    },
    /// Memory is taken; not all other members are connected yet.
    Meeting,
    /// All others have leases; the owner says when to begin.
    Granted,
    Running,
}

/// A part of another instance's prompt.
#[derive(Debug)]
pub(super) struct Member {
    key: Key,
    layout: Layout,
    me: u32,
    all: Vec<JointMember>,
    /// `None` before all of the prompt is here.
    seq: Option<SeqId>,
    stage: Stage,
    /// Stripes that others have started before this instance has begun: one of each at most.
    early: Vec<u32>,
    pub(super) given: Vec<LeaseId>,
    /// Blocks that this instance has computed, from the first of its lease on.
    computed: u32,
    since_ms: u64,
}

impl Member {
    pub(super) fn stage(&self) -> &'static str {
        match self.stage {
            Stage::Gathering { .. } => "Gathering",
            Stage::Meeting => "Meeting",
            Stage::Granted => "Granted",
            Stage::Running => "Running",
        }
    }

    /// Blocks that this instance has computed.
    pub(super) fn computed(&self) -> u32 {
        self.computed
    }

    pub(super) fn owner(&self) -> InstanceId {
        self.key.0
    }

    pub(super) fn seq(&self) -> Option<SeqId> {
        self.seq
    }

    /// The other members.
    pub(super) fn others(&self) -> impl Iterator<Item = InstanceId> + '_ {
        let me = self.me as usize;
        self.all.iter().enumerate().filter(move |(at, _)| *at != me).map(|(_, member)| InstanceId(member.instance))
    }

    /// The last step of another member's stripe has started.
    pub(super) fn note_stripe(&mut self, batch: &mut Batch, stripe: u32) {
        match self.seq.filter(|_| matches!(self.stage, Stage::Running)) {
            Some(seq) => batch.note_stripe(seq, stripe),
            None if self.early.len() < self.all.len() => self.early.push(stripe),
            None => {}
        }
    }

    /// Whether its sequence waits to begin.
    pub(super) fn waits(&self) -> bool {
        matches!(self.stage, Stage::Meeting | Stage::Granted)
    }

    /// Whether its owner has let too much time pass without a beginning.
    pub(super) fn is_late(&self, now_ms: u64) -> bool {
        !matches!(self.stage, Stage::Running) && now_ms >= self.since_ms + JOINT_ASK_MS + JOINT_GRANT_MS
    }
}

impl Joints {
    /// Answers whether this instance would compute a part of a prompt.
    pub(super) fn on_ask(&mut self, cx: &mut Cx, batch: &Batch, key: Key, ask: JointAsk) {
        let many = (self.members.len() >= JOINT_JOBS_MAX).then(|| format!("it takes part in {JOINT_JOBS_MAX} already"));
        let own = (!self.owned.is_empty()).then(|| "it computes a prompt with others itself".to_owned());
        let long = (ask.total > cx.config.max_positions).then(|| "the prompt is too long for its model".to_owned());
        let body = match many.or(own).or(long).or_else(|| batch.refuses_to_join(cx, ask.total, ask.blocks)) {
            Some(reason) => JointBody::Left(JointLeft { blocks: 0, reason }),
            None => JointBody::Willing(JointWilling { rows: batch.joint_rows(cx, ask.total) }),
        };
        send(cx, key.0, key, body);
    }

    /// Takes a part of the prompt; with the last one, memory and connections.
    pub(super) fn on_prompt(&mut self, cx: &mut Cx, batch: &mut Batch, key: Key, mut prompt: JointPrompt) {
        if prompt.first == 0 {
            if self.members.contains_key(&key) {
                return;
            }
            match self.member_of(cx, batch, key, &mut prompt) {
                Ok(member) => _ = self.members.insert(key, member),
                Err(reason) => return send(cx, key.0, key, JointBody::Left(JointLeft { blocks: 0, reason })),
            }
        }
        let Some(member) = self.members.get_mut(&key) else { return };
        let Stage::Gathering { total, tokens, .. } = &mut member.stage else { return };
        let fits = tokens.len() == prompt.first as usize && tokens.len() + prompt.tokens.len() <= *total as usize;
        if !fits || prompt.tokens.iter().any(|token| *token >= cx.config.vocab) {
            self.members.remove(&key);
            let reason = "the prompt's messages do not fit together".to_owned();
            return send(cx, key.0, key, JointBody::Left(JointLeft { blocks: 0, reason }));
        }
        tokens.append(&mut prompt.tokens);
        if tokens.len() == *total as usize {
            self.take_part(cx, batch, key);
        }
    }

    /// Checks the first message of a prompt.
    fn member_of(&self, cx: &Cx, batch: &Batch, key: Key, prompt: &mut JointPrompt) -> Result<Member, String> {
        let members = std::mem::take(&mut prompt.members);
        if self.members.len() >= JOINT_JOBS_MAX || !self.owned.is_empty() {
            return Err("it takes part in another one".to_owned());
        }
        let me = members.iter().position(|member| Some(InstanceId(member.instance)) == cx.standing.id);
        let named: std::collections::BTreeSet<u32> = members.iter().map(|member| member.instance).collect();
        let is_list = members.len() <= JOINT_MEMBERS_MAX && named.len() == members.len() && !named.contains(&0);
        let (Some(me @ 1..), true) = (me, is_list && members.first().is_some_and(|of| of.instance == key.0.0)) else {
            return Err("the members make no sense".to_owned());
        };
        let whole = prompt.total.is_multiple_of(cx.config.block_tokens) && prompt.total <= cx.config.max_positions;
        let (end, count) = (prompt.total / cx.config.block_tokens, as_u32(members.len()));
        let layout = Layout::new(prompt.known_blocks, end, prompt.stripe_blocks, count).filter(|_| whole);
        let layout = layout.ok_or_else(|| "the stripes make no sense".to_owned())?;
        let me = as_u32(me);
        if prompt.cache_salt.len() > CACHE_SALT_BYTES_MAX {
            return Err("the salt is too long".to_owned());
        }
        batch.refuses_to_join(cx, prompt.total, layout.leased(me)).map_or(Ok(()), Err)?;
        let cache_salt = std::mem::take(&mut prompt.cache_salt);
        Ok(Member {
            key,
            layout,
            me,
            all: members,
            seq: None,
            stage: Stage::Gathering { total: prompt.total, tokens: Vec::new(), cache_salt },
            early: Vec::new(),
            given: Vec::new(),
            computed: 0,
            since_ms: cx.now_ms,
        })
    }

    /// The prompt is here: takes memory, leases it to the others, and connects to those behind this one.
    fn take_part(&mut self, cx: &mut Cx, batch: &mut Batch, key: Key) {
        self.next_seq += 1;
        let id = SeqId(MEMBER_SEQ_BASE + self.next_seq);
        let Some(member) = self.members.get_mut(&key) else { return };
        let Stage::Gathering { tokens, cache_salt, .. } = std::mem::replace(&mut member.stage, Stage::Meeting) else {
            return;
        };
        let request = GenerateRequest {
            prompt: tokens,
            answered: 0,
            max_tokens: 1,
            sampling: SamplingParams::default(),
            min_tokens: 0,
            stop_ids: Vec::new(),
            return_logits: false,
            options: RequestOptions { cache_salt: cache_salt.as_str().into(), ..RequestOptions::default() },
        };
        let mut seq = Sequence::new(id, request, cx.config.block_tokens, cx.now_ms);
        seq.for_others = Some(0);
        if !batch.add_member(cx, seq, member.layout.leased(member.me)) {
            self.members.remove(&key);
            let reason = "its memory is full".to_owned();
            return send(cx, key.0, key, JointBody::Left(JointLeft { blocks: 0, reason }));
        }
        member.seq = Some(id);
        let behind: Vec<JointMember> = member.all[member.me as usize + 1..].to_vec();
        for JointMember { instance, quic_addr } in behind {
            cx.send_or_dial(InstanceId(instance), &quic_addr, joint(key, JointBody::Meet(JointMeet {})));
        }
        self.grant_met(cx, batch);
    }

    /// Leases the blocks of members that are connected with all others, and tells their owners.
    pub(super) fn grant_met(&mut self, cx: &mut Cx, batch: &Batch) {
        for member in self.members.values_mut().filter(|member| matches!(member.stage, Stage::Meeting)) {
            let met = member.others().all(|other| cx.peers.key(other).is_some());
            let Some(seq) = member.seq.filter(|_| met) else { continue };
            let blocks = batch.joint_blocks(seq, &member.layout, member.me);
            let mut leases = Vec::new();
            for debtor in member.others().collect::<Vec<_>>() {
                let to = (debtor, SeqId(member.key.1));
                let pool = &mut cx.memory.rm.pool;
                let grant = cx.memory.rm.creditor.lease_out(seq, to, &blocks, 0, cx.now_ms, pool);
                member.given.push(LeaseId(grant.lease));
                leases.push(JointLease {
                    instance: debtor.0,
                    lease: grant.lease,
                    epoch: grant.epoch,
                    blocks: grant.blocks,
                    ttl_ms: grant.ttl_ms,
                });
            }
            member.stage = Stage::Granted;
            send(cx, member.key.0, member.key, JointBody::Granted(JointGranted { leases }));
        }
    }

    /// Begins with the leases of the others.
    pub(super) fn on_start(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        others: Others<'_>,
        key: Key,
        start: &JointStart,
    ) {
        let Some(member) = self.members.get_mut(&key).filter(|of| matches!(of.stage, Stage::Granted)) else { return };
        let (Some(seq), now_ms) = (member.seq, cx.now_ms) else { return };
        let confirmed_ms = now_ms.saturating_sub(u64::from(start.age_ms));
        let mut held = BTreeMap::new();
        for (number, of) in (0..).zip(&member.all).filter(|(number, _)| *number != member.me) {
            let (creditor, layout) = (InstanceId(of.instance), &member.layout);
            let lease = start.leases.iter().find(|lease| lease.instance == of.instance);
            let Some(lease) = lease.filter(|lease| lease.blocks == layout.leased(number)) else { continue };
            let lease_of = borrowed(creditor, &of.quic_addr, lease);
            let taken = cx.memory.rm.debtor.take_over(seq, &lease_of, (lease.ttl_ms, confirmed_ms), now_ms);
            if taken && cx.peers.key(creditor).is_some() {
                held.insert(number, lease_of);
            }
        }
        if held.len() + 1 < member.all.len() {
            cx.memory.rm.debtor.held.release_leases_of(seq, now_ms);
            return self.leave(cx, batch, others, key, "a lease or a connection is missing");
        }
        member.stage = Stage::Running;
        self.status.joined += 1;
        batch.begin_joint(cx, seq, (member.layout, member.me), &held);
        member.early.drain(..).for_each(|stripe| batch.note_stripe(seq, stripe));
    }

    /// A chunk is computed; with the last one the part is done.
    pub(super) fn on_member_computed(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, seq: SeqId) {
        let Some((key, member)) = self.members.iter_mut().find(|(_, member)| member.seq == Some(seq)) else { return };
        let (Some(of), key, tokens) = (batch.seq(seq), *key, cx.config.block_tokens) else { return };
        let due = of.blocks.lost().first().map(|due| due.start / tokens);
        member.computed = member.layout.entry(member.me, due.unwrap_or(member.layout.end));
        if due.is_some() {
            return;
        }
        let Some(member) = self.members.remove(&key) else { return };
        let JointStatus { computed_tokens, .. } = &mut self.status;
        *computed_tokens += u64::from(member.computed * tokens);
        send(cx, key.0, key, JointBody::Left(JointLeft { blocks: member.computed, reason: String::new() }));
        batch.remove(cx, others.prefills, seq);
    }

    /// The owner ends it.
    pub(super) fn on_end(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, key: Key) {
        if self.members.contains_key(&key) {
            self.leave(cx, batch, others, key, "the owner ended it");
        } else {
            // It is over here, with nothing that the owner does not know.
            let reason = "this instance takes no part in it".to_owned();
            send(cx, key.0, key, JointBody::Left(JointLeft { blocks: 0, reason }));
        }
    }

    /// Leaves: what is computed stays leased to the owner.
    fn leave(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, key: Key, reason: &str) {
        let Some(member) = self.members.remove(&key) else { return };
        self.note_left(cx, &member, reason);
        let Some(seq) = member.seq else { return };
        if batch.in_step(seq) {
            cx.emit(Outcome::StepLeft { seq });
        }
        batch.cancel(cx, others.prefills, seq);
    }

    /// Tells the owner what is computed, and takes leases back that nobody has taken over.
    fn note_left(&mut self, cx: &mut Cx, member: &Member, reason: &str) {
        self.status.computed_tokens += u64::from(member.computed * cx.config.block_tokens);
        let left = JointLeft { blocks: member.computed, reason: reason.to_owned() };
        send(cx, member.key.0, member.key, JointBody::Left(left));
        if !matches!(member.stage, Stage::Running) {
            member.given.iter().for_each(|lease| withdraw(cx, *lease));
        }
    }

    /// Leaves all that `over` selects.
    pub(super) fn leave_all(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        others: Others<'_>,
        over: impl Fn(&Member) -> bool,
    ) {
        let keys: Vec<Key> = self.members.iter().filter(|(_, member)| over(member)).map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.leave(cx, batch, others, key, "its time or its owner was lost"));
    }

    /// The sequence has lost KV of another member.
    pub(super) fn leave_lost(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, seq: SeqId) {
        let key = self.members.iter().find(|(_, member)| member.seq == Some(seq)).map(|(key, _)| *key);
        if let Some(key) = key {
            self.leave(cx, batch, others, key, "KV of another member was lost");
        }
    }

    /// The sequence was preempted or failed.
    pub(super) fn on_member_released(&mut self, cx: &mut Cx, seq: SeqId) {
        let key = self.members.iter().find(|(_, member)| member.seq == Some(seq)).map(|(key, _)| *key);
        if let Some(member) = key.and_then(|key| self.members.remove(&key)) {
            self.note_left(cx, &member, "its memory was needed, or its device failed");
        }
    }
}

/// Takes a lease back that nobody attends to yet.
fn withdraw(cx: &mut Cx, lease: LeaseId) {
    let revoked = cx.memory.rm.creditor.withdraw(lease, cx.now_ms, &mut cx.memory.rm.pool);
    if let Some(Revoked { debtor, lease, entries }) = revoked {
        let reason = "a joint prefill did not begin".to_owned();
        let revoked = LeaseRevoked { lease: lease.0, reason, first: entries.start, entries: entries.end };
        cx.send_if_connected(debtor, ControlBody::LeaseRevoked(revoked));
    }
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
