//! Rings of windowed KV: who has which, and how far each is filled (ADR 24).

use lagoon_cluster::mutants::{self, Mutant};
use lagoon_types::RingRows;

/// A running sequence's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ring {
    index: u32,
    /// The ring was filled from this position on, without a gap.
    from: u32,
    /// The next position that it takes.
    head: u32,
}

impl Ring {
    /// The ring on the way to position `pos`: as it is, if it can be filled on to there; begun anew `warm_up` positions before
    /// `pos`, if it was begun too late, is further behind than that, or is past `pos`.
    pub(super) fn towards(self, pos: u32, warm_up: u32) -> Self {
        let late = u32::from(mutants::is(Mutant::RingLate)).min(warm_up);
        let start = pos.saturating_sub(warm_up - late);
        let is_whole = self.from == 0 || self.from <= start;
        if is_whole && (start..=pos).contains(&self.head) {
            return self;
        }
        Self { from: start, head: start, ..self }
    }

    /// The next position that it takes.
    pub(super) const fn head(self) -> u32 {
        self.head
    }

    pub(super) const fn rows(self, warm_up: bool) -> RingRows {
        RingRows { ring: self.index, from: self.from, warm_up }
    }

    pub(super) fn fill(&mut self, rows: u32) {
        self.head += rows;
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
        Ring { index, from: 0, head: 0 }
    }

    pub(super) fn put(&mut self, ring: Ring) {
        self.free.push(ring.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ring(from: u32, head: u32) -> Ring {
        Ring { index: 3, from, head }
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
