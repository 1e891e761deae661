//! Moves of a sequence's rBlocks between instances, on the debtor that runs it (Infinite-LLM v2 §6.2): to a creditor,
//! home, or from one creditor to another through the debtor. Others decide: the gManager by orders, creditors by
//! recalls, the batch by swaps.
//!
//! A move reserves at the target before any byte moves; copies whole blocks, one layer of one block at a time
//! (`copy.rs`), beside decoding and at its pace (`pace.rs`); verifies each by its content hash; switches the block
//! table when its sequence is in no step; and only then frees the source. Invariants:
//! * the table lists each position once, at the source until the switch and at the target from then on;
//! * a block is in at most one move;
//! * a move that ends early (its sequence ended, its source or target was lost, its deadline has passed) frees the blocks
//!   reserved at the target and not switched to, once, and leaves the source as it is.

mod copy;
mod event;
mod pace;
mod recall;
mod status;

pub(crate) use event::MoveEvent;
pub use pace::MovePace;
pub use status::{MoveStatus, MovedBlocks};

use crate::batch::Batch;
use crate::batch::others::MoveQueries;
use crate::batch::sequence::Sequence;
use crate::cx::Cx;
use crate::cx::tags::ReadId;
use crate::event::Effect;
use crate::outcome::Outcome;
use bytes::Bytes;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_cluster::{BorrowId, BorrowedLease};
use lagoon_kv::hash::ContentHash;
use lagoon_kv::seq::push_entry;
use lagoon_kv::{Advance, BlockHasher, LeaseHasher, Owner, Placement, RemoteBlock, RemoteEntries};
use lagoon_protocol::{ControlBody, LeasePurpose, MoveKvCache, MoveOutcome, MoveReason, TierRequest};
use lagoon_runner::RemoteTag;
use lagoon_transfer::Check;
use lagoon_types::limits::{INSTANCE_MOVES_MAX, MOVE_BYTES_IN_FLIGHT_MAX, MOVE_MS_MAX, SWAP_OUT_DEADLINE_MS};
use lagoon_types::{Epoch, InstanceId, LeaseId, PhysBlock, SeqId};
use pace::Pace;
use std::collections::{BTreeMap, BTreeSet};

/// Source or target of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Here,
    At(InstanceId),
}

/// The reason of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// An order of the gManager, with its number.
    Order {
        number: u64,
        reason: MoveReason,
    },
    Recall,
    /// Swap out: the sequence stops, with its KV in host memory.
    SwapOut,
}

#[derive(Debug)]
enum Phase {
    /// The borrow at the target is in progress.
    Reserving(BorrowId),
    Copying,
}

/// A lease at the target.
#[derive(Debug)]
struct TargetLease {
    creditor: InstanceId,
    lease: LeaseId,
    epoch: Epoch,
    hasher: LeaseHasher,
}

/// One block of a move.
#[derive(Debug)]
struct Item {
    block: u32,
    from: Placement,
    to: Placement,
    /// Layers requested from the source.
    asked: u32,
    /// Some of it waited for the pace: its time does not measure the link.
    paced: bool,
    /// Layers handed to the target, in order.
    passed: u32,
    /// Layers that have arrived and wait for their turn.
    arrived: BTreeMap<u32, Bytes>,
    /// Layers stored by this instance's device, of a block that moves home.
    stored: u32,
    hasher: BlockHasher,
    hash: Option<ContentHash>,
    /// Checks of each layer handed over, where the source's content is known by checks.
    checks: Vec<Check>,
    /// The copy is whole and correct: the sequence may switch to it.
    verified: bool,
}

#[derive(Debug)]
struct Move {
    seq: SeqId,
    why: Why,
    source: Place,
    target: Place,
    wanted: u32,
    /// The first block that may move, if an operator chose it.
    first: Option<u32>,
    /// Blocks requested at the target.
    asked: u32,
    moved: u32,
    deadline_ms: u64,
    phase: Phase,
    lease: Option<TargetLease>,
    /// Ascending by block, and by entry of the target's lease.
    items: Vec<Item>,
    /// Why not all blocks move.
    reason: String,
    target_lendable: Option<u32>,
}

