//! Membership of this instance in its pool: registration, heartbeats with its rows of the request placement map, fences
//! and drains.
//!
//! * A fence begins a new incarnation in the same process: all leases, lent and borrowed, are dropped, a new
//!   incarnation number is derived from the old one and sent to the gManager and the peers; running requests lose their
//!   remote KV and go on.
//! * A draining instance lends nothing more and finishes its requests. A drain with `stop` ends when nothing has been
//!   left and nothing has arrived for [`DRAIN_QUIET_MS`].

mod peers;
mod roles;

use crate::batch::Batch;
use crate::batch::sequence::Sequence;
use crate::cx::Cx;
use crate::event::{Effect, PeerKey, TransferEffect};
use crate::look::Look;
use crate::outcome::{Outcome, Outcomes};
use lagoon_cluster::{CacheReport, PlacementReport, next_incarnation};
use lagoon_kv::{BlockPool, Placement};
use lagoon_protocol::{
    ControlBody, Deregister, DrainOrder, Fenced, HeartbeatAck, Hello, Link, Load, PlacementEntry, Register, Registered,
    RelayMembers, RoleOrder, VERSION_MAX, VERSION_MIN,
};
use lagoon_types::InstanceId;
use lagoon_types::limits::{DRAIN_QUIET_MS, HEARTBEAT_LINKS_MAX, HEARTBEAT_MS, LOAD_QUEUE_MAX};

/// A drain in flight.
#[derive(Clone, Copy, Debug)]
struct Drain {
    stop: bool,
    /// Since when nothing is left here, in milliseconds.
    quiet_since_ms: Option<u64>,
}

/// The membership machine. Other machines read the [`crate::cx::standing::Standing`] that it writes.
#[derive(Debug, Default)]
pub(crate) struct Membership {
    /// Term of the gManager that it is registered with.
    term: u64,
    heartbeat_at_ms: u64,
    report: PlacementReport,
    cached: CacheReport,
    drain: Option<Drain>,
    /// Times that it was declared dead.
    fences: u64,
    /// Moving average of decode step times by the events' clock, in microseconds; 0 before the first.
    step_us: u64,
}

/// Events of the pool around this instance: the gManager, peers' connections, the role.
#[derive(Debug)]
pub(crate) enum MembershipEvent {
    GManagerUp,
    GManagerDown,
    Registered(Registered),
    Acknowledged(HeartbeatAck),
    /// Another instance was declared dead.
    PeerFenced(Fenced),
    Drain(DrainOrder),
    Role(RoleOrder),
    PeerUp(PeerKey),
    PeerDown(PeerKey),
    Hello {
        peer: PeerKey,
        hello: Hello,
    },
    Introduced {
        peer: PeerKey,
        hello: Hello,
    },
    Rtt {
        peer: PeerKey,
        rtt_us: u32,
    },
    /// A frame to a peer was dropped.
    SendFailed(PeerKey),
    /// Send a control message, after dialling the instance if need be.
    Send {
        to: InstanceId,
        quic_addr: String,
        body: ControlBody,
    },
    /// A debtor wants this instance to relay queries to these creditors beside it.
    RelayMembers(RelayMembers),
    /// A step took `ms`.
    StepDone {
        ms: u64,
    },
    /// Time passes: send overdue Hellos before other messages to these peers.
    Greet,
    /// Time passes.
    Tick,
}

