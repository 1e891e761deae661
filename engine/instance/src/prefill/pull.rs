//! Reading what a worker computed (KVDirect §4.3): when there is memory for all of it.
//!
//! Blocks are allocated all or nothing, in the order of arrival: when the KV is ready (pull mode), or before anybody is asked
//! to compute it (push mode). What does not fit this instance at all stays where it was computed, the oldest part of it, and
//! is attended to there like any lease.

use super::ask::{Away, Handed, Stage};
use super::landing::Landing;
use super::status::PrefillTimes;
use crate::batch::sequence::HeldLease;
use crate::event::{Effect, TransferEffect, TransferEvent};
use crate::instance::Instance;
use lagoon_kv::RemoteGrant;
use lagoon_transfer::{ConnId, Failure, Offer, PullId, ReaderOutput};
use lagoon_types::limits::GROWTH_BLOCKS;
use lagoon_types::{InstanceId, SeqId};
use std::collections::BTreeMap;
use std::sync::Arc;

impl Instance {
    /// Whether a worker's KV can be read now.
    pub(super) fn is_readable(&self, worker: InstanceId) -> bool {
        let conn = self.prefill.conns.get(&worker);
        conn.is_some_and(|conn| self.prefill.reader.as_ref().is_some_and(|r| r.conversion(*conn).is_some()))
    }

    /// Workers whose KV can be read.
    pub(crate) fn readable_workers(&self) -> usize {
        self.prefill.workers.keys().filter(|worker| self.is_readable(**worker)).count()
    }

    pub(super) fn connect_reader(&mut self, worker: InstanceId) {
        let now_ms = self.cx.now_ms;
        let Some(reader) = &mut self.prefill.reader else { return };
        let unreadable = self.prefill.workers.get(&worker).is_none_or(|w| w.unreadable.is_some());
        if !self.prefill.conns.contains_key(&worker) && !unreadable {
            let conn = reader.connect(worker, now_ms);
            self.prefill.conns.extend(conn.map(|conn| (worker, conn)));
        }
    }

    pub(super) fn disconnect_reader(&mut self, worker: InstanceId) {
        let now_ms = self.cx.now_ms;
        if let (Some(conn), Some(reader)) = (self.prefill.conns.remove(&worker), &mut self.prefill.reader) {
            reader.disconnect(conn, now_ms);
        }
    }

    /// What transports did.
    pub(crate) fn on_transfer(&mut self, event: TransferEvent) {
        let now_ms = self.cx.now_ms;
        let reader = self.prefill.reader.as_mut();
        match event {
            TransferEvent::FromWriter { to, body } => {
                self.cx.send_if_connected(to, body);
            }
            TransferEvent::Exported { job, export } => self.on_exported(job, export),
            TransferEvent::Freed { export } => self.on_export_freed(export),
            TransferEvent::Read { conn, read, result } => {
                if let Some(reader) = reader {
                    reader.on_read(conn, read, result, now_ms);
                }
            }
            TransferEvent::Down { conn } => reader.into_iter().for_each(|r| r.on_path_down(conn, now_ms)),
            TransferEvent::Checked { pull, piece, check } => {
                reader.into_iter().for_each(|r| r.on_checked(pull, piece, check.clone(), now_ms));
            }
        }
    }

    /// Reads what is ready and has room, and carries out what the reader wants.
    pub(crate) fn pump_pulls(&mut self) {
        if self.prefill.reader.is_none() {
            return;
        }
        self.drain_reader();
        if !self.prefill.away.is_empty() {
            self.start_pulls();
            self.read_landings();
        }
        self.prefill.reader.iter_mut().for_each(lagoon_transfer::Reader::pump);
        self.drain_reader();
    }

    pub(crate) fn tick_reader(&mut self) {
        let now_ms = self.cx.now_ms;
        if let Some(reader) = &mut self.prefill.reader {
            reader.tick(now_ms);
        }
    }