/// All moves of this instance, with their counters.
#[derive(Debug)]
pub(crate) struct Moves {
    issued: u64,
    /// By number, the oldest first.
    moves: BTreeMap<u64, Move>,
    /// Reads in flight at creditors: move, block and layer.
    reads: BTreeMap<ReadId, (u64, u32, u32)>,
    /// Reads and writes of this instance's own store: move, block and layer.
    tags: BTreeMap<RemoteTag, (u64, u32, u32)>,
    /// Bytes requested and not verified yet.
    bytes_in_flight: u64,
    /// Limit of `bytes_in_flight`; two layers of a block are always allowed.
    bytes_in_flight_max: u64,
    pace: Pace,
    status: MoveStatus,
}

impl MoveQueries for Moves {
    fn is_full(&self) -> bool {
        self.moves.len() >= INSTANCE_MOVES_MAX
    }

    fn is_moving(&self, seq: SeqId) -> bool {
        self.moves.values().any(|m| m.seq == seq)
    }

    fn is_moving_home(&self) -> bool {
        self.moves.values().any(Move::comes_home)
    }

    fn is_swapping_out(&self) -> bool {
        self.moves.values().any(|m| m.why == Why::SwapOut)
    }

    fn whole_blocks_here(&self, cx: &Cx, batch: &Batch, seq: SeqId) -> (u32, u32) {
        let count = |all| u32::try_from(self.candidates(cx, batch, seq, Place::Here, all).len()).unwrap_or(u32::MAX);
        (count(true), count(false))
    }
}

impl Moves {
    pub(crate) fn new(layers: u32, block_tokens: u32) -> Self {
        Self {
            issued: 0,
            moves: BTreeMap::new(),
            reads: BTreeMap::new(),
            tags: BTreeMap::new(),
            bytes_in_flight: 0,
            bytes_in_flight_max: MOVE_BYTES_IN_FLIGHT_MAX,
            pace: Pace::new(layers, block_tokens),
            status: MoveStatus::default(),
        }
    }

    pub(crate) fn set_bytes_in_flight_max(&mut self, bytes: u64) {
        self.bytes_in_flight_max = bytes;
    }

    pub(crate) fn status(&self) -> MoveStatus {
        MoveStatus { in_progress: self.moves.len(), tokens_per_step: self.pace.tokens(), ..self.status }
    }

    /// Number of own blocks reserved by a sequence's moves.
    pub(crate) fn reserved_here(&self, seq: SeqId) -> usize {
        let of = |m: &Move| m.items.iter().filter(|i| matches!(i.to, Placement::Local(_))).count();
        self.moves.values().filter(|m| m.seq == seq).map(of).sum()
    }

    /// Whether no move exists.
    pub(crate) fn is_empty(&self) -> bool {
        self.moves.is_empty()
    }

    /// Whether steps go on while KV is copied.
    pub(crate) fn overlaps(&self) -> bool {
        self.pace.overlaps()
    }

    /// Sets the pace of moves beside decoding.
    pub(crate) fn set_pace(&mut self, pace: MovePace) {
        self.pace.set(pace);
    }

    /// Hashing state of leases that moves write, for memory accounting.
    pub(crate) fn hashers(&self) -> impl Iterator<Item = &LeaseHasher> {
        self.moves.values().filter_map(|m| m.lease.as_ref()).map(|l| &l.hasher)
    }

    /// The creditor of a move's read.
    pub(crate) fn reads_at(&self, read: ReadId) -> Option<InstanceId> {
        let (no, block, _) = self.reads.get(&read)?;
        let item = self.moves.get(no)?.items.iter().find(|item| item.block == *block)?;
        match item.from {
            Placement::Remote(at) => Some(at.creditor),
            _ => None,
        }
    }
}

impl Move {
    /// Whether it has blocks reserved here and is not complete.
    fn comes_home(&self) -> bool {
        self.target == Place::Here && self.items.iter().any(|i| !i.verified)
    }
}

impl Item {
    /// Whether layers are requested and not copied, or the whole block is not verified.
    fn is_copying(&self, layers: u32) -> bool {
        let copied = if matches!(self.to, Placement::Local(_)) { self.stored } else { self.passed };
        self.asked > copied || (self.asked == layers && !self.verified)
    }
}

