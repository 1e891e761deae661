//! Numbers of blocks by tenant.

use crate::{BlockHash, Tenant};
use std::collections::BTreeMap;

/// Numbers of blocks by tenant; none that is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantCounts(BTreeMap<Tenant, u64>);

impl TenantCounts {
    /// Counts a block.
    pub fn add(&mut self, hash: &BlockHash) {
        *self.0.entry(hash.tenant()).or_default() += 1;
    }

    /// Counts a block no more.
    ///
    /// # Panics
    /// If it was not counted.
    pub fn remove(&mut self, hash: &BlockHash) {
        let count = self.0.get_mut(&hash.tenant()).expect("a block was counted");
        *count -= 1;
        if *count == 0 {
            self.0.remove(&hash.tenant());
        }
    }

    /// Tenants and their numbers of blocks.
    pub fn iter(&self) -> impl Iterator<Item = (Tenant, u64)> {
        self.0.iter().map(|(tenant, count)| (*tenant, *count))
    }
}

impl<'a> FromIterator<&'a BlockHash> for TenantCounts {
    fn from_iter<I: IntoIterator<Item = &'a BlockHash>>(hashes: I) -> Self {
        let mut counts = Self::default();
        hashes.into_iter().for_each(|hash| counts.add(hash));
        counts
    }
}
