//! Flow of a reader: reads within credits, arrivals, and checks.

use super::{ConnId, Failure, PullId, Pulling, ReadFailure, Reader, ReaderOutput, conn::InFlight, conn::State};
use crate::{
    check::{Check, Checker},
    coalesce::{Batch, Bounds, Part, Portion, Post, ReadSizes, Transaction, coalesce},
    land::Landed,
    mutants::{self, Mutant},
};
use lagoon_protocol::TransferOutcome;
use lagoon_types::limits;
use std::{ops::Range, sync::Arc};

/// Full reads in a portion at least, whatever their number of ranges.
const READS_PLANNED: u64 = 4;
/// The same while no read is in flight: one is copied while the end of the other triggers the next portion.
const READS_PLANNED_FIRST: u64 = 2;

/// Next action for arrived pieces.
enum Arrived {
    /// None.
    All,
    /// The owner checks a piece in its place.
    Unchecked(usize),
    Block(BlockEnd),
}

/// Next action for an arrived and checked block.
enum BlockEnd {
    /// It was the last block of the pull.
    Last,
    /// Its check differs from the writer's.
    Damaged { block: usize, got: Check, expected: Check },
}

impl Pulling {
    /// Takes written `pieces` of `part`, up to the first one that needs an action.
    fn arrived(&mut self, part: &Part, pieces: &mut Range<usize>, verify: bool, checker: &mut Checker) -> Arrived {
        for piece in pieces.by_ref() {
            // Plain pieces arrive whole.
            if !part.plain && !self.add_bytes(piece, part.bytes) {
                continue;
            }
            if verify && self.checks[piece].is_none() {
                self.checking += 1;
                return Arrived::Unchecked(piece);
            }
            if let Some(end) = self.piece_done(piece, verify, checker) {
                return Arrived::Block(end);
            }
        }
        Arrived::All
    }

    /// Counts arrived `bytes` of a piece. True if the piece is whole now.
    fn add_bytes(&mut self, piece: usize, bytes: u64) -> bool {
        let all = self.pull.piece_bytes(piece);
        let here = self.partly.remove(&piece).unwrap_or(0) + bytes;
        if here < all {
            self.partly.insert(piece, here);
        }
        here == all
    }

    /// Counts an arrived and checked piece. `checker` is scratch.
    fn piece_done(&mut self, piece: usize, verify: bool, checker: &mut Checker) -> Option<BlockEnd> {
        let (block, _) = self.pull.piece(piece);
        self.unchecked[block] -= 1;
        if self.unchecked[block] > 0 {
            return None;
        }
        if verify {
            let checks = (0..self.pull.layers()).map(|layer| self.checks[self.pull.piece_at(block, layer)]);
            let got = checker.combine(checks.map(Option::unwrap_or_default));
            let expected = self.expected[block];
            if got != expected && !mutants::is(Mutant::CheckIgnored) {
                return Some(BlockEnd::Damaged { block, got, expected });
            }
        }
        self.blocks_left -= 1;
        (self.blocks_left == 0).then_some(BlockEnd::Last)
    }
}

impl Reader {
    /// Starts reads while there are credits, one connection after the other. Each call plans one portion per connection, so
    /// that its reads start before the next portion is planned; every ended read calls this again.
    pub fn pump(&mut self) {
        // Without a pull there is nothing to read.
        let ids: Vec<ConnId> = if self.pulls.is_empty() {
            Vec::new()
        } else {
            self.conns.range(self.turn..).chain(self.conns.range(..self.turn)).map(|c| *c.0).collect()
        };
        for id in ids {
            self.post_fresh(id);
            let mut may_plan = true;
            while let Some(transaction) = self.next_transaction(id, &mut may_plan) {
                self.issue(id, transaction);
            }
        }
        self.turn = ConnId(self.turn.0 + 1);
        if self.conns.keys().next_back().is_none_or(|last| *last < self.turn) {
            self.turn = ConnId(0);
        }
    }