impl Moves {
    /// Whether a step waits for a copy.
    pub(crate) fn waits_for_copy(&self, cx: &Cx) -> bool {
        if self.pace.overlaps() {
            return false;
        }
        let layers = cx.config.kv.layers;
        self.moves.values().any(|m| m.items.iter().any(|i| i.is_copying(layers)))
    }

    /// Handles `move_kvcache` from the gManager. Answered once by a [`MoveOutcome`].
    pub(crate) fn on_move_order(&mut self, cx: &mut Cx, batch: &mut Batch, order: &MoveKvCache) {
        let place =
            |id: u32| if cx.standing.id == Some(InstanceId(id)) { Place::Here } else { Place::At(InstanceId(id)) };
        let (source, target) = (place(order.source), place(order.target));
        let purpose = match order.reason() {
            MoveReason::Swap => LeasePurpose::Swap,
            MoveReason::Plan | MoveReason::Drain | MoveReason::Operator => LeasePurpose::Move,
        };
        let why = Why::Order { number: order.order, reason: order.reason() };
        let target_addr = (target != Place::Here).then(|| order.target_addr.clone());
        let deadline_ms = cx.now_ms + u64::from(order.deadline_ms).min(MOVE_MS_MAX);
        let seq = SeqId(order.seq);
        let (blocks, first) = (order.blocks, order.first);
        let request = Request { seq, why, source, target, target_addr, blocks, first, purpose, deadline_ms };
        let frozen = batch.frozen().filter(|f| f.seq == seq);
        let swap = order.reason() == MoveReason::Swap;
        let started = if swap != frozen.is_some() || frozen.is_some_and(|f| f.cycle != order.cycle) {
            Err("frozen debts move with their cycle only".to_owned())
        } else {
            self.start_move(cx, batch, request)
        };
        if let Err(reason) = started {
            answer(cx, why, 0, reason, None);
        }
    }

    /// Blocks of a sequence at `source` that can move now and are in no move, ascending. Without `all`, shared local
    /// blocks stay: moving them frees nothing.
    fn candidates(&self, cx: &Cx, batch: &Batch, id: SeqId, source: Place, all: bool) -> Vec<(u32, Placement)> {
        let movable = |seq: &&Sequence| {
            seq.for_others.is_none() && seq.joint.is_none() && (seq.is_running() || batch.is_frozen(id))
        };
        let Some(seq) = batch.seq(id).filter(movable) else {
            return Vec::new();
        };
        let of = self.moves.values().filter(|m| m.seq == id);
        let moving: BTreeSet<u32> = of.flat_map(|m| m.items.iter().map(|i| i.block)).collect();
        let at_source = |placement: &Placement| match (placement, source) {
            (Placement::Local(block), Place::Here) => all || !cx.memory.rm.pool.is_shared(*block),
            (Placement::Remote(b), Place::At(creditor)) => {
                let held = seq.leases.get(&(b.creditor, b.lease));
                b.creditor == creditor && held.is_some_and(|h| h.is_whole(b.entry))
            }
            _ => false,
        };
        let movable = seq.blocks.movable();
        let blocks = movable.map(|block| (block, seq.blocks.placements()[block as usize]));
        blocks.filter(|(block, placement)| at_source(placement) && !moving.contains(block)).collect()
    }

    /// Chooses at most `n` of the candidates: the oldest local ones, or the newest remote ones, so that the newest
    /// blocks are local. With `first`, those from that block on.
    fn choose(
        &self,
        cx: &Cx,
        batch: &Batch,
        (id, why): (SeqId, Why),
        source: Place,
        first: Option<u32>,
        n: u32,
    ) -> Vec<(u32, Placement)> {
        let mut blocks = self.candidates(cx, batch, id, source, why == Why::SwapOut);
        blocks.retain(|(block, _)| first.is_none_or(|first| *block >= first));
        match source {
            _ if first.is_some() => blocks.truncate(n as usize),
            Place::Here => blocks.truncate(n as usize),
            Place::At(_) => drop(blocks.drain(..blocks.len().saturating_sub(n as usize))),
        }
        blocks
    }

