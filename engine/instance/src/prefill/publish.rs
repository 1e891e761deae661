//! What a prefill worker computes for another instance, as exports that transports serve.
//!
//! Pull: one export of everything, when it is computed. Push: parts, in the order in which they are computed. A part is some
//! layers of the tokens that a step computes, or all layers of what steps have computed since; the next one is made when
//! the one before is exported, so that parts grow while the asker or this instance is busy.
//!
//! Invariants:
//! * what was exported is never written again: whoever asked is told that its request failed before anything of it is
//!   computed a second time;
//! * blocks of which an export stands are not free, however their sequence ends: they become a lease that has ended and is
//!   pinned until no transport reads them;
//! * parts of one request are disjoint, and together they are all of it when its asker is told that it is done.

use super::Key;
use crate::event::{Effect, TransferEffect};
use crate::instance::Instance;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_runner::StageId;
use lagoon_transfer::Span;
use lagoon_types::limits::PUSH_PARTS;
use lagoon_types::{Chunk, Epoch, LeaseId, PhysBlock, SeqId};
use std::collections::BTreeSet;

/// The exports of one prefill.
#[derive(Debug)]
pub(super) struct Publication {
    pub(super) key: Key,
    /// The asker's sequence.
    seq: SeqId,
    /// In parts, while it is computed.
    push: bool,
    /// Tokens of the prompt.
    pub(super) total: u32,
    /// Exported or being exported: all layers of the tokens before `from`, and `layers` of those from there to `upto`.
    from: u32,
    upto: u32,
    layers: u32,
    /// Of the step in flight: the end of the whole blocks that it fills, and the layers in which it has filled them.
    step: Option<(u32, u32)>,
    /// An export is being made.
    making: bool,
    live: BTreeSet<u64>,
    /// Set when it is computed, or given up with exports that stand: whose blocks they are then.
    lease: Option<LeaseId>,
    pub(super) blocks: Vec<u32>,
    /// Where its blocks lie beside the store, if transports cannot read that, or that it waits for room there.
    pub(super) staged: Vec<u32>,
    pub(super) waits: bool,
    /// A part is being copied there.
    pub(super) stage: Option<(StageId, Span)>,
    pub(super) ended: bool,
}

