//! What joint prefill does to sequences: the owner's waits while members are asked, a member's is in no queue until it begins;
//! then both have tables in which the others' rBlocks are leased, and compute their own as lost ranges.

use super::Batch;
use super::others::PrefillQueries;
use super::policy::{self, JointHere, JointLoad, LongPrompt};
use super::sequence::{HeldLease, Life, Need, Sequence};
use super::stripes::{Layout, Stripes};
use crate::cx::Cx;
use crate::outcome::{JointNews, Outcome};
use lagoon_cluster::BorrowedLease;
use lagoon_kv::{JointPart, Owner, Placement, RemoteBlock, RemoteEntries};
use lagoon_types::limits::{JOINT_MEMBERS_MAX, JOINT_STRIPES_MIN};
use lagoon_types::{InstanceId, LeaseId, MicroBatch, PhysBlock, SeqId};
use std::collections::BTreeMap;

impl Batch {
    /// Leaves a waiting sequence's prompt, of which nothing is known elsewhere, to several instances, if it is long enough for them.
    /// Returns whether it waits for them.
    pub(super) fn asks_members(&mut self, cx: &mut Cx, id: SeqId) -> bool {
        let (known, _) = self.adopt_prefix(cx, id);
        let plan = self.joint_layout(cx, id, JOINT_MEMBERS_MAX, self.joint_rows(cx, self.tokens_of(id)));
        let Some(seq) = self.seqs.get_mut(&id) else { return false };
        seq.asked_members = true;
        if plan.is_none() {
            if known > 0 {
                self.drop_blocks(cx, id);
            }
            return false;
        }
        seq.set_need(Need::Joining);
        self.due.touch();
        cx.emit(Outcome::Joint(JointNews::Wanted(id)));
        true
    }

    /// Hashes a waiting sequence's prompt if several instances might compute it. Returns the number of its hashes.
    pub(super) fn hash_for_members(&mut self, cx: &Cx, id: SeqId) -> Option<usize> {
        let seq = self.seqs.get(&id).filter(|_| cx.standing.id.is_some() && cx.standing.registered)?;
        let prompt = LongPrompt {
            is_plain: seq.for_others.is_none() && seq.embedding.is_none() && !seq.needs_positions(),
            asked: seq.asked_members,
            is_elsewhere: seq.blocks.remote_blocks() > 0 || seq.blocks.lost_blocks() > 0 || seq.beside() > 0,
            tokens: seq.len(),
        };
        let may = policy::may_ask_members(self.joint_here(cx), prompt, cx.config.joint.tokens_min);
        may.then(|| self.hash_wanted(cx, id))
    }

    /// Whether a waiting sequence's prompt, with its first `hashes` block hashes, is given to several instances.
    pub(super) fn suits_members(&self, cx: &Cx, id: SeqId, hashes: usize) -> bool {
        let Some(seq) = self.seqs.get(&id) else { return false };
        let known = cx.memory.rm.pool.found(&seq.block_hashes[..hashes]).max(seq.blocks.blocks());
        let left = seq.len() - (known * cx.config.block_tokens).min(seq.len());
        let (tokens_min, forced) = (cx.config.joint.tokens_min, cx.config.joint.instances != 0);
        policy::suits_members(left, tokens_min, self.alone_ms(cx, left), forced)
            && self.has_rows_for_others(cx, seq.len())
    }

    fn joint_here(&self, cx: &Cx) -> JointHere {
        let windowed = cx.config.window.is_some() || cx.config.windowed.is_some();
        JointHere {
            is_on: cx.config.joint.instances != 1,
            is_followed: !windowed && cx.memory.rm.pool.caches_runs(),
            free_places: policy::free_places(self.sched.running_len(), cx.config.sched.running),
        }
    }

    /// Predicted time to compute `tokens` tokens of a prompt here, beside what decodes, in milliseconds; endless if it was not measured.
    fn alone_ms(&self, cx: &Cx, tokens: u32) -> f64 {
        let row_us = self.row_us(cx);
        let row_ms = if row_us > 0.0 { row_us / 1_000.0 } else { return f64::INFINITY };
        let rows = f64::from(self.chunk_rows(cx, MicroBatch::Local, Some(tokens / 2)));
        let step_ms = cx.config.target_step_ms.map_or(0.0, f64::from);
        f64::from(tokens) * row_ms.max(step_ms / rows)
    }

    /// Tokens of a sequence; 0 if it is gone.
    pub(crate) fn tokens_of(&self, id: SeqId) -> u32 {
        self.seqs.get(&id).map_or(0, Sequence::len)
    }

