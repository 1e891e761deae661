//! Reading a worker's KV (KVDirect §4.3) into memory for all of it.
//!
//! Blocks are allocated all or nothing, in the order of arrival: when the KV is ready (pull mode), or before a worker
//! is asked to compute it (push mode). If a prompt never fits this instance, its oldest part stays with the worker, and
//! is attended to there like any lease.

use super::Prefills;
use super::ask::{Away, Handed, Stage, takes_window};
use super::landing::Landing;
use super::status::PrefillTimes;
use crate::batch::Batch;
use crate::batch::changes::Pulled;
use crate::batch::sequence::Window;
use crate::cx::Cx;
use crate::event::{Effect, TransferEffect, TransferEvent};
use lagoon_kv::Owner;
use lagoon_transfer::{ConnId, Failure, Offer, PullId, ReaderOutput};
use lagoon_types::limits::GROWTH_BLOCKS;
use lagoon_types::{InstanceId, SeqId, WindowShape};
use std::collections::BTreeMap;
use std::sync::Arc;

impl Prefills {
    /// Whether a worker's KV can be read now.
    pub(super) fn is_readable(&self, worker: InstanceId) -> bool {
        let conn = self.conns.get(&worker);
        conn.is_some_and(|conn| self.reader.as_ref().is_some_and(|r| r.conversion(*conn).is_some()))
    }

    /// Workers whose KV can be read.
    pub(crate) fn readable_workers(&self) -> usize {
        self.workers.keys().filter(|worker| self.is_readable(**worker)).count()
    }

    pub(super) fn connect_reader(&mut self, cx: &mut Cx, worker: InstanceId) {
        let now_ms = cx.now_ms;
        let Some(reader) = &mut self.reader else { return };
        let unreadable = self.workers.get(&worker).is_none_or(|w| w.unreadable.is_some());
        if !self.conns.contains_key(&worker) && !unreadable {
            let conn = reader.connect(worker, now_ms);
            self.conns.extend(conn.map(|conn| (worker, conn)));
        }
    }

    pub(super) fn disconnect_reader(&mut self, cx: &mut Cx, worker: InstanceId) {
        let now_ms = cx.now_ms;
        if let (Some(conn), Some(reader)) = (self.conns.remove(&worker), &mut self.reader) {
            reader.disconnect(conn, now_ms);
        }
    }

