//! Checker of acknowledgements of moved blocks.

use super::check::{Pool, failure};
use super::run::Failure;
use lagoon_cluster::LentEntry;
use lagoon_kv::BlockState;
use lagoon_types::{InstanceId, LeaseId};
use std::collections::{BTreeMap, BTreeSet};

/// Longest time until a sealed block is acknowledged, without faults.
const SEALED_US: u64 = 1_000_000;

/// Moved and sealed blocks whose debtors are not informed yet, with the time since when.
#[derive(Debug, Default)]
pub(super) struct Unreported {
    since: BTreeMap<(InstanceId, LeaseId, u32), u64>,
}

impl Unreported {
    /// Checks that debtors learn of sealed blocks of their moves. With `calm`, no fault can explain a delay.
    pub(super) fn look(&mut self, world: &Pool, calm: bool) -> Result<(), Failure> {
        let now = world.now_us();
        let mut unacknowledged = BTreeSet::new();
        for (place, process) in world.live() {
            for key @ (creditor, lease, entry) in process.instance.rmanager().debtor.held.unsealed() {
                let Some((_, home)) = world.by_id(creditor) else { continue };
                let rm = home.instance.rmanager();
                let sealed =
                    |e: LentEntry| Some(e.debtor) == process.id() && rm.pool.state(e.block) == BlockState::Sealed;
                if !rm.creditor.entry(lease, entry).is_some_and(sealed) {
                    continue;
                }
                let since = *self.since.entry(key).or_insert(now);
                if calm && now - since >= SEALED_US {
                    let age = (now - since) / 1000;
                    let what = format!("node {place} did not learn that {creditor} has sealed {entry} of {lease}");
                    return failure("acknowledgement", format!("{what}, for {age} ms"));
                }
                unacknowledged.insert(key);
            }
        }
        self.since.retain(|key, _| unacknowledged.contains(key));
        Ok(())
    }
}
