//! Writer: the prefill worker's side of KV transfer: exports under leases, admission of reads, and COMPLETE.
//!
//! The scheduler gives finished rBlocks to [`Writer::export`] and gets them back by [`WriterOutput::Freed`]. The transport
//! admits reads by [`Writer::admit`], without the scheduler. Invariants:
//!
//! * a read is admitted only from the reader of the export, with its current epoch, and only of bytes of live exports;
//! * an export is freed exactly once, and only when no read of it is being served;
//! * COMPLETEs are executed in order, each once; repeated ones are acknowledged again;
//! * an export ends without renewal, with its reader, and after `export_ms_max`;
//! * a reader that does not receive its reads loses its path at a deadline, and its bytes in flight are bounded.

use crate::{
    check::Check,
    coalesce::Segment,
    extent::pairs,
    layout::{Dim, Index, Layout},
    mutants::{self, Mutant},
    plan::{Conversion, Span, View, plan},
};
use lagoon_protocol::{
    ControlBody, RefuseCode, TransferArena, TransferBlocks, TransferComplete, TransferCompleted, TransferConnect,
    TransferConnected, TransferExport, TransferOutcome, TransferRefused, TransferRenew, TransferRenewed,
};
use lagoon_types::{InstanceId, limits};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    ops::Range,
    sync::Arc,
};

/// Admitted read that is being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantId(pub u64);

/// Secret from which a writer derives its epochs. Random per process and never sent, if not all readers are trusted.
#[derive(Clone, Copy, Default)]
pub struct EpochSecret(pub [u8; 32]);

impl fmt::Debug for EpochSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EpochSecret").finish_non_exhaustive()
    }
}

/// Configuration of a writer.
#[derive(Clone, Debug)]
pub struct WriterConfig {
    /// Random per process; numbers of exports start from it, so that those of another process are unknown.
    pub incarnation: u64,
    /// Readers cannot guess each other's epochs without it.
    pub secret: EpochSecret,
    /// Bytes in flight of one reader.
    pub credit_bytes: u64,
    /// Lifetime of an export without renewal.
    pub ttl_ms: u64,
    /// Lifetime of an export, however often it is renewed.
    pub export_ms_max: u64,
    /// Exports of one reader.
    pub exports_max: usize,
    /// Deadline of a read, in ms; a slower reader loses its path.
    pub read_ms: u64,
    /// Time after which an unanswered message is sent again.
    pub repeat_ms: u64,
    /// Host identity, as `TransferConnect::host`: readers on the same host receive the arenas.
    pub host: String,
    /// Memory that a reader on the same host may map. Its tokens are sent over mutual TLS only.
    pub arenas: Vec<TransferArena>,
    /// Address for reads, as `TransferConnected::addr`.
    pub addr: String,
}

impl Default for WriterConfig {
    fn default() -> Self {
        Self {
            incarnation: 0,
            secret: EpochSecret::default(),
            credit_bytes: limits::TRANSFER_CONN_BYTES,
            ttl_ms: limits::LEASE_TTL_MS,
            export_ms_max: limits::EXPORT_MS_MAX,
            exports_max: limits::TRANSFER_EXPORTS_MAX,
            read_ms: 2 * limits::TRANSFER_READ_MS,
            repeat_ms: limits::CONTROL_REPEAT_MS,
            host: String::new(),
            arenas: Vec::new(),
            addr: String::new(),
        }
    }
}

/// Reason of a freed export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeReason {
    /// The reader has received and verified it.
    Completed,
    /// The reader does not need it.
    Abandoned,
    /// The lease was not renewed, or exceeded `export_ms_max`.
    Expired,
    /// The owner revoked it.
    Revoked,
    /// The reader's process has ended or was fenced.
    ReaderLost,
}

