//! Numbers of blocks by tenant.

use crate::{BlockHash, Tenant};
use std::collections::{BTreeMap, BTreeSet};

/// Numbers of blocks by tenant, also in their order: a heartbeat looks at the tenants with most blocks, not at all.
///
/// Invariants: no number is 0; `ranked` has each entry of `blocks` once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantCounts {
    blocks: BTreeMap<Tenant, u64>,
    ranked: BTreeSet<(u64, Tenant)>,
}

impl TenantCounts {
    /// Counts a block.
    pub fn add(&mut self, hash: &BlockHash) {
        let tenant = hash.tenant();
        let count = self.blocks.entry(tenant).or_default();
        self.ranked.remove(&(*count, tenant));
        *count += 1;
        self.ranked.insert((*count, tenant));
    }

    /// Counts a block no more.
    ///
    /// # Panics
    /// If it was not counted.
    pub fn remove(&mut self, hash: &BlockHash) {
        let tenant = hash.tenant();
        let count = self.blocks.get_mut(&tenant).expect("a block was counted");
        self.ranked.remove(&(*count, tenant));
        *count -= 1;
        if *count == 0 {
            self.blocks.remove(&tenant);
        } else {
            self.ranked.insert((*count, tenant));
        }
    }

    /// Blocks of a tenant.
    #[must_use]
    pub fn of(&self, tenant: &Tenant) -> u64 {
        self.blocks.get(tenant).copied().unwrap_or(0)
    }

    /// The `most` tenants with most blocks.
    pub fn top(&self, most: usize) -> impl Iterator<Item = Tenant> {
        self.ranked.iter().rev().take(most).map(|(_, tenant)| *tenant)
    }
}

impl<'a> FromIterator<&'a BlockHash> for TenantCounts {
    fn from_iter<I: IntoIterator<Item = &'a BlockHash>>(hashes: I) -> Self {
        let mut counts = Self::default();
        hashes.into_iter().for_each(|hash| counts.add(hash));
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IdentityRoot;
    use lagoon_types::{KvDType, ModelHash};

    #[test]
    fn tenants_are_ranked_by_blocks_while_these_come_and_go() {
        let root =
            IdentityRoot { model: ModelHash([0; 32]), adapter: b"", dtype: KvDType::F16, rope: b"", block_tokens: 4 };
        let blocks = |salt: &str, n: u32| -> Vec<BlockHash> {
            let root = BlockHash::root(&root).salted(salt);
            (0..n).map(|block| root.then(&[block])).collect()
        };
        let [a, b, c] = [("a", 3), ("b", 5), ("c", 4)].map(|(salt, n)| blocks(salt, n));
        let [of_a, of_b, of_c] = [&a, &b, &c].map(|blocks| blocks[0].tenant());
        let mut counts: TenantCounts = [&a, &b, &c].into_iter().flatten().collect();
        assert_eq!(counts.top(2).collect::<Vec<_>>(), [of_b, of_c]);
        b[..2].iter().for_each(|hash| counts.remove(hash));
        c.iter().for_each(|hash| counts.remove(hash));
        counts.add(&a[0]);
        assert_eq!(counts.top(3).collect::<Vec<_>>(), [of_a, of_b]);
        assert_eq!([of_a, of_b, of_c].map(|tenant| counts.of(&tenant)), [4, 3, 0]);
    }
}
