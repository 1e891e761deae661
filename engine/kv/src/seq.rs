//! Block table of one sequence on its debtor: the placement of each logical rBlock.
//!
//! Invariants:
//! * logical block `i` holds positions `[i * block_tokens, (i + 1) * block_tokens)` in every placement;
//! * an entry of a lease is in the table at most once; after moves and losses the entries of a lease may be in any number
//!   of places;
//! * blocks that are [`Placement::Gone`] are a prefix of the table, and wholly behind the window;
//! * KV is valid at every position below [`SeqBlocks::written`] except those of [`SeqBlocks::lost`] (see `lost.rs`);
//! * for every `len` and window, [`SeqBlocks::local_runs`] and [`SeqBlocks::remote_runs`] together list every position
//!   from the window's first block to `len` exactly once.

mod extents;
mod joint;
mod lost;
mod moves;

pub use joint::JointPart;

use crate::pool::{BlockPool, BlockState};
use lagoon_types::{Epoch, InstanceId, KvRun, LeaseId, LeaseRun, PhysBlock};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// Placement of a logical block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In this instance's store.
    Local(PhysBlock),
    /// In an entry of a lease.
    Remote(RemoteBlock),
    /// Lost with a creditor, without a new place yet.
    Lost,
    /// Freed behind the sliding window.
    Gone,
}

/// Remote block: one entry of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteBlock {
    pub creditor: InstanceId,
    pub lease: LeaseId,
    pub epoch: Epoch,
    pub entry: u32,
}

/// Granted lease, to append to the table as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteGrant {
    pub creditor: InstanceId,
    pub lease: LeaseId,
    pub epoch: Epoch,
    pub blocks: u32,
}

impl RemoteGrant {
    /// All its entries.
    #[must_use]
    pub fn all(&self) -> RemoteEntries {
        let &Self { creditor, lease, epoch, blocks } = self;
        RemoteEntries { creditor, lease, epoch, first: 0, entries: blocks }
    }
}

/// Entries `[first, entries)` of a lease that the sequence no longer needs. Some may have been released before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteEntries {
    pub creditor: InstanceId,
    pub lease: LeaseId,
    pub epoch: Epoch,
    pub first: u32,
    pub entries: u32,
}

impl RemoteEntries {
    /// The range of one entry.
    #[must_use]
    pub fn one(block: &RemoteBlock) -> Self {
        let &RemoteBlock { creditor, lease, epoch, entry } = block;
        Self { creditor, lease, epoch, first: entry, entries: entry + 1 }
    }
}

/// Slot of one token's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotRef {
    /// A slot of this instance's store.
    Local(u32),
    /// A token offset in a lease.
    Remote { creditor: InstanceId, lease: LeaseId, epoch: Epoch, offset: u32 },
}

/// Segment of a sequence: consecutive positions that are contiguous in one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    Local(KvRun),
    Remote { creditor: InstanceId, run: LeaseRun },
}

impl Segment {
    /// Position of the first token.
    #[must_use]
    pub fn first_pos(&self) -> u32 {
        match self {
            Self::Local(run) => run.first_pos,
            Self::Remote { run, .. } => run.first_pos,
        }
    }

    /// Tokens; never 0.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        match self {
            Self::Local(run) => run.len,
            Self::Remote { run, .. } => run.len,
        }
    }
}

/// Blocks and entries that a table released; the caller frees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    pub local: Vec<PhysBlock>,
    pub remote: Vec<RemoteEntries>,
}

impl Freed {
    /// Whether it has no rBlock.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.local.is_empty() && self.remote.is_empty()
    }
}

/// State changes of blocks when tokens are written. [`Advance::mark`] marks the local ones in the pool; the runner sends
/// the hash of sealed remote ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advance {
    pub filling: Vec<PhysBlock>,
    pub sealed: Vec<PhysBlock>,
    pub sealed_remote: Vec<RemoteBlock>,
}

