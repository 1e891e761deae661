//! Exports of a prefill worker: the KV that it computes for another instance, as transports serve it.
//!
//! Pull: one export of everything, when computed. Push: parts, in the order of computation. A part is some layers of
//! the tokens of one step, or all layers of the tokens of several finished steps; the next part is made when the one
//! before is exported, so that parts grow while the decode worker or this instance is busy.
//!
//! Invariants:
//! * exported KV is never written again: the decode worker learns that its request failed before any of it is
//!   recomputed;
//! * blocks of a live export are not free, however their sequence ends: they become a lease that has ended and is
//!   pinned until no transport reads them;
//! * parts of one request are disjoint, and cover it when its decode worker learns that it is done.

use super::{Key, Prefills};
use crate::batch::Batch;
use crate::cx::Cx;
use crate::event::{Effect, TransferEffect};
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_kv::Owner;
use lagoon_runner::StageId;
use lagoon_transfer::Span;
use lagoon_types::limits::PUSH_PARTS;
use lagoon_types::{Chunk, Epoch, LeaseId, PhysBlock, SeqId};
use std::collections::BTreeSet;

/// The exports of one prefill.
#[derive(Debug)]
pub(super) struct Publication {
    pub(super) key: Key,
    /// The decode worker's sequence.
    seq: SeqId,
    /// Push: exported in parts during the computation.
    pub(super) push: bool,
    /// Tokens to export: the prompt's, and those of its last window if that goes with it.
    pub(super) total: u32,
    prompt: u32,
    /// Exported or being exported: all layers of the tokens before `from`, and `layers` layers of those from there to
    /// `upto`.
    from: u32,
    upto: u32,
    layers: u32,
    /// For the step in flight: the end of the whole blocks that it fills, and the number of layers filled.
    step: Option<(u32, u32)>,
    /// An export is in progress.
    making: bool,
    live: BTreeSet<u64>,
    /// Set when computed, or dropped with live exports: the lease that owns the blocks from then on.
    lease: Option<LeaseId>,
    pub(super) blocks: Vec<u32>,
    /// Staging blocks, if transports cannot read the store; `waits` for some of them otherwise.
    pub(super) staged: Vec<u32>,
    pub(super) waits: bool,
    /// The copy of a part to the staging buffer, in progress.
    pub(super) stage: Option<(StageId, Span)>,
    pub(super) ended: bool,
}

impl Publication {
    /// `exported`: tokens with those of the last window, if that is to go with the prompt.
    pub(super) fn new(key: Key, seq: SeqId, push: bool, (prompt, exported): (u32, Option<u32>)) -> Self {
        Self {
            key,
            seq,
            push,
            total: exported.unwrap_or(prompt),
            prompt,
            from: 0,
            upto: 0,
            layers: 0,
            step: None,
            making: false,
            live: BTreeSet::new(),
            lease: None,
            blocks: Vec::new(),
            staged: Vec::new(),
            waits: false,
            stage: None,
            ended: false,
        }
    }

    /// The next part to export; tokens before `whole` are computed in all layers. `None` if there is too little for an
    /// export, or one is in progress.
    fn next(&mut self, whole: u32, layers_all: u32) -> Option<Span> {
        let open = self.push || whole == self.total;
        if self.making || self.ended || !open || self.from == self.total {
            return None;
        }
        if self.layers == 0 {
            self.upto = if whole > self.from { whole } else { self.step.map_or(0, |(end, _)| end) };
        }
        let inside = self.step.filter(|(end, _)| *end >= self.upto).map_or(0, |(_, layers)| layers);
        let computed = if whole >= self.upto { layers_all } else { inside };
        let few = computed < layers_all && computed.saturating_sub(self.layers) < layers_all.div_ceil(PUSH_PARTS);
        if self.upto <= self.from || computed <= self.layers || few {
            return None;
        }
        let layers = (self.layers > 0 || computed < layers_all).then_some(self.layers..computed);
        let part = Span { first_token: self.from, tokens: self.upto - self.from, layers };
        self.layers = computed;
        if computed == layers_all {
            (self.from, self.layers) = (self.upto, 0);
        }
        self.making = true;
        Some(part)
    }

    /// Whether transports may read some of it.
    pub(super) fn is_exported(&self) -> bool {
        self.making || !self.live.is_empty()
    }

    pub(super) fn is_pushed(&self) -> bool {
        self.push && !self.ended
    }

    /// Whether all of it is exported.
    fn is_whole(&self) -> bool {
        self.from == self.total && !self.making && !self.ended
    }
}

impl Prefills {
    /// A step begins: records which blocks of pushed prompts it fills.
    pub(super) fn on_watched(&mut self, cx: &Cx, chunks: &[Chunk]) {
        for chunk in chunks {
            let Some(publication) = self.published.get_mut(&chunk.seq).filter(|p| p.is_pushed()) else { continue };
            let end = chunk.start + chunk.len;
            // A last window is exported together with the last block, behind which it begins.
            let whole = if end == publication.total { end } else { end - end % cx.config.block_tokens };
            publication.step = Some((whole, 0));
        }
    }

