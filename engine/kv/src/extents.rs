//! The free blocks of a pool as maximal extents, found by position and by length.
//!
//! Invariants: extents are disjoint, never empty and never adjacent (neighbours are joined), and both maps hold the
//! same extents. Every operation is logarithmic in the number of extents, of which there are at most half as many as
//! blocks.

use std::collections::{BTreeMap, BTreeSet};

/// Free extents `[start, start + len)`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents {
    by_start: BTreeMap<u32, u32>,
    by_len: BTreeSet<(u32, u32)>,
}

impl Extents {
    /// All of `[0, total)` is free.
    pub(crate) fn new(total: u32) -> Self {
        let mut extents = Self::default();
        if total > 0 {
            extents.put(0, total);
        }
        extents
    }

    fn put(&mut self, start: u32, len: u32) {
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove(&mut self, start: u32, len: u32) {
        assert_eq!(self.by_start.remove(&start), Some(len), "extent {start} is not in the map");
        assert!(self.by_len.remove(&(len, start)), "extent {start} is not in the length set");
    }

    /// Takes up to `n` blocks that start at `start`; returns how many were free there.
    pub(crate) fn take_at(&mut self, start: u32, n: u32) -> u32 {
        let Some((&first, &len)) = self.by_start.range(..=start).next_back() else { return 0 };
        if first + len <= start || n == 0 {
            return 0;
        }
        let taken = n.min(first + len - start);
        self.remove(first, len);
        if start > first {
            self.put(first, start - first);
        }
        if start + taken < first + len {
            self.put(start + taken, first + len - start - taken);
        }
        taken
    }

    /// The shortest extent of at least `n` blocks, else the longest there is, the first of equals: its start, and how
    /// many of the `n` it holds.
    pub(crate) fn best(&self, n: u32) -> Option<(u32, u32)> {
        let &(longest, _) = self.by_len.last()?;
        self.by_len.range((n.min(longest), 0)..).next().map(|&(len, start)| (start, len.min(n)))
    }

    /// Gives a block back and joins it with its neighbours.
    pub(crate) fn give(&mut self, block: u32) {
        let (mut start, mut len) = (block, 1);
        if let Some((&before, &before_len)) = self.by_start.range(..block).next_back()
            && before + before_len == block
        {
            self.remove(before, before_len);
            (start, len) = (before, before_len + 1);
        }
        if let Some(&after_len) = self.by_start.get(&(block + 1)) {
            self.remove(block + 1, after_len);
            len += after_len;
        }
        self.put(start, len);
    }

    /// Every free block, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.by_start.iter().flat_map(|(&start, &len)| start..start + len)
    }

    /// Number of extents.
    pub(crate) fn count(&self) -> usize {
        debug_assert_eq!(self.by_start.len(), self.by_len.len());
        self.by_start.len()
    }
}
