//! Memory beside the KV store, where the store is the device's alone: what transports read of prompts that are computed
//! here, and what they bring of those that others computed, passes through it.
//!
//! A prefill gets room for all of its rBlocks before its first export, in the order of arrival, and keeps it until nothing
//! of it is exported any more; each part is copied out of the store before it is exported. A decode worker takes room with
//! the blocks that a prompt is read into; what arrived is verified there, and copied into the store when all of it has.
//!
//! Invariants:
//! * a block of it belongs to one publication, landing or settling, and is free when that ends;
//! * nothing of it is given back while the device copies to it or from it, or a transport may use it.

use super::ask::Stage;
use super::landing::Landing;
use crate::event::{Effect, TransferEffect};
use crate::instance::Instance;
use lagoon_backend::DeviceError;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_runner::{Command, StageId, StageWork};
use lagoon_transfer::Span;
use lagoon_types::{PhysBlock, SeqId};
use std::collections::BTreeSet;
use std::ops::Range;

/// What blocks beside the store are used for, and of which sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageUser {
    Exported(SeqId),
    Read(SeqId),
}

/// The blocks of that memory.
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

    /// `n` blocks, the lowest first so that they are copied in few pieces, or none.
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

    /// Blocks that something uses.
    pub(super) fn used(&self) -> u32 {
        self.total - u32::try_from(self.free.len()).unwrap_or(self.total)
    }

    fn issue(&mut self) -> StageId {
        self.issued += 1;
        StageId(self.issued)
    }
}

/// What is copied of `tokens` tokens between blocks of the store and blocks beside it: consecutive ones at once.
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

impl Instance {
    /// Who uses which blocks beside the store, to look at: what is exported from them, and what is read into them.
    pub fn stages(&self) -> impl Iterator<Item = (StageUser, &[u32])> {
        let prefills = &self.prefill;
        let out = prefills.published.iter().map(|(seq, of)| (StageUser::Exported(*seq), of.staged.as_slice()));
        let landings = prefills.away.iter().filter_map(|(seq, away)| Some((*seq, away.stage.landing()?)));
        let landings = landings.map(|(seq, of)| (StageUser::Read(seq), of.staged.as_slice()));
        let settling = prefills.settling.iter().map(|of| (StageUser::Read(of.seq()), of.staged()));
        out.chain(landings).chain(settling).filter(|(_, blocks)| !blocks.is_empty())
    }

    /// Blocks beside the store in all; 0 where transports read and fill the store itself.
    pub(crate) fn stage_blocks(&self) -> u32 {
        self.cx.config.transfer.as_ref().map_or(0, |transfer| transfer.stage_blocks)
    }

    /// Whether transports write into the store by themselves.
    pub(crate) fn reads_directly(&self) -> bool {
        self.membership.roles.reads() && self.stage_blocks() == 0
    }

    /// Room for `n` blocks beside the store, nothing where none is needed. `None`: wait.
    pub(super) fn take_stages(&mut self, n: u32) -> Option<Vec<u32>> {
        if self.stage_blocks() == 0 {
            return Some(Vec::new());
        }
        self.prefill.staging.take(n as usize)
    }

    /// Gives room back, and to prefills that wait for it.
    pub(super) fn unstage(&mut self, blocks: Vec<u32>) {
        if blocks.is_empty() {
            return;
        }
        self.prefill.staging.give_back(blocks);
        self.stage_waiting();
    }

    /// Exports of prefills that waited for room, the oldest first.
    pub(super) fn stage_waiting(&mut self) {
        loop {
            let first = self.prefill.published.iter().find(|(_, p)| p.waits).map(|(id, _)| *id);
            let Some(id) = first else { return };
            self.publish(id);
            if self.prefill.published.get(&id).is_some_and(|p| p.waits) {
                return;
            }
        }
    }

    /// Whether a prefill has room beside the store, or needs none. If not, it is told when there is: the oldest first.
    pub(super) fn has_stages(&mut self, id: SeqId) -> bool {
        if self.stage_blocks() == 0 {
            return true;
        }
        let older_waits = self.prefill.published.range(..id).any(|(_, p)| p.waits);
        let Some(publication) = self.prefill.published.get_mut(&id) else { return false };
        if !publication.staged.is_empty() || publication.ended {
            return true;
        }
        let needed = publication.total.div_ceil(self.cx.config.block_tokens) as usize;
        let room = if older_waits { None } else { self.prefill.staging.take(needed) };
        self.prefill.status.stage_waits += u64::from(room.is_none() && !publication.waits);
        publication.waits = room.is_none();
        publication.staged = room.unwrap_or_default();
        !publication.waits
    }

