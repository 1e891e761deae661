//! The copy of a move: one layer of one block at a time, from source to target, and its verification.
//!
//! Each read covers at most one layer of one block, so that the device is never held for long. All reads are bounded by
//! bytes in flight, and beside a step by the pace. A lease is written block by block in ascending order.

use super::{Item, Move, Moves, Place, free_sources};
use crate::batch::Batch;
use crate::batch::sequence::LayerChecks;
use crate::cx::Cx;
use crate::cx::tags::{ReadId, ReadOwner, TagOwner};
use crate::event::Effect;
use crate::outcome::{Lost, LostPart, Outcome};
use bytes::Bytes;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_kv::Placement;
use lagoon_kv::hash::ContentHash;
use lagoon_protocol::{BulkFrame, RefuseCode};
use lagoon_runner::{Command, RemoteRead, RemoteTag, RemoteWrite};
use lagoon_transfer::Check;
use lagoon_types::limits::{MOVE_RESERVE_MS, MOVE_WINDOW_MS};
use lagoon_types::{InstanceId, LeaseId, SeqId};
use std::ops::Range;

fn layer_bytes(cx: &Cx) -> u64 {
    u64::from(cx.config.block_tokens) * cx.config.kv.layer_token_bytes() as u64
}

impl Moves {
    /// Reads from sources as much as may move now, the oldest move first.
    pub(super) fn pump_moves(&mut self, cx: &mut Cx, batch: &mut Batch, steps: bool) {
        if self.moves.is_empty() {
            return;
        }
        let layers = cx.config.kv.layers;
        let layer_bytes = layer_bytes(cx);
        let numbers: Vec<u64> = self.moves.keys().copied().collect();
        for no in numbers {
            let most = self.window(cx, no).max(2 * layer_bytes);
            loop {
                let busy = steps || !self.pace.overlaps() && batch.running_len() > 0;
                if busy && !self.pace.allows() {
                    return;
                }
                if self.bytes_in_flight + layer_bytes > most {
                    break;
                }
                let next = self.moves.get_mut(&no).and_then(|m| m.items.iter_mut().find(|i| i.asked < layers));
                let Some(item) = next else { break };
                let (block, layer, from) = (item.block, item.asked, item.from);
                item.asked += 1;
                self.bytes_in_flight += layer_bytes;
                item.paced |= busy;
                if busy {
                    self.pace.spend();
                }
                if !self.ask(cx, (no, block, layer), from, steps) {
                    self.close_move(cx, batch, no, "the source is not connected", true);
                    break;
                }
            }
        }
    }

    /// Limit of bytes in flight while a move goes on: enough to keep the slower of its links busy.
    fn window(&self, cx: &Cx, no: u64) -> u64 {
        let Some(entry) = self.moves.get(&no) else { return 0 };
        let ends = [entry.source, entry.target];
        let creditors = ends.iter().filter_map(|p| if let Place::At(creditor) = p { Some(*creditor) } else { None });
        let creditors = creditors.chain(entry.lease.as_ref().map(|l| l.creditor));
        let known = |creditor| cx.peers.key(creditor).and_then(|peer| cx.peers.known(peer));
        let rates = creditors.filter_map(known).map(|k| k.bytes_per_s).filter(|rate| *rate > 0);
        let carried = rates.min().map(|rate| rate.saturating_mul(MOVE_WINDOW_MS) / 1_000);
        carried.map_or(self.bytes_in_flight_max, |bytes| bytes.min(self.bytes_in_flight_max))
    }

    /// Reads one layer of a block. False if its source is not connected.
    fn ask(&mut self, cx: &mut Cx, piece: (u64, u32, u32), from: Placement, steps: bool) -> bool {
        let layer = piece.2;
        let tokens = cx.config.block_tokens;
        match from {
            Placement::Local(phys) => {
                let tag = cx.tags.take(TagOwner::Move);
                self.tags.insert(tag, piece);
                let read = RemoteRead { tag, layer, pieces: vec![(phys.0 * tokens, tokens)] };
                cx.effects.push(Effect::Runner(Command::RemoteRead(read)));
            }
            Placement::Remote(b) => {
                let Some(peer) = cx.peers.key(b.creditor) else { return false };
                if !steps {
                    cx.peers.transfer(b.creditor, cx.now_ms);
                }
                let read = cx.tags.read(ReadOwner::Move);
                self.reads.insert(read, piece);
                let id = read.to_wire();
                let deadline_ms = u32::try_from(MOVE_RESERVE_MS).unwrap_or(u32::MAX);
                let (lease, epoch, offset) = (b.lease, b.epoch, b.entry * tokens);
                let frame = BulkFrame::Read { id, lease, epoch, layer, offset, tokens, deadline_ms };
                cx.effects.push(Effect::Bulk { peer, frame });
            }
            Placement::Gone | Placement::Lost => panic!("a block that moves has a place"),
        }
        true
    }

