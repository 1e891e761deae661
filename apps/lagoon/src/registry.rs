//! Registrations with the gManager in one term, by connection, around the sans-IO core: its replies and messages.
//!
//! Borrow queries do not come here: their connections' tasks answer them from the lock-free view
//! ([`Registry::serve_queries`]), so that they scale over cores. The core learns of them by the bookings in the view.

use crate::election::Mandate;
use crate::gmanager_metrics::{self, GManagerMetrics};
use crate::moment::Moment;
use crate::permissions;
use lagoon_cluster::{GManager, GManagerOutput, serve_query};
use lagoon_protocol::{Control, ControlBody, HeartbeatAck, Register, Rejected};
use lagoon_transport::{Node, NodeRole, PeerId, Subject};
use lagoon_types::InstanceId;
use lagoon_types::limits::{FENCE_MS, INSTANCE_FORGET_MS, INSTANCES_MAX};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Longest pause between two ticks of the core.
const TICK_MAX: Duration = Duration::from_millis(250);

/// Number of remembered holders above which those of departed instances are dropped.
const HOLDERS_MAX: usize = 2 * INSTANCES_MAX;

/// How long a registration waits at most until its place is free. A silent holder is fenced after [`FENCE_MS`], and forgotten when
/// it cannot be fenced.
const PLACE_WAIT_MS: u64 = INSTANCE_FORGET_MS + FENCE_MS;

/// A registration that waits for its place.
#[derive(Debug)]
struct Waiting {
    subject: Subject,
    register: Box<Register>,
    until_ms: u64,
}

#[derive(Debug)]
pub(crate) struct Registry {
    gmanager: GManager,
    /// Instance registered on each connection.
    instances: HashMap<PeerId, InstanceId>,
    peers: BTreeMap<InstanceId, PeerId>,
    /// Subject that holds each remembered instance id.
    holders: BTreeMap<InstanceId, Subject>,
    /// At most one of each connection.
    waiting: BTreeMap<PeerId, Waiting>,
    /// Answers to those that waited.
    answers: VecDeque<(PeerId, ControlBody)>,
    started: Moment,
    metrics: GManagerMetrics,
}

/// A connection's number in the view of creditors, where 0 is none.
fn conn(peer: PeerId) -> u64 {
    peer.0 + 1
}