    /// Rows that a step has here now in the middle of another prompt of `tokens` tokens, whose KV is on several instances, beside prompts
    /// of the local micro-batch.
    pub(crate) fn joint_rows(&self, cx: &Cx, tokens: u32) -> u32 {
        self.chunk_rows(cx, MicroBatch::Remote, Some(tokens / 2)).min(cx.config.remote_rows())
    }

    fn has_rows_for_others(&self, cx: &Cx, tokens: u32) -> bool {
        policy::has_rows_for_others(self.joint_rows(cx, tokens), cx.config.remote_rows())
    }

    /// How up to `members` instances would share the prompt of a sequence that holds what is known of it, in stripes of `rows` rows.
    pub(crate) fn joint_layout(&self, cx: &Cx, id: SeqId, members: usize, rows: u32) -> Option<Layout> {
        let seq = self.seqs.get(&id)?;
        let tokens = cx.config.block_tokens;
        let (known, end) = (seq.blocks.blocks(), (seq.len() - 1) / tokens);
        let stripe = (rows / tokens).max(1);
        let most = match cx.config.joint.instances {
            0 => JOINT_MEMBERS_MAX,
            n => (n as usize).min(JOINT_MEMBERS_MAX),
        };
        let by_length = end.saturating_sub(known).div_ceil(stripe) / JOINT_STRIPES_MIN;
        let members = u32::try_from(members.min(most)).unwrap_or(u32::MAX).min(by_length);
        Layout::new(known, end, stripe, members)
    }

    /// Why this instance computes no part of another one's prompt of `tokens` tokens; `None` if it would, with `blocks` of its memory.
    pub(crate) fn refuses_to_join(&self, cx: &Cx, tokens: u32, blocks: u32) -> Option<String> {
        let load = JointLoad {
            takes_requests: !cx.standing.draining && !cx.standing.drained && cx.standing.roles.accepts(cx.now_ms),
            has_rows: self.has_rows_for_others(cx, tokens),
            prompt_tokens: self.seqs.values().map(Sequence::prefill_left).sum(),
            room: self.room(cx),
        };
        policy::refuses_to_join(self.joint_here(cx), load, blocks, cx.config.block_tokens).map(|why| why.to_string())
    }

    /// Adds a sequence that computes a part of another instance's prompt, and takes its memory. False if there is too little.
    pub(crate) fn add_member(&mut self, cx: &mut Cx, mut seq: Sequence, blocks: u32) -> bool {
        if blocks > self.room(cx) {
            return false;
        }
        let Some(own) = cx.memory.rm.pool.allocate(Owner::Own(seq.id), blocks, None) else { return false };
        seq.aside = own;
        seq.life = Life::Away { retry_at_ms: None };
        self.add(seq.id, seq);
        true
    }

    /// Takes memory for what the owner computes itself: its stripes, and what is behind them. False if there is too little.
    pub(crate) fn take_joint_memory(&mut self, cx: &mut Cx, id: SeqId, layout: &Layout) -> bool {
        let room = self.room(cx);
        let Some(seq) = self.seqs.get_mut(&id) else { return false };
        let behind = (seq.len() + 1).div_ceil(cx.config.block_tokens) - layout.end;
        let blocks = layout.computed_by(0) + behind;
        let own = if blocks <= room { cx.memory.rm.pool.allocate(Owner::Own(id), blocks, None) } else { None };
        let Some(own) = own else { return false };
        seq.aside = own;
        true
    }

    /// The blocks that a member leases to the others: those that it knows and those that it will compute.
    pub(crate) fn joint_blocks(&self, id: SeqId, layout: &Layout, me: u32) -> Vec<PhysBlock> {
        let Some(seq) = self.seqs.get(&id) else { return Vec::new() };
        let known = seq.blocks.placements().iter().filter_map(|placement| match placement {
            Placement::Local(block) => Some(*block),
            Placement::Remote(_) | Placement::Lost | Placement::Gone => None,
        });
        known.chain(seq.aside.iter().take(layout.computed_by(me) as usize).copied()).collect()
    }

