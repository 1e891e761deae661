//! The decode worker's side: the transaction queue (KVDirect §4.2).
//!
//! For every writer there is one connection. A pull goes through: offered by the writer, pulled by the owner (with all
//! the memory it needs), read piece by piece within credits, checked block by block, done; then its COMPLETE goes out.
//! Invariants:
//!
//! * bytes that were asked for and have not arrived are bounded, per connection and in all;
//! * a pull is told to be done only after every block's check matched, and its COMPLETE is sent only after that;
//! * the memory of a pull that fails is given back only when no read into it is in progress;
//! * COMPLETEs of a connection are sent one at a time, in order, repeated until acknowledged, and survive a lost path;
//! * every pull ends, at its deadline at the latest.
//!
//! The owner promises: after [`Reader::on_path_down`] nothing of that path is written any more, and every output
//! [`ReaderOutput::Close`] is followed by it; every [`ReaderOutput::Read`] is answered once, or its path goes down;
//! every [`ReaderOutput::Check`] is answered once.

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

/// A connection to a writer; unique in this reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// A pull; unique in this reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PullId(pub u64);

/// Ranges that are planned at once: some 10 us.
const PLANNED: usize = 128;

/// How a reader behaves.
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
    /// The same where it is one piece that is checked while it lands.
    pub piece_bytes: u64,
    /// Ranges that are planned at once: the first bytes move, and other calls are answered, before the next are.
    pub planned: usize,
    /// Pulls and unacknowledged COMPLETEs of one connection.
    pub conn_requests_max: usize,
    /// A read that takes longer costs its path.
    pub read_ms: u64,
    /// A pull that takes longer fails.
    pub request_ms: u64,
    /// Messages that were not answered are sent again.
    pub repeat_ms: u64,
    pub renew_ms: u64,
    /// Times that a damaged block is read again.
    pub damage_retries: u32,
    /// Whether blocks are checked. Without it only the transport's integrity protects them.
    pub verify: bool,
    /// Values may be rounded to the reader's element type.
    pub loss_allowed: bool,
    /// Merge reads that are contiguous on both sides.
    pub coalesce: bool,
    /// See `TransferConnect::host`.
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

/// KV that a writer holds for this reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    pub conn: ConnId,
    pub writer: InstanceId,
    pub export: u64,
    /// The request, as both know it.
    pub request: u64,
    pub first_token: u32,
    pub tokens: u32,
    /// Layers of the model: some of those that both have, or all.
    pub layers: Range<u32>,
}

/// Why a pull failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("it was cancelled")]
    Cancelled,
    #[error("it took longer than {0} ms")]
    Deadline(u64),
    /// The writer's process is gone, and the KV with it.
    #[error("the writer is gone: {0}")]
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

/// Why a read brought nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// By the writer.
    Refused(RefuseCode),
    /// The reader's memory could not be written.
    Memory(String),
}

/// A pull was not started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PullRefused {
    #[error("that export is unknown, lost, or pulled already")]
    UnknownExport,
    #[error("a limit of the connection is reached")]
    Busy,
    #[error(transparent)]
    Pull(#[from] PullError),
}

/// What the owner is to do.
#[derive(Clone, Debug, PartialEq)]
pub enum ReaderOutput {
    Send {
        to: InstanceId,
        body: ControlBody,
    },
    /// Open a path to the writer's memory, over what it offers. Reads of this epoch go there.
    Open {
        conn: ConnId,
        writer: InstanceId,
        epoch: u64,
        layout: Arc<Layout>,
        arenas: Vec<TransferArena>,
        /// As `TransferConnected::addr`.
        addr: String,
    },
    /// Give the path up, then report [`Reader::on_path_down`].
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
    /// Pull it when there is memory for all of it, or decline it.
    Offered(Offer),
    /// An offer that was not pulled is gone.
    Withdrawn {
        conn: ConnId,
        export: u64,
    },
    /// All of it arrived and was verified: the owner may compute on it.
    Done {
        pull: PullId,
    },
    /// Nothing is written to its memory any more.
    Failed {
        pull: PullId,
        why: Failure,
    },
    /// The writer's KV cannot be read: the reason names two values. The connection is forgotten.
    Refused {
        conn: ConnId,
        writer: InstanceId,
        reason: String,
    },
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReaderStats {
    pub pulls_done: u64,
    pub pulls_failed: u64,
    /// Reads before merging, and transactions after: their quotient is the coalescing ratio.
    pub reads: u64,
    pub transactions: u64,
    pub bytes: u64,
    pub damaged_blocks: u64,
    pub paths_lost: u64,
}

/// A pull in the works.
#[derive(Debug)]
struct Pulling {
    conn: ConnId,
    export: u64,
    pull: Arc<Pull>,
    expected: Vec<Check>,
    /// Pieces that arrived in part, with the bytes that did.
    partly: BTreeMap<usize, u64>,
    /// The checks of pieces that were computed.
    checks: Vec<Option<Check>>,
    /// Pieces of each block that are not checked.
    unchecked: Vec<usize>,
    blocks_left: usize,
    /// Reads in flight, and checks that the owner computes.
    reads: usize,
    checking: usize,
    retries: u32,
    deadline_ms: u64,
    failed: Option<Failure>,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Reader {
    config: ReaderConfig,
    layout: Arc<Layout>,
    conns: BTreeMap<ConnId, Conn>,
    pulls: BTreeMap<PullId, Pulling>,
    /// Bytes in flight on all connections.
    bytes: u64,
    next: u64,
    /// Where the next round over the connections starts.
    turn: ConnId,
    now_ms: u64,
    stats: ReaderStats,
    out: VecDeque<ReaderOutput>,
}

impl Reader {
    /// A reader whose memory is laid out as `layout`.
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

