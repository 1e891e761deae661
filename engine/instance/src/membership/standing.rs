//! This instance's standing in its pool, readable by every machine: its id, its role, whether the gManager is there.
//! Only the membership writes it.

use super::roles::Roles;
use lagoon_types::InstanceId;
use lagoon_types::limits::GMANAGER_WAIT_MS;

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
    /// rBlocks of the whole pool, this instance's included, from the gManager's last message.
    pub(crate) pool_blocks_total: u64,
    /// The pool's oldest waiting pool-sized request: its debtor, since when it waits, and until when this instance
    /// reserves memory for it, in milliseconds.
    pub(super) oldest_waiting: Option<(InstanceId, u64, u64)>,
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
            pool_blocks_total: u64::from(blocks_total),
            oldest_waiting: None,
            away_since_ms: None,
        }
    }

    /// Whether a request that needs to borrow can. If the gManager is away, starts the wait for it unless started
    /// already.
    pub(crate) fn need_lending(&mut self, now_ms: u64) -> Lending {
        if self.registered {
            self.away_since_ms = None;
            return Lending::Open;
        }
        if self.id.is_none() {
            return Lending::Closed;
        }
        let since_ms = *self.away_since_ms.get_or_insert(now_ms);
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
