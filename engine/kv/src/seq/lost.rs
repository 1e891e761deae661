//! Lost ranges: blocks lost with a creditor, and their recompute.
//!
//! A lost block becomes a [`Placement::Lost`]. It gets another place, local or in a new lease; then the lost positions are
//! recomputed in ascending order, because a position attends only to preceding ones. Invariants:
//! * [`SeqBlocks::lost`] lists positions below [`SeqBlocks::written`], ascending; every written position in a lost block is in
//!   it;
//! * no new position is written before all lost ranges are recomputed, in ascending order.

use super::{Advance, Placement, RemoteBlock, RemoteEntries, RemoteGrant, SeqBlocks, index, push_entry};
use lagoon_types::run::visible;
use lagoon_types::{InstanceId, LeaseId, PhysBlock};
use std::ops::Range;

impl SeqBlocks {
    /// Number of lost blocks: those without a place.
    #[must_use]
    pub fn lost_blocks(&self) -> u32 {
        self.lost_blocks
    }

    /// Logical numbers of the lost blocks, ascending.
    #[must_use]
    pub fn lost_block_numbers(&self) -> Vec<u32> {
        (0..).zip(&self.blocks).filter(|(_, p)| matches!(p, Placement::Lost)).map(|(block, _)| block).collect()
    }

    /// Lost ranges: positions to recompute, ascending.
    #[must_use]
    pub fn lost(&self) -> &[Range<u32>] {
        &self.lost
    }

    /// Position to compute next.
    #[must_use]
    pub fn next_position(&self) -> u32 {
        self.lost.first().map_or(self.written, |lost| lost.start)
    }

    /// Marks all blocks in leases that `is_lost` selects as lost. Returns those leases, each with the span of its entries,
    /// which the table no longer holds.
    pub fn lose(&mut self, is_lost: impl Fn(InstanceId, LeaseId) -> bool) -> Vec<RemoteEntries> {
        let mut leases: Vec<RemoteEntries> = Vec::new();
        for entries in self.lose_where(|b| is_lost(b.creditor, b.lease)) {
            match leases.iter_mut().find(|l| (l.creditor, l.lease) == (entries.creditor, entries.lease)) {
                Some(span) => {
                    (span.first, span.entries) = (span.first.min(entries.first), span.entries.max(entries.entries));
                }
                None => leases.push(entries),
            }
        }
        leases
    }

    /// Marks all remote blocks that `is_lost` selects as lost, and returns exactly their entries.
    pub fn lose_where(&mut self, is_lost: impl Fn(&RemoteBlock) -> bool) -> Vec<RemoteEntries> {
        let (mut entries, mut lost): (Vec<RemoteEntries>, _) = (Vec::new(), Vec::new());
        for (block, placement) in (0..).zip(&mut self.blocks) {
            let Placement::Remote(remote) = *placement else { continue };
            if !is_lost(&remote) {
                continue;
            }
            push_entry(&mut entries, &remote);
            *placement = Placement::Lost;
            (self.lost_blocks, self.remote) = (self.lost_blocks + 1, self.remote - 1);
            let start = block * self.block_tokens;
            let end = (start + self.block_tokens).min(self.written);
            if start < end {
                lost.push(start..end);
            }
        }
        self.lost = union(&self.lost, &lost);
        self.drop_extents();
        entries
    }

    /// Marks all local blocks as lost and returns them for the caller to free.
    pub fn drop_local(&mut self) -> Vec<PhysBlock> {
        let (mut own, mut lost) = (Vec::new(), Vec::new());
        for (block, placement) in (0..).zip(&mut self.blocks) {
            let Placement::Local(phys) = *placement else { continue };
            own.push(phys);
            *placement = Placement::Lost;
            self.lost_blocks += 1;
            let start = block * self.block_tokens;
            let end = (start + self.block_tokens).min(self.written);
            if start < end {
                lost.push(start..end);
            }
        }
        self.lost = union(&self.lost, &lost);
        self.drop_extents();
        own
    }

