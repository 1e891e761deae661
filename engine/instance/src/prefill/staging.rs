//! The staging buffer: memory beside the KV store, where only the device can access the store. KV that transports read
//! or write passes through it.
//!
//! A prefill takes staging blocks for all its rBlocks before its first export, in the order of arrival, and keeps them
//! until nothing of it is exported; each part is copied out of the store before its export. A decode worker takes
//! staging blocks together with a landing; KV is verified there, and copied into the store when all of it has arrived.
//!
//! Invariants:
//! * a staging block belongs to one publication, landing or settling, and is free when that ends;
//! * no staging block is freed while the device copies to or from it, or a transport may use it.

use super::Prefills;
use super::ask::Stage;
use super::landing::Landing;
use crate::batch::Batch;
use crate::cx::Cx;
use crate::event::{Effect, TransferEffect};
use lagoon_backend::DeviceError;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_runner::{Command, StageId, StageWork};
use lagoon_transfer::Span;
use lagoon_types::{PhysBlock, SeqId};
use std::collections::BTreeSet;
use std::ops::Range;

/// User of staging blocks: exports or reads of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageUser {
    Exported(SeqId),
    Read(SeqId),
}

/// The staging buffer's free blocks.
#[derive(Debug, Default)]
pub(super) struct Staging {
    total: u32,
    free: BTreeSet<u32>,
    issued: u64,
}

impl Staging {
    pub(super) fn new(total: u32) -> Self {
        Self { total, free: (0..total).collect(), issued: 0 }
    }

    /// Takes `n` blocks, the lowest first so that copies have few pieces; `None` if there are fewer.
    fn take(&mut self, n: usize) -> Option<Vec<u32>> {
        let taken: Vec<u32> = self.free.iter().copied().take(n).collect();
        if taken.len() < n {
            return None;
        }
        taken.iter().for_each(|block| _ = self.free.remove(block));
        Some(taken)
    }

    fn give_back(&mut self, blocks: Vec<u32>) {
        for block in blocks {
            assert!(block < self.total && self.free.insert(block), "block {block} beside the store is given back once");
        }
    }

    /// Blocks in use.
    pub(super) fn used(&self) -> u32 {
        self.total - u32::try_from(self.free.len()).unwrap_or(self.total)
    }

    fn issue(&mut self) -> StageId {
        self.issued += 1;
        StageId(self.issued)
    }
}

/// Pieces to copy `tokens` tokens between blocks of the store and staging blocks: consecutive blocks are one piece.
fn pieces(store: &[u32], beside: &[u32], tokens: u32, block_tokens: u32) -> Vec<(u32, u32, u32)> {
    let mut pieces: Vec<(u32, u32, u32)> = Vec::new();
    for ((n, block), place) in (0..).zip(store).zip(beside) {
        let filled = block_tokens.min(tokens.saturating_sub(n * block_tokens));
        let (slot, at) = (block * block_tokens, place * block_tokens);
        match pieces.last_mut() {
            Some(last) if (last.0 + last.2, last.1 + last.2) == (slot, at) => last.2 += filled,
            _ if filled > 0 => pieces.push((slot, at, filled)),
            _ => {}
        }
    }
    pieces
}

impl Prefills {
    /// Staging blocks by user, for reading: exports and reads.
    pub(crate) fn stages(&self) -> impl Iterator<Item = (StageUser, &[u32])> {
        let out = self.published.iter().map(|(seq, of)| (StageUser::Exported(*seq), of.staged.as_slice()));
        let landings = self.away.iter().filter_map(|(seq, away)| Some((*seq, away.stage.landing()?)));
        let landings = landings.map(|(seq, of)| (StageUser::Read(seq), of.staged.as_slice()));
        let settling = self.settling.iter().map(|of| (StageUser::Read(of.seq()), of.staged()));
        out.chain(landings).chain(settling).filter(|(_, blocks)| !blocks.is_empty())
    }

