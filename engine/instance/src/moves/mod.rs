//! Movement of a sequence's rBlocks between instances, on the debtor that runs it (Infinite-LLM v2 §6.2): to a creditor,
//! home, or from one creditor to another through the debtor. Who decides is elsewhere: the gManager's orders and
//! creditors' recalls come in here.
//!
//! A move reserves at the target before any byte moves; copies blocks that are whole, one layer of one block at a time
//! (`copy.rs`), beside decoding and at its pace (`pace.rs`); verifies each by its content's hash; switches the block
//! table when its sequence is in no step; and only then frees the source. Invariants:
//! * the table lists each position once, at the source until the switch and at the target from then on;
//! * a block is in at most one move;
//! * whatever ends a move early (its sequence, source or target is gone, its deadline is over) frees what is reserved
//!   at the target and not switched to, once, and leaves the source as it is.

mod copy;
mod pace;
mod recall;
mod status;

pub use pace::MovePace;
pub use status::{MoveStatus, MovedBlocks};

use crate::batch::sequence::HeldLease;
use crate::event::Effect;
use crate::instance::Instance;
use bytes::Bytes;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_cluster::{BorrowId, BorrowedLease};
use lagoon_kv::hash::ContentHash;
use lagoon_kv::seq::push_entry;
use lagoon_kv::{Advance, BlockHasher, LeaseHasher, Placement, RemoteBlock, RemoteEntries};
use lagoon_protocol::{ControlBody, LeasePurpose, MoveKvCache, MoveOutcome, MoveReason};
use lagoon_runner::RemoteTag;
use lagoon_transfer::Check;
use lagoon_types::limits::{INSTANCE_MOVES_MAX, MOVE_BYTES_IN_FLIGHT_MAX, MOVE_MS_MAX, SWAP_OUT_DEADLINE_MS};
use lagoon_types::{Epoch, InstanceId, LeaseId, PhysBlock, SeqId};
use pace::Pace;
use std::collections::{BTreeMap, BTreeSet};

/// One end of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Here,
    At(InstanceId),
}

/// Who wants a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// The gManager's order of this number.
    Order {
        number: u64,
        reason: MoveReason,
    },
    Recall,
    /// The sequence is to stop, with its KV in host memory.
    SwapOut,
}

#[derive(Debug)]
enum Phase {
    /// Negotiates with the target.
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
    /// Layers that were asked for at the source.
    asked: u32,
    /// Some of it waited for the pace: its time says nothing of the link.
    paced: bool,
    /// Layers that were handed to the target, in order.
    passed: u32,
    /// Layers that came from the source and wait for their turn.
    arrived: BTreeMap<u32, Bytes>,
    /// Layers that this instance's device has stored, of a block that comes home.
    stored: u32,
    hasher: BlockHasher,
    hash: Option<ContentHash>,
    /// Of each layer that was handed on, where its source is known by those.
    checks: Vec<Check>,
    /// The copy is whole and its content is right: the sequence may switch to it.
    verified: bool,
}

#[derive(Debug)]
struct Move {
    seq: SeqId,
    why: Why,
    source: Place,
    target: Place,
    wanted: u32,
    /// The first block that may move, where an operator says so.
    first: Option<u32>,
    /// Blocks that were asked for at the target.
    asked: u32,
    moved: u32,
    deadline_ms: u64,
    phase: Phase,
    lease: Option<TargetLease>,
    /// Ascending in block, and in entry of the target's lease.
    items: Vec<Item>,
    /// Why not all of it moves.
    reason: String,
    target_lendable: Option<u32>,
}

/// State of movement.
#[derive(Debug)]
pub(crate) struct Moves {
    issued: u64,
    /// By number: the oldest first.
    moves: BTreeMap<u64, Move>,
    /// Reads in flight at creditors: move, block and layer.
    reads: BTreeMap<u64, (u64, u32, u32)>,
    /// Reads and writes of this instance's own store: move, block and layer.
    tags: BTreeMap<RemoteTag, (u64, u32, u32)>,
    /// Bytes that were asked for and are not verified yet.
    bytes_in_flight: u64,
    /// At most so many, or two blocks.
    bytes_in_flight_max: u64,
    /// Sequences whose move to host memory ended, and whether all of it did move.
    pub(crate) swapped_out: Vec<(SeqId, bool)>,
    pub(crate) pace: Pace,
    pub(crate) status: MoveStatus,
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
            swapped_out: Vec::new(),
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