    /// Begins a sequence's part of a joint prefill with the leases of the other members, by number. The caller holds them.
    pub(crate) fn begin_joint(
        &mut self,
        cx: &mut Cx,
        id: SeqId,
        (layout, me): (Layout, u32),
        leases: &BTreeMap<u32, BorrowedLease>,
    ) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let mut own = std::mem::take(&mut seq.aside).into_iter();
        let leased = |member: u32, first: u32, blocks: u32| {
            let &BorrowedLease { creditor, lease, epoch, .. } = &leases[&member];
            JointPart::Leased(RemoteEntries { creditor, lease, epoch, first, entries: first + blocks })
        };
        let mut parts = Vec::new();
        if me != 0 && layout.known > 0 {
            parts.push(leased(0, 0, layout.known));
        }
        for stripe in 0..layout.stripes() {
            let (member, blocks) = (layout.member_of(stripe), layout.blocks_of(stripe));
            let n = blocks.end - blocks.start;
            parts.push(if member == me {
                JointPart::Own(own.by_ref().take(n as usize).collect())
            } else {
                leased(member, layout.entry(member, blocks.start), n)
            });
        }
        seq.blocks.begin_joint(&parts);
        seq.blocks.push_local(&own.collect::<Vec<_>>());
        for lease in leases.values() {
            seq.leases.insert((lease.creditor, lease.lease), HeldLease::handed(lease.blocks, BTreeMap::new()));
        }
        seq.joint = Some(Box::new(Stripes::new(layout, me)));
        if me == 0 {
            seq.set_need(Need::Met);
            self.due.touch();
            self.admit_placed(cx);
        } else {
            let (tokens, lost) = (seq.len(), seq.blocks.lost().to_vec());
            let micro_batch = self.micro_batch_of(id);
            self.sched.join(id, micro_batch, tokens, &lost);
            self.set_life(id, Life::Running(Need::Met));
            self.changed();
        }
    }

    /// No members were found for a waiting sequence: it is placed as any other.
    pub(crate) fn computes_alone(&mut self, cx: &mut Cx, id: SeqId) {
        if self.seqs.get(&id).is_some_and(|seq| seq.need() == Some(Need::Joining)) {
            self.drop_blocks(cx, id);
        }
    }

    /// Frees what a waiting sequence holds, and has it tried again at once.
    fn drop_blocks(&mut self, cx: &mut Cx, id: SeqId) {
        self.stop_waiting(cx, id);
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.hashed = 0;
            super::preempt::give_back(cx, id, &seq.blocks.clear());
        }
        self.due.touch();
    }

    /// Records that the last step of a stripe has started.
    pub(crate) fn note_stripe(&mut self, id: SeqId, stripe: u32) {
        if let Some(joint) = self.seqs.get_mut(&id).and_then(|seq| seq.joint.as_mut()) {
            joint.note_started(stripe);
            self.due.touch();
        }
    }

    /// Nothing more of a joint prefill starts here.
    pub(crate) fn stop_joint(&mut self, cx: &Cx, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        if let Some(joint) = &mut seq.joint {
            joint.stopped = true;
            // What is due here, and what no member has begun, was never computed: it does not count as computed again.
            let tokens = cx.config.block_tokens;
            let elsewhere = joint.not_started().map(|blocks| blocks.start * tokens..blocks.end * tokens);
            seq.first_due = seq.blocks.lost().iter().cloned().chain(elsewhere).collect();
        }
    }

    /// Ends the owner's joint prefill: what members have not computed, of each `computed` blocks of its lease, is lost and
    /// computed here, or wherever there is memory; of one that has not reported (`None`), all. Without losses only the stripes are
    /// forgotten.
    pub(crate) fn end_joint(
        &mut self,
        cx: &mut Cx,
        prefills: &dyn PrefillQueries,
        id: SeqId,
        computed: &BTreeMap<(InstanceId, LeaseId), Option<u32>>,
    ) {
        let tokens = cx.config.block_tokens;
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        if seq.joint.take().is_none() {
            return;
        }
        let mut first_due = std::mem::take(&mut seq.first_due);
        let is_missing = |b: &RemoteBlock| {
            computed.get(&(b.creditor, b.lease)).is_some_and(|computed| b.entry >= computed.unwrap_or(0))
        };
        let is_known = |b: &RemoteBlock| computed.get(&(b.creditor, b.lease)).is_some_and(Option::is_some);
        for (block, placement) in (0..).zip(seq.blocks.placements()) {
            if let Placement::Remote(b) = placement
                && is_missing(b)
                && is_known(b)
                && !first_due.iter().any(|due| due.contains(&(block * tokens)))
            {
                first_due.push(block * tokens..(block + 1) * tokens);
            }
        }
        if computed.is_empty() {
            return;
        }
        seq.first_due = first_due;
        if !self.is_running(id) {
            // Nothing is computed yet: admission starts again.
            return self.release_memory(cx, prefills, id);
        }
        self.mark_lost(cx, prefills, id, is_missing);
    }
}
