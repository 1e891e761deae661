//! The owner of a joint prefill.

use super::{Joints, joint, send};
use crate::batch::stripes::Layout;
use crate::batch::{Batch, Others};
use crate::cx::Cx;
use crate::outcome::Outcome;
use lagoon_cluster::BorrowedLease;
use lagoon_protocol::{
    Candidate, JointAsk, JointBody, JointEnd, JointGranted, JointLease, JointMember, JointPrompt, JointStart,
};
use lagoon_types::limits::{JOINT_ASK_MS, JOINT_END_MS, JOINT_GRANT_MS, PREFILL_TOKENS_MAX};
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId};
use std::collections::{BTreeMap, BTreeSet};

/// State of an own joint prefill.
#[derive(Debug)]
enum Stage {
    /// The gManager is asked for candidates.
    Finding,
    /// Candidates are asked whether they join. Of the willing ones: rows of their steps.
    Asking { candidates: Vec<Candidate>, willing: BTreeMap<InstanceId, u32>, open: BTreeSet<InstanceId>, until_ms: u64 },
    /// Members have the prompt and allocate memory. Their leases, by member.
    Granting {
        layout: Layout,
        members: Vec<JointMember>,
        granted: BTreeMap<InstanceId, Vec<JointLease>>,
        sent_ms: u64,
        until_ms: u64,
    },
    /// All compute. The members' leases, and how many blocks of them are computed, of members that have left; `None` of lost ones.
    Running { members: BTreeMap<InstanceId, LeaseId>, computed: BTreeMap<InstanceId, Option<u32>> },
    /// It ends early: members are asked what they have computed.
    Ending { members: BTreeMap<InstanceId, LeaseId>, computed: BTreeMap<InstanceId, Option<u32>>, until_ms: u64 },
}

impl Stage {
    fn name(&self) -> &'static str {
        match self {
            Self::Finding => "Finding",
            Self::Asking { .. } => "Asking",
            Self::Granting { .. } => "Granting",
            Self::Running { .. } => "Running",
            Self::Ending { .. } => "Ending",
        }
    }
}

/// An own joint prefill.
#[derive(Debug)]
pub(super) struct Owned {
    pub(super) job: u64,
    stage: Stage,
    /// Leases of what this instance knows and computes.
    pub(super) given: Vec<LeaseId>,
    /// When a stripe was last started or computed.
    progress_ms: u64,
}

impl Owned {
    pub(super) fn stage(&self) -> &'static str {
        self.stage.name()
    }

    /// A stripe was started or computed.
    pub(super) fn note_progress(&mut self, now_ms: u64) {
        self.progress_ms = now_ms;
    }

    /// The other instances that know of it.
    pub(super) fn members(&self) -> impl Iterator<Item = InstanceId> + '_ {
        let (named, running): (&[JointMember], _) = match &self.stage {
            Stage::Finding | Stage::Asking { .. } => (&[], None),
            Stage::Granting { members, .. } => (&members[1..], None),
            Stage::Running { members, .. } | Stage::Ending { members, .. } => (&[], Some(members)),
        };
        let named = named.iter().map(|member| InstanceId(member.instance));
        named.chain(running.into_iter().flat_map(BTreeMap::keys).copied())
    }
}

impl Joints {
    /// Asks the gManager for instances that may compute a part of a waiting sequence's prompt.
    pub(super) fn find(&mut self, cx: &mut Cx, batch: &Batch, seq: SeqId) {
        let job = seq.0;
        let Some(layout) = batch.joint_layout(cx, seq, usize::MAX, batch.joint_rows(cx, batch.tokens_of(seq))) else {
            return;
        };
        let wanted = layout.members as usize - 1;
        cx.memory.rm.debtor.find_members(seq, layout.leased(1), wanted, cx.now_ms);
        self.owned.insert(seq, Owned { job, stage: Stage::Finding, given: Vec::new(), progress_ms: cx.now_ms });
    }