    /// Handles an event of the transports.
    pub(crate) fn on_transfer(&mut self, cx: &mut Cx, batch: &mut Batch, event: TransferEvent) {
        let now_ms = cx.now_ms;
        let reader = self.reader.as_mut();
        match event {
            TransferEvent::FromWriter { to, body } => {
                cx.send_if_connected(to, body);
            }
            TransferEvent::Exported { job, export } => self.on_exported(cx, batch, job, export),
            TransferEvent::Freed { export } => self.on_export_freed(cx, batch, export),
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

    /// Starts reads that have room, and carries out the reader's actions.
    pub(crate) fn pump_pulls(&mut self, cx: &mut Cx, batch: &mut Batch) {
        if self.reader.is_none() {
            return;
        }
        self.drain_reader(cx, batch);
        if !self.away.is_empty() {
            self.start_pulls(cx, batch);
            self.read_landings(cx, batch);
        }
        self.reader.iter_mut().for_each(lagoon_transfer::Reader::pump);
        self.drain_reader(cx, batch);
    }

    /// Whether there is a reader: without one there is nothing to pump.
    pub(crate) fn may_read(&self) -> bool {
        self.reader.is_some()
    }

    pub(crate) fn tick_reader(&mut self, cx: &Cx) {
        let now_ms = cx.now_ms;
        if let Some(reader) = &mut self.reader {
            reader.tick(now_ms);
        }
    }

    /// Restarts the reader for a new incarnation: workers drop the old one's exports.
    pub(crate) fn restart_reader(&mut self, cx: &Cx) {
        let (incarnation, now_ms) = (cx.standing.incarnation, cx.now_ms);
        self.reader.iter_mut().for_each(|reader| reader.begin_anew(incarnation, now_ms));
    }

    fn drain_reader(&mut self, cx: &mut Cx, batch: &mut Batch) {
        while let Some(output) = self.reader.as_mut().and_then(lagoon_transfer::Reader::poll) {
            match output {
                ReaderOutput::Send { to, body } => {
                    cx.send_if_connected(to, body);
                }
                ReaderOutput::Open { conn, writer, epoch, layout, arenas, addr } => {
                    let own = || self.workers.get(&writer).map(|w| w.quic_addr.clone()).unwrap_or_default();
                    let addr = if addr.is_empty() { own() } else { addr };
                    let reader = cx.standing.id.unwrap_or_default();
                    let open = TransferEffect::Open { conn, reader, writer, addr, epoch, layout, arenas };
                    cx.effects.push(Effect::Transfer(open));
                }
                ReaderOutput::Close { conn } => cx.effects.push(Effect::Transfer(TransferEffect::Close { conn })),
                ReaderOutput::Read { conn, read, transaction, .. } => {
                    let pull_of = |id: u64| self.reader.as_ref()?.pull_of(PullId(id)).cloned();
                    let requests = transaction.parts.iter().map(|part| part.request);
                    let pulls: BTreeMap<u64, _> = requests.filter_map(|id| Some((id, pull_of(id)?))).collect();
                    let read = TransferEffect::Read { conn, read, transaction, pulls };
                    cx.effects.push(Effect::Transfer(read));
                }
                ReaderOutput::Check { pull, piece } => {
                    let of = self.reader.as_ref().and_then(|r| r.pull_of(pull)).map(Arc::clone);
                    let check = of.map(|of| TransferEffect::Check { pull, piece, of });
                    cx.effects.extend(check.map(Effect::Transfer));
                }
                ReaderOutput::Offered(offer) => self.on_offered(cx, batch, &offer),
                ReaderOutput::Withdrawn { export, conn } => self.on_withdrawn(cx, batch, conn, export),
                ReaderOutput::Done { pull } => self.on_pulled(cx, batch, pull),
                ReaderOutput::Failed { pull, why } => self.on_pull_failed(cx, batch, pull, &why),
                ReaderOutput::Refused { writer, reason, .. } => {
                    tracing::warn!(worker = %writer, reason, "a prefill worker's KV cannot be read");
                    self.conns.remove(&writer);
                    self.workers.get_mut(&writer).into_iter().for_each(|w| w.unreadable = Some(reason.clone()));
                }
            }
        }
    }

    /// The sequence whose ready KV this export holds.
    fn ready_as(&self, worker: InstanceId, export: u64) -> Option<SeqId> {
        let is = |handed: &Handed| (handed.lease.creditor, handed.export) == (worker, export);
        let found = self.away.iter().find(|(_, away)| matches!(&away.stage, Stage::Ready(h) if is(h)));
        found.map(|(seq, _)| *seq)
    }

    /// The sequence and landing of a request to this worker, if its KV is read.
    fn landing_of(&mut self, worker: InstanceId, request: u64) -> Option<(SeqId, &mut Landing)> {
        let is = |stage: &Stage| match stage {
            Stage::Asked { worker: of, request: as_, .. } => (*of, *as_) == (worker, request),
            Stage::Pulling { handed, .. } => (handed.lease.creditor, handed.request) == (worker, request),
            Stage::Waiting | Stage::Ready(_) => false,
        };
        let mut found = self.away.iter_mut().filter(|(_, away)| is(&away.stage));
        found.find_map(|(seq, away)| Some((*seq, away.stage.landing_mut()?)))
    }

    /// The offer slot of a pull request to this worker whose reply has not come yet.
    fn asked_whole(&mut self, worker: InstanceId, request: u64) -> Option<&mut Option<Offer>> {
        self.away.values_mut().find_map(|away| match &mut away.stage {
            Stage::Asked { worker: of, request: as_, landing: None, offer, .. } if (*of, *as_) == (worker, request) => {
                Some(offer)
            }
            _ => None,
        })
    }

    pub(super) fn on_offered(&mut self, cx: &mut Cx, batch: &mut Batch, offer: &Offer) {
        let now_ms = cx.now_ms;
        let mut misfit = None;
        if let Some((seq, landing)) = self.landing_of(offer.writer, offer.request) {
            if landing.accept(offer.clone()) {
                return;
            }
            misfit = Some(seq);
        } else if let Some(seq) = self.ready_as(offer.writer, offer.export)
            && let Some(Stage::Ready(handed)) = self.away.get_mut(&seq).map(|away| &mut away.stage)
        {
            let whole = |shape: WindowShape| shape.exported(handed.tokens, cx.config.block_tokens);
            let exported = cx.config.windowed.filter(|_| handed.window).map_or(handed.tokens, whole);
            if (exported, offer.first_token) == (offer.tokens, 0) {
                handed.offer = Some(offer.clone());
                return;
            }
            misfit = Some(seq);
        } else if let Some(known @ None) = self.asked_whole(offer.writer, offer.request) {
            // The reply that names this export was dropped by a full queue, and will be repeated.
            *known = Some(offer.clone());
            return;
        }
        self.reader.iter_mut().for_each(|r| r.decline(offer.conn, offer.export, now_ms));
        misfit.into_iter().for_each(|seq| self.redo(cx, batch, seq, "the worker's export does not fit the prompt"));
    }

    fn on_withdrawn(&mut self, cx: &mut Cx, batch: &mut Batch, conn: ConnId, export: u64) {
        for away in self.away.values_mut() {
            if let Stage::Asked { offer, .. } = &mut away.stage {
                offer.take_if(|offer| (offer.conn, offer.export) == (conn, export));
            }
        }
        let worker = self.conns.iter().find(|(_, of)| **of == conn).map(|(worker, _)| *worker);
        let waits = |stage: &Stage| stage.landing().is_some_and(|landing| landing.waits_for(conn, export));
        let in_parts = self.away.iter().find(|(_, away)| waits(&away.stage)).map(|(seq, _)| *seq);
        if let Some(seq) = in_parts.or_else(|| worker.and_then(|worker| self.ready_as(worker, export))) {
            self.redo(cx, batch, seq, "the worker does not keep its KV any more");
        }
    }

    pub(super) fn decline(&mut self, cx: &mut Cx, offer: Option<&Offer>) {
        let now_ms = cx.now_ms;
        if let (Some(offer), Some(reader)) = (offer, &mut self.reader) {
            reader.decline(offer.conn, offer.export, now_ms);
        }
    }

    /// Whether this instance uses push: KV is read while computed, into blocks allocated before.
    pub(super) fn pushes(&self, cx: &Cx) -> bool {
        cx.config.transfer.as_ref().is_some_and(|transfer| transfer.push)
    }

    /// Whether the batch will have a place for one more prompt that is read.
    fn has_place(&self, cx: &Cx, batch: &Batch) -> bool {
        let landing = self.away.values().filter(|away| away.stage.landing().is_some()).count();
        batch.running_len() + landing < cx.config.sched.running
    }

    /// Starts to read ready KV, the oldest first, while there is memory and a place in the batch.
    fn start_pulls(&mut self, cx: &mut Cx, batch: &mut Batch) {
        let ready = |stage: &Stage| matches!(stage, Stage::Ready(h) if h.offer.is_some() && h.lost_at_ms.is_none());
        while self.has_place(cx, batch) {
            let oldest = self.away.iter().find(|(_, away)| ready(&away.stage)).map(|(seq, _)| *seq);
            if !oldest.is_some_and(|seq| self.start_pull(cx, batch, seq)) {
                return;
            }
        }
    }

    /// Blocks to allocate for a sequence that needs `needed`, `shareable` of them shared here, and its blocks that stay
    /// with the worker. `None`: wait.
    fn pull_room(&self, cx: &Cx, batch: &Batch, needed: u32, (shareable, window): (u32, u32)) -> Option<(u32, u32)> {
        let (room, total) = (batch.room(cx).checked_sub(window)?, cx.config.blocks_total - window);
        let most = Some(cx.stage_blocks()).filter(|blocks| *blocks > 0).map_or(u32::MAX, |most| most - window);
        if needed + GROWTH_BLOCKS <= total && needed <= most {
            return (needed <= room + shareable).then_some((needed, 0));
        }
        // It never fits. Half of this instance is enough to begin with, or all that can arrive at once.
        let taken = room.saturating_sub(GROWTH_BLOCKS).min(needed).min(most);
        (taken > 0 && taken >= most.min(total / 2)).then_some((taken, needed - taken))
    }

    /// Allocates the landing of a sequence: all blocks, or the newest ones if not all ever fit; the former begins with
    /// prefix-cache hits. `known`: tokens whose KV is read; `window`: rBlocks of their last window, if that is read, too.
    fn allocate_landing(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        id: SeqId,
        (known, len): (u32, u32),
        window: Option<u32>,
    ) -> Option<Landing> {
        let (block_tokens, layers) = (cx.config.block_tokens, cx.config.kv.layers);
        // Blocks of an earlier landing with reads in progress are this sequence's, too.
        let fresh = self.settling.iter().all(|settling| settling.seq() != id);
        let shareable = if fresh { batch.shareable(cx, id) } else { 0 };
        let (own, left) = self.pull_room(cx, batch, len.div_ceil(block_tokens), (shareable, window.unwrap_or(0)))?;
        let read = known.div_ceil(block_tokens).saturating_sub(left) + window.unwrap_or(0);
        let mut staged = self.take_stages(cx, read)?;
        let (mut blocks, hashed) = if fresh && left == 0 { batch.take_prefix(cx, id) } else { (Vec::new(), 0) };
        let found = u32::try_from(blocks.len()).expect("at most a sequence's blocks");
        let Some(rest) = cx.memory.rm.pool.allocate_for(id, left + found..left + own, blocks.last().copied()) else {
            cx.memory.rm.pool.free(Owner::Own(id), &blocks);
            batch.forget_mapping(id);
            self.unstage(cx, batch, staged);
            return None;
        };
        let beside = window.map(|n| cx.memory.rm.pool.allocate(Owner::Own(id), n, None));
        blocks.extend(rest);
        if let Some(None) = beside {
            cx.memory.rm.pool.free(Owner::Own(id), &blocks);
            batch.forget_mapping(id);
            self.unstage(cx, batch, staged);
            return None;
        }
        let spare = staged.drain(..staged.len().min(found as usize)).collect();
        self.unstage(cx, batch, spare);
        let mut landing = Landing::new(blocks, (left, found), (known, layers), block_tokens);
        landing.hashed = hashed;
        if let (Some(shape), Some(beside)) = (cx.config.windowed, beside.flatten()) {
            landing.with_window(beside, shape.exported(known, block_tokens));
        }
        // The device copies staged KV, in order with the writes.
        landing.after_writes = if staged.is_empty() { cx.writes.queued() } else { 0 };
        landing.staged = staged;
        Some(landing)
    }

    /// Allocates the landing of a prompt that no worker computes yet, if there is room and a place in the batch now.
    pub(super) fn reserve(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) -> Option<Landing> {
        let known = batch.seq(id).filter(|_| self.has_place(cx, batch))?.len();
        // One slot more than known tokens, as at local admission: the first token needs a place.
        let mut landing = self.allocate_landing(cx, batch, id, (known, known + 1), takes_window(cx, known))?;
        landing.early = true;
        Some(landing)
    }

    /// Starts the read of ready KV. False if there is no room now.
    fn start_pull(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) -> bool {
        let now_ms = cx.now_ms;
        let Some(Stage::Ready(handed)) = self.away.get(&id).map(|away| &away.stage) else { return true };
        let (mut handed, Some(seq)) = (handed.clone(), batch.seq(id)) else { return true };
        let len = seq.len();
        let window = takes_window(cx, handed.tokens).filter(|_| handed.window);
        let landing = self.allocate_landing(cx, batch, id, (handed.tokens, len), window);
        let Some(mut landing) = landing else { return false };
        let fits = handed.offer.take().is_some_and(|offer| landing.accept(offer));
        if let Some(away) = self.away.get_mut(&id) {
            away.stage = Stage::Pulling { handed, landing, since_ms: now_ms };
        }
        if !fits {
            self.redo(cx, batch, id, "the worker's export does not fit the prompt");
        }
        true
    }

    fn pulled_by(&mut self, pull: PullId) -> Option<(SeqId, &mut Landing)> {
        let mut all = self.away.iter_mut().filter_map(|(seq, away)| Some((*seq, away.stage.landing_mut()?)));
        all.find(|(_, landing)| landing.reads(pull))
    }

    /// A part has arrived and is verified.
    fn on_pulled(&mut self, cx: &mut Cx, batch: &mut Batch, pull: PullId) {
        let Some((id, landing)) = self.pulled_by(pull) else { return self.settle(cx, batch, pull) };
        landing.ended(pull, true);
        self.land(cx, batch, id);
    }

    /// If all of a prompt's KV is computed, here and verified, the sequence goes on with it.
    pub(super) fn land(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        let whole = |stage: &Stage| matches!(stage, Stage::Pulling { landing, .. } if landing.is_whole());
        if !self.away.get(&id).is_some_and(|away| whole(&away.stage)) || self.stage_in(cx, batch, id) {
            return;
        }
        // Blocks left with a worker whose connection is lost cannot be attended to: wait for its return or recompute.
        let gone = |away: &Away| away.handed().is_some_and(|handed| handed.lost_at_ms.is_some());
        let left = |away: &Away| away.stage.landing().is_some_and(|landing| landing.left > 0);
        if self.away.get(&id).is_some_and(|away| gone(away) && left(away)) {
            return;
        }
        let Some(away) = self.away.remove(&id) else { return };
        let Stage::Pulling { handed, mut landing, since_ms } = away.stage else { return };
        let checks = landing.take_left_checks(cx.config.kv.layers);
        let Landing { blocks, window, left, early, found, hashed, .. } = landing;
        let now_ms = cx.now_ms;
        // With push, the wait for memory comes before the request to a worker.
        let (before_ms, after_ms) = (away.asked_ms - away.since_ms, since_ms - handed.ready_ms);
        let (asking_ms, decode_queue_ms) = if early { (0, before_ms) } else { (before_ms, after_ms) };
        self.note_pulled(PrefillTimes {
            queue_ms: asking_ms + handed.queued_ms,
            prefill_ms: handed.prefill_ms,
            decode_queue_ms,
            transfer_ms: now_ms - since_ms,
        });
        self.status.blocks_left += u64::from(left);
        let kept = u64::from(found * cx.config.block_tokens);
        self.status.found_tokens += kept;
        self.status.found_bytes += kept * (cx.config.kv.layers as usize * cx.config.kv.layer_token_bytes()) as u64;
        if !batch.has(id) {
            return;
        }
        let positions = cx.config.windowed.map(|shape| shape.positions(handed.tokens));
        let window = positions.filter(|_| !window.is_empty()).map(|positions| Window { positions, blocks: window });
        let rest = handed.entries(left);
        let left_there = (left, handed.lease, checks);
        let pulled = Pulled { tokens: handed.tokens, left: left_there, blocks, hashed, window };
        batch.take_pulled(cx, id, pulled);
        cx.memory.rm.debtor.held.release(&rest, now_ms);
        batch.resume(cx, id);
    }

    fn note_pulled(&mut self, times: PrefillTimes) {
        self.status.pulled += 1;
        self.status.note(times);
    }

    fn on_pull_failed(&mut self, cx: &mut Cx, batch: &mut Batch, pull: PullId, why: &Failure) {
        let Some((id, landing)) = self.pulled_by(pull) else { return self.settle(cx, batch, pull) };
        landing.ended(pull, false);
        self.redo(cx, batch, id, &why.to_string());
    }
}