    /// Posts the pulls that started since the last call, as one group that takes turns.
    fn post_fresh(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let fresh = std::mem::take(&mut conn.fresh);
        let posts = fresh.into_iter().filter_map(|(pull, only)| {
            let pulling = self.pulls.get(&pull).filter(|pulling| pulling.failed.is_none())?;
            Some(Post { request: pull.0, export: pulling.export, pull: Arc::clone(&pulling.pull), only })
        });
        conn.queue.post(posts.collect());
    }

    /// The next transaction within the credits, of the planned ones or, with `may_plan`, of the next portion.
    fn next_transaction(&mut self, id: ConnId, may_plan: &mut bool) -> Option<Transaction> {
        let conn = self.conns.get_mut(&id).filter(|conn| conn.state == State::Up)?;
        let credit = self.config.conn_bytes.min(conn.peer.as_ref()?.credit_bytes);
        if conn.ready.is_empty() && std::mem::take(may_plan) {
            // Requests that take turns are coalesced only within one portion.
            let least = if conn.in_flight.is_empty() { READS_PLANNED_FIRST } else { READS_PLANNED };
            let reads = least.max(2 * conn.queue.turns() as u64);
            let bytes = self.config.read_bytes.saturating_mul(reads);
            let portion = Portion { bytes, reads: self.config.planned, bytes_max: credit };
            let run = if self.config.coalesce { self.config.read_bytes } else { 0 };
            let sizes = ReadSizes { bytes: self.config.read_bytes, plain: self.config.piece_bytes, run };
            let batch = conn.queue.pop(portion, sizes);
            self.fill_ready(id, &batch);
        }
        let conn = self.conns.get_mut(&id)?;
        let bytes = conn.ready.front()?.bytes;
        let fits = |used: u64, max: u64| used == 0 || used + bytes <= max;
        if fits(conn.bytes, credit) && fits(self.bytes, self.config.bytes) {
            return conn.ready.pop_front();
        }
        None
    }

    fn fill_ready(&mut self, id: ConnId, batch: &Batch) {
        let segments = if self.config.coalesce { limits::TRANSFER_SEGMENTS_MAX } else { 1 };
        let bytes = if self.config.coalesce { self.config.read_bytes } else { 0 };
        let transactions = coalesce(&batch.reads, Bounds { bytes, segments });
        self.stats.reads += batch.reads.iter().map(|read| read.pieces as u64).sum::<u64>();
        self.stats.transactions += transactions.len() as u64;
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.ready.extend(transactions);
        if let Some(pull) = batch.complete.filter(|_| mutants::is(Mutant::CompleteBeforeLast)) {
            let export = self.pulls.get(&PullId(pull)).map(|pulling| pulling.export);
            export.into_iter().for_each(|export| self.complete(id, export, TransferOutcome::Done));
        }
    }

    fn issue(&mut self, id: ConnId, transaction: Transaction) {
        let read = self.number();
        let deadline_ms = self.now_ms.saturating_add(self.config.read_ms);
        for pull in pulls_of(&transaction) {
            self.pulls.get_mut(&pull).into_iter().for_each(|pulling| pulling.reads += 1);
        }
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some(epoch) = conn.peer.as_ref().map(|peer| peer.epoch) else { return };
        conn.bytes += transaction.bytes;
        self.bytes += transaction.bytes;
        let transaction = Arc::new(transaction);
        conn.in_flight.insert(read, InFlight { transaction: Arc::clone(&transaction), deadline_ms });
        self.out.push_back(ReaderOutput::Read { conn: id, read, epoch, transaction, deadline_ms });
    }

    /// Queues a read of a lost path again, without the parts of failed pulls.
    pub(super) fn take_back(&mut self, id: ConnId, transaction: &Transaction) {
        let mut left = vec![transaction.clone()];
        for pull in pulls_of(transaction) {
            if let Some(pulling) = self.pulls.get_mut(&pull) {
                pulling.reads -= 1;
            }
            if self.pulls.get(&pull).is_none_or(|pulling| pulling.failed.is_some()) {
                left = left.iter().flat_map(|transaction| transaction.without(pull.0)).collect();
            }
            self.release(pull);
        }
        if let Some(conn) = self.conns.get_mut(&id) {
            left.into_iter().rev().for_each(|transaction| conn.ready.push_front(transaction));
        }
    }