    /// KV that a move read from a creditor.
    pub(super) fn on_move_data(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        (from, read): (InstanceId, ReadId),
        layer: u32,
        kv: Bytes,
    ) {
        let Some((no, block, wanted)) = self.reads.remove(&read) else { return };
        let paced = self.moves.get(&no).is_none_or(|m| m.items.iter().any(|i| i.block == block && i.paced));
        if !paced {
            cx.peers.transferred(from, kv.len() as u64, cx.now_ms);
        }
        if wanted == layer {
            self.arrived(cx, batch, no, block, layer, kv);
        } else {
            self.close_move(cx, batch, no, "a creditor answered another layer", true);
        }
    }

    /// A creditor refused a move's read, or a write or seal (`None`): ends the move. The lease is lost unless the refusal is temporary.
    pub(super) fn on_refused(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        (creditor, lease): (InstanceId, LeaseId),
        read: Option<ReadId>,
        (code, detail): (RefuseCode, &str),
    ) {
        use RefuseCode::{Deadline, Device, Overloaded, StaleEpoch, UnknownLease};
        let stays = if let Some(read) = read {
            let Some((no, _, _)) = self.reads.remove(&read) else { return };
            self.close_move(cx, batch, no, &format!("the source refused: {code:?}"), true);
            matches!(code, Deadline | Overloaded)
        } else {
            let reason = format!("the target refused: {code:?}");
            let written = self.end_move_to(cx, batch, creditor, lease, &reason, true);
            written && !matches!(code, UnknownLease | StaleEpoch | Device)
        };
        if !stays {
            batch.lose_lease(cx, creditor, lease, format!("a creditor refused KV: {code:?}, {detail}"));
        }
    }

    /// KV that a move read from this instance's store.
    pub(super) fn on_move_kv(&mut self, cx: &mut Cx, batch: &mut Batch, tag: RemoteTag, kv: Bytes) {
        let Some((no, block, layer)) = self.tags.remove(&tag) else { return };
        self.arrived(cx, batch, no, block, layer, kv);
    }

    /// The device has stored a layer of a block that moves home.
    pub(super) fn on_move_stored(&mut self, cx: &mut Cx, tag: RemoteTag) {
        let Some((no, block, _)) = self.tags.remove(&tag) else { return };
        let (layers, layer_bytes) = (cx.config.kv.layers, layer_bytes(cx));
        let Some(entry) = self.moves.get_mut(&no) else { return };
        let Some(item) = entry.items.iter_mut().find(|i| i.block == block) else { return };
        item.stored += 1;
        if item.stored == layers && item.hash.is_some() {
            item.verified = true;
            self.bytes_in_flight -= u64::from(layers) * layer_bytes;
            if mutants::is(Mutant::FreedBeforeSwitched) {
                let (seq, from) = (entry.seq, item.from);
                free_sources(cx, seq, &[from]);
            }
        }
    }

    /// The device failed a move.
    pub(super) fn on_move_failed(&mut self, cx: &mut Cx, batch: &mut Batch, tag: RemoteTag, error: &str) {
        let Some((no, _, _)) = self.tags.remove(&tag) else { return };
        self.close_move(cx, batch, no, error, true);
    }

    fn arrived(&mut self, cx: &mut Cx, batch: &mut Batch, no: u64, block: u32, layer: u32, kv: Bytes) {
        if kv.len() as u64 != layer_bytes(cx) {
            return self.close_move(cx, batch, no, "a source answered with another size", true);
        }
        let items = self.moves.get_mut(&no).map(|m| &mut m.items);
        let Some(item) = items.and_then(|items| items.iter_mut().find(|i| i.block == block)) else { return };
        item.arrived.insert(layer, kv);
        while self.pass_next(cx, batch, no) {}
    }

    /// Hands an item's next layer to the target. False if the layer has not arrived.
    fn pass_next(&mut self, cx: &mut Cx, batch: &mut Batch, no: u64) -> bool {
        let layers = cx.config.kv.layers;
        let Some(entry) = self.moves.get_mut(&no) else { return false };
        // Block by block: an item that is handed over whole waits only for its verification.
        let Some(at) = entry.items.iter().position(|i| i.passed < layers) else { return false };
        let item = &mut entry.items[at];
        let layer = item.passed;
        let Some(kv) = item.arrived.remove(&layer) else { return false };
        item.passed += 1;
        self.status.bytes += kv.len() as u64;
        let (seq, from, to) = (entry.seq, entry.items[at].from, entry.items[at].to);
        if checks_at_source(batch, seq, from).is_some() {
            let check = Check::of(&kv);
            self.moves.get_mut(&no).into_iter().for_each(|m| m.items[at].checks.push(check));
        }
        match to {
            Placement::Local(_) => self.pass_home(cx, batch, no, at, layer, kv),
            Placement::Remote(_) => self.pass_on(cx, batch, no, at, layer, kv),
            Placement::Gone | Placement::Lost => panic!("a move has a target"),
        }
        true
    }

