//! List of prefill workers (KVDirect §4.2: the cluster scheduler keeps the addresses of the active workers).
//!
//! The heartbeat of a decode worker (also a future one) carries the version of its list; if the current version differs,
//! the list is sent. After any loss a decode worker therefore has the list one heartbeat later. The workers keep their
//! connections to each other when the gManager dies.

use super::GManager;
use lagoon_protocol::{ControlBody, Heartbeat, Role, Worker, Workers};
use lagoon_types::{InstanceId, limits};
use std::collections::BTreeMap;

/// Current list and its version.
#[derive(Debug)]
pub(super) struct WorkerList {
    version: u64,
    workers: BTreeMap<InstanceId, Worker>,
}

impl WorkerList {
    pub(super) fn new(term: u64) -> Self {
        // Not 0, and far from those of other terms.
        Self { version: term.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, workers: BTreeMap::new() }
    }

    fn set(&mut self, id: InstanceId, worker: Option<Worker>) {
        if self.workers.get(&id) == worker.as_ref() {
            return;
        }
        match worker {
            Some(worker) => drop(self.workers.insert(id, worker)),
            None => drop(self.workers.remove(&id)),
        }
        self.version = self.version.wrapping_add(2);
    }

    /// Removes an instance.
    pub(super) fn remove(&mut self, id: InstanceId) {
        self.set(id, None);
    }
}

impl GManager {
    /// Updates the list after a change of a member's role or life.
    pub(super) fn settle_worker(&mut self, id: InstanceId) {
        let Some(member) = self.members.get(&id) else { return };
        let of = &member.registration;
        let takes = member.prefills() && !member.is_fenced() && !member.is_draining();
        let worker = takes.then(|| Worker {
            instance: id.0,
            quic_addr: of.quic_addr.clone(),
            role: member.role().into(),
            blocks_total: of.blocks_total,
        });
        self.workers.set(id, worker);
    }

    /// Sends the list to a decode worker with another version.
    pub(super) fn send_workers(&mut self, id: InstanceId, heartbeat: &Heartbeat) {
        let decodes = |of: &super::member::Member| [of.role(), of.becomes()].contains(&Role::Decode);
        if heartbeat.workers == self.workers.version || !self.members.get(&id).is_some_and(decodes) {
            return;
        }
        let workers = self.workers.workers.values().take(limits::WORKERS_MAX).cloned().collect();
        let list = Workers { version: self.workers.version, workers };
        self.send(id, ControlBody::Workers(list));
    }
}
