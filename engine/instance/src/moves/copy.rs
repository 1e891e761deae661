//! The copy: one layer of one block at a time, from its source to its target, and the proof that it arrived.
//!
//! Reads are bounded by one layer of one block each, so that the device is never held for long; all together by bytes in
//! flight; and beside a step by the pace. A lease is written block by block in ascending order, as every lease is.

use super::{Item, Move, Place};
use crate::batch::sequence::LayerChecks;
use crate::cx::TagOwner;
use crate::event::Effect;
use crate::instance::Instance;
use bytes::Bytes;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_kv::Placement;
use lagoon_protocol::{BulkFrame, RefuseCode};
use lagoon_runner::{Command, RemoteRead, RemoteTag, RemoteWrite};
use lagoon_transfer::Check;
use lagoon_types::limits::{MOVE_RESERVE_MS, MOVE_WINDOW_MS};
use lagoon_types::{InstanceId, LeaseId, SeqId};
use std::ops::Range;

impl Instance {
    fn layer_bytes(&self) -> u64 {
        u64::from(self.cx.config.block_tokens) * self.cx.config.kv.layer_token_bytes() as u64
    }

    /// Asks sources for as much as may move now, the oldest move first.
    pub(crate) fn pump_moves(&mut self) {
        if self.moves.moves.is_empty() {
            return;
        }
        let layers = self.cx.config.kv.layers;
        let layer_bytes = self.layer_bytes();
        let numbers: Vec<u64> = self.moves.moves.keys().copied().collect();
        for no in numbers {
            let most = self.bytes_in_flight_max(no).max(2 * layer_bytes);
            loop {
                let steps = self.step.is_busy();
                let busy = steps || !self.moves.pace.overlaps() && self.batch.running_len() > 0;
                if busy && !self.moves.pace.allows() {
                    return;
                }
                if self.moves.bytes_in_flight + layer_bytes > most {
                    break;
                }
                let next = self.moves.moves.get_mut(&no).and_then(|m| m.items.iter_mut().find(|i| i.asked < layers));
                let Some(item) = next else { break };
                let (block, layer, from) = (item.block, item.asked, item.from);
                item.asked += 1;
                self.moves.bytes_in_flight += layer_bytes;
                item.paced |= busy;
                if busy {
                    self.moves.pace.spend();
                }
                if !self.ask(no, block, layer, from) {
                    self.close_move(no, "the source is not connected", true);
                    break;
                }
            }
        }
    }

    /// Bytes that may be in progress in all while a move goes on: the slower of its links is kept busy, and no more.
    fn bytes_in_flight_max(&self, no: u64) -> u64 {
        let Some(entry) = self.moves.moves.get(&no) else { return 0 };
        let ends = [entry.source, entry.target];
        let creditors = ends.iter().filter_map(|p| if let Place::At(creditor) = p { Some(*creditor) } else { None });
        let creditors = creditors.chain(entry.lease.as_ref().map(|l| l.creditor));
        let known = |creditor| self.cx.peers.key(creditor).and_then(|peer| self.cx.peers.known(peer));
        let rates = creditors.filter_map(known).map(|k| k.bytes_per_s).filter(|rate| *rate > 0);
        let carried = rates.min().map(|rate| rate.saturating_mul(MOVE_WINDOW_MS) / 1_000);
        carried.map_or(self.moves.bytes_in_flight_max, |bytes| bytes.min(self.moves.bytes_in_flight_max))
    }

    /// Asks for one layer of a block. False if its source cannot be asked.
    fn ask(&mut self, no: u64, block: u32, layer: u32, from: Placement) -> bool {
        let tokens = self.cx.config.block_tokens;
        match from {
            Placement::Local(phys) => {
                let tag = self.cx.tags.take(TagOwner::Move);
                self.moves.tags.insert(tag, (no, block, layer));
                let read = RemoteRead { tag, layer, pieces: vec![(phys.0 * tokens, tokens)] };
                self.cx.effects.push(Effect::Runner(Command::RemoteRead(read)));
            }
            Placement::Remote(b) => {
                let Some(peer) = self.cx.peers.key(b.creditor) else { return false };
                if !self.step.is_busy() {
                    self.cx.peers.transfer(b.creditor, self.cx.now_ms);
                }
                let id = self.step.next_read();
                self.moves.reads.insert(id, (no, block, layer));
                let deadline_ms = u32::try_from(MOVE_RESERVE_MS).unwrap_or(u32::MAX);
                let (lease, epoch, offset) = (b.lease, b.epoch, b.entry * tokens);
                let frame = BulkFrame::Read { id, lease, epoch, layer, offset, tokens, deadline_ms };
                self.cx.effects.push(Effect::Bulk { peer, frame });
            }
            Placement::Gone | Placement::Lost => panic!("a block that moves has a place"),
        }
        true
    }