impl Advance {
    /// Marks the local blocks in their pool.
    pub fn mark(&self, pool: &mut BlockPool) {
        self.filling.iter().for_each(|b| pool.mark(*b, BlockState::Filling));
        self.sealed.iter().for_each(|b| pool.mark(*b, BlockState::Sealed));
    }
}

/// The block table of one sequence. See the module for invariants.
#[derive(Clone, Debug)]
pub struct SeqBlocks {
    block_tokens: u32,
    blocks: Vec<Placement>,
    gone: u32,
    /// How many are [`Placement::Lost`].
    lost_blocks: u32,
    written: u32,
    /// Positions below `written` whose KV was lost: ascending, disjoint, never empty.
    lost: Vec<Range<u32>>,
    /// How many are [`Placement::Remote`].
    remote: u32,
    /// See `extents.rs`.
    extents: OnceCell<Vec<Segment>>,
}

fn index(block: u32) -> usize {
    block as usize
}

impl SeqBlocks {
    /// An empty table.
    ///
    /// # Panics
    /// If `block_tokens` is 0.
    #[must_use]
    pub fn new(block_tokens: u32) -> Self {
        assert!(block_tokens > 0, "an rBlock holds tokens");
        let extents = OnceCell::new();
        Self {
            block_tokens,
            blocks: Vec::new(),
            gone: 0,
            lost_blocks: 0,
            written: 0,
            lost: Vec::new(),
            remote: 0,
            extents,
        }
    }

