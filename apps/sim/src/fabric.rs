//! The network ([`Fabric`]): sessions between processes, with latency, bandwidth, loss of connections, partitions and
//! silence.
//!
//! It keeps the promises of WIRE.md and no others: within a session, frames of one class arrive in order and without
//! gaps; classes are not ordered among each other; a session ends as a whole, and each side learns of it separately;
//! a peer that is silent for [`SILENCE_US`] is lost; wanted connections are redialled. Packets are not simulated.

use crate::agenda::Agenda;
use crate::happening::Happening;
use crate::network::{Delivery, Network};
use crate::place::{GMANAGER, Place};
use crate::rng::Rng;
use bytes::Bytes;
use lagoon_types::limits::CONNECT_DEADLINE_MS;
use lagoon_wire::{Class, Frame, FrameReader};
use std::collections::{BTreeMap, VecDeque};

/// Silence after which a peer is lost (WIRE.md, Sessions).
pub const SILENCE_US: u64 = 2_500_000;
/// First delay before a lost connection is redialled; doubled by each failure.
const REDIAL_US: u64 = 20_000;
const REDIAL_MAX_US: u64 = 1_000_000;
/// Time in which the ends learn that their session was cut, beside round trips.
const NOTICE_US: u64 = 20_000;

/// Sender, receiver, class.
pub type StreamKey = (Place, Place, usize);

/// A timed event of the fabric, passed to [`Fabric::happen`] when due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Net {
    /// The head of a stream may be deliverable.
    Pump(StreamKey),
    /// `at` learns that its session with `peer` is established.
    Up {
        at: Place,
        peer: Place,
        generation: u64,
    },
    /// `at` learns that its session with `peer` has ended.
    Down {
        at: Place,
        peer: Place,
        generation: u64,
    },
    /// `at` has received nothing from `peer` since the partition or the pause began.
    Silent {
        at: Place,
        peer: Place,
        generation: u64,
    },
    Dial {
        from: Place,
        to: Place,
    },
}

/// Properties of a link without faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkProfile {
    pub latency_us: u64,
    /// Random extra latency per frame, at most.
    pub jitter_us: u64,
    /// Bandwidth; 0 is unlimited.
    pub bytes_per_us: u64,
}

#[derive(Debug, Default)]
struct Stream {
    items: VecDeque<(u64, u64, Bytes)>,
    /// A [`Net::Pump`] is planned.
    armed: bool,
    /// Time when the last frame's last byte leaves the sender.
    sent_us: u64,
    ready_us: u64,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    profile: LinkProfile,
    /// Number of the last session.
    generation: u64,
    /// The session's connections are up: sent frames arrive.
    standing: bool,
    /// Session that each end believes in, the lower place first.
    view: [Option<u64>; 2],
    wanted: [bool; 2],
    dialling: [bool; 2],
    failures: u32,
    /// No redials after this time, except by the gManager's links.
    dial_until_us: u64,
    /// Interval in which no frame passes.
    blocked_us: (u64, u64),
    /// No session is established before.
    closed_until_us: u64,
    /// Extra latency of frames, and until when.
    slow_us: u64,
    slow_until_us: u64,
}

/// All links between processes.
#[derive(Debug)]
pub struct Fabric {
    profile: LinkProfile,
    notice_us: u64,
    links: BTreeMap<(Place, Place), Link>,
    streams: BTreeMap<StreamKey, Stream>,
    /// Stopped processes, with begin and end of the stop.
    paused: BTreeMap<Place, (u64, u64)>,
    /// Running processes, stopped or not.
    live: Vec<bool>,
    rng: Rng,
    /// Frames and bytes sent, by class.
    traffic: [(u64, u64); 3],
}

fn pair(a: Place, b: Place) -> (Place, Place) {
    (a.min(b), a.max(b))
}

fn end(at: Place, peer: Place) -> usize {
    usize::from(at > peer)
}

