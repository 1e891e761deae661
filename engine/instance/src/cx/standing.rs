//! This instance's standing in its pool, readable by every machine: its id, its role, whether the gManager is there.
//! Only the membership writes it.

use super::roles::Roles;
use lagoon_types::InstanceId;
use lagoon_types::limits::{GMANAGER_WAIT_MS, OLDEST_WAITING_HOLD_MS, POOL_HOLD_MS};

/// Whether memory can be borrowed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lending {
    /// Yes: registered with a gManager.
    Open,
    /// Not now: the gManager is away for less than [`GMANAGER_WAIT_MS`].
    Away,
    /// No: no gManager, or away for longer.
    Closed,
}

/// The standing. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Standing {
    /// Id from the gManager; `None` before registration or without one.
    pub(crate) id: Option<InstanceId>,
    /// Random number of this incarnation: the first from the shell, then each from the one before.
    pub(crate) incarnation: u64,
    /// Whether the gManager is connected and knows this instance.
    pub(crate) registered: bool,
    pub(crate) roles: Roles,
    /// Whether it drains: lends nothing more and finishes its requests.
    pub(crate) draining: bool,
    /// Whether it has reported itself drained: it accepts nothing more.
    pub(crate) drained: bool,
    /// rBlocks of the whole pool, this instance's included: see [`Self::note_pool`].
    pool_blocks: u64,
    /// Until when the pool counts as no smaller than it did.
    pool_held_until_ms: u64,
    /// The pool's oldest waiting pool-sized request: its debtor, since when it waits, and until when this instance
    /// reserves memory for it, in milliseconds.
    oldest_waiting: Option<(InstanceId, u64, u64)>,
    /// Since when the gManager was needed and away.
    away_since_ms: Option<u64>,
}

impl Standing {
    pub(crate) fn new(incarnation: u64, roles: Roles, blocks_total: u32) -> Self {
        Self {
            id: None,
            incarnation,
            registered: false,
            roles,
            draining: false,
            drained: false,
            pool_blocks: u64::from(blocks_total),
            pool_held_until_ms: 0,
            oldest_waiting: None,
            away_since_ms: None,
        }
    }

    /// This instance has registered. A new gManager counts only who has registered with it, so for [`POOL_HOLD_MS`] the
    /// pool counts as no smaller than before: otherwise long requests would be refused because others register later.
    pub(crate) fn on_registered(&mut self, id: InstanceId, now_ms: u64) {
        self.id = Some(id);
        self.registered = true;
        self.pool_held_until_ms = now_ms + POOL_HOLD_MS;
    }

    /// Takes the pool's oldest waiting pool-sized request from a message of the gManager: its debtor, and since when it
    /// waits, in milliseconds. It counts for [`OLDEST_WAITING_HOLD_MS`].
    pub(crate) fn note_oldest_waiting(&mut self, oldest: Option<(InstanceId, u64)>, now_ms: u64) {
        self.oldest_waiting = oldest.map(|(debtor, since_ms)| (debtor, since_ms, now_ms + OLDEST_WAITING_HOLD_MS));
    }

    /// Takes the size of the pool, in rBlocks, from a message of the gManager.
    pub(crate) fn note_pool(&mut self, blocks: u64, now_ms: u64) {
        if blocks >= self.pool_blocks || now_ms >= self.pool_held_until_ms {
            self.pool_blocks = blocks;
        }
    }

    /// rBlocks of the whole pool, this instance's included, as far as known.
    pub(crate) fn pool_blocks(&self) -> u64 {
        self.pool_blocks
    }

    /// A sequence needs to borrow: if the gManager is away, the wait for it starts, unless it has started already.
    pub(crate) fn note_lending_needed(&mut self, now_ms: u64) {
        if self.registered {
            self.away_since_ms = None;
        } else if self.id.is_some() {
            self.away_since_ms.get_or_insert(now_ms);
        }
    }

    /// Whether memory can be borrowed. The wait for a gManager that is away counts from
    /// [`Self::note_lending_needed`].
    pub(crate) fn lending(&self, now_ms: u64) -> Lending {
        if self.registered {
            return Lending::Open;
        }
        if self.id.is_none() {
            return Lending::Closed;
        }
        let since_ms = self.away_since_ms.unwrap_or(now_ms);
        if now_ms < since_ms + GMANAGER_WAIT_MS { Lending::Away } else { Lending::Closed }
    }

    /// Until when the oldest waiting request counts, unless renewed.
    pub(crate) fn oldest_waiting_until_ms(&self, now_ms: u64) -> Option<u64> {
        self.oldest_waiting.map(|(_, _, until_ms)| until_ms).filter(|until_ms| now_ms < *until_ms)
    }

    /// The oldest waiting pool-sized request: its debtor, and since when it waits, in milliseconds.
    pub(crate) fn oldest_waiting(&self, now_ms: u64) -> Option<(InstanceId, u64)> {
        self.oldest_waiting
            .filter(|(_, _, until_ms)| now_ms < *until_ms)
            .map(|(debtor, since_ms, _)| (debtor, since_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::Role;

    #[test]
    fn the_wait_for_an_absent_gmanager_counts_from_the_first_need() {
        let mut standing = Standing::new(1, Roles::new(Role::Instance), 8);
        assert_eq!(standing.lending(0), Lending::Closed, "no pool");
        standing.on_registered(InstanceId(1), 0);
        assert_eq!(standing.lending(0), Lending::Open);
        standing.registered = false;
        assert_eq!(standing.lending(5 * GMANAGER_WAIT_MS), Lending::Away, "nobody needed it");
        standing.note_lending_needed(100);
        standing.note_lending_needed(200);
        assert_eq!(standing.lending(99 + GMANAGER_WAIT_MS), Lending::Away);
        assert_eq!(standing.lending(100 + GMANAGER_WAIT_MS), Lending::Closed);
        standing.registered = true;
        standing.note_lending_needed(300 + GMANAGER_WAIT_MS);
        standing.registered = false;
        assert_eq!(standing.lending(400 + GMANAGER_WAIT_MS), Lending::Away, "a new wait");
    }

    #[test]
    fn a_new_gmanager_does_not_shrink_the_pool_at_once() {
        let mut standing = Standing::new(1, Roles::new(Role::Instance), 8);
        standing.on_registered(InstanceId(1), 1_000);
        standing.note_pool(24, 1_500);
        assert_eq!(standing.pool_blocks(), 24);

        // Within a gManager's term an instance that is gone is gone.
        standing.note_pool(16, 1_000 + POOL_HOLD_MS);
        assert_eq!(standing.pool_blocks(), 16);

        standing.on_registered(InstanceId(1), 50_000);
        standing.note_pool(8, 50_500);
        assert_eq!(standing.pool_blocks(), 16, "others have yet to register");
        standing.note_pool(8, 50_000 + POOL_HOLD_MS);
        assert_eq!(standing.pool_blocks(), 8, "nobody else has");
    }
}