    /// Tokens of an rBlock.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Number of logical blocks, those freed behind the window included.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.blocks.len()).expect("a sequence has fewer blocks than tokens")
    }

    /// Placement of each logical block.
    #[must_use]
    pub fn placements(&self) -> &[Placement] {
        &self.blocks
    }

    /// Capacity of the table in tokens, blocks freed behind the window included.
    #[must_use]
    pub fn capacity_tokens(&self) -> u32 {
        self.blocks() * self.block_tokens
    }

    /// Tokens whose KV was written in every layer, those of [`SeqBlocks::lost`] included.
    #[must_use]
    pub fn written(&self) -> u32 {
        self.written
    }

    /// Blocks to append so that `tokens` tokens fit.
    #[must_use]
    pub fn shortfall(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens).saturating_sub(self.blocks())
    }

    /// Number of blocks on creditors.
    #[must_use]
    pub fn remote_blocks(&self) -> u32 {
        self.remote
    }

    /// Number of local blocks.
    #[must_use]
    pub fn local_blocks(&self) -> u32 {
        self.blocks() - self.gone - self.remote_blocks() - self.lost_blocks
    }

    /// The last block if it is local, as a hint for contiguous growth.
    #[must_use]
    pub fn last_local(&self) -> Option<PhysBlock> {
        match self.blocks.last() {
            Some(Placement::Local(block)) => Some(*block),
            _ => None,
        }
    }

    /// Appends local blocks.
    pub fn push_local(&mut self, blocks: &[PhysBlock]) {
        let first = self.blocks();
        self.blocks.extend(blocks.iter().map(|b| Placement::Local(*b)));
        self.assert_capacity();
        self.extend_extents(first);
    }

    /// Appends every entry of a lease.
    ///
    /// # Panics
    /// If the lease is in the table already.
    pub fn push_remote(&mut self, grant: &RemoteGrant) {
        self.assert_new(grant.creditor, grant.lease);
        self.push_entries(grant.all());
    }

    fn push_entries(&mut self, of: RemoteEntries) {
        let RemoteEntries { creditor, lease, epoch, first, entries } = of;
        let places = (first..entries).map(|entry| Placement::Remote(RemoteBlock { creditor, lease, epoch, entry }));
        let block = self.blocks();
        self.blocks.extend(places);
        self.remote += entries - first;
        self.assert_capacity();
        self.extend_extents(block);
    }

    /// Appends blocks without a place.
    pub fn push_lost(&mut self, blocks: u32) {
        let last = self.blocks.len() + index(blocks);
        self.blocks.resize(last, Placement::Lost);
        self.lost_blocks += blocks;
        self.assert_capacity();
        self.drop_extents();
    }

    /// Removes blocks without a place from the end of an unwritten table.
    pub fn drop_last_lost(&mut self) {
        while self.blocks.pop_if(|last| *last == Placement::Lost).is_some() {
            self.lost_blocks -= 1;
        }
        self.drop_extents();
    }

    fn assert_new(&self, creditor: InstanceId, lease: LeaseId) {
        let known = self.leases().any(|l| (l.creditor, l.lease) == (creditor, lease));
        assert!(!known, "{creditor}'s {lease} is in the table");
    }

    fn assert_capacity(&self) {
        assert!(self.blocks().checked_mul(self.block_tokens).is_some(), "a sequence's capacity fits 32 bits");
    }

    /// The leases in the table, in the order of their first entries, each with the span of its entries there.
    pub fn leases(&self) -> impl Iterator<Item = RemoteEntries> + '_ {
        let mut leases = Vec::new();
        self.blocks.iter().for_each(|placement| {
            if let Placement::Remote(block) = placement {
                add_entry(&mut leases, block);
            }
        });
        leases.into_iter()
    }

    /// Records `tokens` more tokens as written in every layer.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn advance(&mut self, tokens: u32) -> Advance {
        let (from, to) = (self.written, self.written + tokens);
        assert!(to <= self.capacity_tokens(), "{to} tokens written, room for {}", self.capacity_tokens());
        assert!(self.lost.is_empty() || tokens == 0, "what was lost is written before anything new");
        self.written = to;
        self.changes(from..to)
    }

    /// State changes of writing positions `range`: blocks whose first position is in it fill, blocks whose last is in it are
    /// sealed.
    fn changes(&self, range: Range<u32>) -> Advance {
        let mut change = Advance::default();
        for block in range.start / self.block_tokens..range.end.div_ceil(self.block_tokens) {
            let (start, end) = (block * self.block_tokens, (block + 1) * self.block_tokens);
            match self.blocks[index(block)] {
                Placement::Local(b) if range.end >= end => change.sealed.push(b),
                Placement::Local(b) if range.start <= start => change.filling.push(b),
                Placement::Remote(b) if range.end >= end => change.sealed_remote.push(b),
                Placement::Local(_) | Placement::Remote(_) => {}
                Placement::Lost => panic!("block {block} has no place and cannot be written"),
                Placement::Gone => panic!("block {block} is behind the window and cannot be written"),
            }
        }
        change
    }

    /// Visits positions `range` in order as maximal pieces, skipping blocks freed behind the window.
    fn pieces(&self, range: Range<u32>, mut visit: impl FnMut(Segment)) {
        assert!(range.end <= self.capacity_tokens(), "position {} has no block", range.end);
        let mut last: Option<Segment> = None;
        let mut pos = range.start;
        while pos < range.end {
            let within = pos % self.block_tokens;
            let len = (self.block_tokens - within).min(range.end - pos);
            let piece = match self.blocks[index(pos / self.block_tokens)] {
                Placement::Gone => None,
                Placement::Lost => panic!("position {pos} has no place"),
                Placement::Local(block) => {
                    Some(Segment::Local(KvRun { base: block.0 * self.block_tokens + within, len, first_pos: pos }))
                }
                Placement::Remote(b) => {
                    let offset = b.entry * self.block_tokens + within;
                    let run = LeaseRun { lease: b.lease, epoch: b.epoch, offset, len, first_pos: pos };
                    Some(Segment::Remote { creditor: b.creditor, run })
                }
            };
            last = join(last, piece, &mut visit);
            pos += len;
        }
        join(last, None, &mut visit);
    }

    /// Appends the segments of positions `range`, where a chunk's KV is written.
    ///
    /// # Panics
    /// If a position has no block or is behind the window.
    pub fn segments(&self, range: Range<u32>, out: &mut Vec<Segment>) {
        assert!(
            range.is_empty() || range.start >= self.gone * self.block_tokens,
            "{} is behind the window",
            range.start
        );
        self.pieces(range, |piece| out.push(piece));
    }

    /// Positions to attend to for queries that see `[window_start, upto_len)`, rounded down to the window's first block.
    fn visible(&self, upto_len: u32, window_start: u32) -> Range<u32> {
        let start = window_start / self.block_tokens * self.block_tokens;
        assert!(start >= upto_len || start >= self.gone * self.block_tokens, "{window_start} was freed");
        start.min(upto_len)..upto_len
    }

    /// Appends the local runs of positions below `upto_len`, ascending, physically consecutive blocks merged. Blocks
    /// wholly before `window_start` (0 without a window; else that of the first query) are left out.
    ///
    /// # Panics
    /// If a position of the range has no block.
    pub fn local_runs(&self, upto_len: u32, window_start: u32, out: &mut Vec<KvRun>) {
        self.visit_extents(&self.visible(upto_len, window_start), |piece| {
            if let Segment::Local(run) = piece {
                out.push(run);
            }
        });
    }

    /// The remote runs of the same positions, by creditor, ascending, consecutive entries of a lease merged.
    ///
    /// # Panics
    /// As [`SeqBlocks::local_runs`], and if one of the positions is in [`SeqBlocks::lost`].
    #[must_use]
    pub fn remote_runs(&self, upto_len: u32, window_start: u32) -> BTreeMap<InstanceId, Vec<LeaseRun>> {
        let mut runs: BTreeMap<InstanceId, Vec<LeaseRun>> = BTreeMap::new();
        assert!(self.lost.first().is_none_or(|lost| lost.start >= upto_len), "{:?} are lost", self.lost);
        if self.remote == 0 && self.lost_blocks == 0 {
            return runs;
        }
        self.visit_extents(&self.visible(upto_len, window_start), |piece| {
            if let Segment::Remote { creditor, run } = piece {
                runs.entry(creditor).or_default().push(run);
            }
        });
        runs
    }

    /// Slot of the KV of position `pos`.
    ///
    /// # Panics
    /// If the position has no block or is behind the window.
    #[must_use]
    pub fn slot(&self, pos: u32) -> SlotRef {
        let within = pos % self.block_tokens;
        match self.blocks[index(pos / self.block_tokens)] {
            Placement::Local(block) => SlotRef::Local(block.0 * self.block_tokens + within),
            Placement::Remote(RemoteBlock { creditor, lease, epoch, entry }) => {
                SlotRef::Remote { creditor, lease, epoch, offset: entry * self.block_tokens + within }
            }
            Placement::Lost => panic!("position {pos} has no place"),
            Placement::Gone => panic!("position {pos} is behind the window"),
        }
    }

    /// Releases the blocks that no query at `pos` or later sees with this window.
    pub fn free_behind_window(&mut self, pos: u32, window: u32) -> Freed {
        let first_seen = lagoon_types::run::visible(pos, Some(window)).start;
        let keep_from = (first_seen / self.block_tokens).min(self.blocks());
        let mut freed = Freed::default();
        for block in self.gone..keep_from {
            match std::mem::replace(&mut self.blocks[index(block)], Placement::Gone) {
                Placement::Local(phys) => freed.local.push(phys),
                Placement::Remote(b) => {
                    self.remote -= 1;
                    push_entry(&mut freed.remote, &b);
                }
                Placement::Lost => self.lost_blocks -= 1,
                Placement::Gone => panic!("block {block} was freed before"),
            }
        }
        self.gone = self.gone.max(keep_from);
        self.forget_lost_before(self.gone * self.block_tokens);
        freed
    }

    /// Empties the table and releases everything: local blocks, and of each lease the span of its entries.
    pub fn clear(&mut self) -> Freed {
        let remote = self.leases().collect();
        let local = self.blocks.drain(..).filter_map(|p| match p {
            Placement::Local(block) => Some(block),
            Placement::Remote(_) | Placement::Lost | Placement::Gone => None,
        });
        let freed = Freed { local: local.collect(), remote };
        (self.gone, self.lost_blocks, self.written, self.remote) = (0, 0, 0, 0);
        self.drop_extents();
        self.lost.clear();
        freed
    }

    /// Bytes that the table takes.
    #[must_use]
    pub fn metadata_bytes(&self) -> usize {
        let pieces = self.extents.get().map_or(0, Vec::capacity);
        size_of::<Self>() + self.blocks.capacity() * size_of::<Placement>() + pieces * size_of::<Segment>()
    }
}