    /// This instance begins another life: what workers had for the old one is gone.
    pub(crate) fn restart_reader(&mut self) {
        let (incarnation, now_ms) = (self.membership.incarnation, self.cx.now_ms);
        self.prefill.reader.iter_mut().for_each(|reader| reader.begin_anew(incarnation, now_ms));
    }

    fn drain_reader(&mut self) {
        while let Some(output) = self.prefill.reader.as_mut().and_then(lagoon_transfer::Reader::poll) {
            match output {
                ReaderOutput::Send { to, body } => {
                    self.cx.send_if_connected(to, body);
                }
                ReaderOutput::Open { conn, writer, epoch, layout, arenas, addr } => {
                    let own = || self.prefill.workers.get(&writer).map(|w| w.quic_addr.clone()).unwrap_or_default();
                    let addr = if addr.is_empty() { own() } else { addr };
                    let reader = self.membership.id.unwrap_or_default();
                    let open = TransferEffect::Open { conn, reader, writer, addr, epoch, layout, arenas };
                    self.cx.effects.push(Effect::Transfer(open));
                }
                ReaderOutput::Close { conn } => self.cx.effects.push(Effect::Transfer(TransferEffect::Close { conn })),
                ReaderOutput::Read { conn, read, transaction, .. } => {
                    let pull_of = |id: u64| self.prefill.reader.as_ref()?.pull_of(PullId(id)).cloned();
                    let requests = transaction.parts.iter().map(|part| part.request);
                    let pulls: BTreeMap<u64, _> = requests.filter_map(|id| Some((id, pull_of(id)?))).collect();
                    let read = TransferEffect::Read { conn, read, transaction, pulls };
                    self.cx.effects.push(Effect::Transfer(read));
                }
                ReaderOutput::Check { pull, piece } => {
                    let of = self.prefill.reader.as_ref().and_then(|r| r.pull_of(pull)).map(Arc::clone);
                    let check = of.map(|of| TransferEffect::Check { pull, piece, of });
                    self.cx.effects.extend(check.map(Effect::Transfer));
                }
                ReaderOutput::Offered(offer) => self.on_offered(&offer),
                ReaderOutput::Withdrawn { export, conn } => self.on_withdrawn(conn, export),
                ReaderOutput::Done { pull } => self.on_pulled(pull),
                ReaderOutput::Failed { pull, why } => self.on_pull_failed(pull, &why),
                ReaderOutput::Refused { writer, reason, .. } => {
                    tracing::warn!(worker = %writer, reason, "a prefill worker's KV cannot be read");
                    self.prefill.conns.remove(&writer);
                    self.prefill.workers.get_mut(&writer).into_iter().for_each(|w| w.unreadable = Some(reason.clone()));
                }
            }
        }
    }

    /// The sequence whose KV waits as this export.
    fn ready_as(&self, worker: InstanceId, export: u64) -> Option<SeqId> {
        let is = |handed: &Handed| (handed.lease.creditor, handed.export) == (worker, export);
        let found = self.prefill.away.iter().find(|(_, away)| matches!(&away.stage, Stage::Ready(h) if is(h)));
        found.map(|(seq, _)| *seq)
    }

    /// The prompt that this worker computes, or computed, as this request, if it is read in parts.
    fn landing_of(&mut self, worker: InstanceId, request: u64) -> Option<(SeqId, &mut Landing)> {
        let is = |stage: &Stage| match stage {
            Stage::Asked { worker: of, request: as_, .. } => (*of, *as_) == (worker, request),
            Stage::Pulling { handed, .. } => (handed.lease.creditor, handed.request) == (worker, request),
            Stage::Waiting | Stage::Ready(_) => false,
        };
        let mut found = self.prefill.away.iter_mut().filter(|(_, away)| is(&away.stage));
        found.find_map(|(seq, away)| Some((*seq, away.stage.landing_mut()?)))
    }

