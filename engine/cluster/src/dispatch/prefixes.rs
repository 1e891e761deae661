//! Where prompts' prefixes were computed: for each hash of a prefix the instances that requests with it went to last.
//!
//! A guess: an instance may have evicted the KV. It is no longer believed to have what it got before as many newer tokens as it has
//! memory for, or before it began anew, and [`Prefixes::learn`] corrects the guess by what instances report.
//!
//! Invariant: who knows a prefix's hash knows the hashes of all shorter ones, as the longest are forgotten first.

use super::PrefixHashes;
use lagoon_types::limits::{PREFIX_INSTANCES_MAX, PREFIX_PLACES_MAX};
use std::collections::BTreeMap;

/// Instances that are counted although no report names them: one that asked for a rest comes back.
const ABSENT_MAX: usize = 1_024;
/// Weight of one report in the mean.
const LEARN: f64 = 0.1;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Prefixes<K> {
    places: BTreeMap<u64, Places<K>>,
    /// Hashes by last use, the longest unused first.
    by_use: BTreeMap<u64, u64>,
    uses: u64,
    computed: BTreeMap<K, Computed>,
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

/// Tokens of prompts and answers that one life of an instance was sent to compute, by this dispatcher and by others that reported it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Computed {
    /// None before it was reported.
    incarnation: Option<u64>,
    /// A number of this count alone: what was noted by another one of the same instance is not there any more.
    count: u64,
    tokens: u64,
}

impl Computed {
    /// Whether an instance with memory for `capacity` tokens still has what it had at an earlier time.
    fn keeps(&self, earlier: &Self, capacity: u64) -> bool {
        self.count == earlier.count && self.tokens - earlier.tokens <= capacity
    }
}

#[derive(Debug)]
struct Places<K> {
    /// Instances, and what each had computed by the time it got the prefix; the latest last.
    instances: Vec<(K, Computed)>,
    used: u64,
}

impl<K> Default for Prefixes<K> {
    fn default() -> Self {
        Self { places: BTreeMap::new(), by_use: BTreeMap::new(), uses: 0, computed: BTreeMap::new(), trust: 1.0 }
    }
}

impl<K: Copy + Ord> Prefixes<K> {
    /// A report names an instance. Of another incarnation than before nothing is believed; one that was declared dead by mistake may have
    /// kept its cache.
    pub(super) fn see(&mut self, instance: K, incarnation: Option<u64>) {
        match self.computed.get_mut(&instance) {
            Some(of) if incarnation.is_none() || of.incarnation == incarnation => return,
            Some(of) if of.incarnation.is_none() => return of.incarnation = incarnation,
            _ => {}
        }
        self.uses += 1;
        self.computed.insert(instance, Computed { incarnation, count: self.uses, tokens: 0 });
    }

    /// Forgets instances that no report names, if there are too many.
    pub(super) fn forget_absent(&mut self, listed: &[K]) {
        if self.computed.len() > listed.len().saturating_add(ABSENT_MAX) {
            self.computed.retain(|key, _| listed.contains(key));
        }
    }

    /// Counts tokens that an instance is sent to compute; nothing for one that no report has named.
    pub(super) fn compute(&mut self, instance: K, tokens: u64) {
        let of = self.computed.get_mut(&instance);
        of.into_iter().for_each(|of| of.tokens = of.tokens.saturating_add(tokens));
    }

