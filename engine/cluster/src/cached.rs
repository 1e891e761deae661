//! What an instance's prefix cache has, in short: its smallest block hashes, a uniform sample of all. Soft state: whoever looks a
//! prompt up learns what may be there.

use lagoon_kv::BlockPool;
use lagoon_protocol::CacheSummary;
use lagoon_types::limits;

/// The summary of a pool's block hashes.
#[must_use]
pub fn cache_summary(pool: &BlockPool) -> CacheSummary {
    let mut hashes = pool.hashes();
    let sample = hashes.by_ref().take(limits::CACHE_SUMMARY_HASHES);
    let fingerprints: Vec<u8> = sample.flat_map(|hash| hash.fingerprint().to_le_bytes()).collect();
    let complete = hashes.next().is_none() && !fingerprints.is_empty();
    CacheSummary { fingerprints, complete }
}

/// Another instance's prefix cache, as its summary tells it.
#[derive(Clone, Debug, Default)]
pub struct Cached {
    /// Fingerprints of its smallest block hashes, ascending.
    fingerprints: Vec<u64>,
    /// Whether it has no others.
    complete: bool,
}

impl Cached {
    /// Whether nothing is known to be there.
    pub(crate) fn is_empty(&self) -> bool {
        self.fingerprints.is_empty()
    }

    /// Leading blocks of a prompt, by their fingerprints, that it may have.
    #[must_use]
    pub fn leading(&self, prompt: &[u64]) -> u32 {
        let first = self.runs(prompt).into_iter().next();
        first.filter(|(first, _, before)| first == before).map_or(0, |(first, blocks, _)| first + blocks)
    }

    /// Reads a summary.
    #[must_use]
    pub fn new(summary: &CacheSummary) -> Self {
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
    pub(crate) fn runs(&self, prompt: &[u64]) -> Vec<(u32, u32, u32)> {
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

pub(crate) fn numbers(bytes: &[u8], most: usize) -> Vec<u64> {
    bytes.as_chunks().0.iter().take(most).map(|bytes| u64::from_le_bytes(*bytes)).collect()
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

    #[test]
    fn leading_blocks_begin_with_the_first_or_with_what_a_sample_does_not_tell() {
        let of = |fingerprints: &[u64], complete| {
            let fingerprints = fingerprints.iter().flat_map(|f| f.to_le_bytes()).collect();
            Cached::new(&CacheSummary { fingerprints, complete })
        };
        let prompt = [90, 5, 7, 3];
        assert_eq!(of(&[5, 7, 8], false).leading(&prompt), 3, "90 may be there");
        assert_eq!(of(&[5, 7, 8], true).leading(&prompt), 0);
        assert_eq!(of(&[7, 8], false).leading(&prompt), 0, "5 is not there");
        assert_eq!(of(&[3, 5, 7, 90], true).leading(&prompt), 4);
    }
}