impl Fabric {
    /// A network of links that the profile describes.
    #[must_use]
    pub fn new(profile: LinkProfile, rng: Rng) -> Self {
        let (links, streams, paused) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (live, traffic, notice_us) = (Vec::new(), [(0, 0); 3], NOTICE_US);
        Self { profile, notice_us, links, streams, paused, live, rng, traffic }
    }

    /// Both ends learn of a cut within this time, beside round trips.
    #[must_use]
    pub fn with_notice(self, notice_us: u64) -> Self {
        Self { notice_us, ..self }
    }

    fn link(&mut self, a: Place, b: Place) -> &mut Link {
        let profile = self.profile;
        self.links.entry(pair(a, b)).or_insert(Link {
            profile,
            generation: 0,
            standing: false,
            view: [None; 2],
            wanted: [false; 2],
            dialling: [false; 2],
            failures: 0,
            dial_until_us: 0,
            blocked_us: (0, 0),
            closed_until_us: 0,
            slow_us: 0,
            slow_until_us: 0,
        })
    }

    /// Ends a process: its sessions end, and its peers learn of it.
    pub fn stop(&mut self, place: Place, agenda: &mut Agenda<Happening<Net>>) {
        if let Some(live) = self.live.get_mut(place) {
            *live = false;
        }
        self.paused.remove(&place);
        for peer in self.peers_of(place) {
            self.cut(place, peer, agenda);
            let link = self.link(place, peer);
            link.view[end(place, peer)] = None;
            link.wanted[end(place, peer)] = false;
            for class in Class::ALL {
                self.streams.remove(&(place, peer, class.index()));
            }
        }
    }

    fn peers_of(&self, place: Place) -> Vec<Place> {
        let other = |&(a, b): &(Place, Place)| if a == place { Some(b) } else { (b == place).then_some(a) };
        self.links.keys().filter_map(other).collect()
    }

    /// Peers with which a process believes to have a session.
    #[must_use]
    pub fn sessions(&self, at: Place) -> Vec<Place> {
        let up = |peer: &Place| self.links[&pair(at, *peer)].view[end(at, *peer)].is_some();
        self.peers_of(at).into_iter().filter(up).collect()
    }

    /// Whether both ends believe in the same session and it is up.
    #[must_use]
    pub fn connected(&self, a: Place, b: Place) -> bool {
        self.links.get(&pair(a, b)).is_some_and(|l| l.standing && l.view == [Some(l.generation); 2])
    }

    /// Whether a frame sent now has a session.
    #[must_use]
    pub fn is_up(&self, at: Place, peer: Place) -> bool {
        let up = |link: &Link| link.standing && link.view[end(at, peer)] == Some(link.generation);
        self.links.get(&pair(at, peer)).is_some_and(up)
    }

    /// Frames of a class sent, and their bytes.
    #[must_use]
    pub fn traffic(&self, class: Class) -> (u64, u64) {
        self.traffic[class.index()]
    }

