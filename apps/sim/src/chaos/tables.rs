//! Checkers of block tables against the rManagers of both sides, and of acknowledgements of moved blocks.

use super::check::{Pool, failure};
use super::run::Failure;
use crate::network::Place;
use crate::process::Process;
use crate::symbolic::Symbolic;
use lagoon_cluster::LentEntry;
use lagoon_kv::{BlockState, Owner, Placement, RemoteBlock};
use lagoon_protocol::LeasePurpose;
use lagoon_types::{InstanceId, LeaseId, SeqId};
use std::collections::{BTreeMap, BTreeSet};

/// Longest time until a sealed block is acknowledged, without faults.
const SEALED_US: u64 = 1_000_000;

/// Checks that every local block of a table belongs to its sequence, alone or shared, or is held.
pub(super) fn own(place: Place, process: &Process<Symbolic>) -> Result<(), Failure> {
    let rm = process.instance.rmanager();
    let mut held = BTreeMap::<_, Vec<_>>::new();
    for (creditor, lease, epoch, first, end) in rm.debtor.held.iter() {
        held.entry((creditor, lease, epoch)).or_default().push(first..end);
    }
    for (seq, placements) in process.instance.tables() {
        for placement in placements {
            let good = match placement {
                Placement::Local(b) => rm.pool.has(Owner::Own(seq), *b),
                Placement::Remote(b) => held
                    .get(&(b.creditor, b.lease, b.epoch))
                    .is_some_and(|ranges| ranges.iter().any(|r| r.contains(&b.entry))),
                Placement::Gone | Placement::Lost => true,
            };
            if !good {
                return failure("table", format!("node {place}: {seq} attends to {placement:?} and does not have it"));
            }
        }
    }
    Ok(())
}

/// Checks that a remote block of a sequence's table is lent for that sequence and not freed; a moved one is sealed.
pub(super) fn lent(
    (debtor, seq, block): (InstanceId, SeqId, &RemoteBlock),
    (place, creditor): (Place, &Process<Symbolic>),
) -> Result<(), Failure> {
    let rm = creditor.instance.rmanager();
    let entry = rm.creditor.entry(block.lease, block.entry);
    let good = entry.is_some_and(|e: LentEntry| {
        let for_it = (e.debtor, e.seq, e.epoch) == (debtor, seq, block.epoch);
        let moved = e.purpose != LeasePurpose::Growth;
        for_it
            && rm.pool.has(Owner::Lent(block.lease), e.block)
            && (!moved || rm.pool.state(e.block) == BlockState::Sealed)
    });
    if good {
        return Ok(());
    }
    failure("table", format!("{debtor}'s {seq} attends to {block:?}, and node {place} has there {entry:?}"))
}

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
