//! Recalls of a creditor: the blocks wanted back from each debtor, and those returned.
//!
//! There is one recall per debtor at a time. It ends when the debtor has released enough blocks, or at its deadline.

use lagoon_protocol::Recall;
use lagoon_types::{InstanceId, LeaseId, limits};
use std::collections::BTreeMap;
use std::ops::Range;

/// Entries that a creditor revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revoked {
    pub debtor: InstanceId,
    pub lease: LeaseId,
    pub entries: Range<u32>,
}

/// A recall that was not met in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmet {
    pub debtor: InstanceId,
    /// Blocks not returned.
    pub missing: u32,
    /// Whether the creditor may revoke them.
    pub take: bool,
}

#[derive(Debug)]
struct Wanted {
    blocks: u32,
    returned: u32,
    deadline_ms: u64,
    take: bool,
}

impl Wanted {
    fn missing(&self) -> u32 {
        self.blocks.saturating_sub(self.returned)
    }
}

#[derive(Debug, Default)]
pub(super) struct Recalls {
    issued: u64,
    wanted: BTreeMap<InstanceId, Wanted>,
    pub(super) met: u64,
}

impl Recalls {
    pub(super) fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Spreads `blocks`, less those being recalled, over debtors in the order given (a debtor may appear several times,
    /// with the blocks of each of its leases).
    pub(super) fn start(
        &mut self,
        blocks: u32,
        take: bool,
        now_ms: u64,
        youngest: impl Iterator<Item = (InstanceId, u32)>,
    ) -> Vec<(InstanceId, Recall)> {
        let in_progress: u32 = self.wanted.values().map(Wanted::missing).sum();
        let mut left = blocks.saturating_sub(in_progress);
        if take {
            self.wanted.values_mut().for_each(|w| w.take = true);
        }
        let mut ask: BTreeMap<InstanceId, u32> = BTreeMap::new();
        for (debtor, lent) in youngest {
            let some = lent.min(left);
            if some > 0 && !self.wanted.contains_key(&debtor) {
                left -= some;
                *ask.entry(debtor).or_default() += some;
            }
        }
        let deadline_ms = now_ms + limits::RECALL_DEADLINE_MS;
        let as_u32 = |ms: u64| u32::try_from(ms).unwrap_or(u32::MAX);
        let mut recalls = Vec::with_capacity(ask.len());
        for (debtor, blocks) in ask {
            self.issued += 1;
            self.wanted.insert(debtor, Wanted { blocks, returned: 0, deadline_ms, take });
            let recall = Recall {
                recall: self.issued,
                blocks,
                deadline_ms: as_u32(limits::RECALL_DEADLINE_MS),
                pause_ms: as_u32(limits::RECALL_PAUSE_MS),
            };
            recalls.push((debtor, recall));
        }
        recalls
    }

    /// Counts blocks that a debtor released.
    pub(super) fn returned(&mut self, debtor: InstanceId, blocks: usize) {
        let Some(wanted) = self.wanted.get_mut(&debtor) else { return };
        wanted.returned += u32::try_from(blocks).unwrap_or(u32::MAX);
        if wanted.missing() == 0 {
            self.wanted.remove(&debtor);
            self.met += 1;
        }
    }

    /// Ends recalls whose deadline has passed, and returns them.
    pub(super) fn overdue(&mut self, now_ms: u64) -> Vec<Unmet> {
        let over = self.wanted.iter().filter(|(_, w)| now_ms >= w.deadline_ms);
        let over: Vec<Unmet> = over.map(|(d, w)| Unmet { debtor: *d, missing: w.missing(), take: w.take }).collect();
        self.wanted.retain(|_, w| now_ms < w.deadline_ms);
        over
    }

    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        self.wanted.values().map(|w| w.deadline_ms).min()
    }
}