/// Adds an entry to the span of its lease in a list of leases, searched from the back.
fn add_entry(leases: &mut Vec<RemoteEntries>, block: &RemoteBlock) {
    let one = RemoteEntries::one(block);
    match leases.iter_mut().rev().find(|l| (l.creditor, l.lease) == (one.creditor, one.lease)) {
        Some(span) => (span.first, span.entries) = (span.first.min(one.first), span.entries.max(one.entries)),
        None => leases.push(one),
    }
}

/// Appends an entry to a list of entry ranges, or extends the last range if the entry follows it.
pub fn push_entry(list: &mut Vec<RemoteEntries>, b: &RemoteBlock) {
    match list.last_mut() {
        Some(last) if (last.creditor, last.lease, last.entries) == (b.creditor, b.lease, b.entry) => last.entries += 1,
        _ => list.push(RemoteEntries::one(b)),
    }
}

/// Joins `piece` to `last` if both are contiguous in memory; else visits `last`. Returns the pending segment.
fn join(last: Option<Segment>, piece: Option<Segment>, visit: &mut impl FnMut(Segment)) -> Option<Segment> {
    match (last, piece) {
        (Some(Segment::Local(a)), Some(Segment::Local(b)))
            if a.base + a.len == b.base && a.first_pos + a.len == b.first_pos =>
        {
            Some(Segment::Local(KvRun { len: a.len + b.len, ..a }))
        }
        (Some(Segment::Remote { creditor, run: a }), Some(Segment::Remote { creditor: other, run: b }))
            if (creditor, a.lease, a.offset + a.len) == (other, b.lease, b.offset)
                && a.first_pos + a.len == b.first_pos =>
        {
            Some(Segment::Remote { creditor, run: LeaseRun { len: a.len + b.len, ..a } })
        }
        (last, piece) => {
            last.into_iter().for_each(visit);
            piece
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const C: InstanceId = InstanceId(9);

    fn grant(lease: u64, blocks: u32) -> RemoteGrant {
        RemoteGrant { creditor: C, lease: LeaseId(lease), epoch: Epoch(5), blocks }
    }

    fn lease_run(lease: u64, offset: u32, len: u32, first_pos: u32) -> LeaseRun {
        LeaseRun { lease: LeaseId(lease), epoch: Epoch(5), offset, len, first_pos }
    }

    /// Blocks of 4: local 0 1 | lease 1 (2 entries) | lease 2 (1 entry) | local 7.
    fn mixed() -> SeqBlocks {
        let mut seq = SeqBlocks::new(4);
        seq.push_local(&[PhysBlock(0), PhysBlock(1)]);
        seq.push_remote(&grant(1, 2));
        seq.push_remote(&grant(2, 1));
        seq.push_local(&[PhysBlock(7)]);
        seq
    }

    fn local(seq: &SeqBlocks, upto: u32, start: u32) -> Vec<KvRun> {
        let mut runs = Vec::new();
        seq.local_runs(upto, start, &mut runs);
        runs
    }

    #[test]
    fn runs_merge_what_is_consecutive_in_memory() {
        let seq = mixed();
        assert_eq!((seq.capacity_tokens(), seq.shortfall(25), seq.remote_blocks(), seq.local_blocks()), (24, 1, 3, 3));
        let first = KvRun { base: 0, len: 8, first_pos: 0 };
        assert_eq!(local(&seq, 22, 0), [first, KvRun { base: 28, len: 2, first_pos: 20 }]);
        assert_eq!(seq.remote_runs(22, 0)[&C], [lease_run(1, 0, 8, 8), lease_run(2, 0, 4, 16)]);
        // A window that starts inside a block keeps that whole block.
        assert_eq!(local(&seq, 22, 6)[0], KvRun { base: 4, len: 4, first_pos: 4 });
        assert_eq!(seq.remote_runs(15, 13)[&C], [lease_run(1, 4, 3, 12)]);
        assert_eq!(local(&seq, 0, 0), []);
    }

    #[test]
    fn chunks_are_cut_where_the_memory_changes() {
        let seq = mixed();
        let mut out = Vec::new();
        seq.segments(6..18, &mut out);
        assert_eq!(
            out,
            [
                Segment::Local(KvRun { base: 6, len: 2, first_pos: 6 }),
                Segment::Remote { creditor: C, run: lease_run(1, 0, 8, 8) },
                Segment::Remote { creditor: C, run: lease_run(2, 0, 2, 16) },
            ]
        );
        assert_eq!(seq.slot(5), SlotRef::Local(5));
        assert_eq!(seq.slot(13), SlotRef::Remote { creditor: C, lease: LeaseId(1), epoch: Epoch(5), offset: 5 });
        assert_eq!(seq.slot(23), SlotRef::Local(31));
    }

    #[test]
    fn blocks_seal_when_they_are_full() {
        let mut seq = mixed();
        let a = seq.advance(5);
        assert_eq!((a.sealed, a.filling), (vec![PhysBlock(0)], vec![PhysBlock(1)]));
        let b = seq.advance(9);
        assert_eq!(b.sealed, [PhysBlock(1)]);
        assert_eq!(b.sealed_remote.iter().map(|r| r.entry).collect::<Vec<_>>(), [0]);
        let c = seq.advance(2);
        assert_eq!(c.sealed_remote.iter().map(|r| r.entry).collect::<Vec<_>>(), [1]);
        assert_eq!(seq.advance(0), Advance::default());
        assert_eq!(seq.written(), 16);
    }

    #[test]
    fn a_window_frees_leading_blocks_and_entries_once() {
        let mut seq = mixed();
        seq.advance(20);
        // A query at 18 with window 8 sees 11..=18: blocks 0 and 1 are behind it, block 2 (8..12) is not.
        let freed = seq.free_behind_window(18, 8);
        assert_eq!((freed.local, freed.remote), (vec![PhysBlock(0), PhysBlock(1)], vec![]));
        let freed = seq.free_behind_window(23, 8);
        let entries =
            |lease, entries| RemoteEntries { creditor: C, lease: LeaseId(lease), epoch: Epoch(5), first: 0, entries };
        assert_eq!(freed.remote, [entries(1, 2)]);
        assert!(seq.free_behind_window(23, 8).is_empty());
        assert_eq!(seq.remote_runs(24, 16)[&C], [lease_run(2, 0, 4, 16)]);
        let rest = seq.clear();
        assert_eq!((rest.local, rest.remote), (vec![PhysBlock(7)], vec![entries(2, 1)]));
        assert_eq!(seq.capacity_tokens(), 0);
    }

    #[test]
    fn clearing_a_half_freed_lease_gives_all_of_it_back() {
        let mut seq = mixed();
        seq.free_behind_window(12, 1);
        let freed = seq.clear();
        let spans: Vec<_> = freed.remote.iter().map(|r| (r.lease.0, r.first, r.entries)).collect();
        assert_eq!(spans, [(1, 1, 2), (2, 0, 1)]);
    }

    #[test]
    #[should_panic(expected = "was freed")]
    fn attending_to_freed_positions_panics() {
        let mut seq = mixed();
        seq.free_behind_window(18, 8);
        let _ = seq.remote_runs(20, 3);
    }
}