    /// Whether the lost ranges can be recomputed: the KV that their first position attends to must still exist. If it was freed
    /// behind the window, only the whole sequence can be recomputed.
    #[must_use]
    pub fn can_restore(&self, window: Option<u32>) -> bool {
        self.lost.first().is_none_or(|lost| visible(lost.start, window).start / self.block_tokens >= self.gone)
    }

    /// Places the first lost blocks in local blocks.
    ///
    /// # Panics
    /// If there are fewer lost blocks than blocks.
    pub fn fill_local(&mut self, blocks: &[PhysBlock]) {
        self.fill(blocks.iter().map(|block| Placement::Local(*block)));
    }

    /// Places the first lost blocks in the entries of a lease.
    ///
    /// # Panics
    /// If there are fewer lost blocks than entries, or the lease is in the table already.
    pub fn fill_remote(&mut self, grant: &RemoteGrant) {
        let &RemoteGrant { creditor, lease, epoch, blocks } = grant;
        self.assert_new(creditor, lease);
        self.fill((0..blocks).map(|entry| Placement::Remote(RemoteBlock { creditor, lease, epoch, entry })));
    }

    /// Places blocks that have no place yet in local blocks, lost ones first, and appends the rest.
    pub fn take_local(&mut self, blocks: &[PhysBlock]) {
        let (lost, new) = blocks.split_at(blocks.len().min(index(self.lost_blocks)));
        if !lost.is_empty() {
            self.fill_local(lost);
        }
        self.push_local(new);
    }

    /// As [`SeqBlocks::take_local`], in the entries of a lease.
    ///
    /// # Panics
    /// If the lease is in the table already.
    pub fn take_remote(&mut self, grant: &RemoteGrant) {
        let &RemoteGrant { creditor, lease, epoch, blocks } = grant;
        let lost = blocks.min(self.lost_blocks);
        if lost > 0 {
            self.fill_remote(&RemoteGrant { blocks: lost, ..*grant });
        } else {
            self.assert_new(creditor, lease);
        }
        self.push_entries(RemoteEntries { creditor, lease, epoch, first: lost, entries: blocks });
    }

    /// Begins a table with blocks whose KV is known, but for those without a place: their positions are lost.
    ///
    /// # Panics
    /// If something is written.
    pub fn begin(&mut self) -> Advance {
        assert_eq!(self.written, 0, "a table begins once");
        self.written = self.capacity_tokens();
        let tokens = self.block_tokens;
        let lost = self.lost_block_numbers().into_iter().map(|block| block * tokens..(block + 1) * tokens);
        self.lost = union(&[], &lost.collect::<Vec<_>>());
        let mut known = Advance::default();
        for placement in &self.blocks {
            if let Placement::Local(block) = placement {
                known.sealed.push(*block);
            }
        }
        known
    }

    fn fill(&mut self, mut places: impl ExactSizeIterator<Item = Placement>) {
        assert!(
            places.len() <= index(self.lost_blocks),
            "{} blocks for {} lost blocks",
            places.len(),
            self.lost_blocks
        );
        for lost in self.blocks.iter_mut().filter(|p| matches!(p, Placement::Lost)) {
            let Some(place) = places.next() else { break };
            *lost = place;
            self.lost_blocks -= 1;
            self.remote += u32::from(matches!(place, Placement::Remote(_)));
        }
        self.drop_extents();
    }

    /// Records `tokens` tokens from position `start` on as written in every layer: of the first lost range, or new ones.
    ///
    /// # Panics
    /// If `start` is not [`SeqBlocks::next_position`], or the tokens exceed the lost range.
    pub fn write(&mut self, start: u32, tokens: u32) -> Advance {
        assert_eq!(start, self.next_position(), "positions are written in order");
        let Some(first) = self.lost.first_mut() else { return self.advance(tokens) };
        let end = start + tokens;
        assert!(end <= first.end, "{start}..{end} was planned, {first:?} is lost");
        first.start = end;
        if first.start == first.end {
            self.lost.remove(0);
        }
        self.changes(start..end)
    }

