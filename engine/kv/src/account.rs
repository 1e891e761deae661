//! Memory accounting: bytes of KV metadata beside the KV itself.
//!
//! Metadata is the pool's owner table, every sequence's block table and the hashing state of leases. The target is under
//! 3 % of the KV, also for small models.

use crate::{BlockPool, LeaseHasher, SeqBlocks};
use lagoon_types::KvShape;

/// Bytes of KV and of its metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvAccount {
    pub kv_bytes: u64,
    pub metadata_bytes: u64,
}

impl KvAccount {
    /// The account of one instance: its pool, the block tables of its sequences, the hashing state of its leases (lent and
    /// borrowed).
    pub fn of<'a>(
        shape: &KvShape,
        block_tokens: u32,
        pool: &BlockPool,
        seqs: impl IntoIterator<Item = &'a SeqBlocks>,
        leases: impl IntoIterator<Item = &'a LeaseHasher>,
    ) -> Self {
        let tokens = u64::from(pool.counts().total) * u64::from(block_tokens);
        let metadata = pool.metadata_bytes()
            + seqs.into_iter().map(SeqBlocks::metadata_bytes).sum::<usize>()
            + leases.into_iter().map(LeaseHasher::metadata_bytes).sum::<usize>();
        Self { kv_bytes: tokens * shape.token_bytes() as u64, metadata_bytes: metadata as u64 }
    }

    /// Metadata bytes per KV byte; 0 for an empty pool.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn overhead(&self) -> f64 {
        if self.kv_bytes == 0 { 0.0 } else { self.metadata_bytes as f64 / self.kv_bytes as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Owner, RemoteGrant};
    use lagoon_types::{Epoch, InstanceId, KvDType, LeaseId, SeqId};

    /// A pool in the worst shape for its metadata: every sequence short, every other block free, as much borrowed as
    /// owned, and a block of every lease half written in every layer.
    fn worst(shape: &KvShape, block_tokens: u32, blocks: u32) -> KvAccount {
        let mut pool = BlockPool::new(blocks);
        let (mut seqs, mut leases) = (Vec::new(), Vec::new());
        for chunk in 0..blocks / 16 {
            let owner = Owner::Own(SeqId(chunk.into()));
            let all = pool.allocate(owner, 16, None).unwrap();
            let (keep, free): (Vec<_>, Vec<_>) = all.iter().partition(|b| b.0 % 2 == 0);
            pool.free(owner, &free);
            let mut seq = SeqBlocks::new(block_tokens);
            seq.push_local(&keep);
            let grant = RemoteGrant {
                creditor: InstanceId(1),
                lease: LeaseId(chunk.into()),
                epoch: Epoch(1),
                blocks: u32::try_from(keep.len()).unwrap(),
            };
            seq.push_remote(&grant);
            seqs.push(seq);
            let mut hasher = LeaseHasher::new(shape.layers as usize, block_tokens, shape.layer_token_bytes());
            for layer in 0..shape.layers as usize {
                hasher.write(layer, &vec![0; shape.layer_token_bytes()], &mut Vec::new());
            }
            leases.push(hasher);
        }
        KvAccount::of(shape, block_tokens, &pool, &seqs, &leases)
    }

    #[test]
    fn metadata_stays_under_three_percent_of_the_kv() {
        let f16 = |layers, kv_heads, head_dim| KvShape { layers, kv_heads, head_dim, dtype: KvDType::F16 };
        // The 125M benchmark model, Llama-3-8B, Llama-2-13B, and a small model of four layers.
        for shape in [f16(12, 4, 64), f16(32, 8, 128), f16(40, 40, 128), f16(4, 4, 32)] {
            let account = worst(&shape, 32, 4096);
            assert!(account.overhead() < 0.03, "{shape:?}: {account:?} is {:.3} %", account.overhead() * 100.0);
            assert!(account.metadata_bytes > 4096 * 17, "the owner table alone is that large");
        }
    }
}