impl Membership {
    pub(crate) fn handle(&mut self, cx: &mut Cx, look: Look<'_>, event: MembershipEvent) -> Outcomes {
        match event {
            MembershipEvent::GManagerUp => register(cx),
            MembershipEvent::GManagerDown => cx.standing.registered = false,
            MembershipEvent::Registered(registered) => self.on_registered(cx, look, &registered),
            MembershipEvent::Acknowledged(ack) => self.on_heartbeat_ack(cx, &ack),
            MembershipEvent::PeerFenced(fenced) => on_peer_fenced(cx, &fenced),
            MembershipEvent::Drain(order) => self.on_drain_order(cx, order),
            MembershipEvent::Role(order) => self.on_role_order(cx, order),
            MembershipEvent::PeerUp(peer) => Self::on_peer_up(cx, peer),
            MembershipEvent::PeerDown(peer) => Self::on_peer_down(cx, peer),
            MembershipEvent::Hello { peer, hello } => Self::on_hello(cx, peer, hello),
            MembershipEvent::Introduced { peer, hello } => Self::on_introduced(cx, peer, hello),
            MembershipEvent::Rtt { peer, rtt_us } => Self::on_rtt(cx, peer, rtt_us),
            MembershipEvent::SendFailed(peer) => Self::on_send_failed(cx, peer),
            MembershipEvent::Send { to, quic_addr, body } => cx.send_or_dial(to, &quic_addr, body),
            MembershipEvent::RelayMembers(members) => Self::on_relay_members(cx, &members),
            MembershipEvent::StepDone { ms } => self.note_step(ms),
            MembershipEvent::Greet => Self::greet(cx),
            MembershipEvent::Tick => {
                Self::expire_dialling(cx);
                self.tick_role(cx, look);
                if cx.standing.registered && cx.now_ms >= self.heartbeat_at_ms {
                    self.heartbeat(cx, look);
                }
                self.tick_drain(cx, look.batch);
            }
        }
        cx.take_outcomes()
    }

    /// Times that the gManager declared this instance dead.
    pub(crate) fn fences(&self) -> u64 {
        self.fences
    }

    fn on_registered(&mut self, cx: &mut Cx, look: Look<'_>, registered: &Registered) {
        cx.standing.on_registered(InstanceId(registered.instance), cx.now_ms);
        cx.memory.rm.set_instance(InstanceId(registered.instance));
        self.term = registered.term;
        // After a registration all rows are reported, also those that this or another gManager had acknowledged.
        self.report.restart();
        self.cached.restart();
        Self::greet(cx);
        self.heartbeat(cx, look);
    }

    fn on_heartbeat_ack(&mut self, cx: &mut Cx, ack: &HeartbeatAck) {
        if !ack.known {
            cx.standing.registered = false;
            register(cx);
        } else if ack.fenced {
            self.on_own_fence(cx);
        } else {
            cx.standing.note_pool(ack.pool_blocks_total, cx.now_ms);
            let since = |waits_ms: u32| cx.now_ms.saturating_sub(u64::from(waits_ms));
            let oldest_waiting = ack.oldest_waiting.map(|e| (InstanceId(e.debtor), since(e.waits_ms)));
            cx.standing.note_oldest_waiting(oldest_waiting, cx.now_ms);
            if ack.term == self.term {
                self.report.on_ack(ack);
                self.cached.on_ack(ack);
            } else {
                self.term = ack.term;
                self.report.restart();
                self.cached.restart();
            }
        }
    }

    /// The gManager has declared this instance dead.
    fn on_own_fence(&mut self, cx: &mut Cx) {
        if !cx.standing.registered {
            // The new incarnation has begun and its registration is on the way.
            return;
        }
        self.fences += 1;
        cx.standing.incarnation = next_incarnation(cx.standing.incarnation);
        cx.standing.registered = false;
        let ended = cx.memory.rm.forget_all(cx.standing.incarnation, cx.now_ms);
        cx.emit(Outcome::LeasesEnded(ended));
        cx.emit(Outcome::NewLife);
        // Peers free what they lent to the old incarnation when they learn of the new one.
        Self::greet_again(cx);
        register(cx);
    }

    fn on_drain_order(&mut self, cx: &mut Cx, m: DrainOrder) {
        let old = self.drain;
        self.drain = m.on.then(|| Drain { stop: m.stop, quiet_since_ms: old.and_then(|d| d.quiet_since_ms) });
        cx.standing.draining = m.on;
        cx.memory.rm.set_draining(m.on);
        if old.is_some() != m.on {
            self.heartbeat_at_ms = 0;
        }
    }