impl Registry {
    pub(crate) fn new(gmanager: GManager) -> Self {
        Self {
            gmanager,
            instances: HashMap::new(),
            peers: BTreeMap::new(),
            holders: BTreeMap::new(),
            waiting: BTreeMap::new(),
            answers: VecDeque::new(),
            started: Moment::now(),
            metrics: GManagerMetrics::default(),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The term of its pool state.
    pub(crate) fn term(&self) -> u64 {
        self.gmanager.term()
    }

    /// Lets `node` answer borrow queries on the tasks that read them, while this process leads.
    pub(crate) fn serve_queries(&self, node: &Node, mandate: Mandate) {
        let view = self.gmanager.view();
        let borrows = |subject: &Subject| subject.roles.has(NodeRole::Instance);
        node.answer_control(Some(std::sync::Arc::new(move |peer, subject, message: &Control| match &message.body {
            Some(ControlBody::BorrowQuery(query)) if borrows(subject) && mandate.holds() => {
                serve_query(&view, conn(peer), query).map(|advice| ControlBody::BorrowAdvice(advice).into())
            }
            _ => None,
        })));
    }

    /// Handles a message of a session with the process that accepts at `addr`; the answer goes back to `peer`.
    ///
    /// # Errors
    /// Why the peer may not send that.
    pub(crate) fn on_control(
        &mut self,
        peer: PeerId,
        (subject, addr): (&Subject, SocketAddr),
        body: &ControlBody,
    ) -> Result<Option<ControlBody>, String> {
        let from = self.instances.get(&peer).copied();
        permissions::at_gmanager(subject.roles, from, body)?;
        if let ControlBody::Register(register) = body {
            // One that peers cannot reach is refused in its own words.
            let reported =
                register.quic_addr.parse::<SocketAddr>().ok().filter(|reported| !reported.ip().is_unspecified());
            if reported.is_some_and(|reported| (reported.ip(), reported.port()) != (addr.ip(), addr.port())) {
                return Err(format!(
                    "the registration is for {}, and its session is that of {addr}\n\
                     hint: a process registers the address at which it accepts, as --quic or --advertise names it",
                    register.quic_addr
                ));
            }
            let before = self.waiting.remove(&peer);
            if let Some((holder, why)) = self.holder(subject, register) {
                if self.peers.contains_key(&holder) {
                    return Err(why);
                }
                if before.is_none() {
                    tracing::warn!("a registration waits until its place is free: {why}");
                }
                let until_ms = before.map_or(self.now_ms() + PLACE_WAIT_MS, |before| before.until_ms);
                let waiting = Waiting { subject: subject.clone(), register: register.clone(), until_ms };
                self.waiting.insert(peer, waiting);
                return Ok(None);
            }
        }
        Ok(self.answer(peer, subject, body))
    }

    /// Another live instance that holds the place (process, address) of a registration, and a message about it. An instance holds
    /// its place until it is fenced or leaves.
    fn holder(&self, subject: &Subject, register: &Register) -> Option<(InstanceId, String)> {
        self.gmanager.holders(register).find_map(|instance| {
            let holder = self.holders.get(&instance).filter(|holder| *holder != subject)?;
            let known = if holder.node == subject.node { " with another key" } else { "" };
            let why = format!(
                "{} is {instance} of node {:?}, which has not left; this certificate is for node {:?}{known}\n\
                 hint: every node needs an address and a certificate of its own; \
                 a process that is gone is forgotten within {} s",
                register.quic_addr,
                holder.node,
                subject.node,
                PLACE_WAIT_MS / 1_000
            );
            Some((instance, why))
        })
    }

    /// Answers registrations whose places are free now, and those that have waited for too long.
    fn answer_waiting(&mut self) {
        let now_ms = self.now_ms();
        for (peer, waiting) in std::mem::take(&mut self.waiting) {
            let answer = match self.holder(&waiting.subject, &waiting.register) {
                None => self.answer(peer, &waiting.subject, &ControlBody::Register(waiting.register)),
                Some((_, reason)) if now_ms >= waiting.until_ms => {
                    tracing::warn!(reason, "refused a registration");
                    Some(ControlBody::Rejected(Rejected { reason }))
                }
                Some(_) => {
                    self.waiting.insert(peer, waiting);
                    continue;
                }
            };
            self.answers.extend(answer.map(|answer| (peer, answer)));
        }
    }

    /// Connections whose registrations wait for a reply: they register again when this registry is dropped.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = PeerId> {
        self.waiting.keys().copied()
    }

    fn answer(&mut self, peer: PeerId, subject: &Subject, body: &ControlBody) -> Option<ControlBody> {
        let now = self.now_ms();
        let from = self.instances.get(&peer).copied();
        if let (ControlBody::Heartbeat(heartbeat), None) = (body, from) {
            // Its registration was in another term, which ended before this heartbeat.
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
                self.holders.insert(instance, subject.clone());
                if self.holders.len() > HOLDERS_MAX {
                    let gmanager = &self.gmanager;
                    self.holders.retain(|id, _| gmanager.remembers(*id));
                }
                self.gmanager.set_conn(instance, conn(peer));
            }
            ControlBody::Rejected(r) => tracing::warn!(reason = r.reason, "refused a registration"),
            _ => {}
        }
        Some(answer)
    }

    /// Handles a lost connection.
    pub(crate) fn on_down(&mut self, peer: PeerId) {
        self.waiting.remove(&peer);
        let Some(instance) = self.instances.remove(&peer) else { return };
        if self.peers.get(&instance) == Some(&peer) {
            self.peers.remove(&instance);
            self.gmanager.set_conn(instance, 0);
        }
    }

    /// Runs the core's timers.
    pub(crate) fn on_tick(&mut self) {
        let (rounds, begun) = (self.gmanager.stats().rounds, Instant::now());
        for instance in self.gmanager.tick(self.now_ms()) {
            tracing::warn!(%instance, "forgotten after a long silence");
            self.holders.remove(&instance);
        }
        self.answer_waiting();
        if self.gmanager.stats().rounds > rounds {
            gmanager_metrics::round(begun.elapsed());
        }
    }

    /// Sets the metrics.
    pub(crate) fn record(&mut self) {
        let now = self.now_ms();
        self.metrics.record(&self.gmanager, now);
    }

