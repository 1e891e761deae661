//! Index from an instance's number to its slot: open addressing in atomic words.
//!
//! It is a hint like the order: a reader checks the row that it finds. A reader that misses an entry (too many hash
//! collisions, or a concurrent update) takes the slow path through the gManager.

use crate::sync::{AtomicU64, Ordering, high, low, word, words};

/// Places that an entry may be in, from its hash on.
const PROBES: usize = 16;

/// A hash table of open addressing, from an instance's number to its slot.
#[derive(Debug)]
pub(crate) struct Index {
    /// Number over slot + 1; 0 is free.
    entries: Box<[AtomicU64]>,
}

impl Index {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { entries: words((capacity * 4).next_power_of_two()) }
    }

    fn places(&self, instance: u32) -> impl Iterator<Item = &AtomicU64> {
        let hash = (u64::from(instance).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        let mask = self.entries.len() - 1;
        (0..PROBES.min(self.entries.len())).map(move |i| &self.entries[(hash + i) & mask])
    }

    pub(crate) fn find(&self, instance: u32) -> Option<u32> {
        let entry = self.places(instance).map(|e| e.load(Ordering::Acquire)).find(|e| high(*e) == instance && *e != 0);
        entry.map(|e| low(e) - 1)
    }

    pub(crate) fn insert(&self, instance: u32, slot: u32) {
        if let Some(free) = self.places(instance).find(|e| e.load(Ordering::Relaxed) == 0) {
            free.store(word(instance, slot + 1), Ordering::Release);
        }
    }

    pub(crate) fn remove(&self, instance: u32) {
        // No tombstone is needed: lookups probe every place.
        if let Some(entry) = self.places(instance).find(|e| high(e.load(Ordering::Relaxed)) == instance) {
            entry.store(0, Ordering::Release);
        }
    }
}
