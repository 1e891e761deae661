//! Connected peers: transport peers, their instances, and control messages that wait for a connection. Only the
//! membership adds and forgets them.

use crate::event::PeerKey;
use lagoon_protocol::ControlBody;
use lagoon_types::InstanceId;
use lagoon_types::limits::{CONNECT_DEADLINE_MS, PEER_PENDING_MAX};
use std::collections::{BTreeMap, BTreeSet};

/// A connected instance that has sent its Hello.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub(crate) instance: InstanceId,
    pub(crate) rtt_us: u32,
    /// Bulk rate in bytes per second, measured on transfers; 0 before the first.
    pub(crate) bytes_per_s: u64,
}

/// Messages for an instance that is being dialled.
#[derive(Debug)]
struct Dialling {
    since_ms: u64,
    messages: Vec<ControlBody>,
}

/// Minimum time of a sample of a link's rate: the clock counts milliseconds.
const METER_MS: u64 = 20;

/// Measures a link's bulk rate: bytes that arrived over the time with transfers in flight.
#[derive(Debug, Default)]
struct Meter {
    transfers: u32,
    since_ms: u64,
    bytes: u64,
    elapsed_ms: u64,
    bytes_per_s: u64,
}

/// The peers. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    known: BTreeMap<PeerKey, Known>,
    keys: BTreeMap<InstanceId, PeerKey>,
    /// Hosts of known instances that name theirs.
    hosts: BTreeMap<InstanceId, String>,
    dialling: BTreeMap<InstanceId, Dialling>,
    /// Bulk rates, measured on moves.
    meters: BTreeMap<InstanceId, Meter>,
    /// Peers that need a Hello: they connected before this instance had an id, or a frame to them was dropped.
    ungreeted: BTreeSet<PeerKey>,
    /// Peers that have got a Hello, whether or not they have sent theirs.
    greeted: BTreeSet<PeerKey>,
}

impl Peers {
    /// The connection to a known instance.
    pub(crate) fn key(&self, instance: InstanceId) -> Option<PeerKey> {
        self.keys.get(&instance).copied()
    }

    /// The instance behind a connection, once introduced.
    pub(crate) fn known(&self, peer: PeerKey) -> Option<Known> {
        self.known.get(&peer).copied()
    }

    /// The host of a known instance, if it names one: then it also knows relays.
    pub(crate) fn host(&self, instance: InstanceId) -> Option<&str> {
        self.hosts.get(&instance).map(String::as_str)
    }

    /// A transfer to or from a peer begins.
    pub(crate) fn transfer(&mut self, peer: InstanceId, now_ms: u64) {
        let meter = self.meters.entry(peer).or_default();
        meter.transfers += 1;
        if meter.transfers == 1 {
            meter.since_ms = now_ms;
        }
    }

    /// A transfer of `bytes` has arrived.
    pub(crate) fn transferred(&mut self, peer: InstanceId, bytes: u64, now_ms: u64) {
        let Some(meter) = self.meters.get_mut(&peer).filter(|m| m.transfers > 0) else { return };
        meter.transfers -= 1;
        meter.bytes += bytes;
        if meter.transfers > 0 {
            return;
        }
        meter.elapsed_ms += now_ms - meter.since_ms;
        if meter.elapsed_ms >= METER_MS {
            let rate = meter.bytes * 1000 / meter.elapsed_ms;
            // The new sample counts a quarter: links change slowly.
            meter.bytes_per_s = if meter.bytes_per_s == 0 { rate } else { (3 * meter.bytes_per_s + rate) / 4 };
            (meter.bytes, meter.elapsed_ms) = (0, 0);
            let rate = meter.bytes_per_s;
            if let Some(known) = self.keys.get(&peer).and_then(|key| self.known.get_mut(key)) {
                known.bytes_per_s = rate;
            }
        }
    }

    /// All known peers, by connection.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Known> {
        self.known.values()
    }

    /// Keeps a message, one of at most [`PEER_PENDING_MAX`], for an instance that is being dialled. True if the dialling
    /// begins with it.
    pub(crate) fn send_when_known(&mut self, to: InstanceId, body: Option<ControlBody>, now_ms: u64) -> bool {
        let begins = !self.dialling.contains_key(&to);
        let entry = self.dialling.entry(to).or_insert(Dialling { since_ms: now_ms, messages: Vec::new() });
        if entry.messages.len() < PEER_PENDING_MAX {
            entry.messages.extend(body);
        }
        begins
    }

    /// Takes the messages kept for an instance: it is no longer being dialled.
    pub(crate) fn take_messages(&mut self, instance: InstanceId) -> Vec<ControlBody> {
        self.dialling.remove(&instance).map_or_else(Vec::new, |dialling| dialling.messages)
    }

    /// Ends dialling that has taken [`CONNECT_DEADLINE_MS`], and drops the messages. Returns the instances.
    pub(crate) fn expire_dialling(&mut self, now_ms: u64) -> Vec<InstanceId> {
        let late = |dialling: &Dialling| dialling.since_ms + CONNECT_DEADLINE_MS <= now_ms;
        self.dialling.extract_if(.., |_, dialling| late(dialling)).map(|(instance, _)| instance).collect()
    }

    /// A peer has got a Hello.
    pub(crate) fn note_greeted(&mut self, peer: PeerKey) {
        self.greeted.insert(peer);
    }

    /// A peer needs a Hello.
    pub(crate) fn note_ungreeted(&mut self, peer: PeerKey) {
        self.ungreeted.insert(peer);
    }

    /// Every peer that has got a Hello needs another one.
    pub(crate) fn note_all_ungreeted(&mut self) {
        self.ungreeted.extend(&self.greeted);
    }

    /// Takes the peers that need a Hello.
    pub(crate) fn take_ungreeted(&mut self) -> BTreeSet<PeerKey> {
        std::mem::take(&mut self.ungreeted)
    }

    /// Whether a peer needs no Hello.
    pub(crate) fn is_greeted(&self, peer: PeerKey) -> bool {
        !self.ungreeted.contains(&peer)
    }

    /// A connection is gone, and with it what was sent or is due as a Hello.
    pub(crate) fn forget_greetings(&mut self, peer: PeerKey) {
        self.ungreeted.remove(&peer);
        self.greeted.remove(&peer);
    }

    /// A peer is known as this instance, on a host of this name, if it names one.
    pub(crate) fn introduce(&mut self, instance: InstanceId, peer: PeerKey, host: String) {
        self.keys.insert(instance, peer);
        if !host.is_empty() {
            self.hosts.insert(instance, host);
        }
        self.known.insert(peer, Known { instance, rtt_us: 0, bytes_per_s: 0 });
    }

    /// A peer is no longer known. Returns its instance, if it was.
    pub(crate) fn forget(&mut self, peer: PeerKey) -> Option<InstanceId> {
        let known = self.known.remove(&peer)?;
        self.keys.remove(&known.instance);
        self.meters.remove(&known.instance);
        self.hosts.remove(&known.instance);
        Some(known.instance)
    }

    /// Records a known peer's round trip, in microseconds.
    pub(crate) fn note_rtt(&mut self, peer: PeerKey, rtt_us: u32) {
        if let Some(known) = self.known.get_mut(&peer) {
            known.rtt_us = rtt_us;
        }
    }
}