impl Publication {
    pub(super) fn new(key: Key, seq: SeqId, push: bool, total: u32) -> Self {
        Self {
            key,
            seq,
            push,
            total,
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

    /// The next part: the tokens before `whole` are computed in all layers. `None` if there is nothing worth an export, or
    /// one is being made.
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

    pub(super) fn is_pushed(&self) -> bool {
        self.push && !self.ended
    }

    /// All of it is exported.
    fn is_whole(&self) -> bool {
        self.from == self.total && !self.making && !self.ended
    }
}

impl Instance {
    /// A step begins: notes what it fills of prompts that are pushed. Whether there are any.
    pub(crate) fn watch(&mut self, chunks: &[Chunk]) -> bool {
        let block_tokens = self.cx.config.block_tokens;
        let mut any = false;
        for chunk in chunks {
            let Some(publication) = self.prefill.published.get_mut(&chunk.seq).filter(|p| p.push && !p.ended) else {
                continue;
            };
            let end = chunk.start + chunk.len;
            let whole = if end == publication.total { end } else { end - end % block_tokens };
            publication.step = Some((whole, 0));
            any = true;
        }
        any
    }

    /// A step has filled so many layers of what it computes of a prompt.
    pub(crate) fn on_layers(&mut self, id: SeqId, layers: u32) {
        if let Some((_, filled)) = self.prefill.published.get_mut(&id).and_then(|p| p.step.as_mut()) {
            *filled = layers;
            self.publish(id);
        }
    }

    /// A step has computed a chunk of a prompt.
    pub(crate) fn on_chunk(&mut self, id: SeqId) {
        if let Some(publication) = self.prefill.published.get_mut(&id).filter(|p| p.push) {
            publication.step = None;
            self.publish(id);
        }
    }

    /// A step ended without having computed its chunk of a prompt: what was exported of it would be written again.
    pub(crate) fn on_chunk_left(&mut self, id: SeqId) {
        let left = self.prefill.published.get_mut(&id).and_then(|p| p.step.take().map(|_| p.layers > 0));
        if left == Some(true) {
            self.end_job(id, "a step of it was given up");
        }
    }

    /// A sequence is to give its memory up and be computed again. True if it computes for others, who have parts of it:
    /// then it is over.
    pub(crate) fn ends_pushed(&mut self, id: SeqId) -> bool {
        let pushed = self.prefill.published.get(&id).is_some_and(|p| p.push);
        if pushed {
            self.end_job(id, "its memory was needed");
        }
        pushed
    }

    /// Exports what is computed of a prompt, if that is enough.
    pub(super) fn publish(&mut self, id: SeqId) {
        let (block_tokens, layers) = (self.cx.config.block_tokens, self.cx.config.kv.layers);
        if !self.has_stages(id) {
            return;
        }
        let Some(publication) = self.prefill.published.get_mut(&id) else { return };
        let mut whole = publication.total;
        if publication.lease.is_none() {
            let Some(seq) = self.batch.seq(id) else { return };
            let written = seq.blocks.written();
            whole = if written == whole { written } else { written - written % block_tokens };
            if publication.blocks.is_empty() {
                publication.blocks = local(seq.blocks.placements());
            }
        }
        let Some(part) = publication.next(whole, layers) else { return };
        if publication.staged.is_empty() { self.export(id, part) } else { self.stage_out(id, part) }
    }

    /// All of a prompt is computed, and its blocks are this lease's: what is not exported yet is now.
    pub(super) fn publish_rest(&mut self, id: SeqId, lease: LeaseId, blocks: Vec<u32>) {
        let Some(publication) = self.prefill.published.get_mut(&id) else { return };
        (publication.lease, publication.blocks, publication.step) = (Some(lease), blocks, None);
        self.cx.memory.rm.pin(lease);
        if self.cx.config.transfer.is_none() {
            return self.on_exported(id, Err("this instance's KV cannot be read by others".to_owned()));
        }
        self.publish(id);
    }

    /// Transports serve a part from now on, or cannot.
    pub(crate) fn on_exported(&mut self, id: SeqId, export: Result<u64, String>) {
        let Some(publication) = self.prefill.published.get_mut(&id) else { return };
        publication.making = false;
        match export {
            Ok(export) => {
                publication.live.insert(export);
                self.prefill.exports.insert(export, id);
                if publication.ended {
                    self.revoke(export);
                } else {
                    self.publish(id);
                }
                if self.prefill.published.get(&id).is_some_and(Publication::is_whole) {
                    if mutants::is(Mutant::StageReused) {
                        let staged = self.prefill.published.get_mut(&id).map(|p| std::mem::take(&mut p.staged));
                        self.unstage(staged.unwrap_or_default());
                    }
                    self.tell_ready(id, Ok(export));
                }
            }
            Err(why) if publication.ended => tracing::debug!(why, "a part that nobody wants was not exported"),
            Err(why) if publication.lease.is_some() => {
                self.unpublish(id);
                self.tell_ready(id, Err(why));
            }
            Err(why) => self.end_job(id, &why),
        }
        self.settle_publication(id);
    }

    /// No transport reads an export any more.
    pub(crate) fn on_export_freed(&mut self, export: u64) {
        let Some(id) = self.prefill.exports.remove(&export) else { return };
        self.prefill.published.get_mut(&id).into_iter().for_each(|p| _ = p.live.remove(&export));
        self.settle_publication(id);
    }

    fn revoke(&mut self, export: u64) {
        self.cx.effects.push(Effect::Transfer(TransferEffect::Revoke { export }));
    }

    /// Nobody wants it any more.
    pub(super) fn unpublish(&mut self, id: SeqId) {
        let Some(publication) = self.prefill.published.get_mut(&id) else { return };
        (publication.ended, publication.waits) = (true, false);
        let live: Vec<u64> = publication.live.iter().copied().collect();
        live.into_iter().for_each(|export| self.revoke(export));
        self.settle_publication(id);
    }

    /// Forgets what has ended, and frees its blocks if they waited for that.
    fn settle_publication(&mut self, id: SeqId) {
        let idle = |p: &Publication| !p.making && p.live.is_empty();
        let Some(publication) = self.prefill.published.get(&id).filter(|p| idle(p)) else { return };
        // Without a lease its sequence has the blocks, and forgets it when it gives them up.
        let over = publication.ended || publication.is_whole();
        if let Some(lease) = publication.lease.filter(|_| over) {
            self.forget_publication(id);
            self.cx.memory.rm.unpin(lease);
        }
    }

    fn forget_publication(&mut self, id: SeqId) {
        if let Some(publication) = self.prefill.published.remove(&id) {
            self.unstage(publication.staged);
        }
        // One less may wait in front of others.
        self.stage_waiting();
    }

    /// A sequence gave its blocks up. True if transports may still read them: they are free when none does.
    pub(crate) fn withhold(&mut self, id: SeqId, blocks: &[PhysBlock]) -> bool {
        let Some(publication) = self.prefill.published.get_mut(&id) else { return false };
        if !publication.making && publication.live.is_empty() {
            if publication.ended {
                self.forget_publication(id);
            }
            return false;
        }
        let ((reader, request), seq) = (publication.key, publication.seq);
        let tokens = u32::try_from(blocks.len()).unwrap_or(u32::MAX).saturating_mul(self.cx.config.block_tokens);
        let grant = self.cx.memory.rm.hand_over(id, (reader, seq, request), blocks.to_vec(), tokens, self.cx.now_ms);
        let lease = LeaseId(grant.lease);
        publication.lease = Some(lease);
        self.cx.memory.rm.pin(lease);
        self.cx.memory.rm.take_back(reader, lease, Epoch(grant.epoch));
        self.unpublish(id);
        true
    }
}

/// Numbers of blocks that all lie here.
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
        Publication::new((InstanceId(1), 2), SeqId(3), push, total)
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