    /// KV that a move read at a creditor.
    pub(crate) fn on_move_data(&mut self, from: InstanceId, id: u64, layer: u32, kv: Bytes) {
        let Some((no, block, wanted)) = self.moves.reads.remove(&id) else { return };
        let paced = self.moves.moves.get(&no).is_none_or(|m| m.items.iter().any(|i| i.block == block && i.paced));
        if !paced {
            self.cx.peers.transferred(from, kv.len() as u64, self.cx.now_ms);
        }
        if wanted == layer {
            self.arrived(no, block, layer, kv);
        } else {
            self.close_move(no, "a creditor answered another layer", true);
        }
    }

    /// A creditor refused a move's read.
    pub(crate) fn on_move_refused(&mut self, id: u64, code: RefuseCode) {
        let Some((no, _, _)) = self.moves.reads.remove(&id) else { return };
        self.close_move(no, &format!("the source refused: {code:?}"), true);
    }

    /// KV that a move read here.
    pub(crate) fn on_move_kv(&mut self, tag: RemoteTag, kv: Bytes) {
        let Some((no, block, layer)) = self.moves.tags.remove(&tag) else { return };
        self.arrived(no, block, layer, kv);
    }

    /// The device stored a layer of a block that comes home.
    pub(crate) fn on_move_stored(&mut self, tag: RemoteTag) {
        let Some((no, block, _)) = self.moves.tags.remove(&tag) else { return };
        let (layers, layer_bytes) = (self.cx.config.kv.layers, self.layer_bytes());
        let Some(entry) = self.moves.moves.get_mut(&no) else { return };
        let Some(item) = entry.items.iter_mut().find(|i| i.block == block) else { return };
        item.stored += 1;
        if item.stored == layers && item.hash.is_some() {
            item.verified = true;
            self.moves.bytes_in_flight -= u64::from(layers) * layer_bytes;
            if mutants::is(Mutant::FreedBeforeSwitched) {
                let (seq, from) = (entry.seq, item.from);
                self.free_sources(seq, &[from]);
            }
        }
    }

    /// The device failed a move.
    pub(crate) fn on_move_failed(&mut self, tag: RemoteTag, error: &str) {
        let Some((no, _, _)) = self.moves.tags.remove(&tag) else { return };
        self.close_move(no, error, true);
    }

    fn arrived(&mut self, no: u64, block: u32, layer: u32, kv: Bytes) {
        if kv.len() as u64 != self.layer_bytes() {
            return self.close_move(no, "a source answered with another size", true);
        }
        let items = self.moves.moves.get_mut(&no).map(|m| &mut m.items);
        let Some(item) = items.and_then(|items| items.iter_mut().find(|i| i.block == block)) else { return };
        item.arrived.insert(layer, kv);
        while self.pass_next(no) {}
    }

    /// Hands the next layer that is due to the target; false if it is not here yet.
    fn pass_next(&mut self, no: u64) -> bool {
        let layers = self.cx.config.kv.layers;
        let Some(entry) = self.moves.moves.get_mut(&no) else { return false };
        // Block by block: an item that is passed on whole waits only for its proof.
        let Some(at) = entry.items.iter().position(|i| i.passed < layers) else { return false };
        let item = &mut entry.items[at];
        let layer = item.passed;
        let Some(kv) = item.arrived.remove(&layer) else { return false };
        item.passed += 1;
        self.moves.status.bytes += kv.len() as u64;
        let (seq, from, to) = (entry.seq, entry.items[at].from, entry.items[at].to);
        if self.checks_at_source(seq, from).is_some() {
            let check = Check::of(&kv);
            self.moves.moves.get_mut(&no).into_iter().for_each(|m| m.items[at].checks.push(check));
        }
        match to {
            Placement::Local(_) => self.pass_home(no, at, layer, kv),
            Placement::Remote(_) => self.pass_on(no, at, layer, kv),
            Placement::Gone | Placement::Lost => panic!("a move has a target"),
        }
        true
    }

    /// The hash that a block had when it was written, if it was written to a creditor.
    fn hash_at_source(&self, entry: &Move, item: &Item) -> Option<lagoon_kv::hash::ContentHash> {
        let Placement::Remote(b) = item.from else { return None };
        let seq = self.batch.seq(entry.seq)?;
        seq.leases.get(&(b.creditor, b.lease))?.hashes.get(&b.entry).copied()
    }