    /// Starts to move a sequence's whole blocks to host memory. Ends in an [`Outcome::SwappedOut`].
    fn start_swap_out(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId, blocks: u32) {
        let (why, purpose, deadline_ms) = (Why::SwapOut, LeasePurpose::Move, cx.now_ms + SWAP_OUT_DEADLINE_MS);
        let (source, target) = (Place::Here, Place::At(InstanceId(0)));
        let (target_addr, first) = (None, None);
        let request = Request { seq, why, source, target, target_addr, blocks, first, purpose, deadline_ms };
        if self.start_move(cx, batch, request).is_err() {
            cx.emit(Outcome::SwappedOut { seq, all: false });
        }
    }

    fn start_move(&mut self, cx: &mut Cx, batch: &mut Batch, request: Request) -> Result<(), String> {
        let Request { seq, why, source, target, target_addr, blocks, first, purpose, deadline_ms } = request;
        if source == target {
            return Err("the source is the target".to_owned());
        }
        if self.moves.len() >= INSTANCE_MOVES_MAX {
            return Err(format!("{INSTANCE_MOVES_MAX} moves are in progress"));
        }
        let n = self.choose(cx, batch, (seq, why), source, first, blocks).len();
        let n = u32::try_from(n).unwrap_or(u32::MAX);
        if n == 0 {
            return Err(format!("{seq} has no whole blocks there that could move and that others do not share"));
        }
        let reason =
            if n < blocks { format!("only {n} blocks there were whole and in no move") } else { String::new() };
        let phase = match target {
            Place::Here => Phase::Copying,
            Place::At(instance) => {
                let at = target_addr.map(|addr| (instance, addr));
                Phase::Reserving(match why {
                    Why::SwapOut => {
                        cx.memory.rm.debtor.reserve(seq, None, n, LeasePurpose::Move, TierRequest::HostOnly, cx.now_ms)
                    }
                    Why::Order { .. } | Why::Recall => {
                        cx.memory.rm.debtor.reserve(seq, at, n, purpose, TierRequest::Any, cx.now_ms)
                    }
                })
            }
        };
        self.issued += 1;
        let no = self.issued;
        let entry = Move {
            seq,
            why,
            source,
            target,
            wanted: blocks,
            first,
            asked: n,
            moved: 0,
            deadline_ms,
            phase,
            lease: None,
            items: Vec::new(),
            reason,
            target_lendable: None,
        };
        self.moves.insert(no, entry);
        if target == Place::Here {
            self.reserve_here(cx, batch, no, n);
        }
        Ok(())
    }

    fn item(cx: &Cx, (block, from): (u32, Placement), to: Placement) -> Item {
        let kv = cx.config.kv;
        let layer_bytes = cx.config.block_tokens as usize * kv.layer_token_bytes();
        Item {
            block,
            from,
            to,
            asked: 0,
            paced: false,
            passed: 0,
            arrived: BTreeMap::new(),
            stored: 0,
            hasher: BlockHasher::new(kv.layers as usize, layer_bytes),
            hash: None,
            checks: Vec::new(),
            verified: false,
        }
    }

    /// Allocates own blocks for a move home: those free beyond the growth reserve.
    fn reserve_here(&mut self, cx: &mut Cx, batch: &mut Batch, no: u64, n: u32) {
        let room = batch.room(cx).saturating_sub(1);
        let Some(entry) = self.moves.get_mut(&no) else { return };
        if room < n {
            entry.reason = format!("this instance has room for {room} blocks beyond the blocks kept for growth");
        }
        let (seq, why, source, first) = (entry.seq, entry.why, entry.source, entry.first);
        let n = n.min(room);
        let chosen = self.choose(cx, batch, (seq, why), source, first, n);
        let logical: Vec<u32> = chosen.iter().map(|(block, _)| *block).collect();
        let Some(own) = (n > 0).then(|| cx.memory.rm.pool.allocate_for(seq, logical.into_iter(), None)).flatten()
        else {
            return self.close_move(cx, batch, no, "this instance has no room", false);
        };
        let items: Vec<Item> =
            chosen.into_iter().zip(&own).map(|(from, to)| Self::item(cx, from, Placement::Local(*to))).collect();
        if let Some(entry) = self.moves.get_mut(&no) {
            entry.items = items;
        }
    }

    fn move_of_borrow(&self, borrow: BorrowId) -> Option<u64> {
        let of = |m: &Move| matches!(m.phase, Phase::Reserving(b) if b == borrow);
        self.moves.iter().find(|(_, m)| of(m)).map(|(no, _)| *no)
    }