    /// Takes `n` staging blocks; none where the store is read directly. `None`: wait.
    pub(super) fn take_stages(&mut self, cx: &mut Cx, n: u32) -> Option<Vec<u32>> {
        if cx.stage_blocks() == 0 {
            return Some(Vec::new());
        }
        self.staging.take(n as usize)
    }

    /// Frees staging blocks, and gives them to prefills that wait.
    pub(super) fn unstage(&mut self, cx: &mut Cx, batch: &mut Batch, blocks: Vec<u32>) {
        if blocks.is_empty() {
            return;
        }
        self.staging.give_back(blocks);
        self.stage_waiting(cx, batch);
    }

    /// Starts exports of prefills that waited for staging blocks, the oldest first.
    pub(super) fn stage_waiting(&mut self, cx: &mut Cx, batch: &mut Batch) {
        loop {
            let first = self.published.iter().find(|(_, p)| p.waits).map(|(id, _)| *id);
            let Some(id) = first else { return };
            self.publish(cx, batch, id);
            if self.published.get(&id).is_some_and(|p| p.waits) {
                return;
            }
        }
    }

    /// Takes staging blocks for a prefill that has none and needs them. False if it must wait for them: the oldest first.
    pub(super) fn take_stages_or_wait(&mut self, cx: &mut Cx, id: SeqId) -> bool {
        if cx.stage_blocks() == 0 {
            return true;
        }
        let older_waits = self.published.range(..id).any(|(_, p)| p.waits);
        let Some(publication) = self.published.get_mut(&id) else { return false };
        if !publication.staged.is_empty() || publication.ended {
            return true;
        }
        let needed = publication.total.div_ceil(cx.config.block_tokens) as usize;
        let room = if older_waits { None } else { self.staging.take(needed) };
        self.status.stage_waits += u64::from(room.is_none() && !publication.waits);
        publication.waits = room.is_none();
        publication.staged = room.unwrap_or_default();
        !publication.waits
    }

    /// Copies a part of a prefill to the staging buffer; its export follows.
    pub(super) fn stage_out(&mut self, cx: &mut Cx, id: SeqId, part: Span) {
        let (block_tokens, all) = (cx.config.block_tokens, 0..cx.config.kv.layers);
        let Some(publication) = self.published.get_mut(&id) else { return };
        let blocks = blocks_of(&part, block_tokens);
        let pieces =
            pieces(&publication.blocks[blocks.clone()], &publication.staged[blocks], part.tokens, block_tokens);
        let stage = self.staging.issue();
        let layers = part.layers.clone().unwrap_or(all);
        publication.stage = Some((stage, part.clone()));
        if mutants::is(Mutant::StageUnawaited) {
            publication.stage = None;
            self.export(cx, id, part);
        }
        cx.effects.push(Effect::Runner(Command::Stage(StageWork { stage, inward: false, layers, pieces })));
    }

    /// Exports a part of a prefill through the transports.
    pub(super) fn export(&mut self, cx: &mut Cx, id: SeqId, part: Span) {
        let block_tokens = cx.config.block_tokens;
        let Some(publication) = self.published.get(&id) else { return };
        let read = if publication.staged.is_empty() { &publication.blocks } else { &publication.staged };
        let blocks = read[blocks_of(&part, block_tokens)].to_vec();
        let (reader, request) = publication.key;
        let export = TransferEffect::Export { job: id, reader, request, part, blocks };
        cx.effects.push(Effect::Transfer(export));
    }

