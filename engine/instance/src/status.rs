//! What an instance tells of itself, for `lagoon status`, metrics and tests.

use crate::instance::Instance;
use lagoon_types::{InstanceId, SeqId};
use std::collections::BTreeMap;

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceStatus {
    pub instance: Option<InstanceId>,
    pub registered: bool,
    pub blocks_total: u32,
    pub blocks_free: u32,
    pub blocks_lent: u32,
    pub blocks_borrowed: u32,
    pub running: usize,
    pub waiting: usize,
    /// Frames of peers that wait or are on the device.
    pub guest_frames: usize,
    pub sequences: Vec<SequencePlacement>,
}

/// Where one sequence's rBlocks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequencePlacement {
    pub seq: SeqId,
    pub tokens: u32,
    pub local_blocks: u32,
    /// Blocks by creditor.
    pub remote_blocks: BTreeMap<InstanceId, u32>,
}

impl Instance {
    /// See [`InstanceStatus`].
    #[must_use]
    pub fn status(&self) -> InstanceStatus {
        let counts = self.rm.counts();
        let placement = |s: &crate::sequence::Sequence| {
            let mut remote_blocks = BTreeMap::new();
            for ((creditor, _), held) in &s.leases {
                *remote_blocks.entry(*creditor).or_default() += held.entries;
            }
            SequencePlacement { seq: s.id, tokens: s.len(), local_blocks: s.blocks.local_blocks(), remote_blocks }
        };
        InstanceStatus {
            instance: self.id,
            registered: self.registered,
            blocks_total: self.config.blocks_total,
            blocks_free: counts.free,
            blocks_lent: counts.lent,
            blocks_borrowed: self.rm.borrowed(),
            running: self.sched.running_len(),
            waiting: self.sched.waiting().len(),
            guest_frames: self.guests.load(),
            sequences: self.seqs.values().map(placement).collect(),
        }
    }
}