    /// Tokens of a prompt that instances are predicted to have in their prefix caches. One look-up a hash, for all instances.
    /// `capacity`: tokens that an instance has memory for, if it is there.
    pub(super) fn cached(&self, prefix: &PrefixHashes, capacity: impl Fn(K) -> Option<u64>) -> CachedAt<K> {
        let mut longest: Vec<(K, u64)> = Vec::new();
        for (length, hash) in (1_u64..).zip(&prefix.hashes) {
            let Some(places) = self.places.get(hash) else { break };
            for (instance, earlier) in &places.instances {
                let now = self.computed.get(instance);
                let keeps = |(now, capacity): (&Computed, u64)| now.keeps(earlier, capacity);
                if !now.zip(capacity(*instance)).is_some_and(keeps) {
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

    /// A request with this prefix goes to `instance`, whose tokens are counted already; nothing for one that no report has named.
    pub(super) fn note(&mut self, hashes: &[u64], instance: K) {
        let Some(computed) = self.computed.get(&instance).copied() else { return };
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

    /// Prefixes, with instances that reports have named.
    fn with(instances: &str) -> Prefixes<char> {
        let mut prefixes = Prefixes::default();
        instances.chars().for_each(|instance| prefixes.see(instance, Some(1)));
        prefixes
    }

    /// Tokens that are believed to be cached at `instance`, which has memory for 1,000.
    fn cached(prefixes: &Prefixes<char>, hashes: &[u64], instance: char) -> u64 {
        prefixes.cached(&prefix(hashes), |_| Some(1_000)).at(instance)
    }

    #[test]
    fn the_longest_known_prefix_counts_where_it_was_computed() {
        let mut prefixes = with("ab");
        prefixes.note(&[1, 2, 3], 'a');
        assert_eq!(cached(&prefixes, &[1, 2, 9], 'a'), 200);
        assert_eq!(cached(&prefixes, &[1, 2, 9], 'b'), 0);
        prefixes.note(&[1, 8], 'b');
        let both = |hashes: &[u64]| ['a', 'b'].map(|instance| cached(&prefixes, hashes, instance));
        assert_eq!(both(&[1, 2]), [200, 100]);
        assert_eq!(both(&[1]), [100, 100], "what many prompts begin with is at each instance that had one");
    }

    #[test]
    fn what_an_instance_has_no_memory_for_any_more_is_not_believed() {
        let mut prefixes = with("a");
        prefixes.note(&[1, 2], 'a');
        prefixes.compute('a', 600);
        prefixes.note(&[1, 7], 'a');
        let after = |prefixes: &mut Prefixes<char>, tokens| {
            prefixes.compute('a', tokens);
            [2, 7].map(|end| cached(prefixes, &[1, end], 'a'))
        };
        assert_eq!(after(&mut prefixes, 400), [200, 200]);
        assert_eq!(after(&mut prefixes, 1), [100, 200], "their common beginning was used later");
        assert_eq!(after(&mut prefixes, 600), [0, 0]);
        prefixes.note(&[1, 2], 'a');
        assert_eq!(prefixes.cached(&prefix(&[1, 2]), |_| None).at('a'), 0, "one that is gone");
    }

    /// A new process at the same address would seem to have what the old one had, once it has computed as much.
    #[test]
    fn an_instance_that_began_anew_has_nothing_and_one_that_rested_has_all() {
        let mut prefixes = with("a");
        prefixes.compute('a', 100);
        prefixes.note(&[1, 2], 'a');
        prefixes.forget_absent(&[]);
        prefixes.see('a', Some(1));
        prefixes.see('a', None);
        assert_eq!(cached(&prefixes, &[1, 2], 'a'), 200, "it rested, and a new gManager has no heartbeat of it yet");
        prefixes.see('a', Some(2));
        for _ in 0..4 {
            assert_eq!(cached(&prefixes, &[1, 2], 'a'), 0);
            prefixes.compute('a', 50);
        }
        // Those that are long gone are forgotten, also if they come back as they were.
        prefixes.note(&[1, 2], 'a');
        ('b'..).take(ABSENT_MAX + 1).for_each(|instance| prefixes.see(instance, None));
        prefixes.forget_absent(&['b']);
        assert_eq!(prefixes.computed.len(), 1);
        prefixes.see('a', Some(2));
        prefixes.compute('a', 200);
        assert_eq!(cached(&prefixes, &[1, 2], 'a'), 0);
    }

    #[test]
    fn instances_without_a_cache_lose_the_trust() {
        let mut prefixes = with("a");
        prefixes.note(&[1, 2, 3], 'a');
        (0..60).for_each(|_| prefixes.learn(300, 0));
        assert!(cached(&prefixes, &[1, 2, 3], 'a') < 20);
        (0..60).for_each(|_| prefixes.learn(10, 300));
        assert_eq!(cached(&prefixes, &[1, 2, 3], 'a'), 300);
    }

    #[test]
    fn the_longest_unused_is_forgotten_and_of_one_prompt_the_longest() {
        let mut prefixes = with("abcdefghijklmnopqrstuvwxyz");
        prefixes.note(&[u64::MAX - 2, u64::MAX - 1, u64::MAX], 'a');
        for hash in 0..PREFIX_PLACES_MAX as u64 - 1 {
            prefixes.note(&[hash], 'a');
        }
        assert_eq!((prefixes.places.len(), prefixes.by_use.len()), (PREFIX_PLACES_MAX, PREFIX_PLACES_MAX));
        assert_eq!(cached(&prefixes, &[u64::MAX - 2, u64::MAX - 1, u64::MAX], 'a'), 100);
        assert_eq!(cached(&prefixes, &[0], 'a'), 100);
        prefixes.note(&[u64::MAX - 9], 'a');
        assert_eq!(cached(&prefixes, &[u64::MAX - 2], 'a'), 0);
        for instance in 'a'..='z' {
            prefixes.note(&[5], instance);
        }
        let known = prefixes.cached(&prefix(&[5]), |_| Some(1_000));
        assert_eq!((known.0.len(), known.at('z')), (PREFIX_INSTANCES_MAX, 100));
    }
}
