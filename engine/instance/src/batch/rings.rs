//! Rings of windowed KV: who has which, and how far each is filled (ADR 24).

use super::Batch;
use super::sequence::{Sequence, Window};
use crate::cx::Cx;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_kv::Owner;
use lagoon_runner::SavedWindow;
use lagoon_types::{PhysBlock, RingRows, SeqId, StepPlan, WindowShape};
use std::ops::Range;

/// A running sequence's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ring {
    index: u32,
    /// The ring was filled from this position on, without a gap.
    from: u32,
    /// The next position that it takes.
    head: u32,
    /// The ring began with a window of right KV: nothing before that window is needed.
    is_kept: bool,
    /// The next step copies that window into the ring.
    loads: bool,
}

impl Ring {
    /// The ring on the way to position `pos`: as it is, if it can be filled on to there; begun anew `warm_up` positions before
    /// `pos`, if it was begun too late, is further behind than that, or is past `pos`.
    pub(super) fn towards(self, pos: u32, warm_up: u32) -> Self {
        let late = u32::from(mutants::is(Mutant::RingLate)).min(warm_up);
        let start = pos.saturating_sub(warm_up - late);
        let is_whole = self.from == 0 || self.is_kept || self.from <= start;
        if is_whole && (start..=pos).contains(&self.head) {
            return self;
        }
        Self { from: start, head: start, is_kept: false, loads: false, ..self }
    }

    /// The next position that it takes.
    pub(super) const fn head(self) -> u32 {
        self.head
    }

    pub(super) const fn rows(self, warm_up: bool) -> RingRows {
        RingRows { ring: self.index, from: self.from, warm_up, load: self.loads }
    }

    pub(super) fn fill(&mut self, rows: u32) {
        self.head += rows;
        self.loads = false;
    }

    /// An empty ring goes on behind a window that the next step copies into it.
    pub(super) fn load(&mut self, window: &Range<u32>) {
        (self.from, self.head, self.is_kept, self.loads) = (window.start, window.end, true, true);
    }
}

/// All rings of an instance.
#[derive(Debug)]
pub(super) struct Rings {
    warm_up: u32,
    free: Vec<u32>,
}

impl Rings {
    /// `warm_up`: positions that are computed again before a row whose ring is empty.
    pub(super) fn new(rings: usize, warm_up: u32) -> Self {
        let rings = u32::try_from(rings).unwrap_or(u32::MAX);
        Self { warm_up, free: (0..rings).rev().collect() }
    }

    pub(super) const fn warm_up(&self) -> u32 {
        self.warm_up
    }

    /// An empty ring.
    ///
    /// # Panics
    /// If more sequences run than there are rings.
    pub(super) fn take(&mut self) -> Ring {
        let index = self.free.pop().expect("there is a ring for every running sequence");
        Ring { index, from: 0, head: 0, is_kept: false, loads: false }
    }

    pub(super) fn put(&mut self, ring: Ring) {
        self.free.push(ring.index);
    }
}

impl Batch {
    /// Allocates rBlocks for the last windows of prompts for other instances that a step completes. Without free ones the
    /// decode worker computes the window again.
    pub(crate) fn save_windows(&mut self, cx: &mut Cx, plan: &StepPlan) {
        let Some(shape) = cx.config.windowed else { return };
        for chunk in plan.chunks.iter().filter(|chunk| chunk.last) {
            let saves = |seq: &&mut Sequence| seq.saves_window && seq.window.is_none();
            let Some(seq) = self.seqs.get_mut(&chunk.seq).filter(saves) else { continue };
            let blocks = shape.blocks(seq.len(), cx.config.block_tokens);
            let blocks = cx.memory.rm.pool.allocate(Owner::Own(chunk.seq), blocks, None);
            seq.window = blocks.map(|blocks| Window { positions: shape.positions(seq.len()), blocks });
        }
    }

    /// The ring of a sequence that begins to run goes on behind the window that was read with its prompt.
    pub(super) fn load_ring(&mut self, id: SeqId) {
        let Some(seq) = self.seqs.get(&id).filter(|seq| seq.for_others.is_none()) else { return };
        if let Some(window) = &seq.window {
            self.sched.load_ring(id, &window.positions);
        }
    }

    /// Frees the blocks of the last window that was read with a prompt: the step that ended copied it into the ring, or the ring
    /// does not need it.
    pub(crate) fn free_loaded(&mut self, cx: &mut Cx, id: SeqId) {
        let seq = self.seqs.get_mut(&id).filter(|seq| seq.for_others.is_none());
        if let Some(window) = seq.and_then(|seq| seq.window.take()) {
            cx.memory.rm.pool.free(Owner::Own(id), &window.blocks);
        }
    }
}

impl Window {
    /// Positions and slots of the window in the store.
    pub(crate) fn saved(&self, shape: WindowShape, block_tokens: u32) -> SavedWindow {
        let slots = shape.slots(self.positions.end);
        let piece = |(n, block): (u32, &PhysBlock)| {
            (block.0 * block_tokens, block_tokens.min(slots.saturating_sub(n * block_tokens)))
        };
        SavedWindow { positions: self.positions.clone(), pieces: (0..).zip(&self.blocks).map(piece).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ring(from: u32, head: u32) -> Ring {
        Ring { index: 3, from, head, is_kept: false, loads: false }
    }

    #[test]
    fn a_window_that_came_with_a_prompt_is_enough_behind_it_and_nowhere_else() {
        let mut of = ring(0, 0);
        of.load(&(41..50));
        let loaded = of;
        assert_eq!((of.towards(50, 20), of.rows(false).load), (loaded, true));
        // Rows between it and a later position fill the ring on.
        assert_eq!(of.towards(60, 20), loaded);
        // Before it, it is of no use.
        assert_eq!(of.towards(45, 20), ring(25, 25));
        of.fill(5);
        assert_eq!((of.towards(55, 20), of.rows(false).load), (of, false));
    }

    #[test]
    fn a_ring_goes_on_where_it_is_or_begins_where_that_is_nearer() {
        // What comes next.
        assert_eq!(ring(0, 50).towards(50, 20), ring(0, 50));
        assert_eq!(ring(30, 50).towards(50, 20), ring(30, 50));
        // Behind a lost range, and before it.
        assert_eq!(ring(0, 50).towards(60, 20), ring(0, 50));
        assert_eq!(ring(0, 50).towards(40, 20), ring(20, 20));
        assert_eq!(ring(0, 50).towards(10, 20), ring(0, 0));
        // Another way is shorter, or what it has is not enough.
        assert_eq!(ring(0, 50).towards(71, 20), ring(51, 51));
        assert_eq!(ring(35, 50).towards(50, 20), ring(30, 30));
        assert_eq!(ring(35, 50).towards(55, 20), ring(35, 50));
    }
}
