//! A connection's handshake, offers, leases and COMPLETEs.

use super::{ConnId, Failure, Offer, PullId, Reader, ReaderOutput};
use crate::{
    check::Check,
    coalesce::{Queue, Transaction},
    layout::Layout,
    mutants::{self, Mutant},
    plan::{Conversion, plan},
};
use lagoon_protocol::{
    ControlBody, TransferComplete, TransferCompleted, TransferConnect, TransferConnected, TransferExport,
    TransferOutcome, TransferRenew, TransferRenewed,
};
use lagoon_types::{InstanceId, limits};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

/// Completed exports to remember, to ignore late offers: more than the outbox holds.
const FINISHED_MAX: usize = 2 * limits::TRANSFER_CONN_REQUESTS_MAX;
/// Requests of one connection that can ever be completed: each is counted by one.
const COMPLETED_MAX: u64 = u64::MAX / 2;

/// A writer's `TransferConnected`.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) incarnation: u64,
    pub(super) epoch: u64,
    pub(super) layout: Arc<Layout>,
    pub(super) conversion: Arc<Conversion>,
    pub(super) credit_bytes: u64,
    ttl_ms: u64,
}

/// An export that waits to be pulled.
#[derive(Debug)]
pub(super) struct Offered {
    pub(super) offer: Offer,
    pub(super) blocks: Vec<u32>,
    pub(super) checks: Vec<Check>,
    pub(super) alive_until_ms: u64,
}

/// An unacknowledged COMPLETE.
#[derive(Debug)]
pub(super) struct Completion {
    pub(super) seq: u64,
    pub(super) export: u64,
    outcome: TransferOutcome,
}

/// A read in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) transaction: Arc<Transaction>,
    pub(super) deadline_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// A CONNECT was sent at `since_ms`.
    Connecting {
        since_ms: u64,
    },
    Up,
    /// The path is being closed.
    Closing,
}

#[derive(Debug)]
pub(super) struct Conn {
    pub(super) writer: InstanceId,
    pub(super) state: State,
    attempt: u64,
    pub(super) peer: Option<Peer>,
    pub(super) offers: BTreeMap<u64, Offered>,
    /// By export: the pull, and a lower bound of its lease's end.
    pub(super) pulls: BTreeMap<u64, (PullId, u64)>,
    /// Pulls to post, with the pieces to read (`None`: all).
    pub(super) fresh: Vec<(PullId, Option<Vec<usize>>)>,
    pub(super) queue: Queue,
    pub(super) ready: VecDeque<Transaction>,
    pub(super) in_flight: BTreeMap<u64, InFlight>,
    pub(super) bytes: u64,
    pub(super) outbox: VecDeque<Completion>,
    /// Recently completed exports: a late offer of one is ignored.
    finished: VecDeque<u64>,
    next_seq: u64,
    complete_sent_ms: Option<u64>,
    /// The last unanswered renewal: number and time of sending.
    renewal: Option<(u64, u64)>,
    renewed_ms: u64,
    renew_now: bool,
    pub(super) leaving: bool,
}

impl Conn {
    pub(super) fn new(writer: InstanceId) -> Self {
        Self {
            writer,
            state: State::Connecting { since_ms: 0 },
            attempt: 0,
            peer: None,
            offers: BTreeMap::new(),
            pulls: BTreeMap::new(),
            fresh: Vec::new(),
            queue: Queue::default(),
            ready: VecDeque::new(),
            in_flight: BTreeMap::new(),
            bytes: 0,
            outbox: VecDeque::new(),
            finished: VecDeque::new(),
            next_seq: 1,
            complete_sent_ms: None,
            renewal: None,
            renewed_ms: 0,
            renew_now: false,
            leaving: false,
        }
    }

    fn knows(&self, export: u64) -> bool {
        self.offers.contains_key(&export) || self.pulls.contains_key(&export) || self.finished.contains(&export)
    }
}

impl Reader {
    /// Sends a CONNECT with a new attempt number.
    pub(super) fn send_connect(&mut self, id: ConnId) {
        let number = self.number();
        let layout = Some(self.layout.to_wire());
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.attempt = number;
        conn.state = State::Connecting { since_ms: self.now_ms };
        let message = TransferConnect {
            conn: id.0,
            incarnation: self.config.incarnation,
            attempt: conn.attempt,
            layout,
            loss_allowed: self.config.loss_allowed,
            host: self.config.host.clone(),
        };
        self.out
            .push_back(ReaderOutput::Send { to: conn.writer, body: ControlBody::TransferConnect(Box::new(message)) });
    }

