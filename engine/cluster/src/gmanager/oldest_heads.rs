//! Oldest waiting pool-sized request: it must not starve behind younger requests of other instances.
//!
//! Each instance serves its own queue in order, but there is no queue of the pool. A head that is larger than its instance
//! needs enough free memory of other instances at one moment, which younger requests there may prevent forever. Therefore the
//! oldest such head, once it has waited [`limits::OLDEST_WAITING_MS`], becomes the pool's oldest waiting request: its keepers,
//! instances that together may lend enough, are notified in every heartbeat's ack, and neither admit nor lend to younger
//! requests until it has its memory or has ended. It waits at most until the keepers' running requests end.

use super::GManager;
use lagoon_protocol::{Load, OldestWaiting};
use lagoon_types::{InstanceId, limits};
use std::collections::{BTreeMap, BTreeSet};

/// Heads whose arrival times differ by at most this between two heartbeats are the same.
const SAME_MS: u64 = 500;
/// A head older than this is no oldest waiting request any more: it may need more creditors than it can have.
const OLDEST_WAITING_MS_MAX: u64 = 300_000;

#[derive(Debug, Default)]
pub(super) struct OldestHeads {
    /// Pool-sized heads by instance: arrival time and blocks.
    heads: BTreeMap<InstanceId, (u64, u32)>,
    by_age: BTreeSet<(u64, InstanceId)>,
    keepers: Option<Keepers>,
}

/// Keepers of the oldest waiting request.
#[derive(Debug)]
struct Keepers {
    of: (u64, InstanceId),
    instances: BTreeSet<InstanceId>,
}

impl OldestHeads {
    /// Records the head of an instance's queue, as its load reports it.
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

    /// Forgets an instance, as debtor and as keeper.
    pub(super) fn forget(&mut self, id: InstanceId) {
        if let Some((since, _)) = self.heads.remove(&id) {
            self.by_age.remove(&(since, id));
        }
        self.keepers.take_if(|k| k.instances.contains(&id));
    }
}

impl GManager {
    /// The oldest waiting request, if instance `id` is a keeper of it.
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

    /// Keepers: the fewest instances whose lend limits suffice, those with most free memory first.
    fn choose_keepers(&self, debtor: InstanceId) -> BTreeSet<InstanceId> {
        let own = self.pool.instances.get(&debtor).map_or(0, |v| u64::from(v.blocks_total));
        let blocks = self.oldest_heads.heads.get(&debtor).map_or(0, |head| u64::from(head.1));
        let lends = self.pool.instances.iter().filter(|(id, v)| **id != debtor && !v.draining && !v.frozen);
        let mut lends: Vec<(u32, InstanceId)> = lends.map(|(id, v)| (v.blocks_free, *id)).collect();
        lends.sort_unstable_by_key(|(free, id)| (std::cmp::Reverse(*free), *id));
        // A quarter more: blocks that keepers reserve for the growth of their own sequences are not lent, whatever the cap.
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