/// Output of a writer, for its owner to execute.
#[derive(Clone, Debug, PartialEq)]
pub enum WriterOutput {
    Send {
        to: InstanceId,
        body: ControlBody,
    },
    /// An export is freed; its blocks return to the owner.
    Freed {
        export: u64,
        request: u64,
        blocks: Vec<u32>,
        why: FreeReason,
    },
    /// Close all paths of a reader of this epoch, and end their grants: the reader is too slow or was lost. Epochs are in no order.
    Cut {
        reader: InstanceId,
        epoch: u64,
    },
    /// A reader has connected and may get exports.
    Connected {
        reader: InstanceId,
        epoch: u64,
    },
}

/// Error of an export that was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    #[error("{0} is not connected")]
    NotConnected(InstanceId),
    #[error("{reader} has {max} exports already")]
    Busy { reader: InstanceId, max: usize },
    #[error("{tokens} tokens need {needed} rBlocks and as many checks, {blocks} and {checks} are given")]
    Blocks { tokens: u32, needed: u64, blocks: usize, checks: usize },
    #[error("rBlock {block} does not exist: there are {blocks}")]
    Block { block: u32, blocks: u32 },
    #[error("layers {layers:?} are not all among those that both have, {shared:?}")]
    Layers { layers: Range<u32>, shared: Range<u32> },
    #[error("{0} rBlocks are more than one export may have; hint: export ranges of tokens one by one")]
    TooLarge(usize),
}

/// Counters of a writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriterStats {
    pub exports: u64,
    pub completed: u64,
    pub expired: u64,
    pub reads: u64,
    pub reads_refused: u64,
    pub bytes: u64,
    pub slow_readers_cut: u64,
}

#[derive(Debug)]
struct ReaderState {
    incarnation: u64,
    conn: u64,
    attempt: u64,
    epoch: u64,
    conversion: Conversion,
    /// The last executed COMPLETE.
    completed: u64,
    /// Bytes of its grants.
    bytes: u64,
    exports: usize,
}

#[derive(Debug)]
struct Export {
    to: InstanceId,
    request: u64,
    span: Span,
    blocks: Vec<u32>,
    checks: Vec<Check>,
    /// Readable byte ranges, by region: disjoint, ascending, maximal.
    ranges: Vec<(u32, Range<u64>)>,
    made_ms: u64,
    renewed_ms: u64,
    /// Whether the reader acknowledged it, and when it was sent last.
    acknowledged: bool,
    sent_ms: u64,
    reads: usize,
    ended: Option<FreeReason>,
}

#[derive(Debug)]
struct Grant {
    reader: InstanceId,
    epoch: u64,
    exports: Vec<u64>,
    bytes: u64,
    since_ms: u64,
    /// Whether a [`WriterOutput::Cut`] of its path was issued.
    cut: bool,
}

/// Writer of KV transfers: readers, exports and grants.
#[derive(Debug)]
pub struct Writer {
    config: WriterConfig,
    layout: Arc<Layout>,
    readers: BTreeMap<InstanceId, ReaderState>,
    /// Fenced incarnations, at most `FENCED_MAX`.
    fenced: VecDeque<(InstanceId, u64)>,
    exports: BTreeMap<u64, Export>,
    grants: BTreeMap<GrantId, Grant>,
    next: u64,
    now_ms: u64,
    stats: WriterStats,
    out: VecDeque<WriterOutput>,
}

/// Fences that are remembered.
const FENCED_MAX: usize = 1024;