    /// The target has reserved blocks. Those not needed any more are released at once.
    pub(crate) fn on_reserved(&mut self, cx: &mut Cx, batch: &mut Batch, borrow: BorrowId, lease: &BorrowedLease) {
        let &BorrowedLease { creditor, lease: id, epoch, blocks, .. } = lease;
        let all = RemoteEntries { creditor, lease: id, epoch, first: 0, entries: blocks };
        let Some(no) = self.move_of_borrow(borrow) else { return cx.memory.rm.debtor.held.release(&all, cx.now_ms) };
        let kv = cx.config.kv;
        let hasher = LeaseHasher::new(kv.layers as usize, cx.config.block_tokens, kv.layer_token_bytes());
        let &Move { seq, why, source, first, .. } = &self.moves[&no];
        let to = |entry: u32| Placement::Remote(RemoteBlock { creditor, lease: id, epoch, entry });
        let connected = cx.peers.key(creditor).is_some() && source != Place::At(creditor);
        let chosen = if connected { self.choose(cx, batch, (seq, why), source, first, blocks) } else { Vec::new() };
        let items: Vec<Item> =
            chosen.into_iter().zip(0..).map(|(from, entry)| Self::item(cx, from, to(entry))).collect();
        let used = u32::try_from(items.len()).unwrap_or(u32::MAX);
        if used < blocks {
            cx.memory.rm.debtor.held.release(&RemoteEntries { first: used, ..all }, cx.now_ms);
        }
        let Some(entry) = self.moves.get_mut(&no) else { return };
        entry.phase = Phase::Copying;
        entry.items = items;
        entry.lease = Some(TargetLease { creditor, lease: id, epoch, hasher });
        if used < blocks {
            entry.reason = format!("only {used} blocks can move still");
        } else if blocks < entry.asked {
            entry.reason = format!("the target had room for {blocks} blocks");
        }
        if used == 0 {
            self.close_move(cx, batch, no, "its blocks or the target are gone", false);
        }
    }

    /// The target has too few blocks.
    pub(crate) fn on_not_reserved(&mut self, cx: &mut Cx, batch: &mut Batch, borrow: BorrowId, lendable: Option<u32>) {
        let Some(no) = self.move_of_borrow(borrow) else { return };
        self.status.refused += 1;
        if let Some(entry) = self.moves.get_mut(&no) {
            entry.target_lendable = lendable;
            entry.phase = Phase::Copying;
        }
        self.close_move(cx, batch, no, "the target has no room", false);
    }

    /// The creditor has verified entries.
    pub(crate) fn on_sealed(&mut self, cx: &mut Cx, creditor: InstanceId, lease: LeaseId, entries: &[u32]) {
        let of = |m: &&mut Move| m.lease.as_ref().is_some_and(|l| (l.creditor, l.lease) == (creditor, lease));
        let Some(entry) = self.moves.values_mut().find(of) else { return };
        let block_bytes = u64::from(cx.config.block_tokens) * cx.config.kv.token_bytes() as u64;
        let (seq, mut early) = (entry.seq, Vec::new());
        for item in &mut entry.items {
            let Placement::Remote(to) = item.to else { continue };
            // A creditor's report counts only for entries of which all layers were sent.
            if entries.contains(&to.entry) && item.hash.is_some() && !item.verified {
                item.verified = true;
                self.bytes_in_flight -= block_bytes;
                if !item.paced {
                    cx.peers.transferred(creditor, block_bytes, cx.now_ms);
                }
                early.extend(mutants::is(Mutant::FreedBeforeSwitched).then_some(item.from));
            }
        }
        free_sources(cx, seq, &early);
    }

    /// Switches sequences that are in no step to verified copies, and frees the sources.
    pub(crate) fn switch_moves(&mut self, cx: &mut Cx, batch: &mut Batch) {
        if self.moves.is_empty() {
            return;
        }
        let ready = |m: &Move| m.items.iter().any(|i| i.verified) && !batch.in_step(m.seq);
        let ready: Vec<u64> = self.moves.iter().filter(|(_, m)| ready(m)).map(|(no, _)| *no).collect();
        for no in ready {
            self.switch_move(cx, batch, no);
            self.end_if_done(cx, batch, no);
        }
    }