    fn tick_drain(&mut self, cx: &mut Cx, batch: &Batch) {
        let Some(drain) = &mut self.drain else { return };
        let rm = &cx.memory.rm;
        if !batch.is_empty()
            || rm.creditor.iter().next().is_some()
            || rm.debtor.held.blocks() > 0
            || rm.debtor.held.releasing() > 0
        {
            drain.quiet_since_ms = None;
            return;
        }
        let since_ms = *drain.quiet_since_ms.get_or_insert(cx.now_ms);
        if drain.stop && !cx.standing.drained && cx.now_ms >= since_ms + DRAIN_QUIET_MS {
            cx.standing.drained = true;
            cx.standing.registered = false;
            if let Some(id) = cx.standing.id {
                cx.effects.push(Effect::ToGManager(ControlBody::Deregister(Deregister { instance: id.0 })));
            }
            cx.effects.push(Effect::Drained);
        }
    }

    fn heartbeat(&mut self, cx: &mut Cx, look: Look<'_>) {
        self.heartbeat_at_ms = cx.now_ms + HEARTBEAT_MS;
        let links = cx.peers.iter().map(|k| {
            let mapped = look.step.mapped().maps(k.instance);
            Link { peer: k.instance.0, rtt_us: k.rtt_us, bytes_per_s: k.bytes_per_s, mapped }
        });
        let mut links: Vec<Link> = links.filter(|link| link.rtt_us > 0 || link.mapped).collect();
        links.sort_by_key(|link| !link.mapped);
        links.truncate(HEARTBEAT_LINKS_MAX);
        let batch = look.batch;
        let (running, waiting) = (as_u32(batch.running_len()), as_u32(batch.waiting_len(look.prefills)));
        let mut heartbeat = cx.memory.rm.heartbeat(running, waiting, links);
        heartbeat.draining = cx.standing.draining;
        heartbeat.frozen = batch.frozen_cycle();
        heartbeat.load = cx.config.role.runs().then(|| self.load(cx, batch));
        heartbeat.moves = Some(Box::new(look.moves(cx).counts()));
        heartbeat.prefill = cx.config.transfer.is_some().then(|| Box::new(look.prefills.look(cx, batch).counts()));
        heartbeat.cache = cx.cache_counts().map(Box::new);
        heartbeat.role = Self::changes_role(cx).then(|| Box::new(cx.standing.roles.state()));
        let remote_requests = cx.memory.rm.creditor.rows(&cx.memory.rm.pool);
        let me = heartbeat.instance;
        heartbeat.workers = look.prefills.version();
        let own = batch.seqs().filter(|s| s.for_others.is_none());
        let own = own.map(|s| own_row(me, s, as_u32(look.prefills.landing(s.id)), &cx.memory.rm.pool));
        self.report.fill(&mut heartbeat, own.chain(remote_requests));
        self.cached.fill(&mut heartbeat, &cx.memory.rm.pool, cx.now_ms);
        cx.effects.push(Effect::ToGManager(ControlBody::Heartbeat(Box::new(heartbeat))));
    }