    /// Asks the candidates.
    pub(super) fn on_found(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId, candidates: Vec<Candidate>) {
        let total = batch.tokens_of(seq);
        let layout = batch.joint_layout(cx, seq, candidates.len() + 1, batch.joint_rows(cx, total));
        let Some(owned) = self.owned.get_mut(&seq).filter(|owned| matches!(owned.stage, Stage::Finding)) else {
            return;
        };
        let (Some(layout), Some(me)) = (layout.filter(|_| !candidates.is_empty()), cx.standing.id) else {
            return self.compute_alone(cx, batch, seq);
        };
        let open = candidates.iter().map(|candidate| InstanceId(candidate.instance)).collect();
        for candidate in &candidates {
            let ask = JointAsk { blocks: layout.leased(1), total };
            let body = joint((me, owned.job), JointBody::Ask(ask));
            cx.send_or_dial(InstanceId(candidate.instance), &candidate.quic_addr, body);
        }
        let until_ms = cx.now_ms + JOINT_ASK_MS;
        owned.stage = Stage::Asking { candidates, willing: BTreeMap::new(), open, until_ms };
    }

    pub(super) fn on_willing(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId, (from, rows): (InstanceId, u32)) {
        let Some(Owned { stage: Stage::Asking { willing, open, .. }, .. }) = self.owned.get_mut(&seq) else { return };
        if open.remove(&from) {
            willing.insert(from, rows);
            self.invite_if_answered(cx, batch, seq);
        }
    }

    /// Sends the willing candidates the prompt once all have answered, or their time is over.
    fn invite_if_answered(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId) {
        let now_ms = cx.now_ms;
        let Some(owned) = self.owned.get_mut(&seq) else { return };
        let Stage::Asking { candidates, willing, open, until_ms } = &owned.stage else { return };
        if !open.is_empty() && now_ms < *until_ms {
            return;
        }
        let fastest = fastest(batch.joint_rows(cx, batch.tokens_of(seq)), willing);
        let layout = fastest.as_ref().and_then(|(rows, who)| batch.joint_layout(cx, seq, who.len() + 1, *rows));
        let (Some(layout), Some((_, who)), Some(me), Some(sequence)) =
            (layout, fastest, cx.standing.id, batch.seq(seq))
        else {
            return self.compute_alone(cx, batch, seq);
        };
        let member = |candidate: &Candidate| JointMember {
            instance: candidate.instance,
            quic_addr: candidate.quic_addr.clone(),
        };
        let owner = JointMember { instance: me.0, quic_addr: cx.config.quic_addr.clone() };
        let joins = who.iter().filter_map(|who| candidates.iter().find(|candidate| candidate.instance == who.0));
        let members: Vec<JointMember> =
            std::iter::once(owner).chain(joins.map(member)).take(layout.members as usize).collect();
        let total = layout.end * cx.config.block_tokens;
        let parts = sequence.tokens[..total as usize].chunks(PREFILL_TOKENS_MAX);
        for (first, tokens) in (0..).step_by(PREFILL_TOKENS_MAX).zip(parts) {
            let prompt = JointPrompt {
                total,
                first: u32::try_from(first).unwrap_or(u32::MAX),
                tokens: tokens.to_vec(),
                members: if first == 0 { members.clone() } else { Vec::new() },
                known_blocks: layout.known,
                stripe_blocks: layout.stripe,
                cache_salt: sequence.options.cache_salt.to_string(),
            };
            for member in &members[1..] {
                send(cx, InstanceId(member.instance), (me, owned.job), JointBody::Prompt(prompt.clone()));
            }
        }
        let until_ms = now_ms + JOINT_GRANT_MS;
        owned.stage = Stage::Granting { layout, members, granted: BTreeMap::new(), sent_ms: now_ms, until_ms };
    }

    /// A member has leased its blocks to the others; when all have, the joint prefill begins.
    pub(super) fn on_granted(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        seq: SeqId,
        from: InstanceId,
        granted_by: JointGranted,
    ) {
        let Some(Owned { stage: Stage::Granting { members, granted, .. }, .. }) = self.owned.get_mut(&seq) else {
            return;
        };
        let is_member = members[1..].iter().any(|member| member.instance == from.0);
        let others = |member: &&JointMember| member.instance != from.0;
        let to_all = members
            .iter()
            .filter(others)
            .all(|member| granted_by.leases.iter().filter(|lease| lease.instance == member.instance).count() == 1);
        if !is_member || !to_all {
            return;
        }
        granted.insert(from, granted_by.leases);
        if granted.len() + 1 == members.len() && !self.begin(cx, batch, seq) {
            self.stop_members(cx, seq, "the owner cannot begin");
            self.compute_alone(cx, batch, seq);
        }
    }