    /// A step has filled `layers` layers of its chunk of a prompt.
    pub(crate) fn on_layers(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId, layers: u32) {
        if let Some((_, filled)) = self.published.get_mut(&id).and_then(|p| p.step.as_mut()) {
            *filled = layers;
            self.publish(cx, batch, id);
        }
    }

    /// A step has computed a chunk of a prompt.
    pub(crate) fn on_chunk(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        if let Some(publication) = self.published.get_mut(&id).filter(|p| p.push) {
            publication.step = None;
            self.publish(cx, batch, id);
        }
    }

    /// A step ended without having computed its chunk of a prompt: ends the prefill if layers of it are exported, as
    /// they would be written again.
    pub(crate) fn on_chunk_left(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        let left = self.published.get_mut(&id).and_then(|p| p.step.take().map(|_| p.layers > 0));
        if left == Some(true) {
            self.end_job(cx, batch, id, "one of its steps was aborted");
        }
    }

    /// Exports the next part of a prompt, if there is one.
    pub(super) fn publish(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        let (block_tokens, layers) = (cx.config.block_tokens, cx.config.kv.layers);
        if !self.take_stages_or_wait(cx, id) {
            return;
        }
        let Some(publication) = self.published.get_mut(&id) else { return };
        let mut whole = publication.total;
        if publication.lease.is_none() {
            let Some(seq) = batch.seq(id) else { return };
            let written = seq.blocks.written();
            let is_all = written == publication.prompt && publication.prompt == whole;
            whole = if is_all { written } else { written - written % block_tokens };
            if publication.blocks.is_empty() {
                publication.blocks = local(seq.blocks.placements());
            }
        }
        let Some(part) = publication.next(whole, layers) else { return };
        if publication.staged.is_empty() { self.export(cx, id, part) } else { self.stage_out(cx, id, part) }
    }

    /// All of a prompt is computed, and its blocks belong to this lease: exports the rest.
    pub(super) fn publish_rest(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId, lease: LeaseId, blocks: Vec<u32>) {
        let Some(publication) = self.published.get_mut(&id) else { return };
        if blocks.len() == publication.prompt.div_ceil(cx.config.block_tokens) as usize {
            // There was no memory for its last window.
            publication.total = publication.prompt;
        }
        (publication.lease, publication.blocks, publication.step) = (Some(lease), blocks, None);
        cx.memory.rm.creditor.pin(lease);
        if cx.config.transfer.is_none() {
            return self.on_exported(cx, batch, id, Err("this instance's KV cannot be read by others".to_owned()));
        }
        self.publish(cx, batch, id);
    }

    /// The reply of transports to an export.
    pub(crate) fn on_exported(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId, export: Result<u64, String>) {
        let Some(publication) = self.published.get_mut(&id) else { return };
        publication.making = false;
        match export {
            Ok(export) => {
                publication.live.insert(export);
                self.exports.insert(export, id);
                if publication.ended {
                    self.revoke(cx, export);
                } else {
                    self.publish(cx, batch, id);
                }
                if self.published.get(&id).is_some_and(Publication::is_whole) {
                    if mutants::is(Mutant::StageReused) {
                        let staged = self.published.get_mut(&id).map(|p| std::mem::take(&mut p.staged));
                        self.unstage(cx, batch, staged.unwrap_or_default());
                    }
                    self.reply_ready(cx, batch, id, Ok(export));
                }
            }
            Err(why) if publication.ended => tracing::debug!(why, "an unwanted part was not exported"),
            Err(why) if publication.lease.is_some() => {
                self.unpublish(cx, batch, id);
                self.reply_ready(cx, batch, id, Err(why));
            }
            Err(why) => self.end_job(cx, batch, id, &why),
        }
        self.settle_publication(cx, batch, id);
    }

    /// No transport reads an export any more.
    pub(crate) fn on_export_freed(&mut self, cx: &mut Cx, batch: &mut Batch, export: u64) {
        let Some(id) = self.exports.remove(&export) else { return };
        self.published.get_mut(&id).into_iter().for_each(|p| _ = p.live.remove(&export));
        self.settle_publication(cx, batch, id);
    }

    fn revoke(&mut self, cx: &mut Cx, export: u64) {
        cx.effects.push(Effect::Transfer(TransferEffect::Revoke { export }));
    }

    /// Ends a prefill's exports: its KV is not wanted any more.
    pub(super) fn unpublish(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        let Some(publication) = self.published.get_mut(&id) else { return };
        (publication.ended, publication.waits) = (true, false);
        let live: Vec<u64> = publication.live.iter().copied().collect();
        live.into_iter().for_each(|export| self.revoke(cx, export));
        self.settle_publication(cx, batch, id);
    }

