//! Cache of a block table as maximal segments, which attention reads in every step: a step costs time by segments, not by
//! blocks.
//!
//! Built on first use, extended by growth, dropped by every other change of a placement. Blocks behind the window stay in
//! it, because no query attends to them.

use super::{Segment, SeqBlocks, join};
use lagoon_types::{KvRun, LeaseRun};
use std::cell::OnceCell;
use std::ops::Range;

impl Segment {
    /// The part of the segment in `range`, which it intersects.
    fn clipped(&self, range: &Range<u32>) -> Self {
        let (first, end) = (self.first_pos(), self.first_pos() + self.tokens());
        let skip = range.start.saturating_sub(first);
        let len = end.min(range.end) - first - skip;
        match *self {
            Self::Local(run) => Self::Local(KvRun { base: run.base + skip, len, first_pos: first + skip }),
            Self::Remote { creditor, run } => {
                let run = LeaseRun { offset: run.offset + skip, len, first_pos: first + skip, ..run };
                Self::Remote { creditor, run }
            }
        }
    }
}

impl SeqBlocks {
    fn extents(&self) -> &[Segment] {
        self.extents.get_or_init(|| {
            let mut all = Vec::new();
            self.pieces(self.gone * self.block_tokens..self.capacity_tokens(), |piece| all.push(piece));
            all
        })
    }

    /// Drops the cache after a change of a placement.
    pub(super) fn drop_extents(&mut self) {
        self.extents.take();
    }

    /// Extends the cache by the new blocks from `block` on.
    pub(super) fn extend_extents(&mut self, block: u32) {
        let Some(mut all) = self.extents.take() else { return };
        let mut last = all.pop();
        self.pieces(block * self.block_tokens..self.capacity_tokens(), |piece| {
            last = join(last.take(), Some(piece), &mut |done| all.push(done));
        });
        all.extend(last);
        self.extents = OnceCell::from(all);
    }

    /// Visits positions `range`, of which none is behind the window, in order as maximal pieces.
    pub(super) fn visit_extents(&self, range: &Range<u32>, mut visit: impl FnMut(Segment)) {
        if self.lost_blocks > 0 {
            return self.pieces(range.clone(), visit);
        }
        if range.is_empty() {
            return;
        }
        assert!(range.end <= self.capacity_tokens(), "position {} has no block", range.end);
        let all = self.extents();
        let first = all.partition_point(|piece| piece.first_pos() + piece.tokens() <= range.start);
        let met = all[first..].iter().take_while(|piece| piece.first_pos() < range.end);
        met.for_each(|piece| visit(piece.clipped(range)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RemoteGrant, SeqBlocks};
    use super::*;
    use crate::seq::Placement;
    use lagoon_types::{Epoch, InstanceId, LeaseId, PhysBlock};
    use proptest::prelude::*;

    const BLOCK: u32 = 4;

    #[derive(Clone, Debug)]
    enum Op {
        Local(u32, u32),
        Remote(u32),
        Write(u32),
        Relocate(u32, u32),
        Lose(u64),
        Fill(u32),
        Window(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => (0..40u32, 1..4u32).prop_map(|(first, n)| Op::Local(first * 5, n)),
            2 => (1..4u32).prop_map(Op::Remote),
            4 => (1..14u32).prop_map(Op::Write),
            2 => (0..20u32, 0..9u32).prop_map(|(block, to)| Op::Relocate(block, 1_000 + to)),
            1 => (0..6u64).prop_map(Op::Lose),
            2 => (0..9u32).prop_map(|to| Op::Fill(2_000 + 7 * to)),
            1 => (4..30u32).prop_map(Op::Window),
        ]
    }

    fn both(seq: &SeqBlocks, range: &Range<u32>) -> [Vec<Segment>; 2] {
        let (mut quick, mut slow) = (Vec::new(), Vec::new());
        seq.visit_extents(range, |piece| quick.push(piece));
        seq.pieces(range.clone(), |piece| slow.push(piece));
        [quick, slow]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever happens to the table, pieces are those that a walk over its blocks finds.
        #[test]
        fn pieces_are_those_of_the_blocks(ops in prop::collection::vec(op(), 1..50), from in 0..60u32, len in 0..60u32) {
            let (mut seq, mut leases) = (SeqBlocks::new(BLOCK), 0);
            for op in ops {
                match op {
                    Op::Local(first, n) => seq.push_local(&(first..first + n).map(PhysBlock).collect::<Vec<_>>()),
                    Op::Remote(blocks) => {
                        leases += 1;
                        let (creditor, lease) = (InstanceId(leases % 3 + 1), LeaseId(u64::from(leases)));
                        seq.push_remote(&RemoteGrant { creditor, lease, epoch: Epoch(1), blocks });
                    }
                    Op::Write(tokens) if seq.lost_blocks() == 0 => {
                        let end = seq.lost().first().map_or(seq.capacity_tokens(), |lost| lost.end);
                        let start = seq.next_position();
                        seq.write(start, tokens.min(end - start));
                    }
                    Op::Relocate(block, to) if block < seq.blocks() && seq.is_whole(block) => {
                        let to = Placement::Local(PhysBlock(to));
                        if seq.placements()[block as usize] != to {
                            seq.relocate(block, to);
                        }
                    }
                    Op::Lose(lease) => drop(seq.lose(|_, of| of == LeaseId(lease))),
                    Op::Fill(to) if seq.lost_blocks() > 0 => seq.fill_local(&[PhysBlock(to)]),
                    Op::Window(window) if seq.lost().is_empty() => {
                        drop(seq.free_behind_window(seq.next_position(), window));
                    }
                    Op::Write(_) | Op::Relocate(..) | Op::Fill(_) | Op::Window(_) => {}
                }
                let remote = seq.placements().iter().filter(|p| matches!(p, Placement::Remote(_))).count();
                prop_assert_eq!(seq.remote_blocks() as usize, remote);
                let start = (from / BLOCK * BLOCK).max(seq.gone * BLOCK).min(seq.capacity_tokens());
                let range = start..(start + len).min(seq.capacity_tokens());
                if seq.lost_blocks() == 0 {
                    let [quick, slow] = both(&seq, &range);
                    prop_assert_eq!(quick, slow);
                }
            }
        }
    }
}
