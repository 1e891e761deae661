//! Joint prefill: several instances compute one long prompt together (docs/adr/0038, docs/joint-prefill.md).
//!
//! The **owner** has the request; it asks candidates, sends the members the prompt, and begins when all have granted leases of
//! their rBlocks to each other. Then every member computes its stripes as lost ranges of a sequence of its own, whose other
//! rBlocks are leased: attention to them waits at their creditors until their KV is appended, layer by layer.
//!
//! Invariants:
//! * a member's memory and leases exist before anybody computes; an owner that cannot get all of that computes alone;
//! * every wait has a deadline, and a joint prefill that ends early leaves the owner an ordinary sequence with lost ranges: what
//!   members have computed stays leased;
//! * KV is computed by its member only, and leases outlive the sequence that computed it.

mod member;
mod owner;

use crate::batch::stripes::Layout;
use crate::batch::{Batch, Others};
use crate::cx::Cx;
use crate::outcome::{JointNews, Outcome, Outcomes};
use lagoon_protocol::{Candidate, ControlBody, Joint, JointBody};
use lagoon_types::{InstanceId, SeqId};
use member::Member;
use owner::Owned;
use std::collections::BTreeMap;

/// First sequence number of parts of other instances' prompts; own requests and prefills for decode workers are numbered below.
pub const MEMBER_SEQ_BASE: u64 = (1 << 62) | (1 << 61);

/// An owner and its number of a joint prefill: that of its sequence, which is in one at most once.
type Key = (InstanceId, u64);

/// Counters of joint prefill since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct JointStatus {
    /// Own prompts that were begun with others; those of them that all members computed to the end, and those that ended early.
    pub begun: u64,
    pub completed: u64,
    pub ended: u64,
    /// Own prompts for which members were asked for and not found.
    pub alone: u64,
    /// Prompts of others of which this instance computed a part, and the tokens of these parts.
    pub joined: u64,
    pub computed_tokens: u64,
}

/// An instance's part in a joint prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JointState {
    /// It is the owner.
    pub owns: bool,
    /// Name of the state.
    pub stage: &'static str,
    /// Tokens that it has computed as a member.
    pub computed_tokens: u32,
}

/// The joint prefill machine. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Joints {
    owned: BTreeMap<SeqId, Owned>,
    members: BTreeMap<Key, Member>,
    next_seq: u64,
    status: JointStatus,
}

/// Events of joint prefill.
#[derive(Debug)]
pub(crate) enum JointEvent {
    /// A peer's message.
    Control {
        from: InstanceId,
        message: Joint,
    },
    /// Batch or steps did something.
    News(JointNews),
    /// The gManager's candidates.
    Found {
        seq: SeqId,
        candidates: Vec<Candidate>,
    },
    /// A sequence has freed its memory, or was removed.
    Released(SeqId),
    /// A sequence has lost KV.
    Lost(SeqId),
    PeerUp,
    PeerGone(InstanceId),
    /// This instance was declared dead and begins a new incarnation.
    NewLife,
    Tick,
}

impl Joints {
    pub(crate) fn handle(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, event: JointEvent) -> Outcomes {
        match event {
            JointEvent::Control { from, message } => self.on_message(cx, batch, others, from, message),
            JointEvent::News(JointNews::Wanted(seq)) => self.find(cx, batch, seq),
            JointEvent::Found { seq, candidates } => self.on_found(cx, batch, seq, candidates),
            JointEvent::News(JointNews::StripeStarted { seq, stripe }) => self.on_started(cx, batch, seq, stripe),
            JointEvent::News(JointNews::Appended { seq, layer, end }) => self.on_appended(cx, batch, seq, layer, end),
            JointEvent::News(JointNews::Computed(seq)) => {
                self.on_owner_computed(cx, batch, others, seq);
                self.on_member_computed(cx, batch, others, seq);
            }
            JointEvent::Released(seq) => {
                self.on_owner_released(cx, seq);
                self.on_member_released(cx, seq);
            }
            JointEvent::Lost(seq) => {
                self.end_owned(cx, batch, seq, "KV of a member was lost");
                self.leave_lost(cx, batch, others, seq);
            }
            JointEvent::PeerUp => self.grant_met(cx, batch),
            JointEvent::PeerGone(peer) => {
                self.owned_without(cx, batch, others, peer);
                self.leave_all(cx, batch, others, |member| member.owner() == peer);
            }
            JointEvent::NewLife => {
                self.leave_all(cx, batch, others, |_| true);
                self.drop_owned(cx, batch, others);
            }
            JointEvent::Tick => {
                self.tick_owned(cx, batch, others);
                self.grant_met(cx, batch);
                let now_ms = cx.now_ms;
                self.leave_all(cx, batch, others, |member| member.is_late(now_ms));
            }
        }
        cx.take_outcomes()
    }

    /// Counters since the start.
    pub(crate) fn status(&self) -> JointStatus {
        self.status
    }