impl Writer {
    /// A writer with memory of this layout.
    #[must_use]
    pub fn new(layout: Layout, config: WriterConfig) -> Self {
        Self {
            next: config.incarnation,
            config,
            layout: Arc::new(layout),
            readers: BTreeMap::new(),
            fenced: VecDeque::new(),
            exports: BTreeMap::new(),
            grants: BTreeMap::new(),
            now_ms: 0,
            stats: WriterStats::default(),
            out: VecDeque::new(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next = self.next.wrapping_add(1);
        self.next
    }

    /// The next epoch, which no reader can compute from others without the secret.
    fn draw_epoch(&mut self) -> u64 {
        let number = self.number();
        let mut hasher = blake3::Hasher::new_keyed(&self.config.secret.0);
        hasher.update(&self.config.incarnation.to_le_bytes()).update(&number.to_le_bytes());
        let mut epoch = [0; 8];
        hasher.finalize_xof().fill(&mut epoch);
        u64::from_le_bytes(epoch)
    }

    /// Its counts.
    #[must_use]
    pub fn stats(&self) -> WriterStats {
        self.stats
    }

    /// Layout of the target.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Number of exports that are not freed.
    #[must_use]
    pub fn exports(&self) -> usize {
        self.exports.len()
    }

    /// Layers and heads that a connected reader shares with this writer; checks of exports for it cover these.
    #[must_use]
    pub fn view(&self, reader: InstanceId) -> Option<&View> {
        Some(&self.readers.get(&reader)?.conversion.view)
    }

    /// Epoch of a reader's current connection.
    #[must_use]
    pub fn epoch(&self, reader: InstanceId) -> Option<u64> {
        Some(self.readers.get(&reader)?.epoch)
    }

    /// Takes the next output.
    pub fn poll(&mut self) -> Option<WriterOutput> {
        self.out.pop_front()
    }

    fn send(&mut self, to: InstanceId, body: ControlBody) {
        self.out.push_back(WriterOutput::Send { to, body });
    }

    /// Exports KV of a request to a reader and returns the export's number. The blocks belong to the writer until
    /// [`WriterOutput::Freed`]; their exported layers must not be written meanwhile. `checks` cover the exported layers of
    /// [`Writer::view`].
    ///
    /// # Errors
    /// If the reader is not connected, a limit is reached, or the blocks do not fit the tokens.
    pub fn export(
        &mut self,
        to: InstanceId,
        request: u64,
        span: impl Into<Span>,
        blocks: Vec<u32>,
        checks: Vec<Check>,
        now_ms: u64,
    ) -> Result<u64, ExportError> {
        self.now_ms = now_ms;
        let mut span = span.into();
        let tokens = span.tokens;
        let needed = u64::from(tokens).div_ceil(self.layout.block_tokens().into());
        if tokens == 0 || needed != blocks.len() as u64 || checks.len() != blocks.len() {
            return Err(ExportError::Blocks { tokens, needed, blocks: blocks.len(), checks: checks.len() });
        }
        if blocks.len() > limits::EXPORT_BLOCKS_MAX {
            return Err(ExportError::TooLarge(blocks.len()));
        }
        if let Some(block) = blocks.iter().find(|block| **block >= self.layout.blocks()) {
            return Err(ExportError::Block { block: *block, blocks: self.layout.blocks() });
        }
        let max = self.config.exports_max;
        let reader = self.readers.get_mut(&to).ok_or(ExportError::NotConnected(to))?;
        if reader.exports >= max {
            return Err(ExportError::Busy { reader: to, max });
        }
        let shared = &reader.conversion.view;
        span.layers = span.layers.filter(|layers| *layers != shared.layers);
        let view = shared.within(span.layers.as_ref()).ok_or_else(|| {
            let layers = span.layers.clone().unwrap_or_default();
            ExportError::Layers { layers, shared: shared.layers.clone() }
        })?;
        reader.exports += 1;
        let ranges = readable(&self.layout, &view, &blocks);
        let export = self.number();
        let entry = Export {
            to,
            request,
            span,
            blocks,
            checks,
            ranges,
            made_ms: now_ms,
            renewed_ms: now_ms,
            acknowledged: false,
            sent_ms: now_ms,
            reads: 0,
            ended: None,
        };
        self.exports.insert(export, entry);
        self.stats.exports += 1;
        self.send_export(export);
        Ok(export)
    }

    fn send_export(&mut self, export: u64) {
        let now_ms = self.now_ms;
        let Some(entry) = self.exports.get_mut(&export) else { return };
        let Some(reader) = self.readers.get(&entry.to) else { return };
        entry.sent_ms = now_ms;
        let mut blocks: Vec<TransferBlocks> = Vec::new();
        for block in &entry.blocks {
            match blocks.last_mut() {
                Some(run) if run.first + run.count == *block => run.count += 1,
                _ => blocks.push(TransferBlocks { first: *block, count: 1 }),
            }
        }
        let layers = entry.span.layers.clone().unwrap_or_default();
        let message = TransferExport {
            conn: reader.conn,
            export,
            request: entry.request,
            first_token: entry.span.first_token,
            tokens: entry.span.tokens,
            first_layer: layers.start,
            layers: layers.end - layers.start,
            blocks,
            checks: entry.checks.iter().flat_map(|check| check.0).collect(),
        };
        let to = entry.to;
        self.send(to, ControlBody::TransferExport(message));
    }

    /// Revokes an export whose request was cancelled. [`WriterOutput::Freed`] follows.
    pub fn revoke(&mut self, export: u64, now_ms: u64) {
        self.now_ms = now_ms;
        self.end(export, FreeReason::Revoked);
    }

    /// Fences a reader that was declared dead: its exports end, and that incarnation cannot connect again.
    pub fn fence(&mut self, reader: InstanceId, incarnation: u64, now_ms: u64) {
        self.now_ms = now_ms;
        if self.fenced.len() >= FENCED_MAX {
            self.fenced.pop_front();
        }
        self.fenced.push_back((reader, incarnation));
        if self.readers.get(&reader).is_some_and(|state| state.incarnation == incarnation) {
            self.lose_reader(reader);
        }
    }

    fn lose_reader(&mut self, reader: InstanceId) {
        let Some(state) = self.readers.remove(&reader) else { return };
        self.out.push_back(WriterOutput::Cut { reader, epoch: state.epoch });
        let theirs: Vec<u64> = self.exports.iter().filter(|(_, e)| e.to == reader).map(|(id, _)| *id).collect();
        theirs.into_iter().for_each(|export| self.end(export, FreeReason::ReaderLost));
    }

    /// Handles a message of a reader; ignores other messages.
    pub fn on_control(&mut self, from: InstanceId, body: &ControlBody, now_ms: u64) {
        self.now_ms = now_ms;
        match body {
            ControlBody::TransferConnect(m) => self.on_connect(from, m),
            ControlBody::TransferRenew(m) => self.on_renew(from, m),
            ControlBody::TransferComplete(m) => self.on_complete(from, m),
            _ => {}
        }
    }

    fn on_connect(&mut self, from: InstanceId, m: &TransferConnect) {
        if self.fenced.contains(&(from, m.incarnation)) {
            return self.refuse(from, m, "this incarnation was declared dead".to_owned());
        }
        let known = self.readers.get(&from).filter(|state| state.incarnation == m.incarnation);
        // A later CONNECT of the same process arrived before this one.
        if known.is_some_and(|state| (m.conn, m.attempt) < (state.conn, state.attempt)) {
            return;
        }
        let layout = match m.layout.as_ref().map(Layout::from_wire) {
            Some(Ok(layout)) => layout,
            Some(Err(error)) => return self.refuse(from, m, format!("the reader's layout: {error}")),
            None => return self.refuse(from, m, "the reader did not say where its KV lies".to_owned()),
        };
        let conversion = match plan(&layout, &self.layout, m.loss_allowed) {
            Ok(conversion) => conversion,
            Err(mismatch) => return self.refuse(from, m, mismatch.to_string()),
        };
        let same = known.is_some_and(|state| state.conn == m.conn && state.conversion.view == conversion.view);
        if !same {
            self.lose_reader(from);
            if self.readers.len() >= limits::TRANSFER_CONNS_MAX {
                return self.refuse(from, m, "too many readers".to_owned());
            }
        }
        let repeated = self.readers.get(&from).is_some_and(|state| state.attempt == m.attempt);
        let epoch = if repeated { self.epoch(from).unwrap_or_default() } else { self.draw_epoch() };
        let before = self.readers.get(&from).map(|state| (state.epoch, state.completed, state.bytes, state.exports));
        // Reads of an earlier connection end later, and are taken off then.
        let in_flight = || self.grants.values().filter(|grant| grant.reader == from).map(|grant| grant.bytes).sum();
        let (old, completed, bytes, exports) = before.unwrap_or_else(|| (epoch, 0, in_flight(), 0));
        if old != epoch {
            self.out.push_back(WriterOutput::Cut { reader: from, epoch: old });
        }
        let (incarnation, conn, attempt) = (m.incarnation, m.conn, m.attempt);
        let state = ReaderState { incarnation, conn, attempt, epoch, conversion, completed, bytes, exports };
        self.readers.insert(from, state);
        let near = !m.host.is_empty() && m.host == self.config.host;
        let connected = TransferConnected {
            conn,
            attempt,
            incarnation: self.config.incarnation,
            epoch,
            completed,
            layout: Some(self.layout.to_wire()),
            credit_bytes: self.config.credit_bytes,
            ttl_ms: self.config.ttl_ms,
            arenas: if near { self.config.arenas.clone() } else { Vec::new() },
            addr: self.config.addr.clone(),
        };
        self.send(from, ControlBody::TransferConnected(Box::new(connected)));
        if !repeated {
            self.out.push_back(WriterOutput::Connected { reader: from, epoch });
        }
        // Exports that the reader may not have received.
        let unacknowledged: Vec<u64> = self
            .exports
            .iter()
            .filter(|(_, e)| e.to == from && e.ended.is_none() && !e.acknowledged)
            .map(|e| *e.0)
            .collect();
        unacknowledged.into_iter().for_each(|export| self.send_export(export));
    }

    fn refuse(&mut self, to: InstanceId, m: &TransferConnect, reason: String) {
        let message = TransferRefused { conn: m.conn, attempt: m.attempt, reason };
        self.send(to, ControlBody::TransferRefused(message));
    }

    fn on_renew(&mut self, from: InstanceId, m: &TransferRenew) {
        if self.readers.get(&from).is_none_or(|state| state.conn != m.conn) {
            return;
        }
        let now_ms = self.now_ms;
        let mut unknown = Vec::new();
        for export in m.exports.iter().take(limits::TRANSFER_EXPORTS_MAX * 2) {
            match self.exports.get_mut(export).filter(|entry| entry.to == from && entry.ended.is_none()) {
                Some(entry) => (entry.renewed_ms, entry.acknowledged) = (now_ms, true),
                None => unknown.push(*export),
            }
        }
        let message = TransferRenewed { conn: m.conn, unknown, seq: m.seq };
        self.send(from, ControlBody::TransferRenewed(message));
    }

    fn on_complete(&mut self, from: InstanceId, m: &TransferComplete) {
        let incarnation = self.config.incarnation;
        let Some(state) = self.readers.get_mut(&from).filter(|state| state.conn == m.conn) else { return };
        if m.incarnation != incarnation {
            return;
        }
        if m.seq == state.completed + 1 || mutants::is(Mutant::CompleteOutOfOrder) {
            state.completed = m.seq;
            let done = m.outcome == i32::from(TransferOutcome::Done);
            let why = if done { FreeReason::Completed } else { FreeReason::Abandoned };
            if self.exports.get(&m.export).is_some_and(|entry| entry.to == from) {
                self.end(m.export, why);
            }
        }
        // Also for COMPLETEs that were executed already: the reply may have been lost.
        let Some(state) = self.readers.get(&from) else { return };
        let message = TransferCompleted { conn: m.conn, seq: state.completed, incarnation };
        self.send(from, ControlBody::TransferCompleted(message));
    }

    /// Ends an export: it admits no more reads, and is freed when none is being served.
    fn end(&mut self, export: u64, why: FreeReason) {
        let Some(entry) = self.exports.get_mut(&export) else { return };
        if entry.ended.is_none() {
            entry.ended = Some(why);
            match why {
                FreeReason::Completed => self.stats.completed += 1,
                FreeReason::Expired => self.stats.expired += 1,
                _ => {}
            }
            let to = entry.to;
            self.readers.get_mut(&to).into_iter().for_each(|state| state.exports = state.exports.saturating_sub(1));
        } else if why == FreeReason::Completed {
            // Its lease ended while its last reads were being served, and they arrived.
            entry.ended = Some(why);
        }
        self.free_if_idle(export);
    }

    fn free_if_idle(&mut self, export: u64) {
        let Some(entry) = self.exports.get(&export) else { return };
        let Some(why) = entry.ended.filter(|_| entry.reads == 0 || mutants::is(Mutant::FreedUnderReads)) else {
            return;
        };
        if mutants::is(Mutant::FreedTwice) && why == FreeReason::Completed {
            let (request, blocks) = (entry.request, entry.blocks.clone());
            self.exports.get_mut(&export).into_iter().for_each(|entry| entry.ended = None);
            return self.out.push_back(WriterOutput::Freed { export, request, blocks, why });
        }
        let Some(entry) = self.exports.remove(&export) else { return };
        let (request, blocks) = (entry.request, entry.blocks);
        self.out.push_back(WriterOutput::Freed { export, request, blocks, why });
    }

    /// Admits a read: its bytes do not change until [`Writer::end_read`].
    ///
    /// # Errors
    /// The refusal code for the reader.
    pub fn admit(
        &mut self,
        reader: InstanceId,
        epoch: u64,
        segments: &[Segment],
        now_ms: u64,
    ) -> Result<GrantId, RefuseCode> {
        self.now_ms = self.now_ms.max(now_ms);
        let result = self.may_read(reader, epoch, segments);
        let bytes = match result {
            Ok(bytes) => bytes,
            Err(code) => {
                self.stats.reads_refused += 1;
                return Err(code);
            }
        };
        let mut exports: Vec<u64> = segments.iter().map(|segment| segment.export).collect();
        exports.sort_unstable();
        exports.dedup();
        for export in &exports {
            self.exports.get_mut(export).into_iter().for_each(|entry| entry.reads += 1);
        }
        self.readers.get_mut(&reader).into_iter().for_each(|state| state.bytes += bytes);
        let id = GrantId(self.number());
        self.grants.insert(id, Grant { reader, epoch, exports, bytes, since_ms: self.now_ms, cut: false });
        self.stats.reads += 1;
        self.stats.bytes += bytes;
        Ok(id)
    }

    fn may_read(&self, reader: InstanceId, epoch: u64, segments: &[Segment]) -> Result<u64, RefuseCode> {
        let state = self.readers.get(&reader).ok_or(RefuseCode::StaleEpoch)?;
        if state.epoch != epoch && !mutants::is(Mutant::EpochUnchecked) {
            return Err(RefuseCode::StaleEpoch);
        }
        if segments.is_empty() || segments.len() > limits::TRANSFER_SEGMENTS_MAX {
            return Err(RefuseCode::Malformed);
        }
        let mut bytes = 0u64;
        for Segment { export, remote } in segments {
            let entry = self.exports.get(export).filter(|entry| entry.to == reader && entry.ended.is_none());
            let entry = entry.ok_or(RefuseCode::UnknownLease)?;
            let end = remote.offset.checked_add(remote.bytes).ok_or(RefuseCode::OutOfRange)?;
            let at =
                entry.ranges.partition_point(|(region, range)| (*region, range.end) <= (remote.region, remote.offset));
            let inside = |(region, range): &(u32, Range<u64>)| {
                *region == remote.region && range.start <= remote.offset && end <= range.end
            };
            if remote.bytes == 0 || !entry.ranges.get(at).is_some_and(inside) {
                return Err(RefuseCode::OutOfRange);
            }
            bytes = bytes.saturating_add(remote.bytes);
        }
        if bytes > limits::TRANSFER_READ_BYTES_MAX {
            return Err(RefuseCode::Malformed);
        }
        // One read is always admitted, however large.
        if state.bytes > 0 && state.bytes + bytes > self.config.credit_bytes {
            return Err(RefuseCode::Overloaded);
        }
        Ok(bytes)
    }

    /// Whether an admitted read reads bytes of an export.
    #[must_use]
    pub fn is_reading(&self, grant: GrantId, export: u64) -> bool {
        self.grants.get(&grant).is_some_and(|grant| grant.exports.contains(&export))
    }

    /// Ends an admitted read after it was served or its path was closed: its bytes may change then.
    pub fn end_read(&mut self, grant: GrantId, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        let Some(grant) = self.grants.remove(&grant) else { return };
        if let Some(state) = self.readers.get_mut(&grant.reader) {
            state.bytes = state.bytes.saturating_sub(grant.bytes);
        }
        for export in grant.exports {
            if let Some(entry) = self.exports.get_mut(&export) {
                entry.reads = entry.reads.saturating_sub(1);
                if entry.ended.is_some() {
                    self.free_if_idle(export);
                }
            }
        }
    }

    /// Handles time: leases expire, slow readers are cut, unacknowledged exports are sent again.
    pub fn tick(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        let now_ms = self.now_ms;
        let over = |entry: &Export| {
            now_ms >= entry.renewed_ms.saturating_add(self.config.ttl_ms)
                || now_ms >= entry.made_ms.saturating_add(self.config.export_ms_max)
        };
        let ids = |keep: &dyn Fn(&Export) -> bool| -> Vec<u64> {
            self.exports.iter().filter(|(_, e)| e.ended.is_none() && keep(e)).map(|(id, _)| *id).collect()
        };
        let expired = ids(&over);
        let repeat_ms = self.config.repeat_ms;
        let unacknowledged =
            ids(&|entry| !entry.acknowledged && !over(entry) && now_ms >= entry.sent_ms.saturating_add(repeat_ms));
        let read_ms = self.config.read_ms;
        let late = |grant: &&mut Grant| !grant.cut && now_ms >= grant.since_ms.saturating_add(read_ms);
        let mut slow = BTreeSet::new();
        for grant in self.grants.values_mut().filter(late) {
            grant.cut = true;
            slow.insert((grant.reader, grant.epoch));
        }
        expired.into_iter().for_each(|export| self.end(export, FreeReason::Expired));
        unacknowledged.into_iter().for_each(|export| self.send_export(export));
        for (reader, epoch) in slow {
            self.stats.slow_readers_cut += 1;
            self.out.push_back(WriterOutput::Cut { reader, epoch });
        }
    }
}

/// Byte ranges of blocks that a reader may read: exactly those of the layers and heads of `view`.
fn readable(layout: &Layout, view: &View, blocks: &[u32]) -> Vec<(u32, Range<u64>)> {
    let mut ranges: Vec<(u32, Range<u64>)> = Vec::new();
    for plane in layout.planes() {
        let layers = view.layers.start.max(plane.layers().start)..view.layers.end.min(plane.layers().end);
        if layers.is_empty() {
            continue;
        }
        let (grid, kv) = (plane.grid(), plane.part.range());
        let heads = view.heads.end - view.heads.start;
        let mut sorted = blocks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        for run in sorted.chunk_by(|a, b| a + 1 == *b) {
            let count = u32::try_from(run.len()).unwrap_or(u32::MAX);
            let layer_count = layers.end - layers.start;
            let len: Index =
                [count, layer_count, kv.end - kv.start, layout.block_tokens(), heads, layout.row_elements()];
            let mut first: Index = [run[0], layers.start - plane.first_layer, 0, 0, 0, 0];
            first[Dim::Head as usize] = view.heads.start - layout.heads().start;
            pairs(&len, (&grid, &first), (&grid, &first), &mut |pair| {
                ranges.push((plane.region, pair.a..pair.a + pair.elements * grid.elem_bytes));
            });
        }
    }
    ranges.sort_by_key(|(region, range)| (*region, range.start));
    let mut merged: Vec<(u32, Range<u64>)> = Vec::new();
    for (region, range) in ranges {
        match merged.last_mut() {
            Some((last, before)) if *last == region && before.end >= range.start => {
                before.end = before.end.max(range.end);
            }
            _ => merged.push((region, range)),
        }
    }
    merged
}