    /// The prompt that this worker computes as this request, and whose answer was not heard yet.
    fn asked_whole(&mut self, worker: InstanceId, request: u64) -> Option<&mut Option<Offer>> {
        self.prefill.away.values_mut().find_map(|away| match &mut away.stage {
            Stage::Asked { worker: of, request: as_, landing: None, offer, .. } if (*of, *as_) == (worker, request) => {
                Some(offer)
            }
            _ => None,
        })
    }

    pub(super) fn on_offered(&mut self, offer: &Offer) {
        let now_ms = self.cx.now_ms;
        let mut misfit = None;
        if let Some((seq, landing)) = self.landing_of(offer.writer, offer.request) {
            if landing.accept(offer.clone()) {
                return;
            }
            misfit = Some(seq);
        } else if let Some(seq) = self.ready_as(offer.writer, offer.export)
            && let Some(Stage::Ready(handed)) = self.prefill.away.get_mut(&seq).map(|away| &mut away.stage)
        {
            if (handed.tokens, offer.first_token) == (offer.tokens, 0) {
                handed.offer = Some(offer.clone());
                return;
            }
            misfit = Some(seq);
        } else if let Some(known @ None) = self.asked_whole(offer.writer, offer.request) {
            // The answer that names it found a full queue, and is said again.
            *known = Some(offer.clone());
            return;
        }
        self.prefill.reader.iter_mut().for_each(|r| r.decline(offer.conn, offer.export, now_ms));
        misfit.into_iter().for_each(|seq| self.redo(seq, "what the worker exports makes no sense"));
    }

    fn on_withdrawn(&mut self, conn: ConnId, export: u64) {
        for away in self.prefill.away.values_mut() {
            if let Stage::Asked { offer, .. } = &mut away.stage {
                offer.take_if(|offer| (offer.conn, offer.export) == (conn, export));
            }
        }
        let worker = self.prefill.conns.iter().find(|(_, of)| **of == conn).map(|(worker, _)| *worker);
        let waits = |stage: &Stage| stage.landing().is_some_and(|landing| landing.waits_for(conn, export));
        let in_parts = self.prefill.away.iter().find(|(_, away)| waits(&away.stage)).map(|(seq, _)| *seq);
        if let Some(seq) = in_parts.or_else(|| worker.and_then(|worker| self.ready_as(worker, export))) {
            self.redo(seq, "the worker does not keep its KV any more");
        }
    }

    pub(super) fn decline(&mut self, offer: Option<&Offer>) {
        let now_ms = self.cx.now_ms;
        if let (Some(offer), Some(reader)) = (offer, &mut self.prefill.reader) {
            reader.decline(offer.conn, offer.export, now_ms);
        }
    }

    /// Whether KV is read while it is computed, into blocks that are allocated before.
    pub(super) fn pushes(&self) -> bool {
        self.cx.config.transfer.as_ref().is_some_and(|transfer| transfer.push)
    }

    /// Whether one more prompt that is read has a place in the batch when it is here.
    fn has_place(&self) -> bool {
        let landing = self.prefill.away.values().filter(|away| away.stage.landing().is_some()).count();
        self.batch.running_len() + landing < self.cx.config.sched.running
    }

    /// Starts to read what is ready, the oldest first, for as long as there is memory and a place in the batch.
    fn start_pulls(&mut self) {
        let ready = |stage: &Stage| matches!(stage, Stage::Ready(h) if h.offer.is_some() && h.lost_at_ms.is_none());
        while self.has_place() {
            let oldest = self.prefill.away.iter().find(|(_, away)| ready(&away.stage)).map(|(seq, _)| *seq);
            if !oldest.is_some_and(|seq| self.start_pull(seq)) {
                return;
            }
        }
    }

