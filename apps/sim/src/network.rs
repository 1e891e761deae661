//! [`Network`]: carries frames between the processes of a pool, in simulated time.
//!
//! [`crate::Fabric`] has sessions and faults (the simulator, the system tests); the papers' network has ports and
//! costs. A network plans its own timed events, [`Network::Due`], in the pool's agenda, and turns them into
//! deliveries when they are due.

use crate::agenda::Agenda;
use crate::happening::Happening;
use crate::place::Place;
use lagoon_wire::Frame;

/// A delivery to a process.
#[derive(Debug)]
pub enum Delivery {
    Up { at: Place, peer: Place },
    Down { at: Place, peer: Place },
    Unreachable { at: Place, peer: Place },
    Frame { at: Place, peer: Place, frame: Frame },
}

/// The network of a pool; see the module's documentation.
pub trait Network: Sized {
    /// Its timed events.
    type Due;
    /// What a device says of a report, for a network that charges modelled bytes for the frames which follow from it.
    type Bill: Default;

    /// A process starts at a place.
    fn start(&mut self, place: Place);

    /// A stopped process resumes.
    fn resume(&mut self, place: Place, agenda: &mut Agenda<Happening<Self::Due>>);

    /// A process wants a connection.
    fn connect(&mut self, from: Place, to: Place, agenda: &mut Agenda<Happening<Self::Due>>);

    /// A process gives up its connection to `peer`.
    fn release(&mut self, at: Place, peer: Place, agenda: &mut Agenda<Happening<Self::Due>>);

    /// Sends a frame; it is lost if the sender has no session.
    fn send(
        &mut self,
        from: Place,
        to: Place,
        frame: Frame,
        bill: &Self::Bill,
        agenda: &mut Agenda<Happening<Self::Due>>,
    );

    /// Handles a due event. `accepts`: whether a process takes a frame of a class now.
    fn happen(
        &mut self,
        due: Self::Due,
        agenda: &mut Agenda<Happening<Self::Due>>,
        accepts: impl Fn(Place, usize) -> bool,
        deliveries: &mut Vec<Delivery>,
    );

    /// Round-trip times in microseconds that a process measures now, by peer.
    fn round_trips(&self, place: Place) -> Vec<(Place, u32)>;

    /// Arrival time of bytes that leave now over a connection separate from the session's.
    fn arrival_us(&self, from: Place, to: Place, bytes: usize, now_us: u64) -> u64;

    /// Whether two processes have been silent to each other for longer than a session lasts.
    fn is_silent(&self, a: Place, b: Place, now_us: u64) -> bool;
}
