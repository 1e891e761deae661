//! A peer of a pool under test without a process: the test sends its frames and reads those sent to it.

use super::World;
use bytes::Bytes;
use lagoon_instance::{Event, PeerKey};
use lagoon_protocol::{Candidate, Control, ControlBody, Hello, Role, VERSION_MAX, VERSION_MIN, Worker};
use lagoon_sim::shared;
use lagoon_types::InstanceId;
use lagoon_wire::Frame;
use std::collections::VecDeque;

/// The stranger, as every node numbers its peers.
pub const STRANGER: PeerKey = PeerKey(1 << 40);
/// The number that it says it has.
pub const STRANGER_ID: InstanceId = InstanceId(900);
/// Frames that it remembers.
const RECEIVED_MAX: usize = 256;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Stranger {
    /// The gManager names it as a creditor and as a prefill worker.
    recommended: bool,
    received: VecDeque<(usize, Frame)>,
}

impl Stranger {
    pub(super) fn receive(&mut self, from: usize, frame: Frame) {
        if self.received.len() < RECEIVED_MAX {
            self.received.push_back((from, frame));
        }
    }

    /// Names it in what the gManager says, if it is to be named.
    pub(super) fn recommend(&self, frame: &mut Frame) {
        let Frame::Control(Control { body: Some(body) }) = frame else { return };
        let (instance, quic_addr) = (STRANGER_ID.0, "10.9.9.9:9".to_owned());
        match body {
            ControlBody::BorrowAdvice(advice) if self.recommended => {
                advice.candidates.insert(0, Candidate { instance, quic_addr, blocks_lendable: 40, host: 0 });
            }
            ControlBody::Workers(workers) if self.recommended => {
                let role = Role::Prefill as i32;
                workers.workers.insert(0, Worker { instance, quic_addr, role, blocks_total: 40 });
            }
            _ => {}
        }
    }
}

impl World {
    /// The stranger connects to every node and says Hello.
    pub fn let_stranger_in(&mut self, recommended: bool) {
        self.sim.fabric.stranger.recommended = recommended;
        for node in self.nodes() {
            let shape = self.shape(node);
            self.handle(node, Event::PeerUp { peer: STRANGER });
            self.hostile(
                node,
                ControlBody::Hello(Box::new(Hello {
                    version_min: VERSION_MIN,
                    version_max: VERSION_MAX,
                    instance: STRANGER_ID.0,
                    incarnation: 900,
                    shape: Some(shape),
                    ..Hello::default()
                })),
            );
        }
    }

    /// Its connections break, and nobody names it any more.
    pub fn cut_stranger(&mut self) {
        self.sim.fabric.stranger = Stranger::default();
        for node in self.nodes() {
            self.handle(node, Event::PeerDown { peer: STRANGER });
        }
    }

    /// It sends a frame, if the codec has it; returns whether it did.
    pub fn hostile(&mut self, node: usize, frame: impl Into<Frame>) -> bool {
        let frame = frame.into();
        let Ok(bytes) = lagoon_wire::encode(&frame) else { return false };
        let decoded = lagoon_sim::decode(frame.class(), Bytes::from(bytes.to_vec()));
        let event = shared::event(Some(STRANGER), decoded);
        let sent = event.is_some();
        event.into_iter().for_each(|event| self.handle(node, event));
        sent
    }

    /// What a node sent to it, oldest first.
    pub fn received(&mut self) -> Option<(usize, Frame)> {
        self.sim.fabric.stranger.received.pop_front()
    }
}