    fn conn_of(&mut self, from: InstanceId, id: u64) -> Option<&mut Conn> {
        self.conns.get_mut(&ConnId(id)).filter(|conn| conn.writer == from)
    }

    /// Handles the reply to the last CONNECT.
    pub(super) fn accept_connected(&mut self, from: InstanceId, m: &TransferConnected) -> Result<(), String> {
        let id = ConnId(m.conn);
        let (ours, loss_allowed) = (Arc::clone(&self.layout), self.config.loss_allowed);
        let Some(conn) = self.conn_of(from, m.conn) else { return Ok(()) };
        let waits = matches!(conn.state, State::Connecting { .. });
        if !waits || conn.attempt != m.attempt || conn.leaving {
            return Ok(());
        }
        if m.completed > COMPLETED_MAX {
            return Err(format!("the writer says that {} requests are completed", m.completed));
        }
        let Some(layout) = &m.layout else { return Err("the writer did not say where its KV lies".to_owned()) };
        let theirs = Layout::from_wire(layout).map_err(|error| format!("the writer's layout: {error}"))?;
        let conversion = plan(&ours, &theirs, loss_allowed).map_err(|mismatch| mismatch.to_string())?;
        let same = |peer: &Peer| peer.incarnation == m.incarnation && *peer.layout == theirs;
        let fresh = conn.peer.is_none();
        if !fresh && !conn.peer.as_ref().is_some_and(same) {
            self.lose_writer(id, "its process was replaced");
        }
        let Some(conn) = self.conns.get_mut(&id) else { return Ok(()) };
        conn.outbox.retain(|completion| completion.seq > m.completed);
        // The answer may be older than the last acknowledgement: numbers never go back.
        conn.next_seq = conn.next_seq.max(m.completed + 1);
        let layout = Arc::new(theirs);
        conn.state = State::Up;
        conn.peer = Some(Peer {
            incarnation: m.incarnation,
            epoch: m.epoch,
            layout: Arc::clone(&layout),
            conversion: Arc::new(conversion),
            credit_bytes: m.credit_bytes,
            ttl_ms: m.ttl_ms.min(limits::EXPORT_MS_MAX),
        });
        (conn.complete_sent_ms, conn.renew_now, conn.renewal) = (None, true, None);
        let (writer, arenas, addr) = (conn.writer, m.arenas.clone(), m.addr.clone());
        self.out.push_back(ReaderOutput::Open { conn: id, writer, epoch: m.epoch, layout, arenas, addr });
        Ok(())
    }

    pub(super) fn on_refused(&mut self, from: InstanceId, id: u64, attempt: u64, reason: &str) {
        let Some(conn) = self.conn_of(from, id) else { return };
        if conn.attempt == attempt && matches!(conn.state, State::Connecting { .. }) {
            self.refuse(ConnId(id), reason.to_owned());
        }
    }

    /// Drops a connection whose layouts are incompatible, without retries.
    pub(super) fn refuse(&mut self, id: ConnId, reason: String) {
        let Some(conn) = self.conns.get(&id) else { return };
        self.out.push_back(ReaderOutput::Refused { conn: id, writer: conn.writer, reason: reason.clone() });
        self.lose_writer(id, &reason);
        self.conns.get_mut(&id).into_iter().for_each(|conn| conn.leaving = true);
        self.forget_if_idle(id);
    }

