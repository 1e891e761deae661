//! Where prompts' prefixes were computed: for each hash of a prefix the instances that requests with it went to last.
//!
//! A guess: an instance may have evicted the KV. It is no longer believed to have what it got before as many newer tokens as it has
//! memory for, and [`Prefixes::learn`] corrects the guess by what instances report.
//!
//! Invariant: who knows a prefix's hash knows the hashes of all shorter ones, as the longest are forgotten first.

use super::PrefixHashes;
use lagoon_types::limits::{PREFIX_INSTANCES_MAX, PREFIX_PLACES_MAX};
use std::collections::BTreeMap;

/// Weight of one report in the mean.
const LEARN: f64 = 0.1;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Prefixes<K> {
    places: BTreeMap<u64, Places<K>>,
    /// Hashes by last use, the longest unused first.
    by_use: BTreeMap<u64, u64>,
    uses: u64,
    /// Cached tokens that instances report, as a share of those predicted.
    trust: f64,
}

/// Tokens of one prompt by instance; no entry for an instance with none.
#[derive(Debug)]
pub(super) struct CachedAt<K>(Vec<(K, u64)>);

impl<K: PartialEq> CachedAt<K> {
    pub(super) fn at(&self, instance: K) -> u64 {
        self.0.iter().find(|(of, _)| *of == instance).map_or(0, |(_, tokens)| *tokens)
    }
}

/// Tokens that an instance has computed, as far as this dispatcher knows, and how many it can keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) computed: u64,
    pub(super) capacity: u64,
}

impl Memory {
    /// Whether it still has what it had at `computed`. An instance that has computed less is another one.
    fn keeps(&self, computed: u64) -> bool {
        self.computed.checked_sub(computed).is_some_and(|newer| newer <= self.capacity)
    }
}

#[derive(Debug)]
struct Places<K> {
    /// Instances, and what each had computed by the time it got the prefix; the latest last.
    instances: Vec<(K, u64)>,
    used: u64,
}

impl<K> Default for Prefixes<K> {
    fn default() -> Self {
        Self { places: BTreeMap::new(), by_use: BTreeMap::new(), uses: 0, trust: 1.0 }
    }
}

impl<K: Copy + PartialEq> Prefixes<K> {
    /// Tokens of a prompt that instances are predicted to have in their prefix caches. One look-up a hash, for all instances.
    /// `memory`: of an instance, if it is known.
    pub(super) fn cached(&self, prefix: &PrefixHashes, memory: impl Fn(K) -> Option<Memory>) -> CachedAt<K> {
        let mut longest: Vec<(K, u64)> = Vec::new();
        for (length, hash) in (1_u64..).zip(&prefix.hashes) {
            let Some(places) = self.places.get(hash) else { break };
            for (instance, computed) in &places.instances {
                if memory(*instance).is_none_or(|memory| !memory.keeps(*computed)) {
                    continue;
                }
                match longest.iter_mut().find(|(of, _)| of == instance) {
                    Some(of) => of.1 = length,
                    None => longest.push((*instance, length)),
                }
            }
        }
        for (_, length) in &mut longest {
            let tokens = crate::perf::as_f64(*length) * prefix.tokens_per_hash * self.trust;
            *length = u64::try_from(crate::perf::whole(tokens)).unwrap_or(0);
        }
        CachedAt(longest)
    }

    /// A request with this prefix goes to `instance`, which will have computed so many tokens then.
    pub(super) fn note(&mut self, hashes: &[u64], instance: K, computed: u64) {
        for hash in hashes.iter().rev() {
            self.uses += 1;
            let places = self.places.entry(*hash).or_insert(Places { instances: Vec::new(), used: self.uses });
            self.by_use.remove(&std::mem::replace(&mut places.used, self.uses));
            self.by_use.insert(self.uses, *hash);
            places.instances.retain(|(of, _)| *of != instance);
            if places.instances.len() == PREFIX_INSTANCES_MAX {
                places.instances.remove(0);
            }
            places.instances.push((instance, computed));
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

    /// Tokens that are believed to be cached at `instance` once it has computed so many, with memory for 1,000.
    fn cached(prefixes: &Prefixes<char>, hashes: &[u64], instance: char, computed: u64) -> u64 {
        prefixes.cached(&prefix(hashes), |_| Some(Memory { computed, capacity: 1_000 })).at(instance)
    }

    #[test]
    fn the_longest_known_prefix_counts_where_it_was_computed() {
        let mut prefixes = Prefixes::default();
        prefixes.note(&[1, 2, 3], 'a', 0);
        assert_eq!(cached(&prefixes, &[1, 2, 9], 'a', 0), 200);
        assert_eq!(cached(&prefixes, &[1, 2, 9], 'b', 0), 0);
        prefixes.note(&[1, 8], 'b', 0);
        let both = |hashes: &[u64]| ['a', 'b'].map(|instance| cached(&prefixes, hashes, instance, 0));
        assert_eq!(both(&[1, 2]), [200, 100]);
        assert_eq!(both(&[1]), [100, 100], "what many prompts begin with is at each instance that had one");
    }

    #[test]
    fn what_an_instance_has_no_memory_for_any_more_is_not_believed() {
        let mut prefixes = Prefixes::default();
        prefixes.note(&[1, 2], 'a', 300);
        prefixes.note(&[1, 7], 'a', 900);
        let at = |computed| [2, 7].map(|end| cached(&prefixes, &[1, end], 'a', computed));
        assert_eq!(at(1_300), [200, 200]);
        assert_eq!(at(1_301), [100, 200], "their common beginning was used later");
        assert_eq!(at(1_901), [0, 0]);
        assert_eq!(at(299), [0, 0], "an instance that began anew");
        assert_eq!(prefixes.cached(&prefix(&[1, 2]), |_| None).at('a'), 0, "one that is gone");
    }

    #[test]
    fn instances_without_a_cache_lose_the_trust() {
        let mut prefixes = Prefixes::default();
        prefixes.note(&[1, 2, 3], 'a', 0);
        (0..60).for_each(|_| prefixes.learn(300, 0));
        assert!(cached(&prefixes, &[1, 2, 3], 'a', 0) < 20);
        (0..60).for_each(|_| prefixes.learn(10, 300));
        assert_eq!(cached(&prefixes, &[1, 2, 3], 'a', 0), 300);
    }

    #[test]
    fn the_longest_unused_is_forgotten_and_of_one_prompt_the_longest() {
        let mut prefixes = Prefixes::default();
        prefixes.note(&[u64::MAX - 2, u64::MAX - 1, u64::MAX], 'a', 0);
        for hash in 0..PREFIX_PLACES_MAX as u64 - 1 {
            prefixes.note(&[hash], 'a', 0);
        }
        assert_eq!((prefixes.places.len(), prefixes.by_use.len()), (PREFIX_PLACES_MAX, PREFIX_PLACES_MAX));
        assert_eq!(cached(&prefixes, &[u64::MAX - 2, u64::MAX - 1, u64::MAX], 'a', 0), 100);
        assert_eq!(cached(&prefixes, &[0], 'a', 0), 100);
        prefixes.note(&[u64::MAX - 9], 'a', 0);
        assert_eq!(cached(&prefixes, &[u64::MAX - 2], 'a', 0), 0);
        for instance in 'a'..='z' {
            prefixes.note(&[5], instance, 0);
        }
        let known = prefixes.cached(&prefix(&[5]), |_| Some(Memory { computed: 0, capacity: 1 }));
        assert_eq!((known.0.len(), known.at('z')), (PREFIX_INSTANCES_MAX, 100));
    }
}
