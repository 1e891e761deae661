//! Reader: the decode worker's side of KV transfer (KVDirect §4.2).
//!
//! There is one connection per writer. A pull is offered by the writer, started by the owner (with all its memory), read
//! piece by piece within credits, checked block by block, done; then its COMPLETE is sent. Invariants:
//!
//! * bytes in flight are bounded, per connection and in total;
//! * a pull is reported done only after every block's check matched, and its COMPLETE is sent only after that;
//! * the memory of a failed pull is released only when no read into it is in progress;
//! * COMPLETEs of a connection are sent one at a time, in order, repeated until acknowledged, and survive a lost path;
//! * every pull ends, at its deadline at the latest.
//!
//! The owner must report [`Reader::on_path_down`] after every [`ReaderOutput::Close`] and write no byte of that path
//! afterwards; answer every [`ReaderOutput::Read`] once, or report its path down; and answer every
//! [`ReaderOutput::Check`] once.

mod conn;
mod flow;

use crate::{
    check::Check,
    coalesce::Transaction,
    layout::Layout,
    plan::Conversion,
    pull::{Pull, PullError},
};
use conn::Conn;
use lagoon_protocol::{ControlBody, RefuseCode, TransferArena, TransferConnected};
use lagoon_types::{InstanceId, limits};
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

/// Connection to a writer; unique in this reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// Pull; unique in this reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PullId(pub u64);

/// Ranges planned at once: some 10 us.
const PLANNED: usize = 128;

/// Configuration of a reader.
#[derive(Clone, Debug)]
pub struct ReaderConfig {
    /// Random per process.
    pub incarnation: u64,
    /// Bytes in flight on one connection (the writer's credit bounds them too).
    pub conn_bytes: u64,
    /// Bytes in flight on all connections.
    pub bytes: u64,
    /// Bytes of one read transaction.
    pub read_bytes: u64,
    /// Bytes of one read transaction of a single piece, which is checked while it is copied.
    pub piece_bytes: u64,
    /// Ranges planned at once: reads of these start before further ones are planned.
    pub planned: usize,
    /// Pulls and unacknowledged COMPLETEs of one connection.
    pub conn_requests_max: usize,
    /// Deadline of a read, in ms; a later one closes the path.
    pub read_ms: u64,
    /// Deadline of a pull, in ms; a later one fails.
    pub request_ms: u64,
    /// Time after which an unanswered message is sent again.
    pub repeat_ms: u64,
    pub renew_ms: u64,
    /// Rereads of damaged blocks before a pull fails.
    pub damage_retries: u32,
    /// Whether blocks are checked. Without it only the transport's integrity protects them.
    pub verify: bool,
    /// Values may be rounded to the reader's element type.
    pub loss_allowed: bool,
    /// Merge reads that are contiguous on both sides.
    pub coalesce: bool,
    /// Host identity: see `TransferConnect::host`.
    pub host: String,
}

impl Default for ReaderConfig {
    fn default() -> Self {
        Self {
            incarnation: 0,
            conn_bytes: limits::TRANSFER_CONN_BYTES,
            bytes: limits::TRANSFER_BYTES,
            read_bytes: limits::TRANSFER_READ_BYTES,
            piece_bytes: limits::TRANSFER_PIECE_BYTES,
            planned: PLANNED,
            conn_requests_max: limits::TRANSFER_CONN_REQUESTS_MAX,
            read_ms: limits::TRANSFER_READ_MS,
            request_ms: limits::TRANSFER_REQUEST_MS,
            repeat_ms: limits::CONTROL_REPEAT_MS,
            renew_ms: limits::LEASE_RENEW_MS,
            damage_retries: limits::TRANSFER_DAMAGE_RETRIES,
            verify: true,
            loss_allowed: false,
            coalesce: true,
            host: String::new(),
        }
    }
}

/// Offer: an export of a writer to this reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    pub conn: ConnId,
    pub writer: InstanceId,
    pub export: u64,
    /// Request of the KV, by the number that both sides use.
    pub request: u64,
    pub first_token: u32,
    pub tokens: u32,
    /// Exported model layers, within those that both sides have.
    pub layers: Range<u32>,
}

