//! Fences and drains: a peer declared dead, this instance declared dead, and an instance that lends no more.

use super::{LeaseEnded, RManager};
use lagoon_protocol::LeaseRefuse;
use lagoon_types::{InstanceId, limits};

impl RManager {
    /// Fences a process that the gManager declared dead: frees its leases here and drops leases from it. It is lent
    /// nothing until it returns with another incarnation, or (as the gManager may have been replaced) until all its old
    /// leases have expired.
    pub fn on_peer_fenced(&mut self, peer: InstanceId, incarnation: u64, now_ms: u64) -> Vec<LeaseEnded> {
        if self.peers.get(&peer) != Some(&incarnation) {
            return Vec::new();
        }
        // The message is repeated: leases that the process got since the first one are valid.
        let until_ms = now_ms + limits::LEASE_TTL_MS;
        if self.fenced_peers.insert(peer, (incarnation, until_ms)).is_some_and(|(_, until)| now_ms < until) {
            return Vec::new();
        }
        self.debtor.on_peer_restarted(peer, now_ms);
        self.creditor.free_debtor(peer, &mut self.pool)
    }

    /// Drops all leases on both sides after this process was declared dead, and begins anew under `incarnation`. Until
    /// it has an id again, it neither borrows nor lends. Borrows fail, leases in use are lost. Returns the leases that
    /// it had lent.
    pub fn forget_all(&mut self, incarnation: u64, now_ms: u64) -> Vec<LeaseEnded> {
        self.debtor.forget_all(now_ms);
        let ended = self.creditor.free_all(&mut self.pool);
        self.config.incarnation = incarnation;
        self.creditor.begin_anew(incarnation);
        self.is_fenced = true;
        ended
    }

    /// Sets whether this instance drains: then it lends nothing more.
    pub fn set_draining(&mut self, draining: bool) {
        self.is_draining = draining;
    }

    /// Whether the instance lends nothing more.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// Why this instance lends nothing to `from` now, whatever is free; `None` if it may.
    pub(super) fn refuses(&self, from: InstanceId, request: u64, now_ms: u64) -> Option<LeaseRefuse> {
        let reason = if self.is_draining {
            "this instance is being drained"
        } else if self.is_fenced {
            "this instance is not registered"
        } else if self.fenced_peers.get(&from).is_some_and(|(_, until)| now_ms < *until) {
            "the gManager declared the asker dead"
        } else {
            return None;
        };
        Some(LeaseRefuse { request, blocks_lendable: 0, reason: reason.to_owned() })
    }
}