    /// Own blocks that a sequence's moves have reserved.
    pub(crate) fn reserved_here(&self, seq: SeqId) -> usize {
        let of = |m: &Move| m.items.iter().filter(|i| matches!(i.to, Placement::Local(_))).count();
        self.moves.values().filter(|m| m.seq == seq).map(of).sum()
    }

    /// Whether nothing moves, and nothing that moved waits to be heard of.
    pub(crate) fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.swapped_out.is_empty()
    }

    /// Whether a sequence's blocks move to host memory, so that it stops: whatever became of the sequence meanwhile.
    pub(crate) fn is_swapping_out(&self) -> bool {
        !self.swapped_out.is_empty() || self.moves.values().any(|m| m.why == Why::SwapOut)
    }

    /// Whether a sequence moves.
    pub(crate) fn is_moving(&self, seq: SeqId) -> bool {
        self.moves.values().any(|m| m.seq == seq)
    }

    /// Hashing state of leases that moves write, for accounting.
    pub(crate) fn hashers(&self) -> impl Iterator<Item = &LeaseHasher> {
        self.moves.values().filter_map(|m| m.lease.as_ref()).map(|l| &l.hasher)
    }

    /// Whether a read at a creditor is a move's.
    pub(crate) fn reads(&self, id: u64) -> bool {
        self.reads.contains_key(&id)
    }
}

impl Item {
    /// Some of it was asked for and is not copied, or is whole and not verified.
    fn is_copying(&self, layers: u32) -> bool {
        let copied = if matches!(self.to, Placement::Local(_)) { self.stored } else { self.passed };
        self.asked > copied || (self.asked == layers && !self.verified)
    }
}

impl Instance {
    /// Sets how KV moves beside decoding.
    pub fn set_move_pace(&mut self, pace: MovePace) {
        self.moves.pace.set(pace);
    }

    /// Whether a step waits for a copy.
    pub(crate) fn waits_for_copy(&self) -> bool {
        if self.moves.pace.overlaps() {
            return false;
        }
        let layers = self.cx.config.kv.layers;
        self.moves.moves.values().any(|m| m.items.iter().any(|i| i.is_copying(layers)))
    }

    /// `move_kvcache` from the gManager. Answered once by a [`MoveOutcome`].
    pub(crate) fn on_move_order(&mut self, order: &MoveKvCache) {
        let place =
            |id: u32| if self.membership.id == Some(InstanceId(id)) { Place::Here } else { Place::At(InstanceId(id)) };
        let (source, target) = (place(order.source), place(order.target));
        let purpose = match order.reason() {
            MoveReason::Swap => LeasePurpose::Swap,
            MoveReason::Plan | MoveReason::Drain | MoveReason::Operator => LeasePurpose::Move,
        };
        let why = Why::Order { number: order.order, reason: order.reason() };
        let target_addr = (target != Place::Here).then(|| order.target_addr.clone());
        let deadline_ms = self.cx.now_ms + u64::from(order.deadline_ms).min(MOVE_MS_MAX);
        let seq = SeqId(order.seq);
        let (blocks, first) = (order.blocks, order.first);
        let request = Request { seq, why, source, target, target_addr, blocks, first, purpose, deadline_ms };
        let frozen = self.batch.frozen().filter(|f| f.seq == seq);
        let swap = order.reason() == MoveReason::Swap;
        let started = if swap != frozen.is_some() || frozen.is_some_and(|f| f.cycle != order.cycle) {
            Err("frozen debts move with their cycle only".to_owned())
        } else {
            self.start_move(request)
        };
        if let Err(reason) = started {
            self.outcome(why, 0, reason, None);
        }
    }

    fn outcome(&mut self, why: Why, moved: u32, reason: String, target_lendable: Option<u32>) {
        let Why::Order { number: order, .. } = why else { return };
        let outcome = MoveOutcome { order, moved, reason, target_lendable };
        self.cx.effects.push(Effect::ToGManager(ControlBody::MoveOutcome(outcome)));
    }

