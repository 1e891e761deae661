//! [`LentBlocks`]: the rBlocks of a lease by entry, and by extent, so that runs of a lease are found without a look at every entry.

use lagoon_types::PhysBlock;
use std::ops::Range;

/// Part of a write that goes to consecutive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WritePiece {
    /// First token, counted from the start of the write.
    pub token0: u32,
    /// Its slot in the store.
    pub slot0: u32,
    pub tokens: u32,
}

/// Unreleased entries in sequence whose blocks are consecutive in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    entry: u32,
    block: u32,
    blocks: u32,
}

impl Extent {
    fn end(&self) -> u32 {
        self.entry + self.blocks
    }

    /// The tokens of `range`, counted from the lease's start, that are in this extent. `range` begins before its end.
    fn piece(&self, range: &Range<u32>, block_tokens: u32) -> WritePiece {
        let first = self.entry * block_tokens;
        let start = first.max(range.start);
        let slot0 = self.block * block_tokens + (start - first);
        WritePiece { token0: start - range.start, slot0, tokens: range.end.min(self.end() * block_tokens) - start }
    }
}

/// The blocks of a lease. See the module's documentation.
#[derive(Debug)]
pub(super) struct LentBlocks {
    /// By entry; `None` once released.
    entries: Vec<Option<PhysBlock>>,
    /// Of `entries`, as long as possible, ascending.
    extents: Vec<Extent>,
}

impl LentBlocks {
    pub(super) fn new(blocks: Vec<PhysBlock>) -> Self {
        let mut lent = Self { entries: blocks.into_iter().map(Some).collect(), extents: Vec::new() };
        lent.find_extents();
        lent
    }

    fn find_extents(&mut self) {
        self.extents.clear();
        for (entry, block) in (0..).zip(&self.entries) {
            let Some(PhysBlock(block)) = *block else { continue };
            match self.extents.last_mut() {
                Some(last) if (last.end(), last.block + last.blocks) == (entry, block) => last.blocks += 1,
                _ => self.extents.push(Extent { entry, block, blocks: 1 }),
            }
        }
    }

    /// Blocks by entry; `None` once released.
    pub(super) fn entries(&self) -> &[Option<PhysBlock>] {
        &self.entries
    }

    /// Number of entries, with released ones.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.entries.len()).expect("a lease has at most the pool's blocks")
    }

    /// The block of an entry that is not released.
    pub(super) fn get(&self, entry: u32) -> Option<PhysBlock> {
        self.entries.get(entry as usize).copied().flatten()
    }

    /// Blocks of unreleased entries.
    pub(super) fn lent(&self) -> impl Iterator<Item = PhysBlock> + '_ {
        self.entries.iter().flatten().copied()
    }

    /// Releases entries and returns their blocks; entries released already are left out.
    pub(super) fn take(&mut self, entries: Range<u32>) -> Vec<PhysBlock> {
        let end = entries.end.min(self.len());
        let range = entries.start.min(end) as usize..end as usize;
        let taken: Vec<PhysBlock> = self.entries[range].iter_mut().filter_map(Option::take).collect();
        if !taken.is_empty() {
            self.find_extents();
        }
        taken
    }

    /// Tokens of `range`, counted from the lease's start, less those of released entries, as physically consecutive pieces.
    pub(super) fn pieces(&self, range: Range<u32>, block_tokens: u32) -> impl Iterator<Item = WritePiece> + '_ {
        let first = self.extents.partition_point(|extent| extent.end() * block_tokens <= range.start);
        let found = self.extents[first..].iter();
        let end = range.end;
        found
            .take_while(move |extent| extent.entry * block_tokens < end)
            .map(move |extent| extent.piece(&range, block_tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pieces found by a look at every token.
    fn by_token(lent: &LentBlocks, range: Range<u32>, block_tokens: u32) -> Vec<WritePiece> {
        let mut pieces: Vec<WritePiece> = Vec::new();
        for token in range.clone() {
            let Some(PhysBlock(block)) = lent.get(token / block_tokens) else { continue };
            let (slot, token) = (block * block_tokens + token % block_tokens, token - range.start);
            match pieces.last_mut() {
                Some(last) if (last.slot0 + last.tokens, last.token0 + last.tokens) == (slot, token) => {
                    last.tokens += 1
                }
                _ => pieces.push(WritePiece { token0: token, slot0: slot, tokens: 1 }),
            }
        }
        pieces
    }

    proptest! {
        #[test]
        fn pieces_are_those_of_single_tokens(
            blocks in prop::collection::vec(0_u32..12, 1..12),
            released in prop::collection::vec((0_u32..12, 0_u32..4), 0..4),
            (start, len, block_tokens) in (0_u32..40, 1_u32..40, 1_u32..5),
        ) {
            let mut lent = LentBlocks::new(blocks.into_iter().map(PhysBlock).collect());
            let all = lent.len();
            for (first, count) in released {
                let expected: Vec<_> = (first..(first + count).min(all)).filter_map(|entry| lent.get(entry)).collect();
                prop_assert_eq!(lent.take(first..first + count), expected);
            }
            prop_assert_eq!(lent.len(), all);
            let range = start.min(all * block_tokens)..(start + len).min(all * block_tokens);
            let found: Vec<_> = lent.pieces(range.clone(), block_tokens).collect();
            prop_assert_eq!(found, by_token(&lent, range, block_tokens));
        }
    }
}