    /// What its creditor said of a block that it computed itself.
    fn checks_at_source(&self, seq: SeqId, from: Placement) -> Option<&LayerChecks> {
        let Placement::Remote(b) = from else { return None };
        self.batch.seq(seq)?.leases.get(&(b.creditor, b.lease))?.checks.get(&b.entry)
    }

    fn pass_home(&mut self, no: u64, at: usize, layer: u32, kv: Bytes) {
        let tokens = self.cx.config.block_tokens;
        let Some(item) = self.moves.moves.get_mut(&no).map(|m| &mut m.items[at]) else { return };
        let (block, Placement::Local(phys)) = (item.block, item.to) else { return };
        item.hash = item.hasher.update(layer as usize, &kv);
        if item.hash.is_some() && !self.content_is_right(no, at) {
            return self.damaged(no, at);
        }
        let tag = self.cx.tags.take(TagOwner::Move);
        self.moves.tags.insert(tag, (no, block, layer));
        self.creditor.queue_write(kv.len());
        let write = RemoteWrite { tag: Some(tag), layer, pieces: vec![(phys.0 * tokens, tokens)], kv };
        self.cx.release_freed();
        self.cx.effects.push(Effect::Runner(Command::RemoteWrite(write)));
    }

    /// Whether an item's content is what was written to its source, or computed there.
    fn content_is_right(&self, no: u64, at: usize) -> bool {
        let entry = &self.moves.moves[&no];
        let item = &entry.items[at];
        if let Some(checks) = self.checks_at_source(entry.seq, item.from) {
            let found = |layers: &Range<u32>| item.checks.get(layers.start as usize..layers.end as usize);
            let combined = |layers| found(layers).map(|checks| Check::combine(checks.iter().copied()));
            return checks.iter().all(|(layers, check)| combined(layers) == Some(*check));
        }
        matches!(item.from, Placement::Local(_)) || self.hash_at_source(entry, item) == item.hash
    }

    /// What a creditor has is not what was written there: nobody may attend to it any more.
    fn damaged(&mut self, no: u64, at: usize) {
        self.moves.status.damaged += 1;
        let entry = &self.moves.moves[&no];
        let (seq, from) = (entry.seq, entry.items[at].from);
        self.moves.moves.get_mut(&no).into_iter().for_each(|m| m.items[at].hash = None);
        self.close_move(no, "the source's content is damaged", true);
        if let Placement::Remote(b) = from {
            self.lose(seq, b.creditor, Some(b.lease), "a creditor's blocks are damaged");
        }
    }

    fn pass_on(&mut self, no: u64, at: usize, layer: u32, kv: Bytes) {
        let tokens = self.cx.config.block_tokens;
        let Some(entry) = self.moves.moves.get_mut(&no) else { return };
        let (Placement::Remote(to), Some(target)) = (entry.items[at].to, entry.lease.as_mut()) else { return };
        let Some(peer) = self.cx.peers.key(to.creditor) else {
            return self.close_move(no, "the target is not connected", true);
        };
        let offset = to.entry * tokens;
        assert_eq!(target.hasher.written(layer as usize), offset, "a lease is written in order");
        let mut whole = Vec::new();
        target.hasher.write(layer as usize, &kv, &mut whole);
        let (lease, epoch) = (target.lease, target.epoch);
        let paced = entry.items[at].paced;
        if layer == 0 && !paced {
            self.cx.peers.transfer(to.creditor, self.cx.now_ms);
        }
        self.cx.memory.rm.note_written(to.creditor, lease, self.cx.now_ms);
        let write = BulkFrame::Write { lease, epoch, layer, offset, tokens, kv };
        self.cx.effects.push(Effect::Bulk { peer, frame: write });
        let Some(&(sealed, hash)) = whole.first() else { return };
        assert_eq!(sealed, to.entry, "blocks are passed on one after the other");
        self.moves.moves.get_mut(&no).into_iter().for_each(|m| m.items[at].hash = Some(hash));
        if !self.content_is_right(no, at) {
            return self.damaged(no, at);
        }
        let seal = BulkFrame::Seal { lease, epoch, entry: sealed, hash };
        self.cx.effects.push(Effect::Bulk { peer, frame: seal });
        if mutants::is(Mutant::SealUnawaited) {
            self.on_sealed(to.creditor, lease, &[sealed]);
        }
    }

    /// A target refused a write or a seal. Says whether a move writes there.
    pub(crate) fn on_move_write_refused(&mut self, creditor: InstanceId, lease: LeaseId, code: RefuseCode) -> bool {
        self.end_move_to(creditor, lease, &format!("the target refused: {code:?}"), true)
    }
}