    fn switch_move(&mut self, cx: &mut Cx, batch: &mut Batch, no: u64) {
        let Some(entry) = self.moves.get_mut(&no) else { return };
        let id = entry.seq;
        if !batch.has(id) {
            return;
        }
        let mut freed: Vec<Placement> = Vec::new();
        for item in entry.items.extract_if(.., |item| item.verified) {
            let old = item.from;
            batch.switch_block(id, item.block, (old, item.to), item.hash);
            match item.to {
                Placement::Remote(_) => {}
                Placement::Local(b) => Advance { sealed: vec![b], ..Advance::default() }.mark(&mut cx.memory.rm.pool),
                Placement::Gone | Placement::Lost => panic!("a move has a target"),
            }
            freed.extend((!mutants::is(Mutant::FreedBeforeSwitched)).then_some(old));
            entry.moved += 1;
            self.status.count(entry.why, entry.source, entry.target);
        }
        free_sources(cx, id, &freed);
        if batch.is_running(id) {
            let micro_batch = batch.micro_batch_of(id);
            batch.set_micro_batch(id, micro_batch);
            batch.changed();
        }
    }

    fn end_if_done(&mut self, cx: &mut Cx, batch: &mut Batch, no: u64) {
        let done = |m: &&Move| m.items.is_empty() && matches!(m.phase, Phase::Copying);
        if self.moves.get(&no).filter(done).is_none() {
            return;
        }
        let Some(entry) = self.moves.remove(&no) else { return };
        batch.touch();
        self.reads.retain(|_, (of, _, _)| *of != no);
        self.tags.retain(|_, (of, _, _)| *of != no);
        let all = entry.moved >= entry.wanted;
        self.status.cut_short += u64::from(!all);
        if entry.why == Why::SwapOut {
            cx.emit(Outcome::SwappedOut { seq: entry.seq, all });
        }
        assert!(all || !entry.reason.is_empty(), "a move that is cut short says why");
        if !all {
            let Move { seq, moved, wanted, reason, .. } = &entry;
            tracing::debug!(%seq, moved, wanted, reason, "a move was cut short");
        }
        let reason = if all { String::new() } else { entry.reason };
        answer(cx, entry.why, entry.moved, reason, entry.target_lendable);
    }

    /// Ends a move and frees blocks reserved and not switched to. With `keep`, verified blocks are still switched to at
    /// the end of the sequence's step.
    fn close_move(&mut self, cx: &mut Cx, batch: &mut Batch, no: u64, reason: &str, keep: bool) {
        let Some(entry) = self.moves.get_mut(&no) else { return };
        if let Phase::Reserving(borrow) = entry.phase {
            cx.memory.rm.debtor.cancel(borrow, cx.now_ms);
            entry.phase = Phase::Copying;
        }
        reason.clone_into(&mut entry.reason);
        let id = entry.seq;
        let layer_bytes = u64::from(cx.config.block_tokens) * cx.config.kv.layer_token_bytes() as u64;
        let gone = |item: &Item| {
            batch.seq(id).is_none_or(|s| s.blocks.placements().get(item.block as usize) != Some(&item.from))
        };
        let dropped: Vec<Item> = entry.items.extract_if(.., |i| !keep || !i.verified || gone(i)).collect();
        let (mut own, mut entries): (Vec<PhysBlock>, Vec<RemoteEntries>) = (Vec::new(), Vec::new());
        for item in dropped {
            if !item.verified {
                self.bytes_in_flight -= u64::from(item.asked) * layer_bytes;
            }
            match item.to {
                Placement::Local(b) => own.push(b),
                Placement::Remote(b) => push_entry(&mut entries, &b),
                Placement::Gone | Placement::Lost => panic!("a move has a target"),
            }
        }
        entries.iter().for_each(|e| cx.memory.rm.debtor.held.release(e, cx.now_ms));
        cx.memory.rm.pool.free(Owner::Own(id), &own);
        self.end_if_done(cx, batch, no);
    }

    /// Ends the youngest move home, to free its reserved blocks for growth.
    fn end_a_move_home(&mut self, cx: &mut Cx, batch: &mut Batch) {
        if let Some(no) = self.moves.iter().rev().find(|(_, m)| m.comes_home()).map(|(no, _)| *no) {
            self.close_move(cx, batch, no, "the room was needed for growth", true);
        }
    }

