//! Messages of joint prefill: several instances (members) compute one prompt together (docs/adr/0038).
//!
//! The **owner** has the request. A **stripe** is a number of consecutive rBlocks of the prompt that one member computes; members
//! take stripes in turn. Every member leases its rBlocks to every other one before it computes them.

use prost::{Message, Oneof};

/// Envelope of the messages of joint prefill.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Joint {
    /// Instance that owns the request.
    #[prost(uint32, tag = "1")]
    pub owner: u32,
    /// The owner's number of this joint prefill; unique in its incarnation.
    #[prost(uint64, tag = "2")]
    pub job: u64,
    #[prost(oneof = "JointBody", tags = "3, 4, 5, 6, 7, 8, 9, 10, 11")]
    pub body: Option<JointBody>,
}

/// Body of a message of joint prefill.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum JointBody {
    /// Owner to candidate: would it join?
    #[prost(message, tag = "3")]
    Ask(JointAsk),
    /// Candidate to owner: it would.
    #[prost(message, tag = "4")]
    Willing(JointWilling),
    /// Owner to member: the prompt, and who computes what.
    #[prost(message, tag = "5")]
    Prompt(JointPrompt),
    /// Member to owner: memory is allocated, and leased to the other members.
    #[prost(message, tag = "6")]
    Granted(JointGranted),
    /// Owner to member: all members have granted; begin.
    #[prost(message, tag = "7")]
    Start(JointStart),
    /// Member to member: the last step of a stripe has begun.
    #[prost(message, tag = "8")]
    Stripe(JointStripe),
    /// Member to owner, or candidate to owner: it refuses, leaves, or has computed all of its stripes.
    #[prost(message, tag = "9")]
    Left(JointLeft),
    /// Owner to member: it ends; the member answers [`JointBody::Left`].
    #[prost(message, tag = "10")]
    End(JointEnd),
    /// Member to member: connects them.
    #[prost(message, tag = "11")]
    Meet(JointMeet),
}

/// The owner asks whether an instance would compute a part of a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct JointAsk {
    /// rBlocks that it would hold.
    #[prost(uint32, tag = "1")]
    pub blocks: u32,
    /// Tokens of the whole prompt.
    #[prost(uint32, tag = "2")]
    pub total: u32,
}

/// The instance would.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct JointWilling {
    /// Rows of the prompt that a step of it would have now, beside those of sequences that decode there.
    #[prost(uint32, tag = "1")]
    pub rows: u32,
}

/// Member of a joint prefill.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct JointMember {
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    /// Address at which other members connect to it.
    #[prost(string, tag = "2")]
    pub quic_addr: String,
}

/// The prompt. Long ones are split into several messages, in order; all fields but `first` and `tokens` count in the first one.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct JointPrompt {
    /// Tokens of all messages.
    #[prost(uint32, tag = "1")]
    pub total: u32,
    /// Position of the first token of this message.
    #[prost(uint32, tag = "2")]
    pub first: u32,
    #[prost(uint32, repeated, tag = "3")]
    pub tokens: Vec<u32>,
    /// All members in turn; the owner is the first.
    #[prost(message, repeated, tag = "4")]
    pub members: Vec<JointMember>,
    /// Leading rBlocks whose KV the owner has.
    #[prost(uint32, tag = "5")]
    pub known_blocks: u32,
    /// rBlocks of a stripe.
    #[prost(uint32, tag = "6")]
    pub stripe_blocks: u32,
    /// The tenant in the prefix cache.
    #[prost(string, tag = "7")]
    pub cache_salt: String,
}

/// Lease of a member's rBlocks in joint prefill.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct JointLease {
    /// The other instance: debtor in a [`JointGranted`], creditor in a [`JointStart`].
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    #[prost(fixed64, tag = "2")]
    pub lease: u64,
    #[prost(fixed64, tag = "3")]
    pub epoch: u64,
    #[prost(uint32, tag = "4")]
    pub blocks: u32,
    /// Time to live without a renewal, in milliseconds.
    #[prost(uint64, tag = "5")]
    pub ttl_ms: u64,
}

/// A member's leases to all others.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct JointGranted {
    #[prost(message, repeated, tag = "1")]
    pub leases: Vec<JointLease>,
}

/// All others' leases to a member.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct JointStart {
    #[prost(message, repeated, tag = "1")]
    pub leases: Vec<JointLease>,
    /// Time since the owner sent the prompt, in milliseconds: the leases are younger.
    #[prost(uint32, tag = "2")]
    pub age_ms: u32,
}

/// The step that computes the last rows of a stripe has begun.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct JointStripe {
    #[prost(uint32, tag = "1")]
    pub stripe: u32,
}

/// The sender computes nothing more.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct JointLeft {
    /// rBlocks of its lease to the owner whose KV is computed, from the first on.
    #[prost(uint32, tag = "1")]
    pub blocks: u32,
    /// Why, for operators; empty if it has computed all.
    #[prost(string, tag = "2")]
    pub reason: String,
}

/// The joint prefill ends.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct JointEnd {
    /// For operators.
    #[prost(string, tag = "1")]
    pub reason: String,
}

/// Connects two members.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct JointMeet {}