    /// Blocks to read into for a sequence of so many, of which others have `shareable` here, and how many of its blocks stay where
    /// they are. `None`: wait.
    fn pull_room(&self, needed: u32, shareable: u32) -> Option<(u32, u32)> {
        let (room, total) = (self.room(), self.cx.config.blocks_total);
        let most = Some(self.stage_blocks()).filter(|blocks| *blocks > 0).unwrap_or(u32::MAX);
        if needed + GROWTH_BLOCKS <= total && needed <= most {
            return (needed <= room + shareable).then_some((needed, 0));
        }
        // It never fits. Half of this instance is enough to begin with, or all that can arrive at once.
        let taken = room.saturating_sub(GROWTH_BLOCKS).min(needed).min(most);
        (taken > 0 && taken >= most.min(total / 2)).then_some((taken, needed - taken))
    }

    /// Blocks for a sequence whose prompt is to be read, those of its newest tokens if not all of it ever fits; else it begins with
    /// what is found here. `known`: of its tokens, those whose KV is read.
    fn allocate_landing(&mut self, id: SeqId, known: u32, len: u32) -> Option<Landing> {
        let (block_tokens, layers) = (self.cx.config.block_tokens, self.cx.config.kv.layers);
        // What an earlier attempt is still read into is this sequence's, too: it has something here.
        let fresh = self.prefill.settling.iter().all(|settling| settling.seq() != id);
        let shareable = if fresh { self.shareable(id) } else { 0 };
        let (own, left) = self.pull_room(len.div_ceil(block_tokens), shareable)?;
        let mut staged = self.take_stages(known.div_ceil(block_tokens).saturating_sub(left))?;
        let (mut blocks, named) = if fresh && left == 0 { self.take_prefix(id) } else { (Vec::new(), 0) };
        let found = u32::try_from(blocks.len()).expect("at most a sequence's blocks");
        let Some(rest) = self.cx.memory.rm.allocate(id, left + found..left + own, blocks.last().copied()) else {
            self.cx.memory.rm.free(id, &blocks);
            if let Some(seq) = self.batch.seq_mut(id) {
                seq.sharing = None;
            }
            self.unstage(staged);
            return None;
        };
        blocks.extend(rest);
        let spare = staged.drain(..staged.len().min(found as usize)).collect();
        self.unstage(spare);
        let mut landing = Landing::new(blocks, (left, found), (known, layers), block_tokens);
        landing.named = named;
        // What is staged is copied by the device, in order.
        landing.after_writes = if staged.is_empty() { self.creditor.queued_writes() } else { 0 };
        landing.staged = staged;
        Some(landing)
    }

    /// Blocks for a prompt that nobody computes yet, if there is room for it now, and a place in the batch.
    pub(super) fn reserve(&mut self, id: SeqId) -> Option<Landing> {
        let known = self.batch.seq(id).filter(|_| self.has_place())?.len();
        // One more than is known, as for what is computed here: its first token must have a place.
        let mut landing = self.allocate_landing(id, known, known + 1)?;
        landing.early = true;
        Some(landing)
    }

    /// False if there is no room for it now.
    fn start_pull(&mut self, id: SeqId) -> bool {
        let now_ms = self.cx.now_ms;
        let Some(Stage::Ready(handed)) = self.prefill.away.get(&id).map(|away| &away.stage) else { return true };
        let (mut handed, Some(seq)) = (handed.clone(), self.batch.seq(id)) else { return true };
        let len = seq.len();
        let Some(mut landing) = self.allocate_landing(id, handed.tokens, len) else { return false };
        let fits = handed.offer.take().is_some_and(|offer| landing.accept(offer));
        if let Some(away) = self.prefill.away.get_mut(&id) {
            away.stage = Stage::Pulling { handed, landing, since_ms: now_ms };
        }
        if !fits {
            self.redo(id, "what the worker exports makes no sense");
        }
        true
    }

    fn pulled_by(&mut self, pull: PullId) -> Option<(SeqId, &mut Landing)> {
        let mut all = self.prefill.away.iter_mut().filter_map(|(seq, away)| Some((*seq, away.stage.landing_mut()?)));
        all.find(|(_, landing)| landing.reads(pull))
    }

