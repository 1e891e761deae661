//! Fences and drains: a peer that was declared dead, this instance when it was, and an instance that lends no more.

use super::{LeaseEnded, RManager};
use lagoon_protocol::LeaseRefuse;
use lagoon_types::{InstanceId, limits};

impl RManager {
    /// The gManager declared a process dead: what it borrowed is freed, what was borrowed from it is lost, and it gets
    /// nothing more until it comes back as another process, or (the gManager may have been replaced since) until no lease
    /// from before can be left.
    pub fn on_peer_fenced(&mut self, peer: InstanceId, incarnation: u64, now_ms: u64) -> Vec<LeaseEnded> {
        if self.peers.get(&peer) != Some(&incarnation) {
            return Vec::new();
        }
        // It is told again and again: what the process holds since the first time was not lent to a dead one.
        let until_ms = now_ms + limits::LEASE_TTL_MS;
        if self.fenced_peers.insert(peer, (incarnation, until_ms)).is_some_and(|(_, until)| now_ms < until) {
            return Vec::new();
        }
        self.debtor.on_peer_restarted(peer, now_ms);
        self.creditor.free_debtor(peer, &mut self.pool)
    }

    /// This process was declared dead: it forgets all leases on both sides, and begins anew under `incarnation`. Until
    /// the gManager has given it a number again, it neither borrows nor lends. Borrows fail, leases that were handed out
    /// are lost; returns what it had lent.
    pub fn forget_all(&mut self, incarnation: u64, now_ms: u64) -> Vec<LeaseEnded> {
        self.debtor.forget_all(now_ms);
        let ended = self.creditor.free_all(&mut self.pool);
        self.config.incarnation = incarnation;
        self.creditor.begin_anew(incarnation);
        self.is_fenced = true;
        ended
    }

    /// A draining instance lends nothing more.
    pub fn set_draining(&mut self, draining: bool) {
        self.is_draining = draining;
    }

    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// Why this instance lends nothing to `from` now, whatever is free.
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
