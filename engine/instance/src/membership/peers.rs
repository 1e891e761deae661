//! Who is connected: transport peers, the instances they turned out to be, and control messages that wait for a
//! connection.

use crate::creditor::CreditorEvent;
use crate::event::{Effect, PeerKey};
use crate::instance::Instance;
use lagoon_protocol::{ControlBody, Hello, PoolShape, Rejected, VERSION_MAX, VERSION_MIN};
use lagoon_types::InstanceId;
use lagoon_types::limits::{CONNECT_DEADLINE_MS, PEER_PENDING_MAX};
use std::collections::{BTreeMap, BTreeSet};

/// A connected instance that said Hello.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub(crate) instance: InstanceId,
    pub(crate) rtt_us: u32,
    /// Bulk rate, measured on transfers; 0 until there was one.
    pub(crate) bytes_per_s: u64,
}

/// Messages for an instance that is being dialled.
#[derive(Debug)]
struct Dialling {
    since_ms: u64,
    messages: Vec<ControlBody>,
}

/// A sample of a link's rate is taken over so long at least: the clock counts milliseconds.
const METER_MS: u64 = 20;

/// Measures a link's bulk rate: bytes that arrived over the time in which some were in progress.
#[derive(Debug, Default)]
struct Meter {
    under_way: u32,
    since_ms: u64,
    bytes: u64,
    elapsed_ms: u64,
    bytes_per_s: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Peers {
    known: BTreeMap<PeerKey, Known>,
    keys: BTreeMap<InstanceId, PeerKey>,
    dialling: BTreeMap<InstanceId, Dialling>,
    /// Bulk rates, measured on moves.
    meters: BTreeMap<InstanceId, Meter>,
    /// Peers to which a Hello is owed: they connected before this instance had a number, or one may have been dropped.
    ungreeted: BTreeSet<PeerKey>,
    /// Peers that heard one, whether or not they have said who they are.
    greeted: BTreeSet<PeerKey>,
}

impl Peers {
    pub(crate) fn key(&self, instance: InstanceId) -> Option<PeerKey> {
        self.keys.get(&instance).copied()
    }

    pub(crate) fn known(&self, peer: PeerKey) -> Option<Known> {
        self.known.get(&peer).copied()
    }

    /// A transfer to or from a peer begins.
    pub(crate) fn transfer(&mut self, peer: InstanceId, now_ms: u64) {
        let meter = self.meters.entry(peer).or_default();
        meter.under_way += 1;
        if meter.under_way == 1 {
            meter.since_ms = now_ms;
        }
    }