    #[must_use]
    pub fn stats(&self) -> ReaderStats {
        self.stats
    }

    /// Bytes that were asked for and have not arrived.
    #[must_use]
    pub fn bytes_in_flight(&self) -> u64 {
        self.bytes
    }

    /// Pulls that have not ended.
    #[must_use]
    pub fn pulling(&self) -> usize {
        self.pulls.len()
    }

    /// COMPLETEs that are not acknowledged.
    #[must_use]
    pub fn completing(&self) -> usize {
        self.conns.values().map(|conn| conn.outbox.len()).sum()
    }

    /// Whether the COMPLETE of an export is not acknowledged.
    #[must_use]
    pub fn is_completing(&self, export: u64) -> bool {
        self.conns.values().any(|conn| conn.outbox.iter().any(|completion| completion.export == export))
    }

    /// What a pull reads, for whoever carries its reads out.
    #[must_use]
    pub fn pull_of(&self, pull: PullId) -> Option<&Arc<Pull>> {
        self.pulls.get(&pull).map(|pulling| &pulling.pull)
    }

    /// The writer's layout compared with ours, once connected.
    #[must_use]
    pub fn conversion(&self, conn: ConnId) -> Option<&Arc<Conversion>> {
        Some(&self.conns.get(&conn)?.peer.as_ref()?.conversion)
    }

    /// What is to be done next.
    pub fn poll(&mut self) -> Option<ReaderOutput> {
        self.out.pop_front()
    }

    /// Connects to a writer and stays connected until [`Reader::disconnect`] or a refusal. `None` when there are too
    /// many connections, or the last one to this writer is not closed yet.
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

    /// Forgets a connection: its pulls fail, its COMPLETEs are not repeated (the writer's leases end by themselves).
    pub fn disconnect(&mut self, conn: ConnId, now_ms: u64) {
        self.now_ms = now_ms;
        self.lose_writer(conn, "the connection was given up");
        self.conns.get_mut(&conn).into_iter().for_each(|c| c.leaving = true);
        self.forget_if_idle(conn);
    }

    /// Starts to pull an offered export into the blocks `local`, from token `local_first` of the first one on. They
    /// are this reader's until the pull is done or failed.
    ///
    /// # Errors
    /// When the export is unknown, the memory too small (a pull allocates all or nothing), or a limit is reached.
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

    /// What the writer said of each rBlock of an export that waits to be pulled, in order: the content's check in the layers
    /// of the offer.
    #[must_use]
    pub fn offered_checks(&self, conn: ConnId, export: u64) -> &[Check] {
        self.conns.get(&conn).and_then(|conn| conn.offers.get(&export)).map_or(&[], |offered| &offered.checks)
    }

    /// As [`Reader::pull`], but only the writer's rBlocks of the export from number `first` on. The COMPLETE at its end is
    /// that of the whole export.
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

    /// The owner does not want an offered export.
    pub fn decline(&mut self, conn: ConnId, export: u64, now_ms: u64) {
        self.now_ms = now_ms;
        let offered = self.conns.get_mut(&conn).and_then(|c| c.offers.remove(&export));
        if offered.is_some() {
            self.complete(conn, export, lagoon_protocol::TransferOutcome::Abandoned);
        }
    }

    /// Ends a pull. [`ReaderOutput::Failed`] follows when no read into its memory is in progress.
    pub fn cancel(&mut self, pull: PullId, now_ms: u64) {
        self.now_ms = now_ms;
        self.fail(pull, Failure::Cancelled);
    }

    /// Takes a message of a writer. Others are ignored.
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

    /// Time passes: deadlines, repeats and renewals. Also starts what may be started; call it after other calls, too.
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