    /// Ends the moves for which `which` is true.
    fn close_moves(&mut self, cx: &mut Cx, batch: &mut Batch, reason: &str, keep: bool, which: impl Fn(&Move) -> bool) {
        let hit: Vec<u64> = self.moves.iter().filter(|(_, m)| which(m)).map(|(no, _)| *no).collect();
        hit.into_iter().for_each(|no| self.close_move(cx, batch, no, reason, keep));
    }

    /// Ends the moves of a sequence that frees its memory.
    fn end_moves_of(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId) {
        self.close_moves(cx, batch, "the sequence gave its memory up", false, |m| m.seq == seq);
    }

    /// Ends moves of blocks behind the sequence's window. A lease is written in order, so the whole move ends.
    pub(crate) fn end_moves_behind_window(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId) {
        let Some(gone) = batch.seq(seq).map(|s| s.blocks.movable().start) else { return };
        let hit = |m: &Move| m.seq == seq && m.items.iter().any(|i| i.block < gone);
        self.close_moves(cx, batch, "the window moved past its blocks", true, hit);
    }

    /// Ends the moves with a lost creditor, as source or target: of one sequence, or of all (`None`).
    pub(crate) fn end_moves_with(&mut self, cx: &mut Cx, batch: &mut Batch, creditor: InstanceId, seq: Option<SeqId>) {
        let at = |m: &Move| {
            let target = m.lease.as_ref().map(|l| l.creditor);
            m.source == Place::At(creditor) || target == Some(creditor)
        };
        self.close_moves(cx, batch, "an instance was lost", false, |m| at(m) && seq.is_none_or(|s| s == m.seq));
    }

    /// Ends the move that writes to a lease which has ended; with `keep`, verified blocks are still switched to. False
    /// if there is no such move.
    pub(crate) fn end_move_to(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        creditor: InstanceId,
        lease: LeaseId,
        reason: &str,
        keep: bool,
    ) -> bool {
        let to = |m: &Move| m.lease.as_ref().is_some_and(|l| (l.creditor, l.lease) == (creditor, lease));
        let hit = self.moves.values().any(&to);
        self.close_moves(cx, batch, reason, keep, to);
        hit
    }

    /// Ends moves past their deadline.
    pub(crate) fn expire_moves(&mut self, cx: &mut Cx, batch: &mut Batch) {
        self.pace.tick();
        if self.moves.is_empty() {
            return;
        }
        let now = cx.now_ms;
        let late = |m: &Move| {
            m.deadline_ms <= now && (matches!(m.phase, Phase::Reserving(_)) || m.items.iter().any(|i| !i.verified))
        };
        self.close_moves(cx, batch, "the deadline is over", true, late);
    }
}

/// A move to start.
#[derive(Debug)]
struct Request {
    seq: SeqId,
    why: Why,
    source: Place,
    target: Place,
    /// Address of the target; `None` if the gManager chooses it, or for a move home.
    target_addr: Option<String>,
    blocks: u32,
    first: Option<u32>,
    purpose: LeasePurpose,
    deadline_ms: u64,
}

/// Reports the outcome of an order to the gManager, once.
fn answer(cx: &mut Cx, why: Why, moved: u32, reason: String, target_lendable: Option<u32>) {
    let Why::Order { number: order, .. } = why else { return };
    let outcome = MoveOutcome { order, moved, reason, target_lendable };
    cx.effects.push(Effect::ToGManager(ControlBody::MoveOutcome(outcome)));
}

/// Frees the source places of moved blocks.
fn free_sources(cx: &mut Cx, seq: SeqId, sources: &[Placement]) {
    let mut entries: Vec<RemoteEntries> = Vec::new();
    for source in sources {
        match source {
            Placement::Local(b) => cx.memory.rm.pool.free(Owner::Own(seq), &[*b]),
            Placement::Remote(b) => push_entry(&mut entries, b),
            Placement::Gone | Placement::Lost => panic!("a block that moves has a place"),
        }
    }
    entries.iter().for_each(|entries| cx.memory.rm.debtor.held.release(entries, cx.now_ms));
}