    /// A transfer of so many bytes has arrived.
    pub(crate) fn transferred(&mut self, peer: InstanceId, bytes: u64, now_ms: u64) {
        let Some(meter) = self.meters.get_mut(&peer).filter(|m| m.under_way > 0) else { return };
        meter.under_way -= 1;
        meter.bytes += bytes;
        if meter.under_way > 0 {
            return;
        }
        meter.elapsed_ms += now_ms - meter.since_ms;
        if meter.elapsed_ms >= METER_MS {
            let rate = meter.bytes * 1000 / meter.elapsed_ms;
            // A quarter of the new: links change slowly.
            meter.bytes_per_s = if meter.bytes_per_s == 0 { rate } else { (3 * meter.bytes_per_s + rate) / 4 };
            (meter.bytes, meter.elapsed_ms) = (0, 0);
            let rate = meter.bytes_per_s;
            if let Some(known) = self.keys.get(&peer).and_then(|key| self.known.get_mut(key)) {
                known.bytes_per_s = rate;
            }
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Known> {
        self.known.values()
    }
}

impl Instance {
    pub(crate) fn hello(&self) -> Option<ControlBody> {
        let instance = self.membership.id?;
        Some(ControlBody::Hello(Hello {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            instance: instance.0,
            incarnation: self.membership.incarnation,
            shape: Some(self.cx.config.pool_shape()),
            lent: self.cx.config.lent.clone(),
        }))
    }

    /// Sends now, or dials and sends when the peer has said who it is. Messages to a peer that does not come are
    /// dropped; what waits for their answer has a deadline.
    pub(crate) fn send_control(&mut self, to: InstanceId, quic_addr: &str, body: ControlBody) {
        if let Some(peer) = self.cx.peers.key(to) {
            self.cx.send(peer, body);
            return;
        }
        let now = self.cx.now_ms;
        let entry = self.cx.peers.dialling.entry(to).or_insert_with(|| {
            self.cx.effects.push(Effect::Connect { instance: to, quic_addr: quic_addr.to_owned() });
            Dialling { since_ms: now, messages: Vec::new() }
        });
        if entry.messages.len() < PEER_PENDING_MAX {
            entry.messages.push(body);
        }
    }

    pub(crate) fn on_peer_up(&mut self, peer: PeerKey) {
        if let Some(body) = self.hello() {
            self.cx.peers.greeted.insert(peer);
            self.cx.send(peer, body);
        } else {
            self.cx.peers.ungreeted.insert(peer);
        }
    }

    /// Says the Hellos that are owed.
    pub(crate) fn greet(&mut self) {
        if self.membership.id.is_none() || self.cx.peers.ungreeted.is_empty() {
            return;
        }
        for peer in std::mem::take(&mut self.cx.peers.ungreeted) {
            self.on_peer_up(peer);
        }
    }

    /// This instance begins another life: every peer is to hear of it, once it has a number again.
    pub(crate) fn greet_again(&mut self) {
        self.cx.peers.ungreeted.extend(&self.cx.peers.greeted);
    }

    pub(crate) fn on_hello(&mut self, peer: PeerKey, hello: &Hello) {
        if let Err(reason) = self.check_hello(hello) {
            self.cx
                .effects
                .push(Effect::Control { peer, body: ControlBody::Rejected(Rejected { reason: reason.clone() }) });
            self.cx.effects.push(Effect::Close { peer, reason });
            return;
        }
        let instance = InstanceId(hello.instance);
        // It was fenced and has another number now.
        if self.cx.peers.known(peer).is_some_and(|known| known.instance != instance) {
            self.forget_peer(peer);
        }
        if let Some(old) = self.cx.peers.keys.insert(instance, peer)
            && old != peer
        {
            self.forget_peer(old);
            self.cx.peers.keys.insert(instance, peer);
        }
        self.cx.peers.known.insert(peer, Known { instance, rtt_us: 0, bytes_per_s: 0 });
        let ended = self.cx.memory.rm.on_peer_hello(instance, hello.incarnation, self.cx.now_ms);
        self.creditor(CreditorEvent::Ended(ended));
        if !self.cx.peers.ungreeted.contains(&peer) {
            self.creditor(CreditorEvent::PeerUp { peer, instance });
        }
        if let Some(dialling) = self.cx.peers.dialling.remove(&instance) {
            for body in dialling.messages {
                self.cx.send(peer, body);
            }
        }
        self.on_worker_up(instance);
        self.step.mapped.on_lent_memory(&mut self.cx, instance, hello.lent.as_ref());
    }

    fn check_hello(&self, hello: &Hello) -> Result<(), String> {
        if hello.version_min > VERSION_MAX || hello.version_max < VERSION_MIN {
            return Err(format!(
                "protocol versions do not meet: this instance speaks {VERSION_MIN} to {VERSION_MAX}, the peer {} to {}",
                hello.version_min, hello.version_max
            ));
        }
        let ours = self.cx.config.pool_shape();
        match &hello.shape {
            Some(theirs) if *theirs == ours => Ok(()),
            Some(theirs) => Err(shape_difference(&ours, theirs)),
            None => Err("the peer does not say what it serves".to_owned()),
        }
    }

    pub(crate) fn on_rtt(&mut self, peer: PeerKey, rtt_us: u32) {
        if let Some(known) = self.cx.peers.known.get_mut(&peer) {
            known.rtt_us = rtt_us;
        }
    }

    pub(crate) fn on_peer_down(&mut self, peer: PeerKey) {
        self.cx.peers.ungreeted.remove(&peer);
        self.cx.peers.greeted.remove(&peer);
        self.forget_peer(peer);
    }

    /// A frame to a peer was dropped and the connection stands: the peer stays known. What depended on the frame is
    /// given up on both sides; control messages are repeated by themselves, a Hello with the next tick.
    pub(crate) fn on_send_failed(&mut self, peer: PeerKey) {
        self.cx.peers.ungreeted.insert(peer);
        let Some(known) = self.cx.peers.known(peer) else { return };
        let detail = "a frame could not be sent";
        self.creditor(CreditorEvent::SendFailed { peer, instance: known.instance });
        self.lose_creditor(known.instance, detail);
    }

    fn forget_peer(&mut self, peer: PeerKey) {
        let Some(known) = self.cx.peers.known.remove(&peer) else { return };
        self.cx.peers.keys.remove(&known.instance);
        self.cx.peers.meters.remove(&known.instance);
        self.creditor(CreditorEvent::PeerDown(known.instance));
        self.cx.memory.rm.on_peer_down(known.instance, self.cx.now_ms);
        self.drop_jobs_of(known.instance);
        self.lose_worker(known.instance);
        self.lose_creditor(known.instance, "the connection to a creditor was lost");
        self.step.mapped.unmap(&mut self.cx, known.instance);
    }

    /// Gives up dialling peers that do not come.
    pub(crate) fn expire_dialling(&mut self) {
        let now = self.cx.now_ms;
        let gone: Vec<InstanceId> = self
            .cx
            .peers
            .dialling
            .iter()
            .filter(|(_, d)| d.since_ms + CONNECT_DEADLINE_MS <= now)
            .map(|(instance, _)| *instance)
            .collect();
        for instance in gone {
            self.cx.peers.dialling.remove(&instance);
            self.cx.memory.rm.on_peer_down(instance, now);
        }
    }
}

/// Names the first field in which two pool shapes differ, with both values.
fn shape_difference(ours: &PoolShape, theirs: &PoolShape) -> String {
    let hex = |hash: &[u8]| hash.iter().take(8).map(|b| format!("{b:02x}")).collect::<String>();
    if ours.model_hash != theirs.model_hash {
        return format!(
            "the models differ: this instance serves {}, the peer {}",
            hex(&ours.model_hash),
            hex(&theirs.model_hash)
        );
    }
    if ours.alibi_bias_max != theirs.alibi_bias_max {
        let [ours, theirs] = [ours, theirs].map(|shape| f32::from_bits(shape.alibi_bias_max));
        return format!("alibi_bias_max differs: this instance has {ours}, the peer {theirs}");
    }
    let fields = [
        ("layers", ours.layers, theirs.layers),
        ("heads", ours.heads, theirs.heads),
        ("kv_heads", ours.kv_heads, theirs.kv_heads),
        ("head_dim", ours.head_dim, theirs.head_dim),
        ("kv_dtype", ours.kv_dtype, theirs.kv_dtype),
        ("block_tokens", ours.block_tokens, theirs.block_tokens),
        ("window", ours.window, theirs.window),
    ];
    let differs = fields.iter().find(|(_, a, b)| a != b);
    differs.map_or_else(
        || "the pool shapes differ".to_owned(),
        |(name, a, b)| format!("{name} differs: this instance has {a}, the peer {b}"),
    )
}