    /// Drops a publication without live exports that has ended, and frees its blocks if they waited for that.
    fn settle_publication(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        let Some(publication) = self.published.get(&id).filter(|p| !p.is_exported()) else { return };
        // Without a lease the sequence owns the blocks, and frees them when it releases its memory.
        let over = publication.ended || publication.is_whole();
        if let Some(lease) = publication.lease.filter(|_| over) {
            self.forget_publication(cx, batch, id);
            cx.memory.rm.creditor.unpin(lease, &mut cx.memory.rm.pool);
        }
    }

    fn forget_publication(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        if let Some(publication) = self.published.remove(&id) {
            self.unstage(cx, batch, publication.staged);
        }
        // One publication less may wait for staging blocks ahead of others.
        self.stage_waiting(cx, batch);
    }

    /// A sequence freed its memory, and no export of it is live.
    pub(super) fn on_released(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        if self.published.get(&id).is_some_and(|p| p.ended && !p.is_exported()) {
            self.forget_publication(cx, batch, id);
        }
    }

    /// A sequence freed blocks that transports may still read: they become free when none does.
    pub(super) fn on_withheld(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId, blocks: Vec<PhysBlock>) {
        let Some(publication) = self.published.get_mut(&id) else {
            return cx.memory.rm.pool.free(Owner::Own(id), &blocks);
        };
        let ((reader, request), seq) = (publication.key, publication.seq);
        let tokens = u32::try_from(blocks.len()).unwrap_or(u32::MAX).saturating_mul(cx.config.block_tokens);
        let grant = cx.memory.rm.creditor.hand_over(
            id,
            (reader, seq, request),
            blocks,
            tokens,
            cx.now_ms,
            &mut cx.memory.rm.pool,
        );
        let lease = LeaseId(grant.lease);
        publication.lease = Some(lease);
        cx.memory.rm.creditor.pin(lease);
        cx.memory.rm.creditor.take_back(reader, lease, Epoch(grant.epoch), &mut cx.memory.rm.pool);
        self.unpublish(cx, batch, id);
    }
}

/// Block numbers of placements that are all local.
pub(super) fn local(placements: &[lagoon_kv::Placement]) -> Vec<u32> {
    let number = |placement: &lagoon_kv::Placement| match placement {
        lagoon_kv::Placement::Local(block) => block.0,
        other => panic!("a prompt for another instance lies here, not at {other:?}"),
    };
    placements.iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_types::InstanceId;

    fn publication(push: bool, total: u32) -> Publication {
        Publication::new((InstanceId(1), 2), SeqId(3), push, (total, None))
    }

    /// First token, tokens, and layers if not all.
    type Part = (u32, u32, Option<(u32, u32)>);

    /// Parts in order, with what is computed whenever one may be made: whole tokens, and the step's end and layers.
    fn parts(of: &mut Publication, moments: &[(u32, Option<(u32, u32)>)]) -> Vec<Part> {
        let mut found = Vec::new();
        for (whole, step) in moments {
            (of.step, of.making) = (*step, false);
            let part = of.next(*whole, 4);
            found.extend(part.map(|p| (p.first_token, p.tokens, p.layers.map(|l| (l.start, l.end)))));
        }
        found
    }

    #[test]
    fn pull_exports_once() {
        let mut of = publication(false, 10);
        assert_eq!(parts(&mut of, &[(4, Some((8, 2))), (8, None), (10, None)]), [(0, 10, None)]);
        assert!(!of.is_whole(), "it is being made");
        of.making = false;
        assert!(of.is_whole() && of.next(10, 4).is_none());
    }

    #[test]
    fn parts_are_layers_of_a_step_and_all_that_was_computed_meanwhile() {
        let mut of = publication(true, 10);
        // Layers of the first step, the rest of it when it is over, then two steps at once, the last with half a block.
        let moments =
            [(0, Some((4, 0))), (0, Some((4, 1))), (0, Some((4, 1))), (0, Some((4, 3))), (4, Some((8, 0))), (10, None)];
        let expected = [(0, 4, Some((0, 1))), (0, 4, Some((1, 3))), (0, 4, Some((3, 4))), (4, 6, None)];
        assert_eq!(parts(&mut of, &moments), expected);
        assert_eq!((of.from, of.layers), (10, 0));
    }

    #[test]
    fn a_chunk_that_fills_no_block_is_no_part() {
        let mut of = publication(true, 10);
        assert_eq!(parts(&mut of, &[(0, Some((0, 3))), (0, None)]), []);
        assert_eq!(
            parts(&mut of, &[(0, Some((8, 3))), (8, Some((8, 2)))]),
            [(0, 8, Some((0, 3))), (0, 8, Some((3, 4)))]
        );
        // The tokens behind the last whole block wait for the end.
        assert_eq!(parts(&mut of, &[(8, Some((8, 3))), (8, Some((10, 2)))]), [(8, 2, Some((0, 2)))]);
    }
}
