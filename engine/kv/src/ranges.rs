//! Set of numbers as maximal ranges, for the released or sealed entries of a lease.
//!
//! Invariant: ranges are disjoint, never empty and never adjacent.

use std::collections::BTreeMap;
use std::ops::Range;

/// Set of `u32` numbers as maximal ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    /// End by start.
    ranges: BTreeMap<u32, u32>,
    len: u32,
}

impl RangeSet {
    /// Count of numbers in the set.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it holds no number.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it holds `n`.
    #[must_use]
    pub fn contains(&self, n: u32) -> bool {
        self.ranges.range(..=n).next_back().is_some_and(|(_, end)| n < *end)
    }

    /// Adds a range; returns how many of its numbers are new.
    pub fn insert(&mut self, range: Range<u32>) -> u32 {
        if range.is_empty() {
            return 0;
        }
        let (mut start, mut end, mut had) = (range.start, range.end, 0);
        // Those that touch the new one, from the last that starts at or before its end.
        while let Some((&s, &e)) = self.ranges.range(..=end).next_back().filter(|(_, e)| **e >= start) {
            self.ranges.remove(&s);
            had += e - s;
            (start, end) = (start.min(s), end.max(e));
        }
        self.ranges.insert(start, end);
        let new = (end - start) - had;
        self.len += new;
        new
    }

    /// The maximal ranges, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        self.ranges.iter().map(|(start, end)| *start..*end)
    }

    /// The maximal ranges of `within` that are not in the set, ascending.
    pub fn gaps(&self, within: Range<u32>) -> impl Iterator<Item = Range<u32>> + '_ {
        let mut at = within.start;
        let tail = std::iter::once(within.end..within.end);
        self.iter().chain(tail).filter_map(move |range| {
            let gap = at..range.start.min(within.end);
            at = at.max(range.end);
            (!gap.is_empty()).then_some(gap)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_the_set_of_its_numbers(
            ranges in prop::collection::vec((0u32..40, 0u32..10), 0..20),
            within in (0u32..30, 0u32..30),
        ) {
            let (mut set, mut model) = (RangeSet::default(), BTreeSet::new());
            for (start, len) in ranges {
                let new = (start..start + len).filter(|n| model.insert(*n)).count();
                prop_assert_eq!(set.insert(start..start + len) as usize, new);
                prop_assert!(set.iter().flatten().eq(model.iter().copied()));
                prop_assert_eq!(set.len() as usize, model.len());
                let ends: Vec<_> = set.iter().collect();
                prop_assert!(ends.windows(2).all(|w| w[0].end < w[1].start) && ends.iter().all(|r| !r.is_empty()));
            }
            (0..60).for_each(|n| assert_eq!(set.contains(n), model.contains(&n)));
            let within = within.0..within.0 + within.1;
            let gaps: Vec<_> = set.gaps(within.clone()).collect();
            prop_assert!(gaps.iter().cloned().flatten().eq(within.filter(|n| !model.contains(n))));
            prop_assert!(gaps.windows(2).all(|w| w[0].end < w[1].start));
        }
    }
}
