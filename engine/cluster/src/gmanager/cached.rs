//! What members' prefix caches have, by their summaries, and who may cache runs of a prompt: soft state. A run that is not
//! there any more costs its debtor a refusal, and the creditor verifies every use.

use super::GManager;
use lagoon_protocol::{BorrowAdvice, BorrowQuery, CacheSummary, CachedRun};
use lagoon_types::{InstanceId, limits};
use lagoon_view::Flags;
use std::cmp::Reverse;

/// A member's prefix cache, as it reported it.
#[derive(Clone, Debug, Default)]
pub(super) struct Cached {
    /// Fingerprints of its smallest block hashes, ascending.
    fingerprints: Vec<u64>,
    /// Whether it has no others.
    complete: bool,
}

impl Cached {
    pub(super) fn new(summary: &CacheSummary) -> Self {
        let mut fingerprints = numbers(&summary.fingerprints, limits::CACHE_SUMMARY_HASHES);
        fingerprints.sort_unstable();
        Self { fingerprints, complete: summary.complete }
    }

    /// Whether it has a block; `None` if the summary does not say.
    fn has(&self, fingerprint: u64) -> Option<bool> {
        let known = self.complete || self.fingerprints.last().is_some_and(|last| fingerprint <= *last);
        known.then(|| self.fingerprints.binary_search(&fingerprint).is_ok())
    }

    /// Runs of `prompt` that it may have, each from a block that it has to another one: first block, number, and blocks
    /// before of which the summary does not tell.
    fn runs(&self, prompt: &[u64]) -> Vec<(u32, u32, u32)> {
        let mut runs: Vec<(u32, u32, u32)> = Vec::new();
        let (mut is_open, mut lacks) = (false, 0);
        for (at, fingerprint) in (0..).zip(prompt) {
            let is_full = runs.len() == limits::CACHED_RUNS_MAX;
            match (self.has(*fingerprint), runs.last_mut().filter(|_| is_open)) {
                (Some(true), Some(run)) => run.1 = at + 1 - run.0,
                (Some(true), None) if is_full => break,
                (Some(true), None) => {
                    runs.push((at, 1, at - lacks));
                    is_open = true;
                }
                (Some(false), _) => (is_open, lacks) = (false, at + 1),
                (None, _) => {}
            }
        }
        runs
    }
}

fn numbers(bytes: &[u8], most: usize) -> Vec<u64> {
    bytes.as_chunks().0.iter().take(most).map(|bytes| u64::from_le_bytes(*bytes)).collect()
}

impl GManager {
    /// Answers a debtor's query about a prompt's cached blocks: the longest runs of it that others may cache.
    pub(super) fn cached_runs(&self, query: &BorrowQuery, advice: BorrowAdvice) -> BorrowAdvice {
        // In a large pool a long prompt's first blocks only: one query must not hold up the others.
        let most = (limits::SEARCH_LOOKS_MAX / self.members.len().max(1)).min(limits::SEARCH_HASHES_MAX);
        let prompt = numbers(&query.prefix, most);
        let exclude = &query.exclude[..query.exclude.len().min(limits::EXCLUDE_MAX)];
        let mut found = Vec::new();
        for (&InstanceId(instance), member) in &self.members {
            let excluded = instance == query.debtor || exclude.contains(&instance);
            if excluded || member.cached.fingerprints.is_empty() || member.flags().has(Flags::BARRED) {
                continue;
            }
            found.extend(member.cached.runs(&prompt).into_iter().map(|run| (run, instance)));
            let order = |((first, blocks, _), instance): &((u32, u32, u32), u32)| (Reverse(*blocks), *first, *instance);
            found.sort_unstable_by_key(order);
            found.truncate(limits::CACHED_RUNS_MAX);
        }
        let address = |instance| self.members.get(&InstanceId(instance)).map(|of| of.registration.quic_addr.clone());
        let run = |((first, blocks, before), instance)| {
            let quic_addr = address(instance).unwrap_or_default();
            CachedRun { instance, quic_addr, first, blocks, before }
        };
        BorrowAdvice { candidates: Vec::new(), cached: found.into_iter().map(run).collect(), ..advice }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_go_on_over_blocks_that_a_sample_does_not_tell() {
        let of = |fingerprints: &[u64], complete| {
            let fingerprints = fingerprints.iter().flat_map(|f| f.to_le_bytes()).collect();
            Cached::new(&CacheSummary { fingerprints, complete })
        };
        let prompt = [5, 90, 7, 3, 80, 2];
        // 90 and 80 are above all that the sample has.
        assert_eq!(of(&[5, 7, 8], false).runs(&prompt), [(0, 3, 0)]);
        assert_eq!(of(&[2, 3, 5, 7, 8], false).runs(&prompt), [(0, 6, 0)]);
        assert_eq!(of(&[5, 7, 8], true).runs(&prompt), [(0, 1, 0), (2, 1, 0)]);
        assert_eq!(of(&[2, 8], false).runs(&prompt), [(5, 1, 1)], "80 may be there");
        assert_eq!(of(&[], true).runs(&prompt), []);
        assert_eq!(of(&[], false).runs(&prompt), []);
    }
}