    /// A part is here and right.
    fn on_pulled(&mut self, pull: PullId) {
        let Some((id, landing)) = self.pulled_by(pull) else { return self.settle(pull) };
        landing.ended(pull, true);
        self.land(id);
    }

    /// If all of a prompt is computed, here and right, the sequence goes on with it.
    pub(super) fn land(&mut self, id: SeqId) {
        let whole = |stage: &Stage| matches!(stage, Stage::Pulling { landing, .. } if landing.is_whole());
        if !self.prefill.away.get(&id).is_some_and(|away| whole(&away.stage)) || self.stage_in(id) {
            return;
        }
        // What stays with a worker whose connection broke cannot be attended to: it comes back, or all is computed again.
        let gone = |away: &Away| away.handed().is_some_and(|handed| handed.lost_at_ms.is_some());
        let left = |away: &Away| away.stage.landing().is_some_and(|landing| landing.left > 0);
        if self.prefill.away.get(&id).is_some_and(|away| gone(away) && left(away)) {
            return;
        }
        let Some(away) = self.prefill.away.remove(&id) else { return };
        let Stage::Pulling { handed, mut landing, since_ms } = away.stage else { return };
        let checks = landing.take_left_checks(self.cx.config.kv.layers);
        let Landing { blocks, left, early, found, named, .. } = landing;
        let now_ms = self.cx.now_ms;
        // What is pushed waits for memory before its prompt is given to anybody.
        let (before_ms, after_ms) = (away.asked_ms - away.since_ms, since_ms - handed.ready_ms);
        let (asking_ms, decode_queue_ms) = if early { (0, before_ms) } else { (before_ms, after_ms) };
        self.note_pulled(PrefillTimes {
            queue_ms: asking_ms + handed.queued_ms,
            prefill_ms: handed.prefill_ms,
            decode_queue_ms,
            transfer_ms: now_ms - since_ms,
        });
        self.prefill.status.blocks_left += u64::from(left);
        let kept = u64::from(found * self.cx.config.block_tokens);
        self.prefill.status.found_tokens += kept;
        self.prefill.status.found_bytes +=
            kept * (self.cx.config.kv.layers as usize * self.cx.config.kv.layer_token_bytes()) as u64;
        let Some(seq) = self.batch.seq_mut(id) else { return };
        let lagoon_cluster::BorrowedLease { creditor, lease, epoch, .. } = handed.lease;
        if left > 0 {
            seq.blocks.push_remote(&RemoteGrant { creditor, lease, epoch, blocks: left });
            seq.leases.insert((creditor, lease), HeldLease::handed(left, checks));
        }
        seq.blocks.push_local(&blocks);
        let advance = seq.blocks.advance(handed.tokens);
        (seq.misses, seq.pulled_ms, seq.named) = (0, Some(now_ms), named);
        let tokens = seq.len();
        self.cx.memory.rm.mark_written(&advance);
        self.cx.memory.rm.release(&handed.entries(left), now_ms);
        let micro_batch = self.batch.micro_batch_of(id);
        self.batch.resume(id, micro_batch, tokens, handed.tokens);
        self.batch.changed();
    }

    /// A sequence ended well. If its prompt was pulled, it is known now how long it decoded.
    pub(crate) fn note_decoded(&mut self, id: SeqId) {
        if let Some(since_ms) = self.batch.seq(id).and_then(|seq| seq.pulled_ms) {
            self.prefill.status.note_decoded(self.cx.now_ms - since_ms);
        }
    }

    fn note_pulled(&mut self, times: PrefillTimes) {
        self.prefill.status.pulled += 1;
        self.prefill.status.note(times);
    }

    fn on_pull_failed(&mut self, pull: PullId, why: &Failure) {
        let Some((id, landing)) = self.pulled_by(pull) else { return self.settle(pull) };
        landing.ended(pull, false);
        self.redo(id, &why.to_string());
    }
}
