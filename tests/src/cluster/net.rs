//! The network of a pool under test: frames as bytes in ordered queues, sessions, delays, cuts.
//!
//! As in lagoon-transport, frames of one class between two peers arrive in order and without gaps within a session;
//! classes are not ordered among each other; a session ends as a whole. Every frame is encoded and decoded by
//! lagoon-wire.

use bytes::Bytes;
use lagoon_protocol::{Control, ControlBody};
use lagoon_types::limits::CONNECT_DEADLINE_MS;
use lagoon_wire::{Class, Frame, FrameReader};
use std::collections::{BTreeMap, VecDeque};

/// The gManager's address.
pub const GMANAGER: usize = usize::MAX;

/// Sender, receiver and stream: 0 to 2 are the classes, 3 is the session's own events.
pub(super) type Key = (usize, usize, usize);
pub(super) const SESSION: usize = 3;

#[derive(Debug)]
pub(super) enum Payload {
    Frame(Class, Vec<u8>),
    Up,
    Down,
    /// The sender closes the connection after all earlier frames.
    Close,
}

#[derive(Debug)]
pub(super) struct Item {
    pub(super) ready_ms: u64,
    pub(super) generation: u64,
    pub(super) payload: Payload,
}

/// A connection between two nodes.
#[derive(Clone, Copy, Debug, Default)]
struct Link {
    generation: u64,
    up: bool,
    blocked_until_ms: u64,
}

/// All connections and streams of a pool; see the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Network {
    links: BTreeMap<(usize, usize), Link>,
    pub(super) queues: BTreeMap<Key, VecDeque<Item>>,
    /// Frames and bytes sent, by kind.
    pub(super) sent: BTreeMap<&'static str, (u64, u64)>,
    /// Kind of the next frame that is corrupted in its last byte.
    pub(super) corrupt_next: Option<&'static str>,
    /// Pending connection attempts between cut nodes, repeated until this time.
    dials: Vec<(usize, usize, u64)>,
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

impl Network {
    fn link(&mut self, a: usize, b: usize) -> &mut Link {
        self.links.entry(pair(a, b)).or_default()
    }

    /// Generation of the connection, if it is up.
    pub(super) fn standing(&self, a: usize, b: usize) -> Option<u64> {
        self.links.get(&pair(a, b)).filter(|l| l.up).map(|l| l.generation)
    }

    fn put(&mut self, key: Key, ready_ms: u64, generation: u64, payload: Payload) {
        self.queues.entry(key).or_default().push_back(Item { ready_ms, generation, payload });
    }

    /// Connects two nodes unless connected or cut.
    pub(super) fn connect(&mut self, a: usize, b: usize, now_ms: u64) {
        let link = self.link(a, b);
        if link.up {
            return;
        }
        if link.blocked_until_ms > now_ms {
            self.dials.push((a, b, now_ms + CONNECT_DEADLINE_MS));
            return;
        }
        link.up = true;
        link.generation += 1;
        let generation = link.generation;
        for (from, to) in [(a, b), (b, a)] {
            self.put((from, to, SESSION), now_ms, generation, Payload::Up);
        }
    }

    /// Repeats pending connection attempts.
    pub(super) fn redial(&mut self, now_ms: u64) {
        for (a, b, until_ms) in std::mem::take(&mut self.dials) {
            if until_ms < now_ms || self.standing(a, b).is_some() {
                continue;
            }
            if self.link(a, b).blocked_until_ms > now_ms {
                self.dials.push((a, b, until_ms));
            } else {
                self.connect(a, b, now_ms);
            }
        }
    }

    /// Cuts the connection of two nodes: frames in flight are lost, and each node learns of it after its delay. No
    /// new connection for `blocked_ms`.
    pub(super) fn cut(&mut self, a: usize, b: usize, now_ms: u64, blocked_ms: u64, delays_ms: [u64; 2]) {
        let link = self.link(a, b);
        link.blocked_until_ms = link.blocked_until_ms.max(now_ms + blocked_ms);
        if !std::mem::take(&mut link.up) {
            return;
        }
        let generation = link.generation;
        for ((from, to), delay) in [(a, b), (b, a)].into_iter().zip(delays_ms) {
            Class::ALL.iter().for_each(|c| drop(self.queues.remove(&(from, to, c.index()))));
            self.put((from, to, SESSION), now_ms + delay, generation, Payload::Down);
        }
    }

    /// Removes a dead node; [`Network::cut`] informs its peers.
    pub(super) fn forget(&mut self, node: usize) {
        self.queues.retain(|(_, to, _), _| *to != node);
        self.dials.retain(|(a, b, _)| *a != node && *b != node);
    }

    /// Queues a frame. `generation` is the session in which the sender believes.
    pub(super) fn send(&mut self, from: usize, to: usize, frame: Frame, ready_ms: u64, generation: u64) {
        let class = frame.class();
        let kind = kind(&frame);
        let mut bytes = lagoon_wire::encode(&frame).unwrap_or_else(|e| panic!("{kind}: {e}")).to_vec();
        if self.corrupt_next.take_if(|wanted| *wanted == kind).is_some() {
            *bytes.last_mut().unwrap() ^= 1;
        }
        let sent = self.sent.entry(kind).or_default();
        *sent = (sent.0 + 1, sent.1 + bytes.len() as u64);
        self.put((from, to, class.index()), ready_ms, generation, Payload::Frame(class, bytes));
    }

    pub(super) fn send_close(&mut self, from: usize, to: usize, ready_ms: u64, generation: u64) {
        self.put((from, to, Class::Control.index()), ready_ms, generation, Payload::Close);
    }
}

/// The frame in `bytes`, through the codec's reader, in two chunks.
pub(super) fn decode(class: Class, bytes: Vec<u8>) -> Frame {
    let mut second = Bytes::from(bytes);
    let mut first = second.split_to(second.len() / 2);
    let mut reader = FrameReader::new();
    let frame = match reader.next_frame(class, &mut first).unwrap() {
        Some(frame) => frame,
        None => reader.next_frame(class, &mut second).unwrap().unwrap(),
    };
    assert!(reader.at_boundary() && second.is_empty());
    frame
}

pub(super) fn kind(frame: &Frame) -> &'static str {
    use lagoon_protocol::{BulkFrame as B, PartialsFrame as P};
    match frame {
        Frame::Control(Control { body: Some(ControlBody::LeaseRevoked(_)) }) => "lease revoked",
        Frame::Control(_) => "control",
        Frame::Partials(P::Ticket(_)) => "ticket",
        Frame::Partials(P::Query { .. }) => "query",
        Frame::Partials(P::Partial { .. }) => "partial",
        Frame::Partials(P::Refused { .. }) => "step refused",
        Frame::Partials(P::StepCancel { .. }) => "step cancel",
        Frame::Bulk(B::Write { .. }) => "write",
        Frame::Bulk(B::Seal { .. }) => "seal",
        Frame::Bulk(B::Read { .. }) => "read",
        Frame::Bulk(B::Data { .. }) => "data",
        Frame::Bulk(B::Refused { .. }) => "bulk refused",
    }
}
