//! Prefix affinity of prefill workers: which worker may have which prompt prefix in its prefix cache (docs/adr/0016), by what each
//! computed for this instance and by the summary of its cache that it reports ([`lagoon_cluster::Cached`]). A guess, never verified: a wrong one costs
//! only time.
//!
//! Prefixes are known by the block hash of every [`STRIDE`]th block. The least recently used is evicted first; of one
//! prompt the deepest, as it is of use only with all hashes before it.

use crate::batch::Batch;
use crate::cx::Cx;
use lagoon_kv::BlockHash;
use lagoon_types::limits::{AFFINITY_HASHES_MAX, SEARCH_HASHES_MAX};
use lagoon_types::{InstanceId, SeqId};
use std::collections::BTreeMap;

/// One of so many blocks is remembered, so that a long prompt is looked up quickly.
const STRIDE: usize = 4;

/// Prefixes by worker. See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Affinity {
    known: BTreeMap<BlockHash, (InstanceId, u64)>,
    /// The same hashes by time of use.
    order: BTreeMap<u64, BlockHash>,
    clock: u64,
}

/// The hashes of a prompt that are remembered, the deepest first, each with its number of blocks.
fn marks(hashes: &[BlockHash]) -> impl Iterator<Item = (u32, BlockHash)> {
    let last = hashes.len() - hashes.len() % STRIDE;
    (1..=last / STRIDE).rev().map(|n| n * STRIDE).map(|n| (u32::try_from(n).unwrap_or(u32::MAX), hashes[n - 1]))
}

impl Affinity {
    /// Records that a worker computed blocks with these hashes.
    fn remember(&mut self, worker: InstanceId, hashes: &[BlockHash]) {
        for (_, hash) in marks(hashes) {
            self.clock += 1;
            if let Some((_, old)) = self.known.insert(hash, (worker, self.clock)) {
                self.order.remove(&old);
            }
            self.order.insert(self.clock, hash);
        }
        while self.known.len() > AFFINITY_HASHES_MAX {
            let Some((_, oldest)) = self.order.pop_first() else { return };
            self.known.remove(&oldest);
        }
    }

    /// Leading blocks of these hashes that each worker may have cached.
    fn found(&self, hashes: &[BlockHash]) -> BTreeMap<InstanceId, u32> {
        let mut found = BTreeMap::new();
        for (blocks, hash) in marks(hashes) {
            if let Some((worker, _)) = self.known.get(&hash) {
                found.entry(*worker).or_insert(blocks);
            }
        }
        found
    }

    /// Forgets a worker: its prefix cache may be lost.
    pub(super) fn forget(&mut self, worker: InstanceId) {
        let gone = self.known.extract_if(.., |_, (of, _)| *of == worker);
        gone.for_each(|(_, (_, at))| _ = self.order.remove(&at));
    }
}

impl super::Prefills {
    /// Leading tokens of a prompt that workers may have cached, by worker.
    pub(super) fn known_elsewhere(&self, cx: &Cx, batch: &mut Batch, id: SeqId) -> BTreeMap<InstanceId, u32> {
        // The last token is computed in any case.
        let whole = batch.seq(id).map_or(0, |seq| (seq.len() - 1) / cx.config.block_tokens);
        batch.hash_tokens(cx, id, whole);
        let Some(seq) = batch.seq(id) else { return BTreeMap::new() };
        let hashes = &seq.block_hashes[..seq.block_hashes.len().min(whole as usize)];
        let mut found = self.affinity.found(hashes);
        let fingerprints: Vec<u64> = hashes.iter().take(SEARCH_HASHES_MAX).map(BlockHash::fingerprint).collect();
        for (worker, state) in &self.workers {
            let blocks = state.cached.leading(&fingerprints);
            if blocks > 0 {
                found.entry(*worker).and_modify(|known| *known = blocks.max(*known)).or_insert(blocks);
            }
        }
        found.values_mut().for_each(|blocks| *blocks *= cx.config.block_tokens);
        found
    }

    /// Records that a worker computed the first `tokens` tokens of a sequence.
    pub(super) fn remember_worker(&mut self, cx: &Cx, batch: &mut Batch, id: SeqId, worker: InstanceId, tokens: u32) {
        let whole = tokens / cx.config.block_tokens;
        batch.hash_tokens(cx, id, whole);
        let Some(seq) = batch.seq(id) else { return };
        self.affinity.remember(worker, &seq.block_hashes[..seq.block_hashes.len().min(whole as usize)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: InstanceId = InstanceId(1);
    const B: InstanceId = InstanceId(2);

    /// Block hashes of `n` blocks, the first `shared` of them those of every prompt.
    fn hashes(seed: u16, shared: u16, n: u16) -> Vec<BlockHash> {
        let hash = |block: u16| {
            let mut hash = [0; 32];
            hash[..2].copy_from_slice(&block.to_be_bytes());
            hash[2..4].copy_from_slice(&if block < shared { 0 } else { seed }.to_be_bytes());
            BlockHash(hash)
        };
        (0..n).map(hash).collect()
    }

    fn found(of: &Affinity, hashes: &[BlockHash]) -> Vec<(InstanceId, u32)> {
        of.found(hashes).into_iter().collect()
    }

    #[test]
    fn the_longest_beginning_of_each_worker_is_found() {
        let mut of = Affinity::default();
        of.remember(A, &hashes(1, 0, 18));
        assert_eq!(found(&of, &hashes(1, 0, 30)), [(A, 16)]);
        assert_eq!(found(&of, &hashes(1, 0, 10)), [(A, 8)]);
        assert_eq!(found(&of, &hashes(2, 0, 30)), []);
        // Another one computes what begins alike: the beginning is its, the rest is not.
        of.remember(A, &hashes(1, 8, 16));
        of.remember(B, &hashes(2, 8, 12));
        assert_eq!(found(&of, &hashes(1, 8, 30)), [(A, 16), (B, 8)]);
        of.forget(A);
        assert_eq!(found(&of, &hashes(1, 8, 30)), [(B, 8)]);
        assert_eq!(of.known.len(), of.order.len());
    }

    #[test]
    fn what_was_used_longest_ago_is_forgotten_the_deepest_first() {
        let mut of = Affinity::default();
        let blocks = u16::try_from(STRIDE * 64).unwrap();
        let prompts = u16::try_from(AFFINITY_HASHES_MAX / 64).unwrap();
        (0..prompts).for_each(|n| of.remember(A, &hashes(n, 0, blocks)));
        assert_eq!(of.known.len(), AFFINITY_HASHES_MAX);
        of.remember(B, &hashes(prompts, 0, u16::try_from(STRIDE).unwrap()));
        assert_eq!((of.known.len(), of.order.len()), (AFFINITY_HASHES_MAX, AFFINITY_HASHES_MAX));
        let stride = u32::try_from(STRIDE).unwrap();
        assert_eq!(found(&of, &hashes(0, 0, blocks)), [(A, u32::from(blocks) - stride)]);
        assert_eq!(found(&of, &hashes(1, 0, blocks)), [(A, u32::from(blocks))]);
    }
}
