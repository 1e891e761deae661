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

/// Tokens of one prompt by instance; no entry for an instance with none.
#[derive(Debug)]
pub(super) struct CachedTokens<K>(Vec<(K, u64)>);

impl<K: PartialEq> CachedTokens<K> {
    pub(super) fn at(&self, instance: K) -> u64 {
        self.0.iter().find(|(of, _)| *of == instance).map_or(0, |(_, tokens)| *tokens)
    }
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
    /// Tokens of a prompt that instances are predicted to have in their prefix caches. One look-up a hash, for all instances.
    pub(super) fn cached(&self, prefix: &PrefixHashes) -> CachedTokens<K> {
        let mut longest: Vec<(K, u64)> = Vec::new();
        for (at, hash) in prefix.hashes.iter().enumerate().rev() {
            let Some(Place { instance, .. }) = self.places.get(hash) else { continue };
            if longest.iter().all(|(of, _)| of != instance) {
                let tokens = crate::perf::as_f64(at as u64 + 1) * prefix.tokens_per_hash * self.trust;
                longest.push((*instance, u64::try_from(crate::perf::whole(tokens)).unwrap_or(0)));
            }
        }
        CachedTokens(longest)
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
        assert_eq!(prefixes.cached(&prefix(&[1, 2, 9])).at('a'), 200);
        assert_eq!(prefixes.cached(&prefix(&[1, 2, 9])).at('b'), 0);
        prefixes.note(&prefix(&[1, 8]), 'b');
        // `a` has what lies behind, and so what lies before.
        assert_eq!(prefixes.cached(&prefix(&[1, 2])).at('a'), 200);
        assert_eq!(prefixes.cached(&prefix(&[1, 2])).at('b'), 100);
    }

    #[test]
    fn instances_without_a_cache_lose_the_trust() {
        let mut prefixes = Prefixes::default();
        prefixes.note(&prefix(&[1, 2, 3]), 'a');
        (0..60).for_each(|_| prefixes.learn(300, 0));
        assert!(prefixes.cached(&prefix(&[1, 2, 3])).at('a') < 20);
        (0..60).for_each(|_| prefixes.learn(10, 300));
        assert_eq!(prefixes.cached(&prefix(&[1, 2, 3])).at('a'), 300);
    }

    #[test]
    fn the_longest_unused_is_forgotten() {
        let mut prefixes = Prefixes::default();
        for hash in 0..=PREFIX_PLACES_MAX as u64 {
            prefixes.note(&prefix(&[hash]), 'a');
        }
        assert_eq!(prefixes.places.len(), PREFIX_PLACES_MAX);
        assert_eq!(prefixes.by_use.len(), PREFIX_PLACES_MAX);
        assert_eq!(prefixes.cached(&prefix(&[0])).at('a'), 0);
        assert_eq!(prefixes.cached(&prefix(&[1])).at('a'), 100);
    }
}