    /// Load of batch and queue, for the planner's model and dispatch.
    pub(crate) fn load(&self, cx: &Cx, batch: &Batch) -> Load {
        let block_tokens = cx.config.block_tokens;
        let decodes = |s: &&Sequence| s.is_running() && s.blocks.written() + 1 >= s.len();
        let decoding = || batch.seqs().filter(decodes);
        let remote = |s: &Sequence| u64::from((s.blocks.remote_blocks() * block_tokens).min(s.len()));
        let queue = batch.waiting().take(LOAD_QUEUE_MAX);
        Load {
            batch: as_u32(decoding().count()),
            context_tokens: decoding().map(|s| u64::from(s.len())).sum(),
            remote_tokens: decoding().map(remote).sum(),
            remote_request_tokens: u64::from(cx.memory.rm.creditor.blocks_in_leases()) * u64::from(block_tokens),
            queue_blocks: queue.map(|w| (w.tokens + 1).div_ceil(block_tokens)).collect(),
            batch_max: as_u32(cx.config.sched.running),
            step_us: u32::try_from(self.step_us).unwrap_or(u32::MAX),
            head_waits_ms: head_waits_ms(cx, batch),
            prefill_tokens: Some(batch.seqs().map(Sequence::prefill_left).sum()),
            answer_tokens_max: Some(batch.seqs().map(Sequence::answer_left).sum()),
        }
    }

    fn note_step(&mut self, ms: u64) {
        let took_us = ms * 1000;
        // The clock ticks in milliseconds: only the mean of many steps is meaningful.
        self.step_us = if self.step_us == 0 { took_us } else { (self.step_us * 15 + took_us) / 16 };
    }
}

/// Another instance was declared dead.
fn on_peer_fenced(cx: &mut Cx, m: &Fenced) {
    let (reader, incarnation) = (InstanceId(m.instance), m.incarnation);
    let ended = cx.memory.rm.on_peer_fenced(reader, incarnation, cx.now_ms);
    cx.emit(Outcome::LeasesEnded(ended));
    if cx.config.transfer.is_some() {
        cx.effects.push(Effect::Transfer(TransferEffect::Fence { reader, incarnation }));
    }
}

/// How long the head of the queue has waited, in milliseconds, if it needs more than this instance has; else 0.
fn head_waits_ms(cx: &Cx, batch: &Batch) -> u32 {
    let head = batch.waiting().next().and_then(|w| batch.seq(w.seq));
    let alone = |s: &Sequence| s.blocks.shortfall(s.len() + 1) <= cx.config.blocks_total;
    let waits_ms = head.filter(|s| !alone(s)).map_or(0, |s| (cx.now_ms - s.since_ms).max(1));
    u32::try_from(waits_ms).unwrap_or(u32::MAX)
}

/// Asks the gManager to take this instance into the pool.
fn register(cx: &mut Cx) {
    // A drained instance has left the pool and only waits for its process to end.
    if cx.standing.drained {
        return;
    }
    let config = &cx.config;
    let lend_blocks_max = config.lend_blocks_max.min(config.blocks_total.saturating_sub(config.lend_reserve_blocks));
    cx.effects.push(Effect::ToGManager(ControlBody::Register(Box::new(Register {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        name: config.name.clone(),
        quic_addr: config.quic_addr.clone(),
        http_addr: config.http_addr.clone(),
        role: cx.standing.roles.now().into(),
        incarnation: cx.standing.incarnation,
        shape: Some(Box::new(config.pool_shape())),
        blocks_total: config.blocks_total,
        backend: config.backend.clone(),
        instance: cx.standing.id.map_or(0, |id| id.0),
        calibration: config.calibration.clone().map(Box::new),
        tier: config.tier.into(),
        lend_blocks_max: Some(lend_blocks_max),
        host: config.host_fingerprint(),
    }))));
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// A sequence's row of local rBlocks. Those written in every layer and not shared can move.
fn own_row(me: u32, seq: &Sequence, landing: u32, pool: &BlockPool) -> PlacementEntry {
    let full = (seq.blocks.written() / seq.blocks.block_tokens()) as usize;
    let alone = |placement: &&Placement| matches!(placement, Placement::Local(block) if !pool.is_shared(*block));
    let local = |placements: &[Placement]| as_u32(placements.iter().filter(alone).count());
    PlacementEntry {
        debtor: me,
        seq: seq.id.0,
        blocks: seq.blocks.local_blocks() + as_u32(seq.beside()) + landing,
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
