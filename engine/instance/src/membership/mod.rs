//! This instance in its pool: registration, heartbeats with its rows of the request placement map, fences and drains.
//!
//! * A fence is a new life under the same roof: everything lent and borrowed is forgotten, a new incarnation is drawn
//!   from the old one, the gManager and the peers hear of it; running requests lose their remote KV and go on.
//! * A draining instance lends nothing more and finishes what it has. If it shall stop, it says so when nothing is left
//!   and nothing came for a while.

pub(crate) mod peers;
pub(crate) mod roles;

use crate::batch::sequence::Sequence;
use crate::config::InstanceConfig;
use crate::creditor::CreditorEvent;
use crate::event::{Effect, TransferEffect};
use crate::instance::Instance;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_cluster::{PlacementReport, next_incarnation};
use lagoon_kv::{BlockPool, Placement};
use lagoon_protocol::{
    ControlBody, Deregister, DrainOrder, Fenced, HeartbeatAck, Link, Load, PlacementEntry, Register, Registered,
    VERSION_MAX, VERSION_MIN,
};
use lagoon_types::limits::{
    DRAIN_QUIET_MS, GMANAGER_WAIT_MS, HEARTBEAT_LINKS_MAX, HEARTBEAT_MS, LOAD_QUEUE_MAX, OLDEST_WAITING_HOLD_MS,
};
use lagoon_types::{InstanceId, MicroBatch, StepId};
use roles::Roles;

/// Whether memory can be borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lending {
    /// The gManager is there.
    Open,
    /// It was there, and is waited for.
    Away,
    /// There is none, or it did not come back in time.
    Closed,
}

/// A drain in flight.
#[derive(Clone, Copy, Debug)]
struct Drain {
    stop: bool,
    /// Since when nothing is left here.
    quiet_since_ms: Option<u64>,
}

/// What the instance knows of its membership.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Random per life: drawn by the shell, then one from the other.
    pub(crate) incarnation: u64,
    /// Given by the gManager; `None` until then, or without one.
    pub(crate) id: Option<InstanceId>,
    /// The gManager is connected and knows this instance.
    registered: bool,
    /// rBlocks of the whole pool, this instance's included, by the gManager's last message.
    pub(crate) pool_blocks_total: u64,
    /// Since when the gManager was needed and not there.
    away_since_ms: Option<u64>,
    pub(crate) roles: Roles,
    /// Of the gManager that it is registered with.
    term: u64,
    heartbeat_at_ms: u64,
    report: PlacementReport,
    drain: Option<Drain>,
    /// It said that it is drained: it takes nothing more.
    pub(crate) drained: bool,
    /// Times that it was fenced.
    pub(crate) fences: u64,
    /// The pool's oldest waiting request if this instance keeps memory for it: its debtor, since when it waits, until when that holds.
    oldest_waiting: Option<(InstanceId, u64, u64)>,
    steps: StepTimes,
}

/// How long decode steps take, per micro-batch, by the clock of the events.
#[derive(Debug, Default)]
struct StepTimes {
    started: [Option<(StepId, u64)>; 2],
    /// A moving average, in microseconds; 0 before the first.
    mean_us: u64,
}

impl Membership {
    pub(crate) fn new(config: &InstanceConfig) -> Self {
        Self {
            incarnation: config.incarnation,
            id: None,
            registered: false,
            pool_blocks_total: u64::from(config.blocks_total),
            away_since_ms: None,
            roles: Roles::new(config.role),
            term: 0,
            heartbeat_at_ms: 0,
            report: PlacementReport::default(),
            drain: None,
            drained: false,
            fences: 0,
            oldest_waiting: None,
            steps: StepTimes::default(),
        }
    }

    /// The gManager is connected and knows this instance.
    pub(crate) fn is_registered(&self) -> bool {
        self.registered
    }

    /// The connection to the gManager is lost.
    pub(crate) fn gmanager_down(&mut self) {
        self.registered = false;
    }

    /// A request needs the gManager: without one, the wait for it begins now, unless it has begun.
    pub(crate) fn need_gmanager(&mut self, now_ms: u64) {
        if self.registered {
            self.away_since_ms = None;
        } else if self.id.is_some() {
            self.away_since_ms.get_or_insert(now_ms);
        }
    }