    /// Blocks of a sequence at `source` that can move now and are in no move, ascending. What is here and others share stays,
    /// as moving it frees nothing, but for a sequence that is to leave nothing here.
    fn candidates(&self, id: SeqId, source: Place, all: bool) -> Vec<(u32, Placement)> {
        let movable = !self.prefill.is_job(id) && (self.batch.is_running(id) || self.batch.is_frozen(id));
        let Some(seq) = self.batch.seq(id).filter(|_| movable) else {
            return Vec::new();
        };
        let of = self.moves.moves.values().filter(|m| m.seq == id);
        let moving: BTreeSet<u32> = of.flat_map(|m| m.items.iter().map(|i| i.block)).collect();
        let at_source = |placement: &Placement| match (placement, source) {
            (Placement::Local(block), Place::Here) => all || !self.cx.memory.rm.pool().is_shared(*block),
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

    /// Chooses at most `n` of the candidates: the oldest of those that leave, the newest of those that are elsewhere, so
    /// that what stays local is the end of the sequence and is one run. With `first`, those from that block on.
    fn choose(&self, (id, why): (SeqId, Why), source: Place, first: Option<u32>, n: u32) -> Vec<(u32, Placement)> {
        let mut blocks = self.candidates(id, source, why == Why::SwapOut);
        blocks.retain(|(block, _)| first.is_none_or(|first| *block >= first));
        match source {
            _ if first.is_some() => blocks.truncate(n as usize),
            Place::Here => blocks.truncate(n as usize),
            Place::At(_) => drop(blocks.drain(..blocks.len().saturating_sub(n as usize))),
        }
        blocks
    }

    /// Whole blocks of a sequence that lie here and could move, and those of them that nobody shares.
    pub(crate) fn whole_blocks_here(&self, seq: SeqId) -> (u32, u32) {
        let count = |all| u32::try_from(self.candidates(seq, Place::Here, all).len()).unwrap_or(u32::MAX);
        (count(true), count(false))
    }

    /// Starts to move a sequence's whole blocks to host memory. [`Instance::end_swap_out`] hears how that ended.
    pub(crate) fn start_swap_out(&mut self, seq: SeqId, blocks: u32) -> bool {
        let (why, purpose, deadline_ms) = (Why::SwapOut, LeasePurpose::Move, self.cx.now_ms + SWAP_OUT_DEADLINE_MS);
        let (source, target) = (Place::Here, Place::At(InstanceId(0)));
        self.start_move(Request {
            seq,
            why,
            source,
            target,
            target_addr: None,
            blocks,
            first: None,
            purpose,
            deadline_ms,
        })
        .is_ok()
    }

    fn start_move(&mut self, request: Request) -> Result<(), String> {
        let Request { seq, why, source, target, target_addr, blocks, first, purpose, deadline_ms } = request;
        if source == target {
            return Err("the source is the target".to_owned());
        }
        if self.moves.moves.len() >= INSTANCE_MOVES_MAX {
            return Err(format!("{INSTANCE_MOVES_MAX} moves are in progress"));
        }
        let n = self.choose((seq, why), source, first, blocks).len();
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
                    Why::SwapOut => self.cx.memory.rm.reserve_host(seq, n, self.cx.now_ms),
                    Why::Order { .. } | Why::Recall => self.cx.memory.rm.reserve(seq, at, n, purpose, self.cx.now_ms),
                })
            }
        };
        self.moves.issued += 1;
        let no = self.moves.issued;
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
        self.moves.moves.insert(no, entry);
        if target == Place::Here {
            self.reserve_here(no, n);
        }
        Ok(())
    }

    fn item(&self, (block, from): (u32, Placement), to: Placement) -> Item {
        let kv = self.cx.config.kv;
        let layer_bytes = self.cx.config.block_tokens as usize * kv.layer_token_bytes();
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

    /// Own blocks for what comes home: as many as are free beside those that are kept for growth.
    fn reserve_here(&mut self, no: u64, n: u32) {
        let room = self.room().saturating_sub(1);
        let Some(entry) = self.moves.moves.get_mut(&no) else { return };
        if room < n {
            entry.reason = format!("this instance has room for {room} blocks beside what is kept for growth");
        }
        let (seq, why, source, first) = (entry.seq, entry.why, entry.source, entry.first);
        let n = n.min(room);
        let chosen = self.choose((seq, why), source, first, n);
        let logical: Vec<u32> = chosen.iter().map(|(block, _)| *block).collect();
        let Some(own) = (n > 0).then(|| self.cx.memory.rm.allocate(seq, logical.into_iter(), None)).flatten() else {
            return self.close_move(no, "this instance has no room", false);
        };
        let items: Vec<Item> =
            chosen.into_iter().zip(&own).map(|(from, to)| self.item(from, Placement::Local(*to))).collect();
        if let Some(entry) = self.moves.moves.get_mut(&no) {
            entry.items = items;
        }
    }

    fn move_of_borrow(&self, borrow: BorrowId) -> Option<u64> {
        let of = |m: &Move| matches!(m.phase, Phase::Reserving(b) if b == borrow);
        self.moves.moves.iter().find(|(_, m)| of(m)).map(|(no, _)| *no)
    }

    /// The target reserved blocks. What is not needed any more is given back at once.
    pub(crate) fn on_reserved(&mut self, borrow: BorrowId, lease: &BorrowedLease) {
        let &BorrowedLease { creditor, lease: id, epoch, blocks, .. } = lease;
        let all = RemoteEntries { creditor, lease: id, epoch, first: 0, entries: blocks };
        let Some(no) = self.move_of_borrow(borrow) else { return self.cx.memory.rm.release(&all, self.cx.now_ms) };
        let kv = self.cx.config.kv;
        let hasher = LeaseHasher::new(kv.layers as usize, self.cx.config.block_tokens, kv.layer_token_bytes());
        let &Move { seq, why, source, first, .. } = &self.moves.moves[&no];
        let to = |entry: u32| Placement::Remote(RemoteBlock { creditor, lease: id, epoch, entry });
        let connected = self.cx.peers.key(creditor).is_some() && source != Place::At(creditor);
        let chosen = if connected { self.choose((seq, why), source, first, blocks) } else { Vec::new() };
        let items: Vec<Item> = chosen.into_iter().zip(0..).map(|(from, entry)| self.item(from, to(entry))).collect();
        let used = u32::try_from(items.len()).unwrap_or(u32::MAX);
        if used < blocks {
            self.cx.memory.rm.release(&RemoteEntries { first: used, ..all }, self.cx.now_ms);
        }
        let Some(entry) = self.moves.moves.get_mut(&no) else { return };
        entry.phase = Phase::Copying;
        entry.items = items;
        entry.lease = Some(TargetLease { creditor, lease: id, epoch, hasher });
        if used < blocks {
            entry.reason = format!("only {used} blocks can move still");
        } else if blocks < entry.asked {
            entry.reason = format!("the target had room for {blocks} blocks");
        }
        if used == 0 {
            self.close_move(no, "its blocks or the target are gone", false);
        }
    }

    /// No target has room.
    pub(crate) fn on_not_reserved(&mut self, borrow: BorrowId, lendable: Option<u32>) {
        let Some(no) = self.move_of_borrow(borrow) else { return };
        self.moves.status.refused += 1;
        if let Some(entry) = self.moves.moves.get_mut(&no) {
            entry.target_lendable = lendable;
            entry.phase = Phase::Copying;
        }
        self.close_move(no, "the target has no room", false);
    }

    /// The creditor has verified entries.
    pub(crate) fn on_sealed(&mut self, creditor: InstanceId, lease: LeaseId, entries: &[u32]) {
        let of = |m: &&mut Move| m.lease.as_ref().is_some_and(|l| (l.creditor, l.lease) == (creditor, lease));
        let Some(entry) = self.moves.moves.values_mut().find(of) else { return };
        let block_bytes = u64::from(self.cx.config.block_tokens) * self.cx.config.kv.token_bytes() as u64;
        let (seq, mut early) = (entry.seq, Vec::new());
        for item in &mut entry.items {
            let Placement::Remote(to) = item.to else { continue };
            // Only what was passed on whole can have been verified, whatever the creditor says.
            if entries.contains(&to.entry) && item.hash.is_some() && !item.verified {
                item.verified = true;
                self.moves.bytes_in_flight -= block_bytes;
                if !item.paced {
                    self.cx.peers.transferred(creditor, block_bytes, self.cx.now_ms);
                }
                early.extend(mutants::is(Mutant::FreedBeforeSwitched).then_some(item.from));
            }
        }
        self.free_sources(seq, &early);
    }

    /// Frees where blocks of a sequence were before they moved.
    fn free_sources(&mut self, seq: SeqId, sources: &[Placement]) {
        let mut entries: Vec<RemoteEntries> = Vec::new();
        for source in sources {
            match source {
                Placement::Local(b) => self.cx.memory.rm.free(seq, &[*b]),
                Placement::Remote(b) => push_entry(&mut entries, b),
                Placement::Gone | Placement::Lost => panic!("a block that moves has a place"),
            }
        }
        entries.iter().for_each(|entries| self.cx.memory.rm.release(entries, self.cx.now_ms));
    }

    /// Switches sequences that are in no step to what is verified, and frees the sources.
    pub(crate) fn switch_moves(&mut self) {
        if self.moves.moves.is_empty() {
            return;
        }
        let ready = |m: &Move| m.items.iter().any(|i| i.verified) && !self.batch.in_step(m.seq);
        let ready: Vec<u64> = self.moves.moves.iter().filter(|(_, m)| ready(m)).map(|(no, _)| *no).collect();
        for no in ready {
            self.switch_move(no);
            self.end_if_done(no);
        }
    }

    fn switch_move(&mut self, no: u64) {
        let Some(entry) = self.moves.moves.get_mut(&no) else { return };
        let id = entry.seq;
        let Some(seq) = self.batch.seq_mut(id) else { return };
        let mut freed: Vec<Placement> = Vec::new();
        for item in entry.items.extract_if(.., |item| item.verified) {
            let old = seq.blocks.relocate(item.block, item.to);
            assert_eq!(old, item.from, "a block that moves stays where it is until the switch");
            match item.to {
                Placement::Remote(b) => {
                    let held = seq.leases.entry((b.creditor, b.lease)).or_insert_with(HeldLease::for_move);
                    held.blocks += 1;
                    held.hashes.insert(b.entry, item.hash.expect("verified by it"));
                }
                Placement::Local(b) => {
                    self.cx.memory.rm.mark_written(&Advance { sealed: vec![b], ..Advance::default() })
                }
                Placement::Gone | Placement::Lost => panic!("a move has a target"),
            }
            if let Placement::Remote(b) = old {
                seq.forget_entries(&RemoteEntries::one(&b));
            }
            freed.extend((!mutants::is(Mutant::FreedBeforeSwitched)).then_some(old));
            entry.moved += 1;
            self.moves.status.count(entry.why, entry.source, entry.target);
        }
        self.free_sources(id, &freed);
        if self.batch.is_running(id) {
            let micro_batch = self.batch.micro_batch_of(id);
            self.batch.set_micro_batch(id, micro_batch);
            self.batch.changed();
        }
    }

    fn end_if_done(&mut self, no: u64) {
        let done = |m: &&Move| m.items.is_empty() && matches!(m.phase, Phase::Copying);
        if self.moves.moves.get(&no).filter(done).is_none() {
            return;
        }
        let Some(entry) = self.moves.moves.remove(&no) else { return };
        self.batch.due.touch();
        self.moves.reads.retain(|_, (of, _, _)| *of != no);
        self.moves.tags.retain(|_, (of, _, _)| *of != no);
        let all = entry.moved >= entry.wanted;
        self.moves.status.cut_short += u64::from(!all);
        if entry.why == Why::SwapOut {
            self.moves.swapped_out.push((entry.seq, all));
        }
        assert!(all || !entry.reason.is_empty(), "a move that is cut short says why");
        if !all {
            let Move { seq, moved, wanted, reason, .. } = &entry;
            tracing::debug!(%seq, moved, wanted, reason, "a move was cut short");
        }
        let reason = if all { String::new() } else { entry.reason };
        self.outcome(entry.why, entry.moved, reason, entry.target_lendable);
    }

    /// Ends a move: what is reserved and not switched to is given back. With `keep`, blocks that are verified are still
    /// switched to at the end of the sequence's step.
    fn close_move(&mut self, no: u64, reason: &str, keep: bool) {
        let Some(entry) = self.moves.moves.get_mut(&no) else { return };
        if let Phase::Reserving(borrow) = entry.phase {
            self.cx.memory.rm.cancel(borrow, self.cx.now_ms);
            entry.phase = Phase::Copying;
        }
        reason.clone_into(&mut entry.reason);
        let id = entry.seq;
        let layer_bytes = u64::from(self.cx.config.block_tokens) * self.cx.config.kv.layer_token_bytes() as u64;
        let gone = |item: &Item| {
            self.batch.seq(id).is_none_or(|s| s.blocks.placements().get(item.block as usize) != Some(&item.from))
        };
        let dropped: Vec<Item> = entry.items.extract_if(.., |i| !keep || !i.verified || gone(i)).collect();
        let (mut own, mut entries): (Vec<PhysBlock>, Vec<RemoteEntries>) = (Vec::new(), Vec::new());
        for item in dropped {
            if !item.verified {
                self.moves.bytes_in_flight -= u64::from(item.asked) * layer_bytes;
            }
            match item.to {
                Placement::Local(b) => own.push(b),
                Placement::Remote(b) => push_entry(&mut entries, &b),
                Placement::Gone | Placement::Lost => panic!("a move has a target"),
            }
        }
        entries.iter().for_each(|e| self.cx.memory.rm.release(e, self.cx.now_ms));
        self.cx.memory.rm.free(id, &own);
        self.end_if_done(no);
    }

    /// What moves home makes room for growth: the youngest such move ends. False if there is none.
    pub(crate) fn end_a_move_home(&mut self) -> bool {
        let home = |m: &Move| m.target == Place::Here && m.items.iter().any(|i| !i.verified);
        let Some(no) = self.moves.moves.iter().rev().find(|(_, m)| home(m)).map(|(no, _)| *no) else { return false };
        self.close_move(no, "the room was needed for growth", true);
        true
    }

    /// Ends the moves for which `which` says so, with a reason.
    fn close_moves(&mut self, reason: &str, keep: bool, which: impl Fn(&Move) -> bool) {
        let hit: Vec<u64> = self.moves.moves.iter().filter(|(_, m)| which(m)).map(|(no, _)| *no).collect();
        hit.into_iter().for_each(|no| self.close_move(no, reason, keep));
    }

    /// A sequence gives up its memory here.
    pub(crate) fn end_moves_of(&mut self, seq: SeqId, reason: &str) {
        self.close_moves(reason, false, |m| m.seq == seq);
    }

    /// Blocks of a sequence fell behind its window. A lease is written in order, so the rest of the move ends.
    pub(crate) fn end_moves_behind_window(&mut self, seq: SeqId) {
        let Some(gone) = self.batch.seq(seq).map(|s| s.blocks.movable().start) else { return };
        let hit = |m: &Move| m.seq == seq && m.items.iter().any(|i| i.block < gone);
        self.close_moves("the window moved past its blocks", true, hit);
    }

    /// A creditor is lost, as source or target: of one sequence, or of all.
    pub(crate) fn end_moves_with(&mut self, creditor: InstanceId, seq: Option<SeqId>) {
        let at = |m: &Move| {
            let target = m.lease.as_ref().map(|l| l.creditor);
            m.source == Place::At(creditor) || target == Some(creditor)
        };
        self.close_moves("an instance was lost", false, |m| at(m) && seq.is_none_or(|s| s == m.seq));
    }

    /// A lease that a move writes to is of no use; with `keep`, but for what is verified. Says whether there is such a
    /// move.
    pub(crate) fn end_move_to(&mut self, creditor: InstanceId, lease: LeaseId, reason: &str, keep: bool) -> bool {
        let to = |m: &Move| m.lease.as_ref().is_some_and(|l| (l.creditor, l.lease) == (creditor, lease));
        let hit = self.moves.moves.values().any(&to);
        self.close_moves(reason, keep, to);
        hit
    }

    /// Moves whose time is over end.
    pub(crate) fn expire_moves(&mut self) {
        self.moves.pace.tick();
        if self.moves.moves.is_empty() {
            return;
        }
        let now = self.cx.now_ms;
        let late = |m: &Move| {
            m.deadline_ms <= now && (matches!(m.phase, Phase::Reserving(_)) || m.items.iter().any(|i| !i.verified))
        };
        self.close_moves("the deadline is over", true, late);
    }
}

/// A move to start.
#[derive(Debug)]
struct Request {
    seq: SeqId,
    why: Why,
    source: Place,
    target: Place,
    /// `None` for whoever the gManager names, if the target is not here.
    target_addr: Option<String>,
    blocks: u32,
    first: Option<u32>,
    purpose: LeasePurpose,
    deadline_ms: u64,
}