    /// Begins: takes memory and the leases of all members, and sends every member those of the others. False if one is missing.
    fn begin(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId) -> bool {
        let Some(owned) = self.owned.get_mut(&seq) else { return false };
        let Stage::Granting { layout, members, granted, sent_ms, .. } = &owned.stage else { return false };
        let (layout, sent_ms, now_ms) = (*layout, *sent_ms, cx.now_ms);
        let Some(me) = cx.standing.id.filter(|_| batch.take_joint_memory(cx, seq, &layout)) else { return false };
        let own = batch.joint_blocks(seq, &layout, 0);
        let mut held = BTreeMap::new();
        for (number, member) in (1..).zip(&members[1..]) {
            let of = InstanceId(member.instance);
            let lease = granted[&of].iter().find(|lease| lease.instance == me.0);
            let Some(lease) = lease.filter(|lease| lease.blocks == layout.leased(number)) else { return false };
            let lease_of = borrowed(of, &member.quic_addr, lease);
            if cx.peers.key(of).is_none()
                || !cx.memory.rm.debtor.take_over(seq, &lease_of, (lease.ttl_ms, sent_ms), now_ms)
            {
                return false;
            }
            held.insert(number, lease_of);
        }
        let known = layout.known * cx.config.block_tokens;
        for member in &members[1..] {
            let debtor = InstanceId(member.instance);
            let pool = &mut cx.memory.rm.pool;
            let to = (debtor, SeqId(owned.job));
            let grant = cx.memory.rm.creditor.lease_out(seq, to, &own, known, now_ms, pool);
            owned.given.push(LeaseId(grant.lease));
            let of_owner = JointLease {
                instance: me.0,
                lease: grant.lease,
                epoch: grant.epoch,
                blocks: grant.blocks,
                ttl_ms: grant.ttl_ms,
            };
            let of_others = granted.iter().filter(|(creditor, _)| **creditor != debtor);
            let leases = of_others.filter_map(|(creditor, leases)| {
                let lease = leases.iter().find(|lease| lease.instance == member.instance)?;
                Some(JointLease { instance: creditor.0, ..*lease })
            });
            let leases = std::iter::once(of_owner).chain(leases).collect();
            let age_ms = u32::try_from(now_ms - sent_ms).unwrap_or(u32::MAX);
            send(cx, debtor, (me, owned.job), JointBody::Start(JointStart { leases, age_ms }));
        }
        let members = held.values().map(|lease| (lease.creditor, lease.lease)).collect();
        owned.stage = Stage::Running { members, computed: BTreeMap::new() };
        owned.progress_ms = now_ms;
        self.status.begun += 1;
        batch.begin_joint(cx, seq, (layout, 0), &held);
        true
    }

    /// A candidate refuses, or a member leaves or has computed its stripes: `blocks` of its lease, `None` if it is lost.
    pub(super) fn on_left(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        others: Others<'_>,
        seq: SeqId,
        from: InstanceId,
        (blocks, reason): (Option<u32>, &str),
    ) {
        let Some(owned) = self.owned.get_mut(&seq) else { return };
        match &mut owned.stage {
            Stage::Finding => {}
            Stage::Asking { open, willing, .. } => {
                if open.remove(&from) || willing.remove(&from).is_some() {
                    self.invite_if_answered(cx, batch, seq);
                }
            }
            Stage::Granting { members, .. } => {
                if members[1..].iter().any(|member| member.instance == from.0) {
                    self.stop_members(cx, seq, "a member left");
                    self.compute_alone(cx, batch, seq);
                }
            }
            Stage::Running { members, computed } | Stage::Ending { members, computed, .. } => {
                if !members.contains_key(&from) || computed.contains_key(&from) {
                    return;
                }
                computed.insert(from, blocks);
                if !reason.is_empty() {
                    tracing::info!(seq = %seq, member = %from, reason, "a member left a joint prefill");
                    self.end_owned(cx, batch, seq, "a member left");
                }
                self.end_if_reported(cx, batch, others, seq);
            }
        }
    }