    /// Whether borrowing is possible now.
    pub(crate) fn lending(&self, now_ms: u64) -> Lending {
        if self.registered {
            return Lending::Open;
        }
        let waits = self.id.is_some() && self.away_since_ms.is_none_or(|since| now_ms < since + GMANAGER_WAIT_MS);
        if waits { Lending::Away } else { Lending::Closed }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.drain.is_some()
    }

    /// The next heartbeat is due now: others shall hear at once.
    pub(crate) fn tell_at_once(&mut self) {
        self.heartbeat_at_ms = 0;
    }

    /// Until when the oldest waiting request counts, if nobody names it again.
    pub(crate) fn oldest_waiting_until_ms(&self, now_ms: u64) -> Option<u64> {
        self.oldest_waiting.map(|(_, _, until_ms)| until_ms).filter(|until_ms| now_ms < *until_ms)
    }

    /// The request that goes before all younger ones here: where it waits, and since when.
    pub(crate) fn oldest_waiting(&self, now_ms: u64) -> Option<(InstanceId, u64)> {
        self.oldest_waiting
            .filter(|(_, _, until_ms)| now_ms < *until_ms)
            .map(|(debtor, since_ms, _)| (debtor, since_ms))
    }
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

impl Instance {
    pub(crate) fn on_gmanager_up(&mut self) {
        // What is drained has left the pool and only waits for its process to end.
        if self.membership.drained {
            return;
        }
        let config = &self.cx.config;
        let lend_blocks_max =
            config.lend_blocks_max.min(config.blocks_total.saturating_sub(config.lend_reserve_blocks));
        self.cx.effects.push(Effect::ToGManager(ControlBody::Register(Register {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            name: config.name.clone(),
            quic_addr: config.quic_addr.clone(),
            http_addr: config.http_addr.clone(),
            role: self.membership.roles.now().into(),
            incarnation: self.membership.incarnation,
            shape: Some(config.pool_shape()),
            blocks_total: config.blocks_total,
            backend: config.backend.clone(),
            instance: self.membership.id.map_or(0, |id| id.0),
            calibration: config.calibration.clone(),
            tier: config.tier.into(),
            lend_blocks_max: Some(lend_blocks_max),
        })));
    }

    pub(crate) fn on_registered(&mut self, registered: &Registered) {
        self.membership.id = Some(InstanceId(registered.instance));
        self.cx.memory.rm.set_instance(InstanceId(registered.instance));
        self.membership.registered = true;
        self.membership.term = registered.term;
        // Whatever another gManager, or this one, knew: it starts anew with a registration.
        self.membership.report.restart();
        // Its list of workers may be another one of the same name.
        self.prefill.forget_list();
        self.greet();
        self.heartbeat();
    }

    pub(crate) fn on_heartbeat_ack(&mut self, ack: &HeartbeatAck) {
        if !ack.known {
            self.membership.registered = false;
            self.on_gmanager_up();
        } else if ack.fenced {
            self.on_own_fence();
        } else {
            self.membership.pool_blocks_total = ack.pool_blocks_total;
            let since = |waits_ms: u32| self.cx.now_ms.saturating_sub(u64::from(waits_ms));
            let oldest_waiting = ack
                .oldest_waiting
                .map(|e| (InstanceId(e.debtor), since(e.waits_ms), self.cx.now_ms + OLDEST_WAITING_HOLD_MS));
            self.membership.oldest_waiting = oldest_waiting;
            if ack.term == self.membership.term {
                self.membership.report.on_ack(ack);
            } else {
                self.membership.term = ack.term;
                self.membership.report.restart();
            }
        }
    }

    /// The gManager took this instance for dead.
    fn on_own_fence(&mut self) {
        if !self.membership.registered {
            // The next life has begun, and its registration is on the way.
            return;
        }
        self.membership.fences += 1;
        self.membership.incarnation = next_incarnation(self.membership.incarnation);
        self.membership.registered = false;
        let ended = self.cx.memory.rm.forget_all(self.membership.incarnation, self.cx.now_ms);
        self.creditor(CreditorEvent::Ended(ended));
        self.drop_all_jobs();
        if !mutants::is(Mutant::AskedByTheDead) {
            self.redo_all_asked();
        }
        self.restart_reader();
        // Peers free what they lent to the old incarnation when they hear of the new one.
        self.greet_again();
        self.on_gmanager_up();
    }