/// Reason of a failed pull.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("it was cancelled")]
    Cancelled,
    #[error("it took longer than {0} ms")]
    Deadline(u64),
    /// The writer's process has ended, and its KV is lost.
    #[error("the writer was lost: {0}")]
    WriterLost(String),
    #[error("the writer does not keep the KV any more")]
    ExportLost,
    #[error("the writer refused a read: {0:?}")]
    Refused(RefuseCode),
    #[error("rBlock {block} arrived damaged: its check is {got}, the writer's {expected}")]
    Damaged { block: usize, got: Check, expected: Check },
    #[error("{0} values cannot be held in the reader's element type")]
    Overflow(u64),
    #[error("writing to the reader's memory: {0}")]
    Memory(String),
}

/// Reason of a failed read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// The writer refused it.
    Refused(RefuseCode),
    /// The reader's memory could not be written.
    Memory(String),
}

/// Error of a pull that was not started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PullRefused {
    #[error("that export is unknown, lost, or pulled already")]
    UnknownExport,
    #[error("a limit of the connection is reached")]
    Busy,
    #[error(transparent)]
    Pull(#[from] PullError),
}

/// Output of a reader, for its owner to execute.
#[derive(Clone, Debug, PartialEq)]
pub enum ReaderOutput {
    Send {
        to: InstanceId,
        body: ControlBody,
    },
    /// Open a path to the writer's memory, over the arenas or the address. Reads of this epoch use it.
    Open {
        conn: ConnId,
        writer: InstanceId,
        epoch: u64,
        layout: Arc<Layout>,
        arenas: Vec<TransferArena>,
        /// Address for reads, as `TransferConnected::addr`.
        addr: String,
    },
    /// Close the path, then report [`Reader::on_path_down`].
    Close {
        conn: ConnId,
    },
    Read {
        conn: ConnId,
        read: u64,
        epoch: u64,
        transaction: Arc<Transaction>,
        deadline_ms: u64,
    },
    /// Compute `Pull::check_landed`, then report [`Reader::on_checked`].
    Check {
        pull: PullId,
        piece: usize,
    },
    /// A new offer: pull it when there is memory for all of it, or decline it.
    Offered(Offer),
    /// An offer that was not pulled is no longer valid.
    Withdrawn {
        conn: ConnId,
        export: u64,
    },
    /// The pull is complete and verified: the owner may use the KV.
    Done {
        pull: PullId,
    },
    /// The pull failed, and its memory is no longer written.
    Failed {
        pull: PullId,
        why: Failure,
    },
    /// The writer's KV cannot be read; the reason names two values. The connection is dropped.
    Refused {
        conn: ConnId,
        writer: InstanceId,
        reason: String,
    },
}

/// Counters of a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReaderStats {
    pub pulls_done: u64,
    pub pulls_failed: u64,
    /// Reads before coalescing, and transactions after it; their quotient is the coalescing ratio.
    pub reads: u64,
    pub transactions: u64,
    pub bytes: u64,
    pub damaged_blocks: u64,
    pub paths_lost: u64,
}

/// State of a pull in progress.
#[derive(Debug)]
struct Pulling {
    conn: ConnId,
    export: u64,
    pull: Arc<Pull>,
    expected: Vec<Check>,
    /// Partly arrived pieces, with their arrived bytes.
    partly: BTreeMap<usize, u64>,
    /// Computed checks of pieces.
    checks: Vec<Option<Check>>,
    /// Number of unchecked pieces of each block.
    unchecked: Vec<usize>,
    blocks_left: usize,
    /// Reads in flight, and checks that the owner computes.
    reads: usize,
    checking: usize,
    retries: u32,
    deadline_ms: u64,
    failed: Option<Failure>,
}

/// Reader of KV transfers: connections, offers, pulls and COMPLETEs.
#[derive(Debug)]
pub struct Reader {
    config: ReaderConfig,
    layout: Arc<Layout>,
    conns: BTreeMap<ConnId, Conn>,
    pulls: BTreeMap<PullId, Pulling>,
    /// Bytes in flight on all connections.
    bytes: u64,
    next: u64,
    /// First connection of the next round.
    turn: ConnId,
    now_ms: u64,
    stats: ReaderStats,
    out: VecDeque<ReaderOutput>,
}