    fn pass_home(&mut self, cx: &mut Cx, batch: &mut Batch, no: u64, at: usize, layer: u32, kv: Bytes) {
        let tokens = cx.config.block_tokens;
        let Some(item) = self.moves.get_mut(&no).map(|m| &mut m.items[at]) else { return };
        let (block, Placement::Local(phys)) = (item.block, item.to) else { return };
        item.hash = item.hasher.update(layer as usize, &kv);
        if item.hash.is_some() && !self.content_is_right(batch, no, at) {
            return self.damaged(cx, batch, no, at);
        }
        let tag = cx.tags.take(TagOwner::Move);
        self.tags.insert(tag, (no, block, layer));
        cx.writes.queue(kv.len());
        let write = RemoteWrite { tag: Some(tag), layer, pieces: vec![(phys.0 * tokens, tokens)], kv };
        cx.release_freed();
        cx.effects.push(Effect::Runner(Command::RemoteWrite(write)));
    }

    /// Whether an item's content hash equals the hash of its source block.
    fn content_is_right(&self, batch: &Batch, no: u64, at: usize) -> bool {
        let entry = &self.moves[&no];
        let item = &entry.items[at];
        if let Some(checks) = checks_at_source(batch, entry.seq, item.from) {
            let found = |layers: &Range<u32>| item.checks.get(layers.start as usize..layers.end as usize);
            let combined = |layers| found(layers).map(|checks| Check::combine(checks.iter().copied()));
            return checks.iter().all(|(layers, check)| combined(layers) == Some(*check));
        }
        matches!(item.from, Placement::Local(_)) || hash_at_source(batch, entry, item) == item.hash
    }

    /// Handles a copy whose hash differs from its source's at a creditor: the lease entries count as lost.
    fn damaged(&mut self, cx: &mut Cx, batch: &mut Batch, no: u64, at: usize) {
        self.status.damaged += 1;
        let entry = &self.moves[&no];
        let (seq, from) = (entry.seq, entry.items[at].from);
        self.moves.get_mut(&no).into_iter().for_each(|m| m.items[at].hash = None);
        self.close_move(cx, batch, no, "the source's content is damaged", true);
        if let Placement::Remote(b) = from {
            let why = "a creditor's blocks are damaged".to_owned();
            cx.emit(Outcome::Lost(Lost { seq, creditor: b.creditor, part: LostPart::Lease(b.lease), why }));
        }
    }

    fn pass_on(&mut self, cx: &mut Cx, batch: &mut Batch, no: u64, at: usize, layer: u32, kv: Bytes) {
        let tokens = cx.config.block_tokens;
        let Some(entry) = self.moves.get_mut(&no) else { return };
        let (Placement::Remote(to), Some(target)) = (entry.items[at].to, entry.lease.as_mut()) else { return };
        let Some(peer) = cx.peers.key(to.creditor) else {
            return self.close_move(cx, batch, no, "the target is not connected", true);
        };
        let offset = to.entry * tokens;
        assert_eq!(target.hasher.written(layer as usize), offset, "a lease is written in order");
        let mut whole = Vec::new();
        target.hasher.write(layer as usize, &kv, &mut whole);
        let (lease, epoch) = (target.lease, target.epoch);
        let paced = entry.items[at].paced;
        if layer == 0 && !paced {
            cx.peers.transfer(to.creditor, cx.now_ms);
        }
        cx.memory.rm.note_written(to.creditor, lease, cx.now_ms);
        let write = BulkFrame::Write { lease, epoch, layer, offset, tokens, kv };
        cx.effects.push(Effect::Bulk { peer, frame: write });
        let Some(&(sealed, hash)) = whole.first() else { return };
        assert_eq!(sealed, to.entry, "blocks are passed on one after the other");
        self.moves.get_mut(&no).into_iter().for_each(|m| m.items[at].hash = Some(hash));
        if !self.content_is_right(batch, no, at) {
            return self.damaged(cx, batch, no, at);
        }
        let seal = BulkFrame::Seal { lease, epoch, entry: sealed, hash };
        cx.effects.push(Effect::Bulk { peer, frame: seal });
        if mutants::is(Mutant::SealUnawaited) {
            self.on_sealed(cx, to.creditor, lease, &[sealed]);
        }
    }
}

/// The content hash of a block as written to its creditor, if its source is one.
fn hash_at_source(batch: &Batch, entry: &Move, item: &Item) -> Option<ContentHash> {
    let Placement::Remote(b) = item.from else { return None };
    let seq = batch.seq(entry.seq)?;
    seq.leases.get(&(b.creditor, b.lease))?.hashes.get(&b.entry).copied()
}

/// A creditor's checks of a block that it computed itself.
fn checks_at_source(batch: &Batch, seq: SeqId, from: Placement) -> Option<&LayerChecks> {
    let Placement::Remote(b) = from else { return None };
    batch.seq(seq)?.leases.get(&(b.creditor, b.lease))?.checks.get(&b.entry)
}