    /// Another instance was declared dead.
    pub(crate) fn on_peer_fenced(&mut self, m: &Fenced) {
        let (reader, incarnation) = (InstanceId(m.instance), m.incarnation);
        let ended = self.cx.memory.rm.on_peer_fenced(reader, incarnation, self.cx.now_ms);
        self.creditor(CreditorEvent::Ended(ended));
        if self.cx.config.transfer.is_some() {
            self.cx.effects.push(Effect::Transfer(TransferEffect::Fence { reader, incarnation }));
        }
    }

    pub(crate) fn on_drain_order(&mut self, m: DrainOrder) {
        let old = self.membership.drain;
        self.membership.drain =
            m.on.then(|| Drain { stop: m.stop, quiet_since_ms: old.and_then(|d| d.quiet_since_ms) });
        self.cx.memory.rm.set_draining(m.on);
        if old.is_some() != m.on {
            self.membership.tell_at_once();
        }
    }

    /// Heartbeats that are due, and the end of a drain.
    pub(crate) fn tick_membership(&mut self) {
        if self.membership.registered && self.cx.now_ms >= self.membership.heartbeat_at_ms {
            self.heartbeat();
        }
        self.tick_drain();
    }

    fn tick_drain(&mut self) {
        if self.membership.drain.is_none() {
            return;
        }
        let empty = self.batch.is_empty()
            && self.cx.memory.rm.lent().next().is_none()
            && self.cx.memory.rm.borrowed() == 0
            && self.cx.memory.rm.releasing() == 0;
        let Some(drain) = &mut self.membership.drain else { return };
        if !empty {
            drain.quiet_since_ms = None;
            return;
        }
        let since_ms = *drain.quiet_since_ms.get_or_insert(self.cx.now_ms);
        if drain.stop && !self.membership.drained && self.cx.now_ms >= since_ms + DRAIN_QUIET_MS {
            self.membership.drained = true;
            self.membership.registered = false;
            if let Some(id) = self.membership.id {
                self.cx.effects.push(Effect::ToGManager(ControlBody::Deregister(Deregister { instance: id.0 })));
            }
            self.cx.effects.push(Effect::Drained);
        }
    }

    fn heartbeat(&mut self) {
        self.membership.heartbeat_at_ms = self.cx.now_ms + HEARTBEAT_MS;
        let links = self.cx.peers.iter().map(|k| {
            let mapped = self.step.mapped.maps(k.instance);
            Link { peer: k.instance.0, rtt_us: k.rtt_us, bytes_per_s: k.bytes_per_s, mapped }
        });
        let mut links: Vec<Link> = links.filter(|link| link.rtt_us > 0 || link.mapped).collect();
        links.sort_by_key(|link| !link.mapped);
        links.truncate(HEARTBEAT_LINKS_MAX);
        let (running, waiting) = (as_u32(self.batch.running_len()), as_u32(self.waiting()));
        let mut heartbeat = self.cx.memory.rm.heartbeat(running, waiting, links);
        heartbeat.draining = self.membership.is_draining();
        heartbeat.frozen = self.batch.frozen_cycle();
        heartbeat.load = self.cx.config.role.runs().then(|| self.load());
        heartbeat.moves = Some(Box::new(self.move_status().counts()));
        heartbeat.prefill = self.cx.config.transfer.is_some().then(|| Box::new(self.prefill_status().counts()));
        heartbeat.role = self.changes_role().then(|| Box::new(self.membership.roles.state()));
        let remote_requests = self.cx.memory.rm.lent_rows();
        let me = heartbeat.instance;
        heartbeat.workers = self.prefill.version();
        let (prefills, pool) = (&self.prefill, self.cx.memory.rm.pool());
        let own = self.batch.seqs().filter(|s| !prefills.is_job(s.id));
        let own = own.map(|s| own_row(me, s, as_u32(prefills.landing(s.id)), pool));
        self.membership.report.fill(&mut heartbeat, own.chain(remote_requests));
        self.cx.effects.push(Effect::ToGManager(ControlBody::Heartbeat(heartbeat)));
    }