    /// Frames in flight, in all streams.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.streams.values().map(|s| s.items.len()).sum()
    }

    fn dial_after(&mut self, us: u64, from: Place, to: Place, agenda: &mut Agenda<Happening<Net>>) {
        let link = self.link(from, to);
        if !link.standing && !std::mem::replace(&mut link.dialling[end(from, to)], true) {
            agenda.after(us, Net::Dial { from, to });
        }
    }

    /// Cuts the connection of two processes: some frames in flight still arrive, and each side learns of the loss
    /// separately.
    pub fn cut(&mut self, a: Place, b: Place, agenda: &mut Agenda<Happening<Net>>) {
        let notice_us = self.notice_us;
        let link = self.link(a, b);
        if !std::mem::take(&mut link.standing) {
            return;
        }
        let (generation, spread) = (link.generation, 4 * link.profile.latency_us + notice_us);
        for (at, peer) in [(a, b), (b, a)] {
            for class in Class::ALL {
                if let Some(stream) = self.streams.get_mut(&(at, peer, class.index())) {
                    let kept = self.rng.index(stream.items.len() + 1);
                    stream.items.truncate(kept);
                }
            }
            let after = self.rng.below(spread.max(1));
            agenda.after(after, Net::Down { at, peer, generation });
        }
    }

    /// As [`Self::cut`]; no new session for a while.
    pub fn cut_for(&mut self, a: Place, b: Place, us: u64, agenda: &mut Agenda<Happening<Net>>) {
        let link = self.link(a, b);
        link.closed_until_us = link.closed_until_us.max(agenda.now_us() + us);
        self.cut(a, b, agenda);
    }

    /// Blocks all frames between two processes for a while, without notice. They arrive afterwards.
    pub fn stall(&mut self, a: Place, b: Place, us: u64, now_us: u64) {
        let link = self.link(a, b);
        let from = if link.blocked_us.1 > now_us { link.blocked_us.0 } else { now_us };
        link.blocked_us = (from, link.blocked_us.1.max(now_us + us));
    }

    /// Blocks all frames between two processes for a while. They arrive afterwards, unless a side has timed out by
    /// then.
    pub fn partition(&mut self, a: Place, b: Place, us: u64, agenda: &mut Agenda<Happening<Net>>) {
        self.stall(a, b, us, agenda.now_us());
        let generation = self.link(a, b).generation;
        for (at, peer) in [(a, b), (b, a)] {
            let after = SILENCE_US + self.rng.below(500_000);
            agenda.after(after, Net::Silent { at, peer, generation });
        }
    }

    /// Delays frames between two processes by `us` for a while: heartbeats and replies get stale.
    pub fn slow(&mut self, a: Place, b: Place, us: u64, for_us: u64, now_us: u64) {
        let link = self.link(a, b);
        (link.slow_us, link.slow_until_us) = (us, now_us + for_us);
    }

    /// Stops a process (as by SIGSTOP) until then; the caller holds back its other events.
    pub fn pause(&mut self, place: Place, until_us: u64, agenda: &mut Agenda<Happening<Net>>) {
        self.hold(place, until_us, agenda.now_us());
        for peer in self.peers_of(place) {
            let generation = self.link(place, peer).generation;
            let after = SILENCE_US + self.rng.below(500_000);
            agenda.after(after, Net::Silent { at: peer, peer: place, generation });
        }
    }

    /// As [`Self::pause`], and peers do not notice.
    pub fn hold(&mut self, place: Place, until_us: u64, now_us: u64) {
        let from = self.paused.get(&place).map_or(now_us, |p| p.0);
        self.paused.insert(place, (from, until_us));
    }

    fn paused_until(&self, place: Place) -> Option<u64> {
        self.paused.get(&place).map(|p| p.1)
    }

    fn pause_of(&self, place: Place) -> Option<(u64, u64)> {
        self.paused.get(&place).copied()
    }

    /// Sends an encoded frame in the session in which the sender believes; it is lost if there is none.
    pub fn put(&mut self, from: Place, to: Place, class: Class, frame: Bytes, agenda: &mut Agenda<Happening<Net>>) {
        let now = agenda.now_us();
        let jitter = self.link(from, to).profile.jitter_us;
        let jitter = if jitter == 0 { 0 } else { self.rng.below(jitter + 1) };
        let link = self.link(from, to);
        let Some(generation) = link.view[end(from, to)] else { return };
        if generation != link.generation || !link.standing {
            return; // The other side has given this session up: the frame is lost.
        }
        let LinkProfile { latency_us, bytes_per_us, .. } = link.profile;
        let slow = if now < link.slow_until_us { link.slow_us } else { 0 };
        let key = (from, to, class.index());
        let (items, armed, sent_us, ready_us) = (VecDeque::new(), false, 0, 0);
        let stream = self.streams.entry(key).or_insert(Stream { items, armed, sent_us, ready_us });
        let on_wire = (frame.len() as u64).checked_div(bytes_per_us).unwrap_or(0);
        stream.sent_us = stream.sent_us.max(now) + on_wire;
        stream.ready_us = stream.ready_us.max(stream.sent_us + latency_us + jitter + slow);
        stream.items.push_back((stream.ready_us, generation, frame));
        if !std::mem::replace(&mut stream.armed, true) {
            agenda.at(stream.ready_us, Net::Pump(key));
        }
    }

    /// Ends `at`'s session with `peer` if that has been silent for too long.
    fn silent(
        &mut self,
        at: Place,
        peer: Place,
        generation: u64,
        agenda: &mut Agenda<Happening<Net>>,
        reported: &mut Vec<Delivery>,
    ) {
        let now = agenda.now_us();
        let silent = |&(from, until): &(u64, u64)| until > now && now >= from + SILENCE_US;
        let link = *self.link(at, peer);
        let outage = [Some(link.blocked_us), self.paused.get(&peer).copied()];
        let Some((_, until)) = outage.into_iter().flatten().find(silent) else { return };
        if link.generation != generation || link.view[end(at, peer)] != Some(generation) {
            return;
        }
        self.link(at, peer).standing = false;
        self.down(at, peer, generation, agenda, reported);
        // The other side learns of it separately, at the latest when it receives a frame again.
        let after = self.rng.below(1_000_000);
        agenda.at(until + after, Net::Down { at: peer, peer: at, generation });
    }

    fn pump(
        &mut self,
        key: StreamKey,
        agenda: &mut Agenda<Happening<Net>>,
        accepts: impl Fn(Place, usize) -> bool,
        reported: &mut Vec<Delivery>,
    ) {
        let (from, to, class) = key;
        let now = agenda.now_us();
        let link = *self.link(from, to);
        let resumes = self.paused_until(to);
        let Some(stream) = self.streams.get_mut(&key) else { return };
        stream.armed = false;
        let view = link.view[end(to, from)];
        // Drops frames of sessions that the receiver has given up or will never learn of.
        let gone = |g: u64| view.map_or(g < link.generation || !link.standing, |v| g < v);
        while stream.items.front().is_some_and(|(_, g, _)| gone(*g)) {
            stream.items.pop_front();
        }
        let Some(&(ready_us, generation, _)) = stream.items.front() else { return };
        if view.is_none_or(|v| v < generation) {
            return; // The receiver learns of the session first: `up` pumps again.
        }
        let wait_until = [Some(ready_us), Some(link.blocked_us.1), resumes];
        let wait_until = wait_until.into_iter().flatten().max().unwrap_or(0);
        if wait_until > now {
            stream.armed = true;
            agenda.at(wait_until, Net::Pump(key));
            return;
        }
        if !accepts(to, class) {
            stream.armed = true;
            agenda.after(500, Net::Pump(key));
            return;
        }
        if let Some((_, _, frame)) = stream.items.pop_front() {
            reported.push(Delivery::Frame { at: to, peer: from, frame: decode(Class::ALL[class], frame) });
        }
        if let Some((ready_us, _, _)) = stream.items.front() {
            stream.armed = true;
            agenda.at(*ready_us, Net::Pump(key));
        }
    }

    fn is_live(&self, place: Place) -> bool {
        self.live.get(place).copied().unwrap_or(false)
    }

    fn dial(&mut self, from: Place, to: Place, agenda: &mut Agenda<Happening<Net>>, reported: &mut Vec<Delivery>) {
        let now = agenda.now_us();
        let reachable = self.is_live(to) && self.paused_until(to).is_none();
        let (live, paused) = (self.is_live(from), self.paused_until(from));
        let spread = self.rng.within(50..=100);
        let link = self.link(from, to);
        link.dialling[end(from, to)] = false;
        if link.standing || !link.wanted[end(from, to)] || !live {
            return;
        }
        if !reachable || paused.is_some() || link.blocked_us.1.max(link.closed_until_us) > now {
            link.failures += 1;
            let failures = link.failures;
            if from != GMANAGER && to != GMANAGER && now >= link.dial_until_us {
                link.wanted[end(from, to)] = false;
                return;
            }
            let pause = (REDIAL_US << failures.min(16)).min(REDIAL_MAX_US) * spread / 100;
            self.dial_after(pause, from, to, agenda);
            if failures == 1 {
                reported.push(Delivery::Unreachable { at: from, peer: to });
            }
            return;
        }
        link.standing = true;
        link.failures = 0;
        link.generation += 1;
        let (generation, latency) = (link.generation, link.profile.latency_us);
        agenda.after(2 * latency, Net::Up { at: from, peer: to, generation });
        agenda.after(3 * latency, Net::Up { at: to, peer: from, generation });
    }

    fn up(
        &mut self,
        at: Place,
        peer: Place,
        generation: u64,
        agenda: &mut Agenda<Happening<Net>>,
        reported: &mut Vec<Delivery>,
    ) {
        if let Some(until) = self.paused_until(at) {
            agenda.at(until + 1, Net::Up { at, peer, generation });
            return;
        }
        let live = self.is_live(at);
        let link = self.link(at, peer);
        let view = &mut link.view[end(at, peer)];
        if !live || view.is_some_and(|v| v >= generation) {
            return;
        }
        if view.replace(generation).is_some() {
            reported.push(Delivery::Down { at, peer });
        }
        reported.push(Delivery::Up { at, peer });
        for class in Class::ALL {
            let key = (peer, at, class.index());
            if let Some(stream) = self.streams.get_mut(&key)
                && !stream.items.is_empty()
                && !std::mem::replace(&mut stream.armed, true)
            {
                agenda.after(0, Net::Pump(key));
            }
        }
    }

    fn down(
        &mut self,
        at: Place,
        peer: Place,
        generation: u64,
        agenda: &mut Agenda<Happening<Net>>,
        reported: &mut Vec<Delivery>,
    ) {
        if let Some(until) = self.paused_until(at) {
            agenda.at(until + 1, Net::Down { at, peer, generation });
            return;
        }
        let (live, spread) = (self.is_live(at), self.rng.within(50..=100));
        let now = agenda.now_us();
        let link = self.link(at, peer);
        if link.view[end(at, peer)] != Some(generation) || !live {
            return;
        }
        link.view[end(at, peer)] = None;
        reported.push(Delivery::Down { at, peer });
        if link.wanted[end(at, peer)] {
            link.dial_until_us = now + CONNECT_DEADLINE_MS * 1000;
            self.dial_after(REDIAL_US * spread / 100, at, peer, agenda);
        }
        // The other side's frames of this session have no receiver any more.
        for class in Class::ALL {
            if let Some(stream) = self.streams.get_mut(&(peer, at, class.index())) {
                stream.items.retain(|(_, g, _)| *g > generation);
            }
        }
    }
}

