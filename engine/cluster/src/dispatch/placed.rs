//! Where prompts went, as dispatchers of one pool tell each other.

use lagoon_types::limits::PLACED_HASHES_MAX;
use std::collections::VecDeque;

/// Prefix of a prompt that went to an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed<K> {
    pub instance: K,
    /// See [`super::PrefixHashes`].
    pub hashes: Vec<u64>,
    /// Tokens of prompt and answer that the instance is expected to compute.
    pub tokens: u64,
}

/// The latest placed prefixes, of at most [`PLACED_HASHES_MAX`] hashes: the oldest are forgotten.
#[derive(Debug)]
pub struct PlacedQueue<K> {
    placed: VecDeque<Placed<K>>,
    hashes: usize,
}

impl<K> Default for PlacedQueue<K> {
    fn default() -> Self {
        Self { placed: VecDeque::new(), hashes: 0 }
    }
}

impl<K> PlacedQueue<K> {
    /// Adds prefixes behind the others.
    pub fn add(&mut self, placed: impl IntoIterator<Item = Placed<K>>) {
        for placed in placed {
            self.hashes += placed.hashes.len();
            self.placed.push_back(placed);
        }
        while self.hashes > PLACED_HASHES_MAX {
            let Some(oldest) = self.placed.pop_front() else { return };
            self.hashes -= oldest.hashes.len();
        }
    }

    /// Removes all, and returns them in their order.
    pub fn take(&mut self) -> Vec<Placed<K>> {
        self.hashes = 0;
        self.placed.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_forgotten() {
        let mut queue = PlacedQueue::default();
        queue.add((0..100).map(|n| Placed { instance: n, hashes: vec![0; PLACED_HASHES_MAX / 10], tokens: 1 }));
        let left: Vec<u16> = queue.take().iter().map(|placed| placed.instance).collect();
        assert_eq!(left, (90..100).collect::<Vec<_>>());
        assert_eq!(queue.take(), []);
    }
}
