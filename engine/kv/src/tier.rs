//! One tier of the prefix cache beside the KV memory: blocks by block hash, bounded by bytes.
//!
//! The least recently used block is evicted first; an insertion and [`Tier::touch`] are uses. The content is the caller's:
//! KV in host memory, or the size of a file.
//!
//! Invariants: `bytes` is the sum of the entries' bytes and at most the limit; each entry is in `order` once.

use crate::{BlockHash, TenantCounts, Tenants};
use std::collections::BTreeMap;

/// Blocks of one tier. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Tier<V> {
    limit_bytes: u64,
    bytes: u64,
    entries: BTreeMap<BlockHash, Entry<V>>,
    /// Hashes in eviction order, by the clock of their last use.
    order: BTreeMap<u64, BlockHash>,
    tenants: TenantCounts,
    clock: u64,
}

/// Progress of a drop of a tier's blocks.
#[derive(Clone, Copy, Debug)]
pub struct TierDrop {
    tenants: Tenants,
    /// Clocks of the uses that are looked at next, and last.
    from: u64,
    until: u64,
}

#[derive(Clone, Debug)]
struct Entry<V> {
    value: V,
    bytes: u64,
    used: u64,
}

impl<V> Tier<V> {
    /// An empty tier of at most `limit_bytes`.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        let (entries, order) = (BTreeMap::new(), BTreeMap::new());
        Self { limit_bytes, bytes: 0, entries, order, tenants: TenantCounts::default(), clock: 0 }
    }

    /// Bytes that it holds at most.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Bytes of its blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of its blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it holds no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether it holds the block of this hash.
    #[must_use]
    pub fn contains(&self, hash: &BlockHash) -> bool {
        self.entries.contains_key(hash)
    }

    /// The content of a block.
    #[must_use]
    pub fn get(&self, hash: &BlockHash) -> Option<&V> {
        self.entries.get(hash).map(|entry| &entry.value)
    }

    /// Its blocks by tenant.
    #[must_use]
    pub fn tenants(&self) -> &TenantCounts {
        &self.tenants
    }

    /// Hashes, the next to be evicted first.
    pub fn hashes(&self) -> impl Iterator<Item = &BlockHash> {
        self.order.values()
    }

    /// Uses a block: it is evicted after all others.
    pub fn touch(&mut self, hash: &BlockHash) {
        let Some(entry) = self.entries.get_mut(hash) else { return };
        self.order.remove(&entry.used);
        self.clock += 1;
        entry.used = self.clock;
        self.order.insert(self.clock, *hash);
    }

    /// Adds or replaces a block, and evicts others until it fits. Returns the evicted blocks; of a block larger than the tier,
    /// that block alone.
    pub fn insert(&mut self, hash: BlockHash, bytes: u64, value: V) -> Vec<(BlockHash, V)> {
        let mut evicted = Vec::new();
        self.remove(&hash);
        if bytes > self.limit_bytes {
            return vec![(hash, value)];
        }
        while self.bytes > self.limit_bytes - bytes {
            let oldest = *self.order.first_key_value().expect("bytes are entries'").1;
            evicted.extend(self.remove(&oldest).map(|value| (oldest, value)));
        }
        self.clock += 1;
        self.bytes += bytes;
        self.order.insert(self.clock, hash);
        self.tenants.add(&hash);
        self.entries.insert(hash, Entry { value, bytes, used: self.clock });
        evicted
    }

    /// A drop of what it holds now.
    #[must_use]
    pub fn begin_drop(&self, tenants: Tenants) -> TierDrop {
        TierDrop { tenants, from: 0, until: self.clock }
    }

    /// Looks at the next `most` blocks of a drop that were not used since it began, and removes those of its tenants. Returns these, and
    /// whether there are more to look at.
    pub fn drop_next(&mut self, of: &mut TierDrop, most: usize) -> (Vec<BlockHash>, bool) {
        let left = self.order.range(of.from..).take_while(|(used, _)| **used <= of.until);
        let looked: Vec<(u64, BlockHash)> = left.take(most).map(|(used, hash)| (*used, *hash)).collect();
        of.from = looked.last().map_or(of.from, |(used, _)| used + 1);
        let is_more = looked.len() == most;
        let gone: Vec<BlockHash> =
            looked.into_iter().map(|(_, hash)| hash).filter(|hash| of.tenants.have(hash)).collect();
        gone.iter().for_each(|hash| drop(self.remove(hash)));
        (gone, is_more)
    }

    /// Removes a block.
    pub fn remove(&mut self, hash: &BlockHash) -> Option<V> {
        let Entry { value, bytes, used } = self.entries.remove(hash)?;
        self.bytes -= bytes;
        self.order.remove(&used);
        self.tenants.remove(hash);
        Some(value)
    }

    /// Checks the invariants. Linear.
    ///
    /// # Panics
    /// If they do not hold.
    pub fn check(&self) {
        assert_eq!(self.entries.values().map(|entry| entry.bytes).sum::<u64>(), self.bytes, "bytes are the entries'");
        assert!(self.bytes <= self.limit_bytes, "{} of {} bytes", self.bytes, self.limit_bytes);
        let order: BTreeMap<u64, BlockHash> = self.entries.iter().map(|(hash, entry)| (entry.used, *hash)).collect();
        assert_eq!(order, self.order, "each block is in the eviction order once");
        assert_eq!(self.entries.keys().collect::<TenantCounts>(), self.tenants, "blocks are counted by tenant");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(n: u8) -> BlockHash {
        BlockHash([n; 32])
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut tier = Tier::new(30);
        for n in 1..=3 {
            assert_eq!(tier.insert(hash(n), 10, n), []);
        }
        tier.touch(&hash(1));
        assert_eq!(tier.insert(hash(4), 11, 4), [(hash(2), 2), (hash(3), 3)]);
        assert_eq!((tier.len(), tier.bytes(), tier.get(&hash(1))), (2, 21, Some(&1)));
        assert_eq!(tier.insert(hash(5), 31, 5), [(hash(5), 5)], "larger than the tier");
        assert_eq!(tier.hashes().collect::<Vec<_>>(), [&hash(1), &hash(4)]);
        tier.check();
    }

    #[test]
    fn blocks_that_were_used_since_stay() {
        let mut tier = Tier::new(30);
        for n in 1..=3 {
            tier.insert(hash(n), 10, n);
        }
        let mut of = tier.begin_drop(Tenants::default());
        tier.touch(&hash(1));
        assert_eq!(tier.drop_next(&mut of, 1), (vec![hash(2)], true));
        assert_eq!(tier.drop_next(&mut of, 2), (vec![hash(3)], false));
        assert_eq!(tier.drop_next(&mut of, 1), (vec![], false));
        assert_eq!((tier.len(), tier.bytes()), (1, 10));
        tier.check();
    }

    #[test]
    fn blocks_of_other_tenants_stay() {
        let mut tier = Tier::new(100);
        for n in 1..=6 {
            tier.insert(hash(n), 10, n);
        }
        // The tenant of such a hash is its number, four times.
        let mut of = tier.begin_drop(Tenants { key: Some(0x0303_0303), salt: None });
        assert_eq!(tier.drop_next(&mut of, 2), (vec![], true));
        assert_eq!(tier.drop_next(&mut of, 2), (vec![hash(3)], true));
        assert_eq!(tier.drop_next(&mut of, 3), (vec![], false));
        assert_eq!(tier.len(), 5);
        tier.check();
    }

    proptest! {
        /// Against a list in order of use.
        #[test]
        fn it_equals_a_list(limit in 0_u64..50, uses in proptest::collection::vec((0_u8..3, 0_u8..12, 1_u64..20), 0..200)) {
            let mut tier = Tier::new(limit);
            let mut list: Vec<(u8, u64)> = Vec::new();
            for (what, n, bytes) in uses {
                let at = list.iter().position(|(of, _)| *of == n);
                match what {
                    0 => {
                        at.map(|at| list.remove(at));
                        let mut gone = Vec::new();
                        if bytes > limit {
                            gone.push(n);
                        } else {
                            while list.iter().map(|(_, bytes)| bytes).sum::<u64>() + bytes > limit {
                                gone.push(list.remove(0).0);
                            }
                            list.push((n, bytes));
                        }
                        let evicted: Vec<u8> = tier.insert(hash(n), bytes, n).into_iter().map(|(_, n)| n).collect();
                        prop_assert_eq!(evicted, gone);
                    }
                    1 => {
                        tier.touch(&hash(n));
                        at.map(|at| list.remove(at)).into_iter().for_each(|used| list.push(used));
                    }
                    _ => prop_assert_eq!(tier.remove(&hash(n)), at.map(|at| list.remove(at).0)),
                }
                tier.check();
                let hashes: Vec<BlockHash> = tier.hashes().copied().collect();
                prop_assert_eq!(hashes, list.iter().map(|(n, _)| hash(*n)).collect::<Vec<_>>());
            }
        }
    }
}
