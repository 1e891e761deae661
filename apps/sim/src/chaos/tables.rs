//! What block tables say, against what the rManagers on both sides know, and the acknowledgements that moves wait for.

use super::check::{Pool, failure};
use super::run::Failure;
use crate::fabric::Place;
use crate::process::Process;
use crate::symbolic::Symbolic;
use lagoon_cluster::LentEntry;
use lagoon_kv::{BlockState, Owner, Placement, RemoteBlock};
use lagoon_protocol::LeasePurpose;
use lagoon_types::{InstanceId, LeaseId, SeqId};
use std::collections::{BTreeMap, BTreeSet};

/// A sealed block's acknowledgement is on its way for less than this while nothing is wrong.
const SEALED_US: u64 = 1_000_000;

/// A block of a table is its sequence's here, alone or with others, or is held.
pub(super) fn own(place: Place, process: &Process<Symbolic>) -> Result<(), Failure> {
    let rm = process.instance.rmanager();
    let mut held = BTreeMap::<_, Vec<_>>::new();
    for (creditor, lease, epoch, first, end) in rm.held() {
        held.entry((creditor, lease, epoch)).or_default().push(first..end);
    }
    for (seq, placements) in process.instance.tables() {
        for placement in placements {
            let good = match placement {
                Placement::Local(b) => rm.pool().has(Owner::Own(seq), *b),
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

/// A remote block of a sequence's table is lent for that sequence by its creditor, which has not freed it; one that was
/// moved there is sealed.
pub(super) fn lent(
    (debtor, seq, block): (InstanceId, SeqId, &RemoteBlock),
    (place, creditor): (Place, &Process<Symbolic>),
) -> Result<(), Failure> {
    let rm = creditor.instance.rmanager();
    let entry = rm.lent_entry(block.lease, block.entry);
    let good = entry.is_some_and(|e: LentEntry| {
        let for_it = (e.debtor, e.seq, e.epoch) == (debtor, seq, block.epoch);
        let moved = e.purpose != LeasePurpose::Growth;
        for_it
            && rm.pool().has(Owner::Lent(block.lease), e.block)
            && (!moved || rm.pool().state(e.block) == BlockState::Sealed)
    });
    if good {
        return Ok(());
    }
    failure("table", format!("{debtor}'s {seq} attends to {block:?}, and node {place} has there {entry:?}"))
}

/// Blocks that were moved, are sealed, and whose debtors have not heard of it, and since when.
#[derive(Debug, Default)]
pub(super) struct Unreported {
    since: BTreeMap<(InstanceId, LeaseId, u32), u64>,
}

impl Unreported {
    /// Now and then: what a creditor has sealed for a move, its debtor hears. With `calm`, nothing explains that it did
    /// not.
    pub(super) fn look(&mut self, world: &Pool, calm: bool) -> Result<(), Failure> {
        let now = world.now_us();
        let mut unacknowledged = BTreeSet::new();
        for (place, process) in world.live() {
            for key @ (creditor, lease, entry) in process.instance.rmanager().unsealed() {
                let Some((_, home)) = world.by_id(creditor) else { continue };
                let rm = home.instance.rmanager();
                let sealed =
                    |e: LentEntry| Some(e.debtor) == process.id() && rm.pool().state(e.block) == BlockState::Sealed;
                if !rm.lent_entry(lease, entry).is_some_and(sealed) {
                    continue;
                }
                let since = *self.since.entry(key).or_insert(now);
                if calm && now - since >= SEALED_US {
                    let age = (now - since) / 1000;
                    let what = format!("node {place} was not told that {creditor} has sealed {entry} of {lease}");
                    return failure("acknowledgement", format!("{what}, for {age} ms"));
                }
                unacknowledged.insert(key);
            }
        }
        self.since.retain(|key, _| unacknowledged.contains(key));
        Ok(())
    }
}