    /// Has a part of a prefill copied to where transports read, and exported then.
    pub(super) fn stage_out(&mut self, id: SeqId, part: Span) {
        let (block_tokens, all) = (self.cx.config.block_tokens, 0..self.cx.config.kv.layers);
        let Some(publication) = self.prefill.published.get_mut(&id) else { return };
        let blocks = blocks_of(&part, block_tokens);
        let pieces =
            pieces(&publication.blocks[blocks.clone()], &publication.staged[blocks], part.tokens, block_tokens);
        let stage = self.prefill.staging.issue();
        let layers = part.layers.clone().unwrap_or(all);
        publication.stage = Some((stage, part.clone()));
        if mutants::is(Mutant::StageUnawaited) {
            publication.stage = None;
            self.export(id, part);
        }
        self.cx.effects.push(Effect::Runner(Command::Stage(StageWork { stage, inward: false, layers, pieces })));
    }

    /// Has transports serve a part of a prefill.
    pub(super) fn export(&mut self, id: SeqId, part: Span) {
        let block_tokens = self.cx.config.block_tokens;
        let Some(publication) = self.prefill.published.get(&id) else { return };
        let read = if publication.staged.is_empty() { &publication.blocks } else { &publication.staged };
        let blocks = read[blocks_of(&part, block_tokens)].to_vec();
        let (reader, request) = publication.key;
        let export = TransferEffect::Export { job: id, reader, request, part, blocks };
        self.cx.effects.push(Effect::Transfer(export));
    }

    /// Has what arrived beside the store copied into it. False if there is nothing to copy (any more).
    pub(super) fn stage_in(&mut self, id: SeqId) -> bool {
        let (block_tokens, layers) = (self.cx.config.block_tokens, 0..self.cx.config.kv.layers);
        let landing = self.prefill.away.get_mut(&id).and_then(|away| away.stage.landing_mut());
        let Some(landing) = landing.filter(|landing| !landing.staged.is_empty()) else { return false };
        if landing.stage.is_some() {
            return true;
        }
        let stage = self.prefill.staging.issue();
        landing.stage = Some(stage);
        let store: Vec<u32> = landing.read_into().iter().map(|block: &PhysBlock| block.0).collect();
        let pieces = pieces(&store, &landing.staged, landing.tokens_here(), block_tokens);
        self.cx.release_freed();
        self.cx.effects.push(Effect::Runner(Command::Stage(StageWork { stage, inward: true, layers, pieces })));
        if mutants::is(Mutant::LandedUnstored) {
            let landing = self.prefill.away.get_mut(&id).and_then(|away| away.stage.landing_mut());
            let staged = landing.map(Landing::stored).unwrap_or_default();
            self.unstage(staged);
            return false;
        }
        true
    }

    /// The device has copied something between its store and the memory beside it, or could not.
    pub(crate) fn on_staged(&mut self, stage: StageId, error: Option<&DeviceError>) {
        let failed = error.map(|error| format!("its KV was not copied between the device and the host: {error}"));
        let out = self.prefill.published.iter_mut().find(|(_, p)| p.stage.as_ref().is_some_and(|(of, _)| *of == stage));
        if let Some((id, publication)) = out {
            let (id, part, ended) = (*id, publication.stage.take(), publication.ended);
            return match (part, failed) {
                (Some((_, part)), None) if !ended => self.export(id, part),
                (_, why) => self.on_exported(id, Err(why.unwrap_or_else(|| "nobody wants it any more".to_owned()))),
            };
        }
        let is = |stage_of: &Stage| stage_of.landing().is_some_and(|landing| landing.stage == Some(stage));
        let Some(id) = self.prefill.away.iter().find(|(_, away)| is(&away.stage)).map(|(id, _)| *id) else {
            return self.settle_stage(stage);
        };
        let landing = self.prefill.away.get_mut(&id).and_then(|away| away.stage.landing_mut());
        let staged = landing.map(Landing::stored).unwrap_or_default();
        self.unstage(staged);
        match failed {
            None => self.land(id),
            Some(why) => self.redo(id, &why),
        }
    }
}

/// Blocks of a prompt that a part is of.
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