    /// Copies arrived KV from the staging buffer into the store. False if there is nothing to copy (any more).
    pub(super) fn stage_in(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) -> bool {
        let (block_tokens, layers) = (cx.config.block_tokens, 0..cx.config.kv.layers);
        let landing = self.away.get_mut(&id).and_then(|away| away.stage.landing_mut());
        let Some(landing) = landing.filter(|landing| !landing.staged.is_empty()) else { return false };
        if landing.stage.is_some() {
            return true;
        }
        let stage = self.staging.issue();
        landing.stage = Some(stage);
        let store: Vec<u32> = landing.read_into().iter().map(|block: &PhysBlock| block.0).collect();
        let pieces = pieces(&store, &landing.staged, landing.tokens_here(), block_tokens);
        cx.release_freed();
        cx.effects.push(Effect::Runner(Command::Stage(StageWork { stage, inward: true, layers, pieces })));
        if mutants::is(Mutant::LandedUnstored) {
            let landing = self.away.get_mut(&id).and_then(|away| away.stage.landing_mut());
            let staged = landing.map(Landing::stored).unwrap_or_default();
            self.unstage(cx, batch, staged);
            return false;
        }
        true
    }

    /// Ends a copy between the store and the staging buffer, done or failed.
    pub(crate) fn on_staged(&mut self, cx: &mut Cx, batch: &mut Batch, stage: StageId, error: Option<&DeviceError>) {
        let failed = error.map(|error| format!("its KV was not copied between the device and the host: {error}"));
        let out = self.published.iter_mut().find(|(_, p)| p.stage.as_ref().is_some_and(|(of, _)| *of == stage));
        if let Some((id, publication)) = out {
            let (id, part, ended) = (*id, publication.stage.take(), publication.ended);
            return match (part, failed) {
                (Some((_, part)), None) if !ended => self.export(cx, id, part),
                (_, why) => {
                    self.on_exported(cx, batch, id, Err(why.unwrap_or_else(|| "its request was cancelled".to_owned())))
                }
            };
        }
        let is = |stage_of: &Stage| stage_of.landing().is_some_and(|landing| landing.stage == Some(stage));
        let Some(id) = self.away.iter().find(|(_, away)| is(&away.stage)).map(|(id, _)| *id) else {
            return self.settle_stage(cx, batch, stage);
        };
        let landing = self.away.get_mut(&id).and_then(|away| away.stage.landing_mut());
        let staged = landing.map(Landing::stored).unwrap_or_default();
        self.unstage(cx, batch, staged);
        match failed {
            None => self.land(cx, batch, id),
            Some(why) => self.redo(cx, batch, id, &why),
        }
    }
}

/// Range of a prompt's blocks in a part.
fn blocks_of(part: &Span, block_tokens: u32) -> Range<usize> {
    let end = (part.first_token + part.tokens).div_ceil(block_tokens);
    (part.first_token / block_tokens) as usize..end as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_whole_and_given_back_once() {
        let mut of = Staging::new(5);
        let first = of.take(3).unwrap();
        assert_eq!((first.as_slice(), of.take(3), of.used()), (&[0, 1, 2][..], None, 3));
        let second = of.take(2).unwrap();
        of.give_back(first);
        assert_eq!((of.take(3), second.as_slice()), (Some(vec![0, 1, 2]), &[3, 4][..]));
        let twice = std::panic::catch_unwind(move || {
            of.give_back(vec![3]);
            of.give_back(vec![3]);
        });
        assert!(twice.is_err());
    }

    #[test]
    fn consecutive_blocks_are_copied_at_once_and_no_token_too_many() {
        let of = |store: &[u32], beside: &[u32], tokens| pieces(store, beside, tokens, 4);
        assert_eq!(of(&[7, 8, 9], &[0, 1, 2], 10), [(28, 0, 10)]);
        assert_eq!(of(&[7, 9, 10], &[0, 1, 2], 12), [(28, 0, 4), (36, 4, 8)]);
        assert_eq!(of(&[7, 8], &[5, 3], 8), [(28, 20, 4), (32, 12, 4)]);
        // The last one is for the next token.
        assert_eq!(of(&[7, 8, 4], &[5, 6, 1], 8), [(28, 20, 8)]);
    }
}