    /// The prompt is computed, by all members, if nothing of it is due here: its last rows saw all of it.
    pub(super) fn on_owner_computed(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, seq: SeqId) {
        let now_ms = cx.now_ms;
        self.owned.get_mut(&seq).into_iter().for_each(|owned| owned.note_progress(now_ms));
        let is_running = self.owned.get(&seq).is_some_and(|owned| matches!(owned.stage, Stage::Running { .. }));
        let is_done = |of: &crate::batch::sequence::Sequence| of.blocks.lost().is_empty() && of.generated() > 0;
        if is_running && batch.seq(seq).is_some_and(is_done) {
            self.owned.remove(&seq);
            self.status.completed += 1;
            batch.end_joint(cx, others.prefills, seq, &BTreeMap::new());
        }
    }

    /// Begins to end an own joint prefill that computes, and asks the members what they have computed. The sequence leaves its step.
    pub(super) fn end_owned(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId, reason: &str) {
        let Some(owned) = self.owned.get_mut(&seq) else { return };
        let Stage::Running { members, computed } = &mut owned.stage else { return };
        let (members, computed) = (std::mem::take(members), std::mem::take(computed));
        let me = cx.standing.id.unwrap_or_default();
        for member in members.keys().filter(|member| !computed.contains_key(member)) {
            send(cx, *member, (me, owned.job), JointBody::End(JointEnd { reason: reason.to_owned() }));
        }
        owned.stage = Stage::Ending { members, computed, until_ms: cx.now_ms + JOINT_END_MS };
        self.status.ended += 1;
        batch.stop_joint(cx, seq);
        cx.emit(Outcome::StepLeft { seq });
    }

    /// Ends an own joint prefill when all members have reported what they have computed, or their time is over.
    fn end_if_reported(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, seq: SeqId) {
        let Some(owned) = self.owned.get_mut(&seq) else { return };
        let Stage::Ending { members, computed, until_ms } = &mut owned.stage else { return };
        let silent = |member: &InstanceId| !computed.contains_key(member) && cx.peers.key(*member).is_some();
        if batch.in_step(seq) || (cx.now_ms < *until_ms && members.keys().any(silent)) {
            return;
        }
        let of =
            |(member, lease): (&InstanceId, &LeaseId)| ((*member, *lease), computed.get(member).copied().flatten());
        let computed = members.iter().map(of).collect();
        self.owned.remove(&seq);
        batch.end_joint(cx, others.prefills, seq, &computed);
    }

    /// Own joint prefills go on without an instance whose connection was lost, or end.
    pub(super) fn owned_without(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, peer: InstanceId) {
        let seqs: Vec<SeqId> = self.owned.keys().copied().collect();
        for seq in seqs {
            self.on_left(cx, batch, others, seq, peer, (None, "its connection was lost"));
        }
    }

    pub(super) fn tick_owned(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>) {
        let seqs: Vec<SeqId> = self.owned.keys().copied().collect();
        for seq in seqs {
            self.invite_if_answered(cx, batch, seq);
            let late = |owned: &Owned| matches!(owned.stage, Stage::Granting { until_ms, .. } if until_ms <= cx.now_ms);
            if self.owned.get(&seq).is_some_and(late) {
                self.stop_members(cx, seq, "a member did not grant in time");
                self.compute_alone(cx, batch, seq);
            }
            let stuck = |owned: &Owned| cx.now_ms >= owned.progress_ms + cx.step_deadline_ms;
            if self.owned.get(&seq).is_some_and(stuck) {
                self.end_owned(cx, batch, seq, "no stripe was started or computed for too long");
            }
            self.end_if_reported(cx, batch, others, seq);
        }
    }