impl AsMut<Self> for Fabric {
    fn as_mut(&mut self) -> &mut Self {
        self
    }
}

impl Network for Fabric {
    type Due = Net;
    type Bill = ();

    /// New links on the old wires.
    fn start(&mut self, place: Place) {
        if self.live.len() <= place {
            self.live.resize(place + 1, false);
        }
        self.live[place] = true;
    }

    /// The process soon learns of sessions that others have given up.
    fn resume(&mut self, place: Place, agenda: &mut Agenda<Happening<Net>>) {
        self.paused.remove(&place);
        for peer in self.peers_of(place) {
            let link = *self.link(place, peer);
            if link.view[end(peer, place)] != link.view[end(place, peer)]
                && let Some(generation) = link.view[end(place, peer)]
            {
                let after = self.rng.below(30_000);
                agenda.after(after, Net::Down { at: place, peer, generation });
            }
        }
    }

    /// The connection is redialled when lost.
    fn connect(&mut self, from: Place, to: Place, agenda: &mut Agenda<Happening<Net>>) {
        let until = agenda.now_us() + CONNECT_DEADLINE_MS * 1000;
        let link = self.link(from, to);
        link.wanted[end(from, to)] = true;
        link.dial_until_us = until;
        self.dial_after(0, from, to, agenda);
    }

