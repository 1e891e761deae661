//! Fencing: a silent instance is declared dead, by its incarnation (docs/failures.md).
//!
//! The fence is sent to all other instances, and repeated until every lease of that incarnation has expired. An instance
//! that is alive learns of it from the ack of its next heartbeat, drops its leases and joins with a new incarnation.
//!
//! No instance is fenced when the gManager itself may be cut off: after it was stopped, or while fewer than half of the
//! instances are live. Leases expire by themselves then.

use super::GManager;
use super::member::Life;
use lagoon_protocol::{ControlBody, Fenced};
use lagoon_types::{InstanceId, limits};
use std::collections::BTreeMap;

#[derive(Debug)]
struct Fence {
    repeat_ms: u64,
    until_ms: u64,
}

/// Fences to repeat, by instance and incarnation.
#[derive(Debug, Default)]
pub(super) struct Fences(BTreeMap<(InstanceId, u64), Fence>);

impl Fences {
    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        self.0.values().map(|f| f.repeat_ms).min()
    }
}

impl GManager {
    /// Whether silence means a dead instance, rather than a gManager that is cut off.
    pub(super) fn may_fence(&self) -> bool {
        self.now_ms >= self.awake_ms + limits::FENCE_MS && self.live * 2 >= self.live + self.silent
    }

    /// Fences a silent member.
    pub(super) fn fence(&mut self, id: InstanceId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.life = Life::Fenced;
        self.silent -= 1;
        member.withheld = None;
        member.heartbeat = None;
        member.rows_complete = false;
        let incarnation = member.registration.incarnation;
        self.stats.fenced += 1;
        self.drop_rows(id);
        self.drop_orders_of(id);
        self.settle(id);
        self.send_fence(id, incarnation);
    }

    /// Sends the fence of an incarnation to all others, and schedules its repeats.
    pub(super) fn send_fence(&mut self, id: InstanceId, incarnation: u64) {
        let fence =
            Fence { repeat_ms: self.now_ms + limits::FENCE_REPEAT_MS, until_ms: self.now_ms + limits::LEASE_TTL_MS };
        self.fences.0.insert((id, incarnation), fence);
        self.broadcast(id, incarnation);
    }

    fn broadcast(&mut self, id: InstanceId, incarnation: u64) {
        let body = ControlBody::Fenced(Fenced { instance: id.0, incarnation });
        let others: Vec<InstanceId> =
            self.members.iter().filter(|(to, m)| **to != id && m.life == Life::Live).map(|(to, _)| *to).collect();
        others.into_iter().for_each(|to| self.send(to, body.clone()));
    }

    pub(super) fn repeat_fences(&mut self) {
        let now_ms = self.now_ms;
        self.fences.0.retain(|_, f| now_ms < f.until_ms);
        let mut due = Vec::new();
        for (key, fence) in &mut self.fences.0 {
            if now_ms >= fence.repeat_ms {
                fence.repeat_ms = now_ms + limits::FENCE_REPEAT_MS;
                due.push(*key);
            }
        }
        due.into_iter().for_each(|(id, incarnation)| self.broadcast(id, incarnation));
    }
}
