//! Checkers of a pool: after every event, at rest, and of every answer.

use super::{Log, Node, STRANGER_ID, World};
use crate::golden::max_diff;
use lagoon_cluster::Revoked;
use lagoon_kv::Owner;
use lagoon_sim::shared;
use lagoon_types::{PhysBlock, RequestError};
use std::collections::BTreeSet;

impl World {
    /// Checks that blocks add up, and that creditors lend all that debtors hold.
    pub(super) fn check(&self) {
        for (index, node) in self.nodes.iter().enumerate() {
            let Some(instance) = &node.instance else { continue };
            let (rm, status) = (instance.rmanager(), instance.status());
            shared::blocks(instance).unwrap_or_else(|why| panic!("node {index}: {why}"));
            assert!(status.running + status.waiting == status.sequences.len(), "node {index}: {status:?}");
            let me = status.instance;
            // Skips a fenced instance that does not know it yet: peers may have freed its blocks.
            if self.fenced.get(&index).is_some_and(|fences| status.fences <= *fences) {
                continue;
            }
            for (creditor, lease, epoch, first, end) in rm.debtor.held.iter() {
                if creditor == STRANGER_ID || self.dead_leases.contains(&lease) {
                    continue;
                }
                let home = self.nodes.iter().find(|n| n.id() == Some(creditor));
                let taken = |r: &&Revoked| r.lease == lease && r.entries.start < end && first < r.entries.end;
                if home.is_some_and(|n| n.live().rmanager().creditor.revoked().any(|r| taken(&r))) {
                    continue;
                }
                let has = |l: &(_, _, _, u32, u32)| l.1 == lease && l.3 <= first && end <= l.4;
                let lent = home.and_then(|n| n.live().rmanager().creditor.iter().find(has));
                let Some((debtor, _, lent_epoch, _, _)) = lent else {
                    panic!("node {index} holds {creditor}'s {lease}, which is not lent");
                };
                assert_eq!((Some(debtor), lent_epoch), (me, epoch));
            }
        }
    }

    /// Waits until nothing moves, and checks that no memory is used.
    pub fn check_empty(&mut self) {
        self.run_for(2_500);
        self.check_rest();
        let counters: Vec<_> = self.nodes.iter_mut().map(Node::kv_counters).collect();
        for (index, (node, counters)) in self.nodes.iter().zip(counters).enumerate() {
            let Some(instance) = &node.instance else { continue };
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
            if let Some(counters) = counters.filter(|_| node.spec.rows) {
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
        for node in self.nodes.iter().filter(|n| n.instance.is_some()) {
            let (rm, me) = (node.live().rmanager(), node.id());
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
