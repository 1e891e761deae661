//! Age across the pool: a request that only the pool can hold must not starve behind younger ones of other instances.
//!
//! An instance serves its own queue in order; nobody serves the pool's. A head that is larger than its instance waits
//! until enough is free elsewhere at one moment, which younger requests there may never let happen. So the oldest such
//! head that came [`limits::OLDEST_WAITING_MS`] ago becomes the pool's oldest waiting request: instances that together may lend what it needs,
//! its keepers, hear of it with every heartbeat, and neither admit nor lend to what is younger, until it has its memory
//! or has gone. What runs there ends, so that an oldest waiting request waits no longer than the longest of that takes.

use super::GManager;
use lagoon_protocol::{Load, OldestWaiting};
use lagoon_types::{InstanceId, limits};
use std::collections::{BTreeMap, BTreeSet};

/// A head whose age changes by less between two heartbeats is the same one.
const SAME_MS: u64 = 500;
/// Nobody holds others up for longer: what was not placed by then may need more creditors than it may have.
const OLDEST_WAITING_MS_MAX: u64 = 300_000;

#[derive(Debug, Default)]
pub(super) struct OldestHeads {
    /// Heads that only the pool can hold: when each came, and its blocks.
    heads: BTreeMap<InstanceId, (u64, u32)>,
    by_age: BTreeSet<(u64, InstanceId)>,
    keepers: Option<Keepers>,
}

/// Who keeps memory for which head.
#[derive(Debug)]
struct Keepers {
    of: (u64, InstanceId),
    instances: BTreeSet<InstanceId>,
}

impl OldestHeads {
    /// What an instance says of the head of its queue.
    pub(super) fn note(&mut self, id: InstanceId, load: Option<&Load>, now_ms: u64) {
        let head = load.filter(|l| l.head_waits_ms > 0);
        let head =
            head.and_then(|l| Some((now_ms.saturating_sub(u64::from(l.head_waits_ms)), *l.queue_blocks.first()?)));
        let old = self.heads.get(&id).copied();
        if let (Some((since, blocks)), Some((before, of))) = (head, old)
            && since.abs_diff(before) <= SAME_MS
            && blocks == of
        {
            return;
        }
        if let Some((since, _)) = old {
            self.by_age.remove(&(since, id));
            self.heads.remove(&id);
        }
        if let Some((since, blocks)) = head {
            self.by_age.insert((since, id));
            self.heads.insert(id, (since, blocks));
        }
    }

    /// An instance is not there (any more), as debtor or as keeper.
    pub(super) fn forget(&mut self, id: InstanceId) {
        if let Some((since, _)) = self.heads.remove(&id) {
            self.by_age.remove(&(since, id));
        }
        self.keepers.take_if(|k| k.instances.contains(&id));
    }
}

impl GManager {
    /// The oldest waiting request, for an instance that keeps memory for it.
    pub(super) fn oldest_waiting_for(&mut self, id: InstanceId) -> Option<OldestWaiting> {
        let from = (self.now_ms + 1).saturating_sub(OLDEST_WAITING_MS_MAX);
        let oldest = self.oldest_heads.by_age.range((from, InstanceId(0))..).next().copied();
        let oldest_waiting = oldest.filter(|(since, _)| self.now_ms >= since + limits::OLDEST_WAITING_MS);
        let Some(oldest_waiting) = oldest_waiting else {
            self.oldest_heads.keepers = None;
            return None;
        };
        if self.oldest_heads.keepers.as_ref().is_none_or(|k| k.of != oldest_waiting) {
            self.oldest_heads.keepers =
                Some(Keepers { of: oldest_waiting, instances: self.choose_keepers(oldest_waiting.1) });
        }
        let keeps = self.oldest_heads.keepers.as_ref().is_some_and(|k| k.instances.contains(&id));
        let waits_ms = u32::try_from(self.now_ms - oldest_waiting.0).unwrap_or(u32::MAX);
        keeps.then_some(OldestWaiting { debtor: oldest_waiting.1.0, waits_ms })
    }

    /// As few instances as may ever lend enough, those with most free memory first: it is there soonest.
    fn choose_keepers(&self, debtor: InstanceId) -> BTreeSet<InstanceId> {
        let own = self.pool.instances.get(&debtor).map_or(0, |v| u64::from(v.blocks_total));
        let blocks = self.oldest_heads.heads.get(&debtor).map_or(0, |head| u64::from(head.1));
        let lends = self.pool.instances.iter().filter(|(id, v)| **id != debtor && !v.draining && !v.frozen);
        let mut lends: Vec<(u32, InstanceId)> = lends.map(|(id, v)| (v.blocks_free, *id)).collect();
        lends.sort_unstable_by_key(|(free, id)| (std::cmp::Reverse(*free), *id));
        // What its own sequences keep for their growth is not lent, whatever the cap.
        let needed = blocks.saturating_sub(own);
        let needed = needed + needed / 4 + 1;
        let mut sum = 0;
        let enough = |(_, id): &(u32, InstanceId)| {
            let missing = sum < needed;
            sum += self.members.get(id).map_or(0, |m| u64::from(m.cap()));
            missing
        };
        let mut keepers: BTreeSet<InstanceId> = lends.into_iter().take_while(enough).map(|(_, id)| id).collect();
        keepers.insert(debtor);
        keepers
    }
}
