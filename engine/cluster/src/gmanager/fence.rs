//! Fencing: an instance that is not heard is declared dead, by its incarnation (docs/failures.md).
//!
//! All others are told, again and again until every lease of that incarnation has ended by itself. If the instance
//! lives after all, the answer to its next heartbeat says so; it forgets its leases and joins under a new incarnation.
//!
//! Nobody is fenced when the gManager itself seems to be the one that is cut off: after it slept, or while less than
//! half of the pool is heard. Leases end by themselves then.

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

/// What is still told, by instance and incarnation.
#[derive(Debug, Default)]
pub(super) struct Fences(BTreeMap<(InstanceId, u64), Fence>);

impl Fences {
    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        self.0.values().map(|f| f.repeat_ms).min()
    }
}

impl GManager {
    /// Whether silence is the other end's.
    pub(super) fn may_fence(&self) -> bool {
        self.now_ms >= self.awake_ms + limits::FENCE_MS && self.live * 2 >= self.live + self.silent
    }

    /// Declares a silent member dead.
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
        self.tell_fence(id, incarnation);
    }

    /// Tells all others that an incarnation is dead, and goes on telling.
    pub(super) fn tell_fence(&mut self, id: InstanceId, incarnation: u64) {
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