    fn release(&mut self, at: Place, peer: Place, agenda: &mut Agenda<Happening<Net>>) {
        self.link(at, peer).wanted[end(at, peer)] = false;
        let latency = self.link(at, peer).profile.latency_us;
        // Earlier frames are delivered first: the close follows them.
        let generation = self.link(at, peer).generation;
        agenda.after(latency * 2, Net::Down { at, peer, generation });
        agenda.after(latency * 2 + 1, Net::Down { at: peer, peer: at, generation });
        self.link(at, peer).standing = false;
    }

    /// Sends the frame as bytes.
    fn send(&mut self, from: Place, to: Place, frame: Frame, _: &(), agenda: &mut Agenda<Happening<Net>>) {
        let class = frame.class();
        let encoded = lagoon_wire::encode(&frame).unwrap_or_else(|e| panic!("{frame:?} cannot be sent: {e}"));
        let bytes = Bytes::from(encoded.to_vec());
        let sent = &mut self.traffic[class.index()];
        *sent = (sent.0 + 1, sent.1 + bytes.len() as u64);
        self.put(from, to, class, bytes, agenda);
    }

    fn happen(
        &mut self,
        due: Net,
        agenda: &mut Agenda<Happening<Net>>,
        accepts: impl Fn(Place, usize) -> bool,
        deliveries: &mut Vec<Delivery>,
    ) {
        match due {
            Net::Pump(key) => self.pump(key, agenda, accepts, deliveries),
            Net::Dial { from, to } => self.dial(from, to, agenda, deliveries),
            Net::Up { at, peer, generation } => self.up(at, peer, generation, agenda, deliveries),
            Net::Down { at, peer, generation } => self.down(at, peer, generation, agenda, deliveries),
            Net::Silent { at, peer, generation } => self.silent(at, peer, generation, agenda, deliveries),
        }
    }

