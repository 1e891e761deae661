//! Where prompts' prefixes were computed: for each hash of a prefix the instance that a request with it went to last.
//!
//! A guess: the instance may have evicted the KV. [`Prefixes::learn`] corrects the guess by what instances report.

use super::PrefixHashes;
use lagoon_types::limits::PREFIX_PLACES_MAX;
use std::collections::BTreeMap;

/// Weight of one report in the mean.
const LEARN: f64 = 0.1;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Prefixes<K> {
    places: BTreeMap<u64, Place<K>>,
    /// Hashes by last use, the longest unused first.
    by_use: BTreeMap<u64, u64>,
    uses: u64,
    /// Cached tokens that instances report, as a share of those predicted.
    trust: f64,
}

#[derive(Debug)]
struct Place<K> {
    instance: K,
    used: u64,
}

impl<K> Default for Prefixes<K> {
    fn default() -> Self {
        Self { places: BTreeMap::new(), by_use: BTreeMap::new(), uses: 0, trust: 1.0 }
    }
}

impl<K: Copy + PartialEq> Prefixes<K> {
    /// Tokens of a prompt that `instance` is predicted to have in its prefix cache.
    pub(super) fn cached_tokens(&self, prefix: &PrefixHashes, instance: K) -> u64 {
        let is_there = |hash: &u64| self.places.get(hash).is_some_and(|place| place.instance == instance);
        let hashes = prefix.hashes.iter().rposition(is_there).map_or(0, |last| last + 1);
        let tokens = crate::perf::as_f64(hashes as u64) * prefix.tokens_per_hash * self.trust;
        u64::try_from(crate::perf::whole(tokens)).unwrap_or(0)
    }

    /// A request with this prefix goes to `instance`.
    pub(super) fn note(&mut self, prefix: &PrefixHashes, instance: K) {
        for hash in &prefix.hashes {
            self.uses += 1;
            let used = self.uses;
            if let Some(before) = self.places.insert(*hash, Place { instance, used }) {
                self.by_use.remove(&before.used);
            }
            self.by_use.insert(used, *hash);
        }
        while self.places.len() > PREFIX_PLACES_MAX {
            let Some((_, hash)) = self.by_use.pop_first() else { return };
            self.places.remove(&hash);
        }
    }

    /// An instance reports how many tokens were cached of a prompt for which `predicted` were.
    pub(super) fn learn(&mut self, predicted: u64, reported: u64) {
        if predicted > 0 {
            let share = (crate::perf::as_f64(reported) / crate::perf::as_f64(predicted)).min(2.0);
            self.trust = (self.trust * (1.0 - LEARN + LEARN * share)).clamp(0.05, 1.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(hashes: &[u64]) -> PrefixHashes {
        PrefixHashes { hashes: hashes.to_vec(), tokens_per_hash: 100.0 }
    }

    #[test]
    fn the_longest_known_prefix_counts_where_it_was_computed() {
        let mut prefixes = Prefixes::default();
        prefixes.note(&prefix(&[1, 2, 3]), 'a');
        assert_eq!(prefixes.cached_tokens(&prefix(&[1, 2, 9]), 'a'), 200);
        assert_eq!(prefixes.cached_tokens(&prefix(&[1, 2, 9]), 'b'), 0);
        prefixes.note(&prefix(&[1, 8]), 'b');
        // `a` has what lies behind, and so what lies before.
        assert_eq!(prefixes.cached_tokens(&prefix(&[1, 2]), 'a'), 200);
        assert_eq!(prefixes.cached_tokens(&prefix(&[1, 2]), 'b'), 100);
    }

    #[test]
    fn instances_without_a_cache_lose_the_trust() {
        let mut prefixes = Prefixes::default();
        prefixes.note(&prefix(&[1, 2, 3]), 'a');
        (0..60).for_each(|_| prefixes.learn(300, 0));
        assert!(prefixes.cached_tokens(&prefix(&[1, 2, 3]), 'a') < 20);
        (0..60).for_each(|_| prefixes.learn(10, 300));
        assert_eq!(prefixes.cached_tokens(&prefix(&[1, 2, 3]), 'a'), 300);
    }

    #[test]
    fn the_longest_unused_is_forgotten() {
        let mut prefixes = Prefixes::default();
        for hash in 0..=PREFIX_PLACES_MAX as u64 {
            prefixes.note(&prefix(&[hash]), 'a');
        }
        assert_eq!(prefixes.places.len(), PREFIX_PLACES_MAX);
        assert_eq!(prefixes.by_use.len(), PREFIX_PLACES_MAX);
        assert_eq!(prefixes.cached_tokens(&prefix(&[0]), 'a'), 0);
        assert_eq!(prefixes.cached_tokens(&prefix(&[1]), 'a'), 100);
    }
}