    /// Drops all exports of a lost writer process.
    pub(super) fn lose_writer(&mut self, id: ConnId, why: &str) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.outbox.clear();
        conn.peer = None;
        (conn.next_seq, conn.renewal) = (1, None);
        let offers = std::mem::take(&mut conn.offers);
        let pulls: Vec<PullId> = conn.pulls.values().map(|(pull, _)| *pull).collect();
        for export in offers.into_keys() {
            self.out.push_back(ReaderOutput::Withdrawn { conn: id, export });
        }
        pulls.into_iter().for_each(|pull| self.fail(pull, Failure::WriterLost(why.to_owned())));
        // Exports of a lost writer are not completed.
        self.conns.get_mut(&id).into_iter().for_each(|conn| conn.outbox.clear());
    }

    /// Handles a broken or closed path, of which the owner writes no more bytes. Its reads are repeated on the next path.
    pub fn on_path_down(&mut self, id: ConnId, now_ms: u64) {
        self.now_ms = now_ms;
        let Some(conn) = self.conns.get_mut(&id) else { return };
        self.stats.paths_lost += 1;
        let in_flight = std::mem::take(&mut conn.in_flight);
        if !mutants::is(Mutant::CreditLost) {
            self.bytes -= conn.bytes;
            conn.bytes = 0;
        }
        let back: Vec<Transaction> =
            in_flight.into_values().rev().map(|read| Transaction::clone(&read.transaction)).collect();
        for transaction in back {
            self.take_back(id, &transaction);
        }
        match self.conns.get_mut(&id) {
            Some(conn) if conn.leaving => conn.state = State::Connecting { since_ms: now_ms },
            _ => self.send_connect(id),
        }
        self.forget_if_idle(id);
    }

    /// Restarts with a new incarnation after this instance was declared dead: writers have ended its exports.
    pub fn begin_anew(&mut self, incarnation: u64, now_ms: u64) {
        self.now_ms = now_ms;
        self.config.incarnation = incarnation;
        let ids: Vec<ConnId> = self.conns.keys().copied().collect();
        for id in ids {
            self.lose_writer(id, "this instance was declared dead");
            match self.conns.get(&id).map(|conn| conn.state) {
                Some(State::Up) => self.close(id),
                Some(State::Connecting { .. }) => self.send_connect(id),
                Some(State::Closing) | None => {}
            }
        }
    }

    /// Handles a lost control session with a writer: messages are sent again.
    pub fn on_session_down(&mut self, writer: InstanceId, now_ms: u64) {
        self.now_ms = now_ms;
        for conn in self.conns.values_mut().filter(|conn| conn.writer == writer) {
            (conn.complete_sent_ms, conn.renewal, conn.renew_now) = (None, None, true);
            if let State::Connecting { since_ms } = &mut conn.state {
                *since_ms = 0;
            }
        }
    }

    /// Closes the path of a connection that is leaving, and drops it when none of its pulls is in progress.
    pub(super) fn forget_if_idle(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(&id).filter(|conn| conn.leaving) else { return };
        match conn.state {
            State::Up => self.close(id),
            State::Connecting { .. } if conn.pulls.is_empty() => drop(self.conns.remove(&id)),
            State::Connecting { .. } | State::Closing => {}
        }
    }

    /// Closes the path, once.
    pub(super) fn close(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if conn.state != State::Closing {
            conn.state = State::Closing;
            self.out.push_back(ReaderOutput::Close { conn: id });
        }
    }

    pub(super) fn on_export(&mut self, from: InstanceId, m: &TransferExport) {
        let id = ConnId(m.conn);
        let now_ms = self.now_ms;
        let Some(conn) = self.conn_of(from, m.conn) else { return };
        let Some(peer) = conn.peer.as_ref().filter(|_| !conn.leaving) else { return };
        conn.renew_now = true;
        // An offer that is dropped here is repeated by the writer.
        let full = conn.offers.len() >= limits::TRANSFER_EXPORTS_MAX || conn.outbox.len() >= FINISHED_MAX;
        if conn.knows(m.export) || full {
            return;
        }
        let blocks = m.blocks.iter().flat_map(|run| run.first..run.first.saturating_add(run.count));
        let blocks: Vec<u32> = blocks.take(limits::EXPORT_BLOCKS_MAX + 1).collect();
        let (checks, rest) = m.checks.as_chunks::<{ Check::BYTES }>();
        let some = (m.layers > 0).then(|| m.first_layer..m.first_layer.saturating_add(m.layers));
        let view = peer.conversion.view.within(some.as_ref());
        let fits = blocks.len() <= limits::EXPORT_BLOCKS_MAX && checks.len() == blocks.len() && rest.is_empty();
        let offer = Offer {
            conn: id,
            writer: conn.writer,
            export: m.export,
            request: m.request,
            first_token: m.first_token,
            tokens: m.tokens,
            layers: view.map(|view| view.layers).unwrap_or_default(),
        };
        if !fits
            || offer.layers.is_empty()
            || u64::from(m.tokens).div_ceil(peer.layout.block_tokens().into()) != blocks.len() as u64
        {
            // The message is inconsistent: the writer need not keep the export.
            return self.complete(id, m.export, TransferOutcome::Abandoned);
        }
        let checks = checks.iter().map(|bytes| Check(*bytes)).collect();
        let alive_until_ms = now_ms.saturating_add(peer.ttl_ms - peer.ttl_ms / 8);
        conn.offers.insert(m.export, Offered { offer: offer.clone(), blocks, checks, alive_until_ms });
        self.out.push_back(ReaderOutput::Offered(offer));
    }

    pub(super) fn on_renewed(&mut self, from: InstanceId, m: &TransferRenewed) {
        let id = ConnId(m.conn);
        let Some(conn) = self.conn_of(from, m.conn) else { return };
        let Some((seq, sent_ms)) = conn.renewal else { return };
        let Some(peer) = conn.peer.as_ref().filter(|_| seq == m.seq) else { return };
        let until_ms = sent_ms.saturating_add(peer.ttl_ms - peer.ttl_ms / 8);
        conn.renewal = None;
        let mut gone: BTreeSet<u64> = m.unknown.iter().copied().collect();
        let mut lost = Vec::new();
        for (export, (pull, alive_until_ms)) in &mut conn.pulls {
            if gone.contains(export) {
                lost.push(*pull);
            } else {
                *alive_until_ms = until_ms;
            }
        }
        conn.offers.values_mut().for_each(|offered| offered.alive_until_ms = until_ms);
        gone.retain(|export| conn.offers.remove(export).is_some());
        self.out.extend(gone.into_iter().map(|export| ReaderOutput::Withdrawn { conn: id, export }));
        lost.into_iter().for_each(|pull| self.fail(pull, Failure::ExportLost));
    }

    /// Queues a COMPLETE, and sends it if none waits for its acknowledgement.
    pub(super) fn complete(&mut self, id: ConnId, export: u64, outcome: TransferOutcome) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if conn.finished.len() >= FINISHED_MAX {
            conn.finished.pop_front();
        }
        conn.finished.push_back(export);
        conn.outbox.push_back(Completion { seq: conn.next_seq, export, outcome });
        conn.next_seq += 1;
        self.send_complete(id);
    }

    fn send_complete(&mut self, id: ConnId) {
        let (now_ms, repeat_ms) = (self.now_ms, self.config.repeat_ms);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some(head) = conn.outbox.front().filter(|_| conn.state == State::Up) else { return };
        let Some(incarnation) = conn.peer.as_ref().map(|peer| peer.incarnation) else { return };
        if conn.complete_sent_ms.is_some_and(|sent_ms| now_ms < sent_ms + repeat_ms) {
            return;
        }
        conn.complete_sent_ms = Some(now_ms);
        let outcome = head.outcome.into();
        let message = TransferComplete { conn: id.0, seq: head.seq, export: head.export, outcome, incarnation };
        self.out.push_back(ReaderOutput::Send { to: conn.writer, body: ControlBody::TransferComplete(message) });
    }

    pub(super) fn on_completed(&mut self, from: InstanceId, m: &TransferCompleted) {
        let TransferCompleted { conn: id, seq, incarnation } = *m;
        let Some(conn) = self.conn_of(from, id) else { return };
        if conn.peer.as_ref().is_none_or(|peer| peer.incarnation != incarnation) {
            return;
        }
        let before = conn.outbox.len();
        if mutants::is(Mutant::AckUndeduped) {
            conn.outbox.pop_front();
        } else {
            conn.outbox.retain(|completion| completion.seq > seq);
        }
        if conn.outbox.len() < before {
            conn.complete_sent_ms = None;
            self.send_complete(ConnId(id));
        }
    }

    fn send_renewal(&mut self, id: ConnId) {
        let seq = self.number();
        let now_ms = self.now_ms;
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.renew_now = false;
        let exports: Vec<u64> = conn.offers.keys().chain(conn.pulls.keys()).copied().collect();
        conn.renewed_ms = now_ms;
        if exports.is_empty() {
            return;
        }
        conn.renewal = Some((seq, now_ms));
        let message = TransferRenew { conn: id.0, exports, seq };
        self.out.push_back(ReaderOutput::Send { to: conn.writer, body: ControlBody::TransferRenew(message) });
    }

    pub(super) fn tick_conn(&mut self, id: ConnId) {
        let (now_ms, repeat_ms) = (self.now_ms, self.config.repeat_ms);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let ended: Vec<u64> =
            conn.offers.iter().filter(|(_, o)| o.alive_until_ms <= now_ms).map(|(export, _)| *export).collect();
        for export in ended {
            conn.offers.remove(&export);
            self.out.push_back(ReaderOutput::Withdrawn { conn: id, export });
        }
        let lost: Vec<PullId> =
            conn.pulls.values().filter(|(_, until_ms)| *until_ms <= now_ms).map(|(pull, _)| *pull).collect();
        let slow = conn.in_flight.values().any(|read| read.deadline_ms <= now_ms);
        let (state, leaving) = (conn.state, conn.leaving);
        let renew = conn.renew_now || now_ms >= conn.renewed_ms + self.config.renew_ms;
        lost.into_iter().for_each(|pull| self.fail(pull, Failure::ExportLost));
        match state {
            State::Connecting { since_ms } if !leaving && now_ms >= since_ms + repeat_ms => self.send_connect(id),
            State::Up if slow => self.close(id),
            State::Up => {
                if renew {
                    self.send_renewal(id);
                }
                self.send_complete(id);
            }
            State::Connecting { .. } | State::Closing => {}
        }
    }
}