    /// What the planner's model needs to know of the batch and the queue.
    fn load(&self) -> Load {
        let block_tokens = self.cx.config.block_tokens;
        let decodes = |s: &&Sequence| self.batch.is_running(s.id) && s.blocks.written() + 1 >= s.len();
        let decoding = || self.batch.seqs().filter(decodes);
        let remote = |s: &Sequence| u64::from((s.blocks.remote_blocks() * block_tokens).min(s.len()));
        let remote_requests: u32 = self.cx.memory.rm.lent_rows().iter().map(|r| r.blocks).sum();
        let queue = self.batch.waiting().take(LOAD_QUEUE_MAX);
        Load {
            batch: as_u32(decoding().count()),
            context_tokens: decoding().map(|s| u64::from(s.len())).sum(),
            remote_tokens: decoding().map(remote).sum(),
            remote_request_tokens: u64::from(remote_requests) * u64::from(block_tokens),
            queue_blocks: queue.map(|w| (w.tokens + 1).div_ceil(block_tokens)).collect(),
            batch_max: as_u32(self.cx.config.sched.running),
            step_us: u32::try_from(self.membership.steps.mean_us).unwrap_or(u32::MAX),
            head_waits_ms: self.head_waits_ms(),
        }
    }

    /// How long ago the head of the queue came, if it needs more than this instance has.
    fn head_waits_ms(&self) -> u32 {
        let head = self.batch.waiting().next().and_then(|w| self.batch.seq(w.seq));
        let alone = |s: &Sequence| s.blocks.shortfall(s.len() + 1) <= self.cx.config.blocks_total;
        let waits_ms = head.filter(|s| !alone(s)).map_or(0, |s| (self.cx.now_ms - s.since_ms).max(1));
        u32::try_from(waits_ms).unwrap_or(u32::MAX)
    }

    /// A micro-batch has started a step, if it has.
    pub(crate) fn note_step(&mut self, micro_batch: MicroBatch) {
        let now_ms = self.cx.now_ms;
        let started = &mut self.membership.steps.started[micro_batch.index()];
        match self.step.flight_in(micro_batch) {
            Some(flight) if started.is_none_or(|(step, _)| step != flight.step) => {
                *started = flight.decodes().then_some((flight.step, now_ms));
            }
            _ => {}
        }
    }

    /// A step has ended well.
    pub(crate) fn note_step_done(&mut self, step: StepId, micro_batch: MicroBatch) {
        let steps = &mut self.membership.steps;
        if let Some((_, at_ms)) = steps.started[micro_batch.index()].take_if(|(s, _)| *s == step) {
            let took_us = self.cx.now_ms.saturating_sub(at_ms) * 1000;
            // The clock ticks in milliseconds: only the mean of many steps means something.
            steps.mean_us = if steps.mean_us == 0 { took_us } else { (steps.mean_us * 15 + took_us) / 16 };
        }
    }
}

/// A sequence's rBlocks here. Those that are written in every layer could move, but for what others share.
fn own_row(me: u32, seq: &Sequence, landing: u32, pool: &BlockPool) -> PlacementEntry {
    let full = (seq.blocks.written() / seq.blocks.block_tokens()) as usize;
    let alone = |placement: &&Placement| matches!(placement, Placement::Local(block) if !pool.is_shared(*block));
    let local = |placements: &[Placement]| as_u32(placements.iter().filter(alone).count());
    PlacementEntry {
        debtor: me,
        seq: seq.id.0,
        blocks: seq.blocks.local_blocks() + as_u32(seq.aside.len()) + landing,
        blocks_sealed: local(seq.blocks.placements().get(..full).unwrap_or(&[])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn lives_differ() {
        let mut lives = BTreeSet::new();
        let mut incarnation = 7;
        for _ in 0..10_000 {
            assert!(lives.insert(incarnation));
            incarnation = next_incarnation(incarnation);
        }
    }
}