    /// Removes positions before `pos` from the lost ranges.
    pub(super) fn forget_lost_before(&mut self, pos: u32) {
        self.lost.retain_mut(|lost| {
            lost.start = lost.start.max(pos);
            lost.start < lost.end
        });
    }
}

/// The union of two ascending lists of ranges, as such a list; neighbours are joined.
pub(super) fn union(a: &[Range<u32>], b: &[Range<u32>]) -> Vec<Range<u32>> {
    let mut all: Vec<Range<u32>> = a.iter().chain(b).cloned().collect();
    all.sort_unstable_by_key(|r| r.start);
    let mut joined: Vec<Range<u32>> = Vec::new();
    for range in all {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{BlockPool, BlockState, Owner};
    use lagoon_types::{Epoch, SeqId};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    const BLOCK: u32 = 4;

    fn grant(creditor: u32, lease: u64, blocks: u32) -> RemoteGrant {
        RemoteGrant { creditor: InstanceId(creditor), lease: LeaseId(lease), epoch: Epoch(5), blocks }
    }

    /// Blocks of 4: lease 1 of creditor 8 | lease 2 of creditor 9, 2 entries | local 0 1; 18 tokens written.
    fn mixed() -> SeqBlocks {
        let mut seq = SeqBlocks::new(BLOCK);
        seq.push_remote(&grant(8, 1, 1));
        seq.push_remote(&grant(9, 2, 2));
        seq.push_local(&[PhysBlock(0), PhysBlock(1)]);
        seq.advance(18);
        seq
    }

    #[test]
    fn only_what_a_creditor_had_is_lost_and_computed_again_in_order() {
        let mut seq = mixed();
        let leases = seq.lose(|creditor, _| creditor == InstanceId(9));
        assert_eq!(leases.iter().map(|l| (l.lease.0, l.entries)).collect::<Vec<_>>(), [(2, 2)]);
        assert_eq!((seq.lost_blocks(), seq.lost(), seq.local_blocks()), (2, std::slice::from_ref(&(4..12)), 2));
        assert_eq!(seq.next_position(), 4);
        seq.fill_remote(&grant(8, 3, 1));
        seq.fill_local(&[PhysBlock(7)]);
        assert_eq!((seq.lost_blocks(), seq.written()), (0, 18));
        // The first creditor dies while the second's blocks are computed again: what was written there is lost too.
        assert_eq!(seq.write(4, 6).filling, [PhysBlock(7)]);
        assert_eq!(seq.lose(|creditor, _| creditor == InstanceId(8)).len(), 2);
        assert_eq!(seq.lost(), [0..8, 10..12]);
        seq.fill_local(&[PhysBlock(3), PhysBlock(4)]);
        assert_eq!(seq.write(0, 8).sealed, [PhysBlock(3), PhysBlock(4)]);
        assert_eq!(seq.remote_runs(10, 0), BTreeMap::new());
        assert_eq!(seq.write(10, 2).sealed, [PhysBlock(7)]);
        assert!(seq.lost().is_empty());
        assert_eq!(seq.write(18, 2).sealed, [PhysBlock(1)]);
        assert_eq!(seq.written(), 20);
    }

    #[test]
    fn blocks_that_were_not_written_lose_nothing_but_their_place() {
        let mut seq = mixed();
        seq.push_remote(&grant(9, 4, 2));
        let leases = seq.lose(|_, lease| lease == LeaseId(4));
        assert_eq!((leases[0].entries, seq.lost_blocks(), seq.lost()), (2, 2, &[][..]));
        seq.fill_local(&[PhysBlock(5), PhysBlock(6)]);
        assert_eq!(seq.write(18, 8).sealed, [PhysBlock(1), PhysBlock(5)]);
    }

    #[test]
    fn a_window_that_freed_what_a_lost_block_attends_to_cannot_restore_it() {
        let mut seq = mixed();
        seq.lose(|_, lease| lease == LeaseId(2));
        assert!(seq.can_restore(None) && seq.can_restore(Some(6)));
        let mut seq = mixed();
        // A query at 18 sees 13..=18 of a window of 6: three blocks are behind it.
        assert_eq!(seq.free_behind_window(18, 6).remote.len(), 2);
        assert!(seq.lose(|_, _| true).is_empty());
        let mut seq = mixed();
        seq.free_behind_window(18, 12);
        seq.lose(|creditor, _| creditor == InstanceId(9));
        assert_eq!((seq.lost(), seq.can_restore(Some(12))), (std::slice::from_ref(&(4..12)), false));
        // Once they are behind the window themselves, nobody needs them.
        seq.free_behind_window(23, 12);
        assert_eq!((seq.lost(), seq.lost_blocks()), (&[][..], 0));
    }

    #[test]
    #[should_panic(expected = "are lost")]
    fn attending_to_lost_positions_panics() {
        let mut seq = mixed();
        seq.lose(|_, lease| lease == LeaseId(1));
        seq.fill_local(&[PhysBlock(9)]);
        let _ = seq.remote_runs(18, 0);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Drop,
        Grow { creditor: u32, blocks: u32 },
        Write { tokens: u32 },
        Lose { creditor: u32, lease: Option<usize> },
        Fill { creditor: u32, blocks: u32 },
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            2 => (0..3u32, 1..4u32).prop_map(|(creditor, blocks)| Op::Grow { creditor, blocks }),
            5 => (1..14u32).prop_map(|tokens| Op::Write { tokens }),
            1 => Just(Op::Drop),
            2 => (1..3u32, prop::option::of(0..4usize)).prop_map(|(creditor, lease)| Op::Lose { creditor, lease }),
            4 => (0..3u32, 1..4u32).prop_map(|(creditor, blocks)| Op::Fill { creditor, blocks }),
        ]
    }

    /// A table beside the positions whose KV is valid. Creditor 0 is the instance itself.
    struct World {
        seq: SeqBlocks,
        pool: BlockPool,
        leases: u64,
        valid: BTreeSet<u32>,
    }

    impl World {
        fn own(&mut self, blocks: u32) -> Vec<PhysBlock> {
            self.pool.allocate(Owner::Own(SeqId(1)), blocks, None).unwrap()
        }

        fn lease(&mut self, creditor: u32, blocks: u32) -> RemoteGrant {
            self.leases += 1;
            grant(creditor, self.leases, blocks)
        }

        fn apply(&mut self, op: &Op) {
            match *op {
                Op::Grow { creditor: 0, blocks } => {
                    let own = self.own(blocks);
                    self.seq.push_local(&own);
                }
                Op::Grow { creditor, blocks } => {
                    let lease = self.lease(creditor, blocks);
                    self.seq.push_remote(&lease);
                }
                Op::Fill { creditor, blocks } => {
                    let blocks = blocks.min(self.seq.lost_blocks());
                    if creditor == 0 {
                        let own = self.own(blocks);
                        self.seq.fill_local(&own);
                    } else if blocks > 0 {
                        let lease = self.lease(creditor, blocks);
                        self.seq.fill_remote(&lease);
                    }
                }
                Op::Write { tokens } if self.seq.lost_blocks() == 0 => self.write(tokens),
                Op::Write { .. } => {}
                Op::Lose { creditor, lease } => self.lose(creditor, lease),
                Op::Drop => {
                    let gone = |valid: &mut BTreeSet<u32>, block: u32| valid.retain(|pos| pos / BLOCK != block);
                    for (block, placement) in (0..).zip(self.seq.placements()) {
                        if matches!(placement, Placement::Local(_)) {
                            gone(&mut self.valid, block);
                        }
                    }
                    let own = self.seq.drop_local();
                    self.pool.free(Owner::Own(SeqId(1)), &own);
                }
            }
        }

        /// The lowest position that is not valid is written, as far as the table says.
        fn write(&mut self, tokens: u32) {
            let start = self.seq.next_position();
            assert_eq!(Some(start), (0..).find(|pos| !self.valid.contains(pos)));
            let end = self.seq.lost().first().map_or(self.seq.capacity_tokens(), |lost| lost.end);
            let tokens = tokens.min(end - start);
            let keys: u32 = self.seq.remote_runs(start, 0).values().flatten().map(|run| run.len).sum();
            let mut local = Vec::new();
            self.seq.local_runs(start, 0, &mut local);
            assert_eq!(keys + local.iter().map(|run| run.len).sum::<u32>(), start, "all that precedes is attended to");
            self.seq.write(start, tokens).mark(&mut self.pool);
            self.valid.extend(start..start + tokens);
        }

        fn lose(&mut self, creditor: u32, lease: Option<usize>) {
            let known: Vec<_> = self.seq.leases().filter(|l| l.creditor == InstanceId(creditor)).collect();
            let named = lease.map(|at| known.get(at).map(|l| l.lease));
            let is_lost = |c, l| c == InstanceId(creditor) && named.is_none_or(|named| named == Some(l));
            for (block, placement) in (0..).zip(self.seq.placements()) {
                if let Placement::Remote(b) = placement
                    && is_lost(b.creditor, b.lease)
                {
                    self.valid.retain(|pos| pos / BLOCK != block);
                }
            }
            let expected: Vec<_> = known.into_iter().filter(|l| is_lost(l.creditor, l.lease)).collect();
            assert_eq!(self.seq.lose(is_lost), expected);
        }

        fn check(&self) {
            let (seq, written) = (&self.seq, self.seq.written());
            let lost: Vec<u32> = seq.lost().iter().cloned().flatten().collect();
            let invalid: Vec<u32> = (0..written).filter(|pos| !self.valid.contains(pos)).collect();
            assert_eq!(lost, invalid);
            assert!(seq.lost().windows(2).all(|w| w[0].end < w[1].start), "{lost:?}");
            assert!(self.valid.last().is_none_or(|pos| *pos < written));
            let lost_blocks = seq.placements().iter().filter(|p| matches!(p, Placement::Lost)).count();
            assert_eq!(seq.lost_blocks() as usize, lost_blocks);
            self.pool.check();
            assert_eq!(self.pool.counts().own, seq.local_blocks());
            let names: Vec<_> = seq.leases().map(|l| l.lease).collect();
            assert_eq!(names.len(), names.iter().collect::<BTreeSet<_>>().len(), "a lease is listed once");
            for (block, placement) in (0..).zip(seq.placements()) {
                if let Placement::Local(phys) = placement {
                    let have = (block * BLOCK..(block + 1) * BLOCK).filter(|pos| self.valid.contains(pos)).count();
                    let state = match have {
                        0 => BlockState::Reserved,
                        4 => BlockState::Sealed,
                        _ => BlockState::Filling,
                    };
                    assert_eq!(self.pool.state(*phys), state, "block {block}");
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn losses_and_restorations_keep_every_position_once(ops in prop::collection::vec(op(), 1..60)) {
            let mut world =
                World { seq: SeqBlocks::new(BLOCK), pool: BlockPool::new(1000), leases: 0, valid: BTreeSet::new() };
            for op in &ops {
                world.apply(op);
                world.check();
            }
            world.apply(&Op::Fill { creditor: 0, blocks: 1000 });
            while !world.seq.lost().is_empty() {
                world.apply(&Op::Write { tokens: 5 });
                world.check();
            }
            prop_assert_eq!(world.valid.last().map_or(0, |pos| pos + 1), world.seq.written());
            let freed = world.seq.clear();
            world.pool.free(Owner::Own(SeqId(1)), &freed.local);
            prop_assert_eq!(world.pool.counts().free, 1000);
        }
    }
}
