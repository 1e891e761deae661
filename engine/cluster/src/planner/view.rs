//! What the planner sees of a pool: plain data that the gManager keeps up to date from heartbeats, row by row, so that a
//! planning round copies nothing.
//!
//! Everything here is as old as the heartbeat that brought it. Orders that follow from it may be refused; a later round
//! plans again.

use crate::perf::{LinkView, ModelShape};
use lagoon_protocol::{Calibration, Load, MemoryTier, Role};
use lagoon_types::{InstanceId, SeqId};
use std::collections::{BTreeMap, BTreeSet};

/// The pool as of the last heartbeats. The gManager holds one and updates it in place.
#[derive(Clone, Debug, Default)]
pub struct PoolView {
    /// Time of the round.
    pub now_ms: u64,
    /// Sizes that all instances share.
    pub shape: ModelShape,
    /// Live instances by number. One that is silent, fenced or gone is removed.
    pub instances: BTreeMap<InstanceId, InstanceView>,
}

/// One instance.
#[derive(Clone, Debug)]
pub struct InstanceView {
    pub role: Role,
    pub tier: MemoryTier,
    /// As it registered; without one the planner assumes [`crate::PlannerConfig::assumed`] and says so in its plan.
    pub calibration: Option<Calibration>,
    /// Of its last heartbeat; default (idle) for a node that runs no requests.
    pub load: Load,
    pub blocks_total: u32,
    /// Free blocks, lendable or not.
    pub blocks_free: u32,
    /// Blocks that it would lend now, corrected by refusals.
    pub blocks_lendable: u32,
    /// Blocks that moves which were ordered and have not ended will take here.
    pub blocks_incoming: u32,
    /// Blocks that such moves will take away from here.
    pub blocks_outgoing: u32,
    /// Blocks that it has lent, by debtor, as it reports them itself.
    pub lent: Vec<(InstanceId, u32)>,
    /// Blocks that it has borrowed, as it reports them itself.
    pub borrowed: u32,
    /// Requests whose debtor it is.
    pub requests: BTreeMap<SeqId, RequestView>,
    /// Links that it measured, ascending by peer. The other end's measurement is used where there is none here.
    pub links: Vec<(InstanceId, LinkView)>,
    /// Creditors whose memory it has mapped (peer access): it attends to what it borrows there itself.
    pub mapped: BTreeSet<InstanceId>,
    /// Its blocks are leaving; it neither borrows nor lends.
    pub draining: bool,
    /// It takes part in a DGFM cycle: nothing of it moves.
    pub frozen: bool,
    /// It refused a move or a lease since its last heartbeat, or its placement rows are not complete yet: nothing new is
    /// placed on it.
    pub paused: bool,
}

impl Default for InstanceView {
    fn default() -> Self {
        Self {
            role: Role::Instance,
            tier: MemoryTier::Device,
            calibration: None,
            load: Load::default(),
            blocks_total: 0,
            blocks_free: 0,
            blocks_lendable: 0,
            blocks_incoming: 0,
            blocks_outgoing: 0,
            lent: Vec::new(),
            borrowed: 0,
            requests: BTreeMap::new(),
            links: Vec::new(),
            mapped: BTreeSet::new(),
            draining: false,
            frozen: false,
            paused: false,
        }
    }
}

/// A row of the request placement map, gathered by debtor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestView {
    /// rBlocks on the debtor.
    pub local: u32,
    /// Of these, those that could move now.
    pub local_sealed: u32,
    /// rBlocks on creditors: creditor, blocks there, and how many of these could move now. Ascending by creditor.
    pub remote: Vec<RemoteBlocks>,
    /// An order for it is in progress: it is left alone until its outcome is known.
    pub moving: bool,
}

/// rBlocks of one request on one creditor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteBlocks {
    pub creditor: InstanceId,
    pub blocks: u32,
    /// Of these, those that could move now.
    pub sealed: u32,
}

impl InstanceView {
    /// Its rBlocks on creditors whose memory it has mapped, by creditor, request by request.
    pub(super) fn mapped_blocks(&self) -> impl Iterator<Item = (InstanceId, u32)> {
        // Most instances have mapped nothing: their requests are not looked at.
        let requests = (!self.mapped.is_empty()).then_some(&self.requests);
        let parts = requests.into_iter().flat_map(|requests| requests.values()).flat_map(|r| &r.remote);
        parts.filter(|part| self.mapped.contains(&part.creditor)).map(|part| (part.creditor, part.blocks))
    }
}

impl RequestView {
    /// rBlocks on all creditors.
    #[must_use]
    pub fn remote_blocks(&self) -> u32 {
        self.remote.iter().map(|r| r.blocks).sum()
    }
}

impl PoolView {
    /// The link between two instances: as either end measured it, the more favourable one; `None` if neither did.
    #[must_use]
    pub fn link(&self, a: InstanceId, b: InstanceId) -> Option<LinkView> {
        link_between((a, self.instances.get(&a)?), (b, self.instances.get(&b)?))
    }
}

pub(super) fn link_between(a: (InstanceId, &InstanceView), b: (InstanceId, &InstanceView)) -> Option<LinkView> {
    let one = |from: &InstanceView, to: InstanceId| {
        from.links.binary_search_by_key(&to, |l| l.0).ok().map(|at| from.links[at].1)
    };
    match (one(a.1, b.0), one(b.1, a.0)) {
        (Some(x), Some(y)) => {
            Some(LinkView { rtt_us: x.rtt_us.min(y.rtt_us), bytes_per_s: x.bytes_per_s.max(y.bytes_per_s) })
        }
        (x, y) => x.or(y),
    }
}
