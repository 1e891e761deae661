//! Checkers of a pool: after every event, at rest, and of every answer.

use super::{Log, World};
use crate::golden::max_diff;
use lagoon_kv::Owner;
use lagoon_types::{PhysBlock, RequestError};
use std::collections::BTreeSet;

impl World {
    /// Checks the blocks, leases and block tables of the instances that an event has touched, and their reads.
    pub(super) fn check(&mut self) {
        let touched = std::mem::take(&mut self.sim.touched);
        for place in touched {
            self.leases.check(&self.sim, place).unwrap_or_else(|(checker, why)| panic!("{checker}: {why}"));
            let Some(process) = self.sim.process(place) else { continue };
            let status = process.instance.status();
            assert!(status.running + status.waiting == status.sequences.len(), "place {place}: {status:?}");
        }
        assert_eq!(self.sim.kv.violations, [""; 0]);
    }

    /// Waits until nothing moves, and checks that no memory is used.
    pub fn check_empty(&mut self) {
        self.run_for(2_500);
        self.check_rest();
        let counters: Vec<_> = self.nodes().map(|node| self.kv_counters(node)).collect();
        for (index, counters) in counters.into_iter().enumerate() {
            let Some(instance) = self.instance(index) else { continue };
            let status = instance.status();
            let free = (status.blocks_free, status.blocks_lent, status.blocks_borrowed, status.remote_request_frames);
            assert_eq!(free, (status.blocks_total, 0, 0, 0), "node {index} is not empty: {}", self.describe());
            assert!(
                status.sequences.is_empty() && status.remote_steps == 0,
                "node {index} serves {} steps",
                status.remote_steps
            );
            assert_eq!(status.prefill.stage_blocks_used, 0, "node {index} has KV beside its store for nobody");
            let pool = &instance.rmanager().pool;
            assert!((0..status.blocks_total).all(|b| pool.owner(PhysBlock(b)) == Owner::Free));
            pool.check();
            if let Some(counters) = counters.filter(|_| self.specs[index].rows) {
                // Cached blocks are free in the pool but not on the device. They are unshared here: a shared block
                // that is released is not cached.
                let free = u64::from(status.blocks_total - pool.cached()) * counters.groups_per_block;
                assert_eq!(counters.free + counters.kept, free, "node {index}: page groups that are free");
            }
        }
    }

    /// Checks at rest, without negotiations in progress, that leases lent and held are equal.
    pub fn check_rest(&self) {
        let (mut lent, mut held) = (BTreeSet::new(), BTreeSet::new());
        for (_, process) in self.sim.live() {
            let (rm, me) = (process.instance.rmanager(), process.id());
            assert_eq!((rm.debtor.borrowing(), rm.debtor.held.releasing()), (0, 0), "{}", self.describe());
            lent.extend(
                rm.creditor.iter().map(|(peer, lease, epoch, first, end)| (me, Some(peer), lease, epoch, first, end)),
            );
            held.extend(
                rm.debtor
                    .held
                    .iter()
                    .map(|(peer, lease, epoch, first, end)| (Some(peer), me, lease, epoch, first, end)),
            );
        }
        assert_eq!(lent, held);
    }
}

/// Asserts that a finished request equals the same one on a single instance: the same tokens, and logits within
/// `tolerance`. Returns the largest difference.
///
/// If the single instance's two best logits are closer than twice the tolerance, either token is right, and the rest
/// is not compared.
pub fn assert_same(what: &str, log: &Log, single: &Log, tolerance: f32) -> f32 {
    assert_eq!(log.request.prompt, single.request.prompt);
    assert!(matches!(log.end, Some(Ok(_))), "{what}: ended with {:?} after {} tokens", log.end, log.tokens.len());
    assert_prefix(what, log, single, tolerance, true)
}

/// As [`assert_same`], for a request that may have ended early: its tokens are a prefix of the right answer.
pub fn assert_prefix(what: &str, log: &Log, single: &Log, tolerance: f32, whole: bool) -> f32 {
    let mut largest = 0f32;
    for (i, token) in log.tokens.iter().enumerate() {
        let expected = single.tokens.get(i).unwrap_or_else(|| panic!("{what}: more tokens than a single instance"));
        if !log.logits.is_empty() {
            let diff = max_diff(&log.logits[i], &single.logits[i]);
            assert!(diff <= tolerance, "{what}: logits of token {i} differ by {diff}, at most {tolerance} is right");
            largest = largest.max(diff);
        }
        if token != expected {
            let gap = gap(&single.logits[i]);
            assert!(gap < 2.0 * tolerance, "{what}: token {i} is {token}, not {expected}, at a gap of {gap}");
            return largest;
        }
    }
    if whole {
        assert_eq!(log.tokens.len(), single.tokens.len(), "{what}: another number of tokens");
        assert_eq!(log.end, single.end, "{what}");
    }
    largest
}

/// Difference of the two largest logits.
fn gap(logits: &[f32]) -> f32 {
    let mut sorted = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted[0] - sorted[1]
}

/// Standard deviation of logits.
#[must_use]
pub fn std_of(logits: &[Vec<f32>]) -> f32 {
    let n = logits.iter().map(Vec::len).sum::<usize>() as f32;
    let mean = logits.iter().flatten().sum::<f32>() / n;
    (logits.iter().flatten().map(|x| (x - mean).powi(2)).sum::<f32>() / n).sqrt()
}

/// The error in which the request ended.
#[must_use]
pub fn error_of(log: &Log) -> &RequestError {
    match &log.end {
        Some(Err(error)) => error,
        end => panic!("no error but {end:?}"),
    }
}