    /// The owner's sequence has freed its memory.
    pub(super) fn on_owner_released(&mut self, cx: &mut Cx, seq: SeqId) {
        if self.owned.contains_key(&seq) {
            self.stop_members(cx, seq, "the request ended");
            cx.memory.rm.debtor.find_no_members(seq);
            // An answer of one token ends with its prompt.
            if let Some(Owned { stage: Stage::Running { members, computed }, .. }) = self.owned.remove(&seq) {
                let is_complete = computed.len() == members.len();
                *(if is_complete { &mut self.status.completed } else { &mut self.status.ended }) += 1;
            }
        }
    }

    /// This instance was declared dead: what it had leased and lent is gone.
    pub(super) fn drop_owned(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>) {
        let seqs: Vec<SeqId> = self.owned.keys().copied().collect();
        for seq in seqs {
            self.end_owned(cx, batch, seq, "the owner was declared dead");
            if let Some(Owned { stage: Stage::Ending { until_ms, .. }, .. }) = self.owned.get_mut(&seq) {
                *until_ms = 0;
                self.end_if_reported(cx, batch, others, seq);
            } else {
                self.compute_alone(cx, batch, seq);
            }
        }
    }

    /// Tells all members that it ends.
    fn stop_members(&self, cx: &mut Cx, seq: SeqId, reason: &str) {
        let Some(owned) = self.owned.get(&seq) else { return };
        let me = cx.standing.id.unwrap_or_default();
        let end = JointEnd { reason: reason.to_owned() };
        owned.members().for_each(|member| send(cx, member, (me, owned.job), JointBody::End(end.clone())));
    }

    /// Forgets an own joint prefill that has not begun: the sequence is placed as any other.
    fn compute_alone(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId) {
        if let Some(owned) = self.owned.remove(&seq) {
            assert!(owned.given.is_empty(), "nothing is leased before all members have granted");
            cx.memory.rm.debtor.find_no_members(seq);
            cx.memory.rm.debtor.held.release_leases_of(seq, cx.now_ms);
            self.status.alone += 1;
            batch.computes_alone(cx, seq);
        }
    }
}

/// The willing ones that compute a prompt fastest with this instance, whose steps have `own` rows of it, and the rows of a stripe: no
/// step has more than those of the slowest, as each waits for those before it. `None` if none makes it faster.
fn fastest(own: u32, willing: &BTreeMap<InstanceId, u32>) -> Option<(u32, Vec<InstanceId>)> {
    let mut by_rows: Vec<(InstanceId, u32)> = willing.iter().map(|(of, rows)| (*of, *rows)).collect();
    by_rows.sort_by_key(|(of, rows)| (std::cmp::Reverse(*rows), *of));
    let with = |n: usize| (u64::from(by_rows[n - 1].1.min(own)) * (n as u64 + 1), n);
    let (rows, n) = (1..=by_rows.len()).map(with).max()?;
    let who = by_rows[..n].iter().map(|(of, _)| *of).collect();
    (rows > u64::from(own)).then(|| (by_rows[n - 1].1.min(own), who))
}

/// A member's lease, as this instance holds it.
pub(super) fn borrowed(creditor: InstanceId, quic_addr: &str, lease: &JointLease) -> BorrowedLease {
    BorrowedLease {
        creditor,
        quic_addr: quic_addr.to_owned(),
        lease: LeaseId(lease.lease),
        epoch: Epoch(lease.epoch),
        blocks: lease.blocks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_those_with_which_a_prompt_is_fastest() {
        let found = |own: u32, rows: &[u32]| {
            let willing = (1..).map(InstanceId).zip(rows.iter().copied()).collect();
            fastest(own, &willing).map(|(rows, who)| (rows, who.iter().map(|of| of.0).collect::<Vec<_>>()))
        };
        assert_eq!(found(600, &[600, 600, 600]), Some((600, vec![1, 2, 3])));
        // The slowest bounds all: three of 500 are faster than four of 300, and two of 2,000 than three of 500.
        assert_eq!(found(600, &[300, 500, 500]), Some((500, vec![2, 3])));
        assert_eq!(found(2_000, &[500, 2_000, 300]), Some((2_000, vec![2])));
        assert_eq!(found(500, &[2_000, 2_000]), Some((500, vec![1, 2])), "the owner bounds them, too");
        assert_eq!(found(2_000, &[1_000]), None, "as fast as alone");
        assert_eq!(found(2_000, &[]), None);
    }
}
