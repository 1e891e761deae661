//! The planner's view of a pool: plain data that the gManager updates from heartbeats, row by row, so that a planning
//! round copies nothing.
//!
//! All data is as old as its heartbeat. Orders planned on it may be refused; a later round plans again.

use crate::perf::{LinkView, ModelShape};
use lagoon_protocol::{Calibration, Load, MemoryTier, Role};
use lagoon_types::{InstanceId, SeqId};
use std::collections::{BTreeMap, BTreeSet};

/// View of the pool as of the last heartbeats. The gManager owns one and updates it in place.
#[derive(Clone, Debug, Default)]
pub struct PoolView {
    /// Time of the round.
    pub now_ms: u64,
    /// Sizes that all instances share.
    pub shape: ModelShape,
    /// Live instances by number; silent, fenced and departed ones are removed.
    pub instances: BTreeMap<InstanceId, InstanceView>,
}

/// View of one instance.
#[derive(Clone, Debug)]
pub struct InstanceView {
    pub role: Role,
    pub tier: MemoryTier,
    /// Registered calibration; without it the planner uses [`crate::PlannerConfig::assumed`] and counts that in its plan.
    pub calibration: Option<Calibration>,
    /// Load of its last heartbeat; default (idle) for a node that runs no requests.
    pub load: Load,
    pub blocks_total: u32,
    /// Free blocks, lendable or not.
    pub blocks_free: u32,
    /// Blocks that it would lend now, corrected by refusals.
    pub blocks_lendable: u32,
    /// Blocks of ordered moves to it that have not ended.
    pub blocks_incoming: u32,
    /// Blocks of ordered moves from it that have not ended.
    pub blocks_outgoing: u32,
    /// Lent blocks by debtor, as it reports them.
    pub lent: Vec<(InstanceId, u32)>,
    /// Borrowed blocks, as it reports them.
    pub borrowed: u32,
    /// Requests of this debtor.
    pub requests: BTreeMap<SeqId, RequestView>,
    /// Links that it measured, ascending by peer. For a missing one the other end's measurement is used.
    pub links: Vec<(InstanceId, LinkView)>,
    /// Creditors whose KV it has mapped (peer access): it attends to KV borrowed there itself.
    pub mapped: BTreeSet<InstanceId>,
    /// Draining: its blocks move away, and it neither borrows nor lends.
    pub draining: bool,
    /// Member of a DGFM cycle: none of its blocks moves.
    pub frozen: bool,
    /// It refused a move or a lease since its last heartbeat, or its placement rows are incomplete: it receives no blocks.
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

/// Placement of one request, from the rows of its debtor and its creditors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestView {
    /// rBlocks on the debtor.
    pub local: u32,
    /// Of `local`, sealed ones, which can move.
    pub local_sealed: u32,
    /// rBlocks on creditors, ascending by creditor.
    pub remote: Vec<RemoteBlocks>,
    /// An order for it is in progress, or it rests after one: it gets no further order.
    pub moving: bool,
}

/// rBlocks of one request on one creditor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteBlocks {
    pub creditor: InstanceId,
    pub blocks: u32,
    /// Of `blocks`, sealed ones, which can move.
    pub sealed: u32,
}

impl InstanceView {
    /// Its rBlocks in mapped creditor KV, by creditor, request by request.
    pub(super) fn mapped_blocks(&self) -> impl Iterator<Item = (InstanceId, u32)> {
        // Most instances have mapped nothing: their requests are skipped.
        let requests = (!self.mapped.is_empty()).then_some(&self.requests);
        let parts = requests.into_iter().flat_map(|requests| requests.values()).flat_map(|r| &r.remote);
        parts.filter(|part| self.mapped.contains(&part.creditor)).map(|part| (part.creditor, part.blocks))
    }
}

impl RequestView {
    /// rBlocks on all creditors.
    #[must_use]
    pub fn remote_blocks(&self) -> u32 {
        self.remote.iter().map(|r| r.blocks).fold(0, u32::saturating_add)
    }
}

impl PoolView {
    /// The link between two instances: the more favourable values of both ends' measurements; `None` if there are none.
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