    fn round_trips(&self, place: Place) -> Vec<(Place, u32)> {
        let rtt_us = |peer: Place| {
            let link = self.links.get(&pair(place, peer));
            u32::try_from(2 * link.map_or(self.profile.latency_us, |l| l.profile.latency_us)).unwrap_or(u32::MAX)
        };
        let peers = self.sessions(place).into_iter().filter(|peer| *peer != GMANAGER);
        peers.map(|peer| (peer, rtt_us(peer))).collect()
    }

    fn arrival_us(&self, from: Place, to: Place, bytes: usize, now_us: u64) -> u64 {
        let link = self.links.get(&pair(from, to));
        let LinkProfile { latency_us, bytes_per_us, .. } = link.map_or(self.profile, |l| l.profile);
        let slow_us = link.filter(|l| now_us < l.slow_until_us).map_or(0, |l| l.slow_us);
        let on_wire = (bytes as u64).checked_div(bytes_per_us).unwrap_or(0);
        (now_us + on_wire + latency_us + slow_us).max(link.map_or(0, |l| l.blocked_us.1))
    }

    fn is_silent(&self, a: Place, b: Place, now_us: u64) -> bool {
        let outages = [self.links.get(&pair(a, b)).map(|l| l.blocked_us), self.pause_of(a), self.pause_of(b)];
        outages.into_iter().flatten().any(|(from, until)| until > now_us && now_us >= from + SILENCE_US)
    }
}

/// The frame in `bytes`, as a receiver reads it that gets them in two chunks.
///
/// # Panics
/// If they are no whole frame.
#[must_use]
pub fn decode(class: Class, bytes: Bytes) -> Frame {
    let mut second = bytes;
    let mut first = second.split_to(second.len() / 2);
    let mut reader = FrameReader::new();
    let frame = reader.next_frame(class, &mut first).expect("what was encoded decodes");
    let frame = frame.or_else(|| reader.next_frame(class, &mut second).expect("what was encoded decodes"));
    assert!(reader.at_boundary() && second.is_empty(), "frames travel whole");
    frame.expect("frames travel whole")
}