    /// Handles the end of a read; ignores unknown reads (of a path that went down).
    pub fn on_read(&mut self, id: ConnId, read: u64, result: Result<Landed, ReadFailure>, now_ms: u64) {
        self.now_ms = now_ms;
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some(InFlight { transaction, .. }) = conn.in_flight.remove(&read) else { return };
        conn.bytes -= transaction.bytes;
        self.bytes -= transaction.bytes;
        let pulls = pulls_of(&transaction);
        for pull in &pulls {
            self.pulls.get_mut(pull).into_iter().for_each(|pulling| pulling.reads -= 1);
        }
        match result {
            Ok(landed) => {
                self.stats.bytes += transaction.bytes;
                self.landed(&transaction, landed);
            }
            // Only one of several pulls may be refused: each is read alone.
            Err(ReadFailure::Refused(_)) if pulls.len() > 1 => {
                for alone in &pulls {
                    let others = pulls.iter().filter(|pull| *pull != alone);
                    let start = vec![Transaction::clone(&transaction)];
                    let parts = others.fold(start, |left, other| {
                        left.iter().flat_map(|transaction| transaction.without(other.0)).collect()
                    });
                    let live = self.pulls.get(alone).is_some_and(|pulling| pulling.failed.is_none());
                    let conn = self.conns.get_mut(&id).filter(|_| live);
                    conn.into_iter().for_each(|conn| conn.ready.extend(parts.clone()));
                }
            }
            Err(ReadFailure::Refused(code)) => {
                pulls.iter().for_each(|pull| self.fail(*pull, Failure::Refused(code)));
            }
            Err(ReadFailure::Memory(error)) => {
                pulls.iter().for_each(|pull| self.fail(*pull, Failure::Memory(error.clone())));
            }
        }
        pulls.into_iter().for_each(|pull| self.release(pull));
        self.forget_if_idle(id);
        self.pump();
    }

    fn landed(&mut self, transaction: &Transaction, landed: Landed) {
        for (pull, overflows) in landed.overflows {
            self.fail(PullId(pull), Failure::Overflow(overflows));
        }
        for of in landed.checks.chunk_by(|a, b| a.0 == b.0) {
            let Some(pulling) = self.pulls.get_mut(&PullId(of[0].0)) else { continue };
            of.iter().for_each(|(_, piece, check)| pulling.checks[*piece] = Some(*check));
        }
        let mut checker = Checker::default();
        for part in &transaction.parts {
            let (id, mut pieces) = (PullId(part.request), part.piece..part.piece + part.pieces);
            while !pieces.is_empty() {
                let Some(pulling) = self.pulls.get_mut(&id).filter(|pulling| pulling.failed.is_none()) else { break };
                match pulling.arrived(part, &mut pieces, self.config.verify, &mut checker) {
                    Arrived::All => {}
                    Arrived::Unchecked(piece) => self.out.push_back(ReaderOutput::Check { pull: id, piece }),
                    Arrived::Block(end) => self.block_ended(id, end),
                }
            }
        }
    }

    /// Handles the owner's check of a piece in its place; `Err` if its memory could not be read.
    pub fn on_checked(&mut self, pull: PullId, piece: usize, check: Result<Check, String>, now_ms: u64) {
        self.now_ms = now_ms;
        let Some(pulling) = self.pulls.get_mut(&pull) else { return };
        pulling.checking -= 1;
        match check {
            Ok(check) => {
                pulling.checks[piece] = Some(check);
                let live = pulling.failed.is_none();
                let end = live.then(|| pulling.piece_done(piece, self.config.verify, &mut Checker::default()));
                end.flatten().into_iter().for_each(|end| self.block_ended(pull, end));
            }
            Err(error) => self.fail(pull, Failure::Memory(error)),
        }
        self.release(pull);
    }

