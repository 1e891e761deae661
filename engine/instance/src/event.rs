//! Events of an instance and effects for its shell: the two closed enums around [`crate::Instance::handle`].

use bytes::Bytes;
use lagoon_kv::{BlockHash, Tenants};
use lagoon_protocol::{BulkFrame, ControlBody, PartialsFrame, TransferArena};
use lagoon_runner::{Command, MapId, Report};
use lagoon_transfer::{Check, ConnId, Landed, Layout, Pull, PullId, Pulls, ReadFailure, Span, Transaction};
use lagoon_types::{GenerateRequest, InstanceId, SeqId, TokenEvent};
use std::sync::Arc;

/// A transport peer, numbered by the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey(pub u64);

/// Events of the KV transfer transports (KVDirect §4).
#[derive(Debug)]
pub enum TransferEvent {
    /// A message of this instance's writer to a reader.
    FromWriter { to: InstanceId, body: ControlBody },
    /// Reply to [`TransferEffect::Export`]: the export's number, or why there is none.
    Exported { job: SeqId, export: Result<u64, String> },
    /// An export is no longer read. Follows its `Exported`.
    Freed { export: u64 },
    /// A read on an open path ended.
    Read { conn: ConnId, read: u64, result: Result<Landed, ReadFailure> },
    /// Last event of a path: nothing writes through it any more.
    Down { conn: ConnId },
    /// The answer to [`TransferEffect::Check`].
    Checked { pull: PullId, piece: usize, check: Result<Check, String> },
}

/// Commands to the KV transfer transports. They own the writer: they serve reads of exports while the instance's loop
/// stands still.
#[derive(Debug)]
pub enum TransferEffect {
    /// Compute the blocks' checks and export them to a reader, as this part of the prompt that `job` computes for it.
    ToWriter { from: InstanceId, body: ControlBody },
    /// Compute the blocks' checks and export them to a reader, as this part of the prompt that `job` computes for it.
    Export { job: SeqId, reader: InstanceId, request: u64, part: Span, blocks: Vec<u32> },
    /// End an export, if it is live.
    Revoke { export: u64 },
    /// A reader was declared dead.
    Fence { reader: InstanceId, incarnation: u64 },
    /// Open a path to a writer's memory; replaces an earlier, closed one of this connection.
    Open {
        conn: ConnId,
        /// This instance's id.
        reader: InstanceId,
        writer: InstanceId,
        /// `ip:port` where it serves reads over QUIC.
        addr: String,
        epoch: u64,
        layout: Arc<Layout>,
        arenas: Vec<TransferArena>,
    },
    /// Close a path; [`TransferEvent::Down`] follows.
    Close { conn: ConnId },
    /// Read; ends in one [`TransferEvent::Read`], or with its path.
    Read { conn: ConnId, read: u64, transaction: Arc<Transaction>, pulls: Pulls },
    /// Compute `Pull::check_landed` over this instance's memory.
    Check { pull: PullId, piece: usize, of: Arc<Pull> },
}

/// KV of one rBlock: its layers in the canonical layout.
pub type BlockKv = Arc<[Bytes]>;

/// Commands to the disk tier of the prefix cache. Its shell owns files, threads and the order of eviction.
#[derive(Debug)]
pub enum DiskEffect {
    /// Write a block's KV. Ends in one [`DiskEvent::Written`].
    Write { hash: BlockHash, kv: BlockKv },
    /// Read a block's KV. Ends in one [`DiskEvent::Read`].
    Read { read: u64, hash: BlockHash },
    /// Remove these tenants' blocks, those of earlier writes too. Ends in one [`DiskEvent::Dropped`].
    Drop { tenants: Tenants },
}

/// Events of the disk tier of the prefix cache.
#[derive(Debug)]
pub enum DiskEvent {
    /// The blocks of earlier processes; before all other events.
    Found { hashes: Vec<BlockHash>, bytes: u64 },
    /// A write ended. `evicted`: blocks that made room for it. `bytes`: those of all blocks now, if they have changed.
    Written { hash: BlockHash, result: Result<(), DiskLoss>, evicted: Vec<BlockHash>, bytes: Option<u64> },
    /// A read ended: the layers' KV, checked.
    Read { read: u64, result: Result<BlockKv, DiskLoss> },
    /// What was to be removed is. `left`: all other blocks.
    Dropped { left: Vec<BlockHash>, bytes: u64 },
}

/// Why the disk tier does not have a block's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskLoss {
    /// Its file is gone, or was evicted.
    Missing,
    /// Its file is damaged, or of another layout. It is removed.
    Damaged,
    /// The file system failed, or the queue to it was full.
    Failed,
}

/// An input of [`crate::Instance::handle`].
#[derive(Debug)]
pub enum Event {
    /// A client's request. `seq` is new.
    Submit {
        seq: SeqId,
        request: Box<GenerateRequest>,
    },
    /// The client went away, or a stop string was found. Unknown sequences are ignored.
    Cancel {
        seq: SeqId,
    },
    /// The control connection to the gManager is up.
    GManagerUp,
    GManagerDown,
    GManager(ControlBody),
    /// All connections to a peer are up.
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
    /// A frame to a peer was dropped: the peer is too slow or unreachable. The connection may still be up.
    SendFailed {
        peer: PeerKey,
    },
    /// The measured round trip to a peer, in microseconds.
    Rtt {
        peer: PeerKey,
        rtt_us: u32,
    },
    Runner(Report),
    Transfer(TransferEvent),
    Disk(DiskEvent),
    /// Time passed. At least every [`crate::TICK_MS`].
    Tick,
}

/// An output of [`crate::Instance::handle`]; carried out in order.
#[derive(Debug)]
pub enum Effect {
    ToGManager(ControlBody),
    /// Dial a peer; its `PeerUp` and `Hello` follow, or nothing.
    Connect {
        instance: InstanceId,
        quic_addr: String,
        /// The instance's number is proven by its address: that is the gManager's word, and not a peer's.
        is_advised: bool,
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
    /// Import a creditor's memory and have the device map it ([`Command::Map`]). Ends in a [`Report::Mapped`].
    Map {
        map: MapId,
        blocks: u32,
        memory: TransferArena,
    },
    Transfer(TransferEffect),
    Disk(DiskEffect),
    Emit {
        seq: SeqId,
        event: TokenEvent,
    },
    /// A drain with `stop` is done: nothing is left here, and nothing more is accepted.
    Drained,
    /// The gManager refused this instance: it cannot serve in this pool.
    Rejected {
        reason: String,
    },
}