    /// The next message and its connection; `None` when there are no more. Messages to disconnected instances are
    /// dropped.
    pub(crate) fn poll(&mut self) -> Option<(PeerId, ControlBody)> {
        if let Some(answer) = self.answers.pop_front() {
            return Some(answer);
        }
        while let Some(GManagerOutput::Send { to, body }) = self.gmanager.poll() {
            if let ControlBody::Fenced(fenced) = &body {
                tracing::debug!(instance = fenced.instance, %to, "reports that an instance is dead");
            }
            if let Some(peer) = self.peers.get(&to) {
                return Some((*peer, body));
            }
        }
        None
    }

    /// Time until the next tick.
    pub(crate) fn sleep(&self) -> Duration {
        let wake = self.gmanager.next_wake_ms().map(|at| Duration::from_millis(at.saturating_sub(self.now_ms())));
        wake.map_or(TICK_MAX, |pause| pause.clamp(Duration::from_millis(1), TICK_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::{Deregister, PoolShape, VERSION_MAX, VERSION_MIN};
    use lagoon_transport::ClusterCa;
    use lagoon_types::DType;

    const ADDR: &str = "10.0.0.1:7000";

    fn register(incarnation: u64) -> ControlBody {
        let shape = PoolShape {
            model_hash: vec![7; 32],
            layers: 4,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            kv_dtype: DType::F16.code().into(),
            block_tokens: 32,
            attention_scale: 0.125f32.to_bits(),
            ..PoolShape::default()
        };
        ControlBody::Register(Box::new(Register {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            quic_addr: ADDR.to_owned(),
            incarnation,
            shape: Some(Box::new(shape)),
            blocks_total: 100,
            ..Register::default()
        }))
    }

    fn subjects() -> [Subject; 2] {
        let ca = ClusterCa::generate("test").unwrap();
        [(); 2].map(|()| ca.identity("node", NodeRole::Instance).unwrap().subject().clone())
    }

    /// A process was killed and comes back with a new key before it was fenced: it waits, and is refused only in the end.
    #[test]
    fn a_place_is_waited_for_until_its_holder_is_gone() {
        let ([before, after], addr) = (subjects(), ADDR.parse().unwrap());
        let mut registry = Registry::new(GManager::new(1));
        let (old, new) = (PeerId(1), PeerId(2));
        let answer = registry.on_control(old, (&before, addr), &register(10)).unwrap();
        assert!(matches!(answer, Some(ControlBody::Registered(_))), "{answer:?}");
        let reason = registry.on_control(new, (&after, addr), &register(11)).unwrap_err();
        assert!(reason.contains("another key") && reason.contains("hint:"), "it is connected: {reason}");

        registry.on_down(old);
        assert_eq!(registry.on_control(new, (&after, addr), &register(11)), Ok(None));
        registry.on_tick();
        assert_eq!((registry.poll(), registry.waiting().collect::<Vec<_>>()), (None, vec![new]));
        registry.waiting.get_mut(&new).unwrap().until_ms = 0;
        registry.on_tick();
        let refused = registry.poll();
        assert!(matches!(&refused, Some((peer, ControlBody::Rejected(_))) if *peer == new), "{refused:?}");

        assert_eq!(registry.on_control(new, (&after, addr), &register(11)), Ok(None));
        let gone = ControlBody::Deregister(Deregister { instance: 1 });
        registry.gmanager.on_control(Some(InstanceId(1)), &gone, registry.now_ms());
        registry.on_tick();
        let answer = registry.poll();
        assert!(matches!(&answer, Some((peer, ControlBody::Registered(_))) if *peer == new), "{answer:?}");
        assert_eq!(registry.waiting().count(), 0);
    }

    /// A registration with an address that is not its session's is refused.
    #[test]
    fn a_registration_is_for_the_address_of_its_session() {
        let [subject, _] = subjects();
        let mut registry = Registry::new(GManager::new(1));
        let elsewhere = "10.0.0.2:7000".parse().unwrap();
        let reason = registry.on_control(PeerId(1), (&subject, elsewhere), &register(10)).unwrap_err();
        assert!(reason.contains(ADDR) && reason.contains("10.0.0.2:7000") && reason.contains("hint:"), "{reason}");
    }
}