    /// Handles a last or damaged block.
    fn block_ended(&mut self, id: PullId, end: BlockEnd) {
        match end {
            BlockEnd::Last => self.done(id),
            BlockEnd::Damaged { block, got, expected } => self.damaged(id, block, got, expected),
        }
    }

    /// Reads a damaged block again, or fails the pull after `damage_retries`.
    fn damaged(&mut self, id: PullId, block: usize, got: Check, expected: Check) {
        self.stats.damaged_blocks += 1;
        let retries_max = self.config.damage_retries;
        let Some(pulling) = self.pulls.get_mut(&id) else { return };
        if pulling.retries >= retries_max {
            return self.fail(id, Failure::Damaged { block, got, expected });
        }
        pulling.retries += 1;
        let layers = pulling.pull.layers();
        let pieces: Vec<usize> = (0..layers).map(|layer| pulling.pull.piece_at(block, layer)).collect();
        for piece in &pieces {
            pulling.checks[*piece] = None;
        }
        pulling.unchecked[block] = layers;
        let conn = self.conns.get_mut(&pulling.conn);
        conn.into_iter().for_each(|conn| conn.fresh.push((id, Some(pieces.clone()))));
    }

    /// Ends a pull whose blocks are all verified, and sends its COMPLETE.
    fn done(&mut self, id: PullId) {
        let Some(pulling) = self.pulls.remove(&id) else { return };
        assert!(pulling.reads == 0 && pulling.checking == 0, "a pull that is done has nothing in flight");
        if let Some(conn) = self.conns.get_mut(&pulling.conn) {
            conn.pulls.remove(&pulling.export);
        }
        self.stats.pulls_done += 1;
        self.out.push_back(ReaderOutput::Done { pull: id });
        if !mutants::is(Mutant::CompleteBeforeLast) {
            self.complete(pulling.conn, pulling.export, TransferOutcome::Done);
        }
    }

    /// Ends a pull; the first reason counts.
    pub(super) fn fail(&mut self, id: PullId, why: Failure) {
        let Some(pulling) = self.pulls.get_mut(&id).filter(|pulling| pulling.failed.is_none()) else { return };
        pulling.failed = Some(why);
        let conn = self.conns.get_mut(&pulling.conn);
        conn.into_iter().for_each(|conn| {
            conn.queue.remove(id.0);
            conn.fresh.retain(|(pull, _)| *pull != id);
            let ready = std::mem::take(&mut conn.ready);
            conn.ready = ready.into_iter().flat_map(|transaction| transaction.without(id.0)).collect();
        });
        self.release(id);
    }

    /// Ends a failed pull when none of its reads and checks is in progress: its memory is the owner's again, and the writer may
    /// free the export.
    pub(super) fn release(&mut self, id: PullId) {
        let busy = |pulling: &Pulling| pulling.reads > 0 || pulling.checking > 0;
        let Some(pulling) = self.pulls.get(&id).filter(|pulling| pulling.failed.is_some()) else { return };
        if busy(pulling) && !mutants::is(Mutant::ReleasedUnderReads) {
            return;
        }
        let Some(pulling) = self.pulls.remove(&id) else { return };
        let Some(why) = pulling.failed else { return };
        if let Some(conn) = self.conns.get_mut(&pulling.conn) {
            conn.pulls.remove(&pulling.export);
        }
        self.stats.pulls_failed += 1;
        let lost = matches!(why, Failure::WriterLost(_));
        self.out.push_back(ReaderOutput::Failed { pull: id, why });
        if !lost {
            self.complete(pulling.conn, pulling.export, TransferOutcome::Abandoned);
        }
        self.forget_if_idle(pulling.conn);
    }
}

/// The pulls of a transaction, each once.
fn pulls_of(transaction: &Transaction) -> Vec<PullId> {
    let mut pulls: Vec<PullId> = transaction.parts.iter().map(|part| PullId(part.request)).collect();
    pulls.sort_unstable();
    pulls.dedup();
    pulls
}
