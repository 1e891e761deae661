//! The network of a pool under test: the simulator's [`Fabric`], with counts of frames by kind, damage, and a stranger.

use super::stranger::{STRANGER, Stranger};
use lagoon_protocol::{Control, ControlBody};
use lagoon_sim::agenda::Agenda;
use lagoon_sim::happening::Happening;
use lagoon_sim::{Delivery, Fabric, GMANAGER, Network, Place, fabric};
use lagoon_wire::Frame;
use std::collections::BTreeMap;

type Events = Agenda<Happening<fabric::Net>>;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Net {
    pub(super) fabric: Fabric,
    /// Frames and bytes sent, by kind.
    pub(super) sent: BTreeMap<&'static str, (u64, u64)>,
    /// Kind of the next frame that is corrupted in its last byte.
    pub(super) corrupt_next: Option<&'static str>,
    pub(super) stranger: Stranger,
}

impl Net {
    pub(super) fn new(fabric: Fabric) -> Self {
        Self { fabric, sent: BTreeMap::new(), corrupt_next: None, stranger: Stranger::default() }
    }
}

impl AsMut<Fabric> for Net {
    fn as_mut(&mut self) -> &mut Fabric {
        &mut self.fabric
    }
}

impl Network for Net {
    type Due = fabric::Net;
    type Bill = ();

    fn start(&mut self, place: Place) {
        self.fabric.start(place);
    }

    fn resume(&mut self, place: Place, agenda: &mut Events) {
        self.fabric.resume(place, agenda);
    }

    fn connect(&mut self, from: Place, to: Place, agenda: &mut Events) {
        self.fabric.connect(from, to, agenda);
    }

    fn release(&mut self, at: Place, peer: Place, agenda: &mut Events) {
        self.fabric.release(at, peer, agenda);
    }

    fn send(&mut self, from: Place, to: Place, mut frame: Frame, _: &(), agenda: &mut Events) {
        if to as u64 == STRANGER.0 {
            return self.stranger.receive(from - 1, frame);
        }
        if !self.fabric.is_up(from, to) {
            return;
        }
        if from == GMANAGER {
            self.stranger.recommend(&mut frame);
        }
        let kind = kind(&frame);
        let mut bytes = lagoon_wire::encode(&frame).unwrap_or_else(|e| panic!("{kind}: {e}")).to_vec();
        if self.corrupt_next.take_if(|wanted| *wanted == kind).is_some() {
            *bytes.last_mut().unwrap() ^= 1;
        }
        let sent = self.sent.entry(kind).or_default();
        *sent = (sent.0 + 1, sent.1 + bytes.len() as u64);
        self.fabric.put(from, to, frame.class(), bytes.into(), agenda);
    }

    fn happen(
        &mut self,
        due: fabric::Net,
        agenda: &mut Events,
        accepts: impl Fn(Place, usize) -> bool,
        deliveries: &mut Vec<Delivery>,
    ) {
        self.fabric.happen(due, agenda, accepts, deliveries);
    }

    /// None: these links have no speed of their own.
    fn round_trips(&self, _: Place) -> Vec<(Place, u32)> {
        Vec::new()
    }

    fn arrival_us(&self, from: Place, to: Place, bytes: usize, now_us: u64) -> u64 {
        self.fabric.arrival_us(from, to, bytes, now_us)
    }

    fn is_silent(&self, a: Place, b: Place, now_us: u64) -> bool {
        self.fabric.is_silent(a, b, now_us)
    }
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
        Frame::Partials(P::RelayedQuery { .. }) => "relayed query",
        Frame::Partials(P::RelayedPartial { .. }) => "relayed partial",
        Frame::Bulk(B::Write { .. }) => "write",
        Frame::Bulk(B::Seal { .. }) => "seal",
        Frame::Bulk(B::Read { .. }) => "read",
        Frame::Bulk(B::Data { .. }) => "data",
        Frame::Bulk(B::Refused { .. }) => "bulk refused",
    }
}
