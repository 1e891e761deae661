//! Who registered with the gManager on which connection, in one term, around the sans-IO core: answers, and what it wants
//! sent to others.
//!
//! Debtors' queries for creditors do not come here: they are answered on their connections' own tasks, from the view that
//! takes no lock ([`Registry::answers`]), so that they scale over the processors. The core hears of them by the bookings
//! in the view.

use crate::election::Mandate;
use crate::gmanager_metrics::{self, GManagerMetrics};
use lagoon_cluster::{GManager, GManagerOutput, serve_query};
use lagoon_protocol::{Control, ControlBody, HeartbeatAck};
use lagoon_transport::{Node, PeerId};
use lagoon_types::InstanceId;
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// The longest pause between two ticks of the core.
const TICK_MAX: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub(crate) struct Registry {
    gmanager: GManager,
    /// Who registered on which connection.
    instances: HashMap<PeerId, InstanceId>,
    peers: BTreeMap<InstanceId, PeerId>,
    started: Instant,
    metrics: GManagerMetrics,
}

/// A connection in the view of creditors, where 0 is none.
fn conn(peer: PeerId) -> u64 {
    peer.0 + 1
}

impl Registry {
    pub(crate) fn new(gmanager: GManager) -> Self {
        Self {
            gmanager,
            instances: HashMap::new(),
            peers: BTreeMap::new(),
            started: Instant::now(),
            metrics: GManagerMetrics::default(),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The term that it knows the pool in.
    pub(crate) fn term(&self) -> u64 {
        self.gmanager.term()
    }

    /// Lets `node` answer debtors' queries by itself, on the task that read them, while this process leads.
    pub(crate) fn serve_queries(&self, node: &Node, mandate: Mandate) {
        let view = self.gmanager.view();
        node.answer_control(Some(std::sync::Arc::new(move |peer, message: &Control| match &message.body {
            Some(ControlBody::BorrowQuery(query)) if mandate.holds() => {
                serve_query(&view, conn(peer), query).map(|advice| ControlBody::BorrowAdvice(advice).into())
            }
            _ => None,
        })));
    }

    /// Handles a message; the answer goes back to `peer`.
    pub(crate) fn on_control(&mut self, peer: PeerId, body: &ControlBody) -> Option<ControlBody> {
        let now = self.now_ms();
        let from = self.instances.get(&peer).copied();
        if let (ControlBody::Heartbeat(heartbeat), None) = (body, from) {
            // It registered in another term, which ended before its heartbeat came.
            let (seq, term) = (heartbeat.seq, self.gmanager.term());
            return Some(ControlBody::HeartbeatAck(HeartbeatAck { seq, term, ..HeartbeatAck::default() }));
        }
        if let ControlBody::Refusal(_) = body {
            gmanager_metrics::refusal();
        }
        let answer = self.gmanager.on_control(from, body, now)?;
        match &answer {
            ControlBody::Registered(r) => {
                tracing::info!(instance = r.instance, "registered");
                let instance = InstanceId(r.instance);
                self.instances.insert(peer, instance);
                self.peers.insert(instance, peer);
                self.gmanager.set_conn(instance, conn(peer));
            }
            ControlBody::Rejected(r) => tracing::warn!(reason = r.reason, "refused a registration"),
            _ => {}
        }
        Some(answer)
    }

    /// A connection is gone.
    pub(crate) fn on_down(&mut self, peer: PeerId) {
        let Some(instance) = self.instances.remove(&peer) else { return };
        if self.peers.get(&instance) == Some(&peer) {
            self.peers.remove(&instance);
            self.gmanager.set_conn(instance, 0);
        }
    }

    /// Time passes.
    pub(crate) fn on_tick(&mut self) {
        let (rounds, begun) = (self.gmanager.stats().rounds, Instant::now());
        for instance in self.gmanager.tick(self.now_ms()) {
            tracing::warn!(%instance, "forgotten after a long silence");
        }
        if self.gmanager.stats().rounds > rounds {
            gmanager_metrics::round(begun.elapsed());
        }
    }

    /// Tells Prometheus how it is.
    pub(crate) fn record(&mut self) {
        let now = self.now_ms();
        self.metrics.record(&self.gmanager, now);
    }

    /// What is to be sent, and to whom; until `None`. What is for an instance that is not connected is dropped.
    pub(crate) fn poll(&mut self) -> Option<(PeerId, ControlBody)> {
        while let Some(GManagerOutput::Send { to, body }) = self.gmanager.poll() {
            if let ControlBody::Fenced(fenced) = &body {
                tracing::debug!(instance = fenced.instance, %to, "tells that an instance is dead");
            }
            if let Some(peer) = self.peers.get(&to) {
                return Some((*peer, body));
            }
        }
        None
    }

    /// How long until the next tick.
    pub(crate) fn sleep(&self) -> Duration {
        let wake = self.gmanager.next_wake_ms().map(|at| Duration::from_millis(at.saturating_sub(self.now_ms())));
        wake.map_or(TICK_MAX, |pause| pause.clamp(Duration::from_millis(1), TICK_MAX))
    }
}