impl Reader {
    /// A reader with memory of this layout.
    #[must_use]
    pub fn new(layout: Layout, config: ReaderConfig) -> Self {
        Self {
            config,
            layout: Arc::new(layout),
            conns: BTreeMap::new(),
            pulls: BTreeMap::new(),
            bytes: 0,
            next: 0,
            turn: ConnId(0),
            now_ms: 0,
            stats: ReaderStats::default(),
            out: VecDeque::new(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Its counts.
    #[must_use]
    pub fn stats(&self) -> ReaderStats {
        self.stats
    }

    /// Bytes in flight: requested and not arrived.
    #[must_use]
    pub fn bytes_in_flight(&self) -> u64 {
        self.bytes
    }

    /// Number of pulls in progress.
    #[must_use]
    pub fn pulling(&self) -> usize {
        self.pulls.len()
    }

    /// Number of unacknowledged COMPLETEs.
    #[must_use]
    pub fn completing(&self) -> usize {
        self.conns.values().map(|conn| conn.outbox.len()).sum()
    }

    /// Whether the COMPLETE of an export is unacknowledged.
    #[must_use]
    pub fn is_completing(&self, export: u64) -> bool {
        self.conns.values().any(|conn| conn.outbox.iter().any(|completion| completion.export == export))
    }

    /// The [`Pull`] of a pull in progress, for the executor of its reads.
    #[must_use]
    pub fn pull_of(&self, pull: PullId) -> Option<&Arc<Pull>> {
        self.pulls.get(&pull).map(|pulling| &pulling.pull)
    }

    /// Conversion from the writer's layout to the reader's, once connected.
    #[must_use]
    pub fn conversion(&self, conn: ConnId) -> Option<&Arc<Conversion>> {
        Some(&self.conns.get(&conn)?.peer.as_ref()?.conversion)
    }

    /// Takes the next output.
    pub fn poll(&mut self) -> Option<ReaderOutput> {
        self.out.pop_front()
    }

    /// Connects to a writer and stays connected until [`Reader::disconnect`] or a refusal. `None` if there are
    /// `TRANSFER_CONNS_MAX` connections, or the previous one to this writer is not closed yet.
    pub fn connect(&mut self, writer: InstanceId, now_ms: u64) -> Option<ConnId> {
        self.now_ms = now_ms;
        if let Some((id, conn)) = self.conns.iter().find(|(_, conn)| conn.writer == writer) {
            return (!conn.leaving).then_some(*id);
        }
        if self.conns.len() >= limits::TRANSFER_CONNS_MAX {
            return None;
        }
        let id = ConnId(self.number());
        self.conns.insert(id, Conn::new(writer));
        self.send_connect(id);
        Some(id)
    }

    /// Disconnects from a writer: the connection's pulls fail, its COMPLETEs are not repeated (the writer's leases expire).
    pub fn disconnect(&mut self, conn: ConnId, now_ms: u64) {
        self.now_ms = now_ms;
        self.lose_writer(conn, "the connection was closed");
        self.conns.get_mut(&conn).into_iter().for_each(|c| c.leaving = true);
        self.forget_if_idle(conn);
    }

    /// Starts to pull an offered export into the blocks `local`, from token `local_first` of the first one on. The reader
    /// owns the blocks until the pull is done or failed.
    ///
    /// # Errors
    /// If the export is unknown, the memory too small (a pull allocates all or nothing), or a limit is reached.
    pub fn pull(
        &mut self,
        conn: ConnId,
        export: u64,
        local: Vec<u32>,
        local_first: u32,
        now_ms: u64,
    ) -> Result<PullId, PullRefused> {
        self.pull_from(conn, export, 0, local, local_first, now_ms)
    }

    /// The writer's checks of each rBlock of an offered export, in order, over the layers of the offer.
    #[must_use]
    pub fn offered_checks(&self, conn: ConnId, export: u64) -> &[Check] {
        self.conns.get(&conn).and_then(|conn| conn.offers.get(&export)).map_or(&[], |offered| &offered.checks)
    }

    /// As [`Reader::pull`], but only the export's rBlocks from index `first` on. Its COMPLETE ends the whole export.
    ///
    /// # Errors
    /// As [`Reader::pull`].
    pub fn pull_from(
        &mut self,
        conn: ConnId,
        export: u64,
        first: u32,
        local: Vec<u32>,
        local_first: u32,
        now_ms: u64,
    ) -> Result<PullId, PullRefused> {
        self.now_ms = now_ms;
        let (reader, max) = (Arc::clone(&self.layout), self.config.conn_requests_max);
        let entry = self.conns.get_mut(&conn).ok_or(PullRefused::UnknownExport)?;
        if entry.pulls.len() + entry.outbox.len() >= max {
            return Err(PullRefused::Busy);
        }
        let peer = entry.peer.as_ref().ok_or(PullRefused::UnknownExport)?;
        let offered = entry.offers.get(&export).ok_or(PullRefused::UnknownExport)?;
        let layouts = (reader, Arc::clone(&peer.layout));
        let blocks: Vec<u32> = offered.blocks.iter().skip(first as usize).copied().collect();
        let before = first.saturating_mul(peer.layout.block_tokens());
        let tokens = offered.offer.tokens.saturating_sub(before);
        let mut conversion = Arc::clone(&peer.conversion);
        if conversion.view.layers != offered.offer.layers {
            Arc::make_mut(&mut conversion).view.layers = offered.offer.layers.clone();
        }
        let pull = Pull::new(layouts, conversion, tokens, blocks, local, local_first)?;
        let Some(mut offered) = entry.offers.remove(&export) else { return Err(PullRefused::UnknownExport) };
        let pull = Arc::new(pull);
        let layers = pull.pieces() / pull.blocks();
        let id = PullId(self.number());
        let pulling = Pulling {
            conn,
            export,
            expected: offered.checks.split_off(first as usize),
            partly: BTreeMap::new(),
            checks: vec![None; pull.pieces()],
            unchecked: vec![layers; pull.blocks()],
            blocks_left: pull.blocks(),
            reads: 0,
            checking: 0,
            retries: 0,
            deadline_ms: now_ms.saturating_add(self.config.request_ms),
            failed: None,
            pull,
        };
        self.pulls.insert(id, pulling);
        self.conns.get_mut(&conn).into_iter().for_each(|c| {
            c.pulls.insert(export, (id, offered.alive_until_ms));
            c.fresh.push((id, None));
        });
        Ok(id)
    }

    /// Declines an offered export.
    pub fn decline(&mut self, conn: ConnId, export: u64, now_ms: u64) {
        self.now_ms = now_ms;
        let offered = self.conns.get_mut(&conn).and_then(|c| c.offers.remove(&export));
        if offered.is_some() {
            self.complete(conn, export, lagoon_protocol::TransferOutcome::Abandoned);
        }
    }

    /// Cancels a pull. [`ReaderOutput::Failed`] follows when no read into its memory is in progress.
    pub fn cancel(&mut self, pull: PullId, now_ms: u64) {
        self.now_ms = now_ms;
        self.fail(pull, Failure::Cancelled);
    }

    /// Handles a message of a writer; ignores other messages.
    pub fn on_control(&mut self, from: InstanceId, body: &ControlBody, now_ms: u64) {
        self.now_ms = now_ms;
        match body {
            ControlBody::TransferConnected(m) => self.on_connected(from, m),
            ControlBody::TransferRefused(m) => self.on_refused(from, m.conn, m.attempt, &m.reason),
            ControlBody::TransferExport(m) => self.on_export(from, m),
            ControlBody::TransferRenewed(m) => self.on_renewed(from, m),
            ControlBody::TransferCompleted(m) => self.on_completed(from, m),
            _ => {}
        }
    }

    fn on_connected(&mut self, from: InstanceId, m: &TransferConnected) {
        if let Err(reason) = self.accept_connected(from, m) {
            let id = ConnId(m.conn);
            self.refuse(id, reason);
        }
    }

    /// Handles deadlines, repeats and renewals, and starts reads. Call it after other calls as well.
    pub fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        let late: Vec<PullId> = self
            .pulls
            .iter()
            .filter(|(_, p)| p.failed.is_none() && p.deadline_ms <= now_ms)
            .map(|(id, _)| *id)
            .collect();
        let request_ms = self.config.request_ms;
        late.into_iter().for_each(|id| self.fail(id, Failure::Deadline(request_ms)));
        let ids: Vec<ConnId> = self.conns.keys().copied().collect();
        for id in ids {
            self.tick_conn(id);
        }
        self.pump();
    }
}
