//! DGFM in the gManager: passes the ledger and replies to the coordinator, and sends its messages.

use super::GManager;
use super::member::Life;
use lagoon_protocol::{Frozen, MoveOutcome};
use lagoon_types::InstanceId;
use std::collections::BTreeSet;

impl GManager {
    /// Ticks the coordinator: searches cycles and continues swaps.
    pub(super) fn swap(&mut self) {
        let now_ms = self.now_ms;
        let Some(dgfm) = &mut self.dgfm else { return };
        if now_ms >= dgfm.next_wake_ms() {
            let busy: BTreeSet<InstanceId> = self
                .members
                .iter()
                .filter(|(_, m)| m.life != Life::Live || m.is_draining())
                .map(|(id, _)| *id)
                .collect();
            let ledger = self.ledger();
            if let Some(dgfm) = &mut self.dgfm {
                dgfm.tick(now_ms, &ledger, &busy);
            }
        }
        self.send_swaps();
    }

    fn send_swaps(&mut self) {
        while let Some((to, body)) = self.dgfm.as_mut().and_then(crate::dgfm::Dgfm::poll) {
            self.send(to, body);
        }
    }

    pub(super) fn on_frozen(&mut self, from: InstanceId, m: &Frozen, now_ms: u64) {
        self.on_time(now_ms);
        if let Some(dgfm) = &mut self.dgfm {
            dgfm.on_frozen(from, m, now_ms);
        }
        self.send_swaps();
    }

    /// Handles a move's outcome; returns whether it was an order of a swap.
    pub(super) fn on_swap_outcome(&mut self, from: InstanceId, m: &MoveOutcome) -> bool {
        let now_ms = self.now_ms;
        let taken = self.dgfm.as_mut().is_some_and(|dgfm| dgfm.on_move_outcome(from, m, now_ms));
        self.send_swaps();
        taken
    }

    pub(super) fn drop_swaps_of(&mut self, id: InstanceId) {
        let now_ms = self.now_ms;
        if let Some(dgfm) = &mut self.dgfm {
            dgfm.on_instance_gone(id, now_ms);
        }
        self.send_swaps();
    }
}