    /// Own joint prefills, and parts of others'.
    pub(crate) fn parts(&self, block_tokens: u32) -> Vec<JointState> {
        let owned =
            self.owned.values().map(|owned| JointState { owns: true, stage: owned.stage(), computed_tokens: 0 });
        let part = |member: &Member| JointState {
            owns: false,
            stage: member.stage(),
            computed_tokens: member.computed() * block_tokens,
        };
        owned.chain(self.members.values().map(part)).collect()
    }

    /// Parts of other instances' prompts that have memory and have not begun.
    pub(crate) fn waiting(&self) -> usize {
        self.members.values().filter(|member| member.waits()).count()
    }

    fn on_message(&mut self, cx: &mut Cx, batch: &mut Batch, others: Others<'_>, from: InstanceId, message: Joint) {
        let (owner, job) = (InstanceId(message.owner), message.job);
        let of_owner = owner == from;
        let own = self.owned.iter().find(|(_, owned)| Some(owner) == cx.standing.id && owned.job == job);
        let own = own.map(|(seq, _)| *seq);
        match (message.body, own) {
            (Some(JointBody::Ask(ask)), _) if of_owner => self.on_ask(cx, batch, (owner, job), ask),
            (Some(JointBody::Prompt(prompt)), _) if of_owner => self.on_prompt(cx, batch, (owner, job), prompt),
            (Some(JointBody::Start(start)), _) if of_owner => self.on_start(cx, batch, others, (owner, job), &start),
            (Some(JointBody::End(_)), _) if of_owner => self.on_end(cx, batch, others, (owner, job)),
            (Some(JointBody::Stripe(of)), own) => self.on_stripe(cx, batch, from, ((owner, job), own), of.stripe),
            (Some(JointBody::Willing(of)), Some(seq)) => self.on_willing(cx, batch, seq, (from, of.rows)),
            (Some(JointBody::Granted(granted)), Some(seq)) => self.on_granted(cx, batch, seq, from, granted),
            (Some(JointBody::Left(left)), Some(seq)) => {
                self.on_left(cx, batch, others, seq, from, (Some(left.blocks), &left.reason));
            }
            // It connects this instance with a member, or comes too late.
            _ => {}
        }
    }

    /// The last step of another member's stripe has started.
    fn on_stripe(
        &mut self,
        cx: &Cx,
        batch: &mut Batch,
        from: InstanceId,
        (key, own): (Key, Option<SeqId>),
        stripe: u32,
    ) {
        if let Some((seq, owned)) = own.and_then(|seq| Some((seq, self.owned.get_mut(&seq)?))) {
            if owned.members().any(|member| member == from) {
                owned.note_progress(cx.now_ms);
                batch.note_stripe(seq, stripe);
            }
        } else if let Some(member) = self.members.get_mut(&key)
            && member.others().any(|other| other == from)
        {
            member.note_stripe(batch, stripe);
        }
    }

    /// Tells all other members that the last step of a stripe has started.
    fn on_started(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId, stripe: u32) {
        batch.note_stripe(seq, stripe);
        let body = JointBody::Stripe(lagoon_protocol::JointStripe { stripe });
        if let Some(owned) = self.owned.get(&seq) {
            let me = cx.standing.id.unwrap_or_default();
            owned.members().for_each(|member| send(cx, member, (me, owned.job), body.clone()));
        } else if let Some((key, member)) = self.members.iter().find(|(_, member)| member.seq() == Some(seq)) {
            member.others().for_each(|other| send(cx, other, *key, body.clone()));
        }
    }

    /// Advances the leases of what a step has appended, and has the queries served that wait for it.
    fn on_appended(&mut self, cx: &mut Cx, batch: &Batch, seq: SeqId, layer: u32, end: u32) {
        let Some(joint) = batch.seq(seq).and_then(|seq| seq.joint.as_ref()) else { return };
        let of_member = self.members.values().find(|member| member.seq() == Some(seq)).map(|member| &member.given);
        let Some(given) = self.owned.get(&seq).map(|owned| &owned.given).or(of_member) else { return };
        let tokens = written(&joint.layout, joint.me, end, cx.config.block_tokens);
        given.iter().for_each(|lease| cx.memory.rm.creditor.note_computed(*lease, layer, tokens));
        cx.emit(Outcome::KvAppended);
    }
}

/// Tokens of a member's lease that are written when its positions before `end` are, which is in or behind one of its stripes.
fn written(layout: &Layout, me: u32, end: u32, block_tokens: u32) -> u32 {
    let last = (end - 1) / block_tokens;
    if last >= layout.end {
        return layout.leased(me) * block_tokens;
    }
    layout.entry(me, last) * block_tokens + end - last * block_tokens
}

/// Sends a message of joint prefill to a connected instance.
fn send(cx: &mut Cx, to: InstanceId, (owner, job): Key, body: JointBody) {
    cx.send_if_connected(to, joint((owner, job), body));
}

fn joint((owner, job): Key, body: JointBody) -> ControlBody {
    ControlBody::Joint(Box::new(Joint { owner: owner.0, job, body: Some(body) }))
}
