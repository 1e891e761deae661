//! What happens to an instance and what it wants done: the two closed enums around [`crate::Instance::handle`].

use lagoon_protocol::{BulkFrame, ControlBody, PartialsFrame};
use lagoon_runner::{Command, Report};
use lagoon_types::{GenerateRequest, InstanceId, SeqId, TokenEvent};

/// A transport peer, numbered by the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey(pub u64);

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// A client's request. `seq` is new.
    Submit {
        seq: SeqId,
        request: GenerateRequest,
    },
    /// The client went away, or a stop string was found. Unknown sequences are ignored.
    Cancel {
        seq: SeqId,
    },
    /// The control connection to the gManager stands.
    GManagerUp,
    GManagerDown,
    GManager(ControlBody),
    /// All connections to a peer stand.
    PeerUp {
        peer: PeerKey,
    },
    PeerDown {
        peer: PeerKey,
    },
    Control {
        peer: PeerKey,
        body: ControlBody,
    },
    Partials {
        peer: PeerKey,
        frame: PartialsFrame,
    },
    Bulk {
        peer: PeerKey,
        frame: BulkFrame,
    },
    /// A frame could not be queued and was dropped: the peer does not keep up or is gone. The connection may stand.
    SendFailed {
        peer: PeerKey,
    },
    /// The measured round trip to a peer, for locality.
    Rtt {
        peer: PeerKey,
        rtt_us: u32,
    },
    Runner(Report),
    /// Time passed. At least every [`crate::TICK_MS`].
    Tick,
}

/// Something to do, in order.
#[derive(Debug)]
pub enum Effect {
    ToGManager(ControlBody),
    /// Dial a peer; its `PeerUp` and `Hello` follow, or nothing.
    Connect {
        instance: InstanceId,
        quic_addr: String,
    },
    Control {
        peer: PeerKey,
        body: ControlBody,
    },
    Partials {
        peer: PeerKey,
        frame: PartialsFrame,
    },
    Bulk {
        peer: PeerKey,
        frame: BulkFrame,
    },
    /// Close the peer's connections, after `reason` was sent.
    Close {
        peer: PeerKey,
        reason: String,
    },
    Runner(Command),
    Emit {
        seq: SeqId,
        event: TokenEvent,
    },
    /// A drain that shall stop this instance is done: nothing is left here, and nothing more is accepted.
    Drained,
    /// The gManager refused this instance: it cannot serve in this pool.
    Rejected {
        reason: String,
    },
}
