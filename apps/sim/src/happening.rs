//! What a world plans in its agenda: [`Happening`].

use crate::place::Place;

/// A timed event of the world; `D` is the network's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening<D> {
    Net(D),
    Kv(Kv),
    Tick {
        place: Place,
        life: u64,
    },
    /// A device has done its piece of work, unless commands have changed it since.
    Device {
        place: Place,
        life: u64,
        piece: u64,
    },
    Resume {
        place: Place,
        life: u64,
    },
    /// Planned by the caller.
    Call(u64),
}

impl<D> From<D> for Happening<D> {
    fn from(due: D) -> Self {
        Self::Net(due)
    }
}

/// A timed event of transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kv {
    /// A process's loop receives its transports' events.
    Released { place: Place, life: u64 },
    /// The check of exported blocks is complete.
    Checked { place: Place, life: u64, part: u64 },
    /// A path reaches its writer.
    Opened { path: u64 },
    /// The deadline for opening a path.
    Late { path: u64 },
    /// A read reaches its writer.
    Asked { path: u64, read: u64 },
    /// The read's bytes leave.
    Served { path: u64, read: u64 },
    /// The bytes, or a refusal, reach the reader.
    Arrived { path: u64, read: u64 },
    /// An end has received nothing since a partition or a pause began.
    Silent { path: u64 },
    /// The reader learns that its path is lost.
    Down { path: u64 },
    /// The writer learns that the path is lost.
    Lost { path: u64 },
}
