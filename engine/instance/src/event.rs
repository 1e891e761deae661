//! What happens to an instance and what it wants done: the two closed enums around [`crate::Instance::handle`].

use lagoon_protocol::{BulkFrame, ControlBody, PartialsFrame, TransferArena};
use lagoon_runner::{Command, MapId, Report};
use lagoon_transfer::{Check, ConnId, Landed, Layout, Pull, PullId, Pulls, ReadFailure, Span, Transaction};
use lagoon_types::{GenerateRequest, InstanceId, SeqId, TokenEvent};
use std::sync::Arc;

/// A transport peer, numbered by the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey(pub u64);

/// What the transports of KV transfer did (KVDirect §4).
#[derive(Debug)]
pub enum TransferEvent {
    /// A message of this instance's writer to a reader.
    FromWriter { to: InstanceId, body: ControlBody },
    /// The answer to [`TransferEffect::Export`]: the export's number, or why there is none.
    Exported { job: SeqId, export: Result<u64, String> },
    /// Nobody reads an export any more. After its `Exported`.
    Freed { export: u64 },
    /// A read ended, on a path that was not down yet.
    Read { conn: ConnId, read: u64, result: Result<Landed, ReadFailure> },
    /// The last event of a path: nothing of it is written any more.
    Down { conn: ConnId },
    /// The answer to [`TransferEffect::Check`].
    Checked { pull: PullId, piece: usize, check: Result<Check, String> },
}

/// What the transports of KV transfer are to do. The writer is theirs: they serve reads of exports while the instance's
/// loop stands still.
#[derive(Debug)]
pub enum TransferEffect {
    /// A reader's message for this instance's writer.
    ToWriter { from: InstanceId, body: ControlBody },
    /// Compute the blocks' checks and export them to a reader, as this part of what a sequence computes for it.
    Export { job: SeqId, reader: InstanceId, request: u64, part: Span, blocks: Vec<u32> },
    /// End an export, if it stands.
    Revoke { export: u64 },
    /// A reader was declared dead.
    Fence { reader: InstanceId, incarnation: u64 },
    /// Open a path to a writer's memory; it replaces an earlier one of this connection, which is down.
    Open {
        conn: ConnId,
        /// This instance.
        reader: InstanceId,
        writer: InstanceId,
        /// `ip:port` where it serves reads over QUIC.
        addr: String,
        epoch: u64,
        layout: Arc<Layout>,
        arenas: Vec<TransferArena>,
    },
    /// Give a path up; [`TransferEvent::Down`] follows.
    Close { conn: ConnId },
    /// Ends in one [`TransferEvent::Read`], or with its path.
    Read { conn: ConnId, read: u64, transaction: Arc<Transaction>, pulls: Pulls },
    /// Compute `Pull::check_landed` over this instance's memory.
    Check { pull: PullId, piece: usize, of: Arc<Pull> },
}

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
    Transfer(TransferEvent),
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
    /// Get a creditor's memory and have the device map it ([`Command::Map`]). Ends in a [`Report::Mapped`].
    Map {
        map: MapId,
        blocks: u32,
        memory: TransferArena,
    },
    Transfer(TransferEffect),
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
